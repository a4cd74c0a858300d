"""Loaders with workers: the same data, errors and random numbers, however batches travel."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import chain, product, zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from shardplug import IterableDatasetShard, PlanError, prepare_data_loader
from shardplug.fetching import Messages, Records
from shardplug.plan.cursor import Progress
from shardplug.plan.order import worker_seed
from tests.laws import ids_of
from tests.streams import (
    EpochIds,
    Ids,
    LateSplitIds,
    Parts,
    SeededIds,
    ShuffledIds,
    SizedIds,
    SizedSplitIds,
    SplitIds,
    error_of,
    parts_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Table(Dataset[int]):
    """Ids that are looked up; ``fails_at`` raises, ``dies_at`` ends the process."""

    def __init__(
        self, num_ids: int, *, fails_at: int | None = None, dies_at: int | None = None
    ) -> None:
        self.num_ids = num_ids
        self.fails_at = fails_at
        self.dies_at = dies_at

    def __len__(self) -> int:
        return self.num_ids

    def __getitem__(self, index: int) -> int:
        if index == self.fails_at:
            raise KeyError(f"no id {index}")
        if index == self.dies_at:
            os._exit(1)
        return index


class EpochTable(Table):
    """The same, 100 more in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return 100 * self.epoch + index


class SeedTable(Table):
    """The seed of whoever looks it up."""

    def __getitem__(self, index: int) -> int:
        return torch.initial_seed()


class DrawTable(Table):
    """Numbers drawn from torch's global generator."""

    def __getitem__(self, index: int) -> int:
        return int(torch.randint(1 << 40, ()).item())


