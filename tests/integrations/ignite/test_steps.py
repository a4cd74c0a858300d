"""Real optimizer steps: schedules that follow them, windows of accumulation, and their resume."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.handlers import LRScheduler as IgniteLRScheduler
from ignite.handlers import PiecewiseLinear
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from shardplug import Comm, PlanError, ScalerAwareOptimizer, SoloComm
from shardplug.testing import run_ranks
from shardplug_ignite import ShardHandler

BATCHES = 8


def rows(poisoned: tuple[int, ...] = ()) -> DataLoader[Any]:
    """Batches of two rows; those of some batches overflow when the loss is scaled."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(2 * BATCHES, 3, generator=generator)
    targets = inputs.sum(1, keepdim=True)
    for batch in poisoned:
        targets[2 * batch] = torch.inf
    return DataLoader(TensorDataset(inputs, targets), batch_size=2)


class Training:
    """A trainer of Ignite's, and the learning rate of each step that moved the weights."""

    def __init__(
        self,
        *,
        accumulation: int = 1,
        is_scaled: bool = False,
        is_fused: bool = False,
        wrap: Callable[[Any], Any] = lambda optimizer: optimizer,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        inner = torch.optim.SGD(self.model.parameters(), lr=1.0, fused=is_fused)
        self.optimizer = wrap(inner)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if is_scaled else None
        self.rates: list[float] = []
        self.trainer = create_supervised_trainer(
            self.model,
            self.optimizer,
            lambda predicted, target: 0.01 * nn.functional.mse_loss(predicted, target),
            amp_mode="amp" if is_scaled else None,
            scaler=self.scaler or False,
            gradient_accumulation_steps=accumulation,
        )
        self.before = self.weights()
        self.rate = 0.0
        self.trainer.add_event_handler(Events.ITERATION_STARTED, self._look)

    def watch(self) -> None:
        """To be called after all schedules are attached."""
        self.trainer.add_event_handler(Events.ITERATION_STARTED, self._look_at_rate)
        self.trainer.add_event_handler(Events.ITERATION_COMPLETED, self._note)

    def weights(self) -> torch.Tensor:
        return torch.cat([each.detach().flatten().clone() for each in self.model.parameters()])

    def _look(self) -> None:
        self.before = self.weights()

    def _look_at_rate(self) -> None:
        self.rate = self.optimizer.param_groups[0]["lr"]

    def _note(self) -> None:
        if not torch.equal(self.before, self.weights()):
            self.rates.append(self.rate)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulating": {"accumulation": 4},
    "scaled": {"is_scaled": True},
    "fused": {"is_scaled": True, "is_fused": True},
    "both": {"accumulation": 2, "is_scaled": True},
    "wrapped": {"wrap": ScalerAwareOptimizer},
}
NUM_STEPS = {"plain": 8, "accumulating": 2, "scaled": 6, "fused": 6, "both": 2, "wrapped": 8}


def poison(kind: str) -> tuple[int, ...]:
    return (0, 2) if KINDS[kind].get("is_scaled") else ()


@pytest.mark.filterwarnings("ignore:.*Disabling autocast")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["lr_scheduler", "ignite", "piecewise"])
def test_the_kth_step_has_the_kth_rate(kind: str, way: str) -> None:
    training = Training(**KINDS[kind])
    trainer, optimizer = training.trainer, training.optimizer
    schedule = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    handler = ShardHandler(
        optimizer=optimizer,
        lr_scheduler=schedule if way == "lr_scheduler" else None,
        comm=SoloComm(),
    )
    handler.attach(trainer)
    expected = [1 / (step + 1) for step in range(NUM_STEPS[kind])]
    if way == "ignite":
        IgniteLRScheduler(schedule).attach(trainer, handler.step_event)
    elif way == "piecewise":
        piecewise: Any = PiecewiseLinear(optimizer, "lr", [(0, 1.0), (10, 0.0)])
        piecewise.attach(trainer, handler.step_event)
        expected = [1 - step / 10 for step in range(NUM_STEPS[kind])]
    training.watch()
    trainer.run(rows(poison(kind)), max_epochs=1)
    state: Any = trainer.state
    assert training.rates == pytest.approx(expected)
    assert state.shard.optimizer_steps == NUM_STEPS[kind]


