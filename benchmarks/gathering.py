"""Gathering results for metrics beside accelerate, on real gloo ranks."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from benchmarks.table import Row, at_least, median_interleaved, show
from shardplug import gather_for_metrics, prepare_data_loader

WORLD_SIZE = 4
STEPS = 50


def rows() -> list[Row]:
    """Measure everything."""
    with tempfile.TemporaryDirectory() as folder, get_context("spawn").Pool(WORLD_SIZE) as pool:
        place = str(Path(folder) / "ranks")
        ours_s, peer_s = pool.map(partial(_gather, place), range(WORLD_SIZE), chunksize=1)[0]
    what = f"gather_for_metrics of 3 tensors, {WORLD_SIZE} ranks"
    return [at_least(what, ours_s * 1e6, peer_s * 1e6, times=2, unit="us", name="accelerate")]


def _gather(place: str, rank: int) -> tuple[float, float]:
    torch.set_num_threads(1)
    store = dist.FileStore(place, WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    # accelerate takes over a group that is there; it reads the rank from here.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # asked for, but not used
    from accelerate import Accelerator  # after the group is there

    peer = Accelerator(cpu=True)
    data: Any = torch.arange(32 * WORLD_SIZE * 4)
    ours = prepare_data_loader(DataLoader(data, 32))
    next(held := iter(ours))
    theirs = peer.prepare_data_loader(DataLoader(data, 32))
    next(iter(theirs))
    results = torch.rand(32, 10), torch.arange(32), torch.rand(32)

    def gather_ours() -> None:
        for _ in range(STEPS):
            gather_for_metrics(results, ours)

    def gather_theirs() -> None:
        for _ in range(STEPS):
            peer.gather_for_metrics(results)

    gather_ours()
    gather_theirs()
    dist.barrier()
    ours_s, peer_s = median_interleaved(gather_ours, gather_theirs, repeats=7)
    held.close()  # type: ignore[attr-defined]  # a generator
    dist.destroy_process_group()
    return ours_s / STEPS, peer_s / STEPS


if __name__ == "__main__":
    show(rows)
