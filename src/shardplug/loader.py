"""`DataLoaderShard`: a DataLoader that reads its shard of every epoch and knows where it stands.

It keeps the loader that really iterates, a clone of the user's with our batch sampler in it, and
adds what a pass needs around it: the agreement of the ranks, the epoch, the record of real rows,
the move to the device. The batches themselves are torch's business.
"""

from __future__ import annotations

import copy
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any, ClassVar

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from shardplug import rng
from shardplug.comm import Comm, agree_on
from shardplug.comm_torch import current_comm
from shardplug.credit import Arrival, in_step, mark_last
from shardplug.devices import move_batches
from shardplug.errors import PlanError
from shardplug.feeds import Feed, IndexFeed
from shardplug.fetching import MapTasks, Messages, StreamTasks
from shardplug.passes import Pass, ReadyPass, StreamPass
from shardplug.plan.cursor import Progress, Run
from shardplug.plan.order import worker_seed
from shardplug.plan.shard import Shard
from shardplug.plan.split import ShardPlan, Split, Tail
from shardplug.rows import count_rows
from shardplug.samplers import BatchSamplerShard, HasEpoch
from shardplug.streams import StreamFeed
from shardplug.worker_info import check_worker_split
from shardplug.workers import MapReader, Seeding, StartWorker, StreamReader, as_it_is

_LOOK = 4096
"""How many ids (or batches) from the start of an order that is not ours are compared."""

