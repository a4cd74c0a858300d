"""Is an order random? Statistics that are N(0, 1) if every order is equally likely.

Samples come as tensors of shape ``(keys, positions)``: row k holds the samples at some positions
(all of them, or few) of the order of key k. Moments are those of drawing without replacement, so
they hold for whole orders and for windows of huge ones alike.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

MOST_BUCKETS = 64
ENOUGH_GAPS = 256  # in fewer, the gaps of one order depend on each other too much


def scores(samples: Tensor, num_samples: int) -> dict[str, float]:
    """Score the orders of successive epochs, one row each, of at least four samples.

    "… spread" tells of single orders that are off in directions of their own.
    """
    half = samples[:, : max(1, samples.shape[1] // 2)]
    by_row = {
        "position": position_scores(half, num_samples),
        "serial": serial_scores(samples, num_samples),
        "epoch": epoch_scores(samples, num_samples),
    }
    means = {name: float(rows.sum()) / math.sqrt(len(rows)) for name, rows in by_row.items()}
    spreads = {
        f"{name} spread": chi_square_score(float(rows.square().sum()), len(rows))
        for name, rows in by_row.items()
    }
    return means | spreads | pair_scores(samples, num_samples)


def position_scores(samples: Tensor, num_samples: int) -> Tensor:
    """Count samples of the lower half, row by row: hypergeometric."""
    drawn, low = samples.shape[1], num_samples // 2
    share = low / num_samples
    spread = (num_samples - drawn) / (num_samples - 1)
    count = (samples < low).sum(1, dtype=torch.float64)
    return (count - drawn * share) / math.sqrt(drawn * share * (1 - share) * spread)


def serial_scores(samples: Tensor, num_samples: int) -> Tensor:
    """Sum the products of successive samples, row by row; ``num_samples`` is at least 4."""
    x, n = _centred(samples, num_samples), float(num_samples)
    squares, fourths = _power_sums(n)
    products = samples.shape[1] - 1
    mean = -squares / (n * (n - 1))
    # Products of a pair with itself, with the next, and with any other.
    itself = (squares**2 - fourths) / (n * (n - 1))
    joined = (2 * fourths - squares**2) / (n * (n - 1) * (n - 2))
    apart = (3 * squares**2 - 6 * fourths) / (n * (n - 1) * (n - 2) * (n - 3))
    variance = (
        products * itself
        + 2 * (products - 1) * joined
        + (products - 1) * (products - 2) * apart
        - (products * mean) ** 2
    )
    return ((x[:, :-1] * x[:, 1:]).sum(1) - products * mean) / math.sqrt(variance)


def epoch_scores(samples: Tensor, num_samples: int) -> Tensor:
    """Sum the products of what stands at the same positions in one row and the next."""
    x, n, drawn = _centred(samples, num_samples), float(num_samples), samples.shape[1]
    squares, _ = _power_sums(n)
    variance = drawn * (squares / n) ** 2 + drawn * (drawn - 1) * (squares / (n * (n - 1))) ** 2
    return (x[:-1] * x[1:]).sum(1) / math.sqrt(variance)


def pair_scores(samples: Tensor, num_samples: int) -> dict[str, float]:
    """Count how far successive samples lie apart, modulo the number of samples."""
    gaps = (samples[:, 1:] - samples[:, :-1]) % num_samples - 1
    num_gaps = num_samples - 1
    buckets = min(num_gaps, MOST_BUCKETS)
    # (keys, gaps): the bucket of each gap
    index = (gaps.double() * (buckets / num_gaps)).long().clamp_(max=buckets - 1)
    edges = [-(-bucket * num_gaps // buckets) for bucket in range(buckets + 1)]
    shares = torch.tensor([high - low for low, high in pairwise(edges)]).double() / num_gaps
    # (keys, buckets)
    counts = torch.zeros(len(samples), buckets, dtype=torch.float64)
    counts.scatter_add_(1, index, torch.ones(index.shape, dtype=torch.float64))
    expected = shares * gaps.shape[1]
    together = (counts.sum(0) - expected * len(samples)).square() / (expected * len(samples))
    by_row = (counts - expected).square() / expected
    found = {"pair": chi_square_score(float(together.sum()), buckets - 1)}
    if num_samples > ENOUGH_GAPS:
        degrees = (buckets - 1) * len(samples)
        found["pair spread"] = chi_square_score(float(by_row.sum()), degrees)
    return found


def orders_score(orders: Tensor) -> float:
    """Count how often each order of a few samples occurs; ``orders`` are whole."""
    keys, num_samples = orders.shape
    codes = (orders * num_samples ** torch.arange(num_samples)).sum(1)
    # Codes that are no order, and orders that never occur, add nothing to the squares.
    counts = codes.bincount().double()
    cells = math.factorial(num_samples)
    return chi_square_score(float(counts.square().sum()) * cells / keys - keys, cells - 1)


def matrix_score(orders: Tensor) -> float:
    """Count how often each sample stands at each position; ``orders`` are whole."""
    keys, num_samples = orders.shape
    cells = orders + num_samples * torch.arange(num_samples)
    counts = cells.flatten().bincount(minlength=num_samples**2).double()
    expected = keys / num_samples
    # Rows and columns both add up to ``keys``.
    chi_square = float((counts - expected).square().sum()) / expected
    return chi_square_score(chi_square * (num_samples - 1) / num_samples, (num_samples - 1) ** 2)


def chi_square_score(chi_square: float, degrees: int) -> float:
    """Turn a chi-square value into a normal score (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * degrees)
    return (math.pow(chi_square / degrees, 1 / 3) - (1 - spread)) / math.sqrt(spread)


def _centred(samples: Tensor, num_samples: int) -> Tensor:
    return (samples.double() - (num_samples - 1) / 2) / num_samples


def _power_sums(n: float) -> tuple[float, float]:
    """Sum the second and fourth powers of 0, …, n - 1, centred and divided by n."""
    return (n**2 - 1) / (12 * n), (n**2 - 1) * (3 * n**2 - 7) / (240 * n**3)
