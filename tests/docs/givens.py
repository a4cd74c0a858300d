"""What pages of the documentation take for granted: names that their blocks use and do not make."""

from __future__ import annotations

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


GIVENS: dict[str, Givens] = {
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
