"""A schedule moves with the real steps of its optimizer, and many ticks are as good as one by one.

Expected values are those of torch's own schedule, ticked one by one, or worked out by hand.
"""

from __future__ import annotations

import copy
import math
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler as schedules

from shardplug.errors import PlanError
from shardplug.optimizer import ScalerAwareOptimizer
from shardplug.plan.window import Accumulation, Window
from shardplug.scheduler import StepSyncedScheduler

# Older versions of torch warn of their own call, when a sequence goes on to its next schedule.
pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")

Make = Callable[[torch.optim.Optimizer], Any]


def decay(position: int) -> float:
    return 1 / (1 + position)


def slope(position: int) -> float:
    return 0.999 if position % 2 else 1.0005


SCHEDULES: dict[str, Make] = {
    "lambda": lambda o: schedules.LambdaLR(o, decay),
    "multiplicative": lambda o: schedules.MultiplicativeLR(o, slope),
    "step": lambda o: schedules.StepLR(o, 50, 0.9),
    "step at once": lambda o: schedules.StepLR(o, 1, 0.999),
    "multistep": lambda o: schedules.MultiStepLR(o, [3, 3, 40, 700], 0.5),
    "constant": lambda o: schedules.ConstantLR(o, 0.25, 33),
    "linear up": lambda o: schedules.LinearLR(o, 0.25, 1.0, 4000),
    "linear down": lambda o: schedules.LinearLR(o, 1.0, 0.5, 100),
    "linear over before it begins": lambda o: schedules.LinearLR(o, 0.5, 1.0, 0),
    "exponential": lambda o: schedules.ExponentialLR(o, 0.9995),
    "polynomial": lambda o: schedules.PolynomialLR(o, 9000, 2.0),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 9000, 0.01),
    "cosine, many times": lambda o: schedules.CosineAnnealingLR(o, 10, 0.01),
    "restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 10, 1, 0.01),
    "restarts, growing": lambda o: schedules.CosineAnnealingWarmRestarts(o, 7, 3, 0.01),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.1, 0.7, 30, 20),
    "cyclic, falling": lambda o: schedules.CyclicLR(o, 0.1, 0.7, 30, mode="triangular2"),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.8, total_steps=9000),
    "one cycle, three phases": lambda o: schedules.OneCycleLR(
        o, 0.8, total_steps=9000, three_phase=True, anneal_strategy="linear"
    ),
    "sequential": lambda o: schedules.SequentialLR(
        o,
        [
            schedules.LinearLR(o, 0.1, 1.0, 5),
            schedules.ConstantLR(o, 0.5, 4),
            schedules.CosineAnnealingLR(o, 9000),
        ],
        [5, 12],
    ),
    "chained, a sequence in it": lambda o: schedules.ChainedScheduler(
        [
            schedules.SequentialLR(
                o, [schedules.ConstantLR(o, 0.5, 5), schedules.StepLR(o, 9, 0.9)], [11]
            ),
            schedules.ExponentialLR(o, 0.9995),
        ]
    ),
    "chained": lambda o: schedules.ChainedScheduler(
        [schedules.ConstantLR(o, 0.5, 40), schedules.ExponentialLR(o, 0.9995)]
    ),
}
# Those that tick one by one: their learning rate is a product over all ticks, or of several hands.
ONE_BY_ONE = {
    "multiplicative",
    "chained",
    "chained, a sequence in it",
    "linear over before it begins",
}


class Quiet(torch.optim.SGD):
    """Steps without gradients, as SGD does."""


def an_optimizer(**options: Any) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.5, 0.3)]
    return Quiet(groups, **{"lr": 0.5, "momentum": 0.9, **options})


def wrapped(make: Make, **options: Any) -> tuple[ScalerAwareOptimizer, StepSyncedScheduler]:
    inner = an_optimizer()
    optimizer = ScalerAwareOptimizer(inner)
    return optimizer, StepSyncedScheduler(make(inner), optimizer, **options)


