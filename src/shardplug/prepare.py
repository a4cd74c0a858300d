"""From a user's DataLoader to one that reads its shard."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from shardplug import rng
from shardplug.comm import Comm, SoloComm, agree_on
from shardplug.comm_torch import current_comm, local_device, mesh_coordinate
from shardplug.errors import PlanError, ShardplugWarning
from shardplug.loader import DataLoaderShard, Settings
from shardplug.plan.shard import Shard, shard_on_mesh
from shardplug.plan.split import Tail
from shardplug.samplers import BatchSamplerShard, SeedableRandomSampler, choose_tail

_LOADER_FACTS: dict[str, str | None] = {
    "seed": None,  # rank 0's is taken
    "number of samples": "Give every rank the same data set, or pass already_sharded=True.",
    "batch size": "Prepare the same loader on every rank.",
    "way batches are divided": "Pass the same options on every rank.",
    "number of shards": "Pass the same num_processes or mesh on every rank.",
}


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | str | int | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[str] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    torch_device_mesh: Any = None,
    *,
    tail: str | None = None,
    data_axes: Sequence[str] | None = None,
    comm: Comm | None = None,
) -> DataLoaderShard:
    """Make a loader whose batches on each rank are that rank's part of every epoch.

    The user's loader is cloned, never changed or rebuilt: its data set, collate function, worker
    settings and class stay. A RandomSampler becomes a `SeedableRandomSampler`: the order of an
    epoch is a function of (seed, epoch), agreed across ranks by value.

    Collective: every rank must call it, unless ``num_processes`` and ``process_index`` name another
    place than this process's own: then it is a simulation and nothing is asked of other ranks.

    Args:
        dataloader: The user's loader, the same on every rank.
        device: Where batches go with ``put_on_device``; None: this process's.
        num_processes: Number of shards; None: the data-parallel ranks of this run.
        process_index: Which shard; None: the data-parallel coordinate of this process.
        split_batches: False: each rank gets whole batches, every ``num_processes``-th. True: each
            batch is cut and each rank gets its piece; its size must be a multiple of
            ``num_processes``.
        put_on_device: Move each batch, any nesting; what is no tensor passes through.
        rng_types: Generators made equal to rank 0's at the start of each pass: "torch", "cuda",
            "xla", "generator", "numpy", "python".
        dispatch_batches: False or None: every rank reads its own part.
        even_batches: True: all ranks take the same number of full steps, padding from the start of
            the epoch. False: nothing is repeated, ranks may differ by a step.
        slice_fn_for_dispatch: Has no effect without dispatching, which a warning says.
        use_seedable_sampler: Chooses the seed. True: ``data_seed``, else the ``initial_seed()`` of
            the user's generator, else rank 0's ``torch.initial_seed()``. False: that of the user's
            generator, else one draw of rank 0's torch RNG.
        data_seed: See ``use_seedable_sampler``; has no effect without it, which a warning says.
        non_blocking: Whether moves to the device may overlap with what comes after.
        torch_device_mesh: A DeviceMesh; ranks that differ only in model axes read the same batches.
        tail: "pad", "drop", "uneven" or "exact" says what happens at the end, and wins over
            ``even_batches`` and the loader's ``drop_last``.
        data_axes: The mesh axes that divide the data, where their names do not tell.
        comm: The ranks; None: those of this process.

    Returns:
        The prepared loader.

    Raises:
        PlanError: If an argument does not fit; before any data is read.
        CommError: If ranks were given different loaders, or another rank failed.
    """
    ranks = current_comm() if comm is None else comm
    own = own_shard(ranks, torch_device_mesh, data_axes)
    shard = Shard(
        own.index if process_index is None else process_index,
        own.count if num_processes is None else num_processes,
    )
    is_simulation = shard != own
    _warn_of_no_effect(slice_fn_for_dispatch, use_seedable_sampler, data_seed)

    def prepare() -> tuple[tuple[BatchSamplerShard, Settings], Sequence[int]]:
        loader = _check_loader(dataloader)
        seed = _choose_seed(loader, data_seed if use_seedable_sampler else None, use_seedable_sampler)
        batches = _seeded(loader, seed)
        mode = choose_tail(
            tail, even_batches=even_batches, drop_last=getattr(batches, "drop_last", False)
        )
        if shard.count == 1 and mode is Tail.PAD:
            mode = Tail.UNEVEN  # alone there is nobody to be even with
        divided = BatchSamplerShard(
            batches, shard.count, shard.index, split_batches, even_batches, tail=mode
        )
        settings = Settings(
            seed=seed,
            device=_choose_device(device) if put_on_device else None,
            non_blocking=non_blocking,
            rng_types=rng.check_rng_types(rng_types),
            generator=_find_generator(loader),
            is_simulation=is_simulation,
            comm=comm,
        )
        facts = (
            seed,
            -1 if divided.num_samples is None else divided.num_samples,
            divided.batch_size or 0,
            2 * list(Tail).index(mode) + split_batches,
            shard.count,
        )
        return (divided, settings), facts

    (divided, settings), agreed = agree_on(
        SoloComm() if is_simulation else ranks, prepare, subject="the loader", facts=_LOADER_FACTS
    )
    if agreed[0] != settings.seed:
        settings = replace(settings, seed=agreed[0])
        divided = divided.over(_seeded(dataloader, agreed[0]))
    return DataLoaderShard.over(dataloader, divided, settings)


def own_shard(comm: Comm, mesh: Any, data_axes: Sequence[str] | None) -> Shard:
    """Find this process's part: its place on the data axes of the mesh, else its rank."""
    if mesh is None:
        return Shard(comm.rank, comm.world_size)
    axes, sizes, coordinate = mesh_coordinate(mesh)
    return shard_on_mesh(axes, sizes, coordinate=coordinate, data_axes=data_axes)


