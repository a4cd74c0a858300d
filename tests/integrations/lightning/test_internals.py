"""What is Lightning's own: found where it is expected, and an error that helps where it is not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.overrides import distributed as overrides
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors.data_connector import _DataConnector
from torch.distributed import ReduceOp
from torch.utils.data import BatchSampler, SequentialSampler

from shardplug import Comm, PlanError
from shardplug_lightning import ShardStrategy
from shardplug_lightning.internals import (
    is_globally_seeded,
    is_sharded_by_user,
    keep_loaders,
    record_indices,
)
from shardplug_lightning.mixin import takes_mean
from tests.integrations.lightning.ranks import Witness, make_trainer, run_ranks, values


def way_out(name: str) -> str:
    return re.escape(
        f"`lightning` must have {name} for a strategy to shard loaders, got version "
        f"{lightning.__version__} without it. Install lightning 2.6, or pass "
        "Trainer(use_distributed_sampler=False) and use shardplug.prepare_data_loader() in your "
        "*_dataloader() hooks."
    )


def test_the_users_word_is_read() -> None:
    assert not is_sharded_by_user(make_trainer(ShardStrategy(), 2))
    assert is_sharded_by_user(make_trainer(ShardStrategy(), 2, use_distributed_sampler=False))


def test_another_lightning_without_the_flag_is_an_error() -> None:
    trainer = make_trainer(ShardStrategy(), 2)
    del trainer._accelerator_connector.use_distributed_sampler
    name = "Trainer._accelerator_connector.use_distributed_sampler"
    with pytest.raises(PlanError, match=way_out(name)):
        is_sharded_by_user(trainer)


def prepare_otherwise(self: Any, dataloader: object, stage: str) -> object:
    return dataloader


@pytest.mark.parametrize("replacement", [None, prepare_otherwise])
def test_another_lightning_that_prepares_otherwise_is_an_error(
    monkeypatch: pytest.MonkeyPatch, replacement: Callable[..., object] | None
) -> None:
    monkeypatch.setattr(_DataConnector, "_prepare_dataloader", replacement)
    with pytest.raises(PlanError, match=way_out("Trainer._data_connector._prepare_dataloader")):
        keep_loaders(make_trainer(ShardStrategy(), 2))


def test_another_lightning_without_the_wrapper_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(overrides, "_IndexBatchSamplerWrapper")
    with pytest.raises(PlanError, match=way_out("_IndexBatchSamplerWrapper")):
        record_indices(BatchSampler(SequentialSampler(range(3)), 2, drop_last=False))


def test_indices_are_recorded_as_they_are_asked_for() -> None:
    batches = record_indices(BatchSampler(SequentialSampler(range(5)), 2, drop_last=False))
    assert isinstance(batches, overrides._IndexBatchSamplerWrapper)
    assert len(batches) == 3
    iterator = iter(batches)
    assert iter(iterator) is iterator
    assert next(iterator) == [0, 1]
    assert batches.seen_batch_indices == [[0, 1]]
    assert list(iterator) == [[2, 3], [4]]
    assert batches.seen_batch_indices == [[0, 1], [2, 3], [4]]
    assert list(batches) == batches.seen_batch_indices == [[0, 1], [2, 3], [4]]


def test_a_seed_of_the_whole_run_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert not is_globally_seeded()
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    assert is_globally_seeded()


REDUCED: list[tuple[list[Any], Any, Any, Any]] = [
    # By rank; operation; what it comes to; and under Lightning's own strategy.
    ([1, 2], "mean", (1.5, torch.float64), (1, torch.int64)),
    ([7, 2], "avg", (4.5, torch.float64), (4, torch.int64)),
    ([1, 2], "sum", (3, torch.int64), (3, torch.int64)),
    ([1, 2], ReduceOp.SUM, (3, torch.int64), (3, torch.int64)),
    ([1.0, 2.0], "mean", (1.5, torch.float32), (1.5, torch.float32)),
]


def reduce(comm: Comm, strategy: DDPStrategy) -> list[tuple[float, torch.dtype]]:
    trainer = make_trainer(strategy, comm.world_size)
    trainer.validate(Witness(), values(4), verbose=False)
    assert strategy.reduce("no tensor", reduce_op="mean") == "no tensor"  # type: ignore[arg-type]
    mine = [(torch.tensor(by_rank[comm.rank]), op) for by_rank, op, _, _ in REDUCED]
    reduced = [strategy.reduce(tensor, reduce_op=op) for tensor, op in mine]
    return [(tensor.item(), tensor.dtype) for tensor in reduced]


def test_the_mean_of_integers_keeps_its_fraction() -> None:
    for found in run_ranks(2, reduce, ShardStrategy()):
        assert found == [expected for *_, expected, _ in REDUCED]
    for found in run_ranks(2, reduce, DDPStrategy()):
        assert found == [of_lightning for *_, of_lightning in REDUCED]


@pytest.mark.parametrize(
    ("reduce_op", "is_mean"),
    [
        ("mean", True),
        ("AVG", True),
        (ReduceOp.AVG, True),
        ("sum", False),
        (ReduceOp.MAX, False),
        (None, False),
    ],
)
def test_a_mean_is_known_by_any_name(reduce_op: Any, is_mean: bool) -> None:
    assert takes_mean(reduce_op) == is_mean
