"""Batches of a size that is known beforehand, one among them, get what batches of any size get."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    K,
    L,
    assert_close,
    check,
    check_models,
    clipped_sums,
    engine,
    example_losses,
    normal,
    per_example_gradients,
    rng,
)

import tfdpfl

S, D, B = 5, 4, 3  # sequence length, width, and a batch that is neither
tanh = lambda n: L.Dense(n, activation="tanh")


class Causal(L.Layer):
    def __init__(self):
        super().__init__()
        self.attention = L.MultiHeadAttention(2, 3)

    def call(self, x):
        return x + self.attention(x, x, use_causal_mask=True)


class Picked(L.Layer):
    def call(self, x):
        return tf.gather(x, [2, 0, 0, 1], axis=1)


MODELS = {
    "dense": ((D,), lambda: [tanh(3), tanh(2)]),
    "conv": ((6, 6, 2), lambda: [L.Conv2D(3, 2, activation="tanh"), L.MaxPooling2D(2), L.Flatten(), tanh(2)]),
    "lstm": ((S, D), lambda: [L.LSTM(3, return_sequences=True), L.GlobalAveragePooling1D(), tanh(2)]),
    "bidirectional": ((S, D), lambda: [L.Bidirectional(L.LSTM(3)), tanh(2)]),
    "attention": ((S, D), lambda: [tanh(4), Causal(), L.Flatten(), tanh(2)]),
    "gather": ((S, D), lambda: [tanh(3), Picked(), L.Flatten(), tanh(2)]),
    "time distributed": ((S, D), lambda: [L.TimeDistributed(tanh(3)), L.Flatten(), tanh(2)]),
    "embedding": (S, lambda: [L.Embedding(7, D), L.GlobalAveragePooling1D(), tanh(2)]),
}


def model_and_batch(name, n):
    shape, layers = MODELS[name]
    x = rng(1).integers(0, 7, (n, shape)).astype("int32") if shape == S else normal(n, *shape, seed=1)
    K.utils.set_random_seed(1)
    model = K.Sequential(layers())
    model(x)
    return model, x


# Batches of any size, and of a size that is no other axis's, of the rest: layer_cases.py.
@pytest.mark.slow
@pytest.mark.parametrize("names, batch", [
    (["dense", "conv", "attention", "embedding"], 1), (["gather", "time distributed", "lstm"], 1),
    (["dense", "conv", "attention"], D), (["gather", "embedding"], S), (["attention", "bidirectional"], S),
])  # fmt: skip
def test_batches_of_known_size_agree_with_one_example_at_a_time(names, batch):
    check_models([model_and_batch(name, batch) for name in names], batch=batch)


@pytest.mark.slow
def test_what_is_drawn_for_each_example_may_be_looked_up_in_a_public_table():
    """As the times of a diffusion model. All entries are one number here, so that draws cannot differ."""
    table = tf.constant([0.7] * 9)

    def losses(x):
        at = tf.random.uniform([x.shape[0] or tf.shape(x)[0]], 0, 9, tf.int32)
        return example_losses(tf.tanh(x * tf.gather(table, at)[:, None] @ W))

    check(losses, normal(B, 4), [W], batch=B)


# Branches

W, V = tf.Variable(normal(4, 3, seed=1)), tf.Variable(normal(4, 3, seed=2))
FLAG = tf.Variable(True, trainable=False)
parts = lambda x: tf.reshape(tf.tile(x[:, None], [1, 2, 1]), [-1, 4])
BRANCHES = {
    "weights in both": lambda x: tf.cond(FLAG, lambda: tf.tanh(x @ W), lambda: x @ V),
    "weights in one": lambda x: tf.cond(FLAG, lambda: tf.tanh(x @ W), lambda: x[:, :3]) * tf.reduce_sum(V),
    "two rows each": lambda x: tf.reshape(tf.cond(FLAG, lambda: tf.tanh(parts(x) @ W), lambda: parts(x) @ V), [-1, 6]),
}


@pytest.mark.parametrize(("name", "batch"), [*((name, 4) for name in BRANCHES), ("weights in both", 1)])
@pytest.mark.one_stack
def test_branches_that_use_weights_agree(name, batch):
    check(lambda x: example_losses(BRANCHES[name](x)), normal(batch or 4, 4), [W, V], batch=batch)


@pytest.mark.parametrize("branch", [
    lambda x: tf.tanh(x @ W + tf.ones([tf.shape(x)[0], 3])),
    lambda x: tf.tanh(x @ W + tf.function(lambda x: x @ V)(x)),
], ids=["as long as the batch", "a call"])  # fmt: skip
@pytest.mark.one_stack
def test_a_branch_that_makes_rows_for_a_batch_of_known_size_agrees(branch):
    """The known size would be a number inside of the branch, which runs on one example."""
    losses = lambda x: example_losses(tf.cond(FLAG, lambda: branch(x), lambda: x @ V))
    check(losses, normal(4, 4), [W, V], batch=4)


# In fit, a batch_size of 1 for arrays makes batches that are known to be one example


class Unfolded(L.Layer):
    """Puts an axis before the examples', and takes it away."""

    def call(self, x):
        return tf.reshape(x, [1, -1, 3])[0]


def trained(layers, x, y, **fit):
    model = K.Sequential([K.Input(x.shape[1:]), *layers])
    model.compile(tfdpfl.DPSGD(0.1, 0.0, learning_rate=1.0, expected_batch_size=1), "mse")
    before = model.get_weights()
    model.fit(x, y, epochs=1, shuffle=False, verbose=0, **fit)
    return model, before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "lstm", "attention"])
@pytest.mark.one_stack
def test_fit_takes_one_example_at_a_time(name):
    shape, layers = MODELS[name]
    x, y = normal(1, *shape), normal(1, 2, seed=1)
    model, before = trained(layers(), x, y, batch_size=1)
    after = model.get_weights()
    model.set_weights(before)
    losses = lambda x: tf.reduce_mean((model(x) - y) ** 2, 1)
    want = clipped_sums(per_example_gradients(losses, x, model.trainable_variables), 0.1)
    for a, b, w in zip(after, before, want, strict=True):
        np.testing.assert_allclose(b - a, w, atol=1e-6)


@pytest.mark.slow
@pytest.mark.one_stack
def test_an_only_example_under_another_axis_of_length_one_is_trained():
    model, _ = trained([Unfolded(), tanh(1)], normal(4, 3), normal(4, 1, seed=1), batch_size=1)
    assert model.optimizer.num_dp_steps == 4


def test_terms_of_a_loss_stay_apart_where_the_examples_are_the_last_axis():
    w, x = tf.Variable(normal(4, 3)), normal(5, 4, seed=1)
    terms = lambda x: (tf.reduce_sum(tf.tanh(x @ w), 1), tf.reduce_sum((x @ w) ** 2, 1))
    whole = lambda both: tf.reduce_sum(tf.reduce_mean(both, 1) * [1.0, 3.0])
    sums, _, _ = engine(lambda x: tf.stack(terms(x)), x, [w], 4.0, reduce=whole)
    own = lambda x: terms(x)[0] + 3.0 * terms(x)[1]
    assert_close(sums, clipped_sums(per_example_gradients(own, x, [w]), 4.0))