def ticked(make: Make) -> tuple[torch.optim.Optimizer, Any]:
    """A schedule of torch's own, whose optimizer has stepped once so that it does not warn."""
    optimizer = an_optimizer()
    schedule = make(optimizer)
    optimizer.step()
    return optimizer, schedule


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def assert_same(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    assert rates(ours) == pytest.approx(rates(theirs), rel=1e-12, abs=1e-15)
    momenta = [[group["momentum"] for group in one.param_groups] for one in (ours, theirs)]
    assert momenta[0] == pytest.approx(momenta[1], rel=1e-12)


def assert_same_state(ours: Any, theirs: Any) -> None:
    """Equal to the last bookkeeping number; rates as close as above."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert_same_state(ours[key], theirs[key])
    elif isinstance(ours, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same_state(one, other)
    elif isinstance(ours, float):
        assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-15)
    elif not callable(ours):
        assert ours == theirs


# Many ticks at once.


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("world", [1, 3, 64, 1024])
def test_a_step_is_worth_that_many_ticks(name: str, world: int) -> None:
    optimizer, scheduler = wrapped(SCHEDULES[name], num_processes=world)
    theirs, expected = ticked(SCHEDULES[name])
    for _ in range(8):
        optimizer.step()
        scheduler.step()
        for _ in range(world):
            expected.step()
        assert_same(optimizer, theirs)
        assert scheduler.get_last_lr() == pytest.approx(
            expected.get_last_lr(), rel=1e-12, abs=1e-15
        )
    assert_same_state(scheduler.state_dict(), expected.state_dict())


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=15)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_windows_of_any_size_are_worth_their_batches(name: str, sizes: list[int]) -> None:
    optimizer, scheduler = wrapped(SCHEDULES[name])
    theirs, expected = ticked(SCHEDULES[name])
    for size in sizes:
        optimizer.window = Window(size - 1, size)
        optimizer.step()
        scheduler.step()
        for _ in range(size):
            expected.step()
    assert_same(optimizer, theirs)


def calls_of(action: Callable[[], object]) -> int:
    """How many Python functions an action calls."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ONE_BY_ONE])
def test_the_cost_of_a_step_does_not_grow_with_the_number_of_ticks(name: str) -> None:
    def cost(world: int) -> int:
        optimizer, scheduler = wrapped(SCHEDULES[name], num_processes=world)
        costs = []
        for _ in range(3):
            optimizer.step()
            costs.append(calls_of(scheduler.step))
        return costs[-1]

    # A schedule of schedules has its handful of milestones behind it by then.
    assert cost(4096) <= 1.5 * cost(1)


@pytest.mark.parametrize("name", ["step", "cosine", "polynomial", "linear up", "exponential"])
def test_another_schedule_on_the_same_optimizer_is_respected(name: str) -> None:
    def other(optimizer: torch.optim.Optimizer) -> schedules.LRScheduler:
        return schedules.MultiStepLR(optimizer, [1, 3], 0.5)

    inner = an_optimizer()
    optimizer = ScalerAwareOptimizer(inner)
    ours = [
        StepSyncedScheduler(SCHEDULES[name](inner), optimizer, num_processes=16),
        StepSyncedScheduler(other(inner), optimizer, unit="updates"),
    ]
    theirs = an_optimizer()
    expected = [SCHEDULES[name](theirs), other(theirs)]
    theirs.step()
    for _ in range(6):
        optimizer.step()
        for scheduler in ours:
            scheduler.step()
        for _ in range(16):
            expected[0].step()
        expected[1].step()
        assert_same(optimizer, theirs)


def test_a_learning_rate_set_by_hand_is_respected() -> None:
    optimizer, scheduler = wrapped(SCHEDULES["exponential"], num_processes=5)
    theirs, expected = ticked(SCHEDULES["exponential"])
    for by_hand in (False, True, False):
        if by_hand:
            optimizer.param_groups[1]["lr"] = theirs.param_groups[1]["lr"] = 0.07
        optimizer.step()
        scheduler.step()
        for _ in range(5):
            expected.step()
        assert_same(optimizer, theirs)


def test_without_torchs_formula_it_is_ticked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(schedules.StepLR, "_get_closed_form_lr")
    optimizer, scheduler = wrapped(SCHEDULES["step"], num_processes=64)
    theirs, expected = ticked(SCHEDULES["step"])
    for _ in range(2):
        optimizer.step()
        scheduler.step()
        for _ in range(64):
            expected.step()
        assert_same(optimizer, theirs)


def test_a_position_set_by_hand_is_respected() -> None:
    optimizer, scheduler = wrapped(SCHEDULES["exponential"], num_processes=5)
    theirs, expected = ticked(SCHEDULES["exponential"])
    for position in (0, 5, 1000, 1005):
        scheduler.last_epoch = expected.last_epoch = position
        optimizer.step()
        scheduler.step()
        for _ in range(5):
            expected.step()
        assert_same(optimizer, theirs)


def test_a_subclass_of_torchs_own_computes_what_it_likes() -> None:
    class Odd(schedules.LambdaLR):
        def get_lr(self) -> list[float | torch.Tensor]:
            return [group["lr"] * 0.9 for group in self.optimizer.param_groups]

    optimizer, scheduler = wrapped(lambda o: Odd(o, decay), num_processes=3)
    optimizer.step()
    scheduler.step()
    # The constructor takes one tick of its own.
    assert rates(optimizer) == pytest.approx([0.5 * 0.9**4, 0.3 * 0.9**4])


@pytest.mark.parametrize("name", ["cosine", "one cycle", "linear up"])
def test_learning_rates_that_are_tensors_are_written_to_as_torch_does(name: str) -> None:
    def build() -> torch.optim.Optimizer:
        weight = torch.nn.Parameter(torch.ones(1))
        return torch.optim.SGD([weight], lr=torch.tensor(0.5, dtype=torch.float64), momentum=0.9)

    inner, theirs = build(), build()
    optimizer = ScalerAwareOptimizer(inner)
    scheduler = StepSyncedScheduler(SCHEDULES[name](inner), optimizer, num_processes=20)
    expected = SCHEDULES[name](theirs)
    both = (inner, scheduler), (theirs, expected)
    first = [one.param_groups[0]["lr"] for one, _ in both]
    theirs.step()
    for _ in range(4):
        optimizer.step()
        scheduler.step()
        for _ in range(20):
            expected.step()
        assert_same(optimizer, theirs)
        now = [one.param_groups[0]["lr"] for one, _ in both]
        last = [schedule.get_last_lr()[0] for _, schedule in both]
        assert (now[0] is first[0]) == (now[1] is first[1])
        assert last[0] is not now[0] or last[1] is now[1]
        assert float(last[0]) == float(now[0])


# The end of a schedule.


@pytest.mark.parametrize("world", [1, 3, 7, 1024])
def test_one_cycle_stops_where_torch_would_raise(world: int) -> None:
    make: Make = lambda o: schedules.OneCycleLR(o, 0.8, total_steps=40)  # noqa: E731
    optimizer, scheduler = wrapped(make, num_processes=world)
    theirs, expected = ticked(make)
    for _ in range(40):
        expected.step()
    for _ in range(60):
        optimizer.step()
        scheduler.step()
    assert scheduler.last_epoch == 40
    assert_same(optimizer, theirs)
    with pytest.raises(ValueError, match="Tried to step 41 times"):
        expected.step()


@pytest.mark.parametrize("ticks", [1, 4])
def test_one_cycle_never_leaves_a_learning_rate_below_its_last(ticks: int) -> None:
    optimizer, scheduler = wrapped(
        lambda o: schedules.OneCycleLR(o, 0.8, total_steps=8, anneal_strategy="linear"),
        num_processes=ticks,
    )
    for _ in range(12):
        optimizer.step()
        scheduler.step()
    assert rates(optimizer) == pytest.approx([0.8 / 25 / 1e4] * 2)
    assert scheduler.get_last_lr() == rates(optimizer)


@pytest.mark.parametrize("world", [1, 4])
def test_an_end_inside_a_schedule_of_schedules_is_kept(world: int) -> None:
    def chained(optimizer: torch.optim.Optimizer) -> schedules.ChainedScheduler:
        return schedules.ChainedScheduler(
            [schedules.OneCycleLR(optimizer, 0.8, total_steps=6), schedules.StepLR(optimizer, 1)]
        )

    def sequential(optimizer: torch.optim.Optimizer) -> schedules.SequentialLR:
        return schedules.SequentialLR(
            optimizer,
            [
                schedules.OneCycleLR(optimizer, 0.8, total_steps=6),
                schedules.ConstantLR(optimizer, 0.5, 1000),
            ],
            [10],
        )

    optimizer, scheduler = wrapped(chained, num_processes=world)
    for _ in range(12):
        optimizer.step()
        scheduler.step()
    children = scheduler._schedulers
    assert [child.last_epoch for child in children] == [6, 12 * world]

    optimizer, scheduler = wrapped(sequential, num_processes=world)
    for _ in range(12):
        optimizer.step()
        scheduler.step()
    assert scheduler.last_epoch == 12 * world
    assert scheduler._schedulers[0].last_epoch == 6
    # The second one sets out from the rate that every schedule of the optimizer has for its first.
    initial = optimizer.param_groups[0]["initial_lr"]
    assert rates(optimizer) == pytest.approx([initial * 0.5] * 2)


def test_any_schedule_with_total_steps_is_kept_to_them_also_after_loading() -> None:
    class Ramp(schedules.LRScheduler):
        def __init__(self, optimizer: torch.optim.Optimizer, total_steps: int) -> None:
            self.total_steps = total_steps
            super().__init__(optimizer)

        def get_lr(self) -> list[float | torch.Tensor]:
            return [self.last_epoch / self.total_steps for _ in self.base_lrs]

    optimizer, scheduler = wrapped(lambda o: Ramp(o, 10), num_processes=4)
    for expected in (0.4, 0.8, 1.0, 1.0):
        optimizer.step()
        scheduler.step()
        assert rates(optimizer) == [expected] * 2
    scheduler.load_state_dict({**scheduler.state_dict(), "total_steps": 16})
    for expected in (14 / 16, 1.0, 1.0):
        optimizer.step()
        scheduler.step()
        assert rates(optimizer) == [expected] * 2


# When it ticks.


class Counter:
    """A schedule that is none of torch's, and counts."""

    def __init__(self) -> None:
        self.ticks = 0

    def step(self) -> None:
        self.ticks += 1

    def state_dict(self) -> dict[str, Any]:
        return {"ticks": self.ticks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.ticks = state_dict["ticks"]


class Pair:
    """Optimizers on scalers, each with one weight, that step well or overflow at will."""

    def __init__(self, count: int, *, fused: bool = False) -> None:
        self.scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(count)]
        self.weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(count)]
        self.wrapped = [
            ScalerAwareOptimizer(torch.optim.SGD([weight], lr=0.1, fused=fused), scaler=scaler)
            for weight, scaler in zip(self.weights, self.scalers, strict=True)
        ]

    def step(self, index: int, *, overflow: bool = False) -> None:
        self.wrapped[index].zero_grad()
        factor = math.inf if overflow else 1.0
        self.scalers[index].scale(self.weights[index] * factor).sum().backward()
        self.wrapped[index].step()


