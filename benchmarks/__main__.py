"""Run every benchmark, one after the other, and print one table.

    python -m benchmarks [NAME ...] [--quick] [--check] [--json PATH]

Each runs in a process of its own: what one leaves in torch, or in a peer's singletons, does not
reach the next, and one that fails is a line of the table instead of its end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from benchmarks import machine, results
from benchmarks.results import Measured, Results, ResultsError
from benchmarks.sections import SECTIONS, Section, section_of, unanswered
from benchmarks.table import QUICK, lines_of, without_figure

ROOT = Path(__file__).parents[1]
WRITTEN = ROOT / "build" / "benchmarks.json"
Measure = Callable[[Section, bool], Measured]


def measure(section: Section, is_quick: bool) -> Measured:
    """Run one benchmark in a process of its own."""
    command = [sys.executable, "-m", f"benchmarks.{section.name}"]
    environment = {**os.environ, **({QUICK: "1"} if is_quick else {})}
    load, start = machine.load(), time.monotonic()
    told = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        done = run([*command, "--json", str(path)], environment, section.limit_s)
        if path.exists():
            told = json.loads(path.read_text(encoding="utf-8"))
    rows = tuple(map(results.row_of, told.pop("rows", ())))
    told.pop("machine", None)
    if done:
        rows += (without_figure(f"benchmarks.{section.name}", done),)
    rows += tuple(
        without_figure(goal.text, "No row answers it.")
        for goal in unanswered(section, [row.what for row in rows])
        if not done
    )
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")
    took_s = round(time.monotonic() - start, 1)
    return Measured(section.name, now, took_s, load, is_quick, rows, told)


def run(command: Sequence[str], environment: dict[str, str], limit_s: float) -> str:
    """Run a command to its end; returns what went wrong in one line, or nothing."""
    with tempfile.TemporaryFile() as said:
        # A session of its own, so that its ranks can be ended with it.
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )
        try:
            status = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"It was given up after {limit_s:g} s."
        finally:
            end(child)
        said.seek(0)
        return reason(said.read().decode(errors="replace"), status) if status else ""


def end(child: subprocess.Popen[bytes]) -> None:
    """End a process and those that it has left behind."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(child.pid, signal.SIGKILL)
    else:
        child.kill()
    child.wait()


def reason(said: str, status: int) -> str:
    """Find the line that tells why a program failed in what it said."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line.partition(" ")[0] + " "]
    return (errors or lines or [f"It ended with status {status}."])[-1]


def run_all(
    chosen: Sequence[Section],
    path: Path,
    begun: Results,
    *,
    is_quick: bool,
    measure: Measure = measure,
) -> Results:
    """Measure some sections, say how far it is, and write the file after each."""
    for place, section in enumerate(chosen, 1):
        print(f"[{place}/{len(chosen)}] {section.title} ...", end=" ", flush=True)
        measured = measure(section, is_quick)
        begun = begun.with_section(measured)
        results.save(begun, path)
        missed = sum(not row.met for row in measured.rows)
        print(f"{measured.took_s:.0f} s" + (f", {missed} missed" if missed else ""), flush=True)
    return begun


def print_results(found: Results) -> None:
    """Print the rows of every section under its title, then how many there are."""
    for section in found.sections:
        how = ", fewer repeats" if section.is_quick else ""
        print(f"\n{section_of(section.name).title} ({section.date} UTC{how})")
        for line in lines_of(section.rows):
            print(f"  {line}")
    aimed = sum(bool(row.target) for row in found.rows)
    print(f"\n{aimed - len(found.missed)} of {aimed} targets met")
    for row in found.missed:
        print(f"  missed: {row.what}")


def arguments_of(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"measure these, and keep the others' figures: {', '.join(names)}",
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="measure this one, too"
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats, rougher figures")
    parser.add_argument(
        "--check", action="store_true", help="end with status 1 if a target is missed"
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", default=WRITTEN, help=f"write there, not to {WRITTEN}"
    )
    arguments = parser.parse_args(words)
    arguments.names += arguments.only
    for name in arguments.names:
        if name not in names:
            parser.error(f"there is no benchmark {name!r}; there are {', '.join(names)}")
    return arguments


def main(words: Sequence[str] | None = None, measure: Measure = measure) -> int:
    """Be the command; returns its exit status."""
    arguments = arguments_of(words)
    only: list[str] = arguments.names
    chosen = [section for section in SECTIONS if not only or section.name in only]
    try:
        begun = results.begin(arguments.json, dict(machine.describe()), anew=not only)
    except ResultsError as error:
        print(error, file=sys.stderr)
        return 2
    is_quick: bool = arguments.quick
    found = run_all(chosen, arguments.json, begun, is_quick=is_quick, measure=measure)
    print_results(found)
    print(f"Written to {arguments.json}")
    return 1 if arguments.check and found.missed else 0


if __name__ == "__main__":
    sys.exit(main())
