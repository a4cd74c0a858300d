"""Real ranks under DDP: what is trained and what is counted does not depend on how many there are.

Both are held against a plain loop on one process that knows nothing of shardplug.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from shardplug import Comm, ShardEngine
from tests.launch import run_processes

SEED = 3
EPOCHS = 3
LEARNING_RATE, MOMENTUM = 0.2, 0.9
BATCH_SIZE = 8  # a multiple of 1, 2 and 4 ranks
NUM_TRAIN = 45  # five rows fill no batch


def samples(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_samples, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(3, (num_samples,), generator=generator))


def new_model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def parameters_of(model: nn.Module) -> list[list[float]]:
    return [value.detach().flatten().tolist() for value in model.parameters()]


# Training.


def train_on_ranks(comm: Comm) -> list[list[float]]:
    engine = ShardEngine(split_batches=True, data_seed=SEED)
    assert engine.world_size == comm.world_size
    loader = engine.prepare(
        DataLoader(samples(NUM_TRAIN), batch_size=BATCH_SIZE, shuffle=True, drop_last=True)
    )
    model = DistributedDataParallel(new_model())
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM)
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            assert len(inputs) == BATCH_SIZE // comm.world_size
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return parameters_of(model.module)


def train_without_shardplug() -> list[list[float]]:
    inputs, labels = samples(NUM_TRAIN).tensors
    model = new_model()
    weights = list(model.parameters())
    speeds = [torch.zeros_like(weight) for weight in weights]
    for epoch in range(EPOCHS):
        order = torch.randperm(NUM_TRAIN, generator=torch.Generator().manual_seed(SEED + epoch))
        for rows in order.split(BATCH_SIZE)[: NUM_TRAIN // BATCH_SIZE]:
            loss = nn.functional.cross_entropy(model(inputs[rows]), labels[rows])
            with torch.no_grad():
                slopes = torch.autograd.grad(loss, weights)
                for weight, speed, slope in zip(weights, speeds, slopes, strict=True):
                    speed.mul_(MOMENTUM).add_(slope)
                    weight.sub_(LEARNING_RATE * speed)
    return parameters_of(model)


@pytest.mark.slow  # DDP imports a compiler in every process
@pytest.mark.timeout(180)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_model_is_that_of_one_process(world_size: int) -> None:
    expected = train_without_shardplug()
    for trained in run_processes(world_size, train_on_ranks, timeout_s=150):
        for value, right in zip(trained, expected, strict=True):
            assert value == pytest.approx(right, rel=0, abs=1e-5)


# Validation.

SIZES = (11, 12, 13, 31)  # of validation sets: over 1, 2 and 3 ranks all but 12 leave a remainder
VAL_BATCH_SIZE = 4


def right_answers(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    predicted: Tensor = model(inputs).argmax(dim=1)
    return predicted == labels


def count_over_ranks(loader: DataLoader[tuple[Tensor, ...]]) -> tuple[int, int]:
    model = new_model()
    counts = torch.zeros(2, dtype=torch.int64)
    with torch.no_grad():
        for inputs, labels in loader:
            counts += torch.tensor([right_answers(model, inputs, labels).sum(), len(labels)])
    dist.all_reduce(counts)
    right, seen = counts.tolist()
    return right, seen


def validate_exactly(comm: Comm) -> list[tuple[int, int]]:
    engine = ShardEngine(comm=comm)
    loaders = (DataLoader(samples(size), batch_size=VAL_BATCH_SIZE) for size in SIZES)
    return [count_over_ranks(engine.prepare_loader(loader, tail="exact")) for loader in loaders]


def validate_with_torch_sampler(_: Comm) -> list[tuple[int, int]]:
    def over(data: TensorDataset) -> DataLoader[tuple[Tensor, ...]]:
        sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, shuffle=False)
        return DataLoader(data, batch_size=VAL_BATCH_SIZE, sampler=sampler)

    return [count_over_ranks(over(samples(size))) for size in SIZES]


def answers(num_samples: int) -> list[bool]:
    """Tell for each sample of a validation set whether the model is right about it."""
    with torch.no_grad():
        right: list[bool] = right_answers(new_model(), *samples(num_samples).tensors).tolist()
    return right


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_validation_count_is_that_of_one_process(world_size: int) -> None:
    expected = [(sum(answers(size)), size) for size in SIZES]
    for counted in run_processes(world_size, validate_exactly):
        assert counted == expected


@pytest.mark.parametrize("world_size", [2, 3])
def test_torchs_distributed_sampler_counts_the_first_samples_again(world_size: int) -> None:
    expected = []
    for size in SIZES:
        repeated = answers(size)[: -size % world_size]
        expected.append((sum(answers(size) + repeated), size + len(repeated)))
    for counted in run_processes(world_size, validate_with_torch_sampler):
        assert counted == expected
    accuracies = [Fraction(right, seen) for right, seen in expected]
    truth = [Fraction(sum(answers(size)), size) for size in SIZES]
    divides = [size % world_size == 0 for size in SIZES]
    assert [wrong == right for wrong, right in zip(accuracies, truth, strict=True)] == divides
