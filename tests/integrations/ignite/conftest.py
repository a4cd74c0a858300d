"""Skip these tests without Ignite, unless SHARDPLUG_NO_SKIP says that it must be there."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest

if os.environ.get("SHARDPLUG_NO_SKIP"):
    import ignite  # noqa: F401  # missing: a failure
else:
    pytest.importorskip("ignite", reason="needs shardplug[ignite]")


@pytest.fixture(scope="session", autouse=True)
def only_what_is_new_is_collected() -> None:
    """Let collections pass over what was imported: they take a second otherwise."""
    gc.freeze()


@pytest.fixture(autouse=True)
def no_engine_left() -> Iterator[None]:
    """Collect engines, which form cycles, and with them the threads of their loaders."""
    yield
    if any(thread.name.startswith("shardplug") for thread in threading.enumerate()):
        gc.collect()
