"""Let every sample carry a tag: which one it is, who made it, with which random numbers.

A data set and a collate function are wrapped; what the loader yields is then a `TracedBatch`. The
tags of a batch are one tensor with a row per sample, so that they are cut, joined and sent like any
other part of the batch.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
import operator
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from shardplug import rng
from shardplug.errors import BatchError
from shardplug.plan.order import mix_seed
from shardplug.rows import count_rows, leaves
from shardplug.worker_info import worker_place

np: Any
try:
    import numpy as np
except ImportError:  # torch works without it
    np = None

ID, CONTENT, WORKER = 0, 1, 2
DRAWS = slice(3, 8)
"""Columns of the states that python, numpy, torch, generators of the data set's own, and the
collate function drew from; 0 where nothing was drawn."""
SEEDS = slice(8, 12)
"""Columns of the seeds that python, numpy, torch and the collate function were given for a sample
by the user's code; 0 where it gave none, or where that was not looked into."""
NUM_COLUMNS, NUM_GLOBAL = 12, 3
_MT19937_BYTES = 624 * 4 + 4
"""Its words, and the place in them."""
_SEARCH_DEPTH, _SEARCH_WIDTH, _SEARCHES = 3, 64, 3
_LOOKS = 16
"""Samples of each copy of a data set that are made again, where it seeds generators itself."""


GENERATORS = ("python", "torch", *(["numpy"] if np is not None else []))
"""The global generators that are watched, and kept apart for each rank."""


@contextmanager
def kept_generators() -> Iterator[None]:
    """Give the global generators their states back afterwards."""
    states = rng.capture(GENERATORS)
    try:
        yield
    finally:
        rng.restore(states)


class TracedBatch(NamedTuple):
    """A batch, and the tags of its samples: int64 (rows, NUM_COLUMNS)."""

    tags: Tensor
    batch: Any


class Tagged(NamedTuple):
    """A sample, or a batch that is ready, and its tag."""

    value: Any
    tag: tuple[int, ...]


