"""Windows tile an epoch, the last one closes with it, and each micro-batch knows its window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplug.errors import PlanError
from shardplug.plan.window import Accumulation, StepKind, StepOutcome, Window


def by_hand(num_micro_batches: int, steps: int) -> list[list[int]]:
    """The windows of an epoch, filled one micro-batch at a time."""
    windows: list[list[int]] = []
    for micro_batch in range(num_micro_batches):
        if not windows or len(windows[-1]) == steps:
            windows.append([])
        windows[-1].append(micro_batch)
    return windows


@given(num_micro_batches=st.integers(0, 40), steps=st.integers(1, 12))
def test_windows_of_a_known_epoch_are_those_filled_one_by_one(
    num_micro_batches: int, steps: int
) -> None:
    epoch = Accumulation(steps, num_micro_batches)
    expected = by_hand(num_micro_batches, steps)

    assert epoch.num_windows == len(expected)
    assert [epoch.window(i) for i in range(num_micro_batches)] == [
        Window(index, len(window)) for window in expected for index in range(len(window))
    ]
    assert [i for i in range(num_micro_batches) if epoch.window(i).closes] == [
        window[-1] for window in expected
    ]


@given(num_micro_batches=st.integers(1, 40), steps=st.integers(1, 12))
def test_an_epoch_of_unknown_length_closes_at_the_same_places_once_its_end_is_seen(
    num_micro_batches: int, steps: int
) -> None:
    stream, known = Accumulation(steps), Accumulation(steps, num_micro_batches)
    last = num_micro_batches - 1
    seen = [stream.window(i, is_last=i == last) for i in range(num_micro_batches)]

    assert stream.num_windows is None
    assert [window.closes for window in seen] == [
        known.window(i).closes for i in range(num_micro_batches)
    ]
    assert seen[last] == known.window(last)
    assert all(window.micro_batches == steps for window in seen[:last])


@pytest.mark.parametrize(
    ("num_micro_batches", "steps", "sizes"),
    [
        (8, 2, [2, 2, 2, 2, 2, 2, 2, 2]),
        (7, 3, [3, 3, 3, 3, 3, 3, 1]),
        (3, 5, [3, 3, 3]),
        (2, 1, [1, 1]),
        (0, 4, []),
    ],
)
def test_sizes_worked_out_by_hand(num_micro_batches: int, steps: int, sizes: list[int]) -> None:
    epoch = Accumulation(steps, num_micro_batches)
    assert [epoch.window(i).micro_batches for i in range(num_micro_batches)] == sizes


def test_an_epoch_that_ends_early_closes_its_window() -> None:
    assert Accumulation(4, 10).window(5, is_last=True) == Window(1, 2)
    assert Accumulation(4, 10).window(5, is_last=True).closes


def test_an_optimizer_that_has_not_stepped_is_accumulating() -> None:
    outcome = StepOutcome(StepKind.ACCUMULATING)
    assert (outcome.micro_batches, outcome.num_windows, outcome.num_steps) == (1, 0, 0)


def test_values_are_frozen_and_equal_by_value() -> None:
    assert StepOutcome(StepKind.STEPPED, 2, 3, 3) == StepOutcome(StepKind.STEPPED, 2, 3, 3)
    with pytest.raises(AttributeError):
        Window(0, 1).index = 1  # type: ignore[misc]


@pytest.mark.parametrize("steps", [0, -3])
def test_accumulation_refuses_empty_windows(steps: int) -> None:
    message = rf"`gradient_accumulation_steps` must be at least 1, got {steps}\."
    with pytest.raises(PlanError, match=message):
        Accumulation(steps)


def test_accumulation_refuses_a_negative_length() -> None:
    with pytest.raises(PlanError, match=r"`num_micro_batches` must be zero or more, got -1\."):
        Accumulation(2, -1)


@pytest.mark.parametrize(
    ("epoch", "micro_batch", "rule"),
    [
        (Accumulation(2, 5), 5, r"in \[0, 5\), got 5"),
        (Accumulation(2, 5), -1, r"in \[0, 5\), got -1"),
        (Accumulation(2), -1, "zero or more, got -1"),
    ],
)
def test_window_refuses_a_micro_batch_outside_the_epoch(
    epoch: Accumulation, micro_batch: int, rule: str
) -> None:
    with pytest.raises(PlanError, match=rf"`micro_batch` must be {rule}\."):
        epoch.window(micro_batch)


@pytest.mark.parametrize(("index", "micro_batches"), [(2, 2), (-1, 2), (0, 0)])
def test_a_window_refuses_a_place_outside_itself(index: int, micro_batches: int) -> None:
    with pytest.raises(PlanError, match=rf"`index` must be in \[0, {micro_batches}\), got {index}"):
        Window(index, micro_batches)
