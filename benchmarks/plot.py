"""Draw what a batch costs a rank, from one rank to 4096, as it was measured.

    python -m benchmarks.plot [--results PATH] [--folder PATH]

Writes scaling-light.svg, scaling-dark.svg, and scaling.png for where neither can be shown. The same
figures give the same files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks import results
from benchmarks.results import KEPT, Measured, ResultsError
from benchmarks.scaling_names import ACCELERATE, KEYED, SAME, TORCH

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
PANELS = {"sampler": "Its indices: the sampler alone", "loader": "The batch itself: free samples"}
SHORT = {
    KEYED: "shardplug,\nPermutedSampler",
    SAME: "shardplug,\naccelerate's order",
    ACCELERATE: "accelerate",
    TORCH: "torch\nDistributedSampler",
}
LEAST_GAP = 0.13
"""Between the middles of two labels, as a share of the height."""


@dataclass(frozen=True, slots=True)
class Look:
    """Colours for one kind of page."""

    ink: str
    grid: str
    colours: dict[str, str]


LIGHT = Look(
    ink="#424a53",
    grid="#d8dee4",
    colours={KEYED: "#0969da", SAME: "#1b7c83", ACCELERATE: "#bc4c00", TORCH: "#8250df"},
)
DARK = Look(
    ink="#c3ccd6",
    grid="#30363d",
    colours={KEYED: "#58a6ff", SAME: "#56d4dd", ACCELERATE: "#f0883e", TORCH: "#bc8cff"},
)
FILES = {"scaling-light.svg": LIGHT, "scaling-dark.svg": DARK, "scaling.png": LIGHT}


def digest(measured: Measured) -> str:
    """Name the figures that a picture shows, so that one of others can be told."""
    told = json.dumps(measured.more, sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def draw(measured: Measured, look: Look) -> Figure:
    """Draw both kinds of cost on the same scale."""
    curves: list[dict[str, Any]] = measured.more["curves"]
    figure = Figure(figsize=(9.2, 4.1), layout="constrained")
    axes = figure.subplots(1, len(PANELS), sharey=True)
    values = [cost for curve in curves for _, cost in curve["points"]]
    worlds = sorted({world for curve in curves for world, _ in curve["points"]})
    axes[0].set_ylim(min(values) / 1.6, max(values) * 1.6)
    for ax, (panel, title) in zip(axes, PANELS.items(), strict=True):
        _set_up(ax, title, worlds, look)
        shown = [curve for curve in curves if curve["panel"] == panel]
        for curve in shown:
            _draw_curve(ax, curve, look)
        _label(ax, shown, look)
    costs = [10**power for power in range(6) if min(values) / 1.6 < 10**power < max(values) * 1.6]
    axes[0].set_yticks(costs, [written(cost) for cost in costs])
    axes[0].set_ylabel("time for a batch on one rank", color=look.ink)
    about = f"{measured.more['num_samples']:,} samples, batches of {measured.more['batch_size']}"
    figure.suptitle(f"What a batch costs a rank: {about}", color=look.ink, fontsize=11)
    return figure


def _set_up(ax: Any, title: str, worlds: list[int], look: Look) -> None:
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(worlds, [f"{world:g}" for world in worlds])
    ax.minorticks_off()
    ax.set_xlim(worlds[0] / 1.3, worlds[-1] * 24)  # place for the labels
    ax.set_xlabel("ranks", color=look.ink, x=0.33)
    ax.set_title(title, color=look.ink, fontsize=9.5, loc="left")
    ax.set_facecolor("none")
    ax.grid(axis="y", color=look.grid, linewidth=0.7)
    ax.set_axisbelow(True)
    ax.tick_params(colors=look.ink, length=0, labelsize=8.5)
    for spine in ax.spines.values():
        spine.set_visible(False)


def _draw_curve(ax: Any, curve: dict[str, Any], look: Look) -> None:
    worlds, costs = zip(*curve["points"], strict=True)
    is_ours = curve["name"] in (KEYED, SAME)
    ax.plot(
        worlds,
        costs,
        color=look.colours[curve["name"]],
        linewidth=2.4 if is_ours else 1.6,
        marker="o",
        markersize=4,
        linestyle="-" if is_ours else (0, (5, 2)),
    )


def _label(ax: Any, curves: list[dict[str, Any]], look: Look) -> None:
    """Write each curve's name and last cost beside its end, apart from each other."""
    low, high = ax.transAxes.inverted(), ax.transData
    ends = []
    for curve in curves:
        world, cost = curve["points"][-1]
        ends.append((low.transform(high.transform((world, cost)))[1], curve))
    heights = spread([height for height, _ in ends], LEAST_GAP)
    for height, (_, curve) in zip(heights, ends, strict=True):
        world, cost = curve["points"][-1]
        ax.annotate(
            f"{SHORT[curve['name']]}  {written(cost)}",
            xy=(world, cost),
            xytext=(world * 1.35, height),
            textcoords=("data", "axes fraction"),
            color=look.colours[curve["name"]],
            fontsize=8.5,
            va="center",
            linespacing=1.15,
        )


