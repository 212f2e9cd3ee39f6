"""Draws correlated noise step by step, for all weights of a model together.

Base normals are always fresh ones of a `Source`, whose key is in the process's memory alone. The state is what later
steps need of earlier noise. It is kept with the optimizer and saved with it, so that a loaded one goes on with the same
correlated noise. Anyone who has the state can subtract some of the noise. So it is a secret, as the weights are not.
Noise that is drawn after a load is fresh. No base normal is ever in two different sums, however often a training is
resumed from the same file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfdpfl.noise.source import Source
from tfdpfl.noise.strategies import Noise

__all__ = ["Stream"]


class Stream:
    """Draws the next row of ``C⁻¹ Z`` as tensors of the weights' shapes.

    Args:
      noise: which.
      shapes: of the weights, static.
      add_state: makes a variable that is saved, from a name and its first value.
    """

    def __init__(self, noise: Noise, shapes: Sequence, add_state: Callable[[str, np.ndarray], tf.Variable]):
        self._noise = noise
        self._shapes = [tf.TensorShape(shape) for shape in shapes]
        self._sizes = [shape.num_elements() for shape in self._shapes]
        self.state = [add_state(name, value) for name, value in noise.initial_state(sum(self._sizes)).items()]

    @tf.autograph.experimental.do_not_convert
    def next(self, source: Source, step: tf.Tensor) -> list[tf.Tensor]:
        """Draws float32 tensors of unit base normals, and moves the state on; see `Noise.draw`."""
        flat = self._noise.draw(source, sum(self._sizes), self.state, step)
        parts = tf.split(flat, self._sizes) if len(self._sizes) > 1 else [flat]
        return [tf.reshape(part, shape) for part, shape in zip(parts, self._shapes, strict=True)]
