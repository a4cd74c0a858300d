"""The first index of a shuffle of 1,000,000: the memory it takes.

torch draws the whole permutation first. PermutedSampler computes each place by itself. So it does
for 10^12 samples, where torch would need 8 terabytes.
"""

import tracemalloc
from collections.abc import Iterable

from torch.utils.data import RandomSampler

from proving import Sides, main
from shardplug import PermutedSampler

PACKAGES = ("torch",)


def prove() -> Sides:
    """Measure what Python holds when the first index is there."""
    theirs = kilobytes(RandomSampler(range(10**6)))
    ours = max(kilobytes(PermutedSampler(10**6)), kilobytes(PermutedSampler(10**12)))
    many = "more than 10,000 kB" if theirs > 10_000 else f"{theirs} kB"
    return Sides(many, "less than 1,000 kB, also for 10^12" if ours < 1_000 else f"{ours} kB")


def kilobytes(sampler: Iterable[int]) -> int:
    """Measure the peak of one sampler."""
    tracemalloc.start()
    next(iter(sampler))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak // 1000


if __name__ == "__main__":
    main(__doc__, PACKAGES, prove)
