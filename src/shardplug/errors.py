"""Every exception that shardplug raises on purpose.

Each class has two parents: `ShardplugError`, to catch all of them at once, and the built-in that
a caller would expect in its place.
"""

from __future__ import annotations


class ShardplugError(Exception):
    """Base of all errors that shardplug raises on purpose."""


class PlanError(ShardplugError, ValueError):
    """The data cannot be divided as asked: a size, a count, a mode or a loader does not fit."""


class BatchError(ShardplugError, ValueError):
    """A batch cannot be measured, cut, joined or moved."""


class StateError(ShardplugError, ValueError):
    """A saved state does not fit the object that it is loaded into."""


class CommError(ShardplugError, RuntimeError):
    """Ranks disagree, or another rank failed."""


class ShardplugWarning(UserWarning):
    """An argument has no effect, or a result is not what the caller may believe."""
