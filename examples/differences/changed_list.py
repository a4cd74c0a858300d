"""Batches that you keep in a list, used by a loader: what is left of the list.

Filling up the last batch, accelerate appends to the list that it was given.
"""

from collections.abc import Iterator

from proving import Sides, main

PACKAGES = ("accelerate",)


def prove() -> Sides:
    """Shard the list on rank 1 of 2, which has the short batch, in both ways."""
    from accelerate.data_loader import BatchSamplerShard as Theirs

    from shardplug import BatchSamplerShard as Ours

    class Stored:
        batch_size, drop_last = 2, False

        def __init__(self) -> None:
            self.batches = [[0, 1], [2, 3], [4]]

        def __iter__(self) -> Iterator[list[int]]:
            return iter(self.batches)

        def __len__(self) -> int:
            return 3

    theirs, ours = Stored(), Stored()
    list(Theirs(theirs, 2, 0))
    list(Ours(ours, 2, 0))
    return Sides(f"{theirs.batches}", f"{ours.batches}")


if __name__ == "__main__":
    main(__doc__, PACKAGES, prove)
