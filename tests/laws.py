"""The laws that everything which hands out data is held against, as functions.

A `Run` is what a pass did: by rank, the rows of each step, how many of them were said to be real,
where the cursor was said to stand, and what ``len`` had promised. Collectors (`plan_rank`,
`parts_rank`, `pass_rank`, `sampler_rank`, `loader_rank`) make one rank's part of a run. Laws are of
two kinds: those on one run (`tile`, `padding`, `length`, `same_count`, `valid_rows`, `prefix`, all
together `one_pass`), and those that take a function that makes runs (`pure`, `shuffled`, `resume`,
`elastic`).

Rows are the ids of samples. ``order`` is the epoch's global order, by position; where it is not
given, an id is its own position. All that a law finds wrong is an AssertionError with the case in
its message, so that laws also speak clearly in a child process.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any, Protocol, runtime_checkable

from shardplug.plan.deal import Part
from shardplug.plan.shard import Shard
from shardplug.plan.split import ShardPlan, Split, Tail

Order = Sequence[int]


@dataclass(frozen=True, slots=True)
class Case:
    """One epoch and how it is divided; ``batch_size`` is the one that a user's loader has."""

    num_samples: int
    batch_size: int
    world_size: int
    split: Split = Split.WHOLE
    tail: Tail = Tail.PAD

    @property
    def can_split(self) -> bool:
        return self.split is Split.WHOLE or self.batch_size % self.world_size == 0

    @property
    def split_batches(self) -> bool:
        return self.split is Split.SLICE

    @property
    def shard_batch_size(self) -> int:
        return self.batch_size // self.world_size if self.split_batches else self.batch_size

    @property
    def global_batch_size(self) -> int:
        return self.shard_batch_size * self.world_size

    def shards(self) -> list[Shard]:
        return [Shard(index, self.world_size) for index in range(self.world_size)]

    def plans(self, consumed: int = 0) -> list[ShardPlan]:
        return [
            ShardPlan(self.num_samples, self.batch_size, shard, self.split, self.tail, consumed)
            for shard in self.shards()
        ]


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank got in one step.

    Attributes:
        rows: Ids of samples, padding included.
        valid_rows: How many were said to be real; None if the mover of data does not say.
        consumed: Where the cursor was said to stand after the step; None if it was not said.
        state: From which the step after this one can be reached again; see `resume`.
    """

    rows: tuple[int, ...]
    valid_rows: int | None = None
    consumed: int | None = None
    state: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class RankRun:
    """What one rank got, and the length that had been promised (None: TypeError)."""

    steps: tuple[Step, ...]
    length: int | None


Run = tuple[RankRun, ...]
"""By rank."""
Make = Callable[[Case], Run]
"""Runs one full pass on all ranks of a case, with everything in it made anew."""
RunFrom = Callable[[Case, Any], Run]
"""Runs what is left after a state (`Step.state`; None: the start), with everything made anew."""


# Collectors: one rank's part of a run.


def plan_rank(plan: ShardPlan) -> RankRun:
    """Read a plan from its first step to its last."""
    steps = []
    for number in range(plan.num_steps):
        consumed = plan.cursor(number + 1)
        rows = tuple(plan.positions(number))
        steps.append(Step(rows, plan.valid_rows(number), consumed, consumed))
    return RankRun(tuple(steps), plan.num_steps)


def parts_rank(parts: Iterable[Part[int]]) -> RankRun:
    """Read what `deal` or `deal_batches` yields."""
    steps = (
        Step(tuple(part.rows), part.valid_rows, part.consumed, part.consumed) for part in parts
    )
    return RankRun(tuple(steps), None)


class Recorded(Protocol):
    """A pass that keeps a record by step."""

    def __iter__(self) -> Iterator[Any]: ...
    def valid_rows(self, step: int) -> int: ...
    def consumed(self, step: int) -> int: ...


def pass_rank(recorded: Recorded, *, length: int | None = None) -> RankRun:
    """Read a pass that is asked for its record step by step, such as a sampler's ``begin()``."""
    steps = []
    for number, rows in enumerate(recorded):
        consumed = recorded.consumed(number + 1)
        steps.append(Step(ids_of(rows), recorded.valid_rows(number), consumed, consumed))
    return RankRun(tuple(steps), length)


