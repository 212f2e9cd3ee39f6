"""Ways by which examples could meet that are neither an axis nor a sum: settings, lengths, state, other gradients."""

import math

import numpy as np
import pytest
import tensorflow as tf
from helpers import L, engine, normal, rng

import tfdpfl
from tfdpfl.clipping import clipped_gradients
from tfdpfl.errors import PrivacyError

B, D = 4, 4
X = normal(B, D)
W = tf.Variable(normal(D, 3, seed=1))
STATE = tf.Variable(0.0, trainable=False)
GENERATOR = tf.random.Generator.from_seed(1)


def losses(x, w=W):
    return tf.reduce_sum(tf.tanh(x @ w), 1)


def many(x):
    """How many examples pass a test: a length that is data."""
    return tf.shape(tf.where(x[:, 0] > 0.0))[0]


def scaled(x, number):
    return losses(x) * tf.cast(number, tf.float32)


def through_a_queue(x):
    queue = tf.raw_ops.FIFOQueueV2(component_types=[tf.int32], shapes=[[]], capacity=2)
    tf.raw_ops.QueueEnqueueV2(handle=queue, components=[many(x)])
    return tf.ensure_shape(tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.int32])[0], [])


def drawn_from_data(x):
    GENERATOR.state.assign(tf.stack([tf.cast(many(x), tf.int64), 0, 0]))
    return GENERATOR.uniform([])


def branched(x):
    tf.cond(many(x) > 1, lambda: STATE.assign(1.0), lambda: STATE.assign(0.0))
    return STATE.read_value()


def counted(x):
    tf.while_loop(lambda i: i < many(x), lambda i: [i + 1 + 0 * tf.cast(STATE.assign_add(1.0), tf.int32)], [0])
    return STATE.read_value()


SETTINGS = {
    "rank": lambda x: tf.rank(tf.reshape(tf.zeros([1]), tf.ones([many(x)], tf.int32))),
    "shape of a shape": lambda x: tf.shape(tf.shape(tf.reshape(tf.zeros([1]), tf.ones([many(x)], tf.int32))))[0],
    "length of a list": lambda x: tf.TensorArray(tf.float32, size=many(x), dynamic_size=True).size(),
    "length of the batch's list": lambda x: tf.TensorArray(tf.float32, size=tf.shape(x)[0], dynamic_size=True).size(),
    "axis that is added": lambda x: tf.shape(tf.expand_dims(tf.ones([3]), many(x) % 2))[0],
    "order of axes": lambda x: tf.transpose(tf.constant([[0, 1], [2, 0]]), [many(x) % 2, (many(x) + 1) % 2])[0, 1],
    "axis that is joined": lambda x: tf.shape(tf.concat([tf.ones([2, 2]), tf.ones([2, 2])], many(x) % 2))[0],
    "axis that is summed": lambda x: tf.reduce_max(tf.reduce_sum(tf.reshape(tf.shape(x[:, :, None, None]), [2, 2]),
                                                                 many(x) % 2)),
    "shape of a shape that is cut": lambda x: tf.shape(tf.reshape(tf.shape(x[:, :, None, None]), [many(x), -1]))[1],
    "a queue": through_a_queue, "a generator": drawn_from_data, "a branch": branched, "a count of turns": counted,
}  # fmt: skip


@pytest.mark.parametrize("number", SETTINGS.values(), ids=SETTINGS)
def test_a_number_made_of_how_many_examples_pass_a_test_is_refused(number):
    with pytest.raises(PrivacyError):
        engine(lambda x: scaled(x, number(x)), X, [W], 1.0)


