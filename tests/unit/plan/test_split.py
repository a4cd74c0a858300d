"""The plan of a sized epoch against dealing by hand: every small case, and single large ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardplug.errors import PlanError
from shardplug.plan.shard import Shard
from shardplug.plan.split import ShardPlan, Split, Tail
from tests import laws, reference, strategies
from tests.laws import Case, Leg

MODES = list(product(Split, Tail))


def grid(
    split: Split, tail: Tail, *, samples: int = 42, sizes: int = 8, worlds: int = 5
) -> Iterator[Case]:
    """Every small case of a mode, those included that cannot be dealt."""
    for numbers in product(range(samples), range(1, sizes + 1), range(1, worlds + 1)):
        case = Case(*numbers, split, tail)
        if case.can_split:
            yield case


def rows_of(case: Case) -> list[list[list[int]]]:
    return [[list(step.rows) for step in rank.steps] for rank in laws.plan_run(case)]


# Worked out by hand, from the sentences of the specification.


@pytest.mark.parametrize(
    ("case", "rows", "valid"),
    [
        (Case(5, 2, 2), [[[0, 1], [4, 0]], [[2, 3], [1, 2]]], [[2, 1], [2, 0]]),
        (Case(5, 2, 2, tail=Tail.DROP), [[[0, 1]], [[2, 3]]], [[2], [2]]),
        (Case(5, 2, 2, tail=Tail.UNEVEN), [[[0, 1], [4]], [[2, 3]]], [[2, 1], [2]]),
        (Case(5, 2, 2, tail=Tail.EXACT), [[[0, 1], [3]], [[2], [4]]], [[2, 1], [1, 1]]),
        (Case(8, 4, 2), [[[0, 1, 2, 3]], [[4, 5, 6, 7]]], [[4], [4]]),
        (Case(8, 4, 2, Split.SLICE), [[[0, 1], [4, 5]], [[2, 3], [6, 7]]], [[2, 2], [2, 2]]),
        (Case(6, 4, 2, Split.SLICE, Tail.UNEVEN), [[[0, 1], [4, 5]], [[2, 3]]], [[2, 2], [2]]),
        (
            Case(10, 4, 3, tail=Tail.EXACT),
            [[[0, 1, 2, 3]], [[4, 5, 6]], [[7, 8, 9]]],
            [[4], [3], [3]],
        ),
        (
            Case(13, 4, 3, tail=Tail.EXACT),
            [[[0, 1, 2, 3], [10]], [[4, 5, 6], [11]], [[7, 8, 9], [12]]],
            [[4, 1], [3, 1], [3, 1]],
        ),
        (Case(1, 2, 3), [[[0, 0]], [[0, 0]], [[0, 0]]], [[1], [0], [0]]),
        (Case(0, 2, 2), [[], []], [[], []]),
        (Case(0, 2, 2, tail=Tail.EXACT), [[], []], [[], []]),
    ],
)
def test_examples_by_hand(case: Case, rows: list[list[list[int]]], valid: list[list[int]]) -> None:
    assert rows_of(case) == rows
    run = laws.plan_run(case)
    assert [[step.valid_rows for step in rank.steps] for rank in run] == valid


# Every small case, all shards at once.


@pytest.mark.parametrize(("split", "tail"), MODES)
def test_every_small_epoch_is_dealt_as_by_hand(split: Split, tail: Tail) -> None:
    for case in grid(split, tail):
        try:
            expected = reference.epoch(case)
        except reference.Impossible:
            with pytest.raises(PlanError, match="tail='exact'"):
                case.plans()
        else:
            assert laws.one_pass(laws.plan_run, case) == expected, case


@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize("tail", [Tail.PAD, Tail.UNEVEN, Tail.DROP])
def test_every_small_epoch_is_that_of_a_batch_sampler_shard(split: Split, tail: Tail) -> None:
    for case in grid(split, tail, samples=26, sizes=6):
        batches = reference.chunks(range(case.num_samples), case.batch_size)
        assert rows_of(case) == reference.classic(
            batches,
            case.world_size,
            batch_size=case.batch_size,
            split_batches=case.split_batches,
            even_batches=tail is Tail.PAD,
            drop_last=tail is Tail.DROP,
        ), case


@pytest.mark.parametrize(("split", "tail"), MODES)
def test_full_steps_and_the_remainder_are_those_seen(split: Split, tail: Tail) -> None:
    for case in grid(split, tail, samples=26, sizes=6, worlds=4):
        try:
            dealt = reference.rounds(case)
        except reference.Impossible:
            continue
        real = [sum(len(hand.rows) for hand in round_) for round_ in dealt]
        full = [rows == case.global_batch_size for rows in real]
        for plan in case.plans():
            assert plan.num_full_steps == sum(full), case
            assert plan.remainder == (-1 if all(full) else real[-1]), case
            assert plan.cursor(0) == (0 if plan.num_steps else case.num_samples), case
            rows = case.shard_batch_size
            for step in range(plan.num_full_steps):
                start = step * case.global_batch_size + plan.shard.index * rows
                assert plan.positions(step) == range(start, start + rows), case


# The rest of an epoch.


@pytest.mark.parametrize(("split", "tail"), MODES)
def test_stopped_at_any_step_the_rest_is_that_of_the_unbroken_run(split: Split, tail: Tail) -> None:
    for case in grid(split, tail, samples=22, sizes=5, worlds=4):
        try:
            reference.rounds(case)
        except reference.Impossible:
            continue
        laws.resume(laws.plan_run_from, case)


@pytest.mark.parametrize(("split", "tail"), MODES)
def test_any_rest_is_dealt_as_by_hand(split: Split, tail: Tail) -> None:
    for case in grid(split, tail, samples=14, sizes=4, worlds=4):
        for consumed in range(case.num_samples + 1):
            try:
                expected = reference.epoch(case, consumed=consumed)
            except reference.Impossible:
                with pytest.raises(PlanError, match="tail='exact'"):
                    laws.plan_run_from(case, consumed)
            else:
                run = laws.plan_run_from(case, consumed)
                assert run == expected, (case, consumed)
                laws.tile(run, case, consumed=consumed)
                laws.padding(run, case, consumed=consumed)
                laws.valid_rows(run, case, consumed=consumed)
                laws.prefix(run, case, consumed=consumed)


def test_by_hand_24_samples_stopped_on_two_ranks_go_on_on_three_and_on_one() -> None:
    stopped = ShardPlan(24, 2, Shard(0, 2)).cursor(2)
    rest = [ShardPlan(24, 2, Shard(1, 2)).seek(stopped, shard=Shard(i, 3)) for i in range(3)]
    assert [[list(plan.positions(step)) for step in range(3)] for plan in rest] == [
        [[8, 9], [14, 15], [20, 21]],
        [[10, 11], [16, 17], [22, 23]],
        [[12, 13], [18, 19], [0, 1]],
    ]
    assert [plan.valid_rows(2) for plan in rest] == [2, 2, 0]
    assert [plan.num_steps for plan in rest] == [3, 3, 3]
    alone = rest[2].seek(stopped, shard=Shard(0, 1))
    assert [list(alone.positions(step)) for step in range(alone.num_steps)] == [
        [first, first + 1] for first in range(8, 24, 2)
    ]


def is_refused(legs: tuple[Leg, ...]) -> bool:
    """Whether a rest is too small for its ranks; each leg's start is worked out by hand."""
    consumed = 0
    for leg in legs:
        try:
            run = reference.epoch(leg.case, consumed=consumed)
        except reference.Impossible:
            return True
        steps = run[0].steps[: leg.num_steps]
        if steps:
            consumed = steps[-1].consumed or 0
    return False


