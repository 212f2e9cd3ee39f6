"""Ops that join tensors, and those that cut out a part or pad it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfdpfl.clipping.graph import constant, input_rank, known_entries, output_rank
from tfdpfl.clipping.loss import PerExampleLoss, Term
from tfdpfl.clipping.registry import Move, View, moves_examples, teach
from tfdpfl.clipping.rows import axis_in, even, shape_entries, together
from tfdpfl.clipping.states import (
    UNKNOWN,
    Batch,
    Entry,
    Mixed,
    Public,
    Size,
    State,
    batches_of,
    counts_examples,
    deps,
    is_batch_free,
    meeting,
    mixed,
)

__all__ = ["Slicing"]

# -- joining ----------------------------------------------------------------------------------------------------------


def concat(view: View, op: tf.Operation, states: list[State]) -> State | None:
    *tensors, axis_tensor = op.inputs
    *states, of_axis = states
    batches = batches_of(states)
    if not is_batch_free(of_axis):
        return mixed(op, "has settings that depend on examples or on how many there are")
    if not batches:
        if has_sizes(states) and tensors[0].shape.rank == 1:
            return Size(tuple(e for t in tensors for e in view.entries(t)))
        return Public(deps(states)) if all(isinstance(s, Public) for s in states) else None
    axis = axis_in(axis_tensor, tensors[0].shape.rank)
    if axis is None or len({s.axis for s in batches}) > 1:
        return mixed(op, "joins tensors with different batch axes")
    return meeting(op, "joins along the batch axis") if axis == batches[0].axis else together(op, tensors, states)


def has_sizes(states: Sequence[State]) -> bool:
    """Whether there are sizes among the states, and nothing of weights."""
    return any(isinstance(s, Size) for s in states) and not deps(states)


def stack(view: View, op: tf.Operation, states: list[State]) -> State | None:
    axes = {s.axis for s in batches_of(states)}
    if not axes:
        return stacked_sizes(view, op, states) if has_sizes(states) else None
    if len(axes) > 1:
        return mixed(op, "joins tensors with different batch axes")
    state = together(op, op.inputs, states)
    if isinstance(state, Mixed):
        return state
    axis = op.get_attr("axis") % output_rank(op)
    return Batch(state.axis + (axis <= state.axis), state.rows)


def stacked_sizes(view: View, op: tf.Operation, states: list[State]) -> State | None:
    if input_rank(op) in (0, 1):
        of_each = [view.entries(t) for t in op.inputs]
        below = op.get_attr("axis") % output_rank(op) == 0
        return Size(tuple(itertools.chain(*(of_each if below else zip(*of_each, strict=True)))))
    return Public() if not any(map(counts_examples, states)) else None


def offsets(view, op, states):
    """Where the parts of a concatenation begin."""
    axis, parts = constant(op.inputs[0]), [view.entries(t) for t in op.inputs[1:]]
    known = all(isinstance(s, Public | Size) for s in states) and not deps(states) and axis is not None
    if not known or any(len(part) != len(parts[0]) for part in parts):
        return None
    axis = int(axis) % len(parts[0])
    begins: list[Entry] = [(0, 0)]
    for part in parts[:-1]:
        (start, at), (length, power) = begins[-1], part[axis]
        free = at == power == 0
        begins.append((None if None in (start, length) else start + length, 0) if free else UNKNOWN)
    return [Size(tuple(begin if i == axis else (0, 0) for i in range(len(parts[0])))) for begin in begins]


# -- cutting ----------------------------------------------------------------------------------------------------------


def unstack(view: View, op: tf.Operation, state: Batch) -> State:
    axis = op.get_attr("axis") % input_rank(op)
    if axis == state.axis:
        return mixed(op, "takes the batch apart")
    return Batch(state.axis - (axis < state.axis), state.rows)


def unstacked_size(view: View, op: tf.Operation, state: Size) -> list[State] | None:
    return [Size((e,)) for e in state.entries] if len(state.entries) == len(op.outputs) else None


def split(view: View, op: tf.Operation, state: Batch, data: int = 0, axis_input: int = 2) -> State:
    axis = axis_in(op.inputs[axis_input], op.inputs[data].shape.rank)
    return mixed(op, "takes the batch apart") if axis in (None, state.axis) else state


def split_size(view: View, op: tf.Operation, state: Size) -> list[State] | None:
    lengths = constant(op.inputs[1])
    if input_rank(op) != 1 or lengths is None or -1 in lengths or sum(lengths) != len(state.entries):
        return None
    return [Size(state.entries[e - n : e]) for e, n in zip(np.cumsum(lengths), lengths, strict=True)]


@dataclasses.dataclass(frozen=True)
class Slicing:
    """The entries of a strided slice: what each does to an axis, or to none."""

    op: tf.Operation
    rank: int
    length: int

    def has(self, mask: str, i: int) -> bool:
        return bool(self.op.get_attr(f"{mask}_mask") >> i & 1)

    def axes(self) -> Iterator[tuple[int | None, int, int | None]]:
        """For each axis of what is sliced: the entry about it (None for those that are left whole), the axis, and the
        axis of the slice (None where one number of it is taken)."""
        axis = place = 0
        about = [i for i in range(self.length) if not (self.has("ellipsis", i) or self.has("new_axis", i))]
        for i in range(self.length):
            if self.has("ellipsis", i):
                for _ in range(self.rank - len(about)):
                    yield None, axis, place
                    axis, place = axis + 1, place + 1
            elif self.has("new_axis", i):
                place += 1
            else:
                dropped = self.has("shrink_axis", i)
                yield i, axis, None if dropped else place
                axis, place = axis + 1, place + (not dropped)
        for rest in range(self.rank - axis):
            yield None, axis + rest, place + rest


def strided_slice(view: View, op: tf.Operation, state: Batch) -> State:
    n, ends = op.inputs[1].shape.num_elements(), view.entries(op.inputs[2])
    if n is None or len(ends) != n:
        return mixed(op, "slices in a way that is not known beforehand")
    slicing, found = Slicing(op, input_rank(op), n), None
    for i, axis, place in slicing.axes():
        if axis == state.axis:
            if i is not None and (place is None or not is_whole(slicing, i, state, ends[i])):
                return meeting(op, "takes some examples of the batch, not all")
            found = place
        elif i is not None and ends[i][1] != 0 and not slicing.has("end", i):
            return mixed(op, "makes an example's result depend on the batch size")
    assert found is not None
    return Batch(found, state.rows)


def sliced_public(view: View, op: tf.Operation, state: Public) -> State:
    states = [view[t] for t in op.inputs]
    free = all(map(is_batch_free, states))
    return Public(deps(states), state.alike) if free else mixed(op, "slices by the batch size")


def sliced_size(view: View, op: tf.Operation, state: Size) -> State:
    slicing = Slicing(op, 1, 1)
    if any(not isinstance(view[t], Public | Size) for t in op.inputs[1:]):
        return mixed(op, "has settings that depend on examples")
    if input_rank(op) == 0:  # of a number, a slice can only be given axes
        return state
    begin, end, strides = (constant(t) for t in op.inputs[1:4])
    vector = input_rank(op) == 1 and len(state.entries) == op.inputs[0].shape[0]
    plain = vector and not (op.get_attr("new_axis_mask") or op.get_attr("ellipsis_mask"))
    if not plain or begin is None or end is None or strides is None:
        return state.blurred(op.outputs[0].shape.num_elements())
    if slicing.has("shrink_axis", 0):
        return Size((state.entries[int(begin[0])],))
    first = None if slicing.has("begin", 0) else int(begin[0])
    last = None if slicing.has("end", 0) else int(end[0])
    return Size(state.entries[first : last : int(strides[0])])


def is_whole(slicing: Slicing, i: int, state: Batch, end: Entry) -> bool:
    """Whether entry i of a slice takes all examples, one by one."""
    begin, _, strides = (constant(t) for t in slicing.op.inputs[1:4])
    if strides is None or strides[i] != 1:
        return False
    starts = slicing.has("begin", i) or (begin is not None and begin[i] == 0)
    length, (number, power) = slicing.op.inputs[0].shape[state.axis], end
    ends = slicing.has("end", i) or (state.rows is not None and end == (state.rows, 1)) or (
        power == 0 and None not in (length, number) and number >= length)  # fmt: skip
    return starts and ends


def strided_slice_gradient(view, op, state):
    """A slice's gradient put back among zeros: the examples are where they were in what was sliced."""
    entries, strides = view.entries(op.inputs[0]), constant(op.inputs[3])
    if strides is None:
        return None
    slicing, found = Slicing(op, len(entries), len(strides)), None
    for i, axis, place in slicing.axes():
        if place == state.axis:
            if i is not None and not (strides[i] == 1 and slicing.has("begin", i) and slicing.has("end", i)):
                return meeting(op, "takes some examples of the batch, not all")
            found = axis
    own = shape_entries(op.inputs[4], state)[state.axis]
    if found is None or entries[found] != own or any(p != 0 for k, (_, p) in enumerate(entries) if k != found):
        return mixed(op, "has a shape that is not known to follow the batch size")
    return Batch(found, state.rows)


