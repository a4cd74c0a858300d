"""The plan: which positions of an epoch's global order belong to which shard, step by step.

`ShardPlan` is a pure, frozen object that everything else asks. It keeps the laws *tile*, *length*,
*same count* and *valid rows*: the shards together are the epoch, padding is known as padding, and
what has been consumed is always a prefix of the global order.

In every mode shard ``i`` of ``count`` reads, in step ``s``, ``rows`` consecutive positions from
``start + s * count * rows + i * rows``: whole batches have ``rows = batch_size``, sliced ones
``rows = batch_size / count``. The modes differ only in what happens to the last one or two steps.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardplug.errors import PlanError
from shardplug.kinds import check_integer
from shardplug.plan.shard import Shard


class Split(enum.Enum):
    """How the batches of an epoch are divided among the shards."""

    WHOLE = "whole"
    """Batch i goes to shard i mod count."""
    SLICE = "slice"
    """Each batch is cut into count pieces."""


class Tail(enum.Enum):
    """What happens where an epoch does not divide evenly."""

    PAD = "pad"
    """Fill up from the start of the epoch, cycling: all shards take the same full steps."""
    DROP = "drop"
    """Drop incomplete batches and incomplete rounds."""
    UNEVEN = "uneven"
    """Repeat nothing, drop nothing; shards may differ by a step."""
    EXACT = "exact"
    """Repeat nothing, drop nothing, same number of steps: the last rows are dealt evenly."""


def choose_tail(tail: str | Tail | None, *, even_batches: bool, drop_last: bool) -> Tail:
    """Turn the arguments that say what happens at the end into one mode.

    Raises:
        PlanError: If ``tail`` is none of the four.
    """
    if tail is None:
        if drop_last:
            return Tail.DROP
        return Tail.PAD if even_batches else Tail.UNEVEN
    try:
        return Tail(tail)
    except ValueError:
        names = ", ".join(repr(mode.value) for mode in Tail)
        raise PlanError(f"`tail` must be one of {names}, got {tail!r}.") from None


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Which positions of an epoch one shard reads, step by step.

    Attributes:
        num_samples: Samples in the epoch's global order, zero or more; None when unknown (a
            stream): then `positions` tells what a full step would read, and `seek` still works.
        batch_size: Samples per batch, at least 1: per shard and step for ``Split.WHOLE``, over
            all shards for ``Split.SLICE``.
        shard: Which part, of how many.
        split: How batches are divided.
        tail: What happens at an uneven end.
        start: Samples of the global order consumed before the first step; not zero for the rest
            of an epoch, see `seek`.

    Raises:
        PlanError: If a number is out of range, or ``Split.SLICE`` meets a batch size that is not
            a multiple of the number of shards.

    Example:
        >>> plan = ShardPlan(10, 4, Shard(0, 3), split=Split.WHOLE, tail=Tail.EXACT)
        >>> plan.num_steps, list(plan.positions(0)), plan.valid_rows(0)
        (1, [0, 1, 2, 3], 4)
        >>> [list(ShardPlan(5, 2, Shard(i, 2)).positions(1)) for i in range(2)]
        [[4, 0], [1, 2]]
    """

    num_samples: int | None
    batch_size: int
    shard: Shard
    split: Split = Split.WHOLE
    tail: Tail = Tail.PAD
    start: int = 0

    def __post_init__(self) -> None:
        """Check the kinds, take numpy's numbers for Python's, and check them by each other."""
        self._check_kinds()
        if self.batch_size < 1:
            raise PlanError(f"`batch_size` must be at least 1, got {self.batch_size}.")
        if self.split is Split.SLICE and self.batch_size % self.shard.count:
            down = self.batch_size - self.batch_size % self.shard.count
            fitting = [str(size) for size in (down, down + self.shard.count) if size]
            raise PlanError(
                f"`batch_size` must be a multiple of the {self.shard.count} shards when each batch "
                f"is split, got {self.batch_size}. Use {' or '.join(fitting)}, or "
                "split_batches=False."
            )
        if self.num_samples is None:
            if self.start < 0:
                raise PlanError(f"`consumed` must be zero or more, got {self.start}.")
            return
        if self.num_samples < 0:
            raise PlanError(f"`num_samples` must be zero or more, got {self.num_samples}.")
        if not 0 <= self.start <= self.num_samples:
            raise PlanError(f"`consumed` must be in [0, {self.num_samples}], got {self.start}.")
        if self.tail is Tail.EXACT:
            self._check_exact(self.num_samples - self.start)

    def _check_kinds(self) -> None:
        for field in ("num_samples", "batch_size", "start"):
            name = "consumed" if field == "start" else field
            number = check_integer(name, getattr(self, field), or_none=field == "num_samples")
            object.__setattr__(self, field, number)
        for field, kind in (("shard", Shard), ("split", Split), ("tail", Tail)):
            if not isinstance(getattr(self, field), kind):
                raise PlanError(
                    f"`{field}` must be a shardplug.{kind.__name__}, got "
                    f"{getattr(self, field)!r:.80}."
                )

    @property
    def shard_batch_size(self) -> int:
        """Rows of a full step on one shard."""
        if self.split is Split.SLICE:
            return self.batch_size // self.shard.count
        return self.batch_size

    @property
    def global_batch_size(self) -> int:
        """Rows of a full step over all shards."""
        return self.shard_batch_size * self.shard.count

    @property
    def num_steps(self) -> int:
        """Steps of this shard from ``start`` to the end of the epoch.

        Raises:
            PlanError: If ``num_samples`` is None.
        """
        full, rest = divmod(self._known_samples() - self.start, self.global_batch_size)
        if rest == 0 or self.tail is Tail.DROP:
            return full
        if self.tail is Tail.UNEVEN and rest <= self.shard.index * self.shard_batch_size:
            return full
        return full + 1

    @property
    def num_full_steps(self) -> int:
        """Steps from the first that are alike: own positions in a row, all of them real.

        Raises:
            PlanError: If ``num_samples`` is None.
        """
        full, rest = divmod(self._known_samples() - self.start, self.global_batch_size)
        if self.tail is Tail.EXACT and 0 < rest < self.shard.count:
            return full - 1
        return full

    @property
    def remainder(self) -> int:
        """Real rows of the last step over all shards when that step is not full, else -1.

        Raises:
            PlanError: If ``num_samples`` is None.
        """
        full, rest = divmod(self._known_samples() - self.start, self.global_batch_size)
        if rest == 0 or self.tail is Tail.DROP:
            return -1
        return self._round_rows(full)

    def positions(self, step: int) -> Sequence[int]:
        """Tell the positions of the global order that make this shard's batch in a step.

        Padding wraps: row ``j`` stands for position ``j mod num_samples``.

        Args:
            step: Which step, in [0, num_steps).

        Returns:
            Positions, in the order of the batch's rows.

        Raises:
            PlanError: If ``step`` is out of range.
        """
        first, rows = self._own_rows(step)
        stop = first + rows
        if self.num_samples is None or stop <= self.num_samples:
            return range(first, stop)
        return [position % self.num_samples for position in range(first, stop)]

    def valid_rows(self, step: int) -> int:
        """Count the rows of this shard's batch in a step that are real, not padding.

        Args:
            step: Which step, in [0, num_steps).

        Returns:
            Real rows; they come first in the batch.

        Raises:
            PlanError: If ``step`` is out of range.
        """
        first, rows = self._own_rows(step)
        if self.num_samples is None:
            return rows
        return max(0, min(rows, self.num_samples - first))

    def cursor(self, step: int) -> int:
        """Count the samples of the global order consumed by all shards before a step.

        Args:
            step: Which step, in [0, num_steps]; for ``num_steps`` the whole epoch is consumed
                (under ``Tail.DROP`` what is dropped counts as done).

        Returns:
            Samples, in [start, num_samples].

        Raises:
            PlanError: If ``step`` is out of range.
        """
        if self.num_samples is None:
            if step < 0:
                raise PlanError(f"`step` must be zero or more, got {step}.")
        elif not 0 <= step <= self.num_steps:
            raise PlanError(f"`step` must be in [0, {self.num_steps}], got {step}.")
        elif step == self.num_steps:
            return self.num_samples
        return self._round_start(step)

    def seek(
        self, consumed: int, *, shard: Shard | None = None, batch_size: int | None = None
    ) -> ShardPlan:
        """Plan the rest of the epoch, for this or another number of shards and batch size.

        Args:
            consumed: Samples of the global order that are done, in [0, num_samples].
            shard: Which part, of how many; None: as before.
            batch_size: None: as before.

        Returns:
            The plan of what is left; its steps count from zero.

        Raises:
            PlanError: If a number is out of range, or ``Tail.EXACT`` cannot deal out the rest.
        """
        return replace(
            self,
            start=consumed,
            shard=self.shard if shard is None else shard,
            batch_size=self.batch_size if batch_size is None else batch_size,
        )

    def _known_samples(self) -> int:
        if self.num_samples is None:
            raise PlanError("`num_samples` must be known to count steps, got None.")
        return self.num_samples

    def _round_start(self, step: int) -> int:
        """Where the rows of all shards in a step begin."""
        start = self.start + step * self.global_batch_size
        if self.num_samples is not None and step > self.num_full_steps:
            # Only an exact end has a step after a short one: all that is left, one row a shard.
            return self.num_samples - self.shard.count
        return start

    def _round_rows(self, step: int) -> int:
        """How many real rows all shards together read in a step."""
        num_samples = self._known_samples()
        start = self._round_start(step)
        if self.tail is Tail.EXACT and step == self.num_full_steps < self.num_steps - 1:
            return num_samples - self.shard.count - start
        return min(self.global_batch_size, num_samples - start)

    def _own_rows(self, step: int) -> tuple[int, int]:
        """Where this shard's rows of a step begin, padding included, and how many they are."""
        rows = self.shard_batch_size
        if self.num_samples is None:
            if step < 0:
                raise PlanError(f"`step` must be zero or more, got {step}.")
            return self.start + step * self.global_batch_size + self.shard.index * rows, rows
        if not 0 <= step < self.num_steps:
            raise PlanError(f"`step` must be in [0, {self.num_steps}), got {step}.")
        start = self._round_start(step)
        if self.tail is Tail.EXACT and step >= self.num_full_steps:
            each, more = divmod(self._round_rows(step), self.shard.count)
            first = start + self.shard.index * each + min(self.shard.index, more)
            return first, each + (self.shard.index < more)
        first = start + self.shard.index * rows
        if self.tail is Tail.UNEVEN:
            return first, min(rows, self.num_samples - first)
        return first, rows

    def _check_exact(self, num_samples: int) -> None:
        count = self.shard.count
        full, rest = divmod(num_samples, self.global_batch_size)
        if rest == 0 or rest >= count:
            return
        if full == 0:
            raise PlanError(
                f"`num_samples` must be 0 or at least the {count} shards with tail='exact', got "
                f'{num_samples}. Use fewer ranks, tail="pad" or tail="uneven".'
            )
        if self.shard_batch_size == 1:
            raise PlanError(
                f"`num_samples` must be a multiple of the {count} shards with tail='exact' and one "
                f"row per shard and step, got {num_samples}. Use a larger batch size, "
                'tail="pad" or tail="uneven".'
            )
