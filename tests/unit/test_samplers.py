"""Samplers: what a shard of a batch sampler is, on a whole grid; shuffling by value; skipping."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader.sampler import BatchSampler as StatefulBatchSampler
from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler

from shardplug.errors import PlanError
from shardplug.plan.shard import Shard
from shardplug.plan.split import ShardPlan, Split, Tail, choose_tail
from shardplug.samplers import (
    BatchSamplerShard,
    PermutedSampler,
    SeedableRandomSampler,
    SkipBatchSampler,
    epoch_parts,
    known_length,
    length_of,
    nested_samplers,
)
from tests import laws, reference, strategies
from tests.laws import Case, Run

Batches = list[list[int]]


class Opaque(Sampler[int]):
    """A sampler of no known kind, with a length."""

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids = list(ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    def __len__(self) -> int:
        return len(self.ids)


class Unsized(Opaque):
    """The same, without an answer to ``len``."""

    __len__ = None  # type: ignore[assignment]


class OwnBatchSampler(BatchSampler):
    """Yields what torch's does, but may do anything as far as anyone can tell: it is walked."""


def shards_of(
    batch_sampler: Callable[[], Iterable[Any]], world_size: int, **options: Any
) -> list[BatchSamplerShard]:
    """One shard for each rank, each over a batch sampler of its own."""
    return [
        BatchSamplerShard(batch_sampler(), world_size, rank, **options)
        for rank in range(world_size)
    ]


def batches_of(batch_sampler: Iterable[Any]) -> Batches:
    return [list(map(int, batch)) for batch in batch_sampler]


def run_of(shards: Sequence[BatchSamplerShard]) -> Run:
    """One full pass of all shards, with its record."""
    return tuple(laws.pass_rank(shard.begin()[0], length=laws.length_of(shard)) for shard in shards)


# The definition, on the whole grid.

WAYS: dict[str, Callable[[int, int, bool], Iterable[Any]]] = {
    "looked up": lambda n, size, drop: BatchSampler(range(n), size, drop),
    "ids walked": lambda n, size, drop: BatchSampler(Opaque(range(n)), size, drop),
    "batches walked": lambda n, size, drop: OwnBatchSampler(range(n), size, drop),
}
SIZES = list(product(range(42), range(1, 9)))
BOTH = (False, True)


@pytest.mark.parametrize("world_size", range(1, 6))
@pytest.mark.parametrize("way", WAYS)
def test_a_shard_is_what_it_is_defined_to_be(way: str, world_size: int) -> None:
    sizes = SIZES if way == "looked up" else SIZES[world_size::3]
    for (n, size), split, even, drop in product(sizes, BOTH, BOTH, BOTH):
        if split and size % world_size:
            continue
        expected = reference.classic(
            reference.chunks(range(n), size),
            world_size,
            batch_size=size,
            split_batches=split,
            even_batches=even,
            drop_last=drop,
        )
        for rank in range(world_size):
            shard = BatchSamplerShard(WAYS[way](n, size, drop), world_size, rank, split, even)
            mode = (n, size, rank, split, even, drop)
            assert list(shard) == expected[rank], mode
            # Walked batches, sliced, where nothing is evened out: the last one decides.
            is_open = way == "batches walked" and split and not (even or drop)
            assert known_length(shard) == (None if is_open else len(expected[rank])), mode


@pytest.mark.parametrize("tail", Tail)
@pytest.mark.parametrize("way", WAYS)
def test_a_shard_keeps_every_law_with_every_tail(way: str, tail: Tail) -> None:
    for (n, size), world_size, split in product(SIZES[::5], range(1, 6), Split):
        case = Case(n, size, world_size, split, tail)
        if case.can_split:
            hold_against_laws(way, case)


@given(case=strategies.cases(max_samples=300, max_world_size=9, max_batch_size=12))
@example(case=Case(13, 4, 3, tail=Tail.EXACT))
@example(case=Case(0, 3, 2))
def test_laws_hold_in_every_way_of_getting_the_batches(case: Case) -> None:
    for way in WAYS:
        hold_against_laws(way, case)


def hold_against_laws(way: str, case: Case) -> None:
    shards = shards_of(
        lambda: WAYS[way](case.num_samples, case.batch_size, False),
        case.world_size,
        split_batches=case.split_batches,
        tail=case.tail.value,
    )
    try:
        expected = reference.epoch(case)
    except reference.Impossible:
        for shard in shards:
            with pytest.raises(PlanError, match=r"tail='exact'"):
                list(shard)
        return
    run = run_of(shards)
    assert rows_of(run) == rows_of(expected), case
    laws.tile(run, case)
    laws.padding(run, case)
    laws.same_count(run, case)
    laws.valid_rows(run, case)
    if way != "batches walked":  # there lengths may be open, and consumed counts batches
        laws.length(run)
        laws.prefix(run, case, is_end_known=way == "looked up")


