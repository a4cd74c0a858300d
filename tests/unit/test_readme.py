"""What README.md shows runs as it stands, and what it points to is there."""

from __future__ import annotations

import doctest
import importlib
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from shardplug import Comm, ShardplugWarning
from tests.launch import run_processes

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

NUM_TRAIN, NUM_VAL = (
    16,
    5,
)  # the first divides by two ranks with batches of two, the second does not


def python_blocks() -> dict[str, str]:
    """The python blocks by the heading that they are under."""
    blocks: dict[str, str] = {}
    for section in re.split(r"^#+ ", README, flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        found = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
        assert len(found) <= 1, f"two blocks under {heading!r}"
        blocks.update((heading, block) for block in found)
    return blocks


# What a reader brings along: data sets that note what is read, and what is done with it.


class Noting(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(index)
        return torch.full((3,), float(index)), torch.tensor(index % 2)


def of_a_plain_loop() -> dict[str, Any]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8),
        "loss_of": nn.functional.cross_entropy,
        "count_right_answers": lambda outputs, labels: None,
    }


def of_ignite() -> dict[str, Any]:
    from ignite.engine import Engine

    return {
        "trainer": Engine(lambda engine, batch: None),
        "evaluator": Engine(lambda engine, batch: None),
    }


def of_lightning() -> dict[str, Any]:
    from lightning.pytorch import LightningModule

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
            pass

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return {"model": Classifier()}


def run_block(
    comm: Comm, block: str, bring: Callable[[], dict[str, Any]]
) -> tuple[list[int], list[int]]:
    """What this rank reads of the data to train and to validate on when a block runs."""
    warnings.simplefilter("default")  # frameworks give advice
    warnings.simplefilter("error", ShardplugWarning)
    train_set, val_set = Noting(NUM_TRAIN), Noting(NUM_VAL)
    scope = {
        "train_loader": DataLoader(train_set, batch_size=2, shuffle=True),
        "val_loader": DataLoader(val_set, batch_size=2),
        **bring(),
    }
    exec(compile(block, "README.md", "exec"), scope)
    return train_set.read, val_set.read


def run_block_as_launched(
    comm: Comm, block: str, bring: Callable[[], dict[str, Any]]
) -> tuple[list[int], list[int]]:
    """The same where a framework is to believe that torchrun has started this rank."""
    rank, world_size = str(comm.rank), str(comm.world_size)
    os.environ.update(
        TORCHELASTIC_RUN_ID="readme",
        RANK=rank,
        LOCAL_RANK=rank,
        GROUP_RANK="0",
        WORLD_SIZE=world_size,
        LOCAL_WORLD_SIZE=world_size,
    )
    return run_block(comm, block, bring)


def check_reads(by_rank: list[tuple[list[int], list[int]]], *, passes: tuple[int, int]) -> None:
    """Each sample was read once in each pass, and the ranks shared the work."""
    for place, size in enumerate((NUM_TRAIN, NUM_VAL)):
        reads = [each[place] for each in by_rank]
        assert Counter(chain.from_iterable(reads)) == dict.fromkeys(range(size), passes[place])
        assert all(reads)


def need(framework: str, extra: str) -> None:
    """Skip without a framework, unless SHARDPLUG_NO_SKIP says that it must be there."""
    if os.environ.get("SHARDPLUG_NO_SKIP"):
        importlib.import_module(framework)
    else:
        pytest.importorskip(framework, reason=f"needs shardplug[{extra}]")


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
    links = re.findall(r"\]\(([^)]+)\)", README)
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
