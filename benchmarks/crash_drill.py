"""Kill a training at random, again and again, and see whether it ends as if nothing had happened.

    python -m benchmarks.crash_drill [--kills 50] [--seed 0]

Under torchrun with ``--max-restarts`` a training is killed with SIGKILL: one rank, or the agent and
the ranks that it leaves behind, or rank 0 while it writes a checkpoint. torchrun starts the ranks
again; where it has gone itself, another one is started, on a random number of ranks. Now and then
the newest checkpoint is torn as well, as if the power had failed. At the end every sample of every
epoch has to be seen once, in the steps of an undisturbed run, and the parameters to be the same.

Needs /proc, that is, Linux.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.drill_account import (
    Account,
    Attempt,
    DrillError,
    account,
    check,
    list_attempts,
    read_attempt,
    show,
)
from benchmarks.drill_training import SAVE_EVERY, STEPS_PER_EPOCH, checkpoints_of

ROOT = Path(__file__).parents[1]
PROGRAM = ("-m", "benchmarks.drill_training")
WORLDS = (1, 2, 3, 4)
KINDS = ("rank", "agent", "writing")
MOST_STEPS = 3 * SAVE_EVERY  # that an attempt is left to take, at least
PATIENCE_S = 120.0  # with a start, or a step
POLL_S = 0.002
TIMEOUT_S = 30  # of a collective
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


class Drill:
    """One training, and who disturbs it.

    Args:
        folder: Where the run keeps all it writes; made here.
        epochs: How far it trains.
        seed: Of the disturbances.
        worlds: The numbers of ranks to choose from at each start of torchrun.

    Attributes:
        struck: How often each kind of kill was made.
        num_parts: How many kills while writing left a part of a checkpoint.
        num_torn: How many checkpoints were torn besides.
        num_launches: How often torchrun was started.
    """

    def __init__(
        self, folder: Path, *, epochs: int, seed: int, worlds: Sequence[int] = WORLDS
    ) -> None:
        self.folder, self.epochs, self.worlds = folder, epochs, worlds
        self.struck: Counter[str] = Counter()
        self.num_parts = self.num_torn = self.num_launches = 0
        self._random = random.Random(seed)
        self._agent: subprocess.Popen[bytes] | None = None
        self._num_handled = 0
        folder.mkdir(parents=True)

    def strike(self, kind: str) -> None:
        """Let the training begin, leave it a random number of steps, and kill part of it.

        Args:
            kind: "rank", a random one; "agent", with all ranks; "writing", rank 0 as it saves.
        """
        place, attempt = self._next_attempt()
        step = attempt.start + self._random.randint(1, MOST_STEPS)
        self._wait(lambda: _is_at(place, step), f"step {step} in attempt {place.name}")
        if kind == "writing":
            self._kill_while_writing(attempt.pids[0])
        elif kind == "rank":
            self._kill(self._random.choice(attempt.pids))
        else:
            self._kill_all()
            if self._random.random() < 0.5:
                self.num_torn += _tear_newest(checkpoints_of(self.folder), self._random)
        self.struck[kind] += 1

    def finish(self) -> None:
        """Let the training end."""

        def is_finished() -> bool:
            if self._agent is not None and self._agent.poll() == 0:
                return True
            self._keep_running()
            return False

        self._wait(is_finished, "the end of the training")

    def stop(self) -> None:
        """End what still runs."""
        if self._agent is not None:
            self._kill_all()

    def count_in_logs(self, told: str) -> int:
        """Count the starts of torchrun whose ranks told something."""
        return sum(told in log.read_text("utf-8") for log in self.folder.glob("torchrun-*.log"))

    # -- what runs -----------------------------------------------------------------------------

    def _next_attempt(self) -> tuple[Path, Attempt]:
        """Wait until the training has begun after what struck it last."""
        found: list[tuple[Path, Attempt]] = []

        def has_begun() -> bool:
            self._keep_running()
            places = list_attempts(self.folder)
            attempt = read_attempt(places[-1]) if len(places) > self._num_handled else None
            if attempt is not None:
                self._num_handled = len(places)
                found.append((places[-1], attempt))
            return bool(found)

        self._wait(has_begun, "the ranks to begin")
        return found[0]

    def _keep_running(self) -> None:
        """Start torchrun, unless it runs."""
        if self._agent is not None and self._agent.poll() == 0:
            kills = self.struck.total()
            raise DrillError(f"The training has ended after {kills} kills: it needs more epochs.")
        if self._agent is None or self._agent.poll() is not None:
            self.num_launches += 1
            ranks = f"--nproc-per-node={self._random.choice(self.worlds)}"
            launcher = ("-m", "torch.distributed.run", "--standalone", "--max-restarts=2", ranks)
            with self._log.open("wb") as log:
                self._agent = subprocess.Popen(
                    [
                        *(sys.executable, *launcher, "--monitor-interval=0.05", *PROGRAM),
                        *(str(self.folder), f"--epochs={self.epochs}", f"--timeout-s={TIMEOUT_S}"),
                    ],
                    cwd=ROOT,
                    env={**os.environ, **ENVIRONMENT},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )

    @property
    def _log(self) -> Path:
        return self.folder / f"torchrun-{self.num_launches:03d}.log"

    def _wait(self, is_there: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_there():
            if time.monotonic() > deadline:
                told = self._log.read_text(encoding="utf-8")[-3000:]
                raise DrillError(f"Waited {PATIENCE_S:.0f} s for {what}.\n{told}")
            time.sleep(POLL_S)

    # -- who disturbs it -----------------------------------------------------------------------

    def _kill_while_writing(self, pid: int) -> None:
        """Kill a rank as soon as it has begun to write a checkpoint."""
        part = checkpoints_of(self.folder) / f"{pid}.part"
        self._wait(part.exists, "a checkpoint to be written")
        self._kill(pid)
        self.num_parts += part.exists()

    def _kill_all(self) -> None:
        """Kill the agent, and the ranks that it leaves behind, as a host that fails does."""
        assert self._agent is not None
        self._agent.kill()
        self._agent.wait()
        self._agent = None
        for place in Path("/proc").glob("[0-9]*"):
            self._kill(int(place.name))

    def _kill(self, pid: int) -> None:
        """Kill a process of this run, and wait until it is dead; one that is gone is left alone."""
        if str(self.folder) in _command(pid):
            os.kill(pid, signal.SIGKILL)
            self._wait(lambda: not _command(pid), f"process {pid} to die")


def _command(pid: int) -> str:
    """Read the command line of a process; dead ones have none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _is_at(place: Path, step: int) -> bool:
    attempt = read_attempt(place)
    return attempt is not None and attempt.start + len(attempt.steps) >= step


