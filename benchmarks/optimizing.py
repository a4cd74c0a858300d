"""What the wrappers of optimizer and schedule add to a step, beside Accelerate's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import PartialState
from torch.optim import lr_scheduler as schedules

from benchmarks.table import Row, at_least, at_most, fewer, seconds, show, to_know
from shardplug.optimizer import ScalerAwareOptimizer
from shardplug.scheduler import StepSyncedScheduler

WORLD = 1024
LONG = 10**9  # ticks, so that no schedule ends while it is measured
MANY: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda tick: 1 / (1 + tick)),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, LONG),
    "LinearLR": lambda o: schedules.LinearLR(o, 1.0, 0.1, LONG),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=LONG),
}


class Quiet(torch.optim.SGD):
    """An optimizer whose step costs nothing, so that what is measured is not lost in it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


# Torch wraps the step of every class in a profiler's scope, unless it is marked as wrapped.
Quiet.step.hooked = True  # type: ignore[attr-defined]


def rows() -> list[Row]:
    """Measure everything."""
    Accelerator(cpu=True)
    return [*optimizer_step(), *schedule_tick(), *many_ticks()]


def optimizer_step() -> list[Row]:
    """Time what a wrapper adds to a step."""
    weights = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.ones(4)
    sgd = torch.optim.SGD(weights, lr=1e-9)
    quiet, ours, peer = quiet_sgd(), quiet_sgd(), quiet_sgd()
    step_us, quiet_us, ours_us, peer_us = in_turns(
        sgd.step, quiet.step, ScalerAwareOptimizer(ours).step, AcceleratedOptimizer(peer).step
    )
    added_us, peer_added_us = ours_us - quiet_us, peer_us - quiet_us
    what = "optimizer.step, added"
    return [
        to_know("optimizer.step, SGD of 2 parameters", step_us, unit="us"),
        at_least(what, added_us, peer_added_us, times=15, unit="us", name="Accelerate"),
    ]


def schedule_tick() -> list[Row]:
    """Time what a wrapper adds to a tick, on one rank."""

    def step_lr(optimizer: torch.optim.Optimizer) -> schedules.LRScheduler:
        return schedules.StepLR(optimizer, LONG)

    quiet = quiet_sgd()
    wrapped = ScalerAwareOptimizer(quiet_sgd())
    bare, ours = step_lr(wrapped.optimizer), step_lr(wrapped.optimizer)
    synced = StepSyncedScheduler(ours, wrapped)
    plain, theirs = step_lr(quiet), step_lr(quiet)
    accelerated = AcceleratedScheduler(theirs, AcceleratedOptimizer(quiet))
    wrapped.step()
    quiet.step()

    def stepped(schedule: Any) -> Callable[[], None]:
        # Ours moves with a new step only, so the step is taken before the bare one's tick too.
        def run() -> None:
            wrapped.step()
            schedule.step()

        return run

    ours_with, ours_bare, peer_with, peer_bare = in_turns(
        stepped(synced), stepped(bare), accelerated.step, plain.step
    )
    added_us, peer_added_us = ours_with - ours_bare, peer_with - peer_bare
    what = "schedule.step, added"
    return [
        to_know("schedule.step, StepLR", peer_bare, unit="us"),
        at_least(what, added_us, peer_added_us, times=2, unit="us", name="Accelerate"),
    ]


def many_ticks() -> list[Row]:
    """Time a step worth 1024 ticks, and compare its values with as many single ticks."""
    found = []
    for name, make in MANY.items():
        one, many = (tick_of(make, world) for world in (1, WORLD))
        inner = quiet_sgd()
        accelerated = AcceleratedScheduler(make(inner), AcceleratedOptimizer(inner))
        inner.step()
        state = PartialState._shared_state
        before = state["num_processes"]
        state["num_processes"] = WORLD
        try:
            peer = min(seconds(accelerated.step) for _ in range(51)) * 1e6
        finally:
            state["num_processes"] = before
        once, often = in_turns(one, many)
        found += [
            at_most(f"{name}, {WORLD} ticks / 1", often / once, 1.5, unit=""),
            at_least(
                f"{name}, {WORLD} ticks", often, peer, times=300, unit="us", name="Accelerate"
            ),
            at_most(f"{name}, relative difference", difference(make), 1e-12, unit=""),
        ]
    return found


def tick_of(make: Callable[[torch.optim.Optimizer], Any], world: int) -> Callable[[], None]:
    """Make a call that steps an optimizer at no cost, and its schedule."""
    optimizer = ScalerAwareOptimizer(quiet_sgd())
    scheduler = StepSyncedScheduler(make(optimizer.optimizer), optimizer, num_processes=world)

    def run() -> None:
        optimizer.step()
        scheduler.step()

    return run


def difference(make: Callable[[torch.optim.Optimizer], Any], steps: int = 5) -> float:
    """Compare the learning rates of some steps with those of ticking one by one."""
    optimizer = ScalerAwareOptimizer(quiet_sgd())
    scheduler = StepSyncedScheduler(make(optimizer.optimizer), optimizer, num_processes=WORLD)
    single = quiet_sgd()
    expected = make(single)
    single.step()
    worst = 0.0
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        for _ in range(WORLD):
            expected.step()
        ours, theirs = (one.param_groups[0]["lr"] for one in (optimizer, single))
        worst = max(worst, abs(ours - theirs) / theirs)
    return worst


def quiet_sgd() -> Quiet:
    """Make an optimizer of one parameter."""
    return Quiet([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)


def in_turns(*runs: Callable[[], object], calls: int = 20, repeats: int = 501) -> list[float]:
    """Time some calls in turns, in microseconds each.

    Differences of a microsecond are looked for, so each is the fastest of many short runs, one that
    nothing else on the machine came into.
    """
    taken = [
        [seconds(lambda: [run() for _ in range(calls)]) for run in runs]  # noqa: B023
        for _ in range(fewer(repeats))
    ]
    return [min(times) / calls * 1e6 for times in zip(*taken, strict=True)]


if __name__ == "__main__":
    show(rows)
