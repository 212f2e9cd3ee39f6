"""Ops that work entry by entry, with broadcasting."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdpfl.clipping.gradients import Contribution, MaterializedGradient, Units, Use, summed_to
from tfdpfl.clipping.graph import channels_first, constant, copy_op, gradient_function, key, passes_gradients_through
from tfdpfl.clipping.ops.lists import summed
from tfdpfl.clipping.registry import ENDS, View, batching_rule, rule
from tfdpfl.clipping.rows import row_free, with_rows
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
    deps,
    mixed,
)

__all__: list[str] = []

ELEMENTWISE = frozenset(
    """Abs Acos Acosh Add AddN AddV2 ApproximateEqual Asin Asinh Atan Atan2 Atanh Betainc BitwiseAnd BitwiseOr
    BitwiseXor Cast Ceil CheckNumerics ClipByValue Cos Cosh Digamma Div DivNoNan Elu Equal Erf Erfc Erfinv Exp Expm1
    Floor FloorDiv FloorMod Greater GreaterEqual Identity IdentityN Igamma Igammac Inv Invert IsFinite IsInf IsNan
    LeakyRelu LeftShift Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Mul
    MulNoNan Ndtri Neg NextAfter NotEqual OnesLike Polygamma Pow PreventGradient RealDiv Reciprocal Relu Relu6
    RightShift Rint Round Rsqrt Select SelectV2 Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Square
    SquaredDifference Sqrt StopGradient Sub Tan Tanh TruncateDiv TruncateMod Xdivy Xlog1py Xlogy ZerosLike Zeta
    Bucketize PlaceholderWithDefault Snapshot EnsureShape AsString StringToNumber StringLower StringUpper StringStrip
    StringLength StringJoin Substr RegexReplace StaticRegexReplace RegexFullMatch StaticRegexFullMatch
    StringToHashBucket StringToHashBucketFast StringToHashBucketStrong Complex ComplexAbs Real Imag Conj
    Angle EluGrad InvGrad LeakyReluGrad ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad SeluGrad SigmoidGrad SoftplusGrad
    SoftsignGrad SqrtGrad TanhGrad""".split()
)


@batching_rule(*ELEMENTWISE - {"IdentityN", "PlaceholderWithDefault"}, data=None, entries=True)
def elementwise(view: View, op: tf.Operation, states: list[State]) -> State | list[State] | None:
    if len(states) == 1 and (isinstance(states[0], Items | Handle) or getattr(states[0], "blocks", 1) > 1):
        return states[0]
    if any(isinstance(s, Mixed) for s in states):
        return of_entries(op, states)
    if lists := [s for s in states if isinstance(s, Items)]:
        return summed(lists) if op.type == "AddN" and len(lists) == len(states) else None
    if not any(isinstance(s, Batch) for s in states):
        return public_arithmetic(view, op, states)
    rank = max(t.shape.rank for t in op.inputs if t.shape.rank is not None)
    if op.type == "Select" and op.inputs[0].shape.rank == 1 and rank > 1:
        return chosen_rows(op, states)
    return broadcast(op, states, rank)


def broadcast(op: tf.Operation, states: list[State], rank: int) -> State:
    """Operands aligned at their last axes, of which at least one has examples."""
    batches = [(t, s) for t, s in zip(op.inputs, states, strict=True) if isinstance(s, Batch)]
    axis, *other_axes = {s.axis - t.shape.rank for t, s in batches}
    if other_axes:
        return mixed(op, "combines the examples along one axis with the examples along another")
    lengths = {batches[0][0].shape[axis], op.outputs[0].shape[axis]}
    if len(lengths - {None}) > 1:  # the only example is repeated
        return mixed(op, BY_POSITION)
    for t, s in zip(op.inputs, states, strict=True):
        if isinstance(s, Size) and not s.batch_free:
            return mixed(op, "makes an example's result depend on the batch size")
        if isinstance(s, Public | Size) and not row_free(t, s, axis):
            return mixed(op, BY_POSITION)
    return with_rows(op, axis + rank, (s for _, s in batches))


def chosen_rows(op: tf.Operation, states: list[State]) -> State:
    """Of a Select whose condition has one axis: it chooses rows."""
    batches = {s for s in states if isinstance(s, Batch)}
    free = all(s in batches or (isinstance(s, Public) and row_free(t, s, -t.shape.rank))
               for t, s in zip(op.inputs, states, strict=True))  # fmt: skip
    (state, *others) = batches
    return state if free and not others and state == Batch(0, state.rows) else mixed(op, "chooses between rows")


batching_rule("Identity", blocks=True, entries=True)(elementwise)


def of_entries(op: tf.Operation, states: list[State]) -> State | None:
    """Of a list of examples' entries: each by itself, with numbers that are the same for all."""
    of = {s for t, s in zip(op.inputs, states, strict=True) if not (isinstance(s, Public) and t.shape.rank == 0)}
    found = of.pop()
    if of or not isinstance(found, Entries) or (found.places and op.type not in ("Identity", "Cast")):
        return None
    return found


