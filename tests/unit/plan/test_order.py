"""Seeds are stable and unrelated; the keyed permutation is one, for every size and key."""

from __future__ import annotations

import math
import pickle
from dataclasses import FrozenInstanceError
from itertools import islice

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from shardplug.errors import PlanError
from shardplug.plan.order import (
    MAX_SAMPLES,
    TABLE_LIMIT,
    KeyedPermutation,
    SampleSeeds,
    _finalise,
    _words,
    epoch_seed,
    mix_seed,
    order_key,
    worker_seed,
)
from tests.unit.permutation_statistics import matrix_score, orders_score, scores

GAMMA = 0x9E3779B97F4A7C15
seeds = st.integers(-(2**63), 2**64 - 1)
parts = st.lists(st.integers(-(2**130), 2**130), max_size=4)


# ---- seeds


def test_the_finaliser_is_that_of_splitmix64() -> None:
    # The first outputs for the seed 1234567, as other implementations of SplitMix64 publish them.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [_finalise(1234567 + step * GAMMA) for step in (1, 2, 3)] == published


@pytest.mark.parametrize(
    ("numbers", "seed"),
    [
        ((), 8147104208329303767),
        ((0,), 2547805098422156800),
        ((0, 0), 2265272444276357577),
        ((1, 2), 3810346504825414801),
        ((2, 1), 8245685362082995177),
        ((42, 7), 5204502983995368209),
        ((-1,), 4399922209440921945),
        ((18446744073709551615, 0), 3238177819862474334),
        ((3, 1, 1000000000000), 5952723250761978970),
    ],
)
def test_seeds_stay_what_they_are(numbers: tuple[int, ...], seed: int) -> None:
    assert mix_seed(*numbers) == seed


@given(parts)
def test_a_mixed_seed_is_one_that_torch_takes(numbers: list[int]) -> None:
    seed = mix_seed(*numbers)
    assert 0 <= seed < 2**63
    assert torch.Generator().manual_seed(seed).initial_seed() == seed


@given(parts, parts)
@example([1, 2], [2, 1])
@example([], [0])
@example([0], [0, 0])
@example([5], [5, 0])
@example([-1], [2**64 - 1])
@example([2**64, 1], [0, 1])
@example([1 + (2 << 64), 3], [1, 2 + (3 << 64)])
@example([1 << 64, 1], [0, 1 + (1 << 64)])
def test_other_parts_give_another_seed(one: list[int], other: list[int]) -> None:
    assert (mix_seed(*one) == mix_seed(*other)) == (one == other)


def test_each_bit_of_a_part_moves_half_of_the_seed() -> None:
    flips = [
        (mix_seed(seed, epoch) ^ mix_seed(seed ^ 1 << bit, epoch)).bit_count()
        for seed in range(20)
        for epoch in range(5)
        for bit in range(64)
    ]
    # Binomial, 63 bits per seed.
    expected, spread = 63 / 2 * len(flips), math.sqrt(63 / 4 * len(flips))
    assert abs(sum(flips) - expected) < 4 * spread


def test_parts_may_be_any_kind_of_integer() -> None:
    assert mix_seed(torch.tensor(3), True) == mix_seed(3, 1)  # type: ignore[arg-type]


@given(seed=seeds, epoch=st.integers(0, 1000))
@example(seed=2**64 - 1, epoch=0)
@example(seed=-(2**63), epoch=0)
@example(seed=-1, epoch=1)
def test_the_seed_of_an_epoch_gives_the_order_of_seed_plus_epoch(seed: int, epoch: int) -> None:
    wrapped = epoch_seed(seed, epoch)
    assert 0 <= wrapped < 2**64
    if seed + epoch < 2**64:
        plain = torch.randperm(20, generator=torch.Generator().manual_seed(seed + epoch))
        assert torch.randperm(20, generator=torch.Generator().manual_seed(wrapped)).equal(plain)


