"""`IterableDatasetShard` on its own: each rank's samples of a stream, and each sample once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from shardplug import IterableDatasetShard, PlanError, prepare_data_loader
from shardplug.plan.cursor import Cursor
from shardplug.plan.shard import Shard
from shardplug.plan.split import ShardPlan, Split, Tail
from shardplug.streams import StreamFeed, own_part
from tests import reference
from tests.laws import Case, length_of
from tests.streams import (
    EpochIds,
    Files,
    Ids,
    LateSplitIds,
    Parts,
    SizedIds,
    SplitIds,
    error_of,
    parts_of,
)

SIZES = range(21)
WORLDS = range(1, 5)


def shard_of(case: Case, rank: int, *, dataset: Any = None) -> IterableDatasetShard:
    return IterableDatasetShard(
        SizedIds(case.num_samples) if dataset is None else dataset,
        case.batch_size,
        num_processes=case.world_size,
        process_index=rank,
        split_batches=case.split_batches,
        tail=case.tail,
    )


def due_of(case: Case, rank: int) -> list[int]:
    return list(chain(*(step.rows for step in reference.stream(case)[rank].steps)))


def test_whole_batches_go_round() -> None:
    shards = [IterableDatasetShard(range(8), 4, False, 2, rank) for rank in range(2)]
    assert [list(shard) for shard in shards] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_split_batches_are_cut() -> None:
    shards = [IterableDatasetShard(range(8), 4, False, 2, rank, True) for rank in range(2)]
    assert [list(shard) for shard in shards] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_an_incomplete_window_is_filled_from_the_first() -> None:
    shards = [IterableDatasetShard(range(5), 4, False, 2, rank) for rank in range(2)]
    assert [list(shard) for shard in shards] == [[0, 1, 2, 3], [4, 0, 1, 2]]
    assert list(IterableDatasetShard(range(3), 4, False, 2, 1)) == [1, 2, 0, 1]
    assert list(IterableDatasetShard(range(5), 4)) == [0, 1, 2, 3, 4, 0, 1, 2]


def test_drop_last_drops_an_incomplete_window() -> None:
    shards = [IterableDatasetShard(range(13), 2, True, 3, rank) for rank in range(3)]
    assert [list(shard) for shard in shards] == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]


def test_not_even_repeats_nothing() -> None:
    shards = [
        IterableDatasetShard(range(5), 2, False, 2, rank, even_batches=False) for rank in range(2)
    ]
    assert [list(shard) for shard in shards] == [[0, 1, 4], [2, 3]]


@pytest.mark.parametrize("tail", Tail)
@pytest.mark.parametrize("split", Split)
def test_every_epoch_on_every_number_of_ranks(tail: Tail, split: Split) -> None:
    for num_samples, world_size, size in product(SIZES, WORLDS, (1, 2, 3)):
        batch_size = size * world_size if split is Split.SLICE else size
        case = Case(num_samples, batch_size, world_size, split, tail)
        for rank in range(world_size):
            try:
                due = due_of(case, rank)
            except reference.Impossible:
                with pytest.raises(PlanError):
                    list(shard_of(case, rank))
                continue
            shard = shard_of(case, rank)
            assert list(shard) == due, case
            assert len(shard) == len(due), case
            endless = shard_of(case, rank, dataset=Ids(num_samples))
            assert list(endless) == due, case
            assert length_of(endless) is None, case


def test_a_stream_of_unknown_length_makes_a_shard_of_unknown_length() -> None:
    with pytest.raises(TypeError, match=r"^Ids has no known length: only a pass will tell\.$"):
        len(IterableDatasetShard(Ids(8), 4))


def test_a_generator_needs_no_set_epoch() -> None:
    class WithGenerator(Ids):
        generator = torch.Generator()

    shard = IterableDatasetShard(WithGenerator(8), 2, num_processes=2, process_index=1)
    assert list(shard) == [2, 3, 6, 7]
    assert shard.epoch == 0


def test_the_data_set_is_told_the_epoch() -> None:
    shard = IterableDatasetShard(EpochIds(4), 1, num_processes=2, process_index=1)
    assert list(shard) == [1, 3]
    shard.set_epoch(2)
    assert list(shard) == [201, 203]
    assert shard.epoch == 2


def test_a_data_set_without_epochs_is_left_alone() -> None:
    shard = IterableDatasetShard(Ids(4), 1, num_processes=2)
    shard.set_epoch(2)
    assert (list(shard), shard.epoch) == ([0, 2], 2)


def test_passes_begin_anew() -> None:
    shard = IterableDatasetShard(Ids(5), 2, num_processes=2, process_index=1)
    early = iter(shard)
    assert next(early) == 2
    assert list(shard) == list(shard) == [2, 3, 1, 2]


def test_nothing_is_read_before_the_first_sample_is_asked_for() -> None:
    ids = Ids(100)
    samples = iter(IterableDatasetShard(ids, 2, num_processes=3))
    assert ids.num_read == 0
    next(samples)
    assert ids.num_read == 6


# Streams that shard themselves.


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_stream_that_shards_itself_is_asked_to(world_size: int) -> None:
    parts = parts_of(*[4] * world_size)
    shards = [
        IterableDatasetShard(Parts(parts), 2, num_processes=world_size, process_index=rank)
        for rank in range(world_size)
    ]
    assert [list(shard) for shard in shards] == parts


def test_own_parts_end_as_their_tail_says() -> None:
    def part(tail: str) -> list[int]:
        return list(IterableDatasetShard(Parts(parts_of(3, 7)), 2, False, 2, 1, tail=tail))

    assert part("pad") == [3, 4, 5, 6, 7, 8, 9, 3]
    assert part("drop") == [3, 4, 5, 6, 7, 8]
    assert part("uneven") == [3, 4, 5, 6, 7, 8, 9]


def test_own_parts_of_split_batches_are_read_in_pieces() -> None:
    shard = IterableDatasetShard(Parts(parts_of(3, 3)), 4, False, 2, 1, split_batches=True)
    assert list(shard) == [3, 4, 5, 3]


def test_exact_reads_the_whole_stream() -> None:
    shards = [
        IterableDatasetShard(Parts(parts_of(1, 6)), 2, False, 2, rank, tail="exact")
        for rank in range(2)
    ]
    assert [list(shard) for shard in shards] == [[0, 1, 4, 5], [2, 3, 6]]


def test_a_stream_of_too_few_shards_is_read_by_all() -> None:
    assert own_part(Files(parts_of(3, 3)), Shard(0, 3)) is None
    shards = [IterableDatasetShard(Files(parts_of(3, 3)), 1, False, 3, rank) for rank in range(3)]
    assert [list(shard) for shard in shards] == [[0, 3], [1, 4], [2, 5]]


def test_a_stream_of_enough_shards_is_not() -> None:
    shards = [IterableDatasetShard(Files(parts_of(2, 1, 1)), 1, False, 2, r) for r in range(2)]
    assert [list(shard) for shard in shards] == [[0, 1, 3], [2]]


def test_one_rank_asks_for_no_part() -> None:
    assert own_part(Parts(parts_of(3, 3)), Shard(0, 1)) is None


def test_a_part_has_no_known_length() -> None:
    shard = IterableDatasetShard(Files(parts_of(2, 2)), 1, False, 2, 0)
    assert length_of(shard) is None


# In the workers of a plain DataLoader.


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("split_batches", [False, True])
@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
def test_workers_multiply_nothing_and_keep_the_order(num_workers: int, split_batches: bool) -> None:
    batch_size = 4 if split_batches else 2
    shard = IterableDatasetShard(Ids(14), batch_size, False, 2, 1, split_batches)
    batches = [batch.tolist() for batch in DataLoader(shard, 2, num_workers=num_workers)]
    assert batches == [[2, 3], [6, 7], [10, 11], [0, 1]]


@pytest.mark.parametrize("worker_split", ["auto", "dataset"])
def test_a_stream_that_splits_itself_among_workers_is_left_to_it(worker_split: str) -> None:
    # Worker 0 reads 0 2 4 6, worker 1 reads 1 3 5 7; of each, every second sample is this rank's.
    shard = IterableDatasetShard(SplitIds(8), 1, False, 2, 1, worker_split=worker_split)
    batches = [batch.tolist() for batch in DataLoader(shard, 1, num_workers=2)]
    assert batches == [[2], [3], [6], [7]]


def test_what_splits_itself_can_be_kept_from_it() -> None:
    shard = IterableDatasetShard(SplitIds(8), 1, False, 2, 1, worker_split="shardplug")
    batches = [batch.tolist() for batch in DataLoader(shard, 1, num_workers=2)]
    assert batches == [[1], [3], [5], [7]]


def test_reading_the_workers_info_late_is_an_error() -> None:
    shard = IterableDatasetShard(LateSplitIds(8), 1, False, 2, 1)
    error = error_of(lambda: list(DataLoader(shard, 1, num_workers=2)))
    assert isinstance(error, PlanError)
    assert (
        '`worker_split` must say who divides the stream among workers, got "auto" with '
        "IterableDatasetShard, which reads its worker info only after its first item. Pass "
        'worker_split="dataset" if it splits itself, else "shardplug".'
    ) in str(error)


# What is refused.


def test_batches_that_cannot_be_split_are_refused_at_once() -> None:
    with pytest.raises(
        PlanError, match=r"^`batch_size` must be a multiple of the 2 shards .*, got 3"
    ):
        IterableDatasetShard(range(8), 3, False, 2, 0, split_batches=True)


def test_a_rank_out_of_range_is_refused() -> None:
    with pytest.raises(PlanError, match=r"^`process_index` must be in \[0, 2\), got 2\.$"):
        IterableDatasetShard(range(8), 3, False, 2, 2)


def test_an_unknown_tail_is_refused() -> None:
    with pytest.raises(PlanError, match=r"^`tail` must be one of 'pad', .*, got 'cut'\.$"):
        IterableDatasetShard(range(8), tail="cut")


def test_an_unknown_worker_split_is_refused() -> None:
    with pytest.raises(
        PlanError,
        match=r"^`worker_split` must be one of 'auto', 'shardplug', 'dataset', got 'both'\.$",
    ):
        IterableDatasetShard(range(8), worker_split="both")


def test_a_stream_is_begun_in_its_middle() -> None:
    feed = StreamFeed(
        dataset=range(9),
        batch_size=2,
        shard=Shard(1, 2),
        split=Split.WHOLE,
        tail=Tail.UNEVEN,
        is_cut=False,
        worker_split="auto",
    )
    pass_, head = feed.begin(Cursor(0, 3))
    assert (pass_.consumed(0), pass_.num_steps, head) == (3, 1, [])  # 3,4 | 5,6 and 7,8
    assert feed.count_steps(Cursor(0, 3)) == 1


def test_a_feed_knows_its_plan() -> None:
    feed = StreamFeed(
        dataset=range(9),
        batch_size=4,
        shard=Shard(1, 2),
        split=Split.SLICE,
        tail=Tail.DROP,
        is_cut=False,
        worker_split="auto",
    )
    assert feed.plan == ShardPlan(9, 4, Shard(1, 2), split=Split.SLICE, tail=Tail.DROP)
    assert (feed.global_batch_size, len(feed), feed.drop_last) == (4, 2, True)


def test_it_is_an_iterable_data_set() -> None:
    assert isinstance(IterableDatasetShard(range(8)), IterableDataset)


class Wrapped(IterableDataset[int]):
    """A user's stream around a shard of ours."""

    def __init__(self, inner: IterableDatasetShard) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[int]:
        yield from self.inner


@pytest.mark.parametrize("worker_split", ["auto", "dataset", "shardplug"])
def test_a_shard_inside_a_users_stream_loses_nothing_to_workers(worker_split: str) -> None:
    stream = Wrapped(IterableDatasetShard(range(16), 2))
    loader = prepare_data_loader(DataLoader(stream, 2, num_workers=2), worker_split=worker_split)
    for _ in range(2):
        assert sorted(torch.cat(list(loader)).tolist()) == list(range(16))
