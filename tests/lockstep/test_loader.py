"""Map-style loaders on many ranks in one process: what each gets, and what it is told of it."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from shardplug import (
    BatchSamplerShard,
    CommError,
    DataLoaderShard,
    PermutedSampler,
    PlanError,
    Shard,
    ShardPlan,
    Split,
    Tail,
    prepare_data_loader,
    skip_first_batches,
)
from shardplug.plan.cursor import Cursor
from shardplug.prepared import PreparedLoader
from shardplug.testing import LockstepComm, run_ranks
from tests import laws, reference, strategies
from tests.laws import Case, RankRun, Run

Batches = list[list[int]]


def loader_over(n: int = 8, batch_size: int | None = 2, **options: Any) -> DataLoader[Any]:
    samples: Any = torch.arange(n)
    if "batch_sampler" in options:
        return DataLoader(samples, **options)
    return DataLoader(samples, batch_size=batch_size, **options)


def batches_of(loader: Iterable[Any]) -> Batches:
    return [list(laws.ids_of(batch)) for batch in loader]


def on_ranks(
    world_size: int,
    loader_of: Callable[[int], DataLoader[Any]],
    look: Callable[[Any], Any] = batches_of,
    **options: Any,
) -> list[Any]:
    """What each rank sees in a loader that is prepared on all of them."""

    def body(comm: LockstepComm) -> Any:
        return look(prepare_data_loader(loader_of(comm.rank), comm=comm, **options))

    return run_ranks(world_size, body)


def same(loader: DataLoader[Any]) -> Callable[[int], DataLoader[Any]]:
    return lambda _rank: loader


def order_of(seed: int, n: int) -> list[int]:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()


def all_rows(by_rank: list[Batches]) -> list[int]:
    return [row for step in zip(*by_rank, strict=True) for batch in step for row in batch]


def flat(batches: Batches) -> list[int]:
    return [row for batch in batches for row in batch]


# One pass, with every end.


class Told(NamedTuple):
    """What a loader says while a batch is out."""

    rows: tuple[int, ...]
    valid_rows: int
    num_rows: int
    is_last: bool
    left: int
    epoch: int


def told_by(loader: DataLoaderShard) -> list[Told]:
    return [
        Told(
            laws.ids_of(batch),
            loader.valid_rows,
            loader.num_rows,
            loader.end_of_dataloader,
            loader.remaining_steps,
            loader.epoch,
        )
        for batch in loader
    ]


def cases_of(tail: Tail) -> Iterator[Case]:
    for n, world_size in product(range(21), range(1, 5)):
        yield Case(n, 3, world_size, tail=tail)
        yield Case(n, 2 * world_size, world_size, Split.SLICE, tail)


@pytest.mark.parametrize("tail", Tail)
def test_every_end_keeps_every_law(tail: Tail) -> None:
    for case in cases_of(tail):
        loader = loader_over(case.num_samples, case.batch_size)
        options: dict[str, Any] = {"tail": tail.value, "split_batches": case.split_batches}
        prepared = laws.as_prepared(case)
        try:
            expected = reference.epoch(prepared)
        except reference.Impossible:
            with pytest.raises((PlanError, CommError), match=r"tail='exact'"):
                on_ranks(case.world_size, same(loader), **options)
            continue

        def look(loader: DataLoaderShard) -> tuple[RankRun, list[Told], tuple[Any, ...]]:
            run = laws.loader_rank(loader)
            of_all = loader.total_dataset_length, loader.total_batch_size, loader.remainder
            assert loader.remaining_steps == len(loader)
            return run, told_by(loader), of_all

        seen = on_ranks(case.world_size, same(loader), look, **options)
        laws.one_pass(lambda _, seen=seen: tuple(run for run, _, _ in seen), prepared)  # type: ignore[misc]
        last = sum(rank.steps[-1].valid_rows or 0 for rank in expected if at_end(rank, expected))
        size = case.global_batch_size
        remainder = -1 if not last or last == size else last
        for (_, told, of_all), rank in zip(seen, expected, strict=True):
            assert told == [
                Told(
                    step.rows,
                    step.valid_rows or 0,
                    len(step.rows),
                    at == len(rank.steps) - 1,
                    len(rank.steps) - 1 - at,
                    1,
                )
                for at, step in enumerate(rank.steps)
            ]
            assert of_all == (case.num_samples, size, remainder), case


def at_end(rank: RankRun, run: Run) -> bool:
    return 0 < len(rank.steps) == max(len(other.steps) for other in run)


@given(
    case=strategies.cases(max_samples=900, max_world_size=9, max_batch_size=20),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)
def test_larger_epochs_keep_every_law_also_shuffled(case: Case, shuffle: bool, seed: int) -> None:
    shuffle = shuffle and case.num_samples > 0  # torch refuses to shuffle nothing
    loader = loader_over(case.num_samples, case.batch_size, shuffle=shuffle)

    def make(_case: Case) -> Run:
        return tuple(
            laws.loader_rank(
                prepare_data_loader(
                    loader,
                    num_processes=case.world_size,
                    process_index=rank,
                    split_batches=case.split_batches,
                    use_seedable_sampler=True,
                    data_seed=seed,
                    tail=case.tail.value,
                )
            )
            for rank in range(case.world_size)
        )

    try:
        reference.rounds(case)
    except reference.Impossible:
        with pytest.raises(PlanError, match="tail='exact'"):
            make(case)
        return
    order = order_of(seed, case.num_samples) if shuffle else None
    laws.one_pass(make, laws.as_prepared(case), order=order)


def test_between_passes_no_batch_is_out() -> None:
    loader = prepare_data_loader(loader_over(3))

    def look() -> tuple[Any, ...]:
        out = loader.valid_rows, loader.num_rows, loader.end_of_dataloader
        return *out, loader.remaining_steps, loader.epoch

    assert look() == (0, 0, False, 2, 0)
    assert batches_of(loader) == [[0, 1], [2]]
    assert look() == (0, 0, False, 2, 1)


def test_a_pass_that_was_left_stands_until_the_next_one() -> None:
    loader = prepare_data_loader(loader_over(7))
    for _ in loader:
        break
    assert (loader.epoch, loader.remaining_steps, loader.valid_rows) == (0, 3, 2)
    assert len(batches_of(loader)) == 4
    assert loader.epoch == 2
    for _ in loader:
        break
    loader.set_epoch(5)
    assert (loader.epoch, loader.remaining_steps) == (5, 4)


def test_the_plan_is_that_of_the_epoch() -> None:
    def look(loader: DataLoaderShard) -> Any:
        return loader.plan, loader.shard, loader.batch_size, loader.drop_last

    assert on_ranks(2, same(loader_over(9, 4)), look) == [
        (ShardPlan(9, 4, Shard(rank, 2)), Shard(rank, 2), 4, False) for rank in range(2)
    ]


def test_a_pass_can_start_inside_its_epoch() -> None:
    order = order_of(50, 24)

    def look(loader: DataLoaderShard) -> Any:
        def start_inside(loader: Any) -> Any:
            loader._epochs.progress.jump(Cursor(0, 8))
            return loader

        rest = start_inside(loader)
        left = [rest.remaining_steps, start_inside(skip_first_batches(rest, 1)).remaining_steps]
        assert left == [3, 2]
        rest.set_epoch(0)
        shown = batches_of(rest.batch_sampler)
        epochs = [batches_of(rest), batches_of(rest)]
        assert epochs[0] == shown
        skipped = batches_of(start_inside(skip_first_batches(rest, 1)))
        rest.set_epoch(0)
        assert rest.remaining_steps == 4
        return epochs, skipped

    # Eight were consumed by two ranks; three go on.
    by_rank = on_ranks(3, lambda rank: shuffling(24, rank, 2), look)
    expected = order[8:] + order[:2]
    assert all_rows([epochs[0] for epochs, _ in by_rank]) == expected
    assert all_rows([epochs[1] for epochs, _ in by_rank]) == order_of(51, 24)
    assert all_rows([skipped for _, skipped in by_rank]) == expected[6:]


# The cases that users report.


def test_an_evaluation_can_end_exactly() -> None:
    assert on_ranks(2, same(loader_over(5)), tail="exact") == [[[0, 1], [3]], [[2], [4]]]


def test_batches_of_varying_length_are_dealt_whole() -> None:
    batches = strategies.batches_of([4, 2, 4, 2, 4, 4])

    class Declares(Listed):
        batch_size = 4

    def look(loader: DataLoaderShard) -> Any:
        return batches_of(loader), len(loader), loader.remainder, loader.total_dataset_length

    assert on_ranks(2, lambda _: loader_over(20, batch_sampler=Declares(batches)), look) == [
        ([[0, 1, 2, 3], [6, 7, 8, 9], [12, 13, 14, 15]], 3, -1, None),
        ([[4, 5], [10, 11], [16, 17, 18, 19]], 3, -1, None),
    ]


def test_a_custom_batch_sampler_deals_every_other_batch() -> None:
    loader = loader_over(8, batch_sampler=[[0, 1], [2, 3], [4, 5], [6, 7]])
    assert on_ranks(2, same(loader)) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_lengths_are_those_of_each_rank() -> None:
    options: dict[str, Any] = {"split_batches": True, "even_batches": False}
    for n, lengths in ((3, [2, 1]), (12, [6, 6]), (20, [10, 10])):
        assert on_ranks(2, same(loader_over(n)), len, **options) == lengths
        assert [len(own) for own in on_ranks(2, same(loader_over(n)), **options)] == lengths


def test_a_sampler_over_a_part_of_the_data_counts_itself() -> None:
    def look(loader: DataLoaderShard) -> Any:
        return batches_of(loader), loader.total_dataset_length, loader.remainder

    loader = loader_over(10, sampler=range(5))
    assert on_ranks(2, same(loader), look) == [
        ([[0, 1], [4, 0]], 5, 1),
        ([[2, 3], [1, 2]], 5, 1),
    ]


def test_no_samples_are_no_steps() -> None:
    for tail in Tail:
        assert on_ranks(3, same(loader_over(0)), told_by, tail=tail.value) == [[]] * 3
    assert on_ranks(2, same(loader_over(0, sampler=[]))) == [[]] * 2
    assert on_ranks(2, same(loader_over(0, batch_sampler=[]))) == [[]] * 2
    assert on_ranks(2, same(loader_over(0, None))) == [[]] * 2


def test_fewer_samples_than_ranks() -> None:
    assert on_ranks(4, same(loader_over(2, 1))) == [[[0]], [[1]], [[0]], [[1]]]
    assert on_ranks(4, same(loader_over(2, 1)), tail="uneven") == [[[0]], [[1]], [], []]
    assert on_ranks(4, same(loader_over(2, 1)), tail="drop") == [[]] * 4


# The epoch.


def test_every_epoch_has_another_order_that_all_ranks_agree_on() -> None:
    case = Case(23, 3, 2)

    def make(epoch: int) -> Run:
        def look(loader: DataLoaderShard) -> RankRun:
            loader.set_epoch(epoch)
            return laws.loader_rank(loader)

        # Each rank has its own seed; that of rank 0 counts.
        return tuple(on_ranks(2, lambda rank: shuffling(23, rank), look))

    laws.shuffled(make, case)
    for epoch in range(3):
        laws.tile(make(epoch), case, order=order_of(50 + epoch, 23))


def shuffling(n: int, rank: int = 0, batch_size: int = 3) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(50 + rank)
    return loader_over(n, batch_size, shuffle=True, generator=generator)


def test_passes_go_from_epoch_to_epoch_also_when_they_are_left() -> None:
    def look(loader: DataLoaderShard) -> list[Batches]:
        first = batches_of(islice(loader, 1))
        return [first, *(batches_of(loader) for _ in range(2))]

    by_rank = on_ranks(2, lambda rank: shuffling(6, rank), look)
    for epoch, taken in ((0, 3), (1, 3), (2, 3)):
        order = order_of(50 + epoch, 6)
        assert [own[epoch][0] for own in by_rank] == [order[:taken], order[taken:]]


@pytest.mark.parametrize(
    "setter",
    [
        lambda loader: loader,
        lambda loader: loader.sampler,
        lambda loader: loader.batch_sampler,
        lambda loader: loader.batch_sampler.sampler,
    ],
)
def test_the_epoch_can_be_set_on_the_loader_and_on_its_samplers(
    setter: Callable[[Any], Any],
) -> None:
    def look(loader: DataLoaderShard) -> list[Batches]:
        setter(loader).set_epoch(4)
        assert loader.epoch == 4
        epochs = [batches_of(loader)]
        setter(loader).set_epoch(4)
        epochs += [batches_of(loader) for _ in range(2)]
        return epochs

    by_rank = on_ranks(2, lambda rank: shuffling(8, rank), look)
    for number, epoch in enumerate((4, 4, 5)):
        order = order_of(50 + epoch, 8)
        expected = [order[0:3], order[3:6], order[6:8] + order[0:1], order[1:4]]
        assert all_rows([own[number] for own in by_rank]) == flat(expected)


@pytest.mark.parametrize("epoch", [-1, -8])
def test_a_negative_epoch_is_refused(epoch: int) -> None:
    loader = prepare_data_loader(loader_over())
    with pytest.raises(PlanError) as caught:
        loader.set_epoch(epoch)
    assert str(caught.value) == f"`epoch` must be zero or more, got {epoch}."


class Listens:
    """Remembers which epochs it was told."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)


