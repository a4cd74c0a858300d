"""Stop an Ignite training on two ranks inside an epoch, and go on with three: no image is lost.

    python examples/ignite_resume.py

It starts its ranks itself: the usual trainer, evaluator, Checkpoint and ProgressBar, on the digits
of scikit-learn. Beside them ranks count how often they train on each image in each epoch.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, ProgressBar
from ignite.metrics import Accuracy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardplug_ignite import ShardHandler

EPOCHS, TEST_IMAGES, STOP_AT = 4, 359, 60


def make_loader(part: slice, **options: Any) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Make a plain loader, as for a single process; a row is an image, its digit, its number."""
    digits = load_digits()
    images = torch.tensor(digits.data[part], dtype=torch.float32) / 16
    rows = TensorDataset(images, torch.tensor(digits.target[part]), torch.arange(len(images)))
    return DataLoader(rows, **options)


def without_number(batch: Any, **_: Any) -> Any:
    """Give the model what it learns from."""
    return batch[:2]


def train(local_rank: int, folder: Path, stop_at: int | None) -> None:
    """Train on one rank: from the start, or from a checkpoint if there is one."""
    torch.manual_seed(0)
    training = make_loader(slice(TEST_IMAGES, None), batch_size=16, shuffle=True)
    test = make_loader(slice(TEST_IMAGES), batch_size=64)
    model = idist.auto_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = idist.auto_optim(torch.optim.Adam(model.parameters(), lr=0.005))
    loss = nn.CrossEntropyLoss()
    trainer = create_supervised_trainer(model, optimizer, loss, prepare_batch=without_number)
    evaluator = create_supervised_evaluator(
        model, {"accuracy": Accuracy()}, prepare_batch=without_number
    )
    shard = ShardHandler(training, optimizer)
    shard.attach(trainer)
    ShardHandler(mode="eval").attach(evaluator)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(test))
    if idist.get_rank() == 0:
        ProgressBar(desc=f"{idist.get_world_size()} ranks").attach(trainer)

    to_save = {"trainer": trainer, "model": model, "optimizer": optimizer, "shard": shard}
    saver = DiskSaver(str(folder), require_empty=False)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=10), Checkpoint(to_save, saver))
    if stop_at is not None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop_at), trainer.terminate)
    for path in folder.glob("checkpoint_*.pt"):
        Checkpoint.load_objects(to_save, path)

    times = torch.zeros(EPOCHS, len(training.dataset))  # type: ignore[arg-type]  # it is sized

    @trainer.on(Events.ITERATION_COMPLETED)
    def count(trainer: Engine) -> None:
        batch: Any = trainer.state.batch
        real = batch[2][: shard.loader.valid_rows]  # the rest fills up the last batch of an epoch
        times[shard.loader.epoch, real] += 1

    trainer.run(training, max_epochs=EPOCHS)
    report(idist.all_reduce(times), folder / "times", evaluator.state.metrics)


def report(times: Any, path: Path, metrics: dict[str, float]) -> None:
    """Say how often images were trained on, here and before."""
    if idist.get_rank() != 0:
        return
    ranks = idist.get_world_size()
    print(f"{ranks} ranks: {int(times.sum())} images trained on", flush=True)
    if path.exists():
        times += torch.load(path)
        once = int((times == 1).sum())
        print(f"{EPOCHS} epochs of {times.shape[1]} images: {once} trained on once, ", end="")
        print(f"{times.numel() - once} twice or never")
        print(f"accuracy {metrics['accuracy']:.3f} on {TEST_IMAGES} test images", flush=True)
    torch.save(times, path)


def main() -> None:
    """Train on two ranks for some iterations, and on three to the end."""
    with tempfile.TemporaryDirectory() as name:
        for ranks, stop_at in ((2, STOP_AT), (3, None)):
            where = f"file://{name}/ranks-{ranks}"
            with idist.Parallel(
                "gloo", nproc_per_node=ranks, init_method=where, start_method="fork"
            ) as parallel:
                parallel.run(train, Path(name), stop_at)


if __name__ == "__main__":
    main()
