"""What pages of the documentation take for granted: names that their blocks use and do not make."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from shardplug import ShardEngine
from tests.blocks import Givens, Scope


def nothing(code: str) -> Scope:
    """Give a page no names."""
    return {}


def of_a_training_loop(code: str) -> Scope:
    """What a page has imported in a program before, and a loader of a reader."""
    rows = TensorDataset(torch.ones(10, 8), torch.zeros(10, dtype=torch.int64))
    return {
        "torch": torch,
        "DataLoader": DataLoader,
        "ShardEngine": ShardEngine,
        "train_loader": DataLoader(rows, batch_size=2, shuffle=True),
    }


def of_engines(code: str) -> Scope:
    """A trainer and an evaluator of Ignite's, and what they work with."""
    from ignite.engine import Engine, create_supervised_trainer

    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = TensorDataset(torch.ones(4, 8), torch.zeros(4, dtype=torch.int64))
    loss = torch.nn.functional.cross_entropy
    return {
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "trainer": create_supervised_trainer(model, optimizer, loss),
        "evaluator": Engine(lambda engine, batch: None),
        "train_loader": DataLoader(rows, batch_size=2, shuffle=True),
        "val_loader": DataLoader(rows, batch_size=3),
    }


def of_lightning(code: str) -> Scope:
    """A module of Lightning's, and data for it."""
    from lightning.pytorch.demos.boring_classes import BoringModel

    lines: Any = torch.ones(16, 32)
    return {
        "model": BoringModel(),
        "train_loader": DataLoader(lines, batch_size=2, shuffle=True),
    }


GIVENS: dict[str, Givens] = {
    "lightning.md": of_lightning,
    "ignite.md": of_engines,
    "resume.md": of_a_training_loop,
}
"""By page, as a path under docs/: a function of the code that is to run. What is given
in English is given in other languages too."""


def givens_of(page: str) -> Givens:
    """Return what brings the names of a page.

    Args:
        page: Its path under docs/.
    """
    return GIVENS.get(page, GIVENS.get(page.removeprefix("zh/"), nothing))
