"""Streams of 3 and 7 rows on 2 ranks, one all-reduce per step: does it come to an end.

With torch's loader rank 1 waits for rank 0, which is done; here for 3 seconds.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from proving import Sides, main, on_ranks
from shardplug import prepare_data_loader

PACKAGES = ("torch",)


class Part(IterableDataset):
    """A rank's own rows."""

    def __iter__(self) -> Iterator[int]:
        """Yield 3 rows on rank 0 and 7 on rank 1."""
        return iter(range(3 + 4 * dist.get_rank()))


def train(rank: int) -> list[str]:
    """Take a pass with an all-reduce in each step, ours first."""
    user: DataLoader = DataLoader(Part(), batch_size=2)
    found = []
    for loader in (prepare_data_loader(user, already_sharded=True, tail="pad"), user):
        steps = 0
        try:
            for _ in loader:
                dist.all_reduce(torch.ones(1))
                steps += 1
        except RuntimeError:
            found.append(f"waits after {steps} steps")
        else:
            found.append(f"done after {steps} steps")
    return found


def prove() -> Sides:
    """Show what both ranks came to."""
    (ours, theirs), (ours_1, theirs_1) = on_ranks(2, train, group_s=3.0)
    return Sides(f"rank 0 {theirs}, rank 1 {theirs_1}", f"rank 0 {ours}, rank 1 {ours_1}")


if __name__ == "__main__":
    main(__doc__, PACKAGES, prove)
