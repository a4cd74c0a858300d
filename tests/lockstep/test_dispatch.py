"""The dispatcher, on many ranks in one process: what each rank sees, and what is told to all."""

from __future__ import annotations

import copy
import json
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
)

from shardplug import (
    BatchError,
    CommError,
    DataLoaderDispatcher,
    DataLoaderShard,
    IterableDatasetShard,
    PlanError,
    Shard,
    ShardplugWarning,
    SoloComm,
    StateError,
    gather_for_metrics,
    prepare_data_loader,
    skip_first_batches,
    slice_tensors,
)
from shardplug.dividing import Options
from shardplug.plan.split import Split, Tail
from shardplug.testing import LockstepComm, run_ranks
from tests import laws, reference
from tests.laws import Case, Leg, RankRun, Run, Step
from tests.streams import Ids, Parts, SizedIds, error_of, parts_of

WORLDS = range(1, 5)
SIZES = (0, 1, 3, 5, 8, 13, 16)
NUM_EPOCHS = 2


def numbers(num_samples: int) -> Any:
    """Sample i is i."""
    return torch.arange(num_samples)


def dispatched(loader: Any, comm: LockstepComm, **options: Any) -> DataLoaderDispatcher:
    """Prepare a loader that only the reader has."""
    own = loader if comm.rank == 0 else None
    made = prepare_data_loader(own, dispatch_batches=True, comm=comm, **options)
    assert isinstance(made, DataLoaderDispatcher)
    return made


def how(case: Case) -> dict[str, Any]:
    return {"split_batches": case.split_batches, "tail": case.tail.value}


def read(loader: Any) -> tuple[int | None, list[Any]]:
    """Read two epochs, with all that is told about each batch."""
    seen = []
    for epoch in range(NUM_EPOCHS):
        for batch in loader:
            consumed = loader.state_dict()["consumed"]
            told = (loader.valid_rows, loader.num_rows, loader.end_of_dataloader, loader.epoch)
            seen.append((epoch, laws.ids_of(batch), consumed, *told))
    return laws.length_of(loader), seen


class Unsized(Sampler[int]):
    """A user's sampler that does not say how much it yields."""

    def __init__(self, num_ids: int) -> None:
        self.num_ids = num_ids

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_ids))


