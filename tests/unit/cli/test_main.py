"""The command line as a whole: what it takes, what it refuses, and that its help is true."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import shardplug.cli.app as app_module
import shardplug.cli.checking as checking_module
from shardplug import prepare_data_loader
from shardplug.cli import exit_with_status, main
from shardplug.cli.checking import Plea
from shardplug.cli.refusal import one_line
from shardplug.cli.targets import find_factory
from shardplug.cli.trial import Conditions, try_out
from tests.unit.cli import loaders

ROOT = Path(__file__).parents[3]
LOADERS = "tests.unit.cli.loaders"
HELP = {"plan": app_module.PLAN_HELP, "check": app_module.CHECK_HELP}
EXAMPLES = [
    line.strip()
    for text in HELP.values()
    for line in text.splitlines()
    if line.strip().startswith("shardplug ")
]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that is printed for what cannot be carried out."""
    status = main(arguments)
    out, err = capsys.readouterr()
    assert (status, out) == (2, ""), err
    assert err.startswith("shardplug: ")
    assert err.count("\n") == 1
    return err


# -- help --


@pytest.mark.parametrize("line", EXAMPLES)
def test_what_the_help_shows_runs_when_pasted(
    capsys: pytest.CaptureFixture[str], line: str
) -> None:
    status = main(shlex.split(line)[1:])
    out, err = capsys.readouterr()
    assert err == ""
    assert status == (1 if ":unsharded" in line else 0)
    assert out


