"""Train on digits with Ignite, stop, and go on, on as many ranks as there are then.

    torchrun --nproc-per-node 2 examples/ignite_resume.py --stop-at 60
    torchrun --nproc-per-node 3 examples/ignite_resume.py

The usual trainer, evaluator, Checkpoint and ProgressBar. Ranks write down the images that they
train on; in the end it is counted who was trained on how often.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, PiecewiseLinear, ProgressBar
from ignite.metrics import ROC_AUC, Accuracy
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed import is_torchelastic_launched
from torch.utils.data import DataLoader, TensorDataset

from shardplug_ignite import ShardHandler, evened

EPOCHS, TEST_IMAGES = 4, 359
FOLDER = Path("ignite_resume")


def make_loader(part: slice, batch_size: int, shuffle: bool) -> DataLoader:
    """Make a plain loader; a row is an image, its digit, and its number."""
    digits = load_digits()
    images = torch.tensor(digits.data[part], dtype=torch.float32) / 16
    rows = TensorDataset(images, torch.tensor(digits.target[part]), torch.arange(len(images)))
    return DataLoader(rows, batch_size=batch_size, shuffle=shuffle)


def without_number(batch: Any, device: Any, non_blocking: bool) -> Any:
    """Give the model what it learns from; batches are where they should be already."""
    return batch[0], batch[1]


def make_evaluator(model: nn.Module) -> Engine:
    """Evaluate each image once, though the images do not divide by the ranks."""

    def odd(output: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return output[0].softmax(1)[:, 1::2].sum(1), output[1] % 2

    plain = getattr(model, "module", model)  # ranks may have unequal numbers of rows
    metrics = {"accuracy": Accuracy(), "auc": evened(ROC_AUC(odd))}
    evaluator = create_supervised_evaluator(plain, metrics, prepare_batch=without_number)
    ShardHandler(mode="eval").attach(evaluator)
    return evaluator


def train(local_rank: int, stop_at: int | None) -> None:
    """Train on one rank: from the start, or from the latest checkpoint."""
    torch.manual_seed(0)
    model = idist.auto_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.Adam(model.parameters())
    loss = nn.CrossEntropyLoss()
    trainer = create_supervised_trainer(model, optimizer, loss, prepare_batch=without_number)
    state: Any = trainer.state
    shard = ShardHandler(optimizer=optimizer)
    shard.attach(trainer)
    rate: Any = PiecewiseLinear(optimizer, "lr", [(0, 0.01), (300, 0.001)])
    rate.attach(trainer, shard.step_event)
    seen: list[tuple[int, int]] = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def write_down() -> None:
        rows = state.batch[2][: shard.loader.valid_rows].tolist()
        seen.extend((shard.loader.epoch, row) for row in rows)

    saved = {"trainer": trainer, "model": model, "optimizer": optimizer, "rate": rate}
    saved["shard"] = shard
    saver = DiskSaver(str(FOLDER), create_dir=True, require_empty=False)
    keep = Checkpoint(saved, saver, global_step_transform=lambda *_: state.shard.global_step)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=10), keep)
    if stop_at is not None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop_at), trainer.terminate)
    evaluator, test_loader = make_evaluator(model), make_loader(slice(TEST_IMAGES), 64, False)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(test_loader))
    if idist.get_rank() == 0:
        ProgressBar(desc="training").attach(trainer)

    for path in FOLDER.glob("*.pt"):  # the latest: the others were taken away
        Checkpoint.load_objects(saved, torch.load(path, weights_only=True))
    trainer.run(make_loader(slice(TEST_IMAGES, None), 16, True), max_epochs=EPOCHS)

    name = f"seen-{idist.get_world_size()}-{idist.get_rank()}.json"
    (FOLDER / name).write_text(json.dumps(seen))
    idist.barrier()
    if stop_at is None and idist.get_rank() == 0:
        report(state.shard.global_step, evaluator.state.metrics)


def report(iterations: int, metrics: dict[str, Any]) -> None:
    """Count who was trained on how often, before and after, and say what came of it."""
    times: Counter[Any] = Counter()
    for path in FOLDER.glob("seen-*.json"):
        times.update(map(tuple, json.loads(path.read_text())))
    once = sum(count == 1 for count in times.values())
    print(f"{idist.get_world_size()} ranks, {iterations} iterations in all")
    print(f"images of all epochs: {once} trained on once, {len(times) - once} not once")
    print(f"accuracy {metrics['accuracy']:.4f}, even or odd: AUC {metrics['auc']:.4f}")


def main() -> None:
    """Train on all ranks of torchrun, else on this one alone."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--stop-at", type=int, help="end after so many iterations: a multiple of 10"
    )
    stop_at = parser.parse_args().stop_at
    backend = None
    if is_torchelastic_launched():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    with idist.Parallel(backend=backend) as parallel:
        parallel.run(train, stop_at)


if __name__ == "__main__":
    main()
