"""Lightning on real ranks, and models that tell what they saw."""

from __future__ import annotations

import gc
import os
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities import registry
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from shardplug import Comm
from tests import launch

T = TypeVar("T")

# The server that ranks are forked from starts after all test files have been imported.
launch.PRELOAD.append(__name__)

# Each Trainer reads anew what installed packages bring for it: an eighth of a short run.
registry.entry_points = cache(registry.entry_points)  # type: ignore[assignment]

FOREIGN_WARNINGS = {
    # Lightning counts the cores of the machine, and advises more workers.
    ".*does not have many workers": PossibleUserWarning,
    # Lightning says that its own sampler repeats samples, which is what some tests show.
    "Using `DistributedSampler` with the dataloaders": PossibleUserWarning,
    # Lightning cannot rebuild a batch sampler of another class, and says so before it fails.
    "You are using a custom batch sampler": PossibleUserWarning,
    # Lightning 2.6 on torch from 2.9 on.
    ".*isinstance.treespec, LeafSpec.* is deprecated": FutureWarning,
}


def run_ranks(world_size: int, body: Callable[..., T], *args: Any) -> list[T]:
    """Run ``body(comm, *args)`` on ranks that look to Lightning as if torchrun had started them."""
    return launch.run_processes(world_size, _under_torchrun, body, args)


def run_alone(body: Callable[..., T], *args: Any, timeout_s: float = 60.0) -> T:
    """Run ``body(comm, *args)`` in one process that no launcher has started."""
    results: list[T] = launch.run_processes(
        1, _in_a_new_process, body, args, has_group=False, timeout_s=timeout_s
    )
    return results[0]


def _under_torchrun(comm: Comm, body: Callable[..., T], args: tuple[Any, ...]) -> T:
    rank, world_size = str(comm.rank), str(comm.world_size)
    os.environ.update(
        TORCHELASTIC_RUN_ID="tests",
        RANK=rank,
        LOCAL_RANK=rank,
        WORLD_SIZE=world_size,
        LOCAL_WORLD_SIZE=world_size,
        GROUP_RANK="0",
    )
    return _in_a_new_process(comm, body, args)


def _in_a_new_process(comm: Comm, body: Callable[..., T], args: tuple[Any, ...]) -> T:
    gc.freeze()  # what the server has imported need not be looked through: half a second per rank
    for message, category in FOREIGN_WARNINGS.items():
        warnings.filterwarnings("ignore", message, category)
    return body(comm, *args)


def make_trainer(strategy: Strategy | str, devices: int, **options: Any) -> Trainer:
    """Make a trainer on CPUs that writes nothing, neither to the terminal nor to files."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(strategy=strategy, accelerator="cpu", devices=devices, **{**quiet, **options})


class Values(Dataset[torch.Tensor]):
    """Sample i is the number i."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


def values(num_samples: int, batch_size: int = 4, **options: Any) -> DataLoader[torch.Tensor]:
    """Make a loader of the numbers from 0."""
    return DataLoader(Values(num_samples), batch_size=batch_size, **options)


class Trainee(LightningModule):
    """Notes the batches of each epoch that it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.mean = MeanMetric()
        self.seen: defaultdict[str, list[list[int]]] = defaultdict(list)

    def note(self, stage: str, batch: torch.Tensor) -> None:
        self.seen[stage].append([int(value) for value in batch])

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.note(f"train {self.current_epoch}", batch)
        return (self.weight * batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Witness(Trainee):
    """Notes the batches of every stage, and logs the mean of what it evaluates."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note("validate", batch)
        self._log_means(batch)

    def test_step(self, batch: torch.Tensor) -> None:
        self.note("test", batch)
        self._log_means(batch)

    def predict_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.note("predict", batch)
        return batch

    def _log_means(self, batch: torch.Tensor) -> None:
        self.mean.update(batch)
        self.log("torchmetrics", self.mean, on_epoch=True)
        self.log("logged", batch.mean(), on_epoch=True, sync_dist=True)
