"""Real ranks for tests: one process each, talking over gloo.

The processes are forked from a server that has imported torch and the test tools and nothing else,
so they start in tenths of a second and inherit no threads, random state or handles of the test
process. They meet through a file, so no port has to be free. What a rank returns or raises comes
back through a pipe.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import re
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

# The last two are slow to import, and DDP and the Ignite tests do; what is missing is passed over.
PRELOAD = ["torch", "torch.utils.data", "numpy", "pytest", "hypothesis"]
PRELOAD += ["torch._dynamo", "ignite.engine"]
AFTER_FAILURE_S = 2.0  # how long the other ranks may go on once one has failed
AFTER_RESULT_S = 10.0  # how long a rank may take to end its group and write coverage data


class RankError(AssertionError):
    """A rank raised, died or did not end; the message has its traceback."""


def run_processes(
    world_size: int,
    body: Callable[..., T],
    *args: Any,
    timeout_s: float = 60.0,
    has_group: bool = True,
) -> list[T]:
    """Run ``body(comm, *args)`` on many ranks at once, a process each; return the results by rank.

    The body must be importable (a top-level function), args and results picklable. A process has
    the environment variables, working directory and warning filters of the caller, and one torch
    thread. What the rank that failed first raised is raised here, caused by a `RankError` with its
    traceback.

    Args:
        world_size: How many ranks.
        body: Called as ``body(comm, *args)``; the comm is a TorchComm.
        *args: Copied to every rank.
        timeout_s: After that the ranks that still run are ended.
        has_group: Whether there is a process group when the body starts; without, the comm is a
            SoloComm.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="shardplug-ranks-") as folder:
        ranks: list[_Rank] = []
        outcomes: dict[int, _Outcome] = {}
        try:
            for rank in range(world_size):
                task = _Task(
                    body=pickle.dumps((body, args)),
                    rank=rank,
                    world_size=world_size,
                    store=str(Path(folder) / "store") if has_group else None,
                    timeout_s=timeout_s,
                    environ=dict(os.environ),
                    folder=str(Path.cwd()),
                    filters=_portable_filters(),
                )
                pipe, end_of_child = context.Pipe(duplex=False)
                process = context.Process(target=_live, args=(task, end_of_child))
                process.start()
                end_of_child.close()
                ranks.append(_Rank(rank, process, pipe))
            _collect(ranks, outcomes, deadline=time.monotonic() + timeout_s)
        finally:
            for each in ranks:
                if each.rank in outcomes:
                    each.process.join(AFTER_RESULT_S)
                each.process.kill()
                each.process.join()
                each.process.close()
                each.pipe.close()
    return _results([outcomes.get(rank) for rank in range(world_size)], timeout_s)


class _Rank(NamedTuple):
    rank: int
    process: ForkServerProcess
    pipe: Connection[Any, Any]


class _Outcome(NamedTuple):
    """What came of a rank: its pickled result, or a text and, if it pickles, the error."""

    result: bytes = b""
    failure: str | None = None
    error: bytes | None = None
    at_s: float = 0.0


@dataclass(frozen=True)
class _Task:
    """What a process needs to know; the body is unpickled there once coverage counts."""

    body: bytes
    rank: int
    world_size: int
    store: str | None
    timeout_s: float
    environ: Mapping[str, str]
    folder: str
    filters: Sequence[tuple[Any, ...]]


def _collect(ranks: list[_Rank], outcomes: dict[int, _Outcome], *, deadline: float) -> None:
    """Wait for what every rank sends; at the deadline some outcomes may be missing."""
    while running := [each for each in ranks if each.rank not in outcomes]:
        ready = wait([each.pipe for each in running], max(0.0, deadline - time.monotonic()))
        if not ready:
            return
        for each in running:
            if each.pipe in ready:
                outcomes[each.rank] = outcome = _receive(each)
                if outcome.failure is not None:
                    deadline = min(deadline, time.monotonic() + AFTER_FAILURE_S)


def _receive(each: _Rank) -> _Outcome:
    try:
        outcome: _Outcome = each.pipe.recv()
    except EOFError:
        each.process.join()
        died = f"ended with exit code {each.process.exitcode} and sent nothing"
        return _Outcome(failure=died, at_s=time.monotonic())
    return outcome


def _results(outcomes: list[_Outcome | None], timeout_s: float) -> list[Any]:
    failed = [
        (outcome.at_s, rank, outcome)
        for rank, outcome in enumerate(outcomes)
        if outcome is not None and outcome.failure is not None
    ]
    running = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
    if failed:
        told = "\n".join(f"Rank {rank} {outcome.failure}" for _, rank, outcome in sorted(failed))
        if running:
            told += f"\nStill running, and ended: ranks {running}."
        first = min(failed)[2]
        if first.error is None:
            raise RankError(told)
        raise pickle.loads(first.error) from RankError(told)
    if running:
        raise RankError(f"Ranks {running} of {len(outcomes)} did not end within {timeout_s} s.")
    return [pickle.loads(outcome.result) for outcome in outcomes if outcome is not None]


def _live(task: _Task, pipe: Connection[Any, Any]) -> None:
    """Be one rank: the target of its process."""
    # Workers of loaders in a rank start as they do in a user's process, not from a server anew.
    multiprocessing.set_start_method("fork", force=True)
    gc.freeze()  # a collection would touch, and so copy, all that was imported for every rank
    import torch
    import torch.distributed as dist

    os.environ.clear()
    os.environ.update(task.environ)
    os.chdir(task.folder)
    torch.set_num_threads(1)
    _set_filters(task.filters)
    try:
        if task.store is not None:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{task.store}",
                rank=task.rank,
                world_size=task.world_size,
                timeout=timedelta(seconds=task.timeout_s),
            )
        from shardplug.comm_torch import current_comm

        body, args = pickle.loads(task.body)
        outcome = _Outcome(result=pickle.dumps(body(current_comm(), *args)))
    except BaseException as error:  # noqa: BLE001  # raised again by the caller
        failure = "raised\n" + "".join(traceback.format_exception(error))
        outcome = _Outcome(failure=failure, error=_portable_error(error), at_s=time.monotonic())
    # Before the group ends: what a rank raised comes before what the others make of its end.
    pipe.send(outcome)
    if dist.is_initialized():
        dist.destroy_process_group()


def _portable_error(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # noqa: BLE001  # errors of any class may refuse
        return None
    return data


def _portable_filters() -> list[tuple[Any, ...]]:
    def text(pattern: object) -> str:
        return pattern.pattern if isinstance(pattern, re.Pattern) else str(pattern or "")

    return [
        (action, text(message), category, text(module), line)
        for action, message, category, module, line in warnings.filters
    ]


def _set_filters(filters: Sequence[tuple[Any, ...]]) -> None:
    warnings.resetwarnings()
    for action, message, category, module, line in filters:
        warnings.filterwarnings(action, message, category, module, line, append=True)
