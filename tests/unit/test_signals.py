"""A handler that raises waits until a collective is over."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from shardplug.signals import Postponed

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGCHLD"), reason="needs SIGCHLD")


class Handler:
    """Counts its calls, and raises if told to."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.raises = False

    def __call__(self, number: int, frame: object) -> None:
        self.num_calls += 1
        assert number == signal.SIGCHLD
        if self.raises:
            raise RuntimeError("a worker died")


@pytest.fixture
def handler() -> Iterator[Handler]:
    before = signal.getsignal(signal.SIGCHLD)
    installed = Handler()
    signal.signal(signal.SIGCHLD, installed)
    yield installed
    signal.signal(signal.SIGCHLD, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGCHLD)


def test_what_comes_meanwhile_reaches_the_handler_once_at_the_end(handler: Handler) -> None:
    with Postponed():
        interrupt()
        interrupt()
        assert handler.num_calls == 0
    assert handler.num_calls == 1
    interrupt()
    assert handler.num_calls == 2


def test_without_a_signal_the_handler_only_gets_its_place_back(handler: Handler) -> None:
    with Postponed() as postponed:
        during: object = signal.getsignal(signal.SIGCHLD)
    assert during is postponed
    after: object = signal.getsignal(signal.SIGCHLD)
    assert after is handler
    assert handler.num_calls == 0


def test_what_the_handler_raises_comes_at_the_end(handler: Handler) -> None:
    handler.raises = True
    postponed = Postponed()
    postponed.begin()
    interrupt()
    with pytest.raises(RuntimeError, match="a worker died"):
        postponed.end()
    assert signal.getsignal(signal.SIGCHLD) is handler


def test_what_the_handler_raises_can_be_kept_for_later(handler: Handler) -> None:
    handler.raises = True
    late: list[Exception] = []
    with Postponed(late):
        interrupt()
    assert [str(error) for error in late] == ["a worker died"]


def test_the_outermost_of_several_counts(handler: Handler) -> None:
    with Postponed():
        with Postponed():
            interrupt()
        assert handler.num_calls == 0
    assert handler.num_calls == 1
    assert signal.getsignal(signal.SIGCHLD) is handler


def test_one_may_be_used_again_and_begun_or_ended_twice(handler: Handler) -> None:
    postponed = Postponed()
    postponed.end()
    for count in (1, 2):
        postponed.begin()
        postponed.begin()
        interrupt()
        assert handler.num_calls == count - 1
        postponed.end()
        postponed.end()
        assert handler.num_calls == count
    with postponed:
        pass
    assert handler.num_calls == 2


@pytest.mark.parametrize("default", [signal.SIG_DFL, signal.SIG_IGN])
def test_what_is_no_python_function_stays_in_its_place(handler: Handler, default: Any) -> None:
    signal.signal(signal.SIGCHLD, default)
    with Postponed():
        assert signal.getsignal(signal.SIGCHLD) is default
        interrupt()
    assert signal.getsignal(signal.SIGCHLD) is default


def test_other_threads_leave_handlers_alone(handler: Handler) -> None:
    seen: list[object] = []

    def look() -> None:
        with Postponed():
            seen.append(signal.getsignal(signal.SIGCHLD))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [handler]
