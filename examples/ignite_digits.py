"""Train on the digits of scikit-learn with Ignite: the usual trainer and evaluator, sharded.

    python examples/ignite_digits.py
    torchrun --nproc-per-node 2 examples/ignite_digits.py

The 359 test images do not divide by two, yet each of them is counted once on any number of ranks.
"""

from __future__ import annotations

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import ProgressBar
from ignite.metrics import Accuracy, ConfusionMatrix, Loss
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed import is_torchelastic_launched
from torch.utils.data import DataLoader, TensorDataset, random_split

from shardplug_ignite import ShardHandler

EPOCHS = 5
TEST_IMAGES = 359


def make_loaders() -> tuple[DataLoader[tuple[torch.Tensor, ...]], ...]:
    """Make two plain loaders, as for a single process."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    sizes = [len(data) - TEST_IMAGES, TEST_IMAGES]
    training, test = random_split(data, sizes, torch.Generator().manual_seed(0))
    return DataLoader(training, batch_size=32, shuffle=True), DataLoader(test, batch_size=64)


def train(local_rank: int) -> None:
    """Train and evaluate on one rank."""
    torch.manual_seed(0)
    train_loader, test_loader = make_loaders()
    model = idist.auto_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = idist.auto_optim(torch.optim.Adam(model.parameters(), lr=0.005))
    loss = nn.CrossEntropyLoss()

    trainer = create_supervised_trainer(model, optimizer, loss)
    evaluator = create_supervised_evaluator(
        model,
        {"accuracy": Accuracy(), "loss": Loss(loss), "confusion": ConfusionMatrix(10)},
    )
    ShardHandler().attach(trainer)
    ShardHandler(mode="eval").attach(evaluator)

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(trainer: Engine) -> None:
        evaluator.run(test_loader)

    if idist.get_rank() == 0:
        ProgressBar(desc="epochs").attach(
            trainer, event_name=Events.EPOCH_COMPLETED, closing_event_name=Events.COMPLETED
        )

    trainer.run(train_loader, max_epochs=EPOCHS)
    if idist.get_rank() == 0:
        metrics = evaluator.state.metrics
        print(
            f"{idist.get_world_size()} ranks, {trainer.state.iteration} steps of {EPOCHS} epochs: "
            f"accuracy {metrics['accuracy']:.4f}, loss {metrics['loss']:.4f} "
            f"over {int(metrics['confusion'].sum())} test images"
        )


def main() -> None:
    """Train on all ranks of torchrun, else on this one alone."""
    backend = None
    if is_torchelastic_launched():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    with idist.Parallel(backend=backend) as parallel:
        parallel.run(train)


if __name__ == "__main__":
    main()
