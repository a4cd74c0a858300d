"""Training that was ended inside an epoch, without a failure, goes on with the rest of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint
from torch.utils.data import DataLoader

from shardplug import Comm
from shardplug_lightning import ShardStrategy
from shardplug_lightning.endings import take_back_end
from tests.integrations.lightning.ranks import make_trainer, run_ranks, values
from tests.integrations.lightning.test_plateau import (
    BATCHES,
    Follows,
    SaveEverywhere,
    Steps,
    counts,
    loops,
)
from tests.integrations.lightning.test_resume import Counting

Options = dict[str, Any]


class Stops(Callback):
    """Wishes the end after some steps, as what watches a metric or a clock does."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.should_stop = trainer.global_step == self.steps


class SavesAtTheEnd(Checkpoint):
    """Saves when an epoch ends, as Lightning's own does by default where nothing is validated."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        trainer.save_checkpoint(self.file)


def train(
    comm: Comm, options: Options, *callbacks: Callback, checkpoint: Path | None = None
) -> Follows:
    model = Follows({"interval": "step", "monitor": "seen"})
    chosen = {"max_epochs": 2, "logger": Steps(model.log_book), "log_every_n_steps": 1}
    chosen["enable_checkpointing"] = any(isinstance(each, Checkpoint) for each in callbacks)
    is_stream = options.get("stream")
    chosen |= {name: value for name, value in options.items() if name != "stream"}
    devices = comm.world_size
    trainer = make_trainer(ShardStrategy(data_seed=5), devices, callbacks=list(callbacks), **chosen)
    num_samples = 2 * BATCHES * devices
    stream = DataLoader(Counting(0, num_samples), batch_size=2)
    training = stream if is_stream else values(num_samples, 2, shuffle=True)
    trainer.fit(model, training, values(2 * devices, 2), ckpt_path=checkpoint)
    return model


def stop_and_go_on(
    comm: Comm, folder: Path, options: Options, steps: Sequence[int], how: str
) -> tuple[Any, list[tuple[str, Any, Any]]]:
    whole = train(comm, options)
    found = []
    for last in steps:
        ended, after = folder / f"{last}-ended.ckpt", folder / f"{last}-after.ckpt"
        saves = SavesAtTheEnd(ended)
        if how == "max_steps":
            model = train(comm, {**options, "max_steps": last}, saves)
        else:
            model = train(comm, options, Stops(last), saves)
        model.trainer.save_checkpoint(after)
        for file in (ended, after):
            saved = torch.load(file, weights_only=True)
            assert saved["epoch"] == saved["shardplug"]["epoch"]
            gone_on = train(comm, options, checkpoint=file)
            assert gone_on.trainer.global_step == whole.trainer.global_step
            found.append((file.name, dict(gone_on.seen), gone_on.log_book))
    return (dict(whole.seen), whole.log_book), found


def place_of(log: list[Any], batch: int) -> int:
    """Find a batch of training in what was noted, counted over all epochs."""
    trained = [at for at, entry in enumerate(log) if isinstance(entry[0], int)]
    return trained[batch]


CASES: dict[str, Options] = {
    "plain": {},
    "validation after it": {"val_check_interval": 3},
    "windows": {"accumulate_grad_batches": 2, "limit_val_batches": 0},
    "of a stream": {"stream": True},
}


@pytest.mark.parametrize("case", CASES)
def test_the_rest_of_the_epoch_that_a_limit_of_steps_cut_short_is_read(
    tmp_path: Path, case: str
) -> None:
    steps = [2, 4] if case == "windows" else [3, 6]
    ((whole, found),) = run_ranks(1, stop_and_go_on, tmp_path, CASES[case], steps, "max_steps")
    seen, log = whole
    # Windows of an epoch: 2, 2 and 1 batches; else one of each.
    batches = [4, BATCHES + 2] if case == "windows" else [3, 6]
    expected = [batch for batch in batches for _ in range(2)]
    for batch, (file, seen_after, log_after) in zip(expected, found, strict=True):
        assert (file, log_after) == (file, log[place_of(log, batch) :])
        epoch, at = divmod(batch, BATCHES)
        left = {f"train {epoch}": seen[f"train {epoch}"][at:]}
        left |= {f"train {e}": seen[f"train {e}"] for e in range(epoch + 1, 2)}
        assert (file, seen_after) == (file, left)


def test_so_is_that_which_a_wish_for_the_end_cut_short(tmp_path: Path) -> None:
    arguments: Any = tmp_path, {}, [3, 6], "should_stop"
    for (_, log), found in run_ranks(2, stop_and_go_on, *arguments):
        for batch, (file, _, after) in zip([3, 3, 6, 6], found, strict=True):
            assert (file, after) == (file, log[place_of(log, batch) :])


def stop_and_save_everywhere(
    comm: Comm, folder: Path, options: Options, last: int
) -> tuple[list[Any], list[tuple[str, list[Any]]]]:
    saves = SaveEverywhere(folder)
    train(comm, options, Stops(last), saves)
    found = []
    for number, (hook, _) in [*enumerate(saves.saved)][-3:]:
        after = train(comm, options, checkpoint=folder / f"{number}.ckpt")
        found.append((hook, after.log_book))
    return train(comm, options).log_book, found


@pytest.mark.parametrize("last", [2, BATCHES])
def test_a_validation_for_the_end_of_training_is_not_due_when_that_goes_on(
    tmp_path: Path, last: int
) -> None:
    arguments: Any = tmp_path, {"val_check_interval": 3}, last
    ((log, found),) = run_ranks(1, stop_and_save_everywhere, *arguments)
    assert [hook for hook, _ in found] == ["batch", "validation", "epoch"]
    # What ends an epoch follows its last batch.
    rest = log[place_of(log, last - 1) + 1 :]
    assert [after for hook, after in found if hook != "epoch"] == [rest, rest]
    assert found[-1][1] == log[place_of(log, last) :]


def stop_twice(comm: Comm, folder: Path) -> tuple[list[Any], list[Any]]:
    files = folder / "first.ckpt", folder / "second.ckpt"
    train(comm, {"max_steps": 1}, SavesAtTheEnd(files[0]))
    train(comm, {"max_steps": 3}, SavesAtTheEnd(files[1]), checkpoint=files[0])
    return train(comm, {}).log_book, train(comm, {}, checkpoint=files[1]).log_book


def test_it_may_be_cut_short_more_than_once(tmp_path: Path) -> None:
    ((log, after),) = run_ranks(1, stop_twice, tmp_path)
    assert after == log[place_of(log, 3) :]


def stop_with_it(comm: Comm, folder: Path) -> tuple[list[Any], list[Any], int]:
    file = folder / "whole.ckpt"
    train(comm, {"max_steps": BATCHES}, SavesAtTheEnd(file))
    after = train(comm, {}, checkpoint=file)
    return train(comm, {}).log_book, after.log_book, after.trainer.current_epoch


def test_one_that_ended_with_the_limit_is_over(tmp_path: Path) -> None:
    ((log, after, epochs),) = run_ranks(1, stop_with_it, tmp_path)
    assert after == log[place_of(log, BATCHES) :]
    assert epochs == 2


def test_an_end_is_taken_back_in_all_counts() -> None:
    done, in_end, under_way = counts(2, 2, 2, 2), counts(2, 2, 2, 1), counts(2, 2, 1, 1)
    for ended in (done, in_end):
        found = loops(counts(3, 3, 3, 3), dict(ended))
        take_back_end(found)
        assert found["epoch_progress"] == {"current": under_way, "total": under_way}
        batches = counts(4, 4, 3, 3)
        assert found["epoch_loop.batch_progress"] == {"current": batches, "total": batches}
