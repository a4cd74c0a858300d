"""Train a small GAN on handwritten digits: two optimizers that share one gradient scaler.

    python examples/gan_two_optimizers.py

The discriminator steps on every batch, the generator on every other one. The scaler's scale is
updated once per training step, whoever took part in it, and a step whose gradients overflow is
skipped for the optimizer it happened to alone. The scale starts far too high, so that the first
steps are skipped: watch the schedules wait for the real ones.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardplug import ShardEngine

EPOCHS = 5
NOISE = 16


def main() -> None:
    """Train, and say what became of the steps."""
    torch.manual_seed(0)
    digits = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    generator = nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
    discriminator = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    engine = ShardEngine(data_seed=0, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**127))
    make, judge = (
        torch.optim.Adam(part.parameters(), lr=2e-3, betas=(0.5, 0.999))
        for part in (generator, discriminator)
    )
    loader, make, judge, decay = engine.prepare(
        DataLoader(TensorDataset(digits), batch_size=64, shuffle=True, drop_last=True),
        make,
        judge,
        torch.optim.lr_scheduler.ExponentialLR(judge, gamma=0.999),
    )
    says_real = nn.BCEWithLogitsLoss(reduction="sum")
    loss = 0.0
    for epoch in range(EPOCHS):
        for number, (real,) in enumerate(loader):
            fake = generator(torch.randn(len(real), NOISE))
            scores = discriminator(torch.cat([real, fake.detach()])).squeeze(1)
            truth = torch.cat([torch.ones(len(real)), torch.zeros(len(real))])
            judge.zero_grad()
            judged = says_real(scores, truth)
            engine.backward(judged)
            loss = judged.item() / len(truth)
            judge.step()
            decay.step()
            if number % 2 == 0:
                make.zero_grad()
                fooled = says_real(discriminator(fake).squeeze(1), torch.ones(len(real)))
                engine.backward(fooled)
                make.step()
        print(f"epoch {epoch}  discriminator loss {loss:.3f}")
    for name, optimizer in (("discriminator", judge), ("generator", make)):
        outcome = optimizer.outcome
        skipped = outcome.num_windows - outcome.num_steps
        print(f"{name:13}  {outcome.num_steps} steps taken, {skipped} skipped by the scaler")
    print(f"learning rate of the discriminator {judge.param_groups[0]['lr']:.6f}")
    print(f"that is 0.002 * 0.999 ** {judge.outcome.num_steps}: it waited for the real steps")


if __name__ == "__main__":
    main()
