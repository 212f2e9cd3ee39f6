"""Weights in ops that work entry by entry: clipped sums are those of the examples one by one."""

import pytest
import tensorflow as tf
from layer_cases import ACTIVATIONS, check_layers, layers_of, of_weights, sequence, vector

CUSTOM = {
    "squared": (vector, lambda x, w: w**2 * x, [(4,)]),
    "power of the input": (vector, lambda x, w: tf.abs(x) ** w, [(4,)]),
    "scalar": (vector, lambda x, w: tf.sin(w * x), [()]),
    "where": (vector, lambda x, w: tf.where(x > 0, x, w), [(4,)]),
    "scale of each place, time first": (sequence, lambda x, w: tf.transpose(
        tf.tanh(tf.transpose(x, [1, 0, 2]) * w), [1, 0, 2]), [(5, 1, 4)]),
    "stopped gradient": (vector, lambda x, w: tf.stop_gradient(x @ w) * (x @ w), [(4, 3)]),
    "chosen by weights": (vector, lambda x, w: tf.where(w > 0.1, x * w, x), [(4,)]),
}  # fmt: skip


@pytest.mark.parametrize("cases", layers_of(ACTIVATIONS, of_weights(CUSTOM)))
def test_layers_agree_with_examples_one_by_one(cases):
    check_layers(cases)