def sampler_rank(sampler: Iterable[Any]) -> RankRun:
    """Read a batch sampler: any iterable of batches of ids."""
    promised = length_of(sampler)
    return RankRun(tuple(Step(ids_of(batch)) for batch in sampler), promised)


class Loader(Protocol):
    """What is asked of a loader; its data set returns the index of each sample as the sample."""

    def __iter__(self) -> Iterator[Any]: ...
    @property
    def valid_rows(self) -> int: ...


@runtime_checkable
class _HasState(Protocol):
    def state_dict(self) -> dict[str, Any]: ...


def loader_rank(loader: Loader, *, ids: Callable[[Any], Iterable[int]] | None = None) -> RankRun:
    """Read one pass of a loader, its record and its state while each batch is out.

    ``ids`` gets the ids of samples out of a batch; None: the batch is a tensor or list of them.
    """
    promised = length_of(loader)
    steps = []
    for batch in loader:
        state = loader.state_dict() if isinstance(loader, _HasState) else {}
        consumed = state["consumed"] if state.get("unit") == "samples" else None
        rows = ids_of(batch) if ids is None else tuple(ids(batch))
        steps.append(Step(rows, loader.valid_rows, consumed, state))
    return RankRun(tuple(steps), promised)


@runtime_checkable
class _HasToList(Protocol):
    def tolist(self) -> list[int]: ...


def ids_of(batch: Any) -> tuple[int, ...]:
    """Read a batch that is nothing but ids: a tensor, an array, or a sequence of numbers."""
    return tuple(batch.tolist() if isinstance(batch, _HasToList) else map(int, batch))


def length_of(something: object) -> int | None:
    """Ask for the length; None if there is none to tell."""
    if not isinstance(something, Sized):
        return None
    try:
        return len(something)
    except TypeError:
        return None


# Ready-made runs of the plan itself.


def plan_run(case: Case) -> Run:
    return plan_run_from(case, None)


def plan_run_from(case: Case, consumed: int | None) -> Run:
    return tuple(plan_rank(plan) for plan in case.plans(consumed or 0))


# Laws on one run.


def rounds(run: Run) -> Iterator[list[Step]]:
    """Go through a run as the ranks did, step by step; a rank that is through is left out."""
    for together in zip_longest(*(rank.steps for rank in run)):
        yield [step for step in together if step is not None]


def all_rows(run: Run) -> list[int]:
    """List the rows of all ranks, padding included, round by round."""
    return [row for round_ in rounds(run) for step in round_ for row in step.rows]


def real_rows(run: Run) -> list[int]:
    """List the rows of all ranks that were said to be real, round by round."""
    return [row for round_ in rounds(run) for step in round_ for row in step.rows[: _valid(step)]]


def _valid(step: Step) -> int:
    return len(step.rows) if step.valid_rows is None else step.valid_rows


def _order_of(case: Case, order: Order | None) -> list[int]:
    return list(range(case.num_samples) if order is None else order)


def tile(run: Run, case: Case, *, order: Order | None = None, consumed: int = 0) -> None:
    """The shards together are the epoch: each sample once, in the global order round by round.

    Under ``Tail.DROP`` exactly what does not fill a round is missing. ``consumed``: samples that
    were done before the run.
    """
    due = _due(_order_of(case, order)[consumed:], case)
    real = _real_rows(run, case, len(due))
    assert real == due, f"tile: {case} from {consumed} gave {real}, due were {due}"


def _due(ids: Sequence[int], case: Case) -> Sequence[int]:
    is_cut = case.tail is Tail.DROP
    return ids[: len(ids) - len(ids) % case.global_batch_size] if is_cut else ids


def _real_rows(run: Run, case: Case, due: int) -> list[int]:
    """List the real rows; where padding is not recorded, it is what comes after all others."""
    real = real_rows(run)
    is_recorded = all(step.valid_rows is not None for step in chain(*rounds(run)))
    return real if is_recorded or case.tail is not Tail.PAD else real[:due]


