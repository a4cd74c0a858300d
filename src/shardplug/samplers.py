"""Samplers for a shard of an epoch.

`BatchSamplerShard` sees through the samplers that torch ships and through ours: it asks the plan
for its own positions and looks only those up, so its cost does not depend on the number of ranks.
Any other sampler is walked.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import chain, islice
from operator import index
from typing import Any, Protocol, SupportsIndex, cast, final, runtime_checkable

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader.sampler import BatchSampler as StatefulBatchSampler

from shardplug.errors import PlanError
from shardplug.kinds import check_count, check_flag, check_integer, check_iterable
from shardplug.orders import (
    Order,
    PermutedOrder,
    SequenceOrder,
    SequentialOrder,
    random_order,
)
from shardplug.passes import Pass, RoundsPass, SampledPass, WalkedPass
from shardplug.permutation import TensorPermutation
from shardplug.plan.batches import deal_batches, keep_batch
from shardplug.plan.deal import deal
from shardplug.plan.order import epoch_seed, order_key
from shardplug.plan.shard import Shard
from shardplug.plan.split import ShardPlan, Split, Tail, choose_tail


@runtime_checkable
class HasEpoch(Protocol):
    """A sampler, batch sampler or data set whose order or content follows the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Take the epoch for what comes next."""


class OrderedSampler(ABC):
    """A sampler of ours, whose epoch can be looked up at any position.

    No protocol: ``order`` is a likely name for something else in a user's sampler.
    """

    @abstractmethod
    def order(self) -> Order:
        """Work out the order of the epoch that is set."""


@final
class SeedableRandomSampler(RandomSampler, OrderedSampler):
    """Shuffle as a function of (seed, epoch): equal on all ranks, and after a resume.

    Epoch ``e`` has the order of ``torch.randperm(n, generator=manual_seed(seed + e))``; the first
    is that of torch's ``RandomSampler`` with a generator seeded so. Iterating draws from a
    generator of its own: neither torch's global RNG nor ``generator`` moves.

    Args:
        data_source: What is sampled from; only its length matters.
        replacement: Draw with replacement.
        num_samples: Samples per epoch; None: as many as ``data_source`` has.
        generator: Gives the seed, its ``initial_seed()``, when ``data_seed`` is None.
        data_seed: The seed. None: that of ``generator``, else ``torch.initial_seed()``.

    Raises:
        PlanError: If ``data_seed`` is no integer. Torch's own arguments are checked by torch.

    Example:
        >>> sampler = SeedableRandomSampler(range(5), data_seed=3)
        >>> sampler.set_epoch(1)
        >>> list(sampler) == torch.randperm(5, generator=torch.Generator().manual_seed(4)).tolist()
        True
    """

    def __init__(
        self,
        data_source: Sized,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        data_seed: int | None = None,
    ) -> None:
        super().__init__(data_source, replacement, num_samples, generator)
        if data_seed is None:
            data_seed = torch.initial_seed() if generator is None else generator.initial_seed()
        self.seed: int = check_integer("data_seed", data_seed)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next pass shuffles for."""
        self.epoch = check_integer("epoch", epoch)

    def order(self) -> Order:
        """Work out the order of the epoch that is set."""
        generator = torch.Generator().manual_seed(epoch_seed(self.seed, self.epoch))
        return random_order(
            len(self.data_source),
            generator=generator,
            draws=self.num_samples,
            replacement=self.replacement,
        )

    def __iter__(self) -> Iterator[int]:
        """Yield the samples of the epoch that is set."""
        yield from _all_of(self.order())


@final
class SeededDraws(Sampler[int], OrderedSampler):
    """The draws of one of torch's samplers as a function of (seed, epoch).

    Epoch ``e`` has the order that the sampler draws from ``manual_seed(seed + e)``. Neither
    torch's global RNG nor the sampler's own generator moves.

    Args:
        sampler: Draws from its ``generator`` and nothing else; it stays as it is.
        seed: The same on all ranks.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        self.sampler = sampler
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next pass draws for."""
        self.epoch = epoch

    def order(self) -> Order:
        """Draw the order of the epoch that is set."""
        drawing = copy.copy(self.sampler)
        drawing.generator = torch.Generator().manual_seed(epoch_seed(self.seed, self.epoch))
        return SequenceOrder(list(drawing))

    def __iter__(self) -> Iterator[int]:
        """Yield the samples of the epoch that is set."""
        yield from _all_of(self.order())

    def __len__(self) -> int:
        """Count the draws of an epoch."""
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        """Look an attribute up in the sampler: its indices, its weights."""
        if name.startswith("__") or name == "sampler":
            raise AttributeError(name)
        return getattr(self.sampler, name)


