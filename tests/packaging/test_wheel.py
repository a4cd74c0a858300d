"""The wheel has the three packages, typed, and nothing else, and imports where it is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "shardplug": ROOT / "src" / "shardplug",
    "shardplug_ignite": ROOT / "integrations" / "shardplug_ignite",
    "shardplug_lightning": ROOT / "integrations" / "shardplug_lightning",
}
FRAMEWORKS = {
    "shardplug": "torch",
    "shardplug_ignite": "ignite",
    "shardplug_lightning": "lightning",
}
PROGRAM = """
import importlib, sys
for name in sys.argv[1:]:
    print(importlib.import_module(name).__file__)
"""


def _run(command: Sequence[str], **options: object) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        **options,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    _run(["-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=ROOT)
    (built,) = folder.iterdir()
    return built


def test_the_wheel_has_every_file_of_the_packages_and_no_other(wheel: Path) -> None:
    expected = {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {f"{name}/py.typed" for name in PACKAGES} < expected
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == expected


def test_the_metadata_names_licence_python_and_requirements(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().splitlines()
        licences = [each for each in archive.namelist() if each.endswith("/LICENSE")]
    assert len(licences) == 1
    assert {"Name: shardplug", "Requires-Python: >=3.10", "License-Expression: Apache-2.0"} <= set(
        lines
    )
    required = [line.split(": ")[1] for line in lines if line.startswith("Requires-Dist: ")]
    assert sorted(each for each in required if "extra ==" not in each) == [
        "torch>=2.6",
        "torchdata>=0.11",
    ]


def test_the_installed_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    options = ["--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", "-q"]
    _run(["-m", "pip", "install", *options, "--target", str(target), str(wheel)])
    names = [name for name in PACKAGES if importlib.util.find_spec(FRAMEWORKS[name])]
    found = _run(
        ["-c", PROGRAM, *names], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(target)}
    )
    assert found.splitlines() == [str(target / name / "__init__.py") for name in names]
