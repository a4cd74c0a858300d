"""What sharding adds to a strategy of Lightning's, whichever it is."""

from __future__ import annotations

import copy
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from shardplug import (
    Comm,
    DataLoaderDispatcher,
    PlanError,
    Tail,
    current_comm,
    prepare_data_loader,
    ready_batches,
)
from shardplug_lightning.internals import (
    is_globally_seeded,
    is_sharded_by_user,
    keep_loaders,
    record_indices,
    told_indices,
)
from shardplug_lightning.monitor import is_monitored
from shardplug_lightning.options import ShardOptions, check_keywords
from shardplug_lightning.parts import Parts, load_part, remove_part, save_part
from shardplug_lightning.positions import KEY, Place, TrainingBook, without_own
from shardplug_lightning.schedules import RealSteps
from shardplug_lightning.views import LoaderView, view_of

TrainingTail = Literal["pad", "drop", "exact"]
EvaluationTail = Literal["exact", "pad", "drop", "uneven"]
SyncOrder = Literal["agree", "broadcast"]
WorkerSplit = Literal["auto", "shardplug", "dataset"]

_NO_LENGTH = -1


class ShardStrategyMixin(Strategy):
    """Sharding for a strategy of Lightning's: put it first, before the class that trains.

    Training loaders are padded so that all ranks take the same number of steps, and shuffled anew
    in each epoch; validation, test and prediction see each sample exactly once. Loaders are cloned
    with their own samplers and batch samplers, never rebuilt, so any class of them will do.
    Lightning moves the batches to the device and counts the epochs.

    What is no DataLoader but can be iterated yields batches that are ready: whole ones are dealt to
    ranks, and evaluation may then give some ranks one less. A list or dict is one of loaders, as
    everywhere in Lightning.

    Training goes on from a checkpoint, in the middle of an epoch too, as if it had not stopped:
    what was due when it was saved, as a validation or a step of a plateau schedule, is done first.
    Metrics of training that are made at the end of an epoch are of what is left of it. Where
    ranks have states of their own, as streams that divide themselves, each but the first saves them
    beside the checkpoint, in files named as it and ``.rank-00001`` and so on, which belong to it.

    ``Trainer(use_distributed_sampler=False)`` is respected: loaders then stay as they are.

    Args:
        split_batches: False: each rank trains on whole batches, every n-th. True: each training
            batch is cut and each rank gets its piece.
        even_batches: False: nothing is repeated in training, which is an error where ranks would
            then take different numbers of steps.
        tail: "pad", "drop" or "exact" says outright what happens at the end of a training epoch,
            and wins over ``even_batches`` and the loader's ``drop_last``.
        evaluation_tail: The same for validation, test and prediction; also "uneven", which repeats
            and drops nothing but lets ranks differ by a step, so that no step may wait for others.
            Batches that are ready cannot be cut, so "exact" does the same with them, unless ranks
            wait for each other in every step anyway.
        use_seedable_sampler: Chooses the seed of the order, where the loader has no generator of
            its own. True: rank 0's ``torch.initial_seed()``, the seed of ``seed_everything``;
            False: one draw of rank 0's torch RNG. None: True if ``seed_everything`` was called.
        data_seed: The seed of the order, whatever else is seeded.
        rng_types: Generators made equal to rank 0's at the start of each pass.
        dispatch_batches: True: rank 0 reads and each rank receives its rows. False: every rank
            reads its own part. None: True for streams.
        slice_fn_for_dispatch: Cuts each rank's rows out of a round that is dispatched; for loaders
            that are not it has no effect.
        use_stateful_dataloader: Read through torchdata's StatefulDataLoader.
        already_sharded: True: every loader yields this rank's part, and is not cut again. None:
            found out where that can be seen. For some loaders only, give those prepared by
            `prepare_data_loader`.
        sync_order: How ranks come to one order where it is no function of (seed, epoch).
        worker_split: Who divides a stream among workers.
        batches_per_message: Most batches that one message from a worker carries, at least 1.
        seed_samples: Whether to seed before each sample, by its position: what the data set draws
            is then the same on any number of ranks, and after a resume.
        strategy_options: For the class that trains.

    Raises:
        OptionError: If a keyword is unknown.
        PlanError: If a value is of a wrong kind.
    """

    _passed_on: ClassVar[frozenset[str]] = frozenset()
    """Keywords that are known to the class that trains, or to what it passes keywords on to."""
    _is_in_step: ClassVar[bool] = False
    """Whether every forward pass waits for all ranks, in evaluation too."""

    def __init__(
        self,
        *,
        split_batches: bool = False,
        even_batches: bool = True,
        tail: TrainingTail | None = None,
        evaluation_tail: EvaluationTail = "exact",
        use_seedable_sampler: bool | None = None,
        data_seed: int | None = None,
        rng_types: Sequence[str] | None = None,
        dispatch_batches: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
        use_stateful_dataloader: bool = False,
        already_sharded: bool | None = None,
        sync_order: SyncOrder = "agree",
        worker_split: WorkerSplit = "auto",
        batches_per_message: int = 1,
        seed_samples: bool = False,
        **strategy_options: Any,
    ) -> None:
        check_keywords(
            type(self).__name__,
            strategy_options,
            own=ShardOptions.names(),
            passed_on=self._passed_on,
        )
        self.shard_options = ShardOptions(
            split_batches=split_batches,
            even_batches=even_batches,
            tail=tail,
            evaluation_tail=evaluation_tail,
            use_seedable_sampler=use_seedable_sampler,
            data_seed=data_seed,
            rng_types=rng_types,
            dispatch_batches=dispatch_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_stateful_dataloader=use_stateful_dataloader,
            already_sharded=already_sharded,
            sync_order=sync_order,
            worker_split=worker_split,
            batches_per_message=batches_per_message,
            seed_samples=seed_samples,
        )
        if self._is_in_step and evaluation_tail == "uneven":
            raise PlanError(
                f"`evaluation_tail` must be 'exact', 'pad' or 'drop' for {type(self).__name__}, "
                "got 'uneven': its ranks wait for each other in every step."
            )
        self._book = TrainingBook()
        self._steps = RealSteps(None)
        self._token = 0
        super().__init__(**strategy_options)

    def connect(self, model: LightningModule) -> None:
        """Take the model, and from Lightning the preparing of loaders."""
        super().connect(model)
        if not is_sharded_by_user(model.trainer):
            keep_loaders(model.trainer)

    def process_dataloader(self, dataloader: object) -> object:
        """Make a loader of the user's read its shard.

        Collective: every rank must call it.

        Args:
            dataloader: One of the loaders of the stage that the trainer is in.

        Returns:
            What Lightning iterates instead.

        Raises:
            PlanError: If the loader cannot be divided as the stage needs it; on all ranks, before
                the loop starts.
        """
        model = self.lightning_module
        assert model is not None  # loaders are made for a model
        if not is_sharded_by_user(model.trainer):
            dataloader = self._shard(dataloader, model.trainer)
        return super().process_dataloader(dataloader)

    def _shard(self, dataloader: Any, trainer: Trainer) -> LoaderView:
        if isinstance(dataloader, LoaderView):
            dataloader = dataloader.source  # from a CombinedLoader that was used in another stage
        is_training = bool(trainer.training)
        try:
            loader = self._prepare(dataloader, is_training=is_training)
            lengths, token = _gather_lengths(loader, self._ranks())
            check_lengths(lengths, is_training=is_training)
        except PlanError as error:
            assert trainer.state.stage is not None
            stage = trainer.state.stage.dataloader_prefix
            chosen = "split_batches, even_batches and tail" if is_training else "evaluation_tail"
            if is_training and "uneven" in str(error):
                chosen += ", and cannot be uneven"
            raise PlanError(
                f"The {stage} loader cannot be sharded: {error} (In this stage "
                f"{type(self).__name__} goes by {chosen}.)"
            ) from error
        if loader is dataloader:
            loader = copy.copy(loader)  # one that the user has prepared, and keeps as it is
        if is_training:
            self._token = token
            self._book.open(trainer, loader)
        view = view_of(loader, dataloader, self._book if is_training else None)
        view.track.is_counting = is_training and is_monitored(trainer)
        if not is_training and loader.tail is Tail.UNEVEN and _NO_LENGTH in lengths:
            view.compare_ends()
        if trainer.predicting and loader.batch_sampler is not None:
            _record(view)
        return view

    def _prepare(self, dataloader: Any, *, is_training: bool) -> Any:
        options = self.shard_options
        if dataloader is not None and not isinstance(dataloader, DataLoader):
            dataloader = ready_batches(dataloader)
        chosen = options.for_core()
        chosen["split_batches"] &= is_training
        is_seedable = options.use_seedable_sampler
        if is_seedable is None:
            is_seedable = options.data_seed is not None or is_globally_seeded()
        return prepare_data_loader(
            dataloader,
            use_seedable_sampler=is_seedable,
            tail=options.tail if is_training else self._evaluation_tail(dataloader),
            torch_device_mesh=self._mesh(),
            comm=self._comm(),
            **chosen,
        )

    def _evaluation_tail(self, loader: DataLoader[Any] | None) -> str:
        """Choose the end of an evaluation: whole batches that are ready cannot be dealt evenly."""
        chosen = self.shard_options.evaluation_tail
        is_ready = loader is not None and loader.batch_size is None and loader.batch_sampler is None
        if is_ready and chosen == Tail.EXACT.value and not self._is_in_step:
            return Tail.UNEVEN.value
        return chosen

    def _mesh(self) -> Any:
        """Return the mesh whose model axes do not divide the data, if there is one."""
        return None

    def _comm(self) -> Comm | None:
        """Return the ranks; None: those of the process group."""
        return None

    def _ranks(self) -> Comm:
        return self._comm() or current_comm()

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the optimizers, and schedules that wait for their real steps.

        Args:
            trainer: The trainer.
        """
        super().setup_optimizers(trainer)
        self._steps = RealSteps(getattr(self.precision_plugin, "scaler", None))
        self._steps.guard(self.lr_scheduler_configs)

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Step, and note whether the gradient scaler did not skip the step.

        Args:
            optimizer: The optimizer.
            closure: Makes the gradients.
            model: What is trained.
            kwargs: For the precision plug-in.

        Returns:
            What the step returns.
        """
        with self._steps.watch(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def on_train_start(self) -> None:
        """Go on where a checkpoint was saved."""
        super().on_train_start()
        self._book.go_on(self._trainer)

    def on_train_end(self) -> None:
        """Keep what a checkpoint that is saved after training has to hold."""
        super().on_train_end()
        self._book.close()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Note where the loaders stand.

        Args:
            batch: The batch.
            batch_idx: Its number in the epoch.
        """
        super().on_train_batch_start(batch, batch_idx)
        self._book.mark(batch_idx)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save a checkpoint, and in it where the training loaders stand.

        Not collective by itself: what a rank has of its own it saves alone, beside the checkpoint.

        Args:
            checkpoint: What Lightning has put together.
            filepath: Where to.
            storage_options: For the checkpoint plug-in.
        """
        place = self._book.write(self._trainer, checkpoint)
        if place is not None:
            self._save_part(place, checkpoint, filepath, storage_options)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _save_part(
        self, place: Place, checkpoint: dict[str, Any], filepath: Any, storage_options: Any
    ) -> None:
        comm, step = self._ranks(), checkpoint["global_step"]
        moment = f"{self._token:x}-{place.epoch}-{place.batches}-{step}"
        parts = Parts(comm.world_size, moment, os.path.basename(filepath))
        checkpoint[KEY]["parts"] = parts.as_dict()
        if comm.rank:
            save_part(
                self.checkpoint_io,
                filepath,
                rank=comm.rank,
                moment=moment,
                own=place.own,
                storage_options=storage_options,
            )

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, and what belongs to it.

        Args:
            filepath: Where it is.
        """
        super().remove_checkpoint(filepath)
        comm = self._ranks()
        if comm.rank and self._book.differs_by_rank:
            remove_part(self.checkpoint_io, filepath, rank=comm.rank)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint; training goes on where its loaders stood.

        Args:
            checkpoint_path: Where it is.
            weights_only: Whether to load nothing that could run code.

        Returns:
            What was saved.

        Raises:
            StateError: If the positions in it cannot be read, or what some rank had of its own is
                missing or of another moment; the latter on all ranks.
        """
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        trainer = self._trainer
        if trainer.state.fn == TrainerFn.FITTING and not is_sharded_by_user(trainer):
            self._book.read(checkpoint)
            if self._book.place is not None and "parts" in checkpoint[KEY]:
                self._load_part(self._book.place, checkpoint, checkpoint_path, weights_only)
        return checkpoint

    def _load_part(
        self, place: Place, checkpoint: dict[str, Any], path: Any, weights_only: bool | None
    ) -> None:
        """Take this rank's own part of a place.

        Collective: every rank must call it.
        """
        parts, comm = Parts.read(checkpoint[KEY]["parts"]), self._ranks()
        if parts.world_size != comm.world_size:
            self._book.place = without_own(place, parts, comm.world_size)
            return
        own = load_part(
            self.checkpoint_io,
            path,
            parts,
            comm,
            num_loaders=len(place.loaders),
            weights_only=weights_only,
        )
        if own is not None:
            self._book.place = replace(place, own=own)

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None  # there is a run, so there is a model
        return self.lightning_module.trainer

    def reduce(
        self,
        tensor: torch.Tensor | Any,
        group: Any | None = None,
        reduce_op: Any = "mean",
    ) -> torch.Tensor | Any:
        """Reduce a tensor over the ranks; the mean of integers is not cut off to an integer.

        Lightning takes the mean of the ranks' sample counts to weigh what they log. Ranks that have
        different numbers of samples, as they do where none is repeated, need its fraction.

        Collective: every rank must call it.

        Args:
            tensor: What this rank has.
            group: The ranks; None: all.
            reduce_op: "mean", "avg", "sum", ... or a ReduceOp.

        Returns:
            What all ranks together have, on every rank.
        """
        if (
            isinstance(tensor, torch.Tensor)
            and takes_mean(reduce_op)
            and not _has_fractions(tensor)
        ):
            tensor = tensor.to(torch.float64)
        # Abstract here; the class that trains, which comes next, has it.
        return super().reduce(tensor, group, reduce_op)  # type: ignore[safe-super]


def takes_mean(reduce_op: Any) -> bool:
    """Tell whether an operation that reduces over ranks takes the mean."""
    if isinstance(reduce_op, str):
        return reduce_op.lower() in ("mean", "avg")
    return getattr(reduce_op, "name", None) == "AVG"


def _has_fractions(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _record(view: LoaderView) -> None:
    """Let Lightning find from which samples each batch of a loader is."""
    if not isinstance(view, DataLoaderDispatcher):
        view.wrap_batch_sampler(record_indices)
        return
    view.tell_indices()
    wrapped, told = told_indices(view.batch_sampler)
    view.wrap_batch_sampler(lambda _: wrapped)
    view.tell(told)


def _gather_lengths(loader: Any, comm: Comm) -> tuple[list[int], int]:
    """Collect the number of steps of each rank, `_NO_LENGTH` where it is not known.

    Collective: every rank must call it.

    Returns:
        The numbers; and a random one, the same on all ranks.
    """
    try:
        length = len(loader)
    except TypeError:
        length = _NO_LENGTH
    by_rank = comm.all_gather_ints([length, secrets.randbits(62)])
    return [length for length, _ in by_rank], by_rank[0][1]


def check_lengths(by_rank: Sequence[int], *, is_training: bool) -> None:
    """Refuse what would hang: Lightning itself never compares the lengths of ranks.

    Raises:
        PlanError: If only some ranks know their length, ranks would train for different numbers of
            steps, or some but not all would have nothing to evaluate.
    """
    if len(set(by_rank)) == 1:
        return
    told = ", ".join(
        f"{'unknown' if steps == _NO_LENGTH else steps} on rank {rank}"
        for rank, steps in enumerate(by_rank)
    )
    if _NO_LENGTH in by_rank:
        raise PlanError(f"`dataloader` must have a length on every rank or on none, got {told}.")
    if is_training:
        raise PlanError(
            f"`dataloader` must take the same number of steps on every rank to train, got {told}. "
            'Use tail="pad", tail="drop" or tail="exact".'
        )
    if 0 in by_rank:
        raise PlanError(
            f"`dataloader` must have a batch for every rank, got {told} steps. Use "
            'evaluation_tail="exact", a smaller batch size, or fewer ranks.'
        )
