"""What runs where batches are made: in a loader's worker processes, or in the process itself.

A task says what to make and in which epoch, so that workers that live longer than a pass learn of
each new epoch where they need it: before their first sample of it. A task may ask for several
batches; its answer is one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from shardplug import packing, rng
from shardplug.passes import Snapshot
from shardplug.plan.deal import Part
from shardplug.plan.order import SampleSeeds, mix_seed, worker_seed
from shardplug.plan.shard import Shard
from shardplug.plan.split import ShardPlan
from shardplug.rows import count_rows
from shardplug.samplers import HasEpoch
from shardplug.streams import OpenStream, can_jump, open_stream
from shardplug.worker_info import WatchedInfo, WorkerSplit, worker_place

Record = tuple[int, int, int, Snapshot | None]
"""Rows of a batch, how many are real, what is consumed after it, and a state of the source."""


@dataclass(frozen=True, slots=True)
class Message:
    """What comes back for a task.

    Attributes:
        batches: As many as were asked for, fewer at the end of a stream or before a failure;
            packed if there may be several.
        records: For a stream: rows of each batch, how many are real, what is consumed after it, and
            the last state of the stream before that, if it has states. For data sets with states
            that are looked up by index: the state after each batch.
        has_ended: Whether this reader has come to the end of a stream.
        failure: What was raised in place of the next batch.
        splits_itself: Whether a stream divides itself among the workers.
    """

    batches: list[Any] | packing.Packed
    records: tuple[Record, ...] = ()
    has_ended: bool = False
    failure: ExceptionWrapper | None = None
    splits_itself: bool = False

    def unpacked(self) -> list[Any]:
        """Return the batches."""
        return self.batches if isinstance(self.batches, list) else packing.unpack(self.batches)

    def pin_memory(self, device: str | None = None) -> Message:
        """Copy the batches to page-locked memory; torch's loader asks for it."""
        pinned = [pin_memory(batch, device) for batch in self.unpacked()]
        return replace(self, batches=pinned)


@dataclass(frozen=True, slots=True)
class Seeding:
    """What the random numbers of a reader follow, besides the epoch.

    Attributes:
        seed: Of the loader.
        shard_index: Which part of the data the loader reads; 0 where all shards read the same and
            must draw the same.
        is_shared: Whether all workers of the loader read the same and must draw the same.
        for_samples: What is mixed with the position of each sample to seed before it; None: nobody
            seeds there.
    """

    seed: int
    shard_index: int
    is_shared: bool = False
    for_samples: int | None = None

    def apply(self, epoch: int, worker: int) -> int:
        """Seed this process for an epoch; returns the seed."""
        worker = 0 if self.is_shared else worker
        seed = worker_seed(self.seed, epoch, rank=self.shard_index, worker=worker)
        rng.seed_cpu(seed)
        return seed

    def by_sample(self, epoch: int) -> Callable[[int], None] | None:
        """Return what seeds this process before a sample, by its position; None if nothing does."""
        if self.for_samples is None:
            return None
        seeds = SampleSeeds(self.for_samples, epoch)
        return lambda position: rng.seed_cpu(seeds[position])

    def of_part(self, worker: int, num_workers: int) -> Seeding:
        """Return the seeding of a worker's own part, whose positions others have too."""
        if self.for_samples is None:
            return self
        return replace(self, for_samples=mix_seed(self.for_samples, worker, num_workers))


@dataclass(frozen=True, slots=True)
class MapTask:
    """Asks for batches by index.

    Attributes:
        epoch: The epoch of the pass.
        number: Tells one pass from another.
        index_batches: The indices of each batch.
        positions: Where the rows of each batch stand in the epoch's order, if that matters.
        snapshot: A state for the data set to go on from.
    """

    epoch: int
    number: int
    index_batches: list[Any]
    positions: list[Sequence[int]] | None = None
    snapshot: Snapshot | None = None


