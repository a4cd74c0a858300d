"""The grid of ranks and steps as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardplug.cli.drawing import Token, shown_steps, title_of, tokens
from shardplug.cli.outline import Cell, Leg, Numbering, ends
from shardplug.cli.refusal import Refusal, one_line

_MOST_RANKS, _MOST_STEPS = 16, 12
_CELL_HEIGHT, _LETTER_WIDTH = 0.42, 0.055  # inches
_LETTERS = 18
"""Letters that a line in a box has place for at least."""
_PADDED, _DROPPED = "#f2c14e", "#d1495b"


def save_picture(path: Path, legs: list[Leg], numbering: Numbering) -> None:
    """Draw the legs, one below the other, and write the picture.

    Padding is hatched with slashes, what is dropped with crosses.

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
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Refusal("`--plot` needs matplotlib: pip install 'shardplug[plot]'") from error
    steps = [shown_steps(leg, _MOST_STEPS) for leg in legs]
    ranks = [ends(leg.world_size, _MOST_RANKS) for leg in legs]
    height = _CELL_HEIGHT * sum(map(len, ranks)) + 1.1 * len(legs) + 0.5
    letters = max(_LETTERS, len(str(legs[0].plan.num_samples)) + 6)
    cell_width = 0.3 + _LETTER_WIDTH * letters
    width = max(6.0, cell_width * max(map(len, steps)) + 1.2)
    # A figure of its own: pyplot would keep it, and choose a window system.
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(len(legs), squeeze=False, height_ratios=[len(each) for each in ranks])
    for at, ax in enumerate(axes[:, 0]):
        _draw_leg(ax, legs[at], ranks[at], steps[at], numbering)
        counts = f"padded {legs[at].padded}, dropped {legs[at].dropped}"
        ax.set_title(f"{title_of(legs, at)}: {counts}", fontsize=9, loc="left")
    _add_legend(figure, any(leg.padded for leg in legs), any(leg.dropped for leg in legs))
    try:
        figure.savefig(path, dpi=150)
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
                ax.text(column + 0.5, row + 0.5, "...", ha="center", va="center", color="0.4")
                continue
            cell = leg.cell(rank, step)
            if cell is not None:
                _draw_cell(ax, column, row, cell, numbering)
    ax.set_xlim(0, max(1, len(steps)))
    ax.set_ylim(len(ranks), 0)
    names = ["..." if each is None else f"step {each}" for each in steps]
    if leg.dropped:
        names[-1] = "dropped"
    ax.set_xticks([at + 0.5 for at in range(len(steps))], names)
    names = ["..." if each is None else f"rank {each}" for each in ranks]
    ax.set_yticks([at + 0.5 for at in range(len(ranks))], names)
    ax.tick_params(length=0, labelsize=8)
    ax.xaxis.tick_top()
    for spine in ax.spines.values():
        spine.set_visible(False)


def _draw_cell(ax: Any, column: int, row: int, cell: Cell, numbering: Numbering) -> None:
    """Draw a box, its real part in a shade that follows the position in the epoch."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    shade = colormaps["Blues"](0.15 + 0.4 * cell.position(0) / max(1, cell.num_samples))
    look: dict[str, Any] = {"edgecolor": "white", "linewidth": 1.5}
    if cell.is_dropped:
        ax.add_patch(Rectangle((column, row), 1, 1, facecolor=_DROPPED, hatch="xx", **look))
    else:
        real = cell.valid_rows / cell.num_rows
        ax.add_patch(Rectangle((column, row), real, 1, facecolor=shade, **look))
        if real < 1:
            box = Rectangle((column + real, row), 1 - real, 1, facecolor=_PADDED, hatch="//")
            box.set(**look)
            ax.add_patch(box)
    text = _fitting(tokens(cell, numbering, most=3))
    backing = {"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 0.8}
    ax.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=6.5, bbox=backing)


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

    entries = []
    if has_padding:
        entries.append(Patch(facecolor=_PADDED, hatch="//", label="+ padding: repeated rows"))
    if has_drops:
        entries.append(Patch(facecolor=_DROPPED, hatch="xx", label="x dropped: read by nobody"))
    if entries:
        figure.legend(handles=entries, loc="outside lower left", ncols=2, fontsize=8, frameon=False)
