"""How an op that uses a weight turns its input and its output's gradient into per-example weight gradients.

A rule gets a `Use` (the op, which input is the weight, the gradient ``g`` of the summed per-example losses with
respect to the op's output) and returns one of three things, none of which adds examples up:

- `Outer`: the gradient of unit u is ``sum_t a[u, t]^T g[u, t]`` (dense, convolution, einsum). Its norm is found from
  two Gram matrices (the ghost norm, Li et al. 2022, arXiv:2110.05679) or by forming it, whichever costs less;
- `Lookup`: rows of g added up by index (embeddings), never laid out over the vocabulary;
- `Formed`: the gradient itself, ``[units, *shape]``.

A unit is an example, or a microbatch of several. All sums are taken in float32 or wider.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops import control_flow_util

from tfdpfl.clipping import graph as graph_tools
from tfdpfl.clipping.batch_axis import (
    ELEMENTWISE,
    PRODUCTS,
    PROMISED,
    Batch,
    BatchAxis,
    Public,
    constant,
    matmul_labels,
)

# A length that is unknown while tracing counts as this one when costs are compared.
TYPICAL_LENGTH = 64
# Gradients are formed where they take less than this many times the memory of the op's input and output. (A transformer
# of width 256, whose attention is at the tie: 1.2 x plain and 1.1 to 1.3 x its memory; with 2, 1.1 x and 1.6 x.)
FORMED_MEMORY = 1
# Pixels that are copied one by one cost alike, however few their channels. With fewer than GATHERED_CHANNELS, a row of
# the window is laid out first, by a convolution with an identity, if it has at most ROW_ENTRIES; and a whole window, if
# it has at most IDENTITY_ENTRIES.
GATHERED_CHANNELS, ROW_ENTRIES, IDENTITY_ENTRIES = 8, 128, 32
# Windows' places are computed while tracing where they are fewer than this; as constants they are held in memory.
CONSTANT_PLACES = 1 << 20


class Units:
    """The rows of a batch, grouped by unit.

    Args:
      batch_size: scalar int32 tensor.
      count: how many units the batch is cut into, a scalar int32 tensor; the batch size itself by default.
    """

    def __init__(self, batch_size: tf.Tensor, count: tf.Tensor | None, dtype: tf.DType):
        self.batch_size = batch_size
        self.single = count is None
        self.count = batch_size if count is None else count
        self.dtype = dtype
        self.any_bad: tf.Tensor | None = None
        self.good: tf.Tensor | None = None
        self.last_product: list[tf.Tensor] = []  # of patches: the next are made after it, so that few are in memory
        self._mended: dict[int, tf.Tensor] = {}
        self._row: tuple[tf.Tensor, tf.Tensor] | None = None

    def group(self, x: tf.Tensor, state: Batch) -> tf.Tensor:
        """[units, rows of the unit, other axes in order], in the working type unless it is made of integers."""
        if state.axis:
            x = tf.transpose(x, [state.axis, *[i for i in range(x.shape.rank) if i != state.axis]])
        if x.dtype.is_floating and x.dtype != self.dtype:
            x = tf.cast(x, self.dtype)
        if state.blocks > 1:  # [blocks x rows, ...] to [rows x blocks, ...]
            dims = tf.shape(x)[1:]
            x = tf.reshape(x, tf.concat([[state.blocks, -1], dims], 0))
            x = tf.reshape(tf.transpose(x, [1, 0, *range(2, x.shape.rank)]), tf.concat([[-1], dims], 0))
            state = Batch(0, None if state.rows is None else state.rows * state.blocks)
        if self.single and state.rows == 1:
            return tf.expand_dims(x, 1)
        if self.single and state.rows is not None and x.shape[1:].is_fully_defined():
            return tf.reshape(x, [-1 if x.shape[0] is None else x.shape[0] // state.rows, state.rows, *x.shape[1:]])
        dims = tf.shape(x)
        known = self.single and state.rows is not None
        rows = state.rows if known else dims[0] // tf.maximum(self.count, 1)
        rest = [d if d is not None else dims[i] for i, d in enumerate(x.shape[1:].as_list(), 1)]
        first = x.shape[0] // rows if known and x.shape[0] is not None else self.count
        return reshaped(x, [first, rows, *rest])

    def mend(self, tensors: list[tuple[tf.Tensor, Batch | None]]) -> None:
        """Has `mended` set units whose gradient is not finite to zero in these (of which a unit has an entry of the
        first axis, or the rows of a batch), so that 0 x inf is 0. One branch for all: each costs time to trace."""

        def masked() -> list[tf.Tensor]:
            zero = functools.cache(lambda dtype: tf.zeros([], dtype))  # zeros_like would be made on every step
            keep = functools.cache(lambda rank: tf.reshape(self.good, [-1] + [1] * (rank - 1)))
            result = []
            for x, state in tensors:
                if state is None:
                    kept = keep(x.shape.rank)
                else:
                    kept = self.per_row(tf.cast(self.good, self.dtype), x, state) > 0
                result.append(tf.where(kept, x, zero(x.dtype)))
            return result

        if tensors:
            kept = tf.cond(self.any_bad, masked, lambda: [x for x, _ in tensors])
            self._mended = {id(x): y for (x, _), y in zip(tensors, kept, strict=True)}

    def mended(self, x: tf.Tensor) -> tf.Tensor:
        return self._mended[id(x)]

    def scaled(self, g: tf.Tensor, c: tf.Tensor) -> tf.Tensor:
        """g [units, ...] times c [units]; zero where c is, whatever g."""
        return tf.math.multiply_no_nan(g, tf.reshape(c, [-1] + [1] * (g.shape.rank - 1)))

    def weighted(self, c: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        """sum_u c[u] x[u]."""
        shape = x.shape[1:]
        if not shape.num_elements():
            return tf.tensordot(c, x, 1)  # the same in many more ops
        if self._row is None or self._row[0] is not c:
            self._row = (c, tf.expand_dims(c, 0))
        flat = reshaped(x, [x.shape[0] or -1, shape.num_elements()])
        return tf.reshape(tf.matmul(self._row[1], flat), shape)

    def per_row(self, c: tf.Tensor, x: tf.Tensor, state: Batch) -> tf.Tensor:
        """c [units] repeated for the rows of x, shaped to broadcast against it."""
        shape = [-1 if i == state.axis else 1 for i in range(x.shape.rank)]
        if self.single and state.rows == 1 and state.blocks == 1:
            return tf.cast(tf.reshape(c, shape), x.dtype)
        n = tf.shape(x)[state.axis] // state.blocks
        rows = n // tf.maximum(self.count, 1)
        c = tf.tile(tf.reshape(tf.broadcast_to(c[:, None], [self.count, rows]), [n]), [state.blocks])
        return tf.cast(tf.reshape(c, shape), x.dtype)


def reshaped(x: tf.Tensor, dims: list) -> tf.Tensor:
    """x with these dimensions, of which some may be tensors, or one -1; x itself where they are its own."""
    static = [-1 if isinstance(d, tf.Tensor) else d for d in dims]
    if static.count(-1) > 1 or (-1 in static and 0 in static):
        return tf.reshape(x, tf.stack(dims))
    if x.shape.rank is not None and static == [-1 if d is None else d for d in x.shape]:
        return x
    return tf.reshape(x, static)  # fewer ops, and a static shape


@dataclasses.dataclass
class Use:
    op: tf.Operation  # the op that uses the weight (inside a call with one op: that op)
    at: int  # which of its inputs the weight is
    inputs: list[tf.Tensor]
    states: list
    weight: tf.Tensor  # the tensor at that input (for a resource: the variable's shape holder)
    g: tf.Tensor
    out: Batch
    output: tf.Tensor

    @property
    def shape(self) -> tf.TensorShape:
        return self.weight.shape


# -- what a rule may return --------------------------------------------------------------------------------------


def rounding(length: int | None, *widths: int | None, dtype: tf.DType) -> float:
    """How far a squared norm from Gram matrices [length, length] of rows so wide may be from the truth, relative to
    the sum of the squared norms of its terms: eight times what errors that are independent come to (Higham and Mary
    2019, doi:10.1137/18M1226312); with terms made to cancel it was at most half of this."""
    length = length or 16 * TYPICAL_LENGTH
    return 4 * float(np.finfo(dtype.as_numpy_dtype).eps) * math.sqrt(4 * length + sum(w or length for w in widths))


def formed_fits(t: int, a: int, p: int, repeats: float) -> bool:
    """Whether gradients of a x p entries take little enough memory beside the op's t x (a / repeats + p)."""
    return a * p < FORMED_MEMORY * t * (a / repeats + p)


