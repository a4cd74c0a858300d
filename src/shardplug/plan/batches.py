"""Deal out the batches of a batch sampler that cannot be seen through.

A batch sampler counts as *fixed* when it declares a batch size and every batch but the last has
it: then its rows are dealt as `ShardPlan` says. Whether it keeps its word is seen while walking,
never assumed. Every other one is dealt whole: batch ``i`` to shard ``i mod count``; padding is
copies of the first batches, ``Tail.DROP`` drops incomplete rounds only, and ``Tail.EXACT`` cuts
batches of the last round, never mixing the rows of two.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from shardplug.errors import PlanError
from shardplug.plan.deal import Part
from shardplug.plan.shard import Shard
from shardplug.plan.split import ShardPlan, Split, Tail

Batch = Sequence[Any]


def deal_batches(
    batches: Iterable[Iterable[Any]],
    *,
    batch_size: int | None,
    shard: Shard,
    split: Split = Split.WHOLE,
    tail: Tail = Tail.PAD,
) -> Generator[Part[Any], None, int]:
    """Deal out the batches of one epoch to one shard.

    Every shard walks all batches. Lists are copied, so a sampler may reuse one list object and the
    lists of a caller stay as they are.

    Args:
        batches: The epoch's batches, in order.
        batch_size: The declared batch size; None if none is declared.
        shard: Which part, of how many.
        split: ``Split.SLICE`` needs a fixed batch size that the number of shards divides.
        tail: What happens at the end.

    Yields:
        This shard's part of each step; ``consumed`` counts batches.

    Returns:
        Batches in the epoch.

    Raises:
        PlanError: If the batches are not fixed and are to be split, or ``Tail.EXACT`` cannot deal
            out the end.

    Example:
        >>> parts = deal_batches([[0, 1], [2], [3]], batch_size=None, shard=Shard(1, 2))
        >>> [(part.rows, part.valid_rows) for part in parts]
        [([2], 1), ([0, 1], 0)]
    """
    # A declared size that is no size at all cannot be trusted any more than one that is not kept.
    size = batch_size if batch_size is not None and batch_size > 0 else None
    if size is None and split is Split.SLICE:
        raise PlanError(
            "`batch_sampler` must declare a fixed `batch_size` for its batches to be split, got "
            f"{batch_size}. Pass split_batches=False."
        )
    plan = ShardPlan(None, size or 1, shard, split=split, tail=tail)
    walk = _Walk(iter(batches), size, must_be_fixed=split is Split.SLICE)
    per_round = 1 if split is Split.SLICE else shard.count
    head: list[Batch] = []
    held: list[Batch] = []
    steps = 0
    while len(round_ := walk.take(per_round)) == per_round and not walk.ended_short:
        if tail is Tail.PAD and not head:
            # What goes out may be changed by whoever gets it; padding is made of copies.
            head = list(map(keep_batch, round_))
        if tail is Tail.EXACT:
            held, round_ = round_, held
            if not round_:
                continue
        steps += 1
        yield _own_part(round_, plan, consumed=steps * per_round)
    rest = [*held, *round_]
    if walk.batch_size is None:
        yield from _varying_end(rest, head or rest, shard, tail, num_batches=walk.count)
    else:
        done = steps * per_round
        yield from _fixed_end(rest, head or rest, plan, done=done, num_batches=walk.count)
    return walk.count


@dataclass(slots=True)
class _Walk:
    """Walks batches, copying lists, and watches whether they keep the declared size.

    Attributes:
        source: The batches.
        batch_size: The declared size; None if there is none, or as soon as it is not kept.
        must_be_fixed: A size that is not kept is an error.
        count: Batches taken.
        ended_short: The last batch has been taken, and is shorter than the others.
    """

    source: Iterator[Iterable[Any]]
    batch_size: int | None
    must_be_fixed: bool
    count: int = 0
    ended_short: bool = False
    _ahead: list[Batch] = field(default_factory=list)

    def take(self, number: int) -> list[Batch]:
        """Return the next batches, fewer at the end.

        A round whose last batch is shorter than declared is only complete if more batches follow:
        the next one is looked at.
        """
        taken = [*self._ahead, *map(keep_batch, islice(self.source, number - len(self._ahead)))]
        self._ahead = []
        self.count += len(taken)
        if self.batch_size is None:
            return taken
        odd = [index for index, batch in enumerate(taken) if len(batch) != self.batch_size]
        if not odd:
            return taken
        odd_size = len(taken[odd[0]])
        if odd[0] == len(taken) - 1 and odd_size < self.batch_size:
            self._ahead = list(map(keep_batch, islice(self.source, 1)))
            self.ended_short = not self._ahead
        if not self.ended_short:
            if self.must_be_fixed:
                raise PlanError(
                    f"`batch_sampler` must yield batches of its declared size {self.batch_size} "
                    f"for them to be split, got one of {odd_size} rows. Pass split_batches=False."
                )
            self.batch_size = None
        return taken


def keep_batch(batch: Iterable[Any]) -> Batch:
    """Return a batch that nobody else will change and whose rows can be counted."""
    if isinstance(batch, list) or not isinstance(batch, Sized):
        return list(batch)
    return batch  # type: ignore[return-value]  # sized and iterable is all that is asked


def _own_part(round_: list[Batch], plan: ShardPlan, *, consumed: int) -> Part[Any]:
    """Return the shard's part of a full round: its batch, or its piece of the only one."""
    if plan.split is Split.SLICE:
        first = plan.shard.index * plan.shard_batch_size
        own: Batch = list(round_[0])[first : first + plan.shard_batch_size]
    else:
        own = round_[plan.shard.index]
    return Part(own, len(own), consumed)


