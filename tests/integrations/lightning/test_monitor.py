"""`ShardMonitor` counts what came out of the loaders of every rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader, IterableDataset

from shardplug import Comm, PlanError
from shardplug_lightning import ShardMonitor, ShardStrategy
from shardplug_lightning.monitor import Tally
from tests.integrations.lightning.ranks import Trainee, make_trainer, run_ranks, values


class Keeps(Logger):
    """Keeps what is logged."""

    name = "keeps"
    version = 0

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.metrics.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Several(Trainee):
    """Trains on the first of several loaders."""

    def training_step(self, batch: Any) -> Any:
        return super().training_step(batch[0] if isinstance(batch, list) else batch)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(14.0))


def watch(comm: Comm, sizes: Sequence[int]) -> tuple[list[tuple[int, dict[str, float]]], list[str]]:
    keeps, lines = Keeps(), Lines()
    logger = logging.getLogger("shardplug_lightning.monitor")
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    loaders = [values(size) if size else DataLoader(Stream(), batch_size=2) for size in sizes]
    trainer = make_trainer(
        ShardStrategy(),
        comm.world_size,
        max_epochs=2,
        callbacks=[ShardMonitor()],
        logger=keeps,
        log_every_n_steps=1,
    )
    trainer.fit(Several(), loaders if len(loaders) > 1 else loaders[0])
    return keeps.metrics, lines.lines


def test_rows_and_repeats_are_counted_for_every_rank() -> None:
    (metrics, lines), (_, no_lines) = run_ranks(2, watch, [10])
    epochs = [(step, found) for step, found in metrics if "shards/samples" in found]
    assert [step for step, _ in epochs] == [2, 4]
    for _, found in epochs:
        # 0-3, 8, 9 and two repeats on rank 0; 4-7 and four repeats on rank 1.
        counted = {name: value for name, value in found.items() if not name.endswith("_s")}
        assert counted == {
            "shards/samples": 10.0,
            "shards/repeats": 6.0,
            "shards/rank 0/samples": 6.0,
            "shards/rank 0/repeats": 2.0,
            "shards/rank 1/samples": 4.0,
            "shards/rank 1/repeats": 4.0,
        }
        for of in ("", "rank 0/", "rank 1/"):
            assert found[f"shards/{of}computing_s"] > 0
            assert found[f"shards/{of}waiting_s"] > 0
        speeds = [found[f"shards/{of}samples_per_s"] for of in ("rank 0/", "rank 1/", "")]
        assert speeds[0] + speeds[1] == pytest.approx(speeds[2])
        seconds = found["shards/rank 0/waiting_s"] + found["shards/rank 0/computing_s"]
        assert speeds[0] == pytest.approx(6 / seconds)
    (line,) = lines
    assert line.startswith("20 samples and 12 repeats on 2 ranks, ")
    assert line.endswith(" % of the time data was waited for.")
    assert no_lines == []


def test_several_loaders_are_counted_together() -> None:
    ((metrics, _),) = run_ranks(1, watch, [8, 6])
    (first, _) = [found for _, found in metrics if "shards/samples" in found]
    assert (first["shards/samples"], first["shards/repeats"]) == (14.0, 0.0)


def test_streams_are_counted_though_a_batch_is_fetched_ahead() -> None:
    for metrics, _ in run_ranks(2, watch, [0])[:1]:
        counted = [found["shards/samples"] for _, found in metrics if "shards/samples" in found]
        repeats = [found["shards/repeats"] for _, found in metrics if "shards/samples" in found]
        assert (counted, repeats) == ([14.0, 14.0], [2.0, 2.0])


def test_nothing_counted_is_no_speed() -> None:
    assert Tally().samples_per_s == 0.0
    tally = Tally(3, 1, 0.5, 1.0)
    tally.add(Tally(3, 0, 0.5, 2.0))
    assert tally == Tally(6, 1, 1.0, 3.0)
    assert tally.samples_per_s == 1.5


@pytest.mark.parametrize("prefix", ["", 3])
def test_a_prefix_has_to_be_a_text(prefix: Any) -> None:
    with pytest.raises(PlanError) as caught:
        ShardMonitor(prefix)
    assert str(caught.value) == (
        f"`prefix` must be a text that is not empty, got {prefix!r}. Leave it out."
    )
