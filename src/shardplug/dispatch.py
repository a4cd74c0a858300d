"""`DataLoaderDispatcher`: one rank reads, every rank receives its own batches.

The reader makes the batches of all shards, one after the other, as each shard's own loader would
have made them; so dispatching never changes who sees what. They travel on a channel beside the
user's process group, and a thread keeps one round ahead.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils.data import BatchSampler, DataLoader

from shardplug import rng
from shardplug.ahead import Ahead
from shardplug.channel import Channel, InterruptError, open_channel
from shardplug.collating import Collate, can_collate
from shardplug.comm import agree, agree_on
from shardplug.comm_torch import current_comm
from shardplug.devices import move_batches
from shardplug.dividing import LOADER_FACTS, Options, check_loader, own_shard
from shardplug.errors import PlanError
from shardplug.feeds import Feed, IndexFeed, seeded
from shardplug.fetching import Records
from shardplug.loader import DataLoaderShard
from shardplug.options import check_device, check_loader_options
from shardplug.passes import EmptyPass, Pass, Snapshot, StreamPass
from shardplug.plan.cursor import Cursor, Run
from shardplug.plan.shard import Shard
from shardplug.plan.split import ShardPlan, Tail, choose_tail
from shardplug.prepared import PreparedLoader, Settings
from shardplug.rows import join_rows
from shardplug.samplers import HasEpoch
from shardplug.states import Identity

if TYPE_CHECKING:
    from typing_extensions import Self

READER = 0
"""The rank that reads."""

_WATCH_S = 0.5
"""How often a reader that waits for its workers looks whether they live."""

_WAYS = 100
"""Ways in which loaders that read for themselves may be divided; those of dispatchers follow."""

_PASS_FACTS: dict[str, str | None] = {
    "epoch": "Call set_epoch() with the same value on every rank.",
    "position": "Start the pass at the same step on every rank.",
    "seed": "Load the same state on every rank.",
    "number of the pass": None,  # the reader's is taken, as for those that follow
    "number of batches": None,
    "length of what tells the order": None,
    "fingerprint of the order": None,
}


@dataclass(frozen=True, slots=True)
class Told:
    """What the reader tells all ranks about its data, once.

    Attributes:
        plan: Of a full epoch, for any shard.
        tail: What happens at an uneven end.
        batch_size: As the user's loader declares it.
        global_batch_size: Rows of a full step over all shards.
        num_samples: In the order of an epoch.
        num_positions: How far positions count in an epoch.
        num_batches: Of all shards together in an epoch; None if only a pass will tell.
        remainder: Real rows of the last step over all shards when that is not full, else -1.
        unit: What positions count.
        kind: The class of the sampler, batch sampler or stream that makes the order.
        is_by_value: Whether the order is a function of values.
        is_stream: Whether the data is read from front to back.
        is_split: Whether workers divide the data among themselves.
        num_workers: Of the reader.
        is_seed_pinned: Whether the user chose the seed.
    """

    plan: ShardPlan
    tail: Tail
    batch_size: int | None
    global_batch_size: int | None
    num_samples: int | None
    num_positions: int | None
    num_batches: int | None
    remainder: int
    unit: str
    kind: str
    is_by_value: bool
    is_stream: bool
    is_split: bool
    num_workers: int
    is_seed_pinned: bool

    @classmethod
    def of(cls, feed: Feed, settings: Settings, num_workers: int) -> Told:
        """Describe a feed."""
        try:
            num_batches: int | None = len(feed.for_all())
        except TypeError:
            num_batches = None
        plan = feed.plan
        remainder = -1
        if isinstance(feed, IndexFeed):
            remainder = feed.remainder
        elif plan.num_samples is not None:
            remainder = plan.remainder
        return cls(
            plan=plan,
            tail=feed.tail,
            batch_size=feed.batch_size,
            global_batch_size=feed.global_batch_size,
            num_samples=feed.num_samples,
            num_positions=feed.num_positions,
            num_batches=num_batches,
            remainder=remainder,
            unit=feed.unit,
            kind=feed.kind,
            is_by_value=feed.is_by_value,
            is_stream=feed.is_stream,
            is_split=feed.is_split,
            num_workers=num_workers,
            is_seed_pinned=settings.is_seed_pinned,
        )


@dataclass(frozen=True, slots=True)
class DispatchFeed:
    """How dispatched data is divided, as every rank knows it.

    Attributes:
        told: By the reader.
        shard: Which part this rank gets.
        shard_of_rank: By rank, the index of its shard; ranks of one shard get copies.
        have_generator: Whether all ranks have one that "generator" in ``rng_types`` may mean.
        source: Begins the passes on the reader; None elsewhere.
    """

    told: Told
    shard: Shard
    shard_of_rank: tuple[int, ...]
    have_generator: bool
    source: Feed | None

    @property
    def plan(self) -> ShardPlan:
        """The plan of a full epoch; ``num_samples`` is None if that is not known."""
        return replace(self.told.plan, shard=self.shard)

    @property
    def tail(self) -> Tail:
        """What happens at an uneven end."""
        return self.told.tail

    @property
    def batch_size(self) -> int | None:
        """The batch size that the user's loader declares on the reader."""
        return self.told.batch_size

    @property
    def global_batch_size(self) -> int | None:
        """Rows of a full step over all shards; None if no batch size is declared."""
        return self.told.global_batch_size

    @property
    def num_samples(self) -> int | None:
        """Samples in the order of an epoch; None if only a pass will tell."""
        return self.told.num_samples

    @property
    def num_positions(self) -> int | None:
        """How far positions count in an epoch."""
        return self.told.num_positions

    @property
    def is_by_value(self) -> bool:
        """Whether the order is a function of values."""
        return self.told.is_by_value

    @property
    def is_cut(self) -> bool:
        """Whether each rank's order is another one: one rank reads, there is one order."""
        return False

    @property
    def is_stream(self) -> bool:
        """Whether the data is read from front to back."""
        return self.told.is_stream

    @property
    def is_split(self) -> bool:
        """Whether the reader's workers divide the data among themselves."""
        return self.told.is_split

    @property
    def unit(self) -> str:
        """What positions count: "samples" or "batches"."""
        return self.told.unit

    @property
    def kind(self) -> str:
        """Name what makes the order on the reader."""
        return self.told.kind

    def begin(self, start: Cursor, *, look: int = 0) -> tuple[Pass, list[Any]]:
        """Refuse: there are no index batches but on the reader, and there those of all shards.

        Raises:
            PlanError: Always.
        """
        raise PlanError(
            "`batch_sampler` of a dispatcher must be left to it, got one that is iterated: one "
            "rank reads for all. Iterate the loader."
        )

    def count_steps(self, start: Cursor) -> int:
        """Count the steps from a position to the end, or raise TypeError if that is not known."""
        if not (start.consumed or start.extra_rows):
            steps = self.own_steps(self.told.num_batches)
        elif start.extra_rows or self.plan.num_samples is None:
            steps = None
        else:
            steps = self.plan.seek(min(start.consumed, self.plan.num_samples)).num_steps
        if steps is None:
            raise TypeError(f"{self.kind} has no known length: only a pass will tell.")
        return max(0, steps - start.steps)

    def own_steps(self, num_batches: int | None) -> int | None:
        """Count this shard's of the batches of all; None of an unknown number."""
        if num_batches is None:
            return None
        each, more = divmod(num_batches, self.shard.count)
        return each + (self.shard.index < more)

    def for_all(self) -> DispatchFeed:
        """Return itself: one rank makes the batches of all shards anyway."""
        return self

    def epoch_parts(self) -> list[HasEpoch]:
        """List what follows the epoch on this rank."""
        return [] if self.source is None else self.source.epoch_parts()

    def __len__(self) -> int:
        """Count the steps of a full pass, or raise TypeError if that is not known."""
        return self.count_steps(Cursor(0))


