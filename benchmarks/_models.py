"""The models that the benchmarks train, in Keras: MODELS has, by name, what builds each and what makes its batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

TRANSFORMER = {"vocabulary": 1000, "tokens": 128, "width": 256, "heads": 4, "layers": 4}
DECODER = {"vocabulary": 5000, "tokens": 64, "width": 128, "heads": 4, "layers": 2}
WORDS, WORD_WIDTH, WORD_TOKENS = 50_000, 64, 64
LSTM_STEPS, LSTM_FEATURES, LSTM_WIDTH = 32, 64, 128


class BenchmarkModel(NamedTuple):
    """What a benchmark needs of a model.

    Attributes:
        build: makes the Keras model, uncompiled, of a given `keras`; its outputs are logits.
        batch: makes `(x, y)` of a given size, y integer labels.
    """

    build: Callable[[Any], Any]
    batch: Callable[[int], tuple[np.ndarray, np.ndarray]]


def mlp(keras: Any, width: int = 1024) -> Any:
    """784-width-width-10."""
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((784,)),
            layers.Dense(width, activation="relu"),
            layers.Dense(width, activation="relu"),
            layers.Dense(10),
        ]
    )


def mnist_cnn(keras: Any) -> Any:
    """The convolutional network of TF Privacy's MNIST tutorial."""
    layers = keras.layers
    return keras.Sequential(
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


def cnn(keras: Any) -> Any:
    """Two layers of 3x3 filters, as in Keras's example for MNIST, without dropout."""
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def resnet(keras: Any) -> Any:
    """ResNet-14 for CIFAR: three stages of two blocks, 16, 32 and 64 channels, GroupNormalization of 8 groups."""
    layers = keras.layers

    def normalised(x: Any, channels: int, kernel: int, strides: int = 1) -> Any:
        x = layers.Conv2D(channels, kernel, strides, padding="same", use_bias=False)(x)
        return layers.GroupNormalization(8)(x)

    inputs = layers.Input((32, 32, 3))
    x = layers.Activation("relu")(normalised(inputs, 16, 3))
    for stage, channels in enumerate((16, 32, 64)):
        for block in range(2):
            strides = 2 if stage and not block else 1
            y = layers.Activation("relu")(normalised(x, channels, 3, strides))
            y = normalised(y, channels, 3)
            if strides > 1:
                x = normalised(x, channels, 1, strides)
            x = layers.Activation("relu")(layers.Add()([x, y]))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def transformer(keras: Any) -> Any:
    """An encoder of 4 layers, width 256, 128 tokens, normalised before each part; classifies the mean of the tokens."""
    layers, size = keras.layers, TRANSFORMER
    inputs = layers.Input((size["tokens"],), dtype="int32")
    x = layers.Embedding(size["vocabulary"], size["width"])(inputs)
    for _ in range(size["layers"]):
        x = _block(keras, x, size, causal=False)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(10)(x))


def _block(keras: Any, x: Any, size: dict[str, int], causal: bool) -> Any:
    layers, width = keras.layers, size["width"]
    y = layers.LayerNormalization()(x)
    attention = layers.MultiHeadAttention(size["heads"], width // size["heads"])
    x = layers.Add()([x, attention(y, y, use_causal_mask=causal)])
    y = layers.LayerNormalization()(x)
    y = layers.Dense(width)(layers.Dense(4 * width, activation="relu")(y))
    return layers.Add()([x, y])


def embedding(keras: Any) -> Any:
    """The mean of 64 words' vectors, of a vocabulary of 50,000, is classified."""
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((WORD_TOKENS,), dtype="int32"),
            layers.Embedding(WORDS, WORD_WIDTH),
            layers.GlobalAveragePooling1D(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def lstm(keras: Any, unroll: bool = True) -> Any:
    """An LSTM of width 128 over 32 steps of 64 features, unrolled."""
    layers = keras.layers
    return keras.Sequential(
        [layers.Input((LSTM_STEPS, LSTM_FEATURES)), layers.LSTM(LSTM_WIDTH, unroll=unroll), layers.Dense(10)]
    )


def lstm_rolled(keras: Any) -> Any:
    """The same as Keras makes it unless told otherwise, with a loop over the steps."""
    return lstm(keras, unroll=False)


def tied_decoder(keras: Any) -> Any:
    """A language model of 2 causal layers, width 128, 64 tokens of 5,000, whose output matrix is its embedding."""

    class Tied(keras.layers.Layer):
        def build(self, _: Any) -> None:
            shape = (DECODER["vocabulary"], DECODER["width"])
            self.table = self.add_weight(shape=shape, initializer="uniform", name="table")

        def call(self, x: Any, reverse: bool = False) -> Any:
            if hasattr(keras, "ops"):
                take, table = keras.ops.take, keras.ops.convert_to_tensor(self.table)
                return keras.ops.matmul(x, keras.ops.transpose(table)) if reverse else take(table, x, axis=0)
            import tensorflow as tf

            return tf.matmul(x, self.table, transpose_b=True) if reverse else tf.gather(self.table, x)

    layers, tied = keras.layers, Tied()
    inputs = layers.Input((DECODER["tokens"],), dtype="int32")
    x = tied(inputs)
    for _ in range(DECODER["layers"]):
        x = _block(keras, x, DECODER, causal=True)
    return keras.Model(inputs, tied(layers.LayerNormalization()(x), reverse=True))


def random_batch(shape: tuple[int, ...], classes: int) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
    """Makes batches of uniform noise of `shape` with uniform labels."""

    def batch(size: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        return rng.random((size, *shape), np.float32), rng.integers(0, classes, size, np.int32)

    return batch


def random_text(vocabulary: int, tokens: int, classes: int | None) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
    """Makes batches of words with Zipf's frequencies; labels are classes, or without any the words themselves."""

    def batch(size: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        frequency = 1 / np.arange(1, vocabulary + 1)
        x = rng.choice(vocabulary, (size, tokens), p=frequency / frequency.sum()).astype(np.int32)
        return x, x if classes is None else rng.integers(0, classes, size, np.int32)

    return batch


MODELS = {
    "mlp": BenchmarkModel(mlp, random_batch((784,), 10)),
    "mnist_cnn": BenchmarkModel(mnist_cnn, random_batch((28, 28, 1), 10)),
    "cnn": BenchmarkModel(cnn, random_batch((28, 28, 1), 10)),
    "resnet": BenchmarkModel(resnet, random_batch((32, 32, 3), 10)),
    "transformer": BenchmarkModel(transformer, random_text(TRANSFORMER["vocabulary"], TRANSFORMER["tokens"], 10)),
    "embedding": BenchmarkModel(embedding, random_text(WORDS, WORD_TOKENS, 10)),
    "lstm": BenchmarkModel(lstm, random_batch((LSTM_STEPS, LSTM_FEATURES), 10)),
    "lstm_rolled": BenchmarkModel(lstm_rolled, random_batch((LSTM_STEPS, LSTM_FEATURES), 10)),
    "tied_decoder": BenchmarkModel(tied_decoder, random_text(DECODER["vocabulary"], DECODER["tokens"], None)),
}
DEFAULT = list(MODELS)
MODELS |= {  # for growth with the model's size
    f"mlp_{width}": BenchmarkModel(functools.partial(mlp, width=width), random_batch((784,), 10))
    for width in (256, 4096)
}
