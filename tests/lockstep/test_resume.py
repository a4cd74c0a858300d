"""Stop anywhere, go on anywhere: states of loaders, on this and on other numbers of ranks.

Many ranks are simulated in one process: a loader that is prepared for one of several shards by
number asks nothing of the others.
"""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, product, zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Sampler, default_collate

from shardplug import (
    DataLoaderShard,
    PermutedSampler,
    PlanError,
    Split,
    StateError,
    Tail,
    prepare_data_loader,
    skip_first_batches,
)
from shardplug.prepared import PreparedLoader
from tests import laws, reference, strategies
from tests.laws import Case, Leg, RankRun, Run, Step
from tests.streams import Ids, SizedIds

NUM_EPOCHS = 2
Make = Callable[[Case], DataLoader[Any]]


class EachEpochAnother(Sampler[int]):
    """A user's sampler that follows the epoch; nobody can see through it."""

    def __init__(self, num_ids: int) -> None:
        self.num_ids = num_ids
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        ids = list(range(self.num_ids))
        random.Random(f"{self.epoch}").shuffle(ids)
        return iter(ids)

    def __len__(self) -> int:
        return self.num_ids


class FixedBatches(EachEpochAnother):
    """A user's batch sampler that declares a size and keeps it."""

    def __init__(self, num_ids: int, batch_size: int) -> None:
        super().__init__(num_ids)
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[Any]:
        ids = list(super().__iter__())
        for start in range(0, len(ids), self.batch_size):
            yield ids[start : start + self.batch_size]

    def __len__(self) -> int:
        return -(-self.num_ids // self.batch_size)


class FixedInOrder(FixedBatches):
    def __iter__(self) -> Iterator[Any]:
        return iter(BatchSampler(range(self.num_ids), self.batch_size, drop_last=False))


def numbers(num_samples: int) -> Any:
    """Sample i is i."""
    return torch.arange(num_samples)


def ids_of(case: Case) -> Any:
    return numbers(case.num_samples)


KINDS: dict[str, Make] = {
    "in order": lambda case: DataLoader(ids_of(case), case.batch_size),
    "keyed": lambda case: DataLoader(
        ids_of(case), case.batch_size, sampler=PermutedSampler(case.num_samples, seed=5)
    ),
    "user's sampler": lambda case: DataLoader(
        ids_of(case), case.batch_size, sampler=EachEpochAnother(case.num_samples)
    ),
    "user's batches": lambda case: DataLoader(
        ids_of(case), batch_sampler=FixedBatches(case.num_samples, case.batch_size)
    ),
    "stream": lambda case: DataLoader(Ids(case.num_samples), case.batch_size),
    "stream with a length": lambda case: DataLoader(SizedIds(case.num_samples), case.batch_size),
}


def prepared(make: Make, case: Case, rank: int, **options: Any) -> PreparedLoader:
    return prepare_data_loader(
        make(case),
        num_processes=case.world_size,
        process_index=rank,
        split_batches=case.split_batches,
        tail=case.tail.value,
        **options,
    )


def steps_of(loader: PreparedLoader) -> Iterator[Step]:
    """Read one pass, and its state, as text, while each batch is out."""
    for batch in loader:
        state = loader.state_dict()
        laws.travels(state)
        yield Step(laws.ids_of(batch), loader.valid_rows, state["consumed"], json.dumps(state))


def epochs_from(make: Make, case: Case, state: str | None, **options: Any) -> Run:
    """Read what is left of all epochs after a state, on each rank."""
    run = []
    for rank in range(case.world_size):
        loader = prepared(make, case, rank, **options)
        if state is not None:
            loader.load_state_dict(json.loads(state))
        steps: list[Step] = []
        while loader.epoch < NUM_EPOCHS:
            steps += steps_of(loader)
        run.append(RankRun(tuple(steps), None))
    return tuple(run)


def rest_from(make: Make, case: Case, state: str | None, **options: Any) -> Run:
    """Read what is left of an epoch after a state, on each rank."""
    run = []
    for rank in range(case.world_size):
        loader = prepared(make, case, rank, **options)
        if state is not None:
            loader.load_state_dict(json.loads(state))
        run.append(RankRun(tuple(steps_of(loader)), None))
    return tuple(run)


def is_possible(case: Case) -> bool:
    try:
        reference.rounds(case)
    except reference.Impossible:
        return False
    return True


SIZES = (1, 5, 9, 12, 13)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tail", Tail)
@pytest.mark.parametrize("split", Split)
def test_the_rest_is_that_of_the_unbroken_run(kind: str, tail: Tail, split: Split) -> None:
    for num_samples, size, world_size in product(SIZES, (1, 2, 4), (1, 2, 3)):
        batch_size = size * world_size if split is Split.SLICE else size
        case = Case(num_samples, batch_size, world_size, split, tail)
        if is_possible(case):
            # Uneven ranks are in different epochs after as many steps.
            run_from = rest_from if tail is Tail.UNEVEN else epochs_from
            laws.resume(partial(run_from, KINDS[kind]), case)


@pytest.mark.parametrize("split", Split)
def test_a_shuffle_goes_on_as_it_was(split: Split) -> None:
    def shuffled(case: Case) -> DataLoader[Any]:
        return DataLoader(ids_of(case), case.batch_size, shuffle=True)

    for num_samples, world_size in product((7, 12), (1, 2, 3)):
        case = Case(num_samples, 6, world_size, split, Tail.PAD)
        whole = epochs_from(shuffled, case, None, use_seedable_sampler=True, data_seed=3)
        assert whole[0].steps[0].rows != whole[0].steps[-1].rows
        run_from = partial(epochs_from, shuffled, use_seedable_sampler=True, data_seed=3)
        laws.resume(run_from, case)


def test_a_drawn_seed_is_taken_over() -> None:
    def loader() -> PreparedLoader:
        return prepare_data_loader(DataLoader(numbers(20), 4, shuffle=True))

    first, second = loader(), loader()
    unbroken = [laws.ids_of(batch) for batch in first]
    unbroken += [laws.ids_of(batch) for batch in first]
    third = loader()
    third.load_state_dict({**first.state_dict(), "epoch": 0})
    assert [laws.ids_of(batch) for batch in second] != unbroken[:5]
    assert [laws.ids_of(batch) for batch in third] == unbroken[:5]
    assert [laws.ids_of(batch) for batch in third] == unbroken[5:]


@pytest.mark.parametrize("kind", ["in order", "keyed", "user's sampler", "stream"])
@given(legs=strategies.chains(num_legs=3, tails=(Tail.PAD, Tail.DROP, Tail.UNEVEN)))
def test_on_other_ranks_nothing_is_missed_or_repeated(kind: str, legs: tuple[Leg, ...]) -> None:
    legs = tuple(Leg(laws.as_prepared(leg.case), leg.num_steps) for leg in legs)
    first = legs[0].case
    if kind == "user's sampler":
        order = list(EachEpochAnother(first.num_samples))
    elif kind == "keyed":
        order = list(PermutedSampler(first.num_samples, seed=5))
    else:
        order = list(range(first.num_samples))
    laws.elastic(partial(rest_from, KINDS[kind]), legs, order=order)


def test_five_hundred_random_epochs_stopped_twice() -> None:
    draw = random.Random(7)
    for _ in range(500):
        num_samples = draw.randint(0, 90)
        legs = [
            Leg(
                laws.as_prepared(Case(num_samples, draw.randint(1, 9), draw.randint(1, 7))),
                draw.randint(0, 5),
            )
            for _ in range(3)
        ]
        legs[-1] = Leg(legs[-1].case)
        laws.elastic(
            partial(rest_from, KINDS["keyed"]),
            legs,
            order=list(PermutedSampler(num_samples, seed=5)),
        )


@given(legs=strategies.chains(num_legs=3, tails=(Tail.EXACT,)))
def test_an_exact_rest_is_dealt_or_refused(legs: tuple[Leg, ...]) -> None:
    can_prepare = all(is_possible(leg.case) for leg in legs)
    try:
        laws.elastic(partial(rest_from, KINDS["in order"]), legs)
        refused = ""
    except StateError as error:
        refused = str(error)
    except PlanError:
        assert not can_prepare
        return
    assert not refused or "tail='exact'" in refused


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=14),
    st.sampled_from((Tail.PAD, Tail.DROP, Tail.UNEVEN)),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=2, max_size=3),
)
def test_batches_of_any_size_go_on_on_other_ranks(
    sizes: list[int], tail: Tail, legs: list[tuple[int, int]]
) -> None:
    ids = iter(range(sum(sizes)))
    batches = [[next(ids) for _ in range(size)] for size in sizes]

    def loader(world_size: int, rank: int) -> PreparedLoader:
        user = DataLoader(numbers(sum(sizes)), batch_sampler=batches)
        return prepare_data_loader(
            user, num_processes=world_size, process_index=rank, tail=tail.value
        )

    seen: list[int] = []
    state: Any = None
    for place, (world_size, stop) in enumerate(legs):
        wanted = stop if place < len(legs) - 1 else None
        by_rank = [
            _steps_from(loader(world_size, rank), state, wanted) for rank in range(world_size)
        ]
        for together in zip_longest(*by_rank):
            seen += chain.from_iterable(step[0] for step in together if step is not None)
        state = by_rank[0][-1][1] if by_rank[0] else state
    ids_in_order = list(range(sum(sizes)))
    assert seen == (ids_in_order[: len(seen)] if tail is Tail.DROP else ids_in_order)


