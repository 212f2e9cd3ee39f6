"""Data sets that functions make are read as objects."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpfl.data.declared import ancestors, name_of
from tfdpfl.data.inner import made_for, made_inside, overlaps

ROWS = tf.data.Dataset.from_tensor_slices(np.arange(12))
NUMBERS = tf.data.Dataset.range(3)


def function_of(data):
    return data._functions()[0]


def test_what_a_function_makes_of_an_element_can_be_read():
    inner = made_inside(function_of(ROWS.window(4).flat_map(lambda w: w.batch(4).map(lambda t: -t))))
    assert [name_of(each) for each in ancestors(inner)] == ["MapDataset", "BatchDataset", "VariantDataset"]
    assert made_inside(function_of(ROWS.map(lambda t: -t))) is None
    assert ancestors(made_inside(function_of(NUMBERS.flat_map(lambda i: ROWS.skip(i)))))[-1] is ROWS


def test_what_a_function_makes_of_one_element_is_that():
    function = function_of(NUMBERS.flat_map(lambda i: ROWS.skip(i * 4).take(4)))
    assert list(made_for(function, tf.constant(2, tf.int64)).as_numpy_iterator()) == [8, 9, 10, 11]


@pytest.mark.parametrize(
    "size, shift, stride", [(4, 4, 1), (4, 3, 1), (2, 1, 3), (3, 1, 3), (3, 2, 3), (2, 2, 2), (1, 1, 1)]
)
def test_windows_overlap_if_an_element_is_in_two_of_them(size, shift, stride):
    windows = tf.data.Dataset.range(40).window(size, shift, stride, drop_remainder=True)
    held = [int(each) for window in windows for each in window]
    assert overlaps(windows) == (len(set(held)) < len(held))
