"""Real ranks that are killed anywhere, and what goes on from the checkpoint that they leave.

For each kind of training one launch on two ranks ends in a SIGKILL, of a rank, at an iteration and
at an event that chance picks. Two, one and three ranks go on from there. Each rank writes down what
it trains on, as it does so: what it keeps in memory dies with it.
"""

from __future__ import annotations

import os
import random
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from ignite.handlers import LRScheduler as IgniteLRScheduler
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from shardplug import Comm
from shardplug_ignite import ShardHandler
from tests.launch import RankError, run_processes

NUM_SAMPLES, EPOCHS, WORLD_SIZE = 22, 3, 2
STEPS = 18  # of two ranks: 22 samples in batches of two
SEED = int(os.environ.get("SHARDPLUG_KILLS_SEED", "8"))

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated"),
    pytest.mark.filterwarnings("ignore:.*fork"),  # workers of a rank that has threads
    pytest.mark.timeout(300),
]


def samples() -> TensorDataset:
    """Rows of a number, two inputs and a target."""
    generator = torch.Generator().manual_seed(4)
    inputs = torch.rand(NUM_SAMPLES, 3, generator=generator)
    inputs[:, 0] = torch.arange(NUM_SAMPLES)
    return TensorDataset(inputs, (inputs[:, 1] > inputs[:, 2]).long())


class Stream(IterableDataset[Any]):
    """The same, front to back."""

    def __iter__(self) -> Iterator[Any]:
        data = samples()
        return (data[at] for at in range(len(data)))


@dataclass(frozen=True)
class Kind:
    """A kind of training, and where it is killed."""

    make_loader: Callable[[], DataLoader[Any]]
    window: int = 1
    options: dict[str, Any] = field(default_factory=dict)


