"""Position in an epoch → sample: the orders whose positions can be looked up at random.

A plan says which positions a shard reads; an order says which samples stand there. Every order
here answers for a few positions (`take`) and for a run of equal steps (`runs`), which is how a
shard reads: ``width`` positions out of every ``stride``. Both cost what is asked for, not what the
epoch holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, final

import torch
from torch import Tensor

from shardplug.permutation import TensorPermutation

_BLOCK = 8192
"""Samples worked out at once: large enough to hide the cost of a call, small enough for cache."""
_FIRST_BLOCK_STEPS = 4
"""Steps in the first block, so that the first batch comes early; blocks double from there."""


class Order(Protocol):
    """The order of one epoch: which sample stands at which position."""

    def __len__(self) -> int:
        """Count the samples of the epoch."""

    def take(self, positions: Sequence[int]) -> list[int]:
        """Return the samples at some positions, each in [0, len)."""

    def runs(self, first: int, *, stride: int, width: int, count: int) -> Iterator[list[int]]:
        """Yield ``count`` batches: ``width`` samples in a row, from every ``stride``-th position.

        Args:
            first: Position of the first sample.
            stride: Positions from the start of one batch to the start of the next.
            width: Samples per batch.
            count: Batches.
        """


@final
class SequentialOrder:
    """Position p holds sample p."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def take(self, positions: Sequence[int]) -> list[int]:
        """Return the positions: they are the samples."""
        return list(positions)

    def runs(self, first: int, *, stride: int, width: int, count: int) -> Iterator[list[int]]:
        """Yield consecutive numbers, batch by batch."""
        for start in range(first, first + count * stride, stride):
            yield list(range(start, start + width))


@final
class SequenceOrder:
    """Position p holds item p of a list, a range or any other sequence."""

    def __init__(self, samples: Sequence[int]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def take(self, positions: Sequence[int]) -> list[int]:
        """Look the positions up one by one."""
        return [self._samples[position] for position in positions]

    def runs(self, first: int, *, stride: int, width: int, count: int) -> Iterator[list[int]]:
        """Yield slices of the sequence."""
        for start in range(first, first + count * stride, stride):
            yield list(self._samples[start : start + width])


@final
class TensorOrder:
    """Position p holds element p of an integer tensor of shape ``(num_samples,)``."""

    def __init__(self, samples: Tensor) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples.numel()

    def take(self, positions: Sequence[int]) -> list[int]:
        """Look the positions up in one go."""
        if isinstance(positions, range) and positions.step == 1:
            taken = self._samples[positions.start : positions.stop]
        else:
            taken = self._samples[torch.as_tensor(positions, dtype=torch.int64)]
        return taken.tolist()

    def runs(self, first: int, *, stride: int, width: int, count: int) -> Iterator[list[int]]:
        """Yield rows of a strided view, many at a time."""
        # (count, width): row s starts at first + s * stride
        for start, steps in blocks(count, width):
            rows = self._samples.as_strided(
                (steps, width),
                (stride, 1),
                self._samples.storage_offset() + first + start * stride,
            )
            yield from rows.tolist()


@final
class PermutedOrder:
    """Position p holds the sample that a keyed permutation puts there; nothing is stored."""

    def __init__(self, permutation: TensorPermutation) -> None:
        self._permutation = permutation

    def __len__(self) -> int:
        return len(self._permutation)

    def take(self, positions: Sequence[int]) -> list[int]:
        """Permute the positions in one go."""
        return self._permutation.take(torch.as_tensor(positions, dtype=torch.int64)).tolist()

    def runs(self, first: int, *, stride: int, width: int, count: int) -> Iterator[list[int]]:
        """Permute many batches at a time."""
        return self._permutation.runs(first, stride=stride, width=width, count=count)


def blocks(count: int, width: int) -> Iterator[tuple[int, int]]:
    """Divide ``count`` steps of ``width`` samples into blocks: small at first, then cache-sized.

    Yields:
        The first step of each block, and how many it has.
    """
    most = max(1, _BLOCK // width)
    start, steps = 0, min(_FIRST_BLOCK_STEPS, most)
    while start < count:
        steps = min(steps, count - start)
        yield start, steps
        start, steps = start + steps, min(2 * steps, most)


def random_order(
    num_samples: int,
    *,
    generator: torch.Generator,
    draws: int | None = None,
    replacement: bool = False,
) -> TensorOrder:
    """Draw the order that torch's RandomSampler draws from the same generator.

    The permutation is drawn as int32 where that holds it: torch.randperm gives the same
    permutation for either type, and it takes half the memory.

    Args:
        num_samples: Samples of the data set.
        generator: Where to draw from; it moves as RandomSampler moves it up to its last sample.
        draws: Samples in the epoch; None: each once.
        replacement: Whether each draw is from all samples.

    Returns:
        The order of one epoch.
    """
    dtype = torch.int32 if num_samples < 2**31 else torch.int64
    total = num_samples if draws is None else draws
    if replacement:
        return TensorOrder(
            torch.randint(num_samples, (total,), dtype=torch.int64, generator=generator)
        )
    if total == num_samples:
        return TensorOrder(torch.randperm(num_samples, generator=generator, dtype=dtype))
    rounds = -(-total // num_samples) if num_samples else 0
    permutations = [
        torch.randperm(num_samples, generator=generator, dtype=dtype) for _ in range(rounds)
    ]
    return TensorOrder(torch.cat(permutations)[:total])
