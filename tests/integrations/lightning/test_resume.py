"""Training that goes on from a checkpoint sees what the unbroken run would have seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from shardplug import Comm
from shardplug_lightning import ShardStrategy
from tests.integrations.lightning.ranks import Trainee, make_trainer, run_ranks, values

Seen = dict[str, list[list[int]]]

SAMPLES, SIZE, EPOCHS, SEED = 26, 2, 3, 5


class Logs(Trainee):
    """Notes also when it validates, what it is told of its batches, and what its schedules do."""

    def __init__(self, *, is_estimating: bool = False) -> None:
        super().__init__()
        self.is_estimating = is_estimating
        self.log_book: list[tuple[Any, ...]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:  # type: ignore[override]
        is_last = self.trainer.is_last_batch
        self.log_book.append(("train", self.current_epoch, batch_idx, is_last))
        return super().training_step(batch)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log_book.append(("validate", self.current_epoch, batch_idx))

    def configure_optimizers(self) -> Any:
        if self.is_estimating:
            assert self.trainer.estimated_stepping_batches  # which makes the loader, early
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        by_epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": by_epoch}

    def on_train_batch_end(self, *args: Any) -> None:
        self.log_book.append(("rate", self.optimizers().param_groups[0]["lr"]))  # type: ignore[union-attr]


def loader_of(num_workers: int) -> DataLoader[torch.Tensor]:
    return values(
        SAMPLES,
        SIZE,
        shuffle=True,
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
    )


def fit(
    comm: Comm,
    loaders: Any,
    *,
    model: Logs | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoint: Path | None = None,
    strategy: ShardStrategy | None = None,
    **options: Any,
) -> Logs:
    model = Logs() if model is None else model
    chosen = {"max_epochs": EPOCHS, **options}
    strategy = ShardStrategy(data_seed=SEED) if strategy is None else strategy
    trainer = make_trainer(strategy, comm.world_size, callbacks=list(callbacks), **chosen)
    training, *rest = loaders
    validation = rest[0] if rest else values(4, 1)
    trainer.fit(model, training, validation, ckpt_path=checkpoint)
    return model


def order_of(epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(SEED + epoch)
    return torch.randperm(SAMPLES, generator=generator).tolist()


def deal(epoch: int, consumed: int, num_ranks: int) -> list[list[list[int]]]:
    """Deal what is left of an epoch, filled up from its start, in whole batches, rank by rank."""
    order = order_of(epoch)
    left = order[consumed:]
    whole = SIZE * num_ranks
    left += order[: -len(left) % whole]
    batches = [left[at : at + SIZE] for at in range(0, len(left), SIZE)]
    return [batches[rank::num_ranks] for rank in range(num_ranks)]


class SaveEach(Callback):
    """Saves a checkpoint after each batch, under the number of batches so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_batches = 0

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.num_batches += 1
        trainer.save_checkpoint(saved_at(self.folder, self.num_batches))


def saved_at(folder: Path, batch: int) -> Path:
    return folder / f"{batch}.ckpt"


STEPS = 7  # of an epoch on two ranks: 13 batches


def train_and_go_on(
    comm: Comm, folder: Path, cases: Sequence[tuple[int, int, bool]]
) -> tuple[tuple[Seen, list[Any]], list[tuple[Seen, list[Any]]]]:
    loaders = (loader_of(0), values(4, 1))
    options: Any = {"val_check_interval": 3}
    whole = fit(comm, loaders, callbacks=[SaveEach(folder)], **options)
    after = []
    for step, num_workers, is_estimating in cases:
        model = Logs(is_estimating=is_estimating)
        loaders = (loader_of(num_workers), values(4, 1))
        checkpoint = saved_at(folder, step)
        fit(comm, loaders, model=model, checkpoint=checkpoint, **options)
        after.append((dict(model.seen), model.log_book))
    return (dict(whole.seen), whole.log_book), after


def test_a_run_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    cases = [
        (1, 0, False),
        (4, 0, True),
        (7, 0, False),
        (8, 2, False),
        (12, 0, True),
        (20, 2, True),
    ]
    by_rank = run_ranks(2, train_and_go_on, tmp_path, cases)
    for rank, ((seen, log), after) in enumerate(by_rank):
        assert seen == {f"train {e}": deal(e, 0, 2)[rank] for e in range(EPOCHS)}
        for (step, *_), (seen_after, log_after) in zip(cases, after, strict=True):
            epoch, batch = divmod(step, STEPS)
            expected = {f"train {e}": deal(e, 0, 2)[rank] for e in range(epoch, EPOCHS)}
            expected[f"train {epoch}"] = expected[f"train {epoch}"][batch:]
            assert seen_after == expected
            # All that it is told is the same too, from the checkpoint on.
            assert log_after == rest_of(log, step)


