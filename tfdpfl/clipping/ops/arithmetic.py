"""Sums, products, quotients and casts: ops entry by entry of which more is known than of others."""

from __future__ import annotations

import functools

import tensorflow as tf

from tfdpfl.clipping.gradients import Contribution, MaterializedGradient, Units, Use, summed_to
from tfdpfl.clipping.graph import channels_first, constant
from tfdpfl.clipping.ops.elementwise import ENTRYWISE, elementwise, entrywise_rule, gradient
from tfdpfl.clipping.registry import Move, View, teach
from tfdpfl.clipping.states import BY_POSITION, UNKNOWN, Batch, Entry, Mixed, Public, State, mixed

__all__: list[str] = []

Power = tuple[int | None, int]  # an entry whose power is known


# -- sums --------------------------------------------------------------------------------------------------------


@entrywise_rule
def of_sum(use: Use, units: Units) -> tf.Tensor:
    return use.g


@entrywise_rule
def of_difference(use: Use, units: Units) -> tf.Tensor:
    return -use.g if use.at else use.g


def sum_of_sizes(op: tf.Operation, x: Power, y: Power, sign: int = 1) -> Entry | None:
    (c, p), (d, q) = x, y
    return None if c is None or d is None or p != q or p == 0 else (c + sign * d, p)


def bias_add(view: View, op: tf.Operation, states: list[State]) -> State | None:
    if met := next((s for s in states if isinstance(s, Mixed)), None):
        return met
    x, b = states
    if not (isinstance(x, Batch) and isinstance(b, Public)):
        return None
    channel = 1 if channels_first(op) else op.inputs[0].shape.rank - 1
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


# -- limits and types ----------------------------------------------------------------------------------------------


def minimum(view: View, op: tf.Operation, states: list[State]) -> State | list[State] | None:
    """A constant, where the other side cannot be below it, whatever it holds."""
    if constant(op.outputs[0]) is not None:
        return Public()
    return next((s for s in states if isinstance(s, Mixed)), None) or elementwise(view, op, states)


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

teach("Add", "AddV2", moves=ENTRYWISE, rule=of_sum, size=sum_of_sizes)
teach("AddN", moves=ENTRYWISE, rule=of_sum)
teach("Sub", moves=ENTRYWISE, rule=of_difference, size=functools.partial(sum_of_sizes, sign=-1))
teach("BiasAdd", moves=Move(bias_add, data=None, mixed=True), rule=of_bias)
teach("Mul", moves=ENTRYWISE, rule=of_product, size=product_of_sizes)
teach("RealDiv", "Div", "DivNoNan", "FloorDiv", "TruncateDiv", moves=ENTRYWISE, rule=gradient, size=quotient_of_sizes)
teach("Neg", moves=ENTRYWISE, rule=gradient, size=negative)
teach("Cast", moves=ENTRYWISE, rule=gradient, size=cast_size)
teach("Maximum", moves=ENTRYWISE, rule=gradient, size=alike)
teach("Minimum", moves=Move(minimum, data=None, mixed=True), rule=gradient, size=alike)
