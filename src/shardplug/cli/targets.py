"""From MODULE:FACTORY to the loader of each rank."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, ValuesView
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from shardplug.cli.refusal import Refusal, one_line, sentence
from shardplug.cli.tracing import has_own_iter
from shardplug.prepared import PreparedLoader

Factory = Callable[[int, int], DataLoader[Any]]
"""Makes the loader of a rank, of as many."""

_STAGES = {"train": "fit", "val": "validate", "test": "test", "predict": "predict"}


def find_factory(target: str, loader_name: str) -> Factory:
    """Import what a target names.

    Args:
        target: MODULE:FACTORY, or path/to/file.py:FACTORY.
        loader_name: Which loader of a LightningDataModule is meant.

    Returns:
        What makes the loader of a rank. It raises a Refusal if the user's function fails.

    Raises:
        Refusal: If there is no such thing.
    """
    place, colon, name = target.rpartition(":")
    if not (colon and place and name) or (place.startswith(".") and not place.endswith(".py")):
        raise Refusal(f"TARGET must be MODULE:FACTORY or path/to/file.py:FACTORY, got {target!r}.")
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    made: Any = module
    for part in name.split("."):
        made = getattr(made, part, None)
    if made is None:
        raise Refusal(f"TARGET must name what is in {place!r}, got {name!r}. {_callables(module)}")
    if not callable(made):
        raise Refusal(
            f"TARGET must name a function that returns a DataLoader, got {name!r}, which is of "
            f"type {type(made).__name__}. Write one that returns it."
        )
    return lambda rank, world_size: _make(made, name, loader_name, rank, world_size)


def _import_module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name + ".").startswith(error.name + "."):
            raise Refusal(
                f"TARGET must name a module that can be imported, but there is no {error.name!r} "
                f"here or installed. Start in the folder that it is in, or pass a path that ends "
                "in .py."
            ) from error
        raise Refusal(f"Importing {name!r} failed: {one_line(error)}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's module may raise anything
        raise Refusal(f"Importing {name!r} failed: {one_line(error)}") from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise Refusal(f"TARGET must name a file that is there, got {str(path)!r}.")
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) != str(path.resolve()):
        raise Refusal(
            f"TARGET must name a file that is not called like another module, got {str(path)!r}. "
            "Rename it."
        )
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python path` does; workers find the module by its name
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's module may raise anything
        del sys.modules[path.stem]
        raise Refusal(f"Importing {str(path)!r} failed: {one_line(error)}") from error
    return module


def _callables(module: ModuleType) -> str:
    found = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and not name.startswith("_")
        and value.__module__ == module.__name__
    ]
    more = ", ..." if len(found) > 8 else ""
    return f"It has {', '.join(found[:8])}{more}." if found else "It has no functions."


def _make(made: Any, name: str, loader_name: str, rank: int, world_size: int) -> DataLoader[Any]:
    try:
        place = {"rank": rank, "world_size": world_size}
        wanted = _parameters(made)
        result = made(**{key: value for key, value in place.items() if key in wanted})
        if callable(getattr(result, "train_dataloader", None)):
            result = _from_module(result, loader_name)
            name = f"{name}().{loader_name}_dataloader"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's code may raise anything
        raise Refusal(
            f"{name}() failed on rank {rank}: {sentence(one_line(error))} Let it run alone first."
        ) from error
    return _checked(result, name)


def _parameters(made: Any) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(made).parameters)
    except (TypeError, ValueError):  # built in, without a signature
        return frozenset()


def _from_module(module: Any, loader_name: str) -> Any:
    """Ask a LightningDataModule for a loader, as a trainer would."""
    module.prepare_data()
    module.setup(_STAGES[loader_name])
    return getattr(module, f"{loader_name}_dataloader")()


def _checked(result: Any, name: str) -> DataLoader[Any]:
    if isinstance(result, PreparedLoader):
        raise Refusal(
            f"{name}() must return the loader before it is prepared, got a "
            f"{type(result).__name__}. Return the DataLoader that you prepare."
        )
    if not isinstance(result, DataLoader):
        raise Refusal(
            f"{name}() must return one torch.utils.data.DataLoader or a LightningDataModule, got "
            f"{type(result).__name__}. {_way_to_one(result)}"
        )
    if isinstance(result, StatefulDataLoader) and has_own_iter(result):
        raise Refusal(
            f"{name}() must return a stateful loader with the __iter__ of StatefulDataLoader, got "
            f"{type(result).__name__}. Return a plain one over the same data."
        )
    return result


def _way_to_one(result: Any) -> str:
    """Say how to come to a loader from what is none."""
    if inspect.iscoroutine(result):
        result.close()  # python warns of one that nobody has awaited
        return "Write a function without async that returns the loader to be checked."
    several = result.values() if isinstance(result, dict) else result
    if isinstance(several, (list, tuple, ValuesView)) and any(
        isinstance(each, DataLoader) for each in several
    ):
        return "Write a function that returns one of them, and check each by itself."
    return "Write a function that returns the loader to be checked."
