"""Calls, branches and loops around weights: clipped sums are those of the examples one by one."""

import pytest
import tensorflow as tf
from helpers import L, check_model
from layer_cases import LOOPS, check_layers, layers_of, of_weights, sequence, stack, tanh, vector

GATE = tf.Variable(1.5, trainable=False)


def gated(x, w):
    return tf.cond(GATE > 1.0, lambda: tf.tanh(x * w), lambda: x)


CUSTOM = {
    "branch after weights": (vector, lambda x, v, w: gated(x * v, w), [(4,), (4,)]),
    "loop of tensor products": (sequence, lambda x, w: tf.while_loop(
        lambda i, h: i < 2, lambda i, h: (i + 1, tf.tanh(tf.tensordot(h, w, 1))), [0, x])[1], [(4, 4)]),
    "branch by weights": (vector, lambda x, w: tf.cond(tf.reduce_sum(w) > 0, lambda: tf.tanh(x @ w),
                                                       lambda: x @ (2.0 * w)), [(4, 3)]),
    "constant chosen by weights": (vector, lambda x, w: tf.tanh(x @ w) * tf.cond(w[0, 0] > 0, lambda: 3.0, lambda: 2.0),
                                   [(4, 3)]),
}  # fmt: skip


@pytest.mark.parametrize("cases", layers_of(LOOPS, of_weights(CUSTOM)))
def test_layers_agree_with_examples_one_by_one(cases):
    check_layers(cases)


def called(jit=None, method="weights inside"):
    class Called(L.Layer):
        def build(self, shape):
            self.w = self.add_weight(name="w", shape=(4, 3), initializer="glorot_normal")
            self.b = self.add_weight(name="b", shape=(3,), initializer="ones")
            self.built = True

        @tf.function(jit_compile=jit)
        def two_ops(self, x):
            return tf.tanh(tf.matmul(x, tf.convert_to_tensor(self.w)) + tf.convert_to_tensor(self.b))

        @tf.function(jit_compile=jit)
        def given(self, x, w):
            return tf.sin(tf.matmul(x, w))

        @tf.function
        def weight(self):
            return tf.nn.softplus(tf.convert_to_tensor(self.w))

        def call(self, x):
            if method == "weights inside":
                return self.two_ops(x)
            if method == "weights given":
                return self.given(x, tf.convert_to_tensor(self.w)) + tf.convert_to_tensor(self.b)
            if method == "weights made":
                return tf.matmul(x, self.weight()) * tf.convert_to_tensor(self.b)
            return self.two_ops(x) + tf.matmul(x, tf.convert_to_tensor(self.w)) + tf.matmul(x, self.weight())

    return Called()


@pytest.mark.slow
@pytest.mark.parametrize("method", [
    *[pytest.param(way, marks=pytest.mark.one_stack) for way in ("weights inside", "weights given", "weights made")],
    "weights in all these ways"])  # fmt: skip
def test_layer_that_calls_a_tf_function_agrees(method):
    check_model(stack(tanh(4), called(method=method), L.Dense(2)), vector)
