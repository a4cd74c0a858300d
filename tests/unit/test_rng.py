"""The random number generators of a process: read, put back, seeded, made equal across ranks."""

from __future__ import annotations

import pickle
import random
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardplug import rng
from shardplug.comm import SoloComm
from shardplug.errors import PlanError, StateError
from shardplug.testing import LockstepComm, run_ranks

CPU_TYPES = ("torch", "numpy", "python")


def draws(generator: torch.Generator | None = None) -> tuple[Any, ...]:
    drawn = None if generator is None else torch.rand(2, generator=generator).tolist()
    return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random(), drawn


def test_a_seed_is_one_draw_of_torchs_generator() -> None:
    torch.manual_seed(3)
    seed, following = rng.draw_seed(), torch.rand(2).tolist()
    torch.manual_seed(3)
    expected = int(torch.randint(2**62, ()))
    assert (seed, following) == (expected, torch.rand(2).tolist())
    assert 0 <= seed < 2**62


@pytest.mark.parametrize(
    ("seed", "signed"),
    [
        (0, 0),
        (5, 5),
        (-5, -5),
        (2**63 - 1, 2**63 - 1),
        (2**63, -(2**63)),
        (2**64 - 1, -1),
        (2**64 + 7, 7),
    ],
)
def test_a_signed_seed_fits_a_message(seed: int, signed: int) -> None:
    assert rng.signed_seed(seed) == signed


@given(st.integers(-(2**63), 2**64 - 1))
def test_a_signed_seed_gives_the_numbers_of_the_seed(seed: int) -> None:
    first = torch.Generator().manual_seed(seed)
    second = torch.Generator().manual_seed(rng.signed_seed(seed))
    assert torch.equal(first.get_state(), second.get_state())


@pytest.mark.parametrize("seed", [0, 1, 2**32 + 5, 2**63 - 1])
@pytest.mark.parametrize("seeding", [rng.seed_cpu, rng.seed_all])
def test_seeding_is_that_of_each_library(seeding: Any, seed: int) -> None:
    seeding(seed)
    got = draws()
    assert torch.initial_seed() == seed
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    assert got == draws()


def test_what_is_captured_can_be_put_back() -> None:
    generator = torch.Generator().manual_seed(1)
    states = rng.capture((*CPU_TYPES, "generator"), generator)
    before = draws(generator)
    assert draws(generator) != before
    rng.restore(pickle.loads(pickle.dumps(states)), generator)
    assert draws(generator) == before


@pytest.mark.parametrize("name", CPU_TYPES)
def test_only_what_is_named_is_put_back(name: str) -> None:
    states = rng.capture([name])
    before = dict(zip(CPU_TYPES, draws(), strict=False))
    rng.restore(states)
    after = dict(zip(CPU_TYPES, draws(), strict=False))
    assert {each for each in CPU_TYPES if before[each] == after[each]} == {name}


def test_without_a_generator_there_is_nothing_to_capture_or_put_back() -> None:
    assert rng.capture(["generator"]) == {}
    state = rng.capture(["generator"], torch.Generator())
    rng.restore(state)


def test_the_names_are_checked_and_the_callers_list_is_left_alone() -> None:
    names = ["torch", "generator", "torch", "numpy"]
    assert rng.check_rng_types(names) == ("torch", "generator", "numpy")
    assert names == ["torch", "generator", "torch", "numpy"]
    assert rng.check_rng_types(None) == rng.check_rng_types([]) == ()
    assert rng.check_rng_types(("python",)) == ("python",)


@pytest.mark.parametrize("names", [["Torch"], ["torch", "tensorflow"], "torch", [None], [3]])
def test_an_unknown_name_is_refused(names: Any) -> None:
    wrong = next(name for name in names if name not in rng.RNG_TYPES)
    with pytest.raises(PlanError) as caught:
        rng.check_rng_types(names)
    assert str(caught.value) == (
        "`rng_types` must be among 'torch', 'cuda', 'xla', 'generator', 'numpy', 'python', got "
        f"{wrong!r}."
    )


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PlanError) as caught:
        rng.check_rng_types(["torch", "cuda"])
    assert str(caught.value) == (
        "`rng_types` must name generators of devices that are there, got 'cuda' without a CUDA "
        "device. Leave it out."
    )


def test_xla_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    with pytest.raises(PlanError) as caught:
        rng.check_rng_types(["xla"])
    assert str(caught.value) == (
        "`rng_types` must name generators of devices that are there, got 'xla' but torch_xla is "
        "not installed. Leave it out."
    )


def test_numpy_that_is_not_installed_is_refused_and_not_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rng, "np", None)
    with pytest.raises(PlanError) as caught:
        rng.check_rng_types(["numpy"])
    assert str(caught.value) == (
        "`rng_types` must be usable, got 'numpy' but numpy is not installed."
    )
    rng.seed_cpu(4)
    assert torch.initial_seed() == 4


