"""Gradients that users give to functions of theirs (tf.custom_gradient): whether they keep examples apart, as the
functions' values do."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from tfdpfl.clipping import graph as graph_tools
from tfdpfl.clipping.batch_axis import BatchAxis
from tfdpfl.clipping.graph import key
from tfdpfl.clipping.refusals import mixing
from tfdpfl.clipping.rows import row_free
from tfdpfl.clipping.states import Batch, Mixed, Public, State, is_batch_free, mixed, weighs
from tfdpfl.clipping.variable_writes import side_effects
from tfdpfl.errors import PrivacyError

__all__ = ["check_own_gradients"]


def check_own_gradients(view: BatchAxis) -> None:
    """Looks at what each op with a gradient of its own does to a gradient that keeps examples apart.

    Raises:
      PrivacyError: examples meet in it, it adds gradients of weights up over examples, or it draws or writes.
    """
    for op in view.customised:  # which grows, where these gradients have gradients of their own
        met = _undone(view, op) if graph_tools.recomputes(op) else _met(view, op)
        if met is not None:
            raise PrivacyError(mixing(met))


def _undone(view: BatchAxis, op: tf.Operation) -> Mixed | None:
    """Has what uses the results of a tf.recompute_grad use what they were computed from instead, whose gradient is the
    same: it recomputes for its arguments and for the weights that it reads. It says where it does not."""
    results, given = op.inputs[: (n := graph_tools.number_of_results(op))], op.inputs[n:]
    ends = set(map(key, given))
    inside = graph_tools.ancestors(results, follow=lambda t: key(t) not in ends).values()
    read, known = _weights(view, inside), _weights(view, [t.op for t in given])
    if not read <= known:
        return mixed(
            op, "has a gradient of its own (tf.recompute_grad) that leaves out weights outside of its function"
        )
    for t, same in zip(op.outputs, op.inputs, strict=True):
        graph_tools.replace(t, same)
    return None


def _weights(view: BatchAxis, ops: Iterable[tf.Operation]) -> set[State]:
    return {view[t] for op in ops for t in op.inputs if t.dtype == tf.resource and weighs(view[t])}


def _met(view: BatchAxis, op: tf.Operation) -> Mixed | None:
    """Why an op's gradient is not one of each example alone; None if it is."""
    graph = op.graph
    results = [t for t in op.outputs[: graph_tools.number_of_results(op)] if t.dtype.is_floating]
    before = len(graph.get_operations())
    probes = []
    for t in results:
        probes.append(tf.identity(t))  # a gradient of the same shape, and with the examples along the same axis
        view.declare_state(probes[-1], _alone(view[t]))
    # The gradient of a result without examples is a sum over all of them.
    summed = {p.op.name for p, t in zip(probes, results, strict=True) if not isinstance(view[t], Batch)}
    inputs = list(op.inputs)
    grads = tf.gradients(results, inputs, probes, stop_gradients=inputs) if results else []
    if again := {op.type for op in side_effects(graph.get_operations()[before:])}:
        return mixed(
            op, f"has a gradient of its own (tf.custom_gradient) that draws or writes ({', '.join(sorted(again))})"
        )
    for t, g in zip(inputs, grads, strict=False):
        if g is None:
            continue
        g = tf.convert_to_tensor(g)
        state = view[g]
        if isinstance(view[t], Batch) and not summed.isdisjoint(graph_tools.ancestors([g])):
            return mixed(
                op,
                "has a gradient of its own (tf.custom_gradient) that adds a sum over the batch to that of each example",
            )
        if _fits(view, t, g, state):
            continue
        if isinstance(state, Mixed):
            return mixed(op, f"has a gradient of its own (tf.custom_gradient) in which {state.op} {state.why}")
        return mixed(op, "has a gradient of its own (tf.custom_gradient) that does not belong to one example each")
    return None


def _alone(state: State) -> State:
    """What a gradient with respect to a tensor of this state holds."""
    return Public() if isinstance(state, Public) else state


def _fits(view: BatchAxis, t: tf.Tensor, g: tf.Tensor, of_g: State) -> bool:
    """Whether the gradient of an op's input keeps examples apart; what holds neither examples nor weights has none."""
    state = view[t]
    if isinstance(state, Batch):
        return of_g == state or (isinstance(of_g, Public) and row_free(g, of_g, state.axis - t.shape.rank))
    return not weighs(state) or is_batch_free(of_g)
