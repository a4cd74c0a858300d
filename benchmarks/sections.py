"""The parts of the one table, and what each of them is to show.

A goal is a line of what was to be reached before the work began. The rows that answer it are found
by how their names begin; what is no figure is answered by a test, which is named.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goal:
    """A line of what was to be reached.

    Attributes:
        text: The line.
        rows: How the names of the rows begin that answer it; of its section.
        tests: Where what is no figure is tested.
    """

    text: str
    rows: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()

    def is_answered_by(self, what: str) -> bool:
        """Tell whether a row of that name answers it."""
        return what.startswith(self.rows) if self.rows else False


@dataclass(frozen=True, slots=True)
class Section:
    """A benchmark module and its part of the table.

    Attributes:
        name: That of the module in `benchmarks`.
        title: What stands above its rows.
        goals: What it is to show.
        limit_s: After so long it is given up.
    """

    name: str
    title: str
    goals: tuple[Goal, ...] = ()
    limit_s: float = 600.0


SECTIONS = (
    Section(
        "permutation",
        "A shuffle by formula: PermutedSampler",
        (
            Goal(
                "The epoch of one rank, n=1e7, batch 32: ≥ 1.8, 15, 100, 1,000 times as fast as "
                "accelerate at 1, 8, 64, 1024 ranks",
                ("epoch of one rank of",),
            ),
            Goal("A batch at 1024 ranks costs ≤ 2 times one at 1 rank", ("batch at 1024",)),
            Goal("Extra memory ≤ 2 MB at any n", ("extra memory, n=",)),
            Goal("First batch in ≤ 2 ms at n=1e7 and at n=1e12 on 1e6 ranks", ("first batch, n=",)),
            Goal("≤ 2 times torch.randperm's time for an index at n=1e7", ("index, n=1e7",)),
            Goal("Slowest n / fastest n ≤ 1.7, from 1e6 to 1e12", ("index, slowest",)),
            Goal("≥ 40 times as fast as Grain's index_shuffle", ("index, n=1e6",)),
            Goal(
                "Statistics within 4 sigma where Grain's and torch's own orders are flagged",
                ("serial correlation", "first 2e6 in the lower half"),
                ("tests/unit/test_permutation.py",),
            ),
        ),
    ),
    Section(
        "loading",
        "Samplers and loaders that each rank reads for itself",
        (
            Goal(
                "The same batches as accelerate, RandomSampler, n=1e7, batch 32: ≥ 3 times as fast "
                "at 1 rank, ≥ 6 times at 8, 64, 1024",
                ("accelerate's batches, one rank of",),
            ),
            Goal("Extra memory for them ≤ 1/8 of accelerate's", ("extra memory for them",)),
            Goal(
                "First batch of a loader without workers in ≤ 2 ms at n=1e7, and at n=1e12 on 1e6 "
                "ranks",
                ("first batch of a loader",),
            ),
            Goal(
                "A loader costs ≤ 1.05 times a plain DataLoader at 1, 8, 64 ranks, ≤ 1.5 at 1024",
                ("loader / plain DataLoader",),
            ),
            Goal(
                "batches_per_message=16, 2 workers: ≥ 5 times a plain DataLoader's batches of "
                "numbers, ≥ 2 times those of 3×32×32 floats",
                ("16 batches a message",),
            ),
            Goal(
                "Agreement of uneven streams ≤ 1/5 of one blocking all-reduce in each step",
                ("agreement of uneven streams",),
            ),
            Goal(
                "Epoch start: no collective beyond the one small check of the pass",
                ("collectives of an epoch", "sent in it by each rank"),
            ),
            Goal(
                "1024 ranks at n=1e9 in one process: first and last 20 steps tile exactly, in < 5 "
                "s and < 200 MB",
                ("1024 ranks at n=1e9",),
            ),
        ),
    ),
    Section(
        "dispatching",
        "One rank reads for all, on 2 and 4 gloo ranks of one machine",
        (
            Goal(
                "A rank receives its rows and ≤ 1 KB a step; over sockets of one host control only",
                ("sockets per rank and step", "the same beside its rows"),
            ),
            Goal(
                "A step of 32 images 3×224×224 made by the data set: ≤ 1/4 of accelerate's time on "
                "2 ranks, ≤ 1/5 on 4",
                (
                    "images made by the data set, 2 ranks: step",
                    "images made by the data set, 4 ranks: step",
                ),
            ),
            Goal(
                "The same, ready made: ≤ 1/12 and ≤ 1/10",
                ("images ready made, 2 ranks: step", "images ready made, 4 ranks: step"),
            ),
            Goal(
                "A dict of token ids, 32 × 128: ≤ 1/3 and ≤ 1/5",
                ("token ids, 2 ranks: step", "token ids, 4 ranks: step"),
            ),
            Goal(
                "Waiting beside a step of 20 ms: ≤ 1/50 of accelerate's for ready images, ≤ 1/15 "
                "for made ones, ≤ 1/10 (2 ranks) and ≤ 1/20 (4) for tokens",
                tuple(
                    f"{work}, {ranks} ranks: waiting"
                    for work in ("images ready made", "images made by the data set", "token ids")
                    for ranks in (2, 4)
                ),
            ),
            Goal(
                "Ranks pretended on different hosts: a step ≤ 1/3 of accelerate's time, waiting "
                "for ready batches ≤ 1/10",
                tuple(
                    f"{work}, {ranks} ranks, hosts apart"
                    for work in ("images ready made", "images made by the data set", "token ids")
                    for ranks in (2, 4)
                ),
            ),
            Goal(
                "Memory: ≤ 3 rounds on the reader, ≤ 2 batches elsewhere, flat over 10,000 steps",
                ("rounds held on the reader", "batches held elsewhere", "memory grown over"),
            ),
            Goal(
                "No shared memory is left behind, also after SIGKILL of any rank; where it is too "
                "small, batches are sent instead, with one log line",
                ("pieces of shared memory left",),
                ("tests/unit/test_channel.py", "tests/processes/test_channel.py"),
            ),
        ),
    ),
    Section(
        "optimizing",
        "Optimizers and schedules",
        (
            Goal(
                "What the optimizer's wrapper adds to a step ≤ 1/15 of Accelerate's",
                ("optimizer.step, added",),
            ),
            Goal(
                "What the schedule's wrapper adds to a tick ≤ 1/2 of Accelerate's",
                ("schedule.step, added",),
            ),
            Goal(
                "A step worth 1024 ticks costs ≤ 1.5 times one tick, four schedules, with the "
                "values of single ticks to 1e-12",
                tuple(
                    f"{schedule}, {told}"
                    for schedule in ("LambdaLR", "CosineAnnealingLR", "LinearLR", "OneCycleLR")
                    for told in ("1024 ticks / 1", "relative difference")
                ),
            ),
        ),
    ),
    Section(
        "gathering",
        "Metrics",
        (
            Goal(
                "gather_for_metrics of 3 tensors on 4 gloo ranks: ≤ 1/2 of accelerate's time",
                ("gather_for_metrics",),
            ),
        ),
    ),
    Section(
        "resuming",
        "Going on in the middle of an epoch",
        (
            Goal(
                "From load_state_dict to the first batch at 90 %, n=1e8, PermutedSampler, rank 0 "
                "of 64: < 2 ms, the same as at 1 %",
                ("load, first batch: n=1e8", "the same at 90 %"),
            ),
            Goal(
                "In torch.randperm's order, n=1e7: ≤ 1/3 of accelerate's skip_first_batches, ≤ "
                "1/10 of StatefulDataLoader",
                ("prepare, load, first batch at 90 %",),
            ),
            Goal(
                "A stream that can jump or shard makes nothing in vain, at 90 % of 20,000 items of "
                "100 µs",
                ("stream, items of 100 us", "the same, parted"),
            ),
            Goal("The state takes < 1 KB at any n and W", ("state of a",)),
            Goal(
                "state_dict() in < 2 µs; a loop that calls it in each step ≤ 1.1 times one that "
                "does not",
                ("state_dict()", "loop with state_dict()"),
            ),
            Goal("seed_samples adds ≤ 15 µs a sample", ("seed_samples",)),
        ),
    ),
    Section(
        "crashes",
        "A training that is killed again and again",
        (
            Goal(
                "Every sample of every epoch seen exactly once, parameters equal to the "
                "undisturbed run's to 1e-5 (50 kills: python -m benchmarks.crash_drill)",
                ("training killed",),
                ("tests/processes/test_crashes.py",),
            ),
        ),
    ),
    Section(
        "lightning_overhead",
        "PyTorch Lightning",
        (
            Goal(
                "A training step takes ≤ 3 % longer than under DDPStrategy, 2 ranks, small model",
                ("",),
            ),
        ),
    ),
    Section(
        "ignite_overhead",
        "PyTorch-Ignite",
        (Goal("An iteration takes ≤ 5 % longer than that of a bare engine", ("",)),),
    ),
    Section(
        "looking",
        "The command line",
        (
            Goal(
                "shardplug plan is there at once for any size (1e12 samples, 100,000 ranks)",
                ("shardplug plan --json",),
            ),
        ),
    ),
    Section("scaling", "What a batch costs a rank, from 1 rank to 4096"),
)


def section_of(name: str) -> Section:
    """Find a section by its module's name."""
    return next(section for section in SECTIONS if section.name == name)


def unanswered(section: Section, whats: Iterable[str]) -> list[Goal]:
    """List the goals of a section that no row answers, nor a test."""
    names = list(whats)
    return [
        goal
        for goal in section.goals
        if not goal.tests and not any(goal.is_answered_by(what) for what in names)
    ]
