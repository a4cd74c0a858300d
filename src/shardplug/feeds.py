"""What a loader's passes are made from: a batch sampler, a sampler of ready batches, or a stream.

Both loaders ask the same feeds, which is why dispatching never changes who sees what.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, final

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from shardplug.comm import Comm
from shardplug.errors import CommError
from shardplug.orders import Order, SequenceOrder
from shardplug.passes import PaddedPass, Pass, ReadyPass, SampledPass
from shardplug.plan.cursor import Cursor
from shardplug.plan.shard import Shard
from shardplug.plan.split import ShardPlan, Tail
from shardplug.samplers import (
    BatchSamplerShard,
    HasEpoch,
    OrderedSampler,
    PermutedSampler,
    SeedableRandomSampler,
    SeededDraws,
    epoch_parts,
    is_by_value,
    is_plain,
    known_length,
    nested_samplers,
)

_DEALS_IN_TURN = (DistributedSampler.__iter__, StatefulDistributedSampler.__iter__)
_SHUFFLES = (RandomSampler, StatefulRandomSampler)
_DRAWS = (SubsetRandomSampler, WeightedRandomSampler)


class Feed(Protocol):
    """Begins the passes of a loader, and knows how they are divided."""

    @property
    def shard(self) -> Shard:
        """Which part of the data, of how many."""

    @property
    def tail(self) -> Tail:
        """What happens at an uneven end."""

    @property
    def plan(self) -> ShardPlan:
        """The plan of a full epoch; ``num_samples`` is None if that is not known."""

    @property
    def batch_size(self) -> int | None:
        """The batch size that the user's loader declares, None if it declares none."""

    @property
    def global_batch_size(self) -> int | None:
        """Rows of a full step over all shards; None if no batch size is declared."""

    @property
    def num_samples(self) -> int | None:
        """Samples in the order of an epoch; None if only a pass will tell."""

    @property
    def is_by_value(self) -> bool:
        """Whether the order needs no comparing across ranks."""

    @property
    def is_cut(self) -> bool:
        """Whether each rank's order is another one: its part of data that was cut before."""

    @property
    def is_stream(self) -> bool:
        """Whether the data is read from front to back."""

    @property
    def is_split(self) -> bool:
        """Whether workers divide the data among themselves, each to its own end."""

    @property
    def unit(self) -> str:
        """What positions count: "samples" or "batches"."""

    @property
    def kind(self) -> str:
        """Name what makes the order: the class of a sampler, batch sampler or stream."""

    @property
    def num_positions(self) -> int | None:
        """How far positions count in an epoch, in their unit; None if only a pass will tell."""

    def begin(self, start: Cursor, *, look: int = 0) -> tuple[Pass, list[Any]]:
        """Start a pass; also returns the first items of the epoch's order, to compare."""

    def count_steps(self, start: Cursor) -> int:
        """Count the steps from a position to the end, or raise TypeError if that is not known."""

    def for_all(self) -> Feed:
        """Return a feed whose passes make the batches of all shards, step by step."""

    def epoch_parts(self) -> list[HasEpoch]:
        """List what has to be told the epoch."""

    def __len__(self) -> int:
        """Count the steps of a full pass, or raise TypeError if that is not known."""


@final
@dataclass(frozen=True, slots=True)
class Cut:
    """Data that was cut before: each rank's batch sampler yields a part of its own.

    Attributes:
        shard: Which part, of how many.
        num_samples: Samples of all parts together, padding left out; None if that is not known.
        num_real: Samples of this part that are no padding, which comes last; None if all are.
    """

    shard: Shard
    num_samples: int | None = None
    num_real: int | None = None


