"""Lightning's callbacks see what they would in an unbroken run of one device."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, IterableDataset

from shardplug import Comm
from shardplug_lightning import ShardSingleDeviceStrategy, ShardStrategy
from tests.integrations.lightning.notes import Epochs, Learner, SaveAt, read
from tests.integrations.lightning.ranks import make_trainer, run_alone, run_ranks, values

SAMPLES, SIZE = 12, 2


class Keeps(Logger):
    """Keeps what is logged under some name, with its step."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.wanted = name
        self.found: dict[int, float] = {}

    @property
    def name(self) -> str:
        return "kept"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """There are none."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        if self.wanted in metrics:
            self.found[step] = metrics[self.wanted]


# -- learning rates ------------------------------------------------------------------------------


class Overflows(LightningModule):
    """Makes gradients that overflow in some batches of the run."""

    def __init__(self, batches: Collection[int]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.batches = batches

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        at = self.current_epoch * 6 + batch_idx
        return self.weight * (float("inf") if at in self.batches else 1e-3)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step", "name": "rate"}]


SKIPPED = {0, 2, 3, 7, 10}
SAVED = (1, 3, 4, 6, 8, 11)


def rates_of(comm: Comm, folder: Path, checkpoint: Path | None = None) -> dict[int, float]:
    logger = Keeps("rate")
    callbacks: list[Callback] = [LearningRateMonitor("step")]
    if checkpoint is None:
        callbacks.append(SaveAt(folder, SAVED))
    trainer = make_trainer(
        ShardStrategy(),
        comm.world_size,
        max_epochs=2,
        logger=logger,
        log_every_n_steps=1,
        callbacks=callbacks,
        plugins=[MixedPrecision("16-mixed", "cpu")],
    )
    trainer.fit(Overflows(SKIPPED), values(6, 1), ckpt_path=checkpoint)
    return logger.found


def rates_before_and_after(comm: Comm, folder: Path) -> tuple[dict[int, float], list[Any]]:
    whole = rates_of(comm, folder)
    return whole, [rates_of(comm, folder, folder / f"{batch}.ckpt") for batch in SAVED]


def test_learning_rates_wait_for_real_steps_after_a_resume_too(tmp_path: Path) -> None:
    ((whole, after),) = run_ranks(1, rates_before_and_after, tmp_path)
    expected, made = {}, 0
    for batch in range(12):
        expected[batch] = 1 / (1 + made)  # what the batch is trained with
        made += batch not in SKIPPED
    assert whole == pytest.approx(expected)
    for batch, rates in zip(SAVED, after, strict=True):
        assert rates == pytest.approx({at: expected[at] for at in range(batch, 12)}), batch


# -- what is monitored ---------------------------------------------------------------------------


class Worsens(Learner):
    """Validates to what its epoch says; the ranks have different numbers of samples."""

    losses = (5.0, 3.0, 4.0, 4.5, 1.0, 0.5)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        loss = self.losses[self.current_epoch] + batch.mean() * 0
        self.log("loss", loss, sync_dist=True)


def watch(
    comm: Comm, folder: Path, notes: str, checkpoint: Path | None = None
) -> tuple[int, float, str, Any]:
    best = ModelCheckpoint(folder / "best", "{epoch}", monitor="loss", save_top_k=1)
    stopping = EarlyStopping("loss", patience=2)
    trainer = make_trainer(
        ShardStrategy(data_seed=2),
        comm.world_size,
        max_epochs=6,
        callbacks=[best, stopping, *([] if checkpoint else [SaveAt(folder, (7,))])],
        enable_checkpointing=True,
    )
    model = Worsens(folder / f"{notes}-{comm.rank}")
    trainer.fit(model, values(SAMPLES, SIZE, shuffle=True), values(7, 2), ckpt_path=checkpoint)
    assert best.best_model_score is not None
    return (
        trainer.current_epoch,
        best.best_model_score.item(),
        Path(best.best_model_path).name,
        stopping.stopped_epoch,
    )


def watch_twice(comm: Comm, folder: Path) -> list[Any]:
    whole = watch(comm, folder, "whole")
    return [whole, watch(comm, folder, "after", folder / "7.ckpt")]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_the_best_epoch_is_kept_and_training_stops_early(tmp_path: Path) -> None:
    # Three steps an epoch on two ranks: the checkpoint is of the third epoch, after one of them.
    for found in run_ranks(2, watch_twice, tmp_path):
        assert found == [(4, 3.0, "epoch=1.ckpt", 3)] * 2
    whole, after = read(tmp_path, "whole", 2), read(tmp_path, "after", 2)
    for rank in range(2):
        assert after[rank] == {2: whole[rank][2][1:], 3: whole[rank][3]}


# -- averages and windows ------------------------------------------------------------------------


class Averaged(Learner):
    """Has one schedule only, which is what averaging of weights takes."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def average(comm: Comm, folder: Path, notes: str, strategy: Any, checkpoint: Any = None) -> Any:
    model = Averaged(folder / f"{notes}-{comm.rank}")
    averaging = StochasticWeightAveraging(0.01, swa_epoch_start=2, annealing_epochs=1)
    saving = ModelCheckpoint(folder / notes, "{epoch}", save_top_k=-1)
    trainer = make_trainer(
        strategy, comm.world_size, max_epochs=5, callbacks=[averaging, saving], **CHECKPOINTS
    )
    trainer.fit(model, values(SAMPLES, SIZE, drop_last=True), ckpt_path=checkpoint)
    return model.weight.tolist()


