"""Whatever a checkpoint is saved in, what comes after it comes after a resume, and once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.loggers.logger import Logger
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from shardplug import Comm, PlanError
from shardplug_lightning import ShardStrategy
from shardplug_lightning.endings import Owed, owed_after
from shardplug_lightning.internals import (
    callback_metrics,
    count_logged_steps,
    counts_step_again,
    end_epoch,
    goes_back_to_validation,
    leave_restart,
    logged_in_epoch,
)
from tests.integrations.lightning.ranks import Trainee, make_trainer, run_ranks, values
from tests.integrations.lightning.test_places import way_out
from tests.integrations.lightning.test_resume import Counting

BATCHES, EPOCHS = 5, 3


class Steps(Logger):
    """Notes at which step a validation is logged."""

    def __init__(self, log_book: list[Any]) -> None:
        super().__init__()
        self.log_book = log_book

    @property
    def name(self) -> str:
        return "steps"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if "val" in metrics:
            self.log_book.append(("logged", step, metrics["val"]))

    def log_hyperparams(self, *args: Any, **options: Any) -> None:
        pass


class Follows(Trainee):
    """Notes what happens, and at which rate; each look at what it follows halves that."""

    def __init__(self, schedule: Mapping[str, Any]) -> None:
        super().__init__()
        self.schedule = schedule
        self.log_book: list[Any] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:  # type: ignore[override]
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.log_book.append((self.current_epoch, batch_idx, self.trainer.is_last_batch, rate))
        self.log("seen", float(self.trainer.global_step))
        self.log("of the epoch", 2.0, on_step=False, on_epoch=True, batch_size=2, sync_dist=True)
        return super().training_step(batch)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log_book.append(("validate", self.current_epoch, batch_idx))
        self.log("val", float(self.trainer.global_step), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log_book.append(("end", self.current_epoch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        falls = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, min_lr=0.0, eps=0.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falls, **self.schedule}}


class Fetches(Follows):
    """Asks for its batches."""

    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        batch, *_ = next(dataloader_iter)
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.log_book.append((self.current_epoch, batch.tolist(), rate))
        self.log("seen", float(self.trainer.global_step), batch_size=2)
        loss: torch.Tensor = self.weight * batch.mean()
        return loss


class SaveEverywhere(Checkpoint):
    """Saves in every hook that Lightning's own saves in; last of all, as that does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.saved: list[tuple[str, int]] = []

    def save(self, trainer: Any, module: Any, hook: str) -> None:
        trainer.save_checkpoint(self.folder / f"{len(self.saved)}.ckpt")
        self.saved.append((hook, len(module.log_book)))

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.save(trainer, module, "batch")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.save(trainer, module, "validation")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.save(trainer, module, "epoch")


BY_EPOCH = {"interval": "epoch", "monitor": "val"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "by epoch": (BY_EPOCH, {}),
    "by epoch, of training": ({"interval": "epoch", "monitor": "seen"}, {"limit_val_batches": 0}),
    "by the epoch's": ({"interval": "epoch", "monitor": "of the epoch"}, {"limit_val_batches": 0}),
    "by step": ({"interval": "step", "monitor": "seen"}, {"val_check_interval": 2}),
    "every other epoch": ({**BY_EPOCH, "frequency": 2}, {"check_val_every_n_epoch": 2}),
    "with a limit of steps": (BY_EPOCH, {"max_steps": 100}),
    "of a stream": (BY_EPOCH, {}),
    "of a stream, of training": ({"interval": "step", "monitor": "seen"}, {"limit_val_batches": 0}),
    "windows": (BY_EPOCH, {"accumulate_grad_batches": 5, "val_check_interval": 5}),
}


def train(case: str, kind: type[Follows], **chosen: Any) -> Follows:
    schedule, options = CASES[case]
    model = kind(schedule)
    checkpoint = chosen.pop("checkpoint", None)
    logger = Steps(model.log_book)
    chosen = {"max_epochs": EPOCHS, "logger": logger, "log_every_n_steps": 1, **options, **chosen}
    if schedule["monitor"] == "of the epoch":  # which must be there at its end
        stops = EarlyStopping("of the epoch", patience=9, check_on_train_epoch_end=True)
        chosen["callbacks"] = [stops, *chosen.get("callbacks", [])]
    trainer = make_trainer(ShardStrategy(), 1, **chosen)
    stream = DataLoader(Counting(0, 2 * BATCHES), batch_size=2)
    training = stream if "stream" in case else values(2 * BATCHES, 2)
    trainer.fit(model, training, values(2, 1), ckpt_path=checkpoint)
    return model


def train_and_go_on(
    comm: Comm, folder: Path, case: str, kind: type[Follows] = Follows
) -> list[tuple[str, Any, Any]]:
    saves = SaveEverywhere(folder)
    whole = train(case, kind, callbacks=[saves], enable_checkpointing=True)
    found = []
    for number, (hook, known) in enumerate(saves.saved):
        after = train(case, kind, checkpoint=folder / f"{number}.ckpt")
        found.append((f"{number}: {hook}", whole.log_book[known:], after.log_book))
    return found


