"""`shardplug check` finds what is planted, and nothing where there is nothing."""

from __future__ import annotations

import pytest

from shardplug.cli import main
from shardplug.cli.kinds import KINDS

LOADERS = "tests.unit.cli.loaders"


def check(capsys: pytest.CaptureFixture[str], name: str, *options: str) -> tuple[int, str]:
    """Returns the exit status, and what is printed with its line breaks taken out."""
    arguments = ["check", f"{LOADERS}:{name}", *options]
    if "--world-size" not in options:
        arguments += ["--world-size", "4"]
    status = main(arguments)
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return status, " ".join((out + err).split())


def found(printed: str) -> list[str]:
    return [kind for kind in KINDS if f"FAULT {kind}:" in printed]


FAULTS = [
    ("shuffled_by_each", "--as-is", "unsharded", "came 4 times, on ranks 0, 1, 2, 3"),
    ("filled_up", "--as-is", "twice", "3 of 21 samples came more than once"),
    ("parts_of_own_orders", "--as-is", "different-order", "never came"),
    ("with_gaps", "", "never", "12 samples never came in epoch 0: ids 1, 3, 5, 7, 9 and more"),
    ("with_repeats", "", "twice", "2 of 24 samples came more than once in epoch 0: ids 3, 4;"),
    ("drawn_by_each", "", "different-order", 'sync_order="broadcast"'),
    ("same_each_epoch", "", "equal-epochs", "Let the sampler follow set_epoch"),
    ("distributed", "--as-is --no-set-epoch", "equal-epochs", "Call set_epoch(epoch)"),
    ("too_long", "--as-is --world-size 1", "wrong-length", "is 12 on rank 0, but epoch 0 has 8"),
    ("too_long", "", "wrong-length", "do Correct its __len__, or remove it."),
    ("lying_stream", "", "wrong-length", "got an end after 12 steps instead of 24."),
    ("lying_stream", "--as-is --world-size 1", "wrong-length", "is 24 on rank 0"),
    ("uneven", "--as-is --world-size 5", "uneven-steps", "rank 0 takes 3 steps in epoch 0"),
    ("uneven_stream", "--as-is", "uneven-steps", "rank 0 takes 4 steps in epoch 0, rank 2 only 3"),
    ("odd_number", "--no-even-batches", "uneven-steps", "rank 3 only 2"),
    ("seeded_alike", "", "same-augmentation", "on more than one rank"),
    ("noisy_numpy", "--same-seed", "same-augmentation", "on more than one rank"),
    ("constant_torch", "", "same-augmentation", "seeded alike for every sample"),
    ("constant_numpy", "--world-size 1 --epochs 1", "same-augmentation", "seeded alike for every"),
    ("constant_python", "--split-batches --world-size 2", "same-augmentation", "seeded alike"),
    ("constant_collate", "", "same-augmentation", "seeded alike for every sample"),
    ("constant_stream", "", "same-augmentation", "seeded alike for every sample"),
    ("own_generator", "", "same-augmentation", "on more than one rank"),
    ("own_generator_in_workers", "--world-size 2 --epochs 1", "worker-repeats", "worker_init_fn"),
    ("own_generator_in_one_worker", "--world-size 2", "equal-augmentation", "24 times"),
    (
        "stream_in_workers",
        "--as-is --world-size 2 --epochs 1",
        "worker-repeats",
        "Every worker reads all",
    ),
    ("noisy_stream_in_workers", "--as-is --world-size 2 --epochs 1", "worker-repeats", "reads all"),
    ("cut_stream", "", "never", "already_sharded=True"),
    ("broken", "", "raises", "OSError: sample 13 is damaged Raised on rank 2 of 4."),
    ("broken", "--dispatch", "raises", "sample 13 is damaged"),
    ("broken", "--as-is --world-size 1", "raises", "after 6 batches of a pass"),
    ("broken_in_worker", "--world-size 1", "raises", "process 0. OSError: sample 13 is damaged R"),
    ("exiting_sample", "", "raises", "SystemExit: 3 Raised on rank"),
    ("exiting_sample", "--as-is", "raises", "SystemExit: 3 Raised on rank"),
    ("odd_error", "--dispatch", "raises", "OfNobody: 3"),
    ("other_data", "", "different-data", "number of samples"),
    ("numpy_gaps", "", "never", "12 samples never came in epoch 0: ids 1, 3, 5, 7, 9 and more"),
    (
        "keyed_with_repeats",
        "",
        "twice",
        "2 of 24 samples came more than once in epoch 0: ids '",
    ),
    ("filled_up_in_order", "--as-is", "twice", "3 of 61 samples came more than once"),
    ("filled_up_blocks", "--as-is", "twice", "3 of 61 samples came more than once"),
    ("twice_in_order", "", "twice", "24 of 24 samples came more than once"),
]


@pytest.mark.parametrize(("name", "options", "kind", "words"), FAULTS)
def test_a_planted_fault_is_found_and_no_other(
    capsys: pytest.CaptureFixture[str], name: str, options: str, kind: str, words: str
) -> None:
    status, printed = check(capsys, name, *options.split())
    assert (status, found(printed)) == (1, [kind]), printed
    assert words in printed


def test_each_kind_of_fault_is_planted() -> None:
    assert {kind for _, _, kind, _ in FAULTS} == set(KINDS)


SOUND = [
    ("sequential", ""),
    ("sequential", "--tail exact"),
    ("sequential", "--split-batches"),
    ("shuffled", ""),
    ("shuffled", "--tail drop"),
    ("shuffled", "--max-batches 9223372036854775807"),
    ("numpy_ids", ""),
    ("tensor_ids", ""),
    ("array_batches", ""),
    ("keyed", ""),
    ("keyed_by_pairs", "--split-batches --world-size 2"),
    ("keyed_by_arrays", ""),
    ("shuffled", "--dispatch"),
    ("dropping", ""),
    ("noisy", ""),
    ("noisy_numpy", "--split-batches --world-size 2"),
    ("noisy_in_workers", "--world-size 2"),
    ("seeding", ""),
    ("seeding", "--world-size 1"),
    ("collate_by_sample", ""),
    ("seeding_numpy", ""),
    ("seeding_python", "--split-batches --world-size 2"),
    ("weighted", "--as-is --world-size 1"),
    ("weighted", ""),
    ("subset", ""),
    ("ready_batches", ""),
    ("bucketed", ""),
    ("by_epoch", ""),
    ("batch_sampled", ""),
    ("distributed", ""),
    ("distributed", "--as-is"),
    ("filled_up", ""),
    ("stream", ""),
    ("stream", "--no-dispatch"),
    ("noisy_stream", ""),
    ("cut_stream", "--as-is"),
    ("whole_stream_in_workers", "--no-dispatch --world-size 2 --epochs 1"),
    ("split_stream_in_workers", "--world-size 2 --epochs 1"),
    ("Module", ""),
    ("own_iter", ""),
    ("own_iter", "--dispatch"),
    ("own_iter", "--as-is --world-size 1"),
    ("bypassing", ""),
    ("stateful", ""),
    ("drawn_by_each", "--sync-order broadcast"),
    ("cut_stream", "--already-sharded"),
    ("seeded_alike", "--seed-samples"),
]


@pytest.mark.parametrize(("name", "options"), SOUND)
def test_nothing_is_found_in_a_sound_loader(
    capsys: pytest.CaptureFixture[str], name: str, options: str
) -> None:
    status, printed = check(capsys, name, *options.split())
    assert (status, found(printed)) == (0, []), printed
    assert "ok: no fault found." in printed
