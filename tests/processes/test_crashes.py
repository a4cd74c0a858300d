"""A training that is killed and started again ends as if nothing had happened, to the sample."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import drill_account
from benchmarks.crash_drill import KINDS, Drill
from benchmarks.drill_account import Attempt, DrillError, Step
from benchmarks.drill_training import NUM_SAMPLES, STEPS_PER_EPOCH, train
from shardplug import Comm
from tests.launch import run_processes


def train_undisturbed(comm: Comm, folder: Path, epochs: int) -> None:
    train(folder, epochs)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and SIGKILL")
@pytest.mark.timeout(300)
def test_killed_three_times_and_nothing_is_lost_or_repeated(tmp_path: Path) -> None:
    epochs = 5
    # This seed chooses one rank first, tears a checkpoint with the agent, and then chooses two.
    drill = Drill(tmp_path / "run", epochs=epochs, seed=10, worlds=(1, 2))
    try:
        for kind in KINDS:
            drill.strike(kind)
        drill.finish()
    finally:
        drill.stop()
    run_processes(1, train_undisturbed, tmp_path / "undisturbed", epochs, has_group=False)
    found = drill_account.account(drill.folder, tmp_path / "undisturbed", epochs=epochs)
    drill_account.check(found, epochs=epochs)
    assert found.seen == (epochs * NUM_SAMPLES, 0, 0)
    assert found.apart < 1e-5
    assert found.repeated > 0
    assert found.worlds[:2] == (1, 1)
    assert set(found.worlds[2:]) == {2}
    assert drill.num_torn == drill.count_in_logs("is torn and is passed over") == 1


# The account itself: what it is read from is written here by hand.


def write_attempt(folder: Path, name: str, start: int, by_rank: Sequence[str]) -> None:
    place = folder / "attempts" / name
    place.mkdir(parents=True)
    for rank, lines in enumerate(by_rank):
        text = f"{100 + rank} {start}\n{lines}"
        (place / f"{rank}-of-{len(by_rank)}.txt").write_text(text, encoding="utf-8")


def test_an_attempt_is_what_all_of_its_ranks_had_begun(tmp_path: Path) -> None:
    write_attempt(tmp_path, "0000", 3, ["4 0 7,8\n5 0 1,2\n6 1 0\n", "4 0 9\n5 0 -\n6 1 3"])
    assert drill_account.read_attempts(tmp_path) == [
        Attempt(3, (100, 101), (Step(0, (7, 8, 9)), Step(0, (1, 2))))
    ]


def test_an_attempt_that_died_before_it_began_is_none(tmp_path: Path) -> None:
    write_attempt(tmp_path, "0000", 0, ["1 0 5\n", "1 0 6\n", ""])
    (tmp_path / "attempts" / "0000" / "1-of-3.txt").unlink()
    (tmp_path / "attempts" / "0001").mkdir()
    assert drill_account.read_attempts(tmp_path) == []


def test_ranks_that_go_on_from_different_steps_are_told_of(tmp_path: Path) -> None:
    write_attempt(tmp_path, "0000", 0, ["1 0 5\n", "1 0 6\n"])
    (tmp_path / "attempts" / "0000" / "1-of-2.txt").write_text("101 5\n6 0 6\n", encoding="utf-8")
    with pytest.raises(DrillError, match=r"attempt 0000 went on after steps \[0, 5\]"):
        drill_account.read_attempts(tmp_path)


def test_ranks_in_different_epochs_are_told_of(tmp_path: Path) -> None:
    write_attempt(tmp_path, "0000", 0, ["1 0 5\n", "1 1 6\n"])
    with pytest.raises(DrillError, match="In attempt 0000 ranks were in different steps"):
        drill_account.read_attempts(tmp_path)


def attempt(start: int, *samples: int) -> Attempt:
    return Attempt(start, (1,), tuple(Step(0, (sample,)) for sample in samples))


def test_what_a_later_attempt_takes_again_is_lost_before() -> None:
    history = drill_account.surviving([attempt(0, 0, 1, 2, 3), attempt(2, 12, 13), attempt(3, 23)])
    assert [step.samples for step in history] == [(0,), (1,), (12,), (23,)]


def test_steps_that_nobody_took_are_told_of() -> None:
    with pytest.raises(DrillError, match="Start 1 went on after step 3, but 2 were taken"):
        drill_account.surviving([attempt(0, 0, 1), attempt(3, 3)])


def test_samples_are_counted_by_epoch() -> None:
    history = [Step(0, (1, 2)), Step(0, (2, 3)), Step(1, (1,))]
    assert drill_account.count_seen(history, 2) == (3, 1, 2 * NUM_SAMPLES - 4)


def whole_run() -> list[str]:
    batches = [range(at, min(at + 24, NUM_SAMPLES)) for at in range(0, NUM_SAMPLES, 24)]
    assert len(batches) == STEPS_PER_EPOCH
    return [f"{step} 0 {','.join(map(str, batch))}" for step, batch in enumerate(batches, 1)]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (None, f"{STEPS_PER_EPOCH - 1} steps survive, not {STEPS_PER_EPOCH}"),
        ("11 0 240,241", "Step 11 was"),
        ("11 1 " + ",".join(map(str, range(240, 250))), "Step 11 was"),
        ("11 0 0," + ",".join(map(str, range(241, 250))), "Step 11 was"),
    ],
)
def test_a_run_that_differs_is_told_of(tmp_path: Path, line: str | None, told: str) -> None:
    lines = whole_run()
    write_attempt(tmp_path / "wanted", "0000", 0, ["\n".join(lines) + "\n"])
    changed = [*lines[:-1], *([] if line is None else [line])]
    write_attempt(tmp_path / "run", "0000", 0, ["\n".join(changed) + "\n"])
    with pytest.raises(DrillError, match=told):
        drill_account.account(tmp_path / "run", tmp_path / "wanted", epochs=1)


def test_the_promises_are_checked() -> None:
    kept = drill_account.Account(1, (1,), 0, (NUM_SAMPLES, 0, 0), 0.0)
    drill_account.check(kept, epochs=1)
    for seen, apart, told in (
        ((NUM_SAMPLES - 1, 1, 0), 0.0, "Seen once 249, more often 1, never 0"),
        ((NUM_SAMPLES - 1, 0, 1), 0.0, "never 1"),
        ((NUM_SAMPLES, 0, 0), 1e-4, "differ by 0.0001"),
        ((NUM_SAMPLES, 0, 0), float("nan"), "differ by nan"),
    ):
        broken = drill_account.Account(1, (1,), 0, seen, apart)
        with pytest.raises(DrillError, match=told):
            drill_account.check(broken, epochs=1)
