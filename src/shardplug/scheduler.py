"""A wrapper around any schedule that ticks when the optimizer really stepped.

The laws kept here: values are those of ticking one by one, at a cost that does not grow with the
number of ticks wherever torch has a formula for it; and no schedule runs past its ``total_steps``.
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Literal, Protocol, cast, final, get_args, runtime_checkable

import torch
from torch.optim import lr_scheduler as schedules

from shardplug.errors import PlanError
from shardplug.kinds import check_count, check_flag
from shardplug.optimizer import ScalerAwareOptimizer

Unit = Literal["batches", "updates"]


@runtime_checkable
class _Schedule(Protocol):
    """What is asked of a schedule that is not one of torch's."""

    def step(self) -> object: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


@final
class StepSyncedScheduler(schedules.LRScheduler):
    """A schedule that moves on only when its optimizers really stepped.

    Call ``step()`` as ever, after ``optimizer.step()`` on each batch: it reads the outcome of the
    optimizer's last steps, and ticks if there was a real one since the last call. A step that the
    scaler skipped, or an inner micro-batch of an accumulation window, moves nothing. A call that
    comes once per epoch ticks as a single step would.

    A schedule that is driven by an argument, such as ``ReduceLROnPlateau``, moves on once per call,
    whatever the optimizers did. A schedule with ``total_steps`` stops at its end. A schedule that
    is chained with others, or multiplicative by a function, is ticked one by one, all others of
    torch's at once.

    The schedule inside is the attribute ``scheduler``. Its attributes can be read and written
    here, and its state is the wrapper's.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = ScalerAwareOptimizer(torch.optim.SGD([weight], lr=1.0))
        >>> linear = schedules.LinearLR(optimizer, 1.0, 0.0, total_iters=4)
        >>> scheduler = StepSyncedScheduler(linear, optimizer, num_processes=2)
        >>> optimizer.step()
        >>> scheduler.step()  # two ranks took a batch each
        >>> scheduler.step()  # no new step
        >>> scheduler.get_last_lr()
        [0.5]
    """

    scheduler: Any
    optimizers: tuple[ScalerAwareOptimizer, ...]
    step_with_optimizer: bool
    split_batches: bool
    num_processes: int | None
    unit: Unit
    _follower: _Follower

    def __init__(
        self,
        scheduler: Any,
        optimizers: ScalerAwareOptimizer | Sequence[ScalerAwareOptimizer],
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        *,
        num_processes: int | None = None,
        unit: Unit = "batches",
    ) -> None:
        """Wrap a schedule.

        Args:
            scheduler: Any of torch's schedules, or an object with ``step``, ``state_dict`` and
                ``load_state_dict``.
            optimizers: The wrapped optimizer of the schedule, or several whose steps it follows: it
                then ticks if one of them stepped and none of those that tried was skipped.
            step_with_optimizer: False: each call ticks once, whatever the optimizers did.
            split_batches: Whether each batch of the unprepared loader is cut into one piece per
                rank, so that a step takes one of them and not ``num_processes``.
            num_processes: How many shards the data has. None: one.
            unit: What the schedule counts. ``"batches"`` of the unprepared loader: a real step
                ticks once for each that went into it. ``"updates"``: it ticks once.

        Raises:
            PlanError: If ``scheduler`` is wrapped already, is no schedule, or is one of an
                optimizer that is not among ``optimizers``; if ``optimizers`` is empty or has one
                that is not wrapped; if another argument is of the wrong kind or out of range.
        """
        if isinstance(optimizers, torch.optim.Optimizer):
            optimizers = [optimizers]
        _check_schedule(scheduler)
        _check_optimizers(scheduler, optimizers)
        step_with_optimizer = check_flag("step_with_optimizer", step_with_optimizer)
        split_batches = check_flag("split_batches", split_batches)
        if num_processes is not None:
            num_processes = check_count("num_processes", num_processes, least=1)
        if unit not in get_args(Unit):
            raise PlanError(f"`unit` must be 'batches' or 'updates', got {unit!r}.")
        self.scheduler = scheduler
        self.optimizers = tuple(optimizers)
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self.num_processes = num_processes
        self.unit = unit
        self._follower = _Follower(
            scheduler,
            self.optimizers if step_with_optimizer else (),
            ticks_per_batch=1 if split_batches else num_processes or 1,
            in_batches=unit == "batches",
        )

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Tick, if an optimizer really stepped since the last call and none was skipped.

        Args:
            *args: For the schedule, such as the metric of ``ReduceLROnPlateau``. A schedule that
                is given a position goes there, so it is not ticked more than once.
            **kwargs: For the schedule.
        """
        self._follower.step(args, kwargs)

    def get_last_lr(self) -> list[Any]:
        """Return the learning rates that the schedule has set last, one for each group."""
        return cast("list[Any]", self.scheduler.get_last_lr())

    def get_lr(self) -> list[Any]:
        """Return what the schedule's own ``get_lr`` does; `get_last_lr` is what you want."""
        return cast("list[Any]", self.scheduler.get_lr())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule, which is all there is to save."""
        return cast("dict[str, Any]", self.scheduler.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the schedule.

        Args:
            state_dict: What ``state_dict()`` returned, of the wrapper or of the schedule.
        """
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "scheduler" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(self.scheduler, name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.scheduler!r})"


