"""Data of an engine that is no DataLoader: its items are batches that are ready."""

from __future__ import annotations

from shardplug import ready_batches as loader_over

__all__ = ["loader_over"]
