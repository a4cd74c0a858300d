"""The end of a channel on the rank that reads: what goes out, to whom, and when there is room.

A rank has room for a parcel once it has taken the one before it; for one in shared memory, once it
has taken the one before that: while it copies one out of its slot the next is written to the other.
What goes out by TCP piece by piece waits until the receiver is reading: a connection that is full
for long would be taken for one whose other side was cut off.
"""

from __future__ import annotations

import logging
import mmap
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from shardplug.errors import CommError
from shardplug.messages import (
    FAILURE,
    INLINE,
    NUM_SLOTS,
    ROOM,
    SLOT,
    STREAM,
    TAKEN,
    Head,
    InterruptError,
    write_failure,
)
from shardplug.parcels import Wrapped, wrap
from shardplug.shared_memory import map_memory, reserve
from shardplug.wires import not_inherited

_INLINE_BYTES = 1 << 16
"""Parcels up to this size travel in the message: a write less, and no memory to share."""
_MOST_VIEWS = 512  # in one call; Linux takes 1024
_TELL_S = 1.0  # how long the others may take to read the news of a rank that has ended
_CLOSE_S = 1.0

_log = logging.getLogger("shardplug.channel")


class _Outgoing(NamedTuple):
    view: memoryview
    descriptor: int | None = None  # passed along with the first byte, and closed


@final
@dataclass(slots=True, eq=False)
class _Peer:
    """One receiving rank, as the reader knows it."""

    rank: int
    connection: socket.socket
    is_local: bool
    shares_memory: bool
    outgoing: deque[_Outgoing] = field(default_factory=deque)
    num_untaken: int = 0
    num_messages: int = 0
    num_rooms: int = 0  # messages that it has said it would read at once
    description: bytes = b""
    values: bytes = b""
    slots: list[mmap.mmap | None] = field(default_factory=lambda: [None] * NUM_SLOTS)
    turn: int = 0  # which slot comes next
    is_gone: bool = False

    def has_room(self, wrapped: Wrapped) -> bool:
        by_slot = self.shares_memory and wrapped.num_bytes > _INLINE_BYTES
        if self.num_untaken >= (NUM_SLOTS if by_slot else 1):
            return False
        num_bytes = len(wrapped.description) + len(wrapped.values) + wrapped.num_bytes
        if self.is_local or num_bytes <= _INLINE_BYTES:
            return True
        return self.num_rooms > self.num_messages

    def post(self, number: int, wrapped: Wrapped) -> None:
        """Put a parcel into the slot or the queue of what goes out."""
        kind, slot_bytes, descriptor = self._place(wrapped)
        description = b"" if wrapped.description == self.description else wrapped.description
        values = b"" if wrapped.values == self.values else wrapped.values
        head = Head(kind, number, len(description), len(values), slot_bytes)
        message = head.pack() + description + values
        if kind == INLINE:
            pieces = bytearray(wrapped.num_bytes)
            wrapped.write(pieces)
            message += pieces
        self.outgoing.append(_Outgoing(memoryview(message), descriptor))
        if kind == STREAM:
            self.outgoing.extend(map(_Outgoing, wrapped.views()))
        # Only now: what is in the queue goes out whole, whatever happens to the pass.
        self.description, self.values = wrapped.description, wrapped.values
        self.num_messages += 1
        self.num_untaken += 1

    def fail(self, number: int, failure: bytes) -> None:
        head = Head(FAILURE, number, values_bytes=len(failure))
        self.outgoing.append(_Outgoing(memoryview(head.pack() + failure)))
        self.num_messages += 1

    def flush(self) -> None:
        """Send as much as goes without waiting."""
        try:
            while self.outgoing:
                self._advance(self._send_some())
        except BlockingIOError:
            return
        except OSError:
            self.is_gone = True

    def hear(self) -> None:
        """Read what the receiver answers."""
        try:
            answers = self.connection.recv(64)
        except BlockingIOError:
            return
        except OSError:
            answers = b""
        self.is_gone = not answers
        self.num_untaken -= answers.count(TAKEN)
        self.num_rooms += answers.count(ROOM)

    def let_go(self) -> None:
        for each in self.outgoing:
            if each.descriptor is not None:
                os.close(each.descriptor)
        self.outgoing.clear()
        self.slots = [None] * NUM_SLOTS
        self.connection.close()

    def _place(self, wrapped: Wrapped) -> tuple[int, int, int | None]:
        """Decide which way a parcel goes; write it to shared memory if that is the one."""
        if wrapped.num_bytes <= _INLINE_BYTES:
            return INLINE, 0, None
        if not self.shares_memory:
            return STREAM, 0, None
        slot_bytes, descriptor = 0, None
        slot = self.slots[self.turn]
        if slot is None or len(slot) < wrapped.num_bytes:
            # Some more than is needed: of ragged batches every other one is the largest so far.
            slot_bytes = wrapped.num_bytes + wrapped.num_bytes // 8
            descriptor = self._reserve(slot_bytes)
            if descriptor is None:
                return STREAM, 0, None
            slot = self.slots[self.turn]
        assert slot is not None
        wrapped.write(slot)
        self.turn = (self.turn + 1) % NUM_SLOTS
        return SLOT, slot_bytes, descriptor

    def _reserve(self, num_bytes: int) -> int | None:
        self.slots[self.turn] = None  # before there is another
        descriptor = None
        try:
            descriptor = reserve(num_bytes)
            self.slots[self.turn] = map_memory(descriptor, num_bytes)
        except OSError as error:
            if descriptor is not None:
                os.close(descriptor)
            self.shares_memory = False
            _log.warning(
                "No %d bytes of shared memory for rank %d (%s): its batches go through a socket.",
                num_bytes,
                self.rank,
                error,
            )
            return None
        return descriptor

    def _send_some(self) -> int:
        first = self.outgoing[0]
        if first.descriptor is None:
            views = [each.view for each, _ in zip(self.outgoing, range(_MOST_VIEWS), strict=False)]
            return self.connection.sendmsg(views)
        num_bytes = socket.send_fds(self.connection, [first.view], [first.descriptor])
        os.close(first.descriptor)
        self.outgoing[0] = _Outgoing(first.view)
        return num_bytes

    def _advance(self, num_bytes: int) -> None:
        while self.outgoing and num_bytes >= len(self.outgoing[0].view):
            num_bytes -= len(self.outgoing.popleft().view)
        if num_bytes:
            self.outgoing[0] = _Outgoing(self.outgoing[0].view[num_bytes:])


