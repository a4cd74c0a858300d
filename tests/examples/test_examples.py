"""Every program in examples/ runs, alone and on two ranks where it says so, and is right."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")  # a free port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def run(name: str, folder: Path, *launcher: str) -> str:
    """What a program prints, run on CPUs in a folder of its own."""
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / name)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "ShardplugWarning" not in done.stderr
    return done.stdout


def need(*packages: str) -> None:
    """Skip without a package, unless SHARDPLUG_NO_SKIP says that it must be there."""
    for package in packages:
        if os.environ.get("SHARDPLUG_NO_SKIP"):
            importlib.import_module(package)
        else:
            pytest.importorskip(package)


def found(pattern: str, text: str) -> tuple[str, ...]:
    """The groups of a pattern that fits exactly once."""
    (match,) = re.finditer(pattern, text)
    return match.groups()


PLAIN = r"ranks: (\d), accuracy: (\d+/\d+) = (0\.\d+)\n"


def test_plain_pytorch_counts_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    need("sklearn")
    alone = run("plain_pytorch.py", tmp_path)
    together = run("plain_pytorch.py", tmp_path, *TORCHRUN)
    by_run = []
    for ranks, text in (("1", alone), ("2", together)):
        told, fraction, value = found(PLAIN, text)
        assert told == ranks
        right, _, seen = fraction.partition("/")
        assert seen == "357"
        assert value == f"{int(right) / 357:.4f}"
        assert float(value) > 0.9
        assert text.endswith("exact: 357 samples were counted, and the set has 357\n")
        by_run.append(fraction)
    assert by_run[0] == by_run[1]


IGNITE = r"(\d) ranks, (\d+) steps of 5 epochs: accuracy (0\.\d+), loss 0\.\d+ over (\d+) test"


def test_ignite_digits_counts_each_test_image_once(tmp_path: Path) -> None:
    need("sklearn", "ignite")
    for ranks, launcher in ((1, ()), (2, TORCHRUN)):
        told, steps, accuracy, seen = found(IGNITE, run("ignite_digits.py", tmp_path, *launcher))
        assert (int(told), int(seen)) == (ranks, 359)
        assert int(steps) == 5 * -(-1438 // (32 * ranks))
        assert float(accuracy) > 0.9


def test_every_program_is_tested() -> None:
    tests = Path(__file__).read_text(encoding="utf-8")
    for program in EXAMPLES.glob("*.py"):
        assert f'"{program.name}"' in tests, program.name
