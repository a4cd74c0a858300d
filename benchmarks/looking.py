"""How soon the command line shows a plan, however large it is.

python -m benchmarks.looking [--json PATH]
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stdout
from statistics import median

from benchmarks.table import Row, at_most, fewer, seconds, show, to_know
from shardplug.cli import main

LARGE = ("--samples", str(10**12), "--batch-size", "32", "--world-size", "100000")
PLAN = ("plan", *LARGE, "--json")
INSTANT_MS = 100  # what people take for at once


def rows() -> list[Row]:
    """Measure everything."""
    told = io.StringIO()

    def plan() -> None:
        told.seek(0)
        told.truncate()
        with redirect_stdout(told):
            if main(PLAN):
                raise SystemExit("shardplug plan failed")

    plan()  # what it imports is not measured
    (leg,) = json.loads(told.getvalue())["legs"]
    steps = -(-(10**12) // (32 * 100_000))
    if leg["steps_per_rank"] != [{"first_rank": 0, "last_rank": 99_999, "steps": steps}]:
        raise SystemExit(f"shardplug plan tells of other steps than {steps}: {leg}")
    took_ms = 1e3 * median(seconds(plan) for _ in range(fewer(9)))
    command = [sys.executable, "-m", "shardplug.cli", *PLAN]
    whole_s = median(
        seconds(lambda: subprocess.run(command, check=True, capture_output=True))
        for _ in range(fewer(4))
    )
    what = "shardplug plan --json, n=1e12, 100000 ranks"
    return [
        at_most(what, took_ms, INSTANT_MS, unit="ms"),
        to_know("the same, from the shell, imports included", whole_s, unit="s"),
    ]


if __name__ == "__main__":
    show(rows)
