"""Noise on a grid: the sampler against the discrete Gaussian's probabilities, the sum's sensitivity, the price."""

import conftest as c
import numpy as np
import pytest
import tensorflow as tf
from scipy.stats import chisquare

import tfdpfl
from tfdpfl.accounting import compute_epsilon
from tfdpfl.callbacks import PrivacyBudget
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


@pytest.mark.slow
def test_the_update_lies_on_the_grid_and_has_the_noise(monkeypatch):
    model = tf.keras.Sequential([tf.keras.Input((100,)), tf.keras.layers.Dense(200)])
    model.compile(tfdpfl.DPSGD(0.5, 2.0, secure_noise=True, learning_rate=1.0, expected_batch_size=1), loss="mse")
    model.set_weights([np.zeros(w.shape) for w in model.get_weights()])
    model.train_on_batch(np.zeros((2, 100)), np.zeros((2, 200)))
    step, sigma = discrete.grid(0.5, 2.0, 100 * 200 + 200)
    kernel = -model.get_weights()[0].astype(np.float64) / step
    np.testing.assert_array_equal(kernel, np.round(kernel))  # 2^21 steps at most: float32 has them all
    assert kernel.std() == pytest.approx(sigma, rel=0.03)
    assert sigma * step == pytest.approx(1.0, rel=2e-3)
    # With the noise off the update is the rounded clipped sum.
    monkeypatch.setattr("tfdpfl.noise.source.discrete_gaussian", lambda words, size, sigma: np.zeros(size, np.int64))
    ours, plain = (c.compiled(tfdpfl.DPSGD(0.5, m, secure_noise=True, learning_rate=1.0)) for m in (1.0, 0.0))
    x, y = c.examples(8)
    for model in (ours, plain):
        model.train_on_batch(x, y)
    for a, b in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.one_stack
@pytest.mark.slow
def test_it_is_priced_by_renyi_dp_of_whole_orders():
    x, y = c.examples(48)
    data = tfdpfl.data.poisson_batches((x, y), 0.25, 4)
    ledgers = []
    for secure in (True, False):
        model = c.compiled(tfdpfl.DPAdam(1.0, 1.1, secure_noise=secure, expected_batch_size=12))
        budget = PrivacyBudget(delta=1e-5)
        model.fit(data, epochs=2, verbose=0, callbacks=[budget])
        ledgers.append(budget)
    ours, plain = (budget.ledger.epsilon(1e-5) for budget in ledgers)
    rdp = compute_epsilon(
        num_examples=48, batch_size=12, noise_multiplier=1.1, num_steps=8, delta=1e-5, accountant="rdp")  # fmt: skip
    assert plain < rdp <= ours <= 1.02 * rdp
    assert ledgers[0].report().accountant == "rdp" and "floating point" not in str(ledgers[0].report())
    assert tfdpfl.PrivacyLedger.from_dict(ledgers[0].ledger.to_dict()).epsilon(1e-5) == ours
    assert model.optimizer.secure_noise is False
    with pytest.raises(tfdpfl.PrivacyError, match="fixed_size"):
        tfdpfl.PrivacyLedger().record(
            1.0, num_examples=48, batch_size=12, sampling="fixed_size", secure_noise=True)  # fmt: skip


def test_what_cannot_draw_on_the_host_or_is_correlated_is_refused():
    with pytest.raises(ValueError, match="noise=Tree together with secure_noise=True"):
        tfdpfl.DPFTRL(1.0, 1.0, secure_noise=True)
    with pytest.raises(ValueError, match="secure_noise=1"):
        tfdpfl.DPSGD(1.0, 1.0, secure_noise=1)
    model = c.compiled(tfdpfl.DPSGD(1.0, 1.0, secure_noise=True), jit_compile=True)
    x, y = c.examples(8)
    with pytest.raises(tfdpfl.PrivacyError, match="jit_compile=False"):
        model.train_on_batch(x, y)
