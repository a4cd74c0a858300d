"""The commands, their options and their help."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from shardplug.cli.drawing import as_json, draw
from shardplug.cli.kinds import KINDS
from shardplug.cli.outline import Request, number
from shardplug.cli.picture import save_picture
from shardplug.cli.refusal import Refusal, one_line, sentence
from shardplug.errors import ShardplugError
from shardplug.plan.split import Split, choose_tail

app = typer.Typer(
    name="shardplug",
    add_completion=False,
    pretty_exceptions_enable=False,
    help="See which rank reads which sample, when, and find out what is wrong with a loader.",
)


class TailName(str, enum.Enum):
    """What happens at an uneven end, as it is written on the command line."""

    pad = "pad"
    drop = "drop"
    uneven = "uneven"
    exact = "exact"


class SyncOrder(str, enum.Enum):
    """What ranks do about orders that are not a function of seed and epoch."""

    agree = "agree"
    broadcast = "broadcast"


class LoaderName(str, enum.Enum):
    """Which loader of a LightningDataModule is meant."""

    train = "train"
    val = "val"
    test = "test"
    predict = "predict"


SplitOption = Annotated[
    bool, typer.Option("--split-batches", help="Cut each batch; else ranks get whole ones.")
]
EvenOption = Annotated[
    bool,
    typer.Option(
        "--even-batches/--no-even-batches",
        help="Pad, so that all ranks take as many full steps; or let some take one step less.",
    ),
]
TailOption = Annotated[
    TailName | None,
    typer.Option(help="What happens at an uneven end; wins over --even-batches and drop_last."),
]


def _flowing(text: str) -> str:
    """Put each paragraph on one line, for the terminal to break; examples stay as they are."""
    paragraphs = text.strip().split("\n\n")
    return "\n\n".join(
        each if each.startswith(" ") else " ".join(each.split()) for each in paragraphs
    )


PLAN_HELP = _flowing("""Draw which rank reads which sample in which step.

Padding is marked with +, what is dropped with x. Of a large epoch the first and last ranks and
steps are shown; it is drawn by formula, so any size is there at once.

Examples, each can be pasted:

    shardplug plan --samples 103 --batch-size 8 --world-size 4

    shardplug plan --samples 103 --batch-size 8 --world-size 4 --shuffle 7

    shardplug plan -n 24 -b 2 -w 2 --resume-at 2 --new-world-size 3

    shardplug plan --samples 1000000000000 --batch-size 32 --world-size 99999
""")


@app.command("plan", help=PLAN_HELP)
def plan_command(
    *,
    samples: Annotated[int, typer.Option("--samples", "-n", help="Samples in an epoch.")],
    batch_size: Annotated[
        int, typer.Option("--batch-size", "-b", help="Batch size, as the loader has it.")
    ],
    world_size: Annotated[
        int, typer.Option("--world-size", "-w", help="Number of ranks that share the data.")
    ],
    split_batches: SplitOption = False,
    even_batches: EvenOption = True,
    tail: TailOption = None,
    drop_last: Annotated[
        bool, typer.Option("--drop-last", help="The loader has drop_last=True.")
    ] = False,
    dispatch: Annotated[
        bool, typer.Option("--dispatch", help="Rank 0 reads for all; says who reads, not what.")
    ] = False,
    shuffle: Annotated[
        int | None, typer.Option(metavar="SEED", help="Shuffle, with this seed.")
    ] = None,
    epoch: Annotated[
        int | None, typer.Option(help="The epoch to shuffle for, 0 if left out.")
    ] = None,
    resume_at: Annotated[
        int | None, typer.Option(metavar="STEP", help="Stop after so many steps, and go on.")
    ] = None,
    new_world_size: Annotated[
        int | None, typer.Option(help="Ranks after the stop; as before if left out.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw a picture too, into a file .png or .svg.")
    ] = None,
    as_json_text: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Draw a plan."""
    _at_least("--samples", samples, 0)
    _at_least("--batch-size", batch_size, 1)
    _at_least("--world-size", world_size, 1)
    _at_least("--epoch", epoch, 0)
    _at_least("--new-world-size", new_world_size, 1)
    if epoch is not None and shuffle is None:
        raise Refusal("`--epoch` needs --shuffle SEED: without a shuffle all epochs are alike.")
    if new_world_size is not None and resume_at is None:
        raise Refusal("`--new-world-size` needs --resume-at STEP, which says when it changes.")
    mode = choose_tail(
        None if tail is None else tail.value, even_batches=even_batches, drop_last=drop_last
    )
    split = Split.SLICE if split_batches else Split.WHOLE
    legs = Request(samples, batch_size, world_size, split, mode).legs(resume_at, new_world_size)
    numbering = number(samples, shuffle, epoch or 0)
    reader = (
        "rank 0 for all; each rank receives its rows" if dispatch else "each rank, its own rows"
    )
    if plot is not None:
        save_picture(plot, legs, numbering)
    if as_json_text:
        print(json.dumps(as_json(legs, numbering, reader), indent=2))
    else:
        draw(Console(highlight=False), legs, numbering, reader)


