"""Training that could not get its next batch goes on with that one, and does nothing twice."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from shardplug import Comm
from shardplug_lightning import ShardStrategy
from tests.integrations.lightning.ranks import Values, make_trainer, run_ranks, values
from tests.integrations.lightning.test_cut_short import place_of
from tests.integrations.lightning.test_plateau import BATCHES, Follows, Steps
from tests.integrations.lightning.test_resume import Counting

Options = dict[str, Any]
EPOCHS, SIZE = 2, 2


class Damaged(Values):
    """Samples of which only so many can be read."""

    def __init__(self, num_samples: int, readable: int) -> None:
        super().__init__(num_samples)
        self.readable = readable

    def __getitem__(self, index: int) -> torch.Tensor:
        self.readable -= 1
        if self.readable < 0:
            raise OSError("cannot be read")
        return super().__getitem__(index)


class Moves(Follows):
    """Can move only so many batches."""

    def __init__(self, schedule: Options, movable: int) -> None:
        super().__init__(schedule)
        self.movable = movable

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:  # type: ignore[override]
        return super().training_step(batch[0] if isinstance(batch, list) else batch, batch_idx)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.movable -= self.trainer.training
        if self.movable < 0:
            raise OSError("cannot be moved")
        return batch


class SavesAtFailure(Callback):
    """Saves what there is."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_exception(self, trainer: Trainer, *args: Any) -> None:
        trainer.save_checkpoint(self.file)


class Signals(Callback):
    """Sends SIGTERM at the end of a validation, which Lightning obeys before the next batch."""

    def __init__(self, validations: int) -> None:
        self.validations = validations

    def on_validation_end(self, *args: Any) -> None:
        self.validations -= 1
        if self.validations == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def train(
    options: Options,
    *callbacks: Callback,
    readable: int = 1000,
    movable: int = 1000,
    checkpoint: Path | None = None,
) -> list[Any]:
    # Coverage has a handler, which ends the process; Lightning leaves one that is there in place.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    model = Moves({"interval": "step", "monitor": "seen"}, movable)
    chosen = {"max_epochs": EPOCHS, "logger": Steps(model.log_book), "log_every_n_steps": 1}
    chosen["callbacks"] = [*callbacks]
    chosen |= {name: value for name, value in options.items() if name != "beside"}
    trainer = make_trainer(ShardStrategy(data_seed=5), 1, **chosen)
    samples = Damaged(SIZE * BATCHES, readable)
    training: Any = DataLoader(samples, batch_size=SIZE, shuffle=True)
    if "beside" in options:  # of unknown length, so that batches are fetched ahead
        training = [training, DataLoader(Counting(50, SIZE * BATCHES), batch_size=SIZE)]
    try:
        trainer.fit(model, training, values(4, SIZE), ckpt_path=checkpoint)
    except (OSError, SIGTERMException):
        model.log_book.append("stopped")
    return model.log_book


def stop(options: Options, file: Path, how: str, number: int) -> list[Any]:
    saves = SavesAtFailure(file)
    if how == "read":
        return train(options, saves, readable=SIZE * number)
    if how == "moved":
        return train(options, saves, movable=number)
    return train(options, saves, Signals(number))


def stop_and_go_on(
    comm: Comm, folder: Path, options: Options, how: str
) -> tuple[list[Any], list[tuple[list[Any], list[Any]]]]:
    whole, found = train(options), []
    num_validations = sum(entry[0] == "logged" for entry in whole)
    last = EPOCHS * BATCHES if how != "told to end" else num_validations
    for number in range(1, last):
        file = folder / f"{number}.ckpt"
        stopped = stop(options, file, how, number)
        found.append((stopped, train(options, checkpoint=file)))
    return whole, found


@pytest.mark.parametrize("how", ["read", "moved", "told to end"])
@pytest.mark.parametrize(
    "options",
    [
        {"val_check_interval": 2},
        {"val_check_interval": 2, "accumulate_grad_batches": 2},
        {"beside": True},
    ],
    ids=["plain", "windows", "fetched ahead"],
)
def test_training_goes_on_with_the_batch_that_could_not_be_had(
    tmp_path: Path, options: Options, how: str
) -> None:
    ((whole, found),) = run_ranks(1, stop_and_go_on, tmp_path, options, how)
    assert found
    for stopped, after in found:
        assert stopped[-1] == "stopped"
        epoch, batch = divmod(sum(isinstance(entry[0], int) for entry in stopped), BATCHES)
        begins = batch - batch % options.get("accumulate_grad_batches", 1)
        assert after == whole[place_of(whole, epoch * BATCHES + begins) :]
