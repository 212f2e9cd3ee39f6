"""Ops that read shapes, and those that give entries a new shape or repeat them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfdpfl.clipping.gradients import Contribution, Units, Use, dims_of, reshaped, summed_to
from tfdpfl.clipping.graph import constant, input_rank, key, output_rank
from tfdpfl.clipping.loss import PerExampleLoss, Term
from tfdpfl.clipping.ops.slices import Slicing
from tfdpfl.clipping.registry import Move, View, moves_examples, teach
from tfdpfl.clipping.rows import axis_in, even, laid_along, of_blocks, shape_entries, shaped
from tfdpfl.clipping.states import (
    UNKNOWN,
    Batch,
    Entry,
    Mixed,
    Public,
    Size,
    State,
    counts_examples,
    deps,
    meeting,
    mixed,
)

__all__: list[str] = []

# -- shapes, and numbers made of them ----------------------------------------------------------------------------


def shape(view, op, states):
    return Size(shape_entries(op.inputs[0], states[0]))


def shapes(view, op, states):
    return [Size(shape_entries(t, s)) for t, s in zip(op.inputs, states, strict=True)]


def size(view, op, states):
    entries = shape_entries(op.inputs[0], states[0])
    if any(p is None for _, p in entries):
        return Size((UNKNOWN,))
    cs = [c for c, _ in entries]
    return Size(((None if None in cs else int(np.prod(cs)), sum(p for _, p in entries)),))


def rank(view, op, states):
    known = input_rank(op) is not None or isinstance(states[0], Public)
    return Public() if known else mixed(op, "depends on a rank that is not known")


def const(view, op, states):
    value = constant(op.outputs[0])
    return Public(alike=value is not None and value.size > 0 and bool(np.all(value == value.flat[0])))


def numbered(view, op, states):
    if any(map(counts_examples, states)):
        return mixed(op, "numbers the examples by their position in the batch")
    return None


def stitched(view, op, states):
    """A shape made of others' entries, as the gradient of a sum makes it."""
    half = len(op.inputs) // 2
    entries: dict[int, Entry] = {}
    for places, t, state in zip(op.inputs[:half], op.inputs[half:], states[half:], strict=True):
        at = constant(places)
        known = isinstance(state, Public | Size) and t.shape.rank in (0, 1)
        if at is None or not known or len(view.entries(t)) != at.size:
            return None
        entries.update(zip(np.ravel(at).tolist(), view.entries(t), strict=True))
    whole = any(isinstance(s, Size) for s in states) and not deps(states) and set(entries) == set(range(len(entries)))
    return Size(tuple(entries[i] for i in range(len(entries)))) if whole else None


def filled(view, op, states):
    if isinstance(states[1], Public) and not states[1].deps:
        if input_rank(op) == 1 and output_rank(op) is None:
            return mixed(op, "has a shape of unknown rank")
        return shaped(op, view.entries(op.inputs[0])) if output_rank(op) else Public()
    return None


# -- new shapes --------------------------------------------------------------------------------------------------


def kept(view: View, op: tf.Operation, state: State) -> State:
    """As it was, of an op that gives out the same entries in the same order."""
    return state


def reshape(view: View, op: tf.Operation, state: Batch) -> State:
    rank, entries = output_rank(op), view.entries(op.inputs[1])
    if not rank:
        return mixed(op, "has a shape of unknown rank" if rank is None else "drops the batch axis")
    if len(entries) != rank:
        entries = tuple([UNKNOWN] * rank)
    axis = reshaped_axis(op, state, entries)
    if axis is None:
        return mixed(op, "moves examples across axes")
    whole = Batch(state.axis, of_blocks(state))
    found = reshaped_rows(view, op, whole, axis, entries)
    if state.blocks == 1 or not isinstance(found, Batch):
        return found
    return state if found == whole and state.rows is not None else mixed(op, "moves examples across axes")


def reshaped_public(view: View, op: tf.Operation, state: Public) -> State:
    free = all(power == 0 for _, power in view.entries(op.inputs[1]))
    return state if free else mixed(op, "gives public values a batch axis")


