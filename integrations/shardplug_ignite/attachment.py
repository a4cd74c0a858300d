"""What a `ShardHandler` does at the events of one engine that it is attached to.

Of Ignite it touches three things that are not promised: the order of the handlers of an event, as
Ignite's own profilers do; where the engine's first epoch begins to count; and a run that has ended
in an exception, which Ignite would take for one under way. It never listens to EXCEPTION_RAISED: an
engine with a handler there swallows the user's exception.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, final

from ignite.engine import Engine, Events

from shardplug import Comm, DataLoaderDispatcher, DataLoaderShard, ShardEngine
from shardplug_ignite.counting import (
    first_iterations,
    is_at_start,
    is_divided_alike,
    remaining_steps,
    set_counts,
    set_limits,
    skip_iterations,
)
from shardplug_ignite.lengths import Loader, check_steps, length_of
from shardplug_ignite.ordering import (
    BEFORE_STEP,
    FIRST,
    LAST,
    MEETINGS,
    Handler,
    is_list,
    move_first,
    move_last,
)
from shardplug_ignite.positions import SavedRun
from shardplug_ignite.steps import RealSteps
from shardplug_ignite.stops import Stops


class Prepared(NamedTuple):
    """A loader, and the engine of the core that holds it, or would if it were not the user's."""

    loader: Loader
    shards: ShardEngine


class Host(Protocol):
    """What an attachment asks of its handler."""

    def prepared(self, data: Any) -> Prepared:
        """Prepare data; it is known if it was prepared before. Collective."""

    def ranks(self) -> Comm:
        """Return the ranks of the run."""

    def saved(self) -> SavedRun | None:
        """Return what a run that starts is to go on from."""

    def has_resumed(self) -> None:
        """Be told that a run goes on from that."""


