"""Deal out the batches of a batch sampler that cannot be seen through.

A batch sampler counts as *fixed* when it declares a batch size and every batch but the last has
it: then its rows are dealt as `ShardPlan` says. Whether it keeps its word is seen while walking,
never assumed. Every other one is dealt whole: batch ``i`` to shard ``i mod count``; padding is
copies of the first batches, ``Tail.DROP`` drops incomplete rounds only, and ``Tail.EXACT`` cuts
batches of the last round, never mixing the rows of two.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple

from shardplug.errors import PlanError
from shardplug.plan.deal import Part
from shardplug.plan.shard import Shard
from shardplug.plan.split import ShardPlan, Split, Tail

Batch = Sequence[Any]


class _Batch(NamedTuple):
    """A batch, or a piece of one, and the position of its first row in the epoch's rows."""

    rows: Batch
    first: int

    @property
    def positions(self) -> range:
        return range(self.first, self.first + len(self.rows))


def deal_batches(
    batches: Iterable[Iterable[Any]],
    *,
    batch_size: int | None,
    shard: Shard,
    split: Split = Split.WHOLE,
    tail: Tail = Tail.PAD,
    start: int = 0,
    extra_rows: int = 0,
    shards: Sequence[Shard] | None = None,
) -> Generator[Part[Any], None, int]:
    """Deal out the batches of one epoch.

    Every shard walks all batches. They are copied, so a sampler may reuse one list object and the
    lists of a caller stay as they are.

    Args:
        batches: The epoch's batches, in order, from its first.
        batch_size: The declared batch size; None if none is declared.
        shard: Which part, of how many.
        split: ``Split.SLICE`` needs a fixed batch size that the number of shards divides.
        tail: What happens at the end.
        start: Batches of the epoch that are consumed.
        extra_rows: Rows of the batch after them that are consumed too: an exact end may cut one.
        shards: Whose parts are wanted, in this order within each step; None: those of ``shard``.

    Yields:
        The part of each step; ``consumed`` counts batches.

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
    per_round = 1 if split is Split.SLICE else shard.count
    wanted = [shard] if shards is None else shards
    plans = [ShardPlan(None, size or 1, each, split=split, tail=tail) for each in wanted]
    walk = _Walk(
        iter(batches),
        size,
        must_be_fixed=split is Split.SLICE,
        num_kept=per_round if tail is Tail.PAD else 0,
    )
    walk.skip(start)
    done = walk.count
    held: list[_Batch] = []
    round_: list[_Batch] = []
    while not (extra_rows or walk.ended_short):
        round_ = walk.take(per_round)
        if len(round_) < per_round or walk.ended_short:
            break
        if tail is Tail.EXACT:
            held, round_ = round_, held
            if not round_:
                continue
        done += per_round
        for plan in plans:
            yield _own_part(round_, plan, consumed=done)
    else:
        round_ = list(walk.rest())
    rest = [*held, *round_]
    if walk.batch_size is None and not extra_rows:
        yield from _varying_end(rest, walk.head, plans, tail, num_batches=walk.count)
    else:
        yield from _fixed_end(rest, walk, plans, num_done=done, extra_rows=extra_rows)
    return walk.count


@dataclass(slots=True)
class _Walk:
    """Walks batches, copying them, and watches whether they keep the declared size.

    Attributes:
        source: The batches.
        batch_size: The declared size; None if there is none, or as soon as it is not kept.
        must_be_fixed: A size that is not kept is an error.
        num_kept: How many of the first batches are kept to pad from.
        head: These batches.
        count: Batches taken.
        num_rows: Rows in them.
        ended_short: The last batch has been taken, and is shorter than the others.
    """

    source: Iterator[Iterable[Any]]
    batch_size: int | None
    must_be_fixed: bool
    num_kept: int
    head: list[_Batch] = field(default_factory=list)
    count: int = 0
    num_rows: int = 0
    ended_short: bool = False
    _ahead: list[_Batch] = field(default_factory=list)

    def take(self, number: int) -> list[_Batch]:
        """Return the next batches, fewer at the end.

        A round whose last batch is shorter than declared is only complete if more batches follow:
        the next one is looked at.
        """
        taken = [*self._ahead, *self._read(number - len(self._ahead))]
        self._ahead = []
        self.count += len(taken)
        # What goes out may be changed by whoever gets it; padding is made of copies.
        kept = taken[: self.num_kept - len(self.head)]
        self.head += [batch._replace(rows=keep_batch(batch.rows)) for batch in kept]
        self._check_sizes(taken)
        return taken

    def skip(self, number: int) -> None:
        """Walk past batches, one by one, to the end if there are fewer."""
        while self.count < number and self.take(1):
            pass

    def rest(self) -> Iterator[_Batch]:
        """Yield all batches that are left."""
        while taken := self.take(1):
            yield from taken

    def _read(self, number: int) -> list[_Batch]:
        read = []
        for batch in map(keep_batch, islice(self.source, number)):
            read.append(_Batch(batch, self.num_rows))
            self.num_rows += len(batch)
        return read

    def _check_sizes(self, taken: list[_Batch]) -> None:
        if self.batch_size is None:
            return
        odd = [at for at, batch in enumerate(taken) if len(batch.rows) != self.batch_size]
        if not odd:
            return
        odd_size = len(taken[odd[0]].rows)
        if odd[0] == len(taken) - 1 and odd_size < self.batch_size:
            self._ahead = self._read(1)
            self.ended_short = not self._ahead
        if not self.ended_short:
            if self.must_be_fixed:
                raise PlanError(
                    f"`batch_sampler` must yield batches of its declared size {self.batch_size} "
                    f"for them to be split, got one of {odd_size} rows. Pass split_batches=False."
                )
            self.batch_size = None


def keep_batch(batch: Iterable[Any]) -> Batch:
    """Return a batch that nobody else will change and whose rows can be counted."""
    if isinstance(batch, (tuple, range, str, bytes)):
        return batch
    if isinstance(batch, list) or not isinstance(batch, Sized):
        return list(batch)
    kept: Batch = copy.deepcopy(batch)  # type: ignore[arg-type]  # sized and iterable will do
    return kept


def _own_part(round_: list[_Batch], plan: ShardPlan, *, consumed: int) -> Part[Any]:
    """Return the shard's part of a full round: its batch, or its piece of the only one."""
    if plan.split is Split.WHOLE:
        return _part(round_[plan.shard.index], consumed)
    batch = round_[0]
    first = plan.shard.index * plan.shard_batch_size
    piece = list(batch.rows)[first : first + plan.shard_batch_size]
    return _part(_Batch(piece, batch.first + first), consumed)


