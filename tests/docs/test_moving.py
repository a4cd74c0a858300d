"""The page on moving over names all there is, and both of its scripts come to the same."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardplug
from shardplug import ShardEngine, prepare_data_loader
from tests.blocks import ROOT, blocks_of

PAGE = ROOT / "docs" / "moving-from-accelerate.md"
TEXT = PAGE.read_text(encoding="utf-8")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def code_words(text: str) -> set[str]:
    """Names within code of a line, one by one."""
    return {
        word
        for span in re.findall(r"`([^`]+)`", text)
        for word in re.findall(r"[A-Za-z_]\w*", span)
    }


def first_cells() -> set[str]:
    """What is named in the first column of the tables."""
    rows = [line for line in TEXT.splitlines() if line.startswith("| ")]
    return set().union(*(code_words(row.split(" | ")[0]) for row in rows))


def test_every_name_of_accelerator_is_there() -> None:
    accelerate = pytest.importorskip("accelerate")
    utils = pytest.importorskip("accelerate.utils")
    loading = pytest.importorskip("accelerate.data_loader")
    names = {name for name in dir(accelerate.Accelerator) if not name.startswith("_")}
    names |= {field.name for field in dataclasses.fields(utils.DataLoaderConfiguration)}
    names |= set(inspect.signature(loading.prepare_data_loader).parameters) - {"dataloader"}
    assert not names - first_cells()


def test_what_is_told_to_use_is_there() -> None:
    section = TEXT.partition("## The loader")[2].partition("## Without a counterpart")[0]
    known = {*shardplug.__all__, *dir(ShardEngine), "shardplug"}
    known |= set(inspect.signature(prepare_data_loader).parameters)
    known |= set(inspect.signature(ShardEngine).parameters)
    for row in section.splitlines():
        if row.startswith("| `"):
            first, second = row.split(" | ")[:2]
            unknown = code_words(second) - known - code_words(first)
            allowed = {"optimizer", "scheduler", "loader", "k", "step_with_optimizer", "False"}
            allowed |= {"step_was_skipped", "index"}
            assert not unknown - allowed, row


def test_what_a_loader_has() -> None:
    (line,) = [each for each in TEXT.splitlines() if each.startswith("A loader that is prepared")]
    kinds = (shardplug.DataLoaderShard, shardplug.DataLoaderDispatcher)
    assert len(code_words(line)) == 8
    for name in code_words(line):
        assert all(hasattr(kind, name) for kind in kinds), name


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_both_scripts_count_the_same(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    before, after, command = blocks_of(PAGE)[:3]
    _, _, expected = command.code.partition("\n")
    for name, block in (("before", before), ("after", after)):
        script = tmp_path / f"{name}.py"
        script.write_text(block.code, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, *TORCHRUN, str(script)],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == expected, name
