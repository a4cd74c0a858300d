"""A schedule over 4 updates, LinearLR from 1 to 0, on 2 ranks: the rate after each.

Accelerate takes a schedule for one that is written in the batches of one process, and moves it once
for each rank. shardplug does so with scheduler_unit="batches".
"""

from typing import Any

import torch
from torch.optim.lr_scheduler import LinearLR

from proving import Sides, main, on_ranks

PACKAGES = ("accelerate",)


def step(rank: int) -> list[list[float]]:
    """Note the learning rate after each update: theirs, ours, and ours in batches."""
    from accelerate import Accelerator

    from shardplug import ShardEngine

    found = []
    for side in (Accelerator(cpu=True), ShardEngine(), ShardEngine(scheduler_unit="batches")):
        weight = torch.nn.Parameter(torch.ones(1))
        inner = torch.optim.SGD([weight], lr=1.0)
        schedule: Any = LinearLR(inner, 1.0, 0.0, total_iters=4)
        optimizer, scheduler = side.prepare(inner, schedule)
        rates = []
        for _ in range(4):
            optimizer.step()
            scheduler.step()
            rates.append(round(inner.param_groups[0]["lr"], 2))
        found.append(rates)
    return found


def prove() -> Sides:
    """Show what rank 0 noted."""
    theirs, ours, in_batches = on_ranks(2, step)[0]
    return Sides(f"{theirs}", f'{ours}, and with "batches" {in_batches}')


if __name__ == "__main__":
    main(__doc__, PACKAGES, prove)
