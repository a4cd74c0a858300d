"""Which iterations of an engine were real optimizer steps."""

from __future__ import annotations

from typing import Any, final

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.hooks import RemovableHandle

from shardplug import PlanError, ScalerAwareOptimizer


@final
class RealSteps:
    """Counts the steps of an optimizer that really happened, and ticks its schedule.

    It listens by a hook of the optimizer's own, which is not called where a scaler skips; for fused
    optimizers, whose hook is called either way, the scaler leaves word.

    Attributes:
        count: Real steps so far.
    """

    def __init__(self, optimizer: Any, lr_scheduler: Any) -> None:
        """Take an optimizer and its schedule.

        Args:
            optimizer: None: that of the schedule.
            lr_scheduler: None: there is none to tick.

        Raises:
            PlanError: If they are of another kind, or do not belong together.
        """
        if lr_scheduler is not None:
            _check_schedule(lr_scheduler)
            optimizer = lr_scheduler.optimizer if optimizer is None else optimizer
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise PlanError(
                f"`optimizer` must be a torch.optim.Optimizer, got {type(optimizer).__name__}."
            )
        if lr_scheduler is not None and _inner(lr_scheduler.optimizer) is not _inner(optimizer):
            raise PlanError(
                "`lr_scheduler` must be one of the optimizer that is given, got one of another. "
                "Leave `optimizer` out."
            )
        self.count = 0
        self._optimizer = optimizer
        self._wrapper = optimizer if isinstance(optimizer, ScalerAwareOptimizer) else None
        self._lr_scheduler = lr_scheduler
        self._found_inf: list[torch.Tensor | None] = []
        self._closed_at = 0
        self._hook: RemovableHandle | None = None

    def listen(self) -> None:
        """Begin to count."""
        if self._hook is None:
            self._hook = self._optimizer.register_step_post_hook(self._note)

    def leave(self) -> None:
        """Take the hook away."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _note(self, optimizer: Any, args: Any, kwargs: Any) -> None:  # torch's
        self._found_inf.append(getattr(optimizer, "found_inf", None))

    def settle(self) -> tuple[bool, bool]:
        """Count what happened since it was asked last, and tick the schedule as often.

        Returns:
            Whether there was a real step, and whether a window of accumulation came to its end,
            which it does with a step that was skipped as well, where that can be known.
        """
        calls, taken = self._found_inf, 0
        if calls:
            taken = 1 if calls == [None] else sum(each is None or not each.item() for each in calls)
            self._found_inf = []
            self.count += taken
            if self._lr_scheduler is not None:
                for _ in range(taken):
                    self._lr_scheduler.step()
        has_closed = taken > 0
        if self._wrapper is not None:
            before, self._closed_at = self._closed_at, self._wrapper.closed_at
            has_closed = before != self._closed_at
        return taken > 0, has_closed


def _inner(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, ScalerAwareOptimizer) else optimizer


def _check_schedule(schedule: Any) -> None:
    """Refuse what is not ticked by step() alone.

    Raises:
        PlanError: If it is of another kind.
    """
    if isinstance(schedule, LRScheduler) and not isinstance(schedule, ReduceLROnPlateau):
        return
    raise PlanError(
        "`lr_scheduler` must be one of torch's that step() moves on without a metric, got "
        f"{type(schedule).__name__}. Attach Ignite's own to `step_event`, and step "
        "ReduceLROnPlateau where its metric is known."
    )
