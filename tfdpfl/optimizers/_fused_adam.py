"""Takes Adam's update of a weight in one op of TensorFlow, where Keras makes a dozen."""

from __future__ import annotations

import weakref

import tensorflow as tf

from tfdpfl.clipping.graph import compiled
from tfdpfl.clipping.step_checks import raw_variable

__all__ = ["FusedAdam", "forget_powers", "updates_as_adam"]

# By graph: the names of what `_powers` made for one update, by the optimizer and the type. (A tensor would keep its
# graph alive.)
_POWERS: weakref.WeakKeyDictionary[tf.Graph, dict[tuple[int, tf.DType], list[str]]] = weakref.WeakKeyDictionary()


def updates_as_adam(base: type) -> bool:
    """Returns whether an optimizer class updates weights by the code of Keras's own Adam, or AdamW, whose weights decay
    before."""
    own = tf.keras.optimizers.Adam, tf.keras.optimizers.AdamW
    return any(getattr(base, "update_step", None) is adam.update_step for adam in own)


def forget_powers() -> None:
    """Has the next update that is traced count anew: the number of updates may be another."""
    if not tf.executing_eagerly():
        _POWERS.pop(tf.compat.v1.get_default_graph(), None)


class FusedAdam:
    """Comes before an optimizer in a DP optimizer's bases, if `updates_as_adam` holds of it.

    Keras computes the moments and the weight op by op: twelve passes over all weights, and as many ops for each of
    them. TensorFlow has an op that does the same in one pass, to rounding: it rounds 1 - beta_2 to float32, which moves
    an update by a few parts in 10⁵ of its size. Keras's own update runs if the op does not fit.
    """

    amsgrad: bool  # the optimizer's own

    def update_step(self, gradient, variable, *learning_rate):
        """As Keras 3 calls it; Keras 2 leaves the learning rate to the optimizer."""
        if learning_rate:
            rate, at = learning_rate[0], self._get_variable_index(variable)
        else:
            rate, at = self.learning_rate, self._index_dict[self._var_key(variable)]
        weight, *moments = (raw_variable(v) for v in (variable, self._momentums[at], self._velocities[at]))
        if not self._fits(gradient, weight, moments):
            super().update_step(gradient, variable, *learning_rate)  # type: ignore[misc]  # of the base
            return
        powers = _powers(self, weight.dtype)
        numbers = [_scalar(number, weight.dtype) for number in (rate, self.beta_1, self.beta_2, self.epsilon)]
        tf.raw_ops.ResourceApplyAdam(
            var=weight.handle, m=moments[0].handle, v=moments[1].handle, beta1_power=powers[0], beta2_power=powers[1],
            lr=numbers[0], beta1=numbers[1], beta2=numbers[2], epsilon=numbers[3],
            grad=tf.cast(gradient, weight.dtype),
        )  # fmt: skip

    def _fits(self, gradient, weight, moments: list) -> bool:
        """Returns whether the op can take the update: of a dense gradient, on one device, uncompiled."""
        if self.amsgrad or isinstance(gradient, tf.IndexedSlices) or getattr(self, "jit_compile", False):
            return False
        alike = all(hasattr(type(v), "handle") and v.dtype == weight.dtype for v in [weight, *moments])
        return alike and not tf.distribute.has_strategy() and not compiled()


def _scalar(number, dtype: tf.DType) -> tf.Tensor:
    return tf.cast(tf.convert_to_tensor(raw_variable(number)), dtype)


def _powers(optimizer, dtype: tf.DType) -> list[tf.Tensor]:
    """Returns both betas to the power of the number of this update, made once for all weights of a type."""

    def make() -> list[tf.Tensor]:
        step = _scalar(optimizer.iterations, tf.int64) + 1
        return [tf.pow(_scalar(beta, dtype), tf.cast(step, dtype)) for beta in (optimizer.beta_1, optimizer.beta_2)]

    if tf.executing_eagerly():
        return make()
    graph = tf.compat.v1.get_default_graph()
    made, this = _POWERS.setdefault(graph, {}), (id(optimizer), dtype)
    if this not in made:
        made[this] = [t.name for t in make()]
    return [graph.get_tensor_by_name(name) for name in made[this]]
