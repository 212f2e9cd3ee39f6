"""Which rows of a batch are blank: they fill it up to a size, and are no examples.

Data sets of tfdpfl mark a blank row where it cannot get lost: its sample weight is -0.0. This is a zero in all
arithmetic, and no example has it. So the mark goes through rebatching, prefetching and `fit` of every Keras. A
step finds it in the tensors that it takes in, whether or not its loss uses weights.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdpfl._variables import in_memory

__all__ = ["announce", "may_mark", "of_batch", "unmarked", "weights"]

_lock = threading.Lock()
_made = False
_variable: tf.Variable | None = None


def announce() -> None:
    """Says that from here on batches of this process may hold blank rows. Steps that are traced already see it."""
    global _made
    with _lock:
        _made = True
        if _variable is not None:
            _variable.assign(True)


def announced() -> tf.Tensor:
    """Whether batches may hold blank rows, when the step runs. In other processes -0.0 is a number as any."""
    global _variable
    with _lock:
        if _variable is None:
            _variable = in_memory(np.bool_(_made))
    return tf.convert_to_tensor(_variable)


def weights(count: tf.Tensor | int, dtype: tf.DType) -> tf.Tensor:
    """The sample weights of so many blank rows. From NumPy: Python's -0.0 is 0.0 to TensorFlow's cache of scalars."""
    return tf.fill([count], tf.constant(np.array(-0.0, dtype.as_numpy_dtype)))


def unmarked(x: tf.Tensor) -> tf.Tensor:
    """The same numbers, none of which is the mark of a blank row."""
    return tf.where(tf.equal(x, 0), tf.zeros([], x.dtype), x)


def may_mark(spec: tf.TensorSpec | tf.Tensor) -> bool:
    """Whether a tensor of a batch may be its sample weights: one floating-point number a row."""
    return spec.shape.rank == 1 and spec.dtype.is_floating


def marked(x: tf.Tensor) -> tf.Tensor:
    """bool [rows]: whether each number is the mark of a blank row."""
    integer = {2: tf.int16, 4: tf.int32, 8: tf.int64}[x.dtype.size]
    return tf.equal(tf.bitcast(x, integer), tf.constant(integer.min, integer))


def of_batch(
    tensors: Sequence[tf.Tensor], weights: Sequence[tf.Tensor], size: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Which of the ``size`` rows of a batch are blank, bool [size], as the tensors that came in with it say; and
    whether all that is marked is of this batch: a mark in a tensor of another length is of rows that are not known. Of
    ``weights``, which are known to be sample weights, every zero is of a blank row."""
    known = announced()
    blank, ours = tf.zeros([size], tf.bool), tf.constant(True)
    for x in tensors:
        marks = marked(x) & known
        ours &= tf.equal(tf.size(marks), size) | ~tf.reduce_any(marks)
        blank |= tf.pad(marks, [[0, size]])[:size]
    for x in weights:
        blank |= tf.pad(tf.equal(x, 0), [[0, size]])[:size] & tf.equal(tf.size(x), size)
    return blank, ours