CHECK_HELP = _flowing(f"""Try a loader out on many simulated ranks, in this one process.

TARGET is MODULE:FACTORY or path/to/file.py:FACTORY. FACTORY is a function of yours that returns a
DataLoader, or a class or function that gives a LightningDataModule. It is called once for each
rank, with `rank` and `world_size` if it has arguments of these names. Each rank has random
generators of its own, as separate processes have.

On every rank the loader goes through prepare_data_loader, as in training with shardplug, with the
options of the same names; --as-is leaves that out and finds what would go wrong with the loader as
it stands. Every sample carries its index, or in a stream its place, so any data set will do.

Reported as a fault: {", ".join(KINDS)}. --allow NAME says that one is meant so. Padding that the
loader knows as padding is no fault, nor is what drop_last drops.

Exit status: 0 no fault, 1 a fault, 2 the command cannot be carried out as given.

Examples, each can be pasted:

    shardplug check shardplug.cli.samples:shuffled --world-size 4

    shardplug check shardplug.cli.samples:shuffled --world-size 4 --tail exact

    shardplug check shardplug.cli.samples:unsharded --world-size 4 --as-is
""")


@app.command("check", help=CHECK_HELP)
def check_command(
    *,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="MODULE:FACTORY.")],
    world_size: Annotated[
        int, typer.Option("--world-size", "-w", help="Number of ranks to simulate.")
    ],
    epochs: Annotated[int, typer.Option(help="Passes over the loader.")] = 2,
    split_batches: SplitOption = False,
    even_batches: EvenOption = True,
    tail: TailOption = None,
    dispatch: Annotated[
        bool | None,
        typer.Option(
            "--dispatch/--no-dispatch",
            help="Whether rank 0 reads for all; it does for streams if left out.",
        ),
    ] = None,
    sync_order: Annotated[
        SyncOrder, typer.Option(help="Compare the orders that samplers draw, or send rank 0's.")
    ] = SyncOrder.agree,
    already_sharded: Annotated[
        bool, typer.Option("--already-sharded", help="Each rank's loader has a part of its own.")
    ] = False,
    seed_samples: Annotated[
        bool, typer.Option("--seed-samples", help="Seed before each sample, by its place.")
    ] = False,
    is_as_is: Annotated[
        bool, typer.Option("--as-is", help="Check the loader without preparing it.")
    ] = False,
    sets_epoch: Annotated[
        bool,
        typer.Option(
            "--set-epoch/--no-set-epoch",
            help="With --as-is: whether your loop calls set_epoch on samplers and data set.",
        ),
    ] = True,
    same_seed: Annotated[
        bool,
        typer.Option("--same-seed", help="Seed all ranks alike first, as seed_everything does."),
    ] = False,
    loader: Annotated[
        LoaderName, typer.Option(help="Which loader of a LightningDataModule.")
    ] = LoaderName.train,
    max_batches: Annotated[
        int | None, typer.Option(help="Most batches of each rank and epoch; all if left out.")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A fault that is meant so; repeatable.")
    ] = None,
) -> None:
    """Check a loader."""
    _at_least("--world-size", world_size, 1)
    _at_least("--epochs", epochs, 1)
    _at_least("--max-batches", max_batches, 1)
    _at_most("--world-size", world_size, MOST_RANKS, _WHY_SO_FEW_RANKS)
    _at_most("--epochs", epochs, sys.maxsize, "No more can be counted.")
    _at_most("--max-batches", max_batches, sys.maxsize, "Leave it out to read all.")
    allowed = frozenset(allow or ())
    for name in sorted(allowed - set(KINDS)):
        raise Refusal(f"`--allow` must be one of {', '.join(KINDS)}, got {name!r}.")
    if not sets_epoch and not is_as_is:
        raise Refusal("`--no-set-epoch` needs --as-is: a prepared loader counts its epochs itself.")
    options: dict[str, Any] = {
        "split_batches": split_batches,
        "even_batches": even_batches,
        "tail": None if tail is None else tail.value,
        "dispatch_batches": dispatch,
        "sync_order": sync_order.value,
        "already_sharded": already_sharded or None,
        "seed_samples": seed_samples,
    }
    if is_as_is and options != _NO_OPTIONS:
        raise Refusal(
            "`--as-is` leaves the loader as it is: leave out what prepare_data_loader would do "
            f"({', '.join(_words(options))})."
        )
    # Here, for `plan` and the help are there at once without torch.
    from shardplug.cli.checking import Plea, check
    from shardplug.cli.trial import Conditions

    conditions = Conditions(
        world_size=world_size,
        num_epochs=epochs,
        max_batches=max_batches,
        options=None if is_as_is else options,
        sets_epoch=sets_epoch,
        same_seed=same_seed,
    )
    is_sound = check(Plea(target, loader.value, conditions, allowed))
    raise typer.Exit(0 if is_sound else 1)


