"""Streams on real ranks, with workers of their own, and those of Hugging Face datasets."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from shardplug import CommError, prepare_data_loader
from shardplug.comm import Comm
from tests.launch import run_processes
from tests.laws import Case, RankRun, loader_rank, one_pass
from tests.streams import Ids, Parts, parts_of


def forked(num_workers: int) -> dict[str, Any]:
    """Ranks come from a fork server; their workers would start another, which imports anew."""
    context = "fork" if num_workers else None
    return {"num_workers": num_workers, "multiprocessing_context": context}


def loaded(_: Comm, dataset: Any, options: dict[str, Any], num_workers: int) -> RankRun:
    loader = DataLoader(dataset, 2, **forked(num_workers))
    return loader_rank(prepare_data_loader(loader, dispatch_batches=False, **options))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_laws_hold(num_workers: int) -> None:
    one_pass(
        lambda case: tuple(
            run_processes(case.world_size, loaded, Ids(case.num_samples), {}, num_workers)
        ),
        Case(23, 2, 3),
        is_sized=False,
        is_end_known=False,
    )


def test_uneven_parts_end_together() -> None:
    ranks = run_processes(2, loaded, Parts(parts_of(3, 7)), {}, 0)
    assert [[step.valid_rows for step in rank.steps] for rank in ranks] == [
        [2, 1, 0, 0],
        [2, 2, 2, 1],
    ]


def ended(comm: Comm, lengths: list[int], fails_at: int | None) -> str:
    ids = Ids(lengths[comm.rank], fails_at=fails_at if comm.rank == 1 else None)
    try:
        list(prepare_data_loader(DataLoader(ids, 2), dispatch_batches=False))
    except CommError as error:
        return str(error)
    except ValueError as error:
        return str(error)
    return "read it all"


def test_a_stream_that_ends_on_some_ranks_only_is_an_error_on_all() -> None:
    for message in run_processes(2, ended, [40, 48], None, timeout_s=10):
        assert message.startswith("Ranks disagree on the end of the stream: it has ended on ranks")


@pytest.mark.parametrize("fails_at", [0, 33])
def test_what_one_rank_raises_is_told_to_the_others(fails_at: int) -> None:
    first, second = run_processes(2, ended, [100, 100], fails_at, timeout_s=10)
    assert second == f"no id {fails_at}"
    assert first == f"Another rank could not go on: rank 1 failed with ValueError: {second}"


# Streams of Hugging Face datasets, from local files.


HUGGING_FACE = [  # files, whether it went through split_dataset_by_node, workers
    (4, False, 0),
    (4, False, 2),
    (1, False, 2),
    (4, True, 2),
    (1, True, 0),
]


def hugging_face(comm: Comm, folder: str) -> list[RankRun]:
    import datasets
    from datasets.distributed import split_dataset_by_node

    datasets.disable_progress_bars()
    runs = []
    for num_files, is_by_node, num_workers in HUGGING_FACE:
        files = sorted(map(str, Path(folder).glob(f"{num_files}-*.jsonl")))
        stream = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
        if is_by_node:
            stream = split_dataset_by_node(stream, comm.rank, comm.world_size)
        loader = prepare_data_loader(
            DataLoader(stream, 2, **forked(num_workers)), dispatch_batches=False
        )
        runs.append(loader_rank(loader, ids=lambda batch: batch["id"].tolist()))
    return runs


@pytest.mark.slow
def test_hugging_face_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for num_files in (1, 4):
        size = 12 // num_files
        for number in range(num_files):
            ids = range(number * size, (number + 1) * size)
            lines = "".join(json.dumps({"id": each}) + "\n" for each in ids)
            (tmp_path / f"{num_files}-{number}.jsonl").write_text(lines)
    by_rank = run_processes(2, hugging_face, str(tmp_path), timeout_s=50)
    for case, *ranks in zip(HUGGING_FACE, *by_rank, strict=True):
        assert len({len(rank.steps) for rank in ranks}) == 1, case
        real = chain(*(step.rows[: step.valid_rows] for rank in ranks for step in rank.steps))
        assert sorted(real) == list(range(12)), case