def test_the_seed_of_an_epoch_wraps_around_where_torch_ends() -> None:
    assert [epoch_seed(2**64 - 2, epoch) for epoch in range(4)] == [2**64 - 2, 2**64 - 1, 0, 1]


def test_seeds_of_epochs_workers_and_samples_all_differ() -> None:
    few = range(6)
    drawn = [order_key(seed, epoch) for seed in few for epoch in few]
    drawn += [SampleSeeds(seed, epoch)[at] for seed in few for epoch in few for at in few]
    drawn += [
        worker_seed(seed, epoch, rank=rank, worker=worker)
        for seed in few
        for epoch in few
        for rank in few
        for worker in few
    ]
    assert len(set(drawn)) == len(drawn) == 6**2 + 6**3 + 6**4
    assert all(0 <= seed < 2**63 for seed in drawn)


# ---- the permutation


@pytest.mark.parametrize(
    ("num_samples", "key", "first"),
    [
        (5, 0, [1, 2, 3, 4, 0]),
        (256, 1, [76, 31, 43, 245, 33, 36, 0, 156]),
        (257, 1, [99, 198, 182, 71, 225, 50, 164, 219]),
        (1000, 5, [109, 659, 457, 898, 461, 140, 128, 542]),
        (10**7, 42, [7709278, 8887450, 8821314, 3739458, 7266630, 644147, 5597159, 5543914]),
        (
            2**32,
            0,
            [
                3269955667,
                3749122851,
                3042954773,
                390190790,
                390426204,
                2616466916,
                3357147136,
                3369814974,
            ],
        ),
        (
            10**12,
            7,
            [
                576121517924,
                819194342813,
                272530726011,
                500256119580,
                386422154731,
                976885256946,
                784799292092,
                765817531343,
            ],
        ),
        (
            2**62,
            2**63 - 1,
            [
                1364807664222794647,
                612730438367161336,
                1162141964719826994,
                1275188365304358406,
                609374954892585885,
                1690908614439822254,
                2933291861951025039,
                761693087190443733,
            ],
        ),
    ],
)
def test_orders_stay_what_they_are(num_samples: int, key: int, first: list[int]) -> None:
    assert list(islice(KeyedPermutation(num_samples, key), 8)) == first


@pytest.mark.parametrize("num_samples", [*range(70), 255, 256, 257, 258, 511, 513, 1000, 4097])
def test_it_holds_every_sample_once(num_samples: int) -> None:
    order = KeyedPermutation(num_samples, 3)
    assert len(order) == num_samples
    assert sorted(order) == list(range(num_samples))


@given(data=st.data(), key=st.integers(), bits=st.integers(1, 62))
def test_every_sample_has_one_position_at_any_size(
    data: st.DataObject, key: int, bits: int
) -> None:
    num_samples = data.draw(st.integers(2 ** (bits - 1), 2**bits))
    order = KeyedPermutation(num_samples, key)
    number = data.draw(st.integers(0, num_samples - 1))

    assert 0 <= order[number] < num_samples
    # Two-sided, so no two positions share a sample and no two samples a position.
    assert order.position_of(order[number]) == number
    assert order[order.position_of(number)] == number


@pytest.mark.parametrize("num_samples", [TABLE_LIMIT + 1, 300, 545])
def test_the_position_of_every_sample_is_where_it_stands(num_samples: int) -> None:
    order = KeyedPermutation(num_samples, 1)
    assert [order.position_of(sample) for sample in order] == list(range(num_samples))


@pytest.mark.parametrize("num_samples", [1, 255, 2**61 - 1, 2**61, 2**61 + 1, MAX_SAMPLES])
def test_the_grid_has_room_for_all_and_fits_31_bits(num_samples: int) -> None:
    order = KeyedPermutation(num_samples, 0)
    columns = 2**order.column_bits
    assert 0 <= order.num_rows * columns - num_samples < columns <= 2**31
    assert order.num_rows <= 2**31


