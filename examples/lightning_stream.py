"""A LightningDataModule whose data is a stream: one rank reads it, each rank gets its own rows.

    python examples/lightning_stream.py

Nobody knows how long a stream is. Here rank 0 opens it, and sends the others their batches; at the
end all ranks stop together, and validation counts each sample once.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader, IterableDataset

from shardplug_lightning import ShardMonitor, ShardStrategy


class Lines(IterableDataset):
    """The numbers from 0, as if they came over a wire; it says who reads them."""

    def __init__(self, num_lines: int) -> None:
        self.num_lines = num_lines

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Read line by line."""
        print(f"{self.num_lines} lines are read by process {os.getpid()}", flush=True)
        for line in range(self.num_lines):
            yield torch.tensor(float(line))


class Wire(LightningDataModule):
    """The stream to train on, and the one to validate on."""

    def train_dataloader(self) -> DataLoader:
        """Read fourteen lines."""
        return DataLoader(Lines(14), batch_size=2)

    def val_dataloader(self) -> DataLoader:
        """Read five lines."""
        return DataLoader(Lines(5), batch_size=2)


class Mean(LightningModule):
    """Tells what it trains on, and measures the mean of what it validates."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        """Tell, and make a loss of it."""
        print(f"rank {self.global_rank} trains on {batch.int().tolist()}", flush=True)
        return self.weight * batch.mean()

    def validation_step(self, batch: torch.Tensor) -> None:
        """Log the mean of a batch."""
        self.log("mean", batch.mean(), sync_dist=True)

    def on_validation_end(self) -> None:
        """Tell the mean over all ranks."""
        if self.trainer.is_global_zero:
            print(f"validated mean: {self.trainer.callback_metrics['mean']}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    """Train an epoch on two processes, which are forked from this one."""
    trainer = Trainer(
        strategy=ShardStrategy(start_method="fork"),
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        callbacks=[ShardMonitor()],
        logger=False,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Mean(), datamodule=Wire())


if __name__ == "__main__":
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    monitor = logging.getLogger("shardplug_lightning.monitor")
    monitor.addHandler(logging.StreamHandler())
    monitor.setLevel(logging.INFO)
    with warnings.catch_warnings():
        # Lightning 2.6 on torch from 2.9 on.
        warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", ".*does not have many workers")  # numbers need none
        main()
