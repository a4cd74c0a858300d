"""One pass of one shard over an epoch: its index batches, and the record of each step.

A pass knows, for every step, how many rows of the batch are real and how much of the epoch's global
order all shards have consumed after it. Padding is recorded here, where it is made; whoever needs
to know reads the record. Workers ask for index batches ahead of time, so the record is kept by
step, not by what was asked for last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Protocol, final

from shardplug.errors import PlanError
from shardplug.orders import Order
from shardplug.plan.cursor import PassRecord
from shardplug.plan.deal import Part
from shardplug.plan.split import ShardPlan


class Pass(PassRecord, Protocol):
    """One pass of one shard over an epoch."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the index batch of each step; only once."""

    def after(self, steps: int) -> Pass:
        """Return this pass without its first steps; this one is used up."""


@final
class SampledPass:
    """Index batches looked up in an order at the positions of a plan."""

    def __init__(
        self, order: Order, plan: ShardPlan, *, on_exhausted: Callable[[], None] | None = None
    ) -> None:
        self._order = order
        self.plan = plan
        self._on_exhausted = on_exhausted
        self._num_steps = plan.num_steps  # asked for at each step

    @property
    def num_steps(self) -> int:
        """Steps of the pass."""
        return self._num_steps

    def __iter__(self) -> Iterator[list[int]]:
        """Look up the full steps in bulk and the last ones by their positions."""
        plan, rows = self.plan, self.plan.shard_batch_size
        full = plan.num_full_steps
        yield from self._order.runs(
            plan.start + plan.shard.index * rows,
            stride=plan.global_batch_size,
            width=rows,
            count=full,
        )
        for step in range(full, plan.num_steps):
            yield self._order.take(plan.positions(step))
        if self._on_exhausted is not None:
            self._on_exhausted()

    def after(self, steps: int) -> SampledPass:
        """Jump: nothing is looked up on the way."""
        consumed = self.plan.cursor(min(steps, self.num_steps))
        return SampledPass(self._order, self.plan.seek(consumed), on_exhausted=self._on_exhausted)

    def num_rows(self, step: int) -> int:
        """Count the rows of a step's batch."""
        return len(self.plan.positions(step))

    def valid_rows(self, step: int) -> int:
        """Count the real rows of a step."""
        return self.plan.valid_rows(step)

    def consumed(self, step: int) -> int:
        """Count the samples consumed before a step."""
        return self.plan.cursor(step)


@final
class WalkedPass:
    """Index batches dealt out while walking what cannot be looked up.

    Args:
        parts: The parts of this shard, in order.
        start: What was consumed before the first of them.
        num_steps: How many they are, None if only the end will tell.
        name: What is walked, for the error when ``num_steps`` turns out to be wrong.

    Raises:
        PlanError: While iterating, if the walk does not end at ``num_steps``.
    """

    def __init__(
        self, parts: Iterator[Part[Any]], *, start: int, num_steps: int | None, name: str
    ) -> None:
        self._parts = parts
        self._num_steps = num_steps
        self._name = name
        self._rows: list[tuple[int, int]] = []
        self._consumed = [start]

    @property
    def num_steps(self) -> int | None:
        """Steps of the pass; None while that is not known."""
        return self._num_steps

    def __iter__(self) -> Iterator[Any]:
        """Walk the parts, recording each before it goes out."""
        for part in self._parts:
            if len(self._rows) == self._num_steps:
                raise self._wrong_length("more")
            self._rows.append((len(part.rows), part.valid_rows))
            self._consumed.append(part.consumed)
            yield part.rows
        walked = len(self._rows)
        if self._num_steps not in (None, walked):
            raise self._wrong_length(f"an end after {walked} steps")
        self._num_steps = walked

    def _wrong_length(self, found: str) -> PlanError:
        return PlanError(
            f"`{self._name}` must yield as much as its length says, which makes {self._num_steps} "
            f"steps, got {found}. Correct its __len__, or remove it."
        )

    def after(self, steps: int) -> WalkedPass:
        """Walk past the first steps."""
        start = self._consumed[-1]
        for part in islice(self._parts, steps):
            start = part.consumed
        left = None if self._num_steps is None else max(0, self._num_steps - steps)
        return WalkedPass(self._parts, start=start, num_steps=left, name=self._name)

    def num_rows(self, step: int) -> int:
        """Count the rows of the batch of a step that has been walked."""
        return self._rows[step][0]

    def valid_rows(self, step: int) -> int:
        """Count the real rows of a step that has been walked."""
        return self._rows[step][1]

    def consumed(self, step: int) -> int:
        """Count what was consumed before a step, when the one before has been walked."""
        return self._consumed[step]


