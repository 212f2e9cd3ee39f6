"""From the loss of a batch to one loss an example: the value that the loss has on a batch of one.

The tail of the graph, from the reductions over the batch to the loss, is replayed with one more axis in front, the
examples. A sum or a mean over the batch becomes a sum or a mean over the example's own part, the batch size becomes
one. Terms that do not depend on data (regularisers) are set apart. A tail that is not linear in the examples, such as a
loss divided by the sum of the batch's sample weights, is refused.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdpfl.clipping import graph as graph_tools
from tfdpfl.clipping.batch_axis import BatchAxis
from tfdpfl.clipping.gradients import examples_first
from tfdpfl.clipping.graph import constant, key
from tfdpfl.clipping.refusals import NO_BATCH, OVERLAP, WEIGHTED, mixing
from tfdpfl.clipping.sizes import is_average
from tfdpfl.clipping.states import BY_POSITION, Batch, Mixed, Public, Size
from tfdpfl.errors import PrivacyError

__all__ = ["PerExampleLoss"]

_ADD = frozenset("Add AddV2 AddN Sub".split())


@dataclasses.dataclass
class Term:
    """A tensor of the tail, on a batch of one. ``kind``:

    public: no example in it (``value`` has no example axis); size: made of shapes, likewise;
    batch: rows of the example itself; total: a reduction over the batch, linear in the examples;
    count: how many entries a boolean mask leaves; ratio: a function of counts and sizes.
    ``public`` is a data-independent addend that was set apart.
    """

    kind: str
    value: tf.Tensor
    rank: int
    public: tf.Tensor | None = None


class PerExampleLoss:
    """Replays the tail of a loss for each example.

    Args:
      analysis: the batch-axis states of the graph, already run on the loss.
      batch_size: scalar int32 tensor.
      replicas: how many have a batch of this size.
      known_size: how many examples TensorFlow knows to be in it, or None.
    """

    def __init__(self, analysis: BatchAxis, batch_size: tf.Tensor, replicas: int = 1, known_size: int | None = None):
        self.replicas, self.known_size = replicas, known_size
        self.a = analysis
        self.batch_size = batch_size
        self.one_or_more = self._declare(tf.maximum(batch_size, 1))
        self.terms: dict[tuple[str, int], Term] = {}
        self.sizes: dict[tuple[str, int], tf.Tensor] = {}

    def _declare(self, t: tf.Tensor) -> tf.Tensor:
        """Tells the analysis that this tensor, which the replay made, does not vary with the data."""
        for each in t.op.outputs:
            self.a.declare_state(each, Size(((None, 0),) * (t.shape.num_elements() or 1)))
        return t

    def __call__(self, loss: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Returns (losses [B], data-independent part or None)."""
        term = self._term(loss)
        if term.kind not in ("batch", "total"):
            raise PrivacyError(NO_BATCH)
        value = term.value if term.value.dtype == tf.float64 else tf.cast(term.value, tf.float32)
        # A gradient of several numbers is that of their sum, whoever takes it.
        positions = list(range(1, value.shape.rank))
        losses = tf.reduce_sum(value, positions) if positions else value
        public = None if term.public is None else tf.reduce_sum(self._spread(term))
        return losses, public

    # -- terms -----------------------------------------------------------------------------------------------

    def _term(self, t: tf.Tensor) -> Term:
        if key(t) not in self.terms:
            self.terms[key(t)] = self._make(t)
        return self.terms[key(t)]

    def _make(self, t: tf.Tensor) -> Term:
        state = self.a[t]
        rank = t.shape.rank
        if isinstance(state, Mixed) and state.name == t.op.name and state.why == BY_POSITION:
            raise self._refusal(state, t.op)  # no term of one example says which one it is
        if isinstance(state, Public | Batch) and rank is None:
            raise self._refusal(Mixed(t.op.type, t.op.name, "has a shape of unknown rank"), t.op)
        if isinstance(state, Public):
            return Term("public", t, rank)
        if isinstance(state, Size):
            return Term("size", self.size_of_one(t), rank)
        if isinstance(state, Batch) and not self._adds_weights(t.op):
            return Term("batch", self._by_example(t, state), rank)
        make = _TAIL.get(t.op.type)
        term = make(self, t.op) if make else None
        if term is None:
            raise self._refusal(state, t.op)
        return term

    def _adds_weights(self, op: tf.Operation) -> bool:
        states = [self.a[t] for t in op.inputs] if op.type in _ADD else []
        return any(isinstance(s, Public) and bool(s.deps) for s in states)

    def _inputs(self, op: tf.Operation) -> list[Term]:
        return [self._term(t) for t in op.inputs]

    def _refusal(self, state, op: tf.Operation) -> PrivacyError:
        origin = state if isinstance(state, Mixed) else Mixed(op.type, op.name, "combines examples")
        through = f"{op.type} {op.name!r}" if op.name != origin.name else None
        return PrivacyError(mixing(origin, through))

    def _by_example(self, t: tf.Tensor, state: Batch) -> tf.Tensor:
        """[B, ..., rows at the batch axis, ...]."""
        x, a, rank = examples_first(t, state), state.axis, t.shape.rank
        if state == Batch(a):
            return tf.expand_dims(x, a + 1)
        dims = tf.shape(x)
        rows = state.rows if state.rows is not None else self._declare(dims[0] // self.one_or_more)
        x = tf.reshape(x, tf.concat([[self.batch_size], [rows], dims[1:]], 0))
        if a:
            x = tf.transpose(x, [0, *range(2, 2 + a), 1, *range(2 + a, rank + 1)])
        return x

    def _aligned(self, term: Term, rank: int) -> tf.Tensor:
        if term.kind in ("public", "size"):
            return term.value
        value = term.value
        for _ in range(rank - term.rank):
            value = tf.expand_dims(value, 1)
        return value

    def _apply(self, op: tf.Operation, terms: list[Term]) -> tf.Tensor:
        rank = max(x.rank for x in terms)
        values = [self._aligned(x, rank) for x in terms]
        if op.type in ("Select", "SelectV2"):
            return tf.where(*values)
        return graph_tools.copy_op(op, values)[0]

    def _absorb(self, x: Term) -> Term:
        """Puts an addend that was set apart back (it is then clipped with the rest)."""
        return x if x.public is None else dataclasses.replace(x, value=x.value + x.public, public=None)

    # Of one op each; None if the op combines examples.

    def _squared(self, op: tf.Operation) -> Term | None:
        x = self._absorb(self._term(op.inputs[0]))
        if x.kind != "batch":
            return None
        return Term("total", tf.reduce_sum(x.value * x.value, list(range(1, x.value.shape.rank))) / 2, 0)

    def _same(self, op: tf.Operation) -> Term:
        (x,) = self._inputs(op)
        apply = lambda v: None if v is None else graph_tools.copy_op(op, [v])[0]  # noqa: E731
        return dataclasses.replace(x, value=apply(x.value), public=apply(x.public))

    def _compared(self, op: tf.Operation) -> Term | None:
        terms = self._inputs(op)
        known = all(x.kind in ("count", "ratio", "size", "public") for x in terms)
        return Term("ratio", self._apply(op, terms), op.outputs[0].shape.rank) if known else None

    def _chosen(self, op: tf.Operation) -> Term | None:
        terms = self._inputs(op)
        kinds = {x.kind for x in terms}
        if terms[0].kind == "total" or kinds >= {"total", "batch"}:
            return None
        kind = "total" if "total" in kinds else "batch" if "batch" in kinds else "ratio"
        return Term(kind, self._apply(op, [self._absorb(x) for x in terms]), op.outputs[0].shape.rank)

    def _reduced(self, op: tf.Operation) -> Term | None:
        x, rank = self._term(op.inputs[0]), op.inputs[0].shape.rank
        given = constant(op.inputs[1])
        if given is None and (rank == 1 or self._all_axes(op.inputs[1])):
            given = np.arange(rank)
        if x.kind == "size" or given is None:
            return None
        axes = [int(i) % rank for i in np.atleast_1d(given)]
        reduce = tf.reduce_sum if op.type == "Sum" else tf.reduce_mean
        keep = op.get_attr("keep_dims")
        public = None if x.public is None else reduce(self._spread(x), axes, keep)
        places = [i + 1 for i in axes]
        if all(x.value.shape[i] == 1 for i in places):  # nothing to add up, in a twentieth of the ops
            value = tf.squeeze(x.value, places) if places and not keep else x.value
        else:
            value = reduce(x.value, places, keep)
        kind = x.kind
        if kind == "batch":
            kind = "count" if op.type == "Sum" and is_mask(op.inputs[0]) else "total"
        return Term(kind, value, op.outputs[0].shape.rank, public)

    @staticmethod
    def _spread(x: Term) -> tf.Tensor:
        """The addend that was set apart, in the shape that the tensor has on a batch of one."""
        return tf.broadcast_to(x.public, tf.shape(x.value)[1:])

    @staticmethod
    def _all_axes(t: tf.Tensor) -> bool:
        return t.op.type == "Range"  # range(rank), where the rank is not constant

    def _sum(self, op: tf.Operation) -> Term | None:
        terms = self._inputs(op)
        rank = max(x.rank for x in terms)
        signs = [1, -1] if op.type == "Sub" else [1] * len(terms)
        data, public = None, None
        kinds = {x.kind for x in terms}
        if not kinds & {"total", "batch"}:
            return Term("ratio", self._apply(op, terms), rank)
        if "total" in kinds and "batch" in kinds:  # a batch's total added to every example's own row
            return None
        for x, sign in zip(terms, signs, strict=True):
            apart = x.value if x.kind in ("public", "size") else x.public
            if x.kind not in ("public", "size"):
                own = sign * self._aligned(x, rank)
                data = own if data is None else data + own
            if apart is not None:
                public = sign * apart if public is None else public + sign * apart
        assert data is not None
        if public is not None:  # which may be longer than an example's own values
            own = [1] * public.shape.rank + data.shape.as_list()[1:]
            if any(p not in (1, d) or p is None for p, d in zip(public.shape[::-1], own[::-1], strict=False)):
                data += tf.cast(tf.zeros_like(public), data.dtype)
        return Term("total" if "total" in kinds else "batch", data, rank, public)

    def _times(self, op: tf.Operation) -> Term | None:
        x, y = self._inputs(op)
        kinds = {x.kind, y.kind}
        rank = max(x.rank, y.rank)
        if kinds <= {"count", "ratio", "size", "public"}:
            return Term("ratio", self._apply(op, [x, y]), rank)
        if "total" in kinds and (kinds == {"total"} or "batch" in kinds):
            return None
        kind = "total" if "total" in kinds else "batch"
        if x.kind != kind:
            x, y = y, x
        if y.kind in ("public", "size"):
            value = self._aligned(x, rank) * self._aligned(y, rank)
            public = None if x.public is None else x.public * y.value
            return Term(kind, value, rank, public)
        x, y = self._absorb(x), self._absorb(y)
        return Term(kind, self._apply(op, [x, y]), rank)

    def _over(self, op: tf.Operation) -> Term:
        x, y = self._inputs(op)
        rank = max(x.rank, y.rank)
        if y.kind == "total" or (y.kind == "batch" and x.kind == "total"):
            overlap = re.search("dice|tversky", op.name)
            raise PrivacyError(
                f"The loss is divided by a sum over the examples of the batch ({op.type} {op.name!r}), so each "
                f"example's gradient depends on the others'. {OVERLAP if overlap else WEIGHTED}"
            )
        if y.kind == "count":
            # Where the mask leaves nothing there is nothing to divide.
            value = tf.math.divide_no_nan(self._aligned(self._absorb(x), rank), self._aligned(y, rank))
            return Term("total" if x.kind == "total" else "batch" if x.kind == "batch" else "ratio", value, rank)
        if x.kind in ("public", "size", "count", "ratio") and y.kind != "batch":
            return Term("ratio", self._aligned(x, rank) / self._aligned(y, rank), rank)
        if y.kind == "public" and is_average(op.outputs[0]):
            y = Term("size", tf.constant(self.replicas, y.value.dtype), 0)
        elif y.kind == "public":
            self._warn_of_size(y.value)
        if y.kind in ("public", "size"):
            value = self._aligned(x, rank) / tf.cast(y.value, x.value.dtype)
            public = None if x.public is None else x.public / tf.cast(y.value, x.public.dtype)
            return Term(x.kind, value, rank, public)
        return Term(x.kind if x.kind == "total" else "batch", self._apply(op, [self._absorb(x), y]), rank)

    def _warn_of_size(self, divisor: tf.Tensor) -> None:
        value = constant(divisor) if divisor.shape.rank == 0 else None
        if (
            value is not None
            and self.known_size is not None
            and value in (self.known_size, self.known_size * self.replicas)
        ):
            warnings.warn(
                f"The loss is divided by the number {value:g}, and the batch has as many examples. The number is kept: "
                f"each example's loss is divided by {value:g} before its gradient is clipped, so updates are {value:g} "
                "times smaller than those of a mean. If you mean the batch size, write tf.shape(x)[0].",
                stacklevel=2,
            )

    def _stacked(self, op: tf.Operation) -> Term | None:
        terms, rank = self._inputs(op), op.outputs[0].shape.rank
        kinds = {x.kind for x in terms}
        if "total" not in kinds or not kinds <= {"total", "public"}:
            return None
        axis = op.get_attr("axis") % rank
        zero = next(x for x in terms if x.kind == "total").value
        data = [x.value if x.kind == "total" else tf.zeros_like(zero) for x in terms]
        parts = [x.value if x.kind == "public" else x.public for x in terms]
        public = None
        if any(p is not None for p in parts):
            public = tf.stack([tf.zeros_like(op.inputs[0]) if p is None else p for p in parts], axis)
        return Term("total", tf.stack(data, axis + 1), rank, public)

    def _arranged(self, op: tf.Operation, change: Callable[[tf.Tensor], tf.Tensor]) -> Term | None:
        """Entries in other places; ``change`` moves them, behind an axis in front."""
        x = self._term(op.inputs[0])
        if x.kind in ("public", "size"):
            return None
        public = None if x.public is None else change(self._spread(x)[None])[0]
        return Term(x.kind, change(x.value), op.outputs[0].shape.rank, public)

    def _squeezed(self, op: tf.Operation) -> Term | None:
        dims = [d % op.inputs[0].shape.rank + 1 for d in op.get_attr("squeeze_dims")]
        return self._arranged(op, lambda t: tf.squeeze(t, dims)) if dims else None

    def _expanded(self, op: tf.Operation) -> Term | None:
        given = constant(op.inputs[1])
        if given is None:
            return None
        axis = int(np.ravel(given)[0]) % op.outputs[0].shape.rank + 1
        return self._arranged(op, lambda t: tf.expand_dims(t, axis))

    def _reshaped(self, op: tf.Operation) -> Term | None:
        x, rank, of_shape = self._term(op.inputs[0]), op.outputs[0].shape.rank, self.a[op.inputs[1]]
        if x.kind in ("public", "size"):
            return None
        if not isinstance(of_shape, Public | Size):
            raise self._refusal(of_shape, op)
        fixed, own = constant(op.inputs[1]), x.value.shape[1:].num_elements()
        if fixed is not None and own and (own % np.abs(np.prod(fixed)) if -1 in fixed else own != np.prod(fixed)):
            return None  # it holds the batch's static size
        shape = tf.reshape(self.size_of_one(op.inputs[1]), [-1])
        each = tf.reduce_prod(tf.shape(x.value)[1:])
        known = tf.reduce_prod(tf.where(shape < 0, tf.ones_like(shape), shape))
        shape = tf.where(shape < 0, tf.cast(each, shape.dtype) // tf.maximum(known, 1), shape)
        shape = self._declare(tf.cast(shape, tf.int32))

        def change(t: tf.Tensor) -> tf.Tensor:
            t = tf.reshape(t, tf.concat([tf.shape(t)[:1], shape], 0))
            return tf.ensure_shape(t, [t.shape[0], *[None] * rank])

        return self._arranged(op, change)

    # -- sizes -----------------------------------------------------------------------------------------------

    def size_of_one(self, t: tf.Tensor) -> tf.Tensor:
        """A tensor made of shapes, as it would be on a batch of one."""
        state = self.a[t]
        if not isinstance(state, Size):
            return t
        if key(t) in self.sizes:
            return self.sizes[key(t)]
        entries = state.entries
        if all(c is not None and p is not None for c, p in entries):
            values = np.array([c for c, _ in entries], t.dtype.as_numpy_dtype)
            result = tf.constant(values[0] if t.shape.rank == 0 else values)
        elif t.op.type in ("Shape", "ShapeN", "Size"):
            x = t.op.inputs[t.value_index if t.op.type == "ShapeN" else 0]
            xs = self.a[x]
            if isinstance(xs, Mixed):  # part of the tail
                if x.shape.rank is None or None in x.shape[1:].as_list():
                    raise self._refusal(xs, t.op)
                term = self._term(x)
                dims = tf.shape(term.value)[0 if term.kind in ("public", "size") else 1 :]
            else:
                dims = tf.shape(self.size_of_one(x))
            if isinstance(xs, Batch):
                at = tf.one_hot(xs.axis, x.shape.rank, True, False, dtype=tf.bool)
                dims = tf.where(at, dims // self.one_or_more, dims)
            result = tf.cast(tf.reduce_prod(dims) if t.op.type == "Size" else dims, t.dtype)
        else:
            result = graph_tools.copy_op(t.op, [self.size_of_one(i) for i in t.op.inputs])[t.value_index]
        self.sizes[key(t)] = self._declare(result)
        return self.sizes[key(t)]


def is_mask(t: tf.Tensor) -> bool:
    """Whether the tensor is made of zeros and ones that came from booleans."""
    while t.op.type in ("Identity", "Reshape", "Squeeze", "ExpandDims", "Cast", "StopGradient"):
        if t.op.type == "Cast" and t.op.inputs[0].dtype == tf.bool:
            return True
        t = t.op.inputs[0]
    return False


# What the tail of a loss may be made of, and what becomes of each op on a batch of one.
_TAIL: dict[str, Callable[[PerExampleLoss, tf.Operation], Term | None]] = {
    kind: make
    for kinds, make in (
        ("Sum Mean", PerExampleLoss._reduced),
        ("L2Loss", PerExampleLoss._squared),
        ("Identity Cast Neg Snapshot CheckNumerics EnsureShape PreventGradient", PerExampleLoss._same),
        (" ".join(_ADD), PerExampleLoss._sum),
        ("Mul", PerExampleLoss._times),
        ("RealDiv Div DivNoNan", PerExampleLoss._over),
        ("Maximum Minimum Equal NotEqual Greater GreaterEqual Less LessEqual", PerExampleLoss._compared),
        ("Select SelectV2", PerExampleLoss._chosen),
        ("Pack", PerExampleLoss._stacked),
        ("Squeeze", PerExampleLoss._squeezed),
        ("ExpandDims", PerExampleLoss._expanded),
        ("Reshape", PerExampleLoss._reshaped),
    )
    for kind in kinds.split()
}
