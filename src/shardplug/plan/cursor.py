"""Where a loader stands: the epoch, and how much of its global order has been consumed.

`Progress` is the one place where the epoch moves: a pass that is left early counts as a pass, the
next one is the next epoch, unless `Progress.set_epoch` says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from shardplug.errors import PlanError
from shardplug.kinds import check_integer


@dataclass(frozen=True, slots=True)
class Cursor:
    """A position in the data: ``consumed`` samples (or batches) of epoch ``epoch`` are done.

    Attributes:
        epoch: The epoch.
        consumed: Samples (or batches) of its global order that are done on all shards.
        extra_rows: Where batches are counted: rows of the next one that are done too.
        steps: Steps after these that are done too, each of the size of this layout of shards.
            Data that divides itself has no global order: its position is steps alone.
        is_done: Whether the epoch is, dropped rows included.
        order: How many items from the start of the epoch's order to compare, and their checksum;
            None where the order is a function of values.
        snapshots: States of a source that keeps its own, for whoever reads it.

    Example:
        >>> Cursor(epoch=2, consumed=64).consumed
        64
    """

    epoch: int
    consumed: int = 0
    extra_rows: int = 0
    steps: int = 0
    is_done: bool = False
    order: tuple[int, int] | None = field(default=None, compare=False)
    snapshots: tuple[Any, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("epoch", "consumed", "extra_rows", "steps"):
            if getattr(self, name) < 0:
                raise PlanError(f"`{name}` must be zero or more, got {getattr(self, name)}.")

    @property
    def is_start(self) -> bool:
        """Whether nothing of the epoch is done."""
        return not (self.consumed or self.extra_rows or self.steps or self.is_done)


@dataclass(frozen=True, slots=True)
class OpenWindow:
    """The accumulation window that a pass goes on with: its first micro-batches came before.

    Attributes:
        micro_batches: How many came before.
        consumed: What had been consumed before the first of them.
    """

    micro_batches: int = 0
    consumed: int = 0


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

    def extra_rows(self, step: int) -> int:
        """Count, where batches are counted, the rows of the next one consumed before a step."""


class Run:
    """One pass under way.

    Attributes:
        record: What the pass knows about its steps.
        start: Where it began.
        number: Tells one pass of a loader from another.
        first_step: Steps that were left out before the pass, besides what its start had consumed.
        window: The accumulation window that it goes on with.
        step: Steps whose batches have been handed out.
        was_left: Whether the pass has been left: its position stands until the next one begins.
    """

    __slots__ = ("first_step", "number", "record", "start", "step", "was_left", "window")

    def __init__(
        self,
        record: PassRecord,
        start: Cursor,
        number: int,
        *,
        first_step: int = 0,
        window: OpenWindow | None = None,
    ) -> None:
        self.record = record
        self.start = start
        self.number = number
        self.first_step = first_step
        self.window = OpenWindow() if window is None else window
        self.step = 0
        self.was_left = False

    @property
    def epoch(self) -> int:
        """The epoch it passes over."""
        return self.start.epoch

    @property
    def cursor(self) -> Cursor:
        """Where the pass stands: after the last batch that was handed out."""
        return self.cursor_at(self.step)

    def cursor_at(self, step: int) -> Cursor:
        """Tell where the pass stood after some of its steps."""
        record = self.record
        is_done = 0 < step == record.num_steps
        return Cursor(self.epoch, record.consumed(step), record.extra_rows(step), is_done=is_done)


class Progress:
    """The position of one loader, from pass to pass.

    Attributes:
        run: The pass under way, or left early; None before the first and after one that ran to its
            end.
        open_window: The accumulation window that the next pass goes on with.

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
        self.open_window = OpenWindow()

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

    def begin(self, record: PassRecord, *, first_step: int = 0) -> Run:
        """Start the upcoming pass.

        Args:
            record: What the pass knows about its steps.
            first_step: Steps of the epoch that were left out before it.
        """
        self._passes += 1
        self.run = Run(
            record,
            self.upcoming,
            self._passes,
            first_step=first_step,
            window=self.open_window,
        )
        self._next, self.open_window = None, OpenWindow()
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
            PlanError: If ``epoch`` is no integer, or negative.
        """
        epoch = check_integer("epoch", epoch)
        if self._next is None or self._next.epoch != epoch:
            self._next, self.open_window = Cursor(epoch), OpenWindow()

    def jump(self, start: Cursor, window: OpenWindow | None = None) -> None:
        """Start the next pass at a given position; a pass under way is left.

        Args:
            start: The position.
            window: The accumulation window that goes on there; None: none does.
        """
        self._next = start
        self.open_window = OpenWindow() if window is None else window
        self.run = None
