"""Who divides a stream among workers: found out by what is read of a worker's info."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import pytest
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import get_worker_info

from shardplug import PlanError
from shardplug.plan.shard import Shard
from shardplug.plan.split import ShardPlan
from shardplug.streams import open_stream
from shardplug.worker_info import WatchedInfo, WorkerSplit, check_worker_split, worker_place
from tests.streams import Ids, LateSplitIds, SeededIds, SplitIds

PLAN = ShardPlan(None, 1, Shard(0, 1))


class Info(NamedTuple):
    """What torch tells a worker."""

    id: int
    num_workers: int
    seed: int
    dataset: Any


def enter_worker(patch: pytest.MonkeyPatch, worker: int, dataset: Any, count: int = 2) -> None:
    """Let this process pass for a worker, until the test ends."""
    info = Info(worker, count, seed=7, dataset=dataset)
    patch.setattr(torch_worker, "_worker_info", info)


def watched() -> Any:
    info: Any = get_worker_info()
    assert isinstance(info, WatchedInfo)
    return info


def opened(dataset: Any, split: WorkerSplit) -> tuple[list[Any], bool]:
    stream = open_stream(dataset, PLAN, split)
    return [row for part in stream.parts for row in part.rows], stream.splits_itself


def test_outside_of_workers_nothing_is_watched() -> None:
    WatchedInfo.install("auto")
    assert get_worker_info() is None
    assert worker_place() == (0, 1)
    assert opened(SplitIds(3), "auto") == ([0, 1, 2], False)
    assert opened(SplitIds(3), "dataset") == ([0, 1, 2], False)


def test_a_data_set_that_reads_id_and_number_splits_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    enter_worker(monkeypatch, 1, SplitIds(5))
    assert opened(SplitIds(5), "auto") == ([1, 3], True)


def test_a_data_set_that_reads_neither_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    enter_worker(monkeypatch, 1, Ids(5))
    assert opened(Ids(5), "auto") == ([0, 1, 2, 3, 4], False)


def test_reading_the_id_alone_is_not_splitting(monkeypatch: pytest.MonkeyPatch) -> None:
    enter_worker(monkeypatch, 1, SeededIds(3))
    assert opened(SeededIds(3), "auto") == ([0, 1, 2], False)


@pytest.mark.parametrize("name", ["id", "num_workers", "seed"])
def test_one_of_the_numbers_alone_is_not_splitting(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter_worker(monkeypatch, 1, Ids(3))
    WatchedInfo.install("auto")
    assert getattr(watched(), name) == {"id": 1, "num_workers": 2, "seed": 7}[name]
    assert watched().decide() is False


def test_reaching_for_the_data_set_is_splitting(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = Ids(3)
    enter_worker(monkeypatch, 1, ids)
    WatchedInfo.install("auto")
    assert watched().dataset is ids
    assert watched().decide() is True


def test_told_that_the_data_set_splits_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    enter_worker(monkeypatch, 1, LateSplitIds(6))
    assert opened(LateSplitIds(6), "dataset") == ([0, 2, 4], True)
    assert isinstance(get_worker_info(), Info)


def test_told_that_shardplug_splits_the_data_set_sees_one_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    enter_worker(monkeypatch, 1, SplitIds(3))
    assert opened(SplitIds(3), "shardplug") == ([0, 1, 2], False)
    assert (watched().id, watched().num_workers, watched().seed) == (0, 1, 7)
    assert worker_place() == (1, 2)


def test_the_place_is_known_without_reading_it(monkeypatch: pytest.MonkeyPatch) -> None:
    enter_worker(monkeypatch, 1, Ids(3))
    assert worker_place() == (1, 2)
    WatchedInfo.install("auto")
    assert worker_place() == (1, 2)
    assert watched().decide() is False


def test_an_info_that_is_watched_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    enter_worker(monkeypatch, 0, Ids(3))
    WatchedInfo.install("auto")
    first = watched()
    WatchedInfo.install("auto")
    assert watched() is first


def test_an_unknown_name_is_refused() -> None:
    assert [check_worker_split(name) for name in ("auto", "shardplug", "dataset")] == [
        "auto",
        "shardplug",
        "dataset",
    ]
    with pytest.raises(
        PlanError,
        match=r"^`worker_split` must be one of 'auto', 'shardplug', 'dataset', got 'none'\.$",
    ):
        check_worker_split("none")


def test_reading_after_the_first_item_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    enter_worker(monkeypatch, 1, LateSplitIds(3))
    parts = open_stream(LateSplitIds(3), PLAN, "auto").parts
    with pytest.raises(
        PlanError,
        match=r'^`worker_split` must say who .* got "auto" with LateSplitIds, which reads its '
        r'worker info only after its first item\. Pass worker_split="dataset" if it splits itself, '
        r'else "shardplug"\.$',
    ):
        list(parts)


def test_reading_late_what_does_not_make_it_a_split_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    enter_worker(monkeypatch, 1, Ids(3))
    WatchedInfo.install("auto")
    assert watched().decide() is False
    assert [watched().id, watched().id] == [1, 1]


def test_a_first_half_early_and_the_other_late_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    enter_worker(monkeypatch, 1, SeededIds(3))
    assert opened(SeededIds(3), "auto") == ([0, 1, 2], False)
    with pytest.raises(PlanError, match="SeededIds, which reads its worker info only after"):
        watched().num_workers  # noqa: B018  # reading it is what is tested


def test_a_worker_init_that_cuts_the_data_set_does_not_go_with_our_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    enter_worker(monkeypatch, 1, Ids(3))
    WatchedInfo.install("shardplug")
    watched().dataset.ids = [2]
    with pytest.raises(
        PlanError,
        match=r"^`worker_init_fn` must leave the data set whole with "
        r'worker_split="shardplug", got one that reads worker_info\.dataset\. Pass '
        r'worker_split="dataset" if it cuts the data set\.$',
    ):
        opened(Ids(3), "shardplug")


def test_a_torch_that_keeps_the_info_elsewhere_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = Info(0, 2, seed=7, dataset=None)
    monkeypatch.setattr("shardplug.worker_info.get_worker_info", lambda: elsewhere)
    with pytest.raises(PlanError, match=r"whose workers cannot be watched\. Pass worker_split="):
        WatchedInfo.install("auto")
    WatchedInfo.install("dataset")


@pytest.mark.parametrize("worker", [0, 1])
def test_one_line_of_log_tells_of_a_data_set_that_splits_itself(
    worker: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    enter_worker(monkeypatch, worker, SplitIds(5))
    with caplog.at_level(logging.INFO, "shardplug"):
        for _ in range(3):  # passes of a worker that is kept
            opened(SplitIds(5), "auto")
    due = (
        "SplitIds splits itself among workers by get_worker_info(); it is left to it, as with "
        'worker_split="dataset".'
    )
    assert [record.getMessage() for record in caplog.records] == [due] * (worker == 0)


def test_nothing_is_logged_of_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    enter_worker(monkeypatch, 0, SeededIds(5))
    with caplog.at_level(logging.INFO, "shardplug"):
        opened(SeededIds(5), "auto")
    assert not caplog.records
