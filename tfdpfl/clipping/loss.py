"""From the loss of a batch to one loss an example: the value that the loss has on a batch of one.

The tail of the graph, from the reductions over the batch to the loss, is replayed with one more axis in front, the
examples. A sum or a mean over the batch becomes a sum or a mean over the example's own part, the batch size becomes
one. Terms that do not depend on data (regularisers) are set apart. A tail that is not linear in the examples, such as a
loss divided by the sum of the batch's sample weights, is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np
import tensorflow as tf

from tfdpfl.clipping import graph as graph_tools
from tfdpfl.clipping.batch_axis import BatchAxis
from tfdpfl.clipping.gradients import examples_first
from tfdpfl.clipping.graph import key
from tfdpfl.clipping.refusals import NO_BATCH, mixing
from tfdpfl.clipping.registry import look_up
from tfdpfl.clipping.states import BY_POSITION, Batch, Mixed, Public, Size, mixed
from tfdpfl.errors import PrivacyError

__all__ = ["PerExampleLoss", "Term", "kind_of"]


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

    @property
    def has_examples(self) -> bool:
        """Whether it is linear in values of the examples."""
        return self.kind in ("batch", "total")

    @property
    def is_fixed(self) -> bool:
        """Whether no example is in it, so that it has no axis for them."""
        return self.kind in ("public", "size")

    @property
    def apart(self) -> tf.Tensor | None:
        """What of it no example is in."""
        return self.value if self.is_fixed else self.public

    def changed(self, change: Callable[[tf.Tensor], tf.Tensor]) -> Term:
        """Returns it after a linear op of one input."""
        return dataclasses.replace(self, value=change(self.value), public=self.changed_public(change))

    def changed_public(self, change: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor | None:
        """The addend that was set apart, changed as the value is."""
        return None if self.public is None else change(self.public)


def kind_of(terms: Iterable[Term]) -> str | None:
    """The kind of what several terms are combined to; None where a total of the batch meets each example's own rows."""
    kinds = {x.kind for x in terms}
    if "total" in kinds:
        return None if "batch" in kinds else "total"
    return "batch" if "batch" in kinds else "ratio"


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
        self.one_or_more = self.declare(tf.maximum(batch_size, 1))
        self.terms: dict[tuple[str, int], Term] = {}
        self.sizes: dict[tuple[str, int], tf.Tensor] = {}

    def declare(self, t: tf.Tensor) -> tf.Tensor:
        """Tells the analysis that this tensor, which the replay made, does not vary with the data."""
        for each in t.op.outputs:
            self.a.declare_state(each, Size(((None, 0),) * (t.shape.num_elements() or 1)))
        return t

    def __call__(self, loss: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Returns (losses [B], data-independent part or None)."""
        term = self.term(loss)
        if not term.has_examples:
            raise PrivacyError(NO_BATCH)
        value = term.value if term.value.dtype == tf.float64 else tf.cast(term.value, tf.float32)
        # A gradient of several numbers is that of their sum, whoever takes it.
        positions = list(range(1, value.shape.rank))
        losses = tf.reduce_sum(value, positions) if positions else value
        public = None if term.public is None else tf.reduce_sum(self.spread(term))
        return losses, public

    # -- terms -----------------------------------------------------------------------------------------------

    def term(self, t: tf.Tensor) -> Term:
        if key(t) not in self.terms:
            self.terms[key(t)] = self._make(t)
        return self.terms[key(t)]

    def _make(self, t: tf.Tensor) -> Term:
        state = self.a[t]
        rank = t.shape.rank
        if isinstance(state, Mixed) and state.name == t.op.name and state.why == BY_POSITION:
            raise self.refusal(state, t.op)  # no term of one example says which one it is
        if isinstance(state, Public | Batch) and rank is None:
            raise self.refusal(mixed(t.op, "has a shape of unknown rank"), t.op)
        if isinstance(state, Public):
            return Term("public", t, rank)
        if isinstance(state, Size):
            return Term("size", self.size_of_one(t), rank)
        if isinstance(state, Batch) and not self._adds_weights(t.op):
            return Term("batch", self._by_example(t, state), rank)
        tail = look_up(t.op).tail
        term = tail(self, t.op) if tail else None
        if term is None:
            raise self.refusal(state, t.op)
        return term

    def _adds_weights(self, op: tf.Operation) -> bool:
        states = [self.a[t] for t in op.inputs] if look_up(op).adds else []
        return any(isinstance(s, Public) and bool(s.deps) for s in states)

    def inputs(self, op: tf.Operation) -> list[Term]:
        return [self.term(t) for t in op.inputs]

    def refusal(self, state, op: tf.Operation) -> PrivacyError:
        origin = state if isinstance(state, Mixed) else mixed(op, "combines examples")
        through = f"{op.type} {op.name!r}" if op.name != origin.name else None
        return PrivacyError(mixing(origin, through))

    def _by_example(self, t: tf.Tensor, state: Batch) -> tf.Tensor:
        """[B, ..., rows at the batch axis, ...]."""
        x, a, rank = examples_first(t, state), state.axis, t.shape.rank
        if state == Batch(a):
            return tf.expand_dims(x, a + 1)
        dims = tf.shape(x)
        rows = state.rows if state.rows is not None else self.declare(dims[0] // self.one_or_more)
        x = tf.reshape(x, tf.concat([[self.batch_size], [rows], dims[1:]], 0))
        if a:
            x = tf.transpose(x, [0, *range(2, 2 + a), 1, *range(2 + a, rank + 1)])
        return x

    def aligned(self, term: Term, rank: int) -> tf.Tensor:
        """The term with so many axes behind that of the examples."""
        value = term.value
        if term.is_fixed:
            return value
        for _ in range(rank - term.rank):
            value = tf.expand_dims(value, 1)
        return value

    def aligned_alike(self, terms: list[Term]) -> list[tf.Tensor]:
        rank = max(x.rank for x in terms)
        return [self.aligned(x, rank) for x in terms]

    def apply(self, op: tf.Operation, terms: list[Term]) -> tf.Tensor:
        """The same op on these terms."""
        return graph_tools.copy_op(op, self.aligned_alike(terms))[0]

    def absorb(self, x: Term) -> Term:
        """Puts an addend that was set apart back (it is then clipped with the rest)."""
        return x if x.public is None else dataclasses.replace(x, value=x.value + x.public, public=None)

    def spread(self, x: Term) -> tf.Tensor:
        """The addend that was set apart, in the shape that the tensor has on a batch of one."""
        return tf.broadcast_to(x.public, tf.shape(x.value)[1:])

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
        elif lengths := look_up(t.op).lengths:
            result = tf.cast(lengths(self._dims_of_one(t)), t.dtype)
        else:
            result = graph_tools.copy_op(t.op, [self.size_of_one(i) for i in t.op.inputs])[t.value_index]
        self.sizes[key(t)] = self.declare(result)
        return self.sizes[key(t)]

    def _dims_of_one(self, t: tf.Tensor) -> tf.Tensor:
        """The shape, on a batch of one, of the tensor whose shape t reads."""
        x = t.op.inputs[t.value_index]
        state = self.a[x]
        if isinstance(state, Mixed):  # part of the tail
            if x.shape.rank is None or None in x.shape[1:].as_list():
                raise self.refusal(state, t.op)
            term = self.term(x)
            return tf.shape(term.value)[0 if term.is_fixed else 1 :]
        dims = tf.shape(self.size_of_one(x))
        if isinstance(state, Batch):
            at = tf.one_hot(state.axis, x.shape.rank, True, False, dtype=tf.bool)
            dims = tf.where(at, dims // self.one_or_more, dims)
        return dims
