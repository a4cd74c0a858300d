"""Decide which rank sees which sample, when, in distributed PyTorch training, and keep it true."""

from __future__ import annotations

import importlib
import typing

if typing.TYPE_CHECKING:  # pragma: no cover
    from shardplug.agree import gather, gather_for_metrics, set_seed, synchronize_rng_states
    from shardplug.comm import Comm, SoloComm
    from shardplug.comm_torch import TorchComm, current_comm
    from shardplug.dispatch import DataLoaderDispatcher
    from shardplug.engine import ShardEngine
    from shardplug.errors import (
        BatchError,
        CommError,
        PlanError,
        ShardplugError,
        ShardplugWarning,
        StateError,
    )
    from shardplug.items import ready_batches
    from shardplug.loader import DataLoaderShard
    from shardplug.optimizer import ScalerAwareOptimizer
    from shardplug.options import check_options
    from shardplug.plan.shard import Shard
    from shardplug.plan.split import ShardPlan, Split, Tail
    from shardplug.plan.window import StepKind, StepOutcome
    from shardplug.prepare import prepare_data_loader, skip_first_batches
    from shardplug.rows import slice_tensors
    from shardplug.samplers import (
        BatchSamplerShard,
        PermutedSampler,
        SeedableRandomSampler,
        SkipBatchSampler,
    )
    from shardplug.scheduler import StepSyncedScheduler
    from shardplug.streams import IterableDatasetShard
    from shardplug.sync_point import SyncPoint

__all__ = [
    "BatchError",
    "BatchSamplerShard",
    "Comm",
    "CommError",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "IterableDatasetShard",
    "PermutedSampler",
    "PlanError",
    "ScalerAwareOptimizer",
    "SeedableRandomSampler",
    "Shard",
    "ShardEngine",
    "ShardPlan",
    "ShardplugError",
    "ShardplugWarning",
    "SkipBatchSampler",
    "SoloComm",
    "Split",
    "StateError",
    "StepKind",
    "StepOutcome",
    "StepSyncedScheduler",
    "SyncPoint",
    "Tail",
    "TorchComm",
    "check_options",
    "current_comm",
    "gather",
    "gather_for_metrics",
    "prepare_data_loader",
    "ready_batches",
    "set_seed",
    "skip_first_batches",
    "slice_tensors",
    "synchronize_rng_states",
]

_HOMES = {
    "BatchError": "errors",
    "BatchSamplerShard": "samplers",
    "Comm": "comm",
    "CommError": "errors",
    "DataLoaderDispatcher": "dispatch",
    "DataLoaderShard": "loader",
    "IterableDatasetShard": "streams",
    "PermutedSampler": "samplers",
    "PlanError": "errors",
    "ScalerAwareOptimizer": "optimizer",
    "SeedableRandomSampler": "samplers",
    "Shard": "plan.shard",
    "ShardEngine": "engine",
    "ShardPlan": "plan.split",
    "ShardplugError": "errors",
    "ShardplugWarning": "errors",
    "SkipBatchSampler": "samplers",
    "SoloComm": "comm",
    "Split": "plan.split",
    "StateError": "errors",
    "StepKind": "plan.window",
    "StepOutcome": "plan.window",
    "StepSyncedScheduler": "scheduler",
    "SyncPoint": "sync_point",
    "Tail": "plan.split",
    "TorchComm": "comm_torch",
    "check_options": "options",
    "current_comm": "comm_torch",
    "gather": "agree",
    "gather_for_metrics": "agree",
    "prepare_data_loader": "prepare",
    "ready_batches": "items",
    "set_seed": "agree",
    "skip_first_batches": "prepare",
    "slice_tensors": "rows",
    "synchronize_rng_states": "agree",
}
"""The module of each name."""

if not typing.TYPE_CHECKING:  # or a name that is not there would be no error to a type checker

    def __getattr__(name: str) -> object:
        """Import what is asked for the first time: the plan rooms do without torch."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        """List what is there and what can be asked for."""
        return sorted({*globals(), *__all__})
