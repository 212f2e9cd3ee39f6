"""Connectionist temporal classification (Graves et al. 2006): an example's loss is of its own frames and labels."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfdpfl.clipping import graph as graph_tools
from tfdpfl.clipping.registry import Move, View, ends_gradient, teach
from tfdpfl.clipping.rows import row_free
from tfdpfl.clipping.states import Batch, Entries, Public, State

__all__: list[str] = []


@ends_gradient("ctc_loss_dense.")
def dense(view: View, op: tf.Operation, states: list[State]) -> list[State] | None:
    """tf.nn.ctc_loss with dense labels: [batch] losses, from frames [time, batch, classes], labels and two lengths.

    The sum over alignments is computed time step by time step in an order that is not followed. TensorFlow keeps the
    loss's gradient by the frames beside it, and that is each example's own, too.
    """
    _, frames, *others = states
    if frames != Batch(1) or len(others) != 3 or not all(map(lambda t, s: _own(view, t, s), op.inputs[2:], others)):
        return None
    return [Batch(0), frames, *others]


def sparse(view: View, op: tf.Operation, states: list[State]) -> list[State] | None:
    """With sparse labels: frames [time, batch, classes], where labels are ([example, place] of each), the labels, and
    how many frames are an example's."""
    frames, places, values, lengths = states
    if frames != Batch(1) or not _own(view, op.inputs[3], lengths):
        return None
    if isinstance(places, Entries) and places.places and values == dataclasses.replace(places, places=False):
        return [Batch(0), frames]
    return [Batch(0), frames] if _as_keras_does(view, *op.inputs[1:3]) else None


def _own(view: View, t: tf.Tensor, state: State) -> bool:
    """Whether each example has a row of its own, or all have the same."""
    return state == Batch(0) or (isinstance(state, Public) and row_free(t, state, -t.shape.rank))


def _as_keras_does(view: View, places: tf.Tensor, values: tf.Tensor) -> bool:
    """Whether this is what Keras 2's ctc_batch_cost makes of labels and their numbers. It asks example by example which
    labels are within the length, in a loop. Nothing else that loops over examples is followed, so this one is known by
    being the same graph, op by op."""
    convert = getattr(tf.keras.backend, "ctc_label_dense_to_sparse", None)
    values, places = (graph_tools.source(t, "Identity", "Cast") for t in (values, places))
    listed = [op for op in graph_tools.ancestors([places]).values() if op.type == "TensorListFromTensor"]
    if convert is None or values.op.type != "GatherNd" or len(listed) != 1:
        return False
    given = [values.op.inputs[0], listed[0].inputs[0]]
    if any(view[t] != Batch(0) for t in given):
        return False

    def converted(*made: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        labels = convert(*made)
        return labels.indices, labels.values

    of = [tf.TensorSpec(t.shape, t.dtype) for t in given]
    like = tf.function(converted, autograph=False).get_concrete_function(*of).graph
    known = dict(zip([t.op.name for t in like.inputs], given, strict=True))
    return all(
        graph_tools.same(t, graph_tools.source(other, "Identity", "Cast"), known)
        for t, other in zip((places, values), like.outputs, strict=True)
    )


# -- the records ------------------------------------------------------------------------------------------------------

teach("CTCLoss", "CTCLossV2", moves=Move(sparse, data=None, mixed=True, entries=True))
