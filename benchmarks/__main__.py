"""Run every benchmark, one after the other, and print one table.

python -m benchmarks [--json PATH]
"""

from __future__ import annotations

from benchmarks import dispatching, gathering, loading, optimizing, permutation, resuming
from benchmarks.table import Row, show


def rows() -> list[Row]:
    """Measure everything."""
    modules = (permutation, loading, optimizing, gathering, resuming, dispatching)
    return [row for module in modules for row in module.rows()]


if __name__ == "__main__":
    show(rows)
