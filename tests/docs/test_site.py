"""The documentation builds strictly, names all that is public, and needs nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.blocks import ROOT, need

DOCS = ROOT / "docs"
REFERENCE = {
    page.name: page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md")
}
PACKAGES = {
    "shardplug": ("torch", "test"),
    "shardplug_lightning": ("lightning", "lightning"),
    "shardplug_ignite": ("ignite", "ignite"),
}
OF_TESTING = {"run_ranks", "LockstepComm", "Call"}

# -- the reference --


def documented(package: str) -> list[str]:
    """The names of a package that the reference has an entry for."""
    text = "\n".join(REFERENCE.values())
    return re.findall(rf"^::: {package}\.(\w+)$", text, flags=re.MULTILINE)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_has_every_public_name_once(package: str) -> None:
    need(*PACKAGES[package])
    assert sorted(documented(package)) == sorted(importlib.import_module(package).__all__)


def test_it_has_what_tests_of_users_need() -> None:
    assert set(documented("shardplug.testing")) == OF_TESTING


@pytest.mark.parametrize("package", PACKAGES)
def test_members_that_it_names_are_there(package: str) -> None:
    need(*PACKAGES[package])
    module = importlib.import_module(package)
    chosen = re.findall(
        rf"^::: {package}\.(\w+)\n    options:\n(?:      inherited.*\n)?      members: \[(.+)\]$",
        "\n".join(REFERENCE.values()),
        flags=re.MULTILINE,
    )
    assert chosen
    for name, members in chosen:
        for member in members.split(", "):
            assert member in dir(getattr(module, name)), f"{name}.{member}"


def test_its_overview_lists_every_page_and_name_of_the_core() -> None:
    overview = REFERENCE["index.md"]
    assert set(re.findall(r"\]\((\w+\.md)\)", overview)) == set(REFERENCE) - {"index.md"}
    for page, text in REFERENCE.items():
        names = re.findall(r"^::: shardplug\.(?:testing\.)?(\w+)$", text, flags=re.MULTILINE)
        if page != "errors.md":  # "and its kin"
            assert all(f"`{name}`" in overview for name in names), page


# -- tables --


def first_column(page: str, heading: str) -> list[str]:
    """The names in the first column of the table under a heading."""
    text = (DOCS / page).read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    section = re.split(rf"^#+ {re.escape(heading)}$", text, flags=re.MULTILINE)[1]
    table = re.search(r"^\|.*?(?=^$|\Z)", section, flags=re.MULTILINE | re.DOTALL)
    assert table is not None
    cells = [row.split("|")[1] for row in table[0].splitlines()[2:]]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_the_table_of_lightning_has_every_option() -> None:
    need("lightning", "lightning")
    from shardplug_lightning import ShardOptions

    assert first_column("lightning.md", "Options") == list(ShardOptions.names())


def test_the_table_of_ignite_has_every_option() -> None:
    need("ignite", "ignite")
    import inspect

    from shardplug_ignite import ShardHandler

    assert first_column("ignite.md", "Options") == list(inspect.signature(ShardHandler).parameters)


def test_the_table_of_axes_has_every_name() -> None:
    from shardplug.plan.shard import DATA_AXES, MODEL_AXES

    text = (DOCS / "meshes.md").read_text(encoding="utf-8")
    for kind, axes in (("data axes", DATA_AXES), ("model axes", MODEL_AXES)):
        row = re.search(rf"^\| {kind}.*\| (.*) \|$", text, flags=re.MULTILINE)
        assert row is not None
        assert set(re.findall(r"`(\w+)`", row[1])) == axes


def test_the_tables_of_the_commands_have_every_option_and_fault() -> None:
    need("typer", "cli")
    import typer

    from shardplug.cli.app import app
    from shardplug.cli.kinds import KINDS

    assert first_column("command-line.md", "What it finds") == list(KINDS)
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # it is a group
    for name, heading in (("plan", "Look at a plan"), ("check", "Options")):
        told = set(re.findall(r"--[\w-]+", " ".join(first_column("command-line.md", heading))))
        for option in commands[name].params:
            if option.param_type_name == "option":
                assert told & {*option.opts, *option.secondary_opts}, option.name


# -- the site --

needs_tools = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="the tools of the documentation need Python 3.11"
)


@needs_tools
def test_a_picture_that_cannot_be_drawn_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    for package in ("mkdocs", "typer", "matplotlib"):
        need(package, "docs")
    from mkdocs.exceptions import PluginError

    spec = importlib.util.spec_from_file_location("pictures_hook", DOCS / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    assert hook.draw("plan -n 3 -b 2 -w 1 --plot a.svg", "a.svg").startswith(b"<?xml")
    message = "`shardplug plan -n 3 -b 2 -w 0 --plot a.svg` ended with status 2."
    with pytest.raises(PluginError, match=re.escape(message)):
        hook.draw("plan -n 3 -b 2 -w 0 --plot a.svg", "a.svg")
    assert "`--world-size`" in capfd.readouterr().err


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("material", "mkdocstrings", "typer", "matplotlib", "lightning", "ignite"):
        need(package, "docs")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (built.returncode, built.stderr) == (0, "")
    return folder


@needs_tools
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_it_builds_with_no_warning_and_fetches_nothing(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    fetched = re.compile(r'(?:src|srcset)="(?:https?:)?//|<link[^>]+href="(?:https?:)?//[^"]*"')
    for page in pages:
        found = fetched.findall(page.read_text(encoding="utf-8"))
        # What search engines are told is not fetched.
        assert [each for each in found if "canonical" not in each] == [], page
    for style in site.rglob("*.css"):
        assert "url(http" not in style.read_text(encoding="utf-8"), style


@needs_tools
@pytest.mark.slow
def test_pictures_are_drawn_beside_the_page_that_shows_the_command(site: Path) -> None:
    for picture in ("whole", "slice", "pad", "drop", "exact", "uneven", "shuffled", "resumed"):
        assert (site / f"{picture}.svg").read_bytes().startswith(b"<?xml"), picture
    assert not list(site.rglob("*.py"))


@needs_tools
@pytest.mark.slow
def test_names_have_anchors_and_examples_are_code(site: Path) -> None:
    plan = (site / "reference" / "plan.html").read_text(encoding="utf-8")
    assert 'id="shardplug.ShardPlan.seek"' in plan
    assert 'href="#shardplug.Shard"' in plan
    assert "&gt;&gt;&gt; <" in plan or 'class="gp">&gt;&gt;&gt;' in plan
    assert "<blockquote>" not in plan


@needs_tools
@pytest.mark.slow
def test_each_language_points_to_the_other(site: Path) -> None:
    english, chinese = (site / "index.html", site / "zh" / "index.html")
    assert 'hreflang="zh-Hans"' in english.read_text(encoding="utf-8")
    text = chinese.read_text(encoding="utf-8")
    assert 'hreflang="en"' in text
    assert 'href="../index.html"' in text
    assert '<html lang="zh-Hans"' in text
    assert '<html lang="en"' in english.read_text(encoding="utf-8")
