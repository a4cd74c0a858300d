"""Memory that two processes of a host share, without a name that could be left behind."""

from __future__ import annotations

import mmap
import os


def reserve(num_bytes: int) -> int:
    """Make a piece of shared memory that is there in full, not only promised.

    Memory that is merely promised ends the process that first writes to it where there is not
    enough; a piece that is reserved says so here. It has no name: it is gone with the last process
    that has it open or mapped, however that ends. Linux only.

    Args:
        num_bytes: Its size, positive.

    Returns:
        A file descriptor, for `map_memory` and to pass to another process.

    Raises:
        OSError: If there is not enough memory.
    """
    descriptor = os.memfd_create("shardplug")
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def map_memory(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Map shared memory; it is unmapped with the last reference to the result.

    Args:
        descriptor: From `reserve`, here or in another process; it may be closed afterwards.
        num_bytes: The size it was reserved with.

    Raises:
        OSError: If there is no room for it.
    """
    return mmap.mmap(descriptor, num_bytes)
