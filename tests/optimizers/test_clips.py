"""Clips that adapt, clips for each layer, automatic ones, and units of several rows: sums, noise, price, bounds."""

import conftest as c
import numpy as np
import pytest
import tensorflow as tf

import tfdpfl
from tfdpfl import PrivacyError, callbacks
from tfdpfl.clips import AdaptiveClip, AutomaticClip, PerLayerClip

keras = tf.keras
X, Y = c.examples(12)


def model_of(clip, z=0.0, seed=0, **kwargs):
    model = keras.Sequential([
        keras.Input((c.WIDTH,)), keras.layers.Dense(c.HIDDEN, activation="tanh", name="lower"),
        keras.layers.Dense(c.CLASSES, name="upper"),
    ])  # fmt: skip
    model.set_weights(c.weights(seed))
    model.compile(tfdpfl.DPSGD(clip, z, **{"learning_rate": 1.0, **kwargs}), loss=c.cross_entropy())
    return model


def update(model, x=X, y=Y):
    return c.update_of(model, lambda: model.train_on_batch(x, y))


def linear(norms, clip, z, units=None, **kwargs):
    """A model whose examples' gradients have these norms, whatever its weights, and its data."""
    x = np.random.default_rng(1).normal(size=(len(norms), 4))
    x *= np.asarray(norms)[:, None] / np.linalg.norm(x, axis=1, keepdims=True)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(tfdpfl.DPSGD(clip, z, learning_rate=0.0, **kwargs), loss=lambda y, out: tf.reduce_mean(out))
    return model, x.astype("float32"), np.zeros((len(norms), 1), "float32")


def test_automatic_clips_scale_every_example_to_just_below_the_clip():
    gradients = c.per_example_gradients(c.weights(), X, Y)
    factors = 0.5 / (c.norms_of(gradients) + 0.01)
    model = model_of(AutomaticClip(0.5))
    np.testing.assert_allclose(
        c.flat(update(model)), -c.flat([np.tensordot(factors, g, 1) for g in gradients]) / 12, atol=1e-5)  # fmt: skip
    assert model.optimizer.current_clip == 0.5


@pytest.mark.parametrize(
    "clips, each", [(0.6, [0.6 / 2**0.5] * 2), ([0.2, 0.5], [0.2, 0.5]), ({"upper": 0.5, "lower": 0.2}, [0.2, 0.5])]
)
def test_each_layer_is_clipped_by_itself(clips, each):
    gradients = c.per_example_gradients(c.weights(), X, Y)
    want = []
    for clip, of_layer in zip(each, (gradients[:2], gradients[2:]), strict=True):
        factors = np.minimum(1, clip / c.norms_of(of_layer))
        assert np.any(factors < 1)
        want += [-np.tensordot(factors, g, 1) / 12 for g in of_layer]
    model = model_of(PerLayerClip(clips))
    np.testing.assert_allclose(c.flat(update(model)), c.flat(want), atol=1e-5)
    assert sorted(model.optimizer.current_clip) == pytest.approx(sorted(each))


@pytest.mark.parametrize("clip", [AutomaticClip(0.3), PerLayerClip([0.5, 0.2]), AdaptiveClip(initial=0.3)], ids=str)
@pytest.mark.slow
def test_one_example_moves_the_sum_by_no_more_than_the_bound_that_noise_is_measured_by(clip):
    bound = {AutomaticClip: 0.3, PerLayerClip: np.hypot(0.5, 0.2), AdaptiveClip: 0.3}[type(clip)]
    x = X.copy()
    x[3] *= 1e4
    sums = [c.flat(update(model_of(clip, expected_batch_size=1), x[rows], Y[rows]))
            for rows in (np.arange(12), np.delete(np.arange(12), 3))]  # fmt: skip
    least = 0.2 if isinstance(clip, PerLayerClip) else 0.29  # the lower layer's units are saturated
    assert least < np.linalg.norm(sums[0] - sums[1]) <= bound * (1 + 1e-4)