def hold_or_refuse(legs: tuple[Leg, ...]) -> bool:
    if is_refused(legs):
        with pytest.raises(PlanError, match="tail='exact'"):
            laws.elastic(laws.plan_run_from, legs)
        return False
    laws.elastic(laws.plan_run_from, legs)
    return True


@pytest.mark.parametrize(("split", "tail"), MODES)
def test_another_world_twice_in_random_epochs(split: Split, tail: Tail) -> None:
    rng = random.Random(f"{split} {tail}")
    num_held = 0
    for _ in range(64):
        num_samples = rng.randrange(0, 80)
        worlds = [rng.randrange(1, 6) for _ in range(3)]
        sizes = [rng.randrange(1, 7) * (world if split is Split.SLICE else 1) for world in worlds]
        stops = [rng.randrange(0, 6), rng.randrange(0, 6), None]
        legs = tuple(
            Leg(Case(num_samples, size, world, split, tail), stop)
            for size, world, stop in zip(sizes, worlds, stops, strict=True)
        )
        num_held += hold_or_refuse(legs)
    assert num_held > 30


@given(strategies.chains(num_legs=4))
@example((Leg(Case(24, 2, 2), 2), Leg(Case(24, 2, 3))))
@example((Leg(Case(13, 4, 3, tail=Tail.EXACT), 1), Leg(Case(13, 4, 2, tail=Tail.EXACT))))
@example((Leg(Case(9, 2, 2, tail=Tail.DROP), 2), Leg(Case(9, 1, 1, tail=Tail.DROP))))
@example((Leg(Case(5, 2, 2, tail=Tail.UNEVEN), 1), Leg(Case(5, 2, 1, tail=Tail.UNEVEN))))
def test_any_chain_of_worlds_sees_each_sample_once(legs: tuple[Leg, ...]) -> None:
    hold_or_refuse(legs)