@final
class PermutedSampler(Sampler[int], OrderedSampler):
    """Shuffle by a keyed permutation: constant memory, random access, at any size.

    The order is a function of (seed, epoch), the same on any platform and in every version. See
    `shardplug.plan.order.KeyedPermutation` for how it is made.

    Args:
        data_source_or_length: What is sampled from, or how many samples it has, up to 2^62.
        seed: Any integer; the same on all ranks.

    Raises:
        PlanError: If the number of samples is out of range, or an argument of a wrong kind.

    Example:
        >>> sampler = PermutedSampler(10**12, seed=1)
        >>> sampler[3] == sampler.take(torch.tensor([3])).item()
        True
        >>> sorted(PermutedSampler(5))
        [0, 1, 2, 3, 4]
    """

    def __init__(self, data_source_or_length: Sized | int, seed: int = 0) -> None:
        self.num_samples: int = (
            len(data_source_or_length)
            if isinstance(data_source_or_length, Sized)
            else check_integer("data_source_or_length", data_source_or_length)
        )
        self.seed: int = check_integer("seed", seed)
        self.epoch = 0
        self._permutation = TensorPermutation(self.num_samples, order_key(self.seed, 0))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that positions are looked up in."""
        epoch = check_integer("epoch", epoch)
        if epoch != self.epoch:
            self.epoch = epoch
            self._permutation = TensorPermutation(self.num_samples, order_key(self.seed, epoch))

    def __getitem__(self, position: int) -> int:
        """Return the sample at a position, in [0, num_samples)."""
        return self._permutation.scalar[position]

    def take(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the samples at some positions.

        Args:
            positions: int64, any shape, each in [0, num_samples).

        Returns:
            int64, of the same shape.
        """
        return self._permutation.take(positions)

    def order(self) -> Order:
        """Return the order of the epoch that is set."""
        return PermutedOrder(self._permutation)

    def __iter__(self) -> Iterator[int]:
        """Yield the samples of the epoch that is set."""
        yield from _all_of(self.order())

    def __len__(self) -> int:
        """Count the samples."""
        return self.num_samples


def _all_of(order: Order) -> Iterator[int]:
    block = 1024
    full, rest = divmod(len(order), block)
    for samples in order.runs(0, stride=block, width=block, count=full):
        yield from samples
    yield from order.take(range(len(order) - rest, len(order)))


def draw_order(  # noqa: PLR0911  # one line for each kind
    sampler: Iterable[int],
) -> tuple[Order, Callable[[], None] | None] | None:
    """Look through a sampler: draw the order of its next pass without walking it.

    Its generator, or torch's global one, moves exactly as if the sampler had been walked, to its
    end where it draws several times.

    Args:
        sampler: Any iterable of sample ids.

    Returns:
        The order, and what to call when a pass over it is exhausted (torch's RandomSampler draws
        once more there); None if the sampler is not one that can be looked through.
    """
    if isinstance(sampler, OrderedSampler):
        return sampler.order(), None
    if isinstance(sampler, Sequence):
        return SequenceOrder(sampler), None
    if type(sampler) is SequentialSampler:
        return SequentialOrder(len(sampler)), None
    if type(sampler) is SubsetRandomSampler:
        draws = torch.randperm(len(sampler.indices), generator=sampler.generator).tolist()
        return SequenceOrder([sampler.indices[draw] for draw in draws]), None
    if type(sampler) is RandomSampler:
        return _draw_as_random_sampler(sampler)
    if isinstance(sampler, DistributedSampler):
        # Short enough to be listed: it is one rank's part.
        return SequenceOrder(list(sampler)), None
    return None


def _draw_as_random_sampler(sampler: RandomSampler) -> tuple[Order, Callable[[], None] | None]:
    size, generator = len(sampler.data_source), sampler.generator
    if generator is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        generator = torch.Generator().manual_seed(seed)
    order = random_order(
        size, generator=generator, draws=len(sampler), replacement=sampler.replacement
    )
    if sampler.generator is None or sampler.replacement or len(sampler) % size:
        return order, None

    def draw_once_more() -> None:
        """Draw what RandomSampler draws after its last sample, though it needs none of it."""
        random_order(size, generator=generator)

    return order, draw_once_more