@pytest.mark.slow
def test_an_automatic_clip_holds_under_mixed_float16():
    """Where gradients are longer and shorter than its type holds well, too: the norm is of the unscaled loss."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        for scale in (1e3, 1e-4):
            sums = [c.flat(update(model_of(AutomaticClip(0.3), expected_batch_size=1), scale * X[rows], Y[rows]))
                    for rows in (np.arange(12), np.arange(11))]  # fmt: skip
            assert 0.27 < np.linalg.norm(sums[0] - sums[1]) <= 0.3 * (1 + 1e-3)
    finally:
        keras.mixed_precision.set_global_policy("float32")


def noise_of(clip, z, expected=8, width=100_000, **kwargs):
    """All of one step's noise, over what the denominator leaves; the loss depends on no weight's value."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(width, use_bias=False, name="only")])
    model.compile(tfdpfl.DPSGD(clip, z, learning_rate=1.0, expected_batch_size=expected, **kwargs), loss="mse")
    x, y = np.zeros((2, 1), "float32"), np.zeros((2, width), "float32")
    return model, lambda: c.flat(c.update_of(model, lambda: model.train_on_batch(x, y))) * expected


@pytest.mark.slow
def test_noise_is_of_the_whole_bound_in_every_coordinate():
    by_name = PerLayerClip({"only": 0.4, "other": 0.3})
    for clip, bound in ((PerLayerClip(0.5), 0.5), (by_name, 0.5), (AutomaticClip(2.0), 2.0)):
        noise = noise_of(clip, 1.5)[1]()
        assert 0.98 < noise.std() / (1.5 * bound) < 1.02, clip


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.slow
def test_an_adaptive_clip_pays_for_its_count(k):
    """1/z² = 1/z_sum² + 1/(2σ_b)², as priced; the noise is measured by the clip that there was."""
    z, stddev, eta = 1.5, 1.0, 0.2
    clip = AdaptiveClip(initial=2.0, clipped_count_stddev=stddev, learning_rate=eta)
    model, draw = noise_of(clip, z, width=20_000, gradient_accumulation_steps=k)
    clips, counts = [model.optimizer.current_clip], []
    for _ in range(400):
        for _ in range(k):
            noise = draw()
        raised = (z**-2 - (2 * stddev) ** -2) ** -0.5
        assert 0.96 < noise.std() / (raised * clips[-1]) < 1.04  # eight standard errors
        clips.append(model.optimizer.current_clip)
        within = 0.5 - np.log(clips[-1] / clips[-2]) / eta
        counts.append((within - 0.5) * 8)  # examples without a gradient are as if they were not there
    assert model.optimizer.executed == [(z / k, 400)]  # each part may hold the same example
    # 400 normals of standard deviation 1: tails below 1e-7, also those of 2/3 and 3/2 into these bounds
    assert 0.8165 < np.std(counts) / stddev < 1.2247 and abs(np.mean(counts)) < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("initial, k", [(0.1, 1), (100.0, 2)])
@pytest.mark.one_stack
def test_a_hundred_steps_find_the_median_from_anywhere(initial, k):
    norms = np.exp(np.random.default_rng(0).normal(size=256) * 0.5)
    norms /= np.median(norms)
    clip = AdaptiveClip(initial=initial, clipped_count_stddev=5.0)
    model, x, y = linear(norms, clip, 1.0, gradient_accumulation_steps=k, expected_batch_size=256)
    model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(256 // k).repeat(100), verbose=0)
    assert model.optimizer.num_dp_steps == 100
    assert 0.9 < model.optimizer.current_clip < 1.1


@pytest.mark.one_stack
@pytest.mark.slow
def test_blanks_that_fill_a_batch_do_not_move_the_adaptive_clip():
    """They stand in the place of one example or more: each within the clip would move its count by more than 1/2."""
    clips = []
    for norms in ([], [0.0, 0.0], [5.0], [5.0, 0.0, 0.0], [0.5]):
        clip = AdaptiveClip(initial=1.0, clipped_count_stddev=0.0)
        model, x, y = linear([*norms, 0.0], clip, 0.0, expected_batch_size=4)
        model.train_on_batch(x, y)
        clips.append(np.log(model.optimizer.current_clip) / 0.2)
    np.testing.assert_allclose(clips, [0, 0, 0.125, 0.125, -0.125], atol=1e-5)


def test_the_clip_is_saved_and_goes_on(tmp_path):
    model = model_of(AdaptiveClip(initial=5.0))
    for _ in range(3):
        model.train_on_batch(X, Y)
    now = model.optimizer.current_clip
    assert now == pytest.approx(5.0 * np.exp(-0.2 * 0.5) ** 3, rel=1e-5)
    model.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras")
    assert again.optimizer.current_clip == now and again.optimizer.l2_norm_clip == AdaptiveClip(initial=5.0)


@pytest.mark.slow
def test_a_clip_that_falls_to_nothing_stops_with_the_reason_and_changes_nothing():
    model, x, y = linear(np.full(8, 1e-9), AdaptiveClip(initial=1e-7, learning_rate=2.0, clipped_count_stddev=0.0), 0.0)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"the adaptive clip fell to 1e-08.*nearly all gradients"):
        model.fit(x, y, batch_size=8, epochs=20, verbose=0)
    steps = model.optimizer.num_dp_steps
    with pytest.raises(tf.errors.InvalidArgumentError, match="l2_norm_clip"):
        model.fit(x, y, batch_size=8, verbose=0)
    assert model.optimizer.num_dp_steps == steps