@pytest.mark.parametrize(
    ("options", "per_step"),
    [
        ({}, 3),
        ({"num_processes": None}, 3),
        ({"num_processes": 1}, 3),
        ({"num_processes": 4}, 12),
        ({"num_processes": 4, "split_batches": True}, 3),
        ({"num_processes": 4, "unit": "updates"}, 1),
        ({"num_processes": 4, "unit": "updates", "split_batches": True}, 1),
    ],
)
def test_ticks_of_a_window_of_three(options: dict[str, Any], per_step: int) -> None:
    counter, pair = Counter(), Pair(1)
    scheduler = StepSyncedScheduler(counter, pair.wrapped, **options)
    for window in range(4):
        for index in range(3):
            pair.wrapped[0].window = Window(index, 3)
            pair.step(0)
            scheduler.step()
            assert counter.ticks == (window + (index == 2)) * per_step


def test_a_short_last_window_ticks_for_what_it_had() -> None:
    counter, pair = Counter(), Pair(1)
    scheduler = StepSyncedScheduler(counter, pair.wrapped[0], num_processes=2)
    for size in (4, 4, 1):
        for index in range(size):
            pair.wrapped[0].window = Window(index, size)
            pair.step(0)
            scheduler.step()
    assert counter.ticks == 18


@pytest.mark.parametrize("calls", [1, 2, 5])
@pytest.mark.parametrize("fused", [False, True])
def test_a_real_step_ticks_once_and_a_skipped_one_never(calls: int, fused: bool) -> None:
    counter, pair = Counter(), Pair(1, fused=fused)
    scheduler = StepSyncedScheduler(counter, pair.wrapped[0])
    scheduler.step()
    assert counter.ticks == 0
    expected = 0
    for overflow in (True, False, False, True, True, False):
        pair.step(0, overflow=overflow)
        expected += not overflow
        for _ in range(calls):
            scheduler.step()
        assert counter.ticks == expected