class ListeningData(Listens, Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 4


class ListeningSampler(Listens, Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([3, 1, 2, 0])

    def __len__(self) -> int:
        return 4


class ListeningBatches(Listens):
    def __init__(self, sampler: Any) -> None:
        super().__init__()
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3]])


class Wrapping(Listens):
    def __init__(self, batch_sampler: Any) -> None:
        super().__init__()
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batch_sampler)


def test_the_epoch_reaches_data_set_samplers_and_batch_samplers() -> None:
    data, sampler = ListeningData(), ListeningSampler()
    inner = ListeningBatches(sampler)
    outer = Wrapping(inner)
    everyone: list[Listens] = [data, sampler, inner, outer]
    loader = prepare_data_loader(DataLoader(data, batch_sampler=outer))
    assert [each.told for each in everyone] == [[]] * 4
    loader.set_epoch(3)
    assert [each.told for each in everyone] == [[3]] * 4
    list(loader)
    list(islice(loader, 1))
    list(loader)
    assert [each.told for each in everyone] == [[3, 3, 4, 5]] * 4


@pytest.mark.parametrize("sized", [{"batch_size": 2}, {"batch_size": None}])
def test_the_epoch_reaches_a_plain_sampler(sized: dict[str, Any]) -> None:
    data, sampler = ListeningData(), ListeningSampler()
    loader = prepare_data_loader(DataLoader(data, sampler=sampler, **sized))
    for _ in range(2):
        list(loader)
    assert (data.told, sampler.told) == ([0, 1], [0, 1])