@batching_rule("IdentityN", mixed=True, any_rank=True)
def identities(view: View, op: tf.Operation, states: list[State]) -> State | list[State]:
    """Also what ends a tf.custom_gradient."""
    if "_gradient_op_type" in op.node_def.attr:
        name = getattr(gradient_function(op), "__qualname__", "")
        for beginning, transfer in ENDS.items():
            if name.startswith(beginning) and (known := transfer(view, op, states)) is not None:
                return known
    if met := next((s for s in states if isinstance(s, Mixed)), None):
        return met
    if len({s for s in states if isinstance(s, Batch)}) > 1 and passes_gradients_through(op):
        return mixed(op, "hands gradients from the examples along one axis to those along another")
    return list(states)


@batching_rule("Minimum", data=None, mixed=True)
def minimum(view: View, op: tf.Operation, states: list[State]) -> State | list[State] | None:
    """A constant, where the other side cannot be below it, whatever it holds."""
    if constant(op.outputs[0]) is not None:
        return Public()
    return next((s for s in states if isinstance(s, Mixed)), None) or elementwise(view, op, states)


def public_arithmetic(view: View, op: tf.Operation, states: list[State]) -> State | None:
    if not all(isinstance(s, Public | Size) for s in states):
        return None
    sizes = [s for s in states if isinstance(s, Size)]
    if not sizes:
        alike = (getattr(s, "alike", False) or t.shape.rank == 0 for t, s in zip(op.inputs, states, strict=True))
        return Public(deps(states), all(alike))
    free = all(s.batch_free for s in sizes)
    if deps(states):
        return Public(deps(states)) if free else mixed(op, "scales weights by the batch size")
    if any(t.shape.rank is None or t.shape.rank > 1 for t in op.inputs):
        return Public() if free else mixed(op, "spreads the batch size")
    columns = [view.entries(t) for t in op.inputs]
    width = max(len(c) for c in columns)
    columns = [c * width if len(c) == 1 else c for c in columns]
    return Size(tuple(monomial(op, row) for row in zip(*columns, strict=True)))


def monomial(op: tf.Operation, row: Sequence[Entry]) -> Entry:
    """Returns what an op makes of coefficients times powers of the batch size."""
    if any(power is None for _, power in row):
        return UNKNOWN
    found = _MONOMIALS[op.type](op, *row) if op.type in _MONOMIALS else None
    if found is not None:
        return found
    return (None, 0) if all(power == 0 for _, power in row) else UNKNOWN


def _cast(op: tf.Operation, x: Entry) -> Entry:
    source, to = op.inputs[0].dtype, op.outputs[0].dtype
    if x[1] and to.is_integer and source.is_floating and not isinstance(x[0], int):
        return UNKNOWN  # the rest would be cut off
    if x[1] and to.is_integer and not source.is_floating and to.size < 4:
        return UNKNOWN  # it may wrap
    return x


Power = tuple[int | None, int]  # an entry whose power is known


def _product(op: tf.Operation, x: Power, y: Power) -> Entry:
    (c, p), (d, q) = x, y
    product = None if c is None or d is None else c * d
    return (int(product) if product is not None and product == int(product) else product, p + q)


