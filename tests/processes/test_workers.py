"""Workers that die, in processes that have seen no other test."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from shardplug import CommError, prepare_data_loader
from shardplug.comm import Comm
from tests.launch import run_processes
from tests.streams import Ids
from tests.unit.test_workers import Table

# Ranks come from a fork server, and would start another one, which imports torch anew.
FORKED: dict[str, Any] = {"multiprocessing_context": "fork"}


def read(_: Comm, dataset: Any, is_kept: bool, per_message: int) -> list[list[int]]:
    loader = DataLoader(dataset, 2, num_workers=2, persistent_workers=is_kept, **FORKED)
    made = prepare_data_loader(loader, batches_per_message=per_message)
    return [batch.tolist() for batch in made]


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("kind", [Table, Ids])
def test_a_worker_that_dies_is_an_error(kind: Any, is_kept: bool) -> None:
    with pytest.raises(RuntimeError, match=r"worker .* (exited unexpectedly|ended with its)"):
        run_processes(1, read, kind(40, dies_at=21), is_kept, 3, has_group=False)


def outcome(comm: Comm) -> str:
    ids = Ids(400, dies_at=21 if comm.rank == 1 else None)
    try:
        loader = DataLoader(ids, 2, num_workers=1, **FORKED)
        list(prepare_data_loader(loader, tail="pad", dispatch_batches=False))
    except CommError as error:
        return f"told: {error}"
    except RuntimeError as error:
        return f"raised: {error}"
    return "read it all"


def test_other_ranks_are_told_of_it() -> None:
    first, second = run_processes(2, outcome, timeout_s=20)
    assert first.startswith(
        "told: Another rank could not go on: rank 1 failed with RuntimeError"
    ), first
    assert second.startswith("raised: ")
