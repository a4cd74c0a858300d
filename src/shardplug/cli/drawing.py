"""Legs of an epoch as tables for the terminal, and as JSON. ASCII only, readable without colour."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.box import ASCII
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardplug.cli.outline import Cell, Leg, Numbering, ends, facts

MOST_RANKS = 12
MOST_STEPS = 24
MOST_IDS, MOST_RUNS = 8, 3
_WIDEST = 28
STYLES = {"real": "", "padded": "bold yellow", "dropped": "bold red"}
SIGNS = {"real": "", "padded": "+", "dropped": "x"}


class Token(NamedTuple):
    """A piece of a cell's text, and what kind of rows it tells of."""

    text: str
    kind: str


def tokens(cell: Cell, numbering: Numbering, most: int | None = None) -> list[Token]:
    """Write a cell's ids down, with a sign where they are padding or dropped.

    Args:
        cell: The cell.
        numbering: Which sample stands where.
        most: Ids or runs of ids of each kind to write out; None: what two lines have place for.
    """
    if most is None:
        per_line = _WIDEST // (len(str(cell.num_samples)) + 1)
        most = MOST_RUNS if numbering.is_sequential else max(3, min(MOST_IDS, 2 * per_line))
    real = "dropped" if cell.is_dropped else "real"
    rows, padding = (0, cell.valid_rows), (cell.valid_rows, cell.num_rows)
    found = _written(cell, rows, real, numbering, most)
    return found + _written(cell, padding, "padded", numbering, most)


def _written(
    cell: Cell, rows: tuple[int, int], kind: str, numbering: Numbering, most: int
) -> list[Token]:
    # Rows are their first and the one after their last: a range above 2^63 has no len().
    sign = SIGNS[kind]
    start, stop = rows
    if numbering.is_sequential:
        texts = list(_runs(cell, start, stop, most))
    else:
        kept = ends(stop - start, most)
        ids = iter(numbering.take([cell.position(start + at) for at in kept if at is not None]))
        texts = ["..." if at is None else str(next(ids)) for at in kept]
    return [Token(text if text == "..." else sign + text, kind) for text in texts]


def _runs(cell: Cell, start: int, stop: int, most: int) -> Iterator[str]:
    """Write rows down as runs of positions that follow one another."""
    at = start
    for _ in range(most):
        if at == stop:
            return
        first = cell.position(at)
        length = min(stop - at, cell.num_samples - first)
        yield str(first) if length == 1 else f"{first}-{first + length - 1}"
        at += length
    if at < stop:
        yield "..."


def as_json(legs: list[Leg], numbering: Numbering, reader: str) -> dict[str, Any]:
    """Tell all of it as JSON takes it; of a large grid the first and last ranks and steps."""
    return {
        "samples": legs[0].plan.num_samples,
        "batch_size": legs[0].plan.batch_size,
        "split_batches": legs[0].plan.split.value == "slice",
        "order": numbering.name,
        "read_by": reader,
        "legs": [{**facts(leg), "grid": list(_json_cells(leg, numbering))} for leg in legs],
    }


def _json_cells(leg: Leg, numbering: Numbering) -> Iterator[dict[str, Any]]:
    for step in shown_steps(leg, MOST_STEPS):
        for rank in ends(leg.world_size, MOST_RANKS):
            cell = None if step is None or rank is None else leg.cell(rank, step)
            if cell is None:
                continue
            rows = [row for row in ends(cell.num_rows, 64) if row is not None]
            yield {
                "rank": rank,
                "step": step,
                "rows": cell.num_rows,
                "valid_rows": 0 if cell.is_dropped else cell.valid_rows,
                "dropped": cell.is_dropped,
                "ids": numbering.take([cell.position(row) for row in rows]),
                "ids_left_out": cell.num_rows - len(rows),
            }


def shown_steps(leg: Leg, most: int) -> list[int | None]:
    """List the steps to show; the one after the last is what is dropped."""
    steps = ends(leg.num_shown, most)
    return [*steps, leg.num_steps] if leg.dropped else steps


def draw(console: Console, legs: list[Leg], numbering: Numbering, reader: str) -> None:
    """Print a summary and a grid of ranks and steps for each leg."""
    for at, leg in enumerate(legs):
        console.print(Text(title_of(legs, at), style="bold"), soft_wrap=True)
        console.print(_summary(leg, numbering, reader))
        if leg.num_shown or leg.dropped:
            console.print(_grid(console, leg, numbering))
        else:
            console.print("No steps.")
    console.print(_legend())


