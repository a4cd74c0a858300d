"""All ranks stop together: what one rank asks of its engine, all ranks do.

An engine looks after each event whether it is to stop. Where all ranks are at the same event and
nothing holds them up, at the end of an iteration, of an epoch, at the start, they ask each other;
at the events before an iteration's step the wish is put off to its end.
"""

from __future__ import annotations

from typing import Literal, final

from ignite.engine import Engine

from shardplug import Comm

_TERMINATE, _SKIP_COMPLETED, _LEAVE_EPOCH, _SKIP_EPOCH_COMPLETED, _INTERRUPT = 1, 2, 4, 8, 16


@final
class Stops:
    """What an engine was asked for on any rank: terminate, terminate_epoch, interrupt.

    Args:
        ranks: Those that stop together.
    """

    def __init__(self, ranks: Comm) -> None:
        self._ranks = ranks
        self._held = 0

    def hold(self, engine: Engine) -> None:
        """Put off what was asked for until ranks can agree on it.

        Args:
            engine: The engine.
        """
        if engine.should_terminate or engine.should_terminate_single_epoch or _interrupts(engine):
            self._held |= _flags_of(engine)
            _set(engine, 0)

    def agree(self, engine: Engine, iter_counter: int = 0) -> None:  # Ignite's
        """Ask of the engine of every rank what was asked of that of any.

        Collective: every rank must call it.

        Args:
            engine: The engine.
            iter_counter: Of no use; Ignite passes it where an epoch is left.
        """
        own = self._held | _flags_of(engine)
        self._held, flags = 0, 0
        for (told,) in self._ranks.all_gather_ints([own]):
            flags |= told
        if flags:
            _set(engine, flags)


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
