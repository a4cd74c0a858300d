"""The keyed permutation: its speed, its memory, and how random it is, beside its peers'."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard as PeerShard
from grain._src.python.experimental.index_shuffle.python.index_shuffle_module import index_shuffle
from torch.utils.data import BatchSampler, RandomSampler

from benchmarks.table import (
    Row,
    at_least,
    at_most,
    fewer,
    median_interleaved,
    seconds,
    show,
    to_know,
)
from shardplug.permutation import TensorPermutation
from shardplug.samplers import BatchSamplerShard, PermutedSampler
from tests.unit.permutation_statistics import position_scores, serial_scores

SIZES = {"1e6": 10**6, "1e7": 10**7, "2^23+1": 2**23 + 1, "1e9": 10**9, "2^39+1": 2**39 + 1}
SIZES |= {"1e12": 10**12}
TIMES_FASTER = {1: 1.8, 8: 15.0, 64: 100.0, 1024: 1000.0}  # by number of ranks
BATCH_SIZE = 32
CLEAR_PEAK = Path("/proc/self/clear_refs")  # writing 5 forgets the peak of the memory
BIASED_SIZE = 209_510_599  # torch.randperm takes a modulus without rejection below 2^32 / 20


def rows() -> list[Row]:
    """Measure everything."""
    return [*speed(), *epochs(), *first_batches(), *memory(), *randomness()]


def speed() -> list[Row]:
    """Time single indices."""
    count = 10**7
    positions = torch.arange(count)
    ours_s, peer_s = median_interleaved(
        lambda: TensorPermutation(count, 1).take(positions), lambda: torch.randperm(count)
    )
    ours, peer = ours_s / count * 1e9, peer_s / count * 1e9
    found = [Row("index, n=1e7", ours, peer, "ns", "≤ 2 × peer", ours <= 2 * peer, "randperm")]
    by_size = per_index_ns()
    ratio = max(by_size.values()) / min(by_size.values())
    found += [
        to_know(f"index, n={name}", nanoseconds, unit="ns") for name, nanoseconds in by_size.items()
    ]
    found.append(at_most("index, slowest n / fastest n", ratio, 1.7, unit=""))
    few = 10_000
    ours_s, peer_s = median_interleaved(
        lambda: TensorPermutation(10**6, 1).take(positions[: 10**6]),
        lambda: [index_shuffle(at, max_index=10**6 - 1, seed=1, rounds=4) for at in range(few)],
    )
    ours, peer = ours_s / 10**6 * 1e9, peer_s / few * 1e9
    found.append(at_least("index, n=1e6", ours, peer, times=40, unit="ns", name="Grain"))
    return found


def per_index_ns(count: int = 10**6, repeats: int = 7) -> dict[str, float]:
    """Time a million indices, spread over the whole of each size, the sizes in turns."""
    taken: dict[str, list[float]] = {name: [] for name in SIZES}
    for _ in range(fewer(repeats)):
        for name, num_samples in SIZES.items():
            positions = torch.arange(count) * (num_samples // count)
            order = TensorPermutation(num_samples, 1)
            taken[name].append(seconds(partial(order.take, positions)))
    return {name: median(times) / count * 1e9 for name, times in taken.items()}


def our_shard(num_samples: int, world_size: int) -> BatchSamplerShard:
    """Make the batches of one rank, in the middle, in our order."""
    batches = BatchSampler(PermutedSampler(num_samples), BATCH_SIZE, drop_last=True)
    return BatchSamplerShard(batches, world_size, world_size // 2)


def peer_shard(num_samples: int, world_size: int) -> Any:
    """Make the batches of one rank, in the middle, in the order of accelerate."""
    batches = BatchSampler(RandomSampler(range(num_samples)), BATCH_SIZE, drop_last=True)
    return PeerShard(batches, world_size, world_size // 2)


def epochs(num_samples: int = 10**7) -> list[Row]:
    """Time the epoch of one rank: its batches, as lists."""

    def read(make: Callable[[int, int], Any], world_size: int, epochs: int = 1) -> None:
        for _ in range(epochs):
            for _ in make(num_samples, world_size):
                pass

    found = []
    for world_size, times in TIMES_FASTER.items():
        # A single epoch of ours is too short to time beside seconds of the peer's.
        ours_s, peer_s = median_interleaved(
            partial(read, our_shard, world_size, world_size),
            partial(read, peer_shard, world_size),
            repeats=3,
        )
        what = f"epoch of one rank of {world_size}, n=1e7"
        found.append(at_least(what, ours_s / world_size, peer_s, times=times, name="accelerate"))
    return [*found, at_most("batch at 1024 ranks / at 1", growth(), 2, unit="")]


def growth(repeats: int = 15, epochs_each: int = 20) -> float:
    """Compare a batch of one rank of 1024 with one of a single rank.

    In CPU time, since both are ours and neither waits, and in turns, as many batches of each: what
    else runs on the machine slows both.
    """

    def of_many() -> None:
        for _ in range(epochs_each):
            for _ in our_shard(10**7, 1024):
                pass

    def of_one() -> None:
        for _ in islice(our_shard(10**7, 1), epochs_each * len(our_shard(10**7, 1024))):
            pass

    def cpu_s(run: Callable[[], None]) -> float:
        start = time.process_time()
        run()
        return time.process_time() - start

    return median(cpu_s(of_many) / cpu_s(of_one) for _ in range(fewer(repeats)))


def first_batches() -> list[Row]:
    """Time from nothing to the first batch."""

    def first(make: Callable[[int, int], Any], num_samples: int, world_size: int) -> None:
        next(iter(make(num_samples, world_size)))

    def median_ms(*arguments: Any, repeats: int) -> float:
        return 1e3 * median(seconds(partial(first, *arguments)) for _ in range(fewer(repeats)))

    near = median_ms(our_shard, 10**7, 8, repeats=9)
    far = median_ms(our_shard, 10**12, 10**6, repeats=9)
    peer = median_ms(peer_shard, 10**7, 8, repeats=3)
    what = "first batch, n={}, {} ranks"
    return [
        at_most(what.format("1e7", 8), near, 2, unit="ms", peer=peer, name="accelerate"),
        at_most(what.format("1e12", "1e6"), far, 2, unit="ms"),
    ]


def memory() -> list[Row]:
    """Measure what a thousand batches add to the memory of a process, where Linux tells."""
    if not CLEAR_PEAK.exists():
        return []
    what = "extra memory, n={}, 8 ranks"
    near, peer = extra_mb(our_shard, 10**7, 8), extra_mb(peer_shard, 10**7, 8)
    return [
        at_most(what.format("1e7"), near, 2, unit="MB", peer=peer, name="accelerate"),
        at_most(what.format("1e12"), extra_mb(our_shard, 10**12, 8), 2, unit="MB"),
    ]


def extra_mb(make: Callable[[int, int], Any], num_samples: int, world_size: int) -> float:
    """Run in a process of its own, after a small run that loads what is loaded once."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_extra_mb, (make, num_samples, world_size))


