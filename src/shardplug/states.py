"""The state of a loader: what is in it, and whether it fits the loader that is to go on from it.

A state is a flat dictionary of numbers, strings and None, always with the same keys, so that JSON,
``torch.save`` and ``torch.distributed.checkpoint`` take it as it is.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardplug.errors import StateError
from shardplug.passes import Snapshot
from shardplug.plan.cursor import Cursor

VERSION = 1

_AGAIN = "Prepare the loader as it was when the state was saved, or start without the state."


@dataclass(frozen=True, slots=True)
class Identity:
    """What a loader has to have in common with the one whose state it takes.

    Attributes:
        unit: What positions count: "samples" or "batches".
        kind: The class of the sampler, batch sampler or stream that makes the order.
        num_samples: Samples (or ready batches) in the epoch's order; None if not known.
        batch_size: As the user's loader declares it; None if it declares none.
        seed: What the order and the workers follow.
        is_seed_pinned: Whether the user chose the seed; another one is taken over from a state.
        num_shards: Into how many parts the data is divided.
        num_workers: Workers of the loader.
    """

    unit: str
    kind: str
    num_samples: int | None
    batch_size: int | None
    seed: int
    is_seed_pinned: bool
    num_shards: int
    num_workers: int

    def blank(self) -> dict[str, Any]:
        """Make the state of a loader that has not begun."""
        return {
            "version": VERSION,
            "epoch": 0,
            "consumed": 0,
            "unit": self.unit,
            "seed": self.seed,
            "num_samples": self.num_samples,
            "batch_size": self.batch_size,
            "sampler": self.kind,
            "is_done": False,
            "extra_rows": 0,
            "steps": None,
            "num_shards": None,
            "num_workers": None,
            "shard_index": None,
            "worker_positions": None,
            "order_length": None,
            "order_checksum": None,
            "source": None,
        }


def layout_of(identity: Identity, steps: int) -> dict[str, Any]:
    """Say that a position counts steps, and of which layout of ranks.

    Args:
        identity: The loader.
        steps: How many steps are done.
    """
    return {"steps": steps, "num_shards": identity.num_shards}


def split_of(
    identity: Identity, snapshots: Sequence[Snapshot], *, shard_index: int | None
) -> dict[str, Any]:
    """Say how far each worker is that makes its own part of a stream.

    Args:
        identity: The loader.
        snapshots: Of the workers, in the order in which they were taken.
        shard_index: Whose workers they are, where ranks read parts of their own; None: anybody's.
    """
    # A pair for each worker, in the order of their latest batches: the last one's turn was last.
    positions = [f"{each.worker[0]}:{each.position}" for each in snapshots if each.worker]
    return {
        "num_workers": identity.num_workers,
        "shard_index": shard_index,
        "worker_positions": " ".join(positions),
    }


def read_state(state: Any, identity: Identity) -> tuple[Cursor, int]:
    """Check a state against the loader that is to go on from it.

    Args:
        state: What `state_dict` returned, however it has been stored since.
        identity: The loader.

    Returns:
        Where to go on, and the seed of the order.

    Raises:
        StateError: If it does not fit; the message names the field, both values, and what to do.
    """
    check_mapping(state, what="what state_dict() of the loader returned")
    check_version(state)
    missing = identity.blank().keys() - state.keys()
    if missing:
        raise StateError(
            f"`state` must have all fields of a loader's state, got one without {sorted(missing)}. "
            "Pass it as it was saved."
        )
    _compare(state, "unit", identity.unit, _AGAIN)
    _compare(state, "sampler", identity.kind, _AGAIN)
    _compare(
        state,
        "num_samples",
        identity.num_samples,
        "Give the loader the data set that it had: positions in another one mean other samples.",
    )
    seed = number_in(state, "seed", least=-(2**63))
    if identity.is_seed_pinned:
        _compare(state, "seed", identity.seed, "Pass the seed of the run that was saved.")
    if identity.unit == "batches":
        _compare(state, "batch_size", identity.batch_size, _AGAIN)
    steps = _check_layout(state, identity)
    cursor = Cursor(
        epoch=number_in(state, "epoch"),
        consumed=0 if steps is not None else number_in(state, "consumed"),
        extra_rows=number_in(state, "extra_rows"),
        steps=steps or 0,
        is_done=_flag_in(state, "is_done"),
        order=_order_in(state),
        snapshots=_snapshots_in(state, identity),
    )
    most = identity.num_samples if identity.unit == "samples" else None
    if most is not None and cursor.consumed > most:
        raise StateError(
            f"`consumed` of the state must be in [0, {most}], got {cursor.consumed}. The state is "
            "damaged: take another one."
        )
    return cursor, seed


def check_mapping(state: Any, *, what: str) -> None:
    """Check that a state is a dictionary at all.

    Raises:
        StateError: If it is not.
    """
    if not isinstance(state, Mapping):
        raise StateError(
            f"`state` must be {what}, a dictionary, got {type(state).__name__}. "
            "Pass its own entry of the checkpoint."
        )


def check_version(state: Mapping[str, Any]) -> None:
    """Check that this version can read a state.

    Raises:
        StateError: If it cannot.
    """
    version = state.get("version")
    if not isinstance(version, int) or version != VERSION:
        raise StateError(
            f"`version` of the state must be {VERSION}, got {version!r:.80}. "
            "Load it with the version of shardplug that saved it."
        )


def _check_layout(state: Mapping[str, Any], identity: Identity) -> int | None:
    """Return the steps of a position that counts them; None for one that any layout can take."""
    if state["steps"] is None:
        return None
    remedy = (
        "Its position counts steps, since the data divides itself: go on with the layout that it "
        "was saved with. Data sets that are looked up by index, and streams that every rank reads, "
        "go on with any."
    )
    _compare(state, "num_shards", identity.num_shards, remedy)
    _compare(state, "batch_size", identity.batch_size, remedy)
    if state["num_workers"] is not None:
        _compare(state, "num_workers", identity.num_workers, remedy)
    return number_in(state, "steps")


def _snapshots_in(state: Mapping[str, Any], identity: Identity) -> tuple[Snapshot, ...]:
    if state["worker_positions"] is None:
        return () if state["source"] is None else (decode_snapshot(state["source"]),)
    text = state["worker_positions"]
    if (
        state["steps"] is None
        or not isinstance(text, str)
        or re.fullmatch(r"(\d+:\d+( \d+:\d+)*)?", text) is None
    ):
        raise StateError(
            f"`worker_positions` of the state must be pairs of numbers beside `steps`, got "
            f"{text!r:.60} and {state['steps']}. "
            "The state is damaged: take another one."
        )
    pairs = [tuple(map(int, pair.split(":"))) for pair in text.split()]
    return tuple(
        Snapshot(position, None, (worker, max(1, identity.num_workers)))
        for worker, position in pairs
    )


def _order_in(state: Mapping[str, Any]) -> tuple[int, int] | None:
    if state["order_length"] is None:
        return None
    return number_in(state, "order_length"), number_in(state, "order_checksum")


def _compare(state: Mapping[str, Any], field: str, now: object, remedy: str) -> None:
    # Of another kind first: arrays would be compared item by item.
    if not isinstance(state[field], (int, float, str, type(None))) or state[field] != now:
        raise StateError(
            f"`{field}` of the state must be that of the loader, {now!r}, got "
            f"{state[field]!r:.80}. {remedy}"
        )


def number_in(state: Mapping[str, Any], field: str, *, least: int = 0) -> int:
    """Read a number of a state.

    Raises:
        StateError: If it is none, too small, or larger than any that is written.
    """
    value = state.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise StateError(
            f"`{field}` of the state must be an integer of at least {least}, got {value!r:.80}. "
            "The state is damaged: take another one."
        )
    return value


def _flag_in(state: Mapping[str, Any], field: str) -> bool:
    value = state[field]
    if not isinstance(value, bool):
        raise StateError(
            f"`{field}` of the state must be True or False, got {value!r:.80}. "
            "The state is damaged: take another one."
        )
    return value


# States of sources, as text.


def encode(value: Any, *, what: str) -> str:
    """Write a value as text: JSON where that gives it back, else what ``torch.save`` makes of it.

    Raises:
        StateError: If ``torch.load`` would refuse to read it back: it holds objects of a class that
            need not be safe.
    """
    try:
        text = json.dumps(value)
        if _same(json.loads(text), value):
            return "json:" + text
    except (TypeError, ValueError):
        pass  # it holds more than JSON knows
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:  # pickle raises whatever an object's own methods raise
        raise StateError(
            f"`state_dict()` of {what} must return numbers, strings, bytes, lists, dicts and "
            f"tensors, got what cannot be saved and loaded safely: {error}"
        ) from error
    return "torch:" + base64.b64encode(buffer.getvalue()).decode("ascii")


def decode(text: Any, *, field: str) -> Any:
    """Read what `encode` wrote.

    Raises:
        StateError: If it is no such text.
    """
    kind, _, content = text.partition(":") if isinstance(text, str) else ("", "", "")
    try:
        if kind == "json":
            return json.loads(content)
        if kind == "torch":
            return torch.load(io.BytesIO(base64.b64decode(content)), weights_only=True)
    except Exception as error:  # damaged content is reported in whichever way it breaks
        raise StateError(
            f"`{field}` of the state must be as it was saved, got text that cannot be read: {error}"
        ) from error
    raise StateError(f"`{field}` of the state must be as it was saved, got {text!r:.60}.")


def encode_snapshot(snapshot: Snapshot, *, what: str) -> str:
    """Write the state of a source as text."""
    worker = None if snapshot.worker is None else list(snapshot.worker)
    return encode([snapshot.position, worker, snapshot.state], what=what)


def decode_snapshot(text: Any) -> Snapshot:
    """Read the state of a source.

    Raises:
        StateError: If it is no such state.
    """
    content = decode(text, field="source")
    match content:
        case [int(position), None, state] if position >= 0:
            return Snapshot(position, state)
        case [int(position), [int(worker), int(count)], state] if 0 <= worker < count:
            return Snapshot(position, state, (worker, count))
    raise StateError(f"`source` of the state must be as it was saved, got {content!r:.60}.")


def _same(read: Any, value: Any) -> bool:
    """Tell whether JSON gave a value back as it was: tuples and number keys it does not."""
    if isinstance(value, Mapping):
        return (
            type(value) is dict
            and read.keys() == value.keys()
            and all(_same(read[key], value[key]) for key in value)
        )
    if isinstance(value, Sequence) and not isinstance(value, str):
        return type(value) is list and all(map(_same, read, value))
    return type(read) is type(value) and bool(read == value)  # NaN goes the other way
