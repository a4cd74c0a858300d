"""An optimizer says whether it stepped, and its scaler's arithmetic holds in any order of calls.

Weights are compared with torch's own loop, with a loop without a scaler (scales are powers of two,
so they cancel without rounding), or with numbers worked out by hand.
"""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.amp.grad_scaler import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode

from shardplug.errors import PlanError
from shardplug.optimizer import _ROUNDS, ScalerAwareOptimizer
from shardplug.plan.window import Accumulation, StepKind, StepOutcome, Window

Make = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


def a_scaler(scale: float = 1024.0, **options: Any) -> GradScaler:
    return GradScaler("cpu", init_scale=scale, **options)


def a_weight(*values: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values or (1.0,)))


def sgd(*weights: torch.nn.Parameter, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, **{"lr": 1.0, **options})


def plain(weight: torch.nn.Parameter, **options: Any) -> ScalerAwareOptimizer:
    return ScalerAwareOptimizer(sgd(weight, **options))


class CountWaits(TorchDispatchMode):
    """Counts the reads of a tensor's value, each of which waits for the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


# The inner optimizer, and what is shared with it.


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("scaled", [False, True])
def test_steps_are_those_of_torchs_own_loop(name: str, scaled: bool) -> None:
    """Overflow in the third of six, where there is a scaler."""
    weights = [[a_weight(1.0, -2.0), a_weight(0.5)] for _ in range(2)]
    theirs, ours = (OPTIMIZERS[name](each) for each in weights)
    scalers = [a_scaler(enabled=scaled, growth_interval=2) for _ in range(2)]
    wrapper = ScalerAwareOptimizer(ours, scaler=scalers[1])
    for step in range(6):
        for (first, second), scaler in zip(weights, scalers, strict=True):
            factor = math.inf if scaled and step == 2 else 1.0
            loss = ((first**2).sum() + (second - step).abs().sum()) * factor
            scaler.scale(loss).backward()
        scalers[0].step(theirs)
        scalers[0].update()
        theirs.zero_grad()
        wrapper.step()
        wrapper.zero_grad()
        assert wrapper.step_was_skipped == (scaled and step == 2)
    for mine, other in zip(weights[1], weights[0], strict=True):
        assert torch.equal(mine, other)
    assert scalers[1].get_scale() == scalers[0].get_scale()
    assert wrapper.outcome == StepOutcome(StepKind.STEPPED, 1, 6, 6 - scaled)


def test_groups_state_and_defaults_are_shared_by_identity() -> None:
    inner = OPTIMIZERS["Adam"]([a_weight()])
    wrapper = ScalerAwareOptimizer(inner)
    assert isinstance(wrapper, torch.optim.Optimizer)
    assert wrapper.optimizer is inner
    assert wrapper.param_groups is inner.param_groups
    assert wrapper.state is inner.state
    assert wrapper.defaults is inner.defaults
    inner.load_state_dict(inner.state_dict())
    assert wrapper.param_groups is inner.param_groups
    extra = a_weight(3.0)
    wrapper.add_param_group({"params": [extra], "lr": 0.5})
    assert inner.param_groups[1]["params"] == [extra]
    assert repr(inner) in repr(wrapper)


def test_methods_and_attributes_of_the_inner_optimizer_are_reachable() -> None:
    class Custom(torch.optim.SGD):
        radius = 3

        def ascend(self, factor: int) -> int:
            return self.radius * factor

    inner = Custom([a_weight()], lr=1.0)
    wrapper = ScalerAwareOptimizer(inner)
    assert wrapper.ascend(2) == 6
    wrapper.radius = 5
    assert inner.radius == 5
    assert wrapper.ascend(2) == 10
    del wrapper.radius
    assert inner.radius == 3
    with pytest.raises(AttributeError, match="nothing"):
        _ = wrapper.nothing


def test_a_step_returns_what_the_inner_step_returns_and_passes_its_keywords_on() -> None:
    class Custom(torch.optim.SGD):
        def step(self, closure: Any = None, *, noise: float = 0.0) -> Any:
            super().step(closure)
            return "stepped", noise

    class Bare(torch.optim.SGD):
        def step(self) -> str:  # type: ignore[override]
            return "bare"

        def zero_grad(self) -> None:  # type: ignore[override]
            self.cleared = True

    weight = a_weight()
    assert ScalerAwareOptimizer(Custom([weight])).step(noise=0.5) == ("stepped", 0.5)
    scaler = a_scaler()
    scaler.scale(weight.sum()).backward()
    assert ScalerAwareOptimizer(Custom([weight]), scaler=scaler).step(noise=2.0) == ("stepped", 2.0)
    bare = ScalerAwareOptimizer(Bare([weight]))
    assert bare.step() == "bare"
    bare.zero_grad()
    assert bare.cleared


@pytest.mark.parametrize(("set_to_none", "expected"), [(None, None), (True, None), (False, 0.0)])
def test_zero_grad_takes_torchs_option(set_to_none: bool | None, expected: float | None) -> None:
    weight = a_weight()
    weight.sum().backward()
    plain(weight).zero_grad(set_to_none)
    assert weight.grad == expected


def test_train_and_eval_reach_an_optimizer_that_has_modes() -> None:
    class Averaged(torch.optim.SGD):
        mode = "none"

        def train(self) -> None:
            self.mode = "train"

        def eval(self) -> None:
            self.mode = "eval"

    inner = Averaged([a_weight()])
    wrapper = ScalerAwareOptimizer(inner)
    wrapper.train()
    assert inner.mode == "train"
    wrapper.eval()
    assert inner.mode == "eval"
    other = plain(a_weight())
    other.train()
    other.eval()


# What became of a step.


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_an_overflow_is_seen_and_changes_nothing(options: dict[str, Any], poison: float) -> None:
    weight, scaler = a_weight(1.0, 2.0), a_scaler()
    wrapper = ScalerAwareOptimizer(torch.optim.AdamW([weight], lr=0.1, **options), scaler=scaler)
    assert wrapper.outcome == StepOutcome(StepKind.ACCUMULATING, 1, 0, 0)
    assert not wrapper.step_was_skipped
    scaler.scale((weight * poison).sum()).backward()
    wrapper.step()
    assert wrapper.step_was_skipped
    assert wrapper.outcome == StepOutcome(StepKind.SKIPPED, 1, 1, 0)
    assert weight.tolist() == [1.0, 2.0]
    assert scaler.get_scale() == 512.0
    wrapper.zero_grad()
    scaler.scale(weight.sum()).backward()
    wrapper.step()
    assert not wrapper.step_was_skipped
    assert wrapper.outcome == StepOutcome(StepKind.STEPPED, 1, 2, 1)


def test_without_a_scaler_nan_is_applied_as_in_torch() -> None:
    weight = a_weight()
    wrapper = plain(weight)
    (weight * math.nan).sum().backward()
    wrapper.step()
    assert math.isnan(weight.item())
    assert wrapper.outcome.kind is StepKind.STEPPED


@pytest.mark.parametrize(("fused", "of_torch"), [(False, 1), (True, 0)])
def test_nothing_waits_for_the_device_beyond_torch_until_it_is_asked(
    fused: bool, of_torch: int
) -> None:
    weights, scaler = [a_weight(), a_weight()], a_scaler()
    first, second = (
        ScalerAwareOptimizer(sgd(weight, fused=fused), scaler=scaler) for weight in weights
    )
    with CountWaits() as waits:
        for factor in (1.0, math.inf, 1.0, math.inf, 1.0):
            scaler.scale((weights[0] * factor + weights[1]).sum()).backward()
            first.step()
            first.zero_grad()  # the scale changes, and the second one's gradients with it
            second.step()
            second.zero_grad()
    assert waits.count == 10 * of_torch
    with CountWaits() as waits:
        assert first.outcome == StepOutcome(StepKind.STEPPED, 1, 5, 3)
        assert second.outcome == StepOutcome(StepKind.STEPPED, 1, 5, 5)
    assert (waits.count > 0) == fused
    with CountWaits() as waits:
        assert first.outcome.num_steps == 3
        assert not first.step_was_skipped
    assert waits.count == 0


@pytest.mark.parametrize("fused", [False, True])
def test_an_outcome_is_a_value_that_stays_as_it_is(fused: bool) -> None:
    weight, scaler = a_weight(), a_scaler()
    wrapper = ScalerAwareOptimizer(sgd(weight, fused=fused), scaler=scaler)
    seen = []
    for factor in (1.0, math.inf, 1.0):
        wrapper.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        wrapper.step()
        seen.append(wrapper.outcome)
    assert seen == [
        StepOutcome(StepKind.STEPPED, 1, 1, 1),
        StepOutcome(StepKind.SKIPPED, 1, 2, 1),
        StepOutcome(StepKind.STEPPED, 1, 3, 2),
    ]


# Accumulation.


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_an_inner_micro_batch_does_nothing(scaled: bool, fused: bool) -> None:
    weight = a_weight(1.0)
    scaler = a_scaler(growth_interval=1) if scaled else None
    wrapper = ScalerAwareOptimizer(sgd(weight, fused=fused), scaler=scaler)
    scale: Callable[[torch.Tensor], torch.Tensor] = scaler.scale if scaler else lambda loss: loss

    def micro_batch(window: Window, factor: float = 0.25) -> None:
        wrapper.window = window
        scale((weight * factor).sum()).backward()
        wrapper.unscale_gradients()
        wrapper.step()
        wrapper.zero_grad()

    micro_batch(Window(0, 3))
    assert wrapper.outcome == StepOutcome(StepKind.ACCUMULATING, 1, 0, 0)
    micro_batch(Window(1, 3))
    assert (weight.item(), weight.grad is None) == (1.0, False)
    micro_batch(Window(2, 3))
    assert (weight.item(), weight.grad) == (0.25, None)
    assert wrapper.outcome == StepOutcome(StepKind.STEPPED, 3, 1, 1)
    if scaler is None:
        return
    assert scaler.get_scale() == 2048.0
    micro_batch(Window(0, 1), math.inf)
    assert wrapper.outcome == StepOutcome(StepKind.SKIPPED, 1, 2, 1)
    micro_batch(Window(0, 2))
    assert wrapper.step_was_skipped
    assert wrapper.outcome == StepOutcome(StepKind.ACCUMULATING, 1, 2, 1)


@pytest.mark.parametrize("clear", ["at the top", "at the end", "at both"])
@pytest.mark.parametrize(("num_micro_batches", "steps"), [(8, 2), (7, 3), (3, 1), (2, 5)])
def test_gradients_may_be_cleared_at_either_end_of_the_loop(
    clear: str, num_micro_batches: int, steps: int
) -> None:
    weight = a_weight(0.0)
    wrapper, epoch = plain(weight, lr=1.0), Accumulation(steps, num_micro_batches)
    expected, window_sum = 0.0, 0.0
    for index in range(2 * num_micro_batches):
        wrapper.window = epoch.window(index % num_micro_batches)
        if clear != "at the end":
            wrapper.zero_grad()
        wrapper.before_backward()
        (weight * 2.0**index).sum().backward()
        wrapper.step()
        if clear != "at the top":
            wrapper.zero_grad()
        window_sum += 2.0**index
        if wrapper.window.closes:
            expected, window_sum = expected - window_sum, 0.0
        assert weight.item() == expected


def test_what_is_not_stepped_with_is_not_cleared_on_an_inner_micro_batch() -> None:
    weight = a_weight(1.0)
    wrapper = plain(weight)
    for cleared_by_model in (False, True):
        wrapper.window = Window(1, 2)
        weight.sum().backward()
        wrapper.step()
        if cleared_by_model:
            weight.grad = None
        else:
            wrapper.zero_grad()
        wrapper.window = Window(0, 2)
        weight.sum().backward()
        if cleared_by_model:
            wrapper.step()
        wrapper.zero_grad()
        assert weight.grad == 1.0


def test_without_accumulation_gradients_are_cleared_whenever_it_is_asked_for() -> None:
    weight = a_weight(1.0)
    wrapper = plain(weight)
    for window in (None, Window(0, 1)):
        wrapper.window = window
        weight.sum().backward()
        wrapper.zero_grad()
        assert weight.grad is None


def test_an_outcome_that_nobody_asked_for_in_time_is_still_told() -> None:
    weight, scaler = a_weight(1.0), a_scaler()
    wrapper = ScalerAwareOptimizer(sgd(weight, fused=True), scaler=scaler)
    scaler.scale((weight * math.inf).sum()).backward()
    wrapper.step()
    wrapper.window = Window(0, 2)
    wrapper.step()
    assert wrapper.outcome == StepOutcome(StepKind.ACCUMULATING, 1, 1, 0)
    assert wrapper.step_was_skipped


def test_a_window_can_be_dropped_after_its_last_backward_pass() -> None:
    weight = a_weight(1.0)
    wrapper = plain(weight)
    for index in range(2):
        wrapper.window = Window(index, 2)
        wrapper.before_backward()
        weight.sum().backward()
        wrapper.zero_grad()
        assert (weight.grad is None) == (index == 1)


def test_an_optimizer_that_sits_a_window_out_is_cleared_at_its_end() -> None:
    weights = [a_weight(1.0), a_weight(1.0)]
    first, second = (plain(weight) for weight in weights)
    for index in range(2):
        for wrapper in (first, second):
            wrapper.window = Window(index, 2)
            wrapper.before_backward()
        (weights[0] + weights[1]).sum().backward()
        first.step()
        for wrapper in (first, second):
            wrapper.zero_grad()
    assert [weight.grad for weight in weights] == [None, None]


# Several optimizers on one scaler.


@dataclass
class Two:
    """Two weights of 1, learning rate 1, on a scaler of 1024."""

    fused: bool = False
    growth_interval: int = 2000
    weights: list[torch.nn.Parameter] = field(default_factory=lambda: [a_weight(), a_weight()])

    def __post_init__(self) -> None:
        self.scaler = a_scaler(growth_interval=self.growth_interval)
        self.first, self.second = (
            ScalerAwareOptimizer(sgd(weight, fused=self.fused), scaler=self.scaler)
            for weight in self.weights
        )

    def backward(self, *slopes: float) -> None:
        loss = sum(weight * slope for weight, slope in zip(self.weights, slopes, strict=True))
        self.scaler.scale(loss).backward()  # type: ignore[arg-type]

    @property
    def values(self) -> list[float]:
        return [weight.item() for weight in self.weights]

    @property
    def scale(self) -> float:
        return self.scaler.get_scale()


def step_both(two: Two) -> None:
    two.first.step()
    two.second.step()


def step_and_clear_each(two: Two) -> None:
    two.first.step()
    two.first.zero_grad()
    two.second.step()
    two.second.zero_grad()


def clip_both(two: Two) -> None:
    two.first.unscale_gradients()
    two.second.unscale_gradients()
    torch.nn.utils.clip_grad_norm_(two.weights[1:], 100.0)
    two.second.unscale_gradients()
    two.second.step()
    two.first.step()


def clip_late(two: Two) -> None:
    two.first.step()
    two.first.zero_grad()
    two.second.unscale_gradients()
    torch.nn.utils.clip_grad_norm_(two.weights[1:], 100.0)
    two.second.step()


def unscale_by_hand(two: Two) -> None:
    two.scaler.unscale_(two.first)
    two.scaler.unscale_(two.second.optimizer)
    two.second.unscale_gradients()
    two.first.step()
    two.first.zero_grad()
    two.second.step()


def backward_of_neither(two: Two) -> None:
    two.first.step()
    two.second.before_backward()
    two.second.step()


ORDERS = [
    step_both, step_and_clear_each, clip_both, clip_late, unscale_by_hand, backward_of_neither
]  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("slopes", "values", "scale"),
    [
        ((math.inf, 0.25), [1.0, 0.75], 512.0),
        ((0.25, math.nan), [0.75, 1.0], 512.0),
        ((math.inf, math.inf), [1.0, 1.0], 512.0),
        ((0.25, 0.5), [0.75, 0.5], 2048.0),
    ],
)
def test_one_training_step_is_one_update(
    order: Callable[[Two], None],
    fused: bool,
    slopes: tuple[float, float],
    values: list[float],
    scale: float,
) -> None:
    two = Two(fused, growth_interval=1)
    two.backward(*slopes)
    order(two)
    assert (two.values, two.scale) == (values, scale)
    skipped = [math.isinf(slope) or math.isnan(slope) for slope in slopes]
    assert [two.first.step_was_skipped, two.second.step_was_skipped] == skipped
    # And so does the next one, whatever the first has left behind.
    two.first.zero_grad()
    two.second.zero_grad()
    two.backward(0.5, 0.5)
    order(two)
    assert two.values == [value - 0.5 for value in values]
    assert two.scale == scale * 2


@pytest.mark.parametrize("fused", [False, True])
def test_optimizers_that_alternate_update_each_time(fused: bool) -> None:
    two = Two(fused, growth_interval=1)
    for step in range(6):
        mine = two.second if step % 2 else two.first
        mine.zero_grad()
        two.backward(*((0.0, 0.25) if step % 2 else (0.25, 0.0)))
        mine.step()
    two.first.zero_grad()
    two.second.zero_grad()
    assert two.scale == 1024.0 * 2**6
    assert two.values == [0.25, 0.25]


def test_gradients_that_another_loss_left_behind_delay_the_update_to_the_next_clearing() -> None:
    two = Two(growth_interval=1)
    two.backward(0.25, 7.0)
    two.first.step()
    assert two.scale == 1024.0
    two.second.zero_grad()
    assert two.scale == 2048.0
    two.backward(0.25, 0.5)
    two.second.step()
    assert two.scale == 2048.0
    two.second.before_backward()
    assert two.scale == 4096.0
    assert two.values == [0.75, 0.5]


@pytest.mark.parametrize("slope", [0.25, math.inf])
def test_a_step_after_a_step_settles_the_first_though_nobody_said_so(slope: float) -> None:
    """The model clears the gradients itself, and nobody scales the loss for the user."""
    two = Two(growth_interval=1)
    two.backward(slope, 1.0)
    two.first.step()
    for weight in two.weights:
        weight.grad = None
    two.backward(0.25, 0.5)
    two.first.step()
    two.second.step()
    first = 0.5 if slope == 0.25 else 0.75
    assert two.values == [first, 0.5]


def test_gradients_kept_over_several_updates_stay_in_step_with_the_scale() -> None:
    two = Two(growth_interval=1)
    two.second.add_param_group({"params": [a_weight()]})  # never used
    for slopes in ((0.25, 0.125), (math.inf, 0.125), (0.25, 0.125), (0.25, 0.125)):
        two.first.zero_grad()
        two.backward(*slopes)
        two.first.step()
    two.second.step()
    assert two.values == [0.25, 0.5]


def test_an_optimizer_that_is_left_aside_does_not_wear_the_scale_down() -> None:
    two = Two()
    for step in range(5):
        two.first.zero_grad()
        two.backward(0.125, math.inf if step == 0 else 1.0)
        two.first.step()
    two.first.zero_grad()
    assert two.scale == 512.0
    assert two.values == [1.0 - 5 * 0.125, 1.0]
    # When it comes back it is waited for again.
    two.second.zero_grad()
    two.backward(0.125, 0.25)
    step_both(two)
    two.first.zero_grad()
    two.second.zero_grad()
    two.backward(math.inf, 0.25)
    two.first.step()
    assert two.scale == 512.0
    two.second.step()
    assert two.scale == 256.0
    assert two.values == [0.25, 0.5]


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("slope", [0.25, math.inf])
def test_one_that_comes_back_may_be_clipped_first(slope: float, by_hand: bool) -> None:
    two = Two(growth_interval=1)
    for _ in range(2):
        two.first.zero_grad()
        two.backward(0.125, 7.0)
        two.first.step()
    two.first.zero_grad()
    two.second.zero_grad()
    scale = two.scale
    two.backward(slope, 0.25)
    if by_hand:
        two.scaler.unscale_(two.second)
    else:
        two.second.unscale_gradients()
    torch.nn.utils.clip_grad_norm_(two.weights[1:], 0.125)
    step_both(two)
    assert two.values == pytest.approx([0.75 if math.isinf(slope) else 0.5, 0.875])
    if not by_hand:
        assert two.scale == (scale / 2 if math.isinf(slope) else scale * 2)


@pytest.mark.parametrize("poison", [1.0, math.inf])
def test_gradients_dropped_after_they_were_unscaled_leave_nothing_behind(poison: float) -> None:
    two = Two(growth_interval=1)
    two.backward(poison, 0.25)
    two.first.unscale_gradients()
    two.first.zero_grad()
    two.second.step()
    assert two.scale == (2048.0 if poison == 1.0 else 512.0)
    two.second.zero_grad()
    two.backward(0.25, 0.25)
    step_both(two)
    assert two.values == [0.75, 0.5]


@pytest.mark.parametrize(("poison", "scale"), [(1.0, 4096.0), (math.inf, 1024.0)])
def test_a_lone_optimizer_drops_unscaled_gradients_and_what_was_found_in_them_counts(
    poison: float, scale: float
) -> None:
    weight, scaler = a_weight(1.0), a_scaler(growth_interval=1)
    wrapper = ScalerAwareOptimizer(sgd(weight), scaler=scaler)
    for factor in (poison, 0.25):
        scaler.scale((weight * factor).sum()).backward()
        wrapper.unscale_gradients()
        if factor == 0.25:
            wrapper.step()
        wrapper.zero_grad()
    assert (weight.item(), scaler.get_scale()) == (0.75, scale)
    assert wrapper.outcome == StepOutcome(StepKind.STEPPED, 1, 1, 1)


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_unscaled_once(fused: bool) -> None:
    weight, scaler = a_weight(2.0), a_scaler()
    wrapper = ScalerAwareOptimizer(sgd(weight, fused=fused), scaler=scaler)
    for _ in range(2):
        scaler.scale((weight * 0.5).sum()).backward()
        for _ in range(3):
            wrapper.unscale_gradients()
            assert weight.grad is not None
            assert weight.grad.item() == 0.5
        wrapper.step()
        wrapper.zero_grad()
    assert weight.item() == 1.0
    other = plain(weight)
    other.unscale_gradients()


@dataclass
class Program:
    """Optimizers with weights of their own, run with a scaler or without."""

    count: int
    scaler: GradScaler | None

    def __post_init__(self) -> None:
        self.weights = [a_weight(0.0) for _ in range(self.count)]
        self.optimizers = [
            ScalerAwareOptimizer(sgd(weight, lr=1.0), scaler=self.scaler) for weight in self.weights
        ]

    def run(self, operation: tuple[str, int], *, announced: bool) -> None:
        name, argument = operation
        if name == "backward":
            if announced:
                for optimizer in self.optimizers:
                    optimizer.before_backward()
            loss = sum(
                weight * (index + 1.0)
                for index, weight in enumerate(self.weights)
                if argument >> index & 1
            )
            assert isinstance(loss, torch.Tensor)
            loss = loss if self.scaler is None else self.scaler.scale(loss)
            loss.backward()
        elif name == "step":
            self.optimizers[argument].step()
        elif name == "unscale":
            self.optimizers[argument].unscale_gradients()
        elif name == "model clears":
            self.weights[argument].grad = None
        else:
            self.optimizers[argument].zero_grad(set_to_none=name == "clear")


# What an operation makes of the gradients of an optimizer. What is left out has no meaning in torch
# either: a step without gradients, or with some that had been stepped with or unscaled before the
# last backward pass; or clearing them behind the back of a scaler that was told of them.
NEXT = {
    "backward": {"none": "fresh", "fresh": "fresh"},
    "step": {"fresh": "spent", "unscaled": "spent"},
    "unscale": {"fresh": "unscaled"},
    "clear": dict.fromkeys(["none", "fresh", "unscaled", "spent", "mixed"], "none"),
    "zero": dict.fromkeys(["none", "fresh", "unscaled", "spent", "mixed"], "none"),
    "model clears": {"none": "none", "fresh": "none", "spent": "none"},
}


def sensible(operations: list[tuple[str, int]], count: int) -> list[tuple[str, int]]:
    """Leave out the operations that have no meaning."""
    held = ["none"] * count
    kept = []
    for name, argument in operations:
        if name == "backward":
            for index in range(count):
                if argument >> index & 1:
                    held[index] = NEXT[name].get(held[index], "mixed")
        elif held[argument] in NEXT[name]:
            held[argument] = NEXT[name][held[argument]]
        else:
            continue
        kept.append((name, argument))
    return kept


@settings(max_examples=200)
@given(data=st.data(), announced=st.booleans(), growth_interval=st.sampled_from([1, 2, 50]))
def test_in_any_order_of_calls_a_scaler_changes_no_weight(
    data: st.DataObject, announced: bool, growth_interval: int
) -> None:
    count = data.draw(st.integers(1, 3))
    drawn = data.draw(
        st.lists(
            st.one_of(
                st.tuples(st.just("backward"), st.integers(1, 2**count - 1)),
                st.tuples(
                    st.sampled_from(["step", *sorted(NEXT.keys() - {"backward"})]),
                    st.integers(0, count - 1),
                ),
            ),
            max_size=24,
        )
    )
    operations = sensible(drawn, count)
    unscaled = Program(count, None)
    scaled = Program(count, a_scaler(2.0, growth_interval=growth_interval))
    for operation in operations:
        unscaled.run(operation, announced=announced)
        scaled.run(operation, announced=announced)
    assert [weight.item() for weight in scaled.weights] == [
        weight.item() for weight in unscaled.weights
    ]


def test_optimizers_that_are_gone_are_not_waited_for() -> None:
    two = Two(growth_interval=1)
    two.backward(0.25, 0.25)
    reference = weakref.ref(two.second)
    del two.second
    assert reference() is None  # at once: nothing holds it in a circle
    two.first.step()
    assert two.scale == 2048.0


def test_wrappers_that_come_and_go_leave_nothing_on_the_board() -> None:
    weight, scaler = a_weight(), a_scaler()
    wrapper = ScalerAwareOptimizer(sgd(weight), scaler=scaler)
    for _ in range(4):
        wrapper = ScalerAwareOptimizer(sgd(weight), scaler=scaler)
    assert wrapper.scaler is scaler
    assert len(_ROUNDS[scaler]._members) <= 2


def test_the_board_of_a_scaler_ends_with_it() -> None:
    gc.collect()
    before = len(_ROUNDS)
    two = Two()
    assert len(_ROUNDS) == before + 1
    two.backward(0.25, 0.25)
    two.first.step()
    del two
    gc.collect()
    assert len(_ROUNDS) == before


# Scalers: off, of somebody else, without gradients.


def test_a_scaler_that_is_disabled_is_as_good_as_none() -> None:
    weight = a_weight(1.0)
    scaler = a_scaler(enabled=False)
    wrapper = ScalerAwareOptimizer(torch.optim.LBFGS([weight], lr=0.5), scaler=scaler)

    def closure() -> torch.Tensor:
        wrapper.zero_grad()
        loss = (weight**2).sum()
        scaler.scale(loss).backward()
        return loss

    assert wrapper.step(closure).item() == 1.0
    assert weight.item() < 1.0
    wrapper.unscale_gradients()
    wrapper.before_backward()
    assert wrapper.outcome.kind is StepKind.STEPPED
    assert not wrapper.step_was_skipped


# Not for a plain optimizer whose wrapper has the scaler too: it steps and updates it by itself.
@pytest.mark.parametrize(("fused", "given_too"), [(False, False), (True, False), (True, True)])
def test_a_wrapper_may_be_handed_to_a_scaler(fused: bool, given_too: bool) -> None:
    weight, scaler = a_weight(1.0), a_scaler(8.0)
    inner = torch.optim.SGD([weight], lr=0.1, fused=fused)
    wrapper = ScalerAwareOptimizer(inner, scaler=scaler if given_too else None)
    for factor, expected, steps in ((1.0, 0.9, 1), (math.inf, 0.9, 1), (1.0, 0.8, 2)):
        wrapper.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(wrapper)
        scaler.update()
        assert weight.item() == pytest.approx(expected)
        assert wrapper.outcome.num_steps == steps
        assert not {"grad_scale", "found_inf"} & vars(inner).keys()
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("others_step", [False, True])
def test_a_fused_step_without_gradients_is_torchs_and_leaves_no_trace(others_step: bool) -> None:
    two = Two(fused=True, growth_interval=1)
    two.scaler.scale((two.weights[1] * 0.25).sum()).backward()
    for _ in range(2):
        two.first.step()
    assert not two.first.step_was_skipped
    if others_step:
        two.second.step()
        assert two.values == [1.0, 0.75]
    two.second.zero_grad()
    two.backward(0.25, 0.25)
    step_both(two)
    assert two.values == [0.75, 0.5 if others_step else 0.75]
    assert two.scale == (4096.0 if others_step else 2048.0)


@pytest.mark.parametrize("by_hand", [False, True])
def test_there_is_nothing_to_unscale_without_gradients(by_hand: bool) -> None:
    two = Two(growth_interval=1)
    two.scaler.scale((two.weights[1] * 0.25).sum()).backward()
    if by_hand:
        two.scaler.unscale_(two.first)
    two.first.unscale_gradients()
    two.first.zero_grad()
    two.second.unscale_gradients()
    two.second.step()
    assert two.values == [1.0, 0.75]
    assert two.scale == 2048.0


def test_an_optimizer_that_wants_the_scaler_for_an_argument_is_unscaled_for() -> None:
    class Old(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
            assert grad_scaler is None
            return super().step(closure)

    weight, scaler = a_weight(1.0), a_scaler()
    wrapper = ScalerAwareOptimizer(Old([weight], lr=1.0), scaler=scaler)
    for factor, expected in ((0.25, 0.75), (math.inf, 0.75), (0.25, 0.5)):
        wrapper.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        wrapper.step()
        assert weight.item() == expected


def test_a_plain_step_without_gradients_is_torchs_error() -> None:
    two = Two()
    two.scaler.scale(two.weights[1].sum()).backward()
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        two.first.step()
    assert two.first.outcome.num_windows == 0


def test_a_scaler_without_its_notes_is_told_of() -> None:
    class Future(GradScaler):
        def __getattribute__(self, name: str) -> Any:
            if name == "_per_optimizer_states":
                raise AttributeError(name)
            return super().__getattribute__(name)

    weight, scaler = a_weight(), Future("cpu")
    wrapper = ScalerAwareOptimizer(sgd(weight), scaler=scaler)
    scaler.scale(weight.sum()).backward()
    with pytest.raises(RuntimeError, match=r"keep its notes in `_per_optimizer_states`.*Future"):
        wrapper.step()
    assert weight.item() == 1.0


# Closures.


@pytest.mark.parametrize("make", [lambda p: torch.optim.LBFGS(p, lr=0.3), OPTIMIZERS["Adam"]])
def test_a_closure_is_called_as_the_inner_optimizer_likes(make: Make) -> None:
    losses: list[list[float]] = [[], []]
    weights = [a_weight(1.0, -3.0) for _ in range(2)]
    theirs = make(weights[:1])
    ours = ScalerAwareOptimizer(make(weights[1:]))
    for optimizer, weight, log in zip((theirs, ours), weights, losses, strict=True):

        def closure(
            optimizer: torch.optim.Optimizer = optimizer,
            weight: torch.nn.Parameter = weight,
            log: list[float] = log,
        ) -> float:
            optimizer.zero_grad()
            loss = (weight**4).sum()
            loss.backward()
            log.append(loss.item())
            return log[-1]

        returned = [optimizer.step(closure) for _ in range(3)]
        assert returned[0] == log[0]
    assert losses[0] == losses[1]
    assert torch.equal(weights[0], weights[1])


@pytest.mark.parametrize("fused", [False, True])
def test_a_closure_under_a_scaler_is_called_once_and_unscaled(fused: bool) -> None:
    weight, scaler = a_weight(1.0), a_scaler(growth_interval=1)
    wrapper = ScalerAwareOptimizer(sgd(weight, fused=fused), scaler=scaler)
    losses = []
    for slope in (0.25, math.inf, 0.25):

        def closure(slope: float = slope) -> torch.Tensor:
            wrapper.zero_grad()
            wrapper.before_backward()
            loss = (weight * slope).sum()
            scaler.scale(loss).backward()
            return loss

        with torch.no_grad():
            losses.append(wrapper.step(closure).item())
    assert losses == [0.25, math.inf, 0.75 * 0.25]
    assert weight.item() == 0.5
    assert scaler.get_scale() == 2048.0
    assert wrapper.outcome == StepOutcome(StepKind.STEPPED, 1, 3, 2)


def test_a_closure_that_is_called_often_is_refused_under_a_scaler_before_anything_happens() -> None:
    weight, scaler = a_weight(1.0), a_scaler()
    wrapper = ScalerAwareOptimizer(torch.optim.LBFGS([weight]), scaler=scaler)
    message = r"`closure` must be None where a scaler .*, got one for LBFGS: .* without a scaler"
    with pytest.raises(PlanError, match=message):
        wrapper.step(lambda: pytest.fail("called"))
    assert weight.item() == 1.0
    assert wrapper.outcome.num_windows == 0


def test_a_closure_is_not_called_on_an_inner_micro_batch() -> None:
    wrapper = plain(a_weight())
    wrapper.window = Window(0, 2)
    assert wrapper.step(lambda: pytest.fail("called")) is None


# Hooks.


@pytest.mark.parametrize(("fused", "runs"), [(False, [0, 0, 1]), (True, [0, 1, 2])])
def test_step_hooks_run_with_the_inner_step_and_are_given_the_wrapper(
    fused: bool, runs: list[int]
) -> None:
    weight, scaler = a_weight(), a_scaler()
    wrapper = ScalerAwareOptimizer(sgd(weight, fused=fused), scaler=scaler)
    seen: list[tuple[str, bool]] = []
    handles = [
        wrapper.register_step_pre_hook(lambda one, a, k: seen.append(("pre", one is wrapper))),
        wrapper.register_step_post_hook(lambda one, a, k: seen.append(("post", one is wrapper))),
    ]
    numbers = []
    for window, factor in ((Window(0, 2), 1.0), (Window(1, 2), math.inf), (Window(0, 1), 1.0)):
        wrapper.window = window
        scaler.scale((weight * factor).sum()).backward()
        wrapper.step()
        wrapper.zero_grad()
        numbers.append(len(seen) // 2)
    assert numbers == runs
    assert seen == [("pre", True), ("post", True)] * runs[-1]
    for handle in handles:
        handle.remove()
    scaler.scale(weight.sum()).backward()
    wrapper.step()
    assert len(seen) == 2 * runs[-1]


def test_a_pre_hook_can_change_what_the_step_is_given() -> None:
    class Custom(torch.optim.SGD):
        def step(self, closure: Any = None, *, noise: float = 0.0) -> Any:
            return noise

    wrapper = ScalerAwareOptimizer(Custom([a_weight()]))
    wrapper.register_step_pre_hook(lambda one, args, kwargs: (args, {"noise": 0.5}))
    assert wrapper.step() == 0.5


def test_hooks_of_the_state_are_given_the_wrapper() -> None:
    wrapper = plain(a_weight(), momentum=0.5)
    seen: list[Any] = []

    def mark(one: Any, state: dict[str, Any]) -> dict[str, Any]:
        seen.append(one)
        return {**state, "marked": True}

    def unmark(one: Any, state: dict[str, Any]) -> dict[str, Any]:
        seen.append(one)
        return {key: value for key, value in state.items() if key != "marked"}

    wrapper.register_state_dict_pre_hook(seen.append)
    wrapper.register_state_dict_post_hook(mark)
    wrapper.register_load_state_dict_pre_hook(unmark)
    wrapper.register_load_state_dict_post_hook(seen.append)
    state = wrapper.state_dict()
    assert state["marked"]
    wrapper.load_state_dict(state)
    assert len(seen) == 4
    assert all(one is wrapper for one in seen)


def test_a_hook_outlives_its_wrapper_with_the_inner_optimizer() -> None:
    inner, seen = sgd(a_weight()), []
    ScalerAwareOptimizer(inner).register_step_post_hook(lambda one, a, k: seen.append(one))
    inner.step()
    assert seen == [inner]


# State, copies, devices.


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("fused", [False, True])
def test_a_copy_goes_on_as_the_original_would(copied: Callable[[Any], Any], fused: bool) -> None:
    two = Two(fused, growth_interval=1)
    two.first.window = Window(0, 2)
    two.second.window = Window(0, 1)
    two.backward(0.25, math.inf)
    step_both(two)
    two.second.zero_grad()
    twin: Two = copied(two)
    assert (twin.first.scaler, twin.second.scaler) == (twin.scaler, twin.scaler)
    assert twin.first.window == Window(0, 2)
    assert twin.second.outcome == two.second.outcome == StepOutcome(StepKind.SKIPPED, 1, 1, 0)
    assert twin.second.step_was_skipped
    for each in (two, twin):
        # The copied weights are those that the copied optimizers hold.
        assert each.first.param_groups[0]["params"][0] is each.weights[0]
        each.weights[0].grad = None
        each.first.window = None
        each.backward(0.5, 0.25)
        step_both(each)
        assert each.values == [0.5, 0.75]
        assert each.scale == 1024.0


def test_a_state_moves_between_wrapped_and_plain() -> None:
    weights = [a_weight(1.0, 2.0) for _ in range(3)]
    wrapper = ScalerAwareOptimizer(OPTIMIZERS["Adam"](weights[:1]))
    for _ in range(2):
        weights[0].sum().backward()
        wrapper.step()
    inner = OPTIMIZERS["Adam"](weights[1:2])
    inner.load_state_dict(wrapper.state_dict())
    other = ScalerAwareOptimizer(OPTIMIZERS["Adam"](weights[2:]))
    other.load_state_dict(inner.state_dict())
    moment = wrapper.state[weights[0]]["exp_avg"]
    assert torch.equal(other.state[weights[2]]["exp_avg"], moment)
    assert other.state[weights[2]]["step"] == 2


class Careless(torch.optim.SGD):
    """Loads tensors wherever they were saved."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        for key, entries in state_dict["state"].items():
            self.state[parameters[key] if isinstance(key, int) else key] = entries


