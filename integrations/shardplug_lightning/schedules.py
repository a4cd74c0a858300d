"""Schedules that wait for real optimizer steps.

Where gradients overflow, the gradient scaler skips the optimizer's step. Lightning counts the step
and advances the schedule all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

_NOTHING = nullcontext()


class RealSteps:
    """Counts the steps of optimizers: those that were tried, and those that were made.

    Args:
        scaler: Whatever skips steps, as a torch.amp.GradScaler; None: nothing does.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._counts: WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]]
        self._counts = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the counts behind: they are of this process's optimizers."""
        return {"_scaler": self._scaler}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start to count anew."""
        self.__init__(state["_scaler"])  # type: ignore[misc]  # of this very object

    def of(self, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
        """Tell how many steps of an optimizer were tried, and how many were made."""
        return self._counts.get(optimizer, (0, 0))

    def watch(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Count the step that is tried within; nothing is asked of the device without a scaler."""
        return _NOTHING if self._scaler is None else self._watch(optimizer)

    @contextmanager
    def _watch(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        # Where a step is skipped the scale goes down. Hooks of the optimizer would not tell: a
        # fused one is called even then.
        before = self._scaler.get_scale()
        yield
        tried, made = self.of(optimizer)
        was_made = self._scaler.get_scale() >= before
        self._counts[optimizer] = tried + 1, made + was_made

    def guard(self, configs: Iterable[Any]) -> None:
        """Let the schedules of a run wait for real steps, if there is anything that skips them.

        Args:
            configs: Lightning's descriptions of them; those that follow a metric are left alone.
        """
        if self._scaler is None:
            return
        for config in configs:
            if not isinstance(config.scheduler, ReduceLROnPlateau):
                config.scheduler = PatientScheduler(config.scheduler, self)


class PatientScheduler(LRScheduler):
    """A schedule that does not advance if all steps were skipped that were tried since it did.

    Everything else is the schedule's own.

    Args:
        scheduler: The schedule.
        steps: Counts the steps of its optimizer.
    """

    def __init__(self, scheduler: Any, steps: RealSteps) -> None:
        # Nothing of torch's own: that would set learning rates.
        self.scheduler = scheduler
        self._steps = steps
        self._seen = steps.of(scheduler.optimizer)

    def __getattr__(self, name: str) -> Any:
        """Look an attribute up in the schedule."""
        if name.startswith("__") or name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance, unless there were only steps since then that the scaler skipped.

        Args:
            args: For the schedule.
            kwargs: The same.
        """
        now = self._steps.of(self.scheduler.optimizer)
        (tried, made), self._seen = self._seen, now
        if now[1] > made or now[0] == tried:
            self.scheduler.step(*args, **kwargs)

    def get_lr(self) -> Any:
        """Compute the learning rates, as the schedule does."""
        return self.scheduler.get_lr()

    def get_last_lr(self) -> Any:
        """Tell the learning rates that it has set."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Tell the schedule's state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the schedule a state.

        Args:
            state_dict: From `state_dict`.
        """
        self.scheduler.load_state_dict(state_dict)