@final
@dataclass(frozen=True, slots=True)
class IndexFeed:
    """A feed of index batches, for data sets that are looked up by index.

    Attributes:
        batches: Divides the batch sampler.
        is_ready: Whether each index stands for a batch that the data set has ready.
        cut: Tells of the parts, if the batch sampler yields this rank's part only.
        is_for_all: Whether passes make the batches of all shards, step by step.
    """

    batches: BatchSamplerShard
    is_ready: bool = False
    cut: Cut | None = None
    is_for_all: bool = False

    @property
    def is_stream(self) -> bool:
        """Data sets that are looked up by index are none."""
        return False

    @property
    def is_split(self) -> bool:
        """Workers are told what to look up."""
        return False

    @property
    def is_cut(self) -> bool:
        """Whether each rank's order is another one: its part of data that was cut before."""
        return self.cut is not None

    @property
    def shard(self) -> Shard:
        """Which part of the data, of how many."""
        return self.batches.shard if self.cut is None else self.cut.shard

    @property
    def tail(self) -> Tail:
        """What happens at an uneven end."""
        return self.batches.tail

    @property
    def plan(self) -> ShardPlan:
        """The plan of a full epoch, in samples or in ready batches; of a part, if data was cut."""
        return self.batches.plan

    @property
    def batch_size(self) -> int | None:
        """The batch size that the user's loader declares."""
        return None if self.is_ready else self.batches.batch_size

    @property
    def global_batch_size(self) -> int | None:
        """Rows of a full step over all shards; None if no batch size is declared."""
        size = self.batches.global_batch_size
        if self.is_ready or size is None:
            return None
        return size if self.cut is None else size * self.cut.shard.count

    @property
    def num_samples(self) -> int | None:
        """Samples (or ready batches) in the order of an epoch; None if that is not known."""
        return self.batches.num_samples if self.cut is None else self.cut.num_samples

    @property
    def remainder(self) -> int:
        """Real rows of the last step over all shards when that step is not full, else -1.

        -1 too if that is not known.
        """
        size, num_samples = self.global_batch_size, self.num_samples
        if size is None or num_samples is None or not self.batches.is_plain:
            return -1
        if self.cut is None:
            return self.plan.remainder
        steps = len(self)
        real = min(num_samples, steps * size) - (steps - 1) * size
        return real if steps and real < size else -1

    @property
    def is_by_value(self) -> bool:
        """Whether the order needs no comparing across ranks."""
        return self.batches.is_by_value

    @property
    def unit(self) -> str:
        """What positions count: samples, or batches where those are dealt."""
        return "samples" if self.batches.is_plain and not self.is_ready else "batches"

    @property
    def num_positions(self) -> int | None:
        """How far positions count in an epoch: samples, or batches where those are dealt."""
        batches = self.batches
        return known_length(batches.sampler if batches.is_plain else batches.batch_sampler)

    @property
    def kind(self) -> str:
        """Name the class of the sampler that makes the order."""
        made_by = self.batches.sampler if self.batches.is_plain else self.batches.batch_sampler
        return type(made_by.sampler if isinstance(made_by, SeededDraws) else made_by).__name__

    def begin(self, start: Cursor, *, look: int = 0) -> tuple[Pass, list[Any]]:
        """Start a pass; what samplers have to draw is drawn now."""
        pass_, head = self.batches.begin(
            start.consumed, look=look, extra_rows=start.extra_rows, for_all=self.is_for_all
        )
        num_real = None if self.cut is None else self.cut.num_real
        if num_real is not None and isinstance(pass_, SampledPass):
            pass_ = PaddedPass(pass_, num_real)
        return (ReadyPass(pass_) if self.is_ready else pass_), head

    def count_steps(self, start: Cursor) -> int:
        """Count the steps from a position to the end, or raise TypeError if that is not known."""
        if start.extra_rows:
            raise TypeError("The number of steps is not known where a batch is cut.")
        return max(0, self.batches.count_steps(start.consumed) - start.steps)

    def reseed(self, seed: int) -> None:
        """Let an order that follows the loader's seed follow another one."""
        if isinstance(self.batches.sampler, (SeedableRandomSampler, SeededDraws)):
            self.batches.sampler.seed = seed

    def for_all(self) -> IndexFeed:
        """Return a feed whose passes make the batches of all shards, step by step."""
        return replace(self, is_for_all=True)

    def epoch_parts(self) -> list[HasEpoch]:
        """List the batch sampler, and samplers inside it, that follow the epoch."""
        return epoch_parts(self.batches.batch_sampler)

    def __len__(self) -> int:
        """Count the steps of a full pass, or raise TypeError if that is not known."""
        if self.is_for_all:
            return sum(self.batches.count_steps(shard=each) for each in self.shard.all())
        return len(self.batches)


