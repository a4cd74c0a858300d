"""Of what kind a value has to be that the user gives: one place, whoever it is given to."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from typing import Any

from shardplug.errors import PlanError


def check_flag(name: str, value: Any, *, or_none: bool = False) -> Any:
    """Check what turns something on or off; numpy's are taken too.

    Args:
        name: Of the option, as for the following functions.
        value: As the user gave it.
        or_none: Whether it may be left open.

    Raises:
        PlanError: If it is of another kind.
    """
    if value is None and or_none:
        return None
    dtype = getattr(value, "dtype", None)
    is_numpys = getattr(dtype, "kind", None) == "b" and getattr(value, "shape", None) == ()
    if not isinstance(value, bool) and not is_numpys:
        others = ", False or None" if or_none else " or False"
        raise PlanError(f"`{name}` must be True{others}, got {value!r:.80}.")
    return bool(value)


def check_count(name: str, count: Any, *, least: int) -> int:
    """Check a number of things.

    Raises:
        PlanError: If it is no integer, or too small.
    """
    number: int = check_integer(name, count)
    if number < least:
        raise PlanError(f"`{name}` must be at least {least}, got {number}.")
    return number


def check_integer(name: str, value: Any, *, or_none: bool = False) -> Any:
    """Check a whole number; whatever can be an index is one, but for truth values.

    Raises:
        PlanError: If it is of another kind.
    """
    if value is None and or_none:
        return None
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass  # said below
    raise PlanError(
        f"`{name}` must be an integer{' or None' if or_none else ''}, got {value!r:.80}."
    )


def check_function(name: str, value: Any) -> Any:
    """Check a function that may be left out.

    Raises:
        PlanError: If it cannot be called.
    """
    if value is not None and not callable(value):
        raise PlanError(f"`{name}` must be a function or None, got {value!r:.80}.")
    return value


def check_names(name: str, value: Any) -> Any:
    """Check names that may be left out; a single one is not several.

    Raises:
        PlanError: If it is of another kind.
    """
    if isinstance(value, str):
        raise PlanError(
            f"`{name}` must be a sequence of names, got {value!r:.80}. Pass {name}=({value!r},)."
        )
    is_right = isinstance(value, Collection) and all(isinstance(each, str) for each in value)
    if value is not None and not is_right:
        raise PlanError(f"`{name}` must be a sequence of names or None, got {value!r:.80}.")
    return value


def check_iterable(name: str, value: Any) -> Any:
    """Check what is iterated later; nothing is taken from it.

    Raises:
        PlanError: If it cannot be.
    """
    if not isinstance(value, Iterable) and not hasattr(value, "__getitem__"):
        raise PlanError(f"`{name}` must be something to iterate, got {value!r:.80}.")
    return value


def check_has(name: str, value: Any, parts: Collection[str], *, what: str) -> Any:
    """Check an object that may be left out by what it can do.

    Args:
        name: Of the option.
        value: As the user gave it.
        parts: Attributes that are used.
        what: The class that it is to be like.

    Raises:
        PlanError: If it lacks one of them.
    """
    if value is not None and not all(hasattr(value, part) for part in parts):
        raise PlanError(f"`{name}` must be a {what} or None, got {value!r:.80}.")
    return value
