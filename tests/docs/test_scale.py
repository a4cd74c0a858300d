"""The formulas of the page on scale, held against plans, and against ranks that count messages."""

from __future__ import annotations

import io
import json
import re
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from math import ceil
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader, IterableDataset

from shardplug import (
    Comm,
    PermutedSampler,
    ScalerAwareOptimizer,
    ShardEngine,
    StepSyncedScheduler,
    prepare_data_loader,
)
from shardplug.testing import Call, LockstepComm, run_ranks
from tests.blocks import ROOT, need
from tests.launch import run_processes

PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
N, W, B, TOKENS, ALPHA_S, BETA = 10**12, 10_000, 32, 32 * 512 * 8, 20e-6, 25e9
WORLDS = [2, 5, 64]


# -- the formulas, as the page has them --


def padded_steps(n: int, world_size: int, rows: int) -> int:
    return -(-n // (world_size * rows))


def messages_of_a_stream(steps: int) -> int:
    bought = count = 0
    while bought < steps:
        bought += min(2**count, 16)
        count += 1
    return count


def row_of(name: str) -> str:
    """The only row of the page that begins so, but for the signs around words."""
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {name} |")]
    return row


# -- steps and padding --


def plan_of(*arguments: str) -> dict[str, Any]:
    from shardplug.cli import main

    out = io.StringIO()
    with redirect_stdout(out):
        assert main(["plan", "--json", *arguments]) == 0
    (leg,) = json.loads(out.getvalue())["legs"]
    assert isinstance(leg, dict)
    return leg


@pytest.mark.parametrize(("n", "world_size", "rows"), [(N, W, B), (N, 9_999, B), (103, 4, 8)])
def test_steps_and_padding_are_those_of_the_plan(n: int, world_size: int, rows: int) -> None:
    need("typer", "cli")
    size = ("--samples", str(n), "--batch-size", str(rows), "--world-size", str(world_size))
    steps = padded_steps(n, world_size, rows)
    pad = plan_of(*size)
    assert (pad["steps_taken"], pad["padded"], pad["dropped"]) == (
        steps,
        steps * world_size * rows - n,
        0,
    )
    whole = n // (world_size * rows)
    drop = plan_of(*size, "--tail", "drop")
    assert (drop["steps_taken"], drop["padded"], drop["dropped"]) == (
        whole,
        0,
        n - whole * world_size * rows,
    )
    exact = plan_of(*size, "--tail", "exact")
    assert (exact["padded"], exact["dropped"]) == (0, 0)
    assert exact["steps_taken"] <= steps
    if n == N:
        told = [f"{steps:,}", f"{pad['padded']:,}", f"{whole:,}", f"{drop['dropped']:,}"]
        rows_ = ['steps, `tail="pad"`', 'repeated rows, `"pad"`', 'steps, `"drop"`']
        rows_.append('samples dropped, `"drop"`')
        for name, value in zip(rows_, told, strict=True):
            example = row_of(name).split(" | ")[-1]
            assert re.search(rf"(?<![\d,]){value}(?![\d,])", example), (name, value)


# -- messages and bytes --


class Stream(IterableDataset[int]):
    def __init__(self, num_items: int) -> None:
        self.num_items = num_items

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_items))


class Counter:
    """The calls of a rank since it was last asked."""

    def __init__(self, comm: LockstepComm) -> None:
        self.comm, self.seen = comm, 0

    def __call__(self) -> list[Call]:
        new = self.comm.calls[self.seen :]
        self.seen = len(self.comm.calls)
        return new


def ints(num_bytes: int) -> Call:
    return Call("all_gather_ints", num_bytes)


def loader_of(sampler: str, world_size: int) -> DataLoader[Any]:
    data: Any = torch.arange(4 * world_size)
    if sampler == "permuted":
        return DataLoader(data, batch_size=2, sampler=PermutedSampler(len(data)))
    return DataLoader(data, batch_size=2, shuffle=sampler == "shuffled")


def train(comm: LockstepComm, sampler: str) -> None:
    """Two epochs of two steps; each count is that of the page."""
    count = Counter(comm)
    engine = ShardEngine(comm=comm, data_seed=1, gradient_accumulation_steps=2)
    assert count() == []
    weight = torch.nn.Parameter(torch.zeros(()))
    sgd = torch.optim.SGD([weight], lr=0.1)
    optimizer, scheduler = engine.prepare(sgd, torch.optim.lr_scheduler.StepLR(sgd, 1))
    assert count() == []
    loader = engine.prepare(loader_of(sampler, comm.world_size))
    assert count() == [ints(48)]
    for _ in range(2):
        for step, batch in enumerate(loader):
            assert count() == ([] if step else [ints(48)])
            with engine.accumulate():
                engine.backward(weight * batch.float().mean(), valid_rows=loader.valid_rows)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            assert count() == []
            assert len(engine.gather_for_metrics(batch)) == 2 * comm.world_size
            (gathered,) = count()
            assert gathered.name == "all_gather_object"
            assert batch.nbytes < gathered.num_bytes < batch.nbytes + 200
            assert len(json.dumps(engine.state_dict())) < 700
            assert count() == []
    engine.load_state_dict(engine.state_dict())
    assert count() == []
    engine.gather_rank_states()
    (gathered,) = count()
    assert gathered.name == "all_gather_object"
    assert 15_000 < gathered.num_bytes < 25_000


