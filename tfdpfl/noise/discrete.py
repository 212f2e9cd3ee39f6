"""Noise on a grid: discrete Gaussians, drawn exactly (Canonne, Kamath & Steinke 2020, arXiv:2004.00010).

Normals in floating point have holes, and a sum with them tells more than ε says (Mironov 2012). Here the clipped sum is
rounded to whole numbers of steps of a grid, whole noise is added, and nothing else. The result takes every value of the
grid, with the probabilities that the theorem is about.

The draw is Karney's (2016, "Sampling exactly from the normal distribution", Algorithm D): the number of whole standard
deviations, a place within the next one, and a coin that says whether they are kept. Coins are thrown in floating point
where that decides them for sure. They are thrown with more digits where it does not, so that no probability is rounded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np

__all__ = ["discrete_gaussian", "grid"]

# Rounding moves a sum of d coordinates by up to sqrt(d) steps; the step is so small that this is at most so much of C.
_ROUNDING = 2.0**-10
_LARGEST = 1 << 31  # of the standard deviation, in steps
_DIGITS = 60
# What floating point may get wrong of a coin's bias (under 50 roundings of 2^-53), and corrections that it leaves out.
_UNSURE = 2.0**-45
_BLOCK = 1 << 16
_USUAL = 5  # numbers of whole standard deviations that words of 64 bits tell apart well enough
Words = Callable[[np.ndarray], np.ndarray]


def grid(l2_norm_clip: float, noise_multiplier: float, size: int) -> tuple[float, int]:
    """Returns the grid's step, and the noise's standard deviation in steps, for a clipped sum.

    One example moves the rounded sum by at most C + sqrt(size) steps: two roundings are each off by half a step in a
    coordinate. The standard deviation is at least ``noise_multiplier`` times that. The step is a power of 2, so that to
    divide by it rounds nothing.

    Args:
      l2_norm_clip: C.
      noise_multiplier: the least standard deviation over the sensitivity.
      size: coordinates of the sum.
    """
    root = math.sqrt(size)
    exponent = math.floor(math.log2(_ROUNDING * l2_norm_clip / root))

    def deviations(exponent: int) -> int:
        return math.ceil(noise_multiplier * (l2_norm_clip * 2.0**-exponent + root) * (1 + 2.0**-50))

    if noise_multiplier * root > _LARGEST / 2:
        raise ValueError(
            f"noise_multiplier={noise_multiplier!r} on {size} weights is more than a grid of 2^31 steps holds: use "
            "less."
        )
    while deviations(exponent) > _LARGEST:
        exponent += 1
    return 2.0**exponent, max(deviations(exponent), 1)


def discrete_gaussian(words: Words, size: int, sigma: int) -> np.ndarray:
    """Draws int64 [size]: integers k with probability proportional to exp(-k² / (2 sigma²)), exactly.

    Args:
      words: fills an array of unsigned integers with fresh uniform bits, and returns it.
      size: how many.
      sigma: a whole number from 1 to 2^31.
    """
    if not 1 <= sigma <= _LARGEST:
        raise ValueError(f"sigma={sigma!r} must be a whole number from 1 to 2^31: take a coarser grid.")
    out = np.empty(size, np.int64)
    done = 0
    while done < size:
        block = min(int((size - done) * 1.45) + 64, _BLOCK)  # of which 0.715 are kept
        found = _candidates(words, block, sigma)[: size - done]
        out[done : done + len(found)] = found
        done += len(found)
    return out


def _candidates(words: Words, count: int, sigma: int) -> np.ndarray:
    cells = _cells()
    whole = words(np.empty(count, np.uint64))
    k = np.zeros(count, np.int64)
    for cell in cells:
        k += whole >= cell
    place = words(np.empty(count, np.uint32))
    j = (place % np.uint32(sigma)).astype(np.int64)
    coin = words(np.empty(count, np.uint64))
    u = (coin >> np.uint64(11)).astype(np.float64) * 2.0**-53
    x = j * (1 / sigma)
    bias = np.exp(-0.5 * x * (2 * k + x))
    kept = u < bias
    unsure = np.flatnonzero((np.abs(u - bias) < _UNSURE) | (k == _USUAL))
    negative = (coin & np.uint64(1)).astype(bool)
    for i in unsure:
        if k[i] == _USUAL:
            k[i] = _beyond(words)
        start = Fraction(int(coin[i]) >> 11, 1 << 53)
        kept[i] = _below(words, start, 53, int(k[i]), int(j[i]), sigma)
    kept &= place < (1 << 32) // sigma * sigma  # no place is likelier than another
    value = k * sigma + j
    kept &= ~(negative & (value == 0))  # 0 has one sign
    return np.where(negative, -value, value)[kept]


@functools.cache
def _cells() -> np.ndarray:
    """Returns where, among words of 64 bits, the next number of whole standard deviations begins. A word is of k with a
    chance near exp(-k²/2) over the sum of these. What it lacks of that, the coin has. From the last on it is drawn
    apart."""
    with localcontext() as context:
        context.prec = _DIGITS
        weights, total = _weights(0), sum(_weights(0))
        return np.array([int(sum(weights[: k + 1]) / total * (1 << 64)) for k in range(_USUAL)], np.uint64)


def _weights(least: int) -> list[Decimal]:
    return [(-Decimal(k * k) / 2).exp() for k in range(least, 24)]


@functools.cache
def _corrections() -> list[Decimal]:
    """Returns what the coin's bias is to be multiplied by for each k, 1 to within 2^-46."""
    edges = [0, *(int(c) for c in _cells()), 1 << 64]
    with localcontext() as context:
        context.prec = _DIGITS
        weights = [*_weights(0)[:_USUAL], sum(_weights(_USUAL))]
        ratios = [w / Decimal(b - a) for w, a, b in zip(weights, edges[:-1], edges[1:], strict=True)]
        return [ratio / max(ratios) for ratio in ratios]


def _below(words: Words, start: Fraction, bits: int, k: int, j: int, sigma: int) -> bool:
    """Returns whether a uniform number whose first bits are known is below the coin's bias: more are drawn till it is
    plain."""
    corrections = _corrections()
    with localcontext() as context:
        context.prec = 2 * _DIGITS
        exponent = -Decimal(j) * (2 * k * sigma + j) / (2 * Decimal(sigma) ** 2)
        bias = exponent.exp() * corrections[min(k, _USUAL)]
        unsure = Decimal(10) ** (3 - _DIGITS)
        while True:
            low = Decimal(start.numerator) / Decimal(start.denominator)
            if low + Decimal(2) ** -bits <= bias - unsure:
                return True
            if low >= bias + unsure:
                return False
            if bits > 180:  # nearer than any float has digits, once in 2^120 times: neither side is the likelier
                return bool(words(np.empty(1, np.uint64))[0] & np.uint64(1))
            start += Fraction(int(words(np.empty(1, np.uint64))[0]), 1 << (bits + 64))
            bits += 64


def _beyond(words: Words) -> int:
    """Draws k from ``_USUAL`` up, by the weights exp(-k²/2): two of a million draws need it."""
    with localcontext() as context:
        context.prec = _DIGITS
        weights = _weights(_USUAL)
        drawn = sum(int(w) << (64 * i) for i, w in enumerate(words(np.empty(2, np.uint64))))
        left = Decimal(drawn) / (1 << 128) * sum(weights)
        for k, weight in enumerate(weights, start=_USUAL):
            if left < weight:
                return k
            left -= weight
    return 23  # less than once in 2^128