@pytest.mark.parametrize("fused", [False, True])
def test_a_call_at_the_end_of_an_epoch_ticks_once_if_any_step_was_real(fused: bool) -> None:
    counter, pair = Counter(), Pair(1, fused=fused)
    scheduler = StepSyncedScheduler(counter, pair.wrapped[0], unit="updates")
    for epoch in ([False, True, False], [False, False, True], [True, True], [True, False]):
        for overflow in epoch:
            pair.step(0, overflow=overflow)
        scheduler.step()
    assert counter.ticks == 3


def test_two_schedules_of_one_optimizer_tick_each_for_itself() -> None:
    pair, counters = Pair(1), [Counter(), Counter()]
    ours = [StepSyncedScheduler(counter, pair.wrapped[0]) for counter in counters]
    pair.step(0)
    ours[0].step()
    ours[0].step()
    pair.step(0)
    for scheduler in ours:
        scheduler.step()
    assert [counter.ticks for counter in counters] == [2, 1]


def test_steps_before_the_schedule_was_wrapped_are_not_its_own() -> None:
    counter, pair = Counter(), Pair(1)
    pair.step(0)
    scheduler = StepSyncedScheduler(counter, pair.wrapped[0])
    scheduler.step()
    assert counter.ticks == 0


@pytest.mark.parametrize(
    ("iterations", "expected"),
    [
        # Each iteration: who steps, and whether it overflows.
        ([{0: False, 1: False}], [1]),
        ([{0: True, 1: False}, {}, {0: False, 1: False}], [0, 0, 1]),
        ([{0: False, 1: True}, {1: False}], [0, 1]),
        # Alternating: the one that rests has nothing to say, whatever it said last.
        ([{0: False}, {1: False}, {0: True}, {1: False}, {0: False}], [1, 2, 2, 3, 4]),
    ],
)
def test_a_schedule_of_several_optimizers(
    iterations: list[dict[int, bool]], expected: list[int]
) -> None:
    counter, pair = Counter(), Pair(2)
    scheduler = StepSyncedScheduler(counter, pair.wrapped)
    seen = []
    for iteration in iterations:
        for index, overflow in iteration.items():
            pair.step(index, overflow=overflow)
        scheduler.step()
        seen.append(counter.ticks)
    assert seen == expected


