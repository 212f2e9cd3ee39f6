"""A tensor without examples is the same for all rows where NumPy's broadcasting makes equal rows of it."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tfdpfl.clipping.rows import laid_along, row_free, rowwise, shaped, together
from tfdpfl.clipping.states import Batch, Mixed, Public

SHAPES = [shape for rank in range(4) for shape in itertools.product((1, 3), repeat=rank)]


def op_of(*shapes):
    with tf.Graph().as_default():
        return tf.raw_ops.AddN(inputs=[tf.compat.v1.placeholder(tf.float32, s) for s in shapes]).op


@pytest.mark.parametrize("axis", [-3, -2, -1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_equal_where_broadcasting_makes_them_equal(shape, axis):
    value = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    rows = np.moveaxis(np.broadcast_to(value, (3, 3, 3)), axis, 0)
    alike = all(np.array_equal(rows[0], row) for row in rows)
    for state in (Public(), Public(alike=True), Public(frozenset({0}), alike=True)):
        assert row_free(tf.constant(value), state, axis) == alike


def test_an_axis_as_long_as_the_batch_needs_rows_that_are_alike():
    free = tf.TensorSpec([None, 3])
    assert row_free(free, Public(alike=True), -2)
    assert not row_free(free, Public(), -2) and not row_free(free, Public(frozenset({0}), alike=True), -2)
    assert not row_free(tf.TensorSpec(None), Public(alike=True), -2)


def test_tensors_of_one_number_of_rows_go_together_and_no_others():
    op = op_of([None, 3], [None, 3])
    both = lambda *states: together(op, op.inputs, states)
    assert both(Batch(0, 2), Batch(0, 2)) == both(Batch(0, 2), Batch(0, None)) == Batch(0, 2)
    assert both(Batch(0), Public(alike=True)) == Batch(0)
    assert isinstance(both(Batch(0, 2), Batch(0, 1)), Mixed) and isinstance(both(Batch(0), Public()), Mixed)
    assert rowwise(op, [Batch(0), Batch(0)]) == Batch(0) and rowwise(op, [Public(), Public()]) is None
    assert isinstance(rowwise(op, [Batch(1), Batch(1)]), Mixed)


def test_a_shape_with_the_batch_size_once_has_a_batch_axis_there():
    op = op_of([3], [3])
    assert shaped(op, [(4, 0), (2, 1)]) == Batch(1, 2) and shaped(op, [(4, 0), (5, 0)]) == Public(alike=True)
    for entries in ([(1, 1), (1, 1)], [(1, 2)], [(None, None), (1, 1)]):
        assert isinstance(shaped(op, entries), Mixed)
    along = lambda x: laid_along(op, tf.zeros(x), [(1, 1), (3, 0)])
    assert along([3]) == along([1, 3]) == Batch(0) and isinstance(along([4, 3]), Mixed)