@pytest.mark.parametrize(("number", "rows"), [
    (lambda n: 13 // n * n, B),  # 13 only where n divides 13
    (lambda n: tf.cast(tf.cast(n, tf.uint8), tf.int32) // n, 256),  # 0 from 256 on
])  # fmt: skip
@pytest.mark.one_stack
@pytest.mark.slow
def test_integers_that_round_or_wrap_are_taken_as_on_a_batch_of_one(number, rows):
    x = normal(rows, D)
    norms = lambda x: engine(lambda x: scaled(x, number(tf.shape(x)[0]) + 1), x, [W], 1.0)[1]
    np.testing.assert_allclose(norms(x)[:3], np.concatenate([norms(x[i : i + 1]) for i in range(3)]), rtol=1e-5)


@tf.custom_gradient
def normalises_in_the_gradient(x):
    return tf.identity(x), tf.math.l2_normalize


@tf.custom_gradient
def layer_as_gradient(x):
    return tf.identity(x), L.Lambda(lambda g: tf.reduce_sum(g, 0, keepdims=True) + 0 * g)


@pytest.mark.parametrize("f", [
    normalises_in_the_gradient, layer_as_gradient, tf.grad_pass_through(tf.transpose),
], ids=["function of TensorFlow", "layer", "passed through"])  # fmt: skip
def test_a_gradient_that_may_mix_examples_is_refused(f):
    with pytest.raises(PrivacyError):
        engine(lambda x: tf.reduce_sum(f(x @ tf.ones([D, B]) * tf.reduce_sum(W)), 1), X, [W], 1.0, batch=B)


@pytest.mark.parametrize("spec", [
    tf.RaggedTensorSpec([None, None], ragged_rank=1), tf.SparseTensorSpec([None, D]),
], ids=["ragged", "sparse"])  # fmt: skip
def test_values_that_are_not_rows_are_refused(spec):
    @tf.function(input_signature=[spec])
    def step(x):
        return clipped_gradients(tf.reduce_sum(x.values[:, None] * W[:1]), [W], 1.0).sum

    with pytest.raises(PrivacyError, match="values are not rows of examples"):
        step.get_concrete_function()


def test_a_whole_number_from_the_data_set_is_refused():
    @tf.function
    def step(iterator):
        x, number = next(iterator)
        return clipped_gradients(tf.reduce_mean(scaled(x, number)), [W], 1.0).sum

    data = tf.data.Dataset.from_tensors(X).map(lambda x: (x, tf.reduce_sum(tf.cast(x[:, 0] > 0.0, tf.int32))))
    with pytest.raises(PrivacyError, match="hands in a number that may come from examples"):
        step(iter(data))


def test_where_xla_drops_a_check_nothing_is_added():
    """XLA leaves out the op that would stop a step whose inputs disagree."""

    @tf.function(jit_compile=True, input_signature=[tf.TensorSpec([None, D]), tf.TensorSpec([None, D])])
    def step(x, y):
        return clipped_gradients(tf.reduce_mean(losses(x + y)), [W], 1.0).sum[0]

    assert np.abs(step(X, X)).max() > 0
    assert np.abs(step(X, X[:1])).max() == 0


def test_a_clip_below_what_float32_can_square_is_refused():
    with pytest.raises(ValueError, match=r"l2_norm_clip=1e-12 is so small.*Scale the loss up"):
        tfdpfl.DPSGD(1e-12, 0.0)
    for wrong, said in ((1e-12, "1e-12"), (math.nan, "nan"), (math.inf, "inf"), (-1.0, "-1.0"), (None, "None")):
        with pytest.raises(ValueError, match=f"l2_norm_clip.*{said}"):
            engine(losses, X, [W], wrong)


def test_weights_in_complex_numbers_are_refused_by_name():
    """Not left without a gradient and without noise."""
    w = tf.Variable(normal(3, 2))

    def spectral(x):
        return tf.reduce_sum(tf.signal.irfft(tf.signal.rfft(x) * tf.complex(w[:, 0], w[:, 1])) ** 2, 1)

    with pytest.raises(PrivacyError, match=r"Mul.*complex numbers.*real and imaginary parts"):
        engine(spectral, X, [w], 1.0)


@pytest.mark.slow
def test_a_step_that_examples_may_leave_out_is_refused_at_the_latest_where_it_is_priced():
    """Within a branch of its own a step does not see who chose the branch."""
    optimizer = tfdpfl.DPSGD(1.0, 0.0)
    optimizer.build([W])

    def taken(choice):
        @tf.function(input_signature=[tf.TensorSpec([None, D])])
        def step(x):
            private = lambda: (optimizer.minimize(lambda: tf.reduce_mean(losses(x)), [W]), 1)[1]
            return tf.cond(choice(x), private, lambda: 0)

        step(X)
        return optimizer.executed

    every_second = tf.Variable(True, trainable=False)
    assert taken(lambda x: every_second.read_value()) == [(0.0, 1)]
    with pytest.raises(PrivacyError, match=r"If \(.*takes a private step or leaves it out, and examples decide which"):
        taken(lambda x: tf.reduce_max(x) < 50.0)


def test_no_digit_of_a_float64_sum_is_without_noise():
    """An update keeps the digits of the noise's type: those beyond would tell whether there was an example at all."""
    w = tf.Variable(np.zeros(100), dtype=tf.float64)
    optimizer = tfdpfl.DPSGD(1.0, 1.0, learning_rate=1.0)
    optimizer.build([w])

    @tf.function(input_signature=[tf.TensorSpec([None, 100], tf.float64)])
    def step(x):
        optimizer.minimize(lambda: tf.reduce_mean(tf.reduce_sum(x * w, 1)), [w])

    step(rng(0).normal(size=(1, 100)))
    assert np.ptp(w) > 1
    np.testing.assert_array_equal(w, np.float64(np.float32(w)))
