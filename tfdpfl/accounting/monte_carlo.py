"""The privacy losses of banded noise under b-min-sep sampling: by Monte Carlo, as an upper confidence bound.

Sampling (Dong & Ganesh 2026, arXiv:2602.09338): an example that was in a step rests for the next b - 1 steps. Then an
independent coin of bias p decides in each step until the example is in one again. At the start it rests for each of 1
to b - 1 more steps with probability p / (1 + (b - 1) p), so that all steps have the same mean batch. The column of the
noise's matrix C has at most b entries, so no two uses of an example move one base normal.

Dominating pair: let x be the random steps of an example and g its clipped gradients, each of which may depend on all
earlier outputs. Given x, the base normals move by m_x = C (x ∘ g), over their deviation. The likelihood ratio is a mean
over x: S = E_x exp(<m_x, z> - |m_x|² / 2). No <m_x, m_y> is larger than if all g are one unit vector and the entries of
C are replaced by their absolute values. So by Kahane's inequality (1986) E φ(S) is for no convex φ larger than then.
Apply it to the last step first: whatever came before, that step's <m_x, m_y> and the factors of the earlier steps are
fixed. δ at ε is E max(S - e^ε, 0) if the example is removed, and E max(1 - e^ε S, 0) if it is added, both of convex
functions. Other examples are sampled by themselves, and change nothing.

The ratio is found backwards. Let R[i] be that of the steps from i on for an example that may be in step i, and w[i]
that of one use in step i. Then R[i] = (1 - p) R[i + 1] + p w[i] R[i + b]. A use in the last steps is taken to move b
base normals, as if the noise went on, which shows only more.

Each δ is the mean of a variable in [0, 1]. If the mean of N runs is m, the expectation is above u with probability at
most exp(-N KL(m, u)) (Hoeffding 1963, Theorem 1). The bounds at all points of a grid, and of all prices that one search
for σ compares, hold together except with probability `FAILURE`, which is added to δ. The true δ is a convex function of
e^ε, so it is below the largest convex function that is below these bounds. A distribution with that curve dominates
(Doroshenko et al. 2022, arXiv:2207.04380), so it can be composed with other mechanisms.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import zlib

import numpy as np

from tfdpfl._types import PrivacyLosses
from tfdpfl._waiting import is_watched

__all__ = ["FAILURE", "RUNS", "losses"]

RUNS = 1 << 22  # simulated trainings for each direction; a δ below about 100 / RUNS has a much larger ε
FAILURE = 1e-10  # with this probability the bound of one direction may be too small
_TRIES = 128  # at least the prices of one search (40 for its bracket), of which none is too small but for `FAILURE`
_AT_ONCE = 1 << 11  # runs of one call: their normals take a few megabytes
_POINTS = 200  # of the grid of ε
_ROUNDING = 1e-9  # of a privacy loss
_LARGEST = 600.0  # ε of the grid: its exponential is a float


def losses(shifts: tuple[float, ...], rate: float, steps: int, runs: int, interval: float) -> PrivacyLosses:
    """Returns the privacy loss distribution of a whole training, rounded towards less privacy.

    Args:
        shifts: How far one use moves the base normals of its step and of the next ones, over their deviation.
        rate: The probability p with which an example is in a step if it does not rest.
        steps: The steps of the training.
        runs: How many trainings are simulated for each direction.
        interval: Of the grid of losses.
    """
    from dp_accounting.pld import privacy_loss_distribution as distribution

    removed, added = simulated(shifts, rate, steps, runs)
    return distribution.PrivacyLossDistribution(_pmf(removed, interval), _pmf(-added, interval))


@functools.lru_cache(maxsize=2)
def simulated(shifts: tuple[float, ...], rate: float, steps: int, runs: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns log S of so many runs with the example in the data, and of as many without it.

    Both have the same normals, whose draws take most of the time: the bounds of the two hold together however they
    depend on each other. The same arguments give the same runs.
    """
    from tqdm.auto import tqdm

    seed = zlib.crc32(repr((shifts, rate, steps, runs)).encode())
    sizes = [min(_AT_ONCE, runs - at) for at in range(0, runs, _AT_ONCE)]

    def part(number: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence((seed, number))))
        normals = rng.standard_normal([steps + len(shifts) - 1, sizes[number]])
        without = _log_ratios(np.array(shifts), rate, steps, normals)
        _add_uses(np.array(shifts), rate, steps, normals, rng)
        return _log_ratios(np.array(shifts), rate, steps, normals), without

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = tqdm(
            pool.map(part, range(len(sizes))), "one epsilon", len(sizes), leave=False, delay=1, unit=" simulations",
            unit_scale=_AT_ONCE, disable=not is_watched(),
        )  # fmt: skip
        present, absent = zip(*parts, strict=True)
    return np.concatenate(present), np.concatenate(absent)


