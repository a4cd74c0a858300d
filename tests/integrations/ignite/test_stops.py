"""What one rank asks of its engine, all ranks do, without a message until one does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from threading import Event
from typing import Any

import pytest
from ignite.engine import Engine, Events
from torch.utils.data import DataLoader

from shardplug import Comm
from shardplug.testing import run_ranks
from shardplug_ignite import ShardHandler
from tests.integrations.ignite.data import Ids, Stream

WORLD_SIZE = 3
LAST = WORLD_SIZE - 1


def loader() -> DataLoader[Any]:
    """Four steps on each of the ranks."""
    return DataLoader(Ids(4 * 2 * WORLD_SIZE), batch_size=2)


def ask(
    event: Any,
    what: Callable[[Engine], object],
    *,
    ranks: tuple[int, ...] = (LAST,),
    runs: int = 1,
    **options: Any,
) -> list[list[str]]:
    """What happens on each rank where some ask something of their engines at an event."""

    def rank(comm: Comm) -> list[str]:
        log: list[str] = []

        def step(engine: Engine, _: object) -> None:
            # As DDP would: ranks that do not all come here fail.
            comm.all_gather_ints([engine.state.iteration])
            log.append(str(engine.state.iteration))

        engine = Engine(step)
        if comm.rank in ranks:
            engine.add_event_handler(event, what)
        ShardHandler(comm=comm, **options).attach(engine)

        def note(*_: object, word: str, **__: object) -> None:
            log.append(word)

        for name in ("TERMINATE", "TERMINATE_SINGLE_EPOCH", "INTERRUPT", "COMPLETED"):
            engine.add_event_handler(Events[name], note, word=name.lower())
        engine.add_event_handler(Events.EPOCH_COMPLETED, note, word="|")
        for _ in range(runs):
            engine.run(loader(), max_epochs=2)
        return log

    return run_ranks(WORLD_SIZE, rank)


def told(*words: str) -> list[list[str]]:
    return [" ".join(words).split()] * WORLD_SIZE


def at_iteration(event: Any, number: int) -> Any:
    return event(event_filter=lambda engine, _: engine.state.iteration == number)


EVERYONE = tuple(range(WORLD_SIZE))


@pytest.mark.parametrize("ranks", [(LAST,), (0, 1), EVERYONE])
@pytest.mark.parametrize(
    ("event", "together", "following"),
    [
        (Events.STARTED, "", ""),
        (Events.EPOCH_STARTED(once=2), "1 2 3 4 |", ""),
        (at_iteration(Events.GET_BATCH_STARTED, 1), "1 2", "3"),
        (at_iteration(Events.GET_BATCH_COMPLETED, 1), "1 2", "3"),
        (at_iteration(Events.ITERATION_STARTED, 2), "1 2", "3"),
        (at_iteration(Events.ITERATION_COMPLETED, 2), "1 2", "3"),
        (at_iteration(Events.ITERATION_COMPLETED, 3), "1 2 3", "4"),
        (at_iteration(Events.ITERATION_COMPLETED, 4), "1 2 3 4", ""),
        (Events.EPOCH_COMPLETED(once=1), "1 2 3 4 |", ""),
        (Events.DATALOADER_STOP_ITERATION, "1 2 3 4 | 5", "6"),
    ],
)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_all_ranks_end_where_one_wants_to(
    event: Any, together: str, following: str, ranks: tuple[int, ...], mode: str
) -> None:
    """At once if all want to; where only some do, the others know after one iteration more."""
    found = ask(event, lambda engine: engine.terminate(), ranks=ranks, mode=mode)
    more = "" if ranks == EVERYONE else following
    assert found == told(together, more, "terminate completed")


def test_a_step_may_ask_too() -> None:
    def rank(comm: Comm) -> int:
        def step(engine: Engine, _: object) -> None:
            if comm.rank == engine.state.iteration == 1:
                engine.terminate()
            comm.barrier()

        engine = Engine(step)
        ShardHandler(comm=comm).attach(engine)
        return engine.run(loader(), max_epochs=2).iteration

    assert run_ranks(WORLD_SIZE, rank) == [2] * WORLD_SIZE


@pytest.mark.parametrize("asks", range(WORLD_SIZE))
def test_ranks_that_do_not_wait_for_each_other_stop_where_the_first_of_them_can(asks: int) -> None:
    """The one that asks is behind the others, and goes on until it is where they are."""
    first = (asks + 1) % WORLD_SIZE
    has_come, has_asked = Event(), Event()

    def rank(comm: Comm) -> int:
        def step(engine: Engine, _: object) -> None:
            at = engine.state.iteration
            if comm.rank == first and at == 3:
                has_come.set()
                has_asked.wait()
            elif comm.rank == asks and at == 1:
                has_come.wait()
                engine.terminate()
                has_asked.set()

        engine = Engine(step)
        ShardHandler(comm=comm).attach(engine)
        return engine.run(DataLoader(Ids(20 * WORLD_SIZE)), max_epochs=2).iteration

    found = run_ranks(WORLD_SIZE, rank)
    assert found == found[:1] * WORLD_SIZE
    assert 3 <= found[0] <= 20


@pytest.mark.parametrize("event", [Events.ITERATION_STARTED, Events.ITERATION_COMPLETED])
def test_flags_are_those_of_the_rank_that_asks(event: Any) -> None:
    at_two = at_iteration(event, 2)
    assert ask(at_two, lambda engine: engine.terminate(skip_completed=True)) == told(
        "1 2 3 terminate"
    )
    assert ask(at_two, lambda engine: engine.terminate_epoch()) == told(
        "1 2 3 terminate_single_epoch | 4 5 6 7 | completed"
    )
    assert ask(at_two, lambda engine: engine.terminate_epoch(skip_epoch_completed=True)) == told(
        "1 2 3 terminate_single_epoch 4 5 6 7 | completed"
    )


def test_ranks_may_ask_for_different_things_one_after_the_other() -> None:
    """Rank 1 asks for more while what rank 0 asked for is on its way."""

    def rank(comm: Comm) -> list[str]:
        engine, log = Engine(lambda *_: comm.barrier()), []
        handler = ShardHandler(comm=comm)
        handler.attach(engine)

        @engine.on(Events.ITERATION_COMPLETED)
        def want(engine: Engine) -> None:
            log.append(str(engine.state.iteration))
            if (comm.rank, engine.state.iteration) == (0, 1):
                engine.interrupt()
            elif (comm.rank, engine.state.iteration) == (1, 2):
                engine.terminate()

        engine.add_event_handler(Events.INTERRUPT, lambda: log.append("interrupt"))
        for _ in range(2):
            engine.run(loader(), max_epochs=2)
        return log

    # 1 is told of at 2, where all are interrupted; what was asked at 2, at 3, and done at 4.
    assert run_ranks(WORLD_SIZE, rank) == told("1 2 interrupt 3 4")


def test_what_a_run_left_undone_is_not_done_by_the_next() -> None:
    def rank(comm: Comm) -> list[int]:
        engine = Engine(lambda *_: comm.barrier())
        ShardHandler(comm=comm).attach(engine)
        if comm.rank == 0:
            for number in (1, 2):  # the second time, all stop for the first
                event = Events.ITERATION_COMPLETED(once=number)
                engine.add_event_handler(event, engine.terminate)
        data = loader()
        return [engine.run(data, max_epochs=1).iteration, engine.run(data, max_epochs=3).iteration]

    assert run_ranks(WORLD_SIZE, rank) == [[2, 10]] * WORLD_SIZE


def test_a_run_that_failed_on_all_ranks_leaves_nothing_on_its_way() -> None:
    def rank(comm: Comm) -> int:
        fails = True

        def step(engine: Engine, _: object) -> None:
            if fails and engine.state.iteration == 3:
                raise ZeroDivisionError

        engine = Engine(step)
        handler = ShardHandler(comm=comm)
        handler.attach(engine)
        engine.add_event_handler(
            at_iteration(Events.ITERATION_COMPLETED, 2),
            lambda: engine.terminate() if fails and comm.rank == 0 else None,
        )
        with pytest.raises(ZeroDivisionError):
            engine.run(loader(), max_epochs=2)
        fails = False
        handler.load_state_dict(handler.state_dict())
        return engine.run(loader(), max_epochs=2).iteration

    assert run_ranks(WORLD_SIZE, rank) == [8] * WORLD_SIZE


@pytest.mark.parametrize(
    ("ranks", "log"), [((LAST,), "1 2 3 4 |"), ((0, 1), "1 2 3 4 |"), (EVERYONE, "1 2 3 4")]
)
def test_the_end_of_an_epoch_that_nobody_foresaw_is_soon_enough(
    ranks: tuple[int, ...], log: str
) -> None:
    """What was told in the last iteration is heard before the next epoch begins."""

    def rank(comm: Comm) -> list[str]:
        found: list[str] = []
        engine = Engine(lambda engine, _: found.append(str(engine.state.iteration)))
        ShardHandler(comm=comm).attach(engine)
        if comm.rank in ranks:
            event = at_iteration(Events.ITERATION_COMPLETED, 4)
            engine.add_event_handler(event, engine.terminate)
        engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: found.append("|"))
        engine.run(DataLoader(Stream(4 * 2 * WORLD_SIZE), batch_size=2), max_epochs=2)
        return found

    assert run_ranks(WORLD_SIZE, rank) == told(log)


def test_nothing_is_told_until_a_rank_asks() -> None:
    def rank(comm: Comm) -> list[int]:
        calls: list[int] = []
        engine = Engine(lambda *_: calls.append(len(comm.calls)))  # type: ignore[attr-defined]
        ShardHandler(comm=comm).attach(engine)
        engine.run(loader(), max_epochs=1)
        return calls

    for calls in run_ranks(WORLD_SIZE, rank):
        assert calls == calls[:1] * 4


@pytest.mark.parametrize("asks", [0, 1])
def test_a_count_that_goes_back_is_of_no_consequence(asks: int) -> None:
    """The engine's own is not what ranks count by."""

    def rank(comm: Comm) -> list[int]:
        found: list[int] = []

        def step(engine: Engine, _: object) -> None:
            comm.barrier()
            found.append(engine.state.iteration)
            if len(found) == 3:
                engine.state.iteration = 1
            if len(found) == 5 and comm.rank == asks:
                engine.terminate()

        engine = Engine(step)
        ShardHandler(comm=comm).attach(engine)
        engine.run(DataLoader(Ids(40)), max_epochs=1)
        return found

    assert run_ranks(2, rank) == [[1, 2, 3, 2, 3, 4]] * 2