def rows_of(run: Run) -> list[list[tuple[tuple[int, ...], int | None]]]:
    return [[(step.rows, step.valid_rows) for step in rank.steps] for rank in run]


def test_of_a_billion_samples_1024_ranks_share_the_first_and_the_last_steps() -> None:
    n, size, world_size = 10**9, 7, 1024
    per_step = size * world_size
    full, rest = divmod(n, per_step)
    first = list(range(20 * per_step))
    last = list(range((full - 19) * per_step, n)) + list(range(per_step - rest))
    got_first: list[Batches] = []
    got_last: list[Batches] = []
    for rank in range(world_size):
        shard = BatchSamplerShard(BatchSampler(range(n), size, False), world_size, rank)
        pass_, _ = shard.begin()
        assert len(shard) == full + 1
        got_first.append(list(islice(pass_, 20)))
        got_last.append(list(shard.begin()[0].after(full - 19)))
    assert in_turn(got_first) == first
    assert in_turn(got_last) == last


def in_turn(by_rank: list[Batches]) -> list[int]:
    """All rows, step by step and rank by rank."""
    return [row for step in zip(*by_rank, strict=True) for batch in step for row in batch]


# Over the samplers that torch ships: the batches of torch, and its draws.


class Kind(NamedTuple):
    make: Callable[[int, torch.Generator | None], Any]
    draws_at_once: bool = True


KINDS = {
    "sequential": Kind(lambda n, _: SequentialSampler(range(n))),
    "range": Kind(lambda n, _: range(2, 2 * n + 2, 2)),
    "list": Kind(lambda n, _: [(7 * at + 3) % 50 for at in range(n)]),
    "opaque": Kind(lambda n, _: Opaque((5 * at) % n for at in range(n))),
    "array": Kind(lambda n, _: np.arange(n)[::-1]),
    "tensor": Kind(lambda n, _: torch.arange(n).flip(0)),
    "random": Kind(lambda n, g: RandomSampler(range(n), generator=g)),
    "random, fewer": Kind(lambda n, g: RandomSampler(range(n + 3), num_samples=n, generator=g)),
    "random, more": Kind(
        lambda n, g: RandomSampler(range(n), num_samples=2 * n + 1, generator=g), False
    ),
    "random, twice": Kind(
        lambda n, g: RandomSampler(range(n), num_samples=2 * n, generator=g), False
    ),
    "with replacement": Kind(
        lambda n, g: RandomSampler(range(n), replacement=True, num_samples=45, generator=g), False
    ),
    "random subset": Kind(lambda n, g: SubsetRandomSampler(range(10, 10 + n), generator=g)),
    "weighted": Kind(
        lambda n, g: WeightedRandomSampler([1.0 + at % 3 for at in range(n)], n, generator=g)
    ),
    "distributed": Kind(lambda n, _: DistributedSampler(range(n), 2, 1)),  # type: ignore[arg-type]
    "stateful": Kind(lambda n, g: StatefulRandomSampler(range(n), generator=g)),
    "seedable": Kind(lambda n, _: SeedableRandomSampler(range(n), data_seed=4)),
    "permuted": Kind(lambda n, _: PermutedSampler(n, seed=4)),
}


def state_of(generator: Any) -> bytes:
    return bytes(generator.get_state().tolist())


def seeded_generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.mark.parametrize("kind", KINDS)
def test_shards_have_the_batches_of_torch_and_leave_its_generator_where_torch_does(
    kind: str,
) -> None:
    for n, size, world_size, drop in product((1, 2, 9, 20), (1, 3, 4), (1, 2, 3), (False, True)):
        theirs = seeded_generator()
        batch_sampler = BatchSampler(KINDS[kind].make(n, theirs), size, drop)
        epochs = [batches_of(batch_sampler) for _ in range(2)]
        after = theirs.get_state()
        for rank in range(world_size):
            ours = seeded_generator()
            shard = BatchSamplerShard(
                BatchSampler(KINDS[kind].make(n, ours), size, drop), world_size, rank
            )
            for epoch in epochs:
                expected = reference.classic(epoch, world_size, batch_size=size, drop_last=drop)
                assert batches_of(shard) == expected[rank], (kind, n, size, world_size, drop)
            assert torch.equal(ours.get_state(), after), (kind, n, size, world_size, drop)


