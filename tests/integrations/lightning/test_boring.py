"""Lightning's own demos run as they are, with only the strategy exchanged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, seed_everything
from lightning.pytorch.demos.boring_classes import (
    BoringDataModule,
    BoringDataModuleNoLen,
    BoringModel,
    DemoModel,
    IterableBoringDataModule,
    ManualOptimBoringModel,
    RandomDataset,
)
from torch.utils.data import DataLoader

import shardplug_lightning  # noqa: F401  # makes the strategy known by its name
from shardplug import Comm
from tests.integrations.lightning.ranks import make_trainer, run_alone, run_ranks

STAGES = ("train", "validate", "test", "predict")
Rows = tuple[float, ...]


class Watches(Callback):
    """Notes the rows of every batch of every stage."""

    def __init__(self) -> None:
        self.rows: defaultdict[str, list[list[Rows]]] = defaultdict(list)

    def _note(self, stage: str, batch: Any) -> None:
        tensor = batch if isinstance(batch, torch.Tensor) else batch[0]
        self.rows[stage].append([tuple(row.flatten().tolist()) for row in tensor])

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._note("train", batch)

    def on_validation_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._note("validate", batch)

    def on_test_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._note("test", batch)

    def on_predict_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._note("predict", batch)


@dataclass
class Found:
    """What a run saw and made; the predictions by rows."""

    rows: dict[str, list[list[Rows]]]
    weights: list[float]
    steps: int
    predictions: list[Rows] = field(default_factory=list)


class FourInputs(BoringModel):
    """Takes the narrow rows of several loaders at once, as one of the data modules has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def step(self, batch: Any) -> torch.Tensor:
        return super().step(torch.cat(batch) if isinstance(batch, list) else batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().test_step(batch, batch_idx)


class OwnLoader(DemoModel):
    """The demo has no loader of its own."""

    def train_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 64), batch_size=4)


DEMOS: dict[str, tuple[Callable[[], LightningModule], Callable[[], LightningDataModule] | None]] = {
    "boring": (BoringModel, None),
    "manual": (ManualOptimBoringModel, None),
    "with a data module": (BoringModel, BoringDataModule),
    "demo": (OwnLoader, None),
}


def run(strategy: str, devices: int, model: LightningModule, data: Any, **options: Any) -> Found:
    watches = Watches()
    trainer = make_trainer(strategy, devices, max_epochs=1, callbacks=[watches], **options)
    trainer.fit(model, datamodule=data)
    found = Found({}, [], trainer.global_step)
    if isinstance(model, BoringModel):
        trainer.validate(model, datamodule=data, verbose=False)
        trainer.test(model, datamodule=data, verbose=False)
        found.predictions = rows_of(trainer.predict(model, datamodule=data))
    found.rows = dict(watches.rows)
    found.weights = torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()
    return found


def rows_of(predictions: Any) -> list[Rows]:
    if isinstance(predictions[0], list):  # by loader
        predictions = chain(*predictions)
    return [tuple(row) for batch in predictions for row in batch.tolist()]


def draw_data(self: RandomDataset, size: int, length: int) -> None:
    """Draw the numbers of a data set from a generator of its own.

    It draws them when it is made, which is in a hook of the model: after Lightning has seeded for
    some strategies, and after loaders have drawn something for others.
    """
    self.len = length
    self.data = torch.randn(length, size, generator=torch.Generator().manual_seed(length))


def seed() -> None:
    """Let this process, which ends with its test, start from the same numbers as any other."""
    seed_everything(1)
    RandomDataset.__init__ = draw_data  # type: ignore[method-assign]


def run_demo(comm: Comm, name: str, strategy: str) -> Found:
    make_model, make_data = DEMOS[name]
    seed()
    model = make_model()
    return run(strategy, comm.world_size, model, make_data() if make_data else None)


def run_all_demos(comm: Comm, strategy: str) -> list[Found]:
    return [run_demo(comm, name, strategy) for name in DEMOS]


def flat(batches: list[list[Rows]]) -> list[Rows]:
    return list(chain(*batches))


def test_demos_do_on_one_device_what_they_do_without_us() -> None:
    ours, stock = (run_alone(run_all_demos, strategy) for strategy in ("shard", "auto"))
    assert ours == stock
    for found in ours[:3]:
        # 64 rows each, and validation twice: at the end of the epoch, and by itself.
        assert {stage: len(flat(found.rows[stage])) for stage in STAGES} == {
            "train": 64,
            "validate": 128,
            "test": 64,
            "predict": 64,
        }
        assert len(found.predictions) == 64


