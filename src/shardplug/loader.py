"""`DataLoaderShard`: a DataLoader that reads its shard of every epoch and knows where it stands.

It keeps the loader that really iterates, a clone of the user's with our batch sampler in it, and
adds what a pass needs around it: the agreement of the ranks, the epoch, the record of real rows,
the move to the device. The batches themselves are torch's business.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any, ClassVar

import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler

from shardplug import rng
from shardplug.comm import Comm, agree_on
from shardplug.comm_torch import current_comm
from shardplug.errors import PlanError
from shardplug.passes import Pass
from shardplug.plan.cursor import Progress, Run
from shardplug.plan.order import worker_seed
from shardplug.plan.shard import Shard
from shardplug.plan.split import ShardPlan
from shardplug.rows import move_to_device
from shardplug.samplers import BatchSamplerShard, epoch_parts
from shardplug.workers import Reader, StartWorker, Tasks, as_it_is

_LOOK = 4096
"""How many ids (or batches) from the start of an order that is not ours are compared."""

_PASS_FACTS = {
    "epoch": "Call set_epoch() with the same value on every rank.",
    "position": "Load the same state on every rank.",
    "seed": "Prepare the loader on every rank.",
    "order": (
        "Its sampler draws another order on each rank: seed it alike on all ranks, pass "
        'rng_types, or sync_order="broadcast" to use that of rank 0.'
    ),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What a loader does besides dividing the data.

    Attributes:
        seed: Of orders and workers, equal on all ranks.
        device: Where batches are moved, None to leave them.
        non_blocking: Whether moving may overlap with what comes after.
        rng_types: Generators made equal to rank 0's at the start of each pass.
        generator: The one that ``"generator"`` means.
        skip_batches: Steps left out at the start of each pass.
        is_simulation: Whether the shard is not this process's own, so that there is nobody to
            agree with.
        comm: The ranks; None: those of the process at the time.
    """

    seed: int
    device: torch.device | None = None
    non_blocking: bool = False
    rng_types: tuple[str, ...] = ()
    generator: torch.Generator | None = None
    skip_batches: int = 0
    is_simulation: bool = False
    comm: Comm | None = None


@dataclass(slots=True)
class _Epochs:
    """The epoch of a loader and all that has to be told of it; shared with its sampler views."""

    progress: Progress
    parts: list[Any] = field(default_factory=list)

    def set_epoch(self, epoch: int) -> None:
        self.progress.set_epoch(epoch)
        self.tell(epoch)

    def tell(self, epoch: int) -> None:
        for part in self.parts:
            part.set_epoch(epoch)


class EpochSampler(Sampler[Any]):
    """The sampler of a prepared loader, as trainers see it: `set_epoch` reaches the loader.

    Everything else is that of the sampler inside.
    """

    def __init__(self, sampler: Any, epochs: _Epochs) -> None:
        self._sampler = sampler
        self._epochs = epochs

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the loader's next pass."""
        self._epochs.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Yield what the sampler inside yields: the whole epoch, not only this shard's part."""
        return iter(self._sampler)

    def __len__(self) -> int:
        """Count the samples of the whole epoch."""
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        """Look an attribute up in the sampler inside."""
        if name.startswith("__") or name == "_sampler":
            raise AttributeError(name)
        return getattr(self._sampler, name)


class PassBatches(BatchSampler):
    """The batch sampler of a prepared loader: the index batches of the pass that is under way.

    Iterated on its own, outside of a pass of the loader, it yields this shard's batches of the
    upcoming epoch.
    """

    def __init__(self, shard: BatchSamplerShard, epochs: _Epochs) -> None:
        self._shard = shard
        self._epochs = epochs
        self.sampler = EpochSampler(shard.sampler, epochs)
        self.offered: Pass | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the loader's next pass."""
        self._epochs.set_epoch(epoch)

    @property
    def batch_size(self) -> int | None:  # type: ignore[override]
        """The batch size that the user's batch sampler declares."""
        return self._shard.batch_size

    @property
    def drop_last(self) -> bool:  # type: ignore[override]
        """Whether rows may be dropped at the end."""
        return self._shard.drop_last

    def __iter__(self) -> Iterator[Any]:
        """Yield the index batches of the pass that the loader offers, else of the next epoch."""
        offered, self.offered = self.offered, None
        if offered is None:
            upcoming = self._epochs.progress.upcoming
            self._epochs.tell(upcoming.epoch)
            offered, _ = self._shard.begin(upcoming.consumed)
        return iter(offered)

    def __len__(self) -> int:
        """Count the index batches of a full pass."""
        return len(self._shard)


