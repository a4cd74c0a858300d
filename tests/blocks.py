"""Code blocks of Markdown pages: found, and run as a reader would run them.

What a page shows is run in the order of the page, in a folder and a scope of its own:

* ``python``: run, or, with ``>>>``, run as a doctest. A ``text`` block right behind one is what it
  prints.
* Any block with a ``title``: written to a file of that name, for a command further down.
* ``console``: each ``$ command`` is run, and what is below it is what it prints. ``...`` stands for
  anything. A command that does not end with status 0 has to be followed by ``$ echo $?``.
* ``yaml``: read; what configures a Trainer is built by LightningCLI.

A comment right before a block says where it runs: ``<!-- runs on 2 ranks -->`` gives it ranks with
a process group and a scope of their own, ``<!-- runs launched on 2 ranks -->`` those that torchrun
would start, and ``<!-- runs in the tests of README.md -->`` says that the same block is there: it
is compared with that, and not run again. Names that a page takes for granted are brought by a
function, its givens.
"""

from __future__ import annotations

import doctest
import importlib.util
import io
import os
import re
import shlex
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from shardplug import Comm, ShardplugWarning
from tests.launch import run_processes
from tests.programs import be_launched, meeting_place, run_program, set_variables

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 150.0

Scope = dict[str, Any]
Givens = Callable[[str], Scope]
"""Brings names that some code takes for granted."""

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}) *(?P<language>[\w+-]*)(?P<rest>.*)$")
_NOTE = re.compile(r"^\s*<!-- *(.+?) *-->\s*$")
_RANKS = re.compile(r"runs (?P<launched>launched )?on (?P<count>\d+) ranks?")
_INSTALL = re.compile(r"pip install (?:-e )?'?(?:\.|shardplug)(?:\[(?P<extras>[\w,]+)\])?'?")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    code: str
    title: str = ""
    note: str = ""
    follows: bool = False
    """Whether nothing but empty lines stands between it and the block before it."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is run where the tests of README.md are."""
        return self.note == "runs in the tests of README.md"

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page, also those inside of tabs and notes."""
    return blocks_in(page.read_text(encoding="utf-8"), page)


def blocks_in(text: str, page: Path) -> list[Block]:
    """The same, of the text of a page."""
    lines = text.splitlines()
    found: list[Block] = []
    at, note, follows = 0, "", False
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence is None:
            told = _NOTE.match(lines[at])
            if lines[at].strip():
                note, follows = (told[1] if told else ""), bool(told) and follows
            at += 1
            continue
        end = at + 1
        while lines[end].strip() != fence["ticks"]:
            end += 1  # an IndexError is a fence that is never closed
        width = len(fence["indent"])
        assert all(not line[:width].strip() for line in lines[at:end]), f"{page}:{at + 1}"
        title = re.search(r'title="([^"]+)"', fence["rest"])
        code = "".join(line[width:] + "\n" for line in lines[at + 1 : end])
        found.append(
            Block(page, at + 1, fence["language"], code, title[1] if title else "", note, follows)
        )
        at, note, follows = end + 1, "", True
    return found


# -- what blocks are run with ----------------------------------------------------------------------


class Noting(Dataset[tuple[Tensor, Tensor]]):
    """Data that notes what is read of it."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(index)
        return torch.full((3,), float(index)), torch.tensor(index % 2)


# The first divides by two ranks with batches of two, the second does not.
NUM_TRAIN, NUM_VAL = 16, 5


def of_a_plain_loop() -> Scope:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8),
        "loss_of": nn.functional.cross_entropy,
        "count_right_answers": lambda outputs, labels: None,
    }


def of_ignite() -> Scope:
    from ignite.engine import Engine

    return {
        "trainer": Engine(lambda engine, batch: None),
        "evaluator": Engine(lambda engine, batch: None),
    }


def of_lightning() -> Scope:
    from lightning.pytorch import LightningModule

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
            pass

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return {"model": Classifier()}


def run_block(comm: Comm, block: str, bring: Callable[[], Scope]) -> tuple[list[int], list[int]]:
    """What this rank reads of the data to train and to validate on when a block runs."""
    warnings.simplefilter("default")  # frameworks give advice
    warnings.simplefilter("error", ShardplugWarning)
    train_set, val_set = Noting(NUM_TRAIN), Noting(NUM_VAL)
    scope = {
        "train_loader": DataLoader(train_set, batch_size=2, shuffle=True),
        "val_loader": DataLoader(val_set, batch_size=2),
        **bring(),
    }
    exec(compile(block, "a block", "exec"), scope)
    return train_set.read, val_set.read


