"""Ranks that are killed in the middle are missed by the others, whoever holds copies of sockets."""

from __future__ import annotations

import os
import signal
import stat
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shardplug.channel import Channel, open_channel
from shardplug.comm import Comm
from shardplug.errors import CommError
from tests.launch import RankError, run_processes

WAYS = [None, ("a", "b", "c")]
NAMES = ["one host", "three hosts"]
NUM_PARCELS = 5


def parcel(step: int) -> dict[str, Any]:
    return {"x": torch.full((100, 1000), float(step)), "step": step}


def check(received: dict[str, Any], step: int) -> None:
    assert received["step"] == step
    assert torch.equal(received["x"], torch.full((100, 1000), float(step)))


def _send_and_receive(comm: Comm, hosts: Sequence[str] | None) -> int:
    channel = open_channel(comm, hosts=hosts)
    for number in range(3):
        channel.begin(number)
        for step in range(NUM_PARCELS):
            if comm.rank == 0:
                channel.send([None, parcel(step), parcel(step)])
            else:
                check(channel.receive(), step)
    comm.barrier()
    channel.close()
    return os.getpid()


@pytest.mark.parametrize("hosts", WAYS, ids=NAMES)
def test_processes_receive_what_one_sends(hosts: Sequence[str] | None) -> None:
    assert len(set(run_processes(3, _send_and_receive, hosts))) == 3


def _leave_open(comm: Comm) -> None:
    channel = open_channel(comm)
    channel.begin(0)
    if comm.rank == 0:
        channel.send([None, parcel(0)])
    else:
        check(channel.receive(), 0)
    comm.barrier()
    comm.kept = channel  # type: ignore[attr-defined]  # up to the end of the interpreter


def test_a_channel_left_open_does_not_keep_a_process_from_ending() -> None:
    assert run_processes(2, _leave_open) == [None, None]


def _die(comm: Comm, who: int, hosts: Sequence[str] | None, folder: str) -> None:
    channel = open_channel(comm, hosts=hosts)
    channel.begin(0)
    step = 0
    if comm.rank == who:
        _fork_a_child_that_stays(Path(folder))
    comm.barrier()
    try:
        while True:
            if comm.rank == who and step == NUM_PARCELS:
                os.kill(os.getpid(), signal.SIGKILL)
            _go_on(comm, channel, step)
            step += 1
    except CommError as error:
        (Path(folder) / str(comm.rank)).write_text(f"{step >= NUM_PARCELS - 2} {error}")


def _go_on(comm: Comm, channel: Channel, step: int) -> None:
    if comm.rank == 0:
        channel.send([None, parcel(step), parcel(step)])
    else:
        check(channel.receive(), step)


def _fork_a_child_that_stays(folder: Path) -> None:
    """Fork as a loader's workers are, with all that this process has open but pipes.

    A pipe would keep whoever started this process from seeing its end.
    """
    ready, is_ready = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from Python 3.12 on: there are threads
        child = os.fork()
    if child:
        os.close(is_ready)
        assert os.read(ready, 1) == b"!"
        os.close(ready)
        return
    try:
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in (0, 1, 2, is_ready):
                _close_if_pipe(int(name))
        os.write(is_ready, b"!")
        os.close(is_ready)
        os.close(os.open(folder / "stay", os.O_RDONLY))  # until the test has looked
    finally:
        os._exit(0)


def _close_if_pipe(descriptor: int) -> None:
    try:
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            os.close(descriptor)
    except OSError:
        return  # the listing's own, closed by now


@pytest.mark.parametrize("hosts", WAYS, ids=NAMES)
@pytest.mark.parametrize("who", [0, 1], ids=["the reader", "a receiver"])
def test_a_rank_that_is_killed_is_named_by_the_others(
    who: int, hosts: Sequence[str] | None, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "stay")
    with pytest.raises(RankError, match=rf"^Rank {who} ended with exit code -9") as raised:
        run_processes(3, _die, who, hosts, str(tmp_path))
    # Nobody can open it for writing unless the child that inherited the sockets still reads it.
    os.close(os.open(tmp_path / "stay", os.O_WRONLY | os.O_NONBLOCK))
    assert "Still running" not in str(raised.value)
    for rank in {0, 1, 2} - {who}:
        assert (tmp_path / str(rank)).read_text().startswith(f"True Rank {who} has ended")
