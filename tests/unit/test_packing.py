"""What goes into a message comes out of it: values, kinds, dtypes and shapes."""

from __future__ import annotations

import pickle
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardplug.packing import pack, unpack

Pair = namedtuple("Pair", "left right")


@dataclass
class Item:
    x: Tensor
    name: str


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


def sent(batches: list[Any]) -> list[Any]:
    """Pack, send as between processes, and unpack."""
    return unpack(pickle.loads(pickle.dumps(pack(batches))))


def is_same(one: Tensor, other: Tensor) -> bool:
    """Equal to the bit, dtype and shape included."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and one.contiguous().view(-1).view(torch.uint8).tolist()
        == other.contiguous().view(-1).view(torch.uint8).tolist()
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (0,), (2, 0, 3)], ids=str)
def test_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.arange(torch.Size(shape).numel()) % 2).reshape(shape).to(dtype)
    before, back, after = sent([torch.tensor([1, 2, 3], dtype=torch.int8), tensor, tensor])
    assert before.tolist() == [1, 2, 3]
    assert back.dtype == after.dtype == dtype
    assert back.shape == after.shape == shape
    if tensor.numel() and shape:
        assert is_same(back, tensor)
        assert is_same(after, tensor)
    else:
        assert back.tolist() == after.tolist() == tensor.tolist()


@given(st.lists(st.lists(st.integers(0, 255), max_size=40), max_size=8))
def test_any_lengths_one_after_another(values: list[list[int]]) -> None:
    batches = [torch.tensor(row, dtype=torch.uint8) for row in values]
    assert [tensor.tolist() for tensor in sent(batches)] == values


@given(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=8), st.integers(1, 9))
def test_every_tensor_starts_where_its_dtype_allows(dtypes: list[torch.dtype], count: int) -> None:
    for tensor in sent([torch.ones(count).to(dtype) for dtype in dtypes]):
        assert tensor.data_ptr() % tensor.element_size() == 0
        assert tensor.to(torch.complex64).tolist() == [1.0] * count


def test_every_kind_of_nesting() -> None:
    x = torch.arange(3.0)
    batch = {
        "pair": Pair(x, [x + 1, (x + 2,)]),
        "item": Item(x + 3, "four"),
        "ordered": OrderedDict(b=x + 4, a="text"),
        3: None,
        "array": np.arange(2),
        "number": 1.5,
        "bytes": b"raw",
        "flag": True,
        "empty": [],
    }
    (back,) = sent([batch])
    assert list(back) == list(batch)
    assert type(back["pair"]) is Pair
    assert back["pair"].left.tolist() == [0, 1, 2]
    assert back["pair"].right[0].tolist() == [1, 2, 3]
    assert back["pair"].right[1][0].tolist() == [2, 3, 4]
    assert type(back["item"]) is Item
    assert (back["item"].x.tolist(), back["item"].name) == ([3, 4, 5], "four")
    assert list(back["ordered"]) == ["b", "a"]
    assert back["ordered"]["b"].tolist() == [4, 5, 6]
    assert back["array"].tolist() == [0, 1]
    rest = (back[3], back["number"], back["bytes"], back["flag"], back["empty"])
    assert rest == (None, 1.5, b"raw", True, [])


def test_batches_that_are_no_tensors() -> None:
    batches = ["text", 3, None, [1, 2], {"a": [4]}]
    assert sent(batches) == batches


def test_what_was_packed_stays_as_it_was() -> None:
    batch: dict[str, Any] = {"x": torch.arange(3), "y": [torch.ones(2)]}
    packed = pack([batch])
    assert batch["x"].tolist() == [0, 1, 2]
    unpack(packed)[0]["x"].zero_()
    assert batch["x"].tolist() == [0, 1, 2]
    assert unpack(packed)[0]["x"].tolist() == [0, 1, 2]


def test_what_comes_out_can_be_written_to_without_touching_its_neighbour() -> None:
    one, other = sent([torch.zeros(3), torch.zeros(3)])
    one.add_(1)
    assert (one.tolist(), other.tolist()) == ([1, 1, 1], [0, 0, 0])


def test_a_view_travels_without_what_it_looks_at() -> None:
    big = torch.arange(100_000)
    packed = pack([big[::50_000], big[10:30].reshape(4, 5).t()])
    assert sum(map(len, packed.data)) < 1000
    strided, turned = unpack(packed)
    assert strided.tolist() == [0, 50_000]
    assert turned.tolist() == torch.arange(10, 30).reshape(4, 5).t().tolist()


def test_a_large_tensor_is_left_to_shared_memory() -> None:
    large = torch.zeros((1 << 20) + 1, dtype=torch.uint8)
    packed = pack([large, large[1:]])
    assert packed.batches[0] is large
    assert sum(map(len, packed.data)) == 1 << 20


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, requires_grad=True),
        lambda: torch.nn.Parameter(torch.ones(2)),
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.tensor([1 + 2j]).conj(),
        lambda: torch.tensor([1 + 2j]).conj().imag,
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8),
        lambda: torch.ones(2, device="meta"),
    ],
    ids=["requires_grad", "parameter", "sparse", "conjugated", "negated", "quantized", "meta"],
)
def test_a_tensor_that_is_more_than_its_bytes_passes_through(make: Callable[[], Tensor]) -> None:
    tensor = make()
    packed = pack([tensor, torch.ones(1)])
    assert packed.batches[0] is tensor
    assert unpack(packed)[0] is tensor


def test_nothing_at_all() -> None:
    assert sent([]) == []
    assert sent([torch.empty(0)])[0].shape == (0,)