def test_an_evaluator_that_is_gone_keeps_no_connection() -> None:
    def rank(comm: Comm) -> list[bool]:
        evaluator = Engine(lambda *_: None)
        handler = ShardHandler(mode="eval", comm=comm)
        handler.attach(evaluator)
        evaluator.run(loader())
        known = weakref.ref(handler._attachments[evaluator])
        del evaluator, handler
        return [known() is None]

    gc.disable()
    try:
        assert run_ranks(WORLD_SIZE, rank) == [[True]] * WORLD_SIZE
    finally:
        gc.enable()


# Evaluations in which ranks take different numbers of steps: 3, 3 and 2, of one row each.


def evaluate(
    event: Any, what: Callable[[Engine], object], *, rank_that_asks: int, runs: int = 1
) -> list[str]:
    """What happens on each rank; an epoch's end is where all ranks meet."""

    def rank(comm: Comm) -> str:
        log: list[str] = []
        engine = Engine(lambda engine, _: log.append(str(engine.state.iteration)))
        ShardHandler(mode="eval", comm=comm).attach(engine)
        if comm.rank == rank_that_asks:
            engine.add_event_handler(event, what)

        @engine.on(Events.EPOCH_COMPLETED)
        def meet() -> None:
            comm.barrier()
            log.append("|")

        engine.add_event_handler(Events.INTERRUPT, lambda: log.append("interrupt"))
        engine.add_event_handler(Events.COMPLETED, lambda: log.append("."))
        for _ in range(runs):
            engine.run(DataLoader(Ids(8), batch_size=1), max_epochs=2)
        return " ".join(log)

    return run_ranks(WORLD_SIZE, rank)