class DataLoaderShard(DataLoader[Any]):
    """A DataLoader whose passes are those of one shard, epoch by epoch.

    Built directly it cuts nothing: it delivers the loader that it is given the arguments of.
    `prepare_data_loader` makes one that reads a shard. Nothing is decided before the first
    ``next``; the epoch moves on at each pass, also after one that was left early.

    Reads and writes of a loader's attributes reach the loader that iterates.

    Collective: each pass of a loader that is divided begins with one small message between the
    ranks, which compares epoch, position and seed.

    Args:
        dataset: As for DataLoader.
        device: Where batches are moved, any nesting; None leaves them.
        rng_types: Generators made equal to rank 0's at the start of each pass: "torch", "cuda",
            "xla", "generator", "numpy", "python".
        synchronized_generator: The one that "generator" means.
        skip_batches: Steps left out at the start of each pass, zero or more.
        non_blocking: Whether moves may overlap with what comes after.
        comm: The ranks; None: those of the process.
        dataloader_kwargs: As for DataLoader.

    Raises:
        PlanError: If an argument does not fit.
        CommError: At the start of a pass, if ranks disagree or another rank failed.
    """

    _OWN: ClassVar[frozenset[str]] = frozenset(
        {"_inner", "_shard", "_settings", "_epochs", "_batches"}
    )

    def __init__(
        self,
        dataset: Any,
        device: torch.device | str | int | None = None,
        rng_types: Sequence[str] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        *,
        non_blocking: bool = False,
        comm: Comm | None = None,
        **dataloader_kwargs: Any,
    ) -> None:
        loader: DataLoader[Any] = DataLoader(dataset, **dataloader_kwargs)
        settings = Settings(
            seed=rng.draw_seed(),
            device=None if device is None else torch.device(device),
            non_blocking=non_blocking,
            rng_types=rng.check_rng_types(rng_types),
            generator=synchronized_generator,
            skip_batches=check_skip("skip_batches", skip_batches),
            comm=comm,
        )
        shard = BatchSamplerShard(loader.batch_sampler or loader.sampler, even_batches=False)
        self._adopt(loader, shard, settings)

    @classmethod
    def over(
        cls, loader: DataLoader[Any], shard: BatchSamplerShard, settings: Settings
    ) -> DataLoaderShard:
        """Make one around a clone of a user's loader, with the batches of a shard.

        Args:
            loader: The user's; it stays as it is.
            shard: Divides the batches of an epoch.
            settings: What else is to be done.
        """
        made = cls.__new__(cls)
        made._adopt(loader, shard, settings)
        return made

    def _adopt(
        self, loader: DataLoader[Any], shard: BatchSamplerShard, settings: Settings
    ) -> None:
        epochs = _Epochs(Progress(), epoch_parts(shard.batch_sampler, loader.dataset))
        batches = PassBatches(shard, epochs)
        inner = copy.copy(loader)
        # A DataLoader refuses to have these set; a clone that has not iterated may take them.
        if loader.batch_sampler is None:
            inner.__dict__.update(sampler=batches, _iterator=None)
        else:
            inner.__dict__.update(sampler=batches.sampler, batch_sampler=batches, _iterator=None)
        for name, value in (
            ("_inner", inner),
            ("_shard", shard),
            ("_settings", settings),
            ("_epochs", epochs),
            ("_batches", batches),
        ):
            object.__setattr__(self, name, value)

    # -- what torch's loader has -------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Look an attribute up in the loader that iterates."""
        if name in DataLoaderShard._OWN:
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the loader that iterates."""
        setattr(self._inner, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the loader that iterates."""
        delattr(self._inner, name)

    def __len__(self) -> int:
        """Count the batches of a full pass on this rank, or raise TypeError on every rank."""
        return max(0, len(self._shard) - self._settings.skip_batches)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to a pass under way: its iterator, its workers."""
        inner = copy.copy(self._inner)
        inner.__dict__["_iterator"] = None
        return {**self.__dict__, "_inner": inner}

    # -- where it stands ---------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch of the pass under way (or left early), else of the next pass."""
        return self._epochs.progress.cursor.epoch

    @property
    def shard(self) -> Shard:
        """Which part of the data this loader reads, of how many."""
        return self._shard.shard

    @property
    def plan(self) -> ShardPlan:
        """The plan of a full epoch; ``num_samples`` is None where the length is not known."""
        return self._shard.plan

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch that is out is the last of its pass."""
        run = self._epochs.progress.run
        return run is not None and run.step > 0 and run.step == run.counts.num_steps

    @property
    def valid_rows(self) -> int:
        """Real rows of the batch that is out; they come first. 0 when no batch is out."""
        run = self._epochs.progress.run
        return run.counts.valid_rows(run.step - 1) if run is not None and run.step else 0

    @property
    def remainder(self) -> int:
        """Real rows of a pass's last step over all ranks if that is not full, else -1.

        Known for loaders of known length; -1 for others.
        """
        plan = self._shard.plan
        return -1 if plan.num_samples is None else plan.remainder

    @property
    def total_batch_size(self) -> int | None:
        """Rows of a full step over all ranks; None if batches have no declared size."""
        return self._shard.global_batch_size

    @property
    def total_dataset_length(self) -> int | None:
        """Samples in the epoch's order; None if that is not known."""
        return self._shard.num_samples

    @property
    def remaining_steps(self) -> int:
        """Steps that are left of the pass under way, or of the next one if none is.

        Raises:
            TypeError: If that is not known.
        """
        run = self._epochs.progress.run
        if run is not None and run.counts.num_steps is not None:
            return run.counts.num_steps - run.step
        consumed = self._epochs.progress.upcoming.consumed
        return self._shard.plan.seek(consumed).num_steps if consumed else len(self)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, and tell samplers and data set.

        Args:
            epoch: Zero or more, the same on all ranks.

        Raises:
            PlanError: If ``epoch`` is negative.
        """
        self._epochs.set_epoch(epoch)

    def wrap_batch_sampler(self, wrap: Callable[[BatchSampler], BatchSampler]) -> None:
        """Put a wrapper of the caller's around the batch sampler that the loader iterates.

        Args:
            wrap: Takes the batch sampler, returns one that yields each of its batches once, in
                order.
        """
        self._inner.__dict__["batch_sampler"] = wrap(self._inner.batch_sampler)

    # -- passes ------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Start a pass at its first ``next``.

        Collective: the first ``next`` is, on a loader that is divided among ranks.
        """
        pass_ = self._agree_on_pass()
        run = self._epochs.progress.begin(pass_)
        try:
            step = 0
            for batch in self._fetch(pass_, run):
                step += 1
                run.step = step
                yield batch
            if step != pass_.num_steps:
                raise PlanError(
                    f"`dataloader` must yield one batch per batch of its sampler, got {step} for "
                    f"{pass_.num_steps} from {type(self._inner).__name__}.__iter__."
                )
            self._epochs.progress.finish(run)
        finally:
            run.was_left = True

    def _comm(self) -> Comm:
        return self._settings.comm or current_comm()

    def _agree_on_pass(self) -> Pass:
        """Draw the upcoming pass, and make sure that all ranks have drawn the same."""
        settings, cursor = self._settings, self._epochs.progress.upcoming
        self._epochs.tell(cursor.epoch)
        if settings.is_simulation:
            return self._draw(cursor.consumed, 0)[0]
        comm = self._comm()
        if settings.rng_types and not self._shard.is_by_value:
            rng.synchronize(settings.rng_types, comm, generator=settings.generator)
        is_compared = comm.world_size > 1 and self._shard.shard.count > 1
        look = _LOOK if is_compared and not self._shard.is_by_value else 0

        def draw() -> tuple[Pass, tuple[int, ...]]:
            pass_, head = self._draw(cursor.consumed, look)
            print_ = zlib.crc32(repr(head).encode()) if look else 0
            return pass_, (cursor.epoch, cursor.consumed, settings.seed, print_)

        if not is_compared:
            return draw()[0]
        subject = f"the loader over {type(self._shard.sampler).__name__}"
        return agree_on(comm, draw, subject=subject, facts=_PASS_FACTS)[0]

    def _draw(self, consumed: int, look: int) -> tuple[Pass, list[Any]]:
        pass_, head = self._shard.begin(consumed, look=look)
        skipped = self._settings.skip_batches
        return (pass_.after(skipped) if skipped and not consumed else pass_), head

    def _fetch(self, pass_: Pass, run: Run) -> Iterator[Any]:
        """Let the user's own ``__iter__`` make the batches of a pass, then move them."""
        inner, settings = self._inner, self._settings
        self._batches.offered = pass_
        inner.__dict__["_get_iterator"] = partial(self._open, run.epoch)
        try:
            batches = iter(inner)
            first = list(islice(batches, 1))
        finally:
            inner.__dict__.pop("_get_iterator", None)
            offered, self._batches.offered = self._batches.offered, None
        if offered is not None and pass_.num_steps != 0:
            raise PlanError(
                f"`dataloader` must ask its sampler for its batches, got one that did not from "
                f"{type(inner).__name__}.__iter__. Let it iterate super().__iter__()."
            )
        if settings.device is None:
            return chain(first, batches)
        move = partial(move_to_device, device=settings.device, non_blocking=settings.non_blocking)
        return map(move, chain(first, batches))

    def _open(self, epoch: int) -> Any:
        """Make torch's iterator of the loader: over a copy that reads and seeds as we need it."""
        inner, seed, index = self._inner, self._settings.seed, self._shard.shard.index
        opened = copy.copy(inner)
        opened.__dict__.pop("_get_iterator", None)
        # torch draws the workers' seeds from here; the training process's RNG is not moved.
        generator = torch.Generator().manual_seed(worker_seed(seed, epoch, rank=index, worker=0))
        opened.__dict__["generator"] = generator
        if inner.num_workers > 0:
            is_batched = inner.batch_sampler is not None
            tasks = Tasks(inner._index_sampler, self._epochs.progress)
            opened.__dict__.update(
                dataset=Reader(inner.dataset, inner.collate_fn, is_batched, seed, index),
                collate_fn=as_it_is,
                sampler=tasks,
                batch_sampler=None,
                worker_init_fn=StartWorker(seed, epoch, index, inner.worker_init_fn),
            )
        return opened._get_iterator()


def check_skip(name: str, steps: int) -> int:
    """Check a number of steps to skip.

    Raises:
        PlanError: If it is negative.
    """
    if steps < 0:
        raise PlanError(f"`{name}` must be zero or more, got {steps}.")
    return steps
