"""What one rank asks of its engine, all ranks do, and none waits for another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ignite.engine import Engine, Events
from torch.utils.data import DataLoader

from shardplug import Comm
from shardplug.testing import run_ranks
from shardplug_ignite import ShardHandler
from tests.integrations.ignite.data import Ids

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


@pytest.mark.parametrize("ranks", [(LAST,), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize(
    ("event", "log"),
    [
        (Events.STARTED, ""),
        (Events.EPOCH_STARTED(once=2), "1 2 3 4 |"),
        (at_iteration(Events.GET_BATCH_STARTED, 1), "1 2"),
        (at_iteration(Events.GET_BATCH_COMPLETED, 1), "1 2"),
        (at_iteration(Events.ITERATION_STARTED, 2), "1 2"),
        (at_iteration(Events.ITERATION_COMPLETED, 2), "1 2"),
        (Events.EPOCH_COMPLETED(once=1), "1 2 3 4 |"),
        (Events.DATALOADER_STOP_ITERATION, "1 2 3 4 | 5"),
    ],
)
def test_all_ranks_end_where_one_wants_to(event: Any, log: str, ranks: tuple[int, ...]) -> None:
    found = ask(event, lambda engine: engine.terminate(), ranks=ranks)
    assert found == told(log, "terminate completed")


def test_a_step_may_ask_too() -> None:
    def rank(comm: Comm) -> int:
        def step(engine: Engine, _: object) -> None:
            if comm.rank == engine.state.iteration == 1:
                engine.terminate()

        engine = Engine(step)
        ShardHandler(comm=comm).attach(engine)
        return engine.run(loader(), max_epochs=2).iteration

    assert run_ranks(WORLD_SIZE, rank) == [1] * WORLD_SIZE


@pytest.mark.parametrize("event", [Events.ITERATION_STARTED, Events.ITERATION_COMPLETED])
def test_flags_are_those_of_the_rank_that_asks(event: Any) -> None:
    at_two = at_iteration(event, 2)
    assert ask(at_two, lambda engine: engine.terminate(skip_completed=True)) == told(
        "1 2 terminate"
    )
    assert ask(at_two, lambda engine: engine.terminate_epoch()) == told(
        "1 2 terminate_single_epoch | 3 4 5 6 | completed"
    )
    assert ask(at_two, lambda engine: engine.terminate_epoch(skip_epoch_completed=True)) == told(
        "1 2 terminate_single_epoch 3 4 5 6 | completed"
    )


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
    found = ask(at_iteration(event, 3), lambda engine: engine.interrupt(), runs=2)
    assert found == told("1 2 3 interrupt 4 | 5 6 7 8 | completed")


def test_handlers_that_come_later_are_heard() -> None:
    """Ours are last even if others were attached after them."""

    def rank(comm: Comm) -> int:
        engine = Engine(lambda _, __: None)
        ShardHandler(comm=comm).attach(engine)
        if comm.rank == 0:
            engine.add_event_handler(at_iteration(Events.ITERATION_COMPLETED, 3), engine.terminate)
        return engine.run(loader(), max_epochs=2).iteration

    assert run_ranks(WORLD_SIZE, rank) == [3] * WORLD_SIZE


def test_ranks_that_stop_together_need_not_ask() -> None:
    everyone = tuple(range(WORLD_SIZE))
    found = ask(
        at_iteration(Events.ITERATION_STARTED, 2),
        lambda engine: engine.terminate(),
        ranks=everyone,
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
        engine = Engine(lambda _, __: None)
        ShardHandler(comm=comm).attach(engine)
        if comm.rank == 0:
            engine.add_event_handler(at_iteration(Events.ITERATION_STARTED, 3), engine.terminate)
        return engine.run(max_epochs=2, epoch_length=4).iteration

    assert run_ranks(WORLD_SIZE, rank) == [3] * WORLD_SIZE
