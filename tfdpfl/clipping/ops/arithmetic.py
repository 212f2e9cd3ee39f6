"""Sums, products, quotients and casts: ops entry by entry of which more is known than of others."""

from __future__ import annotations

import functools
import operator
import re
import warnings

import numpy as np
import tensorflow as tf

from tfdpfl.clipping.gradients import Contribution, MaterializedGradient, Units, Use, summed_to
from tfdpfl.clipping.graph import channels_first, constant, input_rank
from tfdpfl.clipping.loss import PerExampleLoss, Term, kind_of
from tfdpfl.clipping.ops.elementwise import ENTRYWISE, alone, compared, elementwise, entrywise_rule, gradient, in_order
from tfdpfl.clipping.ops.lists import summed
from tfdpfl.clipping.refusals import OVERLAP, WEIGHTED
from tfdpfl.clipping.registry import Move, View, teach
from tfdpfl.clipping.sizes import is_average
from tfdpfl.clipping.states import BY_POSITION, UNKNOWN, Batch, Entry, Items, Public, State, first_mixed, mixed
from tfdpfl.errors import PrivacyError

__all__: list[str] = []

Power = tuple[int | None, int]  # an entry whose power is known


# -- sums --------------------------------------------------------------------------------------------------------


@entrywise_rule
def of_sum(use: Use, units: Units) -> tf.Tensor:
    return use.g


@entrywise_rule
def of_difference(use: Use, units: Units) -> tf.Tensor:
    return -use.g if use.at else use.g


def added(view: View, op: tf.Operation, states: list[State]) -> State | None:
    """AddN adds lists, too."""
    lists = [s for s in states if isinstance(s, Items)]
    alone = len(lists) < len(states) or len(states) == 1
    return elementwise(view, op, states) if alone else summed(lists)


def sum_of_sizes(op: tf.Operation, x: Power, y: Power, sign: int = 1) -> Entry | None:
    (c, p), (d, q) = x, y
    return None if c is None or d is None or p != q or p == 0 else (c + sign * d, p)


def addition(tail: PerExampleLoss, op: tf.Operation) -> Term | None:
    """What has no example in it, such as a regularizer, is set apart."""
    terms = tail.inputs(op)
    kind, rank = kind_of(terms), max(x.rank for x in terms)
    if kind is None:  # a batch's total added to every example's own row
        return None
    if kind == "ratio":
        return Term(kind, tail.apply(op, terms), rank)
    if op.type == "Sub":
        terms[1] = terms[1].changed(tf.negative)
    own = [tail.aligned(x, rank) for x in terms if not x.is_fixed]
    apart = [x.apart for x in terms if x.apart is not None]
    data = functools.reduce(operator.add, own)
    if not apart:
        return Term(kind, data, rank)
    public = functools.reduce(operator.add, apart)
    lengths = [1] * public.shape.rank + data.shape.as_list()[1:]
    if any(p not in (1, d) or p is None for p, d in zip(public.shape[::-1], lengths[::-1], strict=False)):
        data += tf.cast(tf.zeros_like(public), data.dtype)  # it may be longer than an example's own values
    return Term(kind, data, rank, public)


def bias_add(view: View, op: tf.Operation, states: list[State]) -> State | None:
    if met := first_mixed(states):
        return met
    x, b = states
    if not (isinstance(x, Batch) and isinstance(b, Public)):
        return None
    channel = 1 if channels_first(op) else input_rank(op) - 1
    return mixed(op, BY_POSITION) if x.axis == channel else x


def of_bias(use: Use, units: Units) -> Contribution | None:
    if not channels_first(use.op):
        return of_sum(use, units)
    if None in use.shape.as_list() or use.output.shape.rank is None or not use.g.dtype.is_floating:
        return None
    shape = tf.TensorShape([use.shape[0], *[1] * (use.output.shape.rank - 2)])
    return MaterializedGradient([tf.reshape(summed_to(use.g, use.out, shape, units).formed(), [-1, use.shape[0]])])


# -- products and quotients ----------------------------------------------------------------------------------------


@entrywise_rule
def of_product(use: Use, units: Units) -> tf.Tensor:
    return tf.cast(use.g, units.dtype) * tf.cast(use.inputs[1 - use.at], units.dtype)


def product_of_sizes(op: tf.Operation, x: Power, y: Power) -> Entry:
    (c, p), (d, q) = x, y
    product = None if c is None or d is None else c * d
    return (int(product) if product is not None and product == int(product) else product, p + q)


