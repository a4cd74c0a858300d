"""What ends a command that cannot be carried out: one line that says what to do."""

from __future__ import annotations

import re
from itertools import dropwhile


class Refusal(Exception):  # noqa: N818  # what the command does, not what went wrong in it
    """The command cannot be carried out as it was given; the message is for its user."""


def one_line(error: BaseException, *, most: int = 500) -> str:
    """Put what an error says on one line, with its type where it says nothing or very little.

    Of a traceback in it, as errors from workers have, what stands before it and what was raised is
    kept.

    Args:
        error: Any error.
        most: Letters to keep.
    """
    text = " ".join(_without_traceback(str(error)).split())
    if len(text) > most:
        text = text[: most - 3] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def sentence(text: str) -> str:
    """End a text with a stop, if it has no end of its own."""
    return text if text.endswith((".", "!", "?")) else f"{text}."


_TRACEBACK = re.compile(r"^(?:Original )?Traceback \(most recent call last\):$", re.MULTILINE)


def _without_traceback(text: str) -> str:
    """Leave the places of a traceback out; of several, one for each cause, the last one counts."""
    found = list(_TRACEBACK.finditer(text))
    if not found:
        return text
    places = text[found[-1].end() :].splitlines()
    ends = [at for at, line in enumerate(places) if line.startswith('  File "')]
    raised = list(
        dropwhile(lambda line: line.startswith("    "), places[ends[-1] + 1 if ends else 0 :])
    )
    return "\n".join([text[: found[0].start()], *raised])
