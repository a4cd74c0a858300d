"""What the reader sends is what the others receive: every way, every kind of leaf, every ending."""

from __future__ import annotations

import dataclasses
import errno
import gc
import logging
import os
import pickle
import secrets
import socket
import threading
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from shardplug import outbox, shared_memory, wires
from shardplug.channel import Channel, InterruptError, open_channel
from shardplug.comm import Comm, SoloComm
from shardplug.errors import BatchError, CommError
from shardplug.messages import Head, read_failure
from shardplug.testing import LockstepComm, run_ranks
from shardplug.wires import Listener, Offer, connect

Pair = namedtuple("Pair", "left right")

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


@dataclass
class Item:
    x: Tensor
    name: str


class Stubborn:
    """Goes out, and does not come in."""

    def __reduce__(self) -> tuple[Callable[[], NoReturn], tuple[()]]:
        return refuse, ()


def refuse() -> NoReturn:
    raise ValueError("no way in")


class TwoPartError(Exception):
    """Cannot be made again of its args, as many errors of libraries."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")


@dataclass(frozen=True)
class Way:
    """How parcels travel: between hosts or not, and from which size on outside of the message."""

    hosts: Sequence[str] | None
    inline_bytes: int


WAYS = {
    "slot": Way(None, 0),
    "stream": Way(("a", "b", "c"), 0),
    "inline": Way(None, 1 << 16),
    "inline-tcp": Way(("a", "b", "c"), 1 << 16),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    chosen = WAYS[request.param]
    monkeypatch.setattr(outbox, "_INLINE_BYTES", chosen.inline_bytes)
    return chosen


def with_channel(
    body: Callable[[LockstepComm, Channel], Any],
    world_size: int = 2,
    *,
    hosts: Sequence[str] | None = None,
    **options: Any,
) -> list[Any]:
    """Run ``body(comm, channel)`` on every rank, in pass 0."""

    def live(comm: LockstepComm) -> Any:
        names = None if hosts is None else hosts[:world_size]
        channel = open_channel(comm, hosts=names, **options)
        try:
            channel.begin(0)
            return body(comm, channel)
        finally:
            channel.close()

    return run_ranks(world_size, live)


def send_all(
    channel: Channel, parcels: Sequence[Sequence[Any]], note: Callable[[], object] = int
) -> None:
    for each in parcels:
        channel.send(each)
        note()


def receive_all(channel: Channel, count: int) -> None:
    for _ in range(count):
        channel.receive()


def read_what_raises(error: BaseException) -> NoReturn:
    raise error


def passed(parcels: Sequence[Any], way: Way) -> list[Any]:
    """Send parcels from rank 0 to rank 1."""

    def body(comm: LockstepComm, channel: Channel) -> list[Any]:
        received = []
        for parcel in parcels:
            if comm.rank:
                received.append(channel.receive())
            else:
                channel.send([None, parcel])
        comm.barrier()
        return received

    return list(with_channel(body, hosts=way.hosts)[1])


def is_same(one: Tensor, other: Tensor) -> bool:
    """Equal to the bit, dtype and shape included."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and one.reshape(-1).view(torch.uint8).tolist()
        == other.reshape(-1).view(torch.uint8).tolist()
    )


def test_every_dtype_and_shape(way: Way) -> None:
    shapes = [(), (1,), (3,), (2, 3), (0,), (2, 0, 3)]
    parcels = [
        [(torch.arange(torch.Size(shape).numel()) % 2).reshape(shape).to(dtype) for shape in shapes]
        for dtype in DTYPES
    ]
    for sent, received in zip(parcels, passed(parcels, way), strict=True):
        assert all(is_same(*pair) for pair in zip(sent, received, strict=True))


