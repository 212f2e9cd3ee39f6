"""The axis of the examples is followed, and what depends on how many there are is refused."""

import pytest
import tensorflow as tf
from helpers import normal
from mixing_cases import B, W, total

from tfdpfl.clipping import per_example_norms
from tfdpfl.errors import PrivacyError


def test_a_reshape_that_cuts_across_examples_is_named_when_it_runs():
    @tf.function(input_signature=[tf.TensorSpec([None, None, 4])])
    def step(x):
        return per_example_norms(tf.reduce_sum(tf.reshape(tf.einsum("bti,ij->btj", x, W), [-1, 8]) ** 2), [W])

    assert step(normal(B, 2, 4)).shape == (B,)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"tfdpfl: Reshape.*cuts across examples"):
        step(normal(B, 3, 4))


@pytest.mark.parametrize("rows", [(3, 4), (None, None), (4, None), (None, 4)], ids=str)
def test_inputs_that_disagree_about_the_batch_size_are_refused(rows):
    other = tf.Variable(normal(4, 3))

    @tf.function(input_signature=[tf.TensorSpec([n, 4]) for n in rows])
    def step(x, y):
        return per_example_norms(tf.reduce_mean(total(x @ W)) + tf.reduce_mean(total(y @ other)), [W, other])

    first, second = rows  # one row would broadcast
    told = "disagree about the batch size|must have the same size|Input to reshape"  # whichever op comes first
    with pytest.raises((PrivacyError, tf.errors.InvalidArgumentError), match=told):
        step(normal(first or 1, 4), normal(second or (1 if first else 4), 4))
