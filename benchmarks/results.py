"""The figures of all benchmarks in one file, to which one section's can be added anew."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from benchmarks.sections import SECTIONS
from benchmarks.table import Row

KEPT = Path(__file__).with_name("figures.json")
"""The figures that the documentation shows."""


class ResultsError(ValueError):
    """A file of results is not what it should be."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one section came to.

    Attributes:
        name: That of the section.
        date: When it was measured, in UTC.
        took_s: How long it took.
        load: How many processes wanted to run just before.
        is_quick: Whether with fewer repeats.
        rows: The figures.
        more: What else it tells, for pictures.
    """

    name: str
    date: str
    took_s: float
    load: float
    is_quick: bool
    rows: tuple[Row, ...]
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Results:
    """All figures, and the machine that they are from."""

    machine: dict[str, Any]
    sections: tuple[Measured, ...]

    def with_section(self, measured: Measured) -> Results:
        """Put a section in its place, instead of an older one of its name."""
        kept = [section for section in self.sections if section.name != measured.name]
        order = [section.name for section in SECTIONS]
        together = sorted([*kept, measured], key=lambda section: order.index(section.name))
        return Results(self.machine, tuple(together))

    def section(self, name: str) -> Measured | None:
        """Find a section; None if it was not measured."""
        return next((section for section in self.sections if section.name == name), None)

    @property
    def rows(self) -> list[Row]:
        """The figures of all sections."""
        return [row for section in self.sections for row in section.rows]

    @property
    def missed(self) -> list[Row]:
        """The figures that are not what they should be."""
        return [row for row in self.rows if not row.met]


def save(results: Results, path: Path) -> None:
    """Write results to a file, and make its folder where it is missing."""
    told = {
        "machine": results.machine,
        "sections": [
            asdict(section) | {"rows": [asdict(row) | {"ratio": row.ratio} for row in section.rows]}
            for section in results.sections
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(told, indent=1, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def load(path: Path) -> Results:
    """Read results from a file.

    Raises:
        ResultsError: If it is no file of results.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        sections = tuple(
            Measured(**section | {"rows": tuple(map(row_of, section["rows"]))})
            for section in told["sections"]
        )
        return Results(told["machine"], sections)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ResultsError(f"{path} is no file of results: {error!r}") from error


def begin(path: Path, machine: dict[str, Any], *, anew: bool) -> Results:
    """Return what a file holds already, to add sections to, or nothing yet.

    Args:
        path: The file; it may be missing.
        machine: What is measured on now.
        anew: Whether to leave aside what there is.

    Raises:
        ResultsError: If it is from another machine, or other releases.
    """
    if anew or not path.exists():
        return Results(machine, ())
    results = load(path)
    if results.machine != machine:
        differ = sorted(key for key in machine if results.machine.get(key) != machine[key])
        raise ResultsError(
            f"{path} is from another machine or other releases ({', '.join(differ)} differ). "
            "Measure everything anew, or pass another --json."
        )
    return results


def row_of(told: dict[str, Any]) -> Row:
    """Read a row as it is written to JSON."""
    return Row(**{each.name: told[each.name] for each in fields(Row) if each.name in told})
