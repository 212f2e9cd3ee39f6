"""Noise multipliers and clips that change at given updates: what is drawn, what is clipped to, what is priced."""

import json
import pickle

import conftest as c
import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
from dp_accounting.rdp import RdpAccountant

import tfdpfl
from tfdpfl.callbacks import PrivacyBudget

keras = tf.keras
decay = keras.optimizers.schedules.PiecewiseConstantDecay
N, DELTA, WIDTH = 24, 1e-3, 100_000
X, Y = c.examples(N)
SIGMAS, CLIPS = decay([1], [2.0, 0.5]), decay([0, 2], [1.0, 0.25, 3.0])
EACH = [(2.0, 1.0), (2.0, 0.25), (0.5, 0.25), (0.5, 3.0)]  # of updates 0 to 3, as Keras's rates would be


@pytest.mark.slow
@pytest.mark.both_stacks
@pytest.mark.parametrize("k", [1, 2])
def test_each_update_has_the_noise_and_the_price_of_its_own_piece_also_after_a_load(k, tmp_path):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(WIDTH, use_bias=False)])
    given = {"gradient_accumulation_steps": k, "expected_batch_size": 1, "learning_rate": 1.0}
    model.compile(tfdpfl.DPSGD(CLIPS, SIGMAS, **given), loss="mse")
    x, y = np.zeros((2, 1), "float32"), np.zeros((2, WIDTH), "float32")
    for update, (sigma, clip) in enumerate(EACH):
        if update == 2:
            path = str(tmp_path / ("m.keras" if c.keras3() else "m.h5"))
            model.save(path)
            model = keras.models.load_model(path)
        assert model.optimizer.current_clip == clip
        for _ in range(k):
            moved = c.flat(c.update_of(model, lambda m=model: m.train_on_batch(x, y)))
        assert 0.98 < moved.std() / (sigma * clip) < 1.02
    # Parts that nobody announced may hold the same example.
    assert sorted(model.optimizer.executed) == [(0.5 / k, 2), (2.0 / k, 2)]


def test_each_update_is_clipped_to_its_own_piece():
    model = c.compiled(tfdpfl.DPSGD(CLIPS, 0.0, learning_rate=0.3))
    values = c.weights()
    for _, clip in EACH:
        model.train_on_batch(X, Y)
        values = [v - 0.3 * g / N for v, g in zip(values, c.clipped_sum(values, X, Y, clip), strict=True)]
    np.testing.assert_allclose(c.flat(model.get_weights()), c.flat(values), atol=1e-5)


def test_settings_come_back():
    made = tfdpfl.DPAdam(CLIPS, SIGMAS)
    config = json.loads(json.dumps(made.get_config(), default=float))  # Keras 2 has float32 in it
    for again in (tfdpfl.DPAdam.from_config(config), pickle.loads(pickle.dumps(made))):
        assert again.l2_norm_clip == made.l2_norm_clip and again.noise_multiplier == made.noise_multiplier
    assert made.noise_multiplier.values == (2.0, 0.5) and made.l2_norm_clip.boundaries == (0, 2)


def priced(*pieces):
    """RDP by dp-accounting alone, of (σ, sampling rate, steps)."""
    accountant = RdpAccountant()
    for sigma, rate, steps in pieces:
        step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
        accountant.compose(dp_accounting.SelfComposedDpEvent(step, steps))
    return accountant.get_epsilon(DELTA)


def batches(size, steps):
    return tfdpfl.data.poisson_batches((X, Y), expected_batch_size=size, steps=steps)


def budget(**kwargs):
    return PrivacyBudget(delta=DELTA, accountant="rdp", **kwargs)


