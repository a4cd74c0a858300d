"""`shardplug plan` tells and draws what the plan says, at any size."""

from __future__ import annotations

import io
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils.data import DataLoader

from shardplug import PermutedSampler, PlanError, Split, Tail, prepare_data_loader
from shardplug.cli import main
from shardplug.cli.drawing import draw
from shardplug.cli.outline import Leg, Request, ends, facts, number

WORLDS, SIZES, BATCHES = (1, 2, 3, 4), (0, 1, 5, 8, 13, 24), (1, 2, 4)


def run(capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, str, str]:
    status = main(line.split())
    out, err = capsys.readouterr()
    return status, out, err


def legs_of(num_samples: int) -> list[Leg]:
    """All legs of an epoch that there can be."""
    made = []
    for batch, world, split, tail in product(BATCHES, WORLDS, Split, Tail):
        try:
            made.append(Request(num_samples, batch, world, split, tail).leg())
        except PlanError:
            continue  # not every batch can be split, nor every number be dealt exactly
    assert len(made) > 30
    return made


# -- numbers --


@pytest.mark.parametrize("num_samples", SIZES)
def test_the_summary_counts_what_a_walk_through_the_plan_counts(num_samples: int) -> None:
    for leg in legs_of(num_samples):
        plans = [leg.on(rank) for rank in range(leg.world_size)]
        batches = [(plan, step) for plan in plans for step in range(plan.num_steps)]
        valid = [plan.valid_rows(step) for plan, step in batches]
        rows = [len(plan.positions(step)) for plan, step in batches]
        told = facts(leg)
        assert told["padded"] == sum(rows) - sum(valid)
        assert told["dropped"] == num_samples - sum(valid)
        steps = [
            group["steps"]
            for group in told["steps_per_rank"]
            for _ in range(group["first_rank"], group["last_rank"] + 1)
        ]
        assert steps == [plan.num_steps for plan in plans]


@pytest.mark.parametrize("num_samples", SIZES)
def test_cells_hold_the_positions_of_the_plan_and_what_is_dropped(num_samples: int) -> None:
    for leg in legs_of(num_samples):
        seen = []
        for rank, step in product(range(leg.world_size), range(leg.num_steps + 1)):
            cell = leg.cell(rank, step)
            plan = leg.on(rank)
            if cell is None:
                assert step >= plan.num_steps
                continue
            positions = [cell.position(row) for row in range(cell.num_rows)]
            seen += positions[: cell.valid_rows]
            if not cell.is_dropped:
                assert positions == list(plan.positions(step))
                assert cell.valid_rows == plan.valid_rows(step)
        # With what is dropped, each sample is there once.
        assert sorted(seen) == list(range(num_samples)), leg


def test_a_rest_is_that_of_the_contract() -> None:
    request = Request(24, 2, 2, Split.WHOLE, Tail.PAD)
    before, after = request.legs(2, 3)
    assert (before.num_shown, before.padded, before.remainder) == (2, 0, -1)
    cells = [[after.cell(rank, step) for step in range(3)] for rank in range(3)]
    ids = [[[c.position(r) for r in range(c.num_rows)] for c in row if c] for row in cells]
    assert ids == [
        [[8, 9], [14, 15], [20, 21]],
        [[10, 11], [16, 17], [22, 23]],
        [[12, 13], [18, 19], [0, 1]],
    ]
    assert (after.padded, after.remainder) == (2, 4)


def test_alone_nothing_is_padded_as_in_a_prepared_loader() -> None:
    data: Any = range(5)
    loader = prepare_data_loader(DataLoader(data, batch_size=2))
    leg = Request(5, 2, 1, Split.WHOLE, Tail.PAD).leg()
    assert (leg.padded, leg.num_steps) == (0, len(loader)) == (0, 3)


@pytest.mark.parametrize("epoch", [0, 3])
def test_a_shuffle_is_that_of_a_prepared_loader(epoch: int) -> None:
    data: Any = torch.arange(13)
    loaders = [
        prepare_data_loader(
            DataLoader(data, batch_size=2, shuffle=True),
            num_processes=2,
            process_index=rank,
            use_seedable_sampler=True,
            data_seed=7,
        )
        for rank in range(2)
    ]
    for loader in loaders:
        loader.set_epoch(epoch)
    numbering = number(13, 7, epoch)
    leg = Request(13, 2, 2, Split.WHOLE, Tail.PAD).leg()
    for rank, loader in enumerate(loaders):
        for step, batch in enumerate(loader):
            cell = leg.cell(rank, step)
            assert cell is not None
            assert numbering.take([cell.position(row) for row in range(2)]) == batch.tolist()
    assert "SeedableRandomSampler" in numbering.name


