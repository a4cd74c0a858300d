"""Every code block of the documentation runs, and prints what the page says that it prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.blocks import ROOT, BlockError, Reader, blocks_in, blocks_of, need
from tests.docs.givens import GIVENS, givens_of, nothing

DOCS = ROOT / "docs"
PAGES = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))

FRAMEWORKS = {
    "lightning": ("lightning", "lightning"),
    "ignite": ("ignite", "ignite"),
    "$ shardplug": ("typer", "cli"),
    "--plot": ("matplotlib", "plot"),
}
"""What a page needs where its blocks mention a word: a package, of an extra."""

NOT_RUN: dict[tuple[str, str], str] = {
    ("moving-from-accelerate.md", "from accelerate import Accelerator"): (
        "test_moving.py runs it where accelerate is installed, which the tests do not need"
    ),
}
"""Blocks that are left alone: a page and the first line of the block, and the reason."""


INDENTED: dict[str, str] = {"benchmarks.md": "measuring takes minutes"}
"""Pages with blocks that are indented, and so not run, and the reason."""


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [
        block
        for block in blocks_of(DOCS / page)
        if (page, block.code.partition("\n")[0]) not in NOT_RUN
    ]
    text = "".join(block.code for block in blocks if not block.is_elsewhere)
    for word, (package, extra) in FRAMEWORKS.items():
        if word in text:
            need(package, extra)
    monkeypatch.chdir(tmp_path)
    Reader(tmp_path, givens_of(page)).read(blocks)


def indented_code(text: str) -> list[str]:
    """Lines of code that no fence is around: indented ones that belong to no list, tab or note."""
    found: list[str] = []
    is_inside, is_held = False, False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            is_inside = not is_inside
        elif not is_inside and line.strip():
            if not line.startswith(" "):
                is_held = re.match(r"===|!!!|:::|\?\?\?|[-*+] |\d+\. ", line) is not None
            elif line.startswith("    ") and not is_held:
                found.append(line.strip())
    return found


@pytest.mark.parametrize("page", PAGES)
def test_code_that_is_not_run_has_a_reason(page: str) -> None:
    found = indented_code((DOCS / page).read_text(encoding="utf-8"))
    assert bool(found) == (page in INDENTED), found


def test_no_exception_is_left_over() -> None:
    for page, first_line in NOT_RUN:
        firsts = [block.code.partition("\n")[0] for block in blocks_of(DOCS / page)]
        assert first_line in firsts, (page, first_line)
    assert set(GIVENS) <= set(PAGES)


# -- the means ---


def read_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    Reader(tmp_path, nothing).read(blocks_in(text, DOCS / "a-page.md"))


GOOD = {
    "python": "```python\nx = 1\n```\n\n```python\n>>> x + 1\n2\n```\n",
    "printed": "```python\nprint('a', 1)\n```\n\n```text\na 1\n```\n",
    "in a tab": '=== "A"\n\n    ```python\n    assert True\n    ```\n',
    "a program": (
        '```python title="a.py"\nimport sys\nprint(sys.argv[1:])\n```\n\n'
        "```console\n$ python a.py b\n['b']\n```\n"
    ),
    "ranks": (
        "<!-- runs on 2 ranks -->\n```python\nfrom shardplug import current_comm\n"
        "print(current_comm().rank)\n```\n\n```text\n0\n1\n```\n"
    ),
    "a launcher": (
        '```python title="a.py"\nfrom shardplug import ShardEngine\n'
        "print(ShardEngine().rank)\n```\n\n"
        "```console\n$ torchrun --nproc-per-node 2 a.py\n1\n0\n```\n"
    ),
    "status": ("```console\n$ shardplug plan -n 1 -b 1 -w 0\nshardplug: ...\n$ echo $?\n2\n```\n"),
    "configuration": "```yaml\na: [1, 2]\n```\n",
    "installing": "```console\n$ pip install '.[lightning]'\n$ make help\n```\n",
}
BAD = {
    "a block that README.md does not have": (
        "<!-- runs in the tests of README.md -->\n```python\nx = 1\n```\n"
    ),
    "python that raises": "```python\nassert 1 == 2\n```\n",
    "a wrong result": "```python\n>>> 1 + 1\n3\n```\n",
    "something else printed": "```python\nprint('a')\n```\n\n```text\nb\n```\n",
    "text of nobody": "```python\nprint('a')\n```\n\nBetween.\n\n```text\na\n```\n",
    "a language": "```rust\nfn main() {}\n```\n",
    "no language": "```\nx\n```\n",
    "a program that is not run": '```python title="a.py"\nx = 1\n```\n',
    "a program that fails": (
        '```python title="a.py"\nraise SystemExit(1)\n```\n\n```console\n$ python a.py\n```\n'
    ),
    "other output": (
        "```python title=\"a.py\"\nprint('a')\n```\n\n```console\n$ python a.py\nb\n```\n"
    ),
    "a rank that prints something else": (
        "<!-- runs on 2 ranks -->\n```python\nprint(1)\n```\n\n```text\n1\n2\n```\n"
    ),
    "status": "```console\n$ shardplug plan -n 1 -b 1 -w 0\n```\n",
    "another status": "```console\n$ shardplug plan -n 1 -b 1 -w 0\n$ echo $?\n1\n```\n",
    "a command": "```console\n$ rm x\n```\n",
    "an extra": "```console\n$ pip install '.[nothing]'\n```\n",
    "a target": "```console\n$ make nothing\n```\n",
    "configuration": "```yaml\na: [1\n```\n",
}


@pytest.mark.parametrize("kind", GOOD)
def test_what_is_true_passes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_text(tmp_path, monkeypatch, GOOD[kind])


@pytest.mark.parametrize("kind", BAD)
def test_what_is_not_true_fails(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((BlockError, AssertionError)):
        read_text(tmp_path, monkeypatch, BAD[kind])
