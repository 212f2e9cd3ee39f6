"""The privacy losses of a Gaussian on the sum over a fresh uniform subset of fixed size. The proof is in
docs/federated.md, "Cohorts of fixed size"."""

from __future__ import annotations

import math

import numpy as np

from tfdpfl._types import DpEvent, PrivacyLosses

__all__ = ["losses", "losses_of"]

_TAIL = 10.0  # standard deviations: what lies beyond, a mass of e^-53, counts as lost


def losses(event: DpEvent, interval: float) -> PrivacyLosses:
    """The privacy loss distribution of one use of the event, on a grid, rounded towards less privacy, where a member's
    contribution is blanked (``"zero_out"``). σ is relative to the clip C. Another member in its place moves the sum by
    up to 2C, nothing in its place by up to C.
    """
    from dp_accounting.pld import privacy_loss_distribution as distribution

    q = event.sample_size / event.source_dataset_size
    s = 1 / event.event.noise_multiplier
    last = math.ceil(_largest(q, s) / interval) + 1
    grid = np.arange(last + 1) * interval
    sides = _blanked(q, s, grid), _sampled(q, s, grid)

    def pmf(above: np.ndarray, below: np.ndarray) -> PrivacyLosses:
        # H_α(P || Q) at α < 1 is 1 - α + α H_(1/α)(Q || P).
        left = -np.expm1(-grid) + np.exp(-grid) * below
        return losses_of(np.concatenate([left[:0:-1], above]), interval, np.arange(-last, last + 1))

    return distribution.PrivacyLossDistribution(pmf(*sides), pmf(*sides[::-1]))


def losses_of(deltas: np.ndarray, interval: float, number: np.ndarray) -> PrivacyLosses:
    """Returns losses at these multiples of an interval that have at least these δ at them."""
    from dp_accounting.pld import pld_pmf

    deltas = np.maximum.accumulate(np.clip(deltas, 0, 1)[::-1])[::-1]  # rounding may not make them rise
    return pld_pmf.create_pmf_pessimistic_connect_dots(interval, number, deltas)


def _blanked(q: float, s: float, epsilon: np.ndarray) -> np.ndarray:
    """δ at ε >= 0 of q N(2s, 1) + (1 - q) N(0, 1) against q N(s, 1) + (1 - q) N(0, 1)."""
    from scipy.special import log_ndtr, ndtr

    # The densities' ratio passes e^ε at t, where e^(st) solves a quadratic equation.
    rest = (1 - q) / q * -np.expm1(-epsilon) * np.exp(-epsilon - s * s)
    t = (epsilon + np.log((1 + np.sqrt(1 + 4 * rest)) / 2)) / s + 1.5 * s
    taken = q * (ndtr(2 * s - t) - np.exp(epsilon + log_ndtr(s - t)))
    return taken + (1 - q) * (ndtr(-t) - np.exp(epsilon + log_ndtr(-t)))


def _sampled(q: float, s: float, epsilon: np.ndarray) -> np.ndarray:
    """δ at ε >= 0 of q N(s, 1) + (1 - q) N(0, 1) against N(0, 1)."""
    from scipy.special import log_ndtr, ndtr

    of_one = epsilon + np.log1p((1 - q) / q * -np.expm1(-epsilon))  # log(1 + (e^ε - 1) / q)
    t = of_one / s + s / 2
    return q * (ndtr(s - t) - np.exp(of_one + log_ndtr(-t)))


def _largest(q: float, s: float) -> float:
    """The largest loss that counts, of either sign."""
    x = 2 * s + _TAIL
    return max(
        float(np.logaddexp(math.log(q) + s * x - s * s / 2, math.log1p(-q))),
        float(np.logaddexp(math.log(q) + 2 * s * x - 2 * s * s, math.log1p(-q)))
        - float(np.logaddexp(math.log(q) + s * x - s * s / 2, math.log1p(-q))),
    )