@pytest.mark.parametrize("asks", range(WORLD_SIZE))
def test_an_uneven_evaluation_ends_on_all_ranks(asks: int) -> None:
    def terminate(number: int) -> list[str]:
        return evaluate(
            at_iteration(Events.ITERATION_COMPLETED, number),
            lambda engine: engine.terminate(),
            rank_that_asks=asks,
        )

    # The second is the last that all have: there they ask each other at once.
    assert terminate(1) == terminate(2) == ["1 2 ."] * WORLD_SIZE
    # The third is not of all: what is asked for in it is done at the end of the epoch.
    third = ["1 2 3 | .", "1 2 3 | .", "1 2 | ."]
    if asks < LAST:
        assert terminate(3) == third


@pytest.mark.parametrize("asks", range(WORLD_SIZE))
def test_an_epoch_of_an_uneven_evaluation_is_left_by_all_ranks(asks: int) -> None:
    found = evaluate(
        at_iteration(Events.ITERATION_STARTED, 1),
        lambda engine: engine.terminate_epoch(),
        rank_that_asks=asks,
    )
    assert found == ["1 2 | 3 4 5 | .", "1 2 | 3 4 5 | .", "1 2 | 3 4 | ."]


@pytest.mark.parametrize("asks", range(WORLD_SIZE))
def test_an_uneven_evaluation_is_interrupted_and_goes_on(asks: int) -> None:
    found = evaluate(
        Events.ITERATION_COMPLETED(once=2),
        lambda engine: engine.interrupt(),
        rank_that_asks=asks,
        runs=2,
    )
    first = "1 2 interrupt 3 | 4 5 6 | ."
    assert found == [first, first, "1 2 interrupt | 3 4 | ."]


