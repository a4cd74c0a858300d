"""What pages of the documentation take for granted: names that their blocks use and do not make."""

from __future__ import annotations

from tests.blocks import Givens, Scope


def nothing(code: str) -> Scope:
    """Give a page no names."""
    return {}


GIVENS: dict[str, Givens] = {}
"""By page, as a path under docs/: a function of the code that is to run. What is given
in English is given in other languages too."""


def givens_of(page: str) -> Givens:
    """Return what brings the names of a page.

    Args:
        page: Its path under docs/.
    """
    return GIVENS.get(page, GIVENS.get(page.removeprefix("zh/"), nothing))