def reshaped_axis(op, state: Batch, entries: Sequence[Entry]) -> int | None:
    """Returns the place of the batch axis in the new shape."""
    old, new = op.inputs[0].shape.as_list(), op.outputs[0].shape.as_list()
    new = [n if n is not None or power != 0 else c for n, (c, power) in zip(new, entries, strict=True)]
    before = old[: state.axis]
    if any(d != 1 for d in before):  # the axes before the batch must stay as they are
        same = None not in before and new[: state.axis] == before and len(new) > state.axis
        return state.axis if same else None
    marked = [i for i, (_, power) in enumerate(entries) if power == 1]
    axis = next(iter(marked + [i for i, d in enumerate(new) if d != 1]), 0)
    return axis if all(d == 1 for d in new[:axis]) else None


def reshaped_rows(view, op, state: Batch, axis: int, entries: Sequence[Entry]) -> State:
    """The examples along an axis of the new shape, and how many rows each has."""
    coefficient, power = entries[axis]
    if power == 1:
        return Batch(axis, coefficient)
    inner, outer = op.inputs[0].shape[state.axis + 1 :].as_list(), op.outputs[0].shape[axis + 1 :].as_list()
    each = None if None in outer else int(np.prod(outer))
    if each in (0, 1) and None in inner:
        return Batch(axis, None)
    if each is not None and None not in inner and state.rows is not None:
        total = state.rows * int(np.prod(inner))
        return mixed(op, "cuts across examples") if each == 0 or total % each else Batch(axis, total // each)
    if inner == outer and None not in inner:
        return Batch(axis, state.rows)
    view.require_divisible(op.outputs[0], axis)
    return Batch(axis, None)


def summed_back(view: View, op: tf.Operation, met: Mixed) -> State | None:
    """TensorFlow's gradient of an operand that was broadcast. It is summed over the axes in which the operand has
    length 1, which only the running step knows (so that it is `Mixed`), and given the operand's shape."""
    total, shape = op.inputs[0].op, op.inputs[1]
    if total.type != "Sum" or (axes := total.inputs[1]).op.type != "BroadcastGradientArgs":
        return None
    of = axes.op.inputs[axes.value_index]
    if key(shape) not in (key(of), key(without_matrices(of))):
        return None
    g, state, entries = total.inputs[0], view[total.inputs[0]], view.entries(shape)
    if not isinstance(state, Batch) or state.blocks > 1 or None in (g.shape.rank, output_rank(op)):
        return None
    axis = state.axis + output_rank(op) - g.shape.rank
    if len(entries) != output_rank(op) or state.rows is None or axis < 0:
        return None
    same = entries[axis] == shape_entries(g, state)[state.axis]
    return Batch(axis, state.rows) if same else meeting(total, "sums over the batch")


def without_matrices(t: tf.Tensor) -> tf.Tensor:
    """The shape of which this is all but the last two entries, as the gradient of a product of matrices has it."""
    if t.op.type != "StridedSlice":
        return t
    begin, end, strides = (None if (value := constant(i)) is None else value.tolist() for i in t.op.inputs[1:])
    slicing = Slicing(t.op, 1, 1)
    plain = not any(slicing.has(mask, 0) for mask in ("end", "ellipsis", "new_axis", "shrink_axis"))
    starts = slicing.has("begin", 0) or begin == [0]
    return t.op.inputs[0] if plain and starts and (end, strides) == ([-2], [1]) else t


def expand_dims(view: View, op: tf.Operation, state: Batch) -> State:
    axis = axis_in(op.inputs[1], output_rank(op))
    if axis is None:
        return mixed(op, "moves examples across axes")
    return Batch(state.axis + (axis <= state.axis), state.rows, state.blocks)


def squeeze(view: View, op: tf.Operation, state: Batch) -> State:
    shape = op.inputs[0].shape
    dims = [d % shape.rank for d in op.get_attr("squeeze_dims")]
    if not dims:
        if any(d is None for i, d in enumerate(shape) if i != state.axis):
            return mixed(op, "squeezes axes that are not known beforehand")
        dims = [i for i, d in enumerate(shape) if d == 1]
    if state.axis in dims:
        return mixed(op, "drops the batch axis")
    return Batch(state.axis - sum(d < state.axis for d in dims), state.rows, state.blocks)


def transpose(view: View, op: tf.Operation, state: Batch) -> State:
    perm = view.constant(op.inputs[1])
    if perm is None:
        return mixed(op, "moves examples across axes")
    return Batch(list(perm).index(state.axis), state.rows)


def transposed_size(view: View, op: tf.Operation, state: Size) -> Size:
    perm, shape = view.constant(op.inputs[1]), op.inputs[0].shape
    if perm is None or not shape.is_fully_defined() or shape.num_elements() != len(state.entries):
        return state.blurred(len(state.entries))
    places = np.arange(len(state.entries)).reshape(shape).transpose(perm)
    return Size(tuple(state.entries[i] for i in np.ravel(places)))


# -- copies ------------------------------------------------------------------------------------------------------


def tile(view: View, op: tf.Operation, state: Batch) -> State:
    entries = view.entries(op.inputs[1])
    if len(entries) != input_rank(op) or entries[state.axis] != (1, 0):
        return mixed(op, "repeats the batch")
    return even(op, entries, state.axis) or state


def broadcast_to(view: View, op: tf.Operation, state: Batch) -> State:
    rank, entries = output_rank(op), view.entries(op.inputs[1])
    if rank is None:
        return mixed(op, "has a shape of unknown rank")
    if len(entries) != rank:
        return mixed(op, "has a shape that is not known beforehand")
    axis = state.axis + rank - input_rank(op)
    return even(op, entries, axis) or Batch(axis, state.rows)


def repeated(view: View, op: tf.Operation, state: Public) -> State | None:
    entries = view.entries(op.inputs[1])
    return laid_along(op, op.inputs[0], entries) if any(power != 0 for _, power in entries) else None


def one_hot(view, op, state):
    axis = op.get_attr("axis")
    axis = axis if axis >= 0 else input_rank(op)
    return Batch(state.axis + (axis <= state.axis), state.rows)


def broadcast(use: Use, units: Units) -> Contribution | None:
    """A weight that every example gets, such as the token of a class."""
    if use.at != 0 or None in use.shape.as_list():
        return None
    g, dims, copies = use.g, [], []
    own = [1] * (g.shape.rank - use.shape.rank) + use.shape.as_list()
    for entries, length, now in zip(own, g.shape, dims_of(g), strict=True):
        if entries in (1, length):
            dims.append(now)
        elif length is None:
            return None
        else:  # tiles of several entries: copies one after the other
            copies.append(len(dims))
            dims += [length // entries, entries]
    if copies:
        g = tf.reduce_sum(reshaped(g, dims), copies)
    return summed_to(g, use.out, use.shape, units)


# -- constants --------------------------------------------------------------------------------------------------


def integers(shape: np.ndarray) -> list[int]:
    """The entries of a shape, some of which may be unknown: then a ValueError says so."""
    return [int(n) for n in shape]


# -- weights that are made of variables ----------------------------------------------------------------------------


def permutation(op: tf.Operation) -> list[int] | None:
    order = constant(op.inputs[1])
    return None if order is None else order.tolist()


def in_old_shape(op: tf.Operation, x: tf.Tensor, units: bool) -> tf.Tensor | None:
    shape = op.inputs[0].shape
    return tf.reshape(x, [*([x.shape[0] or -1] if units else []), *shape]) if shape.is_fully_defined() else None


# -- at the end of a loss ------------------------------------------------------------------------------------------


def arranged(tail: PerExampleLoss, op: tf.Operation, change: Callable[[tf.Tensor], tf.Tensor]) -> Term | None:
    """Entries in other places; ``change`` moves them, behind an axis in front."""
    x = tail.term(op.inputs[0])
    if x.is_fixed:
        return None
    public = None if x.public is None else change(tail.spread(x)[None])[0]
    return Term(x.kind, change(x.value), output_rank(op), public)


def total_squeezed(tail: PerExampleLoss, op: tf.Operation) -> Term | None:
    dims = [d % input_rank(op) + 1 for d in op.get_attr("squeeze_dims")]
    return arranged(tail, op, lambda t: tf.squeeze(t, dims)) if dims else None


def total_expanded(tail: PerExampleLoss, op: tf.Operation) -> Term | None:
    axis = axis_in(op.inputs[1], output_rank(op))
    return None if axis is None else arranged(tail, op, lambda t: tf.expand_dims(t, axis + 1))


def total_reshaped(tail: PerExampleLoss, op: tf.Operation) -> Term | None:
    x, rank, of_shape = tail.term(op.inputs[0]), output_rank(op), tail.a[op.inputs[1]]
    if x.is_fixed:
        return None
    if not isinstance(of_shape, Public | Size):
        raise tail.refusal(of_shape, op)
    fixed, own = constant(op.inputs[1]), x.value.shape[1:].num_elements()
    if fixed is not None and own and (own % np.abs(np.prod(fixed)) if -1 in fixed else own != np.prod(fixed)):
        return None  # it holds the batch's static size
    shape = tf.reshape(tail.size_of_one(op.inputs[1]), [-1])
    each = tf.reduce_prod(tf.shape(x.value)[1:])
    known = tf.reduce_prod(tf.where(shape < 0, tf.ones_like(shape), shape))
    shape = tf.where(shape < 0, tf.cast(each, shape.dtype) // tf.maximum(known, 1), shape)
    shape = tail.declare(tf.cast(shape, tf.int32))

    def change(t: tf.Tensor) -> tf.Tensor:
        t = tf.reshape(t, tf.concat([tf.shape(t)[:1], shape], 0))
        return tf.ensure_shape(t, [t.shape[0], *[None] * rank])

    return arranged(tail, op, change)


# -- the records ------------------------------------------------------------------------------------------------------

teach("Shape", moves=Move(shape, mixed=True, any_rank=True, blocks=True), lengths=lambda shape: shape)
teach("ShapeN", moves=Move(shapes, mixed=True, any_rank=True, blocks=True), lengths=lambda shape: shape)
teach("Size", moves=Move(size, mixed=True, any_rank=True), lengths=tf.reduce_prod)
teach("Rank", moves=Move(rank, mixed=True, any_rank=True))
teach("Const", moves=Move(const))
teach("Range", moves=Move(numbered, data=None), folds=lambda op, *given: np.arange(*given))
teach("DynamicStitch", moves=Move(stitched, data=None))
teach("Fill", moves=Move(filled, data=None), arranges=True, folds=lambda op, shape, x: np.full(integers(shape), x))
teach(
    "Reshape",
    moves=moves_examples(
        reshape, of_size=kept, of_public=reshaped_public, of_mixed=summed_back, sizes=(1,), blocks=True
    ),
    tail=total_reshaped,
    undo=in_old_shape,
    arranges=True,
    folds=lambda op, x, shape: np.reshape(x, integers(shape)),
)
teach(
    "ExpandDims",
    moves=moves_examples(expand_dims, of_size=kept, of_public=kept, blocks=True),
    tail=total_expanded,
    undo=in_old_shape,
    arranges=True,
    folds=lambda op, x, axis: np.expand_dims(x, int(np.ravel(axis)[0])),
)
teach(
    "Squeeze",
    moves=moves_examples(squeeze, of_size=kept, of_public=kept, blocks=True),
    tail=total_squeezed,
    undo=in_old_shape,
)
teach(
    "Transpose",
    moves=moves_examples(transpose, of_size=transposed_size, of_public=kept),
    order=permutation,
    arranges=True,
    folds=lambda op, x, order: np.transpose(x, integers(order)),
)
teach("InvertPermutation", folds=lambda op, x: np.argsort(x))
teach("Tile", moves=moves_examples(tile, of_public=repeated, sizes=(1,)), rule=broadcast)
teach("BroadcastTo", moves=moves_examples(broadcast_to, of_public=repeated, sizes=(1,)), rule=broadcast)
teach("OneHot", moves=moves_examples(one_hot))
