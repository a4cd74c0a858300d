"""The command line: `shardplug plan` draws who sees what, `shardplug check` tries a loader out."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: What stands behind the program's name; None: what it was started with.

    Returns:
        The exit status: 0 when all is well, 1 when `check` has found a fault, 2 when the command
        cannot be carried out as it was given.
    """
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError:
        print(
            "shardplug: the command line needs typer and rich: pip install 'shardplug[cli]'",
            file=sys.stderr,
        )
        return 2
    from shardplug.cli.app import run

    return run(sys.argv[1:] if arguments is None else arguments)


def exit_with_status() -> None:
    """Run the command line and end the process with its status."""
    if sys.stdout is None:  # closed by who started it, with >&-
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # open to the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may not know all letters of the help
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        status = 1  # who reads the output has seen enough
    except OSError as error:
        print(f"shardplug: The output cannot be written: {error.strerror}.", file=sys.stderr)
        status = 2
    try:
        sys.stdout.flush()
    except OSError:
        # What is left can be written nowhere, at the end of the process as little as here.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # open to the end
    sys.exit(status)
