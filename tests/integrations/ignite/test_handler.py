"""What an engine with a `ShardHandler` sees: many ranks in one process, or one rank alone."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from ignite.engine import DeterministicEngine, Engine, Events
from torch.utils.data import DataLoader, Sampler

from shardplug import Comm, CommError, PlanError, ShardEngine, SoloComm, prepare_data_loader
from shardplug.plan.split import Tail
from shardplug.testing import run_ranks
from shardplug_ignite import ShardHandler
from tests import laws
from tests.integrations.ignite.data import Disagreeing, Ids, Stream, Unsized
from tests.laws import Case, RankRun, Run, Step, ids_of
from tests.strategies import cases

Loader = DataLoader[Any]
Batches = list[list[int]]
"""The ids of samples in each batch that an engine got."""


def loader_of(num_samples: int, batch_size: int = 2, **options: Any) -> Loader:
    """A loader over ids; each sample is its own index."""
    return DataLoader(Ids(num_samples), batch_size=batch_size, **options)


def recorder(**options: Any) -> tuple[Engine, Batches, ShardHandler]:
    """An engine with a handler, and the list in which it keeps the batches that it gets."""
    seen: Batches = []
    engine = Engine(lambda _, batch: seen.append(batch.tolist()))
    handler = ShardHandler(**options)
    handler.attach(engine)
    return engine, seen, handler


def by_rank(world_size: int, run: Callable[[Engine], object], **options: Any) -> list[Batches]:
    """Let each rank's engine do something and tell which batches it got."""

    def rank(comm: Comm) -> Batches:
        engine, seen, _ = recorder(comm=comm, **options)
        run(engine)
        return seen

    return run_ranks(world_size, rank)


def together(ranks: list[Batches]) -> list[int]:
    """All ids that the ranks got, in no particular order."""
    return sorted(chain.from_iterable(chain.from_iterable(ranks)))


def runs(case: Case, *, max_epochs: int, shuffle: bool = False, **options: Any) -> list[Run]:
    """Run an engine on each rank of a case; what the ranks got, epoch by epoch."""

    def rank(comm: Comm) -> list[RankRun]:
        epochs: list[list[Step]] = [[] for _ in range(max_epochs)]
        handler = ShardHandler(
            comm=comm,
            split_batches=case.split_batches,
            data_seed=3,
            tail=case.tail.value,
            **options,
        )

        def step(engine: Engine, batch: torch.Tensor) -> None:
            epochs[engine.state.epoch - 1].append(Step(ids_of(batch), handler.loader.valid_rows))

        engine = Engine(step)
        handler.attach(engine)
        data = loader_of(case.num_samples, case.batch_size, shuffle=shuffle)
        engine.run(data, max_epochs=max_epochs)
        assert engine.state.epoch == max_epochs
        return [RankRun(tuple(steps), engine.state.epoch_length) for steps in epochs]

    return list(zip(*run_ranks(case.world_size, rank), strict=True))


def can_train(case: Case) -> bool:
    """Whether there is a step for every rank, and as many for each."""
    try:
        return {plan.num_steps for plan in case.plans()} - {0} != set()
    except PlanError:
        return False


def unsized_loader(num_batches: int) -> Loader:
    return DataLoader(Ids(num_batches), batch_size=1, sampler=Unsized(num_batches))


# Training.


@given(
    cases(max_samples=30, max_world_size=4, tails=(Tail.PAD, Tail.DROP, Tail.EXACT)).filter(
        can_train
    )
)
@example(Case(10, 4, 3))
@example(Case(1, 4, 3))
def test_training_keeps_the_laws_in_each_epoch(case: Case) -> None:
    for run in runs(case, max_epochs=2):
        kept = laws.as_prepared(case)
        laws.tile(run, kept)
        laws.padding(run, kept)
        laws.length(run)
        laws.same_count(run, kept)
        laws.valid_rows(run, kept)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("tail", [Tail.PAD, Tail.DROP, Tail.EXACT])
def test_each_epoch_has_an_order_of_its_own(world_size: int, tail: Tail) -> None:
    def epoch_of(epoch: int) -> Run:
        return runs(case, max_epochs=epoch + 1, shuffle=True)[epoch]

    case = Case(23, 2, world_size, tail=tail)
    laws.shuffled(epoch_of, laws.as_prepared(case))


def test_the_order_is_that_of_torch_with_the_seed_of_the_epoch() -> None:
    for epoch, run in enumerate(runs(Case(12, 2, 2), max_epochs=3, shuffle=True)):
        generator = torch.Generator().manual_seed(3 + epoch)
        assert laws.all_rows(run) == torch.randperm(12, generator=generator).tolist()


def long_run(**how: Any) -> list[Batches]:
    """Train on 12 samples in 2 steps an epoch on each of two ranks, 6 steps unless told else."""
    return by_rank(2, lambda engine: engine.run(loader_of(12, 3, shuffle=True), **how))