def _fixed_end(
    rest: list[Batch], head: list[Batch], plan: ShardPlan, *, done: int, num_batches: int
) -> Iterator[Part[Any]]:
    """Deal the rows of the last rounds as the plan does; ``done`` batches went out before."""
    rows = list(chain.from_iterable(rest))
    first_rows = list(chain.from_iterable(head))
    offset = done * plan.batch_size
    ended = ShardPlan(
        offset + len(rows), plan.batch_size, plan.shard, split=plan.split, tail=plan.tail
    )
    for step in range(offset // plan.global_batch_size, ended.num_steps):
        own = [
            rows[at - offset] if at >= offset else first_rows[at] for at in ended.positions(step)
        ]
        after = ended.cursor(step + 1)
        consumed = num_batches if after == ended.num_samples else after // plan.batch_size
        yield Part(own, ended.valid_rows(step), consumed)


def _varying_end(
    rest: list[Batch], head: list[Batch], shard: Shard, tail: Tail, *, num_batches: int
) -> Iterator[Part[Any]]:
    """Deal the batches of the last rounds whole, or cut where the end has to be exact."""
    if tail is Tail.EXACT:
        for pieces, left in _exact_rounds(rest, shard.count) if rest else []:
            own = pieces[shard.index]
            yield Part(own, len(own), num_batches - left)
        return
    if not rest or tail is Tail.DROP:
        return
    if shard.index < len(rest):
        own = rest[shard.index]
        yield Part(own, len(own), num_batches)
    elif tail is Tail.PAD:
        yield Part(head[(shard.index - len(rest)) % len(head)], 0, num_batches)


def _exact_rounds(rest: list[Batch], count: int) -> list[tuple[list[Batch], int]]:
    """Cut the batches at the end so that every shard gets one piece a round, none empty.

    Returns each round's pieces and how many batches are left after it. The last round takes whole
    batches from the one before when its own have fewer rows than there are shards.
    """
    least = (len(rest) - 1) % count + 1
    for last in range(least, min(count, len(rest)) + 1):
        before, end = rest[: len(rest) - last], rest[len(rest) - last :]
        if all(sum(map(len, part)) >= count for part in (before, end) if part):
            rounds = [(_cut(before, count), last)] if before else []
            return [*rounds, (_cut(end, count), 0)]
    raise PlanError(
        f"`batch_sampler` must leave at least {count} rows, one a shard, for its last round with "
        f"tail='exact', got {sum(map(len, rest[-least:]))}. Use fewer ranks, tail=\"pad\" or "
        'tail="uneven".'
    )


def _cut(batches: list[Batch], count: int) -> list[Batch]:
    """Cut the largest of the batches until there are ``count`` pieces, in order.

    The batches hold at least ``count`` rows, so the largest piece to cut has two or more.
    """
    pieces = [1] * len(batches)
    while sum(pieces) < count:
        sizes = [len(batch) / number for batch, number in zip(batches, pieces, strict=True)]
        largest = max(range(len(batches)), key=sizes.__getitem__)
        pieces[largest] += 1
    return list(
        chain.from_iterable(
            _pieces(batch, number) for batch, number in zip(batches, pieces, strict=True)
        )
    )


def _pieces(batch: Batch, number: int) -> Iterator[Batch]:
    """Cut one batch into contiguous pieces, as evenly as possible."""
    rows = list(batch)
    each, more = divmod(len(rows), number)
    start = 0
    for index in range(number):
        stop = start + each + (index < more)
        yield rows[start:stop]
        start = stop
