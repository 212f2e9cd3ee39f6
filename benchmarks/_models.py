"""The models that the benchmarks train: MODELS has, by name, what builds each and what makes its batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class BenchmarkModel(NamedTuple):
    """What a benchmark needs of a model.

    Attributes:
        build: makes the Keras model, uncompiled; its outputs are logits, `[batch, classes]`.
        batch: makes `(x, y)` of a given size, y integer labels.
    """

    build: Callable[[], Any]
    batch: Callable[[int], tuple[np.ndarray, np.ndarray]]


def mnist_cnn() -> Any:
    """The convolutional network of TF Privacy's MNIST tutorial."""
    import tensorflow as tf

    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(16, 8, strides=2, padding="same", activation="relu"),
            layers.MaxPool2D(2, 1),
            layers.Conv2D(32, 4, strides=2, activation="relu"),
            layers.MaxPool2D(2, 1),
            layers.Flatten(),
            layers.Dense(32, activation="relu"),
            layers.Dense(10),
        ]
    )


def mlp() -> Any:
    """784-1024-1024-10."""
    import tensorflow as tf

    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Input((784,)),
            layers.Dense(1024, activation="relu"),
            layers.Dense(1024, activation="relu"),
            layers.Dense(10),
        ]
    )


def random_batch(shape: tuple[int, ...], classes: int) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
    """Makes batches of uniform noise of `shape` with uniform labels."""

    def batch(size: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        return rng.random((size, *shape), np.float32), rng.integers(0, classes, size, np.int32)

    return batch


MODELS = {
    "mnist_cnn": BenchmarkModel(mnist_cnn, random_batch((28, 28, 1), 10)),
    "mlp": BenchmarkModel(mlp, random_batch((784,), 10)),
}
