"""The state of an engine: loaders, the open window, and what is each rank's own."""

from __future__ import annotations

import io
import json
import logging
import random
from collections.abc import Generator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader

from shardplug import PlanError, ShardEngine, StateError
from shardplug.prepared import PreparedLoader
from shardplug.states import decode, encode
from shardplug.testing import LockstepComm, run_ranks
from tests import laws

NUM_EPOCHS = 2


class Run:
    """An engine with a loader for training and one for validation, and an optimizer."""

    def __init__(self, steps: int = 3, **options: Any) -> None:
        self.model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        numbers: Any = torch.arange(20.0).view(20, 1)
        self.engine = ShardEngine(data_seed=1, gradient_accumulation_steps=steps, **options)
        prepared = self.engine.prepare(
            optimizer, DataLoader(numbers, 2, shuffle=True), DataLoader(numbers, 4)
        )
        self.optimizer: Any = prepared[0]
        self.training: PreparedLoader = prepared[1]
        self.validation: PreparedLoader = prepared[2]

    def go(self) -> Generator[tuple[int, list[float], int, int], None, None]:
        """Train; yields epoch, rows, and place and size of the window, before the step."""
        while self.training.epoch < NUM_EPOCHS:
            for batch in self.training:
                with self.engine.accumulate(self.model):
                    window = self.optimizer.window
                    rows = batch.flatten().tolist()
                    yield self.training.epoch, rows, window.index, window.micro_batches
                    self.engine.backward(self.model(batch).mean())
                    self.optimizer.step()
                    self.optimizer.zero_grad()


def positions(state: dict[str, Any]) -> tuple[int, int]:
    loader = state["loaders"][0]
    return loader["epoch"], loader["consumed"]


def test_it_goes_on_inside_a_window() -> None:
    """10 micro-batches an epoch in windows of 3, 3, 3 and 1: each stop, and the rest."""
    whole, states = [], []
    run = Run()
    for step in run.go():
        whole.append(step)
        states.append(run.engine.state_dict())
        laws.travels(states[-1])
    assert [size for *_, size in whole] == 2 * (9 * [3] + [1])
    for stop, state in enumerate(states):
        again = Run()
        again.engine.load_state_dict(json.loads(json.dumps(state)))
        assert again.engine.state_dict() == state  # before the first batch
        assert list(again.go()) == whole[stop + 1 :]


def test_what_is_open_is_said() -> None:
    run = Run()
    said = []
    for _ in run.go():
        said.append(run.engine.state_dict()["accumulation"])
        if len(said) == 5:
            break
    assert said == [
        {"steps": 3, "loader": 0, "micro_batches": 1, "consumed": 0},
        {"steps": 3, "loader": 0, "micro_batches": 2, "consumed": 0},
        {"steps": 3, "loader": None, "micro_batches": 0, "consumed": 0},
        {"steps": 3, "loader": 0, "micro_batches": 1, "consumed": 6},
        {"steps": 3, "loader": 0, "micro_batches": 2, "consumed": 6},
    ]


def test_the_position_of_the_last_optimizer_step() -> None:
    run = Run()
    steps = run.go()
    found = [positions(run.engine.state_dict(at="optimizer_step")) for _ in islice(steps, 10)]
    # While batch i is out and its window has not been stepped with: the start of that window.
    assert found == [(0, 0)] * 3 + [(0, 6)] * 3 + [(0, 12)] * 3 + [(0, 18)]
    steps.close()


def test_after_the_step_it_is_here() -> None:
    run = Run(steps=2)
    found = []
    for batch in run.training:
        with run.engine.accumulate(run.model):
            run.engine.backward(run.model(batch).mean())
            run.optimizer.step()
            run.optimizer.zero_grad()
        found.append(positions(run.engine.state_dict(at="optimizer_step")))
    assert [consumed for _, consumed in found] == [0, 4, 4, 8, 8, 12, 12, 16, 16, 20]
    assert positions(run.engine.state_dict(at="optimizer_step")) == (1, 0)


def test_the_last_step_may_lie_before_the_pass() -> None:
    """Stopped in a window, gone on, and asked before its step: the start of the window."""
    run = Run()
    steps = run.go()
    for _ in range(5):
        next(steps)
    state = run.engine.state_dict()
    again = Run()
    again.engine.load_state_dict(state)
    rest = again.go()
    _, rows, index, _ = next(rest)
    assert (index, len(rows)) == (2, 2)
    assert positions(again.engine.state_dict(at="optimizer_step")) == (0, 6)
    next(rest)
    assert positions(again.engine.state_dict(at="optimizer_step")) == (0, 12)
    steps.close()
    rest.close()