def test_demos_share_their_rows_on_two_devices() -> None:
    stock = run_alone(run_all_demos, "auto")
    both = run_ranks(2, run_all_demos, "shard")
    for first, second, alone in zip(*both, stock, strict=True):
        assert first.weights == second.weights
        assert first.steps == second.steps == alone.steps // 2
        for stage, batches in alone.rows.items():
            parts = [first.rows[stage], second.rows[stage]]
            assert len(parts[0]) == len(parts[1]) == len(batches) // 2
            assert sorted(flat(parts[0]) + flat(parts[1])) == sorted(flat(batches))
        assert len(first.predictions) == len(second.predictions) == len(alone.predictions) // 2


def run_without_length(comm: Comm) -> Found:
    seed_everything(1)
    data = BoringDataModuleNoLen()
    return run("shard", comm.world_size, BoringModel(), data, limit_train_batches=20)


def test_streams_of_the_demos_are_shared_too() -> None:
    for found in run_ranks(1, run_without_length):
        assert {stage: len(flat(found.rows[stage])) for stage in STAGES} == {
            "train": 20,
            "validate": 256,
            "test": 256,
            "predict": 64,
        }
    first, second = run_ranks(2, run_without_length)
    assert first.weights == second.weights
    for stage, num_rows in {"train": 20, "validate": 128, "test": 128, "predict": 32}.items():
        parts = [flat(each.rows[stage]) for each in (first, second)]
        assert [len(part) for part in parts] == [num_rows, num_rows]
        assert not set(parts[0]) & set(parts[1])  # one stream, of which each has its part


def run_several_loaders(comm: Comm, strategy: str) -> Found:
    seed()
    return run(strategy, comm.world_size, FourInputs(), IterableBoringDataModule())


def test_several_loaders_of_a_demo_are_shared() -> None:
    # A list of a loader with a length and of a stream without one; the second of each batch is the
    # stream's, and what is noted is the first.
    stock = run_alone(run_several_loaders, "auto")
    for world_size in (1, 2):
        by_rank = run_ranks(world_size, run_several_loaders, "shard")
        for stage, batches in stock.rows.items():
            counts = [len(flat(each.rows[stage])) for each in by_rank]
            assert counts == [len(flat(batches)) // world_size] * world_size, stage
        seen = sorted(chain(*(flat(each.rows["train"]) for each in by_rank)))
        assert seen == sorted(flat(stock.rows["train"]))
        assert sum(len(each.predictions) for each in by_rank) == len(stock.predictions) == 256


WORDS = 41 * 35  # blocks of 35 words, of which the data set leaves out the last


def run_language_model(comm: Comm, kind: str, folder: Path, strategy: str) -> Found:
    import os

    from lightning.pytorch.demos.lstm import LightningLSTM
    from lightning.pytorch.demos.transformer import LightningTransformer

    os.chdir(folder)  # where its text is, so that there is nothing to download
    seed_everything(1)
    model = LightningLSTM(60) if kind == "lstm" else LightningTransformer(60)
    return run(strategy, comm.world_size, model, None)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "num_batches"), [("lstm", 2), ("transformer", 40)])
def test_language_models_of_the_demos_share_their_text(
    tmp_path: Path, kind: str, num_batches: int
) -> None:
    pytest.importorskip("requests", reason="the demo would download with it")
    text = tmp_path / "data" / "wikitext-2.txt"
    text.parent.mkdir()
    # No two blocks are alike. A line ends with a word of the data set's own.
    words = [f"w{number * number % 59}" for number in range(WORDS - 1)]
    text.write_text(" ".join(words) + "\n", encoding="utf-8")
    stock = run_alone(run_language_model, kind, tmp_path, "auto")
    assert len(stock.rows["train"]) == num_batches
    for world_size in (1, 2):
        by_rank = run_ranks(world_size, run_language_model, kind, tmp_path, "shard")
        dealt = [each.rows["train"] for each in by_rank]
        # Batches as they were, every second one for each of two ranks; the LSTM has a batch sampler
        # that Lightning itself cannot rebuild for them.
        assert dealt == [stock.rows["train"][rank::world_size] for rank in range(world_size)]
        assert [each.steps for each in by_rank] == [num_batches // world_size] * world_size