def find_cut(batch_sampler: Any, *, already_sharded: bool | None, shard: Shard) -> Cut | None:
    """Find out whether a batch sampler yields one rank's part only.

    A DistributedSampler deals position ``p * num_replicas + rank`` of the padded order as its
    sample ``p``, so what it pads stands at the end of every rank's part.

    Args:
        batch_sampler: The user's.
        already_sharded: What the user says; None to find out.
        shard: This rank's, for what is cut by nobody that could be asked.
    """
    if already_sharded is False:
        return None
    inside = [part for part in nested_samplers(batch_sampler) if _cuts(part)]
    if not inside:
        return Cut(shard) if already_sharded else None
    cutter = inside[0]
    if isinstance(cutter, BatchSamplerShard):
        return Cut(cutter.shard)
    own = Shard(cutter.rank, cutter.num_replicas)
    if not is_plain(batch_sampler) or type(cutter).__iter__ not in _DEALS_IN_TURN:
        return Cut(own)
    num_samples = min(len(cutter.dataset), cutter.total_size)
    return Cut(own, num_samples, max(0, -(-(num_samples - own.index) // own.count)))


def _cuts(sampler: Any) -> bool:
    if isinstance(sampler, BatchSamplerShard):
        return sampler.num_processes > 1
    return isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1


def find_generator(loader: DataLoader[Any]) -> torch.Generator | None:
    """Find the generator of a loader: its sampler's, batch sampler's or stream's, else torch's."""
    stream = loader.dataset if isinstance(loader.dataset, IterableDataset) else None
    samplers = reversed(nested_samplers(loader.batch_sampler))
    for owner in (*samplers, loader.sampler, stream, loader):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator
    return None


def find_seed(loader: DataLoader[Any]) -> int | None:
    """Find the seed that the user chose for a loader's order: a sampler's, or a generator's."""
    for sampler in (loader.sampler, *nested_samplers(loader.batch_sampler)):
        if isinstance(sampler, (SeedableRandomSampler, PermutedSampler)):
            return sampler.seed
    generator = find_generator(loader)
    return None if generator is None else generator.initial_seed()


def follows_seed(batch_sampler: Any) -> bool:
    """Tell whether the order is a function of (seed, epoch), or becomes one by `seeded`."""
    if not is_plain(batch_sampler):
        return False
    sampler = batch_sampler.sampler
    return is_by_value(sampler) or type(sampler) in (*_SHUFFLES, *_DRAWS)


def seeded(feed: Feed, seed: int) -> Feed:
    """Let a sampler of torch's inside a feed that draws its order follow (seed, epoch)."""
    if not isinstance(feed, IndexFeed):
        return feed
    batches: Any = feed.batches.batch_sampler
    if not is_plain(batches):
        return feed
    sampler: Sampler[int]
    if type(batches.sampler) in _DRAWS:
        sampler = SeededDraws(batches.sampler, seed)
    elif type(batches.sampler) in _SHUFFLES:
        sampler = _seeded_shuffle(batches.sampler, seed)
    else:
        return feed
    follows = BatchSampler(sampler, batches.batch_size, batches.drop_last)
    return replace(feed, batches=feed.batches.over(follows))


def _seeded_shuffle(shuffle: Any, seed: int) -> SeedableRandomSampler:
    # None follows a data set whose length changes from epoch to epoch, as RandomSampler does.
    num_samples = None if len(shuffle) == len(shuffle.data_source) else len(shuffle)
    return SeedableRandomSampler(
        shuffle.data_source, shuffle.replacement, num_samples, data_seed=seed
    )


@final
class BroadcastSampler(Sampler[Any], OrderedSampler):
    """The order of a sampler on rank 0, on every rank.

    Collective: drawing its order is.
    """

    def __init__(self, sampler: Any, comm: Comm) -> None:
        self.sampler = sampler
        self._comm = comm

    def order(self) -> Order:
        """Draw an order on rank 0 and send it to all."""
        return SequenceOrder(_from_rank_0(self.sampler, self._comm))

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples of an epoch, in rank 0's order."""
        return iter(_from_rank_0(self.sampler, self._comm))

    def __len__(self) -> int:
        """Count the samples of an epoch."""
        return len(self.sampler)


@final
class BroadcastBatches(BatchSampler):
    """The batches of a batch sampler on rank 0, on every rank.

    Collective: iterating it is.
    """

    def __init__(self, batch_sampler: Any, comm: Comm) -> None:
        self.batch_sampler = batch_sampler
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
        self.sampler = getattr(batch_sampler, "sampler", batch_sampler)
        self._comm = comm

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch, in rank 0's order."""
        return iter(_from_rank_0(self.batch_sampler, self._comm))

    def __len__(self) -> int:
        """Count the batches of an epoch."""
        return len(self.batch_sampler)


def _from_rank_0(source: Any, comm: Comm) -> list[Any]:
    """List what rank 0's sampler yields, on every rank.

    What it raises there is raised on rank 0, and told to the others as a CommError.
    """
    failure: Exception | None = None
    items: list[Any] | None = None
    if comm.rank == 0:
        try:
            items = [list(item) if isinstance(item, list) else item for item in source]
        except Exception as error:  # noqa: BLE001  # raised again below, once all ranks know
            failure = error
    cause = None if failure is None else f"{type(failure).__name__}: {failure}"
    cause, items = comm.broadcast_object((cause, items))
    if failure is not None:
        raise failure
    if cause is not None or items is None:
        raise CommError(f"Rank 0 could not draw the order that all ranks wait for: {cause}")
    return items
