"""A program that is forked cannot tell that it has no interpreter of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import Ended, run_program

TELLS = """
import atexit, os, sys, warnings

import beside

atexit.register(print, "at exit")
print(sys.argv[1:], sys.path[0] == os.path.dirname(__file__), os.path.basename(sys.argv[0]))
print(__name__, sys.modules["__main__"].tell is tell if "tell" in globals() else None)


def tell():
    return tell.__module__


print(tell(), sys.modules["__main__"].tell is tell, beside.FOUND)
print(os.getcwd(), os.environ["TOLD"], os.environ.get("RANK"), sys.flags.optimize)
print([f"{a} {c.__name__} {getattr(m, 'pattern', m)}" for a, _, c, m, _ in warnings.filters])
warnings.warn("not worth showing", ResourceWarning)
warnings.warn("a warning")
sys.stdout.flush()
if os.fork() == 0:
    os.write(1, b"from a child\\n")
    os._exit(0)
os.wait()
os.write(2, b"beside it\\n")
"""

ENDINGS = {
    "at the end": "print('a')",
    "with a status": "import sys; print('a'); sys.exit(3)",
    "with no status": "import sys; print('a'); sys.exit()",
    "with a text": "raise SystemExit('no more')",
    "with an error": "print('a'); raise ValueError('b')",
    "interrupted": "raise KeyboardInterrupt",
    "with what is done at exit": "import atexit; atexit.register(print, 'a'); raise SystemExit(2)",
}


def shell(path: Path, *arguments: str, folder: Path, **environ: str) -> Ended:
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def test_what_a_program_can_tell_is_as_in_a_shell(tmp_path: Path) -> None:
    place, folder = tmp_path / "place", tmp_path / "folder"
    place.mkdir()
    folder.mkdir()
    (place / "beside.py").write_text("FOUND = 'beside'\n", encoding="utf-8")
    path = place / "tells.py"
    path.write_text(TELLS, encoding="utf-8")
    (ended,) = run_program(path, "a", "--b", folder=folder, environ={"TOLD": "yes"})
    assert ended == shell(path, "a", "--b", folder=folder, TOLD="yes")
    assert ended.status == 0
    assert ended.out.splitlines()[-2:] == ["from a child", "at exit"]


@pytest.mark.parametrize("how", ENDINGS)
def test_it_ends_as_in_a_shell(how: str, tmp_path: Path) -> None:
    path = tmp_path / "ends.py"
    path.write_text(ENDINGS[how], encoding="utf-8")
    (ended,) = run_program(path, folder=tmp_path)
    expected = shell(path, folder=tmp_path)
    assert ended.out == expected.out
    assert (ended.err.splitlines() or [""])[-1] == (expected.err.splitlines() or [""])[-1]
    # An interpreter that is interrupted ends by the signal, which the shell counts as a failure.
    assert (ended.status != 0) == (expected.status != 0)
    assert ended.status == expected.status or how == "interrupted"


RANKS = """
import os, sys

import torch.distributed as dist

assert not dist.is_initialized()
dist.init_process_group("gloo")
print(dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"], sys.argv[1])
dist.destroy_process_group()
sys.exit(dist.is_initialized())
"""


def test_on_more_ranks_it_meets_as_torchrun_lets_it(tmp_path: Path) -> None:
    path = tmp_path / "ranks.py"
    path.write_text(RANKS, encoding="utf-8")
    ended = run_program(path, "a", folder=tmp_path, num_ranks=2)
    assert ended == [Ended(0, "0 2 0 a\n", ""), Ended(0, "1 2 1 a\n", "")]
