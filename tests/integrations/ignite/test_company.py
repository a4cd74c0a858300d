"""What else is attached to engines goes on working: Ignite's own handlers beside ours."""

from __future__ import annotations

import io
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.contrib.engines.common import setup_common_training_handlers
from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.handlers import (
    BasicTimeProfiler,
    Checkpoint,
    DiskSaver,
    EarlyStopping,
    EMAHandler,
    HandlersTimeProfiler,
    ProgressBar,
    TerminateOnNan,
    TimeLimit,
    Timer,
)
from ignite.handlers.lr_finder import FastaiLRFinder
from ignite.metrics import RunningAverage
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardplug import Comm, SoloComm
from shardplug.testing import run_ranks
from shardplug_ignite import ShardHandler
from tests.integrations.ignite.data import Ids

Loader = DataLoader[Any]


def loader_of(num_samples: int, **options: Any) -> Loader:
    return DataLoader(Ids(num_samples), batch_size=2, **options)


def counting(comm: Comm, **options: Any) -> tuple[Engine, ShardHandler]:
    """An engine whose output is the sum of its batch."""
    engine = Engine(lambda _, batch: float(batch.sum()))
    handler = ShardHandler(comm=comm, **options)
    handler.attach(engine)
    return engine, handler


def lasting(attach: Callable[[Engine, int], object], max_epochs: int = 2) -> list[int]:
    """How many iterations each of two ranks does with a handler attached; 8 are all."""

    def rank(comm: Comm) -> int:
        engine, _ = counting(comm)
        engine.add_event_handler(Events.ITERATION_STARTED, lambda _: comm.barrier())  # as DDP does
        attach(engine, comm.rank)
        return engine.run(loader_of(16), max_epochs=max_epochs).iteration

    return run_ranks(2, rank)


def test_a_progress_bar_knows_the_length_of_the_shard() -> None:
    def rank(comm: Comm) -> str:
        engine, _ = counting(comm)
        out = io.StringIO()
        ProgressBar(file=out, persist=True).attach(engine)
        engine.run(loader_of(16), max_epochs=1)
        return out.getvalue()

    for printed in run_ranks(2, rank):
        assert "[4/4]" in printed
        assert "/8]" not in printed


def test_filters_of_events_count_the_steps_of_the_shard() -> None:
    def rank(comm: Comm) -> list[str]:
        engine, _ = counting(comm)
        log: list[str] = []
        for name, event in {
            "every": Events.ITERATION_COMPLETED(every=3),
            "once": Events.ITERATION_COMPLETED(once=5),
            "window": Events.ITERATION_COMPLETED(before=2, after=0),
            "epoch": Events.EPOCH_COMPLETED(every=2),
            "either": Events.STARTED | Events.COMPLETED,
        }.items():

            def note(engine: Engine, name: str = name) -> None:
                log.append(f"{name} {engine.state.iteration}")

            engine.add_event_handler(event, note)
        engine.run(loader_of(16), max_epochs=2)
        return log

    expected = ["either 0", "window 1", "every 3", "once 5", "every 6", "epoch 8", "either 8"]
    assert run_ranks(2, rank) == [expected] * 2


def test_a_batch_that_is_rewritten_is_what_the_step_gets() -> None:
    engine, handler = counting(SoloComm())

    @engine.on(Events.ITERATION_STARTED)
    def rewrite(engine: Engine) -> None:
        state: Any = engine.state
        state.batch = state.batch[: handler.loader.valid_rows] * 10

    assert engine.run(loader_of(3)).output == 20.0


# What stops an engine.


def test_a_loss_that_is_no_number_on_one_rank_ends_all() -> None:
    def attach(engine: Engine, rank: int) -> None:
        def output(value: float) -> float:
            return float("nan") if rank == 1 and engine.state.iteration == 3 else value

        engine.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan(output))

    assert lasting(attach) == [4, 4]  # the last of the epoch


def test_a_limit_of_time_on_one_rank_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("ignite.handlers.time_limit.time.time", lambda: now[0])

    def attach(engine: Engine, rank: int) -> None:
        limit = TimeLimit(1)

        def pass_time() -> None:
            if engine.state.iteration == 5:
                now[0] = 10.0

        if rank == 0:
            engine.add_event_handler(Events.ITERATION_COMPLETED, pass_time)
            engine.add_event_handler(Events.ITERATION_COMPLETED, limit)

    assert lasting(attach) == [6, 6]  # the other rank learns of it during the one that follows


def test_stopping_early_on_one_rank_ends_all() -> None:
    def attach(engine: Engine, rank: int) -> None:
        evaluator = Engine(lambda _, batch: batch)
        scores = iter([3, 2, 1, 0]) if rank == 0 else iter([1, 2, 3, 4])
        stopper = EarlyStopping(2, lambda _: next(scores), engine)
        evaluator.add_event_handler(Events.COMPLETED, stopper)
        engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0]))

    assert lasting(attach, max_epochs=4) == [12, 12]