@pytest.mark.parametrize(("epoch_length", "max_epochs"), [(1, 6), (2, 3), (3, 2), (5, 1), (6, 1)])
def test_an_epoch_length_of_the_user_only_regroups_the_steps(
    epoch_length: int, max_epochs: int
) -> None:
    def run(engine: Engine) -> None:
        loader = loader_of(12, 3, shuffle=True)
        engine.run(loader, max_epochs=max_epochs, epoch_length=epoch_length)
        assert engine.state.epoch_length == epoch_length
        assert engine.state.iteration == epoch_length * max_epochs

    expected = [seen[: epoch_length * max_epochs] for seen in long_run(max_epochs=3)]
    assert by_rank(2, run) == expected


def test_the_length_of_the_loader_given_as_epoch_length_is_a_pass() -> None:
    assert long_run(max_epochs=3, epoch_length=4) == long_run(max_epochs=3)


def test_iterations_are_counted_where_they_end_the_run() -> None:
    assert long_run(max_iters=5) == [seen[:5] for seen in long_run(max_epochs=3)]


def test_a_run_that_goes_on_gets_the_epochs_that_follow() -> None:
    def run(engine: Engine) -> None:
        loader = loader_of(12, 3, shuffle=True)
        engine.run(loader, max_epochs=1)
        engine.run(loader, max_epochs=3)
        assert (engine.state.iteration, engine.state.epoch_length) == (6, 2)

    assert by_rank(2, run) == long_run(max_epochs=3)


def test_a_run_that_goes_on_keeps_a_length_that_was_found() -> None:
    def run(engine: Engine) -> None:
        engine.run(unsized_loader(6), max_epochs=1)
        engine.run(unsized_loader(6), max_epochs=3)
        assert (engine.state.iteration, engine.state.epoch_length) == (9, 3)

    assert by_rank(2, run) == [[[0], [2], [4]] * 3, [[1], [3], [5]] * 3]


def test_a_run_that_goes_on_with_other_data_keeps_its_length() -> None:
    def run(engine: Engine) -> None:
        engine.run(loader_of(12), max_epochs=1)
        engine.run(loader_of(8), max_epochs=2)
        assert (engine.state.iteration, engine.state.epoch_length) == (6, 3)

    first, _ = by_rank(2, run)
    assert first == [[0, 1], [4, 5], [8, 9], [0, 1], [4, 5], [0, 1]]


def test_training_anew_does_not_repeat_an_order() -> None:
    def run(engine: Engine) -> None:
        loader = loader_of(12, 3, shuffle=True)
        for _ in range(3):
            engine.run(loader, max_epochs=1)
            assert engine.state.epoch == 1

    assert by_rank(2, run) == long_run(max_epochs=3)


def test_a_loaded_state_starts_with_the_order_of_its_epoch() -> None:
    def run(engine: Engine) -> None:
        engine.load_state_dict({"epoch": 2, "max_epochs": 3, "epoch_length": 2})
        engine.run(loader_of(12, 3, shuffle=True))

    assert by_rank(2, run) == [seen[4:] for seen in long_run(max_epochs=3)]


def test_an_epoch_that_is_left_counts_as_one() -> None:
    def run(engine: Engine) -> None:
        engine.add_event_handler(
            Events.ITERATION_COMPLETED(once=1), lambda: engine.terminate_epoch()
        )
        engine.run(loader_of(12, 3, shuffle=True), max_epochs=3)

    expected = [[seen[0], *seen[2:]] for seen in long_run(max_epochs=3)]
    assert by_rank(2, run) == expected


def test_a_run_that_was_terminated_goes_on_with_the_next_epoch() -> None:
    def run(engine: Engine) -> None:
        loader = loader_of(12, 3, shuffle=True)
        with engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), engine.terminate):
            engine.run(loader, max_epochs=3)
        engine.run(loader)

    expected = [[seen[0], *seen[2:]] for seen in long_run(max_epochs=3)]
    assert by_rank(2, run) == expected


def test_an_interrupted_run_goes_on_where_it_was() -> None:
    def run(engine: Engine) -> None:
        engine.add_event_handler(Events.ITERATION_COMPLETED(every=2), engine.interrupt)
        loader = loader_of(12, 3, shuffle=True)
        while engine.state.iteration < 6:
            engine.run(loader, max_epochs=3)

    assert by_rank(2, run) == long_run(max_epochs=3)


def test_an_interrupted_run_ignores_other_data_and_does_not_start_again() -> None:
    """As in Ignite: it goes on with the iterator that it has."""
    starts: list[str] = []

    def run(engine: Engine) -> None:
        engine.add_event_handler(Events.STARTED, lambda: starts.append("started"))
        engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), engine.interrupt)
        engine.run(loader_of(12, 3, shuffle=True), max_epochs=3)
        engine.run(loader_of(40), max_epochs=3)

    assert by_rank(2, run) == long_run(max_epochs=3)
    assert starts == ["started"] * 2  # once on each rank


def test_engines_without_interrupts_run_the_same() -> None:
    def run(engine: Engine) -> None:
        engine.interrupt_resume_enabled = False
        engine.run(loader_of(12, 3, shuffle=True), max_epochs=3)

    assert by_rank(2, run) == long_run(max_epochs=3)


