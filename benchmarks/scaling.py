"""What a batch costs a rank, from one rank to 4096, beside the peers.

python -m benchmarks.scaling [--json PATH]

One rank's whole epoch, from making its sampler or loader to the last batch, divided by the batches
that it hands out. Ranks do not talk here: what each would do alone is timed on one, in the middle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from statistics import median
from typing import Any

from accelerate.data_loader import BatchSamplerShard as PeerShard
from accelerate.data_loader import prepare_data_loader as peer_prepare
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler

from benchmarks.loading import Numbers
from benchmarks.scaling_names import ACCELERATE, KEYED, SAME, TORCH
from benchmarks.table import Row, is_quick, seconds, show
from shardplug import BatchSamplerShard, PermutedSampler, prepare_data_loader

WORLDS = (1, 4, 16, 64, 256, 1024, 4096)
BATCH_SIZE = 32
NUM_SAMPLES = 10**7  # 76 batches for each of 4096 ranks
LEAST_BATCHES = 256  # to time in one go, of those that take little

Make = Callable[[int], Iterable[Any]]


def rows() -> list[Row]:
    """Measure everything; what is there to be reached is in the other benchmarks."""
    found = []
    for panel in ("sampler", "loader"):
        cost = {
            curve["name"]: dict(map(tuple, curve["points"]))
            for curve in curves()["curves"]
            if curve["panel"] == panel
        }
        for name in (KEYED, SAME):
            what = f"{panel}, a batch on one rank of {{}}, {name.partition(', ')[2]}"
            found += [
                _beside(what.format(world), cost[name][world], cost[ACCELERATE][world])
                for world in (WORLDS[0], WORLDS[-1])
            ]
    return found


def _beside(what: str, ours: float, peer: float) -> Row:
    return Row(what, ours, peer, "us", "", met=True, name=ACCELERATE)


@cache
def curves() -> dict[str, Any]:
    """Measure the cost of a batch by kind, peer and number of ranks, in microseconds."""
    found: dict[tuple[str, str], list[list[float]]] = {}
    for panel, makers in (("sampler", SAMPLERS), ("loader", LOADERS)):
        for world in WORLDS:
            for name, cost_us in costs(makers, world).items():
                found.setdefault((panel, name), []).append([world, cost_us])
    return {
        "num_samples": NUM_SAMPLES,
        "batch_size": BATCH_SIZE,
        "curves": [
            {"panel": panel, "name": name, "points": points}
            for (panel, name), points in found.items()
        ],
    }


def costs(makers: dict[str, Make], world: int, repeats: int = 2) -> dict[str, float]:
    """Time an epoch of one rank of each, in turns; returns microseconds a batch, the medians."""
    taken: dict[str, list[float]] = {name: [] for name in makers}
    for repeat in range(1 if is_quick() else repeats):
        for name in list(makers)[:: -1 if repeat % 2 else 1]:
            taken[name].append(_cost_us(makers[name], world, is_short=name == KEYED))
    return {name: round(median(times), 3) for name, times in taken.items()}


def _cost_us(make: Make, world: int, *, is_short: bool) -> float:
    # An epoch that takes a millisecond is timed several times over; one of a second is not.
    per_rank = NUM_SAMPLES // BATCH_SIZE // world
    epochs = -(-LEAST_BATCHES // per_rank) if is_short else 1
    batches = 0

    def read() -> None:
        nonlocal batches
        for _ in range(epochs):
            batches += sum(1 for _ in make(world))

    took_s = seconds(read)
    return took_s / batches * 1e6


# -- samplers ------------------------------------------------------------------------------------


def _batches(order: Sampler[int]) -> BatchSampler:
    return BatchSampler(order, BATCH_SIZE, drop_last=True)


def _shuffled() -> BatchSampler:
    return _batches(RandomSampler(range(NUM_SAMPLES)))


def _torch_sampler(world: int) -> DistributedSampler[int]:
    return DistributedSampler(Numbers(NUM_SAMPLES), world, world // 2, shuffle=True)


SAMPLERS: dict[str, Make] = {
    KEYED: lambda world: BatchSamplerShard(
        _batches(PermutedSampler(NUM_SAMPLES)), world, world // 2
    ),
    SAME: lambda world: BatchSamplerShard(_shuffled(), world, world // 2),
    ACCELERATE: lambda world: PeerShard(_shuffled(), world, world // 2),
    TORCH: lambda world: _batches(_torch_sampler(world)),
}


# -- loaders, over samples that cost nothing -------------------------------------------------------


def _loader(**how: Any) -> DataLoader[int]:
    return DataLoader(Numbers(NUM_SAMPLES), BATCH_SIZE, drop_last=True, **how)


def _ours(world: int, **how: Any) -> Iterable[Any]:
    return prepare_data_loader(_loader(**how), num_processes=world, process_index=world // 2)


def _of_accelerate(world: int) -> Iterable[Any]:
    place: dict[str, Any] = {"num_processes": world, "process_index": world // 2}
    made: Iterable[Any] = peer_prepare(_loader(shuffle=True), put_on_device=False, **place)
    return made


LOADERS: dict[str, Make] = {
    KEYED: lambda world: _ours(world, sampler=PermutedSampler(NUM_SAMPLES)),
    SAME: lambda world: _ours(world, shuffle=True),
    ACCELERATE: _of_accelerate,
    TORCH: lambda world: _loader(sampler=_torch_sampler(world)),
}


if __name__ == "__main__":
    show(rows, curves)
