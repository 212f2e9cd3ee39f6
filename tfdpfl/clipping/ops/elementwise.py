"""Ops that work entry by entry, with broadcasting; `arithmetic` has those of which more is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdpfl.clipping import graph as graph_tools
from tfdpfl.clipping.gradients import Contribution, Units, Use, summed_to
from tfdpfl.clipping.graph import gradient_function, input_rank, key, output_rank, passes_gradients_through
from tfdpfl.clipping.loss import PerExampleLoss, Term, kind_of
from tfdpfl.clipping.registry import ENDS, Move, Rule, View, look_up, teach
from tfdpfl.clipping.rows import differing, row_free, with_rows
from tfdpfl.clipping.states import (
    BY_POSITION,
    UNKNOWN,
    Batch,
    Entries,
    Entry,
    Handle,
    Items,
    Mixed,
    Public,
    Size,
    State,
    batches_of,
    deps,
    first_mixed,
    is_batch_free,
    meeting,
    mixed,
)

__all__ = ["ENTRYWISE", "alone", "compared", "elementwise", "entrywise_rule", "gradient", "in_order"]


def elementwise(view: View, op: tf.Operation, states: list[State]) -> State | None:
    if len(states) == 1 and (isinstance(states[0], Items | Handle) or getattr(states[0], "blocks", 1) > 1):
        return states[0]
    kinds = set(map(type, states))
    if kinds & {Mixed, Entries}:
        return of_entries(op, states)
    if Items in kinds:
        return None
    if Batch not in kinds:
        return public_arithmetic(view, op, states)
    return broadcast(op, states, max(t.shape.rank for t in op.inputs if t.shape.rank is not None))


def broadcast(op: tf.Operation, states: list[State], rank: int) -> State:
    """Operands aligned at their last axes, of which at least one has examples."""
    batches = [(t, s) for t, s in zip(op.inputs, states, strict=True) if isinstance(s, Batch)]
    axis, *other_axes = {s.axis - t.shape.rank for t, s in batches}
    if other_axes:
        return meeting(op, "combines the examples along one axis with the examples along another")
    lengths = {batches[0][0].shape[axis], op.outputs[0].shape[axis]}
    if len(lengths - {None}) > 1:  # the only example is repeated
        return mixed(op, BY_POSITION)
    if refused := differing(op, ((t, s, axis) for t, s in zip(op.inputs, states, strict=True))):
        return refused
    return with_rows(op, axis + rank, (s for _, s in batches))


def selected(view: View, op: tf.Operation, states: list[State]) -> State | None:
    """A Select whose condition has one axis chooses rows."""
    condition, *others = (t.shape.rank or 0 for t in op.inputs)
    kinds = set(map(type, states))
    rows = condition == 1 and max(others) > 1 and Batch in kinds and kinds <= {Batch, Public, Size}
    return chosen_rows(op, states) if rows else elementwise(view, op, states)


def chosen_rows(op: tf.Operation, states: list[State]) -> State:
    batches = set(batches_of(states))
    free = all(s in batches or (isinstance(s, Public) and row_free(t, s, -t.shape.rank))
               for t, s in zip(op.inputs, states, strict=True))  # fmt: skip
    (state, *others) = batches
    return state if free and not others and state == Batch(0, state.rows) else mixed(op, "chooses between rows")


def of_entries(op: tf.Operation, states: list[State]) -> State | None:
    """Of a list of examples' entries: each by itself, with numbers that are the same for all."""
    of = {s for t, s in zip(op.inputs, states, strict=True) if not (isinstance(s, Public) and t.shape.rank == 0)}
    found = of.pop()
    if of or not isinstance(found, Entries) or (found.places and op.type not in ("Identity", "Cast")):
        return None
    return found


def identities(view: View, op: tf.Operation, states: list[State]) -> State | list[State]:
    """Also what ends a tf.custom_gradient."""
    if "_gradient_op_type" in op.node_def.attr:
        name = getattr(gradient_function(op), "__qualname__", "")
        for beginning, transfer in ENDS.items():
            if name.startswith(beginning) and (known := transfer(view, op, states)) is not None:
                return known
    if met := first_mixed(states):
        return met
    if len(set(batches_of(states))) > 1 and passes_gradients_through(op):
        return mixed(op, "hands gradients from the examples along one axis to those along another")
    return list(states)


def public_arithmetic(view: View, op: tf.Operation, states: list[State]) -> State | None:
    if not all(isinstance(s, Public | Size) for s in states):
        return None
    of_weights = deps(states)
    if all(isinstance(s, Public) for s in states):
        alike = (getattr(s, "alike", False) or t.shape.rank == 0 for t, s in zip(op.inputs, states, strict=True))
        return Public(of_weights, all(alike))
    if of_weights or any(t.shape.rank not in (0, 1) for t in op.inputs):
        why = "scales weights by the batch size" if of_weights else "spreads the batch size"
        return Public(of_weights) if all(map(is_batch_free, states)) else mixed(op, why)
    columns = [view.entries(t) for t in op.inputs]
    width = max(len(c) for c in columns)
    columns = [c * width if len(c) == 1 else c for c in columns]
    return Size(tuple(monomial(op, row) for row in zip(*columns, strict=True)))


def monomial(op: tf.Operation, row: Sequence[Entry]) -> Entry:
    """Returns what an op makes of coefficients times powers of the batch size."""
    if any(power is None for _, power in row):
        return UNKNOWN
    size = look_up(op).size
    found = None if size is None else size(op, *row)
    if found is not None:
        return found
    return (None, 0) if all(power == 0 for _, power in row) else UNKNOWN