def test_every_kind_of_nesting_and_leaf(way: Way) -> None:
    x = torch.arange(3.0)
    batch = {
        "pair": Pair(x, [x + 1, (x + 2,)]),
        "item": Item(x + 3, "four"),
        "ordered": OrderedDict(b=x + 4, a="text"),
        3: None,
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "turned": np.arange(6).reshape(2, 3).T,
        "words": np.array(["a", "bc"]),
        "number": 1.5,
        "bytes": b"raw",
        "flag": True,
        "empty": [],
        "complex": 1j,
    }
    (back,) = passed([batch], way)
    assert list(back) == list(batch)
    assert type(back["pair"]) is Pair
    assert back["pair"].left.tolist() == [0, 1, 2]
    assert back["pair"].right[0].tolist() == [1, 2, 3]
    assert back["pair"].right[1][0].tolist() == [2, 3, 4]
    assert type(back["item"]) is Item
    assert (back["item"].x.tolist(), back["item"].name) == ([3, 4, 5], "four")
    assert list(back["ordered"]) == ["b", "a"]
    assert back["ordered"]["b"].tolist() == [4, 5, 6]
    assert back["array"].dtype == np.int16
    assert back["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert back["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert back["words"].tolist() == ["a", "bc"]
    rest = [back[key] for key in (3, "number", "bytes", "flag", "empty", "complex")]
    assert rest == [None, 1.5, b"raw", True, [], 1j]
    back["array"][0, 0] = 7  # and may be written to
    assert batch["array"][0, 0] == 0


@pytest.mark.parametrize("parcel", ["text", 3, [], {"a": [1, "b"]}, b"", 0.5], ids=repr)
def test_parcels_without_tensors(parcel: object, way: Way) -> None:
    assert passed([parcel, parcel], way) == [parcel, parcel]


def test_tensors_that_are_not_dense_in_memory(way: Way) -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    z = torch.tensor([1 + 2j, 3 - 4j])
    batch = [x.permute(2, 0, 1), x[:, ::2, 1:], z.conj(), z.conj().imag, x[0, 0, 0].expand(3)]
    before = [each.clone() for each in batch]
    (back,) = passed([batch], way)
    assert [each.tolist() for each in back] == [each.tolist() for each in before]
    assert all(each.is_contiguous() for each in back)
    assert back[0].tolist()[1] == [[1, 5, 9], [13, 17, 21]]
    assert back[2].tolist() == [1 - 2j, 3 + 4j]
    assert not batch[0].is_contiguous()  # the parcel stays as it was


def test_tensors_that_are_more_than_dense_memory(way: Way) -> None:
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 2]]), torch.tensor([5, 7]), (3,), check_invariants=False
    )
    packed = pack_sequence([torch.arange(3), torch.arange(2)])
    learnt = torch.ones(2, requires_grad=True)
    (back,) = passed([(sparse, packed, learnt, learnt * 2)], way)
    assert back[0].to_dense().tolist() == [5, 0, 7]
    assert isinstance(back[1], PackedSequence)
    assert back[1].data.tolist() == [0, 0, 1, 1, 2]
    assert back[2].requires_grad
    assert (back[2].tolist(), back[3].tolist()) == ([1, 1], [2, 2])


def test_every_tensor_has_memory_of_its_own(way: Way) -> None:
    (back,) = passed([{"images": torch.zeros(100, 10), "labels": torch.arange(3)}], way)
    assert back["labels"].untyped_storage().nbytes() == 3 * 8
    assert back["images"].untyped_storage().nbytes() == 4000
    back["labels"].zero_()


def test_structures_and_sizes_that_change_from_one_to_the_next(way: Way) -> None:
    sizes = [5, 5, 100, 3, 100_000, 7, 100_001, 0, 5]
    parcels: list[Any] = [
        {"x": torch.arange(size), "n": size, "row": np.arange(size)} for size in sizes
    ]
    parcels += [torch.arange(3), [torch.arange(3)], torch.arange(3), {"x": torch.arange(2)}]
    received = passed(parcels, way)
    for size, back in zip(sizes, received[: len(sizes)], strict=True):
        assert torch.equal(back["x"], torch.arange(size))
        assert (back["n"], back["row"].tolist()) == (size, list(range(size)))
    assert received[-4].tolist() == received[-2].tolist() == [0, 1, 2]
    assert received[-3][0].tolist() == [0, 1, 2]
    assert received[-1]["x"].tolist() == [0, 1]


def test_parcels_share_nothing_with_each_other(way: Way) -> None:
    first, second = passed([{"tags": {"a"}, "x": torch.ones(2)}] * 2, way)
    first["tags"].add("b")
    first["x"].zero_()
    assert second["tags"] == {"a"}
    assert second["x"].tolist() == [1, 1]


def test_more_tensors_than_one_call_sends(way: Way) -> None:
    count = 2 * outbox._MOST_VIEWS + 1
    (back,) = passed([[torch.tensor([place]) for place in range(count)]], way)
    assert [each.item() for each in back] == list(range(count))


