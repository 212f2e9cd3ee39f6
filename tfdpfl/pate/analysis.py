"""The cost of votes under an aggregator: the papers' Rényi DP for each query, and what PySyft's analysis was after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdpfl._types import Arrays
from tfdpfl.accounting import _checks
from tfdpfl.pate.aggregators import Aggregator, LNMax, read_queries
from tfdpfl.pate.epsilon import Epsilon
from tfdpfl.pate.pricing import best_epsilon, check_delta, check_orders, compose, epsilon_of_rdp, rdp_of_event
from tfdpfl.pate.votes import as_counts

__all__ = ["PySyftAnalysis", "optimal_order", "pysyft_analysis", "rdp_data_dependent", "rdp_data_independent"]


def rdp_data_independent(mechanism: Aggregator, orders: Arrays, num_queries: int | None = None) -> np.ndarray:
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
    votes: Arrays,
    orders: Arrays,
    *,
    num_classes: int | None = None,
    num_teachers: int | None = None,
    answered: Arrays = None,
    student: Arrays = None,
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
    queries = read_queries(mechanism, votes, num_classes, num_teachers, answered, student)
    return queries.rdp(check_orders(orders))


def optimal_order(
    mechanism: Aggregator, votes: Arrays, delta: float, *, data_dependent: bool = True, **options: Any
) -> float:
    """Returns the order at which RDP gives the least ε.

    The data-dependent one tells about the votes. A figure that is released must be priced at an order that was chosen
    without them: `data_dependent=False`.

    Args:
        mechanism: An aggregator.
        votes: As all that follow, see `rdp_data_dependent`.
        delta: δ, strictly between 0 and 1, well below 1 / the number of private examples.
        data_dependent: From the votes, or from their number alone.
        options: The keyword arguments of `rdp_data_dependent`.

    Raises:
        ValueError: see `rdp_data_dependent`.
    """
    if data_dependent:
        order = read_queries(mechanism, votes, **options).epsilon(delta, data_dependent).order
    else:
        counts = as_counts(votes, options.get("num_classes"), options.get("num_teachers"))
        answered = mechanism._mask(options.get("answered"), len(counts))
        event = mechanism.dp_event(len(counts), int(answered.sum()))
        order = best_epsilon(lambda orders: rdp_of_event(event, orders), check_delta(delta)).order
    assert order is not None
    return order


@dataclass(frozen=True)
class PySyftAnalysis:
    """Holds what PySyft's `perform_analysis` was after, and what the same run really costs.

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
    teacher_preds: Arrays,
    indices: Arrays = None,
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
        delta: δ, strictly between 0 and 1, well below 1 / the number of private examples.
        moments: Moments 1 to this one are tried.
        num_classes: None takes the greatest class predicted, plus one, which underrates q where there are more.

    Raises:
        ValueError: the predictions are malformed or a number is out of its range.
    """
    if num_classes is None:
        array = np.asarray(teacher_preds)
        numeric = array.dtype.kind in "iuf" and array.size and np.isfinite(array).all()
        num_classes = max(int(array.max()) + 1, 2) if numeric else 2
    counts = as_counts(teacher_preds, num_classes)
    delta = check_delta(delta)
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
