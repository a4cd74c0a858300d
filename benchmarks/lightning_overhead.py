"""What a training step takes under ShardStrategy and under Lightning's DDPStrategy.

    python -m benchmarks.lightning_overhead [--json PATH]

Two gloo ranks, the same loader and model. Short epochs by turns in the same processes, a pair of
ours and the peer's at a time and the one that is first changing from pair to pair; of each epoch
the median step, of each pair the ratio, and of all pairs the median ratio: what else the machine
does strikes both of a pair, and neither a pause nor a slow start weighs in. From batch to batch
only, so that starting and ending a run does not count. Garbage is collected before each epoch, and
what had been imported before is left out of collections, so that none in the middle of an epoch
strikes one side by chance.
"""

from __future__ import annotations

import gc
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.table import Row, at_most, fewer, show

WORLD_SIZE = 2
STEPS = 150
FIRST = 10
"""Steps of an epoch that do not count: they build DDP's buckets, and start what starts late."""
PAIRS = 40
BATCH_SIZE = 32


def rows() -> list[Row]:
    """Measure everything."""
    with tempfile.TemporaryDirectory() as folder, get_context("spawn").Pool(WORLD_SIZE) as pool:
        place = str(Path(folder) / "ranks")
        ours_s, peer_s = pool.map(partial(_train, place), range(WORLD_SIZE), chunksize=1)[0]
    ratios = [ours / peer for ours, peer in zip(ours_s, peer_s, strict=True)]
    return [_row(ratios, median(peer_s))]


def _row(ratios: Sequence[float], peer_s: float) -> Row:
    """Make the row: the peer's median step, and ours as many times it as the pairs tell."""
    low, ratio, high = quantiles(ratios, n=4)
    peer_us = peer_s * 1e6
    what = f"a training step in Lightning, {WORLD_SIZE} ranks"
    row = at_most(what, ratio * peer_us, 1.03 * peer_us, unit="us", peer=peer_us, name="DDP")
    note = (
        f"{len(ratios)} pairs; ours/peer is {ratio:.3f}, half of them within {low:.3f}-{high:.3f}"
    )
    return replace(row, note=note)


def _train(place: str, rank: int) -> tuple[list[float], list[float]]:
    """Train epochs by turns; returns the seconds of a step in each, ours first."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # advice on the number of workers, at every turn
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    store = dist.FileStore(place, WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    os.environ.update(TORCHELASTIC_RUN_ID="benchmark", RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(WORLD_SIZE), LOCAL_WORLD_SIZE=str(WORLD_SIZE), GROUP_RANK="0")
    from lightning.pytorch.strategies import DDPStrategy

    from shardplug_lightning import ShardStrategy

    for strategy in (ShardStrategy(data_seed=1), DDPStrategy()):
        _time_an_epoch(strategy)  # whatever is imported or compiled late
    gc.collect()
    gc.freeze()
    ours: list[float] = []
    peer: list[float] = []
    for turn in range(fewer(PAIRS)):
        pair = [(ours, ShardStrategy(data_seed=1)), (peer, DDPStrategy())]
        for times, strategy in pair[:: -1 if turn % 2 else 1]:
            gc.collect()
            dist.barrier()
            times.append(_time_an_epoch(strategy))
    dist.destroy_process_group()
    return ours, peer


def _time_an_epoch(strategy: Any) -> float:
    """Train an epoch; returns the seconds of its median step, from one batch's end to the next."""
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

    clock = Clock()
    num_samples = STEPS * WORLD_SIZE * BATCH_SIZE
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
    trainer.fit(Network(), DataLoader(data, batch_size=BATCH_SIZE, shuffle=True))
    return median(after - before for before, after in pairwise(clock.ends[FIRST:]))


if __name__ == "__main__":
    show(rows)
