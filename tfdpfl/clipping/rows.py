"""Questions about rows that families of ops share: whether a tensor without examples is the same for all of them, what
becomes of several tensors whose rows are put together, and which lengths follow the batch size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

from tfdpfl.clipping.graph import constant
from tfdpfl.clipping.states import (
    BY_POSITION,
    UNKNOWN,
    Batch,
    Entry,
    Handle,
    Items,
    Mixed,
    Public,
    Size,
    State,
    batches_of,
    counts_examples,
    mixed,
)

__all__ = [
    "axis_in",
    "differing",
    "even",
    "laid_along",
    "of_blocks",
    "row_free",
    "rowwise",
    "shape_entries",
    "shaped",
    "together",
    "with_rows",
]


def row_free(t: tf.Tensor, state: Public | Size, axis: int) -> bool:
    """Whether a tensor without examples is the same for all rows along ``axis`` (counted from the right)."""
    rank = t.shape.rank
    if rank is None:
        return False
    if rank < -axis or t.shape[axis] == 1:
        return True
    # The batch is as long as it comes: an axis of a known length would be rows of one and the same example.
    return t.shape[axis] is None and isinstance(state, Public) and state.alike and not state.deps


def axis_in(t: tf.Tensor, rank: int) -> int | None:
    """Returns the axis that a constant names, counted from the left; None if that is not known."""
    value = constant(t)
    return None if value is None else int(np.ravel(value)[0]) % rank


def differing(op: tf.Operation, inputs: Iterable[tuple[tf.Tensor, State, int | None]]) -> Mixed | None:
    """Refuses inputs without examples that are not the same for all: of each the tensor, its state, and the axis
    (counted from the right) that meets the examples, if it has one."""
    for t, s, axis in inputs:
        if counts_examples(s):
            return mixed(op, "makes an example's result depend on the batch size")
        if isinstance(s, Public | Size) and axis is not None and not row_free(t, s, axis):
            return mixed(op, BY_POSITION)
    return None


def with_rows(op: tf.Operation, axis: int, batches: Iterable[Batch]) -> State:
    """Examples along an axis, of rows of all of these."""
    rows = {s.rows for s in batches} - {None}
    if len(rows) > 1:
        return mixed(op, "combines rows of different examples")
    return Batch(axis, rows.pop() if rows else None)


def together(op, tensors, states):
    batches = batches_of(states)
    axis = batches[0].axis
    for t, s in zip(tensors, states, strict=True):
        if not (isinstance(s, Batch) or (isinstance(s, Public) and row_free(t, s, axis - t.shape.rank))):
            return mixed(op, BY_POSITION)
    return with_rows(op, axis, batches)


def rowwise(op, states):
    """Works row by row on as many inputs as there are states, with the examples along their first axis."""
    batches = batches_of(states)
    if any(s.axis for s in batches):
        return mixed(op, "does not have the batch as its first axis")
    return together(op, op.inputs[: len(states)], states) if batches else None


def shaped(op: tf.Operation, entries: Sequence[Entry]) -> State:
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


def shape_entries(t: tf.Tensor, state: State) -> tuple[Entry, ...]:
    if t.shape.rank is None:
        return (UNKNOWN,)
    if isinstance(state, Mixed | Items | Handle):
        return tuple((d, 0) if d is not None else UNKNOWN for d in t.shape)
    entries = [(d, 0) if d is not None or not isinstance(state, Size) else UNKNOWN for d in t.shape]
    if isinstance(state, Batch) and t.shape[state.axis] is None:
        entries[state.axis] = (of_blocks(state), 1)
    return tuple(entries)


def of_blocks(state: Batch) -> int | None:
    """How long the batch's axis is, by the batch size."""
    return None if state.rows is None else state.rows * state.blocks


def even(op, entries, axis) -> Mixed | None:
    """Refuses lengths that vary with the batch size, along other axes than the batch's."""
    if any(p != 0 for i, (_, p) in enumerate(entries) if i != axis):
        return mixed(op, "makes an example's result depend on the batch size")
    return None
