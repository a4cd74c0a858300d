"""Map-style loaders on real ranks: each has its own random state and its own memory."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler

from shardplug import Comm, CommError, ShardEngine, Tail, TorchComm, prepare_data_loader
from tests import laws
from tests.launch import run_processes
from tests.laws import Case, RankRun

SECONDS = 10.0  # far less than what gloo waits; a busy machine is slow


def seeded_apart(comm: Comm) -> None:
    """Give every rank a random state of its own, the same in every run."""
    assert isinstance(comm, TorchComm)
    torch.manual_seed(100 + comm.rank)
    np.random.seed(100 + comm.rank)
    random.seed(100 + comm.rank)


def loader_over(n: int, batch_size: int = 2, **options: Any) -> DataLoader[Any]:
    samples: Any = torch.arange(n)
    return DataLoader(samples, batch_size=batch_size, **options)


def order_of(seed: int, n: int) -> list[int]:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()


# Shuffling.


def shuffle(comm: Comm, options: dict[str, Any]) -> tuple[list[RankRun], bool]:
    seeded_apart(comm)
    loader = prepare_data_loader(loader_over(16, shuffle=True), **options)
    before = torch.get_rng_state()
    epochs = [laws.loader_rank(loader) for _ in range(2)]
    return epochs, torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("options", "seed"),
    [
        ({"use_seedable_sampler": True}, 100),
        ({"use_seedable_sampler": True, "data_seed": 5}, 5),
        ({}, None),
    ],
)
def test_ranks_that_are_seeded_differently_shuffle_alike(
    options: dict[str, Any], seed: int | None
) -> None:
    if seed is None:
        torch.manual_seed(100)
        seed = int(torch.randint(2**62, ()))
    by_rank = run_processes(2, shuffle, options)
    for epoch in range(2):
        run = tuple(epochs[epoch] for epochs, _ in by_rank)
        order = order_of(seed + epoch, 16)
        laws.one_pass(lambda _, run=run: run, Case(16, 2, 2), order=order)  # type: ignore[misc]
    assert [is_unmoved for _, is_unmoved in by_rank] == [True, True]


def shuffle_with_workers(comm: Comm) -> list[list[list[int]]]:
    seeded_apart(comm)
    # A worker whose coverage data comes with a warning must not end with an error for that.
    warnings.simplefilter("default")
    # A child of the forkserver would start its workers through one more, which imports anew.
    workers: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
    loader = ShardEngine().prepare_loader(
        loader_over(16, shuffle=True, **workers), use_stateful_dataloader=True
    )
    return [[batch.tolist() for batch in loader] for _ in range(2)]


def test_so_they_do_when_a_stateful_loader_reads_with_a_worker() -> None:
    by_rank = run_processes(2, shuffle_with_workers)
    for epoch in range(2):
        seen = [one for own in by_rank for batch in own[epoch] for one in batch]
        assert sorted(seen) == list(range(16))


# Orders that are drawn, and generators that are made equal.


def draw(comm: Comm, kind: str, options: dict[str, Any]) -> Any:
    seeded_apart(comm)
    sampler: Any = Subset(range(9))
    if kind == "torch's subset":
        sampler = SubsetRandomSampler(range(9))
    if kind == "opaque":
        sampler = Random(9)
    loader = prepare_data_loader(loader_over(9, sampler=sampler), **options)
    try:
        batches = [batch.tolist() for batch in loader]
    except CommError as error:
        return str(error)
    return batches, torch.rand(1).item(), np.random.rand(), random.random()


class Subset(SubsetRandomSampler):
    """A user's own: what else it does is not known."""


