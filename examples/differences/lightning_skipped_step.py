"""Lightning with mixed precision: the first step overflows, the scaler skips it.

The learning rate is 1.0, and halves at each step that happens.
"""

from typing import Any

import torch
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from proving import Sides, main, trainer_of

PACKAGES = ("lightning",)


def train(strategy: Any) -> str:
    """Train one step, and tell the learning rate."""
    from lightning.pytorch import LightningModule
    from lightning.pytorch.plugins import MixedPrecision

    class Overflows(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.weight * float("inf")

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            schedule = {"scheduler": StepLR(optimizer, 1, 0.5), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    precision: Any = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    trainer = trainer_of(strategy, 1, max_steps=1, plugins=[precision])
    loader: DataLoader = DataLoader(torch.zeros(2))  # type: ignore[arg-type]
    trainer.fit(Overflows(), loader)
    return f"skipped, learning rate {trainer.optimizers[0].param_groups[0]['lr']:g}"


def prove() -> Sides:
    """Train with Lightning's strategy and with ours."""
    from shardplug_lightning import ShardSingleDeviceStrategy

    return Sides(train("auto"), train(ShardSingleDeviceStrategy(device="cpu")))


if __name__ == "__main__":
    main(__doc__, PACKAGES, prove)
