"""Feeds: what a loader's samplers tell of its data, and orders that come from rank 0."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader.sampler import BatchSampler as StatefulBatchSampler
from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from shardplug.errors import CommError
from shardplug.feeds import (
    BroadcastBatches,
    BroadcastSampler,
    Cut,
    IndexFeed,
    find_cut,
    find_generator,
    follows_seed,
    seeded,
)
from shardplug.plan.cursor import Cursor
from shardplug.plan.shard import Shard
from shardplug.plan.split import Tail
from shardplug.samplers import (
    BatchSamplerShard,
    PermutedSampler,
    SeedableRandomSampler,
    SkipBatchSampler,
)
from shardplug.testing import LockstepComm, run_ranks
from tests import reference

OWN = Shard(1, 2)


class Subset(SubsetRandomSampler):
    """A user's own: what else it does is not known."""


def distributed(n: int, count: int, rank: int, **options: Any) -> DistributedSampler[Any]:
    options = {"shuffle": False, **options}
    data: Any = range(n)
    return DistributedSampler(data, count, rank, **options)


def part_of(sampler: Any, size: int = 2, **options: Any) -> Cut | None:
    asked = {"already_sharded": None, "shard": OWN, **options}
    return find_cut(BatchSampler(sampler, size, False), **asked)


# Cut before.


def test_what_a_distributed_sampler_pads_is_known() -> None:
    for n, count, drop in product(range(25), range(2, 6), (False, True)):
        for rank in range(count):
            sampler = distributed(n, count, rank, drop_last=drop)
            ids = [*sampler] if n or not drop else []
            real = [one for at, one in enumerate(ids) if at * count + rank < n]
            whole = n if not drop else min(n, len(ids) * count)
            assert part_of(sampler) == Cut(Shard(rank, count), whole, len(real)), (n, count, drop)


def test_torchdatas_distributed_sampler_is_known_too() -> None:
    sampler = StatefulDistributedSampler(range(5), 2, 1, shuffle=False)
    assert part_of(sampler) == Cut(Shard(1, 2), 5, 2)


