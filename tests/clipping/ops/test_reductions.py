"""Norms, softmax and sums along an example's own axes: clipped sums are those of the examples one by one."""

import pytest
import tensorflow as tf
from helpers import L, check, example_losses
from layer_cases import REDUCTIONS, check_layers, layers_of, of_weights, sequence, vector

CUSTOM = {
    "where the target is among the best": (vector, lambda x, w: tf.tanh(x @ w) * tf.cast(tf.math.in_top_k(
        tf.cast(x[:, 0] > 0, tf.int32), x, 2), tf.float32)[:, None], [(4, 3)]),
    "cumulative sum": (sequence, lambda x, w: tf.cumsum(tf.tanh(x @ w), 1), [(4, 3)]),
}  # fmt: skip


@pytest.mark.parametrize("cases", layers_of(REDUCTIONS, of_weights(CUSTOM)))
def test_layers_agree_with_examples_one_by_one(cases):
    check_layers(cases)


@pytest.mark.parametrize("softmax", [
    lambda s: tf.nn.softmax(s, axis=1),
    *[pytest.param(f, marks=[pytest.mark.slow, pytest.mark.one_stack]) for f in (
        lambda s: tf.nn.softmax(s, axis=-2), lambda s: tf.nn.log_softmax(s, axis=1), lambda s: L.Softmax(axis=1)(s))],
], ids=["softmax 1", "softmax -2", "log 1", "layer"])  # fmt: skip
def test_softmax_along_any_axis_agrees(softmax):
    """As of attention pooling."""
    score = L.Dense(3)
    score.build([None, None, 4])
    pooled = lambda x: tf.einsum("bts,btd->bsd", softmax(score(x)), x)
    check(lambda x: example_losses(pooled(x)), sequence, score.trainable_variables)
