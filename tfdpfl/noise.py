"""The one place that draws noise.

Noise is a function of a secret key and a counter (Philox 4x32-10, Salmon et al. 2011), so that it needs no state
besides the step, is the same in every replica, and goes on where it was after a restart.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

_PHILOX = 1
_SMALL = 1 << 14


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
    first, second = tf.unstack(tf.bitcast(key, tf.uint64))
    # A step has a stream of its own, whatever the number of tensors, and each draw 2^40 blocks of it.
    stream = tf.bitcast(tf.convert_to_tensor(step), tf.uint64) + second
    sizes = [tf.TensorShape(shape).num_elements() for shape in shapes]
    # Small tensors share a draw: a dozen operations each would cost more than their numbers.
    small = [i for i, n in enumerate(sizes) if n < _SMALL]
    draws = [[i] for i in range(len(sizes)) if i not in set(small)] + ([small] if small else [])
    normals: dict[int, tf.Tensor] = {}
    stddev, cipher_key = tf.cast(stddev, tf.float32), tf.expand_dims(first, 0)
    for number, members in enumerate(draws):
        counter = tf.stack([tf.constant(number << 40, tf.uint64), stream])
        lengths = [sizes[i] for i in members]
        total = sum(lengths)
        drawn = _pairs(-(-total // 2), stddev, cipher_key, counter)
        if total % 2:
            drawn = drawn[:total]
        for i, part in zip(members, tf.split(drawn, lengths), strict=True):
            normals[i] = tf.reshape(part, shapes[i])
    return [normals[i] for i in range(len(sizes))]


@tf.function(
    input_signature=[
        tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.float32), tf.TensorSpec([1], tf.uint64),
        tf.TensorSpec([2], tf.uint64),
    ],
    autograph=False,
)  # fmt: skip
def _pairs(half: tf.Tensor, stddev: tf.Tensor, key: tf.Tensor, counter: tf.Tensor) -> tf.Tensor:
    """2 half normals by Box and Muller (1958) from 32-bit words; vectorised, about half the time of
    `tf.random.stateless_normal`, and with tails out to 6.7 in place of its 5.7. Traced once for all draws: there may
    be hundreds in a model."""
    words = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[2 * half], key=key, counter=counter, alg=_PHILOX, dtype=tf.uint32
    )
    # 1 / u, u in (0, 1]: its logarithm has the sign that the root wants.
    inverse = 2.0**32 / (tf.cast(words[:half], tf.float32) + 0.5)
    radius = (math.sqrt(2) * stddev) * tf.sqrt(tf.math.log(inverse))  # here it scales half as many numbers
    angle = tf.cast(tf.bitcast(words[half:], tf.int32), tf.float32) * (math.pi * 2.0**-31)
    return tf.concat([radius * tf.cos(angle), radius * tf.sin(angle)], 0)


class Source:
    """Noise for one object in one process: its key and its place in the stream are in no file."""

    generator = None

    def __init__(self, seed=None):
        self.seed = seed
        with tf.init_scope():
            self._key = tf.Variable(new_key(seed), trainable=False)
            self._draws = tf.Variable(np.int64(0), trainable=False)

    def __reduce__(self):
        return Source, (self.seed,)

    def gaussian(self, shapes, stddev):
        self.generator = "philox-4x32-10"
        at = tf.convert_to_tensor(self._draws)
        normals = gaussian(shapes, stddev, tf.convert_to_tensor(self._key), at)
        self._draws.assign(at + 1)
        return normals