def test_a_second_run_may_have_other_data() -> None:
    def run(engine: Engine) -> None:
        for num_samples, steps in ((12, 3), (5, 2), (16, 4)):
            engine.run(loader_of(num_samples), max_epochs=1)
            assert engine.state.epoch_length == engine.state.iteration == steps

    first, second = by_rank(2, run)
    assert first == [[0, 1], [4, 5], [8, 9], [0, 1], [4, 0], [0, 1], [4, 5], [8, 9], [12, 13]]
    assert second == [[2, 3], [6, 7], [10, 11], [2, 3], [1, 2], [2, 3], [6, 7], [10, 11], [14, 15]]


def test_the_loader_says_what_happens_at_the_end_unless_told_otherwise() -> None:
    dropped = by_rank(2, lambda engine: engine.run(loader_of(7, drop_last=True)))
    assert dropped == [[[0, 1]], [[2, 3]]]
    exact = by_rank(2, lambda engine: engine.run(loader_of(7, drop_last=True)), tail="exact")
    assert exact == [[[0, 1], [4, 5]], [[2, 3], [6]]]


def test_a_stream_is_sharded() -> None:
    def run(engine: Engine) -> None:
        engine.run(DataLoader(Stream(6), batch_size=2), max_epochs=2)
        assert (engine.state.iteration, engine.state.epoch_length) == (4, 2)

    assert by_rank(2, run) == [[[0, 1], [4, 5]] * 2, [[2, 3], [0, 1]] * 2]


# Data that is no DataLoader: its items are batches.


