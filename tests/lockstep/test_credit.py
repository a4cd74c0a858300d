"""`in_step` beside brute force: the same steps on every rank, over parts of any length."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardplug import CommError, SoloComm
from shardplug.comm import Comm
from shardplug.credit import AHEAD, Arrival, in_step, mark_last
from shardplug.plan.split import Tail
from shardplug.testing import LockstepComm, run_ranks
from tests.interruptions import Interrupted, needs_signals, workers_that_raise

ROWS = 3


def arrivals(part: range, *, fails_at: int | None = None) -> Iterator[Arrival]:
    """Batches that are numbers: that of the part, and their place in it."""
    for place, number in enumerate(part):
        if place == fails_at:
            raise ValueError(f"no batch {place}")
        yield Arrival(number, ROWS, ROWS - 1, ROWS * (place + 1))


def parts_of(lengths: list[int]) -> list[range]:
    starts = count(0, 1000)
    return [range(start, start + size) for start, size in zip(starts, lengths, strict=False)]


def taken(comm: Comm, lengths: list[int], tail: Tail, *, is_cut: bool = True) -> list[Arrival]:
    part = parts_of(lengths)[comm.rank] if is_cut else range(lengths[comm.rank])
    return list(in_step(arrivals(part), comm, tail=tail, is_cut=is_cut))


def due_steps(lengths: list[int], tail: Tail) -> int:
    return min(lengths) if tail is Tail.DROP else max(lengths)


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=4),
    st.sampled_from([Tail.PAD, Tail.DROP]),
)
@example([0, 0, 0], Tail.PAD)
@example([0, 5], Tail.PAD)
@example([5, 0], Tail.DROP)
@example([AHEAD, AHEAD + 1], Tail.PAD)
@example([1, 1], Tail.DROP)
@example([60, 1, 60, 2], Tail.DROP)
def test_all_ranks_take_the_steps_that_the_lengths_make(lengths: list[int], tail: Tail) -> None:
    by_rank = run_ranks(len(lengths), taken, lengths, tail)
    steps = due_steps(lengths, tail)
    for part, got in zip(parts_of(lengths), by_rank, strict=True):
        assert len(got) == steps
        own = list(part[:steps])
        assert [each.batch for each in got[: len(own)]] == own
        assert all(each.valid_rows == ROWS - 1 for each in got[: len(own)])
        assert [each.consumed for each in got[: len(own)]] == [
            ROWS * (place + 1) for place in range(len(own))
        ]
        repeated = got[len(own) :]
        assert all((each.num_rows, each.valid_rows) == (ROWS, 0) for each in repeated)
        if own:
            assert {each.batch for each in repeated} <= {own[-1]}
            assert {each.consumed for each in repeated} <= {ROWS * len(own)}
        else:
            # Lent by the first rank that has one; nothing of it counts as consumed here.
            lender = next((size for size in parts_of(lengths) if size), range(0))
            assert {each.batch for each in repeated} <= set(lender)
            assert {each.consumed for each in repeated} <= {0}
        flags = [each.is_last for each in got]
        assert flags == [False] * (steps - 1) + [True] * min(steps, 1)


@given(st.integers(0, 60), st.integers(1, 4), st.sampled_from(list(Tail)))
def test_ranks_that_read_the_same_take_all_of_it(length: int, world_size: int, tail: Tail) -> None:
    def all_of_it(comm: LockstepComm) -> list[tuple[int, bool]]:
        got = taken(comm, [length] * world_size, tail, is_cut=False)
        return [(each.batch, each.is_last) for each in got]

    due = [(number, number == length - 1) for number in range(length)]
    assert run_ranks(world_size, all_of_it) == [due] * world_size


@pytest.mark.parametrize(
    ("lengths", "ended"),
    [([3, 4], [0]), ([4, 3, 3], [1, 2]), ([40, 0], [1]), ([16, 17], [0]), ([20, 19, 20], [1])],
)
def test_a_stream_that_ends_on_some_ranks_only_is_an_error_on_all(
    lengths: list[int], ended: list[int]
) -> None:
    def message(comm: LockstepComm) -> str:
        with pytest.raises(CommError) as raised:
            taken(comm, lengths, Tail.PAD, is_cut=False)
        return str(raised.value)

    assert run_ranks(len(lengths), message) == [
        f"Ranks disagree on the end of the stream: it has ended on ranks {ended} but goes on on "
        "the others. Give every rank the same stream, or pass already_sharded=True if each reads a "
        "part of its own."
    ] * len(lengths)


@pytest.mark.parametrize("fails_at", [0, 1, 5, 30])
@pytest.mark.parametrize("tail", [Tail.PAD, Tail.DROP])
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_failure_on_one_rank_is_an_error_on_all(fails_at: int, tail: Tail, is_cut: bool) -> None:
    def outcome(comm: LockstepComm) -> str:
        part = arrivals(range(40), fails_at=fails_at if comm.rank == 1 else None)
        error = ValueError if comm.rank == 1 else CommError
        with pytest.raises(error) as raised:
            list(in_step(part, comm, tail=tail, is_cut=is_cut))
        return str(raised.value)

    told = f"Another rank could not go on: rank 1 failed with ValueError: no batch {fails_at}"
    assert run_ranks(3, outcome) == [told, f"no batch {fails_at}", told]


@pytest.mark.parametrize("is_cut", [False, True])
def test_one_message_buys_up_to_sixteen_steps(is_cut: bool) -> None:
    def calls(comm: LockstepComm) -> list[str]:
        taken(comm, [160, 160], Tail.PAD, is_cut=is_cut)
        return [call.name for call in comm.calls]

    # 1 + 2 + 4 + 8 + 9 * 16 = 159 steps for 13 messages, and one for the step that is left.
    assert run_ranks(2, calls) == [["all_gather_ints"] * 14] * 2


def test_no_more_is_read_than_may_go_out_and_one() -> None:
    def num_read(comm: LockstepComm) -> list[int]:
        read = 0

        def counted() -> Iterator[Arrival]:
            nonlocal read
            for arrival in arrivals(range(100)):
                read += 1
                yield arrival

        steps = in_step(counted(), comm, tail=Tail.PAD, is_cut=True)
        counts = []
        for _ in range(4):
            next(steps)
            counts.append(read)
        return counts

    assert run_ranks(2, num_read) == [[2, 4, 4, 8]] * 2


def test_a_rank_that_has_nothing_is_lent_a_batch_once() -> None:
    def calls(comm: LockstepComm) -> list[str]:
        taken(comm, [0, 20], Tail.PAD)
        return [call.name for call in comm.calls if call.name != "all_gather_ints"]

    assert run_ranks(2, calls) == [["broadcast_object"]] * 2


def test_alone_everything_goes_out() -> None:
    got = taken(SoloComm(), [5], Tail.PAD)
    assert [(each.batch, each.is_last) for each in got] == [
        (0, False), (1, False), (2, False), (3, False), (4, True),
    ]  # fmt: skip


@pytest.mark.parametrize("length", [0, 1, 2, 5])
def test_the_last_arrival_is_marked(length: int) -> None:
    marked = [each.is_last for each in mark_last(arrivals(range(length)))]
    assert marked == [False] * (length - 1) + [True] * min(length, 1)


def test_an_arrival_goes_out_when_the_next_one_is_there() -> None:
    source = arrivals(range(3))
    assert next(mark_last(source)).batch == 0
    assert next(source).batch == 2


@pytest.fixture
def workers_raise() -> Iterator[None]:
    with workers_that_raise():
        yield


def _one_by_one(num_batches: int) -> Iterator[Arrival]:
    return mark_last(Arrival(number, 1, 1, number + 1) for number in range(num_batches))


def _until_a_worker_died(comm: Interrupted, num_batches: int) -> list[Any]:
    seen: list[Any] = []
    steps = in_step(_one_by_one(num_batches), comm, tail=Tail.PAD, is_cut=True)
    with pytest.raises(RuntimeError, match="a worker died"):
        seen.extend(arrival.batch for arrival in steps)  # keeps what came before the error
    return seen


@needs_signals
@pytest.mark.usefixtures("workers_raise")
def test_a_worker_that_dies_while_ranks_meet_is_told_when_they_meet_again() -> None:
    comm = Interrupted(1)
    assert _until_a_worker_died(comm, 9) == [0]
    # One step may be taken; then this rank has failed, and says of what.
    assert comm.told == [(0, 1, 0, 1), (1, 0, 0, 0), "RuntimeError: a worker died"]


@needs_signals
@pytest.mark.usefixtures("workers_raise")
def test_a_worker_that_dies_when_all_has_been_read_is_an_error_at_the_end() -> None:
    comm = Interrupted(1)
    assert _until_a_worker_died(comm, 1) == [0]
    assert comm.told == [(0, 1, 1, 1)]