@pytest.mark.parametrize("world_size", WORLDS)
def test_what_ranks_tell_each_other_in_training(world_size: int) -> None:
    for sampler in ("sequential", "shuffled", "permuted"):
        run_ranks(world_size, train, sampler)


def read_stream(comm: LockstepComm, num_items: int, options: dict[str, Any]) -> tuple[int, int]:
    count = Counter(comm)
    loader = prepare_data_loader(DataLoader(Stream(num_items), 1), comm=comm, **options)
    count()
    steps = sum(1 for _ in loader)
    first, *words = count()
    assert first == ints(48)
    assert set(words) == {ints(32)}
    return steps, len(words)


@pytest.mark.parametrize("steps", [1, 2, 15, 16, 31, 32, 80])
@pytest.mark.parametrize("world_size", [2, 5])
def test_words_about_the_end_of_a_stream(world_size: int, steps: int) -> None:
    whole = {"dispatch_batches": False}
    found = run_ranks(world_size, read_stream, steps * world_size, whole)
    assert found == [(steps, messages_of_a_stream(steps))] * world_size


@pytest.mark.parametrize(("longest", "words"), [(15, 4), (16, 5), (47, 6), (48, 7)])
def test_words_where_parts_differ(longest: int, words: int) -> None:
    def read(comm: LockstepComm) -> tuple[int, int]:
        own = longest if comm.rank == 1 else 3
        return read_stream(comm, own, {"already_sharded": True, "tail": "pad"})

    assert messages_of_a_stream(longest) == words
    assert run_ranks(3, read) == [(longest, words)] * 3


def read_dispatched(comm: LockstepComm) -> list[int]:
    count = Counter(comm)
    loader = prepare_data_loader(
        loader_of("sequential", comm.world_size), comm=comm, dispatch_batches=True
    )
    counts = [len(count())]
    for _ in range(3):
        assert sum(1 for _ in loader) == 2
        counts.append(len(count()))
    return counts


def test_messages_of_one_reader() -> None:
    assert run_ranks(3, read_dispatched) == [[2, 3, 1, 1]] * 3


def draw_alike(comm: Comm) -> int:
    generator = torch.Generator()
    data: Any = torch.arange(8)
    user: DataLoader[Any] = DataLoader(
        data,
        2,
        sampler=_OwnSampler(generator),
        generator=generator,
    )
    loader = prepare_data_loader(user, comm=comm, rng_types=["generator"])
    list(loader)
    assert isinstance(comm, LockstepComm)
    sent = [call.num_bytes for call in comm.calls if call.name == "broadcast_object"]
    assert len(sent) == 1
    return sent[0]


class _OwnSampler:
    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(8, generator=self.generator).tolist())

    def __len__(self) -> int:
        return 8


def test_a_generator_that_is_made_equal() -> None:
    from_first, *others = run_ranks(2, draw_alike)
    assert 5_000 < from_first < 5_500
    assert set(others) == {0}


# -- memory --


def test_a_permuted_order_takes_no_memory_at_any_size() -> None:
    def first_batches() -> None:
        data: Any = range(N)
        user: DataLoader[Any] = DataLoader(data, B, sampler=PermutedSampler(N))
        loader = prepare_data_loader(user, num_processes=W, process_index=W - 1)
        batches = iter(loader)
        for _ in range(3):
            next(batches)

    assert peak_bytes(first_batches) < 1e6


def test_going_on_at_nine_tenths_takes_no_longer_walk() -> None:
    """Walking there would take days; the state is as small as at the start."""
    data: Any = range(N)
    user: DataLoader[Any] = DataLoader(data, B, sampler=PermutedSampler(N))
    loader = prepare_data_loader(user, num_processes=W, process_index=W - 1)
    next(iter(loader))
    state = loader.state_dict()
    assert state["consumed"] == W * B
    done = 9 * N // 10 // (W * B) * (W * B)
    loader.load_state_dict({**state, "consumed": done})
    assert peak_bytes(lambda: next(iter(loader))) < 1e6
    after = loader.state_dict()
    assert after["consumed"] == done + W * B
    assert len(json.dumps(after)) < 700
    row = row_of("state of an engine with one loader")
    assert "less than 700 bytes" in row


