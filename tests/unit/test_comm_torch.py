"""What this process is told by its launcher; real groups are in tests/processes."""

from __future__ import annotations

import atexit
from unittest.mock import Mock, call

import pytest
import torch
import torch.distributed as dist

from shardplug import comm_torch
from shardplug.errors import CommError

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "1"}


@pytest.fixture(autouse=True)
def _without_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def _give_cuda(monkeypatch: pytest.MonkeyPatch, *, num_devices: int, current: int = 0) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)


@pytest.mark.parametrize("local_rank", [None, "1", "x"])
def test_without_cuda_the_device_is_the_cpu(
    monkeypatch: pytest.MonkeyPatch, local_rank: str | None
) -> None:
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert comm_torch.local_device() == torch.device("cpu")


@pytest.mark.parametrize(
    ("local_rank", "num_devices", "index"),
    [
        (None, 4, 2),  # the current one
        ("0", 4, 0),
        ("3", 4, 3),
        ("0", 1, 0),
        ("3", 1, 0),  # a launcher that shows each process its own device only
    ],
)
def test_with_cuda_each_process_has_its_own_device(
    monkeypatch: pytest.MonkeyPatch, local_rank: str | None, num_devices: int, index: int
) -> None:
    _give_cuda(monkeypatch, num_devices=num_devices, current=2)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert comm_torch.local_device() == torch.device("cuda", index)


@pytest.mark.parametrize("local_rank", ["2", "-1", "x", ""])
def test_a_local_rank_without_device_is_an_error(
    monkeypatch: pytest.MonkeyPatch, local_rank: str
) -> None:
    _give_cuda(monkeypatch, num_devices=2)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(
        CommError, match=rf"`LOCAL_RANK` must be in \[0, 2\), .* got {local_rank}\."
    ):
        comm_torch.local_device()


@pytest.mark.parametrize("missing", [None, "RANK", "WORLD_SIZE", "MASTER_ADDR"])
def test_no_group_is_started_without_a_launcher(
    monkeypatch: pytest.MonkeyPatch, missing: str | None
) -> None:
    for name, value in LAUNCHED.items():
        if missing is not None and name != missing:
            monkeypatch.setenv(name, value)
    assert comm_torch.start_process_group() is False
    assert not dist.is_initialized()


def test_no_group_is_started_where_torch_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "is_available", lambda: False)
    assert comm_torch.start_process_group() is False
    assert comm_torch.current_comm().world_size == 1


def _meet(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    """Let the ranks of LAUNCHED meet in a store."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda url, **_: iter([(store, 1, 4)]))
    return store


@pytest.mark.parametrize("error", [RuntimeError("no route to host"), ValueError("bad port")])
def test_a_group_that_does_not_start_is_an_error_of_ours(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    _meet(monkeypatch)
    monkeypatch.setattr(dist, "init_process_group", fail)
    with pytest.raises(CommError, match=f"of 4 ranks did not start on rank 1: {error}") as caught:
        comm_torch.start_process_group()
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("has_nccl", "backend", "device"),
    [(True, "cpu:gloo,cuda:nccl", torch.device("cuda", 1)), (False, "gloo", None)],
)
def test_with_cuda_the_group_has_nccl_beside_gloo(
    monkeypatch: pytest.MonkeyPatch, has_nccl: bool, backend: str, device: torch.device | None
) -> None:
    _give_cuda(monkeypatch, num_devices=2)
    started: list[object] = []
    current: list[torch.device] = []
    at_exit: list[object] = []
    everybody = Mock()

    def start(backend: str, *, store: dist.PrefixStore, **options: object) -> None:
        store.set("key", "value")
        started.append((backend, options))

    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    store = _meet(monkeypatch)
    monkeypatch.setattr(dist, "init_process_group", start)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: has_nccl)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(comm_torch, "TorchComm", Mock(return_value=everybody))
    monkeypatch.setattr(atexit, "register", at_exit.append)
    assert comm_torch.start_process_group() is True
    assert started == [(backend, {"rank": 1, "world_size": 4, "device_id": device})]
    # A rank that left before the others had connected to it would be an error on them.
    assert everybody.mock_calls == [call.barrier()]
    # Apart from what an earlier start of the ranks has left in the store.
    assert store.check(["shardplug/2/4/key"])
    assert current == [torch.device("cuda", 1)]
    assert len(at_exit) == 1


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cuda:nccl,cpu:gloo", "cpu"),
        ("cuda:nccl", "cuda"),
        ("xpu:xccl", "xpu"),
    ],
)
def test_collectives_run_on_the_cpu_where_the_group_can(
    monkeypatch: pytest.MonkeyPatch, config: str, kind: str
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: config)
    assert comm_torch.TorchComm()._device == torch.device(kind)
    chosen = comm_torch.TorchComm(device=torch.device("meta"))
    assert chosen._device == torch.device("meta")


@pytest.mark.parametrize(
    ("world_size", "num_bytes"),
    [(1, 16384), (16, 16384), (17, 15420), (64, 4096), (512, 512), (513, 512), (4096, 512)],
)
def test_the_first_message_is_smaller_where_more_ranks_receive_it(
    monkeypatch: pytest.MonkeyPatch, world_size: int, num_bytes: int
) -> None:
    sent: list[tuple[int, int]] = []

    def gather(received: list[torch.Tensor], mine: torch.Tensor, group: object) -> None:
        sent.append((len(received), mine.numel()))
        for each in received:
            each.copy_(mine)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: world_size)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cpu:gloo")
    monkeypatch.setattr(dist, "all_gather", gather)
    comm = comm_torch.TorchComm()
    comm.barrier()
    assert comm.all_gather_object(b"x" * 400) == [b"x" * 400] * world_size
    assert sent == [(world_size, num_bytes)] * 2
