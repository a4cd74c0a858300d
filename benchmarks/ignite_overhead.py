"""An Ignite trainer with a `ShardHandler`, beside a bare one that iterates the same loader.

python -m benchmarks.ignite_overhead [--json PATH]

Short epochs of both are run in turns, and each is compared with the bare one of its own turn; what
is told is the median of those ratios, so that what else the machine does strikes both alike. With
``agree_stop=False`` ranks do not look whether one of them wants to stop, which shows what that
costs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing import get_context
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from ignite.engine import Engine, create_supervised_trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.table import Row, at_most, fewer, show
from shardplug import ShardEngine
from shardplug_ignite import ShardHandler

LIMIT = 1.05
ALONE_STEPS, ALONE_TURNS = 100, 60
RANK_STEPS, RANK_TURNS = 100, 25

MILLISECONDS = "DDP on 2 ranks, a step of some milliseconds"
NOTHING = "DDP on 2 ranks, a step of next to nothing"
NETWORKS = {MILLISECONDS: (256, 256), NOTHING: (16, 64)}
"""Rows of a batch, and the width of the network."""
WAYS = {"": True, ", agree_stop=False": False}
"""Whether ranks look in each iteration whether one of them wants to stop."""


def rows() -> list[Row]:
    """Measure everything."""
    return [*alone(), *two_ranks()]


def data(batches: int, batch_size: int) -> DataLoader[Any]:
    """Batches of rows of 16 numbers: as little as a loader is asked for."""
    inputs = torch.rand(batch_size * batches, 16)
    targets = torch.zeros(len(inputs), dtype=torch.int64)
    return DataLoader(TensorDataset(inputs, targets), batch_size)


def network(width: int) -> nn.Module:
    """Make a network of two layers and a head."""
    inner = [nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*inner, nn.Linear(width, 10))


def trainer_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Engine:
    """Make Ignite's usual trainer."""
    return create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss())


def with_handler(trainer: Engine, **options: Any) -> Engine:
    """Attach a handler to a trainer."""
    ShardHandler(**options).attach(trainer)
    return trainer


def in_turns(
    runs: Mapping[str, Callable[[], object]], turns: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Time runs in turns, each turn beginning with another of them."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(turns + 2):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = clock()
            runs[name]()
            if turn >= 2:  # the first ones warm up
                times[name].append(clock() - start)
    return times


def compared(what: str, times: Mapping[str, list[float]], steps: int) -> list[Row]:
    """Say what an iteration takes, as a multiple of that of a bare engine in the same turn."""
    bare = times["bare"]
    found = []
    for name, own in times.items():
        if name == "bare":
            continue
        ratio = median(one / other for one, other in zip(own, bare, strict=True))
        added = median(one - other for one, other in zip(own, bare, strict=True)) / steps
        us = f"{added * 1e6:+.1f} us to {median(bare) / steps * 1e6:.0f} us"
        found.append(at_most(f"Ignite, {what}{name}: {us}", ratio, LIMIT, unit=""))
    return found


def alone() -> list[Row]:
    """Count what a handler adds to an iteration of one process: to what it works, on one thread."""
    torch.set_num_threads(1)
    model = network(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = ShardEngine().prepare_loader(data(ALONE_STEPS, 32))
    makers: dict[str, Callable[[], Engine]] = {
        "a step that does nothing": lambda: Engine(lambda _, __: None),
        "a step of a small network": lambda: trainer_of(model, optimizer),
    }
    found = []
    for what, make in makers.items():
        engines = {"bare": make(), "": with_handler(make(), optimizer=optimizer)}
        runs = {name: partial(engine.run, loader) for name, engine in engines.items()}
        found += compared(what, in_turns(runs, fewer(ALONE_TURNS), process_time), ALONE_STEPS)
    return found


def two_ranks() -> list[Row]:
    """Count what it adds on two ranks, whose models exchange gradients in each step."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        found = context.Queue()
        ranks = [
            context.Process(target=measure_rank, args=(rank, f"{folder}/store", found))
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        figures = found.get(timeout=600)  # a rank that fails puts nothing
        for rank in ranks:
            rank.join()
    return [row for what, times in figures for row in compared(what, times, RANK_STEPS)]


def measure_rank(rank: int, store: str, found: Any) -> None:
    """Be one of two ranks, and train in turns with and without a handler."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    figures = []
    for what, (batch_size, width) in NETWORKS.items():
        model = DistributedDataParallel(network(width))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = ShardEngine().prepare_loader(data(2 * RANK_STEPS, batch_size))
        engines = {"bare": trainer_of(model, optimizer)}
        for name, agrees in WAYS.items():
            trainer = trainer_of(model, optimizer)
            engines[name] = with_handler(trainer, optimizer=optimizer, agree_stop=agrees)
        runs = {name: partial(each.run, loader) for name, each in engines.items()}
        figures.append((what, in_turns(runs, fewer(RANK_TURNS), perf_counter)))
    if rank == 0:
        found.put(figures)
    dist.destroy_process_group()


if __name__ == "__main__":
    show(rows)