def test_an_evaluation_without_a_batch_on_some_rank_ends_with_its_epoch() -> None:
    def rank(comm: Comm) -> tuple[int, int]:
        engine = Engine(lambda *_: None)
        ShardHandler(mode="eval", comm=comm).attach(engine)
        if comm.rank == 0:
            engine.add_event_handler(Events.ITERATION_COMPLETED, engine.terminate)
        state = engine.run(DataLoader(Ids(2), batch_size=1), max_epochs=3)
        return state.epoch, state.iteration

    assert run_ranks(WORLD_SIZE, rank) == [(1, 1), (1, 1), (1, 0)]


def test_an_evaluation_of_unknown_uneven_length_ends_with_its_epoch() -> None:
    def rank(comm: Comm) -> tuple[int, int]:
        engine = Engine(lambda *_: None)
        ShardHandler(mode="eval", dispatch_batches=False, comm=comm).attach(engine)
        if comm.rank == LAST:
            engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), engine.terminate)
        state = engine.run(DataLoader(Stream(8), batch_size=1), max_epochs=3)
        return state.epoch, state.iteration

    assert run_ranks(WORLD_SIZE, rank) == [(1, 3), (1, 3), (1, 2)]


def test_all_ranks_end_where_one_wants_to_after_an_epoch_was_left() -> None:
    def rank(comm: Comm) -> int:
        engine = Engine(lambda _, __: None)
        ShardHandler(comm=comm).attach(engine)
        engine.add_event_handler(
            Events.ITERATION_COMPLETED(once=2),
            lambda: engine.terminate_epoch(skip_epoch_completed=True),
        )
        if comm.rank == LAST:
            engine.add_event_handler(
                Events.TERMINATE_SINGLE_EPOCH, lambda *_, **__: engine.terminate()
            )
        return engine.run(loader(), max_epochs=2).iteration

    assert run_ranks(WORLD_SIZE, rank) == [2] * WORLD_SIZE


