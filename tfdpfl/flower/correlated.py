"""Noise of a server's rounds that is correlated over them, as a pure step. What is kept of earlier noise goes in and
comes out, and the caller decides when it counts. No Flower here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfdpfl.noise.strategies import Noise

__all__ = ["Rows"]


class Rows:
    """Rows of ``C⁻¹ Z`` for arrays of these shapes, with fresh normals in each.

    Args:
      noise: which.
      shapes: of a round's arrays.
    """

    def __init__(self, noise: Noise, shapes: Sequence[tuple[int, ...]]):
        import tensorflow as tf

        from tfdpfl.noise.correlated import Stream

        self.shapes = [*shapes]
        self._stream = Stream(noise, shapes, lambda name, value: tf.Variable(value, trainable=False, name=name))

    def row(self, source, step: int, state: Sequence[np.ndarray] | None) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The noise of round ``step``, from 0, of unit base normals; and what the round after needs of it.

        A row that is drawn again from the same state is of other fresh normals.

        Args:
          source: a `tfdpfl.noise.Source`.
          state: what the round before gave; None before round 0.
        """
        import tensorflow as tf

        for variable, value in zip(self._stream.state, state or (), strict=state is not None):
            variable.assign(value)
        rows = [row.numpy() for row in self._stream.next(source, tf.constant(step, tf.int64))]
        return rows, [variable.numpy() for variable in self._stream.state]
