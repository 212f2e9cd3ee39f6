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


# Shapes that no kernel and no threshold was chosen by, but for the kernel of depthwise convolutions.


def tabular(keras: Any) -> Any:
    """30 columns, two layers of 64 units."""
    layers = keras.layers
    hidden = [layers.Dense(64, activation="relu") for _ in range(2)]
    return keras.Sequential([layers.Input((30,)), *hidden, layers.Dense(2)])


def text_cnn(keras: Any) -> Any:
    """200 words of 20,000, two convolutions over five of them, and the maximum over the text."""
    layers = keras.layers
    convolutions = [layers.Conv1D(128, 5, activation="relu") for _ in range(2)]
    inputs, words = layers.Input((200,), dtype="int32"), layers.Embedding(20_000, 64)
    return keras.Sequential([inputs, words, *convolutions, layers.GlobalMaxPooling1D(), layers.Dense(10)])


def separable_cnn(keras: Any) -> Any:
    """Separable convolutions of 64 to 256 channels for 32x32 images, as in Keras's Xception, GroupNormalization."""
    layers = keras.layers
    model = keras.Sequential([layers.Input((32, 32, 3)), layers.Conv2D(32, 3, padding="same", activation="relu")])
    for channels in (64, 128, 256):
        model.add(layers.SeparableConv2D(channels, 3, padding="same", use_bias=False))
        model.add(layers.GroupNormalization(8))
        model.add(layers.Activation("relu"))
        model.add(layers.MaxPooling2D(2))
    model.add(layers.GlobalAveragePooling2D())
    model.add(layers.Dense(10))
    return model


def vgg(keras: Any) -> Any:
    """Pairs of 3x3 convolutions of 32, 64 and 128 channels for 32x32 images."""
    layers = keras.layers
    model = keras.Sequential([layers.Input((32, 32, 3))])
    for channels in (32, 64, 128):
        for _ in range(2):
            model.add(layers.Conv2D(channels, 3, padding="same", activation="relu"))
        model.add(layers.MaxPooling2D(2))
    for part in (layers.Flatten(), layers.Dense(128, activation="relu"), layers.Dense(10)):
        model.add(part)
    return model


def vision_transformer(keras: Any) -> Any:
    """Patches of 4x4 pixels of 32x32 images, and two blocks of width 128."""
    layers, size = keras.layers, {"width": 128, "heads": 4}
    inputs = layers.Input((32, 32, 3))
    x = layers.Reshape((64, 128))(layers.Conv2D(128, 4, strides=4)(inputs))
    for _ in range(2):
        x = _block(keras, x, size, causal=False)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def unet(keras: Any) -> Any:
    """Classes of the pixels of 64x64 images: two steps down, two up by transposed convolutions, with skips."""
    layers = keras.layers

    def convolutions(x: Any, channels: int) -> Any:
        for _ in range(2):
            x = layers.Conv2D(channels, 3, padding="same", activation="relu")(x)
        return x

    inputs = layers.Input((64, 64, 1))
    first = convolutions(inputs, 16)
    second = convolutions(layers.MaxPooling2D(2)(first), 32)
    x = convolutions(layers.MaxPooling2D(2)(second), 64)
    for skip, channels in ((second, 32), (first, 16)):
        x = layers.Conv2DTranspose(channels, 2, strides=2)(x)
        x = convolutions(layers.Concatenate()([x, skip]), channels)
    return keras.Model(inputs, layers.Conv2D(3, 1)(x))


def bidirectional_gru(keras: Any) -> Any:
    """A GRU of 64 units over 50 steps of 16 features, in both directions."""
    layers = keras.layers
    both = layers.Bidirectional(layers.GRU(64))
    return keras.Sequential([layers.Input((50, 16)), both, layers.Dense(10)])


def recommender(keras: Any) -> Any:
    """The last 50 of 10,000 items, their mean vector, two layers, and scores of all items."""
    layers = keras.layers
    inputs, items = layers.Input((50,), dtype="int32"), layers.Embedding(10_000, 64)
    hidden = [layers.Dense(128, activation="relu"), layers.Dense(64, activation="relu")]
    return keras.Sequential([inputs, items, layers.GlobalAveragePooling1D(), *hidden, layers.Dense(10_000)])


def random_batch(
    shape: tuple[int, ...], classes: int, of_pixels: bool = False
) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
    """Makes batches of uniform noise of `shape` with uniform labels, one for each image or each of its pixels."""

    def batch(size: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        labels = (size, *shape[:-1]) if of_pixels else size
        return rng.random((size, *shape), np.float32), rng.integers(0, classes, labels, np.int32)

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
OTHER = {
    "tabular": BenchmarkModel(tabular, random_batch((30,), 2)),
    "text_cnn": BenchmarkModel(text_cnn, random_text(20_000, 200, 10)),
    "separable_cnn": BenchmarkModel(separable_cnn, random_batch((32, 32, 3), 10)),
    "vgg": BenchmarkModel(vgg, random_batch((32, 32, 3), 10)),
    "vision_transformer": BenchmarkModel(vision_transformer, random_batch((32, 32, 3), 10)),
    "unet": BenchmarkModel(unet, random_batch((64, 64, 1), 3, of_pixels=True)),
    "bidirectional_gru": BenchmarkModel(bidirectional_gru, random_batch((50, 16), 10)),
    "recommender": BenchmarkModel(recommender, random_text(10_000, 50, 10_000)),
}
MODELS |= OTHER
