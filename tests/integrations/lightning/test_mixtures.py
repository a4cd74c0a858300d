"""Runs with limits, and with loaders of several lengths or none at once, go on where they were."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from shardplug import Comm
from shardplug_lightning import ShardStrategy
from tests.integrations.lightning.notes import Epochs, Learner, SaveAt, read
from tests.integrations.lightning.ranks import make_trainer, run_ranks, values
from tests.integrations.lightning.test_resume import Fails

SEED, EPOCHS = 2, 3


class Numbers(IterableDataset[torch.Tensor]):
    """Twelve numbers, of which no length is known."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(100.0, 112.0))


def stream(batch_size: int = 2) -> DataLoader[torch.Tensor]:
    return DataLoader(Numbers(), batch_size)


def shuffled(num_samples: int) -> DataLoader[torch.Tensor]:
    return values(num_samples, 2, shuffle=True)


def mixed(mode: str, *loaders: DataLoader[torch.Tensor]) -> CombinedLoader:
    return CombinedLoader(list(loaders), mode)  # type: ignore[arg-type]


Case = tuple[Callable[[], Any], dict[str, Any], Collection[int]]

CYCLE = "max_size_cycle"
CASES: dict[str, Case] = {
    # The loaders, options of the trainer, and after which batches of the run it is left.
    "a limit": (lambda: shuffled(12), {"limit_train_batches": 4}, (1, 3, 4, 5)),
    "a share": (lambda: shuffled(12), {"limit_train_batches": 0.5}, (1, 3, 4)),
    "overfit": (lambda: shuffled(12), {"overfit_batches": 2}, (1, 2, 3)),
    "steps": (lambda: shuffled(12), {"max_epochs": -1, "max_steps": 15}, (1, 6, 7)),
    "reload": (lambda: shuffled(12), {"reload_dataloaders_every_n_epochs": 2}, (1, 6, 7, 13)),
    "stream, a limit": (stream, {"limit_train_batches": 4}, (1, 4, 5, 7)),
    "stream, steps": (stream, {"max_epochs": -1, "max_steps": 15}, (1, 6, 7)),
    "stream, reload": (stream, {"reload_dataloaders_every_n_epochs": 1}, (1, 6, 7)),
    "short": (lambda: mixed(CYCLE, shuffled(8), stream()), {}, (1, 4, 5, 6, 7, 11, 12, 13)),
    "short, max_size": (lambda: mixed("max_size", shuffled(8), stream()), {}, (3, 5, 6, 7)),
    "short, min_size": (lambda: mixed("min_size", shuffled(8), stream()), {}, (3, 4, 5)),
    "short, a limit": (
        lambda: mixed(CYCLE, shuffled(8), stream()),
        {"limit_train_batches": 3},
        (1, 3, 4),
    ),
    "short stream, a limit": (
        lambda: mixed(CYCLE, shuffled(20), stream()),
        {"limit_train_batches": 8},
        (1, 7, 8, 9, 15, 16),
    ),
    "lengths": (lambda: mixed(CYCLE, shuffled(20), shuffled(6)), {}, (1, 5, 9, 10, 11, 20)),
    "streams": (lambda: mixed(CYCLE, stream(), stream(5)), {}, (1, 4, 6, 7, 8, 12)),
}


def fit(comm: Comm, notes: Path, case: Case, checkpoint: Path | None = None) -> list[float]:
    make_loaders, options, batches = case
    model = Learner(notes.with_name(f"{notes.name}-{comm.rank}"))
    trainer = make_trainer(
        ShardStrategy(data_seed=SEED),
        comm.world_size,
        callbacks=[] if checkpoint else [SaveAt(notes.parent, batches)],
        **{"max_epochs": EPOCHS, **options},
    )
    trainer.fit(model, make_loaders(), ckpt_path=checkpoint)
    return [*model.weight.tolist(), trainer.global_step]


