"""Dealing out the batches of a batch sampler that cannot be seen through."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import chain, product, zip_longest
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardplug.errors import PlanError
from shardplug.plan.batches import deal_batches
from shardplug.plan.deal import Part
from shardplug.plan.shard import Shard
from shardplug.plan.split import Split, Tail
from tests import laws, reference
from tests.laws import Case, RankRun, Run, Step
from tests.strategies import batch_lists, batches_of

MODES = list(product(Split, Tail))
CLASSIC_TAILS = [Tail.PAD, Tail.DROP, Tail.UNEVEN]
Batches = Sequence[Sequence[int]]


def drain(parts: Generator[Part[Any], None, int]) -> tuple[list[Part[Any]], int]:
    """Run a generator to its end: what it yields, and what it returns."""
    yielded: list[Part[Any]] = []
    while True:
        try:
            yielded.append(next(parts))
        except StopIteration as end:
            return yielded, end.value


def run_of(
    batches: Batches,
    count: int,
    *,
    batch_size: int | None = None,
    split: Split = Split.WHOLE,
    tail: Tail = Tail.PAD,
) -> Run:
    ranks: list[RankRun] = []
    for index in range(count):
        parts, num_batches = drain(
            deal_batches(
                iter(batches),
                batch_size=batch_size,
                shard=Shard(index, count),
                split=split,
                tail=tail,
            )
        )
        assert num_batches == len(batches)
        ranks.append(laws.parts_rank(parts))
    return tuple(ranks)


def rows_of(run: Run) -> list[list[list[int]]]:
    return [[list(step.rows) for step in rank.steps] for rank in run]


def in_batches(run: Run, case: Case, num_batches: int) -> Run:
    """The same run with its cursor in whole batches instead of samples."""

    def recount(step: Step) -> Step:
        done = step.consumed or 0
        whole = num_batches if done == case.num_samples else done // case.batch_size
        return Step(step.rows, step.valid_rows, whole)

    return tuple(RankRun(tuple(map(recount, rank.steps)), None) for rank in run)


# Batches that keep their declared size.


@pytest.mark.parametrize(("split", "tail"), MODES)
def test_fixed_batches_are_dealt_as_the_plan_deals_their_rows(split: Split, tail: Tail) -> None:
    for numbers in product(range(28), range(1, 7), range(1, 5)):
        case = Case(*numbers, split, tail)
        if not case.can_split:
            continue
        batches = reference.chunks(range(case.num_samples), case.batch_size)
        options = {"batch_size": case.batch_size, "split": split, "tail": tail}
        try:
            expected = in_batches(reference.stream(case), case, len(batches))
        except reference.Impossible:
            with pytest.raises(PlanError, match="tail='exact'"):
                run_of(batches, case.world_size, **options)  # type: ignore[arg-type]
        else:
            run = run_of(batches, case.world_size, **options)  # type: ignore[arg-type]
            assert run == expected, case


@pytest.mark.parametrize("tail", CLASSIC_TAILS)
@pytest.mark.parametrize("split", Split)
def test_fixed_batches_are_dealt_as_users_know_it(split: Split, tail: Tail) -> None:
    for num_samples, size, count in product(range(24), range(1, 5), range(1, 5)):
        batch_size = size * count if split is Split.SLICE else size
        batches = reference.chunks(range(num_samples), batch_size)
        run = run_of(batches, count, batch_size=batch_size, split=split, tail=tail)
        assert rows_of(run) == reference.classic(
            batches,
            count,
            batch_size=batch_size,
            split_batches=split is Split.SLICE,
            even_batches=tail is Tail.PAD,
            drop_last=tail is Tail.DROP,
        )


# Batches of varying size, declared or not.


def check(batches: Batches, count: int, declared: int | None, tail: Tail) -> None:
    """Hold whole dealing against the definition, whatever size was declared."""
    if reference.is_fixed(batches, declared):
        return
    if tail is Tail.EXACT:
        check_exact(batches, count, declared)
    else:
        run = run_of(batches, count, batch_size=declared, tail=tail)
        assert run == reference.varying(batches, count, tail), (batches, declared)


def check_exact(batches: Batches, count: int, declared: int | None) -> None:
    """Pieces of one batch each, none empty, as even as can be; the cursor counts whole batches."""
    where = (batches, count, declared)
    try:
        groups = reference.exact_groups(batches, count)
    except reference.Impossible:
        with pytest.raises(PlanError, match="must leave at least"):
            run_of(batches, count, batch_size=declared, tail=Tail.EXACT)
        return
    run = run_of(batches, count, batch_size=declared, tail=Tail.EXACT)
    dealt = list(laws.rounds(run))
    assert [len(round_) for round_ in dealt] == [count] * len(groups), where
    owner = {row: number for number, batch in enumerate(batches) for row in batch}
    done = 0
    for group, round_ in zip(groups, dealt, strict=True):
        done += len(group)
        pieces = [step.rows for step in round_]
        assert list(chain(*pieces)) == reference.flat(group), where
        assert all(len({owner[row] for row in piece}) == 1 for piece in pieces), where
        assert max(map(len, pieces)) == reference.fairest([len(own) for own in group], count), where
        for batch in group:
            sizes = {len(piece) for piece in pieces if piece[0] in batch}
            assert max(sizes) - min(sizes) <= 1, where
        assert [step.valid_rows for step in round_] == [len(piece) for piece in pieces], where
        assert [step.consumed for step in round_] == [done] * count, where


@pytest.mark.parametrize("tail", Tail)
@pytest.mark.parametrize("declared", [None, 1, 2, 3, 4])
def test_every_small_run_of_varying_batches(tail: Tail, declared: int | None) -> None:
    for num_batches in range(6):
        for sizes in product((1, 2, 3), repeat=num_batches):
            batches = batches_of(list(sizes))
            for count in (1, 2, 3):
                check(batches, count, declared, tail)


@given(
    batch_lists(), st.integers(1, 6), st.none() | st.integers(-1, 5), st.sampled_from(list(Tail))
)
@example(batches_of([4, 2, 4, 2, 4, 4]), 2, 4, Tail.PAD)
@example(batches_of([2, 2, 1, 2]), 2, 2, Tail.PAD)
@example(batches_of([2, 2, 2, 3]), 2, 2, Tail.DROP)
@example(batches_of([3, 1, 3, 1]), 3, None, Tail.EXACT)
@example(batches_of([2, 2, 2, 2]), 4, 0, Tail.UNEVEN)
def test_varying_batches(
    batches: list[list[int]], count: int, declared: int | None, tail: Tail
) -> None:
    check(batches, count, declared, tail)


def test_by_hand_a_declared_size_that_does_not_hold_is_not_trusted() -> None:
    run = run_of(batches_of([4, 2, 4, 2, 4, 4]), 2, batch_size=4)
    assert rows_of(run) == [
        [[0, 1, 2, 3], [6, 7, 8, 9], [12, 13, 14, 15]],
        [[4, 5], [10, 11], [16, 17, 18, 19]],
    ]
    assert [[step.valid_rows for step in rank.steps] for rank in run] == [[4, 4, 4], [2, 2, 4]]


def test_by_hand_a_batch_larger_than_declared_is_kept_whole() -> None:
    run = run_of(batches_of([2, 2, 2, 3]), 2, batch_size=2)
    assert rows_of(run) == [[[0, 1], [4, 5]], [[2, 3], [6, 7, 8]]]


def test_by_hand_missing_batches_are_copies_of_the_first() -> None:
    run = run_of(batches_of([1, 2, 3, 4]), 3)
    assert rows_of(run) == [[[0], [6, 7, 8, 9]], [[1, 2], [0]], [[3, 4, 5], [1, 2]]]
    assert [[step.valid_rows for step in rank.steps] for rank in run] == [[1, 4], [2, 0], [3, 0]]


def test_by_hand_fewer_batches_than_shards() -> None:
    batches = batches_of([1, 2])
    assert rows_of(run_of(batches, 5)) == [[[0]], [[1, 2]], [[0]], [[1, 2]], [[0]]]
    assert rows_of(run_of(batches, 3, tail=Tail.DROP)) == [[], [], []]
    assert rows_of(run_of(batches, 3, tail=Tail.UNEVEN)) == [[[0]], [[1, 2]], []]
    assert rows_of(run_of(batches, 3, tail=Tail.EXACT)) == [[[0]], [[1]], [[2]]]


def test_by_hand_an_exact_end_cuts_the_last_batches_only() -> None:
    assert rows_of(run_of(batches_of([4, 2, 5]), 2, tail=Tail.EXACT)) == [
        [[0, 1, 2, 3], [6, 7, 8]],
        [[4, 5], [9, 10]],
    ]
    # One row is too few for two shards: the round before gives its last batch.
    assert rows_of(run_of(batches_of([4, 2, 1]), 2, tail=Tail.EXACT)) == [
        [[0, 1], [4, 5]],
        [[2, 3], [6]],
    ]


@pytest.mark.parametrize(("split", "tail"), MODES)
def test_no_batches_no_steps(split: Split, tail: Tail) -> None:
    assert rows_of(run_of([], 3, batch_size=3, split=split, tail=tail)) == [[], [], []]
    if split is Split.WHOLE:
        assert rows_of(run_of([], 3, tail=tail)) == [[], [], []]


# Going on after whole batches.


@given(batch_lists(), st.integers(1, 4), st.sampled_from([Tail.DROP, Tail.UNEVEN, Tail.EXACT]))
@example(batches_of([1, 1, 1]), 2, Tail.EXACT)
@example(batches_of([4, 2, 1]), 2, Tail.EXACT)
def test_the_rest_after_any_step_is_that_of_the_unbroken_run(
    batches: list[list[int]], count: int, tail: Tail
) -> None:
    def run_from(_: Case, consumed: int | None) -> Run:
        rest = run_of(batches[consumed or 0 :], count, tail=tail)
        return tuple(
            RankRun(
                tuple(
                    Step(step.rows, step.valid_rows, done, done)
                    for step in rank.steps
                    for done in [(consumed or 0) + (step.consumed or 0)]
                ),
                None,
            )
            for rank in rest
        )

    if tail is Tail.EXACT:
        try:
            reference.exact_groups(batches, count)
        except reference.Impossible:
            return
    laws.resume(run_from, Case(sum(map(len, batches)), 1, count, Split.WHOLE, tail))


# What a sampler may be, and what it may do.


def test_one_list_object_may_be_used_again_and_again() -> None:
    def reused() -> Iterator[list[int]]:
        batch: list[int] = []
        for rows in ([0, 1], [2, 3], [4, 5], [6, 7], [8]):
            batch[:] = rows
            yield batch

    for declared, tail in product((None, 2), Tail):
        for index in range(2):
            shard = Shard(index, 2)
            parts = deal_batches(reused(), batch_size=declared, shard=shard, tail=tail)
            fresh = deal_batches(
                [[0, 1], [2, 3], [4, 5], [6, 7], [8]], batch_size=declared, shard=shard, tail=tail
            )
            assert list(parts) == list(fresh)


@pytest.mark.parametrize("declared", [None, 2])
def test_batches_may_be_generators_or_tuples(declared: int | None) -> None:
    lists = [[0, 1], [2, 3], [4]]
    expected = rows_of(run_of(lists, 2, batch_size=declared))
    for index in range(2):
        shard = Shard(index, 2)
        for kind in (iter, tuple):
            batches: Iterable[Iterable[int]] = map(kind, lists)
            parts = deal_batches(batches, batch_size=declared, shard=shard)
            assert [list(part.rows) for part in parts] == expected[index]


def test_ready_made_batches_keep_their_type_as_padding_too() -> None:
    parts = list(deal_batches([(0, 1), (2,), (3,)], batch_size=None, shard=Shard(1, 2)))
    assert [part.rows for part in parts] == [(2,), (0, 1)]


@pytest.mark.parametrize("declared", [None, 2])
@pytest.mark.parametrize("tail", Tail)
def test_the_lists_of_the_caller_stay_as_they_are(declared: int | None, tail: Tail) -> None:
    stored = [[0, 1], [2, 3], [4]]

    def act() -> None:
        for index in range(2):
            for part in deal_batches(stored, batch_size=declared, shard=Shard(index, 2), tail=tail):
                rows = part.rows
                assert isinstance(rows, list)
                rows.extend(rows)

    laws.hands_off(act, stored)
    assert stored == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("declared", [None, 2])
def test_padding_is_the_start_of_the_epoch_whatever_is_done_to_a_batch(
    declared: int | None,
) -> None:
    kept = []
    for part in deal_batches([[0, 1], [2, 3], [4]], batch_size=declared, shard=Shard(0, 2)):
        kept.append(list(part.rows))
        assert isinstance(part.rows, list)
        part.rows.clear()
    assert kept == [[0, 1], [4] if declared is None else [4, 0]]


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("tail", CLASSIC_TAILS)
@pytest.mark.parametrize("declared", [None, 2])
def test_a_full_round_goes_out_before_the_next_batch_is_asked_for(
    declared: int | None, tail: Tail, rank: int
) -> None:
    asked = 0

    def source() -> Iterator[list[int]]:
        nonlocal asked
        for number in range(11):
            asked += 1
            yield [number, number]

    parts = deal_batches(source(), batch_size=declared, shard=Shard(rank, 3), tail=tail)
    for number, _ in zip(range(3), parts, strict=False):
        assert asked == (number + 1) * 3


# Bad input.


@pytest.mark.parametrize("declared", [None, 0, -2])
@pytest.mark.parametrize("batches", [[], [[0, 1]]])
def test_batches_without_a_declared_size_cannot_be_split(
    batches: list[list[int]], declared: int | None
) -> None:
    with pytest.raises(PlanError) as caught:
        run_of(batches, 2, batch_size=declared, split=Split.SLICE)
    assert str(caught.value) == (
        "`batch_sampler` must declare a fixed `batch_size` for its batches to be split, got "
        f"{declared}. Pass split_batches=False."
    )


@pytest.mark.parametrize("tail", Tail)
@pytest.mark.parametrize(("sizes", "odd"), [([4, 2, 4], 2), ([4, 4, 5], 5), ([3, 3], 3)])
def test_batches_of_varying_size_cannot_be_split(sizes: list[int], odd: int, tail: Tail) -> None:
    for index in range(2):
        parts = deal_batches(
            batches_of(sizes), batch_size=4, shard=Shard(index, 2), split=Split.SLICE, tail=tail
        )
        with pytest.raises(PlanError) as caught:
            list(parts)
        assert str(caught.value) == (
            "`batch_sampler` must yield batches of its declared size 4 for them to be split, got "
            f"one of {odd} rows. Pass split_batches=False."
        )


def test_a_size_that_the_shards_do_not_divide_cannot_be_split() -> None:
    with pytest.raises(PlanError, match="`batch_size` must be a multiple of the 3 shards"):
        run_of([[0, 1, 2, 3]], 3, batch_size=4, split=Split.SLICE)


def test_an_exact_end_with_too_few_rows_is_told() -> None:
    for index in range(3):
        parts = deal_batches([[0], [1]], batch_size=None, shard=Shard(index, 3), tail=Tail.EXACT)
        with pytest.raises(PlanError) as caught:
            list(parts)
        assert str(caught.value) == (
            "`batch_sampler` must leave at least 3 rows, one a shard, for its last round with "
            'tail=\'exact\', got 2. Use fewer ranks, tail="pad" or tail="uneven".'
        )


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("declared", [2, None])
@pytest.mark.parametrize("tail", Tail)
def test_several_shards_are_dealt_to_as_each_alone(
    tail: Tail, declared: int | None, start: int
) -> None:
    for count, num_rows in product((1, 2, 3), (11, 12, 14)):
        batches = [list(range(at, min(at + 2, num_rows))) for at in range(0, num_rows, 2)]
        shards = Shard(0, count).all()
        options: Any = {"batch_size": declared, "tail": tail, "start": start}
        alone = [list(deal_batches(batches, shard=shard, **options)) for shard in shards]
        together = list(deal_batches(batches, shard=shards[0], shards=shards, **options))
        # Step by step, and in each by shard; the last ones may have none in the last step.
        in_turn = [part for step in zip_longest(*alone) for part in step if part is not None]
        assert together == in_turn
        assert [list(part.positions) for part in together] == [part.rows for part in together]
