"""The position of a loader: when the epoch moves, and what stands in between."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplug.errors import PlanError
from shardplug.plan.cursor import Cursor, Progress, Run


class Ten:
    """A pass of ten steps that consume three samples each."""

    num_steps = 10

    def num_rows(self, step: int) -> int:
        return 3

    def valid_rows(self, step: int) -> int:
        return 3

    def consumed(self, step: int) -> int:
        return 3 * step

    def extra_rows(self, step: int) -> int:
        return 0


def take(progress: Progress, steps: int) -> Run:
    run = progress.begin(Ten())
    run.step = steps
    return run


def leave(progress: Progress, steps: int) -> Run:
    run = take(progress, steps)
    run.was_left = True
    return run


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((-1, 0), "`epoch` must be zero or more, got -1."),
        ((0, -5), "`consumed` must be zero or more, got -5."),
    ],
)
def test_a_cursor_checks_its_numbers(numbers: tuple[int, int], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Cursor(*numbers)
    assert str(caught.value) == message


def test_it_begins_at_the_beginning_or_where_it_is_told() -> None:
    assert Progress().cursor == Progress().upcoming == Cursor(0, 0)
    assert Progress(Cursor(4, 6)).cursor == Cursor(4, 6)
    assert (Progress(Cursor(4, 6)).epoch, Progress().epoch) == (4, 0)


def test_inside_a_pass_it_stands_after_what_was_handed_out() -> None:
    progress = Progress(Cursor(4))
    run = take(progress, 2)
    assert (run.epoch, run.cursor, progress.cursor) == (4, Cursor(4, 6), Cursor(4, 6))
    assert progress.current is run
    assert progress.upcoming == Cursor(5)
    assert progress.epoch == 4


def test_a_pass_that_ran_to_its_end_leads_to_the_next_epoch() -> None:
    progress = Progress()
    progress.finish(take(progress, 10))
    assert progress.cursor == progress.upcoming == Cursor(1)
    assert progress.current is None


def test_a_pass_that_was_left_stands_until_the_next_begins() -> None:
    progress = Progress()
    left = leave(progress, 4)
    assert progress.cursor == Cursor(0, 12)
    assert (progress.current, progress.epoch) == (left, 0)
    assert progress.upcoming == Cursor(1)
    assert take(progress, 1).epoch == 1
    assert progress.cursor == Cursor(1, 3)


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_setting_the_epoch_after_a_pass_was_left_overrules_its_position(epoch: int) -> None:
    progress = Progress()
    leave(progress, 4)
    progress.set_epoch(epoch)
    assert progress.cursor == progress.upcoming == Cursor(epoch)
    assert progress.current is None
    assert progress.begin(Ten()).epoch == epoch


@pytest.mark.parametrize("epoch", [0, 5])
def test_setting_the_epoch_inside_a_pass_is_for_the_next_one(epoch: int) -> None:
    progress = Progress()
    run = take(progress, 4)
    progress.set_epoch(epoch)
    assert (progress.cursor, progress.upcoming) == (Cursor(0, 12), Cursor(epoch))
    progress.finish(run)
    assert progress.cursor == Cursor(epoch)


def test_setting_the_epoch_that_comes_next_keeps_a_position_in_it() -> None:
    progress = Progress(Cursor(3, 9))
    progress.set_epoch(3)
    assert progress.upcoming == Cursor(3, 9)
    progress.set_epoch(4)
    progress.set_epoch(3)
    assert progress.upcoming == Cursor(3, 0)


def test_a_negative_epoch_is_refused_and_changes_nothing() -> None:
    progress = Progress(Cursor(3, 9))
    with pytest.raises(PlanError, match=r"`epoch` must be zero or more, got -1\."):
        progress.set_epoch(-1)
    assert progress.upcoming == Cursor(3, 9)


def test_an_older_pass_that_ends_late_moves_nothing() -> None:
    progress = Progress()
    older, newer = take(progress, 3), take(progress, 1)
    progress.finish(older)
    assert (progress.run, progress.cursor) == (newer, Cursor(1, 3))
    assert older.number != newer.number
    progress.finish(newer)
    assert progress.upcoming == Cursor(2)


def test_a_jump_leaves_the_pass_under_way() -> None:
    progress = Progress()
    take(progress, 3)
    progress.jump(Cursor(6, 2))
    assert (progress.cursor, progress.current) == (Cursor(6, 2), None)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda it: pickle.loads(pickle.dumps(it))]
)
def test_a_copy_starts_where_the_next_pass_would(copied: Callable[[Any], Any]) -> None:
    progress = Progress()
    assert copied(progress).cursor == Cursor(0)
    run = take(progress, 3)
    assert copied(progress).cursor == Cursor(1)
    progress.finish(run)
    progress.jump(Cursor(8, 4))
    twin = copied(progress)
    assert twin.cursor == Cursor(8, 4)
    twin.set_epoch(0)
    assert progress.cursor == Cursor(8, 4)


@given(
    moves=st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["finish", "leave"]), st.integers(0, 10)),
            st.tuples(st.just("set"), st.integers(0, 9)),
        )
    )
)
def test_every_pass_is_the_epoch_after_the_one_before_or_the_one_set(
    moves: list[tuple[str, int]],
) -> None:
    progress, expected = Progress(), 0
    for move, number in moves:
        if move == "set":
            progress.set_epoch(number)
            expected = number
            continue
        run = leave(progress, number)
        assert run.epoch == expected
        if move == "finish":
            progress.finish(run)
        expected += 1
        assert progress.upcoming == Cursor(expected)
