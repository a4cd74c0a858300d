"""One contract for every comm: alone, in lockstep, and over real gloo ranks."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardplug import comm_torch
from shardplug.comm import Comm, SoloComm, agree
from shardplug.comm_torch import TorchComm, current_comm, mesh_coordinate, start_process_group
from shardplug.errors import CommError, PlanError
from shardplug.testing import run_ranks
from tests.launch import RankError, run_processes

Check = Callable[[Comm], None]

# Few ranks send what fits into 16 KiB at once; a pickle adds some bytes of its own.
SIZES = (0, 2000, *range(16_320, 16_370), 100_000)
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
    for size, factor in itertools.product(SIZES, (0, 1)):
        # All ranks the same size, and every rank another: some fit into one message, some do not.
        mine = bytes([comm.rank]) * (size * (1 + comm.rank * factor))
        expected = [bytes([rank]) * (size * (1 + rank * factor)) for rank in range(comm.world_size)]
        assert comm.all_gather_object(mine) == expected


def broadcasts_objects_of_any_size(comm: Comm) -> None:
    src = comm.world_size - 1
    for size in SIZES:
        assert comm.broadcast_object(bytes([comm.rank]) * size, src=src) == bytes([src]) * size


def gathers_any_number_of_integers(comm: Comm) -> None:
    for count in (1, 64, 2043, 2044, 2045, 2046, 5000):
        mine = range(comm.rank, comm.rank + count)
        expected = [tuple(range(rank, rank + count)) for rank in range(comm.world_size)]
        assert comm.all_gather_ints(mine) == expected


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
    broadcasts_objects_of_any_size,
    gathers_any_number_of_integers,
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


def _barrier(comm: Comm) -> object:
    comm.barrier()
    return None


def _two_integers(comm: Comm) -> object:
    return comm.all_gather_ints((1, 2))


def _three_integers(comm: Comm) -> object:
    return comm.all_gather_ints((1, 2, 3))


def _an_object(comm: Comm) -> object:
    return comm.all_gather_object("a")


def _from_0(comm: Comm) -> object:
    return comm.broadcast_object("a", src=0)


def _from_1(comm: Comm) -> object:
    return comm.broadcast_object("a", src=1)


CALLS = [_barrier, _two_integers, _three_integers, _an_object, _from_0, _from_1]
NAMES = [
    "barrier()",
    "all_gather_ints(2 values)",
    "all_gather_ints(3 values)",
    "all_gather_object()",
    "broadcast_object(src=0)",
    "broadcast_object(src=1)",
]
PAIRS = list(itertools.permutations(range(len(CALLS)), 2))


def meet_differently(comm: Comm, pairs: list[tuple[int, int]]) -> list[str]:
    messages = []
    for pair in pairs:
        with pytest.raises(CommError) as caught:
            CALLS[pair[comm.rank]](comm)
        messages.append(str(caught.value))
    return messages


def _told(pair: tuple[int, int]) -> str:
    doing = f"rank 0 is in {NAMES[pair[0]]}, rank 1 is in {NAMES[pair[1]]}"
    return f"Every rank must be in the same collective, but {doing}."


@pytest.mark.parametrize("pair", PAIRS)
def test_in_one_process_ranks_in_different_collectives_all_get_an_error(
    pair: tuple[int, int],
) -> None:
    assert run_ranks(2, meet_differently, [pair]) == [[_told(pair)]] * 2


def test_real_ranks_in_different_collectives_all_get_an_error() -> None:
    expected = [_told(pair) for pair in PAIRS]
    assert run_processes(2, meet_differently, PAIRS) == [expected] * 2


def _mix_with_collectives_of_the_user(comm: Comm) -> list[object]:
    seen: list[object] = []
    for turn in range(3):
        mine = torch.tensor([comm.rank + turn])
        dist.all_reduce(mine)
        seen.append(mine.item())
        seen.append(comm.all_gather_ints((comm.rank, turn)))
        work = dist.all_reduce(mine, async_op=True)
        seen.append(comm.broadcast_object(f"from {comm.rank}", src=1))
        assert work is not None
        work.wait()
        seen.append(mine.item())
    return seen


def test_collectives_of_the_user_go_between_ours() -> None:
    expected: list[object] = []
    for turn in range(3):
        total = 1 + 2 * turn
        expected += [total, [(0, turn), (1, turn)], "from 1", 2 * total]
    assert run_processes(2, _mix_with_collectives_of_the_user) == [expected] * 2


def _lose_a_worker(comm: Comm) -> list[object]:
    """Rank 1 is told that a worker has died, before and after the ranks meet."""

    def handler(number: int, frame: object) -> None:
        raise RuntimeError("a worker died")

    meet = dist.all_gather

    def interrupted(*args: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGCHLD)
        meet(*args, **options)
        signal.raise_signal(signal.SIGCHLD)

    if comm.rank == 1:
        signal.signal(signal.SIGCHLD, handler)
        dist.all_gather = interrupted
    calls: list[Callable[[], object]] = [
        lambda: comm.all_gather_ints((comm.rank,)),
        lambda: comm.all_gather_object("x" * 100_000 * comm.rank),
        lambda: comm.broadcast_object("x", src=0),
        comm.barrier,
    ]
    seen: list[object] = []
    for call in calls:
        try:
            seen.append(call())
        except RuntimeError as error:
            seen.append(str(error))
    return seen


@pytest.mark.skipif(not hasattr(signal, "SIGCHLD"), reason="needs SIGCHLD")
def test_a_worker_that_dies_in_a_collective_is_an_error_after_it() -> None:
    first, second = run_processes(2, _lose_a_worker)
    assert first == [[(0,), (1,)], ["", "x" * 100_000], "x", None]
    assert second == ["a worker died"] * 4


def _talk_in_a_group(comm: Comm) -> object:
    group = dist.new_group([1, 2])
    if comm.rank == 0:
        with pytest.raises(CommError) as caught:
            TorchComm(group)
        return str(caught.value)
    inner = TorchComm(group)
    assert (inner.rank, inner.world_size) == (comm.rank - 1, 2)
    return inner.all_gather_ints((comm.rank,)), inner.broadcast_object(
        "x" * comm.rank * 1000, src=1
    )


def test_a_group_has_ranks_of_its_own() -> None:
    refused, *members = run_processes(3, _talk_in_a_group)
    assert refused == (
        "`group` must have this process as a member, but rank 0 of the default group is not in it."
    )
    assert members == [([(1,), (2,)], "x" * 2000)] * 2


def _wait_for_a_rank_that(ends: str, comm: Comm) -> None:
    if comm.rank == 1:
        if ends == "raises":
            raise PlanError("`batch_size` must be at least 1, got 0.")
        os._exit(3)
    started = time.perf_counter()
    with pytest.raises(CommError) as caught:
        comm.all_gather_ints((1,))
    assert time.perf_counter() - started < SOON_S
    message = str(caught.value)
    assert message.startswith("all_gather_ints(1 values) failed on rank 0 of 2: ")
    assert message.endswith("one may have ended, or be in a collective of another kind.")
    assert isinstance(caught.value.__cause__, RuntimeError)


def _wait_for_a_rank_that_raises(comm: Comm) -> None:
    _wait_for_a_rank_that("raises", comm)


def _wait_for_a_rank_that_dies(comm: Comm) -> None:
    _wait_for_a_rank_that("dies", comm)


def test_a_rank_that_ends_is_an_error_on_those_that_wait() -> None:
    with pytest.raises(PlanError, match="`batch_size` must be at least 1") as raised:
        run_processes(2, _wait_for_a_rank_that_raises)
    with pytest.raises(RankError, match="Rank 1 ended with exit code 3") as died:
        run_processes(2, _wait_for_a_rank_that_dies)
    for told in (str(raised.value.__cause__), str(died.value)):
        assert "Rank 0" not in told  # it got its error, in time


def _find_on_a_mesh(comm: Comm) -> list[object]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    bare = init_device_mesh("cpu", (4,))
    small = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    with pytest.raises(PlanError) as unnamed:
        mesh_coordinate(bare)
    if comm.rank < 2:
        return [mesh_coordinate(mesh), str(unnamed.value), mesh_coordinate(small)]
    with pytest.raises(PlanError) as outside:
        mesh_coordinate(small)
    return [mesh_coordinate(mesh), str(unnamed.value), str(outside.value)]


def test_a_mesh_is_read_axis_by_axis() -> None:
    by_rank = run_processes(4, _find_on_a_mesh)
    for rank, (coordinate, unnamed, small) in enumerate(by_rank):
        assert coordinate == (("tp", "dp"), (2, 2), (rank // 2, rank % 2))
        assert unnamed == (
            "`torch_device_mesh` must have named axes, got one of shape (4,) without names. "
            "Give init_device_mesh their names, mesh_dim_names=(...)."
        )
        if rank < 2:
            assert small == (("dp",), (2,), (rank,))
        else:
            assert small == (
                f"`torch_device_mesh` must have this process on it, but rank {rank} is not on the "
                "mesh of shape (2,) with axes ('dp',)."
            )


def test_without_a_group_the_comm_is_a_world_of_one() -> None:
    assert isinstance(current_comm(), SoloComm)
    with pytest.raises(CommError, match="`group` must be a process group that exists, got none"):
        TorchComm()


def _start_and_end(comm: Comm) -> list[object]:
    assert isinstance(comm, SoloComm)
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    started = [start_process_group(timeout_s=20.0), start_process_group()]
    found = current_comm()
    assert isinstance(found, TorchComm)
    seen = [*started, found.all_gather_ints((5,)), dist.get_backend()]
    for _ in range(2):  # what the interpreter does at its end, here while coverage still counts
        comm_torch._end_process_group()
        assert not dist.is_initialized()
    return seen


def test_the_group_that_a_launcher_asks_for_is_started_once() -> None:
    assert run_processes(1, _start_and_end, has_group=False) == [[True, False, [(5,)], "gloo"]]
