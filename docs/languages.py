"""Pages in other languages say so: browsers choose letters, and readers aloud a voice, by that."""

from __future__ import annotations

from typing import Any

LANGUAGES = {"zh": "zh-Hans"}
"""What the pages of a folder are written in; all others are in English."""


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Name the language of a page.

    Args:
        output: The page as it is written.
        page: Where it comes from.
        config: The configuration.

    Returns:
        The page with its language.
    """
    language = LANGUAGES.get(page.file.src_uri.partition("/")[0], "en")
    return output.replace('<html lang="en"', f'<html lang="{language}"', 1)
