"""Norms, softmax and sums along an example's own axes: clipped sums are those of the examples one by one."""

import pytest
import tensorflow as tf
from helpers import L, check, check_model, example_losses
from layer_cases import ON_BOTH, REDUCTIONS, Custom, layers_of, parameters, sequence, stack, vector


@pytest.mark.parametrize(("x", "layers"), layers_of(REDUCTIONS))
def test_layer_agrees_with_examples_one_by_one(x, layers):
    check_model(stack(*layers()), x)


CUSTOM = {
    "where the target is among the best": (vector, lambda x, w: tf.tanh(x @ w) * tf.cast(tf.math.in_top_k(
        tf.cast(x[:, 0] > 0, tf.int32), x, 2), tf.float32)[:, None], [(4, 3)]),
    "cumulative sum": (sequence, lambda x, w: tf.cumsum(tf.tanh(x @ w), 1), [(4, 3)]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("x", "function", "shapes"), parameters(CUSTOM, one_stack=set(CUSTOM) - ON_BOTH))
def test_custom_layer_agrees_with_examples_one_by_one(x, function, shapes):
    check_model(stack(Custom(function, *shapes), L.Dense(2)), x)


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
