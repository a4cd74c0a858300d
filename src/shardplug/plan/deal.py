"""Deal out what comes one by one and whose end is not known: the plan, window by window.

The items of a stream, or the batches of a batch sampler, are dealt as `ShardPlan` would deal them
if their number had been known. No item is asked for before it is needed: a full window goes out as
soon as it is complete (``Tail.EXACT`` holds one window back, since the end may have to borrow from
it).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Generic, TypeVar

from shardplug.errors import PlanError
from shardplug.plan.split import ShardPlan, Tail

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part(Generic[T]):
    """What one shard reads in one step.

    Attributes:
        rows: The items, real ones first.
        valid_rows: How many of them are real.
        consumed: Items of the global order that all shards have consumed after this step.
    """

    rows: Sequence[T]
    valid_rows: int
    consumed: int


def deal(
    items: Iterable[T], plan: ShardPlan, *, head: Sequence[T] = ()
) -> Generator[Part[T], None, int]:
    """Deal out the items of a stream to one shard.

    Every shard reads the whole stream and keeps its own rows; memory is one or two windows of
    ``plan.global_batch_size`` items.

    Args:
        items: The stream, from position ``plan.start`` of the epoch's order on.
        plan: How to deal, with ``num_samples`` None.
        head: The first window of the epoch, to pad from when the stream does not start there.

    Yields:
        This shard's part of each step.

    Returns:
        Samples in the epoch, known once the stream has ended.

    Raises:
        PlanError: If ``Tail.EXACT`` cannot deal out the end, or padding needs a missing ``head``.

    Example:
        >>> from shardplug.plan.shard import Shard
        >>> [part.rows for part in deal("abcdef", ShardPlan(None, 2, Shard(1, 2)))]
        [['c', 'd'], ['a', 'b']]
    """
    source = iter(items)
    size, own = plan.global_batch_size, plan.shard_batch_size
    first, stop = plan.shard.index * own, (plan.shard.index + 1) * own
    lags = plan.tail is Tail.EXACT
    head = list(head)
    held: list[T] = []
    step, seen = 0, plan.start
    while len(window := list(islice(source, size))) == size:
        seen += size
        if plan.tail is Tail.PAD and not head and not plan.start:
            head = window
        if lags:
            held, window = window, held
            if not window:
                continue
        step += 1
        yield Part(window[first:stop], own, plan.start + step * size)
    seen += len(window)
    rest = [*held, *window]
    if rest and plan.tail is Tail.PAD and plan.start and len(head) < min(size, seen):
        raise PlanError(
            "`head` must hold the first window of the epoch to pad a stream that goes on from "
            f"sample {plan.start}, got {len(head)} items."
        )
    offset = seen - len(rest)
    ended = replace(plan, num_samples=seen)
    for last in range(step, ended.num_steps):
        positions = ended.positions(last)
        rows = [rest[at - offset] if at >= offset else head[at] for at in positions]
        yield Part(rows, ended.valid_rows(last), ended.cursor(last + 1))
    return seen
