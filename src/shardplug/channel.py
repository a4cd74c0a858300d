"""One rank reads and sends, the others receive: the road that a dispatcher's batches travel.

A channel has sockets of its own, no process group: nothing on it can come between the collectives
of the user, and whoever waits for it can be woken. Tensors for ranks on the reader's host go
through memory that the two share, those for other hosts by TCP; both ways give the same.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Sequence
from typing import Any, final

from shardplug.comm import Comm
from shardplug.errors import CommError
from shardplug.inbox import Inbox
from shardplug.messages import InterruptError as InterruptError  # part of what is offered here
from shardplug.outbox import Outbox
from shardplug.wires import connect_all


@final
class Channel:
    """One end of a channel; `open_channel` makes it.

    Passes are numbered: what was sent in an older one is never received in a newer. On the reader
    ``send`` and ``fail`` are called from one thread at a time, on the other ranks ``receive`` is.
    A channel that is given up closes itself, at the latest at the end of the interpreter.
    """

    def __init__(self, rank: int, reader: int, end: Outbox | Inbox | None) -> None:
        self._rank = rank
        self._reader = reader
        self._end = end
        # The end does not know the channel, so that its threads do not keep the channel alive.
        self._close = weakref.finalize(self, _close_end, end, os.getpid())

    def begin(self, number: int) -> None:
        """Start a pass, on every rank; larger than any number before.

        Parcels of older passes that arrive are thrown away. A send of an older pass that is
        under way is given up: it raises `InterruptError`. Whoever sends for the older pass must be
        in ``send`` or be done by now: what it sent from here on would be taken for the new pass.
        """
        if self._end is not None:
            self._end.begin(number)

    def send(self, parcels: Sequence[Any], *, done: Collection[int] = ()) -> None:
        """Send every rank its parcel; on the reader only.

        Returns once the parcels are in shared memory or with the system. That waits for a rank
        which has not yet taken the parcel before (the one before that, where they go through shared
        memory): each has at most two, or three, that it has not received.

        Args:
            parcels: By rank. The reader's own, and None, are not sent.
            done: Ranks that need no more in this pass: they may end once they have theirs.

        Raises:
            CommError: If another rank has ended; the rest are told, in place of their next parcel.
            BatchError: If a parcel cannot be taken apart; then none was sent.
            InterruptError: If it was interrupted, a new pass began or the channel was closed.
        """
        outbox = self._outbox("send")
        if outbox is not None:
            outbox.send(
                {
                    rank: parcel
                    for rank, parcel in enumerate(parcels)
                    if rank != self._reader and parcel is not None
                },
                done=done,
            )

    def fail(self, error: BaseException) -> None:
        """Have ``receive`` raise on every rank, after what was sent; on the reader only.

        Args:
            error: What was raised. If it can be pickled the others raise the same, else a CommError
                that tells of it.

        Raises:
            InterruptError: If it was interrupted, a new pass began or the channel was closed.
        """
        outbox = self._outbox("fail")
        if outbox is not None:
            outbox.fail(error)

    def receive(self) -> Any:
        """Give the next parcel of the pass, waiting for it; not on the reader.

        Its tensors are on the CPU, each in memory of its own.

        Raises:
            CommError: If the reader or, by its word, another rank has ended, or is in another pass.
            InterruptError: If it was interrupted or the channel was closed.
            Exception: Whatever the reader told by ``fail``.
        """
        if not isinstance(self._end, Inbox):
            raise CommError(
                f"`receive` must be called on a rank other than the reader's, got rank "
                f"{self._rank}."
            )
        return self._end.receive()

    def leave(self, number: int) -> None:
        """Give a pass up on this rank, so that nobody waits for it.

        Another rank takes no more parcels, and the rest go on. After the reader, ``receive`` raises
        a CommError where a rank goes on.

        Args:
            number: The pass; nothing happens if another one has begun since.
        """
        if isinstance(self._end, Inbox):
            self._end.leave(number)
        elif self._end is not None:
            self._end.leave(
                number,
                CommError(
                    f"Rank {self._reader}, which reads for all, has left the pass before this "
                    "rank. Take the same steps on every rank."
                ),
            )

    def interrupt(self) -> None:
        """Have calls that wait, and all until the next ``begin``, raise `InterruptError`.

        Any thread may call it; the other ranks do not notice.
        """
        if self._end is not None:
            self._end.interrupt()

    def close(self) -> None:
        """End the channel on this rank; the others then hear that the rank has ended."""
        self._close()

    def _outbox(self, method: str) -> Outbox | None:
        if self._rank != self._reader:
            raise CommError(
                f"`{method}` must be called on the reader, rank {self._reader}, got rank "
                f"{self._rank}."
            )
        assert not isinstance(self._end, Inbox)
        return self._end


def open_channel(
    comm: Comm,
    *,
    reader: int = 0,
    hosts: Sequence[str] | None = None,
    addresses: Sequence[str] = (),
    is_pinned: bool = False,
) -> Channel:
    """Connect the rank that reads with all others.

    Collective: every rank must call it.

    Args:
        comm: The ranks.
        reader: The rank that sends.
        hosts: By rank, names of hosts; ranks with the reader's share memory with it. None: found
            out.
        addresses: Where other hosts find the reader's, tried before those that it knows itself.
        is_pinned: Whether what is received goes to page-locked memory.

    Returns:
        This rank's end.

    Raises:
        CommError: If an argument is wrong, or a rank cannot reach the reader.
    """
    _check(comm, reader, hosts)
    connected = connect_all(comm, reader, hosts=hosts, addresses=addresses)
    if comm.world_size == 1:
        return Channel(comm.rank, reader, None)
    if comm.rank == reader:
        return Channel(comm.rank, reader, Outbox(connected))
    connection, is_local = connected[reader]
    inbox = Inbox(connection, is_local=is_local, reader=reader, is_pinned=is_pinned)
    return Channel(comm.rank, reader, inbox)


def _check(comm: Comm, reader: int, hosts: Sequence[str] | None) -> None:
    if not 0 <= reader < comm.world_size:
        raise CommError(f"`reader` must be in [0, {comm.world_size}), got {reader}.")
    if hosts is not None and len(hosts) != comm.world_size:
        raise CommError(
            f"`hosts` must have a name for each of the {comm.world_size} ranks, got {len(hosts)}."
        )


def _close_end(end: Outbox | Inbox | None, owner: int) -> None:
    # A child that was forked has copies whose sockets are closed already, and not the threads.
    if end is not None and os.getpid() == owner:
        end.close()
