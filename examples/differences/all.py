"""Run every proof beside this file, and print what comes of each in one table.

    python examples/differences/all.py

Needs the tools that are compared: pip install accelerate lightning pytorch-ignite. What is not
installed is skipped. A proof alone: python examples/differences/varying_batches.py
"""

import subprocess
import sys
from pathlib import Path

from proving import version_of

HERE = Path(__file__).parent
TOOLS = ("torch", "accelerate", "lightning", "pytorch-ignite", "shardplug")


def proofs() -> list[str]:
    """Name the proofs: every program here but this one."""
    return sorted({path.stem for path in HERE.glob("*.py")} - {"all", "proving"})


def outcome(name: str) -> list[tuple[str, str]]:
    """Run a proof; return who came to what, or that it was skipped."""
    done = subprocess.run(  # a process of its own: tools keep a state in theirs
        [sys.executable, HERE / f"{name}.py"], capture_output=True, text=True, check=True
    )
    lines = [line.strip().partition(": ") for line in done.stdout.splitlines()[1:]]
    return [(who.partition(" ")[0], what) for who, _, what in lines]


def main() -> None:
    """Print a row for each proof, and the versions."""
    print(f"{'case':24}  {'who':14}  what came of it")
    for name in proofs():
        for row, (who, what) in enumerate(outcome(name)):
            print(f"{'' if row else name.replace('_', ' '):24}  {who:14}  {what}", flush=True)
    print(", ".join(f"{tool} {version_of(tool) or 'not installed'}" for tool in TOOLS))


if __name__ == "__main__":
    main()
