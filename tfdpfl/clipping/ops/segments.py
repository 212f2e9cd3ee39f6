"""Sums, means, maxima and products of the entries that have one number in common."""

from __future__ import annotations

import tensorflow as tf

from tfdpfl.clipping.registry import View, moves_examples, teach
from tfdpfl.clipping.states import Batch, State, meeting, mixed

__all__: list[str] = []


def segments(view: View, op: tf.Operation, state: Batch) -> State:
    """As of the edges of a public graph: the numbers are public, and of axes before the batch's."""
    numbered = op.inputs[1].shape.rank
    if numbered is None:
        return mixed(op, "has a shape of unknown rank")
    if state.axis < numbered:
        return meeting(op, "reduces over the batch")
    return Batch(state.axis - numbered + 1, state.rows)


# -- the records ------------------------------------------------------------------------------------------------------

teach(
    *"""SegmentMax SegmentMaxV2 SegmentMean SegmentMin SegmentMinV2 SegmentProd SegmentProdV2 SegmentSum SegmentSumV2
    UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum""".split(),
    moves=moves_examples(segments),
)
