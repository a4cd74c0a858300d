"""Each law goes red on the fault that it is there for; a law that cannot fail is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from shardplug.plan.split import Split, Tail
from tests import laws
from tests.laws import Case, Leg, RankRun, Run, Step

PADDED = Case(5, 2, 2)
"""Rank 0: 0,1 then 4,(0); rank 1: 2,3 then (1,2)."""


def with_step(run: Run, rank: int, number: int, **changes: Any) -> Run:
    """The same run but for one step of one rank."""
    steps = list(run[rank].steps)
    steps[number] = replace(steps[number], **changes)
    return with_steps(run, rank, tuple(steps))


def with_steps(run: Run, rank: int, steps: tuple[Step, ...]) -> Run:
    ranks = list(run)
    ranks[rank] = RankRun(steps, len(steps))
    return tuple(ranks)


def broken(case: Case, **changes: Any) -> Run:
    return with_step(laws.plan_run(case), changes.pop("rank"), changes.pop("step"), **changes)


LAWS_ON_A_RUN: dict[str, Callable[[Run, Case], None]] = {
    "tile": laws.tile,
    "padding": laws.padding,
    "length": lambda run, _: laws.length(run),
    "same count": laws.same_count,
    "valid rows": laws.valid_rows,
    "prefix": laws.prefix,
}


@pytest.mark.parametrize("tail", Tail)
@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize("law", LAWS_ON_A_RUN)
def test_the_plan_keeps_every_law(law: str, split: Split, tail: Tail) -> None:
    case = Case(22, 4, 2, split, tail)
    LAWS_ON_A_RUN[law](laws.plan_run(case), case)


@pytest.mark.parametrize(
    ("law", "case", "run"),
    [
        ("tile", PADDED, broken(PADDED, rank=1, step=0, rows=(2, 4))),
        ("tile", PADDED, broken(PADDED, rank=0, step=1, valid_rows=2)),
        ("tile", PADDED, laws.plan_run(PADDED)[::-1]),
        ("tile", Case(5, 2, 2, tail=Tail.DROP), laws.plan_run(Case(5, 2, 2, tail=Tail.UNEVEN))),
        ("tile", Case(5, 2, 2, tail=Tail.UNEVEN), laws.plan_run(Case(5, 2, 2, tail=Tail.DROP))),
        ("padding", PADDED, broken(PADDED, rank=1, step=1, rows=(0, 1))),
        ("padding", PADDED, broken(PADDED, rank=1, step=1, rows=(1,))),
        ("padding", replace(PADDED, tail=Tail.UNEVEN), laws.plan_run(PADDED)),
        ("length", PADDED, (replace(laws.plan_run(PADDED)[0], length=3),)),
        ("length", PADDED, (replace(laws.plan_run(PADDED)[0], length=None),)),
        ("same count", PADDED, laws.plan_run(replace(PADDED, tail=Tail.UNEVEN))),
        ("same count", replace(PADDED, world_size=3), laws.plan_run(PADDED)),
        (
            "same count",
            replace(PADDED, tail=Tail.UNEVEN),
            laws.plan_run(replace(PADDED, tail=Tail.UNEVEN))[::-1],
        ),
        (
            "same count",
            replace(PADDED, tail=Tail.UNEVEN),
            with_steps(laws.plan_run(PADDED), 1, ()),
        ),
        ("valid rows", PADDED, broken(PADDED, rank=1, step=1, valid_rows=1)),
        ("valid rows", PADDED, broken(PADDED, rank=1, step=0, valid_rows=1)),
        ("valid rows", PADDED, broken(PADDED, rank=1, step=0, valid_rows=3)),
        ("valid rows", PADDED, broken(PADDED, rank=1, step=1, valid_rows=-1)),
        ("valid rows", PADDED, broken(PADDED, rank=1, step=1, valid_rows=None)),
        ("valid rows", PADDED, broken(PADDED, rank=1, step=1, rows=(), valid_rows=0)),
        ("prefix", PADDED, broken(PADDED, rank=1, step=0, consumed=2)),
        ("prefix", PADDED, broken(PADDED, rank=0, step=1, consumed=6)),
        (
            "prefix",
            replace(PADDED, tail=Tail.DROP),
            broken(replace(PADDED, tail=Tail.DROP), rank=0, step=0, consumed=4),
        ),
    ],
)
def test_a_run_with_a_fault_breaks_its_law(law: str, case: Case, run: Run) -> None:
    with pytest.raises(AssertionError, match=f"^{law}: "):
        LAWS_ON_A_RUN[law](run, case)


def test_ranks_without_a_length_must_all_be_without() -> None:
    run = laws.plan_run(PADDED)
    unsized = tuple(replace(rank, length=None) for rank in run)
    laws.length(unsized, is_sized=False)
    with pytest.raises(AssertionError, match=r"^length: rank 1 promised 2"):
        laws.length((unsized[0], run[1]), is_sized=False)


def test_one_pass_holds_a_run_against_all_of_them() -> None:
    assert laws.one_pass(laws.plan_run, PADDED) == laws.plan_run(PADDED)
    for changes in ({"rows": (1, 1)}, {"valid_rows": 1}, {"consumed": 4}):
        with pytest.raises(AssertionError):
            laws.one_pass(lambda case, c=changes: broken(case, rank=1, step=1, **c), PADDED)  # type: ignore[misc]


def test_what_is_not_recorded_is_not_asked_about() -> None:
    def bare(case: Case) -> Run:
        return tuple(
            laws.sampler_rank([list(step.rows) for step in rank.steps])
            for rank in laws.plan_run(case)
        )

    for tail in Tail:
        laws.one_pass(bare, replace(PADDED, tail=tail))
    with pytest.raises(AssertionError, match=r"^tile: "):
        laws.one_pass(lambda _: bare(replace(PADDED, num_samples=4)), PADDED)


def test_ids_stand_where_the_order_says() -> None:
    order = [7, 3, 9, 1, 5]
    run = tuple(
        RankRun(
            tuple(replace(step, rows=tuple(order[at] for at in step.rows)) for step in rank.steps),
            rank.length,
        )
        for rank in laws.plan_run(PADDED)
    )
    laws.one_pass(lambda _: run, PADDED, order=order)
    with pytest.raises(AssertionError, match=r"^tile: "):
        laws.one_pass(lambda _: run, PADDED, order=sorted(order))


def test_on_one_rank_a_prepared_loader_is_not_padded() -> None:
    assert laws.as_prepared(Case(5, 2, 1)) == Case(5, 2, 1, tail=Tail.UNEVEN)
    for case in (PADDED, Case(5, 2, 1, tail=Tail.DROP), Case(5, 2, 1, tail=Tail.EXACT)):
        assert laws.as_prepared(case) == case


def test_impure_runs_are_seen() -> None:
    laws.pure(laws.plan_run, PADDED)
    runs = iter([laws.plan_run(PADDED), laws.plan_run(PADDED)[::-1]])
    with pytest.raises(AssertionError, match=r"^pure: "):
        laws.pure(lambda _: next(runs), PADDED)


def test_hands_that_do_not_stay_off_are_seen() -> None:
    nested = {"batches": [[0, 1], [2]]}
    laws.hands_off(lambda: list(map(list, nested["batches"])), nested)
    with pytest.raises(AssertionError, match=r"^hands off: "):
        laws.hands_off(lambda: nested["batches"][1].append(0), [], nested)


def by_epoch(orders: list[list[int]]) -> Callable[[int], Run]:
    """Two ranks of two rows a step, each with an order of its own for the epoch."""

    def make(epoch: int) -> Run:
        own = orders[2 * epoch], orders[2 * epoch + 1]
        return tuple(
            RankRun(tuple(Step(tuple(ids[at : at + 2])) for at in range(2 * rank, 12, 4)), None)
            for rank, ids in enumerate(own)
        )

    return make


def test_orders_that_repeat_or_differ_between_ranks_are_seen() -> None:
    case = Case(12, 2, 2)
    first, second, third = list(range(12)), list(range(12))[::-1], [*range(6, 12), *range(6)]
    laws.shuffled(by_epoch([first, first, second, second, third, third]), case)
    with pytest.raises(AssertionError, match=r"^order: .* repeats"):
        laws.shuffled(by_epoch([first] * 6), case)
    with pytest.raises(AssertionError, match=r"^order: "):
        laws.shuffled(by_epoch([first, second, second, second, third, third]), case)
    orders = iter([first, second, third, second])
    with pytest.raises(AssertionError, match=r"^order: .* then"):
        laws.shuffled(lambda _: by_epoch([ids := next(orders), ids])(0), case)


def resumed_wrongly(fault: str) -> laws.RunFrom:
    """A way to go on after a state that gets one thing wrong."""

    def run_from(case: Case, state: Any) -> Run:
        done = state or 0
        if fault == "starts again":
            return laws.plan_run_from(case, 0)
        if fault == "loses one":
            return laws.plan_run_from(case, min(done + 1, case.num_samples) if done else 0)
        if fault == "repeats one":
            return laws.plan_run_from(case, max(done - 1, 0))
        if fault == "counts from zero" and done:
            rest = laws.plan_run_from(replace(case, num_samples=case.num_samples - done), None)
            return tuple(
                RankRun(
                    tuple(
                        replace(step, rows=tuple(row + done for row in step.rows))
                        for step in rank.steps
                    ),
                    None,
                )
                for rank in rest
            )
        return laws.plan_run_from(case, done)

    return run_from


FAULTS = ["starts again", "loses one", "repeats one", "counts from zero"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rest_that_is_not_that_of_the_unbroken_run_is_seen(fault: str) -> None:
    laws.resume(resumed_wrongly("nothing"), Case(11, 2, 2))
    laws.resume(resumed_wrongly(fault), Case(11, 2, 2), stops=[0])
    with pytest.raises(AssertionError, match=r"^resume: "):
        laws.resume(resumed_wrongly(fault), Case(11, 2, 2))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rest_on_other_ranks_that_loses_or_repeats_is_seen(fault: str) -> None:
    legs = [Leg(Case(11, 2, 2), 1), Leg(Case(11, 1, 3), 1), Leg(Case(11, 2, 2))]
    laws.elastic(resumed_wrongly("nothing"), legs)
    with pytest.raises(AssertionError, match=r"^(tile|padding|elastic): "):
        laws.elastic(resumed_wrongly(fault), legs)


def test_an_epoch_that_goes_on_after_its_end_is_seen() -> None:
    legs = [Leg(Case(8, 2, 2), 2), Leg(Case(8, 1, 3))]
    laws.elastic(laws.plan_run_from, legs)
    with pytest.raises(AssertionError, match=r"^elastic: .* goes on after its end"):
        laws.elastic(lambda case, _: laws.plan_run_from(case, 0), legs)


def test_an_epoch_must_be_gone_through_to_its_end() -> None:
    with pytest.raises(AssertionError, match=r"^elastic: .* must go to the end"):
        laws.elastic(laws.plan_run_from, [Leg(Case(8, 2, 2), 1)])


def test_a_state_that_json_changes_is_seen() -> None:
    laws.travels({"epoch": 1, "loaders": [{"consumed": 4, "seed": None}]})
    for state in ({"consumed": (1, 2)}, {"by_rank": {0: 1}}):
        with pytest.raises(AssertionError, match=r"^state: "):
            laws.travels(state)


# Collectors.


class FakeLoader:
    """A loader as far as laws are concerned."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.step = 0

    def __iter__(self) -> Iterator[list[int]]:
        for self.step, batch in enumerate(([0, 1], [4, 0]), start=1):
            yield batch

    def __len__(self) -> int:
        raise TypeError("of unknown length")

    @property
    def valid_rows(self) -> int:
        return 3 - self.step

    def state_dict(self) -> dict[str, Any]:
        return {"consumed": {1: 4, 2: 5}[self.step], "unit": self.unit}

    def consumed(self, step: int) -> int:
        return [0, 4, 5][step]