def test_the_generators_of_devices_are_read_and_written_through_their_libraries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    xla = types.ModuleType("torch_xla.core.xla_model")
    kept: dict[str, Any] = {"cuda": 1, "xla": 2}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: kept["cuda"])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: kept.update(cuda=state))
    xla.get_rng_state = lambda: kept["xla"]  # type: ignore[attr-defined]
    xla.set_rng_state = lambda state: kept.update(xla=state)  # type: ignore[attr-defined]
    core = types.ModuleType("torch_xla.core")
    core.xla_model = xla  # type: ignore[attr-defined]
    for name, module in (
        ("torch_xla", types.ModuleType("torch_xla")),
        ("torch_xla.core", core),
        ("torch_xla.core.xla_model", xla),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    names = rng.check_rng_types(["cuda", "xla"])
    assert rng.capture(names) == {"cuda": 1, "xla": 2}
    rng.restore({"cuda": 7, "xla": 8})
    assert kept == {"cuda": 7, "xla": 8}


def test_a_generator_is_made_equal_to_rank_0s_in_one_message() -> None:
    def body(comm: LockstepComm) -> Any:
        generator = torch.Generator().manual_seed(comm.rank)
        rng.synchronize(["generator"], comm, generator=generator)
        return torch.rand(2, generator=generator).tolist(), [call.name for call in comm.calls]

    expected = torch.rand(2, generator=torch.Generator().manual_seed(0)).tolist()
    assert run_ranks(3, body) == [(expected, ["broadcast_object"])] * 3


def test_nothing_named_or_nobody_else_is_no_message() -> None:
    def body(comm: LockstepComm) -> int:
        rng.synchronize([], comm)
        return len(comm.calls)

    assert run_ranks(2, body) == [0, 0]
    before = torch.get_rng_state()
    rng.synchronize(["torch"], SoloComm())
    assert torch.equal(torch.get_rng_state(), before)


def test_all_generators_of_a_process_can_be_put_back() -> None:
    def draw() -> Any:
        return random.random(), np.random.rand(), torch.rand(()).item()

    states = rng.capture_process()
    first = draw()
    assert draw() != first
    rng.restore_process(states)
    assert draw() == first


def test_states_that_a_generator_does_not_take_change_none() -> None:
    states, others = rng.capture_process(), {"python": (3, (1,), None), "torch": torch.ones(1)}
    random.random()
    torch.rand(())
    before = random.getstate(), torch.get_rng_state().tolist()
    for name, damaged in others.items():
        with pytest.raises(StateError, match="`states` must be those of this process's generators"):
            rng.restore_process({**states, name: damaged})
        assert (random.getstate(), torch.get_rng_state().tolist()) == before


def test_every_device_of_the_accelerator_is_read_and_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[Any] = [[1, 2]]
    module = types.SimpleNamespace(
        get_rng_state_all=lambda: kept[0], set_rng_state_all=lambda states: kept.insert(0, states)
    )
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    states = rng.capture_process()
    assert states["accelerator"] == [1, 2]
    rng.restore_process({**states, "accelerator": [3, 4]})
    assert kept[0] == [3, 4]
    with pytest.raises(StateError, match="`states` must be of a process with the 2 accelerator"):
        rng.restore_process({**states, "accelerator": [3]})


def test_an_accelerator_with_one_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = [5]
    module = types.SimpleNamespace(
        get_rng_state=lambda: kept[0], set_rng_state=lambda state: kept.insert(0, state)
    )
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    states = rng.capture_process()
    assert states["accelerator"] == [5]
    rng.restore_process({**states, "accelerator": [6]})
    assert kept[0] == 6


def _draws() -> tuple[float, ...]:
    numpy = float(np.random.rand()), float(np.random.randn())
    return torch.rand(()).item(), random.random(), random.gauss(0, 1), *numpy


@pytest.mark.parametrize("has_store", [False, True])
@pytest.mark.parametrize("has_address", [False, True])
def test_generators_are_as_they_were_after_each_block(
    monkeypatch: pytest.MonkeyPatch, has_store: bool, has_address: bool
) -> None:
    if not has_address:
        monkeypatch.delattr(np.random, "get_bit_generator")  # as before numpy 1.24
    if has_store:
        np.random.randn()  # which leaves one more in store
    start = rng.capture(["torch", "python", "numpy"])
    due = [_draws() for _ in range(4)]
    rng.restore(start)
    preserved = rng.PreservedCpu()
    for each in due:
        for _ in range(2):  # the second time nobody has drawn in between
            with preserved:
                rng.seed_cpu(3)
                np.random.randn(7)
                random.gauss(0, 1)
                torch.rand(9)
        assert _draws() == each


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1])
def test_it_seeds_as_each_of_them_is_seeded_by_hand(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    due = _draws()
    random.gauss(0, 1)  # leaves one more in store
    rng.seed_cpu(seed)
    assert _draws() == due
