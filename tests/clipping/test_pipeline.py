"""One example moves the clipped sum by no more than the clip, whatever it holds."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from helpers import K, L, example_losses, normal
from mixing_cases import B, W, clip_sum, d, padded_attention, total

import tfdpfl
from tfdpfl.clipping import clipped_gradients, pipeline
from tfdpfl.errors import PrivacyError

ARCHITECTURES = {
    "dense": (lambda: [L.Dense(5), L.Dense(2)], (4,)),
    "convolutions": (lambda: [L.Conv2D(3, 3, strides=2), L.DepthwiseConv2D(2), L.Flatten(), L.Dense(2)], (7, 7, 2)),
    "sequences": (lambda: [L.Conv1D(4, 2), L.LayerNormalization(), L.GRU(3)], (4, 3)),
    "attention": (lambda: [L.Lambda(padded_attention), L.Dense(2)], (3, 4)),
    "lstm": (lambda: [L.LSTM(3), L.Dense(2)], (3, 4)),
}


@pytest.mark.parametrize(("layers", "shape"), [
    pytest.param(*c, id=name, marks=[pytest.mark.slow] * (name != "dense") + [pytest.mark.one_stack] * (
        name == "sequences")) for name, c in ARCHITECTURES.items()
])  # fmt: skip
@pytest.mark.slow
def test_one_example_more_moves_the_sum_by_at_most_the_clip(layers, shape):
    model = K.Sequential([K.Input(shape), *layers()])
    losses = lambda x: example_losses(model(x))
    x, clip = normal(B, *shape), 0.3
    outlier = 1e4 * normal(1, *shape, seed=9)
    batches = [x, np.concatenate([x, outlier]), np.concatenate([x[1:], outlier])]
    without, with_it, replaced = (s for s, *_ in clip_sum(losses, model.trainable_variables, batches, clip))
    assert np.linalg.norm(with_it - without) <= clip * (1 + 1e-4)
    assert np.linalg.norm(replaced - without) <= 2 * clip * (1 + 1e-4)
    batches = [x, np.concatenate([outlier, x[1:]])]
    groups, changed = (s for s, *_ in clip_sum(losses, model.trainable_variables, batches, clip, m=2))
    assert np.linalg.norm(changed - groups) <= 2 * clip * (1 + 1e-4)


BAD = {
    "dense": ([4], lambda: [L.Dense(5), L.Dense(2)]),
    "dense of rank 3, ghost norm": ([2, 30], lambda: [L.Dense(40)]),
    "dense of rank 3, formed": ([9, 2], lambda: [L.Dense(2)]),
    "convolution, formed": ([6, 6, 1], lambda: [L.Conv2D(2, 3)]),
    "convolution, ghost norm": ([3, 3, 12], lambda: [L.Conv2D(40, 2)]),
    "convolution, rows": ([11, 11, 2], lambda: [L.Conv2D(2, 5, strides=2)]),
    "convolution, views": ([9, 9, 8], lambda: [L.Conv2D(2, 4, strides=2)]),
    "depthwise": ([4, 4, 2], lambda: [L.DepthwiseConv2D(2)]),
    "transposed": ([3, 3, 2], lambda: [L.Conv2DTranspose(2, 2)]),
    "lstm": ([3, 4], lambda: [L.LSTM(3)]),
    "layernorm": ([4], lambda: [L.LayerNormalization(), L.Dense(2)]),
}

SLOW_BAD = {"lstm", "transposed", "layernorm", "convolution, rows"}


@pytest.mark.parametrize(("shape", "layers", "value"), [
    *[pytest.param(*c, (np.inf, np.nan)[i % 2], id=name, marks=[pytest.mark.slow] * (name in SLOW_BAD))
      for i, (name, c) in enumerate(BAD.items())],
    pytest.param(*BAD["dense"], np.nan, id="dense-nan"),
])  # fmt: skip
def test_an_example_that_is_not_finite_adds_exactly_zero_and_is_counted(shape, layers, value):
    model = K.Sequential([K.Input(shape), *layers()])
    losses = lambda x: example_losses(model(x))
    x = normal(B, *shape)
    dirty = np.concatenate([x, x[:1]])
    dirty[B].reshape(-1)[:] = value
    clean, got = clip_sum(losses, model.trainable_variables, [x, dirty], 0.3)
    assert got[2] == 1 and not np.isfinite(got[1][B])
    np.testing.assert_allclose(got[1][:B], clean[1], rtol=1e-5)
    np.testing.assert_allclose(got[0], clean[0], atol=1e-5 * np.abs(clean[0]).max())


def test_microbatches_that_do_not_divide_the_batch_are_refused_and_nothing_moves():
    with pytest.raises(PrivacyError, match="num_microbatches=3"):

        @tf.function(input_signature=[tf.TensorSpec([B, 4])])
        def static(x):
            return clipped_gradients(tf.reduce_sum(total(d(x))), [W], 1.0, 3).norms

        static.get_concrete_function()
    model = K.Sequential([K.Input((4,)), L.Dense(2)])
    model.compile(tfdpfl.DPSGD(l2_norm_clip=1.0, noise_multiplier=0.0, num_microbatches=3, learning_rate=1.0), "mse")
    before = model.get_weights()
    with pytest.raises((tf.errors.InvalidArgumentError, PrivacyError), match="num_microbatches=3"):
        model.train_on_batch(normal(B, 4), normal(B, 2))
    for w, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(w, b)


def test_an_inner_product_of_two_uses_may_err_as_much_as_both(monkeypatch):
    """|a + b|² = 1 + 2 - 3 cancels, so the norm is the error: a quarter of the square, and as much of the product."""

    def part(square, error_bound):
        made = SimpleNamespace(squared_norms=lambda: tf.constant([square]), error_bound=error_bound)
        return SimpleNamespace(variable=0, made=made)

    plan = SimpleNamespace(
        parts=[part(1.0, tf.constant([0.25])), part(2.0, None)], _merged=lambda parts: parts, dtype=tf.float32,
        _pulled_back=lambda apart: apart, units=SimpleNamespace(count=1),
    )  # fmt: skip
    monkeypatch.setattr(pipeline, "inner_product", lambda *_: tf.constant([-1.5]))
    assert pipeline.ClippingPipeline.squared_norms_of(plan, [0])[0].numpy() == [0.5]
