"""The kernel for norms of embeddings' gradients: where it is used, what it finds, and what it refuses."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import check, example_losses, normal
from tensorflow.python.framework import op_def_library

from tfdpfl import native
from tfdpfl.clipping import clipped_gradients
from tfdpfl.clipping.kernel_ops import FILTERS, ROWS

OPS = (*FILTERS, ROWS)


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.delenv(native.SWITCH, raising=False)


def test_norms_of_rows_that_are_looked_up_twice_are_those_of_their_sum():
    table = tf.Variable(normal(9, 3))
    losses = lambda ids: example_losses(tf.tanh(tf.gather(table, ids)) * normal(1, 4, 3, seed=2))
    ids = np.array([[8, 0, 8, 8], [1, 2, 3, 4], [5, 5, 0, 0]], np.int32)
    check(losses, ids, [table])
    step = tf.function(lambda ids: clipped_gradients(losses(ids), [table], 1.0).sum[0])
    graph = step.get_concrete_function(tf.TensorSpec([None, 4], tf.int32)).graph
    assert [op.type for op in graph.get_operations() if op.type in OPS] == [ROWS]


@pytest.mark.parametrize("ids, rows, settings", [
    ([3], [3, 4, 2], [9, 1, 0]), ([3, 4], [3, 4], [9, 1, 0]), ([3, 4], [3, 5, 2], [9, 1, 0]),
    ([3, 4], [3, 4, 2], [9, 1, 9]), ([3, 4], [3, 4, 2], [9, 0, 0]), ([3, 4], [3, 4, 2], [9]),
])  # fmt: skip
def test_norms_of_what_is_no_rows_are_refused(ids, rows, settings):
    assert not native.register_ops()
    inputs = {"ids": tf.zeros(ids, tf.int64), "rows": tf.zeros(rows), "settings": settings}
    with pytest.raises(tf.errors.OpError, match="tfdpfl"):
        tf.function(lambda: op_def_library.apply_op(ROWS, **inputs))()