def test_several_schedules_tick_together() -> None:
    training = Training()
    handler = ShardHandler(optimizer=training.optimizer, comm=SoloComm())
    handler.attach(training.trainer)
    ticks: list[tuple[str, int]] = []
    for name in "ab":
        training.trainer.add_event_handler(
            handler.step_event,
            lambda engine, name: ticks.append((name, engine.state.iteration)),
            name,
        )
    training.trainer.run(rows(), max_epochs=1)
    assert ticks == [(name, at) for at in range(1, BATCHES + 1) for name in "ab"]


def test_the_optimizer_is_listened_to_while_an_engine_is_attached() -> None:
    training = Training()
    optimizer = training.optimizer
    handler = ShardHandler(optimizer=optimizer, comm=SoloComm())
    assert not optimizer._optimizer_step_post_hooks
    handler.attach(training.trainer)
    assert len(optimizer._optimizer_step_post_hooks) == 1
    handler.detach(training.trainer)
    assert not optimizer._optimizer_step_post_hooks


# Resume in windows.


@dataclass
class Saved:
    """What a checkpoint holds, as bytes."""

    content: dict[str, Any] = field(default_factory=dict)

    def put(self, objects: dict[str, Any]) -> None:
        buffer = io.BytesIO()
        torch.save({name: each.state_dict() for name, each in objects.items()}, buffer)
        buffer.seek(0)
        self.content = torch.load(buffer, weights_only=True)

    def get(self, objects: dict[str, Any]) -> None:
        for name, each in objects.items():
            each.load_state_dict(copy.deepcopy(self.content[name]))


class StoppedError(Exception):
    """Ends a run."""


def custom_step(model: nn.Module, optimizer: Any) -> Callable[[Engine, Any], None]:
    """Accumulate three batches, in windows of the script's own counting."""
    gathered = 0

    def step(_: Engine, batch: Any) -> None:
        nonlocal gathered
        nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
        gathered += 1
        if gathered == 3:
            optimizer.step()
            optimizer.zero_grad()
            gathered = 0

    return step


