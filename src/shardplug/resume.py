"""The state of an engine: the positions of its loaders, and what belongs to each rank alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardplug import rng
from shardplug.comm import Comm
from shardplug.errors import StateError
from shardplug.passes import Snapshot
from shardplug.plan.cursor import OpenWindow
from shardplug.states import (
    VERSION,
    check_mapping,
    check_version,
    decode,
    decode_snapshot,
    encode,
    number_in,
)

_log = logging.getLogger("shardplug.resume")


@dataclass(frozen=True, slots=True)
class AccumulationState:
    """The accumulation window that is open.

    Attributes:
        steps: Micro-batches in a full window.
        loader: Which of the engine's loaders it is of; None if none is open.
        window: The micro-batches that came before, and what had been consumed before them.
    """

    steps: int
    loader: int | None = None
    window: OpenWindow = field(default_factory=OpenWindow)

    def as_dict(self) -> dict[str, Any]:
        """Write it as numbers."""
        return {
            "steps": self.steps,
            "loader": self.loader,
            "micro_batches": self.window.micro_batches,
            "consumed": self.window.consumed,
        }


def engine_state(loaders: Sequence[dict[str, Any]], open_: AccumulationState) -> dict[str, Any]:
    """Make the state of an engine."""
    return {"version": VERSION, "loaders": list(loaders), "accumulation": open_.as_dict()}


def read_engine_state(
    state: Any, *, num_loaders: int, steps: int
) -> tuple[Sequence[Any], AccumulationState]:
    """Check the state of an engine but for those of its loaders.

    Args:
        state: What `engine_state` made, however it has been stored since.
        num_loaders: How many loaders the engine has prepared.
        steps: Micro-batches in a full window of the engine.

    Returns:
        The states of the loaders, and the open window.

    Raises:
        StateError: If it does not fit.
    """
    check_mapping(state, what="what the engine's state_dict() returned")
    check_version(state)
    loaders = state.get("loaders")
    if not isinstance(loaders, Sequence) or isinstance(loaders, str):
        raise StateError(f"`loaders` of the state must be a list of states, got {loaders!r:.60}.")
    if len(loaders) != num_loaders:
        raise StateError(
            f"`loaders` of the state must be as many as the engine has prepared, {num_loaders}, "
            f"got {len(loaders)}. Prepare the same loaders in the same order, then load."
        )
    given = state.get("accumulation")
    check_mapping(given, what="the state of the accumulation window")
    micro_batches = number_in(given, "micro_batches")
    if not micro_batches:
        return loaders, AccumulationState(steps)
    if number_in(given, "steps") != steps:
        raise StateError(
            f"`gradient_accumulation_steps` must be {given['steps']} to go on inside a window, got "
            f'{steps}. Save with at="optimizer_step", or keep it for this run.'
        )
    loader = number_in(given, "loader")
    if loader >= num_loaders:
        raise StateError(f"`loader` of the state must be in [0, {num_loaders}), got {loader}.")
    window = OpenWindow(micro_batches, number_in(given, "consumed"))
    return loaders, AccumulationState(steps, loader, window)


# What belongs to each rank.


@dataclass(frozen=True, slots=True)
class RankState:
    """What one rank has of its own.

    Attributes:
        rng: The states of the global generators of its process; None if they do not fit here.
        sources: For each loader, the states of its source in this rank's workers.
    """

    rng: dict[str, Any] | None
    sources: list[tuple[Snapshot, ...]]


def gather_rank_states(sources: Sequence[Sequence[str]], comm: Comm) -> dict[str, Any]:
    """Gather what every rank has of its own: its generators, and states of sources.

    Collective: every rank must call it.

    Args:
        sources: For each loader, the states of its source, as text.
        comm: The ranks.

    Returns:
        Numbers and strings, the same on every rank.
    """
    own = encode(
        {"rng": _portable(rng.capture_process()), "sources": [list(each) for each in sources]},
        what="the generators of this process",
    )
    ranks = comm.all_gather_object(own)
    return {"version": VERSION, "world_size": comm.world_size, "ranks": ranks}


def read_rank_state(state: Any, comm: Comm, *, num_loaders: int) -> RankState:
    """Read this rank's own part; what does not fit another number of ranks is left out.

    Args:
        state: What `gather_rank_states` returned.
        comm: The ranks.
        num_loaders: How many loaders the engine has prepared.

    Raises:
        StateError: If it is damaged, or of other loaders.
    """
    check_mapping(state, what="what gather_rank_states() returned")
    check_version(state)
    saved_by = number_in(state, "world_size", least=1)
    ranks = state.get("ranks")
    if not isinstance(ranks, Sequence) or len(ranks) != saved_by:
        raise StateError(f"`ranks` of the state must be a list of {saved_by}, got {ranks!r:.60}.")
    if saved_by != comm.world_size:
        _log.warning(
            "The random number generators of %d ranks are left out: there are %d now. The data "
            "goes on where it was.",
            saved_by,
            comm.world_size,
        )
        return RankState(None, [()] * num_loaders)
    own = decode(ranks[comm.rank], field="ranks")
    sources = own.get("sources") if isinstance(own, Mapping) else None
    if not isinstance(sources, list) or len(sources) != num_loaders:
        raise StateError(
            f"`sources` of the state must be those of {num_loaders} loaders, got {sources!r:.60}."
        )
    found = [tuple(map(decode_snapshot, each)) for each in sources]
    try:
        return RankState(_restorable(own["rng"]), found)
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(
            "`rng` of the state must be what gather_rank_states() put there, got "
            f"{own.get('rng')!r:.60}. Leave rank_states out to go on without."
        ) from error


def _portable(states: dict[str, Any]) -> dict[str, Any]:
    """Write the states of generators with lists for tuples and arrays."""
    portable = dict(states)
    version, numbers, gauss = states["python"]
    portable["python"] = [version, list(numbers), gauss]
    if "numpy" in states:
        name, keys, *rest = states["numpy"]
        portable["numpy"] = [name, keys.tolist(), *rest]
    return portable


def _restorable(states: dict[str, Any]) -> dict[str, Any]:
    restorable = dict(states)
    version, numbers, gauss = states["python"]
    restorable["python"] = (version, tuple(numbers), gauss)
    if "numpy" in states:
        restorable["numpy"] = tuple(states["numpy"])
    return restorable
