"""`ShardStrategy` on real ranks: who sees what in each stage, and what is logged from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, TensorDataset

from shardplug import Comm, PlanError
from shardplug_lightning import ShardStrategy
from tests.integrations.lightning.ranks import (
    Trainee,
    Values,
    Witness,
    make_trainer,
    run_ranks,
    values,
)

Seen = dict[str, list[list[int]]]


def ids(batches: Sequence[Sequence[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


# -- evaluation: each sample once ----------------------------------------------------------------


def evaluate(comm: Comm, stage: str) -> dict[str, tuple[list[list[int]], dict[str, float]]]:
    found = {}
    for strategy in (ShardStrategy(), DDPStrategy()):
        model = Witness()
        run = getattr(make_trainer(strategy, comm.world_size), stage)
        (logged,) = run(model, values(10), verbose=False)
        found[type(strategy).__name__] = (model.seen[stage], dict(logged))
    return found


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_evaluation_sees_each_sample_once(stage: str) -> None:
    by_rank = run_ranks(3, evaluate, stage)
    seen = [found["ShardStrategy"][0] for found in by_rank]
    assert seen == [[[0, 1, 2, 3]], [[4, 5, 6]], [[7, 8, 9]]]
    repeating = [found["DDPStrategy"][0] for found in by_rank]
    assert repeating == [[[0, 3, 6, 9]], [[1, 4, 7, 0]], [[2, 5, 8, 1]]]
    for found in by_rank:
        # The mean of 0..9, and the mean of those and once more 0 and 1.
        assert found["ShardStrategy"][1] == {"torchmetrics": 4.5, "logged": 4.5}
        assert found["DDPStrategy"][1] == pytest.approx(
            dict.fromkeys(found["DDPStrategy"][1], 46 / 12)
        )


def evaluate_in_threes(comm: Comm) -> list[list[int]]:
    model = Witness()
    trainer = make_trainer(ShardStrategy(split_batches=True), comm.world_size)
    trainer.validate(model, values(7, batch_size=3), verbose=False)
    return model.seen["validate"]


def test_batches_are_split_in_training_only() -> None:
    # Batches of three could not be split in two.
    assert run_ranks(2, evaluate_in_threes) == [[[0, 1, 2], [5]], [[3, 4], [6]]]


class Judge(Witness):
    """Counts as right what three does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.right, self.counted = 0, 0

    def validation_step(self, batch: torch.Tensor) -> None:  # type: ignore[override]
        right = (batch % 3 != 0).float()
        self.right += int(right.sum())
        self.counted += len(batch)
        self.log("accuracy", right.mean(), on_epoch=True, sync_dist=True)


def judge(comm: Comm) -> dict[str, tuple[int, int, float]]:
    found = {}
    for strategy in (ShardStrategy(), DDPStrategy()):
        model = Judge()
        trainer = make_trainer(strategy, comm.world_size)
        (logged,) = trainer.validate(model, values(19), verbose=False)
        found[type(strategy).__name__] = (model.right, model.counted, logged["accuracy"])
    return found


def test_a_validation_metric_is_the_same_on_any_number_of_ranks() -> None:
    counts: dict[str, list[tuple[int, int]]] = {"ShardStrategy": [], "DDPStrategy": []}
    for world_size in (1, 2, 3):
        by_rank = run_ranks(world_size, judge)
        for name, of_worlds in counts.items():
            right = sum(found[name][0] for found in by_rank)
            counted = sum(found[name][1] for found in by_rank)
            of_worlds.append((right, counted))
            for found in by_rank:
                assert found[name][2] == pytest.approx(right / counted, rel=1e-6)
    assert counts["ShardStrategy"] == [(12, 19)] * 3
    # Ranks fill up to the same number: with sample 0, then with samples 0 and 1.
    assert counts["DDPStrategy"] == [(12, 19), (12, 20), (13, 21)]


