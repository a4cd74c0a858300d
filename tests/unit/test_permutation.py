"""The permutation of tensors: the values of the scalar one, a permutation at every size, random."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardplug import permutation
from shardplug.errors import PlanError
from shardplug.permutation import TensorPermutation
from shardplug.plan.order import MAX_SAMPLES, KeyedPermutation, order_key
from tests.unit.permutation_statistics import scores

KEYS = 100


def is_permutation(samples: Tensor) -> bool:
    """Whether each of 0, …, n - 1 is there once."""
    counts = samples.bincount(minlength=samples.numel())
    return counts.numel() == samples.numel() and bool((counts == 1).all())


# ---- values


@given(data=st.data(), key=st.integers(), bits=st.integers(1, 62))
def test_each_value_is_that_of_the_definition(data: st.DataObject, key: int, bits: int) -> None:
    num_samples = data.draw(st.integers(2 ** (bits - 1), 2**bits))
    positions = data.draw(st.lists(st.integers(0, num_samples - 1), max_size=20))
    samples = TensorPermutation(num_samples, key).take(torch.tensor(positions, dtype=torch.int64))

    definition = KeyedPermutation(num_samples, key)
    assert samples.tolist() == [definition[position] for position in positions]


@pytest.mark.parametrize("num_samples", [257, 1000, 4097, 2**20 + 3, 2**40 + 5, MAX_SAMPLES])
def test_long_blocks_have_the_values_of_the_definition(num_samples: int) -> None:
    # 257 leaves 15 cells of the grid empty, 4097 leaves 63: more than are walked one by one.
    positions = (torch.arange(3000) * (num_samples // 2999)).remainder(num_samples)
    order = TensorPermutation(num_samples, 11)
    assert order.take(positions).tolist() == [order.scalar[at] for at in positions.tolist()]


@pytest.mark.parametrize("few", [0, 10**9])
def test_stragglers_land_on_the_same_samples_either_way(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(permutation, "_FEW", few)
    order = TensorPermutation(4097, 2)
    assert order.take(torch.arange(4097)).tolist() == list(order.scalar)


@pytest.mark.slow
def test_it_holds_every_sample_once_at_every_size_up_to_4096() -> None:
    wrong = [
        num_samples
        for num_samples in range(4097)
        if not is_permutation(
            TensorPermutation(num_samples, key=num_samples).take(torch.arange(num_samples))
        )
    ]
    assert wrong == []


@pytest.mark.parametrize("num_samples", [16383, 16384, 16385, 65_537, 10**6])
def test_it_holds_every_sample_once_over_several_blocks(num_samples: int) -> None:
    assert is_permutation(TensorPermutation(num_samples, key=1).take(torch.arange(num_samples)))


# ---- shapes and types


@pytest.mark.parametrize("num_samples", [100, 10**12])
def test_the_shape_is_kept_and_the_positions_are_not_changed(num_samples: int) -> None:
    order = TensorPermutation(num_samples, 0)
    positions = torch.arange(60).view(3, 4, 5)
    # Not contiguous, and every second element only.
    for view in (positions, positions.permute(2, 0, 1), positions[:, :, ::2], positions[0, 0, 0]):
        samples = order.take(view)
        assert samples.dtype == torch.int64
        assert samples.shape == view.shape
        assert samples.flatten().tolist() == [order.scalar[at] for at in view.flatten().tolist()]
    assert positions.equal(torch.arange(60).view(3, 4, 5))


@pytest.mark.parametrize("num_samples", [0, 5, 1000])
def test_no_positions_give_no_samples(num_samples: int) -> None:
    samples = TensorPermutation(num_samples, 0).take(torch.empty(3, 0, dtype=torch.int64))
    assert samples.shape == (3, 0)
    assert len(TensorPermutation(num_samples, 0)) == num_samples


@pytest.mark.parametrize("num_samples", [100, 1000])
def test_another_default_device_changes_nothing(num_samples: int) -> None:
    expected = list(KeyedPermutation(num_samples, 4))
    positions = torch.arange(num_samples)
    with torch.device("meta"):
        order = TensorPermutation(num_samples, 4)
        assert order.take(positions).tolist() == expected
        assert list(order.runs(0, stride=50, width=50, count=2)) == [
            expected[:50],
            expected[50:100],
        ]


def test_threads_may_share_one() -> None:
    order = TensorPermutation(10**9, 4)
    blocks = [torch.arange(at, at + 4000) for at in range(0, 40000, 4000)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(order.take, blocks))
    assert all(
        samples.equal(order.take(block)) for samples, block in zip(found, blocks, strict=True)
    )


def test_it_pickles() -> None:
    order = TensorPermutation(10**9, 4)
    positions = torch.arange(100)
    assert pickle.loads(pickle.dumps(order)).take(positions).equal(order.take(positions))


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64])
def test_positions_of_another_type_are_refused(dtype: torch.dtype) -> None:
    message = rf"^`positions` must be an int64 tensor, got {dtype}\.$"
    with pytest.raises(PlanError, match=message):
        TensorPermutation(1000, 0).take(torch.zeros(3, dtype=dtype))


@pytest.mark.parametrize("num_samples", [0, 5, 1000])
def test_positions_outside_are_refused(num_samples: int) -> None:
    order = TensorPermutation(num_samples, 0)
    for outside in (-1, num_samples):
        rule = rf"^`positions` must be in \[0, {num_samples}\), got {outside}\.$"
        with pytest.raises(PlanError, match=rule):
            order.take(torch.tensor([outside]))


def test_a_size_out_of_range_is_refused() -> None:
    with pytest.raises(PlanError, match=r"^`num_samples` must be in \[0, 2\*\*62\], got -1\.$"):
        TensorPermutation(-1, 0)


# ---- runs


@pytest.mark.parametrize(
    ("num_samples", "first", "stride", "width", "count"),
    [
        (100, 0, 10, 10, 10),
        (100, 6, 12, 4, 7),
        (10**12, 10**11, 10**6, 32, 50),
        (10**6, 5, 7, 7, 5000),  # several blocks
        (10**6, 0, 30_000, 20_000, 3),  # a batch is larger than a block
        (10**6, 3, 1, 5, 20),  # overlapping
        (10**6, 0, 5, 5, 0),
        (MAX_SAMPLES, MAX_SAMPLES - 40, 10, 10, 4),
    ],
)
def test_runs_are_the_samples_of_equal_steps(
    num_samples: int, first: int, stride: int, width: int, count: int
) -> None:
    order = TensorPermutation(num_samples, 8)
    # (count, width)
    positions = [[first + step * stride + row for row in range(width)] for step in range(count)]
    expected = order.take(torch.tensor(positions, dtype=torch.int64)).tolist()
    assert list(order.runs(first, stride=stride, width=width, count=count)) == expected


def test_a_run_beyond_the_last_sample_is_refused() -> None:
    run = TensorPermutation(1000, 8).runs(900, stride=60, width=50, count=2)
    with pytest.raises(PlanError, match=r"^`positions` must be in \[0, 1000\), got 1009\.$"):
        list(run)


# ---- is it random? scores are normal if it is, so 4 is a bound that chance hardly ever crosses


@pytest.mark.parametrize(
    "num_samples",
    [64, 257, 1000, 4097, 65_537, 10**6 + 3, 209_510_599, 2**39 + 1, 10**12, MAX_SAMPLES],
)
def test_orders_are_random_however_they_are_read(num_samples: int) -> None:
    first = TensorPermutation(num_samples, 0)
    columns = 2**first.scalar.column_bits
    window = min(num_samples, 4096)
    strides = {1, 2, columns, columns + 1, num_samples // window}
    # One row per way to read: in a row, along a row or a column of the grid, spread out.
    reads = {
        stride: torch.arange(min(window, num_samples // stride)) * stride
        for stride in sorted(strides)
        if num_samples // stride >= 64
    }
    orders = [TensorPermutation(num_samples, order_key(0, epoch)) for epoch in range(KEYS)]
    samples = [order.take(torch.cat(list(reads.values()))) for order in orders]
    # (strides), each (keys, window)
    by_stride = torch.stack(samples).split_with_sizes([len(read) for read in reads.values()], dim=1)
    found = {
        (name, stride): score
        for stride, rows in zip(reads, by_stride, strict=True)
        for name, score in scores(rows, num_samples).items()
    }
    assert {name: score for name, score in found.items() if abs(score) >= 4} == {}


def worst(samples: Tensor, num_samples: int) -> dict[str, float]:
    """The scores that chance does not explain."""
    found = scores(samples, num_samples)
    return {name: score for name, score in found.items() if abs(score) >= 4}


def test_the_scores_pass_what_is_random() -> None:
    draws = [torch.randperm(5000) for _ in range(KEYS)]
    assert worst(torch.stack(draws), 5000) == {}


def test_the_scores_tell_what_is_not_random() -> None:
    n = 5000
    multipliers = torch.tensor([[2 * key + 1234567] for key in range(KEYS)])
    affine = (torch.arange(n) * multipliers + multipliers**2) % n
    drawn = torch.stack([torch.randperm(n) for _ in range(KEYS)])
    neighbours = drawn.view(KEYS, -1, 2).sort(2).values.view(KEYS, n)
    repeated = drawn[:1].roll(1).expand(KEYS, n)
    sunken = torch.stack(
        [torch.multinomial(torch.linspace(1.1, 1, n), n // 2) for _ in range(KEYS)]
    )

    assert "pair spread" in worst(affine, n)
    assert "pair" in worst(neighbours, n)
    assert {"epoch", "epoch spread"} <= worst(repeated, n).keys()
    assert "position" in worst(sunken, n)
    assert "serial" in worst(drawn.sort(1).values, n)


def test_the_scores_tell_too_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardplug.plan.order.ROUNDS", 4)
    orders = [TensorPermutation(4097, order_key(0, epoch)) for epoch in range(KEYS)]
    samples = torch.stack([order.take(torch.arange(4097)) for order in orders])
    assert worst(samples, 4097).keys() & {"pair", "pair spread"}
