"""Weights that are made of variables: the gradient is carried back to each variable."""

import pytest
import tensorflow as tf
from helpers import check, example_losses, normal, rng
from layer_cases import B, check_layers, ids, image, layers_of, of_weights, sequence, vector


def standardised(x, w):
    mean, variance = tf.nn.moments(w, [0, 1, 2], keepdims=True)
    return tf.nn.conv2d(x, (w - mean) * tf.math.rsqrt(variance + 1e-5), 1, "SAME")


def rows_of(i, w):
    return tf.tanh(tf.gather(w, tf.cast(i, tf.int32)))


def looked_up_and_multiplied(x, w):
    ids = tf.cast(tf.abs(x[:, :, 0]) * 3, tf.int32) % 6
    return tf.einsum("btd,dv->btv", tf.tanh(tf.gather(w, ids)), tf.transpose(w))


CUSTOM = {
    "looked up, and multiplied by its transpose": (sequence, looked_up_and_multiplied, [(6, 4)]),
    "turned": (sequence, lambda x, w: tf.einsum("btd,kdj->btkj", x, tf.transpose(w, [1, 2, 0])), [(2, 3, 4)]),
    "negative": (vector, lambda x, w: tf.tanh(x @ -w), [(4, 3)]),
    "columns looked up, and a matrix": (ids(B, 5), lambda i, w: rows_of(i, tf.transpose(w)) @ tf.transpose(w),
                                        [(6, 6)]),
    "columns looked up, and its transpose": (ids(B, 5), lambda i, w: rows_of(i, tf.transpose(w)) @ w, [(6, 6)]),
    "rows of what is negated, and a matrix": (ids(B, 5), lambda i, w: rows_of(i, -w) @ tf.transpose(w), [(6, 6)]),
    "tied to its own transpose": (vector, lambda x, w: tf.tanh(x @ w) @ tf.transpose(w), [(4, 3)]),
    "square and its transpose": (vector, lambda x, w: tf.tanh(x @ w) @ tf.transpose(w), [(4, 4)]),
    "softplus of a matrix": (sequence, lambda x, w: x @ tf.nn.softplus(w), [(4, 3)]),
    "low rank": (vector, lambda x, a, b: x @ (a @ b), [(4, 2), (2, 4)]),
    "weight standardisation": (image, standardised, [(3, 3, 3, 2)]),
    "whole numbers of it": (vector, lambda x, w: x @ w + x @ tf.cast(tf.cast(w, tf.int32), tf.float32), [(4, 3)]),
    "part of a table": (vector, lambda x, w: x @ w[1:5], [(7, 3)]),
    "two parts of a table": (vector, lambda x, w: tf.tanh(x @ w[:4]) @ w[4:7], [(7, 3)]),
}  # fmt: skip


@pytest.mark.parametrize("cases", layers_of(of_weights(CUSTOM)))
def test_layers_agree_with_examples_one_by_one(cases):
    check_layers(cases)


@pytest.mark.slow
@pytest.mark.one_stack
def test_weights_made_of_many_variables_are_carried_back_at_once(monkeypatch):
    """As in a network on a graph of public nodes: one pass to all variables, not one for each use and variable."""
    nodes, width = normal(6, 4), 3
    rooms = [[tf.Variable(normal(4 if i == 0 else 2 * width, width, seed=9 * i + j)) for j in range(2)]
             for i in range(2)]  # fmt: skip
    apart, passes = tf.Variable(normal(2 * width, 2)), []
    carry = tf.vectorized_map
    monkeypatch.setattr(tf, "vectorized_map", lambda *args, **kwargs: (passes.append(1), carry(*args, **kwargs))[1])

    def losses(x):
        h, seen = tf.constant(nodes), 0.0
        read = [[tf.convert_to_tensor(w) for w in heads] for heads in rooms]
        for i, heads in enumerate(read):
            h = tf.concat([tf.tanh(h @ w) for w in heads], 1)
            seen += tf.reduce_mean(tf.gather(h, x) ** (i + 2), 1)
        seen += example_losses(tf.gather(tf.constant(nodes), x) @ read[0][0])  # one variable as it is, too
        return seen + example_losses(tf.gather(h, x) @ (2.0 * apart)) + tf.reduce_mean(tf.gather(h, x), 1)

    check(losses, rng().integers(0, 6, 5).astype("int32"), [*(w for heads in rooms for w in heads), apart])
    assert len(passes) == 2  # the last weight has no variable in common with the others


def test_what_tensorflow_cannot_vectorise_is_carried_back_one_by_one():
    w = tf.Variable(normal(2, 3))
    padded = lambda: tf.pad(w, [[1, 1], [0, 0]], "REFLECT")  # MirrorPadGrad has no vectorised form
    check(lambda x: example_losses(x @ padded()), vector, [w])
