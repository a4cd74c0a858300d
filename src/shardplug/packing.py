"""Several batches in one message between processes.

torch sends each tensor through a file of shared memory of its own, which costs more than a small
batch is worth. Here the bytes of small tensors travel in the message itself, and the receiver
makes tensors over that memory; large ones stay in shared memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from shardplug.rows import map_leaves

_INLINE_BYTES = 1 << 20
"""Tensors up to this size travel in the message: below it a copy is cheaper than a file."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Batches whose small tensors travel as bytes.

    Attributes:
        batches: The batches, with a `_Piece` in place of each tensor in ``data``.
        data: The bytes of each of these tensors; not joined, which would cost a copy more.
    """

    batches: list[Any]
    data: list[bytes]


@final
class _Piece:
    """Which of the bytes of a message are a tensor's; no dataclass: that is a batch."""

    __slots__ = ("dtype", "index", "shape")

    def __init__(self, index: int, tensor: Tensor) -> None:
        self.index = index
        self.dtype = tensor.dtype
        self.shape = tuple(tensor.shape)


def pack(batches: list[Any]) -> Packed:
    """Turn the small tensors of batches into bytes.

    Args:
        batches: Of any nesting.

    Returns:
        What `unpack` makes them of again.
    """
    data: list[bytes] = []

    def put(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or not _is_inline(leaf):
            return leaf
        data.append(_bytes_of(leaf))
        return _Piece(len(data) - 1, leaf)

    return Packed([map_leaves(put, batch) for batch in batches], data)


def unpack(packed: Packed) -> list[Any]:
    """Make batches again; their tensors are the receiver's own and may be written to.

    Args:
        packed: From `pack`.

    Returns:
        The batches.
    """

    def take(leaf: object) -> object:
        if not isinstance(leaf, _Piece):
            return leaf
        return _tensor_over(bytearray(packed.data[leaf.index]), leaf.dtype, leaf.shape)

    return [map_leaves(take, batch) for batch in packed.batches]


class Columns(NamedTuple):
    """A tensor, or a tuple or dict of tensors only, as bytes: what results mostly are.

    Those of several ranks are joined as bytes, without becoming tensors first.

    Attributes:
        kind: What must be the same for two to be joined: the container, its keys, the dtypes.
        shapes: Of each tensor.
        data: The bytes of each tensor.
    """

    kind: tuple[str, tuple[str, ...], tuple[torch.dtype, ...]]
    shapes: tuple[tuple[int, ...], ...]
    data: list[bytes]

    @property
    def tails(self) -> list[tuple[int, ...] | None]:
        """The shape of a row of each tensor; None for one without dimensions."""
        return [shape[1:] if shape else None for shape in self.shapes]


def side_by_side(data: Any) -> list[Tensor] | None:
    """List the tensors of what may become `Columns`.

    Args:
        data: Anything.

    Returns:
        The tensors of a tensor, or of a tuple or dict of tensors only; None for anything else.
    """
    form = type(data)
    if form is Tensor:
        return [data]
    if form is dict and all(type(key) is str for key in data):
        tensors = list(data.values())
    elif form is tuple:
        tensors = list(data)
    else:
        return None
    return tensors if tensors and all(type(each) is Tensor for each in tensors) else None


def to_columns(data: Any) -> Columns | None:
    """Turn tensors that lie side by side into bytes.

    Args:
        data: Anything, on any device.

    Returns:
        Its tensors as bytes, or None where these are not side by side, or one is large or of an
        uncommon kind.
    """
    found = side_by_side(data)
    if found is None:
        return None
    tensors = [each.detach().cpu() for each in found]
    if not all(_is_inline(each) for each in tensors):
        return None
    keys = tuple(data) if type(data) is dict else ()
    return Columns(
        (type(data).__name__, keys, tuple([each.dtype for each in tensors])),
        tuple([tuple(each.shape) for each in tensors]),
        [_bytes_of(each) for each in tensors],
    )


def unpack_columns(columns: Columns) -> Any:
    """Make tensors again.

    Args:
        columns: From `to_columns`.

    Returns:
        A tensor, tuple or dict, as given there; the tensors may be written to.
    """
    _, _, dtypes = columns.kind
    return _in_form(
        columns,
        [
            _tensor_over(bytearray(data), dtype, shape)
            for data, dtype, shape in zip(columns.data, dtypes, columns.shapes, strict=True)
        ],
    )


def join_columns(parts: Sequence[Columns]) -> Any:
    """Make tensors again, each of the rows of all parts.

    Args:
        parts: At least one; of one kind, with the same tails.

    Returns:
        A tensor, tuple or dict, as given to `to_columns`. Tensors without dimensions are stacked.
    """
    _, _, dtypes = parts[0].kind
    tensors = []
    for place, (dtype, tail) in enumerate(zip(dtypes, parts[0].tails, strict=True)):
        rows = len(parts) if tail is None else sum([each.shapes[place][0] for each in parts])
        data = bytearray().join([each.data[place] for each in parts])
        tensors.append(_tensor_over(data, dtype, (rows, *(tail or ()))))
    return _in_form(parts[0], tensors)


def _in_form(columns: Columns, tensors: list[Tensor]) -> Any:
    form, keys, _ = columns.kind
    if form == "dict":
        return dict(zip(keys, tensors, strict=True))
    return tuple(tensors) if form == "tuple" else tensors[0]


def _tensor_over(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(shape)


def _is_inline(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.numel() * tensor.element_size() <= _INLINE_BYTES
    )


def _bytes_of(tensor: Tensor) -> bytes:
    dense = tensor.contiguous()
    # torch tensors have no buffer protocol, and numpy, which would lend one, is not required.
    return ctypes.string_at(dense.data_ptr(), dense.numel() * dense.element_size())
