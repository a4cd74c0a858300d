"""Accumulation in one process: which loader decides, what a loss weighs, when steps happen."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, LinearLR
from torch.utils.data import DataLoader, IterableDataset

from shardplug import PlanError, ShardEngine
from shardplug.testing import LockstepComm, run_ranks


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Any:
        return iter(torch.ones(self.num_samples, 1))


def rows(num_samples: int) -> Any:
    return torch.ones(num_samples, 1)


def numbers(num_samples: int) -> Any:
    return torch.arange(num_samples)


def new_parts(steps: int, data: Any, **options: Any) -> tuple[ShardEngine, Any, Any, Any]:
    """An engine, a weight that is 0, its optimizer with learning rate 1, and a loader of ones."""
    engine = ShardEngine(gradient_accumulation_steps=steps, **options)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer, loader = engine.prepare(torch.optim.SGD([weight], lr=1.0), DataLoader(data, 1))
    return engine, weight, optimizer, loader


def moves(engine: ShardEngine, weight: Any, optimizer: Any, loader: Any) -> list[float]:
    """The weight after each micro-batch: each loss has gradient 1."""
    seen = []
    for batch in loader:
        with engine.accumulate():
            engine.backward((weight * batch).mean())
            optimizer.step()
            optimizer.zero_grad()
        seen.append(weight.item())
    return seen


@pytest.mark.parametrize("data", [rows(5), Stream(5)])
def test_a_short_last_window_steps_and_counts_in_full(data: Any) -> None:
    parts = new_parts(2, data)
    wanted = [0.0, -1.0, -1.0, -2.0, -3.0]
    seen = moves(*parts)
    # The end of a stream is known with its last batch: too late for the batches before it in the
    # window, of which there are none here.
    assert seen == wanted
    assert moves(*parts) == [-3.0 + each for each in wanted]  # windows start afresh


def test_a_stream_divides_by_a_full_window_where_its_end_comes_unforeseen() -> None:
    # 5 batches in windows of 3: the 4th is thought to be one of three, the 5th is known to be last.
    seen = moves(*new_parts(3, Stream(5)))
    assert seen == pytest.approx([0, 0, -1, -1, -1 - 1 / 3 - 1 / 2])
    assert moves(*new_parts(3, rows(5))) == [0, 0, -1, -1, -2]


def test_outside_of_accumulate_each_step_counts() -> None:
    engine, weight, optimizer, loader = new_parts(4, rows(2))
    for batch in loader:
        engine.backward((weight * batch).mean())
        optimizer.step()
        optimizer.zero_grad()
    assert weight.item() == -2


@pytest.mark.parametrize("is_left_early", [False, True])
def test_a_validation_loop_inside_changes_nothing(is_left_early: bool) -> None:
    engine, weight, optimizer, loader = new_parts(2, rows(6))
    validation = engine.prepare(DataLoader(rows(3), 1))
    seen = []
    for batch in loader:
        for _ in validation:
            if is_left_early:
                break
        with engine.accumulate():
            engine.backward((weight * batch).mean())
            optimizer.step()
            optimizer.zero_grad()
        seen.append(weight.item())
    assert seen == [0, -1, -1, -2, -2, -3]


def test_the_innermost_loop_decides_unless_a_loader_is_named() -> None:
    engine, _, optimizer, outer = new_parts(2, rows(4))
    inner = engine.prepare(DataLoader(rows(3), 1))
    windows, named = [], []
    for _ in outer:
        for _ in inner:
            with engine.accumulate():
                windows.append(optimizer.window.index)
        with engine.accumulate(loader=outer):
            named.append(optimizer.window.index)
    assert windows == [0, 1, 0] * 4
    assert named == [0, 1, 0, 1]


def test_schedules_wait_for_windows_and_count_what_is_asked() -> None:
    for unit, wanted in (("updates", [1.0, 0.5, 0.5, 0.0]), ("batches", [1.0, 0.5, 0.5, 0.0])):
        engine = ShardEngine(gradient_accumulation_steps=2, scheduler_unit=unit)  # type: ignore[arg-type]
        weight = torch.nn.Parameter(torch.zeros(1))
        inner = torch.optim.SGD([weight], lr=1.0)
        length = 2 if unit == "updates" else 4
        schedule = LinearLR(inner, 1.0, 0.0, total_iters=length)
        schedule, optimizer, loader = engine.prepare(schedule, inner, DataLoader(rows(4), 1))
        rates = []
        for batch in loader:
            with engine.accumulate():
                engine.backward((weight * batch).mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            rates.append(optimizer.param_groups[0]["lr"])
        assert rates == pytest.approx(wanted)


def test_a_mean_over_real_rows_weighs_what_it_stands_for() -> None:
    engine = ShardEngine(gradient_accumulation_steps=2)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer, loader = engine.prepare(
        torch.optim.SGD([weight], lr=1.0), DataLoader(numbers(5).float(), 4)
    )
    for batch in loader:
        with engine.accumulate():
            engine.backward((weight * batch).mean(), valid_rows=loader.valid_rows)
            optimizer.step()
    # One window of a full batch and one row: the mean of 0, 1, 2, 3, 4.
    assert weight.item() == pytest.approx(-2.0)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_rows_that_are_dropped_weigh_nothing(steps: int) -> None:
    engine = ShardEngine(gradient_accumulation_steps=steps)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer, loader = engine.prepare(
        torch.optim.SGD([weight], lr=1.0), DataLoader(rows(11), 2, drop_last=True)
    )
    for batch in loader:
        with engine.accumulate():
            engine.backward((weight * batch).mean(), valid_rows=loader.valid_rows)
            optimizer.step()
            optimizer.zero_grad()
    # Every gradient is 1, so that each window moves the weight by 1.
    assert weight.item() == pytest.approx(-math.ceil(5 / steps))


@pytest.mark.parametrize("tail", ["pad", "drop", "uneven", "exact"])
def test_real_rows_are_those_that_ranks_were_handed_in_these_steps(tail: str) -> None:
    def body(comm: LockstepComm) -> list[tuple[int, list[int | None]]]:
        loader = ShardEngine(comm=comm, tail=tail).prepare(DataLoader(numbers(13), 2))
        return [
            (loader.valid_rows, [loader.real_rows(start, step + 1) for start in range(step + 1)])
            for step, _ in enumerate(loader)
        ]

    by_rank = run_ranks(3, body)
    handed = [
        sum(seen[step][0] for seen in by_rank if step < len(seen))
        for step in range(len(by_rank[0]))
    ]
    for seen in by_rank:
        for step, (_, counted) in enumerate(seen):
            assert counted == [sum(handed[start : step + 1]) for start in range(step + 1)]


def test_clipping_unscales_first_and_waits_for_the_window() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    engine, weight, optimizer, loader = new_parts(2, rows(2), scaler=scaler)
    norms = []
    for batch in loader:
        with engine.accumulate():
            engine.backward((weight * batch * 6).mean())
            norms.append(float(engine.clip_grad_norm_([weight], 1.0)))
            optimizer.step()
    assert norms[1] == pytest.approx(6.0, rel=1e-4)
    assert weight.item() == pytest.approx(-1.0, rel=1e-4)


def test_a_loss_that_is_no_number_skips_its_window_alone() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    engine, weight, optimizer, loader = new_parts(1, rows(3), scaler=scaler)
    skipped = []
    for step, batch in enumerate(loader):
        with engine.accumulate():
            engine.backward((weight * batch).mean() * (float("nan") if step == 1 else 1.0))
            optimizer.step()
            skipped.append(optimizer.step_was_skipped)
            optimizer.zero_grad()
    assert skipped == [False, True, False]
    assert weight.item() == -2


@pytest.mark.parametrize("clear", ["at the top", "at the end"])
def test_an_optimizer_keeps_its_gradients_while_another_ones_loss_comes_first(clear: str) -> None:
    # As of a generator and its critic: each clears, computes and steps in turn.
    engine, critic, first, loader = new_parts(2, rows(4))
    generator = torch.nn.Parameter(torch.zeros(1))
    second = engine.prepare(torch.optim.SGD([generator], lr=1.0))
    for batch in loader:
        with engine.accumulate():
            for weight, optimizer in ((critic, first), (generator, second)):
                if clear == "at the top":
                    optimizer.zero_grad()
                engine.backward((weight * batch).mean())
                optimizer.step()
                if clear == "at the end":
                    optimizer.zero_grad()
    assert [critic.item(), generator.item()] == [-2, -2]


def test_nothing_is_carried_on_from_a_window_that_was_left_open() -> None:
    engine, weight, optimizer, loader = new_parts(2, rows(4))
    for is_left_early in (True, False):
        for batch in loader:
            with engine.accumulate():
                optimizer.zero_grad()
                engine.backward((weight * batch).mean())
                optimizer.step()
            if is_left_early:
                break
    assert weight.item() == -2


def test_a_window_that_goes_on_after_a_resume_keeps_what_it_holds() -> None:
    engine, weight, optimizer, loader = new_parts(2, rows(4))
    for part in range(2):
        for batch in loader:
            with engine.accumulate():
                optimizer.zero_grad()
                engine.backward((weight * batch).mean())
                optimizer.step()
            if part == 0:
                engine.load_state_dict(engine.state_dict())
                break
    assert weight.item() == -2


def test_after_a_window_that_was_left_open_a_loop_without_windows_steps_and_clips() -> None:
    engine, weight, optimizer, loader = new_parts(2, rows(4))
    for batch in loader:
        with engine.accumulate():
            engine.backward((weight * batch).mean())
        break
    optimizer.optimizer.zero_grad()
    for batch in loader:
        engine.backward((weight * batch).mean())
        engine.clip_grad_norm_([weight], 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert weight.item() == pytest.approx(-4 * 0.5, rel=1e-5)


def test_the_next_batch_may_be_fetched_within_a_window() -> None:
    engine, weight, optimizer, loader = new_parts(2, rows(4))
    batches = iter(loader)
    batch = next(batches)
    while batch is not None:
        with engine.accumulate():
            loss = (weight * batch).mean()
            batch = next(batches, None)
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    assert weight.item() == -2


def test_a_window_is_the_outer_loops_again_after_an_inner_one() -> None:
    engine, weight, optimizer, loader = new_parts(2, rows(4))
    other = torch.nn.Parameter(torch.zeros(1))
    its_optimizer, its_loader = engine.prepare(
        torch.optim.SGD([other], lr=1.0), DataLoader(rows(3), 1)
    )
    for batch in loader:
        with engine.accumulate():
            for its_batch in its_loader:
                with engine.accumulate():
                    engine.backward((other * its_batch).mean())
                    its_optimizer.step()
                    its_optimizer.zero_grad()
            engine.backward((weight * batch).mean())
            optimizer.step()
            optimizer.zero_grad()
    assert (weight.item(), optimizer.outcome.num_steps) == (-2, 2)
    assert (other.item(), its_optimizer.outcome.num_steps) == (-8, 8)


class Sharded(torch.nn.Linear):
    """Is told whether to synchronise, as the modules of FSDP2 are."""

    syncs = True

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        self.syncs = requires_gradient_sync


def test_a_model_synchronises_again_after_a_window_that_was_left() -> None:
    engine, _, _, loader = new_parts(2, rows(2))
    model = Sharded(1, 1)
    for _ in loader:
        with (
            pytest.raises(RuntimeError, match="in between, syncs: False"),
            engine.accumulate(model),
        ):
            raise RuntimeError(f"in between, syncs: {model.syncs}")
        break
    assert model.syncs


def test_no_pass_under_way() -> None:
    engine, *_ = new_parts(2, rows(2))
    with pytest.raises(PlanError, match="no pass under way"), engine.accumulate():
        pass


def test_a_loader_of_another_engine() -> None:
    engine, *_ = new_parts(2, rows(2))
    *_, other = new_parts(2, rows(2))
    with (
        pytest.raises(PlanError, match="`loader` must be one that this engine has prepared"),
        engine.accumulate(loader=other),
    ):
        pass


def test_rows_outside_of_a_window() -> None:
    engine, weight, *_ = new_parts(2, rows(2))
    with pytest.raises(PlanError, match="`valid_rows` must come with a window, got 1"):
        engine.backward(weight.sum(), valid_rows=1)


def test_rows_of_a_loader_that_declares_none() -> None:
    engine = ShardEngine(gradient_accumulation_steps=2)
    weight = torch.nn.Parameter(torch.zeros(1))
    loader = engine.prepare(DataLoader(rows(4), batch_sampler=[[0, 1], [2]]))
    for _ in loader:
        with (
            engine.accumulate(),
            pytest.raises(PlanError, match="a loader with a declared batch size"),
        ):
            engine.backward(weight.sum(), valid_rows=1)


@pytest.mark.parametrize("steps", [0, -1])
def test_windows_of_nothing(steps: int) -> None:
    with pytest.raises(PlanError, match="`gradient_accumulation_steps` must be at least 1"):
        ShardEngine(gradient_accumulation_steps=steps)


def test_an_unknown_unit() -> None:
    with pytest.raises(PlanError, match="`scheduler_unit` must be 'batches' or 'updates'"):
        ShardEngine(scheduler_unit="epochs")  # type: ignore[arg-type]


def test_what_is_prepared_twice_or_without_its_optimizer() -> None:
    engine = ShardEngine()
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = LambdaLR(inner, lambda _: 1.0)
    with pytest.raises(PlanError, match="whose optimizer is not"):
        engine.prepare(schedule)
    prepared = engine.prepare(inner)
    for again in (inner, prepared):
        with pytest.raises(PlanError, match="not prepared yet"):
            engine.prepare(again)
    assert engine.prepare(schedule).optimizers == (prepared,)


def test_gather_for_metrics_takes_the_innermost_loader() -> None:
    engine = ShardEngine()
    loader = engine.prepare(DataLoader(numbers(3), 2))
    assert [engine.gather_for_metrics(batch).tolist() for batch in loader] == [[0, 1], [2]]
    assert engine.gather({"x": torch.tensor(2)})["x"].tolist() == [2]
    with pytest.raises(PlanError, match="no pass under way"):
        engine.gather_for_metrics(torch.arange(2))
