"""The step at which all ranks meet because one of them asks for it; until then, no message.

Each rank counts the steps that it has completed. When one asks, all are held at the end of the step
that they are in and tell how many they have completed; they meet at the end of the first step that
none of them had. So no rank is asked to stop where it has been already. Threads answer for ranks
that are busy: nobody waits for a rank that waits for him.

It is the protocol of the coordination service of TensorFlow and JAX, "preemption sync point":
github.com/openxla/xla, xla/tsl/distributed_runtime/preemption/preemption_sync_manager.h.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import final

from shardplug.comm import Comm
from shardplug.errors import CommError, PlanError
from shardplug.kinds import check_integer
from shardplug.signals import Postponed
from shardplug.wires import connect_all, not_inherited, receive_exactly

_HUB = 0
_MESSAGE = struct.Struct("<Bqq")  # what, the number of the round, a step or a rank
_ASK, _HOLD, _COMPLETED, _MEET, _ENDED = range(5)
_STEPS = 1 << 62


@final
class SyncPoint:
    """Lets all ranks stop after the same step when one of them has a reason to.

    A scheduler's warning reaches one rank, a loss is not a number on one, a time limit has passed
    by one clock: a rank that leaves its loop alone leaves the others waiting for it. Asking a
    collective in each step costs a message in each step; this costs none until a rank asks.

    Every rank calls `reached` at the end of each step. Where ranks wait for each other in each
    step, as with DDP, they meet after the step in which one asks or the next; where they do not,
    after the first step that none has completed when it asks. A rank that has ended is an error on
    those that ask and those that are asked, not on others: end a loop with `meet`, so that none
    leaves while another may ask.

    It has connections of its own to rank 0, and a thread on each rank, which sleeps until one asks;
    it is closed with the last reference to it.

    Collective: every rank must make one.

    Args:
        comm: The ranks.

    Raises:
        CommError: If a rank cannot reach rank 0.

    Example:
        >>> sync = SyncPoint(SoloComm())
        >>> [step for step in range(1, 6) if sync.reached(step, asks=step == 3)]
        [3]
    """

    def __init__(self, comm: Comm) -> None:
        connected = {rank: end for rank, (end, _) in connect_all(comm, _HUB).items()}
        if comm.rank == _HUB:
            connection, connected[_HUB] = socket.socketpair()
            not_inherited(connection, connected[_HUB])
        else:
            connection = connected.pop(_HUB)
        self._comm = comm
        self._member = _Member(connection)
        ends = [connection, *connected.values()]
        self._close = weakref.finalize(self, _close_all, ends, os.getpid())
        _start(self._member, "shardplug-sync")
        if connected:
            _start(_Hub(connected), "shardplug-sync-hub")

    def reached(self, step: int, *, asks: bool = False) -> bool:
        """Tell whether this step is the one after which all ranks meet.

        Every rank calls it at the end of each step, for the same steps. While none asks it talks to
        no other rank. When one does it waits for the answers of their threads, not for what they
        are busy with.

        Args:
            step: The step that was completed, larger than the one before, in [-2^62, 2^62).
            asks: Whether this rank wants all to meet. Until they have, to ask again changes
                nothing.

        Returns:
            True on all ranks after the same step; then everything begins anew.

        Raises:
            PlanError: If the step is no integer, not larger than the one before, or out of range;
                if it was closed, or made by the process that this one was forked from.
            CommError: If ranks are to meet and one has ended.
        """
        return self._member.reached(self._checked("reached", step), asks=asks)

    def meet(self, step: int, values: Sequence[int] = ()) -> list[tuple[int, ...]]:
        """Meet here in any case, and forget what was asked for.

        Collective: every rank must call it, after the same step.

        Args:
            step: The last step that was completed; the next are larger.
            values: Integers for the other ranks, as many on each.

        Returns:
            The values of all ranks, by rank.

        Raises:
            PlanError: If the step is no integer or out of range, or this was closed.
            CommError: As of the comm's ``all_gather_ints``.
        """
        step, member = self._checked("meet", step), self._member
        with Postponed():  # a handler that raises would leave this rank in another round
            by_rank = self._comm.all_gather_ints([member.round, *values])
            # After a failure some may have met where others have not.
            member.begin(max(number for number, *_ in by_rank) + 1, step)
        return [tuple(told) for _, *told in by_rank]

    def close(self) -> None:
        """End it on this rank; nothing if it has been closed."""
        self._close()

    def _checked(self, method: str, step: int) -> int:
        if not self._close.alive:
            raise PlanError(f"`{method}` must be called before `close`, got a call after it.")
        number: int = check_integer("step", step)
        if not -_STEPS <= number < _STEPS:
            raise PlanError(f"`step` must be in [-2^62, 2^62), got {number}.")
        return number


@final
class _Member:
    """What a rank's main thread shares with the one that answers for it."""

    def __init__(self, connection: socket.socket) -> None:
        self.round = 0
        self._connection = connection
        self._changed = threading.Condition()
        self._step = -_STEPS - 1  # the last that was completed
        self._held = -1  # the last round in which somebody asked
        self._meeting = (-1, 0)  # the last round in which that is settled, and the step
        self._ended: int | None = None  # a rank

    def reached(self, step: int, *, asks: bool) -> bool:
        with self._changed:
            if step <= self._step:
                raise PlanError(
                    f"`step` must be larger than the one before, got {step} after {self._step}."
                )
            if self._held < self.round and not asks:
                self._step = step
                return False
        with Postponed():  # a handler that raises would leave the others without an answer
            return self._settle(step)

    def begin(self, number: int, step: int) -> None:
        with self._changed:
            self._begin(number, step)

    def run(self) -> None:
        """Hear and answer until the connection ends."""
        message = bytearray(_MESSAGE.size)
        with self._connection:
            try:
                while True:
                    receive_exactly(self._connection, memoryview(message))
                    self._hear(*_MESSAGE.unpack(message))
            except OSError:
                return
            finally:  # whatever it was: nobody is to wait for what does not come
                self._hear(_ENDED, 0, _HUB)

    def _settle(self, step: int) -> bool:
        """Wait until the step to meet after is known; tell whether it is this one."""
        if self._connection.fileno() < 0 and self._ended is None:
            raise PlanError(
                "`reached` must be called in the process that made the SyncPoint, got a child "
                "that was forked. Ask in the rank itself."
            )
        with self._changed:
            if self._held < self.round:
                self._say(_ASK, self.round, 0)
            while self._meeting[0] != self.round:
                if self._ended is not None:
                    raise CommError(
                        f"Ranks must all be there to stop together, but rank {self._ended} has "
                        "ended. Look at its output."
                    )
                self._changed.wait()
            if step < self._meeting[1]:
                self._step = step
                return False
            self._begin(self.round + 1, step)
            return True

    def _begin(self, number: int, step: int) -> None:
        if self._held == number:  # others were here sooner, and one of them asks
            self._say(_COMPLETED, number, step)
        self.round, self._step = number, step

    def _hear(self, what: int, number: int, value: int) -> None:
        with self._changed:
            if what == _HOLD:
                self._held = number
                if number == self.round:
                    self._say(_COMPLETED, number, self._step)
            elif what == _MEET:
                self._meeting = number, value
            elif self._ended is None:
                self._ended = value
            self._changed.notify_all()

    def _say(self, what: int, number: int, value: int) -> None:
        try:
            self._connection.sendall(_MESSAGE.pack(what, number, value))
        except OSError:
            return  # the thread that hears notes the end


