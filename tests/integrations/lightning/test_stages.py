"""Loaders of every arrangement, in every stage, under every limit that a trainer knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from shardplug import Comm
from shardplug_lightning import DispatcherView, ShardStrategy
from tests.integrations.lightning.ranks import (
    Trainee,
    Values,
    Witness,
    make_trainer,
    run_ranks,
    values,
)


class Reads(Trainee):
    """Notes whatever batches it is given, in any arrangement."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:  # type: ignore[override]
        self.seen["train"].append(plain(batch))
        return self.weight * 1.0

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen[f"validate {self.current_epoch}"].append(plain(batch))


def plain(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: plain(each) for name, each in batch.items()}
    if isinstance(batch, list):
        return [plain(each) for each in batch]
    return None if batch is None else batch.int().tolist()


def fit(comm: Comm, training: Any, validation: Any = None, **options: Any) -> dict[str, Any]:
    model = Reads()
    chosen = {"max_epochs": 1, "limit_val_batches": None if validation else 0, **options}
    strategy = ShardStrategy(**chosen.pop("strategy", {}))
    trainer = make_trainer(strategy, comm.world_size, **chosen)
    trainer.fit(model, training, validation or values(8, 2))
    return dict(model.seen)


def combine(mode: Any) -> CombinedLoader:
    return CombinedLoader({"a": values(8, 2), "b": values(4, 1)}, mode)


# Two ranks: a has 0,1 and 4,5 on rank 0, b has 0 and 2; rank 1 the others.
A, B = [[[0, 1], [4, 5]], [[2, 3], [6, 7]]], [[[0], [2]], [[1], [3]]]


def fit_arrangements(comm: Comm) -> dict[str, Any]:
    long = values(12, 2)  # three batches on each rank
    return {
        "dict": fit(comm, {"a": values(8, 2), "b": values(4, 1)})["train"],
        "list": fit(comm, [values(8, 2), values(4, 1)])["train"],
        "max_size": fit(comm, CombinedLoader([long, values(4, 1)], "max_size"))["train"],
        "min_size": fit(comm, CombinedLoader([long, values(4, 1)], "min_size"))["train"],
        "cycle": fit(comm, [long, values(4, 1)])["train"],
    }


def test_training_loaders_of_every_arrangement_are_sharded() -> None:
    for rank, found in enumerate(run_ranks(2, fit_arrangements)):
        pairs = list(zip(A[rank], B[rank], strict=True))
        assert found["dict"] == [{"a": a, "b": b} for a, b in pairs]
        assert found["list"] == [[a, b] for a, b in pairs]
        long = [*A[rank], [[8, 9], [10, 11]][rank]]
        assert found["max_size"] == [[a, b] for a, b in zip(long, [*B[rank], None], strict=True)]
        assert found["min_size"] == found["list"]
        assert found["cycle"] == [[a, b] for a, b in zip(long, [*B[rank], B[rank][0]], strict=True)]


def validate_arrangements(comm: Comm) -> dict[str, Any]:
    found = {}
    for mode in ("sequential", "max_size_cycle", "max_size", "min_size"):
        model = Reads()
        trainer = make_trainer(ShardStrategy(), comm.world_size)
        trainer.validate(model, combine(mode), verbose=False)
        found[mode] = model.seen["validate 0"]
    return found


def test_a_combined_loader_is_validated_in_every_mode() -> None:
    for rank, found in enumerate(run_ranks(2, validate_arrangements)):
        together = [{"a": a, "b": b} for a, b in zip(A[rank], B[rank], strict=True)]
        for mode in ("max_size_cycle", "max_size", "min_size"):
            assert found.pop(mode) == together
        assert found == {"sequential": [*A[rank], *B[rank]]}


class Module(Reads):
    """Makes its own loaders, and counts how often."""

    def __init__(self) -> None:
        super().__init__()
        self.num_made = 0

    def train_dataloader(self) -> Any:
        self.num_made += 1
        return values(8, 2, shuffle=True)

    def val_dataloader(self) -> Any:
        return values(8, 2)


def limit(comm: Comm) -> dict[str, Any]:
    strategy = {"strategy": {"data_seed": 5}}
    reloads = Module()
    trainer = make_trainer(
        ShardStrategy(data_seed=5),
        comm.world_size,
        max_epochs=3,
        reload_dataloaders_every_n_epochs=1,
        limit_val_batches=0,
    )
    trainer.fit(reloads)
    plain_loader, validation = values(16, 2), values(8, 2)
    return {
        "int": fit(comm, plain_loader, validation, limit_train_batches=3, limit_val_batches=1),
        "float": fit(comm, plain_loader, limit_train_batches=0.5),
        "interval": fit(comm, plain_loader, validation, val_check_interval=0.5),
        "overfit": fit(comm, plain_loader, validation, overfit_batches=1, max_epochs=2, **strategy),
        "sanity": fit(comm, plain_loader, validation, num_sanity_val_steps=1, max_steps=1),
        "reload": (reloads.num_made, reloads.seen["train"]),
    }


