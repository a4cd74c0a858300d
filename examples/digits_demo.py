"""Train on handwritten digits with Lightning on two ranks, and count who saw what.

    python examples/digits_demo.py        # two ranks
    python examples/digits_demo.py 3      # or three

A small network learns 1436 of scikit-learn's 8 × 8 images, and is validated on the other 361, which
neither two nor three ranks can share evenly. Every sample brings its number along, so the tables at
the end are made of what the ranks really saw. The same weights are then validated on one rank, and
on as many as before under Lightning's own DDP strategy.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities import suggested_max_num_workers
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

from shardplug_lightning import ShardStrategy

EPOCHS, NUM_TRAIN, NUM_VAL = 6, 1436, 361
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
}


class Digits(LightningModule):
    """A network of two layers that counts each sample it is shown on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.trained: list[Counter[int]] = [
            Counter() for _ in range(EPOCHS)
        ]  # how often each sample was seen
        self.validated: Counter[int] = Counter()
        self.num_right = 0

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Count the samples, and learn from them."""
        images, labels, samples = batch
        self.trained[self.current_epoch].update(samples.tolist())
        return nn.functional.cross_entropy(self.layers(images), labels)

    def on_validation_epoch_start(self) -> None:
        """Begin to count."""
        self.validated, self.num_right = Counter(), 0

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        """Count the samples, and the right answers."""
        images, labels, samples = batch
        right = self.layers(images).argmax(dim=1) == labels
        self.validated.update(samples.tolist())
        self.num_right += int(right.sum())
        if self.trainer.state.fn == "fit":  # which has a progress bar
            self.log("accuracy", right.float().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


def load_data() -> tuple[Subset, Subset]:
    """Load the images, their labels and their numbers; part them at random."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    data = TensorDataset(images, torch.tensor(digits.target), torch.arange(len(images)))
    train, val = random_split(data, [NUM_TRAIN, NUM_VAL], torch.Generator().manual_seed(0))
    return train, val


def gather(trainer: Trainer, mine: object) -> list:
    """Collect what each rank has, by rank."""
    by_rank = [mine] * trainer.world_size
    if trainer.world_size > 1:
        dist.all_gather_object(by_rank, mine)
    return by_rank


def describe(seen_by_rank: list[Counter[int]], num_samples: int) -> str:
    """Say how many samples each rank saw, and how many were seen once, twice, and never."""
    times = Counter(sum(seen_by_rank, Counter()).values())
    ranks = " + ".join(str(seen.total()) for seen in seen_by_rank)
    return f"{ranks:>17}{times[1]:>8}{times[2]:>8}{num_samples - times.total():>8}"


def print_tables(trained_by_rank: list, validated: dict[str, list]) -> None:
    """Print what was seen in training and in each validation, and what that comes to."""
    columns = f"{'seen by rank':>17}{'once':>8}{'twice':>8}{'never':>8}"
    print(f"\n{f'Training, {NUM_TRAIN} digits':<24}{columns}")
    for epoch, seen_by_rank in enumerate(zip(*trained_by_rank, strict=True)):
        print(f"{f'  epoch {epoch}':<24}{describe(list(seen_by_rank), NUM_TRAIN)}")
    print("  (filled up from the epoch's start, so that all ranks take the same number of steps)")
    print(f"\n{f'Validation, {NUM_VAL} digits':<24}{columns}   accuracy")
    results = []
    for name, by_rank in validated.items():
        right = sum(num_right for _, num_right in by_rank)
        counted = sum(seen.total() for seen, _ in by_rank)
        results.append((right, counted))
        described = describe([seen for seen, _ in by_rank], NUM_VAL)
        print(f"  {name:<22}{described}   {right}/{counted} = {right / counted:.2%}")
    sharded, alone, repeating = results
    if sharded != alone:
        sys.exit(f"\nThe ranks got {sharded} right and counted, one rank got {alone}.")
    print(
        f"\nEach of the {NUM_VAL} digits counts once, so the ranks together measure what one rank "
        f"measures;\nLightning's own sampler counted {repeating[1] - NUM_VAL} of them again."
    )


def main() -> None:
    """Train and validate sharded, validate otherwise, and print on rank 0 what was seen."""
    devices = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    seed_everything(1, verbose=False)
    model, (train, val) = Digits(), load_data()
    num_workers = 2 if suggested_max_num_workers(1) > 1 else 0
    workers: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    train_loader = DataLoader(train, batch_size=32, shuffle=True, **workers)
    val_loader = DataLoader(val, batch_size=32, **workers)

    trainer = Trainer(
        strategy=ShardStrategy(), accelerator="cpu", devices=devices, max_epochs=EPOCHS, **QUIET
    )
    if trainer.is_global_zero:
        print(f"Training on {NUM_TRAIN} digits, {devices} ranks, {EPOCHS} epochs:", flush=True)
    trainer.fit(model, train_loader, val_loader)
    trained_by_rank = gather(trainer, model.trained)
    validated = {f"shardplug, {devices} ranks": gather(trainer, (model.validated, model.num_right))}

    for name, strategy, ranks in (
        ("one rank", "auto", 1),
        (f"Lightning DDP, {devices} ranks", "ddp", devices),
    ):
        other = Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=ranks,
            enable_progress_bar=False,
            **QUIET,
        )
        other.validate(model, val_loader, verbose=False)
        validated[name] = gather(other, (model.validated, model.num_right))
    if trainer.is_global_zero:
        print_tables(trained_by_rank, validated)


if __name__ == "__main__":
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with warnings.catch_warnings():
        # Lightning 2.6 on torch from 2.9 on.
        warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
        # Lightning says of its own sampler what the last line of the table shows.
        warnings.filterwarnings("ignore", "Using `DistributedSampler` with the dataloaders")
        main()