def test_real_rows_of_a_window_that_began_before_weigh_in() -> None:
    """4 micro-batches of 2 and a last of 1, in windows of 2: each row weighs one in its window."""
    numbers: Any = torch.arange(9.0).view(9, 1)

    def gradients(stop: int | None, state: dict[str, Any] | None) -> tuple[list[float], Any]:
        model = torch.nn.Linear(1, 1, bias=False)
        engine = ShardEngine(gradient_accumulation_steps=2)
        loader = engine.prepare(DataLoader(numbers, 2))
        if state is not None:
            engine.load_state_dict(state)
        found: list[float] = []
        for batch in loader:
            with engine.accumulate(model):
                model.zero_grad()
                engine.backward(model(batch).mean(), valid_rows=loader.valid_rows)
                assert model.weight.grad is not None
                found.append(model.weight.grad.item())
            if len(found) == stop:
                break
        return found, engine.state_dict()

    # Of rows 4 to 7 in a window: (4 + 5) / 4 and (6 + 7) / 4.
    whole, _ = gradients(None, None)
    assert whole == pytest.approx([0.25, 1.25, 2.25, 3.25, 8.0])
    for stop in range(1, 5):
        _, state = gradients(stop, None)
        assert gradients(None, state)[0] == pytest.approx(whole[stop:])


def test_validation_in_between_changes_nothing() -> None:
    run = Run()
    steps = run.go()
    next(steps)
    alone = run.engine.state_dict()
    next(iter(run.validation))  # left early
    state = run.engine.state_dict()
    assert (state["accumulation"], state["loaders"][0]) == (
        alone["accumulation"],
        alone["loaders"][0],
    )
    assert state["loaders"][1]["consumed"] == 4
    steps.close()


def test_torch_loads_it_safely() -> None:
    run = Run()
    next(run.go())
    saved = {"engine": run.engine.state_dict(), "ranks": run.engine.gather_rank_states()}
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == saved


@pytest.mark.filterwarnings(
    r"ignore:torch.distributed is (disabled, )?unavailable or uninitialized"
)
def test_distributed_checkpoint_takes_it(tmp_path: Path) -> None:
    run, again = Run(), Run()
    next(run.go())
    state = run.engine.state_dict()
    dcp.save({"engine": run.engine}, checkpoint_id=tmp_path)
    dcp.load({"engine": again.engine}, checkpoint_id=tmp_path)
    assert again.engine.state_dict() == state


# What is each rank's own.


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def test_generators_are_restored() -> None:
    run, again = Run(), Run()
    draw()
    random.gauss(0, 1)  # which leaves one more in store
    saved = json.loads(json.dumps(run.engine.gather_rank_states()))
    due = (*draw(), random.gauss(0, 1))
    draw()
    again.engine.load_state_dict(run.engine.state_dict(), rank_states=saved)
    assert (*draw(), random.gauss(0, 1)) == due


def test_on_another_number_of_ranks_generators_are_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def saved(comm: LockstepComm) -> dict[str, Any]:
        return Run(comm=comm).engine.gather_rank_states()

    states, same = run_ranks(2, saved)
    assert states == same
    assert (states["version"], states["world_size"], len(states["ranks"])) == (1, 2, 2)
    run = Run()
    torch.manual_seed(1)
    due = draw()
    torch.manual_seed(1)
    np.random.seed(0)
    random.seed(0)
    with caplog.at_level(logging.WARNING, logger="shardplug.resume"):
        run.engine.load_state_dict(run.engine.state_dict(), rank_states=states)
    assert draw()[0] == due[0]
    assert caplog.messages == [
        "The random number generators of 2 ranks are left out: there are 1 now. The data goes on "
        "where it was."
    ]


# What does not fit.