@pytest.mark.slow
@pytest.mark.both_stacks
def test_poisson_batches_are_priced_by_the_pieces_that_ran_and_a_target_foresees_them():
    sigmas = decay([2], [2.0, 1.0])  # three updates of 2, then of 1
    target = priced((2.0, 0.25, 3), (1.0, 0.25, 4)) * (1 + 1e-6)
    watched = budget(target_epsilon=target)
    model = c.compiled(tfdpfl.DPSGD(1.0, sigmas, expected_batch_size=6))
    model.fit(batches(6, 5), epochs=2, verbose=0, callbacks=[watched])
    assert sorted(model.optimizer.executed) == [(1.0, 4), (2.0, 3)]
    assert watched.report().epsilon == pytest.approx(target, rel=1e-5) and watched.report().epsilon <= target
    assert 1.001 * target < priced((2.0, 0.25, 3), (1.0, 0.25, 5))
    one_more = priced((2.0, 0.25, 4), (1.0, 0.25, 4)) * (1 + 1e-6)
    little = budget(target_epsilon=one_more)  # but the next is of the second piece
    with pytest.raises(tfdpfl.PrivacyError, match="leaves no room"):
        model.fit(batches(6, 1), verbose=0, callbacks=[little])


def test_what_is_foreseen_is_each_updates_own_value():
    pieces = tfdpfl.DPSGD(1.0, decay([0, 3], [4.0, 2.0, 1.0])).noise_multiplier
    for first in range(6):
        for number in range(7):
            foreseen = [value for value, times in pieces.spent(first, number) for _ in range(times)]
            assert foreseen == [4.0, 2.0, 2.0, 2.0, *[1.0] * 9][first : first + number]


@pytest.mark.slow
@pytest.mark.both_stacks
def test_batches_that_grow_are_fits_of_their_own_and_priced_as_such():
    watched = budget()
    model = c.compiled(tfdpfl.DPSGD(1.0, 2.0, expected_batch_size=6))
    for size, steps in ((4, 3), (8, 2)):
        model.fit(batches(size, steps), verbose=0, callbacks=[watched])
    assert watched.report().epsilon == pytest.approx(priced((2.0, 4 / N, 3), (2.0, 8 / N, 2)))


def test_passes_of_shuffled_data_are_priced_at_the_least_noise_and_have_no_target():
    model, watched = c.compiled(tfdpfl.DPSGD(1.0, decay([2], [4.0, 2.0]))), budget()
    model.fit(X, Y, batch_size=12, epochs=2, verbose=0, callbacks=[watched])
    assert watched.report().epsilon == pytest.approx(priced((2.0, 1.0, 2)))
    with pytest.raises(tfdpfl.PrivacyError, match="the step with the least noise"):
        model.fit(X, Y, batch_size=12, verbose=0, callbacks=[budget(target_epsilon=99.0)])
    assert model.optimizer.num_dp_steps == 4


@pytest.mark.slow
def test_a_plan_takes_a_clip_that_changes():
    made = tfdpfl.plan(X, Y, target_epsilon=5.0, delta=DELTA, batch_size=6, num_epochs=1, l2_norm_clip=CLIPS,
                       accountant="rdp")  # fmt: skip
    model = c.compiled(made.optimizer("sgd"))
    model.fit(made.batches, epochs=made.epochs, callbacks=[made.callback], verbose=0)
    assert model.optimizer.num_dp_steps == 4 and model.optimizer.current_clip == 3.0


@pytest.mark.parametrize(
    ("clip", "sigma", "more", "message"),
    [
        (1.0, keras.optimizers.schedules.CosineDecay(2.0, 10), {}, "noise_multiplier=CosineDecay.*PiecewiseConstant"),
        (lambda step: 1.0, 1.0, {}, "l2_norm_clip=function.*PiecewiseConstant"),
        (1.0, decay([3], [1.0, 0.0]), {}, "each above 0"),
        (1.0, decay([3], [float("inf"), 1.0]), {}, "each above 0"),
        (decay([5, 3], [1.0, 2.0, 1.0]), 1.0, {}, "boundaries=.*rising"),
        (1.0, decay(list(range(32)), [1.0] * 33), {}, "32 at most"),
        (tfdpfl.AdaptiveClip(clipped_count_stddev=0.9), SIGMAS, {}, "clipped_count_stddev=0.9 is at most half of"),
    ],
)
def test_what_has_no_form_is_refused_by_name(clip, sigma, more, message):
    with pytest.raises(ValueError, match=message):
        tfdpfl.DPSGD(clip, sigma, **more)
