"""Where a loader stands: the epoch, and how much of its global order has been consumed.

`Progress` is the one place where the epoch moves: a pass that is left early counts as a pass, the
next one is the next epoch, unless `Progress.set_epoch` says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shardplug.errors import PlanError


@dataclass(frozen=True, slots=True)
class Cursor:
    """A position in the data: ``consumed`` samples (or batches) of epoch ``epoch`` are done.

    Example:
        >>> Cursor(epoch=2, consumed=64)
        Cursor(epoch=2, consumed=64)
    """

    epoch: int
    consumed: int = 0

    def __post_init__(self) -> None:
        """Check both numbers."""
        if self.epoch < 0:
            raise PlanError(f"`epoch` must be zero or more, got {self.epoch}.")
        if self.consumed < 0:
            raise PlanError(f"`consumed` must be zero or more, got {self.consumed}.")


class PassRecord(Protocol):
    """What a pass knows about its steps, which count from zero, from where the pass started."""

    @property
    def num_steps(self) -> int | None:
        """Steps of the pass; None while that is not known."""

    def num_rows(self, step: int) -> int:
        """Count the rows of a step's batch."""

    def valid_rows(self, step: int) -> int:
        """Count the real rows of a step's batch; they come first in it."""

    def consumed(self, step: int) -> int:
        """Count what all shards have consumed of the global order before a step."""


class Run:
    """One pass under way.

    Attributes:
        record: What the pass knows about its steps.
        epoch: The epoch it passes over.
        number: Tells one pass of a loader from another.
        step: Steps whose batches have been handed out.
        was_left: Whether the pass has been left: its position stands until the next one begins.
    """

    __slots__ = ("epoch", "number", "record", "step", "was_left")

    def __init__(self, record: PassRecord, epoch: int, number: int) -> None:
        self.record = record
        self.epoch = epoch
        self.number = number
        self.step = 0
        self.was_left = False

    @property
    def cursor(self) -> Cursor:
        """Where the pass stands: after the last batch that was handed out."""
        return Cursor(self.epoch, self.record.consumed(self.step))


class Progress:
    """The position of one loader, from pass to pass.

    Attributes:
        run: The pass under way, or left early; None before the first and after one that ran to its
            end.

    Example:
        >>> progress = Progress()
        >>> progress.upcoming
        Cursor(epoch=0, consumed=0)
        >>> progress.set_epoch(3)
        >>> progress.upcoming
        Cursor(epoch=3, consumed=0)
    """

    def __init__(self, start: Cursor | None = None) -> None:
        self.run: Run | None = None
        self._passes = 0
        self._next: Cursor | None = Cursor(0) if start is None else start

    def __reduce__(self) -> tuple[type[Progress], tuple[Cursor]]:
        """Pickle where the next pass will start: a pass under way stays with this process."""
        return Progress, (self.upcoming,)

    @property
    def upcoming(self) -> Cursor:
        """Where the next pass will start."""
        if self._next is not None:
            return self._next
        return Cursor(self.run.epoch + 1 if self.run else 0)

    @property
    def cursor(self) -> Cursor:
        """Where the loader stands: inside the pass under way, or at the start of the next."""
        return self.upcoming if self.current is None else self.current.cursor

    @property
    def current(self) -> Run | None:
        """The pass that the loader stands in: under way, or left and no other one chosen since."""
        if self.run is not None and self.run.was_left and self._next is not None:
            return None
        return self.run

    def begin(self, record: PassRecord) -> Run:
        """Start the upcoming pass."""
        self._passes += 1
        self.run = Run(record, self.upcoming.epoch, self._passes)
        self._next = None
        return self.run

    @property
    def epoch(self) -> int:
        """The epoch of the pass under way (or left early), else of the upcoming one."""
        return self.upcoming.epoch if self.run is None else self.run.epoch

    def finish(self, run: Run) -> None:
        """End a pass that ran to its end; nothing happens if another one has begun since."""
        if self.run is run:
            self._next = self.upcoming
            self.run = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass.

        It starts at its first sample, unless a position within that epoch is what comes next.

        Raises:
            PlanError: If ``epoch`` is negative.
        """
        if self._next is None or self._next.epoch != epoch:
            self._next = Cursor(epoch)

    def jump(self, start: Cursor) -> None:
        """Start the next pass at a given position; a pass under way is left."""
        self._next = start
        self.run = None
