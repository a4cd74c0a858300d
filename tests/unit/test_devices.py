"""Batches on their way to a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from shardplug import devices
from shardplug.devices import move_batches

META = torch.device("meta")


class Pair(NamedTuple):
    image: torch.Tensor
    label: str


def nested(number: int) -> dict[str, Any]:
    return {
        "pair": Pair(torch.full((2,), number), "cat"),
        "more": [torch.ones(1), (None, 3, True)],
    }


@pytest.mark.parametrize("non_blocking", [False, True])
def test_every_tensor_is_moved_and_everything_else_passes_through(non_blocking: bool) -> None:
    batches = [nested(at) for at in range(3)]
    moved = list(move_batches(iter(batches), META, non_blocking=non_blocking))
    assert len(moved) == 3
    for batch in moved:
        assert batch["pair"].image.device == META
        assert batch["pair"].image.shape == (2,)
        assert type(batch["pair"]) is Pair
        assert batch["pair"].label == "cat"
        assert batch["more"][0].device == META
        assert batch["more"][1] == (None, 3, True)
    assert all(batch["pair"].image.device.type == "cpu" for batch in batches)


@pytest.mark.parametrize("non_blocking", [False, True])
def test_on_the_cpu_no_batch_is_asked_for_before_its_turn(non_blocking: bool) -> None:
    asked: list[int] = []

    def source() -> Iterator[torch.Tensor]:
        for at in range(3):
            asked.append(at)
            yield torch.tensor(at)

    moved = move_batches(source(), torch.device("cpu"), non_blocking=non_blocking)
    assert asked == []
    assert next(moved).item() == 0
    assert asked == [0]


class FakeStream:
    """Notes who waits for whom."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> None:
        self.log.append(f"on {self.name}")

    def __exit__(self, *_: object) -> None:
        self.log.append(f"off {self.name}")


def test_copies_run_one_ahead_on_a_stream_that_work_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    copying, working = FakeStream("copying", log), FakeStream("working", log)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: copying)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: working)

    def move(batch: int, device: torch.device, *, non_blocking: bool) -> int:
        assert (device.type, non_blocking) == ("cuda", True)
        log.append(f"copy {batch}")
        return 10 * batch

    monkeypatch.setattr(devices, "move_to_device", move)
    cuda = torch.device("cuda", 0)
    for moved in devices.move_batches(iter([1, 2]), cuda, non_blocking=True):
        log.append(f"use {moved}")
    copies = [["on copying", f"copy {number}", "off copying"] for number in (1, 2)]
    assert log == [
        *copies[0],
        "working waits for copying",
        *copies[1],
        "use 10",
        "working waits for copying",
        "use 20",
    ]
    assert list(devices.move_batches(iter(()), cuda, non_blocking=True)) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_next_batch_is_copied_beside_the_work_on_this_one() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    asked: list[int] = []

    def source() -> Iterator[dict[str, Any]]:
        for at in range(4):
            asked.append(at)
            yield {"x": torch.full((1 << 20,), at).pin_memory(), "name": str(at)}

    for at, batch in enumerate(move_batches(source(), device, non_blocking=True)):
        assert asked == list(range(min(4, at + 2)))
        assert batch["x"].device == device
        assert (batch["name"], int(batch["x"].sum())) == (str(at), at << 20)
    assert list(move_batches(iter(()), device, non_blocking=True)) == []
