"""Finds the coefficients with which correlated noise disturbs running sums least. No TensorFlow here."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdpfl.accounting.participation import moved_by_toeplitz

__all__ = ["best_bands", "best_buffers", "best_inverse_bands", "inverse_square_root", "square_root"]


def square_root(num_steps: int) -> np.ndarray:
    """Returns the column of the lower triangular Toeplitz C for which C² makes running sums: 1, 1/2, 3/8, 5/16, …

    Of all matrices it has nearly the least product of sensitivity (one participation) and largest error (Fichtenberger,
    Henzinger & Upadhyay 2022, arXiv:2202.11205).

    Args:
      num_steps: its length.
    """
    i = np.arange(1, num_steps)
    return np.concatenate([[1.0], np.cumprod((2 * i - 1) / (2 * i))])[:num_steps]


def inverse_square_root(bands: int) -> np.ndarray:
    """Returns the first coefficients of the inverse of `square_root`, of sqrt(1 - x): 1, -1/2, -1/8, -1/16, …

    Args:
      bands: how many.
    """
    i = np.arange(1, bands)
    return np.concatenate([[1.0], np.cumprod((2 * i - 3) / (2 * i))])


def _minimized(loss: Callable, start: np.ndarray, **how: Any) -> Any:
    """`scipy.optimize.minimize` in one thread. On matrices as small as its own, the threads of a BLAS wait for each
    other most of the time."""
    from scipy.optimize import minimize
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1, user_api="blas"):
        return minimize(loss, start, jac=True, **how)


def _weights(num_steps: int, error: str) -> np.ndarray:
    """Returns what the square of each base normal's part in the running sums counts for in their error."""
    return np.arange(num_steps, 0, -1) / num_steps if error == "rms" else np.ones(num_steps)


