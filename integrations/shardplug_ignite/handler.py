"""`ShardHandler`: an engine that it is attached to reads its shard of whatever it is given.

It works by the engine's events alone; what it does at each of them is in `Attachment`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, final
from weakref import WeakKeyDictionary

import torch
from ignite.engine import DeterministicEngine, Engine, Events
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader

from shardplug import (
    Comm,
    DataLoaderDispatcher,
    DataLoaderShard,
    PlanError,
    ShardEngine,
    ShardPlan,
    StateError,
    Tail,
    check_options,
    current_comm,
    ready_batches,
)
from shardplug_ignite.attachment import Attachment, Prepared
from shardplug_ignite.lengths import Loader
from shardplug_ignite.options import check_agree_stop, real_steps
from shardplug_ignite.ordering import is_running
from shardplug_ignite.positions import SavedRun, read_state
from shardplug_ignite.progress import ShardProgress
from shardplug_ignite.stops import Stops

_NOTHING = SavedRun(None, 0, 0, 0, None, False, 1, None, None, 0, True, 0, None)


@final
class ShardHandler:
    """Sharding for Ignite engines: attaching is all it takes.

    When a run starts, the data that the engine was given is replaced by a loader that reads this
    rank's shard of it; ``engine.run(loader)`` stays as it is. A DataLoader is cloned; one that was
    prepared before stays as it is; the items of any other iterable are taken for batches that are
    ready, and dealt out. One handler serves any number of engines and loaders of one kind; a
    DataLoader is prepared once and kept for as long as the user keeps it, workers included.

    ``mode`` says what the engines are for:

    * ``"train"``: all ranks take the same number of full steps, padded from the start of the
      epoch's order (``tail`` and the loader's ``drop_last`` say otherwise). Each pass over a loader
      is its next epoch, in a run of another epoch length and in a new run as well.
    * ``"eval"``: every sample counts once, whatever the loader's ``drop_last``. All ranks take the
      same number of steps (``tail="exact"``); where that cannot be, for want of samples, with one
      row per step, or where batch samplers of the user's own make the batches, ranks may differ by
      a step, or have none (``tail="uneven"``). Every run starts at epoch 0, so that evaluations
      compare.

    All ranks stop together, whichever of them asks for it; see ``agree_stop``. An exception on one
    rank ends the run there; ranks that wait for that one get an error when its process ends.

    The engine's ``epoch_length`` becomes that of the shard, unless the user gave another one than
    the loader's length (which need not be given; beside a loaded state of the trainer, Ignite
    itself refuses it, as that holds the shard's). A length that was worked out or found in one run
    is not carried over to the next.

    To resume, have Ignite's ``Checkpoint`` save the handler beside the trainer, the model and the
    optimizer, one handler for each trainer. Its state says where the data stood when the last
    iteration was completed, or, if the optimizer is known, when it last stepped: gradients that
    were gathered and not stepped with are made again. So it may be saved at any event, after an
    exception too, and loaded on any number of ranks; the engine's counts are fitted to the epochs
    that there are now. An engine whose own state alone was loaded goes on by its count of
    iterations. Where `attach` is told a ``snapshot``, random generators go on as well.

    ``engine.state.shard`` tells where a run stands: see `ShardProgress`.

    Collective: making one with a ``loader`` is, and so is the start of each run of an engine that
    it is attached to, and the end of each iteration that all ranks have. Under torchrun, making one
    starts the process group if nobody has; call ``idist.initialize``, or enter ``idist.Parallel``,
    before that.

    Args:
        loader: Prepared at once, so that `loader` and its length are known before a run. None:
            loaders are prepared when an engine is given them.
        optimizer: What the trainer steps, so that real steps are known: those that a scaler did not
            skip, at the end of a window of accumulation. A step that was skipped ends its window as
            well, which is known of a `ScalerAwareOptimizer`, by ``scaler``, or by
            ``gradient_accumulation_steps``; else its batch is trained on again after a resume.
        lr_scheduler: One of torch's, ticked at the end of an iteration for each real step. Attach
            Ignite's own to `step_event`.
        mode: "train" or "eval".
        gradient_accumulation_steps: Iterations of a window, where those that are a multiple of it
            end one, as in Ignite's trainers. None: a window ends when the optimizer steps, or, if
            that is not known, with each iteration.
        scheduler_unit: What ``lr_scheduler`` counts: "updates", real optimizer steps, or "batches"
            of the loader as it was given: a real step then ticks once for each of those that all
            ranks took in its window, and not beyond the schedule's ``total_steps``.
        scaler: The GradScaler by which the trainer steps. None: that of Ignite's
            ``create_supervised_trainer(scaler=True)`` is found; an instance that was given to it
            is to be given here, too.
        agree_stop: Whether all ranks stop (terminate, terminate_epoch, interrupt) at the end of the
            same iteration where one is asked to. What all are asked for together is done at once.
            What only some are asked for is done at the end of the following iteration, or at once
            in the last one of an epoch; where ranks do not wait for each other in each iteration,
            as they do with DDP, at the end of the first that none has completed. It costs no
            message until a rank is asked, and needs connections to rank 0; see
            `shardplug.SyncPoint`. Ask in an event handler or in the step, not from a signal handler
            or another thread: between two events Ignite itself looks whether it is to stop.
            False: only if all ranks always ask for it together. Where ranks evaluate different
            numbers of batches, what is asked for in those that not all have is done at the end of
            the epoch.
        split_batches: False: each rank gets whole batches, every n-th. True: each batch is cut and
            each rank gets its piece.
        even_batches: False: nothing is repeated and ranks may differ by a step, which is an error
            in training where they do.
        tail: "pad", "drop", "uneven" or "exact" says outright what happens at the end of an epoch.
        dispatch_batches: True: rank 0 reads and every rank receives its rows. False: every rank
            reads. None: True for streams that are not known to be cut already.
        slice_fn_for_dispatch: Cuts each shard's rows out of a round; see `prepare_data_loader`.
        rng_types: Generators made equal to rank 0's at the start of each pass.
        use_seedable_sampler: Chooses where the seed of the order comes from.
        data_seed: The seed of the order.
        put_on_device: Whether batches are moved before the engine gets them.
        device: Where they are moved; None: the device of this process.
        non_blocking: Whether moves to the device may overlap with what comes after.
        use_stateful_dataloader: Read through torchdata's StatefulDataLoader.
        torch_device_mesh: Ranks that differ only in its model axes read the same batches.
        data_axes: The mesh axes that divide the data, where their names do not tell.
        already_sharded: True: loaders yield this rank's part, and are not cut again. None: found
            out where that can be seen.
        sync_order: For samplers whose order is not a function of (seed, epoch): "agree" compares
            the ranks' orders at each pass, "broadcast" sends rank 0's.
        worker_split: Who divides a stream among workers: "shardplug", "dataset", or "auto".
        batches_per_message: Most batches that one message from a worker carries, at least 1.
        seed_samples: Whether to seed before each sample, by its position.
        comm: The ranks; None: those of this process.

    There is no ``num_processes`` or ``process_index``: the ranks of the run are the shards. A
    loader that was prepared with them is taken as it is.

    Raises:
        PlanError: If an argument does not fit.
        CommError: If ranks were given different loaders, or another rank failed.

    Example:
        >>> import torch
        >>> from ignite.engine import Engine
        >>> from torch.utils.data import DataLoader
        >>> evaluator = Engine(lambda engine, batch: batch.sum().item())
        >>> ShardHandler(mode="eval").attach(evaluator)
        >>> evaluator.run(DataLoader(torch.arange(10), batch_size=4)).output
        17
    """

    def __init__(
        self,
        loader: Any = None,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: Any = None,
        *,
        mode: Literal["train", "eval"] = "train",
        gradient_accumulation_steps: int | None = None,
        scheduler_unit: Literal["updates", "batches"] = "updates",
        scaler: GradScaler | None = None,
        agree_stop: bool = True,
        split_batches: bool = False,
        even_batches: bool = True,
        tail: Literal["pad", "drop", "uneven", "exact"] | None = None,
        dispatch_batches: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
        rng_types: Sequence[str] | None = ("generator",),
        use_seedable_sampler: bool = True,
        data_seed: int | None = None,
        put_on_device: bool = True,
        device: torch.device | str | int | None = None,
        non_blocking: bool = False,
        use_stateful_dataloader: bool = False,
        torch_device_mesh: Any = None,
        data_axes: Sequence[str] | None = None,
        already_sharded: bool | None = None,
        sync_order: Literal["agree", "broadcast"] = "agree",
        worker_split: Literal["auto", "shardplug", "dataset"] = "auto",
        batches_per_message: int = 1,
        seed_samples: bool = False,
        comm: Comm | None = None,
    ) -> None:
        kept = check_options(
            put_on_device=put_on_device, device=device, already_sharded=already_sharded
        )
        if mode not in ("train", "eval"):
            raise PlanError(f"`mode` must be 'train' or 'eval', got {mode!r}.")
        self._is_eval = mode == "eval"
        # Where an evaluation is not told how to end, the loader's numbers decide.
        self._prefers_exact = self._is_eval and even_batches and tail is None
        self._comm = comm
        self._agrees = check_agree_stop(agree_stop)
        self._engine_options: dict[str, Any] = {
            "split_batches": split_batches,
            "even_batches": even_batches,
            "tail": Tail.UNEVEN.value if self._is_eval and tail is None else tail,
            "rng_types": rng_types,
            "use_seedable_sampler": use_seedable_sampler,
            "data_seed": data_seed,
            "non_blocking": non_blocking,
            "use_stateful_dataloader": use_stateful_dataloader,
            "seed_samples": seed_samples,
            "dispatch_batches": dispatch_batches,
            "slice_fn_for_dispatch": slice_fn_for_dispatch,
            "sync_order": sync_order,
            "worker_split": worker_split,
            "batches_per_message": batches_per_message,
            "gradient_accumulation_steps": (
                1 if gradient_accumulation_steps is None else gradient_accumulation_steps
            ),
            "scheduler_unit": scheduler_unit,
            "torch_device_mesh": torch_device_mesh,
            "data_axes": data_axes,
            "comm": comm,
        }
        self._options = kept
        self._shards = ShardEngine(**self._engine_options)  # raises where one does not fit
        is_window_known = gradient_accumulation_steps is not None
        self._window = self._shards.gradient_accumulation_steps if is_window_known else None
        ticks = None
        if scheduler_unit == "batches":
            ticks = 1 if split_batches else self._shards.shard.count
        self._steps = real_steps(
            optimizer, lr_scheduler, scaler, ticks_per_batch=ticks, is_eval=self._is_eval
        )
        self._prepared: WeakKeyDictionary[DataLoader[Any], Prepared] = WeakKeyDictionary()
        # What is no DataLoader cannot be watched: the latest is kept.
        self._latest: tuple[Any, Prepared] | None = None
        self._attachments: WeakKeyDictionary[Engine, Attachment] = WeakKeyDictionary()
        # Where engines stood that were detached, in the order in which they were.
        self._left: WeakKeyDictionary[Engine, SavedRun] = WeakKeyDictionary()
        self._saved: SavedRun | None = None
        self._loader = None if loader is None else self.prepared(loader).loader

    @property
    def loader(self) -> Loader:
        """The prepared loader: of the last run that started, at first that of the one given.

        Raises:
            PlanError: If there is none yet.
        """
        if self._loader is None:
            raise PlanError(
                "`loader` must be given to the handler, or to an engine in run(), before the "
                "prepared one can be read; got neither."
            )
        return self._loader

    @property
    def step_event(self) -> Any:
        """The event of an iteration that is the first, or that follows on a real optimizer step.

        Ignite's own schedulers attach to it, and so give the k-th step their k-th value:
        ``PiecewiseLinear(optimizer, "lr", milestones).attach(trainer, handler.step_event)``.

        Raises:
            PlanError: If the handler does not know the optimizer.
        """
        if self._steps is None:
            raise PlanError(
                "`optimizer` must be given to the handler for steps to be known, got none. "
                "Pass optimizer=..."
            )
        return Events.ITERATION_STARTED(event_filter=self._is_tick)

    def attach(self, engine: Engine, snapshot: Any = None) -> None:
        """Have an engine read its shard of all data that it is given from now on.

        Args:
            engine: A trainer or an evaluator.
            snapshot: An event, such as that of the ``Checkpoint``, at which ranks tell each other
                the states of their random generators (and of data sets that keep their own), so
                that what is saved then has them; they are given back on the same number of ranks.
                Collective: all ranks come to the event together.

        Raises:
            PlanError: If it is not an engine, one that rebuilds its loaders, one that is running,
                or attached already.
        """
        if not isinstance(engine, Engine):
            raise PlanError(
                f"`engine` must be an ignite.engine.Engine, got {type(engine).__name__}."
            )
        if isinstance(engine, DeterministicEngine):
            raise PlanError(
                "`engine` must be an Engine that iterates the loader it is given, got a "
                "DeterministicEngine, which rebuilds it. Use Engine: the order of the data follows "
                "(seed, epoch) in any case."
            )
        if self.is_attached(engine):
            raise PlanError(
                "`engine` must not have this handler yet, got one that does. Call detach() first."
            )
        if is_running(engine):
            raise PlanError(
                "`engine` must not be running, got one whose run is under way or interrupted. "
                "Attach the handler before run()."
            )
        if self._is_eval and snapshot is not None:
            raise PlanError(
                "`snapshot` must be left out with mode='eval', got one: evaluations are not "
                "resumed."
            )
        ranks = self.ranks()
        is_alone = ranks.world_size == 1 or not self._agrees
        attachment = Attachment(
            self,
            is_eval=self._is_eval,
            steps=self._steps,
            window=self._window,
            stops=None if is_alone else Stops(ranks),
        )
        attachment.attach(engine, snapshot)
        self._attachments[engine] = attachment
        state: Any = engine.state
        state.shard = ShardProgress(attachment)
        if self._steps is not None:
            self._steps.listen(getattr(state, "scaler", None))

    def detach(self, engine: Engine) -> None:
        """Let an engine read what it is given, from its next run on; nothing if not attached.

        The state stays that of the moment, until a run starts with the handler again.

        Args:
            engine: A trainer or an evaluator.
        """
        attachment = self._attachments.pop(engine, None)
        if attachment is None:
            return
        if attachment.has_begun and not self._is_eval:
            self._left.pop(engine, None)  # so that it comes last
            self._left[engine] = attachment.run(engine)
        attachment.detach(engine)
        state: Any = engine.state
        if getattr(state, "shard", None) == ShardProgress(attachment):
            del state.shard
        if self._steps is not None and not self._attachments:
            self._steps.leave()

    def is_attached(self, engine: Engine) -> bool:
        """Tell whether the handler is attached to an engine.

        Args:
            engine: A trainer or an evaluator.
        """
        return engine in self._attachments

    # -- its state ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Tell where the trainer that it is attached to could go on from.

        Numbers, strings and None in dictionaries and lists, the same on all ranks where data is
        looked up by index or every rank reads it. It is that of the last iteration that was
        completed, or of the last window.

        Not collective.

        Raises:
            StateError: If it is attached to several trainers.
        """
        if self._saved is not None:
            return self._saved.as_dict()
        found = self._trainer()
        if found is None:
            return next(reversed(list(self._left.values())), _NOTHING).as_dict()
        engine, attachment = found
        left = None if attachment.has_begun else self._left.get(engine)
        return (attachment.run(engine) if left is None else left).as_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next run that starts go on from a state, on this or another number of ranks.

        Not collective, but every rank must load the same state. That it fits the data is found out
        when the run starts.

        Args:
            state_dict: From `state_dict`.

        Raises:
            StateError: If it is damaged or of another version; if the trainer is interrupted, or
                there are several.
        """
        saved = read_state(state_dict)
        found = self._trainer()
        if found is not None:
            _leave_ended_run(found[0])
        self._saved = None if saved.is_start else saved

    def _trainer(self) -> tuple[Engine, Attachment] | None:
        """Find the engine that is resumed: there can be but one."""
        if self._is_eval:
            return None
        found = list(self._attachments.items())
        if len(found) > 1:
            raise StateError(
                f"`state_dict` must be that of one trainer, got a handler attached to {len(found)}."
                " Give each trainer a handler of its own."
            )
        return found[0] if found else None

    # -- what its attachments ask ------------------------------------------------------------

    def ranks(self) -> Comm:
        """Return the ranks of the run."""
        return current_comm() if self._comm is None else self._comm

    def saved(self) -> SavedRun | None:
        """Return what a run that starts is to go on from."""
        return self._saved

    def has_resumed(self) -> None:
        """Be told that a run goes on from that."""
        self._saved = None

    def prepared(self, data: Any) -> Prepared:
        """Prepare data that is seen for the first time.

        Collective: every rank must call it.

        Args:
            data: A DataLoader, or any iterable of batches that are ready.
        """
        if isinstance(data, (DataLoaderShard, DataLoaderDispatcher)):
            found: Prepared | None = Prepared(data, self._shards)
        elif isinstance(data, DataLoader):
            found = self._prepared.get(data)
        else:
            found = self._latest[1] if self._latest and self._latest[0] is data else None
        if found is None:
            found = self._prepare(data if isinstance(data, DataLoader) else ready_batches(data))
            if isinstance(data, DataLoader):
                self._prepared[data] = found
            else:
                self._latest = data, found
        elif self._latest is not None and found.loader is data is self._latest[1].loader:
            found = self._latest[1]
        self._loader = found.loader
        return found

    def _prepare(self, loader: DataLoader[Any]) -> Prepared:
        # An engine of the core for each, so that none outlives its loader in a list of all.
        shards = ShardEngine(**self._engine_options)
        prepared: Any = shards.prepare_loader(loader, **self._options)
        if self._prefers_exact and _can_be_exact(prepared.plan):
            shards = ShardEngine(**self._engine_options)
            prepared = shards.prepare_loader(loader, tail=Tail.EXACT.value, **self._options)
        return Prepared(prepared, shards)

    def _is_tick(self, engine: Engine, count: int) -> bool:  # Ignite's signature
        attachment = self._attachments.get(engine)
        return attachment is not None and attachment.is_tick(engine)


def _leave_ended_run(engine: Engine) -> None:
    """Let the next ``run`` of an engine start anew, though the last one ended in an exception.

    Raises:
        StateError: If the engine is interrupted, and will go on with the data it has at hand.
    """
    run: Any = engine._internal_run_generator  # noqa: SLF001  # Ignite does not tell otherwise
    if run is None or run.gi_running:  # what is loaded while it runs is for the run that follows
        return
    if run.gi_frame is not None:
        raise StateError(
            "`state_dict` must be loaded before a run or after its end, got an engine that is "
            "interrupted. Use a new engine, or let it run to its end."
        )
    engine._internal_run_generator = None  # noqa: SLF001  # dead: run() would return None once


def _can_be_exact(uneven: ShardPlan) -> bool:
    """Tell whether an end that may be uneven can surely be exact; alone, it is."""
    if uneven.num_samples is None or uneven.shard.count == 1:
        return False
    try:
        replace(uneven, tail=Tail.EXACT)
    except PlanError:
        return False
    return True