# What saves.


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_checkpoints_are_written_as_ever(tmp_path: Path) -> None:
    engine, handler = counting(SoloComm())
    objects = {"trainer": engine, "shard": handler}

    def keeping(folder: str, **options: Any) -> Any:
        saver = DiskSaver(str(tmp_path / folder), create_dir=True, require_empty=False)
        return Checkpoint(objects, saver, n_saved=2, **options)

    scores = iter([1.0, 3.0, 2.0])
    engine.add_event_handler(Events.ITERATION_COMPLETED(every=2), keeping("iteration"))
    by_epoch = keeping("epoch", global_step_transform=lambda *_: engine.state.epoch)
    engine.add_event_handler(Events.EPOCH_COMPLETED, by_epoch)
    by_score = keeping("score", score_function=lambda _: next(scores), score_name="score")
    engine.add_event_handler(Events.EPOCH_COMPLETED, by_score)
    engine.add_event_handler(Events.EPOCH_COMPLETED, keeping("self", include_self=True))
    engine.run(loader_of(8), max_epochs=3)

    assert files(tmp_path / "iteration") == ["checkpoint_10.pt", "checkpoint_12.pt"]
    assert files(tmp_path / "epoch") == ["checkpoint_2.pt", "checkpoint_3.pt"]
    assert files(tmp_path / "score") == [
        "checkpoint_score=2.0000.pt",
        "checkpoint_score=3.0000.pt",
    ]
    found = torch.load(tmp_path / "self" / "checkpoint_12.pt", weights_only=True)
    assert set(found) == {"trainer", "shard", "checkpointer"}
    for path in tmp_path.glob("*/*.pt"):
        assert torch.load(path, weights_only=True)["shard"]["version"] == 1


def test_a_checkpoint_of_an_exception_leaves_nothing_out(tmp_path: Path) -> None:
    """The batch that failed was handed out, and counted by the engine, but not trained on."""
    seen: list[list[int]] = []
    fails = True

    def step(engine: Engine, batch: torch.Tensor) -> None:
        if fails and engine.state.iteration == 6:
            raise ZeroDivisionError
        seen.append(batch.tolist())

    engine = Engine(step)
    handler = ShardHandler(comm=SoloComm())
    handler.attach(engine)
    saver = DiskSaver(str(tmp_path), require_empty=False)
    objects = {"trainer": engine, "shard": handler}
    engine.add_event_handler(Events.EXCEPTION_RAISED, Checkpoint(objects, saver))

    @engine.on(Events.EXCEPTION_RAISED)
    def pass_on(error: Exception) -> None:
        raise error

    loader = loader_of(8, shuffle=True)
    with pytest.raises(ZeroDivisionError):
        engine.run(loader, max_epochs=3)
    (path,) = tmp_path.iterdir()
    fails = False
    # Into the very engine that has failed: its next run would do nothing, else.
    Checkpoint.load_objects(objects, torch.load(path, weights_only=True))
    engine.run(loader, max_epochs=3)
    assert engine.state.iteration == len(seen) == 12
    for epoch in range(3):
        rows = seen[4 * epoch : 4 * epoch + 4]
        assert sorted(chain.from_iterable(rows)) == list(range(8))


# What measures.


def test_running_averages_and_timers_go_along() -> None:
    engine, _ = counting(SoloComm())
    average: Any = RunningAverage(output_transform=lambda value: value, alpha=0.5)
    average.attach(engine, "average")
    timer = Timer(average=True)
    timer.attach(engine, step=Events.ITERATION_COMPLETED, resume=Events.ITERATION_STARTED)
    state = engine.run(loader_of(6), max_epochs=1)
    assert state.metrics["average"] == pytest.approx(0.5 * (0.5 * 1 + 0.5 * 5) + 0.5 * 9)
    assert timer.step_count == 3


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("profiler", [BasicTimeProfiler, HandlersTimeProfiler])
def test_profilers_that_reorder_handlers_go_along(profiler: Any, is_first: bool) -> None:
    def rank(comm: Comm) -> tuple[list[list[int]], list[int]]:
        seen: list[list[int]] = []
        engine = Engine(lambda _, batch: seen.append(batch.tolist()))
        handler = ShardHandler(comm=comm)
        if is_first:
            profiler().attach(engine)
        handler.attach(engine)
        if not is_first:
            profiler().attach(engine)
        consumed: list[int] = []

        def look() -> None:
            state: Any = engine.state
            consumed.append(state.shard.consumed)

        engine.add_event_handler(Events.ITERATION_COMPLETED, look)
        for _ in range(2):
            engine.run(loader_of(8), max_epochs=1)
        return seen, consumed

    expected = [[[0, 1], [4, 5]] * 2, [[2, 3], [6, 7]] * 2]
    assert run_ranks(2, rank) == [(seen, [4, 8] * 2) for seen in expected]