def _moved_with_slope(column: np.ndarray, num_steps: int, separation: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns how far one example moves each noise, and half the slope of the square of that by the column."""
    moved = moved_by_toeplitz(column, num_steps, separation, most)
    slope = moved.copy()
    for k in range(1, most):
        slope[: num_steps - k * separation] += moved[k * separation :]
    return moved, slope


@functools.lru_cache(maxsize=64)
def best_bands(bands: int, num_steps: int, error: str = "rms") -> tuple[float, ...]:
    """Finds the coefficients with the least product of the column's norm and the running sums' error, by L-BFGS from
    the square root's. They begin with 1.

    Args:
      bands: diagonals of the matrix.
      num_steps: its rows.
      error: "rms" or "max" over the running sums.
    """
    from scipy.signal import lfilter

    bands_ = min(bands, num_steps)
    first = np.eye(1, num_steps)[0]
    weights = _weights(num_steps, error)

    def loss(rest: np.ndarray) -> tuple[float, np.ndarray]:
        c = np.concatenate([[1.0], rest])
        with np.errstate(all="ignore"):
            inverse = lfilter([1.0], c, first)
            sums = np.cumsum(inverse)
            error = weights @ sums**2
            moved = lfilter([1.0], c, sums)  # sums moved by a coefficient j lower: minus this, j later
            slope = [-2 * (weights[j:] * sums[j:]) @ moved[: num_steps - j] for j in range(1, len(c))]
            norm = c @ c
            value = norm * error
        if not np.isfinite(value):
            return 1e300, np.zeros(len(rest))
        return math.log(value), 2 * rest / norm + np.array(slope) / error

    start = square_root(bands_)[1:]
    if not len(start):
        return (1.0,) + (0.0,) * (bands - bands_)
    found = _minimized(loss, start, method="L-BFGS-B", options={"maxiter": 1000, "ftol": 1e-13, "gtol": 1e-9})
    best = found.x if found.fun <= loss(start)[0] else start
    return (1.0, *best.tolist()) + (0.0,) * (bands - bands_)


@functools.lru_cache(maxsize=64)
def best_inverse_bands(
    bands: int, num_steps: int, separation: int = 1, most: int = 1, error: str = "rms"
) -> tuple[float, ...]:
    """Finds the bands of C⁻¹ with the least product of sensitivity and error of the running sums, by SLSQP from those
    of the square root. They begin with 1.

    If an example may be used again, the first entries of C's column do not grow. Then none of it does, because a later
    difference of two entries is a sum of earlier ones, times what is at least 0. So the sensitivity is exact.

    Args:
      bands: diagonals of C⁻¹.
      num_steps: rows of the matrix.
      separation: fewest steps from one use of an example to its next.
      most: most uses of an example.
      error: "rms" or "max" over the running sums.
    """
    from scipy.linalg import toeplitz
    from scipy.signal import lfilter

    bands_ = min(bands, num_steps)
    first = np.eye(1, num_steps)[0]
    weights = _weights(num_steps, error)

    def column_and_slopes(rest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The column of C, and minus its slope by the j-th coefficient, before it is moved down by j."""
        column = lfilter([1.0], [1.0, *rest], first)
        return column, lfilter([1.0], [1.0, *rest], column)

    def loss(rest: np.ndarray) -> tuple[float, np.ndarray]:
        sums = np.cumsum(np.concatenate([[1.0], rest, np.zeros(num_steps - bands_)]))
        with np.errstate(all="ignore"):
            column, slopes = column_and_slopes(rest)
            moved, to_column = _moved_with_slope(column, num_steps, separation, most)
            squared, variance = moved @ moved, weights @ sums**2
            value = squared * variance
            by_moved = [-(to_column[j:] @ slopes[: num_steps - j]) for j in range(1, bands_)]
            by_sums = np.cumsum((weights * sums)[::-1])[::-1][1:bands_]
            slope = 2 * (np.array(by_moved) / squared + by_sums / variance)
        if not np.isfinite(value):
            return 1e300, np.zeros(len(rest))
        return math.log(value), slope

    def falls(rest: np.ndarray) -> np.ndarray:
        return -np.diff(column_and_slopes(rest)[0][:bands_])

    def slopes_of_falls(rest: np.ndarray) -> np.ndarray:
        slopes = column_and_slopes(rest)[1][:bands_]
        return np.diff(np.tril(toeplitz(slopes)), axis=0)[:, 1:]  # its column j is by coefficient j

    start = inverse_square_root(bands_)[1:]
    best = start
    if len(start):
        rules = [{"type": "ineq", "fun": falls, "jac": slopes_of_falls}] if num_steps > separation else []
        how = {"bounds": [(-1, 0)] * len(start), "options": {"maxiter": 200, "ftol": 1e-12}}
        x = _minimized(loss, start, method="SLSQP", constraints=rules, **how).x.clip(-1, 0)
        x /= max(1.0, -x.sum())
        best = x if loss(x)[0] <= loss(start)[0] else start
    return (1.0, *best.tolist()) + (0.0,) * (bands - bands_)


@functools.lru_cache(maxsize=64)
def best_buffers(
    buffers: int, num_steps: int, separation: int = 1, most: int = 1, error: str = "max"
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Finds decays and scales with the least product of sensitivity and error of the running sums.

    By L-BFGS over the decays of C and of C⁻¹, which lie between each other where all scales are above 0 (McMahan et al.
    2024, arXiv:2408.08868, section 4). A column of such a C never grows, as `moved_by_toeplitz` needs it.

    Args:
      buffers: how many of each.
      num_steps: rows of the matrix.
      separation: fewest steps from one use of an example to its next.
      most: most uses of an example.
      error: "rms" or "max" over the running sums.
    """
    i = np.arange(num_steps - 1)[:, None].astype(float)
    before = (np.arange(num_steps - 1) - 1).clip(0)
    weights = _weights(num_steps, error)

    def parts(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Decays and scales of C, and of C⁻¹; x may be complex."""
        places = x[0] - np.concatenate([[0.0], np.cumsum(np.exp(x[1:]))])
        both = 1 / (1 + np.exp(-places))
        decay, inverse_decay = both[::2], both[1::2]

        def scales(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            apart = a[:, None] - a[None, :] + np.eye(len(a))
            return np.prod(a[:, None] - b[None, :], 1) / np.prod(apart, 1)

        return decay, scales(decay, inverse_decay), inverse_decay, scales(inverse_decay, decay)

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        with np.errstate(all="ignore"):
            now = parts(x)
            decay, scale, inverse_decay, inverse_scale = now
            if min(np.diff(np.sort(np.concatenate([decay, inverse_decay])))) < 1e-12 or max(decay) >= 1:
                return 1e300, np.zeros(len(x))
            powers = decay**i
            column = np.concatenate([[1.0], powers @ scale])
            moved, to_column = _moved_with_slope(column, num_steps, separation, most)
            inverse_powers = inverse_decay**i
            geometric = np.cumsum(inverse_powers, 0)
            sums = np.concatenate([[1.0], 1 + geometric @ inverse_scale])
            squared, variance = moved @ moved, weights @ sums**2
            # Slopes by the four kinds of numbers, then by x: a complex step is exact there.
            by_column, by_sums = 2 * to_column[1:] / squared, 2 * (weights * sums)[1:] / variance
            slopes_of_powers = i * powers[before]
            slopes_of_sums = np.cumsum(i * inverse_powers[before], 0)
            slopes = (
                scale * (by_column @ slopes_of_powers), by_column @ powers,
                inverse_scale * (by_sums @ slopes_of_sums), by_sums @ geometric,
            )  # fmt: skip
            steps = np.array([np.concatenate(parts(x + 1e-30j * e)).imag / 1e-30 for e in np.eye(len(x))])
            return math.log(squared * variance), steps @ np.concatenate(slopes)

    longest = math.log(max(num_steps, 2))
    best = None
    # Decays from 1 - 1/n down, evenly in the logarithm; the second start is for few steps.
    for reach in (longest + 1, longest / 2 + 0.5):
        gaps = np.full(2 * buffers - 1, math.log(max(reach, 0.5) / (2 * buffers - 1) + 0.1))
        start = np.concatenate([[reach], gaps])
        options = {"maxiter": 1000, "ftol": 1e-14, "gtol": 1e-9}
        found = _minimized(loss, start, method="L-BFGS-B", options=options)
        if best is None or found.fun < best.fun:
            best = found
    assert best is not None
    with np.errstate(all="ignore"):
        decay, scale, _, _ = parts(best.x)
    return tuple(decay.tolist()), tuple(scale.tolist())