@pytest.mark.parametrize("case", CASES)
def test_all_that_comes_after_a_checkpoint_comes_after_a_resume(tmp_path: Path, case: str) -> None:
    (found,) = run_ranks(1, train_and_go_on, tmp_path, case)
    assert len(found) >= EPOCHS * (BATCHES + 1)
    for where, expected, after in found:
        if case == "windows" and after and after[0][1] == 0:
            # Gradients of a window that was cut open are made again.
            expected = after[: len(after) - len(expected)] + expected
        assert (where, after) == (where, expected)


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
@pytest.mark.parametrize("case", ["by step", "of a stream, of training"])
def test_steps_that_ask_for_their_batches_go_on_too(tmp_path: Path, case: str) -> None:
    (found,) = run_ranks(1, train_and_go_on, tmp_path, case, Fetches)
    assert [(where, after) for where, _, after in found] == [
        (where, expected) for where, expected, _ in found
    ]


def test_a_schedule_has_followed_what_it_should(tmp_path: Path) -> None:
    ((first, *_),) = run_ranks(1, train_and_go_on, tmp_path, "by epoch")
    rates = [entry[3] for entry in first[1] if isinstance(entry[0], int)]
    # The first look is the best that there is, each later one is worse; saved after a batch.
    assert rates == [1.0] * 4 + [1.0] * 5 + [0.5] * 5


# -- what Lightning must have for it --------------------------------------------------------------


def test_another_lightning_that_does_otherwise_is_an_error() -> None:
    trainer: Any = make_trainer(ShardStrategy(), 1)
    with pytest.raises(PlanError, match=way_out("Trainer.fit_loop._data_fetcher")):
        end_epoch(trainer)
    trainer._logger_connector._callback_metrics = None
    with pytest.raises(PlanError, match=way_out("Trainer._logger_connector._callback_metrics")):
        callback_metrics(trainer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_results", None)
        with pytest.raises(PlanError, match=way_out("Trainer._results")):
            logged_in_epoch(trainer)
    trainer.fit_loop._restarting = None
    with pytest.raises(PlanError, match=way_out("Trainer.fit_loop._restarting")):
        leave_restart(trainer)
    trainer.fit_loop.epoch_loop._batches_that_stepped = None
    name = "Trainer.fit_loop.epoch_loop._batches_that_stepped"
    with pytest.raises(PlanError, match=way_out(name)):
        count_logged_steps(trainer, 1)
    trainer.fit_loop.epoch_loop._should_accumulate = None
    name = "Trainer.fit_loop.epoch_loop._should_accumulate"
    with pytest.raises(PlanError, match=way_out(name)):
        counts_step_again(trainer)
    trainer.fit_loop.epoch_loop._should_check_val_fx = None
    name = "Trainer.fit_loop.epoch_loop._should_check_val_fx"
    with pytest.raises(PlanError, match=way_out(name)):
        goes_back_to_validation(trainer)


def counts(*numbers: int) -> dict[str, int]:
    return dict(zip(("ready", "started", "processed", "completed"), numbers, strict=True))


def loops(batches: dict[str, int], epochs: dict[str, int]) -> dict[str, Any]:
    return {
        "epoch_progress": {"current": epochs, "total": dict(epochs)},
        "epoch_loop.batch_progress": {"current": batches, "total": dict(batches)},
        "epoch_loop.val_loop.batch_progress": {
            "current": counts(2, 2, 2, 2),
            "total": counts(4, 4, 4, 4),
        },
    }


def test_what_is_owed_is_told_by_the_counts() -> None:
    in_epoch, after_it = counts(1, 1, 0, 0), counts(1, 1, 1, 0)
    whole = {"is_whole": True, "metrics": {}}
    in_batch = loops(counts(3, 3, 3, 2), in_epoch)
    assert owed_after(in_batch, is_over=False, **whole) == Owed(3)  # type: ignore[arg-type]
    assert in_batch["epoch_loop.batch_progress"]["current"] == counts(3, 3, 3, 2)
    assert in_batch["epoch_loop.val_loop.batch_progress"]["current"] == counts(1, 1, 0, 0)
    last = loops(counts(5, 5, 5, 4), in_epoch)
    assert owed_after(last, is_over=True, **whole) == Owed(5, is_last=True)  # type: ignore[arg-type]
    assert last["epoch_loop.batch_progress"]["total"] == counts(5, 5, 5, 5)
    for batches, owed in [
        (counts(3, 3, 3, 3), Owed(3)),  # in a validation
        (counts(4, 4, 3, 3), Owed()),  # in a step
        (counts(0, 0, 0, 0), Owed()),
    ]:
        between = loops(batches, in_epoch)
        assert owed_after(between, is_over=False, **whole) == owed  # type: ignore[arg-type]
        assert between["epoch_loop.val_loop.batch_progress"]["current"] == counts(2, 2, 2, 2)
    cut = loops(counts(3, 3, 3, 2), in_epoch)
    assert owed_after(cut, is_whole=False, is_over=False, metrics={}) == Owed()
    ended = loops(counts(5, 5, 5, 5), after_it)
    assert owed_after(ended, is_over=False, **whole) == Owed(epochs=1)  # type: ignore[arg-type]
    assert ended["epoch_progress"] == dict.fromkeys(("current", "total"), counts(1, 1, 1, 1))
