"""Variables that belong to a process and not to a model."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

__all__ = ["in_memory", "plain_variable"]


def plain_variable(_, **settings: object) -> tf.Variable:
    """For `tf.variable_creator_scope`: what no function waits for, and no strategy mirrors."""
    return resource_variable_ops.default_variable_creator_v2(**settings)


def in_memory(value: np.ndarray | tf.Tensor) -> tf.Variable:
    """A variable that is not the optimizer's, so that no file holds it; one for all replicas."""
    with tf.init_scope(), tf.variable_creator_scope(plain_variable):
        return tf.Variable(value, trainable=False)
