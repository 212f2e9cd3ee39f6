"""Draws have the probabilities of a discrete Gaussian, and the grid holds the norm of what is rounded to it."""

import numpy as np
import pytest
from scipy.stats import chisquare

from tfdpfl.noise import discrete

rng = np.random.default_rng(1)


def words(out):
    out[...] = rng.integers(0, np.iinfo(out.dtype).max, size=out.shape, dtype=out.dtype, endpoint=True)
    return out


def fit_of(values, sigma, assumed):
    """The p-value of draws under the discrete Gaussian of another deviation."""
    k = np.arange(-40 * sigma, 40 * sigma + 1)
    p = np.exp(-(k**2) / (2 * assumed**2))
    p /= p.sum()
    expected = p * len(values)
    kept = expected > 20
    seen = np.bincount(values + 40 * sigma, minlength=len(k))
    seen, expected = (np.append(a[kept], a[~kept].sum()) for a in (seen, expected))
    return chisquare(seen, expected).pvalue


@pytest.mark.parametrize("sigma", [1, 3, 50])
def test_draws_have_the_discrete_gaussians_probabilities(sigma):
    values = discrete.discrete_gaussian(words, 300_000, sigma)
    assert fit_of(values, sigma, sigma) > 1e-6
    assert fit_of(values, sigma, sigma * 3 / 2) < 1e-6 and fit_of(values, sigma, sigma * 2 / 3) < 1e-6


@pytest.mark.one_stack
@pytest.mark.slow
def test_coins_that_floating_point_cannot_decide_are_thrown_exactly(monkeypatch):
    monkeypatch.setattr(discrete, "_UNSURE", 2.0)  # none
    values = discrete.discrete_gaussian(words, 10_000, 2)
    assert fit_of(values, 2, 2) > 1e-6 > fit_of(values, 2, 3)
    assert all(abs(1 - float(ratio)) < 2.0**-46 for ratio in discrete._corrections())
    beyond = [discrete._beyond(words) for _ in range(2000)]
    share = np.exp(-12.5) / np.exp(-0.5 * np.arange(5, 24) ** 2).sum()
    assert min(beyond) == 5 and abs(np.mean(np.array(beyond) == 5) - share) < 0.01


def test_the_grid_holds_the_roundings_norm():
    for size in (1, 10_000, 10**8):
        step, sigma = discrete.grid(0.7, 1.3, size)
        assert np.log2(step) % 1 == 0 and np.sqrt(size) * step <= 0.7 / 1024
        assert 1.3 * (0.7 + np.sqrt(size) * step) <= sigma * step <= 1.3 * 0.7 * 1.002 + step
    assert discrete.grid(1.0, 1e7, 10)[1] <= 1 << 31  # a coarser grid, and more noise
    with pytest.raises(ValueError, match="noise_multiplier"):
        discrete.grid(1.0, 1e9, 10)
    rounded = rng.normal(size=(200, 1000))
    step, _ = discrete.grid(1.0, 1.0, 1000)
    example = rng.normal(size=1000)
    example /= np.linalg.norm(example)
    moved = np.round((rounded + example) / step) - np.round(rounded / step)
    assert np.linalg.norm(moved, axis=1).max() <= 1 / step + np.sqrt(1000)
    with pytest.raises(ValueError, match="sigma=0"):
        discrete.discrete_gaussian(words, 1, 0)
