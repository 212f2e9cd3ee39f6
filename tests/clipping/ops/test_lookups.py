"""Tables of which rows are looked up: clipped sums are those of the examples one by one."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import K, L, check, check_model, example_losses, normal, rng
from layer_cases import LOOKUPS, B, check_layers, ids, layers_of, of_weights, sequence, vector
from mixing_cases import clip_sum

from tfdpfl.clipping import clipped_gradients, per_example_norms

CUSTOM = {
    "matrices by id": (vector, lambda x, w: tf.einsum("bi,bij->bj", x, tf.gather(w, tf.cast(x[:, 0] > 0, tf.int32))),
                       [(2, 4, 3)]),
    "positional embedding": (sequence, lambda x, w: tf.tanh(x + tf.gather(w, tf.range(tf.shape(x)[1]))), [(9, 4)]),
    "one hot": (ids(B, 5), lambda i, w: tf.tanh(tf.one_hot(tf.cast(i, tf.int32), 6) @ w), [(6, 3)]),
}  # fmt: skip


@pytest.mark.parametrize("cases", layers_of(LOOKUPS, of_weights(CUSTOM)))
def test_layers_agree_with_examples_one_by_one(cases):
    check_layers(cases)


def test_free_lengths_of_ids_agree():
    model = K.Sequential([K.Input((None,), dtype="int32"), L.Embedding(6, 3), L.GlobalAveragePooling1D(), L.Dense(2)])
    check_model(model, ids(B, 5), free=True)


@pytest.mark.parametrize("tied", [False, True])
def test_a_norm_of_lookups_that_cancel_is_never_too_small(tied):
    ids = np.repeat([[3, 5]], 16, 0)[:, [0, 1, 0, 1]]
    g = normal(16, 4, 30)
    g[:, 2:] = -g[:, :2] * (1 + 1e-6) if not tied else 0
    table = tf.Variable(normal(50, 30))

    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.int32), tf.TensorSpec([None, 4, 30])])
    def norms(ids, g):
        losses = tf.reduce_sum(tf.gather(table, ids) * g, [1, 2])
        if tied:  # the products' gradient takes the lookups' back
            losses -= tf.reduce_sum(tf.one_hot(ids, 50) * tf.matmul(g * (1 + 1e-6), table, transpose_b=True), [1, 2])
        return per_example_norms(tf.reduce_sum(losses), [table])

    got = norms(ids.astype(np.int32), g).numpy()
    size = np.sqrt((g.astype(np.float64) ** 2).sum((1, 2)))
    assert np.isfinite(got).all()
    assert (got >= 1e-6 * size).all() and (got <= 1e-2 * size).all()


@pytest.mark.slow
@pytest.mark.one_stack
def test_an_example_that_looks_up_a_row_of_nan_adds_exactly_zero():
    table = tf.Variable(np.concatenate([normal(5, 3), np.full([1, 3], np.nan)]).astype("float32"))
    matrix = tf.Variable(normal(3, 2))
    x = rng().integers(0, 5, (B, 4)).astype("int32")
    losses = lambda x: example_losses(tf.tanh(tf.gather(table, x) @ matrix))
    dirty = np.concatenate([x, [[0, 1, 5, 2]]]).astype("int32")
    clean, got = clip_sum(losses, [table, matrix], [x, dirty], 0.3)
    assert got[2] == 1
    np.testing.assert_allclose(got[0], clean[0], atol=1e-6)


@pytest.mark.parametrize("compiled", [True, False])
def test_ids_beyond_a_table_are_no_other_examples(compiled):
    """XLA does not stop at them."""
    table = tf.Variable(normal(6, 2))
    ids = rng(0).integers(0, 6, (B, 3))

    @tf.function(jit_compile=compiled, input_signature=[tf.TensorSpec([None, 3], tf.int64)])
    def norms(ids):
        looked_up = tf.gather(table * 2.0, ids)  # scaled: each example's gradient of the table is formed
        return clipped_gradients(tf.reduce_mean(example_losses(looked_up)), [table], 1.0).norms

    want = norms(ids).numpy()
    if compiled:
        ids[0] = 7, 8, 9
        np.testing.assert_allclose(norms(ids).numpy()[1:], want[1:], rtol=1e-6)


@pytest.mark.parametrize("batch", [None, B])
def test_rows_of_a_table_for_all_places_are_exact(batch):
    """Keras's own example of positions: `Embedding(length, width)(tf.range(length))`."""
    embedding = L.Embedding(4, 2)
    embedding.build(None)
    f = lambda x: example_losses(x[:, :, None] + embedding(tf.range(4)))
    check(f, vector, [embedding.embeddings], batch=batch)