def padding(run: Run, case: Case, *, order: Order | None = None, consumed: int = 0) -> None:
    """Padding is there under ``Tail.PAD`` only: the epoch's start, cycling, until steps are full.

    Not for batches of varying size, nor for ragged batches that are dispatched: theirs is another.
    """
    ids, rows = _order_of(case, order), all_rows(run)
    if case.tail is Tail.PAD:
        expected = [ids[(consumed + at) % len(ids)] for at in range(len(rows))]
        assert rows == expected, f"padding: {case} from {consumed} gave {rows}, not {expected}"
        sizes = {len(step.rows) for step in chain(*rounds(run))} - {case.shard_batch_size}
        assert not sizes, f"padding: {case} from {consumed} has steps of {sizes} rows"
    else:
        assert rows == real_rows(run), f"padding: {case} from {consumed} has padding: {run}"


def length(run: Run, *, is_sized: bool = True) -> None:
    """``len`` is the number of items that a full pass yields on that rank, or no rank has one."""
    for number, rank in enumerate(run):
        promised = len(rank.steps) if is_sized else None
        assert rank.length == promised, (
            f"length: rank {number} promised {rank.length} and yielded {len(rank.steps)}"
        )


def same_count(run: Run, case: Case) -> None:
    """All ranks take the same number of steps; uneven ones one less, if any, and the last ranks."""
    counts = [len(rank.steps) for rank in run]
    assert len(counts) == case.world_size, f"same count: {len(counts)} ranks in {case}"
    if case.tail is Tail.UNEVEN:
        assert counts == sorted(counts, reverse=True), f"same count: {case} took {counts}"
        assert counts[0] - counts[-1] <= 1, f"same count: {case} took {counts}"
    else:
        assert len(set(counts)) == 1, f"same count: {case} took {counts}"


def valid_rows(run: Run, case: Case, *, consumed: int = 0) -> None:
    """Padding is recorded where it is made: the counts add up, and only a last step has any.

    That the first ``valid_rows`` of a batch are the real ones is what `tile` sees.
    """
    recorded, last = 0, len(run[0].steps) - 1
    for number, round_ in enumerate(rounds(run)):
        for step in round_:
            said, rows = step.valid_rows, len(step.rows)
            assert said is not None, f"valid rows: {case}, step {number} says nothing: {step}"
            assert rows > 0, f"valid rows: {case} from {consumed}, step {number} is empty"
            assert (0 if number == last else rows) <= said <= rows, (
                f"valid rows: {case} from {consumed}, step {number} cannot be: {step}"
            )
            recorded += said
    due = len(_due(range(consumed, case.num_samples), case))
    assert recorded == due, f"valid rows: {case} from {consumed} add up to {recorded}, not {due}"


def prefix(run: Run, case: Case, *, consumed: int = 0, is_end_known: bool = True) -> None:
    """What has been consumed is a prefix of the global order: the real rows of all rounds so far.

    With its last step out, each rank counts the epoch as done, dropped rows included; of a stream
    it cannot know that more would not have come.
    """
    done = consumed
    for number, round_ in enumerate(rounds(run)):
        done += sum(map(_valid, round_))
        for rank, rank_run in enumerate(run):
            if number >= len(rank_run.steps):
                continue
            is_last = is_end_known and number == len(rank_run.steps) - 1
            said, due = rank_run.steps[number].consumed, case.num_samples if is_last else done
            assert said == due, (
                f"prefix: {case} from {consumed}, rank {rank} after step {number} says {said} are "
                f"consumed, {due} are"
            )


def one_pass(
    make: Make,
    case: Case,
    *,
    order: Order | None = None,
    is_sized: bool = True,
    is_end_known: bool = True,
) -> Run:
    """Hold a full pass against every law on one run; what is not recorded is not asked about."""
    run = make(case)
    tile(run, case, order=order)
    padding(run, case, order=order)
    length(run, is_sized=is_sized)
    same_count(run, case)
    steps = list(chain(*rounds(run)))
    if any(step.valid_rows is not None for step in steps):
        valid_rows(run, case)
    if any(step.consumed is not None for step in steps):
        prefix(run, case, is_end_known=is_end_known)
    return run


def as_prepared(case: Case) -> Case:
    """Return the case whose laws a prepared *loader* keeps: on one rank it is not padded.

    ``one_pass(lambda _: run_of(case), as_prepared(case))``
    """
    if case.world_size == 1 and case.tail is Tail.PAD:
        return Case(case.num_samples, case.batch_size, 1, case.split, Tail.UNEVEN)
    return case


