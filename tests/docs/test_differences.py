"""Each proof of the page on differences comes to what the page says, on both sides."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.blocks import ROOT, need
from tests.programs import Ended, run_program

HERE = ROOT / "examples" / "differences"
PAGE = (ROOT / "docs" / "differences.md").read_text(encoding="utf-8")


class Outcome(NamedTuple):
    """What a proof prints of the other tool, as a pattern, and of shardplug."""

    tool: str
    theirs: str
    ours: str


# Of Accelerate 1.15, Lightning 2.6, Ignite 0.5 and torch: where one of them is put right, its row
# is to be taken out of the page.
OUTCOMES = {
    "accumulation_tail": Outcome("accelerate", r"0\.5", "1.0"),
    "already_sharded": Outcome("accelerate", "saw 8 of 16", "saw 16 of 16"),
    "bytes_dispatched": Outcome("accelerate", "4 MB", "0 MB beside the shared memory"),
    "changed_list": Outcome(
        "accelerate", re.escape("[[0, 1], [2, 3], [4, 0]]"), "[[0, 1], [2, 3], [4]]"
    ),
    "dispatched_text": Outcome(
        "accelerate",
        r"rank 0 TypeError, rank 1 \w+Error",
        "rank 0 ['number 0', 'number 1'], rank 1 ['number 2', 'number 3']",
    ),
    "forgotten_set_epoch": Outcome("torch", "the same order", "two orders"),
    "gathered_metrics": Outcome("accelerate", "5, 13, 6 results", "5, 15, 5 results"),
    "ignite_evaluation": Outcome("ignite", "counted 12", "counted 10"),
    "ignite_resume": Outcome("ignite", "6 of 24 twice, 6 never", "0 of 24 twice, 0 never"),
    "lightning_evaluation": Outcome(
        "lightning", "counted 6, refused, 16 of 5, 8, 8", "counted 5, 8, 8 of 5, 8, 8"
    ),
    "lightning_resume": Outcome("lightning", "6 of 24 twice, 6 never", "0 of 24 twice, 0 never"),
    "lightning_skipped_step": Outcome(
        "lightning", r"skipped, learning rate 0\.5", "skipped, learning rate 1"
    ),
    "memory_of_a_shuffle": Outcome(
        "torch", "more than 10,000 kB", "less than 1,000 kB, also for 10^12"
    ),
    "other_number_of_ranks": Outcome("accelerate", "4 never, 0 repeated", "0 never, 0 repeated"),
    "plateau": Outcome(
        "accelerate",
        re.escape("learning rates [1.0, 0.5, 0.5, 0.25]"),
        "learning rates [1.0, 1.0, 1.0, 0.5]",
    ),
    "repeats_in_validation": Outcome(
        "torch", re.escape("counted [0, 0, 1, 2, 3, 4]"), "counted [0, 1, 2, 3, 4]"
    ),
    "resume_in_a_later_epoch": Outcome(
        "accelerate", r"\[\d+, \d+\] instead of \[\d+, \d+\]", "the same"
    ),
    "schedule_in_updates": Outcome(
        "accelerate",
        re.escape("[0.5, 0.0, 0.0, 0.0]"),
        '[0.75, 0.5, 0.25, 0.0], and with "batches" [0.5, 0.0, 0.0, 0.0]',
    ),
    "seeds_that_differ": Outcome("accelerate", r"[1-9]\d* of 32 never seen", "0 of 32 never seen"),
    "skipped_step": Outcome(
        "accelerate", r"skipped, learning rate 0\.05", "skipped, learning rate 0.1"
    ),
    "stream_workers": Outcome(
        "torch",
        re.escape(str(sorted([*range(8), *range(8)]))),
        str(list(range(8))),
    ),
    "uneven_shards": Outcome(
        "torch",
        "rank 0 done after 2 steps, rank 1 waits after 2 steps",
        "rank 0 done after 4 steps, rank 1 done after 4 steps",
    ),
    "varying_batches": Outcome("accelerate", "saw 8 of 20", "saw 20 of 20"),
    "wrong_length": Outcome("accelerate", "says 2, yields 1", "says 1, yields 1"),
}

FRESH = "forgotten_set_epoch"
"""The proof that has an interpreter of its own; the others take the imports of the tests."""

VARIABLES = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def run_fresh(name: str) -> Ended:
    done = subprocess.run(
        [sys.executable, str(HERE / f"{name}.py")],
        env={**os.environ, **VARIABLES},
        capture_output=True,
        text=True,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def run_forked(name: str) -> Ended:
    (ended,) = run_program(HERE / f"{name}.py", folder=Path.cwd(), environ=VARIABLES)
    return ended


def need_tool(tool: str) -> None:
    """Skip without the tool; what the tests do not bring along may always be missing."""
    if tool == "accelerate":
        pytest.importorskip(tool, reason="it is no part of what the tests need")
    else:
        need(tool, tool)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", OUTCOMES)
def test_a_proof_comes_to_what_the_page_says(name: str) -> None:
    expected = OUTCOMES[name]
    need_tool(expected.tool)
    status, out, err = (run_fresh if name == FRESH else run_forked)(name)
    assert status == 0, err
    _, theirs, ours = out.splitlines()
    assert re.fullmatch(rf"  [\w-]+ \S+: {expected.theirs}", theirs), theirs
    assert re.fullmatch(rf"  shardplug \S+: {re.escape(expected.ours)}", ours), ours


def test_every_proof_is_on_the_page_and_tested() -> None:
    programs = {path.stem for path in HERE.glob("*.py")} - {"all", "proving"}
    assert programs == set(OUTCOMES)
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    named = re.findall(r"\| `(\w+)` \|$", "\n".join(rows), flags=re.MULTILINE)
    assert sorted(named) == sorted(programs)


def test_every_row_has_a_proof() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    proofs = [row.split(" | ")[-1].strip(" |") for row in rows if not set(row) <= set("|- ")]
    for proof in set(proofs) - {"proof"}:
        names = proof.strip("`").removeprefix("python -m benchmarks ").split()
        for name in names:
            folders = (HERE, ROOT / "benchmarks")
            assert any((folder / f"{name}.py").exists() for folder in folders), proof


def test_a_tool_that_is_not_installed_is_skipped_politely(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("proving", HERE / "proving.py")
    assert spec is not None
    assert spec.loader is not None
    proving = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(proving)
    proving.main("A case.\n\nMore.", ("no-such-tool", "torch"), lambda: pytest.fail("it ran"))
    assert capsys.readouterr().out == "A case.\nskipped: pip install no-such-tool\n"
