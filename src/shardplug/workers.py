"""What runs in a loader's worker processes.

A task carries the epoch with the index batch, so that workers that live longer than a pass learn
of each new epoch where they need it: before their first sample of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, final

from torch.utils.data import get_worker_info

from shardplug import rng
from shardplug.plan.cursor import Progress
from shardplug.plan.order import worker_seed
from shardplug.samplers import HasEpoch


@final
class Tasks:
    """The index batches of a pass, each with its epoch, as a sampler that yields single items."""

    def __init__(self, index_batches: Iterable[Any], progress: Progress) -> None:
        self._index_batches = index_batches
        self._progress = progress

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yield what a worker needs to make each batch of the pass under way."""
        epoch = self._progress.epoch
        for index in self._index_batches:
            yield epoch, index


@dataclass(slots=True)
class Reader:
    """Makes batches from tasks, in the process that holds this copy of the user's data set.

    Attributes:
        dataset: The user's data set.
        collate: The user's collate function.
        is_batched: Whether an index is a list of ids, to be fetched and collated together.
        seed: Of the loader.
        shard_index: Which part of the data this loader reads.
        epoch: The epoch this copy was last told, None before the first.
    """

    dataset: Any
    collate: Callable[[Any], Any]
    is_batched: bool
    seed: int
    shard_index: int
    epoch: int | None = None

    def __getitem__(self, task: tuple[int, Any]) -> Any:
        """Make the batch of one task."""
        epoch, index = task
        if epoch != self.epoch:
            self._enter(epoch)
        return self.collate(self._fetch(index))

    def __len__(self) -> int:
        """Count the samples of the data set."""
        return len(self.dataset)

    def _fetch(self, index: Any) -> Any:
        if not self.is_batched:
            return self.dataset[index]
        fetch_many = getattr(self.dataset, "__getitems__", None)
        if fetch_many:
            return fetch_many(index)
        return [self.dataset[sample] for sample in index]

    def _enter(self, epoch: int) -> None:
        """Take an epoch; a worker that has seen another one before is seeded anew."""
        info = get_worker_info()
        if self.epoch is not None and info is not None:
            seed = worker_seed(self.seed, epoch, rank=self.shard_index, worker=info.id)
            rng.seed_cpu(seed)
        if isinstance(self.dataset, HasEpoch):
            self.dataset.set_epoch(epoch)
        self.epoch = epoch


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Prepares a new worker: seeds it, and runs the user's ``worker_init_fn`` as torch would.

    Attributes:
        seed: Of the loader.
        epoch: The epoch during which the worker starts.
        shard_index: Which part of the data this loader reads.
        user_init: The user's ``worker_init_fn``.
    """

    seed: int
    epoch: int
    shard_index: int
    user_init: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        """Run in the worker, once."""
        seed = worker_seed(self.seed, self.epoch, rank=self.shard_index, worker=worker)
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, Reader):
            # The info is read-only for users, who expect their own data set and the seed in it.
            object.__setattr__(info, "dataset", info.dataset.dataset)
            object.__setattr__(info, "seed", seed)
        rng.seed_cpu(seed)
        if self.user_init is not None:
            self.user_init(worker)


def as_it_is(batch: Any) -> Any:
    """Return a batch that is ready: a collate function that can be sent to workers."""
    return batch