# Laws on several runs.


def pure(make: Make, case: Case) -> None:
    """The same arguments give the same run."""
    first, second = make(case), make(case)
    assert first == second, f"pure: {case} gave {first}, then {second}"


def hands_off(
    act: Callable[[], object], *inputs: object, look: Callable[[object], object] = pickle.dumps
) -> None:
    """What the caller handed over is the same afterwards, however deep one looks.

    ``look`` takes a picture that compares by value; pickling sees attributes, lists in lists and
    the state of a generator, without asking objects for an ``__eq__``.
    """
    before = [look(value) for value in inputs]
    act()
    for value, picture in zip(inputs, before, strict=True):
        assert look(value) == picture, f"hands off: {value!r} was changed"


def shuffled(make: Callable[[int], Run], case: Case, *, num_epochs: int = 3) -> None:
    """The order is a function of the epoch, equal on all ranks, and another one in each epoch.

    Ranks that disagree on the order leave samples out and repeat others. Needs enough samples for
    two orders to differ: ten or more.
    """
    every = range(case.num_samples)
    due = len(_due(every, case))
    orders = set()
    for epoch in range(num_epochs):
        ids, again = (_real_rows(make(epoch), case, due) for _ in range(2))
        assert ids == again, f"order: {case}, epoch {epoch} gave {ids}, then {again}"
        assert len(ids) == len(set(ids)) == due, f"order: {case}, epoch {epoch} gave {ids}"
        assert set(ids) <= set(every), f"order: {case}, epoch {epoch} gave {ids}"
        orders.add(tuple(ids))
    assert len(orders) == num_epochs, f"order: {case} repeats one in {orders}"


def resume(run_from: RunFrom, case: Case, *, stops: Iterable[int] | None = None) -> None:
    """Stopped after any step, the rest is that of the unbroken run: rows, record and cursor.

    A run may span several epochs. ``stops``: after how many steps to stop; None: after each.
    """
    whole = run_from(case, None)
    for stop in range(len(whole[0].steps) + 1) if stops is None else stops:
        rest = run_from(case, whole[0].steps[stop - 1].state if stop else None)
        for rank, (got, unbroken) in enumerate(zip(rest, whole, strict=True)):
            due = unbroken.steps[stop:]
            assert got.steps == due, (
                f"resume: {case}, rank {rank} after {stop} steps got {got.steps}, due were {due}"
            )


@dataclass(frozen=True, slots=True)
class Leg:
    """A part of one epoch: so many steps with these ranks and batches; None: to the end."""

    case: Case
    num_steps: int | None = None


def elastic(run_from: RunFrom, legs: Sequence[Leg], *, order: Order | None = None) -> None:
    """Stopped and taken up again on other ranks, what was seen is not seen again, the rest once.

    Padding is where and what it would be in one run: only in a step that ends the epoch, and the
    start of the epoch. Under ``Tail.DROP`` less than a round of the leg that ends is missing.
    """
    ids = _order_of(legs[0].case, order)
    seen: list[int] = []
    state, is_over = None, False
    for leg in legs:
        run = run_from(leg.case, state)
        same_count(run, leg.case)
        taken = tuple(RankRun(rank.steps[: leg.num_steps], None) for rank in run)
        if is_over:
            assert not any(rank.steps for rank in run), f"elastic: {legs} goes on after its end"
        elif leg.num_steps is None or 0 < len(run[0].steps) <= leg.num_steps:
            tile(taken, leg.case, order=ids, consumed=len(seen))
            padding(taken, leg.case, order=ids, consumed=len(seen))
            is_over = True
        real = real_rows(taken)
        due = ids[len(seen) : len(seen) + len(real)]
        assert real == due, f"elastic: {legs} gave {real} after {len(seen)} samples, not {due}"
        seen += real
        assert is_over or all_rows(taken) == real, f"elastic: {legs} pads before the end"
        if taken[0].steps:
            state = taken[0].steps[-1].state
    assert is_over, f"elastic: the last of {legs} must go to the end"


def travels(state: Mapping[str, Any]) -> None:
    """A state survives JSON: it can be written anywhere and read anywhere."""
    assert json.loads(json.dumps(state)) == state, f"state: {state} changes on its way"
