"""A stream of 8 items, 2 workers: what comes.

torch gives each worker the whole stream, unless the data set divides it by get_worker_info().
"""

from collections.abc import Iterator

from torch.utils.data import DataLoader, IterableDataset

from proving import Sides, main
from shardplug import prepare_data_loader

PACKAGES = ("torch",)


class Stream(IterableDataset):
    """The numbers 0 to 7."""

    def __iter__(self) -> Iterator[int]:
        """Yield them."""
        return iter(range(8))


def prove() -> Sides:
    """Read it through torch's loader, as it is and prepared."""
    plain: DataLoader = DataLoader(Stream(), batch_size=2, num_workers=2)
    prepared = prepare_data_loader(plain, dispatch_batches=False)
    theirs, ours = (
        sorted(i for batch in each for i in batch.tolist()) for each in (plain, prepared)
    )
    return Sides(f"{theirs}", f"{ours}")


if __name__ == "__main__":
    main(__doc__, PACKAGES, prove)
