"""Sums over public segments of an example's own entries are exact, and of examples are refused."""

import pytest
import tensorflow as tf
from helpers import L
from mixing_cases import check_exact, check_told, d, n, total


def over_edges(reduce, *how):
    """Messages along the edges of a graph of three nodes, [batch, nodes, features]."""
    return lambda x: tf.transpose(reduce(tf.gather(tf.transpose(x, [1, 0, 2]), [0, 1, 2, 2]), *how), [1, 0, 2])


MIXING = {
    "segments": lambda x: total(tf.math.segment_sum(d(x), tf.constant([0, 0, 1, 1]))),
    "segments by example": lambda x: total(
        tf.math.unsorted_segment_sum(d(x), tf.cast(x[:, 0] > 0, tf.int32), n(x))),
    "segments of whole rows": lambda x: total(tf.math.unsorted_segment_max(
        tf.transpose(d(x)), tf.tile([[0], [1], [0], [1]], [1, n(x)]), 2)),
}  # fmt: skip
TOLD = {
    "segments": "SegmentSum.*reduces over the batch",
    "segments by example": "has settings that depend on examples",
    "segments of whole rows": "UnsortedSegmentMax",
}

ALLOWED = {
    "sums over edges": over_edges(tf.math.unsorted_segment_sum, [1, 2, 0, 1], 3),
    "means over edges": over_edges(tf.math.unsorted_segment_mean, [1, 2, 0, 1], 3),
    "largest over edges": over_edges(tf.math.unsorted_segment_max, [1, 2, 0, 1], 3),
    "sums over sorted edges": over_edges(tf.math.segment_sum, [0, 1, 1, 2]),
}  # fmt: skip


@pytest.mark.parametrize(("name", "message"), TOLD.items(), ids=TOLD)
def test_a_refusal_names_the_op_and_the_reason(name, message):
    check_told(MIXING[name], message)


@pytest.mark.slow
@pytest.mark.one_stack
def test_what_keeps_examples_apart_is_exact():
    check_exact(*map(L.Lambda, ALLOWED.values()))