@dataclass(frozen=True, slots=True)
class Dispatched:
    """One shard's batch of one round, and the record of it.

    Attributes:
        batch: What the loader yields.
        num_rows: How many rows it has.
        valid_rows: How many of them are real.
        consumed: What is consumed of the global order after the round.
        extra_rows: Where batches are counted: rows of the next one that are consumed too.
        is_last: Whether it is the last batch of its shard.
        is_split: Whether workers divide the stream among themselves.
        indices: Of the samples in the data set, for `DataLoaderDispatcher.tell_indices`.
        snapshots: On the reader: the states of the data set after the round.
    """

    batch: Any
    num_rows: int
    valid_rows: int
    consumed: int = 0
    extra_rows: int = 0
    is_last: bool = False
    is_split: bool = False
    indices: Any = None
    snapshots: tuple[Snapshot, ...] = ()

    def parcel(self) -> tuple[Any, ...]:
        """Say what other ranks are sent."""
        record = (self.num_rows, self.valid_rows, self.consumed, self.extra_rows)
        own = (self.batch, *record, self.is_last, self.is_split)
        return own if self.indices is None else (*own, self.indices)


_END = ()
"""What a rank is sent that has no batch in a pass."""


class _Asked(BatchSampler):
    """A batch sampler whose index batches are kept until their batches are there."""

    def __init__(self, batches: Any) -> None:
        self.sampler = batches.sampler
        self._batches = batches
        self._asked: deque[Any] = deque()

    @property
    def batch_size(self) -> Any:  # type: ignore[override]  # users' may declare none
        """The batch size of the one inside."""
        return self._batches.batch_size

    @property
    def drop_last(self) -> Any:  # type: ignore[override]
        """The same of whether rows are dropped."""
        return self._batches.drop_last

    def __iter__(self) -> Iterator[Any]:
        """Yield the index batches, and keep each."""
        self._asked.clear()
        for batch in self._batches:
            self._asked.append(list(batch))
            yield batch

    def __len__(self) -> int:
        """Count them."""
        return len(self._batches)

    def next(self) -> Any:
        """Take the first that is kept: batches come in the order in which they were asked for."""
        return self._asked.popleft()


