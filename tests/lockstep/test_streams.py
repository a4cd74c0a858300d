"""Prepared loaders over streams, on many ranks in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain, product
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import shardplug
from shardplug import CommError, IterableDatasetShard, PlanError
from shardplug.plan.split import Split, Tail
from shardplug.testing import LockstepComm, run_ranks
from tests import laws, reference
from tests.laws import Case, RankRun, Run
from tests.streams import EpochIds, Files, Ids, Parts, SizedIds, parts_of

# Every rank reads; what one reads for all is tested with the dispatcher.
prepare_data_loader = partial(shardplug.prepare_data_loader, dispatch_batches=False)

WORLDS = range(1, 5)
SIZES = (0, 1, 2, 3, 5, 8, 11, 12, 13, 20)


def prepared(dataset: Any, comm: LockstepComm, case: Case, **options: Any) -> Any:
    return prepare_data_loader(
        DataLoader(dataset, case.batch_size),
        split_batches=case.split_batches,
        tail=case.tail.value,
        comm=comm,
        **options,
    )


def run_of(case: Case, kind: type[Ids]) -> Run:
    def one_rank(comm: LockstepComm) -> RankRun:
        return laws.loader_rank(prepared(kind(case.num_samples), comm, case))

    return tuple(run_ranks(case.world_size, one_rank))


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize("tail", Tail)
def test_the_laws_hold(tail: Tail, split: Split, world_size: int) -> None:
    for num_samples, size in product(SIZES, (1, 3)):
        batch_size = size * world_size if split is Split.SLICE else size
        case = laws.as_prepared(Case(num_samples, batch_size, world_size, split, tail))
        try:
            reference.rounds(case)
        except reference.Impossible:
            for kind in (Ids, SizedIds):
                with pytest.raises(PlanError):
                    run_of(case, kind)
            continue
        unsized = laws.one_pass(partial(run_of, kind=Ids), case, is_sized=False, is_end_known=False)
        sized = laws.one_pass(partial(run_of, kind=SizedIds), case)
        # What is dropped counts as done where it is known how much that is.
        assert _without_ends(unsized) == _without_ends(sized)


def _without_ends(run: Run) -> list[list[tuple[tuple[int, ...], int | None]]]:
    return [[(step.rows, step.valid_rows) for step in rank.steps] for rank in run]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("tail", ["pad", "drop", "uneven"])
@pytest.mark.parametrize("kind", [Ids, SizedIds])
def test_the_last_batch_says_so_while_it_is_out(
    kind: type[Ids], tail: str, world_size: int
) -> None:
    def flags(comm: LockstepComm, num_ids: int) -> list[bool]:
        loader = prepare_data_loader(DataLoader(kind(num_ids), 2), tail=tail, comm=comm)
        seen = [loader.end_of_dataloader]
        seen += [loader.end_of_dataloader for _ in loader]
        return [*seen, loader.end_of_dataloader]

    for num_ids in range(1, 26):
        for rank, seen in enumerate(run_ranks(world_size, flags, num_ids)):
            case = Case(num_ids, 2, world_size, tail=Tail(tail))
            steps = len(reference.stream(case)[rank].steps)
            out = [False] * (steps - 1) + [True] * min(1, steps)
            assert seen == [False, *out, False], (case, rank)


def test_a_stream_is_read_no_further_than_the_steps_at_hand_need() -> None:
    def num_read(comm: LockstepComm) -> int:
        ids = Ids(1000)
        next(iter(prepare_data_loader(DataLoader(ids, 2), comm=comm)))
        return ids.num_read

    # The batch that goes out, and one more to know that it is not the last; two ranks.
    assert run_ranks(2, num_read) == [8, 8]


# Ready-made batches.


class Batches(IterableDataset[Any]):
    """Batches of these sizes over consecutive ids."""

    def __init__(self, *sizes: int) -> None:
        self.batches = [torch.tensor(part) for part in parts_of(*sizes)]

    def __iter__(self) -> Any:
        return iter(self.batches)


def test_ready_made_batches_are_dealt() -> None:
    def rows(comm: LockstepComm) -> list[Any]:
        loader = prepare_data_loader(DataLoader(Batches(2, 3, 1, 4, 2), None), comm=comm)
        return [(batch.tolist(), loader.valid_rows, loader.num_rows) for batch in loader]

    assert run_ranks(2, rows) == [
        [([0, 1], 2, 2), ([5], 1, 1), ([10, 11], 2, 2)],
        [([2, 3, 4], 3, 3), ([6, 7, 8, 9], 4, 4), ([0, 1], 0, 2)],
    ]


def test_ready_made_batches_are_not_cut() -> None:
    def message(comm: LockstepComm) -> str:
        with pytest.raises(PlanError) as raised:
            prepare_data_loader(DataLoader(Batches(2, 2), None), split_batches=True, comm=comm)
        return str(raised.value)

    assert (
        run_ranks(2, message)
        == ["`batch_size` must be set for batches to be split, got None. Pass split_batches=False."]
        * 2
    )


# A length that is a lie.


@pytest.mark.parametrize(("says", "steps"), [(12, 3), (9, 3), (4, 1), (1, 1), (0, 0)])
def test_a_length_that_lies_is_an_error_at_the_end(says: int, steps: int) -> None:
    def outcome(comm: LockstepComm) -> tuple[list[int], str]:
        loader = prepare_data_loader(DataLoader(SizedIds(8, says=says), 2), comm=comm)
        seen: list[int] = []

        def read() -> None:
            for batch in loader:
                seen.extend(batch.tolist())

        with pytest.raises(PlanError) as raised:
            read()
        return seen, str(raised.value)

    # The last batch is not handed out: it cannot be the last one that the length had promised.
    assert [seen for seen, _ in run_ranks(2, outcome)] == [[0, 1], [2, 3]]
    assert {message for _, message in run_ranks(2, outcome)} == {
        "`dataset` must yield as many samples as its length says, got an end after 2 steps "
        f"instead of {steps}. Correct its __len__, or remove it."
    }


# Errors.


@pytest.mark.parametrize("fails_at", [0, 1, 5, 30, 99])
@pytest.mark.parametrize("tail", ["pad", "drop", "exact"])
def test_what_a_stream_raises_is_raised_on_all_ranks(tail: str, fails_at: int) -> None:
    def outcome(comm: LockstepComm) -> str:
        loader = prepare_data_loader(
            DataLoader(Ids(100, fails_at=fails_at), 2), tail=tail, comm=comm
        )
        with pytest.raises(ValueError, match=f"^no id {fails_at}$"):
            list(loader)
        return "raised"

    assert run_ranks(3, outcome) == ["raised"] * 3


@pytest.mark.parametrize("fails_at", [0, 1, 5, 30, 99])
@pytest.mark.parametrize("tail", ["pad", "drop", "exact"])
def test_what_it_raises_on_one_rank_only_is_told_to_the_others(tail: str, fails_at: int) -> None:
    def outcome(comm: LockstepComm) -> str:
        ids = Ids(100, fails_at=fails_at if comm.rank == 1 else None)
        loader = prepare_data_loader(DataLoader(ids, 2), tail=tail, comm=comm)
        with pytest.raises(ValueError if comm.rank == 1 else CommError) as raised:
            list(loader)
        return str(raised.value)

    told = f"Another rank could not go on: rank 1 failed with ValueError: no id {fails_at}"
    assert run_ranks(3, outcome) == [told, f"no id {fails_at}", told]


@pytest.mark.parametrize("lengths", [(8, 12), (12, 8), (0, 2), (33, 34, 40)])
def test_a_stream_that_ends_on_some_ranks_only_is_an_error_on_all(lengths: tuple[int, ...]) -> None:
    def message(comm: LockstepComm) -> str:
        ids = Ids(lengths[comm.rank])
        loader = prepare_data_loader(DataLoader(ids, 1), comm=comm)
        with pytest.raises(CommError) as raised:
            list(loader)
        return str(raised.value)

    messages = run_ranks(len(lengths), message)
    assert len(set(messages)) == 1
    ended = [rank for rank, length in enumerate(lengths) if length == min(lengths)]
    assert messages[0].startswith(
        f"Ranks disagree on the end of the stream: it has ended on ranks {ended} but goes on"
    )


class Dropping(DataLoader[Any]):
    """Leaves a batch out, which takes the place of another in the record of real rows."""

    def __iter__(self) -> Any:
        return (batch for place, batch in enumerate(super().__iter__()) if place != 1)


class Doubling(DataLoader[Any]):
    def __iter__(self) -> Any:
        return chain.from_iterable((batch, batch) for batch in super().__iter__())


@pytest.mark.parametrize(("kind", "got"), [(Dropping, "fewer"), (Doubling, "more")])
def test_a_loader_that_yields_other_batches_than_are_made_is_an_error(kind: Any, got: str) -> None:
    loader = prepare_data_loader(kind(Ids(7), 2), num_processes=2, process_index=0)
    with pytest.raises(
        PlanError,
        match=r"^`dataloader` must yield one batch per batch that is made of its stream, got "
        rf"{got} from {kind.__name__}\.__iter__\.$",
    ):
        list(loader)


def test_a_collate_function_that_raises_stop_iteration_does_not_end_the_pass() -> None:
    def collate(samples: list[int]) -> Any:
        if 4 in samples:
            next(iter(()))
        return samples

    def outcome(comm: LockstepComm) -> str:
        loader = prepare_data_loader(DataLoader(Ids(12), 2, collate_fn=collate), comm=comm)
        with pytest.raises((RuntimeError, CommError)) as raised:
            list(loader)
        return type(raised.value).__name__

    assert run_ranks(2, outcome) == ["RuntimeError", "CommError"]


# Epochs.


def test_every_pass_is_the_next_epoch_also_after_one_that_was_left() -> None:
    def rows(comm: LockstepComm) -> list[Any]:
        loader = prepare_data_loader(DataLoader(EpochIds(4), 1), comm=comm)
        passes: list[Any] = [[batch.item() for batch in loader]]
        for batch in loader:
            passes.append(batch.item())
            break
        passes.append([batch.item() for batch in loader])
        loader.set_epoch(7)
        passes.append([batch.item() for batch in loader])
        return passes

    assert run_ranks(2, rows) == [
        [[0, 2], 100, [200, 202], [700, 702]],
        [[1, 3], 101, [201, 203], [701, 703]],
    ]


def test_ranks_of_different_epochs_are_an_error_on_all() -> None:
    def message(comm: LockstepComm) -> str:
        loader = prepare_data_loader(DataLoader(Ids(4), 1), comm=comm)
        loader.set_epoch(comm.rank)
        with pytest.raises(CommError) as raised:
            next(iter(loader))
        return str(raised.value)

    first, second = run_ranks(2, message)
    assert first == second
    assert "the epoch of" in first


# Streams that shard themselves.


def own_rows(
    dataset: Callable[[int], Any], batch_size: int = 2, **options: Any
) -> Callable[[LockstepComm], list[Any]]:
    def rows(comm: LockstepComm) -> list[Any]:
        loader = prepare_data_loader(
            DataLoader(dataset(comm.rank), batch_size), comm=comm, **options
        )
        return [(batch.tolist(), loader.valid_rows, loader.end_of_dataloader) for batch in loader]

    return rows


def real(by_rank: list[list[Any]]) -> list[int]:
    return sorted(
        chain.from_iterable(rows[:valid] for steps in by_rank for rows, valid, _ in steps)
    )


def test_uneven_parts_are_padded_to_the_longest() -> None:
    by_rank = run_ranks(2, own_rows(lambda _: Parts(parts_of(3, 7)), tail="pad"))
    assert by_rank == [
        [([0, 1], 2, False), ([2, 0], 1, False), ([2, 0], 0, False), ([2, 0], 0, True)],
        [([3, 4], 2, False), ([5, 6], 2, False), ([7, 8], 2, False), ([9, 3], 1, True)],
    ]
    assert real(by_rank) == list(range(10))


def test_uneven_parts_are_dropped_to_the_shortest() -> None:
    by_rank = run_ranks(2, own_rows(lambda _: Parts(parts_of(3, 7)), tail="drop"))
    assert by_rank == [[([0, 1], 2, True)], [([3, 4], 2, True)]]


def test_uneven_parts_may_stay_uneven() -> None:
    by_rank = run_ranks(2, own_rows(lambda _: Parts(parts_of(3, 7)), tail="uneven"))
    assert [len(steps) for steps in by_rank] == [2, 4]
    assert [steps[-1] for steps in by_rank] == [([2], 1, True), ([9], 1, True)]
    assert real(by_rank) == list(range(10))


def test_exact_reads_everything_on_every_rank() -> None:
    streams = [Parts(parts_of(3, 7)) for _ in range(2)]
    by_rank = run_ranks(2, own_rows(lambda rank: streams[rank], tail="exact"))
    assert by_rank == [
        [([0, 1], 2, False), ([4, 5], 2, False), ([8], 1, True)],
        [([2, 3], 2, False), ([6, 7], 2, False), ([9], 1, True)],
    ]


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0), (1, 200), (0, 33, 1), (7, 0, 0, 90)])
@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_parts_of_any_length_end_together(tail: str, sizes: tuple[int, ...]) -> None:
    by_rank = run_ranks(len(sizes), own_rows(lambda _: Parts(parts_of(*sizes)), tail=tail))
    batches = [size // 2 if tail == "drop" else -(-size // 2) for size in sizes]
    steps = min(batches) if tail == "drop" else max(batches)
    assert [len(each) for each in by_rank] == [steps] * len(sizes)
    due = list(range(sum(sizes)))
    if tail == "drop":
        due = [row for part in parts_of(*sizes) for row in part[: 2 * steps]]
    assert real(by_rank) == due
    for each in by_rank:
        assert [is_last for *_, is_last in each] == [False] * (steps - 1) + [True] * min(1, steps)


def test_split_batches_are_rows_of_each_part() -> None:
    by_rank = run_ranks(2, own_rows(lambda _: Parts(parts_of(3, 4)), 4, split_batches=True))
    assert by_rank == [
        [([0, 1], 2, False), ([2, 0], 1, True)],
        [([3, 4], 2, False), ([5, 6], 2, True)],
    ]


def test_a_stream_of_too_few_shards_is_read_by_all() -> None:
    by_rank = run_ranks(3, own_rows(lambda _: Files(parts_of(3, 3))))
    assert [steps[0][0] for steps in by_rank] == [[0, 1], [2, 3], [4, 5]]


def test_each_rank_reads_its_part_only() -> None:
    parts = [Parts(parts_of(4, 4)), Parts(parts_of(4, 4))]
    asked: list[tuple[int, int, int]] = []

    class Asked(Parts):
        def shard(self, num_shards: int, index: int) -> Parts:
            asked.append((num_shards, index, 0))
            return super().shard(num_shards, index)

    run_ranks(2, own_rows(lambda rank: Asked(parts[rank].parts)))
    assert sorted(asked) == [(2, 0, 0), (2, 1, 0)]


@pytest.mark.parametrize("kind", [Ids, SizedIds])
def test_what_is_sharded_already_is_not_cut_again(kind: type[Ids]) -> None:
    by_rank = run_ranks(2, own_rows(lambda _: kind(8), already_sharded=True))
    due = [([0, 1], 2, False), ([2, 3], 2, False), ([4, 5], 2, False), ([6, 7], 2, True)]
    assert by_rank == [due, due]


@pytest.mark.parametrize("batch_size", [1, 2])
def test_our_own_shard_is_not_cut_again(batch_size: int) -> None:
    def shard(rank: int) -> Any:
        return IterableDatasetShard(range(8), 2, num_processes=2, process_index=rank)

    by_rank = run_ranks(2, own_rows(shard, batch_size))
    assert [list(chain(*(rows for rows, *_ in steps))) for steps in by_rank] == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
    ]


def test_our_own_shard_of_one_is_cut() -> None:
    by_rank = run_ranks(2, own_rows(lambda _: IterableDatasetShard(range(8), 2)))
    assert [list(chain(*(rows for rows, *_ in steps))) for steps in by_rank] == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
    ]


# Messages.


@pytest.mark.parametrize("num_steps", [1, 16, 100, 160])
@pytest.mark.parametrize("is_cut", [False, True])
def test_one_message_buys_up_to_sixteen_steps(num_steps: int, is_cut: bool) -> None:
    def num_calls(comm: LockstepComm) -> int:
        dataset = Parts(parts_of(num_steps, num_steps)) if is_cut else Ids(2 * num_steps)
        loader = prepare_data_loader(DataLoader(dataset, 1), comm=comm)
        before = len(comm.calls)
        assert len(list(loader)) == num_steps
        return len(comm.calls) - before

    # One to begin the pass; then for 1, 2, 4, 8, 16, 16, ... steps, and one for the last.
    bought, messages = 0, 0
    for size in [1, 2, 4, 8, *[16] * 10]:
        if bought < num_steps:
            bought, messages = bought + size, messages + 1
    assert all(calls - 1 in (messages, messages + 1) for calls in run_ranks(2, num_calls))


def test_uneven_streams_need_no_message() -> None:
    def num_calls(comm: LockstepComm) -> int:
        loader = prepare_data_loader(DataLoader(Ids(100), 1), tail="uneven", comm=comm)
        before = len(comm.calls)
        list(loader)
        return len(comm.calls) - before

    assert run_ranks(2, num_calls) == [1, 1]


@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_simulation_of_a_rank_asks_nobody(num_steps: int) -> None:
    def rows(comm: LockstepComm) -> list[list[int]] | None:
        if comm.rank:
            return None
        loader = prepare_data_loader(
            DataLoader(Ids(6 * num_steps), 2), num_processes=3, process_index=2, comm=comm
        )
        batches = [batch.tolist() for batch in loader]
        assert not comm.calls
        return batches

    assert run_ranks(2, rows)[0] == [[4, 5], [10, 11], [16, 17]][:num_steps]
