"""Where a run stands, and what of it is saved.

A state is numbers, strings and None, in dictionaries and lists; the same on all ranks, but for the
very end of an epoch under tail "uneven".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from shardplug import StateError

VERSION = 1


@dataclass(frozen=True, slots=True)
class SavedRun:
    """What is saved of a run.

    Attributes:
        loader: The state of the loader; None if the run had no data.
        iteration: Iterations that the engine had counted.
        epochs: Epochs of the engine that were over.
        epoch_iterations: Iterations of the one under way that were over.
        epoch_length: Of the engine; None if it was not known.
        is_length_given: Whether that was the user's, not the loader's.
        num_shards: Into how many parts the data was divided.
        max_epochs: How far the run was to go; None if ``max_iters`` said that.
        max_iters: The same in iterations.
        optimizer_steps: Steps that really happened.
        is_tick_due: Whether schedules were to move on before the next iteration.
        global_step: Iterations that were completed, in all runs that it goes back to.
        rank_states: What each rank had of its own there; None if it was not gathered.
    """

    loader: dict[str, Any] | None
    iteration: int
    epochs: int
    epoch_iterations: int
    epoch_length: int | None
    is_length_given: bool
    num_shards: int
    max_epochs: int | None
    max_iters: int | None
    optimizer_steps: int
    is_tick_due: bool
    global_step: int
    rank_states: dict[str, Any] | None

    def as_dict(self) -> dict[str, Any]:
        """Write it as a dictionary."""
        return {"version": VERSION} | {each.name: getattr(self, each.name) for each in _FIELDS}

    @property
    def is_start(self) -> bool:
        """Whether there is nothing to go on from."""
        return self.loader is None and not (self.iteration or self.global_step)


_FIELDS = fields(SavedRun)
_COUNTS = ("iteration", "epochs", "epoch_iterations", "optimizer_steps", "global_step")
_OPTIONAL_COUNTS = ("epoch_length", "max_epochs", "max_iters")
_FLAGS = ("is_length_given", "is_tick_due")
_MAPPINGS = ("loader", "rank_states")


def read_state(state: Any) -> SavedRun:
    """Check a state, but for that of the loader.

    Args:
        state: What `SavedRun.as_dict` made, however it has been stored since.

    Raises:
        StateError: If it is damaged, or of another version.
    """
    if not isinstance(state, Mapping):
        raise StateError(
            "`state` must be what state_dict() of the handler returned, a dictionary, got "
            f"{type(state).__name__}. Pass its own entry of the checkpoint."
        )
    if state.get("version") != VERSION:
        raise StateError(
            f"`version` of the state must be {VERSION}, got {state.get('version')!r}. "
            "Load it with the version of shardplug that saved it."
        )
    values: dict[str, Any] = {each.name: state.get(each.name) for each in _FIELDS}
    for name in _COUNTS + _OPTIONAL_COUNTS:
        _check_count(name, values[name], is_optional=name in _OPTIONAL_COUNTS)
    _check_count("num_shards", values["num_shards"], least=1)
    for name in _FLAGS:
        _check_type(name, values[name], bool, "true or false")
    for name in _MAPPINGS:
        if values[name] is not None:
            _check_type(name, values[name], Mapping, "a dictionary or None")
    return SavedRun(**values)


def _check_count(name: str, value: Any, *, least: int = 0, is_optional: bool = False) -> None:
    if value is None and is_optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise StateError(
            f"`{name}` of the state must be an integer of at least {least}, got {value!r}. "
            "The state is damaged: take another one."
        )


def _check_type(name: str, value: Any, kind: type, rule: str) -> None:
    if not isinstance(value, kind):
        raise StateError(
            f"`{name}` of the state must be {rule}, got {value!r:.60}. "
            "The state is damaged: take another one."
        )
