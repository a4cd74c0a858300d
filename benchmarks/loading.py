"""Samplers and loaders beside their peers: what it costs to be told what to read."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import BatchSamplerShard as PeerShard
from accelerate.data_loader import prepare_data_loader as peer_prepare
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from benchmarks.permutation import extra_mb
from benchmarks.table import Row, at_least, at_most, median_interleaved, seconds, show
from shardplug import (
    BatchSamplerShard,
    PermutedSampler,
    ShardEngine,
    TorchComm,
    prepare_data_loader,
)
from shardplug.credit import Arrival, in_step
from shardplug.plan.shard import Shard
from shardplug.plan.split import ShardPlan, Split, Tail
from shardplug.testing import Call, LockstepComm, run_ranks

BATCH_SIZE = 32
TIMES_FASTER = {1: 3.0, 8: 6.0, 64: 6.0, 1024: 6.0}  # by number of ranks
LOADER_LIMITS = {1: 1.05, 8: 1.05, 64: 1.05, 1024: 1.5}


def rows() -> list[Row]:
    """Measure everything."""
    return [
        *same_batches(),
        *first_batches(),
        *loaders(),
        *messages(),
        *agreement(),
        *epoch_start(),
        *many_ranks(),
    ]


class Numbers(Dataset[int]):
    """Free samples: sample i is i."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        return index


class Images(Numbers):
    """Free images: always the same one, 3 x 32 x 32 floats."""

    image = torch.rand(3, 32, 32)

    def __getitem__(self, index: int) -> Any:
        return self.image


def drain(items: Iterable[Any]) -> None:
    """Take everything."""
    for _ in items:
        pass


def shuffled(num_samples: int) -> BatchSampler:
    """Shuffle as torch's DataLoader does, the same order each time."""
    torch.manual_seed(1)
    return BatchSampler(RandomSampler(range(num_samples)), BATCH_SIZE, drop_last=False)


