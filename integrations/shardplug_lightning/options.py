"""What a sharding strategy can be told, checked where it is said.

Lightning's strategies take any keyword and hand it to torch much later, so a misspelt one would
go unnoticed until the processes have started. Here it is an error at once.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

from shardplug import PlanError, Tail

TRAINING_TAILS = (Tail.PAD, Tail.DROP, Tail.EXACT)


class OptionError(PlanError, TypeError):
    """A strategy was given a keyword that neither it nor what it passes keywords on to knows."""


@dataclass(frozen=True, slots=True)
class ShardOptions:
    """The options of a sharding strategy; see `ShardStrategyMixin` for what they mean.

    Raises:
        PlanError: If a value is of a wrong kind.
    """

    split_batches: bool = False
    even_batches: bool = True
    tail: str | None = None
    evaluation_tail: str = "exact"
    use_seedable_sampler: bool | None = None
    data_seed: int | None = None
    rng_types: Sequence[str] | None = None
    dispatch_batches: bool | None = None
    slice_fn_for_dispatch: Callable[..., Any] | None = None
    use_stateful_dataloader: bool = False
    already_sharded: bool | None = None
    sync_order: str = "agree"
    worker_split: str = "auto"
    batches_per_message: int = 1
    seed_samples: bool = False

    def __post_init__(self) -> None:
        """Check each value."""
        _check_bool("split_batches", self.split_batches)
        _check_bool("even_batches", self.even_batches)
        _check_bool("use_seedable_sampler", self.use_seedable_sampler, or_none=True)
        _check_tail("tail", self.tail, TRAINING_TAILS, or_none=True)
        _check_tail("evaluation_tail", self.evaluation_tail, Tail)
        _check_seed(self.data_seed, self.use_seedable_sampler)
        _check_names("rng_types", self.rng_types)
        _check_bool("dispatch_batches", self.dispatch_batches, or_none=True)
        _check_callable("slice_fn_for_dispatch", self.slice_fn_for_dispatch)
        _check_bool("use_stateful_dataloader", self.use_stateful_dataloader)
        _check_bool("already_sharded", self.already_sharded, or_none=True)
        _check_choice("sync_order", self.sync_order, ("agree", "broadcast"))
        _check_choice("worker_split", self.worker_split, ("auto", "shardplug", "dataset"))
        _check_count("batches_per_message", self.batches_per_message)
        _check_bool("seed_samples", self.seed_samples)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """List the options."""
        return tuple(field.name for field in fields(cls))


def keywords_of(*classes: type) -> frozenset[str]:
    """List the keywords that classes name in their constructors."""
    parameters = chain.from_iterable(
        inspect.signature(each).parameters.values() for each in classes
    )
    return frozenset(each.name for each in parameters if each.kind is not each.VAR_KEYWORD)


def check_keywords(
    owner: str, given: Iterable[str], *, own: Collection[str], passed_on: Collection[str]
) -> None:
    """Refuse keywords that nobody knows, and say which one may have been meant.

    Args:
        owner: The class that was given them.
        given: Keywords that are not its own.
        own: Its own ones, for suggestions.
        passed_on: Those that are known to what the rest is passed on to.

    Raises:
        OptionError: If there is one that is not known.
    """
    unknown = [name for name in given if name not in passed_on]
    if not unknown:
        return
    similar = difflib.get_close_matches(unknown[0], [*own, *passed_on], n=1, cutoff=0.5)
    meant = f"Did you mean `{similar[0]}`? " if similar else ""
    raise OptionError(
        f"`{unknown[0]}` must be an option of {owner} or of what it is built on, got a name that "
        f"none of them has. {meant}Its own options are {', '.join(own)}."
    )


def _check_bool(name: str, value: Any, *, or_none: bool = False) -> None:
    if not isinstance(value, bool) and not (or_none and value is None):
        raise PlanError(
            f"`{name}` must be True{', False or None' if or_none else ' or False'}, got {value!r}."
        )


def _check_tail(name: str, value: Any, known: Iterable[Tail], *, or_none: bool = False) -> None:
    known = tuple(known)
    if value in [mode.value for mode in known] or (or_none and value is None):
        return
    text = ", ".join(repr(mode.value) for mode in known)
    if value == Tail.UNEVEN.value:
        raise PlanError(
            f"`{name}` must be one of {text}, got {value!r}: ranks that train for different "
            "numbers of steps wait for each other for ever."
        )
    raise PlanError(
        f"`{name}` must be one of {text}{' or None' if or_none else ''}, got {value!r}."
    )


def _check_seed(seed: Any, use_seedable_sampler: bool | None) -> None:
    if seed is None:
        return
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise PlanError(f"`data_seed` must be an integer or None, got {seed!r}.")
    if use_seedable_sampler is False:
        raise PlanError(
            f"`data_seed` must be left out with use_seedable_sampler=False, got {seed}. Pass "
            "use_seedable_sampler=True, or leave that out too."
        )


def _check_names(name: str, value: Any) -> None:
    if isinstance(value, str):
        raise PlanError(
            f"`{name}` must be a sequence of names, got {value!r}. Pass {name}=({value!r},)."
        )
    if value is not None and not isinstance(value, Sequence):
        raise PlanError(f"`{name}` must be a sequence of names or None, got {value!r}.")


def _check_callable(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise PlanError(f"`{name}` must be a function or None, got {value!r}.")


def _check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        text = ", ".join(map(repr, known))
        raise PlanError(f"`{name}` must be one of {text}, got {value!r}.")


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"`{name}` must be an integer of at least 1, got {value!r}.")