@pytest.mark.parametrize(
    "clip, message", [([1.0], "2 layers are trained"), ({"upper": 1.0}, "no name fits the weight")]
)
def test_clips_that_do_not_fit_the_layers_are_refused(clip, message):
    with pytest.raises(ValueError, match=message):
        update(model_of(PerLayerClip(clip)))


# -- units of several rows ---------------------------------------------------------------------------------------


def test_the_mean_gradient_of_a_unit_is_clipped_once_and_divided_by_the_number_of_units():
    model = model_of(0.4, rows_per_unit=3)
    want = c.clipped_sum(c.weights(), X, Y, 0.4, num_microbatches=4)
    np.testing.assert_allclose(c.flat(update(model)), -c.flat(want) / 4, atol=1e-5)
    assert model.optimizer.unit == "3 consecutive rows" and model_of(1.0).optimizer.unit == "example"
    assert model.optimizer.executed == [(0.0, 1)]


@pytest.mark.one_stack
@pytest.mark.slow
def test_all_rows_of_a_unit_move_the_sum_by_the_clip_and_the_price_is_that_of_a_unit():
    x = X.copy()
    x[3:6] *= 1e4
    sums = [c.flat(update(model_of(0.4, rows_per_unit=3, expected_batch_size=1), x[rows], Y[rows]))
            for rows in (np.arange(12), np.delete(np.arange(12), [3, 4, 5]))]  # fmt: skip
    assert 0.9 * 0.4 < np.linalg.norm(sums[0] - sums[1]) <= 0.4 * (1 + 1e-4)
    model = model_of(0.4, 2.0, rows_per_unit=3)
    watched = callbacks.PrivacyBudget(delta=1e-3, accountant="rdp")
    model.fit(X, Y, batch_size=6, shuffle=False, callbacks=[watched], verbose=0)
    assert model.optimizer.executed == [(2.0, 2)]  # not half of it, as with microbatches
    (row,) = watched.ledger.to_dict()["rows"]
    assert (row["run"]["num_examples"], row["run"]["batch_size"], row["run"]["num_steps"]) == (4, 2, 2)


def test_batches_that_are_not_of_whole_units_are_refused():
    model = model_of(0.4, rows_per_unit=3)
    with pytest.raises((PrivacyError, tf.errors.InvalidArgumentError), match="rows_per_unit=3 does not divide"):
        model.train_on_batch(X[:10], Y[:10])
    assert model.optimizer.num_dp_steps == 0
    for given in ({"shuffle": True}, {"shuffle": False, "batch_size": 4}):
        with pytest.raises(PrivacyError, match="would split units"):
            model.fit(X, Y, callbacks=[callbacks.PrivacyBudget(delta=1e-3)], verbose=0, **{"batch_size": 6, **given})
    np.testing.assert_array_equal(c.flat(model.get_weights()), c.flat(c.weights()))
