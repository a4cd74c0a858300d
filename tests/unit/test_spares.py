"""The memory of batches that are gone serves the next, and no more than two are held on to."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from shardplug.spares import Spares

ROWS = 1 << 18  # of four bytes: as small as it is kept
LARGE = (torch.float32, (ROWS,))


def spares() -> tuple[Spares, threading.Condition]:
    changed = threading.Condition()
    return Spares(changed), changed


def make(made_by: Spares, *kinds: tuple[torch.dtype, tuple[int, ...]]) -> list[Tensor]:
    return made_by.empty(kinds)


def test_dtypes_and_shapes_of_any_size() -> None:
    ours, _ = spares()
    tensors = make(
        ours, (torch.int64, (2, ROWS)), (torch.bool, (3,)), (torch.float32, (0, 5)), LARGE
    )
    assert [each.dtype for each in tensors] == [
        torch.int64,
        torch.bool,
        torch.float32,
        torch.float32,
    ]
    assert [tuple(each.shape) for each in tensors] == [(2, ROWS), (3,), (0, 5), (ROWS,)]
    assert tensors[0].untyped_storage().nbytes() == 2 * ROWS * 8


def test_memory_in_use_is_nobody_elses() -> None:
    ours, _ = spares()
    kept = [make(ours, LARGE)[0].fill_(value) for value in range(5)]
    part = make(ours, LARGE)[0].fill_(5)[-3:]  # a view of a tensor keeps its memory
    more = [make(ours, LARGE)[0].fill_(9) for _ in range(5)]
    assert [each[0].item() for each in kept] == [0, 1, 2, 3, 4]
    assert part.tolist() == [5, 5, 5]
    assert all(each[-1] == 9 for each in more)


def test_memory_of_a_tensor_that_is_gone_is_used_again() -> None:
    ours, _ = spares()
    first, second = make(ours, LARGE)[0], make(ours, LARGE)[0]
    place = first.data_ptr()
    assert second.data_ptr() != place
    del first
    assert make(ours, LARGE)[0].data_ptr() == place


def test_there_is_room_for_two_batches_unless_more_are_kept() -> None:
    ours, _ = spares()
    sizes = [4 * ROWS, 10]  # the second is too small to count
    assert ours.has_room(sizes)
    kept = [make(ours, LARGE)]
    assert ours.has_room(sizes)
    kept.append(make(ours, LARGE))
    assert not ours.has_room(sizes)
    assert ours.has_room([10])
    ours.expect_more()
    assert ours.has_room(sizes)
    kept.append(make(ours, LARGE))
    assert not ours.has_room(sizes)
    del kept[0]
    assert ours.has_room(sizes)


def test_who_waits_for_memory_hears_of_it() -> None:
    ours, changed = spares()
    kept = [make(ours, LARGE), make(ours, LARGE)]
    has_room: list[bool] = []

    def wait() -> None:
        with changed:
            has_room.append(changed.wait_for(lambda: ours.has_room([4 * ROWS]), timeout=20))

    waiting = threading.Thread(target=wait)
    waiting.start()
    kept.pop()
    waiting.join()
    assert has_room == [True]


def test_no_more_than_two_batches_are_held_on_to() -> None:
    ours, _ = spares()
    kept = [make(ours, LARGE) for _ in range(5)]
    kept.clear()
    assert len(ours._spare) == 2
    wide = make(ours, (torch.float32, (ROWS + 1,)))
    assert ours._spare == []
    assert len(wide) == 1


def test_tensors_outlive_what_made_them() -> None:
    ours, _ = spares()
    tensor = make(ours, LARGE)[0].fill_(3)
    del ours
    assert tensor.sum().item() == 3 * ROWS
