"""What ranks tell each other of results: each real row once, in the epoch's order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler
from torch.utils.data.distributed import DistributedSampler

from shardplug import (
    BatchError,
    CommError,
    PlanError,
    gather,
    gather_for_metrics,
    prepare_data_loader,
)
from shardplug.testing import LockstepComm, run_ranks


class Stream(IterableDataset[int]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Any:
        return iter(range(self.num_samples))


class Parts(Stream):
    """A stream whose two parts are of different length: the first third, and the rest."""

    def shard(self, num_shards: int, index: int) -> Any:
        bounds = [0, *[self.num_samples // 3] * (num_shards - 1), self.num_samples]
        return Rows(list(range(bounds[index], bounds[index + 1])))


class Rows(IterableDataset[int]):
    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def numbers(num_samples: int) -> Any:
    return torch.arange(num_samples)


def gathered(
    world_size: int,
    loader: Callable[[LockstepComm], DataLoader[Any]],
    of: Callable[[Any], Any] = lambda batch: batch,
    **options: Any,
) -> list[list[Any]]:
    """What each rank gets in each step."""

    def body(comm: LockstepComm) -> list[Any]:
        prepared = prepare_data_loader(loader(comm), comm=comm, **options)
        return [gather_for_metrics(of(batch), prepared) for batch in prepared]

    return run_ranks(world_size, body)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("tail", ["pad", "exact"])
@pytest.mark.parametrize("num_samples", [4, 5, 7, 8, 13, 16])
def test_an_epoch_holds_each_sample_once_in_order(
    num_samples: int, tail: str, world_size: int
) -> None:
    for data in (numbers(num_samples), Stream(num_samples)):
        loader: Any = DataLoader(data, 3)
        by_rank = gathered(world_size, lambda _, loader=loader: loader, tail=tail)  # type: ignore[misc]
        for steps in by_rank:
            assert torch.cat(steps).tolist() == list(range(num_samples))


def test_dropped_rows_are_the_only_ones_missing() -> None:
    by_rank = gathered(2, lambda _: DataLoader(numbers(11), 2, drop_last=True))
    assert [torch.cat(steps).tolist() for steps in by_rank] == [list(range(8))] * 2


@pytest.mark.parametrize("num_samples", [9, 10, 3])
def test_parts_of_different_length_are_seen_once(num_samples: int) -> None:
    first, second = gathered(2, lambda _: DataLoader(Parts(num_samples), 2))
    assert [step.tolist() for step in first] == [step.tolist() for step in second]
    assert sorted(chain(*[step.tolist() for step in first])) == list(range(num_samples))


def test_a_sampler_over_half_of_the_data_counts_half_of_it() -> None:
    drawn = torch.randperm(5, generator=torch.Generator().manual_seed(1)).tolist()
    by_rank = gathered(
        2,
        lambda _: DataLoader(
            numbers(10),
            2,
            sampler=SubsetRandomSampler(range(5), generator=torch.Generator().manual_seed(1)),
        ),
    )
    assert [torch.cat(steps).tolist() for steps in by_rank] == [drawn] * 2


def test_the_padding_of_a_distributed_sampler_is_left_out() -> None:
    def loader(comm: LockstepComm) -> DataLoader[Any]:
        data = numbers(5)
        return DataLoader(data, 2, sampler=DistributedSampler(data, 2, comm.rank, shuffle=False))

    by_rank = gathered(2, loader)
    # Rank 0 has 0, 2, 4; rank 1 has 1, 3 and the padding 0.
    assert [[step.tolist() for step in steps] for steps in by_rank] == [[[0, 2, 1, 3], [4]]] * 2


def test_several_outputs_per_sample() -> None:
    by_rank = gathered(
        2, lambda _: DataLoader(numbers(5), 2), lambda batch: batch.repeat_interleave(3)
    )
    assert by_rank[1][-1].tolist() == [4, 4, 4]
    assert by_rank[0][0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_lists_of_tensors_of_two_widths() -> None:
    def of(batch: Any) -> list[Any]:
        return [batch.unsqueeze(1).repeat(1, 3), batch.unsqueeze(1).repeat(1, 2)]

    for steps in gathered(2, lambda _: DataLoader(numbers(5), 2), of):
        assert [each.tolist() for each in steps[-1]] == [[[4, 4, 4]], [[4, 4]]]


def test_names_follow_their_rows() -> None:
    def of(batch: Any) -> dict[str, Any]:
        return {"id": batch, "name": [f"n{int(each)}" for each in batch], "of": (batch + 1, batch)}

    for steps in gathered(3, lambda _: DataLoader(numbers(7), 2), of):
        ids = torch.cat([step["id"] for step in steps]).tolist()
        assert ids == list(range(7))
        assert list(chain(*[step["name"] for step in steps])) == [f"n{each}" for each in ids]
        assert torch.cat([step["of"][0] for step in steps]).tolist() == [each + 1 for each in ids]


def test_tensors_of_different_width_come_as_a_list() -> None:
    steps = gathered(
        2, lambda _: DataLoader(numbers(4), 2), lambda batch: torch.zeros(2, int(batch[0]) + 1)
    )[0]
    assert [tuple(each.shape) for each in steps[0]] == [(2, 1), (2, 3)]


@pytest.mark.parametrize(("num_samples", "world_size"), [(5, 2), (1, 2), (7, 3)])
def test_ranks_that_would_wait_for_ever_are_told_at_once(num_samples: int, world_size: int) -> None:
    calls = []

    def body(comm: LockstepComm) -> int:
        prepared = prepare_data_loader(
            DataLoader(numbers(num_samples), 2), comm=comm, even_batches=False
        )
        for batch in prepared:
            with pytest.raises(
                PlanError, match=r"same number of steps on every rank.*tail='uneven'"
            ):
                gather_for_metrics(batch, prepared)
            calls.append(comm.rank)
        return 0

    run_ranks(world_size, body)
    assert calls


def test_parts_that_were_cut_before_may_differ_too() -> None:
    def body(comm: LockstepComm) -> Any:
        loader = DataLoader(numbers(4 + 2 * comm.rank), 2)
        prepared = prepare_data_loader(loader, comm=comm, already_sharded=True)
        for batch in prepared:
            gather_for_metrics(batch, prepared)

    with pytest.raises((PlanError, CommError), match="same number of steps"):
        run_ranks(2, body)


def test_a_simulation_refuses() -> None:
    loader = prepare_data_loader(DataLoader(numbers(4), 2), num_processes=2, process_index=1)
    for batch in loader:
        with pytest.raises(PlanError, match="shard 1 of 2, a simulation"):
            gather_for_metrics(batch, loader)


def test_between_passes_there_is_nothing_to_gather() -> None:
    loader = prepare_data_loader(DataLoader(numbers(4), 2))
    with pytest.raises(PlanError, match="must have a batch out"):
        gather_for_metrics(numbers(2), loader)


def test_rows_that_are_no_multiple_of_the_batch() -> None:
    loader = prepare_data_loader(DataLoader(numbers(4), 2))
    for _ in loader:
        with pytest.raises(BatchError, match="must have a multiple"):
            gather_for_metrics({"x": numbers(3)}, loader)


# gather


def test_gather_joins_by_rank() -> None:
    def body(comm: LockstepComm) -> Any:
        data = {
            "rows": torch.full((comm.rank + 1, 2), comm.rank),
            "loss": torch.tensor(float(comm.rank)),
            "names": [str(comm.rank)],
            "number": comm.rank,
        }
        return gather(data, comm=comm)

    for each in run_ranks(3, body):
        assert each["rows"].tolist() == [[0, 0], [1, 1], [1, 1], [2, 2], [2, 2], [2, 2]]
        assert each["loss"].tolist() == [0.0, 1.0, 2.0]
        assert each["names"] == ["0", "1", "2"]
        assert each["number"] == [0, 1, 2]


def test_gather_alone_is_the_data_itself() -> None:
    assert gather([torch.arange(2), torch.tensor(3)])[1].tolist() == [3]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda rank: {"x": torch.zeros(1, dtype=[torch.int32, torch.int64][rank])}, "'x' as .*32"),
        (
            lambda rank: {"x": torch.zeros(1)} | ({"y": torch.zeros(1)} if rank else {}),
            "'y' on rank 1",
        ),
        (lambda rank: {"x": torch.zeros(1) if rank else "zero"}, "'x' as no tensor"),
    ],
)
def test_ranks_that_differ_are_named_on_all(data: Callable[[int], Any], message: str) -> None:
    told = []

    def body(comm: LockstepComm) -> None:
        with pytest.raises(BatchError, match=message) as error:
            gather(data(comm.rank), comm=comm)
        told.append(str(error.value))

    run_ranks(2, body)
    assert told[0] == told[1]
    assert "rank 1" in told[0]


def test_what_cannot_be_pickled_is_an_error_on_all() -> None:
    def body(comm: LockstepComm) -> None:
        told = "must be picklable, but .*lambda" if comm.rank else "rank 1 failed with pickling"
        with pytest.raises(CommError, match=told):
            gather([lambda: 0] if comm.rank else ["fine"], comm=comm)
        assert gather([comm.rank], comm=comm) == [0, 1]  # still in step

    run_ranks(2, body)


def test_all_tensors_travel_in_one_message() -> None:
    def body(comm: LockstepComm) -> Any:
        before = len(comm.calls)
        gather([torch.zeros(3), torch.zeros(2, 2), {"n": torch.tensor(1)}], comm=comm)
        return len(comm.calls) - before

    assert run_ranks(2, body) == [1, 1]


# Tensors side by side are joined as bytes; anything else is walked through. Both say the same.

KINDS: dict[str, tuple[Callable[[int], Any], Any]] = {
    "bare": (lambda rank: torch.tensor([rank, rank]), [0, 0, 1, 1]),
    "scalar": (lambda rank: torch.tensor(rank), [0, 1]),
    "different numbers of rows": (lambda rank: torch.full((2 * rank,), rank), [1, 1]),
    "no rows": (lambda rank: torch.zeros(0, 3), []),
    "rows of nothing": (lambda rank: torch.zeros(1, 0), [[], []]),
    "different widths": (lambda rank: torch.zeros(1, 1 + rank), [[[0.0]], [[0.0, 0.0]]]),
    "a scalar and a row": (lambda rank: torch.zeros([1] * rank), [0.0, [0.0]]),
    "strided": (lambda rank: torch.arange(6).reshape(2, 3).t()[:2] + rank, None),
    "with a gradient": (lambda rank: torch.ones(1, requires_grad=True) + rank, [1.0, 2.0]),
    "bool": (lambda rank: torch.tensor([rank == 1]), [False, True]),
    "bfloat16": (lambda rank: torch.full((1,), rank, dtype=torch.bfloat16), [0.0, 1.0]),
    "conjugated": (lambda rank: torch.tensor([rank + 1j]).conj(), [-1j, 1 - 1j]),
    "large": (lambda rank: torch.full((1, 300_000), rank)[:, ::299_999], [[0, 0], [1, 1]]),
}
KINDS["strided"] = (KINDS["strided"][0], [[0, 3], [1, 4], [1, 4], [2, 5]])


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda tensor: tensor, lambda data: data),
        (lambda tensor: (torch.tensor([7]), tensor), lambda data: data[1]),
        (lambda tensor: {"b": tensor, "a": torch.tensor([7])}, lambda data: data["b"]),
        (lambda tensor: {"b": tensor, "a": "walked"}, lambda data: data["b"]),
        (lambda tensor: {0: tensor}, lambda data: data[0]),
    ],
    ids=["bare", "tuple", "dict", "mixed", "numbered"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tensor_is_gathered(
    kind: str, wrap: Callable[[Any], Any], unwrap: Callable[[Any], Any]
) -> None:
    make, expected = KINDS[kind]

    def body(comm: LockstepComm) -> Any:
        data = wrap(make(comm.rank))
        result = gather(data, comm=comm)
        if not isinstance(data, torch.Tensor):
            assert type(result) is type(data)
        if type(result) is dict:
            assert list(result) == list(data)
        return unwrap(result)

    for result in run_ranks(2, body):
        if isinstance(result, list):
            assert [each.tolist() for each in result] == expected
        else:
            assert result.tolist() == expected
            result.zero_()  # ours to write to


def test_a_large_tensor_travels_as_it_is() -> None:
    def body(comm: LockstepComm) -> Any:
        return gather({"x": torch.full((1, 300_000), comm.rank)}, comm=comm)["x"]

    for result in run_ranks(2, body):
        assert result.shape == (2, 300_000)
        assert result.sum(dim=1).tolist() == [0, 300_000]


def test_one_order_of_keys_is_as_good_as_another() -> None:
    def body(comm: LockstepComm) -> Any:
        keys = "ab" if comm.rank else "ba"
        return gather({key: torch.tensor([f"{comm.rank}{key}" == "0a"]) for key in keys}, comm=comm)

    for result in run_ranks(2, body):
        assert {key: value.tolist() for key, value in result.items()} == {
            "a": [True, False],
            "b": [False, False],
        }


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (
            lambda rank: torch.zeros(1) if rank else (torch.zeros(1),),
            "got '' on rank 1 but not on rank 0",
        ),
        (lambda rank: {"x": torch.zeros(1)} if rank else {"x": "text"}, "'x' as no tensor on rank"),
        (
            lambda rank: (torch.zeros(1), torch.zeros(1, dtype=[torch.int8, torch.bool][rank])),
            "'1'",
        ),
    ],
)
def test_columns_that_differ_between_ranks_are_an_error_on_all(
    data: Callable[[int], Any], told: str
) -> None:
    def body(comm: LockstepComm) -> str:
        with pytest.raises(BatchError) as caught:
            gather(data(comm.rank), comm=comm)
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert told in first


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x, x), lambda x: {"x": x}])
def test_columns_must_have_a_multiple_of_the_rows(wrap: Callable[[Any], Any]) -> None:
    loader = prepare_data_loader(DataLoader(numbers(4), 2))
    for _ in loader:
        with pytest.raises(BatchError, match="has 3 rows for the 2 rows of the batch"):
            gather_for_metrics(wrap(numbers(3)), loader)


def test_lists_of_dicts_may_be_of_another_length_on_each_rank() -> None:
    def of_samples(ids: list[int]) -> Any:
        """One dict for each sample, as detectors return: its boxes, as many as there are."""
        return {
            "found": [{"boxes": torch.full((each + 3, 4), each)} for each in ids],
            "notes": [{"id": each} for each in ids],
        }

    def body(comm: LockstepComm) -> list[Any]:
        loader = prepare_data_loader(DataLoader(numbers(5), 3), comm=comm)
        return [
            gather_for_metrics(of_samples(batch.tolist()), loader, comm=comm) for batch in loader
        ]

    for (gathered,) in run_ranks(2, body):
        assert str(gathered) == str(of_samples([0, 1, 2, 3, 4]))


def test_a_loader_that_is_not_prepared() -> None:
    plain: Any = DataLoader(numbers(2))
    with pytest.raises(PlanError, match="`loader` must be a prepared loader, got DataLoader"):
        gather_for_metrics(torch.arange(1), plain)
