"""Stop a training on two ranks inside an epoch, and go on with three: no sample is lost.

    python examples/lightning_elastic_resume.py

Sample i is the number i. The order of an epoch follows from the seed and the epoch alone, and the
checkpoint says how much of it is done; the rest is dealt to however many ranks there are now.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from shardplug_lightning import ShardStrategy


class Tells(LightningModule):
    """Tells what it trains on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        """Tell, and make a loss of it."""
        where = f"{self.trainer.world_size} ranks, epoch {self.current_epoch}"
        print(f"{where}, rank {self.global_rank}: {batch.int().tolist()}", flush=True)
        return self.weight * batch.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(devices: int, folder: Path, checkpoint: Path | None, **until: Any) -> None:
    """Train on some ranks, which are forked from this process."""
    trainer = Trainer(
        strategy=ShardStrategy(start_method="fork", data_seed=1),
        accelerator="cpu",
        devices=devices,
        callbacks=[ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **until,
    )
    numbers: Any = torch.arange(24.0)
    loader = DataLoader(numbers, batch_size=2, shuffle=True)
    trainer.fit(Tells(), loader, ckpt_path=checkpoint)


def main() -> None:
    """Train two steps on two ranks, and the rest on three."""
    with tempfile.TemporaryDirectory() as name:
        before, after = Path(name, "before"), Path(name, "after")
        train(2, before, None, max_steps=2)
        train(3, after, before / "step=2.ckpt", max_epochs=2)


if __name__ == "__main__":
    for each in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(each).setLevel(logging.WARNING)
    with warnings.catch_warnings():
        # Lightning 2.6 on torch from 2.9 on.
        warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", ".*does not have many workers")  # numbers need none
        warnings.filterwarnings("ignore", ".*dirpath has changed")  # so that both can be looked at
        main()
