"""`DataLoaderShard`: a loader that reads its shard of every epoch.

A pass begins with the agreement of the ranks; its batches are made by the clone of the user's
loader, recorded and moved to the device. The batches themselves are torch's business.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from shardplug import rng
from shardplug.comm import Comm, agree_on
from shardplug.credit import Arrival, in_step, mark_last
from shardplug.devices import move_batches
from shardplug.errors import PlanError, StateError
from shardplug.feeds import Feed, IndexFeed, find_seed, seeded
from shardplug.fetching import Crew, Messages, Records
from shardplug.options import check_device, check_loader_options
from shardplug.passes import EmptyPass, Pass, ReadyPass, StreamPass
from shardplug.plan.cursor import Cursor, Run
from shardplug.plan.order import worker_seed
from shardplug.plan.shard import Shard
from shardplug.plan.split import Split, Tail
from shardplug.prepared import PreparedLoader, Settings
from shardplug.rows import count_rows
from shardplug.samplers import BatchSamplerShard
from shardplug.streams import HasState, StreamFeed
from shardplug.worker_info import check_worker_split

_LOOK = 4096
"""How many ids (or batches) from the start of an order that is not ours are compared."""

_ORDERS = {"generator", "torch"}
"""What orders would be drawn from that follow a seed instead."""

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


class DataLoaderShard(PreparedLoader):
    """A DataLoader whose passes are those of one shard, epoch by epoch.

    Built directly it cuts nothing: it delivers the loader that it is given the arguments of, a
    RandomSampler as a function of (seed, epoch), and asks nothing of other ranks but what
    ``rng_types`` needs. `prepare_data_loader` makes one that reads a shard. Nothing is decided
    before the first ``next``; the epoch moves on at each pass, also after one that was left early.

    Reads and writes of a loader's attributes reach the loader that iterates. `state_dict` tells
    where it stands, and `load_state_dict` goes on from there on any number of ranks.

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
        batches_per_message: Most batches that one message from a worker carries, at least 1.
        worker_split: Who divides a stream among workers; see `prepare_data_loader`.
        seed_samples: Seed before each sample, by its position; see `prepare_data_loader`.
        comm: The ranks; None: those of the process.
        dataloader_kwargs: As for DataLoader.

    Raises:
        PlanError: If an argument does not fit.
        CommError: At the start of a pass, if ranks disagree or another rank failed.
    """

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
        seed_samples: bool = False,
        comm: Comm | None = None,
        **dataloader_kwargs: Any,
    ) -> None:
        given = check_loader_options(
            device=device,
            rng_types=rng_types,
            synchronized_generator=synchronized_generator,
            skip_batches=skip_batches,
            use_stateful_dataloader=use_stateful_dataloader,
            non_blocking=non_blocking,
            batches_per_message=batches_per_message,
            worker_split=worker_split,
            seed_samples=seed_samples,
            comm=comm,
        )
        loader: DataLoader[Any] = DataLoader(dataset, **dataloader_kwargs)
        chosen = find_seed(loader)
        settings = Settings(
            seed=rng.draw_seed() if chosen is None else rng.signed_seed(chosen),
            is_seed_pinned=chosen is not None and not given["rng_types"],  # then it is rank 0's
            device=check_device("device", given["device"]),
            non_blocking=given["non_blocking"],
            rng_types=given["rng_types"] or (),
            generator=synchronized_generator,
            skip_batches=given["skip_batches"],
            is_stateful=given["use_stateful_dataloader"],
            per_message=given["batches_per_message"],
            seeds_samples=given["seed_samples"],
            is_divided=False,
            comm=comm,
        )
        self._adopt(loader, seeded(whole_feed(loader, worker_split), settings.seed), settings)

    # -- passes ------------------------------------------------------------------------------

    def _kinds_to_sync(self) -> list[str]:
        """List the generators to be made equal; orders by value need none of their sampler."""
        settings, feed = self._settings, self._feed
        is_by_value = settings.is_divided and isinstance(feed, IndexFeed) and feed.is_by_value
        if settings.generator is None or is_by_value:
            return [kind for kind in settings.rng_types if kind != "generator"]
        return list(settings.rng_types)

    def _synchronize(self) -> None:
        """Make generators equal to rank 0's, in one message; so is what replaces their draws."""
        kinds, comm, generator = self._kinds_to_sync(), self.comm, self._settings.generator
        if comm.world_size == 1 or not kinds:
            return
        own = self._settings.seed, rng.capture(kinds, generator)
        seed, states = comm.broadcast_object(own)
        rng.restore(states, generator)
        if not self._settings.is_divided and _ORDERS & {*kinds}:
            self._follow(seed)

    def _agree_on_pass(self) -> tuple[Pass, tuple[int, int] | None]:
        """Begin the upcoming pass, and make sure that all ranks begin the same."""
        if not self._settings.is_simulation:
            self._synchronize()
        settings, feed, start = self._settings, self._feed, self._epochs.progress.upcoming
        skipped = self._steps_to_skip(start)
        comm = self._partners()
        look = self._items_to_look_at(start, comm)

        def begin() -> tuple[tuple[Pass, tuple[int, int] | None], tuple[int, ...]]:
            self._epochs.tell(start.epoch)
            pass_, head = feed.begin(start, look=look)
            order = (len(head), _checksum(head)) if look else None
            self._check_order(start, head)
            if start.is_done:
                pass_ = EmptyPass(start.consumed, start.extra_rows)
            elif skipped:
                pass_ = pass_.after(skipped)
            position = 0 if feed.is_cut else start.consumed + skipped
            is_even = not feed.is_cut and feed.tail is not Tail.UNEVEN
            steps = -1 if pass_.num_steps is None or not is_even else pass_.num_steps
            print_ = 0 if order is None or feed.is_cut else order[1]
            return (pass_, order), (start.epoch, position, settings.seed, steps, print_)

        if comm is None:
            return begin()[0]
        subject = f"the loader over {feed.kind}"
        return agree_on(comm, begin, subject=subject, facts=_PASS_FACTS)[0]

    def _items_to_look_at(self, start: Cursor, comm: Comm | None) -> int:
        """Say how much of the start of an order is compared, across ranks and with a state."""
        feed = self._feed
        if feed.is_by_value:
            return 0
        # Alone only what the first batch needs anyway: a sampler may be at work while it is walked.
        batches = feed.batches if isinstance(feed, IndexFeed) else None
        first = (batches.batch_size or 1) if batches is not None and batches.is_plain else 1
        look = first if comm is None or feed.is_cut else _LOOK
        return look if start.order is None else max(look, start.order[0])

    def _check_order(self, start: Cursor, head: Sequence[Any]) -> None:
        """Make sure that an epoch that goes on from a state has the order that it had."""
        if start.order is None or _checksum(head[: start.order[0]]) == start.order[1]:
            return
        raise StateError(
            f"`sampler` must draw the order that it drew when the state was saved, got another one "
            f"from {self._feed.kind} for epoch {start.epoch}. Let it follow set_epoch(), or "
            "seed its generator."
        )

    def _fetch(self, pass_: Pass, run: Run) -> Iterator[Any]:
        """Get the batches of a pass, and see to them."""
        if isinstance(pass_, EmptyPass):
            return iter(())
        if isinstance(pass_, StreamPass):
            return self._recorded(self._in_step(self._arrivals(pass_, run)), pass_)
        made, records = self._start(pass_, run)
        if self._keeps_source_state:
            made = self._with_states(made, records)
        if isinstance(pass_, ReadyPass):
            made = _counted(made, pass_)
        if pass_.num_steps is None:
            made = _one_held_back(made)
        return self._moved(made)

    @property
    def differs_by_rank(self) -> bool:
        """Whether the source may have states that each rank has others of: `rank_state`."""
        return super().differs_by_rank or self._keeps_source_state

    @property
    def _keeps_source_state(self) -> bool:
        """Whether a data set that is looked up by index has states, told batch by batch."""
        return self._settings.is_stateful and isinstance(self._inner.dataset, HasState)

    def _with_states(self, batches: Iterator[Any], records: Records) -> Iterator[Any]:
        """Note the state of the data set after each batch."""
        for steps, batch in enumerate(batches, start=1):
            snapshot = records.batches.popleft()[3]
            assert snapshot is not None  # its reader has told it
            self._source.settle(steps - self._keeps_steps - 3)  # what is held back or on its way
            self._source.add(steps, snapshot)
            yield batch

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
            if run.start.consumed:
                raise StateError(
                    "`steps` of the state must be there where workers split a stream themselves, "
                    'got None. Use no workers, or worker_split="shardplug".'
                )
            pass_.split_itself()
        made = records.batches
        for batch in batches:
            if len(made) == 0:
                raise self._not_one_by_one("more")
            num_rows, valid_rows, consumed, snapshot = made.popleft()
            yield Arrival(batch, num_rows, valid_rows, consumed, snapshot=snapshot)
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
                snapshot=arrival.snapshot,
            )
            yield arrival.batch
        pass_.end()

    def _open(self, epoch: int, records: Records) -> Any:
        """Make the iterator that fetches: torch's own over a copy, or messages from readers."""
        inner, feed, settings = self._inner, self._feed, self._settings
        # What torch draws from to start a pass, so that no generator of the process moves.
        seed = worker_seed(settings.seed, epoch, rank=feed.shard.index, worker=0)
        generator = torch.Generator().manual_seed(seed)
        is_plain = not (inner.num_workers or settings.is_stateful or settings.seeds_samples)
        if isinstance(feed, StreamFeed) or not is_plain:
            crew = Crew(
                inner,
                feed,
                seed=settings.seed,
                per_message=settings.per_message,
                is_stateful=settings.is_stateful,
                seeds_samples=settings.seeds_samples,
            )
            return crew.start(epoch, generator, self._epochs.progress, records)
        opened = copy.copy(inner)
        opened.__dict__.pop("_get_iterator")
        opened.__dict__["generator"] = generator
        return opened._get_iterator()  # noqa: SLF001  # what DataLoader.__iter__ would call


def _checksum(head: Sequence[Any]) -> int:
    return zlib.crc32(repr(list(head)).encode())


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
