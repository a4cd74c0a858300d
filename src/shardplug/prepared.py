"""What all prepared loaders are: a DataLoader that knows where in the data it stands.

It keeps the loader that really iterates, a clone of the user's with our batch sampler in it, and
adds what a pass needs around it: the epoch, the record of real rows, the state. How a pass gets its
batches is the business of `DataLoaderShard` and `DataLoaderDispatcher`.
"""

from __future__ import annotations

import copy
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils.data import BatchSampler, DataLoader

from shardplug.comm import Comm
from shardplug.comm_torch import current_comm
from shardplug.epochs import Epochs, PassBatches
from shardplug.errors import PlanError, StateError
from shardplug.feeds import Feed, IndexFeed
from shardplug.fetching import Messages
from shardplug.passes import Pass, SampledPass, Snapshot, SnapshotLog, StreamPass
from shardplug.plan.cursor import Cursor, OpenWindow, Progress, Run
from shardplug.plan.shard import Shard
from shardplug.plan.split import ShardPlan, Tail
from shardplug.samplers import HasEpoch
from shardplug.states import (
    Identity,
    decode_snapshot,
    encode_snapshot,
    layout_of,
    number_in,
    read_state,
    split_of,
)
from shardplug.streams import HasState, StreamFeed

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, slots=True)
class Settings:
    """What a loader does besides dividing the data.

    Attributes:
        seed: Of orders and workers, equal on all ranks.
        is_seed_pinned: Whether the user chose it; another one is taken over from a state.
        device: Where batches are moved, None to leave them.
        non_blocking: Whether moving may overlap with what comes after.
        rng_types: Generators made equal to rank 0's at the start of each pass.
        generator: The one that ``"generator"`` means.
        skip_batches: Steps left out at the start of each pass.
        is_stateful: Whether readers run in torchdata's StatefulDataLoader.
        per_message: Most batches that one message from a worker carries.
        seeds_samples: Whether readers seed before each sample, by its position.
        is_divided: Whether ranks share the data, so that they have to agree on each pass.
        is_simulation: Whether the shard is not this process's own, so that there is nobody to
            agree with.
        slice_fn: Cuts each shard's rows out of a round that is dispatched; None: nothing is cut.
        comm: The ranks; None: those of the process at the time.
    """

    seed: int
    is_seed_pinned: bool = False
    device: torch.device | None = None
    non_blocking: bool = False
    rng_types: tuple[str, ...] = ()
    generator: torch.Generator | None = None
    skip_batches: int = 0
    is_stateful: bool = False
    per_message: int = 1
    seeds_samples: bool = False
    is_divided: bool = True
    is_simulation: bool = False
    slice_fn: Callable[..., Any] | None = None
    comm: Comm | None = None


