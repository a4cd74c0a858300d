"""What there is to tell and to draw of a plan, by formula: nothing here grows with the epoch.

A leg is a stretch of an epoch on one number of ranks. A cell is what one rank reads in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardplug.cli.refusal import Refusal
from shardplug.plan.shard import Shard
from shardplug.plan.split import ShardPlan, Split, Tail

MOST_LISTED = 2**20
"""Up to here a shuffle is drawn as a list; above, only by formula is it there at once."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for; see `shardplug plan --help`.

    Attributes:
        num_samples: Samples in the epoch.
        batch_size: As the loader has it.
        world_size: Ranks.
        split: How batches are divided.
        tail: What happens at an uneven end.
    """

    num_samples: int
    batch_size: int
    world_size: int
    split: Split
    tail: Tail

    def leg(self) -> Leg:
        """Plan the whole epoch."""
        shard = Shard(0, self.world_size)
        tail = _tail_for(self.tail, self.world_size)
        plan = ShardPlan(self.num_samples, self.batch_size, shard, split=self.split, tail=tail)
        return Leg(plan, plan.num_steps)

    def legs(self, resume_at: int | None, new_world_size: int | None) -> list[Leg]:
        """Plan the epoch up to a step, and the rest of it on another number of ranks.

        Args:
            resume_at: Steps done before the stop; None: there is none.
            new_world_size: Ranks from there on; None: as before.

        Raises:
            Refusal: If the epoch has not so many steps.
        """
        whole = self.leg()
        if resume_at is None:
            return [whole]
        if not 0 <= resume_at <= whole.num_steps:
            raise Refusal(
                f"`--resume-at` must be in [0, {whole.num_steps}], the steps of this epoch, got "
                f"{resume_at}."
            )
        count = self.world_size if new_world_size is None else new_world_size
        rest = replace(whole.plan, tail=_tail_for(self.tail, count)).seek(
            whole.plan.cursor(resume_at), shard=Shard(0, count)
        )
        return [replace(whole, num_shown=resume_at), Leg(rest, rest.num_steps)]


def _tail_for(tail: Tail, world_size: int) -> Tail:
    # As a prepared loader does: alone there is nobody to be even with.
    return Tail.UNEVEN if tail is Tail.PAD and world_size == 1 else tail


@dataclass(frozen=True, slots=True)
class Cell:
    """What one rank reads in one step, or would have read if it had not been dropped.

    Attributes:
        first: The position of its first row, not wrapped.
        num_rows: Rows, padding included.
        valid_rows: Real rows; they come first.
        num_samples: Samples in the epoch, where positions wrap.
        is_dropped: Whether nobody reads it.
    """

    first: int
    num_rows: int
    valid_rows: int
    num_samples: int
    is_dropped: bool = False

    def position(self, row: int) -> int:
        """Tell the position of the epoch's order that a row stands for."""
        return (self.first + row) % self.num_samples


