"""Decide which rank sees which sample, when, in distributed PyTorch training, and keep it true."""

from __future__ import annotations

from shardplug.comm import Comm, SoloComm
from shardplug.comm_torch import TorchComm, current_comm
from shardplug.engine import ShardEngine
from shardplug.errors import (
    BatchError,
    CommError,
    PlanError,
    ShardplugError,
    ShardplugWarning,
    StateError,
)
from shardplug.loader import DataLoaderShard
from shardplug.plan.shard import Shard
from shardplug.plan.split import ShardPlan, Split, Tail
from shardplug.prepare import prepare_data_loader, skip_first_batches
from shardplug.rows import slice_tensors
from shardplug.samplers import (
    BatchSamplerShard,
    PermutedSampler,
    SeedableRandomSampler,
    SkipBatchSampler,
)
from shardplug.streams import IterableDatasetShard

__all__ = [
    "BatchError",
    "BatchSamplerShard",
    "Comm",
    "CommError",
    "DataLoaderShard",
    "IterableDatasetShard",
    "PermutedSampler",
    "PlanError",
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
    "Tail",
    "TorchComm",
    "current_comm",
    "prepare_data_loader",
    "skip_first_batches",
    "slice_tensors",
]
