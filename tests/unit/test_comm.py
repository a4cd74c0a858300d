"""What comm.py adds to the collectives: one decision for all ranks, or one error on all."""

from __future__ import annotations

import pytest

from shardplug.comm import Comm, SoloComm, agree, agree_on, gather_facts, raise_if_failed
from shardplug.errors import CommError, PlanError
from shardplug.testing import Call, LockstepComm, run_ranks


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