def quotient_of_sizes(op: tf.Operation, x: Power, y: Power) -> Entry:
    (c, p), (d, q) = x, y
    quotient = int(c // d) if c is not None and d and c % d == 0 else None
    rounds = op.type == "FloorDiv" or op.outputs[0].dtype.is_integer
    if rounds and (p < q or (quotient is None and p != q)):
        return UNKNOWN
    return (quotient, p - q)


def product(tail: PerExampleLoss, op: tf.Operation) -> Term | None:
    x, y = tail.inputs(op)
    kind, rank = kind_of([x, y]), max(x.rank, y.rank)
    if kind is None or x.kind == y.kind == "total":
        return None
    if kind == "ratio":
        return Term(kind, tail.apply(op, [x, y]), rank)
    if x.kind != kind:
        x, y = y, x
    if y.is_fixed:
        value = tail.aligned(x, rank) * tail.aligned(y, rank)
        return Term(kind, value, rank, x.changed_public(lambda v: v * y.value))
    return Term(kind, tail.apply(op, [tail.absorb(x), tail.absorb(y)]), rank)


def quotient(tail: PerExampleLoss, op: tf.Operation) -> Term:
    x, y = tail.inputs(op)
    kind, rank = kind_of([x, y]), max(x.rank, y.rank)
    if kind is None or y.kind == "total":
        overlap = re.search("dice|tversky", op.name)
        raise PrivacyError(
            f"The loss is divided by a sum over the examples of the batch ({op.type} {op.name!r}), so each example's "
            f"gradient depends on the others'. {OVERLAP if overlap else WEIGHTED}"
        )
    if y.kind == "count":  # where the mask leaves nothing there is nothing to divide
        return Term(kind, tf.math.divide_no_nan(tail.aligned(tail.absorb(x), rank), tail.aligned(y, rank)), rank)
    if kind == "ratio":
        return Term(kind, tail.aligned(x, rank) / tail.aligned(y, rank), rank)
    if y.is_fixed:
        by = _divisor(tail, op, y)
        value = tail.aligned(x, rank) / tf.cast(by, x.value.dtype)
        return Term(kind, value, rank, x.changed_public(lambda v: v / tf.cast(by, v.dtype)))
    return Term(kind, tail.apply(op, [tail.absorb(x), y]), rank)


def _divisor(tail: PerExampleLoss, op: tf.Operation, y: Term) -> tf.Tensor:
    """A number that a loss is divided by. The size of the whole batch is one for each replica on a batch of one."""
    if y.kind != "public":
        return y.value
    if is_average(op.outputs[0]):
        return tf.constant(tail.replicas, y.value.dtype)
    value = constant(y.value) if y.rank == 0 else None
    size = tail.known_size
    if value is not None and size is not None and value in (size, size * tail.replicas):
        warnings.warn(
            f"The loss is divided by the number {value:g}, and the batch has as many examples. The number is kept: "
            f"each example's loss is divided by {value:g} before its gradient is clipped, so updates are {value:g} "
            "times smaller than those of a mean. If you mean the batch size, write tf.shape(x)[0].",
            stacklevel=2,
        )
    return y.value


# -- limits and types ----------------------------------------------------------------------------------------------


def minimum(view: View, op: tf.Operation, states: list[State]) -> State | list[State] | None:
    """A constant, where the other side cannot be below it, whatever it holds."""
    if constant(op.outputs[0]) is not None:
        return Public()
    return first_mixed(states) or elementwise(view, op, states)


def limit(t: tf.Tensor) -> np.ndarray | None:
    """min(c, max(c, x)) of integers, as bincount writes it."""
    if t.shape.rank != 0:
        return None
    for limit, clipped in (t.op.inputs, t.op.inputs[::-1]):
        if t.dtype.is_integer and clipped.op.type == "Maximum" and limit.shape.rank == 0:
            top, floors = constant(limit), [constant(i) for i in clipped.op.inputs]
            if top is not None and any(f is not None and f >= top for f in floors):
                return top
    return None


def alike(op: tf.Operation, x: Power, y: Power) -> Entry | None:
    return x if x == y and x[1] else None


def cast_size(op: tf.Operation, x: Entry) -> Entry:
    source, to = op.inputs[0].dtype, op.outputs[0].dtype
    if x[1] and to.is_integer and source.is_floating and not isinstance(x[0], int):
        return UNKNOWN  # the rest would be cut off
    if x[1] and to.is_integer and not source.is_floating and to.size < 4:
        return UNKNOWN  # it may wrap
    return x


def negative(op: tf.Operation, x: Power) -> Entry:
    return (None if x[0] is None else -x[0], x[1])


# -- the records ------------------------------------------------------------------------------------------------------

teach(
    "Add",
    "AddV2",
    moves=ENTRYWISE,
    rule=of_sum,
    size=sum_of_sizes,
    tail=addition,
    adds=True,
    folds=lambda op, x, y: x + y,
)
teach("AddN", moves=Move(added, data=None, entries=True), rule=of_sum, tail=addition, adds=True)
teach(
    "Sub",
    moves=ENTRYWISE,
    rule=of_difference,
    size=functools.partial(sum_of_sizes, sign=-1),
    tail=addition,
    adds=True,
    folds=lambda op, x, y: x - y,
)
teach("BiasAdd", moves=Move(bias_add, data=None, mixed=True), rule=of_bias)
teach("Mul", moves=ENTRYWISE, rule=of_product, size=product_of_sizes, tail=product, folds=lambda op, x, y: x * y)
teach("RealDiv", "Div", "DivNoNan", moves=ENTRYWISE, rule=gradient, size=quotient_of_sizes, tail=quotient)
teach("FloorDiv", "TruncateDiv", moves=ENTRYWISE, rule=gradient, size=quotient_of_sizes)
teach("Neg", moves=ENTRYWISE, rule=gradient, size=negative, tail=alone, undo=lambda op, x, units: -x)
teach(
    "Cast",
    moves=ENTRYWISE,
    rule=gradient,
    size=cast_size,
    tail=alone,
    order=in_order,
    arranges=True,
    folds=lambda op, x: x,
)
teach("Maximum", moves=ENTRYWISE, rule=gradient, size=alike, tail=compared)
teach("Minimum", moves=Move(minimum, data=None, mixed=True), rule=gradient, size=alike, tail=compared, value=limit)
teach("FloorMod", moves=ENTRYWISE, rule=gradient, folds=lambda op, x, y: x % y)
