"""ReduceLROnPlateau with patience 2 on 2 ranks, shown the metrics 1, 2, 2 and 2.

One call is one observation. accelerate makes one of it for each rank.
"""

from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from proving import Sides, main, on_ranks

PACKAGES = ("accelerate",)


def watch(rank: int) -> list[list[float]]:
    """Note the learning rate after each metric, in both ways."""
    from accelerate import Accelerator

    from shardplug import ShardEngine

    found = []
    for side in (Accelerator(cpu=True), ShardEngine()):
        weight = torch.nn.Parameter(torch.ones(1))
        inner = torch.optim.SGD([weight], lr=1.0)
        schedule: Any = ReduceLROnPlateau(inner, factor=0.5, patience=2)
        optimizer, scheduler = side.prepare(inner, schedule)
        rates = []
        for metric in (1.0, 2.0, 2.0, 2.0):
            optimizer.step()
            scheduler.step(metric)
            rates.append(inner.param_groups[0]["lr"])
        found.append(rates)
    return found


def prove() -> Sides:
    """Show what rank 0 noted."""
    theirs, ours = on_ranks(2, watch)[0]
    return Sides(f"learning rates {theirs}", f"learning rates {ours}")


if __name__ == "__main__":
    main(__doc__, PACKAGES, prove)
