"""Linear algebra on the last two axes."""

from __future__ import annotations

from tfdpfl.clipping.graph import constant, input_rank
from tfdpfl.clipping.registry import Move, moves_examples, teach
from tfdpfl.clipping.rows import together
from tfdpfl.clipping.states import batches_of, meeting

__all__: list[str] = []


def solved(view, op, states):
    batches = batches_of(states)
    if not batches:
        return None
    if len({s.axis for s in batches}) > 1 or len({t.shape.rank for t in op.inputs} - {None}) != 1:
        return meeting(op, "combines the examples along one axis with the examples along another")
    if batches[0].axis >= input_rank(op) - 2:
        return meeting(op, "works along the batch axis")
    return together(op, op.inputs, states)


def band_part(view, op, state):
    return meeting(op, "works along the batch axis") if state.axis >= input_rank(op) - 2 else state


def diagonal(view, op, state):
    of = constant(op.inputs[1])
    if state.axis >= input_rank(op) - (1 if of is not None and of.size == 1 else 2):  # one diagonal
        return meeting(op, "works along the batch axis")
    return state


# -- the records ------------------------------------------------------------------------------------------------------

teach("MatrixSolve", "MatrixTriangularSolve", moves=Move(solved, data=None))
teach("MatrixBandPart", moves=moves_examples(band_part))
teach("MatrixDiagV3", moves=moves_examples(diagonal))