def test_a_large_shuffle_is_that_of_a_permuted_sampler() -> None:
    sampler = PermutedSampler(10**12, seed=7)
    sampler.set_epoch(2)
    numbering = number(10**12, 7, 2)
    places = [0, 5, 10**12 - 1]
    assert numbering.take(places) == [sampler[place] for place in places]
    assert "PermutedSampler" in numbering.name


def test_ends_leave_out_the_middle() -> None:
    assert ends(0, 4) == []
    assert ends(4, 4) == [0, 1, 2, 3]
    assert ends(10, 4) == [0, 1, 2, None, 9]
    assert ends(10, 2) == [0, None, 9]


# -- what is printed --


def test_padding_is_signed(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "plan --samples 11 --batch-size 2 --world-size 3")
    assert status == 0
    assert out.splitlines()[0] == "An epoch of 11 samples on 3 ranks"
    assert grid_of(out) == [
        ["rank", "step 0", "step 1"],
        ["0", "0-1", "6-7"],
        ["1", "2-3", "8-9"],
        ["2", "4-5", "10 +0"],
    ]
    assert summary_of(out) == {
        "steps per rank": "2",
        "total batch size": "6 (3 x 2 per rank)",
        "padded": "+1 repeated, and known as padding",
        "dropped": "0",
        "remainder": "5 real rows in the last step",
        "end of the epoch": "tail 'pad'",
        "order": "sequential",
        "read by": "each rank, its own rows",
    }


def test_what_is_dropped_is_signed(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "plan --samples 11 --batch-size 2 --world-size 3 --drop-last")
    assert grid_of(out)[1:] == [
        ["0", "0-1", "x6-7"],
        ["1", "2-3", "x8-9"],
        ["2", "4-5", "x10"],
    ]
    assert grid_of(out)[0][-1] == "dropped"
    assert summary_of(out)["dropped"] == "x5 read by nobody"


def test_ranks_with_a_step_less_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan --samples 9 --batch-size 2 --world-size 3 --no-even-batches --dispatch"
    _, out, _ = run(capsys, line)
    assert [row[-1] for row in grid_of(out)] == ["step 1", "6-7", "8", "-"]
    assert summary_of(out)["steps per rank"] == "2 on ranks 0-1, 1 on rank 2"
    assert summary_of(out)["read by"] == "rank 0 for all; each rank receives its rows"


