"""Where the processes of a run come from: one, forked, spawned, in a notebook."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
)

from shardplug import Comm
from shardplug_lightning import ShardStrategy
from tests.integrations.lightning.ranks import Trainee, Witness, make_trainer, run_alone, values

Seen = dict[str, list[list[int]]]


def launchers_of(comm: Comm, is_notebook: bool) -> dict[str, str]:
    if is_notebook:
        from lightning.pytorch.trainer.connectors import accelerator_connector

        sys.ps1 = ">>> "
        accelerator_connector._IS_INTERACTIVE = True
    found = {}
    for devices in (1, 2):
        for start_method in ("popen", "spawn", "fork"):
            if is_notebook and devices == 2 and start_method == "spawn":
                continue  # which Lightning refuses there
            strategy = ShardStrategy(start_method=start_method)
            launcher = make_trainer(strategy, devices).strategy.launcher
            told = type(launcher).__name__
            if isinstance(launcher, _MultiProcessingLauncher):
                told += f" {launcher._start_method}"
            found[f"{devices} {start_method}"] = told
    return found


def test_one_process_starts_no_others() -> None:
    subprocess_name, name = _SubprocessScriptLauncher.__name__, _MultiProcessingLauncher.__name__
    alone = {"1 popen": "NoneType", "1 spawn": "NoneType", "1 fork": "NoneType"}
    assert run_alone(launchers_of, False) == {
        **alone,
        "2 popen": subprocess_name,
        "2 spawn": f"{name} spawn",
        "2 fork": f"{name} fork",
    }
    assert run_alone(launchers_of, True) == {
        **alone,
        "2 popen": f"{name} fork",
        "2 fork": f"{name} fork",
    }


def fit_alone(comm: Comm, strategy: str) -> tuple[Seen, dict[str, float], Any]:
    assert not dist.is_initialized()
    model = Witness()
    trainer = make_trainer(strategy, 1, max_epochs=2)
    trainer.fit(model, values(10, drop_last=True), values(10))
    (logged,) = trainer.test(model, values(10), verbose=False)
    predictions = trainer.predict(model, values(10))
    dist.destroy_process_group()
    return dict(model.seen), dict(logged), predictions


@pytest.mark.parametrize("strategy", ["shard", "shard_spawn"])
def test_one_device_sees_everything(strategy: str) -> None:
    seen, logged, predictions = run_alone(fit_alone, strategy)
    everything = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert seen == {
        "train 0": everything[:2],
        "train 1": everything[:2],
        "validate": everything * 2,
        "test": everything,
        "predict": everything,
    }
    assert logged == {"torchmetrics": 4.5, "logged": 4.5}
    assert [batch.tolist() for batch in predictions] == everything


class Mean(Trainee):
    """Learns the sum of what it has seen, so that it can be told afterwards."""

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return -self.weight * batch.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def validation_step(self, batch: torch.Tensor) -> None:
        self.log("mean", batch.mean(), sync_dist=True)


def launch(comm: Comm, start_method: str) -> tuple[float, float]:
    model = Mean()
    strategy = ShardStrategy(start_method=start_method)
    trainer = make_trainer(strategy, 2, max_epochs=1)
    trainer.fit(model, values(8, shuffle=True), values(7))
    return model.weight.item(), trainer.callback_metrics["mean"].item()


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=[pytest.mark.slow])])
@pytest.mark.timeout(180)
def test_processes_are_forked_or_spawned(start_method: str) -> None:
    weight, mean = run_alone(launch, start_method, timeout_s=170)
    assert weight == sum(range(8)) / 2  # DDP takes the mean of the two ranks' gradients
    assert mean == 3.0
