"""A shuffle of 16 samples on 2 ranks whose torch seeds differ: what 2 epochs see.

accelerate's seedable sampler takes its seed from each rank's own generator.
"""

from typing import Any

import torch
from torch.utils.data import DataLoader

from proving import Sides, main, on_ranks

PACKAGES = ("accelerate",)


def read(rank: int) -> list[list[int]]:
    """Read two epochs in both ways: theirs, then ours."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from shardplug import ShardEngine

    config = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator, engine = Accelerator(cpu=True, dataloader_config=config), ShardEngine()
    seen = []
    for side in (accelerator, engine):
        torch.manual_seed(rank)
        user: Any = DataLoader(list(range(16)), 2, shuffle=True)  # type: ignore[arg-type]
        loader = side.prepare(user)
        seen.append([i for _ in range(2) for batch in loader for i in batch.tolist()])
    return seen


def prove() -> Sides:
    """Count what nobody saw in either epoch."""
    by_rank = on_ranks(2, read)
    missed = []
    for side in range(2):
        epochs = [{i for rank in by_rank for i in rank[side][part]} for part in (_FIRST, _SECOND)]
        missed.append(sum(16 - len(seen) for seen in epochs))
    return Sides(f"{missed[0]} of 32 never seen", f"{missed[1]} of 32 never seen")


_FIRST, _SECOND = slice(8), slice(8, None)

if __name__ == "__main__":
    main(__doc__, PACKAGES, prove)
