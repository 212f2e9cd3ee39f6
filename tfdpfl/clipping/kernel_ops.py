"""The kernels as TensorFlow ops: where they can be used, and norms of embeddings' gradients."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_library

from tfdpfl import native
from tfdpfl.clipping.graph import compiled

__all__ = ["FILTERS", "ROWS", "find_obstacle", "made", "squared_row_norms"]

FILTERS = ("TfdpflFilterGradients", "TfdpflFilterNorms", "TfdpflFilterSum")
ROWS = "TfdpflRowNorms"


def find_obstacle(*tensors: tf.Tensor, ranks: tuple[int, ...] = (4, 5)) -> str:
    """Returns why the kernels cannot be used for these tensors where they are traced, or an empty string."""
    loaded = native.kernels()
    if loaded.library is None:
        return loaded.missing
    if any(t.dtype != tf.float32 or t.shape.rank not in ranks for t in tensors):
        return f"they are for {'sequences' if 3 in ranks else 'images'} in float32"
    if compiled():
        return "XLA compiles the step"
    # A v1 graph may be sent to another process, which does not have the ops (as TFF does).
    if not tf.compat.v1.executing_eagerly_outside_functions():
        return "the graph is not one of TensorFlow 2"
    if any(device.device_type != "CPU" for device in tf.config.get_visible_devices()):
        return "TensorFlow has another device than the CPU"
    return native.register_ops()


def made(op: str, settings: tuple[int, ...], **inputs: tf.Tensor) -> Any:
    """Returns what an op makes with these settings, as many threads as are allowed, and the processor's
    instructions."""
    instructions = native.INSTRUCTIONS.index(native.kernels().instructions)
    return op_def_library.apply_op(op, settings=[*settings, native.count_threads(), instructions], **inputs)


def squared_row_norms(ids: tf.Tensor, rows: tf.Tensor, vocabulary: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the squared norm of what each unit's rows add up to in a table, [units], and the sum of the squared norms
    of those rows that are not alone with their id, [units].

    Args:
      ids: int64 [units, length], of the table's rows; those that it does not have count for nothing.
      rows: float32 [units, length, width].
      vocabulary: how many rows the table has.
    """
    norms, shared = made(ROWS, (vocabulary,), ids=ids, rows=rows)
    norms.set_shape([rows.shape[0]])
    shared.set_shape([rows.shape[0]])
    return norms, shared


def _refuse(op: tf.Operation, *_: tf.Tensor) -> None:
    raise NotImplementedError(
        f"{op.type} has no gradient, so you cannot differentiate through clipped gradients. Set {native.SWITCH}=0 to "
        "use TensorFlow's own ops, which have gradients."
    )


for _name in (*FILTERS, ROWS):
    tf.RegisterGradient(_name)(_refuse)
