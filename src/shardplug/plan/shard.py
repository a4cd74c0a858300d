"""One part of the data, and where it comes from: a rank's coordinate on the data axes of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardplug.errors import PlanError
from shardplug.kinds import check_integer

DATA_AXES = frozenset(
    {
        "dp",
        "fsdp",
        "dp_replicate",
        "dp_shard",
        "data",
        "data_parallel",
        "replicate",
        "shard",
    }
)
MODEL_AXES = frozenset(
    {
        "tp",
        "cp",
        "sp",
        "pp",
        "model",
        "tensor",
        "sequence",
        "context",
        "pipeline",
        "tensor_parallel",
        "context_parallel",
        "sequence_parallel",
        "pipeline_parallel",
        "model_parallel",
    }
)


@dataclass(frozen=True, slots=True)
class Shard:
    """One part of the data, of ``count`` parts; ranks that differ in model axes only share it.

    Attributes:
        index: Which part, in [0, count).
        count: How many parts there are, at least 1.

    Example:
        >>> Shard(1, 4)
        Shard(index=1, count=4)
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        """Check both numbers, and take numpy's for Python's."""
        for name, field in (("process_index", "index"), ("num_processes", "count")):
            object.__setattr__(self, field, check_integer(name, getattr(self, field)))
        if self.count < 1:
            raise PlanError(f"`num_processes` must be at least 1, got {self.count}.")
        if not 0 <= self.index < self.count:
            raise PlanError(f"`process_index` must be in [0, {self.count}), got {self.index}.")

    def all(self) -> list[Shard]:
        """List all parts that the data has."""
        return [Shard(index, self.count) for index in range(self.count)]


def shard_on_mesh(
    axes: Sequence[str],
    sizes: Sequence[int],
    *,
    coordinate: Sequence[int],
    data_axes: Sequence[str] | None = None,
) -> Shard:
    """Find the part of the data that the rank at ``coordinate`` of a device mesh reads.

    Ranks that differ only on model axes (tensor, context, pipeline, ...) get the same part. The
    coordinate is read axis by axis, so the order of the axes does not matter to who is paired
    with whom; among the data axes the first is the most significant.

    Args:
        axes: Names of the mesh's axes.
        sizes: Ranks along each axis.
        coordinate: This rank's place on each axis.
        data_axes: The axes that divide the data. None: the axes known as data axes.

    Returns:
        The part, of as many as the data axes have places.

    Raises:
        PlanError: If an axis is unknown, or ``data_axes`` names one that is not there.

    Example:
        >>> shard_on_mesh(("tp", "dp"), (2, 2), coordinate=(1, 0))
        Shard(index=0, count=2)
    """
    chosen = _data_axes_of(axes, data_axes)
    index, count = 0, 1
    for axis, size, place in zip(axes, sizes, coordinate, strict=True):
        if axis in chosen:
            index, count = index * size + place, count * size
    return Shard(index, count)


def _data_axes_of(axes: Sequence[str], data_axes: Sequence[str] | None) -> frozenset[str]:
    if data_axes is not None:
        missing = [axis for axis in data_axes if axis not in axes]
        if missing:
            raise PlanError(
                f"`data_axes` must name axes of the mesh {tuple(axes)}, got {missing[0]!r}."
            )
        return frozenset(data_axes)
    unknown = [axis for axis in axes if axis not in DATA_AXES and axis not in MODEL_AXES]
    if unknown:
        raise PlanError(
            f"`torch_device_mesh` must have axes known as data or model axes, got {unknown[0]!r} "
            f"in {tuple(axes)}. Name those that divide the data with data_axes=(...)."
        )
    return frozenset(axes) & DATA_AXES