class Keeper(BasePredictionWriter):
    """Keeps the predictions that it is given, with their indices."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[tuple[list[int], list[int]]] = []
        self.epoch: tuple[list[list[int]], list[list[int]]] = ([], [])

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, *args: Any) -> None:
        self.batches.append((prediction.int().tolist(), list(args[0])))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.epoch = ([each.int().tolist() for each in predictions], indices[0])


def predict(comm: Comm, num_workers: int) -> Keeper:
    keeper = Keeper()
    loader = values(
        21,
        sampler=range(20, -1, -1),
        drop_last=True,  # a prediction is made of every sample all the same
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,  # quicker than a server of its own
    )
    make_trainer(ShardStrategy(), comm.world_size, callbacks=[keeper]).predict(Witness(), loader)
    return keeper


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_sample_is_predicted_once_and_told_by_its_index(num_workers: int) -> None:
    by_rank = run_ranks(2, predict, num_workers)
    of_rank = [
        [[20, 19, 18, 17], [12, 11, 10, 9], [4, 3, 2]],
        [[16, 15, 14, 13], [8, 7, 6, 5], [1, 0]],
    ]
    for keeper, batches in zip(by_rank, of_rank, strict=True):
        # Sample i is the number i: predictions and indices are the same lists.
        assert keeper.batches == [(batch, batch) for batch in batches]
        assert keeper.epoch == (batches, batches)


# -- training: even, and shuffled anew -----------------------------------------------------------


def train(comm: Comm, seeds: str, options: dict[str, Any]) -> tuple[Seen, float]:
    generator = None
    if seeds == "own":
        torch.manual_seed(comm.rank)  # every process its own, as popen leaves them
    elif seeds == "everything":
        seed_everything(7, verbose=False)
        torch.manual_seed(7)
    elif seeds == "generator":
        seed_everything(7, verbose=False)
        generator = torch.Generator().manual_seed(11)
    model = Trainee()
    loader = values(10, shuffle=True, generator=generator)
    trainer = make_trainer(ShardStrategy(**options), comm.world_size, max_epochs=3)
    trainer.fit(model, loader)
    return dict(model.seen), trainer.num_training_batches


def shuffled(seed: int, epoch: int) -> list[list[list[int]]]:
    """Deal ten samples in batches of four to two ranks, filled up from the start of the order."""
    order = torch.randperm(10, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    order = order + order[:6]
    return [[order[4 * batch : 4 * batch + 4] for batch in (rank, rank + 2)] for rank in (0, 1)]


@pytest.mark.parametrize(
    ("seeds", "options", "seed"),
    [
        ("everything", {}, 7),
        ("generator", {}, 11),
        ("own", {"data_seed": 5}, 5),
        ("generator", {"data_seed": 5}, 5),
    ],
)
def test_training_follows_the_seed_and_the_epoch(
    seeds: str, options: dict[str, Any], seed: int
) -> None:
    by_rank = run_ranks(2, train, seeds, options)
    for epoch in range(3):
        assert [seen[f"train {epoch}"] for seen, _ in by_rank] == shuffled(seed, epoch)
    assert [steps for _, steps in by_rank] == [2, 2]


def test_ranks_with_other_seeds_of_their_own_train_on_one_order() -> None:
    by_rank = run_ranks(2, train, "own", {})
    orders = []
    for epoch in range(3):
        batches = [seen[f"train {epoch}"] for seen, _ in by_rank]
        assert [list(map(len, of_rank)) for of_rank in batches] == [[4, 4], [4, 4]]
        order = ids([batches[0][0], batches[1][0], batches[0][1], batches[1][1]])
        assert sorted(order[:10]) == list(range(10))
        assert order[10:] == order[:6]  # the padding
        orders.append(tuple(order))
    assert len(set(orders)) == 3


def test_split_batches_cuts_each_training_batch() -> None:
    by_rank = run_ranks(2, train, "own", {"split_batches": True, "data_seed": 5})
    order = torch.randperm(10, generator=torch.Generator().manual_seed(5)).tolist()
    order += order[:2]
    first = [seen["train 0"] for seen, _ in by_rank]
    assert first == [
        [order[0:2], order[4:6], order[8:10]],
        [order[2:4], order[6:8], order[10:12]],
    ]


def test_tail_exact_trains_on_each_sample_once() -> None:
    by_rank = run_ranks(2, train, "own", {"tail": "exact", "data_seed": 5})
    for epoch in range(3):
        batches = [seen[f"train {epoch}"] for seen, _ in by_rank]
        assert sorted(ids(batches[0] + batches[1])) == list(range(10))
        assert [list(map(len, of_rank)) for of_rank in batches] == [[4, 1], [4, 1]]


class Regression(LightningModule):
    """A small network without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )

    def training_step(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layers(inputs).squeeze(1), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.layers.parameters(), lr=0.05)


