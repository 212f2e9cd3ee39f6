"""Noise on a grid in a step: the sum's sensitivity, the noise that is drawn, the price."""

import conftest as c
import numpy as np
import pytest
import tensorflow as tf

import tfdpfl
from tfdpfl.accounting import compute_epsilon
from tfdpfl.callbacks import PrivacyBudget
from tfdpfl.noise import discrete
from tfdpfl.noise.source import Source
from tfdpfl.optimizers import _step_table
from tfdpfl.optimizers._clips import clipping_of
from tfdpfl.optimizers._fresh_noise import NoiselessMean
from tfdpfl.optimizers._grid_noise import GridNoise
from tfdpfl.optimizers._settings import Settings


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


_decay = tf.keras.optimizers.schedules.PiecewiseConstantDecay


def test_a_count_and_a_clip_that_changes_are_on_one_grid_with_the_weights():
    """The noise of each is as large as stated, and one example moves all of them by no more than is priced."""
    z, clip, denominator, size = 1.5, 0.7, 8.0, 20_000
    adaptive = tfdpfl.AdaptiveClip(initial=clip, clipped_count_stddev=1.0)
    noise = GridNoise(Settings(adaptive, _decay([3], [z, 1.9])), True)
    noise.source = Source(seed=3)
    of_sums, of_count = clipping_of(adaptive).split(z, denominator)
    example = np.random.default_rng(0).normal(size=size)
    example *= clip / np.linalg.norm(example)

    def released(weights, count, scale):
        stddev = tf.constant(of_sums * clip / denominator)
        mean = NoiselessMean(
            [tf.constant(weights, tf.float32), tf.constant(count, tf.float32)], [stddev, tf.constant(of_count)], stddev,
            tf.constant(denominator), tf.constant(clip), tf.constant(z, tf.float64), tf.zeros([6]), [0], None,
        )  # fmt: skip
        drawn = [scale * n for n in noise.draw(mean, _step_table.Counter())]
        of_weights, of_count_ = noise.add(mean, drawn)
        return of_weights.numpy().astype(float) * denominator, of_count_.numpy().astype(float)

    weights, counts = released(np.zeros(size), np.zeros(size), 1)
    assert weights.std() / (of_sums * clip) == pytest.approx(1, rel=0.03)
    assert counts.std() / of_count == pytest.approx(1, rel=0.03)
    rest = np.random.default_rng(1).normal(size=size).astype("float32")
    (w1, c1), (w0, c0) = (released(rest + sign * example, [2.0 + sign * 0.5], 0) for sign in (1, 0))
    moved = np.hypot(np.linalg.norm(w1 - w0) / (of_sums * clip), (c1 - c0)[0] / of_count)
    assert 0.99 / z < moved <= 1.002 / z  # the grid's deviation is larger by what the roundings may add


@pytest.mark.slow
def test_discrete_noise_goes_with_parts_of_a_batch_a_clip_that_adapts_and_a_schedule():
    x, y = c.examples(48)
    data = tfdpfl.data.poisson_batches((x, y), 0.25, 4, physical_batch_size=6)
    clip = tfdpfl.AdaptiveClip(initial=0.5, clipped_count_stddev=3.0)
    parts = tfdpfl.data.declared_sampling(data).physical_batches
    model = c.compiled(tfdpfl.DPSGD(clip, _decay([3], [1.1, 2.0]), secure_noise=True, expected_batch_size=12,
                                    gradient_accumulation_steps=parts))  # fmt: skip
    budget = PrivacyBudget(delta=1e-5)
    model.fit(data, epochs=2, verbose=0, callbacks=[budget])
    assert model.optimizer.current_clip != 0.5
    assert sorted(model.optimizer.executed) == [(1.1, 4), (2.0, 4)]
    ledger = tfdpfl.PrivacyLedger()
    for sigma in (1.1, 2.0):
        ledger.record(sigma, num_examples=48, batch_size=12, num_steps=4, secure_noise=True)
    assert budget.ledger.epsilon(1e-5) == pytest.approx(ledger.epsilon(1e-5))


@pytest.mark.slow
@pytest.mark.parametrize("clip", [0.3, tfdpfl.PerLayerClip([0.5, 0.2]), tfdpfl.AutomaticClip(0.3)], ids=str)
def test_parts_of_a_batch_are_added_up_before_they_are_rounded(monkeypatch, clip):
    monkeypatch.setattr("tfdpfl.noise.source.discrete_gaussian", lambda words, size, sigma: np.zeros(size, np.int64))
    x, y = c.examples(8)
    updates = []
    for secure, z in ((True, 1.0), (False, 0.0)):
        model = c.compiled(tfdpfl.DPSGD(clip, z, secure_noise=secure, gradient_accumulation_steps=2, learning_rate=1.0))
        updates.append(c.flat(c.update_of(model, lambda m=model: [m.train_on_batch(x[i::2], y[i::2]) for i in (0, 1)])))
    np.testing.assert_allclose(*updates, atol=1e-4)
    assert np.abs(updates[0]).max() > 1e-2


def test_what_cannot_draw_on_the_host_is_refused():
    model = c.compiled(tfdpfl.DPSGD(1.0, 1.0, secure_noise=True), jit_compile=True)
    x, y = c.examples(8)
    with pytest.raises(tfdpfl.PrivacyError, match="jit_compile=False"):
        model.train_on_batch(x, y)
