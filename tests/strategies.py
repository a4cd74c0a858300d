"""Hypothesis strategies for epochs, ranks and stop points; one file, shared by all tests."""

from __future__ import annotations

from hypothesis import strategies as st

from shardplug.plan.split import Split, Tail
from tests import reference
from tests.laws import Case, Leg

TAILS = tuple(Tail)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    max_samples: int = 60,
    max_world_size: int = 5,
    max_batch_size: int = 8,
    tails: tuple[Tail, ...] = TAILS,
    like: Case | None = None,
) -> Case:
    """Epochs that can be dealt; ``like``: the same epoch and modes on other ranks and batches."""
    split = draw(st.sampled_from(Split)) if like is None else like.split
    world_size = draw(st.integers(1, max_world_size))
    batch_size = draw(st.integers(1, max_batch_size))
    if split is Split.SLICE:
        batch_size *= world_size
    return Case(
        draw(st.integers(0, max_samples)) if like is None else like.num_samples,
        batch_size,
        world_size,
        split,
        draw(st.sampled_from(tails)) if like is None else like.tail,
    )


@st.composite
def possible_cases(draw: st.DrawFn, *, tails: tuple[Tail, ...] = TAILS) -> Case:
    """Cases that ``Tail.EXACT`` does not refuse."""
    return draw(cases(tails=tails).filter(_is_possible))


def _is_possible(case: Case) -> bool:
    try:
        reference.rounds(case)
    except reference.Impossible:
        return False
    return True


@st.composite
def chains(
    draw: st.DrawFn, *, num_legs: int = 3, tails: tuple[Tail, ...] = TAILS
) -> tuple[Leg, ...]:
    """One epoch, stopped and taken up again on other ranks with other batches.

    Under ``Tail.EXACT`` a rest may be too small for its ranks; the law then has to see the error.
    """
    first = draw(cases(tails=tails))
    legs = [Leg(first, draw(st.integers(0, 6)))]
    while len(legs) < num_legs:
        legs.append(Leg(draw(cases(like=first)), draw(st.integers(0, 6))))
    return (*legs[:-1], Leg(legs[-1].case))


@st.composite
def large_cases(draw: st.DrawFn) -> Case:
    """Epochs and worlds far too large to be walked: look at single steps only."""
    sizes = cases(max_samples=2**62, max_world_size=10**6, max_batch_size=512)
    return draw(sizes.filter(_is_possible_large))


def _is_possible_large(case: Case) -> bool:
    rest = case.num_samples % case.global_batch_size
    if case.tail is not Tail.EXACT or rest == 0:
        return True
    enough = case.num_samples >= case.global_batch_size or rest >= case.world_size
    return enough and case.shard_batch_size > 1


def batch_lists(*, max_batches: int = 14, max_size: int = 5) -> st.SearchStrategy[list[list[int]]]:
    """Batches of varying size over consecutive ids, none empty."""
    return st.lists(st.integers(1, max_size), max_size=max_batches).map(batches_of)


def batches_of(sizes: list[int]) -> list[list[int]]:
    """Batches of these sizes over consecutive ids."""
    ids = iter(range(sum(sizes)))
    return [[next(ids) for _ in range(size)] for size in sizes]
