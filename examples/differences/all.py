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


def outcome(name: str) -> list[str]:
    """Run a proof; return its name, what came of the other tool, and of shardplug."""
    done = subprocess.run(  # a process of its own: tools keep a state in theirs
        [sys.executable, HERE / f"{name}.py"], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()[1:]
    return [name, *(line.strip() for line in lines)][:3]


def main() -> None:
    """Print a row for each proof, and the versions."""
    for name in proofs():
        first, *sides = outcome(name)
        print(first.replace("_", " "))
        for side in sides:
            print(f"    {side}")
    print(", ".join(f"{tool} {version_of(tool) or 'not installed'}" for tool in TOOLS))


if __name__ == "__main__":
    main()
