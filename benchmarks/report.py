"""Write the figures that were kept into docs/benchmarks.md, README.md and its translation.

    python -m benchmarks.report [--results PATH]

Each page has a pair of marks, and what stands between them is written anew.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks import results
from benchmarks.results import KEPT, Measured, Results, ResultsError
from benchmarks.sections import SECTIONS, Goal, Section, section_of
from benchmarks.table import Row, cells

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
TRANSLATED = ROOT / "README.zh-CN.md"
BEGIN, END = "<!-- figures: python -m benchmarks.report -->", "<!-- end of figures -->"
CHOSEN = {
    "epoch of one rank of 1024, n=1e7": "one rank's indices, 1,024 ranks, `PermutedSampler`",
    "accelerate's batches, one rank of 64, n=1e7": "the same as accelerate's, 64 ranks",
    "loader / plain DataLoader, one rank of 64": "a loader / a plain `DataLoader`, 64 ranks",
    "prepare, load, first batch at 90 %: n=1e7, randperm, 1 rank": (
        "going on at 90 % of an epoch in torch's shuffle"
    ),
    "loop with state_dict() in each step / without": (
        "a loop that asks for the state in each step / one that does not"
    ),
    "images ready made, 4 ranks: step": "one reader sends 32 images to each of 4 ranks",
    "gather_for_metrics of 3 tensors, 4 ranks": "`gather_for_metrics`, 3 tensors, 4 ranks",
}
"""The rows for README.md by name, and what they are called there."""


class ReportError(ValueError):
    """A page has no place for figures, or there is no figure for a place."""


def page_of(found: Results) -> str:
    """Write all figures: the machine, each goal, and each row of each section."""
    aimed = [row for row in found.rows if row.target]
    lines = [
        *_about(found),
        "",
        f"**{len(aimed) - len(found.missed)} of {len(aimed)} targets are met.**",
        "",
        "### What was to be reached",
        "",
        "| to reach | figures that tell | met |",
        "| --- | --- | --- |",
    ]
    for section in SECTIONS:
        for goal, answer in answers(found, section):
            lines.append(f"| {goal.text} | {_tellers(section, goal)} | {answer} |")
    for measured in found.sections:
        lines += ["", f"### {section_of(measured.name).title}", "", *_table(measured.rows)]
        lines += ["", f"`python -m benchmarks.{measured.name}`, {_when(measured)}"]
    return "\n".join(lines)


def answers(found: Results, section: Section) -> Iterator[tuple[Goal, str]]:
    """Tell of each goal of a section whether it is met."""
    measured = found.section(section.name)
    rows = [row for row in measured.rows if row.target] if measured else []
    for goal in section.goals:
        yield goal, _answer(goal, [row for row in rows if goal.is_answered_by(row.what)])


def _tellers(section: Section, goal: Goal) -> str:
    """Name the rows that answer a goal by how they begin, and the section where they stand."""
    named = ", ".join(f"`{row} …`" for row in goal.rows if row)
    where = f"`{section.name}`"
    return f"{where}: {named}" if named and len(goal.rows) <= 3 else where


def _answer(goal: Goal, rows: Sequence[Row]) -> str:
    tests = ", ".join(f"`{test}`" for test in goal.tests)
    if not rows:
        return f"tested: {tests}" if tests else "not measured"
    missed = sum(not row.met for row in rows)
    if not missed:
        return "yes"
    return "**no**" if len(rows) == 1 else f"**no**: {missed} of {len(rows)} figures"


def _about(found: Results) -> list[str]:
    told = found.machine
    packages = ", ".join(f"{name} {release}" for name, release in told["packages"].items())
    dates = sorted({section.date[:10] for section in found.sections})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    memory = f", {told['memory_gb']} GB of memory" if told["memory_gb"] else ""
    return [
        f"Measured on {when}: {told['processor']}, {told['cores']} cores{memory}, "
        f"{told['system']}, Python {told['python']}; {packages}.",
    ]


def _when(measured: Measured) -> str:
    how = ", with fewer repeats" if measured.is_quick else ""
    return (
        f"{measured.date} UTC, {measured.took_s:.0f} s{how}; load of the machine before: "
        f"{measured.load:g}"
    )


def _table(rows: Iterable[Row]) -> list[str]:
    lines = [
        "| what | ours | peer | peer/ours | target | met |",
        "| --- | --: | --: | --: | --- | --- |",
    ]
    for row in rows:
        what, *rest, met = cells(row)
        said = f"{what}: {row.note}" if row.note else what
        lines.append(f"| {' | '.join((said, *rest, '**no**' if met == 'NO' else met))} |")
    return lines


def readme_of(found: Results) -> str:
    """Write the few figures for README.md.

    Raises:
        ReportError: If one of them was not measured.
    """
    by_name = {row.what: row for row in found.rows}
    lines = ["| | shardplug | peer | |", "| --- | --: | --: | --- |"]
    for what, called in CHOSEN.items():
        row = by_name.get(what)
        if row is None or row.peer is None:
            raise ReportError(f"There is no figure {what!r} for README.md.")
        ours, peer = (readable(value, row.unit) for value in (row.ours, row.peer))
        lines.append(f"| {called} | {ours} | {peer} | {row.name} |")
    return "\n".join(lines)


def translated(table: str, page: str, where: Path) -> str:
    """Put the figures of a table into the words that its translation has for them.

    Raises:
        ReportError: If that has other lines.
    """
    words = between(page, where)[1].strip().splitlines()
    rows = table.splitlines()
    if len(words) != len(rows):
        raise ReportError(
            f"{where} must have {len(rows)} lines of figures, got {len(words)}. Translate their "
            "first cells."
        )
    told = [
        " | ".join([said.split(" | ")[0], *row.split(" | ")[1:]])
        for said, row in zip(words[2:], rows[2:], strict=True)
    ]
    return "\n".join([*words[:2], *told])


def readable(value: float | None, unit: str) -> str:
    """Write a figure to two digits, in a unit that suits it.

    Example:
        >>> readable(0.00123, "s"), readable(2951.0, "us"), readable(2.04, "")
        ('1.2 ms', '3 ms', '2 ×')
    """
    if value is None:
        return ""
    units = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
    if unit in units:
        taken_s = value * units[unit]
        unit = next((name for name, size in units.items() if taken_s >= size), "us")
        value = taken_s / units[unit]
    return f"{float(f'{value:.2g}'):g} {unit.replace('us', 'µs') or '×'}"


def between(page: str, where: Path) -> tuple[str, str, str]:
    """Part a page into what stands before its marks, between them, and behind.

    Raises:
        ReportError: If the page has not one pair of marks.
    """
    before, _, rest = page.partition(BEGIN)
    inside, _, after = rest.partition(END)
    if page.count(BEGIN) != 1 or page.count(END) != 1 or END in before:
        raise ReportError(f"{where} must have one line {BEGIN!r}, and {END!r} below it.")
    return before, inside, after


def put(text: str, page: str, where: Path) -> str:
    """Put text between the marks of a page.

    Raises:
        ReportError: If the page has not one pair of marks.
    """
    before, _, after = between(page, where)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def renewed(found: Results, path: Path) -> str:
    """Read a page, with the figures that it is to show.

    Raises:
        ReportError: If it has no place for them, or there are too few.
    """
    page = path.read_text(encoding="utf-8")
    if path == PAGE:
        return put(page_of(found), page, path)
    table = readme_of(found)
    return put(table if path == README else translated(table, page, path), page, path)


def write(found: Results) -> None:
    """Write the figures into all pages, or into none."""
    pages = {path: renewed(found, path) for path in (PAGE, README, TRANSLATED)}
    for path, page in pages.items():
        path.write_text(page, encoding="utf-8")


def main(words: Sequence[str] | None = None) -> int:
    """Be the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report")
    parser.add_argument("--results", type=Path, metavar="PATH", default=KEPT)
    arguments = parser.parse_args(words)
    try:
        write(results.load(arguments.results))
    except (ResultsError, ReportError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{PAGE}\n{README}\n{TRANSLATED}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
