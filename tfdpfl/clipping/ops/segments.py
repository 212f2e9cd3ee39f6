"""Sums, means, maxima and products of the entries that have one number in common."""

from __future__ import annotations

import tensorflow as tf

from tfdpfl.clipping.registry import View, batching_rule
from tfdpfl.clipping.states import Batch, State, mixed

__all__: list[str] = []

SEGMENTS = frozenset(
    """SegmentMax SegmentMaxV2 SegmentMean SegmentMin SegmentMinV2 SegmentProd SegmentProdV2 SegmentSum SegmentSumV2
    UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum""".split()
)


@batching_rule(*SEGMENTS, data=0)
def segments(view: View, op: tf.Operation, states: list[State]) -> State | None:
    """As of the edges of a public graph: the numbers are public, and of axes before the batch's."""
    state, numbered = states[0], op.inputs[1].shape.rank
    if not isinstance(state, Batch):
        return None
    if numbered is None:
        return mixed(op, "has a shape of unknown rank")
    if state.axis < numbered:
        return mixed(op, "reduces over the batch")
    return Batch(state.axis - numbered + 1, state.rows)
