"""Skip these tests without Ignite, unless SHARDPLUG_NO_SKIP says that it must be there."""

from __future__ import annotations

import os

import pytest

if os.environ.get("SHARDPLUG_NO_SKIP"):
    import ignite  # noqa: F401  # missing: a failure
else:
    pytest.importorskip("ignite", reason="needs shardplug[ignite]")
