"""How many steps a run takes, and which runs would leave ranks waiting for each other for ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ignite.engine import State

from shardplug import Comm, DataLoaderDispatcher, DataLoaderShard, PlanError, Tail

_UNKNOWN = -1
"""Stands for a number of steps that only a pass will tell, in messages between ranks."""

Loader = DataLoaderShard | DataLoaderDispatcher
"""A prepared loader."""


class Steps(NamedTuple):
    """How many steps a pass has.

    Attributes:
        own: On this rank; None if there is no telling.
        common: That all ranks have, where some may have more; None where all have the same.
    """

    own: int | None
    common: int | None


def length_of(data: Any) -> int | None:
    """Count the steps of a pass; None if there is no telling, as Ignite has it.

    Args:
        data: Whatever an engine is given.
    """
    try:
        return len(data)
    except TypeError:
        return None


def check_steps(
    state: State, loader: Loader, ranks: Comm, *, is_eval: bool, is_length_given: bool
) -> Steps:
    """Refuse a run in which ranks would wait for each other for ever, or take no step.

    Collective: every rank must call it.

    Args:
        state: Of the engine.
        loader: What it is about to iterate.
        ranks: Those that share the data.
        is_eval: Whether ranks may take different numbers of steps.
        is_length_given: Whether the epoch length is the user's.

    Returns:
        The steps of a pass.

    Raises:
        PlanError: If it has to be refused.
    """
    steps = length_of(loader)
    told = ranks.all_gather_ints([_UNKNOWN if steps is None else steps])
    by_rank, tail = [each for (each,) in told], loader.tail
    if not any(by_rank):
        raise PlanError(
            f"`loader` must make at least one step, got none with tail={tail.value!r}. Use a "
            'smaller batch size, fewer ranks, or tail="pad".'
        )
    is_open = steps is None and tail is Tail.UNEVEN and ranks.world_size > 1
    if len(set(by_rank)) == 1 and not is_open:
        return Steps(steps, None)
    if not is_eval:
        raise PlanError(
            "`tail` must let all ranks take the same number of steps to train, got "
            f'{tail.value!r}, by which they take {_told(by_rank)}. Use tail="pad", '
            '"drop" or "exact", or mode="eval" for an evaluator.'
        )
    fewest = max(0, min(by_rank))
    _check_uneven_run(state, by_rank, fewest, is_length_given=is_length_given)
    return Steps(steps, fewest)


def _check_uneven_run(
    state: State, by_rank: Sequence[int], fewest: int, *, is_length_given: bool
) -> None:
    """Refuse an evaluation that would not end with each rank's pass, or before.

    Raises:
        PlanError: If some rank would have to begin a pass that others never begin.
    """
    if state.max_iters is not None:
        raise PlanError(
            f"`max_iters` must be left out where ranks take {_told(by_rank)}, got "
            f'{state.max_iters}. Use max_epochs, or tail="pad".'
        )
    length = state.epoch_length if is_length_given else None
    if length is not None and (length > fewest or state.max_epochs != 1):
        raise PlanError(
            f"`epoch_length` must be at most {fewest}, in a single epoch, where ranks take "
            f'{_told(by_rank)}, got {length}. Leave it out, or use tail="pad".'
        )


def _told(by_rank: Sequence[int]) -> str:
    if _UNKNOWN in by_rank:
        return "unknown numbers of steps"
    return f"between {min(by_rank)} and {max(by_rank)} steps"
