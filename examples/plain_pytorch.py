"""Plain PyTorch: train on any number of ranks, validate on each sample exactly once.

Run it alone, or on as many ranks as you like:

    python examples/plain_pytorch.py
    torchrun --nproc-per-node 2 examples/plain_pytorch.py

Each batch of 120 is shared out among the ranks, so 1, 2, 3, 4, 5, 6 or 8 ranks train the same model
up to rounding. Of these numbers only 1 and 3 divide the 357 validation samples; each sample is
counted once all the same.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

from shardplug import ShardEngine

EPOCHS = 5


def load_data() -> tuple[Subset, Subset]:
    """Load 1797 images of handwritten digits, 8 × 8 pixels: 1440 to train, 357 to validate."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    train_set, val_set = random_split(data, [1440, 357], torch.Generator().manual_seed(0))
    return train_set, val_set


def train_epoch(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer) -> None:
    """Take one optimizer step per batch; every rank takes the same number of steps."""
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


@torch.no_grad()
def count(model: nn.Module, loader: DataLoader, device: torch.device) -> tuple[int, int]:
    """Count right answers and samples over all ranks."""
    model.eval()
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    for images, labels in loader:
        right = (model(images).argmax(dim=1) == labels).sum()
        counts += torch.stack([right, torch.tensor(len(labels), device=device)])
    if dist.is_initialized():
        dist.all_reduce(counts)
    return int(counts[0]), int(counts[1])


def main() -> None:
    """Train, validate, and say whether each validation sample was counted once."""
    torch.manual_seed(0)
    engine = ShardEngine(split_batches=True, data_seed=0)
    train_set, val_set = load_data()
    train_loader = engine.prepare(DataLoader(train_set, batch_size=120, shuffle=True))
    val_loader = engine.prepare_loader(DataLoader(val_set, batch_size=120), tail="exact")

    model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model.to(engine.device)
    if engine.world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    right, seen = 0, 0
    for epoch in range(EPOCHS):
        train_epoch(model, train_loader, optimizer)
        right, seen = count(model, val_loader, engine.device)
        if engine.is_main:
            print(f"epoch {epoch}: {right}/{seen} right")
    if seen != len(val_set):
        sys.exit(f"{seen} validation samples were counted, but the set has {len(val_set)}.")
    if engine.is_main:
        print(f"ranks: {engine.world_size}, accuracy: {right}/{seen} = {right / seen:.4f}")
        print(f"validation is exact: {seen} samples were counted, and the set has {len(val_set)}")


if __name__ == "__main__":
    main()
