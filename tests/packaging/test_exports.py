"""What a package exports is sorted, there, and all that its users and the plug-ins need."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import shardplug

INTEGRATIONS = Path(__file__).parents[2] / "integrations"
FRAMEWORKS = {"shardplug_lightning": "lightning", "shardplug_ignite": "ignite"}


@pytest.fixture(params=["shardplug", *FRAMEWORKS])
def package(request: pytest.FixtureRequest) -> ModuleType:
    if request.param in FRAMEWORKS:
        pytest.importorskip(FRAMEWORKS[request.param])
    return importlib.import_module(request.param)


def _exported(package: ModuleType) -> list[str]:
    names: list[str] = getattr(package, "__all__", [])
    return names


def _order(name: str) -> tuple[bool, bool, str]:
    """Constants, then classes, then functions, as ruff sorts them."""
    return not name.isupper(), not name[0].isupper(), name


def test_exports_are_sorted_and_there(package: ModuleType) -> None:
    names = _exported(package)
    assert names == sorted(set(names), key=_order)
    assert [name for name in names if not hasattr(package, name)] == []


def test_what_is_not_exported_is_a_module_or_private(package: ModuleType) -> None:
    public = {
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    }
    assert public - {*_exported(package)} == set()


def test_what_is_exported_is_documented(package: ModuleType) -> None:
    exported = [getattr(package, name) for name in _exported(package)]
    callables = [each for each in exported if inspect.isclass(each) or inspect.isfunction(each)]
    assert [each.__name__ for each in callables if not each.__doc__] == []


def test_type_checkers_see_what_is_imported_when_it_is_asked_for() -> None:
    source = Path(shardplug.__file__).read_text(encoding="utf-8")
    seen = {
        alias.name: node.module
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
    }
    assert seen == {name: f"shardplug.{home}" for name, home in shardplug._HOMES.items()}
    assert {*seen} == {*_exported(shardplug)}
    assert {*seen} <= {*dir(shardplug)}


def test_a_name_that_is_not_exported() -> None:
    with pytest.raises(AttributeError, match="module 'shardplug' has no attribute 'gather_all'"):
        shardplug.gather_all  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'gather_all'"):
        from shardplug import gather_all  # type: ignore[attr-defined]  # noqa: F401


def _is_torch_needed(lines: str) -> bool:
    command = [sys.executable, "-c", f"import sys\n{lines}\nprint('torch' in sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=50)
    return done.stdout.endswith("True\n")


@pytest.mark.parametrize(
    ("lines", "is_needed"),
    [
        ("from shardplug import PlanError, Shard, ShardPlan, SoloComm, Split, StepOutcome", False),
        ("from shardplug.testing import run_ranks", False),
        ("from shardplug import *\nSkipBatchSampler", True),
    ],
)
def test_the_plan_rooms_are_entered_without_torch(lines: str, is_needed: bool) -> None:
    assert _is_torch_needed(lines) is is_needed


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "-n", "24", "-b", "2", "-w", "2", "--resume-at", "2"],
        ["--help"],
        ["check", "--help"],
    ],
)
def test_the_command_line_draws_and_helps_without_torch(arguments: list[str]) -> None:
    pytest.importorskip("typer")
    assert not _is_torch_needed(f"from shardplug.cli import main\nmain({arguments})")


def _taken_from_shardplug(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "shardplug":
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("plug_in", FRAMEWORKS)
def test_plug_ins_take_only_what_is_exported(plug_in: str) -> None:
    taken = {
        name
        for path in (INTEGRATIONS / plug_in).rglob("*.py")
        for name in _taken_from_shardplug(path.read_text(encoding="utf-8"))
    }
    assert taken <= {*_exported(shardplug)}
