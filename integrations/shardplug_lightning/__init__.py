"""shardplug in PyTorch Lightning: ``Trainer(strategy=ShardStrategy())``.

Importing this package also makes the strategy known by name, ``Trainer(strategy="shard")``.
"""

from __future__ import annotations

try:
    import lightning.pytorch  # noqa: F401
except ImportError as error:
    raise ImportError(
        "shardplug_lightning needs Lightning: pip install 'shardplug[lightning]'"
    ) from error

from shardplug_lightning.mixin import ShardStrategyMixin
from shardplug_lightning.monitor import ShardMonitor
from shardplug_lightning.options import OptionError, ShardOptions
from shardplug_lightning.strategies import (
    ShardFSDPStrategy,
    ShardModelParallelStrategy,
    ShardSingleDeviceStrategy,
    ShardStrategy,
    register,
)
from shardplug_lightning.views import DispatcherView, LoaderView, ShardView

__all__ = [
    "DispatcherView",
    "LoaderView",
    "OptionError",
    "ShardFSDPStrategy",
    "ShardModelParallelStrategy",
    "ShardMonitor",
    "ShardOptions",
    "ShardSingleDeviceStrategy",
    "ShardStrategy",
    "ShardStrategyMixin",
    "ShardView",
    "register",
]

register()