@pytest.mark.parametrize("kind", [name for name in KINDS if "stateful" not in name])
def test_without_a_generator_the_global_one_moves_as_it_does_under_torch(kind: str) -> None:
    torch.manual_seed(6)
    batch_sampler = BatchSampler(KINDS[kind].make(11, None), 2, False)
    epochs = [batches_of(batch_sampler) for _ in range(2)]
    after = torch.get_rng_state()
    for rank in range(2):
        torch.manual_seed(6)
        shard = BatchSamplerShard(BatchSampler(KINDS[kind].make(11, None), 2, False), 2, rank)
        for epoch in epochs:
            assert batches_of(shard) == reference.classic(epoch, 2, batch_size=2)[rank]
        assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.draws_at_once])
@pytest.mark.parametrize("num_batches", [0, 1, 3])
def test_a_pass_that_is_left_early_has_drawn_what_torch_would_have(
    kind: str, num_batches: int
) -> None:
    theirs, ours = seeded_generator(), seeded_generator()
    unbroken = BatchSampler(KINDS[kind].make(20, theirs), 2, False)
    left = BatchSamplerShard(BatchSampler(KINDS[kind].make(20, ours), 2, False), 1, 0)
    for batch_sampler in (unbroken, left):
        if num_batches:
            assert len(list(islice(batch_sampler, num_batches))) == num_batches
    assert torch.equal(ours.get_state(), theirs.get_state())
    assert batches_of(unbroken) == batches_of(left)


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_loader_of_torchs_a_shard_draws_after_the_loader_as_its_sampler_would(
    kind: str,
) -> None:
    def passes(of_shard: bool, generator: torch.Generator | None) -> list[Batches]:
        torch.manual_seed(6)
        batch_sampler: Any = BatchSampler(KINDS[kind].make(12, generator), 3, True)
        if of_shard:
            batch_sampler = BatchSamplerShard(batch_sampler)
        samples: Any = range(60)
        loader: DataLoader[Any] = DataLoader(
            samples, batch_sampler=batch_sampler, generator=generator, collate_fn=list
        )
        return [batches_of(loader) for _ in range(2)]

    assert passes(True, None) == passes(False, None)
    assert passes(True, seeded_generator()) == passes(False, seeded_generator())


def test_torchdatas_batch_sampler_is_seen_through_as_well() -> None:
    shard = BatchSamplerShard(StatefulBatchSampler(range(10), 2, False), 2, 1)
    assert shard.is_plain
    assert shard.num_samples == 10
    assert list(shard) == [[2, 3], [6, 7], [0, 1]]


