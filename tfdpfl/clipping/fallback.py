"""The exact way for ops without a rule: their gradient again, for one unit at a time, on that unit's rows alone.

The cost is that of the ops themselves, run once more on slices: O(B), not the O(B^2) of masking a batch.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdpfl.clipping import graph as graph_tools
from tfdpfl.clipping.batch_axis import BatchAxis
from tfdpfl.clipping.gradients import MaterializedGradient, Units, examples_first
from tfdpfl.clipping.graph import is_call, is_random, key, within
from tfdpfl.clipping.loss import PerExampleLoss
from tfdpfl.clipping.registry import look_up
from tfdpfl.clipping.states import Batch, Size
from tfdpfl.clipping.variable_writes import check_unwritten, side_effects
from tfdpfl.errors import PrivacyError

__all__ = ["Replay"]

_REMEDY = "Write the layer with operations that have a rule, or outside of loops and branches."


class Replay:
    """One op, or several that pass each other TensorLists, to be run again unit by unit.

    Args:
      ops: in the order they were made.
      weights: the inputs whose gradient is wanted: tensors, or handles of variables that are read inside.
      shapes: the weights' shapes.
    """

    def __init__(self, ops: list[tf.Operation], weights: list[tf.Tensor], shapes: list, analysis: BatchAxis):
        self.ops, self.weights, self.shapes, self.a = ops, weights, shapes, analysis
        for op in ops:
            check_unwritten(op, analysis)
        self._check_repeatable()
        # Taken now: building a gradient may rewrite loops and calls.
        self.attrs = {op.name: graph_tools.attributes(op) for op in ops}
        made = {key(t) for op in ops for t in op.outputs}
        self.dtypes = {op.name: [t.dtype for t in op.outputs] for op in ops}
        self.fed = {op.name: list(op.inputs) for op in ops}
        self.inputs = list({key(t): t for op in ops for t in op.inputs if key(t) not in made}.values())
        self.outputs = [t for op in ops for t in analysis.differentiable(op)]

    def _check_repeatable(self) -> None:
        if any(_nests(op, self.a) for op in self.ops):  # TensorFlow's gradient of a copy was seen to be 0
            raise self._refusal("it holds a loop or a branch that uses weights, too")
        # Numbers drawn from a fixed seed are others, too, for one example's shape than for the batch's.
        drawn = {op.type for op in within(self.ops) if is_random(op)}
        if again := drawn | {op.type for op in side_effects(self.ops) if not look_up(op).repeatable}:
            raise self._refusal(
                f"it would draw or write ({', '.join(sorted(again))}) other values than it did for the loss",
                "Do that outside of it; layers that do (Keras 3's random layers write to their seeds) are to be called "
                "as they are, not in a tf.function, a loop or a branch.",
            )

    def gradients(
        self, outputs: list[tf.Tensor], gs: list[tf.Tensor], units: Units, sizes: PerExampleLoss
    ) -> list[MaterializedGradient]:
        """[units, *shape] for each weight."""
        sliced = [t for t in self.inputs if isinstance(self.a[t], Batch)]
        public = [t for t in self.inputs if not isinstance(self.a[t], Batch)]
        replaced = {key(t): self._own_size(t, sizes) for t in public}
        states: list[Any] = [self.a[t] for t in sliced]
        rows = [self._rows(t, s, units) for t, s in zip(sliced, states, strict=True)]
        g_states: list[Any] = [self.a[t] for t in outputs]
        g_rows = [self._rows(t, s, units) for t, s in zip(gs, g_states, strict=True)]
        outer = self.ops[0].graph

        def one(elements):
            xs, g = elements
            graph = tf.compat.v1.get_default_graph()
            now = {key(t): replaced[key(t)] for t in public}
            held = [graph.capture(w) if w.dtype == tf.resource else tf.identity(now[key(w)]) for w in self.weights]
            now.update({key(w): h for w, h in zip(self.weights, held, strict=True)})
            now.update({key(t): back(x, s) for t, s, x in zip(sliced, states, xs, strict=True)})
            for op in self.ops:
                attrs = self.attrs[op.name]
                graph_tools.lift_functions(outer, graph, attrs)
                attrs = _loose(attrs)
                try:
                    made = graph_tools.copy_op(
                        op, [now[key(t)] for t in self.fed[op.name]], attrs, self.dtypes[op.name]
                    )
                except (ValueError, TypeError) as error:
                    raise self._refusal(error) from error
                now.update({(op.name, i): t for i, t in enumerate(made)})
            ys = [now[key(t)] for t in outputs]
            own = [tf.cast(back(gu, s), y.dtype) for gu, s, y in zip(g, g_states, ys, strict=True)]
            try:
                grads = tf.gradients(ys, held, own)
            except ValueError as error:
                raise self._refusal(error) from error
            return [
                tf.zeros(s, units.dtype) if d is None else tf.cast(tf.convert_to_tensor(d), units.dtype)
                for d, s in zip(grads, self.shapes, strict=True)
            ]

        signature = [tf.TensorSpec(s, units.dtype) for s in self.shapes]
        try:
            formed = tf.map_fn(one, (rows, g_rows), fn_output_signature=signature)
        except PrivacyError:
            raise
        except ValueError as error:  # a gradient that holds on to tensors of the body
            raise self._refusal(error) from error
        return [MaterializedGradient([f]) for f in formed]

    def _refusal(self, why, remedy: str = _REMEDY) -> PrivacyError:
        kinds = ", ".join(f"{op.type} ({op.name!r})" for op in self.ops)
        return PrivacyError(f"{kinds} uses weights and cannot be run on one example alone: {why}. {remedy}")

    def _own_size(self, t: tf.Tensor, sizes: PerExampleLoss) -> tf.Tensor:
        return sizes.size_of_one(t) if isinstance(self.a[t], Size) else t

    @staticmethod
    def _rows(t: tf.Tensor, state: Batch, units: Units) -> tf.Tensor:
        """[U, rows, others]: the batch axis first."""
        t = examples_first(t, state)
        dims = tf.shape(t)
        count = units.count
        per = state.rows if units.single and state.rows is not None else dims[0] // tf.maximum(count, 1)
        return tf.reshape(t, tf.concat([[count, per], dims[1:]], 0))


def _nests(op: tf.Operation, a: BatchAxis, looping: bool = False) -> bool:
    """Whether a loop or branch with weights is inside of a loop or branch."""
    if not look_up(op).runs or not a.takes_weights(op):
        return False
    flows = not is_call(op)
    if flows and looping:
        return True
    return any(
        _nests(o, inner, looping or flows)
        for inner, body in a.bodies(op)
        for o in body.get_operations()
        if o.name in inner.ops
    )


def back(x: tf.Tensor, state: Batch) -> tf.Tensor:
    """Moves the rows from the first axis to where they stand in the batch."""
    if not state.axis:
        return x
    a = state.axis
    return tf.transpose(x, [*range(1, a + 1), 0, *range(a + 1, x.shape.rank)])


def _loose(attrs: dict) -> dict:
    """Attributes without the shapes that values had for the whole batch."""
    from tensorflow.core.framework import attr_value_pb2

    attrs = {k: v for k, v in attrs.items() if k != "_output_shapes"}
    if "output_shapes" in attrs:
        loose = attr_value_pb2.AttrValue()
        for _ in attrs["output_shapes"].list.shape:
            loose.list.shape.add(unknown_rank=True)
        attrs["output_shapes"] = loose
    return attrs
