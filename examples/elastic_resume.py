"""Train, be stopped anywhere, and go on from there, on as many ranks as there are then.

    torchrun --nproc-per-node 2 examples/elastic_resume.py checkpoints
    torchrun --nproc-per-node 3 examples/elastic_resume.py checkpoints   # after kill -9, say

Every few steps rank 0 saves all of the run in one file. A new start goes on from the newest one: no
digit of the epoch is seen again, none is left out. Each batch of 120 is shared out among the ranks,
so that 1, 2, 3, 4, 5 or 6 ranks train the same model up to rounding, and so do any of them in turn.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, random_split

import checkpoints  # beside this file
from shardplug import ShardEngine

EPOCHS, BATCH_SIZE, SAVE_EVERY, NUM_TRAIN, NUM_VAL = 6, 120, 5, 1440, 357


class Run:
    """One training, whichever ranks it has had so far."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder, self.step = folder, 0
        self.engine = ShardEngine(split_batches=True, data_seed=0)
        digits = load_digits()
        images = torch.tensor(digits.data, dtype=torch.float32) / 16
        data = TensorDataset(images, torch.tensor(digits.target), torch.arange(len(images)))
        train, val = random_split(data, [NUM_TRAIN, NUM_VAL], torch.Generator().manual_seed(0))

        self.network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.network.to(self.engine.device)
        alone = self.engine.world_size == 1
        self.model = self.network if alone else DistributedDataParallel(self.network)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
        self.loader, self.optimizer, self.schedule = self.engine.prepare(
            DataLoader(train, BATCH_SIZE, shuffle=True), optimizer, schedule
        )
        self.val_loader = self.engine.prepare_loader(DataLoader(val, BATCH_SIZE), tail="exact")
        self.resume()

    def resume(self) -> None:
        """Go on from the newest checkpoint that is whole, if there is one."""
        saved = checkpoints.newest(self.folder)
        if saved is not None:
            self.step = saved["step"]
            self.network.load_state_dict(saved["network"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.schedule.load_state_dict(saved["schedule"])
            self.engine.load_state_dict(saved["engine"], rank_states=saved["ranks"])

    def save(self) -> None:
        """Save all of it. Collective: every rank must call it."""
        content = {
            "step": self.step,
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "engine": self.engine.state_dict(),
            "ranks": self.engine.gather_rank_states(),
        }
        if self.engine.is_main:
            checkpoints.save(content, self.folder, self.step)

    def train(self) -> Iterator[list[int]]:
        """Take the steps that are left; yield after each which digits this rank had in it."""
        for _ in range(self.loader.epoch, EPOCHS):
            for images, labels, numbers in self.loader:
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(self.model(images), labels).backward()
                self.optimizer.step()
                self.schedule.step()
                self.step += 1
                if self.step % SAVE_EVERY == 0:
                    self.save()
                yield numbers.tolist()
        self.save()

    @torch.no_grad()
    def validate(self) -> tuple[int, int]:
        """Count right answers and digits over all ranks."""
        counts = torch.zeros(2, dtype=torch.int64, device=self.engine.device)
        for images, labels, _ in self.val_loader:
            right = (self.model(images).argmax(dim=1) == labels).sum()
            counts += torch.stack([right, torch.tensor(len(labels), device=right.device)])
        if dist.is_initialized():
            dist.all_reduce(counts)
        return int(counts[0]), int(counts[1])


def main() -> None:
    """Train to the end, from wherever the run stands."""
    run = Run(Path(sys.argv[1] if len(sys.argv) > 1 else "checkpoints"))
    if run.engine.is_main:
        print(f"ranks: {run.engine.world_size}, going on after step {run.step}", flush=True)
    for _ in run.train():
        if run.engine.is_main and run.step % SAVE_EVERY == 0:
            print(f"step {run.step} is saved", flush=True)
    right, seen = run.validate()
    if run.engine.is_main:
        print(f"after step {run.step}: accuracy {right}/{seen} = {right / seen:.2%}")


if __name__ == "__main__":
    main()