class Counted(Sequence[int]):
    """Counts the ids that are asked for."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked = 0

    def __getitem__(self, at: Any) -> Any:
        self.asked += len(range(self.length)[at]) if isinstance(at, slice) else 1
        return range(self.length)[at]

    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize("world_size", [1, 4, 16, 64])
def test_what_a_shard_looks_up_is_what_it_yields(world_size: int) -> None:
    ids = Counted(1000)
    shard = BatchSamplerShard(BatchSampler(ids, 2, False), world_size, world_size - 1)
    assert len(shard) == -(-1000 // (2 * world_size))
    assert ids.asked == 0
    batches = list(shard)
    assert ids.asked == 2 * len(batches)


# Over batch samplers of the user's own.


class Listed:
    """A batch sampler that yields stored lists, and declares what it is told to."""

    def __init__(
        self, batches: Iterable[Sequence[int]], batch_size: Any = None, drop_last: bool = False
    ) -> None:
        self.batches = [list(batch) for batch in batches]
        self.batch_size = batch_size
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Reusing(Listed):
    """Yields one list object over and over."""

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for ids in self.batches:
            batch[:] = ids
            yield batch
        batch[:] = [-1] * 9


class Other(Listed):
    """Yields something else than lists, in turn."""

    def __iter__(self) -> Iterator[Any]:
        kinds: list[Callable[[list[int]], Any]] = [tuple, np.array, torch.tensor, iter, list]
        for number, batch in enumerate(self.batches):
            yield kinds[number % len(kinds)](batch)


class NoLength:
    """Has nothing but ``__iter__``, and declares what it is told to."""

    def __init__(
        self, items: Iterable[Any], batch_size: Any = None, drop_last: bool = False
    ) -> None:
        self.items = list(items)
        self.batch_size = batch_size
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class UntypedLength(NoLength):
    def __len__(self) -> int:
        raise TypeError("no length here")


class UnwrittenLength(NoLength):
    def __len__(self) -> int:
        raise NotImplementedError


class FailingLength(NoLength):
    def __len__(self) -> int:
        raise RuntimeError("the length is not known yet")


SIZED = [Listed, Reusing, Other]
UNSIZED = [NoLength, UntypedLength, UnwrittenLength, FailingLength]
LENGTHS = {
    "fixed": [3, 3, 3, 3, 3, 3, 3],
    "fixed, short end": [3, 3, 3, 3, 3, 1],
    "one": [2],
    "short only": [1],
    "none": [],
    "varying": [1, 4, 2, 5, 3],
    "declared, not kept": [3, 2, 3, 2, 3, 3],
    "long in the middle": [3, 3, 4, 3],
    "long at the end": [3, 3, 3, 5],
    "short before the end": [3, 3, 2, 3],
    "two short ones at the end": [3, 3, 1, 1],
}


@pytest.mark.parametrize("of", [*SIZED, *UNSIZED])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_batches_of_the_users_are_dealt_as_they_are(of: type[Any], lengths: str) -> None:
    batches = strategies.batches_of(LENGTHS[lengths])
    for world_size, declared, even, drop in product(
        range(1, 6), (None, 3), (False, True), (False, True)
    ):
        size = declared if reference.is_fixed(batches, declared) else None
        expected = reference.classic(
            batches, world_size, batch_size=size, even_batches=even, drop_last=drop
        )
        for rank in range(world_size):
            shard = BatchSamplerShard(
                of(batches, declared, drop), world_size, rank, even_batches=even
            )
            if drop and of in SIZED and len(expected[rank]) != len(batches) // world_size:
                # It declares that it drops a short end, and does not: its length is wrong.
                with pytest.raises(PlanError, match="as much as its length says"):
                    batches_of(shard)
                continue
            assert batches_of(shard) == expected[rank], (world_size, declared, even, drop)
            if of in SIZED:
                assert len(shard) == len(expected[rank]), (world_size, declared, even, drop)
            else:
                with pytest.raises(TypeError, match=r"\w+ has no known length: only a pass will"):
                    len(shard)


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, [[0, 1, 2, 3], [6, 7, 8, 9], [12, 13, 14, 15]]),
        (1, [[4, 5], [10, 11], [16, 17, 18, 19]]),
    ],
)
def test_a_declared_size_that_does_not_hold_is_not_trusted(rank: int, expected: Batches) -> None:
    batches = strategies.batches_of([4, 2, 4, 2, 4, 4])
    shard = BatchSamplerShard(Listed(batches, 4), 2, rank)
    assert list(shard) == expected
    assert len(shard) == 3


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("even", [False, True])
def test_lists_of_the_caller_stay_as_they_are(split: bool, even: bool) -> None:
    stored = [[0, 1], [2, 3], [4]]
    batch_sampler = Listed([], 2)
    batch_sampler.batches = stored

    def spoil() -> None:
        for rank in range(2):
            for batch in BatchSamplerShard(batch_sampler, 2, rank, split, even):
                batch.append(99)  # whoever gets a batch may do with it what they like

    laws.hands_off(spoil, batch_sampler, stored)


def test_a_plain_list_is_a_batch_sampler() -> None:
    shards = shards_of(lambda: [[0, 1], [2, 3], [4]], 2)
    assert [list(shard) for shard in shards] == [[[0, 1], [4]], [[2, 3], [0, 1]]]
    assert [len(shard) for shard in shards] == [2, 2]
    assert [shard.num_samples for shard in shards] == [5, 5]
    assert [shard.batch_size for shard in shards] == [None, None]


class SizedList(list[list[int]]):
    batch_size = 2


def test_a_list_that_declares_a_size_is_looked_at_for_its_length() -> None:
    batches = SizedList([[0, 1], [2, 3], [4, 5], [6]])
    drop = shards_of(lambda: batches, 2, tail="drop")
    assert [(list(shard), len(shard)) for shard in drop] == [([[0, 1]], 1), ([[2, 3]], 1)]
    cut = shards_of(lambda: batches, 2, split_batches=True, even_batches=False)
    assert [list(shard) for shard in cut] == [[[0], [2], [4], [6]], [[1], [3], [5]]]
    assert [len(shard) for shard in cut] == [4, 3]


def test_the_length_is_open_where_the_size_of_the_last_batch_decides() -> None:
    batches = strategies.batches_of([2, 2, 2, 1])
    for options in ({"tail": "drop"}, {"split_batches": True, "even_batches": False}):
        for shard in shards_of(lambda: Listed(batches, 2), 2, **options):
            with pytest.raises(TypeError) as caught:
                len(shard)
            assert str(caught.value) == (
                "The number of batches is not known before the pass: it depends on the size of "
                "the last batch of Listed."
            )


@pytest.mark.parametrize(
    ("length", "found"), [(2, "more"), (3, "an end after 4 steps"), (9, "an end after 4 steps")]
)
def test_a_length_that_is_not_kept_is_an_error(length: int, found: str) -> None:
    class Lies(Listed):
        def __len__(self) -> int:
            return length

    got: Batches = []
    with pytest.raises(PlanError) as caught:
        got.extend(BatchSamplerShard(Lies([[0], [1], [2], [3]])))
    told = found if length > 4 else "more"
    assert str(caught.value) == (
        f"`batch_sampler` must yield as much as its length says, which makes {length} steps, got "
        f"{told}. Correct its __len__, or remove it."
    )
    assert got == [[0], [1], [2], [3]][:length]


def test_a_sampler_whose_length_is_not_kept_is_an_error() -> None:
    class Lies(Opaque):
        def __len__(self) -> int:
            return 7

    shard = BatchSamplerShard(BatchSampler(Lies(range(3)), 2, False))
    with pytest.raises(PlanError, match=r"`sampler` .* makes 4 steps, got an end after 2 steps\."):
        list(shard)


@pytest.mark.parametrize("unsized", [Unsized, NoLength, FailingLength])
def test_a_sampler_without_a_length_is_walked_to_its_end(unsized: type[Any]) -> None:
    shards = shards_of(lambda: BatchSampler(unsized(range(5)), 2, False), 2)
    assert [shard.num_samples for shard in shards] == [None, None]
    for rank, shard in enumerate(shards):
        with pytest.raises(TypeError, match="has no known length"):
            len(shard)
        pass_, _ = shard.begin()
        assert pass_.num_steps is None
        assert list(pass_) == [[[0, 1], [4, 0]], [[2, 3], [1, 2]]][rank]
        assert pass_.num_steps == 2


def test_why_there_is_no_length_is_told() -> None:
    with pytest.raises(TypeError) as caught:
        length_of(FailingLength([]))
    assert str(caught.value.__cause__) == "the length is not known yet"


def test_a_length_that_fails_in_another_way_is_not_hidden() -> None:
    class Broken(NoLength):
        def __len__(self) -> int:
            raise OSError("the index file is gone")

    with pytest.raises(OSError, match="the index file is gone"):
        known_length(Broken([]))


# What a shard tells of itself.


def test_a_shard_knows_its_sizes_and_its_plan() -> None:
    batches = BatchSampler(range(10), 4, False)
    whole = BatchSamplerShard(batches, 2, 1)
    cut = BatchSamplerShard(batches, 2, 1, split_batches=True)
    assert (whole.batch_size, whole.global_batch_size, whole.num_samples) == (4, 8, 10)
    assert (cut.batch_size, cut.global_batch_size, cut.num_samples) == (4, 4, 10)
    assert whole.plan == ShardPlan(10, 4, Shard(1, 2))
    assert cut.plan == ShardPlan(10, 4, Shard(1, 2), split=Split.SLICE)
    assert whole.sampler is batches.sampler
    assert isinstance(whole, BatchSampler)


def test_over_batches_the_plan_counts_batches_and_leaves_their_number_open() -> None:
    shard = BatchSamplerShard(Listed([[0, 1], [2]], 2), 2, 1, tail="uneven")
    assert shard.plan == ShardPlan(None, 1, Shard(1, 2), tail=Tail.UNEVEN)
    assert (shard.batch_size, shard.global_batch_size, shard.num_samples) == (2, 4, None)
    assert isinstance(shard.sampler, Listed)


@pytest.mark.parametrize("declared", [-1, 0, None, "auto", 2.5])
def test_what_is_no_size_declares_none(declared: Any) -> None:
    shard = BatchSamplerShard(Listed([[0, 1], [2]], declared), 2, 1)
    assert (shard.batch_size, shard.global_batch_size) == (None, None)
    assert list(shard) == [[2]]


@pytest.mark.parametrize("declared", [np.int64(2), torch.tensor(2)])
def test_any_integer_is_a_size(declared: Any) -> None:
    shard = BatchSamplerShard(Listed([[0, 1], [2]], declared), 2, 1)
    assert shard.batch_size == 2
    assert list(shard) == [[2, 0]]


@pytest.mark.parametrize(
    ("tail", "even", "drop", "chosen"),
    [
        (None, True, False, Tail.PAD),
        (None, False, False, Tail.UNEVEN),
        (None, True, True, Tail.DROP),
        (None, False, True, Tail.DROP),
        ("pad", False, True, Tail.PAD),
        ("uneven", True, True, Tail.UNEVEN),
        ("drop", True, False, Tail.DROP),
        ("exact", True, True, Tail.EXACT),
        (Tail.EXACT, True, False, Tail.EXACT),
    ],
)
def test_the_tail_wins_over_the_flags(tail: Any, even: bool, drop: bool, chosen: Tail) -> None:
    assert choose_tail(tail, even_batches=even, drop_last=drop) is chosen
    shard = BatchSamplerShard(BatchSampler(range(4), 2, drop), 1, 0, False, even, tail=tail)
    assert shard.tail is chosen
    assert shard.drop_last is (chosen is Tail.DROP)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_processes": 0}, "`num_processes` must be at least 1, got 0."),
        (
            {"num_processes": 2, "process_index": 2},
            "`process_index` must be in [0, 2), got 2.",
        ),
        (
            {"tail": "wrap"},
            "`tail` must be one of 'pad', 'drop', 'uneven', 'exact', got 'wrap'.",
        ),
        (
            {"num_processes": 3, "split_batches": True},
            "`batch_size` must be a multiple of the 3 shards when each batch is split, got 4. "
            "Use 3 or 6, or split_batches=False.",
        ),
        (
            {"num_processes": 5, "split_batches": True},
            "`batch_size` must be a multiple of the 5 shards when each batch is split, got 4. "
            "Use 5, or split_batches=False.",
        ),
        (
            {"batch_sampler": Listed([[0]]), "num_processes": 2, "split_batches": True},
            "`batch_sampler` must declare a `batch_size` for its batches to be split, got None. "
            "Pass split_batches=False.",
        ),
        (
            {"batch_sampler": Listed([[0]], -1), "num_processes": 2, "split_batches": True},
            "`batch_sampler` must declare a `batch_size` for its batches to be split, got -1. "
            "Pass split_batches=False.",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    given = {"batch_sampler": BatchSampler(range(8), 4, False), **arguments}
    with pytest.raises(PlanError) as caught:
        BatchSamplerShard(**given)
    assert str(caught.value) == message


def test_splitting_batches_that_vary_is_an_error_on_every_rank() -> None:
    for shard in shards_of(lambda: Listed([[0, 1], [2], [3, 4]], 2), 2, split_batches=True):
        with pytest.raises(PlanError) as caught:
            list(shard)
        assert str(caught.value) == (
            "`batch_sampler` must yield batches of its declared size 2 for them to be split, got "
            "one of 1 rows. Pass split_batches=False."
        )


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))]
)
def test_shards_can_be_copied_and_pickled(copied: Callable[[Any], Any]) -> None:
    shard = BatchSamplerShard(
        BatchSampler(SeedableRandomSampler(range(9), data_seed=1), 2, False), 2, 1
    )
    shard.set_epoch(3)
    assert list(copied(shard)) == list(shard)
    skipping = SkipBatchSampler(BatchSampler(PermutedSampler(9), 2, False), 2)
    assert list(copied(skipping)) == list(skipping)


def test_a_shard_over_another_batch_sampler_is_like_this_one() -> None:
    shard = BatchSamplerShard(BatchSampler(range(8), 4, False), 2, 1, True, tail="exact")
    other = shard.over(BatchSampler(range(20, 24), 2, False))
    assert list(other) == [[21], [23]]
    assert (other.tail, other.split_batches) == (Tail.EXACT, True)


# The epoch.


class Follows(Opaque):
    """Told the epoch, and remembers all that it was told."""

    def __init__(self, ids: Iterable[int] = range(4)) -> None:
        super().__init__(ids)
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)


class Wraps:
    """A batch sampler around another one, which it keeps under the usual name."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler
        self.told: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batch_sampler)

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)


