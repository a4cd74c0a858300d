"""How a user's loader is divided: what is asked for, the feed that comes of it, the seed.

Both loaders begin here, so that dispatching never changes who sees what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from shardplug.comm import Comm
from shardplug.comm_torch import mesh_coordinate
from shardplug.errors import PlanError
from shardplug.feeds import (
    BroadcastBatches,
    BroadcastSampler,
    Feed,
    IndexFeed,
    find_cut,
    find_generator,
    find_seed,
    follows_seed,
)
from shardplug.plan.shard import Shard, shard_on_mesh
from shardplug.plan.split import Split, Tail, choose_tail
from shardplug.prepared import Settings
from shardplug.rng import draw_seed, signed_seed
from shardplug.samplers import BatchSamplerShard, is_plain
from shardplug.streams import (
    IterableDatasetShard,
    StreamFeed,
    is_cut_by_node,
    own_part,
    splits_by_worker,
)
from shardplug.worker_info import WorkerSplit, check_worker_split

LOADER_FACTS: dict[str, str | None] = {
    "seed": None,  # rank 0's is taken
    "number of samples": "Give every rank the same data set, or pass already_sharded=True.",
    "batch size": "Prepare the same loader on every rank.",
    "way batches are divided": "Pass the same options on every rank.",
    "number of shards": "Pass the same num_processes or mesh on every rank.",
}
"""What ranks compare when a loader is prepared, and what to do where they differ."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is asked for a loader, checked; see `shardplug.prepare_data_loader`.

    Attributes:
        device: Where batches are moved, None to leave them.
        rng_types: Generators made equal to rank 0's at the start of each pass.
        split_batches: Whether each batch is cut.
        even_batches: Whether all ranks take the same number of full steps.
        tail: Says outright what happens at the end; None: see ``even_batches``.
        use_seedable_sampler: Chooses where the seed comes from.
        data_seed: The seed, with ``use_seedable_sampler``.
        already_sharded: Whether the loader yields this rank's part; None to find out.
        sync_order: Whether orders are compared or sent: "agree" or "broadcast".
        worker_split: Who divides a stream among workers.
        non_blocking: Whether moves may overlap with what comes after.
        is_stateful: Whether readers run in torchdata's StatefulDataLoader.
        batches_per_message: Most batches that one message from a worker carries.
        seed_samples: Whether readers seed before each sample.
        skip_batches: Steps left out at the start of each pass.
        slice_fn: Cuts the rows of each shard out of a round; None: batches go out as they are.
        comm: The ranks; None: those of the process at the time.
    """

    device: torch.device | None = None
    rng_types: Sequence[str] | None = None
    split_batches: bool = False
    even_batches: bool = True
    tail: str | None = None
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    already_sharded: bool | None = None
    sync_order: str = "agree"
    worker_split: str = "auto"
    non_blocking: bool = False
    is_stateful: bool = False
    batches_per_message: int = 1
    seed_samples: bool = False
    skip_batches: int = 0
    slice_fn: Callable[..., Any] | None = None
    comm: Comm | None = None

    def settings(self, loader: DataLoader[Any] | None, *, is_simulation: bool = False) -> Settings:
        """Choose this rank's seed; nothing here needs the data.

        Args:
            loader: The user's; None on a rank that has none.
            is_simulation: Whether there is nobody to agree with.
        """
        seed, is_pinned = choose_seed(
            loader,
            self.data_seed if self.use_seedable_sampler else None,
            self.use_seedable_sampler,
        )
        return Settings(
            seed=seed,
            is_seed_pinned=is_pinned,
            device=self.device,
            non_blocking=self.non_blocking,
            rng_types=tuple(self.rng_types or ()),
            generator=None if loader is None else find_generator(loader),
            skip_batches=self.skip_batches,
            is_stateful=self.is_stateful or isinstance(loader, StatefulDataLoader),
            per_message=self.batches_per_message,
            seeds_samples=self.seed_samples,
            is_simulation=is_simulation,
            slice_fn=self.slice_fn,
            comm=self.comm,
        )

    def feed(
        self,
        loader: DataLoader[Any],
        shard: Shard,
        *,
        broadcast: Comm | None = None,
        is_dispatched: bool = False,
    ) -> Feed:
        """Make the feed of a loader.

        Args:
            loader: The user's.
            shard: Which part, of how many.
            broadcast: The ranks, if they may follow rank 0's order.
            is_dispatched: Whether one rank reads for all.

        Raises:
            PlanError: If its batches cannot be divided so.
        """
        return make_feed(
            loader,
            Division(
                shard=shard,
                split=Split.SLICE if self.split_batches else Split.WHOLE,
                tail=choose_tail(
                    self.tail, even_batches=self.even_batches, drop_last=_drops_last(loader)
                ),
                already_sharded=self.already_sharded,
                broadcast=broadcast if self.sync_order == "broadcast" else None,
                worker_split=check_worker_split(self.worker_split),
                is_dispatched=is_dispatched,
            ),
        )


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
        is_dispatched: Whether one rank reads for all.
    """

    shard: Shard
    split: Split
    tail: Tail
    already_sharded: bool | None
    broadcast: Comm | None
    worker_split: WorkerSplit
    is_dispatched: bool = False


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
    if cut is not None and division.is_dispatched:
        raise _cut_before(type(getattr(source, "sampler", source)).__name__)
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
        is_cut = is_seen_cut(dataset)
    if is_cut and division.is_dispatched:
        raise _cut_before(type(dataset).__name__)
    if not is_cut and tail is not Tail.EXACT and not division.is_dispatched:
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


def _cut_before(by: str) -> PlanError:
    return PlanError(
        "`dispatch_batches` must be False for data that is cut for each rank already, got True for "
        f"that of {by}. Give the reading rank all of the data, or leave dispatch_batches out."
    )


def is_seen_cut(dataset: Any) -> bool:
    """Tell whether a stream is of a kind that is known to be one rank's part."""
    return is_cut_by_node(dataset) or _is_cut_by_us(dataset)


def _is_cut_by_us(dataset: Any) -> bool:
    return isinstance(dataset, IterableDatasetShard) and dataset.num_processes > 1


def _broadcast(source: Any, comm: Comm) -> Any:
    if is_plain(source):
        sampler = BroadcastSampler(source.sampler, comm)
        return BatchSampler(sampler, source.batch_size, source.drop_last)
    return BroadcastBatches(source, comm)


def _drops_last(loader: DataLoader[Any]) -> bool:
    return bool(loader.drop_last or getattr(loader.batch_sampler, "drop_last", False))


def check_loader(dataloader: Any, *, is_plain: bool) -> DataLoader[Any]:
    """Check that something is a loader, and a plain one if it has to be.

    Raises:
        PlanError: If it is not.
    """
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


def choose_seed(
    loader: DataLoader[Any] | None, data_seed: int | None, use_seedable: bool
) -> tuple[int, bool]:
    """Choose this rank's seed, as a signed 64-bit number; rank 0's is the one that counts.

    Also tells whether it is the user's choice, so that no state may bring another one.
    """
    chosen = data_seed
    if chosen is None and loader is not None:
        chosen = find_seed(loader)
    if chosen is not None:
        return signed_seed(chosen), True
    return signed_seed(torch.initial_seed() if use_seedable else draw_seed()), False
