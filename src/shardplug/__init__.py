"""Decide which rank sees which sample, when, in distributed PyTorch training, and keep it true."""

from __future__ import annotations

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
