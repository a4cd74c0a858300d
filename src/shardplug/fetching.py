"""How a pass gets its batches made: tasks go out to readers, messages come back in order.

Readers run in the worker processes of a torch DataLoader, which moves tasks and messages; without
workers they run in this process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast, final

import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from shardplug.feeds import Feed
from shardplug.passes import Pass, Snapshot, StreamPass
from shardplug.plan.cursor import Progress
from shardplug.plan.order import mix_seed
from shardplug.streams import HasState, StreamFeed
from shardplug.workers import (
    MapReader,
    MapTask,
    Message,
    Record,
    Seeding,
    StartWorker,
    StreamReader,
    StreamTask,
    as_it_is,
)


def message_sizes(per_message: int, num_workers: int) -> Iterator[int]:
    """Yield how many batches each message carries: 1, 2, 4, ... ``per_message``, worker by worker.

    The first batch comes as early as if each came alone. Without workers each does.
    """
    size = 1
    while True:
        for _ in range(max(1, num_workers)):
            yield size
        size = min(2 * size, per_message if num_workers else 1)


@final
class MapTasks:
    """The index batches of the pass under way, as tasks for a `MapReader`.

    Args:
        index_batches: Of the pass.
        progress: Where the loader stands.
        per_message: Most batches that one message carries.
        num_workers: Workers of the loader.
        has_positions: Whether readers have to know where the rows of a batch stand in the order.
    """

    def __init__(
        self,
        index_batches: Iterable[Any],
        progress: Progress,
        *,
        per_message: int,
        num_workers: int,
        has_positions: bool = False,
    ) -> None:
        self._index_batches = index_batches
        self._progress = progress
        self._per_message = per_message
        self._num_workers = num_workers
        self._has_positions = has_positions

    def __iter__(self) -> Iterator[MapTask]:
        """Yield tasks; every pass begins anew."""
        run = self._progress.run
        assert run is not None  # a pass has begun
        record = cast(Pass, run.record)
        # A generator: iterating anew, as islice does, starts some wrappers of samplers over.
        index_batches = (index for index in self._index_batches)
        snapshots = deque(self._in_turn(run.start.snapshots))
        step = 0
        for size in message_sizes(self._per_message, self._num_workers):
            chunk = list(islice(index_batches, size))
            if not chunk:
                return
            positions = None
            if self._has_positions:
                positions = [record.positions(at) for at in range(step, step + len(chunk))]
            step += len(chunk)
            snapshot = snapshots.popleft() if snapshots else None
            yield MapTask(run.epoch, run.number, chunk, positions, snapshot)

    def _in_turn(self, snapshots: Sequence[Snapshot]) -> list[Snapshot | None]:
        """Bring the states of the workers in order: after the latest one's turn is the next one's.

        The first task goes to the first worker, whichever it was before.
        """
        by_worker = {each.worker[0]: each for each in snapshots if each.worker is not None}
        if not by_worker:
            return []
        count = max(1, self._num_workers)
        turn = next(reversed(by_worker)) + 1
        return [by_worker.get((turn + at) % count) for at in range(count)]


@final
class StreamTasks:
    """The steps of the pass under way, without end, as tasks for a `StreamReader`.

    Args:
        progress: Where the loader stands.
        per_message: Most steps that one message carries.
        num_workers: Workers of the loader.
        per_step: Batches of one step: one, or those of all shards.
    """

    def __init__(
        self, progress: Progress, *, per_message: int, num_workers: int, per_step: int = 1
    ) -> None:
        self._progress = progress
        self._per_message = per_message
        self._num_workers = num_workers
        self._per_step = per_step

    def __iter__(self) -> Iterator[StreamTask]:
        """Yield tasks; every pass begins anew."""
        run = self._progress.run
        assert run is not None  # a pass has begun
        assert isinstance(run.record, StreamPass)
        record = run.record
        start = first = record.first_step
        left = max(1, self._num_workers)
        for size in message_sizes(self._per_message, self._num_workers):
            count = size * self._per_step
            snapshots = record.begins_with if left else ()
            left -= left > 0
            yield StreamTask(run.epoch, run.number, start, first, count, record.start, snapshots)
            first += count


@final
@dataclass(slots=True)
class Records:
    """What the readers of a stream tell about their batches.

    Attributes:
        batches: For each batch that is to come: its rows, how many of them are real, what is
            consumed after it, and a state of the source.
        splits_itself: Whether the data set divides itself among the workers.
    """

    batches: deque[Record] = field(default_factory=deque)
    splits_itself: bool = False


@final
class Messages:
    """The batches in the messages of a loader of readers, one by one.

    It takes the place of torch's iterator in the loader that the user's ``__iter__`` knows.

    Args:
        readers: The loader whose data set is a reader; iterated anew by `_reset`.
        num_readers: Readers that take turns, at least 1.
        records: Where to put down what is told about a stream's batches.
        progress: Where the loader stands.
        per_step: Batches of one step: one, or those of all shards.

    Attributes:
        records: As given.
    """

    def __init__(
        self,
        readers: DataLoader[Any],
        *,
        num_readers: int,
        records: Records,
        progress: Progress,
        per_step: int = 1,
    ) -> None:
        self._readers = readers
        self._num_readers = num_readers
        self._progress = progress
        self._per_step = per_step
        self.records = records
        self._reset()

    def _reset(self, loader: Any = None) -> None:
        """Start a pass; torch's DataLoader calls it where workers are kept."""
        self._source = iter(self._readers)
        self._batches: deque[Any] = deque()
        self.records.batches.clear()  # of a pass that was left early
        self._round: list[Message] = []
        self._failure: Any = None
        self._ends = 0
        self._turn = self._first_turn()

    def _first_turn(self) -> int:
        """Say whose turn it is first among workers that split a stream."""
        run = self._progress.run
        if run is None or not isinstance(run.record, StreamPass):
            return 0
        latest = run.record.begins_with[-1:]
        if latest and latest[0].worker is not None:
            return (latest[0].worker[0] + 1) % self._num_readers
        return run.record.first_step // self._per_step % self._num_readers

    def __iter__(self) -> Iterator[Any]:
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Return the next batch, or raise what was raised in its place."""
        while not self._batches:
            if self._failure is not None:
                self._failure.reraise()
            if self._ends >= self._num_readers and not self._round:
                self._source = iter(())  # type: ignore[assignment]  # lets go of the workers
                raise StopIteration
            self._receive(self._next_message())
        return self._batches.popleft()

    def _next_message(self) -> Message:
        try:
            message: Message = next(self._source)
        except (ConnectionError, EOFError) as error:
            if not self._readers.num_workers:
                raise  # the user's own
            # What a worker raises comes in a message; a tensor in one is fetched from its worker.
            raise RuntimeError("A worker of the loader ended with its batches unread.") from error
        return message

    def _receive(self, message: Message) -> None:
        # All readers have ended when each in turn has said so.
        self._ends = self._ends + 1 if message.has_ended else 0
        self.records.splits_itself = message.splits_itself
        self._round.append(message)
        # Workers that split a stream among them take turns, step by step: in one round each is
        # asked for as many. Of other readers each continues where the one before it stopped.
        if message.splits_itself and len(self._round) < self._num_readers:
            return
        turn = self._turn if message.splits_itself else 0
        in_turn = [*self._round[turn:], *self._round[:turn]]
        self._round = []
        round_ = [(each, each.unpacked()) for each in in_turn]
        for step in range(1 + max(len(batches) for _, batches in round_) // self._per_step):
            for each, batches in round_:
                if self._take_step(each, batches, step):
                    return

    def _take_step(self, message: Message, batches: list[Any], step: int) -> bool:
        """Take the batches of one step out of a message; tells whether it failed within it."""
        start, stop = step * self._per_step, (step + 1) * self._per_step
        self._batches.extend(batches[start:stop])
        self.records.batches.extend(message.records[start:stop])
        if message.failure is not None and start <= len(batches) < stop:
            self._failure = message.failure
        return self._failure is not None

    @property
    def torch_iterator(self) -> Any:
        """The iterator of torch's that moves the messages."""
        return self._source

    def __getattr__(self, name: str) -> Any:
        """Look anything else up in torch's iterator."""
        if name.startswith("__") or name == "_source":
            raise AttributeError(name)
        return getattr(self._source, name)


