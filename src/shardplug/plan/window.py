"""Which micro-batches make one optimizer step, and what became of that step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from shardplug.errors import PlanError


class StepKind(Enum):
    """What a call of ``optimizer.step()`` did.

    Attributes:
        STEPPED: The weights were updated.
        SKIPPED: The window was complete, but its gradients held inf or NaN.
        ACCUMULATING: Nothing, the window is not complete.
    """

    STEPPED = "stepped"
    SKIPPED = "skipped"
    ACCUMULATING = "accumulating"


class StepOutcome(NamedTuple):
    """What an optimizer says of its last ``step()``, for a schedule to read.

    A tuple with names, because one is made on each step and a dataclass takes thrice as long.
    The two counts only grow. Who keeps an earlier outcome sees by them what happened since:
    nothing new (same ``num_windows``), skips only (same ``num_steps``), or a real step.

    Attributes:
        kind: What the last call did. ``ACCUMULATING`` before the first.
        micro_batches: Micro-batches in the last complete window, at least 1.
        num_windows: Windows that were complete so far, those skipped included.
        num_steps: Windows of these whose step really happened.

    Example:
        >>> StepOutcome(StepKind.SKIPPED, micro_batches=2, num_windows=5, num_steps=4).kind.value
        'skipped'
    """

    kind: StepKind
    micro_batches: int = 1
    num_windows: int = 0
    num_steps: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """The place of one micro-batch in the window of one optimizer step.

    Attributes:
        index: Place of the micro-batch in its window, from 0.
        micro_batches: Micro-batches in the whole window, at least 1. Where the end of the epoch
            is not known yet, as many as the window has if the epoch goes on.

    Example:
        >>> Window(index=1, micro_batches=4).closes, Window(index=3, micro_batches=4).closes
        (False, True)
    """

    index: int
    micro_batches: int

    def __post_init__(self) -> None:
        """Check both numbers."""
        if not 0 <= self.index < self.micro_batches:
            raise PlanError(f"`index` must be in [0, {self.micro_batches}), got {self.index}.")

    @property
    def closes(self) -> bool:
        """Whether the optimizer steps after this micro-batch."""
        return self.index == self.micro_batches - 1


@dataclass(frozen=True, slots=True)
class Accumulation:
    """How the micro-batches of an epoch are put together to optimizer steps.

    Windows start afresh with each epoch, and the last one steps even if it is short: no gradient
    is carried from one epoch into the next, and none is lost.

    Attributes:
        steps: Micro-batches in a full window, at least 1.
        num_micro_batches: Micro-batches in the epoch on this rank. None: not known.

    Example:
        >>> epoch = Accumulation(steps=4, num_micro_batches=10)
        >>> [epoch.window(i).micro_batches for i in range(10)]
        [4, 4, 4, 4, 4, 4, 4, 4, 2, 2]
        >>> [i for i in range(10) if epoch.window(i).closes]
        [3, 7, 9]
    """

    steps: int = 1
    num_micro_batches: int | None = None

    def __post_init__(self) -> None:
        """Check both numbers."""
        if self.steps < 1:
            raise PlanError(f"`gradient_accumulation_steps` must be at least 1, got {self.steps}.")
        if self.num_micro_batches is not None and self.num_micro_batches < 0:
            raise PlanError(
                f"`num_micro_batches` must be zero or more, got {self.num_micro_batches}."
            )

    @property
    def num_windows(self) -> int | None:
        """Optimizer steps in the epoch; None where its length is not known."""
        if self.num_micro_batches is None:
            return None
        return -(-self.num_micro_batches // self.steps)

    def window(self, micro_batch: int, *, is_last: bool = False) -> Window:
        """Find the place of a micro-batch in its window.

        Args:
            micro_batch: Number of the micro-batch in the epoch, from 0.
            is_last: Whether the epoch ends with it, however long it was thought to be. This is
                how the last window of an epoch of unknown length comes to its end.

        Returns:
            Its place. Short windows are the last of their epoch.

        Raises:
            PlanError: If the epoch has no such micro-batch.

        Example:
            >>> stream = Accumulation(steps=4)
            >>> stream.window(5), stream.window(5, is_last=True)
            (Window(index=1, micro_batches=4), Window(index=1, micro_batches=2))
        """
        end = self.num_micro_batches
        if micro_batch < 0 or (end is not None and micro_batch >= end):
            bounds = "zero or more" if end is None else f"in [0, {end})"
            raise PlanError(f"`micro_batch` must be {bounds}, got {micro_batch}.")
        index = micro_batch % self.steps
        if is_last:
            return Window(index, index + 1)
        full = self.steps
        return Window(index, full if end is None else min(full, end - (micro_batch - index)))
