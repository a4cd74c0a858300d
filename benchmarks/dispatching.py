"""One rank reads for all, beside accelerate's dispatcher, on real gloo ranks of one machine.

Each figure is that of the rank that has the worst; a step is the median of its steps. The time of a
step without compute is the time from batch to batch. What is left of the waiting is the time spent
in ``next`` beside a step of 20 ms that needs no CPU.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from benchmarks.table import Row, at_least, at_most, show, without_figure
from shardplug import CommError, DataLoaderDispatcher, dispatch, inbox, prepare_data_loader
from shardplug.channel import open_channel
from shardplug.messages import HEAD_BYTES
from shardplug.wires import receive_exactly

WORLDS = (2, 4)
ROWS = 32
STEPS, WARM = 12, 3
COMPUTE_S = 0.02
LONG = 10_000
IMAGE = (3, 224, 224)
IMAGE_BYTES = ROWS * 3 * 224 * 224 * 4


class Images(Dataset[torch.Tensor]):
    """Makes each image when it is asked for."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.full(IMAGE, float(at))


class Ready:
    """A collate function that has its batch already."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __call__(self, ids: Any) -> Any:
        return self.batch


def made(num_samples: int) -> DataLoader[Any]:
    return DataLoader(Images(num_samples), ROWS)


def ready(num_samples: int) -> DataLoader[Any]:
    ids: Any = range(num_samples)
    return DataLoader(ids, ROWS, collate_fn=Ready(torch.rand(ROWS, *IMAGE)))


def tokens(num_samples: int) -> DataLoader[Any]:
    ids: Any = range(num_samples)
    batch = {name: torch.randint(1000, (ROWS, 128)) for name in ("ids", "mask", "labels")}
    return DataLoader(ids, ROWS, collate_fn=Ready(batch))


WORKS: dict[str, Callable[[int], DataLoader[Any]]] = {
    "images made by the data set": made,
    "images ready made": ready,
    "token ids": tokens,
}
# By work: how many times the peer's is ours at least, on 2 and 4 ranks, without compute and beside.
TARGETS: dict[str, dict[int, tuple[float, float]]] = {
    "images made by the data set": {2: (4, 15), 4: (5, 15)},
    "images ready made": {2: (12, 50), 4: (10, 50)},
    "token ids": {2: (3, 10), 4: (5, 20)},
}


@dataclass(frozen=True)
class Timed:
    """Of one loader on one rank: seconds of a step without compute, and of waiting beside it."""

    step_s: float
    waiting_s: float


@dataclass(frozen=True)
class Measured:
    """What one rank has measured: by work, ours, the peer's, and ours on pretended hosts."""

    ours: dict[str, Timed]
    peer: dict[str, Timed]
    apart: dict[str, Timed]
    bytes_shared: float
    bytes_apart: float
    held_bytes: float
    grown_bytes: float


def rows() -> list[Row]:
    """Measure everything."""
    found = []
    for world_size in WORLDS:
        with tempfile.TemporaryDirectory() as folder, get_context("spawn").Pool(world_size) as pool:
            body = partial(measure, str(Path(folder) / "ranks"), world_size)
            by_rank = pool.map(body, range(world_size), chunksize=1)
        found += rows_of(world_size, by_rank)
    return [*found, *left_behind()]


def rows_of(world_size: int, by_rank: list[Measured]) -> list[Row]:
    """Make the rows of one number of ranks."""
    where = f"{world_size} ranks"
    found = []
    for work, targets in TARGETS.items():
        ours, peer, apart = (
            worst(each[work] for each in timed)
            for timed in (
                [each.ours for each in by_rank],
                [each.peer for each in by_rank],
                [each.apart for each in by_rank],
            )
        )
        for_step, for_waiting = targets[world_size]
        found += [
            in_ms(f"{work}, {where}: step", ours.step_s, peer.step_s, for_step),
            in_ms(f"{work}, {where}: waiting", ours.waiting_s, peer.waiting_s, for_waiting),
            in_ms(f"{work}, {where}, hosts apart: step", apart.step_s, peer.step_s, 3),
        ]
        if work == "images ready made":
            what = f"{work}, {where}, hosts apart: waiting"
            found.append(in_ms(what, apart.waiting_s, peer.waiting_s, 10))
    others, reader = by_rank[1:], by_rank[0]
    mb = 1e-6
    return [
        *found,
        at_most(
            f"sockets per rank and step of 19 MB, {where}, one host",
            max(each.bytes_shared for each in others),
            1024,
            unit="B",
        ),
        at_most(
            f"the same beside its rows, {where}, hosts apart",
            max(each.bytes_apart for each in others) - IMAGE_BYTES,
            1024,
            unit="B",
        ),
        at_most(
            f"rounds held on the reader, {where}",
            round(reader.held_bytes / (world_size * IMAGE_BYTES), 1),
            3,
            unit="rounds",
        ),
        at_most(
            f"batches held elsewhere, {where}",
            round(max(each.held_bytes for each in others) / IMAGE_BYTES, 1),
            2,
            unit="batches",
        ),
        at_most(
            f"memory grown over {LONG} steps, {where}",
            max(each.grown_bytes for each in by_rank) * mb,
            5,
            unit="MB",
        ),
    ]


def in_ms(what: str, ours_s: float, peer_s: float, times: float) -> Row:
    return at_least(what, ours_s * 1e3, peer_s * 1e3, times=times, unit="ms", name="accelerate")


def worst(timed: Iterable[Timed]) -> Timed:
    together = list(timed)
    return Timed(max(each.step_s for each in together), max(each.waiting_s for each in together))


