"""Under a real launcher: the engine starts the process group, and ends it with the program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, json, sys, warnings

warnings.simplefilter("error")

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from shardplug import ShardEngine

told = {"before": dist.is_initialized()}


@atexit.register  # handlers run last in, first out: this one runs after the engine's
def tell():
    told["at_exit"] = dist.is_initialized()
    with open(f"{sys.argv[1]}/{told['rank']}.json", "w") as file:
        json.dump(told, file)


engine = ShardEngine(data_seed=0)
told.update(
    rank=engine.rank,
    world_size=engine.world_size,
    during=dist.is_initialized(),
    batches=[batch.tolist() for batch in engine.prepare(DataLoader(torch.arange(8), batch_size=2))],
)
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_process_group_lives_as_long_as_the_program(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, str(program), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr.lower()
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    alike = {"world_size": 2, "before": False, "during": True, "at_exit": False}
    assert told == [
        {"rank": 0, "batches": [[0, 1], [4, 5]], **alike},
        {"rank": 1, "batches": [[2, 3], [6, 7]], **alike},
    ]
