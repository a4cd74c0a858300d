"""Small loaders to try `shardplug check` out on; one is sound and one is not."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader


def shuffled() -> DataLoader[Any]:
    """Return a sound loader, to be prepared: 103 samples, shuffled."""
    data: Any = torch.arange(103)
    return DataLoader(data, batch_size=8, shuffle=True)


def unsharded() -> DataLoader[Any]:
    """Return a loader that nobody divides: as it is, every rank reads all of it."""
    return shuffled()
