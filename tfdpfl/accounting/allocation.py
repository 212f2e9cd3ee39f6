"""The privacy losses of Gaussian sums over t steps, of which each example joins one that is chosen at random.

Neighbours differ in one example. With X₁ … X_t independent log-normals, exp N(-s²/2, s²) with s = 1/σ, the outputs of
the t steps have the likelihood ratio S = (X₁ + … + X_t) / t, where there is noise alone in them (Chua et al. 2024,
"Balls-and-Bins Sampling for DP-SGD", arXiv:2412.16802; Feldman & Shenfeld 2025, arXiv:2502.08202, also for steps that
depend on earlier ones). So δ at ε is E max(S - e^ε, 0) if the example is removed, and E max(1 - e^ε S, 0) if it is
added.

The law of X₁ + … + X_t is made by doublings on a geometric grid. Both δ are the mean of a convex function of S. So they
stay upper bounds if a value between two points of the grid is split among both with the mean kept (which raises the
mean of every convex function), and if a value is lowered and what the mean of S loses is added to δ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tfdpfl._types import PrivacyLosses
from tfdpfl.accounting.fixed_size import losses_of

__all__ = ["losses"]

_TAIL = 8.6  # standard deviations: a mass of e^-40 lies beyond
_CUT = 1e-18  # what is lowered at an end of a sum's law, as a share of its mass or mean
_STEP = 0.025  # of the grid, over the deviation of log S; at most 0.04: ε grows by less than 0.1 %
_MOST_POINTS = 40_000  # of one step's law, on the finest grid: more take minutes, and fewer give a larger ε


@dataclass(frozen=True)
class _Sum:
    """The law of a sum: probabilities of exp(grid · (first + i)), one of 0, and what values were lowered by in mean."""

    grid: float
    first: int
    probabilities: np.ndarray
    zero: float
    lost: float

    @property
    def values(self) -> np.ndarray:
        return np.exp(self.grid * (self.first + np.arange(len(self.probabilities))))

    def refined(self, times: int) -> _Sum:
        """The same on a grid that is so many times as fine."""
        probabilities = np.zeros((len(self.probabilities) - 1) * times + 1)
        probabilities[::times] = self.probabilities
        return _Sum(self.grid / times, self.first * times, probabilities, self.zero, self.lost)

    def cut(self) -> _Sum:
        """Without the ends that hardly count: what is below becomes 0, what is above the greatest value that stays."""
        p, means = self.probabilities, self.probabilities * self.values
        low = int(np.searchsorted(np.cumsum(p), _CUT))
        above = np.cumsum(means[::-1])[::-1]
        high = max(int(np.searchsorted(-above, -_CUT * above[0])), low + 1)
        kept = p[low:high].copy()
        kept[-1] += p[high:].sum()
        lost = means[:low].sum() + (means[high:] - p[high:] * self.values[high - 1]).sum()
        return _Sum(self.grid, self.first + low, kept, self.zero + p[:low].sum(), self.lost + lost)

    def __add__(self, other: _Sum) -> _Sum:
        a, b, apart, grid = self.probabilities, other.probabilities, other.first - self.first, self.grid
        first = min(self.first, other.first)
        last = max(self.first + len(a), other.first + len(b)) + math.ceil(math.log(2) / grid) + 2
        p = np.zeros(last - first)
        # Where the sum of two points lies depends on how far they are apart: e^x + e^(x + gd) is e^(x + log(1 + e^gd)).
        offsets = np.arange(1 - len(a), len(b))
        places = np.logaddexp(0, grid * (offsets + apart)) / grid
        below = np.floor(places).astype(int)
        shares = np.expm1(grid * (places - below)) / np.expm1(grid)
        for offset, place, share in zip(offsets.tolist(), below.tolist(), shares.tolist(), strict=True):
            begin, end = max(0, -offset), min(len(a), len(b) - offset)
            mass = a[begin:end] * b[begin + offset : end + offset]
            at, up = self.first + begin + place - first, share * mass
            p[at : at + len(mass)] += mass - up
            p[at + 1 : at + 1 + len(mass)] += up
        # Where one of the two is 0 the sum is lowered to 0.
        lost = self.zero * (b @ other.values) + other.zero * (a @ self.values)
        zero = self.zero + other.zero * (1 - self.zero)
        return _Sum(grid, first, p, zero, self.lost + other.lost + lost).cut()


def _one(s: float, grid: float) -> _Sum:
    """The law of one X."""
    from scipy.special import ndtr

    first, last = (math.floor(side * (s * s / 2 + _TAIL * s) / grid) for side in (-1, 1))
    points = np.arange(first, last + 2)
    z, x = (points * grid + s * s / 2) / s, np.exp(points * grid)

    def between(z: np.ndarray) -> np.ndarray:
        return np.where(z[:-1] < 0, np.diff(ndtr(z)), -np.diff(ndtr(-z)))  # of small numbers, whichever these are

    mass, mean = between(z), between(z - s)  # of each cell: its probability, and its part of the mean
    up = np.clip((mean - mass * x[:-1]) / np.diff(x), 0, mass)
    p = np.append(mass - up, 0.0) + np.insert(up, 0, 0.0)
    p[-1] += ndtr(-z[-1])
    return _Sum(grid, first, p, float(ndtr(z[0])), float(ndtr(z[0] - s) + ndtr(s - z[-1]))).cut()


def _sum_of(s: float, steps: int) -> _Sum:
    """The law of X₁ + … + X_t, from the first binary digit of t to its last."""
    coarsest = min(_STEP * math.sqrt(math.expm1(min(s * s, 700))), 0.04)
    finest = 2 * (s * s + _TAIL * s) / _MOST_POINTS

    def grid_of(number: int) -> float:  # the deviation of log S falls with its root
        halvings = min((number.bit_length() - 1) // 2, max(int(math.log2(coarsest / finest)), 0))
        return coarsest / 2**halvings

    number, total = 1, _one(s, grid_of(1))
    for digit in bin(steps)[3:]:
        number = 2 * number + int(digit)
        total = total.refined(round(total.grid / grid_of(number)))
        odd = _one(s, total.grid) if digit == "1" else None
        total = total + total
        total = total if odd is None else total + odd
    return total


def losses(sigma: float, steps: int, interval: float) -> PrivacyLosses:
    """Returns the privacy loss distribution of all steps together, rounded towards less privacy.

    Args:
        sigma: The noise's standard deviation, over what an example moves the sum.
        steps: t.
        interval: Of the grid of losses.
    """
    from dp_accounting.pld import privacy_loss_distribution as distribution

    total = _sum_of(1 / sigma, steps)
    p, s = total.probabilities, total.values / steps
    lost = total.lost / steps
    # What rounding did is seen where the sum is known: the probabilities' is 1, and the mean's.
    rounding = abs(p.sum() + total.zero - 1) + abs(p @ s + lost - 1) + 1e-15
    last = math.ceil(float(np.abs(np.log(s[[0, -1]])).max()) / interval) + 1
    number = np.arange(-last, last + 1)
    ratio = np.exp(number * interval)

    mass, mean = np.append(np.cumsum(p[::-1])[::-1], 0), np.append(np.cumsum((p * s)[::-1])[::-1], 0)
    at = np.searchsorted(s, ratio)
    removed = mean[at] - ratio * mass[at] + lost + rounding
    mass, mean = np.insert(np.cumsum(p), 0, 0) + total.zero, np.insert(np.cumsum(p * s), 0, 0)
    at = np.searchsorted(s, 1 / ratio)
    added = mass[at] - ratio * mean[at] + rounding
    return distribution.PrivacyLossDistribution(*(losses_of(deltas, interval, number) for deltas in (removed, added)))