def measure(place: str, world_size: int, rank: int) -> Measured:
    """Be one rank."""
    torch.set_num_threads(1)
    store = dist.FileStore(place, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    # accelerate takes over a group that is there; it reads the rank from here.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # asked for, but not used
    from accelerate import Accelerator  # after the group is there
    from accelerate.utils import DataLoaderConfiguration

    peer = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    num_samples = ROWS * world_size * STEPS
    ours, theirs, apart = {}, {}, {}
    for work, make in WORKS.items():
        loader, short = make(num_samples), make(ROWS * world_size * WARM)
        for each in (prepare_data_loader(short, dispatch_batches=True), peer.prepare(short)):
            assert sum(1 for _ in each) == WARM  # the allocator has to learn what it is asked for
        ours[work] = timed(prepare_data_loader(loader, dispatch_batches=True))
        theirs[work] = timed(peer.prepare_data_loader(loader))
        apart[work] = timed(dispatched_apart(loader, world_size))
    held_bytes = hold(prepare_data_loader(ready(num_samples), dispatch_batches=True))
    bytes_shared = received(prepare_data_loader(ready(num_samples), dispatch_batches=True))
    bytes_apart = received(dispatched_apart(ready(num_samples), world_size))
    grown_bytes = grow(prepare_data_loader(tokens(ROWS * world_size * LONG), dispatch_batches=True))
    dist.barrier()
    dist.destroy_process_group()
    return Measured(ours, theirs, apart, bytes_shared, bytes_apart, held_bytes, grown_bytes)


def dispatched_apart(loader: DataLoader[Any], world_size: int) -> Iterable[Any]:
    """Dispatch as if each rank had a host of its own."""
    hosts = [str(each) for each in range(world_size)]
    made = prepare_data_loader(loader, dispatch_batches=True)
    assert isinstance(made, DataLoaderDispatcher)
    with mock.patch.object(dispatch, "open_channel", partial(open_channel, hosts=hosts)):
        next(batches := iter(made))  # opens the channel
        batches.close()  # type: ignore[attr-defined]  # a generator
    return made


def timed(loader: Iterable[Any]) -> Timed:
    """Read a pass without compute, and one beside it."""
    dist.barrier()
    ends = [time.perf_counter() for _ in loader]
    dist.barrier()
    steps = [stop - start for start, stop in pairwise(ends[WARM - 1 :])]
    waits = list(waiting(iter(loader)))
    dist.barrier()
    return Timed(median(steps), median(waits[WARM:]))


def waiting(batches: Iterator[Any]) -> Iterator[float]:
    """Tell how long each batch was waited for, and compute in between."""
    while True:
        before_s = time.perf_counter()
        try:
            batch = next(batches)
        except StopIteration:
            return
        yield time.perf_counter() - before_s
        time.sleep(COMPUTE_S)
        del batch


def hold(loader: Iterable[Any]) -> float:
    """Tell by how much memory in use is larger in the middle of a pass than before, at most.

    What ranks share with the reader is counted there.
    """
    is_reader = dist.get_rank() == dispatch.READER
    dist.barrier()
    before, most = resident_bytes(with_shared=is_reader), 0
    for _ in loader:
        time.sleep(0.01)  # what comes after is read meanwhile
        most = max(most, resident_bytes(with_shared=is_reader))
    dist.barrier()
    return float(most - before)


def received(loader: Iterable[Any]) -> float:
    """Count the bytes that a rank takes from its sockets in a step."""
    counts = []

    def count(connection: Any, view: Any) -> None:
        counts.append(len(view))
        receive_exactly(connection, view)

    def count_head(self: Any) -> Any:
        counts.append(HEAD_BYTES)
        return read_head(self)

    read_head = inbox.Inbox._read_head
    with (
        mock.patch.object(inbox, "receive_exactly", count),
        mock.patch.object(inbox.Inbox, "_read_head", count_head),
    ):
        num_steps = sum(1 for _ in loader)
    return sum(counts) / num_steps


def grow(loader: Iterable[Any]) -> float:
    """Tell by how much memory grows over many steps."""
    early = 0
    for step, _ in enumerate(loader):
        if step == LONG // 10:
            early = resident_bytes()
    return float(max(0, resident_bytes() - early))


def left_behind() -> list[Row]:
    """Kill one of two ranks in the middle, each in its turn, and look for what is left."""
    named = Path("/dev/shm")
    if not named.is_dir():
        return []
    what = "pieces of shared memory left by killed ranks"
    before, context = set(named.iterdir()), get_context("spawn")
    for victim in range(2):
        with tempfile.TemporaryDirectory() as folder:
            place = str(Path(folder) / "ranks")
            ranks = [
                context.Process(target=_read_until_killed, args=(place, victim, rank))
                for rank in range(2)
            ]
            for each in ranks:
                each.start()
            for each in ranks:
                each.join(60)
            ended = [each.exitcode for each in ranks]
            wanted = [-signal.SIGKILL if rank == victim else 0 for rank in range(2)]
            for each in ranks:
                each.kill()
            if ended != wanted:
                why = f"Of two ranks, rank {victim} killed, the exit codes are {ended}."
                return [without_figure(what, why)]
    left = set(named.iterdir()) - before
    return [at_most(what, len(left), 0, unit="")]


def _read_until_killed(place: str, victim: int, rank: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(place, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        for step, _ in enumerate(prepare_data_loader(ready(ROWS * 100), dispatch_batches=True)):
            if step == WARM and rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
    except CommError:
        return  # as it should be
    raise SystemExit("The other rank was killed, and nobody noticed.")


def resident_bytes(*, with_shared: bool = True) -> int:
    """Count the bytes of this process that are in memory."""
    resident, shared = map(int, Path("/proc/self/statm").read_text(encoding="ascii").split()[1:3])
    pages = resident if with_shared else resident - shared
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    show(rows)
