"""3 samples in batches of 2, each cut in two, nothing repeated: what len() says on rank 1."""

from typing import Any

from torch.utils.data import BatchSampler, SequentialSampler

from proving import Sides, main

PACKAGES = ("accelerate",)


def prove() -> Sides:
    """Compare the length with the number of batches."""
    from accelerate.data_loader import BatchSamplerShard as Theirs

    from shardplug import BatchSamplerShard as Ours

    def told(kind: Any) -> str:
        batches = BatchSampler(SequentialSampler(range(3)), 2, False)
        shard = kind(batches, 2, 1, split_batches=True, even_batches=False)
        return f"says {len(shard)}, yields {len(list(shard))}"

    return Sides(told(Theirs), told(Ours))


if __name__ == "__main__":
    main(__doc__, PACKAGES, prove)