def test_split_and_exact(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan --samples 7 --batch-size 4 --world-size 2 --split-batches --tail exact"
    _, out, _ = run(capsys, line)
    assert grid_of(out)[1:] == [["0", "0-1", "4-5"], ["1", "2-3", "6"]]


def test_a_large_grid_shows_first_and_last(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "plan --samples 1000000000000 --batch-size 32 --world-size 100000")
    grid = grid_of(out)
    assert [row[0] for row in grid][1:] == [
        *map(str, range(8)),
        "...",
        *map(str, range(99996, 100000)),
    ]
    assert (grid[0][1], grid[0][-2], grid[0][-1]) == ("step 0", "...", "step 312499")
    assert grid[-1][-1] == "999999999968-999999999999"
    assert all(len(line) <= 80 for line in out.splitlines())


@pytest.mark.parametrize("shuffle", ["", "--shuffle 3"])
def test_batches_of_any_size_are_there_at_once(
    capsys: pytest.CaptureFixture[str], shuffle: str
) -> None:
    line = f"plan --samples 3 --batch-size 1000000000000 --world-size 100000 {shuffle}"
    status, out, _ = run(capsys, line)
    assert status == 0
    assert summary_of(out)["padded"].startswith("+99999999999999997 ")
    assert run(capsys, f"{line} --json")[0] == 0


def test_json_tells_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan --samples 3 --batch-size 2 --world-size 2 --json"
    status, out, _ = run(capsys, line)
    assert status == 0
    assert json.loads(out) == {
        "samples": 3,
        "batch_size": 2,
        "split_batches": False,
        "order": "sequential",
        "read_by": "each rank, its own rows",
        "legs": [
            {
                "world_size": 2,
                "consumed_before": 0,
                "samples_left": 3,
                "steps_per_rank": [{"first_rank": 0, "last_rank": 1, "steps": 1}],
                "steps_taken": 1,
                "batch_size_per_rank": 2,
                "total_batch_size": 4,
                "padded": 1,
                "dropped": 0,
                "remainder": 3,
                "tail": "pad",
                "grid": [
                    cell(rank=0, valid_rows=2, ids=[0, 1]),
                    cell(rank=1, valid_rows=1, ids=[2, 0]),
                ],
            }
        ],
    }


def cell(*, rank: int, valid_rows: int, ids: list[int]) -> dict[str, Any]:
    return {
        "rank": rank,
        "step": 0,
        "rows": 2,
        "valid_rows": valid_rows,
        "dropped": False,
        "ids": ids,
        "ids_left_out": 0,
    }


def test_colour_is_only_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    yellow, colourless = "\x1b[1;33m", "+0"
    assert yellow in printed(is_terminal=True)
    assert "\x1b" not in printed(is_terminal=False)
    assert colourless in printed(is_terminal=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert yellow not in printed(is_terminal=True)
    assert colourless in printed(is_terminal=True)


def printed(*, is_terminal: bool) -> str:
    file = io.StringIO()
    if is_terminal:
        console = Console(file=file, force_terminal=True, color_system="standard", width=80)
    else:
        console = Console(file=file, width=80)
    leg = Request(3, 2, 2, Split.WHOLE, Tail.PAD).leg()
    draw(console, [leg], number(3, None, 0), "each rank")
    return file.getvalue()


@pytest.mark.parametrize("width", [20, 40, 80, 120, 300])
def test_all_is_ascii_at_any_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    line = "plan --samples 1003 --batch-size 8 --world-size 40 --shuffle 1 --drop-last"
    status, out, _ = run(capsys, line)
    assert status == 0
    assert out.isascii()


def grid_of(out: str) -> list[list[str]]:
    """The cells of what is printed as a grid."""
    lines = [line for line in out.splitlines() if line.startswith("|") and "--+--" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def summary_of(out: str) -> dict[str, str]:
    """What stands beside each name, two or more blanks away from it."""
    found = {}
    for line in out.split("+--")[0].splitlines()[1:]:
        name, _, value = line.partition("  ")
        found[name] = value.strip()
    return found


# -- pictures --


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
@pytest.mark.parametrize("line", ["--samples 103 --drop-last", "--samples 9999999 --resume-at 3"])
def test_a_picture_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, suffix: str, start: bytes, line: str
) -> None:
    path = tmp_path / f"plan{suffix}"
    status, out, err = run(
        capsys, f"plan --batch-size 8 --world-size 40 {line} --shuffle 1 --plot {path}"
    )
    assert (status, err) == (0, "")
    assert path.read_bytes().startswith(start)
    assert "steps per rank" in out


def test_a_picture_marks_padding_and_drops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: saved.append(figure))
    for line in ("", "--drop-last"):
        words = f"plan --samples 11 --batch-size 2 --world-size 3 {line} --plot {tmp_path}/a.png"
        assert main(words.split()) == 0
    padded, dropped = ([patch.get_hatch() for patch in f.axes[0].patches] for f in saved)
    # Seven boxes, one of them for the padded half of a batch; and six, three of them dropped.
    assert sorted(map(str, padded)) == ["//", *["None"] * 6]
    assert sorted(map(str, dropped)) == ["None"] * 3 + ["xx"] * 3
    texts = [[text.get_text() for text in figure.axes[0].texts] for figure in saved]
    assert [text for text in texts[0] if text.startswith("+")] == ["+0"]
    assert [text for text in texts[1] if text.startswith("x")] == ["x6", "x7", "x8", "x9", "x10"]


def test_each_id_of_a_picture_stands_above_its_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from matplotlib.figure import Figure

    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: saved.append(figure))
    line = f"plan -n 7 -b 2 -w 2 --resume-at 1 --new-world-size 1 --plot {tmp_path}/a.png"
    assert main(line.split()) == 0
    before, after = saved[0].axes
    # Two boxes of rank 0 and 1; then the rest, of which the last batch has one row.
    assert [text.get_text() for text in before.texts] == ["0", "1", "2", "3"]
    assert [text.get_text() for text in after.texts] == ["4", "5", "6"]
    assert before.get_xlim() == after.get_xlim() == (0, 2)
    boxes: list[Any] = list(after.patches)
    full, short = boxes
    assert short.get_bbox().width == pytest.approx(full.get_bbox().width / 2)
    for text, box in zip(after.texts, (full, full, short), strict=True):
        assert box.get_bbox().contains(*text.get_position())