class Outer:
    """``F[u] = sum_t a[u, t]^T g[u, t]``; with an axis n (groups, channels) a[u, t, n, :] with g[u, t, n, :].

    Args:
      a, g: [U, T, A], [U, T, P], or [U, T, n, A], [U, T, n, P].
      layout: maps F, [..., A, P] or [..., n, A, P], to [..., *weight shape]; only moves entries.
      same: what must agree for two uses of one variable to be one longer sum over T.
      total: the gradient of the weight given c [U], without a or F, where an op does it at once.
      needs: what ``total`` has mended, with the examples' axis.
      repeats: how often an entry of the op's input stands in a (a convolution's patches).
      gram: makes a aᵀ [U, T, T] without a.
    """

    def __init__(
        self, a, g, layout: Callable, same: tuple, total: Callable | None = None, needs: tuple = (), repeats: float = 1,
        gram: Callable | None = None,
    ):  # fmt: skip
        self.a, self.g, self.layout, self.same, self._total, self._needs = a, g, layout, same, total, needs
        self._repeats, self._gram = repeats, gram
        self._formed: Formed | None = None
        self.doubt: tf.Tensor | None = None

    def forms(self) -> bool:
        """Whether to form the gradients: T A P multiplications, of which the clipped sum then needs no more, against
        T^2 (A + P) for the Gram matrices and T A P for the sum; and A P numbers in memory, until all norms are known,
        against those of the op's input and output."""
        t, a, p = (TYPICAL_LENGTH if d is None else d for d in (self.g.shape[1], self.a.shape[-1], self.g.shape[-1]))
        return t > 1 and formed_fits(t, a, p, self._repeats)

    def raw(self) -> Formed:
        if self._formed is None:
            if self.a.shape.rank == 4:
                f = tf.einsum("utna,utnp->unap", self.a, self.g)
                self._formed = Formed([f], self.layout)
            elif (self.a.shape[-1] or 0) > (self.g.shape[-1] or 0):  # the wide side last is faster
                f = tf.matmul(self.g, self.a, transpose_a=True)
                self._formed = Formed([f], lambda parts: self.layout(turned(parts)))
            else:
                self._formed = Formed([tf.matmul(self.a, self.g, transpose_a=True)], self.layout)
        return self._formed

    def formed(self) -> tf.Tensor:
        return self.raw().formed()

    def squared_norms(self) -> tf.Tensor:
        if self.a.shape[1] == 1 and self.a.shape.rank == 3:
            a, g = squares(self.a), squares(self.g)
            self.doubt = lost_squares(self.a) * g + lost_squares(self.g) * a
            return a * g
        if self.forms():
            return self.raw().squared_norms()
        if self.a.shape.rank == 4:
            a, g = (tf.transpose(x, [0, 2, 1, 3]) for x in (self.a, self.g))
        else:
            a, g = self.a, self.g
        gram, other = self._gram() if self._gram is not None else products(a), products(g)
        axes = list(range(1, gram.shape.rank))
        sizes = tf.linalg.diag_part(gram) * tf.linalg.diag_part(other)
        allowed = rounding(self.g.shape[1], self.a.shape[-1], self.g.shape[-1], dtype=gram.dtype)
        self.doubt = allowed * tf.reduce_sum(sizes, axes[:-1])
        with tf.control_dependencies([self.doubt]):  # so that the product may take a factor's place
            return tf.reduce_sum(gram * other, axes)

    def to_mend(self) -> list[tuple[tf.Tensor, Batch | None]]:
        if self._formed is not None:
            return self._formed.to_mend()
        if self._total is not None:
            return list(self._needs)
        return [(self.g if self._narrow() else self.a, None)]

    def _narrow(self) -> bool:
        """Whether a is the smaller side, which is the one that is scaled."""
        return (self.a.shape[-1] or TYPICAL_LENGTH) < (self.g.shape[-1] or TYPICAL_LENGTH)

    def weighted_sum(self, c: tf.Tensor, units: Units) -> tf.Tensor:
        if self._formed is not None:
            return self._formed.weighted_sum(c, units)
        if self._total is not None:
            return self._total(c)
        if self._narrow():
            a, g = units.scaled(self.a, c), units.mended(self.g)
        else:
            a, g = units.mended(self.a), units.scaled(self.g, c)
        if a.shape.rank == 4:
            return self.layout(tf.einsum("utna,utnp->nap", a, g))
        a, g = (tf.reshape(x, [-1, x.shape[-1]]) for x in (a, g))
        return self.layout(tf.matmul(a, g, transpose_a=True))

    @classmethod
    def merged(cls, parts: list[Outer]) -> Outer:
        if len(parts) == 1:
            return parts[0]
        a, g = (tf.concat([getattr(p, name) for p in parts], 1) for name in ("a", "g"))
        return cls(a, g, parts[0].layout, parts[0].same)


