"""A model that writes down what it sees, so that it is known of a run that did not end well."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

Epochs = dict[int, list[list[int]]]
"""The samples of each batch, in each epoch."""


class Learner(LightningModule):
    """Learns what depends on the order, and writes its samples down before anything else.

    Args:
        notes: Where it does.
        is_estimating: Whether the number of steps is asked for where optimizers are configured.
    """

    def __init__(self, notes: Path, *, is_estimating: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.notes = notes
        self.is_estimating = is_estimating

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        parts = batch.values() if isinstance(batch, Mapping) else batch
        # A loader that has ended beside a longer one gives none.
        present = [part for part in parts if part is not None]
        flat = batch if isinstance(batch, torch.Tensor) else torch.cat(present)
        with self.notes.open("a", encoding="utf-8") as file:
            samples = " ".join(str(int(value)) for value in flat)
            file.write(f"{self.current_epoch} {batch_idx} {samples}\n")
        inputs = torch.stack([flat / 100, torch.sin(flat), torch.ones_like(flat)])
        loss: torch.Tensor = ((self.weight @ inputs - 1.0) ** 2).mean()
        return loss

    def configure_optimizers(self) -> Any:
        if self.is_estimating:
            assert self.trainer.estimated_stepping_batches > 0
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        by_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        by_epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        return [optimizer], [
            {"scheduler": by_step, "interval": "step"},
            {"scheduler": by_epoch, "interval": "epoch"},
        ]


class SaveAt(Callback):
    """Saves a checkpoint after some batches of the run."""

    def __init__(self, folder: Path, batches: Collection[int]) -> None:
        self.folder, self.batches, self.done = folder, batches, 0

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.done += 1
        if self.done in self.batches:
            trainer.save_checkpoint(self.folder / f"{self.done}.ckpt")


def read(folder: Path, notes: str, num_ranks: int, *, stop: int | None = None) -> list[Epochs]:
    """Read what each rank has written down, up to some batch of the run."""
    by_rank = []
    for rank in range(num_ranks):
        epochs: Epochs = {}
        for line in (folder / f"{notes}-{rank}").read_text(encoding="utf-8").splitlines()[:stop]:
            epoch, _, *samples = map(int, line.split())
            epochs.setdefault(epoch, []).append(samples)
        by_rank.append(epochs)
    return by_rank


def joined(before: Epochs, after: Epochs) -> Epochs:
    """Put what was seen before a stop and after it one behind the other."""
    epochs = {epoch: [*batches] for epoch, batches in before.items()}
    for epoch, batches in after.items():
        epochs.setdefault(epoch, []).extend(batches)
    return epochs