@final
class _Hub:
    """Rank 0's other thread, by which ranks hear each other."""

    def __init__(self, connected: Mapping[int, socket.socket]) -> None:
        self._connected = dict(connected)
        self._unread = {rank: bytearray() for rank in connected}
        self._round = -1
        self._completed: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        not_inherited(self._selector)
        for rank, connection in connected.items():
            self._selector.register(connection, selectors.EVENT_READ, rank)

    def run(self) -> None:
        """Serve until all connections have ended."""
        with self._selector:
            try:
                while self._connected:
                    for key, _ in self._selector.select():
                        self._read(key.data)
            finally:  # whatever it was: nobody is to wait for what does not come
                for connection in self._connected.values():
                    connection.close()

    def _read(self, rank: int) -> None:
        unread = self._unread[rank]
        try:
            received = self._connected[rank].recv(4096)
        except OSError:
            received = b""
        if not received:
            connection = self._connected.pop(rank)
            self._selector.unregister(connection)
            connection.close()
            self._tell_all(_ENDED, rank)
        unread += received
        while len(unread) >= _MESSAGE.size:
            message = _MESSAGE.unpack_from(unread)
            del unread[: _MESSAGE.size]
            self._take(rank, *message)

    def _take(self, rank: int, what: int, number: int, value: int) -> None:
        if what == _ASK and number > self._round:
            self._round, self._completed = number, {}
            self._tell_all(_HOLD, 0)
        elif what == _COMPLETED and number == self._round:
            self._completed[rank] = value
            if len(self._completed) == len(self._unread):
                self._tell_all(_MEET, max(self._completed.values()) + 1)

    def _tell_all(self, what: int, value: int) -> None:
        message = _MESSAGE.pack(what, self._round, value)
        for connection in self._connected.values():
            try:
                connection.sendall(message)
            except OSError:
                continue  # its end is read from it soon


def _start(end: _Member | _Hub, name: str) -> None:
    threading.Thread(target=end.run, name=name, daemon=True).start()


def _close_all(connections: Sequence[socket.socket], owner: int) -> None:
    if os.getpid() != owner:
        return  # a child that was forked; its copies are closed already
    for connection in connections:
        try:
            connection.shutdown(socket.SHUT_RDWR)  # wakes the threads, as closing does not
        except OSError:
            continue  # the other side was faster