def _steps_from(loader: PreparedLoader, state: Any, wanted: int | None) -> list[tuple[Any, Any]]:
    """Read some steps after a state: the real rows of each, and where the loader stood then."""
    if state is not None:
        loader.load_state_dict(state)
    steps = []
    for batch in loader if wanted != 0 else ():
        steps.append((batch.tolist()[: loader.valid_rows], loader.state_dict()))
        if len(steps) == wanted:
            break
    return steps


def test_an_exact_end_over_a_users_batches_may_cut_one() -> None:
    """3 ranks, batch 4, 13 samples: 0-3 / 4-6 / 7-9, then 10 / 11 / 12: 2 batches and 2 rows."""
    case = Case(13, 4, 3, tail=Tail.EXACT)
    make: Make = lambda case: DataLoader(  # noqa: E731
        ids_of(case), batch_sampler=FixedInOrder(13, 4)
    )
    whole = rest_from(make, case, None)
    assert [step.rows for step in whole[2].steps] == [(7, 8, 9), (12,)]
    state = json.loads(whole[0].steps[0].state)
    assert (state["consumed"], state["extra_rows"], state["unit"]) == (2, 2, "batches")
    laws.resume(partial(rest_from, make), case)
    two = rest_from(make, Case(13, 4, 2, tail=Tail.EXACT), whole[0].steps[0].state)
    assert [[step.rows for step in rank.steps] for rank in two] == [[(10, 11)], [(12,)]]


