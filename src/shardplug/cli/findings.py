"""What is wrong with a loader, told from what simulated ranks have seen of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import (
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shardplug.cli.refusal import one_line
from shardplug.cli.tracing import (
    CONTENT,
    DRAWS,
    ID,
    SEEDS,
    WORKER,
    is_key,
    kept_generators,
    number_of,
)
from shardplug.cli.trial import Conditions, Trial
from shardplug.errors import CommError, ShardplugError
from shardplug.samplers import known_length, nested_samplers

_MOST_KEYS = 2**16
"""Keys of a sampler to look for names in."""
_FEW_IDS = 10
"""Below so many samples two shuffles may well be equal by chance."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault.

    Attributes:
        kind: One of `shardplug.cli.kinds.KINDS`.
        reason: What was seen.
        remedy: What to do.
    """

    kind: str
    reason: str
    remedy: str


def find_faults(
    trial: Trial, conditions: Conditions, expect: Callable[[], Tensor]
) -> list[Finding]:
    """Judge what ranks have seen.

    Args:
        trial: What they saw.
        conditions: How it was run.
        expect: Reads a stream in a single process and returns its tags.

    Returns:
        The faults, the gravest first; none if all is well.
    """
    judge = _Judge(trial, conditions, expect)
    return list(judge.faults())


@dataclass(frozen=True, slots=True)
class _Seen:
    """Which samples came in an epoch.

    Attributes:
        epoch: The epoch.
        rows: What all ranks saw, see `_joined`.
        things: The samples that came, each once: id, and for a stream the content.
        place: Which of them each row is.
        counts: How often each came.
        lost: Ids of those that did not.
        names: Writes ids out.
    """

    epoch: int
    rows: Tensor
    things: Tensor
    place: Tensor
    counts: Tensor
    lost: list[int]
    names: Callable[[list[int]], str]

    @property
    def has_repeats(self) -> bool:
        """Whether a sample came more than once."""
        return bool((self.counts > 1).any())

    @property
    def num_pairs(self) -> int:
        """Count the samples that each rank saw, over all ranks."""
        return len(torch.unique(torch.stack([self.place, self.rows[:, _RANK]], dim=1), dim=0))

    def repeats(self) -> str:
        """Tell what came more than once, and of one sample on which ranks."""
        repeated = (self.counts > 1).nonzero().flatten()
        example = int(repeated[0])
        name = self.names([int(self.things[example, 0])])
        ranks = sorted({int(rank) for rank in self.rows[self.place == example, _RANK]})
        return (
            f"{len(repeated)} of {len(self.things)} samples came more than once in epoch "
            f"{self.epoch}: {self.names(self.things[repeated, 0].tolist())}; "
            f"{name} came {int(self.counts[example])} times, on "
            f"{_ranks(ranks)}"
        )


class _Judge:
    """Goes through what was seen, one question after the other."""

    def __init__(self, trial: Trial, conditions: Conditions, expect: Callable[[], Tensor]) -> None:
        self.trial, self.conditions, self.expect = trial, conditions, expect
        self.is_as_is = conditions.options is None
        self.loader = trial.loaders[0]
        self.is_stream = isinstance(self.loader.dataset, IterableDataset)
        self.num_epochs = min((len(logs) for logs in trial.logs), default=0)
        self.world_size = conditions.world_size

    def faults(self) -> Iterator[Finding]:
        if self.trial.failure is not None:
            yield self._failure(self.trial.failure)
            return
        yield from self._coverage()
        yield from self._equal_epochs()
        yield from self._lengths()
        yield from self._steps()
        yield from self._draws()

    # -- what ended it ----------------------------------------------------------------------------

    def _failure(self, failure: BaseException) -> Finding:
        text = one_line(failure)
        if isinstance(failure, CommError) and "Ranks disagree" in text:
            reason, _, remedy = str(failure).partition(". ")
            is_order = "order" in reason.split(" of ")[0] or "fingerprint" in reason
            kind = "different-order" if is_order else "different-data"
            return Finding(kind, f"{reason}.", remedy or "Build the same loader on every rank.")
        if isinstance(failure, ShardplugError):
            # Ours say what to do in their last sentence.
            reason, _, remedy = " ".join(str(failure).split()).removesuffix(".").rpartition(". ")
            kind = "wrong-length" if "length says" in reason else "raises"
            return Finding(kind, f"{reason}.", f"{remedy}.")
        where = next((n for n in getattr(failure, "__notes__", []) if "Raised on rank" in n), "")
        seen = max((log.num_steps for logs in self.trial.logs for log in logs[-1:]), default=0)
        return Finding(
            "raises",
            f"after {seen} batches of a pass: {text} {where}".rstrip(),
            "Iterate the data set alone, in one process, at the sample that it names. On real "
            "ranks the others would wait for this one.",
        )

    # -- who sees what ----------------------------------------------------------------------------

    def _coverage(self) -> Iterator[Finding]:
        if self._repeats_by_design():
            return
        for epoch in range(self.num_epochs):
            found = list(self._coverage_of(epoch))
            yield from found
            if found:
                return  # the next epoch has the same to say

    def _repeats_by_design(self) -> bool:
        if self.is_stream:
            return False
        return any(
            isinstance(sampler, WeightedRandomSampler)
            or (isinstance(sampler, RandomSampler) and sampler.replacement)
            or (isinstance(sampler, RandomSampler) and len(sampler) != len(sampler.data_source))
            for sampler in self._samplers()
        )

    def _samplers(self) -> list[Any]:
        loader = self.loader
        source = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        return list(nested_samplers(source))

    def _ids(self, ids: list[int]) -> str:
        shown = ids[:5]
        keys = self._keys() if any(map(is_key, shown)) else {}
        names = ", ".join(keys.get(each, str(each)) for each in shown)
        return f"{'ids' if len(ids) > 1 else 'id'} {names}{' and more' if len(ids) > 5 else ''}"

    def _keys(self) -> dict[int, str]:
        """Ask the samplers for their keys once more, and write them out by their numbers."""
        keys: dict[int, str] = {}
        for loader in self.trial.loaders:
            batches: Any = loader.batch_sampler
            with kept_generators():
                try:
                    found = loader.sampler if batches is None else chain.from_iterable(batches)
                    keys |= {number_of(key): repr(key) for key in islice(found, _MOST_KEYS)}
                except Exception:  # noqa: BLE001  # the user's sampler may raise anything
                    return keys
        return keys

    def _rows(self, epoch: int) -> Tensor:
        """What all ranks saw in an epoch: (rows, rank and tag columns)."""
        return _joined((rank, 0, logs[epoch].tags) for rank, logs in enumerate(self.trial.logs))

    def _coverage_of(self, epoch: int) -> Iterator[Finding]:
        rows = self._rows(epoch)
        things, place = torch.unique(rows[:, _shift(ID, CONTENT)], dim=0, return_inverse=True)
        counts = torch.bincount(place, minlength=len(things))
        seen = _Seen(epoch, rows, things, place, counts, self._lost(epoch, rows), self._ids)
        is_mixed = False
        if seen.has_repeats and self._is_true_repeat(epoch, rows):
            is_mixed = self._are_orders_mixed(seen)
            yield self._repeat(seen, is_mixed=is_mixed)
        if seen.lost and not is_mixed:
            yield self._never(seen)

    def _is_true_repeat(self, epoch: int, rows: Tensor) -> bool:
        """Tell whether a stream that divides itself did not just make equal items."""
        if not self.is_stream or self._is_cut(epoch) or self._draws_anything(rows):
            return True
        seen, expected = _contents(rows[:, 2:]), _contents(self.expect())
        return any(count > expected.get(each, 0) for each, count in seen.items())

    def _is_cut(self, epoch: int) -> bool:
        return any(logs[epoch].is_cut for logs in self.trial.logs)

    def _draws_anything(self, rows: Tensor) -> bool:
        return bool(rows[:, 2:][:, DRAWS].any())

    def _lost(self, epoch: int, rows: Tensor) -> list[int]:
        """List ids that no rank saw, unless that may be so; of a stream the places of items."""
        if self._is_cut(epoch):
            return []
        if self.is_stream:
            if self._draws_anything(rows):
                return []
            seen, tags = _contents(rows[:, 2:]), self.expect()
            missing = {each: n - seen.get(each, 0) for each, n in _contents(tags).items()}
            lost = [int(tag[ID]) for tag in tags if missing[int(tag[CONTENT])] > 0]
        else:
            lost = self._lost_ids(rows)
        return [] if len(lost) <= self._may_be_dropped() else lost

    def _lost_ids(self, rows: Tensor) -> list[int]:
        num_samples = known_length(self.loader.dataset)
        samplers = self._samplers()
        if num_samples is None or any(isinstance(s, SubsetRandomSampler) for s in samplers):
            return []
        ids = rows[:, _shift(ID)[0]]
        if ((ids < 0) | (ids >= num_samples)).any():
            return []  # keys of another kind than [0, length): which there are is not known
        is_seen = torch.zeros(num_samples, dtype=torch.bool)
        is_seen[ids] = True
        return (~is_seen).nonzero().flatten().tolist()

    def _may_be_dropped(self) -> int:
        """Count the samples that drop_last, or tail "drop", may leave out."""
        size = self.loader.batch_size or 1
        options = self.conditions.options or {}
        drops = bool(self.loader.drop_last) or options.get("tail") == "drop"
        drops = drops or any(bool(getattr(s, "drop_last", False)) for s in self._samplers())
        if not drops or options.get("tail") not in (None, "drop"):
            return 0
        readers = self.world_size * max(1, self.loader.num_workers if self.is_stream else 1)
        return readers * size - 1 + (self.world_size if self.is_as_is else 0)

    def _repeat(self, seen: _Seen, *, is_mixed: bool) -> Finding:
        what = seen.repeats()
        if self._are_workers_alike(seen):
            return Finding(
                "worker-repeats",
                f"{what}, from more than one worker of a rank.",
                "Every worker reads all of the stream: let shardplug divide it (without --as-is), "
                "or let the data set read id and num_workers of get_worker_info().",
            )
        if self._is_unsharded(seen):
            return Finding(
                "unsharded",
                f"{what}. Every rank reads all of the data.",
                "Prepare the loader with prepare_data_loader or ShardEngine.prepare, or give it a "
                "DistributedSampler.",
            )
        if is_mixed:
            return Finding(
                "different-order",
                f"{what}; {len(seen.lost)} never came, as {self._ids(seen.lost)}. Each rank takes "
                "its part from an order of its own.",
                "Seed the shuffle alike on every rank, by (seed, epoch); or let shardplug divide a "
                "plain shuffle=True.",
            )
        remedy = (
            "Where a DistributedSampler fills up, nothing knows it for padding: leave it out and "
            'prepare the loader, with tail="exact" to validate.'
            if self.is_as_is
            else "Let the sampler draw each sample once; --allow twice if it is meant so. A stream "
            "that reads its own rank needs already_sharded=True."
        )
        return Finding("twice", f"{what}.", remedy)

    def _are_workers_alike(self, seen: _Seen) -> bool:
        """Tell whether an item came from several workers of one rank."""
        if self.loader.num_workers < 2 or not self.is_stream:
            return False
        on_rank = torch.stack([seen.place, seen.rows[:, _RANK]], dim=1)
        return bool(_varies(_groups(on_rank), seen.rows[:, _shift(WORKER)[0]]).any())

    def _is_unsharded(self, seen: _Seen) -> bool:
        """Tell whether all ranks saw everything."""
        return self.world_size > 1 and seen.num_pairs == len(seen.things) * self.world_size

    def _are_orders_mixed(self, seen: _Seen) -> bool:
        """Tell whether samples were lost and repeated as when ranks part orders of their own."""
        if not self.is_as_is or self.is_stream or not seen.lost:
            return False
        is_once_on_rank = seen.num_pairs == len(seen.rows)
        return is_once_on_rank and int((seen.counts > 1).sum()) >= self.world_size

    def _never(self, seen: _Seen) -> Finding:
        return Finding(
            "never",
            f"{len(seen.lost)} samples never came in epoch {seen.epoch}: {self._ids(seen.lost)}.",
            "Let the sampler, or the parts that a stream is cut in, cover all of the data; "
            "--allow never if it is meant so. Data that is cut for each rank already must not be "
            "cut again: already_sharded=True.",
        )

    # -- the rest ---------------------------------------------------------------------------------

    def _equal_epochs(self) -> Iterator[Finding]:
        if self.is_stream:
            return
        for epoch in range(self.num_epochs - 1):
            orders = [
                [logs[each].tags[:, ID] for logs in self.trial.logs] for each in (epoch, epoch + 1)
            ]
            first = orders[0]
            is_equal = all(map(torch.equal, *orders))
            if is_equal and sum(map(len, first)) >= _FEW_IDS and _is_shuffled(first):
                yield Finding(
                    "equal-epochs",
                    f"epochs {epoch} and {epoch + 1} have the same shuffled order; rank 0 begins "
                    f"both with {self._ids(first[0].tolist())}.",
                    "Call set_epoch(epoch) on the sampler before each epoch."
                    if self.is_as_is
                    else "Let the sampler follow set_epoch(epoch), or draw anew in __iter__; "
                    "--allow equal-epochs if the order is meant to stay.",
                )
                return

    def _lengths(self) -> Iterator[Finding]:
        for rank, logs in enumerate(self.trial.logs):
            for epoch, log in enumerate(logs):
                wrong = log.length is not None and log.length != log.num_steps
                if wrong and not log.is_cut:
                    yield Finding(
                        "wrong-length",
                        f"len(loader) is {log.length} on rank {rank}, but epoch {epoch} has "
                        f"{log.num_steps} batches.",
                        "Let __len__ of the sampler or data set count what it yields, or leave "
                        "it out.",
                    )
                    return

    def _steps(self) -> Iterator[Finding]:
        for epoch in range(self.num_epochs):
            steps = [logs[epoch].num_steps for logs in self.trial.logs]
            if min(steps) != max(steps):
                few, many = steps.index(min(steps)), steps.index(max(steps))
                yield Finding(
                    "uneven-steps",
                    f"rank {many} takes {max(steps)} steps in epoch {epoch}, rank {few} only "
                    f"{min(steps)}: in training rank {many} would wait in an all-reduce for ever.",
                    "Let the ends be even: prepare the loader with even_batches=True or "
                    'tail="exact", or wrap training in Join.',
                )
                return

    def _draws(self) -> Iterator[Finding]:
        rows = _joined(
            (rank, epoch, logs[epoch].tags)
            for epoch in range(self.num_epochs)
            for rank, logs in enumerate(self.trial.logs)
        )
        questions = {
            "same-augmentation": ([_EPOCH], _RANK),
            "worker-repeats": ([_EPOCH, _RANK], _shift(WORKER)[0]),
            "equal-augmentation": ([_RANK, _shift(WORKER)[0]], _EPOCH),
        }
        if self.trial.is_dispatched:  # rank 0 makes the samples of all
            rows[:, _RANK] = 0
        if _is_seeded_alike(rows):
            yield Finding(
                "same-augmentation",
                "a generator is seeded alike for every sample: all of them draw the same random "
                "numbers.",
                "Leave the seed out, or mix the sample's index and the epoch into it; "
                "seed_samples=True does that. --allow same-augmentation if it is meant so.",
            )
            return
        for kind, (fixed, varying) in questions.items():
            count = self._count_shared(rows, fixed, varying)
            if count:
                yield _shared_draws(kind, count)

    def _count_shared(self, rows: Tensor, fixed: list[int], varying: int) -> int:
        """Count the states of generators that samples of different makers were drawn from."""
        num_shared = 0
        for column in range(DRAWS.start, DRAWS.stop):
            state = rows[:, 2 + column]
            drawn = rows[state != 0]
            group = _groups(drawn[:, [*fixed, 2 + column]])
            shared = _varies(group, drawn[:, varying])
            if varying != _EPOCH:  # one sample that several ranks make is another fault
                shared &= _varies(group, drawn[:, _shift(ID)[0]])
            num_shared += int(shared.sum())
        return num_shared


def _is_shuffled(orders: list[Tensor]) -> bool:
    """Tell whether ids go back on a rank, other than to such as have come before.

    Where a sampler fills up, ranks go back to the start of the data, or to that of their part.
    Keys that are no numbers have no order to go back in.
    """
    ids = torch.cat(orders)
    if bool(is_key(ids).any()):
        return False
    places = torch.cat([torch.arange(len(each)) for each in orders])
    things, which = torch.unique(ids, return_inverse=True)
    first = torch.full((len(things),), len(ids), dtype=torch.int64)
    first.scatter_reduce_(0, which, places, "amin")
    is_new = (places == first[which]).split([len(each) for each in orders])
    fresh = [each[new] for each, new in zip(orders, is_new, strict=True)]
    return any(bool((each[1:] < each[:-1]).any()) for each in fresh)


def _is_seeded_alike(rows: Tensor) -> bool:
    """Tell whether each maker of samples gives a generator the same seed for all of an epoch."""
    for column in range(SEEDS.start, SEEDS.stop):
        seeded = rows[rows[:, 2 + column] != 0]
        maker = _groups(seeded[:, [_RANK, _EPOCH, *_shift(WORKER)]])
        has_several = _varies(maker, seeded[:, _shift(ID)[0]])
        is_mixed = _varies(maker, seeded[:, 2 + column])
        told = seeded[has_several[maker]] if len(seeded) else seeded
        num_told = len(torch.unique(told[:, _shift(ID)[0]]))
        if num_told >= _FEW_IDS and not is_mixed.any():
            return True
    return False


def _shared_draws(kind: str, count: int) -> Finding:
    who, remedy = {
        "same-augmentation": (
            "on more than one rank",
            "Seed it by rank: leave the seed out, or mix the rank into it; with workers shardplug "
            "seeds each of them. seed_samples=True seeds by the sample's place.",
        ),
        "worker-repeats": (
            "in more than one worker of a rank",
            "A generator that a data set keeps is copied into each worker: make it there, in "
            "worker_init_fn, or draw from the global generators, which are seeded for each worker.",
        ),
        "equal-augmentation": (
            "in more than one epoch",
            "A generator that a data set keeps starts anew with the workers of each epoch: draw "
            "from the global generators, or mix the epoch into its seed in set_epoch.",
        ),
    }[kind]
    return Finding(
        kind,
        f"the same random numbers are drawn {who}, {count} times: augmentation repeats.",
        remedy,
    )


# A table of what was seen has the rank, the epoch, and then the columns of the tags.
_RANK, _EPOCH = 0, 1


def _shift(*columns: int) -> list[int]:
    return [2 + column for column in columns]


def _joined(parts: Iterator[tuple[int, int, Tensor]]) -> Tensor:
    made = []
    for rank, epoch, tags in parts:
        place = torch.tensor([[rank, epoch]]).expand(len(tags), 2)
        made.append(torch.cat([place, tags], dim=1))
    return torch.cat(made)


def _groups(keys: Tensor) -> Tensor:
    """Number the rows that differ, and tell the number of each."""
    _, groups = torch.unique(keys, dim=0, return_inverse=True)
    return cast(Tensor, groups)


def _varies(group: Tensor, values: Tensor) -> Tensor:
    """Tell for each group whether its values differ."""
    num_groups = int(group.max()) + 1 if len(group) else 0
    least = torch.zeros(num_groups, dtype=torch.int64)
    most = least.clone()
    least.scatter_reduce_(0, group, values, "amin", include_self=False)
    most.scatter_reduce_(0, group, values, "amax", include_self=False)
    return least != most


def _contents(tags: Tensor) -> dict[int, int]:
    contents, counts = torch.unique(tags[:, CONTENT], return_counts=True)
    return dict(zip(contents.tolist(), counts.tolist(), strict=True))


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}{' and more' if len(ranks) > 8 else ''}"
