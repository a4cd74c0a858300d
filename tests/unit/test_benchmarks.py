"""What makes one table, one picture and two pages of the figures; nothing is measured here."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import machine, plot, report, results, sections, table
from benchmarks.results import KEPT, Measured, Results, ResultsError
from benchmarks.sections import SECTIONS, Goal, Section
from benchmarks.table import Row, at_least, at_most, to_know, without_figure

command = importlib.import_module("benchmarks.__main__")
ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG\r\n\x1a\n"


def measured(name: str, *rows: Row, **more: Any) -> Measured:
    return Measured(name, "2026-12-01 09:30", 12.3, 0.5, False, rows, more)


# -- rows --


def test_a_ratio_is_met_where_the_peer_takes_so_many_times_as_much() -> None:
    assert at_least("a", 2.0, 6.0, times=3).met
    assert not at_least("a", 2.0, 5.99, times=3).met
    assert at_least("a", 2.0, 6.0, times=3).ratio == 3.0


def test_a_limit_is_met_up_to_itself() -> None:
    assert at_most("a", 2.0, 2.0, unit="ms").met
    assert not at_most("a", 2.01, 2.0, unit="ms").met
    assert at_most("a", 2.0, 2.0, unit="ms").ratio is None
    assert at_most("a", 0.0, 0.0, unit="", peer=5.0).ratio is None


def test_lines_stand_in_columns_and_say_what_is_missed() -> None:
    found = table.lines_of(
        [
            at_least("quick", 0.5, 2.0, times=3, name="peer"),
            at_most("slow", 1234.5, 1000, unit="us"),
            to_know("known", 0.00012, unit="s"),
            without_figure("gone", "ImportError: no peer"),
        ]
    )
    assert found == [
        "what        ours      peer  peer/ours  target         met",
        "quick      0.5 s  2 s peer          4  peer/ours ≥ 3  yes",
        "slow     1234 us                       ≤ 1000 us       NO",
        "known  0.00012 s",
        "gone                                   a figure        NO",
        "    ImportError: no peer",
    ]


@pytest.mark.parametrize(
    ("value", "unit", "written"),
    [
        (None, "s", ""),
        (0.0, "", "0"),
        (3.14159, "ms", "3.14 ms"),
        (27_123.4, "us", "27123 us"),
        (3e7, "B", "3e+07 B"),
        (-4.2e-7, "", "-4.2e-07"),
    ],
)
def test_a_figure_has_three_digits_and_no_exponent_for_thousands(
    value: float | None, unit: str, written: str
) -> None:
    assert table.figure(value, unit) == written


def test_fewer_repeats_are_made_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(table.QUICK, raising=False)
    assert [table.fewer(count) for count in (1, 3, 9)] == [1, 3, 9]
    monkeypatch.setenv(table.QUICK, "1")
    assert [table.fewer(count) for count in (1, 3, 9)] == [1, 1, 2]


def test_runs_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(table.QUICK, raising=False)
    order: list[str] = []
    table.median_interleaved(lambda: order.append("ours"), lambda: order.append("peer"), 3)
    assert order == ["ours", "peer", "peer", "ours", "ours", "peer"]


# -- results --


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    rows = at_least("quick", 0.5, 2.0, times=3), without_figure("gone", "no peer")
    written = Results({"cores": 2}, (measured("loading", *rows, curves=[1]),))
    path = tmp_path / "build" / "deep" / "figures.json"
    results.save(written, path)
    assert results.load(path) == written
    told = json.loads(path.read_text(encoding="utf-8"))
    assert [row["ratio"] for row in told["sections"][0]["rows"]] == [4.0, None]


def test_a_section_takes_the_place_of_its_older_self() -> None:
    found = Results({}, ())
    for name, what in (("looking", "a"), ("permutation", "b"), ("loading", "c"), ("looking", "d")):
        found = found.with_section(measured(name, to_know(what, 1.0, unit="s")))
    assert [section.name for section in found.sections] == ["permutation", "loading", "looking"]
    assert [row.what for row in found.rows] == ["b", "c", "d"]


def test_figures_of_two_machines_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    results.save(Results({"cores": 2, "python": "3.11"}, ()), path)
    assert results.begin(path, {"cores": 2, "python": "3.11"}, anew=False).machine["cores"] == 2
    with pytest.raises(ResultsError, match=r"from another machine .* \(cores differ\)"):
        results.begin(path, {"cores": 64, "python": "3.11"}, anew=False)
    assert results.begin(path, {"cores": 64}, anew=True) == Results({"cores": 64}, ())
    assert results.begin(tmp_path / "none.json", {}, anew=False) == Results({}, ())


@pytest.mark.parametrize("text", ["", "{}", '{"machine": {}, "sections": [{"name": "loading"}]}'])
def test_a_file_that_holds_no_results_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "figures.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ResultsError, match=r"figures\.json is no file of results"):
        results.load(path)


def test_a_machine_is_described_so_that_it_can_be_written() -> None:
    told = json.loads(json.dumps(machine.describe()))
    assert told["processor"]
    assert told["cores"] >= 1
    # A build's own tag is not always in what is installed: 2.6.0 of 2.6.0+cu124.
    version, _, _ = importlib.import_module("torch").__version__.partition("+")
    assert told["packages"]["torch"].partition("+")[0] == version
    assert machine.load() >= 0


# -- the sections, and what they are to show --


def test_every_benchmark_is_a_section() -> None:
    with_rows = {
        path.stem
        for path in (ROOT / "benchmarks").glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name == "rows"
    }
    assert with_rows == {section.name for section in SECTIONS}


def test_every_goal_has_an_answer() -> None:
    goals = [goal for section in SECTIONS for goal in section.goals]
    assert len(goals) > 25
    for goal in goals:
        assert goal.rows or goal.tests, goal
        for test in goal.tests:
            assert (ROOT / test).exists(), test


def test_goals_without_a_row_are_listed() -> None:
    asked = Goal("one", ("a ", "b "))
    tested, unanswered = Goal("two", (), ("a test",)), Goal("three", ("c",))
    section = Section("any", "Any", (asked, tested, unanswered))
    assert sections.unanswered(section, ["b 1", "x c"]) == [unanswered]


# -- the command --


def plant(folder: Path, code: str, name: str = "tiny") -> Section:
    """Write a benchmark that needs no peer, and takes no time."""
    place = folder / "benchmarks"
    place.mkdir(exist_ok=True)
    (place / f"{name}.py").write_text(code, encoding="utf-8")
    return Section(name, "Tiny", (Goal("It is there", ("row",)),))


WRITES = f"""
import json, os, sys
row = {{"what": "row", "ours": 1.0, "peer": None, "unit": os.environ.get({table.QUICK!r}, "s"),
       "target": "≤ 2", "met": True, "ratio": None}}
