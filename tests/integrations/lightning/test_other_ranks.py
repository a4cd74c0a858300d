"""On more ranks an epoch may have no batch that is done, or none that is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Checkpoint

from shardplug import Comm
from shardplug_lightning import ShardStrategy
from tests.integrations.lightning.ranks import make_trainer, run_ranks, values
from tests.integrations.lightning.test_plateau import Follows, SaveEverywhere, Steps
from tests.integrations.lightning.test_resumed_twice import Breaks

SAMPLES, SIZE = 28, 2  # 14 batches on one rank, 7 on two; half of them are 7 and 3


def train(comm: Comm, *callbacks: Any, checkpoint: Path | None = None) -> list[Any]:
    model = Follows({"interval": "step", "monitor": "seen"})
    options: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": 0.5}
    options |= {"logger": Steps(model.log_book), "log_every_n_steps": 1}
    options["enable_checkpointing"] = any(isinstance(each, Checkpoint) for each in callbacks)
    strategy = ShardStrategy(data_seed=5)
    trainer = make_trainer(strategy, comm.world_size, callbacks=list(callbacks), **options)
    training = values(SAMPLES, SIZE, shuffle=True)
    trainer.fit(model, training, values(2 * comm.world_size, 2), ckpt_path=checkpoint)
    told = [entry[:-1] for entry in model.log_book if isinstance(entry[0], int)]  # not the rates
    other = [entry for entry in model.log_book if not isinstance(entry[0], int)]
    return [told, [entry for entry in other if entry[0] == "logged"], other]


def save_all(comm: Comm, folder: Path) -> list[str]:
    saves = SaveEverywhere(folder)
    train(comm, saves)
    return [hook for hook, _ in saves.saved]


def go_on(comm: Comm, folder: Path, numbers: list[int]) -> list[list[Any]]:
    return [train(comm, checkpoint=folder / f"{number}.ckpt") for number in numbers]


NEXT_EPOCH = [(1, 0, False), (1, 1, False), (1, 2, True)]


def check(found: list[Any], left: list[Any], steps: int) -> None:
    """Check what one of two ranks notes of the rest of an epoch, and of the next."""
    told, logged, other = found
    assert told == left + NEXT_EPOCH
    assert [step for _, step, _ in logged] == [steps - 1, steps + 2]
    ends = [("validate", "end")[entry[0] == "end"] for entry in other if entry[0] != "logged"]
    assert ends == ["validate", "end"] * 2


@pytest.mark.parametrize(
    ("number", "left", "steps"),
    [
        # After one batch of seven: half a round of two ranks, which counts as none.
        (0, [(0, 0, False), (0, 1, False), (0, 2, True)], 1 + 3),
        (1, [(0, 1, False), (0, 2, True)], 2 + 2),
        # After six of seven on one rank, of the three that two ranks take none is left.
        (5, [], 6),
    ],
)
def test_an_epoch_is_ended_once_and_validated_after_its_end(
    tmp_path: Path, number: int, left: list[Any], steps: int
) -> None:
    (hooks,) = run_ranks(1, save_all, tmp_path)
    assert hooks[:6] == ["batch"] * 6
    for (found,) in run_ranks(2, go_on, tmp_path, [number]):
        check(found, left, steps)


def fail(comm: Comm, file: Path, batch: int) -> None:
    with pytest.raises(KeyError, match="killed"):
        train(comm, Breaks("on_before_optimizer_step", batch, file))


@pytest.mark.parametrize(
    ("batch", "left", "steps"),
    [
        (1, [(0, 0, False), (0, 1, False), (0, 2, True)], 1 + 3),
        (2, [(0, 1, False), (0, 2, True)], 2 + 2),
        (6, [], 6),
    ],
)
def test_so_is_one_in_which_a_batch_had_failed(
    tmp_path: Path, batch: int, left: list[Any], steps: int
) -> None:
    run_ranks(1, fail, tmp_path / "0.ckpt", batch)
    for (found,) in run_ranks(2, go_on, tmp_path, [0]):
        check(found, left, steps)
