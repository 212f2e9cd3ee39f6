"""What tests of refusals share: functions of a batch in which examples meet or do not, and how each is tried."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import K, L, check_model, normal

from tfdpfl.clipping import clipped_gradients, per_example_norms
from tfdpfl.errors import PrivacyError

B = 4
W, W8, TABLE = tf.Variable(normal(4, 4)), tf.Variable(normal(8, 8, seed=1)), tf.Variable(normal(6, 4, seed=2))


def d(x):
    return tf.tanh(tf.matmul(x, W))


def total(y):
    return tf.reduce_sum(tf.reshape(y, [tf.shape(y)[0], -1]) ** 2, -1)


def n(x):
    return tf.shape(x)[0]


def nf(x):
    return tf.cast(n(x), tf.float32)


def square(x):
    return tf.reshape(d(x), [-1, 2, 2])


def norms(losses, batch=None):
    if losses.__name__ == "<lambda>":  # to convert one, TensorFlow parses the whole of this file
        losses = tf.autograph.experimental.do_not_convert(losses)

    @tf.function(input_signature=[tf.TensorSpec([batch, 4])])
    def step(x):
        return per_example_norms(tf.reduce_sum(losses(x)), [W, W8, TABLE])

    return step


def check_refused_or_apart(losses):
    """Refused while tracing, or by a check as the step runs; else another example's norm may not move."""
    x = normal(B, 4)
    other = np.concatenate([x[:3], [[30.0, -20.0, 10.0, 5.0]], [[3.0, 2.0, 1.0, -5.0]]]).astype("float32")
    step = norms(losses)
    try:
        before = step(tf.constant(x)).numpy()
        changed, larger = step(tf.constant(other[:B])).numpy(), step(tf.constant(other)).numpy()
    except PrivacyError as error:
        assert "xample" in str(error)
    except tf.errors.InvalidArgumentError as error:
        assert "tfdpfl" in str(error) or "ncompatible shapes" in str(error), error
    else:
        np.testing.assert_allclose(changed[:3], before[:3], rtol=1e-6)
        np.testing.assert_allclose(larger[:3], before[:3], rtol=1e-6)


def check_told(losses, message):
    with pytest.raises(PrivacyError, match=message):
        norms(losses).get_concrete_function()


def check_static(losses):
    with pytest.raises(PrivacyError):
        norms(losses, batch=B).get_concrete_function()


def check_exact(*layers):
    """Layers that keep examples apart, side by side, between a dense layer and the loss."""
    x = K.Input((3, 4))
    y = L.Dense(4, activation="tanh")(x)
    flat = L.Lambda(lambda x: tf.reshape(x, [tf.shape(x)[0], -1]))
    check_model(K.Model(x, [flat(layer(y)) for layer in layers]), normal(B, 3, 4))


BATCHED = np.float32(normal(B, 4, seed=5))


def padded_attention(x):
    scores = tf.matmul(x, x, transpose_b=True) / 2.0
    mask = tf.cast(tf.reduce_sum(x, -1) > 0, tf.float32)[:, None, :]
    causal = tf.linalg.band_part(tf.ones([tf.shape(x)[1]] * 2), -1, 0)
    return tf.matmul(tf.nn.softmax(scores - 1e9 * (1 - mask * causal)), x)


def clip_sum(losses, variables, x, clip, m=None):
    """For each of the batches ``x`` the clipped sum, the norms, and how many of them are not finite."""

    @tf.function(input_signature=[tf.TensorSpec([None, *x[0].shape[1:]], x[0].dtype)])
    def step(x):
        r = clipped_gradients(tf.reduce_mean(losses(x)), variables, clip, m)
        return r.sum, r.norms, r.num_nonfinite

    for sums, each, bad in map(step, map(tf.constant, x)):
        yield np.concatenate([np.ravel(s) for s in sums if s is not None]), each.numpy(), int(bad)
