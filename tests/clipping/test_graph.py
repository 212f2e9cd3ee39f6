"""Ops are the same where their types, attributes and inputs are."""

import pytest
import tensorflow as tf

from tfdpfl.clipping.graph import same


def turned(x, y, change=lambda turn: turn - 1.0, go_on=lambda i: i < 3, hand=lambda i, a: (i + 1, a)):
    return tf.while_loop(lambda i, a: go_on(i), lambda i, a: hand(i, change(a) * y), [0, x])[1]


@pytest.mark.parametrize(("other", "alike"), [
    (lambda x, y: turned(x, y), True),
    (lambda x, y: turned(y, x), False),
    (lambda x, y: turned(x, y) + 1, False),
    (lambda x, y: turned(x, y, lambda a: a - 2.0), False),
    (lambda x, y: turned(x, y, lambda a: 1.0 - a), False),
    (lambda x, y: turned(x, y, lambda a: a + 1.0), False),
    (lambda x, y: turned(x, y, lambda a: a - 1.0 + y), False),
    (lambda x, y: turned(x, y, go_on=lambda i: i < 4), False),
    (lambda x, y: turned(x, y, hand=lambda i, a: (i + 1, a if a is None else y)), False),
    (lambda x, y: tf.linalg.matmul(turned(x, y), y), False),
])  # fmt: skip
def test_the_same_graph_is_the_same_op_by_op(other, alike):
    x, y = (tf.TensorSpec([2, 2]) for _ in range(2))
    given, like = (tf.function(f, autograph=False).get_concrete_function(x, y).graph for f in (other, turned))
    known = dict(zip([t.op.name for t in like.inputs], given.inputs, strict=True))
    assert same(given.outputs[0], like.outputs[0], known) == alike


def test_the_same_op_of_other_attributes_or_outputs_is_another():
    def graph(f):
        return tf.function(f, autograph=False).get_concrete_function(tf.TensorSpec([4, 4])).graph

    def compared(f, g):
        a, b = graph(f), graph(g)
        return same(a.outputs[0], b.outputs[0], {b.inputs[0].op.name: a.inputs[0]})

    assert compared(lambda x: tf.matmul(x, x), lambda x: tf.matmul(x, x))
    assert not compared(lambda x: tf.matmul(x, x), lambda x: tf.matmul(x, x, transpose_a=True))
    assert not compared(lambda x: tf.split(x, 2)[0], lambda x: tf.split(x, 2)[1])
    assert not compared(lambda x: tf.add_n([x, x]), lambda x: tf.add_n([x, x, x]))
