"""One pass of one shard over an epoch: its index batches, and the record of each step.

A pass knows, for every step, how many rows of the batch are real and how much of the epoch's global
order all shards have consumed after it. Padding is recorded here, where it is made; whoever needs
to know reads the record. Workers ask for index batches ahead of time, so the record is kept by
step, not by what was asked for last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
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

    def positions(self, step: int) -> Sequence[int]:
        """Tell where in the epoch's global order each row of a step stands.

        Empty where that is not known before the batch is there.
        """


@final
class SampledPass:
    """Index batches looked up in an order at the positions of a plan."""

    def __init__(
        self, order: Order, plan: ShardPlan, *, on_exhausted: Callable[[], None] | None = None
    ) -> None:
        self._order = order
        self.plan = plan
        self._on_exhausted = on_exhausted
        # Asked for at each step.
        self._num_steps = plan.num_steps
        self._num_plain_steps = min(plan.num_full_steps, self._num_steps - 1)
        self._start, self._per_step = plan.start, plan.global_batch_size

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

    def positions(self, step: int) -> Sequence[int]:
        """Tell where the rows of a step stand in the order."""
        return self.plan.positions(step)

    def consumed(self, step: int) -> int:
        """Count the samples consumed before a step."""
        if 0 <= step <= self._num_plain_steps:
            return self._start + step * self._per_step
        return self.plan.cursor(step)

    def extra_rows(self, step: int) -> int:
        """Return 0: it is samples that are counted."""
        return 0


@final
class RoundsPass:
    """The index batches of all shards, step by step: what one reader makes for all.

    Its batches are counted one by one; batch ``i`` is that of shard ``i mod count`` in step ``i //
    count``, also where the last shards have a step less.
    """

    def __init__(
        self, order: Order, plan: ShardPlan, *, on_exhausted: Callable[[], None] | None = None
    ) -> None:
        self._order = order
        self._count = plan.shard.count
        self._plans = [plan.seek(plan.start, shard=each) for each in plan.shard.all()]
        self._on_exhausted = on_exhausted
        self._num_steps = sum(each.num_steps for each in self._plans)

    @property
    def num_steps(self) -> int:
        """Batches of all shards together."""
        return self._num_steps

    def __iter__(self) -> Iterator[list[int]]:
        """Look up the full steps in bulk and the last ones by their positions."""
        plan = self._plans[0]
        rows, full = plan.shard_batch_size, plan.num_full_steps * self._count
        yield from self._order.runs(plan.start, stride=rows, width=rows, count=full)
        for batch in range(full, self._num_steps):
            yield self._order.take(self.positions(batch))
        if self._on_exhausted is not None:
            self._on_exhausted()

    def after(self, steps: int) -> RoundsPass:
        """Jump over whole rounds: nothing is looked up on the way."""
        plan = self._plans[0]
        consumed = plan.cursor(min(steps // self._count, plan.num_steps))
        return RoundsPass(self._order, plan.seek(consumed), on_exhausted=self._on_exhausted)

    def positions(self, step: int) -> Sequence[int]:
        """Tell where the rows of a batch stand in the order."""
        round_, shard = divmod(step, self._count)
        return self._plans[shard].positions(round_)

    def num_rows(self, step: int) -> int:
        """Count the rows of a batch."""
        return len(self.positions(step))

    def valid_rows(self, step: int) -> int:
        """Count the real rows of a batch."""
        round_, shard = divmod(step, self._count)
        return self._plans[shard].valid_rows(round_)

    def consumed(self, step: int) -> int:
        """Count the samples consumed before the round of a batch, or after the last."""
        plan = self._plans[0]
        return plan.cursor(min(-(-step // self._count), plan.num_steps))

    def extra_rows(self, step: int) -> int:
        """Return 0: it is samples that are counted."""
        return 0


@final
class EmptyPass:
    """What is left of an epoch that is done: nothing, at the position where it ended."""

    num_steps = 0

    def __init__(self, consumed: int, extra_rows: int = 0) -> None:
        self._consumed = consumed
        self._extra_rows = extra_rows

    def __iter__(self) -> Iterator[Any]:
        """Yield nothing."""
        return iter(())

    def after(self, steps: int) -> EmptyPass:
        """Return itself."""
        return self

    def positions(self, step: int) -> Sequence[int]:
        """Return no positions."""
        return ()

    def num_rows(self, step: int) -> int:
        """Return 0."""
        return 0

    def valid_rows(self, step: int) -> int:
        """Return 0."""
        return 0

    def consumed(self, step: int) -> int:
        """Count what has been consumed of the epoch."""
        return self._consumed

    def extra_rows(self, step: int) -> int:
        """Count the rows of the next batch that have been consumed too."""
        return self._extra_rows


@final
class WalkedPass:
    """Index batches dealt out while walking what cannot be looked up.

    Args:
        parts: The parts of this shard, in order.
        start: What was consumed before the first of them.
        num_steps: How many they are, None if only the end will tell.
        name: What is walked, for the error when ``num_steps`` turns out to be wrong.
        extra_rows: Rows of the next batch that were consumed too.

    Raises:
        PlanError: While iterating, if the walk does not end at ``num_steps``.
    """

    def __init__(
        self,
        parts: Iterator[Part[Any]],
        *,
        start: int,
        num_steps: int | None,
        name: str,
        extra_rows: int = 0,
    ) -> None:
        self._parts = parts
        self._num_steps = num_steps
        self._name = name
        # Of each step: rows, real rows, and where they stand; then what is consumed before it.
        self._rows: list[tuple[int, int, Sequence[int]]] = []
        self._consumed = [(start, extra_rows)]

    @property
    def num_steps(self) -> int | None:
        """Steps of the pass; None while that is not known."""
        return self._num_steps

    def __iter__(self) -> Iterator[Any]:
        """Walk the parts, recording each before it goes out."""
        for part in self._parts:
            if len(self._rows) == self._num_steps:
                raise self._wrong_length("more")
            self._rows.append((len(part.rows), part.valid_rows, part.positions))
            self._consumed.append((part.consumed, part.extra_rows))
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
        start, extra = self._consumed[-1]
        for part in islice(self._parts, steps):
            start, extra = part.consumed, part.extra_rows
        left = None if self._num_steps is None else max(0, self._num_steps - steps)
        return WalkedPass(
            self._parts, start=start, num_steps=left, name=self._name, extra_rows=extra
        )

    def positions(self, step: int) -> Sequence[int]:
        """Tell where the rows of a step that has been walked stand in the order."""
        return self._rows[step][2]

    def num_rows(self, step: int) -> int:
        """Count the rows of the batch of a step that has been walked."""
        return self._rows[step][0]

    def valid_rows(self, step: int) -> int:
        """Count the real rows of a step that has been walked."""
        return self._rows[step][1]

    def consumed(self, step: int) -> int:
        """Count what was consumed before a step, when the one before has been walked."""
        return self._consumed[step][0]

    def extra_rows(self, step: int) -> int:
        """Count the rows of the next batch that were consumed before a step too."""
        return self._consumed[step][1]


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

    def positions(self, step: int) -> Sequence[int]:
        """Tell where the rows of a step stand in this part's order."""
        return self._inner.positions(step)

    def consumed(self, step: int) -> int:
        """Count the samples consumed before a step."""
        return min(self._inner.consumed(step), self._num_real)

    def extra_rows(self, step: int) -> int:
        """Return 0: it is samples that are counted."""
        return 0


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

    def positions(self, step: int) -> Sequence[int]:
        """Tell where the batch of a step stands in the order."""
        return self._inner.positions(step)

    def consumed(self, step: int) -> int:
        """Count the batches consumed before a step."""
        return self._inner.consumed(step)

    def extra_rows(self, step: int) -> int:
        """Return 0: ready batches are never cut."""
        return 0


