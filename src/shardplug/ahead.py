"""Run an iterator in a thread of its own, so that it works while its items are used."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Generic, TypeVar, final

from shardplug.signals import Postponed

T = TypeVar("T")

_EXIT_S = 5.0
"""How long the end of the interpreter waits for an item that is being made."""


@final
class Ahead(Generic[T]):
    """The items of a generator, made one ahead of whoever takes them.

    At most one item lies ready. What the generator raises is raised where its item would have been
    taken. The generator is run, and closed, by the thread alone.

    Args:
        items: The generator; it has not begun.
        interrupt: Called by `close` to wake the generator where it waits for others.
    """

    def __init__(self, items: Generator[T, None, None], *, interrupt: Callable[[], None]) -> None:
        self._items = items
        self._interrupt = interrupt
        self._changed = threading.Condition()
        self._ready: list[T] = []
        self._failure: BaseException | None = None
        self._late: list[Exception] = []
        self._has_ended = self._is_closed = False
        # A daemon, lest a program that fails waits for it; it is ended before the interpreter is.
        self._thread = threading.Thread(target=self._run, name="shardplug-read", daemon=True)
        self._at_exit = weakref.finalize(self, self._close, _EXIT_S)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        """Return itself."""
        return self

    def __next__(self) -> T:
        """Wait for the next item and take it.

        Where a handler of SIGCHLD raises meanwhile, the generator is told to raise that.
        """
        with Postponed(self._late), self._changed:
            self._changed.wait_for(lambda: self._ready or self._has_ended)
        with self._changed:
            if self._late and not self._has_ended:
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._has_ended)
            elif self._ready:
                item = self._ready.pop()
                self._changed.notify_all()
                return item
        failure, self._failure = self._failure, None
        raise StopIteration if failure is None else failure

    def close(self) -> None:
        """Give up what is left; an item that is being made is waited for."""
        self._at_exit.detach()
        self._close(None)

    def _close(self, timeout_s: float | None) -> None:
        with self._changed:
            self._is_closed = True
            self._ready.clear()
            self._changed.notify_all()
        if not self._has_ended:
            self._interrupt()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while self._wait_for_room():
                if self._late:
                    self._items.throw(self._late[0])
                item = next(self._items)
                self._put(item)
                del item
            self._items.close()
        except StopIteration:
            pass
        # Whatever it is, SystemExit too: the thread would print or drop it.
        except BaseException as error:  # noqa: BLE001  # raised again by `__next__`
            failure = error
        with self._changed:
            self._failure = failure
            self._has_ended = True
            self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: not self._ready or self._is_closed or self._late)
            return not self._is_closed

    def _put(self, item: T) -> None:
        with self._changed:
            if not self._is_closed:
                self._ready.append(item)
                self._changed.notify_all()
