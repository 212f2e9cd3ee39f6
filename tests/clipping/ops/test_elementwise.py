"""Weights in ops that work entry by entry: clipped sums are those of the examples one by one."""

import pytest
import tensorflow as tf
from helpers import L, check_model
from layer_cases import ACTIVATIONS, ON_BOTH, Custom, layers_of, parameters, sequence, stack, vector


@pytest.mark.parametrize(("x", "layers"), layers_of(ACTIVATIONS))
def test_layer_agrees_with_examples_one_by_one(x, layers):
    check_model(stack(*layers()), x)


CUSTOM = {
    "squared": (vector, lambda x, w: w**2 * x, [(4,)]),
    "power of the input": (vector, lambda x, w: tf.abs(x) ** w, [(4,)]),
    "scalar": (vector, lambda x, w: tf.sin(w * x), [()]),
    "where": (vector, lambda x, w: tf.where(x > 0, x, w), [(4,)]),
    "maximum": (sequence, lambda x, w: tf.maximum(x, w), [(5, 1)]),
    "subtracted": (vector, lambda x, w: (w - x) / (1 + w**2), [(4,)]),
    "divided by": (vector, lambda x, w: x / (2 + tf.tanh(w)), [(4,)]),
    "stopped gradient": (vector, lambda x, w: tf.stop_gradient(x @ w) * (x @ w), [(4, 3)]),
    "chosen by weights": (vector, lambda x, w: tf.where(w > 0.1, x * w, x), [(4,)]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("x", "function", "shapes"), parameters(CUSTOM, one_stack=set(CUSTOM) - ON_BOTH))
def test_custom_layer_agrees_with_examples_one_by_one(x, function, shapes):
    check_model(stack(Custom(function, *shapes), L.Dense(2)), x)
