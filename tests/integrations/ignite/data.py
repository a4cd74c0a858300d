"""Data sets and samplers whose samples are their own indices."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import Dataset, IterableDataset, Sampler


class Ids(Dataset[int]):
    """The ids of ``num_samples`` samples, or those from ``start`` on."""

    def __init__(self, num_samples: int, start: int = 0) -> None:
        self.num_samples = num_samples
        self.start = start

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        return self.start + index


class Stream(IterableDataset[int]):
    """The same one after the other, without a length."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_samples))


class Unsized(Sampler[int]):
    """A sampler whose length nobody knows."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_samples))


class Disagreeing(Sampler[int]):
    """A sampler that has another order on each rank, and no way of being told."""

    def __init__(self, num_samples: int, rank: int) -> None:
        self.num_samples = num_samples
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        return iter([(index + self.rank) % self.num_samples for index in range(self.num_samples)])

    def __len__(self) -> int:
        return self.num_samples
