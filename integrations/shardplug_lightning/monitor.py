"""`ShardMonitor`: what each rank has seen of the data, and how long it waited for it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader

from shardplug import PlanError, current_comm
from shardplug_lightning.internals import callbacks_of
from shardplug_lightning.views import LoaderView

_log = logging.getLogger("shardplug_lightning.monitor")


@dataclass(slots=True)
class Tally:
    """What was counted in an epoch, or a run.

    Attributes:
        samples: Real rows of the batches.
        repeats: Rows that only filled batches up.
        waiting_s: Seconds between batches, when data was waited for.
        computing_s: Seconds from the start of a batch to its end.
    """

    samples: int = 0
    repeats: int = 0
    waiting_s: float = 0.0
    computing_s: float = 0.0

    def add(self, other: Tally) -> None:
        """Add what was counted elsewhere."""
        self.samples += other.samples
        self.repeats += other.repeats
        self.waiting_s += other.waiting_s
        self.computing_s += other.computing_s

    @property
    def samples_per_s(self) -> float:
        """Samples in a second of waiting and computing, 0 if there was none."""
        seconds = self.waiting_s + self.computing_s
        return self.samples / seconds if seconds else 0.0


class ShardMonitor(Callback):
    """Logs for every training epoch and rank what came out of the loaders, and how fast.

    At the end of an epoch ``samples``, ``repeats``, ``waiting_s``, ``computing_s`` and
    ``samples_per_s`` of every rank go to the trainer's loggers under ``prefix/rank r/``, their sums
    (of ``samples_per_s``, too) under ``prefix/``; and at the end of training one line to the log of
    Python, on rank 0. What validation takes is not counted. In a step the clock is read twice and a
    few numbers are added; ranks talk once in an epoch. One of these callbacks is enough: what it
    has counted is gone for another.

    Args:
        prefix: What the names start with.

    Raises:
        PlanError: If ``prefix`` is no text.
    """

    def __init__(self, prefix: str = "shards") -> None:
        given: Any = prefix
        if not isinstance(given, str) or not given:
            raise PlanError(
                f"`prefix` must be a text that is not empty, got {prefix!r}. Leave it out."
            )
        self.prefix = prefix
        self.total = Tally()
        self._epoch = Tally()
        self._since_s = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to count.

        Args:
            trainer: The trainer.
            pl_module: What is trained.
        """
        self.total = Tally()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count a new epoch.

        Args:
            trainer: The trainer.
            pl_module: What is trained.
        """
        self._epoch, self._since_s = Tally(), time.perf_counter()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Count the time that the batch was waited for.

        Args:
            trainer: The trainer.
            pl_module: What is trained.
            batch: The batch.
            batch_idx: Its number.
        """
        now, tally = time.perf_counter(), self._epoch
        if self._since_s:  # not in an epoch that was resumed, where nothing has told its start
            tally.waiting_s += now - self._since_s
        self._since_s = now

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the time that was computed.

        Args:
            trainer: The trainer.
            pl_module: What is trained.
            outputs: What the step returned.
            batch: The batch.
            batch_idx: Its number.
        """
        now = time.perf_counter()
        self._epoch.computing_s += now - self._since_s
        self._since_s = now

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave out the time that validation took.

        Args:
            trainer: The trainer.
            pl_module: What is trained.
        """
        self._since_s = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what all ranks have counted.

        Collective: every rank must call it.

        Args:
            trainer: The trainer.
            pl_module: What is trained.
        """
        own, self._epoch = self._epoch, Tally()
        for view in _views_of(trainer):
            own.samples += view.track.samples
            own.repeats += view.track.repeats
            view.track.samples = view.track.repeats = 0
        comm = current_comm()
        by_rank: list[Tally] = comm.all_gather_object(own) if trainer.world_size > 1 else [own]
        everything, metrics = Tally(), {}
        for rank, tally in enumerate(by_rank):
            everything.add(tally)
            metrics.update(self._name(tally, f"rank {rank}/", tally.samples_per_s))
        speed = sum(tally.samples_per_s for tally in by_rank)
        metrics.update(self._name(everything, "", speed))
        self.total.add(everything)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)

    def _name(self, tally: Tally, of: str, samples_per_s: float) -> dict[str, float]:
        start = f"{self.prefix}/{of}"
        return {
            f"{start}samples": float(tally.samples),
            f"{start}repeats": float(tally.repeats),
            f"{start}waiting_s": tally.waiting_s,
            f"{start}computing_s": tally.computing_s,
            f"{start}samples_per_s": samples_per_s,
        }

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write one line that sums the run up, on rank 0.

        Args:
            trainer: The trainer.
            pl_module: What is trained.
        """
        if not trainer.is_global_zero:
            return
        total, ranks = self.total, trainer.world_size
        seconds = total.waiting_s + total.computing_s
        share = total.waiting_s / seconds if seconds else 0.0
        _log.info(
            "%d samples and %d repeats on %d ranks, %.0f samples/s; %.1f %% of the time data was "
            "waited for.",
            total.samples,
            total.repeats,
            ranks,
            total.samples_per_s * ranks,
            100 * share,
        )


def is_monitored(trainer: Trainer) -> bool:
    """Tell whether one of a trainer's callbacks asks for what is counted."""
    return any(isinstance(each, ShardMonitor) for each in callbacks_of(trainer))


def _views_of(trainer: Trainer) -> list[LoaderView]:
    flat = CombinedLoader(trainer.train_dataloader).flattened
    return [each for each in flat if isinstance(each, LoaderView)]
