"""Runs that are killed and resumed, on as many ranks or others, against runs that are not."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from ignite.engine import Engine, Events
from torch.utils.data import DataLoader

from shardplug import Comm, PlanError, SoloComm, StateError
from shardplug.testing import run_ranks
from shardplug_ignite import ShardHandler
from shardplug_ignite.progress import ShardProgress
from tests.integrations.ignite.data import Ids, Stream, Unsized
from tests.laws import ids_of

Loader = DataLoader[Any]
State = dict[str, Any]
When = tuple[Any, int]
"""An event, and the how-many-th time that it comes."""


class KilledError(Exception):
    """What ends a run here: nothing is done after it."""


@dataclass
class Trained:
    """What one rank trained on, and what was saved on it."""

    steps: list[tuple[int, list[int]]] = field(default_factory=list)
    """By iteration, the epoch of the data and the real rows."""
    saved: State | None = None
    num_saved: int = 0
    """How many iterations were over then."""
    ended: tuple[int, int, int | None] = (0, 0, None)
    """Epoch, iteration and epoch length at the end."""


@dataclass(frozen=True)
class Script:
    """A training script; what is to be the same in both processes."""

    make_loader: Callable[[], Any]
    run: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    has_trainer: bool = True  # whether Ignite's own state is saved and loaded as well
    prepare: Callable[[Engine], object] = lambda _: None

    def train(
        self,
        world_size: int,
        *,
        save_at: When | None = None,
        saved: State | None = None,
    ) -> list[Trained]:
        """Run it on some ranks: to its end, or killed at an event when the state is saved."""
        return run_ranks(world_size, partial(self._rank, save_at=save_at, saved=saved))

    def _rank(self, comm: Comm, *, save_at: When | None, saved: State | None) -> Trained:
        trained, times = Trained(), count(1)
        handler = ShardHandler(comm=comm, **{"data_seed": 5, **self.options})

        def step(engine: Engine, batch: Any) -> None:
            rows = list(ids_of(batch))[: handler.loader.valid_rows]
            trained.steps.append((handler.loader.epoch, rows))

        def save(engine: Engine, iter_counter: int = 0) -> None:  # Ignite adds it at one event
            if save_at is None or next(times) != save_at[1]:
                return
            state = {"trainer": dict(engine.state_dict()), "shard": handler.state_dict()}
            trained.saved = json.loads(json.dumps(state))
            trained.num_saved = len(trained.steps)
            raise KilledError

        engine = Engine(step)
        handler.attach(engine)
        self.prepare(engine)
        if save_at is not None:
            engine.add_event_handler(save_at[0], save)
        if saved is not None:
            if self.has_trainer:
                engine.load_state_dict(saved["trainer"])
            handler.load_state_dict(saved["shard"])
        try:
            engine.run(self.make_loader(), **self.run)
        except KilledError:
            return trained
        state = engine.state
        trained.ended = (state.epoch, state.iteration, state.epoch_length)
        return trained


def resumed(script: Script, save_at: When, before: int, after: int) -> list[Trained]:
    """Kill a script at an event and go on, maybe on another number of ranks; all that was done."""
    first = script.train(before, save_at=save_at)
    states = [rank.saved for rank in first]
    assert states[0] is not None
    assert states == [states[0]] * before  # equal on all ranks
    second = script.train(after, saved=states[0])
    if before == after:
        for begun, rest in zip(first, second, strict=True):
            rest.steps[:0] = begun.steps[: begun.num_saved]
        return second
    return [Trained(steps=rank.steps[: rank.num_saved]) for rank in first] + second


def rows_by_epoch(ranks: list[Trained]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for epoch, rows in chain.from_iterable(rank.steps for rank in ranks):
        found[epoch] += rows
    return {epoch: sorted(rows) for epoch, rows in found.items()}


def shard_of(engine: Engine) -> ShardProgress:
    state: Any = engine.state
    found: ShardProgress = state.shard
    return found


def shuffled(num_samples: int, batch_size: int = 2, **options: Any) -> Callable[[], Loader]:
    return lambda: DataLoader(Ids(num_samples), batch_size, shuffle=True, **options)


EVENTS = [
    Events.STARTED,
    Events.EPOCH_STARTED,
    Events.GET_BATCH_STARTED,
    Events.GET_BATCH_COMPLETED,
    Events.ITERATION_STARTED,
    Events.ITERATION_COMPLETED,
    Events.EPOCH_COMPLETED,
    Events.COMPLETED,
]


def nth(event: Any, number: int) -> When:
    """An event, the so-and-so-many-th time that it comes."""
    return event, number


# On the same number of ranks.


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("has_trainer", [True, False])
def test_a_run_goes_on_as_if_it_had_not_been_killed(
    event: Any, world_size: int, has_trainer: bool
) -> None:
    script = Script(shuffled(11), {"max_epochs": 3}, has_trainer=has_trainer)
    whole = script.train(world_size)
    num_times = {Events.STARTED: 1, Events.COMPLETED: 1, Events.EPOCH_STARTED: 3}
    num_times[Events.EPOCH_COMPLETED] = 3
    for number in range(1, num_times.get(event, 3 * len(whole[0].steps) // 3) + 1):
        ranks = resumed(script, nth(event, number), world_size, world_size)
        assert [rank.steps for rank in ranks] == [rank.steps for rank in whole], number
        assert [rank.ended for rank in ranks] == [rank.ended for rank in whole], number


@given(
    epoch_length=st.integers(1, 9),
    max_epochs=st.integers(1, 4),
    stop=st.integers(1, 36),
    event=st.sampled_from(
        [Events.ITERATION_COMPLETED, Events.ITERATION_STARTED, Events.GET_BATCH_STARTED]
    ),
    has_trainer=st.booleans(),
)
@example(epoch_length=4, max_epochs=3, stop=5, event=Events.ITERATION_COMPLETED, has_trainer=False)
def test_a_given_epoch_length_is_resumed_exactly(
    epoch_length: int, max_epochs: int, stop: int, event: Any, has_trainer: bool
) -> None:
    script = Script(
        shuffled(11),
        {"max_epochs": max_epochs, "epoch_length": epoch_length},
        has_trainer=has_trainer,
    )
    whole = script.train(2)
    # The length of the unprepared loader, 6, is a pass: 3. Ignite refuses it beside its own state.
    assume(not (has_trainer and epoch_length == 6))
    stop = min(stop, len(whole[0].steps))
    ranks = resumed(script, nth(event, stop), 2, 2)
    assert [rank.steps for rank in ranks] == [rank.steps for rank in whole]
    assert [rank.ended for rank in ranks] == [rank.ended for rank in whole]


@pytest.mark.parametrize("stop", range(1, 9))
@pytest.mark.parametrize("has_trainer", [True, False])
def test_a_run_of_so_many_iterations_is_resumed_exactly(stop: int, has_trainer: bool) -> None:
    script = Script(shuffled(11), {"max_iters": 8}, has_trainer=has_trainer)
    whole = script.train(2)
    ranks = resumed(script, nth(Events.ITERATION_COMPLETED, stop), 2, 2)
    assert [rank.steps for rank in ranks] == [rank.steps for rank in whole]
    assert [rank.ended[1:] for rank in ranks] == [(8, 3)] * 2


def leave_an_epoch(engine: Engine) -> None:
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: engine.terminate_epoch())


@pytest.mark.parametrize("event", [Events.ITERATION_COMPLETED, Events.GET_BATCH_COMPLETED])
def test_a_run_in_which_an_epoch_was_left_is_resumed_exactly(event: Any) -> None:
    """Ignite would go on one epoch too early, by its count of iterations."""
    script = Script(shuffled(11), {"max_epochs": 3}, prepare=leave_an_epoch)
    whole = script.train(1)
    assert len(whole[0].steps) == 2 + 6 + 6
    for stop in range(3, 15):
        assert resumed(script, nth(event, stop), 1, 1) == [
            Trained(steps=whole[0].steps, ended=whole[0].ended)
        ]


LEFT: dict[str, tuple[Callable[[], Loader], dict[str, Any]]] = {
    "by index": (shuffled(13), {}),
    "dispatched": (shuffled(13), {"dispatch_batches": True}),
    "stream": (lambda: DataLoader(Stream(13), batch_size=2), {"dispatch_batches": False}),
    "dispatched stream": (lambda: DataLoader(Stream(13), batch_size=2), {}),
}


@pytest.mark.parametrize(
    ("event", "number"),
    [
        (Events.TERMINATE_SINGLE_EPOCH, 1),
        (Events.EPOCH_COMPLETED, 1),
        (Events.EPOCH_STARTED, 2),
    ],
)
@pytest.mark.parametrize(
    ("kind", "has_trainer"),
    # Ignite refuses its own state before the length of an epoch is known.
    [*((kind, False) for kind in LEFT), ("by index", True), ("dispatched", True)],
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_epoch_that_was_left_stays_left(
    event: Any, number: int, kind: str, has_trainer: bool, world_size: int
) -> None:
    """At the first of these events the engine has not left the pass, but the epoch is over."""
    make_loader, options = LEFT[kind]
    script = Script(
        make_loader,
        {"max_epochs": 3},
        options,
        prepare=leave_an_epoch,
        has_trainer=has_trainer,
    )
    whole = script.train(world_size)
    assert {epoch for epoch, _ in whole[0].steps} == {0, 1, 2}
    ranks = resumed(script, nth(event, number), world_size, world_size)
    assert [rank.steps for rank in ranks] == [rank.steps for rank in whole]
    assert ranks[0].ended[0] == whole[0].ended[0] == 3


@pytest.mark.parametrize("is_first", [True, False])
def test_a_state_of_the_end_of_an_epoch_that_was_left_is_of_the_next(is_first: bool) -> None:
    """Whether it is saved by a handler that was there before ours, or by one that came later."""

    def rank(comm: Comm) -> State:
        engine = Engine(lambda _, __: None)
        handler = ShardHandler(comm=comm, data_seed=5)
        saved: list[State] = []

        def save(*_: Any, **__: Any) -> None:
            saved.append(handler.state_dict())

        if is_first:
            engine.add_event_handler(Events.TERMINATE_SINGLE_EPOCH, save)
        handler.attach(engine, snapshot=Events.TERMINATE_SINGLE_EPOCH)
        if not is_first:
            engine.add_event_handler(Events.TERMINATE_SINGLE_EPOCH, save)
        leave_an_epoch(engine)
        engine.run(shuffled(24)(), max_epochs=3)
        assert len(saved) == 1
        return saved[0]

    for state in run_ranks(2, rank):
        assert (state["iteration"], state["epochs"], state["epoch_iterations"]) == (2, 1, 0)
        assert (state["loader"]["epoch"], state["loader"]["consumed"]) == (1, 0)
        assert state["rank_states"] is not None


# Without an engine.


def trainer_of(handler: ShardHandler) -> Engine:
    engine = Engine(lambda _, __: None)
    handler.attach(engine)
    return engine


@pytest.mark.parametrize("at", [1, 3, 5, None])
def test_the_state_stays_what_it_was_when_an_engine_is_detached(at: int | None) -> None:
    handler = ShardHandler(comm=SoloComm(), data_seed=5)
    engine = trainer_of(handler)
    states: list[State] = []

    def detach() -> None:
        states.append(handler.state_dict())
        handler.detach(engine)

    if at is not None:
        engine.add_event_handler(Events.ITERATION_COMPLETED(once=at), detach)
    engine.run(shuffled(8)(), max_epochs=2)
    if at is None:
        detach()
    assert states[0]["iteration"] == (8 if at is None else at)
    assert handler.state_dict() == states[0]
    handler.attach(engine)
    assert handler.state_dict() == states[0]  # no run has started since
    engine.run(shuffled(8)(), max_epochs=3)
    assert handler.state_dict()["iteration"] == engine.state.iteration


def test_the_state_of_another_engine_is_not_taken_for_that_of_a_new_one() -> None:
    handler = ShardHandler(comm=SoloComm(), data_seed=5)
    empty = handler.state_dict()
    first, second = trainer_of(handler), Engine(lambda _, __: None)
    first.run(shuffled(8)())
    handler.detach(first)
    handler.attach(second)
    assert handler.state_dict()["iteration"] == 0
    handler.detach(second)  # it has done nothing
    assert handler.state_dict()["iteration"] == 4
    assert handler.state_dict() != empty
    handler.attach(second)
    second.run(shuffled(6)())
    handler.detach(second)
    assert handler.state_dict()["iteration"] == 3  # the latest counts


@pytest.mark.parametrize(
    "make_loader",
    [
        lambda: DataLoader(Ids(11), batch_size=2, sampler=Unsized(11)),
        lambda: DataLoader(Stream(11), batch_size=2),
    ],
)
@pytest.mark.parametrize("dispatches", [True, False])
def test_runs_of_unknown_length_are_resumed_exactly(
    make_loader: Callable[[], Loader], dispatches: bool
) -> None:
    """In the first epoch Ignite refuses its own state, so the handler alone is loaded."""
    options = {"dispatch_batches": dispatches}
    script = Script(make_loader, {"max_epochs": 3}, options, has_trainer=False)
    whole = script.train(2)
    assert whole[0].ended == (3, 9, 3)
    for stop in range(1, 10):
        ranks = resumed(script, nth(Events.ITERATION_COMPLETED, stop), 2, 2)
        assert [rank.steps for rank in ranks] == [rank.steps for rank in whole], stop
        assert [rank.ended for rank in ranks] == [rank.ended for rank in whole], stop


def test_lists_of_ready_batches_are_resumed_exactly() -> None:
    script = Script(lambda: list(torch.arange(22).split(2)), {"max_epochs": 2})
    whole = script.train(2)
    for stop in range(1, 11):
        ranks = resumed(script, nth(Events.ITERATION_STARTED, stop), 2, 2)
        assert [rank.steps for rank in ranks] == [rank.steps for rank in whole], stop


def test_a_run_that_has_ended_is_not_begun_again() -> None:
    """Ignite would train a finished checkpoint from scratch for an epoch."""
    script = Script(shuffled(11), {"max_epochs": 2})
    (first,) = script.train(1, save_at=nth(Events.COMPLETED, 1))
    (second,) = Script(shuffled(11), {}).train(1, saved=first.saved)
    assert second.steps == []
    assert second.ended == (2, 12, 6)
    (longer,) = Script(shuffled(11), {"max_epochs": 3}).train(1, saved=first.saved)
    (whole,) = Script(shuffled(11), {"max_epochs": 3}).train(1)
    assert longer.steps == whole.steps[12:]


def test_a_run_of_iterations_that_has_ended_is_not_begun_again() -> None:
    script = Script(shuffled(11), {"max_iters": 8})
    (first,) = script.train(1, save_at=nth(Events.COMPLETED, 1))
    (second,) = Script(shuffled(11), {}).train(1, saved=first.saved)
    assert second.steps == []


@pytest.mark.parametrize("stop", range(1, 12))
def test_the_state_of_the_engine_alone_is_enough_to_find_the_place(stop: int) -> None:
    """Checkpoints from before there was a handler; stock Ignite starts at the first batch."""
    script = Script(shuffled(8), {"max_epochs": 3})
    (whole,) = script.train(1)
    (first,) = script.train(1, save_at=nth(Events.ITERATION_COMPLETED, stop))
    assert first.saved is not None
    seen: list[list[int]] = []
    engine = Engine(lambda _, batch: seen.append(list(ids_of(batch))))
    ShardHandler(data_seed=5, comm=SoloComm()).attach(engine)
    engine.load_state_dict(first.saved["trainer"])
    engine.run(shuffled(8)(), max_epochs=3)
    assert seen == [list(rows) for _, rows in whole.steps[stop:]]


# On another number of ranks.


@given(
    num_samples=st.integers(6, 40),
    batch_size=st.integers(1, 3),
    ranks=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stop=st.floats(0, 1),
    event=st.sampled_from([Events.ITERATION_COMPLETED, Events.GET_BATCH_COMPLETED]),
    has_trainer=st.booleans(),
)
@example(24, 2, (1, 2), 0.4, Events.ITERATION_COMPLETED, True)
@example(24, 2, (2, 1), 1.0, Events.ITERATION_COMPLETED, True)
@example(6, 1, (2, 1), 0.0, Events.GET_BATCH_COMPLETED, True)  # nothing done: a length is loaded
@example(22, 2, (3, 2), 1.0, Events.GET_BATCH_COMPLETED, False)
def test_on_other_ranks_nothing_is_lost_and_nothing_comes_twice(
    num_samples: int,
    batch_size: int,
    ranks: tuple[int, int],
    stop: float,
    event: Any,
    has_trainer: bool,
) -> None:
    before, after = ranks
    script = Script(shuffled(num_samples, batch_size), {"max_epochs": 3}, has_trainer=has_trainer)
    num_steps = -(-num_samples // (batch_size * before))
    at = max(1, round(stop * 3 * num_steps))
    trained = resumed(script, nth(event, at), before, after)
    assert rows_by_epoch(trained) == {epoch: list(range(num_samples)) for epoch in range(3)}
    length = -(-num_samples // (batch_size * after))
    assert trained[-1].ended == (3, 3 * length, length)


OF_UNKNOWN_LENGTH: dict[str, Callable[[], Loader]] = {
    "stream": lambda: DataLoader(Stream(15), batch_size=2),
    "sampler": lambda: DataLoader(Ids(15), batch_size=2, sampler=Unsized(15)),
}
WORLDS = [(1, 2), (2, 1), (2, 3), (3, 2), (1, 3)]


@pytest.mark.parametrize("kind", OF_UNKNOWN_LENGTH)
@pytest.mark.parametrize(("before", "after"), WORLDS)
@pytest.mark.parametrize("event", [Events.ITERATION_COMPLETED, Events.GET_BATCH_STARTED])
def test_data_of_unknown_length_goes_on_on_other_ranks(
    kind: str, before: int, after: int, event: Any
) -> None:
    """The rest of an epoch is not taken for the length of all, nor the count for one of its own."""
    script = Script(OF_UNKNOWN_LENGTH[kind], {"max_epochs": 3}, has_trainer=False)
    steps = -(-15 // (2 * before))
    for stop in range(1, 3 * steps + 1):
        trained = resumed(script, nth(event, stop), before, after)
        assert rows_by_epoch(trained) == {epoch: list(range(15)) for epoch in range(3)}, stop
        assert trained[-1].ended[0] == 3
        length = -(-15 // (2 * after))
        if trained[-1].steps[-length:-1]:  # an epoch of its own was seen to its end
            assert trained[-1].ended[2] in (length, None)


@pytest.mark.parametrize(("before", "after"), WORLDS)
@pytest.mark.parametrize("has_trainer", [True, False])
@pytest.mark.parametrize("dispatches", [True, False])
def test_batches_of_the_users_own_go_on_on_other_ranks(
    before: int, after: int, has_trainer: bool, dispatches: bool
) -> None:
    """A pass has a length, but what is left of one may have none that is known."""
    batches = [[0, 1, 2], [3, 4], [5], [6, 7, 8, 9], [10], [11, 12]]
    script = Script(
        lambda: DataLoader(Ids(13), batch_sampler=batches),
        {"max_epochs": 3},
        {"dispatch_batches": dispatches},
        has_trainer=has_trainer,
    )
    for stop in range(1, 3 * (6 // before) + 1):
        trained = resumed(script, nth(Events.ITERATION_COMPLETED, stop), before, after)
        assert rows_by_epoch(trained) == {epoch: list(range(13)) for epoch in range(3)}, stop
        assert trained[-1].ended == (3, 3 * (6 // after), 6 // after), stop


@pytest.mark.parametrize(("before", "after"), WORLDS)
def test_iterations_of_data_of_unknown_length_are_counted_on_other_ranks(
    before: int, after: int
) -> None:
    script = Script(OF_UNKNOWN_LENGTH["stream"], {"max_iters": 20}, has_trainer=False)
    for stop in range(1, 20):
        trained = resumed(script, nth(Events.ITERATION_COMPLETED, stop), before, after)
        assert trained[-1].ended[1] == 20, stop
        assert len(trained[-1].steps) == 20 - stop


def test_a_given_epoch_length_is_kept_on_other_ranks() -> None:
    script = Script(shuffled(24), {"max_epochs": 4, "epoch_length": 5})
    trained = resumed(script, nth(Events.ITERATION_COMPLETED, 7), 2, 1)
    assert trained[-1].ended == (4, 20, 5)
    assert len(trained[-1].steps) == 13
    # 28 rows of 2 ranks are an epoch and 4; 26 of one follow.
    assert [len(rows) for rows in rows_by_epoch(trained).values()] == [24, 24, 6]
    assert rows_by_epoch(trained)[1] == list(range(24))


def test_a_run_of_so_many_iterations_goes_on_on_other_ranks() -> None:
    script = Script(shuffled(24), {"max_iters": 10})
    trained = resumed(script, nth(Events.ITERATION_COMPLETED, 4), 2, 1)
    assert trained[-1].ended[1:] == (10, 12)
    # 4 steps of two ranks, 16 rows; 6 of one, 12 rows.
    assert rows_by_epoch(trained)[0] == list(range(24))
    assert len(rows_by_epoch(trained)[1]) == 4


# What is said of a run.


def test_what_the_state_says_of_the_shard() -> None:
    engine = Engine(lambda _, __: None)
    handler = ShardHandler(comm=SoloComm())
    handler.attach(engine)
    shard = shard_of(engine)
    said: list[tuple[int, ...]] = []

    def look() -> None:
        said.append((shard.epoch, shard.consumed, shard.valid_rows, shard.global_step))
        assert shard.is_last_batch is (engine.state.iteration % 2 == 0)

    assert (shard.epoch, shard.consumed, shard.valid_rows, shard.global_step) == (0, 0, 0, 0)
    engine.add_event_handler(Events.ITERATION_COMPLETED, look)
    engine.run(DataLoader(Ids(3), batch_size=2), max_epochs=2)
    assert said == [(0, 2, 2, 1), (0, 3, 1, 2), (1, 2, 2, 3), (1, 3, 1, 4)]
    assert shard.optimizer_steps is None
    handler.detach(engine)
    assert not hasattr(engine.state, "shard")


def test_an_evaluation_is_not_resumed() -> None:
    engine = Engine(lambda _, __: None)
    handler = ShardHandler(comm=SoloComm(), mode="eval")
    handler.attach(engine)
    engine.run(DataLoader(Ids(4), batch_size=2))
    assert shard_of(engine).consumed == 4
    state = handler.state_dict()
    assert state["loader"] is None
    handler.load_state_dict(state)
    engine.run(DataLoader(Ids(4), batch_size=2))
    assert engine.state.iteration == 2


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 2)])
def test_the_global_step_never_goes_back(before: int, after: int) -> None:
    numbers: list[int] = []

    def rank(comm: Comm, saved: State | None) -> dict[str, Any]:
        engine = Engine(lambda _, __: None)
        handler = ShardHandler(comm=comm)
        handler.attach(engine)
        if saved is not None:
            handler.load_state_dict(saved)
        states = []

        def note() -> None:
            if comm.rank == 0:
                numbers.append(shard_of(engine).global_step)
            states.append(handler.state_dict())

        engine.add_event_handler(Events.ITERATION_COMPLETED, note)
        engine.run(DataLoader(Ids(24), batch_size=2), max_epochs=2)
        return states[-3 if saved is None else -1]

    saved = run_ranks(before, partial(rank, saved=None))[0]
    del numbers[-2:]
    run_ranks(after, partial(rank, saved=saved))
    assert numbers == list(range(1, len(numbers) + 1))


# What is refused.


def trained_state(num_samples: int = 8) -> dict[str, Any]:
    script = Script(shuffled(num_samples), {"max_epochs": 2})
    saved = script.train(1, save_at=nth(Events.ITERATION_COMPLETED, 3))[0].saved
    assert saved is not None
    return dict(saved["shard"])


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"version": 7}, "`version` of the state must be 1, got 7"),
        ({"iteration": -1}, "`iteration` of the state must be an integer of at least 0, got -1"),
        ({"epochs": None}, "`epochs` of the state must be an integer of at least 0, got None"),
        ({"epoch_length": 2.5}, "`epoch_length` of the state must be an integer"),
        ({"max_epochs": True}, "`max_epochs` of the state must be an integer"),
        ({"num_shards": 0}, "`num_shards` of the state must be an integer of at least 1, got 0"),
        ({"is_tick_due": 1}, "`is_tick_due` of the state must be true or false, got 1"),
        ({"loader": [1]}, r"`loader` of the state must be a dictionary or None, got \[1\]"),
        ({"rank_states": 3}, "`rank_states` of the state must be a dictionary or None, got 3"),
    ],
)
def test_a_damaged_state_is_refused(change: dict[str, Any], rule: str) -> None:
    handler = ShardHandler(comm=SoloComm())
    before = handler.state_dict()
    with pytest.raises(StateError, match=rule):
        handler.load_state_dict({**trained_state(), **change})
    assert handler.state_dict() == before


def test_something_else_than_a_state_is_refused() -> None:
    with pytest.raises(StateError, match=r"`state` must be what state_dict\(\) of the handler ret"):
        ShardHandler(comm=SoloComm()).load_state_dict([])  # type: ignore[arg-type]


def test_a_state_of_other_data_is_refused_before_anything_is_done() -> None:
    seen: list[object] = []
    engine = Engine(lambda _, batch: seen.append(batch))
    handler = ShardHandler(comm=SoloComm(), data_seed=5)
    handler.attach(engine)
    handler.load_state_dict(trained_state())
    with pytest.raises(StateError, match="`num_samples` of the state must be that of the loader"):
        engine.run(shuffled(9)(), max_epochs=2)
    assert seen == []
    assert handler.state_dict() == trained_state()  # still to be gone on from


def test_a_handler_of_two_trainers_has_no_state() -> None:
    handler = ShardHandler(comm=SoloComm())
    engines = [Engine(lambda _, __: None) for _ in range(2)]
    for engine in engines:
        handler.attach(engine)
    for act in (handler.state_dict, lambda: handler.load_state_dict(trained_state())):
        with pytest.raises(StateError, match=r"one trainer, got a handler attached to 2\. Give"):
            act()


def test_a_state_is_not_loaded_into_an_interrupted_run() -> None:
    engine = Engine(lambda _, __: None)
    handler = ShardHandler(comm=SoloComm())
    handler.attach(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), engine.interrupt)
    loader = shuffled(8)()
    engine.run(loader, max_epochs=2)
    with pytest.raises(StateError, match="got an engine that is interrupted"):
        handler.load_state_dict(trained_state())
    engine.run(loader)
    assert engine.state.iteration == 8


def test_snapshots_are_of_trainers() -> None:
    with pytest.raises(PlanError, match="`snapshot` must be left out with mode='eval'"):
        ShardHandler(comm=SoloComm(), mode="eval").attach(
            Engine(lambda _, __: None), Events.EPOCH_COMPLETED
        )
