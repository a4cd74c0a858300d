"""5 samples on 2 ranks in batches of 2, gathered for a metric: what is counted.

Three cases: as it is; 3 results per sample; and a sampler over 5 of 10 samples. Where a result is
a row of the batch, both are right.
"""

from typing import Any

from torch.utils.data import DataLoader, SubsetRandomSampler

from proving import Sides, main, on_ranks

PACKAGES = ("accelerate",)


def gather(rank: int) -> list[list[list[int]]]:
    """Gather in both ways: theirs, then ours, each in three cases."""
    from accelerate import Accelerator

    from shardplug import ShardEngine

    found = []
    for side in (Accelerator(cpu=True), ShardEngine()):
        some = SubsetRandomSampler(range(5))
        five: Any = DataLoader(list(range(5)), 2)  # type: ignore[arg-type]
        ten: Any = DataLoader(list(range(10)), 2, sampler=some)  # type: ignore[arg-type]
        cases = []
        for user, times in ((five, 1), (five, 3), (ten, 1)):
            rows: list[int] = []
            for batch in side.prepare(user):
                rows += side.gather_for_metrics(batch.repeat_interleave(times)).tolist()
            cases.append(sorted(rows))
        found.append(cases)
    return found


def prove() -> Sides:
    """Count what rank 0 has of each case; 5, 15 and 5 are right."""
    counts = [", ".join(str(len(case)) for case in side) for side in on_ranks(2, gather)[0]]
    return Sides(*(f"{each} results" for each in counts))


if __name__ == "__main__":
    main(__doc__, PACKAGES, prove)
