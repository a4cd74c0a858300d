"""Programs that are run as from a shell, by processes that have imported torch already.

An interpreter takes seconds to import torch and a framework. Here a program runs in a process that
is forked from the server of `tests.launch`, which has them. What a program can tell of a process of
its own is as the shell would have it: its arguments, the paths that it imports from, ``__main__``,
its working directory, its environment, the warnings that are shown, what is printed, what is done
at exit, and the status that it ends with.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch.distributed as dist

from shardplug import Comm
from tests.launch import run_processes

ROOT = Path(__file__).parents[1]

# What an interpreter starts with.
QUIET = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)


class Ended(NamedTuple):
    """How a process ended, and what it printed."""

    status: int
    out: str
    err: str


def run_program(
    path: Path,
    *arguments: str,
    folder: Path,
    num_ranks: int = 1,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = 150.0,
) -> list[Ended]:
    """Run a program in a folder, on one rank or as torchrun would on more; by rank how it ended.

    Args:
        path: Of the program.
        *arguments: Of the program.
        folder: The working directory of each process.
        num_ranks: How many processes; with one it is not told that there could be others.
        environ: Variables beside those of this process.
        timeout_s: After that what still runs is ended, and is an error.
    """
    words = (str(path), arguments, str(folder), dict(environ or {}))
    if num_ranks == 1:
        return run_processes(1, _be_program, *words, None, timeout_s=timeout_s, has_group=False)
    with meeting_place() as port:
        return run_processes(num_ranks, _be_program, *words, port, timeout_s=timeout_s)


@contextmanager
def meeting_place() -> Iterator[int]:
    """Keep the store that ranks meet at, as torchrun does, and tell its port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def be_launched(comm: Comm, port: int) -> None:
    """Leave the group that told this process its rank, for one that the program starts itself."""
    rank, world_size = comm.rank, comm.world_size
    dist.destroy_process_group()
    set_variables(rank, world_size, port)


def set_variables(rank: int, world_size: int, port: int | None = None) -> None:
    """Set the variables that torchrun gives to a process of one host."""
    os.environ.update(
        TORCHELASTIC_RUN_ID="tests",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    if port is not None:
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RESTART_COUNT="0",
        )


def _be_program(
    comm: Comm,
    path: str,
    arguments: Sequence[str],
    folder: str,
    environ: Mapping[str, str],
    port: int | None,
) -> Ended:
    if port is not None:
        be_launched(comm, port)
    os.environ.update(environ)
    os.chdir(folder)
    sys.argv = [path, *arguments]
    # The folder of the program comes first, and the root of the project is known to the tests only.
    others = [each for each in sys.path if each and Path(each).resolve() != ROOT]
    sys.path[:] = [str(Path(path).parent), *others]
    _forget_filters()
    with _into_a_file(1) as out, _into_a_file(2) as err:
        status = _run(path)
        sys.stdout.flush()
        sys.stderr.flush()
        return Ended(status, _text_of(out), _text_of(err))


def _run(path: str) -> int:
    """Run a program to its very end, and return the status that the shell would see."""
    atexit._clear()  # what the server has noted is not the program's
    status = 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as ended:
        status = int(ended.code) if isinstance(ended.code, int) else int(ended.code is not None)
        if not isinstance(ended.code, int | None):
            print(ended.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  # the interpreter prints them all
        status = 1
        traceback.print_exc()
    atexit._run_exitfuncs()
    return status


def _forget_filters() -> None:
    warnings.resetwarnings()
    for category in QUIET:
        warnings.simplefilter("ignore", category, append=True)
    warnings.filterwarnings("default", "", DeprecationWarning, "__main__")


@contextmanager
def _into_a_file(number: int) -> Iterator[BinaryIO]:
    """Lead what this process and those that it forks print on a stream into a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = os.dup(number)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), number)
        try:
            yield file
        finally:
            os.dup2(before, number)
            os.close(before)


def _text_of(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode()
