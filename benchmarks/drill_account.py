"""What survives of a run that was killed again and again: read from what its ranks wrote down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.drill_training import NUM_SAMPLES, STEPS_PER_EPOCH, checkpoints_of
from examples import checkpoints


class DrillError(AssertionError):
    """What survives is not what it should be, or a drill did not get on."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a run: the epoch, and the samples of all ranks."""

    epoch: int
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the training.

    Attributes:
        start: The step that it went on after.
        pids: The processes of its ranks.
        steps: Those that every rank had begun.
    """

    start: int
    pids: tuple[int, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Account:
    """What came of a run.

    Attributes:
        attempts: How often it was started, with ranks that got as far as their first step.
        worlds: On how many ranks, by attempt.
        repeated: Steps that were taken, lost with what killed them, and taken again.
        seen: How many samples of how many epochs were seen once, others, and never.
        apart: The largest difference of a parameter from the undisturbed run.
    """

    attempts: int
    worlds: tuple[int, ...]
    repeated: int
    seen: tuple[int, int, int]
    apart: float


def read_attempt(place: Path) -> Attempt | None:
    """Read one attempt; None if it died before all of its ranks had begun."""
    files = sorted(place.glob("*-of-*.txt"))
    world_size = int(files[0].stem.partition("-of-")[2]) if files else 1
    by_rank = [_whole_lines(file) for file in files]
    if len(files) < world_size or not all(by_rank):
        return None
    heads = [tuple(map(int, lines[0].split())) for lines in by_rank]
    starts = {start for _, start in heads}
    if len(starts) > 1:
        raise DrillError(f"The ranks of attempt {place.name} went on after steps {sorted(starts)}.")
    steps = tuple(
        _joined(place, start, lines)
        for start, lines in enumerate(
            zip(*(lines[1:] for lines in by_rank), strict=False), starts.pop() + 1
        )
    )
    return Attempt(heads[0][1], tuple(pid for pid, _ in heads), steps)


def list_attempts(folder: Path) -> list[Path]:
    """List the places of all attempts of a run, in order."""
    place = folder / "attempts"
    return sorted(place.iterdir()) if place.exists() else []


def read_attempts(folder: Path) -> list[Attempt]:
    """Read all attempts of a run that began, in order."""
    read = map(read_attempt, list_attempts(folder))
    return [attempt for attempt in read if attempt is not None]


def surviving(attempts: Sequence[Attempt]) -> list[Step]:
    """Take, of each step, the attempt whose work the last one stands on.

    Raises:
        DrillError: If an attempt went on after a step that nobody had taken.
    """
    history: list[Step] = []
    for place, attempt in enumerate(attempts):
        if attempt.start > len(history):
            raise DrillError(
                f"Start {place} went on after step {attempt.start}, but {len(history)} were taken."
            )
        history[attempt.start :] = attempt.steps
    return history


def account(folder: Path, undisturbed: Path, *, epochs: int) -> Account:
    """Compare a run that was disturbed with one that was not.

    Raises:
        DrillError: If the steps differ in number, epoch or samples.
    """
    attempts = read_attempts(folder)
    history, wanted = surviving(attempts), surviving(read_attempts(undisturbed))
    if len(wanted) != epochs * STEPS_PER_EPOCH:
        raise DrillError(f"The undisturbed run took {len(wanted)} steps.")
    if len(history) != len(wanted):
        raise DrillError(f"{len(history)} steps survive, not {len(wanted)}.")
    for place, (step, other) in enumerate(zip(history, wanted, strict=True), 1):
        if step.epoch != other.epoch or sorted(step.samples) != sorted(other.samples):
            raise DrillError(f"Step {place} was {step}, in the undisturbed run {other}.")
    return Account(
        attempts=len(attempts),
        worlds=tuple(len(attempt.pids) for attempt in attempts),
        repeated=sum(len(attempt.steps) for attempt in attempts) - len(history),
        seen=count_seen(history, epochs),
        apart=_largest_difference(folder, undisturbed),
    )


def count_seen(history: Sequence[Step], epochs: int) -> tuple[int, int, int]:
    """Count the samples of all epochs that were seen once, more often, and never."""
    seen = Counter((step.epoch, sample) for step in history for sample in step.samples)
    once = sum(1 for times in seen.values() if times == 1)
    return once, len(seen) - once, epochs * NUM_SAMPLES - len(seen)


def check(found: Account, *, epochs: int) -> None:
    """Check the two promises.

    Raises:
        DrillError: If a sample was not seen once, or a parameter is off by more than 1e-5.
    """
    if found.seen != (epochs * NUM_SAMPLES, 0, 0):
        once, more, never = found.seen
        raise DrillError(f"Seen once {once}, more often {more}, never {never}.")
    if not found.apart <= 1e-5:
        raise DrillError(f"The parameters differ by {found.apart:g}.")


def show(found: Account, *, epochs: int) -> None:
    """Print it."""
    once, more, never = found.seen
    worlds = ", ".join(
        f"{times} on {world}" for world, times in sorted(Counter(found.worlds).items())
    )
    print(f"  starts of all ranks          {found.attempts} ({worlds})")
    print(f"  steps                        {epochs * STEPS_PER_EPOCH}, and {found.repeated} lost")
    print(f"  samples of {epochs} epochs         {epochs * NUM_SAMPLES}")
    print(f"    seen once, more, never     {once}, {more}, {never}")
    print(
        f"  parameters differ by         {found.apart:.1e} from the undisturbed run's", flush=True
    )


def _whole_lines(file: Path) -> list[str]:
    """Read the lines that the process had time to end."""
    return file.read_text(encoding="utf-8").split("\n")[:-1]


def _joined(place: Path, number: int, lines: Sequence[str]) -> Step:
    told = [line.split() for line in lines]
    if {(step, epoch) for step, epoch, _ in told} != {(str(number), told[0][1])}:
        raise DrillError(f"In attempt {place.name} ranks were in different steps: {lines}.")
    samples = (part for _, _, seen in told if seen != "-" for part in seen.split(","))
    return Step(int(told[0][1]), tuple(map(int, samples)))


def _largest_difference(folder: Path, other: Path) -> float:
    both = [checkpoints.newest(checkpoints_of(each)) for each in (folder, other)]
    ours, theirs = (saved["network"] for saved in both if saved is not None)
    apart: list[torch.Tensor] = [(ours[name] - theirs[name]).abs().max() for name in theirs]
    return max(value.item() for value in apart)