@pytest.mark.parametrize("event", [Events.ITERATION_STARTED, Events.ITERATION_COMPLETED])
def test_all_ranks_are_interrupted_and_go_on(event: Any) -> None:
    found = ask(at_iteration(event, 2), lambda engine: engine.interrupt(), runs=2)
    assert found == told("1 2 3 interrupt 4 | 5 6 7 8 | completed")


def test_handlers_that_come_later_are_heard() -> None:
    """Ours are last even if others were attached after them."""

    def rank(comm: Comm) -> int:
        engine = Engine(lambda _, __: comm.barrier())
        ShardHandler(comm=comm).attach(engine)
        if comm.rank == 0:
            engine.add_event_handler(at_iteration(Events.ITERATION_COMPLETED, 2), engine.terminate)
        return engine.run(loader(), max_epochs=2).iteration

    assert run_ranks(WORLD_SIZE, rank) == [3] * WORLD_SIZE


def test_ranks_that_stop_together_need_not_ask() -> None:
    found = ask(
        at_iteration(Events.ITERATION_STARTED, 2),
        lambda engine: engine.terminate(),
        ranks=EVERYONE,
        agree_stop=False,
    )
    assert found == told("1 terminate completed")  # at once, as in Ignite
    with pytest.raises(Exception, match="Every rank must be in the same collective"):
        ask(Events.ITERATION_COMPLETED(once=2), lambda engine: engine.terminate(), agree_stop=False)


def test_a_rank_alone_stops_at_once() -> None:
    engine = Engine(lambda _, __: None)
    ShardHandler().attach(engine)
    engine.add_event_handler(at_iteration(Events.GET_BATCH_STARTED, 1), engine.terminate)
    assert engine.run(loader(), max_epochs=2).iteration == 1


def test_runs_without_data_stop_together_too() -> None:
    def rank(comm: Comm) -> int:
        engine = Engine(lambda _, __: comm.barrier())
        ShardHandler(comm=comm).attach(engine)
        if comm.rank == 0:
            engine.add_event_handler(at_iteration(Events.ITERATION_STARTED, 2), engine.terminate)
        return engine.run(max_epochs=2, epoch_length=4).iteration

    assert run_ranks(WORLD_SIZE, rank) == [3] * WORLD_SIZE


@pytest.mark.parametrize("after", [WORLD_SIZE, 1, 2])
@pytest.mark.parametrize("event", [Events.ITERATION_STARTED, Events.ITERATION_COMPLETED])
def test_a_run_that_one_rank_ended_is_resumed_exactly(event: Any, after: int) -> None:
    def train(
        comm: Comm, ask_at: int | None, saved: dict[str, Any] | None
    ) -> tuple[list[tuple[int, list[int]]], dict[str, Any]]:
        seen: list[tuple[int, list[int]]] = []

        def step(_: Engine, batch: Any) -> None:
            comm.barrier()
            rows = batch.tolist()[: handler.loader.valid_rows]
            seen.append((handler.loader.epoch, rows))

        engine = Engine(step)
        handler = ShardHandler(comm=comm, data_seed=2)
        handler.attach(engine)
        if comm.rank == LAST and ask_at is not None:
            engine.add_event_handler(at_iteration(event, ask_at), engine.terminate)
        if saved is not None:
            handler.load_state_dict(saved)
        engine.run(DataLoader(Ids(23), batch_size=2, shuffle=True), max_epochs=2)
        return seen, handler.state_dict()

    whole = run_ranks(WORLD_SIZE, train, None, None)
    for ask_at in range(1, 8):
        first = run_ranks(WORLD_SIZE, train, ask_at, None)
        states = [state for _, state in first]
        assert states == [states[0]] * WORLD_SIZE
        rest = run_ranks(after, train, None, states[0])
        if after == WORLD_SIZE:
            both = [one + more for (one, _), (more, _) in zip(first, rest, strict=True)]
            assert both == [seen for seen, _ in whole]
        found = sorted(
            (epoch, row) for seen, _ in first + rest for epoch, rows in seen for row in rows
        )
        assert found == [(epoch, row) for epoch in range(2) for row in range(23)]