CHECKPOINTS: dict[str, Any] = {"enable_checkpointing": True}


def average_all(comm: Comm, folder: Path) -> list[Any]:
    # Its sampler would shuffle.
    alone = ShardSingleDeviceStrategy(device="cpu")
    found = [average(comm, folder, "alone", alone)]
    found.append(average(comm, folder, "whole", ShardStrategy()))
    checkpoint = folder / "whole" / "epoch=2.ckpt"
    found.append(average(comm, folder, "after", ShardStrategy(), checkpoint))
    return found


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_weights_are_averaged(tmp_path: Path) -> None:
    ((alone, whole, after),) = run_ranks(1, average_all, tmp_path)
    assert whole == pytest.approx(alone, rel=1e-6)
    assert after == pytest.approx(whole, rel=1e-6)


def accumulate(comm: Comm, folder: Path, notes: str, checkpoint: Any = None) -> Any:
    model = Learner(folder / f"{notes}-{comm.rank}")
    windows = GradientAccumulationScheduler({0: 1, 1: 4, 2: 2})
    saving = [] if checkpoint else [SaveAt(folder, WINDOWS)]
    trainer = make_trainer(
        ShardStrategy(data_seed=2), comm.world_size, max_epochs=3, callbacks=[windows, *saving]
    )
    trainer.fit(model, values(SAMPLES, SIZE, shuffle=True), ckpt_path=checkpoint)
    return [*model.weight.tolist(), trainer.global_step]


WINDOWS = {3: 3, 6: 6, 8: 6, 9: 6, 10: 10, 11: 10, 12: 12, 13: 12, 17: 16}
"""After how many batches a checkpoint is, and those that are before the window that it cuts."""


def accumulate_all(comm: Comm, folder: Path) -> list[Any]:
    found = [accumulate(comm, folder, "whole")]
    return found + [accumulate(comm, folder, f"{at}", folder / f"{at}.ckpt") for at in WINDOWS]


def test_windows_that_change_from_epoch_to_epoch_go_on(tmp_path: Path) -> None:
    ((whole, *after),) = run_ranks(1, accumulate_all, tmp_path)
    assert whole[-1] == 6 + 2 + 3
    (seen,) = read(tmp_path, "whole", 1)
    for (saved, start), found in zip(WINDOWS.items(), after, strict=True):
        assert read(tmp_path, str(saved), 1) == [left_of(seen, start)], saved
        assert found == pytest.approx(whole, rel=1e-6), saved


