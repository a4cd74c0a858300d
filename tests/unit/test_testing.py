"""Ranks as threads: values are copies, and what would hang real ranks is an error at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplug.errors import CommError
from shardplug.testing import Call, LockstepComm, run_ranks

SOON_S = 5.0  # far below the 30 s after which a run is given up, far above what a switch takes


def test_results_come_by_rank_and_arguments_reach_every_rank() -> None:
    def body(comm: LockstepComm, factor: int, unit: str) -> str:
        return f"{comm.rank * factor} {unit} of {comm.world_size}"

    assert run_ranks(3, body, 10, "km") == ["0 km of 3", "10 km of 3", "20 km of 3"]


def test_every_rank_has_a_thread_of_its_own_and_none_is_left() -> None:
    def body(comm: LockstepComm) -> int:
        comm.barrier()
        return threading.get_ident()

    before = threading.enumerate()
    assert len({*run_ranks(4, body), threading.get_ident()}) == 5
    assert threading.enumerate() == before


@given(st.integers(1, 4), st.lists(st.sampled_from(["ints", "object", "barrier"]), max_size=8))
def test_any_sequence_of_collectives_ends_with_the_same_values_everywhere(
    world_size: int, sequence: list[str]
) -> None:
    def body(comm: LockstepComm) -> list[object]:
        seen: list[object] = []
        for turn, name in enumerate(sequence):
            if name == "ints":
                seen.append(comm.all_gather_ints((turn, comm.rank)))
            elif name == "object":
                seen.append(comm.all_gather_object({turn: comm.rank}))
            else:
                comm.barrier()
        return seen

    expected: list[object] = []
    for turn, name in enumerate(sequence):
        if name == "ints":
            expected.append([(turn, rank) for rank in range(world_size)])
        elif name == "object":
            expected.append([{turn: rank} for rank in range(world_size)])
    assert run_ranks(world_size, body) == [expected] * world_size


def test_an_object_from_another_rank_is_a_copy() -> None:
    def body(comm: LockstepComm) -> tuple[list[int], list[list[int]], list[int]]:
        mine = [comm.rank]
        gathered = comm.all_gather_object(mine)
        sent = comm.broadcast_object(mine, src=1)
        comm.barrier()
        for each in (*gathered, sent):
            each.append(99)  # seen on no other rank
        comm.barrier()
        return mine, gathered, sent

    zero, one = run_ranks(2, body)
    assert zero == ([0, 99], [[0, 99], [1, 99]], [1, 99])
    assert one == ([1, 99, 99], [[0, 99], [1, 99, 99]], [1, 99, 99])


def test_calls_record_name_and_bytes_sent() -> None:
    def body(comm: LockstepComm) -> list[Call]:
        comm.all_gather_ints((1, 2, 3))
        comm.barrier()
        comm.broadcast_object(b"x" * 1000, src=1)
        comm.all_gather_object(b"y" * 100)
        return comm.calls

    zero, one = run_ranks(2, body)
    names = ["all_gather_ints", "barrier", "broadcast_object", "all_gather_object"]
    assert [call.name for call in zero] == [call.name for call in one] == names
    assert zero[:3] == [("all_gather_ints", 24), ("barrier", 0), ("broadcast_object", 0)]
    assert 1000 < one[2].num_bytes < 1050
    assert 100 < one[3].num_bytes < 150


def test_a_failed_collective_is_not_recorded() -> None:
    def body(comm: LockstepComm) -> list[Call]:
        with pytest.raises(CommError):
            comm.barrier() if comm.rank else comm.all_gather_ints(())
        return comm.calls

    assert run_ranks(2, body) == [[], []]


def _gather_two(comm: LockstepComm) -> object:
    return comm.all_gather_ints((1, 2))


def _gather_three(comm: LockstepComm) -> object:
    return comm.all_gather_ints((1, 2, 3))


def _from_zero(comm: LockstepComm) -> object:
    return comm.broadcast_object("a", src=0)


def _from_one(comm: LockstepComm) -> object:
    return comm.broadcast_object("a", src=1)


@pytest.mark.parametrize(
    ("zero", "one", "called"),
    [
        (LockstepComm.barrier, _gather_two, ("barrier()", "all_gather_ints(2 values)")),
        (_gather_two, _gather_three, ("all_gather_ints(2 values)", "all_gather_ints(3 values)")),
        (_from_zero, _from_one, ("broadcast_object(src=0)", "broadcast_object(src=1)")),
    ],
)
def test_different_collectives_are_an_error_on_all_ranks_naming_each(
    zero: Callable[[LockstepComm], object],
    one: Callable[[LockstepComm], object],
    called: tuple[str, str],
) -> None:
    def body(comm: LockstepComm) -> str:
        with pytest.raises(CommError) as caught:
            (one if comm.rank == 1 else zero)(comm)
        return str(caught.value)

    started = time.perf_counter()
    messages = run_ranks(3, body)
    assert time.perf_counter() - started < SOON_S
    assert len(set(messages)) == 1
    assert messages[0].startswith("Every rank must be in the same collective, but rank ")
    # Rank 2 may or may not have come when the first two differed.
    assert f"rank 1 is in {called[1]}" in messages[0]
    assert called[0] in messages[0]


def test_a_rank_that_returns_early_is_an_error_on_those_that_wait() -> None:
    def body(comm: LockstepComm) -> None:
        if comm.rank == 0:
            comm.barrier()

    started = time.perf_counter()
    with pytest.raises(CommError, match=r"but rank 0 is in barrier\(\), rank 1 returned\."):
        run_ranks(2, body)
    assert time.perf_counter() - started < SOON_S


def test_a_rank_that_comes_when_another_has_returned_does_not_wait() -> None:
    def body(comm: LockstepComm) -> None:
        if comm.rank == 1:
            _wait_for_end_of_rank_0()
            comm.all_gather_ints((7,))

    with pytest.raises(CommError, match=r"rank 0 returned, rank 1 is in all_gather_ints\(1 val"):
        run_ranks(2, body)


def _wait_for_end_of_rank_0() -> None:
    # It was started first: if it is not in the list, it has ended.
    for thread in threading.enumerate():
        if thread.name == "shardplug-rank-0":
            thread.join()


def test_the_first_error_is_raised_and_the_others_are_its_notes() -> None:
    boom = ValueError("no such column")

    def body(comm: LockstepComm) -> None:
        if comm.rank == 1:
            raise boom
        comm.barrier()

    with pytest.raises(ValueError, match="no such column") as caught:
        run_ranks(2, body)
    assert caught.value is boom
    told = "rank 0 is in barrier(), rank 1 raised ValueError: no such column."
    assert _notes(caught.value) == [
        "Raised on rank 1 of 2.",
        f"Rank 0 raised CommError: Every rank must be in the same collective, but {told}",
    ]


def _notes(error: BaseException) -> list[str]:
    notes: list[str] = getattr(error, "__notes__", [])
    return notes


def test_notes_that_an_error_has_already_stay() -> None:
    def body(comm: LockstepComm) -> None:
        error = ValueError("no such column")
        error.__notes__ = ["while reading"]  # type: ignore[attr-defined]
        raise error

    with pytest.raises(ValueError, match="no such column") as caught:
        run_ranks(1, body)
    assert _notes(caught.value) == ["while reading", "Raised on rank 0 of 1."]


def test_what_ends_a_test_is_raised_too() -> None:
    def body(comm: LockstepComm) -> None:
        pytest.fail("on purpose")

    with pytest.raises(pytest.fail.Exception, match="on purpose"):
        run_ranks(2, body)


def test_a_failed_world_stays_failed() -> None:
    def body(comm: LockstepComm) -> tuple[str, str]:
        with pytest.raises(CommError) as first:
            comm.barrier() if comm.rank else comm.all_gather_ints(())
        with pytest.raises(CommError) as second:
            comm.barrier()
        return str(first.value), str(second.value)

    (first, second), other = run_ranks(2, body)
    assert first == second
    assert other == (first, second)


def test_two_threads_of_one_rank_in_collectives_are_an_error() -> None:
    is_done = threading.Event()

    def call(comm: LockstepComm, messages: list[str]) -> None:
        with pytest.raises(CommError) as caught:
            comm.barrier()
        messages.append(str(caught.value))

    def body(comm: LockstepComm) -> list[str]:
        messages: list[str] = []
        if comm.rank == 0:
            is_done.wait()
            return messages
        threads = [threading.Thread(target=call, args=(comm, messages)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        is_done.set()
        return messages

    _, messages = run_ranks(2, body)
    told = "Rank 1 called barrier() in one thread while another of its threads waited in barrier()."
    assert messages == [told, told]


def test_a_value_that_cannot_be_pickled_is_an_error_on_all_ranks() -> None:
    def body(comm: LockstepComm) -> list[str]:
        messages = []
        value: object = (lambda: None) if comm.rank == 1 else "fine"
        with pytest.raises(CommError) as caught:
            comm.all_gather_object(value)
        messages.append(str(caught.value))
        with pytest.raises(CommError) as caught:
            comm.broadcast_object(value, src=1)
        messages.append(str(caught.value))
        comm.barrier()  # they are still in step
        return messages

    zero, one = run_ranks(2, body)
    for message in zero:
        assert message == "Another rank could not go on: rank 1 failed with pickling its value"
    for message in one:
        assert message.startswith("`value` must be picklable, but ")
        assert "lambda" in message


def test_only_the_value_of_the_source_has_to_be_picklable() -> None:
    def body(comm: LockstepComm) -> str:
        return comm.broadcast_object("fine" if comm.rank == 0 else (lambda: None))  # type: ignore[return-value]

    assert run_ranks(2, body) == ["fine", "fine"]


@pytest.mark.parametrize("src", [-1, 2])
def test_a_source_that_is_not_there_is_an_error(src: int) -> None:
    def body(comm: LockstepComm) -> None:
        comm.broadcast_object("a", src=src)

    with pytest.raises(CommError, match=rf"^`src` must be in \[0, 2\), got {src}\."):
        run_ranks(2, body)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1])
def test_an_integer_that_needs_more_than_64_bits_is_an_error(value: int) -> None:
    def body(comm: LockstepComm) -> None:
        comm.all_gather_ints((0, value))

    with pytest.raises(CommError, match=rf"`values` must be in \[-2\^63, 2\^63\), got {value}\."):
        run_ranks(1, body)


def test_the_time_is_up_names_what_each_rank_does() -> None:
    release = threading.Event()

    def body(comm: LockstepComm) -> None:
        if comm.rank == 0:
            comm.barrier()
        elif comm.rank == 1:
            release.wait()

    try:
        with pytest.raises(
            CommError, match=r"All ranks must be done within 0.05 s, but "
        ) as caught:
            run_ranks(2, body, timeout_s=0.05)
        assert "rank 0 is in barrier(), rank 1 is busy elsewhere." in str(caught.value)
    finally:
        release.set()


def test_a_rank_that_has_got_its_error_waits_no_longer() -> None:
    release = threading.Event()

    def body(comm: LockstepComm) -> None:
        with pytest.raises(CommError):
            comm.barrier() if comm.rank else comm.all_gather_ints(())
        release.wait()

    try:
        with pytest.raises(CommError, match="rank 0 is busy elsewhere, rank 1 is busy elsewhere"):
            run_ranks(2, body, timeout_s=1.0)
    finally:
        release.set()


def test_an_error_counts_more_than_the_time_that_is_up() -> None:
    release = threading.Event()

    def body(comm: LockstepComm) -> None:
        if comm.rank == 0:
            raise ValueError("no such column")
        release.wait()

    try:
        with pytest.raises(ValueError, match="no such column"):
            run_ranks(2, body, timeout_s=0.05)
    finally:
        release.set()


def test_an_interrupt_ends_the_waiting_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = threading.Event()
    ended: list[str] = []

    def body(comm: LockstepComm) -> None:
        if comm.rank == 1:
            waiting.wait()
            return
        try:
            comm.barrier()
        except CommError as error:
            ended.append(str(error))

    def interrupt(self: object, timeout_s: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardplug.testing._World.wait_until_left", interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_ranks(2, body)
    finally:
        waiting.set()
    assert ended == ["The run was interrupted."]


@pytest.mark.parametrize("world_size", [0, -2])
def test_a_world_needs_a_rank(world_size: int) -> None:
    with pytest.raises(CommError, match=rf"`world_size` must be at least 1, got {world_size}\."):
        run_ranks(world_size, LockstepComm.barrier)


def test_a_collective_of_two_ranks_costs_well_under_a_millisecond() -> None:
    def body(comm: LockstepComm) -> None:
        for _ in range(300):
            comm.all_gather_ints((1, 2, 3))

    best_s = min(_seconds(body) for _ in range(5))
    assert best_s / 300 < 1e-3


def _seconds(body: Callable[[LockstepComm], None]) -> float:
    started = time.perf_counter()
    run_ranks(2, body)
    return time.perf_counter() - started
