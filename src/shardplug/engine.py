"""`ShardEngine`: one object that knows the ranks of a run and prepares what a loop needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, get_args, runtime_checkable

import torch
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader

from shardplug.accumulation import MicroBatch, find_micro_batch, synchronising, window_of
from shardplug.agree import gather, gather_for_metrics
from shardplug.comm import Comm
from shardplug.comm_torch import current_comm, local_device, start_process_group
from shardplug.dividing import own_shard
from shardplug.errors import PlanError
from shardplug.kinds import check_count
from shardplug.optimizer import ScalerAwareOptimizer
from shardplug.options import check_options
from shardplug.plan.cursor import OpenWindow
from shardplug.plan.shard import Shard
from shardplug.prepare import prepare_data_loader
from shardplug.prepared import PreparedLoader
from shardplug.resume import (
    AccumulationState,
    RankState,
    engine_state,
    gather_rank_states,
    read_engine_state,
    read_rank_state,
)
from shardplug.rng import restore_process
from shardplug.scheduler import StepSyncedScheduler, Unit


@runtime_checkable
class _Schedule(Protocol):
    """A schedule of learning rates, of torch's or like them."""

    def step(self) -> Any: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class ShardEngine:
    """The ranks of a run, and the options that its loaders share.

    Under torchrun it starts the process group if nobody has (NCCL on CUDA, gloo otherwise), and
    ends it at exit; alone it runs as a world of one, with no process group. Two engines in one
    process do not see each other.

    Collective: making one is, where it starts the process group.

    Args:
        split_batches: See `prepare_data_loader`, as for the following ones.
        even_batches: Whether all ranks take the same number of full steps.
        tail: Says outright what happens at the end of an epoch, and wins.
        dispatch_batches: True: rank 0 reads and each rank receives its rows. False: every rank
            reads its own part. None: True for streams.
        slice_fn_for_dispatch: Cuts each shard's rows out of a round that is dispatched; for loaders
            that are not it has no effect.
        rng_types: Generators made equal to rank 0's at the start of each pass.
        use_seedable_sampler: Chooses where the seed of the order comes from.
        data_seed: The seed of the order.
        non_blocking: Whether moves to the device may overlap with what comes after.
        use_stateful_dataloader: Read through torchdata's StatefulDataLoader.
        sync_order: How ranks come to one order where it is no function of (seed, epoch).
        worker_split: Who divides a stream among workers.
        batches_per_message: Most batches that one message from a worker carries, at least 1.
        seed_samples: Whether to seed before each sample, by its position.
        gradient_accumulation_steps: Micro-batches of one optimizer step, at least 1.
        scheduler_unit: What schedules count: "updates", real optimizer steps, or "batches" of the
            unprepared loader.
        scaler: A torch.amp.GradScaler that scales losses for all prepared optimizers.
        torch_device_mesh: Ranks that differ only in its model axes read the same batches.
        data_axes: The mesh axes that divide the data, where their names do not tell.
        comm: The ranks; None: those of this process.

    Raises:
        PlanError: If an argument does not fit.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader
        >>> engine = ShardEngine(data_seed=0)
        >>> loader = engine.prepare(DataLoader(torch.arange(6), batch_size=2))
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3], [4, 5]]
    """

    def __init__(
        self,
        *,
        split_batches: bool = False,
        even_batches: bool = True,
        tail: str | None = None,
        dispatch_batches: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
        rng_types: Sequence[str] | None = ("generator",),
        use_seedable_sampler: bool = True,
        data_seed: int | None = None,
        non_blocking: bool = False,
        use_stateful_dataloader: bool = False,
        sync_order: str = "agree",
        worker_split: str = "auto",
        batches_per_message: int = 1,
        seed_samples: bool = False,
        gradient_accumulation_steps: int = 1,
        scheduler_unit: Unit = "updates",
        scaler: GradScaler | None = None,
        torch_device_mesh: Any = None,
        data_axes: Sequence[str] | None = None,
        comm: Comm | None = None,
    ) -> None:
        options = check_options(
            split_batches=split_batches,
            even_batches=even_batches,
            tail=tail,
            dispatch_batches=dispatch_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            rng_types=rng_types,
            use_seedable_sampler=use_seedable_sampler,
            data_seed=data_seed,
            non_blocking=non_blocking,
            use_stateful_dataloader=use_stateful_dataloader,
            sync_order=sync_order,
            worker_split=worker_split,
            batches_per_message=batches_per_message,
            seed_samples=seed_samples,
            torch_device_mesh=torch_device_mesh,
            data_axes=data_axes,
            comm=comm,
        )
        window = check_count("gradient_accumulation_steps", gradient_accumulation_steps, least=1)
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise PlanError(f"`scaler` must be a torch.amp.GradScaler or None, got {scaler!r:.80}.")
        if scheduler_unit not in get_args(Unit):
            raise PlanError(
                f"`scheduler_unit` must be 'batches' or 'updates', got {scheduler_unit!r}."
            )
        if comm is None:
            start_process_group()
        self.gradient_accumulation_steps = window
        self.scaler = scaler
        self._scheduler_unit: Unit = scheduler_unit
        self._comm = comm
        self._shard = own_shard(self._ranks(), torch_device_mesh, data_axes)
        self._loaders: list[PreparedLoader] = []
        self._optimizers: list[ScalerAwareOptimizer] = []
        self._schedulers: list[StepSyncedScheduler] = []
        self._micro_batch: MicroBatch | None = None  # the latest
        self._entered: MicroBatch | None = None  # that of the `accumulate` under way
        self._split_batches: bool = options["split_batches"]
        self._options = options

    def _ranks(self) -> Comm:
        return current_comm() if self._comm is None else self._comm

    @property
    def rank(self) -> int:
        """This process's number in the run, from zero."""
        return self._ranks().rank

    @property
    def world_size(self) -> int:
        """How many processes the run has."""
        return self._ranks().world_size

    @property
    def shard(self) -> Shard:
        """Which part of the data this process reads, of how many."""
        return self._shard

    @property
    def device(self) -> torch.device:
        """The device of this process, where prepared loaders put their batches."""
        return local_device()

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one to print and write."""
        return self.rank == 0

    def prepare(self, *objects: Any) -> Any:
        """Prepare loaders, optimizers and schedules, in any order and number.

        Batches of prepared loaders are put on `device`. Modules come back as they are: wrapping
        them in DDP or FSDP is the caller's line.

        Collective: every rank must call it with the same objects in the same order.

        Args:
            objects: DataLoaders, optimizers, schedules and modules.

        Returns:
            What was prepared, in order; a single object if one was given.

        Raises:
            PlanError: If an object is of another kind, an optimizer or a schedule is there twice or
                has been prepared already, the optimizer of a schedule has not been, or a loader
                cannot be prepared. Nothing is prepared then.
            CommError: If ranks were given different loaders, or another rank failed; likewise.
        """
        for place, given in enumerate(objects, start=1):
            self._check(given, place, objects)
        known: tuple[list[Any], ...] = (self._loaders, self._optimizers, self._schedulers)
        before = [len(each) for each in known]
        try:
            prepared = self._prepare_all(objects)
        except BaseException:
            for each, length in zip(known, before, strict=True):
                del each[length:]
            raise
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare_all(self, objects: Sequence[Any]) -> tuple[Any, ...]:
        # Schedules come last: each needs the wrapper of its optimizer.
        wrapped = {
            id(given): self._wrap_optimizer(given)
            for given in objects
            if isinstance(given, torch.optim.Optimizer)
        }
        return tuple(
            wrapped[id(given)] if id(given) in wrapped else self._prepare_one(given)
            for given in objects
        )

    def prepare_loader(self, loader: DataLoader[Any], **options: Any) -> PreparedLoader:
        """Prepare one loader, with options of its own.

        Collective: every rank must call it.

        Args:
            loader: The user's loader, the same on every rank.
            options: As for `prepare_data_loader`; they win over those of the engine.

        Raises:
            PlanError: If an argument does not fit.
            CommError: If ranks were given different loaders, or another rank failed.
        """
        chosen = {"device": self.device, "put_on_device": True, **self._options, **options}
        prepared = prepare_data_loader(loader, **chosen)
        prepared.keep_history(self.gradient_accumulation_steps)
        self._loaders.append(prepared)
        return prepared

    @contextmanager
    def accumulate(self, *models: Any, loader: PreparedLoader | None = None) -> Iterator[None]:
        """Make the micro-batch that is out part of a window of one optimizer step.

        Within it, on all but the last micro-batch of a window, ``step()`` and ``zero_grad()`` of
        prepared optimizers and ``step()`` of prepared schedules do nothing, and the models do not
        synchronise gradients. The last window of an epoch steps even if it is short.

        Args:
            models: Those whose gradients are synchronised in backward: DDP, FSDP.
            loader: Where the batch is from; None: the loader of the innermost pass under way.

        Raises:
            PlanError: If no pass is under way, or ``loader`` is not one of this engine's.

        Example:
            >>> from torch.utils.data import DataLoader
            >>> model = torch.nn.Linear(1, 1)
            >>> engine = ShardEngine(gradient_accumulation_steps=2)
            >>> optimizer, loader = engine.prepare(
            ...     torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(torch.ones(6, 1))
            ... )
            >>> for batch in loader:
            ...     with engine.accumulate(model):
            ...         engine.backward(model(batch).mean())
            ...         optimizer.step()
            ...         optimizer.zero_grad()
            >>> optimizer.outcome.num_steps
            3
        """
        if loader is not None and not any(loader is own for own in self._loaders):
            raise PlanError(
                "`loader` must be one that this engine has prepared, got another. "
                "Pass what prepare() returned."
            )
        chosen = self._loaders if loader is None else [loader]
        found = find_micro_batch(chosen, self.gradient_accumulation_steps)
        if found is None:
            raise PlanError(
                "`accumulate` must be entered in the loop over a prepared loader, got no pass "
                "under way. Prepare the loader that the loop is over with this engine."
            )
        outer, latest = self._entered, self._micro_batch
        if latest is not None and outer is None and latest.is_abandoned_for(found):
            for optimizer in self._optimizers:
                optimizer.drop_window()
        self._enter(found)
        try:
            with synchronising(models, is_needed=found.window.closes):
                yield
        finally:
            self._entered = None
            if outer is not None:
                self._enter(outer)

    def _enter(self, micro_batch: MicroBatch) -> None:
        self._entered = self._micro_batch = micro_batch
        for optimizer in self._optimizers:
            optimizer.window = micro_batch.window

    def _current(self) -> MicroBatch | None:
        """Find the micro-batch that is at work: within `accumulate`, or after it on its batch."""
        latest = self._micro_batch
        if latest is None or latest is self._entered or latest.is_out:
            return latest
        return None

    def backward(self, loss: torch.Tensor, valid_rows: int | None = None, **options: Any) -> None:
        """Compute the gradients of a loss, scaled for its part in the window and by the scaler.

        Without ``valid_rows`` the loss is divided by the micro-batches that are really in the
        window (by ``gradient_accumulation_steps`` where the end is not known), outside of
        `accumulate` by one. With it, a mean loss over the batch's first ``valid_rows`` rows is
        weighed so that the gradient, averaged over the ranks as DDP does, is that of the mean over
        all real rows of the window: a short or padded last window equals the big batch.

        Args:
            loss: A scalar.
            valid_rows: Rows that the loss is the mean of: ``loader.valid_rows``. With 0 the loss
                counts for nothing; it is to be finite all the same.
            options: Passed on to ``Tensor.backward``.

        Raises:
            PlanError: If ``valid_rows`` is given outside of `accumulate`, or its loader does not
                know the rows of a step.
        """
        found = self._current()
        for optimizer in self._optimizers:
            if found is None:
                optimizer.window = None  # of a batch that is gone
            optimizer.before_backward()
        share = _share(found, valid_rows)
        if share != 1:
            loss = loss * share
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward(**options)

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
    ) -> torch.Tensor:
        """Clip gradients by their total norm, after dividing them by the scale.

        On a micro-batch that does not close its window nothing is changed: more is to be added.

        Args:
            parameters: As for `torch.nn.utils.clip_grad_norm_`.
            max_norm: The largest norm that is left as it is.
            norm_type: The p of the norm.

        Returns:
            The total norm before clipping.
        """
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        clipped = {id(parameter) for parameter in given}
        for optimizer in self._optimizers:
            held = (each for group in optimizer.param_groups for each in group["params"])
            if any(id(parameter) in clipped for parameter in held):
                optimizer.unscale_gradients()
        found = self._current()
        if found is not None and not found.window.closes:
            gradients = [each.grad for each in given if each.grad is not None]
            return torch.nn.utils.get_total_norm(gradients, norm_type)
        return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type)

    def gather(self, data: Any) -> Any:
        """Give every rank the data of all ranks; see `shardplug.gather`.

        Collective: every rank must call it.
        """
        return gather(data, comm=self._ranks())

    def gather_for_metrics(self, data: Any, loader: PreparedLoader | None = None) -> Any:
        """Give every rank what all made of the real rows of a step; see the function of that name.

        Collective: every rank must call it, in every step.

        Args:
            data: What this rank made of the batch that is out.
            loader: Where the batch is from; None: the loader of the innermost pass under way.

        Raises:
            PlanError: If no pass is under way, or ranks may take different numbers of steps.
        """
        if loader is None:
            found = find_micro_batch(self._loaders, 1)
            if found is None:
                raise PlanError(
                    "`gather_for_metrics` must be called in the loop over a prepared loader, got "
                    "no pass under way. Pass loader=..."
                )
            loader = found.loader
        return gather_for_metrics(data, loader, comm=self._ranks())

    # -- its state -----------------------------------------------------------------------------

    def state_dict(self, at: str = "now") -> dict[str, Any]:
        """Tell where all loaders stand, and whether an accumulation window is open.

        Nothing but numbers and strings, which JSON, ``torch.save`` and
        ``torch.distributed.checkpoint`` take; equal on all ranks where data is looked up by index
        or every rank reads it. Weights and optimizers are the caller's to save.

        Not collective.

        Args:
            at: "now", or "optimizer_step": where the last window ended, so that gradients that are
                gathered but not stepped with are made again. A step that the scaler skipped ends
                its window too: its data has had its turn.

        Returns:
            "loaders", in the order of preparing, "accumulation", and "version".

        Raises:
            PlanError: If ``at`` is neither of these, or "optimizer_step" without an optimizer.
        """
        if at not in ("now", "optimizer_step"):
            raise PlanError(f'`at` must be "now" or "optimizer_step", got {at!r}.')
        if at == "optimizer_step" and not self._optimizers:
            raise PlanError(
                '`at` must be "now" without a prepared optimizer, got "optimizer_step". '
                "Prepare the optimizer with this engine."
            )
        training = self._accumulating()
        back, window = 0, OpenWindow()
        if training is not None and training.has_pass:
            back, window = self._open_window(training, is_at_step=at == "optimizer_step")
        elif training is not None and at == "now":
            window = training.open_window
        place = None
        if window.micro_batches:
            place = next(at for at, own in enumerate(self._loaders) if own is training)
        open_ = AccumulationState(self.gradient_accumulation_steps, place, window)
        states = [
            own.state_at(own.step + 1 - back) if own is training and back else own.state_dict()
            for own in self._loaders
        ]
        return engine_state(states, open_)

    def _open_window(self, training: PreparedLoader, *, is_at_step: bool) -> tuple[int, OpenWindow]:
        """Say how many steps back the position is, and which window is open there."""
        window = window_of(training, self.gradient_accumulation_steps)
        if is_at_step:
            has_stepped = any(own.closed_at > training.handed_out for own in self._optimizers)
            return 0 if has_stepped else window.index + 1, OpenWindow()
        if window.closes:
            return 0, OpenWindow()
        consumed = training.consumed_before(training.step - window.index)
        return 0, OpenWindow(window.index + 1, consumed)

    def _accumulating(self) -> PreparedLoader | None:
        """Find the loader whose batches are accumulated: that of the latest window, if it is on."""
        if self._micro_batch is not None and self._micro_batch.loader.has_pass:
            return self._micro_batch.loader
        found = find_micro_batch(self._loaders, self.gradient_accumulation_steps)
        if found is not None:
            return found.loader
        return next((own for own in self._loaders if own.open_window.micro_batches), None)

    def gather_rank_states(self) -> dict[str, Any]:
        """Gather what every rank has of its own: its generators, and states of sources.

        To be saved beside `state_dict`. Strings inside, the same on every rank.

        Collective: every rank must call it.

        Raises:
            StateError: If a data set's ``state_dict()`` returns what cannot be loaded safely.
        """
        sources = [own.rank_state() for own in self._loaders]
        return gather_rank_states(sources, self._ranks())

    def load_state_dict(
        self, state: Mapping[str, Any], rank_states: Mapping[str, Any] | None = None
    ) -> None:
        """Go on from a state, on this or another number of ranks.

        Not collective, but every rank must load the same state.

        Args:
            state: From `state_dict`, of an engine with the same loaders in the same order.
            rank_states: From `gather_rank_states`; generators are restored from it on the same
                number of ranks, else left alone, which is logged.

        Raises:
            StateError: If it does not fit; nothing is changed then.
        """
        loaders = self._loaders
        states, open_ = read_engine_state(
            state, num_loaders=len(loaders), steps=self.gradient_accumulation_steps
        )
        own_state = RankState(None, [()] * len(loaders))
        if rank_states is not None:
            own_state = read_rank_state(rank_states, self._ranks(), num_loaders=len(loaders))
        starts = [
            loader.read_state(given, own)
            for loader, given, own in zip(loaders, states, own_state.sources, strict=True)
        ]
        if own_state.rng is not None:
            restore_process(own_state.rng)  # first, since it may refuse
        for place, (own, (start, seed)) in enumerate(zip(loaders, starts, strict=True)):
            own.go_to(start, seed, open_.window if place == open_.loader else None)

    def _check(self, given: Any, place: int, objects: Sequence[Any]) -> None:
        if isinstance(given, (DataLoader, torch.nn.Module)):
            return
        is_optimizer = isinstance(given, torch.optim.Optimizer)
        if isinstance(given, type) or not (is_optimizer or isinstance(given, _Schedule)):
            name = f"the class {given.__name__}" if isinstance(given, type) else _kind_of(given)
            raise PlanError(
                "`objects` must be DataLoaders, optimizers, schedules or modules, got "
                f"{name} as number {place}."
            )
        known = [own.optimizer for own in self._optimizers]
        prepared = [*known, *(own.scheduler for own in self._schedulers), *objects[: place - 1]]
        if isinstance(given, (ScalerAwareOptimizer, StepSyncedScheduler)) or any(
            given is each for each in prepared
        ):
            what = "optimizers" if is_optimizer else "schedules"
            raise PlanError(
                f"`objects` must hold {what} that are not prepared yet, got {_kind_of(given)} as "
                f"number {place}, which has been. Give each once, and use what prepare() returned."
            )
        if is_optimizer:
            return
        optimizer = getattr(given, "optimizer", None)
        if not any(optimizer is each for each in (*objects, *self._optimizers, *known)):
            raise PlanError(
                f"`objects` must hold schedules of prepared optimizers, got {_kind_of(given)} as "
                f"number {place}, whose optimizer is not. Prepare the optimizer in the same call, "
                "or before."
            )

    def _wrap_optimizer(self, optimizer: torch.optim.Optimizer) -> ScalerAwareOptimizer:
        wrapper = ScalerAwareOptimizer(optimizer, scaler=self.scaler)
        self._optimizers.append(wrapper)
        return wrapper

    def _prepare_one(self, given: Any) -> Any:
        if isinstance(given, torch.nn.Module):
            return given
        if isinstance(given, DataLoader):
            return self.prepare_loader(given)
        of = given.optimizer
        wrapper = next(own for own in self._optimizers if of is own or of is own.optimizer)
        scheduler = StepSyncedScheduler(
            given,
            wrapper,
            split_batches=self._split_batches,
            num_processes=self._shard.count,
            unit=self._scheduler_unit,
        )
        self._schedulers.append(scheduler)
        return scheduler


def _kind_of(given: object) -> str:
    return type(given).__name__


def _share(found: MicroBatch | None, valid_rows: int | None) -> float:
    if valid_rows is None:
        return 1.0 if found is None else found.share
    if found is None:
        raise PlanError(
            f"`valid_rows` must come with a window, got {valid_rows!r} outside of accumulate(). "
            "Call backward() within it."
        )
    return found.share_of(valid_rows)
