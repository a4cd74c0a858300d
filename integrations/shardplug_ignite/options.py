"""Options of a handler that need more than a look."""

from __future__ import annotations

from typing import Any

from torch.amp.grad_scaler import GradScaler

from shardplug import PlanError
from shardplug_ignite.steps import RealSteps


def check_agree_stop(agree_stop: Any) -> bool:
    """Check whether ranks are to stop together.

    Args:
        agree_stop: As the user gave it.

    Raises:
        PlanError: If it is no truth value, of Python or numpy.
    """
    is_numpys = getattr(getattr(agree_stop, "dtype", None), "kind", None) == "b"
    if not isinstance(agree_stop, bool) and not is_numpys:
        raise PlanError(f"`agree_stop` must be True or False, got {agree_stop!r}.")
    return bool(agree_stop)


def real_steps(
    optimizer: Any,
    lr_scheduler: Any,
    scaler: Any,
    *,
    ticks_per_batch: int | None,
    is_eval: bool,
) -> RealSteps | None:
    """Make what knows of real steps; None where the optimizer is not known.

    Args:
        optimizer: As the user gave it, as for the two that follow.
        lr_scheduler: The same.
        scaler: The same.
        ticks_per_batch: See `RealSteps`.
        is_eval: Whether the engines evaluate.

    Raises:
        PlanError: If they do not fit, or do not fit together.
    """
    is_known = optimizer is not None or lr_scheduler is not None
    if is_eval and (is_known or scaler is not None):
        raise PlanError(
            "`optimizer`, `lr_scheduler` and `scaler` must be left out with mode='eval', got one "
            "of them. Give them to the handler of the trainer."
        )
    if ticks_per_batch is not None and lr_scheduler is None:
        raise PlanError(
            "`scheduler_unit` must be 'updates' without lr_scheduler, got 'batches'. Pass "
            "lr_scheduler=..., which may be ticked several times for a step."
        )
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise PlanError(
            f"`scaler` must be a torch.amp.GradScaler, got {type(scaler).__name__}. Leave it out: "
            "that of Ignite's trainer is found."
        )
    if scaler is not None and not is_known:
        raise PlanError(
            "`scaler` must come with the optimizer whose steps it may skip, got none. "
            "Pass optimizer=..."
        )
    return RealSteps(optimizer, lr_scheduler, scaler, ticks_per_batch) if is_known else None
