"""The Chinese pages show what the English ones do: code, headings, tables, links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.blocks import ROOT, blocks_of

PAIRS = {
    "start page": (ROOT / "docs" / "index.md", ROOT / "docs" / "zh" / "index.md"),
    "README": (ROOT / "README.md", ROOT / "README.zh-CN.md"),
}
_INDENTED = re.compile(r"(?:^    .+\n)+", flags=re.MULTILINE)


def prose_of(page: Path) -> str:
    """A page without its code and comments."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.sub(r"<!--.*?-->", "", _INDENTED.sub("", text), flags=re.S)


def outline_of(page: Path) -> list[int]:
    return [len(level) for level in re.findall(r"^(#+) ", prose_of(page), flags=re.MULTILINE)]


def tables_of(page: Path) -> list[int]:
    """How many lines each table has."""
    tables = re.findall(r"(?:^\|.*\n)+", prose_of(page), flags=re.MULTILINE)
    return [table.count("\n") for table in tables]


def figures_of(page: Path) -> list[list[str]]:
    """The cells of a table that the benchmarks wrote, but for the first of each row."""
    text = page.read_text(encoding="utf-8")
    written = re.search(r"<!-- figures:.*?<!-- end of figures -->", text, flags=re.DOTALL)
    rows = re.findall(r"^\|.*$", written[0], flags=re.MULTILINE) if written else []
    return [row.strip("| ").split(" | ")[1:] for row in rows[2:]]


def targets_of(page: Path) -> set[Path]:
    """The files that a page links to, but for its translation and places on itself."""
    pages = {path for pair in PAIRS.values() for path in pair}
    links = re.findall(r"\]\(([^)#:]+)\)", prose_of(page))
    links += re.findall(r'(?:src|srcset)="([^":]+)"', prose_of(page))
    return {(page.parent / link).resolve() for link in links} - pages


@pytest.mark.parametrize("name", PAIRS)
def test_code_is_the_same(name: str) -> None:
    english, chinese = (
        [(block.language, block.title, block.code) for block in blocks_of(page)]
        for page in PAIRS[name]
    )
    assert chinese == english
    assert english
    english_, chinese_ = (
        _INDENTED.findall(re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S))
        for page in PAIRS[name]
    )
    assert chinese_ == english_


@pytest.mark.parametrize("name", PAIRS)
def test_headings_and_tables_are_as_many(name: str) -> None:
    english, chinese = PAIRS[name]
    assert outline_of(chinese) == outline_of(english)
    assert tables_of(chinese) == tables_of(english)
    assert figures_of(chinese) == figures_of(english)
    lists = [re.findall(r"^- ", prose_of(page), flags=re.MULTILINE) for page in PAIRS[name]]
    assert len(lists[0]) == len(lists[1])


@pytest.mark.parametrize("name", PAIRS)
def test_links_lead_to_the_same_places(name: str) -> None:
    english, chinese = PAIRS[name]
    assert targets_of(chinese) == targets_of(english)
    assert all(target.exists() for target in targets_of(chinese))


@pytest.mark.parametrize("name", PAIRS)
def test_each_names_the_other(name: str) -> None:
    english, chinese = PAIRS[name]
    for page, other in ((english, chinese), (chinese, english)):
        links = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
        assert other in [(page.parent / link).resolve() for link in links], page


@pytest.mark.parametrize("name", PAIRS)
def test_places_on_the_page_are_there(name: str) -> None:
    for page in PAIRS[name]:
        text = page.read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.+)$", prose_of(page), flags=re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}
        assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors


@pytest.mark.parametrize("name", PAIRS)
def test_it_is_chinese(name: str) -> None:
    for paragraph in re.split(r"\n\n+", prose_of(PAIRS[name][1])):
        words = re.sub(r"`[^`]*`|\[.*?\]\(.*?\)|<.*?>", "", paragraph)
        if len(re.findall(r"[A-Za-z]+", words)) > 4:
            assert re.search(r"[\u4e00-\u9fff]", words), paragraph
