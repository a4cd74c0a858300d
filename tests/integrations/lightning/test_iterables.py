"""Loaders that are no DataLoader: whatever yields batches that are ready."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torchdata.nodes import IterableWrapper, Loader

from shardplug import Comm, CommError, PlanError, prepare_data_loader, ready_batches
from shardplug_lightning import ShardModelParallelStrategy, ShardStrategy, ShardView
from tests.integrations.lightning.ranks import (
    Trainee,
    Witness,
    make_trainer,
    run_ranks,
    values,
)

Seen = dict[str, list[Any]]

BATCHES = 7


def batch_of(number: int) -> torch.Tensor:
    return torch.tensor([2.0 * number, 2.0 * number + 1])


def told(*numbers: int) -> list[list[int]]:
    return [[2 * number, 2 * number + 1] for number in numbers]


class Listed:
    """Batches that are looked up."""

    def __init__(self, num_batches: int = BATCHES) -> None:
        self.num_batches = num_batches

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.num_batches:
            raise IndexError(index)
        return batch_of(index)


class Plain:
    """A loader of a user's, of which no length is known; counts how often it has begun."""

    def __init__(self, num_batches: int = BATCHES) -> None:
        self.num_batches, self.num_passes = num_batches, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.num_passes += 1
        return map(batch_of, range(self.num_batches))


class Sized(Plain):
    def __len__(self) -> int:
        return self.num_batches


class Turning(Sized):
    """Begins one batch later in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        numbers = range(self.num_batches)
        return (batch_of((number + self.epoch) % self.num_batches) for number in numbers)


class Stateful(Plain):
    """Goes on from a state once, without making what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []
        self.at = self.start = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.at, self.start = self.start, 0
        while self.at < self.num_batches:
            self.made.append(self.at)
            self.at += 1
            yield batch_of(self.at - 1)


def nodes() -> Any:
    return Loader(IterableWrapper(Plain()))


def generator() -> Iterator[torch.Tensor]:
    yield from Plain()


KINDS = {"listed": Listed, "plain": Plain, "sized": Sized, "nodes": nodes, "turning": Turning}
INDEXED = {"listed"}


class Trains(Trainee):
    """Notes batches in any arrangement."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[dict[Any, Any]] = []

    def training_step(self, batch: Any) -> torch.Tensor:
        each = batch.items() if isinstance(batch, dict) else enumerate(batch)
        self.told.append({name: part.int().tolist() for name, part in each})
        return self.weight * 1.0


def run_all_stages(comm: Comm) -> list[tuple[Seen, dict[str, float]]]:
    found = []
    for options in ({}, {"dispatch_batches": False}):
        for make in KINDS.values():
            model: Any = Witness()
            strategy = ShardStrategy(**options)  # type: ignore[arg-type]  # of bools
            trainer = make_trainer(strategy, comm.world_size, max_epochs=2)
            trainer.fit(model, make(), make())
            (logged,) = trainer.test(model, make(), verbose=False)
            trainer.predict(model, make())
            found.append((dict(model.seen), dict(logged)))
    return found


def test_ready_batches_are_dealt_in_every_stage() -> None:
    ranks = run_ranks(2, run_all_stages)
    for kind, by_rank in zip([*KINDS, *KINDS], zip(*ranks, strict=True), strict=True):
        turn = kind == "turning"
        assert [seen["train 0"] for seen, _ in by_rank] == [told(0, 2, 4, 6), told(1, 3, 5, 0)]
        assert [seen["train 1"] for seen, _ in by_rank] == (
            [told(1, 3, 5, 0), told(2, 4, 6, 1)] if turn else [told(0, 2, 4, 6), told(1, 3, 5, 0)]
        )
        exact = [told(0, 2, 4, 6), told(1, 3, 5)]
        third = [told(2, 4, 6, 1), told(3, 5, 0)] if turn else exact
        for stage in ("test", "predict"):  # at epoch 2, since two are trained
            assert [seen[stage] for seen, _ in by_rank] == third
        validated = [told(1, 3, 5, 0), told(2, 4, 6)] if turn else exact
        assert [seen["validate"] for seen, _ in by_rank] == [
            first + later for first, later in zip(exact, validated, strict=True)
        ]
        # The numbers from 0 to 13, each once.
        assert all(logged == {"torchmetrics": 6.5, "logged": 6.5} for _, logged in by_rank)


def combine(comm: Comm) -> list[list[Any]]:
    found = []
    for loaders in (
        {"a": Plain(4), "b": values(8, 2)},
        [Sized(4), values(8, 2)],
        CombinedLoader([Listed(4), Plain(2)], "max_size_cycle"),
    ):
        model = Trains()
        make_trainer(ShardStrategy(), comm.world_size, max_epochs=1).fit(model, loaders)
        found.append(model.told)
    return found


def test_ready_batches_are_combined_with_others() -> None:
    for rank, (by_name, by_place, cycled) in enumerate(run_ranks(2, combine)):
        mine = [told(rank)[0], told(rank + 2)[0]]
        assert by_name == [{"a": each, "b": each} for each in mine]
        assert by_place == [{0: each, 1: each} for each in mine]
        assert cycled == [{0: each, 1: mine[0]} for each in mine]


# -- what is used up after one pass ---------------------------------------------------------------


def use_up(comm: Comm) -> tuple[Seen, str]:
    once = Trainee()
    make_trainer(ShardStrategy(), comm.world_size, max_epochs=1).fit(once, generator())
    twice = Trainee()
    with pytest.raises(PlanError) as caught:
        make_trainer(ShardStrategy(), comm.world_size, max_epochs=2).fit(twice, generator())
    assert twice.seen == once.seen
    return dict(once.seen), str(caught.value)


def test_a_generator_does_for_one_epoch_and_is_an_error_in_the_next() -> None:
    for rank, (seen, error) in enumerate(run_ranks(2, use_up)):
        assert seen == {"train 0": [told(0, 2, 4, 6), told(1, 3, 5, 0)][rank]}
        assert error == (
            "`dataloader` must yield its batches anew in each pass, got generator that has nothing "
            "left after the first. Give an object whose __iter__ starts from the front, or a "
            "DataLoader."
        )


def test_what_never_had_a_batch_is_no_error() -> None:
    loader = ready_batches(iter(()))
    assert [list(loader), list(loader)] == [[], []]


def test_a_loader_of_ones_own_is_iterated_even_if_it_can_be_indexed() -> None:
    class Both(Stateful, Listed):
        pass

    made = Both()
    assert len(list(ready_batches(made))) == BATCHES
    assert made.made == list(range(BATCHES))


# -- fewer batches than ranks ---------------------------------------------------------------------


class Whole(Witness):
    """As the strategy wants it that lets a model divide itself."""

    def configure_model(self) -> None:
        pass


def evaluate_too_few(comm: Comm, strategy: Any, loader: Any) -> str:
    model = Whole()
    with pytest.raises(PlanError) as caught:
        make_trainer(strategy, comm.world_size).validate(model, loader, verbose=False)
    assert not model.seen
    return str(caught.value)


@pytest.mark.parametrize("options", [{}, {"dispatch_batches": False}], ids=["default", "each"])
def test_a_rank_without_a_batch_is_an_error_on_all(options: dict[str, Any]) -> None:
    for error in run_ranks(2, evaluate_too_few, ShardStrategy(**options), Plain(1)):
        assert error == (
            "`dataloader` must have a batch for every rank, got 1 for 2 ranks. Give it more "
            "batches, or use fewer ranks."
        )


def test_ranks_that_wait_for_each_other_cannot_share_a_remainder() -> None:
    strategy = ShardModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    for error in run_ranks(2, evaluate_too_few, strategy, Listed(3)):
        assert error.startswith("The val loader cannot be sharded: ")


class Breaks(Plain):
    """Cannot be read on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.is_broken = rank == 1

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.is_broken:
            raise KeyError("broken")
        return super().__iter__()