def test_ready_batches_are_counted() -> None:
    """7 ready batches, 2 ranks, 2 steps done: 3 are left, for one rank or three."""
    ready = numbers(14).view(7, 2)

    def loader(world_size: int, rank: int) -> PreparedLoader:
        user = DataLoader(ready, batch_size=None)
        return prepare_data_loader(user, num_processes=world_size, process_index=rank)

    first = loader(2, 0)
    steps = iter(first)
    next(steps), next(steps)
    state = first.state_dict()
    assert (state["unit"], state["consumed"], state["batch_size"]) == ("batches", 4, None)
    for world_size, due in ((1, [[8, 9], [10, 11], [12, 13]]), (3, [[8, 9]])):
        again = loader(world_size, 0)
        again.load_state_dict(state)
        assert [batch.tolist() for batch in again] == due


# The cases of the contract, by hand.


def cases_of(world_size: int, state: dict[str, Any]) -> list[tuple[list[list[int]], list[int]]]:
    found = []
    for rank in range(world_size):
        loader = prepared(KINDS["in order"], Case(24, 2, world_size), rank)
        loader.load_state_dict(state)
        steps = [(batch.tolist(), loader.valid_rows) for batch in loader]
        found.append(([rows for rows, _ in steps], [valid for _, valid in steps]))
    return found


