"""Under a real launcher: with Ignite's own start of the ranks, and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, sys

import ignite.distributed as idist
import torch
from ignite.engine import Engine, create_supervised_trainer
from ignite.metrics import ConfusionMatrix
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardplug_ignite import ShardHandler


def train(local_rank):
    trained = []
    # Where Ignite has not started the ranks, making a handler does.
    shard, exact = ShardHandler(data_seed=1), ShardHandler(mode="eval")
    model = idist.auto_model(nn.Linear(1, 1))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.01))
    trainer = create_supervised_trainer(
        model, optimizer, nn.MSELoss(),
        output_transform=lambda x, y, *_: trained.append(x.flatten().int().tolist()),
    )
    shard.attach(trainer)
    evaluator = Engine(lambda _, batch: (nn.functional.one_hot(batch, 11).float(), batch))
    ConfusionMatrix(11).attach(evaluator, "rows")
    exact.attach(evaluator)
    rows = torch.arange(8.0)[:, None]
    trainer.run(DataLoader(TensorDataset(rows, rows), batch_size=2), max_epochs=1)
    counted = evaluator.run(DataLoader(torch.arange(11), batch_size=4)).metrics["rows"].diag()
    weight = next(model.parameters()).item()
    told = [idist.get_world_size(), trained, counted.int().tolist(), weight]
    with open(f"{sys.argv[1]}/{sys.argv[2]}-{idist.get_rank()}.json", "w") as file:
        json.dump(told, file)


if sys.argv[2] == "ignite":
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(train)
else:
    train(0)
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("who", ["ignite", "shardplug"])
def test_whoever_starts_the_ranks_they_share_the_data(tmp_path: Path, who: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, str(program), str(tmp_path), who],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads((tmp_path / f"{who}-{rank}.json").read_text()) for rank in range(2)]
    weight = told[0][3]
    assert told == [
        [2, [[0, 1], [4, 5]], [1] * 11, weight],
        [2, [[2, 3], [6, 7]], [1] * 11, weight],
    ]
