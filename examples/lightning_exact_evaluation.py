"""Test ten samples on three ranks with Lightning: each counts exactly once.

    python examples/lightning_exact_evaluation.py

Sample i is the number i, so the mean over all of them is 4.5. Under Lightning's own DDP strategy,
ranks fill up with samples 0 and 1, and the mean is 3.83.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from shardplug_lightning import ShardStrategy


class Mean(LightningModule):
    """Measures the mean of what it is shown."""

    def test_step(self, batch: torch.Tensor) -> None:
        """Show the batch, and log its mean."""
        print(f"rank {self.global_rank} tests {batch.int().tolist()}", flush=True)
        self.log("mean", batch.mean(), sync_dist=True)


def main() -> None:
    """Test on three processes, which are forked from this one, and print what they agree on."""
    trainer = Trainer(
        strategy=ShardStrategy(start_method="fork"),
        accelerator="cpu",
        devices=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    numbers: Any = torch.arange(10.0)
    loader = DataLoader(numbers, batch_size=4)
    (logged,) = trainer.test(Mean(), loader, verbose=False)
    print(f"mean over all ranks: {logged['mean']}")


if __name__ == "__main__":
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with warnings.catch_warnings():
        # Lightning 2.6 on torch from 2.9 on.
        warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", ".*does not have many workers")  # ten numbers need none
        main()