def test_what_the_readme_shows_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```console\n\$ (.*?)^```$", text, re.MULTILINE | re.DOTALL)
    command, _, expected = shown.partition("\n")
    assert main(shlex.split(command)[1:]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[: len(expected.splitlines())] == expected.splitlines()


def test_examples_fit_a_narrow_terminal_on_one_line() -> None:
    assert max(map(len, EXAMPLES)) <= 74


def test_there_are_examples_of_both() -> None:
    assert {line.split()[1] for line in EXAMPLES} == {"plan", "check"}
    assert len(EXAMPLES) >= 7


@pytest.mark.parametrize("command", ["plan", "check"])
def test_the_help_is_printed(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Examples, each can be pasted:" in out
    assert "--world-size" in out


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert {"plan", "check"} <= set(capsys.readouterr().out.split())


def test_the_program_is_installed_as_a_script() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^\[project.scripts\]\nshardplug = "(.+):(.+)"$', text, re.MULTILINE)
    assert found is not None
    assert callable(getattr(importlib.import_module(found[1]), found[2]))


@pytest.mark.slow
def test_it_runs_as_a_module() -> None:
    line = "-m shardplug.cli plan --samples 3 --batch-size 2 --world-size 0"
    done = subprocess.run(
        [sys.executable, *line.split()],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        cwd=ROOT,
    )
    expected = "shardplug: `--world-size` must be at least 1, got 0.\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_does_no_harm() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run_program("plan -n 99999 -b 2 -w 99 --json", stdout=writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.slow
def test_letters_that_a_terminal_does_not_know_do_no_harm() -> None:
    done = run_program("check --help", stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()
    assert b"Usage: shardplug check" in done.stdout


def run_program(line: str, stdout: int) -> subprocess.CompletedProcess[bytes]:
    """Run it as people do, in a terminal that knows ASCII only."""
    return subprocess.run(
        [sys.executable, "-m", "shardplug.cli", *line.split()],
        stdout=stdout,
        stderr=subprocess.PIPE,
        check=False,
        timeout=50,
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "80"},
    )


# -- without the extras --


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_says_which_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert "pip install 'shardplug[cli]'" in refused(capsys, "plan", "--help")


def test_without_matplotlib_a_plot_says_which_extra_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    line = f"plan --samples 3 --batch-size 2 --world-size 2 --plot {tmp_path}/plan.png"
    assert "pip install 'shardplug[plot]'" in refused(capsys, *line.split())


# -- what cannot be checked --

BAD = [
    ("nothing", "TARGET must be MODULE:FACTORY or path/to/file.py:FACTORY, got 'nothing'."),
    ("shardplug.cli.attic:f", "there is no 'shardplug.cli.attic' here or installed"),
    ("attic:f", "there is no 'attic' here or installed. Start in the folder that it is in"),
    ("attic/loaders.py:f", "TARGET must name a file that is there, got 'attic/loaders.py'."),
    (f"{LOADERS}:attic", "got 'attic'. It has numbers, shuffled_by_each,"),
    (f"{LOADERS}:A_NUMBER", "got 'A_NUMBER', which is of type int."),
    (f"{LOADERS}:raising", "raising() failed on rank 0: FileNotFoundError: no such folder"),
    (f"{LOADERS}:exiting", "exiting() failed on rank 0: SystemExit: 3"),
    (f"{LOADERS}:not_a_loader", "DataLoader or a LightningDataModule, got list."),
    (f"{LOADERS}:own_stateful", "with the __iter__ of StatefulDataLoader, got OwnStateful."),
    (f"{LOADERS}:prepared", "before it is prepared, got a DataLoaderShard."),
    (f"{LOADERS}:shuffled --epochs 0", "`--epochs` must be at least 1, got 0."),
    (f"{LOADERS}:shuffled --world-size 0", "`--world-size` must be at least 1, got 0."),
    (f"{LOADERS}:shuffled --max-batches 0", "`--max-batches` must be at least 1, got 0."),
    (f"{LOADERS}:shuffled --allow x", "`--allow` must be one of unsharded, twice, "),
    (f"{LOADERS}:shuffled --as-is --tail drop", "would do (tail='drop')."),
    (f"{LOADERS}:shuffled --no-set-epoch", "`--no-set-epoch` needs --as-is"),
    (f"{LOADERS}:shuffled --split-batches --world-size 3", "must be a multiple of the 3 shards"),
    (f"{LOADERS}:stream --dispatch --already-sharded", "`already_sharded` must be False or None"),
    (f"{LOADERS}:shuffled --loader all", "'all' is not one of 'train', 'val'"),
    (".loaders:shuffled", "TARGET must be MODULE:FACTORY or path/to/file.py:FACTORY, got '.loa"),
    (f"{LOADERS}:needy", "arguments: 'path' and 'size'. Let it run alone first."),
    (f"{LOADERS}:odd_start", "odd_start() failed on rank 0: OfNobody: never mind. Let it run"),
    (
        f"{LOADERS}:asynchronous",
        "asynchronous() must return one torch.utils.data.DataLoader or a LightningDataModule, got "
        "coroutine. Write a function without async",
    ),
    (
        f"{LOADERS}:Several --loader val",
        "Several().val_dataloader() must return one torch.utils.data.DataLoader or a "
        "LightningDataModule, got list. Write a function that returns one of them, and check each",
    ),
    (f"{LOADERS}:Several --loader test", "Several().test_dataloader() must return one"),
    (f"{LOADERS}:Several --loader predict", "got coroutine. Write a function without async"),
    (
        f"{LOADERS}:broken_alone --as-is --allow twice",
        "Reading the stream in a single process failed: SystemExit: 4. Let it run alone first.",
    ),
    (
        f"{LOADERS}:shuffled --max-batches 99999999999999999999999",
        "`--max-batches` must be at most 9223372036854775807, got 99999999999999999999999.",
    ),
    (
        f"{LOADERS}:shuffled --epochs 99999999999999999999999",
        "`--epochs` must be at most 9223372036854775807, got 99999999999999999999999.",
    ),
    (
        f"{LOADERS}:shuffled --world-size 999999999999",
        "`--world-size` must be at most 4096, got 999999999999. Each rank is a thread",
    ),
]


@pytest.mark.parametrize(("line", "words"), BAD)
def test_bad_input_gives_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    size = [] if "--world-size" in line else ["--world-size", "2"]
    assert words in refused(capsys, "check", *line.split(), *size)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import attic_of_theirs", "failed: ModuleNotFoundError: No module named 'attic_of_"),
        ("1 / 0", "failed: ZeroDivisionError: division by zero"),
        ("raise SystemExit(1)", "failed: SystemExit: 1"),
        ("def f(:", "failed: SyntaxError: "),
        ("LOADER = 1", "It has no functions."),
    ],
)
def test_a_module_that_cannot_be_imported_says_why(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    text: str,
    words: str,
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    path = tmp_path / "broken_loaders.py"
    path.write_text(text, encoding="utf-8")
    options = ["--world-size", "2"]
    assert words in refused(capsys, "check", f"{path}:f", *options)
    assert words in refused(capsys, "check", "broken_loaders:f", *options)


def test_a_file_called_like_a_module_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "typer.py"
    path.write_text("def f(): ...", encoding="utf-8")
    error = refused(capsys, "check", f"{path}:f", "--world-size", "2")
    assert "not called like another module" in error


def test_an_error_is_put_on_one_line() -> None:
    assert one_line(ValueError("a\n  b")) == "ValueError: a b"
    assert one_line(ValueError()) == "ValueError"
    raised = (
        'A:\n\nTraceback (most recent call last):\n  File "a", line 1, in f\n    g()\n    ^^^\n'
    )
    other = '\nDuring handling:\n\nTraceback (most recent call last):\n  File "b", line 2, in h\n'
    for text in (raised, raised + "KeyError: 1\n" + other * 30):
        assert one_line(OSError(text + "ValueError: b\n  c\n")) == "OSError: A: ValueError: b c"
    assert one_line(ValueError("x" * 1000)) == "ValueError: " + "x" * 497 + "..."


def test_ctrl_c_ends_it_with_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(plea: Plea) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(checking_module, "check", interrupted)
    assert main(["check", f"{LOADERS}:shuffled", "--world-size", "2"]) == 130
    assert capsys.readouterr().err.split() == ["shardplug:", "stopped", "by", "Ctrl-C."]


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_more_ranks_than_there_are_threads_for_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    start = threading.Thread.start
    started: list[str] = []

    def start_few(thread: threading.Thread) -> None:
        if thread.name.startswith("shardplug-rank"):
            started.append(thread.name)
            if len(started) > 2:
                raise error
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_few)
    text = refused(capsys, "check", f"{LOADERS}:shuffled", "--world-size", "4")
    assert "have a thread of this process, got 4: " in text
    assert text.endswith(". Try fewer ranks.\n")
    assert len(started) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "plan -n 9 -b 2 -w 2",
        "plan -n 99999 -b 2 -w 99 --json",
        "check --help",
        "check shardplug.cli.samples:shuffled -w 2",
    ],
)
def test_output_that_cannot_be_written_gives_one_line(line: str) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        done = run_program(line, stdout=full)
    finally:
        os.close(full)
    text = "shardplug: The output cannot be written: "
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1), done.stderr
    assert done.stderr.decode().startswith(text)
    assert b"No space left on device." in done.stderr