class Varying(BatchSampler):
    """A user's batch sampler whose batches have 2, 1, 2, 1, ... rows."""

    def __init__(self, num_ids: int) -> None:
        ids, sizes = list(range(num_ids)), [0]
        while sizes[-1] < num_ids:
            sizes.append(min(num_ids, sizes[-1] + 1 + len(sizes) % 2))
        self.batches = [ids[start:stop] for start, stop in pairwise(sizes)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Batches(IterableDataset[Any]):
    """Ready batches of 1, 2, 1, 2, ... rows."""

    def __init__(self, num_batches: int) -> None:
        self.batches = [torch.full((1 + at % 2,), at) for at in range(num_batches)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def shuffle(num_samples: int, batch_size: int) -> DataLoader[Any]:
    if not num_samples:
        return DataLoader(numbers(0), batch_size)
    generator = torch.Generator().manual_seed(3)
    return DataLoader(numbers(num_samples), batch_size, shuffle=True, generator=generator)


KINDS: dict[str, Callable[[int, int], DataLoader[Any]]] = {
    "shuffle": shuffle,
    "user's sampler": lambda n, size: DataLoader(numbers(n), size, sampler=Unsized(n)),
    "stream": lambda n, size: DataLoader(Ids(n), size),
    "stream with a length": lambda n, size: DataLoader(SizedIds(n), size),
    "user's batches": lambda n, _: DataLoader(numbers(n), batch_sampler=Varying(n)),
    "ready batches": lambda n, _: DataLoader(torch.arange(2 * n).view(n, 2), None),  # type: ignore[arg-type]
    "stream of batches": lambda n, _: DataLoader(Batches(n), None),
}
CANNOT_SPLIT = ("user's batches", "ready batches", "stream of batches")


def outcomes(comm: LockstepComm, kind: str, cases: Sequence[Case], is_dispatched: bool) -> Any:
    """Read each case, or say why it cannot be."""
    seen: list[Any] = []
    for case in cases:
        loader = KINDS[kind](case.num_samples, case.batch_size)
        options = {**how(case), "dispatch_batches": is_dispatched, "comm": comm}
        try:
            prepared = prepare_data_loader(loader, **options)
            seen.append((*read(prepared), prepared.remainder, prepared.total_batch_size))
        except PlanError as error:
            seen.append(str(error))
    return seen


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_sees_what_its_own_loader_would_have_read(kind: str, world_size: int) -> None:
    cases = [
        Case(num_samples, 2 * world_size if split is Split.SLICE else 2, world_size, split, tail)
        for tail, split, num_samples in product(Tail, Split, SIZES)
        if split is Split.WHOLE or kind not in CANNOT_SPLIT
    ]
    one_reads = run_ranks(world_size, outcomes, kind, cases, True)
    all_read = run_ranks(world_size, outcomes, kind, cases, False)
    for rank in range(world_size):
        for case, got, due in zip(cases, one_reads[rank], all_read[rank], strict=True):
            assert got == due, (case, rank)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("kind", [Ids, SizedIds, numbers])
def test_the_laws_hold(kind: Any, world_size: int) -> None:
    def run_of(case: Case) -> Run:
        def one_rank(comm: LockstepComm) -> RankRun:
            loader = DataLoader(kind(case.num_samples), case.batch_size)
            return laws.loader_rank(dispatched(loader, comm, **how(case)))

        return tuple(run_ranks(world_size, one_rank))

    for tail, num_samples in product(Tail, (1, 5, 12)):
        case = laws.as_prepared(Case(num_samples, 2, world_size, tail=tail))
        try:
            reference.rounds(case)
        except reference.Impossible:
            assert type(error_of(partial(run_of, case))) is PlanError
            continue
        is_sized = kind is not Ids
        laws.one_pass(run_of, case, is_sized=is_sized, is_end_known=is_sized)


# The values of the contract, by hand.


def test_sixteen_samples_with_one_step_skipped() -> None:
    def rows(comm: LockstepComm) -> Any:
        data = numbers(16) if comm.rank == 0 else None
        loader = DataLoaderDispatcher(data, skip_batches=1, batch_size=2, comm=comm)
        # The steps are left out of each pass.
        return len(loader), [[batch.tolist() for batch in loader] for _ in range(2)]

    first, second = run_ranks(2, rows)
    assert first == (3, [[[4, 5], [8, 9], [12, 13]]] * 2)
    assert second == (3, [[[6, 7], [10, 11], [14, 15]]] * 2)


def test_five_samples() -> None:
    def rows(comm: LockstepComm) -> Any:
        loader = dispatched(DataLoader(numbers(5), 2), comm)
        return [(batch.tolist(), loader.valid_rows) for batch in loader]

    assert run_ranks(2, rows) == [[([0, 1], 2), ([4, 0], 1)], [([2, 3], 2), ([1, 2], 0)]]


def test_ragged_batches() -> None:
    def collate(ids: list[int]) -> torch.Tensor:
        return torch.full((len(ids), 1 + max(ids)), ids[0])

    def shapes(comm: LockstepComm) -> Any:
        loader = dispatched(DataLoader(Ids(8), 2, collate_fn=collate), comm)
        return [(tuple(batch.shape), int(batch[0, 0])) for batch in loader]

    assert run_ranks(2, shapes) == [[((2, 2), 0), ((2, 6), 4)], [((2, 4), 2), ((2, 8), 6)]]


class Records(Dataset[Any]):
    """Samples of all kinds of fields, each with its number."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, at: int) -> Any:
        return {"x": torch.tensor([at]), "name": f"n{at}", "raw": bytes([at])}


def gathered(samples: list[Any]) -> Any:
    fields: dict[str, Any] = {key: [each[key] for each in samples] for key in ("name", "raw")}
    fields.update(x=torch.cat([each["x"] for each in samples]), flag=True, meta=None, rate=0.5)
    return fields


def test_fields_of_any_kind_follow_their_samples() -> None:
    def fields(comm: LockstepComm) -> Any:
        loader = dispatched(DataLoader(Records(8), 2, collate_fn=gathered), comm)
        return [{**batch, "x": batch["x"].tolist()} for batch in loader]

    for rank, seen in enumerate(run_ranks(2, fields)):
        for step, batch in enumerate(seen):
            ids = [4 * step + 2 * rank, 4 * step + 2 * rank + 1]
            assert batch == {
                "x": ids,
                "name": [f"n{each}" for each in ids],
                "raw": [bytes([each]) for each in ids],
                "flag": True,
                "meta": None,
                "rate": 0.5,
            }


# Only the reader has the data.


class Counted(Dataset[int]):
    """Counts who reads it."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.num_read = 0

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, at: int) -> int:
        self.num_read += 1
        return at


def test_no_other_rank_reads_though_it_has_the_data() -> None:
    def num_read(comm: LockstepComm) -> int:
        data = Counted(12)
        loader = DataLoader(data, 2)
        assert len(list(prepare_data_loader(loader, dispatch_batches=True, comm=comm))) == 2
        return data.num_read

    assert run_ranks(3, num_read) == [12, 0, 0]


@pytest.mark.parametrize("nothing", [None, DataLoader(None, 2, num_workers=2)])  # type: ignore[arg-type]
def test_other_ranks_need_no_data(nothing: Any) -> None:
    def facts(comm: LockstepComm) -> Any:
        loader = DataLoader(numbers(11), 2, shuffle=True) if comm.rank == 0 else nothing
        prepared = prepare_data_loader(
            loader, dispatch_batches=True, use_seedable_sampler=True, data_seed=4, comm=comm
        )
        told = (len(prepared), prepared.remainder, prepared.total_batch_size, prepared.batch_size)
        return (*told, prepared.total_dataset_length, prepared.plan.tail, prepared.is_in_step)

    # 11 samples in rounds of 4: three steps, three real rows in the last.
    assert run_ranks(2, facts) == [(3, 3, 4, 2, 11, Tail.PAD, True)] * 2


def test_a_reader_without_data_is_an_error_on_all() -> None:
    def message(comm: LockstepComm) -> str:
        data = None if comm.rank == 0 else numbers(4)
        with pytest.raises(PlanError) as raised:
            DataLoaderDispatcher(data, batch_size=2, comm=comm)
        return str(raised.value)

    assert (
        run_ranks(2, message)
        == [
            "`dataset` must be there on rank 0, which reads for all, got None. Give that rank the "
            "data; the others need none."
        ]
        * 2
    )


def test_options_that_only_the_data_can_refuse_are_refused_on_all() -> None:
    def message(comm: LockstepComm) -> str:
        with pytest.raises(PlanError) as raised:
            dispatched(DataLoader(numbers(7), 1), comm, tail="exact")
        return str(raised.value)

    first, second = run_ranks(2, message)
    assert first == second
    assert first.startswith("`num_samples` must be a multiple of the 2 shards with tail='exact'")


def test_other_arguments_of_the_loader_may_be_there_without_data() -> None:
    def rows(comm: LockstepComm) -> Any:
        data = numbers(8) if comm.rank == 0 else None
        loader = DataLoaderDispatcher(data, batch_size=2, shuffle=True, comm=comm)
        assert loader.batch_size == 2
        return [row for batch in loader for row in batch.tolist()]

    first, second = run_ranks(2, rows)
    assert sorted(first + second) == list(range(8))


# Which loaders are dispatched.


def test_streams_are_dispatched_unless_they_are_cut_already() -> None:
    def kinds(comm: LockstepComm) -> list[str]:
        cut = IterableDatasetShard(range(8), 2, num_processes=2, process_index=comm.rank)
        given: tuple[tuple[DataLoader[Any], dict[str, Any]], ...] = (
            (DataLoader(Ids(8), 2), {}),
            (DataLoader(Parts(parts_of(4, 4)), 2), {}),
            (DataLoader(numbers(8), 2), {}),
            (DataLoader(cut, 2), {}),
            (DataLoader(Ids(8), 2), {"already_sharded": True}),
            (DataLoader(Ids(8), 2), {"dispatch_batches": False}),
            (DataLoader(Ids(8), 2), {"num_processes": 3, "process_index": 2}),
        )
        made = [prepare_data_loader(loader, comm=comm, **options) for loader, options in given]
        return [type(each).__name__ for each in made]

    due = ["DataLoaderDispatcher"] * 2 + ["DataLoaderShard"] * 5
    assert run_ranks(2, kinds) == [due, due]


def test_alone_a_stream_is_not_dispatched_unless_asked() -> None:
    assert isinstance(prepare_data_loader(DataLoader(Ids(3)), comm=SoloComm()), DataLoaderShard)
    loader = prepare_data_loader(DataLoader(Ids(3)), dispatch_batches=True, comm=SoloComm())
    assert isinstance(loader, DataLoaderDispatcher)
    before = threading.active_count()
    assert [(batch.tolist(), threading.active_count()) for batch in loader] == [
        ([each], before) for each in range(3)
    ]


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "sharded": (
        DataLoader(Ids(4)),
        {"already_sharded": True},
        "`already_sharded` must be False or None with dispatch_batches=True, got True: one rank "
        "reads for all. Leave one of them out.",
    ),
    "simulated": (
        DataLoader(Ids(4)),
        {"num_processes": 3, "process_index": 1},
        "`dispatch_batches` must be False or None for a shard that is not this process's own, got "
        "True: nobody would send it. Leave num_processes and process_index out.",
    ),
    "cut": (
        DataLoader(
            numbers(4),
            sampler=DistributedSampler(numbers(4), num_replicas=2, rank=0),
        ),
        {},
        "`dispatch_batches` must be False for data that is cut for each rank already, got True for "
        "that of DistributedSampler. Give the reading rank all of the data, or leave "
        "dispatch_batches out.",
    ),
    "cut stream": (
        DataLoader(IterableDatasetShard(range(8), 2, num_processes=2), 2),
        {},
        "`dispatch_batches` must be False for data that is cut for each rank already, got True for "
        "that of IterableDatasetShard. Give the reading rank all of the data, or leave "
        "dispatch_batches out.",
    ),
    "no loader": (
        [1, 2],
        {},
        "`dataloader` must be a torch.utils.data.DataLoader, got list. Wrap the data in one.",
    ),
    "skipped": (
        DataLoader(numbers(4)),
        {"batches_per_message": 0},
        "`batches_per_message` must be at least 1, got 0.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    loader, options, message = REFUSED[name]
    with pytest.raises(PlanError) as raised:
        prepare_data_loader(loader, dispatch_batches=True, comm=SoloComm(), **options)
    assert str(raised.value) == message


def test_ranks_that_do_not_all_dispatch_are_told() -> None:
    def message(comm: LockstepComm) -> str:
        loader = DataLoader(numbers(4), 2)
        with pytest.raises(CommError) as raised:
            prepare_data_loader(loader, dispatch_batches=comm.rank == 0, comm=comm)
        return str(raised.value)

    first, second = run_ranks(2, message)
    assert first == second
    assert "Ranks disagree on the" in first


# Resume.


def state_of(loader: Any) -> str:
    state = loader.state_dict()
    laws.travels(state)
    return json.dumps(state)


def rest_of(kind: str, case: Case, state: str | None) -> Run:
    """Read what is left of two epochs after a state, on each rank."""

    def one_rank(comm: LockstepComm) -> RankRun:
        loader = dispatched(KINDS[kind](case.num_samples, case.batch_size), comm, **how(case))
        if state is not None:
            loader.load_state_dict(json.loads(state))
        steps = []
        while loader.epoch < NUM_EPOCHS:
            for batch in loader:
                text = state_of(loader)
                consumed = json.loads(text)["consumed"]
                steps.append(Step(laws.ids_of(batch), loader.valid_rows, consumed, text))
        return RankRun(tuple(steps), None)

    return tuple(run_ranks(case.world_size, one_rank))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_the_rest_is_that_of_the_unbroken_run(tail: str, kind: str) -> None:
    laws.resume(partial(rest_of, kind), Case(7, 2, 2, tail=Tail(tail)))


@pytest.mark.parametrize("worlds", [(2, 3), (3, 1), (1, 4), (4, 2)])
@pytest.mark.parametrize("kind", ["stream", "stream with a length"])
def test_it_goes_on_with_another_number_of_ranks(kind: str, worlds: tuple[int, int]) -> None:
    before, after = (laws.as_prepared(Case(24, 2, each)) for each in worlds)

    def one_epoch(case: Case, state: str | None) -> Run:
        def one_rank(comm: LockstepComm) -> RankRun:
            loader = dispatched(KINDS[kind](24, 2), comm, **how(case))
            if state is not None:
                loader.load_state_dict(json.loads(state))
            steps = [
                Step(laws.ids_of(batch), loader.valid_rows, None, state_of(loader))
                for batch in loader
            ]
            return RankRun(tuple(steps), None)

        return tuple(run_ranks(case.world_size, one_rank))

    for num_steps in (1, 2):
        laws.elastic(one_epoch, [Leg(before, num_steps), Leg(after)])


def test_a_state_goes_between_loaders_that_dispatch_and_that_do_not() -> None:
    def rest(comm: LockstepComm, is_dispatched: bool) -> Any:
        loader = shuffle(16, 2)
        first = prepare_data_loader(loader, dispatch_batches=is_dispatched, comm=comm)
        steps = iter(first)
        for _ in range(3):
            next(steps)
        state = first.state_dict()
        steps.close()  # type: ignore[attr-defined]  # a generator
        second = prepare_data_loader(loader, dispatch_batches=not is_dispatched, comm=comm)
        second.load_state_dict(state)
        return [batch.tolist() for batch in second]

    assert run_ranks(2, rest, True) == run_ranks(2, rest, False)
    assert [len(each) for each in run_ranks(2, rest, True)] == [1, 1]


def test_a_state_of_other_data_is_refused_on_all() -> None:
    def message(comm: LockstepComm) -> str:
        state = dispatched(DataLoader(numbers(8), 2), comm).state_dict()
        with pytest.raises(StateError) as raised:
            dispatched(DataLoader(numbers(9), 2), comm).load_state_dict(state)
        return str(raised.value)

    first, second = run_ranks(2, message)
    assert first == second
    assert first.startswith("`num_samples` of the state must be that of the loader, 9, got 8.")


def test_skipping_counts_steps_and_only_once() -> None:
    def rows(comm: LockstepComm) -> Any:
        loader = dispatched(DataLoader(numbers(16), 2), comm)
        skipping = skip_first_batches(loader, 1)
        assert isinstance(skipping, DataLoaderDispatcher)
        promised = len(skipping)
        first = [batch.tolist() for batch in skipping]
        return promised, first, len(skipping), len(list(skipping)), len(list(loader))

    assert run_ranks(2, rows) == [
        (3, [[4, 5], [8, 9], [12, 13]], 4, 4, 4),
        (3, [[6, 7], [10, 11], [14, 15]], 4, 4, 4),
    ]


def test_what_is_skipped_is_not_collated() -> None:
    collated: list[int] = []

    def collate(ids: list[int]) -> torch.Tensor:
        collated.extend(ids)
        return torch.tensor(ids)

    def num_steps(comm: LockstepComm) -> int:
        loader = dispatched(DataLoader(Ids(20), 2, collate_fn=collate), comm)
        return len(list(skip_first_batches(loader, 3)))

    assert run_ranks(2, num_steps) == [2, 2]
    assert collated == [*range(12, 20), 0, 1, 2, 3][: len(collated)]
    assert collated[:8] == list(range(12, 20))


def test_a_skip_keeps_what_metrics_need() -> None:
    def seen(comm: LockstepComm) -> Any:
        loader = skip_first_batches(dispatched(DataLoader(numbers(7), 2), comm), 1)
        return [gather_for_metrics(batch, loader, comm=comm).tolist() for batch in loader]  # type: ignore[arg-type]

    assert run_ranks(2, seen) == [[[4, 5, 6]]] * 2


# Epochs and attributes.


class EachEpoch(Dataset[int]):
    """Samples that tell the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: int) -> int:
        return 10 * self.epoch + at


def test_the_epoch_reaches_the_data_set() -> None:
    def rows(comm: LockstepComm) -> Any:
        loader = dispatched(DataLoader(EachEpoch(), 2), comm)
        first = [batch.tolist() for batch in loader]
        loader.set_epoch(5)
        second = [batch.tolist() for batch in loader]
        if isinstance(loader.sampler, Sampler):
            loader.sampler.set_epoch(7)  # type: ignore[attr-defined]  # as Lightning does
        return [first, second, [batch.tolist() for batch in loader], loader.epoch]

    assert run_ranks(2, rows) == [
        [[[0, 1]], [[50, 51]], [[70, 71]], 8],
        [[[2, 3]], [[52, 53]], [[72, 73]], 8],
    ]


def test_ranks_that_start_different_epochs_are_told() -> None:
    def message(comm: LockstepComm) -> str:
        loader = dispatched(DataLoader(numbers(8), 2), comm)
        loader.set_epoch(comm.rank)
        with pytest.raises(CommError) as raised:
            list(loader)
        return str(raised.value)

    first, second = run_ranks(2, message)
    assert first == second
    assert "Ranks disagree on the epoch of the dispatcher over SequentialSampler" in first


class Tagged(DataLoader[Any]):
    """A user's loader whose batches carry an attribute of it."""

    tag = 0

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch, self.tag


def test_attributes_reach_the_loader_that_iterates() -> None:
    def seen(comm: LockstepComm) -> Any:
        loader = dispatched(Tagged(numbers(4), 2), comm)
        loader.tag = 8
        skipped = skip_first_batches(loader, 0)
        return loader.tag, [(batch.tolist(), tag) for batch, tag in skipped]

    assert run_ranks(2, seen) == [(8, [([0, 1], 8)]), (8, [([2, 3], 8)])]


def test_an_attribute_can_be_deleted() -> None:
    def is_there(comm: LockstepComm) -> bool:
        loader: Any = dispatched(Tagged(numbers(4), 2), comm)
        loader.note = 1
        del loader.note
        return hasattr(loader, "note")

    assert run_ranks(2, is_there) == [False, False]


def test_it_survives_pickling_in_the_middle_of_a_pass() -> None:
    loader = prepare_data_loader(DataLoader(numbers(6), 2), dispatch_batches=True, comm=SoloComm())
    batches = iter(loader)
    next(batches)
    copied = pickle.loads(pickle.dumps(loader))
    batches.close()  # type: ignore[attr-defined]  # a generator
    assert isinstance(copied, DataLoaderDispatcher)
    # As of any prepared loader: a pass that is under way stays behind.
    assert (copied.epoch, [batch.tolist() for batch in copied]) == (1, [[0, 1], [2, 3], [4, 5]])


def test_a_copy_reads_while_the_original_does() -> None:
    def rows(comm: LockstepComm) -> Any:
        loader = dispatched(DataLoader(numbers(12), 2), comm)
        batches = iter(loader)
        first = next(batches).tolist()
        other = [batch.tolist() for batch in copy.copy(loader)]
        return [first, *(batch.tolist() for batch in batches)], other

    for rank, seen in enumerate(run_ranks(2, rows)):
        due = [[4 * step + 2 * rank, 4 * step + 2 * rank + 1] for step in range(3)]
        assert seen == (due, due)


class Remembering(Counted):
    """A data set with a state: how often it has been read."""

    def state_dict(self) -> Any:
        return {"num_read": self.num_read}

    def load_state_dict(self, state: Any) -> None:
        self.num_read = state["num_read"]


def test_states_of_the_data_set_are_those_of_the_steps() -> None:
    def states(comm: LockstepComm) -> Any:
        loader = dispatched(DataLoader(Remembering(12), 2), comm, use_stateful_dataloader=True)
        return [[json.loads(text[5:])[2] for text in loader.rank_state()] for _ in loader]

    # However far it has read ahead; the other rank has none.
    due = [[{"num_read": 4 * step}] for step in (1, 2, 3)]
    assert run_ranks(2, states) == [due, [[]] * 3]


def test_the_batch_sampler_is_not_for_iterating() -> None:
    def message(comm: LockstepComm) -> Any:
        loader = dispatched(DataLoader(numbers(8), 2), comm)
        assert loader.batch_sampler is not None
        with pytest.raises(PlanError) as raised:
            next(iter(loader.batch_sampler))
        return len(loader.batch_sampler), str(raised.value)  # type: ignore[arg-type]

    assert (
        run_ranks(2, message)
        == [
            (
                2,
                "`batch_sampler` of a dispatcher must be left to it, got one that is iterated: one "
                "rank reads for all. Iterate the loader.",
            )
        ]
        * 2
    )


# Model axes.


@pytest.mark.parametrize("shard_of_rank", [(0, 0, 1, 1), (0, 1, 0, 1), (1, 0, 1, 0), (0, 0, 0, 0)])
def test_ranks_of_one_shard_get_copies(shard_of_rank: Sequence[int]) -> None:
    count = max(shard_of_rank) + 1

    def rows(comm: LockstepComm) -> Any:
        loader = DataLoader(numbers(9), 2) if comm.rank == 0 else None
        shard = Shard(shard_of_rank[comm.rank], count)
        options = Options(comm=comm, tail="uneven")
        seen = []
        for batch in DataLoaderDispatcher.dispatching(loader, options, shard):
            seen.append(batch.tolist())
            batch.add_(100)  # theirs alone
        return seen

    batches = [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
    by_rank = run_ranks(4, rows)
    assert by_rank == [batches[index::count] for index in shard_of_rank]


# What goes wrong on the reader.


class OwnError(Exception):
    """A user's error that can be pickled."""


class Unpicklable(Exception):  # noqa: N818  # a user's
    """A user's error that cannot."""

    def __reduce__(self) -> Any:
        raise TypeError("not for travelling")


def failing(error: Exception, at: int) -> Callable[[list[int]], torch.Tensor]:
    def collate(ids: list[int]) -> torch.Tensor:
        if at in ids:
            raise error
        return torch.tensor(ids)

    return collate


@pytest.mark.parametrize("at", [0, 2, 5, 6, 11])
@pytest.mark.parametrize("kind", [Ids, SizedIds, Counted])
def test_what_is_raised_on_the_reader_is_raised_on_all(kind: Any, at: int) -> None:
    def outcome(comm: LockstepComm) -> Any:
        collate = failing(OwnError(f"no {at}"), at)
        loader = dispatched(DataLoader(kind(12), 2, collate_fn=collate), comm)
        error = error_of(lambda: list(loader))
        return type(error), str(error)

    assert run_ranks(3, outcome) == [(OwnError, f"no {at}")] * 3


def test_what_the_data_set_raises_is_raised_on_all() -> None:
    def outcome(comm: LockstepComm) -> Any:
        loader = dispatched(DataLoader(Ids(12, fails_at=7), 2), comm)
        error = error_of(lambda: list(loader))
        return type(error), str(error)

    assert run_ranks(2, outcome) == [(ValueError, "no id 7")] * 2


def test_what_cannot_be_pickled_is_told() -> None:
    def outcome(comm: LockstepComm) -> Any:
        collate = failing(Unpicklable("own"), 5)
        loader = dispatched(DataLoader(numbers(12), 2, collate_fn=collate), comm)
        error = error_of(lambda: list(loader))
        return type(error), str(error)

    assert run_ranks(2, outcome) == [
        (Unpicklable, "own"),
        (CommError, "Rank 0 failed with Unpicklable: own"),
    ]


def test_stop_iteration_does_not_end_the_pass() -> None:
    def outcome(comm: LockstepComm) -> Any:
        stream = DataLoader(Ids(12), 2, collate_fn=failing(StopIteration(), 5))
        error = error_of(lambda: list(dispatched(stream, comm)))
        return type(error), str(error)

    stopped = "The data set or collate function raised StopIteration."
    assert run_ranks(2, outcome) == [(RuntimeError, stopped)] * 2


def test_system_exit_in_the_data_set_is_not_lost() -> None:
    def outcome(comm: LockstepComm) -> str:
        def collate(ids: list[int]) -> Any:
            raise SystemExit(3)

        loader = dispatched(DataLoader(numbers(8), 2, collate_fn=collate), comm)
        try:
            list(loader)
        except SystemExit as error:
            return f"left with {error}"
        except CommError as error:
            return str(error)
        return "read it all"

    assert run_ranks(2, outcome) == ["left with 3", "Rank 0 failed with SystemExit: 3"]


def test_after_an_error_the_next_pass_starts_anew() -> None:
    def rows(comm: LockstepComm) -> Any:
        failing_once = [True]

        def collate(ids: list[int]) -> torch.Tensor:
            if failing_once and 5 in ids:
                failing_once.clear()
                raise OwnError("once")
            return torch.tensor(ids)

        loader = dispatched(DataLoader(numbers(8), 2, collate_fn=collate), comm)
        with pytest.raises(OwnError, match="once"):
            list(loader)
        return [batch.tolist() for batch in loader]

    assert run_ranks(2, rows) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@pytest.mark.parametrize("says", [2, 4, 9, 12, 100])
def test_a_length_that_lies_is_an_error_on_all(says: int) -> None:
    def outcome(comm: LockstepComm) -> Any:
        loader = dispatched(DataLoader(SizedIds(8, says=says), 2), comm)
        error = error_of(lambda: list(loader))
        return type(error), "must yield as m" in str(error)

    assert run_ranks(2, outcome) == [(PlanError, True)] * 2


def test_a_batch_that_cannot_travel_is_an_error_on_all() -> None:
    def outcome(comm: LockstepComm) -> Any:
        loader = dispatched(DataLoader(numbers(8), 2, collate_fn=lambda ids: lambda: ids), comm)
        error = error_of(lambda: list(loader))
        return type(error)

    assert run_ranks(2, outcome) == [BatchError] * 2


# Passes.


def test_a_pass_may_be_left_early() -> None:
    def rows(comm: LockstepComm) -> Any:
        loader = dispatched(shuffle(40, 2), comm)
        seen = []
        for stop in (1, 3, 2):
            for step, batch in enumerate(loader, start=1):
                seen.append(batch.tolist())
                if step == stop:
                    break
        return loader.epoch, seen

    def due(rank: int) -> list[Any]:
        loader = prepare_data_loader(shuffle(40, 2), num_processes=2, process_index=rank)
        epochs = [[batch.tolist() for batch in loader] for _ in range(3)]
        return epochs[0][:1] + epochs[1][:3] + epochs[2][:2]

    assert run_ranks(2, rows) == [(2, due(0)), (2, due(1))]


@pytest.mark.parametrize("leaver", [1, 2])
def test_a_rank_that_leaves_a_pass_earlier_holds_up_nobody(leaver: int) -> None:
    def leave(comm: LockstepComm) -> list[list[int]]:
        loader = dispatched(DataLoader(numbers(24), 1), comm)
        seen = []
        for step, batch in enumerate(loader):
            seen.append(batch.tolist())
            if comm.rank == leaver and step == 1:
                break
        return seen + [batch.tolist() for batch in loader]

    whole = [[[sample] for sample in range(rank, 24, 3)] for rank in range(3)]
    due = [2 * each for each in whole]
    due[leaver] = whole[leaver][:2] + whole[leaver]
    assert run_ranks(3, leave, timeout_s=10) == due


@pytest.mark.parametrize("options", [{}, {"seed_samples": True}])
def test_ranks_that_go_on_without_the_reader_are_told(options: dict[str, Any]) -> None:
    def leave(comm: LockstepComm) -> Any:
        loader = dispatched(DataLoader(numbers(24), 1), comm, **options)
        steps: Any = iter(loader)
        seen = [next(steps).tolist() for _ in range(2)]
        comm.barrier()
        if comm.rank == 0:
            steps.close()  # as leaving the loop does
            return seen, None
        error = error_of(lambda: seen.extend(batch.tolist() for batch in steps))
        return seen[:2], f"{type(error).__name__}: {error}"

    message = (
        "CommError: Rank 0, which reads for all, has left the pass before this rank. Take the "
        "same steps on every rank."
    )
    due = [([[rank], [3 + rank]], message if rank else None) for rank in range(3)]
    assert run_ranks(3, leave, timeout_s=10) == due


def test_training_and_validation_take_turns() -> None:
    def rows(comm: LockstepComm) -> Any:
        train = dispatched(DataLoader(numbers(12), 2), comm)
        validate = dispatched(DataLoader(Ids(6), 1), comm, tail="uneven")
        seen = []
        for batch in train:
            seen += batch.tolist()
            seen += [row for small in validate for row in small.tolist()]
            comm.all_gather_ints([len(seen)])  # a collective of the user's, in every step
        return seen

    first, second = run_ranks(2, rows)
    assert first == [0, 1, 0, 2, 4, 4, 5, 0, 2, 4, 8, 9, 0, 2, 4]
    assert second == [2, 3, 1, 3, 5, 6, 7, 1, 3, 5, 10, 11, 1, 3, 5]


def test_a_new_pass_ends_the_one_before() -> None:
    def message(comm: LockstepComm) -> Any:
        loader = dispatched(DataLoader(numbers(16), 2), comm)
        older = iter(loader)
        next(older)
        newer = [batch.tolist() for batch in loader]
        return len(newer), str(error_of(lambda: next(older)))

    assert (
        run_ranks(2, message)
        == [
            (
                4,
                "`next` must be called on the latest pass of a dispatcher, got one that another "
                "pass has ended. Iterate one at a time, or prepare another loader.",
            )
        ]
        * 2
    )


def test_steps_hold_no_collectives() -> None:
    def calls(comm: LockstepComm) -> Any:
        loader = dispatched(DataLoader(Ids(40), 2), comm)
        list(loader)
        before = len(comm.calls)
        for step, _ in enumerate(loader, start=1):
            assert len(comm.calls) == before + 1, step
        return [call.name for call in comm.calls[before:]]

    # The start of the pass.
    assert run_ranks(2, calls) == [["all_gather_ints"]] * 2


def test_the_next_round_is_read_while_the_current_one_is_used() -> None:
    is_read = threading.Event()

    class Watched(Counted):
        def __getitem__(self, at: int) -> int:
            if at == 4:
                is_read.set()
            return super().__getitem__(at)

    def wait(comm: LockstepComm) -> bool:
        loader = dispatched(DataLoader(Watched(40), 2), comm)
        batches = iter(loader)
        next(batches)
        was_read = is_read.wait(timeout=20)
        batches.close()  # type: ignore[attr-defined]
        return was_read

    assert run_ranks(2, wait) == [True, True]


def test_the_reader_holds_three_rounds_at_most() -> None:
    world_size, alive = 4, []

    def collate(ids: list[int]) -> torch.Tensor:
        made = torch.tensor(ids)
        alive.append(weakref.ref(made))
        return made

    def most_alive(comm: LockstepComm) -> int:
        loader = dispatched(DataLoader(numbers(400), 2, collate_fn=collate), comm)
        most = 0
        for _ in loader:
            comm.barrier()
            most = max(most, sum(each() is not None for each in alive))
        return most

    assert run_ranks(world_size, most_alive)[0] <= 3 * world_size


def test_with_seeded_samples_and_no_workers_it_reads_in_next() -> None:
    readers = set()

    class Drawn(Counted):
        def __getitem__(self, at: int) -> Any:
            readers.add(threading.current_thread().name)
            return at, float(torch.rand(()))

    def rows(comm: LockstepComm) -> Any:
        loader = dispatched(
            DataLoader(Drawn(8), 2),
            comm,
            seed_samples=True,
            use_seedable_sampler=True,
            data_seed=2,
        )
        assert len(list(loader)) == 2
        return threading.current_thread().name

    names = run_ranks(2, rows)
    assert readers == {names[0]}


def test_generators_are_made_equal_where_all_ranks_have_them() -> None:
    def state(comm: LockstepComm) -> Any:
        generator = torch.Generator().manual_seed(comm.rank)
        loader = DataLoader(numbers(8), 2, sampler=Unsized(8), generator=generator)
        made = prepare_data_loader(
            loader, dispatch_batches=True, rng_types=["generator"], comm=comm
        )
        next(batches := iter(made))
        batches.close()  # type: ignore[attr-defined]
        # None where only the reader has one: then it is left alone.
        lone = dispatched(loader, comm, rng_types=["generator"])
        assert len(list(lone)) == 2
        return generator.get_state().tolist()

    first, second = run_ranks(2, state)
    assert first == second


# A slice function.


def test_a_slice_function_cuts_the_joined_round() -> None:
    asked = []

    def cut(data: Any, rows: slice, process_index: int, num_processes: int) -> Any:
        asked.append((data.tolist(), rows, process_index, num_processes))
        return slice_tensors(data, rows, process_index, num_processes) * 10

    def rows(comm: LockstepComm) -> Any:
        loader = dispatched(DataLoader(numbers(5), 2), comm, slice_fn_for_dispatch=cut)
        return [(batch.tolist(), loader.valid_rows) for batch in loader]

    assert run_ranks(2, rows) == [[([0, 10], 2), ([40, 0], 1)], [([20, 30], 2), ([10, 20], 0)]]
    assert asked == [
        ([0, 1, 2, 3], slice(0, 2), 0, 2),
        ([0, 1, 2, 3], slice(2, 4), 1, 2),
        ([4, 0, 1, 2], slice(0, 2), 0, 2),
        ([4, 0, 1, 2], slice(2, 4), 1, 2),
    ]


def test_what_cannot_be_joined_for_it_is_an_error_on_all() -> None:
    def collate(ids: list[int]) -> torch.Tensor:
        return torch.zeros(len(ids), 1 + max(ids))

    def outcome(comm: LockstepComm) -> Any:
        loader = DataLoader(numbers(8), 2, collate_fn=collate)
        made = dispatched(loader, comm, slice_fn_for_dispatch=slice_tensors)
        return type(error_of(lambda: list(made)))

    assert run_ranks(2, outcome) == [BatchError] * 2


def test_it_has_no_effect_without_dispatching() -> None:
    with pytest.warns(ShardplugWarning, match="has no effect without dispatch_batches=True"):
        prepare_data_loader(
            DataLoader(numbers(4)), slice_fn_for_dispatch=slice_tensors, comm=SoloComm()
        )
