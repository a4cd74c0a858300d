"""What Lightning had still to do when a checkpoint was saved in the end of a batch or an epoch.

A callback that saves in ``on_train_batch_end`` does so before the validation that may be due after
the batch, and before schedules follow what they monitor; one that saves in ``on_train_epoch_end``,
before those that do so by epoch. A run that goes on from there has to do it first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ProgressBar

from shardplug_lightning.internals import (
    COUNTS,
    callback_metrics,
    callbacks_of,
    count_logged_steps,
    counts_step_again,
    end_epoch,
    goes_back_to_validation,
    leave_restart,
    logged_in_epoch,
    starts_epoch,
)


@dataclass(frozen=True, slots=True)
class Owed:
    """What is still to be done.

    Attributes:
        batches: How many batches of the epoch were done, if it was saved in the end of one.
        is_last: Whether that batch is the last of its epoch.
        epochs: How many epochs were done, if it was saved in the end of one.
        metrics: What callbacks and schedules saw then.
    """

    batches: int | None = None
    is_last: bool = False
    epochs: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def settle(self, trainer: Trainer) -> None:
        """Do it, or let Lightning, at the start of a run that goes on.

        Args:
            trainer: The trainer, whose loops count from the checkpoint.

        Raises:
            PlanError: If this version of Lightning cannot be told so.
        """
        for name, value in self.metrics.items():
            tensor = torch.tensor(value, device=trainer.strategy.root_device)
            trainer.callback_metrics.setdefault(name, tensor)
        if self.epochs is not None:
            step_plateaus(trainer, "epoch", self.epochs)
            trainer.fit_loop.epoch_loop.restarting = False  # the one that follows is a new one
        leave_restart(trainer)
        if starts_epoch(trainer):
            # A window is made again, or more ranks have done not one batch. Lightning would
            # validate after none, too.
            trainer.fit_loop.epoch_loop.restarting = False
        is_owed, goes_back = self.batches is not None, goes_back_to_validation(trainer)
        # Lightning counts the step of a batch at its very end, and where it goes back into one.
        count_logged_steps(trainer, is_owed - counts_step_again(trainer) - goes_back)
        if self.batches is not None and not goes_back:
            step_plateaus(trainer, "step", self.batches)
            if self.is_last:
                end_epoch(trainer)


def owed_after(
    loops: dict[str, Any], *, is_whole: bool, is_over: bool, metrics: Mapping[str, float]
) -> Owed:
    """Find out what is still to be done after a checkpoint; Lightning's counts are set for it.

    Args:
        loops: The checkpoint's counts of the loops of ``fit``.
        is_whole: Whether training goes on after the batch in whose end it was saved: not where a
            window of accumulated gradients is made again.
        is_over: Whether the epoch of that batch is.
        metrics: That were saved.
    """
    progress, epochs = loops["epoch_loop.batch_progress"], loops["epoch_progress"]
    current = progress["current"]
    if epochs["current"]["processed"] == epochs["current"]["completed"] + 1:
        # With max_steps Lightning would go back into it.
        for counted in epochs.values():
            counted["completed"] += 1
        return Owed(epochs=epochs["current"]["processed"], metrics=metrics)
    counts = {current[name] for name in ("ready", "started", "processed")}
    in_validation = counts == {current["completed"]} != {0}
    if not is_whole or not (in_validation or counts == {current["completed"] + 1}):
        return Owed(metrics=metrics)
    if in_validation:
        return Owed(current["processed"], is_over, metrics=metrics)
    rewind(loops["epoch_loop.val_loop.batch_progress"], 0)  # that is run from there, if it is due
    if is_over:
        # Else Lightning would count the epoch as done, and leave out all that ends it.
        for counted in (current, progress["total"]):
            counted["completed"] = counted["processed"]
    return Owed(current["processed"], is_over, metrics=metrics)


def announce_epoch(trainer: Trainer) -> None:
    """Tell callbacks that do something for an epoch when it starts of one that is gone back into.

    Lightning does not tell again. What is not there in a new run is told: how far a progress bar
    goes, and of how many batches gradients are accumulated.

    Args:
        trainer: The trainer, whose loops count from the checkpoint.
    """
    if not trainer.fit_loop.restarted_mid_epoch:
        return
    for each in callbacks_of(trainer):
        if isinstance(each, ProgressBar | GradientAccumulationScheduler):
            each.on_train_epoch_start(trainer, trainer.lightning_module)


def rewind(progress: Mapping[str, Any], batches: int) -> None:
    """Count as if the batch after the given ones had failed: Lightning then makes it again.

    Args:
        progress: The counts of a loop in a checkpoint.
        batches: How many are done.
    """
    current = progress["current"]
    before = progress["total"]["processed"] - current["processed"]
    for name in COUNTS:
        current[name] = batches + (name in {"ready", "started"})
    _count_all(progress, before)


def align(progress: Mapping[str, Any]) -> None:
    """Count no more over all epochs than what has been processed.

    Where a batch had failed, Lightning begins it once more over all epochs than in its own, and
    tells by that what was under way when a later checkpoint was saved.

    Args:
        progress: The counts of a loop in a checkpoint.
    """
    _count_all(progress, progress["total"]["processed"] - progress["current"]["processed"])


def _count_all(progress: Mapping[str, Any], before: int) -> None:
    for name in COUNTS:
        progress["total"][name] = before + progress["current"][name]


def leave_behind(progress: dict[str, Any]) -> None:
    """Count no batch of the epoch that comes next, instead of all of the one before.

    Args:
        progress: The counts of a loop in a checkpoint.
    """
    progress["current"] = dict.fromkeys(COUNTS, 0)
    progress["is_last_batch"] = False


def take_back_fetch(loops: Mapping[str, Any]) -> None:
    """Count a batch that was being fetched as one that has failed, which has begun.

    Lightning would do once more what follows the batch before. And where no other batch follows the
    one that was being fetched, it would leave that out.

    Args:
        loops: The counts of the loops of ``fit``, of the checkpoint that is being saved.
    """
    batches = loops["epoch_loop.batch_progress"]
    batches["is_last_batch"] = False
    rewind(batches, batches["current"]["processed"])


def take_back_end(loops: Mapping[str, Any]) -> None:
    """Count an epoch as under way that has been ended before its last batch.

    So Lightning does where ``max_steps`` or ``trainer.should_stop`` end training in it. All that
    follows a batch has been done then, as where the next one has failed.

    Args:
        loops: The counts of the loops of ``fit``, of the checkpoint that is being saved.
    """
    current, total = loops["epoch_progress"]["current"], loops["epoch_progress"]["total"]
    done = current["processed"] - 1
    for name in ("processed", "completed"):
        total[name] -= current[name] - done
        current[name] = done
    batches = loops["epoch_loop.batch_progress"]
    rewind(batches, batches["current"]["processed"])


def step_plateaus(trainer: Trainer, interval: str, count: int) -> None:
    """Let the schedules that follow a metric follow it, as Lightning does at the end of something.

    Args:
        trainer: The trainer.
        interval: "step" or "epoch": what has ended.
        count: How many of them have.
    """
    module = trainer.lightning_module
    if not module.automatic_optimization:
        return
    for config in trainer.lr_scheduler_configs:
        is_due = config.interval == interval and count % config.frequency == 0
        value = trainer.callback_metrics.get(config.monitor or "")
        if config.reduce_on_plateau and is_due and value is not None:
            module.lr_scheduler_step(config.scheduler, value)


def known_metrics(trainer: Trainer, loops: Mapping[str, Any], *, is_over: bool) -> dict[str, float]:
    """List what callbacks and schedules see, as numbers. Not collective: nothing is reduced.

    Args:
        trainer: The trainer.
        loops: Its counts, of the checkpoint that is being saved.
        is_over: Whether the epoch is: what has been logged for its end is seen then, though of this
            rank only. Nothing else will have been logged in it after a resume.
    """
    current = loops["epoch_loop.batch_progress"]["current"]
    is_in_batch = current["processed"] == current["completed"] + 1
    # What was logged in this batch is seen by asking, and nothing waits for the end of an epoch.
    found = dict(trainer.callback_metrics if is_in_batch else callback_metrics(trainer))
    if is_in_batch and is_over:
        found |= logged_in_epoch(trainer)
    single = {
        name: value
        for name, value in found.items()
        if isinstance(value, torch.Tensor) and value.numel() == 1
    }
    return {name: float(value) for name, value in single.items()}
