"""Metrics that gather rows, over ranks with unequal numbers of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ignite.engine import Engine
from ignite.exceptions import NotComputableError
from ignite.metrics import (
    ROC_AUC,
    Accuracy,
    AveragePrecision,
    CohenKappa,
    EpochMetric,
    PrecisionRecallCurve,
    RocCurve,
)
from ignite.metrics.regression import (
    GeometricMeanRelativeAbsoluteError,
    MedianAbsoluteError,
    SpearmanRankCorrelation,
)

from shardplug import Comm, PlanError
from shardplug.testing import run_ranks
from shardplug_ignite import evened

reference = pytest.importorskip("sklearn.metrics")
pytest.importorskip("scipy")

SCORES = torch.tensor([0.1, 0.9, 0.4, 0.35, 0.8, 0.7, 0.6], dtype=torch.float64)
LABELS = torch.tensor([0, 1, 0, 1, 1, 0, 1])
PARTS: tuple[list[int], ...] = ([0, 3, 5], [1], [], [2, 4, 6])
"""Which rows each rank has."""


def computed(metric: Any, labels: torch.Tensor = LABELS) -> list[Any]:
    def rank(comm: Comm) -> Any:
        own = evened(metric, comm=comm)
        for row in PARTS[comm.rank]:
            own.update((SCORES[[row]], labels[[row]]))
        return own.compute()

    return run_ranks(len(PARTS), rank)


def test_every_rank_has_the_value_over_all_rows() -> None:
    expected = reference.roc_auc_score(LABELS, SCORES)
    assert computed(ROC_AUC()) == [pytest.approx(expected, abs=1e-15)] * len(PARTS)
    expected = reference.average_precision_score(LABELS, SCORES)
    assert computed(AveragePrecision()) == [pytest.approx(expected, abs=1e-15)] * len(PARTS)
    expected = np.median(np.abs(LABELS.numpy() - SCORES.numpy()))
    assert computed(MedianAbsoluteError()) == [pytest.approx(expected, abs=1e-7)] * len(PARTS)


def test_metrics_that_look_at_their_rows_first_find_those_of_all() -> None:
    places = [1, 7, 3, 2, 6, 5, 4]
    ties = [2, 5.5, 2, 5.5, 5.5, 2, 5.5]
    expected = np.corrcoef(places, ties)[0, 1]
    found = computed(SpearmanRankCorrelation(), LABELS.double())
    assert found == [pytest.approx(expected, abs=1e-12)] * len(PARTS)


def test_counts_are_not_multiplied() -> None:
    rows = EpochMetric(lambda scores, labels: len(scores), check_compute_fn=False)
    assert computed(rows) == [7] * len(PARTS)


def test_results_keep_their_digits() -> None:
    digits = EpochMetric(lambda scores, labels: 0.1234567890123, check_compute_fn=False)
    assert computed(digits) == [0.1234567890123] * len(PARTS)  # stock: 0.12345679104328156


def test_curves_are_those_of_all_rows() -> None:
    for metric, function in (
        (RocCurve(), reference.roc_curve),
        (PrecisionRecallCurve(), reference.precision_recall_curve),
    ):
        expected = [torch.tensor(each.copy()) for each in function(LABELS, SCORES)]
        for found in computed(metric):
            assert all(map(torch.equal, found, expected))


def test_geometric_means_are_those_of_all_rows() -> None:
    labels = LABELS.double()
    ratios = (labels - SCORES).abs() / (labels - labels.mean()).abs()
    expected = ratios.log().mean().exp().item()
    found = computed(GeometricMeanRelativeAbsoluteError(), labels)
    assert found == [pytest.approx(expected, rel=1e-6)] * len(PARTS)


def test_no_row_at_all_is_said_on_every_rank() -> None:
    def rank(comm: Comm) -> str:
        with pytest.raises(NotComputableError) as caught:
            evened(ROC_AUC(), comm=comm).compute()
        return str(caught.value)

    assert (
        run_ranks(2, rank)
        == ["EvenedROC_AUC must have at least one example before it can be computed."] * 2
    )


def test_the_metric_that_is_given_stays_as_it_was() -> None:
    metric = ROC_AUC()
    metric.update((SCORES, LABELS))
    before = metric.compute()
    made = evened(metric)
    assert type(metric) is ROC_AUC
    assert isinstance(made, ROC_AUC)
    made.update((1 - SCORES, LABELS))
    assert made.compute() == pytest.approx(1 - before)
    assert metric.compute() == before


def test_it_is_attached_like_the_metric_it_is_made_of() -> None:
    engine = Engine(lambda _, batch: batch)
    evened(CohenKappa()).attach(engine, "kappa")
    predicted = (SCORES > 0.5).long()
    state = engine.run([(predicted[:3], LABELS[:3]), (predicted[3:], LABELS[3:])], max_epochs=2)
    expected = reference.cohen_kappa_score(LABELS, predicted)
    assert state.metrics["kappa"] == pytest.approx(expected)


@pytest.mark.parametrize("metric", [Accuracy(), CohenKappa(num_classes=2), "auc"])
def test_metrics_that_gather_no_rows_are_refused(metric: Any) -> None:
    with pytest.raises(PlanError, match=r"`metric` must be an EpochMetric.* Attach it as it is"):
        evened(metric)