with open(sys.argv[sys.argv.index("--json") + 1], "w", encoding="utf-8") as file:
    json.dump({{"machine": {{}}, "rows": [row], "curves": [3]}}, file)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.delenv(table.QUICK, raising=False)
    return tmp_path


def test_a_benchmark_is_run_in_a_process_of_its_own(folder: Path) -> None:
    section = plant(folder, WRITES)
    found = command.measure(section, False)
    assert found.rows == (Row("row", 1.0, None, "s", "≤ 2", True),)
    assert (found.name, found.is_quick, found.more) == ("tiny", False, {"curves": [3]})
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", found.date)
    assert command.measure(section, True).rows[0].unit == "1"


def test_a_goal_that_no_row_answers_is_a_row(folder: Path) -> None:
    section = plant(folder, WRITES.replace('"what": "row"', '"what": "other"'))
    other, missing = command.measure(section, False).rows
    assert other.what == "other"
    assert (missing.what, missing.met, missing.note) == ("It is there", False, "No row answers it.")


@pytest.mark.parametrize(
    ("code", "note"),
    [
        ("import no_such_peer", "ModuleNotFoundError: No module named 'no_such_peer'"),
        ("raise SystemExit('the batches differ')", "the batches differ"),
        ("import os; os._exit(7)", "It ended with status 7."),
        ("import sys; print('Warning: w', file=sys.stderr); raise ValueError(3)", "ValueError: 3"),
        (WRITES + "raise ValueError('at the end')", "ValueError: at the end"),
    ],
)
def test_a_benchmark_that_fails_is_a_row_that_says_why(folder: Path, code: str, note: str) -> None:
    *_, last = command.measure(plant(folder, code), False).rows
    assert (last.what, last.ours, last.met) == ("benchmarks.tiny", None, False)
    assert last.note == note


