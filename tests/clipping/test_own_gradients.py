"""A gradient that a user wrote is taken if it keeps examples apart, as the value does; TensorFlow's own are known."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import K, L, check, example_losses, normal, raw

import tfdpfl
from tfdpfl import PrivacyError
from tfdpfl.clipping import per_example_norms

W, V = tf.Variable(normal(3, 4)), tf.Variable(normal(4, 2, seed=1))
X = normal(5, 3)


@tf.custom_gradient
def bent(x):
    """Not linear, so that gradients that were added up before would give another one."""
    return tf.math.softplus(x), lambda dy: dy * tf.sigmoid(x) * (1 + tf.abs(dy))


@tf.custom_gradient
def turned(x):
    return tf.identity(x), lambda dy: -0.3 * dy


@tf.custom_gradient
def over_own_norm(x):
    return tf.identity(x), lambda dy: dy / (1 + tf.norm(dy, axis=1, keepdims=True))


@tf.custom_gradient
def alike(x):
    """The factor is the same for all examples, and made of their number."""
    return tf.identity(x), lambda dy: dy * 0.3 * tf.ones(x.shape if None not in x.shape.as_list() else tf.shape(x))


@tf.custom_gradient
def adds(x, w):
    return x + w, lambda dy: (dy, None)


@tf.custom_gradient
def less_their_mean(x):
    return tf.identity(x), lambda dy: dy - tf.reduce_mean(dy, 0)


@tf.custom_gradient
def backwards_reversed(x):
    return tf.identity(x), lambda dy: dy[::-1]


@tf.custom_gradient
def product(x, w):
    return x @ w, lambda dy: (dy @ tf.transpose(w), tf.transpose(x) @ dy)


@tf.custom_gradient
def both(x, w):
    return (tf.identity(x), tf.identity(w)), lambda dx, dw: (2 * dx, 3 * dw)


@tf.custom_gradient
def weights_to_examples(x, w):
    """A weight's gradient is a sum over all examples."""
    return (tf.identity(x), tf.identity(w)), lambda dx, dw: (dx + tf.reduce_sum(dw), dw)


@tf.custom_gradient
def noisy(x):
    return tf.identity(x), lambda dy: dy * tf.random.normal([4])


def times(factor):
    """A weight whose gradient is multiplied by what its function has from outside."""

    @tf.custom_gradient
    def weight(w):
        return tf.identity(w), lambda dy: dy * factor

    return weight(tf.convert_to_tensor(W))


def hidden(x):
    return tf.tanh(x @ W)


again = tf.recompute_grad(hidden)
twice_again = tf.recompute_grad(lambda x: again(x) @ V)


def recomputed_beside_another_layer(x):
    h = hidden(x)
    return tf.recompute_grad(lambda t: h * tf.reduce_sum(t, 1, keepdims=True) @ V)(x)


def counted(x):
    return tf.cast(tf.shape(x)[0], tf.float32)


APART = {
    "of a weight": lambda x: x @ bent(tf.convert_to_tensor(W)) @ V,
    "of activations": lambda x: bent(x @ W) @ V,
    "reversed": lambda x: turned(hidden(x)) @ V,
    "over each example's norm": lambda x: over_own_norm(hidden(x)) @ V,
    "times as many ones": lambda x: alike(hidden(x)) @ V,
    "with a weight that gets none": lambda x: adds(hidden(x) @ V, tf.convert_to_tensor(V)[0]),
    "of activations and a weight": lambda x: tf.matmul(*both(hidden(x), tf.convert_to_tensor(V))),
    "times a public number": lambda x: x @ times(tf.reduce_sum(V)) @ V,
    "recomputed": lambda x: again(x) @ V,
    "recomputed twice": lambda x: twice_again(x),
}
MEET = {
    "mean of the batch": (lambda x: less_their_mean(hidden(x)), "Mean reduces over the batch"),
    "other examples": (lambda x: backwards_reversed(hidden(x)), "some examples of the batch"),
    "sum of weights' gradients": (lambda x: product(x, W), "sums over the batch"),
    "weights' gradient to examples": (
        lambda x: tf.matmul(*weights_to_examples(hidden(x), tf.convert_to_tensor(V))),
        "adds a sum over the batch",
    ),
    "data from outside": (lambda x: x @ times(tf.reduce_mean(x)), "Mean reduces over the batch"),
    "data from outside, as they are": (lambda x: x @ times(x[:3, :1]), "some examples"),
    "batch size": (lambda x: x @ times(counted(x)), "scales weights by the batch size|spreads the batch size"),
    "draws": (lambda x: noisy(hidden(x)), "draws or writes"),
    "inside a call": (lambda x: tf.function(backwards_reversed)(hidden(x)), r"tf\.custom_gradient"),
    "recomputed beside another layer": (recomputed_beside_another_layer, "tf.recompute_grad's function all that"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", APART)
def test_custom_gradients_that_keep_examples_apart_are_exact(name):
    model = tf.autograph.experimental.do_not_convert(APART[name])
    for batch in (None, len(X)):
        check(lambda x: example_losses(model(x)), X, [W, V], batch=batch)


@pytest.mark.parametrize(("model", "message"), MEET.values(), ids=MEET)
def test_custom_gradients_in_which_examples_meet_are_refused(model, message):
    model = tf.autograph.experimental.do_not_convert(model)

    @tf.function(input_signature=[tf.TensorSpec([None, 3])], autograph=False)
    def run(x):
        return per_example_norms(tf.reduce_mean(model(x)), [W, V])

    with pytest.raises(PrivacyError, match=message):
        run.get_concrete_function()


@pytest.mark.slow
def test_a_recomputed_layer_trains_in_a_keras_model():
    """Also by a tape, which records nothing of what is computed again."""

    class Again(L.Layer):
        def build(self, shape):
            self.w = self.add_weight(name="w", shape=(shape[-1], 2))
            self.built = True

        def call(self, x):
            return tf.recompute_grad(lambda t: tf.tanh(t @ tf.convert_to_tensor(self.w)))(x)

    model = K.Sequential([K.Input((3,)), L.Dense(4), Again()])
    y, before = normal(5, 2, seed=3), [w.numpy() for w in raw(model.trainable_variables)]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(X) - y) ** 2)
    want = tape.gradient(loss, raw(model.trainable_variables))
    model.compile(tfdpfl.DPSGD(100.0, 0.0, learning_rate=1.0), loss="mse")
    model.train_on_batch(X, y)
    for w, b, g in zip(raw(model.trainable_variables), before, want, strict=True):
        np.testing.assert_allclose(b - w.numpy(), g, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("inside_call", [False, True])
def test_gradients_that_tensorflow_customises_are_taken(inside_call):
    silu = tf.function(lambda t: tf.nn.silu(t @ W)) if inside_call else lambda t: tf.nn.silu(t @ W)
    check(lambda x: example_losses(silu(x)), X, [W])