def test_each_rank_gets_its_own_and_none_is_not_sent(way: Way) -> None:
    def body(comm: LockstepComm, channel: Channel) -> list[float]:
        if comm.rank == 1:  # the reader
            channel.send([torch.tensor(0.0), "not sent", None])
            channel.send([torch.tensor(1.0), None, torch.tensor(2.0)])
            received = []
        else:
            received = [channel.receive().item() for _ in range(2 if comm.rank == 0 else 1)]
        comm.barrier()
        return received

    assert with_channel(body, 3, hosts=way.hosts, reader=1) == [[0.0, 1.0], [], [2.0]]


def test_tensors_are_page_locked_where_that_is_asked_for(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    make = torch.empty

    def empty(*args: Any, **options: Any) -> Tensor:
        if "pin_memory" in options:
            asked.append(options.pop("pin_memory"))  # which needs a CUDA device
        return make(*args, **options)

    monkeypatch.setattr(torch, "empty", empty)

    def body(comm: LockstepComm, channel: Channel) -> None:
        if comm.rank:
            channel.receive()
        else:
            channel.send([None, [torch.ones(2), torch.ones(3)]])
        comm.barrier()

    with_channel(body, hosts=way.hosts, is_pinned=True)
    with_channel(body, hosts=way.hosts)
    assert asked == [True, True]


@pytest.mark.parametrize("hosts", [None, ("a", "b")], ids=["one host", "two hosts"])
def test_bytes_through_the_socket(
    hosts: Sequence[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: Counter[int] = Counter()
    send_some = outbox._Peer._send_some
    step = 0

    def counted(peer: outbox._Peer) -> int:
        num_bytes = send_some(peer)
        sent[step] += num_bytes
        return num_bytes

    monkeypatch.setattr(outbox._Peer, "_send_some", counted)
    parcels = [
        {"x": torch.zeros(32, 3, 32, 32), "y": torch.arange(32), "names": [f"{k}"] * 32}
        for k in range(3)
    ]

    def body(comm: LockstepComm, channel: Channel) -> None:
        nonlocal step
        for step_here, parcel in enumerate(parcels):
            if comm.rank:
                channel.receive()
            else:
                step = step_here
                channel.send([None, parcel])
            comm.barrier()

    with_channel(body, hosts=hosts)
    rows = 0 if hosts is None else 32 * 3 * 32 * 32 * 4 + 32 * 8
    assert all(rows < sent[each] <= rows + 1024 for each in range(3)), sent


def test_what_stays_the_same_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[tuple[bool, bool]] = []
    pack = Head.pack

    def noted(head: Head) -> bytes:
        heads.append((head.description_bytes > 0, head.values_bytes > 0))
        return pack(head)

    monkeypatch.setattr(Head, "pack", noted)
    x, wide = torch.zeros(2), torch.zeros(3)
    passed([(x, "a"), (x + 1, "a"), (x, "b"), (wide, "b"), (wide, "b")], WAYS["inline"])
    assert heads == [(True, True), (False, False), (False, True), (True, False), (False, False)]


def test_memory_is_reserved_once_for_parcels_that_do_not_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reserved: list[int] = []
    reserve = shared_memory.reserve

    def noted(num_bytes: int) -> int:
        reserved.append(num_bytes)
        return reserve(num_bytes)

    monkeypatch.setattr(outbox, "reserve", noted)
    monkeypatch.setattr(outbox, "_INLINE_BYTES", 0)
    sizes = [100, 100, 50, 101, 1000, 1000]  # bytes; an eighth more is reserved
    passed([torch.zeros(size, dtype=torch.uint8) for size in sizes], WAYS["slot"])
    assert reserved == [112, 112, 1125, 1125]  # two slots in turn


@pytest.mark.parametrize("way_name", WAYS)
def test_the_reader_is_never_far_ahead(way_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    way = WAYS[way_name]
    monkeypatch.setattr(outbox, "_INLINE_BYTES", way.inline_bytes)
    num_parcels = 100
    is_sent = threading.Semaphore(0)
    sent: list[int] = []

    def body(comm: LockstepComm, channel: Channel) -> int:
        ahead = 0
        if comm.rank == 0:
            for place in range(num_parcels):
                channel.send([None, torch.tensor(place), torch.tensor(place)])
                sent.append(place)
                is_sent.release()
        else:
            if comm.rank == 1:
                is_sent.acquire()  # the first goes out before anybody asks for it
            for place in range(num_parcels):
                assert channel.receive().item() == place
                ahead = max(ahead, len(sent) - (place + 1))
        comm.barrier()
        return ahead

    _, first, second = with_channel(body, 3, hosts=way.hosts)
    # One lies ready; what is on the way fills the slots, where there are any.
    most = 3 if way_name == "slot" else 2
    assert first <= most
    assert second <= most


def test_whoever_keeps_every_batch_gets_them_all(way: Way) -> None:
    parcels = [torch.full((1 << 18,), float(place)) for place in range(8)]
    assert [each[0].item() for each in passed(parcels, way)] == list(range(8))


def test_a_loop_uses_the_memory_of_two_batches_in_turn(way: Way) -> None:
    def body(comm: LockstepComm, channel: Channel) -> set[int]:
        places: set[int] = set()
        held: list[Tensor] = []
        for place in range(8):
            if comm.rank:
                held[:] = [channel.receive()]
                assert held[0][-1].item() == place
                places.add(held[0].data_ptr())
            else:
                channel.send([None, torch.full((1 << 18,), float(place))])
        held.clear()
        comm.barrier()
        return places

    assert len(with_channel(body, hosts=way.hosts)[1]) <= 3  # a third where it ran short


def test_it_leaves_no_name_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "_INLINE_BYTES", 0)
    names: list[list[str]] = []

    def body(comm: LockstepComm, channel: Channel) -> None:
        if comm.rank:
            channel.receive()
        else:
            channel.send([None, torch.zeros(1000)])
        comm.barrier()
        names.append([name for name in os.listdir("/dev/shm") if "shardplug" in name])

    with_channel(body)
    assert names == [[], []]


def test_too_little_shared_memory_is_told_once_and_sent_around(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    parcels = [torch.arange(20_000) + k for k in range(3)]
    with caplog.at_level(logging.INFO, logger="shardplug.channel"):
        received = passed(parcels, WAYS["inline"])
    assert all(map(torch.equal, parcels, received))
    (record,) = caplog.records
    assert "shared memory for rank 1" in record.getMessage()
    assert "No space left" in record.getMessage()


def test_memory_that_runs_short_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reserve = shared_memory.reserve

    def limited(num_bytes: int) -> int:
        if num_bytes > 1_000_000:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return reserve(num_bytes)

    monkeypatch.setattr(outbox, "reserve", limited)
    parcels = [torch.arange(size) for size in (20_000, 200_000, 20_000)]
    with caplog.at_level(logging.INFO, logger="shardplug.channel"):
        received = passed(parcels, WAYS["inline"])
    assert all(map(torch.equal, parcels, received))
    assert len(caplog.records) == 1


def test_memory_that_cannot_be_mapped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(outbox, "map_memory", full)
    open_before = len(os.listdir("/proc/self/fd"))
    (back,) = passed([torch.arange(20_000)], WAYS["inline"])
    assert torch.equal(back, torch.arange(20_000))
    assert len(caplog.records) == 1
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_without_a_socket_of_the_host_it_goes_by_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wires, "_try_to_listen_on_host", lambda _name: None)
    (back,) = passed([torch.arange(20_000)], WAYS["inline"])
    assert torch.equal(back, torch.arange(20_000))


def test_a_socket_of_the_host_that_cannot_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = socket.socket(socket.AF_UNIX)
    monkeypatch.setattr(secrets, "token_hex", lambda _size: "taken")
    with blocked:
        blocked.bind("\0shardplug-taken")
        (back,) = passed([torch.arange(20_000)], WAYS["inline"])
    assert torch.equal(back, torch.arange(20_000))


def test_a_socket_of_the_host_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_reach(*_: object) -> NoReturn:
        raise OSError("no such place")

    monkeypatch.setattr(wires, "_reach_on_host", out_of_reach)
    (back,) = passed([torch.arange(20_000)], WAYS["inline"])
    assert torch.equal(back, torch.arange(20_000))


def test_no_socket_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wires, "_try_to_listen_on_host", lambda _name: None)
    monkeypatch.setattr(wires, "_try_to_listen_by_tcp", lambda: None)
    with pytest.raises(CommError, match="A socket must be had to send to the other ranks"):
        Listener()


def test_a_port_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> NoReturn:
        raise OSError("forbidden")

    monkeypatch.setattr(socket, "create_server", refused)
    (back,) = passed([torch.arange(20_000)], WAYS["inline"])
    assert torch.equal(back, torch.arange(20_000))


def test_a_host_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    (back,) = passed([torch.arange(20_000)], WAYS["stream"])
    assert torch.equal(back, torch.arange(20_000))


def test_a_rank_that_cannot_reach_the_reader_is_named_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reach = connect

    def cut_off(offer: Offer, rank: int, **options: Any) -> Any:
        away = dataclasses.replace(offer, addresses=()) if rank == 2 else offer
        return reach(away, rank, **options)

    monkeypatch.setattr(wires, "connect", cut_off)

    def body(comm: LockstepComm) -> str:
        with pytest.raises(CommError) as raised:
            open_channel(comm, hosts=["a", "b", "c"])
        return str(raised.value)

    for told in run_ranks(3, body):
        assert "Rank 2 cannot reach the rank that listens" in told


def test_addresses_are_tried_in_order_and_named_where_none_leads_there() -> None:
    listener = Listener(["no.such.host.invalid"])
    try:
        assert listener.offer.addresses[0] == "no.such.host.invalid"
        assert listener.offer.addresses[-1] == "127.0.0.1"
        offer = dataclasses.replace(listener.offer, addresses=("no.such.host.invalid", "127.0.0.1"))
        connection, is_local = connect(offer, 1, is_same_host=False)
        connection.close()
        assert not is_local
    finally:
        listener.stop()
    with pytest.raises(CommError, match="Rank 1 cannot reach the rank that listens, tried: its"):
        connect(listener.offer, 1, is_same_host=True)
    for made, _ in listener.connected.values():
        made.close()


def test_whoever_does_not_know_the_token_is_refused() -> None:
    listener = Listener()
    try:
        stranger = dataclasses.replace(listener.offer, token=bytes(32), addresses=("127.0.0.1",))
        with pytest.raises(CommError, match="somebody else listens there"):
            connect(stranger, 1, is_same_host=True)
        connection, is_local = connect(listener.offer, 2, is_same_host=True)
        connection.close()
        assert is_local
    finally:
        listener.stop()
    assert list(listener.connected) == [2]
    listener.connected[2][0].close()


def test_a_wrong_proof_is_refused() -> None:
    listener = Listener()
    try:
        with socket.create_connection(("127.0.0.1", listener.offer.port)) as intruder:
            intruder.sendall(bytes(wires._HELLO.size))
            asked = bytearray(16 + 32)
            wires.receive_exactly(intruder, memoryview(asked))
            # Its own proof sent back is that of another role.
            intruder.sendall(asked[16:])
            assert intruder.recv(1) == b""
    finally:
        listener.stop()
    assert listener.connected == {}


def test_the_token_is_not_shown() -> None:
    offer = Offer(b"secret", None, (), 0)
    assert "secret" not in repr(offer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reader": 2}, r"`reader` must be in \[0, 2\), got 2"),
        ({"hosts": ["a"]}, "`hosts` must have a name for each of the 2 ranks, got 1"),
    ],
)
def test_arguments_are_checked_on_all_ranks(options: dict[str, Any], message: str) -> None:
    def body(comm: LockstepComm) -> None:
        with pytest.raises(CommError, match=message):
            open_channel(comm, **options)

    run_ranks(2, body)


def test_each_end_has_calls_of_its_own() -> None:
    def body(comm: LockstepComm, channel: Channel) -> None:
        if comm.rank == 0:
            with pytest.raises(CommError, match="`receive` must be called on a rank other than"):
                channel.receive()
        else:
            with pytest.raises(CommError, match="`send` must be called on the reader, rank 0, got"):
                channel.send([None, None])
            with pytest.raises(CommError, match="`fail` must be called on the reader, rank 0, got"):
                channel.fail(ValueError())
        comm.barrier()

    with_channel(body)


def test_a_world_of_one() -> None:
    channel = open_channel(SoloComm())
    channel.begin(0)
    channel.send([torch.ones(1)])
    channel.fail(ValueError("nobody hears it"))
    channel.interrupt()
    channel.close()
    channel.close()


def test_what_was_sent_in_an_older_pass_is_thrown_away(way: Way) -> None:
    is_sent = threading.Semaphore(0)

    def body(comm: LockstepComm, channel: Channel) -> list[str]:
        seen = []
        for number in (1, 2, 5):
            channel.begin(number)
            if comm.rank == 0:
                sender = threading.Thread(target=send_until_told, args=(channel, number))
                sender.start()
                is_sent.acquire()
                is_sent.acquire()  # a third must wait
                comm.barrier()
                channel.interrupt()
                sender.join()
            else:
                seen.append(channel.receive()["name"])
                comm.barrier()
            comm.barrier()
        return seen

    def send_until_told(channel: Channel, number: int) -> None:
        names = [f"{number}.{place}" for place in range(100)]
        parcels = [[None, {"name": name, "x": torch.zeros(50_000)}] for name in names]
        with pytest.raises(InterruptError):
            send_all(channel, parcels, is_sent.release)

    assert with_channel(body, hosts=way.hosts)[1] == ["1.0", "2.0", "5.0"]


def test_a_new_pass_gives_up_a_send_of_the_older(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    # To another host the second waits until the receiver reads, in a message the third, and in
    # shared memory, where one lies ready and two slots are full, the fourth.
    num_sent = 2
    if not way.inline_bytes:
        num_sent = 1 if way.hosts else 3
    sent: list[int] = []
    is_in_last = threading.Event()
    raise_if_stopped = outbox.Outbox._raise_if_stopped

    def noted(end: outbox.Outbox, number: int) -> None:
        if len(sent) == num_sent:
            is_in_last.set()
        raise_if_stopped(end, number)

    monkeypatch.setattr(outbox.Outbox, "_raise_if_stopped", noted)

    def send_until_told(channel: Channel) -> None:
        parcels = [[None, torch.zeros(10)]] * (num_sent + 1)
        with pytest.raises(InterruptError):
            send_all(channel, parcels, lambda: sent.append(1))

    def body(comm: LockstepComm, channel: Channel) -> Any:
        received = None
        if comm.rank == 0:
            sender = threading.Thread(target=send_until_told, args=(channel,))
            sender.start()
            is_in_last.wait()
            channel.begin(1)
            sender.join()
        comm.barrier()
        if comm.rank == 0:
            channel.send([None, "new"])
        else:
            channel.begin(1)
            received = channel.receive()
        comm.barrier()
        return received

    assert with_channel(body, hosts=way.hosts)[1] == "new"
    assert len(sent) == num_sent


def test_calls_are_refused_between_an_interrupt_and_the_next_pass(way: Way) -> None:
    def body(comm: LockstepComm, channel: Channel) -> Any:
        channel.interrupt()
        with pytest.raises(InterruptError):
            channel.receive() if comm.rank else channel.send([None, "lost"])
        if comm.rank == 0:
            with pytest.raises(InterruptError):
                channel.fail(ValueError("lost"))
        channel.begin(1)
        received = None
        if comm.rank:
            received = channel.receive()
        else:
            channel.send([None, "found"])
        comm.barrier()
        return received

    assert with_channel(body, hosts=way.hosts)[1] == "found"


def test_an_interrupt_wakes_whoever_waits_for_a_parcel() -> None:
    def body(comm: LockstepComm, channel: Channel) -> None:
        if comm.rank:
            outcome: list[type[BaseException]] = []
            waiting = threading.Thread(target=wait, args=(channel, outcome))
            waiting.start()
            channel.interrupt()
            waiting.join()
            assert outcome == [InterruptError]
        comm.barrier()

    def wait(channel: Channel, outcome: list[type[BaseException]]) -> None:
        try:
            channel.receive()
        except InterruptError as error:
            outcome.append(type(error))

    with_channel(body)


def test_ranks_in_different_passes_get_an_error() -> None:
    def body(comm: LockstepComm, channel: Channel) -> None:
        if comm.rank == 0:
            channel.begin(4)
            channel.send([None, "early"])
        else:
            with pytest.raises(CommError, match="rank 0 is in pass 4 and this rank still in pass "):
                channel.receive()
        comm.barrier()

    with_channel(body)


def failed_with(error: BaseException, way: Way) -> list[BaseException]:
    """Tell two ranks of an error after a parcel; give what they raise."""

    def body(comm: LockstepComm, channel: Channel) -> BaseException | None:
        raised: BaseException | None = None
        if comm.rank == 0:
            channel.send([None, "first", "first"])
            try:
                read_what_raises(error)
            except BaseException as mine:  # noqa: BLE001  # as a reader does
                channel.fail(mine)
        else:
            assert channel.receive() == "first"
            for _ in range(2):  # it stays
                with pytest.raises(Exception) as told:  # noqa: PT011  # looked at by the caller
                    channel.receive()
                raised = told.value
        comm.barrier()
        channel.begin(1)
        if comm.rank == 0:
            channel.send([None, "again", "again"])
        else:
            assert channel.receive() == "again"
        comm.barrier()
        return raised

    return with_channel(body, 3, hosts=way.hosts)[1:]


def test_an_error_that_pickles_is_raised_as_it_was(way: Way) -> None:
    for raised in failed_with(KeyError("row", 3), way):
        assert type(raised) is KeyError
        assert raised.args == ("row", 3)
        assert isinstance(raised.__cause__, CommError)
        assert "Raised on rank 0" in str(raised.__cause__)
        assert "read_what_raises(error)" in str(raised.__cause__)  # the reader's line


def test_an_error_that_does_not_pickle_is_told(way: Way) -> None:
    class LocalError(Exception):
        pass

    for error, text in (
        (LocalError("deep inside"), "Rank 0 failed with LocalError: deep inside"),
        (TwoPartError(4, "bad row"), "Rank 0 failed with TwoPartError: 4: bad row"),
        (KeyboardInterrupt("stop"), "Rank 0 failed with KeyboardInterrupt: stop"),
        (ValueError(Stubborn()), "Rank 0 failed with ValueError: "),
    ):
        for raised in failed_with(error, way):
            assert type(raised) is CommError
            assert text in str(raised)
            assert "read_what_raises(error)" in str(raised.__cause__)


def test_the_end_of_a_receiver_is_told_to_all(way: Way) -> None:
    def body(comm: LockstepComm, channel: Channel) -> None:
        if comm.rank == 1:
            channel.close()
        comm.barrier()
        for number in range(1, 3):  # a new pass tells it again
            channel.begin(number)
            if comm.rank != 1:
                hear_of_the_end(comm, channel)
            comm.barrier()

    def hear_of_the_end(comm: LockstepComm, channel: Channel) -> None:
        news = "Rank 1 has ended, and can be sent no more batches"
        if comm.rank == 2:
            with pytest.raises(CommError, match=news):
                receive_all(channel, 9)
            return
        with pytest.raises(CommError, match=news) as raised:
            # TCP may learn it only by what is not taken.
            send_all(channel, [[None, "x", "x"]] * 9)
        channel.fail(raised.value)  # which all know
        with pytest.raises(CommError, match=news):
            channel.send([None, "x", "x"])

    with_channel(body, 3, hosts=way.hosts)


def test_several_receivers_that_ended_are_all_named() -> None:
    def body(comm: LockstepComm, channel: Channel) -> None:
        if comm.rank:
            channel.close()
        comm.barrier()
        if comm.rank == 0:
            with pytest.raises(CommError, match=r"Ranks 1, 2 have ended"):
                channel.send([None, "x", "x"])

    with_channel(body, 3)


def test_the_end_of_the_reader_is_noticed_after_what_it_sent(way: Way) -> None:
    def body(comm: LockstepComm, channel: Channel) -> None:
        if comm.rank == 0:
            channel.send([None, torch.arange(50_000)])
            channel.close()
        else:
            assert torch.equal(channel.receive(), torch.arange(50_000))
            for _ in range(2):
                with pytest.raises(CommError, match="Rank 0 has ended, and with it the batches"):
                    channel.receive()
        comm.barrier()

    with_channel(body, hosts=way.hosts)


def test_the_news_of_an_end_waits_for_what_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(outbox, "reserve", full)  # then a large parcel waits in the socket
    large = torch.arange(1_000_000)
    has_one = threading.Event()
    is_full = threading.Event()
    has_ended = threading.Event()
    serve = outbox.Outbox._serve

    def noted(end: outbox.Outbox, timeout_s: float | None = None) -> None:
        if has_one.is_set() and any(peer.outgoing for peer in end._peers.values()):
            is_full.set()
        serve(end, timeout_s)

    monkeypatch.setattr(outbox.Outbox, "_serve", noted)

    def body(comm: LockstepComm, channel: Channel) -> None:
        if comm.rank == 0:
            channel.send([None, "x", large])
            has_one.set()
            with pytest.raises(CommError, match="Rank 1 has ended"):
                send_all(channel, [[None, None, large]] * 9)
        elif comm.rank == 1:
            is_full.wait()
            channel.close()
            has_ended.set()
        else:
            has_ended.wait()
            assert torch.equal(channel.receive(), large)
            with pytest.raises(CommError, match="Rank 1 has ended"):
                receive_all(channel, 9)
        comm.barrier()

    with_channel(body, 3)


def test_an_error_with_a_long_text_waits_for_those_who_are_busy(way: Way) -> None:
    text = "long " * 1_000_000
    is_sent = threading.Event()

    def body(comm: LockstepComm, channel: Channel) -> None:
        if comm.rank == 0:
            channel.send([None, "x"])
            is_sent.set()
            channel.fail(ValueError(text))
        else:
            is_sent.wait()
            assert channel.receive() == "x"
            with pytest.raises(ValueError, match="long") as raised:
                channel.receive()
            assert raised.value.args == (text,)
        comm.barrier()

    with_channel(body, hosts=way.hosts)


def test_an_error_of_a_class_that_is_not_there_is_told() -> None:
    error = read_failure(pickle.dumps((b"of another version", "OddError: why", "line 3")), 2)
    assert type(error) is CommError
    assert str(error) == "Rank 2 failed with OddError: why"
    assert str(error.__cause__) == "Raised on rank 2:\nline 3"


def test_a_host_that_does_not_say_who_it_is_is_like_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert wires.host_name() == wires.host_name()

    def forbidden(*_: object) -> NoReturn:
        raise OSError("forbidden")

    monkeypatch.setattr(os, "readlink", forbidden)
    assert wires.host_name() != wires.host_name()


def test_a_parcel_that_cannot_be_sent_is_not_sent_in_part(way: Way) -> None:
    def body(comm: LockstepComm, channel: Channel) -> Any:
        received = None
        if comm.rank == 0:
            with pytest.raises(BatchError, match=r"`batch` must hold .* what can be pickled"):
                channel.send([None, "half", threading.Lock()])
            channel.send([None, "whole", "whole"])
        else:
            received = channel.receive()
        comm.barrier()
        return received

    assert with_channel(body, 3, hosts=way.hosts)[1:] == ["whole", "whole"]


def test_a_parcel_that_cannot_be_put_together(way: Way) -> None:
    def body(comm: LockstepComm, channel: Channel) -> None:
        if comm.rank == 0:
            channel.send([None, Stubborn()])
        else:
            with pytest.raises(
                CommError, match="A batch from rank 0 cannot be put together: no way in"
            ) as raised:
                channel.receive()
            assert isinstance(raised.value.__cause__, ValueError)
        comm.barrier()

    with_channel(body, hosts=way.hosts)


def test_calls_after_the_end(way: Way) -> None:
    def body(comm: LockstepComm, channel: Channel) -> None:
        channel.close()
        channel.close()
        channel.interrupt()
        channel.begin(7)
        with pytest.raises(InterruptError):
            channel.receive() if comm.rank else channel.send([None, "x"])
        comm.barrier()

    with_channel(body, hosts=way.hosts)


def test_a_send_that_waits_ends_with_the_channel(way: Way) -> None:
    is_sent = threading.Semaphore(0)

    def body(comm: LockstepComm, channel: Channel) -> None:
        if comm.rank == 0:
            sender = threading.Thread(target=send_until_told, args=(channel,))
            sender.start()
            is_sent.acquire()
            channel.close()
            sender.join()
        comm.barrier()

    def send_until_told(channel: Channel) -> None:
        with pytest.raises(InterruptError):
            send_all(channel, [[None, torch.zeros(200_000)]] * 9, is_sent.release)

    with_channel(body, hosts=way.hosts)


def test_a_channel_that_is_given_up_ends_its_threads_and_sockets() -> None:
    def body(comm: Comm) -> None:
        channel = open_channel(comm)
        channel.begin(0)
        if comm.rank:
            assert channel.receive() == "x"
        else:
            channel.send([None, "x"])
        comm.barrier()

    open_before = len(os.listdir("/proc/self/fd"))
    run_ranks(2, body)
    gc.collect()
    assert not [each for each in threading.enumerate() if each.name.startswith("shardplug-receive")]
    assert len(os.listdir("/proc/self/fd")) == open_before
