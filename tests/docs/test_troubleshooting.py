"""Every error and warning in the source has an entry on the page of troubles; none is old."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from shardplug.cli.kinds import KINDS
from tests.blocks import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")

ERRORS = {"PlanError", "BatchError", "StateError", "CommError", "OptionError", "Refusal"}
SAYS = {"warn", "warning", "info"}
VALUE = "\N{REPLACEMENT CHARACTER}"
"""Stands for what is put into a message when it is raised."""

# Errors whose message is put together elsewhere: where, and how it begins.
INDIRECT = {
    ("parts.py", "problems[0]"): [f"`{VALUE}` must be there to be read, got {VALUE}: {VALUE}"],
    ("testing.py", "reason"): ["All ranks must be done within"],
    ("testing.py", "self._failure"): [
        "Every rank must be in the same collective, but",
        "The run was interrupted.",
        f"Rank {VALUE} called {VALUE} in one thread while another of its threads waited in",
    ],
}


def text_of(node: ast.expr) -> str | None:
    """What a message reads, with `VALUE` for what differs; None if it is nothing but a value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%\.?\d*[dsf]", VALUE, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else VALUE  # type: ignore[misc]
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (text_of(node.left) or VALUE) + (text_of(node.right) or VALUE)
    return None


def messages_in(source: str, name: str) -> Iterator[tuple[str, str]]:
    """The place and text of each message of a file."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        called = node.func
        by_name = called.id if isinstance(called, ast.Name) else ""
        method = called.attr if isinstance(called, ast.Attribute) else ""
        if by_name not in ERRORS and method not in SAYS:
            continue
        place = f"{name}:{node.lineno}"
        text = text_of(node.args[0])
        if text is None:
            variable = ast.unparse(node.args[0])
            unknown = [f"{variable} is no text: name what it may be in INDIRECT"]
            for begins in INDIRECT.get((name.rpartition("/")[2], variable), unknown):
                yield place, begins
        else:
            yield place, text


@cache
def messages() -> tuple[tuple[str, str], ...]:
    folders = (ROOT / "src", ROOT / "integrations")
    return tuple(
        found
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
        for found in messages_in(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    )


@cache
def entries() -> tuple[str, ...]:
    return tuple(re.findall(r"^\| `` (.+?) `` \|", PAGE, flags=re.MULTILINE))


def fits(entry: str, message: str) -> bool:
    """Whether a message begins as an entry says; a name left open is one not in the source."""
    entry = entry.replace("`…`", f"`{VALUE}`")
    pieces = [re.escape(piece.strip(" ")) for piece in entry.split("…")]
    return re.match(r".*?".join(pieces), message, flags=re.DOTALL) is not None


def test_every_message_has_an_entry() -> None:
    missing = [
        f"{place}: {text}"
        for place, text in messages()
        if not any(fits(entry, text) for entry in entries())
    ]
    assert not missing, "\n".join(missing)


def test_every_entry_is_of_a_message() -> None:
    texts = [text for _, text in messages()]
    old = [entry for entry in entries() if not any(fits(entry, text) for text in texts)]
    assert not old, "\n".join(old)


def test_no_entry_fits_nearly_everything() -> None:
    for entry in entries():
        count = sum(fits(entry, text) for _, text in messages())
        assert count <= 40, entry
        assert sum(len(piece.strip(" `")) for piece in entry.split("…")) >= 8, entry


def test_the_messages_are_found() -> None:
    assert len(messages()) > 180
    assert {place.split("/")[1] for place, _ in messages()} == {
        "shardplug",
        "shardplug_lightning",
        "shardplug_ignite",
    }


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("raise PlanError('`a` must be b.')", ["`a` must be b."]),
        (
            "raise PlanError(f'`{name}` must be ' f'at least {n}.')",
            [f"`{VALUE}` must be at least {VALUE}."],
        ),
        ("warnings.warn('no effect', ShardplugWarning)", ["no effect"]),
        ("raise ValueError('not ours')", []),
        ("raise PlanError(text)", ["text is no text: name what it may be in INDIRECT"]),
    ],
)
def test_a_message_is_read_as_it_is_raised(source: str, expected: list[str]) -> None:
    assert [text for _, text in messages_in(source, "a.py")] == expected


def test_a_new_message_would_be_missed() -> None:
    assert not any(fits(entry, "`something` is entirely new here.") for entry in entries())


def test_every_finding_of_the_command_is_explained() -> None:
    section = PAGE.partition("## What `shardplug check` finds")[2]
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (.+?) \|", section, flags=re.MULTILINE))
    assert rows.keys() == KINDS.keys()
