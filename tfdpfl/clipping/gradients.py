"""Each unit's gradient of a weight, in the form that its norm and the clipped sum cost least in.

A rule (`registry`) gets a `Use` (the op, which input is the weight, the gradient ``g`` of the summed per-example losses
with respect to the op's output) and returns one of three things, none of which adds examples up:

- `OuterProductGradient`: the gradient of unit u is ``sum_t a[u, t]^T g[u, t]`` (dense, convolution, einsum). Its norm
  is found from two Gram matrices (the ghost norm, Li et al. 2022, arXiv:2110.05679) or by forming it, whichever costs
  less;
- `EmbeddingGradient`: rows of g added up by index (embeddings), never laid out over the vocabulary;
- `MaterializedGradient`: the gradient itself, ``[units, *shape]``.

A unit is an example, or a microbatch of several. All sums are taken in float32 or wider.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpfl.clipping.graph import compiled, record_of, source
from tfdpfl.clipping.kernel_ops import find_obstacle, squared_row_norms
from tfdpfl.clipping.states import Batch

__all__ = [
    "TYPICAL_LENGTH",
    "Contribution",
    "Costs",
    "EmbeddingGradient",
    "MaterializedGradient",
    "OuterProductGradient",
    "Units",
    "Use",
    "added",
    "dims_of",
    "examples_first",
    "merge",
    "products",
    "reshaped",
    "summed_to",
    "turned",
    "volume",
]

# A length that is unknown while tracing counts as this one when costs are compared.
TYPICAL_LENGTH = 64
# Gradients are formed only where they take at most this many times the memory of the op's input and output, or no more
# than the Gram matrices would: they are held until all norms are known. (With 2, a transformer of width 256 takes 1.44
# times the memory of a plain step, and with 1 it takes 1.06 times.)
FORMED_MEMORY = 1
# A number that is written to memory and read again takes about as long as so many multiplications.
MOVED = 16
# Gram matrices of pixels, which are small and then summed along patches, take so many times as long as their products
# would in a large matrix: 4.5, 4.3 and 4.7 for 5x5, 8x8 and 11x11 places.
GRAM = 4.5
# Of more rows than these an embedding's norms are found by adding up the rows of each id: 64 rows of 64 entries take
# half of what their Gram matrix does. (XLA, which knows no table of what it has seen, multiplies up to 256.)
FEW_ROWS = 32


def _not_broadcast(x: tf.Tensor) -> tf.Tensor:
    """A gradient [rows of the batch, ...] as it was before the gradient of a sum took back a broadcast that was none:
    both of a sum's terms then have one gradient. (TensorFlow cannot tell where it does not know the batch's size.)"""
    while x.op.type == "Reshape" and x.op.inputs[0].op.type == "Sum":
        source, axes = x.op.inputs[0].op.inputs
        same = x.shape[1:].is_fully_defined() and source.shape.as_list() == x.shape.as_list()
        if axes.op.type != "BroadcastGradientArgs" or not same:
            break
        x = source
    return x


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
        self._masked: dict[int, tf.Tensor] = {}
        self._columns: dict[tuple[int, int], tuple[tf.Tensor, tf.Tensor]] = {}
        self._grouped: dict[tuple[int, int], tuple[tf.Tensor, tf.Tensor]] = {}
        self._row: tuple[tf.Tensor, tf.Tensor] | None = None

    def group(self, x: tf.Tensor, state: Batch) -> tf.Tensor:
        """[units, rows of the unit, other axes in order], in the working type unless it is made of integers."""
        x = examples_first(x, state) if state.axis else _not_broadcast(x)
        if x.dtype.is_floating and x.dtype != self.dtype:
            x = tf.cast(x, self.dtype)
        if state.blocks > 1:  # [blocks x rows, ...] to [rows x blocks, ...]
            dims = tf.shape(x)[1:]
            x = tf.reshape(x, tf.concat([[state.blocks, -1], dims], 0))
            x = tf.reshape(tf.transpose(x, [1, 0, *range(2, x.shape.rank)]), tf.concat([[-1], dims], 0))
            state = Batch(0, None if state.rows is None else state.rows * state.blocks)
        if self.single and state.rows == 1:
            this = id(x), id(tf.compat.v1.get_default_graph())
            if this not in self._grouped:
                self._grouped[this] = (x, tf.expand_dims(x, 1))
            return self._grouped[this][1]
        length, *rest = x.shape.as_list()
        if None in rest:
            dims = tf.shape(x)
            rest = [dims[i] if d is None else d for i, d in enumerate(rest, 1)]
        if not self.single or state.rows is None:
            return reshaped(x, [self.count, tf.shape(x)[0] // tf.maximum(self.count, 1), *rest])
        return reshaped(x, [self.count if length is None else length // state.rows, state.rows, *rest])

    def mask_nonfinite(self, tensors: list[tuple[tf.Tensor, Batch | None]]) -> None:
        """Has `masked` set units whose gradient is not finite to zero in these (of which a unit has an entry of the
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

        tensors = list({id(x): (x, state) for x, state in tensors}.values())
        if tensors:
            kept = tf.cond(self.any_bad, masked, lambda: [x for x, _ in tensors])
            self._masked = {id(x): y for (x, _), y in zip(tensors, kept, strict=True)}

    def masked(self, x: tf.Tensor) -> tf.Tensor:
        return self._masked[id(x)]

    def scaled(self, g: tf.Tensor, c: tf.Tensor) -> tf.Tensor:
        """g [units, ...] times c [units]; zero where c is, whatever g."""
        rank = g.shape.rank
        if (id(c), rank) not in self._columns:
            self._columns[id(c), rank] = (c, tf.reshape(c, [-1] + [1] * (rank - 1)))
        return tf.math.multiply_no_nan(g, self._columns[id(c), rank][1])

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


@dataclasses.dataclass(frozen=True)
class Costs:
    """Holds what a weight's norms and its clipped sum cost an example, in each of the two ways.

    Args:
      length: over how many positions t the gradient is summed, ``sum_t a[t]^T g[t]``.
      a, p: how many entries a[t] and g[t] have.
      repeats: how often an entry of the op's input stands in a (a convolution's patches).
      pixels: whether the Gram matrices of a are sums of those of the op's input.
    """

    length: int
    a: int
    p: int
    repeats: float = 1
    pixels: bool = False

    @property
    def formed(self) -> int:
        """Multiplications of each example's gradient; the clipped sum then adds gradients up."""
        return self.length * self.a * self.p

    @property
    def grams(self) -> int:
        """Multiplications of two Gram matrices."""
        width = self.a / self.repeats if self.pixels else self.a
        return int(self.length**2 * (width + self.p))

    @property
    def ghost(self) -> int:
        """As `grams`, and of the clipped sum, which is a product of its own."""
        return self.grams + self.formed

    @property
    def formed_numbers(self) -> int:
        return self.a * self.p

    @property
    def ghost_numbers(self) -> int:
        return 2 * self.length**2

    @property
    def stored(self) -> float:
        """Multiplications, or what takes as long, of gradients that are formed and read twice; infinite where there is
        no room for them."""
        room = max(self.ghost_numbers, FORMED_MEMORY * self.length * (self.a / self.repeats + self.p))
        return self.formed + 2 * MOVED * self.formed_numbers if self.formed_numbers < room else math.inf

    @property
    def forms(self) -> bool:
        """Whether to form the gradients; Gram matrices are multiplied once more before it."""
        return self.length > 1 and self.stored < self.ghost + 3 * MOVED * self.ghost_numbers

    @property
    def native(self) -> bool:
        """Whether to use a kernel that forms the gradients, once or twice, and not Gram matrices."""
        gram = self.formed + (GRAM if self.pixels else 1) * (self.ghost - self.formed)
        return self.length > 1 and min(self.stored, 2 * self.formed) < gram

    @property
    def stores(self) -> bool:
        """Whether a kernel's gradients are stored, since that takes less time than to compute them again, and there is
        room."""
        return MOVED * self.formed_numbers <= self.formed and self.stored < math.inf


class OuterProductGradient:
    """``F[u] = sum_t a[u, t]^T g[u, t]``; with an axis n (groups, channels) a[u, t, n, :] with g[u, t, n, :].

    Args:
      a, g: [U, T, A], [U, T, P], or [U, T, n, A], [U, T, n, P].
      layout: maps F, [..., A, P] or [..., n, A, P], to [..., *weight shape]; only moves entries.
      same: what must agree for two uses of one variable to be one longer sum over T.
      total: the gradient of the weight given c [U], without a or F, where an op does it at once.
      needs: what ``total`` has masked, with the examples' axis.
      repeats: how often an entry of the op's input stands in a (a convolution's patches).
      gram: makes a aᵀ [U, T, T] without a.
    """

    def __init__(
        self, a, g, layout: Callable, same: tuple, total: Callable | None = None, needs: tuple = (), repeats: float = 1,
        gram: Callable | None = None,
    ):  # fmt: skip
        self.a, self.g, self.layout, self.same, self._total, self._needs = a, g, layout, same, total, needs
        self._repeats, self._gram = repeats, gram
        self._formed: MaterializedGradient | None = None
        self.error_bound: tf.Tensor | None = None

    @property
    def costs(self) -> Costs:
        sizes = self.g.shape[1], self.a.shape[-1], self.g.shape[-1]
        t, a, p = (TYPICAL_LENGTH if size is None else size for size in sizes)
        return Costs(t, a, p, self._repeats, self._gram is not None)

    def way(self) -> tuple[str, int]:
        """How its norm is found, and by how many multiplications an example."""
        each = self.a.shape[2] if self.a.shape.rank == 4 else 1
        costs = self.costs
        return ("formed", each * costs.formed) if costs.forms else ("ghost", each * costs.grams)

    def raw(self) -> MaterializedGradient:
        if self._formed is None:
            if self.a.shape.rank == 4:
                f = tf.einsum("utna,utnp->unap", self.a, self.g)
                self._formed = MaterializedGradient([f], self.layout)
            elif (self.a.shape[-1] or 0) > (self.g.shape[-1] or 0):  # the wide side last is faster
                f = tf.matmul(self.g, self.a, transpose_a=True)
                self._formed = MaterializedGradient([f], lambda parts: self.layout(turned(parts)))
            else:
                self._formed = MaterializedGradient([tf.matmul(self.a, self.g, transpose_a=True)], self.layout)
        return self._formed

    def formed(self) -> tf.Tensor:
        return self.raw().formed()

    def squared_norms(self) -> tf.Tensor:
        if self.a.shape[1] == 1 and self.a.shape.rank == 3:
            a, g = squares(self.a), squares(self.g)
            self.error_bound = lost_squares(self.a) * g + lost_squares(self.g) * a
            return a * g
        if self.costs.forms:
            return self.raw().squared_norms()
        if self.a.shape.rank == 4:
            a, g = (tf.transpose(x, [0, 2, 1, 3]) for x in (self.a, self.g))
        else:
            a, g = self.a, self.g
        gram, other = self._gram() if self._gram is not None else products(a), products(g)
        axes = list(range(1, gram.shape.rank))
        sizes = tf.linalg.diag_part(gram) * tf.linalg.diag_part(other)
        allowed = rounding(self.g.shape[1], self.a.shape[-1], self.g.shape[-1], dtype=gram.dtype)
        self.error_bound = allowed * tf.reduce_sum(sizes, axes[:-1])
        with tf.control_dependencies([self.error_bound]):  # so that the product may take a factor's place
            return tf.reduce_sum(gram * other, axes)

    def to_mask(self) -> list[tuple[tf.Tensor, Batch | None]]:
        if self._formed is not None:
            return self._formed.to_mask()
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
            a, g = units.scaled(self.a, c), units.masked(self.g)
        else:
            a, g = units.masked(self.a), units.scaled(self.g, c)
        if a.shape.rank == 4:
            return self.layout(tf.einsum("utna,utnp->nap", a, g))
        a, g = (tf.reshape(x, [-1, x.shape[-1]]) for x in (a, g))
        return self.layout(tf.matmul(a, g, transpose_a=True))

    @classmethod
    def merged(cls, parts: list[OuterProductGradient]) -> OuterProductGradient:
        a, g = (joined([getattr(p, name) for p in parts]) for name in ("a", "g"))
        return cls(a, g, parts[0].layout, parts[0].same)


class EmbeddingGradient:
    """Rows of g [U, T, D] belong to the table rows ids [U, T]."""

    def __init__(self, ids: tf.Tensor, g: tf.Tensor, shape: tf.TensorShape):
        self.ids, self.g, self.shape = ids, g, shape
        self.same = ("lookup", tuple(shape))
        self.error_bound: tf.Tensor | None = None
        self._distinct: tuple[tf.Tensor, tf.Tensor] | None = None

    def way(self) -> tuple[str, int]:
        length = self.g.shape[1] or TYPICAL_LENGTH
        return "ghost", (length if length <= FEW_ROWS else 1) * length * self.g.shape[-1]

    @property
    def vocabulary(self) -> int:
        return self.shape[0]

    def squared_norms(self) -> tf.Tensor:
        length = self.g.shape[1]
        if length == 1:
            return squares(self.g)
        if not find_obstacle(self.g, ranks=(3,)):
            norms, shared = squared_row_norms(tf.cast(self.ids, tf.int64), self.g, self.vocabulary)
            self.error_bound = rounding(length, self.g.shape[2], dtype=tf.float32) * shared
            return norms
        if length is not None and length <= (256 if compiled() else FEW_ROWS):
            alike = tf.equal(self.ids[:, :, None], self.ids[:, None, :])
            gram = products(self.g)
            self.error_bound = rounding(length, self.g.shape[2], dtype=gram.dtype) * tf.linalg.trace(gram)
            return tf.reduce_sum(tf.where(alike, gram, tf.zeros_like(gram)), [1, 2])
        units, t = tf.shape(self.g)[0], tf.shape(self.g)[1]
        distinct, where = self._unique(units)
        rows = tf.math.unsorted_segment_sum(tf.reshape(self.g, [units * t, self.g.shape[2]]), where, tf.size(distinct))
        return tf.math.unsorted_segment_sum(squares(rows), distinct // self.vocabulary, units)

    def _unique(self, units: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        if self._distinct is None:
            self._distinct = tf.unique(self._keys(units))
        return self._distinct

    def looked_up(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Each unit with each row that it looks up, once: (units, rows), int64; rows are -1 for what is no row."""
        units = tf.shape(self.g)[0]
        keys = self._keys(units) if self.g.shape[1] == 1 else self._unique(units)[0]
        return tf.maximum(keys, 0) // self.vocabulary, tf.where(keys < 0, keys, keys % self.vocabulary)

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

    def to_mask(self) -> list[tuple[tf.Tensor, Batch | None]]:
        return []

    def weighted_sum(self, c: tf.Tensor, units: Units) -> tf.Tensor:
        rows = self.weighted_rows(c, units)
        return tf.reshape(tf.math.unsorted_segment_sum(rows.values, rows.indices, self.vocabulary), self.shape)

    def weighted_rows(self, c: tf.Tensor, units: Units) -> tf.IndexedSlices:
        """As `weighted_sum`, of which each row is the sum of those of its number."""
        g = tf.reshape(units.scaled(self.g, c), [-1, self.g.shape[2]])
        return tf.IndexedSlices(g, tf.reshape(self.ids, [-1]), tf.constant(self.shape.as_list(), tf.int64))

    @classmethod
    def merged(cls, parts: list[EmbeddingGradient]) -> EmbeddingGradient:
        ids = tf.concat([tf.cast(p.ids, tf.int64) for p in parts], 1)
        return cls(ids, tf.concat([p.g for p in parts], 1), parts[0].shape)


def added(total: tf.Tensor, to: tf.Tensor) -> tf.Tensor:
    """total + to, in the type of the latter. Of a table that an `EmbeddingGradient` would make of a few rows these are
    added, in place, and the table is never made."""
    table = total
    while table.op.type in ("Identity", "Reshape", "EnsureShape") and table.op.inputs[0].shape == to.shape:
        table = table.op.inputs[0]
    if table.op.type == "UnsortedSegmentSum" and table.shape == to.shape and table.dtype == to.dtype and not compiled():
        rows, ids, _ = table.op.inputs
        return tf.tensor_scatter_nd_add(to, tf.expand_dims(ids, -1), rows)
    return tf.cast(total, to.dtype) + to


class MaterializedGradient:
    """The gradients themselves, or pieces of them: [U, ...] each, which ``layout`` puts together as [U, *shape], and
    likewise without the first axis."""

    def __init__(
        self, parts: list[tf.Tensor], layout: Callable | None = None, norms2: tf.Tensor | None = None,
        costs: Costs | None = None,
    ):  # fmt: skip
        self._costs = costs
        self.parts = parts
        self.layout = layout
        self._norms2 = norms2  # of what made the parts
        self.same = ("formed",)
        self.error_bound = None

    def way(self) -> tuple[str, int]:
        entries = sum(part.shape[1:].num_elements() or 0 for part in self.parts)
        return "formed", entries if self._costs is None else self._costs.formed

    def formed(self) -> tf.Tensor:
        return self._laid(self.parts)

    def _laid(self, parts: list[tf.Tensor]) -> tf.Tensor:
        whole = parts[0] if len(parts) == 1 else parts
        return whole if self.layout is None else self.layout(whole)

    def squared_norms(self) -> tf.Tensor:
        if self._norms2 is not None:
            return self._norms2
        norms = [squares(p) for p in self.parts]
        return norms[0] if len(norms) == 1 else tf.add_n(norms)

    def to_mask(self) -> list[tuple[tf.Tensor, Batch | None]]:
        return [(p, None) for p in self.parts]

    def weighted_sum(self, c: tf.Tensor, units: Units) -> tf.Tensor:
        return self._laid([units.weighted(c, units.masked(p)) for p in self.parts])

    @staticmethod
    def merged(parts: list[MaterializedGradient]) -> MaterializedGradient:
        return MaterializedGradient([tf.add_n([p.formed() for p in parts])])


Contribution = OuterProductGradient | EmbeddingGradient | MaterializedGradient


def merge(parts: list[Any]) -> Contribution:
    """Returns contributions of one kind to one weight as one: that of the longer sum."""
    return parts[0] if len(parts) == 1 else type(parts[0]).merged(parts)


# -- shapes and sums ---------------------------------------------------------------------------------------------


def summed_to(dy: tf.Tensor, out: Batch, shape: tf.TensorShape, units: Units) -> MaterializedGradient:
    """Gradient dy of a broadcast output, summed to a weight's shape for each unit."""
    weight = shape.as_list()
    rank = dy.shape.rank
    aligned = [1] * (rank - len(weight)) + weight
    aligned.pop(out.axis)
    grouped = units.group(dy, out)  # [U, m, others]
    axes = [i for i, d in enumerate([1, *aligned], 1) if d == 1 and grouped.shape[i] != 1]
    if axes:
        grouped = tf.reduce_sum(grouped, axes, keepdims=True)
    return MaterializedGradient([reshaped(grouped, [grouped.shape[0] or units.count, *weight])])


def examples_first(x: tf.Tensor, state: Batch) -> tf.Tensor:
    """The batch's axis before all others."""
    others = [i for i in range(x.shape.rank) if i != state.axis]
    return tf.transpose(x, [state.axis, *others]) if state.axis else x


def turned(x: tf.Tensor) -> tf.Tensor:
    """The last two axes the other way round."""
    rank = x.shape.rank
    return tf.transpose(x, [*range(rank - 2), rank - 1, rank - 2])


def squares(x: tf.Tensor) -> tf.Tensor:
    """Sum of squares over all axes but the first."""
    axes = list(range(1, x.shape.rank))
    if compiled():
        return tf.reduce_sum(x * x, axes)

    # One pass without a copy of x, in about half the time; XLA has no such op, and fuses the two.
    def make() -> tf.Tensor:
        return tf.square(tf.raw_ops.EuclideanNorm(input=x, axis=axes))

    return _once("squares", [x], make, lambda x: (x.shape[0], x.shape[1:].num_elements()))


def lost_squares(x: tf.Tensor) -> float:
    """Bounds what of `squares` may be gone because entries' squares are below the smallest number."""
    return float(np.finfo(x.dtype.as_numpy_dtype).tiny) * (x.shape[1:].num_elements() or TYPICAL_LENGTH)


def products(x: tf.Tensor) -> tf.Tensor:
    """The Gram matrices of x [..., T, A], [..., T, T], once for all that take in the same x (queries, keys, values)."""
    return _once("products", [x], lambda: tf.matmul(x, x, transpose_b=True))


def joined(parts: list[tf.Tensor]) -> tf.Tensor:
    """These [U, T, A] along T, once for all that take in the same (the gradients of a recurrent cell's two kernels)."""
    return _once("joined", parts, lambda: tf.concat(parts, 1))


def _once(
    what: str, of: list[tf.Tensor], make: Callable[[], tf.Tensor],
    shape: Callable[[tf.Tensor], tuple] = lambda x: tuple(x.shape),
) -> tf.Tensor:  # fmt: skip
    """What ``make`` makes of these, or made of the same before."""
    graph = tf.compat.v1.get_default_graph()

    def entries(x: tf.Tensor) -> tuple:
        """What tells tensors apart: all of a tensor's entries in the same order and ``shape`` are the same tensor."""
        root = source(x, "Identity", "Reshape", "ExpandDims", "Squeeze") if x.graph is graph else x
        many = tuple(x.shape).count(None) > 1
        return (id(x.graph), x.name) if many else (id(root.graph), root.name, shape(x))

    known, this = record_of(graph).made, (what, *map(entries, of))
    if this not in known:
        known[this] = make().name
    return graph.get_tensor_by_name(known[this])


def reshaped(x: tf.Tensor, dims: list) -> tf.Tensor:
    """x with these dimensions, of which some may be tensors, or one -1; x itself where they are its own."""
    static = [-1 if isinstance(d, tf.Tensor) else d for d in dims]
    if static.count(-1) > 1 or (-1 in static and 0 in static):
        return tf.reshape(x, tf.stack(dims))
    if x.shape.rank is not None and static == [-1 if d is None else d for d in x.shape]:
        return x
    return tf.reshape(x, static)  # fewer ops, and a static shape


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
