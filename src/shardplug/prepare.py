"""From a user's DataLoader to one that reads its shard."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from shardplug.comm import Comm, SoloComm, agree_on
from shardplug.comm_torch import current_comm, local_device, mesh_coordinate
from shardplug.errors import PlanError, ShardplugWarning
from shardplug.feeds import (
    BroadcastBatches,
    BroadcastSampler,
    Feed,
    IndexFeed,
    find_cut,
    find_generator,
    find_seed,
    follows_seed,
    seeded,
)
from shardplug.loader import DataLoaderShard, whole_feed
from shardplug.plan.shard import Shard, shard_on_mesh
from shardplug.plan.split import Split, Tail
from shardplug.prepared import PreparedLoader, Settings, check_count
from shardplug.rng import check_rng_types, draw_seed, signed_seed
from shardplug.samplers import (
    BatchSamplerShard,
    SkipBatchSampler,
    choose_tail,
    is_plain,
)
from shardplug.streams import (
    IterableDatasetShard,
    StreamFeed,
    is_cut_by_node,
    own_part,
    splits_by_worker,
)
from shardplug.worker_info import WorkerSplit, check_worker_split

_LOADER_FACTS: dict[str, str | None] = {
    "seed": None,  # rank 0's is taken
    "number of samples": "Give every rank the same data set, or pass already_sharded=True.",
    "batch size": "Prepare the same loader on every rank.",
    "way batches are divided": "Pass the same options on every rank.",
    "number of shards": "Pass the same num_processes or mesh on every rank.",
}


def prepare_data_loader(  # noqa: PLR0917  # these names and their order are Accelerate's
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
    epoch is a function of (seed, epoch), agreed across ranks by value. A loader that was prepared
    before comes back as it is.

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
    if dispatch_batches:
        raise PlanError(
            "`dispatch_batches` must be False or None, got True. Leave it out: each rank reads its "
            "own part."
        )
    ranks = current_comm() if comm is None else comm
    own = own_shard(ranks, torch_device_mesh, data_axes)
    shard = Shard(
        own.index if process_index is None else process_index,
        own.count if num_processes is None else num_processes,
    )
    is_simulation = shard != own
    _warn_of_no_effect(slice_fn_for_dispatch, use_seedable_sampler, data_seed)

    def prepare() -> tuple[tuple[Feed, Settings], Sequence[int]]:
        loader = _check_loader(dataloader, is_plain=use_stateful_dataloader)
        seed, is_pinned = _choose_seed(
            loader, data_seed if use_seedable_sampler else None, use_seedable_sampler
        )
        feed = make_feed(
            loader,
            Division(
                shard=shard,
                split=Split.SLICE if split_batches else Split.WHOLE,
                tail=choose_tail(tail, even_batches=even_batches, drop_last=_drops_last(loader)),
                already_sharded=already_sharded,
                broadcast=ranks if _is_broadcast(sync_order) and not is_simulation else None,
                worker_split=check_worker_split(worker_split),
            ),
        )
        settings = Settings(
            seed=seed,
            is_seed_pinned=is_pinned,
            device=_choose_device(device) if put_on_device else None,
            non_blocking=non_blocking,
            rng_types=check_rng_types(rng_types),
            generator=find_generator(loader),
            is_stateful=use_stateful_dataloader or isinstance(loader, StatefulDataLoader),
            per_message=check_count("batches_per_message", batches_per_message, least=1),
            seeds_samples=seed_samples,
            is_simulation=is_simulation,
            comm=comm,
        )
        _ = feed.plan  # raises where so many samples in batches of this size cannot be divided so
        num_samples = None if feed.is_cut else feed.num_samples
        facts = (
            seed,
            -1 if num_samples is None else num_samples,
            feed.batch_size or 0,
            2 * list(Tail).index(feed.tail) + split_batches,
            shard.count,
        )
        return (feed, settings), facts

    (feed, settings), agreed = agree_on(
        SoloComm() if is_simulation else ranks, prepare, subject="the loader", facts=_LOADER_FACTS
    )
    settings = replace(settings, seed=agreed[0])
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
    loader = _check_loader(dataloader, is_plain=False)
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


def own_shard(comm: Comm, mesh: Any, data_axes: Sequence[str] | None) -> Shard:
    """Find this process's part: its place on the data axes of the mesh, else its rank."""
    if mesh is None:
        if data_axes is not None:
            raise PlanError(
                f"`data_axes` must come with a mesh, got {tuple(data_axes)} without one. "
                "Pass torch_device_mesh, or leave it out."
            )
        return Shard(comm.rank, comm.world_size)
    axes, sizes, coordinate = mesh_coordinate(mesh)
    return shard_on_mesh(axes, sizes, coordinate=coordinate, data_axes=data_axes)


@dataclass(frozen=True, slots=True)
class Division:
    """How a loader's data is to be divided.

    Attributes:
        shard: Which part, of how many.
        split: How batches are divided.
        tail: What happens at an uneven end.
        already_sharded: Whether the loader yields this rank's part; None to find out.
        broadcast: The ranks, if they follow rank 0's order; None if each draws its own.
        worker_split: Who divides a stream among workers.
    """

    shard: Shard
    split: Split
    tail: Tail
    already_sharded: bool | None
    broadcast: Comm | None
    worker_split: WorkerSplit


