"""Variables that belong to a process and not to a model."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

__all__ = ["in_memory", "plain_variable", "value_of"]


def plain_variable(_, **settings: object) -> tf.Variable:
    """For `tf.variable_creator_scope`: what no function waits for, and no strategy mirrors."""
    return resource_variable_ops.default_variable_creator_v2(**settings)


def in_memory(value: np.ndarray | tf.Tensor) -> tf.Variable:
    """A variable that is not the optimizer's, so that no file holds it; one for all replicas."""
    with tf.init_scope(), tf.variable_creator_scope(plain_variable):
        return tf.Variable(value, trainable=False)


def value_of(variable: tf.Variable) -> np.ndarray:
    """Returns the value of a variable of TensorFlow or Keras. `np.asarray` of it takes four times as long, because it
    also knows tapes, and variables on several devices; these are left to it."""
    inner = getattr(variable, "_value", variable)
    if type(inner) is not resource_variable_ops.ResourceVariable:
        return np.asarray(variable)
    return np.asarray(tf.raw_ops.ReadVariableOp(resource=inner.handle, dtype=inner.dtype))