@dataclass(slots=True)
class MapReader:
    """Makes batches by index.

    Attributes:
        dataset: The user's data set.
        collate: The user's collate function.
        is_batched: Whether an index batch is a list of ids, to be fetched and collated together.
        seeding: What random numbers follow.
        keeps_state: Whether the data set has a state that is told after each batch.
    """

    dataset: Any
    collate: Callable[[Any], Any]
    is_batched: bool
    seeding: Seeding
    keeps_state: bool = False
    _number: int | None = None
    _seed_sample: Callable[[int], None] | None = None
    _preserved: rng.PreservedCpu = field(default_factory=rng.PreservedCpu)

    def __getitem__(self, task: MapTask) -> Message:
        """Make the batches of one task; what is raised ends it."""
        if self.seeding.for_samples is None or get_worker_info() is not None:
            return self._answer(task)
        with self._preserved:
            return self._answer(task)

    def _answer(self, task: MapTask) -> Message:
        if task.number != self._number:
            _enter(task.epoch, self.dataset, None if self._number is None else self.seeding)
            self._number = task.number
            self._seed_sample = self.seeding.by_sample(task.epoch)
            if task.snapshot is not None:
                self.dataset.load_state_dict(task.snapshot.state)
        batches: list[Any] = []
        records: list[Record] = []
        failure = None
        for at in range(len(task.index_batches)):
            try:
                batches.append(self.collate(self._fetch(task, at)))
            except Exception as error:  # noqa: BLE001
                failure = _caught(error)  # raised again in the training process, in its turn
                break
            if self.keeps_state:
                snapshot = Snapshot(0, self.dataset.state_dict(), worker_place())
                records.append((0, 0, 0, snapshot))
        return Message(_packed(batches), tuple(records), failure=failure)

    def _fetch(self, task: MapTask, at: int) -> Any:
        index = task.index_batches[at]
        if self._seed_sample is not None and task.positions is not None:
            return self._fetch_seeded(index, task.positions[at], self._seed_sample)
        if not self.is_batched:
            return self.dataset[index]
        fetch_many = getattr(self.dataset, "__getitems__", None)
        if fetch_many:
            return fetch_many(index)
        return [self.dataset[sample] for sample in index]

    def _fetch_seeded(
        self, index: Any, positions: Sequence[int], seed_sample: Callable[[int], None]
    ) -> Any:
        """Seed before each sample; a batch that is ready is one."""
        made = []
        for sample, position in zip(index if self.is_batched else [index], positions, strict=True):
            seed_sample(position)
            made.append(self.dataset[sample])
        return made if self.is_batched else made[0]


@dataclass(frozen=True, slots=True)
class StreamTask:
    """Asks for the batches of some steps of a pass over a stream.

    Attributes:
        epoch: The epoch of the pass.
        number: Tells one pass from another.
        start: The first step of the pass; those before it are left out.
        first: The first step that is asked for.
        count: How many steps.
        consumed: What of the stream's order was consumed before step 0.
        snapshots: States of the stream to go on from, in the first tasks of a pass.
    """

    epoch: int
    number: int
    start: int
    first: int
    count: int
    consumed: int = 0
    snapshots: tuple[Snapshot, ...] = ()


