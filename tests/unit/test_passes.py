"""Passes: what a step holds, how much of it is real, and what has been consumed after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplug.errors import PlanError
from shardplug.orders import SequenceOrder, SequentialOrder
from shardplug.passes import PaddedPass, Pass, ReadyPass, SampledPass, StreamPass, WalkedPass
from shardplug.plan.batches import deal_batches
from shardplug.plan.deal import Part, deal
from shardplug.plan.shard import Shard
from shardplug.plan.split import ShardPlan, Tail
from tests import laws, reference, strategies
from tests.laws import Case, Run


def sampled(case: Case, *, consumed: int = 0) -> list[SampledPass]:
    return [SampledPass(SequentialOrder(case.num_samples), plan) for plan in case.plans(consumed)]


def walked(case: Case) -> list[WalkedPass]:
    open_plans = [
        ShardPlan(None, case.batch_size, shard, case.split, case.tail) for shard in case.shards()
    ]
    return [
        WalkedPass(deal(range(case.num_samples), plan), start=0, num_steps=None, name="it")
        for plan in open_plans
    ]


def run_of(passes: list[Any]) -> Run:
    return tuple(laws.pass_rank(each) for each in passes)


@given(strategies.possible_cases())
def test_looked_up_or_walked_a_pass_is_what_the_cards_say(case: Case) -> None:
    looked_up = run_of(sampled(case))
    assert [rank.steps for rank in looked_up] == [rank.steps for rank in reference.epoch(case)]
    by_walking = run_of(walked(case))
    assert [rank.steps for rank in by_walking] == [rank.steps for rank in reference.stream(case)]


@given(case=strategies.possible_cases(), skipped=st.integers(0, 9))
def test_after_some_steps_come_the_others_with_their_record(case: Case, skipped: int) -> None:
    for make in (sampled, walked):
        for whole, rest in zip(run_of(make(case)), run_of_rest(make(case), skipped), strict=True):
            assert rest.steps == whole.steps[skipped:]


def run_of_rest(passes: list[Any], skipped: int) -> Run:
    return run_of([each.after(skipped) for each in passes])


def test_skipping_twice_is_skipping_the_sum() -> None:
    case = Case(23, 3, 2)
    for make in (sampled, walked):
        twice = run_of([each.after(1).after(2) for each in make(case)])
        assert twice == run_of_rest(make(case), 3)


def test_what_is_looked_up_knows_its_steps_and_rows_before_it_is_iterated() -> None:
    first, second = sampled(Case(5, 2, 2))
    assert (first.num_steps, second.num_steps) == (2, 2)
    assert [first.num_rows(0), first.num_rows(1)] == [2, 2]
    assert [second.valid_rows(0), second.valid_rows(1)] == [2, 0]


def test_the_end_is_told_when_all_has_been_looked_up_and_not_before() -> None:
    ended: list[str] = []
    plan = ShardPlan(5, 2, Shard(0, 1), tail=Tail.UNEVEN)

    def new() -> SampledPass:
        return SampledPass(SequentialOrder(5), plan, on_exhausted=lambda: ended.append("now"))

    source = iter(new())
    assert [next(source) for _ in range(3)] == [[0, 1], [2, 3], [4]]
    assert ended == []
    assert next(source, None) is None
    assert ended == ["now"]
    assert list(new().after(2)) == [[4]]
    assert ended == ["now", "now"]


def test_a_skipped_pass_looks_nothing_up_on_the_way() -> None:
    class Watched(SequenceOrder):  # type: ignore[misc]  # final, but for a test
        asked: list[int]

        def runs(self, first: int, **steps: Any) -> Iterator[list[int]]:
            self.asked.append(first)
            return super().runs(first, **steps)

    Watched.asked = []
    plan = ShardPlan(100, 5, Shard(1, 2))
    assert list(SampledPass(Watched(range(100)), plan).after(9)) == [list(range(95, 100))]
    assert Watched.asked == [95]


# Walks.


def test_a_walk_knows_a_step_once_it_has_come_by() -> None:
    parts = deal_batches([[0, 1], [2], [3]], batch_size=None, shard=Shard(1, 2))
    pass_ = WalkedPass(parts, start=0, num_steps=2, name="batch_sampler")
    source = iter(pass_)
    assert next(source) == [2]
    assert (pass_.num_rows(0), pass_.valid_rows(0), pass_.consumed(1)) == (1, 1, 2)
    assert next(source) == [0, 1]
    assert (pass_.num_rows(1), pass_.valid_rows(1), pass_.consumed(2)) == (2, 0, 3)
    assert pass_.consumed(0) == 0


@pytest.mark.parametrize(
    ("num_steps", "found", "num_got"),
    [(0, "more", 0), (1, "more", 1), (3, "an end after 2 steps", 2)],
)
def test_a_walk_of_another_length_than_was_said_is_an_error(
    num_steps: int, found: str, num_got: int
) -> None:
    parts = iter([Part([0], 1, 1), Part([1], 1, 2)])
    pass_ = WalkedPass(parts, start=0, num_steps=num_steps, name="sampler")
    got: list[Any] = []
    with pytest.raises(PlanError) as caught:
        got.extend(pass_)
    assert str(caught.value) == (
        f"`sampler` must yield as much as its length says, which makes {num_steps} steps, got "
        f"{found}. Correct its __len__, or remove it."
    )
    assert len(got) == num_got


def test_a_walk_of_open_length_knows_it_in_the_end() -> None:
    pass_ = WalkedPass(iter([Part([0], 1, 1)] * 3), start=0, num_steps=None, name="sampler")
    assert pass_.num_steps is None
    assert list(pass_) == [[0]] * 3
    assert pass_.num_steps == 3


def test_a_walk_goes_on_from_where_it_starts() -> None:
    pass_ = WalkedPass(iter([Part([8, 9], 2, 10)]), start=8, num_steps=1, name="sampler")
    assert pass_.consumed(0) == 8
    assert laws.pass_rank(pass_).steps[0].consumed == 10
    empty = WalkedPass(iter([Part([8, 9], 2, 10)]), start=8, num_steps=1, name="sampler").after(4)
    assert (empty.num_steps, list(empty), empty.consumed(0)) == (0, [], 10)


# Padding of others.


@pytest.mark.parametrize("tail", [Tail.UNEVEN, Tail.DROP])
@given(
    n=st.integers(0, 30),
    size=st.integers(1, 6),
    num_real=st.integers(0, 30),
    skip=st.integers(0, 4),
)
def test_padding_that_comes_in_the_order_is_counted_as_padding(
    tail: Tail, n: int, size: int, num_real: int, skip: int
) -> None:
    def new() -> PaddedPass:
        return PaddedPass(
            SampledPass(SequentialOrder(n), ShardPlan(n, size, Shard(0, 1), tail=tail)), num_real
        )

    ids = list(range(n))
    batches = reference.chunks(ids, size)
    if tail is Tail.DROP:
        batches = [batch for batch in batches if len(batch) == size]
    pass_ = new().after(skip)
    expected = batches[skip:]
    assert pass_.num_steps == len(expected)
    assert list(pass_) == expected
    for step, batch in enumerate(expected):
        assert pass_.num_rows(step) == len(batch)
        assert pass_.valid_rows(step) == sum(one < num_real for one in batch)
        assert pass_.consumed(step) == min(batch[0], num_real)
    assert pass_.consumed(len(expected)) == min(n, num_real)


# Ready batches.


def test_a_ready_batch_has_the_rows_that_are_noted_and_none_if_it_is_a_repeat() -> None:
    case = Case(3, 1, 2)  # the second rank repeats the first batch
    for rank, valid in enumerate(([5, 6], [5, 0])):
        pass_ = ReadyPass(sampled(case)[rank])
        assert pass_.num_steps == 2
        assert list(pass_) == [[0, 2], [1, 0]][rank]
        for step, rows in enumerate((5, 6)):
            pass_.note(step, rows)
            assert (pass_.num_rows(step), pass_.valid_rows(step)) == (rows, valid[step])
        assert [pass_.consumed(step) for step in range(3)] == [0, 2, 3]


def test_the_latest_three_are_kept() -> None:
    pass_ = ReadyPass(SampledPass(SequentialOrder(9), ShardPlan(9, 1, Shard(0, 1))))
    for step in range(6):
        pass_.note(step, 10 + step)
    assert [pass_.valid_rows(step) for step in range(2, 6)] == [1, 13, 14, 15]
    assert pass_.after(3).num_steps == 6


def test_a_ready_batch_that_is_anothers_padding_has_no_valid_row() -> None:
    inner = SampledPass(SequentialOrder(2), ShardPlan(2, 1, Shard(0, 1)))
    pass_ = ReadyPass(PaddedPass(inner, 1))
    for step in range(2):
        pass_.note(step, 4)
    assert [pass_.valid_rows(0), pass_.valid_rows(1)] == [4, 0]
    assert [pass_.num_rows(0), pass_.num_rows(1)] == [4, 4]


# Streams.


def test_a_stream_tells_of_its_latest_step() -> None:
    pass_ = StreamPass(0)
    assert (pass_.num_steps, pass_.consumed(0), list(pass_)) == (None, 0, [])
    pass_.add(4, 3, 8, is_last=False)
    assert (pass_.num_rows(0), pass_.valid_rows(0), pass_.consumed(1)) == (4, 3, 8)
    pass_.add(2, 0, 9, is_last=True)
    assert (pass_.num_rows(1), pass_.valid_rows(1), pass_.consumed(2)) == (2, 0, 9)
    assert pass_.num_steps == 2
    pass_.end()


@pytest.mark.parametrize(("promised", "came"), [(3, 2), (1, 2)])
def test_a_stream_of_another_length_than_was_said_is_an_error(promised: int, came: int) -> None:
    pass_ = StreamPass(0, num_steps=promised)
    for step in range(came):
        pass_.add(1, 1, step + 1, is_last=False)
    with pytest.raises(PlanError) as caught:
        pass_.end()
    assert str(caught.value) == (
        "`dataset` must yield as many samples as its length says, got an end after "
        f"{came} steps instead of {promised}. Correct its __len__, or remove it."
    )


def test_a_stream_leaves_out_its_first_steps() -> None:
    assert StreamPass(0, num_steps=5).after(2).after(1).first_step == 3
    assert StreamPass(0, num_steps=5).after(2).after(1).num_steps == 2
    assert StreamPass(0, num_steps=5).after(9).num_steps == 0
    assert StreamPass(0).after(9).num_steps is None


def test_all_of_them_are_passes() -> None:
    inner = SampledPass(SequentialOrder(2), ShardPlan(2, 1, Shard(0, 1)))
    passes: list[Pass] = [
        inner,
        WalkedPass(iter(()), start=0, num_steps=None, name="sampler"),
        PaddedPass(inner, 1),
        ReadyPass(inner),
        StreamPass(0),
    ]
    assert [each.after(0).num_steps for each in passes] == [2, None, 2, 2, None]
