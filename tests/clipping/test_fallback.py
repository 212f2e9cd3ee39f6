"""An op without a rule runs again for each example, exactly, or is refused."""

import pytest
import tensorflow as tf
from helpers import check, example_losses
from loop_cases import TABLE, A, C, R, X, over_time, used, zeros

from tfdpfl.errors import PrivacyError


def without_a_limit(x):
    return tf.while_loop(
        lambda n, s: tf.reduce_sum(n) > 0, lambda n, s: (n - 1, tf.tanh(s @ R + C)), (tf.constant([3]), zeros(x))
    )[1]


def loop_in_a_loop(x):
    inner = lambda h: over_time(x, lambda t, step, g: tf.tanh(step @ A + g @ R), h)
    return tf.while_loop(lambda i, h: i < 2, lambda i, h: (i + 1, inner(h)), (tf.constant(0), zeros(x)))[1]


def branch_in_a_loop(x):
    def turn(t, step, h):
        return tf.cond(t % 2 == 0, lambda: tf.tanh(step @ A + h), lambda: tf.tanh(h @ R))

    return over_time(x, turn, zeros(x))


def weights_that_change(x):
    """The matrix is another one in each turn."""
    return tf.while_loop(
        lambda i, w, h: i < 3, lambda i, w, h: (i + 1, tf.tanh(w @ R), tf.tanh(h @ w)), (tf.constant(0), R, x[:, 0])
    )[2]


def variable_looked_up(x):
    ids = lambda step: tf.cast(tf.abs(step[:, 0]) * 2, tf.int32) % 6
    return over_time(x, lambda t, step, h: tf.tanh(h @ R) + tf.gather(TABLE, ids(step)), zeros(x))


CLOSED = {f.__name__: f for f in (without_a_limit, weights_that_change, variable_looked_up)}
REFUSED = {f.__name__: f for f in (loop_in_a_loop, branch_in_a_loop)}


@pytest.mark.slow
@pytest.mark.parametrize("f", [
    pytest.param(f, id=name, marks=[pytest.mark.one_stack] * (name != "variable_looked_up"))
    for name, f in CLOSED.items()])  # fmt: skip
def test_loop_that_cannot_be_opened_agrees_by_the_fallback(f, replayed):
    check(lambda x: example_losses(f(x)), X, used(f))
    assert replayed == [True]


@pytest.mark.slow
@pytest.mark.one_stack
@pytest.mark.parametrize("f", list(REFUSED.values()), ids=list(REFUSED))
def test_loop_of_which_neither_is_possible_is_refused(f):
    with pytest.raises(
        PrivacyError, match=r"While.*uses weights and cannot be run on one example alone.*Write the layer"
    ):
        check(lambda x: example_losses(f(x)), X, used(f))
