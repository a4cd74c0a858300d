"""A loader of 16 samples with a DistributedSampler, prepared for 2 ranks: what is seen.

accelerate cuts the half that a rank was given in half once more.
"""

from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from proving import Sides, main

PACKAGES = ("accelerate",)


def prove() -> Sides:
    """Prepare the loader on both ranks, in both ways."""
    from accelerate.data_loader import prepare_data_loader as theirs

    from shardplug import prepare_data_loader as ours

    def seen(prepare: Any) -> str:
        ids = set()
        data: Any = list(range(16))
        for rank in range(2):
            sampler: Any = DistributedSampler(data, 2, rank, shuffle=False)
            loader: Any = DataLoader(data, batch_size=2, sampler=sampler)
            for batch in prepare(loader, num_processes=2, process_index=rank):
                ids.update(batch.tolist())
        return f"saw {len(ids)} of 16"

    return Sides(seen(theirs), seen(ours))


if __name__ == "__main__":
    main(__doc__, PACKAGES, prove)
