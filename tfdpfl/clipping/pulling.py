"""Gradients of a weight carried back to the variable that it was made of: a transposed table, a scaled kernel, a weight
that is used in two places."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfdpfl.clipping.gradients import Contribution, Lookup, Outer
from tfdpfl.clipping.graph import constant

_UNMOVED = frozenset("Identity Cast Snapshot".split())
_ISOMETRIC = _UNMOVED | frozenset("Reshape ExpandDims Squeeze Transpose Neg".split())


def _rounds(op: tf.Operation) -> bool:
    """Whether a Cast goes to or from what has no gradient."""
    return not (op.inputs[0].dtype.is_floating and op.outputs[0].dtype.is_floating)


def isometric(weight: tf.Tensor, root: tf.Tensor) -> bool:
    """Whether the weight is the root's entries moved about (or negated), so that gradients keep their norm."""
    t = weight
    while t is not root:
        if t.op.type not in _ISOMETRIC or (t.op.type == "Cast" and _rounds(t.op)):
            return False
        t = t.op.inputs[0]
    return True


def unmoved(weight: tf.Tensor, root: tf.Tensor) -> bool:
    """Whether the weight is the root itself, whatever its type."""
    return isometric(weight, root) and all(link[0] in _UNMOVED for link in chain(weight, root))


def chain(weight: tf.Tensor, root: tf.Tensor) -> tuple:
    """What happens between the root and the weight, to tell whether two uses read the same entries."""
    links = []
    t = weight
    while t is not root:
        values = [constant(x) for x in list(t.op.inputs)[1:]]
        known = [v.tobytes() for v in values if v is not None]
        links.append((t.op.type, tuple(t.shape), tuple(known) if len(known) == len(values) else t.op.name))
        t = t.op.inputs[0]
    return tuple(links)


Part = tuple[Contribution, tf.Tensor, tf.Tensor]


def vocabulary_side(first: Part, second: Part) -> tuple[tf.Tensor, tf.Tensor] | None:
    """Of a table [V, D] that is looked up and multiplied: the sides [U, S, V] and [U, S, D] of the product's `Outer`;
    None if the two uses are something else."""
    (lookup, table, _), (outer, weight, root) = first, second
    if not isinstance(lookup, Lookup) or not isinstance(outer, Outer) or outer.same[:2] != ("product", ()):
        return None
    if table.shape.rank != 2 or weight.shape.rank != 2 or root.shape.rank != 2:
        return None
    turns, moved = turned_over(weight, root), turned_over(table, first[2])
    if turns is None or moved is not False:
        return None
    if outer.same[2] == (1, 0):
        turns = not turns
    return (outer.g, outer.a) if turns else (outer.a, outer.g)


def turned_over(weight: tf.Tensor, root: tf.Tensor) -> bool | None:
    """Whether a matrix is the root transposed; None if it is more than the root or that."""
    turned, t = False, weight
    while t is not root:
        if t.op.type == "Transpose":
            order = constant(t.op.inputs[1])
            if order is None:
                return None
            turned ^= order.tolist() == [1, 0]
        elif t.op.type not in _UNMOVED:
            return None
        t = t.op.inputs[0]
    return turned


def inner_product(first: Part, second: Part) -> tf.Tensor:
    """<gradient of the lookups, gradient of the products>, [U], of a table used in both ways: the rows looked up, t,
    against the product's positions, s."""
    sides = vocabulary_side(first, second)
    assert sides is not None and isinstance(first[0], Lookup)
    wide, narrow = sides
    entries = tf.gather(wide, first[0].ids, axis=2, batch_dims=1)  # [U, S, T]
    return tf.reduce_sum(entries * tf.matmul(narrow, first[0].g, transpose_b=True), [1, 2])


def carried_back(x: tf.Tensor, weight: tf.Tensor, root: tf.Tensor, units: bool) -> tf.Tensor | None:
    """A gradient of the weight, [*its shape], carried back to the root; with ``units`` each unit's, [U, *shape]. None
    if the weight is more than the root's entries moved about."""
    if not isometric(weight, root):
        return None
    lead = [x.shape[0] or -1] if units else []
    t = weight
    while t is not root:
        source = t.op.inputs[0]
        if t.op.type == "Transpose":
            order = constant(t.op.inputs[1])
            if order is None:
                return None
            back = [int(i) + len(lead) for i in np.argsort(order)]
            x = tf.transpose(x, [*range(len(lead)), *back])
        elif t.op.type == "Neg":
            x = -x
        elif t.op.type not in _UNMOVED:  # a new shape
            if not source.shape.is_fully_defined():
                return None
            x = tf.reshape(x, [*lead, *source.shape])
        t = source
    return x


def pullback(f: tf.Tensor, weight: tf.Tensor, root: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor | None:
    """Each unit's gradient of the weight [U, *shape] carried back to the root [U, *its variable's shape]."""
    moved = carried_back(f, weight, root, units=True)
    if moved is not None:
        return moved
    (probe,) = tf.gradients([weight], [root], [tf.zeros_like(weight)])
    if probe is None:
        return None

    def one(gradient):
        (d,) = tf.gradients([weight], [root], [tf.cast(gradient, weight.dtype)])
        return tf.cast(tf.convert_to_tensor(d), f.dtype)

    try:
        result = tf.vectorized_map(one, f, fallback_to_while_loop=False)
    except ValueError:  # an op that TensorFlow cannot vectorise
        result = tf.map_fn(one, f)
    return tf.ensure_shape(result, [f.shape[0], *shape])