def test_another_number_of_ranks() -> None:
    loader = prepared(KINDS["in order"], Case(24, 2, 2), 0)
    for _ in zip(range(2), loader, strict=False):
        pass
    state = loader.state_dict()
    assert (state["epoch"], state["consumed"], state["unit"]) == (0, 8, "samples")
    assert cases_of(3, state) == [
        ([[8, 9], [14, 15], [20, 21]], [2, 2, 2]),
        ([[10, 11], [16, 17], [22, 23]], [2, 2, 2]),
        ([[12, 13], [18, 19], [0, 1]], [2, 2, 0]),
    ]
    assert cases_of(1, state)[0][0] == [[at, at + 1] for at in range(8, 24, 2)]


def test_another_batch_size() -> None:
    """Of 24, 8 are consumed in batches of 2; in batches of 6 the rest are 8..13, 14..19, 20..23."""
    loader = prepared(KINDS["in order"], Case(24, 2, 2), 0)
    for _ in zip(range(2), loader, strict=False):
        pass
    again = prepared(KINDS["in order"], Case(24, 6, 1, tail=Tail.UNEVEN), 0)
    again.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in again] == [
        list(range(8, 14)),
        list(range(14, 20)),
        list(range(20, 24)),
    ]


def test_in_a_later_epoch() -> None:
    def shuffled(case: Case) -> DataLoader[Any]:
        return DataLoader(ids_of(case), case.batch_size, shuffle=True)

    case, options = Case(16, 2, 2), {"use_seedable_sampler": True, "data_seed": 0}
    orders = [torch.randperm(16, generator=torch.Generator().manual_seed(e)) for e in range(3)]
    due = [orders[1].tolist()[at : at + 2] for at in (4, 8, 12)]
    due += [orders[2].tolist()[at : at + 2] for at in (0, 4, 8, 12)]
    loader = prepared(shuffled, case, 0, **options)
    list(loader)
    next(iter(loader))
    again = prepared(shuffled, case, 0, **options)
    again.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in again] + [batch.tolist() for batch in again] == due


@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_each_moment_has_one_right_answer(tail: str) -> None:
    loader = prepared(KINDS["in order"], Case(7, 2, 2, tail=Tail(tail)), 0)

    def where() -> tuple[int, int, bool]:
        state = loader.state_dict()
        assert loader.state_dict() == state  # twice in a row
        return state["epoch"], state["consumed"], state["is_done"]

    assert where() == (0, 0, False)  # before the first batch
    seen = [where() for _ in loader]
    # The last batch is out: the epoch is done, what is dropped as well.
    assert seen == ([(0, 4, False), (0, 7, True)] if tail == "pad" else [(0, 7, True)])
    assert where() == (1, 0, False)  # after the loop
    next(iter(loader))
    left = where()
    assert left == ((1, 4, False) if tail == "pad" else (1, 7, True))
    passes = iter(loader)
    assert where() == left  # until the next pass begins
    next(passes)
    assert where()[0] == 2
    loader.set_epoch(5)
    passes.close()  # type: ignore[attr-defined]  # a generator
    assert where() == (5, 0, False)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tail", [Tail.PAD, Tail.DROP, Tail.UNEVEN])
