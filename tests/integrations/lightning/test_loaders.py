"""What Lightning and the user find on a loader that a strategy has sharded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from shardplug import Comm, DataLoaderShard, prepare_data_loader
from shardplug_lightning import ShardStrategy, ShardView
from tests.integrations.lightning.ranks import (
    Trainee,
    Values,
    Witness,
    make_trainer,
    run_ranks,
    values,
)

Seen = dict[str, list[list[int]]]


def test_a_view_is_the_loader() -> None:
    loader = prepare_data_loader(values(6, batch_size=2, shuffle=True))
    view = ShardView(loader, "what the user gave")
    assert isinstance(view, DataLoaderShard)
    assert view.source == "what the user gave"
    assert len(view) == 3
    iterator = iter(view)
    next(iterator)
    assert loader.remaining_steps == view.remaining_steps == 2
    sampler: Any = view.sampler
    sampler.set_epoch(4)  # all that Lightning calls
    view.worker_init_fn = print
    assert next(iter(loader)) is not None
    assert loader.epoch == view.epoch == 4
    assert loader.worker_init_fn is print


class Looks(Trainee):
    """Looks at the training loader from inside."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loader: Any = self.trainer.train_dataloader
        self.found.append((loader.epoch, loader.valid_rows, loader.end_of_dataloader, len(loader)))
        return super().training_step(batch)


def look(comm: Comm) -> list[Any]:
    model = Looks()
    make_trainer(ShardStrategy(), comm.world_size, max_epochs=2).fit(model, values(10))
    return model.found


def test_the_training_loader_tells_where_it_is() -> None:
    by_rank = run_ranks(2, look)
    # Batches 0-3, 8-9 and two rows of padding; then 4-7 and a batch of padding.
    assert by_rank[0] == [(0, 4, False, 2), (0, 2, True, 2), (1, 4, False, 2), (1, 2, True, 2)]
    assert by_rank[1] == [(0, 4, False, 2), (0, 0, True, 2), (1, 4, False, 2), (1, 0, True, 2)]


# -- the same loader again ------------------------------------------------------------------------


def use_again(comm: Comm) -> tuple[Seen, Seen]:
    first, second = Trainee(), Witness()
    loaders = CombinedLoader(values(10), "max_size")
    strategy = ShardStrategy()
    make_trainer(strategy, comm.world_size, max_epochs=1).fit(first, loaders)
    loaders._mode = "sequential"
    make_trainer(ShardStrategy(), comm.world_size).validate(second, loaders, verbose=False)
    return dict(first.seen), dict(second.seen)


def test_a_combined_loader_used_in_two_stages_is_divided_for_each() -> None:
    by_rank = run_ranks(2, use_again)
    assert [first["train 0"] for first, _ in by_rank] == [
        [[0, 1, 2, 3], [8, 9, 0, 1]],
        [[4, 5, 6, 7], [2, 3, 4, 5]],
    ]
    assert [second["validate"] for _, second in by_rank] == [
        [[0, 1, 2, 3], [8]],
        [[4, 5, 6, 7], [9]],
    ]


def use_prepared(comm: Comm) -> tuple[Seen, bool]:
    model = Witness()
    loader = prepare_data_loader(values(10), tail="exact")
    batches = loader.batch_sampler
    trainer = make_trainer(ShardStrategy(), comm.world_size)
    trainer.validate(model, loader, verbose=False)
    trainer.predict(model, loader)
    return dict(model.seen), loader.batch_sampler is batches


def test_a_loader_that_was_prepared_is_not_cut_again_nor_changed() -> None:
    first, second = run_ranks(2, use_prepared)
    assert first == ({stage: [[0, 1, 2, 3], [8]] for stage in ("validate", "predict")}, True)
    assert second == ({stage: [[4, 5, 6, 7], [9]] for stage in ("validate", "predict")}, True)


# -- workers --------------------------------------------------------------------------------------


class Draws(Values):
    """Each sample comes with a random number and what the worker was seeded from."""

    def __getitem__(self, index: int) -> torch.Tensor:
        assert get_worker_info() is not None
        return torch.stack([torch.tensor(float(index)), torch.rand(())])


class Collector(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.draws: list[tuple[int, int, float]] = []
        self.iterators: list[Any] = []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        for index, draw in batch.tolist():
            self.draws.append((self.current_epoch, int(index), draw))
        loader: Any = self.trainer.train_dataloader
        self.iterators.append(loader._iterator)
        return self.weight * batch.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def draw(comm: Comm, is_persistent: bool) -> tuple[list[tuple[int, int, float]], list[bool]]:
    seed_everything(5, workers=True, verbose=False)
    model = Collector()
    loader = DataLoader(
        Draws(8),
        batch_size=2,
        num_workers=1,
        persistent_workers=is_persistent,
        multiprocessing_context="fork",
    )
    make_trainer(ShardStrategy(), comm.world_size, max_epochs=2).fit(model, loader)
    kept = [it for it in model.iterators if isinstance(it, _MultiProcessingDataLoaderIter)]
    return model.draws, [worker.is_alive() for it in kept for worker in it._workers]


@pytest.mark.parametrize("is_persistent", [False, True])
def test_workers_draw_otherwise_on_each_rank_and_in_each_epoch(is_persistent: bool) -> None:
    by_rank = run_ranks(2, draw, is_persistent)
    seen = [(epoch, index) for draws, _ in by_rank for epoch, index, _ in draws]
    assert sorted(seen) == [(epoch, index) for epoch in range(2) for index in range(8)]
    numbers = [number for draws, _ in by_rank for *_, number in draws]
    assert len(set(numbers)) == 16
    for _, alive in by_rank:
        assert bool(alive) == is_persistent
        assert not any(alive)  # Lightning has ended them


# -- streams --------------------------------------------------------------------------------------


class Stream(IterableDataset[torch.Tensor]):
    """The numbers below ten, of which no length is known."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(10.0))


def read_stream(comm: Comm) -> tuple[Seen, dict[str, float]]:
    model = Witness()
    trainer = make_trainer(ShardStrategy(), comm.world_size, max_epochs=1)
    loader = DataLoader(Stream(), batch_size=4)
    trainer.fit(model, loader, loader)
    (logged,) = trainer.validate(model, loader, verbose=False)
    trainer.predict(model, loader)
    return dict(model.seen), dict(logged)


def test_a_stream_is_sharded_like_any_loader() -> None:
    by_rank = run_ranks(3, read_stream)
    exact = [[[0, 1, 2, 3]], [[4, 5, 6]], [[7, 8, 9]]]
    assert [seen["train 0"] for seen, _ in by_rank] == [
        [[0, 1, 2, 3]],
        [[4, 5, 6, 7]],
        [[8, 9, 0, 1]],
    ]
    assert [seen["validate"] for seen, _ in by_rank] == [batches * 2 for batches in exact]
    assert [seen["predict"] for seen, _ in by_rank] == exact
    assert all(logged == {"torchmetrics": 4.5, "logged": 4.5} for _, logged in by_rank)