def learn(comm: Comm) -> list[torch.Tensor]:
    seed_everything(3, verbose=False)
    inputs = torch.randn(45, 3)
    data = TensorDataset(inputs, inputs.sum(1).sin())
    model = Regression()
    loader = DataLoader(data, batch_size=8, shuffle=True, drop_last=True)
    strategy = ShardStrategy(split_batches=True)
    make_trainer(strategy, comm.world_size, max_epochs=4).fit(model, loader)
    return [parameter.detach().clone() for parameter in model.layers.parameters()]


def test_parameters_do_not_depend_on_the_number_of_ranks() -> None:
    (alone,) = run_ranks(1, learn)
    start = Regression()
    for by_rank in (run_ranks(2, learn), run_ranks(4, learn)):
        for parameters in by_rank:
            for one, other in zip(alone, parameters, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    moved = [
        (one - of.detach()).abs().max()
        for one, of in zip(alone, start.layers.parameters(), strict=True)
    ]
    assert min(moved) > 0.01


# -- loaders of any class ------------------------------------------------------------------------


class Pairs:
    """Four batches over 0..7; nothing that Lightning could make again."""

    def __init__(self, *, first: int) -> None:
        self._first = first

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[self._first + 2 * pair, self._first + 2 * pair + 1] for pair in range(4)])

    def __len__(self) -> int:
        return 4


class OwnLoader(DataLoader[torch.Tensor]):
    """A loader whose arguments are other than its attributes."""

    def __init__(self, how_many: int) -> None:
        super().__init__(Values(how_many), batch_sampler=Pairs(first=0))


def run_all_stages(comm: Comm, is_stock: bool) -> tuple[Seen, list[str]]:
    model, refused = Witness(), []
    strategy = DDPStrategy() if is_stock else ShardStrategy()
    trainer = make_trainer(strategy, comm.world_size, max_epochs=1)
    for stage in ("fit", "validate", "test", "predict"):
        try:
            loaders = [OwnLoader(8)] * (2 if stage == "fit" else 1)
            getattr(trainer, stage)(model, *loaders)
        except (TypeError, MisconfigurationException):
            refused.append(stage)
    return dict(model.seen), refused


def test_a_batch_sampler_of_any_class_is_dealt_in_every_stage() -> None:
    by_rank = run_ranks(2, run_all_stages, False)
    for rank, (seen, refused) in enumerate(by_rank):
        assert refused == []
        of_rank = [[[0, 1], [4, 5]], [[2, 3], [6, 7]]][rank]
        assert seen == {
            "train 0": of_rank,
            "validate": of_rank * 2,  # once in fit
            "test": of_rank,
            "predict": of_rank,
        }


def test_lightning_itself_refuses_that_batch_sampler_in_every_stage() -> None:
    ((seen, refused),) = run_ranks(1, run_all_stages, True)
    assert seen == {}
    assert refused == ["fit", "validate", "test", "predict"]


