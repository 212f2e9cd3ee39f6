"""Connectionist temporal classification (Graves et al. 2006): an example's loss is of its own frames and labels."""

from __future__ import annotations

import tensorflow as tf

from tfdpfl.clipping.batch_axis import BatchAxis
from tfdpfl.clipping.registry import ends_gradient
from tfdpfl.clipping.rows import row_free
from tfdpfl.clipping.states import Batch, Public, State


@ends_gradient("ctc_loss_dense.")
def dense(view: BatchAxis, op: tf.Operation, states: list[State]) -> list[State] | None:
    """tf.nn.ctc_loss with dense labels: [batch] losses, from frames [time, batch, classes], labels and two lengths.

    The sum over alignments is computed time step by time step in an order that is not followed. TensorFlow keeps the
    loss's gradient by the frames beside it, and that is each example's own, too.
    """
    _, frames, *others = states
    if frames != Batch(1) or len(others) != 3:
        return None
    for t, s in zip(op.inputs[2:], others, strict=True):
        if s != Batch(0) and not (isinstance(s, Public) and row_free(view, t, s, -t.shape.rank)):
            return None
    return [Batch(0), frames, *others]
