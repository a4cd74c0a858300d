"""Sockets of our own between the ranks: found, proven to be those of this run, and not inherited.

They do not touch the process groups, so what is sent on them cannot come between the collectives of
the user, and whoever waits for them can be woken.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, final
from weakref import WeakSet

from shardplug.comm import Comm, agree
from shardplug.errors import CommError

_TRIAL_S = 5.0  # for each address, and for each step of proving who one is
_TOKEN_BYTES = 32
_NONCE_BYTES = 16
_HELLO = struct.Struct(f"<I{_NONCE_BYTES}s")
_WELCOME = b"\1"
_IDLE_S, _PROBE_S, _NUM_PROBES = 5, 3, 3  # of TCP: a host that was cut off is noticed in 14 s
# Addresses for documentation: nothing is sent to them, only asked which way it would go.
_ELSEWHERE = ((socket.AF_INET, "203.0.113.1"), (socket.AF_INET6, "2001:db8::1"))


class _Closable(Protocol):
    def close(self) -> None: ...


# A process forked from a rank, as workers of loaders are, would keep the rank's sockets open: the
# others would not see the rank end. Fork handlers can be neither removed nor bound to an object.
_open_here: WeakSet[_Closable] = WeakSet()


def _close_in_child() -> None:
    for each in list(_open_here):
        each.close()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_close_in_child)


def not_inherited(*opened: _Closable) -> None:
    """Have sockets and selectors closed in processes that are forked from this one."""
    _open_here.update(opened)


def host_name() -> str:
    """Name what this process must share with another for a socket of the host to reach it."""
    parts = [socket.gethostname()]
    if sys.platform == "linux":
        try:
            # Containers may share a name; hosts made of one image do. A boot is never the same.
            parts.append(Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip())
            parts.append(os.readlink("/proc/self/ns/net"))
        except OSError:
            parts.append(secrets.token_hex(8))  # nobody's host: TCP reaches it all the same
    return " ".join(parts)


@final
@dataclass(frozen=True, slots=True)
class Offer:
    """How a listener can be reached, and by whom.

    Attributes:
        token: Whoever knows it is one of this run.
        path: Of the socket of the host, None if there is none.
        addresses: Names and numbers of the host, to be tried in this order.
        port: Of TCP at all of these.
    """

    token: bytes = field(repr=False)
    path: str | None
    addresses: tuple[str, ...]
    port: int


@final
class Listener:
    """Takes the connections of other ranks, in a thread of its own until it is stopped.

    Attributes:
        offer: For the other ranks.
        connected: By rank: the socket, and whether it is one of the host.
    """

    def __init__(self, addresses: Sequence[str] = ()) -> None:
        """Listen, on the host and by TCP.

        Args:
            addresses: Where other hosts find this one, to be tried before those it knows itself.

        Raises:
            CommError: If no socket can be had.
        """
        self.connected: dict[int, tuple[socket.socket, bool]] = {}
        name = f"\0shardplug-{secrets.token_hex(16)}" if sys.platform == "linux" else None
        self._local = None if name is None else _try_to_listen_on_host(name)
        self._tcp = _try_to_listen_by_tcp()
        if self._local is None and self._tcp is None:
            raise CommError("A socket must be had to send to the other ranks, got none.")
        self._wake, self._woken = socket.socketpair()
        self._opened = [s for s in (self._local, self._tcp, self._wake, self._woken) if s]
        not_inherited(*self._opened)
        self.offer = Offer(
            token=secrets.token_bytes(_TOKEN_BYTES),
            path=None if self._local is None else name,
            addresses=(*addresses, *_own_addresses()),
            port=0 if self._tcp is None else self._tcp.getsockname()[1],
        )
        self._thread = threading.Thread(target=self._run, name="shardplug-listen", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take no more connections; those that were made stay."""
        self._wake.send(b"\0")
        self._thread.join()
        for each in self._opened:
            each.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            not_inherited(selector)
            for each in (self._local, self._tcp, self._woken):
                if each is not None:
                    selector.register(each, selectors.EVENT_READ, each)
            while True:
                ready = [key.data for key, _ in selector.select()]
                if self._woken in ready:
                    return
                for each in ready:
                    self._accept(each)

    def _accept(self, listening: socket.socket) -> None:
        try:
            connection, _ = listening.accept()
        except OSError:
            return  # it left before its turn
        not_inherited(connection)
        try:
            connection.settimeout(_TRIAL_S)
            rank = _examine(connection, self.offer.token)
            if listening is self._tcp:
                _tune(connection)
            self.connected[rank] = connection, listening is self._local
            connection.sendall(_WELCOME)
            connection.settimeout(None)
        except (OSError, CommError):
            connection.close()  # a stranger; a rank learns it by the end of its connection


def connect(offer: Offer, rank: int, *, is_same_host: bool) -> tuple[socket.socket, bool]:
    """Reach a listener, on the host if that is the same and else by TCP.

    Args:
        offer: Of the listener.
        rank: Who this is.
        is_same_host: Whether to try the socket of the host.

    Returns:
        A blocking socket, and whether it is one of the host.

    Raises:
        CommError: If no address leads there; it names all that were tried.
    """
    tried: list[str] = []
    if is_same_host and offer.path is not None:
        try:
            return _reach_on_host(offer.path, offer.token, rank), True
        except OSError as error:
            tried.append(f"its socket on this host ({error})")
    for address in offer.addresses if offer.port else ():
        try:
            return _reach_by_tcp(offer, address, rank), False
        except OSError as error:
            tried.append(f"{address} port {offer.port} ({error})")
    raise CommError(
        f"Rank {rank} cannot reach the rank that listens, tried: {'; '.join(tried)}. "
        "Let ranks connect to each other, or give an address of that rank that leads there."
    )