def slice_of(view: View, op: tf.Operation, state: Batch) -> State:
    shape = op.inputs[0].shape
    begins, entries = view.entries(op.inputs[1]), view.entries(op.inputs[2])
    whole = {(-1, 0), (shape[state.axis] or -1, 0), (state.rows or -1, 1)}
    known = len(begins) == len(entries) == shape.rank
    if not known or begins[state.axis] != (0, 0) or entries[state.axis] not in whole:
        return meeting(op, "takes some examples of the batch, not all")
    return even(op, entries, state.axis) or state


def cut_size(view: View, op: tf.Operation, state: Size) -> Size | None:
    shape = op.inputs[0].shape
    if shape.rank != 1 or len(state.entries) != shape[0]:
        return None
    (begin, at), (length, power) = view.entries(op.inputs[1])[0], view.entries(op.inputs[2])[0]
    if at != 0 or power != 0 or begin is None or length is None:
        return None
    return Size(state.entries[begin : None if length < 0 else begin + length])


def pad(view, op, state):
    paddings = known_entries(op.inputs[1])  # along other axes any that are public
    return mixed(op, "pads the batch") if paddings is None or np.any(paddings[state.axis] != 0) else state


# -- constants --------------------------------------------------------------------------------------------------------


def one_entry(t: tf.Tensor) -> np.ndarray | None:
    """One entry of a vector."""
    if t.shape.rank != 0:
        return None
    vector, at = constant(t.op.inputs[0]), constant(t.op.inputs[1])
    if vector is None or at is None or vector.ndim != 1 or t.op.get_attr("shrink_axis_mask") != 1:
        return None
    return vector[at[0]]


