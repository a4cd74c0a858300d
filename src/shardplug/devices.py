"""Batches on their way to a device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch

from shardplug.rows import map_leaves, move_to_device


def move_batches(
    batches: Iterator[Any], device: torch.device, *, non_blocking: bool
) -> Iterator[Any]:
    """Move each batch to a device, any nesting; what is no tensor passes through.

    With ``non_blocking`` and a CUDA device the copy of the next batch runs on a stream of its own
    beside the work on the current one, which needs page-locked memory (``pin_memory=True``).

    Args:
        batches: On the host.
        device: Where they go.
        non_blocking: Whether copies may overlap with what comes after.
    """
    if non_blocking and device.type == "cuda":
        return _copy_ahead(batches, device)
    return map(partial(move_to_device, device=device, non_blocking=non_blocking), batches)


def _copy_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Keep one copy under way while the batch before it is used."""
    copying = torch.cuda.Stream(device)

    def start(batch: Any) -> Any:
        with torch.cuda.stream(copying):
            return move_to_device(batch, device, non_blocking=True)

    coming = [start(batch) for batch in islice(batches, 1)]
    while coming:
        current = coming.pop()
        working = torch.cuda.current_stream(device)
        working.wait_stream(copying)
        # The allocator must not reuse the memory for the next copy while this stream reads it.
        map_leaves(partial(_keep_for, working), current)
        coming = [start(batch) for batch in islice(batches, 1)]
        yield current


def _keep_for(stream: torch.cuda.Stream, leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
        leaf.record_stream(stream)
    return leaf