def our_shard(num_samples: int, world_size: int) -> Iterable[Any]:
    """Make the batches of one rank, in the middle."""
    return BatchSamplerShard(shuffled(num_samples), world_size, world_size // 2)


def peer_shard(num_samples: int, world_size: int) -> Iterable[Any]:
    """Make the same with accelerate."""
    made: Iterable[Any] = PeerShard(shuffled(num_samples), world_size, world_size // 2)
    return made


def epoch(make: Callable[[int, int], Iterable[Any]], num_samples: int, world_size: int) -> None:
    """Make the batches of one rank's epoch and take them all."""
    drain(make(num_samples, world_size))


def same_batches(num_samples: int = 10**7) -> list[Row]:
    """Compare the batches of one rank's epoch with accelerate's, then time both."""
    found = []
    for world_size, times in TIMES_FASTER.items():
        # Each is seeded when it is made, and draws when it is read.
        if list(our_shard(10**5, world_size)) != list(peer_shard(10**5, world_size)):
            raise SystemExit(f"the batches differ from accelerate's at {world_size} ranks")
        ours_s, peer_s = median_interleaved(
            partial(epoch, our_shard, num_samples, world_size),
            partial(epoch, peer_shard, num_samples, world_size),
            repeats=3,
        )
        what = f"accelerate's batches, one rank of {world_size}, n=1e7"
        found.append(at_least(what, ours_s, peer_s, times=times, name="accelerate"))
    ours_mb = extra_mb(our_shard, num_samples, 8)
    peer_mb = extra_mb(peer_shard, num_samples, 8)
    what = "extra memory for them, 8 ranks"
    return [*found, at_least(what, ours_mb, peer_mb, times=8, unit="MB", name="accelerate")]


def first_batches() -> list[Row]:
    """Time from a user's loader to its first batch, without workers."""

    def first(num_samples: int, world_size: int) -> None:
        order = PermutedSampler(num_samples)
        loader = DataLoader(Numbers(num_samples), BATCH_SIZE, sampler=order)
        next(iter(prepare_data_loader(loader, num_processes=world_size, process_index=1)))

    found = []
    for name, num_samples, world_size in (("1e7", 10**7, 8), ("1e12", 10**12, 10**6)):
        took_s = median(seconds(partial(first, num_samples, world_size)) for _ in range(9))
        what = f"first batch of a loader, n={name}, {world_size:g} ranks"
        found.append(at_most(what, took_s * 1e3, 2, unit="ms"))
    return found


def loaders(num_batches: int = 1000) -> list[Row]:
    """Time an epoch of free samples, shuffled, against as many from a plain DataLoader.

    Ours is shuffled by key: an order of torch.randperm has to be drawn whole by every rank.
    """
    found = []
    for world_size, limit in LOADER_LIMITS.items():
        data = Numbers(num_batches * BATCH_SIZE * world_size)
        plain = DataLoader(Numbers(num_batches * BATCH_SIZE), BATCH_SIZE, shuffle=True)
        whole = DataLoader(data, BATCH_SIZE, shuffle=True)
        place: dict[str, Any] = {"num_processes": world_size, "process_index": world_size // 2}
        keyed = DataLoader(data, BATCH_SIZE, sampler=PermutedSampler(data))
        ours = prepare_data_loader(keyed, **place)
        theirs = peer_prepare(whole, put_on_device=False, **place)
        ours_s, plain_s = median_interleaved(
            partial(drain, ours),
            partial(drain, plain),
            repeats=9,
        )
        peer_s = median(seconds(partial(drain, theirs)) for _ in range(2))
        what = f"loader / plain DataLoader, one rank of {world_size}"
        ratios = ours_s / plain_s, peer_s / plain_s
        found.append(at_most(what, ratios[0], limit, unit="", peer=ratios[1], name="accelerate"))
    return found


def messages() -> list[Row]:
    """Time many batches in one message from a worker against one in each."""
    found = []
    for name, kind, num_batches, times in (
        ("numbers", Numbers, 4000, 5.0),
        ("images", Images, 600, 2.0),
    ):
        plain = DataLoader(kind(num_batches * BATCH_SIZE), BATCH_SIZE, num_workers=2)
        ours = prepare_data_loader(plain, batches_per_message=16)
        ours_s, plain_s = median_interleaved(
            partial(drain, ours),
            partial(drain, plain),
            repeats=3,
        )
        each = 1e6 / num_batches
        what = f"16 batches a message, 2 workers, {name}"
        found.append(
            at_least(what, ours_s * each, plain_s * each, times=times, unit="us", name="DataLoader")
        )
    return found


def agreement(num_steps: int = 2000) -> list[Row]:
    """Time keeping two ranks with parts of different length in step, per step."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(2) as pool:
        place = str(Path(folder) / "ranks")
        taken = pool.starmap(_agreement, [(rank, place, num_steps) for rank in range(2)])
    ours_us, peer_us = taken[0]
    what = "agreement of uneven streams, per step, 2 ranks"
    return [at_least(what, ours_us, peer_us, times=5, unit="us", name="all_reduce")]


def _agreement(rank: int, place: str, num_steps: int) -> tuple[float, float]:
    torch.set_num_threads(1)
    store = dist.FileStore(place, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    comm, flag = TorchComm(), torch.zeros(1)

    def arrivals() -> Iterator[Arrival]:
        return (Arrival(None, 1, 1, step) for step in range(num_steps - 5 * rank))

    def ours() -> None:
        drain(in_step(arrivals(), comm, tail=Tail.PAD, is_cut=True))

    def blocking() -> None:
        for _ in range(num_steps):
            dist.all_reduce(flag)

    ours()
    blocking()
    dist.barrier()
    ours_s, peer_s = median_interleaved(ours, blocking, repeats=5)
    bare_s = median(seconds(lambda: drain(arrivals())) for _ in range(5))
    dist.destroy_process_group()
    return (ours_s - bare_s) / num_steps * 1e6, peer_s / num_steps * 1e6


def epoch_start() -> list[Row]:
    """Count the collectives of a whole second epoch that is shuffled by (seed, epoch)."""
    calls = run_ranks(2, _epoch_start)[0]
    what = "collectives of an epoch shuffled by (seed, epoch)"
    sent = sum(call.num_bytes for call in calls)
    return [
        at_most(what, len(calls), 1, unit=""),
        at_most("sent in it by each rank", sent, 1024, unit="B"),
    ]


def _epoch_start(comm: LockstepComm) -> list[Call]:
    loader = DataLoader(Numbers(100 * BATCH_SIZE), BATCH_SIZE, shuffle=True)
    prepared = ShardEngine(comm=comm, data_seed=0).prepare_loader(loader)
    drain(prepared)
    before = len(comm.calls)
    drain(prepared)
    return comm.calls[before:]


def many_ranks() -> list[Row]:
    """Check the first and last 20 steps of 1024 ranks at n=1e9 in one process."""
    context = get_context("spawn")
    with context.Pool(1) as pool:
        took_s, grown_mb, is_exact = pool.apply(_tile_many_ranks)
    what = "1024 ranks at n=1e9: 40 steps of all ranks tile"
    rows_ = [at_most(f"{what}, time", took_s, 5, unit="s")]
    rows_.append(at_most(f"{what}, memory", grown_mb, 200, unit="MB"))
    rows_.append(Row(f"{what}, exactly", float(is_exact), None, "", "1", is_exact))
    return rows_


def _tile_many_ranks() -> tuple[float, float, bool]:
    import resource  # not there on Windows

    world_size, num_samples, ends = 1024, 10**9, 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seen: list[torch.Tensor] = []
    wanted: list[torch.Tensor] = []

    def check() -> None:
        order = PermutedSampler(num_samples)
        plans = [
            ShardPlan(num_samples, BATCH_SIZE, Shard(rank, world_size), Split.WHOLE, Tail.DROP)
            for rank in range(world_size)
        ]
        last = plans[0].num_steps
        for step in (*range(ends), *range(last - ends, last)):
            positions = torch.tensor([list(plan.positions(step)) for plan in plans])
            seen.append(order.take(positions).flatten())
            first = step * world_size * BATCH_SIZE
            wanted.append(order.take(torch.arange(first, first + world_size * BATCH_SIZE)))

    took_s = seconds(check)
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
    ours, truth = torch.cat(seen), torch.cat(wanted)
    is_exact = bool((ours.sort().values == truth.sort().values).all())
    return took_s, grown_mb, is_exact and ours.unique().numel() == ours.numel()


if __name__ == "__main__":
    show(rows)
