"""What ends a command that cannot be carried out: one line that says what to do."""

from __future__ import annotations


class Refusal(Exception):  # noqa: N818  # what the command does, not what went wrong in it
    """The command cannot be carried out as it was given; the message is for its user."""


def one_line(error: BaseException, *, most: int = 500) -> str:
    """Put what an error says on one line, with its type where it says nothing or very little.

    Args:
        error: Any error.
        most: Letters to keep.
    """
    text = " ".join(str(error).split())
    if len(text) > most:
        text = text[: most - 3] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