def shuffled(**options: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(samples(), batch_size=2, shuffle=True, **options)


KINDS: dict[str, Kind] = {
    "shuffled": Kind(shuffled()),
    "workers and windows": Kind(shuffled(num_workers=2), window=3),
    "dispatched": Kind(shuffled(), window=2, options={"dispatch_batches": True}),
    "stream": Kind(lambda: DataLoader(Stream(), batch_size=2, num_workers=2)),
    "stream read by all": Kind(
        lambda: DataLoader(Stream(), batch_size=2), window=4, options={"dispatch_batches": False}
    ),
}
EVENTS = ("GET_BATCH_COMPLETED", "ITERATION_STARTED", "ITERATION_COMPLETED")


def chance() -> dict[str, tuple[int, int, str]]:
    """Which rank of each kind is killed, at which iteration, and at which event."""
    draw = random.Random(SEED)
    return {
        name: (draw.randrange(WORLD_SIZE), draw.randrange(3, STEPS), draw.choice(EVENTS))
        for name in KINDS
    }


KILLS = chance()


class Model(nn.Module):
    """Drops out, so that the random generators of the ranks count."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(rows[:, 1:])
        return found


def train(comm: Comm, name: str, notes: Path, *, is_killed: bool, load: Path | None) -> list[float]:
    """The script: the same whether it begins or goes on. It returns the parameters."""
    kind = KINDS[name]
    torch.manual_seed(0)
    model = idist.auto_model(Model())
    torch.manual_seed(comm.rank if load is None else 77)
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.05)
    trainer = create_supervised_trainer(
        model, optimizer, nn.CrossEntropyLoss(), gradient_accumulation_steps=kind.window
    )
    shard = ShardHandler(optimizer=optimizer, data_seed=6, **kind.options)
    every: Any = Events.ITERATION_COMPLETED
    shard.attach(trainer, snapshot=every)
    rate: Any = IgniteLRScheduler(ExponentialLR(optimizer, 0.97))
    rate.attach(trainer, shard.step_event)
    state: Any = trainer.state

    @trainer.on(Events.ITERATION_COMPLETED)
    def note() -> None:
        rows = state.batch[0][: shard.loader.valid_rows, 0].int().tolist()
        with notes.open("a") as file:
            print(state.iteration, shard.loader.epoch, *rows, file=file)

    objects = {"trainer": trainer, "model": model, "optimizer": optimizer, "rate": rate}
    objects["shard"] = shard
    if is_killed:
        saver = DiskSaver(str(notes.parent), create_dir=True, require_empty=False)
        step = lambda *_: state.shard.global_step  # noqa: E731
        keep = Checkpoint(objects, saver, n_saved=2, global_step_transform=step)
        trainer.add_event_handler(every(every=2), keep)
        kill_when_it_is_time(trainer, comm.rank, name)
    if load is not None:
        content = torch.load(load, weights_only=True)
        if content["trainer"]["epoch_length"] is None:
            del objects["trainer"]  # Ignite refuses it in the first epoch of unknown length
        Checkpoint.load_objects(objects, content)
    trainer.run(kind.make_loader(), max_epochs=EPOCHS)
    return [value for each in model.parameters() for value in each.detach().flatten().tolist()]


def kill_when_it_is_time(trainer: Engine, rank: int, name: str) -> None:
    whose, iteration, event = KILLS[name]
    ahead = event == "GET_BATCH_COMPLETED"  # the iteration is counted after it

    def kill() -> None:
        if rank == whose and trainer.state.iteration + ahead == iteration:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.add_event_handler(Events[event], kill)


def newest(folder: Path) -> Path:
    return max(folder.glob("checkpoint_*.pt"), key=lambda path: int(path.stem.split("_")[1]))


def place(folder: str, name: str) -> Path:
    found = Path(folder) / name.replace(" ", "-")
    found.mkdir(exist_ok=True)
    return found


def be_killed(comm: Comm, folder: str, name: str) -> None:
    idist.set_local_rank(comm.rank)  # Ignite would guess it, and warn
    own = place(folder, name)
    train(comm, name, own / f"killed-{comm.rank}", is_killed=True, load=None)


def go_on(comm: Comm, folder: str) -> dict[str, list[float]]:
    """Go on with each kind; on as many ranks as before, also train what was never killed."""
    idist.set_local_rank(comm.rank)
    found = {}
    for name in KINDS:
        own = place(folder, name)
        notes = own / f"{comm.world_size}-{comm.rank}"
        found[name] = train(comm, name, notes, is_killed=False, load=newest(own))
        if comm.world_size == WORLD_SIZE:
            whole = own / f"whole-{comm.rank}"
            found[f"whole {name}"] = train(comm, name, whole, is_killed=False, load=None)
    return found


Line = tuple[int, int, list[int]]
"""An iteration, the epoch of the data, and the real rows."""


def read(path: Path) -> list[Line]:
    lines = [list(map(int, line.split())) for line in path.read_text().splitlines()]
    return [(iteration, epoch, rows) for iteration, epoch, *rows in lines]


@dataclass
class Drill:
    """What all launches left behind."""

    folder: str
    parameters: dict[int, list[dict[str, list[float]]]]

    def lines(self, name: str, run: str | int, rank: int) -> list[Line]:
        return read(place(self.folder, name) / f"{run}-{rank}")

    def kept(self, name: str, rank: int) -> list[Line]:
        """What was trained before the place from which the others went on."""
        content = torch.load(newest(place(self.folder, name)), weights_only=True)
        saved = content["shard"]["iteration"]
        lines = self.lines(name, "killed", rank)
        assert saved <= len(lines) < STEPS
        return lines[:saved]


@pytest.fixture(scope="module")
def drill(tmp_path_factory: pytest.TempPathFactory) -> Drill:
    folder = str(tmp_path_factory.mktemp("kills"))
    print(f"seed {SEED}: {KILLS}")
    for name in KINDS:
        with pytest.raises((RankError, RuntimeError)) as caught:
            run_processes(WORLD_SIZE, be_killed, folder, name, timeout_s=60.0)
        told = f"{caught.value} {caught.value.__cause__}"
        assert f"Rank {KILLS[name][0]} ended with exit code -9" in told
    parameters = {
        world_size: run_processes(world_size, go_on, folder, timeout_s=120.0)
        for world_size in (2, 1, 3)
    }
    return Drill(folder, parameters)


@pytest.mark.parametrize("name", KINDS)
def test_as_many_ranks_end_as_if_nothing_had_happened(drill: Drill, name: str) -> None:
    for rank in range(WORLD_SIZE):
        whole = drill.lines(name, "whole", rank)
        assert len(whole) == STEPS
        assert drill.kept(name, rank) + drill.lines(name, WORLD_SIZE, rank) == whole, KILLS[name]
        found = drill.parameters[WORLD_SIZE][rank]
        assert found[name] == pytest.approx(found[f"whole {name}"], rel=0, abs=1e-6), KILLS[name]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_other_numbers_of_ranks_train_on_the_rest(drill: Drill, name: str, world_size: int) -> None:
    seen: dict[int, list[int]] = defaultdict(list)
    lines = [drill.kept(name, rank) for rank in range(WORLD_SIZE)]
    lines += [drill.lines(name, world_size, rank) for rank in range(world_size)]
    for _, epoch, rows in (line for each in lines for line in each):
        seen[epoch] += rows
    expected = {epoch: list(range(NUM_SAMPLES)) for epoch in range(EPOCHS)}
    assert {epoch: sorted(rows) for epoch, rows in seen.items()} == expected, KILLS[name]
    first = drill.parameters[world_size][0][name]
    assert all(rank[name] == first for rank in drill.parameters[world_size])