class _Source(DataLoaderShard):
    """The loader of the rank that reads: it makes the batches of all shards.

    Its passes are begun on the main thread, where all ranks agree; then they are read elsewhere.
    """

    _OWN: ClassVar[frozenset[str]] = PreparedLoader._OWN | {"_begun", "_asked"}  # noqa: SLF001  # of its parent
    _begun: tuple[Pass, tuple[int, int] | None] | None
    _asked: _Asked | None

    def _adopt(self, loader: DataLoader[Any], feed: Feed, settings: Settings) -> None:
        super()._adopt(loader, feed, settings)
        self._begun = None
        self._asked = None

    def keep_indices(self) -> None:
        """Let what a round is made of tell its indices."""
        self._asked = asked = _Asked(self._inner.batch_sampler)
        self.wrap_batch_sampler(lambda _: asked)

    @classmethod
    def reading(cls, loader: DataLoader[Any], feed: Feed, settings: Settings) -> _Source:
        """Make one around a clone of the user's loader."""
        made = cls.__new__(cls)
        made._adopt(loader, feed, settings)  # noqa: SLF001  # an object of this class
        return made

    def anew(self) -> _Source:
        """Make one that reads the same and has not begun."""
        return self.reading(self._inner, self._feed, self._settings)

    def begin_pass(self, start: Cursor, seed: int) -> tuple[Pass, tuple[int, int] | None]:
        """Begin a pass that is iterated next, at a position that counts batches as steps."""
        self.go_to(start, seed)
        self._begun = None
        self._begun = self._agree_on_pass()
        return self._begun

    def _agree_on_pass(self) -> tuple[Pass, tuple[int, int] | None]:
        begun, self._begun = self._begun, None
        return super()._agree_on_pass() if begun is None else begun

    def _open(self, epoch: int, records: Records) -> Any:
        inner = self._inner
        own = inner.collate_fn
        if not inner.num_workers and can_collate(own):
            # A round is being made, and one batch of this rank's own is in use, one lies ready.
            inner.__dict__["collate_fn"] = Collate(self.shard.count + 2)
        try:
            made = super()._open(epoch, records)
        finally:
            inner.__dict__["collate_fn"] = own
        if self._inner.num_workers:
            _watch_workers(made.torch_iterator)
        return made

    def next_round(
        self, batches: Iterator[Any], slice_fn: Callable[..., Any] | None
    ) -> list[Dispatched] | None:
        """Read the batches of a round, by shard, fewer at an uneven end; None at the end."""
        items: list[Dispatched] = []
        run, states = self.run, self.source_states
        asked = self._asked
        for batch in islice(batches, self.shard.count):
            indices = None if asked is None else asked.next()
            items.append(Dispatched(batch, self.num_rows, self.valid_rows, indices=indices))
            run, states = self.run, self.source_states  # gone when it has ended
        if not items:
            return None
        assert run is not None  # it has handed out a batch
        if slice_fn is not None:
            items = _sliced(items, slice_fn, self.shard.count)
        record, step = run.record, run.step
        return [
            replace(
                item,
                consumed=record.consumed(step),
                extra_rows=record.extra_rows(step),
                is_split=type(record) is StreamPass and record.is_split,
                snapshots=tuple(states),
            )
            for item in items
        ]