def test_while_the_last_batch_is_out_the_rest_is_empty(
    kind: str, tail: Tail, world_size: int
) -> None:
    loader = prepared(KINDS[kind], Case(11, 2, 2, tail=tail), 0)
    state = [loader.state_dict() for _ in loader][-1]
    for rank in range(world_size):
        again = prepared(KINDS[kind], Case(11, 2, world_size, tail=tail), rank)
        again.load_state_dict(state)
        assert again.remaining_steps == 0
        assert again.state_dict()["is_done"]
        assert list(again) == []
        assert (again.epoch, len(list(again))) == (
            1,
            len(list(prepared(KINDS[kind], Case(11, 2, world_size, tail=tail), rank))),
        )


def test_the_epoch_of_a_loaded_state_keeps_the_position() -> None:
    loader = prepared(KINDS["in order"], Case(24, 2, 2), 0)
    next(iter(loader))
    state = {**loader.state_dict(), "epoch": 3}
    for epoch, first in ((3, [4, 5]), (4, [0, 1])):
        again = prepared(KINDS["in order"], Case(24, 2, 2), 0)
        again.load_state_dict(state)
        sampler: Any = again.sampler
        sampler.set_epoch(epoch)  # as Lightning does
        assert again.remaining_steps == (5 if epoch == 3 else 6)
        assert next(iter(again)).tolist() == first
        assert again.epoch == epoch


def test_after_skipping_it_stands_behind_what_was_skipped() -> None:
    loader = prepared(KINDS["in order"], Case(24, 2, 2), 1)
    skipped = skip_first_batches(loader, 2)
    assert isinstance(skipped, DataLoaderShard)
    assert skipped.state_dict()["consumed"] == 8
    next(iter(skipped))
    assert skipped.state_dict()["consumed"] == 12
    again = prepared(KINDS["in order"], Case(24, 2, 2), 1)
    again.load_state_dict(skipped.state_dict())
    assert next(iter(again)).tolist() == [14, 15]


def test_a_pass_under_way_is_left_by_loading() -> None:
    loader = prepared(KINDS["in order"], Case(24, 2, 1, tail=Tail.UNEVEN), 0)
    next(iter(loader))
    state = loader.state_dict()
    steps = iter(loader)
    next(steps), next(steps)
    loader.load_state_dict(state)
    assert loader.state_dict()["consumed"] == 2
    assert next(iter(loader)).tolist() == [2, 3]


# What does not fit.


def some_state(**options: Any) -> dict[str, Any]:
    loader = prepared(KINDS["in order"], Case(24, 2, 2), 0, **options)
    next(iter(loader))
    return loader.state_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "`version` of the state must be 1, got 2. Load it with"),
        ({"num_samples": 25}, "`num_samples` of the state must be that of the loader, 24, got 25."),
        ({"unit": "batches"}, "`unit` of the state must be that of the loader, 'samples', got"),
        ({"sampler": "Other"}, "`sampler` of the state must be that of the loader, 'Sequential"),
        ({"consumed": 25}, "`consumed` of the state must be in [0, 24], got 25. The state is"),
        ({"consumed": -1}, "`consumed` of the state must be an integer of at least 0, got -1."),
        ({"consumed": 2.0}, "`consumed` of the state must be an integer of at least 0, got 2.0."),
        ({"epoch": None}, "`epoch` of the state must be an integer of at least 0, got None."),
        ({"epoch": True}, "`epoch` of the state must be an integer of at least 0, got True."),
        ({"worker_positions": "0:1"}, "`worker_positions` of the state must be pairs of numbers"),
        ({"shard_index": np.zeros(2)}, "`shard_index` of the state must be an integer of at lea"),
        ({"steps": 3}, "`num_shards` of the state must be that of the loader, 2, got None."),
        ({"source": "what"}, "`source` of the state must be as it was saved, got 'what'."),
        ({"source": "json:["}, "`source` of the state must be as it was saved, got text that can"),
        ({"source": "json:[1]"}, "`source` of the state must be as it was saved, got [1]."),
        ({"source": "json:[1, [0], 2]"}, "`source` of the state must be as it was saved, got [1, "),
        ({"source": "json:[1, [2, 2], 2]"}, "`source` of the state must be as it was saved, got"),
        ({"source": "json:[-1, null, 2]"}, "`source` of the state must be as it was saved, got"),
        ({"seed": 2**63}, "`seed` of the state must be an integer of at least -92233720368547"),
        ({"is_done": "no"}, "`is_done` of the state must be True or False, got 'no'. The state is"),
        ({"is_done": torch.ones(2)}, "`is_done` of the state must be True or False, got tensor(["),
        ({"version": torch.ones(2)}, "`version` of the state must be 1, got tensor([1., 1.])."),
        ({"unit": np.zeros(2)}, "`unit` of the state must be that of the loader, 'samples', got a"),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(
    change: dict[str, Any], message: str
) -> None:
    loader = prepared(KINDS["in order"], Case(24, 2, 2), 0)
    next(iter(loader))
    before = loader.state_dict()
    with pytest.raises(StateError) as caught:
        loader.load_state_dict({**some_state(), **change})
    assert str(caught.value).startswith(message)
    assert loader.state_dict() == before


