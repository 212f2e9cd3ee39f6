"""How Keras 3 hands a loss to its optimizer, and takes the update back."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpfl._frames import callers
from tfdpfl._variables import plain_variable
from tfdpfl.clipping import tapes
from tfdpfl.errors import PrivacyError
from tfdpfl.optimizers import _step_table
from tfdpfl.optimizers._fused_adam import forget_powers
from tfdpfl.optimizers._privatizer import after_a_step

__all__ = ["Keras3Adapter"]


class Keras3Adapter:
    """Comes before a Keras 3 optimizer in a DP optimizer's bases.

    The trainer calls ``scale_loss(loss)`` before it takes gradients and ``apply`` after, in the same graph. The loss
    is kept from the one to the other. What goes back is cut off from the weights, so that the trainer's own
    gradients are None and cost nothing. Without ``scale_loss`` a tape's gradients tell of which loss they are.
    """

    _dp_takes_workers = False
    _track_variable: Callable  # the base class's
    _load_ledger: Callable[[np.ndarray | None], None]
    _pending: tf.Tensor | None = None
    _handed: tf.Tensor | None = None  # to the trainer, in place of it

    def __setattr__(self, name: str, value) -> None:
        """As Keras has it. A LossScaleOptimizer sets ``loss_scale_factor`` of what it wraps, once, as it is made
        (`compile` makes one under mixed_float16): what that one is given then comes here as it is.

        Its own way has no place in a private step. Losses of one example are not divided by the batch's size, so need
        no scale; gradients that are not finite contribute nothing; and a step that is left out, or a scale that is
        halved, because of what one example overflows in tells of that example.
        """
        super().__setattr__(name, value)
        for frame in callers() if name == "loss_scale_factor" else ():
            wrapper: Any = frame.f_locals.get("self")
            if wrapper is not self and getattr(wrapper, "inner_optimizer", None) is self:
                wrapper.scale_loss, wrapper.apply = self.scale_loss, _apply_of(weakref.ref(wrapper))
                return

    def _add_state(self, name: str, value: np.ndarray):
        import keras

        variable = keras.Variable(
            lambda shape, dtype: tf.constant(value, dtype),
            shape=value.shape, dtype=str(value.dtype), trainable=False, name=name, aggregation="only_first_replica",
        )  # fmt: skip
        self._track_variable(variable)
        return variable

    def build(self, variables):
        """As Keras does, but as if before the step: TensorFlow traces a function twice that makes variables."""
        if tf.distribute.has_strategy():
            return super().build(variables)
        with tf.init_scope(), tf.variable_creator_scope(plain_variable):
            return super().build(variables)

    def set_weights(self, values):
        """Loads what an .h5 file holds, as far as Keras 3 lets it: the ledger. Keras builds the optimizer for no
        weights before, so it is built again by the first step."""
        self._load_ledger(next((v for v in map(np.asarray, values) if _step_table.is_table(v)), None))
        self.built = False

    def scale_loss(self, loss):
        self._check_graph(loss)
        if self._pending is not None and self._pending.graph is loss.graph:
            raise PrivacyError(
                f"scale_loss received {loss.op.name!r} after {self._pending.op.name!r}, without an update in between. "
                "Add the losses up, and pass their sum once."
            )
        self._pending = loss
        self._handed = tf.stop_gradient(loss)
        return self._handed

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads, trainable_variables=None):
        forget_powers()
        (loss, handed), self._pending, self._handed = (self._pending, self._handed), None, None
        if trainable_variables is None:
            trainable_variables = self._trainable_variables
        grads, variables = list(grads), list(trainable_variables)
        if loss is not None and loss.graph is tf.compat.v1.get_default_graph():
            tapes.check_asked(handed, variables)
            private = self._update(loss, variables, self._dp_ledger.value)
        else:
            private = self._of_a_tape(grads, variables, self._dp_ledger.value)
        if self.loss_scale_factor is not None:  # the base class divides by it
            # Which takes no rows: those are laid out, with zeros for the others.
            private = [g if g is None else tf.convert_to_tensor(g) * self.loss_scale_factor for g in private]
        if not self.built:
            self.build(variables)
        with tf.control_dependencies(after_a_step(private)):
            self._dp.where_whole(lambda: super(Keras3Adapter, self).apply(private, variables))

    def _all_reduce_sum_gradients(self, grads_and_vars):
        return list(grads_and_vars)  # they are summed over the replicas, and all have the same noise

    @tf.autograph.experimental.do_not_convert
    def minimize(self, loss, var_list, tape=None):
        """Takes one private step on ``loss``, inside a tf.function (as the optimizers of Keras 2 do)."""
        loss = loss() if callable(loss) else loss
        variables = list(var_list() if callable(var_list) else var_list)
        self._check_tape(tape, loss, variables)
        self.scale_loss(loss)
        self.apply([None] * len(variables), variables)


def _apply_of(wrapper: weakref.ref):
    """Returns the ``apply`` of a LossScaleOptimizer around a private one: its variables are made, and nothing is
    scaled."""

    def apply(grads, trainable_variables=None):
        outer = wrapper()
        if not outer.built:
            outer.build(list(trainable_variables))
        outer.inner_optimizer.apply(grads, trainable_variables)

    return apply