def test_a_round_by_round_reckoning_agrees() -> None:
    """The rounds again, in plain arithmetic: no shifts, no masks, no bits."""
    num_samples, key = 1000, 5
    rows, columns = 32, 32
    words = list(islice(_words(key), 16))

    def move(cell: int) -> int:
        row, column = divmod(cell, columns)
        for turn in range(8):
            first, second = words[2 * turn], words[2 * turn + 1]
            factor, mixer = first % 2**32, second // 2**32
            factor, mixer = factor + 1 - factor % 2, mixer + 1 - mixer % 2
            value = row if turn % 2 else column * 2**27
            folded = (first // 2**32 + factor * value) % 2**32
            if folded >= 2**31:
                folded -= 2**32
            hashed = mixer * (folded ^ (folded // 2**15)) % 2**32
            if turn % 2:
                column = (column + hashed // 2**27) % columns
            else:
                row = (row - hashed * rows // 2**32) % rows
        return row * columns + column

    expected = []
    for position in range(num_samples):
        cell = move(position)
        while cell >= num_samples:
            cell = move(cell)
        expected.append(cell)
    assert list(KeyedPermutation(num_samples, key)) == expected


def test_a_table_is_sorted_by_the_words_of_the_key() -> None:
    words = list(islice(_words(9), 100))
    assert [words[sample] for sample in KeyedPermutation(100, 9)] == sorted(words)


def test_it_is_a_value() -> None:
    order = KeyedPermutation(1000, 5)
    assert order == KeyedPermutation(1000, 5) != KeyedPermutation(1000, 6)
    assert hash(order) == hash(KeyedPermutation(1000, 5))
    assert repr(order) == "KeyedPermutation(num_samples=1000, key=5)"
    assert list(pickle.loads(pickle.dumps(order))) == list(order)
    with pytest.raises(FrozenInstanceError):
        order.key = 6  # type: ignore[misc]


@pytest.mark.parametrize("num_samples", [-1, MAX_SAMPLES + 1])
def test_a_size_out_of_range_is_refused(num_samples: int) -> None:
    with pytest.raises(
        PlanError, match=rf"^`num_samples` must be in \[0, 2\*\*62\], got {num_samples}\.$"
    ):
        KeyedPermutation(num_samples, 0)


@pytest.mark.parametrize("num_samples", [0, 5, 1000])
def test_what_is_outside_is_refused(num_samples: int) -> None:
    order = KeyedPermutation(num_samples, 0)
    for outside in (-1, num_samples):
        rule = rf"must be in \[0, {num_samples}\), got {outside}\.$"
        with pytest.raises(PlanError, match="^`position` " + rule):
            order[outside]
        with pytest.raises(PlanError, match="^`sample` " + rule):
            order.position_of(outside)


# ---- is it random? scores are normal if it is, so 4 is a bound that chance hardly ever crosses


@pytest.mark.parametrize(("num_samples", "keys"), [(2, 2000), (3, 2000), (4, 4800), (5, 12000)])
def test_all_orders_of_few_samples_are_equally_likely(num_samples: int, keys: int) -> None:
    orders = [KeyedPermutation(num_samples, order_key(0, epoch)).table for epoch in range(keys)]
    assert abs(orders_score(torch.tensor(orders))) < 4


@pytest.mark.parametrize("num_samples", [4, 6, 16, 33, 63, 200])
def test_small_orders_are_random(num_samples: int) -> None:
    orders = [KeyedPermutation(num_samples, order_key(1, epoch)).table for epoch in range(500)]
    found = scores(torch.tensor(orders), num_samples)
    found["matrix"] = matrix_score(torch.tensor(orders))
    assert {name: score for name, score in found.items() if abs(score) >= 4} == {}


@given(seeds, st.integers(0, 2**40), st.integers(0, 2**63 - 1))
def test_seeds_of_samples_are_mixed_like_any(seed: int, epoch: int, position: int) -> None:
    assert SampleSeeds(seed, epoch)[position] == mix_seed(seed, epoch, position)