class SizedStream:
    """Knows how many batches it has, and nothing else."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(2 * self.num_batches).split(2))


def ready_batches(num_batches: int) -> list[torch.Tensor]:
    return list(torch.arange(2 * num_batches).split(2))


@pytest.mark.parametrize("make", [ready_batches, SizedStream, lambda n: {"all": n}])
def test_items_of_any_iterable_are_taken_for_batches_and_dealt(make: Callable[[int], Any]) -> None:
    class Values:
        def __init__(self, of: dict[str, int]) -> None:
            self.num_batches = of["all"]

        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(SizedStream(self.num_batches))

    def run(engine: Engine) -> None:
        data = make(4)
        engine.run(Values(data) if isinstance(data, dict) else data, max_epochs=2)
        assert (engine.state.iteration, engine.state.epoch_length) == (4, 2)

    assert by_rank(2, run) == [[[0, 1], [4, 5]] * 2, [[2, 3], [6, 7]] * 2]


def test_items_that_do_not_divide_are_evaluated_once() -> None:
    ranks = by_rank(2, lambda engine: engine.run(ready_batches(5)), mode="eval")
    assert ranks == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7]]]


def test_items_need_not_be_tensors() -> None:
    seen: list[object] = []
    for data in (range(3), {"a": 1, "b": 2}, iter(["x"]), ({"k": 1},)):
        engine = Engine(lambda _, batch: seen.append(batch))
        ShardHandler(dispatch_batches=False).attach(engine)
        engine.run(data)
    assert seen == [0, 1, 2, "a", "b", "x", {"k": 1}]


def test_a_list_that_is_given_again_goes_on_with_its_next_epoch() -> None:
    engine, seen, handler = recorder()
    batches = ready_batches(2)
    engine.run(batches, max_epochs=1)
    prepared = handler.loader
    engine.run(batches, max_epochs=2)
    assert handler.loader is prepared
    engine.run(list(batches), max_epochs=3)
    assert handler.loader is not prepared
    assert seen == [[0, 1], [2, 3]] * 3


# Evaluation.


@given(
    num_samples=st.integers(1, 40),
    batch_size=st.integers(1, 6),
    world_size=st.integers(1, 5),
    is_split=st.booleans(),
    num_epochs=st.integers(1, 2),
)
@example(num_samples=1, batch_size=4, world_size=3, is_split=False, num_epochs=2)
@example(num_samples=10, batch_size=1, world_size=3, is_split=False, num_epochs=2)
def test_evaluation_counts_every_sample_once(
    num_samples: int, batch_size: int, world_size: int, is_split: bool, num_epochs: int
) -> None:
    size = batch_size * world_size if is_split else batch_size
    loader = loader_of(num_samples, size, drop_last=num_samples >= size)
    ranks = by_rank(
        world_size,
        lambda engine: engine.run(loader, max_epochs=num_epochs),
        mode="eval",
        split_batches=is_split,
    )
    assert together(ranks) == sorted([*range(num_samples)] * num_epochs)
    counts = [len(seen) for seen in ranks]
    assert max(counts) - min(counts) <= num_epochs
    if num_samples >= world_size and batch_size > 1:
        assert max(counts) == min(counts)


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ({}, [[[0, 1, 2, 3]], [[4, 5, 6]], [[7, 8, 9]]]),
        ({"even_batches": False}, [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9]]]),
        ({"tail": "uneven"}, [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9]]]),
        ({"tail": "pad"}, [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9, 0, 1]]]),
    ],
)
def test_the_end_of_an_evaluation_can_be_chosen(
    options: dict[str, Any], ranks: list[Batches]
) -> None:
    assert by_rank(3, lambda engine: engine.run(loader_of(10, 4)), mode="eval", **options) == ranks


def test_batches_of_the_users_own_making_are_dealt() -> None:
    batches = [[0, 1, 2], [3], [4, 5]]
    loader: Loader = DataLoader(Ids(6), batch_sampler=batches)
    ranks = by_rank(2, lambda engine: engine.run(loader), mode="eval")
    assert ranks == [[[0, 1, 2], [4, 5]], [[3]]]


def test_every_evaluation_is_the_first_epoch() -> None:
    def run(engine: Engine) -> None:
        for _ in range(2):
            engine.run(loader, max_epochs=2)

    loader = loader_of(12, 3, shuffle=True)
    for seen in by_rank(2, run, mode="eval"):
        assert len(seen) == 8
        assert seen[:4] == seen[4:]
        assert seen[:2] != seen[2:4]


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_lengths_are_not_carried_over(mode: str, world_size: int) -> None:
    """Known and unknown ones, found or told, in any order; stock Ignite keeps what it had."""
    plan: list[tuple[Loader, int | None, int]] = [
        (unsized_loader(3 * world_size), None, 3),
        (unsized_loader(5 * world_size), None, 5),
        (unsized_loader(2 * world_size), None, 2),
        (loader_of(4 * world_size, 1), None, 4),
        (unsized_loader(6 * world_size), None, 6),
        (unsized_loader(6 * world_size), 4, 4),
        (unsized_loader(6 * world_size), 4, 4),
        (loader_of(7 * world_size, 1), 6, 6),
        (loader_of(7 * world_size, 1), None, 7),
        (DataLoader(Stream(3 * world_size), batch_size=1), None, 3),
    ]

    def rank(comm: Comm) -> list[int]:
        engine, seen, _ = recorder(comm=comm, mode=mode, tail="pad")
        counts = []
        for loader, epoch_length, _ in plan:
            seen.clear()
            engine.run(loader, epoch_length=epoch_length)
            counts.append(len(seen))
        return counts

    expected = [steps for _, _, steps in plan]
    assert run_ranks(world_size, rank) == [expected] * world_size


def test_a_length_that_the_user_resets_is_found_anew() -> None:
    engine, seen, _ = recorder()
    engine.run(unsized_loader(3))
    engine.state.epoch_length = None
    engine.run(unsized_loader(5))
    engine.run(unsized_loader(4))
    assert len(seen) == 3 + 5 + 4


def test_a_length_that_was_not_found_is_not_taken_from_the_loader() -> None:
    """Batches that are dropped or not by the size of the last one have no length on a shard."""

    class Sized(Sampler[list[int]]):
        batch_size = 2

        def __iter__(self) -> Iterator[list[int]]:
            yield from ([0, 1], [2, 3], [4, 5], [6])

        def __len__(self) -> int:
            return 4

    def run(engine: Engine) -> None:
        loader: Loader = DataLoader(Ids(7), batch_sampler=Sized())
        with engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), engine.terminate):
            engine.run(loader, max_epochs=3)
        engine.run(loader)
        assert (engine.state.iteration, engine.state.epoch_length) == (3, 1)

    assert by_rank(2, run, tail="drop") == [[[0, 1]] * 3, [[2, 3]] * 3]


@pytest.mark.parametrize("loader", [loader_of(1), DataLoader(Stream(2), batch_size=2)])
def test_ranks_without_a_batch_go_through_every_epoch(loader: Loader) -> None:
    def run(engine: Engine) -> None:
        epochs: list[int] = []
        engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: epochs.append(engine.state.epoch))
        for _ in range(2):
            engine.run(loader, max_epochs=3)
        engine.run(loader_of(4))
        assert epochs == [1, 2, 3, 1, 2, 3, 1]
        assert engine.state.epoch_length == 1

    batch = ids_of(next(iter(loader)))
    assert by_rank(2, run, mode="eval") == [[[*batch]] * 6 + [[0, 1]], [[2, 3]]]


def test_an_evaluator_inside_a_trainer_changes_nothing_for_the_trainer() -> None:
    def rank(comm: Comm) -> tuple[Batches, Batches]:
        trainer, trained, _ = recorder(comm=comm)
        evaluator, seen, _ = recorder(comm=comm, mode="eval")
        loader = loader_of(12, 3, shuffle=True)

        def evaluate() -> None:
            evaluator.run(loader)  # the very loader that is being trained on
            evaluator.run(loader_of(5))

        trainer.add_event_handler(Events.EPOCH_COMPLETED, evaluate)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=4), evaluate)
        trainer.run(loader, max_epochs=3)
        return trained, seen

    ranks = run_ranks(2, rank)
    assert [trained for trained, _ in ranks] == long_run(max_epochs=3)
    evaluated = [seen for _, seen in ranks]
    assert together(evaluated) == sorted([*range(12), *range(5)] * 4)


# Attaching.


def test_without_a_group_a_world_of_one_is_sharded_too() -> None:
    engine, seen, handler = recorder()
    engine.run(loader_of(5))
    assert seen == [[0, 1], [2, 3], [4]]
    assert handler.loader.shard.count == 1


def test_a_detached_engine_reads_what_it_is_given() -> None:
    def rank(comm: Comm) -> Batches:
        engine, seen, handler = recorder(comm=comm)
        assert handler.is_attached(engine)
        loader = loader_of(4)
        engine.run(loader)
        handler.detach(engine)
        assert not handler.is_attached(engine)
        engine.run(loader)
        handler.detach(engine)
        handler.attach(engine)
        engine.run(loader)
        return seen

    whole = [[0, 1], [2, 3]]
    assert run_ranks(2, rank) == [[[0, 1], *whole, [0, 1]], [[2, 3], *whole, [2, 3]]]


def test_what_a_detached_engine_did_is_taken_as_it_is() -> None:
    def rank(comm: Comm) -> int:
        engine, seen, handler = recorder(comm=comm)
        loader = loader_of(8)
        engine.run(loader)
        handler.detach(engine)
        engine.run(loader)  # alone: four steps
        handler.attach(engine)
        seen.clear()
        engine.run(loader, max_epochs=2)
        assert engine.state.epoch_length == 4
        return len(seen)

    assert run_ranks(2, rank) == [4, 4]


def test_detaching_leaves_the_handlers_of_others() -> None:
    engine, _, handler = recorder()
    other = ShardHandler()
    other.attach(engine)
    handler.detach(engine)
    assert other.is_attached(engine)
    other.detach(engine)
    assert not any(engine._event_handlers.values())


def test_one_handler_serves_several_engines() -> None:
    def rank(comm: Comm) -> Batches:
        first, seen, handler = recorder(comm=comm, mode="eval")
        second = Engine(lambda _, batch: seen.append(batch.tolist()))
        handler.attach(second)
        loader = loader_of(5)
        first.run(loader)
        second.run(loader)
        handler.detach(first)
        second.run(loader)
        assert second.state.dataloader is first.state.dataloader is handler.loader
        return seen

    assert run_ranks(2, rank) == [[[0, 1], [3]] * 3, [[2], [4]] * 3]


def test_a_loader_that_is_given_beforehand_is_known_beforehand() -> None:
    def rank(comm: Comm) -> Batches:
        loader = loader_of(12, 3, shuffle=True)
        engine, seen, handler = recorder(loader=loader, comm=comm)
        assert len(handler.loader) == 2
        prepared = handler.loader
        engine.run(loader, max_epochs=2)
        engine.run(prepared, max_epochs=3)
        assert handler.loader is engine.state.dataloader is prepared
        return seen

    assert run_ranks(2, rank) == long_run(max_epochs=3)


def test_a_loader_of_an_engine_of_ours_stays_as_it_is() -> None:
    def rank(comm: Comm) -> Batches:
        prepared = ShardEngine(comm=comm).prepare_loader(loader_of(5), tail="uneven")
        engine, seen, handler = recorder(loader=prepared, comm=comm, mode="eval")
        engine.run(prepared)
        assert engine.state.dataloader is handler.loader is prepared
        assert not handler._prepared  # the user's to keep
        return seen

    assert run_ranks(2, rank) == [[[0, 1], [4]], [[2, 3]]]


def test_a_loader_is_prepared_once_and_kept_while_the_user_keeps_it() -> None:
    engine, _, handler = recorder()
    loader, other = loader_of(4), loader_of(2)
    engine.run(loader)
    prepared = handler.loader
    engine.run(other)
    assert handler.loader is not prepared
    engine.run(loader)
    assert handler.loader is prepared
    assert len(handler._prepared) == 2
    del other
    gc.collect()
    assert len(handler._prepared) == 1


def test_the_users_loader_is_left_as_it_was() -> None:
    def look(value: object) -> object:
        assert isinstance(value, DataLoader)
        return dict(vars(value)), value.generator.get_state().tolist()

    loader = loader_of(10, 3, shuffle=True, generator=torch.Generator().manual_seed(1))
    engine, _, _ = recorder()
    laws.hands_off(lambda: engine.run(loader, max_epochs=2), loader, look=look)


@pytest.mark.parametrize("use_seedable_sampler", [True, False])
def test_training_moves_the_random_state_only_to_draw_a_seed(use_seedable_sampler: bool) -> None:
    loader = loader_of(10, 3, shuffle=True)
    engine, _, _ = recorder(loader=loader, use_seedable_sampler=use_seedable_sampler)
    prepared = torch.get_rng_state()
    assert torch.equal(prepared, torch.manual_seed(0).get_state()) is use_seedable_sampler
    torch.set_rng_state(prepared)
    engine.run(loader, max_epochs=2)
    assert torch.equal(torch.get_rng_state(), prepared)


def test_all_other_handlers_see_the_prepared_loader_and_its_length() -> None:
    def rank(comm: Comm) -> list[object]:
        looked: list[object] = []
        engine = Engine(lambda _, __: None)

        @engine.on(Events.STARTED)
        def look(engine: Engine) -> None:
            looked.extend((engine.state.dataloader, engine.state.epoch_length))

        handler = ShardHandler(comm=comm)
        handler.attach(engine)
        engine.run(loader_of(8))
        return [looked[0] is handler.loader, *looked[1:]]

    assert run_ranks(2, rank) == [[True, 2]] * 2


def test_a_run_without_data_is_left_alone() -> None:
    engine = Engine(lambda _, batch: batch)
    ShardHandler().attach(engine)
    state = engine.run(max_epochs=2, epoch_length=3)
    assert (state.iteration, state.dataloader) == (6, None)


@pytest.mark.parametrize(
    "event",
    [
        Events.ITERATION_COMPLETED(once=1),
        Events.EPOCH_STARTED(once=2),
        Events.GET_BATCH_STARTED(once=1),
        Events.DATALOADER_STOP_ITERATION,
    ],
)
def test_data_that_is_set_while_a_run_goes_on_is_sharded(event: Any) -> None:
    def run(engine: Engine) -> None:
        engine.add_event_handler(event, lambda: engine.set_data(other))
        engine.run(loader_of(4), max_epochs=2, epoch_length=1)

    other: Loader = DataLoader(Ids(4, start=10), batch_size=2)
    assert by_rank(2, run) == [[[0, 1], [10, 11]], [[2, 3], [12, 13]]]


def test_an_exception_of_a_step_reaches_the_user() -> None:
    def fail(engine: Engine, batch: object) -> None:
        raise ZeroDivisionError("of the user")

    engine = Engine(fail)
    ShardHandler().attach(engine)
    with pytest.raises(ZeroDivisionError, match="of the user"):
        engine.run(loader_of(4))


# Options.


ELSEWHERE = {
    "dataloader": "loader",
    "num_processes": "",  # the ranks of the run are the shards
    "process_index": "",
}
"""Options of the core that have another name here, or none."""


def test_every_option_of_the_core_is_there_with_its_default() -> None:
    ours = inspect.signature(ShardHandler.__init__).parameters
    differs = {"mode", "gradient_accumulation_steps"}  # None: the optimizer tells
    # The engine's own, which the handler makes loaders with.
    differs |= {"rng_types", "use_seedable_sampler", "put_on_device"}
    for core in (prepare_data_loader, ShardEngine.__init__):
        for name, option in inspect.signature(core).parameters.items():
            if name == "self" or name in ELSEWHERE:
                assert ELSEWHERE.get(name, "loader") in {"", *ours}
                continue
            assert name in ours, name
            if name not in differs:
                assert ours[name].default == option.default, name
            assert f"        {name}: " in (ShardHandler.__doc__ or ""), name


def test_batches_are_put_on_the_device() -> None:
    devices: list[str] = []
    for options in ({"device": "meta"}, {"device": "meta", "put_on_device": False}, {}):
        engine = Engine(lambda _, batch: devices.append(batch.device.type))
        ShardHandler(**options).attach(engine)
        engine.run(loader_of(2))
    assert devices == ["meta", "cpu", "cpu"]


@pytest.mark.parametrize("non_blocking", [True, False])
def test_moves_may_overlap_if_asked_to(non_blocking: bool) -> None:
    handler = ShardHandler(loader_of(2), non_blocking=non_blocking)
    assert handler.loader._settings.non_blocking is non_blocking


def test_data_that_is_cut_already_is_not_cut_again() -> None:
    ranks = by_rank(2, lambda engine: engine.run(loader_of(4)), already_sharded=True)
    assert ranks == [[[0, 1], [2, 3]]] * 2


@pytest.mark.parametrize("sync_order", ["agree", "broadcast"])
def test_ranks_that_disagree_on_the_order_are_told_or_follow_rank_0(sync_order: str) -> None:
    def rank(comm: Comm) -> Batches:
        engine, seen, _ = recorder(comm=comm, sync_order=sync_order)
        engine.run(loader_of(4, sampler=Disagreeing(4, comm.rank)))
        return seen

    if sync_order == "agree":
        with pytest.raises(CommError, match='or sync_order="broadcast" to use that of rank 0'):
            run_ranks(2, rank)
    else:
        assert run_ranks(2, rank) == [[[0, 1]], [[2, 3]]]


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"mode": "test"}, "`mode` must be 'train' or 'eval', got 'test'."),
        ({"tail": "short"}, "`tail` must be one of .*, got 'short'."),
        ({"rng_types": ("dice",)}, "`rng_types` must be among .*, got 'dice'."),
        ({"data_axes": ("dp",)}, "`data_axes` must come with a mesh"),
    ],
)
def test_options_are_checked_when_they_are_given(options: dict[str, Any], rule: str) -> None:
    with pytest.raises(PlanError, match=rule):
        ShardHandler(comm=SoloComm(), **options)


FLAGS = (
    "split_batches",
    "even_batches",
    "use_seedable_sampler",
    "put_on_device",
    "non_blocking",
    "use_stateful_dataloader",
    "seed_samples",
)
OF_A_WRONG_KIND: dict[str, list[Any]] = {
    **{name: ["no", 1, None, torch.tensor(True)] for name in FLAGS},
    **{name: ["x", 0] for name in ("dispatch_batches", "already_sharded")},
    "gradient_accumulation_steps": [1.5, "2", True, 0],
    "batches_per_message": [0, 1.5, "2", None],
    "data_seed": ["a", 0.5, False],
    "agree_stop": ["a", 0, 1, 16, 0.5, None, torch.tensor(True)],
    "slice_fn_for_dispatch": [3],
    "comm": [4],
    "device": ["nope", 0.5, True, []],
    "rng_types": ["torch", 3, ("dice",), (3,)],
    "data_axes": ["dp", 3],
    "torch_device_mesh": ["dp"],
    "worker_split": ["me", 3],
    "sync_order": ["guess", None],
    "tail": ["short", 3],
    "mode": ["test", None],
    "scheduler_unit": ["days", None],
    "scaler": [5],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in OF_A_WRONG_KIND.items() for value in values],
)
def test_an_option_of_a_wrong_kind_is_refused_by_its_name_when_it_is_given(
    name: str, value: Any
) -> None:
    with pytest.raises(PlanError, match=f"^`{name}` must "):
        ShardHandler(**{"comm": SoloComm(), name: value})


def test_the_kind_of_every_option_is_checked() -> None:
    objects = {"self", "loader", "optimizer", "lr_scheduler"}
    assert inspect.signature(ShardHandler.__init__).parameters.keys() - objects == {
        *OF_A_WRONG_KIND
    }


def test_numbers_and_truth_values_of_numpy_are_taken() -> None:
    def run(engine: Engine) -> None:
        engine.run(loader_of(8))

    options: dict[str, Any] = {
        "split_batches": np.bool_(True),
        "gradient_accumulation_steps": np.int64(2),
        "batches_per_message": np.int32(2),
        "data_seed": np.int64(3),
    }
    split = [[[0], [2], [4], [6]], [[1], [3], [5], [7]]]
    for asks in (np.bool_(True), np.bool_(False)):
        assert by_rank(2, run, agree_stop=asks, **options) == split


# What is refused.


def test_only_engines_are_attached_to() -> None:
    handler = ShardHandler()
    with pytest.raises(PlanError, match=r"`engine` must be an ignite.engine.Engine, got int\."):
        handler.attach(3)  # type: ignore[arg-type]


def test_an_engine_that_rebuilds_its_loaders_is_refused() -> None:
    engine = DeterministicEngine(lambda _, __: None)
    with pytest.raises(PlanError, match=r"got a DeterministicEngine, which rebuilds it\. Use Eng"):
        ShardHandler().attach(engine)


def test_attaching_twice_is_refused() -> None:
    engine, seen, handler = recorder()
    with pytest.raises(PlanError, match=r"`engine` must not have this handler yet.*detach\(\)"):
        handler.attach(engine)
    engine.run(loader_of(4))
    assert seen == [[0, 1], [2, 3]]


IN_A_RUN = (
    Events.STARTED,
    Events.EPOCH_STARTED,
    Events.GET_BATCH_STARTED,
    Events.GET_BATCH_COMPLETED,
    Events.ITERATION_STARTED,
    Events.ITERATION_COMPLETED,
    Events.DATALOADER_STOP_ITERATION,
    Events.TERMINATE_SINGLE_EPOCH,
    Events.EPOCH_COMPLETED,
    Events.TERMINATE,
    Events.COMPLETED,
)


@pytest.mark.parametrize("event", IN_A_RUN)
@pytest.mark.parametrize("is_resumable", [True, False])
@pytest.mark.parametrize("was_attached", [True, False])
def test_attaching_to_an_engine_that_runs_is_refused(
    event: Any, is_resumable: bool, was_attached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handlers of the event are being called, and the start has been missed."""
    monkeypatch.setattr(Engine, "interrupt_resume_enabled", is_resumable)
    refused: list[str] = []
    calls: list[str] = []
    engine = Engine(lambda _, __: None)
    handler = ShardHandler(comm=SoloComm())
    if was_attached:
        handler.attach(engine)

    def attach(*_: Any, **__: Any) -> None:
        handler.detach(engine)
        try:
            handler.attach(engine)
        except PlanError as error:
            refused.append(str(error))

    engine.add_event_handler(event, attach)
    engine.add_event_handler(event, lambda *_, **__: calls.append("the next"))
    leave = engine.terminate_epoch if event == Events.TERMINATE_SINGLE_EPOCH else lambda: None
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), leave)
    end = engine.terminate if event == Events.TERMINATE else lambda: None
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=5), end)
    engine.run(loader_of(4), max_epochs=3, epoch_length=3)
    assert set(refused) == {
        "`engine` must not be running, got one whose run is under way or interrupted. "
        "Attach the handler before run()."
    }
    assert len(calls) == len(refused)  # each handler was called once
    handler.attach(engine)  # now that it has ended


