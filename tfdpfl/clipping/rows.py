"""Questions about rows that families of ops share: whether a tensor without examples is the same for all of them, and
what becomes of several tensors whose rows are put together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdpfl.clipping.batch_axis import BatchAxis
from tfdpfl.clipping.graph import constant
from tfdpfl.clipping.registry import ROWS
from tfdpfl.clipping.states import BY_POSITION, Batch, Public, Size, State, mixed


def row_free(view: BatchAxis, t: tf.Tensor, state: Public | Size, axis: int) -> bool:
    """Whether a tensor without examples is the same for all rows along ``axis`` (counted from the right)."""
    rank = t.shape.rank
    if rank is None:
        return False
    if rank < -axis or t.shape[axis] == 1:
        return True
    if t.shape[axis] is not None and not view.batch_sizes():
        return False  # with a batch of one, it would be rows of one and the same example
    if isinstance(state, Size) or state.deps:
        return False
    if state.alike:
        return True
    from_op = ROWS.get(t.op.type)
    parts = None if from_op is None else from_op(t, axis)
    if parts is not None:
        states = [view[x] for x, _ in parts]
        if all(isinstance(s, Public) and row_free(view, x, s, a) for (x, a), s in zip(parts, states, strict=True)):
            return True
    value = constant(t)
    return value is not None and bool(np.all(value == np.take(value, [0], axis=axis))) if rank else True


def together(view, op, tensors, states, batches):
    a = batches[0].axis
    for t, s in zip(tensors, states, strict=True):
        ok = isinstance(s, Batch) or (isinstance(s, Public) and row_free(view, t, s, a - t.shape.rank))
        if not ok:
            return mixed(op, BY_POSITION)
    rows = {s.rows for s in batches} - {None}
    if len(rows) > 1:
        return mixed(op, "combines rows of different examples")
    return Batch(a, rows.pop() if rows else None)


def rowwise(view, op, states):
    """Works row by row on as many inputs as there are states, with the examples along their first axis."""
    batches = [s for s in states if isinstance(s, Batch)]
    if any(s.axis for s in batches):
        return mixed(op, "does not have the batch as its first axis")
    return together(view, op, op.inputs[: len(states)], states, batches) if batches else None


def shaped(op: tf.Operation, entries: Sequence[tuple[int | None, int | None]]) -> State:
    """A tensor of equal or identically distributed rows, of the given shape."""
    if any(p is None for _, p in entries):
        return mixed(op, "has a shape that is not known to follow the batch size")
    axes = [i for i, (_, p) in enumerate(entries) if p]
    if not axes:
        return Public(alike=True)
    if len(axes) > 1 or entries[axes[0]][1] != 1:
        return mixed(op, "makes a tensor with several batch axes")
    return Batch(axes[0], entries[axes[0]][0])


def laid_along(op, x, entries):
    """Public values laid out along new batch axes: every row must be the same."""
    filled = shaped(op, entries)
    if isinstance(filled, Batch):
        at = filled.axis - len(entries)
        if x.shape.rank is not None and (x.shape.rank < -at or x.shape[at] == 1):
            return filled
        return mixed(op, BY_POSITION)
    return filled


def first_state(view: BatchAxis, op: tf.Operation, states: list[State]) -> State | None:
    """A recurrent layer's first state times its weights, in a batch of static size: rows of equal values."""
    x, s, w = op.inputs[0], states[0], states[1]
    if not (isinstance(s, Public) and isinstance(w, Public) and w.deps and view.is_static_batch(x)):
        return None
    return Batch(0) if row_free(view, x, s, -x.shape.rank) else None
