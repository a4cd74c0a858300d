"""Predictions are told from which samples they are, also where one rank reads for all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from shardplug import Comm, DataLoaderDispatcher, SoloComm
from shardplug_lightning import ShardStrategy
from tests.integrations.lightning.ranks import Values, Witness, make_trainer, run_ranks, values
from tests.integrations.lightning.test_strategy import Keeper

BACKWARDS = [
    [[20, 19, 18, 17], [12, 11, 10, 9], [4, 3, 2]],
    [[16, 15, 14, 13], [8, 7, 6, 5], [1, 0]],
]
VARYING = [[5], [1, 2], [3, 4, 0], [6, 7]]


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(8.0))


class Varying:
    """Batches of no declared size."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(VARYING)

    def __len__(self) -> int:
        return len(VARYING)


def loaders_of(rank: int) -> dict[str, Any]:
    workers: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
    nothing: Any = None
    return {
        "backwards": values(21, sampler=range(20, -1, -1)),
        "workers": values(21, sampler=range(20, -1, -1), **(workers if rank == 0 else {})),
        "one has it": values(21) if rank == 0 else DataLoader(nothing, batch_size=4),
        "varying": DataLoader(Values(8), batch_sampler=Varying()),
        "stream": DataLoader(Stream(), batch_size=2),
    }


def predict(comm: Comm) -> dict[str, Keeper]:
    found = {}
    for kind, loader in loaders_of(comm.rank).items():
        found[kind] = keeper = Keeper()
        tail: Any = "uneven" if kind == "varying" else "exact"
        strategy = ShardStrategy(dispatch_batches=True, evaluation_tail=tail)
        trainer = make_trainer(strategy, comm.world_size, callbacks=[keeper])
        trainer.predict(Witness(), loader)
    return found


def test_each_rank_is_told_the_samples_that_it_was_sent() -> None:
    for rank, found in enumerate(run_ranks(2, predict)):
        forwards = [[20 - index for index in batch] for batch in BACKWARDS[rank]]
        for kind, batches in (
            ("backwards", BACKWARDS[rank]),
            ("workers", BACKWARDS[rank]),
            ("one has it", forwards),
            ("varying", VARYING[rank::2]),
        ):
            # Sample i is the number i: predictions and indices are the same lists.
            assert found[kind].batches == [(batch, batch) for batch in batches]
            assert found[kind].epoch == (batches, batches)
        assert found["stream"].epoch[0] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]][rank]
        assert found["stream"].epoch[1] == []


def test_indices_are_told_to_who_asks_and_anew_in_each_pass() -> None:
    loader = DataLoaderDispatcher(list(range(5)), batch_size=2, comm=SoloComm())
    assert [loader.indices for _ in loader] == [None] * 3
    loader = DataLoaderDispatcher(list(range(5)), batch_size=2, comm=SoloComm(), tail="exact")
    loader.tell_indices()
    for _ in range(2):
        assert [(batch.tolist(), loader.indices) for batch in loader] == [
            ([0, 1], [0, 1]),
            ([2, 3], [2, 3]),
            ([4], [4]),
        ]
    assert (loader.batch_sampler.batch_size, len(loader)) == (2, 3)  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["stream", "ready"])
def test_nothing_is_told_of_what_has_no_index_batches(kind: str) -> None:
    loader: Any = DataLoaderDispatcher(
        Stream() if kind == "stream" else list(torch.arange(8).view(4, 2)),
        batch_size=2 if kind == "stream" else None,
        comm=SoloComm(),
    )
    loader.tell_indices()
    assert [loader.indices for _ in loader] == [None] * 4
