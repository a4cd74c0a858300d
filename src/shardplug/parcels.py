"""A parcel, any nesting that `shardplug.rows` understands, as bytes and back.

The structure with the dtype and shape of each tensor is one text, the leaves that are no tensors
are another: neither has to be sent again as long as it stays the same. What remains are pieces of
raw memory: the tensors, and the buffers that other leaves (arrays) lend. They are written straight
to where they go; the parcel is never changed.
"""

from __future__ import annotations

import ctypes
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from shardplug.errors import BatchError
from shardplug.rows import map_leaves
from shardplug.spares import Spares

_ALIGNMENT = 64  # of each piece in a common memory: no dtype asks for more

Memory: TypeAlias = Any
"""Writable bytes with the buffer protocol: a bytearray or an mmap."""


class _Kind(NamedTuple):
    """What makes a tensor of raw memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@final
@dataclass(frozen=True, slots=True)
class Wrapped:
    """A parcel on its way out.

    Attributes:
        description: The structure, for `read_description`.
        values: The leaves that are no tensors, pickled.
        pieces: The memory of tensors, and of buffers of other leaves.
        num_bytes: Of memory that takes all pieces, see `write`.
    """

    description: bytes
    values: bytes
    pieces: Sequence[Tensor | memoryview]
    num_bytes: int

    def write(self, memory: Memory) -> None:
        """Copy all pieces into one memory, where `Description.take` finds them.

        Args:
            memory: At least ``num_bytes``.
        """
        if not self.num_bytes:
            return  # torch makes no tensor of an empty buffer
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        starts, _ = _places(_sizes(self.pieces))
        for piece, start in zip(self.pieces, starts, strict=True):
            _write(piece, whole, start, memory)

    def views(self) -> list[memoryview]:
        """Give the bytes of all pieces, one after the other, without joining them.

        A tensor that is not dense in memory is copied; each view keeps alive what it shows.
        """
        return [
            piece if isinstance(piece, memoryview) else _bytes_of(_dense(piece))
            for piece in self.pieces
            if _size(piece)
        ]


@final
@dataclass(frozen=True, slots=True)
class Description:
    """What a receiver knows of parcels of one structure.

    Attributes:
        num_bytes: Of memory that holds all pieces of a parcel.
    """

    _structure: bytes
    _kinds: tuple[_Kind, ...]
    _buffer_sizes: tuple[int, ...]
    _starts: Sequence[int]
    num_bytes: int

    @property
    def tensor_sizes(self) -> list[int]:
        """The bytes of each tensor."""
        return [kind.num_bytes for kind in self._kinds]

    def empty(self, spares: Spares | None) -> list[Tensor | bytearray]:
        """Make the pieces of a parcel, each in memory of its own, yet to be filled.

        Args:
            spares: Where the memory of tensors comes from. None: it is page-locked.
        """
        if spares is None:  # torch keeps such memory itself
            tensors = [
                torch.empty(kind.shape, dtype=kind.dtype, pin_memory=True) for kind in self._kinds
            ]
        else:
            tensors = spares.empty([(kind.dtype, kind.shape) for kind in self._kinds])
        return [*tensors, *map(bytearray, self._buffer_sizes)]

    def take(self, pieces: Sequence[Tensor | bytearray], memory: Memory) -> None:
        """Fill pieces from a memory that `Wrapped.write` wrote."""
        source = memoryview(memory)
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr() if self.num_bytes else 0
        for piece, start in zip(pieces, self._starts, strict=True):
            if isinstance(piece, Tensor):
                # Unlike a slice assignment it lets other threads run.
                ctypes.memmove(piece.data_ptr(), address + start, _size(piece))
            else:
                piece[:] = source[start : start + len(piece)]

    def parcel(self, pieces: Sequence[Tensor | bytearray], values: bytes) -> Any:
        """Put a parcel together of its pieces, which it keeps, and the pickled other leaves."""
        tensors = [piece for piece in pieces if isinstance(piece, Tensor)]
        buffers = [piece for piece in pieces if not isinstance(piece, Tensor)]
        for tensor, kind in zip(tensors, self._kinds, strict=True):
            tensor.requires_grad_(kind.requires_grad)
        others = pickle.loads(values, buffers=buffers)
        # Loaded anew for each parcel: none shares a container, or what hangs on one, with another.
        structure = pickle.loads(self._structure)
        return map_leaves(lambda place: _leaf(place, tensors, others), structure)


def wrap(parcel: Any) -> Wrapped:
    """Take a parcel apart.

    Args:
        parcel: Any nesting. Leaves that are no dense tensors, and containers of types other than
            those of Python, must be picklable.

    Returns:
        What to send; it refers to the memory of the parcel.

    Raises:
        BatchError: If a container cannot be rebuilt, or something cannot be pickled.
    """
    tensors: list[Tensor] = []
    others: list[object] = []

    def put(leaf: object) -> object:
        if isinstance(leaf, Tensor) and _is_dense_memory(leaf):
            tensors.append(leaf)
            return len(tensors) - 1
        others.append(leaf)
        return -len(others)

    lent: list[pickle.PickleBuffer] = []
    try:
        structure = pickle.dumps(map_leaves(put, parcel), protocol=pickle.HIGHEST_PROTOCOL)
        values = pickle.dumps(others, protocol=5, buffer_callback=lent.append)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise BatchError(
            f"`batch` must hold tensors and what can be pickled, got what cannot: {error}. Leave "
            "it out of the batch, or make it a string or number."
        ) from error
    buffers = [each.raw() for each in lent]
    kinds = [(each.dtype, tuple(each.shape), each.requires_grad) for each in tensors]
    description = pickle.dumps(
        (structure, kinds, [len(each) for each in buffers]), protocol=pickle.HIGHEST_PROTOCOL
    )
    pieces: list[Tensor | memoryview] = [each.detach() for each in tensors]
    pieces += buffers
    return Wrapped(description, values, pieces, _places(_sizes(pieces))[1])


def read_description(data: bytes) -> Description:
    """Read what `wrap` wrote about the structure of a parcel."""
    structure, kinds, buffer_sizes = pickle.loads(data)
    read = tuple(_Kind(*kind) for kind in kinds)
    starts, num_bytes = _places([*(kind.num_bytes for kind in read), *buffer_sizes])
    return Description(structure, read, tuple(buffer_sizes), starts, num_bytes)


def writable_views(pieces: Sequence[Tensor | bytearray]) -> list[memoryview]:
    """Give the bytes of pieces, to be filled in the order of `Wrapped.views`."""
    return [
        _bytes_of(piece) if isinstance(piece, Tensor) else memoryview(piece)
        for piece in pieces
        if _size(piece)
    ]


def _leaf(place: object, tensors: Sequence[Tensor], others: Sequence[object]) -> object:
    assert isinstance(place, int)  # as `wrap` left it
    return tensors[place] if place >= 0 else others[-place - 1]


def _is_dense_memory(leaf: Tensor) -> bool:
    """Tell whether a tensor is no more than its dtype, its shape and its values."""
    return (
        type(leaf) is Tensor
        and leaf.layout is torch.strided
        and not leaf.is_nested
        and not leaf.is_quantized
        and leaf.device.type != "meta"
    )


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Lay pieces out in one memory: where each starts, and where the last ends."""
    starts: list[int] = []
    end = 0
    for size in sizes:
        starts.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = starts[-1] + size
    return starts, end