def _tear_newest(folder: Path, chance: random.Random) -> bool:
    """Cut the newest checkpoint off somewhere, if there are older ones."""
    paths = sorted(folder.glob("step-*.pt"))
    if len(paths) < 2:
        return False
    os.truncate(paths[-1], chance.randrange(paths[-1].stat().st_size))
    return True


def run_undisturbed(folder: Path, *, epochs: int) -> None:
    """Train on one rank, to the end."""
    command = [sys.executable, *PROGRAM, str(folder), f"--epochs={epochs}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DrillError(f"The undisturbed run failed.\n{done.stderr}")


def compare(folder: Path, *, epochs: int) -> Account:
    """Train undisturbed beside a run that has been disturbed, and check what survives of that."""
    undisturbed = folder.with_name("undisturbed")
    run_undisturbed(undisturbed, epochs=epochs)
    found = account(folder, undisturbed, epochs=epochs)
    check(found, epochs=epochs)
    return found


def main() -> None:
    """Disturb a training, and print the account."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    # Nothing of a struck attempt may survive but what it saved, so this is enough, and then some.
    epochs = math.ceil(arguments.kills * 1.2 * MOST_STEPS / STEPS_PER_EPOCH) + 2
    chance = random.Random(arguments.seed)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shardplug-drill-") as folder:
        drill = Drill(Path(folder) / "run", epochs=epochs, seed=arguments.seed)
        try:
            while drill.struck.total() < arguments.kills:
                drill.strike(chance.choice(KINDS))
                print(f"killed {drill.struck.total()} times", flush=True)
            drill.finish()
        finally:
            drill.stop()
        found = compare(drill.folder, epochs=epochs)
        print(f"{time.monotonic() - start:.0f} s, seed {arguments.seed}; kills:")
        for kind in KINDS:
            print(f"  {kind:<28} {drill.struck[kind]}")
        print(f"  parts of checkpoints left    {drill.num_parts}")
        print(f"  checkpoints torn             {drill.num_torn}")
        print(f"  starts that passed one over  {drill.count_in_logs('is torn and is passed')}")
        print(f"  starts without connections   {drill.count_in_logs('ranks did not start')}")
        print(f"  starts of torchrun           {drill.num_launches}")
        show(found, epochs=epochs)


if __name__ == "__main__":
    main()