# What trains.


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def rows_of(num_samples: int) -> Loader:
    inputs = torch.rand(num_samples, 2, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=2)


@pytest.mark.filterwarnings("ignore:Run completed without loss diverging")
def test_a_search_for_the_rate_leaves_the_training_as_it_was() -> None:
    def rates(searches: bool) -> list[list[float]]:
        model, optimizer = model_and_optimizer()
        trainer = create_supervised_trainer(model, optimizer, nn.MSELoss())
        handler = ShardHandler(optimizer=optimizer, comm=SoloComm())
        handler.attach(trainer)
        loader = rows_of(12)
        seen: list[list[float]] = []
        if searches:
            finder = FastaiLRFinder()
            objects = {"model": model, "optimizer": optimizer, "shard": handler}
            with finder.attach(trainer, to_save=objects, num_iter=5, end_lr=0.1) as searching:
                searching.run(loader)
            assert len(finder.get_results()["lr"]) == 6  # as without us
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED,
            lambda engine: seen.append(engine.state.batch[0].flatten().tolist()),
        )
        trainer.run(loader, max_epochs=2)
        return seen

    assert rates(searches=True) == rates(searches=False)


@pytest.mark.filterwarnings("ignore:Run completed without loss diverging")
def test_a_search_for_the_rate_ends_on_all_ranks() -> None:
    def rank(comm: Comm) -> tuple[int, int]:
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.01)
        trainer = Engine(lambda _, batch: float(batch.sum()))
        ShardHandler(comm=comm).attach(trainer)
        finder = FastaiLRFinder()
        with finder.attach(
            trainer, to_save={"optimizer": optimizer}, num_iter=5, end_lr=0.1
        ) as searching:
            searching.run(loader_of(24))
        found = len(finder.get_results()["lr"])
        return found, trainer.run(loader_of(24), max_epochs=2).iteration

    assert run_ranks(2, rank) == [(6, 12)] * 2


def test_averages_of_weights_go_along() -> None:
    model, optimizer = model_and_optimizer()
    trainer = create_supervised_trainer(model, optimizer, nn.MSELoss())
    ShardHandler(comm=SoloComm()).attach(trainer)
    average = EMAHandler(model, momentum=0.5)
    average.attach(trainer, event=Events.ITERATION_COMPLETED)
    trainer.run(rows_of(6), max_epochs=1)
    (weight, _), (averaged, _) = (list(each.parameters()) for each in (model, average.ema_model))
    assert not torch.equal(weight, averaged)


@pytest.mark.filterwarnings("ignore:.*Disabling autocast")
def test_a_scaler_of_ignites_own_goes_along() -> None:
    model, optimizer = model_and_optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    trainer = create_supervised_trainer(
        model, optimizer, nn.MSELoss(), amp_mode="amp", scaler=scaler
    )
    ShardHandler(optimizer=optimizer, comm=SoloComm()).attach(trainer)
    state: Any = trainer.run(rows_of(6), max_epochs=1)
    assert state.shard.optimizer_steps == 3


@pytest.mark.filterwarnings("ignore:.*Disabling autocast")
@pytest.mark.filterwarnings("ignore:.*GradScaler is enabled, but CUDA is not available")
def test_a_scaler_that_ignite_makes_goes_along() -> None:
    model, optimizer = model_and_optimizer()
    trainer = create_supervised_trainer(model, optimizer, nn.MSELoss(), amp_mode="amp", scaler=True)
    handler = ShardHandler(optimizer=optimizer, comm=SoloComm())
    handler.attach(trainer)
    state: Any = trainer.run(rows_of(6), max_epochs=1)
    assert isinstance(state.scaler, torch.amp.GradScaler)
    assert state.shard.optimizer_steps == 3


def test_the_common_handlers_go_along(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    trainer = create_supervised_trainer(model, optimizer, nn.MSELoss())
    handler = ShardHandler(optimizer=optimizer, comm=SoloComm())
    handler.attach(trainer)
    objects = {"trainer": trainer, "model": model, "shard": handler}
    setup_common_training_handlers(
        trainer,
        to_save=objects,
        save_every_iters=4,
        output_path=str(tmp_path),
        output_names=["loss"],
        with_pbars=False,
        clear_cuda_cache=False,
    )
    trainer.run(rows_of(12), max_epochs=2)
    assert files(tmp_path) == ["training_checkpoint_12.pt"]
    found = torch.load(tmp_path / files(tmp_path)[0], weights_only=True)
    assert found["shard"]["optimizer_steps"] == 12
