"""Streams go on in the middle of an epoch on several ranks, with what each rank has of its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shardplug import Comm, ShardplugWarning, StateError
from shardplug.testing import run_ranks as run_threads
from shardplug_lightning import ShardModelParallelStrategy, ShardStrategy
from shardplug_lightning.parts import Parts, load_part, part_path, remove_part, save_part
from shardplug_lightning.positions import KEY, Place, without_own
from tests.integrations.lightning.ranks import Trainee, make_trainer, run_ranks, values
from tests.integrations.lightning.test_kin import Layered, SaveAfterThree

Seen = dict[str, list[list[int]]]

SAMPLES, SIZE, STEPS = 24, 2, 6  # of an epoch on two ranks


class Numbers(IterableDataset[torch.Tensor]):
    """Numbers that can be gone on with; notes the first that it makes in each pass."""

    def __init__(self, numbers: range = range(SAMPLES)) -> None:
        self.numbers = numbers
        self.at = self.start = 0
        self.began: list[int] = []

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.at, self.start = self.start, 0
        self.began.append(self.numbers[self.at])
        while self.at < len(self.numbers):
            self.at += 1
            yield torch.tensor(float(self.numbers[self.at - 1]))


class Divided(Numbers):
    """The same, which gives each rank a part of its own."""

    def shard(self, num_shards: int, index: int) -> Divided:
        return Divided(self.numbers[index::num_shards])


KINDS = {
    "shared": (Numbers, {"dispatch_batches": False}),
    "dispatched": (Numbers, {}),
    "divided": (Divided, {"dispatch_batches": False}),
}


def loader_of(dataset: Any, num_workers: int = 0) -> DataLoader[Any]:
    context = "fork" if num_workers else None
    return DataLoader(dataset, SIZE, num_workers=num_workers, multiprocessing_context=context)


class SaveEach(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.number += 1
        trainer.save_checkpoint(self.folder / f"{self.number}.ckpt")


def fit(comm: Comm, kind: str, num_workers: int = 0, **options: Any) -> tuple[Seen, Any]:
    make, chosen = KINDS[kind]
    dataset, model = make(), options.pop("model", None) or Trainee()
    checkpoint = options.pop("checkpoint", None)
    strategy = ShardStrategy(**chosen)  # type: ignore[arg-type]  # of bools
    trainer = make_trainer(strategy, comm.world_size, **{"max_epochs": 2, **options})
    trainer.fit(model, loader_of(dataset, num_workers), ckpt_path=checkpoint)
    loader: Any = trainer.train_dataloader
    return dict(model.seen), loader._feed.dataset if kind == "divided" else dataset


STOPS = {0: (1, 8), 2: (5,)}


def train_and_go_on(
    comm: Comm, folder: Path, kind: str
) -> list[tuple[Seen, list[tuple[Seen, list[int]]]]]:
    found = []
    for num_workers in STOPS:
        own = folder / f"{kind}{num_workers}"
        whole, _ = fit(comm, kind, num_workers, callbacks=[SaveEach(own)])
        after = []
        for stop in STOPS[num_workers]:
            seen, dataset = fit(comm, kind, num_workers, checkpoint=own / f"{stop}.ckpt")
            after.append((seen, dataset.began))
        found.append((whole, after))
    return found


def go_on(comm: Comm, folder: Path, kind: str) -> list[Seen]:
    found = []
    for num_workers in STOPS:
        for stop in STOPS[num_workers]:
            file = folder / f"{kind}{num_workers}" / f"{stop}.ckpt"
            found.append(fit(comm, kind, num_workers, checkpoint=file)[0])
    return found


def dealt(rank: int, kind: str) -> list[list[int]]:
    if kind == "divided":
        return [[at, at + 2] for at in range(rank, SAMPLES, 4)]
    return [[at, at + 1] for at in range(2 * rank, SAMPLES, 4)]


@pytest.mark.parametrize("kind", KINDS)
def test_streams_go_on_on_several_ranks(tmp_path: Path, kind: str) -> None:
    for rank, found in enumerate(run_ranks(2, train_and_go_on, tmp_path, kind)):
        for num_workers, (whole, after) in zip(STOPS, found, strict=True):
            assert whole == {f"train {epoch}": dealt(rank, kind) for epoch in range(2)}
            for stop, (seen, began) in zip(STOPS[num_workers], after, strict=True):
                epoch, step = divmod(stop, STEPS)
                expected = {f"train {each}": dealt(rank, kind) for each in range(epoch, 2)}
                expected[f"train {epoch}"] = expected[f"train {epoch}"][step:]
                assert seen == expected
                if kind == "divided" and not num_workers:
                    # What this rank had made was not made again.
                    assert began[0] >= expected[f"train {epoch}"][0][0]
    parts = [file for file in tmp_path.glob("**/*") if "rank-" in file.name]
    # For each step but the two that end an epoch, where ranks have something of their own.
    steps = [1, 2, 3, 4, 5, 7, 8, 9, 10, 11] if kind == "divided" else []
    assert sorted(file.name for file in parts) == sorted(
        f"{step}.ckpt.rank-00001" for step in steps for _ in STOPS
    )
    if kind != "divided":  # which goes on with as many ranks only
        check_other_numbers(tmp_path, kind)


def check_other_numbers(tmp_path: Path, kind: str) -> None:
    for num_ranks in (1, 3):
        by_rank = run_ranks(num_ranks, go_on, tmp_path, kind)
        for number, stop in enumerate(chain(*STOPS.values())):
            epoch, step = divmod(stop, STEPS)
            for each in range(epoch, 2):
                of_epoch = [found[number][f"train {each}"] for found in by_rank]
                flat = [row for batches in of_epoch for row in chain.from_iterable(batches)]
                consumed = 4 * step if each == epoch else 0
                left = list(range(consumed, SAMPLES))
                # On three ranks the last of them are filled up from the start.
                assert sorted(flat) == sorted(left + list(range(-len(left) % (2 * num_ranks))))


class Remembers(Dataset[torch.Tensor]):
    """Counts how often it has been asked, from a number of each rank's own."""

    def __init__(self, asked: int) -> None:
        self.asked = asked

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked += 1
        return torch.tensor(float(index + 100 * self.asked))

    def state_dict(self) -> dict[str, int]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.asked = state["asked"]


