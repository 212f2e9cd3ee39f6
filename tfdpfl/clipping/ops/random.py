"""Ops that draw numbers, or shuffle."""

from __future__ import annotations

import tensorflow as tf

from tfdpfl.clipping.registry import Move, View, moves_examples, teach
from tfdpfl.clipping.rows import shaped
from tfdpfl.clipping.states import Batch, Items, Public, State, counts_examples, meeting, mixed

__all__: list[str] = []


def drawn(view: View, op: tf.Operation, states: list[State]) -> State | None:
    shape = op.inputs[1 if op.type.startswith("Stateful") else 0]
    for t, s in zip(op.inputs, states, strict=True):
        if t is not shape and (isinstance(s, Batch | Items) or (counts_examples(s))):
            return mixed(op, "draws numbers from parameters that depend on the batch")
    filled = shaped(op, view.entries(shape))
    return Public(alike=True) if isinstance(filled, Public) else filled


def shuffled(view, op, state):
    return meeting(op, "picks examples of the batch") if state.axis == 0 else None


def skipped(view, op, states):
    """A generator's state; how far it then moves follows the number of draws, which tells nothing of them."""
    if isinstance(states[2], Batch | Items):
        return mixed(op, "has settings that depend on examples")
    return view.held(op)


def candidates(view, op, states):
    """Classes that are drawn whatever the true ones are, and how often each was to be expected."""
    return [Public(), states[0] if isinstance(states[0], Batch) else Public(), Public()]


# -- the records ------------------------------------------------------------------------------------------------------

# These draw from a kernel's own state, and write nothing that another op reads.
teach("RandomUniform", "RandomStandardNormal", "TruncatedNormal", "RandomUniformInt",
      moves=Move(drawn, data=None), movable=True)  # fmt: skip
teach(
    *"""StatelessRandomUniform StatelessRandomUniformV2 StatelessRandomNormal StatelessRandomNormalV2
    StatelessTruncatedNormal StatelessTruncatedNormalV2 StatelessRandomUniformInt StatelessRandomUniformIntV2
    StatelessRandomUniformFullInt StatelessRandomUniformFullIntV2 StatefulUniform StatefulStandardNormalV2
    StatefulTruncatedNormal""".split(), moves=Move(drawn, data=None))  # fmt: skip
teach("RandomShuffle", moves=moves_examples(shuffled))
teach("RngReadAndSkip", moves=Move(skipped, data=None))
teach("LogUniformCandidateSampler", "UniformCandidateSampler", "FixedUnigramCandidateSampler", moves=Move(candidates))
