"""One contract for every comm: alone, in lockstep, and over real gloo ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardplug.comm import Comm, SoloComm, agree
from shardplug.comm_torch import TorchComm
from shardplug.errors import CommError, PlanError
from shardplug.testing import run_ranks
from tests.launch import run_processes

Check = Callable[[Comm], None]

SOON_S = 10.0  # far below the time limits of a collective and of run_processes


class Unpicklable:
    """Refuses to be pickled, as an open file would."""

    def __reduce__(self) -> str:
        raise OSError("the disk is on fire")


class Loud:
    """Says when it is unpickled."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Loud) and other.rank == self.rank

    __hash__ = None  # type: ignore[assignment]


def is_a_comm(comm: Comm) -> None:
    assert isinstance(comm, Comm)
    assert 0 <= comm.rank < comm.world_size


def gathers_integers_by_rank(comm: Comm) -> None:
    mine = (comm.rank, -1, 2**63 - 1, -(2**63))
    expected = [(rank, *mine[1:]) for rank in range(comm.world_size)]
    assert comm.all_gather_ints(mine) == expected
    assert comm.all_gather_ints(list(mine)) == expected


def gathers_no_integers(comm: Comm) -> None:
    assert comm.all_gather_ints(()) == [()] * comm.world_size


def gives_plain_integers(comm: Comm) -> None:
    for row in comm.all_gather_ints((True, 3)):
        assert row == (1, 3)


def gathers_objects_by_rank(comm: Comm) -> None:
    mine = {"rank": comm.rank, "loud": Loud(comm.rank), "none": None}
    assert comm.all_gather_object(mine) == [
        {"rank": rank, "loud": Loud(rank), "none": None} for rank in range(comm.world_size)
    ]


def gathers_objects_of_any_size(comm: Comm) -> None:
    for size in (0, 900, 1000, 1001, 1002, 1003, 1004, 1005, 1016, 1024, 100_000):
        # Every rank another size: some fit into one message and some do not.
        mine = bytes([comm.rank]) * (size * (comm.rank + 1))
        expected = [bytes([rank]) * (size * (rank + 1)) for rank in range(comm.world_size)]
        assert comm.all_gather_object(mine) == expected


def keeps_its_own_object(comm: Comm) -> None:
    mine = [comm.rank]
    assert comm.all_gather_object(mine)[comm.rank] is mine
    assert comm.broadcast_object(mine, src=comm.world_size - 1) == [comm.world_size - 1]


def broadcasts_from_every_rank(comm: Comm) -> None:
    for src in range(comm.world_size):
        for value in ({"src": src}, None, "x" * 5000, ""):
            sent = value if comm.rank == src else "ignored"
            assert comm.broadcast_object(sent, src=src) == value


def broadcasts_from_rank_0_by_default(comm: Comm) -> None:
    assert comm.broadcast_object(f"rank {comm.rank}") == "rank 0"


def ignores_what_other_ranks_broadcast(comm: Comm) -> None:
    value = "fine" if comm.rank == 0 else Unpicklable()
    assert comm.broadcast_object(value) == "fine"


def refuses_a_source_that_is_not_there(comm: Comm) -> None:
    for src in (-1, comm.world_size):
        with pytest.raises(CommError) as caught:
            comm.broadcast_object(0, src=src)
        assert str(caught.value) == f"`src` must be in [0, {comm.world_size}), got {src}."


def barrier_lets_all_pass(comm: Comm) -> None:
    for _ in range(3):
        comm.barrier()


def agrees(comm: Comm) -> None:
    assert agree(comm, lambda: comm.rank * 10) == [rank * 10 for rank in range(comm.world_size)]


def tells_all_ranks_what_failed_on_one(comm: Comm) -> None:
    last = comm.world_size - 1

    def decide() -> int:
        if comm.rank == last:
            raise PlanError("`batch_size` must be at least 1, got 0.")
        return comm.rank

    with pytest.raises(PlanError if comm.rank == last else CommError) as caught:
        agree(comm, decide)
    if comm.rank != last:
        assert str(caught.value) == (
            f"Another rank could not go on: rank {last} failed with PlanError: `batch_size` must "
            "be at least 1, got 0."
        )


CONTRACT: list[Check] = [
    is_a_comm,
    gathers_integers_by_rank,
    gathers_no_integers,
    gives_plain_integers,
    gathers_objects_by_rank,
    gathers_objects_of_any_size,
    keeps_its_own_object,
    broadcasts_from_every_rank,
    broadcasts_from_rank_0_by_default,
    ignores_what_other_ranks_broadcast,
    refuses_a_source_that_is_not_there,
    barrier_lets_all_pass,
    agrees,
    tells_all_ranks_what_failed_on_one,
]


def tells_all_ranks_that_a_value_cannot_be_pickled(comm: Comm) -> None:
    value: object = Unpicklable() if comm.rank == 1 else "fine"
    calls: list[Callable[[], object]] = [
        lambda: comm.all_gather_object(value),
        lambda: comm.broadcast_object(value, src=1),
    ]
    for call in calls:
        with pytest.raises(CommError) as caught:
            call()
        if comm.rank == 1:
            assert str(caught.value) == "`value` must be picklable, but the disk is on fire"
            assert isinstance(caught.value.__cause__, OSError)
        else:
            told = "Another rank could not go on: rank 1 failed with pickling its value"
            assert str(caught.value) == told
        comm.barrier()  # still in step


def gives_other_ranks_copies(comm: Comm) -> None:
    mine = [comm.rank]
    gathered = comm.all_gather_object(mine)
    sent = comm.broadcast_object(mine, src=0)
    comm.barrier()
    gathered[comm.rank].append(99)
    comm.barrier()
    assert gathered == [
        [rank, 99] if rank == comm.rank else [rank] for rank in range(len(gathered))
    ]
    assert sent == ([0, 99] if comm.rank == 0 else [0])


def refuses_integers_that_do_not_fit_before_it_talks(comm: Comm) -> None:
    for value in (2**63, -(2**63) - 1):
        with pytest.raises(CommError) as caught:
            comm.all_gather_ints((0, value))
        assert str(caught.value) == f"`values` must be in [-2^63, 2^63), got {value}."
    with pytest.raises(TypeError, match="float"):
        comm.all_gather_ints((1.5,))  # type: ignore[arg-type]


BETWEEN_RANKS: list[Check] = [
    tells_all_ranks_that_a_value_cannot_be_pickled,
    gives_other_ranks_copies,
    refuses_integers_that_do_not_fit_before_it_talks,
]


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_a_world_of_one_keeps_the_contract(check: Check) -> None:
    check(SoloComm())


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_ranks_in_one_process_keep_the_contract(check: Check, world_size: int) -> None:
    run_ranks(world_size, check)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("check", BETWEEN_RANKS, ids=lambda check: check.__name__)
def test_ranks_in_one_process_keep_what_needs_two(check: Check, world_size: int) -> None:
    run_ranks(world_size, check)


def _keep_the_contract(comm: Comm) -> list[str]:
    assert isinstance(comm, TorchComm)
    checks = CONTRACT + (BETWEEN_RANKS if comm.world_size > 1 else [])
    for check in checks:
        check(comm)
    return [check.__name__ for check in checks]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_real_ranks_keep_the_contract(world_size: int) -> None:
    by_rank = run_processes(world_size, _keep_the_contract)
    assert len(by_rank) == world_size
    assert set(by_rank[0]) >= {check.__name__ for check in CONTRACT}
