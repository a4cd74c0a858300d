"""`BatchSamplerShard` beside the class of the same name in accelerate, where that one is right."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from shardplug import BatchSamplerShard
from tests import strategies

accelerate_data_loader = pytest.importorskip("accelerate.data_loader")

BOTH = (False, True)


def theirs(batch_sampler: Any, world_size: int, rank: int, split: bool, even: bool) -> Any:
    return accelerate_data_loader.BatchSamplerShard(batch_sampler, world_size, rank, split, even)


@pytest.mark.parametrize("world_size", range(1, 5))
def test_shards_of_a_plain_batch_sampler_are_the_same(world_size: int) -> None:
    for n, size, split, even, drop in product(range(30), (1, 2, 3, 4, 6), BOTH, BOTH, BOTH):
        if split and size % world_size:
            continue
        for rank in range(world_size):
            options = (world_size, rank, split, even)
            expected = theirs(BatchSampler(SequentialSampler(range(n)), size, drop), *options)
            ours = BatchSamplerShard(
                BatchSampler(SequentialSampler(range(n)), size, drop), *options
            )
            assert list(ours) == list(expected), (n, size, *options, drop)
            if not split:  # sliced, its length counts samples' batches that it does not yield
                assert len(ours) == len(list(ours)) == len(expected), (n, size, *options, drop)


@pytest.mark.parametrize("drop", BOTH)
def test_shards_draw_from_a_generator_what_they_draw_there(drop: bool) -> None:
    def batches_of(shard_class: Any, rank: int) -> tuple[list[Any], bytes]:
        generator = torch.Generator().manual_seed(3)
        sampler = RandomSampler(range(23), generator=generator)
        shard = shard_class(BatchSampler(sampler, 3, drop), 2, rank)
        epochs = [list(shard) for _ in range(3)]
        return epochs, bytes(generator.get_state().tolist())

    for rank in range(2):
        expected = batches_of(accelerate_data_loader.BatchSamplerShard, rank)
        assert batches_of(BatchSamplerShard, rank) == expected


@pytest.mark.parametrize("own_generator", BOTH)
def test_in_a_loader_of_torchs_they_draw_in_the_same_order(own_generator: bool) -> None:
    def batches_of(shard_class: Any, rank: int) -> list[list[int]]:
        torch.manual_seed(8)
        generator = torch.Generator().manual_seed(3) if own_generator else None
        shuffling = BatchSampler(RandomSampler(range(23), generator=generator), 3, False)
        samples: Any = torch.arange(23)
        loader: DataLoader[Any] = DataLoader(
            samples, batch_sampler=shard_class(shuffling, 2, rank), generator=generator
        )
        return [batch.tolist() for _ in range(2) for batch in loader]

    for rank in range(2):
        expected = batches_of(accelerate_data_loader.BatchSamplerShard, rank)
        assert batches_of(BatchSamplerShard, rank) == expected


class Varying:
    """Batches of any size; declares none."""

    batch_size = None
    drop_last = False

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Any:
        return iter(strategies.batches_of(self.sizes))

    def __len__(self) -> int:
        return len(self.sizes)


@pytest.mark.parametrize("even", BOTH)
def test_batches_of_varying_size_are_dealt_the_same(even: bool) -> None:
    for sizes in ([1], [2, 1], [3, 1, 2], [1, 1, 4, 2], [2, 5, 1, 3, 3]):
        for world_size in range(1, 5):
            for rank in range(world_size):
                options = (world_size, rank, False, even)
                expected = theirs(Varying(sizes), *options)
                ours = BatchSamplerShard(Varying(sizes), *options)
                assert list(ours) == list(expected), (sizes, options)
                assert len(ours) == len(expected), (sizes, options)