class OwnWay(DistributedSampler[int]):
    """Deals in a way of its own, without padding."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, len(self.dataset), self.num_replicas))  # type: ignore[arg-type]


class MoreToSay(DistributedSampler[int]):
    """Deals as its parent does."""

    extra = 1


def test_of_a_subclass_that_deals_in_its_own_way_no_padding_is_claimed() -> None:
    data: Any = range(5)
    assert part_of(OwnWay(data, 2, 1)) == Cut(Shard(1, 2), None, None)
    assert part_of(MoreToSay(data, 2, 1)) == Cut(Shard(1, 2), 5, 2)


def test_a_distributed_sampler_is_found_inside_of_others() -> None:
    inner = BatchSampler(distributed(5, 2, 1), 2, False)
    expected = Cut(Shard(1, 2), None, None)
    assert find_cut(SkipBatchSampler(inner), already_sharded=None, shard=Shard(0, 3)) == expected


def test_a_part_of_one_is_no_part() -> None:
    assert part_of(distributed(5, 1, 0)) is None
    whole = BatchSamplerShard(BatchSampler(range(5), 2, False), 1, 0)
    assert find_cut(whole, already_sharded=None, shard=OWN) is None


def test_our_own_shards_are_known() -> None:
    cutting = BatchSamplerShard(BatchSampler(range(5), 2, False), 3, 2)
    assert find_cut(cutting, already_sharded=None, shard=OWN) == Cut(Shard(2, 3))
    assert find_cut(SkipBatchSampler(cutting), already_sharded=None, shard=OWN) == Cut(Shard(2, 3))


def test_what_the_user_says_wins() -> None:
    assert part_of([3, 1], already_sharded=True) == Cut(OWN)
    assert part_of([3, 1]) is None
    assert part_of(distributed(5, 2, 0), already_sharded=False) is None


@pytest.mark.parametrize("tail", [Tail.UNEVEN, Tail.DROP])
def test_the_remainder_of_parts_is_that_of_all_ranks_together(tail: Tail) -> None:
    for n, count, size, drop in product(range(20), (2, 3), (1, 2, 3), (False, True)):
        last, feeds = 0, []
        for rank in range(count):
            sampler = distributed(n, count, rank, drop_last=drop)
            batches = BatchSampler(sampler, size, tail is Tail.DROP)
            cut = find_cut(batches, already_sharded=None, shard=OWN)
            feeds.append(IndexFeed(BatchSamplerShard(batches, tail=tail), cut=cut))
            real = [at * count + rank < n for at in range(len(sampler))]
            steps = reference.chunks(real, size)
            if tail is Tail.DROP:
                steps = [step for step in steps if len(step) == size]
            last += sum(steps[-1]) if steps else 0
        is_full = not len(feeds[0]) or last == size * count
        for feed in feeds:
            assert feed.remainder == (-1 if is_full else last), (n, count, size, drop)
            assert feed.global_batch_size == size * count


def test_parts_know_themselves_and_the_whole() -> None:
    batches = BatchSampler(distributed(9, 2, 1), 4, False)
    feed = IndexFeed(
        BatchSamplerShard(batches, tail="uneven"),
        cut=find_cut(batches, already_sharded=None, shard=OWN),
    )
    assert (feed.is_cut, feed.shard, feed.plan.shard) == (True, Shard(1, 2), Shard(0, 1))
    assert (feed.num_samples, feed.global_batch_size, len(feed)) == (9, 8, 2)
    pass_, _ = feed.begin(Cursor(0))
    assert list(pass_) == [[1, 3, 5, 7], [0]]
    assert [pass_.valid_rows(0), pass_.valid_rows(1)] == [4, 0]


def test_ready_batches_of_a_part_come_one_by_one() -> None:
    batches = BatchSampler(distributed(3, 2, 1), 1, False)
    cut = find_cut(batches, already_sharded=None, shard=OWN)
    feed = IndexFeed(BatchSamplerShard(batches, tail="uneven"), is_ready=True, cut=cut)
    pass_, _ = feed.begin(Cursor(0))
    assert list(pass_) == [1, 0]
    assert [pass_.valid_rows(0), pass_.valid_rows(1)] == [1, 0]
    assert (feed.batch_size, feed.global_batch_size, feed.remainder) == (None, None, -1)


# Whole.


def test_a_whole_feed_tells_what_its_batches_are() -> None:
    feed = IndexFeed(BatchSamplerShard(BatchSampler(range(9), 2, False), 2, 1))
    assert (feed.is_cut, feed.shard, feed.tail) == (False, Shard(1, 2), Tail.PAD)
    assert (feed.batch_size, feed.global_batch_size, feed.num_samples) == (2, 4, 9)
    assert (feed.remainder, len(feed), feed.plan.num_steps) == (1, 3, 3)
    ready = IndexFeed(BatchSamplerShard(BatchSampler(range(9), 1, False), 2, 1), is_ready=True)
    assert (ready.batch_size, ready.global_batch_size, ready.num_samples) == (None, None, 9)
    assert (ready.remainder, len(ready)) == (-1, 5)


@pytest.mark.parametrize("tail", Tail)
def test_the_remainder_is_what_the_last_step_has_if_it_is_not_full(tail: Tail) -> None:
    for n, count, size in product(range(4, 24), (1, 2, 3), (2, 3)):
        shards = [
            BatchSamplerShard(BatchSampler(range(n), size, False), count, rank, tail=tail)
            for rank in range(count)
        ]
        if tail is Tail.EXACT and 0 < n % (size * count) < count and n < size * count:
            continue
        passes = [shard.begin()[0] for shard in shards]
        steps = [[len(batch) for batch in pass_] for pass_ in passes]
        last = max(map(len, steps)) - 1
        taking = [pass_ for pass_, own in zip(passes, steps, strict=True) if 0 <= last < len(own)]
        real = sum(pass_.valid_rows(last) for pass_ in taking)
        is_full = not taking or real == size * count
        feed = IndexFeed(shards[0])
        assert feed.remainder == (-1 if is_full else real), (n, count, size)


def test_of_batches_dealt_whole_no_remainder_is_claimed() -> None:
    assert IndexFeed(BatchSamplerShard([[0, 1], [2]], 2, 1)).remainder == -1


# The seed.


def loader_over(n: int = 6, **options: Any) -> DataLoader[Any]:
    samples: Any = torch.arange(n)
    return DataLoader(samples, **options)


class Stream(IterableDataset[int]):
    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Batches:
    """A batch sampler with a generator of its own."""

    def __init__(self, generator: Any = None, sampler: Any = None) -> None:
        self.generator = generator
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0]])


class Indexed:
    """A data set that draws, for itself."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 6


