"""Streams: data sets that are read from front to back, with or without a known length."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, Protocol, final, runtime_checkable

from torch.utils.data import IterableDataset, get_worker_info

from shardplug.kinds import check_flag, check_integer, check_iterable
from shardplug.passes import Pass, Snapshot, StreamPass
from shardplug.plan.cursor import Cursor
from shardplug.plan.deal import Part, deal
from shardplug.plan.shard import Shard
from shardplug.plan.split import ShardPlan, Split, Tail, choose_tail
from shardplug.samplers import HasEpoch, known_length
from shardplug.worker_info import WatchedInfo, WorkerSplit, check_worker_split, worker_place


@runtime_checkable
class CanShard(Protocol):
    """A data set that can give the part of one shard, without reading the others."""

    def shard(self, num_shards: int, index: int) -> Any:
        """Return part ``index`` of ``num_shards``."""


def own_part(dataset: Any, shard: Shard) -> Any | None:
    """Ask a stream for the part of one shard.

    Args:
        dataset: Any iterable data set.
        shard: Which part, of how many.

    Returns:
        The part, or None if the stream cannot divide itself into as many.
    """
    if shard.count == 1 or not isinstance(dataset, CanShard):
        return None
    # What cannot be divided finer than its files says how many it has; Hugging Face's streams do.
    available = getattr(dataset, "num_shards", None)
    if isinstance(available, int) and available < shard.count:
        return None
    return dataset.shard(num_shards=shard.count, index=shard.index)


def is_cut_by_node(dataset: Any) -> bool:
    """Tell whether a stream of Hugging Face datasets went through ``split_dataset_by_node``."""
    return getattr(dataset, "_distributed", None) is not None


def splits_by_worker(dataset: Any) -> bool:
    """Tell whether a stream is of a kind known to divide itself among workers."""
    module = type(dataset).__module__
    return module.split(".")[0] == "datasets"


@runtime_checkable
class HasState(Protocol):
    """A data set that can say where it stands, and go on from there."""

    def state_dict(self) -> Any:
        """Return where it stands."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Let the next iteration go on from where the state was taken."""


def can_jump(dataset: Any) -> bool:
    """Tell whether a stream can go on from a state without losing anything.

    Those of Hugging Face datasets can, unless they shuffle through a buffer, whose content is in no
    state of theirs.
    """
    return isinstance(dataset, HasState) and not _has_buffer(getattr(dataset, "_ex_iterable", None))


def _has_buffer(iterable: Any) -> bool:
    if iterable is None:
        return False
    inner = [getattr(iterable, "ex_iterable", None), *getattr(iterable, "ex_iterables", ())]
    return "BufferShuffled" in type(iterable).__name__ or any(map(_has_buffer, inner))