def test_a_plan_gives_the_same_picture_again_and_no_background(tmp_path: Path) -> None:
    paths = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for path in paths:
        assert main(f"plan -n 7 -b 2 -w 2 --plot {path}".split()) == 0
    one, two = (path.read_text(encoding="utf-8") for path in paths)
    assert one == two
    assert one.count("fill: none") >= 2  # of the figure and of its grid


def test_long_ids_do_not_leave_their_boxes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: saved.append(figure))
    for order in ("", "--shuffle 1"):
        line = f"plan -n 1000000000001 -b 3 -w 100000 {order} --plot {tmp_path}/a.png"
        assert main(line.split()) == 0
    for figure in saved:
        figure.canvas.draw()
        axes = figure.axes[0]
        box = axes.patches[0].get_window_extent()
        assert len(axes.texts) > 100
        for text in axes.texts:
            extent = text.get_window_extent()
            assert (extent.width < box.width, extent.height < box.height) == (True, True)


# -- what cannot be done --

BAD = [
    ("--samples -1", "`--samples` must be at least 0, got -1."),
    ("--batch-size 0", "`--batch-size` must be at least 1, got 0."),
    ("--world-size 0", "`--world-size` must be at least 1, got 0."),
    ("--shuffle 1 --epoch -1", "`--epoch` must be at least 0, got -1."),
    ("--epoch 1", "`--epoch` needs --shuffle SEED"),
    ("--new-world-size 2", "`--new-world-size` needs --resume-at STEP"),
    ("--resume-at 1 --new-world-size 0", "`--new-world-size` must be at least 1, got 0."),
    ("--resume-at 5", "`--resume-at` must be in [0, 4], the steps of this epoch, got 5."),
    ("--split-batches", "`batch_size` must be a multiple of the 3 shards"),
    ("--tail exakt", "'exakt' is not one of 'pad'"),
    ("--samples 1e3", "Invalid value for '--samples'"),
    ("--plot plan.pdf", "`--plot` must end in .png or .svg, got 'plan.pdf'."),
    ("--plot /nowhere/plan.png", "`--plot` must name a file that can be written"),
    ("--shuffle 1 --samples 9999999999999999999", "`num_samples` must be"),
    ("--nonsense", "No such option: --nonsense"),
]


@pytest.mark.parametrize(("options", "words"), BAD)
def test_bad_input_gives_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], options: str, words: str
) -> None:
    line = "plan --samples 103 --batch-size 10 --world-size 3"
    status, out, err = run(capsys, f"{line} {options}")
    assert (status, out) == (2, "")
    assert err.startswith("shardplug: ")
    assert err.count("\n") == 1
    assert words in err


HUGE = 10**21


@pytest.mark.parametrize("num_samples", [10, HUGE, 2**63])
@pytest.mark.parametrize("tail", ["pad", "drop", "uneven"])
@pytest.mark.parametrize("rest", ["", "--json", "--split-batches", "--resume-at 0"])
def test_no_number_is_too_large(
    capsys: pytest.CaptureFixture[str], num_samples: int, tail: str, rest: str
) -> None:
    line = f"plan -n {num_samples} -b {2 * HUGE} -w 2 --tail {tail} {rest}"
    status, out, err = run(capsys, line)
    assert (status, err) == (0, "")
    assert str(2 * HUGE if "split" in rest else 4 * HUGE) in "".join(out.split())


@pytest.mark.parametrize("order", ["--shuffle 1", f"--shuffle {HUGE} --epoch {HUGE}"])
@pytest.mark.parametrize(("num_samples", "expected"), [(10, 0), (HUGE, 2)])
def test_a_shuffle_in_huge_batches_is_drawn_or_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], order: str, num_samples: int, expected: int
) -> None:
    status, _, err = run(capsys, f"plan -n {num_samples} -b {HUGE} -w 2 {order}")
    assert (status, err.count("\n")) == (expected, expected // 2)


def test_a_huge_batch_is_drawn_by_its_ends(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, f"plan -n {3 * HUGE} -b {HUGE} -w 2 --tail uneven --json")
    assert status == 0
    second = json.loads(out)["legs"][0]["grid"][1]
    assert (second["rank"], second["rows"]) == (1, HUGE)
    assert second["ids"][:2] == [HUGE, HUGE + 1]
    assert second["ids"][-1] == 2 * HUGE - 1
