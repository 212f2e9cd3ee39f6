"""What votes cost: Rényi DP for each query, its composition, and its conversion to ε.

`rdp_data_independent` and `rdp_data_dependent` are the papers' bounds. ε is made of them, and of what dp-accounting
knows about the mechanism's event where that is less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdpfl.accounting import _checks, price
from tfdpfl.pate.epsilon import Epsilon
from tfdpfl.pate.votes import as_counts

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from tfdpfl.pate.aggregators import Aggregator

CONVERSIONS = ("tight", "classic")
_CHUNK = 20_000  # queries whose [queries, orders] arrays are held at once
# λ - 1 from 0.02 to 10,000: the least orders serve ε in the hundreds, the greatest ε near 0.
ORDERS = 1 + np.geomspace(0.02, 1e4, 100)


def rdp_data_independent(mechanism: Aggregator, orders: Any, num_queries: int | None = None) -> np.ndarray:
    """Returns the RDP of one query whatever its votes, `[orders]`; `[num_queries, orders]` where that is given.

    GNMax: λ/σ². LNMax: min(2γ, 2γ²λ). With a threshold: that of a query which is answered.

    Args:
        mechanism: An aggregator.
        orders: λ, real numbers above 1.
        num_queries: See above.

    Raises:
        ValueError: an order is not above 1.

    Source: 2018, Proposition 8; 2017, Theorem 2. `mechanism.dp_event` has a lower price for LNMax.
    """
    orders = check_orders(orders)
    total = np.sum([part.rdp(orders) for part in mechanism.parts], axis=0)
    return total if num_queries is None else np.tile(total, (num_queries, 1))


def rdp_data_dependent(
    mechanism: Aggregator,
    votes: Any,
    orders: Any,
    *,
    num_classes: int | None = None,
    num_teachers: int | None = None,
    answered: Any = None,
    student: Any = None,
) -> np.ndarray:
    """Returns the RDP `[queries, orders]` of each query given its votes. It is as private as the votes.

    The lesser of the data-independent bound and, where its conditions hold, Theorem 6 of 2018 (Gaussian noise) or
    Theorem 3 of 2017 (Laplace noise), in log space, for any real order. As the theorems do, it bounds the divergence of
    the answers to these votes from those to any neighbouring votes, and not the other way round, which can be more.

    Args:
        mechanism: An aggregator.
        votes: Counts `[queries, classes]`; or predictions `[teachers, queries]` with `num_classes`.
        orders: λ, real numbers above 1.
        num_classes: As in `mechanism.aggregate`.
        num_teachers: As in `mechanism.aggregate`.
        answered: Which queries the teachers' vote answered; None: all.
        student: The student's probabilities, for Interactive-GNMax.

    Raises:
        ValueError: an order is not above 1, or the votes are malformed.
    """
    counts = as_counts(votes, num_classes, num_teachers)
    return mechanism._rdp(counts, mechanism._scores(counts, student), check_orders(orders), answered)


def compose(rdp_of_batches: Iterable[Any]) -> np.ndarray:
    """Returns the total RDP `[orders]` of batches of queries, each `[queries, orders]`: RDP adds up."""
    return np.sum([np.sum(batch, axis=0) for batch in rdp_of_batches], axis=0)


def epsilon_of_rdp(orders: Any, rdp: Any, delta: float, conversion: str = "tight") -> tuple[float, float]:
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
    delta = _checks.probability("delta", delta, "take a value well below 1 / the number of private examples")
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


def optimal_order(
    mechanism: Aggregator, votes: Any, delta: float, *, data_dependent: bool = True, **options: Any
) -> float:
    """Returns the order at which RDP gives the least ε.

    The data-dependent one tells about the votes. What is released must be priced at an order that was chosen without
    them: `data_dependent=False`.

    Args:
        mechanism: An aggregator.
        votes: As all that follow, see `rdp_data_dependent`.
        delta: δ, above 0 and below 1 / queries.
        data_dependent: From the votes, or from their number alone.
        options: The keyword arguments of `rdp_data_dependent`.

    Raises:
        ValueError: see `rdp_data_dependent`.
    """
    counts = as_counts(votes, options.pop("num_classes", None), options.pop("num_teachers", None))
    if data_dependent:
        order = mechanism.epsilon(counts, delta, **options).order
    else:
        delta = check_delta(delta, len(counts))
        mask = mechanism._mask(options.get("answered"), len(counts))
        event = mechanism.dp_event(len(counts), int(mask.sum()))
        order = best_epsilon(lambda orders: rdp_of_event(event, orders), delta).order
    assert order is not None
    return order


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


def check_orders(orders: Any) -> np.ndarray:
    """Returns the orders as float64 `[orders]`, or raises a `ValueError` with the mend."""
    array = np.atleast_1d(np.asarray(orders, float))
    if array.ndim != 1 or not array.size or not (np.isfinite(array) & (array > 1)).all():
        raise ValueError(f"orders must be finite numbers above 1, got {orders!r}: for moments l take 1 + l.")
    return array


def check_delta(delta: float, queries: int) -> float:
    """Returns δ as a float, or raises a `ValueError` unless it is above 0 and below 1 / queries."""
    mend = "take a value well below 1 / the number of private examples, for instance 1e-5"
    delta = _checks.probability("delta", delta, mend)
    if queries > 1 and delta * queries >= 1:
        raise ValueError(f"delta must be below 1 / {queries} queries, got {delta:g}: {mend}, or put fewer queries.")
    return delta


@dataclass(frozen=True)
class PySyftAnalysis:
    """What PySyft's `perform_analysis` was after, and what the same run really costs.

    Attributes:
        data_dependent: Integer moments, classic conversion, 2017's Theorem 3 where it holds. Not to be published.
        data_independent: The same without the votes: the figure that PySyft prints.
        real_orders: `data_independent` at the best real order.
        tight: The best bound that may be published: `LNMax.epsilon(data_dependent=False)`, by privacy loss
            distributions.
        tight_data_dependent: The best bound given the votes: real orders, tight conversion. Not to be published.
    """

    data_dependent: Epsilon
    data_independent: Epsilon
    real_orders: Epsilon
    tight: Epsilon
    tight_data_dependent: Epsilon


def pysyft_analysis(
    teacher_preds: Any,
    indices: Any = None,
    noise_eps: float = 0.1,
    delta: float = 1e-5,
    moments: int = 8,
    *,
    num_classes: int | None = None,
) -> PySyftAnalysis:
    """PySyft's `pate.perform_analysis`, mended: over all queries, with the 2017 bound where it is valid.

    Args:
        teacher_preds: Predictions `[teachers, queries]`.
        indices: Taken for the sake of old calls and not used: PySyft read query indices from it where tutorials pass
            labels, and so analysed some ten queries. For a subset, pass `teacher_preds[:, subset]`.
        noise_eps: γ of LNMax: noise of scale 1/γ.
        delta: δ, above 0 and below 1 / queries.
        moments: Moments 1 to this one are tried.
        num_classes: None takes the greatest class predicted, plus one, which underrates q where there are more.

    Raises:
        ValueError: the predictions are malformed or a number is out of its range.
    """
    from tfdpfl.pate.aggregators import LNMax

    if num_classes is None:
        array = np.asarray(teacher_preds)
        numeric = array.dtype.kind in "iuf" and array.size and np.isfinite(array).all()
        num_classes = max(int(array.max()) + 1, 2) if numeric else 2
    counts = as_counts(teacher_preds, num_classes)
    delta = check_delta(delta, len(counts))
    mechanism = LNMax(noise_eps)
    orders = 1.0 + np.arange(1, _checks.whole("moments", moments, 1, "for instance 10") + 1)

    def figure(orders: np.ndarray, rdp: np.ndarray, data_dependent: bool = False) -> Epsilon:
        epsilon, order = epsilon_of_rdp(orders, rdp, delta, "classic")
        return Epsilon(epsilon, delta, data_dependent, order)

    independent = lambda orders: len(counts) * rdp_data_independent(mechanism, orders)  # noqa: E731
    return PySyftAnalysis(
        data_dependent=figure(orders, compose([rdp_data_dependent(mechanism, counts, orders)]), True),
        data_independent=figure(orders, independent(orders)),
        real_orders=_published(best_epsilon(independent, delta, "classic")),
        tight=mechanism.epsilon(counts, delta, data_dependent=False),
        tight_data_dependent=mechanism.epsilon(counts, delta),
    )


def _published(epsilon: Epsilon) -> Epsilon:
    return Epsilon(epsilon, epsilon.delta, order=epsilon.order)
