"""The road of a dispatcher alone: ready parcels from one rank to others, on one machine."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardplug.channel import Channel, open_channel
from shardplug.comm_torch import TorchComm

STEPS = 60
WARM = 10


def images() -> Any:
    return torch.rand(32, 3, 224, 224)


def tokens() -> Any:
    return {name: torch.randint(1000, (32, 128)) for name in ("ids", "mask", "labels")}


def measure(
    place: str, make: Callable[[], Any], world_size: int, are_apart: bool, rank: int
) -> Any:
    """Give the ms of a step without compute, and the ms of waiting beside 20 ms, on each rank."""
    torch.set_num_threads(1)
    store = dist.FileStore(place, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    hosts = [str(each) for each in range(world_size)] if are_apart else None
    channel = open_channel(TorchComm(), hosts=hosts)
    parcels = [make() for _ in range(world_size)] if rank == 0 else []
    result = [
        run(channel, number, rank, parcels, rest_s) for number, rest_s in enumerate((0, 0.02))
    ]
    dist.barrier()
    channel.close()
    dist.destroy_process_group()
    return result


def run(channel: Channel, number: int, rank: int, parcels: list[Any], rest_s: float) -> float:
    channel.begin(number)
    dist.barrier()
    if rank == 0:
        sender = threading.Thread(target=send_all, args=(channel, parcels))
        sender.start()
        sender.join()
        dist.barrier()
        return 0.0
    waits = []
    held: list[Any] = []  # as a training loop does
    start_s = 0.0
    for step in range(STEPS):
        if step == WARM:
            start_s = time.perf_counter()
        before_s = time.perf_counter()
        held[:] = [channel.receive()]
        waits.append(time.perf_counter() - before_s)
        if rest_s:
            time.sleep(rest_s)
    total_s = time.perf_counter() - start_s
    dist.barrier()
    return 1e3 * (statistics.median(waits[WARM:]) if rest_s else total_s / (STEPS - WARM))


def send_all(channel: Channel, parcels: list[Any]) -> None:
    for _ in range(STEPS):
        channel.send(parcels)


def main() -> None:
    for world_size in (2, 4):
        for make in (images, tokens):
            for are_apart in (False, True):
                with (
                    tempfile.TemporaryDirectory() as folder,
                    get_context("spawn").Pool(world_size) as pool,
                ):
                    body = partial(measure, str(Path(folder) / "s"), make, world_size, are_apart)
                    by_rank = pool.map(body, range(world_size), chunksize=1)
                step_ms = max(each[0] for each in by_rank)
                wait_ms = max(each[1] for each in by_rank)
                way = "TCP" if are_apart else "shared memory"
                print(
                    f"{world_size} ranks, {make.__name__}, {way}: {step_ms:.2f} ms a step, "
                    f"{wait_ms:.3f} ms of waiting beside 20 ms"
                )


if __name__ == "__main__":
    main()