_PASS_FACTS: dict[str, str | None] = {
    "epoch": "Call set_epoch() with the same value on every rank.",
    "position": "Start the pass at the same step on every rank.",
    "seed": "Prepare the loader on every rank.",
    "order": (
        "Its sampler draws another order on each rank: seed it alike on all ranks, pass "
        'rng_types, or sync_order="broadcast" to use that of rank 0.'
    ),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What a loader does besides dividing the data.

    Attributes:
        seed: Of orders and workers, equal on all ranks.
        device: Where batches are moved, None to leave them.
        non_blocking: Whether moving may overlap with what comes after.
        rng_types: Generators made equal to rank 0's at the start of each pass.
        generator: The one that ``"generator"`` means.
        skip_batches: Steps left out at the start of each pass.
        is_stateful: Whether readers run in torchdata's StatefulDataLoader.
        per_message: Most batches that one message from a worker carries.
        is_simulation: Whether the shard is not this process's own, so that there is nobody to
            agree with.
        comm: The ranks; None: those of the process at the time.
    """

    seed: int
    device: torch.device | None = None
    non_blocking: bool = False
    rng_types: tuple[str, ...] = ()
    generator: torch.Generator | None = None
    skip_batches: int = 0
    is_stateful: bool = False
    per_message: int = 1
    is_simulation: bool = False
    comm: Comm | None = None


@dataclass(slots=True)
class _Epochs:
    """The epoch of a loader and all that has to be told of it; shared with its sampler views."""

    progress: Progress
    parts: list[Any] = field(default_factory=list)

    def set_epoch(self, epoch: int) -> None:
        self.progress.set_epoch(epoch)
        self.tell(epoch)

    def tell(self, epoch: int) -> None:
        for part in self.parts:
            part.set_epoch(epoch)


class EpochSampler(Sampler[Any]):
    """The sampler of a prepared loader, as trainers see it: `set_epoch` reaches the loader.

    Everything else is that of the sampler inside.
    """

    def __init__(self, sampler: Any, epochs: _Epochs) -> None:
        self._sampler = sampler
        self._epochs = epochs

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the loader's next pass."""
        self._epochs.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Yield what the sampler inside yields: the whole epoch, not only this shard's part."""
        return iter(self._sampler)

    def __len__(self) -> int:
        """Count the samples of the whole epoch."""
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        """Look an attribute up in the sampler inside."""
        if name.startswith("__") or name == "_sampler":
            raise AttributeError(name)
        return getattr(self._sampler, name)


class PassBatches(BatchSampler):
    """The batch sampler of a prepared loader: the index batches of the pass that is under way.

    Iterated on its own, outside of a pass of the loader, it yields this shard's batches of the
    upcoming epoch.
    """

    def __init__(self, feed: Feed, sampler: Any, epochs: _Epochs) -> None:
        self._feed = feed
        self._epochs = epochs
        self.sampler = EpochSampler(sampler, epochs)
        self.name = type(sampler).__name__
        self._offered: Pass | None = None

    def offer(self, pass_: Pass) -> None:
        """Let the next iteration be a pass of the loader."""
        self._offered = pass_

    def withdraw(self, pass_: Pass) -> bool:
        """Take an offer back; tells whether it had been taken up."""
        is_open = self._offered is pass_
        if is_open:
            self._offered = None
        return not is_open

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the loader's next pass."""
        self._epochs.set_epoch(epoch)

    @property
    def batch_size(self) -> int | None:  # type: ignore[override]  # users' may declare none
        """The batch size that the user's batch sampler declares."""
        return self._feed.batch_size

    @property
    def drop_last(self) -> bool:  # type: ignore[override]
        """Whether rows may be dropped at the end."""
        return self._feed.tail is Tail.DROP

    def __iter__(self) -> Iterator[Any]:
        """Yield the index batches of the pass that the loader offers, else of the next epoch."""
        offered, self._offered = self._offered, None
        if offered is None:
            upcoming = self._epochs.progress.upcoming
            self._epochs.tell(upcoming.epoch)
            offered, _ = self._feed.begin(upcoming.consumed)
        return iter(offered)

    def __len__(self) -> int:
        """Count the index batches of a full pass."""
        return len(self._feed)


class DataLoaderShard(DataLoader[Any]):
    """A DataLoader whose passes are those of one shard, epoch by epoch.

    Built directly it cuts nothing: it delivers the loader that it is given the arguments of.
    `prepare_data_loader` makes one that reads a shard. Nothing is decided before the first
    ``next``; the epoch moves on at each pass, also after one that was left early.

    Reads and writes of a loader's attributes reach the loader that iterates.

    Collective: each pass of a loader that is divided begins with one small message between the
    ranks, which compares epoch, position and seed.

    Args:
        dataset: As for DataLoader.
        device: Where batches are moved, any nesting; None leaves them.
        rng_types: Generators made equal to rank 0's at the start of each pass: "torch", "cuda",
            "xla", "generator", "numpy", "python".
        synchronized_generator: The one that "generator" means.
        skip_batches: Steps left out at the start of each pass, zero or more.
        non_blocking: Whether moves may overlap with what comes after.
        comm: The ranks; None: those of the process.
        dataloader_kwargs: As for DataLoader.

    Raises:
        PlanError: If an argument does not fit.
        CommError: At the start of a pass, if ranks disagree or another rank failed.
    """

    _inner: DataLoader[Any]
    _feed: Feed
    _settings: Settings
    _epochs: _Epochs
    _batches: PassBatches
    _skip_once: int
    _OWN: ClassVar[frozenset[str]] = frozenset(
        {"_inner", "_feed", "_settings", "_epochs", "_batches", "_skip_once"}
    )

    def __init__(
        self,
        dataset: Any,
        device: torch.device | str | int | None = None,
        rng_types: Sequence[str] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        *,
        non_blocking: bool = False,
        batches_per_message: int = 1,
        worker_split: str = "auto",
        comm: Comm | None = None,
        **dataloader_kwargs: Any,
    ) -> None:
        loader: DataLoader[Any] = DataLoader(dataset, **dataloader_kwargs)
        settings = Settings(
            seed=rng.draw_seed(),
            device=None if device is None else torch.device(device),
            non_blocking=non_blocking,
            rng_types=rng.check_rng_types(rng_types),
            generator=synchronized_generator,
            skip_batches=check_count("skip_batches", skip_batches, least=0),
            is_stateful=use_stateful_dataloader,
            per_message=check_count("batches_per_message", batches_per_message, least=1),
            comm=comm,
        )
        self._adopt(loader, whole_feed(loader, worker_split), settings)

    @classmethod
    def over(cls, loader: DataLoader[Any], feed: Feed, settings: Settings) -> DataLoaderShard:
        """Make one around a clone of a user's loader, with the passes of a feed.

        Args:
            loader: The user's; it stays as it is.
            feed: Begins the passes.
            settings: What else is to be done.
        """
        made = cls.__new__(cls)
        made._adopt(loader, feed, settings)
        return made

    def _adopt(self, loader: DataLoader[Any], feed: Feed, settings: Settings) -> None:
        if loader.num_workers > 0 and not loader.in_order:
            raise PlanError(
                "`in_order` must be True for ranks to know which batch they are at, got False. "
                "Leave it out."
            )
        parts = feed.epoch_parts()
        if isinstance(loader.dataset, HasEpoch) and not any(p is loader.dataset for p in parts):
            parts.append(loader.dataset)
        epochs = _Epochs(Progress(), parts)
        sampler = feed.batches.sampler if isinstance(feed, IndexFeed) else loader.sampler
        batches = PassBatches(feed, sampler, epochs)
        inner = copy.copy(loader)
        # A DataLoader refuses to have these set; a clone that has not iterated may take them.
        inner.__dict__.update(sampler=batches.sampler, _iterator=None)
        if loader.batch_sampler is not None:
            inner.__dict__["batch_sampler"] = batches
        elif isinstance(feed, IndexFeed):
            inner.__dict__["sampler"] = batches
        own = {"_inner": inner, "_feed": feed, "_settings": settings, "_epochs": epochs}
        for name, value in {**own, "_batches": batches, "_skip_once": 0}.items():
            object.__setattr__(self, name, value)

    # -- what torch's loader has -------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Look an attribute up in the loader that iterates."""
        if name in DataLoaderShard._OWN:
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the loader that iterates."""
        if name in DataLoaderShard._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._inner, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the loader that iterates."""
        delattr(self._inner, name)

    def __len__(self) -> int:
        """Count the batches of a full pass on this rank, or raise TypeError on every rank.

        A loader from `skip_first_batches` answers for its next pass.
        """
        return max(0, len(self._feed) - max(self._settings.skip_batches, self._skip_once))

    @property
    def _iterator(self) -> Any:  # type: ignore[override]  # set through __setattr__
        """The iterator that torch's loader keeps while its workers are kept."""
        kept: Any = self._inner._iterator
        return kept.torch_iterator if isinstance(kept, Messages) else kept

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to a pass under way: its iterator, its workers."""
        inner = copy.copy(self._inner)
        inner.__dict__["_iterator"] = None
        return {**self.__dict__, "_inner": inner}

    # -- where it stands ---------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch of the pass under way (or left early), else of the next pass."""
        return self._epochs.progress.cursor.epoch

    @property
    def shard(self) -> Shard:
        """Which part of the data this loader reads, of how many."""
        return self._feed.shard

    @property
    def plan(self) -> ShardPlan:
        """The plan of a full epoch; ``num_samples`` is None where the length is not known."""
        return self._feed.plan

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch that is out is the last of its pass."""
        run = self._epochs.progress.run
        return run is not None and run.step > 0 and run.step == run.record.num_steps

    @property
    def valid_rows(self) -> int:
        """Real rows of the batch that is out; they come first. 0 when no batch is out."""
        run = self._epochs.progress.run
        return run.record.valid_rows(run.step - 1) if run is not None and run.step else 0

    @property
    def remainder(self) -> int:
        """Real rows of a pass's last step over all ranks if that is not full, else -1.

        Known for loaders of known length; -1 for others.
        """
        plan = self._feed.plan
        return -1 if plan.num_samples is None else plan.remainder

    @property
    def total_batch_size(self) -> int | None:
        """Rows of a full step over all ranks; None if batches have no declared size."""
        return self._feed.global_batch_size

    @property
    def total_dataset_length(self) -> int | None:
        """Samples in the epoch's order; None if that is not known."""
        return self._feed.num_samples

    @property
    def remaining_steps(self) -> int:
        """Steps that are left of the pass under way, or of the next one if none is.

        Raises:
            TypeError: If that is not known.
        """
        run = self._epochs.progress.run
        if run is not None and run.record.num_steps is not None:
            return run.record.num_steps - run.step
        consumed = self._epochs.progress.upcoming.consumed
        return self._feed.plan.seek(consumed).num_steps if consumed else len(self)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, and tell samplers and data set.

        Args:
            epoch: Zero or more, the same on all ranks.

        Raises:
            PlanError: If ``epoch`` is negative.
        """
        self._epochs.set_epoch(epoch)

    def skipping(self, steps: int) -> DataLoaderShard:
        """Return a loader like this one whose next pass starts after some steps.

        Args:
            steps: Steps of this loader to leave out, zero or more; later passes are full.
        """
        made = DataLoaderShard.__new__(DataLoaderShard)
        made._adopt(self._inner, self._feed, self._settings)
        made._epochs.progress.jump(self._epochs.progress.upcoming)
        made._skip_once = steps
        return made

    def wrap_batch_sampler(self, wrap: Callable[[Any], BatchSampler]) -> None:
        """Put a wrapper of the caller's around the batch sampler that the loader iterates.

        Args:
            wrap: Takes the batch sampler, returns one that yields each of its batches once, in
                order.
        """
        self._inner.__dict__["batch_sampler"] = wrap(self._inner.batch_sampler)

    # -- passes ------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Start a pass at its first ``next``.

        Collective: the first ``next`` is, on a loader that is divided among ranks. Where ranks read
        parts of a stream that may end at different steps, some later ones are too.
        """
        pass_ = self._agree_on_pass()
        run = self._epochs.progress.begin(pass_)
        try:
            step = 0
            for batch in self._fetch(pass_, run):
                step += 1
                run.step = step
                yield batch
            if step != pass_.num_steps:
                raise PlanError(
                    f"`dataloader` must yield one batch per batch of its sampler, got {step} for "
                    f"{pass_.num_steps} from {type(self._inner).__name__}.__iter__."
                )
            self._epochs.progress.finish(run)
        finally:
            run.was_left = True

    def _comm(self) -> Comm:
        return self._settings.comm or current_comm()

    def _agree_on_pass(self) -> Pass:
        """Begin the upcoming pass, and make sure that all ranks begin the same."""
        settings, feed, cursor = self._settings, self._feed, self._epochs.progress.upcoming
        self._epochs.tell(cursor.epoch)
        skipped = max(settings.skip_batches if not cursor.consumed else 0, self._skip_once)
        comm = None if settings.is_simulation else self._comm()
        is_known = feed.is_by_value or feed.is_cut or comm is None or comm.world_size == 1
        look = 0 if is_known else _LOOK
        if comm is not None and settings.rng_types:
            # An order that is a function of (seed, epoch) needs nobody's generator.
            kinds = [kind for kind in settings.rng_types if look or kind != "generator"]
            rng.synchronize(kinds, comm, generator=settings.generator)

        def begin() -> tuple[Pass, tuple[int, ...]]:
            pass_, head = feed.begin(cursor.consumed, look=look)
            print_ = zlib.crc32(repr(head).encode()) if look else 0
            position = 0 if feed.is_cut else cursor.consumed + skipped
            facts = (cursor.epoch, position, settings.seed, print_)
            return (pass_.after(skipped) if skipped else pass_), facts

        if comm is None or comm.world_size == 1:
            pass_ = begin()[0]
        else:
            subject = f"the loader over {self._batches.name}"
            pass_ = agree_on(comm, begin, subject=subject, facts=_PASS_FACTS)[0]
        self._skip_once = 0
        return pass_

    def _fetch(self, pass_: Pass, run: Run) -> Iterator[Any]:
        """Let the user's own ``__iter__`` make the batches of a pass, then see to them."""
        inner, settings = self._inner, self._settings
        records: deque[tuple[int, int]] = deque()
        self._batches.offer(pass_)
        inner.__dict__["_get_iterator"] = partial(self._open, run.epoch, records)
        try:
            batches = iter(inner)
            first = list(islice(batches, 1))
        finally:
            inner.__dict__.pop("_get_iterator", None)
            is_asked = self._batches.withdraw(pass_)
        if not is_asked and not isinstance(pass_, StreamPass) and pass_.num_steps != 0:
            raise PlanError(
                "`dataloader` must ask its sampler for its batches, got one that did not from "
                f"{type(inner).__name__}.__iter__. Let it iterate super().__iter__()."
            )
        kept: Any = inner._iterator
        if isinstance(kept, Messages):
            records = kept.records  # workers that are kept go on writing where they began
        made: Iterator[Any] = chain(first, batches)
        if isinstance(pass_, StreamPass):
            return self._recorded(self._in_step(made, records), pass_)
        if isinstance(pass_, ReadyPass):
            made = _counted(made, pass_)
        if pass_.num_steps is None:
            made = _one_held_back(made)
        return self._moved(made)

    def _moved(self, batches: Iterator[Any]) -> Iterator[Any]:
        device = self._settings.device
        if device is None:
            return batches
        return move_batches(batches, device, non_blocking=self._settings.non_blocking)

    def _in_step(
        self, batches: Iterator[Any], records: deque[tuple[int, int]]
    ) -> Iterator[Arrival]:
        """Pair the batches of a stream with their records; keep ranks with own parts in step."""
        arrivals = (Arrival(batch, *records.popleft()) for batch in batches)
        feed = self._feed
        is_agreed = feed.is_cut and feed.tail in (Tail.PAD, Tail.DROP)
        comm = None if self._settings.is_simulation else self._comm()
        if is_agreed and comm is not None and comm.world_size > 1:
            return in_step(arrivals, comm, tail=feed.tail)
        return mark_last(arrivals)

    def _recorded(self, arrivals: Iterator[Arrival], pass_: StreamPass) -> Iterator[Any]:
        """Write the record of each batch of a stream just before it goes out."""
        # An arrival is a dataclass, so its batch is moved like any other nesting.
        for arrival in self._moved(arrivals):
            pass_.add(arrival.valid_rows, arrival.consumed, is_last=arrival.is_last)
            yield arrival.batch
        pass_.end()

    def _open(self, epoch: int, records: deque[tuple[int, int]]) -> Any:
        """Make the iterator that fetches: torch's own over a copy, or messages from readers."""
        inner, feed, settings = self._inner, self._feed, self._settings
        is_stream = isinstance(feed, StreamFeed)
        if not (is_stream or inner.num_workers or settings.is_stateful):
            opened = copy.copy(inner)
            del opened.__dict__["_get_iterator"]
            opened.__dict__["generator"] = self._generator(epoch)
            return opened._get_iterator()
        split = feed.worker_split if isinstance(feed, StreamFeed) else None
        seeding = self._seeding()
        kind = StatefulDataLoader if settings.is_stateful else DataLoader
        readers = kind(
            self._reader(seeding),
            batch_size=None,
            sampler=self._tasks(),
            num_workers=inner.num_workers,
            collate_fn=as_it_is,
            pin_memory=inner.pin_memory,
            timeout=inner.timeout,
            worker_init_fn=StartWorker(seeding, epoch, inner.worker_init_fn, split),
            multiprocessing_context=inner.multiprocessing_context,
            generator=self._generator(epoch),
            prefetch_factor=self._prefetch(),
            persistent_workers=inner.persistent_workers,
        )
        num_readers = max(1, inner.num_workers)
        return Messages(readers, num_readers=num_readers, records=records)

    def _generator(self, epoch: int) -> torch.Generator:
        """Make what torch draws from to start a pass, so that no RNG of the process moves."""
        seed = worker_seed(self._settings.seed, epoch, rank=self._feed.shard.index, worker=0)
        return torch.Generator().manual_seed(seed)

    def _seeding(self) -> Seeding:
        """Say what readers draw from: where all read the same stream, all draw the same."""
        is_shared = isinstance(self._feed, StreamFeed) and not self._feed.is_cut
        index = 0 if is_shared else self._feed.shard.index
        return Seeding(self._settings.seed, index, is_shared)

    def _reader(self, seeding: Seeding) -> Any:
        inner, feed = self._inner, self._feed
        if isinstance(feed, StreamFeed):
            is_batched = feed.batch_size is not None
            plan, split = feed.dealt, feed.worker_split
            return StreamReader(feed.dataset, inner.collate_fn, is_batched, seeding, plan, split)
        return MapReader(inner.dataset, inner.collate_fn, inner.batch_sampler is not None, seeding)

    def _tasks(self) -> Any:
        inner, progress = self._inner, self._epochs.progress
        counts = {"per_message": self._settings.per_message, "num_workers": inner.num_workers}
        if isinstance(self._feed, StreamFeed):
            return StreamTasks(progress, **counts)
        index_batches = inner.sampler if inner.batch_sampler is None else inner.batch_sampler
        return MapTasks(index_batches, progress, **counts)

    def _prefetch(self) -> int | None:
        """Say how many messages each worker has in flight: as many batches as without packing."""
        wanted = self._inner.prefetch_factor
        return None if wanted is None else max(1, -(-wanted // self._settings.per_message))


def _counted(batches: Iterator[Any], pass_: ReadyPass) -> Iterator[Any]:
    """Note how many rows each ready batch has."""
    for step, batch in enumerate(batches):
        pass_.note(step, count_rows(batch) or 1)
        yield batch


def _one_held_back(batches: Iterator[Any]) -> Iterator[Any]:
    """Hand out each batch when the next is there, so that the end is known with the last one."""
    for held in batches:
        for following in batches:
            yield held
            held = following  # noqa: PLW2901  # the one in hand is always the latest
        yield held


def whole_feed(loader: DataLoader[Any], worker_split: str = "auto") -> Feed:
    """Make the feed of a loader that is not divided.

    Args:
        loader: The user's loader.
        worker_split: For a stream, who divides it among workers.
    """
    tail = Tail.DROP if loader.drop_last else Tail.UNEVEN
    if isinstance(loader.dataset, IterableDataset):
        return StreamFeed(
            dataset=loader.dataset,
            batch_size=loader.batch_size,
            shard=Shard(0, 1),
            split=Split.WHOLE,
            tail=tail,
            is_cut=False,
            worker_split=check_worker_split(worker_split),
        )
    if loader.batch_sampler is None:
        each = BatchSampler(loader.sampler, 1, drop_last=False)
        return IndexFeed(BatchSamplerShard(each, tail=tail), is_ready=True)
    if getattr(loader.batch_sampler, "drop_last", False):
        tail = Tail.DROP
    return IndexFeed(BatchSamplerShard(loader.batch_sampler, tail=tail))


def check_count(name: str, count: int, *, least: int) -> int:
    """Check a number of things.

    Raises:
        PlanError: If it is too small.
    """
    if count < least:
        raise PlanError(f"`{name}` must be at least {least}, got {count}.")
    return count