class WithoutTruth(UnwrittenLength):
    """No length, and so no truth value either; follows the epoch."""

    def __init__(self, sampler: Any = None) -> None:
        super().__init__([[0]])
        self.sampler = sampler
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)


@pytest.mark.parametrize("outer", [lambda it: BatchSamplerShard(it, 2, 1), SkipBatchSampler])
def test_the_epoch_reaches_everything_inside(outer: Callable[[Any], Any]) -> None:
    sampler = Follows()
    inner = WithoutTruth(sampler)
    middle = Wraps(inner)
    outer(middle).set_epoch(7)
    assert (middle.told, inner.told, sampler.told) == ([7], [7], [7])


def test_samplers_that_hold_themselves_or_nothing_end_the_search() -> None:
    around = Listed([])
    around.sampler = around  # type: ignore[attr-defined]
    assert nested_samplers(around) == [around]
    assert nested_samplers(None) == []
    plain = BatchSampler(range(3), 2, False)
    assert nested_samplers(plain) == [plain, range(3)]
    assert epoch_parts(plain) == []


# Samplers of ours.


@pytest.mark.parametrize("seed", [0, 3, 2**63 - 1, 2**64 - 1, -1, -(2**63)])
@pytest.mark.parametrize("n", [1, 2, 7, 1023, 1024, 1025, 3000])
def test_an_epoch_of_the_seedable_sampler_is_a_permutation_seeded_by_seed_plus_epoch(
    n: int, seed: int
) -> None:
    sampler = SeedableRandomSampler(range(n), data_seed=seed)
    for epoch in (0, 1, 5):
        sampler.set_epoch(epoch)
        generator = torch.Generator().manual_seed((seed + epoch) % 2**64)
        expected = torch.randperm(n, generator=generator).tolist()
        assert list(sampler) == list(sampler) == expected
    assert len(sampler) == n


