"""The walls between the modules stand, and each is one that falls over when it is crossed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("importlinter", reason="needs import-linter")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")

ROOMS = "Imports of the core point down"
PLAN = "Imports inside the plan point down"
PURE = "Plan, comm, errors, kinds and testing know neither torch nor numpy"
NO_FRAMEWORK = "The core names no framework and no plug-in"
PLUG_INS = "Plug-ins do not know each other"
FRONT_DOOR = "Plug-ins import shardplug through its front door"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to plant faults in."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ("src", "integrations"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def _verdicts(tree: Path) -> dict[str, str]:
    """Lint the tree, not what is installed; return KEPT or BROKEN by contract."""
    done = subprocess.run(
        [LINT_IMPORTS, "--no-cache", "--no-logo"],
        cwd=tree,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(("src", "integrations")),
            "COLUMNS": "200",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    found = re.findall(r"^(.+?) (KEPT|BROKEN)", done.stdout, flags=re.MULTILINE)
    assert found, done.stdout + done.stderr
    return dict(found)


def test_all_walls_stand(tree: Path) -> None:
    everywhere = dict.fromkeys((ROOMS, PLAN, PURE, NO_FRAMEWORK, PLUG_INS, FRONT_DOOR), "KEPT")
    assert _verdicts(tree) == everywhere


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("src/shardplug/errors.py", "import shardplug.comm", ROOMS),
        ("src/shardplug/plan/shard.py", "import shardplug.comm", ROOMS),
        ("src/shardplug/attic.py", "", ROOMS),
        ("src/shardplug/plan/shard.py", "import shardplug.plan.split", PLAN),
        ("src/shardplug/plan/attic.py", "", PLAN),
        ("src/shardplug/plan/shard.py", "def f() -> None:\n    import torch", PURE),
        ("src/shardplug/comm.py", "import numpy", PURE),
        ("src/shardplug/comm_torch.py", "from lightning import Trainer", NO_FRAMEWORK),
        ("src/shardplug/comm_torch.py", "def f() -> None:\n    import accelerate", NO_FRAMEWORK),
        ("integrations/shardplug_ignite/attic.py", "import shardplug_lightning", PLUG_INS),
        ("integrations/shardplug_ignite/attic.py", "import shardplug.errors", FRONT_DOOR),
        ("integrations/shardplug_lightning/attic.py", "from shardplug import errors", FRONT_DOOR),
    ],
)
def test_a_planted_fault_breaks_its_wall_and_no_other(
    tree: Path, file: str, line: str, broken: str
) -> None:
    path = tree / file
    before = path.read_text(encoding="utf-8") if path.exists() else None
    path.write_text(f"{before or ''}\n{line}\n", encoding="utf-8")
    try:
        verdicts = _verdicts(tree)
    finally:
        path.unlink() if before is None else path.write_text(before, encoding="utf-8")
    assert [name for name, verdict in verdicts.items() if verdict == "BROKEN"] == [broken]
