"""Loaders of every kind, trained on, left, changed and resumed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ignite.engine import Engine, Events
from torch.utils.data import DataLoader, Dataset, Sampler

from shardplug import (
    Comm,
    DataLoaderDispatcher,
    DataLoaderShard,
    PlanError,
    SoloComm,
    prepare_data_loader,
)
from shardplug.testing import run_ranks
from shardplug_ignite import ShardHandler
from tests.integrations.ignite.data import Ids, Stream
from tests.laws import ids_of

Loader = DataLoader[Any]


class Buckets(Sampler[list[int]]):
    """Batches of the user's own making, of different sizes."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1, 2], [3, 4], [5], [6, 7, 8, 9], [10], [11, 12])

    def __len__(self) -> int:
        return 6


class Drawing(Dataset[float]):
    """Samples that draw: their numbers depend on the generators when they are made."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return random.random()  # no secret


class Kept:
    """An engine on each of two ranks, and what it saw."""

    def __init__(self, comm: Comm, **options: Any) -> None:
        self.seen: list[list[int]] = []
        self.engine = Engine(lambda _, batch: self.seen.append(list(ids_of(batch))))
        self.handler = ShardHandler(comm=comm, **options)
        self.handler.attach(self.engine)


MAKERS: dict[str, Callable[[], Any]] = {
    "batch sampler": lambda: DataLoader(Ids(13), batch_sampler=Buckets()),
    "stream": lambda: DataLoader(Stream(16), batch_size=2),
    "shuffled": lambda: DataLoader(Ids(16), batch_size=2, shuffle=True),
    "ready": lambda: list(torch.arange(16).split(2)),
    "dropping": lambda: DataLoader(Ids(17), batch_size=2, drop_last=True),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("dispatches", [True, False])
def test_dispatching_changes_who_reads_and_never_who_sees_what(kind: str, dispatches: bool) -> None:
    def rank(comm: Comm) -> list[list[int]]:
        kept = Kept(comm, dispatch_batches=dispatches, data_seed=1)
        kept.engine.run(MAKERS[kind](), max_epochs=2)
        wanted = DataLoaderDispatcher if dispatches else DataLoaderShard
        assert type(kept.handler.loader) is wanted
        assert kept.engine.state.epoch_length == len(kept.seen) / 2
        return kept.seen

    def expected(comm: Comm) -> list[list[int]]:
        loader = DataLoader(Ids(16), batch_size=2, shuffle=True) if kind == "shuffled" else None
        if loader is None:
            return [[]]
        prepared = prepare_data_loader(
            loader, use_seedable_sampler=True, data_seed=1, dispatch_batches=False, comm=comm
        )
        return [list(ids_of(batch)) for _ in range(2) for batch in prepared]

    ranks = run_ranks(2, rank)
    if kind == "shuffled":
        assert ranks == run_ranks(2, expected)
    elif kind == "batch sampler":
        assert ranks == [[[0, 1, 2], [5], [10]] * 2, [[3, 4], [6, 7, 8, 9], [11, 12]] * 2]
    else:
        halves = [[[4 * at, 4 * at + 1], [4 * at + 2, 4 * at + 3]] for at in range(4)]
        assert ranks == [[both[index] for both in halves] * 2 for index in range(2)]


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("dispatches", [True, False])
def test_data_of_every_kind_is_resumed(kind: str, dispatches: bool) -> None:
    def rank(comm: Comm) -> None:
        whole = Kept(comm, dispatch_batches=dispatches, data_seed=1)
        states: list[dict[str, Any]] = []
        whole.engine.add_event_handler(
            Events.ITERATION_COMPLETED, lambda: states.append(whole.handler.state_dict())
        )
        whole.engine.run(MAKERS[kind](), max_epochs=2)
        for done in range(1, len(states) + 1):
            rest = Kept(comm, dispatch_batches=dispatches, data_seed=1)
            rest.handler.load_state_dict(states[done - 1])
            rest.engine.run(MAKERS[kind](), max_epochs=2)
            assert whole.seen[:done] + rest.seen == whole.seen, done
            assert rest.engine.state.iteration == len(states)

    run_ranks(2, rank)


@pytest.mark.parametrize("kind", MAKERS)
def test_runs_are_interrupted_and_go_on_on_data_of_every_kind(kind: str) -> None:
    def rank(comm: Comm) -> None:
        whole, parts = (Kept(comm, data_seed=1) for _ in range(2))
        whole.engine.run(MAKERS[kind](), max_epochs=3)
        parts.engine.add_event_handler(Events.ITERATION_COMPLETED(every=2), parts.engine.interrupt)
        data = MAKERS[kind]()
        for _ in range(20):
            parts.engine.run(data, max_epochs=3)
            if parts.engine._internal_run_generator is None:
                break
        assert parts.seen == whole.seen

    run_ranks(2, rank)


@pytest.mark.parametrize("epoch_length", [1, 3, 7])
def test_an_epoch_length_regroups_streams_too(epoch_length: int) -> None:
    def rank(comm: Comm) -> None:
        kept = Kept(comm)
        kept.engine.run(MAKERS["stream"](), max_epochs=3, epoch_length=epoch_length)
        first = 2 * comm.rank
        steps = [[4 * (at % 4) + first, 4 * (at % 4) + first + 1] for at in range(3 * epoch_length)]
        assert kept.seen == steps

    run_ranks(2, rank)


def test_samples_that_draw_do_so_by_their_position() -> None:
    """On one rank: ranks in one process share its generators."""

    def run(seeds_samples: bool, seed: int) -> list[float]:
        seen: list[float] = []
        random.seed(seed)
        engine = Engine(lambda _, batch: seen.extend(batch.tolist()))
        ShardHandler(comm=SoloComm(), seed_samples=seeds_samples, data_seed=2).attach(engine)
        engine.run(DataLoader(Drawing(), batch_size=2), max_epochs=1)
        return seen

    runs = [run(True, 0), run(True, 1), run(False, 2)]
    assert runs[0] == runs[1]
    assert runs[2] != runs[0]
    assert len(set(runs[0])) == 8


def test_a_stateful_loader_may_be_asked_for() -> None:
    def rank(comm: Comm) -> list[list[int]]:
        kept = Kept(comm, use_stateful_dataloader=True, data_seed=1)
        kept.engine.run(DataLoader(Ids(8), batch_size=2), max_epochs=1)
        return kept.seen

    assert run_ranks(2, rank) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_batches_are_cut_as_the_user_says() -> None:
    def cut(
        data: torch.Tensor, tensor_slice: slice, process_index: int, num_processes: int
    ) -> torch.Tensor:
        rows: torch.Tensor = data[process_index::num_processes]
        return rows

    def rank(comm: Comm) -> list[list[int]]:
        kept = Kept(comm, dispatch_batches=True, slice_fn_for_dispatch=cut)
        kept.engine.run(DataLoader(Ids(8), batch_size=2), max_epochs=1)
        return kept.seen

    assert run_ranks(2, rank) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


def test_data_that_is_cut_already_is_not_dispatched() -> None:
    def rank(comm: Comm) -> None:
        kept = Kept(comm, dispatch_batches=True, already_sharded=True)
        with pytest.raises(
            PlanError, match="`already_sharded` must be False or None with dispatch"
        ):
            kept.engine.run(DataLoader(Ids(8), batch_size=2))

    run_ranks(2, rank)
