"""Deal out what comes one by one and whose end is not known: the plan, window by window.

The items of a stream, or the batches of a batch sampler, are dealt as `ShardPlan` would deal them
if their number had been known. No item is asked for before it is needed: a full window goes out as
soon as it is complete (``Tail.EXACT`` holds one window back, since the end may have to borrow from
it).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Generic, TypeVar

from shardplug.errors import PlanError
from shardplug.plan.shard import Shard
from shardplug.plan.split import ShardPlan, Tail

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part(Generic[T]):
    """What one shard reads in one step.

    Attributes:
        rows: The items, real ones first.
        valid_rows: How many of them are real.
        consumed: Items of the global order that all shards have consumed after this step.
        positions: Where in the epoch's global order each row stands; of padding, where the row
            stands that it repeats.
        extra_rows: Where ``consumed`` counts batches: rows of the next one that are consumed too.
    """

    rows: Sequence[T]
    valid_rows: int
    consumed: int
    positions: Sequence[int] = field(default=(), compare=False)
    extra_rows: int = 0


def deal(
    items: Iterable[T],
    plan: ShardPlan,
    *,
    head: Sequence[T] | Callable[[], Iterable[T]] = (),
    shards: Sequence[Shard] | None = None,
) -> Generator[Part[T], None, int]:
    """Deal out the items of a stream.

    Every shard reads the whole stream and keeps its own rows; memory is one or two windows of
    ``plan.global_batch_size`` items.

    Args:
        items: The stream, from position ``plan.start`` of the epoch's order on.
        plan: How to deal, with ``num_samples`` None.
        head: The first window of the epoch, or as much of it as comes before the stream, to pad
            from when the stream does not start there; or what makes it, called where needed.
        shards: Whose parts are wanted, in this order within each step; None: those of the plan's
            own shard.

    Yields:
        The part of each step.

    Returns:
        Samples in the epoch, known once the stream has ended.

    Raises:
        PlanError: If ``Tail.EXACT`` cannot deal out the end, or padding needs a missing ``head``.

    Example:
        >>> [part.rows for part in deal("abcdef", ShardPlan(None, 2, Shard(1, 2)))]
        [['c', 'd'], ['a', 'b']]
    """
    plans = [plan] if shards is None else [plan.seek(plan.start, shard=each) for each in shards]
    windows = _Windows(iter(items), plan)
    step = 0
    for window in windows:
        for each in plans:
            yield _full_part(window, each, start=plan.start + step * plan.global_batch_size)
        step += 1
    first_window: Sequence[T] = windows.first
    if windows.rest and plan.tail is Tail.PAD and plan.start:
        given = list(islice(head() if callable(head) else head, plan.global_batch_size))
        if len(given) == plan.start:  # the stream goes on in its first window
            given += windows.first or windows.rest
        first_window = _check_head(given, plan, least=min(plan.global_batch_size, windows.seen))
    ended = [replace(each, num_samples=windows.seen) for each in plans]
    for last in range(step, max(each.num_steps for each in ended)):
        for each in ended:
            if last < each.num_steps:
                yield _last_part(last, each, windows.rest, first_window)
    return windows.seen


class _Windows(Generic[T]):
    """The full windows of a stream, each as soon as it is complete; an exact end holds one back.

    Attributes:
        seen: Items of the epoch that have been read.
        first: The first window, if padding may need it.
        rest: What no full window was made of, once the stream has ended.
    """

    def __init__(self, source: Iterator[T], plan: ShardPlan) -> None:
        self._source = source
        self._size = plan.global_batch_size
        self._lags = plan.tail is Tail.EXACT
        self._keeps_first = plan.tail is Tail.PAD
        self.seen = plan.start
        self.first: list[T] = []
        self.rest: list[T] = []

    def __iter__(self) -> Iterator[list[T]]:
        held: list[T] = []
        while len(window := list(islice(self._source, self._size))) == self._size:
            self.seen += self._size
            if self._keeps_first and not self.first:
                self.first = window
            if self._lags:
                held, window = window, held
                if not window:
                    continue
            yield window
        self.seen += len(window)
        self.rest = [*held, *window]


def _full_part(window: Sequence[T], plan: ShardPlan, *, start: int) -> Part[T]:
    """Cut a shard's rows out of a full window that begins at ``start``."""
    rows = plan.shard_batch_size
    first = plan.shard.index * rows
    positions = range(start + first, start + first + rows)
    return Part(window[first : first + rows], rows, start + plan.global_batch_size, positions)


def _last_part(step: int, plan: ShardPlan, rest: Sequence[T], head: Sequence[T]) -> Part[T]:
    """Cut a shard's rows of one of the last steps out of what is left, padded from the head."""
    assert plan.num_samples is not None  # the stream has ended
    offset = plan.num_samples - len(rest)
    positions = plan.positions(step)
    rows = [rest[at - offset] if at >= offset else head[at] for at in positions]
    return Part(rows, plan.valid_rows(step), plan.cursor(step + 1), positions)


def _check_head(head: list[T], plan: ShardPlan, *, least: int) -> list[T]:
    if len(head) < least:
        raise PlanError(
            "`head` must hold the first window of the epoch to pad a stream that goes on from "
            f"sample {plan.start}, got {len(head)} items."
        )
    return head