def trace(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Clone a loader so that it yields traced batches; the user's stays as it is."""
    clone = copy.copy(loader)
    is_ready = loader.batch_sampler is None
    # A DataLoader refuses to have these set; a clone that has not iterated may take them.
    clone.__dict__.update(
        dataset=trace_dataset(loader.dataset),
        collate_fn=_TracingCollate(loader.collate_fn, is_ready),
        _iterator=None,
    )
    if has_own_iter(loader):
        clone.__dict__["_tags"] = deque()
        kind = type(loader)
        clone.__class__ = type(kind.__name__, (_Outside, kind, _Inside), {"__module__": __name__})
    return clone


def has_own_iter(loader: DataLoader[Any]) -> bool:
    """Tell whether a loader has an ``__iter__`` that is not torch's or torchdata's."""
    found = type(loader).__iter__
    return found not in (DataLoader.__iter__, StatefulDataLoader.__iter__)


class _Inside(DataLoader[Any]):
    """Stands between a loader's class and DataLoader: its ``__iter__`` finds the user's batches."""

    _tags: deque[Tensor]

    def __iter__(self) -> Any:
        for traced in super().__iter__():
            self._tags.append(traced.tags)
            yield traced.batch


class _Outside(DataLoader[Any]):
    """Stands before a loader's class: gives each batch that comes out of it its tags back."""

    _tags: deque[Tensor]

    def __iter__(self) -> Any:
        self._tags.clear()
        for batch in super().__iter__():
            # Who does not ask super().__iter__() has got batches with their tags on.
            yield TracedBatch(self._tags.popleft(), batch) if self._tags else batch


def trace_dataset(dataset: Any) -> Any:
    """Wrap a data set; the wrapper has those methods that are looked for and that it has."""
    base = _TracedStream if isinstance(dataset, IterableDataset) else _TracedMap
    methods = {name: method for name, method in _OPTIONAL.items() if _has(dataset, name)}
    if base is _TracedStream:
        methods.pop("__getitems__", None)
    made: Any = type(base.__name__, (base,), methods)()
    made.__dict__.update(traced=dataset, _searches=0, _found=(), _seeding=Seeding())
    return made


def _has(dataset: Any, name: str) -> bool:
    # Length and the rest are looked up on the type, as python does; `shard` may be the object's.
    return callable(getattr(type(dataset), name, None)) or (
        name == "shard" and callable(getattr(dataset, name, None))
    )


class _Traced(Dataset[Any]):
    """What is asked of it or set on it is the data set's, as for code that reaches for that."""

    traced: Any

    _searches: int
    _found: tuple[Any, ...]
    _seeding: Seeding

    def own_generators(self) -> Sequence[Any]:
        """List the generators that the data set keeps; one may be made with the first samples."""
        if self._searches < _SEARCHES:
            found = tuple(_generators(self.traced, _SEARCH_DEPTH))
            self.__dict__.update(_searches=self._searches + 1, _found=found)
        return self._found

    def __getattr__(self, name: str) -> Any:
        if name == "traced" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.traced, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.traced, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return trace_dataset, (self.traced,)


class _TracedMap(_Traced):
    def __getitem__(self, index: Any) -> Tagged:
        probe = Probe(self.own_generators())
        value = self.traced[index]
        drawn, seeds = self._seeding.told_apart(probe, lambda: self.traced[index])
        return Tagged(value, (number_of(index), 0, worker_number(), *drawn, 0, *seeds, 0))


class _TracedStream(_Traced, IterableDataset[Any]):
    def __iter__(self) -> Iterator[Tagged]:
        items = iter(self.traced)
        for number in count():
            probe = Probe(self.own_generators())
            # With random numbers that follow an item's place, copies of a stream that nobody
            # divides make equal items, and can be told for what they are.
            with kept_generators():
                rng.seed_cpu(mix_seed(number))
                inner = Probe(())
                value = next(items, _END)
                moved, seeds = inner.drawn(), _seeds_where(inner.moved())
            if value is _END:
                return
            drawn = probe.drawn_where(moved)
            _move_on(drawn)
            yield Tagged(value, (number, digest(value), worker_number(), *drawn, 0, *seeds, 0))


_END = object()


def _move_on(drawn: Sequence[int]) -> None:
    """Draw once from each generator that was drawn from before it got its state back."""
    if drawn[0]:
        random.random()
    if drawn[1]:
        np.random.random()
    if drawn[2]:
        torch.rand(())


def _getitems(self: _TracedMap, indices: list[Any]) -> list[Tagged]:
    probe = Probe(self.own_generators())
    values = self.traced.__getitems__(indices)
    seeding = self._seeding
    drawn, seeds = seeding.told_apart(probe, lambda: self.traced.__getitems__(indices))
    return [
        Tagged(value, (number_of(index), 0, worker_number(), *drawn, 0, *seeds, 0))
        for index, value in zip(indices, values, strict=True)
    ]


def _length(self: _Traced) -> int:
    return len(self.traced)


def _set_epoch(self: _Traced, epoch: int) -> None:
    self.traced.set_epoch(epoch)


def _shard(self: _Traced, num_shards: int, index: int) -> Any:
    return trace_dataset(self.traced.shard(num_shards=num_shards, index=index))


_OPTIONAL: dict[str, Callable[..., Any]] = {
    "__getitems__": _getitems,
    "__len__": _length,
    "set_epoch": _set_epoch,
    "shard": _shard,
}


class _TracingCollate:
    """Collates values with the user's function, and stacks their tags."""

    def __init__(self, collate: Callable[[Any], Any], is_ready: bool) -> None:
        self.collate = collate
        self.is_ready = is_ready
        self._seeding = Seeding()

    def __call__(self, samples: Any) -> TracedBatch:
        probe = Probe(())
        if self.is_ready:
            values = samples.value
            batch = self.collate(values)
            rows = [samples.tag] * _rows_of(batch)
        else:
            values = [sample.value for sample in samples]
            batch = self.collate(values)
            rows = [sample.tag for sample in samples]
        tags = torch.tensor(rows, dtype=torch.int64).reshape(-1, NUM_COLUMNS)
        # Of copies, as what collates may change what it is given.
        drawn, seeds = self._seeding.told_apart(probe, lambda: self.collate(copy.deepcopy(values)))
        tags[:, DRAWS.stop - 1] = rng.signed_seed(_combined(drawn))
        tags[:, SEEDS.stop - 1] = rng.signed_seed(_combined(seeds))
        return TracedBatch(tags, batch)


def _rows_of(batch: Any) -> int:
    try:
        return count_rows(batch) or 1
    except BatchError:
        return 1


class Probe:
    """Remembers the states of generators, to tell later which ones were drawn from.

    Args:
        own: Generators that are the data set's own.
    """

    def __init__(self, own: Sequence[Any]) -> None:
        self._own = own
        self._before = self.states()
        self._seed = torch.initial_seed()

    def states(self) -> list[Any]:
        """Read the state of each generator, the global ones first."""
        numpy = None if np is None else _state_of(np.random.mtrand._rand)  # noqa: SLF001  # theirs
        own = [_state_of(each) for each in self._own]
        return [random.getstate(), numpy, torch.get_rng_state().numpy().tobytes(), *own]

    def drawn(self) -> list[int]:
        """Tell what was drawn from: for each kind a number that stands for the state, else 0.

        A torch generator that was seeded in between counts as not drawn from: what comes of it does
        not depend on its state.
        """
        moved = self.moved()
        if torch.initial_seed() != self._seed:
            moved[2] = 0
        return [
            *map(rng.signed_seed, moved[:NUM_GLOBAL]),
            rng.signed_seed(_combined(moved[NUM_GLOBAL:])),
        ]

    def drawn_where(self, moved: Sequence[int]) -> list[int]:
        """Tell the same where it was watched elsewhere which global generators moved."""
        states = [
            _hashed(before) if at else 0 for before, at in zip(self._before, moved, strict=False)
        ]
        own = _combined(self.moved()[NUM_GLOBAL:])
        return [*map(rng.signed_seed, states[:NUM_GLOBAL]), rng.signed_seed(own)]

    def moved(self) -> list[int]:
        """Tell of each generator whether its state has changed: the one before, hashed, else 0."""
        after = self.states()
        return [
            0 if before == now else _hashed(before)
            for before, now in zip(self._before, after, strict=True)
        ]


class Seeding:
    """Finds out which global generators the user's code seeds itself, and with what.

    A sample is made again from two other states: where both lead to the same state, it depends on
    neither.
    """

    def __init__(self) -> None:
        self._is_seeded: dict[int, bool] = {}
        self._looks = _LOOKS

    def told_apart(
        self, probe: Probe, make: Callable[[], Any]
    ) -> tuple[list[int], tuple[int, ...]]:
        """Tell what was drawn from generators that are not seeded, and the seeds of the others.

        Args:
            probe: Watched while the sample was made.
            make: Makes it again.
        """
        moved = probe.moved()[:NUM_GLOBAL]
        drawn = probe.drawn()
        seeds = (0,) * NUM_GLOBAL
        is_new = any(at and place not in self._is_seeded for place, at in enumerate(moved))
        if is_new or (self._looks and any(self._is_seeded.values())):
            self._looks = max(0, self._looks - 1)
            seeds = _seeds_of(make)
            for place in range(NUM_GLOBAL):
                if moved[place]:
                    self._is_seeded.setdefault(place, bool(seeds[place]))
        drawn = [0 if self._is_seeded.get(place) else at for place, at in enumerate(drawn)]
        return drawn, seeds


def _seeds_of(make: Callable[[], Any]) -> tuple[int, ...]:
    """Tell which seeds something gives the global generators, as numbers that stand for them."""
    ends = []
    for seed in (1, 2):
        with kept_generators():
            rng.seed_cpu(seed)
            probe = Probe(())
            try:
                make()
            except Exception:  # noqa: BLE001  # the second time the user's code may raise anything
                return (0,) * NUM_GLOBAL
            ends.append((probe.states(), _seeds_where(probe.moved())))
    (one, seeds), (other, _) = ends
    return tuple(seed if one[place] == other[place] else 0 for place, seed in enumerate(seeds))


def _seeds_where(moved: Sequence[int]) -> tuple[int, ...]:
    """Read what the generators that moved were seeded with, however much was drawn since.

    Up to 624 numbers of python's and numpy's leave the words of their state as they are.
    """
    numpy = 0
    if moved[1]:
        state = _state_of(np.random.mtrand._rand)  # noqa: SLF001  # theirs
        numpy = _hashed(state[:-4] if isinstance(state, bytes) else state)
    seeds = (
        _hashed(random.getstate()[1][:-1]) if moved[0] else 0,
        numpy,
        _hashed(torch.initial_seed()) if moved[2] else 0,
    )
    return tuple(map(rng.signed_seed, seeds))


def _combined(states: Sequence[int]) -> int:
    used = [state for state in states if state]
    return mix_seed(*used) if used else 0


def _generators(holder: Any, depth: int) -> Iterator[Any]:
    """Find the generators that an object keeps in its attributes, or those of its attributes."""
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if np is not None:
        kinds = (*kinds, np.random.Generator, np.random.RandomState)
    is_list = isinstance(holder, (list, tuple))
    values = holder if is_list else getattr(holder, "__dict__", {}).values()
    for value in list(islice(values, _SEARCH_WIDTH)):
        if isinstance(value, kinds):
            yield value
        elif depth > 1 and not isinstance(value, (str, bytes, int, float, Tensor)):
            yield from _generators(value, depth - 1)


def _state_of(generator: Any) -> Any:
    """Read a state as something that can be compared, and written down where it has changed."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    bits = getattr(generator, "bit_generator", None) or generator._bit_generator  # noqa: SLF001
    if type(bits) is np.random.MT19937:
        # What numpy makes of it takes a hundred times as long, for every sample.
        return ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES)
    return repr(bits.state)


def _hashed(state: Any) -> int:
    data = state if isinstance(state, bytes) else repr(state).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") or 1


def number_of(index: Any) -> int:
    """Give the number of a sample; of a key that is none, one that stands for it, see `is_key`."""
    try:
        number = operator.index(index)  # numpy's and torch's are numbers, too
    except TypeError:
        pass
    else:
        if _LEAST_NUMBER <= number < 2**63:
            return number
    # Of long tensors and arrays repr() leaves the middle out.
    text = repr(index.tolist() if hasattr(index, "tolist") else index)
    return -(2**63) + (_hashed(text.encode()) >> 2)


def is_key(numbers: Any) -> Any:
    """Tell whether a number, or which of a tensor, stands for a key that is none itself."""
    return numbers < _LEAST_NUMBER


_LEAST_NUMBER = -(2**62)


def worker_number() -> int:
    """Return this worker's number, -1 outside of workers."""
    # Not by get_worker_info(): who reads that may be watched.
    return -1 if get_worker_info() is None else worker_place()[0]


def digest(value: Any) -> int:
    """Give a number that stands for what a sample holds, as a signed 64-bit integer."""
    hashed = hashlib.blake2b(digest_size=8)
    for path, leaf in leaves(value):
        hashed.update(path.encode())
        hashed.update(_bytes_of(leaf))
    return rng.signed_seed(int.from_bytes(hashed.digest(), "little"))


def _bytes_of(leaf: object) -> bytes:
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
        plain = leaf.detach().cpu().contiguous().reshape(-1)
        return bytes(plain.view(torch.uint8).numpy()) if plain.numel() else b""
    try:
        return pickle.dumps(leaf)
    except Exception:  # noqa: BLE001  # a user's __reduce__ may raise anything
        return type(leaf).__qualname__.encode()
