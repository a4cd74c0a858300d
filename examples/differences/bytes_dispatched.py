"""One reader for 4 ranks, batches of 1 MB: what a rank receives in a step.

Counted are the bytes of tensors that torch.distributed hands to rank 1. shardplug sends batches of
one machine through shared memory, and to other machines each rank's own.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from proving import Sides, main, on_ranks

PACKAGES = ("accelerate",)


def count(rank: int) -> list[float]:
    """Count megabytes per step over 4 steps, theirs and ours."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from shardplug import ShardEngine

    received, send = [0.0], dist.broadcast

    def counted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        received[0] += tensor.nbytes / 1e6
        return send(tensor, *args, **options)

    dist.broadcast = counted
    config = DataLoaderConfiguration(dispatch_batches=True)
    found = []
    for side in (
        Accelerator(cpu=True, dataloader_config=config),
        ShardEngine(dispatch_batches=True),
    ):
        received[0] = 0.0
        user: Any = DataLoader(torch.zeros(16, 250_000), 1)  # type: ignore[arg-type]
        steps = sum(1 for _ in side.prepare(user))
        found.append(received[0] / steps)
    return found


def prove() -> Sides:
    """Show what rank 1 received."""
    theirs, ours = on_ranks(4, count)[1]
    return Sides(f"{theirs:.0f} MB", f"{ours:.0f} MB beside the shared memory")


if __name__ == "__main__":
    main(__doc__, PACKAGES, prove)
