"""All that this package touches of Lightning without Lightning having promised it.

A few names of ``lightning.pytorch`` 2.6, each behind one function that fails with the public way
out if the name has gone:

* ``Trainer._accelerator_connector.use_distributed_sampler``, to read what the user said;
* ``Trainer._data_connector._prepare_dataloader``, which rebuilds loaders with a sampler of
  Lightning's own, and for predict rebuilds them whatever the user said;
* ``_IndexBatchSamplerWrapper`` in ``lightning.pytorch.overrides.distributed``, by which the
  prediction loop recognises a loader that tells its batch indices;
* ``Trainer.fit_loop.epoch_loop.batch_progress``, which counts the batches of the epoch, and has to
  count otherwise where a run goes on with another number of ranks;
* ``Trainer.fit_loop._combined_loader._mode``, which says whether the shortest or the longest of
  several loaders makes the length of an epoch;
* ``Trainer.fit_loop._data_fetcher``, which holds a batch where no length is known;
* ``Trainer.fit_loop._restarting``, for which Lightning leaves out schedules at the end of an epoch;
* ``_should_check_val_fx``, ``_should_accumulate`` and ``_batches_that_stepped`` of
  ``Trainer.fit_loop.epoch_loop``, which tell whether a validation or a step of the optimizer is due
  after a batch, and count the steps of loggers;
* ``Trainer._logger_connector._callback_metrics``: the public way to them may wait for other ranks;
* ``Trainer._results``: what has been logged in the epoch under way, for its end.

(Besides, `ShardStrategy` overrides ``_configure_launcher``, as Lightning's own strategies do, and
with it touches ``_launcher`` and ``_start_method`` of the class it extends.)
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from typing import Any

import lightning
from lightning.pytorch import Callback, Trainer
from torch.utils.data import BatchSampler

from shardplug import PlanError

_PARAMETERS = ("dataloader", "shuffle", "mode")
COUNTS = ("ready", "started", "processed", "completed")
"""What Lightning counts of batches and epochs, in the order in which they come."""


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Return a trainer's callbacks, which a connector sets without declaring them."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # see above
    return callbacks


def is_sharded_by_user(trainer: Trainer) -> bool:
    """Tell whether the user said ``Trainer(use_distributed_sampler=False)``: "I shard myself".

    Raises:
        PlanError: If this version of Lightning does not tell.
    """
    connector = getattr(trainer, "_accelerator_connector", None)
    flag = getattr(connector, "use_distributed_sampler", None)
    if not isinstance(flag, bool):
        raise _unknown_version("Trainer._accelerator_connector.use_distributed_sampler")
    return not flag


def keep_loaders(trainer: Trainer) -> None:
    """Have Lightning hand the user's loaders to the strategy as they are, in every stage.

    Raises:
        PlanError: If this version of Lightning prepares loaders in another way.
    """
    connector = getattr(trainer, "_data_connector", None)
    prepare = getattr(connector, "_prepare_dataloader", None)
    if prepare is None or tuple(inspect.signature(prepare).parameters) != _PARAMETERS:
        raise _unknown_version("Trainer._data_connector._prepare_dataloader")
    vars(connector)["_prepare_dataloader"] = _as_it_is


def record_indices(batch_sampler: BatchSampler) -> Any:
    """Wrap a batch sampler so that predictions can be told from which samples they are.

    Raises:
        PlanError: If this version of Lightning does so in another way.
    """

    class RecordedBatches(_index_wrapper()):  # type: ignore[misc]  # found at run time
        """Lightning's own is its own iterator and starts over whenever it is asked for one."""

        def __iter__(self) -> Iterator[list[int]]:
            seen: list[Any] = []
            self.seen_batch_indices = seen
            for batch in batch_sampler:
                seen.append(batch)
                yield batch

    return RecordedBatches(batch_sampler)


def told_indices(batch_sampler: Any) -> tuple[Any, list[Any]]:
    """Wrap a batch sampler that is read elsewhere, for predictions to be told from which samples.

    Returns:
        The wrapped one, and where the indices of each batch are to be put.

    Raises:
        PlanError: If this version of Lightning does so in another way.
    """
    wrapped = _index_wrapper()(batch_sampler)
    told: list[Any] = []
    wrapped.seen_batch_indices = told
    return wrapped, told


