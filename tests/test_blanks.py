"""Blank rows are those of weight -0.0, by NumPy's sign bit, once a data set has announced that there may be some."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpfl import _blanks

NUMBERS = [-0.0, 0.0, 1.0, -1.0, np.nan, -np.inf, 1e-30, -0.0]


@pytest.fixture
def announced(monkeypatch):
    """In each test as in a new process."""
    monkeypatch.setattr(_blanks, "_made", False)
    monkeypatch.setattr(_blanks, "_variable", None)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_mark_is_the_zero_with_a_sign_and_no_other_number(dtype):
    x = np.array(NUMBERS, dtype)
    marks = np.signbit(x) & (x == 0)
    np.testing.assert_array_equal(_blanks.marked(tf.constant(x)), marks)
    tf.constant(0.0, dtype)  # which TensorFlow remembers, and would give out again for a -0.0 of Python
    np.testing.assert_array_equal(_blanks.marked(_blanks.weights(3, tf.as_dtype(dtype))), [True] * 3)
    plain = _blanks.unmarked(tf.constant(x))
    np.testing.assert_array_equal(plain, x)
    assert not np.signbit(plain.numpy()[marks]).any()


def test_a_traced_step_sees_what_is_announced_after_it_was_traced(announced):
    step = tf.function(lambda w: _blanks.of_batch([w], [], tf.constant(3)))
    batch = tf.constant([1.0, -0.0, 2.0])
    assert step(batch)[0].numpy().tolist() == [False] * 3  # -0.0 is a number as any
    _blanks.announce()
    blank, ours = step(batch)
    assert blank.numpy().tolist() == [False, True, False] and ours


def test_marks_of_another_length_are_of_rows_that_are_not_known(announced):
    _blanks.announce()
    four = tf.constant([1.0, -0.0, 1.0, 1.0])
    assert not _blanks.of_batch([four], [], tf.constant(3))[1]
    assert _blanks.of_batch([four * 0 + 1], [], tf.constant(3))[1]  # without a mark it says nothing
    # Of what is known to be sample weights, every zero is a blank row.
    zero = tf.constant([0.0, 1.0, 1.0])
    assert _blanks.of_batch([zero], [], tf.constant(3))[0].numpy().tolist() == [False] * 3
    assert _blanks.of_batch([], [zero], tf.constant(3))[0].numpy().tolist() == [True, False, False]
