"""From Rényi DP or a dp-accounting event to ε: composition, the best order, conversion.

ε is made of the papers' bounds, and of what dp-accounting knows about the mechanism's event where that is less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tfdpfl._types import Arrays, DpEvent
from tfdpfl.accounting import _checks, price
from tfdpfl.pate.epsilon import Epsilon

__all__ = [
    "ORDERS",
    "best_epsilon",
    "check_delta",
    "check_orders",
    "compose",
    "composed_rdp",
    "epsilon_of_rdp",
    "price_of",
    "rdp_of_event",
]

CONVERSIONS = ("tight", "classic")
_CHUNK = 20_000  # queries whose [queries, orders] arrays are held at once
# λ - 1 from 0.02 to 10,000: the least orders serve ε in the hundreds, the greatest ε near 0.
ORDERS = 1 + np.geomspace(0.02, 1e4, 100)


def compose(rdp_of_batches: Iterable[Arrays]) -> np.ndarray:
    """Returns the total RDP `[orders]`, of all `rdp_of_batches` of queries, each `[queries, orders]`: RDP adds up."""
    return np.sum([np.sum(batch, axis=0) for batch in rdp_of_batches], axis=0)


def epsilon_of_rdp(orders: Arrays, rdp: Arrays, delta: float, conversion: str = "tight") -> tuple[float, float]:
    """Returns the least ε over orders, and the order that gives it.

    Args:
        orders: λ `[orders]`, above 1.
        rdp: The total RDP, `[orders]`.
        delta: δ, strictly between 0 and 1.
        conversion: `"tight"`: Canonne, Kamath & Steinke 2020 (arXiv:2004.00010), Proposition 12, by dp-accounting.
            `"classic"`: RDP + ln(1/δ)/(λ-1), Mironov 2017 (arXiv:1702.07476), Proposition 3, which is looser.

    Raises:
        ValueError: an argument is out of its range, or `orders` and `rdp` differ in shape.
    """
    orders, rdp = check_orders(orders), np.atleast_1d(np.asarray(rdp, float))
    delta = check_delta(delta)
    conversion = _checks.choice("conversion", conversion, CONVERSIONS)
    if rdp.shape != orders.shape or not (rdp >= 0).all():
        raise ValueError(
            f"rdp must be one number of at least 0 for each of {len(orders)} orders, got shape {rdp.shape}."
        )
    if conversion == "classic":
        every = rdp + math.log(1 / delta) / (orders - 1)
        best = int(np.argmin(every))
        return float(every[best]), float(orders[best])
    from dp_accounting.rdp import compute_epsilon

    epsilon, order = compute_epsilon(orders, rdp, delta)
    return float(epsilon), float(order)


def best_epsilon(total_rdp: Callable[[np.ndarray], np.ndarray], delta: float, conversion: str = "tight") -> Epsilon:
    """Returns the data-dependent ε at the best order: found on a grid, then on finer ones around it.

    Args:
        total_rdp: From orders `[orders]` to the total RDP `[orders]`.
        delta: δ.
        conversion: As in `epsilon_of_rdp`.
    """
    orders, best = ORDERS, (math.inf, math.nan)
    for _ in range(3):
        best = min(best, epsilon_of_rdp(orders, total_rdp(orders), delta, conversion))
        at = int(np.argmin(np.abs(orders - best[1])))
        low, high = orders[max(at - 1, 0)], orders[min(at + 1, len(orders) - 1)]
        orders = 1 + np.geomspace(low - 1, high - 1, 21)
    epsilon, order = best
    return Epsilon(epsilon, delta, data_dependent=True, order=order)


def rdp_of_event(event: DpEvent, orders: np.ndarray) -> np.ndarray:
    """An event's RDP `[orders]` by dp-accounting."""
    from dp_accounting.rdp import RdpAccountant

    return np.asarray(RdpAccountant(list(orders)).compose(event).rdp)


def price_of(event: DpEvent, delta: float) -> Epsilon:
    """The data-independent ε of an aggregator's event."""
    # The sensitivity to replacement is in the event, and a plain Gaussian or Laplace is then the same pair of
    # distributions under either relation. Under replacement dp-accounting would double it again.
    return Epsilon(price(event, delta, adjacency="add_or_remove_one").epsilon, delta)


def composed_rdp(steps: Iterable[tuple[Any, np.ndarray]], orders: np.ndarray) -> np.ndarray:
    """The total data-dependent RDP `[orders]` of parts of a mechanism, each with ln q `[queries]`.

    The best bound known for each query: the papers', or the RDP of the part's event.
    """
    total = np.zeros(len(orders))
    for part, log_q in steps:
        ceiling = rdp_of_event(part.event, orders)
        distinct, repeats = np.unique(log_q, return_counts=True)
        for start in range(0, len(distinct), _CHUNK):
            rdp = part.rdp_of_log_q(distinct[start : start + _CHUNK], orders)
            total += repeats[start : start + _CHUNK] @ np.minimum(rdp, ceiling)
    return total


def check_orders(orders: Arrays) -> np.ndarray:
    """Returns the orders as float64 `[orders]`, or raises a `ValueError` with the remedy."""
    array = np.atleast_1d(np.asarray(orders, float))
    if array.ndim != 1 or not array.size or not (np.isfinite(array) & (array > 1)).all():
        raise ValueError(f"orders must be finite numbers above 1, got {orders!r}: for moments l take 1 + l.")
    return array


def check_delta(delta: float) -> float:
    """Returns δ as a float, or raises a `ValueError` unless it is strictly between 0 and 1.

    The bounds hold for any such δ. That it be small beside 1 / the number of private examples is what it means, and no
    condition of theirs. How many queries are put does not matter to it.
    """
    return _checks.probability("delta", delta, "take a value well below 1 / the number of private examples")