@final
class Attachment:
    """A handler at one engine.

    Args:
        host: The handler.
        is_eval: Whether the engine evaluates.
        steps: The optimizer that the engine steps; None if it is not known.
        window: Iterations of an accumulation window; None if that is not known either.
        stops: Lets ranks stop together; None if they need not.

    Attributes:
        loader: What the engine iterates; None if it has no data.
        global_step: Iterations that were completed, in all runs that this one goes back to.
        is_tick_due: Whether the iteration that comes is the first, or follows on a real step.
        has_begun: Whether a run has started with it.
    """

    def __init__(
        self,
        host: Host,
        *,
        is_eval: bool,
        steps: RealSteps | None,
        window: int | None,
        stops: Stops | None,
    ) -> None:
        self.loader: Loader | None = None
        self.global_step = 0
        self.is_tick_due = True
        self.has_begun = False
        self._host = host
        self._is_eval = is_eval
        self._steps = steps
        self._window = window
        self._stops = stops
        self._shards: ShardEngine | None = None
        self._common_steps: int | None = None  # of a pass, where ranks may differ
        self._engine_state: Callable[[], Any] = _nothing  # weak: it knows this here, as its `shard`
        # Where the run could go on from: iterations, epochs, iterations of the epoch under way; and
        # the state of the loader there. That is made when it is asked for where it can be: the
        # loader then stands there, or has handed out one batch more, which is being worked at.
        self._counts = (0, 0, 0)
        self._position: dict[str, Any] | None = None
        self._is_live = True
        self._is_working = False
        # The epoch length that nobody gave: it was worked out here, or found in a run.
        self._has_own_length = False
        self._own_length: int | None = None
        self._first_iterations = 0  # of the epoch that a run begins in the middle of
        self._began = 0  # the iteration at which the epoch under way began, or would have
        self._is_partial = False  # no length can be found in it: it began on other shards
        self._is_to_recount = False  # iterations are those of other shards, until one is found
        self._steps_of_pass: int | None = None
        self._due: tuple[SavedRun, bool] | None = None  # own parts of a rank, to be given back
        self._ticked_at = -1
        self._snapshot: tuple[tuple[int, int, int], dict[str, Any]] | None = None
        self._snapshot_events: list[Any] = []
        # Ignite keeps but a weak reference; a strong one to this here would be a cycle, which keeps
        # the connections of an engine that is gone.
        self.take_snapshot: Handler = _snapshot_of(weakref.ref(self))

    # -- attaching ---------------------------------------------------------------------------

    def handlers(self) -> list[tuple[Events, Handler]]:
        """List what is called at which event."""
        found: list[tuple[Events, Handler]] = [
            (Events.STARTED, self.start),
            (Events.EPOCH_STARTED, self._begin_epoch),
            # Where Engine.set_data() may have put another loader; both come before its next batch.
            (Events.GET_BATCH_STARTED, self._before_batch),
            (Events.DATALOADER_STOP_ITERATION, self._before_batch),
            (Events.EPOCH_COMPLETED, self._note_length),
        ]
        if not self._is_eval:
            found += [
                (Events.ITERATION_COMPLETED, self._commit),
                (Events.TERMINATE_SINGLE_EPOCH, self._leave_epoch),
            ]
        if self._stops is not None:
            found += [(event, self._stops.agree) for event in MEETINGS]
            found += [(event, self._stops.hold) for event in BEFORE_STEP]
            found.append((Events.ITERATION_COMPLETED, self._stops.end_iteration))
        return found

    def attach(self, engine: Engine, snapshot: Any) -> None:
        """Be called at the events of an engine.

        Args:
            engine: The engine.
            snapshot: At which event ranks tell each other what is their own; None: never.
        """
        for event, handler in self.handlers():
            engine.add_event_handler(event, handler)
        if snapshot is not None:
            engine.add_event_handler(snapshot, self.take_snapshot)
            self._snapshot_events = list(snapshot) if is_list(snapshot) else [snapshot]
        # Whatever else looks at the loader and its length when a run starts shall see ours.
        move_first(engine, Events.STARTED, self.start)

    def detach(self, engine: Engine) -> None:
        """Be called no more.

        Args:
            engine: The engine.
        """
        for event, handler in self.handlers():
            if engine.has_event_handler(handler, event):
                engine.remove_event_handler(handler, event)
        for event in self._snapshot_events:
            engine.remove_event_handler(self.take_snapshot, event)

    def _arrange(self, engine: Engine) -> None:
        """Come first where the position is noted, last where others may ask for something."""
        for event in LAST:
            for handler in self._last():
                move_last(engine, event, handler)
        for event in (*self._snapshot_events, *FIRST):
            if event == Events.STARTED:
                continue  # its handlers are being called
            for handler in (self.take_snapshot, self._commit, self._leave_epoch, self._note_length):
                move_first(engine, event, handler)

    def _last(self) -> tuple[Handler, ...]:
        if self._stops is None:
            return (self._before_batch,)
        stops = self._stops
        return (self._before_batch, stops.hold, stops.end_iteration, stops.agree)

    # -- the start of a run ------------------------------------------------------------------

    def start(self, engine: Engine) -> None:
        """Replace the loader of a run, find its place, and work out how long its epochs are.

        Collective: every rank must call it.
        """
        state, saved = engine.state, None if self._is_eval else self._host.saved()
        self._engine_state = weakref.ref(state)
        self.has_begun = True
        self._arrange(engine)
        if self._stops is not None:
            self._stops.begin_run()
        self._due, self._is_partial, self._is_to_recount = None, False, False
        if state.dataloader is None:
            self.loader = self._shards = self._common_steps = None
        else:
            self._take_data(engine, saved)
        if saved is not None:
            self._go_on(saved)
        self._first_iterations = first_iterations(engine)
        self._stand_at((state.iteration, state.epoch, self._first_iterations))

    def _take_data(self, engine: Engine, saved: SavedRun | None) -> None:
        state = engine.state
        is_length_given = self._is_length_given(engine, saved)
        loader = self._use(state.dataloader)
        state.dataloader = loader
        if saved is not None and saved.loader is not None:
            loader.load_state_dict(saved.loader)
        elif self._is_eval or loader.epoch < state.epoch:
            loader.set_epoch(state.epoch)
        steps, self._common_steps = check_steps(
            state,
            loader,
            self._host.ranks(),
            is_eval=self._is_eval,
            is_length_given=is_length_given,
        )
        self._steps_of_pass = steps or None
        if is_length_given:
            self._has_own_length = False
            if saved is None and not self._is_eval:
                skip_iterations(engine, loader, steps)
        else:
            if state.iteration == 0 or not self._has_own_length or saved is not None:
                # A rank without a step goes through its epochs only if it does not know that.
                self._has_own_length, self._own_length = True, steps or None
            state.epoch_length = self._own_length
        if saved is not None:
            self._find_place(engine, loader, saved, steps)

    def _is_length_given(self, engine: Engine, saved: SavedRun | None) -> bool:
        """Tell whether the epoch length of a run that starts is the user's.

        It is not where it is the length of the data, or what an earlier run has left behind. A run
        that resumes from a loaded state has its length from there.
        """
        state = engine.state
        own = self._own_length if self._has_own_length else None
        length = length_of(state.dataloader)
        if state.epoch_length is None:
            return False
        is_from_state = state.iteration > 0 or (
            saved is not None and saved.epoch_length == state.epoch_length
        )
        if saved is not None and is_from_state:
            return saved.is_length_given
        if state.iteration > 0:
            return not self._has_own_length or state.epoch_length not in (length, own)
        return bool(state.epoch_length != (own if length is None else length))

    def _use(self, data: Any) -> Loader:
        prepared = self._host.prepared(data)
        self.loader, self._shards = prepared
        return prepared.loader

    # -- going on ----------------------------------------------------------------------------

    def _find_place(
        self, engine: Engine, loader: Loader, saved: SavedRun, steps: int | None
    ) -> None:
        """Let the engine count from where the loader stands, in epochs of the length they have now.

        Args:
            engine: Its state is that of the run that starts, by Ignite's own account.
            loader: Stands where the run that was saved did.
            saved: The run that was saved.
            steps: Of a pass of the loader; None if not known.
        """
        state, remaining = engine.state, remaining_steps(loader)
        is_at_end = remaining == 0
        if is_at_end:
            loader.set_epoch(loader.epoch + 1)
        if saved.rank_states is not None:
            self._due = saved, is_at_end
        epochs, done = saved.epochs, saved.epoch_iterations
        if self._has_own_length:
            left = None if steps is None else remaining
            is_alike = is_divided_alike(loader, saved)
            if steps is None and is_alike:
                state.epoch_length = self._own_length = saved.epoch_length
            if is_at_end or is_at_start(saved):
                # What was done is an epoch that was over, or nothing: a run that had just started.
                epochs, done = epochs + (done > 0), 0
            elif left is None and not is_alike:
                self._is_partial = True  # how many are left, only the end will tell
                state.epoch_length = None
            elif left is not None and steps is not None:
                done = steps - left
            self._is_to_recount = state.epoch_length is None and not is_alike
        set_limits(engine, saved)
        set_counts(engine, saved, epochs, done)

    def _go_on(self, saved: SavedRun) -> None:
        self.global_step = saved.global_step
        self.is_tick_due = saved.is_tick_due
        if self._steps is not None:
            self._steps.go_on(saved.optimizer_steps)
        self._host.has_resumed()

    def _give_back(self, saved: SavedRun, *, is_at_end: bool) -> None:
        """Give a rank back what is its own, as late as can be before the first batch is made."""
        assert self._shards is not None  # there is a loader
        state = self._shards.state_dict()
        is_behind = is_at_end and self.loader is not None and bool(state["loaders"])
        if is_behind:  # what a rank has of its own is of the end of the epoch before
            state["loaders"] = [saved.loader]
        self._shards.load_state_dict(state, rank_states=saved.rank_states)
        if is_behind and self.loader is not None:
            self.loader.set_epoch(self.loader.epoch + 1)

    # -- while it runs -----------------------------------------------------------------------

    def _begin_epoch(self, engine: Engine) -> None:
        self._began = engine.state.iteration - self._first_iterations
        self._first_iterations = 0
        self._tell_stops(engine)

    def _tell_stops(self, engine: Engine) -> None:
        """Tell up to which iteration of the epoch all ranks go together."""
        if self._stops is not None:
            state = engine.state
            until = None if state.max_iters is None else state.max_iters - self._began
            known = (self._common_steps, state.epoch_length, until)
            last = min((each for each in known if each is not None), default=None)
            self._stops.begin_epoch(self._began, last)

    def _before_batch(self, engine: Engine) -> None:
        """Shard a loader that was put in place of ours while a run goes on.

        Collective: every rank must call it, where there is one.
        """
        data: Any = engine.state.dataloader
        if data is not self.loader:
            self._replace(engine, data)
        self._is_working = True
        if self._due is not None:
            (saved, is_at_end), self._due = self._due, None
            self._give_back(saved, is_at_end=is_at_end)

    def _replace(self, engine: Engine, data: Any) -> None:
        state, is_ours = engine.state, isinstance(data, (DataLoaderShard, DataLoaderDispatcher))
        loader = self._use(data)
        _, self._common_steps = check_steps(  # set_data() keeps the length
            state, loader, self._host.ranks(), is_eval=self._is_eval, is_length_given=True
        )
        self._tell_stops(engine)
        if not is_ours:
            engine.set_data(loader)
        self._stand_at((state.iteration, state.epoch - 1, state.iteration - self._began))

    def _commit(self, engine: Engine) -> None:
        """Note that an iteration is over, and whether a run may go on from it."""
        self.global_step += 1
        state = engine.state
        iteration = state.iteration
        is_closed = self._window is not None and iteration % self._window == 0
        if self._steps is not None:
            self.is_tick_due, is_closed = self._steps.settle(is_end=is_closed)
        elif self._window is None:
            is_closed = True
        if is_closed:
            self._is_live = True
            self._counts = (iteration, state.epoch - 1, iteration - self._began)
        elif self._is_live:
            # The loader goes on without its window: while it is one batch ahead it can tell.
            self._position, self._is_live = self.position, False
        self._is_working = False

    def _stand_at(self, counts: tuple[int, int, int]) -> None:
        """Note that a run may go on from where the loader stands now."""
        self._counts, self._is_live, self._is_working = counts, True, False

    def _leave_epoch(self, engine: Engine, iter_counter: int) -> None:
        """Take an epoch that is left early for one that is over."""
        loader = self.loader
        if loader is not None:
            loader.set_epoch(loader.epoch + 1)
            # The engine leaves the pass only after this event; the loader stands at the next now.
            loader.load_state_dict(loader.skipping(0).state_dict())
        self._stand_at((engine.state.iteration, engine.state.epoch, 0))

    def _note_length(self, engine: Engine) -> None:
        """Note a length that the engine has found; let a rank without a step go on."""
        state = engine.state
        if not self._has_own_length:
            return
        if self._is_to_recount and state.max_iters is not None:
            state.max_epochs = None  # worked out by the engine, from epochs of one length
        if state.epoch_length == 0 or self._is_partial:
            # The engine would take zero steps for the end of the run, or never start the next
            # pass; and what is left of an epoch is no length.
            state.epoch_length = self._steps_of_pass if self._is_partial else None
            self._is_partial = False
            engine.set_data(self._use(state.dataloader))
        self._own_length = state.epoch_length
        if self._is_to_recount and state.epoch_length is not None:
            self._is_to_recount = False
            self._recount(engine, state.epoch * state.epoch_length)

    def _recount(self, engine: Engine, iteration: int) -> None:
        """Let the engine count in epochs of a length that was found: it takes the count for one."""
        state = engine.state
        if state.max_iters is not None:
            return  # its count is what it says
        added, state.iteration = iteration - state.iteration, iteration
        before, self._counts = self._counts, (max(0, self._counts[0] + added), *self._counts[1:])
        if self._snapshot is not None and self._snapshot[0] == before:
            self._snapshot = self._counts, self._snapshot[1]

    def is_tick(self, engine: Engine) -> bool:
        """Tell whether schedules move on before the iteration that starts."""
        if self.is_tick_due:
            self._ticked_at = engine.state.iteration
        return self.is_tick_due

    # -- what is saved -----------------------------------------------------------------------

    @property
    def optimizer_steps(self) -> int | None:
        """Real steps so far; None where the optimizer is not known."""
        return None if self._steps is None else self._steps.count

    @property
    def position(self) -> dict[str, Any] | None:
        """The state of the loader at the point that the run could go on from."""
        loader = self.loader
        if loader is None:
            return None
        if not self._is_live:
            return self._position
        if self._is_eval or not self._is_working:
            return loader.state_dict()
        if getattr(self._engine_state(), "batch", None) is None:
            return loader.state_dict()  # the next one has not come yet
        return loader.state_at(loader.step)

    def run(self, engine: Engine) -> SavedRun:
        """Tell what is to be saved.

        Args:
            engine: The engine.
        """
        state = engine.state
        iteration, epochs, done = self._counts
        taken = None
        if self._snapshot is not None and self._snapshot[0] == (iteration, epochs, done):
            taken = self._snapshot[1]
        has_ticked = self._ticked_at == state.iteration and _is_in_iteration(engine)
        return SavedRun(
            loader=self.position,
            iteration=iteration,
            epochs=epochs,
            epoch_iterations=done,
            epoch_length=state.epoch_length,
            is_length_given=not self._has_own_length,
            num_shards=1 if self.loader is None else self.loader.shard.count,
            max_epochs=None if state.max_iters is not None else state.max_epochs,
            max_iters=state.max_iters,
            optimizer_steps=self.optimizer_steps or 0,
            is_tick_due=self.is_tick_due and not has_ticked,
            global_step=self.global_step,
            rank_states=taken,
        )

    def gather_own(self, engine: Engine) -> None:
        """Gather what every rank has of its own where the run stands.

        Collective: every rank must call it.

        Args:
            engine: The engine.
        """
        # Inside a window it would be of another place than the one that a run goes on from.
        if self._shards is not None and self._is_live:
            self._snapshot = self._counts, self._shards.gather_rank_states()


def _nothing() -> None:
    return None


def _snapshot_of(attachment: weakref.ref[Attachment]) -> Handler:
    def take_snapshot(engine: Engine, iter_counter: int = 0) -> None:  # Ignite's
        taking = attachment()
        if taking is not None:
            taking.gather_own(engine)

    return take_snapshot


def _is_in_iteration(engine: Engine) -> bool:
    """Tell whether an iteration has started and is not over."""
    return engine.last_event_name in (Events.ITERATION_STARTED, Events.EXCEPTION_RAISED)
