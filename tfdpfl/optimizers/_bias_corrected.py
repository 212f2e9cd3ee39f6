"""Adam whose second moments are those of the gradient alone: what the noise adds to them is taken off."""

from __future__ import annotations

import tensorflow as tf

from tfdpfl.clips import AdaptiveClip
from tfdpfl.errors import PrivacyError
from tfdpfl.optimizers._privatizer import GradientPrivatizer

__all__ = ["AdamBC"]


class AdamBC(tf.keras.optimizers.Adam):
    """Adam with ``sqrt(max(v̂ - φ, variance_floor))`` in the place of ``sqrt(v̂)``, where φ is the noise's variance in a
    coordinate, (noise_multiplier * C / expected_batch_size)² (Tang et al. 2023, arXiv:2312.14334, algorithm 1).

    Made private it is `DPAdamBC`, which needs ``expected_batch_size`` and a clip that does not adapt: else φ is another
    in every step. Others found that it does not help, and may harm, where weights decay (arXiv:2511.07843).

    Args:
      variance_floor: the least that v̂ - φ may be; None takes a tenth of φ.
      others: those of Adam, without ``amsgrad``.
    """

    _dp: GradientPrivatizer

    def __init__(self, learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-7, variance_floor=None, **kwargs):
        if kwargs.get("amsgrad"):
            raise ValueError("amsgrad=True keeps the largest second moment, noise included. Leave it out.")
        if variance_floor is not None and not variance_floor > 0:
            raise ValueError(f"variance_floor={variance_floor!r} must be above 0, or None for a tenth of the noise's.")
        super().__init__(learning_rate=learning_rate, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon, **kwargs)
        self.variance_floor = variance_floor

    def get_config(self):
        return {**super().get_config(), "variance_floor": self.variance_floor}

    def update_step(self, gradient, variable, learning_rate=None):
        """As Keras 3 calls it; Keras 2 leaves the learning rate to the optimizer."""
        variance, dtype = _noise_variance(self._dp), variable.dtype
        floor = max(0.1 * variance if self.variance_floor is None else self.variance_floor, 1e-30)
        if learning_rate is None:
            rate, at = self.learning_rate, self._index_dict[self._var_key(variable)]
        else:
            rate, at = learning_rate, self._get_variable_index(variable)
        first, second = self._momentums[at], self._velocities[at]
        mean = self.beta_1 * tf.convert_to_tensor(first) + (1 - self.beta_1) * gradient
        square = self.beta_2 * tf.convert_to_tensor(second) + (1 - self.beta_2) * gradient * gradient
        first.assign(mean), second.assign(square)
        step = tf.cast(tf.convert_to_tensor(self.iterations) + 1, dtype)
        whole = lambda beta: 1 - tf.pow(tf.cast(beta, dtype), step)  # noqa: E731
        scale = tf.sqrt(tf.maximum(square / whole(self.beta_2) - variance, floor)) + self.epsilon
        variable.assign_sub(tf.cast(rate, dtype) * mean / whole(self.beta_1) / scale)


def _noise_variance(privatizer: GradientPrivatizer) -> float:
    """Returns φ.

    Raises:
      PrivacyError: it is another in every step.
    """
    settings, size = privatizer.settings, privatizer.settings.expected_batch_size
    changes = settings.changing is not None or isinstance(settings.l2_norm_clip, AdaptiveClip)
    if size is None or changes:
        give = "expected_batch_size" if size is None else "a clip and noise that do not change"
        raise PrivacyError(
            f"DPAdamBC subtracts the variance of the noise, which must be the same in every step: give it {give}, or "
            "use DPAdam."
        )
    if privatizer.noise.sparse is not None:
        raise PrivacyError(
            "DPAdamBC subtracts the variance of the noise, but sparse=AdaFEST adds noise only to some rows. Use DPAdam."
        )
    stddev = settings.least_noise * privatizer.clipping.first
    return (stddev / size) ** 2
