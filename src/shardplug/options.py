"""Whether options are of the right kind: one place, whoever they are given to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from shardplug.errors import PlanError
from shardplug.kinds import (
    check_count,
    check_flag,
    check_function,
    check_has,
    check_integer,
    check_names,
)
from shardplug.plan.split import choose_tail
from shardplug.rng import check_rng_types
from shardplug.worker_info import check_worker_split


def check_options(**options: Any) -> dict[str, Any]:
    """Check options of `prepare_data_loader` before there is a loader.

    Each is checked by itself: whether it is of the right kind, and one of the words there are.
    Whoever keeps options for later calls this first, so that an error comes where they are given.

    Args:
        options: Any of those of `prepare_data_loader`.

    Returns:
        The same, as Python's own kinds: numpy's numbers and truth values are made into those.

    Raises:
        PlanError: If one does not fit.
        TypeError: If there is no such option.

    Example:
        >>> check_options(even_batches=False, batches_per_message=4)
        {'even_batches': False, 'batches_per_message': 4}
    """
    unknown = [name for name in options if name not in _CHECKS]
    if unknown:
        raise TypeError(f"check_options() got an unexpected keyword argument {unknown[0]!r}")
    return check_loader_options(**options)


def check_loader_options(**options: Any) -> dict[str, Any]:
    """Check options of our loaders: those of `check_options`, and what is asked of these alone.

    Raises:
        PlanError: If one does not fit.
    """
    checks = {**_CHECKS, **_CHECKS_OF_LOADERS}
    return {name: checks[name](name, value) for name, value in options.items()}


def check_device(name: str, value: Any) -> torch.device | None:
    """Check a device that may be left out.

    Raises:
        PlanError: If torch takes it for none.
    """
    if value is None or isinstance(value, torch.device):
        return value
    try:
        return torch.device(value if isinstance(value, str) else check_integer(name, value))
    except (PlanError, RuntimeError, ValueError) as error:
        raise PlanError(
            f"`{name}` must be a torch.device, the name or number of one, or None, got "
            f"{value!r:.80}. Leave it out for the device of this process."
        ) from error


def _check_tail(_: str, tail: Any) -> Any:
    choose_tail(tail, even_batches=True, drop_last=False)
    return tail


def _check_order(_: str, sync_order: Any) -> Any:
    if not isinstance(sync_order, str) or sync_order not in ("agree", "broadcast"):
        raise PlanError(f'`sync_order` must be "agree" or "broadcast", got {sync_order!r:.80}.')
    return sync_order


def _check_rng_types(name: str, rng_types: Any) -> Any:
    names = check_names(name, rng_types)
    return None if names is None else check_rng_types(tuple(names))


_MESH = ("shape", "mesh_dim_names", "get_coordinate")

_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    # Whether a number is that of a device is seen where something is moved there.
    "device": lambda name, value: value if type(value) is int else check_device(name, value),
    "num_processes": partial(check_integer, or_none=True),
    "process_index": partial(check_integer, or_none=True),
    "split_batches": check_flag,
    "put_on_device": check_flag,
    "rng_types": _check_rng_types,
    "dispatch_batches": partial(check_flag, or_none=True),
    "even_batches": check_flag,
    "slice_fn_for_dispatch": check_function,
    "use_seedable_sampler": check_flag,
    "data_seed": partial(check_integer, or_none=True),
    "non_blocking": check_flag,
    "use_stateful_dataloader": check_flag,
    "torch_device_mesh": partial(check_has, parts=_MESH, what="DeviceMesh"),
    "tail": _check_tail,
    "already_sharded": partial(check_flag, or_none=True),
    "sync_order": _check_order,
    "data_axes": check_names,
    "worker_split": lambda _, worker_split: check_worker_split(worker_split),
    "batches_per_message": partial(check_count, least=1),
    "seed_samples": check_flag,
    "comm": partial(check_has, parts=("rank", "world_size"), what="Comm"),
}
"""What each option has to be."""

_CHECKS_OF_LOADERS: dict[str, Callable[[str, Any], Any]] = {
    "skip_batches": partial(check_count, least=0),
    "slice_fn": check_function,
    "synchronized_generator": partial(
        check_has, parts=("get_state", "set_state"), what="torch.Generator"
    ),
}
"""What each option has to be that loaders of ours take when they are made directly."""