@final
class BatchSamplerShard(BatchSampler):
    """The batches of one shard of a batch sampler.

    Over a plain ``BatchSampler`` only this shard's positions are looked up; over any other one,
    every batch is walked. ``drop_last`` of the batch sampler drops incomplete batches and
    incomplete rounds. The short last batch is filled, and missing batches are made, from the first
    batches in order, cycling. Lists that the batch sampler yields are never changed.

    Args:
        batch_sampler: Yields batches of sample ids. A batch size that it declares is only trusted
            while its batches have it.
        num_processes: Number of shards, at least 1.
        process_index: Which shard, in [0, num_processes).
        split_batches: False: batch i goes to shard i mod ``num_processes``. True: each batch is cut
            in ``num_processes`` pieces; its size must be a multiple of that.
        even_batches: True: all shards take the same number of full steps. False: nothing is
            repeated and shards may differ by a step.
        tail: "pad", "drop", "uneven" or "exact" says outright what happens at the end, and wins
            over ``even_batches`` and ``drop_last``.

    Raises:
        PlanError: If a number is out of range, batches that are to be split cannot be, or ``tail``
            is none of the four.

    Example:
        >>> batches = BatchSampler(range(8), batch_size=4, drop_last=False)
        >>> list(BatchSamplerShard(batches, num_processes=2, process_index=1))
        [[4, 5, 6, 7]]
        >>> list(BatchSamplerShard(batches, 2, 1, split_batches=True))
        [[2, 3], [6, 7]]
    """

    def __init__(
        self,
        batch_sampler: Iterable[Any],
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
        *,
        tail: str | Tail | None = None,
    ) -> None:
        self.batch_sampler = check_iterable("batch_sampler", batch_sampler)
        self.shard = Shard(process_index, num_processes)
        self.num_processes, self.process_index = self.shard.count, self.shard.index
        self.split_batches: bool = check_flag("split_batches", split_batches)
        self.even_batches: bool = check_flag("even_batches", even_batches)
        self.tail = choose_tail(
            tail,
            even_batches=self.even_batches,
            drop_last=bool(getattr(batch_sampler, "drop_last", 0)),
        )
        self._split = Split.SLICE if self.split_batches else Split.WHOLE
        declared = getattr(batch_sampler, "batch_size", None)
        self._declared_size = _size_in(declared)
        if self._declared_size is None and self.split_batches:
            raise PlanError(
                "`batch_sampler` must declare a `batch_size` for its batches to be split, got "
                f"{declared!r}. Pass split_batches=False."
            )
        if self._declared_size is not None:
            # Raises where batches of this size cannot be split.
            ShardPlan(None, self._declared_size, self.shard, split=self._split)

    def over(self, batch_sampler: Iterable[Any]) -> BatchSamplerShard:
        """Divide another batch sampler in the same way."""
        return BatchSamplerShard(
            batch_sampler,
            self.num_processes,
            self.process_index,
            self.split_batches,
            self.even_batches,
            tail=self.tail,
        )

    @property
    def batch_size(self) -> int | None:  # type: ignore[override]
        """The batch size that the batch sampler declares, None if it declares none."""
        return self._declared_size

    @property
    def drop_last(self) -> bool:  # type: ignore[override]
        """Whether rows may be dropped at the end."""
        return self.tail is Tail.DROP

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler inside the batch sampler; the batch sampler itself if there is none."""
        return getattr(self.batch_sampler, "sampler", self.batch_sampler)

    def set_epoch(self, epoch: int) -> None:
        """Tell the batch sampler and the sampler inside it which epoch comes next."""
        for part in epoch_parts(self.batch_sampler):
            part.set_epoch(epoch)

    @property
    def is_plain(self) -> bool:
        """Whether samples are dealt, not batches: the batch sampler is torch's own."""
        return is_plain(self.batch_sampler)

    @property
    def is_by_value(self) -> bool:
        """Whether the order is a function of values, so that no rank can come to another one."""
        return self.is_plain and is_by_value(self.sampler)

    @property
    def num_samples(self) -> int | None:
        """Samples in the order of an epoch; None if only a pass will tell."""
        if self.is_plain:
            return known_length(self.sampler)
        if isinstance(self.batch_sampler, Sequence):
            return sum(map(len, self.batch_sampler))
        return None

    @property
    def global_batch_size(self) -> int | None:
        """Rows of a full step over all shards; None if no batch size is declared."""
        if self._declared_size is None:
            return None
        return self._declared_size * (1 if self.split_batches else self.num_processes)

    @property
    def plan(self) -> ShardPlan:
        """The plan of a full epoch in samples; ``num_samples`` is None if that is not known.

        Where batches are dealt it counts batches, whose number it leaves open.
        """
        return self._plan(self.num_samples if self.is_plain else None)

    def _plan(self, num_samples: int | None) -> ShardPlan:
        if not self.is_plain:
            return ShardPlan(None, 1, self.shard, tail=self.tail)
        size = cast(int, self._declared_size)
        return ShardPlan(num_samples, size, self.shard, split=self._split, tail=self.tail)

    def begin(
        self,
        consumed: int = 0,
        *,
        look: int = 0,
        extra_rows: int = 0,
        for_all: bool = False,
    ) -> tuple[Pass, list[Any]]:
        """Start a pass: what the sampler inside has to draw is drawn now.

        Args:
            consumed: Samples of the epoch that are done; batches, where those are dealt.
            look: How many items from the start of the epoch's order are wanted.
            extra_rows: Where batches are dealt: rows of the next one that are done too.
            for_all: Make the batches of all shards, step by step.

        Returns:
            The pass, and the first ``look`` sample ids (or batches, if those are dealt).
        """
        if not self.is_plain:
            return self._begin_batches(consumed, extra_rows, look, for_all)
        drawn = draw_order(self.sampler)
        if drawn is not None:
            order, on_exhausted = drawn
            plan = self._plan(len(order)).seek(consumed)
            head = order.take(range(min(look, len(order))))
            kind = RoundsPass if for_all else SampledPass
            return kind(order, plan, on_exhausted=on_exhausted), head
        plan = self._plan(None).seek(consumed)
        source = iter(self.sampler)
        head = list(islice(source, max(look, plan.global_batch_size if consumed else 0)))
        items = islice(chain(head, source), consumed, None)
        first_window = head[: plan.global_batch_size] if consumed else ()
        shards = self.shard.all() if for_all else None
        parts = deal(items, plan, head=first_window, shards=shards)
        steps = self._known_steps(consumed, for_all=for_all)
        return WalkedPass(parts, start=consumed, num_steps=steps, name="sampler"), head[:look]

    def _begin_batches(
        self, consumed: int, extra_rows: int, look: int, for_all: bool
    ) -> tuple[Pass, list[Any]]:
        # Asked before the walk begins: the length of a `SkipBatchSampler` is that of its next pass.
        steps = None if extra_rows else self._known_steps(consumed, for_all=for_all)
        source = iter(self.batch_sampler)
        head = [keep_batch(batch) for batch in islice(source, look)]
        parts = deal_batches(
            chain(head, source),
            batch_size=self._declared_size,
            shard=self.shard,
            split=self._split,
            tail=self.tail,
            start=consumed,
            extra_rows=extra_rows,
            shards=self.shard.all() if for_all else None,
        )
        name = "batch_sampler"
        walked = WalkedPass(
            parts, start=consumed, num_steps=steps, name=name, extra_rows=extra_rows
        )
        return walked, head

    def _known_steps(self, consumed: int, *, for_all: bool) -> int | None:
        """Count the steps from a position on, those of all shards together; None if unknown."""
        shards = self.shard.all() if for_all else [self.shard]
        try:
            return sum(self.count_steps(consumed, shard=shard) for shard in shards)
        except TypeError:
            return None

    def __iter__(self) -> Iterator[Any]:
        """Yield this shard's batches of one epoch.

        Nothing is drawn before the first: a DataLoader draws from the same generator in between.
        """
        yield from self.begin()[0]

    def __len__(self) -> int:
        """Count the batches that a pass yields.

        Raises:
            TypeError: If that is not known before the pass: the batch sampler has no length, or
                its length does not tell.
        """
        return self.count_steps()

    def count_steps(self, consumed: int = 0, *, shard: Shard | None = None) -> int:
        """Count the batches from a position to the end of the epoch.

        Args:
            consumed: Samples of the epoch that are done; batches, where those are dealt.
            shard: Whose batches; None: this one's.

        Raises:
            TypeError: If that is not known before the pass.
        """
        shard = self.shard if shard is None else shard
        if self.is_plain:
            return self._plan(length_of(self.sampler)).seek(consumed, shard=shard).num_steps
        if self._declared_size is not None and isinstance(self.batch_sampler, Sequence):
            # Its batches can be looked at without anything being drawn.
            parts = deal_batches(
                self.batch_sampler,
                batch_size=self._declared_size,
                shard=shard,
                split=self._split,
                tail=self.tail,
                start=consumed,
            )
            return sum(1 for _ in parts)
        num_batches = max(0, length_of(self.batch_sampler) - consumed)
        full, rest = divmod(num_batches, 1 if self.split_batches else shard.count)
        # A declared size that is kept makes the last batch matter, and its size is not known.
        is_open = self._declared_size is not None and (
            (self.tail is Tail.DROP and not rest and not self._declares_drop())
            or (self.tail is Tail.UNEVEN and self.split_batches)
        )
        if is_open:
            raise TypeError(
                "The number of batches is not known before the pass: it depends on the size of the "
                f"last batch of {type(self.batch_sampler).__name__}."
            )
        if self.tail is Tail.DROP or not rest:
            return full
        return full + (self.tail is not Tail.UNEVEN or shard.index < rest)

    def _declares_drop(self) -> bool:
        return bool(getattr(self.batch_sampler, "drop_last", False))


