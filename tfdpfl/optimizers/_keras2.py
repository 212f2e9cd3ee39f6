"""How Keras 2 (tf.keras before TensorFlow 2.16, and tf_keras) hands a loss to its optimizer."""

from __future__ import annotations

import weakref

import tensorflow as tf

from tfdpfl.clipping import graph as graph_tools
from tfdpfl.errors import PrivacyError
from tfdpfl.optimizers._mechanism import NO_LOSS

_DATA_FREE = frozenset("Const NoOp VarHandleOp ReadVariableOp".split())


class Keras2Adapter:
    """Comes before a Keras 2 optimizer in a DP optimizer's bases.

    ``minimize`` calls ``compute_gradients(loss, variables, tape)``, then ``apply_gradients``. The second accepts only
    what follows from the first.
    """

    def _add_state(self) -> None:
        self._dp_state = {}
        self._dp_released = weakref.WeakKeyDictionary()
        with tf.init_scope():
            for name, value in self._dp.initial_state().items():
                variable = tf.Variable(value, trainable=False, name=name)
                self._variables.append(variable)
                self._dp_state[name] = variable

    @tf.autograph.experimental.do_not_convert
    def compute_gradients(self, loss, var_list, tape=None):
        if callable(loss):
            with tape or tf.GradientTape() as tape:
                loss = loss()
        variables = list(var_list() if callable(var_list) else var_list)
        self._check_graph(loss)
        private = self._dp.update(loss, variables, self._dp_state)
        released = self._dp_released.setdefault(loss.graph, [])
        released += [g for g in private if g is not None]
        return list(zip(private, variables, strict=True))

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        grads_and_vars = list(grads_and_vars)
        for g, _ in grads_and_vars:
            if g is not None and not self._is_private(g):
                raise PrivacyError(NO_LOSS)
        return super().apply_gradients(grads_and_vars, *args, **kwargs)

    def _is_private(self, g) -> bool:
        """Whether a gradient follows from released ones and from nothing else that data could reach."""
        if isinstance(g, tf.IndexedSlices) or not hasattr(g, "graph") or hasattr(g, "numpy"):
            return False
        seen, todo = set(), [g]
        while todo:
            t = todo.pop()
            stop = self._dp_released.get(t.graph, [])
            if any(t is s for s in stop) or (t.graph, t.op.name) in seen:
                continue
            seen.add((t.graph, t.op.name))
            for op in graph_tools.ancestors([t], stop).values():
                if op.inputs or op.type in _DATA_FREE:
                    continue
                outer = next((o for o, i in getattr(t.graph, "captures", ()) if i.op is op), None)
                if outer is None:
                    return False
                if hasattr(outer, "numpy") or not isinstance(getattr(outer, "graph", None), tf.Graph):
                    if outer.dtype != tf.resource:
                        return False
                elif outer.dtype != tf.resource:
                    todo.append(outer)
        return True
