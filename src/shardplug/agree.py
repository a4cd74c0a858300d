"""What ranks tell each other about results and random numbers.

Whether a row is real is read from the record that the loader keeps, never worked out again from a
length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardplug import rng
from shardplug.comm import Comm, agree
from shardplug.comm_torch import current_comm
from shardplug.errors import BatchError, PlanError
from shardplug.kinds import check_flag, check_integer, check_names
from shardplug.packing import (
    Columns,
    Packed,
    join_columns,
    pack,
    side_by_side,
    to_columns,
    unpack,
    unpack_columns,
)
from shardplug.plan.order import mix_seed
from shardplug.prepared import PreparedLoader
from shardplug.rows import join_outputs, leaves, map_leaves, move_to_device, trim_outputs


def gather(data: Any, *, comm: Comm | None = None) -> Any:
    """Give every rank the data of all ranks, joined along the first dimension, by rank.

    Tensors without dimensions are stacked. Tensors that do not join, being of another width, come
    as a list of all ranks' tensors; so do values that are no tensors. All tensors of a call
    travel in one message.

    Collective: every rank must call it, with data of the same structure.

    Args:
        data: Tensors ``(rows, ...)``, nested in containers; lists of strings or objects.
        comm: The ranks; None: those of this process.

    Returns:
        The same structure on every rank; tensors on the device of this rank's own.

    Raises:
        BatchError: If structure or dtypes differ between ranks; on all of them, naming the leaf and
            the ranks.
        CommError: If a value cannot be pickled, or another rank failed.

    Example:
        >>> gather({"loss": torch.tensor(0.5), "names": ["a", "b"]})
        {'loss': tensor([0.5000]), 'names': ['a', 'b']}
    """
    return _joined(_exchange(lambda: data, None, current_comm() if comm is None else comm), data)


def gather_for_metrics(data: Any, loader: PreparedLoader, *, comm: Comm | None = None) -> Any:
    """Give every rank what all ranks made of the real rows of a step, in the epoch's order.

    Padding is left out, by the record of ``loader``: over an epoch each sample is seen once. First
    dimensions may be a multiple of the batch's rows. Ranks of one model-parallel group hold the
    same rows; they count once.

    Collective: every rank must call it, in every step.

    Args:
        data: What this rank made of the batch that ``loader`` has out.
        loader: The loader that the batch is from, while it is out.
        comm: The ranks; None: those of this process.

    Returns:
        The same structure on every rank; tensors on the device of this rank's own.

    Raises:
        PlanError: If ranks of the loader may take different numbers of steps, so that one would
            wait here for ever; at the first call, on all ranks. If no batch is out, or the loader
            is a simulation or not a prepared one.
        BatchError: If structure or dtypes differ between ranks, or a leaf does not have a multiple
            of the batch's rows.
        CommError: If a value cannot be pickled, or another rank failed.
    """
    _check_in_step(loader)
    ranks = loader.comm if comm is None else comm
    by_rank = _exchange(partial(_trimmed, data, loader), loader, ranks)
    if loader.is_in_step is None and len({each.num_steps for each in by_rank}) > 1:
        raise _out_of_step(loader)
    # One of each model-parallel group, in the order of the shards.
    by_shard = {each.shard_index: each for each in reversed(by_rank)}
    parts = [by_shard[index] for index in sorted(by_shard)]
    # A shard without a real row adds nothing; it may not even join.
    return _joined([part for part in parts if part.num_rows] or parts[:1], data)


def synchronize_rng_states(
    rng_types: Sequence[str],
    generator: torch.Generator | None = None,
    *,
    comm: Comm | None = None,
) -> None:
    """Make random number generators equal to those of rank 0, in one message.

    Collective: every rank must call it.

    Args:
        rng_types: "torch", "cuda", "xla", "generator", "numpy", "python".
        generator: The one that "generator" means.
        comm: The ranks; None: those of this process.

    Raises:
        PlanError: If a name is unknown, a device is not there, or "generator" has none.
    """
    kinds = rng.check_rng_types(check_names("rng_types", rng_types))
    if "generator" in kinds and not isinstance(generator, torch.Generator):
        raise PlanError(
            '`generator` must be given with "generator" in `rng_types`, as a torch.Generator, got '
            f"{generator!r:.80}."
        )
    rng.synchronize(kinds, current_comm() if comm is None else comm, generator=generator)


def set_seed(
    seed: int,
    device_specific: bool = False,
    deterministic: bool = False,
    *,
    comm: Comm | None = None,
) -> None:
    """Seed all random number generators of this process: python, numpy, torch on every device.

    Args:
        seed: In [0, 2^63).
        device_specific: Seed each rank differently, by a seed mixed from ``seed`` and its rank.
        deterministic: Let torch use deterministic algorithms only.
        comm: The ranks; None: those of this process.

    Raises:
        PlanError: If ``seed`` is no integer or out of range, or a flag is none.
    """
    seed = check_integer("seed", seed)
    is_each_its_own = check_flag("device_specific", device_specific)
    is_deterministic = check_flag("deterministic", deterministic)
    if not 0 <= seed < 2**63:
        raise PlanError(f"`seed` must be in [0, 2^63), got {seed}.")
    if is_each_its_own:
        ranks = current_comm() if comm is None else comm
        seed = mix_seed(seed, ranks.rank)
    rng.seed_all(seed)
    if is_deterministic:
        torch.use_deterministic_algorithms(True)


class _Given(NamedTuple):
    """What one rank gives in a gather."""

    data: Any
    num_rows: int
    shard_index: int
    num_steps: int


def _trimmed(data: Any, loader: PreparedLoader) -> Any:
    """Leave out what was made of padding."""
    if not loader.num_rows:
        raise PlanError("`loader` must have a batch out to gather, got one between passes.")
    num_rows = loader.num_rows
    tensors = side_by_side(data) if loader.valid_rows == num_rows else None
    if tensors and not any(each.dim() and len(each) % num_rows for each in tensors):
        return data  # what the line below would find, in a fraction of its time
    return trim_outputs(data, loader.valid_rows, num_rows)


def _exchange(make: Callable[[], Any], loader: PreparedLoader | None, comm: Comm) -> list[_Given]:
    """Give every rank what all make, after checking that it is of one structure."""
    num_rows = 0 if loader is None else loader.valid_rows
    shard_index = comm.rank if loader is None else loader.shard.index
    num_steps = -1 if loader is None or loader.is_in_step is not None else len(loader)
    facts = (num_rows, shard_index, num_steps)
    if comm.world_size == 1:
        return [_Given(make(), *facts)]

    def give() -> tuple[Any, ...]:
        data = make()
        return to_columns(data) or pack([map_leaves(_on_cpu, data)]), *facts

    by_rank = [_Given(*given) for given in agree(comm, give)]
    if _are_alike([each.data for each in by_rank]):
        return by_rank
    by_rank = [each._replace(data=_opened(each.data)) for each in by_rank]
    _check_alike([_signature(each.data) for each in by_rank])
    return by_rank


def _are_alike(given: Sequence[Columns | Packed]) -> bool:
    """Tell whether all gave tensors in the same places, of the same dtypes."""
    first = given[0]
    return isinstance(first, Columns) and all(
        isinstance(each, Columns) and each.kind == first.kind for each in given
    )


def _opened(given: Columns | Packed) -> Any:
    if isinstance(given, Packed):
        return unpack(given)[0]
    return unpack_columns(given)


def _on_cpu(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf


def _joined(parts: Sequence[_Given], own: Any) -> Any:
    """Join what all gave, in order, onto the device of this rank's own."""
    joined = _joined_given([each.data for each in parts], [each.num_rows for each in parts])
    device = next((leaf.device for _, leaf in leaves(own) if isinstance(leaf, Tensor)), None)
    return joined if device is None else move_to_device(joined, device)


