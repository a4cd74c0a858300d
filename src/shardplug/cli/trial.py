"""Run a loader on many simulated ranks, and note what each of them sees.

Ranks are threads of this process that take turns: one runs until it has to meet the others, and
finds the random generators as it left them, so that they differ as those of processes do.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar, cast, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from shardplug import rng
from shardplug.cli.refusal import Refusal, one_line, sentence
from shardplug.cli.targets import Factory
from shardplug.cli.tracing import (
    GENERATORS,
    NUM_COLUMNS,
    TracedBatch,
    kept_generators,
    trace,
)
from shardplug.dispatch import DataLoaderDispatcher
from shardplug.errors import CommError, PlanError
from shardplug.plan.order import mix_seed
from shardplug.prepare import prepare_data_loader
from shardplug.prepared import PreparedLoader
from shardplug.samplers import HasEpoch, epoch_parts, known_length
from shardplug.testing import LockstepComm, run_ranks

T = TypeVar("T")

Tell = Callable[[int, "int | None"], None]

_A_DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Conditions:
    """Under which conditions a loader is tried out; see `shardplug check --help`.

    Attributes:
        world_size: Ranks.
        num_epochs: Passes.
        max_batches: Most batches of each rank and pass; None: all.
        options: For `prepare_data_loader`; None: the loader is not prepared.
        sets_epoch: Whether a loader that is not prepared is told the epoch.
        same_seed: Whether all ranks begin with equal generators.
    """

    world_size: int
    num_epochs: int = 2
    max_batches: int | None = None
    options: dict[str, Any] | None = None
    sets_epoch: bool = True
    same_seed: bool = False


@dataclass(slots=True)
class PassLog:
    """What one rank saw in one pass.

    Attributes:
        length: What the loader said beforehand, None if it did not.
        num_steps: Batches.
        num_rows: Rows, padding included.
        tags: Of the real rows, see `shardplug.cli.tracing`; (rows, NUM_COLUMNS).
        is_cut: Whether it was left before its end.
        is_done: Whether it has come to an end without an error.
    """

    length: int | None
    num_steps: int = 0
    num_rows: int = 0
    tags: Tensor = field(default_factory=lambda: torch.empty((0, NUM_COLUMNS), dtype=torch.int64))
    is_cut: bool = False
    is_done: bool = False


@dataclass(slots=True)
class Trial:
    """What all ranks saw.

    Attributes:
        loaders: The user's, by rank.
        logs: By rank and pass.
        failure: What ended it before its time.
        warned: What was warned of.
        is_dispatched: Whether one rank read for all.
    """

    loaders: list[DataLoader[Any]]
    logs: list[list[PassLog]]
    failure: BaseException | None = None
    warned: list[str] = field(default_factory=list)
    is_dispatched: bool = False


def try_out(
    factory: Factory, conditions: Conditions, tell: Tell = lambda done, total: None
) -> Trial:
    """Run a user's loader on simulated ranks.

    Args:
        factory: Makes the loader of a rank.
        conditions: How.
        tell: Called with the number of batches that all ranks together have seen so far, and of
            those that there will be, None if that is not known.

    Returns:
        What they saw; a failure in the middle of it is part of that.

    Raises:
        Refusal: If the user's function fails, or the system has not enough threads for the ranks.
        PlanError: If the loader cannot be prepared so.
    """
    with kept_generators(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        turns = _Turns(conditions)
        loaders = [
            turns.alone(rank, factory, rank, conditions.world_size)
            for rank in range(conditions.world_size)
        ]
        trial = Trial(loaders, [[] for _ in loaders])
        _run(trial, conditions, turns, _Tally(tell))
        if trial.failure is not None:
            _let_go(trial.failure)
    trial.warned = list(dict.fromkeys(" ".join(str(each.message).split()) for each in caught))
    return trial


def expected_tags(factory: Factory, conditions: Conditions) -> Tensor:
    """Read the data set of a single process from its start to its end, and return the tags.

    Raises:
        Refusal: If the user's function or data set fails.
    """
    with kept_generators(), warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        turns = _Turns(conditions)
        loader = trace(turns.alone(0, factory, 0, 1))
        try:
            tags = [item.tag for item in cast(Any, loader.dataset)]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the user's data set may raise anything
            raise Refusal(
                f"Reading the stream in a single process failed: {sentence(one_line(error))} Let "
                "it run alone first."
            ) from error
    return torch.tensor(tags, dtype=torch.int64).reshape(-1, NUM_COLUMNS)


def _run(trial: Trial, conditions: Conditions, turns: _Turns, tally: _Tally) -> None:
    was_prepared = [False] * conditions.world_size

    def live(comm: LockstepComm) -> None:
        with turns.of(comm.rank):
            user = trace(trial.loaders[comm.rank])
            loader: DataLoader[Any] = user
            if conditions.options is not None:
                own = _TurnComm(comm, turns)
                loader = prepare_data_loader(user, comm=own, **conditions.options)
                if isinstance(loader, DataLoaderDispatcher):
                    # Ranks wait for one another elsewhere too, and one alone uses generators.
                    trial.is_dispatched = True
                    turns.leave(comm.rank)
                    comm.barrier()
            was_prepared[comm.rank] = True
            for epoch in range(conditions.num_epochs):
                _take_pass(loader, trial.logs[comm.rank], epoch, conditions, tally)

    try:
        run_ranks(conditions.world_size, live, timeout_s=_A_DAY_S)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's data set may raise anything
        if isinstance(error, PlanError) and not any(was_prepared):
            raise
        trial.failure = _of_a_rank(error, conditions)


def _of_a_rank(error: BaseException, conditions: Conditions) -> BaseException:
    """Return what a rank has raised; what is of none kept the ranks from their start."""
    notes = getattr(error, "__notes__", [])
    if isinstance(error, CommError) or any(note.startswith("Raised on rank") for note in notes):
        return error
    raise Refusal(
        "`--world-size` must be so small that each rank can have a thread of this process, "
        f"got {conditions.world_size}: {sentence(one_line(error))} Try fewer ranks."
    ) from error


def _let_go(failure: BaseException) -> None:
    """Let go of the loaders in the frames of a failure, and so of their threads and workers."""
    link: BaseException | None = failure
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    gc.collect()


def _take_pass(
    loader: DataLoader[Any],
    logs: list[PassLog],
    epoch: int,
    conditions: Conditions,
    tally: _Tally,
) -> None:
    if not isinstance(loader, PreparedLoader) and conditions.sets_epoch:
        _tell_epoch(loader, epoch)
    log = PassLog(known_length(loader))
    logs.append(log)
    tally.expect(log.length, conditions)
    tags = [log.tags]
    is_ready = loader.batch_size is None and loader.batch_sampler is None
    most = conditions.max_batches
    batches: Any = iter(loader)
    try:
        for batch in islice(batches, most):
            tags.append(_real_tags(batch, loader, is_ready))
            log.num_steps += 1
            log.num_rows += len(batch.tags)
            tally.add()
        log.is_cut = log.num_steps == most and log.length != most
        log.is_done = True
    finally:
        log.tags = torch.cat(tags)
        if hasattr(batches, "close"):  # a generator of ours; torch's iterators end by themselves
            batches.close()
        del batches  # its workers end with it, also where an error keeps this frame


def _real_tags(batch: TracedBatch, loader: DataLoader[Any], is_ready: bool) -> Tensor:
    valid = loader.valid_rows if isinstance(loader, PreparedLoader) else len(batch.tags)
    # A batch that is ready is one thing, however many rows it has.
    return batch.tags[: min(valid, 1) if is_ready else valid]


def _tell_epoch(loader: DataLoader[Any], epoch: int) -> None:
    """Do what trainers do at the start of an epoch."""
    source = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    parts = epoch_parts(source)
    if isinstance(loader.dataset, HasEpoch):
        parts.append(loader.dataset)
    for part in parts:
        part.set_epoch(epoch)


class _Tally:
    """Counts the batches of all ranks."""

    def __init__(self, tell: Tell) -> None:
        self._tell, self._done, self._lock = tell, 0, threading.Lock()
        self._total: int | None = None

    def expect(self, length: int | None, conditions: Conditions) -> None:
        """Work out how many there will be, from what the first loader says."""
        most = conditions.max_batches
        counts = [count for count in (length, most) if count is not None]
        if self._total is None and counts:
            self._total = min(counts) * conditions.world_size * conditions.num_epochs

    def add(self) -> None:
        """Count one."""
        with self._lock:
            self._done += 1
            self._tell(self._done, self._total)


class _Turns:
    """Lets one rank run at a time, with the random generators that are its own."""

    def __init__(self, conditions: Conditions) -> None:
        self._lock = threading.Lock()
        self._states: list[dict[str, Any]] = []
        self._free: set[int] = set()
        for rank in range(conditions.world_size):
            rng.seed_cpu(mix_seed(0 if conditions.same_seed else rank))
            self._states.append(rng.capture(GENERATORS))

    def alone(self, rank: int, call: Callable[..., T], *args: Any) -> T:
        """Call something as a rank."""
        with self.of(rank):
            return call(*args)

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """Run as a rank."""
        self.begin(rank)
        try:
            yield
        finally:
            self.end(rank)

    def begin(self, rank: int) -> None:
        """Wait for a turn."""
        if rank not in self._free:
            self._lock.acquire()
            rng.restore(self._states[rank])

    def end(self, rank: int) -> None:
        """Let another rank have its turn."""
        if rank not in self._free:
            self._states[rank] = rng.capture(GENERATORS)
            self._lock.release()

    def leave(self, rank: int) -> None:
        """Run on without taking turns any more."""
        self.end(rank)
        self._free.add(rank)


@final
class _TurnComm:
    """A comm that lets other ranks have their turns while it waits for them."""

    def __init__(self, comm: LockstepComm, turns: _Turns) -> None:
        self._comm, self._turns = comm, turns

    @property
    def rank(self) -> int:
        """This rank's number, from zero."""
        return self._comm.rank

    @property
    def world_size(self) -> int:
        """How many ranks take part in every collective."""
        return self._comm.world_size

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._turns.end(self.rank)
        try:
            yield
        finally:
            self._turns.begin(self.rank)

    def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Give every rank the integers of all ranks, by rank."""
        with self._waiting():
            return self._comm.all_gather_ints(values)

    def all_gather_object(self, value: T) -> list[T]:
        """Give every rank a copy of the values of all ranks, by rank."""
        with self._waiting():
            return self._comm.all_gather_object(value)

    def broadcast_object(self, value: T | None, src: int = 0) -> T:
        """Give every rank a copy of the value of rank ``src``."""
        with self._waiting():
            return self._comm.broadcast_object(value, src)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        with self._waiting():
            self._comm.barrier()