@pytest.mark.parametrize("sizes", [(3, 1), (1, 3)])
def test_windows_of_several_optimizers_tick_for_the_longest(sizes: tuple[int, int]) -> None:
    counter, pair = Counter(), Pair(2)
    scheduler = StepSyncedScheduler(counter, pair.wrapped)
    for index, size in enumerate(sizes):
        pair.wrapped[index].window = Window(size - 1, size)
        pair.step(index)
    scheduler.step()
    assert counter.ticks == 3


def test_an_optimizer_that_accumulates_does_not_hold_up_another() -> None:
    counter, pair = Counter(), Pair(2)
    scheduler = StepSyncedScheduler(counter, pair.wrapped)
    pair.step(0)
    pair.step(1)
    scheduler.step()
    pair.wrapped[0].window = Window(0, 2)
    pair.step(0)
    pair.step(1)
    scheduler.step()
    assert counter.ticks == 2


@pytest.mark.parametrize("name", ["step", "linear up", "exponential", "polynomial", "constant"])
def test_a_group_that_is_added_later_goes_on_as_in_torch(name: str) -> None:
    make, late = SCHEDULES[name], {"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.2}
    theirs, schedule = ticked(make)
    optimizer, scheduler = wrapped(make, num_processes=3)
    for each in (theirs, optimizer):
        each.add_param_group(copy.deepcopy(late))
    for _ in range(20):
        optimizer.step()
        scheduler.step()
        for _ in range(3):
            schedule.step()
        assert_same(optimizer, theirs)


def test_without_the_optimizer_every_call_ticks_once() -> None:
    counter, pair = Counter(), Pair(1)
    scheduler = StepSyncedScheduler(counter, pair.wrapped, False, num_processes=8)
    pair.wrapped[0].window = Window(0, 2)
    for ticks in range(1, 4):
        scheduler.step()
        assert counter.ticks == ticks


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_keeps_the_learning_rate(fused: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    inner = torch.optim.AdamW([weight], lr=0.1, fused=fused)
    optimizer = ScalerAwareOptimizer(inner, scaler=scaler)
    scheduler = StepSyncedScheduler(schedules.StepLR(inner, 1, 0.5), optimizer)
    seen = []
    for loss in (weight * math.inf, weight * math.nan, weight * 1.0):
        optimizer.zero_grad()
        scaler.scale(loss.sum()).backward()
        optimizer.step()
        scheduler.step()
        seen.append((optimizer.step_was_skipped, rates(inner), bool((weight == 1).all())))
    assert seen == [(True, [0.1], True), (True, [0.1], True), (False, [0.05], False)]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda o: schedules.LinearLR(o, 1.0, 0.0, 4), [0.75, 0.5, 0.25, 0.0]),
        (
            lambda o: schedules.CosineAnnealingLR(o, 4),
            [(1 + math.cos(math.pi * step / 4)) / 2 for step in (1, 2, 3, 4)],
        ),
    ],
)
def test_a_schedule_in_updates_is_as_long_as_it_says(make: Make, expected: list[float]) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    inner = torch.optim.SGD([weight], lr=1.0)
    optimizer = ScalerAwareOptimizer(inner)
    scheduler = StepSyncedScheduler(make(inner), optimizer, num_processes=2, unit="updates")
    seen = []
    for _ in range(4):
        optimizer.step()
        scheduler.step()
        seen += rates(inner)
    assert seen == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("num_micro_batches", "steps", "world"), [(8, 2, 1), (9, 4, 1), (12, 3, 2), (5, 5, 3)]
)
def test_a_schedule_in_batches_ends_with_the_last_batch_of_the_unprepared_loader(
    num_micro_batches: int, steps: int, world: int
) -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    optimizer = ScalerAwareOptimizer(inner)
    linear = schedules.LinearLR(inner, 1.0, 0.0, num_micro_batches * world)
    scheduler = StepSyncedScheduler(linear, optimizer, num_processes=world)
    epoch = Accumulation(steps, num_micro_batches)
    for micro_batch in range(num_micro_batches):
        assert rates(inner) != [0.0]
        optimizer.window = epoch.window(micro_batch)
        optimizer.step()
        scheduler.step()
    assert rates(inner) == [0.0]