def remember(comm: Comm, folder: Path, num_workers: int, stop: int, asked: int) -> Seen:
    strategy = ShardStrategy(use_stateful_dataloader=True)
    options: Any = {"callbacks": [SaveEach(folder)]}
    checkpoint = None
    if stop:
        options, checkpoint = {}, folder / f"{stop}.ckpt"
    model = Trainee()
    trainer = make_trainer(strategy, comm.world_size, max_epochs=1, **options)
    loader = loader_of(Remembers(asked * (1 + comm.rank)), num_workers)
    trainer.fit(model, loader, ckpt_path=checkpoint)
    return dict(model.seen)


def remember_and_go_on(comm: Comm, folder: Path) -> list[tuple[Seen, Seen]]:
    found = []
    for num_workers in (0, 1):
        own = folder / str(num_workers)
        whole = remember(comm, own, num_workers, 0, 10)
        found.append((whole, remember(comm, own, num_workers, 3, 0)))
    return found


def forget(comm: Comm, folder: Path) -> tuple[Seen, str]:
    with pytest.warns(ShardplugWarning) as caught:
        seen = remember(comm, folder / "0", 0, 3, 0)
    return seen, str(caught[0].message)


def test_data_sets_with_states_get_those_of_their_rank_back(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(2, remember_and_go_on, tmp_path)):
        for whole, after in found:
            first = 100 * (10 * (1 + rank) + 1)
            assert whole["train 0"][0] == [2 * rank + first, 2 * rank + 1 + first + 100]
            assert after == {"train 0": whole["train 0"][3:]}
    ((seen, told),) = run_ranks(1, forget, tmp_path)
    # On one rank the samples go on, and the count starts from where the data set does.
    assert seen["train 0"][0] == [12 + 100, 13 + 200]
    assert len(seen["train 0"]) == 6
    assert told.startswith("The states that the data sets of 2 ranks had are left out")


class Fetches(Trainee):
    """Asks for its batches."""

    def training_step(self, dataloader_iter: Any) -> torch.Tensor:
        return super().training_step(next(dataloader_iter)[0])


def fetch_and_go_on(comm: Comm, folder: Path) -> list[Seen]:
    found = [fit(comm, "divided", model=Fetches(), callbacks=[SaveEach(folder)])[0]]
    for stop in (1, 7, 10):
        file = folder / f"{stop}.ckpt"
        found.append(fit(comm, "divided", model=Fetches(), checkpoint=file)[0])
    return found


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_steps_that_ask_for_their_batches_go_on_too(tmp_path: Path) -> None:
    for rank, (whole, *after) in enumerate(run_ranks(2, fetch_and_go_on, tmp_path)):
        of_rank = dealt(rank, "divided")
        assert whole == {"train 0": of_rank, "train 1": of_rank}
        assert after[0] == {"train 0": of_rank[1:], "train 1": of_rank}
        assert after[1] == {"train 1": of_rank[1:]}
        assert after[2] == {"train 1": of_rank[4:]}


# -- the files beside the checkpoint --------------------------------------------------------------