@pytest.mark.parametrize(("device_placement", "device"), [(True, "meta"), (False, "cpu")])
def test_a_state_is_loaded_to_the_device_of_its_parameter(
    device_placement: bool, device: str
) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, device="meta"))
    wrapper = ScalerAwareOptimizer(Careless([parameter]), device_placement)
    tensor = torch.ones(2)
    state = {"m": tensor, "history": [tensor, (tensor, {"v": tensor})], "step": tensor, "n": 3}
    of_all = {"m": tensor}
    wrapper.load_state_dict({"state": {0: dict(state), "all": of_all}, "param_groups": []})
    assert of_all["m"] is tensor
    loaded = wrapper.state[parameter]
    history = loaded["history"]
    tensors = [loaded["m"], history[0], history[1][0], history[1][1]["v"]]
    assert {one.device.type for one in tensors} == {device}
    assert loaded["step"].device.type == "cpu"
    assert loaded["n"] == 3


# Torch's schedules on a wrapper.


@pytest.mark.parametrize("scaled", [False, True])
def test_a_schedule_of_torchs_own_may_be_built_on_a_wrapper(scaled: bool) -> None:
    weight, scaler = a_weight(), a_scaler(enabled=scaled)
    wrapper = ScalerAwareOptimizer(sgd(weight), scaler=scaler)
    schedule = torch.optim.lr_scheduler.StepLR(wrapper, 1, 0.5)
    for _ in range(2):
        scaler.scale(weight.sum()).backward()
        wrapper.step()
        wrapper.zero_grad()
        schedule.step()
    assert weight.item() == 1.0 - 1.0 - 0.5
    assert wrapper.optimizer.param_groups[0]["lr"] == 0.25
    assert wrapper.outcome.num_steps == 2
    del wrapper.step  # the counter that the schedule put there
    scaler.scale(weight.sum()).backward()
    wrapper.step()
    assert wrapper.outcome.num_steps == 3


# Bad input.


def test_it_refuses_an_optimizer_that_is_wrapped_already() -> None:
    with pytest.raises(PlanError, match=r"`optimizer` must be .* not wrapped yet, got a Scaler"):
        ScalerAwareOptimizer(plain(a_weight()))


def test_it_refuses_what_is_no_optimizer_or_no_scaler() -> None:
    with pytest.raises(PlanError, match=r"`optimizer` must be a torch.optim.Optimizer, got list\."):
        ScalerAwareOptimizer([a_weight()])  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"`scaler` must be a .*GradScaler or None, got float\."):
        ScalerAwareOptimizer(sgd(a_weight()), scaler=2.0)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"`device_placement` must be True or False, got 'cpu'\."):
        ScalerAwareOptimizer(sgd(a_weight()), "cpu")  # type: ignore[arg-type]
