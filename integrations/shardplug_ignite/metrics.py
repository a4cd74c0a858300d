"""`evened`: metrics that gather the rows of all ranks, where ranks have unequal numbers of them.

Ignite's own gathering needs as many rows on every rank, and sends results as 32-bit floats.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from ignite.exceptions import NotComputableError
from ignite.metrics import EpochMetric, Metric, PrecisionRecallCurve, RocCurve
from ignite.metrics.regression import GeometricMeanRelativeAbsoluteError

from shardplug import Comm, PlanError, current_comm, gather

M = TypeVar("M", bound=Metric)


def evened(metric: M, *, comm: Comm | None = None) -> M:
    """Make a metric that gathers rows exact where ranks have unequal numbers of rows, or none.

    For ``EpochMetric`` and what is built on it (ROC AUC and curve, average precision, Cohen's
    kappa, medians, rank correlations, clustering), which stock would wait for ever, or end the
    process. Other metrics add up sums and are exact as they are.

    Collective: computing the metric is, as ever.

    Args:
        metric: Stays as it is.
        comm: The ranks; None: those of this process.

    Returns:
        A metric of the same kind, to be attached in its place. Every rank computes it from all
        rows.

    Raises:
        PlanError: If it is no metric that gathers rows.

    Example:
        >>> from ignite.engine import Engine
        >>> from ignite.metrics import EpochMetric
        >>> evaluator = Engine(lambda engine, batch: batch)
        >>> rows = EpochMetric(lambda predictions, targets: len(targets), check_compute_fn=False)
        >>> evened(rows).attach(evaluator, "rows")
        >>> evaluator.run([(torch.ones(3), torch.ones(3))]).metrics
        {'rows': 3}
    """
    inner = getattr(metric, "_impl", None)
    made = copy.copy(metric)
    if isinstance(inner, EpochMetric):  # Cohen's kappa leaves the work to another
        changed: Any = made
        changed._impl = evened(inner, comm=comm)  # noqa: SLF001  # the other
        return made
    kind = type(metric)
    compute = _how_to_compute(kind)
    if compute is None:
        raise PlanError(
            "`metric` must be an EpochMetric or another that gathers the rows of all ranks, got "
            f"{kind.__name__}. Attach it as it is, if it adds up sums: that is exact."
        )

    def compute_from_all(own: Any) -> Any:
        predictions, targets = _all_rows(own, current_comm() if comm is None else comm)
        whole = copy.copy(own)
        whole._predictions, whole._targets = [predictions], [targets]  # noqa: SLF001  # its rows
        return compute(whole)

    made.__class__ = type(f"Evened{kind.__name__}", (kind,), {"compute": compute_from_all})
    made.reset()
    return made


def _how_to_compute(kind: type[Any]) -> Callable[[Any], Any] | None:
    """Find what computes a metric that holds all rows; None if it is not known to gather any."""
    if issubclass(kind, (RocCurve, PrecisionRecallCurve)):
        return _curves
    if issubclass(kind, EpochMetric):
        bases = (_Alone,) if kind is EpochMetric else (kind, _Alone)
        alone: Any = type(kind.__name__, bases, {})

        def compute_alone(metric: Any) -> Any:
            metric.__class__ = alone
            return metric.compute()

        return compute_alone
    if issubclass(kind, GeometricMeanRelativeAbsoluteError):
        # Its mean gathers equal numbers of rows: all of them from every rank, which changes none.
        return kind.compute
    return None


class _Alone(EpochMetric):
    """What a metric that has all rows inherits from in place of what gathers them."""

    def compute(self) -> Any:
        """Compute from the rows that are here."""
        return self.compute_fn(self._predictions[0], self._targets[0])


def _curves(metric: Any) -> Any:
    """Compute what comes as several arrays; their strides may be negative."""
    predictions, targets = metric._predictions[0], metric._targets[0]  # noqa: SLF001  # its rows
    dtype = metric._double_dtype  # noqa: SLF001  # what the device can hold
    return tuple(
        torch.tensor(each.copy(), dtype=dtype, device=predictions.device)
        for each in metric.compute_fn(predictions, targets)
    )


def _all_rows(metric: Any, ranks: Comm) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather the rows of all ranks.

    Collective: every rank must call it.

    Raises:
        NotComputableError: If there are none, on every rank.
    """
    rows = [metric._predictions, metric._targets]  # noqa: SLF001  # where those metrics keep them
    own = [torch.cat(each) if each else None for each in rows]
    layout: list[Any] = [None if each is None else (each.dtype, each.shape[1:]) for each in own]
    layouts = ranks.all_gather_object(layout)
    known = next((each for each in layouts if None not in each), [])
    if not known:
        raise NotComputableError(
            f"{type(metric).__name__} must have at least one example before it can be computed."
        )
    device = metric._device  # noqa: SLF001  # the metric's own
    full = [
        torch.empty((0, *shape), dtype=dtype, device=device) if each is None else each
        for each, (dtype, shape) in zip(own, known, strict=True)
    ]
    predictions, targets = gather(full, comm=ranks)
    return predictions, targets