def training_objects(way: str) -> dict[str, Any]:
    """A training that accumulates, and whatever of it is saved."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"optimizer": optimizer}
    if way == "custom":
        trainer = Engine(custom_step(model, optimizer))
    else:
        trainer = create_supervised_trainer(
            model, optimizer, nn.MSELoss(), gradient_accumulation_steps=4
        )
    if way == "told":
        options = {"gradient_accumulation_steps": 4}
    handler = ShardHandler(comm=SoloComm(), data_seed=3, **options)
    handler.attach(trainer)
    objects = {"trainer": trainer, "model": model, "optimizer": optimizer, "shard": handler}
    if way != "told":
        schedule: Any = IgniteLRScheduler(LambdaLR(optimizer, lambda step: 1 / (step + 1)))
        schedule.attach(trainer, handler.step_event)
        objects["schedule"] = schedule
    return objects


def train(
    way: str, *, stop_at: tuple[Any, int] | None = None, saved: Saved | None = None
) -> tuple[torch.Tensor, Saved]:
    """Train with accumulation to the end, or to the so-and-so-many-th coming of an event."""
    objects = training_objects(way)
    trainer, kept, times = objects["trainer"], Saved(), 0

    def stop() -> None:
        nonlocal times
        times += 1
        if stop_at is not None and times == stop_at[1]:
            kept.put(objects)
            raise StoppedError

    if stop_at is not None:
        trainer.add_event_handler(stop_at[0], stop)
    if saved is not None:
        saved.get(objects)
    loader = DataLoader(rows().dataset, batch_size=3, shuffle=True)  # 6 batches
    if stop_at is None:
        trainer.run(loader, max_epochs=3)
    else:
        with pytest.raises(StoppedError):
            trainer.run(loader, max_epochs=3)
    return torch.cat([each.detach().flatten() for each in objects["model"].parameters()]), kept


@pytest.mark.parametrize("way", ["ignite", "told", "custom"])
@pytest.mark.parametrize("event", [Events.ITERATION_COMPLETED, Events.GET_BATCH_COMPLETED])
def test_gradients_that_were_not_stepped_with_are_made_again(way: str, event: Any) -> None:
    whole, _ = train(way)
    for number in range(1, 19):
        _, saved = train(way, stop_at=(event, number))
        weights, _ = train(way, saved=saved)
        torch.testing.assert_close(weights, whole, rtol=0, atol=1e-6, msg=f"{way} {number}")


SKIPPED_KNOWN = [(1, 0), (2, 1), (3, 1), (4, 2)]
SKIPPED_UNKNOWN = [(0, 0), (2, 1), (2, 1), (4, 2)]


@pytest.mark.filterwarnings("ignore:.*Disabling autocast")
@pytest.mark.parametrize(
    ("way", "marks"),
    [
        ("wrapped", SKIPPED_KNOWN),
        ("told", SKIPPED_KNOWN),
        ("told, fused", SKIPPED_KNOWN),
        ("found", SKIPPED_KNOWN),
        ("ignite", SKIPPED_KNOWN),
        ("unknown", SKIPPED_UNKNOWN),
        ("unknown, fused", SKIPPED_UNKNOWN),
    ],
)
def test_a_step_that_was_skipped_ends_its_window_where_that_is_known(
    way: str, marks: list[tuple[int, int]]
) -> None:
    """Where it is not, its batch would be trained on again after a resume."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, fused="fused" in way)
    optimizer = ScalerAwareOptimizer(plain, scaler=scaler) if way == "wrapped" else plain

    def step(_: Engine, batch: Any) -> None:
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(model(batch[0]), batch[1])).backward()
        if way == "wrapped":
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    trainer = Engine(step)
    if way == "ignite":
        trainer = create_supervised_trainer(
            model, optimizer, nn.MSELoss(), amp_mode="amp", scaler=scaler
        )
    state: Any = trainer.state
    if way == "found":
        state.scaler = scaler  # as create_supervised_trainer(scaler=True) leaves it
    is_told = way.startswith("told") or way == "ignite"
    handler = ShardHandler(optimizer=optimizer, scaler=scaler if is_told else None, comm=SoloComm())
    handler.attach(trainer)
    found: list[tuple[int, int]] = []

    def look() -> None:
        saved = handler.state_dict()
        found.append((saved["iteration"], saved["optimizer_steps"]))

    trainer.add_event_handler(Events.ITERATION_COMPLETED, look)
    trainer.run(rows((0, 2)), max_iters=4)
    assert found == marks


def scheduled(
    world_size: int, *, accumulation: int = 1, poisoned: tuple[int, ...] = (), **options: Any
) -> list[float]:
    """The learning rate after each of 8 iterations, of a schedule that counts; on rank 0."""

    def rank(comm: Comm) -> list[float]:
        training = Training(accumulation=accumulation, is_scaled=bool(poisoned))
        schedule = LambdaLR(training.optimizer, float)
        handler = ShardHandler(
            lr_scheduler=schedule,
            scheduler_unit="batches",
            scaler=training.scaler,
            comm=comm,
            already_sharded=True,
            **options,
        )
        handler.attach(training.trainer)
        found: list[float] = []
        training.trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda: found.append(float(schedule.get_last_lr()[0]))
        )
        training.trainer.run(rows(poisoned), max_epochs=1)
        return found

    return run_ranks(world_size, rank)[0]


@pytest.mark.filterwarnings("ignore:.*Disabling autocast")
def test_a_schedule_may_count_batches_of_the_loader_as_it_was_given() -> None:
    assert scheduled(1) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert scheduled(3) == [3, 6, 9, 12, 15, 18, 21, 24]
    assert scheduled(2, split_batches=True) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert scheduled(2, accumulation=4) == [0, 0, 0, 8, 8, 8, 8, 16]
    # What was skipped is not made up for.
    assert scheduled(2, poisoned=(0, 2)) == [0, 2, 2, 4, 6, 8, 10, 12]
    assert scheduled(2, accumulation=2, poisoned=(2,)) == [0, 4, 4, 4, 4, 8, 8, 12]


@pytest.mark.parametrize("unit", ["updates", "batches"])
def test_a_schedule_does_not_run_past_its_end(unit: Any) -> None:
    training = Training()
    schedule = OneCycleLR(training.optimizer, 1.0, total_steps=5)
    ShardHandler(lr_scheduler=schedule, scheduler_unit=unit, comm=SoloComm()).attach(
        training.trainer
    )
    training.trainer.run(rows(), max_epochs=1)
    assert schedule.last_epoch == 5