def leave_and_go_on(comm: Comm, folder: Path, name: str) -> list[list[float]]:
    case = CASES[name]
    found = [fit(comm, folder / "whole", case)]
    for batch in case[2]:
        found.append(fit(comm, folder / f"after {batch}", case, folder / f"{batch}.ckpt"))
    return found


def in_turn(epochs: Epochs) -> list[tuple[int, list[int]]]:
    return [(epoch, batch) for epoch, batches in epochs.items() for batch in batches]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings(
    "ignore:You requested to overfit but enabled train dataloader shuffling"
)
def test_a_run_goes_on_whatever_limits_it(tmp_path: Path, name: str) -> None:
    ((whole, *after),) = run_ranks(1, leave_and_go_on, tmp_path, name)
    (seen,) = read(tmp_path, "whole", 1)
    for batch, found in zip(CASES[name][2], after, strict=True):
        (left,) = read(tmp_path, f"after {batch}", 1)
        assert in_turn(left) == in_turn(seen)[batch:], batch
        assert found == pytest.approx(whole, rel=1e-6), batch


def order_of(epoch: int, num_samples: int) -> list[int]:
    generator = torch.Generator().manual_seed(SEED + epoch)
    return torch.randperm(num_samples, generator=generator).tolist()


def cycle(comm: Comm, folder: Path) -> None:
    fit(comm, folder / "whole", (CASES["short"][0], {}, ()))


def test_a_short_loader_goes_through_epochs_of_its_own_within_one(tmp_path: Path) -> None:
    run_ranks(1, cycle, tmp_path)
    (seen,) = read(tmp_path, "whole", 1)
    for epoch in range(EPOCHS):
        # Lightning reads four batches of the short loader, sees its end, and reads two more.
        short = [*order_of(epoch, 8), *order_of(epoch + 1, 8)[:4]]
        both = [[*short[at : at + 2], 100 + at, 101 + at] for at in range(0, 12, 2)]
        assert seen[epoch] == both


# -- steps that fetch their batches themselves ---------------------------------------------------


class Fetches(Learner):
    """Asks for the batch of a step."""

    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


STOPS = (0, 1, 2, 5, 6, 7, 8, 13)


def fetch(comm: Comm, notes: Path, kind: str, *callbacks: Callback, checkpoint: Any = None) -> None:
    trainer = make_trainer(
        ShardStrategy(data_seed=SEED), 1, max_epochs=EPOCHS, callbacks=list(callbacks)
    )
    loader = stream() if kind == "stream" else shuffled(12)
    trainer.fit(Fetches(notes), loader, ckpt_path=checkpoint)


def fail_and_fetch_again(comm: Comm, folder: Path, kind: str) -> None:
    fetch(comm, folder / "whole-0", kind, SaveAt(folder, STOPS[1:]))
    for batch in STOPS:
        file = folder / f"failed {batch}.ckpt"
        with pytest.raises(KeyError, match="killed"):
            fetch(comm, folder / f"before {batch}-0", kind, Fails(batch, file))
        fetch(comm, folder / f"failed {batch}-0", kind, checkpoint=file)
    for batch in STOPS[1:]:
        fetch(comm, folder / f"saved {batch}-0", kind, checkpoint=folder / f"{batch}.ckpt")


@pytest.mark.parametrize("kind", ["shuffled", "stream"])
@pytest.mark.filterwarnings(
    "ignore:You are using the `dataloader_iter` step flavor",
    "ignore:Found `dataloader_iter` argument",
)
def test_a_step_that_fetches_its_batches_makes_the_one_again_in_which_it_failed(
    tmp_path: Path, kind: str
) -> None:
    run_ranks(1, fail_and_fetch_again, tmp_path, kind)
    (seen,) = read(tmp_path, "whole", 1)
    for batch in STOPS:
        assert in_turn(read(tmp_path, f"failed {batch}", 1)[0]) == in_turn(seen)[batch:], batch
    for batch in STOPS[1:]:
        assert in_turn(read(tmp_path, f"saved {batch}", 1)[0]) == in_turn(seen)[batch:], batch
