"""Dealing whole batches of one row each is what torch's DistributedSampler does."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from shardplug import prepare_data_loader
from tests import laws


def theirs(n: int, world_size: int, rank: int, **options: Any) -> DistributedSampler[int]:
    return DistributedSampler(range(n), world_size, rank, **options)  # type: ignore[arg-type]


def ours(n: int, world_size: int, rank: int, **options: Any) -> list[int]:
    """What one simulated rank gets in epoch 2, row by row."""
    samples: Any = torch.arange(n)
    loader = prepare_data_loader(
        DataLoader(samples, batch_size=1, shuffle=options.pop("shuffle")),
        num_processes=world_size,
        process_index=rank,
        use_seedable_sampler=True,
        **options,
    )
    loader.set_epoch(2)
    return [row for batch in loader for row in laws.ids_of(batch)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_dealt_one_by_one_are_those_of_the_distributed_sampler(shuffle: bool) -> None:
    for n, world_size in product((1, 2, 5, 12, 13), (1, 2, 3, 4)):
        for rank in range(world_size):
            sampler = theirs(n, world_size, rank, shuffle=shuffle, seed=7)
            sampler.set_epoch(2)
            expected = list(sampler)
            got = ours(n, world_size, rank, shuffle=shuffle, data_seed=7)
            assert got == expected, (n, world_size, rank)


def test_dropping_drops_what_the_distributed_sampler_drops() -> None:
    for n, world_size in product((4, 5, 12, 13), (1, 2, 3, 4)):
        for rank in range(world_size):
            sampler = theirs(n, world_size, rank, shuffle=True, seed=7, drop_last=True)
            sampler.set_epoch(2)
            expected = list(sampler)
            got = ours(n, world_size, rank, shuffle=True, data_seed=7, tail="drop")
            assert got == expected, (n, world_size, rank)
