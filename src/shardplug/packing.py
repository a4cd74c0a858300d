"""Several batches in one message between processes.

torch sends each tensor through a file of shared memory of its own, which costs more than a small
batch is worth. Here the bytes of small tensors travel in the message itself, and the receiver
makes tensors over that memory; large ones stay in shared memory.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any, final

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
        count = math.prod(leaf.shape)
        if not count:
            return torch.empty(leaf.shape, dtype=leaf.dtype)
        own = bytearray(packed.data[leaf.index])
        return torch.frombuffer(own, dtype=leaf.dtype, count=count).view(leaf.shape)

    return [map_leaves(take, batch) for batch in packed.batches]


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