def test_seek_keeps_what_is_not_given() -> None:
    plan = ShardPlan(40, 6, Shard(1, 3), split=Split.SLICE, tail=Tail.UNEVEN)
    assert plan.seek(12) == replace(plan, start=12)
    assert plan.seek(12).seek(0) == plan
    assert plan.seek(12, shard=Shard(0, 2)) == replace(plan, start=12, shard=Shard(0, 2))
    assert plan.seek(12, batch_size=9) == replace(plan, start=12, batch_size=9)


# Numbers too large to walk.


@given(strategies.large_cases(), st.integers(0, 2**62))
@example(Case(2**62, 512, 10**6), 10**6 - 1)
@example(Case(2**62 - 1, 7, 999_983, tail=Tail.EXACT), 500_000)
@example(Case(2 * 7 * 999_983 + 1, 7, 999_983, tail=Tail.EXACT), 500_000)
@example(Case(2**62, 512 * 10**6, 10**6, Split.SLICE, Tail.UNEVEN), 0)
def test_single_steps_of_large_epochs(case: Case, number: int) -> None:
    """Neighbours touch; in each step the first begins at the cursor, the last ends at the next."""
    ranks = sorted({0, number % case.world_size, case.world_size - 1})
    plans = {
        rank: ShardPlan(
            case.num_samples, case.batch_size, Shard(rank, case.world_size), case.split, case.tail
        )
        for near in ranks
        for rank in {near, min(near + 1, case.world_size - 1)}
    }
    first, last = plans[0], plans[case.world_size - 1]
    full, rest = divmod(case.num_samples, case.global_batch_size)
    assert first.num_steps == full + (rest > 0 and case.tail is not Tail.DROP)
    assert first.cursor(first.num_steps) == case.num_samples
    steps = {0, number % (full + 1), full - 2, full - 1, full}
    for step in sorted(step for step in steps if 0 <= step < first.num_steps):
        assert first.positions(step)[0] == first.cursor(step)
        for rank in ranks:
            own, after = plans[rank], plans[min(rank + 1, case.world_size - 1)]
            if own is not after and step < after.num_steps and after.valid_rows(step):
                assert own.valid_rows(step) == len(own.positions(step))
                assert own.positions(step)[-1] + 1 == after.positions(step)[0]
        end = first.cursor(step + 1)
        if case.tail is Tail.DROP and step == first.num_steps - 1:
            end = full * case.global_batch_size
        if step < full - 1:
            assert end == first.cursor(step) + case.global_batch_size
        if step < last.num_steps and (real := last.valid_rows(step)):
            assert last.positions(step)[real - 1] + 1 == end


# A plan without an end.


@given(strategies.cases(max_samples=0), st.integers(0, 10**9), st.integers(0, 10**12))
def test_a_plan_of_a_stream_tells_full_steps_for_ever(case: Case, start: int, step: int) -> None:
    for shard in case.shards():
        plan = ShardPlan(None, case.batch_size, shard, case.split, case.tail).seek(start)
        sized = ShardPlan(10**25, case.batch_size, shard, case.split, Tail.DROP, start)
        assert plan.positions(step) == sized.positions(step)
        assert plan.valid_rows(step) == case.shard_batch_size
        assert plan.cursor(step) == sized.cursor(step)