def test_attaching_to_an_engine_that_is_interrupted_is_refused() -> None:
    engine = Engine(lambda _, __: None)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), engine.interrupt)
    engine.run(loader_of(4))
    with pytest.raises(PlanError, match="`engine` must not be running, got one whose run is under"):
        ShardHandler().attach(engine)
    engine.run(loader_of(4))
    ShardHandler().attach(engine)


@pytest.mark.parametrize("is_resumable", [True, False])
def test_an_engine_whose_run_failed_is_attached_to(
    is_resumable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "interrupt_resume_enabled", is_resumable)
    seen: Batches = []

    def step(_: Engine, batch: torch.Tensor) -> None:
        seen.append(batch.tolist())
        if len(seen) == 1:
            raise KeyError

    engine = Engine(step)
    with pytest.raises(KeyError):
        engine.run(loader_of(4))
    ShardHandler(comm=SoloComm()).attach(engine)


def test_another_engine_is_attached_to_while_one_runs() -> None:
    outer, inner = Engine(lambda _, __: None), Engine(lambda _, __: None)
    handler = ShardHandler(comm=SoloComm(), mode="eval")
    outer.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: handler.attach(inner))
    outer.run(loader_of(4))
    assert handler.is_attached(inner)


def test_there_is_no_loader_before_one_was_given() -> None:
    engine, _, handler = recorder()
    with pytest.raises(PlanError, match="`loader` must be given to the handler, or to an engine"):
        _ = handler.loader
    engine.run(loader_of(4))
    assert len(handler.loader) == 2


