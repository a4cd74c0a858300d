"""The other strategies: one device, models that parallelise themselves, FSDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch.distributed.fsdp import FSDPModule, fully_shard

from shardplug import Comm, PlanError
from shardplug_lightning import (
    ShardFSDPStrategy,
    ShardModelParallelStrategy,
    ShardSingleDeviceStrategy,
)
from tests.integrations.lightning.ranks import Witness, make_trainer, run_alone, run_ranks, values

Seen = dict[str, list[list[int]]]


class Layered(Witness):
    """Has layers that are divided among the data-parallel ranks, and forwards through them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Linear(4, 1))

    def configure_model(self) -> None:
        mesh = self.device_mesh
        assert mesh is not None
        is_divided = any(isinstance(each, FSDPModule) for each in self.layers)
        if mesh["data_parallel"].size() > 1 and not is_divided:
            for layer in self.layers:
                fully_shard(layer, mesh=mesh["data_parallel"])
            fully_shard(self.layers, mesh=mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        super().training_step(batch)
        loss: torch.Tensor = self.layers(batch[:, None]).mean()
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.layers(batch[:, None])  # which waits for the other ranks
        super().validation_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.estimated_stepping_batches  # which makes the loaders, early
        return torch.optim.SGD(self.layers.parameters(), lr=0.01, momentum=0.9)


class SaveAfterThree(Callback):
    """Saves a checkpoint after three batches."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if args[-1] == 2:
            trainer.save_checkpoint(self.file)


def train_in_parallel(comm: Comm, tensor_parallel: int, folder: Path) -> tuple[Any, ...]:
    def strategy() -> ShardModelParallelStrategy:
        size = comm.world_size // tensor_parallel
        return ShardModelParallelStrategy(
            data_parallel_size=size,
            tensor_parallel_size=tensor_parallel,
            save_distributed_checkpoint=False,
            data_seed=5,
        )

    model, again, file = Layered(), Layered(), folder / "cut.ckpt"
    # Lightning loads into models that have been divided only.
    callbacks = [SaveAfterThree(file)] if tensor_parallel == 1 else []
    trainer = make_trainer(
        strategy(), comm.world_size, max_epochs=1, limit_train_batches=4, callbacks=callbacks
    )
    trainer.fit(model, values(26, 2, shuffle=True), values(5))
    (logged,) = trainer.validate(model, values(5), verbose=False)
    if callbacks:
        trainer = make_trainer(strategy(), comm.world_size, max_epochs=1)
        trainer.fit(again, values(26, 2, shuffle=True), values(5), ckpt_path=file)
    return dict(model.seen), dict(logged), dict(again.seen)


ORDER = torch.randperm(26, generator=torch.Generator().manual_seed(5)).tolist()


def test_ranks_that_share_a_model_see_the_same_batches(tmp_path: Path) -> None:
    for seen, logged, _ in run_ranks(2, train_in_parallel, 2, tmp_path):
        assert seen["train 0"] == [ORDER[at : at + 2] for at in range(0, 8, 2)]
        assert seen["validate"] == [[0, 1, 2, 3], [4]] * 2
        assert logged == {"torchmetrics": 2.0, "logged": 2.0}


def test_ranks_that_share_the_data_evaluate_in_step_and_go_on(tmp_path: Path) -> None:
    by_rank = run_ranks(2, train_in_parallel, 1, tmp_path)
    for rank, (seen, logged, again) in enumerate(by_rank):
        filled = ORDER + ORDER[:2]  # to fourteen batches
        batches = [filled[at : at + 2] for at in range(2 * rank, 28, 4)]
        assert seen["train 0"] == batches[:4]
        assert again["train 0"] == batches[3:]
        assert seen["validate"] == [[[0, 1, 2]], [[3, 4]]][rank] * 2
        assert logged == {"torchmetrics": 2.0, "logged": 2.0}


def train_alone(comm: Comm) -> tuple[Seen, dict[str, float]]:
    model = Witness()
    trainer = make_trainer(ShardSingleDeviceStrategy(), 1, max_epochs=1)
    trainer.fit(model, values(10, drop_last=True), values(10))
    (logged,) = trainer.test(model, values(10), verbose=False)
    assert not torch.distributed.is_initialized()
    return dict(model.seen), dict(logged)


def test_one_device_needs_no_process_group() -> None:
    seen, logged = run_alone(train_alone)
    everything = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert seen == {"train 0": everything[:2], "validate": everything, "test": everything}
    assert logged == {"torchmetrics": 4.5, "logged": 4.5}


def test_one_device_cannot_be_several() -> None:
    trainer = make_trainer(ShardSingleDeviceStrategy(), 2)
    with pytest.raises(PlanError) as caught:
        trainer.validate(Witness(), values(4), verbose=False)
    assert str(caught.value) == (
        "`devices` must be 1 for ShardSingleDeviceStrategy, got 2 in all. Pass "
        "strategy=ShardStrategy(), or devices=1."
    )


def refuse_cpus(comm: Comm) -> str:
    trainer = make_trainer(ShardFSDPStrategy(), 1)
    with pytest.raises(PlanError) as caught:
        trainer.validate(Witness(), values(4), verbose=False)
    return str(caught.value)


def test_fsdp_needs_devices() -> None:
    assert run_ranks(1, refuse_cpus) == [
        "`accelerator` must be one that has devices for ShardFSDPStrategy, got CPUs. Pass "
        "strategy=ShardStrategy(), or ShardModelParallelStrategy()."
    ]
