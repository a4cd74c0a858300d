"""The module that examples share: a checkpoint is there as a whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from examples import checkpoints


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("step-*.pt"))


def test_the_newest_is_found_and_the_old_ones_go(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    assert checkpoints.newest(folder) is None
    for step in (5, 10, 100, 95):
        path = checkpoints.save({"step": step, "weights": torch.arange(3)}, folder, step)
        assert torch.load(path, weights_only=True)["step"] == step
    # 95 is written by a process that has fallen behind: what is newer than it stays.
    assert steps_in(folder) == [5, 10, 95, 100]
    found = checkpoints.newest(folder)
    assert found is not None
    assert found["step"] == 100
    assert found["weights"].tolist() == [0, 1, 2]
    checkpoints.save({"step": 105}, folder, 105, keep=2)
    assert steps_in(folder) == [100, 105]
    assert [path.suffix for path in folder.iterdir()] == [".pt"] * 2


@pytest.mark.parametrize("kept_bytes", [0, 1, 700, -1])
def test_a_torn_one_is_passed_over(tmp_path: Path, kept_bytes: int) -> None:
    checkpoints.save({"step": 1}, tmp_path, 1)
    torn = checkpoints.save({"step": 2}, tmp_path, 2)
    size = torn.stat().st_size
    assert size > 701
    os.truncate(torn, kept_bytes % size)
    with pytest.warns(UserWarning, match=f"{torn.name} is torn and is passed over"):
        found = checkpoints.newest(tmp_path)
    assert found == {"step": 1}
    checkpoints.save({"step": 2}, tmp_path, 2)  # anew, in its place
    assert checkpoints.newest(tmp_path) == {"step": 2}


def test_one_with_a_flipped_bit_is_passed_over(tmp_path: Path) -> None:
    checkpoints.save({"step": 1}, tmp_path, 1)
    torn = checkpoints.save({"step": 2, "weights": torch.zeros(100)}, tmp_path, 2)
    data = bytearray(torn.read_bytes())
    data[len(data) // 2] ^= 1
    torn.write_bytes(data)
    with pytest.warns(UserWarning, match="is torn"):
        assert checkpoints.newest(tmp_path) == {"step": 1}


def test_what_stops_the_writing_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.save({"step": 1}, tmp_path, 1)

    def die(handle: int) -> None:
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", die)
        with pytest.raises(InterruptedError):
            checkpoints.save({"step": 2}, tmp_path, 2)
    assert checkpoints.newest(tmp_path) == {"step": 1}
    assert steps_in(tmp_path) == [1]
