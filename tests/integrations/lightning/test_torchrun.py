"""A script that torchrun starts twice trains one model on one data set."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

SCRIPT = """
import sys
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from shardplug_lightning import ShardStrategy

warnings.simplefilter("ignore")


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        with open(f"{sys.argv[1]}/seen-{self.global_rank}", "a") as file:
            file.write("".join(f"{self.current_epoch} {int(value)}\\n" for value in batch))
        return -self.weight * batch.sum()

    def validation_step(self, batch, batch_idx):
        self.log("mean", batch.mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def main():
    torch.set_num_threads(1)
    trainer = Trainer(
        strategy=ShardStrategy(data_seed=1),
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    net = Net()
    training = DataLoader(torch.arange(12.0), batch_size=2, shuffle=True)
    trainer.fit(net, training, DataLoader(torch.arange(7.0), batch_size=2))
    with open(f"{sys.argv[1]}/found-{trainer.global_rank}", "w") as file:
        mean = trainer.callback_metrics["mean"].item()
        file.write(f"{trainer.world_size} {trainer.global_step} {net.weight.item()} {mean}")


if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_script_under_torchrun_shares_its_data(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["2", str(script), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment, timeout=170
    )
    assert ended.returncode == 0, ended.stderr
    by_rank = [(tmp_path / f"seen-{rank}").read_text("utf-8").splitlines() for rank in (0, 1)]
    assert [len(lines) for lines in by_rank] == [12, 12]
    seen = Counter(tuple(map(int, line.split())) for lines in by_rank for line in lines)
    assert seen == Counter((epoch, sample) for epoch in (0, 1) for sample in range(12))
    for rank in (0, 1):
        # Two ranks, 3 steps in each of 2 epochs; gradients are averaged, so that the weight is half
        # of all that was seen; the mean of 0 to 6 is 3.
        assert (tmp_path / f"found-{rank}").read_text("utf-8") == "2 6 66.0 3.0"
