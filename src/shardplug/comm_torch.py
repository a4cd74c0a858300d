"""Real ranks: the comm over torch.distributed, and what this process is told by its launcher.

The only module that imports torch.distributed or reads the environment.
"""

from __future__ import annotations

import atexit
import operator
import os
import pickle
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
import torch.distributed as dist

from shardplug.comm import Comm, SoloComm, pickled, raise_unless_sent
from shardplug.errors import CommError, PlanError
from shardplug.signals import Postponed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

_HEAD = struct.Struct("<qqq")  # which collective, a number that ranks must agree on, bytes to come
_CANNOT_SEND = -1

_LEAST_HEAD_BYTES, _MOST_HEAD_BYTES = 512, 1 << 14
_ALL_HEADS_BYTES = 1 << 18
"""What the first messages of all ranks take together, as long as each stays within its bounds.

A second collective costs more than some KiB, so that small results are to fit into the first one;
with many ranks, each of which receives those of all, less fits in.
"""

_CALLS = (
    "barrier()",
    "all_gather_ints({} values)",
    "all_gather_object()",
    "broadcast_object(src={})",
)
_BARRIER, _GATHER_INTS, _GATHER_OBJECT, _BROADCAST_OBJECT = range(len(_CALLS))


@final
class TorchComm:
    """The ranks of a torch.distributed process group; satisfies `shardplug.Comm`.

    Its collectives are ordinary ones of the group: they may be mixed with collectives of your own
    on it, as long as every rank calls all of them in the same order, from one thread. What
    torch.distributed raises in one of them becomes a CommError that names it.

    Every collective begins with the same exchange, of 16 KiB on up to 16 ranks and half a KiB from
    512 on, in which each rank says where it is. So ranks in different collectives get an error,
    which gloo would answer by ending the process and NCCL by hanging; and a value that fits into
    it needs no second message. The size of it depends on nothing but the number of ranks: ranks
    that have been through different calls still understand each other.

    A handler of SIGCHLD, such as torch's, which raises where a worker has died, runs after a
    collective, not in it: all ranks come out of that.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, device: torch.device | None = None
    ) -> None:
        """Join a group that exists.

        Args:
            group: The ranks, of which this process must be one. None: the default group.
            device: Where the tensors of a collective live. None: the CPU where the group has a
                backend for it (gloo), else the current device of the kind that it has one for.

        Raises:
            CommError: If the group does not exist, or this process is no member of it.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise CommError(
                "`group` must be a process group that exists, got none. "
                "Call start_process_group() or torch.distributed.init_process_group() first."
            )
        self._rank = dist.get_rank(group)
        if self._rank < 0:
            raise CommError(
                f"`group` must have this process as a member, but rank {dist.get_rank()} of the "
                "default group is not in it."
            )
        self._world_size = dist.get_world_size(group)
        self._group = group
        self._device = _device_of(group) if device is None else device
        self._head_bytes = min(
            _MOST_HEAD_BYTES, max(_LEAST_HEAD_BYTES, _ALL_HEADS_BYTES // self._world_size)
        )
        self._inline_bytes = self._head_bytes - _HEAD.size

    @property
    def rank(self) -> int:
        """This process's number in the group, from zero."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""
        return self._world_size

    def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Give every rank the integers of all ranks, by rank.

        Collective: every rank must call it, with the same number of values.

        Args:
            values: Integers in [-2^63, 2^63).

        Returns:
            The values of all ranks, by rank.

        Raises:
            CommError: If a value is out of range, ranks are in different collectives, or
                torch.distributed fails.
        """
        integers = [operator.index(value) for value in values]
        for value in integers:
            if not -(2**63) <= value < 2**63:
                raise CommError(f"`values` must be in [-2^63, 2^63), got {value}.")
        data = struct.pack(f"<{len(integers)}q", *integers)
        by_rank = self._gather(_GATHER_INTS, len(integers), data)
        return [struct.unpack(f"<{len(integers)}q", packed) for packed in by_rank]

    def all_gather_object(self, value: T) -> list[T]:
        """Give every rank the picklable values of all ranks, by rank; its own as it is.

        Collective: every rank must call it.

        Args:
            value: What this rank gives.

        Returns:
            The values of all ranks, by rank.

        Raises:
            CommError: If a value cannot be pickled, ranks are in different collectives, or
                torch.distributed fails.
        """
        data, failure = pickled(value)
        by_rank = self._gather(_GATHER_OBJECT, 0, data, failure)
        return [
            value if rank == self._rank else pickle.loads(by_rank[rank])
            for rank in range(self._world_size)
        ]

    def broadcast_object(self, value: T | None, src: int = 0) -> T:
        """Give every rank the picklable value of rank ``src``; that rank its own as it is.

        Collective: every rank must call it, with the same ``src``.

        Args:
            value: What rank ``src`` gives; ignored on the others.
            src: The rank whose value counts.

        Returns:
            The value of rank ``src``.

        Raises:
            CommError: If ``src`` is out of range, the value cannot be pickled, ranks are in
                different collectives, or torch.distributed fails.
        """
        if not 0 <= src < self._world_size:
            raise CommError(f"`src` must be in [0, {self._world_size}), got {src}.")
        data, failure = pickled(value) if self._rank == src else (b"", None)
        with Postponed():
            sizes, heads = self._meet(_BROADCAST_OBJECT, src, data, failure)
            sent = heads[src]
            if sizes[src] > self._inline_bytes:
                sent = self._broadcast(data or b"", sizes[src], src=src)
        if self._rank != src:
            value = pickle.loads(sent)
        return value  # type: ignore[return-value]  # None is a value of T where src passed None

    def barrier(self) -> None:
        """Return when every rank has called it.

        Collective: every rank must call it.

        Raises:
            CommError: If ranks are in different collectives, or torch.distributed fails.
        """
        with Postponed():
            self._meet(_BARRIER, 0, b"")

    def _gather(
        self, call: int, number: int, data: bytes | None, failure: Exception | None = None
    ) -> list[memoryview]:
        """Exchange bytes of any size, by rank; what is shorter than the longest is filled up."""
        with Postponed():
            sizes, heads = self._meet(call, number, data, failure)
            longest = max(sizes)
            if longest <= self._inline_bytes:
                return heads
            with self._named(call, number):
                return self._exchange(data or b"", longest)

    def _meet(
        self, call: int, number: int, data: bytes | None, failure: Exception | None = None
    ) -> tuple[list[int], list[memoryview]]:
        """Exchange where each rank is, how many bytes it has to send, and those that fit."""
        size = _CANNOT_SEND if data is None else len(data)
        head = _HEAD.pack(call, number, size) + (data or b"")[: self._inline_bytes]
        with self._named(call, number):
            messages = self._exchange(head, self._head_bytes)
        heads = [_HEAD.unpack_from(message) for message in messages]
        _raise_unless_together([(call, number) for call, number, _ in heads])
        sizes = [size for _, _, size in heads]
        raise_unless_sent([size != _CANNOT_SEND for size in sizes], failure)
        inline = [
            message[_HEAD.size : _HEAD.size + size]
            for message, size in zip(messages, sizes, strict=True)
        ]
        return sizes, inline

    def _exchange(self, data: bytes, num_bytes: int) -> list[memoryview]:
        """Give every rank the data of all, filled up to ``num_bytes``."""
        # Received into a buffer of our own: a tensor's bytes cannot be read without numpy.
        buffer = bytearray(self._world_size * num_bytes)
        received = torch.frombuffer(buffer, dtype=torch.uint8).view(self._world_size, num_bytes)
        by_rank = received.to(self._device)
        mine = torch.frombuffer(_filled_up(data, num_bytes), dtype=torch.uint8).to(self._device)
        dist.all_gather(list(by_rank), mine, group=self._group)
        received.copy_(by_rank)
        rows = memoryview(buffer)
        return [rows[i * num_bytes : (i + 1) * num_bytes] for i in range(self._world_size)]

    def _broadcast(self, data: bytes, num_bytes: int, *, src: int) -> memoryview:
        """Give every rank the data of rank ``src``, which has ``num_bytes``."""
        buffer = _filled_up(data, num_bytes)
        received = torch.frombuffer(buffer, dtype=torch.uint8)
        sent = received.to(self._device)
        with self._named(_BROADCAST_OBJECT, src):
            dist.broadcast(sent, self._rank_in_default_group(src), group=self._group)
            received.copy_(sent)
        return memoryview(buffer)

    def _rank_in_default_group(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)

    @contextmanager
    def _named(self, call: int, number: int) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise CommError(
                f"{_CALLS[call].format(number)} failed on rank {self._rank} of "
                f"{self._world_size}: {error} Look at the output of the other ranks: one may "
                "have ended, or be in a collective of another kind."
            ) from error


def current_comm() -> Comm:
    """Find the ranks of this run: the default process group if there is one, else this process.

    Returns:
        A `TorchComm` over the default group of torch.distributed once that is initialised, a
        `SoloComm` before.
    """
    if dist.is_available() and dist.is_initialized():
        return TorchComm()
    return SoloComm()


def start_process_group(*, timeout_s: float | None = None) -> bool:
    """Start the default process group, if a launcher such as torchrun asks for one.

    It does when ``RANK``, ``WORLD_SIZE`` and ``MASTER_ADDR`` are in the environment. With CUDA the
    group has NCCL for CUDA tensors and gloo for those on the CPU, and `local_device` becomes the
    current device; else it has gloo. A group that was started here ends when the interpreter does.
    Nothing happens without a launcher, or when there is a default group already.

    Collective: every rank must call it.

    Args:
        timeout_s: How long a collective may take before it is an error. None: torch's default.

    Returns:
        Whether a group was started.

    Raises:
        CommError: If the other ranks cannot be reached, or what the launcher says does not fit
            this machine.
    """
    if not dist.is_available() or dist.is_initialized():
        return False
    if any(name not in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        return False
    device = local_device()
    has_nccl = device.type == "cuda" and dist.is_nccl_available()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout: dict[str, Any] = {}
    if timeout_s is not None:
        timeout["timeout"] = timedelta(seconds=timeout_s)
    try:
        store, rank, world_size = next(dist.rendezvous("env://", **timeout))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if has_nccl else "gloo",
            store=dist.PrefixStore(_attempt(), store),
            rank=rank,
            world_size=world_size,
            device_id=device if has_nccl else None,
            **timeout,
        )
        # A rank that has come through may end at once, while others still connect to it.
        TorchComm().barrier()
    except (RuntimeError, ValueError) as error:
        raise CommError(
            f"The process group of {os.environ['WORLD_SIZE']} ranks did not start on rank "
            f"{os.environ['RANK']}: {error}"
        ) from error
    atexit.register(_end_process_group)
    return True


def local_device() -> torch.device:
    """Find the device of this process: one CUDA device per process of a machine, else the CPU.

    Returns:
        With CUDA, the device numbered ``LOCAL_RANK`` in the environment, or the only one that this
        process can see; without a launcher the current device. Else the CPU.

    Raises:
        CommError: If ``LOCAL_RANK`` is not the number of a CUDA device.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    told = os.environ.get("LOCAL_RANK")
    if told is None:
        return torch.device("cuda", torch.cuda.current_device())
    num_devices = torch.cuda.device_count()
    if not told.isdecimal() or int(told) >= num_devices > 1:
        raise CommError(
            f"`LOCAL_RANK` must be in [0, {num_devices}), the CUDA devices that this process can "
            f"see, got {told}. Start at most as many processes on a machine as it has devices."
        )
    return torch.device("cuda", int(told) if num_devices > 1 else 0)


def mesh_coordinate(mesh: DeviceMesh) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]:
    """Read the axes of a device mesh and where on them this rank is.

    Args:
        mesh: A mesh with named axes, of which this rank is a part.

    Returns:
        Names of the axes, ranks along each, and this rank's place on each.

    Raises:
        PlanError: If the axes have no names, or this rank is not on the mesh.
    """
    sizes = tuple(mesh.shape)
    axes = mesh.mesh_dim_names
    if axes is None:
        raise PlanError(
            f"`torch_device_mesh` must have named axes, got one of shape {sizes} without names. "
            "Give init_device_mesh their names, mesh_dim_names=(...)."
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise PlanError(
            f"`torch_device_mesh` must have this process on it, but rank {dist.get_rank()} is not "
            f"on the mesh of shape {sizes} with axes {axes}."
        )
    return axes, sizes, tuple(coordinate)


def _attempt() -> str:
    """Name this start of the ranks, so that none reads in the store what ranks that ended left.

    torchrun keeps one store for all restarts, and the addresses in it are those of the first.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"shardplug/{restarts}/{os.environ['WORLD_SIZE']}"


def _end_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    # "cpu:gloo,cuda:nccl": for each kind of device the backend that serves it.
    kinds = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])


def _filled_up(data: bytes, num_bytes: int) -> bytearray:
    buffer = bytearray(num_bytes)
    buffer[: len(data)] = data
    return buffer


def _raise_unless_together(places: Sequence[tuple[int, int]]) -> None:
    if len(set(places)) > 1:
        doing = ", ".join(
            f"rank {rank} is in {_CALLS[call].format(number)}"
            for rank, (call, number) in enumerate(places)
        )
        raise CommError(f"Every rank must be in the same collective, but {doing}.")