def test_a_trainers_limits_count_each_ranks_batches() -> None:
    for rank, found in enumerate(run_ranks(2, limit)):
        train = [[at, at + 1] for at in range(2 * rank, 16, 4)]
        validate = train[:2]
        assert found["int"] == {"train": train[:3], "validate 0": validate[:1]}
        assert found["float"] == {"train": train[:2]}
        assert found["interval"] == {"train": train, "validate 0": validate * 2}
        assert found["overfit"] == {
            "train": train[:1] * 2,
            "validate 0": validate[:1],
            "validate 1": validate[:1],
        }
        assert found["sanity"]["train"] == train[:1]
        assert found["sanity"]["validate 0"][0] == validate[0]
        expected = []
        for epoch in range(3):
            order = torch.randperm(8, generator=torch.Generator().manual_seed(5 + epoch)).tolist()
            expected += [order[at : at + 2] for at in range(2 * rank, 8, 4)]
        assert found["reload"] == (3, expected)


class OnReader(Values):
    """Data that only rank 0 has."""

    def __init__(self, num_samples: int, rank: int) -> None:
        super().__init__(num_samples)
        self.rank = rank

    def __getitem__(self, index: int) -> torch.Tensor:
        assert self.rank == 0
        return super().__getitem__(index)


class Draws(Values):
    def __getitem__(self, index: int) -> torch.Tensor:
        assert get_worker_info() is None
        return torch.stack([torch.tensor(float(index)), torch.rand(()) * 1e6])


def dispatch(comm: Comm) -> dict[str, Any]:
    model, read_by_one = Witness(), DataLoader(OnReader(10, comm.rank), batch_size=4)
    strategy = ShardStrategy(dispatch_batches=True)
    trainer = make_trainer(strategy, comm.world_size, max_epochs=1)
    trainer.fit(model, read_by_one, read_by_one)
    kind = type(trainer.train_dataloader)
    trainer.predict(model, read_by_one)
    drawn = fit(comm, DataLoader(Draws(8), batch_size=2), strategy={"seed_samples": True})
    return {**model.seen, "is_dispatched": kind is DispatcherView, "drawn": drawn["train"]}


def test_one_rank_can_read_for_all_and_samples_be_seeded() -> None:
    (alone,), by_rank = run_ranks(1, dispatch), run_ranks(2, dispatch)
    drawn = [pair for step in alone["drawn"] for pair in step]
    assert sorted(pair for found in by_rank for step in found["drawn"] for pair in step) == drawn
    assert len({number for _, number in drawn}) == 8
    exact = [[[0, 1, 2, 3], [8]], [[4, 5, 6, 7], [9]]]
    for rank, found in enumerate(by_rank):
        assert found["is_dispatched"]
        assert (
            found["train 0"] == [[[0, 1, 2, 3], [8, 9, 0, 1]], [[4, 5, 6, 7], [2, 3, 4, 5]]][rank]
        )
        assert found["validate"] == found["predict"] == exact[rank]


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_fewer_samples_than_ranks_are_an_error_before_the_loop(stage: str) -> None:
    from tests.integrations.lightning.test_strategy import refuse

    for told, seen in run_ranks(2, refuse, stage, 1, {}):
        assert "must be 0 or at least the 2 shards with tail='exact', got 1." in told
        assert seen == {}


class OwnPart(IterableDataset[torch.Tensor]):
    """Knows its rank, and yields nothing else than that rank's part."""

    def __init__(self, comm: Comm) -> None:
        self.part = range(comm.rank, 10, comm.world_size)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.tensor(float(index)) for index in self.part])


def read_own_parts(comm: Comm) -> dict[str, Any]:
    loader = DataLoader(OwnPart(comm), batch_size=2)
    return fit(comm, loader, [loader], strategy={"already_sharded": True})


def test_data_that_is_cut_already_is_not_cut_again() -> None:
    for rank, found in enumerate(run_ranks(2, read_own_parts)):
        batches = [[rank, rank + 2], [rank + 4, rank + 6], [rank + 8]]
        # Training steps are full and as many everywhere: its fifth row is filled up.
        assert [batch[:2] for batch in found["train"][:2]] == batches[:2]
        assert found["train"][2][0] == batches[2][0]
        assert found["validate 0"] == batches
