"""A batch sampler of 6 batches that vary in size, though it declares one: what 2 ranks see.

A declared size is believed by accelerate: shorter batches are taken for the end.
"""

from typing import Any

from torch.utils.data import DataLoader

from proving import Sides, main

PACKAGES = ("accelerate",)


class Varying:
    """Batches of 4, 2, 4, 2, 4 and 4 of 20 samples."""

    batch_size, drop_last = 4, False

    def __iter__(self) -> Any:
        """Yield them."""
        for start, end in [(0, 4), (4, 6), (6, 10), (10, 12), (12, 16), (16, 20)]:
            yield list(range(start, end))

    def __len__(self) -> int:
        return 6


def prove() -> Sides:
    """Prepare the loader on both ranks, in both ways."""
    from accelerate.data_loader import prepare_data_loader as theirs

    from shardplug import prepare_data_loader as ours

    def seen(prepare: Any) -> str:
        data: Any = range(20)
        loaders = [DataLoader(data, batch_sampler=Varying()) for _ in range(2)]
        parts = [prepare(x, num_processes=2, process_index=r) for r, x in enumerate(loaders)]
        return f"saw {len({i for part in parts for batch in part for i in batch.tolist()})} of 20"

    return Sides(seen(theirs), seen(ours))


if __name__ == "__main__":
    main(__doc__, PACKAGES, prove)