def refused(world_size: int, run: Callable[[Engine], object], **options: Any) -> list[str]:
    """What each rank's engine says, no rank waiting for another; nobody may have taken a step."""

    def rank(comm: Comm) -> str:
        engine, seen, _ = recorder(comm=comm, **options)
        with pytest.raises(PlanError) as caught:
            run(engine)
        assert seen == []
        return str(caught.value)

    return run_ranks(world_size, rank)


def test_an_epoch_without_a_step_is_refused() -> None:
    said = refused(3, lambda engine: engine.run(loader_of(11, 4, drop_last=True)))
    assert (
        said
        == [
            "`loader` must make at least one step, got none with tail='drop'. Use a smaller batch "
            'size, fewer ranks, or tail="pad".'
        ]
        * 3
    )


@pytest.mark.parametrize("options", [{"even_batches": False}, {"tail": "uneven"}])
def test_training_for_different_numbers_of_steps_is_refused(options: dict[str, Any]) -> None:
    said = refused(3, lambda engine: engine.run(loader_of(8)), **options)
    assert (
        said
        == [
            "`tail` must let all ranks take the same number of steps to train, got 'uneven', by "
            'which they take between 1 and 2 steps. Use tail="pad", "drop" or "exact", or '
            'mode="eval" for an evaluator.'
        ]
        * 3
    )
    said = refused(2, lambda engine: engine.run(unsized_loader(8)), **options)
    assert all("by which they take unknown numbers of steps." in message for message in said)


