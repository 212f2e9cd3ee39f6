"""The one place that draws noise.

Noise is a function of a secret key and a counter (Philox 4x32-10, Salmon et al. 2011), so that it needs no state
besides the step, is the same in every replica, and goes on where it was after a restart.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

_PHILOX = 1


def new_key(seed: int | None = None) -> np.ndarray:
    """A key of 128 bits as two int64: from the operating system's entropy, or from a seed (for tests only)."""
    if seed is None:
        words = np.frombuffer(secrets.token_bytes(16), np.int64)
    else:
        words = np.random.SeedSequence(seed).generate_state(2, np.uint64).view(np.int64)
    return words.copy()


def gaussian(shapes: Sequence, stddev: float | tf.Tensor, key: tf.Tensor, step: tf.Tensor) -> list[tf.Tensor]:
    """Independent float32 normals of mean 0 for every shape, a fresh set for every ``step``.

    Args:
      shapes: static shapes of the tensors.
      stddev: standard deviation of every coordinate.
      key: int64 [2], secret; half of it keys the cipher, half is added to its counter.
      step: int64 scalar. The same key and step give the same noise: never use a step twice.
    """
    words = tf.bitcast(key, tf.uint64)
    # A step has a stream of its own, whatever the number of tensors, and each tensor 2^40 blocks of it.
    stream = tf.bitcast(tf.convert_to_tensor(step), tf.uint64) + words[1]
    normals = []
    for i, shape in enumerate(shapes):
        counter = tf.stack([tf.constant(i << 40, tf.uint64), stream])
        normal = tf.raw_ops.StatelessRandomNormalV2(
            shape=tf.TensorShape(shape).as_list(), key=words[:1], counter=counter, alg=_PHILOX, dtype=tf.float32
        )
        normals.append(normal * tf.cast(stddev, tf.float32))
    return normals
