"""Many ranks in one process: try out code that talks to other ranks without starting any.

`run_ranks` gives each rank a thread and a `LockstepComm`. Values pass between ranks by pickling,
as between processes, so no rank holds an object of another. Whatever would make real ranks hang
(different collectives, a rank that left) is an error at once, naming who did what.
"""

from __future__ import annotations

import operator
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, final

from shardplug.comm import pickled, raise_unless_sent
from shardplug.errors import CommError

T = TypeVar("T")


class Call(NamedTuple):
    """One collective that a rank has been through.

    Attributes:
        name: The method of the comm.
        num_bytes: Size of what this rank sent: 8 per integer, the pickled size of an object.
    """

    name: str
    num_bytes: int


@final
class LockstepComm:
    """One of many ranks in one process, see `run_ranks`; satisfies `shardplug.Comm`.

    A value reaches the other ranks as a copy, made by pickling; a rank's own comes back as it is.
    A collective that cannot end is a CommError on every rank that is in it or comes to it later:
    the ranks are in different collectives, pass different numbers of integers, or one of them has
    returned or raised.

    Attributes:
        calls: The collectives that this rank has been through, in order.
    """

    def __init__(self, rank: int, world: _World) -> None:
        """Take a place in the world; `run_ranks` does that."""
        self._rank = rank
        self._world = world
        self.calls: list[Call] = []

    @property
    def rank(self) -> int:
        """This rank's number, from zero."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many ranks take part in every collective."""
        return self._world.size

    def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Give every rank the integers of all ranks, by rank.

        Collective: every rank must call it, with the same number of values.

        Args:
            values: Integers in [-2^63, 2^63).

        Returns:
            The values of all ranks, by rank.

        Raises:
            CommError: If a value is out of range, or the collective cannot end.
        """
        mine = tuple(operator.index(value) for value in values)
        for value in mine:
            if not -(2**63) <= value < 2**63:
                raise CommError(f"`values` must be in [-2^63, 2^63), got {value}.")
        met = self._meet("all_gather_ints", f"{len(mine)} values", mine, num_bytes=8 * len(mine))
        return list(met)

    def all_gather_object(self, value: T) -> list[T]:
        """Give every rank a copy of the picklable values of all ranks, by rank.

        Collective: every rank must call it.

        Args:
            value: What this rank gives.

        Returns:
            The values of all ranks, by rank.

        Raises:
            CommError: If a value cannot be pickled, or the collective cannot end.
        """
        sent, failure = pickled(value)
        met = self._meet("all_gather_object", "", sent, num_bytes=len(sent or b""))
        raise_unless_sent([data is not None for data in met], failure)
        return [
            value if rank == self._rank else pickle.loads(data) for rank, data in enumerate(met)
        ]

    def broadcast_object(self, value: T | None, src: int = 0) -> T:
        """Give every rank a copy of the picklable value of rank ``src``.

        Collective: every rank must call it, with the same ``src``.

        Args:
            value: What rank ``src`` gives; ignored on the others.
            src: The rank whose value counts.

        Returns:
            The value of rank ``src``.

        Raises:
            CommError: If ``src`` is out of range, the value cannot be pickled, or the collective
                cannot end.
        """
        if not 0 <= src < self.world_size:
            raise CommError(f"`src` must be in [0, {self.world_size}), got {src}.")
        sent, failure = pickled(value) if self._rank == src else (b"", None)
        met = self._meet("broadcast_object", f"src={src}", sent, num_bytes=len(sent or b""))
        raise_unless_sent([data is not None for data in met], failure)
        if self._rank != src:
            value = pickle.loads(met[src])
        return value  # type: ignore[return-value]  # None is a value of T where src passed None

    def barrier(self) -> None:
        """Return when every rank has called it.

        Collective: every rank must call it.

        Raises:
            CommError: If the collective cannot end.
        """
        self._meet("barrier", "", None, num_bytes=0)

    def _meet(self, name: str, detail: str, payload: Any, *, num_bytes: int) -> tuple[Any, ...]:
        met = self._world.meet(self._rank, f"{name}({detail})", payload)
        self.calls.append(Call(name, num_bytes))
        return met


def run_ranks(
    world_size: int, body: Callable[..., T], *args: Any, timeout_s: float = 30.0
) -> list[T]:
    """Run ``body`` on many ranks at once, one thread each, and return what they return.

    All ranks share one process: module globals, torch's global RNG and ``args`` are the same
    objects on every rank.

    Args:
        world_size: How many ranks, at least 1.
        body: Called as ``body(comm, *args)`` on every rank, with that rank's `LockstepComm`.
        *args: Given to every rank as they are, not copied.
        timeout_s: How long all of it may take. A thread cannot be ended from outside: a rank that
            is busy then goes on until it returns or reaches its next collective.

    Returns:
        The results, by rank.

    Raises:
        CommError: If ``world_size`` is less than 1, a collective cannot end, or the time is up.
        BaseException: What ``body`` raised, from the rank where it did so first; errors of other
            ranks are in its notes.

    Example:
        >>> def share(comm, unit):
        ...     return comm.all_gather_object(f"{comm.rank} {unit}")
        >>> run_ranks(2, share, "apples")
        [['0 apples', '1 apples'], ['0 apples', '1 apples']]
    """
    if world_size < 1:
        raise CommError(f"`world_size` must be at least 1, got {world_size}.")
    world = _World(world_size)
    results: list[Any] = [None] * world_size

    def live(rank: int) -> None:
        with world.membership(rank):
            results[rank] = body(LockstepComm(rank, world), *args)

    threads = [
        threading.Thread(target=live, args=(rank,), name=f"shardplug-rank-{rank}", daemon=True)
        for rank in range(world_size)
    ]
    try:
        for thread in threads:
            thread.start()
        world.wait_until_left(timeout_s)
    except (
        BaseException
    ):  # KeyboardInterrupt above all: the ranks must not wait on in their threads
        world.close("The run was interrupted.")
        raise
    finally:
        for rank in world.left():
            threads[rank].join()
    world.raise_first_error()
    return results


class _World:
    """Where the ranks of one run meet: a rank waits until all have come or one no longer can."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._waiting: dict[int, tuple[str, Any]] = {}
        self._round = 0
        self._met: tuple[Any, ...] = ()
        self._left: dict[int, str] = {}
        self._errors: list[tuple[int, BaseException]] = []
        self._failure: str | None = None

    def meet(self, rank: int, call: str, payload: Any) -> tuple[Any, ...]:
        """Wait for all ranks in the same call and return their payloads, by rank."""
        with self._changed:
            self._enter(rank, call, payload)
            if self._failure is None and len(self._waiting) == self.size:
                # Nobody can complete another round before all have taken what this one brought.
                self._met = tuple(self._waiting[each][1] for each in range(self.size))
                self._waiting.clear()
                self._round += 1
                self._changed.notify_all()
                return self._met
            this_round = self._round
            while self._round == this_round:
                if self._failure is not None:
                    self._waiting.pop(rank, None)
                    raise CommError(self._failure)
                self._changed.wait()
            return self._met

    @contextmanager
    def membership(self, rank: int) -> Iterator[None]:
        """Note at the end that a rank has returned or raised: nobody can meet it any more."""
        error: BaseException | None = None
        try:
            yield
        # Everything, SystemExit and pytest's own outcomes (skip, fail) too: the thread would print
        # or drop it, and the other ranks would wait for one that is gone.
        except BaseException as raised:  # noqa: BLE001  # raised again in the caller's thread
            error = raised
        with self._changed:
            if error is None:
                self._left[rank] = "returned"
            else:
                self._left[rank] = f"raised {type(error).__name__}: {error}"
                self._errors.append((rank, error))
            self._check()
            self._changed.notify_all()

    def left(self) -> list[int]:
        """List the ranks that have returned or raised."""
        with self._changed:
            return list(self._left)

    def close(self, reason: str) -> None:
        """End every wait, with an error, and give those that waited a second to leave."""
        with self._changed:
            waiting = set(self._waiting)
            self._fail(reason)
            self._changed.wait_for(lambda: waiting <= self._left.keys(), timeout=1.0)

    def wait_until_left(self, timeout_s: float) -> None:
        """Wait until every rank has left; when the time is up, end every wait and raise."""
        with self._changed:
            if self._changed.wait_for(lambda: len(self._left) == self.size, timeout_s):
                return
            busy = ", ".join(
                f"rank {rank} {self._doing(rank)}"
                for rank in range(self.size)
                if rank not in self._left
            )
            failed_before = bool(self._errors)
            reason = f"All ranks must be done within {timeout_s} s, but {busy}."
            self.close(reason)
            if not failed_before:
                raise CommError(reason)

    def raise_first_error(self) -> None:
        """Raise what the first rank to fail has raised, if one has, with the others as notes."""
        if not self._errors:
            return
        first, error = self._errors[0]
        notes = [f"Raised on rank {first} of {self.size}."]
        notes += [f"Rank {rank} {self._left[rank]}" for rank, _ in self._errors[1:]]
        # What add_note does, which Python 3.10 does not have.
        error.__notes__ = [*getattr(error, "__notes__", []), *notes]  # type: ignore[attr-defined]
        raise error

    def _enter(self, rank: int, call: str, payload: Any) -> None:
        if rank in self._waiting:
            self._fail(
                f"Rank {rank} called {call} in one thread while another of its threads waited in "
                f"{self._waiting[rank][0]}."
            )
        else:
            self._waiting[rank] = (call, payload)
            self._check()

    def _check(self) -> None:
        calls = {call for call, _ in self._waiting.values()}
        if not calls or (len(calls) == 1 and not self._left):
            return
        present = sorted({*self._waiting, *self._left})
        doing = ", ".join(f"rank {rank} {self._doing(rank)}" for rank in present)
        self._fail(f"Every rank must be in the same collective, but {doing}.")

    def _doing(self, rank: int) -> str:
        if rank in self._waiting:
            return f"is in {self._waiting[rank][0]}"
        return self._left.get(rank, "is busy elsewhere")

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._changed.notify_all()
