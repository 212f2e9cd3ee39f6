"""Data sets that a function makes (of flat_map, interleave and the like), as objects that can be read."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf
from tensorflow.python.data.util import structure
from tensorflow.python.framework.func_graph import FuncGraph

from tfdpfl._types import Dataset

__all__ = ["made_for", "made_inside", "overlaps"]


def made_inside(function: Any) -> Dataset | None:
    """Returns the data set that a function of a data set makes of an element, traced once more. None if the function
    makes none, or if that does not show.

    Args:
        function: What TensorFlow keeps of the function.
    """
    if not isinstance(getattr(function, "_output_structure", None), tf.data.DatasetSpec):
        return None
    spec = function._input_structure
    with tf.init_scope(), FuncGraph("made_inside").as_default():
        given = [
            tf.compat.v1.placeholder(each.dtype, each.shape) if isinstance(each, tf.TensorSpec) else None
            for each in structure.get_flat_tensor_specs(spec)
        ]
        if None in given:
            return None
        return made_for(function, structure.from_compatible_tensor_list(spec, given))


def made_for(function: Any, element: Any) -> Dataset | None:
    """Returns the data set that a function of a data set makes of this element, or None if it does not take it."""
    given = element if isinstance(element, tuple) else (element,)
    try:
        made = tf.__internal__.autograph.tf_convert(function._func, tf.__internal__.autograph.control_status_ctx())(
            *given
        )
    except Exception:  # of TensorFlow's, or of the function's own checks
        return None
    return made if isinstance(made, tf.data.Dataset) else None


def overlaps(window: Dataset) -> bool:
    """Returns whether windows share elements."""
    size, shift, stride = (int(getattr(window, name)) for name in ("_size", "_shift", "_stride"))
    return math.lcm(shift, stride) // stride < size