# Bad input.


def message_of(*numbers: int | None, split: Split = Split.WHOLE, tail: Tail = Tail.PAD) -> str:
    num_samples, batch_size, count, start = numbers
    assert batch_size is not None
    assert count is not None
    assert start is not None
    with pytest.raises(PlanError) as caught:
        ShardPlan(num_samples, batch_size, Shard(0, count), split=split, tail=tail, start=start)
    return str(caught.value)


def test_numbers_out_of_range_are_told_at_once() -> None:
    assert message_of(4, 0, 1, 0) == "`batch_size` must be at least 1, got 0."
    assert message_of(-1, 2, 1, 0) == "`num_samples` must be zero or more, got -1."
    assert message_of(4, 2, 1, 5) == "`consumed` must be in [0, 4], got 5."
    assert message_of(4, 2, 1, -1) == "`consumed` must be in [0, 4], got -1."
    assert message_of(None, 2, 1, -1) == "`consumed` must be zero or more, got -1."


def test_a_batch_size_that_the_shards_do_not_divide_cannot_be_split() -> None:
    assert message_of(40, 30, 4, 0, split=Split.SLICE) == (
        "`batch_size` must be a multiple of the 4 shards when each batch is split, got 30. "
        "Use 28 or 32, or split_batches=False."
    )
    assert message_of(None, 3, 4, 0, split=Split.SLICE) == (
        "`batch_size` must be a multiple of the 4 shards when each batch is split, got 3. "
        "Use 4, or split_batches=False."
    )


def test_an_exact_end_that_cannot_be_is_told_at_once() -> None:
    assert message_of(2, 4, 3, 0, tail=Tail.EXACT) == (
        "`num_samples` must be 0 or at least the 3 shards with tail='exact', got 2. "
        'Use fewer ranks, tail="pad" or tail="uneven".'
    )
    assert message_of(7, 1, 3, 0, tail=Tail.EXACT) == (
        "`num_samples` must be a multiple of the 3 shards with tail='exact' and one row per shard "
        'and step, got 7. Use a larger batch size, tail="pad" or tail="uneven".'
    )
    assert message_of(7, 3, 3, 0, split=Split.SLICE, tail=Tail.EXACT).startswith(
        "`num_samples` must be a multiple of the 3 shards"
    )
    # Of a rest it is the rest that counts.
    assert "got 2." in message_of(14, 4, 3, 12, tail=Tail.EXACT)


@pytest.mark.parametrize("step", [-1, 3, 4])
def test_a_step_out_of_range_is_refused(step: int) -> None:
    plan = ShardPlan(12, 2, Shard(1, 2))
    expected = f"`step` must be in [0, 3), got {step}."
    with pytest.raises(PlanError) as caught:
        plan.positions(step)
    assert str(caught.value) == expected
    with pytest.raises(PlanError) as caught:
        plan.valid_rows(step)
    assert str(caught.value) == expected


def test_a_cursor_out_of_range_is_refused() -> None:
    plan = ShardPlan(12, 2, Shard(1, 2))
    for step in (-1, 4):
        with pytest.raises(PlanError) as caught:
            plan.cursor(step)
        assert str(caught.value) == f"`step` must be in [0, 3], got {step}."


def test_of_a_stream_only_negative_steps_are_out_of_range() -> None:
    plan = ShardPlan(None, 2, Shard(1, 2))
    for ask in (plan.positions, plan.valid_rows, plan.cursor):
        with pytest.raises(PlanError) as caught:
            ask(-1)
        assert str(caught.value) == "`step` must be zero or more, got -1."


@pytest.mark.parametrize("name", ["num_steps", "num_full_steps", "remainder"])
def test_counts_need_a_known_number_of_samples(name: str) -> None:
    with pytest.raises(PlanError) as caught:
        getattr(ShardPlan(None, 2, Shard(0, 1)), name)
    assert str(caught.value) == "`num_samples` must be known to count steps, got None."
