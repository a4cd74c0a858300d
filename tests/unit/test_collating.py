"""The default collate function into memory of batches that are gone: the same values, no mixing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from shardplug.collating import Collate, can_collate
from shardplug.spares import SMALLEST_BYTES

LARGE = SMALLEST_BYTES // 4  # float32 elements: a batch of two is larger than the least


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


@pytest.mark.parametrize(
    "make",
    [
        lambda at: torch.full((LARGE,), float(at)),
        lambda at: {"x": torch.full((3, LARGE // 3), at), "y": at, "name": f"{at}"},
        lambda at: [np.full(LARGE, at, dtype=np.float32), torch.tensor(at)],
        lambda at: torch.full((LARGE,), at, dtype=torch.int16).view(-1, 4)[:, ::2],
        lambda at: torch.full((2,), float(at)),
        lambda at: torch.full((LARGE,), float(at), requires_grad=True),
        lambda at: torch.full((LARGE,), at, dtype=torch.float32 if at else torch.float64),
    ],
)
def test_it_gives_what_torch_gives(make: Any) -> None:
    collate = Collate(num_kept=3)
    for first in (0, 3):
        samples = [make(first + at) for at in range(3)]
        assert same(collate(samples), default_collate(samples))


def test_what_does_not_stack_is_torchs_own_error() -> None:
    samples = [torch.zeros(LARGE), torch.zeros(LARGE + 1)]
    with pytest.raises(RuntimeError, match="equal size") as due:
        default_collate(samples)
    with pytest.raises(RuntimeError, match="equal size") as got:
        Collate(num_kept=3)(samples)
    assert str(got.value) == str(due.value)


def test_memory_is_taken_again_once_nobody_has_it() -> None:
    collate = Collate(num_kept=2)

    def batch(value: float) -> torch.Tensor:
        made: torch.Tensor = collate([torch.full((LARGE,), value)] * 2)
        return made

    first = batch(1)
    rows = first[1:]  # of which a part is kept
    place = first.data_ptr()
    del first
    second = batch(2)
    assert second.data_ptr() != place
    assert rows.eq(1).all()
    del rows
    third = batch(3)
    assert third.data_ptr() == place
    assert second.eq(2).all()
    assert third.eq(3).all()


def test_only_torchs_own_function_is_replaced() -> None:
    assert can_collate(default_collate)
    assert not can_collate(lambda samples: default_collate(samples))
