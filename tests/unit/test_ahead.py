"""Reading ahead: items in order, one of them ready, and an end that leaves nothing behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from shardplug.ahead import Ahead
from shardplug.signals import Postponed

WAIT_S = 20.0


def nothing() -> None:
    """Be the way to wake a generator that never waits."""


@pytest.mark.parametrize("num_items", [0, 1, 2, 50])
def test_items_come_in_order(num_items: int) -> None:
    ahead = Ahead((each for each in range(num_items)), interrupt=nothing)
    assert list(ahead) == list(range(num_items))
    ahead.close()


def test_an_item_is_made_before_it_is_asked_for_and_no_further_one() -> None:
    made: list[int] = []
    third_is_made, may_end = threading.Event(), threading.Event()

    def items() -> Generator[int, None, None]:
        for each in range(10):
            made.append(each)
            if each == 2:
                third_is_made.set()
                may_end.wait(WAIT_S)
            yield each

    ahead = Ahead(items(), interrupt=may_end.set)
    assert [next(ahead), next(ahead)] == [0, 1]
    assert third_is_made.wait(WAIT_S)
    assert made == [0, 1, 2]
    ahead.close()
    assert made == [0, 1, 2]


def test_what_is_raised_is_raised_in_its_place() -> None:
    def items() -> Generator[int, None, None]:
        yield 0
        raise ValueError("no more")

    ahead = Ahead(items(), interrupt=nothing)
    assert next(ahead) == 0
    with pytest.raises(ValueError, match="no more"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)
    ahead.close()


def test_closing_wakes_the_generator_and_closes_it_in_its_own_thread() -> None:
    is_woken = threading.Event()
    closed_by: list[str] = []

    def items() -> Generator[int, None, None]:
        try:
            yield 0
            is_woken.wait(WAIT_S)
            yield 1
        finally:
            closed_by.append(threading.current_thread().name)

    ahead = Ahead(items(), interrupt=is_woken.set)
    assert next(ahead) == 0
    ahead.close()
    assert closed_by == ["shardplug-read"]
    assert list(ahead) == []


@pytest.fixture
def raising_handler() -> Iterator[None]:
    """Be a process of which another loader's worker may die, as torch tells it."""

    def tell(*_: Any) -> None:
        raise RuntimeError("a worker died")

    before = signal.signal(signal.SIGCHLD, tell)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("raising_handler")
def test_what_a_signal_raises_while_waiting_goes_through_the_generator() -> None:
    caught: list[str] = []

    def items() -> Generator[int, None, None]:
        try:
            while not isinstance(signal.getsignal(signal.SIGCHLD), Postponed):
                pass  # until the main thread waits for the first item
            signal.raise_signal(signal.SIGCHLD)
            yield 0
        except RuntimeError as error:
            caught.append(str(error))
            raise

    ahead = Ahead(items(), interrupt=nothing)
    with pytest.raises(RuntimeError, match="a worker died"):
        next(ahead)
    ahead.close()
    assert caught == ["a worker died"]
