"""A run that is killed without warning goes on from its last checkpoint, and nothing is lost.

Where it is killed, how often it saves and what it reads are drawn from a seed, which is the name of
the case.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from shardplug import Comm
from shardplug_lightning import ShardStrategy
from tests.integrations.lightning.notes import Epochs, Learner, joined, read
from tests.integrations.lightning.ranks import make_trainer, run_ranks, values
from tests.launch import RankError

pytestmark = pytest.mark.filterwarnings(
    "ignore:Checkpoint directory .* exists and is not empty"  # it is to be gone on with
)

# Of an epoch on two ranks no step leaves a sample or two, which three ranks could not share.
SAMPLES, SIZE, EPOCHS, OTHERS = 27, 2, 3, 100
LAST = "last of the killed run.ckpt"


@dataclass(frozen=True)
class Case:
    """A run, and what becomes of it.

    Attributes:
        num_steps: Optimizer steps of an epoch on the ranks that it starts on.
        kill_at: The batch of the run at whose start it is killed.
        victims: The ranks that are.
        save_every: Optimizer steps from one checkpoint to the next.
        window: Batches of an optimizer step.
        num_workers: Of the loader.
        is_estimating: Whether the number of steps is asked for where optimizers are configured.
        loaders: What it trains on.
    """

    num_steps: int
    kill_at: int
    victims: tuple[int, ...]
    save_every: int
    window: int
    num_workers: int
    is_estimating: bool
    loaders: str = "one"


def draw(seed: int, *, num_ranks: int = 2, loaders: str = "one", num_batches: int = 0) -> Case:
    """Draw a case; its batches are those of one loader without a rest, if they are not given."""
    random = Random(seed)
    num_batches = num_batches or -(-SAMPLES // (SIZE * num_ranks))
    window, save_every = random.choice([1, 1, 2, 3]), random.randint(1, 3)
    num_steps = -(-num_batches // window)
    # After the first checkpoint, and before the last batch.
    first = save_every * window
    return Case(
        num_steps=num_steps,
        kill_at=random.randint(first, EPOCHS * num_batches - 1),
        victims=random.choice([(0, 1), (0,), (1,)]) if num_ranks == 2 else (0,),
        save_every=save_every,
        window=window,
        num_workers=random.choice([0, 2]),
        is_estimating=random.random() < 0.5,
        loaders=loaders,
    )


class Kill(Callback):
    """Ends the process at the start of a batch of the run, as nothing can prevent."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, *args: Any) -> None:
        self.batch -= 1
        if self.batch < 0:
            os.kill(os.getpid(), signal.SIGKILL)


def loaders_of(case: Case) -> Any:
    options: Any = {"shuffle": True, "num_workers": case.num_workers}
    if case.num_workers:
        options["multiprocessing_context"] = "fork"
    first = values(SAMPLES, SIZE, **options)
    others: Any = torch.arange(float(OTHERS), OTHERS + 10.0)
    second: Any = DataLoader(others, batch_size=SIZE, **options)
    if case.loaders == "one":
        return first
    if case.loaders == "dict":
        return {"first": first, "second": second}
    return CombinedLoader([first, second], case.loaders)  # type: ignore[arg-type]


def fit(comm: Comm, case: Case, folder: Path, *, kills: bool, notes: str) -> list[float]:
    model = Learner(folder / f"{notes}-{comm.rank}", is_estimating=case.is_estimating)
    saving = ModelCheckpoint(folder / "saved", every_n_train_steps=case.save_every, save_last=True)
    callbacks: list[Callback] = [saving] if notes != "unbroken" else []
    if kills and comm.rank in case.victims:
        callbacks.append(Kill(case.kill_at))
    trainer = make_trainer(
        ShardStrategy(data_seed=3, tail="exact" if case.loaders == "one" else "pad"),
        comm.world_size,
        max_epochs=EPOCHS,
        callbacks=callbacks,
        accumulate_grad_batches=case.window,
        enable_checkpointing=bool(callbacks),
    )
    checkpoint = folder / LAST if notes.startswith("after") else None
    trainer.fit(model, loaders_of(case), ckpt_path=checkpoint)
    return [*model.weight.tolist(), trainer.global_step]


