"""Streams for tests: ids one by one, in the ways that users' data sets give them."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info


class Ids(IterableDataset[int]):
    """Ids in order, and no word about how many.

    Args:
        num_ids: Ids are 0 to ``num_ids`` - 1.
        fails_at: Instead of this id there is a ValueError.
        dies_at: Instead of this id the process ends.
    """

    def __init__(
        self, num_ids: int, *, fails_at: int | None = None, dies_at: int | None = None
    ) -> None:
        self.ids = list(range(num_ids))
        self.fails_at = fails_at
        self.dies_at = dies_at
        self.num_read = 0

    def __iter__(self) -> Iterator[int]:
        for number in self.own_ids():
            if number == self.fails_at:
                raise ValueError(f"no id {number}")
            if number == self.dies_at:
                os._exit(1)
            self.num_read += 1
            yield number

    def own_ids(self) -> list[int]:
        return self.ids


class SizedIds(Ids):
    """Ids that say how many they are; ``says`` is what they say if that is a lie."""

    def __init__(self, num_ids: int, *, says: int | None = None) -> None:
        super().__init__(num_ids)
        self.says = num_ids if says is None else says

    def __len__(self) -> int:
        return self.says


class EpochIds(Ids):
    """Ids of the epoch: 100 more in each, if anybody tells."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def own_ids(self) -> list[int]:
        return [100 * self.epoch + number for number in self.ids]


class ShuffledIds(Ids):
    """Ids in an order drawn from torch's global generator."""

    def own_ids(self) -> list[int]:
        order: list[int] = torch.randperm(len(self.ids)).tolist()
        return order


class SplitIds(Ids):
    """Ids that divide themselves among workers."""

    def own_ids(self) -> list[int]:
        info: Any = get_worker_info()
        return self.ids if info is None else self.ids[info.id :: info.num_workers]


class SizedSplitIds(SplitIds):
    """The same, of known length."""

    def __len__(self) -> int:
        return len(self.ids)


class SeededIds(Ids):
    """Ids that read the id of the worker and no more, to seed something with it."""

    def own_ids(self) -> list[int]:
        info: Any = get_worker_info()
        torch.Generator().manual_seed(0 if info is None else info.id)
        return self.ids


class LateSplitIds(Ids):
    """Ids that read the worker's info when the first of them has gone out."""

    def __iter__(self) -> Iterator[int]:
        yield self.ids[0]
        info: Any = get_worker_info()
        if info is not None:
            yield from self.ids[1 + info.id :: info.num_workers]


class Parts(IterableDataset[int]):
    """A stream that gives any shard its part, and of which a part knows no other."""

    def __init__(self, parts: list[list[int]]) -> None:
        self.parts = parts

    def shard(self, num_shards: int, index: int) -> Parts:
        return Parts(self.parts[index::num_shards])

    def __iter__(self) -> Iterator[int]:
        for part in self.parts:
            yield from part


class Files(Parts):
    """The same, but parts come from files and one cannot be divided."""

    @property
    def num_shards(self) -> int:
        return len(self.parts)


def parts_of(*sizes: int) -> list[list[int]]:
    """Parts of these sizes over consecutive ids."""
    numbers = iter(range(sum(sizes)))
    return [[next(numbers) for _ in range(size)] for size in sizes]


def error_of(act: Callable[[], object]) -> Exception:
    """Return what is raised, when nothing of what raised it is alive any more.

    A traceback keeps a loader's iterator, and that its workers and threads.
    """
    caught: Exception | None = None
    try:
        act()
    except Exception as error:  # noqa: BLE001  # whatever is raised is looked at
        caught = error.with_traceback(None)
        caught.__context__ = None
    gc.collect()
    assert caught is not None, "nothing was raised"
    return caught