@final
class Snapshot:
    """The state of a stream or data set at a position; no dataclass: that would be a batch.

    Attributes:
        position: Items that the stream had given by then.
        state: What its ``state_dict()`` returned; None if it has none.
        worker: Whose copy it was, of how many; None where all copies are alike.
    """

    __slots__ = ("position", "state", "worker")

    def __init__(self, position: int, state: Any, worker: tuple[int, int] | None = None) -> None:
        self.position = position
        self.state = state
        self.worker = worker


@final
class SnapshotLog:
    """The states of a source after each of the latest steps: the last of each worker.

    They are in the order in which they were taken.

    Args:
        first: Those that the pass began with.
    """

    def __init__(self, first: Sequence[Snapshot] = ()) -> None:
        self._settled = {each.worker: each for each in first}
        self._later: deque[tuple[int, Snapshot]] = deque()

    def add(self, steps: int, snapshot: Snapshot) -> None:
        """Note a state that was taken after some steps; they only grow."""
        self._later.append((steps, snapshot))

    def settle(self, steps: int) -> None:
        """Forget how it was before that many steps."""
        while self._later and self._later[0][0] <= steps:
            self._put(self._settled, self._later.popleft()[1])

    def at(self, steps: int) -> tuple[Snapshot, ...]:
        """Return the states after some steps, which are not forgotten."""
        found = dict(self._settled)
        for done, each in self._later:
            if done <= steps:
                self._put(found, each)
        return tuple(found.values())

    @staticmethod
    def _put(latest: dict[tuple[int, int] | None, Snapshot], snapshot: Snapshot) -> None:
        latest.pop(snapshot.worker, None)  # so that it comes last
        latest[snapshot.worker] = snapshot