def _sizes(pieces: Sequence[Tensor | memoryview]) -> list[int]:
    return [_size(piece) for piece in pieces]


def _size(piece: Tensor | memoryview | bytearray) -> int:
    return piece.numel() * piece.itemsize if isinstance(piece, Tensor) else len(piece)


def _write(piece: Tensor | memoryview, whole: Tensor, start: int, memory: Memory) -> None:
    stop = start + _size(piece)
    if stop == start:
        return
    if not isinstance(piece, Tensor):
        memoryview(memory)[start:stop] = piece
    elif _is_as_stored(piece):
        ctypes.memmove(whole.data_ptr() + start, piece.data_ptr(), stop - start)
    else:
        whole[start:stop].view(piece.dtype).view(piece.shape).copy_(piece)


def _is_as_stored(tensor: Tensor) -> bool:
    """Tell whether the memory at a tensor's address is its values in order."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _dense(tensor: Tensor) -> Tensor:
    return (
        tensor if _is_as_stored(tensor) else tensor.cpu().resolve_conj().resolve_neg().contiguous()
    )


def _bytes_of(tensor: Tensor) -> memoryview:
    # torch tensors have no buffer protocol, and numpy, which would lend one, is not required.
    shown = (ctypes.c_char * _size(tensor)).from_address(tensor.data_ptr())
    shown._shown = tensor  # type: ignore[attr-defined]  # noqa: SLF001  # kept with the view
    return memoryview(shown).cast("B")