def test_the_generator_is_the_samplers_else_the_batch_samplers_else_the_streams() -> None:
    first, second = torch.Generator(), torch.Generator()
    shuffling = RandomSampler(range(6), generator=first)
    cases: list[tuple[Any, Any]] = [
        (loader_over(sampler=shuffling), first),
        (loader_over(sampler=shuffling, generator=second), first),
        (loader_over(shuffle=True, generator=first), first),
        (loader_over(batch_sampler=BatchSampler(shuffling, 2, False)), first),
        (loader_over(batch_sampler=Batches(first)), first),
        (loader_over(batch_sampler=Batches(second, shuffling)), first),
        (loader_over(batch_size=None, sampler=shuffling), first),
        (DataLoader(Stream(first)), first),
        (DataLoader(Stream(first), generator=second), first),
        (DataLoader(Stream(None), generator=second), second),
        (loader_over(generator=second), second),
        (loader_over(), None),
        (loader_over(batch_sampler=Batches("no generator")), None),
        (DataLoader(Indexed()), None),  # type: ignore[arg-type]  # its own business
    ]
    for number, (loader, expected) in enumerate(cases):
        assert find_generator(loader) is expected, number


def shuffles(sampler: Any, size: int = 2) -> IndexFeed:
    return IndexFeed(BatchSamplerShard(BatchSampler(sampler, size, False), 2, 1))


