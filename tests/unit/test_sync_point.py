"""The step after which ranks meet: the same on all, none that was over, and no message before."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import closing
from itertools import count
from threading import Barrier, Event

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplug import Comm, CommError, PlanError, SoloComm, SyncPoint
from shardplug.sync_point import _Hub
from shardplug.testing import LockstepComm, run_ranks

LAST = 12


def met(
    comm: Comm, asks: Sequence[set[int]], steps: range, waits: bool, epochs: int = 1
) -> list[int]:
    """Go through steps; list those after which this rank meets the others."""
    sync = SyncPoint(comm)
    found = []
    for epoch in range(epochs):
        for step in steps:
            if waits:  # as DDP does
                comm.barrier()
            at = step + epoch * steps.stop
            if sync.reached(at, asks=at in asks[comm.rank]):
                found.append(at)
        sync.meet(epoch * steps.stop + steps[-1])
    return found


@st.composite
def wishes(draw: st.DrawFn) -> list[set[int]]:
    """By rank, the steps in which it asks."""
    each = st.sets(st.integers(1, LAST), max_size=3)
    return draw(st.lists(each, min_size=1, max_size=4))


@given(wishes())
def test_ranks_in_step_meet_where_one_asks_or_after_the_next(asks: list[set[int]]) -> None:
    found = run_ranks(len(asks), met, asks, range(1, LAST + 1), True)
    assert found == found[:1] * len(asks)
    is_due = False
    for step in range(1, LAST + 1):
        asked = [step in each for each in asks]
        if step in found[0]:
            assert is_due or any(asked)
            is_due = False
        else:
            assert not is_due
            assert not all(asked)
            is_due = any(asked)


@given(wishes(), st.integers(1, 3))
def test_ranks_that_run_free_meet_after_the_same_steps(asks: list[set[int]], epochs: int) -> None:
    found = run_ranks(len(asks), met, asks, range(1, LAST + 1), False, epochs)
    assert found == found[:1] * len(asks)
    for step in found[0]:
        assert any(asked <= step for each in asks for asked in each)


def test_one_rank_meets_itself_at_once() -> None:
    assert met(SoloComm(), [{3, 4}], range(1, 8), False) == [3, 4]


def test_steps_may_be_any_that_grow() -> None:
    asks = [{-30}, {-30}, {-30, 40}]
    found = run_ranks(3, met, asks, range(-50, 60, 10), True)
    assert found in ([[-30, 40]] * 3, [[-30, 50]] * 3)


def test_all_that_ask_at_once_meet_at_once() -> None:
    asks = [{2, 5, 6}] * 3
    assert run_ranks(3, met, asks, range(1, 9), False) == [[2, 5, 6]] * 3


def test_a_rank_behind_goes_on_to_the_first_step_that_none_has_completed() -> None:
    is_ahead, has_asked = Event(), Event()

    def rank(comm: Comm) -> list[int]:
        sync = SyncPoint(comm)
        found = []
        for step in range(1, 10):
            if comm.rank == 0 and step == 6:  # five are completed
                is_ahead.set()
                has_asked.wait()
            asks = comm.rank == 1 and step == 2
            if asks:
                is_ahead.wait()
            if sync.reached(step, asks=asks):
                found.append(step)
            if asks:  # it knows by now, though the other is in the middle of a step
                has_asked.set()
        return found

    assert run_ranks(2, rank) == [[6], [6]]


def test_a_rank_may_ask_anew_before_the_others_have_met() -> None:
    """Those answer when they have: what they had completed before is of no use."""

    def rank(comm: Comm) -> list[int]:
        sync = SyncPoint(comm)
        member = sync._member
        found = []
        for step in range(1, 6):
            if comm.rank == 1 and step == 2:
                with member._changed:
                    member._changed.wait_for(lambda: member._held == 1)
            if sync.reached(step, asks=comm.rank == 0 and step in (1, 3)):
                found.append(step)
        sync.meet(5)
        return found

    both = run_ranks(2, rank)
    assert both[0] == both[1]
    assert both[0] in ([1, 3], [2, 3])


def test_nothing_is_sent_until_a_rank_asks() -> None:
    def rank(comm: LockstepComm) -> int:
        sync = SyncPoint(comm)
        calls = len(comm.calls)
        for step in range(1, 6):
            sync.reached(step)
        assert len(comm.calls) == calls
        comm.barrier()
        heard = sync._member._held
        comm.barrier()
        sync.reached(6, asks=True)
        assert sync._member._held == 0
        return heard

    assert run_ranks(3, rank) == [-1] * 3


def test_what_was_asked_for_is_void_where_all_meet_in_any_case() -> None:
    def rank(comm: Comm) -> list[object]:
        sync = SyncPoint(comm)
        found: list[object] = []
        for step in range(1, 4):
            comm.barrier()
            sync.reached(step, asks=comm.rank == 0 and step == 3)
        found.append(sync.meet(3, (comm.rank, -1)))
        found += [sync.reached(step) for step in (4, 5)]
        return found

    by_rank = [(0, -1), (1, -1)]
    assert run_ranks(2, rank) == [[by_rank, False, False]] * 2


def test_counting_may_begin_anew_where_all_meet() -> None:
    def rank(comm: Comm) -> list[bool]:
        sync = SyncPoint(comm)
        sync.reached(100)
        sync.meet(0)
        return [sync.reached(step, asks=step == 2) for step in (1, 2, 3)]

    assert run_ranks(3, rank) == [[False, True, False]] * 3


def test_ranks_that_a_failure_has_parted_find_together_where_all_meet() -> None:
    def rank(comm: Comm) -> list[bool]:
        sync = SyncPoint(comm)
        comm.barrier()
        if comm.rank == 0:  # the other fails before it is there
            assert sync.reached(1, asks=True)
        comm.barrier()
        sync.meet(0)
        return [sync.reached(step, asks=step == 2) for step in (1, 2, 3)]

    assert run_ranks(2, rank) == [[False, True, False]] * 2


# Errors.


@pytest.mark.parametrize("step", [3, 2, -1])
def test_steps_that_do_not_grow_are_refused(step: int) -> None:
    sync = SyncPoint(SoloComm())
    sync.reached(3)
    with pytest.raises(PlanError, match=f"`step` must be larger than .* got {step} after 3."):
        sync.reached(step)
    assert sync.reached(4, asks=True)


def test_a_step_is_a_number() -> None:
    with pytest.raises(PlanError, match="`step` must be an integer, got 'one'"):
        SyncPoint(SoloComm()).reached("one")  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [2**62, -(2**62) - 1, 2**70, -(2**63) - 1])
def test_a_step_must_fit_into_a_message(step: int) -> None:
    sync = SyncPoint(SoloComm())
    for call in (sync.reached, sync.meet):
        with pytest.raises(PlanError, match=rf"`step` must be in \[-2\^62, 2\^62\), got {step}\."):
            call(step)
    assert sync.reached(-(2**62), asks=True)
    assert sync.reached(2**62 - 1, asks=True)


@pytest.mark.parametrize("method", ["reached", "meet"])
def test_it_is_of_no_use_once_it_is_closed(method: str) -> None:
    sync = SyncPoint(SoloComm())
    sync.close()
    sync.close()
    with pytest.raises(PlanError, match=f"`{method}` must be called before `close`, got a call af"):
        getattr(sync, method)(1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_its_threads_leaves_none_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with closing(SyncPoint(SoloComm())) as sync:
        monkeypatch.setattr(_Hub, "_take", fail)
        with pytest.raises(CommError, match="rank 0 has ended"):
            sync.reached(1, asks=True)


def test_a_handler_that_raises_where_all_meet_parts_no_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As that of a worker which has died does; the rank may catch it and go on."""

    def handler(number: int, frame: object) -> None:
        raise RuntimeError("a worker died")

    sync = SyncPoint(SoloComm())
    before = signal.signal(signal.SIGCHLD, handler)
    gather = SoloComm.all_gather_ints

    def interrupted(comm: SoloComm, values: Sequence[int]) -> list[tuple[int, ...]]:
        signal.raise_signal(signal.SIGCHLD)
        return gather(comm, values)

    monkeypatch.setattr(SoloComm, "all_gather_ints", interrupted)
    try:
        with pytest.raises(RuntimeError, match="a worker died"):
            sync.meet(7)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert sync._member.round == 1
    assert sync.reached(8, asks=True)


