"""Iterables that are no DataLoader: their items are batches that are ready."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader, Dataset, IterableDataset

from shardplug.errors import PlanError
from shardplug.kinds import check_iterable

_OF_LOADERS = ("set_epoch", "state_dict", "load_state_dict")
"""What a loader has, and a list has not: such a one is iterated, even if it can be indexed."""


@runtime_checkable
class _Indexable(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class _Sized(Protocol):
    def __len__(self) -> int: ...


def ready_batches(data: Any) -> DataLoader[Any]:
    """Make a loader that yields the items of some data one by one, as they are.

    An item counts as a batch that is ready: `prepare_data_loader` deals whole items, and never
    cuts one.

    Args:
        data: What is indexed from zero is read by index. Anything else that can be iterated is read
            from front to back, anew in each pass; its length is known if it has one, it is told the
            epoch if it has ``set_epoch``, and goes on from a state if it has ``state_dict`` and
            ``load_state_dict``.

    Returns:
        The loader. What has nothing left to iterate in a later pass is a PlanError there.

    Example:
        >>> list(ready_batches([[0, 1], [2]]))
        [[0, 1], [2]]
    """
    check_iterable("data", data)
    is_loader = any(hasattr(data, name) for name in _OF_LOADERS)
    if isinstance(data, _Indexable) and not isinstance(data, Mapping) and not is_loader:
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

    def __init__(self, items: Any) -> None:
        self._items = items
        self._has_given = False
        for name in _OF_LOADERS:
            if hasattr(items, name):
                setattr(self, name, getattr(items, name))

    def __copy__(self) -> _Stream:
        # A state that is loaded into one must leave the other as it is.
        return type(self)(copy.copy(self._items))

    def __iter__(self) -> Iterator[Any]:
        has_items = False
        for item in self._items:
            has_items = self._has_given = True
            yield item
        if self._has_given and not has_items:
            raise PlanError(
                "`dataloader` must yield its batches anew in each pass, got "
                f"{type(self._items).__name__} that has nothing left after the first. Give an "
                "object whose __iter__ starts from the front, or a DataLoader."
            )


class _SizedStream(_Stream):
    """The same, when their number is known."""

    def __len__(self) -> int:
        return len(self._items)
