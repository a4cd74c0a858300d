"""`DataLoaderShard`: a DataLoader that reads its shard of every epoch and knows where it stands.

It keeps the loader that really iterates, a clone of the user's with our batch sampler in it, and
adds what a pass needs around it: the agreement of the ranks, the epoch, the record of real rows,
the move to the device. The batches themselves are torch's business.
"""

from __future__ import annotations

import copy
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, ClassVar

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from shardplug import rng
from shardplug.comm import Comm, agree_on
from shardplug.comm_torch import current_comm
from shardplug.credit import Arrival, in_step, mark_last
from shardplug.devices import move_batches
from shardplug.epochs import Epochs, PassBatches
from shardplug.errors import PlanError
from shardplug.feeds import Feed, IndexFeed, find_generator, seeded
from shardplug.fetching import Crew, Messages, Records
from shardplug.passes import Pass, ReadyPass, SampledPass, StreamPass
from shardplug.plan.cursor import Progress, Run
from shardplug.plan.order import worker_seed
from shardplug.plan.shard import Shard
from shardplug.plan.split import ShardPlan, Split, Tail
from shardplug.rows import count_rows
from shardplug.samplers import BatchSamplerShard, HasEpoch
from shardplug.streams import StreamFeed
from shardplug.worker_info import check_worker_split

_LOOK = 4096
"""How many ids (or batches) from the start of an order that is not ours are compared."""