def _index_wrapper() -> Any:
    try:
        from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
    except ImportError as error:
        raise _unknown_version("_IndexBatchSamplerWrapper") from error
    return _IndexBatchSamplerWrapper


def is_globally_seeded() -> bool:
    """Tell whether ``seed_everything`` was called; every process of the run then starts from it."""
    # The variable is how Lightning itself passes the seed on; there is no function that tells.
    return "PL_GLOBAL_SEED" in os.environ  # noqa: TID251


def count_batches(trainer: Trainer, done: int) -> None:
    """Have Lightning count on from some batches of the epoch, at the start of a run.

    Args:
        trainer: The trainer.
        done: How many are done, of those that an epoch has on this number of ranks.

    Raises:
        PlanError: If this version of Lightning counts in another way.
    """
    loop, progress = _batch_progress(trainer)
    limit = trainer.num_training_batches  # which may be infinite
    if done < limit:
        _shift(progress, done - progress.current.processed)
        return
    # Nothing is left for this number of ranks, though the loader may hold more than the limit.
    if progress.current.processed < progress.current.ready:
        # The batch that had failed is none of these, and the end of the epoch is still to come.
        for counted in (loop.val_loop.batch_progress.current, loop.val_loop.batch_progress.total):
            counted.ready, counted.started, counted.processed, counted.completed = 1, 1, 0, 0
    for name in COUNTS:
        setattr(progress.current, name, limit)
        setattr(progress.total, name, progress.total.processed)
    progress.is_last_batch = True
    loop.update_restart_stage()
    end_epoch(trainer)


def starts_epoch(trainer: Trainer) -> bool:
    """Tell whether no batch of the epoch is counted as done.

    Raises:
        PlanError: If this version of Lightning counts in another way.
    """
    _, progress = _batch_progress(trainer)
    return bool(progress.current.processed == 0)


def count_as_over(trainer: Trainer) -> None:
    """Have Lightning count all batches of an epoch in which it has counted its last one.

    Raises:
        PlanError: If this version of Lightning counts in another way.
    """
    _, progress = _batch_progress(trainer)
    if progress.current.processed:
        _shift(progress, int(trainer.num_training_batches) - progress.current.processed)


def forget_failed(trainer: Trainer) -> None:
    """Have Lightning count a batch that had failed as not begun, over all epochs too.

    It does so by itself in the epoch alone, but may validate by the other count.

    Raises:
        PlanError: If this version of Lightning counts in another way.
    """
    _, progress = _batch_progress(trainer)
    progress.total.ready = progress.total.started = progress.total.processed


def _batch_progress(trainer: Trainer) -> tuple[Any, Any]:
    loop = getattr(trainer.fit_loop, "epoch_loop", None)
    progress = getattr(loop, "batch_progress", None)
    current = getattr(progress, "current", None)
    known = all(isinstance(getattr(current, name, None), int) for name in COUNTS)
    if not known or not hasattr(loop, "update_restart_stage"):
        raise _cannot_go_on("Trainer.fit_loop.epoch_loop.batch_progress")
    return loop, progress


def _shift(progress: Any, by: int) -> None:
    for name in COUNTS:
        setattr(progress.current, name, getattr(progress.current, name) + by)


def follows_shortest(trainer: Trainer) -> bool:
    """Tell whether the shortest of several training loaders makes the length of an epoch.

    Raises:
        PlanError: If this version of Lightning does not tell.
    """
    mode = getattr(getattr(trainer.fit_loop, "_combined_loader", None), "_mode", None)
    if not isinstance(mode, str):
        raise _cannot_go_on("Trainer.fit_loop._combined_loader._mode")
    return mode == "min_size"


def fetch_again(trainer: Trainer) -> None:
    """Have Lightning drop the batch that it holds, and begin to fetch anew.

    Raises:
        PlanError: If this version of Lightning fetches in another way.
    """
    iter(_fetcher(trainer))


def leave_restart(trainer: Trainer) -> None:
    """Have Lightning end the epoch that it goes back into as any other.

    Raises:
        PlanError: If this version of Lightning does otherwise.
    """
    loop: Any = trainer.fit_loop
    if not isinstance(getattr(loop, "_restarting", None), bool):
        raise _cannot_go_on("Trainer.fit_loop._restarting")
    # Of this loop alone: the public property is that of the loops inside too.
    loop._restarting = False  # noqa: SLF001  # see above