class PreparedLoader(DataLoader[Any]):
    """A DataLoader whose passes are those of one shard, epoch by epoch.

    The epoch moves on at each pass, also after one that was left early. Reads and writes of a
    loader's attributes reach the loader that iterates.
    """

    _inner: DataLoader[Any]
    _feed: Feed
    _settings: Settings
    _epochs: Epochs
    _batches: PassBatches
    _skip_once: int
    _began: int
    _handed_out: int
    _keeps_steps: int
    _source: SnapshotLog
    _blank: dict[str, Any]
    _OWN: ClassVar[frozenset[str]] = frozenset(
        {
            "_inner",
            "_feed",
            "_settings",
            "_epochs",
            "_batches",
            "_skip_once",
            "_began",
            "_handed_out",
            "_keeps_steps",
            "_source",
            "_blank",
        }
    )

    @classmethod
    def over(cls, loader: DataLoader[Any], feed: Feed, settings: Settings) -> Self:
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
        keeps_state = settings.is_stateful and isinstance(loader.dataset, HasState)
        if settings.per_message > 1 and keeps_state and isinstance(feed, IndexFeed):
            raise PlanError(
                "`batches_per_message` must be 1 for a data set with a state_dict() to get its "
                f"state back in the worker that it was of, got {settings.per_message}. Leave it "
                "out, or leave use_stateful_dataloader out."
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
        own = {
            "_inner": inner,
            "_feed": feed,
            "_settings": settings,
            "_epochs": epochs,
            "_batches": batches,
            "_skip_once": 0,
            "_began": 0,
            "_handed_out": 0,
            "_keeps_steps": 1,
            "_source": SnapshotLog(),
            "_blank": {},
        }
        for name, value in own.items():
            object.__setattr__(self, name, value)

    # -- what torch's loader has -------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Look an attribute up in the loader that iterates."""
        if name in self._OWN:
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the loader that iterates."""
        if name in self._OWN:
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
            start: The first step; below zero for those before the pass that belong to the
                accumulation window that it goes on with.
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
            plan, offset = plan.seek(run.start.consumed), run.record.first_step
        if plan.num_samples is None:
            return size * (stop - start)
        consumed = [run.window.consumed]
        consumed += [
            _seen_before(min(at + offset, plan.num_steps), plan, size)
            for at in (start, stop)
            if at >= 0
        ]
        return consumed[-1] - consumed[-2]

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
        run = self._epochs.progress.current
        if run is None:
            start = self._epochs.progress.upcoming
            if start.is_done:
                return 0
            left = self._feed.count_steps(start)
            return max(0, left - self._steps_to_skip(start) + start.steps)
        if run.record.num_steps is None:
            raise TypeError("The number of steps is not known before the end of the pass.")
        return run.record.num_steps - run.step

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, and tell samplers and data set.

        Args:
            epoch: Zero or more, the same on all ranks.

        Raises:
            PlanError: If ``epoch`` is no integer, or negative.
        """
        self._epochs.set_epoch(epoch)

    def skipping(self, steps: int) -> Self:
        """Return a loader like this one whose next pass starts after some steps.

        Args:
            steps: Steps of this loader to leave out, zero or more; later passes are full.
        """
        made = self.over(self._inner, self._feed, self._settings)
        progress = self._epochs.progress
        made._epochs.progress.jump(progress.upcoming, progress.open_window)  # noqa: SLF001  # ours
        made._skip_once = self._skip_once + steps  # noqa: SLF001  # the same
        return made

    def wrap_batch_sampler(self, wrap: Callable[[Any], BatchSampler]) -> None:
        """Put a wrapper of the caller's around the batch sampler that the loader iterates.

        Args:
            wrap: Takes the batch sampler, returns one that yields each of its batches once, in
                order.
        """
        self._inner.__dict__["batch_sampler"] = wrap(self._inner.batch_sampler)

    # -- its state ---------------------------------------------------------------------------

    @property
    def identity(self) -> Identity:
        """What the loader has to have in common with one whose state it takes."""
        feed, settings = self._feed, self._settings
        return Identity(
            unit=feed.unit,
            kind=feed.kind,
            num_samples=feed.num_samples,
            batch_size=feed.batch_size,
            seed=settings.seed,
            is_seed_pinned=settings.is_seed_pinned,
            num_shards=self.shard.count,
            num_workers=self._inner.num_workers,
        )

    def state_dict(self) -> dict[str, Any]:
        """Tell where the loader stands, as numbers and strings that JSON takes.

        It counts what has been handed out, however much workers have read ahead. Where the data is
        looked up by index, or is a stream that every rank reads, it is the same on all ranks (under
        tail "uneven", but for the very end of an epoch) and fits any number of them. While the
        last batch is out the rest of the epoch is empty; after the loop it stands at the start of
        the next; after one that was left early where it was left, until the next pass begins.

        Not collective.

        Returns:
            "epoch"; "consumed", which counts real rows of the epoch's global order over all ranks,
            or batches, as "unit" says; "seed" and others that a loader is checked by.
        """
        run = self._epochs.progress.current
        return self._state_of_upcoming() if run is None else self._state_in(run, run.step)

    def state_at(self, step: int) -> dict[str, Any]:
        """Tell where the loader stood after some of the steps of its pass.

        Args:
            step: Steps of the pass that had been handed out: now, or a few before: `keep_history`.
                Below zero: where the accumulation window began that the pass went on with.
        """
        run = self._epochs.progress.current
        assert run is not None  # whoever names a step has seen a pass
        return self._state_in(run, step)

    def _state_in(self, run: Run, step: int) -> dict[str, Any]:
        """Tell where a pass stood; asked for in each step, so that every look-up counts."""
        record, feed = run.record, self._feed
        state = self._blank.copy()
        state["is_done"] = is_done = 0 < step == record.num_steps
        stream = record if type(record) is StreamPass else None
        if feed.is_cut or (stream is not None and stream.is_split):
            self._put_steps(state, run.first_step + step)
            if stream is not None and stream.is_split:
                shard_index = self.shard.index if feed.is_cut else None
                state.update(
                    split_of(self.identity, stream.snapshots(step), shard_index=shard_index)
                )
            return state
        if step < 0:
            state["consumed"] = run.window.consumed
            return state
        state["consumed"] = record.consumed(step)
        if is_done:
            # What is dropped counts as done, where it is known how much that is.
            state["consumed"] = max(state["consumed"], feed.num_positions or 0)
        extra_rows = record.extra_rows(step)
        if extra_rows:
            state["extra_rows"] = extra_rows
        if stream is not None:
            for snapshot in stream.snapshots(step):
                state["source"] = encode_snapshot(snapshot, what=feed.kind)
        return state

    def _put_steps(self, state: dict[str, Any], steps: int) -> None:
        """Put down a position that counts steps of this layout of ranks and workers."""
        size, num_samples = self._feed.global_batch_size, self._feed.num_samples
        consumed = steps * (self.shard.count if size is None else size)
        state.update(layout_of(self.identity, steps))
        state["consumed"] = consumed if num_samples is None else min(consumed, num_samples)

    def _state_of_upcoming(self) -> dict[str, Any]:
        start, state = self._epochs.progress.upcoming, self.identity.blank()
        state.update(epoch=start.epoch, is_done=start.is_done, extra_rows=start.extra_rows)
        if start.order is not None:
            state["order_length"], state["order_checksum"] = start.order
        if start.steps or (self._feed.is_cut and not start.is_start):
            self._put_steps(state, start.steps + self._skip_once)
            if any(each.worker is not None for each in start.snapshots):
                shard_index = self.shard.index if self._feed.is_cut else None
                state.update(split_of(self.identity, start.snapshots, shard_index=shard_index))
            return state
        state["consumed"] = self._consumed_after(start, self._skip_once)
        for snapshot in start.snapshots:
            state["source"] = encode_snapshot(snapshot, what=self._feed.kind)
        return state

    def _consumed_after(self, start: Cursor, steps: int) -> int:
        """Count what will have been consumed some steps after a position."""
        if not steps:
            return start.consumed
        plan = self._feed.plan.seek(start.consumed)
        return plan.cursor(steps if plan.num_samples is None else min(steps, plan.num_steps))

    def consumed_before(self, step: int) -> int:
        """Count what had been consumed before a step of the pass; see `state_at` for how far back.

        Args:
            step: Below zero: where the accumulation window began that the pass went on with.
        """
        run = self._epochs.progress.current
        assert run is not None  # whoever names a step has seen a pass
        return run.window.consumed if step < 0 else run.record.consumed(step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on from a state, on this or another number of ranks.

        Not collective, but every rank must load the same state; the next pass checks that.

        Args:
            state: From `state_dict` of a loader over the same data.

        Raises:
            StateError: If it does not fit: other data, another pinned seed, another kind of order,
                another layout where positions count steps, an unknown version, or a rest too small
                for ``tail="exact"`` on so many ranks. Nothing is changed then.
        """
        start, seed = self.read_state(state)
        self.go_to(start, seed)

    def read_state(
        self, state: Mapping[str, Any], own: Sequence[Snapshot | str] = ()
    ) -> tuple[Cursor, int]:
        """Check a state; returns where it leads to, and the seed, for `go_to`.

        Args:
            state: From `state_dict`.
            own: States of the source that are this rank's own, from `rank_state`, as text or read.

        Raises:
            StateError: If it does not fit.
        """
        cursor, seed = read_state(state, self.identity)
        if not (cursor.is_start or cursor.is_done):
            self._check_position(state, has_own=bool(own))
        if own:
            known = [decode_snapshot(each) if isinstance(each, str) else each for each in own]
            self._check_own(known)
            cursor = replace(cursor, snapshots=tuple(known))
        feed = self._feed
        try:
            feed.count_steps(cursor)
        except TypeError:
            pass  # only the pass will tell
        except PlanError as error:
            raise StateError(
                f"`consumed` of the state must leave what this loader can deal out: {error}"
            ) from error
        return cursor, seed

    def _check_own(self, own: Sequence[Snapshot]) -> None:
        """Check that states of workers are those of as many as there are."""
        num_workers = max(1, self._inner.num_workers)
        for each in own:
            if each.worker is not None and each.worker[1] != num_workers:
                raise StateError(
                    f"`num_workers` must be {each.worker[1]}, whose data sets have states of their "
                    f"own, got {num_workers}. Use as many as before, or load without rank_states."
                )

    def _check_position(self, state: Mapping[str, Any], *, has_own: bool) -> None:
        """Check that a position inside an epoch is one that this loader's data can go on from."""
        feed, counts_steps = self._feed, state["steps"] is not None
        is_split = state["worker_positions"] is not None
        if (counts_steps and not is_split and not feed.is_cut) or (
            feed.is_cut and not counts_steps
        ):
            raise StateError(
                "`steps` of the state must be there where data was cut for each rank before, and "
                f"nowhere else, got {state['steps']!r}. Pass already_sharded as it was."
            )
        splits = isinstance(feed, StreamFeed) and feed.worker_split == "dataset"
        if splits and self._inner.num_workers > 1 and not is_split:
            raise StateError(
                "`worker_positions` of the state must be there where workers split a stream "
                "themselves, got None. Use no workers, or as many as before."
            )
        has_own = has_own or state["shard_index"] is None
        if not has_own and number_in(state, "shard_index") != self.shard.index:
            raise StateError(
                f"`shard_index` of the state must be {self.shard.index}, whose part of the stream "
                f"this rank reads, got {state['shard_index']!r}. Load the state of each rank on "
                "that rank, or pass rank_states=engine.gather_rank_states() of then."
            )

    def go_to(self, start: Cursor, seed: int, window: OpenWindow | None = None) -> None:
        """Let the next pass start at a position.

        Args:
            start: The position, from `read_state`.
            seed: Of orders and workers.
            window: The accumulation window that goes on there.
        """
        self._follow(seed)
        self._skip_once = 0
        self._epochs.progress.jump(start, window)

    def _follow(self, seed: int) -> None:
        """Take a seed for orders and workers."""
        if seed == self._settings.seed:
            return
        self._settings = replace(self._settings, seed=seed)
        if isinstance(self._feed, IndexFeed):
            self._feed.reseed(seed)
        self._inner.__dict__["_iterator"] = None  # workers that are kept follow the old one

    def keep_history(self, steps: int) -> None:
        """Let `state_at` reach back that many steps in the passes that follow, at least 1."""
        self._keeps_steps = steps

    @property
    def has_pass(self) -> bool:
        """Whether a pass has handed out a batch and is under way, or was left just now."""
        run = self._epochs.progress.current
        return run is not None and run.step > 0

    @property
    def open_window(self) -> OpenWindow:
        """The accumulation window that the pass under way went on with, or the next one will."""
        progress = self._epochs.progress
        return progress.open_window if progress.run is None else progress.run.window

    @property
    def handed_out(self) -> int:
        """When the batch that is out was handed out, in ns of the monotonic clock."""
        return self._handed_out

    @property
    def differs_by_rank(self) -> bool:
        """Whether the source may have states that each rank has others of: `rank_state`."""
        return self._feed.is_stream and self._feed.is_cut

    def rank_state(self, step: int | None = None) -> list[str]:
        """Tell the states of a source that are this rank's own, as text; none where it has none.

        Args:
            step: After how many steps of the pass, as for `state_at`; None: now.
        """
        states = self.source_states if step is None else self._source_states_at(step)
        return [encode_snapshot(each, what=self._feed.kind) for each in states]

    @property
    def source_states(self) -> Sequence[Snapshot]:
        """The states that the data set had after the batch that is out, where it has states."""
        run = self._epochs.progress.current
        if run is None:
            return self._epochs.progress.upcoming.snapshots
        return self._source_states_at(run.step)

    def _source_states_at(self, step: int) -> Sequence[Snapshot]:
        run = self._epochs.progress.current
        assert run is not None  # whoever names a step has seen a pass
        if type(run.record) is StreamPass and self._feed.is_stream:
            return run.record.snapshots(step)
        return self._source.at(step)

    @property
    def run(self) -> Run | None:
        """The pass under way, or left early; None if there is none."""
        return self._epochs.progress.run

    # -- passes ------------------------------------------------------------------------------

    @abstractmethod
    def _agree_on_pass(self) -> tuple[Pass, tuple[int, int] | None]:
        """Begin the upcoming pass on all ranks; also returns what to know its order by."""

    @abstractmethod
    def _fetch(self, pass_: Pass, run: Run) -> Iterator[Any]:
        """Get the batches of a pass, and see to them."""

    def _steps_to_skip(self, start: Cursor) -> int:
        """Count the steps to leave out at the start of the upcoming pass."""
        return (
            start.steps + self._skip_once + (self._settings.skip_batches if start.is_start else 0)
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Start a pass at its first ``next``.

        Collective: the first ``next`` is, on a loader that is divided among ranks. Where ranks read
        parts of a stream that may end at different steps, some later ones are too.
        """
        pass_, order = self._agree_on_pass()
        progress = self._epochs.progress
        skipped = self._steps_to_skip(progress.upcoming)
        self._skip_once = 0
        run = progress.begin(pass_, first_step=skipped)
        if isinstance(pass_, StreamPass):
            pass_.keep = self._keeps_steps
        self._blank = {**self.identity.blank(), "epoch": run.epoch}
        if order is not None:
            self._blank["order_length"], self._blank["order_checksum"] = order
        self._source = SnapshotLog(run.start.snapshots)
        self._began = time.monotonic_ns()
        try:
            step = 0
            for batch in self._fetch(pass_, run):
                if step == pass_.num_steps and not isinstance(pass_, StreamPass):
                    raise self._wrong_count("more", pass_)
                step += 1
                run.step = step
                self._handed_out = time.monotonic_ns()
                yield batch
            if step != pass_.num_steps:
                raise self._wrong_count(str(step), pass_)
            progress.finish(run)
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


def _seen_before(step: int, plan: ShardPlan, size: int) -> int:
    """Count the samples that all ranks have been given before a step.

    Args:
        step: In [0, steps of the plan].
        plan: After its last step it counts as consumed what is dropped, and what is read by ranks
            that take a step more.
        size: Rows of a full step over all ranks.
    """
    if step and plan.tail is not Tail.EXACT:
        return min(plan.cursor(step - 1) + size, plan.cursor(plan.num_steps))
    return plan.cursor(step)