def _quotient(op: tf.Operation, x: Power, y: Power) -> Entry:
    (c, p), (d, q) = x, y
    quotient = int(c // d) if c is not None and d and c % d == 0 else None
    rounds = op.type == "FloorDiv" or op.outputs[0].dtype.is_integer
    if rounds and (p < q or (quotient is None and p != q)):
        return UNKNOWN
    return (quotient, p - q)


def _sum(op: tf.Operation, x: Power, y: Power) -> Entry | None:
    (c, p), (d, q) = x, y
    if c is None or d is None or p != q or p == 0:
        return None
    return (c - d if op.type == "Sub" else c + d, p)


_MONOMIALS: dict[str, Callable[..., Entry | None]] = {
    "Cast": _cast, "Mul": _product,
    **dict.fromkeys(("Identity", "StopGradient", "PreventGradient", "Snapshot"), lambda op, x: x),
    **dict.fromkeys(("FloorDiv", "RealDiv", "TruncateDiv", "DivNoNan", "Div"), _quotient),
    "Neg": lambda op, x: (None if x[0] is None else -x[0], x[1]),
    **dict.fromkeys(("AddV2", "Add", "Sub"), _sum),
    **dict.fromkeys(("Maximum", "Minimum"), lambda op, x, y: x if x == y and x[1] else None),
}  # fmt: skip


@batching_rule("EnsureShape", any_rank=True)
def ensure_shape(view, op, states):
    return states[0] if isinstance(states[0], Batch) else elementwise(view, op, states)  # of unknown rank, too


@batching_rule("PlaceholderWithDefault")
def freed(view, op, states):
    """A batch whose size is free, in place of the batch as it came in."""
    view.replace_sources({key(op.inputs[0]): op.outputs[0]})
    return elementwise(view, op, states)


@batching_rule("Bitcast")
def bits(view, op, states):
    """Of numbers of one size; else one number becomes a last axis of several, or a last axis one number. Keras 3 takes
    an argmax this way."""
    if op.inputs[0].dtype.size == op.outputs[0].dtype.size:
        return elementwise(view, op, states)
    (state,) = states
    if not isinstance(state, Batch):
        return None
    return state if state.axis < op.outputs[0].shape.rank else mixed(op, "works along the batch axis")


@batching_rule("BiasAdd", data=None, mixed=True)
def bias_add(view, op, states):
    if met := next((s for s in states if isinstance(s, Mixed)), None):
        return met
    x, b = states
    if not (isinstance(x, Batch) and isinstance(b, Public)):
        return None
    channel = 1 if channels_first(op) else op.inputs[0].shape.rank - 1
    return mixed(op, BY_POSITION) if x.axis == channel else x


@rule(*ELEMENTWISE - {"IdentityN"} | {"BiasAdd"})
def gradient(use: Use, units: Units) -> Contribution | None:
    """Any op that works entry by entry, with broadcasting."""
    if None in use.shape.as_list() or use.output.shape.rank is None or not use.g.dtype.is_floating:
        return None
    kind = use.op.type
    if kind in ("Add", "AddV2", "AddN", "BiasAdd") or (kind == "Sub" and use.at == 0):
        dy = use.g
    elif kind == "Sub":
        dy = -use.g
    elif kind == "Mul":
        dy = tf.cast(use.g, units.dtype) * tf.cast(use.inputs[1 - use.at], units.dtype)
    else:
        wide = tf.broadcast_to(use.weight, tf.shape(use.output))
        inputs = [wide if i == use.at else t for i, t in enumerate(use.inputs)]
        made = copy_op(use.op, inputs)[use.output.value_index]
        (dy,) = tf.gradients(made, [wide], [use.g], stop_gradients=[t for t in inputs if t is not wide])
        if dy is None:
            return None
    if kind == "BiasAdd" and channels_first(use.op):
        shape = tf.TensorShape([use.shape[0], *[1] * (use.output.shape.rank - 2)])
        return MaterializedGradient([tf.reshape(summed_to(dy, use.out, shape, units).formed(), [-1, use.shape[0]])])
    return summed_to(dy, use.out, use.shape, units)
