"""Convolutions, their transposes and pooling: clipped sums are those of the examples one by one."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from helpers import K, L, check, check_model, example_losses, normal
from hypothesis import assume, example, given
from hypothesis import strategies as st
from layer_cases import CONVOLUTIONS, check_layers, few, image, layers_of
from mixing_cases import check_told, d, square, total

from tfdpfl.clipping import clipped_gradients


@pytest.mark.parametrize("cases", layers_of(CONVOLUTIONS))
def test_layers_agree_with_examples_one_by_one(cases):
    check_layers(cases)


@pytest.mark.slow
@pytest.mark.one_stack
@pytest.mark.parametrize("layers", [
    lambda: [L.Conv2D(3, 3, dilation_rate=2), L.GlobalAveragePooling2D()],
    lambda: [L.Conv2D(9, 1), L.Conv2D(2, 3, strides=2, padding="same"), L.GlobalAveragePooling2D()],
    lambda: [L.DepthwiseConv2D(2), L.GlobalMaxPooling2D()],
    lambda: [L.Conv2DTranspose(2, 3, strides=2), L.GlobalAveragePooling2D()],
    lambda: [L.Conv2D(6, 2), L.SeparableConv2D(2, 2), L.PReLU("ones", shared_axes=[1, 2]), L.GlobalMaxPooling2D()],
], ids=["dilated", "of many channels", "depthwise", "transposed", "separable"])  # fmt: skip
def test_free_image_sizes_agree(layers):
    check_model(K.Sequential([K.Input((None, None, 3)), *layers(), L.Dense(2)]),
                image, signature_shape=(None, None, None, 3))  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_in_low_precision_an_example_moves_a_convolutions_sum_by_the_clip(policy):
    """A sum that is rounded to the op's type before the noise passes the clip: by 18 % at this size."""
    layer = L.Conv2D(128, 2, use_bias=False, dtype=policy)
    layer.build([None, 2, 2, 128])
    x = np.abs(normal(1, 2, 2, 128)) + 0.3 * normal(257, 2, 2, 128, seed=1)

    @tf.function(input_signature=[tf.TensorSpec([None, 2, 2, 128])])
    def clipped(x):
        y = tf.cast(layer(x), tf.float32)
        return clipped_gradients(tf.reduce_sum(y * tf.cos(tf.range(128.0))), [layer.kernel], 1.0).sum[0]

    whole = clipped(x)
    for i in (0, 100, 256):
        assert abs(np.linalg.norm(whole - clipped(np.delete(x, i, 0))) - 1) < 1e-3


small = st.integers(1, 3)


@functools.cache
def dilated_convolutions_have_gradients():
    """On CPUs for which oneDNN is off TensorFlow has none, for anyone. (Keras's layers dilate another way.)"""
    w = tf.Variable(tf.ones([2, 2, 1, 1]))
    with tf.GradientTape() as tape:
        y = tf.nn.conv2d(tf.ones([1, 4, 4, 1]), w, 1, "VALID", dilations=2)
    try:
        return tape.gradient(y, w) is not None
    except tf.errors.InvalidArgumentError:
        return False


@pytest.mark.slow
@pytest.mark.one_stack
@few
@given(size=st.tuples(small, small), kernel=st.tuples(*[st.integers(1, 5)] * 2), strides=st.tuples(small, small),
       rates=st.tuples(small, small), channels=st.sampled_from([1, 2, 3, 5, 8, 9]), filters=small,
       padding=st.sampled_from(["SAME", "VALID"]), extra=st.tuples(st.integers(0, 4), st.integers(0, 4)))  # fmt: skip
@example(size=(12, 11), kernel=(4, 3), strides=(1, 1), rates=(2, 3), channels=3, filters=1, padding="SAME",
         extra=(0, 1))  # fmt: skip
@example(size=(12, 11), kernel=(3, 4), strides=(1, 1), rates=(3, 2), channels=8, filters=2, padding="SAME",
         extra=(1, 0))  # fmt: skip
@example(size=(3, 2), kernel=(5, 5), strides=(2, 2), rates=(1, 1), channels=3, filters=2, padding="SAME",
         extra=(0, 1))  # fmt: skip
@example(size=(8, 8), kernel=(3, 3), strides=(1, 1), rates=(2, 2), channels=16, filters=32, padding="VALID",
         extra=(0, 0))  # fmt: skip
@example(size=(9, 8), kernel=(5, 4), strides=(2, 2), rates=(1, 1), channels=9, filters=1, padding="VALID",
         extra=(1, 1))  # fmt: skip
@example(size=(2, 2), kernel=(4, 4), strides=(2, 2), rates=(1, 1), channels=9, filters=9, padding="SAME",
         extra=(1, 0))  # fmt: skip
def test_any_convolution_agrees(size, kernel, strides, rates, channels, filters, padding, extra):
    assume(strides == (1, 1) or rates == (1, 1))
    assume(rates == (1, 1) or dilated_convolutions_have_gradients())
    places = [s + (k - 1) * r + e for s, k, r, e in zip(size, kernel, rates, extra, strict=True)]
    x = normal(3, *places, channels)
    w = tf.Variable(normal(*kernel, channels, filters, seed=1))
    losses = lambda x: example_losses(tf.nn.conv2d(x, w, strides, padding, dilations=rates))
    check(losses, x, [w])


@pytest.mark.parametrize("kernel, channels", [((3, 2), 2), ((3, 2), 9), ((1, 1), 9)])
def test_explicit_padding_agrees(kernel, channels):
    w = tf.Variable(normal(*kernel, channels, 2, seed=1))
    pads = [[0, 0], [2, 1], [0, 3], [0, 0]]
    check(lambda x: example_losses(tf.nn.conv2d(x, w, 1, pads)), normal(3, 4, 5, channels), [w])


def test_filters_that_are_made_of_examples_are_refused():
    check_told(lambda x: total(tf.nn.conv1d(d(x)[..., None], d(x)[:, :1, None], 1, "SAME")),
               "Conv2D.*has weights that depend on examples")  # fmt: skip


def test_windows_over_several_examples_are_refused():
    pooled = lambda x: tf.raw_ops.AvgPool(
        value=square(x)[..., None], ksize=[2, 1, 1, 1], strides=[1] * 4, padding="SAME"
    )
    check_told(lambda x: total(pooled(x)), "AvgPool.*pools over the batch")
