"""Validation on 5 samples and 2 ranks: which samples are counted.

torch's DistributedSampler fills up with sample 0, and nothing says which one is the copy.
"""

from typing import Any

from torch.utils.data import DistributedSampler

from proving import Sides, main
from shardplug import Shard, ShardPlan, Tail

PACKAGES = ("torch",)


def prove() -> Sides:
    """Count on both ranks."""
    data: Any = range(5)
    samplers: Any = [DistributedSampler(data, 2, rank, shuffle=False) for rank in range(2)]
    theirs = [i for sampler in samplers for i in sampler]
    plans = [ShardPlan(5, 2, Shard(rank, 2), tail=Tail.EXACT) for rank in range(2)]
    ours = [i for plan in plans for step in range(plan.num_steps) for i in plan.positions(step)]
    return Sides(f"counted {sorted(theirs)}", f"counted {sorted(ours)}")


if __name__ == "__main__":
    main(__doc__, PACKAGES, prove)
