"""Resume of what is read by workers, and of sources that keep a state of their own."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from shardplug import PermutedSampler, PlanError, ShardEngine, StateError, prepare_data_loader
from shardplug.comm import Comm
from shardplug.prepared import PreparedLoader
from shardplug.states import decode_snapshot
from tests.launch import run_processes

NUM_EPOCHS = 2
Make = Callable[[], PreparedLoader]


class Jumps(IterableDataset[int]):
    """A stream that says where it stands; counts what it makes."""

    def __init__(self, num_ids: int) -> None:
        self.num_ids = num_ids
        self.num_made = 0
        self.at = self.first = 0

    def own(self) -> tuple[int, int]:
        return 0, 1

    def __iter__(self) -> Iterator[int]:
        worker, num_workers = self.own()
        self.at, self.first = self.first, 0
        while worker + self.at * num_workers < self.num_ids:
            made = worker + self.at * num_workers
            self.at += 1
            self.num_made += 1
            yield made

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["at"]


class SplitJumps(Jumps):
    """The same, divided among workers by itself."""

    def own(self) -> tuple[int, int]:
        info = get_worker_info()
        return (0, 1) if info is None else (info.id, info.num_workers)


class Splits(IterableDataset[int]):
    """A stream without a state that divides itself among workers, unevenly: 5 of 6 to the first."""

    def __init__(self, num_ids: int) -> None:
        self.num_ids = num_ids

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        if info is None or info.num_workers == 1:
            yield from range(self.num_ids)
            return
        cut = 5 * self.num_ids // 6
        yield from (range(cut) if info.id == 0 else range(cut, self.num_ids))


class Moment(NamedTuple):
    epoch: int
    rows: list[int]
    valid_rows: int


class Seen(NamedTuple):
    """What a run handed out, and where it stood after each batch."""

    moments: list[Moment]
    states: list[str]
    own: list[list[str]]


def go_on(make: Make, state: str | None = None, own: Sequence[str] = ()) -> Seen:
    """Run to the end of the last epoch, from a state if there is one."""
    loader = make()
    if state is not None:
        loader.go_to(*loader.read_state(json.loads(state), list(map(decode_snapshot, own))))
    seen = Seen([], [], [])
    while loader.epoch < NUM_EPOCHS:
        for batch in loader:
            seen.moments.append(Moment(loader.epoch, batch.tolist(), loader.valid_rows))
            seen.states.append(json.dumps(loader.state_dict()))
            seen.own.append(loader.rank_state())
    return seen


def assert_goes_on(make: Make) -> Seen:
    """Stopped early, in the middle and at both ends of an epoch, it goes on as if unbroken."""
    whole = go_on(make)
    epoch = next(at for at, moment in enumerate(whole.moments) if moment.epoch == 1)
    for stop in (0, epoch // 2, epoch - 1, epoch):
        for own in ((), whole.own[stop]) if whole.own[stop] else ((),):
            rest = go_on(make, whole.states[stop], own)
            assert rest.moments == whole.moments[stop + 1 :], (stop, whole.states[stop], own)
    return whole


def loader_over(dataset: Any, *, shards: int, num_workers: int, **options: Any) -> PreparedLoader:
    kept = {"persistent_workers": options.pop("is_kept", False)} if num_workers else {}
    batching = options.pop("batching", {"batch_size": 2})
    return prepare_data_loader(
        DataLoader(dataset, num_workers=num_workers, **kept, **batching),
        num_processes=shards,
        process_index=shards - 1,
        dispatch_batches=False,
        **options,
    )


@pytest.mark.parametrize("per_message", [1, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("shards", "tail"), [(1, "drop"), (2, "pad"), (2, "uneven")])
def test_a_stream_goes_on_from_a_state_of_its_own(
    shards: int, tail: str, num_workers: int, per_message: int
) -> None:
    assert_goes_on(
        lambda: loader_over(
            Jumps(23),
            shards=shards,
            num_workers=num_workers,
            tail=tail,
            batches_per_message=per_message,
        )
    )


@pytest.mark.parametrize("kind", [Splits, SplitJumps])
@pytest.mark.parametrize(
    ("shards", "tail", "per_message"), [(1, "uneven", 1), (2, "pad", 3), (2, "drop", 1)]
)
def test_workers_that_split_a_stream_go_on_each_where_it_was(
    kind: Any, shards: int, tail: str, per_message: int
) -> None:
    whole = assert_goes_on(
        lambda: loader_over(
            kind(23), shards=shards, num_workers=2, tail=tail, batches_per_message=per_message
        )
    )
    state = json.loads(whole.states[1])
    assert (state["num_workers"], state["worker_positions"]) == (
        2,
        f"0:{2 * shards} 1:{2 * shards}",
    )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_part_of_its_own_goes_on(num_workers: int) -> None:
    assert_goes_on(
        lambda: loader_over(
            Jumps(23), shards=1, num_workers=num_workers, tail="pad", already_sharded=True
        )
    )


def test_workers_that_are_kept_go_on_too() -> None:
    def make(kind: Any = Jumps) -> PreparedLoader:
        return loader_over(kind(23), shards=2, num_workers=2, tail="pad", is_kept=True)

    whole = assert_goes_on(make)
    loader = make()
    list(loader)  # its workers have seen an epoch when the state comes
    loader.load_state_dict(json.loads(whole.states[2]))
    rest = [batch.tolist() for batch in loader]
    assert rest == [moment.rows for moment in whole.moments[3:] if moment.epoch == 0]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("per_message", [1, 4])
def test_what_workers_have_read_ahead_does_not_count(num_workers: int, per_message: int) -> None:
    sampler = PermutedSampler(40, seed=1)
    whole = assert_goes_on(
        lambda: loader_over(
            Ids40(),
            shards=2,
            num_workers=num_workers,
            batching={"batch_size": 3, "sampler": sampler},
            batches_per_message=per_message,
        )
    )
    assert [json.loads(state)["consumed"] for state in whole.states[:3]] == [6, 12, 18]


class Ids40(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 40


@pytest.mark.parametrize("consumed", [0, 4, 16])
def test_nothing_is_made_on_the_way_by_a_stream_that_jumps(consumed: int) -> None:
    loader = loader_over(Jumps(40), shards=1, num_workers=0)
    passes = iter(loader)
    states = [loader.state_dict()]
    states += [loader.state_dict() for _ in range(8) if next(passes) is not None]
    stream = Jumps(40)
    again = loader_over(stream, shards=1, num_workers=0)
    again.load_state_dict(states[consumed // 2])
    assert next(iter(again)).tolist() == [consumed, consumed + 1]
    assert stream.num_made <= 4  # this batch and the one after it, which tells whether it is last


class Counting(Dataset[torch.Tensor]):
    """A data set that is looked up by index and keeps a state: how often it was asked."""

    def __init__(self) -> None:
        self.num_asked = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.num_asked += 1
        return torch.tensor([index, self.num_asked])

    def __len__(self) -> int:
        return 24

    def state_dict(self) -> dict[str, int]:
        return {"num_asked": self.num_asked}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_asked = state["num_asked"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_set_with_a_state_gets_it_back_in_each_worker(num_workers: int) -> None:
    def make() -> PreparedLoader:
        return loader_over(
            Counting(), shards=1, num_workers=num_workers, use_stateful_dataloader=True
        )

    whole = go_on(make)
    first = [moment for moment in whole.moments if moment.epoch == 0]
    for stop in (0, 3, 4, 9):
        rest = go_on(make, whole.states[stop], whole.own[stop])
        assert [each for each in rest.moments if each.epoch == 0] == first[stop + 1 :]


def test_states_of_workers_need_as_many_workers() -> None:
    whole = go_on(
        lambda: loader_over(Counting(), shards=1, num_workers=0, use_stateful_dataloader=True)
    )
    other = loader_over(Counting(), shards=1, num_workers=2, use_stateful_dataloader=True)
    own = list(map(decode_snapshot, whole.own[3]))
    with pytest.raises(StateError, match=r"^`num_workers` must be 1, whose data sets have state"):
        other.read_state(json.loads(whole.states[3]), own)
    other.load_state_dict(json.loads(whole.states[3]))
    assert [row[0] for row in next(iter(other)).tolist()] == [8, 9]


def test_a_data_set_with_a_state_takes_one_batch_a_message() -> None:
    with pytest.raises(PlanError, match=r"^`batches_per_message` must be 1 for a data set with a"):
        loader_over(
            Counting(),
            shards=1,
            num_workers=2,
            use_stateful_dataloader=True,
            batches_per_message=2,
        )


def numbers_of(files: list[int]) -> Iterator[dict[str, int]]:
    for file in files:
        yield from ({"id": 7 * file + at} for at in range(7))


def ids_of(rows: list[dict[str, int]]) -> torch.Tensor:
    return torch.tensor([row["id"] for row in rows])


def read_hugging_face(_: Comm, num_workers: int) -> None:
    import datasets

    for shards, num_files, is_shuffled in ((1, 4, False), (2, 1, False), (2, 4, True)):
        stream: Any = datasets.IterableDataset.from_generator(
            numbers_of, gen_kwargs={"files": list(range(num_files))}
        )
        if is_shuffled:
            stream = stream.shuffle(seed=1, buffer_size=5)
        make = partial(
            loader_over,
            stream,
            shards=shards,
            num_workers=num_workers,
            batching={"batch_size": 2, "collate_fn": ids_of},
        )
        assert_goes_on(make)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_streams_of_hugging_face_go_on(num_workers: int) -> None:
    pytest.importorskip("datasets")
    run_processes(1, read_hugging_face, num_workers, has_group=False, timeout_s=50)


# What cannot be done.


def some_state(dataset: Any, *, steps: int = 2, **options: Any) -> dict[str, Any]:
    loader = loader_over(dataset, **options)
    passes = iter(loader)
    for _ in range(steps):
        next(passes)
    state = loader.state_dict()
    passes.close()  # type: ignore[attr-defined]  # a generator
    return state


def test_a_split_stream_needs_its_workers() -> None:
    state = some_state(SplitJumps(23), shards=1, num_workers=2)
    for num_workers in (0, 1):
        with pytest.raises(
            StateError, match=r"^`num_workers` of the state must be that of the loa"
        ):
            loader_over(SplitJumps(23), shards=1, num_workers=num_workers).load_state_dict(state)
    with pytest.raises(
        StateError, match=r"^`num_shards` of the state must be that of the loader, "
    ):
        loader_over(SplitJumps(23), shards=2, num_workers=2).load_state_dict(state)


def test_a_stream_that_was_whole_is_not_gone_on_with_in_parts() -> None:
    state = some_state(SplitJumps(23), shards=1, num_workers=0)
    told = loader_over(SplitJumps(23), shards=1, num_workers=2, worker_split="dataset")
    with pytest.raises(StateError, match=r"^`worker_positions` of the state must be there where w"):
        told.load_state_dict(state)
    found_out = loader_over(SplitJumps(23), shards=1, num_workers=2)
    found_out.load_state_dict(state)
    with pytest.raises(
        StateError, match=r"^`steps` of the state must be there where workers split"
    ):
        next(iter(found_out))


def test_parts_and_the_whole_are_two_things() -> None:
    part = some_state(Jumps(23), shards=1, num_workers=0, already_sharded=True)
    whole = some_state(Jumps(23), shards=1, num_workers=0)
    message = r"^`steps` of the state must be there where data was cut for each rank before, and no"
    with pytest.raises(StateError, match=message):
        loader_over(Jumps(23), shards=1, num_workers=0).load_state_dict(part)
    with pytest.raises(StateError, match=message):
        loader_over(Jumps(23), shards=1, num_workers=0, already_sharded=True).load_state_dict(whole)


@pytest.mark.parametrize("positions", [3, "0:2,1:x", "0", "0:1 "])
def test_damaged_positions_are_refused(positions: Any) -> None:
    state = some_state(SplitJumps(23), shards=1, num_workers=2)
    loader = loader_over(SplitJumps(23), shards=1, num_workers=2)
    with pytest.raises(StateError, match=r"^`worker_positions` of the state must be pairs of numb"):
        loader.load_state_dict({**state, "worker_positions": positions})


# Random numbers by sample.


class Augmented(Dataset[torch.Tensor]):
    def __init__(self, num_ids: int) -> None:
        self.num_ids = num_ids

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [torch.rand(()).item(), np.random.rand(), random.random()]
        return torch.tensor([index, *drawn], dtype=torch.float64)

    def __len__(self) -> int:
        return self.num_ids


class AugmentedStream(IterableDataset[torch.Tensor]):
    def __init__(self, num_ids: int) -> None:
        self.samples = Augmented(num_ids)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(self.samples.__getitem__, range(len(self.samples)))


FORMS: dict[str, Callable[[int], tuple[Any, dict[str, Any]]]] = {
    "shuffled": lambda n: (Augmented(n), {"batch_size": 3, "shuffle": True}),
    "batches of any size": lambda n: (
        Augmented(n),
        {"batch_sampler": [list(range(at, min(at + 4, n))) for at in range(0, n, 4)]},
    ),
    "ready batches": lambda n: (
        Augmented(n),
        {"batch_size": None, "collate_fn": lambda row: row[None]},
    ),
    "stream": lambda n: (AugmentedStream(n), {"batch_size": 3}),
}


def drawn(
    form: str, *, shards: int, num_workers: int, consumed: int = 0, per_message: int = 1
) -> dict[tuple[int, float], tuple[float, ...]]:
    """By epoch and id, the row that was made; each once."""
    found: dict[tuple[int, float], tuple[float, ...]] = {}
    for rank in range(shards):
        dataset, batching = FORMS[form](19)
        loader = prepare_data_loader(
            DataLoader(dataset, num_workers=num_workers, **batching),
            num_processes=shards,
            process_index=rank,
            use_seedable_sampler=True,
            data_seed=3,
            seed_samples=True,
            batches_per_message=per_message,
            dispatch_batches=False,
        )
        if consumed:
            loader.load_state_dict({**loader.state_dict(), "consumed": consumed})
        while loader.epoch < NUM_EPOCHS:
            for batch in loader:
                for row in batch[: loader.valid_rows].tolist():
                    assert (loader.epoch, row[0]) not in found
                    found[loader.epoch, row[0]] = tuple(row)
    return found


@pytest.mark.parametrize("form", FORMS)
def test_samples_draw_alike_on_any_ranks_and_workers(form: str) -> None:
    alone = drawn(form, shards=1, num_workers=0)
    assert len(alone) == NUM_EPOCHS * 19
    assert len({row[1:] for row in alone.values()}) == len(alone)  # no two draw alike
    for shards, num_workers, per_message in ((2, 0, 1), (3, 0, 1), (1, 2, 4), (2, 2, 1), (3, 2, 1)):
        assert drawn(form, shards=shards, num_workers=num_workers, per_message=per_message) == alone
    consumed = 3 if form in ("batches of any size", "ready batches") else 12
    for shards in (1, 3):
        rest = drawn(form, shards=shards, num_workers=0, consumed=consumed)
        assert rest == {key: alone[key] for key in rest}
        assert NUM_EPOCHS * 19 - 12 <= len(rest) <= NUM_EPOCHS * 19 - 3


@pytest.mark.parametrize("form", FORMS)
def test_the_process_goes_on_drawing_as_before(form: str) -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), float(np.random.rand()), random.random()

    def seed() -> None:
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)

    dataset, batching = FORMS[form](9)
    loader = prepare_data_loader(
        DataLoader(dataset, **batching), seed_samples=True, dispatch_batches=False
    )
    seed()
    due = draw()
    seed()
    assert len(list(loader)) > 0
    assert draw() == due


# A real run.


def train(comm: Comm, states: list[dict[str, Any]] | None) -> tuple[list[Any], dict[str, Any]]:
    engine = ShardEngine(split_batches=True, data_seed=2, seed_samples=True)
    loader = engine.prepare(DataLoader(Augmented(24), 12, shuffle=True))
    if states is not None:
        engine.load_state_dict(states[0], rank_states=states[1])
    seen: list[Any] = []
    state: dict[str, Any] = {}
    while loader.epoch < NUM_EPOCHS:
        for batch in loader:
            seen.append((loader.epoch, engine.gather_for_metrics(batch).tolist()))
            if len(seen) == 1:
                state = engine.state_dict()
                assert comm.all_gather_object(state) == [state] * comm.world_size
                state = {"engine": state, "ranks": engine.gather_rank_states()}
    return seen, state


def test_real_ranks_go_on_on_another_number_of_ranks() -> None:
    (whole, saved), *_ = run_processes(2, train, None)
    states = [json.loads(json.dumps(saved["engine"])), json.loads(json.dumps(saved["ranks"]))]
    for world_size in (1, 3):
        for rest, _ in run_processes(world_size, train, states):
            assert rest == whole[1:]