def fail_alone(comm: Comm) -> str:
    loader = prepare_data_loader(
        ready_batches(Breaks(comm.rank)), dispatch_batches=False, tail="uneven", comm=comm
    )
    view = ShardView(loader, None)
    view.compare_ends()
    with pytest.raises((KeyError, CommError)) as caught:
        next(iter(view))
    return str(caught.value)


def test_a_rank_that_cannot_read_tells_the_others() -> None:
    assert run_ranks(2, fail_alone) == ["Rank 1 could not read its first batch.", "'broken'"]


# -- going on -------------------------------------------------------------------------------------


class SaveEach(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.number += 1
        trainer.save_checkpoint(self.folder / f"{self.number}.ckpt")


MAKERS: dict[str, Any] = {**KINDS, "stateful": Stateful, "generator": generator}


def train_and_go_on(comm: Comm, folder: Path) -> dict[str, tuple[Seen, list[Seen], list[int]]]:
    found = {}
    for kind, make in MAKERS.items():
        options: Any = {"max_epochs": 1 if kind == "generator" else 2}
        whole, after = Trainee(), list[Seen]()
        made: list[int] = []
        saves = SaveEach(folder / kind)
        make_trainer(ShardStrategy(), 1, callbacks=[saves], **options).fit(whole, make())
        for step in range(2, saves.number, 4):
            model, loader = Trainee(), make()
            trainer = make_trainer(ShardStrategy(), 1, **options)
            trainer.fit(model, loader, ckpt_path=folder / kind / f"{step}.ckpt")
            after.append(dict(model.seen))
            made += loader.made[:1] if kind == "stateful" else []
        found[kind] = dict(whole.seen), after, made
    return found


def test_ready_batches_go_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    (found,) = run_ranks(1, train_and_go_on, tmp_path)
    for whole, after, _ in found.values():
        assert len(whole["train 0"]) == BATCHES
        for number, seen in enumerate(after):
            epoch, batch = divmod(2 + 4 * number, BATCHES)
            assert seen == {
                name: batches[batch:] if name == f"train {epoch}" else batches
                for name, batches in whole.items()
                if int(name.split()[1]) >= epoch
            }
    # What came before was not made again.
    assert found["stateful"][2] == [2, 6, 3]