def cut(t: tf.Tensor) -> np.ndarray | None:
    """A slice of constants."""
    whole, begins, lengths = (constant(i) for i in t.op.inputs)
    if whole is None or begins is None or lengths is None:
        return None
    return whole[tuple(slice(b, None if n < 0 else b + n) for b, n in zip(begins, lengths, strict=True))]


# -- at the end of a loss ---------------------------------------------------------------------------------------------


def totals_stacked(tail: PerExampleLoss, op: tf.Operation) -> Term | None:
    terms, rank = tail.inputs(op), output_rank(op)
    kinds = {x.kind for x in terms}
    if "total" not in kinds or not kinds <= {"total", "public"}:
        return None
    axis = op.get_attr("axis") % rank
    zero = next(x for x in terms if x.kind == "total").value
    data = [x.value if x.kind == "total" else tf.zeros_like(zero) for x in terms]
    parts = [x.value if x.kind == "public" else x.public for x in terms]
    public = None
    if any(p is not None for p in parts):
        public = tf.stack([tf.zeros_like(op.inputs[0]) if p is None else p for p in parts], axis)
    return Term("total", tf.stack(data, axis + 1), rank, public)


# -- the records ------------------------------------------------------------------------------------------------------

teach(
    "ConcatV2",
    moves=Move(concat, data=None),
    arranges=True,
    folds=lambda op, *parts: np.concatenate(parts[:-1], int(parts[-1])),
)
teach(
    "Pack",
    moves=Move(stack),
    tail=totals_stacked,
    arranges=True,
    folds=lambda op, *parts: np.stack(parts, op.get_attr("axis")),
)
teach("Unpack", moves=moves_examples(unstack, of_size=unstacked_size))
teach("Split", moves=moves_examples(functools.partial(split, data=1, axis_input=0), data=1))
teach("SplitV", moves=moves_examples(split, of_size=split_size))
teach(
    "StridedSlice",
    moves=moves_examples(strided_slice, of_size=sliced_size, of_public=sliced_public, sizes=(2,)),
    value=one_entry,
)
teach("StridedSliceGrad", moves=moves_examples(strided_slice_gradient, data=4, sizes=(0,)))
teach("Slice", moves=moves_examples(slice_of, of_size=cut_size, sizes=(2,)), value=cut)
teach("ConcatOffset", moves=Move(offsets, data=None))
teach("Pad", "PadV2", "MirrorPad", "MirrorPadGrad", moves=moves_examples(pad))
