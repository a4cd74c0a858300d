"""What comm.py adds to the collectives: one decision for all ranks, or one error on all."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from shardplug.comm import Comm, SoloComm, agree, agree_on, gather_facts, raise_if_failed
from shardplug.errors import CommError, PlanError
from shardplug.testing import Call, LockstepComm, run_ranks
from tests.interruptions import Interrupted, needs_signals, workers_that_raise


def test_no_cause_is_no_error() -> None:
    raise_if_failed([])
    raise_if_failed([None, None])


@pytest.mark.parametrize(
    ("causes", "told"),
    [
        (["OSError: disk full"], "rank 0 failed with OSError: disk full"),
        ([None, "OSError: disk full"], "rank 1 failed with OSError: disk full"),
        (["A: a", None, "B: b"], "rank 0 failed with A: a; rank 2 failed with B: b"),
    ],
)
def test_every_rank_with_a_cause_is_named(causes: list[str | None], told: str) -> None:
    with pytest.raises(CommError) as caught:
        raise_if_failed(causes)
    assert str(caught.value) == f"Another rank could not go on: {told}"


def test_agreeing_takes_one_collective_and_none_alone() -> None:
    def body(comm: LockstepComm) -> list[str]:
        agree(comm, lambda: comm.rank)
        return [call.name for call in comm.calls]

    assert run_ranks(1, body) == [[]]
    assert run_ranks(3, body) == [["all_gather_object"]] * 3


def test_a_world_of_one_raises_its_own_error() -> None:
    error = PlanError("`batch_size` must be at least 1, got 0.")

    def decide() -> int:
        raise error

    with pytest.raises(PlanError) as caught:
        agree(SoloComm(), decide)
    assert caught.value is error


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 2}, {0, 1, 2}])
def test_the_failing_ranks_raise_their_own_and_the_others_name_them(failing: set[int]) -> None:
    def body(comm: Comm) -> str:
        def decide() -> None:
            if comm.rank in failing:
                raise PlanError(f"bad size on {comm.rank}")

        with pytest.raises(PlanError if comm.rank in failing else CommError) as caught:
            agree(comm, decide)
        comm.barrier()  # nobody was left behind
        return str(caught.value)

    named = "; ".join(f"rank {r} failed with PlanError: bad size on {r}" for r in sorted(failing))
    for rank, message in enumerate(run_ranks(3, body)):
        if rank in failing:
            assert message == f"bad size on {rank}"
        else:
            assert message == f"Another rank could not go on: {named}"


def test_facts_cost_one_small_message_and_none_alone() -> None:
    def body(comm: LockstepComm) -> tuple[object, object, list[Call]]:
        result, by_rank = gather_facts(comm, lambda: ("mine", (comm.rank, 7)), num_facts=2)
        return result, by_rank, comm.calls

    assert run_ranks(1, body) == [("mine", [(0, 7)], [])]
    calls = [("all_gather_ints", 8 * 3)]
    assert run_ranks(3, body) == [("mine", [(0, 7), (1, 7), (2, 7)], calls)] * 3


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 2}, {0, 1, 2}])
def test_a_failure_to_find_facts_is_told_to_all_ranks(failing: set[int]) -> None:
    def body(comm: Comm) -> str:
        def decide() -> tuple[None, tuple[int, ...]]:
            if comm.rank in failing:
                raise PlanError(f"bad size on {comm.rank}")
            return None, (1, 2)

        with pytest.raises(PlanError if comm.rank in failing else CommError) as caught:
            gather_facts(comm, decide, num_facts=2)
        comm.barrier()  # nobody was left behind
        return str(caught.value)

    named = "; ".join(f"rank {r} failed with PlanError: bad size on {r}" for r in sorted(failing))
    for rank, message in enumerate(run_ranks(3, body)):
        if rank in failing:
            assert message == f"bad size on {rank}"
        else:
            assert message == f"Another rank could not go on: {named}"


def test_a_world_of_one_raises_what_kept_it_from_finding_facts() -> None:
    def decide() -> tuple[None, tuple[int, ...]]:
        raise PlanError("bad size")

    with pytest.raises(PlanError, match="bad size"):
        gather_facts(SoloComm(), decide, num_facts=1)


FACTS = {"epoch": "Call set_epoch on every rank.", "rank": None, "seed": "Pass data_seed."}


def _compare(comm: Comm, facts_by_rank: list[tuple[int, int, int]]) -> tuple[str, list[int]]:
    mine = facts_by_rank[comm.rank]
    result, agreed = agree_on(comm, lambda: (f"r{comm.rank}", mine), subject="a pass", facts=FACTS)
    return result, list(agreed)


def test_equal_facts_are_agreed_and_those_that_may_differ_are_rank_0s() -> None:
    assert run_ranks(3, _compare, [(4, 0, 9), (4, 1, 9), (4, 2, 9)]) == [
        ("r0", [4, 0, 9]),
        ("r1", [4, 0, 9]),
        ("r2", [4, 0, 9]),
    ]


@pytest.mark.parametrize(
    ("facts_by_rank", "told"),
    [
        ([(4, 0, 9), (5, 1, 9)], "epoch of a pass: rank 0 has 4, rank 1 has 5. Call set_epoch on"),
        ([(4, 0, 9), (4, 1, 8)], "seed of a pass: rank 0 has 9, rank 1 has 8. Pass data_seed."),
        ([(4, 0, 9), (4, 0, 9), (3, 0, 1)], "epoch of a pass: rank 0 has 4, rank 2 has 3. Call"),
    ],
)
def test_unequal_facts_are_an_error_on_all_ranks_that_says_what_to_do(
    facts_by_rank: list[tuple[int, int, int]], told: str
) -> None:
    def body(comm: Comm) -> str:
        with pytest.raises(CommError) as caught:
            _compare(comm, facts_by_rank)
        return str(caught.value)

    messages = run_ranks(len(facts_by_rank), body)
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"Ranks disagree on the {told}")


@pytest.fixture
def workers_raise() -> Iterator[None]:
    with workers_that_raise():
        yield


@needs_signals
@pytest.mark.usefixtures("workers_raise")
def test_a_worker_that_dies_in_a_collective_is_told_in_the_next() -> None:
    comm = Interrupted(1)
    late: list[Exception] = []
    decided = []

    def decide() -> tuple[str, tuple[int, ...]]:
        decided.append(len(comm.told))
        return "mine", (5,)

    assert gather_facts(comm, decide, num_facts=1, late=late) == ("mine", [(5,), (5,)])
    assert [str(error) for error in late] == ["a worker died"]
    with pytest.raises(RuntimeError, match="a worker died"):
        gather_facts(comm, decide, num_facts=1, late=late)
    assert decided == [0]
    assert comm.told == [(0, 5), (1, 0), "RuntimeError: a worker died"]
    assert late == []


@needs_signals
@pytest.mark.usefixtures("workers_raise")
@pytest.mark.parametrize(
    ("dies_in", "told"),
    [
        (0, [(1, 0), "RuntimeError: a worker died"]),  # in what is decided
        (1, [(0, 5)]),
    ],
)
def test_where_nothing_is_kept_it_is_raised_once_all_have_met(
    dies_in: int, told: list[object]
) -> None:
    comm = Interrupted(dies_in)

    def decide() -> tuple[None, tuple[int, ...]]:
        if dies_in == 0:
            signal.raise_signal(signal.SIGCHLD)
        return None, (5,)

    with pytest.raises(RuntimeError, match="a worker died"):
        gather_facts(comm, decide, num_facts=1)
    assert comm.told == told


@needs_signals
@pytest.mark.usefixtures("workers_raise")
def test_what_failed_first_is_told_whole_whatever_dies_then() -> None:
    comm = Interrupted(1, 2)
    late: list[Exception] = []

    def decide() -> tuple[None, tuple[int, ...]]:
        raise PlanError("bad size")

    with pytest.raises(PlanError, match="bad size"):
        gather_facts(comm, decide, num_facts=1, late=late)
    assert comm.told == [(1, 0), "PlanError: bad size"]
    assert len(late) == 1


@needs_signals
@pytest.mark.usefixtures("workers_raise")
def test_agreeing_is_not_interrupted_either() -> None:
    comm = Interrupted(1)
    with pytest.raises(RuntimeError, match="a worker died"):
        agree(comm, lambda: "mine")
    assert comm.told == [(None, "mine")]


class _Deaf(Interrupted):
    """Rank 0, whose second message does not get through."""

    def all_gather_object(self, value: Any) -> list[Any]:
        raise CommError("Connection closed by peer.")


@pytest.mark.parametrize("failure", [PlanError("bad size"), None])
def test_a_cause_that_cannot_be_told_is_raised_all_the_same(failure: Exception | None) -> None:
    class Both(_Deaf):
        def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]:
            return [tuple(values), (1, 0)]  # rank 1 has failed

    def decide() -> tuple[None, tuple[int, ...]]:
        if failure is not None:
            raise failure
        return None, (5,)

    with pytest.raises(type(failure or CommError()), match="bad size" if failure else "closed"):
        gather_facts(Both(), decide, num_facts=1)