MOST_RANKS = 4096
"""Ranks meet all with all, in time that grows with the square of their number."""
_WHY_SO_FEW_RANKS = (
    "Each rank is a thread of this one process, with random generators of its own; faults that "
    "4096 ranks have show on fewer, and plan draws any number."
)

_NO_OPTIONS: dict[str, Any] = {
    "split_batches": False,
    "even_batches": True,
    "tail": None,
    "dispatch_batches": None,
    "sync_order": "agree",
    "already_sharded": None,
    "seed_samples": False,
}


def _words(options: dict[str, Any]) -> list[str]:
    """Name the options that were given, as parameters of prepare_data_loader."""
    return [f"{name}={value!r}" for name, value in options.items() if value != _NO_OPTIONS[name]]


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise Refusal(f"`{name}` must be at least {least}, got {value}.")


def _at_most(name: str, value: int | None, most: int, why: str) -> None:
    if value is not None and value > most:
        raise Refusal(f"`{name}` must be at most {most}, got {value}. {why}")


def run(arguments: Sequence[str]) -> int:
    """Run a command; what cannot be carried out gives one line.

    Args:
        arguments: What stands behind the program's name.

    Returns:
        The exit status.
    """
    command = typer.main.get_command(app)
    try:
        status = command.main(
            list(arguments) or ["--help"], prog_name="shardplug", standalone_mode=False
        )
    except typer.Abort:
        status = _STOPPED
    except (Refusal, ShardplugError) as error:
        return _refuse(str(error))
    except _CLICK_ERROR as error:
        return _refuse(f"{error.format_message().rstrip('.')}. See shardplug --help.")
    except BrokenPipeError:
        raise  # who reads has seen enough: nothing to be said
    except OSError as error:  # those of files and of the user's code are caught where they come
        return _refuse(f"The output cannot be written: {sentence(one_line(error))}")
    if status == _STOPPED:  # some versions of typer return it, others raise Abort
        return _refuse("stopped by Ctrl-C.", status=_STOPPED)
    return int(status or 0)


_STOPPED = 130
"""What a shell makes of a program that Ctrl-C has ended."""

# The base of what typer raises for options it cannot read; where it lives depends on the version.
_CLICK_ERROR: Any = next(
    each for each in typer.BadParameter.__mro__ if each.__name__ == "ClickException"
)


def _refuse(message: str, status: int = 2) -> int:
    print("shardplug: " + " ".join(message.split()), file=sys.stderr)
    return status