@final
class PaddedPass:
    """A pass over positions of which only the first ``num_real`` are real items.

    For samplers that pad by themselves, at the end of their order.
    """

    def __init__(self, inner: SampledPass, num_real: int) -> None:
        self._inner = inner
        self._num_real = num_real

    @property
    def num_steps(self) -> int:
        """Steps of the pass."""
        return self._inner.num_steps

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the index batches of the pass inside."""
        return iter(self._inner)

    def after(self, steps: int) -> PaddedPass:
        """Jump: nothing is looked up on the way."""
        return PaddedPass(self._inner.after(steps), self._num_real)

    def num_rows(self, step: int) -> int:
        """Count the rows of a step's batch."""
        return self._inner.num_rows(step)

    def valid_rows(self, step: int) -> int:
        """Count the rows of a step that stand before the padding."""
        positions = self._inner.plan.positions(step)
        return sum(position < self._num_real for position in positions)

    def consumed(self, step: int) -> int:
        """Count the samples consumed before a step."""
        return min(self._inner.consumed(step), self._num_real)


@final
class ReadyPass:
    """A pass over single indices, each of which stands for a batch that the data set has ready.

    How many rows such a batch has is only known when it is there: `note` takes it down.
    """

    def __init__(self, inner: Pass) -> None:
        self._inner = inner
        self._rows: dict[int, int] = {}

    @property
    def num_steps(self) -> int | None:
        """Steps of the pass; None while that is not known."""
        return self._inner.num_steps

    def __iter__(self) -> Iterator[Any]:
        """Yield the index of each step."""
        return (rows[0] for rows in self._inner)

    def after(self, steps: int) -> ReadyPass:
        """Skip the first steps."""
        return ReadyPass(self._inner.after(steps))

    def note(self, step: int, rows: int) -> None:
        """Take down the rows of the batch of a step.

        The latest three are kept: one batch may be held back, and one be on its way to the device.
        """
        latest = {at: self._rows[at] for at in (step - 2, step - 1) if at in self._rows}
        self._rows = {**latest, step: rows}

    def num_rows(self, step: int) -> int:
        """Count the rows of the batch of one of the latest steps."""
        return self._rows.get(step, 1)

    def valid_rows(self, step: int) -> int:
        """Count the same, none if the batch is a repeat."""
        return self.num_rows(step) if self._inner.valid_rows(step) else 0

    def consumed(self, step: int) -> int:
        """Count the batches consumed before a step."""
        return self._inner.consumed(step)


@final
class StreamPass:
    """The record of a pass over a stream, written as batches are handed out.

    Args:
        start: What was consumed before the pass.
        first_step: Steps of the pass that are left out.
        num_steps: How many steps follow, None if only the end will tell.
    """

    def __init__(self, start: int, *, first_step: int = 0, num_steps: int | None = None) -> None:
        self.start = start
        self.first_step = first_step
        self._num_steps = num_steps
        self._steps = 0
        self._latest = (0, 0, start)

    @property
    def num_steps(self) -> int | None:
        """Steps of the pass; None while that is not known."""
        return self._num_steps

    def __iter__(self) -> Iterator[Any]:
        """Yield nothing: a stream has no index batches."""
        return iter(())

    def after(self, steps: int) -> StreamPass:
        """Leave the first steps out: they are read through, not made into batches."""
        left = None if self._num_steps is None else max(0, self._num_steps - steps)
        return StreamPass(self.start, first_step=self.first_step + steps, num_steps=left)

    def forget_length(self) -> None:
        """Let the end tell: workers that split the stream may each add a step at their ends."""
        self._num_steps = None

    def add(self, num_rows: int, valid_rows: int, consumed: int, *, is_last: bool) -> None:
        """Record the step whose batch is handed out next."""
        self._steps += 1
        self._latest = (num_rows, valid_rows, consumed)
        if is_last:
            self.end()

    def end(self) -> None:
        """Note that no further step comes.

        Raises:
            PlanError: If the stream had promised another length.
        """
        if self._num_steps not in (None, self._steps):
            raise PlanError(
                "`dataset` must yield as many samples as its length says, got an end after "
                f"{self._steps} steps instead of {self._num_steps}. Correct its __len__, or remove "
                "it."
            )
        self._num_steps = self._steps

    def num_rows(self, step: int) -> int:
        """Count the rows of the batch of the latest step."""
        return self._latest[0]

    def valid_rows(self, step: int) -> int:
        """Count the real rows of the latest step."""
        return self._latest[1]

    def consumed(self, step: int) -> int:
        """Count what was consumed up to the latest step, or before the first."""
        return self._latest[2]