def make_feed(loader: DataLoader[Any], division: Division) -> Feed:
    """Make the feed of a loader.

    Raises:
        PlanError: If its batches cannot be divided so.
    """
    if isinstance(loader.dataset, IterableDataset):
        return _stream_feed(loader, division)
    is_ready = loader.batch_sampler is None
    source: Any = BatchSampler(loader.sampler, 1, False) if is_ready else loader.batch_sampler
    cut = find_cut(source, already_sharded=division.already_sharded, shard=division.shard)
    if cut is not None and isinstance(source, BatchSamplerShard) and source.num_processes > 1:
        return IndexFeed(source)  # it cuts as we would, and knows its padding
    if cut is not None:
        tail = Tail.DROP if division.tail is Tail.DROP else Tail.UNEVEN
        return IndexFeed(BatchSamplerShard(source, tail=tail), is_ready, cut)
    if is_ready and division.split is Split.SLICE:
        raise PlanError(
            "`batch_size` must be set for batches to be split, got None. Pass split_batches=False."
        )
    if division.broadcast is not None and not follows_seed(source):
        source = _broadcast(source, division.broadcast)
    shard, tail = division.shard, division.tail
    if shard.count == 1 and tail is Tail.PAD:
        tail = Tail.UNEVEN  # alone there is nobody to be even with
    split = division.split is Split.SLICE
    return IndexFeed(
        BatchSamplerShard(source, shard.count, shard.index, split, tail=tail), is_ready
    )


def _stream_feed(loader: DataLoader[Any], division: Division) -> Feed:
    dataset, shard, tail = loader.dataset, division.shard, division.tail
    if loader.batch_size is None and division.split is Split.SLICE:
        raise PlanError(
            "`batch_size` must be set for batches to be split, got None. Pass split_batches=False."
        )
    is_cut = division.already_sharded
    if is_cut is None:
        is_cut = is_cut_by_node(dataset) or _is_cut_by_us(dataset)
    if not is_cut and tail is not Tail.EXACT:
        part = own_part(dataset, shard)
        if part is not None:
            dataset, is_cut = part, True
    if shard.count == 1 and tail is Tail.PAD:
        tail = Tail.UNEVEN
    worker_split = division.worker_split
    if isinstance(dataset, IterableDatasetShard) or (
        worker_split == "auto" and splits_by_worker(dataset)
    ):
        worker_split = "dataset"
    feed = StreamFeed(
        dataset=dataset,
        batch_size=loader.batch_size,
        shard=shard,
        split=division.split,
        tail=tail,
        is_cut=is_cut,
        worker_split=worker_split,
        num_workers=loader.num_workers,
    )
    _ = feed.plan  # raises where batches of this size cannot be divided so
    return feed


def _is_cut_by_us(dataset: Any) -> bool:
    return isinstance(dataset, IterableDatasetShard) and dataset.num_processes > 1


def _broadcast(source: Any, comm: Comm) -> Any:
    if is_plain(source):
        sampler = BroadcastSampler(source.sampler, comm)
        return BatchSampler(sampler, source.batch_size, source.drop_last)
    return BroadcastBatches(source, comm)


def _drops_last(loader: DataLoader[Any]) -> bool:
    return bool(loader.drop_last or getattr(loader.batch_sampler, "drop_last", False))


def _check_loader(dataloader: Any, *, is_plain: bool) -> DataLoader[Any]:
    if not isinstance(dataloader, DataLoader):
        raise PlanError(
            "`dataloader` must be a torch.utils.data.DataLoader, got "
            f"{type(dataloader).__name__}. Wrap the data in one."
        )
    if is_plain and type(dataloader) not in (DataLoader, StatefulDataLoader):
        raise PlanError(
            "`dataloader` must be a plain DataLoader with use_stateful_dataloader=True, got "
            f"{type(dataloader).__name__}: a subclass cannot be made into a stateful one. "
            "Pass a DataLoader, or leave use_stateful_dataloader out."
        )
    return dataloader


def _is_broadcast(sync_order: str) -> bool:
    if sync_order not in ("agree", "broadcast"):
        raise PlanError(f'`sync_order` must be "agree" or "broadcast", got {sync_order!r}.')
    return sync_order == "broadcast"


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


def _choose_seed(
    loader: DataLoader[Any], data_seed: int | None, use_seedable: bool
) -> tuple[int, bool]:
    """Choose this rank's seed, as a signed 64-bit number; rank 0's is the one that counts.

    Also tells whether it is the user's choice, so that no state may bring another one.
    """
    chosen = find_seed(loader) if data_seed is None else data_seed
    if chosen is not None:
        return signed_seed(chosen), True
    return signed_seed(torch.initial_seed() if use_seedable else draw_seed()), False


def _choose_device(device: torch.device | str | int | None) -> torch.device:
    return local_device() if device is None else torch.device(device)