def evaluate_two(comm: Comm) -> tuple[Seen, list[dict[str, float]]]:
    model = Witness()
    trainer = make_trainer(ShardStrategy(), comm.world_size)
    logged = trainer.validate(model, [values(10), values(3)], verbose=False)
    return dict(model.seen), [dict(each) for each in logged]


def test_each_of_several_loaders_is_sharded() -> None:
    by_rank = run_ranks(3, evaluate_two)
    assert [seen["validate"] for seen, _ in by_rank] == [
        [[0, 1, 2, 3], [0]],
        [[4, 5, 6], [1]],
        [[7, 8, 9], [2]],
    ]
    for _, logged in by_rank:
        assert [each[f"logged/dataloader_idx_{i}"] for i, each in enumerate(logged)] == [4.5, 1.0]


def keep_off(comm: Comm) -> Seen:
    model = Witness()
    trainer = make_trainer(ShardStrategy(), comm.world_size, use_distributed_sampler=False)
    trainer.validate(model, values(6), verbose=False)
    trainer.predict(model, values(6))
    return dict(model.seen)


def test_who_shards_himself_is_left_alone() -> None:
    everything = [[0, 1, 2, 3], [4, 5]]
    assert run_ranks(2, keep_off) == [{"validate": everything, "predict": everything}] * 2


# -- what cannot be done is said on every rank, before the loop ----------------------------------


def refuse(comm: Comm, stage: str, num_samples: int, options: dict[str, Any]) -> tuple[str, Seen]:
    model = Witness()
    trainer = make_trainer(ShardStrategy(**options), comm.world_size, max_epochs=1)
    loader = values(num_samples) if num_samples else range(4)
    with pytest.raises(PlanError) as caught:
        getattr(trainer, stage)(model, *[loader] * (2 if stage == "fit" else 1))
    return str(caught.value), dict(model.seen)


@pytest.mark.parametrize(
    ("stage", "num_samples", "options", "message"),
    [
        (
            "validate",
            2,
            {},
            "The val loader cannot be sharded: `num_samples` must be 0 or at least the 3 shards "
            'with tail=\'exact\', got 2. Use fewer ranks, tail="pad" or tail="uneven". '
            "(In this stage ShardStrategy goes by evaluation_tail.)",
        ),
        (
            "test",
            5,
            {"evaluation_tail": "uneven"},
            "The test loader cannot be sharded: `dataloader` must have a batch for every rank, got "
            '1 on rank 0, 1 on rank 1, 0 on rank 2 steps. Use evaluation_tail="exact", a smaller '
            "batch size, or fewer ranks. (In this stage ShardStrategy goes by evaluation_tail.)",
        ),
        (
            "fit",
            14,
            {"even_batches": False},
            "The train loader cannot be sharded: `dataloader` must take the same number of steps "
            'on every rank to train, got 2 on rank 0, 1 on rank 1, 1 on rank 2. Use tail="pad", '
            'tail="drop" or tail="exact". (In this stage ShardStrategy goes by split_batches, '
            "even_batches and tail.)",
        ),
        (
            "fit",
            2,
            {"tail": "exact"},
            "The train loader cannot be sharded: `num_samples` must be 0 or at least the 3 shards "
            'with tail=\'exact\', got 2. Use fewer ranks, tail="pad" or tail="uneven". (In this '
            "stage ShardStrategy goes by split_batches, even_batches and tail, and cannot be "
            "uneven.)",
        ),
        (
            "fit",
            0,
            {"split_batches": True},
            "The train loader cannot be sharded: `batch_size` must be set for batches to be split, "
            "got None. Pass split_batches=False. (In this stage ShardStrategy goes by "
            "split_batches, even_batches and tail.)",
        ),
    ],
)
def test_what_cannot_be_sharded_is_an_error_on_all_ranks(
    stage: str, num_samples: int, options: dict[str, Any], message: str
) -> None:
    for told, seen in run_ranks(3, refuse, stage, num_samples, options):
        assert told == message
        assert seen == {}
