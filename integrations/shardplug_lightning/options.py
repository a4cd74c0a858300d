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

from shardplug import PlanError, Tail, check_options

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
        _check_tail("tail", self.tail, TRAINING_TAILS, or_none=True)
        _check_tail("evaluation_tail", self.evaluation_tail, Tail)
        _check_seed(self.data_seed, self.use_seedable_sampler)
        check_options(**self.for_core())

    def for_core(self) -> dict[str, Any]:
        """List the values of those that mean in the core what they mean here."""
        own = {"tail", "evaluation_tail", "use_seedable_sampler"}
        return {name: getattr(self, name) for name in self.names() if name not in own}

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


def _check_seed(seed: Any, use_seedable_sampler: Any) -> None:
    if use_seedable_sampler is not None and not isinstance(use_seedable_sampler, bool):
        raise PlanError(
            f"`use_seedable_sampler` must be True, False or None, got {use_seedable_sampler!r}."
        )
    if seed is not None and use_seedable_sampler is False:
        raise PlanError(
            f"`data_seed` must be left out with use_seedable_sampler=False, got {seed}. Pass "
            "use_seedable_sampler=True, or leave that out too."
        )
