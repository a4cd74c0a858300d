"""What a loader's passes are made from: a batch sampler, a sampler of ready batches, or a stream.

Both loaders ask the same feeds, which is why dispatching never changes who sees what.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, final

from torch.utils.data import BatchSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from shardplug.comm import Comm
from shardplug.errors import CommError
from shardplug.orders import Order, SequenceOrder
from shardplug.passes import PaddedPass, Pass, ReadyPass, SampledPass
from shardplug.plan.shard import Shard
from shardplug.plan.split import ShardPlan, Tail
from shardplug.samplers import BatchSamplerShard, HasEpoch, epoch_parts


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

    def begin(self, consumed: int = 0, *, look: int = 0) -> tuple[Pass, list[Any]]:
        """Start a pass; also returns the first items of the epoch's order, to compare."""

    def epoch_parts(self) -> list[HasEpoch]:
        """List what has to be told the epoch."""

    def __len__(self) -> int:
        """Count the steps of a full pass, or raise TypeError if that is not known."""


@final
@dataclass(frozen=True, slots=True)
class IndexFeed:
    """A feed of index batches, for data sets that are looked up by index.

    Attributes:
        batches: Divides the batch sampler.
        is_ready: Whether each index stands for a batch that the data set has ready.
        is_cut: Whether the batch sampler yields this rank's part only.
        num_real: For a sampler that pads by itself, at its end: how many of its samples are real.
    """

    batches: BatchSamplerShard
    is_ready: bool = False
    is_cut: bool = False
    num_real: int | None = None

    @property
    def shard(self) -> Shard:
        """Which part of the data, of how many."""
        return self.batches.shard

    @property
    def tail(self) -> Tail:
        """What happens at an uneven end."""
        return self.batches.tail

    @property
    def plan(self) -> ShardPlan:
        """The plan of a full epoch, in samples or in ready batches."""
        return self.batches.plan

    @property
    def batch_size(self) -> int | None:
        """The batch size that the user's loader declares."""
        return None if self.is_ready else self.batches.batch_size

    @property
    def global_batch_size(self) -> int | None:
        """Rows of a full step over all shards; None if no batch size is declared."""
        return None if self.is_ready else self.batches.global_batch_size

    @property
    def num_samples(self) -> int | None:
        """Samples (or ready batches) in the order of an epoch; None if only a pass will tell."""
        return self.batches.num_samples if self.num_real is None else self.num_real

    @property
    def is_by_value(self) -> bool:
        """Whether the order needs no comparing across ranks."""
        return self.batches.is_by_value

    def begin(self, consumed: int = 0, *, look: int = 0) -> tuple[Pass, list[Any]]:
        """Start a pass; what samplers have to draw is drawn now."""
        pass_, head = self.batches.begin(consumed, look=look)
        if self.num_real is not None and isinstance(pass_, SampledPass):
            return PaddedPass(pass_, self.num_real), head
        return (ReadyPass(pass_) if self.is_ready else pass_), head

    def epoch_parts(self) -> list[HasEpoch]:
        """List the batch sampler, and samplers inside it, that follow the epoch."""
        return epoch_parts(self.batches.batch_sampler)

    def __len__(self) -> int:
        """Count the steps of a full pass, or raise TypeError if that is not known."""
        return len(self.batches)


def num_real_samples(sampler: Any) -> int | None:
    """Count the samples of a DistributedSampler that are not its padding.

    It deals position ``p * num_replicas + rank`` of the padded order as its sample ``p``, so what
    it pads stands at the end of every rank's part.

    Returns:
        Real samples of this sampler's rank; None if it does not pad.
    """
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return None
    length = len(sampler.dataset)  # type: ignore[arg-type]
    return max(0, -(-(length - sampler.rank) // sampler.num_replicas))


@final
class BroadcastSampler(Sampler[Any]):
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
