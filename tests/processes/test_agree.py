"""Random numbers and results over real ranks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from shardplug import (
    BatchError,
    Comm,
    CommError,
    PlanError,
    gather,
    gather_for_metrics,
    prepare_data_loader,
    set_seed,
    synchronize_rng_states,
)
from tests.launch import run_processes


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def seeded_apart(comm: Comm) -> Any:
    random.seed(comm.rank)
    np.random.seed(comm.rank)
    torch.manual_seed(comm.rank)
    generator = torch.Generator().manual_seed(comm.rank)
    synchronize_rng_states(["torch", "python", "numpy", "generator"], generator)
    return draw(), torch.rand((), generator=generator).item()


def test_generators_are_made_equal_to_rank_0s() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    own = torch.rand((), generator=torch.Generator().manual_seed(0)).item()
    assert run_processes(3, seeded_apart) == [(draw(), own)] * 3


def seed_ranks(_: Comm, device_specific: bool) -> Any:
    set_seed(7, device_specific)
    return draw()


def test_ranks_are_seeded_alike_or_apart() -> None:
    set_seed(7)
    assert run_processes(2, seed_ranks, False) == [draw()] * 2
    first, second = run_processes(2, seed_ranks, True)
    assert first != second
    assert run_processes(2, seed_ranks, True) == [first, second]


def results(comm: Comm) -> Any:
    loader = prepare_data_loader(DataLoader(torch.arange(7), 2))  # type: ignore[arg-type]
    seen = []
    for batch in loader:
        rows = {"id": batch, "wide": batch.repeat(2000, 1).T, "name": [str(int(i)) for i in batch]}
        gathered = gather_for_metrics(rows, loader)
        assert gathered["wide"].shape == (len(gathered["id"]), 2000)
        assert gathered["name"] == [str(int(i)) for i in gathered["id"]]
        seen += gathered["id"].tolist()
    with pytest.raises(BatchError, match=r"'x' as torch\.float32 on rank 0 and torch\.int64"):
        gather({"x": torch.zeros(2, dtype=torch.int64 if comm.rank else torch.float32)})
    told = "must be picklable, but .*lambda" if comm.rank else "rank 1 failed with pickling"
    with pytest.raises(CommError, match=told):
        gather({"x": torch.zeros(2), "f": (lambda: 0) if comm.rank else 0})
    uneven = prepare_data_loader(DataLoader(torch.arange(5), 2), even_batches=False)  # type: ignore[arg-type]
    for batch in uneven:
        with pytest.raises(PlanError, match="same number of steps"):
            gather_for_metrics(batch, uneven)
    return seen


def test_metrics_see_each_row_once_and_errors_are_everybodys() -> None:
    assert run_processes(2, results) == [list(range(7))] * 2


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range(seed: int) -> None:
    with pytest.raises(PlanError, match=r"`seed` must be in \[0, 2\^63\)"):
        set_seed(seed)


@pytest.mark.parametrize("seed", [1.5, "7", None, True])
def test_a_seed_that_is_none_seeds_nothing(seed: Any) -> None:
    set_seed(3)
    expected = draw()
    set_seed(3)
    with pytest.raises(PlanError, match=r"`seed` must be an integer, got"):
        set_seed(seed)
    with pytest.raises(PlanError, match=r"`device_specific` must be True or False, got 'each'\."):
        set_seed(4, "each")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"`deterministic` must be True or False, got 1\."):
        set_seed(4, deterministic=1)  # type: ignore[arg-type]
    assert draw() == expected


def test_a_seed_may_be_numpys() -> None:
    set_seed(2**62 + 1)
    expected = draw()
    set_seed(np.int64(2**62 + 1))
    assert draw() == expected


def test_deterministic_algorithms() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        set_seed(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_generator_that_is_not_there() -> None:
    with pytest.raises(
        PlanError, match=r"`generator` must be given .* as a torch.Generator, got None"
    ):
        synchronize_rng_states(["generator"])
    with pytest.raises(
        PlanError, match=r"`generator` must be given .* as a torch.Generator, got 5\."
    ):
        synchronize_rng_states(["generator"], 5)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"`rng_types` must be a sequence of names, got 'torch'\."):
        synchronize_rng_states("torch")


def one_rank_goes_wrong(comm: Comm, wrong: int, how: str) -> list[str]:
    """Gather where one rank cannot, and go on; what every rank saw."""
    numbers: Any = torch.arange(8)
    loader = prepare_data_loader(DataLoader(numbers, batch_size=2), comm=comm)
    batches = iter(loader)
    batch = next(batches)
    seen = []
    if comm.rank == wrong and how == "between passes":
        list(batches)
    try:
        is_short = comm.rank == wrong and how == "rows"
        gather_for_metrics(torch.ones(3) if is_short else batch, loader, comm=comm)
    except (BatchError, PlanError, CommError) as error:
        seen.append(f"{type(error).__name__}: {error}")
    return [*seen, *comm.all_gather_object("together")]


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize(
    ("how", "message"),
    [("rows", "has 3 rows for the 2 rows"), ("between passes", "must have a batch out")],
)
def test_what_one_rank_cannot_gather_is_an_error_on_all(how: str, message: str, wrong: int) -> None:
    by_rank = run_processes(2, one_rank_goes_wrong, wrong, how)
    assert [seen[1:] for seen in by_rank] == [["together", "together"]] * 2
    assert all(message in seen[0] for seen in by_rank)
    assert f"CommError: Another rank could not go on: rank {wrong}" in by_rank[1 - wrong][0]
