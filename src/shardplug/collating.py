"""torch's default collate function, into memory of batches that are gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from shardplug.spares import SMALLEST_BYTES, Spares


def can_collate(collate_fn: Callable[[Any], Any]) -> bool:
    """Tell whether a collate function is torch's own, so that `Collate` gives what it gives."""
    return collate_fn is default_collate


@final
class Collate:
    """Collates as ``default_collate`` does; large tensors get the memory of earlier ones.

    Args:
        num_kept: Batches whose memory is kept.
    """

    def __init__(self, num_kept: int) -> None:
        self._lock = threading.Condition(threading.RLock())
        self._spares = Spares(self._lock, num_kept=num_kept)
        self._functions = {**default_collate_fn_map, Tensor: self._stack}

    def __call__(self, samples: Any) -> Any:
        """Collate the samples of a batch."""
        return collate(samples, collate_fn_map=self._functions)

    def _stack(self, tensors: Sequence[Tensor], *, collate_fn_map: Any = None) -> Tensor:
        first = tensors[0]
        num_bytes = len(tensors) * first.numel() * first.element_size()
        if num_bytes < SMALLEST_BYTES or not all(_is_like(first, each) for each in tensors):
            stacked: Tensor = default_collate_fn_map[Tensor](tensors)
            return stacked
        with self._lock:
            (out,) = self._spares.empty([(first.dtype, (len(tensors), *first.shape))])
        return torch.stack(list(tensors), out=out)


def _is_like(first: Tensor, tensor: Tensor) -> bool:
    """Tell whether a tensor is a plain one on the host that stacks with the first."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_quantized
        and tensor.dtype == first.dtype
        and tensor.shape == first.shape
    )
