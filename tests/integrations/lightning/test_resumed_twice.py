"""A run that has gone on from a checkpoint goes on once more, again as if it had not stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint

from shardplug import Comm
from shardplug_lightning import ShardStrategy
from shardplug_lightning.endings import align
from tests.integrations.lightning.ranks import make_trainer, run_ranks, values
from tests.integrations.lightning.test_cut_short import place_of
from tests.integrations.lightning.test_plateau import (
    BATCHES,
    Follows,
    SaveEverywhere,
    Steps,
    counts,
)

Options = dict[str, Any]


class Breaks(Callback):
    """Ends a run when it is told so often of one hook, and saves what there is."""

    def __init__(self, hook: str, times: int, file: Path) -> None:
        self.times, self.file = times, file
        setattr(self, hook, self._count)

    def _count(self, *args: Any) -> None:
        self.times -= 1
        if self.times < 0:
            raise KeyError("killed")

    def on_exception(self, trainer: Trainer, module: Any, exception: BaseException) -> None:
        trainer.save_checkpoint(self.file)


def train(options: Options, *callbacks: Callback, checkpoint: Path | None = None) -> Follows:
    monitor = "seen" if "limit_val_batches" in options else "val"
    model = Follows({"interval": "epoch", "monitor": monitor})
    chosen = {"max_epochs": 2, "logger": Steps(model.log_book), "log_every_n_steps": 1}
    chosen |= {"enable_checkpointing": any(isinstance(each, Checkpoint) for each in callbacks)}
    chosen |= options
    trainer = make_trainer(ShardStrategy(), 1, callbacks=list(callbacks), **chosen)
    trainer.fit(model, values(2 * BATCHES, 2), values(4, 2), ckpt_path=checkpoint)
    return model


def ends_of(log: list[Any], after: list[Any]) -> list[Any]:
    """Return as much of a log's end as there is of another one."""
    return log[len(log) - len(after) :]


def follows(log: list[Any], known: int, options: Options) -> list[Any]:
    """Return what comes after so much of a log; from the start of a window that is open there."""
    epoch, batch = divmod(sum(isinstance(entry[0], int) for entry in log[:known]), BATCHES)
    is_open = batch % options.get("accumulate_grad_batches", 1)
    return log[place_of(log, epoch * BATCHES + batch - is_open) if is_open else known :]


def go_on_from_all(
    folder: Path, first: Path, options: Options, whole: list[Any], expected: list[Any] | None = None
) -> list[tuple[str, list[Any], list[Any]]]:
    """Go on from a checkpoint; then from all that are saved meanwhile."""
    folder.mkdir()
    saves = SaveEverywhere(folder)
    second = train(options, saves, checkpoint=first).log_book
    found = [(first.name, ends_of(whole, second) if expected is None else expected, second)]
    begun = len(whole) - len(second)
    for number, (hook, known) in enumerate(saves.saved):
        third = train(options, checkpoint=folder / f"{number}.ckpt").log_book
        found.append(
            (f"{first.name}, {number}: {hook}", follows(whole, begun + known, options), third)
        )
    return found


def save_twice(comm: Comm, folder: Path, options: Options) -> list[tuple[str, list[Any], Any]]:
    saves = SaveEverywhere(folder)
    whole = train(options, saves).log_book
    hooks = [hook for hook, _ in saves.saved]
    firsts = {hooks.index(hook) for hook in set(hooks)} | {1}
    found = []
    for number in sorted(firsts):
        first = folder / f"{number}.ckpt"
        expected = follows(whole, saves.saved[number][1], options)
        found += go_on_from_all(folder / f"after-{number}", first, options, whole, expected)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 2, "limit_val_batches": 0},
        {"val_check_interval": 3, "check_val_every_n_epoch": None},
    ],
    ids=["plain", "windows", "validation across epochs"],
)
def test_a_checkpoint_of_a_run_that_has_gone_on_is_as_any_other(
    tmp_path: Path, options: Options
) -> None:
    (found,) = run_ranks(1, save_twice, tmp_path, options)
    assert len(found) > 20
    for where, expected, after in found:
        assert (where, after) == (where, expected)


def fail_and_save(comm: Comm, folder: Path, options: Options) -> list[tuple[str, list[Any], Any]]:
    whole = train(options).log_book
    found = []
    for hook, times in [
        ("on_before_optimizer_step", 2),
        ("on_train_epoch_start", 1),
        ("on_train_batch_start", BATCHES),
        ("on_train_batch_start", BATCHES + 1),
        ("on_validation_batch_end", 1),
        ("on_validation_start", 0),
        ("on_train_epoch_end", 0),
    ]:
        file = folder / f"{hook} {times}.ckpt"
        with pytest.raises(KeyError, match="killed"):
            train(options, Breaks(hook, times, file))
        found += go_on_from_all(folder / f"{hook} {times}", file, options, whole)
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"val_check_interval": 3, "check_val_every_n_epoch": None}],
    ids=["plain", "validation across epochs"],
)
def test_nor_is_one_of_a_run_that_has_gone_on_after_a_failure(
    tmp_path: Path, options: Options
) -> None:
    (found,) = run_ranks(1, fail_and_save, tmp_path, options)
    assert len(found) > 20
    for where, expected, after in found:
        assert (where, after) == (where, expected)


def fail_again(
    comm: Comm, folder: Path, breaks: list[tuple[str, int]], options: Options
) -> tuple[list[Any], list[Any]]:
    whole, file = train(options).log_book, None
    for number, (hook, times) in enumerate(breaks):
        file, last = folder / f"{number}.ckpt", file
        with pytest.raises(KeyError, match="killed"):
            train(options, Breaks(hook, times, file), checkpoint=last)
    return whole, train(options, checkpoint=file).log_book


def test_a_failure_of_the_last_batch_after_one_of_a_validation_loses_nothing(
    tmp_path: Path,
) -> None:
    options = {"max_epochs": 1, "val_check_interval": 2}
    breaks = [("on_validation_batch_end", 0), ("on_before_optimizer_step", 2)]
    ((whole, after),) = run_ranks(1, fail_again, tmp_path, breaks, options)
    last = next(at for at, entry in enumerate(whole) if entry[:2] == (0, BATCHES - 1))
    assert after == whole[last:]


def test_nothing_is_validated_before_the_first_batch_of_a_window_that_is_made_again(
    tmp_path: Path,
) -> None:
    options = {"max_epochs": 2, "val_check_interval": 3, "accumulate_grad_batches": 3}
    # After the last batch of the first epoch, and after two of three of a window of the second.
    breaks = [("on_train_batch_end", BATCHES - 1), ("on_train_batch_end", 1)]
    ((whole, after),) = run_ranks(1, fail_again, tmp_path, breaks, options)
    first = next(at for at, entry in enumerate(whole) if entry[:2] == (1, 0))
    assert after == whole[first:]


def test_a_validation_that_failed_inside_a_window_is_logged_at_its_step(tmp_path: Path) -> None:
    options = {"max_epochs": 1, "val_check_interval": 3, "accumulate_grad_batches": 2}
    breaks = [("on_validation_start", 0)]
    ((whole, after),) = run_ranks(1, fail_again, tmp_path, breaks, options)
    assert after == whole[place_of(whole, 2) :]


def test_what_had_failed_is_counted_once() -> None:
    progress = {"current": counts(3, 3, 3, 2), "total": counts(9, 9, 8, 7)}
    align(progress)
    assert progress == {"current": counts(3, 3, 3, 2), "total": counts(8, 8, 8, 7)}
