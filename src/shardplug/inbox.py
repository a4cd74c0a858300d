"""The end of a channel on a rank that receives: a thread takes the next parcel while one is used.

At most one parcel lies ready beside the one in use, each in memory of its own. So a slot that this
rank shares with the reader is free for a parcel after it.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from shardplug.errors import CommError
from shardplug.messages import (
    FAILURE,
    HEAD_BYTES,
    INLINE,
    NUM_SLOTS,
    ROOM,
    SLOT,
    TAKEN,
    Head,
    InterruptError,
    read_failure,
)
from shardplug.parcels import Description, read_description, writable_views
from shardplug.shared_memory import map_memory
from shardplug.spares import Spares
from shardplug.wires import receive_exactly

_JOIN_S = 5.0


@final
@dataclass(frozen=True, slots=True)
class _Arrived:
    """What lies ready: a parcel of a pass, or a failure in its place."""

    number: int
    parcel: Any = None
    failure: bytes | None = None


@final
class Inbox:
    """The connection to the reader; see `Channel` for what its methods promise."""

    def __init__(
        self, connection: socket.socket, *, is_local: bool, reader: int, is_pinned: bool
    ) -> None:
        """Take over a connection and start to receive.

        Args:
            connection: Blocking.
            is_local: Whether it is one of the host.
            reader: The rank at its other end.
            is_pinned: Whether tensors are put into page-locked memory.
        """
        self._connection = connection
        self._is_local = is_local
        self._reader = reader
        self._changed = threading.Condition()
        self._spares = None if is_pinned else Spares(self._changed)
        self._is_awaited = False
        self._number = -1
        self._ready: _Arrived | None = None
        self._end: Exception | None = None
        self._is_interrupted = self._is_closed = False
        self._description: Description | None = None
        self._values = b""
        self._slots: list[mmap.mmap | None] = [None] * NUM_SLOTS
        self._turn = 0
        self._thread = threading.Thread(target=self._run, name="shardplug-receive", daemon=True)
        self._thread.start()

    def begin(self, number: int) -> None:
        """Start a pass; what is left of those before it is thrown away."""
        with self._changed:
            self._number = number
            self._is_interrupted = False
            if self._ready is not None and self._ready.number < number:
                self._ready = None
            self._changed.notify_all()

    def leave(self, number: int) -> None:
        """Take no more of a pass: what is left of it is thrown away as it comes."""
        with self._changed:
            is_left = number == self._number
        if is_left:
            self.begin(number + 1)

    def interrupt(self) -> None:
        """Give up waiting for a parcel, until the next pass begins."""
        with self._changed:
            self._is_interrupted = True
            self._changed.notify_all()

    def receive(self) -> Any:
        """Wait for the next parcel of the pass."""
        with self._changed:
            self._is_awaited = True
            self._changed.notify_all()
            self._changed.wait_for(self._has_news)
            self._is_awaited = False
            if self._is_interrupted or self._is_closed:
                raise InterruptError
            arrived = self._ready
            if arrived is None:
                assert self._end is not None
                raise self._ended() from self._end
            if arrived.number > self._number:
                raise CommError(
                    f"Every rank must be in the same pass, but rank {self._reader} is in pass "
                    f"{arrived.number} and this rank still in pass {self._number}."
                )
            if arrived.failure is not None:  # it stays: nothing comes after it
                raise read_failure(arrived.failure, self._reader)
            self._ready = None
            self._changed.notify_all()
        return arrived.parcel

    def close(self) -> None:
        """End the connection and the thread."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        _stop_reading(self._connection)
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _has_news(self) -> bool:
        if self._is_interrupted or self._is_closed or self._ready is not None:
            return True
        return self._end is not None

    def _ended(self) -> Exception:
        if isinstance(self._end, OSError):
            return CommError(
                f"Rank {self._reader} has ended, and with it the batches that it reads. "
                "Look at its output."
            )
        return CommError(f"A batch from rank {self._reader} cannot be put together: {self._end}")

    def _run(self) -> None:
        try:
            while self._wait_for_room():
                if not self._is_local:
                    self._answer(ROOM)
                self._put(self._take())
        except Exception as error:  # noqa: BLE001  # `receive` raises it
            with self._changed:
                self._end = error
                self._changed.notify_all()
        finally:
            self._slots = [None] * NUM_SLOTS
            self._connection.close()

    def _wait_for_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._ready is None or self._is_closed)
            return not self._is_closed

    def _put(self, arrived: _Arrived) -> None:
        with self._changed:
            if arrived.number >= self._number:
                self._ready = arrived
                self._changed.notify_all()

    def _take(self) -> _Arrived:
        """Read one message."""
        head = self._read_head()
        description = self._read(head.description_bytes)
        values = self._read(head.values_bytes)
        if head.kind == FAILURE:
            return _Arrived(head.number, failure=bytes(values))
        if description:
            self._description = read_description(bytes(description))
        if values:
            self._values = bytes(values)
        assert self._description is not None  # the first parcel brings one
        pieces = self._make_room(self._description)
        if head.kind == SLOT:
            slot = self._slots[self._turn]
            assert slot is not None  # the first such parcel brings one
            self._description.take(pieces, slot)
            self._turn = (self._turn + 1) % NUM_SLOTS
        elif head.kind == INLINE:
            self._description.take(pieces, self._read(self._description.num_bytes))
        else:
            for view in writable_views(pieces):
                receive_exactly(self._connection, view)
        self._answer(TAKEN)
        return _Arrived(head.number, self._description.parcel(pieces, self._values))

    def _make_room(self, description: Description) -> list[Tensor | bytearray]:
        """Make the pieces of a parcel once the one before the last is let go.

        A loop lets go of a batch when it has got the next. One that does not is noticed when it
        waits: it then keeps more, and from there on has its next batch beside all of these.
        """
        if self._spares is None:
            return description.empty(None)
        with self._changed:
            sizes, spares = description.tensor_sizes, self._spares
            self._changed.wait_for(
                lambda: spares.has_room(sizes) or self._is_awaited or self._is_closed
            )
            if not spares.has_room(sizes):
                spares.expect_more()
            return description.empty(spares)

    def _answer(self, answer: bytes) -> None:
        try:
            self._connection.sendall(answer)
        except OSError:
            return  # the reader has ended, which the next read says: what it sent still counts

    def _read_head(self) -> Head:
        if not self._is_local:
            return Head.unpack(self._read(HEAD_BYTES))
        data, descriptors, _, _ = socket.recv_fds(self._connection, HEAD_BYTES, 1)
        try:
            if not data:
                raise ConnectionError("the connection has ended")
            head = Head.unpack(data + self._read(HEAD_BYTES - len(data)))
            if descriptors:
                self._slots[self._turn] = None  # before there is another
                self._slots[self._turn] = map_memory(descriptors[0], head.slot_bytes)
        finally:
            for each in descriptors:
                os.close(each)
        return head

    def _read(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        receive_exactly(self._connection, memoryview(data))
        return data


def _stop_reading(connection: socket.socket) -> None:
    """Wake the thread that reads, as closing the socket would not."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the other side has ended it already
