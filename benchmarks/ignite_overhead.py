"""An Ignite trainer with a `ShardHandler`, beside a bare one that iterates the same loader.

python -m benchmarks.ignite_overhead [--json PATH]
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from ignite.engine import Engine, create_supervised_trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.table import Row, at_most, median_interleaved, seconds, show
from shardplug import ShardEngine
from shardplug_ignite import ShardHandler

STEPS = 200
REPEATS = 15
LIMIT = 1.05


def rows() -> list[Row]:
    """Measure everything."""
    return [*alone(), *two_ranks()]


def data() -> DataLoader[Any]:
    """Batches of 8 rows of 16 numbers: as little as a loader is asked for."""
    inputs = torch.rand(2 * 8 * STEPS, 16)
    return DataLoader(TensorDataset(inputs, torch.zeros(len(inputs), dtype=torch.int64)), 8)


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a small network, for a step that takes next to nothing."""
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def alone() -> list[Row]:
    """Count what a handler adds to an iteration of one process."""
    model, optimizer = network()
    trainers: dict[str, Callable[[], Engine]] = {
        "a step that does nothing": lambda: Engine(lambda _, __: None),
        "a step of a small network": lambda: create_supervised_trainer(
            model, optimizer, nn.CrossEntropyLoss()
        ),
    }
    loader = ShardEngine().prepare_loader(data())
    found = []
    for what, make in trainers.items():
        own, bare_engine = with_handler(make(), optimizer), make()
        ours, bare = median_interleaved(
            partial(own.run, loader), partial(bare_engine.run, loader), REPEATS
        )
        found.append(ratio(what, ours / len(loader), bare / len(loader)))
    return found


def with_handler(trainer: Engine, optimizer: torch.optim.Optimizer) -> Engine:
    """Attach a handler that knows the optimizer."""
    ShardHandler(optimizer=optimizer).attach(trainer)
    return trainer


def ratio(what: str, ours_s: float, bare_s: float) -> Row:
    """Say what an iteration costs, as a multiple of that of a bare engine."""
    us = f"{ours_s * 1e6:.0f} against {bare_s * 1e6:.0f} us"
    return at_most(f"Ignite, {what}: {us}", ours_s / bare_s, LIMIT, unit="")


def two_ranks() -> list[Row]:
    """Count what it adds where ranks ask each other in each iteration whether to stop."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        found = context.SimpleQueue()
        ranks = [
            context.Process(target=measure_rank, args=(rank, f"{folder}/store", found))
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        figures = found.get()
        for rank in ranks:
            rank.join()
    return [ratio(f"DDP on 2 ranks{how}", ours, bare) for how, ours, bare in figures]


def measure_rank(rank: int, store: str, found: Any) -> None:
    """Be one of two ranks, and train in turns with and without a handler."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    inner, _ = network()
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = ShardEngine().prepare_loader(data())

    def trainer() -> Engine:
        return create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss())

    asking = with_handler(trainer(), optimizer)
    not_asking = trainer()
    ShardHandler(optimizer=optimizer, agree_stop=False).attach(not_asking)
    engines = {"bare": trainer(), "": asking, ", agree_stop=False": not_asking}
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(REPEATS):
        for name, engine in engines.items():
            times[name].append(seconds(partial(engine.run, loader)) / len(loader))
    bare = median(times.pop("bare"))
    if rank == 0:
        found.put([(how, median(each), bare) for how, each in times.items()])
    dist.destroy_process_group()


if __name__ == "__main__":
    show(rows)