def _extra_mb(make: Callable[[int, int], Any], num_samples: int, world_size: int) -> float:
    for _ in make(1000, 1):
        pass
    CLEAR_PEAK.write_text("5", encoding="ascii")
    before = _memory_mb("VmRSS")
    for _ in islice(make(num_samples, world_size), 1000):
        pass
    return _memory_mb("VmHWM") - before


def _memory_mb(name: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 2**10 for line in lines if line.startswith(name))


def randomness() -> list[Row]:
    """Score the same statistics as the tests; they are N(0, 1) for a random order."""
    count = 5000
    ours = TensorPermutation(10**6, 1).take(torch.arange(count))
    peer = [index_shuffle(at, max_index=10**6 - 1, seed=1, rounds=4) for at in range(count)]
    serial = [float(serial_scores(each.view(1, -1), 10**6)) for each in (ours, torch.tensor(peer))]
    # The first of the order, and where torch.randperm puts too many: in the lower half.
    count = 2 * 10**6
    ours = TensorPermutation(BIASED_SIZE, 1).take(torch.arange(count))
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randperm(BIASED_SIZE, generator=generator, dtype=torch.int32)[:count].long()
    position = [float(position_scores(each.view(1, -1), BIASED_SIZE)) for each in (ours, drawn)]
    return [
        _score("serial correlation, n=1e6", serial, "Grain"),
        _score("first 2e6 in the lower half, n=209510599", position, "randperm"),
    ]


def _score(what: str, scores: list[float], name: str) -> Row:
    ours, peer = scores
    met = abs(ours) < 4 < abs(peer)
    return Row(what, ours, peer, "sigma", "ours within 4, peer flagged", met, name)


if __name__ == "__main__":
    show(rows)
