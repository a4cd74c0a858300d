"""The dispatcher on real ranks: workers, ranks that die, and other collectives beside it."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from shardplug import Comm, CommError, ShardEngine, prepare_data_loader
from tests.launch import run_processes
from tests.laws import RankRun, ids_of, loader_rank
from tests.streams import Ids, SizedSplitIds, SplitIds

SOON_S = 10.0
"""By then all ranks know; two seconds where nothing else runs on the machine."""


class Numbers(Dataset[Any]):
    """Sample i is i; whoever reads ``dies_at`` is killed, ``fails_at`` is an error."""

    def __init__(self, num_samples: int, *, dies_at: int = -1, fails_at: int = -1) -> None:
        self.num_samples = num_samples
        self.dies_at = dies_at
        self.fails_at = fails_at

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, at: int) -> int:
        if at == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if at == self.fails_at:
            raise KeyError(f"no {at}")
        return at


def workers(num_workers: int, **options: Any) -> dict[str, Any]:
    if not num_workers:
        return {}
    return {"num_workers": num_workers, "multiprocessing_context": "fork", **options}


def loaded(comm: Comm, data: Any, num_workers: int, options: dict[str, Any]) -> list[RankRun]:
    """Read two epochs."""
    kept = {"persistent_workers": True} if num_workers else {}
    loader = DataLoader(data, 2, **workers(num_workers, **kept))
    prepared = prepare_data_loader(loader, **options)
    return [loader_rank(prepared) for _ in range(2)]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("data", [Numbers(21), Ids(21), SplitIds(21), SizedSplitIds(24)])
def test_every_rank_sees_what_its_own_loader_would_have_read(data: Any, num_workers: int) -> None:
    seen = [
        run_processes(2, loaded, data, num_workers, {"dispatch_batches": is_dispatched})
        for is_dispatched in (True, False)
    ]
    assert seen[0] == seen[1]


def on_reader_only(comm: Comm, num_workers: int) -> Any:
    """Read data that only the reader has, with a collective of the user's in each step."""
    engine = ShardEngine(dispatch_batches=True)
    data: Any = Numbers(40) if comm.rank == 0 else None
    loader = engine.prepare(DataLoader(data, 2, **workers(num_workers)))
    seen = []
    for batch in loader:
        total = batch.sum()
        dist.all_reduce(total)
        seen.append((ids_of(batch), int(total)))
    return seen


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_users_collectives_run_beside_it(num_workers: int) -> None:
    for rank, seen in enumerate(run_processes(2, on_reader_only, num_workers)):
        for step, (rows, total) in enumerate(seen):
            first = 4 * step
            assert rows == (first + 2 * rank, first + 2 * rank + 1)
            assert total == 4 * first + 6
        assert len(seen) == 10


# What goes wrong.


def outcome(comm: Comm, data: Any, num_workers: int) -> tuple[str, str, float]:
    """Read until something is raised; tells what, and how long after the step before."""
    own: Any = data if comm.rank == 0 else None
    loader = DataLoader(own, 2, **workers(num_workers))
    last_s = time.monotonic()
    try:
        for _ in prepare_data_loader(loader, dispatch_batches=True):
            last_s = time.monotonic()
    except Exception as error:  # noqa: BLE001  # whatever it is is looked at
        return type(error).__name__, str(error), time.monotonic() - last_s
    return "nothing", "", 0.0


def test_what_a_worker_raises_is_raised_on_all() -> None:
    by_rank = run_processes(3, outcome, Numbers(60, fails_at=31), 2)
    for kind, message, took_s in by_rank:
        assert kind == "KeyError"
        assert "no 31" in message
        assert took_s < SOON_S
    assert len({message for _, message, _ in by_rank}) == 1


def test_a_worker_that_is_killed_is_told_on_all() -> None:
    by_rank = run_processes(3, outcome, Numbers(60, dies_at=31), 2)
    for kind, message, took_s in by_rank:
        assert kind == "RuntimeError"
        # torch's words, or ours where a batch was on its way
        assert re.search(
            r"worker .*(exited unexpectedly|killed by signal|its batches unread)", message
        )
        assert took_s < SOON_S
    assert len({message for _, message, _ in by_rank}) == 1


def survive(comm: Comm, victim: int, at: int, folder: str) -> None:
    """Read until a rank kills itself; the others write down what they were told."""
    data: Any = Numbers(4000) if comm.rank == 0 else None
    loader = prepare_data_loader(DataLoader(data, 2), dispatch_batches=True)
    told = "nothing"
    try:
        for step, _ in enumerate(loader):
            if comm.rank == victim and step == at:
                os.kill(os.getpid(), signal.SIGKILL)
    except CommError as error:
        told = str(error)
    Path(folder, str(comm.rank)).write_text(told, encoding="utf-8")


@pytest.mark.parametrize(("victim", "at"), [(0, 0), (0, 7), (1, 0), (2, 7)])
def test_a_rank_that_is_killed_is_named_by_the_others(victim: int, at: int, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=f"Rank {victim} ended with exit code -9"):
        run_processes(3, survive, victim, at, str(tmp_path))
    for rank in {0, 1, 2} - {victim}:
        assert f"Rank {victim} has ended" in (tmp_path / str(rank)).read_text(encoding="utf-8")


def left_early(comm: Comm, num_workers: int) -> list[Any]:
    """Leave passes early, and start again."""
    loader = prepare_data_loader(
        DataLoader(Numbers(400), 2, **workers(num_workers)), dispatch_batches=True
    )
    seen = []
    for stop in (1, 4, 2):
        for step, batch in enumerate(loader, start=1):
            seen.append(batch.tolist())
            if step == stop:
                break
    return seen


@pytest.mark.parametrize("num_workers", [0, 2])
def test_passes_may_be_left_early(num_workers: int) -> None:
    for rank, seen in enumerate(run_processes(2, left_early, num_workers)):
        due = [[4 * step + 2 * rank, 4 * step + 2 * rank + 1] for step in (0, 0, 1, 2, 3, 0, 1)]
        assert seen == due


def seeds_of(comm: Comm) -> Any:
    """Tell whether iterating moves the generators of the training process."""
    loader = prepare_data_loader(DataLoader(Numbers(12), 2, shuffle=True), dispatch_batches=True)
    before = torch.get_rng_state()
    assert len(list(loader)) == 3
    return torch.equal(before, torch.get_rng_state())


def test_reading_moves_no_generator() -> None:
    assert run_processes(2, seeds_of) == [True, True]