def test_a_schedule_that_counts_batches_goes_on_inside_a_window() -> None:
    """The window is made again from its start, and counted once."""
    training = Training(accumulation=4)
    schedule = LambdaLR(training.optimizer, float)
    handler = ShardHandler(lr_scheduler=schedule, scheduler_unit="batches", comm=SoloComm())
    handler.attach(training.trainer)
    with training.trainer.add_event_handler(
        Events.ITERATION_COMPLETED(once=6), training.trainer.terminate
    ):
        training.trainer.run(rows(), max_epochs=1)
    handler.load_state_dict(handler.state_dict())
    assert schedule.last_epoch == 4
    training.trainer.run(rows(), max_epochs=1)
    assert training.trainer.state.iteration == 8
    assert schedule.last_epoch == 8


@pytest.mark.filterwarnings("ignore:.*Disabling autocast")
@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_training_with_skipped_steps_is_resumed_exactly(
    is_fused: bool, accumulation: int
) -> None:
    """A batch whose step was skipped has had its turn: the scale went down for it."""

    def train(stop_at: int | None, saved: Saved | None) -> tuple[torch.Tensor, Saved]:
        training = Training(accumulation=accumulation, is_scaled=True, is_fused=is_fused)
        assert training.scaler is not None
        handler = ShardHandler(
            optimizer=training.optimizer, scaler=training.scaler, comm=SoloComm(), data_seed=1
        )
        handler.attach(training.trainer)
        named = {"trainer": training.trainer, "model": training.model, "shard": handler}
        objects = {**named, "optimizer": training.optimizer, "scaler": training.scaler}
        if saved is not None:
            saved.get(objects)
        kept = Saved()

        def stop(engine: Engine) -> None:
            if engine.state.iteration == stop_at:
                kept.put(objects)
                raise StoppedError

        training.trainer.add_event_handler(Events.ITERATION_COMPLETED, stop)
        loader = DataLoader(rows((0, 3)).dataset, batch_size=2, shuffle=True)
        if stop_at is None:
            training.trainer.run(loader, max_epochs=2)
        else:
            with pytest.raises(StoppedError):
                training.trainer.run(loader, max_epochs=2)
        return training.weights(), kept

    whole, _ = train(None, None)
    assert whole.isfinite().all()
    for stop_at in range(1, 17):
        _, saved = train(stop_at, None)
        weights, _ = train(None, saved)
        torch.testing.assert_close(weights, whole, rtol=0, atol=1e-6, msg=f"{stop_at}")


def dropped_out(
    stop_at: int | None, saved: Saved | None, *, every: int, window: int | None = None
) -> tuple[list[tuple[float, int]], Saved]:
    """What is drawn in each iteration of two epochs of 8, with the batch; and what is saved."""
    torch.manual_seed(0 if saved is None else 99)
    seen: list[tuple[float, int]] = []
    trainer = Engine(
        lambda _, batch: seen.append((torch.rand(()).item(), int(batch[0, 0, 0] * 1000)))
    )
    handler = ShardHandler(comm=SoloComm(), gradient_accumulation_steps=window)
    kept = Saved()

    def save(engine: Engine) -> None:
        if engine.state.iteration == stop_at:
            kept.put({"shard": handler})
            raise StoppedError

    trainer.add_event_handler(Events.ITERATION_COMPLETED, save)
    handler.attach(trainer, snapshot=Events.ITERATION_COMPLETED(every=every))
    if saved is not None:
        saved.get({"shard": handler})
    trainer.add_event_handler(Events.STARTED, lambda: torch.rand(7))
    loader = DataLoader(rows().dataset, batch_size=2, shuffle=True, collate_fn=stacked)
    if stop_at is None:
        trainer.run(loader, max_epochs=2)
    else:
        with pytest.raises(StoppedError):
            trainer.run(loader, max_epochs=2)
    return seen, kept


def stacked(samples: list[Any]) -> torch.Tensor:
    return torch.stack([inputs for inputs, _ in samples])[None]


