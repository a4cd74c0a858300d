"""A shard, and where it comes from."""

from __future__ import annotations

from itertools import product

import pytest

from shardplug.errors import PlanError
from shardplug.plan.shard import DATA_AXES, MODEL_AXES, Shard, shard_on_mesh


@pytest.mark.parametrize(
    ("index", "count", "message"),
    [
        (0, 0, "`num_processes` must be at least 1, got 0."),
        (0, -2, "`num_processes` must be at least 1, got -2."),
        (4, 4, "`process_index` must be in [0, 4), got 4."),
        (-1, 2, "`process_index` must be in [0, 2), got -1."),
    ],
)
def test_a_shard_checks_its_numbers(index: int, count: int, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Shard(index, count)
    assert str(caught.value) == message


# By rank of a mesh laid out in row-major order: the shard's index, and how many shards.
MESHES = {
    (("dp", "tp"), (2, 2)): ([0, 0, 1, 1], 2),
    (("tp", "dp"), (2, 2)): ([0, 1, 0, 1], 2),
    (("dp",), (3,)): ([0, 1, 2], 3),
    (("tp",), (3,)): ([0, 0, 0], 1),
    (("pp", "dp", "tp"), (2, 2, 2)): ([0, 0, 1, 1, 0, 0, 1, 1], 2),
    (("dp", "pp", "tp"), (2, 2, 2)): ([0, 0, 0, 0, 1, 1, 1, 1], 2),
    (("dp_replicate", "dp_shard"), (2, 3)): ([0, 1, 2, 3, 4, 5], 6),
    (("dp_replicate", "tp", "dp_shard"), (2, 2, 2)): ([0, 1, 0, 1, 2, 3, 2, 3], 4),
    (("replicate", "shard"), (1, 2)): ([0, 1], 2),
    (("fsdp", "cp"), (2, 2)): ([0, 0, 1, 1], 2),
    (("data", "model"), (2, 1)): ([0, 1], 2),
    (("data_parallel", "tensor_parallel"), (2, 2)): ([0, 0, 1, 1], 2),
}


@pytest.mark.parametrize(("mesh", "expected"), MESHES.items())
def test_ranks_that_differ_in_model_axes_only_share_a_shard(
    mesh: tuple[tuple[str, ...], tuple[int, ...]], expected: tuple[list[int], int]
) -> None:
    axes, sizes = mesh
    shards = [
        shard_on_mesh(axes, sizes, coordinate=place)
        for place in product(*(range(size) for size in sizes))
    ]
    indices, count = expected
    assert shards == [Shard(index, count) for index in indices]


def test_the_tables_of_axes_hold_every_name_that_is_promised() -> None:
    assert {
        "dp", "fsdp", "dp_replicate", "dp_shard", "data", "data_parallel", "replicate", "shard",
    } == DATA_AXES  # fmt: skip
    assert {"tp", "cp", "sp", "pp", "model", "tensor_parallel"} <= MODEL_AXES
    assert not DATA_AXES & MODEL_AXES


def test_data_axes_name_what_divides_the_data_whatever_the_tables_say() -> None:
    def shards(*data_axes: str) -> list[Shard]:
        return [
            shard_on_mesh(("rows", "tp"), (2, 2), coordinate=place, data_axes=data_axes)
            for place in product(range(2), range(2))
        ]

    assert shards("rows") == [Shard(0, 2), Shard(0, 2), Shard(1, 2), Shard(1, 2)]
    assert shards("tp") == [Shard(0, 2), Shard(1, 2), Shard(0, 2), Shard(1, 2)]
    # The first axis of the mesh is the most significant, however they are named.
    assert shards("tp", "rows") == [Shard(index, 4) for index in range(4)]
    assert shards() == [Shard(0, 1)] * 4


def test_an_axis_in_neither_table_is_an_error_that_asks_for_data_axes() -> None:
    with pytest.raises(PlanError) as caught:
        shard_on_mesh(("dp", "ep"), (2, 2), coordinate=(0, 0))
    assert str(caught.value) == (
        "`torch_device_mesh` must have axes known as data or model axes, got 'ep' in "
        "('dp', 'ep'). Name those that divide the data with data_axes=(...)."
    )
    assert shard_on_mesh(("dp", "ep"), (2, 2), coordinate=(1, 0), data_axes=("dp",)) == Shard(1, 2)


def test_data_axes_must_be_there() -> None:
    with pytest.raises(PlanError) as caught:
        shard_on_mesh(("dp", "tp"), (2, 2), coordinate=(0, 0), data_axes=("dp", "fsdp"))
    assert str(caught.value) == ("`data_axes` must name axes of the mesh ('dp', 'tp'), got 'fsdp'.")