def test_a_benchmark_that_hangs_is_given_up() -> None:
    words = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert command.run(words, {}, 0.01) == "It was given up after 0.01 s."


@pytest.mark.skipif(not hasattr(os, "fork"), reason="has no sessions of processes")
def test_what_a_benchmark_has_started_ends_with_it() -> None:
    code = "import os, time; child = os.fork(); child and print(child, flush=True); time.sleep(600)"
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as parent:
        assert parent.stdout is not None
        assert int(parent.stdout.readline())
        command.end(parent)
        assert parent.stdout.read() == b""  # the last that had it open is gone


class Planted:
    """Stands for measuring, and notes what was asked for."""

    def __init__(self, **missed: bool) -> None:
        self.missed = missed
        self.asked: list[tuple[str, bool]] = []

    def __call__(self, section: Section, is_quick: bool) -> Measured:
        self.asked.append((section.name, is_quick))
        limit = 1 if self.missed.get(section.name) else 3
        return measured(section.name, at_most(f"row of {section.name}", 2, limit, unit="s"))


def test_all_of_them_make_one_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, planted = tmp_path / "all.json", Planted(loading=True)
    assert command.main(["--json", str(path)], planted) == 0
    out = capsys.readouterr().out
    names = [section.name for section in SECTIONS]
    assert planted.asked == [(name, False) for name in names]
    count = len(names)
    assert f"[2/{count}] {SECTIONS[1].title} ... 12 s, 1 missed" in out
    assert [name for name in names if f"  row of {name} " not in out] == []
    assert f"{count - 1} of {count} targets met\n  missed: row of loading\n" in out
    assert results.load(path).missed == [at_most("row of loading", 2, 1, unit="s")]


def test_one_is_measured_and_the_others_figures_stay(tmp_path: Path) -> None:
    words = ["--json", str(tmp_path / "all.json")]
    assert command.main(words, Planted()) == 0
    planted = Planted(looking=True)
    only = ["looking", "--only", "loading", "--quick", *words]
    assert command.main(only, planted) == 0
    assert planted.asked == [("loading", True), ("looking", True)]
    found = results.load(tmp_path / "all.json")
    assert len(found.sections) == len(SECTIONS)
    assert [row.what for row in found.missed] == ["row of looking"]


@pytest.mark.parametrize(("is_missed", "status"), [(False, 0), (True, 1)])
def test_a_check_ends_with_what_it_has_found(tmp_path: Path, is_missed: bool, status: int) -> None:
    words = ["--json", str(tmp_path / "all.json"), "--check"]
    assert command.main(words, Planted(crashes=is_missed)) == status


def test_figures_of_another_machine_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "all.json"
    results.save(Results({"cores": 10**6}, ()), path)
    assert command.main(["looking", "--json", str(path)], Planted()) == 2
    assert "is from another machine or other releases" in capsys.readouterr().err


def test_a_benchmark_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["nothing"], ["--only", "nothing"]):
        with pytest.raises(SystemExit, match="2"):
            command.main(words, Planted())
        assert "there is no benchmark 'nothing'; there are permutation, " in capsys.readouterr().err


# -- the pages --


def planted_results() -> Results:
    peers = {what: at_least(what, 0.002, 3.0, times=2, name="peer") for what in report.CHOSEN}
    told: dict[str, Any] = {"processor": "A processor", "cores": 2, "memory_gb": 8}
    told |= {"system": "Linux", "python": "3.11.2", "packages": {"torch": "2.13.0"}}
    rows = [at_most("loader / plain DataLoader, one rank of 1", 1.2, 1.05, unit="")]
    return Results(told, (measured("loading", *rows, *peers.values()),))


