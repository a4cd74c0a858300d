"""Lightning tests on 2 devices: 5 samples; a custom batch sampler over 8; a stream of 8.

Counted is how many samples both devices are shown. Lightning fills up the first, refuses the
second, and gives all of the third to each device.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from proving import Sides, main, trainer_of

PACKAGES = ("lightning",)


class Pairs:
    """Batches of two of 8 samples; no sampler inside."""

    def __iter__(self) -> Iterator[list[int]]:
        """Yield them."""
        return iter([[0, 1], [2, 3], [4, 5], [6, 7]])

    def __len__(self) -> int:
        return 4


class Stream(IterableDataset):
    """The numbers 0 to 7."""

    def __iter__(self) -> Iterator[float]:
        """Yield them."""
        return iter(map(float, range(8)))


def count(strategy: Any, loader: DataLoader) -> str:
    """Count what is shown to the model on two devices."""
    from lightning.pytorch import LightningModule

    class Counts(LightningModule):
        def test_step(self, batch: torch.Tensor) -> None:
            self.log("n", float(len(batch)), sync_dist=True, reduce_fx="sum", batch_size=1)

    trainer = trainer_of(strategy, 2)
    (logged,) = trainer.test(Counts(), loader, verbose=False)
    return f"{logged['n']:.0f}"


def prove() -> Sides:
    """Count with Lightning's strategy and with ours."""
    from shardplug_lightning import ShardStrategy

    def counts(strategy: Any) -> str:
        loaders: list[DataLoader] = [
            DataLoader(torch.arange(5.0), 2),  # type: ignore[arg-type]
            DataLoader(torch.arange(8.0), batch_sampler=Pairs()),  # type: ignore[arg-type]
            DataLoader(Stream(), 2),
        ]
        found = []
        for loader in loaders:
            try:
                found.append(count(strategy(), loader))
            except Exception:  # noqa: BLE001  # whatever a process that is forked raises
                found.append("refused")
        return f"counted {', '.join(found)} of 5, 8, 8"

    return Sides(counts(lambda: "ddp_fork"), counts(lambda: ShardStrategy(start_method="fork")))


if __name__ == "__main__":
    main(__doc__, PACKAGES, prove)
