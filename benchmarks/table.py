"""Figures of the benchmarks: measured in turns, printed as a table, written as JSON."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import describe

QUICK = "SHARDPLUG_BENCHMARKS_QUICK"
"""Set in the environment, where children find it too, it asks for fewer repeats."""
HEAD = ("what", "ours", "peer", "peer/ours", "target", "met")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, and whether it is what it should be.

    Attributes:
        what: What was measured.
        ours: Our figure; None if there is none, see ``note``.
        peer: The peer's, in the same unit; None if there is none to compare with.
        unit: Unit of both.
        target: The rule that ``ours`` is to keep, in words; empty if it is there to be known.
        met: Whether it does.
        name: Who the peer is.
        note: What else there is to say, such as why there is no figure.
    """

    what: str
    ours: float | None
    peer: float | None
    unit: str
    target: str
    met: bool
    name: str = ""
    note: str = ""

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


def to_know(what: str, ours: float, *, unit: str) -> Row:
    """Make a row without a target."""
    return Row(what, ours, None, unit, "", met=True)


def without_figure(what: str, note: str) -> Row:
    """Make a row for what could not be measured; it counts as missed."""
    return Row(what, None, None, "", "a figure", met=False, note=note)


def seconds(run: Callable[[], object]) -> float:
    """Time one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def is_quick() -> bool:
    """Tell whether a rough figure, soon, is asked for."""
    return bool(os.environ.get(QUICK))


def fewer(repeats: int) -> int:
    """Tell how often to repeat what is repeated so often when there is time."""
    return max(1, repeats // 4) if is_quick() else repeats


def median_interleaved(
    ours: Callable[[], object], peer: Callable[[], object], repeats: int = 5
) -> tuple[float, float]:
    """Time two runs in turns, so that other load on the machine strikes both.

    Returns:
        The median of each, in seconds.
    """
    ours_s, peer_s = [], []
    for repeat in range(fewer(repeats)):
        if repeat % 2:
            peer_s.append(seconds(peer))
            ours_s.append(seconds(ours))
        else:
            ours_s.append(seconds(ours))
            peer_s.append(seconds(peer))
    return median(ours_s), median(peer_s)


def print_table(rows: Iterable[Row]) -> None:
    """Print one line for each row, in columns."""
    for line in lines_of(rows):
        print(line)


def lines_of(rows: Iterable[Row]) -> list[str]:
    """Write one line for each row, in columns, below a line of their names."""
    rows = list(rows)
    table = [HEAD, *(cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    is_left = (True, False, False, False, True, False)
    written = []
    for at, line in enumerate(table):
        padded = [
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(line, widths, is_left, strict=True)
        ]
        written.append("  ".join(padded).rstrip())
        if at and rows[at - 1].note:
            written.append(f"    {rows[at - 1].note}")
    return written


def cells(row: Row) -> tuple[str, ...]:
    """Write a row in words, one for each column."""
    ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
    peer = f"{figure(row.peer, row.unit)} {row.name}".strip() if row.peer is not None else ""
    met = "" if not row.target else "yes" if row.met else "NO"
    return row.what, figure(row.ours, row.unit), peer, ratio, row.target, met


def figure(value: float | None, unit: str) -> str:
    """Write a figure to three digits, and thousands without an exponent."""
    if value is None:
        return ""
    short = f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
    return f"{short} {unit}".rstrip()


def as_json(rows: Iterable[Row], **more: Any) -> str:
    """Write rows, the machine that they are from, and what else is given, as JSON."""
    told = [asdict(row) | {"ratio": row.ratio} for row in rows]
    return json.dumps({"machine": describe(), "rows": told, **more})


def write_json(rows: Iterable[Row], path: str | Path, **more: Any) -> None:
    """Write rows, the machine that they are from, and what else is given, to a JSON file."""
    Path(path).write_text(as_json(rows, **more) + "\n", encoding="utf-8")


def show(
    measure: Callable[[], Sequence[Row]],
    more: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Be the command line of one benchmark: measure, print a table, then JSON or a file of it.

    Args:
        measure: Makes the rows.
        more: Tells, after that, what else is to stand in the JSON.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, metavar="PATH", help="write JSON there")
    arguments = parser.parse_args()
    rows = measure()
    print_table(rows)
    if arguments.json is None:
        print(as_json(rows, **more()))
    else:
        write_json(rows, arguments.json, **more())
