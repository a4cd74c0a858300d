"""A Lightning training on a shuffle of 24 samples, stopped in its epoch at step 2: what comes then.

Checkpoints are Lightning's own on both sides. Without a state of the loader, Lightning goes on
with the number of steps, and the data starts over.
"""

import tempfile
from typing import Any

import torch
from torch.utils.data import DataLoader

from proving import Sides, main, trainer_of

PACKAGES = ("lightning",)


def train(strategy: Any, folder: str, steps: int, checkpoint: str | None) -> list[int]:
    """Train up to a step, save, and tell what was trained on."""
    from lightning.pytorch import LightningModule
    from lightning.pytorch.callbacks import ModelCheckpoint

    seen: list[int] = []

    class Tells(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            seen.extend(batch.int().tolist())
            return self.weight * batch.mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = trainer_of(strategy, 1, max_steps=steps, callbacks=[saver])
    loader: DataLoader = DataLoader(torch.arange(24.0), 4, shuffle=True)  # type: ignore[arg-type]
    trainer.fit(Tells(), loader, ckpt_path=checkpoint)
    return seen


def prove() -> Sides:
    """Stop at step 2 of 6, go on to the end of the epoch, and count."""
    from shardplug_lightning import ShardSingleDeviceStrategy

    def told(strategy: Any) -> str:
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            seen = train(strategy(), folder, 2, None)
            seen += train(strategy(), folder, 6, f"{folder}/step=2.ckpt")
        twice = len(seen) - len(set(seen))
        return f"{twice} of 24 twice, {24 - len(set(seen))} never"

    return Sides(told(lambda: "auto"), told(lambda: ShardSingleDeviceStrategy(device="cpu")))


if __name__ == "__main__":
    main(__doc__, PACKAGES, prove)