def goes_back_to_validation(trainer: Trainer) -> bool:
    """Tell whether Lightning goes back to a validation that was due, and to what follows it.

    Raises:
        PlanError: If this version of Lightning does not tell.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    check = getattr(loop, "_should_check_val_fx", None)
    if check is None:
        raise _cannot_go_on("Trainer.fit_loop.epoch_loop._should_check_val_fx")
    if not loop.restarting or not (
        loop.restarted_on_last or loop.val_loop.restarted_mid_evaluation
    ):
        return False
    # By then Lightning has forgotten the batch that had failed.
    counted = loop.batch_progress.current
    counted.ready, ready = counted.processed, counted.ready
    is_due = bool(check(_fetcher(trainer)))
    counted.ready = ready
    return is_due


def count_logged_steps(trainer: Trainer, by: int) -> None:
    """Move the count by which loggers number what they are given.

    Raises:
        PlanError: If this version of Lightning counts in another way.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    if not isinstance(getattr(loop, "_batches_that_stepped", None), int):
        raise _cannot_go_on("Trainer.fit_loop.epoch_loop._batches_that_stepped")
    loop._batches_that_stepped += by  # noqa: SLF001  # see above


def counts_step_again(trainer: Trainer) -> bool:
    """Tell whether Lightning is about to count the step for loggers of the batch it goes back into.

    Raises:
        PlanError: If this version of Lightning counts in another way.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    accumulates = getattr(loop, "_should_accumulate", None)
    if accumulates is None:
        raise _cannot_go_on("Trainer.fit_loop.epoch_loop._should_accumulate")
    was_over = loop.restarted_on_last and not loop.restarted_on_train_batch_end
    return bool(loop.restarting and not was_over and not accumulates())


def end_epoch(trainer: Trainer) -> None:
    """Have Lightning find no further batch in the epoch that it goes back into.

    Raises:
        PlanError: If this version of Lightning fetches in another way.
    """
    fetcher = _fetcher(trainer)
    fetcher.done = True
    getattr(fetcher, "batches", []).clear()  # it fetches anew for the next epoch


def callback_metrics(trainer: Trainer) -> dict[str, Any]:
    """Return what callbacks see, without computing anything.

    Raises:
        PlanError: If this version of Lightning keeps it elsewhere.
    """
    connector = getattr(trainer, "_logger_connector", None)
    metrics = getattr(connector, "_callback_metrics", None)
    if not isinstance(metrics, dict):
        raise _cannot_go_on("Trainer._logger_connector._callback_metrics")
    return metrics


def logged_in_epoch(trainer: Trainer) -> dict[str, Any]:
    """Return what callbacks would see if the epoch ended now: of this rank, nothing is reduced.

    Metrics with a state of their own are left out.

    Raises:
        PlanError: If this version of Lightning keeps it elsewhere.
    """
    results = getattr(trainer, "_results", None)
    if not isinstance(results, dict):
        raise _cannot_go_on("Trainer._results")
    found: dict[str, Any] = {}
    for each in results.values():
        if each.meta.on_epoch and each.is_tensor:
            weight = each.cumulated_batch_size if each.meta.is_mean_reduction else 1
            found[each.meta.name] = found[each.meta.forked_name(False)] = each.value / weight
    return found


def _fetcher(trainer: Trainer) -> Any:
    fetcher = getattr(trainer.fit_loop, "_data_fetcher", None)
    if fetcher is None:
        raise _cannot_go_on("Trainer.fit_loop._data_fetcher")
    return fetcher


def _as_it_is(dataloader: object, shuffle: bool, mode: Any) -> object:
    """Stand in for ``_prepare_dataloader``; a function of the module, so that it pickles."""
    return dataloader


def _unknown_version(name: str) -> PlanError:
    return PlanError(
        f"`lightning` must have {name} for a strategy to shard loaders, got version "
        f"{lightning.__version__} without it. Install lightning 2.6, or pass "
        "Trainer(use_distributed_sampler=False) and use shardplug.prepare_data_loader() in your "
        "*_dataloader() hooks."
    )


def _cannot_go_on(name: str) -> PlanError:
    return PlanError(
        f"`lightning` must have {name} to go on inside an epoch, got version "
        f"{lightning.__version__} without it. Install lightning 2.6, or go on from a checkpoint of "
        "the end of an epoch."
    )