def run_block_as_launched(
    comm: Comm, block: str, bring: Callable[[], Scope]
) -> tuple[list[int], list[int]]:
    """The same where a framework is to believe that torchrun has started this rank."""
    set_variables(comm.rank, comm.world_size)
    return run_block(comm, block, bring)


def check_reads(by_rank: list[tuple[list[int], list[int]]], *, passes: tuple[int, int]) -> None:
    """Each sample was read once in each pass, and the ranks shared the work."""
    for place, size in enumerate((NUM_TRAIN, NUM_VAL)):
        reads = [each[place] for each in by_rank]
        assert Counter(chain.from_iterable(reads)) == dict.fromkeys(range(size), passes[place])
        assert all(reads)


def need(package: str, extra: str) -> None:
    """Skip without a package, unless SHARDPLUG_NO_SKIP says that it must be there.

    It is only looked for: importing it takes seconds, and changes the filters of warnings.
    """
    if importlib.util.find_spec(package) is None:
        say = pytest.fail if os.environ.get("SHARDPLUG_NO_SKIP") else pytest.skip
        say(f"needs shardplug[{extra}]")


# -- running ---------------------------------------------------------------------------------------


class BlockError(AssertionError):
    """What a page shows is not what happens."""


@dataclass
class Reader:
    """Someone who tries out all that a page shows, in an empty folder."""

    folder: Path
    bring: Givens
    scope: Scope = field(default_factory=dict)
    printed: str = ""
    files: dict[str, str] = field(default_factory=dict)
    status: int = 0

    def read(self, blocks: Sequence[Block]) -> None:
        """Run the blocks of a page; the working directory has to be the folder."""
        alone = [each.code for each in blocks if each.language == "python" and not each.note]
        self.scope = {"__name__": "__main__", **self.bring("".join(alone))}
        with quiet_frameworks(), no_group_afterwards():
            for block in blocks:
                try:
                    self.take(block)
                except Exception as error:
                    raise BlockError(f"{block.place}: {error}") from error
        unused = [name for name, place in self.files.items() if place]
        assert not unused, f"shown and never run: {unused}"

    def take(self, block: Block) -> None:
        """Run a block, or look at what it says."""
        if block.title:
            path = self.folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.code, encoding="utf-8")
            self.files[block.title] = block.place
        if block.language == "console":
            self.type_commands(block)
        elif block.language == "python" and not block.title:
            self.run_python(block)
        elif block.language == "yaml":
            self.build(block)
        elif block.language == "text" and block.follows:
            compare(block.code, self.printed)
        elif not block.title:
            raise BlockError(f"a block of kind {block.language or 'none'!r} that nothing can run")

    def run_python(self, block: Block) -> None:
        if block.is_elsewhere:
            assert block.code in [each.code for each in blocks_of(ROOT / "README.md")]
            return
        ranks = _RANKS.fullmatch(block.note)
        if ranks:
            count, source = int(ranks["count"]), (block.code, self.bring)
            if ranks["launched"]:
                with meeting_place() as port:
                    outputs = run_processes(count, run_source, *source, port, timeout_s=TIMEOUT_S)
            else:
                outputs = run_processes(count, run_source, *source, None, timeout_s=TIMEOUT_S)
            self.printed = "".join(outputs)
        elif ">>> " in block.code:
            self.run_doctest(block)
        else:
            out = io.StringIO()
            with redirect_stdout(out):
                exec(compile(block.code, block.place, "exec"), self.scope)
            self.printed = out.getvalue()

    def run_doctest(self, block: Block) -> None:
        test = doctest.DocTestParser().get_doctest(
            block.code, self.scope, block.place, str(block.page), block.line
        )
        assert test.examples
        out = io.StringIO()
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        if runner.run(test, out=out.write, clear_globs=False).failed:
            raise BlockError(out.getvalue())
        self.scope.update(test.globs)

    def build(self, block: Block) -> None:
        import yaml

        content = yaml.safe_load(block.code)
        assert isinstance(content, dict), "a mapping is expected"
        if "trainer" not in content:
            return
        from lightning.pytorch.cli import LightningCLI
        from lightning.pytorch.demos.boring_classes import BoringModel

        path = self.folder / (block.title or "config.yaml")
        path.write_text(block.code, encoding="utf-8")
        self.files.pop(path.name, None)
        model = self.scope.get("cli_model", BoringModel)
        cli = LightningCLI(model, run=False, args=["--config", str(path)])
        self.scope["trainer"] = cli.trainer

    # -- commands --

    def type_commands(self, block: Block) -> None:
        parts = re.split(r"^\$ ", block.code, flags=re.MULTILINE)
        assert not parts[0], "a block of commands starts with $"
        for part in parts[1:]:
            command, _, expected = re.sub(r"\\\n\s*", "", part).partition("\n")
            self.type(command.strip(), expected)
        assert self.status == 0, f"ended with status {self.status}, and nobody asked"

    def type(self, command: str, expected: str) -> None:
        if command == "echo $?":
            compare(expected, f"{self.status}\n")
            self.status = 0
            return
        assert self.status == 0, f"ended with status {self.status}, and nobody asked"
        program, *words = shlex.split(command)
        if program == "make":
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            assert re.search(rf"^{words[0]}:", makefile, flags=re.MULTILINE), command
            assert not expected, "what make prints is not looked at"
            return
        if program == "pip":
            check_install(command)
            assert not expected, "what pip prints is not looked at"
            return
        if program == "shardplug":
            self.status, out = self.type_shardplug(words)
            compare(expected, out)
            return
        ranks, words = ranks_of(program, words)
        outputs = self.start(ranks, words)
        if "rank 1" in expected or ranks > 1:  # ranks print when they like
            compare(in_order(expected), in_order("".join(outputs)))
        else:
            compare(expected, outputs[0])

    def type_shardplug(self, words: Sequence[str]) -> tuple[int, str]:
        from shardplug.cli import main

        for word in words:
            self.files.pop(word.partition(":")[0], None)
        out, before = io.StringIO(), dict(os.environ)
        os.environ["COLUMNS"] = "100"
        try:
            with redirect_stdout(out), redirect_stderr(out):
                status = main(words)
        finally:
            os.environ.clear()
            os.environ.update(before)
        return status, out.getvalue()

    def start(self, ranks: int, words: Sequence[str]) -> list[str]:
        """Run a program on ranks that are processes; return what each printed."""
        name, *arguments = words
        path = self.folder / name
        if name.startswith("examples/"):
            path = ROOT / name
        self.files.pop(name, None)
        assert path.exists(), f"there is no {name}"
        ended = run_program(
            path, *arguments, folder=self.folder, num_ranks=ranks, timeout_s=TIMEOUT_S
        )
        for each in ended:
            if each.status or "ShardplugWarning" in each.err:
                raise BlockError(f"ended with {each.status}:\n{each.out}\n{each.err}")
        return [each.out for each in ended]