@final
class Outbox:
    """The connections to the receiving ranks; see `Channel` for what its methods promise."""

    def __init__(self, connected: Mapping[int, tuple[socket.socket, bool]]) -> None:
        """Take over connections.

        Args:
            connected: By rank: the socket, and whether it is one of the host.
        """
        self._peers = {
            rank: _Peer(rank, connection, is_local, shares_memory=is_local)
            for rank, (connection, is_local) in sorted(connected.items())
        }
        self._sending = threading.Lock()
        self._number = -1
        self._is_interrupted = self._is_closed = False
        self._news: tuple[int, CommError] | None = None
        self._done: frozenset[int] = frozenset()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for each in (self._wake, self._woken):
            each.setblocking(False)
        not_inherited(self._selector, self._wake, self._woken)
        self._selector.register(self._woken, selectors.EVENT_READ)
        for peer in self._peers.values():
            peer.connection.setblocking(False)
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)

    def begin(self, number: int) -> None:
        """Start a pass; a send of the one before it is given up."""
        self._number = number
        self._is_interrupted = False
        self._call()

    def interrupt(self) -> None:
        """Give up what is sent, and what would be until the next pass begins."""
        self._is_interrupted = True
        self._call()

    def send(self, parcels: Mapping[int, Any], *, done: Collection[int] = ()) -> None:
        """Send parcels by rank; return once all are on their way.

        Args:
            parcels: By rank.
            done: Ranks that need no more after this: they may end as soon as they have theirs.
        """
        number = self._number
        with self._sending:
            self._raise_if_stopped(number)
            self._done = frozenset(done)
            # All before the first goes out: one that cannot be sent is not sent in part.
            pending = {rank: wrap(parcel) for rank, parcel in parcels.items()}
            self._serve(timeout_s=0)
            while True:
                self._raise_if_stopped(number)
                self._raise_if_gone(number, pending)
                self._post(number, pending)
                self._raise_if_gone(number, pending)
                if not pending and not any(peer.outgoing for peer in self._peers.values()):
                    return
                self._serve()

    def fail(self, error: BaseException) -> None:
        """Tell every rank that is there what was raised here."""
        number = self._number
        with self._sending:
            self._raise_if_stopped(number)
            if self._news is not None and error is self._news[1] and number == self._news[0]:
                return
            self._tell(number, write_failure(error))
            while any(peer.outgoing for peer in self._left()):
                self._serve()
                self._raise_if_stopped(number)

    def leave(self, number: int, error: BaseException) -> None:
        """Tell ranks that go on with a pass that no more of it comes; waits for nobody."""
        failure = write_failure(error)
        with self._sending:
            if number == self._number and not self._is_closed:
                self._tell(number, failure)

    def close(self) -> None:
        """End the connections; a send that is under way is given up."""
        if self._is_closed:
            return
        self._is_closed = True
        self._call()
        is_alone = self._sending.acquire(timeout=_CLOSE_S)
        try:
            self._selector.close()
            for peer in self._peers.values():
                _end_in_order(peer.connection)
                peer.let_go()
            self._wake.close()
            self._woken.close()
        finally:
            if is_alone:
                self._sending.release()

    def _call(self) -> None:
        try:
            self._wake.send(b"\0")
        except OSError:
            return  # it has been called often enough, or is closed

    def _left(self) -> list[_Peer]:
        return [peer for peer in self._peers.values() if not peer.is_gone]

    def _raise_if_stopped(self, number: int) -> None:
        if self._is_interrupted or self._is_closed or number != self._number:
            raise InterruptError

    def _raise_if_gone(self, number: int, pending: Container[int]) -> None:
        gone = [
            str(peer.rank)
            for peer in self._peers.values()
            if peer.is_gone and (peer.rank in pending or peer.rank not in self._done)
        ]
        if not gone:
            return
        which = f"Rank {gone[0]} has" if len(gone) == 1 else f"Ranks {', '.join(gone)} have"
        error = CommError(f"{which} ended, and can be sent no more batches. Look at its output.")
        if self._news is None or self._news[0] != number:
            self._news = number, error
            self._tell(number, write_failure(error))
            deadline_s = time.monotonic() + _TELL_S
            while any(peer.outgoing for peer in self._left()):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self._is_closed:
                    break
                self._serve(left_s)
        raise self._news[1]

    def _post(self, number: int, pending: dict[int, Wrapped]) -> None:
        for rank, wrapped in list(pending.items()):
            peer = self._peers[rank]
            if peer.has_room(wrapped):
                peer.post(number, pending.pop(rank))
                peer.flush()
                self._watch(peer)

    def _tell(self, number: int, failure: bytes) -> None:
        for peer in self._left():
            peer.fail(number, failure)
            peer.flush()
            self._watch(peer)

    def _serve(self, timeout_s: float | None = None) -> None:
        """Wait until a connection has something to say or to take, and see to it."""
        for key, events in self._selector.select(timeout_s):
            if key.data is None:
                self._woken.recv(64)
                continue
            if events & selectors.EVENT_READ:
                key.data.hear()
            if not key.data.is_gone:
                key.data.flush()
            self._watch(key.data)

    def _watch(self, peer: _Peer) -> None:
        if peer.is_gone:
            self._selector.unregister(peer.connection)
            peer.let_go()
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outgoing else 0)
        if self._selector.get_key(peer.connection).events != events:
            self._selector.modify(peer.connection, events, peer)


def _end_in_order(connection: socket.socket) -> None:
    """Let what was sent arrive: a connection closed with answers unread throws it away."""
    try:
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            continue
    except OSError:
        return  # nothing more to read, or it has ended already
