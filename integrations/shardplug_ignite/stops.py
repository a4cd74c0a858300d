"""All ranks stop together: what one rank asks of its engine, all ranks do.

An engine looks after each event whether it is to stop. Until an iteration ends that is put off;
then ranks begin to tell each other what was asked for, and go on. A rank that has nothing to ask
for waits for none: it looks at the end of the next iteration at what it was told, and by then
knows. One that has something to ask for waits at once. So what all ranks ask for together is done
at once, and what only some ask for at the end of the following iteration, by all.

Where all ranks stand still in any case, at the start, around an epoch and at the end of its last
iteration, they ask each other there and then. Where ranks evaluate different numbers of batches,
those that have more tell what they were asked for in them at the end of the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, final

from ignite.engine import Engine

from shardplug import Comm, TorchComm

_TERMINATE, _SKIP_COMPLETED, _LEAVE_EPOCH, _SKIP_EPOCH_COMPLETED, _INTERRUPT = 1, 2, 4, 8, 16


@final
class Stops:
    """What an engine was asked for on any rank: terminate, terminate_epoch, interrupt.

    Args:
        ranks: Those that stop together.
        every: In which iterations they ask each other: those that are a multiple of it.
    """

    def __init__(self, ranks: Comm, every: int) -> None:
        self._ranks = ranks
        self._every = every
        self._held = 0
        self._answers: Callable[[], _ByRank] | None = None
        self._began = 0
        self._last: int | None = None

    def begin_run(self) -> None:
        """Forget what an earlier run was asked for and has not done."""
        self._held, self._answers = 0, None

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
            self._held |= _flags_of(engine)
            _set(engine, 0)

    def end_iteration(self, engine: Engine) -> None:
        """Do what was told at the end of the iteration before, and tell what is new.

        Collective: every rank must call it.

        Args:
            engine: The engine.
        """
        iteration = engine.state.iteration
        left = None if self._last is None else self._last - (iteration - self._began)
        if left == 0:
            self.agree(engine)
            return
        self.hold(engine)
        if left is not None and left < 0:
            return  # not all ranks have this one
        flags = self._heard()
        if not flags and iteration % self._every == 0:
            flags = self._ask()
        if flags:
            _set(engine, flags)

    def agree(self, engine: Engine, iter_counter: int = 0) -> None:  # Ignite's
        """Ask of the engine of every rank what was asked of that of any, at once.

        Collective: every rank must call it.

        Args:
            engine: The engine.
            iter_counter: Of no use; Ignite passes it where an epoch is left.
        """
        own = self._heard() | self._held | _flags_of(engine)
        self._held = 0
        flags = _together(self._ranks.all_gather_ints([own]))
        if flags:
            _set(engine, flags)

    def _heard(self) -> int:
        """Tell what was told last."""
        answers, self._answers = self._answers, None
        return 0 if answers is None else _together(answers())

    def _ask(self) -> int:
        """Begin to tell; return what is to be done now, by all."""
        told, self._held = self._held, 0
        if not told and isinstance(self._ranks, TorchComm):
            self._answers = self._ranks.begin_all_gather_ints([told])
            return 0
        by_rank = self._ranks.all_gather_ints([told])
        if all(flags for (flags,) in by_rank):
            return _together(by_rank)
        self._answers = lambda: by_rank  # those that asked for nothing do not know yet
        return 0


_ByRank = Sequence[tuple[int, ...]]


def _together(by_rank: _ByRank) -> int:
    flags = 0
    for (told,) in by_rank:
        flags |= told
    return flags


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
