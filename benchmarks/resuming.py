"""Going on in the middle of an epoch, beside the peers: what it costs, and what a state weighs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader as peer_prepare
from accelerate.data_loader import skip_first_batches as peer_skip
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.loading import BATCH_SIZE, Numbers, drain
from benchmarks.table import Row, at_least, at_most, median_interleaved, seconds, show
from shardplug import Comm, PermutedSampler, ShardEngine, prepare_data_loader
from shardplug.testing import run_ranks

LATE, EARLY = 0.9, 0.01  # how far into the epoch
STREAM_LENGTH, TRANSFORM_S = 20_000, 100e-6


def rows() -> list[Row]:
    """Measure everything."""
    return [
        *keyed_order(),
        *drawn_order(),
        *streams(),
        *sizes(),
        *state_dicts(),
        *seeded_samples(),
    ]


# An order of the loader's own: any position at once.


def keyed(num_samples: int, num_shards: int) -> Any:
    """Prepare a loader that shuffles by key, as rank 0."""
    loader = DataLoader(
        Numbers(num_samples), BATCH_SIZE, sampler=PermutedSampler(num_samples, seed=1)
    )
    return prepare_data_loader(loader, num_processes=num_shards, process_index=0)


def state_at(share: float, make: Callable[[], Any]) -> dict[str, Any]:
    """Take the state of a loader in its first epoch, as if some share of it were done."""
    loader = make()
    next(iter(loader))
    state: dict[str, Any] = loader.state_dict()
    step = loader.total_batch_size
    return {**state, "consumed": int(share * loader.total_dataset_length) // step * step}


def go_on(loader: Any, state: dict[str, Any]) -> Any:
    """Load a state, and take the first batch."""
    loader.load_state_dict(state)
    return next(iter(loader))


def keyed_order(num_samples: int = 10**8, num_shards: int = 64, repeats: int = 21) -> list[Row]:
    """Time going on late in an epoch that is shuffled by key, and early."""
    make = partial(keyed, num_samples, num_shards)
    late, early = state_at(LATE, make), state_at(EARLY, make)
    order = PermutedSampler(num_samples, seed=1)
    if go_on(make(), late).tolist() != [order[late["consumed"] + row] for row in range(BATCH_SIZE)]:
        raise SystemExit("the batch after loading is not the next one")
    # New loaders: what is set up once is part of the cost.
    for_late = iter([make() for _ in range(repeats)])
    for_early = iter([make() for _ in range(repeats)])
    late_s, early_s = median_interleaved(
        lambda: go_on(next(for_late), late), lambda: go_on(next(for_early), early), repeats=repeats
    )
    what = f"load, first batch: n=1e8, shuffled by key, rank 0 of {num_shards}"
    return [
        at_most(f"{what}, at 90 %", late_s * 1e3, 2, unit="ms"),
        at_most("the same at 90 % / at 1 %", late_s / early_s, 1.3, unit=""),
    ]


# The order of torch.randperm, which has to be drawn.


def drawn_order(num_samples: int = 10**7, num_shards: int = 8, repeats: int = 3) -> list[Row]:
    """Time the same in an order that torch.randperm draws, beside the peers."""
    data = Numbers(num_samples)

    def ours(num_shards: int = num_shards) -> Any:
        loader = DataLoader(data, BATCH_SIZE, shuffle=True, generator=seeded())
        return prepare_data_loader(loader, num_processes=num_shards, process_index=0)

    def of_accelerate() -> None:
        loader = DataLoader(data, BATCH_SIZE, shuffle=True, generator=seeded())
        prepared = peer_prepare(
            loader,
            num_processes=num_shards,
            process_index=0,
            put_on_device=False,
            use_seedable_sampler=True,
        )
        next(iter(peer_skip(prepared, int(LATE * len(prepared)))))

    def of_torchdata() -> None:
        loader = stateful()
        loader.load_state_dict(peer_state)
        next(iter(loader))

    def stateful() -> Any:
        return StatefulDataLoader(data, BATCH_SIZE, shuffle=True, generator=seeded())

    peer_state = stateful_state(stateful, int(LATE * num_samples) // BATCH_SIZE)
    state = state_at(LATE, ours)
    ours_s, accelerate_s = median_interleaved(
        lambda: go_on(ours(), state), of_accelerate, repeats=repeats
    )
    alone = state_at(LATE, lambda: ours(1))
    alone_s, torchdata_s = median_interleaved(
        lambda: go_on(ours(1), alone), of_torchdata, repeats=repeats
    )
    what = "prepare, load, first batch at 90 %: n=1e7, randperm"
    name = "accelerate, skip_first_batches"
    return [
        at_least(f"{what}, rank 0 of {num_shards}", ours_s, accelerate_s, times=3, name=name),
        at_least(f"{what}, 1 rank", alone_s, torchdata_s, times=10, name="StatefulDataLoader"),
    ]


def seeded() -> torch.Generator:
    """Make a generator that draws the same each time."""
    return torch.Generator().manual_seed(1)


def stateful_state(make: Callable[[], Any], step: int) -> dict[str, Any]:
    """Take a state of torchdata's loader, as if some steps were done: its counters, moved on."""
    loader = make()
    next(iter(loader))
    state: dict[str, Any] = loader.state_dict()
    return _moved(state, step)