def keep_the_best(comm: Comm, folder: Path) -> tuple[Seen, list[str], Seen, list[str]]:
    class Logs(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: Any, *args: Any) -> None:
            module.log("falls", -float(trainer.global_step))

    options: Any = {
        "monitor": "falls",
        "save_top_k": 2,
        "save_last": "link",
        "every_n_train_steps": 1,
    }
    saves = ModelCheckpoint(folder, "{step}", **options)
    with_saves: Any = {"callbacks": [Logs(), saves], "enable_checkpointing": True}
    whole, _ = fit(comm, "divided", max_epochs=1, max_steps=5, **with_saves)
    comm.barrier()
    files = sorted(file.name for file in folder.iterdir())
    seen, _ = fit(comm, "divided", max_epochs=1, checkpoint=folder / "last.ckpt")
    comm.barrier()
    if comm.rank == 0:
        (folder / "step=5.ckpt.rank-00001").unlink()
    comm.barrier()
    told = []
    for file in (folder / "last.ckpt", folder / "step=4.ckpt"):
        if comm.rank == 0 and "4" in file.name:
            content = torch.load(file, weights_only=True)
            content[KEY]["parts"]["moment"] = "another"
            torch.save(content, file)
        comm.barrier()
        with pytest.raises(StateError) as caught:
            fit(comm, "divided", max_epochs=1, checkpoint=file)
        told.append(str(caught.value).replace(f"{folder}/", ""))
    return whole, files, seen, told


@pytest.mark.filterwarnings("ignore:.*callbacks used to create")
def test_files_come_and_go_with_their_checkpoint(tmp_path: Path) -> None:
    for rank, (whole, files, seen, told) in enumerate(run_ranks(2, keep_the_best, tmp_path)):
        kept = [f"step={step}.ckpt{part}" for step in (4, 5) for part in ("", ".rank-00001")]
        assert files == ["last.ckpt", *kept]
        assert whole == {"train 0": dealt(rank, "divided")[:5]}
        assert seen == {"train 0": dealt(rank, "divided")[5:]}
        assert told[0] == (
            "`last.ckpt.rank-00001` must be there, with what rank 1 had of its own in the "
            "checkpoint, got no such file. Copy it beside the checkpoint, or take another one."
        )
        assert "`step=4.ckpt.rank-00001` must be of the moment of the checkpoint" in told[1]


