"""Schedules wait where the gradient scaler skips a step, which Lightning counts all the same."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Collection
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau, StepLR

from shardplug import Comm
from shardplug_lightning import ShardStrategy
from shardplug_lightning.schedules import PatientScheduler, RealSteps
from tests.integrations.lightning.ranks import Trainee, make_trainer, run_ranks, values


class Overflows(Trainee):
    """Makes gradients that overflow in some batches; notes the learning rates."""

    def __init__(self, batches: Collection[int], *, is_manual: bool = False) -> None:
        super().__init__()
        self.batches = batches
        self.automatic_optimization = not is_manual
        self.rates: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:  # type: ignore[override]
        loss = self.weight * (float("inf") if batch_idx in self.batches else 1.0)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            schedule: Any = self.lr_schedulers()
            schedule.step()
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        optimizer: Any = self.optimizers()
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Looks(Callback):
    """Looks at the schedule that Lightning holds."""

    def __init__(self) -> None:
        self.found: list[tuple[bool, bool, float]] = []

    def on_train_end(self, trainer: Any, module: Any) -> None:
        schedule = trainer.lr_scheduler_configs[0].scheduler
        rate = schedule.get_last_lr()[0]
        self.found.append((isinstance(schedule, LRScheduler), "_steps" in schedule.__dict__, rate))
        assert schedule.state_dict()["last_epoch"] == schedule.last_epoch


def train(comm: Comm, strategy: Any, *, is_manual: bool) -> tuple[list[float], Any, int]:
    model = Overflows({0, 2, 3}, is_manual=is_manual)
    precision = MixedPrecision("16-mixed", "cpu")
    looks = Looks()
    trainer = make_trainer(
        strategy, comm.world_size, max_epochs=1, plugins=[precision], callbacks=[looks]
    )
    trainer.fit(model, values(6, 1))
    return model.rates, looks.found, trainer.global_step


def train_all(comm: Comm) -> list[Any]:
    return [train(comm, ShardStrategy(), is_manual=manual) for manual in (False, True)]


def test_a_schedule_waits_for_real_steps() -> None:
    (by_mode,) = run_ranks(1, train_all)
    for rates, found, global_step in by_mode:
        assert rates == pytest.approx([1, 1 / 2, 1 / 2, 1 / 2, 1 / 3, 1 / 4])
        assert found == [(True, True, pytest.approx(1 / 4))]
        assert global_step == 6  # of Lightning's, which counts what was tried


def train_as_lightning_does(comm: Comm) -> Any:
    return train(comm, DDPStrategy(), is_manual=False)


def test_lightning_itself_warns_and_advances() -> None:
    with pytest.raises(UserWarning, match=r"before `optimizer.step\(\)`"):
        run_ranks(1, train_as_lightning_does)


class Scaler:
    """A scaler whose scale the test sets."""

    scale = 4.0

    def get_scale(self) -> float:
        return self.scale


class Config:
    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler


def make(scaler: Any) -> tuple[RealSteps, torch.optim.Optimizer, list[Config]]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    steps = RealSteps(scaler)
    configs = [Config(StepLR(optimizer, 1, 0.5)), Config(ReduceLROnPlateau(optimizer))]
    optimizer.step()  # so that torch does not warn of schedules that are first
    steps.guard(configs)
    return steps, optimizer, configs


def test_one_real_step_since_the_last_time_is_enough() -> None:
    scaler = Scaler()
    steps, optimizer, (config, plateau) = make(scaler)
    assert type(plateau.scheduler) is ReduceLROnPlateau
    for scale in (4.0, 2.0):
        with steps.watch(optimizer):
            scaler.scale = scale
    config.scheduler.step()
    assert config.scheduler.get_last_lr() == [0.5]
    with steps.watch(optimizer):
        scaler.scale = 1.0
    config.scheduler.step()
    assert config.scheduler.get_last_lr() == [0.5]
    config.scheduler.step()  # no step was tried: whoever calls this counts something else
    assert config.scheduler.get_last_lr() == [0.25]


def test_without_a_scaler_schedules_stay_as_they_are() -> None:
    steps, optimizer, (config, _) = make(None)
    assert type(config.scheduler) is StepLR
    with steps.watch(optimizer):
        pass
    assert steps.of(optimizer) == (0, 0)


def test_a_patient_schedule_is_the_schedule_but_for_its_steps() -> None:
    steps, optimizer, (config, _) = make(Scaler())
    schedule: PatientScheduler = config.scheduler
    assert schedule.optimizer is optimizer
    assert schedule.step_size == 1
    with pytest.raises(AttributeError):
        _ = schedule.no_such_thing
    schedule.step()
    other = StepLR(optimizer, 1, 0.5)
    PatientScheduler(other, steps).load_state_dict(schedule.state_dict())
    assert other.last_epoch == schedule.last_epoch == 1
    assert copy.deepcopy(schedule).last_epoch == 1


def test_counts_stay_in_their_process() -> None:
    steps, optimizer, _ = make(None)
    assert pickle.loads(pickle.dumps(steps)).of(optimizer) == (0, 0)
