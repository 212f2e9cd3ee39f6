"""Gradients of a weight carried back to the variable that it was made of: a transposed table, a scaled kernel, a weight
that is used in two places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdpfl.clipping.gradients import Contribution, EmbeddingGradient, OuterProductGradient
from tfdpfl.clipping.graph import constant, key
from tfdpfl.clipping.registry import look_up

__all__ = [
    "Part",
    "carried_back",
    "chain",
    "formed_at_roots",
    "inner_product",
    "isometric",
    "unmoved",
    "vocabulary_side",
]


class Part(NamedTuple):
    """Holds what one use of a variable, or several as one, adds to each unit's gradient.

    ``made``: the units' gradients of ``weight``, which follows from ``root``, a read of the variable or the tensor that
    stands for it; ``variable``: its number; ``op``: what uses it; ``replayed``: whether there was no rule for that.
    """

    made: Contribution
    weight: tf.Tensor
    root: tf.Tensor
    variable: int
    op: str
    replayed: bool


def links(weight: tf.Tensor, root: tf.Tensor) -> Iterator[tf.Operation]:
    """The ops that make a weight of its root by their first inputs, the last first."""
    while weight is not root:
        yield weight.op
        weight = weight.op.inputs[0]


def isometric(weight: tf.Tensor, root: tf.Tensor) -> bool:
    """Whether the weight is the root's entries moved about (or negated), so that gradients keep their norm."""
    return all(map(_is_isometric, links(weight, root)))


def _is_isometric(op: tf.Operation) -> bool:
    known = look_up(op)
    if known.order is None and known.undo is None:
        return False
    source, to = op.inputs[0].dtype, op.outputs[0].dtype
    return source == to or (source.is_floating and to.is_floating)  # else a Cast has no gradient


def unmoved(weight: tf.Tensor, root: tf.Tensor) -> bool:
    """Whether the weight is the root itself, whatever its type."""
    return all(
        _is_isometric(op) and (order := _order(op)) is not None and _is_sorted(order) for op in links(weight, root)
    )


def _order(op: tf.Operation) -> Sequence[int] | None:
    """In which order an op puts the axes of its first input, if it does no more than that."""
    order = look_up(op).order
    return None if order is None else order(op)


def _is_sorted(order: Sequence[int]) -> bool:
    return list(order) == sorted(order)


def chain(weight: tf.Tensor, root: tf.Tensor) -> tuple:
    """Returns what happens between the root and the weight, to tell whether two uses read the same entries."""
    found = []
    for op in links(weight, root):
        values = [constant(x) for x in list(op.inputs)[1:]]
        known = tuple(v.tobytes() for v in values if v is not None)
        found.append((op.type, tuple(op.outputs[0].shape), known if len(known) == len(values) else op.name))
    return tuple(found)


def vocabulary_side(first: Part, second: Part) -> tuple[tf.Tensor, tf.Tensor] | None:
    """Of a table [V, D] that is looked up and multiplied: the sides [U, S, V] and [U, S, D] of the product's
    `OuterProductGradient`; None if the two uses are something else."""
    lookup, outer = first.made, second.made
    if not isinstance(lookup, EmbeddingGradient) or not isinstance(outer, OuterProductGradient):
        return None
    if outer.same[:2] != ("product", ()):
        return None
    if any(t.shape.rank != 2 for t in (first.weight, second.weight, second.root)):
        return None
    turns, moved = turned_over(second.weight, second.root), turned_over(first.weight, first.root)
    if turns is None or moved is not False:
        return None
    if outer.same[2] == (1, 0):
        turns = not turns
    return (outer.g, outer.a) if turns else (outer.a, outer.g)


def turned_over(weight: tf.Tensor, root: tf.Tensor) -> bool | None:
    """Whether a matrix is the root transposed; None if it is more than the root or that."""
    turned = False
    for op in links(weight, root):
        order = _order(op)
        if order is None:
            return None
        turned ^= not _is_sorted(order)
    return turned


def inner_product(first: Part, second: Part) -> tf.Tensor:
    """<gradient of the lookups, gradient of the products>, [U], of a table used in both ways: the rows looked up, t,
    against the product's positions, s."""
    sides = vocabulary_side(first, second)
    assert sides is not None and isinstance(first.made, EmbeddingGradient)
    wide, narrow = sides
    entries = tf.gather(wide, first.made.ids, axis=2, batch_dims=1)  # [U, S, T]
    return tf.reduce_sum(entries * tf.matmul(narrow, first.made.g, transpose_b=True), [1, 2])