# Schedules that are driven by an argument.


@pytest.mark.parametrize("world", [1, 2, 8])
def test_a_metric_is_looked_at_once_per_call(world: int) -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    optimizer = ScalerAwareOptimizer(inner)
    plateau = schedules.ReduceLROnPlateau(inner, factor=0.5, patience=2)
    scheduler = StepSyncedScheduler(plateau, optimizer, num_processes=world)
    seen = []
    for metric in (1, 2, 2, 2, math.nan, 2, 2):
        optimizer.step()
        scheduler.step(metric)
        seen += rates(inner)
    assert seen == [1, 1, 1, 0.5, 0.5, 0.5, 0.25]


def test_a_metric_counts_whatever_became_of_the_last_step() -> None:
    pair = Pair(1)
    plateau = schedules.ReduceLROnPlateau(pair.wrapped[0], factor=0.5, patience=0)
    scheduler = StepSyncedScheduler(plateau, pair.wrapped[0])
    scheduler.step(metrics=1.0)
    pair.step(0, overflow=True)
    scheduler.step(1.0)
    scheduler.step(1.0)
    assert rates(pair.wrapped[0]) == pytest.approx([0.025])


def test_a_schedule_of_ones_own_may_ask_for_an_argument() -> None:
    class Follower(Counter):
        def step(self, epoch: int, *, scale: int = 1) -> None:  # type: ignore[override]
            self.ticks = epoch * scale

    follower, pair = Follower(), Pair(1)
    scheduler = StepSyncedScheduler(follower, pair.wrapped[0], num_processes=4)
    scheduler.step(7, scale=2)
    assert follower.ticks == 14


