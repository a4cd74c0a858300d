"""All ranks stop together: what one rank asks of its engine, all ranks do.

An engine looks after each event whether it is to stop. Until an iteration ends that is put off;
then a rank that was asked for something lets all ranks meet, at the end of this iteration or as
soon as can be after it, and they tell each other. What all ranks ask for together, or what was
asked for before, is then done at once; what only some have just asked for is done by all one
iteration later. So an iteration that one rank asks in does not depend on how far others are, where
ranks wait for each other in each iteration.

Where all ranks stand still in any case, at the start, around an epoch and at the end of its last
iteration, they tell each other there and then. Where ranks evaluate different numbers of batches,
those that have more tell what they were asked for in them at the end of the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import chain
from operator import or_
from typing import Literal, final

from ignite.engine import Engine

from shardplug import Comm, SyncPoint

_TERMINATE, _SKIP_COMPLETED, _LEAVE_EPOCH, _SKIP_EPOCH_COMPLETED, _INTERRUPT = 1, 2, 4, 8, 16


@final
class Stops:
    """What an engine was asked for on any rank: terminate, terminate_epoch, interrupt.

    Args:
        ranks: Those that stop together.
    """

    def __init__(self, ranks: Comm) -> None:
        self._ranks = ranks
        self._sync: SyncPoint | None = None
        self._asked = 0  # what this rank was asked for in this iteration
        self._overdue = 0  # in one before
        self._common = 0  # what all are to do at the end of the next
        self._count = 0  # iterations since ranks met; the engine's own count may go back
        self._began = 0
        self._last: int | None = None

    def begin_run(self) -> None:
        """Forget what an earlier run was asked for and has not done.

        Collective: every rank must call it.
        """
        if self._sync is None:
            self._sync = SyncPoint(self._ranks)
        self._forget()

    def begin_epoch(self, began: int, last: int | None) -> None:
        """Be told what an epoch is like.

        Args:
            began: Iterations before its first.
            last: The last of its iterations that all ranks have; None if that is not known, and
                the same for all.
        """
        self._began, self._last = began, last

    def hold(self, engine: Engine) -> None:
        """Put off what was asked for until ranks can agree on it.

        Args:
            engine: The engine.
        """
        if engine.should_terminate or engine.should_terminate_single_epoch or _interrupts(engine):
            self._asked |= _flags_of(engine)
            _set(engine, 0)

    def end_iteration(self, engine: Engine) -> None:
        """Do what all are to do, and meet if a rank was asked for something.

        Every rank must call it.

        Args:
            engine: The engine.
        """
        done = engine.state.iteration - self._began
        left = None if self._last is None else self._last - done
        if left == 0:
            self.agree(engine)
            return
        self.hold(engine)
        if left is not None and left < 0:
            return  # not all ranks have this one
        flags, self._common = self._common, 0
        if not flags:
            flags = self._meet_if_asked()
        if flags:
            _set(engine, flags)

    def agree(self, engine: Engine, iter_counter: int = 0) -> None:  # Ignite's
        """Ask of the engine of every rank what was asked of that of any, at once.

        Collective: every rank must call it.

        Args:
            engine: The engine.
            iter_counter: Of no use; Ignite passes it where an epoch is left.
        """
        own = _flags_of(engine) | self._asked | self._overdue | self._common
        self._forget()
        flags = _any_of(self._meet(own, 0))
        if flags:
            _set(engine, flags)

    def _meet_if_asked(self) -> int:
        """Return what is to be done now, by all."""
        assert self._sync is not None  # a run has begun
        self._count += 1
        wishes = self._asked | self._overdue
        if not self._sync.reached(self._count, asks=bool(wishes)):
            self._asked, self._overdue = 0, wishes
            return 0
        by_rank = self._meet(self._asked, self._overdue)
        self._overdue = 0
        overdue = _any_of((flags,) for _, flags in by_rank)
        if overdue:
            return overdue  # what is asked for here comes next
        flags, self._asked = _any_of(by_rank), 0
        if all(asked for asked, _ in by_rank):
            return flags
        self._common = flags
        return 0

    def _forget(self) -> None:
        self._asked = self._overdue = self._common = 0

    def _meet(self, asked: int, overdue: int) -> Sequence[tuple[int, ...]]:
        assert self._sync is not None  # a run has begun
        self._count = 0
        return self._sync.meet(0, (asked, overdue))


def _any_of(by_rank: Iterable[tuple[int, ...]]) -> int:
    return reduce(or_, chain.from_iterable(by_rank), 0)


def _interrupts(engine: Engine) -> bool:
    return bool(engine.should_interrupt)


def _flags_of(engine: Engine) -> int:
    flags = 0
    if engine.should_terminate:
        flags |= _TERMINATE
        if engine.should_terminate == "skip_completed":
            flags |= _SKIP_COMPLETED
    if engine.should_terminate_single_epoch:
        flags |= _LEAVE_EPOCH
        if engine.should_terminate_single_epoch == "skip_epoch_completed":
            flags |= _SKIP_EPOCH_COMPLETED
    return flags | (_INTERRUPT if _interrupts(engine) else 0)


def _set(engine: Engine, flags: int) -> None:
    ends: bool | Literal["skip_completed"] = bool(flags & _TERMINATE)
    leaves: bool | Literal["skip_epoch_completed"] = bool(flags & _LEAVE_EPOCH)
    engine.should_terminate = "skip_completed" if flags & _SKIP_COMPLETED else ends
    engine.should_terminate_single_epoch = (
        "skip_epoch_completed" if flags & _SKIP_EPOCH_COMPLETED else leaves
    )
    engine.should_interrupt = bool(flags & _INTERRUPT)