def test_a_sampler_of_your_own_is_walked() -> None:
    class Walked:
        drawn = 0

        def __iter__(self) -> Iterator[int]:
            for index in range(64):
                Walked.drawn += 1
                yield index

        def __len__(self) -> int:
            return 64

    data: Any = range(64)
    user: DataLoader[Any] = DataLoader(data, 2, sampler=Walked())
    assert len(list(prepare_data_loader(user, num_processes=8, process_index=7))) == 4
    assert Walked.drawn == 64


def head_bytes(world_size: int) -> int:
    return min(1 << 14, max(512, (1 << 18) // world_size))


def own_head_bytes(comm: Comm) -> int:
    return comm._head_bytes  # type: ignore[attr-defined, no-any-return]


def test_the_heads_of_small_messages() -> None:
    assert run_processes(2, own_head_bytes) == [head_bytes(2)] * 2
    assert f"{head_bytes(W)} bytes each on {W:,}" in PAGE
    assert f"{head_bytes(W) * W / 1e6:.1f} MB received" in PAGE
    assert f"{1000 * head_bytes(W) * W / BETA:.1f} ms on the wire" in PAGE


class Counted(LRScheduler):
    """A schedule without a closed form, which counts how often it is moved."""

    moves = 0

    def get_lr(self) -> list[float | torch.Tensor]:
        self.moves += 1
        return [group["lr"] * 0.999 for group in self.optimizer.param_groups]


def evaluations(kind: str, ticks: int, unit: Any) -> int:
    """How often a schedule is evaluated in one step of so many ticks."""
    count = [0]

    def factor(step: int) -> float:
        count[0] += 1
        return 1 / (1 + step)

    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = ScalerAwareOptimizer(torch.optim.SGD([weight], lr=1.0))
    own = Counted(optimizer) if kind == "own" else LambdaLR(optimizer, factor)
    scheduler = StepSyncedScheduler(own, optimizer, num_processes=ticks, unit=unit)
    weight.grad = torch.ones(())
    before = own.moves if isinstance(own, Counted) else count[0]
    optimizer.step()
    scheduler.step()
    return (own.moves if isinstance(own, Counted) else count[0]) - before


def test_evaluations_of_a_schedule() -> None:
    assert evaluations("closed", W, "batches") == evaluations("closed", 3, "batches") == 2
    assert evaluations("own", 100, "batches") == 100
    assert evaluations("own", 100, "updates") == 1
    assert row_of("the same, a schedule without one").endswith(f"| W evaluations | {W:,} |")


def peak_bytes(run: Callable[[], None]) -> int:
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# -- what the page makes of them --


def test_the_examples_follow_from_the_formulas() -> None:
    depth = ceil(W - 1).bit_length()
    examples = {
        "`prepare` of a loader": f"{48 * W // 1000} kB",
        "start of a pass": f"{48 * W // 1000} kB",
        "stream, each rank reading": f"{32 * W // 1000} kB each",
        "`gather_for_metrics`": f"{(32 * 8 + 200) * W / 1e6:.1f} MB for 32 rows of 8 bytes",
        "`gather_rank_states()`": f"{20_000 * W / 1e6:.0f} MB",
        "bytes sent by the reader per step": f"{(W - 1) * TOKENS / 1e9:.1f} GB",
        "time of a step on the wire": f"{1000 * (W - 1) * 128e3 / BETA:.0f} ms",
        "batches held by the reader": f"{3 * W * TOKENS / 1e9:.1f} GB",
        "batches held elsewhere": f"{3 * TOKENS / 1e3:.0f} kB",
    }
    for name, example in examples.items():
        assert row_of(name).endswith(f"| {example} |"), (name, example)
    assert f"{1000 * depth * ALPHA_S:.1f} ms by a tree" in PAGE
    assert f"{(W - 1) * ALPHA_S:.1f} s as a ring" in PAGE
    assert f"that is {int(0.2 * BETA / 128e3):,} ranks" in PAGE
    assert f"a batch it is {int(0.2 * BETA / 19e6)}." in PAGE
    assert f"{messages_of_a_stream(15)} for 15 steps, {messages_of_a_stream(16)} for 16" in PAGE
    assert all(
        messages_of_a_stream(steps) in (steps // 16 + 3, steps // 16 + 4)
        for steps in range(16, 1000)
    )


def test_the_message_of_a_new_part_would_be_seen() -> None:
    def told(comm: LockstepComm) -> list[Call]:
        comm.all_gather_ints([1])
        return Counter(comm)()

    assert run_ranks(2, told) == [[ints(8)]] * 2