@final
class StreamPass:
    """The record of a pass over a stream, written as batches are handed out.

    Args:
        start: What was consumed before the pass.
        first_step: Steps of the pass that are left out.
        num_steps: How many steps follow, None if only the end will tell.
        snapshots: States of the stream to go on from, one for each worker that has its own.
        extra_rows: Where batches are counted: rows of the next one that were consumed too.

    Attributes:
        keep: How many steps back the record reaches.
        is_split: Whether workers split the stream among them.
    """

    def __init__(
        self,
        start: int,
        *,
        first_step: int = 0,
        num_steps: int | None = None,
        snapshots: Sequence[Snapshot] = (),
        extra_rows: int = 0,
    ) -> None:
        self.start = start
        self.first_step = first_step
        self.begins_with = tuple(snapshots)
        self.is_split = False
        self.keep = 1
        self._num_steps = num_steps
        self._steps = 0
        self._latest: deque[tuple[int, int, int, int]] = deque([(0, 0, start, extra_rows)])
        self._snapshots = SnapshotLog(snapshots)

    @property
    def num_steps(self) -> int | None:
        """Steps of the pass; None while that is not known."""
        return self._num_steps

    def snapshots(self, step: int) -> tuple[Snapshot, ...]:
        """Return the states of the stream before one of the latest steps, where it has states."""
        return self._snapshots.at(step)

    def __iter__(self) -> Iterator[Any]:
        """Yield nothing: a stream has no index batches."""
        return iter(())

    def after(self, steps: int) -> StreamPass:
        """Leave the first steps out: they are read through, not made into batches."""
        left = None if self._num_steps is None else max(0, self._num_steps - steps)
        first_step = self.first_step + steps
        return StreamPass(
            self.start, first_step=first_step, num_steps=left, snapshots=self.begins_with
        )

    def split_itself(self) -> None:
        """Note that workers split the stream: each may add a step at its end, so that will tell."""
        self.is_split = True
        self._num_steps = None

    def add(
        self,
        num_rows: int,
        valid_rows: int,
        consumed: int,
        *,
        is_last: bool,
        snapshot: Snapshot | None = None,
        extra_rows: int = 0,
    ) -> None:
        """Record the step whose batch is handed out next."""
        self._steps += 1
        self._latest.append((num_rows, valid_rows, consumed, extra_rows))
        if len(self._latest) > self.keep + 1:
            self._latest.popleft()
        if snapshot is not None:
            self._snapshots.add(self._steps, snapshot)
            self._snapshots.settle(self._steps - self.keep)
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

    def positions(self, step: int) -> Sequence[int]:
        """Return no positions: readers know them."""
        return ()

    def num_rows(self, step: int) -> int:
        """Count the rows of the batch of one of the latest steps."""
        return self._after(step + 1)[0]

    def valid_rows(self, step: int) -> int:
        """Count the real rows of one of the latest steps."""
        return self._after(step + 1)[1]

    def consumed(self, step: int) -> int:
        """Count what was consumed before one of the latest steps."""
        return self._after(step)[2]

    def extra_rows(self, step: int) -> int:
        """Count, where batches are counted, the rows of the next one consumed before a step too."""
        return self._after(step)[3]

    def note_snapshots(self, snapshots: Sequence[Snapshot]) -> None:
        """Take down the states of the stream after the latest step, where it is read elsewhere."""
        for snapshot in snapshots:
            self._snapshots.add(self._steps, snapshot)
        self._snapshots.settle(self._steps - self.keep)

    def _after(self, steps: int) -> tuple[int, int, int, int]:
        return self._latest[steps - self._steps - 1]
