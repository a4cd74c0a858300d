"""Dealing out a stream whose end nobody knows equals the plan of one whose end is known."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from itertools import islice, product, zip_longest
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplug.errors import PlanError
from shardplug.plan.deal import Part, deal
from shardplug.plan.shard import Shard
from shardplug.plan.split import ShardPlan, Split, Tail
from tests import laws, reference, strategies
from tests.laws import Case, RankRun, Run

T = TypeVar("T")
MODES = list(product(Split, Tail))


def plan_of(case: Case, rank: int = 0, *, consumed: int = 0) -> ShardPlan:
    shard = Shard(rank, case.world_size)
    return ShardPlan(None, case.batch_size, shard, case.split, case.tail, consumed)


def drain(parts: Generator[Part[T], None, int]) -> tuple[list[Part[T]], int]:
    """Run a generator to its end: what it yields, and what it returns."""
    yielded: list[Part[T]] = []
    while True:
        try:
            yielded.append(next(parts))
        except StopIteration as end:
            return yielded, end.value


def run_from(case: Case, consumed: int | None) -> Run:
    start = consumed or 0
    ranks: list[RankRun] = []
    for rank in range(case.world_size):
        plan = plan_of(case, rank, consumed=start)
        is_padded = start > 0 and case.tail is Tail.PAD
        first = range(min(case.num_samples, case.global_batch_size)) if is_padded else ()
        parts, end = drain(deal(iter(range(start, case.num_samples)), plan, head=first))
        assert end == case.num_samples, case
        ranks.append(laws.parts_rank(parts))
    return tuple(ranks)


@pytest.mark.parametrize(("split", "tail"), MODES)
def test_every_small_stream_is_dealt_as_if_its_end_were_known(split: Split, tail: Tail) -> None:
    for numbers in product(range(42), range(1, 9), range(1, 6)):
        case = Case(*numbers, split, tail)
        if not case.can_split:
            continue
        try:
            expected = reference.stream(case)
        except reference.Impossible:
            with pytest.raises(PlanError, match="tail='exact'"):
                run_from(case, None)
        else:
            assert run_from(case, None) == expected, case


@pytest.mark.parametrize(("split", "tail"), MODES)
def test_any_rest_of_a_stream_is_dealt_as_if_its_end_were_known(split: Split, tail: Tail) -> None:
    for numbers in product(range(14), range(1, 4), range(1, 4)):
        case = Case(*numbers, split, tail)
        for consumed in range(case.num_samples + 1) if case.can_split else ():
            try:
                expected = reference.stream(case, consumed=consumed)
            except reference.Impossible:
                with pytest.raises(PlanError, match="tail='exact'"):
                    run_from(case, consumed)
            else:
                assert run_from(case, consumed) == expected, (case, consumed)


# Not DROP: that a stream has ended in the middle of a round is not known until more is asked of it.
@given(strategies.chains(tails=(Tail.PAD, Tail.UNEVEN)))
def test_a_stream_goes_on_in_other_worlds(legs: tuple[laws.Leg, ...]) -> None:
    laws.elastic(run_from, legs)


@given(strategies.possible_cases())
def test_a_stream_keeps_the_laws(case: Case) -> None:
    laws.one_pass(lambda case: run_from(case, None), case, is_sized=False, is_end_known=False)
    laws.resume(run_from, case)


class Asked:
    """A stream that counts how often it was asked for an item."""

    def __init__(self, num_items: int) -> None:
        self.num_items = num_items
        self.count = 0

    def __iter__(self) -> Iterator[int]:
        for item in range(self.num_items):
            self.count += 1
            yield item
        self.count += 1


@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("tail", [Tail.PAD, Tail.DROP, Tail.UNEVEN])
def test_a_full_window_goes_out_before_the_next_item_is_asked_for(
    split: Split, tail: Tail, rank: int
) -> None:
    case = Case(19, 6, 3, split, tail)
    source = Asked(case.num_samples)
    parts = deal(source, plan_of(case, rank))
    assert source.count == 0
    for step in range(case.num_samples // case.global_batch_size):
        next(parts)
        assert source.count == (step + 1) * case.global_batch_size


def test_an_exact_end_holds_one_window_back() -> None:
    case = Case(27, 2, 3, tail=Tail.EXACT)
    source = Asked(case.num_samples)
    for step, _ in zip(range(4), deal(source, plan_of(case, 1)), strict=False):
        assert source.count == min((step + 2) * 6, 28)


def test_a_stream_is_not_asked_again_after_its_end() -> None:
    """Some iterators go on after they have ended; a file that is being written is one."""
    ends = iter([0, 1, 2, None, 3, 4, None])
    parts, end = drain(deal(iter(lambda: next(ends), None), plan_of(Case(0, 2, 2))))
    assert [list(part.rows) for part in parts] == [[0, 1]]
    assert end == 3
    assert next(ends) == 3


def test_a_stream_without_an_end_is_dealt_for_ever() -> None:
    def for_ever() -> Iterator[int]:
        item = 0
        while True:
            yield item
            item += 1

    parts = deal(for_ever(), plan_of(Case(0, 2, 2), 1))
    assert next(islice(parts, 999, None)) == Part([3998, 3999], 2, 4000)


def test_what_is_handed_out_may_be_changed_and_what_is_handed_in_is_not() -> None:
    """A user may do with a batch what he likes: padding is still the start of the epoch."""
    items, head = [[0], [1], [2], [3], [4]], [[0], [1], [2], [3]]
    kept = []

    def act() -> None:
        for part in deal(items[2:], plan_of(Case(0, 2, 2), 1, consumed=2), head=head):
            assert isinstance(part.rows, list)
            kept.append(list(part.rows))
            part.rows.clear()

    laws.hands_off(act, items, head)
    assert kept == [[[4], [0]]]
    kept.clear()
    laws.hands_off(act, items, head)

    kept.clear()
    for part in deal(items, plan_of(Case(0, 2, 2), 0)):
        assert isinstance(part.rows, list)
        kept.append(list(part.rows))
        part.rows.reverse()
    assert kept == [[[0], [1]], [[4], [0]]]


def test_any_items_will_do() -> None:
    rows = [part.rows for part in deal("abcdefgh!", plan_of(Case(0, 3, 2), 1))]
    assert rows == [["d", "e", "f"], ["a", "b", "c"]]


@pytest.mark.parametrize("num_items", [5, 6, 7, 8, 9, 10, 11])
def test_padding_the_rest_of_a_stream_needs_the_start_of_the_epoch(num_items: int) -> None:
    """Not the start of the rest: that would be other rows than those of the unbroken run."""
    for rank in range(2):
        plan, items = plan_of(Case(0, 2, 2), rank, consumed=4), range(4, num_items)
        if num_items == 8:
            assert [list(part.rows) for part in deal(items, plan)] == [[4 + 2 * rank, 5 + 2 * rank]]
            continue
        with pytest.raises(PlanError) as caught:
            list(deal(items, plan))
        assert str(caught.value) == (
            "`head` must hold the first window of the epoch to pad a stream that goes on from "
            "sample 4, got 0 items."
        )
        with pytest.raises(PlanError, match="got 3 items"):
            list(deal(items, plan, head=range(3)))


@given(st.integers(1, 2), st.integers(2, 4))
def test_an_exact_end_with_too_few_items_is_told_when_it_comes(num_items: int, size: int) -> None:
    with pytest.raises(PlanError) as caught:
        list(deal(range(num_items), plan_of(Case(0, size, 3, tail=Tail.EXACT))))
    assert str(caught.value) == (
        f"`num_samples` must be 0 or at least the 3 shards with tail='exact', got {num_items}. "
        'Use fewer ranks, tail="pad" or tail="uneven".'
    )


def test_what_the_stream_raises_comes_through() -> None:
    def broken() -> Iterable[int]:
        yield from range(5)
        raise OSError("the disk is gone")

    parts = deal(broken(), plan_of(Case(0, 2, 2)))
    assert next(parts).rows == [0, 1]
    with pytest.raises(OSError, match="the disk is gone"):
        next(parts)


@pytest.mark.parametrize("tail", Tail)
def test_several_shards_are_dealt_to_as_each_alone(tail: Tail) -> None:
    for count, num_items in product((1, 2, 3), (0, 5, 11, 12, 14)):
        plans = [ShardPlan(None, 2, shard, tail=tail) for shard in Shard(0, count).all()]
        if tail is Tail.EXACT and 0 < num_items < count:
            continue
        alone = [list(deal(range(num_items), plan)) for plan in plans]
        shards = [plan.shard for plan in plans]
        together = list(deal(range(num_items), plans[0], shards=shards))
        # Step by step, and in each by shard; the last ones may have none in the last step.
        in_turn = [part for step in zip_longest(*alone) for part in step if part is not None]
        assert together == in_turn
        assert [list(part.positions) for part in together] == [list(part.rows) for part in together]