def rest_of(log: list[Any], step: int) -> list[Any]:
    """List what comes after a checkpoint in the end of a batch: after that, rates are noted."""
    return log[[number for number, (kind, *_) in enumerate(log) if kind == "rate"][step - 1] + 1 :]


def go_on(comm: Comm, folder: Path, steps: Sequence[int]) -> list[tuple[Seen, list[Any]]]:
    after = []
    for step in steps:
        loaders = (loader_of(0), values(6, 1))
        model = fit(comm, loaders, checkpoint=saved_at(folder, step))
        after.append((dict(model.seen), model.log_book))
    return after


def train_and_save(comm: Comm, folder: Path) -> None:
    fit(comm, (loader_of(0), values(4, 1)), callbacks=[SaveEach(folder)])


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(2, train_and_save, tmp_path)
    steps = [1, 5, 6, 7, 10, 14]
    for num_ranks in (1, 3):
        num_batches = -(-13 // num_ranks)
        by_rank = run_ranks(num_ranks, go_on, tmp_path, steps)
        for rank, after in enumerate(by_rank):
            for step, (seen, log) in zip(steps, after, strict=True):
                epoch, batch = divmod(step, STEPS)
                expected = {
                    f"train {e}": deal(e, 4 * batch if e == epoch else 0, num_ranks)[rank]
                    for e in range(epoch, EPOCHS)
                }
                assert seen == expected
                # An epoch ends with its last batch, and with one validation.
                told = [entry[1:] for entry in log if entry[0] == "train"]
                left = len(expected[f"train {epoch}"])
                assert told == [
                    (e, number, number == num_batches - 1)
                    for e in range(epoch, EPOCHS)
                    for number in range(num_batches - left if e == epoch else 0, num_batches)
                ]
                # Also with that of an epoch that had ended but for this.
                validated = [entry[1] for entry in log if entry[0] == "validate"]
                first = epoch - (batch == 0)
                assert sorted(set(validated)) == list(range(first, EPOCHS))
                assert len(validated) == 6 // num_ranks * (EPOCHS - first)
                rates = [entry[1] for entry in log if entry[0] == "rate"]
                # The schedule steps with the last batch of an epoch, before it is noted.
                assert rates[0] == 0.5 ** (epoch if left > 1 else epoch + 1)
                assert rates[-1] == 0.5**EPOCHS


class Fails(Callback):
    """Ends a run in the middle of a training step, and saves what there is, as Lightning's own."""

    def __init__(self, batch: int, file: Path) -> None:
        self.batch, self.file = batch, file

    def on_before_zero_grad(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
        self.batch -= 1
        if self.batch < 0:
            raise KeyError("killed")

    def on_exception(self, trainer: Trainer, module: Any, exception: BaseException) -> None:
        trainer.save_checkpoint(self.file)


def stop_and_go_on(comm: Comm, folder: Path, batches: Sequence[int]) -> list[tuple[Seen, Seen]]:
    found = []
    for batch in batches:
        model, file = Logs(), folder / f"stopped-{batch}.ckpt"
        with pytest.raises(KeyError, match="killed"):
            fit(comm, (loader_of(0),), model=model, callbacks=[Fails(batch, file)])
        after = fit(comm, (loader_of(0),), checkpoint=file)
        found.append((dict(model.seen), dict(after.seen)))
    return found


def test_a_run_that_failed_makes_the_batch_again_in_which_it_did(tmp_path: Path) -> None:
    batches = [0, 6, 17]
    for rank, found in enumerate(run_ranks(2, stop_and_go_on, tmp_path, batches)):
        whole = {f"train {e}": deal(e, 0, 2)[rank] for e in range(EPOCHS)}
        for batch, (before, after) in zip(batches, found, strict=True):
            epoch, at = divmod(batch, STEPS)
            assert before[f"train {epoch}"] == whole[f"train {epoch}"][: at + 1]
            expected = {f"train {e}": whole[f"train {e}"] for e in range(epoch, EPOCHS)}
            expected[f"train {epoch}"] = whole[f"train {epoch}"][at:]
            assert after == expected


class Sums(Logs):
    """Learns the sum of what it sees, in windows; reads whatever loaders it is given."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:  # type: ignore[override]
        flat = batch if isinstance(batch, torch.Tensor) else torch.cat(list(map(ids_of, batch)))
        return super().training_step(flat, batch_idx)


def ids_of(batch: torch.Tensor | None) -> torch.Tensor:
    return torch.tensor([-1.0]) if batch is None else batch


class Counting(IterableDataset[torch.Tensor]):
    """Numbers, of which no length is known."""

    def __init__(self, start: int, num_samples: int) -> None:
        self.start, self.num_samples = start, num_samples

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(self.start, self.start + self.num_samples).float())


def long_and_short(mode: str) -> CombinedLoader:
    numbers: Any = torch.arange(50.0, 56.0)
    loaders = [loader_of(0), DataLoader(numbers, batch_size=2, shuffle=True)]
    return CombinedLoader(loaders, mode)  # type: ignore[arg-type]


def loaders_of(kind: str) -> Any:
    if kind in {"max_size_cycle", "max_size", "min_size"}:
        return long_and_short(kind)
    if kind == "stream":
        return DataLoader(Counting(0, 15), batch_size=2)
    if kind == "stream and workers":
        return DataLoader(Counting(0, 15), 2, num_workers=2, multiprocessing_context="fork")
    streams = [DataLoader(Counting(0, 15), batch_size=2), DataLoader(Counting(20, 5), batch_size=2)]
    return CombinedLoader(streams, "max_size_cycle")


def compare(comm: Comm, folder: Path, kind: str) -> list[tuple[Seen, Seen, list[Any], list[Any]]]:
    folder /= kind
    whole = fit(comm, (loaders_of(kind),), model=Sums(), callbacks=[SaveEach(folder)])
    found = []
    num_batches = sum(map(len, whole.seen.values()))
    for batch in range(1, num_batches, 3):
        after = fit(comm, (loaders_of(kind),), model=Sums(), checkpoint=saved_at(folder, batch))
        found.append((dict(whole.seen), dict(after.seen), whole.log_book, after.log_book))
    return found


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("max_size_cycle", 13),
        ("max_size", 13),
        ("min_size", 3),
        ("stream", 8),
        ("stream and workers", 8),
        ("streams", 8),
    ],
)
def test_loaders_of_any_kind_go_on(tmp_path: Path, kind: str, steps: int) -> None:
    (found,) = run_ranks(1, compare, tmp_path, kind)
    batches = range(1, steps * EPOCHS, 3)
    for batch, (seen, after, log, log_after) in zip(batches, found, strict=True):
        assert [len(of_epoch) for of_epoch in seen.values()] == [steps] * EPOCHS
        epoch, at = divmod(batch, steps)
        expected = {f"train {e}": seen[f"train {e}"] for e in range(epoch, EPOCHS)}
        expected[f"train {epoch}"] = expected[f"train {epoch}"][at:]
        assert after == expected
        assert log_after == rest_of(log, batch)


# -- a window of accumulated gradients that a stop cuts open -------------------------------------


def accumulate(comm: Comm, folder: Path) -> list[tuple[float, float, int, int, Seen]]:
    options: Any = {"accumulate_grad_batches": 3, "max_epochs": 2}
    whole = fit(comm, (loader_of(0),), callbacks=[SaveEach(folder)], **options)
    found = []
    for batch in range(1, 2 * 13, 2):
        file = saved_at(folder, batch)
        after = fit(comm, (loader_of(0),), checkpoint=file, **options)
        steps = after.trainer.global_step, whole.trainer.global_step
        found.append((whole.weight.item(), after.weight.item(), *steps, dict(after.seen)))
    return found


def test_a_window_that_was_cut_open_is_made_again(tmp_path: Path) -> None:
    (found,) = run_ranks(1, accumulate, tmp_path)
    for batch, (weight, after, *steps, seen) in zip(range(1, 26, 2), found, strict=True):
        assert after == pytest.approx(weight, rel=1e-6)
        assert steps == [10, 10]  # 5 windows of 13 batches, the last of which is short
        epoch, at = divmod(batch, 13)
        expected = {f"train {e}": deal(e, 0, 1)[0] for e in range(epoch, 2)}
        expected[f"train {epoch}"] = expected[f"train {epoch}"][at - at % 3 :]
        assert seen == expected


class FailsToValidate(Callback):
    """Ends a run in the middle of a validation."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_validation_batch_end(self, *args: Any) -> None:
        if args[-2] == 2:
            raise KeyError("killed")

    def on_exception(self, trainer: Trainer, module: Any, exception: BaseException) -> None:
        trainer.save_checkpoint(self.file)


def stop_in_validation(comm: Comm, file: Path) -> list[Any]:
    options: Any = {"val_check_interval": 4, "max_epochs": 1}
    with pytest.raises(KeyError, match="killed"):
        fit(comm, (loader_of(0),), callbacks=[FailsToValidate(file)], **options)
    return fit(comm, (loader_of(0),), checkpoint=file, **options).log_book


def test_a_validation_that_was_cut_short_is_run_from_its_start(tmp_path: Path) -> None:
    (log,) = run_ranks(1, stop_in_validation, tmp_path / "cut.ckpt")
    told = [entry[:3] for entry in log if entry[0] != "rate"]
    validation = [("validate", 0, batch) for batch in range(4)]
    steps = [("train", 0, batch) for batch in range(13)]
    assert told == [*validation, *steps[4:8], *validation, *steps[8:12], *validation, steps[12]]
