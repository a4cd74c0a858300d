"""3 batches of one sample, accumulated by 2: the gradient of the last window, of 1 batch.

The gradient of each batch is 1. A window's mean is 1 whatever its length.
"""

from typing import Any

import torch
from torch.utils.data import DataLoader

from proving import Sides, main

PACKAGES = ("accelerate",)


def prove() -> Sides:
    """Accumulate over a pass, in both ways."""
    from accelerate import Accelerator

    from shardplug import ShardEngine

    sides: Any = [cls(gradient_accumulation_steps=2) for cls in (Accelerator, ShardEngine)]
    found = []
    for side in sides:
        weight = torch.nn.Parameter(torch.zeros(()))
        ones: Any = [1.0, 1.0, 1.0]
        loader, optimizer = side.prepare(DataLoader(ones), torch.optim.SGD([weight], lr=1.0))
        for batch in loader:
            with side.accumulate():
                side.backward(weight * batch.mean())
                found.append(f"{weight.grad}")
                optimizer.step()
                optimizer.zero_grad()
    return Sides(found[2], found[5])


if __name__ == "__main__":
    main(__doc__, PACKAGES, prove)
