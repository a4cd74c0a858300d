"""`ShardEngine`: one object that knows the ranks of a run and prepares what a loop needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from shardplug.comm import Comm
from shardplug.comm_torch import current_comm, local_device, start_process_group
from shardplug.errors import PlanError
from shardplug.loader import DataLoaderShard
from shardplug.plan.shard import Shard
from shardplug.prepare import own_shard, prepare_data_loader
from shardplug.rng import check_rng_types
from shardplug.samplers import choose_tail


class ShardEngine:
    """The ranks of a run, and the options that its loaders share.

    Under torchrun it starts the process group if nobody has (NCCL on CUDA, gloo otherwise), and
    ends it at exit; alone it runs as a world of one, with no process group. Two engines in one
    process do not see each other.

    Collective: making one is, where it starts the process group.

    Args:
        split_batches: See `prepare_data_loader`, as for the following ones.
        even_batches: Whether all ranks take the same number of full steps.
        tail: Says outright what happens at the end of an epoch, and wins.
        rng_types: Generators made equal to rank 0's at the start of each pass.
        use_seedable_sampler: Chooses where the seed of the order comes from.
        data_seed: The seed of the order.
        non_blocking: Whether moves to the device may overlap with what comes after.
        torch_device_mesh: Ranks that differ only in its model axes read the same batches.
        data_axes: The mesh axes that divide the data, where their names do not tell.
        comm: The ranks; None: those of this process.

    Raises:
        PlanError: If an argument does not fit.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader
        >>> engine = ShardEngine(data_seed=0)
        >>> loader = engine.prepare(DataLoader(torch.arange(6), batch_size=2))
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3], [4, 5]]
    """

    def __init__(
        self,
        *,
        split_batches: bool = False,
        even_batches: bool = True,
        tail: str | None = None,
        rng_types: Sequence[str] | None = ("generator",),
        use_seedable_sampler: bool = True,
        data_seed: int | None = None,
        non_blocking: bool = False,
        torch_device_mesh: Any = None,
        data_axes: Sequence[str] | None = None,
        comm: Comm | None = None,
    ) -> None:
        choose_tail(tail, even_batches=even_batches, drop_last=False)
        check_rng_types(rng_types)
        if comm is None:
            start_process_group()
        self._comm = comm
        self._shard = own_shard(self._ranks(), torch_device_mesh, data_axes)
        self._options: dict[str, Any] = {
            "split_batches": split_batches,
            "even_batches": even_batches,
            "tail": tail,
            "rng_types": rng_types,
            "use_seedable_sampler": use_seedable_sampler,
            "data_seed": data_seed,
            "non_blocking": non_blocking,
            "torch_device_mesh": torch_device_mesh,
            "data_axes": data_axes,
            "comm": comm,
        }

    def _ranks(self) -> Comm:
        return current_comm() if self._comm is None else self._comm

    @property
    def rank(self) -> int:
        """This process's number in the run, from zero."""
        return self._ranks().rank

    @property
    def world_size(self) -> int:
        """How many processes the run has."""
        return self._ranks().world_size

    @property
    def shard(self) -> Shard:
        """Which part of the data this process reads, of how many."""
        return self._shard

    @property
    def device(self) -> torch.device:
        """The device of this process, where prepared loaders put their batches."""
        return local_device()

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one to print and write."""
        return self.rank == 0

    def prepare(self, *objects: Any) -> Any:
        """Prepare loaders, in any number.

        Batches of prepared loaders are put on `device`. Modules come back as they are: wrapping
        them in DDP or FSDP is the caller's line.

        Collective: every rank must call it with the same objects in the same order.

        Args:
            objects: DataLoaders and modules.

        Returns:
            What was prepared, in order; a single object if one was given.

        Raises:
            PlanError: If an object is of another kind, before anything is prepared.
        """
        for place, given in enumerate(objects):
            if not isinstance(given, (DataLoader, torch.nn.Module)):
                raise PlanError(
                    "`objects` must be DataLoaders or modules, got "
                    f"{type(given).__name__} as number {place + 1}."
                )
        prepared = tuple(
            self.prepare_loader(given) if isinstance(given, DataLoader) else given
            for given in objects
        )
        return prepared[0] if len(prepared) == 1 else prepared

    def prepare_loader(self, loader: DataLoader[Any], **options: Any) -> DataLoaderShard:
        """Prepare one loader, with options of its own.

        Collective: every rank must call it.

        Args:
            loader: The user's loader, the same on every rank.
            options: As for `prepare_data_loader`; they win over those of the engine.

        Raises:
            PlanError: If an argument does not fit.
            CommError: If ranks were given different loaders, or another rank failed.
        """
        chosen = {"device": self.device, "put_on_device": True, **self._options, **options}
        return prepare_data_loader(loader, **chosen)
