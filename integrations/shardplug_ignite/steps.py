"""Which iterations of an engine were real optimizer steps."""

from __future__ import annotations

from typing import Any, final

import torch
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.hooks import RemovableHandle

from shardplug import PlanError, ScalerAwareOptimizer


@final
class RealSteps:
    """Counts the steps of an optimizer that really happened, and ticks its schedule.

    It listens by a hook of the optimizer's own, which is not called where a scaler skips; for fused
    optimizers, whose hook is called either way, the scaler leaves word. That there was a step to
    skip is in the scaler's notes.

    Attributes:
        count: Real steps so far.
    """

    def __init__(
        self, optimizer: Any, lr_scheduler: Any, scaler: Any, ticks_per_batch: int | None
    ) -> None:
        """Take an optimizer and its schedule.

        Args:
            optimizer: None: that of the schedule.
            lr_scheduler: None: there is none to tick.
            scaler: None: there is none, or it is to be found.
            ticks_per_batch: How often a real step ticks the schedule for each iteration of its
                window; None: once for all of them.

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
        self._ticks_per_batch = ticks_per_batch
        self._batches = 0  # of the window that is open
        self._notes = None if scaler is None else _ScalerNotes(scaler, optimizer)
        self._found_inf: list[torch.Tensor | None] = []
        self._closed_at = 0
        self._hook: RemovableHandle | None = None

    def listen(self, scaler: Any) -> None:
        """Begin to count.

        Args:
            scaler: What Ignite's trainer says is its scaler, which is used where none was given.
        """
        if self._notes is None and isinstance(scaler, GradScaler):
            self._notes = _ScalerNotes(scaler, self._optimizer)
        if self._hook is None:
            self._hook = self._optimizer.register_step_post_hook(self._note)

    def leave(self) -> None:
        """Take the hook away."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def go_on(self, count: int) -> None:
        """Go on from a number of real steps, where no window is open.

        Args:
            count: Real steps so far.
        """
        self.count, self._batches = count, 0

    def _note(self, optimizer: Any, args: Any, kwargs: Any) -> None:  # torch's
        self._found_inf.append(getattr(optimizer, "found_inf", None))

    def settle(self, *, is_end: bool) -> tuple[bool, bool]:
        """Count what happened in an iteration, and tick the schedule as often.

        Args:
            is_end: Whether a window of accumulation is known to end with it.

        Returns:
            Whether there was a real step, and whether a window came to its end, which it does with
            a step that was skipped as well, where that can be known.
        """
        self._batches += 1
        calls, taken = self._found_inf, 0
        if calls:
            taken = 1 if calls == [None] else sum(each is None or not each.item() for each in calls)
            self._found_inf = []
            self.count += taken
            if taken and self._lr_scheduler is not None:
                self._tick(taken)
        has_closed = self._has_closed(taken) or is_end
        if has_closed:
            self._batches = 0
        return taken > 0, has_closed

    def _tick(self, taken: int) -> None:
        per_batch = self._ticks_per_batch
        ticks = taken if per_batch is None else self._batches * per_batch
        end = getattr(self._lr_scheduler, "total_steps", None)
        if end is not None:
            ticks = min(ticks, end - self._lr_scheduler.last_epoch)
        for _ in range(ticks):
            self._lr_scheduler.step()

    def _has_closed(self, taken: int) -> bool:
        if self._wrapper is not None:
            before, self._closed_at = self._closed_at, self._wrapper.closed_at
            return before != self._closed_at
        was_tried = self._notes is not None and self._notes.was_tried()
        return taken > 0 or was_tried


@final
class _ScalerNotes:
    """What a scaler has noted of an optimizer: torch has no question for it.

    Args:
        scaler: The scaler.
        optimizer: The optimizer.
    """

    def __init__(self, scaler: GradScaler, optimizer: Any) -> None:
        self._scaler = scaler
        self._key = id(optimizer)
        self._latest = self._current()
        self._is_known = self._has_step(self._latest)

    def was_tried(self) -> bool:
        """Tell whether the scaler was to step since this was asked last."""
        # A new dictionary with each update of the scale; the one before is as the update left it.
        notes = self._current()
        before, self._latest = self._latest, notes
        was_known, self._is_known = self._is_known, self._has_step(notes)
        if before is notes:
            return self._is_known and not was_known
        return self._is_known or (self._has_step(before) and not was_known)

    def _current(self) -> Any:
        return getattr(self._scaler, "_per_optimizer_states", None)  # none where it is not enabled

    def _has_step(self, notes: Any) -> bool:
        return bool(notes) and self._key in notes and notes[self._key]["stage"] is OptState.STEPPED


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