def spread(heights: Sequence[float], least: float) -> list[float]:
    """Move heights apart until each is so far from the next, in their order and near their place.

    Example:
        >>> spread([0.5, 0.5, 0.1], 0.2)
        [0.4, 0.6, 0.1]
    """
    order = sorted(range(len(heights)), key=lambda at: heights[at])
    groups: list[list[int]] = []
    for at in order:
        groups.append([at])
        while len(groups) > 1 and _overlap(groups[-2], groups[-1], heights, least):
            groups[-2:] = [groups[-2] + groups[-1]]
    moved = list(heights)
    for group in groups:
        start = _start(group, heights, least)
        for place, at in enumerate(group):
            moved[at] = round(start + place * least, 6)
    return moved


def _overlap(one: list[int], other: list[int], heights: Sequence[float], least: float) -> bool:
    end = _start(one, heights, least) + len(one) * least
    return end > _start(other, heights, least)


def _start(group: list[int], heights: Sequence[float], least: float) -> float:
    middle = sum(heights[at] for at in group) / len(group)
    return middle - (len(group) - 1) * least / 2


def written(cost_us: float) -> str:
    """Write a cost in a unit that suits it."""
    return f"{cost_us / 1000:.3g} ms" if cost_us >= 1000 else f"{float(f'{cost_us:.2g}'):g} µs"


def save_pictures(measured: Measured, folder: Path) -> list[Path]:
    """Write all files."""
    folder.mkdir(parents=True, exist_ok=True)
    written_to = []
    for name, look in FILES.items():
        path = folder / name
        told = {"Description": f"figures {digest(measured)}"}
        if path.suffix == ".svg":
            told |= {"Date": None}  # type: ignore[dict-item]  # leaves it out
        with rc_context({"svg.hashsalt": "shardplug"}):
            figure = draw(measured, look)
            see_through = path.suffix == ".svg"
            figure.savefig(path, dpi=160, transparent=see_through, metadata=told)
        written_to.append(path)
    return written_to


def main(words: Sequence[str] | None = None) -> int:
    """Be the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot")
    parser.add_argument("--results", type=Path, metavar="PATH", default=KEPT)
    parser.add_argument("--folder", type=Path, metavar="PATH", default=FOLDER)
    arguments = parser.parse_args(words)
    try:
        measured = results.load(arguments.results).section("scaling")
    except (ResultsError, FileNotFoundError) as error:
        print(f"{error}. Measure first: python -m benchmarks", file=sys.stderr)
        return 2
    if measured is None or "curves" not in measured.more:
        print(
            f"{arguments.results} has no figures to draw. Measure them: "
            f"python -m benchmarks scaling --json {arguments.results}",
            file=sys.stderr,
        )
        return 2
    for path in save_pictures(measured, arguments.folder):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