def _check_loader(dataloader: Any) -> DataLoader[Any]:
    if not isinstance(dataloader, DataLoader):
        raise PlanError(
            "`dataloader` must be a torch.utils.data.DataLoader, got "
            f"{type(dataloader).__name__}. Wrap the data in one."
        )
    return dataloader


def _warn_of_no_effect(
    slice_fn: Callable[..., Any] | None, use_seedable_sampler: bool, data_seed: int | None
) -> None:
    if slice_fn is not None:
        warnings.warn(
            "`slice_fn_for_dispatch` has no effect without dispatch_batches=True.",
            ShardplugWarning,
            stacklevel=3,
        )
    if data_seed is not None and not use_seedable_sampler:
        warnings.warn(
            "`data_seed` has no effect without use_seedable_sampler=True.",
            ShardplugWarning,
            stacklevel=3,
        )


def _choose_seed(loader: DataLoader[Any], data_seed: int | None, use_seedable: bool) -> int:
    """Choose this rank's seed, as a signed 64-bit number; rank 0's is the one that counts."""
    generator = _find_generator(loader)
    if data_seed is not None:
        seed = data_seed
    elif generator is not None:
        seed = generator.initial_seed()
    else:
        seed = torch.initial_seed() if use_seedable else rng.draw_seed()
    return (seed + 2**63) % 2**64 - 2**63


def _find_generator(loader: DataLoader[Any]) -> torch.Generator | None:
    """Find the user's generator: the sampler's, else the batch sampler's, else the loader's."""
    for owner in (loader.sampler, loader.batch_sampler, loader.dataset, loader):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator
    return None


def _seeded(loader: DataLoader[Any], seed: int) -> Any:
    """Return the loader's batch sampler, with a shuffle that follows (seed, epoch)."""
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler or type(batches.sampler) is not RandomSampler:
        return batches
    shuffle = batches.sampler
    sampler = SeedableRandomSampler(
        shuffle.data_source, shuffle.replacement, len(shuffle), data_seed=seed
    )
    return BatchSampler(sampler, batches.batch_size, batches.drop_last)


def _choose_device(device: torch.device | str | int | None) -> torch.device:
    return local_device() if device is None else torch.device(device)