_OWN = frozenset(StepSyncedScheduler.__annotations__)


@final
class _Followed:
    """An optimizer, and how far its steps have been followed."""

    __slots__ = ("num_steps", "num_windows", "optimizer")

    def __init__(self, optimizer: ScalerAwareOptimizer) -> None:
        self.optimizer = optimizer
        _, _, self.num_windows, self.num_steps = optimizer.outcome


@final
class _Follower:
    """Ticks a schedule as its optimizers' outcomes say.

    Apart from the wrapper, because this is done on each batch, and attributes of a class that
    passes what it does not know on to another are slow to read.
    """

    __slots__ = ("clock", "followed", "in_batches", "is_driven", "scheduler", "ticks_per_batch")

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[ScalerAwareOptimizer],
        *,
        ticks_per_batch: int,
        in_batches: bool,
    ) -> None:
        self.scheduler = scheduler
        self.followed = [_Followed(optimizer) for optimizer in optimizers]  # none: each call ticks
        self.ticks_per_batch = ticks_per_batch
        self.in_batches = in_batches
        self.is_driven = _needs_argument(scheduler)
        self.clock = _clock_of(scheduler)

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.is_driven:
            self.scheduler.step(*args, **kwargs)
            return
        ticks = self.due_ticks() if self.followed else 1
        if not ticks:
            return
        if args or kwargs:
            self.scheduler.step(*args, **kwargs)
        else:
            self.clock.advance(ticks)

    def due_ticks(self) -> int:
        micro_batches, was_skipped = 0, False
        for followed in self.followed:
            _, size, num_windows, num_steps = followed.optimizer.outcome
            if num_windows == followed.num_windows:
                continue
            if num_steps == followed.num_steps:
                was_skipped = True
            elif size > micro_batches:
                micro_batches = size
            followed.num_windows, followed.num_steps = num_windows, num_steps
        if was_skipped or not micro_batches:
            return 0
        return micro_batches * self.ticks_per_batch if self.in_batches else 1


def _check_schedule(scheduler: Any) -> None:
    if isinstance(scheduler, StepSyncedScheduler):
        raise PlanError(
            "`scheduler` must be a schedule that is not wrapped yet, got a StepSyncedScheduler. "
            "Prepare each schedule once."
        )
    if not isinstance(scheduler, _Schedule) or isinstance(scheduler, type):
        raise PlanError(
            "`scheduler` must be one of torch's schedules or have `step`, `state_dict` and "
            f"`load_state_dict`, got {_kind_of(scheduler)}."
        )


def _kind_of(given: Any) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__


