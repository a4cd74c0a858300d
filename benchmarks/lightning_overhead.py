"""What a training step takes under ShardStrategy and under Lightning's DDPStrategy.

    python -m benchmarks.lightning_overhead [--json PATH]

Two gloo ranks, the same loader and model, in turns; from the first step of an epoch to its last, so
that starting and ending a run does not count.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
import warnings
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.table import Row, at_most, show

WORLD_SIZE = 2
STEPS = 200
REPEATS = 9


def rows() -> list[Row]:
    """Measure everything."""
    with tempfile.TemporaryDirectory() as folder, get_context("spawn").Pool(WORLD_SIZE) as pool:
        place = str(Path(folder) / "ranks")
        ours_s, peer_s = pool.map(partial(_train, place), range(WORLD_SIZE), chunksize=1)[0]
    what = f"a training step in Lightning, {WORLD_SIZE} ranks"
    return [
        at_most(what, ours_s * 1e6, peer_s * 1.03e6, unit="us", peer=peer_s * 1e6, name="DDP"),
    ]


def _train(place: str, rank: int) -> tuple[float, float]:
    """Time steps by turns; returns the medians over the turns, ours first."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # advice on the number of workers, at every turn
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    store = dist.FileStore(place, WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    os.environ.update(TORCHELASTIC_RUN_ID="benchmark", RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(WORLD_SIZE), LOCAL_WORLD_SIZE=str(WORLD_SIZE), GROUP_RANK="0")
    from lightning.pytorch.strategies import DDPStrategy

    from shardplug_lightning import ShardStrategy

    ours: list[float] = []
    peer: list[float] = []
    for turn in range(REPEATS):
        pair = [(ours, ShardStrategy(data_seed=1)), (peer, DDPStrategy())]
        for times, strategy in pair[:: -1 if turn % 2 else 1]:
            dist.barrier()
            times.append(_time_an_epoch(strategy))
    dist.destroy_process_group()
    return median(ours), median(peer)


def _time_an_epoch(strategy: Any) -> float:
    """Train an epoch; returns the seconds of a step."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    class Network(LightningModule):
        """A small one."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)
            )

        def training_step(self, batch: Any) -> torch.Tensor:
            inputs, targets = batch
            return torch.nn.functional.cross_entropy(self.layers(inputs), targets)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Clock(Callback):
        """Notes when batches end."""

        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_train_batch_end(self, *args: Any) -> None:
            self.ends.append(time.perf_counter())

    clock, size = Clock(), 32
    num_samples = STEPS * WORLD_SIZE * size
    data = TensorDataset(torch.randn(num_samples, 64), torch.randint(10, (num_samples,)))
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=WORLD_SIZE,
        max_epochs=1,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Network(), DataLoader(data, batch_size=size, shuffle=True))
    # The first steps build DDP's buckets, and start whatever starts late.
    return (clock.ends[-1] - clock.ends[9]) / (len(clock.ends) - 10)


if __name__ == "__main__":
    show(rows)