def carried_back(x: tf.Tensor, weight: tf.Tensor, root: tf.Tensor, units: bool) -> tf.Tensor | None:
    """A gradient of the weight, [*its shape], carried back to the root; with ``units`` each unit's, [U, *shape]. None
    if the weight is more than the root's entries moved about."""
    if not isometric(weight, root):
        return None
    for op in links(weight, root):
        moved = _undone(op, x, units)
        if moved is None:
            return None
        x = moved
    return x


def _undone(op: tf.Operation, x: tf.Tensor, units: bool) -> tf.Tensor | None:
    """A gradient of an op's output carried back to its first input."""
    undo, order = look_up(op).undo, _order(op)
    if undo is not None:
        return undo(op, x, units)
    if order is None:
        return None
    if _is_sorted(order):
        return x
    back = [int(i) + units for i in np.argsort(order)]
    return tf.transpose(x, [0, *back] if units else back)


def formed_at_roots(
    parts: Sequence[Part], shape_of: Callable[[tf.Tensor], tf.TensorShape]
) -> dict[tuple[str, int], tf.Tensor]:
    """Each unit's gradient of each root, [U, *its variable's shape], by the root's key; nothing for roots that have
    none. A weight that is made of several roots is in a part for each of them."""
    uses: dict[tuple[str, int], tuple[tf.Tensor, dict[int, Contribution], dict]] = {}
    for part in parts:
        _, made, roots = uses.setdefault(key(part.weight), (part.weight, {}, {}))
        made[id(part.made)], roots[key(part.root)] = part.made, part.root
    terms: dict[tuple[str, int], list[tf.Tensor]] = {}
    left = []
    for w, made, roots in uses.values():
        f = tf.add_n([c.formed() for c in made.values()])
        (root, *others) = roots.values()
        moved = None if others else carried_back(f, w, root, units=True)
        if moved is None:
            left.append((f, w, roots))
        else:
            terms.setdefault(key(root), []).append(moved)
    for together in _connected(left):
        roots = {at: r for _, _, own in together for at, r in own.items()}
        fs, weights = [f for f, _, _ in together], [w for _, w, _ in together]
        pulled = _pulled_back(fs, weights, list(roots.values()), [shape_of(r) for r in roots.values()])
        for at, f in zip(roots, pulled, strict=True):
            if f is not None:
                terms.setdefault(at, []).append(f)
    return {at: tf.add_n(found) for at, found in terms.items()}


def _connected(uses: Iterable[tuple]) -> list[list[tuple]]:
    """The uses in groups that have no root in common."""
    groups: list[tuple[set, list[tuple]]] = []
    for use in uses:
        roots, members = set(use[2]), [use]
        apart = []
        for group in groups:
            if roots.isdisjoint(group[0]):
                apart.append(group)
            else:
                roots, members = roots | group[0], group[1] + members
        groups = [*apart, (roots, members)]
    return [members for _, members in groups]


def _pulled_back(
    fs: list[tf.Tensor], weights: list[tf.Tensor], roots: list[tf.Tensor], shapes: list[tf.TensorShape]
) -> list[tf.Tensor | None]:
    """Each unit's gradients of the weights, [U, *shape] each, carried back to all roots at once: one pass through the
    graph, however many weights are made of however many roots."""
    dtype = fs[0].dtype
    found: list[int] = []

    def one(gradients):
        ends = [tf.cast(g, w.dtype) for g, w in zip(gradients, weights, strict=True)]
        ds = tf.gradients(weights, roots, ends, stop_gradients=roots)
        found[:] = [i for i, d in enumerate(ds) if d is not None]
        return [tf.cast(tf.convert_to_tensor(ds[i]), dtype) for i in found] or [tf.zeros([], dtype)]

    try:
        made = tf.vectorized_map(one, fs, fallback_to_while_loop=False)
    except ValueError:  # an op that TensorFlow cannot vectorise
        made = tf.map_fn(one, fs, fn_output_signature=[tf.TensorSpec(shapes[i], dtype) for i in found])
    result: list[tf.Tensor | None] = [None] * len(roots)
    for i, f in zip(found, made, strict=False):
        result[i] = tf.ensure_shape(f, [fs[0].shape[0], *shapes[i]])
    return result