@pytest.mark.parametrize("every", [1, 3])
def test_dropout_goes_on_where_ranks_told_each_other_of_it(every: int) -> None:
    """At the end of an epoch, too: the next one begins as it would have."""
    whole, _ = dropped_out(None, None, every=every)
    for stop_at in range(every, 17, every):
        _, saved = dropped_out(stop_at, None, every=every)
        assert dropped_out(None, saved, every=every)[0] == whole[stop_at:], stop_at


def test_generators_that_nobody_told_of_are_not_given_back() -> None:
    _, saved = dropped_out(4, None, every=3)
    assert saved.content["shard"]["rank_states"] is None


@pytest.mark.parametrize("stop_at", range(3, 17))
def test_dropout_goes_on_from_the_start_of_its_window(stop_at: int) -> None:
    """What is drawn inside a window is drawn again, for the same batches."""
    whole, _ = dropped_out(None, None, every=1, window=3)
    _, saved = dropped_out(stop_at, None, every=1, window=3)
    rest, _ = dropped_out(None, saved, every=1, window=3)
    assert rest == whole[stop_at - stop_at % 3 :]


def test_a_snapshot_ends_with_the_attachment() -> None:
    trainer = Engine(lambda _, __: None)
    handler = ShardHandler(comm=SoloComm())
    event = Events.ITERATION_COMPLETED(every=2) | Events.EPOCH_COMPLETED
    handler.attach(trainer, snapshot=event)
    trainer.run(rows(), max_epochs=1)
    assert handler.state_dict()["rank_states"]["world_size"] == 1
    handler.detach(trainer)
    assert not any(trainer._event_handlers.values())


# What is refused.


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"optimizer": 3}, "`optimizer` must be a torch.optim.Optimizer, got int"),
        ({"gradient_accumulation_steps": 0}, "`gradient_accumulation_steps` must be at least 1, g"),
        ({"gradient_accumulation_steps": -1}, "`gradient_accumulation_steps` must be at least 1"),
    ],
)
def test_options_of_steps_are_checked(options: dict[str, Any], rule: str) -> None:
    with pytest.raises(PlanError, match=rule):
        ShardHandler(comm=SoloComm(), **options)


def test_schedules_that_do_not_fit_are_refused() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer, other = (torch.optim.SGD([weight], lr=1.0) for _ in range(2))
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    ShardHandler(lr_scheduler=schedule, comm=SoloComm())
    ShardHandler(None, ScalerAwareOptimizer(optimizer), schedule, comm=SoloComm())
    with pytest.raises(PlanError, match="`lr_scheduler` must be one of the optimizer that is giv"):
        ShardHandler(optimizer=other, lr_scheduler=schedule, comm=SoloComm())
    for wrong in (ReduceLROnPlateau(optimizer), PiecewiseLinear(optimizer, "lr", [(0, 1.0)])):
        with pytest.raises(PlanError, match=r"one of torch's that step\(\) moves on without a met"):
            ShardHandler(lr_scheduler=wrong, comm=SoloComm())
    scaler = torch.amp.GradScaler("cpu")
    for options in ({"optimizer": optimizer}, {"scaler": scaler}):
        with pytest.raises(PlanError, match="must be left out with mode='eval', got one of them"):
            ShardHandler(mode="eval", comm=SoloComm(), **options)
    with pytest.raises(PlanError, match=r"`scaler` must be a torch\.amp\.GradScaler, got int\. Le"):
        ShardHandler(optimizer=optimizer, scaler=3, comm=SoloComm())  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="`scaler` must come with the optimizer whose steps it ma"):
        ShardHandler(scaler=scaler, comm=SoloComm())
    with pytest.raises(PlanError, match="`scheduler_unit` must be 'updates' without lr_scheduler"):
        ShardHandler(optimizer=optimizer, scheduler_unit="batches", comm=SoloComm())
    with pytest.raises(PlanError, match="`scheduler_unit` must be 'batches' or 'updates', got 'd"):
        ShardHandler(lr_scheduler=schedule, scheduler_unit="days", comm=SoloComm())  # type: ignore[arg-type]


def test_there_are_no_steps_without_an_optimizer() -> None:
    with pytest.raises(PlanError, match="`optimizer` must be given to the handler for steps to be"):
        _ = ShardHandler(comm=SoloComm()).step_event
