"""Evaluate ten samples on three ranks with Ignite, by shardplug and by Ignite's own loader.

    python examples/ignite_exact_metrics.py

It starts its ranks itself. The model is wrong on sample 0 alone, so its accuracy is 0.9.
"""

from __future__ import annotations

from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine
from ignite.metrics import Accuracy, ConfusionMatrix, EpochMetric
from torch.utils.data import DataLoader

from shardplug_ignite import ShardHandler, evened

SAMPLES: Any = torch.arange(10)


def step(_: Engine, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Say that each sample is of class 1, but for sample 0; they all are."""
    scores = torch.nn.functional.one_hot((batch > 0).long(), 2).float()
    return scores, torch.ones_like(batch)


def evaluate(local_rank: int) -> None:
    """Evaluate on one rank, in both ways."""
    ours, stock = Engine(step), Engine(step)
    for engine in (ours, stock):
        Accuracy().attach(engine, "accuracy")
        ConfusionMatrix(2).attach(engine, "counts")

    ShardHandler(mode="eval").attach(ours)
    # Its rows are gathered, and ranks have four or three of them: stock would wait for ever.
    rows = EpochMetric(lambda scores, _: float(len(scores)), check_compute_fn=False)
    evened(rows).attach(ours, "rows")

    ours.run(DataLoader(SAMPLES, batch_size=4))
    stock.run(idist.auto_dataloader(SAMPLES, batch_size=4, shuffle=False))
    if idist.get_rank() == 0:
        for name, metrics in (("shardplug", ours.state.metrics), ("Ignite", stock.state.metrics)):
            counted = int(metrics["counts"].sum())
            print(f"{name}: accuracy {metrics['accuracy']:.4f} of {counted} samples")
        print(f"gathered from all ranks: {ours.state.metrics['rows']:.0f} rows")


def main() -> None:
    """Start three ranks, which are forked from this process."""
    with idist.Parallel(backend="gloo", nproc_per_node=3, start_method="fork") as parallel:
        parallel.run(evaluate)


if __name__ == "__main__":
    main()
