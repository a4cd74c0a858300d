"""Real ranks meet after the same step; one that has died is an error, soon."""

from __future__ import annotations

import os
import signal
import threading
import time
from itertools import count

import pytest
import torch
import torch.distributed as dist

from shardplug import Comm, CommError, PlanError, SyncPoint
from tests.launch import RankError, run_processes

SOON_S = 10.0


def _train(comm: Comm, asks_at: dict[int, int], num_steps: int) -> list[int]:
    sync = SyncPoint(comm)
    found = []
    for step in range(1, num_steps + 1):
        dist.all_reduce(torch.ones(1))
        if sync.reached(step, asks=asks_at.get(comm.rank) == step):
            found.append(step)
    sync.meet(num_steps)
    return found


@pytest.mark.parametrize("asks", range(3))
def test_ranks_meet_where_one_asks_or_after_the_next_step(asks: int) -> None:
    found = run_processes(3, _train, {asks: 5}, 20)
    assert found in ([[5]] * 3, [[6]] * 3)
    assert run_processes(3, _train, dict.fromkeys(range(3), 5), 20) == [[5]] * 3


def _die(comm: Comm) -> None:
    """The dead one has a child, as a loader with workers does, which lives on."""
    sync = SyncPoint(comm)
    ended, end = os.pipe()
    if comm.rank == 1:
        if os.fork() == 0:
            os.close(end)
            os.read(ended, 1)  # until the other rank ends
            os._exit(0)
        os._exit(3)
    started = time.perf_counter()
    with pytest.raises(CommError, match="to stop together, but rank 1 has ended"):
        # Until it is dead its thread answers.
        next(step for step in count(1) if not sync.reached(step, asks=True))
    assert time.perf_counter() - started < SOON_S


def test_a_rank_that_died_is_named_soon() -> None:
    with pytest.raises(RankError, match="Rank 1 ended with exit code 3") as died:
        run_processes(2, _die)
    assert "Rank 0" not in str(died.value)  # it got its error, in time


def _lose_a_worker(comm: Comm) -> int:
    def handler(number: int, frame: object) -> None:
        raise RuntimeError("a worker died")

    signal.signal(signal.SIGCHLD, handler)
    sync = SyncPoint(comm)
    if comm.rank == 0:
        sync.reached(1)
    comm.barrier()  # so that they meet after a later step than the first
    if comm.rank == 1:
        say = sync._member._say

        def interrupted(what: int, number: int, value: int) -> None:
            say(what, number, value)
            if threading.current_thread() is threading.main_thread():
                signal.raise_signal(signal.SIGCHLD)

        sync._member._say = interrupted  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="a worker died"):
            sync.reached(1, asks=True)
    return next(step for step in count(2) if sync.reached(step))


def test_a_signal_that_raises_comes_once_it_is_known_where_ranks_meet() -> None:
    first, second = run_processes(2, _lose_a_worker)
    assert first == second > 1


def _ask_in_a_child(comm: Comm) -> int:
    sync = SyncPoint(comm)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            sync.reached(1, asks=True)
        except PlanError as error:
            status = 0 if "process that made the SyncPoint" in str(error) else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    comm.barrier()
    assert sync.reached(1, asks=True)  # of no consequence here
    return status


def test_a_child_that_was_forked_is_told_that_it_cannot_ask() -> None:
    assert run_processes(2, _ask_in_a_child) == [0, 0]