def changed(state: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    copied: dict[str, Any] = json.loads(json.dumps(state))
    *outer, last = path.split(".")
    inside: Any = copied
    for name in outer:
        inside = inside[int(name)] if isinstance(inside, list) else inside[name]
    inside[last] = value
    return copied


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("version", 7, "`version` of the state must be 1, got 7. Load it with"),
        ("loaders", [], "`loaders` of the state must be as many as the engine has prepared, 2, go"),
        ("loaders", "ab", "`loaders` of the state must be a list of states, got 'ab'."),
        ("loaders", None, "`loaders` of the state must be a list of states, got None."),
        ("loaders.1.num_samples", 3, "`num_samples` of the state must be that of the loader, 20,"),
        ("accumulation", None, "`state` must be the state of the accumulation window, a dictionar"),
        ("accumulation.steps", 4, "`gradient_accumulation_steps` must be 4 to go on inside a win"),
        ("accumulation.loader", 2, "`loader` of the state must be in [0, 2), got 2."),
        ("accumulation.micro_batches", "x", "`micro_batches` of the state must be an integer of"),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(
    path: str, value: Any, message: str
) -> None:
    run = Run()
    next(run.go())
    state = run.engine.state_dict()
    again = Run()
    before = again.engine.state_dict()
    with pytest.raises(StateError) as caught:
        again.engine.load_state_dict(changed(state, path, value))
    assert str(caught.value).startswith(message)
    assert again.engine.state_dict() == before


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("version", None, "`version` of the state must be 1, got None."),
        ("world_size", 0, "`world_size` of the state must be an integer of at least 1, got 0."),
        ("ranks", [], "`ranks` of the state must be a list of 1, got []."),
        ("ranks", ["text"], "`ranks` of the state must be as it was saved, got 'text'."),
        ("ranks", ['json:{"rng": 1}'], "`sources` of the state must be those of 2 loaders, got No"),
        (
            "ranks",
            ['json:{"sources": [[], []]}'],
            "`rng` of the state must be what gather_rank_sta",
        ),
        (
            "ranks",
            ['json:{"sources": [[], []], "rng": {"torch": 1}}'],
            "`rng` of the state must be what gather_rank_states() put there, got {'torch': 1}. Lea",
        ),
        (
            "ranks",
            ['json:{"sources": [[], []], "rng": {"python": [3, [1], null]}}'],
            "`states` must be those of this process's generators, got some that they do not take: ",
        ),
        (
            "ranks",
            ['json:{"sources": [[], []], "rng": {"python": [3, [], null], "accelerator": [1]}}'],
            "`states` must be of a process with the 0 accelerator devices that are here, got 1.",
        ),
        ("ranks", ["torch:AAAA"], "`ranks` of the state must be as it was saved, got text that c"),
    ],
)
def test_damaged_states_of_ranks_change_nothing(path: str, value: Any, message: str) -> None:
    run, other = Run(), Run()
    saved, before = run.engine.gather_rank_states(), run.engine.state_dict()
    next(other.go())
    torch.manual_seed(3)
    due = torch.rand(())
    torch.manual_seed(3)
    with pytest.raises(StateError) as caught:
        run.engine.load_state_dict(other.engine.state_dict(), changed(saved, path, value))
    assert str(caught.value).startswith(message)
    assert run.engine.state_dict() == before
    assert torch.rand(()) == due


def test_where_it_is_wanted_must_be_known() -> None:
    run = Run()
    with pytest.raises(PlanError, match=r'^`at` must be "now" or "optimizer_step", got \'soon\'.'):
        run.engine.state_dict(at="soon")
    with pytest.raises(PlanError, match=r'^`at` must be "now" without a prepared optimizer, got'):
        ShardEngine().state_dict(at="optimizer_step")


# States as text.


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        "text",
        [1, [2.5, None]],
        {"a": {"b": [True]}},
        (1, 2),
        {1: "one"},
        [b"bytes"],
        float("nan"),
        {"t": [(1,)]},
    ],
)
def test_text_gives_back_what_it_was_made_of(value: Any) -> None:
    read = decode(encode(value, what="it"), field="source")
    assert repr(read) == repr(value)


def test_tensors_travel_as_text() -> None:
    read = decode(encode({"t": torch.arange(3)}, what="it"), field="source")
    assert read["t"].tolist() == [0, 1, 2]


class Own:
    """An object whose class torch does not trust."""


@pytest.mark.parametrize("value", [Own(), lambda: 0])
def test_what_cannot_be_loaded_safely_is_refused(value: Any) -> None:
    with pytest.raises(StateError, match=r"^`state_dict\(\)` of MyStream must return numbers"):
        encode([value], what="MyStream")