@dataclass(slots=True)
class StreamReader:
    """Makes batches by reading on; each worker reads the stream and makes the steps asked of it.

    Attributes:
        dataset: The user's data set.
        collate: The user's collate function.
        is_batched: Whether items are samples to be collated; else each is a batch.
        seeding: What random numbers follow.
        plan: How the stream is dealt among the shards.
        worker_split: Who divides the stream among workers.
        shards: Whose batches are made, in this order within each step; None: the plan's own.
    """

    dataset: Any
    collate: Callable[[Any], Any]
    is_batched: bool
    seeding: Seeding
    plan: ShardPlan
    worker_split: WorkerSplit
    shards: Sequence[Shard] | None = None
    _number: int | None = None
    _stream: OpenStream | None = None
    _step: int = 0
    _preserved: rng.PreservedCpu = field(default_factory=rng.PreservedCpu)

    def __getitem__(self, task: StreamTask) -> Message:
        """Make the batches of one task, fewer if the stream ends; what is raised ends it."""
        if self.seeding.for_samples is None or get_worker_info() is not None:
            return self._answer(task)
        with self._preserved:
            return self._answer(task)

    def _answer(self, task: StreamTask) -> Message:
        batches: list[Any] = []
        records: list[Record] = []
        failure = None
        try:
            for part in self._parts_of(task):
                batch = self.collate(list(part.rows) if self.is_batched else part.rows[0])
                num_rows, valid_rows = len(part.rows), part.valid_rows
                if not self.is_batched:
                    num_rows = count_rows(batch) or 1
                    valid_rows = num_rows if valid_rows else 0
                batches.append(batch)
                records.append((num_rows, valid_rows, part.consumed, self._snapshot(part.consumed)))
        except Exception as error:  # noqa: BLE001
            failure = _caught(error)  # raised again in the training process, in its turn
        has_ended = failure is None and len(batches) < task.count
        splits_itself = self._stream is not None and self._stream.splits_itself
        return Message(_packed(batches), tuple(records), has_ended, failure, splits_itself)

    def _snapshot(self, consumed: int) -> Snapshot | None:
        """Say how to come back to where the stream stands after a batch."""
        assert self._stream is not None  # it has given a part
        found = self._stream.items.state_before(consumed)
        if not self._stream.splits_itself:
            return None if found is None else Snapshot(*found)
        # How far each worker has come is not told by the number of steps: some end early.
        if found is None or found[0] < consumed:
            return Snapshot(consumed, None, worker_place())
        return Snapshot(*found, worker_place())

    def _parts_of(self, task: StreamTask) -> Iterator[Part[Any]]:
        if task.number != self._number or self._stream is None:
            self._stream = self._open(task)
        if not self._stream.splits_itself:
            # Other workers make the steps in between, or they are left out.
            skipped = task.first - self._step
            self._step = task.first + task.count
            for _ in islice(self._stream.parts, skipped):
                pass
        return islice(self._stream.parts, task.count)

    def _open(self, task: StreamTask) -> OpenStream:
        """Start reading for a new pass, and find out whether the data set splits itself."""
        is_first = self._number is None
        self._stream = None  # let go of a pass that was left early before starting anew
        self._number, self._step = task.number, 0
        _enter(task.epoch, self.dataset, None if is_first else self.seeding)
        place = worker_place()
        own = [each for each in task.snapshots if each.worker in (None, place)]
        snapshot = own[0] if own else None
        start = task.consumed
        if snapshot is not None and not start:
            # Where steps are counted, a state is one of this part of the data, at a step's end.
            start = snapshot.position
            self._step = start // self.plan.global_batch_size
        seeding = self.seeding
        if self.worker_split == "dataset":
            seeding = seeding.of_part(*place)
        opened = open_stream(
            self.dataset,
            self.plan.seek(start),
            self.worker_split,
            shards=self.shards,
            snapshot=self._usable(snapshot, start),
            seed_sample=seeding.by_sample(task.epoch),
        )
        if opened.splits_itself:
            opened.items.seed_sample = self.seeding.of_part(*place).by_sample(task.epoch)
            replace(self.seeding, is_shared=False).apply(task.epoch, place[0])
            if not task.snapshots:
                self._leave_out(opened, task.start, place)
        return opened

    def _usable(self, snapshot: Snapshot | None, start: int) -> Snapshot | None:
        """Return a state if the data set can go on from it; else it is read through."""
        if snapshot is None or snapshot.state is None or snapshot.position > start:
            return None
        return snapshot if can_jump(self.dataset) else None

    def _leave_out(self, opened: OpenStream, steps: int, place: tuple[int, int]) -> None:
        """Read past this worker's share of the steps that are left out."""
        count = 1 if self.shards is None else len(self.shards)
        windows = len(range(place[0], steps // count, place[1]))
        for _ in islice(opened.parts, windows * count):
            pass


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Prepares a new worker: seeds it, and runs the user's ``worker_init_fn`` as torch would.

    Attributes:
        seeding: What random numbers follow.
        epoch: The epoch during which the worker starts.
        user_init: The user's ``worker_init_fn``.
        worker_split: For a stream: who divides it among workers.
    """

    seeding: Seeding
    epoch: int
    user_init: Callable[[int], None] | None
    worker_split: WorkerSplit | None = None

    def __call__(self, worker: int) -> None:
        """Run in the worker, once."""
        info = get_worker_info()
        assert info is not None  # torch calls this in a worker
        seed = self.seeding.apply(self.epoch, worker)
        # The info is read-only for users, who expect their own data set and the seed in it.
        object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
        object.__setattr__(info, "seed", seed)
        if self.worker_split is not None:
            WatchedInfo.install(self.worker_split)
        if self.user_init is not None:
            self.user_init(worker)


def as_it_is(message: Any) -> Any:
    """Return what is ready: a collate function that can be sent to workers."""
    return message


def _enter(epoch: int, dataset: Any, seeding: Seeding | None) -> None:
    """Take an epoch in a worker; one that has seen another epoch before is seeded anew."""
    if get_worker_info() is None:
        return  # in the training process the loader itself tells the epoch, and nobody seeds
    if seeding is not None:
        seeding.apply(epoch, worker_place()[0])
    if isinstance(dataset, HasEpoch):
        dataset.set_epoch(epoch)


def _packed(batches: list[Any]) -> list[Any] | packing.Packed:
    """Pack several batches for the way to the training process; one goes as it is."""
    return batches if len(batches) < 2 or get_worker_info() is None else packing.pack(batches)


def _caught(error: Exception) -> ExceptionWrapper:
    """Take an error along to the training process; raise it if this is that process."""
    if isinstance(error, StopIteration):
        # On its way out it would end the pass, as if there were no more data.
        stopped = RuntimeError("The data set or collate function raised StopIteration.")
        stopped.__cause__ = error
        error = stopped
    if get_worker_info() is None:
        raise error
    where = f"in DataLoader worker process {worker_place()[0]}"
    return ExceptionWrapper((type(error), error, error.__traceback__), where)