def _add_uses(shifts: np.ndarray, rate: float, steps: int, normals: np.ndarray, rng: np.random.Generator) -> None:
    """Moves the normals of runs by the uses of an example that is in the data."""
    b, runs = len(shifts), normals.shape[1]
    may_join = 1 / (1 + (b - 1) * rate)  # the probability that an example does not rest
    rests = rng.choice(b, size=runs, p=np.append(may_join, np.full(b - 1, rate * may_join)))
    step, every = rests + rng.geometric(rate, size=[runs]) - 1, np.arange(runs)
    while (inside := step < steps).any():
        for later, shift in enumerate(shifts):
            normals[step[inside] + later, every[inside]] += shift
        step = step + b - 1 + rng.geometric(rate, size=[runs])


def _log_ratios(shifts: np.ndarray, rate: float, steps: int, normals: np.ndarray) -> np.ndarray:
    b, runs = len(shifts), normals.shape[1]
    may_join = 1 / (1 + (b - 1) * rate)
    half = shifts @ shifts / 2
    ratios, scales = np.ones([b, runs]), np.zeros(runs)  # R[i + 1] to R[i + b], that of step j in row j % b
    with np.errstate(over="ignore", invalid="ignore"):
        for i in range(steps - 1, -1, -1):
            use = np.exp(shifts @ normals[i : i + b] - half)
            ratios[i % b] = (1 - rate) * ratios[(i + 1) % b] + rate * use * ratios[i % b]
            if i % 32 == 0:  # so that no long training passes the range of floats
                top = ratios.max(0)
                ratios /= top
                scales += np.log(top)
        ratios[1:] *= rate
        return np.log(ratios.sum(0) * may_join) + scales


def _pmf(loss: np.ndarray, interval: float) -> PrivacyLosses:
    """Returns losses on a grid that dominate those of which these are a sample, but for `FAILURE`."""
    from dp_accounting.pld import pld_pmf

    loss = np.sort(np.where(np.isnan(loss), np.inf, loss) + _ROUNDING)[::-1]
    finite = loss[np.isfinite(loss)]
    low, high = np.clip((finite[-1], finite[0]) if len(finite) else (0.0, 0.0), -_LARGEST, _LARGEST)
    number = np.unique(np.round(np.linspace(low, high, _POINTS) / interval).astype(int))
    points = number * interval
    above = np.searchsorted(-loss, -points)  # how many losses are above a point
    weights = np.append(0.0, np.cumsum(np.exp(-loss)))
    means = (above - np.exp(points) * weights[above]) / len(loss)
    bounds = _upper_bounds(np.clip(means, 0, 1), len(loss), FAILURE / len(points) / _TRIES)
    deltas = np.clip(_convex_minorant(np.exp(points), bounds) + FAILURE, 0, 1)
    return pld_pmf.create_pmf_pessimistic_connect_dots(interval, number, np.minimum.accumulate(deltas))


def _upper_bounds(means: np.ndarray, number: int, failure: float) -> np.ndarray:
    """Returns the largest u with number · KL(mean, u) ≤ log(1 / failure), for means of variables in [0, 1]."""
    from scipy.special import xlog1py, xlogy

    low, high = means.copy(), np.ones_like(means)
    most = -np.log(failure) / number
    for _ in range(200):
        middle = (low + high) / 2
        with np.errstate(divide="ignore"):
            apart = (
                xlogy(means, means) - xlogy(means, middle) + xlog1py(1 - means, -means) - xlog1py(1 - means, -middle)
            )
        low, high = np.where(apart <= most, middle, low), np.where(apart <= most, high, middle)
    return high


def _convex_minorant(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns at x the largest convex function that is at most y there, and at most 1 at 0."""
    x, y = np.append(0.0, x), np.append(1.0, y)
    kept = [0]
    for i in range(1, len(x)):
        while len(kept) > 1:
            a, b = kept[-2:]
            if (y[b] - y[a]) * (x[i] - x[a]) < (y[i] - y[a]) * (x[b] - x[a]):
                break
            kept.pop()
        kept.append(i)
    return np.interp(x[1:], x[kept], y[kept])
