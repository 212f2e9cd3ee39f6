"""A weight that is used in several ways has the gradients of all of them."""

import pytest
import tensorflow as tf
from layer_cases import B, check_layers, ids, layers_of, of_weights, vector


def table_and_matrix(i, w):
    return tf.tanh(tf.gather(w, tf.cast(i, tf.int32))) @ tf.transpose(w)


def looked_up(i, w):
    return tf.gather(w, tf.cast(i, tf.int32))


def pick(i, w):
    return tf.tensordot(tf.one_hot(tf.cast(i, tf.int32), 6), w, 1)


CUSTOM = {
    "used as table and as matrix": (ids(B, 5), table_and_matrix, [(6, 3)]),
    "table and matrix in an einsum": (ids(B, 5), lambda i, w: tf.einsum("btd,vd->btv", looked_up(i, w), w), [(6, 3)]),
    "table and matrix, square": (ids(B, 5), lambda i, w: tf.tensordot(tf.tanh(looked_up(i, w)), w, 1), [(6, 6)]),
    "table and matrix, square, turned": (ids(B, 5), lambda i, w: tf.matmul(tf.tanh(looked_up(i, w)), w[None] + 0 * w,
                                                                           transpose_b=True), [(6, 6)]),
    "table and matrix, square, transposed in name only": (
        ids(B, 5), lambda i, w: tf.tensordot(tf.tanh(looked_up(i, w)), tf.transpose(w, [0, 1]), 1), [(6, 6)]),
    "table looked up and picked": (ids(B, 5), lambda i, w: tf.tanh(looked_up(i, w) + pick(i, w)), [(6, 3)]),
    "table of every kind of use": (ids(B, 5), lambda i, w: tf.tanh(looked_up(i, w) + pick(i, w)) @ tf.transpose(w)
                                   + tf.matmul(looked_up(i, w), w, transpose_b=True), [(6, 3)]),
    "used as matrix and as scale": (vector, lambda x, w: (x @ w) * w[0], [(4, 4)]),
    "used as bias twice": (vector, lambda x, w: tf.tanh(x + w) + 2 * w, [(4,)]),
    "unused": (vector, lambda x, a, b: x @ a, [(4, 2), (3,)]),
}  # fmt: skip


@pytest.mark.parametrize("cases", layers_of(of_weights(CUSTOM)))
def test_layers_agree_with_examples_one_by_one(cases):
    check_layers(cases)
