"""Data of an engine that is no DataLoader: its items are batches that are ready."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader, Dataset, IterableDataset


@runtime_checkable
class _Indexable(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class _Sized(Protocol):
    def __len__(self) -> int: ...


def loader_over(data: Any) -> DataLoader[Any]:
    """Make a loader that yields the items of some data one by one, as they are.

    Args:
        data: What is indexed from zero is read by index; anything else that can be iterated, from
            front to back.
    """
    if isinstance(data, _Indexable) and not isinstance(data, Mapping):
        return DataLoader(_Listed(data), batch_size=None, collate_fn=_as_it_is)
    stream = _SizedStream(data) if isinstance(data, _Sized) else _Stream(data)
    return DataLoader(stream, batch_size=None, collate_fn=_as_it_is)


def _as_it_is(item: Any) -> Any:
    return item


class _Listed(Dataset[Any]):
    """Items that are looked up."""

    def __init__(self, items: _Indexable) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]


class _Stream(IterableDataset[Any]):
    """Items that come one after the other."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


class _SizedStream(_Stream):
    """The same, when their number is known."""

    def __init__(self, items: Any) -> None:
        super().__init__(items)
        self._num_items = items

    def __len__(self) -> int:
        return len(self._num_items)
