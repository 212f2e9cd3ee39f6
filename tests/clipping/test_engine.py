"""The public functions take weights in every form, and refuse eager losses and captured batches."""

import pytest
import tensorflow as tf
from helpers import L, assert_close, check_model, clipped_sums, example_losses, normal, norms_of, per_example_gradients
from layer_cases import stack, tanh, vector
from mixing_cases import BATCHED, W, d, total

from tfdpfl.clipping import clipped_gradients, per_example_norms
from tfdpfl.errors import PrivacyError


def test_eager_losses_captured_batches_and_no_variables_are_refused_with_the_mend():
    with pytest.raises(PrivacyError, match=r"tf\.function"):
        per_example_norms(tf.reduce_sum(total(d(tf.constant(BATCHED)))), [W])
    with pytest.raises(PrivacyError, match="argument of the tf"):
        tf.function(lambda: per_example_norms(tf.reduce_sum(total(d(tf.constant(BATCHED)))), [W]))()
    with pytest.raises(PrivacyError, match="variables is empty"):
        tf.function(lambda x: per_example_norms(tf.reduce_sum(total(d(x))), []))(tf.constant(BATCHED))


def test_variable_without_gradient_has_none_and_counts_for_nothing():
    model = stack(tanh(3), L.Dense(2))
    spare = tf.Variable(normal(3))
    model(vector)
    check_model(model, vector, variables=[spare, *model.trainable_variables])


def test_weights_held_as_plain_tensors_agree():
    x, values = vector, [normal(4, 3), normal(3), normal(3, 3, seed=1)]
    apply = lambda x, a, b, c: example_losses(tf.tanh(tf.tanh(x @ a + b) @ c) @ c)
    variables = [tf.Variable(v) for v in values]
    gradients = per_example_gradients(lambda x: apply(x, *variables), x, variables)

    @tf.function
    def step(x, *weights):
        r = clipped_gradients(tf.reduce_sum(apply(x, *weights)), weights, 0.7)
        return r.sum, r.norms

    sums, norms = step(tf.constant(x), *map(tf.constant, values))
    assert_close([norms.numpy()], [norms_of(gradients)])
    assert_close([s.numpy() for s in sums], clipped_sums(gradients, 0.7))
