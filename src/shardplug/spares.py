"""Memory of batches that nobody uses any more, for the next ones.

Memory that is new to a process is first cleared by the system, page by page, which for a batch of
images costs more than to copy it; and an allocator keeps more of it than two batches.
"""

from __future__ import annotations

import math
import mmap
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

SMALLEST_BYTES = 1 << 20
"""Of a tensor that gets its memory here: below, the allocator does well enough."""
_NUM_BATCHES = 2  # one in use, one that lies ready


@final
class Spares:
    """Makes tensors, of the memory of those it has made before once they are gone.

    All calls are made with the lock of ``changed`` held, which is notified when memory gets free.
    """

    def __init__(self, changed: threading.Condition, *, num_kept: int = _NUM_BATCHES) -> None:
        """Start without any.

        Args:
            changed: Its lock must be reentrant: a tensor may go at any time, in any thread.
            num_kept: Batches whose memory is kept, in use or not; more is given back when let go.
        """
        self._changed = changed
        self._num_kept = num_kept
        self._spare: list[mmap.mmap] = []
        self._used: dict[int, tuple[mmap.mmap, weakref.ref[memoryview]]] = {}
        self._num_made = 0
        self._num_batches = _NUM_BATCHES
        self._batch_bytes = 0

    def has_room(self, sizes: Sequence[int]) -> bool:
        """Tell whether the tensors of a batch can be made beside those in use.

        Args:
            sizes: Of its tensors, in bytes.
        """
        wanted = sum(size for size in sizes if size >= SMALLEST_BYTES)
        return self._used_bytes() + wanted <= self._num_batches * max(wanted, self._batch_bytes)

    def expect_more(self) -> None:
        """Note that the batches in use are kept, while the next is waited for."""
        self._num_batches += 1

    def empty(self, kinds: Sequence[tuple[torch.dtype, Sequence[int]]]) -> list[Tensor]:
        """Make the tensors of one batch; their values are left as they come.

        Args:
            kinds: Of each tensor, dtype and shape.
        """
        sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in kinds]
        self._batch_bytes = sum(size for size in sizes if size >= SMALLEST_BYTES)
        return [
            torch.empty(shape, dtype=dtype)
            if size < SMALLEST_BYTES
            else torch.frombuffer(self._take(size), dtype=dtype).view(shape)
            for (dtype, shape), size in zip(kinds, sizes, strict=True)
        ]

    def _take(self, num_bytes: int) -> memoryview:
        for each in self._spare:
            if len(each) == num_bytes:
                self._spare.remove(each)
                memory = each
                break
        else:
            self._spare.clear()  # of another size
            memory = _new_memory(num_bytes)
        view = memoryview(memory)  # lives as long as a tensor has the memory
        self._num_made += 1
        number = self._num_made
        self._used[number] = memory, weakref.ref(view, lambda _: self._free(number))
        return view

    def _used_bytes(self) -> int:
        return sum(len(memory) for memory, _ in self._used.values())

    def _free(self, number: int) -> None:
        with self._changed:
            memory, _ = self._used.pop(number)
            held = self._used_bytes() + sum(map(len, self._spare))
            if held + len(memory) <= self._num_kept * self._batch_bytes:
                self._spare.append(memory)
            self._changed.notify_all()


def _new_memory(num_bytes: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, num_bytes)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
