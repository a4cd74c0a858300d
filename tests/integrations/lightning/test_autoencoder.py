"""The autoencoder of Lightning's first tutorial, written as users write it, learns digits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch.utils.data import DataLoader, TensorDataset, random_split

from shardplug import Comm
from shardplug_lightning import ShardStrategy
from tests.integrations.lightning.ranks import make_trainer, run_ranks

pytest.importorskip("sklearn", reason="it has the digits")

HELD_OUT = 297
"""An odd number: two ranks have different numbers of samples, and of batches."""


class LitAutoEncoder(LightningModule):
    """Knows nothing of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Sequential(
            torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3)
        )
        self.decoder = torch.nn.Sequential(
            torch.nn.Linear(3, 32), torch.nn.ReLU(), torch.nn.Linear(32, 64)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch), sync_dist=True)

    def _loss(self, batch: Any) -> torch.Tensor:
        images, _ = batch
        images = images.view(images.size(0), -1)
        return torch.nn.functional.mse_loss(self.decoder(self.encoder(images)), images)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def digits() -> tuple[Any, Any]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    whole = TensorDataset(torch.tensor(images / 16).float().view(-1, 8, 8), torch.tensor(labels))
    sizes = [len(whole) - HELD_OUT, HELD_OUT]
    training, held_out = random_split(whole, sizes, torch.Generator().manual_seed(1))
    return training, held_out


def train(comm: Comm) -> tuple[dict[str, float], dict[str, float], float]:
    seed_everything(7)
    training, held_out = digits()
    model = LitAutoEncoder()
    trainer = make_trainer(ShardStrategy(), comm.world_size, max_epochs=3)
    loaders = DataLoader(training, batch_size=32, shuffle=True), DataLoader(held_out, batch_size=32)
    (before,) = trainer.validate(model, loaders[1], verbose=False)
    trainer.fit(model, *loaders)
    fitted = {name: value.item() for name, value in trainer.callback_metrics.items()}
    (tested,) = trainer.test(model, loaders[1], verbose=False)
    with torch.no_grad():
        images = torch.stack([image for image, _ in held_out]).view(HELD_OUT, -1)
        by_hand = torch.nn.functional.mse_loss(model.decoder(model.encoder(images)), images)
    return dict(before), {**fitted, **tested}, by_hand.item()


def test_an_autoencoder_learns_digits_on_one_rank_and_on_two() -> None:
    ((before_alone, after_alone, by_hand_alone),) = run_ranks(1, train)
    first, second = run_ranks(2, train)
    before, after, by_hand = first
    # The same weights have the same loss, whoever validates them: each sample counts once.
    assert before["val_loss"] == pytest.approx(before_alone["val_loss"], rel=1e-6)
    for weights, found in ((by_hand, after), (by_hand_alone, after_alone)):
        assert found["val_loss"] == pytest.approx(weights, rel=1e-5)
        assert found["test_loss"] == pytest.approx(weights, rel=1e-5)
        assert found["val_loss"] < 0.6 * before["val_loss"]
        assert found["train_loss"] < 0.8 * before["val_loss"]
    assert second[0] == before
    assert second[1]["val_loss"] == after["val_loss"]
    assert second[2] == by_hand