def test_output_that_is_closed_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "argv", ["shardplug", "plan", "-n", "9", "-b", "2", "-w", "2"])
    with pytest.raises(SystemExit) as ended:
        exit_with_status()
    assert ended.value.code == 0
    sys.stdout.close()


# -- targets --


def test_a_file_will_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    path = tmp_path / "loaders_of_mine.py"
    path.write_text(
        "import torch\n"
        "class Made:\n"
        "    @staticmethod\n"
        "    def loader():\n"
        "        return torch.utils.data.DataLoader(range(9), batch_size=2)\n",
        encoding="utf-8",
    )
    assert main(["check", f"{path}:Made.loader", "--world-size", "2"]) == 0
    assert "9 real rows, 3 padding" in capsys.readouterr().out


def test_a_factory_is_told_rank_and_world_size_if_it_asks() -> None:
    factory = find_factory(f"{LOADERS}:distributed", "train")
    sampler: Any = factory(1, 3).sampler
    assert (sampler.rank, sampler.num_replicas) == (1, 3)


def test_the_loader_of_a_module_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"check {LOADERS}:Module --world-size 2 --loader val"
    assert main(line.split()) == 1
    assert "FAULT  never" in capsys.readouterr().out


@pytest.mark.slow
def test_a_real_data_module(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="needs shardplug[lightning]")

    class RealModule(lightning.LightningDataModule):  # type: ignore[misc, name-defined]
        def train_dataloader(self) -> DataLoader[Any]:
            return loaders.shuffled()

    monkeypatch.setattr(loaders, "RealModule", RealModule, raising=False)
    assert main(f"check {LOADERS}:RealModule --world-size 2".split()) == 0
    assert "ok: no fault found." in capsys.readouterr().out


