"""The strategies: Lightning's own, with loaders that read their shard of every epoch."""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    StrategyRegistry,
)
from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: TID251  # for its keywords
from torch.nn.parallel import DistributedDataParallel

from shardplug import Comm, PlanError, SoloComm
from shardplug_lightning.mixin import ShardStrategyMixin
from shardplug_lightning.options import keywords_of


class ShardStrategy(ShardStrategyMixin, DDPStrategy):
    """Train with DistributedDataParallel on sharded loaders.

    Takes the options of `ShardStrategyMixin`, and by keyword all those of Lightning's
    ``DDPStrategy`` and torch's ``DistributedDataParallel``. A single process starts no others; in a
    notebook processes are forked.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(
        ...     strategy=ShardStrategy(data_seed=1),
        ...     accelerator="cpu",
        ...     devices=2,
        ...     logger=False,
        ...     enable_checkpointing=False,
        ... )
        >>> trainer.strategy.shard_options.evaluation_tail
        'exact'
    """

    strategy_name = "shard"
    # Lightning fills in the two arguments of DistributedDataParallel that are left out.
    _passed_on = keywords_of(DDPStrategy, DistributedDataParallel) - {"module", "device_ids"}

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make the strategy known by its names; names that are taken are left alone.

        Args:
            strategy_registry: Lightning's registry.
        """
        for name, start_method in _START_METHODS.items():
            text = f"Sharded DDP strategy with `start_method` '{start_method}'"
            _register(strategy_registry, name, cls, text, start_method=start_method)

    def _configure_launcher(self) -> None:
        if self.num_nodes * self.num_processes == 1:
            self._launcher = None
            return
        if self._start_method == "popen" and _is_interactive():
            self._start_method = "fork"  # there is no script to start again
        super()._configure_launcher()


class ShardSingleDeviceStrategy(ShardStrategyMixin, SingleDeviceStrategy):
    """Train on one device in this process, with loaders that can go on where they were.

    For devices that Lightning does not train on in parallel, as MPS. Takes the options of
    `ShardStrategyMixin` and of Lightning's ``SingleDeviceStrategy``: ``device="mps"``.
    """

    strategy_name = "shard_single_device"
    _passed_on = keywords_of(SingleDeviceStrategy)
    # Lightning tells the devices that a trainer was asked for to whoever has this.
    parallel_devices: list[Any] | None = None

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make the strategy known by its name; one that is taken is left alone.

        Args:
            strategy_registry: Lightning's registry.
        """
        _register(strategy_registry, cls.strategy_name, cls, "Sharded strategy for one device")

    def connect(self, model: LightningModule) -> None:
        """Take the model.

        Raises:
            PlanError: If the trainer was told to use several devices.
        """
        asked = len(self.parallel_devices or ()) * model.trainer.num_nodes
        if asked > 1:
            raise PlanError(
                f"`devices` must be 1 for {type(self).__name__}, got {asked} in all. Pass "
                "strategy=ShardStrategy(), or devices=1."
            )
        super().connect(model)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what this one rank has.

        Args:
            tensor: That.
            args: Are for several ranks.
            kwargs: The same.
        """
        return tensor

    def _comm(self) -> Comm:
        return SoloComm()


class ShardFSDPStrategy(ShardStrategyMixin, FSDPStrategy):
    """Train with FullyShardedDataParallel on sharded loaders.

    Takes the options of `ShardStrategyMixin`, and by keyword all those of Lightning's
    ``FSDPStrategy`` and torch's ``FullyShardedDataParallel``. Ranks forward in step, so that
    ``evaluation_tail`` cannot be "uneven".
    """

    strategy_name = "shard_fsdp"
    _is_in_step = True
    _passed_on = keywords_of(FSDPStrategy, FullyShardedDataParallel) - {"module", "device_id"}

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make the strategy known by its names; names that are taken are left alone.

        Args:
            strategy_registry: Lightning's registry.
        """
        _register(strategy_registry, "shard_fsdp", cls, "Sharded FSDP strategy")
        text = "Sharded FSDP strategy with parameters offloaded to CPUs"
        _register(strategy_registry, "shard_fsdp_cpu_offload", cls, text, cpu_offload=True)

    def connect(self, model: LightningModule) -> None:
        """Take the model.

        Raises:
            PlanError: If the trainer is to train on CPUs, which Lightning refuses by the name of
                its own class only.
        """
        if self.root_device.type == "cpu":
            raise PlanError(
                f"`accelerator` must be one that has devices for {type(self).__name__}, got CPUs. "
                "Pass strategy=ShardStrategy(), or ShardModelParallelStrategy()."
            )
        super().connect(model)


class ShardModelParallelStrategy(ShardStrategyMixin, ModelParallelStrategy):
    """Train a module that parallelises itself in ``configure_model``, on sharded loaders.

    Ranks that hold parts of one copy of the model (``tensor_parallel_size``) read the same batches.
    Takes the options of `ShardStrategyMixin` and of Lightning's ``ModelParallelStrategy``. Ranks
    forward in step, so that ``evaluation_tail`` cannot be "uneven".
    """

    strategy_name = "shard_model_parallel"
    _is_in_step = True
    _passed_on = keywords_of(ModelParallelStrategy)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make the strategy known by its name; one that is taken is left alone.

        Args:
            strategy_registry: Lightning's registry.
        """
        _register(strategy_registry, cls.strategy_name, cls, "Sharded model-parallel strategy")

    def _mesh(self) -> Any:
        return self.device_mesh


_START_METHODS = {
    "shard": "popen",
    "shard_spawn": "spawn",
    "shard_fork": "fork",
    "shard_notebook": "fork",
}


def register() -> None:
    """Make ``Trainer(strategy="shard")`` and its kin known to Lightning; done on import."""
    kinds = (
        ShardStrategy,
        ShardSingleDeviceStrategy,
        ShardFSDPStrategy,
        ShardModelParallelStrategy,
    )
    for kind in kinds:
        kind.register_strategies(StrategyRegistry)


def _register(registry: Any, name: str, kind: type, description: str, **options: Any) -> None:
    if name not in registry:
        registry.register(name, kind, description=description, **options)


def _is_interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)
