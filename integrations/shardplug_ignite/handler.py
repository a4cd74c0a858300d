"""`ShardHandler`: an engine that it is attached to reads its shard of whatever loader it is given.

It works by the engine's events alone. Of Ignite it touches one thing that is not promised, the
order of the handlers of an event, as Ignite's own profilers do. It never listens to
EXCEPTION_RAISED: an engine with a handler there swallows the user's exception.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, final
from weakref import WeakKeyDictionary

import torch
from ignite.engine import DeterministicEngine, Engine, Events, State
from torch.utils.data import DataLoader

from shardplug import (
    Comm,
    DataLoaderShard,
    PlanError,
    ShardEngine,
    ShardPlan,
    Tail,
    current_comm,
)

_UNKNOWN = -1
"""Stands for a number of steps that only a pass will tell, in messages between ranks."""


@final
class ShardHandler:
    """Sharding for Ignite engines: attaching is all it takes.

    When a run starts, the DataLoader that the engine was given is replaced by a clone that reads
    this rank's shard; ``engine.run(loader)`` stays as it is. One handler serves any number of
    engines and loaders of one kind; a loader is prepared once and kept for as long as the user
    keeps it, workers included.

    ``mode`` says what the engines are for:

    * ``"train"``: all ranks take the same number of full steps, padded from the start of the
      epoch's order (``tail`` and the loader's ``drop_last`` say otherwise). Each pass over a loader
      is its next epoch, in a run of another epoch length and in a new run as well; an engine that
      resumes at a later epoch starts with the order of that epoch, from its first batch.
    * ``"eval"``: every sample counts once, whatever the loader's ``drop_last``. All ranks take the
      same number of steps (``tail="exact"``); where that cannot be, for want of samples, with one
      row per step, or where batch samplers of the user's own make the batches, ranks may differ by
      a step, or have none (``tail="uneven"``). Every run starts at epoch 0, so that evaluations
      compare.

    The engine's ``epoch_length`` becomes that of the shard, unless the user gave another one than
    the loader's length. A length that was worked out or found in one run is not carried over to the
    next.

    Collective: making one with a ``loader`` is, and so is the start of each run of an engine that
    it is attached to. Under torchrun, making one starts the process group if nobody has; call
    ``idist.initialize``, or enter ``idist.Parallel``, before that.

    Args:
        loader: Prepared at once, so that `loader` and its length are known before a run. None:
            loaders are prepared when an engine is given them.
        mode: "train" or "eval".
        split_batches: False: each rank gets whole batches, every n-th. True: each batch is cut and
            each rank gets its piece.
        even_batches: False: nothing is repeated and ranks may differ by a step, which is an error
            in training where they do.
        tail: "pad", "drop", "uneven" or "exact" says outright what happens at the end of an epoch.
        rng_types: Generators made equal to rank 0's at the start of each pass.
        use_seedable_sampler: Chooses where the seed of the order comes from.
        data_seed: The seed of the order.
        put_on_device: Whether batches are moved before the engine gets them.
        device: Where they are moved; None: the device of this process.
        non_blocking: Whether moves to the device may overlap with what comes after.
        torch_device_mesh: Ranks that differ only in its model axes read the same batches.
        data_axes: The mesh axes that divide the data, where their names do not tell.
        already_sharded: True: loaders yield this rank's part, and are not cut again. None: found
            out where that can be seen.
        sync_order: For samplers whose order is not a function of (seed, epoch): "agree" compares
            the ranks' orders at each pass, "broadcast" sends rank 0's.
        worker_split: Who divides a stream among workers: "shardplug", "dataset", or "auto".
        batches_per_message: Most batches that one message from a worker carries, at least 1.
        comm: The ranks; None: those of this process.

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
        loader: DataLoader[Any] | None = None,
        *,
        mode: Literal["train", "eval"] = "train",
        split_batches: bool = False,
        even_batches: bool = True,
        tail: Literal["pad", "drop", "uneven", "exact"] | None = None,
        rng_types: Sequence[str] | None = ("generator",),
        use_seedable_sampler: bool = True,
        data_seed: int | None = None,
        put_on_device: bool = True,
        device: torch.device | str | int | None = None,
        non_blocking: bool = False,
        torch_device_mesh: Any = None,
        data_axes: Sequence[str] | None = None,
        already_sharded: bool | None = None,
        sync_order: Literal["agree", "broadcast"] = "agree",
        worker_split: Literal["auto", "shardplug", "dataset"] = "auto",
        batches_per_message: int = 1,
        comm: Comm | None = None,
    ) -> None:
        if mode not in ("train", "eval"):
            raise PlanError(f"`mode` must be 'train' or 'eval', got {mode!r}.")
        self._is_eval = mode == "eval"
        # Where an evaluation is not told how to end, the loader's numbers decide.
        self._prefers_exact = self._is_eval and even_batches and tail is None
        self._comm = comm
        self._shards = ShardEngine(
            split_batches=split_batches,
            even_batches=even_batches,
            tail=Tail.UNEVEN.value if self._is_eval and tail is None else tail,
            rng_types=rng_types,
            use_seedable_sampler=use_seedable_sampler,
            data_seed=data_seed,
            non_blocking=non_blocking,
            torch_device_mesh=torch_device_mesh,
            data_axes=data_axes,
            comm=comm,
        )
        self._options: dict[str, Any] = {
            "put_on_device": put_on_device,
            "device": device,
            "already_sharded": already_sharded,
            "sync_order": sync_order,
            "worker_split": worker_split,
            "batches_per_message": batches_per_message,
        }
        self._prepared: WeakKeyDictionary[DataLoader[Any], DataLoaderShard] = WeakKeyDictionary()
        # By engine, the epoch length that nobody gave: it was worked out here, or found in a run.
        self._lengths: WeakKeyDictionary[Engine, int | None] = WeakKeyDictionary()
        self._loader = None if loader is None else self._shard_of(loader)

    @property
    def loader(self) -> DataLoaderShard:
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

    def attach(self, engine: Engine) -> None:
        """Have an engine read its shard of every loader that it is given from now on.

        Args:
            engine: A trainer or an evaluator.

        Raises:
            PlanError: If it is not an engine, one that rebuilds its loaders, or attached already.
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
        for event, handler in self._handlers.items():
            engine.add_event_handler(event, handler)
        # Whatever else looks at the loader and its length when a run starts shall see ours.
        at_start = engine._event_handlers[Events.STARTED]  # noqa: SLF001  # as Ignite's profilers do
        at_start.insert(0, at_start.pop())

    def detach(self, engine: Engine) -> None:
        """Let an engine read what it is given, from its next run on; nothing if not attached.

        Args:
            engine: A trainer or an evaluator.
        """
        for event, handler in self._handlers.items():
            if engine.has_event_handler(handler, event):
                engine.remove_event_handler(handler, event)
        self._lengths.pop(engine, None)

    def is_attached(self, engine: Engine) -> bool:
        """Tell whether the handler is attached to an engine.

        Args:
            engine: A trainer or an evaluator.
        """
        return engine.has_event_handler(self._start, Events.STARTED)

    @property
    def _handlers(self) -> dict[Events, Callable[[Engine], None]]:
        return {
            Events.STARTED: self._start,
            # Where Engine.set_data() may have put another loader; both come before its next batch.
            Events.GET_BATCH_STARTED: self._replace_data,
            Events.DATALOADER_STOP_ITERATION: self._replace_data,
            Events.EPOCH_COMPLETED: self._note_length,
        }

    # -- events ------------------------------------------------------------------------------

    def _start(self, engine: Engine) -> None:
        """Replace the loader of a run and work out how long its epochs are.

        Collective: every rank must call it.
        """
        state = engine.state
        if state.dataloader is None:
            return
        is_length_given = self._is_length_given(engine)
        self._loader = loader = self._shard_of(state.dataloader)
        state.dataloader = loader
        self._stay_last(engine)
        if self._is_eval or loader.epoch < state.epoch:
            loader.set_epoch(state.epoch)
        steps = self._check_steps(engine, loader, is_length_given=is_length_given)
        if is_length_given:
            self._lengths.pop(engine, None)
            return
        if state.iteration == 0 or engine not in self._lengths:
            # A rank without a step goes through its epochs only if it does not know that.
            self._lengths[engine] = steps or None
        state.epoch_length = self._lengths[engine]

    def _stay_last(self, engine: Engine) -> None:
        """Let loaders be replaced after other handlers, which may set one at the same events."""
        for event, handler in self._handlers.items():
            if handler == self._replace_data and engine.has_event_handler(handler, event):
                engine.remove_event_handler(handler, event)
                engine.add_event_handler(event, handler)

    def _replace_data(self, engine: Engine) -> None:
        """Shard a loader that was put in place of ours while a run goes on.

        Collective: every rank must call it, where there is one.
        """
        data: Any = engine.state.dataloader
        if isinstance(data, DataLoaderShard):
            return
        self._loader = loader = self._shard_of(data)
        self._check_steps(engine, loader, is_length_given=True)  # set_data() keeps the length
        engine.set_data(loader)

    def _note_length(self, engine: Engine) -> None:
        """Note a length that the engine has found; let a rank without a step go on."""
        state = engine.state
        if engine not in self._lengths:
            return
        if state.epoch_length == 0:
            # The engine would take zero steps for the end of the run, or never start the next pass.
            state.epoch_length = None
            engine.set_data(self._shard_of(state.dataloader))
        self._lengths[engine] = state.epoch_length

    # -- loaders and lengths -----------------------------------------------------------------

    def _shard_of(self, data: Any) -> DataLoaderShard:
        if isinstance(data, DataLoaderShard):
            return data
        known = self._prepared.get(data) if isinstance(data, DataLoader) else None
        return self._prepare(data) if known is None else known

    def _prepare(self, loader: DataLoader[Any]) -> DataLoaderShard:
        """Prepare a loader that is seen for the first time.

        Collective: every rank must call it.
        """
        prepared = self._shards.prepare_loader(loader, **self._options)
        if self._prefers_exact and _can_be_exact(prepared.plan):
            prepared = self._shards.prepare_loader(loader, tail=Tail.EXACT.value, **self._options)
        self._prepared[loader] = prepared
        return prepared

    def _is_length_given(self, engine: Engine) -> bool:
        """Tell whether the epoch length of a run that starts is the user's.

        It is not where it is the length of the data, or what an earlier run has left behind. A run
        that resumes from a loaded state has its length from there.
        """
        state, own = engine.state, self._lengths.get(engine)
        length = _length_of(state.dataloader)
        if state.epoch_length is None:
            return False
        if state.iteration > 0:
            return engine not in self._lengths or state.epoch_length not in (length, own)
        return state.epoch_length != (own if length is None else length)

    def _check_steps(
        self, engine: Engine, loader: DataLoaderShard, *, is_length_given: bool
    ) -> int | None:
        """Refuse a run in which ranks would wait for each other for ever, or take no step.

        Collective: every rank must call it.

        Returns:
            Steps of a pass on this rank; None if there is no telling.
        """
        steps = _length_of(loader)
        ranks = current_comm() if self._comm is None else self._comm
        told = ranks.all_gather_ints([_UNKNOWN if steps is None else steps])
        by_rank, tail = [each for (each,) in told], loader.plan.tail
        if not any(by_rank):
            raise PlanError(
                f"`loader` must make at least one step, got none with tail={tail.value!r}. Use a "
                'smaller batch size, fewer ranks, or tail="pad".'
            )
        is_open = steps is None and tail is Tail.UNEVEN and ranks.world_size > 1
        if len(set(by_rank)) > 1 or is_open:
            if self._is_eval:
                _check_uneven_run(engine.state, by_rank, is_length_given=is_length_given)
            else:
                raise PlanError(
                    "`tail` must let all ranks take the same number of steps to train, got "
                    f'{tail.value!r}, by which they take {_told(by_rank)}. Use tail="pad", '
                    '"drop" or "exact", or mode="eval" for an evaluator.'
                )
        return steps


def _check_uneven_run(state: State, by_rank: Sequence[int], *, is_length_given: bool) -> None:
    """Refuse an evaluation that would not end with each rank's pass, or before.

    Raises:
        PlanError: If some rank would have to begin a pass that others never begin.
    """
    fewest = max(0, min(by_rank))
    if state.max_iters is not None:
        raise PlanError(
            f"`max_iters` must be left out where ranks take {_told(by_rank)}, got "
            f'{state.max_iters}. Use max_epochs, or tail="pad".'
        )
    length = state.epoch_length if is_length_given else None
    if length is not None and (length > fewest or state.max_epochs != 1):
        raise PlanError(
            f"`epoch_length` must be at most {fewest}, in a single epoch, where ranks take "
            f'{_told(by_rank)}, got {length}. Leave it out, or use tail="pad".'
        )


def _told(by_rank: Sequence[int]) -> str:
    if _UNKNOWN in by_rank:
        return "unknown numbers of steps"
    return f"between {min(by_rank)} and {max(by_rank)} steps"


def _can_be_exact(uneven: ShardPlan) -> bool:
    """Tell whether an end that may be uneven can surely be exact; alone, it is."""
    if uneven.num_samples is None or uneven.shard.count == 1:
        return False
    try:
        replace(uneven, tail=Tail.EXACT)
    except PlanError:
        return False
    return True


def _length_of(data: Any) -> int | None:
    """Count the steps of a pass; None if there is no telling, as Ignite has it."""
    try:
        return len(data)
    except TypeError:
        return None