def ranks_of(program: str, words: Sequence[str]) -> tuple[int, list[str]]:
    """How many ranks a command starts, and the program and its arguments."""
    if program == "python":
        return 1, list(words)
    assert program == "torchrun", f"a command that nothing can run: {program}"
    assert words[0] == "--nproc-per-node", "torchrun is told the number of ranks first"
    return int(words[1]), list(words[2:])


def check_install(command: str) -> None:
    found = _INSTALL.fullmatch(command)
    assert found, f"not a way to install shardplug: {command}"
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extra in filter(None, (found["extras"] or "").split(",")):
        assert re.search(rf"^{extra} = \[", project, flags=re.MULTILINE), f"no extra {extra}"


def compare(expected: str, got: str) -> None:
    """Compare what is shown, if anything, with what was printed; ``...`` stands for anything."""
    wanted, found = cleaned(expected), cleaned(got)
    if not wanted:
        return
    pattern = ".*?".join(re.escape(piece) for piece in wanted.split("..."))
    if not re.fullmatch(pattern, found, flags=re.DOTALL):
        raise BlockError(f"shown:\n{wanted}\nprinted:\n{found}")


def cleaned(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def in_order(text: str) -> str:
    return "\n".join(sorted(line for line in text.splitlines() if line.strip()))


def run_source(comm: Comm, source: str, bring: Givens, port: int | None) -> str:
    """Run a block on a rank, with a scope of its own, and return what it prints."""
    if port is not None:
        be_launched(comm, port)
    with quiet_frameworks(), everything_printed() as printed:
        exec(compile(source, "a block", "exec"), {"__name__": "__main__", **bring(source)})
    return printed[0]


@contextmanager
def everything_printed() -> Iterator[list[str]]:
    """Collect what this process and those that it forks print; it is there at the end."""
    printed: list[str] = []
    sys.stdout.flush()
    before = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            with (
                open(1, "w", encoding="utf-8", buffering=1, closefd=False) as stream,
                redirect_stdout(stream),
            ):
                yield printed
        finally:
            os.dup2(before, 1)
            os.close(before)
        file.seek(0)
        printed.append(file.read().decode())


@contextmanager
def no_group_afterwards() -> Iterator[None]:
    """End the process group of one rank that a framework may have started."""
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def quiet_frameworks() -> Iterator[None]:
    """Let frameworks give advice, and shardplug none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", ShardplugWarning)
        yield
