"""Every program in examples/ runs, alone and on two ranks where it says so, and is right."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import launch
from tests.programs import run_program

# Most of them read its digits, and it is slow to import.
launch.PRELOAD.append("sklearn.datasets")

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")  # a free port
VARIABLES = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def run(name: str, folder: Path, num_ranks: int = 1) -> str:
    """What a program prints, run on CPUs in a folder, on one rank or as torchrun would on more."""
    ended = run_program(EXAMPLES / name, folder=folder, num_ranks=num_ranks, environ=VARIABLES)
    for each in ended:
        assert each.status == 0, f"{each.out}\n{each.err}"
        assert "ShardplugWarning" not in each.err
    return "".join(each.out for each in ended)


def run_fresh(name: str, folder: Path, *launcher: str) -> str:
    """The same by an interpreter of its own, as a shell would start it."""
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / name)],
        cwd=folder,
        env={**os.environ, **VARIABLES},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "ShardplugWarning" not in done.stderr
    return done.stdout


def need(*packages: str) -> None:
    """Skip without a package, unless SHARDPLUG_NO_SKIP says that it must be there.

    It is only looked for: the programs import it, and this process need not.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            say = pytest.fail if os.environ.get("SHARDPLUG_NO_SKIP") else pytest.skip
            say(f"needs {package}")


def found(pattern: str, text: str) -> tuple[str, ...]:
    """The groups of a pattern that fits exactly once."""
    (match,) = re.finditer(pattern, text)
    return match.groups()


PLAIN = r"ranks: (\d), accuracy: (\d+/\d+) = (0\.\d+)\n"


def test_plain_pytorch_counts_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    need("sklearn")
    alone = run("plain_pytorch.py", tmp_path)
    together = run_fresh("plain_pytorch.py", tmp_path, *TORCHRUN)
    by_run = []
    for ranks, text in (("1", alone), ("2", together)):
        told, fraction, value = found(PLAIN, text)
        assert told == ranks
        right, _, seen = fraction.partition("/")
        assert seen == "357"
        assert value == f"{int(right) / 357:.4f}"
        assert float(value) > 0.9
        assert text.endswith("exact: 357 samples were counted, and the set has 357\n")
        by_run.append(fraction)
    assert by_run[0] == by_run[1]


IGNITE = r"(\d) ranks, (\d+) steps of 5 epochs: accuracy (0\.\d+), loss 0\.\d+ over (\d+) test"