def _watch_workers(iterator: Any) -> None:
    """Let a wait for workers notice soon that one has died.

    torch looks every five seconds, and else relies on a signal, which the main thread gets.
    """
    wait = type(iterator)._try_get_data  # noqa: SLF001  # there is no public way
    # Weakly: an iterator that is part of a cycle would keep its workers until a collection.
    own = weakref.ref(iterator)

    def wait_for_data(timeout: float = _WATCH_S) -> Any:
        return wait(own(), timeout)

    iterator._try_get_data = wait_for_data  # noqa: SLF001  # there is no public way


def _sliced(
    items: Sequence[Dispatched], slice_fn: Callable[..., Any], count: int
) -> list[Dispatched]:
    """Let the user's function cut each shard's rows out of the joined batches of a round."""
    sizes = [item.num_rows for item in items]
    joined = join_rows([item.batch for item in items], expected=sizes)
    stops = list(accumulate(sizes))
    return [
        replace(
            item,
            batch=slice_fn(
                joined,
                slice(stop - item.num_rows, stop),
                process_index=shard,
                num_processes=count,
            ),
        )
        for shard, (item, stop) in enumerate(zip(items, stops, strict=True))
    ]


class DataLoaderDispatcher(PreparedLoader):
    """A DataLoader of which rank 0 reads the data, and every rank receives its own batches.

    It yields what `prepare_data_loader` with ``dispatch_batches=False`` would yield over the same
    data, but only rank 0 touches the data set, starts workers, or needs the data at all: elsewhere
    ``dataset`` may be None. What the data set, the collate function or a worker raises there is
    raised on every rank. `state_dict` and all else that `DataLoaderShard` has is there.

    The next round is read and sent by a thread while the current one is used. So without workers
    the data set is read by that thread, and what it draws from a global generator of the process
    falls between what the training loop draws. (With ``seed_samples`` and no workers it is read in
    ``next`` instead.) One pass at a time: a new one ends the one before.

    Collective: making one is, and the first ``next`` of each pass. The batches travel on
    connections of their own, so the steps in between may hold any collectives of the user's.

    Args:
        dataset: As for DataLoader; None on ranks that do not read.
        split_batches: See `prepare_data_loader`, as for the others that are not named here.
        skip_batches: Steps left out at the start of each pass, zero or more.
        use_stateful_dataloader: Read through torchdata's StatefulDataLoader.
        device: Where batches are moved on each rank, any nesting; None leaves them.
        non_blocking: Whether moves may overlap with what comes after.
        even_batches: Whether all ranks take the same number of full steps.
        tail: Says outright what happens at the end, and wins.
        slice_fn: Cuts each shard's rows out of a round of joined batches; see
            ``slice_fn_for_dispatch``. None: the batches go out as they were made.
        torch_device_mesh: Ranks that differ only in its model axes get copies.
        data_axes: The mesh axes that divide the data, where their names do not tell.
        rng_types: Generators made equal to rank 0's at the start of each pass. "generator" is, if
            every rank has one.
        use_seedable_sampler: Chooses where the seed of the order comes from.
        data_seed: The seed of the order, with ``use_seedable_sampler``.
        worker_split: Who divides a stream among workers.
        batches_per_message: Most batches that one message from a worker carries.
        seed_samples: Seed before each sample, by its position.
        comm: The ranks; None: those of the process.
        dataloader_kwargs: As for DataLoader; on ranks without data they may be left out.

    Raises:
        PlanError: If an argument does not fit, or rank 0 has no data.
        BatchError: From ``next``: if batches cannot be sent, or not joined for ``slice_fn``.
        CommError: If another rank failed or ended.
    """

    _source_loader: _Source | None
    _channel: Channel | None
    _num_passes: int
    _under_way: Ahead[Dispatched] | None
    _indices: Any
    _OWN: ClassVar[frozenset[str]] = PreparedLoader._OWN | {  # noqa: SLF001  # of its parent
        "_source_loader",
        "_channel",
        "_num_passes",
        "_under_way",
        "_indices",
    }
    _VIEWS: ClassVar[frozenset[str]] = frozenset({"sampler", "batch_sampler"})

    def __init__(  # these names and their order are Accelerate's
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        *,
        device: torch.device | str | int | None = None,
        non_blocking: bool = False,
        even_batches: bool = True,
        tail: str | None = None,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        data_axes: Sequence[str] | None = None,
        rng_types: Sequence[str] | None = None,
        use_seedable_sampler: bool = False,
        data_seed: int | None = None,
        worker_split: str = "auto",
        batches_per_message: int = 1,
        seed_samples: bool = False,
        comm: Any = None,
        **dataloader_kwargs: Any,
    ) -> None:
        given = check_loader_options(
            split_batches=split_batches,
            skip_batches=skip_batches,
            use_stateful_dataloader=use_stateful_dataloader,
            device=device,
            non_blocking=non_blocking,
            even_batches=even_batches,
            tail=tail,
            slice_fn=slice_fn,
            torch_device_mesh=torch_device_mesh,
            data_axes=data_axes,
            rng_types=rng_types,
            use_seedable_sampler=use_seedable_sampler,
            data_seed=data_seed,
            worker_split=worker_split,
            batches_per_message=batches_per_message,
            seed_samples=seed_samples,
            comm=comm,
        )
        ranks = current_comm() if comm is None else comm
        shard = own_shard(ranks, given.pop("torch_device_mesh"), given.pop("data_axes"))
        options = Options(
            device=check_device("device", given.pop("device")),
            is_stateful=given.pop("use_stateful_dataloader"),
            **given,
        )
        self._join(lambda: _loader_over(dataset, dataloader_kwargs), options, shard)

    @classmethod
    def dispatching(cls, loader: DataLoader[Any] | None, options: Options, shard: Shard) -> Self:
        """Make one around a clone of the reader's loader.

        Collective: every rank must call it.

        Args:
            loader: The user's; it stays as it is. None, or one over None, on ranks without data.
            options: What is asked for it.
            shard: Which part of the data this rank gets, of how many.
        """
        made = cls.__new__(cls)
        made._join(lambda: loader, options, shard)  # noqa: SLF001  # an object of this class
        return made

    def _join(
        self, make_loader: Callable[[], DataLoader[Any] | None], options: Options, shard: Shard
    ) -> None:
        """Read the data or hear about it."""
        comm = current_comm() if options.comm is None else options.comm

        def prepare() -> tuple[tuple[DataLoader[Any] | None, Settings], Sequence[int]]:
            loader = make_loader()
            if loader is not None:
                check_loader(loader, is_plain=options.is_stateful)
            settings = options.settings(loader)
            tail = choose_tail(options.tail, even_batches=options.even_batches, drop_last=False)
            way = _WAYS + 2 * list(Tail).index(tail) + options.split_batches
            return (loader, settings), (settings.seed, 0, 0, way, shard.count)

        (loader, settings), (seed, *_) = agree_on(
            comm, prepare, subject="the loader", facts=LOADER_FACTS
        )
        source: Feed | None = None

        def tell() -> tuple[int, bool, Told | PlanError | None]:
            nonlocal source
            told: Told | PlanError | None = None
            if comm.rank == READER and loader is not None and loader.dataset is not None:
                try:
                    feed = options.feed(loader, Shard(0, shard.count), is_dispatched=True)
                    source = seeded(feed, seed)
                    told = Told.of(source, settings, loader.num_workers)
                except PlanError as error:
                    told = error  # the same on all ranks, as where each reads
            return shard.index, settings.generator is not None, told

        by_rank = agree(comm, tell)
        told = by_rank[READER][2]
        if isinstance(told, PlanError):
            raise told
        if told is None:
            raise PlanError(
                f"`dataset` must be there on rank {READER}, which reads for all, got None. Give "
                "that rank the data; the others need none."
            )
        feed = DispatchFeed(
            told=told,
            shard=shard,
            shard_of_rank=tuple(index for index, _, _ in by_rank),
            have_generator=all(has_generator for _, has_generator, _ in by_rank),
            source=source,
        )
        settings = replace(settings, seed=seed, is_seed_pinned=told.is_seed_pinned)
        self._adopt(_no_data(told) if loader is None else loader, feed, settings)

    def _adopt(self, loader: DataLoader[Any], feed: Feed, settings: Settings) -> None:
        assert isinstance(feed, DispatchFeed)
        source: _Source | None = None
        if feed.source is not None:
            of_source = replace(
                settings, device=None, rng_types=(), skip_batches=0, is_divided=False
            )
            source = _Source.reading(loader, feed.source.for_all(), of_source)
            loader = copy.copy(loader)
            if isinstance(feed.source, IndexFeed):
                loader.__dict__["sampler"] = feed.source.batches.sampler  # one that is seeded
        super()._adopt(loader, feed, settings)
        self._source_loader = source
        self._channel = None
        self._num_passes = 0
        self._under_way = None
        self._indices = None

    def tell_indices(self) -> None:
        """Send each rank the indices of its samples too, for `indices`; before the first pass.

        Needs to be called on the rank that reads only. Nothing is told of streams, nor of batches
        that the data set has ready.
        """
        source = self._source_loader
        if source is not None and source.batch_sampler is not None and not self._told.is_stream:
            source.keep_indices()

    @property
    def indices(self) -> Any:
        """Where in the data set the rows of the batch that is out are from; see `tell_indices`.

        None if that is not told.
        """
        return self._indices

    # -- what torch's loader has -------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Look an attribute up in the loader that iterates; elsewhere than on the reader, here."""
        if name in self._OWN:
            raise AttributeError(name)
        if self._source_loader is None or name in self._VIEWS:
            return getattr(self._inner, name)
        return getattr(self._source_loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the loader that iterates, and of what is cloned for another one."""
        super().__setattr__(name, value)
        if name not in self._OWN and self._source_loader is not None:
            setattr(self._source_loader, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the loader that iterates."""
        super().__delattr__(name)
        if self._source_loader is not None:
            delattr(self._source_loader, name)

    def _kept_iterator(self) -> Any:
        source = self._source_loader
        return None if source is None else source._kept_iterator()  # noqa: SLF001  # ours

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: connections, a pass under way."""
        own = {"_channel": None, "_under_way": None}
        source = self._source_loader
        if source is None:
            return {**super().__getstate__(), **own}
        # A copy reads for itself, also while this one does.
        return {**super().__getstate__(), **own, "_source_loader": source.anew()}

    @property
    def remainder(self) -> int:
        """Real rows of a pass's last step over all ranks if that is not full, else -1."""
        return self._told.remainder

    @property
    def identity(self) -> Identity:
        """What the loader has to have in common with one whose state it takes."""
        return replace(super().identity, num_workers=self._told.num_workers)

    @property
    def _dispatched(self) -> DispatchFeed:
        assert isinstance(self._feed, DispatchFeed)
        return self._feed

    @property
    def _told(self) -> Told:
        return self._dispatched.told

    # -- passes ------------------------------------------------------------------------------

    def _kinds_to_sync(self) -> list[str]:
        """List the generators to be made equal; orders by value need none of their sampler."""
        kinds = list(self._settings.rng_types)
        if self._feed.is_by_value or not self._dispatched.have_generator:
            kinds = [kind for kind in kinds if kind != "generator"]
        return kinds

    def _agree_on_pass(self) -> tuple[Pass, tuple[int, int] | None]:
        """Begin the upcoming pass on the reader, and let all ranks know of it."""
        self._leave_pass()
        settings, comm, start = self._settings, self.comm, self._epochs.progress.upcoming
        skipped = self._steps_to_skip(start)
        self._num_passes += 1
        rng.synchronize(self._kinds_to_sync(), comm, generator=settings.generator)

        def begin() -> tuple[None, Sequence[int]]:
            self._epochs.tell(start.epoch)
            num_batches, order = self._begin_source(start, skipped)
            head, print_ = (0, 0) if order is None else order
            position = start.consumed + skipped
            facts = (start.epoch, position, settings.seed, self._num_passes)
            return None, (*facts, -1 if num_batches is None else num_batches, head, print_)

        subject = f"the dispatcher over {self._feed.kind}"
        _, agreed = agree_on(comm, begin, subject=subject, facts=_PASS_FACTS)
        self._num_passes, num_batches, *order = agreed[3:]
        if self._channel is None and comm.world_size > 1:
            is_cuda = settings.device is not None and settings.device.type == "cuda"
            self._channel = open_channel(comm, reader=READER, is_pinned=is_cuda)
        if self._channel is not None:
            self._channel.begin(self._num_passes)
        told_order = (order[0], order[1]) if order[0] else None
        if start.is_done:
            return EmptyPass(start.consumed, start.extra_rows), told_order
        pass_ = StreamPass(
            start.consumed,
            first_step=skipped,
            num_steps=self._dispatched.own_steps(None if num_batches < 0 else num_batches),
            snapshots=start.snapshots,
            extra_rows=start.extra_rows,
        )
        return pass_, told_order

    def _begin_source(
        self, start: Cursor, skipped: int
    ) -> tuple[int | None, tuple[int, int] | None]:
        """Begin the pass of the reader; returns its batches, and what to know its order by."""
        if self._source_loader is None:
            return None, None
        begin = replace(start, steps=skipped * self.shard.count)
        pass_, order = self._source_loader.begin_pass(begin, self._settings.seed)
        return pass_.num_steps, order

    def _fetch(self, pass_: Pass, run: Run) -> Iterator[Any]:
        """Get the batches of a pass, and see to them."""
        if not isinstance(pass_, StreamPass):
            return iter(())
        if self._source_loader is None:
            return self._recorded(self._received(), pass_)
        own = self._outgoing(self._source_loader)
        is_read_here = self._settings.seeds_samples and not self._told.num_workers
        if self._channel is None or is_read_here:
            return self._recorded(own, pass_)
        self._under_way = Ahead(own, interrupt=self._channel.interrupt)
        return self._recorded(self._taken(self._under_way), pass_)

    def _leave_pass(self) -> None:
        """End the reading for a pass that is still under way."""
        if self._under_way is not None:
            self._under_way.close()
            self._under_way = None

    def _recorded(self, arrivals: Iterator[Dispatched], pass_: StreamPass) -> Iterator[Any]:
        """Write the record of each batch just before it goes out."""
        number = self._num_passes
        with closing(arrivals):  # type: ignore[type-var]  # a generator
            for step, arrival in enumerate(self._moved(arrivals), start=1):
                if arrival.is_split and not pass_.is_split:
                    pass_.split_itself()
                pass_.add(
                    arrival.num_rows,
                    arrival.valid_rows,
                    arrival.consumed,
                    is_last=arrival.is_last,
                    extra_rows=arrival.extra_rows,
                )
                self._note_states(step, arrival.snapshots, pass_)
                self._indices = arrival.indices
                yield arrival.batch
                if number != self._num_passes:
                    raise PlanError(
                        "`next` must be called on the latest pass of a dispatcher, got one that "
                        "another pass has ended. Iterate one at a time, or prepare another loader."
                    )
        pass_.end()

    def _note_states(self, step: int, snapshots: Sequence[Snapshot], pass_: StreamPass) -> None:
        if self._told.is_stream:
            pass_.note_snapshots(snapshots)
            return
        self._source.settle(step - self._keeps_steps)
        for snapshot in snapshots:
            self._source.add(step, snapshot)

    def _moved(self, arrivals: Iterator[Dispatched]) -> Iterator[Dispatched]:
        device = self._settings.device
        if device is None:
            return arrivals
        return move_batches(arrivals, device, non_blocking=self._settings.non_blocking)

    def _received(self) -> Iterator[Dispatched]:
        """Receive this rank's batches of a pass."""
        channel, number = self._channel, self._num_passes
        assert channel is not None  # there is a reader somewhere
        is_over = False
        try:
            while not is_over:
                parcel = channel.receive()
                if not parcel:
                    return
                arrival = Dispatched(*parcel)
                del parcel
                is_over = arrival.is_last
                yield arrival
                del arrival
        finally:
            channel.leave(number)  # the others may go on

    def _taken(self, own: Ahead[Dispatched]) -> Iterator[Dispatched]:
        """Take this rank's batches from the thread that reads."""
        try:
            yield from own
        finally:
            if self._under_way is own:
                self._leave_pass()

    def _outgoing(self, source: _Source) -> Generator[Dispatched, None, None]:
        """Read a pass, send each rank its batches, and yield this rank's own.

        What is raised is told to all ranks first.
        """
        channel, number = self._channel, self._num_passes
        try:
            yield from self._sent(source)
        except (GeneratorExit, InterruptError):
            if channel is not None:
                channel.leave(number)
            return
        except BaseException as error:
            if channel is not None:
                _tell(channel, error)
            raise

    def _sent(self, source: _Source) -> Generator[Dispatched, None, None]:
        own = self._dispatched.shard_of_rank[READER]
        slice_fn, has_begun = self._settings.slice_fn, False
        with closing(iter(source)) as batches:  # type: ignore[type-var]  # a generator
            # No generator: it would keep a round while the next is read.
            rounds = iter(partial(source.next_round, batches, slice_fn), None)
            for items in _with_ends(rounds, source):
                self._send(items, has_begun=has_begun)
                has_begun = True
                mine = items[own : own + 1]
                items.clear()  # those of other ranks are not kept
                yield from mine
                mine.clear()
        if not has_begun:
            self._send([], has_begun=False)

    def _send(self, items: Sequence[Dispatched], *, has_begun: bool) -> None:
        if self._channel is None:
            return
        shard_of_rank = self._dispatched.shard_of_rank
        parcels: list[Any] = [item.parcel() for item in items]
        parcels += [None if has_begun else _END] * (self.shard.count - len(parcels))
        # A shard that has none in this round has had its last.
        going_on = {shard for shard, item in enumerate(items) if not item.is_last}
        done = [rank for rank, shard in enumerate(shard_of_rank) if shard not in going_on]
        self._channel.send([parcels[shard] for shard in shard_of_rank], done=done)


def _tell(channel: Channel, error: BaseException) -> None:
    try:
        channel.fail(error)
    except InterruptError:
        return  # the pass is being left: nobody waits for its next batch


def _with_ends(rounds: Iterator[list[Dispatched]], source: _Source) -> Iterator[list[Dispatched]]:
    """Mark the last batch of each shard, looking a round ahead only where the end is not known.

    The last round goes out when its reader has ended: what goes wrong at the end is known by then.
    """
    count, done = source.shard.count, 0
    held = next(rounds, None)
    while held is not None:
        done += len(held)
        total = source.num_steps
        if total is not None and done < total:
            marked, held = _marked(held, min(count, total - done)), None
            yield marked
            del marked  # not kept while the next is read
            held = next(rounds, None)
            continue
        following = next(rounds, None)
        if following is not None and done == total:
            raise PlanError(
                f"`dataset` must yield as much as its length says, which makes {total} batches, "
                "got more. Correct its __len__, or remove it."
            )
        yield _marked(held, len(following or ()))
        held = following


def _marked(items: Sequence[Dispatched], num_following: int) -> list[Dispatched]:
    """Mark the batches of shards that have none in the next round."""
    return [replace(item, is_last=shard >= num_following) for shard, item in enumerate(items)]


def _loader_over(dataset: Any, kwargs: dict[str, Any]) -> DataLoader[Any]:
    """Make the loader that is dispatched; of data that is elsewhere one that is never iterated."""
    if dataset is None:
        kwargs = {name: value for name, value in kwargs.items() if name != "shuffle"}
    return DataLoader(dataset, **kwargs)


def _no_data(told: Told) -> DataLoader[Any]:
    """Make what stands for the loader on a rank that was given none."""
    nothing: Any = None
    return DataLoader(nothing, told.batch_size)
