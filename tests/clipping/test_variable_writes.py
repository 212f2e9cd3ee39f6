"""Which ops may write to a variable, by what TensorFlow then does to it."""

import pytest
import tensorflow as tf

from tfdpfl.clipping.graph import body_graphs
from tfdpfl.clipping.variable_writes import assigns


def add(handle):
    tf.raw_ops.AssignAddVariableOp(resource=handle, value=1.0)
    return 0


def read(handle):
    return tf.cast(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32), tf.int32)


def turns(body, *handles):
    tf.while_loop(lambda i, *handles: i < 2, lambda i, *handles: (i + 1, *body(*handles)), (0, *handles))
    return 0


CASES = {
    "call": (lambda v, w: tf.function(lambda: add(v) + read(w))(), "v"),
    "branch": (lambda v, w: tf.cond(tf.random.uniform([]) < 2, lambda: add(v), lambda: read(w)), "v"),
    "loop": (lambda v, w: turns(lambda: (add(v) + read(w), [])[1]), "v"),
    "loop in a loop": (lambda v, w: turns(lambda: (turns(lambda: (add(v) + read(w), [])[1]), [])[1]), "v"),
    "call in a branch": (
        lambda v, w: tf.cond(tf.random.uniform([]) < 2, tf.function(lambda: add(v) + read(w)), lambda: 0), "v"),
    "another name": (lambda v, w: tf.function(lambda: add(tf.identity(v)) + read(tf.identity(w)))(), "v"),
    "given out": (lambda v, w: tf.function(lambda: add(tf.function(lambda: v)()) + read(w))(), "v"),
    "in turn": (lambda v, w: turns(lambda a, b: (add(a), (b, a))[1], v, w), "vw"),
    "reads only": (lambda v, w: turns(lambda a, b: (read(a) + read(b), (a, b))[1], v, w), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_said_to_be_written_is_what_tensorflow_writes(name):
    do, named = CASES[name]
    v, w = tf.Variable(0.0), tf.Variable(0.0)
    function = tf.function(lambda: (do(v.handle, w.handle), 0)[1]).get_concrete_function()
    function()
    assert named == "".join(name for name, variable in (("v", v), ("w", w)) if variable.numpy())
    captured = {id(inside): name for name, variable in (("v", v), ("w", w))
                for outside, inside in function.graph.captures if outside is variable.handle}  # fmt: skip
    said = {
        captured[id(t)]
        for op in function.graph.get_operations() if any(body_graphs(op))
        for at, t in enumerate(op.inputs) if id(t) in captured and assigns(op, at)
    }  # fmt: skip
    assert said == set(named)


@pytest.mark.parametrize("written", ["", "v", "w", "vw"])
def test_the_gradient_of_a_call_may_write_what_the_call_writes(written):
    """TensorFlow makes such an op where it has no other gradient of a call; on most machines it cannot run it."""

    @tf.function(input_signature=[tf.TensorSpec([], tf.resource)] * 2 + [tf.TensorSpec([])])
    def body(v, w, x):
        for name, handle in zip("vw", (v, w), strict=True):
            add(handle) if name in written else read(handle)
        return x

    called = body.get_concrete_function()
    with tf.Graph().as_default() as graph:
        called.add_to_graph()
        handles = [tf.compat.v1.placeholder(tf.resource, []) for _ in "vw"]
        tf.raw_ops.SymbolicGradient(input=[*handles, 1.0, 1.0], Tout=[tf.float32] * 3, f=called)
    op = next(op for op in graph.get_operations() if op.type == "SymbolicGradient")
    assert written == "".join(name for at, name in enumerate("vw") if assigns(op, at))
    assert not assigns(op, 3)
