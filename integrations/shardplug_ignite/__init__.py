"""shardplug in PyTorch-Ignite: ``ShardHandler().attach(trainer)``."""

from __future__ import annotations

try:
    import ignite.engine  # noqa: F401
except ImportError as error:
    raise ImportError(
        "shardplug_ignite needs PyTorch-Ignite: pip install 'shardplug[ignite]'"
    ) from error

from shardplug_ignite.handler import ShardHandler
from shardplug_ignite.metrics import evened
from shardplug_ignite.progress import ShardProgress

__all__ = ["ShardHandler", "ShardProgress", "evened"]