def go_on(comm: Comm, case: Case, folder: Path) -> list[float]:
    return fit(comm, case, folder, kills=False, notes=f"after {comm.world_size}")


def compare(comm: Comm, case: Case, folder: Path) -> tuple[list[float], list[float]]:
    """Go on from where the run was killed, and beside it make the run that was not."""
    return go_on(comm, case, folder), fit(comm, case, folder, kills=False, notes="unbroken")


def kill(comm: Comm, case: Case, folder: Path) -> None:
    fit(comm, case, folder, kills=True, notes="before")


def count(*runs: list[Epochs]) -> dict[int, Counter[int]]:
    """Count in each epoch how often all ranks together have seen each sample."""
    counts: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(EPOCHS)}
    for epochs in chain(*runs):
        for epoch, batches in epochs.items():
            counts[epoch].update(chain(*batches))
    return counts


def last_saved(case: Case, folder: Path, num_batches: int) -> int:
    """Say after how many batches of the run its last checkpoint was saved."""
    saved = torch.load(folder / LAST, weights_only=True)
    epochs, steps = divmod(saved["global_step"], case.num_steps)
    return int(epochs * num_batches + min(steps * case.window, num_batches))


def break_off(case: Case, folder: Path, num_ranks: int) -> None:
    with pytest.raises((RankError, RuntimeError)) as caught:
        run_ranks(num_ranks, kill, case, folder)
    shutil.copy(folder / "saved" / "last.ckpt", folder / LAST)
    told = str(caught.value) + str(caught.value.__cause__)
    assert "-9" in told or "onnection" in told, told


@pytest.mark.parametrize("seed", range(4))
def test_a_run_killed_on_two_ranks_goes_on_with_one_two_and_three(
    tmp_path: Path, seed: int
) -> None:
    case = draw(seed)
    break_off(case, tmp_path, 2)
    num_batches = -(-SAMPLES // (SIZE * 2))
    done = last_saved(case, tmp_path, num_batches)
    before = read(tmp_path, "before", 2, stop=done)
    once = {epoch: Counter(range(SAMPLES)) for epoch in range(EPOCHS)}
    for resumed, whole in run_ranks(2, compare, case, tmp_path):
        assert resumed == pytest.approx(whole, rel=1e-6), case
    after, unbroken = read(tmp_path, "after 2", 2), read(tmp_path, "unbroken", 2)
    assert [joined(*parts) for parts in zip(before, after, strict=True)] == unbroken, case
    assert count(unbroken) == once
    for num_ranks in (1, 3):
        run_ranks(num_ranks, go_on, case, tmp_path)
        after = read(tmp_path, f"after {num_ranks}", num_ranks)
        assert count(before, after) == once, (case, num_ranks)


@pytest.mark.parametrize(
    ("seed", "loaders", "num_batches"),
    [(10, "dict", 14), (11, "max_size_cycle", 14), (12, "min_size", 5), (13, "max_size_cycle", 14)],
)
def test_a_killed_run_with_several_loaders_goes_on(
    tmp_path: Path, seed: int, loaders: str, num_batches: int
) -> None:
    case = draw(seed, num_ranks=1, loaders=loaders, num_batches=num_batches)
    break_off(case, tmp_path, 1)
    done = last_saved(case, tmp_path, num_batches)
    (before,) = read(tmp_path, "before", 1, stop=done)
    ((resumed, whole),) = run_ranks(1, compare, case, tmp_path)
    ((after,), (unbroken,)) = (read(tmp_path, notes, 1) for notes in ("after 1", "unbroken"))
    assert [len(batches) for batches in unbroken.values()] == [num_batches] * EPOCHS
    assert joined(before, after) == unbroken, case
    assert resumed == pytest.approx(whole, rel=1e-6), case
