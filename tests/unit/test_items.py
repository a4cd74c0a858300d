"""Ready batches are read by index where they can be, else from the front, and told the epoch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from shardplug import PlanError, SoloComm, prepare_data_loader, ready_batches


class Steady:
    """Goes on from a state, and is told the epoch."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.at = self.start = 0

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]

    def __iter__(self) -> Iterator[int]:
        self.at, self.start = self.start, 0
        while self.at < 4:
            self.at += 1
            yield self.at - 1


@pytest.mark.parametrize("items", [[5, 6], (5, 6), range(5, 7), torch.tensor([5, 6])])
def test_what_is_indexed_is_looked_up(items: Any) -> None:
    loader = ready_batches(items)
    assert not isinstance(loader.dataset, IterableDataset)
    assert (len(loader), [int(item) for item in loader]) == (2, [5, 6])


@pytest.mark.parametrize(
    ("items", "length"), [({5: "a", 6: "b"}, 2), ({5, 6}, 2), (Steady(), None)]
)
def test_what_is_iterated_is_a_stream(items: Any, length: int | None) -> None:
    loader = ready_batches(items)
    assert isinstance(loader.dataset, IterableDataset)
    assert list(loader) == list(items)
    assert getattr(loader.dataset, "__len__", lambda: None)() == length


def test_batches_come_as_they_are() -> None:
    batch = {"rows": [object()]}
    (got,) = ready_batches(iter([batch]))
    assert got is batch


def test_the_epoch_and_the_state_are_its_own() -> None:
    steady = Steady()
    loader = prepare_data_loader(ready_batches(steady), comm=SoloComm())
    iterator = iter(loader)
    assert [next(iterator), next(iterator)] == [0, 1]
    state = loader.state_dict()
    again = Steady()
    loader = prepare_data_loader(ready_batches(again), comm=SoloComm())
    loader.load_state_dict(state)
    assert list(loader) == [2, 3]
    assert list(loader) == [0, 1, 2, 3]
    assert again.epochs == [0, 1]


def test_a_copy_keeps_its_own_place() -> None:
    stream: Any = ready_batches(Steady()).dataset
    other = copy.copy(stream)
    stream.load_state_dict({"at": 3})
    assert list(other) == [0, 1, 2, 3]
    assert list(stream) == [3]


def test_what_is_used_up_is_an_error_and_what_is_empty_is_none() -> None:
    empty = ready_batches(iter(()))
    assert [list(empty), list(empty)] == [[], []]
    once = ready_batches(iter([1]))
    assert list(once) == [1]
    with pytest.raises(PlanError) as caught:
        list(once)
    assert str(caught.value) == (
        "`dataloader` must yield its batches anew in each pass, got list_iterator that has nothing "
        "left after the first. Give an object whose __iter__ starts from the front, or a "
        "DataLoader."
    )
