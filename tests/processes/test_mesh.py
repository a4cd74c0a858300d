"""Device meshes of real ranks: who differs in model axes only reads the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from shardplug import Comm, PlanError, ShardEngine, prepare_data_loader
from tests.launch import run_processes

Batches = list[list[int]]

FIRST, SECOND = [[0, 1], [4, 5]], [[2, 3], [6, 7]]
QUARTERS = [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
ALL = [[0, 1], [2, 3], [4, 5], [6, 7]]

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...], Any, list[Batches]]] = {
    "data, then model": ((2, 2), ("dp", "tp"), None, [FIRST, FIRST, SECOND, SECOND]),
    "model, then data": ((2, 2), ("tp", "dp"), None, [FIRST, SECOND, FIRST, SECOND]),
    "pipeline in front": ((2, 2, 1), ("pp", "dp", "tp"), None, [FIRST, SECOND, FIRST, SECOND]),
    "pipeline inside": ((2, 1, 2), ("dp", "pp", "tp"), None, [FIRST, FIRST, SECOND, SECOND]),
    "fsdp and context": ((2, 2), ("fsdp", "cp"), None, [FIRST, FIRST, SECOND, SECOND]),
    "hybrid": ((2, 2), ("dp_replicate", "dp_shard"), None, QUARTERS),
    "hybrid and model": ((1, 2, 2), ("dp_replicate", "dp_shard", "tp"), None,
                         [FIRST, FIRST, SECOND, SECOND]),
    "data only": ((4,), ("data_parallel",), None, QUARTERS),
    "model only": ((4,), ("tp",), None, [ALL] * 4),
    "names of one's own": ((2, 2), ("rows", "cols"), ("rows",), [FIRST, FIRST, SECOND, SECOND]),
    "names that say otherwise": ((2, 2), ("dp", "tp"), ("tp",), [FIRST, SECOND, FIRST, SECOND]),
}  # fmt: skip


def loader_over(n: int = 8, **options: Any) -> DataLoader[Any]:
    samples: Any = torch.arange(n)
    return DataLoader(samples, batch_size=2, **options)


def read(comm: Comm, meshes: list[Any]) -> list[Any]:
    """What this rank gets on each mesh, prepared by function and by engine, and its shard."""
    seen = []
    for shape, names, data_axes in meshes:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        options: dict[str, Any] = {"torch_device_mesh": mesh, "data_axes": data_axes}
        loader = prepare_data_loader(loader_over(), **options)
        engine = ShardEngine(**options)
        by_engine = engine.prepare(loader_over())
        assert (loader.is_simulation, loader.shard) == (False, engine.shard)
        batches = [batch.tolist() for batch in loader]
        assert [batch.tolist() for batch in by_engine] == batches
        seen.append(batches)
    return seen


def test_ranks_that_differ_in_model_axes_only_read_the_same() -> None:
    meshes = [(shape, names, data_axes) for shape, names, data_axes, _ in MESHES.values()]
    by_rank = run_processes(4, read, meshes)
    for number, (name, (*_, expected)) in enumerate(MESHES.items()):
        assert [seen[number] for seen in by_rank] == expected, name


def shuffle(comm: Comm) -> Any:
    torch.manual_seed(comm.rank)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    loader = prepare_data_loader(
        loader_over(10, shuffle=True), torch_device_mesh=mesh, use_seedable_sampler=True
    )
    return [([batch.tolist(), loader.valid_rows]) for _ in range(2) for batch in loader]


def test_shuffled_they_do_as_well() -> None:
    by_rank = run_processes(4, shuffle)
    assert by_rank[0] == by_rank[2]
    assert by_rank[1] == by_rank[3]
    for epoch in range(2):
        order = torch.randperm(10, generator=torch.Generator().manual_seed(epoch)).tolist()
        for index, rank in enumerate(by_rank[:2]):
            start = 2 * index
            padded = order + order
            expected = [padded[at + start : at + start + 2] for at in (0, 4, 8)]
            valid = [2, 2, 2 if index == 0 else 0]
            assert rank[3 * epoch : 3 * epoch + 3] == [
                [batch, rows] for batch, rows in zip(expected, valid, strict=True)
            ]


def refuse(comm: Comm) -> list[str]:
    messages = []
    for names, data_axes in (
        (("rows", "tp"), None),
        (("dp", "tp"), ("fsdp",)),
        (None, None),
    ):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        with pytest.raises(PlanError) as caught:
            prepare_data_loader(loader_over(), torch_device_mesh=mesh, data_axes=data_axes)
        messages.append(str(caught.value))
    return messages


def test_axes_that_say_nothing_are_refused_on_every_rank() -> None:
    messages = [
        "`torch_device_mesh` must have axes known as data or model axes, got 'rows' in "
        "('rows', 'tp'). Name those that divide the data with data_axes=(...).",
        "`data_axes` must name axes of the mesh ('dp', 'tp'), got 'fsdp'.",
        "`torch_device_mesh` must have named axes, got one of shape (2, 2) without names. Give "
        "init_device_mesh their names, mesh_dim_names=(...).",
    ]
    assert run_processes(4, refuse) == [messages] * 4
