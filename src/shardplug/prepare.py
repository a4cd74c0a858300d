"""From a user's DataLoader to one that reads its shard."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from shardplug.comm import Comm, SoloComm, agree_on
from shardplug.comm_torch import current_comm, local_device
from shardplug.dispatch import DataLoaderDispatcher
from shardplug.dividing import (
    LOADER_FACTS,
    Options,
    check_loader,
    is_seen_cut,
    own_shard,
)
from shardplug.errors import PlanError, ShardplugWarning
from shardplug.feeds import Feed, seeded
from shardplug.kinds import check_count
from shardplug.loader import DataLoaderShard, whole_feed
from shardplug.options import check_device, check_options
from shardplug.plan.shard import Shard
from shardplug.plan.split import Tail
from shardplug.prepared import PreparedLoader, Settings
from shardplug.rng import draw_seed
from shardplug.samplers import SkipBatchSampler

_SAME = (
    "rng_types",
    "split_batches",
    "even_batches",
    "tail",
    "use_seedable_sampler",
    "data_seed",
    "already_sharded",
    "sync_order",
    "worker_split",
    "non_blocking",
    "batches_per_message",
    "seed_samples",
)
"""Options that are what they are called in `Options` too."""


def prepare_data_loader(  # noqa: PLR0917  # these names and their order are Accelerate's
    dataloader: DataLoader[Any] | None,
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
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
    *,
    tail: str | None = None,
    already_sharded: bool | None = None,
    sync_order: str = "agree",
    data_axes: Sequence[str] | None = None,
    worker_split: str = "auto",
    batches_per_message: int = 1,
    seed_samples: bool = False,
    comm: Comm | None = None,
) -> PreparedLoader:
    """Make a loader whose batches on each rank are that rank's part of every epoch.

    The user's loader is cloned, never changed or rebuilt: its data set, collate function, worker
    settings and class stay. A RandomSampler becomes a `SeedableRandomSampler`: the order of an
    epoch is a function of (seed, epoch), agreed across ranks by value. So is what torch's
    SubsetRandomSampler and WeightedRandomSampler draw; their own generator gives the seed and does
    not move. A loader that was prepared before comes back as it is.

    Collective: every rank must call it, unless ``num_processes`` and ``process_index`` name another
    place than this process's own: then it is a simulation and nothing is asked of other ranks.

    Args:
        dataloader: The user's loader, the same on every rank; with ``dispatch_batches=True`` it may
            be None on ranks that do not read.
        device: Where batches go with ``put_on_device``; None: this process's.
        num_processes: Number of shards; None: the data-parallel ranks of this run.
        process_index: Which shard; None: the data-parallel coordinate of this process.
        split_batches: False: each rank gets whole batches, every ``num_processes``-th. True: each
            batch is cut and each rank gets its piece; its size must be a multiple of
            ``num_processes``.
        put_on_device: Move each batch, any nesting; what is no tensor passes through.
        rng_types: Generators made equal to rank 0's at the start of each pass: "torch", "cuda",
            "xla", "generator", "numpy", "python".
        dispatch_batches: True: rank 0 reads and each rank receives its rows, see
            `DataLoaderDispatcher`. False: every rank reads its own part. None: True for a stream
            that is not known to be cut already, on more than one rank.
        even_batches: True: all ranks take the same number of full steps, padding from the start of
            the epoch. False: nothing is repeated, ranks may differ by a step.
        slice_fn_for_dispatch: Cuts each shard's rows out of a round of joined batches, as
            ``f(data, tensor_slice, process_index=..., num_processes=...)``. Has no effect without
            dispatching, which a warning says.
        use_seedable_sampler: Chooses the seed. True: ``data_seed``, else the ``initial_seed()`` of
            the user's generator, else rank 0's ``torch.initial_seed()``. False: that of the user's
            generator, else one draw of rank 0's torch RNG.
        data_seed: See ``use_seedable_sampler``; has no effect without it, which a warning says.
        non_blocking: Whether moves to the device may overlap with what comes after; with
            ``pin_memory`` and CUDA, one batch ahead on a stream of its own.
        use_stateful_dataloader: Read through torchdata's StatefulDataLoader, for data sets and
            workers with a state of their own. The loader must be a plain DataLoader.
        torch_device_mesh: A DeviceMesh; ranks that differ only in model axes read the same batches.
        tail: "pad", "drop", "uneven" or "exact" says what happens at the end, and wins over
            ``even_batches`` and the loader's ``drop_last``.
        already_sharded: True: the loader yields this rank's part, and is not cut again. None: found
            out for DistributedSampler, for `BatchSamplerShard` and `IterableDatasetShard`, and for
            Hugging Face streams from ``split_dataset_by_node``. A stream that reads its own rank
            cannot be seen.
        sync_order: For samplers whose order is not a function of (seed, epoch). "agree": the start
            of it is compared across ranks at each pass. "broadcast": rank 0's order is sent.
        data_axes: The mesh axes that divide the data, where their names do not tell.
        worker_split: Who divides a stream among workers: "shardplug", "dataset" (by
            ``get_worker_info()``), or "auto" to find out by watching.
        batches_per_message: Most batches that one message from a worker carries, at least 1.
        seed_samples: Seed the CPU generators of torch, numpy and python before each sample, from
            (seed, epoch, position): what the data set draws, in ``__getitem__`` or in iterating, is
            then the same on any number of ranks and workers, and after a resume. Items are read one
            by one. Without workers the generators of the process get their states back.
        comm: The ranks; None: those of this process.

    Returns:
        The prepared loader.

    Raises:
        PlanError: If an argument does not fit; before any data is read.
        CommError: If ranks were given different loaders, or another rank failed.
    """
    if isinstance(dataloader, PreparedLoader):
        return dataloader
    given = check_options(
        device=device,
        num_processes=num_processes,
        process_index=process_index,
        split_batches=split_batches,
        put_on_device=put_on_device,
        rng_types=rng_types,
        dispatch_batches=dispatch_batches,
        even_batches=even_batches,
        slice_fn_for_dispatch=slice_fn_for_dispatch,
        use_seedable_sampler=use_seedable_sampler,
        data_seed=data_seed,
        non_blocking=non_blocking,
        use_stateful_dataloader=use_stateful_dataloader,
        torch_device_mesh=torch_device_mesh,
        tail=tail,
        already_sharded=already_sharded,
        sync_order=sync_order,
        data_axes=data_axes,
        worker_split=worker_split,
        batches_per_message=batches_per_message,
        seed_samples=seed_samples,
        comm=comm,
    )
    ranks = current_comm() if comm is None else comm
    own = own_shard(ranks, torch_device_mesh, data_axes)
    shard = Shard(
        own.index if process_index is None else given["process_index"],
        own.count if num_processes is None else given["num_processes"],
    )
    is_simulation = shard != own
    options = Options(
        device=_choose_device(given["device"]) if put_on_device else None,
        slice_fn=slice_fn_for_dispatch,
        is_stateful=given["use_stateful_dataloader"],
        comm=comm,
        **{name: given[name] for name in _SAME},
    )
    is_dispatched = _is_dispatched(dispatch_batches, dataloader, options, is_simulation)
    _warn_of_no_effect(
        None if is_dispatched else slice_fn_for_dispatch, use_seedable_sampler, data_seed
    )
    if is_dispatched:
        return DataLoaderDispatcher.dispatching(dataloader, options, shard)

    def prepare() -> tuple[tuple[Feed, Settings], Sequence[int]]:
        loader = check_loader(dataloader, is_plain=use_stateful_dataloader)
        settings = replace(options, slice_fn=None).settings(loader, is_simulation=is_simulation)
        feed = options.feed(loader, shard, broadcast=None if is_simulation else ranks)
        _ = feed.plan  # raises where so many samples in batches of this size cannot be divided so
        num_samples = None if feed.is_cut else feed.num_samples
        facts = (
            settings.seed,
            -1 if num_samples is None else num_samples,
            feed.batch_size or 0,
            2 * list(Tail).index(feed.tail) + split_batches,
            shard.count,
        )
        return (feed, settings), facts

    (feed, settings), agreed = agree_on(
        SoloComm() if is_simulation else ranks, prepare, subject="the loader", facts=LOADER_FACTS
    )
    settings = replace(settings, seed=agreed[0])
    assert dataloader is not None  # it was checked
    return DataLoaderShard.over(dataloader, seeded(feed, settings.seed), settings)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a loader whose next pass starts after some steps; later passes are full.

    Every setting is kept. Orders that can be looked up jump, and nothing is loaded or transformed
    on the way; streams are read through without being collated or moved.

    Args:
        dataloader: A prepared loader, or a plain DataLoader, which stays as it is.
        num_batches: Steps of this loader to leave out, zero or more.

    Returns:
        The loader, of the same class unless it is a plain one over a stream; its ``len`` answers
        for its next pass, until that has begun.

    Raises:
        PlanError: If an argument does not fit.
    """
    loader = check_loader(dataloader, is_plain=False)
    check_count("num_batches", num_batches, least=0)
    if isinstance(loader, PreparedLoader):
        return loader.skipping(num_batches)
    if isinstance(loader.dataset, IterableDataset):
        settings = Settings(seed=draw_seed(), is_simulation=True)
        return DataLoaderShard.over(loader, whole_feed(loader), settings).skipping(num_batches)
    clone = copy.copy(loader)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    skipping = SkipBatchSampler(getattr(loader, name), num_batches, is_once=True)
    # A DataLoader refuses to have these set; a clone that has not iterated may take them.
    clone.__dict__.update({name: skipping, "_iterator": None})
    return clone


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


def _choose_device(device: torch.device | int | None) -> torch.device:
    return check_device("device", device) or local_device()


def _is_dispatched(
    dispatch_batches: bool | None, dataloader: Any, options: Options, is_simulation: bool
) -> bool:
    """Tell whether one rank is to read for all: streams, unless they are cut already.

    Raises:
        PlanError: If it cannot: each rank has a part of its own, or there are no ranks to send to.
    """
    if dispatch_batches is None:
        dataset = dataloader.dataset if isinstance(dataloader, DataLoader) else None
        is_cut = options.already_sharded
        if is_cut is None:
            is_cut = is_seen_cut(dataset)
        ranks = current_comm() if options.comm is None else options.comm
        is_alone = is_simulation or ranks.world_size == 1
        return isinstance(dataset, IterableDataset) and not is_cut and not is_alone
    if dispatch_batches and options.already_sharded:
        raise PlanError(
            "`already_sharded` must be False or None with dispatch_batches=True, got True: one "
            "rank reads for all. Leave one of them out."
        )
    if dispatch_batches and is_simulation:
        raise PlanError(
            "`dispatch_batches` must be False or None for a shard that is not this process's own, "
            "got True: nobody would send it. Leave num_processes and process_index out."
        )
    return bool(dispatch_batches)