@pytest.mark.parametrize("seed", [0, 11])
@pytest.mark.parametrize(
    ("n", "options"),
    [
        (9, {}),
        (9, {"num_samples": 4}),
        (9, {"num_samples": 9}),
        (9, {"num_samples": 18}),
        (9, {"num_samples": 23}),
        (9, {"replacement": True}),
        (9, {"replacement": True, "num_samples": 100}),
    ],
)
def test_the_first_epoch_is_that_of_torchs_random_sampler(
    n: int, options: dict[str, Any], seed: int
) -> None:
    theirs = RandomSampler(range(n), **options, generator=torch.Generator().manual_seed(seed))
    ours = SeedableRandomSampler(range(n), **options, data_seed=seed)
    assert list(ours) == list(theirs)
    assert len(ours) == len(theirs)
    again = RandomSampler(range(n), **options, generator=torch.Generator().manual_seed(seed + 2))
    ours.set_epoch(2)
    assert list(ours) == list(again)


def test_where_the_seed_comes_from() -> None:
    torch.manual_seed(21)
    generator = torch.Generator().manual_seed(22)
    assert SeedableRandomSampler(range(3)).seed == 21
    assert SeedableRandomSampler(range(3), generator=generator).seed == 22
    assert SeedableRandomSampler(range(3), generator=generator, data_seed=23).seed == 23
    torch.randperm(5, generator=generator)
    assert SeedableRandomSampler(range(3), generator=generator).seed == 22


