"""What each shard is to get, worked out the slow and obvious way: batches are dealt like cards.

Nothing here asks the code that it is compared with; only the names of the modes are shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, cycle, islice, pairwise, zip_longest
from typing import TypeVar

from shardplug.plan.split import Split, Tail
from tests.laws import Case, RankRun, Run, Step

T = TypeVar("T")


class Impossible(Exception):  # noqa: N818  # a verdict
    """The data cannot be dealt as asked: here the code must raise its own error."""


@dataclass(frozen=True, slots=True)
class Hand:
    """What one shard gets in one round: real rows, then padding."""

    rows: tuple[int, ...]
    padding: tuple[int, ...] = ()


Round = list[Hand]
"""One hand for each shard; at an uneven end the last shards may go without."""


def chunks(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[at : at + size] for at in range(0, len(items), size)]


def dealt_evenly(rows: Sequence[int], num_hands: int) -> list[Sequence[int]]:
    """Cut rows contiguously; the sizes are those of dealing them one by one."""
    sizes = [0] * num_hands
    for number in range(len(rows)):
        sizes[number % num_hands] += 1
    source = iter(rows)
    return [tuple(islice(source, size)) for size in sizes]


def rounds(case: Case, *, consumed: int = 0) -> list[Round]:
    """Deal out the positions of an epoch, from one of them on."""
    positions = range(consumed, case.num_samples)
    hand_size = case.batch_size
    batches = chunks(positions, case.batch_size)
    if case.split is Split.SLICE:
        hand_size = case.batch_size // case.world_size
        dealt = [chunks(batch, hand_size) for batch in batches]
    else:
        dealt = [list(round_) for round_ in chunks(batches, case.world_size)]
    if not dealt or len(list(chain(*dealt[-1]))) == hand_size * case.world_size:
        return [[Hand(tuple(rows)) for rows in round_] for round_ in dealt]
    if case.tail is Tail.EXACT:
        dealt = exact_end(dealt, case.world_size, hand_size)
    if case.tail is Tail.DROP:
        dealt = dealt[:-1]
    hands = [[Hand(tuple(rows)) for rows in round_] for round_ in dealt]
    if case.tail is Tail.PAD:
        hands[-1] = filled(hands[-1], case, hand_size)
    return hands


def filled(round_: Round, case: Case, hand_size: int) -> Round:
    """Fill up the hands of the last round from the start of the epoch, cycling."""
    spare = cycle(range(case.num_samples))
    full = []
    for hand in [*round_, *[Hand(())] * (case.world_size - len(round_))]:
        full.append(Hand(hand.rows, tuple(islice(spare, hand_size - len(hand.rows)))))
    return full


def exact_end(
    dealt: list[list[Sequence[int]]], count: int, hand_size: int
) -> list[list[Sequence[int]]]:
    """Deal the last round evenly; if it has too few rows, the round before gives the missing."""
    whole, last = dealt[:-1], list(chain(*dealt[-1]))
    if hand_size == 1:
        raise Impossible
    if len(last) >= count:
        return [*whole, dealt_evenly(last, count)]
    if not whole:
        raise Impossible
    before = list(chain(*whole[-1]))
    missing = count - len(last)
    before, last = before[:-missing], before[-missing:] + last
    return [*whole[:-1], dealt_evenly(before, count), dealt_evenly(last, count)]


def epoch(case: Case, *, consumed: int = 0) -> Run:
    """What all shards get; with its last step, each counts the epoch as done."""
    return _collected(rounds(case, consumed=consumed), case, consumed, is_end_known=True)


def stream(case: Case, *, consumed: int = 0) -> Run:
    """The same when the end is only known once it has come: the cursor counts what was read."""
    return _collected(rounds(case, consumed=consumed), case, consumed, is_end_known=False)


def _collected(dealt: list[Round], case: Case, consumed: int, *, is_end_known: bool) -> Run:
    by_rank: list[list[Step]] = [[] for _ in range(case.world_size)]
    for round_ in dealt:
        consumed += sum(len(hand.rows) for hand in round_)
        for steps, hand in zip(by_rank, round_, strict=False):
            steps.append(Step(hand.rows + hand.padding, len(hand.rows), consumed))
    if is_end_known:
        for steps in by_rank:
            if steps:
                steps[-1] = Step(steps[-1].rows, steps[-1].valid_rows, case.num_samples)
    return tuple(RankRun(tuple(steps), len(steps) if is_end_known else None) for steps in by_rank)


# Batches that come ready.


def classic(
    batches: Sequence[Sequence[int]],
    count: int,
    *,
    batch_size: int | None,
    split_batches: bool = False,
    even_batches: bool = True,
    drop_last: bool = False,
) -> list[list[list[int]]]:
    """What ``BatchSamplerShard`` gives each shard, batch after batch, as its users know it."""
    table = [list(batch) for batch in batches]
    if drop_last:
        table = [batch for batch in table if batch_size is None or len(batch) == batch_size]
    if split_batches:
        assert batch_size is not None
        return _classic_split(table, count, batch_size, even_batches=even_batches)
    if drop_last:
        table = table[: len(table) - len(table) % count]
    elif even_batches and table:
        first = table[:count]
        if batch_size is None:
            spare_batches = cycle([list(batch) for batch in first])
            while len(table) % count:
                table.append(next(spare_batches))
        else:
            spare = cycle(list(chain(*first)))
            table[-1] = table[-1] + list(islice(spare, batch_size - len(table[-1])))
            while len(table) % count:
                table.append(list(islice(spare, batch_size)))
    return [table[rank::count] for rank in range(count)]


def _classic_split(
    table: list[list[int]], count: int, batch_size: int, *, even_batches: bool
) -> list[list[list[int]]]:
    if even_batches and table:
        spare = cycle(table[0])
        table = [*table[:-1], table[-1] + list(islice(spare, batch_size - len(table[-1])))]
    by_rank: list[list[list[int]]] = [[] for _ in range(count)]
    for batch in table:
        for rank, piece in enumerate(chunks(batch, batch_size // count)):
            by_rank[rank].append(list(piece))
    return by_rank


def is_fixed(batches: Sequence[Sequence[int]], batch_size: int | None) -> bool:
    """Whether the declared batch size holds: every batch has it, but the last may be shorter."""
    sizes = [len(batch) for batch in batches]
    return batch_size is not None and (
        all(size == batch_size for size in sizes[:-1])
        and all(size <= batch_size for size in sizes[-1:])
    )


def varying(batches: Sequence[Sequence[int]], count: int, tail: Tail) -> Run:
    """Batches of any size, dealt whole to each shard; the cursor counts batches. Not for EXACT."""
    real = classic(batches, count, batch_size=None, even_batches=False, drop_last=tail is Tail.DROP)
    given = classic(
        batches, count, batch_size=None, even_batches=tail is Tail.PAD, drop_last=tail is Tail.DROP
    )
    return tuple(
        RankRun(
            tuple(
                Step(tuple(rows), 0 if own is None else len(own), min(done, len(batches)))
                for own, rows, done in zip_longest(
                    real[rank], given[rank], range(count, count * len(given[rank]) + 1, count)
                )
            ),
            None,
        )
        for rank in range(count)
    )


def exact_groups(batches: Sequence[Sequence[int]], count: int) -> list[list[Sequence[int]]]:
    """Which batches make each round when every shard is to get a piece of one, none empty.

    Whole rounds as usual. A last one with too few rows takes whole batches, as few as can be, from
    the round before, which must keep a row for each shard.
    """
    groups = [list(group) for group in chunks(batches, count)]
    if not groups:
        return []
    last = groups.pop()
    before = groups.pop() if groups else []
    while sum(map(len, last)) < count:
        if not before or len(last) == count:
            raise Impossible
        last.insert(0, before.pop())
    if before and sum(map(len, before)) < count:
        raise Impossible
    return [*groups, *([before] if before else []), last]


def fairest(sizes: Sequence[int], num_pieces: int) -> int:
    """The size of the largest piece, when batches are cut into pieces as fairly as can be."""
    return min(
        max(-(-size // pieces) for size, pieces in zip(sizes, cuts, strict=True))
        for cuts in _compositions(num_pieces, len(sizes))
    )


def _compositions(total: int, parts: int) -> Iterator[list[int]]:
    """Every way to write a total as a sum of that many numbers, each at least one."""
    for bars in combinations(range(1, total), parts - 1):
        edges = [0, *bars, total]
        yield [stop - start for start, stop in pairwise(edges)]


def flat(batches: Iterable[Sequence[int]]) -> list[int]:
    return list(chain.from_iterable(batches))
