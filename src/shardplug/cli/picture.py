"""The grid of ranks and steps as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardplug.cli.drawing import SIGNS, Token, shown_steps, title_of, tokens
from shardplug.cli.outline import Cell, Leg, Numbering, ends
from shardplug.cli.refusal import Refusal, one_line

_MOST_RANKS, _MOST_STEPS = 16, 12
_CELL_HEIGHT, _LETTER_WIDTH = 0.4, 0.07  # inches
_GAP = 0.03  # between boxes, in widths of one
_LETTERS = 20
"""Letters that a line in a box has place for at least."""
_REAL, _PADDED, _DROPPED = "Blues", "#f6cf6b", "#efa3a0"
_HATCH, _INK = "#ffffff99", "#1b2a3a"
_GREY = "#768390"
"""Of what stands outside of the boxes: can be read on white and on black."""


def save_picture(path: Path, legs: list[Leg], numbering: Numbering) -> None:
    """Draw the legs, one below the other, and write the picture.

    Padding is hatched with slashes, what is dropped with crosses. The background is left out, so
    that the picture can stand on a light page and on a dark one. The same plan gives the same file.

    Args:
        path: Where to; it ends in .png or .svg.
        legs: What to draw.
        numbering: Which sample stands where.

    Raises:
        Refusal: If matplotlib is not there, or the file cannot be written.
    """
    if path.suffix.lower() not in (".png", ".svg"):
        raise Refusal(f"`--plot` must end in .png or .svg, got {str(path)!r}.")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Refusal("`--plot` needs matplotlib: pip install 'shardplug[plot]'") from error
    steps = [shown_steps(leg, _MOST_STEPS) for leg in legs]
    ranks = [ends(leg.world_size, _MOST_RANKS) for leg in legs]
    height = _CELL_HEIGHT * sum(map(len, ranks)) + 0.7 * len(legs) + 0.4
    letters = max(_LETTERS, len(str(legs[0].plan.num_samples)) + 6)
    num_columns = max(1, *map(len, steps))
    width = max(6.0, (0.2 + _LETTER_WIDTH * letters) * num_columns + 0.8)
    # A figure of its own: pyplot would keep it, and choose a window system.
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(len(legs), squeeze=False, height_ratios=[len(each) for each in ranks])
    for at, ax in enumerate(axes[:, 0]):
        _draw_leg(ax, legs[at], ranks[at], steps[at], numbering)
        ax.set_xlim(0, num_columns)  # boxes of all legs are as wide
        counts = f"padded {legs[at].padded}, dropped {legs[at].dropped}"
        ax.set_title(f"{title_of(legs, at)}: {counts}", fontsize=10, loc="left", color=_GREY)
    _add_legend(figure, any(leg.padded for leg in legs), any(leg.dropped for leg in legs))
    look: dict[str, Any] = {"dpi": 150, "transparent": True}
    if path.suffix.lower() == ".svg":
        look["metadata"] = {"Date": None}
    try:
        with rc_context({"svg.hashsalt": "shardplug"}):
            figure.savefig(path, **look)
    except OSError as error:
        raise Refusal(
            f"`--plot` must name a file that can be written, got {str(path)!r}: {one_line(error)}"
        ) from error


def _draw_leg(
    ax: Any,
    leg: Leg,
    ranks: list[int | None],
    steps: list[int | None],
    numbering: Numbering,
) -> None:
    for column, step in enumerate(steps):
        for row, rank in enumerate(ranks):
            if step is None or rank is None:
                ax.text(column + 0.5, row + 0.5, "...", ha="center", va="center", color=_GREY)
                continue
            cell = leg.cell(rank, step)
            if cell is not None:
                _draw_cell(ax, (column, row), cell, leg.plan.shard_batch_size, numbering)
    ax.set_ylim(len(ranks), 0)
    names = ["..." if each is None else f"step {each}" for each in steps]
    if leg.dropped:
        names[-1] = "dropped"
    ax.set_xticks([at + 0.5 for at in range(len(steps))], names)
    names = ["..." if each is None else f"rank {each}" for each in ranks]
    ax.set_yticks([at + 0.5 for at in range(len(ranks))], names)
    ax.tick_params(length=0, labelsize=9, labelcolor=_GREY)
    ax.xaxis.tick_top()
    for spine in ax.spines.values():
        spine.set_visible(False)


def _draw_cell(
    ax: Any, corner: tuple[int, int], cell: Cell, full_rows: int, numbering: Numbering
) -> None:
    """Draw a box, as wide as the batch is full; its shade follows the position in the epoch."""
    from matplotlib import colormaps

    column, row = corner
    unit = (1 - 2 * _GAP) / full_rows
    left, top = column + _GAP, row + 2 * _GAP
    size = {"width": unit, "height": 1 - 4 * _GAP}
    shade = colormaps[_REAL](0.12 + 0.36 * cell.position(0) / max(1, cell.num_samples))
    if cell.is_dropped:
        _draw_box(ax, (left, top), size, cell.num_rows, facecolor=_DROPPED, hatch="xx")
    else:
        padding = cell.num_rows - cell.valid_rows
        _draw_box(ax, (left, top), size, cell.valid_rows, facecolor=shade)
        corner_of_padding = (left + cell.valid_rows * unit, top)
        _draw_box(ax, corner_of_padding, size, padding, facecolor=_PADDED, hatch="//")
    for at, text in _texts(cell, full_rows, numbering):
        look = {"ha": "center", "va": "center", "fontsize": 8, "color": _INK}
        ax.text(left + at * unit, row + 0.5, text, **look)


def _draw_box(
    ax: Any, corner: tuple[float, float], size: dict[str, float], num_rows: int, **look: Any
) -> None:
    """Draw so many rows of a batch as one box, if there are any."""
    from matplotlib.patches import Rectangle

    if num_rows:
        width = num_rows * size["width"]
        box = Rectangle(corner, width, size["height"], edgecolor=_HATCH, linewidth=0, **look)
        ax.add_patch(box)


def _texts(cell: Cell, full_rows: int, numbering: Numbering) -> list[tuple[float, str]]:
    """Write a cell's ids each above its row where all have place, else some in the middle.

    Returns:
        Where, in rows from the left of the box, and what.
    """
    letters = len(str(cell.num_samples - 1)) + 2
    if letters * full_rows > _LETTERS:
        return [(cell.num_rows / 2, _fitting(tokens(cell, numbering, most=3)))]
    ids = numbering.take([cell.position(row) for row in range(cell.num_rows)])
    kinds = ["dropped" if cell.is_dropped else "real"] * cell.valid_rows
    kinds += ["padded"] * (cell.num_rows - cell.valid_rows)
    return [(at + 0.5, f"{SIGNS[kind]}{ids[at]}") for at, kind in enumerate(kinds)]


def _fitting(found: list[Token]) -> str:
    """Write a cell's ids on one line; if they are too long, the first and the last on two."""
    texts = [token.text for token in found]
    line = " ".join(texts)
    if len(line) <= _LETTERS:
        return line
    if len(texts) == 1:
        return line.replace("-", "-\n")
    return f"{texts[0]} ...\n{texts[-1]}" if len(texts) > 2 else "\n".join(texts)


def _add_legend(figure: Any, has_padding: bool, has_drops: bool) -> None:
    from matplotlib.patches import Patch

    look: dict[str, Any] = {"edgecolor": _HATCH, "linewidth": 0}
    entries = []
    if has_padding:
        label = "+ padding: repeated rows"
        entries.append(Patch(facecolor=_PADDED, hatch="//", label=label, **look))
    if has_drops:
        label = "x dropped: read by nobody"
        entries.append(Patch(facecolor=_DROPPED, hatch="xx", label=label, **look))
    if entries:
        figure.legend(
            handles=entries,
            loc="outside lower left",
            ncols=2,
            fontsize=9,
            frameon=False,
            labelcolor=_GREY,
        )