@final
@dataclass(frozen=True, slots=True)
class Crew:
    """The readers of a loader, and the torch DataLoader that runs them.

    Attributes:
        inner: The clone of the user's loader whose data is read.
        feed: How it is divided.
        seed: Of the loader.
        per_message: Most batches that one message carries.
        is_stateful: Whether readers run in torchdata's StatefulDataLoader.
        seeds_samples: Whether readers seed before each sample.
    """

    inner: DataLoader[Any]
    feed: Feed
    seed: int
    per_message: int
    is_stateful: bool
    seeds_samples: bool

    def start(
        self,
        epoch: int,
        generator: torch.Generator,
        progress: Progress,
        records: Records,
    ) -> Messages:
        """Start the readers for a pass; where workers are kept, also for those after it.

        Args:
            epoch: The epoch of the pass.
            generator: What torch may draw from.
            progress: Where the loader stands when a pass begins.
            records: Where to put down what is told about a stream's batches.
        """
        inner, feed = self.inner, self.feed
        seeding = self._seeding()
        split = feed.worker_split if isinstance(feed, StreamFeed) else None
        kind = StatefulDataLoader if self.is_stateful else DataLoader
        readers = kind(
            self._reader(seeding),
            batch_size=None,
            sampler=self._tasks(progress),
            num_workers=inner.num_workers,
            collate_fn=as_it_is,
            pin_memory=inner.pin_memory,
            timeout=inner.timeout,
            worker_init_fn=StartWorker(seeding, epoch, inner.worker_init_fn, split),
            multiprocessing_context=inner.multiprocessing_context,
            generator=generator,
            prefetch_factor=self._prefetch(),
            persistent_workers=inner.persistent_workers,
        )
        return Messages(
            readers,
            num_readers=max(1, inner.num_workers),
            records=records,
            progress=progress,
            per_step=self._per_step,
        )

    @property
    def _per_step(self) -> int:
        """Batches of a step that readers of a stream make together."""
        is_for_all = isinstance(self.feed, StreamFeed) and self.feed.is_for_all
        return self.feed.shard.count if is_for_all else 1

    def _seeding(self) -> Seeding:
        """Say what readers draw from: where all read the same stream, all draw the same."""
        feed, index = self.feed, self.feed.shard.index
        is_shared = isinstance(feed, StreamFeed) and not feed.is_cut
        for_samples = None
        if self.seeds_samples:
            # Positions in a part of its own are those of other ranks' parts too.
            for_samples = mix_seed(self.seed, index) if feed.is_cut else self.seed
        return Seeding(self.seed, 0 if is_shared else index, is_shared, for_samples)

    def _reader(self, seeding: Seeding) -> Any:
        inner, feed = self.inner, self.feed
        if isinstance(feed, StreamFeed):
            is_batched = feed.batch_size is not None
            return StreamReader(
                feed.dataset,
                inner.collate_fn,
                is_batched,
                seeding,
                feed.dealt,
                feed.worker_split,
                feed.shard.all() if feed.is_for_all else None,
            )
        is_batched = inner.batch_sampler is not None
        keeps_state = self.is_stateful and isinstance(inner.dataset, HasState)
        return MapReader(inner.dataset, inner.collate_fn, is_batched, seeding, keeps_state)

    def _tasks(self, progress: Progress) -> MapTasks | StreamTasks:
        counts = {"per_message": self.per_message, "num_workers": self.inner.num_workers}
        if isinstance(self.feed, StreamFeed):
            return StreamTasks(progress, **counts, per_step=self._per_step)
        batches = self.inner.batch_sampler
        index_batches = self.inner.sampler if batches is None else batches
        return MapTasks(index_batches, progress, **counts, has_positions=self.seeds_samples)

    def _prefetch(self) -> int | None:
        """Say how many messages each worker has in flight: as many batches as without packing."""
        wanted = self.inner.prefetch_factor
        return None if wanted is None else max(1, -(-wanted // self.per_message))
