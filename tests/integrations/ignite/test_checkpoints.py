"""Ignite's own checkpoints on real ranks: killed, and resumed on as many and on more.

Two processes live through whole, killed and resumed trainings; three go on from what they left.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from ignite.handlers import LRScheduler as IgniteLRScheduler
from ignite.metrics import ROC_AUC, Accuracy
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

from shardplug import Comm
from shardplug_ignite import ShardHandler, evened
from tests.launch import run_processes

NUM_SAMPLES = 22
EPOCHS = 3
BEFORE, AFTER = 2, 3
STEPS = 18  # of two ranks: 22 samples in batches of two
KILLS = sorted(random.Random(8).sample(range(2, STEPS), 3))

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated"),
    pytest.mark.timeout(180),
]


class KilledError(Exception):
    """Ends a training."""


@dataclass
class Training:
    """What one rank brought back from one training."""

    batches: list[tuple[int, list[int]]] = field(default_factory=list)
    weights: torch.Tensor | None = None
    aucs: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.rand(NUM_SAMPLES, 3, generator=generator)
    inputs[:, 0] = torch.arange(NUM_SAMPLES)
    return TensorDataset(inputs, (inputs[:, 1] > inputs[:, 2]).long())


class Model(nn.Module):
    """Drops out, so that the random generators of the ranks count."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(rows[:, 1:])
        return found


def train(
    comm: Comm, folder: str, *, kill_at: int | None = None, load: str | None = None
) -> Training:
    """The script: the same whether it begins or goes on."""
    torch.manual_seed(0)
    model = idist.auto_model(Model())
    torch.manual_seed(comm.rank if load is None else 77)
    report = Training()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.05)
    trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss())
    handler = ShardHandler(optimizer=optimizer)
    every: Any = Events.ITERATION_COMPLETED
    handler.attach(trainer, snapshot=every)
    schedule: Any = IgniteLRScheduler(ExponentialLR(optimizer, 0.97))
    schedule.attach(trainer, handler.step_event)

    @trainer.on(Events.ITERATION_COMPLETED)
    def note() -> None:
        loader, batch = handler.loader, trainer.state.batch
        assert isinstance(batch, list)
        rows = batch[0][: loader.valid_rows, 0].int().tolist()
        report.batches.append((loader.epoch, rows))

    validate(trainer, model, report)
    objects = {
        "trainer": trainer,
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "shard": handler,
    }
    if kill_at is not None:
        state: Any = trainer.state
        saver = DiskSaver(folder, create_dir=True, require_empty=False)
        keep = Checkpoint(
            objects, saver, n_saved=1, global_step_transform=lambda *_: state.shard.global_step
        )
        trainer.add_event_handler(every, keep)
        trainer.add_event_handler(every(once=kill_at), kill)
    if load is not None:
        Checkpoint.load_objects(objects, torch.load(load, weights_only=True))
    loader = DataLoader(data(), batch_size=2, shuffle=True)
    try:
        trainer.run(loader, max_epochs=EPOCHS)
    except KilledError:
        return report
    report.weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    return report


def kill() -> None:
    raise KilledError


def validate(trainer: Engine, model: nn.Module, report: Training) -> None:
    """Evaluate 5 samples after each epoch: some ranks have two, others one."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model

    def scores(output: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        predicted, target = output
        return predicted.softmax(1)[:, 1], target

    evaluator = create_supervised_evaluator(inner, {"accuracy": Accuracy()})
    evened(ROC_AUC(output_transform=scores)).attach(evaluator, "auc")
    ShardHandler(mode="eval").attach(evaluator)
    inputs, targets = data().tensors
    loader = DataLoader(TensorDataset(inputs[:5], targets[:5]), batch_size=2)

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate() -> None:
        metrics = evaluator.run(loader).metrics
        report.accuracies.append(metrics["accuracy"])
        report.aucs.append(metrics["auc"])


def live(comm: Comm, folder: str) -> dict[str, Training]:
    idist.set_local_rank(comm.rank)  # Ignite would guess it, and warn
    found = {"whole": train(comm, folder)}
    for kill_at in KILLS:
        own = f"{folder}/{kill_at}"
        found[f"killed {kill_at}"] = train(comm, own, kill_at=kill_at)
        comm.barrier()  # rank 0 has written
        found[f"resumed {kill_at}"] = train(comm, own, load=checkpoint(own))
    return found


def go_on(comm: Comm, folder: str) -> dict[str, Training]:
    idist.set_local_rank(comm.rank)
    return {
        f"resumed {kill_at}": train(comm, folder, load=checkpoint(f"{folder}/{kill_at}"))
        for kill_at in KILLS
    }


def checkpoint(folder: str) -> str:
    (found,) = Path(folder).glob("*.pt")
    return str(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def before(folder: str) -> list[dict[str, Training]]:
    return run_processes(BEFORE, live, folder, timeout_s=120.0)


@pytest.fixture(scope="module")
def after(folder: str, before: object) -> list[dict[str, Training]]:
    return run_processes(AFTER, go_on, folder, timeout_s=120.0)


def rows_by_epoch(trainings: list[Training]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(EPOCHS)]
    for training in trainings:
        for epoch, rows in training.batches:
            found[epoch] += rows
    return [sorted(rows) for rows in found]


EACH_ONCE = [list(range(NUM_SAMPLES))] * EPOCHS


def test_a_training_sees_each_sample_once_in_each_epoch(before: list[dict[str, Training]]) -> None:
    whole = [found["whole"] for found in before]
    assert [len(training.batches) for training in whole] == [STEPS] * BEFORE
    assert rows_by_epoch(whole) == EACH_ONCE


@pytest.mark.parametrize("kill_at", KILLS)
def test_a_killed_training_ends_with_the_same_batches_and_weights(
    before: list[dict[str, Training]], kill_at: int
) -> None:
    for found in before:
        whole, rest = found["whole"], found[f"resumed {kill_at}"]
        assert found[f"killed {kill_at}"].batches == whole.batches[:kill_at]
        assert rest.batches == whole.batches[kill_at:]
        torch.testing.assert_close(rest.weights, whole.weights, rtol=0, atol=1e-6)
        assert rest.accuracies == whole.accuracies[len(whole.accuracies) - len(rest.accuracies) :]


@pytest.mark.parametrize("kill_at", KILLS)
def test_on_another_number_of_ranks_nothing_is_lost_and_nothing_comes_twice(
    before: list[dict[str, Training]], after: list[dict[str, Training]], kill_at: int
) -> None:
    killed = [found[f"killed {kill_at}"] for found in before]
    rest = [found[f"resumed {kill_at}"] for found in after]
    assert rows_by_epoch(killed + rest) == EACH_ONCE
    weights = [training.weights for training in rest]
    assert all(torch.equal(each, weights[0]) for each in weights)  # type: ignore[arg-type]


def test_metrics_of_unequal_ranks_are_those_of_all_rows(
    before: list[dict[str, Training]], after: list[dict[str, Training]]
) -> None:
    """3 and 2 rows on two ranks, 2, 2 and 1 on three; all ranks have one value."""
    for found in (before, after):
        for name in found[0]:
            values = [(rank[name].accuracies, rank[name].aucs) for rank in found]
            assert values == [values[0]] * len(found)
            for accuracy, auc in zip(*values[0], strict=True):
                assert accuracy * 5 == pytest.approx(round(accuracy * 5))
                assert auc * 6 == pytest.approx(round(auc * 6))  # 6 pairs of 2 and 3 or 3 and 2