@final
class SkipBatchSampler(BatchSampler):
    """The batches of a batch sampler but the first ones.

    Over a plain ``BatchSampler`` whose sampler can be looked through, nothing is walked on the way.

    Args:
        batch_sampler: Yields batches of sample ids.
        skip_batches: How many to leave out, zero or more.
        is_once: Leave them out of the first pass only; later ones are full.

    Raises:
        PlanError: If ``skip_batches`` is no integer, or negative.

    Example:
        >>> list(SkipBatchSampler(BatchSampler(range(7), 2, drop_last=False), 2))
        [[4, 5], [6]]
    """

    def __init__(
        self, batch_sampler: Iterable[Any], skip_batches: int = 0, *, is_once: bool = False
    ) -> None:
        self.batch_sampler = check_iterable("batch_sampler", batch_sampler)
        self.skip_batches = check_count("skip_batches", skip_batches, least=0)
        self._is_once = is_once

    @property
    def batch_size(self) -> Any:  # type: ignore[override]
        """The batch size that the batch sampler declares."""
        return getattr(self.batch_sampler, "batch_size", None)

    @property
    def drop_last(self) -> bool:  # type: ignore[override]
        """Whether the batch sampler declares that it drops an incomplete last batch."""
        return bool(getattr(self.batch_sampler, "drop_last", False))

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler inside the batch sampler; the batch sampler itself if there is none."""
        return getattr(self.batch_sampler, "sampler", self.batch_sampler)

    def set_epoch(self, epoch: int) -> None:
        """Tell the batch sampler and the sampler inside it which epoch comes next."""
        for part in epoch_parts(self.batch_sampler):
            part.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Yield what is left; nothing is drawn before the first, as under torch's own."""
        skipped = self.skip_batches
        if self._is_once:
            self.skip_batches = 0
        drawn = draw_order(self.sampler) if is_plain(self.batch_sampler) else None
        if drawn is None:
            yield from islice(self.batch_sampler, skipped, None)
            return
        order, on_exhausted = drawn
        tail = Tail.DROP if self.drop_last else Tail.UNEVEN
        plan = ShardPlan(len(order), self.batch_size, Shard(0, 1), tail=tail)
        yield from SampledPass(order, plan, on_exhausted=on_exhausted).after(skipped)

    def __len__(self) -> int:
        """Count the batches that are left, zero if all are skipped."""
        return max(0, length_of(self.batch_sampler) - self.skip_batches)