@pytest.mark.parametrize("kind", [RandomSampler, StatefulRandomSampler])
@pytest.mark.parametrize("options", [{}, {"num_samples": 4}, {"replacement": True}])
def test_a_random_sampler_follows_the_seed_and_is_left_as_it_is(kind: Any, options: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    feed = shuffles(kind(range(6), generator=generator, **options))
    follows: Any = seeded(feed, 9)
    sampler = follows.batches.sampler
    expected = RandomSampler(range(6), generator=torch.Generator().manual_seed(9), **options)
    assert list(sampler) == list(expected)
    assert len(sampler) == len(expected)
    assert type(feed.batches.sampler) is kind
    assert torch.equal(generator.get_state(), before)


def test_a_seeded_sampler_follows_a_data_set_that_grows() -> None:
    data = [0, 1, 2]
    feed: Any = seeded(shuffles(RandomSampler(data), 1), 0)
    data += [3, 4, 5]
    assert (len(feed), sorted(feed.batches.sampler)) == (3, [0, 1, 2, 3, 4, 5])


def test_everything_else_keeps_its_order() -> None:
    by_value = [SequentialSampler(range(3)), SeedableRandomSampler(range(3)), PermutedSampler(3)]
    for sampler in (*by_value, [2, 1], Subset([1, 2])):
        feed = shuffles(sampler)
        assert seeded(feed, 0) is feed


DRAWS: dict[str, Callable[[torch.Generator | None], Any]] = {
    "subset": lambda generator: SubsetRandomSampler([7, 5, 3, 1], generator),
    "weighted": lambda generator: WeightedRandomSampler([1.0, 0.0, 3.0], 5, generator=generator),
    "once each": lambda generator: WeightedRandomSampler(
        [1.0, 2.0, 3.0], 3, replacement=False, generator=generator
    ),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_draws_of_torchs_samplers_follow_the_seed_and_leave_them_as_they_are(kind: str) -> None:
    for own in (None, torch.Generator().manual_seed(1)):
        user = DRAWS[kind](own)
        moving = torch.default_generator if own is None else own
        before = torch.get_rng_state(), moving.get_state()
        feed: Any = seeded(shuffles(user, 2), 40)
        sampler = feed.batches.sampler
        assert (feed.kind, len(sampler), feed.is_by_value) == (type(user).__name__, len(user), True)
        for epoch in (0, 2, 1):
            sampler.set_epoch(epoch)
            due = list(DRAWS[kind](torch.Generator().manual_seed(40 + epoch)))
            assert list(sampler) == due
        feed.reseed(7)
        sampler.set_epoch(0)
        assert list(sampler) == list(DRAWS[kind](torch.Generator().manual_seed(7)))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert user.generator is own
        assert torch.equal(moving.get_state(), before[1])


def test_a_seeded_sampler_shows_what_the_users_has() -> None:
    feed: Any = seeded(shuffles(SubsetRandomSampler([4, 2])), 0)
    sampler = pickle.loads(pickle.dumps(feed.batches.sampler))
    assert sampler.indices == [4, 2]
    with pytest.raises(AttributeError, match="weights"):
        _ = sampler.weights


def test_a_part_that_is_shuffled_follows_the_seed_too() -> None:
    batches = BatchSampler(RandomSampler(range(9)), 2, False)
    cut = IndexFeed(BatchSamplerShard(batches, tail="uneven"), cut=Cut(OWN))
    follows: Any = seeded(cut, 4)
    assert (follows.cut, follows.tail) == (Cut(OWN), Tail.UNEVEN)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(4)).tolist()
    assert list(follows.batches.sampler) == order


def test_which_orders_follow_the_seed() -> None:
    for kind in (BatchSampler, StatefulBatchSampler):
        assert follows_seed(kind(SequentialSampler(range(3)), 1, False))
        assert follows_seed(kind(RandomSampler(range(3)), 1, False))
        assert follows_seed(kind(StatefulRandomSampler(range(3)), 1, False))
        assert follows_seed(kind(PermutedSampler(3), 1, False))
        assert follows_seed(kind(SubsetRandomSampler([1]), 1, False))
        assert follows_seed(kind(WeightedRandomSampler([1.0], 1), 1, False))
        assert not follows_seed(kind(Subset([1]), 1, False))
        assert not follows_seed(kind([1], 1, False))
    # What a batch sampler of the user's makes of it, nobody knows.
    assert not follows_seed(Batches(sampler=SequentialSampler(range(3))))


# Orders from rank 0.


class Told:
    """Yields what its rank was given."""

    batch_size = 2
    drop_last = True

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


def test_every_rank_gets_the_order_of_rank_0() -> None:
    def body(comm: LockstepComm) -> Any:
        sampler = BroadcastSampler(Told([comm.rank, 5, comm.rank + 7]), comm)
        assert len(sampler) == 3
        return list(sampler), sampler.order().take([2, 0]), [call.name for call in comm.calls]

    calls = ["broadcast_object"] * 2
    assert run_ranks(3, body) == [([0, 5, 7], [7, 0], calls)] * 3


def test_every_rank_gets_the_batches_of_rank_0() -> None:
    def body(comm: LockstepComm) -> Any:
        batches = [[comm.rank], (5, comm.rank)]
        sampler = BroadcastBatches(Told(batches), comm)
        assert (len(sampler), sampler.batch_size, sampler.drop_last) == (2, 2, True)
        for batch in sampler:
            if isinstance(batch, list):
                batch.append(99)  # whoever gets a batch may change it
        return list(sampler), batches

    results = run_ranks(2, body)
    assert [got for got, _ in results] == [[[0], (5, 0)]] * 2
    assert [kept for _, kept in results] == [[[0], (5, 0)], [[1], (5, 1)]]


def test_a_sampler_that_fails_on_rank_0_is_an_error_on_all() -> None:
    class Fails(Told):
        def __iter__(self) -> Iterator[Any]:
            raise OSError("the list of samples is gone")

    def body(comm: LockstepComm) -> str:
        with pytest.raises((OSError, CommError)) as caught:
            list(BroadcastSampler(Fails([]), comm))
        return f"{type(caught.value).__name__}: {caught.value}"

    assert run_ranks(2, body) == [
        "OSError: the list of samples is gone",
        "CommError: Rank 0 could not draw the order that all ranks wait for: OSError: the list of "
        "samples is gone",
    ]
