"""A lower bound on ε from one training: guesses of which canaries the coins put in, and how many are right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from scipy import special, stats

from tfdpfl._types import Arrays, Json
from tfdpfl.accounting import _checks
from tfdpfl.accounting.pricing import check_delta
from tfdpfl.audit.epsilon import epsilon_of_mu

__all__ = ["OneRunReport", "one_run_bounds"]

_MOST = 60.0  # of what is searched, ε or μ
_TIES = (2023, 11)  # a stream of its own, so that a report can be made again and no coins of a small seed agree with it


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneRunReport:
    """Holds the result of one training with canaries.

    Attributes:
      epsilon: with ``confidence``, the training has no smaller ε at ``delta`` (Steinke et al. 2023).
      epsilon_gaussian: the same for a training whose trade-off function is a Gaussian one, or is claimed to be
        (Mahloujifar et al. 2024); see `tfdpfl.audit.audit_epsilon` for when that holds.
      delta: of both.
      confidence: of each of the two bounds by itself.
      guesses: (made, right) of the number of guesses that gave ``epsilon``.
      num_canaries: how many coins were thrown.
    """

    epsilon: float
    epsilon_gaussian: float
    delta: float
    confidence: float
    guesses: tuple[int, int]
    num_canaries: int

    def to_dict(self) -> Json:
        """The fields, JSON-ready."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        made, right = self.guesses
        return (
            f"one run with {self.num_canaries} canaries: epsilon ≥ {self.epsilon:.3f} at delta {self.delta:g} "
            f"({self.confidence:.0%} confidence; {right} of {made} guesses were right); "
            f"≥ {self.epsilon_gaussian:.3f} if the trade-off is a Gaussian one"
        )


def one_run_bounds(scores: Arrays, inserted: Arrays, *, delta: float, confidence: float = 0.95) -> OneRunReport:
    """The bounds of `OneRunAudit` for an attack of your own.

    Args:
      scores: ``[canaries]``; higher ones are taken to be in. They may depend on all that the training released, and on
        nothing else that knows the coins. Equal scores are ordered at random, whatever their order here.
      inserted: bool ``[canaries]``, thrown by fair and independent coins.
      delta: δ of the bounds, 0 < δ < 1.
      confidence: strictly between 0 and 1.

    Raises:
      ValueError: an argument is out of its range.

    Source: as `OneRunAudit`.
    """
    scores, inserted = np.asarray(scores, np.float64), np.asarray(inserted)
    if scores.ndim != 1 or inserted.shape != scores.shape or inserted.dtype != bool or len(scores) < 20:
        raise ValueError(
            f"scores and inserted must be a number and a bool for each of at least 20 canaries, got {scores.shape} and "
            f"{inserted.shape} of {inserted.dtype}: give one of each"
        )
    if not np.all(np.isfinite(scores)):
        raise ValueError("scores must be finite: check that training converged")
    delta, confidence = check_delta(delta), _checks.probability("confidence", confidence, "for instance 0.95")
    m = len(scores)
    # The order of a file may be that of the coins, so equal scores are ordered at random.
    right = inserted[np.lexsort([np.random.default_rng(_TIES).random(m), scores])]
    sides = _sides(m)
    error = (1 - confidence) / len(sides)
    found = [(2 * k, int((~right[:k]).sum() + right[-k:].sum())) for k in sides]
    epsilon, best = _largest(found, lambda g, r, e: _p_value(m, g, r, e, delta) <= error)
    mu, _ = _largest(found, lambda g, r, mu: _refuted(m, g, r, mu, error))
    return OneRunReport(
        epsilon=epsilon,
        epsilon_gaussian=epsilon_of_mu(mu, delta),
        delta=delta,
        confidence=confidence,
        guesses=best,
        num_canaries=m,
    )


def _sides(m: int) -> list[int]:
    """How many guesses are made at either end: halves of all, down to ten."""
    return [k for k in (m // 2 ** (j + 1) for j in range(8)) if k >= 10]


def _largest(found: list[tuple[int, int]], refuted: Callable[[int, int, float], bool]) -> tuple[float, tuple[int, int]]:
    """The supremum of what some (guesses, right) refutes, from below, and which did."""
    low, best = 0.0, found[0]
    for guesses in found:
        if not refuted(*guesses, low):
            continue
        best, high = guesses, max(1.0, 2 * low)
        while high < _MOST and refuted(*guesses, high):
            low, high = high, 2 * high
        while high - low > 1e-4:
            middle = (low + high) / 2
            low, high = (middle, high) if refuted(*guesses, middle) else (low, middle)
    return low, best


def _p_value(m: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """How likely so many right ones are under (ε, δ)-DP at most: theorem 5.2 of Steinke et al."""
    tail = stats.binom.sf(right - np.arange(right + 1) - 1, guesses, special.expit(epsilon))
    slope = np.max((tail[1:] - tail[0]) / np.arange(1, right + 1), initial=0.0)
    return min(1.0, float(tail[0] + 2 * m * delta * slope))


def _refuted(m: int, guesses: int, right: int, mu: float, error: float) -> bool:
    """Whether so many right ones are likelier than ``error`` for no μ-GDP training: algorithm 3 of Mahloujifar et
    al., with the trade-off function of normals that are μ apart."""
    r, h = error * right / m, error * (guesses - right) / m
    for i in range(right - 1, -1, -1):
        higher = max(h, float(special.ndtr(special.ndtri(r) - mu)))
        if higher == h:
            break  # nor will it change any more
        r = min(r + i / (guesses - i) * (higher - h), 1.0)
        h = higher
    return r + h > guesses / m
