"""Where training stands, as checkpoints tell: what is in them, and what is said of misfits."""

from __future__ import annotations

import re
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from shardplug import Comm, PlanError, ShardplugWarning, StateError
from shardplug_lightning import ShardStrategy
from shardplug_lightning.internals import (
    count_as_over,
    count_batches,
    fetch_again,
    follows_shortest,
    starts_epoch,
)
from shardplug_lightning.positions import KEY, Place, TrainingBook, _longest_window
from tests.integrations.lightning.ranks import Trainee, make_trainer, run_ranks, values

Seen = dict[str, list[list[int]]]


def fit(comm: Comm, strategy: Any, loader: Any, **options: Any) -> tuple[Seen, Trainer]:
    model, checkpoint = Trainee(), options.pop("checkpoint", None)
    trainer = make_trainer(strategy, comm.world_size, **{"max_epochs": 2, **options})
    trainer.fit(model, loader, ckpt_path=checkpoint)
    return dict(model.seen), trainer


def checkpointed(folder: Path, **options: Any) -> dict[str, Any]:
    saves = ModelCheckpoint(folder, "{step}", save_top_k=-1, save_last=True, **options)
    return {"callbacks": [saves], "enable_checkpointing": True}


def go_on_as_lightning_saves(comm: Comm, folder: Path) -> dict[str, Any]:
    loader = values(24, 2, shuffle=True)
    every_five = checkpointed(folder / "steps", every_n_train_steps=5)
    whole, _ = fit(comm, ShardStrategy(), loader, **every_five)
    file = folder / "steps" / "step=5.ckpt"
    found = {"whole": whole, "entry": torch.load(file, weights_only=True)[KEY]}
    for name in ("step=5", "step=10", "last"):
        # An order that was drawn goes on too, in another process that would draw another.
        torch.manual_seed(99)
        again = checkpointed(folder / f"after {name}", every_n_train_steps=5)
        checkpoint = folder / "steps" / f"{name}.ckpt"
        found[name], _ = fit(comm, ShardStrategy(), loader, checkpoint=checkpoint, **again)
    every_five = checkpointed(folder / "limited", every_n_train_steps=5)
    every_five |= {"max_steps": 8, "max_epochs": -1, "checkpoint": file}
    limited, _ = fit(comm, ShardStrategy(), loader, **every_five)
    found["max_steps"] = limited
    return found


@pytest.mark.filterwarnings("ignore:.*dirpath has changed")
def test_checkpoints_that_lightning_saves_are_gone_on_from(tmp_path: Path) -> None:
    for found in run_ranks(2, go_on_as_lightning_saves, tmp_path):
        whole = found["whole"]
        entry = found["entry"]
        assert {name: entry[name] for name in ("version", "epoch", "batches")} == {
            "version": 1,
            "epoch": 0,
            "batches": 5,
        }
        assert [state["consumed"] for state in entry["loaders"]] == [20]
        assert found["step=5"] == {**whole, "train 0": whole["train 0"][5:]}
        assert found["step=10"] == {"train 1": whole["train 1"][4:]}
        assert found["last"] == {"train 1": whole["train 1"][4:]}
        assert found["max_steps"] == {
            "train 0": whole["train 0"][5:],
            "train 1": whole["train 1"][:2],
        }


def load_what_others_saved(comm: Comm, folder: Path) -> list[Any]:
    loader, found = values(8, 2), list[Any]()
    cases: list[tuple[str, Any, Any]] = [
        ("mid", DDPStrategy(), {"every_n_train_steps": 3}),
        ("end", DDPStrategy(), {"every_n_epochs": 1}),
    ]
    for name, strategy, options in cases:
        saved = checkpointed(folder / name, **options)
        fit(comm, strategy, loader, max_epochs=1, use_distributed_sampler=False, **saved)
        kept = {"callbacks": saved["callbacks"], "enable_checkpointing": True}
        kept["callbacks"] = [ModelCheckpoint(folder / f"{name} again", **options)]
        file = next(folder.glob(f"{name}/step=*.ckpt"))
        if name == "mid":
            with pytest.warns(ShardplugWarning) as caught:
                seen, _ = fit(comm, ShardStrategy(), loader, checkpoint=file, **kept)
            found.append((str(caught[0].message), seen))
        else:
            found.append(fit(comm, ShardStrategy(), loader, checkpoint=file, **kept)[0])
    # And the other way round: Lightning's own strategy takes what this one saved.
    saved = checkpointed(folder / "ours", every_n_epochs=1)
    fit(comm, ShardStrategy(), loader, max_epochs=1, **saved)
    kept = {"callbacks": [ModelCheckpoint(folder / "last")], "enable_checkpointing": True}
    file = next(folder.glob("ours/step=*.ckpt"))
    found.append(fit(comm, DDPStrategy(), loader, checkpoint=file, **kept)[0])
    return found


@pytest.mark.filterwarnings("ignore:.*dirpath has changed", "ignore:.*callbacks used to create")
def test_checkpoints_without_places_load_all_the_same(tmp_path: Path) -> None:
    ((mid, end, ours),) = run_ranks(1, load_what_others_saved, tmp_path)
    everything = [[0, 1], [2, 3], [4, 5], [6, 7]]
    told, seen = mid
    assert told == (
        "The checkpoint was saved after 3 batches of an epoch, without the positions of the "
        "loaders: the steps that are left of it read its data from the start. Save checkpoints "
        "with this strategy."
    )
    assert seen == {"train 0": everything[:1], "train 1": everything}
    assert end == {"train 1": everything}
    assert sorted(chain.from_iterable(ours["train 1"])) == list(range(8))  # which shuffles