def test_ignite_digits_counts_each_test_image_once(tmp_path: Path) -> None:
    need("sklearn", "ignite")
    for ranks in (1, 2):
        told, steps, accuracy, seen = found(IGNITE, run("ignite_digits.py", tmp_path, ranks))
        assert (int(told), int(seen)) == (ranks, 359)
        assert int(steps) == 5 * -(-1438 // (32 * ranks))
        assert float(accuracy) > 0.9


def test_ignite_resume_trains_on_each_image_once(tmp_path: Path) -> None:
    need("sklearn", "ignite")
    text = run("ignite_resume.py", tmp_path)
    # 60 steps of two ranks are an epoch of 45 and 15 more, of 32 images each.
    assert found(r"2 ranks: (\d+) images trained on\n", text) == (str(1438 + 15 * 32),)
    assert found(r"3 ranks: (\d+) images trained on\n", text) == (str(3 * 1438 - 15 * 32),)
    once, others = found(r"4 epochs of 1438 images: (\d+) trained on once, (\d+) twice or", text)
    assert (int(once), int(others)) == (4 * 1438, 0)
    (accuracy,) = found(r"accuracy (\S+) on 359 test images\n", text)
    assert float(accuracy) > 0.9


def test_ignite_exact_metrics_counts_each_sample_once(tmp_path: Path) -> None:
    need("ignite")
    text = run("ignite_exact_metrics.py", tmp_path)
    assert found(r"shardplug: accuracy (\S+) of (\d+) samples\n", text) == ("0.9000", "10")
    assert found(r"Ignite: accuracy (\S+) of (\d+) samples\n", text) == ("0.8333", "12")
    assert found(r"gathered from all ranks: (\d+) rows\n", text) == ("10",)


ACCUMULATION = r"ranks: (\d), micro-batches a step: 3\nparameters stay within (\S+) of"


def test_accumulation_follows_the_big_batch(tmp_path: Path) -> None:
    need("sklearn")
    for ranks in (1, 2):
        text = run("accumulation.py", tmp_path, ranks)
        told, apart = found(ACCUMULATION, text)
        assert int(told) == ranks
        assert float(apart) < 1e-5
        # 1797 samples, 48 from every rank in a step, and a short window at the end of each epoch.
        steps = [int(step) for step in re.findall(r"steps (\d+)", text)]
        assert steps == [epoch * -(-1797 // (48 * ranks)) for epoch in (1, 2, 3)]


ELASTIC = r"ranks: (\d), going on after step (\d+)\n"
ACCURACY = r"after step 72: accuracy (\d+)/357 = \d\d\.\d\d%\n"


def test_elastic_resume_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    need("sklearn")
    whole = run("elastic_resume.py", tmp_path, 2)
    assert found(ELASTIC, whole) == ("2", "0")
    # As if it had been killed after step 71, inside the last epoch: 70 is the newest there is.
    for newest in (tmp_path / "checkpoints").glob("step-00000072-*.pt"):
        newest.unlink()
    rest = run("elastic_resume.py", tmp_path)
    assert found(ELASTIC, rest) == ("1", "70")
    assert found(ACCURACY, rest) == found(ACCURACY, whole)
    assert int(*found(ACCURACY, rest)) > 0.9 * 357


def test_resume_demo_counts_who_saw_what(tmp_path: Path) -> None:
    need("sklearn")
    text = run_fresh("resume_demo.py", tmp_path)
    # Twelve steps an epoch; killed after the 43rd, with a checkpoint of the 40th.
    assert found(r"killed \(SIGKILL\) after step (\d+)\.", text) == ("43",)
    assert found(r"that of step (\d+), and took (\d+) lost steps again", text) == ("40", "3")
    assert re.findall(r"epoch (\d) +(\d.*\d) +1440 +0 +0\n", text) == [
        ("0", "720 + 720"),
        ("1", "720 + 720"),
        ("2", "720 + 720"),
        ("3", "240 + 240, then 320 + 320 + 320"),
        ("4", "480 + 480 + 480"),
        ("5", "480 + 480 + 480"),
    ]
    undisturbed, resumed = re.findall(r" (\d+)/357 = ", text)
    assert undisturbed == resumed
    assert int(resumed) > 0.9 * 357


GAN = r"(?s)discriminator +(\d+) steps taken, (\d+) skipped.*generator +(\d+) .* (\d+) skipped"


def test_gan_schedules_wait_for_real_steps(tmp_path: Path) -> None:
    need("sklearn")
    text = run("gan_two_optimizers.py", tmp_path)
    steps, skipped, others, others_skipped = map(int, found(GAN, text))
    assert (steps + skipped, others + others_skipped) == (5 * 28, 5 * 14)
    assert skipped > 0
    (rate,) = found(r"rate of the discriminator (\S+)", text)
    assert rate == f"{0.002 * 0.999**steps:.6f}"


@pytest.mark.timeout(400)
def test_digits_demo_counts_who_saw_what(tmp_path: Path) -> None:
    need("sklearn", "lightning")
    text = run_fresh("digits_demo.py", tmp_path)
    # 22 steps of 64 leave 28 digits; the last step is filled up with 36.
    trained = re.findall(r"epoch \d +(\d+) \+ (\d+) +(\d+) +(\d+) +(\d+)\n", text)
    (epochs,) = found(r"2 ranks, (\d) epochs:", text)
    assert trained == [("736", "736", "1400", "36", "0")] * int(epochs)
    validated = re.findall(r"  (\S+).* (\d+) +(\d+) +(\d+)   (\d+)/(\d+) = ", text)
    assert [(name, *seen) for name, *seen, _, _ in validated] == [
        ("shardplug,", "361", "0", "0"),
        ("one", "361", "0", "0"),
        ("Lightning", "360", "1", "0"),
    ]
    (right, counted), alone, (_, by_torch) = [(int(r), int(c)) for *_, r, c in validated]
    assert (right, counted) == alone
    assert (counted, by_torch) == (361, 362)
    assert right / counted > 0.9


def test_lightning_exact_evaluation_tests_each_sample_once(tmp_path: Path) -> None:
    need("lightning")
    text = run("lightning_exact_evaluation.py", tmp_path)
    assert sorted(re.findall(r"rank (\d) tests \[([\d, ]+)\]", text)) == [
        ("0", "0, 1, 2, 3"),
        ("1", "4, 5, 6"),
        ("2", "7, 8, 9"),
    ]
    assert found(r"mean over all ranks: (\S+)", text) == ("4.5",)


SEEN_BY_RANK = r"(\d) ranks, epoch (\d), rank (\d): \[([\d, ]+)\]"


def test_lightning_elastic_resume_loses_no_sample(tmp_path: Path) -> None:
    need("lightning")
    text = run("lightning_elastic_resume.py", tmp_path)
    told = [
        (int(ranks), int(epoch), int(rank), [int(each) for each in batch.split(", ")])
        for ranks, epoch, rank, batch in re.findall(SEEN_BY_RANK, text)
    ]
    before = [sample for ranks, _, _, batch in told if ranks == 2 for sample in batch]
    assert len(before) == 8
    for epoch, seen in enumerate([before, list[int]()]):
        by_rank = [
            [batch for ranks, e, r, batch in told if (ranks, e, r) == (3, epoch, rank)]
            for rank in range(3)
        ]
        # Eight batches of two are left for three ranks: one is repeated. Of twelve none is.
        assert [len(batches) for batches in by_rank] == [[3] * 3, [4] * 3][epoch]
        after = [sample for batches in by_rank for batch in batches for sample in batch]
        assert set(seen) | set(after) == set(range(24))
        assert len(seen) + len(after) == [26, 24][epoch]


def test_lightning_stream_is_read_by_one_rank(tmp_path: Path) -> None:
    need("lightning")
    text = run("lightning_stream.py", tmp_path)
    readers = re.findall(r"(\d+) lines are read by process (\d+)", text)
    assert [lines for lines, _ in readers] == ["14", "5"]
    assert len({process for _, process in readers}) == 1
    trained = re.findall(r"rank (\d) trains on \[([\d, ]+)\]", text)
    assert [batch for rank, batch in trained if rank == "0"] == ["0, 1", "4, 5", "8, 9", "12, 13"]
    assert [batch for rank, batch in trained if rank == "1"] == ["2, 3", "6, 7", "10, 11", "0, 1"]
    assert found(r"validated mean: (\S+)", text) == ("2.0",)


def test_every_program_is_tested_and_listed() -> None:
    tests = Path(__file__).read_text(encoding="utf-8")
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    programs = [
        program.name
        for program in EXAMPLES.glob("*.py")
        if "__main__" in program.read_text(encoding="utf-8")
    ]
    for name in programs:
        assert re.search(rf'run(_fresh)?\("{name}", tmp_path', tests), name
    assert sorted(re.findall(r"\]\((.*\.py)\) \|", listed)) == sorted(programs)