@pytest.mark.parametrize("ended", range(3))
def test_a_rank_that_has_ended_is_named_where_ranks_are_to_meet(ended: int) -> None:
    both = Barrier(2)

    def rank(comm: Comm) -> str:
        sync = SyncPoint(comm)
        if comm.rank == ended:
            sync.close()
        comm.barrier()
        if comm.rank == ended:
            return ""
        assert not sync.reached(1)  # nobody asks
        both.wait()
        asks = comm.rank == (ended + 1) % 3
        if ended == 0 and not asks:
            return ""  # nobody is left who could ask it
        with closing(sync):
            with pytest.raises(CommError) as raised:
                next(step for step in count(2) if sync.reached(step, asks=asks and step == 5))
            if ended != 0:
                both.wait()  # until both know
        return str(raised.value)

    told_by_rank = [told for told in run_ranks(3, rank) if told]
    assert len(told_by_rank) == (1 if ended == 0 else 2)
    for told in told_by_rank:
        assert told.startswith(f"Ranks must all be there to stop together, but rank {ended} has en")


def test_it_closes_itself() -> None:
    def rank(comm: Comm) -> list[object]:
        sync = SyncPoint(comm)
        sync.reached(1)
        comm.barrier()
        end = sync._member._connection
        del sync
        return [end]  # the test fails if its threads are left

    assert len(run_ranks(2, rank)) == 2