def test_no_generator_moves_when_the_seedable_sampler_shuffles() -> None:
    generator = torch.Generator().manual_seed(22)
    sampler = SeedableRandomSampler(range(30), generator=generator)
    laws.hands_off(lambda: list(sampler), generator, torch.default_generator, look=state_of)
    assert isinstance(sampler, RandomSampler)


@pytest.mark.parametrize("n", [0, 1, 2, 255, 1024, 3000])
def test_the_permuted_sampler_is_one_order_in_every_way_of_asking(n: int) -> None:
    sampler = PermutedSampler(n, seed=3)
    orders: Batches = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        order = list(sampler)
        assert sorted(order) == list(range(n))
        assert [sampler[at] for at in range(n)] == order
        assert sampler.take(torch.arange(n)).tolist() == order
        assert list(PermutedSampler(range(n), 3)) == orders[0] if orders else True
        orders.append(order)
    assert len(sampler) == n
    assert n < 255 or len(set(map(tuple, orders))) == 3


def test_permuted_samplers_follow_seed_and_epoch_by_value() -> None:
    first, second = PermutedSampler(400, seed=1), PermutedSampler(400, seed=1)
    first.set_epoch(4)
    first.set_epoch(4)
    second.set_epoch(9)
    second.set_epoch(4)
    assert list(first) == list(second)
    assert list(PermutedSampler(400, seed=2)) != list(PermutedSampler(400, seed=1))


def test_the_permuted_sampler_refuses_more_than_it_can_permute() -> None:
    with pytest.raises(PlanError, match=r"`num_samples` must be in \[0, 2\*\*62\]"):
        PermutedSampler(2**62 + 1)
    assert len(PermutedSampler(2**62)) == 2**62


def test_an_attribute_named_order_does_not_make_a_sampler_ours() -> None:
    class HasItsOwn(Opaque):
        def __init__(self, ids: Iterable[int]) -> None:
            super().__init__(ids)
            self.order = list(ids)

    shard = BatchSamplerShard(BatchSampler(HasItsOwn([3, 1, 2]), 2, False), 1, 0)
    assert not shard.is_by_value
    assert list(shard) == [[3, 1], [2, 3]]


def test_orders_by_value_are_told_apart_from_those_that_are_drawn() -> None:
    by_value: list[Any] = [
        SequentialSampler(range(4)),
        SeedableRandomSampler(range(4), data_seed=0),
        PermutedSampler(4),
    ]
    drawn: list[Any] = [RandomSampler(range(4)), [3, 2], Opaque([1]), SubsetRandomSampler([0, 1])]
    for samplers, expected in ((by_value, True), (drawn, False)):
        for sampler in samplers:
            shard = BatchSamplerShard(BatchSampler(sampler, 2, False))
            assert shard.is_by_value is expected
            assert not BatchSamplerShard(OwnBatchSampler(sampler, 2, False)).is_by_value


