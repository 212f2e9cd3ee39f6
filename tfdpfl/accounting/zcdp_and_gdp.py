"""Other measures of a mechanism next to its ε: ρ of zCDP, μ of GDP, and what a membership test can reach."""

import math
from typing import NamedTuple

from tfdpfl._types import DpEvent
from tfdpfl.accounting.pricing import are_gaussian, beyond_support, leaves_of, price
from tfdpfl.errors import PrivacyError

__all__ = ["Measures", "zcdp_and_gdp"]

_FPR = 0.01
# Of the pairs (ε, δ) that are proven, those that bound a test best have a δ near its power.
_DELTAS = (1e-6, 1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.2, 0.4)


class Measures(NamedTuple):
    """Measures beside ε; the first two are of compositions of Gaussians alone, and None for all else.

    Attributes:
        zcdp_rho: ρ of zero-concentrated DP (Bun & Steinke 2016, arXiv:1605.02065, Proposition 6).
        gdp_mu: μ of Gaussian DP (Dong et al. 2019, arXiv:1905.02383, Corollary 3.3).
        tpr_at_1_percent_fpr: the most members that any membership test can find that takes 1 % of non-members for
            members, as a fraction: for Gaussians that of the best test; else the least bound that some (ε, δ) proves
            (Kairouz et al. 2015, arXiv:1311.0776, Theorem 2.1). None if no accountant knows the event.
    """

    zcdp_rho: float | None
    gdp_mu: float | None
    tpr_at_1_percent_fpr: float | None


def zcdp_and_gdp(event: DpEvent, accountant: str, adjacency: str) -> Measures:
    """Returns these measures of an event, as `price` takes it. (ρ and μ are of exact normals: where noise ends costs a
    δ beside them.)"""
    leaves = list(leaves_of(event))
    if are_gaussian(leaves):
        from scipy.special import ndtr, ndtri

        squared = sum(n / leaf.noise_multiplier**2 if leaf.noise_multiplier else math.inf for leaf, n in leaves)
        lost = sum(n * beyond_support(leaf) for leaf, n in leaves)
        mu = math.sqrt(squared)
        return Measures(squared / 2, mu, min(float(ndtr(ndtri(_FPR) + mu)) + lost, 1.0))
    best = 1.0
    for delta in _DELTAS:
        try:
            epsilon = price(event, delta, accountant, adjacency).epsilon
        except PrivacyError:
            return Measures(None, None, None)
        if epsilon < math.inf:
            grown = math.exp(epsilon) * _FPR + delta if epsilon < 50 else 1.0
            best = min(best, grown, 1 - math.exp(-epsilon) * (1 - _FPR - delta))
    return Measures(None, None, best)
