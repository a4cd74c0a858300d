"""At which events ranks can agree, and the order of an event's handlers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ignite.engine import Engine, Events

Handler = Callable[..., None]
"""What is called at an event."""

MEETINGS = (
    Events.STARTED,
    Events.EPOCH_STARTED,
    Events.TERMINATE_SINGLE_EPOCH,
    Events.EPOCH_COMPLETED,
)
"""Where ranks ask each other at once whether to stop: they all come there, and not often."""

BEFORE_STEP = (
    Events.GET_BATCH_STARTED,
    Events.GET_BATCH_COMPLETED,
    Events.DATALOADER_STOP_ITERATION,
    Events.ITERATION_STARTED,
)
"""Where to stop is put off to the end of the iteration."""

LAST = (*MEETINGS, *BEFORE_STEP, Events.ITERATION_COMPLETED)
"""Where ours come after those that may ask for something."""

FIRST = (Events.ITERATION_COMPLETED, Events.TERMINATE_SINGLE_EPOCH, Events.EPOCH_COMPLETED)
"""Where the position is noted before anybody may save it."""


def is_list(event: Any) -> bool:
    """Tell whether an event is several."""
    return not isinstance(event, (str, Events)) and hasattr(event, "__iter__")


def move_first(engine: Engine, event: Any, handler: Handler) -> None:
    """Let a handler of an event be called first, if it is there.

    Args:
        engine: The engine.
        event: The event.
        handler: The handler.
    """
    entries = _entries(engine, event)
    place = _place(entries, handler)
    if place > 0:
        entries.insert(0, entries.pop(place))


def move_last(engine: Engine, event: Any, handler: Handler) -> None:
    """Let a handler of an event be called last, if it is there.

    Args:
        engine: The engine.
        event: The event.
        handler: The handler.
    """
    entries = _entries(engine, event)
    place = _place(entries, handler)
    if place >= 0:
        entries.append(entries.pop(place))


def _entries(engine: Engine, event: Any) -> list[Any]:
    found: list[Any] = engine._event_handlers[event]  # noqa: SLF001  # as Ignite's profilers do
    return found


def _place(entries: list[Any], handler: Handler) -> int:
    """Find a handler among those of an event; -1 if it is not there."""
    for place, (function, *_) in enumerate(entries):
        parent = getattr(function, "_parent", None)  # of one that is filtered
        if function == handler or (parent is not None and parent() is handler):
            return place
    return -1


def is_running(engine: Engine) -> bool:
    """Tell whether a run of an engine is under way, or interrupted.

    Args:
        engine: The engine.
    """
    run: Any = engine._internal_run_generator  # noqa: SLF001  # Ignite does not tell otherwise
    if run is not None:
        return run.gi_frame is not None
    if engine.interrupt_resume_enabled:
        return False
    # Without it there is no generator: the iterator goes when a run ends, and comes after these.
    is_starting = engine.last_event_name in (Events.STARTED, Events.EPOCH_STARTED)
    return engine._dataloader_iter is not None or is_starting  # noqa: SLF001  # the same
