"""Ignite counts 10 samples on 3 ranks with a metric: how many.

Ignite's auto_dataloader takes a DistributedSampler, which fills up.
"""

from typing import Any

import torch
from torch.utils.data import DataLoader

from proving import Sides, main, on_ranks

PACKAGES = ("pytorch-ignite",)


def evaluate(rank: int) -> list[int]:
    """Evaluate in both ways: theirs, then ours."""
    import ignite.distributed as idist
    from ignite.engine import Engine
    from ignite.metrics import ConfusionMatrix

    from shardplug_ignite import ShardHandler

    samples: Any = torch.arange(10)
    stock, ours = (Engine(lambda _, x: (torch.eye(2)[x % 2], x % 2)) for _ in range(2))
    ShardHandler(mode="eval").attach(ours)
    for engine in (stock, ours):
        ConfusionMatrix(2).attach(engine, "counts")
    stock.run(idist.auto_dataloader(samples, batch_size=6, shuffle=False))
    ours.run(DataLoader(samples, batch_size=2))
    return [int(each.state.metrics["counts"].sum()) for each in (stock, ours)]


def prove() -> Sides:
    """Show what rank 0 has counted."""
    theirs, ours = on_ranks(3, evaluate)[0]
    return Sides(f"counted {theirs}", f"counted {ours}")


if __name__ == "__main__":
    main(__doc__, PACKAGES, prove)