def _check_optimizers(scheduler: Any, optimizers: Any) -> None:
    if not isinstance(optimizers, Sequence):
        raise PlanError(
            "`optimizers` must be wrapped optimizers, or one, got "
            f"{_kind_of(optimizers)}. Prepare the optimizer with its schedule."
        )
    if not optimizers:
        raise PlanError("`optimizers` must name at least one optimizer, got none.")
    for optimizer in optimizers:
        if not isinstance(optimizer, ScalerAwareOptimizer):
            raise PlanError(
                "`optimizers` must be wrapped in ScalerAwareOptimizer, got "
                f"{type(optimizer).__name__}. Prepare the optimizer with its schedule."
            )
    own = getattr(scheduler, "optimizer", None)
    if own is not None and not any(own is one or own is one.optimizer for one in optimizers):
        raise PlanError(
            f"`scheduler` must be one of the given optimizers', got a {type(scheduler).__name__} "
            f"of another {type(own).__name__}. Prepare that optimizer with it."
        )


def _needs_argument(scheduler: Any) -> bool:
    parameters = inspect.signature(scheduler.step).parameters.values()
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return any(one.kind in kinds and one.default is one.empty for one in parameters)


def _clock_of(scheduler: Any) -> _Clock:
    # Of torch's own types only: a subclass may compute what it likes.
    kind = _CLOCKS.get(type(scheduler), _Clock)
    return kind(scheduler)


class _Clock:
    """Ticks a schedule: this one any schedule, one by one; no further than its end."""

    __slots__ = ("_has_end", "scheduler")

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        has = vars(scheduler) if isinstance(scheduler, schedules.LRScheduler) else {}
        self._has_end = has.get("total_steps") is not None

    def advance(self, ticks: int) -> None:
        scheduler = self.scheduler
        if self._has_end:
            ticks = min(ticks, scheduler.total_steps - scheduler.last_epoch)
        if ticks == 1:
            scheduler.step()
        elif ticks > 1:
            if getattr(scheduler, "_step_count", None) == 1:
                # The first tick of all warns of a wrong order of calls: it is not left out.
                scheduler.step()
                ticks -= 1
            self.advance_far(ticks)

    def advance_far(self, ticks: int) -> None:
        for _ in range(ticks):
            self.scheduler.step()


class _FreeClock(_Clock):
    """Ticks a schedule whose learning rate depends on its position alone."""

    __slots__ = ()

    def advance_far(self, ticks: int) -> None:
        self.scheduler.last_epoch += ticks - 1
        self.scheduler.step()
        self.scheduler._step_count += ticks - 1  # noqa: SLF001 (part of torch's state)


@final
class _OneCycleClock(_FreeClock):
    """Ticks a schedule that torch lets run to one step after its last phase, but no further.

    Annealed linearly, its learning rate is below zero there. In torch nothing trains with it, since
    the next tick is an error; here training may go on.
    """

    __slots__ = ()

    def advance(self, ticks: int) -> None:
        super().advance(ticks)
        scheduler = self.scheduler
        if scheduler.last_epoch == scheduler.total_steps:
            groups = scheduler.optimizer.param_groups
            _set_rates(groups, [max(group["lr"], group["min_lr"]) for group in groups])
            scheduler._last_lr = _rates_of(groups)  # noqa: SLF001 (what get_last_lr returns)


@final
class _RestartsClock(_Clock):
    """Ticks a schedule whose position is one in a cycle that grows."""

    __slots__ = ()

    def advance_far(self, ticks: int) -> None:
        scheduler = self.scheduler
        position, length = scheduler.T_cur + ticks - 1, scheduler.T_i
        if scheduler.T_mult == 1:
            position %= length
        while position >= length:
            position, length = position - length, length * scheduler.T_mult
        scheduler.T_cur, scheduler.T_i = position, length
        scheduler.last_epoch += ticks - 1
        scheduler.step()