class Random:
    """Draws from python's generator."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(self.n), self.n))

    def __len__(self) -> int:
        return self.n


def test_orders_drawn_differently_are_an_error_on_all_ranks() -> None:
    for kind, name in (("subset", "Subset"), ("opaque", "Random")):
        messages = run_processes(2, draw, kind, {})
        assert messages[0] == messages[1]
        assert f"of the order of the loader over {name}: rank 0 has " in messages[0]


def test_what_torchs_samplers_draw_is_the_same_on_all_ranks() -> None:
    by_rank = run_processes(2, draw, "torch's subset", {})
    seen = [one for batches, *_ in by_rank for batch in batches for one in batch]
    assert len(seen) == 12  # of nine, three are padding
    assert set(seen) == set(range(9))


@pytest.mark.parametrize(("kind", "name"), [("subset", "torch"), ("opaque", "python")])
def test_generators_are_made_equal_before_an_order_is_drawn(kind: str, name: str) -> None:
    by_rank = run_processes(2, draw, kind, {"rng_types": [name, "numpy"]})
    seen = [one for batches, *_ in by_rank for batch in batches for one in batch]
    assert len(seen) == 12  # of nine, three are padding
    assert set(seen) == set(range(9))
    torch_draws, numpy_draws, python_draws = zip(*(rest for _, *rest in by_rank), strict=True)
    assert len(set(numpy_draws)) == 1
    assert len(set(torch_draws)) == (1 if name == "torch" else 2)
    assert len(set(python_draws)) == (1 if name == "python" else 2)


def test_the_order_of_rank_0_can_be_sent() -> None:
    by_rank = run_processes(2, draw, "opaque", {"sync_order": "broadcast"})
    random.seed(100)
    order = random.sample(range(9), 9)
    assert by_rank[0][0] == [order[0:2], order[4:6], [order[8], order[0]]]
    assert by_rank[1][0] == [order[2:4], order[6:8], order[1:3]]


# What differs, or fails, on one rank.


class Fails(Dataset[int]):
    def __len__(self) -> int:
        raise OSError("index.bin is missing")

    def __getitem__(self, index: int) -> int:
        return index


def prepare_wrongly(comm: Comm, what: str) -> tuple[str, float]:
    start = time.monotonic()
    samples: Any = list(range(8 + (what == "lengths" and comm.rank)))
    if what == "fails" and comm.rank == 1:
        samples = Fails()
    try:
        loader = prepare_data_loader(DataLoader(samples, batch_size=2))
        if what == "grows" and comm.rank == 1:
            samples.append(8)
        list(loader)
    except (CommError, OSError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "nothing", time.monotonic() - start


@pytest.mark.parametrize(
    ("what", "messages"),
    [
        (
            "lengths",
            [
                "CommError: Ranks disagree on the number of samples of the loader: rank 0 has 8, "
                "rank 1 has 9. Give every rank the same data set, or pass already_sharded=True."
            ]
            * 2,
        ),
        (
            "grows",
            [
                "CommError: Ranks disagree on the number of steps of the loader over "
                "SequentialSampler: rank 0 has 2, rank 1 has 3. Give every rank the same data set "
                "and sampler."
            ]
            * 2,
        ),
        (
            "fails",
            [
                "CommError: Another rank could not go on: rank 1 failed with OSError: index.bin is "
                "missing",
                "OSError: index.bin is missing",
            ],
        ),
    ],
)
def test_what_is_wrong_on_one_rank_is_an_error_on_all_within_seconds(
    what: str, messages: list[str]
) -> None:
    told = run_processes(2, prepare_wrongly, what)
    assert [message for message, _ in told] == messages
    assert max(took_s for _, took_s in told) < SECONDS


def uneven(comm: Comm) -> list[RankRun]:
    return [
        laws.loader_rank(prepare_data_loader(loader_over(11, 2), tail=tail.value)) for tail in Tail
    ]


def test_every_tail_is_what_it_is_on_real_ranks() -> None:
    by_rank = run_processes(3, uneven)
    for number, tail in enumerate(Tail):
        run = tuple(own[number] for own in by_rank)
        laws.one_pass(lambda _, run=run: run, Case(11, 2, 3, tail=tail))  # type: ignore[misc]
