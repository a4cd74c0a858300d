"""A worker that dies while ranks meet, as torch tells of it: by an error from a signal handler."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

needs_signals = pytest.mark.skipif(not hasattr(signal, "SIGCHLD"), reason="needs SIGCHLD")


class Interrupted:
    """The first of two ranks, of which the other does the same; a worker dies in collectives."""

    rank = 0
    world_size = 2

    def __init__(self, *dies_in: int) -> None:
        self.dies_in = dies_in
        self.told: list[object] = []

    def _meet(self, value: Any) -> list[Any]:
        self.told.append(value)
        if len(self.told) in self.dies_in:
            signal.raise_signal(signal.SIGCHLD)
        return [value, value]

    def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        return self._meet(tuple(values))

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._meet(value)

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        return self._meet(value)[src]

    def barrier(self) -> None:
        self._meet(None)


def _raise(number: int, frame: object) -> None:
    raise RuntimeError("a worker died")


@contextmanager
def workers_that_raise() -> Iterator[None]:
    """Install a handler like torch's; what runs in here must leave it in its place."""
    before = signal.getsignal(signal.SIGCHLD)
    signal.signal(signal.SIGCHLD, _raise)
    try:
        yield
        assert signal.getsignal(signal.SIGCHLD) is _raise
    finally:
        signal.signal(signal.SIGCHLD, before)