@final
class _FormulaClock(_Clock):
    """Ticks a schedule that goes on from the learning rate it finds, and has a formula for its own.

    When another schedule, or a hand, has changed the learning rate since, the formula does not know
    of it; ticking one by one does.
    """

    __slots__ = ("_left",)

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        self._left: tuple[int, list[Any]] | None = None  # position and rates after a jump

    def advance_far(self, ticks: int) -> None:
        scheduler, groups = self.scheduler, self.scheduler.optimizer.param_groups
        if not self._is_on_formula(groups):
            super().advance_far(ticks)
            return
        scheduler.last_epoch += ticks
        rates = scheduler._get_closed_form_lr()  # noqa: SLF001 (its public door warns)
        _set_rates(groups, rates)
        scheduler._last_lr = _rates_of(groups)  # noqa: SLF001 (what get_last_lr returns)
        scheduler._step_count += ticks  # noqa: SLF001 (part of torch's state)
        self._left = scheduler.last_epoch, rates

    def _is_on_formula(self, groups: list[dict[str, Any]]) -> bool:
        scheduler = self.scheduler
        if self._left is not None:
            position, rates = self._left
            if position == scheduler.last_epoch and rates == [group["lr"] for group in groups]:
                return True
        formula = getattr(scheduler, "_get_closed_form_lr", None)
        if formula is None:
            return False
        try:
            rates = formula()
        except ZeroDivisionError:  # of `total_iters=0`, a schedule that is over before it begins
            return False
        if len(rates) != len(groups):  # a group was added since, of which the formula knows nothing
            return False
        return all(
            abs(group["lr"] - rate) <= 1e-9 * abs(rate) + 1e-12 * abs(base)
            for group, rate, base in zip(groups, rates, scheduler.base_lrs, strict=True)
        )


@final
class _SequentialClock(_Clock):
    """Ticks schedules that take turns: each up to the next milestone at once."""

    __slots__ = ("_children",)

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        self._children = [_clock_of(child) for child in _children_of(scheduler)]

    def advance(self, ticks: int) -> None:
        scheduler = self.scheduler
        milestones: list[int] = scheduler._milestones  # noqa: SLF001 (not to be had otherwise)
        while ticks > 0:
            turn = bisect_right(milestones, scheduler.last_epoch)
            inside = ticks
            if turn < len(milestones):
                inside = min(ticks, milestones[turn] - scheduler.last_epoch - 1)
            if inside == 0:
                scheduler.step()
                ticks -= 1
                continue
            self._children[turn].advance(inside)
            scheduler.last_epoch += inside
            scheduler._last_lr = _rates_of(scheduler.optimizer.param_groups)  # noqa: SLF001
            ticks -= inside


@final
class _ChainedClock(_Clock):
    """Ticks schedules that act on one learning rate by turns; one that is at its end rests."""

    __slots__ = ("_children",)

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        self._children = [_clock_of(child) for child in _children_of(scheduler)]

    def advance(self, ticks: int) -> None:
        for _ in range(ticks):
            for child in self._children:
                child.advance(1)
        groups = self.scheduler.optimizer.param_groups
        self.scheduler._last_lr = _rates_of(groups)  # noqa: SLF001 (what get_last_lr returns)


_CLOCKS: dict[type[Any], type[_Clock]] = {
    schedules.LambdaLR: _FreeClock,
    schedules.CyclicLR: _FreeClock,
    schedules.OneCycleLR: _OneCycleClock,
    schedules.CosineAnnealingWarmRestarts: _RestartsClock,
    schedules.StepLR: _FormulaClock,
    schedules.MultiStepLR: _FormulaClock,
    schedules.ConstantLR: _FormulaClock,
    schedules.LinearLR: _FormulaClock,
    schedules.ExponentialLR: _FormulaClock,
    schedules.PolynomialLR: _FormulaClock,
    schedules.CosineAnnealingLR: _FormulaClock,
    schedules.SequentialLR: _SequentialClock,
    schedules.ChainedScheduler: _ChainedClock,
}


def _children_of(scheduler: Any) -> list[Any]:
    return list(scheduler._schedulers)  # noqa: SLF001 (not to be had otherwise)


def _set_rates(groups: list[dict[str, Any]], rates: list[Any]) -> None:
    for group, rate in zip(groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _rates_of(groups: list[dict[str, Any]]) -> list[Any]:
    rates = (group["lr"] for group in groups)
    return [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates]
