"""What shardplug asks of the other ranks, as a protocol: no torch, no process group.

Everything above this module takes a `Comm` and runs unchanged on `SoloComm` (a world of one), on
`shardplug.testing.LockstepComm` (many ranks in one process) and on
`shardplug.comm_torch.TorchComm` (real ranks). All methods but the two properties are collectives:
every rank of the comm calls them, in the same order.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from shardplug.errors import CommError
from shardplug.signals import Postponed

T = TypeVar("T")


@runtime_checkable
class Comm(Protocol):
    """The ranks of one run, and the few collectives that shardplug uses."""

    @property
    def rank(self) -> int:
        """This process's number in the comm, from zero."""

    @property
    def world_size(self) -> int:
        """How many ranks take part in every collective."""

    def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Give every rank the integers of all ranks, by rank.

        The cheap collective: one message of ``8 * len(values)`` bytes, nothing pickled. All ranks
        pass the same number of values, each in [-2^63, 2^63).

        Collective: every rank must call it.
        """

    def all_gather_object(self, value: T) -> list[T]:
        """Give every rank the picklable values of all ranks, by rank.

        Collective: every rank must call it.
        """

    def broadcast_object(self, value: T | None, src: int = 0) -> T:
        """Give every rank the picklable value of rank ``src``; the others' values are ignored.

        Collective: every rank must call it.
        """

    def barrier(self) -> None:
        """Return when every rank has called it.

        Collective: every rank must call it.
        """


class SoloComm:
    """A world of one: every collective returns at once."""

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def world_size(self) -> int:
        """Always 1."""
        return 1

    def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the values given, as those of rank 0."""
        return [tuple(values)]

    def all_gather_object(self, value: T) -> list[T]:
        """Return the value given, as that of rank 0."""
        return [value]

    def broadcast_object(self, value: T | None, src: int = 0) -> T:
        """Return the value given."""
        if src != 0:
            raise CommError(f"`src` must be in [0, 1), got {src}.")
        return value  # type: ignore[return-value]  # None is a value of T where src passed None

    def barrier(self) -> None:
        """Return at once."""


def agree(comm: Comm, decide: Callable[[], T]) -> list[T]:
    """Run ``decide`` on every rank and give every rank all results, or raise on every rank.

    This is how shardplug keeps a failure on one rank from becoming a hang on the others: what
    ``decide`` raises is told to all ranks. The rank it happened on raises the original error, the
    others a CommError that names that rank and the cause.

    Collective: every rank must call it.

    Args:
        comm: The ranks.
        decide: What this rank works out; its result must be picklable.

    Returns:
        The results of all ranks, by rank.

    Raises:
        CommError: If ``decide`` raised on another rank.
    """
    signals = Postponed()
    try:
        result, failure = _tried(decide, signals)
        if comm.world_size > 1:
            outcomes = comm.all_gather_object((_told(failure), result))
        else:
            outcomes = [(None, result)]
    finally:
        signals.end()
    if failure is not None:
        raise failure
    raise_if_failed([cause for cause, _ in outcomes])
    return [value for _, value in outcomes]  # type: ignore[misc]  # no rank failed: all are T


def _tried(decide: Callable[[], T], signals: Postponed) -> tuple[T | None, Exception | None]:
    """Run ``decide``, then hold signals back; return its result, or what it or they raised."""
    try:
        try:
            result = decide()
        finally:
            signals.begin()
    except Exception as error:  # noqa: BLE001  # raised again by the caller, once all ranks know
        signals.begin()  # not done yet where a handler has raised before it
        return None, error
    return result, None


def _told(failure: Exception | None) -> str | None:
    return None if failure is None else f"{type(failure).__name__}: {failure}"


def raise_if_failed(causes: Sequence[str | None]) -> None:
    """Raise a CommError that names each rank with a cause of failure; None means no failure.

    Args:
        causes: By rank, what failed there, or None.

    Raises:
        CommError: If there is a cause.
    """
    failed = [f"rank {rank} failed with {cause}" for rank, cause in enumerate(causes) if cause]
    if failed:
        raise CommError("Another rank could not go on: " + "; ".join(failed))


