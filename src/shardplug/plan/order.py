"""Seeds, and the keyed permutation: who comes when, as a function of numbers alone.

`KeyedPermutation` shuffles [0, n) by a formula: any position is looked up on its own, at the same
cost for every n. It is the definition; `shardplug.permutation` computes the same values, many at a
time. All numbers here are the same on every platform and stay the same in every version.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from operator import index
from typing import NamedTuple

from shardplug.errors import PlanError

MAX_SAMPLES = 2**62
"""The largest number of samples that can be permuted: rows and columns fit 31 bits."""
TABLE_LIMIT = 256
"""Up to here a permutation is a table: a grid this small has too few cells to mix well."""
ROUNDS = 8
"""Rounds of mixing. Six are statistically uniform too, but on large grids only."""
HASH_SHIFT = 15
"""Shift in the hash of a round: folds the high, well mixed half of a product onto the low one."""

_GAMMA = 0x9E3779B97F4A7C15
_MASK32 = 2**32 - 1
_MASK64 = 2**64 - 1


def mix_seed(*parts: int) -> int:
    """Mix any number of integers into one seed.

    Each part, of any size and sign, passes through the finaliser of SplitMix64 (Steele, Lea and
    Flood, "Fast splittable pseudorandom number generators", 2014). Order and number of the parts
    matter: (1, 2), (2, 1) and (1, 2, 0) have seeds that are unrelated.

    Args:
        parts: What the seed depends on.

    Returns:
        A seed in [0, 2^63), which every generator that takes a signed 64-bit seed accepts.

    Example:
        >>> mix_seed(1, 2)
        3810346504825414801
        >>> mix_seed(1, 2) == mix_seed(2, 1)
        False
    """
    state = _begin_mix(len(parts))
    for part in parts:
        state = _mix_in(state, part)
    return state >> 1


def _begin_mix(num_parts: int) -> int:
    return _finalise((num_parts + 1) * _GAMMA)


def _mix_in(state: int, part: int) -> int:
    part = index(part)
    # How many limbs a part has goes in too, or (a + b * 2^64, c) would equal (a, b + c * 2^64).
    num_limbs = part.bit_length() // 64 + 1
    state += num_limbs * _GAMMA
    for limb in range(num_limbs):
        state = _finalise(state ^ (part >> 64 * limb))
    return state


def epoch_seed(seed: int, epoch: int) -> int:
    """Give the seed of an epoch's ``torch.randperm``: ``seed + epoch``.

    Args:
        seed: Seed of the run, any that ``torch.Generator.manual_seed`` takes.
        epoch: The epoch, zero or more.

    Returns:
        The sum modulo 2^64, in [0, 2^64). torch reads a negative seed modulo 2^64 as well, so where
        ``manual_seed`` takes the plain sum, it gives the same numbers.

    Example:
        >>> epoch_seed(42, 3), epoch_seed(2**64 - 1, 1), epoch_seed(-1, 0) == 2**64 - 1
        (45, 0, True)
    """
    return index(seed + epoch) & _MASK64


def order_key(seed: int, epoch: int) -> int:
    """Give the key of an epoch's `KeyedPermutation`, in [0, 2^63).

    Args:
        seed: Seed of the run, any integer.
        epoch: The epoch.

    Example:
        >>> order_key(0, 0) == order_key(0, 1)
        False
    """
    return mix_seed(seed, epoch)


def worker_seed(seed: int, epoch: int, *, rank: int, worker: int) -> int:
    """Give the seed of a loader worker, different on every data rank and in every epoch.

    Args:
        seed: Seed of the run, any integer.
        epoch: The epoch.
        rank: Index of the shard that the worker reads for.
        worker: Number of the worker within that rank.

    Returns:
        A seed in [0, 2^63).

    Example:
        >>> worker_seed(0, 0, rank=0, worker=1) == worker_seed(0, 0, rank=1, worker=0)
        False
    """
    return mix_seed(seed, epoch, rank, worker)


class SampleSeeds:
    """The seeds of the samples of an epoch, whichever rank and worker loads them.

    ``SampleSeeds(seed, epoch)[position]`` is ``mix_seed(seed, epoch, position)``; seed and epoch
    are mixed once, since every sample asks.

    Args:
        seed: Seed of the run, any integer.
        epoch: The epoch.

    Example:
        >>> SampleSeeds(0, 0)[7] == mix_seed(0, 0, 7)
        True
    """

    __slots__ = ("_state",)

    def __init__(self, seed: int, epoch: int) -> None:
        # With what a part of one limb adds.
        self._state = _mix_in(_mix_in(_begin_mix(3), seed), epoch) + _GAMMA

    def __getitem__(self, position: int) -> int:
        """Give the seed at a position of the epoch's global order, in [0, 2^63).

        Args:
            position: In [0, 2^63).
        """
        # `_finalise` once more: a call takes as long as all it does.
        state = (self._state ^ position) & _MASK64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK64
        return (state ^ state >> 31) >> 1


class Round(NamedTuple):
    """Constants of one round: the hash of x is ``mixer * fold(offset + factor * x)``, 32 bits.

    ``fold(y)`` is ``y ^ (y >> HASH_SHIFT)`` with y read as a signed number. Both multipliers are
    odd. This is the shape of MurmurHash3's finaliser with a key in place of its constants.
    """

    offset: int
    factor: int
    mixer: int

    def hash(self, value: int) -> int:
        """Hash a 32-bit number into [0, 2^32)."""
        folded = (self.offset + self.factor * value + 2**31 & _MASK32) - 2**31
        folded ^= folded >> HASH_SHIFT
        return self.mixer * folded & _MASK32


@dataclass(frozen=True, slots=True)
class KeyedPermutation:
    """A permutation of [0, num_samples), chosen by a key, computed position by position.

    A position is a cell of a grid with about as many rows as columns. Eight rounds of a Feistel
    network move it: even rounds shift the row by a hash of the column, odd rounds the column by a
    hash of the row; each can be undone, so the whole is a permutation of the cells. The few cells
    beyond the last sample (fewer than one row) are moved again until they land on a sample, which
    keeps it a permutation of the samples (Black and Rogaway, "Ciphers with arbitrary finite
    domains", 2002). Up to ``TABLE_LIMIT`` samples are sorted by a keyed hash instead.

    Statistically it is as good as a random permutation; it keeps no secrets.

    Attributes:
        num_samples: Samples, in [0, 2^62].
        key: Any integer; see `order_key`.
        table: The whole permutation, where it is small enough; else empty.
        column_bits: Binary logarithm of the number of columns.
        num_rows: Rows of the grid, at most 2^31.
        rounds: The constants of each round; none where there is a table.

    Raises:
        PlanError: If ``num_samples`` is out of range.

    Example:
        >>> order = KeyedPermutation(10**12, key=7)
        >>> order[0], order[1], order.position_of(order[1])
        (576121517924, 819194342813, 1)
        >>> sorted(KeyedPermutation(5, key=7))
        [0, 1, 2, 3, 4]
    """

    num_samples: int
    key: int
    table: tuple[int, ...] = field(init=False, repr=False, compare=False)
    column_bits: int = field(init=False, repr=False, compare=False)
    num_rows: int = field(init=False, repr=False, compare=False)
    rounds: tuple[Round, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the size and derive the constants from the key."""
        if not 0 <= self.num_samples <= MAX_SAMPLES:
            raise PlanError(f"`num_samples` must be in [0, 2**62], got {self.num_samples}.")
        words = _words(self.key)
        table: tuple[int, ...] = ()
        rounds: tuple[Round, ...] = ()
        column_bits = max(self.num_samples - 1, 0).bit_length() // 2
        if self.num_samples <= TABLE_LIMIT:
            # No two words of a key are equal, so there are no ties to break.
            ranks = list(islice(words, self.num_samples))
            table = tuple(sorted(range(self.num_samples), key=ranks.__getitem__))
        else:
            rounds = tuple(_draw_round(words) for _ in range(ROUNDS))
        object.__setattr__(self, "table", table)
        object.__setattr__(self, "column_bits", column_bits)
        object.__setattr__(self, "num_rows", -(-self.num_samples >> column_bits))
        object.__setattr__(self, "rounds", rounds)

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        """Yield the samples in their order."""
        return (self[position] for position in range(self.num_samples))

    def __getitem__(self, position: int) -> int:
        """Return the sample at a position.

        Raises:
            PlanError: If ``position`` is not in [0, num_samples).
        """
        self._check("position", position)
        return self.table[position] if self.table else self.walk(position)

    def position_of(self, sample: int) -> int:
        """Return the position of a sample: the inverse.

        Raises:
            PlanError: If ``sample`` is not in [0, num_samples).
        """
        self._check("sample", sample)
        if self.table:
            return self.table.index(sample)
        cell = self._move_back(sample)
        while cell >= self.num_samples:
            cell = self._move_back(cell)
        return cell

    def walk(self, cell: int) -> int:
        """Move a cell of the grid until it lands on a sample. There must be no table.

        Args:
            cell: A cell, in [0, num_rows * 2^column_bits).

        Returns:
            A sample.
        """
        cell = self._move(cell)
        while cell >= self.num_samples:
            cell = self._move(cell)
        return cell

    def _move(self, cell: int) -> int:
        row, column = cell >> self.column_bits, cell & (1 << self.column_bits) - 1
        for turn, constants in enumerate(self.rounds):
            if turn % 2 == 0:
                row = (row - self._row_shift(column, constants)) % self.num_rows
            else:
                column = column + self._column_shift(row, constants) & (1 << self.column_bits) - 1
        return row << self.column_bits | column

    def _move_back(self, cell: int) -> int:
        row, column = cell >> self.column_bits, cell & (1 << self.column_bits) - 1
        for turn, constants in reversed(list(enumerate(self.rounds))):
            if turn % 2 == 0:
                row = (row + self._row_shift(column, constants)) % self.num_rows
            else:
                column = column - self._column_shift(row, constants) & (1 << self.column_bits) - 1
        return row << self.column_bits | column

    def _row_shift(self, column: int, constants: Round) -> int:
        # The column is hashed from the upper end of the 32 bits, where the tensors keep it.
        # Scaling is one float64 product, rounded as IEEE 754 says, so the same everywhere:
        # num_rows / 2^32 and the hash are exact, and since a hash is at most 2^32 - 1 the product
        # is below num_rows by num_rows / 2^32, far more than rounding adds.
        hashed = constants.hash(column << 32 - self.column_bits)
        return int(hashed * (self.num_rows / 2**32))

    def _column_shift(self, row: int, constants: Round) -> int:
        return constants.hash(row) >> 32 - self.column_bits

    def _check(self, name: str, value: int) -> None:
        if not 0 <= value < self.num_samples:
            raise PlanError(f"`{name}` must be in [0, {self.num_samples}), got {value}.")


def _draw_round(words: Iterator[int]) -> Round:
    first, second = next(words), next(words)
    return Round(offset=first >> 32, factor=first & _MASK32 | 1, mixer=second >> 32 | 1)


def _words(key: int) -> Iterator[int]:
    """Yield the 64-bit numbers of SplitMix64, seeded by a key."""
    start = mix_seed(key)
    return (_finalise(start + step * _GAMMA) for step in count(1))


def _finalise(state: int) -> int:
    """Scatter 64 bits: a bijection of [0, 2^64) in which every bit of the input moves half of them.

    The constants are David Stafford's "Mix13", as in SplitMix64.
    """
    state &= _MASK64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK64
    return state ^ state >> 31