def _size_in(declared: Any) -> int | None:
    """Read a declared batch size; what is no size, such as -1 for "it varies", declares none."""
    if not isinstance(declared, SupportsIndex):
        return None
    return index(declared) if index(declared) > 0 else None


def is_plain(batch_sampler: Any) -> bool:
    """Tell whether a batch sampler does nothing but cut what its sampler yields into batches."""
    return type(batch_sampler) in (BatchSampler, StatefulBatchSampler)


def is_by_value(sampler: Any) -> bool:
    """Tell whether a sampler's order is a function of values that ranks can compare."""
    return isinstance(sampler, OrderedSampler) or type(sampler) is SequentialSampler


def nested_samplers(batch_sampler: Any) -> list[Any]:
    """List a batch sampler and what it wraps, from the outside in."""
    found: list[Any] = []
    nested = batch_sampler
    while nested is not None and not any(nested is part for part in found):
        found.append(nested)
        inner = getattr(nested, "batch_sampler", None)
        nested = getattr(nested, "sampler", None) if inner is None else inner
    return found


def epoch_parts(batch_sampler: Any) -> list[HasEpoch]:
    """Find what follows the epoch: a batch sampler, and the samplers inside it."""
    return [part for part in nested_samplers(batch_sampler) if isinstance(part, HasEpoch)]


def length_of(items: Any) -> int:
    """Return the length of something.

    Raises:
        TypeError: If it does not tell, in whichever way it says so.
    """
    try:
        return len(items)
    except (TypeError, RuntimeError) as error:  # also NotImplementedError
        raise TypeError(
            f"{type(items).__name__} has no known length: only a pass will tell."
        ) from error


def known_length(items: Any) -> int | None:
    """Return the length of something, or None if it does not tell."""
    try:
        return length_of(items)
    except TypeError:
        return None