def test_training_uneven_is_fine_where_the_steps_are_even() -> None:
    ranks = by_rank(2, lambda engine: engine.run(loader_of(7)), tail="uneven")
    assert ranks == [[[0, 1], [4, 5]], [[2, 3], [6]]]


def test_an_exact_end_that_cannot_be_is_refused_where_it_was_asked_for() -> None:
    for mode in ("train", "eval"):
        said = refused(3, lambda engine: engine.run(loader_of(2)), tail="exact", mode=mode)
        assert all("at least the 3 shards with tail='exact', got 2" in message for message in said)


@pytest.mark.parametrize(
    ("loader", "how", "rule"),
    [
        (
            loader_of(10, 1),
            {"epoch_length": 4},
            "at most 3, in a single epoch, where ranks take between 3 and 4 steps, got 4",
        ),
        (loader_of(10, 1), {"epoch_length": 3, "max_epochs": 2}, "at most 3, in a single epoch"),
        (
            loader_of(2, 4),
            {"epoch_length": 2},
            "at most 0, in a single epoch, where ranks take between 0 and 1 steps, got 2",
        ),
        (
            unsized_loader(10),
            {"epoch_length": 1},
            "at most 0, in a single epoch, where ranks take unknown",
        ),
        (
            loader_of(10, 1),
            {"max_iters": 2},
            "`max_iters` must be left out where ranks take between 3 and 4 steps, got 2",
        ),
    ],
)
def test_evaluating_longer_than_some_rank_can_is_refused(
    loader: Loader, how: dict[str, int], rule: str
) -> None:
    said = refused(3, lambda engine: engine.run(loader, **how), mode="eval")
    assert all(rule in message and 'tail="pad"' in message for message in said)


def test_a_part_of_an_uneven_evaluation_is_fine() -> None:
    ranks = by_rank(3, lambda engine: engine.run(loader_of(10, 1), epoch_length=3), mode="eval")
    assert together(ranks) == list(range(9))


def test_data_that_is_set_is_checked_too() -> None:
    def run(engine: Engine) -> None:
        engine.add_event_handler(Events.EPOCH_COMPLETED(once=1), lambda: engine.set_data(other))
        engine.run(loader_of(4), max_epochs=2)

    other = loader_of(6)

    def rank(comm: Comm) -> None:
        engine, _, _ = recorder(comm=comm, tail="uneven")
        with pytest.raises(PlanError, match="same number of steps to train"):
            run(engine)

    run_ranks(2, rank)
