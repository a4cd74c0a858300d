"""The crash drill in short: a few kills, and what survives of the training.

    python -m benchmarks.crashes [--json PATH]

The whole drill is ``python -m benchmarks.crash_drill``.
"""

from __future__ import annotations

import math
import random
import tempfile
import time
from pathlib import Path

from benchmarks.crash_drill import KINDS, MOST_STEPS, Drill, run_undisturbed
from benchmarks.drill_account import account
from benchmarks.drill_training import STEPS_PER_EPOCH
from benchmarks.table import Row, at_most, fewer, show, to_know

KILLS, SEED = 6, 1


def rows() -> list[Row]:
    """Measure everything."""
    kills = max(2, fewer(KILLS))
    epochs = math.ceil(kills * 1.2 * MOST_STEPS / STEPS_PER_EPOCH) + 2
    chance = random.Random(SEED)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shardplug-drill-") as folder:
        drill = Drill(Path(folder) / "run", epochs=epochs, seed=SEED)
        try:
            for _ in range(kills):
                drill.strike(chance.choice(KINDS))
            drill.finish()
        finally:
            drill.stop()
        undisturbed = drill.folder.with_name("undisturbed")
        run_undisturbed(undisturbed, epochs=epochs)
        found = account(drill.folder, undisturbed, epochs=epochs)
    once, more, never = found.seen
    what = f"training killed {kills} times, {found.attempts} starts"
    return [
        at_most(
            f"{what}: of {once + more + never} samples, not seen once", more + never, 0, unit=""
        ),
        at_most(f"{what}: largest difference of a parameter", found.apart, 1e-5, unit=""),
        to_know("time of the drill", time.monotonic() - start, unit="s"),
    ]


if __name__ == "__main__":
    show(rows)