def refuse(comm: Comm, folder: Path) -> list[str]:
    file = folder / "cut.ckpt"
    _, trainer = fit(comm, ShardStrategy(), values(8, 2), max_steps=3, max_epochs=-1)
    trainer.save_checkpoint(file)
    told = []
    for loader in (values(10, 2), [values(8, 2), values(8, 2)]):
        with pytest.raises(StateError) as caught:
            fit(comm, ShardStrategy(), loader, checkpoint=file)
        told.append(str(caught.value))
    content = torch.load(file, weights_only=True)
    content[KEY] = {"version": 9}
    torch.save(content, file)
    with pytest.raises(StateError) as caught:
        fit(comm, ShardStrategy(), values(8, 2), checkpoint=file)
    return [*told, str(caught.value)]


def test_a_checkpoint_of_other_loaders_is_an_error_before_the_loop(tmp_path: Path) -> None:
    (told,) = run_ranks(1, refuse, tmp_path)
    assert told[0].startswith("`num_samples` of the state must be that of the loader, 10, got 8.")
    assert told[1] == (
        "`loaders` of the checkpoint must be as many as there are to train on, 2, got 1. Train on "
        "the loaders that were saved."
    )
    assert told[2] == (
        "`shardplug` of the checkpoint must be of version 1, got 9. Load it with the version of "
        "shardplug that saved it."
    )


WHOLE = Place(2, 3, ({"epoch": 2},), (True,))


def test_a_place_is_read_as_it_was_written() -> None:
    assert Place.read(WHOLE.as_dict()) == WHOLE


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("epoch", "2", "int"),
        ("batches", None, "int"),
        ("loaders", {}, "list"),
        ("have_ended", 1, "list"),
    ],
)
def test_a_damaged_place_is_an_error(name: str, value: Any, kind: str) -> None:
    with pytest.raises(StateError) as caught:
        Place.read({**WHOLE.as_dict(), name: value})
    assert str(caught.value) == (
        f"`{name}` of `shardplug` in the checkpoint must be of type {kind}, got {value!r}. The "
        "checkpoint is damaged: take another one."
    )


def test_what_is_no_place_is_an_error() -> None:
    with pytest.raises(StateError, match=r"must be of version 1, got 'no'\."):
        Place.read("no")


def test_the_longest_window_is_found() -> None:
    trainer = make_trainer(ShardStrategy(), 1, accumulate_grad_batches=2)
    assert _longest_window(trainer) == 2
    grows = GradientAccumulationScheduler({0: 1, 3: 8})
    assert _longest_window(make_trainer(ShardStrategy(), 1, callbacks=[grows])) == 8


def way_out(name: str) -> str:
    return re.escape(
        f"`lightning` must have {name} to go on inside an epoch, got version "
        f"{lightning.__version__} without it. Install lightning 2.6, or go on from a checkpoint of "
        "the end of an epoch."
    )


def test_another_lightning_that_counts_otherwise_is_an_error() -> None:
    trainer: Any = make_trainer(ShardStrategy(), 1)
    trainer.fit_loop.epoch_loop.batch_progress = None
    for count in (partial(count_batches, done=1), count_as_over):
        with pytest.raises(PlanError, match=way_out("Trainer.fit_loop.epoch_loop.batch_progress")):
            count(trainer)
    with pytest.raises(PlanError, match=way_out("Trainer.fit_loop._combined_loader._mode")):
        follows_shortest(trainer)
    with pytest.raises(PlanError, match=way_out("Trainer.fit_loop._data_fetcher")):
        fetch_again(trainer)


def test_batches_that_are_counted() -> None:
    trainer: Any = make_trainer(ShardStrategy(), 1)
    progress = trainer.fit_loop.epoch_loop.batch_progress
    trainer.fit_loop.max_batches = 10
    trainer.fit_loop._data_fetcher = fetcher = SimpleNamespace(done=False, batches=["held"])

    def counts() -> list[int]:
        current = progress.current
        return [current.ready, current.started, current.processed, current.completed]

    progress.current.ready, progress.current.started = 4, 4
    progress.current.processed, progress.current.completed = 4, 3
    count_batches(trainer, 6)
    assert counts() == [6, 6, 6, 5]
    count_as_over(trainer)
    assert counts() == [10, 10, 10, 9]
    count_batches(trainer, 2)
    count_batches(trainer, 12)  # nothing is left for so many ranks
    assert counts() == [10, 10, 10, 10]
    assert progress.is_last_batch
    assert fetcher == SimpleNamespace(done=True, batches=[])
    assert not starts_epoch(trainer)
    count_batches(trainer, 0)
    assert starts_epoch(trainer)


def test_one_batch_is_told_as_one() -> None:
    loops: dict[str, Any] = {
        "state_dict": {},
        "epoch_progress": {"current": {"processed": 0}},
        "epoch_loop.batch_progress": {"is_last_batch": False, "current": one(), "total": one()},
        "epoch_loop.val_loop.batch_progress": {
            "is_last_batch": True,
            "current": one(),
            "total": one(),
        },
    }
    with pytest.warns(
        ShardplugWarning, match="^The checkpoint was saved after 1 batch of an epoch"
    ):
        TrainingBook().read({"loops": {"fit_loop": loops}})


def one() -> dict[str, int]:
    return dict.fromkeys(("ready", "started", "processed", "completed"), 1)