def ensure_shape(view, op, states):
    return states[0] if isinstance(states[0], Batch) else elementwise(view, op, states)  # of unknown rank, too


def freed(view, op, states):
    """A batch whose size is free, in place of the batch as it came in."""
    view.replace_sources({key(op.inputs[0]): op.outputs[0]})
    return elementwise(view, op, states)


def bits(view, op, states):
    """Of numbers of one size; else one number becomes a last axis of several, or a last axis one number. Keras 3 takes
    an argmax this way."""
    if op.inputs[0].dtype.size == op.outputs[0].dtype.size:
        return elementwise(view, op, states)
    (state,) = states
    if not isinstance(state, Batch):
        return None
    return state if state.axis < output_rank(op) else meeting(op, "works along the batch axis")


def entrywise_rule(derivative: Callable[[Use, Units], tf.Tensor | None]) -> Rule:
    """Returns the rule of an op that works entry by entry, with broadcasting. ``derivative`` gives the gradient of the
    weight as the op has it, broadcast."""

    def rule(use: Use, units: Units) -> Contribution | None:
        if None in use.shape.as_list() or use.output.shape.rank is None or not use.g.dtype.is_floating:
            return None
        dy = derivative(use, units)
        return None if dy is None else summed_to(dy, use.out, use.shape, units)

    return rule


@entrywise_rule
def gradient(use: Use, units: Units) -> tf.Tensor | None:
    """Of any such op, by TensorFlow's gradient."""
    wide = tf.broadcast_to(use.weight, tf.shape(use.output))
    inputs = [wide if i == use.at else t for i, t in enumerate(use.inputs)]
    made = graph_tools.copy_op(use.op, inputs)[use.output.value_index]
    (dy,) = tf.gradients(made, [wide], [use.g], stop_gradients=[t for t in inputs if t is not wide])
    return dy


def same_size(op: tf.Operation, x: Entry) -> Entry:
    return x


def in_order(op: tf.Operation) -> Sequence[int]:
    return range(input_rank(op) or 0)


# -- at the end of a loss --------------------------------------------------------------------------------------


def alone(tail: PerExampleLoss, op: tf.Operation) -> Term:
    """Of one input, to which it is linear: of what was set apart, too."""
    (x,) = tail.inputs(op)
    return x.changed(lambda v: graph_tools.copy_op(op, [v])[0])


def compared(tail: PerExampleLoss, op: tf.Operation) -> Term | None:
    terms = tail.inputs(op)
    if any(x.has_examples for x in terms):
        return None
    return Term("ratio", tail.apply(op, terms), output_rank(op))


def chosen(tail: PerExampleLoss, op: tf.Operation) -> Term | None:
    terms = tail.inputs(op)
    kind = kind_of(terms)
    if terms[0].kind == "total" or kind is None:
        return None
    values = tail.aligned_alike([tail.absorb(x) for x in terms])
    return Term(kind, tf.where(*values), output_rank(op))


# -- the records ------------------------------------------------------------------------------------------------------

ENTRYWISE = Move(elementwise, data=None, entries=True)

teach(
    *"""Abs Acos Acosh ApproximateEqual Asin Asinh Atan Atan2 Atanh Betainc BitwiseAnd BitwiseOr BitwiseXor Ceil
    ClipByValue Cos Cosh Digamma Elu Erf Erfc Erfinv Exp Expm1 Floor Igamma Igammac Inv Invert IsFinite IsInf
    IsNan LeakyRelu LeftShift Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Mod MulNoNan Ndtri NextAfter OnesLike
    Polygamma Pow Reciprocal Relu Relu6 RightShift Rint Round Rsqrt Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt
    Square SquaredDifference Tan Tanh TruncateMod Xdivy Xlog1py Xlogy ZerosLike Zeta Bucketize AsString StringToNumber
    StringLower StringUpper StringStrip StringLength StringJoin Substr RegexReplace StaticRegexReplace RegexFullMatch
    StaticRegexFullMatch StringToHashBucket StringToHashBucketFast StringToHashBucketStrong Complex ComplexAbs Real
    Imag Conj Angle EluGrad InvGrad LeakyReluGrad ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad SeluGrad SigmoidGrad
    SoftplusGrad SoftsignGrad SqrtGrad TanhGrad""".split(),
    moves=ENTRYWISE, rule=gradient,
)  # fmt: skip
teach(
    "Identity",
    moves=Move(elementwise, blocks=True, entries=True),
    rule=gradient,
    size=same_size,
    tail=alone,
    order=in_order,
    arranges=True,
    folds=lambda op, x: x,
)
teach("Snapshot", moves=ENTRYWISE, rule=gradient, size=same_size, tail=alone, order=in_order)
teach("PreventGradient", moves=ENTRYWISE, rule=gradient, size=same_size, tail=alone)
teach("StopGradient", moves=ENTRYWISE, rule=gradient, size=same_size)
teach("CheckNumerics", moves=ENTRYWISE, rule=gradient, tail=alone)
teach(
    "Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual", moves=ENTRYWISE, rule=gradient, tail=compared
)
teach("Select", moves=Move(selected, data=None, entries=True), rule=gradient, tail=chosen)
teach("SelectV2", moves=ENTRYWISE, rule=gradient, tail=chosen)
teach("IdentityN", moves=Move(identities, mixed=True, any_rank=True))
teach("EnsureShape", moves=Move(ensure_shape, any_rank=True), rule=gradient, tail=alone)
teach("PlaceholderWithDefault", moves=Move(freed), rule=gradient)
teach("Bitcast", moves=Move(bits))