def _moved(state: dict[str, Any], step: int) -> dict[str, Any]:
    places = {"_sampler_iter_yielded": step, "_num_yielded": step}
    places |= {"samples_yielded": step * BATCH_SIZE, "yielded": step * BATCH_SIZE}
    return {
        key: _moved(value, step) if isinstance(value, dict) else places.get(key, value)
        for key, value in state.items()
    }


# Streams whose items cost something to make.


class Transformed(IterableDataset[int]):
    """A stream of numbers that take a while each; it writes down which ones were made."""

    def __init__(
        self, numbers: range = range(STREAM_LENGTH), duration_s: float = TRANSFORM_S
    ) -> None:
        self.left, self.duration_s = numbers, duration_s
        self.made: list[int] = []

    def __iter__(self) -> Iterator[int]:
        numbers, self.left = self.left, self.left[:0]
        for place, number in enumerate(numbers, 1):
            self.left = numbers[place:]
            busy(self.duration_s)
            self.made.append(number)
            yield number


class Jumping(Transformed):
    """One that goes on from a state, and can be parted."""

    def state_dict(self) -> dict[str, int]:
        """Tell what is left."""
        return {"start": self.left.start, "stop": self.left.stop, "step": self.left.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there."""
        self.left = range(state["start"], state["stop"], state["step"])


class Parted(Jumping):
    """One of which each rank reads its part."""

    def shard(self, num_shards: int, index: int) -> Parted:
        """Return one of the parts."""
        part = Parted(self.left[index::num_shards], self.duration_s)
        part.made = self.made
        return part


def busy(duration_s: float) -> None:
    """Compute for a while."""
    until = time.perf_counter() + duration_s
    while time.perf_counter() < until:
        pass


def streams() -> list[Row]:
    """Time going on in a stream that can jump, and count what it makes on the way."""
    steps = int(LATE * STREAM_LENGTH) // BATCH_SIZE

    def prepared(data: Transformed) -> Any:
        return prepare_data_loader(DataLoader(data, BATCH_SIZE), dispatch_batches=False)

    before = iter(loader := prepared(Jumping(duration_s=0)))
    for _ in range(steps):
        next(before)
    state, wanted = loader.state_dict(), next(before).tolist()
    ours, theirs = Jumping(), Transformed()
    ours_s = seconds(lambda: go_on(prepared(ours), state))
    if go_on(prepared(Jumping(duration_s=0)), state).tolist() != wanted:
        raise SystemExit("the stream does not go on where it was")

    def of_accelerate() -> None:
        loader = peer_prepare(
            DataLoader(theirs, BATCH_SIZE), put_on_device=False, dispatch_batches=False
        )
        next(iter(peer_skip(loader, steps)))

    peer_s = seconds(of_accelerate)
    name = "accelerate"
    what = f"stream, items of {TRANSFORM_S * 1e6:.0f} us, 90 % of {STREAM_LENGTH}"
    by_rank = run_ranks(2, _made_by_part)
    return [
        at_least(f"{what}: load, first batch", ours_s, peer_s, times=100, name=name),
        at_most(
            f"{what}: made in vain",
            sum(number < wanted[0] for number in ours.made),
            0,
            unit="items",
            peer=sum(number < wanted[0] for number in theirs.made),
            name=name,
        ),
        at_most("the same, parted among 2 ranks that jump", sum(by_rank), 0, unit="items"),
    ]


def _made_by_part(comm: Comm) -> int:
    def engine_over(data: Parted) -> tuple[ShardEngine, Any]:
        engine = ShardEngine(comm=comm, data_seed=0)
        loader = DataLoader(data, BATCH_SIZE)
        return engine, engine.prepare_loader(loader, dispatch_batches=False)

    engine, loader = engine_over(Parted(duration_s=0))
    before = iter(loader)
    for _ in range(int(LATE * STREAM_LENGTH) // BATCH_SIZE // comm.world_size):
        next(before)
    state, rank_states = engine.state_dict(), engine.gather_rank_states()
    wanted = next(before).tolist()
    data = Parted(duration_s=0)
    engine, loader = engine_over(data)
    engine.load_state_dict(state, rank_states)
    if next(iter(loader)).tolist() != wanted:
        raise SystemExit("a part of the stream does not go on where it was")
    return sum(number < wanted[0] for number in data.made)


# The state itself.


def sizes() -> list[Row]:
    """Weigh the state of a loader and of an engine, as JSON."""
    loader = keyed(10**12, 10**6)
    state_of_loader = {**state_at(LATE, lambda: keyed(10**12, 10**6)), "extra_rows": 31}
    engine = ShardEngine(data_seed=2**62)
    engine.prepare(DataLoader(Numbers(10**12), BATCH_SIZE, sampler=PermutedSampler(10**12)))
    peer = stateful_state(lambda: StatefulDataLoader(Numbers(1000), BATCH_SIZE, shuffle=True), 9)
    loader.load_state_dict(state_of_loader)
    peer_bytes = sum(len(torch.as_tensor(each).numpy().tobytes()) for each in tensors_in(peer))
    name = "StatefulDataLoader, tensors alone"
    return [
        at_most(
            "state of a loader, n=1e12, 10^6 ranks",
            len(json.dumps(state_of_loader)),
            1024,
            unit="bytes",
            peer=peer_bytes,
            name=name,
        ),
        at_most(
            "state of an engine with it", len(json.dumps(engine.state_dict())), 1024, unit="bytes"
        ),
    ]


def tensors_in(state: Any) -> Iterator[torch.Tensor]:
    """Find the tensors in a state."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors_in(value)


def state_dicts(num_batches: int = 1000) -> list[Row]:
    """Time `state_dict` in a pass, and loops that call it in each step."""
    data = Numbers(num_batches * BATCH_SIZE)
    loader = prepare_data_loader(DataLoader(data, BATCH_SIZE, shuffle=True))
    batches = iter(loader)
    next(batches)
    calls = 10_000

    def ask() -> None:
        for _ in range(calls):
            loader.state_dict()

    took_s = min(seconds(ask) / calls for _ in range(15))  # other load only adds to it
    ours, plain = loop_ratio(loader)
    peer, peer_plain = loop_ratio(StatefulDataLoader(data, BATCH_SIZE, shuffle=True))
    what = "loop with state_dict() in each step / without"
    return [
        at_most("state_dict()", took_s * 1e6, 2, unit="us"),
        at_most(
            what, ours / plain, 1.1, unit="", peer=peer / peer_plain, name="StatefulDataLoader"
        ),
    ]


def loop_ratio(loader: Any) -> tuple[float, float]:
    """Time a loop that asks for the state in each step, and one that does not."""

    def asking() -> None:
        for _ in loader:
            loader.state_dict()

    return median_interleaved(asking, lambda: drain(loader), repeats=11)


def seeded_samples(num_samples: int = 20_000) -> list[Row]:
    """Time seeding before each sample, per sample, beside seeding all generators by hand."""
    loader = DataLoader(Numbers(num_samples), BATCH_SIZE)
    seeding = prepare_data_loader(loader, seed_samples=True, data_seed=0, use_seedable_sampler=True)
    seeding_s, plain_s = median_interleaved(
        lambda: drain(seeding), lambda: drain(prepare_data_loader(loader)), repeats=5
    )
    peer_s = median(seconds(lambda: torch.manual_seed(7)) for _ in range(99))
    took_us = (seeding_s - plain_s) / num_samples * 1e6
    return [
        at_most(
            "seed_samples, per sample",
            took_us,
            15,
            unit="us",
            peer=peer_s * 1e6,
            name="manual_seed",
        )
    ]


if __name__ == "__main__":
    show(rows)