class _Facts(NamedTuple):
    """What each rank tells the others before they connect."""

    host: str
    offer: Offer | None


def connect_all(
    comm: Comm, hub: int, *, hosts: Sequence[str] | None = None, addresses: Sequence[str] = ()
) -> Mapping[int, tuple[socket.socket, bool]]:
    """Connect one rank with all others.

    Collective: every rank must call it.

    Args:
        comm: The ranks.
        hub: The one rank.
        hosts: By rank, names of hosts; None: found out.
        addresses: Where other hosts find the hub's, tried before those that it knows itself.

    Returns:
        By rank, a blocking socket and whether it is one of the host: on the hub to all others, on
        those to the hub.

    Raises:
        CommError: If no socket can be had, or a rank cannot reach the hub; on all ranks.
    """
    connected: dict[int, tuple[socket.socket, bool]] = {}
    listener: Listener | None = None

    def state() -> _Facts:
        nonlocal listener
        if comm.rank == hub and comm.world_size > 1:
            listener = Listener(addresses)
        host = host_name() if hosts is None else hosts[comm.rank]
        return _Facts(host, None if listener is None else listener.offer)

    def reach() -> None:
        offer = facts[hub].offer
        if offer is not None and comm.rank != hub:
            is_same_host = facts[hub].host == facts[comm.rank].host
            connected[hub] = connect(offer, comm.rank, is_same_host=is_same_host)

    try:
        facts = agree(comm, state)
        agree(comm, reach)
    except BaseException:  # an interrupt too: no socket or thread may stay behind
        _give_up(listener, connected)
        raise
    if listener is None:
        return connected
    listener.stop()
    return listener.connected


def _give_up(
    listener: Listener | None, connected: Mapping[int, tuple[socket.socket, bool]]
) -> None:
    if listener is not None:
        listener.stop()
        connected = listener.connected
    for connection, _ in connected.values():
        connection.close()


def receive_exactly(connection: socket.socket, view: memoryview) -> None:
    """Fill a buffer from a blocking socket.

    Raises:
        OSError: If the connection ends before; ConnectionError where it ends in order.
    """
    while view:
        num_bytes = connection.recv_into(view)
        if not num_bytes:
            raise ConnectionError("the connection has ended")
        view = view[num_bytes:]


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    receive_exactly(connection, memoryview(data))
    return bytes(data)


def _try_to_listen_on_host(name: str) -> socket.socket | None:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(name)
        listening.listen(socket.SOMAXCONN)
    except OSError:  # forbidden, as some sandboxes do; there is TCP
        listening.close()
        return None
    return listening


def _try_to_listen_by_tcp() -> socket.socket | None:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=socket.SOMAXCONN
            )
        return socket.create_server(("", 0), backlog=socket.SOMAXCONN)
    except OSError:
        return None


def _own_addresses() -> list[str]:
    """List where this host may be found: the ways out of it, its name, and itself."""
    found: list[str] = []
    for family, elsewhere in _ELSEWHERE:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((elsewhere, 9))
                found.append(probe.getsockname()[0])
        except OSError:
            continue  # no way out of that kind
    return [*dict.fromkeys([*found, socket.gethostname(), "127.0.0.1"])]


def _reach_on_host(path: str, token: bytes, rank: int) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    not_inherited(connection)
    try:
        connection.settimeout(_TRIAL_S)
        connection.connect(path)
        return _introduce(connection, token, rank)
    except OSError:
        connection.close()
        raise


def _reach_by_tcp(offer: Offer, address: str, rank: int) -> socket.socket:
    connection = socket.create_connection((address, offer.port), timeout=_TRIAL_S)
    not_inherited(connection)
    try:
        _tune(connection)
        return _introduce(connection, offer.token, rank)
    except OSError:
        connection.close()
        raise


def _introduce(connection: socket.socket, token: bytes, rank: int) -> socket.socket:
    """Prove to a listener to know the token, after it has done so."""
    # Others may be examined first, and each may take its time.
    connection.settimeout(4 * _TRIAL_S)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    hello = _HELLO.pack(rank, nonce)
    connection.sendall(hello)
    asked = _read(connection, _NONCE_BYTES)
    proof = _read(connection, _TOKEN_BYTES)
    if not hmac.compare_digest(proof, _proof(token, b"listener", hello + asked)):
        raise ConnectionRefusedError("somebody else listens there")
    connection.sendall(_proof(token, b"rank", hello + asked))
    if _read(connection, len(_WELCOME)) != _WELCOME:
        raise ConnectionRefusedError("somebody else listens there")
    connection.settimeout(None)
    return connection


def _examine(connection: socket.socket, token: bytes) -> int:
    """Let the other side prove that it knows the token; give its rank."""
    hello = _read(connection, _HELLO.size)
    asked = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(asked + _proof(token, b"listener", hello + asked))
    proof = _read(connection, _TOKEN_BYTES)
    if not hmac.compare_digest(proof, _proof(token, b"rank", hello + asked)):
        raise CommError("A connection must know the token of this run, got another.")
    rank: int = _HELLO.unpack(hello)[0]
    return rank


def _proof(token: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.digest(token, role + said, "sha256")


def _tune(connection: socket.socket) -> None:
    """Send small messages at once, and notice a host that was cut off."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES)
        # While data is on its way keepalive is silent, and the default is a quarter of an hour.
        # It counts also where the other side has no room: see Outbox on why it always has.
        timeout_ms = 1000 * (_IDLE_S + _NUM_PROBES * _PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