def left_of(seen: Epochs, start: int) -> Epochs:
    """Leave out the first batches of a run."""
    left = {epoch: batches[max(0, start - 6 * epoch) :] for epoch, batches in seen.items()}
    return {epoch: batches for epoch, batches in left.items() if batches}


# -- progress bars -------------------------------------------------------------------------------


class LooksAtBar(Callback):
    """Notes where the bar of training is after each batch."""

    def __init__(self) -> None:
        self.found: list[tuple[int, float, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        bar: Any = trainer.progress_bar_callback
        if not trainer.is_global_zero:
            return  # where there is none
        if isinstance(bar, RichProgressBar):
            task: Any = bar.progress.tasks[bar.train_progress_bar_id]  # type: ignore[index,union-attr]
            at, total = task.completed, task.total
        else:
            at, total = bar.train_progress_bar.n, bar.train_progress_bar.total
        self.found.append((trainer.current_epoch, at, total))


def bars(comm: Comm, folder: Path, kind: str, batch: int) -> list[tuple[int, float, float]]:
    looks = LooksAtBar()
    bar = TQDMProgressBar() if kind == "tqdm" else RichProgressBar(leave=True)
    checkpoint = folder / f"{batch}.ckpt" if batch else None
    saving = [] if batch else [SaveAt(folder, (2, 3, 4))]
    trainer = make_trainer(
        ShardStrategy(data_seed=2),
        comm.world_size,
        max_epochs=2,
        callbacks=[bar, *saving, looks],
        enable_progress_bar=True,
    )
    model = Learner(folder / f"{kind} {batch}-{comm.rank}")
    trainer.fit(model, values(SAMPLES, SIZE, shuffle=True), ckpt_path=checkpoint)
    return looks.found


def bars_after(comm: Comm, folder: Path, kind: str, batches: Collection[int]) -> list[Any]:
    return [bars(comm, folder, kind, batch) for batch in batches]


@pytest.mark.parametrize("kind", ["tqdm", "rich"])
def test_progress_bars_go_on_where_the_run_was(tmp_path: Path, kind: str) -> None:
    (whole, *after), _ = run_ranks(2, bars_after, tmp_path, kind, (0, 2, 3, 4))
    expected = [(epoch, at, 3) for epoch in (0, 1) for at in (1, 2, 3)]
    assert whole == expected
    assert after == [expected[2:], expected[3:], expected[4:]]
    # Alone there are six batches in an epoch, of which the four of two ranks' steps are done.
    ((second, third, fourth),) = run_ranks(1, bars_after, tmp_path, kind, (2, 3, 4))
    expected = [(epoch, at, 6) for epoch in (0, 1) for at in (1, 2, 3, 4, 5, 6)]
    assert [second, third, fourth] == [expected[4:], expected[6:], expected[8:]]


# -- tuning --------------------------------------------------------------------------------------


class Tuned(Learner):
    """Has a size of batches, and a rate of learning, that can be found."""

    def __init__(self, notes: Path) -> None:
        super().__init__(notes)
        self.batch_size, self.lr = SIZE, 0.1

    def train_dataloader(self) -> Any:
        return values(SAMPLES, self.batch_size, shuffle=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Numbers(IterableDataset[torch.Tensor]):
    """A stream of which no length is known."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(float(SAMPLES)))


class TunedStream(Tuned):
    """Reads a stream."""

    def train_dataloader(self) -> Any:
        return DataLoader(Numbers(), batch_size=self.batch_size)


def tune(comm: Comm, folder: Path, finder: Callback | None, kind: type[Tuned], notes: str) -> Any:
    strategy: Any = ShardStrategy(data_seed=2)
    if notes.startswith("single"):  # Lightning searches for sizes with one device only
        strategy = ShardSingleDeviceStrategy(device="cpu", data_seed=2)
    elif notes == "stock":
        strategy = SingleDeviceStrategy("cpu")
    trainer = make_trainer(
        strategy,
        comm.world_size,
        max_epochs=2,
        callbacks=[finder] if finder else [],
        default_root_dir=folder,
    )
    model = kind(folder / f"{notes}-{comm.rank}")
    trainer.fit(model)
    return model.batch_size, model.lr, trainer.global_step


def find_sizes(comm: Comm, folder: Path) -> list[Any]:
    finders = [BatchSizeFinder(steps_per_trial=1, init_val=1, max_trials=3) for _ in "ab"]
    return [
        tune(comm, folder, finders[0], Tuned, "single"),
        tune(comm, folder, finders[1], Tuned, "stock"),
        tune(comm, folder, None, Tuned4, "single whole"),
    ]


class Tuned4(Tuned):
    """Has the size from the start."""

    def __init__(self, notes: Path) -> None:
        super().__init__(notes)
        self.batch_size = 4


def test_a_size_of_batches_is_found_and_trained_with(tmp_path: Path) -> None:
    assert run_alone(find_sizes, tmp_path) == [(4, 0.1, 6)] * 3
    seen, stock, whole = (
        read(tmp_path, each, 1)[0] for each in ("single", "stock", "single whole")
    )
    assert seen[0][-3:] == whole[0]
    assert seen[1] == whole[1]
    # The same trials, too: the first of them is of the loader that there was before.
    assert [len(batch) for batch in seen[0]] == [len(batch) for batch in stock[0]]
    assert len(seen[0]) == 3 + 3


def find_rates(comm: Comm, folder: Path) -> list[Any]:
    finders = [LearningRateFinder(num_training_steps=9, min_lr=1e-4, max_lr=1e-2) for _ in "ab"]
    return [
        tune(comm, folder, finders[0], Tuned, "rated"),
        tune(comm, folder, None, Tuned, "whole"),
        tune(comm, folder, finders[1], TunedStream, "rated stream"),
        tune(comm, folder, None, TunedStream, "stream"),
    ]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_training_is_the_same_after_a_rate_was_searched_for(tmp_path: Path, num_ranks: int) -> None:
    for found in run_ranks(num_ranks, find_rates, tmp_path):
        steps = [each[2] for each in found]
        assert steps == [12 // num_ranks] * 4
    for notes, unsearched in (("rated", "whole"), ("rated stream", "stream")):
        searched = read(tmp_path, notes, num_ranks)
        whole = read(tmp_path, unsearched, num_ranks)
        for tried, epochs in zip(searched, whole, strict=True):
            for epoch, batches in epochs.items():
                assert tried[epoch][-len(batches) :] == batches, (notes, epoch)


# -- what only has to run ------------------------------------------------------------------------


def run_with_clocks(comm: Comm, folder: Path) -> tuple[float, float, int]:
    timers = [Timer("00:01:00:00"), Timer("00:01:00:00")]
    checkpoint, steps = None, 0
    for timer in timers:
        trainer = make_trainer(
            ShardStrategy(data_seed=2),
            comm.world_size,
            max_epochs=2,
            callbacks=[timer, DeviceStatsMonitor(cpu_stats=True), SaveAt(folder, (4,))],
            logger=CSVLogger(folder),
            log_every_n_steps=1,
        )
        model = Learner(folder / f"clocks-{comm.rank}")
        trainer.fit(model, values(SAMPLES, SIZE, shuffle=True), ckpt_path=checkpoint)
        checkpoint, steps = folder / "4.ckpt", trainer.global_step
    return timers[0].time_elapsed(), timers[1].time_elapsed(), steps


@pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty")
def test_clocks_and_monitors_of_devices_run(tmp_path: Path) -> None:
    for first, second, steps in run_ranks(2, run_with_clocks, tmp_path):
        assert first > 0
        assert second > 0
        assert steps == 6
    for rank in range(2):
        (seen,) = read(tmp_path, "clocks", rank + 1)[rank:]
        assert {epoch: len(batches) for epoch, batches in seen.items()} == {0: 3, 1: 3 + 2}
