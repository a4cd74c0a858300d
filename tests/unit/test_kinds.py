"""Whatever the user gives is checked where it is given, by kind, and named when it does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader

from shardplug import (
    BatchSamplerShard,
    IterableDatasetShard,
    PermutedSampler,
    PlanError,
    SeedableRandomSampler,
    Shard,
    ShardPlan,
    SkipBatchSampler,
    Tail,
    prepare_data_loader,
    ready_batches,
    skip_first_batches,
)
from shardplug.plan.cursor import Progress

FLAG = ("True or False", ["no", 1, None, torch.ones(2)])
NUMBER = ("an integer", ["2", 1.5, True, None, [1], torch.ones(2)])
NUMBER_OR_NONE = ("an integer", ["2", 1.5, True, [1], torch.ones(2)])
ITERABLE = ("something to iterate", [3, None, 1.5])
EPOCH = {"epoch": NUMBER}


def batches() -> BatchSampler:
    return BatchSampler(range(8), 4, False)


def prepared() -> Any:
    samples: Any = torch.arange(4)
    return prepare_data_loader(DataLoader(samples))


TAKERS: list[tuple[Callable[..., Any], dict[str, tuple[str, list[Any]]]]] = [
    (
        lambda **given: BatchSamplerShard(**{"batch_sampler": batches(), **given}),
        {
            "batch_sampler": ITERABLE,
            "num_processes": NUMBER,
            "process_index": NUMBER,
            "split_batches": FLAG,
            "even_batches": FLAG,
        },
    ),
    (
        lambda **given: SkipBatchSampler(**{"batch_sampler": batches(), **given}),
        {"batch_sampler": ITERABLE, "skip_batches": NUMBER},
    ),
    (
        lambda **given: IterableDatasetShard(**{"dataset": range(8), **given}),
        {
            "dataset": ITERABLE,
            "batch_size": NUMBER,
            "drop_last": FLAG,
            "num_processes": NUMBER,
            "process_index": NUMBER,
            "split_batches": FLAG,
            "even_batches": FLAG,
        },
    ),
    (partial(SeedableRandomSampler, range(4)), {"data_seed": NUMBER_OR_NONE}),
    (SeedableRandomSampler(range(4)).set_epoch, EPOCH),
    (
        lambda **given: PermutedSampler(**{"data_source_or_length": 4, **given}),
        {"data_source_or_length": ("an integer", [1.5, True, None]), "seed": NUMBER},
    ),
    (PermutedSampler(4).set_epoch, EPOCH),
    (IterableDatasetShard(range(4)).set_epoch, EPOCH),
    (lambda **given: prepared().set_epoch(**given), EPOCH),
    (lambda **given: prepared().sampler.set_epoch(**given), EPOCH),
    (Progress().set_epoch, EPOCH),
    (lambda **given: skip_first_batches(prepared(), **given), {"num_batches": NUMBER}),
    (ready_batches, {"data": ITERABLE}),
    (
        lambda **given: Shard(
            index=given.get("process_index", 0), count=given.get("num_processes", 1)
        ),
        {"process_index": NUMBER, "num_processes": NUMBER},
    ),
    (
        lambda **given: ShardPlan(
            **{"num_samples": 8, "batch_size": 2, "shard": Shard(0, 2), **given}
        ),
        {
            "num_samples": NUMBER_OR_NONE,
            "batch_size": NUMBER,
            "shard": ("a shardplug.Shard", [0, None, (0, 2)]),
            "split": ("a shardplug.Split", ["slice", True, None]),
            "tail": ("a shardplug.Tail", ["drop", None]),
        },
    ),
    (ShardPlan(8, 2, Shard(0, 2)).seek, {"consumed": NUMBER}),
]


@pytest.mark.parametrize(
    ("taker", "name", "rule", "value"),
    [
        (taker, name, rule, value)
        for taker, arguments in TAKERS
        for name, (rule, values) in arguments.items()
        for value in values
    ],
)
def test_an_argument_of_a_wrong_kind_is_named(
    taker: Callable[..., Any], name: str, rule: str, value: Any
) -> None:
    with pytest.raises(PlanError) as caught:
        taker(**{name: value})
    assert str(caught.value).startswith(f"`{name}` must be {rule}")
    assert f"got {value!r:.80}." in str(caught.value)


@pytest.mark.parametrize("three", [np.int64(3), torch.tensor(3)])
def test_an_epoch_may_be_numpys_and_is_kept_as_pythons(three: Any) -> None:
    loader = prepared()
    loader.set_epoch(three)
    assert json.loads(json.dumps(loader.state_dict()))["epoch"] == 3
    assert type(loader.epoch) is int


def test_an_epoch_that_is_refused_leaves_the_one_before() -> None:
    loader = prepared()
    loader.set_epoch(2)
    for epoch in ("3", -1):
        with pytest.raises(PlanError, match="`epoch` must be"):
            loader.set_epoch(epoch)
    assert loader.epoch == 2


def test_numbers_may_be_numpys() -> None:
    two = np.int64(2)
    shard = BatchSamplerShard(batches(), two, np.int64(1))
    assert type(shard.num_processes) is type(shard.shard.index) is int
    assert list(shard) == [[4, 5, 6, 7]]
    assert list(IterableDatasetShard(range(8), two, False, two, np.int64(1))) == [2, 3, 6, 7]
    plan = ShardPlan(np.int64(8), two, Shard(np.int64(1), two), tail=Tail.DROP)
    assert [type(number) for number in (plan.num_samples, plan.batch_size)] == [int, int]
    assert [list(plan.positions(step)) for step in range(plan.num_steps)] == [[2, 3], [6, 7]]
    assert list(PermutedSampler(two, seed=two)) == list(PermutedSampler(2, seed=2))