def _part(batch: _Batch, consumed: int) -> Part[Any]:
    return Part(batch.rows, len(batch.rows), consumed, batch.positions)


def _fixed_end(
    rest: list[_Batch],
    walk: _Walk,
    plans: Sequence[ShardPlan],
    *,
    num_done: int,
    extra_rows: int,
) -> Iterator[Part[Any]]:
    """Deal the rows of the last rounds as the plan does; ``num_done`` batches went out before."""
    rows = list(chain.from_iterable(batch.rows for batch in rest))[extra_rows:]
    first_rows = list(chain.from_iterable(batch.rows for batch in walk.head))
    size = plans[0].batch_size
    offset = num_done * size + extra_rows
    ended = [
        ShardPlan(offset + len(rows), size, plan.shard, plan.split, plan.tail, start=offset)
        for plan in plans
    ]
    for step in range(max(each.num_steps for each in ended)):
        for plan in ended:
            if step >= plan.num_steps:
                continue
            positions = plan.positions(step)
            own = [rows[at - offset] if at >= offset else first_rows[at] for at in positions]
            after = plan.cursor(step + 1)
            consumed, extra = divmod(after, size)
            if after == plan.num_samples:
                consumed, extra = walk.count, 0
            yield Part(own, plan.valid_rows(step), consumed, positions, extra)


def _varying_end(
    rest: list[_Batch],
    head: list[_Batch],
    plans: Sequence[ShardPlan],
    tail: Tail,
    *,
    num_batches: int,
) -> Iterator[Part[Any]]:
    """Deal the batches of the last rounds whole, or cut where the end has to be exact."""
    if tail is Tail.EXACT:
        for pieces, left in _exact_rounds(rest, plans[0].shard.count) if rest else []:
            for plan in plans:
                yield _part(pieces[plan.shard.index], num_batches - left)
        return
    if not rest or tail is Tail.DROP:
        return
    for plan in plans:
        index = plan.shard.index
        if index < len(rest):
            yield _part(rest[index], num_batches)
        elif tail is Tail.PAD:
            repeated = head[(index - len(rest)) % len(head)]
            yield Part(repeated.rows, 0, num_batches, repeated.positions)


def _exact_rounds(rest: list[_Batch], count: int) -> list[tuple[list[_Batch], int]]:
    """Cut the batches at the end so that every shard gets one piece a round, none empty.

    Returns each round's pieces and how many batches are left after it. The last round takes whole
    batches from the one before when its own have fewer rows than there are shards.
    """
    sizes = [len(batch.rows) for batch in rest]
    least = (len(rest) - 1) % count + 1
    for last in range(least, min(count, len(rest)) + 1):
        split = len(rest) - last
        if all(sum(part) >= count for part in (sizes[:split], sizes[split:]) if part):
            rounds = [(_cut(rest[:split], count), last)] if split else []
            return [*rounds, (_cut(rest[split:], count), 0)]
    raise PlanError(
        f"`batch_sampler` must leave at least {count} rows, one a shard, for its last round with "
        f"tail='exact', got {sum(sizes[-least:])}. Use fewer ranks, tail=\"pad\" or "
        'tail="uneven".'
    )


def _cut(batches: list[_Batch], count: int) -> list[_Batch]:
    """Cut the largest of the batches until there are ``count`` pieces, in order.

    The batches hold at least ``count`` rows, so the largest piece to cut has two or more.
    """
    pieces = [1] * len(batches)
    while sum(pieces) < count:
        sizes = [len(batch.rows) / number for batch, number in zip(batches, pieces, strict=True)]
        largest = max(range(len(batches)), key=sizes.__getitem__)
        pieces[largest] += 1
    return list(
        chain.from_iterable(
            _pieces(batch, number) for batch, number in zip(batches, pieces, strict=True)
        )
    )


def _pieces(batch: _Batch, number: int) -> Iterator[_Batch]:
    """Cut one batch into contiguous pieces, as evenly as possible."""
    rows = list(batch.rows)
    each, more = divmod(len(rows), number)
    start = 0
    for index in range(number):
        stop = start + each + (index < more)
        yield _Batch(rows[start:stop], batch.first + start)
        start = stop