_PASS_FACTS: dict[str, str | None] = {
    "epoch": "Call set_epoch() with the same value on every rank.",
    "position": "Start the pass at the same step on every rank.",
    "seed": "Prepare the loader on every rank.",
    "number of steps": "Give every rank the same data set and sampler.",
    "fingerprint of the order": (
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
        is_divided: Whether ranks share the data, so that they have to agree on each pass.
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
    is_divided: bool = True
    is_simulation: bool = False
    comm: Comm | None = None


class DataLoaderShard(DataLoader[Any]):
    """A DataLoader whose passes are those of one shard, epoch by epoch.

    Built directly it cuts nothing: it delivers the loader that it is given the arguments of, a
    RandomSampler as a function of (seed, epoch), and asks nothing of other ranks but what
    ``rng_types`` needs. `prepare_data_loader` makes one that reads a shard. Nothing is decided
    before the first ``next``; the epoch moves on at each pass, also after one that was left early.

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
    _epochs: Epochs
    _batches: PassBatches
    _skip_once: int
    _began: int
    _OWN: ClassVar[frozenset[str]] = frozenset(
        {"_inner", "_feed", "_settings", "_epochs", "_batches", "_skip_once", "_began"}
    )

    def __init__(  # noqa: PLR0917  # these names and their order are Accelerate's
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
        shuffles = find_generator(loader)
        settings = Settings(
            seed=rng.draw_seed() if shuffles is None else rng.signed_seed(shuffles.initial_seed()),
            device=None if device is None else torch.device(device),
            non_blocking=non_blocking,
            rng_types=rng.check_rng_types(rng_types),
            generator=synchronized_generator,
            skip_batches=check_count("skip_batches", skip_batches, least=0),
            is_stateful=use_stateful_dataloader,
            per_message=check_count("batches_per_message", batches_per_message, least=1),
            is_divided=False,
            comm=comm,
        )
        self._adopt(loader, seeded(whole_feed(loader, worker_split), settings.seed), settings)

    @classmethod
    def over(cls, loader: DataLoader[Any], feed: Feed, settings: Settings) -> DataLoaderShard:
        """Make one around a clone of a user's loader, with the passes of a feed.

        Args:
            loader: The user's; it stays as it is.
            feed: Begins the passes.
            settings: What else is to be done.
        """
        made = cls.__new__(cls)
        made._adopt(loader, feed, settings)  # noqa: SLF001  # an object of this class
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
        epochs = Epochs(Progress(), parts)
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
        for name, value in {**own, "_batches": batches, "_skip_once": 0, "_began": 0}.items():
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
        return max(0, len(self._feed) - self._settings.skip_batches - self._skip_once)

    @property
    def _iterator(self) -> Any:  # type: ignore[override]  # set through __setattr__
        """The iterator that torch's loader keeps while its workers are kept."""
        kept = self._kept_iterator()
        return kept.torch_iterator if isinstance(kept, Messages) else kept

    def _kept_iterator(self) -> Any:
        return self._inner.__dict__["_iterator"]

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
    def pass_number(self) -> int:
        """The place of the pass under way among all of this process's, 0 if none is.

        A pass that began later, inside the loop over another, has a higher one.
        """
        run = self._epochs.progress.run
        is_under_way = run is not None and run.step > 0 and not run.was_left
        return self._began if is_under_way else 0

    @property
    def step(self) -> int:
        """The step of the pass under way whose batch is out, from zero; -1 if none is."""
        run = self._epochs.progress.run
        return -1 if run is None else run.step - 1

    @property
    def num_steps(self) -> int | None:
        """Steps of the pass under way; None while that is not known, or if none is."""
        run = self._epochs.progress.run
        return None if run is None else run.record.num_steps

    def real_rows(self, start: int, stop: int) -> int | None:
        """Count the real rows that all ranks have in some steps of the pass under way.

        Args:
            start: The first step.
            stop: The step after the last.

        Returns:
            Rows; None if the loader's batches have no declared size. Of a stream whose end is not
            known they are counted as full.
        """
        run, size = self._epochs.progress.run, self.total_batch_size
        if run is None or size is None or (isinstance(self._feed, IndexFeed) and self._feed.is_cut):
            return None
        plan, offset = self._feed.plan, 0
        if isinstance(run.record, SampledPass):
            plan = run.record.plan
        elif isinstance(run.record, StreamPass):
            offset = run.record.first_step
        if plan.num_samples is None:
            return size * (stop - start)
        first, last = (min(step + offset, plan.num_steps) for step in (start, stop))
        return plan.cursor(last) - plan.cursor(first)

    @property
    def valid_rows(self) -> int:
        """Real rows of the batch that is out; they come first. 0 when no batch is out."""
        run = self._epochs.progress.run
        return run.record.valid_rows(run.step - 1) if run is not None and run.step else 0

    @property
    def num_rows(self) -> int:
        """Rows of the batch that is out, padding included. 0 when no batch is out."""
        run = self._epochs.progress.run
        return run.record.num_rows(run.step - 1) if run is not None and run.step else 0

    @property
    def tail(self) -> Tail:
        """What happens where an epoch does not divide evenly."""
        return self._feed.tail

    @property
    def is_in_step(self) -> bool | None:
        """Whether all ranks take the same number of steps in a pass; None if only they can tell."""
        plan, feed = self._feed.plan, self._feed
        if feed.is_cut and isinstance(feed, IndexFeed):
            return None
        if self.shard.count == 1 or self.tail is not Tail.UNEVEN:
            return True
        if feed.is_cut or plan.num_samples is None:
            return False
        shards = (Shard(0, plan.shard.count), Shard(plan.shard.count - 1, plan.shard.count))
        first, last = (plan.seek(0, shard=shard).num_steps for shard in shards)
        return first == last

    @property
    def is_simulation(self) -> bool:
        """Whether the shard is not this process's own, so that there is nobody to agree with."""
        return self._settings.is_simulation

    @property
    def comm(self) -> Comm:
        """The ranks that share the data."""
        return self._settings.comm or current_comm()

    @property
    def remainder(self) -> int:
        """Real rows of a pass's last step over all ranks if that is not full, else -1.

        Known for loaders of known length; -1 for others.
        """
        feed = self._feed
        if isinstance(feed, IndexFeed):
            return feed.remainder
        return -1 if feed.plan.num_samples is None else feed.plan.remainder

    @property
    def total_batch_size(self) -> int | None:
        """Rows of a full step over all ranks; None if batches have no declared size."""
        return self._feed.global_batch_size

    @property
    def total_dataset_length(self) -> int | None:
        """Samples in the epoch's order, of all ranks together; None if that is not known."""
        return self._feed.num_samples

    @property
    def remaining_steps(self) -> int:
        """Steps that are left of the pass under way, or of the next one if none is.

        Raises:
            TypeError: If that is not known.
        """
        run, consumed = self._epochs.progress.current, self._epochs.progress.upcoming.consumed
        if run is None and consumed:
            return max(0, self._feed.plan.seek(consumed).num_steps - self._skip_once)
        if run is None:
            return len(self)
        if run.record.num_steps is None:
            raise TypeError("The number of steps is not known before the end of the pass.")
        return run.record.num_steps - run.step

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
        made = DataLoaderShard.over(self._inner, self._feed, self._settings)
        start = self._epochs.progress.upcoming
        made._epochs.progress.jump(start)  # noqa: SLF001  # an object of this class
        made._skip_once = self._skip_once + steps  # noqa: SLF001  # the same
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
        self._began = time.monotonic_ns()
        try:
            step = 0
            for batch in self._fetch(pass_, run):
                if step == pass_.num_steps and not isinstance(pass_, StreamPass):
                    raise self._wrong_count("more", pass_)
                step += 1
                run.step = step
                yield batch
            if step != pass_.num_steps:
                raise self._wrong_count(str(step), pass_)
            self._epochs.progress.finish(run)
        finally:
            run.was_left = True

    def _wrong_count(self, found: str, pass_: Pass) -> PlanError:
        return PlanError(
            f"`dataloader` must yield one batch per batch of its sampler, got {found} for "
            f"{pass_.num_steps} from {type(self._inner).__name__}.__iter__."
        )

    def _partners(self) -> Comm | None:
        """Return the ranks that this loader has to agree with; None if there are none."""
        if self._settings.is_simulation or not self._settings.is_divided:
            return None
        return self.comm if self.comm.world_size > 1 else None

    def _kinds_to_sync(self) -> list[str]:
        """List the generators to be made equal; orders by value need none of their sampler."""
        settings, feed = self._settings, self._feed
        is_by_value = settings.is_divided and isinstance(feed, IndexFeed) and feed.is_by_value
        if settings.generator is None or is_by_value:
            return [kind for kind in settings.rng_types if kind != "generator"]
        return list(settings.rng_types)

    def _agree_on_pass(self) -> Pass:
        """Begin the upcoming pass, and make sure that all ranks begin the same."""
        settings, feed, cursor = self._settings, self._feed, self._epochs.progress.upcoming
        skipped = (0 if cursor.consumed else settings.skip_batches) + self._skip_once
        comm = self._partners()
        look = 0 if comm is None or feed.is_by_value or feed.is_cut else _LOOK
        if not settings.is_simulation:
            rng.synchronize(self._kinds_to_sync(), self.comm, generator=settings.generator)

        def begin() -> tuple[Pass, tuple[int, ...]]:
            self._epochs.tell(cursor.epoch)
            pass_, head = feed.begin(cursor.consumed, look=look)
            if skipped:
                pass_ = pass_.after(skipped)
            print_ = zlib.crc32(repr(head).encode()) if look else 0
            position = 0 if feed.is_cut else cursor.consumed + skipped
            is_even = not feed.is_cut and feed.tail is not Tail.UNEVEN
            steps = -1 if pass_.num_steps is None or not is_even else pass_.num_steps
            return pass_, (cursor.epoch, position, settings.seed, steps, print_)

        if comm is None:
            pass_ = begin()[0]
        else:
            subject = f"the loader over {self._batches.name}"
            pass_ = agree_on(comm, begin, subject=subject, facts=_PASS_FACTS)[0]
        self._skip_once = 0
        return pass_

    def _fetch(self, pass_: Pass, run: Run) -> Iterator[Any]:
        """Get the batches of a pass, and see to them."""
        if isinstance(pass_, StreamPass):
            return self._recorded(self._in_step(self._arrivals(pass_, run)), pass_)
        made, _ = self._start(pass_, run)
        if isinstance(pass_, ReadyPass):
            made = _counted(made, pass_)
        if pass_.num_steps is None:
            made = _one_held_back(made)
        return self._moved(made)

    def _start(self, pass_: Pass, run: Run) -> tuple[Iterator[Any], Records]:
        """Let the user's own ``__iter__`` make the batches of a pass; returns their records too."""
        inner = self._inner
        records = Records()
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
        kept = self._kept_iterator()
        if isinstance(kept, Messages):
            records = kept.records  # workers that are kept go on writing where they began
        return chain(first, batches), records

    def _arrivals(self, pass_: StreamPass, run: Run) -> Iterator[Arrival]:
        """Pair the batches of a stream with their records.

        Even the first is not made before it is asked for, so that `in_step` tells all ranks if that
        fails.
        """
        batches, records = self._start(pass_, run)
        if records.splits_itself:
            pass_.forget_length()
        made = records.batches
        for batch in batches:
            if len(made) == 0:
                raise self._not_one_by_one("more")
            yield Arrival(batch, *made.popleft())
        if made:
            raise self._not_one_by_one("fewer")

    def _not_one_by_one(self, got: str) -> PlanError:
        return PlanError(
            "`dataloader` must yield one batch per batch that is made of its stream, got "
            f"{got} from {type(self._inner).__name__}.__iter__."
        )

    def _moved(self, batches: Iterator[Any]) -> Iterator[Any]:
        device = self._settings.device
        if device is None:
            return batches
        return move_batches(batches, device, non_blocking=self._settings.non_blocking)

    def _in_step(self, arrivals: Iterator[Arrival]) -> Iterator[Arrival]:
        """Keep ranks that read parts of their own in step."""
        feed = self._feed
        comm = self._partners()
        if comm is not None and feed.tail is not Tail.UNEVEN:
            return in_step(arrivals, comm, tail=feed.tail, is_cut=feed.is_cut)
        return mark_last(arrivals)

    def _recorded(self, arrivals: Iterator[Arrival], pass_: StreamPass) -> Iterator[Any]:
        """Write the record of each batch of a stream just before it goes out."""
        # An arrival is a dataclass, so its batch is moved like any other nesting.
        for arrival in self._moved(arrivals):
            pass_.add(
                arrival.num_rows,
                arrival.valid_rows,
                arrival.consumed,
                is_last=arrival.is_last,
            )
            yield arrival.batch
        pass_.end()

    def _open(self, epoch: int, records: Records) -> Any:
        """Make the iterator that fetches: torch's own over a copy, or messages from readers."""
        inner, feed, settings = self._inner, self._feed, self._settings
        # What torch draws from to start a pass, so that no generator of the process moves.
        seed = worker_seed(settings.seed, epoch, rank=feed.shard.index, worker=0)
        generator = torch.Generator().manual_seed(seed)
        if isinstance(feed, StreamFeed) or inner.num_workers or settings.is_stateful:
            crew = Crew(inner, feed, settings.seed, settings.per_message, settings.is_stateful)
            return crew.start(epoch, generator, self._epochs.progress, records)
        opened = copy.copy(inner)
        opened.__dict__.pop("_get_iterator")
        opened.__dict__["generator"] = generator
        return opened._get_iterator()  # noqa: SLF001  # what DataLoader.__iter__ would call


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
            held = following  # the one in hand is always the latest
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
            num_workers=loader.num_workers,
        )
    if loader.batch_sampler is None:
        each = BatchSampler(loader.sampler, 1, drop_last=False)
        return IndexFeed(BatchSamplerShard(each, tail=tail), is_ready=True)
    if isinstance(loader.batch_sampler, BatchSamplerShard):
        return IndexFeed(loader.batch_sampler)  # it knows its padding
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
