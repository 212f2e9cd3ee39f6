"""Linear algebra on the last two axes."""

from __future__ import annotations

from tfdpfl.clipping.graph import constant
from tfdpfl.clipping.registry import batching_rule
from tfdpfl.clipping.rows import together
from tfdpfl.clipping.states import Batch, mixed

__all__: list[str] = []


@batching_rule("MatrixSolve", "MatrixTriangularSolve", data=None)
def solved(view, op, states):
    batches = [s for s in states if isinstance(s, Batch)]
    if not batches:
        return None
    if len({s.axis for s in batches}) > 1 or len({t.shape.rank for t in op.inputs} - {None}) != 1:
        return mixed(op, "combines the examples along one axis with the examples along another")
    if batches[0].axis >= op.inputs[0].shape.rank - 2:
        return mixed(op, "works along the batch axis")
    return together(view, op, op.inputs, states, batches)


@batching_rule("MatrixBandPart", data=0)
def band_part(view, op, states):
    if isinstance(states[0], Batch) and states[0].axis >= op.inputs[0].shape.rank - 2:
        return mixed(op, "works along the batch axis")
    return states[0] if isinstance(states[0], Batch) else None


@batching_rule("MatrixDiagV3", data=0)
def diagonal(view, op, states):
    state, of = states[0], constant(op.inputs[1])
    if not isinstance(state, Batch):
        return None
    if state.axis >= op.inputs[0].shape.rank - (1 if of is not None and of.size == 1 else 2):  # one diagonal
        return mixed(op, "works along the batch axis")
    return state
