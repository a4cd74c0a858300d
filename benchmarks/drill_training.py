"""The training of the drills: small, the same on any number of ranks, written down step by step.

    torchrun ... -m benchmarks.drill_training FOLDER --epochs 20

Each start is an attempt with a folder of its own, where each rank writes down which samples it has
in a step before it takes it. What a killed attempt did after the checkpoint that the next one finds
is lost with it: `benchmarks.drill_account` reads what survives.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path
from typing import IO, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from examples import checkpoints
from shardplug import ShardEngine
from shardplug.comm_torch import current_comm, start_process_group

# The last batch of an epoch is short, so that it has padding on some numbers of ranks.
NUM_SAMPLES, BATCH_SIZE, NUM_FEATURES, SAVE_EVERY = 250, 24, 8, 5
STEPS_PER_EPOCH = math.ceil(NUM_SAMPLES / BATCH_SIZE)
BALLAST_BYTES = 2 << 20  # makes a checkpoint take a while to write


class Points(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Points of a noisy plane, each with its number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(NUM_SAMPLES, NUM_FEATURES, generator=generator)
        noise = torch.randn(NUM_SAMPLES, generator=generator)
        self.outputs = self.inputs.sum(dim=1) + noise

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.inputs[index], self.outputs[index], index


class Training:
    """A run of the drills, from wherever its newest checkpoint is."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.step = folder, 0
        self.engine = ShardEngine(split_batches=True, data_seed=5)
        self.network = torch.nn.Linear(NUM_FEATURES, 1)
        torch.nn.init.zeros_(self.network.weight)
        torch.nn.init.zeros_(self.network.bias)
        alone = self.engine.world_size == 1
        self.model = self.network if alone else DistributedDataParallel(self.network)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
        loader = DataLoader(Points(), BATCH_SIZE, shuffle=True)
        self.optimizer: Any
        self.loader, self.optimizer, self.schedule = self.engine.prepare(
            loader, optimizer, schedule
        )
        saved = checkpoints.newest(checkpoints_of(folder))
        if saved is not None:
            self.step = saved["step"]
            self.network.load_state_dict(saved["network"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.schedule.load_state_dict(saved["schedule"])
            self.engine.load_state_dict(saved["engine"], rank_states=saved["ranks"])

    def train(self, epochs: int, ledger: IO[str], *, step_s: float = 0.0) -> None:
        """Take the steps that are left, each written down before it is taken."""
        for epoch in range(self.loader.epoch, epochs):
            for inputs, outputs, numbers in self.loader:
                real = self.loader.valid_rows
                self.step += 1
                seen = ",".join(map(str, numbers[:real].tolist()))
                ledger.write(f"{self.step} {epoch} {seen or '-'}\n")
                ledger.flush()
                self.optimizer.zero_grad()
                with self.engine.accumulate(self.model):
                    apart = (self.model(inputs).squeeze(1) - outputs)[:real]
                    loss = apart.square().sum() / max(real, 1)
                    self.engine.backward(loss, valid_rows=real)
                    self.optimizer.step()
                    self.schedule.step()
                if self.step % SAVE_EVERY == 0:
                    self.save()
                time.sleep(step_s)
        self.save()

    def save(self) -> None:
        """Save all of it. Collective: every rank must call it."""
        content = {
            "step": self.step,
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "engine": self.engine.state_dict(),
            "ranks": self.engine.gather_rank_states(),
            "ballast": torch.zeros(BALLAST_BYTES, dtype=torch.uint8),
        }
        if self.engine.is_main:
            checkpoints.save(content, checkpoints_of(self.folder), self.step)


def checkpoints_of(folder: Path) -> Path:
    """Name the place of a run's checkpoints."""
    return folder / "checkpoints"


def open_ledger(folder: Path) -> IO[str]:
    """Begin an attempt. Collective: every rank must call it.

    The first line is to say which process this is, and after which step it goes on.
    """
    comm = current_comm()
    attempts = folder / "attempts"
    name: str | None = None
    if comm.rank == 0:
        attempts.mkdir(parents=True, exist_ok=True)
        name = f"{sum(1 for _ in attempts.iterdir()):04d}"
        (attempts / name).mkdir()
    place = attempts / str(comm.broadcast_object(name))
    return (place / f"{comm.rank}-of-{comm.world_size}.txt").open("x", encoding="utf-8")


def train(folder: Path, epochs: int, *, step_s: float = 0.0) -> None:
    """Train to the end, from wherever the run stands. Collective: every rank must call it.

    Args:
        folder: Where the run keeps all it writes.
        epochs: How many there are in all.
        step_s: How much longer than it needs a step is to take.
    """
    training = Training(folder)
    with open_ledger(folder) as ledger:
        ledger.write(f"{os.getpid()} {training.step}\n")
        ledger.flush()
        training.train(epochs, ledger, step_s=step_s)


def main() -> None:
    """Train as far as asked for, from wherever the run stands."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--timeout-s", type=float, help="of collectives")
    parser.add_argument("--step-s", type=float, default=0.0, help="to wait after each step")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start_process_group(timeout_s=arguments.timeout_s)
    train(arguments.folder, arguments.epochs, step_s=arguments.step_s)


if __name__ == "__main__":
    main()
