"""A data-dependent ε that may be published: smooth sensitivity, and noise to its measure.

The cost of a query depends on its votes through one number x alone, which moves by at most `step` when one vote moves:

* Under a threshold x is the distance of the largest score from it, and step is 1.
* Under an argmax x is the gap that K - 1 equal rivals would have to leave the same q, and step is 2. Moving a vote
  changes every gap by at most 2. That each rival's chance f(gap) becomes at most F(f(gap)) with F(y) = f(f⁻¹(y) - 2)
  concave makes the sum at most that of K - 1 equal rivals whose gap fell by 2 (2018, appendix; for Laplace noise F is
  concave too). If the plurality changes q is smaller still, and the other direction is the same claim read backwards.

So for any vote counts at distance d, x is within d·step, and with R(x) the cost,

    S(x) = max over y of e^(-β·|y-x|/step) · max over |u| <= step of |R(y) - R(y+u)|

is a β-smooth bound on the local sensitivity (Nissim, Raskhodnikova & Smith 2007), with no conjecture about the shape of
R. It is evaluated on a grid, every cell by what bounds all its points. R falls with x; `_smooth` makes sure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from tfdpfl._types import Arrays
from tfdpfl.accounting import _checks
from tfdpfl.accounting.promises import Promise
from tfdpfl.pate import pricing
from tfdpfl.pate.aggregators import Aggregator, Answers, Queries, Threshold, read_queries
from tfdpfl.pate.epsilon import Epsilon

__all__ = [
    "SanitizedEpsilon",
    "published_release_cost",
    "release_cost",
    "smooth_sensitivity",
    "smooth_sensitivity_release",
]

_CELLS_PER_STEP = 16


@dataclass(frozen=True)
class SanitizedEpsilon:
    """An ε that was computed from the votes and may be published.

    Attributes:
        epsilon: Above the true data-dependent ε, its release included, except with probability `failure`.
        unpadded: The same without the margin for the noise: the 2018 paper's figure, below the truth half of the time.
        release_epsilon: What the release by itself would cost.
        published_release_epsilon: What the 2018 paper's formula gives for it, which is no bound: for comparison alone.
        delta: δ.
        order: The Rényi order λ.
        beta: β of the smooth sensitivity.
        noise: Standard deviation of the noise, in smooth sensitivities.
        failure: See `epsilon`.
        queries: How many queries it is for.
    """

    epsilon: Epsilon
    unpadded: Epsilon
    release_epsilon: float
    published_release_epsilon: float
    delta: float
    order: float
    beta: float
    noise: float
    failure: float
    queries: int

    def promises(self, delta: float) -> list[Promise]:
        """Returns what is guaranteed; see `tfdpfl.accounting.promises`."""
        note = f"The figure was computed from the votes with noise: it holds but for a chance of {self.failure:g}."
        return self.epsilon.promises(delta, notes=[note])

    def __str__(self) -> str:
        return (
            f"sanitised epsilon = {float(self.epsilon):.4g} at delta = {self.delta:g} for {self.queries} queries "
            f"(order {self.order:g}; an upper bound except with probability {self.failure:g})"
        )


def smooth_sensitivity(
    mechanism: Aggregator,
    votes: Arrays,
    order: float,
    beta: float,
    *,
    num_classes: int | None = None,
    num_teachers: int | None = None,
    answered: Arrays = None,
    student: Arrays = None,
) -> np.ndarray:
    """Returns each query's β-smooth sensitivity of its data-dependent RDP at one order, `[queries]`. It is private.

    One example moves a vote in every query, so what the total needs is the sum.

    Args:
        mechanism: LNMax, GNMax, ConfidentGNMax or InteractiveGNMax.
        votes: As all that are not below, see `rdp_data_dependent`.
        order: λ, above 1.
        beta: β, above 0; smaller is smoother, and larger.

    Raises:
        ValueError: an argument is out of its range, or the votes are malformed.

    Source: 2018, appendix; see the module's docstring for how it is computed here.
    """
    return _sensitivity(read_queries(mechanism, votes, num_classes, num_teachers, answered, student), order, beta)


def release_cost(order: float, beta: float, noise: float) -> float:
    """Returns the RDP at `order` of adding N(0, (noise·S)²) to what has the β-smooth sensitivity S (GNSS).

    The divergence of two normals whose means differ by the lesser S and whose deviations by a factor of e^β at most, at
    its worst (Gil, Alajaji & Linder 2013). `published_release_cost` is less where 2λβ is near 1.

    Args:
        order: λ, above 1.
        beta: β of the smooth sensitivity, below 1/(2λ).
        noise: Standard deviation of the noise, in smooth sensitivities, above 0.

    Raises:
        ValueError: not 1 < order < 1/(2·beta), or `noise` is not above 0.
    """
    order, beta, noise = _checked(order, beta, noise)

    def variance(log_ratio: float) -> float:  # 1 + λ(e^2r - 1) is accurate for a small r
        return 1 + order * math.expm1(2 * log_ratio)

    def spread(log_ratio: float) -> float:
        return log_ratio + (2 * log_ratio - math.log(variance(log_ratio))) / (2 * (order - 1))

    # Both terms are worst where the neighbour's noise is the smaller, or the second where it is the greater.
    return order * math.exp(-2 * beta) / (2 * noise**2 * variance(-beta)) + max(spread(-beta), spread(beta))


def published_release_cost(order: float, beta: float, noise: float) -> float:
    """Returns what the 2018 paper states for `release_cost`: λe^(2β)/σ² + (βλ - ½ln(1 - 2λβ))/(λ - 1). No bound.

    For comparison with published figures alone: where 2λβ is near 1 the divergence itself is greater (docs/pate.md
    integrates it). Arguments and errors as `release_cost`.

    Source: 2018, Theorem 23.
    """
    order, beta, noise = _checked(order, beta, noise)
    return order * math.exp(2 * beta) / noise**2 + (beta * order - math.log1p(-2 * order * beta) / 2) / (order - 1)


def _checked(order: float, beta: float, noise: float) -> tuple[float, float, float]:
    order = float(pricing.check_orders(order)[0])
    beta = _checks.real("beta", beta, "for instance 0.3 / order", above=0)
    noise = _checks.real("noise", noise, "the standard deviation in sensitivities, for instance 10", above=0)
    if 2 * order * beta >= 1:
        raise ValueError(f"beta must be below 1 / (2 * order) = {0.5 / order:g}, got {beta:g}: lower it.")
    return order, beta, noise


def smooth_sensitivity_release(
    mechanism: Aggregator | Answers,
    votes: Arrays = None,
    delta: float = 1e-5,
    *,
    order: float | None = None,
    beta: float | None = None,
    noise: float | None = None,
    failure: float = 0.01,
    num_classes: int | None = None,
    num_teachers: int | None = None,
    answered: Arrays = None,
    student: Arrays = None,
    seed: int | None = None,
) -> SanitizedEpsilon:
    """Returns a data-dependent ε that may be published: once. Each release costs; its own cost is in the figure.

    The total RDP at one order is released with Gaussian noise to the measure of its smooth sensitivity. So is the
    logarithm of that sensitivity (which moves by β when a vote does), for a margin that makes the figure an upper
    bound. If the data-independent RDP is less it is taken; it needs no noise.

    `order`, `beta` and `noise` must be chosen without looking at the votes, as the defaults are. They suit some
    hundreds of teachers and more. With fewer the margin eats what the votes save, and `data_dependent=False` is the
    better figure. A search over them for the least figure releases something about the votes that is not paid for.

    Args:
        mechanism: An aggregator, with `votes`; or the `Answers` it gave, without.
        votes: As all that are not below, see `rdp_data_dependent`.
        delta: δ, strictly between 0 and 1, well below 1 / the number of private examples.
        order: λ; None: 1.25 times the order that suits the data-independent cost.
        beta: β, below 1/(2λ); None: 0.35/λ.
        noise: σ of the released total, in smooth sensitivities; that of the logarithm is β·σ. None: 0.8·λ.
        failure: The probability that the figure is below the truth, in (0, 1).
        seed: None draws from the operating system's entropy. A seed is for tests only.

    Raises:
        ValueError: an argument is out of its range, or the votes are malformed.

    Source: 2018, appendix (GNSS); the margin is in the manner of Redberg & Wang 2021, "Privately Publishable
    Per-instance Privacy".
    """
    from tfdpfl.noise import Source  # which imports TensorFlow: analysis does without

    if isinstance(mechanism, Answers):
        queries = mechanism.queries
    else:
        queries = read_queries(mechanism, votes, num_classes, num_teachers, answered, student)
    delta = pricing.check_delta(delta)
    failure = _checks.probability("failure", failure, "the chance of a figure below the truth, for instance 0.01")
    event = queries.event
    if order is None:
        suits = pricing.best_epsilon(lambda orders: pricing.rdp_of_event(event, orders), delta)
        order = 1.25 * (suits.order or 8.0)
    orders = pricing.check_orders(order)
    order = float(orders[0])
    beta = 0.35 / order if beta is None else beta
    noise = 0.8 * order if noise is None else noise
    cost = release_cost(order, beta, noise) + order / (2 * noise**2)

    total = float(queries.rdp(orders).sum())
    sensitivity = float(_sensitivity(queries, order, beta).sum())
    first, second = Source(seed).normals([2])
    released = float(total + noise * sensitivity * first)
    log_sensitivity = float(math.log(max(sensitivity, 1e-300)) + beta * noise * second)
    quantile = -special.ndtri(failure / 2)
    margin = quantile * noise * math.exp(log_sensitivity + quantile * beta * noise)

    independent = float(pricing.rdp_of_event(event, orders)[0])

    def epsilon(rdp: float) -> Epsilon:
        paid = min(max(rdp, 0.0) + cost, independent + cost)
        return Epsilon(pricing.epsilon_of_rdp(orders, [paid], delta)[0], delta, order=order)

    published = published_release_cost(order, beta, noise)
    release, published_release = (pricing.epsilon_of_rdp(orders, [rdp], delta)[0] for rdp in (cost, published))
    return SanitizedEpsilon(
        epsilon=epsilon(released + margin),
        unpadded=epsilon(released),
        release_epsilon=release,
        published_release_epsilon=published_release,
        delta=delta,
        order=order,
        beta=beta,
        noise=noise,
        failure=failure,
        queries=len(queries.counts),
    )


def _sensitivity(queries: Queries, order: float, beta: float) -> np.ndarray:
    order = float(pricing.check_orders(order)[0])
    beta = _checks.real("beta", beta, "for instance 0.3 / order", above=0)
    counts = queries.counts
    teachers, classes = int(counts[0].sum()), counts.shape[1]
    out = np.zeros(len(counts))
    for part, seen, rows in queries.seen():
        # As far as x can get: the gap of unanimity; the distance from the threshold of a largest score in
        # [0, teachers] (scores less a share of the teachers sum to 0).
        reach = max(abs(part.threshold), abs(part.threshold - teachers)) if isinstance(part, Threshold) else teachers
        cells = math.ceil(reach / part.step) * _CELLS_PER_STEP
        x = np.arange(cells + 1) * (part.step / _CELLS_PER_STEP)
        log_q = part.log_q_of_position(x, classes)
        smooth = _smooth(part.rdp_of_log_q(log_q, np.array([order]))[:, 0], beta)
        # The last grid point whose q is not below the query's: ln q falls along the grid.
        cell = np.searchsorted(-log_q, -part.log_q(seen), side="right") - 1
        out[rows] += smooth[np.clip(cell, 0, cells - 1)]
    return out


def _smooth(cost: np.ndarray, beta: float) -> np.ndarray:
    """S on each of the cells between the points that `cost` is given at, `_CELLS_PER_STEP` to a step."""
    # Where the cost were to rise with x, this raises what is to its left: a bound from above may.
    falling = np.maximum.accumulate(cost[::-1])[::-1]
    step = _CELLS_PER_STEP
    before = np.concatenate([np.full(step, falling[0]), falling])[: len(cost)]
    after = np.concatenate([falling, np.full(step, falling[-1])])[step:]
    local = np.maximum(before[:-1] - falling[1:], falling[:-1] - after[1:])
    # max over cells j of local[j]·e^(-β·(cells between)/step), by one sweep each way.
    decay = beta / step
    with np.errstate(divide="ignore"):
        log_local = np.log(local)
    index = np.arange(len(local)) * decay
    from_left = np.maximum.accumulate(log_local + index) - index
    from_right = np.maximum.accumulate((log_local - index)[::-1])[::-1] + index
    # A point of a cell may be at either end of it, so cells are one nearer than their indices say.
    return np.exp(np.maximum(log_local, np.maximum(from_left, from_right) + decay))
