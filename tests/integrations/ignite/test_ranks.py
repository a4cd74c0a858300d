"""Engines on real ranks over gloo, with Ignite's own metrics, loaders and models for company.

The ranks are started once and live through everything; the tests look at what they brought back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ignite.distributed as idist
import pytest
import torch
import torch.distributed as dist
from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.metrics import Accuracy, ConfusionMatrix
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

from shardplug import Comm, CommError, PlanError
from shardplug_ignite import ShardHandler
from tests.integrations.ignite.data import Ids
from tests.launch import run_processes

WORLD_SIZE = 3

# Importing Ignite imports torch.distributed.optim, which uses what newer torch deprecates; a rank
# imports it under the filters of the test.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated"),
    pytest.mark.timeout(120),
]


@dataclass
class Report:
    """What one rank brought back."""

    accuracy: dict[str, float] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)
    ids: dict[str, list[list[int]]] = field(default_factory=dict)
    weights: list[float] = field(default_factory=list)
    refused: str = ""
    stopped: dict[str, int] = field(default_factory=dict)
    failed: str = ""


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    return run_processes(WORLD_SIZE, live, timeout_s=100.0)


def live(comm: Comm) -> Report:
    idist.set_local_rank(comm.rank)  # Ignite would guess it, and warn
    report = Report()
    evaluate_with_one_wrong_sample(report)
    evaluate_less_than_there_are_ranks(report)
    train_and_evaluate(report)
    train_where_ranks_read_the_same(report)
    train_where_steps_differ(report)
    stop_together(report)
    fail_alone(report)
    return report


def evaluator_of(ids: list[list[int]]) -> Engine:
    """An evaluator that answers rightly but for sample 0."""

    def step(_: Engine, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids.append(batch.tolist())
        right = nn.functional.one_hot((batch > 0).long(), 2).float()
        return right, torch.ones(len(batch), dtype=torch.int64)

    evaluator = Engine(step)
    Accuracy().attach(evaluator, "accuracy")
    ConfusionMatrix(2).attach(evaluator, "confusion")
    return evaluator


def note(report: Report, name: str, evaluator: Engine) -> None:
    metrics = evaluator.state.metrics
    report.accuracy[name] = metrics["accuracy"]
    report.counted[name] = int(metrics["confusion"].sum())


def evaluate_with_one_wrong_sample(report: Report) -> None:
    samples = Ids(10)
    for name in ("ours", "stock"):
        report.ids[name] = []
        evaluator = evaluator_of(report.ids[name])
        if name == "ours":
            ShardHandler(mode="eval").attach(evaluator)
            loader: Any = DataLoader(samples, batch_size=4)
        else:
            loader = idist.auto_dataloader(samples, batch_size=4, shuffle=False)
        evaluator.run(loader)
        note(report, name, evaluator)


def evaluate_less_than_there_are_ranks(report: Report) -> None:
    report.ids["few"] = []
    evaluator = evaluator_of(report.ids["few"])
    ShardHandler(mode="eval").attach(evaluator)
    evaluator.run(DataLoader(Ids(2), batch_size=4), max_epochs=2)
    note(report, "few", evaluator)


def train_and_evaluate(report: Report) -> None:
    torch.manual_seed(idist.get_rank())  # ranks that are seeded differently see one order
    torch_rows = torch.arange(10.0)[:, None]
    data = TensorDataset(torch_rows, 2 * torch_rows)
    model = idist.auto_model(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = create_supervised_trainer(model, optimizer, nn.MSELoss())

    seen = report.ids["trained"] = []
    trainer.add_event_handler(
        Events.ITERATION_STARTED,
        lambda: seen.append(trainer.state.batch[0].flatten().int().tolist()),  # type: ignore[index]
    )
    validated = report.ids["validated"] = []
    evaluator = evaluator_of(validated)
    ShardHandler().attach(trainer)
    ShardHandler(mode="eval").attach(evaluator)

    def validate() -> None:
        for num_samples in (13, 5, 2):  # the last one leaves a rank without a batch
            evaluator.run(DataLoader(Ids(num_samples), batch_size=4))
            note(report, f"{num_samples} in epoch {trainer.state.epoch}", evaluator)

    trainer.add_event_handler(Events.EPOCH_COMPLETED, validate)
    trainer.run(DataLoader(data, batch_size=2, shuffle=True), max_epochs=3)
    report.weights = [value for weight in model.parameters() for value in weight.flatten().tolist()]


def train_where_ranks_read_the_same(report: Report) -> None:
    mesh = init_device_mesh("cpu", (1, WORLD_SIZE), mesh_dim_names=("dp", "tp"))
    seen = report.ids["mesh"] = []
    trainer = Engine(lambda _, batch: seen.append(batch.tolist()))
    ShardHandler(torch_device_mesh=mesh).attach(trainer)
    trainer.run(DataLoader(Ids(4), batch_size=2))


def train_where_steps_differ(report: Report) -> None:
    trainer = Engine(lambda _, __: None)
    ShardHandler(even_batches=False).attach(trainer)
    with pytest.raises(PlanError) as caught:
        trainer.run(DataLoader(Ids(8), batch_size=2))
    report.refused = str(caught.value)


def stop_together(report: Report) -> None:
    for how in ("terminate", "terminate_epoch", "interrupt"):
        stop(report.stopped, how)


def stop(stopped: dict[str, int], how: str) -> None:
    """Ranks train and evaluate in between while the word of the last one is on its way."""
    model = idist.auto_model(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = create_supervised_trainer(model, optimizer, nn.MSELoss())
    evaluator = Engine(lambda _, batch: batch)
    ShardHandler(optimizer=optimizer).attach(trainer)
    ShardHandler(mode="eval").attach(evaluator)

    @trainer.on(Events.ITERATION_COMPLETED(every=3))
    def evaluate() -> None:
        evaluator.run(DataLoader(Ids(5), batch_size=1))

    @trainer.on(Events.ITERATION_COMPLETED(once=5))
    def ask() -> None:
        if idist.get_rank() == WORLD_SIZE - 1:
            getattr(trainer, how)()

    def note(*_: object, **__: object) -> None:
        stopped[how] = trainer.state.iteration

    event = {"terminate_epoch": "terminate_single_epoch"}.get(how, how).upper()
    trainer.add_event_handler(Events[event], note)
    rows = torch.arange(24.0)[:, None]
    loader = DataLoader(TensorDataset(rows, rows), batch_size=2, shuffle=True)
    # Passes of four steps in epochs of seven: one begins while ranks tell each other.
    trainer.run(loader, max_epochs=2, epoch_length=7)
    if how == "interrupt":
        trainer.run(loader)
    stopped[f"{how}, end"] = trainer.state.iteration


def fail_alone(report: Report) -> None:
    """The last rank fails in an evaluation, and ends; what the others say has the cause's place."""
    last = WORLD_SIZE - 1

    def step(engine: Engine, _: object) -> None:
        if idist.get_rank() == last and engine.state.iteration == 2:
            raise ZeroDivisionError("of the user")

    evaluator = Engine(step)
    ShardHandler(mode="eval").attach(evaluator)
    try:
        evaluator.run(DataLoader(Ids(60), batch_size=2))
    except (ZeroDivisionError, CommError) as error:
        report.failed = f"{type(error).__name__}: {error}"
    finally:
        if idist.get_rank() == last:
            dist.destroy_process_group()  # as its end would


