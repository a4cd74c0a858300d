"""Kill two ranks in the middle of an epoch, go on with three, and count who saw what.

    python examples/resume_demo.py

The training is that of `elastic_resume.py`. Once it runs on one rank, never disturbed; once on two
ranks, whose processes are killed (SIGKILL) in the middle of an epoch, and then on three. Each digit
brings its number along, and each rank tells after each step which ones it had, so the tables are
made of what the ranks really saw. Steps that were lost with the killed ranks are not counted: the
newest checkpoint does not have them.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

import checkpoints  # beside this file
from elastic_resume import BATCH_SIZE, EPOCHS, NUM_TRAIN, NUM_VAL, SAVE_EVERY, Run  # the same

STEPS_PER_EPOCH = NUM_TRAIN // BATCH_SIZE
KILLED_AFTER = 3 * STEPS_PER_EPOCH + 7  # steps
IMPORTS = ["torch", "torch._dynamo", "torch.utils.data", "sklearn.datasets"]


@dataclass
class Told:
    """What the ranks of one start told.

    Attributes:
        seen: Step by step the numbers of the digits that each rank had.
        right: Right answers in validation, of all ranks; 0 if they were killed before.
        counted: Digits that they are of.
    """

    seen: list[list[list[int]]]
    right: int = 0
    counted: int = 0


def be_rank(rank: int, num_ranks: int, port: int, folder: Path, pipe: Connection) -> None:
    """Be one rank: train to the end, and tell after each step which digits it had."""
    if num_ranks > 1:  # what torchrun would set
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    logging.getLogger("shardplug").setLevel(logging.ERROR)  # says what the table shows
    run = Run(folder)
    pipe.send(run.step)
    for seen in run.train():
        pipe.send(seen)
        pipe.recv()  # goes on when told so
    pipe.send(run.validate())


def run_ranks(num_ranks: int, folder: Path, kill_after: int | None = None) -> tuple[int, Told]:
    """Train with some ranks, a process each, to the end or until they are killed.

    Returns:
        The step that they went on after, and what they told.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks: list[BaseProcess] = []
    pipes = []
    for number in range(num_ranks):
        pipe, its_end = context.Pipe()
        arguments = (number, num_ranks, port, folder, its_end)
        ranks.append(context.Process(target=be_rank, args=arguments, daemon=True))
        ranks[-1].start()
        its_end.close()
        pipes.append(pipe)
    start = max(pipe.recv() for pipe in pipes)
    told = listen(pipes, num_steps=None if kill_after is None else kill_after - start)
    for rank in ranks:
        if kill_after is not None:
            rank.kill()  # SIGKILL: nothing that the rank could answer
        rank.join()
    return start, told


def listen(pipes: Sequence[Connection], num_steps: int | None) -> Told:
    """Hear what all ranks tell, up to a step or to the end."""
    told = Told([])
    while True:
        by_rank = [pipe.recv() for pipe in pipes]
        if isinstance(by_rank[0], tuple):
            told.right, told.counted = by_rank[0]
            return told
        told.seen.append(by_rank)
        if len(told.seen) == num_steps:
            return told
        for pipe in pipes:
            pipe.send(None)


def describe(steps: Sequence[list[list[int]]]) -> str:
    """Say how many digits each rank saw, and how many were seen once, twice, and never."""
    by_layout: dict[int, list[int]] = {}  # the number of ranks: what each of them saw
    for step in steps:
        counts = by_layout.setdefault(len(step), [0] * len(step))
        for rank, seen in enumerate(step):
            counts[rank] += len(seen)
    ranks = ", then ".join(" + ".join(map(str, counts)) for counts in by_layout.values())
    times = Counter(Counter(digit for step in steps for seen in step for digit in seen).values())
    return f"{ranks:>34}{times[1]:>8}{times[2]:>8}{NUM_TRAIN - times.total():>8}"


def largest_difference(folder: Path, other: Path) -> float:
    """Compare the parameters that two runs ended with."""
    both = [checkpoints.newest(each) for each in (folder, other)]
    ours, theirs = (saved["network"] for saved in both)
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


def train(folder: Path) -> tuple[Told, list[list[list[int]]], Told]:
    """Run it all, and say what happens.

    Returns:
        What the undisturbed rank told; the steps of the others that were not lost; what the last
        of those told.
    """
    print(
        f"\nStopped and resumed: {NUM_TRAIN} digits, {EPOCHS} epochs of {STEPS_PER_EPOCH} steps, "
        f"a checkpoint every {SAVE_EVERY} steps.\n"
        f"Each batch of {BATCH_SIZE} is shared out among the ranks, so any number trains the same.",
        flush=True,
    )
    _, alone = run_ranks(1, folder / "undisturbed")
    print(f"  1 rank trained to the end, never stopped: {len(alone.seen)} steps.", flush=True)
    _, killed = run_ranks(2, folder / "killed", kill_after=KILLED_AFTER)
    print(f"  2 ranks trained, and were killed (SIGKILL) after step {KILLED_AFTER}.", flush=True)
    start, resumed = run_ranks(3, folder / "killed")
    print(
        f"  3 ranks went on from the newest checkpoint, that of step {start}, and took "
        f"{KILLED_AFTER - start} lost steps again.",
        flush=True,
    )
    return alone, [*killed.seen[:start], *resumed.seen], resumed


def print_tables(alone: Told, history: Sequence[list[list[int]]], resumed: Told) -> None:
    """Print what was seen in training, and what came of it."""
    print(f"\n{f'Training, {NUM_TRAIN} digits':<24}{'seen by rank':>34}", end="")
    print(f"{'once':>8}{'twice':>8}{'never':>8}")
    for epoch in range(EPOCHS):
        steps = history[epoch * STEPS_PER_EPOCH : (epoch + 1) * STEPS_PER_EPOCH]
        print(f"{f'  epoch {epoch}':<24}{describe(steps)}")
    print(f"\n{f'Validation, {NUM_VAL} digits':<40}accuracy")
    for name, told in (
        ("1 rank, never stopped", alone),
        ("2 ranks, killed, then 3 ranks", resumed),
    ):
        print(f"  {name:<38}{told.right}/{told.counted} = {told.right / told.counted:.2%}")


def main() -> None:
    """Train, kill and go on, then print the tables and compare."""
    with tempfile.TemporaryDirectory(prefix="shardplug-demo-") as place:
        folder = Path(place)
        alone, history, resumed = train(folder)
        apart = largest_difference(folder / "killed", folder / "undisturbed")
    print_tables(alone, history, resumed)
    if (resumed.right, resumed.counted) != (alone.right, alone.counted) or apart > 1e-5:
        sys.exit(f"\nThe runs differ, in parameters by up to {apart:.1g}.")
    print(
        "\nEach digit was seen once in each epoch, although the ranks were killed and others went "
        f"on;\nthe parameters are those of the undisturbed run but for rounding: {apart:.0e}."
    )


if __name__ == "__main__":
    main()
