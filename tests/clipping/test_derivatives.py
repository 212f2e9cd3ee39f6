"""Gradients in fewer ops than TensorFlow's own are the same gradients, and are taken of the ops that they hold for."""

import operator

import pytest
import tensorflow as tf
from helpers import check, example_losses, normal
from loop_cases import A, R, over_time, zeros
from loop_cases import X as SEQUENCES

from tfdpfl.clipping import clipped_gradients
from tfdpfl.clipping.derivatives import gradient_of
from tfdpfl.clipping.states import Batch, Public

W, V = tf.Variable(normal(3, 4)), tf.Variable(normal(3, 4, seed=1))
NARROW = tf.Variable(normal(3, 1, seed=2))
X = normal(5, 3)
TWO = [operator.add, operator.sub, operator.mul, operator.truediv, tf.raw_ops.Add]


def apply(f, x, y):
    return f(x=x, y=y) if f is tf.raw_ops.Add else f(x, y)


def ops_of(losses, variables, x=X):
    """The types of the ops of a step, and those with a gradient that was set."""
    spec = tf.TensorSpec([None, *x.shape[1:]])
    step = tf.function(lambda x: clipped_gradients(tf.reduce_mean(losses(x)), variables, 1.0).norms)
    ops = step.get_concrete_function(spec).graph.get_operations()
    return [op.type for op in ops], [op for op in ops if op.type != "PartitionedCall" and op._gradient_function]


@pytest.mark.parametrize("f", TWO)
def test_terms_with_as_many_rows_have_their_gradients_without_a_look_for_broadcasts(f):
    def losses(x):
        a, b, narrow = tf.matmul(x, W), 3.0 + tf.sigmoid(tf.matmul(x, V)), 3.0 + tf.sigmoid(tf.matmul(x, NARROW))
        whole, right, left = apply(f, a, b), apply(f, a, narrow), apply(f, tf.sigmoid(narrow), b)
        return example_losses([whole, right, left])

    check(losses, X, [W, V, NARROW])
    types, left = ops_of(losses, [W, V, NARROW])
    assert "BroadcastGradientArgs" not in types
    assert not left  # the user's ops have TensorFlow's gradient afterwards


@pytest.mark.parametrize("f", TWO)
def test_rows_of_matrices_keep_the_axes_apart(f):
    """[batch, 3, 1] with [batch, 1, 4]: each is repeated along another axis."""

    def losses(x):
        a, b = tf.matmul(x, W)[:, None, :], 3.0 + tf.sigmoid(x[:, :, None] * tf.matmul(x, NARROW)[:, :, None])
        return example_losses(apply(f, a, b))

    check(losses, X, [W, NARROW])


def test_a_length_that_only_the_step_knows_may_be_one_of_a_repeated_term():
    x, y = normal(5, 4), normal(5, 1, seed=1)
    scale = tf.Variable(1.5)

    def losses(xy):
        a, b = xy
        return example_losses(tf.sin(scale * a) * tf.sin(scale * b + 1.0))

    check(losses, (x, y), [scale], free=True)


@pytest.mark.parametrize(("first", "second", "shapes", "found"), [
    (Batch(0), Batch(0), ([None, 4], [None, 4]), True),
    (Batch(1), Batch(1), ([4, None], [4, None]), True),
    (Batch(0, 2), Batch(0, 2), ([None, 4], [None, 1]), True),
    (Batch(0, None), Batch(0, None), ([None, 4], [None, 4]), False),
    (Batch(0, 2), Batch(0, 1), ([None, 4], [None, 4]), False),
    (Batch(0), Batch(0, 1, 2), ([None, 4], [None, 4]), False),
    (Batch(0), Public(), ([None, 4], [None, 4]), False),
    (Batch(0, None), Public(), ([None, 4], [1, 4]), True),
    (Public(), Batch(0), ([4], [None, 1]), True),
    (Public(), Batch(0), ([4], [None, None]), False),
    (Public(), Public(), ([None, 4], [None, 4]), False),
    (Batch(0), Batch(0), ([None, None], [None, 4]), False),
    (Batch(0), Batch(0), ([None, 4], [None, None]), False),
    (Batch(0), Batch(0), ([None, 4], [1, 4]), False),
    (Batch(1), Batch(0), ([4, None], [None]), False),
])  # fmt: skip
def test_a_gradient_is_known_of_inputs_with_the_same_rows_alone(first, second, shapes, found):
    with tf.Graph().as_default():
        x, y = (tf.compat.v1.placeholder(tf.float32, shape) for shape in shapes)
        assert (gradient_of((x * y).op, [first, second]) is not None) == found
        assert gradient_of((x > y).op, [first, second]) is None


def test_of_complex_numbers_and_of_a_gradient_of_its_own_tensorflows_gradient_is_taken():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.complex64, [None, 4])
        assert gradient_of((x * x).op, [Batch(0), Batch(0)]) is None
        x = tf.compat.v1.placeholder(tf.float32, [None, 4])
        with graph.gradient_override_map({"Mul": "Add"}):
            assert gradient_of((x * x).op, [Batch(0), Batch(0)]) is None


def test_a_loops_terms_and_items_take_no_ops_for_their_shapes():
    def losses(x):
        def turn(t, each, s):
            h, outputs = s
            h = tf.tanh(h + h * tf.matmul(h, R))
            return h, outputs.write(0, h)

        outputs = tf.TensorArray(tf.float32, 1, clear_after_read=False, element_shape=[None, 3])
        h, outputs = over_time(x, turn, (tf.matmul(x[:, 0], A), outputs))
        return example_losses([outputs.stack()[0], h])

    check(losses, SEQUENCES, [A, R])
    graph = tf.function(lambda x: clipped_gradients(tf.reduce_mean(losses(x)), [A, R], 1.0).sum).get_concrete_function(
        tf.TensorSpec([None, *SEQUENCES.shape[1:]])).graph  # fmt: skip
    backward = [op for op in graph.get_operations() if op.type.endswith("While")][-1]
    types = {op.type for op in backward._body_graph.get_operations()}
    assert not types & {"BroadcastGradientArgs", "Shape", "TensorListElementShape", "TensorListLength", "Sum"}, types


def test_an_item_that_was_overwritten_has_no_gradient():
    """A turn reads what the turn before wrote in the same place, and writes another item there."""

    def losses(x):
        def turn(t, each, items):
            return items.write(0, tf.tanh(tf.matmul(each, A) + tf.matmul(items.read(0), R)))

        items = tf.TensorArray(tf.float32, 1, clear_after_read=False, element_shape=[None, 3]).write(0, zeros(x))
        return example_losses(over_time(x, turn, items).stack()[0])

    check(losses, SEQUENCES, [A, R])