def test_a_position_that_is_given_is_gone_to_once_and_with_a_real_step_only() -> None:
    optimizer, scheduler = wrapped(SCHEDULES["restarts"], num_processes=4)
    theirs, expected = ticked(SCHEDULES["restarts"])
    scheduler.step(3.5)
    assert scheduler.last_epoch == 0
    optimizer.step()
    scheduler.step(3.5)
    expected.step(3.5)
    assert_same(optimizer, theirs)
    # From there, one by one or at once.
    for _ in range(3):
        optimizer.step()
        scheduler.step()
        for _ in range(4):
            expected.step()
        assert_same(optimizer, theirs)


# Torch's warning about the order of calls.


@contextmanager
def recorded() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield seen


@pytest.mark.parametrize("on_the_wrapper", [False, True])
@pytest.mark.parametrize("world", [1, 6])
@pytest.mark.parametrize("first_is_skipped", [False, True])
def test_the_right_order_does_not_warn(
    on_the_wrapper: bool, world: int, first_is_skipped: bool
) -> None:
    pair = Pair(1)
    optimizer = pair.wrapped[0]
    for name in ("cosine", "lambda", "sequential", "chained"):
        make = SCHEDULES[name]
        on = optimizer if on_the_wrapper else optimizer.optimizer
        scheduler = StepSyncedScheduler(make(on), optimizer, num_processes=world)
        pair.step(0, overflow=first_is_skipped)
        scheduler.step()
        pair.step(0)
        scheduler.step()


@pytest.mark.parametrize("name", ["cosine", "lambda", "step", "one cycle"])
def test_the_wrong_order_is_not_hidden(name: str) -> None:
    optimizer = ScalerAwareOptimizer(an_optimizer())
    scheduler = StepSyncedScheduler(SCHEDULES[name](optimizer), optimizer, False)
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before `optimizer.step"):
        scheduler.step()


def test_a_step_that_somebody_put_in_place_of_the_counted_one_is_told_of() -> None:
    inner = an_optimizer()
    optimizer = ScalerAwareOptimizer(inner)
    scheduler = StepSyncedScheduler(SCHEDULES["cosine"](inner), optimizer, num_processes=64)
    del inner.step
    optimizer.step()
    with pytest.warns(UserWarning, match="has been overridden after"):
        scheduler.step()
    with recorded() as seen:
        optimizer.step()
        scheduler.step()
    assert not seen


# An object to those who ask.


def test_it_is_a_scheduler_whose_attributes_are_the_inner_ones() -> None:
    optimizer, scheduler = wrapped(SCHEDULES["cosine"])
    inner = scheduler.scheduler
    assert isinstance(scheduler, schedules.LRScheduler)
    assert scheduler.optimizer is optimizer.optimizer
    assert (scheduler.T_max, scheduler.base_lrs) == (9000, [0.5, 0.3])
    scheduler.T_max = 7
    scheduler.last_epoch = 3
    assert (inner.T_max, inner.last_epoch) == (7, 3)
    assert scheduler.get_last_lr() is inner.get_last_lr()
    assert repr(inner) in repr(scheduler)
    with pytest.warns(UserWarning, match="please use `get_last_lr"):
        assert scheduler.get_lr() == inner.get_lr()
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = scheduler.no_such_thing


