"""The keyed permutation of `shardplug.plan.order`, for many positions at once.

The values are those of `KeyedPermutation`, in tens of nanoseconds each. Nothing is kept but a few
constants, so the memory is that of one block, whatever the number of samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, final

import torch
from torch import Tensor

from shardplug.errors import PlanError
from shardplug.plan.order import HASH_SHIFT, KeyedPermutation

_BLOCK = 16384
"""Positions moved at once: their buffers stay in cache, and torch keeps to the calling thread."""
_FIRST_BLOCK = 1024
"""Positions in the first block of a run: few, so that the first batch comes early."""
_FEW = 16
"""Up to this many stragglers of a block are walked one by one, which is cheaper than as tensors."""


class _Round(NamedTuple):
    """Constants of one round. A 0-d tensor is the cheapest operand, an int the only ``alpha``."""

    offset: Tensor
    factor: int
    mixer: int
    mixer_tensor: Tensor


@final
class TensorPermutation:
    """A permutation of [0, num_samples), chosen by a key, for tensors of positions.

    Args:
        num_samples: Samples, in [0, 2^62].
        key: Any integer; see `shardplug.plan.order.order_key`.

    Attributes:
        scalar: The same permutation, for one position at a time.

    Raises:
        PlanError: If ``num_samples`` is out of range.

    Example:
        >>> order = TensorPermutation(1000, key=7)
        >>> order.take(torch.arange(1000)).tolist() == list(KeyedPermutation(1000, key=7))
        True
    """

    def __init__(self, num_samples: int, key: int) -> None:
        self.scalar = KeyedPermutation(num_samples, key)
        bits, rounds = self.scalar.column_bits, self.scalar.rounds
        self._table = _constant(self.scalar.table, torch.int64)
        self._num_samples, self._column_bits = _constant([num_samples, bits], torch.int64).unbind()
        self._row_scale = _constant(self.scalar.num_rows / 2**32, torch.float64)
        shifts = [HASH_SHIFT, 31, 32 - bits]
        masks = [-1 << 32 - bits, (1 << bits) - 1]
        per_round = [number for turn in rounds for number in (turn.offset, turn.mixer)]
        wrapped = [_int32(number) for number in shifts + masks + per_round]
        tensors = _constant(wrapped, torch.int32).unbind()
        self._hash_shift, self._sign_shift, self._column_shift = tensors[:3]
        self._column_mask, self._low_mask = tensors[3:5]
        self._rounds = [
            _Round(offset, _int32(turn.factor), _int32(turn.mixer), mixer)
            for turn, offset, mixer in zip(rounds, tensors[5::2], tensors[6::2], strict=True)
        ]

    def __len__(self) -> int:
        return self.scalar.num_samples

    def take(self, positions: Tensor) -> Tensor:
        """Return the samples at some positions.

        Args:
            positions: An int64 tensor on the CPU, of any shape, each in [0, num_samples).

        Returns:
            An int64 tensor of the same shape.

        Raises:
            PlanError: If ``positions`` is of another type, or one is out of range.
        """
        if positions.dtype != torch.int64:
            raise PlanError(f"`positions` must be an int64 tensor, got {positions.dtype}.")
        if not positions.numel():
            return positions.clone()
        low, high = (int(bound) for bound in positions.aminmax())
        if low < 0 or high >= len(self):
            outside = low if low < 0 else high
            raise PlanError(f"`positions` must be in [0, {len(self)}), got {outside}.")
        if self.scalar.table:
            return self._table[positions]
        flat = positions.reshape(-1)
        samples = torch.empty_like(flat)
        for start in range(0, flat.numel(), _BLOCK):
            self._move(flat[start : start + _BLOCK], samples[start : start + _BLOCK])
        return samples.view(positions.shape)

    def runs(self, first: int, *, stride: int, width: int, count: int) -> Iterator[list[int]]:
        """Yield ``count`` batches: ``width`` samples in a row, from every ``stride``-th position.

        Args:
            first: Position of the first sample.
            stride: Positions from the start of one batch to the start of the next.
            width: Samples per batch, at least 1.
            count: Batches.

        Yields:
            The samples of one batch.

        Raises:
            PlanError: If a position is not in [0, num_samples).
        """
        # (1, width)
        offsets = torch.arange(width, device="cpu").unsqueeze(0)
        done, steps = 0, max(1, _FIRST_BLOCK // width)
        if count * width <= _BLOCK:
            steps = count
        while done < count:
            steps = min(steps, count - done)
            # (steps, 1): where each batch of the block starts
            starts = torch.arange(done, done + steps, device="cpu").unsqueeze(1)
            yield from self.take(starts.mul_(stride).add_(first) + offsets).tolist()
            done, steps = done + steps, max(1, _BLOCK // width)

    def _move(self, positions: Tensor, samples: Tensor) -> None:
        """Write the samples at a block of positions, shape ``(block,)``, into ``samples``."""
        row, column, hashed, spare = positions.new_empty(
            (4, positions.numel()), dtype=torch.int32
        ).unbind()
        unsigned = hashed.view(torch.uint32)
        scaled = torch.empty_like(positions, dtype=torch.float64)
        # Rows are plain int32. Columns sit in the upper bits of an int32, so that adding a hash
        # wraps around at the last column by itself; a mask cuts the bits below.
        row.copy_(torch.bitwise_right_shift(positions, self._column_bits, out=samples))
        column.copy_(positions).bitwise_left_shift_(self._column_shift)
        for turn, constants in enumerate(self._rounds):
            source = row if turn % 2 else column
            torch.add(constants.offset, source, alpha=constants.factor, out=hashed)
            hashed.bitwise_xor_(torch.bitwise_right_shift(hashed, self._hash_shift, out=spare))
            if turn % 2:
                column.add_(hashed, alpha=constants.mixer).bitwise_and_(self._column_mask)
                continue
            hashed.mul_(constants.mixer_tensor)
            scaled.copy_(unsigned).mul_(self._row_scale)
            row.sub_(spare.copy_(scaled))
            # The sign, spread over all bits, is -1 for the rows that have to wrap around.
            torch.bitwise_right_shift(row, self._sign_shift, out=spare)
            row.add_(spare, alpha=-self.scalar.num_rows)
        column.bitwise_right_shift_(self._column_shift).bitwise_and_(self._low_mask)
        samples.copy_(row).bitwise_left_shift_(self._column_bits)
        samples.bitwise_or_(scaled.view(torch.int64).copy_(column))
        self._walk(samples)

    def _walk(self, samples: Tensor) -> None:
        """Move on what landed beyond the last sample, until it lands on one."""
        outside = (samples >= self._num_samples).nonzero().view(-1)
        if not outside.numel():
            return
        cells = samples[outside]
        if cells.numel() <= _FEW:
            landed = cells.new_tensor([self.scalar.walk(cell) for cell in cells.tolist()])
        else:
            landed = torch.empty_like(cells)
            self._move(cells, landed)
        samples[outside] = landed


def _constant(value: object, dtype: torch.dtype) -> Tensor:
    # The device is named because another one may be the default.
    return torch.tensor(value, dtype=dtype, device="cpu")


def _int32(value: int) -> int:
    """Read the low 32 bits of a number as a signed one."""
    return (value + 2**31 & 2**32 - 1) - 2**31