@dataclass(frozen=True, slots=True)
class Leg:
    """A stretch of an epoch on one number of ranks.

    Attributes:
        plan: That of rank 0.
        num_shown: Steps of it that are taken: all, or those before a stop.
    """

    plan: ShardPlan
    num_shown: int

    @property
    def world_size(self) -> int:
        """How many ranks."""
        return self.plan.shard.count

    @property
    def num_steps(self) -> int:
        """Steps of rank 0, which takes as many as any."""
        return self.plan.num_steps

    @property
    def num_left(self) -> int:
        """Samples of the epoch that are not consumed before this leg."""
        return self._num_samples - self.plan.start

    @property
    def _num_samples(self) -> int:
        assert self.plan.num_samples is not None  # a request has a number
        return self.plan.num_samples

    def on(self, rank: int) -> ShardPlan:
        """Return the plan of a rank."""
        return replace(self.plan, shard=Shard(rank, self.world_size))

    def steps_by_rank(self) -> list[tuple[int, int, int]]:
        """Tell how many steps ranks take: first rank, last rank, and steps of each."""
        last = self.on(self.world_size - 1).num_steps
        if last == self.num_steps:
            return [(0, self.world_size - 1, last)]
        rest = self.num_left % self.plan.global_batch_size
        longer = -(-rest // self.plan.shard_batch_size)
        return [(0, longer - 1, self.num_steps), (longer, self.world_size - 1, last)]

    @property
    def padded(self) -> int:
        """Rows over all ranks that repeat others to fill up; they come with the last step."""
        if self.plan.tail is not Tail.PAD or not self.is_whole:
            return 0
        return self.num_steps * self.plan.global_batch_size - self.num_left

    @property
    def dropped(self) -> int:
        """Samples that nobody reads."""
        if self.plan.tail is not Tail.DROP or not self.is_whole:
            return 0
        return self.num_left - self.num_steps * self.plan.global_batch_size

    @property
    def remainder(self) -> int:
        """Real rows of the last step over all ranks if it is taken and not full, else -1."""
        return self.plan.remainder if self.is_whole else -1

    @property
    def is_whole(self) -> bool:
        """Whether it goes on to the end of the epoch."""
        return self.num_shown == self.num_steps

    def cell(self, rank: int, step: int) -> Cell | None:
        """Tell what a rank reads in a step; None if it takes no such step.

        Args:
            rank: The rank.
            step: The step; the one after the last is what is dropped.
        """
        plan = self.on(rank)
        is_dropped = step == self.num_steps
        if is_dropped:
            plan = replace(plan, tail=Tail.UNEVEN)
        if step >= plan.num_steps:
            return None
        if plan.tail is Tail.PAD:
            rows = plan.shard_batch_size
            first = plan.cursor(step) + rank * rows
            return Cell(first, rows, plan.valid_rows(step), self._num_samples)
        # Without padding nothing wraps: however many rows there are, they are a range.
        rows = plan.valid_rows(step)
        return Cell(plan.positions(step)[0], rows, rows, self._num_samples, is_dropped)


@dataclass(frozen=True, slots=True)
class Numbering:
    """Which sample stands at a position of the epoch's order.

    Attributes:
        name: What to tell of it.
        take: Looks positions up.
        is_sequential: Whether position p holds sample p.
    """

    name: str
    take: Callable[[Sequence[int]], list[int]]
    is_sequential: bool = False


def number(num_samples: int, seed: int | None, epoch: int) -> Numbering:
    """Choose the order of an epoch: that of a loader with ``shuffle=True`` where it is quick.

    Args:
        num_samples: Samples in the epoch.
        seed: Of the shuffle; None: there is none.
        epoch: The epoch, zero or more.
    """
    if seed is None:
        return Numbering("sequential", list, is_sequential=True)
    # Here, for what is not shuffled is drawn without torch.
    from shardplug.samplers import PermutedSampler, SeedableRandomSampler

    if num_samples <= MOST_LISTED:
        listed = SeedableRandomSampler(range(max(1, num_samples)), data_seed=seed)
        listed.set_epoch(epoch)
        name = "that of shuffle=True (SeedableRandomSampler)"
        return Numbering(f"{name}, seed {seed}, epoch {epoch}", listed.order().take)
    permuted = PermutedSampler(num_samples, seed=seed)
    permuted.set_epoch(epoch)
    name = f"that of PermutedSampler, used above {MOST_LISTED} samples"
    return Numbering(f"{name}, seed {seed}, epoch {epoch}", permuted.order().take)


def ends(count: int, most: int) -> list[int | None]:
    """List [0, count), or its first and last with None for what is left out between.

    Example:
        >>> ends(3, 5), ends(100, 5)
        ([0, 1, 2], [0, 1, 2, None, 98, 99])
    """
    if count <= most:
        return list(range(count))
    last = max(1, most * 2 // 5)
    return [*range(most - last), None, *range(count - last, count)]


def facts(leg: Leg) -> dict[str, Any]:
    """Tell what a leg comes to, as numbers."""
    return {
        "world_size": leg.world_size,
        "consumed_before": leg.plan.start,
        "samples_left": leg.num_left,
        "steps_per_rank": [
            {"first_rank": first, "last_rank": last, "steps": steps}
            for first, last, steps in leg.steps_by_rank()
        ],
        "steps_taken": leg.num_shown,
        "batch_size_per_rank": leg.plan.shard_batch_size,
        "total_batch_size": leg.plan.global_batch_size,
        "padded": leg.padded,
        "dropped": leg.dropped,
        "remainder": leg.remainder,
        "tail": leg.plan.tail.value,
    }
