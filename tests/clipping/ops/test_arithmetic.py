"""Weights in sums, products and quotients: clipped sums are those of the examples one by one."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import clipped_sums, normal, per_example_gradients
from layer_cases import check_layers, layers_of, of_weights, sequence, vector
from mixing_cases import check_refused_or_apart, d, n, nf, norms

from tfdpfl.clipping import clipped_gradients
from tfdpfl.clipping.registry import look_up
from tfdpfl.clipping.states import UNKNOWN

CUSTOM = {
    "added": (vector, lambda x, w: tf.sin(x + w) + tf.sin(tf.add_n([x, w * tf.ones_like(x)])), [(4,)]),
    "subtracted": (vector, lambda x, w: (w - x) / (1 + w**2), [(4,)]),
    "subtracted from": (vector, lambda x, w: tf.sin(x - w), [(4,)]),
    "multiplied": (sequence, lambda x, w: tf.sin(x * w), [(5, 1)]),
    "divided by": (vector, lambda x, w: x / (2 + tf.tanh(w)), [(4,)]),
    "maximum": (sequence, lambda x, w: tf.maximum(x, w), [(5, 1)]),
}  # fmt: skip


@pytest.mark.parametrize("cases", layers_of(of_weights(CUSTOM)))
def test_layers_agree_with_examples_one_by_one(cases):
    check_layers(cases)


@pytest.mark.parametrize(
    "shape",
    [lambda x: [2 * n(x) - n(x), 4], lambda x: [n(x) * 4 // 4, 4], lambda x: [-1 * -n(x), 4],
     lambda x: [tf.maximum(n(x), n(x)), 4], lambda x: [tf.cast(nf(x), tf.int32), 4]],
    ids=["difference", "quotient", "negative", "maximum", "cast"],
)  # fmt: skip
def test_a_length_is_known_through_arithmetic(shape):
    norms(lambda x: tf.reshape(d(x), shape(x))).get_concrete_function()


@pytest.mark.parametrize(
    "half", [lambda x: n(x) // 2, lambda x: tf.cast(nf(x) / 2, tf.int32), lambda x: (n(x) + 1) // 2]
)
def test_a_quotient_that_is_rounded_is_no_length_of_a_batch(half):
    check_refused_or_apart(lambda x: tf.reduce_sum(tf.reshape(d(x), [half(x), -1]) ** 3, -1) ** 2)


ENDS = {
    "difference": (lambda v, u, r: tf.reduce_mean(v) - tf.reduce_mean(u), lambda v, u: v - u, 0.0),
    "less a regularizer": (lambda v, u, r: 3.0 * (tf.reduce_mean(v) - r), lambda v, u: 3.0 * v, -3.0),
    "a regularizer, less": (lambda v, u, r: (r - tf.reduce_mean(v)) / 2.0, lambda v, u: -v / 2.0, 0.5),
    "a regularizer in each": (lambda v, u, r: tf.reduce_mean(v + r), lambda v, u: v, 1.0),
    "negative": (lambda v, u, r: -(tf.reduce_mean(v) + r), lambda v, u: -v, -1.0),
}  # fmt: skip


@pytest.mark.parametrize(("loss", "own", "scale"), ENDS.values(), ids=ENDS)
def test_the_end_of_a_loss_is_taken_apart(loss, own, scale):
    """Each example's own loss is clipped, and a regularizer has its gradient beside that."""
    w, x = tf.Variable(normal(4, 3)), tf.constant(normal(5, 4, seed=1))
    of_each = lambda x: (tf.reduce_sum(tf.tanh(x @ w), 1), tf.reduce_sum(tf.sin(x @ w) ** 2, 1))

    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def step(x):
        r = clipped_gradients(loss(*of_each(x), tf.reduce_sum(w**2)), [w], 0.5)
        return r.sum[0], tf.zeros_like(w) if r.regularization[0] is None else r.regularization[0]

    want = clipped_sums(per_example_gradients(lambda x: own(*of_each(x)), x, [w]), 0.5)
    total, apart = step(x)
    np.testing.assert_allclose(total, want[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(apart, scale * 2 * w.numpy(), rtol=1e-6)


INT, FLOAT = tf.int32, tf.float32


@pytest.mark.parametrize(("make", "of", "entries", "expected"), [
    (tf.add, INT, [(2, 1), (1, 1)], (3, 1)), (tf.subtract, INT, [(2, 1), (1, 1)], (1, 1)),
    (tf.add, INT, [(1, 1), (1, 0)], None), (tf.multiply, INT, [(2, 1), (3, 1)], (6, 2)),
    (tf.math.floordiv, INT, [(4, 1), (2, 0)], (2, 1)), (tf.math.floordiv, INT, [(1, 1), (2, 0)], UNKNOWN),
    (tf.truediv, FLOAT, [(1, 1), (2, 0)], (None, 1)), (tf.maximum, INT, [(1, 1), (1, 1)], (1, 1)),
    (tf.maximum, INT, [(1, 1), (2, 0)], None), (tf.negative, INT, [(2, 1)], (-2, 1)),
    (lambda x: tf.cast(x, FLOAT), INT, [(1, 1)], (1, 1)), (lambda x: tf.cast(x, INT), FLOAT, [(1, 1)], (1, 1)),
    (lambda x: tf.cast(x, INT), FLOAT, [(None, 1)], UNKNOWN), (lambda x: tf.cast(x, tf.int8), INT, [(1, 1)], UNKNOWN),
])  # fmt: skip
def test_sizes_are_computed_as_the_op_computes_them(make, of, entries, expected):
    """(coefficient, power of the batch size) each; None leaves it to what holds for any op."""
    with tf.Graph().as_default():
        op = make(*[tf.compat.v1.placeholder(of, []) for _ in entries]).op
    assert look_up(op).size(op, *entries) == expected
