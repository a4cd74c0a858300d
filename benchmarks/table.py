"""Figures of the benchmarks: measured in turns, printed as a table, written as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, and whether it is what it should be.

    Attributes:
        what: What was measured.
        ours: Our figure.
        peer: The peer's, in the same unit; None if there is none to compare with.
        unit: Unit of both.
        target: The rule that ``ours`` is to keep, in words.
        met: Whether it does.
        name: Who the peer is.
    """

    what: str
    ours: float
    peer: float | None
    unit: str
    target: str
    met: bool
    name: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times the peer's figure is ours."""
        return None if self.peer is None or not self.ours else self.peer / self.ours


def at_least(
    what: str, ours: float, peer: float, *, times: float, unit: str = "s", name: str = ""
) -> Row:
    """Make a row whose target is a ratio: the peer takes ``times`` as much, or more."""
    met = peer >= times * ours
    return Row(what, ours, peer, unit, f"peer/ours ≥ {times:g}", met, name)


def at_most(
    what: str, ours: float, limit: float, *, unit: str, peer: float | None = None, name: str = ""
) -> Row:
    """Make a row whose target is a limit, in the unit of the figure."""
    return Row(what, ours, peer, unit, f"≤ {limit:g} {unit}".rstrip(), ours <= limit, name)


def seconds(run: Callable[[], object]) -> float:
    """Time one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def median_interleaved(
    ours: Callable[[], object], peer: Callable[[], object], repeats: int = 5
) -> tuple[float, float]:
    """Time two runs in turns, so that other load on the machine strikes both.

    Returns:
        The median of each, in seconds.
    """
    ours_s, peer_s = [], []
    for repeat in range(repeats):
        if repeat % 2:
            peer_s.append(seconds(peer))
            ours_s.append(seconds(ours))
        else:
            ours_s.append(seconds(ours))
            peer_s.append(seconds(peer))
    return median(ours_s), median(peer_s)


def print_table(rows: Iterable[Row]) -> None:
    """Print one line for each row, in columns."""
    head = ("what", "ours", "peer", "peer/ours", "target", "met")
    lines = [head, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        what, *rest, target, met = (
            cell.ljust(width) if at in (0, 4) else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join((what, *rest, target, met)))


def as_json(rows: Iterable[Row]) -> str:
    """Write rows, and the machine they are from, as JSON."""
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    return json.dumps(
        {"machine": machine, "rows": [asdict(row) | {"ratio": row.ratio} for row in rows]}
    )


def write_json(rows: Iterable[Row], path: str | Path) -> None:
    """Write rows, and the machine they are from, to a JSON file."""
    Path(path).write_text(as_json(rows) + "\n", encoding="utf-8")


def show(measure: Callable[[], Sequence[Row]]) -> None:
    """Be the command line of one benchmark: measure, print a table, then JSON or a file of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, metavar="PATH", help="write JSON there")
    arguments = parser.parse_args()
    rows = measure()
    print_table(rows)
    if arguments.json is None:
        print(as_json(rows))
    else:
        write_json(rows, arguments.json)


def _cells(row: Row) -> tuple[str, ...]:
    def figure(value: float | None) -> str:
        return "" if value is None else f"{value:.3g} {row.unit}".rstrip()

    ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
    peer = f"{figure(row.peer)} {row.name}".strip()
    return row.what, figure(row.ours), peer, ratio, row.target, "yes" if row.met else "NO"