# -- trials --


def test_a_fault_that_is_meant_so_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"check {LOADERS}:with_gaps --world-size 2 --allow never"
    assert main(line.split()) == 0
    out = capsys.readouterr().out
    assert "allowed  never" in out
    assert "ok: no fault found." in out


def test_an_endless_loader_is_left_after_so_many_batches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for options in ("", "--as-is --allow unsharded"):
        line = f"check {LOADERS}:endless --world-size 2 --max-batches 3 {options}"
        assert main(line.split()) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "epoch 1 3 steps per rank, 12 real rows, left early, by --max-batches" in out


@pytest.mark.parametrize(("count", "words"), [(1, "on 1 rank\n"), (2, "on 2 ranks\n")])
def test_a_loader_without_batches_is_not_called_sound(
    capsys: pytest.CaptureFixture[str], count: int, words: str
) -> None:
    assert main(f"check {LOADERS}:empty --world-size {count}".split()) == 0
    out = capsys.readouterr().out
    assert f"{LOADERS}:empty {words}" in out
    assert "nothing to check: no rank has read a batch" in out
    assert "ok" not in out.split()


def test_what_is_warned_of_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    main(f"check {LOADERS}:warning --world-size 2".split())
    assert "warned  this is old" in capsys.readouterr().out


def test_a_trial_leaves_the_loader_and_the_generators_as_they_were() -> None:
    data: Any = torch.arange(12)
    loader: DataLoader[Any] = DataLoader(data, batch_size=2, shuffle=True)
    before = dict(vars(loader))
    state = torch.get_rng_state()
    told: list[tuple[int, int | None]] = []
    for options in (None, {"split_batches": False}):
        trial = try_out(
            lambda rank, world_size: loader,
            Conditions(2, options=options),
            lambda *counts: told.append(counts),
        )
        assert trial.failure is None
        assert all(len(logs) == 2 for logs in trial.logs)
    assert vars(loader) == before
    assert torch.equal(torch.get_rng_state(), state)
    # Two ranks, two passes of six batches each as it is, of three each prepared.
    assert [told[at][1] for at in (0, 30)] == [24, 12]
    assert [done for done, _ in told] == [*range(1, 25), *range(1, 13)]


def test_prepared_in_a_trial_a_loader_sees_what_it_sees_prepared_elsewhere() -> None:
    data: Any = torch.arange(21)

    def loader() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(4)
        return DataLoader(data, batch_size=2, shuffle=True, generator=generator)

    trial = try_out(lambda rank, world_size: loader(), Conditions(3, options={"tail": "exact"}))
    for rank, logs in enumerate(trial.logs):
        prepared = prepare_data_loader(loader(), num_processes=3, process_index=rank, tail="exact")
        for log in logs:
            assert log.tags[:, 0].tolist() == torch.cat(list(prepared)).tolist()
            assert log.num_steps == log.length == len(prepared)
