"""Checkpoints that are whole or not there, for the programs beside this file.

A checkpoint is written beside its place, flushed to the disk, and only then renamed: whenever the
process dies, the newest one is whole. A disk that loses power may still keep less than it said, so
each carries the checksum of its content in its name, and one that is torn is passed over.
"""

from __future__ import annotations

import io
import os
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch


def save(content: dict[str, Any], folder: Path, step: int, *, keep: int = 3) -> Path:
    """Write a checkpoint so that it is there as a whole or not at all.

    Only one rank may call it.

    Args:
        content: What ``torch.load(..., weights_only=True)`` takes.
        folder: Made if it is not there; nothing else should be kept in it.
        step: Checkpoints of later steps are newer ones.
        keep: How many to keep of this one and those before it.
    """
    buffer = io.BytesIO()
    torch.save(content, buffer)
    data = buffer.getvalue()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}-{zlib.crc32(data):08x}.pt"
    part = folder / f"{os.getpid()}.part"
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    _flush_folder(folder)
    before = sorted(each for each in folder.glob("step-*.pt") if each.name < path.name)
    for old in before[: max(0, len(before) - keep + 1)]:
        old.unlink()
    return path


def newest(folder: Path) -> dict[str, Any] | None:
    """Load the newest checkpoint that is whole; None if there is none.

    Every rank finds the same one, as long as none trains before all have looked.
    """
    for path in sorted(folder.glob("step-*.pt"), reverse=True):
        data = path.read_bytes()
        if path.stem.endswith(f"-{zlib.crc32(data):08x}"):
            content: dict[str, Any] = torch.load(
                io.BytesIO(data), map_location="cpu", weights_only=True
            )
            return content
        warnings.warn(f"The checkpoint {path} is torn and is passed over.", stacklevel=2)
    return None


def _flush_folder(folder: Path) -> None:
    """Let the disk keep the new name, too; systems without folders as files do so themselves."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
