"""Draws correlated noise step by step: row t of ``C⁻¹ Z`` from a little state.

Base normals are always fresh ones of a `Source`, whose key is in the process's memory alone. The state is what later
steps need of earlier noise: past rows for `Banded`, buffers for `BLT`, the keys of a tree's open nodes for `Tree`. It
is kept with the optimizer and saved with it, so that a loaded one goes on with the same correlated noise: who has it
can take off some of the noise, so it is a secret, as the weights are not. What is drawn after a load is fresh: no base
normal is ever in two different sums, however often a training is taken up from the same file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpfl import noise as generators
from tfdpfl.accounting.strategies import BLT, Banded, Noise, Tree

_MOST_LEVELS = 48  # of one tree that is never restarted: more steps than any training takes


class Stream:
    """The next row of ``C⁻¹ Z``, for all of a model's weights at once.

    Args:
      noise: which.
      shapes: of the weights, static.
      add_state: makes a variable that is saved, from a name and its first value.
    """

    def __init__(self, noise: Noise, shapes: Sequence, add_state: Callable[[str, np.ndarray], Any]):
        self.noise = noise
        self._shapes = [tf.TensorShape(shape) for shape in shapes]
        self._sizes = [shape.num_elements() for shape in self._shapes]
        size = sum(self._sizes)
        self.state: list[Any] = []
        if isinstance(noise, Tree):
            levels = _MOST_LEVELS if noise.restart_every is None else noise.restart_every.bit_length()
            self.state = [add_state("dp_noise_keys", np.zeros([levels, 2], np.int64))]
            return
        rows = noise.buffers if isinstance(noise, BLT) else noise.bands - 1 if isinstance(noise, Banded) else 0
        # A variable for each: what is assigned to a whole variable is not copied.
        self.state = [add_state(f"dp_noise_{i}", np.zeros(size, np.float32)) for i in range(rows)]

    @tf.autograph.experimental.do_not_convert
    def next(self, source: generators.Source, step: tf.Tensor) -> list[tf.Tensor]:
        """float32 tensors of the weights' shapes, of unit base normals; the state goes on by one step.

        Args:
          source: of the fresh normals.
          step: int64 scalar, from 0: which row. At 0 the state counts as empty, whatever it holds.
        """
        noise = self.noise
        if isinstance(noise, Tree):
            flat = self._tree(source, noise, step)
        else:
            flat = source.gaussian([[sum(self._sizes)]], 1.0)[0]
            if isinstance(noise, BLT):
                flat = self._buffered(noise, flat, step)
            elif isinstance(noise, Banded):
                flat = self._banded(noise, flat, step)
        parts = tf.split(flat, self._sizes) if len(self._sizes) > 1 else [flat]
        return [tf.reshape(part, shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _banded(self, noise: Banded, fresh: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """``c₀ w = z - Σ cₐ w of a steps ago``; the last row is the first state."""
        assert noise.coefficients is not None
        first, *others = noise.coefficients
        past = [tf.convert_to_tensor(v) for v in self.state]
        weights = [tf.where(age <= step, -c, 0.0) for age, c in enumerate(others, start=1)]
        row = _sum(fresh, weights, past)
        row = row if first == 1 else row / first
        for variable, value in zip(self.state, [row, *past], strict=False):
            variable.assign(value)
        return row

    def _buffered(self, noise: BLT, fresh: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """``w = z - scale · s``, then ``s = decay s + w``."""
        assert noise.scale is not None and noise.decay is not None
        past = [tf.convert_to_tensor(v) for v in self.state]
        row = _sum(fresh, [tf.where(step > 0, -scale, 0.0) for scale in noise.scale], past)
        for variable, value, decay in zip(self.state, past, noise.decay, strict=True):
            variable.assign(tf.where(step > 0, decay, 0.0) * value + row)
        return row

    def _tree(self, source: generators.Source, noise: Tree, step: tf.Tensor) -> tf.Tensor:
        """The node that this step closes, less those that it is made of, which were open until now: of each level below
        its own the last one drawn."""
        place = (step if noise.restart_every is None else tf.math.floormod(step, noise.restart_every)) + 1
        state = self.state[0]
        keys = tf.convert_to_tensor(state)
        lowest = tf.bitwise.bitwise_and(place, -place)
        level = tf.reduce_sum(tf.cast(lowest > 2 ** tf.range(min(_MOST_LEVELS, 62), dtype=tf.int64), tf.int64))
        key = source.fresh_key()
        row = source.of_keys(sum(self._sizes), tf.concat([key[None], keys], 0), level)
        state.assign(tf.where(tf.range(keys.shape[0], dtype=tf.int64)[:, None] == level, key, keys))
        return row


def _sum(fresh: tf.Tensor, weights: list[tf.Tensor], past: list[tf.Tensor]) -> tf.Tensor:
    return tf.add_n([fresh, *(weight * value for weight, value in zip(weights, past, strict=True))])
