"""Accumulation over real ranks: the steps of one big batch, and no gradient sent too often."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from shardplug import Comm, ShardEngine
from tests.launch import run_processes

LEARNING_RATE = 0.3


def samples(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_samples, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(3, (num_samples,), generator=generator))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        # No view leaves the module: FSDP2 warns of those.
        scores: torch.Tensor = self.out(torch.tanh(self.hidden(inputs)))
        return scores.clone()


def new_model() -> nn.Module:
    torch.manual_seed(2)
    return Net()


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def flat(model: nn.Module) -> list[float]:
    return torch.cat([whole(each).detach().flatten() for each in model.parameters()]).tolist()


def train(comm: Comm, kind: str, num_samples: int, batch_size: int, steps: int) -> Any:
    """Two epochs with accumulation; returns the parameters and how often gradients were sent."""
    engine = ShardEngine(gradient_accumulation_steps=steps, data_seed=4)
    model: Any = new_model()
    sent = [0]
    if kind == "ddp":
        model = DistributedDataParallel(model)

        # Unannotated: torch takes an annotation that is a string for a wrong one.
        def hook(_, bucket):  # type: ignore[no-untyped-def]
            sent[0] += 1
            work = dist.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda done: done.value()[0] / comm.world_size)

        model.register_comm_hook(None, hook)
    elif kind == "fsdp":
        fully_shard(model)
        name = "reduce_scatter_single"  # what FSDP2 sends gradients with; older torch: "_tensor"
        name = name if hasattr(dist, name) else "reduce_scatter_tensor"
        scatter = getattr(dist, name)

        def counted(*args: Any, **options: Any) -> Any:
            sent[0] += 1
            return scatter(*args, **options)

        setattr(dist, name, counted)  # in this process, which ends with the test
    optimizer, loader = engine.prepare(
        torch.optim.SGD(model.parameters(), LEARNING_RATE),
        DataLoader(samples(num_samples), batch_size, shuffle=True),
    )
    for _ in range(2):
        for inputs, labels in loader:
            with engine.accumulate(model):
                rows = loader.valid_rows or len(labels)
                loss = nn.functional.cross_entropy(model(inputs)[:rows], labels[:rows])
                engine.backward(loss, valid_rows=loader.valid_rows)
                optimizer.step()
                optimizer.zero_grad()
    return flat(model), sent[0], optimizer.outcome.num_steps


def train_alone(num_samples: int, batch_size: int) -> list[float]:
    """The same epochs in big batches, with nothing of shardplug."""
    model = new_model()
    data = samples(num_samples)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    for epoch in range(2):
        order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(4 + epoch))
        for rows in order.split(batch_size):
            inputs, labels = data[rows]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return flat(model)


@pytest.mark.parametrize(
    ("kind", "world_size", "num_samples", "batch_size", "steps"),
    [
        ("ddp", 2, 31, 2, 3),  # 16 batches: 8 steps a rank, the last window of two, padded
        ("ddp", 3, 20, 3, 2),
        ("ddp", 2, 24, 2, 3),  # even
        ("fsdp", 2, 31, 2, 3),
    ],
)
def test_windows_are_big_batches_and_send_gradients_once(
    kind: str, world_size: int, num_samples: int, batch_size: int, steps: int
) -> None:
    global_batch = world_size * batch_size
    micro_batches = -(-num_samples // global_batch)
    windows = 2 * -(-micro_batches // steps)
    wanted = torch.tensor(train_alone(num_samples, global_batch * steps))
    for parameters, sent, taken in run_processes(
        world_size, train, kind, num_samples, batch_size, steps
    ):
        assert taken == windows
        assert sent == windows  # one bucket, or one group, a window
        torch.testing.assert_close(torch.tensor(parameters), wanted, atol=1e-5, rtol=0)