def collected(reports: list[Report], name: str) -> list[int]:
    return sorted(row for report in reports for batch in report.ids[name] for row in batch)


def test_an_evaluation_is_exact(reports: list[Report]) -> None:
    assert [report.ids["ours"] for report in reports] == [[[0, 1, 2, 3]], [[4, 5, 6]], [[7, 8, 9]]]
    assert [report.counted["ours"] for report in reports] == [10] * WORLD_SIZE
    assert [report.accuracy["ours"] for report in reports] == [0.9] * WORLD_SIZE


def test_stock_ignite_counts_padding(reports: list[Report]) -> None:
    """What the handler is there for: with ``auto_dataloader`` the wrong sample counts twice."""
    assert collected(reports, "stock") == [0, 0, 1, 1, *range(2, 10)]
    assert [report.counted["stock"] for report in reports] == [12] * WORLD_SIZE
    expected = pytest.approx(10 / 12)
    assert [report.accuracy["stock"] for report in reports] == [expected] * WORLD_SIZE


def test_a_rank_without_a_batch_has_the_metrics_of_all(reports: list[Report]) -> None:
    assert [report.ids["few"] for report in reports] == [[[0, 1]] * 2, [], []]
    assert [report.counted["few"] for report in reports] == [2] * WORLD_SIZE
    assert [report.accuracy["few"] for report in reports] == [0.5] * WORLD_SIZE


def test_training_takes_even_steps_and_each_epoch_tiles(reports: list[Report]) -> None:
    ranks = [report.ids["trained"] for report in reports]
    assert [len(seen) for seen in ranks] == [6] * WORLD_SIZE  # 2 steps in each of 3 epochs
    orders = set()
    for epoch in range(3):
        steps = (2 * epoch, 2 * epoch + 1)
        order = [row for step in steps for seen in ranks for row in seen[step]]
        assert sorted(order[:10]) == list(range(10))
        assert order[10:] == order[:2]  # padding: the start of the epoch
        orders.add(tuple(order))
    assert len(orders) == 3


def test_training_on_shards_keeps_models_equal(reports: list[Report]) -> None:
    weights = [report.weights for report in reports]
    assert weights == [weights[0]] * WORLD_SIZE
    assert weights[0][0] == pytest.approx(2, abs=0.5)  # it learns to double


def test_an_evaluator_inside_a_trainer_is_exact_in_each_epoch(reports: list[Report]) -> None:
    for report in reports:
        for epoch in (1, 2, 3):
            for num_samples in (13, 5, 2):
                name = f"{num_samples} in epoch {epoch}"
                assert report.counted[name] == num_samples
                assert report.accuracy[name] == pytest.approx(1 - 1 / num_samples)
    assert collected(reports, "validated") == sorted([*range(13), *range(5), *range(2)] * 3)


def test_ranks_that_differ_in_a_model_axis_read_the_same(reports: list[Report]) -> None:
    assert [report.ids["mesh"] for report in reports] == [[[0, 1], [2, 3]]] * WORLD_SIZE


def test_ranks_stop_together_at_the_iteration_that_follows(reports: list[Report]) -> None:
    assert [report.stopped for report in reports] == [
        {
            "terminate": 6,
            "terminate, end": 6,
            "terminate_epoch": 6,
            "terminate_epoch, end": 13,
            "interrupt": 6,
            "interrupt, end": 14,
        }
    ] * WORLD_SIZE


def test_a_rank_that_fails_in_an_evaluation_leaves_none_waiting(reports: list[Report]) -> None:
    *others, last = [report.failed for report in reports]
    assert last == "ZeroDivisionError: of the user"
    for message in others:
        assert message.startswith("CommError: all_gather_ints(3 values) failed on rank")


def test_training_for_different_numbers_of_steps_is_refused_on_every_rank(
    reports: list[Report],
) -> None:
    for report in reports:
        assert "`tail` must let all ranks take the same number of steps" in report.refused
        assert "by which they take between 1 and 2 steps" in report.refused
