"""A run that is told to end saves where it is, and goes on there when it is started again."""

from __future__ import annotations

import os
import signal
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from shardplug import Comm
from shardplug_lightning import ShardStrategy
from tests.integrations.lightning.notes import Epochs, Learner, joined, read
from tests.integrations.lightning.ranks import make_trainer, run_ranks, values

SAMPLES, SIZE, EPOCHS = 27, 2, 2
STEPS = 7  # of an epoch on two ranks


class Validates(Learner):
    """Validates too."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("mean", batch.mean(), sync_dist=True)


class Signals(Callback):
    """Sends its own process a signal, from one of the hooks of a batch of the run.

    The handlers of Lightning talk to the other ranks: all get the signal at the same place.
    """

    def __init__(self, number: signal.Signals, hook: str, batch: int) -> None:
        self.number, self.hook, self.batch = number, hook, batch
        self.started = -1

    def _come_to(self, hook: str) -> None:
        if hook == self.hook and self.started == self.batch:
            self.hook = "none: one signal is enough"
            os.kill(os.getpid(), self.number)

    def on_train_batch_start(self, *args: Any) -> None:
        self.started += 1
        self._come_to("on_train_batch_start")

    def on_after_backward(self, *args: Any) -> None:
        self._come_to("on_after_backward")

    def on_train_batch_end(self, *args: Any) -> None:
        self._come_to("on_train_batch_end")

    def on_validation_batch_end(self, *args: Any) -> None:
        self._come_to("on_validation_batch_end")


def fit(comm: Comm, notes: Path, *, checkpoint: Path | None = None, **options: Any) -> list[float]:
    # Coverage has a handler, which ends the process; Lightning leaves one that is there in place.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    model = Validates(notes.with_name(f"{notes.name}-{comm.rank}"))
    trainer = make_trainer(
        ShardStrategy(data_seed=5, tail="exact"),
        comm.world_size,
        max_epochs=EPOCHS,
        val_check_interval=3 if comm.world_size == 2 else None,
        **options,
    )
    trainer.fit(model, values(SAMPLES, SIZE, shuffle=True), values(8, 2), ckpt_path=checkpoint)
    return [*model.weight.tolist(), trainer.global_step]


def saving(kind: str, folder: Path) -> Callback:
    if kind == "OnExceptionCheckpoint":
        return OnExceptionCheckpoint(folder, "stopped")
    return ModelCheckpoint(folder, "stopped", save_on_exception=True, every_n_epochs=EPOCHS + 1)


CASES = [
    # When the signal comes, and after how many batches the run is stopped: Lightning ends the one
    # that it is in, and a validation where it stands.
    ("on_train_batch_start", 4, 5, "ModelCheckpoint"),
    ("on_after_backward", 0, 1, "OnExceptionCheckpoint"),
    ("on_train_batch_end", 8, 9, "ModelCheckpoint"),
    ("on_train_batch_end", 6, 7, "OnExceptionCheckpoint"),
    ("on_validation_batch_end", 2, 3, "ModelCheckpoint"),
]


def stop_and_go_on(comm: Comm, folder: Path) -> tuple[list[float], list[list[float]]]:
    whole = fit(comm, folder / "unbroken")
    after = []
    for number, (hook, batch, _, kind) in enumerate(CASES):
        callbacks = [saving(kind, folder / str(number)), Signals(signal.SIGTERM, hook, batch)]
        with pytest.raises(SIGTERMException):
            fit(
                comm,
                folder / f"before {number}",
                callbacks=callbacks,
                enable_checkpointing=True,
            )
        checkpoint = folder / str(number) / "stopped.ckpt"
        after.append(
            fit(
                comm,
                folder / f"after {number}",
                checkpoint=checkpoint,
                # One for exceptions removes its file once a run has ended well.
                callbacks=[saving(kind, folder / "later")],
                enable_checkpointing=True,
            )
        )
    return whole, after


def go_on_alone(comm: Comm, folder: Path) -> None:
    for number, (*_, kind) in enumerate(CASES):
        fit(
            comm,
            folder / f"alone {number}",
            checkpoint=folder / str(number) / "stopped.ckpt",
            callbacks=[saving(kind, folder / "later")],
            enable_checkpointing=True,
        )


def flat(by_rank: list[Epochs]) -> list[tuple[int, int]]:
    """List the samples that all ranks have seen, with their epochs."""
    return sorted(
        (epoch, sample)
        for epochs in by_rank
        for epoch, batches in epochs.items()
        for sample in chain(*batches)
    )


@pytest.mark.filterwarnings(
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:The dirpath has changed",
    # Lightning looks for a checkpoint of its own where there is only an OnExceptionCheckpoint.
    r"ignore:.*ckpt_path=None.* was called without a model",
    r"ignore:.*there is no last checkpoint available",
)
def test_a_run_that_got_sigterm_goes_on(tmp_path: Path) -> None:
    by_rank = run_ranks(2, stop_and_go_on, tmp_path)
    unbroken = read(tmp_path, "unbroken", 2)
    everything = [(epoch, sample) for epoch in range(EPOCHS) for sample in range(SAMPLES)]
    assert flat(unbroken) == everything
    for number, (_, _, done, _) in enumerate(CASES):
        before = read(tmp_path, f"before {number}", 2)
        after = read(tmp_path, f"after {number}", 2)
        assert [sum(map(len, epochs.values())) for epochs in before] == [done, done]
        assert [joined(*parts) for parts in zip(before, after, strict=True)] == unbroken
        for whole, resumed in by_rank:
            assert resumed[number] == pytest.approx(whole, rel=1e-6)
    run_ranks(1, go_on_alone, tmp_path)
    for number in range(len(CASES)):
        before = read(tmp_path, f"before {number}", 2)
        assert flat([*before, *read(tmp_path, f"alone {number}", 1)]) == everything


# -- a queue that stops jobs and starts them again -----------------------------------------------


def under_slurm(comm: Comm, folder: Path) -> None:
    rank, world_size = str(comm.rank), str(comm.world_size)
    os.environ.update(
        SLURM_NTASKS=world_size,
        SLURM_NTASKS_PER_NODE=world_size,
        SLURM_PROCID=rank,
        SLURM_LOCALID=rank,
        SLURM_NODEID="0",
        SLURM_JOB_ID="17",
        SLURM_JOB_NAME="train",
        PATH=f"{folder}{os.pathsep}{os.environ['PATH']}",
    )


REQUEUED = [
    # When the queue warns, and after how many batches the checkpoint is that this makes.
    ("on_train_batch_start", 4, 4),
    ("on_after_backward", 7, 7),
    ("on_train_batch_end", 9, 10),
    ("on_train_batch_end", 6, 7),
]


def requeue(comm: Comm, folder: Path) -> tuple[list[float], list[list[float]]]:
    whole = fit(comm, folder / "unbroken")
    under_slurm(comm, folder)
    after = []
    for number, (hook, batch, _) in enumerate(REQUEUED):
        options: dict[str, Any] = {"default_root_dir": folder / str(number)}
        warned = Signals(signal.SIGUSR1, hook, batch)
        stopped = Signals(signal.SIGTERM, "on_train_batch_end", batch + 1)
        with pytest.raises(SIGTERMException):
            fit(
                comm,
                folder / f"before {number}",
                callbacks=[warned, stopped],
                plugins=[SLURMEnvironment()],
                **options,
            )
        after.append(fit(comm, folder / f"after {number}", plugins=[SLURMEnvironment()], **options))
    return whole, after


def test_a_job_that_a_queue_starts_again_goes_on(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    queue = tmp_path / "scontrol"
    queue.write_text(f'#!/bin/sh\necho "$@" >> "{calls}"\n', encoding="utf-8")
    queue.chmod(0o755)
    by_rank = run_ranks(2, requeue, tmp_path)
    assert calls.read_text(encoding="utf-8").splitlines() == ["requeue 17"] * len(REQUEUED)
    unbroken = read(tmp_path, "unbroken", 2)
    for number, (_, _, done) in enumerate(REQUEUED):
        before = read(tmp_path, f"before {number}", 2, stop=done)
        after = read(tmp_path, f"after {number}", 2)
        assert [joined(*parts) for parts in zip(before, after, strict=True)] == unbroken
        for whole, resumed in by_rank:
            assert resumed[number] == pytest.approx(whole, rel=1e-6)
