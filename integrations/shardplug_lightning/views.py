"""What Lightning sees of a prepared loader."""

from __future__ import annotations

from typing import Any

from shardplug import DataLoaderShard


class LoaderView(DataLoaderShard):
    """A prepared loader without its state: Lightning would save rank 0's for all ranks.

    Everything else is the loader's own; it is the same loader, seen through another class.

    Args:
        loader: The loader; it remains usable, with its state.
        source: What the user gave, for a stage that divides it in another way.
    """

    _source: Any
    # Lightning asks for the two methods; None is how a class says that it has none.
    state_dict: Any = None
    load_state_dict: Any = None

    def __init__(self, loader: DataLoaderShard, source: Any) -> None:
        # Assigned past the loader's own way, which hands attributes on to torch's loader inside.
        object.__setattr__(self, "__dict__", vars(loader))
        object.__setattr__(self, "_source", source)

    @property
    def source(self) -> Any:
        """What the user gave."""
        return self._source
