"""Coefficients with the least error: published values, and a search of their neighbours."""

import math

import numpy as np
import pytest
from matrices import lower

from tfdpfl.noise import BLT, Banded, BandedInverse
from tfdpfl.noise.optimal import best_bands, best_buffers, inverse_square_root, square_root


def test_the_square_root_has_the_published_coefficients():
    np.testing.assert_allclose(square_root(4), [1, 0.5, 0.375, 0.3125])
    c = Banded(bands=2, min_separation=2, max_participations=1, coefficients=square_root(2))
    np.testing.assert_allclose(c.variances(2), [1, 1.25])


def test_best_bands_are_a_least():
    c = np.array(best_bands(3, 40))

    def loss(c):
        noise = Banded(bands=3, min_separation=40, max_participations=1, coefficients=tuple(c))
        return noise.error(40)

    for step in (1e-3, 1e-2):
        for direction in ([0, 1, 0], [0, 0, 1], [0, 1, 1], [0, 1, -1]):
            for sign in (1, -1):
                assert loss(c) < loss(c + sign * step * np.array(direction))
    assert loss(c) < loss(square_root(3))


def test_the_inverse_square_root_squared_takes_differences():
    r = inverse_square_root(6)
    np.testing.assert_allclose(r[:4], [1, -1 / 2, -1 / 8, -1 / 16])
    np.testing.assert_allclose(np.convolve(r, r)[:6], [1, -1, 0, 0, 0, 0], atol=1e-12)
    whole = BandedInverse(bands=9, max_participations=1, num_steps=9).matrix(9)
    np.testing.assert_allclose(whole @ whole, np.tri(9), atol=1e-6)  # with all bands C is the square root itself
    np.testing.assert_allclose(whole[:, 0], square_root(9), atol=1e-6)


@pytest.mark.parametrize("kind", ["rms", "max"])
def test_best_coefficients_of_the_inverse_are_the_least_of_a_grid(kind):
    """Two and three bands, by numpy's matrices, for three uses of 5 in 15 steps."""

    def error(*r):
        inverse = lower(np.array([1.0, *r]), 15)
        c = np.linalg.inv(inverse)
        if (np.diff(c[:, 0]) > 1e-9).any():
            return math.inf  # uses as early as can be might not be the worst
        rows = np.linalg.norm(np.tri(15) @ inverse, axis=1)
        return np.linalg.norm(c[:, [0, 5, 10]].sum(1)) * (rows.max() if kind == "max" else np.sqrt((rows**2).mean()))

    how = dict(min_separation=5, max_participations=3, objective=kind, coefficients="best")
    grid = -np.linspace(0, 1, 51)
    least = {2: min(error(a) for a in grid), 3: min(error(a, b) for a in grid for b in grid if a + b >= -1)}
    for bands, found in least.items():
        noise = BandedInverse(bands=bands, **how)
        assert noise.error(15, kind) == pytest.approx(error(*noise.coefficients[1:]), rel=1e-6)
        assert 0.99 * found < noise.error(15, kind) <= found * (1 + 1e-6)
    assert BandedInverse(bands=20, **how).error(15, kind) <= BandedInverse(bands=15, **how).error(15, kind) * (1 + 1e-9)


@pytest.mark.slow
def test_best_buffers_are_jax_privacys():
    """Its golden values: 100,000 steps, one participation, largest error."""
    decay, scale = best_buffers(2, 100_000)
    np.testing.assert_allclose(decay, [0.9999528892, 0.9857068667], rtol=1e-5)
    np.testing.assert_allclose(scale, [0.0122853238, 0.1878393665], rtol=1e-5)


@pytest.mark.parametrize("steps, buffers, factor", [(10, 1, 1.04), (1000, 3, 1.03)])
def test_few_buffers_come_near_the_bound(steps, buffers, factor):
    """Of the best root loss, 1 + ln n / π (Mathias 1993, Corollary 3.5)."""
    noise = BLT(buffers=buffers, num_steps=steps, max_participations=1, objective="max")
    assert noise.error(steps, "max") <= factor * (1 + math.log(steps) / math.pi)