def test_a_page_tells_of_the_machine_each_goal_and_each_row() -> None:
    lines = report.page_of(planted_results()).splitlines()
    assert lines[0] == (
        "Measured on 2026-12-01: A processor, 2 cores, 8 GB of memory, Linux, Python 3.11.2; "
        "torch 2.13.0."
    )
    aimed = len(report.CHOSEN) + 1
    assert lines[2] == f"**{aimed - 1} of {aimed} targets are met.**"
    assert (
        "| A loader costs ≤ 1.05 times a plain DataLoader at 1, 8, 64 ranks, ≤ 1.5 at 1024 "
        "| `loading`: `loader / plain DataLoader …` | **no**: 1 of 2 figures |"
    ) in lines
    assert (
        "| gather_for_metrics of 3 tensors on 4 gloo ranks: ≤ 1/2 of accelerate's time "
        "| `gathering`: `gather_for_metrics …` | not measured |"
    ) in lines
    assert (
        "| The same batches as accelerate, RandomSampler, n=1e7, batch 32: ≥ 3 times as fast at 1 "
        "rank, ≥ 6 times at 8, 64, 1024 | `loading`: `accelerate's batches, one rank of …` | yes |"
    ) in lines
    overhead = "An iteration takes ≤ 5 % longer than that of a bare engine"
    assert f"| {overhead} | `ignite_overhead` | not measured |" in lines
    at_once = "shardplug plan is there at once for any size (1e12 samples, 100,000 ranks)"
    assert f"| {at_once} | `looking`: `shardplug plan --json …` | not measured |" in lines
    assert "| loader / plain DataLoader, one rank of 1 | 1.2 |  |  | ≤ 1.05 | **no** |" in lines
    first = "epoch of one rank of 1024, n=1e7 | 0.002 s | 3 s peer | 1.5e+03 | peer/ours ≥ 2"
    assert f"| {first} | yes |" in lines
    when = "2026-12-01 09:30 UTC, 12 s; load of the machine before: 0.5"
    assert f"`python -m benchmarks.loading`, {when}" in lines


def test_the_readme_gets_a_few_figures_in_units_that_suit_them() -> None:
    lines = report.readme_of(planted_results()).splitlines()
    assert lines[2:] == [f"| {called} | 2 ms | 3 s | peer |" for called in report.CHOSEN.values()]
    with pytest.raises(report.ReportError, match="There is no figure 'epoch of one rank of 1024"):
        report.readme_of(Results({}, ()))


@pytest.mark.parametrize(
    ("value", "unit", "written"),
    [
        (None, "s", ""),
        (1.0, "s", "1 s"),
        (0.999, "s", "1000 ms"),
        (0.0004, "ms", "0.4 µs"),
        (12_345.0, "us", "12 ms"),
        (38.1, "MB", "38 MB"),
        (1.049, "", "1 ×"),
    ],
)
def test_a_figure_for_people(value: float | None, unit: str, written: str) -> None:
    assert report.readable(value, unit) == written


def test_what_stands_between_the_marks_is_written_anew() -> None:
    page = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    once = report.put("new", page, Path("page.md"))
    assert once == f"before\n{report.BEGIN}\n\nnew\n\n{report.END}\nafter\n"
    assert report.put("new", once, Path("page.md")) == once


@pytest.mark.parametrize(
    "page", ["", report.BEGIN, f"{report.END}{report.BEGIN}", f"{report.BEGIN}{report.END}" * 2]
)
def test_a_page_without_a_place_for_figures_is_named(page: str) -> None:
    with pytest.raises(report.ReportError, match=r"page\.md must have one line '<!-- figures:"):
        report.put("new", page, Path("page.md"))


def test_a_translation_keeps_its_words_and_gets_the_figures() -> None:
    table = "| | ours |\n| --- | --: |\n| one thing | 1 s |\n| two | 2 s |"
    page = (
        f"{report.BEGIN}\n| | unser |\n| --- | --: |\n| eins | 7 s |\n| zwei | 8 s |\n{report.END}"
    )
    told = report.translated(table, page, Path("page.md"))
    assert told == "| | unser |\n| --- | --: |\n| eins | 1 s |\n| zwei | 2 s |"
    with pytest.raises(report.ReportError, match=r"page\.md must have 3 lines of figures, got 4\."):
        report.translated(table.rpartition("\n")[0], page, Path("page.md"))


