"""The launcher itself: nothing that happens to a rank stays unseen, or takes for ever."""

from __future__ import annotations

import os
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardplug.comm import Comm, SoloComm
from tests.launch import RankError, run_processes

SOON_S = 15.0


def _report(comm: Comm, factor: int) -> dict[str, object]:
    return {
        "rank": comm.rank * factor,
        "world_size": comm.world_size,
        "has_group": dist.is_initialized(),
        "variable": os.environ.get("SHARDPLUG_TEST_VARIABLE"),
        "folder": str(Path.cwd()),
        "threads": threading.active_count(),
        "torch_threads": torch.get_num_threads(),
        "first_draw": torch.rand(()).item(),
    }


def test_ranks_have_the_callers_environment_and_nothing_else_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_processes(1, _report, 0)  # the server has started by now, without what comes next
    monkeypatch.setenv("SHARDPLUG_TEST_VARIABLE", "yes")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    zero, one = run_processes(2, _report, 10)
    assert (zero.pop("rank"), one.pop("rank")) == (0, 10)
    for each in (zero, one):
        assert each.pop("first_draw") != pytest.approx(torch.rand(()).item())
        assert each == {
            "world_size": 2,
            "has_group": True,
            "variable": "yes",
            "folder": str(tmp_path),
            "threads": 1,
            "torch_threads": 1,
        }
    assert not dist.is_initialized()


def test_ranks_can_start_without_a_group() -> None:
    (alone,) = run_processes(1, _report, 1, has_group=False)
    assert (alone["has_group"], alone["world_size"]) == (False, SoloComm().world_size)


def _raise(comm: Comm) -> None:
    if comm.rank == 1:
        raise KeyError("no such column")
    comm.barrier()


def test_the_error_of_the_first_rank_is_raised_with_its_traceback() -> None:
    with pytest.raises(KeyError, match="no such column") as caught:
        run_processes(2, _raise)
    told = str(caught.value.__cause__)
    assert isinstance(caught.value.__cause__, RankError)
    assert told.startswith("Rank 1 raised\nTraceback")
    assert 'raise KeyError("no such column")' in told
    assert "Rank 0 raised\n" in told
    assert "CommError: barrier() failed on rank 0 of 2" in told


class AwkwardError(Exception):
    """Cannot be unpickled: its constructor wants more than its args."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def _raise_awkward(comm: Comm) -> None:
    raise AwkwardError(3, "no such column")


def test_an_error_that_does_not_pickle_is_told_in_words() -> None:
    with pytest.raises(RankError, match=r"(?s)^Rank 0 raised\n.*AwkwardError: no such column"):
        run_processes(1, _raise_awkward)


def _return_a_lock(comm: Comm) -> object:
    return threading.Lock()


def test_a_result_that_does_not_pickle_is_an_error() -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        run_processes(1, _return_a_lock)


def _exit(comm: Comm) -> None:
    if comm.rank == 0:
        os._exit(5)
    threading.Event().wait()


def test_a_rank_that_dies_ends_the_run() -> None:
    started = time.perf_counter()
    with pytest.raises(RankError) as caught:
        run_processes(2, _exit)
    assert time.perf_counter() - started < SOON_S
    assert str(caught.value) == (
        "Rank 0 ended with exit code 5 and sent nothing\nStill running, and ended: ranks [1]."
    )


def _hang(comm: Comm) -> None:
    threading.Event().wait()


def test_a_rank_that_hangs_is_ended() -> None:
    with pytest.raises(RankError, match=r"Ranks \[0\] of 1 did not end within 0.5 s\."):
        run_processes(1, _hang, timeout_s=0.5)


def _warn(comm: Comm, category: type[Warning]) -> str:
    warnings.warn("old name", category, stacklevel=1)
    return "passed"


def test_a_warning_is_an_error_in_a_rank_too() -> None:
    with pytest.raises(DeprecationWarning, match="old name"):
        run_processes(1, _warn, DeprecationWarning)


@pytest.mark.filterwarnings("ignore:old:DeprecationWarning")
def test_what_the_caller_ignores_a_rank_ignores() -> None:
    assert run_processes(1, _warn, DeprecationWarning) == ["passed"]
    with pytest.raises(UserWarning, match="old name"):
        run_processes(1, _warn, UserWarning)
