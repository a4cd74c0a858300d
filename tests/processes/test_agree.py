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


def test_deterministic_algorithms() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        set_seed(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_generator_that_is_not_there() -> None:
    with pytest.raises(PlanError, match="`generator` must be given"):
        synchronize_rng_states(["generator"])