class Lookup:
    """Rows of g [U, T, D] belong to the table rows ids [U, T]."""

    def __init__(self, ids: tf.Tensor, g: tf.Tensor, shape: tf.TensorShape):
        self.ids, self.g, self.shape = ids, g, shape
        self.same = ("lookup", tuple(shape))
        self.doubt: tf.Tensor | None = None

    @property
    def vocabulary(self) -> int:
        return self.shape[0]

    def squared_norms(self) -> tf.Tensor:
        length = self.g.shape[1]
        if length == 1:
            return squares(self.g)
        if length is not None and length <= 256:
            alike = tf.equal(self.ids[:, :, None], self.ids[:, None, :])
            gram = products(self.g)
            self.doubt = rounding(length, self.g.shape[2], dtype=gram.dtype) * tf.linalg.trace(gram)
            return tf.reduce_sum(tf.where(alike, gram, tf.zeros_like(gram)), [1, 2])
        units, t = tf.shape(self.g)[0], tf.shape(self.g)[1]
        distinct, where = tf.unique(self._keys(units))
        rows = tf.math.unsorted_segment_sum(tf.reshape(self.g, [units * t, self.g.shape[2]]), where, tf.size(distinct))
        return tf.math.unsorted_segment_sum(squares(rows), distinct // self.vocabulary, units)

    def formed(self) -> tf.Tensor:
        units = tf.shape(self.g)[0]
        flat = tf.reshape(self.g, [-1, self.g.shape[2]])
        table = tf.math.unsorted_segment_sum(flat, self._keys(units), units * self.vocabulary)
        return tf.reshape(table, [units, *self.shape])

    def _keys(self, units: tf.Tensor) -> tf.Tensor:
        """For each unit's id a number of its own, int64 [U T]; -1, which sums pass over, for an id that is not in the
        table: XLA does not stop at one, and it would be another unit's."""
        ids = tf.cast(self.ids, tf.int64)
        keys = tf.range(tf.cast(units, tf.int64))[:, None] * self.vocabulary + ids
        inside = tf.logical_and(ids >= 0, ids < self.vocabulary)
        return tf.reshape(tf.where(inside, keys, -tf.ones_like(keys)), [-1])

    def to_mend(self) -> list[tuple[tf.Tensor, Batch | None]]:
        return []

    def weighted_sum(self, c: tf.Tensor, units: Units) -> tf.Tensor:
        g = tf.reshape(units.scaled(self.g, c), [-1, self.g.shape[2]])
        table = tf.math.unsorted_segment_sum(g, tf.reshape(self.ids, [-1]), self.vocabulary)
        return tf.reshape(table, self.shape)

    @classmethod
    def merged(cls, parts: list[Lookup]) -> Lookup:
        if len(parts) == 1:
            return parts[0]
        ids = tf.concat([tf.cast(p.ids, tf.int64) for p in parts], 1)
        return cls(ids, tf.concat([p.g for p in parts], 1), parts[0].shape)


class Formed:
    """The gradients themselves, or pieces of them: [U, ...] each, which ``layout`` puts together as [U, *shape], and
    likewise without the first axis."""

    def __init__(self, parts: list[tf.Tensor], layout: Callable | None = None):
        self.parts = parts
        self.layout = layout
        self.same = ("formed",)
        self.doubt = None

    def formed(self) -> tf.Tensor:
        return self._laid(self.parts)

    def _laid(self, parts: list[tf.Tensor]) -> tf.Tensor:
        whole = parts[0] if len(parts) == 1 else parts
        return whole if self.layout is None else self.layout(whole)

    def squared_norms(self) -> tf.Tensor:
        norms = [squares(p) for p in self.parts]
        return norms[0] if len(norms) == 1 else tf.add_n(norms)

    def to_mend(self) -> list[tuple[tf.Tensor, Batch | None]]:
        return [(p, None) for p in self.parts]

    def weighted_sum(self, c: tf.Tensor, units: Units) -> tf.Tensor:
        return self._laid([units.weighted(c, units.mended(p)) for p in self.parts])

    @classmethod
    def merged(cls, parts: list[Formed]) -> Formed:
        return cls([tf.add_n([p.formed() for p in parts])]) if len(parts) > 1 else parts[0]


Contribution = Outer | Lookup | Formed


def turned(x: tf.Tensor) -> tf.Tensor:
    """The last two axes the other way round."""
    rank = x.shape.rank
    return tf.transpose(x, [*range(rank - 2), rank - 1, rank - 2])


def squares(x: tf.Tensor) -> tf.Tensor:
    """Sum of squares over all axes but the first."""
    axes = list(range(1, x.shape.rank))
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        return tf.reduce_sum(x * x, axes)
    # One pass without a copy of x, in about half the time; XLA has no such op, and fuses the two.
    return tf.square(tf.raw_ops.EuclideanNorm(input=x, axis=axes))


def lost_squares(x: tf.Tensor) -> float:
    """What of `squares` may be gone because entries' squares are below the smallest number."""
    return float(np.finfo(x.dtype.as_numpy_dtype).tiny) * (x.shape[1:].num_elements() or TYPICAL_LENGTH)


def products(x: tf.Tensor) -> tf.Tensor:
    """The Gram matrices of x [..., T, A], [..., T, T]."""
    return tf.matmul(x, x, transpose_b=True)


# -- rules -------------------------------------------------------------------------------------------------------

Rule = Callable[[Use, Units], "Contribution | None"]
RULES: dict[str, Rule] = {}


def rule(*kinds: str) -> Callable[[Rule], Rule]:
    """Registers a rule for op types. A rule that returns None leaves the use to the exact fallback."""

    def add(function: Rule) -> Rule:
        for kind in kinds:
            RULES[kind] = function
        return function

    return add


def register_rule(op_type: str, *, batch_axis: int | None = None) -> Callable[[Rule], Rule]:
    """Teaches the engine an op: a decorator for a function ``rule(use, units)``.

        @tfdpfl.clipping.register_rule("MyScale", batch_axis=0)
        def scale(use, units):  # y = MyScale(x, w), entry by entry
            return summed_to(use.g * use.inputs[0], use.out, use.shape, units)

    Args:
      op_type: the op's type, as in ``tensor.op.type``.
      batch_axis: give it for an op that the engine does not know: the axis of the examples in its inputs that have
        them and in its outputs. It is your promise that row i of an output depends on row i of each input alone, and
        that the op's gradient keeps to that; ε hangs on it. `validate` checks it with numbers.

    The rule returns `Outer`, `Lookup` or `Formed` from `tfdpfl.clipping.rules` (see there), or None to leave a use to
    the exact fallback. A rule for an op that has one replaces it.

    Raises:
      ValueError: TensorFlow knows no such op.
    """
    if not isinstance(op_type, str) or op_def_registry.get(op_type) is None:
        raise ValueError(
            f"op_type={op_type!r} is no op of TensorFlow; give tensor.op.type of a result, and load a library of your "
            "own ops before."
        )
    if batch_axis is not None:
        PROMISED[op_type] = batch_axis
    return rule(op_type)


def dims_of(t: tf.Tensor) -> list:
    """The dimensions; -1 for one that is not known while tracing, tensors for several."""
    shape = t.shape.as_list()
    if shape.count(None) == 1 and 0 not in shape:
        return [-1 if d is None else d for d in shape]
    if None in shape:
        dynamic = tf.shape(t)
        shape = [dynamic[i] if d is None else d for i, d in enumerate(shape)]
    return shape


def volume(dims: list) -> int | tf.Tensor:
    """Their product; -1 if one is."""
    if any(isinstance(d, int) and d < 0 for d in dims):
        return -1
    known = math.prod(d for d in dims if not isinstance(d, tf.Tensor))
    unknown = [d for d in dims if isinstance(d, tf.Tensor)]
    if not unknown:
        return known
    return known * (tf.reduce_prod(tf.stack(unknown)) if len(unknown) > 1 else unknown[0])


@rule(*PRODUCTS)
def product(use: Use, units: Units) -> Contribution | None:
    """MatMul, BatchMatMul and Einsum: by the labels of their axes."""
    if len(use.inputs) != 2 or use.shape.as_list().count(None):
        return None
    labels = list(matmul_labels(use.op))
    other = 1 - use.at
    x, state = use.inputs[other], use.states[other]
    lx, lw, lo = labels[other], labels[use.at], labels[2]
    if isinstance(state, Public) and lo[use.out.axis] in lx:  # rows of equal values, as of a first recurrent state
        state = Batch(lx.index(lo[use.out.axis]), use.out.rows)
    if not isinstance(state, Batch):
        return None
    if any(len(set(names)) < len(names) for names in (lx, lw, lo)):
        return None
    mark = lx[state.axis]
    # An axis of length one in one operand and not in the other is absent there: it broadcasts.
    wide = {n: d for n, d in zip(lw, use.shape.as_list(), strict=True)}
    narrow_x = [n for n, d in zip(lx, x.shape.as_list(), strict=True) if d == 1 and wide.get(n, 1) != 1]
    if narrow_x:
        x = tf.squeeze(x, [lx.index(n) for n in narrow_x])
        lx = [n for n in lx if n not in narrow_x]
        state = Batch(lx.index(mark), state.rows)
    kept = [n for n in lw if not (wide[n] == 1 and n in lo and n in lx)]
    if mark in kept or any(n not in lo and n not in lx for n in kept):
        return None
    if any(n not in lo and n not in kept and n != mark for n in lx):  # summed over x alone
        gone = [n for n in lx if n not in lo and n not in kept]
        x = tf.reduce_sum(x, [lx.index(n) for n in gone])
        lx = [n for n in lx if n not in gone]
        state = Batch(lx.index(mark), state.rows)
    t = [n for n in lo if n in lx and n not in kept and n != mark]
    n_ = [n for n in lo if n in lx and n in kept]
    a_ = [n for n in lx if n in kept and n not in lo]
    p_ = [n for n in lo if n in kept and n not in lx]
    a = arranged(x, lx, state, [t, n_, a_], units)
    g = arranged(use.g, lo, use.out, [t, n_, p_], units)
    for side, own in ((a, a_), (g, p_)):  # the input's own shape may be less known than the weight's
        side.set_shape([None] * (side.shape.rank - 1) + [math.prod(wide[n] for n in own)])
    order = [*n_, *a_, *p_]
    sizes = [wide[n] for n in order]
    final = use.shape.as_list()
    grouped = bool(n_)

    def layout(f: tf.Tensor) -> tf.Tensor:
        lead = f.shape.rank - (3 if grouped else 2)
        head = [f.shape[0] or -1] if lead else []
        f = reshaped(f, [*head, *sizes])
        if order != kept:
            f = tf.transpose(f, [*range(lead), *[lead + order.index(n) for n in kept]])
        return reshaped(f, [*head, *final])

    return Outer(a, g, layout, ("product", tuple(n_), tuple(lw.index(n) for n in order), tuple(final)))


def arranged(x: tf.Tensor, labels: list[str], state: Batch, groups: list[list[str]], units: Units) -> tf.Tensor:
    """[U, rows x first group, (second group,) last group], each group of axes flattened."""
    rest = [n for i, n in enumerate(labels) if i != state.axis]
    x = units.group(x, state)  # [U, m, rest...]
    order = [n for group in groups for n in group]
    if order != rest:
        x = tf.transpose(x, [0, 1, *[2 + rest.index(n) for n in order]])
    dims = dims_of(x)
    t, n, last = (len(group) for group in groups)
    parts = [volume(dims[1 : 2 + t]), volume(dims[2 + t : 2 + t + n]), volume(dims[2 + t + n :])]
    if not n:
        parts.pop(1)
    shape = [dims[0], *parts]
    return reshaped(x, shape)


@rule("GatherV2", "ResourceGather")
def gather(use: Use, units: Units) -> Contribution | None:
    if use.at != 0 or use.op.get_attr("batch_dims") != 0:
        return None
    # Ids that are the same for each example of a batch of static size hold none.
    of_ids = use.states[1] if isinstance(use.states[1], Batch) else use.out
    if use.op.type == "GatherV2" and constant(use.inputs[2]) != 0:
        return None
    shape = use.shape
    if shape.num_elements() is None:
        return None
    ids = units.group(use.inputs[1], of_ids)
    g = units.group(use.g, use.out)
    width = math.prod(shape.as_list()[1:])
    dims = dims_of(ids)
    length = volume(dims[1:])
    flat = [dims[0], length]
    ids = reshaped(ids, flat)
    g = reshaped(g, [*flat, width])
    return Lookup(ids, g, shape)


def summed_to(dy: tf.Tensor, out: Batch, shape: tf.TensorShape, units: Units) -> Formed:
    """Gradient dy of a broadcast output, summed to a weight's shape for each unit."""
    weight = shape.as_list()
    rank = dy.shape.rank
    aligned = [1] * (rank - len(weight)) + weight
    aligned.pop(out.axis)
    grouped = units.group(dy, out)  # [U, m, others]
    axes = [i for i, d in enumerate([1, *aligned], 1) if d == 1 and grouped.shape[i] != 1]
    if axes:
        grouped = tf.reduce_sum(grouped, axes, keepdims=True)
    return Formed([reshaped(grouped, [grouped.shape[0] or units.count, *weight])])


def elementwise(use: Use, units: Units) -> Contribution | None:
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
        made = graph_tools.copy_op(use.op, inputs)[use.output.value_index]
        (dy,) = tf.gradients(made, [wide], [use.g], stop_gradients=[t for t in inputs if t is not wide])
        if dy is None:
            return None
    if kind == "BiasAdd" and use.op.get_attr("data_format") in (b"NCHW", "NCHW"):
        shape = tf.TensorShape([use.shape[0], *[1] * (use.output.shape.rank - 2)])
        return Formed([tf.reshape(summed_to(dy, use.out, shape, units).formed(), [-1, use.shape[0]])])
    return summed_to(dy, use.out, use.shape, units)


@rule("BroadcastTo", "Tile")
def broadcast(use: Use, units: Units) -> Contribution | None:
    """A weight that every example gets, such as the token of a class."""
    if use.at != 0 or None in use.shape.as_list():
        return None
    g, dims, copies = use.g, [], []
    own = [1] * (g.shape.rank - use.shape.rank) + use.shape.as_list()
    for entries, length, now in zip(own, g.shape, dims_of(g), strict=True):
        if entries in (1, length):
            dims.append(now)
        elif length is None:
            return None
        else:  # tiles of several entries: copies one after the other
            copies.append(len(dims))
            dims += [length // entries, entries]
    if copies:
        g = tf.reduce_sum(reshaped(g, dims), copies)
    return summed_to(g, use.out, use.shape, units)


for _kind in ELEMENTWISE - {"IdentityN"} | {"BiasAdd"}:
    RULES[_kind] = elementwise


# -- convolutions ------------------------------------------------------------------------------------------------


@rule("Conv2D", "Conv3D", "DepthwiseConv2dNative", "Conv2DBackpropInput", "Conv3DBackpropInputV2",
      "DepthwiseConv2dNativeBackpropInput")  # fmt: skip
def convolution(use: Use, units: Units) -> Contribution | None:
    """Patches of the input against the output's gradient; a transposed convolution swaps the two."""
    if use.at != 1 or None in use.shape.as_list():
        return None
    kind = use.op.type
    transposed = "BackpropInput" in kind
    x, g = (use.g, use.inputs[2]) if transposed else (use.inputs[0], use.g)
    state = use.out if transposed else use.states[0]
    other = use.states[2] if transposed else use.out
    if not isinstance(state, Batch) or state.axis or not isinstance(other, Batch) or other.axis:
        return None
    plan = Window.of(use.op, use.shape.as_list())
    if x.shape[-1 if not plan.channels_first else 1] is None:
        return None
    x, g = (tf.cast(t, units.dtype) for t in (x, g))
    if plan.channels_first:
        move = [0, *range(2, x.shape.rank), 1]
        x, g = tf.transpose(x, move), tf.transpose(g, move)
    out = places_of(g)
    final, cin, cout = use.shape.as_list(), x.shape[-1], g.shape[-1] or use.shape[-1]
    groups = cin if kind.startswith("Depthwise") else cin // use.shape[-2]
    taps = math.prod(plan.size)

    def flat(t: tf.Tensor, s: Batch, *tail: int) -> tf.Tensor:
        """[B, *places, C] to [U, places of the unit, *tail]."""
        t = units.group(t, s)
        dims = dims_of(t)
        shape = [dims[0], volume(dims[1:-1]), *tail]
        return reshaped(t, shape)

    def layout(f: tf.Tensor) -> tf.Tensor:
        lead = f.shape.rank - (3 if groups > 1 else 2)
        if groups > 1:  # [..., n, taps x c, p] to [..., taps x c, n, p]
            f = tf.transpose(f, [*range(lead), lead + 1, lead, lead + 2])
        return tf.reshape(f, [*([f.shape[0] or -1] if lead else []), *final])

    if groups == 1:
        repeats = max(1.0, taps / math.prod(plan.strides))
        g_flat = flat(g, other, cout)
        forms = formed_fits(g_flat.shape[1] or TYPICAL_LENGTH, taps * cin, cout, repeats)
        if forms and taps > 1:
            parts = []
            for piece in plan.pieces(x, out):
                with tf.control_dependencies(units.last_product):
                    a = piece()
                parts.append(tf.matmul(g_flat, flat(a, state, a.shape[-1]), transpose_a=True))
                units.last_product = parts[-1:]
            return Formed(parts, lambda pieces: layout(turned(tf.concat(pieces, -1))))
        (whole,) = plan.pieces(x, out, taps)
        a_flat = flat(whole(), state, taps * cin)
        alone = units.single and state.rows == other.rows == state.blocks == other.blocks == 1
        gram = plan.gram(x, out) if alone and taps > 1 else None
        mark = ("conv", tuple(final), taps)
        needs = tuple((use.inputs[i], use.states[i]) for i in batch_inputs(use))
        # Not for one tap: the product is as fast, and oneDNN's gradient of a strided one writes outside its memory on
        # a batch of one (TensorFlow 2.14 and 2.21, [1, 12, 12, 8] to 16 channels by strides of 2).
        total = (lambda c: filter_gradient(use, c, units)) if taps > 1 else None
        return Outer(a_flat, g_flat, layout, mark, total, needs, repeats, gram)
    # Groups (of one channel each, in a depthwise convolution): one small product a group.
    width, per_group = cout // groups, cin // groups
    g_flat = flat(g, other, groups, width)
    parts = []
    for view in plan.views(x, out):
        v = flat(view, state, groups, per_group)
        if per_group == 1 and width == 1:
            parts.append(tf.reduce_sum(v * g_flat, 1)[..., None])  # [U, n, 1, 1]
        else:
            parts.append(tf.einsum("utna,utnp->unap", v, g_flat))
    return Formed([layout(tf.concat(parts, 2))])


def batch_inputs(use: Use) -> list[int]:
    return [i for i, s in enumerate(use.states) if isinstance(s, Batch) and i != use.at]


def filter_gradient(use: Use, c: tf.Tensor, units: Units) -> tf.Tensor:
    """The clipped sum by the op's own filter gradient, on a gradient scaled example by example; in the working type,
    since a sum over the batch that is rounded to the op's passes the clip."""
    wide = lambda t: tf.cast(t, units.dtype) if t.dtype.is_floating else t  # noqa: E731
    g = wide(use.g)
    g = tf.math.multiply_no_nan(g, units.per_row(c, g, use.out))
    batch = batch_inputs(use)
    inputs = [wide(units.mended(t) if i in batch else t) for i, t in enumerate(use.inputs)]
    inputs[use.at] = tf.stop_gradient(wide(use.weight))
    attrs = {**graph_tools.attributes(use.op), "T": tf.compat.v1.AttrValue(type=units.dtype.as_datatype_enum)}
    made = graph_tools.copy_op(use.op, inputs, attrs, [units.dtype])[use.output.value_index]
    others = [t for i, t in enumerate(inputs) if i != use.at]
    (dw,) = tf.gradients(made, [inputs[use.at]], [g], stop_gradients=others)
    return dw


@dataclasses.dataclass
class Window:
    """A convolution's geometry, in spatial axes only."""

    size: list[int]
    strides: list[int]
    rates: list[int]
    padding: str
    explicit: list[int]
    channels_first: bool

    @classmethod
    def of(cls, op: tf.Operation, weight: list[int]) -> Window:
        form = op.get_attr("data_format")
        form = form.decode() if isinstance(form, bytes) else form
        first = form.startswith("NC")
        spatial = slice(2, None) if first else slice(1, -1)
        padding = op.get_attr("padding")
        padding = padding.decode() if isinstance(padding, bytes) else padding
        explicit = list(op.get_attr("explicit_paddings")) if padding == "EXPLICIT" else []
        pairs = [explicit[2 * i : 2 * i + 2] for i in range(len(explicit) // 2)][spatial]
        return cls(
            size=weight[:-2],
            strides=list(op.get_attr("strides"))[spatial],
            rates=list(op.get_attr("dilations"))[spatial],
            padding=padding,
            explicit=[p for pair in pairs for p in pair],
            channels_first=first,
        )

    def pads(self, x: tf.Tensor, out: list) -> list[list]:
        """How many zeros the convolution puts before and behind each axis."""
        if self.explicit:
            return [self.explicit[i : i + 2] for i in range(0, len(self.explicit), 2)]
        result = []
        for k, s, r, o, n in zip(self.size, self.strides, self.rates, out, places_of(x), strict=True):
            need = (o - 1) * s + (k - 1) * r + 1 - n
            need = tf.maximum(need, 0) if isinstance(need, tf.Tensor) else max(need, 0)
            before = need // 2 if self.padding == "SAME" else 0
            result.append([before, need - before])
        return result

    def fitted(self, x: tf.Tensor, out: list) -> tf.Tensor:
        """x padded as the convolution pads it."""
        return filled(x, self.pads(x, out))

    def pieces(self, x: tf.Tensor, out: list, at_once: int | None = None) -> list[Callable]:
        """What makes what each window meets, [B, *out, entries x C], in the order of the kernel: so many entries of
        the window at once, or as many as take twice the memory of what they are copied from (thrice is a little
        faster, but 1.3 x plain's peak in a ResNet), or more of a large window."""
        if max(self.size) == max(self.strides) == 1 and not self.explicit:
            return [lambda: x]
        entries, pads = math.prod(self.size) * x.shape[-1], self.pads(x, out)
        if len(self.size) == 2 and entries <= IDENTITY_ENTRIES and all_known(*pads):
            return [lambda: laid_out(x, self.size, self.strides, self.rates, [[0, 0], *pads, [0, 0]])]
        x, window = self.beside(filled(x, pads))
        x, window = window.in_rows(x)
        met = window.meets(places_of(x), out)
        at_once = at_once or max(2 * math.prod(window.strides), met.shape[1] // 8, IDENTITY_ENTRIES // x.shape[-1])
        return [functools.partial(copied, x, met[:, i : i + at_once], out) for i in range(0, met.shape[1], at_once)]

    def beside(self, x: tf.Tensor) -> tuple[tf.Tensor, Window]:
        """As many pixels of the last axis as its stride, which lie beside one another, as one of more channels."""
        *sizes, k = self.size
        *strides, s = self.strides
        n, cin = x.shape[-2:]
        few = cin < GATHERED_CHANNELS
        if s == 1 or k % s or self.rates[-1] > 1 or n is None or (n % s and not few):
            return x, self
        x = filled(x, [*[[0, 0]] * len(sizes), [0, -n % s]])
        *lead, _, _ = dims_of(x)
        x = reshaped(x, [*lead, x.shape[-2] // s, s * cin])
        return x, dataclasses.replace(self, size=[*sizes, k // s], strides=[*strides, 1])

    def in_rows(self, x: tf.Tensor) -> tuple[tf.Tensor, Window]:
        """Where channels are few, what a window's row meets (or as many rows as the window moves by) as one pixel."""
        *_, wide = self.size
        cin = x.shape[-1]
        if len(self.size) < 2 or wide == 1 or cin >= GATHERED_CHANNELS or wide * cin > ROW_ENTRIES:
            return x, self
        (*_, high, _), (*_, down, aside), (*_, rate, across) = self.size, self.strides, self.rates
        rows = down if high % down == 0 and rate == 1 and down * wide * cin <= IDENTITY_ENTRIES else 1
        *lead, height, width, _ = dims_of(x)
        images = reshaped(x, [volume(lead), height, width, cin])
        laid = laid_out(images, [rows, wide], [rows, aside], [1, across])
        x = reshaped(laid, [*lead, *dims_of(laid)[1:]])
        moved = dataclasses.replace(
            self,
            size=[*self.size[:-2], high // rows, 1],
            strides=[*self.strides[:-2], down // rows, 1],
            rates=[*self.rates[:-1], 1],
        )
        return x, moved

    def views(self, x: tf.Tensor, out: list) -> list[tf.Tensor]:
        """For each entry of the window, the pixels that it meets, [B, *out, C]."""
        x = self.fitted(x, out)
        met = self.meets(places_of(x), out)
        return [copied(x, met[:, i : i + 1], out) for i in range(met.shape[1])]

    def meets(self, places: list, out: list) -> np.ndarray | tf.Tensor:
        """Which pixels, of all `places` in order, the entries of each window meet: [windows, entries]."""
        small = all_known(places, out) and math.prod(out) * math.prod(self.size) <= CONSTANT_PLACES
        numbers = functools.partial(np.arange, dtype=np.int32) if small else tf.range
        reshape = np.reshape if small else tf.reshape
        n, met = len(out), 0
        for axis, (k, s, r, o, length) in enumerate(zip(self.size, self.strides, self.rates, out, places, strict=True)):
            at = s * numbers(o)[:, None] + r * numbers(k)[None]
            shape = [1] * (2 * n)
            shape[axis], shape[n + axis] = o, k
            met = met * length + reshape(at, shape)
        return reshape(met, [-1, math.prod(self.size)])

    def gram(self, x: tf.Tensor, out: list) -> Callable | None:
        """Makes the patches' Gram matrices [B, T, T] from those of the pixels, along which two patches move together.
        None where that costs more, or strides do not divide the window."""
        places = [o + (k // s - 1) * r for k, s, r, o in zip(self.size, self.strides, self.rates, out, strict=True)]
        if not all_known(places, places_of(x)):
            return None
        uneven = any(k % s for k, s in zip(self.size, self.strides, strict=True))
        if max(self.strides) > 1 and (uneven or max(self.rates) > 1):
            return None
        entries, length = math.prod(self.size) // math.prod(self.strides), math.prod(out)
        if entries == 1 or math.prod(places) ** 2 > entries * length**2:
            return None

        def made() -> tf.Tensor:
            # Of strides, what they pass over is one pixel.
            block = dataclasses.replace(self, size=self.strides, rates=[1] * len(out))
            fitted = self.fitted(x, out)
            pixels = pixels_of(copied(fitted, block.meets(places_of(fitted), places), places))
            gram = reshaped(products(pixels), [-1, *places, *places])
            for axis, (k, s, r, o) in enumerate(zip(self.size, self.strides, self.rates, out, strict=True)):
                before, between = [slice(None)] * (1 + axis), [slice(None)] * (len(out) - 1)
                moved = [slice(i * r, i * r + o) for i in range(k // s)]
                gram = tf.add_n([gram[(*before, at, *between, at)] for at in moved])
            return reshaped(gram, [-1, length, length])

        return made


def places_of(x: tf.Tensor) -> list:
    """The lengths of the axes between the first and the last; tensors, where they are not known while tracing."""
    lengths = x.shape[1:-1].as_list()
    return lengths if None not in lengths else [tf.shape(x)[i] if n is None else n for i, n in enumerate(lengths, 1)]


def all_known(*lengths: list) -> bool:
    """Whether all of them are, while tracing."""
    return not any(isinstance(n, tf.Tensor) for part in lengths for n in part)


def pixels_of(x: tf.Tensor) -> tf.Tensor:
    """[B, *places, C] to [B, pixels, C]."""
    return reshaped(x, [x.shape[0] or -1, volume(places_of(x)), x.shape[-1]])


def copied(x: tf.Tensor, met: np.ndarray | tf.Tensor, out: list) -> tf.Tensor:
    """The pixels that entries of windows meet, as in `Window.meets`: [B, *out, entries x C]. Faster than
    tf.image.extract_patches, and mostly than slices."""
    if met.shape[1] == 1 and met.shape[0] is not None and met.shape[0] == x.shape[1:-1].num_elements():
        return x  # each window meets a pixel of its own
    pixels = tf.gather(pixels_of(x), tf.reshape(met, [-1]), axis=1)
    return reshaped(pixels, [x.shape[0] or -1, *out, met.shape[1] * x.shape[-1]])


def filled(x: tf.Tensor, pads: list[list]) -> tf.Tensor:
    """x with zeros before and behind its axes between the first and the last."""
    if all_known(*pads) and not np.any(pads):
        return x
    width, channels = x.shape[-2:]
    if width is None or not all_known(*pads):
        return tf.pad(x, [[0, 0], *pads, [0, 0]])
    # A row of pixels as one axis: the same in a third of the time, if channels are few.
    rows = reshaped(x, [*dims_of(x)[:-2], width * channels])
    rows = tf.pad(rows, [[0, 0], *pads[:-1], [n * channels for n in pads[-1]]])
    return reshaped(rows, [*dims_of(rows)[:-1], width + sum(pads[-1]), channels])


def laid_out(x: tf.Tensor, size: list, strides: list, rates: list, pads: list | str = "VALID") -> tf.Tensor:
    """What each window of images meets, [B, *out, entries x C], by a convolution with an identity: fast for few
    entries, with whose square its work grows."""
    entries = math.prod(size) * x.shape[-1]
    eye = tf.reshape(tf.eye(entries, dtype=x.dtype), [*size, x.shape[-1], entries])
    return tf.nn.conv2d(x, eye, strides, pads, dilations=rates)


def inner_use(op: tf.Operation, analysis: BatchAxis) -> tuple[tf.Operation, list[int]] | None:
    """Looks into a call whose body is one op: that op, and which inputs of the call feed it."""
    from tfdpfl.clipping.batch_axis import CALLS, function_graph

    if op.type not in CALLS or len(op.outputs) != 1:
        return None
    body = function_graph(op.graph, op.get_attr("f").name, list(op.inputs))
    t = graph_tools.source(body.outputs[0])
    names = [i.op.name for i in body.inputs]
    feeds = []
    for i in t.op.inputs:
        i = graph_tools.source(i)
        if i.op.name not in names:
            return None
        feeds.append(names.index(i.op.name))
    return (t.op, feeds) if feeds else None
