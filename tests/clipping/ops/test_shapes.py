"""Weights that are broadcast, tiled or moved along axes: clipped sums are those of the examples one by one."""

import pytest
import tensorflow as tf
from helpers import K, L, check_model, check_models
from layer_cases import Custom, check_layers, layers_of, of_weights, sequence, stack, tanh
from mixing_cases import check_told, d, n, total

CUSTOM = {
    "time major": (sequence, lambda x, w: tf.transpose(tf.tanh(tf.transpose(x, [1, 0, 2]) @ w), [1, 0, 2]), [(4, 3)]),
    "dynamic flattening": (sequence, lambda x, w: tf.reshape(tf.tanh(tf.reshape(x, [-1, 4]) @ w),
                                                             [tf.shape(x)[0], -1, 3]), [(4, 3)]),
}  # fmt: skip


@pytest.mark.parametrize("cases", layers_of(of_weights(CUSTOM)))
def test_layers_agree_with_examples_one_by_one(cases):
    check_layers(cases)


def positions(make):
    return lambda x, w: x + tf.gather(w, make(tf.shape(x)[0]))


def before(make):
    return lambda x, w: tf.concat([make(w, tf.shape(x)[0]), x], 1)


SPREAD = {  # tokens, queries and positions for each example, in the ways that people write them
    "broadcast": (before(lambda w, n: tf.broadcast_to(w[None], [n, 2, 4])), (2, 4)),
    "tiled": (before(lambda w, n: tf.tile(w[None], [n, 1, 1])), (2, 4)),
    "repeated": (before(lambda w, n: tf.repeat(w[None], n, axis=0)), (2, 4)),
    "tiled by a list that begins with the size": (
        before(lambda w, n: tf.tile(w[None], tf.concat([n[..., tf.newaxis], [1, 1]], 0))),
        (2, 4),
    ),
    "tiled along two axes": (before(lambda w, n: tf.tile(w, [n, 3, 1])), (1, 1, 4)),
    "tiled twice over": (before(lambda w, n: tf.tile(w[None], [n, 2, 1])), (2, 4)),
    "positions tiled": (positions(lambda n: tf.tile(tf.range(5)[None], [n, 1])), (5, 4)),
    "positions broadcast": (positions(lambda n: tf.broadcast_to(tf.range(5), [n, 5])), (5, 4)),
    "positions counted": (positions(lambda n: tf.cumsum(tf.ones([n, 5], tf.int32), 1) - 1), (5, 4)),
    "embedded positions tiled": (lambda x, w: x + tf.tile(w[None], [tf.shape(x)[0], 1, 1]), (5, 4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.one_stack)])
def test_weights_that_every_example_gets_agree(part):
    """In batches that are known to be as long as the sequences."""
    layers = list(SPREAD.values())[part::2]
    check_models(
        [(stack(tanh(4), Custom(f, shape), tanh(3), L.Flatten()), sequence) for f, shape in layers], batch=len(sequence)
    )


@pytest.mark.slow
@pytest.mark.one_stack
def test_queries_that_every_example_gets_agree():
    """As many queries as examples, so that only their place tells the axes apart."""
    attend = L.MultiHeadAttention(2, 3)
    queries = Custom(lambda x, w: tf.tile(w[None], [tf.shape(x)[0], 1, 1]), (len(sequence), 4))
    x = K.Input((5, 4))
    check_model(K.Model(x, L.Flatten()(attend(queries(x), tanh(4)(x)))), sequence, batch=len(sequence))


def test_a_number_for_each_place_in_the_batch_is_refused():
    check_told(
        lambda x: total(d(x) * tf.reshape(tf.range(16.0), [n(x), 4])), "Reshape.*gives public values a batch axis"
    )
