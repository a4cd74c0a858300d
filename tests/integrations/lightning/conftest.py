"""Skip these tests without Lightning, unless SHARDPLUG_NO_SKIP says that it must be there."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist

if os.environ.get("SHARDPLUG_NO_SKIP"):
    import lightning  # noqa: F401  # missing: a failure
else:
    pytest.importorskip("lightning", reason="needs shardplug[lightning]")


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    """End the process group: a Trainer leaves it open until the interpreter ends."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
