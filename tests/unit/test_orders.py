"""Orders: any position can be looked up, and a run of steps is the same lookups in bulk."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import RandomSampler

from shardplug.orders import (
    Order,
    PermutedOrder,
    SequenceOrder,
    SequentialOrder,
    TensorOrder,
    blocks,
    random_order,
)
from shardplug.permutation import TensorPermutation
from shardplug.plan.order import KeyedPermutation

N = 3000


def shuffled(n: int) -> list[int]:
    return torch.randperm(n, generator=torch.Generator().manual_seed(n)).tolist()


ORDERS: dict[str, Callable[[], tuple[Order, list[int]]]] = {
    "sequential": lambda: (SequentialOrder(N), list(range(N))),
    "list": lambda: (SequenceOrder(shuffled(N)), shuffled(N)),
    "range": lambda: (SequenceOrder(range(N, 0, -1)), list(range(N, 0, -1))),
    "int64": lambda: (TensorOrder(torch.tensor(shuffled(N))), shuffled(N)),
    "int32": lambda: (TensorOrder(torch.tensor(shuffled(N), dtype=torch.int32)), shuffled(N)),
    # A view that does not begin where its memory does.
    "view": lambda: (TensorOrder(torch.tensor([9, 9, *shuffled(N)])[2:]), shuffled(N)),
    "permuted": lambda: (
        PermutedOrder(TensorPermutation(N, key=7)),
        list(KeyedPermutation(N, key=7)),
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_any_positions_can_be_looked_up(name: str) -> None:
    order, expected = ORDERS[name]()
    assert len(order) == N
    asked: list[Any] = [range(10), range(N - 3, N), range(0), [], [4], [7, 0, 7, N - 1], (3, 1)]
    for positions in asked:
        taken = order.take(positions)
        assert taken == [expected[at] for at in positions]
        assert all(type(sample) is int for sample in taken)


MADE = {name: make() for name, make in ORDERS.items()}
"""Once: nothing that only looks up changes them."""


@pytest.mark.parametrize("name", MADE)
@given(
    first=st.integers(0, 300),
    width=st.integers(1, 40),
    apart=st.integers(0, 60),
    count=st.integers(0, 60),
)
def test_a_run_is_every_step_looked_up(
    name: str, first: int, width: int, apart: int, count: int
) -> None:
    order, expected = MADE[name]
    stride = width + apart
    count = min(count, max(0, N - first - width) // stride + 1)
    starts = range(first, first + count * stride, stride)
    run = order.runs(first, stride=stride, width=width, count=count)
    assert list(run) == [expected[start : start + width] for start in starts]


@pytest.mark.parametrize("name", ORDERS)
def test_what_is_looked_up_may_be_changed(name: str) -> None:
    order, expected = ORDERS[name]()
    for batch in order.runs(0, stride=2, width=2, count=3):
        batch.append(-1)
    order.take(range(3)).append(-1)
    order.take([2, 1]).append(-1)
    assert order.take(range(N)) == expected


@given(count=st.integers(0, 3000), width=st.integers(1, 20000))
def test_blocks_cover_all_steps_small_at_first_and_never_large(count: int, width: int) -> None:
    cut = list(blocks(count, width))
    steps = [step for start, number in cut for step in range(start, start + number)]
    assert steps == list(range(count))
    sizes = [number for _, number in cut]
    assert all(number >= 1 for number in sizes)
    assert all(number == 1 or number * width <= 8192 for number in sizes)
    assert sizes[:1] <= [4]
    assert sizes[:-1] == sorted(sizes[:-1])
    assert all(after <= 2 * before for before, after in pairwise(sizes))


@pytest.mark.parametrize("n", [1, 2, 10, 33, 1000])
@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("draws", [None, 1, 9, 10, 20, 31, 32, 33, 64, 1000])
def test_random_orders_are_those_of_torchs_random_sampler(
    n: int, replacement: bool, draws: int | None
) -> None:
    theirs = RandomSampler(range(n), replacement, draws, generator=torch.Generator().manual_seed(n))
    generator = torch.Generator().manual_seed(n)
    order = random_order(n, generator=generator, draws=draws, replacement=replacement)
    assert order.take(range(len(order))) == list(theirs)
    assert len(order) == len(theirs)


def test_a_large_shuffle_is_drawn_as_torch_draws_it() -> None:
    n = 300_000  # more than what torch draws in one go anywhere
    theirs = torch.randperm(n, generator=torch.Generator().manual_seed(1))
    order = random_order(n, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.tensor(order.take(range(n))), theirs)


def test_an_order_of_nothing() -> None:
    order = random_order(0, generator=torch.Generator())
    assert len(order) == 0
    assert list(order.runs(0, stride=1, width=1, count=0)) == []
    assert len(random_order(0, generator=torch.Generator(), draws=0)) == 0
