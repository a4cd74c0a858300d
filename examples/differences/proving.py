"""What the proofs share: both sides of a case, and real ranks on this machine."""

from __future__ import annotations

import importlib.metadata
import logging
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Sides(NamedTuple):
    """What came of a case.

    Attributes:
        theirs: With the other tool.
        ours: With shardplug.
    """

    theirs: str
    ours: str


def missing(packages: Sequence[str]) -> list[str]:
    """Name the packages that are not installed."""
    return [each for each in packages if version_of(each) is None]


def version_of(package: str) -> str | None:
    """Tell the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(title: str | None, packages: Sequence[str], prove: Callable[[], Sides]) -> None:
    """Print a title and both sides, or what has to be installed first."""
    print((title or "").partition("\n")[0])
    if lacking := missing(packages):
        print(f"skipped: pip install {' '.join(lacking)}")
        return
    quiet()
    sides = prove()
    print(f"  {' '.join(f'{each} {version_of(each)}' for each in packages)}: {sides.theirs}")
    print(f"  shardplug {version_of('shardplug')}: {sides.ours}")


def quiet() -> None:
    """Leave out advice that is not the point."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)


def trainer_of(strategy: Any, devices: int, **options: Any) -> Any:
    """Make a Lightning Trainer on CPUs that prints nothing."""
    from lightning.pytorch import Trainer

    silent = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    options = {"enable_checkpointing": "callbacks" in options, **silent, **options}
    return Trainer(strategy=strategy, accelerator="cpu", devices=devices, **options)


def on_ranks(
    world_size: int, body: Callable[[int], Any], *, wait_s: float = 30.0, group_s: float = 20.0
) -> list[Any]:
    """Run a function on ranks of a process each, and return what it returns, by rank.

    Args:
        world_size: How many ranks.
        body: Called with the rank. What it raises is returned as text.
        wait_s: A rank that is not done by then is ended, and its result tells so.
        group_s: How long a collective waits for other ranks.
    """
    fork: Any = multiprocessing.get_context("fork")  # torch is imported: a start takes no time
    pipes = [fork.Pipe(duplex=False) for _ in range(world_size)]
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            fork.Process(
                target=_live,
                args=(rank, world_size, (folder, timedelta(seconds=group_s)), body, pipes[rank][1]),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for each in ranks:
            each.start()
        end = time.monotonic() + wait_s
        waiting = f"still waits after {wait_s:g} s"
        results = [
            got.recv() if got.poll(max(0.0, end - time.monotonic())) else waiting
            for got, _ in pipes
        ]
        for each in ranks:
            each.kill()
            each.join()
    return results


def _live(
    rank: int, world_size: int, meeting: tuple[str, timedelta], body: Callable[[int], Any], out: Any
) -> None:
    quiet()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), ACCELERATE_USE_CPU="true")
    dist.init_process_group(
        "gloo", f"file://{meeting[0]}/meet", timeout=meeting[1], rank=rank, world_size=world_size
    )
    try:
        out.send(body(rank))
    except Exception as error:  # noqa: BLE001  # it is what the proof shows
        out.send(f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
    out.close()
    time.sleep(60)  # a rank that ends would be seen by the others; it is ended from outside
