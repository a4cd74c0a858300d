"""What each rank has of its own of a checkpoint, in a file beside it.

A stream that each rank reads its own part of stands somewhere else on each rank, and so do data
sets with states in workers. Nothing is gathered when a checkpoint is saved, since one rank alone
may be saving it: every rank but the first writes a file of its own. What the first has is in the
checkpoint, which also says how many files belong to it, and of which moment they have to be.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning.fabric.plugins import CheckpointIO

from shardplug import Comm, StateError

States = tuple[tuple[str, ...], ...]
"""For each training loader, the states of its source that are one rank's own, as text."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Which files belong to a checkpoint.

    Attributes:
        world_size: How many ranks saved it.
        moment: Tells the moment at which it was saved from any other one.
        name: Of the checkpoint, as it was saved.
    """

    world_size: int
    moment: str
    name: str

    def as_dict(self) -> dict[str, Any]:
        """Write it as numbers and strings."""
        return asdict(self)

    @classmethod
    def read(cls, entry: Any) -> Parts:
        """Read what `as_dict` made.

        Raises:
            StateError: If it is something else.
        """
        kinds = {"world_size": int, "moment": str, "name": str}
        if not isinstance(entry, Mapping) or any(
            not isinstance(entry.get(name), kind) for name, kind in kinds.items()
        ):
            raise StateError(
                f"`parts` of the checkpoint must say which files belong to it, got {entry!r:.60}. "
                "The checkpoint is damaged: take another one."
            )
        return cls(**{name: entry[name] for name in kinds})


def part_path(checkpoint: Any, rank: int) -> str:
    """Name the file of a rank's own part."""
    return f"{os.fspath(checkpoint)}.rank-{rank:05d}"


def save_part(
    files: CheckpointIO,
    checkpoint: Any,
    *,
    rank: int,
    moment: str,
    own: States,
    storage_options: Any = None,
) -> None:
    """Save what a rank has of its own.

    Args:
        files: Writes them.
        checkpoint: Where the checkpoint is saved.
        rank: Whose part it is.
        moment: Of `Parts`.
        own: What the rank has.
        storage_options: For ``files``.
    """
    content = {"moment": moment, "own": [list(each) for each in own]}
    files.save_checkpoint(content, part_path(checkpoint, rank), storage_options=storage_options)


def remove_part(files: CheckpointIO, checkpoint: Any, *, rank: int) -> None:
    """Remove what a rank has saved beside a checkpoint, if it has."""
    try:
        files.remove_checkpoint(part_path(checkpoint, rank))
    except FileNotFoundError:
        return  # it was saved without


def load_part(
    files: CheckpointIO,
    checkpoint: Any,
    parts: Parts,
    comm: Comm,
    *,
    num_loaders: int,
    weights_only: bool | None = None,
) -> States | None:
    """Load what this rank has of its own.

    Collective: every rank must call it.

    Args:
        files: Reads them.
        checkpoint: Where the checkpoint is, or a link to it.
        parts: What it says.
        comm: As many ranks as saved it.
        num_loaders: How many loaders there were to train on.
        weights_only: For ``files``.

    Returns:
        What the rank had; None for the first, whose part is in the checkpoint.

    Raises:
        StateError: If a part is missing, or damaged, or of another moment; on all ranks.
    """
    own: States | None = None
    problem: str | None = None
    if comm.rank:
        try:
            content = _find(files, checkpoint, parts.name, comm.rank, weights_only)
            own = _read(content, parts, part_path(checkpoint, comm.rank), num_loaders)
        except StateError as error:
            problem = str(error)
        except Exception as error:  # noqa: BLE001  # a store's own; told to all, who wait for it
            path = part_path(checkpoint, comm.rank)
            problem = f"`{path}` must be there to be read, got {type(error).__name__}: {error}"
    problems = [each for each in comm.all_gather_object(problem) if each is not None]
    if problems:
        raise StateError(problems[0])
    return own


def _find(
    files: CheckpointIO, checkpoint: Any, name: str, rank: int, weights_only: bool | None
) -> Any:
    for path in _possible_paths(os.fspath(checkpoint), name):
        try:
            return files.load_checkpoint(part_path(path, rank), weights_only=weights_only)
        except FileNotFoundError:
            continue
    raise StateError(
        f"`{part_path(checkpoint, rank)}` must be there, with what rank {rank} had of its own in "
        "the checkpoint, got no such file. Copy it beside the checkpoint, or take another one."
    )


def _possible_paths(checkpoint: str, name: str) -> Iterator[str]:
    """List where a checkpoint may have been saved: here, where a link leads to, by its old name."""
    yield checkpoint
    if os.path.islink(checkpoint):
        yield os.path.realpath(checkpoint)
    yield os.path.join(os.path.dirname(checkpoint), name)


def _read(content: Any, parts: Parts, path: str, num_loaders: int) -> States:
    found = content.get("moment") if isinstance(content, Mapping) else None
    if found != parts.moment:
        raise StateError(
            f"`{path}` must be of the moment of the checkpoint, {parts.moment!r}, got {found!r}. "
            "Its rank failed before it could save: take another checkpoint."
        )
    own = content.get("own")
    if not isinstance(own, Sequence) or len(own) != num_loaders:
        raise StateError(
            f"`own` of {path} must be of {num_loaders} loaders, got {own!r:.60}. It is damaged: "
            "take another checkpoint."
        )
    return tuple(tuple(each) for each in own)
