"""Keep ranks in step whose parts of a stream end at different times.

Each rank tells how many batches it has in hand and whether its part has ended; all may then take as
many steps as every rank can cover, without another word. One small message buys up to ``AHEAD``
steps, instead of one message for each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, final

from shardplug.comm import Comm, gather_facts
from shardplug.errors import CommError
from shardplug.passes import Snapshot
from shardplug.plan.split import Tail
from shardplug.signals import Postponed

AHEAD = 16
"""Most steps that one message buys: a rank holds one batch more than that in hand."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A batch of a stream, as it arrives.

    Attributes:
        batch: What the loader yields.
        num_rows: How many rows it has.
        valid_rows: How many of them are real.
        consumed: What has been consumed of the stream's order after it.
        is_last: Whether no further one comes.
        snapshot: A state of the stream from which it can go on after it, if it has states.
    """

    batch: Any
    num_rows: int
    valid_rows: int
    consumed: int
    is_last: bool = False
    snapshot: Snapshot | None = None


def mark_last(arrivals: Iterator[Arrival]) -> Iterator[Arrival]:
    """Mark the last arrival; each one goes out when the next one is there."""
    for held in arrivals:
        for following in arrivals:
            yield held
            held = following  # the one in hand is always the latest
        yield replace(held, is_last=True)


def in_step(
    arrivals: Iterator[Arrival], comm: Comm, *, tail: Tail, is_cut: bool
) -> Iterator[Arrival]:
    """Let every rank take the same number of steps over parts of different length.

    ``Tail.PAD``: a rank whose part has ended repeats its last batch, with no valid rows, until the
    last one has. A rank without any batch is sent one of another rank's to repeat. ``Tail.DROP``:
    all stop when the first part has ended. Ranks that read the same stream cannot differ: if
    they do, that is an error on all.

    Collective: every rank must iterate, to the end or to the same step.

    Args:
        arrivals: This rank's batches.
        comm: The ranks.
        tail: PAD or DROP where ``is_cut``.
        is_cut: Whether each rank reads a part of its own; else all read the same stream.

    Yields:
        This rank's batch of each step; the last one says so.

    Raises:
        CommError: If reading failed on another rank, or ranks that read the same stream come to
            its end at different steps.
    """
    hand = _Hand(arrivals)
    late: list[Exception] = []
    wanted, is_end = 1, False
    while not is_end:
        _, by_rank = gather_facts(comm, partial(hand.fill, wanted), num_facts=3, late=late)
        if not is_cut:
            _check_same([(have, bool(ended)) for have, ended, _ in by_rank])
        steps, is_end = _allowed_steps([(have, bool(ended)) for have, ended, _ in by_rank], tail)
        if steps and not all(has_any for _, _, has_any in by_rank):
            src = next(rank for rank, facts in enumerate(by_rank) if facts[2])
            with Postponed(late):
                hand.borrow(comm.broadcast_object(hand.latest, src=src))
        for step in range(steps):
            yield hand.take(is_last=is_end and step == steps - 1)
        wanted = min(2 * wanted, AHEAD)
    if late:
        raise late.pop()


@final
class _Hand:
    """The batches that this rank has ready, and one to repeat when there is no other."""

    def __init__(self, arrivals: Iterator[Arrival]) -> None:
        self._arrivals = arrivals
        self._ready: deque[Arrival] = deque()
        self._has_ended = False
        self.latest: Arrival | None = None

    def fill(self, wanted: int) -> tuple[None, Sequence[int]]:
        """Get batches until ``wanted`` may go out or the part has ended, and tell how it stands.

        One more than may go out is fetched, so that the last one is known when it does.
        """
        missing = wanted + 1 - len(self._ready)
        if missing > 0 and not self._has_ended:
            got = list(islice(self._arrivals, missing))
            self._ready.extend(got)
            self._has_ended = len(got) < missing
        if self.latest is None and self._ready:
            self.latest = self._ready[0]
        may_go = len(self._ready) - (not self._has_ended)
        return None, (may_go, self._has_ended, self.latest is not None)

    def borrow(self, arrival: Arrival) -> None:
        """Take another rank's batch to repeat where this one has none."""
        if self.latest is None:
            self.latest = replace(arrival, consumed=0, snapshot=None)

    def take(self, *, is_last: bool) -> Arrival:
        """Hand out the next batch, or the latest one again without a valid row."""
        if self._ready:
            self.latest = self._ready.popleft()
        elif self.latest is not None:
            self.latest = replace(self.latest, valid_rows=0)
        assert self.latest is not None  # a rank that takes steps has a batch, or was lent one
        return replace(self.latest, is_last=is_last)


def _check_same(hands: Sequence[tuple[int, bool]]) -> None:
    """Refuse streams that end on some ranks only."""
    least = min(hands, key=lambda hand: (hand[0], not hand[1]))
    if any(hand != least for hand in hands):
        ended = [rank for rank, hand in enumerate(hands) if hand == least]
        raise CommError(
            f"Ranks disagree on the end of the stream: it has ended on ranks {ended} but goes on "
            "on the others. Give every rank the same stream, or pass already_sharded=True if each "
            "reads a part of its own."
        )


def _allowed_steps(hands: Sequence[tuple[int, bool]], tail: Tail) -> tuple[int, bool]:
    """Count the steps that all ranks can take now, and tell whether the pass ends with them."""
    if tail is Tail.DROP:
        steps = min(have for have, _ in hands)
        return steps, any(has_ended and have == steps for have, has_ended in hands)
    running = [have for have, has_ended in hands if not has_ended]
    if running:
        return min(running), False
    return max(have for have, _ in hands), True