@pytest.mark.parametrize("page", [report.PAGE, report.README, report.TRANSLATED])
def test_the_pages_show_the_figures_that_were_kept(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == report.renewed(results.load(KEPT), page)


def test_the_figures_that_were_kept_answer_every_goal() -> None:
    kept = results.load(KEPT)
    assert [section.name for section in kept.sections] == [section.name for section in SECTIONS]
    answers = [each for section in SECTIONS for each in report.answers(kept, section)]
    assert [goal.text for goal, answer in answers if answer == "not measured"] == []
    assert [row.what for row in kept.rows if row.ours is None] == []


# -- the pictures --


def planted_curves() -> Measured:
    curves = [
        {"panel": panel, "name": name, "points": [[1, 2.0], [4096, 10.0**power]]}
        for panel in plot.PANELS
        for power, name in enumerate(plot.SHORT)
    ]
    return measured("scaling", num_samples=1000, batch_size=32, curves=curves)


@pytest.mark.parametrize(
    ("heights", "moved"),
    [
        ([], []),
        ([0.1, 0.9], [0.1, 0.9]),
        ([0.5, 0.5], [0.4, 0.6]),
        ([0.6, 0.5, 0.1], [0.65, 0.45, 0.1]),
        ([0.5, 0.5, 0.5], [0.3, 0.5, 0.7]),
        ([0.25, 0.5, 0.5], [0.216667, 0.416667, 0.616667]),
    ],
)
def test_labels_are_moved_apart_as_little_as_need_be(
    heights: list[float], moved: list[float]
) -> None:
    assert plot.spread(heights, 0.2) == pytest.approx(moved)


def test_the_picture_names_each_curve_at_its_end() -> None:
    figure = plot.draw(planted_curves(), plot.LIGHT)
    figure.canvas.draw()
    for axes in figure.axes:
        texts = [text.get_text().replace("\n", " ") for text in axes.texts]
        assert texts == [
            "shardplug, PermutedSampler  1 µs",
            "shardplug, accelerate's order  10 µs",
            "accelerate  100 µs",
            "torch DistributedSampler  1 ms",
        ]
        boxes = [text.get_window_extent() for text in axes.texts]
        assert all(low.y1 <= high.y0 for low, high in pairwise(boxes))
        assert all(box.x1 <= figure.bbox.x1 for box in boxes)
    assert figure.axes[0].get_ylabel() == "time for a batch on one rank"
    assert {axes.get_xlabel() for axes in figure.axes} == {"ranks"}


def test_pictures_tell_of_which_figures_they_are(tmp_path: Path) -> None:
    curves = planted_curves()
    first = [path.read_bytes() for path in plot.save_pictures(curves, tmp_path / "one")]
    again = [path.read_bytes() for path in plot.save_pictures(curves, tmp_path / "two")]
    assert first == again
    assert [each.startswith(PNG) for each in first] == [False, False, True]
    assert all(plot.digest(curves).encode() in each for each in first)
    assert first[0] != first[1]


def test_without_figures_nothing_is_drawn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "all.json"
    words = ["--results", str(path), "--folder", str(tmp_path)]
    assert plot.main(words) == 2
    results.save(Results({}, ()), path)
    assert plot.main(words) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("Measure first: python -m benchmarks")
    assert "has no figures to draw" in second
    results.save(Results({}, (planted_curves(),)), path)
    assert plot.main(words) == 0
    assert (tmp_path / "scaling.png").exists()


@pytest.mark.parametrize("name", plot.FILES)
def test_the_pictures_show_the_figures_that_were_kept(name: str) -> None:
    scaling = results.load(KEPT).section("scaling")
    assert scaling is not None
    assert plot.digest(scaling).encode() in (plot.FOLDER / name).read_bytes()
