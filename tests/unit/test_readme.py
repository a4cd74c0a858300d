"""What README.md shows runs as it stands, and what it points to is there."""

from __future__ import annotations

import doctest
import re
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

from shardplug.cli import main
from tests.blocks import (
    check_reads,
    need,
    of_a_plain_loop,
    of_ignite,
    of_lightning,
    run_block,
    run_block_as_launched,
)
from tests.launch import run_processes

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def python_blocks() -> dict[str, str]:
    """The python blocks by the heading that they are under."""
    blocks: dict[str, str] = {}
    for section in re.split(r"^#+ ", README, flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        found = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
        assert len(found) <= 1, f"two blocks under {heading!r}"
        blocks.update((heading, block) for block in found)
    return blocks


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_plain_block() -> None:
    block = python_blocks()["Plain PyTorch"]
    by_rank = run_processes(2, run_block, block, of_a_plain_loop, timeout_s=150)
    check_reads(by_rank, passes=(2, 2))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_ignite_block() -> None:
    need("ignite", "ignite")
    block = python_blocks()["PyTorch-Ignite"]
    by_rank = run_processes(2, run_block, block, of_ignite, timeout_s=150)
    check_reads(by_rank, passes=(2, 1))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_lightning_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("lightning", "lightning")
    monkeypatch.chdir(tmp_path)  # Lightning writes its logs and checkpoints where it runs
    block = python_blocks()["PyTorch Lightning"]
    by_rank = run_processes(2, run_block_as_launched, block, of_lightning, timeout_s=150)
    # Lightning validates a first time before it trains: two steps, here the whole set.
    check_reads(by_rank, passes=(2, 4))


def test_every_block_is_tested_and_short() -> None:
    blocks = python_blocks()
    assert set(blocks) == {"Why", "PyTorch Lightning", "PyTorch-Ignite", "Plain PyTorch"}
    for heading, block in blocks.items():
        assert sum(bool(line) for line in block.splitlines()) < 15, heading
    assert README.count("```python") == len(blocks)


def test_the_example_of_a_plan() -> None:
    example = doctest.DocTestParser().get_doctest(
        python_blocks()["Why"], {}, "README.md", "README.md", 0
    )
    assert doctest.DocTestRunner().run(example) == (0, len(example.examples))
    assert len(example.examples) == 3


def test_what_it_says_of_torchs_sampler() -> None:
    data: Any = range(5)
    samplers: list[DistributedSampler[int]] = [
        DistributedSampler(data, num_replicas=2, rank=rank, shuffle=False) for rank in range(2)
    ]
    assert Counter(chain.from_iterable(samplers)) == {0: 2, 1: 1, 2: 1, 3: 1, 4: 1}


def test_what_it_points_to_is_there() -> None:
    links = re.findall(r"\]\(([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"", README)
    links = [link or picture for link, picture in links]
    assert len(links) > 5
    anchors = {
        "#" + heading.lower().replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", README, flags=re.MULTILINE)
    }
    for link in links:
        assert link in anchors or (ROOT / link).exists(), link


def test_the_commands_are_targets_of_make() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = re.findall(r"make (\w+) ", README)
    assert {"demo", "test"} <= set(commands)
    assert "make help" in README
    for command in commands:
        assert re.search(rf"^{command}:", makefile, flags=re.MULTILINE), command


def test_it_can_be_read_in_one_go() -> None:
    assert README.count("\n") < 200


def test_the_picture_of_a_plan_is_what_its_command_draws(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    words = re.findall(r"^`shardplug (plan .*) --plot plan\.svg`", README, flags=re.MULTILINE)
    assert len(words) == 1
    path = tmp_path / "plan.svg"
    assert main([*words[0].split(), "--plot", str(path)]) == 0
    drawn = path.read_text(encoding="utf-8")
    kept = (ROOT / "docs" / "pictures" / "plan.svg").read_text(encoding="utf-8")
    if f"Matplotlib v{matplotlib.__version__}" in kept:
        assert drawn == kept
    else:  # another release places letters elsewhere, but not other ones
        assert drawn.count("<path") == kept.count("<path")
