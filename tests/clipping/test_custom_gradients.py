"""A gradient that a user wrote may mix what the value keeps apart, so it is refused; TensorFlow's own are known."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpfl import PrivacyError
from tfdpfl.clipping import per_example_norms

W = tf.Variable(np.arange(12, dtype="float32").reshape(3, 4) / 10)
X = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")


@tf.custom_gradient
def backwards_reversed(x):
    return tf.identity(x), lambda dy: dy[::-1]


@tf.custom_gradient
def product(x, w):
    return x @ w, lambda dy: (dy @ tf.transpose(w), tf.transpose(x) @ dy)


def norms(model):
    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def run(x):
        return per_example_norms(tf.reduce_mean(model(x)), [W])

    return run(X).numpy()


@pytest.mark.parametrize(
    "model",
    [
        lambda x: backwards_reversed(x @ W),
        lambda x: product(x, W),
        lambda x: tf.function(backwards_reversed)(x @ W),
        lambda x: tf.recompute_grad(lambda t: tf.tanh(t @ W))(x),
    ],
    ids=["mixes examples backwards", "adds weights' gradients up", "inside a call", "recomputed, with weights inside"],
)
def test_custom_gradients_are_refused(model):
    with pytest.raises(PrivacyError, match=r"tf\.custom_gradient"):
        norms(model)


@pytest.mark.parametrize("inside_call", [False, True])
def test_gradients_that_tensorflow_customises_are_taken(inside_call):
    silu = tf.function(lambda t: tf.nn.silu(t @ W)) if inside_call else lambda t: tf.nn.silu(t @ W)
    want = []
    for x in X:
        with tf.GradientTape() as tape:
            z = x[None] @ W
            loss = tf.reduce_mean(z * tf.sigmoid(z))
        want.append(np.linalg.norm(tape.gradient(loss, W)))
    np.testing.assert_allclose(norms(silu), want, rtol=1e-5)