def stop_and_go_on(comm: Comm, folder: Path) -> tuple[Seen, Seen, Seen]:
    class Fails(Callback):
        def on_before_zero_grad(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 3:
                raise KeyError("killed")

        def on_exception(self, trainer: Trainer, *args: Any) -> None:
            trainer.save_checkpoint(folder / "stopped.ckpt")

    with pytest.raises(KeyError, match="killed"):
        fit(comm, "divided", callbacks=[Fails()])
    with_window: Any = {"accumulate_grad_batches": 2, "max_epochs": 1}
    fit(comm, "divided", callbacks=[SaveEach(folder)], **with_window)
    after = fit(comm, "divided", checkpoint=folder / "stopped.ckpt", max_epochs=1)[0]
    window = fit(comm, "divided", checkpoint=folder / "3.ckpt", **with_window)[0]

    # Saved again before anything has been trained on, and gone on from that.
    class SavesAtOnce(Callback):
        def on_train_start(self, trainer: Trainer, *args: Any) -> None:
            trainer.save_checkpoint(folder / "again.ckpt")

    fit(comm, "divided", callbacks=[SavesAtOnce()], checkpoint=folder / "2.ckpt", **with_window)
    again = fit(comm, "divided", checkpoint=folder / "again.ckpt", **with_window)[0]
    return after, window, again


def test_each_rank_goes_back_to_where_the_checkpoint_does(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(2, stop_and_go_on, tmp_path)):
        of_rank = dealt(rank, "divided")
        for start, seen in zip((3, 2, 2), found, strict=True):
            assert seen == {"train 0": of_rank[start:]}


def go_on_from_a_folder(comm: Comm, folder: Path) -> tuple[Seen, bool]:
    def run(**options: Any) -> Seen:
        strategy = ShardModelParallelStrategy(
            data_parallel_size=2,
            tensor_parallel_size=1,
            save_distributed_checkpoint=True,
            dispatch_batches=False,
        )
        model, checkpoint = Layered(), options.pop("checkpoint", None)
        # It asks how many batches there are, which a stream does not tell.
        options["limit_train_batches"] = STEPS
        trainer = make_trainer(strategy, comm.world_size, max_epochs=1, **options)
        trainer.fit(model, loader_of(Divided()), values(4, 1), ckpt_path=checkpoint)
        return dict(model.seen)

    run(callbacks=[SaveAfterThree(folder / "cut.ckpt")])
    seen = run(checkpoint=folder / "cut.ckpt")
    return seen, (folder / "cut.ckpt").is_dir()


def test_a_checkpoint_that_is_a_folder_has_its_parts_beside_it(tmp_path: Path) -> None:
    for rank, (seen, is_folder) in enumerate(run_ranks(2, go_on_from_a_folder, tmp_path)):
        assert is_folder
        assert seen["train 0"] == dealt(rank, "divided")[3:]
    assert (tmp_path / "cut.ckpt.rank-00001").is_file()


# -- what is said of misfits ----------------------------------------------------------------------

PARTS = Parts(2, "abc-0-3-3", "saved.ckpt")
FILES = TorchCheckpointIO()


def load(comm: Comm, path: Path, parts: Parts = PARTS) -> Any:
    try:
        return load_part(FILES, path, parts, comm, num_loaders=1)
    except StateError as error:
        return str(error).replace(f"{path.parent}/", "")


def save(path: Path, own: Any = (("own",),), moment: str = PARTS.moment) -> None:
    save_part(FILES, path, rank=1, moment=moment, own=own)


def test_a_part_is_found_beside_its_checkpoint_or_under_its_old_name(tmp_path: Path) -> None:
    saved = tmp_path / "saved.ckpt"
    save(saved)
    saved.touch()
    assert run_threads(2, load, saved) == [None, (("own",),)]
    elsewhere = tmp_path / "folder"
    elsewhere.mkdir()
    (elsewhere / "link.ckpt").symlink_to(saved)
    assert run_threads(2, load, elsewhere / "link.ckpt") == [None, (("own",),)]
    assert run_threads(2, load, tmp_path / "renamed.ckpt") == [None, (("own",),)]
    shutil.copy(part_path(saved, 1), elsewhere / "other.ckpt.rank-00001")
    assert run_threads(2, load, elsewhere / "other.ckpt") == [None, (("own",),)]
    remove_part(FILES, saved, rank=1)
    remove_part(FILES, saved, rank=1)  # there is none any more
    assert not os.path.exists(part_path(saved, 1))


def test_a_part_that_does_not_fit_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    saved = tmp_path / "saved.ckpt"
    first, second = run_threads(2, load, saved)
    assert first == second
    assert first == (
        "`saved.ckpt.rank-00001` must be there, with what rank 1 had of its own in the checkpoint, "
        "got no such file. Copy it beside the checkpoint, or take another one."
    )
    save(saved, moment="abc-0-2-2")
    assert (
        run_threads(2, load, saved)
        == [
            "`saved.ckpt.rank-00001` must be of the moment of the checkpoint, 'abc-0-3-3', got "
            "'abc-0-2-2'. Its rank failed before it could save: take another checkpoint."
        ]
        * 2
    )
    save(saved, own=())
    assert (
        run_threads(2, load, saved)
        == [
            "`own` of saved.ckpt.rank-00001 must be of 1 loaders, got []. It is damaged: take "
            "another checkpoint."
        ]
        * 2
    )
    Path(part_path(saved, 1)).write_bytes(b"nonsense")
    for error in run_threads(2, load, saved):
        assert error.startswith("`saved.ckpt.rank-00001` must be there to be read, got ")


def test_what_names_no_parts_is_an_error() -> None:
    assert Parts.read(PARTS.as_dict()) == PARTS
    for entry in (None, {**PARTS.as_dict(), "world_size": "2"}):
        with pytest.raises(StateError) as caught:
            Parts.read(entry)
        assert str(caught.value).startswith(
            "`parts` of the checkpoint must say which files belong to it, got "
        )
        assert str(caught.value).endswith("The checkpoint is damaged: take another one.")


def test_another_number_of_ranks_is_an_error_only_where_data_divides_itself() -> None:
    place = Place(0, 3, ({"steps": 3},), (False,), (("own",),))
    assert place.own_of(0) == ("own",)
    assert place.own_of(1) == ()
    with pytest.raises(StateError) as caught:
        without_own(place, PARTS, 3)
    assert str(caught.value) == (
        "`devices` must make 2 ranks, each of which has read a part of its own of the training "
        "data, got 3. Train on as many as before, or go on from a checkpoint of the end of an "
        "epoch. With dispatch_batches=True any number would do."
    )
    place = Place(0, 3, ({"steps": None},), (False,), (("own",),))
    with pytest.warns(ShardplugWarning) as warned:
        assert without_own(place, PARTS, 3).own == ()
    assert str(warned[0].message) == (
        "The states that the data sets of 2 ranks had are left out: there are 3 now. The samples "
        "go on where they were."
    )