@pytest.mark.parametrize("name", SCHEDULES)
def test_its_state_goes_on_where_it_was_saved_wrapped_or_not(name: str) -> None:
    optimizer, scheduler = wrapped(SCHEDULES[name], num_processes=3)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    saved = copy.deepcopy(scheduler.state_dict())

    again, resumed = wrapped(SCHEDULES[name], num_processes=3)
    plain, bare = ticked(SCHEDULES[name])
    for schedule, target in ((resumed, again), (bare, plain)):
        schedule.load_state_dict(copy.deepcopy(saved))
        target.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(4):
        optimizer.step()
        scheduler.step()
        again.step()
        resumed.step()
        for _ in range(3):
            bare.step()
        assert_same(again, optimizer)
        assert_same(plain, optimizer)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
@pytest.mark.parametrize("name", ["cosine", "chained", "lambda"])
def test_a_copy_goes_on_apart_from_the_original(copied: Callable[[Any], Any], name: str) -> None:
    optimizer, scheduler = wrapped(SCHEDULES[name], num_processes=5)
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    optimizer.step()
    before = rates(optimizer)
    twin, follower = copied((optimizer, scheduler))
    assert follower.optimizers == (twin,)
    follower.step()
    follower.step()
    assert rates(optimizer) == before
    scheduler.step()
    assert rates(twin) == rates(optimizer) != before


# Bad input.


def test_it_refuses_what_is_no_schedule() -> None:
    optimizer, scheduler = wrapped(SCHEDULES["step"])
    with pytest.raises(PlanError, match=r"`scheduler` must be a schedule that is not wrapped yet"):
        StepSyncedScheduler(scheduler, optimizer)
    with pytest.raises(PlanError, match=r"`scheduler` must be one of torch's schedules .* got int"):
        StepSyncedScheduler(3, optimizer)
    with pytest.raises(PlanError, match=r"`scheduler` must be .*, got the class StepLR\."):
        StepSyncedScheduler(schedules.StepLR, optimizer)


def test_it_refuses_optimizers_that_are_not_the_schedules() -> None:
    inner, other = an_optimizer(), an_optimizer()
    schedule = SCHEDULES["step"](inner)
    with pytest.raises(PlanError, match=r"`optimizers` must name at least one optimizer, got none"):
        StepSyncedScheduler(schedule, [])
    with pytest.raises(PlanError, match=r"`optimizers` must be wrapped optimizers, or one, got No"):
        StepSyncedScheduler(schedule, None)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"`optimizers` must be wrapped .*, got Quiet\. Prepare"):
        StepSyncedScheduler(schedule, inner)  # type: ignore[arg-type]
    stranger = ScalerAwareOptimizer(other)
    message = (
        r"`scheduler` must be one of the given optimizers', got a StepLR of another Quiet\. Prepare"
    )
    with pytest.raises(PlanError, match=message):
        StepSyncedScheduler(schedule, stranger)
    StepSyncedScheduler(schedule, [stranger, ScalerAwareOptimizer(inner)])


def test_it_refuses_numbers_and_words_out_of_range() -> None:
    optimizer = ScalerAwareOptimizer(an_optimizer())
    schedule = SCHEDULES["step"](optimizer)
    with pytest.raises(PlanError, match=r"`num_processes` must be at least 1, got 0\."):
        StepSyncedScheduler(schedule, optimizer, num_processes=0)
    with pytest.raises(PlanError, match=r"`num_processes` must be an integer, got 1\.5\."):
        StepSyncedScheduler(schedule, optimizer, num_processes=1.5)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"`step_with_optimizer` must be True or False, got 'no'"):
        StepSyncedScheduler(schedule, optimizer, "no")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"`split_batches` must be True or False, got None\."):
        StepSyncedScheduler(schedule, optimizer, True, None)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"`unit` must be 'batches' or 'updates', got 'epochs'\."):
        StepSyncedScheduler(schedule, optimizer, unit="epochs")  # type: ignore[arg-type]