def test_a_distributed_sampler_is_told_the_epoch_too() -> None:
    data: Any = range(12)

    def loader_of(rank: int) -> DataLoader[Any]:
        return loader_over(12, 3, sampler=DistributedSampler(data, 2, rank, seed=1))

    by_rank = on_ranks(2, loader_of, lambda loader: [batches_of(loader) for _ in range(2)])
    for epoch in range(2):
        order = order_of(1 + epoch, 12)
        for rank, own in enumerate(by_rank):
            assert flat(own[epoch]) == order[rank::2]


# Passes.


def test_nothing_is_decided_before_the_first_next() -> None:
    asked: list[str] = []

    class Tells(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            asked.append("order")
            return iter(range(4))

        def __len__(self) -> int:
            return 4

    def body(comm: LockstepComm) -> None:
        loader = prepare_data_loader(loader_over(4, sampler=Tells()), comm=comm)
        before = len(comm.calls), list(asked), loader.epoch
        iterator = iter(loader)
        comm.barrier()
        assert (len(comm.calls) - 1, list(asked), loader.epoch) == before
        comm.barrier()
        loader.set_epoch(6)
        next(iterator)
        assert loader.epoch == 6
        assert len(comm.calls) == before[0] + 3
        iterator.close()  # type: ignore[attr-defined]

    run_ranks(2, body)
    assert asked == ["order"] * 2


def test_two_passes_at_once_are_two_epochs() -> None:
    def look(loader: DataLoaderShard) -> tuple[Batches, Batches, int]:
        first, second = iter(loader), iter(loader)
        one, two = [next(first), next(first)], [next(second)]
        one += [*first]
        two += [*second]
        return batches_of(one), batches_of(two), loader.epoch

    by_rank = on_ranks(2, lambda rank: shuffling(12, rank, 2), look)
    for epoch in range(2):
        assert all_rows([own[epoch] for own in by_rank]) == order_of(50 + epoch, 12)
    assert [own[2] for own in by_rank] == [2, 2]


def test_a_pass_that_goes_on_while_another_is_over_moves_no_epoch() -> None:
    loader = prepare_data_loader(loader_over(4))
    older = iter(loader)
    next(older)
    assert len(batches_of(loader)) == 2
    assert loader.epoch == 2
    assert batches_of(older) == [[2, 3]]
    assert loader.epoch == 2


KINDS_OF_LOADER: dict[str, Callable[[], DataLoader[Any]]] = {
    "sequential": lambda: loader_over(9),
    "shuffled": lambda: loader_over(9, shuffle=True),
    "shuffled by a generator": lambda: shuffling(9),
    "batches": lambda: loader_over(9, batch_sampler=[[0, 1], [2]]),
    "ready batches": lambda: loader_over(9, None),
    "permuted": lambda: loader_over(9, sampler=PermutedSampler(9)),
    "distributed": lambda: loader_over(9, sampler=DistributedSampler(range(9), 2, 1)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("kind", KINDS_OF_LOADER)
@pytest.mark.parametrize("built_directly", [False, True])
def test_iterating_moves_no_generator_of_the_process(kind: str, built_directly: bool) -> None:
    plain = KINDS_OF_LOADER[kind]()
    if built_directly:
        sampler = (
            {"batch_sampler": plain.batch_sampler}
            if kind == "batches"
            else {"batch_size": plain.batch_size, "sampler": plain.sampler}
        )
        loader: PreparedLoader = DataLoaderShard(plain.dataset, **sampler)
    else:
        loader = prepare_data_loader(plain, num_processes=2, process_index=1)

    def state() -> tuple[Any, ...]:
        numpy: Any = np.random.get_state()
        generator = [] if plain.generator is None else plain.generator.get_state().tolist()
        return torch.get_rng_state().tolist(), numpy[1].tolist(), random.getstate(), generator

    before = state()
    for _ in range(2):
        list(loader)
    next(iter(loader))
    list(skip_first_batches(loader, 1))
    assert state() == before


def test_batches_are_collated_as_the_user_says() -> None:
    loader = loader_over(
        5, collate_fn=lambda rows: {"sum": sum(rows), "rows": default_collate(rows)}
    )

    def look(loader: DataLoaderShard) -> list[tuple[int, list[int], int]]:
        return [(int(b["sum"]), b["rows"].tolist(), loader.valid_rows) for b in loader]

    assert on_ranks(2, same(loader), look) == [
        [(1, [0, 1], 2), (4, [4, 0], 1)],
        [(5, [2, 3], 2), (3, [1, 2], 0)],
    ]


class Ready(Dataset[Any]):
    """Item i is a batch of i + 1 rows."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((index + 1, 2), index)

    def __len__(self) -> int:
        return 5


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("pad", [[(0, 1, 1), (2, 3, 3), (4, 5, 5)], [(1, 2, 2), (3, 4, 4), (0, 1, 0)]]),
        ("uneven", [[(0, 1, 1), (2, 3, 3), (4, 5, 5)], [(1, 2, 2), (3, 4, 4)]]),
        ("drop", [[(0, 1, 1), (2, 3, 3)], [(1, 2, 2), (3, 4, 4)]]),
    ],
)
def test_ready_batches_are_dealt_one_by_one(tail: str, expected: Any) -> None:
    def look(loader: DataLoaderShard) -> Any:
        got = [(int(batch[0, 0]), len(batch), loader.valid_rows) for batch in loader]
        assert (len(loader), loader.total_batch_size, loader.remainder) == (len(got), None, -1)
        assert loader.total_dataset_length == 5
        return got

    assert on_ranks(2, same(DataLoader(Ready(), batch_size=None)), look, tail=tail) == expected


def test_ready_batches_are_shuffled_and_counted_if_their_number_is_open() -> None:
    def seen(**options: Any) -> Any:
        def look(loader: DataLoaderShard) -> Any:
            return [(len(b), loader.valid_rows, loader.end_of_dataloader) for b in loader]

        return on_ranks(2, lambda _: DataLoader(Ready(), batch_size=None, **options), look)

    generator = torch.Generator().manual_seed(3)
    order = order_of(3, 5)
    rows = [index + 1 for index in order]
    assert seen(shuffle=True, generator=generator) == [
        [(rows[0], rows[0], False), (rows[2], rows[2], False), (rows[4], rows[4], True)],
        [(rows[1], rows[1], False), (rows[3], rows[3], False), (rows[0], 0, True)],
    ]
    assert seen(sampler=Endless([4, 0, 1])) == [
        [(5, 5, False), (2, 2, True)],
        [(1, 1, False), (5, 0, True)],
    ]


class Subset(SubsetRandomSampler):
    """A user's own: what else it does is not known."""


class Endless(Sampler[int]):
    """Does not tell how many ids it has."""

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids = list(ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)


class Listed:
    """A batch sampler that does not tell its length, nor a batch size unless a subclass does."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Reversed(Listed):
    """Looks like a batch sampler in order, and may be in any."""

    batch_size = 2

    def __init__(self, batches: Batches) -> None:
        super().__init__(batches)
        self.sampler = SequentialSampler(range(8))


class Untold(Listed):
    __len__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("of_ids", [False, True])
def test_the_last_step_is_known_when_it_is_out_also_where_the_length_is_not(of_ids: bool) -> None:
    def loader_of(_rank: int) -> DataLoader[Any]:
        if of_ids:
            return loader_over(5, sampler=Endless(range(5)))
        return loader_over(5, batch_sampler=Untold([[0, 1], [2, 3], [4]]))

    def look(loader: DataLoaderShard) -> Any:
        with pytest.raises(TypeError, match="has no known length: only a pass will tell"):
            len(loader)
        with pytest.raises(TypeError):
            _ = loader.remaining_steps
        got: list[Any] = []
        for batch in loader:
            if not got:
                with pytest.raises(TypeError, match="not known before the end of the pass"):
                    _ = loader.remaining_steps
            got.append((batch.tolist(), loader.valid_rows, loader.end_of_dataloader))
        assert loader.remainder == -1
        return got

    padded = [4, 0] if of_ids else [4]
    repeated = [1, 2] if of_ids else [0, 1]
    assert on_ranks(2, loader_of, look) == [
        [([0, 1], 2, False), (padded, 1, True)],
        [([2, 3], 2, False), (repeated, 0, True)],
    ]


# Loaders of the user's own class.


class Own(DataLoader[Any]):
    """Negates its batches, and keeps something."""

    scale = 3

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield batch * -self.scale


class AsksNobody(DataLoader[Any]):
    """Has a way of its own of getting batches."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter([torch.tensor([1, 2])] * 4)


class Again(DataLoader[Any]):
    """Never ends."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        while True:
            yield from super().__iter__()


class Twice(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield batch
            yield batch


class Fewer(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return islice(super().__iter__(), 1)


def of_class(kind: type[DataLoader[Any]], n: int = 16) -> DataLoader[Any]:
    samples: Any = torch.arange(n)
    return kind(samples, batch_size=2)


def test_a_users_iter_makes_the_batches() -> None:
    loader = of_class(Own, 8)
    assert on_ranks(2, same(loader)) == [[[0, -3], [-12, -15]], [[-6, -9], [-18, -21]]]
    prepared = prepare_data_loader(loader)
    prepared.scale = 1
    assert batches_of(prepared)[0] == [0, -1]
    assert prepared.scale == 1
    assert loader.scale == 3  # type: ignore[attr-defined]
    del prepared.scale
    assert prepared.scale == 3


def test_a_loader_that_never_asks_our_sampler_is_an_error_at_its_first_batch() -> None:
    loader = prepare_data_loader(of_class(AsksNobody))
    with pytest.raises(PlanError) as caught:
        next(iter(loader))
    assert str(caught.value) == (
        "`dataloader` must ask its sampler for its batches, got one that did not from "
        "AsksNobody.__iter__. Let it iterate super().__iter__()."
    )


@pytest.mark.parametrize(
    ("kind", "found", "num_got"), [(Again, "more", 4), (Twice, "more", 4), (Fewer, "1", 1)]
)
def test_a_loader_yields_one_batch_for_each_of_its_sampler(
    kind: type[Any], found: str, num_got: int
) -> None:
    got: list[Any] = []

    def look(loader: DataLoaderShard) -> None:
        with pytest.raises(PlanError) as caught:
            got.extend(islice(loader, 9))
        assert str(caught.value) == (
            f"`dataloader` must yield one batch per batch of its sampler, got {found} for 4 from "
            f"{kind.__name__}.__iter__."
        )

    on_ranks(2, same(of_class(kind)), look)
    assert len(got) == 2 * num_got


def test_a_loader_of_open_length_yields_no_batch_too_many_either() -> None:
    samples: Any = torch.arange(4)
    loader = prepare_data_loader(Again(samples, batch_sampler=Untold([[0], [1]])))
    got: list[Any] = []
    with pytest.raises(PlanError, match="got more for 2 from Again"):
        got.extend(islice(loader, 9))
    assert len(got) == 2


# Attributes.


def test_attributes_are_those_of_the_loader_that_iterates() -> None:
    loader = prepare_data_loader(loader_over(6))
    loader.collate_fn = sum
    assert [int(batch) for batch in loader] == [1, 5, 9]
    assert (loader.batch_size, loader.num_workers, loader.drop_last) == (2, 0, False)
    assert isinstance(loader, DataLoader)
    assert type(loader) is DataLoaderShard
    with pytest.raises(AttributeError, match="has no attribute 'colour'"):
        _ = loader.colour
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        loader.batch_size = 4


def test_the_samplers_show_the_whole_epoch_and_this_ranks_batches() -> None:
    def look(loader: DataLoaderShard) -> Any:
        batch_sampler: Any = loader.batch_sampler
        assert isinstance(batch_sampler, BatchSampler)
        assert (len(batch_sampler), batch_sampler.batch_size) == (len(loader), 3)
        assert batch_sampler.drop_last is False
        assert loader.sampler is batch_sampler.sampler
        loader.set_epoch(2)
        sampler: Any = loader.sampler
        shown = list(batch_sampler), list(sampler)
        assert shown[0] == batches_of(loader)
        return (*shown, len(sampler), sampler.seed)

    order = order_of(52, 8)
    by_rank = on_ranks(2, lambda rank: shuffling(8, rank), look)
    assert [own[1:] for own in by_rank] == [(order, 8, 50)] * 2
    assert by_rank[0][0] == [order[:3], [*order[6:], order[0]]]


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))]
)
@pytest.mark.parametrize("in_a_pass", [False, True])
def test_loaders_can_be_copied_and_pickled(copied: Callable[[Any], Any], in_a_pass: bool) -> None:
    def loader() -> PreparedLoader:
        made = prepare_data_loader(shuffling(8), num_processes=2, process_index=1)
        made.set_epoch(3)
        return made

    original = loader()
    under_way = iter(original)
    if in_a_pass:
        next(under_way)
    twin: Any = copied(original)
    assert type(twin).__name__ == "DataLoaderShard"
    if copied is not copy.copy:  # that one shares what is inside, as copies do
        twin.set_epoch(9)
        assert original.epoch == 3
    twin.set_epoch(4)
    order = order_of(54, 8)
    assert batches_of(twin) == [order[3:6], order[1:4]]
    assert twin.sampler.seed == 50
    twin.set_epoch(6)
    assert batches_of(twin.batch_sampler) == batches_of(twin)


def test_a_loader_that_is_gone_leaves_nothing_behind() -> None:
    loader = prepare_data_loader(loader_over(8))
    seen = weakref.ref(loader)
    list(loader)
    next(iter(loader))
    gc.collect()
    del loader
    assert seen() is None


# Skipping.


@pytest.mark.parametrize("tail", Tail)
def test_a_skipped_pass_is_the_rest_and_later_ones_are_full(tail: Tail) -> None:
    for n, skipped in product((0, 5, 12, 13), range(5)):
        if tail is Tail.EXACT and n == 5:
            continue

        def look(loader: DataLoaderShard, skipped: int = skipped) -> Any:
            rest: Any = skip_first_batches(loader, skipped)
            told = [told_by(rest) for _ in range(2)]
            lengths = len(skip_first_batches(loader, skipped)), len(rest), len(loader)
            loader.set_epoch(0)
            return told, [told_by(loader) for _ in range(2)], lengths

        for told, whole, lengths in on_ranks(2, same(loader_over(n, 3)), look, tail=tail.value):
            assert told == [whole[0][skipped:], whole[1]], (n, skipped)
            assert lengths == (len(whole[0][skipped:]), len(whole[0]), len(whole[0]))


KINDS_TO_SKIP: dict[str, Callable[[], DataLoader[Any]]] = {
    **KINDS_OF_LOADER,
    "ids": lambda: loader_over(9, sampler=Endless(range(9))),
    "open batches": lambda: loader_over(9, batch_sampler=Untold([[0, 1], [2], [3, 4], [5]])),
    "random subset": lambda: loader_over(
        9, sampler=SubsetRandomSampler([4, 2, 8, 1], torch.Generator().manual_seed(1))
    ),
    "own class": lambda: of_class(Own, 9),
}


@pytest.mark.parametrize("kind", KINDS_TO_SKIP)
@pytest.mark.parametrize("prepared", [False, True])
def test_skipping_keeps_the_order_and_loads_nothing_on_the_way(kind: str, prepared: bool) -> None:
    def passes(skipped: int | None) -> tuple[list[Batches], list[int]]:
        torch.manual_seed(4)
        loader, seen = KINDS_TO_SKIP[kind](), list[int]()
        items: Any = Seen(loader.dataset, seen)
        loader.__dict__["dataset"] = items
        if prepared:
            loader = prepare_data_loader(loader)
        skipping = loader if skipped is None else skip_first_batches(loader, skipped)
        torch.manual_seed(5)
        first = [batch.reshape(-1).tolist() for batch in skipping]
        loaded = list(seen)
        return [first, [batch.reshape(-1).tolist() for batch in skipping]], loaded

    whole, _ = passes(None)
    for skipped in range(6):
        rest, loaded = passes(skipped)
        assert rest == [whole[0][skipped:], whole[1]]
        scale = -3 if kind == "own class" else 1
        assert [one * scale for one in loaded] == flat(rest[0])


class Seen(Dataset[Any]):
    """Notes which samples are loaded."""

    def __init__(self, items: Any, seen: list[int]) -> None:
        self.items = items
        self.seen = seen

    def __getitem__(self, index: int) -> Any:
        self.seen.append(index)
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)


def test_skips_of_a_skip_add_up() -> None:
    plain = loader_over(12)
    always = DataLoaderShard(torch.arange(12), skip_batches=2, batch_size=2)
    for loader in (plain, prepare_data_loader(plain), always):
        base = 2 if loader is always else 0
        skipping = skip_first_batches(skip_first_batches(loader, 1), 2)
        assert len(skipping) == 3 - base
        whole = batches_of(plain)
        assert batches_of(skipping) == whole[3 + base :]
        assert batches_of(skipping) == whole[base:]
        assert len(skipping) == 6 - base


def test_skipping_keeps_every_setting() -> None:
    loader = prepare_data_loader(
        loader_over(7, pin_memory=False, collate_fn=default_collate, timeout=0),
        device="meta",
        put_on_device=True,
        num_processes=2,
        process_index=0,
        non_blocking=True,
        tail="exact",
    )
    skipping = skip_first_batches(loader, 1)
    assert (skipping.tail, skipping.shard) == (Tail.EXACT, Shard(0, 2))  # type: ignore[attr-defined]
    assert [batch.device.type for batch in skipping] == ["meta"]
    samples: Any = torch.arange(7)
    plain = Own(samples, batch_size=2, drop_last=True, collate_fn=default_collate)
    skipped = skip_first_batches(plain, 1)
    assert type(skipped) is Own
    assert (skipped.drop_last, skipped.collate_fn, skipped.batch_size) == (True, default_collate, 2)
    assert batches_of(skipped) == [[-6, -9], [-12, -15]]


def test_a_loader_that_was_skipped_can_be_prepared() -> None:
    def look(loader: DataLoaderShard) -> Any:
        return len(loader), batches_of(loader), len(loader), batches_of(loader)

    def loader_of(_rank: int) -> DataLoader[Any]:
        return skip_first_batches(loader_over(11), 2)

    assert on_ranks(2, loader_of, look) == [
        (2, [[4, 5], [8, 9]], 3, [[0, 1], [4, 5], [8, 9]]),
        (2, [[6, 7], [10, 4]], 3, [[2, 3], [6, 7], [10, 0]]),
    ]


# Data that was cut before.


def cut_loader(
    n: int, count: int, rank: int, kind: type[Any] = DistributedSampler, **options: Any
) -> DataLoader[Any]:
    data: Any = range(n)
    return loader_over(n, sampler=kind(data, count, rank, shuffle=False), **options)


def test_a_distributed_sampler_is_not_cut_again() -> None:
    def look(loader: DataLoaderShard) -> Any:
        return batches_of(loader), len(loader)

    assert on_ranks(2, lambda rank: cut_loader(16, 2, rank), look) == [
        ([[0, 2], [4, 6], [8, 10], [12, 14]], 4),
        ([[1, 3], [5, 7], [9, 11], [13, 15]], 4),
    ]


@pytest.mark.parametrize("kind", [DistributedSampler, StatefulDistributedSampler])
def test_the_padding_of_a_distributed_sampler_is_padding(kind: type[Any]) -> None:
    def look(loader: DataLoaderShard) -> Any:
        own = [(told.rows, told.valid_rows, told.is_last) for told in told_by(loader)]
        of_all = loader.total_dataset_length, loader.total_batch_size, loader.remainder
        return own, of_all, loader.shard, loader.is_in_step

    assert on_ranks(3, lambda rank: cut_loader(7, 3, rank, kind), look) == [
        ([((0, 3), 2, False), ((6,), 1, True)], (7, 6, 1), Shard(0, 3), None),
        ([((1, 4), 2, False), ((0,), 0, True)], (7, 6, 1), Shard(1, 3), None),
        ([((2, 5), 2, False), ((1,), 0, True)], (7, 6, 1), Shard(2, 3), None),
    ]


def test_ready_batches_of_a_distributed_sampler() -> None:
    def loader_of(rank: int) -> DataLoader[Any]:
        sampler: Any = DistributedSampler(Ready(), 2, rank, shuffle=False)
        return DataLoader(Ready(), batch_size=None, sampler=sampler)

    def look(loader: DataLoaderShard) -> Any:
        return [(len(batch), loader.valid_rows) for batch in loader]

    assert on_ranks(2, loader_of, look) == [[(1, 1), (3, 3), (5, 5)], [(2, 2), (4, 4), (1, 0)]]


def test_ranks_may_have_parts_of_different_lengths_if_the_user_says_that_they_are_parts() -> None:
    def look(loader: DataLoaderShard) -> Any:
        own = batches_of(loader), loader.total_dataset_length, loader.remainder
        return (*own, loader.total_batch_size)

    assert on_ranks(2, lambda rank: loader_over(3 + rank), look, already_sharded=True) == [
        ([[0, 1], [2]], None, -1, 4),
        ([[0, 1], [2, 3]], None, -1, 4),
    ]


def test_each_rank_is_asked_for_its_own_part_only() -> None:
    by_rank = on_ranks(
        2, lambda rank: loader_over(8, sampler=[3 * rank, 3 * rank + 1]), already_sharded=True
    )
    assert by_rank == [[[0, 1]], [[3, 4]]]


def test_a_part_is_shuffled_by_seed_and_epoch() -> None:
    def loader_of(rank: int) -> DataLoader[Any]:
        samples: Any = torch.arange(6) + 6 * rank
        return DataLoader(samples, batch_size=3, shuffle=True)

    def look(loader: DataLoaderShard) -> Any:
        before = torch.get_rng_state()
        epochs = [flat(batches_of(loader)) for _ in range(2)]
        assert torch.equal(torch.get_rng_state(), before)
        return epochs

    options: dict[str, Any] = {"use_seedable_sampler": True, "data_seed": 9}
    by_rank = on_ranks(2, loader_of, look, already_sharded=True, **options)
    orders = [order_of(9 + epoch, 6) for epoch in range(2)]
    assert by_rank == [[[one + 6 * rank for one in order] for order in orders] for rank in range(2)]


def test_a_distributed_sampler_of_one_is_divided() -> None:
    assert on_ranks(2, lambda _: cut_loader(8, 1, 0)) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


# What ranks say to each other.

FACTS_BYTES = 8 * 6  # whether it failed, epoch, position, seed, steps, fingerprint


def test_a_pass_is_one_small_message() -> None:
    for loader_of in (same(loader_over(9)), shuffling_of, lambda _: loader_over(9, sampler=[2, 1])):

        def body(comm: LockstepComm, loader_of: Any = loader_of) -> Any:
            loader = prepare_data_loader(loader_of(comm.rank), comm=comm, rng_types=("generator",))
            before = len(comm.calls)
            for _ in range(2):
                list(loader)
            next(iter(loader))
            list(skip_first_batches(loader, 1))
            len(loader)
            assert before == 1
            return comm.calls[before:]

        for calls in run_ranks(2, body):
            assert calls == [("all_gather_ints", FACTS_BYTES)] * 4


def shuffling_of(rank: int) -> DataLoader[Any]:
    return shuffling(9, rank)


def test_a_loader_that_is_not_divided_says_nothing() -> None:
    def body(comm: LockstepComm) -> int:
        list(DataLoaderShard(torch.arange(3 + comm.rank), comm=comm))
        shard = BatchSamplerShard(BatchSampler(range(8), 2, False), 2, comm.rank)
        list(DataLoaderShard(torch.arange(8), batch_sampler=shard, comm=comm))
        drawn = loader_over(sampler=[comm.rank, 2, 3, 4])
        simulated = prepare_data_loader(
            drawn, num_processes=3, process_index=1, comm=comm, sync_order="broadcast"
        )
        assert batches_of(simulated) == [[3, 4]]
        return len(comm.calls)

    assert run_ranks(2, body) == [0, 0]


def test_a_loader_built_directly_makes_generators_equal_if_it_is_asked_to() -> None:
    def body(comm: LockstepComm) -> Any:
        generator = torch.Generator().manual_seed(comm.rank)
        loader = DataLoaderShard(torch.arange(4), None, ["generator"], generator, comm=comm)
        drawn = [torch.rand(2, generator=generator).tolist() for _ in loader]
        return drawn, [call.name for call in comm.calls]

    first, second = run_ranks(2, body)
    assert first == second
    assert first[1] == ["broadcast_object"]


@pytest.mark.parametrize("kind", ["generator", "torch"])
def test_generators_that_are_made_equal_make_orders_equal(kind: str) -> None:
    def over(comm: LockstepComm) -> DataLoaderShard:
        data: Any = range(8)
        generator = torch.Generator().manual_seed(comm.rank + 3) if kind == "generator" else None
        shuffle = BatchSampler(RandomSampler(data, generator=generator), 2, False)
        part = BatchSamplerShard(shuffle, 2, comm.rank)
        return DataLoaderShard(
            torch.arange(8), None, [kind], generator, batch_sampler=part, comm=comm
        )

    def body(comm: LockstepComm) -> Any:
        loader = over(comm)
        epochs = [batches_of(loader) for _ in range(2)]
        next(iter(loader))
        again = over(comm)
        again.load_state_dict(loader.state_dict())
        return epochs, batches_of(loader), [batches_of(again) for _ in range(2)]

    by_rank = run_ranks(2, body)
    for epoch in range(2):
        rows = all_rows([epochs[epoch] for epochs, *_ in by_rank])
        assert sorted(rows) == list(range(8))
        if kind == "generator":
            assert rows == torch.randperm(8, generator=seeded_with(3 + epoch)).tolist()
    for _, fourth, resumed in by_rank:
        assert (len(resumed[0]), resumed[1]) == (1, fourth)


def seeded_with(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_generator_of_a_sampler_that_draws_is_made_equal_to_rank_0s() -> None:
    def body(comm: LockstepComm) -> Any:
        generator = torch.Generator().manual_seed(comm.rank)
        sampler = Subset(range(10, 19), generator)
        loader = prepare_data_loader(
            loader_over(19, sampler=sampler), rng_types=["generator"], comm=comm
        )
        epochs = [batches_of(loader) for _ in range(2)]
        return epochs, [call.name for call in comm.calls]

    by_rank = run_ranks(2, body)
    generator = torch.Generator().manual_seed(0)
    for epoch in range(2):
        order = list(SubsetRandomSampler(range(10, 19), generator))
        assert all_rows([own[epoch] for own, _ in by_rank]) == order + order[:3]
    assert by_rank[0][1] == [
        "all_gather_ints",
        *["broadcast_object", "all_gather_ints"] * 2,
    ]


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("kind", ["subset", "weighted"])
def test_draws_of_torchs_samplers_are_those_of_a_seed_on_all_ranks(
    kind: str, dispatch: bool
) -> None:
    def sampler_of(generator: torch.Generator) -> Any:
        if kind == "subset":
            return SubsetRandomSampler(range(10, 18), generator)
        return WeightedRandomSampler([1.0] * 19, 8, generator=generator)

    def over(comm: LockstepComm, seed: int) -> Any:
        user = loader_over(19, sampler=sampler_of(torch.Generator().manual_seed(seed)))
        return prepare_data_loader(user, comm=comm, dispatch_batches=dispatch)

    def body(comm: LockstepComm) -> Any:
        loader = over(comm, 5 + comm.rank)
        epochs = [batches_of(loader) for _ in range(2)]
        next(iter(loader))
        state = json.loads(json.dumps(loader.state_dict()))
        again = over(comm, 5 + comm.rank)
        again.load_state_dict(state)
        return epochs, state, [batches_of(again) for _ in range(2)]

    by_rank = run_ranks(2, body)
    due = [list(sampler_of(torch.Generator().manual_seed(5 + epoch))) for epoch in range(4)]
    for epoch in range(2):
        assert all_rows([epochs[epoch] for epochs, *_ in by_rank]) == due[epoch]
    state = by_rank[0][1]
    assert len(json.dumps(state)) < 1024
    assert (state["epoch"], state["consumed"], state["seed"]) == (2, 4, 5)
    rests = [rest for *_, rest in by_rank]
    assert all_rows([rest[0] for rest in rests]) == due[2][4:]
    assert all_rows([rest[1] for rest in rests]) == due[3]


def test_an_order_that_differs_between_ranks_is_an_error_that_names_the_sampler() -> None:
    cases: dict[str, Callable[[int], DataLoader[Any]]] = {
        "Subset": lambda rank: loader_over(
            9, sampler=Subset(range(9), torch.Generator().manual_seed(rank))
        ),
        "list": lambda rank: loader_over(9, sampler=[rank, 2, 3]),
        "Endless": lambda rank: loader_over(9, sampler=Endless([rank, 2, 3])),
        "Listed": lambda rank: loader_over(9, batch_sampler=Listed([[rank, 2], [3]])),
        # Not that of the sampler inside, which is in order.
        "Reversed": lambda rank: loader_over(8, batch_sampler=Reversed([[rank, 2], [3]])),
    }
    for name, loader_of in cases.items():
        messages = errors_on(2, loader_of)
        for message in messages:
            assert message.startswith(
                f"CommError: Ranks disagree on the fingerprint of the order of the loader over "
                f"{name}: rank 0 has "
            ), message
            assert message.endswith(
                ". Its sampler draws another order on each rank: seed it alike on all ranks, pass "
                'rng_types, or sync_order="broadcast" to use that of rank 0.'
            ), message


def errors_on(
    world_size: int,
    loader_of: Callable[[int], DataLoader[Any]],
    look: Callable[[Any], Any] = batches_of,
    **options: Any,
) -> list[str]:
    """What is raised on each rank."""

    def body(comm: LockstepComm) -> str:
        try:
            look(prepare_data_loader(loader_of(comm.rank), comm=comm, **options))
        except Exception as error:  # noqa: BLE001  # whatever it is, it is told
            return f"{type(error).__name__}: {error}"
        return "nothing"

    return run_ranks(world_size, body)


def test_orders_of_rank_0_can_be_sent() -> None:
    cases: list[Callable[[int], DataLoader[Any]]] = [
        lambda rank: loader_over(9, sampler=[rank, 2, 3, 4 + rank]),
        lambda rank: loader_over(9, sampler=Endless([rank, 2, 3, 4 + rank])),
        lambda rank: loader_over(9, batch_sampler=Listed([[rank, 2], [3, 4 + rank]])),
    ]
    for loader_of in cases:
        expected = [[[0, 2]], [[3, 4]]]
        assert on_ranks(2, loader_of, sync_order="broadcast") == expected
        assert errors_on(2, loader_of)[0].startswith("CommError: Ranks disagree on the fingerprint")


def test_an_order_by_value_is_not_sent() -> None:
    def body(comm: LockstepComm) -> Any:
        shuffled = prepare_data_loader(shuffling(9, comm.rank), sync_order="broadcast", comm=comm)
        epochs = [batches_of(shuffled) for _ in range(2)]
        before = [call.name for call in comm.calls]
        batches = [[0, 1], [2, 3]][:: 1 - 2 * comm.rank]
        custom = loader_over(8, batch_sampler=Reversed(batches))
        sent = prepare_data_loader(custom, sync_order="broadcast", comm=comm)
        return epochs, before, batches_of(sent)

    by_rank = run_ranks(2, body)
    for epoch in range(2):
        order = order_of(50 + epoch, 9)
        assert all_rows([own[0][epoch] for own in by_rank]) == order + order[:3]
    assert by_rank[0][1] == ["all_gather_ints"] * 3
    assert [own[2] for own in by_rank] == [[[0, 1]], [[2, 3]]]


# What is different on some rank, or fails there, is an error on all.

DISAGREE = "CommError: Ranks disagree on the {} of the loader: rank 0 has {}, rank 1 has {}. {}"


@pytest.mark.parametrize(
    ("loader_of", "message"),
    [
        (
            lambda rank: loader_over(8 + rank),
            DISAGREE.format(
                "number of samples",
                8,
                9,
                "Give every rank the same data set, or pass already_sharded=True.",
            ),
        ),
        (
            lambda rank: loader_over(8, 2 + rank),
            DISAGREE.format("batch size", 2, 3, "Prepare the same loader on every rank."),
        ),
        (
            lambda rank: loader_over(8, 2, drop_last=bool(rank)),
            DISAGREE.format(
                "way batches are divided", 0, 2, "Pass the same options on every rank."
            ),
        ),
    ],
)
def test_loaders_that_differ_are_an_error_on_all_ranks(
    loader_of: Callable[[int], DataLoader[Any]], message: str
) -> None:
    assert errors_on(2, loader_of) == [message] * 2


class Fails:
    """A length that one rank cannot tell."""

    def __init__(self, rank: int, bad: int) -> None:
        self.is_bad = rank == bad

    def __len__(self) -> int:
        if self.is_bad:
            raise OSError("index.bin is missing")
        return 6

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_length_that_fails_on_one_rank_is_an_error_on_all(bad: int) -> None:
    data: Any = [Fails(rank, bad) for rank in range(3)]
    loaders = [DataLoader(each) for each in data]
    messages = errors_on(3, lambda rank: loaders[rank])
    told = "CommError: Another rank could not go on: "
    expected = [f"{told}rank {bad} failed with OSError: index.bin is missing"] * 3
    expected[bad] = "OSError: index.bin is missing"
    assert messages == expected


class FailsToDraw(Listed):
    def __init__(self, rank: int, *, in_epoch: bool) -> None:
        super().__init__([[0], [1]])
        self.rank = rank
        self.in_epoch = in_epoch

    def __iter__(self) -> Iterator[list[int]]:
        if self.rank == 1 and not self.in_epoch:
            raise KeyError("bucket 7")
        return super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        if self.rank == 1 and self.in_epoch:
            raise KeyError("bucket 7")


@pytest.mark.parametrize("in_epoch", [False, True])
def test_a_sampler_that_fails_on_one_rank_is_an_error_on_all(in_epoch: bool) -> None:
    messages = errors_on(
        2, lambda rank: loader_over(batch_sampler=FailsToDraw(rank, in_epoch=in_epoch))
    )
    assert messages == [
        "CommError: Another rank could not go on: rank 1 failed with KeyError: 'bucket 7'",
        "KeyError: 'bucket 7'",
    ]


OF_PASS = (
    "CommError: Ranks disagree on the {} of the loader over SequentialSampler: rank 0 has {}, "
    "rank 1 has {}. {}"
)


def test_passes_that_differ_are_an_error_on_all_ranks() -> None:
    def body(comm: LockstepComm, what: str) -> str:
        data = list(range(8))
        samples: Any = data
        loader = prepare_data_loader(DataLoader(samples, batch_size=2), comm=comm)
        if what == "epoch":
            loader.set_epoch(3 + comm.rank)
        elif what == "position":
            loader = skip_first_batches(loader, 1 + comm.rank)  # type: ignore[assignment]
        elif comm.rank:
            data.append(8)  # since it was prepared
        with pytest.raises(CommError) as caught:
            next(iter(loader))
        return f"CommError: {caught.value}"

    expected = {
        "epoch": ("epoch", 3, 4, "Call set_epoch() with the same value on every rank."),
        "position": ("position", 1, 2, "Start the pass at the same step on every rank."),
        "length": ("number of steps", 2, 3, "Give every rank the same data set and sampler."),
    }
    for what, facts in expected.items():
        assert run_ranks(2, body, what) == [OF_PASS.format(*facts)] * 2


def test_loaders_that_were_prepared_apart_do_not_go_together() -> None:
    def body(comm: LockstepComm) -> str:
        loaders = [prepare_data_loader(shuffling(6, rank), comm=comm) for rank in range(2)]
        with pytest.raises(CommError) as caught:
            next(iter(loaders[comm.rank]))
        return str(caught.value)

    message = (
        "Ranks disagree on the seed of the loader over SeedableRandomSampler: rank 0 has 50, "
        "rank 1 has 51. Prepare the loader on every rank."
    )
    assert run_ranks(2, body) == [message] * 2


# Data that is not what it says.


def test_ids_that_are_out_of_range_are_the_data_sets_error() -> None:
    class Ten(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            if not 0 <= index < 10:
                raise IndexError(f"{index} is not one of 10")
            return index

    loader = DataLoader(Ten(), batch_size=2, sampler=[1, 2, 3, 70])
    messages = errors_on(2, same(loader))
    assert messages == ["nothing", "IndexError: 70 is not one of 10"]


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (3, "makes 2 steps, got more. "),
        (20, "makes 10 steps, got an end after 4 steps. "),
    ],
)
def test_a_sampler_that_lies_about_its_length_is_an_error(length: int, message: str) -> None:
    class Lies(Endless):
        def __len__(self) -> int:
            return length

    loader = prepare_data_loader(loader_over(8, sampler=Lies(range(8))))
    with pytest.raises(PlanError, match="`sampler` must yield as much as its length says") as told:
        list(loader)
    assert message in str(told.value)


def test_a_data_set_longer_than_it_says_is_read_as_far_as_it_says() -> None:
    class Modest(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return list(range(100))[index]

        def __len__(self) -> int:
            return 5

    assert on_ranks(2, same(DataLoader(Modest(), batch_size=2))) == [
        [[0, 1], [4, 0]],
        [[2, 3], [1, 2]],
    ]


def test_a_data_set_shorter_than_it_says_is_the_data_sets_error() -> None:
    class Boasts(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return list(range(3))[index]

        def __len__(self) -> int:
            return 5

    with pytest.raises(IndexError):
        list(prepare_data_loader(DataLoader(Boasts(), batch_size=2)))


def test_a_data_set_may_grow_between_epochs() -> None:
    data = list(range(4))
    samples: Any = data
    for shuffle in (False, True):
        loader = prepare_data_loader(DataLoader(samples, batch_size=2, shuffle=shuffle))
        assert sorted(flat(batches_of(loader))) == list(range(len(data)))
        data += range(len(data), len(data) + 3)
        assert sorted(flat(batches_of(loader))) == list(range(len(data)))
        assert len(loader) == -(-len(data) // 2)


def test_an_error_of_the_data_ends_the_pass_and_the_next_one_is_another_epoch() -> None:
    class Sometimes(ListeningData):
        def __getitem__(self, index: int) -> int:
            if self.told[-1] == 0 and index == 2:
                raise ValueError("torn page")
            return index

    loader = prepare_data_loader(DataLoader(Sometimes(), batch_size=2))
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(ValueError, match="torn page"):
        next(iterator)
    assert batches_of(loader) == [[0, 1], [2, 3]]
    assert loader.epoch == 2


def test_random_samplers_keep_their_number_of_draws() -> None:
    def loader_of(rank: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(60 + rank)
        sampler = RandomSampler(range(5), num_samples=12, generator=generator)
        return loader_over(5, 3, sampler=sampler)

    expected = list(
        RandomSampler(range(5), num_samples=12, generator=torch.Generator().manual_seed(60))
    )
    assert all_rows(on_ranks(2, loader_of)) == expected
