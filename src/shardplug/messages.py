"""What passes between the rank that reads and one that receives: heads, and how errors travel."""

from __future__ import annotations

import pickle
import struct
import traceback
from typing import NamedTuple

from shardplug.errors import CommError

INLINE, SLOT, STREAM, FAILURE = range(4)

NUM_SLOTS = 2
"""Pieces of memory that the reader shares with each rank of its host; they are used in turn."""
"""Where the pieces of a parcel are: behind the head in one block, in shared memory, or behind the
head one by one. A failure has none."""

TAKEN, ROOM = b"t", b"r"
"""What a receiver answers: a parcel was taken out; the next message will be read at once."""


class InterruptError(Exception):
    """A call was given up: `Channel.interrupt`, a new pass, or the end of the channel."""


class Head(NamedTuple):
    """The first bytes of each message.

    Attributes:
        kind: Of the message.
        number: Of the pass that it belongs to.
        description_bytes: Of the description behind the head; 0: the one before holds.
        values_bytes: Of the values behind that; 0: those before hold.
        slot_bytes: Of new shared memory, which comes along; 0: the one before holds.
    """

    kind: int
    number: int
    description_bytes: int = 0
    values_bytes: int = 0
    slot_bytes: int = 0

    def pack(self) -> bytes:
        """Write the head."""
        return _HEAD.pack(*self)

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Head:
        """Read a head."""
        return cls(*_HEAD.unpack(data))


_HEAD = struct.Struct("<BqQQQ")
HEAD_BYTES = _HEAD.size


def write_failure(error: BaseException) -> bytes:
    """Write down what was raised, so that `read_failure` can raise it on another rank."""
    told = f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return pickle.dumps((_portable(error), told, trace))


def read_failure(data: bytes, src: int) -> BaseException:
    """Make an error of what `write_failure` wrote.

    Args:
        data: The failure.
        src: The rank where it was raised.

    Returns:
        The error itself if it could be pickled, else a CommError that tells of it. Its cause is a
        CommError with the traceback of rank ``src``.
    """
    portable, told, trace = pickle.loads(data)
    error: BaseException | None = None
    if portable is not None:
        try:
            error = pickle.loads(portable)
        except Exception:  # noqa: BLE001  # a class that this process cannot import, or its own
            error = None
    if error is None:
        error = CommError(f"Rank {src} failed with {told}")
    error.__cause__ = CommError(f"Raised on rank {src}:\n{trace}")
    return error


def _portable(error: BaseException) -> bytes | None:
    """Pickle an error, if what comes out again is the same."""
    if not isinstance(error, Exception):
        return None  # to leave is for each rank to decide
    try:
        data = pickle.dumps(error)
        copy = pickle.loads(data)
        is_same = type(copy) is type(error) and bool(copy.args == error.args)
    except Exception:  # noqa: BLE001  # errors of any class may refuse
        return None
    return data if is_same and str(copy) == str(error) else None