@final
class Items:
    """The items of a stream in this process, from a position on.

    Args:
        source: The items.
        position: How many came before.
        window: Items in a window; states are taken where one ends.
        take_state: Says where the stream stands; None: it cannot.
        seed_sample: Called with the position of each item before it is made; None: nothing is.
    """

    def __init__(
        self,
        source: Iterator[Any],
        position: int,
        *,
        window: int,
        take_state: Callable[[], Any] | None,
        seed_sample: Callable[[int], None] | None,
    ) -> None:
        self._source = source
        self._position = self._start = position
        self._window = window
        self._take_state = take_state
        self.seed_sample = seed_sample
        # The latest three: an exact end holds a window back, and may borrow from the one before.
        self._states: deque[tuple[int, Any]] = deque(maxlen=3)

    def __iter__(self) -> Iterator[Any]:
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Make the next item."""
        if self.seed_sample is not None:
            self.seed_sample(self._position)
        item = next(self._source)
        self._position += 1
        if self._take_state is not None and not (self._position - self._start) % self._window:
            self._states.append((self._position, self._take_state()))
        return item

    def state_before(self, position: int) -> tuple[int, Any] | None:
        """Return the last state that was taken at a position or before it, and its position."""
        found = None
        for at, state in self._states:
            if at <= position:
                found = at, state
        return found


@dataclass(frozen=True, slots=True)
class OpenStream:
    """A stream that is being read in this process.

    Attributes:
        parts: All parts that are wanted of it, of which a worker makes its own.
        splits_itself: Whether the data set has divided itself among the workers, so that all of
            these are this worker's.
        items: Where its states are kept.
    """

    parts: Iterator[Part[Any]]
    splits_itself: bool
    items: Items


def open_stream(
    dataset: Any,
    plan: ShardPlan,
    worker_split: WorkerSplit,
    *,
    shards: Sequence[Shard] | None = None,
    snapshot: Snapshot | None = None,
    seed_sample: Callable[[int], None] | None = None,
) -> OpenStream:
    """Start reading a stream in this process.

    Args:
        dataset: The stream.
        plan: How it is dealt, from where it starts.
        worker_split: Who divides it among workers.
        shards: Whose parts are wanted; None: those of the plan's own shard.
        snapshot: A state of the stream from which the start can be reached; None: read through.
        seed_sample: Called with the position of each item before it is made.
    """
    WatchedInfo.install(worker_split)
    is_tracked = can_jump(dataset)
    begin = dataset
    if snapshot is not None:
        begin = _copy_of(dataset)  # padding is from the start of the epoch
        dataset.load_state_dict(snapshot.state)
    source = iter(dataset)
    position = 0 if snapshot is None else snapshot.position
    first_window = list(islice(source, min(plan.start - position, plan.global_batch_size)))
    position += len(first_window)
    position += sum(1 for _ in islice(source, plan.start - position))
    if snapshot is None and first_window:
        source = _noted(source, first_window, plan.global_batch_size)
    items = Items(
        source,
        position,
        window=plan.global_batch_size,
        take_state=dataset.state_dict if is_tracked else None,
        seed_sample=seed_sample,
    )
    first = list(islice(items, 1))
    if snapshot is not None and splits_by_worker(dataset):
        # Those of Hugging Face would start every iteration over the epoch from there.
        dataset.load_state_dict(None)
    info: Any = get_worker_info()
    if worker_split == "dataset":
        splits_itself = info is not None
    else:
        splits_itself = isinstance(info, WatchedInfo) and info.decide()
    head = first_window if snapshot is None else partial(iter, begin)
    parts = deal(chain(first, items), plan, head=head, shards=shards)
    return OpenStream(parts, splits_itself, items)


def _noted(source: Iterator[Any], window: list[Any], size: int) -> Iterator[Any]:
    """Yield items, and fill a window up with the first of them: the end may be padded from it."""
    for item in source:
        if len(window) < size:
            window.append(item)
        yield item


def _copy_of(dataset: Any) -> Any:
    """Copy a stream, so that loading a state into one leaves the other as it was."""
    copied = copy.copy(dataset)
    if copied.__dict__ is dataset.__dict__:  # those of Hugging Face share it
        copied.__dict__ = dict(dataset.__dict__)
    return copied


@dataclass(frozen=True, slots=True)
class StreamFeed:
    """How a loader's stream is dealt: what `BatchSamplerShard` is to data that is indexed.

    Attributes:
        dataset: What this rank reads: the whole stream, or its own part of it.
        batch_size: As the loader declares it; None if the items are batches.
        shard: Which part of the data this rank gets, of how many.
        split: How batches are divided.
        tail: What happens at an uneven end.
        is_cut: Whether ``dataset`` is this rank's part already, whose end other ranks cannot see.
        worker_split: Who divides the stream among workers.
        num_workers: How many workers the loader has.
        is_for_all: Whether passes make the batches of all shards, step by step.
        is_by_value: A stream has no order that could be compared before it is read.
    """

    dataset: Any
    batch_size: int | None
    shard: Shard
    split: Split
    tail: Tail
    is_cut: bool
    worker_split: WorkerSplit
    num_workers: int = 0
    is_for_all: bool = False
    is_by_value: bool = True

    @property
    def is_stream(self) -> bool:
        """A stream is one."""
        return True

    @property
    def is_split(self) -> bool:
        """Whether workers divide the stream among themselves, each to its own end."""
        return self.worker_split == "dataset" and self.num_workers > 1

    @property
    def dealt(self) -> ShardPlan:
        """How what this rank reads is dealt, with an open end."""
        size = 1 if self.batch_size is None else self.batch_size
        if self.is_cut:
            rows = size // self.shard.count if self.split is Split.SLICE else size
            return ShardPlan(None, rows, Shard(0, 1), tail=self.tail)
        return ShardPlan(None, size, self.shard, split=self.split, tail=self.tail)

    @property
    def num_samples(self) -> int | None:
        """Items of the stream that is read, None if that does not tell how many steps there are."""
        # Workers among which the data set divides itself may each add a step at their ends.
        return None if self.is_cut or self.is_split else known_length(self.dataset)

    @property
    def plan(self) -> ShardPlan:
        """The plan of a full epoch; ``num_samples`` is None if that is not known."""
        size = 1 if self.batch_size is None else self.batch_size
        return ShardPlan(self.num_samples, size, self.shard, split=self.split, tail=self.tail)

    @property
    def global_batch_size(self) -> int | None:
        """Rows of a full step over all shards; None if the items are batches."""
        return None if self.batch_size is None else self.plan.global_batch_size

    @property
    def drop_last(self) -> bool:
        """Whether rows may be dropped at the end."""
        return self.tail is Tail.DROP

    def epoch_parts(self) -> list[HasEpoch]:
        """List what has to be told the epoch."""
        return [self.dataset] if isinstance(self.dataset, HasEpoch) else []

    @property
    def unit(self) -> str:
        """What positions count: samples, or batches where the items are batches."""
        return "batches" if self.batch_size is None else "samples"

    @property
    def num_positions(self) -> int | None:
        """How far positions count in an epoch; None if only a pass will tell."""
        return self.num_samples

    @property
    def kind(self) -> str:
        """Name the class of the stream."""
        return type(self.dataset).__name__

    def begin(self, start: Cursor, *, look: int = 0) -> tuple[Pass, list[Any]]:
        """Start a pass; nothing of the stream is looked at."""
        try:
            steps: int | None = self._count_from(start.consumed)
        except TypeError:
            steps = None
        return StreamPass(start.consumed, num_steps=steps, snapshots=start.snapshots), []

    def count_steps(self, start: Cursor) -> int:
        """Count the steps from a position to the end, or raise TypeError if that is not known."""
        return max(0, self._count_from(start.consumed) - start.steps)

    def for_all(self) -> StreamFeed:
        """Return a feed whose passes make the batches of all shards, step by step."""
        return replace(self, is_for_all=True)

    def _count_from(self, consumed: int) -> int:
        plan = self.plan
        if plan.num_samples is None:
            raise TypeError(
                f"{type(self.dataset).__name__} has no known length: only a pass will tell."
            )
        # A stream may be shorter than its length says; then its end tells.
        rest = plan.seek(min(consumed, plan.num_samples))
        shards = self.shard.all() if self.is_for_all else [self.shard]
        return sum(rest.seek(rest.start, shard=each).num_steps for each in shards)

    def __len__(self) -> int:
        """Count the steps of a pass.

        Raises:
            TypeError: If the stream does not tell its length.
        """
        return self._count_from(0)


@final
class IterableDatasetShard(IterableDataset[Any]):
    """The samples of one shard of a stream.

    A stream that can divide itself (``shard(num_shards, index)``, as those of Hugging Face datasets
    with enough shards) is asked for this shard's part, so each rank reads only that. Any other
    one is read by every rank, which keeps its own rows of each window.

    Args:
        dataset: Any iterable of samples; the same in the same order on every rank.
        batch_size: Samples per batch: per shard, or over all shards with ``split_batches``.
        drop_last: Drop an incomplete last window; else it is filled from the first, cycling.
        num_processes: Number of shards, at least 1.
        process_index: Which shard, in [0, num_processes).
        split_batches: False: each shard gets whole batches. True: each batch is cut in pieces, and
            its size must be a multiple of ``num_processes``.
        even_batches: False: nothing is repeated, shards may differ.
        tail: "pad", "drop", "uneven" or "exact" says outright what happens at the end, and wins.
        worker_split: Who divides the stream among the workers of a loader: "shardplug", "dataset"
            (by ``get_worker_info()``), or "auto" to find out.

    Raises:
        PlanError: If an argument does not fit.

    Example:
        >>> list(IterableDatasetShard(range(8), 2, num_processes=2, process_index=1))
        [2, 3, 6, 7]
        >>> list(IterableDatasetShard(range(8), 4, False, 2, 0, split_batches=True))
        [0, 1, 4, 5]
    """

    def __init__(  # noqa: PLR0917  # these names and their order are Accelerate's
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        *,
        even_batches: bool = True,
        tail: str | Tail | None = None,
        worker_split: str = "auto",
    ) -> None:
        shard = Shard(process_index, num_processes)
        self.dataset = check_iterable("dataset", dataset)
        self.batch_size: int = check_integer("batch_size", batch_size)
        self.drop_last: bool = check_flag("drop_last", drop_last)
        self.num_processes, self.process_index = shard.count, shard.index
        self.split_batches: bool = check_flag("split_batches", split_batches)
        self.epoch = 0
        self._worker_split = check_worker_split(worker_split)
        is_even = check_flag("even_batches", even_batches)
        self.tail = choose_tail(tail, even_batches=is_even, drop_last=self.drop_last)
        split = Split.SLICE if self.split_batches else Split.WHOLE
        part = None if self.tail is Tail.EXACT else own_part(dataset, shard)
        self._feed = StreamFeed(
            dataset=dataset if part is None else part,
            batch_size=self.batch_size,
            shard=shard,
            split=split,
            tail=self.tail,
            is_cut=part is not None,
            worker_split=self._worker_split,
        )
        # Raises where batches of this size cannot be split.
        ShardPlan(None, self.batch_size, shard, split=split, tail=self.tail)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, and tell the data set."""
        self.epoch = epoch = check_integer("epoch", epoch)
        for part in self._feed.epoch_parts():
            part.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Yield this shard's samples; in a worker, those of the windows that are its to make."""
        feed = self._feed
        info: Any = get_worker_info()
        if isinstance(info, WatchedInfo) and info.is_of_another(self):
            # Read by a user's stream: the split among workers is shown to whoever watches that.
            parts: Iterator[Part[Any]] = deal(feed.dataset, feed.dealt)
            splits_itself = False
            worker, num_workers = info.id, info.num_workers
        else:
            opened = open_stream(feed.dataset, feed.dealt, feed.worker_split)
            parts, splits_itself = opened.parts, opened.splits_itself
            worker, num_workers = worker_place()
        own = parts if splits_itself else islice(parts, worker, None, num_workers)
        for part in own:
            yield from part.rows

    def __len__(self) -> int:
        """Count the samples that a pass yields on this shard.

        Raises:
            TypeError: If the stream does not tell its length.
        """
        plan, steps = self._feed.plan, len(self._feed)
        full = min(plan.num_full_steps, steps)
        rest = sum(len(plan.positions(step)) for step in range(full, steps))
        return full * plan.shard_batch_size + rest
