"""Accumulate gradients on any number of ranks; the curve is that of one big batch.

    python examples/accumulation.py
    torchrun --nproc-per-node 2 examples/accumulation.py

Each optimizer step takes three micro-batches of 16 from every rank. The data do not divide evenly:
the last window of an epoch is short, and padded on some ranks. `engine.backward` weighs each loss
by the real rows that it stands for, so the steps are those of a single process that takes the
same samples in one batch, which every rank trains beside it to compare.
"""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from shardplug import ShardEngine, prepare_data_loader

EPOCHS = 3
MICRO_BATCH = 16
WINDOW = 3


def make_model() -> nn.Module:
    """Make a small network, the same one each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def main() -> None:
    """Train both ways and compare the curves."""
    engine = ShardEngine(gradient_accumulation_steps=WINDOW, data_seed=0)
    digits = load_digits()
    data = TensorDataset(
        torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    )

    model = make_model().to(engine.device)
    if engine.world_size > 1:
        model = DistributedDataParallel(model)
    loader, optimizer = engine.prepare(
        DataLoader(data, MICRO_BATCH, shuffle=True), torch.optim.SGD(model.parameters(), lr=0.1)
    )

    alone = make_model().to(engine.device)
    big = DataLoader(data, MICRO_BATCH * WINDOW * engine.world_size, shuffle=True)
    whole = prepare_data_loader(
        big, num_processes=1, process_index=0, use_seedable_sampler=True, data_seed=0
    )
    descent = torch.optim.SGD(alone.parameters(), lr=0.1)

    furthest = 0.0
    for epoch in range(EPOCHS):
        for images, labels in loader:
            with engine.accumulate(model):
                # The mean over the real rows; a batch of padding alone counts for nothing.
                rows = loader.valid_rows or len(labels)
                loss = nn.functional.cross_entropy(model(images)[:rows], labels[:rows])
                engine.backward(loss, valid_rows=loader.valid_rows)
                optimizer.step()
                optimizer.zero_grad()
        for images, labels in whole:
            images, labels = images.to(engine.device), labels.to(engine.device)
            descent.zero_grad()
            nn.functional.cross_entropy(alone(images), labels).backward()
            descent.step()
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        apart = max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)
        furthest = max(furthest, apart)
        if engine.is_main:
            print(f"epoch {epoch}  steps {optimizer.outcome.num_steps}  apart {apart:.1e}")
    if engine.is_main:
        print(f"ranks: {engine.world_size}, micro-batches a step: {WINDOW}")
        print(f"parameters stay within {furthest:.1e} of those of one big batch")
    if furthest > 1e-5:
        sys.exit("the two curves have come apart")


if __name__ == "__main__":
    main()