def test_a_loader_is_read_while_each_batch_is_out() -> None:
    run = laws.loader_rank(FakeLoader("samples"))
    assert run == RankRun((Step((0, 1), 2, 4), Step((4, 0), 1, 5)), None)
    assert [step.state["consumed"] for step in run.steps] == [4, 5]
    in_batches = laws.loader_rank(FakeLoader("batches"), ids=lambda batch: [i + 1 for i in batch])
    assert in_batches == RankRun((Step((1, 2), 2), Step((5, 1), 1)), None)


def test_a_pass_is_read_by_its_record() -> None:
    class Recorded(FakeLoader):
        def valid_rows(self, step: int) -> int:  # type: ignore[override]
            return 2 - step

    run = laws.pass_rank(Recorded("samples"), length=2)
    assert run == RankRun((Step((0, 1), 2, 4), Step((4, 0), 1, 5)), 2)


def test_lengths_are_asked_for_before_the_pass() -> None:
    assert laws.sampler_rank([[0, 1], [2]]) == RankRun((Step((0, 1)), Step((2,))), 2)
    assert laws.sampler_rank(iter([[0, 1]])) == RankRun((Step((0, 1)),), None)
    assert laws.length_of(FakeLoader("samples")) is None


def test_ids_are_read_from_arrays_and_sequences() -> None:
    class Array:
        def tolist(self) -> list[int]:
            return [3, 4]

    assert laws.ids_of(Array()) == (3, 4)
    assert laws.ids_of((3, 4)) == (3, 4)