class Resumable(Ids):
    """Ids that know where they stand."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        for number in self.ids[self.at :]:
            self.at = number + 1
            yield number
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_that_no_longer_has_a_state_is_read_through(num_workers: int) -> None:
    def over(stream: Ids) -> PreparedLoader:
        loader: DataLoader[Any] = DataLoader(stream, 2, num_workers=num_workers)
        return prepare_data_loader(loader, worker_split="shardplug")

    loader = over(Resumable(7))
    next(iter(loader))
    state = loader.state_dict()
    assert state["source"] is not None
    again = over(Ids(7))
    again.load_state_dict({**state, "sampler": "Ids"})
    assert [batch.tolist() for batch in again] == [[2, 3], [4, 5], [6]]


class Counted:
    """Batches of two, whose number is not known."""

    batch_size = 2

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3]])


def test_a_position_behind_the_last_batch_is_no_endless_walk() -> None:
    def over() -> PreparedLoader:
        return prepare_data_loader(DataLoader(numbers(4), batch_sampler=Counted()))

    loader = over()
    loader.load_state_dict({**over().state_dict(), "consumed": 2**63 - 1})
    assert list(loader) == []


@pytest.mark.parametrize("garbage", [None, [], "state", 3, pickle.dumps({})])
def test_garbage_is_no_state(garbage: Any) -> None:
    with pytest.raises(StateError, match=r"^`state` must be what state_dict\(\) of the loader ret"):
        prepared(KINDS["in order"], Case(24, 2, 2), 0).load_state_dict(garbage)


def test_a_state_with_a_field_less_is_no_state() -> None:
    state = some_state()
    del state["consumed"]
    with pytest.raises(StateError, match=r"got one without \['consumed'\]. Pass it as it was sav"):
        prepared(KINDS["in order"], Case(24, 2, 2), 0).load_state_dict(state)


def test_another_seed_than_the_one_that_is_pinned() -> None:
    def shuffled(**options: Any) -> PreparedLoader:
        user = DataLoader(numbers(24), 2, shuffle=True, **options.pop("user", {}))
        return prepare_data_loader(user, **options)

    pinned = {"use_seedable_sampler": True, "data_seed": 3}
    state = shuffled(**{**pinned, "data_seed": 4}).state_dict()
    with pytest.raises(StateError, match=r"^`seed` of the state must be that of the loader, 3, go"):
        shuffled(**pinned).load_state_dict(state)
    generator = torch.Generator().manual_seed(3)
    with pytest.raises(StateError, match=r"^`seed` of the state must be that of the loader, 3, go"):
        shuffled(user={"generator": generator}).load_state_dict(state)
    shuffled().load_state_dict(state)  # a drawn one gives way
    sampler = PermutedSampler(24, seed=8)
    own = prepare_data_loader(DataLoader(numbers(24), 2, sampler=sampler))
    other = prepare_data_loader(DataLoader(numbers(24), 2, sampler=PermutedSampler(24, seed=9)))
    with pytest.raises(StateError, match=r"^`seed` of the state must be that of the loader, 9, go"):
        other.load_state_dict(own.state_dict())


def test_a_sampler_that_draws_another_order_is_found_out() -> None:
    class Unseeded(EachEpochAnother):
        def __iter__(self) -> Iterator[int]:
            ids = list(range(self.num_ids))
            random.shuffle(ids)
            return iter(ids)

    def loader() -> PreparedLoader:
        return prepare_data_loader(DataLoader(numbers(24), 4, sampler=Unseeded(24)))

    first, second = loader(), loader()
    next(iter(first))
    second.load_state_dict(first.state_dict())
    with pytest.raises(StateError, match=r"^`sampler` must draw the order that it drew when the s"):
        next(iter(second))
    third = loader()
    list(third)
    second.load_state_dict(third.state_dict())  # a new epoch has no order to keep to
    next(iter(second))


def test_an_exact_rest_that_is_too_small_for_the_ranks() -> None:
    loader = prepared(KINDS["in order"], Case(14, 4, 3, tail=Tail.EXACT), 0)
    next(iter(loader))  # 12 of 14
    with pytest.raises(
        StateError, match=r"^`consumed` of the state must leave what this loader ca"
    ):
        prepared(KINDS["in order"], Case(14, 4, 5, tail=Tail.EXACT), 0).load_state_dict(
            {**loader.state_dict(), "consumed": 11}
        )


# Sizes and speed that do not grow.


@pytest.mark.parametrize("num_samples", [10, 10**12])
def test_a_state_is_small_and_says_what_it_must(num_samples: int) -> None:
    class Numbers(torch.utils.data.Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

        def __len__(self) -> int:
            return num_samples

    sampler = PermutedSampler(num_samples, seed=2**63 - 1)
    loader = prepare_data_loader(
        DataLoader(Numbers(), 3, sampler=sampler), num_processes=1000, process_index=1
    )
    next(iter(loader))
    state = loader.state_dict()
    assert len(json.dumps(state)) < 1024
    assert {"version", "epoch", "consumed", "unit", "seed", "num_samples"} <= state.keys()
    assert all(isinstance(value, (int, str, type(None))) for value in state.values())


def test_nothing_is_read_on_the_way() -> None:
    class Watched(torch.utils.data.Dataset[int]):
        def __init__(self) -> None:
            self.asked: list[int] = []

        def __getitem__(self, index: int) -> int:
            self.asked.append(index)
            return index

        def __len__(self) -> int:
            return 1000

    collated: list[Any] = []

    def collate(samples: list[int]) -> Any:
        collated.append(samples)
        return default_collate(samples)

    watched = Watched()
    loader = prepare_data_loader(DataLoader(watched, 10, collate_fn=collate))
    loader.load_state_dict({**loader.state_dict(), "consumed": 900})
    assert next(iter(loader)).tolist() == list(range(900, 910))
    assert (watched.asked, collated) == (list(range(900, 910)), [list(range(900, 910))])


def test_a_batch_sampler_of_torchs_own_is_looked_through() -> None:
    batches = BatchSampler(range(24), 4, drop_last=True)
    loader = prepare_data_loader(DataLoader(numbers(24), batch_sampler=batches))
    for _ in zip(range(2), loader, strict=False):
        pass
    again = prepare_data_loader(DataLoader(numbers(24), batch_sampler=batches))
    again.load_state_dict(loader.state_dict())
    assert next(iter(again)).tolist() == [8, 9, 10, 11]
