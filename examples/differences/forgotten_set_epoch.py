"""A shuffle of 16 samples on 2 ranks, two epochs without a call of set_epoch: are they the same.

torch's DistributedSampler shuffles by an epoch that it has to be told.
"""

from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from proving import Sides, main
from shardplug import prepare_data_loader

PACKAGES = ("torch",)


def prove() -> Sides:
    """Compare the first two epochs of rank 0."""
    data: Any = list(range(16))
    theirs: Any = DistributedSampler(data, 2, 0, seed=1)
    plain: DataLoader = DataLoader(data, 2, shuffle=True)
    prepared: Any = prepare_data_loader(plain, num_processes=2, process_index=0)
    ours = [[i for batch in prepared for i in batch.tolist()] for _ in range(2)]
    return Sides(_told(list(theirs), list(theirs)), _told(*ours))


def _told(first: list[int], second: list[int]) -> str:
    return "the same order" if first == second else "two orders"


if __name__ == "__main__":
    main(__doc__, PACKAGES, prove)
