"""What comm.py adds to the collectives: one decision for all ranks, or one error on all."""

from __future__ import annotations

import pytest

from shardplug.comm import Comm, SoloComm, agree, raise_if_failed
from shardplug.errors import CommError, PlanError
from shardplug.testing import LockstepComm, run_ranks


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