def title_of(legs: list[Leg], at: int) -> str:
    """Say what one of the legs is."""
    leg = legs[at]
    ranks = "1 rank" if leg.world_size == 1 else f"{leg.world_size} ranks"
    if len(legs) == 1:
        return f"An epoch of {leg.plan.num_samples} samples on {ranks}"
    if at == 0:
        return f"Before the stop: {leg.num_shown} of {leg.num_steps} steps on {ranks}"
    return f"After it: the rest of the epoch, from position {leg.plan.start} on, on {ranks}"


def _summary(leg: Leg, numbering: Numbering, reader: str) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    remainder = leg.remainder
    rows: dict[str, str | Text] = {
        "steps per rank": _steps(leg),
        "total batch size": f"{leg.plan.global_batch_size} "
        f"({leg.world_size} x {leg.plan.shard_batch_size} per rank)",
        "padded": _counted("padded", leg.padded, "repeated, and known as padding"),
        "dropped": _counted("dropped", leg.dropped, "read by nobody"),
        "remainder": "none" if remainder < 0 else f"{remainder} real rows in the last step",
        "end of the epoch": f"tail {leg.plan.tail.value!r}",
        "order": numbering.name,
        "read by": reader,
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _steps(leg: Leg) -> str:
    groups = leg.steps_by_rank()
    if len(groups) == 1:
        return str(groups[0][2])
    return ", ".join(
        f"{steps} on rank{'' if first == last else 's'} "
        f"{first if first == last else f'{first}-{last}'}"
        for first, last, steps in groups
    )


def _counted(kind: str, count: int, meaning: str) -> Text:
    if not count:
        return Text("0")
    return Text(f"{SIGNS[kind]}{count} {meaning}", style=STYLES[kind])


def _grid(console: Console, leg: Leg, numbering: Numbering) -> Table:
    """Make a grid of as many steps as the console is wide enough for, two at least."""
    ranks = ends(leg.world_size, MOST_RANKS)
    texts: dict[tuple[int, int], Text] = {}
    most = MOST_STEPS
    while True:
        steps = shown_steps(leg, most)
        wanted = ((rank, step) for rank in ranks for step in steps)
        for rank, step in wanted:
            if rank is not None and step is not None and (rank, step) not in texts:
                texts[rank, step] = _text(leg.cell(rank, step), numbering)
        widths = [_column_width(texts, ranks, step) for step in steps]
        if most <= 2 or sum(widths) + 3 * len(widths) + 12 <= console.width:
            break
        most -= 1
    return _filled(leg, ranks, steps, texts)


def _column_width(
    texts: dict[tuple[int, int], Text], ranks: list[int | None], step: int | None
) -> int:
    if step is None:
        return 3
    widest = max(texts[rank, step].cell_len for rank in ranks if rank is not None)
    return min(_WIDEST, max(len(f"step {step}"), widest))


def _filled(
    leg: Leg, ranks: list[int | None], steps: list[int | None], texts: dict[tuple[int, int], Text]
) -> Table:
    table = Table(box=ASCII, pad_edge=True)
    table.add_column("rank", justify="right", no_wrap=True)
    for step in steps:
        is_dropped = step == leg.num_steps
        name = "dropped" if is_dropped else f"step {step}"
        table.add_column("..." if step is None else name, max_width=_WIDEST, overflow="fold")
    for rank in ranks:
        if rank is None:
            table.add_row(*["..."] * (len(steps) + 1))
            continue
        cells = [Text("...") if step is None else texts[rank, step] for step in steps]
        table.add_row(str(rank), *cells)
    return table


def _text(cell: Cell | None, numbering: Numbering) -> Text:
    if cell is None:
        return Text("-")
    text = Text()
    for at, token in enumerate(tokens(cell, numbering)):
        text.append(" " if at else "")
        text.append(token.text, style=STYLES[token.kind])
    return text


def _legend() -> Text:
    return Text.assemble(
        "8-15: ids of a batch, in order; -: no step\n",
        ("+0", STYLES["padded"]),
        ": padding, a row that is repeated; ",
        ("x99", STYLES["dropped"]),
        ": dropped, read by nobody",
    )
