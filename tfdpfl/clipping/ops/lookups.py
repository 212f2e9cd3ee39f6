"""Reading variables, and picking rows by index."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import tensorflow as tf

from tfdpfl.clipping.gradients import Contribution, EmbeddingGradient, Units, Use, dims_of, reshaped, volume
from tfdpfl.clipping.graph import constant, input_rank, output_rank
from tfdpfl.clipping.registry import Move, View, teach
from tfdpfl.clipping.states import (
    BY_POSITION,
    TAINTED,
    UNKNOWN,
    Batch,
    Entries,
    Handle,
    Items,
    Mixed,
    Public,
    Size,
    State,
    counts_examples,
    first_mixed,
    meeting,
    mixed,
)

__all__: list[str] = []


def read(view: View, op: tf.Operation, states: list[State]) -> State:
    return view.held(op)


def read_rows(view: View, op: tf.Operation, states: list[State]) -> State | None:
    value = view.held(op)
    if isinstance(value, Mixed):
        return value
    return gathered(view, op, value, states[1], axis=0, batch_dims=op.get_attr("batch_dims"))


def is_initialized(view, op, states):
    return Public()


def gather(view, op, states):
    axis = constant(op.inputs[2])
    if axis is None:
        return None
    return gathered(view, op, states[0], states[1], int(axis), op.get_attr("batch_dims"))


def gathered(view, op, params, indices, axis, batch_dims):
    if isinstance(params, Size):
        return gathered_sizes(op, params, indices)
    if isinstance(params, Mixed | Items) or isinstance(indices, Mixed | Items):
        return first_mixed((params, indices))
    if isinstance(params, Public) and isinstance(indices, Public):
        return Public(params.deps | indices.deps)
    if counts_examples(indices):
        return mixed(op, "makes an example's result depend on the batch size")
    rank, of_indices = input_rank(op), op.inputs[1].shape.rank
    if of_indices is None:
        return mixed(op, "has a shape of unknown rank")
    batch_dims = batch_dims % (of_indices + 1) if batch_dims < 0 else batch_dims
    if isinstance(params, Batch):
        return picked(op, params, indices, axis % rank, batch_dims)
    return chosen_by_examples(op, indices, axis, batch_dims) if isinstance(indices, Batch) else None


def chosen_by_examples(op, indices: Batch, axis: int, batch_dims: int) -> State:
    """Of a public table, the rows that each example's indices choose."""
    rank = input_rank(op)
    if axis < 0 and rank is None:
        return mixed(op, "has a shape of unknown rank")
    axis = axis % rank if axis < 0 else axis
    return (
        mixed(op, BY_POSITION) if indices.axis < batch_dims else Batch(axis + indices.axis - batch_dims, indices.rows)
    )


def gathered_sizes(op, params: Size, indices: State) -> State:
    value = constant(op.inputs[1])
    if not isinstance(indices, Public | Size):
        return mixed(op, "has settings that depend on examples")
    if value is None or input_rank(op) != 1 or len(params.entries) != op.inputs[0].shape[0]:
        return Size(tuple([UNKNOWN] * (op.outputs[0].shape.num_elements() or 1)))
    return Size(tuple(params.entries[int(v)] for v in np.ravel(value)))


def picked(op, params: Batch, indices: State, axis: int, batch_dims: int) -> State:
    """Of each example's own entries, those with some indices."""
    if params.axis == axis:
        return meeting(op, "picks examples of the batch")
    if params.axis < batch_dims:
        if isinstance(indices, Batch) and indices.axis != params.axis:
            return meeting(op, "picks examples of the batch")
        return mixed(op, BY_POSITION) if isinstance(indices, Public) else Batch(params.axis, params.rows)
    if isinstance(indices, Batch):
        return meeting(op, "lets examples pick from one another")
    shift = op.inputs[1].shape.rank - batch_dims - 1 if params.axis > axis else 0
    return Batch(params.axis + shift, params.rows)


def places(view, op, states):
    if states[0] != Batch(0):
        return None
    return Entries(op.type, op.name, "is not known to keep examples apart", graph=id(op.graph), places=True)


def at_places(view, op, states):
    params, indices = states
    if params == Batch(0) and isinstance(indices, Entries) and indices.places:
        return dataclasses.replace(indices, places=False)
    return None


def find(view, op, states):
    table, keys, default = view.handle(op.inputs[0]), states[1], states[2]
    if not isinstance(table, Handle):
        return None
    if table in view.tainted:
        return mixed(op, TAINTED)
    view.note_read(table, op)
    if isinstance(keys, Public) and isinstance(default, Public):
        return Public(default.deps)
    if not isinstance(keys, Batch):
        return None
    key, value, out = op.inputs[1].shape.rank, op.inputs[2].shape.rank, output_rank(op)
    shared = value == 0 or (None not in (key, value, out) and key + value == out)  # one default for all keys
    if not isinstance(default, Public) or default.deps or not shared:
        return mixed(op, "has settings that depend on examples")
    return keys


def looked_up(use: Use, units: Units) -> Contribution | None:
    if use.at != 0 or use.op.get_attr("batch_dims") != 0:
        return None
    if use.op.type == "GatherV2" and constant(use.inputs[2]) != 0:
        return None
    shape = use.shape
    if shape.num_elements() is None:
        return None
    ids = units.group(use.inputs[1], use.states[1])
    g = units.group(use.g, use.out)
    width = math.prod(shape.as_list()[1:])
    dims = dims_of(ids)
    length = volume(dims[1:])
    flat = [dims[0], length]
    ids = reshaped(ids, flat)
    g = reshaped(g, [*flat, width])
    return EmbeddingGradient(ids, g, shape)


# -- the records ------------------------------------------------------------------------------------------------------

teach("ReadVariableOp", moves=Move(read), reads=True)
teach("ResourceGather", moves=Move(read_rows, data=None), rule=looked_up, reads=True)
teach("VarIsInitializedOp", moves=Move(is_initialized))
teach("GatherV2", moves=Move(gather, data=None), rule=looked_up)
teach("Where", moves=Move(places, entries=True))
teach("GatherNd", moves=Move(at_places, data=None, entries=True))
teach("LookupTableFindV2", moves=Move(find, data=None), repeatable=True)
teach("ResourceGatherNd", "VariableShape", repeatable=True)