def pickled(value: object) -> tuple[bytes | None, Exception | None]:
    """Pickle what is to be sent, or tell why that cannot be: the others are to know, too.

    Args:
        value: Anything.

    Returns:
        The bytes and None, or None and the error.
    """
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), None
    except Exception as error:  # noqa: BLE001  # a user's __reduce__; raised once all ranks know
        return None, error


def raise_unless_sent(was_sent: Sequence[bool], failure: Exception | None) -> None:
    """Raise a CommError where a rank could not pickle its value; call it once all ranks know.

    Args:
        was_sent: By rank, whether it could.
        failure: Why this rank could not, or None.

    Raises:
        CommError: If a rank could not.
    """
    if failure is not None:
        raise CommError(f"`value` must be picklable, but {failure}") from failure
    raise_if_failed([None if sent else "pickling its value" for sent in was_sent])


def gather_facts(
    comm: Comm,
    decide: Callable[[], tuple[T, Sequence[int]]],
    *,
    num_facts: int,
    late: list[Exception] | None = None,
) -> tuple[T, list[tuple[int, ...]]]:
    """Run ``decide`` on every rank and give every rank the integers it returned on all of them.

    One small message when all is well; when ``decide`` raised somewhere, a second one tells why.

    Collective: every rank must call it.

    Args:
        comm: The ranks.
        decide: Works out this rank's result and its facts.
        num_facts: How many facts that is, on every rank.
        late: Takes what a signal handler raises when this rank's facts are under way already, to
            be given to the next call, which tells the others. None: it is raised at the end.

    Returns:
        This rank's result, and the facts by rank.

    Raises:
        CommError: If ``decide`` raised on another rank.
    """
    signals = Postponed(late)
    try:
        decided, failure = _tried(_late_or(decide, late), signals)
        facts = (0,) * num_facts if decided is None else decided[1]
        gathered = [(failure is not None, *facts)]
        if comm.world_size > 1:
            gathered = comm.all_gather_ints(gathered[0])
            if any(failed for failed, *_ in gathered):
                _tell(comm, failure)
    finally:
        signals.end()
    if failure is not None:
        raise failure
    by_rank = [tuple(facts) for _, *facts in gathered]
    return decided[0], by_rank  # type: ignore[index]  # decide did not raise: it is there


def _late_or(decide: Callable[[], T], late: list[Exception] | None) -> Callable[[], T]:
    def decide_unless_late() -> T:
        if late:
            raise late.pop()
        return decide()

    return decide_unless_late


def _tell(comm: Comm, failure: Exception | None) -> None:
    """Tell the others what failed here, if anything has; raise if it was on them only."""
    try:
        causes = comm.all_gather_object(_told(failure))
    except CommError as error:
        # What failed here is not lost because telling it has failed as well.
        raise failure or error from error
    if failure is None:
        raise_if_failed(causes)


def agree_on(
    comm: Comm,
    decide: Callable[[], tuple[T, Sequence[int]]],
    *,
    subject: str,
    facts: Mapping[str, str | None],
) -> tuple[T, Sequence[int]]:
    """Run ``decide`` on every rank and compare the integers it returns: equal, or an error on all.

    Collective: every rank must call it.

    Args:
        comm: The ranks.
        decide: Works out this rank's result and one integer for each fact.
        subject: What the facts are about, for the message.
        facts: The name of each integer, and what to do when ranks differ in it; None for one that
            may differ.

    Returns:
        This rank's result, and the integers of rank 0.

    Raises:
        CommError: If ranks differ in a fact, or ``decide`` raised on another rank.
    """
    result, by_rank = gather_facts(comm, decide, num_facts=len(facts))
    for place, (name, remedy) in enumerate(facts.items()):
        if remedy is None:
            continue
        first = by_rank[0][place]
        for rank, values in enumerate(by_rank):
            if values[place] != first:
                raise CommError(
                    f"Ranks disagree on the {name} of {subject}: rank 0 has {first}, rank {rank} "
                    f"has {values[place]}. {remedy}"
                )
    return result, by_rank[0]