def _joined_given(given: Sequence[Any], num_rows: Sequence[int]) -> Any:
    if isinstance(given[0], Columns):
        if all(each.tails == given[0].tails for each in given):
            return join_columns(given)
        given = [unpack_columns(each) for each in given]
    return join_outputs(given, _beside_each_other, num_rows=num_rows)


def _beside_each_other(values: list[Any]) -> Any:
    """Put what has no rows to join side by side."""
    if all(isinstance(value, Tensor) and not value.dim() for value in values):
        return torch.stack(values)
    return values


def _check_in_step(loader: PreparedLoader) -> None:
    """Refuse a loader whose ranks may take different numbers of steps: one would wait for ever."""
    if not isinstance(loader, PreparedLoader):
        raise PlanError(
            f"`loader` must be a prepared loader, got {type(loader).__name__}. Pass the one that "
            "the loop is over."
        )
    if loader.is_simulation:
        raise PlanError(
            "`loader` must read this process's own shard to gather, got shard "
            f"{loader.shard.index} of {loader.shard.count}, a simulation. "
            "Prepare it without num_processes and process_index."
        )
    if loader.is_in_step is False:
        raise _out_of_step(loader)


def _out_of_step(loader: PreparedLoader) -> PlanError:
    return PlanError(
        "`loader` must take the same number of steps on every rank to gather in each, got one "
        f"whose ranks differ, or may (tail={loader.tail.value!r}). Prepare it with "
        'tail="exact" for evaluation, or even_batches=True.'
    )


def _signature(data: Any) -> dict[str, str]:
    """Tell for each leaf what must be the same on all ranks."""
    return {
        path: str(leaf.dtype) if isinstance(leaf, Tensor) else "no tensor"
        for path, leaf in leaves(data)
    }


def _is_of_item(path: str) -> bool:
    """Tell whether a leaf is, or is in, an item of a list, which may have more on other ranks."""
    return any(key.isdigit() for key in path.split("."))


def _check_alike(signatures: Sequence[dict[str, str]]) -> None:
    first = signatures[0]
    for rank, other in enumerate(signatures):
        for path in sorted(first.keys() ^ other.keys()):
            if _is_of_item(path):
                continue
            has, lacks = (0, rank) if path in first else (rank, 0)
            raise BatchError(
                f"`data` must have the same leaves on all ranks, got {path!r} on rank {has} but "
                f"not on rank {lacks}."
            )
        for path in sorted(first.keys() & other.keys()):
            if other[path] != first[path]:
                raise BatchError(
                    f"`data` must be of one dtype on all ranks, got {path!r} as {first[path]} on "
                    f"rank 0 and {other[path]} on rank {rank}."
                )