# Skipping.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drop", [False, True])
def test_skipping_leaves_out_the_first_batches_and_draws_as_torch_does(
    kind: str, drop: bool
) -> None:
    for n, size, skipped in product((1, 7, 20), (1, 3), (0, 1, 2, 5, 99)):
        theirs, ours = seeded_generator(), seeded_generator()
        batch_sampler = BatchSampler(KINDS[kind].make(n, theirs), size, drop)
        skipping = SkipBatchSampler(BatchSampler(KINDS[kind].make(n, ours), size, drop), skipped)
        for _ in range(2):
            assert batches_of(skipping) == batches_of(batch_sampler)[skipped:]
            assert torch.equal(ours.get_state(), theirs.get_state())
        assert len(skipping) == max(0, len(batch_sampler) - skipped)
        assert (skipping.batch_size, skipping.drop_last) == (size, drop)


def test_skipping_looks_nothing_up_on_the_way() -> None:
    ids = Counted(1000)
    skipping = SkipBatchSampler(BatchSampler(ids, 2, False), 499)
    assert list(skipping) == [[998, 999]]
    assert ids.asked == 2


def test_skipping_once_is_over_when_the_pass_begins() -> None:
    skipping = SkipBatchSampler(BatchSampler(range(6), 2, False), 2, is_once=True)
    assert len(skipping) == 1
    assert list(skipping) == [[4, 5]]
    assert len(skipping) == 3
    assert list(skipping) == [[0, 1], [2, 3], [4, 5]]


def test_skipping_batches_of_the_users() -> None:
    batches = [[0, 1], [2], [3, 4, 5]]
    skipping = SkipBatchSampler(batches, 1)
    assert (list(skipping), len(skipping)) == ([[2], [3, 4, 5]], 2)
    assert (skipping.batch_size, skipping.drop_last) == (None, False)
    assert skipping.sampler is batches
    with pytest.raises(TypeError, match="NoLength has no known length"):
        len(SkipBatchSampler(NoLength(batches), 1))
    assert list(SkipBatchSampler(SkipBatchSampler(batches, 1), 1)) == [[3, 4, 5]]


@pytest.mark.parametrize("count", [-1, -7])
def test_skipping_less_than_nothing_is_refused(count: int) -> None:
    with pytest.raises(PlanError) as caught:
        SkipBatchSampler([], count)
    assert str(caught.value) == f"`skip_batches` must be at least 0, got {count}."


def test_shards_of_what_is_skipped_are_those_of_the_rest() -> None:
    def skipping() -> SkipBatchSampler:
        return SkipBatchSampler(BatchSampler(range(11), 2, False), 2, is_once=True)

    shards = shards_of(skipping, 2)
    assert [len(shard) for shard in shards] == [2, 2]
    assert [list(shard) for shard in shards] == [
        [[4, 5], [8, 9]],
        [[6, 7], [10, 4]],
    ]
    assert [len(shard) for shard in shards] == [3, 3]
    assert [list(shard) for shard in shards] == [
        [[0, 1], [4, 5], [8, 9]],
        [[2, 3], [6, 7], [10, 0]],
    ]


# Beginning in the middle.


@given(
    case=strategies.possible_cases(),
    consumed=st.integers(0, 60),
    kind=st.sampled_from(["sequential", "opaque", "list", "seedable"]),
)
def test_a_pass_begun_in_the_middle_is_the_rest_of_the_epoch(
    case: Case, consumed: int, kind: str
) -> None:
    if not case.num_samples:
        return
    consumed = min(consumed, case.num_samples)
    order = [int(one) for one in KINDS[kind].make(case.num_samples, None)]
    try:
        expected = reference.rounds(case, consumed=consumed)
    except reference.Impossible:
        return
    for rank in range(case.world_size):
        shard = BatchSamplerShard(
            BatchSampler(KINDS[kind].make(case.num_samples, None), case.batch_size, False),
            case.world_size,
            rank,
            case.split_batches,
            tail=case.tail,
        )
        pass_, head = shard.begin(consumed, look=3)
        own = [round_[rank] for round_ in expected if rank < len(round_)]
        assert pass_.num_steps == len(own)
        assert head == order[:3]
        assert list(pass_) == [[order[at] for at in (*hand.rows, *hand.padding)] for hand in own]
        assert [pass_.valid_rows(at) for at in range(len(own))] == [len(hand.rows) for hand in own]


def test_a_pass_holds_nothing_of_a_shard_that_is_gone() -> None:
    shard = BatchSamplerShard(BatchSampler(SequentialSampler(range(6)), 2, False))
    seen = weakref.ref(shard)
    pass_, _ = shard.begin()
    del shard
    gc.collect()
    assert seen() is None
    assert list(pass_) == [[0, 1], [2, 3], [4, 5]]