def prepared(
    dataset: Any,
    num_workers: int,
    *,
    batch_size: int | None = 2,
    rank: int = 0,
    world_size: int = 2,
    loader: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Prepare a loader for a rank of a simulated world: nobody has to be there to agree with."""
    given = DataLoader(dataset, batch_size, num_workers=num_workers, **(loader or {}))
    return prepare_data_loader(given, num_processes=world_size, process_index=rank, **options)


def rows_of(loader: Any) -> list[tuple[tuple[int, ...], int, bool]]:
    return [(ids_of(batch), loader.valid_rows, loader.end_of_dataloader) for batch in loader]


def ids_by_pass(loader: Any, num_passes: int) -> list[list[int]]:
    return [list(chain(*(ids_of(batch) for batch in loader))) for _ in range(num_passes)]


# The same data.


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("kind", [Table, Ids, SizedIds])
def test_workers_change_nothing_of_what_is_seen(kind: Any, num_workers: int) -> None:
    plain = rows_of(prepared(kind(27), 0, rank=1))
    assert plain[0] == ((2, 3), 2, False)
    assert plain[-1] == ((26, 0), 1, True)
    for per_message in (1, 3, 16):
        loader = prepared(kind(27), num_workers, rank=1, batches_per_message=per_message)
        assert rows_of(loader) == plain


@pytest.mark.parametrize("kind", [EpochTable, EpochIds])
@pytest.mark.parametrize("per_message", [1, 3])
def test_workers_that_are_kept_change_nothing_either(kind: Any, per_message: int) -> None:
    plain = prepared(kind(7), 0, rank=1)
    kept = prepared(
        kind(7), 2, rank=1, loader={"persistent_workers": True}, batches_per_message=per_message
    )
    due = ids_by_pass(plain, 3)
    assert due == [[2, 3, 6, 0], [102, 103, 106, 100], [202, 203, 206, 200]]
    assert ids_by_pass(kept, 3) == due
    for loader in (plain, kept):
        loader.set_epoch(9)
    assert ids_by_pass(kept, 1) == ids_by_pass(plain, 1) == [[900 + each for each in due[0]]]


@pytest.mark.parametrize("kind", [EpochTable, EpochIds])
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_pass_may_be_left_early(kind: Any, is_kept: bool) -> None:
    loader = prepared(
        kind(39), 2, world_size=1, loader={"persistent_workers": is_kept}, batches_per_message=3
    )
    for number in range(3):
        batches = iter(loader)
        for start in (0, 2):  # the next one is fetched too, the first of two in its message
            assert ids_of(next(batches)) == (100 * number + start, 100 * number + start + 1)
        del batches
    full = [((number, number + 1), 2, False) for number in range(300, 338, 2)]
    assert rows_of(loader) == [*full, ((338,), 1, True)]


@pytest.mark.parametrize("kind", [Table, Ids])
def test_ready_made_batches_come_the_same_way(kind: Any) -> None:
    def rows(num_workers: int, per_message: int = 1) -> list[tuple[int, int, bool]]:
        loader = prepared(
            kind(9), num_workers, batch_size=None, rank=1, batches_per_message=per_message
        )
        return [(int(item), loader.valid_rows, loader.end_of_dataloader) for item in loader]

    due = [(1, 1, False), (3, 1, False), (5, 1, False), (7, 1, False), (0, 0, True)]
    assert rows(0) == due
    assert rows(2) == rows(2, 3) == due


def test_data_of_every_kind_comes_through_a_message_of_several() -> None:
    def collate(ids: list[int]) -> dict[str, Any]:
        return {"ids": torch.tensor(ids), "names": list(map(str, ids)), "none": None, "n": len(ids)}

    loader = prepared(
        Table(40), 2, loader={"collate_fn": collate}, world_size=1, batches_per_message=16
    )
    for number, batch in enumerate(loader):
        ids = [2 * number, 2 * number + 1]
        assert batch["ids"].tolist() == ids
        assert (batch["names"], batch["none"], batch["n"]) == (list(map(str, ids)), None, 2)
        batch["ids"].zero_()  # a neighbour in the same message is not touched


def test_a_data_set_that_fetches_many_at_once_is_asked_to() -> None:
    class Many(Table):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [1000 + index for index in indices]

    assert ids_by_pass(prepared(Many(4), 1, world_size=1), 1) == [[1000, 1001, 1002, 1003]]


def test_the_iterator_that_is_kept_is_torchs() -> None:
    loader = prepared(Table(4), 1, world_size=1, loader={"persistent_workers": True})
    before = loader._iterator
    list(loader)
    assert before is None
    assert type(loader._iterator).__name__ == "_MultiProcessingDataLoaderIter"
    assert len(loader._iterator._workers) == 1


@pytest.mark.parametrize("num_ids", [0, 1, 3])
@pytest.mark.parametrize("kind", [Table, Ids])
def test_fewer_batches_than_workers(kind: Any, num_ids: int) -> None:
    plain = rows_of(prepared(kind(num_ids), 0, rank=1))
    assert len(plain) == min(1, num_ids)
    assert rows_of(prepared(kind(num_ids), 3, rank=1, batches_per_message=3)) == plain


@pytest.mark.parametrize("kind", [Table, Ids])
def test_steps_that_are_skipped_are_not_collated(kind: Any, tmp_path: Path) -> None:
    def collate(ids: list[int]) -> Any:
        with (tmp_path / "collated").open("a") as file:
            file.write(f"{ids[0]}\n")
        return ids

    loader = prepared(kind(12), 2, world_size=1, loader={"collate_fn": collate})
    assert list(loader.skipping(4)) == [[8, 9], [10, 11]]
    assert sorted((tmp_path / "collated").read_text().split()) == ["10", "8"]


@pytest.mark.parametrize("kind", [Table, Ids])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_stateful_loaders_give_the_same(kind: Any, num_workers: int) -> None:
    for rank, per_message in product(range(2), (1, 3)):
        plain = rows_of(prepared(kind(11), 0, rank=rank))
        loader = prepared(
            kind(11),
            num_workers,
            rank=rank,
            use_stateful_dataloader=True,
            batches_per_message=per_message,
        )
        assert rows_of(loader) == plain
        assert rows_of(loader) == plain  # the next pass, which has no epochs to differ in


def test_a_subclass_is_not_made_stateful() -> None:
    class Own(DataLoader[int]):
        pass

    with pytest.raises(
        PlanError,
        match=r"^`dataloader` must be a plain DataLoader with use_stateful_dataloader=True, got "
        r"Own: a subclass cannot be made into a stateful one\.",
    ):
        prepare_data_loader(Own(Table(4)), use_stateful_dataloader=True)


# Errors.


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("per_message", [1, 3, 16])
@pytest.mark.parametrize(("kind", "error"), [(Table, KeyError), (Ids, ValueError)])
def test_batches_before_a_failure_come_first(
    kind: Any, error: type[Exception], per_message: int, num_workers: int
) -> None:
    loader = prepared(
        kind(60, fails_at=33), num_workers, world_size=1, batches_per_message=per_message
    )
    seen: list[int] = []

    def read() -> None:
        for batch in loader:
            seen.extend(batch.tolist())

    raised = error_of(read)
    assert isinstance(raised, error)
    assert "no id 33" in str(raised)
    # Of a stream the last batch waits for the next, to know whether it is the last.
    assert seen == list(range(32 if kind is Table else 30))


@pytest.mark.parametrize(("kind", "error"), [(Table, KeyError), (Ids, ValueError)])
def test_after_a_failure_there_is_a_next_pass(kind: Any, error: type[Exception]) -> None:
    loader = prepared(kind(8, fails_at=5), 2, world_size=1, loader={"persistent_workers": True})
    for _ in range(2):
        assert isinstance(error_of(lambda: list(loader)), error)


@pytest.mark.parametrize("kind", [Table, Ids])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_stop_iteration_from_collate_is_an_error(kind: Any, num_workers: int) -> None:
    def collate(ids: list[int]) -> Any:
        return next(iter(())) if 4 in ids else ids

    loader = prepared(kind(12), num_workers, world_size=1, loader={"collate_fn": collate})
    raised = error_of(lambda: list(loader))
    assert isinstance(raised, RuntimeError | PlanError)
    assert "StopIteration" in str(raised) or "must yield one batch per batch" in str(raised)


class Broken:
    """A loader of readers whose way to its workers breaks."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers

    def __iter__(self) -> Iterator[Any]:
        raise ConnectionResetError("reset by peer")
        yield


def test_a_way_to_a_worker_that_breaks_is_the_end_of_the_worker() -> None:
    broken: Any = Broken(2)
    messages = Messages(broken, num_readers=2, records=Records(), progress=Progress())
    with pytest.raises(RuntimeError, match=r"^A worker of the loader ended with its batches"):
        next(messages)


def test_without_workers_it_is_the_users_own_error() -> None:
    broken: Any = Broken(0)
    with pytest.raises(ConnectionResetError, match="reset by peer"):
        next(Messages(broken, num_readers=1, records=Records(), progress=Progress()))


# Random numbers.


def seeds_of(num_workers: int = 2, epoch: int = 0, rank: int = 0, **loader: Any) -> list[int]:
    made = prepared(
        SeedTable(8),
        num_workers,
        batch_size=1,
        rank=rank,
        loader={**loader, "generator": torch.Generator().manual_seed(5)},
    )
    made.set_epoch(epoch)
    return ids_by_pass(made, 1)[0]


def test_seeds_differ_by_epoch_rank_and_worker() -> None:
    for epoch, rank in product((0, 1), (0, 1)):
        own = [worker_seed(5, epoch, rank=rank, worker=worker) for worker in range(2)]
        assert seeds_of(epoch=epoch, rank=rank) == [*own, *own]


def test_kept_workers_are_seeded_as_new_ones_are() -> None:
    loader = prepared(
        DrawTable(8), 2, batch_size=1, loader={"persistent_workers": True}, data_seed=5,
        use_seedable_sampler=True,
    )  # fmt: skip
    fresh = prepared(DrawTable(8), 2, batch_size=1, data_seed=5, use_seedable_sampler=True)
    due = ids_by_pass(fresh, 2)
    assert due[0] != due[1]
    assert ids_by_pass(loader, 2) == due
    for _ in range(2):  # also when an epoch is passed again
        loader.set_epoch(1)
        assert ids_by_pass(loader, 1) == [due[1]]


def test_the_random_numbers_of_the_training_process_stay() -> None:
    before = torch.get_rng_state()
    for dataset in (Table(8), ShuffledIds(8)):
        list(prepared(dataset, 2))
    assert torch.equal(torch.get_rng_state(), before) is False  # the seeds were drawn
    loader = prepared(Table(8), 2)
    before = torch.get_rng_state()
    list(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_stream_read_by_all_has_the_same_order_in_all_workers_and_ranks() -> None:
    for epoch_of in range(2):
        ids: list[int] = []
        for rank in range(2):
            loader = prepared(
                ShuffledIds(24), 2, rank=rank, data_seed=3, use_seedable_sampler=True,
                loader={"persistent_workers": bool(epoch_of)},
            )  # fmt: skip
            ids += ids_by_pass(loader, epoch_of + 1)[epoch_of]
        assert sorted(ids) == list(range(24))
        assert ids != list(range(24))


def note_info(path: Path) -> Callable[[int], None]:
    def init(worker: int) -> None:
        info: Any = get_worker_info()
        drawn = int(torch.randint(1 << 40, ()).item())
        kind = type(info.dataset).__name__
        text = f"{worker} {info.id} {info.num_workers} {info.seed} {kind} {drawn}"
        (path / str(worker)).write_text(text)
        torch.manual_seed(7)

    return init


@pytest.mark.parametrize("kind", [SeedTable, Ids])
def test_the_users_worker_init_runs_after_our_seeding_and_sees_its_own(
    kind: Any, tmp_path: Path
) -> None:
    loader = prepared(
        kind(8),
        2,
        batch_size=1,
        rank=1,
        data_seed=5,
        use_seedable_sampler=True,
        loader={"worker_init_fn": note_info(tmp_path)},
        worker_split="dataset" if kind is Ids else "auto",
    )
    (ids,) = ids_by_pass(loader, 1)
    for worker in range(2):
        # Of a stream that all read, all draw alike.
        place = {"rank": 1, "worker": worker} if kind is SeedTable else {"rank": 0, "worker": 0}
        seed = worker_seed(5, 0, **place)
        drawn = int(torch.randint(1 << 40, (), generator=torch.Generator().manual_seed(seed)))
        due = f"{worker} {worker} 2 {seed} {kind.__name__} {drawn}"
        assert (tmp_path / str(worker)).read_text() == due
    if kind is SeedTable:
        assert set(ids) == {7}  # what the user has seeded stays, in the first epoch


# Who divides a stream among workers.


def union(dataset: Callable[[], Any], **options: Any) -> list[int]:
    """The ids of all ranks and workers; each once is the law."""
    loaders = [
        prepared(dataset(), 2, batch_size=2, rank=rank, tail="uneven", **options)
        for rank in range(2)
    ]
    return sorted(chain(*(ids_by_pass(loader, 1)[0] for loader in loaders)))


def cut_data_set(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.ids = info.dataset.ids[worker :: info.num_workers]


@pytest.mark.parametrize("num_ids", [7, 12])
@pytest.mark.parametrize(
    ("kind", "split"),
    [
        (Ids, "auto"),
        (Ids, "shardplug"),
        (SeededIds, "auto"),
        (SplitIds, "auto"),
        (SplitIds, "shardplug"),
        (SplitIds, "dataset"),
        (SizedSplitIds, "auto"),
        (SizedSplitIds, "dataset"),
    ],
)
def test_each_id_comes_once(kind: Any, split: str, num_ids: int) -> None:
    assert union(lambda: kind(num_ids), worker_split=split) == list(range(num_ids))


@pytest.mark.parametrize("split", ["auto", "dataset"])
def test_each_id_comes_once_where_worker_init_cuts_the_data_set(split: str) -> None:
    init = {"worker_init_fn": cut_data_set}
    assert union(lambda: Ids(9), worker_split=split, loader=init) == list(range(9))


def test_each_id_comes_once_from_our_own_shard() -> None:
    assert union(lambda: IterableDatasetShard(range(9), 2, tail="uneven")) == list(range(9))


@pytest.mark.parametrize("per_message", [1, 3, 16])
@pytest.mark.parametrize("num_ids", [10, 33])
def test_workers_that_split_a_stream_take_turns(num_ids: int, per_message: int) -> None:
    loader = prepared(SplitIds(num_ids), 2, world_size=1, batches_per_message=per_message)
    own = [list(range(worker, num_ids, 2)) for worker in range(2)]
    batches = [[tuple(ids[at : at + 2]) for at in range(0, len(ids), 2)] for ids in own]
    turns = chain.from_iterable(zip_longest(*batches))
    assert [ids_of(batch) for batch in loader] == [batch for batch in turns if batch]


@pytest.mark.parametrize("first", [0, 7, 20])
@pytest.mark.parametrize("per_message", [1, 3])
def test_workers_whose_parts_end_far_apart_lose_nothing(per_message: int, first: int) -> None:
    def cut(worker: int) -> None:
        info: Any = get_worker_info()
        info.dataset.ids = info.dataset.ids[:first] if worker == 0 else info.dataset.ids[first:]

    loader = prepared(
        Ids(first + 4),
        2,
        batch_size=1,
        world_size=1,
        loader={"worker_init_fn": cut},
        batches_per_message=per_message,
    )
    turns = chain.from_iterable(zip_longest(range(first), range(first, first + 4)))
    assert ids_by_pass(loader, 1) == [[number for number in turns if number is not None]]


@pytest.mark.parametrize("per_message", [1, 3])
def test_what_one_of_them_raises_comes_in_its_turn(per_message: int) -> None:
    # Worker 0 makes 0 2 4 6 8 ..., worker 1 makes 1 3 5 7 and fails.
    ids = SplitIds(40, fails_at=9)
    loader = prepared(ids, 2, batch_size=1, world_size=1, batches_per_message=per_message)
    seen: list[int] = []

    def read() -> None:
        for batch in loader:
            seen.extend(batch.tolist())

    assert "no id 9" in str(error_of(read))
    assert seen == list(range(8))  # 8 waits for the next, to know whether it is the last


def test_a_sized_stream_that_splits_itself_ends_when_it_ends() -> None:
    # Worker 0 reads 0 2 4 6 8 10, worker 1 the others; this rank has the second batches of each.
    # Read as a whole, twelve ids would make three steps.
    due = [((4, 6), 2, False), ((5, 7), 2, False), ((0, 2), 0, False), ((1, 3), 0, True)]
    loader = prepared(SizedSplitIds(12), 2, rank=1, worker_split="dataset")
    with pytest.raises(TypeError, match="SizedSplitIds has no known length"):
        len(loader)
    assert rows_of(loader) == due
    assert rows_of(prepared(SizedSplitIds(12), 2, rank=1)) == due


def test_our_split_over_a_worker_init_that_cuts_the_data_set_is_an_error() -> None:
    loader = prepared(Ids(9), 2, worker_split="shardplug", loader={"worker_init_fn": cut_data_set})
    raised = error_of(lambda: list(loader))
    assert isinstance(raised, PlanError)
    assert "`worker_init_fn` must leave the data set whole" in str(raised)


def test_reading_the_workers_info_late_is_an_error() -> None:
    raised = error_of(lambda: list(prepared(LateSplitIds(9), 2)))
    assert isinstance(raised, PlanError)
    assert "LateSplitIds, which reads its worker info only after its first item" in str(raised)


def test_reading_it_late_is_none_where_the_user_says_who_splits() -> None:
    loader = prepared(LateSplitIds(9), 2, world_size=1, worker_split="shardplug")
    assert ids_by_pass(loader, 1) == [list(range(9))]


def test_own_parts_are_read_by_workers_once() -> None:
    for rank in range(2):
        loader = prepared(Parts(parts_of(3, 7)), 2, rank=rank, tail="uneven")
        assert ids_by_pass(loader, 1) == [parts_of(3, 7)[rank]]
