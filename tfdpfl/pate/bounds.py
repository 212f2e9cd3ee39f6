"""The bounds on which PATE's analysis stands, each in log space, for arrays of queries and of real orders.

q is the probability that the noisy answer is not the likeliest one. Everything takes ln q, so that a q of
e^(-10000) is as good as any. The sources: Papernot et al. 2017 (arXiv:1610.05755, "2017" below) and Papernot et al.
2018 (arXiv:1802.08908, "2018").
"""

from __future__ import annotations

import numpy as np
from scipy import special

__all__ = [
    "capped_log_q",
    "log_q",
    "log_q_gaussian_of_gap",
    "log_q_laplace_of_gap",
    "log_q_threshold",
    "rdp_gaussian",
    "rdp_laplace",
]

# A log of q far below what votes can reach; minus infinity would turn products with zero into NaN.
_LEAST_LOG_Q = -1e100


def log_q_gaussian_of_gap(gap: np.ndarray, sigma: float) -> np.ndarray:
    """ln P(one rival overtakes a plurality that leads by `gap` votes) under N(0, σ²): ln ½erfc(gap / 2σ)."""
    return special.log_ndtr(-np.asarray(gap, float) / (np.sqrt(2) * sigma))


def log_q_laplace_of_gap(gap: np.ndarray, gamma: float) -> np.ndarray:
    """The same under Laplace noise of scale 1/γ, for `gap >= 0`: ln[(2 + γ·gap) / (4e^(γ·gap))]."""
    lead = gamma * np.asarray(gap, float)
    return np.log1p(lead / 2) - np.log(2) - lead


def log_q(counts: np.ndarray, log_q_of_gap) -> np.ndarray:
    """ln of the bound on q, `[queries]`: the union over rivals, at most 1 - 1/K, since the plurality is likeliest.

    2017, Lemma 4; 2018, Proposition 7.
    """
    classes = counts.shape[1]
    ordered = np.sort(counts, axis=1)
    union = special.logsumexp(log_q_of_gap(ordered[:, -1:] - ordered[:, :-1]), axis=1)
    return capped_log_q(union, classes)


def capped_log_q(union: np.ndarray, classes: int) -> np.ndarray:
    """ln min(q, 1 - 1/K)."""
    return np.maximum(np.minimum(union, np.log1p(-1 / classes)), _LEAST_LOG_Q)


def log_q_threshold(margin: np.ndarray, sigma: float) -> np.ndarray:
    """ln of the probability of the less likely outcome of `margin + N(0, σ²) >= 0`: ln min(p, 1 - p)."""
    return np.maximum(special.log_ndtr(-np.abs(margin) / sigma), _LEAST_LOG_Q)


def rdp_gaussian(log_q: np.ndarray, sigma: float, orders: np.ndarray) -> np.ndarray:
    """RDP `[queries, orders]` of GNMax, given ln q: the lesser of λ/σ² and 2018's Theorem 6.

    Theorem 6 with the orders of Proposition 10: μ₂ = σ√ln(1/q), μ₁ = μ₂ + 1. Outside its conditions it says nothing
    and λ/σ² stands.
    """
    log_q, orders = np.asarray(log_q, float)[:, None], np.asarray(orders, float)[None]
    with np.errstate(all="ignore"):  # entries outside the conditions may be anything; they are not used
        mu2 = sigma * np.sqrt(-log_q)
        mu1 = mu2 + 1
        eps1, eps2 = mu1 / sigma / sigma, mu2 / sigma / sigma
        # μ₁/(μ₁-1) as 1 + 1/μ₂: exact for a large μ too.
        increasing = log_q <= (mu2 - 1) * eps2 - mu2 * (np.log1p(1 / mu2) + np.log1p(1 / (mu2 - 1)))
        valid = (mu1 > orders) & (mu2 > 1) & increasing & (-log_q > eps2)
        log_not_q = _log1mexp(log_q)
        log_a = log_not_q - _log1mexp((log_q + eps2) * (1 - 1 / mu2))
        log_b = eps1 - log_q / mu2
        bound = np.logaddexp(log_not_q + (orders - 1) * log_a, log_q + (orders - 1) * log_b) / (orders - 1)
    return _least(np.broadcast_to(orders / sigma / sigma, bound.shape), bound, valid)


def rdp_laplace(log_q: np.ndarray, gamma: float, orders: np.ndarray) -> np.ndarray:
    """RDP `[queries, orders]` of LNMax, given ln q: the least of 2γ, 2γ²λ and 2017's Theorem 3 at l = λ - 1.

    Theorem 3 holds for q <= 1/(e^(2γ) + 1) only. There it meets 2γ; above, its formula means nothing.
    """
    log_q, orders = np.asarray(log_q, float)[:, None], np.asarray(orders, float)[None]
    moment = orders - 1
    valid = (log_q <= -np.logaddexp(0, 2 * gamma)) & (moment > 0)
    with np.errstate(all="ignore"):
        log_not_q = _log1mexp(log_q)
        ratio = log_not_q - _log1mexp(log_q + 2 * gamma)
        bound = np.logaddexp(log_not_q + moment * ratio, log_q + 2 * gamma * moment) / moment
    known = np.minimum(2 * gamma, 2 * gamma * gamma * orders)
    return _least(np.broadcast_to(known, bound.shape), bound, valid)


def _least(known: np.ndarray, bound: np.ndarray, valid: np.ndarray) -> np.ndarray:
    use = valid & (bound < known)  # a NaN is not less
    return np.maximum(np.where(use, bound, known), 0)


def _log1mexp(x: np.ndarray) -> np.ndarray:
    """ln(1 - e^x) for x < 0, without cancellation at either end."""
    return np.where(x > -np.log(2), np.log(-np.expm1(x)), np.log1p(-np.exp(x)))
