"""Keep signal handlers that raise out of collectives.

Where a worker of a loader dies, torch raises from its handler of SIGCHLD, wherever this process is.
In the middle of a collective that would leave the other ranks in it, with no word of the cause.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, final

_CHILD_ENDED: Any = getattr(signal, "SIGCHLD", None)
"""What a process is told when one of its own ends; not on every system."""


@final
class Postponed:
    """Hold SIGCHLD back from a handler written in Python, and hand it on at the end.

    Used as a context, or between `begin` and `end`. Python runs handlers in the main thread only;
    elsewhere, and where there is no handler, nothing happens. Contexts may be nested.
    """

    def __init__(self, late: list[Exception] | None = None) -> None:
        """Hold nothing back yet.

        Args:
            late: Takes what the handler raises at the end. None: it is raised there.
        """
        self._late = late
        self._handler: Any = None
        self._is_pending = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Take a signal in the handler's place."""
        self._is_pending = True

    def begin(self) -> None:
        """Hold signals back from here on."""
        if self._handler is not None or _CHILD_ENDED is None:
            return
        if threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(_CHILD_ENDED)
        if callable(handler) and not isinstance(handler, Postponed):
            self._is_pending = False
            signal.signal(_CHILD_ENDED, self)
            # Last: a handler that raises before the line above leaves this as it was.
            self._handler = handler

    def end(self) -> None:
        """Give the handler its place back, and what came meanwhile."""
        handler, self._handler = self._handler, None
        if handler is None:
            return
        try:
            signal.signal(_CHILD_ENDED, handler)
            if self._is_pending:
                handler(_CHILD_ENDED, None)
        except Exception as error:
            if self._late is None:
                raise
            self._late.append(error)

    def __enter__(self) -> Postponed:
        """Begin."""
        self.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End."""
        self.end()
