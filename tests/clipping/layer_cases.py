"""What tests of layers and ops share: layers by the family of their ops, and a layer of any function of weights."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from helpers import K, L, check_models, normal, rng
from hypothesis import HealthCheck, settings

B = 4


def has(*names):
    return all(hasattr(L, n) for n in names)


def stack(*layers):
    return K.Sequential(list(layers))


def ids(*shape, vocabulary=6, seed=0):
    return rng(seed).integers(0, vocabulary, shape).astype("int32")


words = np.array(["dog", "cat", "", "emu"])[ids(B, 3, vocabulary=4)].astype(object)
vector, sequence, grid = normal(B, 4), normal(B, 5, 4), normal(B, 3, 2, 4)
line, image, volume = normal(B, 9, 3), normal(B, 7, 6, 3), normal(B, 4, 3, 5, 2)


def tanh(units, **kwargs):
    return L.Dense(units, activation="tanh", **kwargs)


PRODUCTS = {
    "dense of rank 2": (vector, lambda: [tanh(5), L.Dense(3)]),
    "dense of rank 3": (sequence, lambda: [tanh(5), L.Dense(3)]),
    "dense of rank 4": (grid, lambda: [tanh(5), L.Dense(3, use_bias=False)]),
    "dense of many positions": (normal(B, 70, 3), lambda: [tanh(4), L.Dense(2)]),
    "dense of width 1": (normal(B, 1), lambda: [tanh(1), L.Dense(1)]),
    "einsum ab,bc->ac": (vector, lambda: [L.EinsumDense("ab,bc->ac", 3, bias_axes="c")]),
    "einsum to two axes": (sequence, lambda: [L.EinsumDense("abc,cde->abde", (None, 2, 3), bias_axes="de")]),
    "einsum from two axes": (grid, lambda: [L.EinsumDense("abcd,cde->abe", (None, 3), bias_axes="e")]),
    "einsum of each position": (sequence, lambda: [L.EinsumDense("abc,bcd->abd", (5, 3), bias_axes="bd")]),
    "einsum over positions": (sequence, lambda: [L.EinsumDense("abc,bd->adc", (3, None))]),
    "einsum with an ellipsis": (grid, lambda: [L.EinsumDense("...x,xy->...y", 3, bias_axes="y")]),
    "time distributed dense": (sequence, lambda: [L.TimeDistributed(tanh(3)), L.TimeDistributed(L.Dense(2))]),
}  # fmt: skip

CONVOLUTIONS = {
    "conv1d same": (line, lambda: [L.Conv1D(4, 3, padding="same", activation="tanh"), L.Conv1D(2, 2)]),
    "conv1d strided": (line, lambda: [L.Conv1D(4, 3, strides=2)]),
    "conv1d causal dilated": (line, lambda: [L.Conv1D(4, 2, padding="causal", dilation_rate=2)]),
    "conv1d same dilated": (line, lambda: [L.Conv1D(4, 3, padding="same", dilation_rate=2)]),
    "conv2d valid": (image, lambda: [L.Conv2D(4, 3, activation="tanh"), L.Conv2D(2, 2)]),
    "conv2d same strided": (image, lambda: [L.Conv2D(4, 3, strides=2, padding="same", activation="tanh")]),
    "conv2d of uneven kernel and strides": (image, lambda: [L.Conv2D(4, (2, 3), strides=(3, 1), padding="same")]),
    "conv1d dilated of many filters": (normal(B, 8, 9), lambda: [L.Conv1D(40, 2, dilation_rate=2)]),
    "conv2d dilated": (image, lambda: [L.Conv2D(4, (2, 3), dilation_rate=(2, 1), padding="same")]),
    "conv2d dilated valid": (image, lambda: [L.Conv2D(4, 2, dilation_rate=3)]),
    "conv2d of 1x1": (image, lambda: [L.Conv2D(4, 1)]),
    "conv2d of 1x1 with stride 2": (image, lambda: [L.Conv2D(4, 1, strides=2)]),
    "conv2d of 1x1 with stride 2, same": (image, lambda: [L.Conv2D(4, 1, strides=2, padding="same")]),
    "conv2d as large as the image": (image, lambda: [L.Conv2D(4, (7, 6))]),
    "conv2d of a large kernel and 1 channel": (normal(B, 12, 12, 1), lambda: [L.Conv2D(3, 8, strides=2)]),
    "conv2d of 3 channels, by rows": (normal(B, 11, 12, 3), lambda: [L.Conv2D(2, 5, strides=2, padding="same")]),
    "conv2d of 3 channels, by uneven rows": (normal(B, 13, 12, 3), lambda: [L.Conv2D(2, (5, 4), strides=(3, 2))]),
    "conv2d dilated, of 1 channel, by rows": (normal(B, 18, 17, 1), lambda: [L.Conv2D(2, 6, dilation_rate=2)]),
    "conv2d whose windows do not meet": (normal(B, 16, 15, 2), lambda: [L.Conv2D(2, 4, strides=4, padding="same")]),
    "conv2d whose uneven windows do not meet": (normal(B, 7, 9, 3), lambda: [L.Conv2D(9, (3, 4), strides=(3, 4))]),
    "conv2d of large strided kernels": (normal(B, 9, 9, 8), lambda: [L.Conv2D(3, 4, strides=2)]),
    "conv2d of large strided kernels, same": (normal(B, 9, 10, 8), lambda: [L.Conv2D(3, 4, strides=2, padding="same")]),
    "conv1d of strides that divide": (normal(B, 13, 6), lambda: [L.Conv1D(3, 4, strides=2)]),
    "conv2d of uneven strides that divide": (normal(B, 9, 10, 8), lambda: [L.Conv2D(3, (4, 3), strides=(2, 3))]),
    "conv2d of many channels": (normal(2, 14, 14, 16), lambda: [L.Conv2D(4, 3, padding="same")]),
    "conv2d of many channels, valid": (normal(2, 14, 14, 17), lambda: [L.Conv2D(3, (3, 2))]),
    "conv2d of large images": (normal(5, 24, 24, 8), lambda: [L.Conv2D(2, 3, padding="same")]),
    "conv2d of large images, fewer than 4": (normal(3, 20, 32, 8), lambda: [L.Conv2D(3, (5, 4), strides=(1, 2))]),
    "conv2d of many filters at few places": (normal(B, 3, 3, 12), lambda: [L.Conv2D(40, 2)]),
    "conv2d grouped": (normal(2, 5, 5, 4), lambda: [L.Conv2D(6, 3, groups=2)]),
    "conv2d grouped, of uneven strides": (normal(2, 6, 5, 4), lambda: [L.Conv2D(6, 3, groups=2, strides=(2, 1))]),
    "conv2d grouped one by one": (normal(2, 5, 5, 4), lambda: [L.Conv2D(4, 3, groups=4, strides=2)]),
    "conv1d grouped": (normal(2, 6, 4), lambda: [L.Conv1D(6, 3, groups=2)]),
    "conv3d same": (volume, lambda: [L.Conv3D(3, 2, padding="same", activation="tanh")]),
    "conv3d strided": (volume, lambda: [L.Conv3D(3, (2, 1, 3), strides=(1, 2, 2))]),
    "conv3d dilated": (normal(B, 5, 5, 6, 2), lambda: [L.Conv3D(3, 2, dilation_rate=(1, 2, 3), padding="same")]),
    "conv3d of strides that divide": (normal(B, 4, 5, 8, 6), lambda: [L.Conv3D(3, (2, 2, 4), strides=(1, 2, 2))]),
    "conv3d of many filters": (normal(2, 5, 5, 5, 12), lambda: [L.Conv3D(80, 2)]),
    "depthwise conv2d": (image, lambda: [L.DepthwiseConv2D(3, padding="same")]),
    "depthwise conv2d of multiplier 2": (image, lambda: [L.DepthwiseConv2D(2, strides=2, depth_multiplier=2)]),
    "depthwise conv2d of stride 3, same": (normal(B, 9, 10, 3), lambda: [L.DepthwiseConv2D(4, 3, padding="same")]),
    "depthwise conv2d dilated": (image, lambda: [L.DepthwiseConv2D(2, dilation_rate=2, padding="same")]),
    "separable conv2d": (image, lambda: [L.SeparableConv2D(4, 3, depth_multiplier=2, activation="tanh")]),
    "separable conv1d": (line, lambda: [L.SeparableConv1D(4, 3, padding="same")]),
    "transposed conv1d": (line, lambda: [L.Conv1DTranspose(4, 3, strides=2)]),
    "transposed conv2d": (image, lambda: [L.Conv2DTranspose(4, 3, activation="tanh")]),
    "transposed conv2d same strided": (image, lambda: [L.Conv2DTranspose(4, (3, 2), strides=2, padding="same")]),
    "transposed conv2d with output padding": (image, lambda: [L.Conv2DTranspose(2, 3, strides=2, output_padding=1)]),
    "transposed conv3d": (volume, lambda: [L.Conv3DTranspose(3, 2, strides=2)]),
    "transposed conv3d same": (volume, lambda: [L.Conv3DTranspose(3, 3, padding="same")]),
    "time distributed conv": (normal(2, 3, 5, 4, 2), lambda: [L.TimeDistributed(L.Conv2D(2, 2))]),
    "pooling and flattening": (image, lambda: [L.Conv2D(4, 2), L.MaxPooling2D(), L.Flatten(), L.Dense(3)]),
    "average pooling": (line, lambda: [L.Conv1D(4, 2), L.AveragePooling1D(2), L.Dense(3), L.GlobalMaxPooling1D()]),
}  # fmt: skip

LOOKUPS = {
    "embedding of repeated ids": (ids(B, 7, vocabulary=3), lambda: [L.Embedding(3, 4), L.Dense(2, "tanh")]),
    "embedding of one id": (ids(B, 1), lambda: [L.Embedding(6, 4), L.Dense(2, "tanh")]),
    "embedding of rank 3 ids": (ids(B, 3, 2), lambda: [L.Embedding(6, 4)]),
    "embedding of dozens of ids": (ids(B, 40, vocabulary=9), lambda: [L.Embedding(9, 3), L.Dense(2, "tanh")]),
    "embedding of many ids": (ids(3, 300, vocabulary=40), lambda: [L.Embedding(40, 3)]),
    "string lookup": (words, lambda: [
        K.Input((3,), dtype="string"), L.StringLookup(vocabulary=["cat", "dog"], mask_token=""), L.Embedding(4, 3)]),
    "string lookup of several unknown": (words, lambda: [
        K.Input((3,), dtype="string"), L.StringLookup(vocabulary=["cat"], num_oov_indices=2), L.Embedding(3, 3)]),
    "string lookup to counts": (words, lambda: [
        K.Input((3,), dtype="string"), L.StringLookup(vocabulary=["cat", "dog"], output_mode="count"), tanh(3)]),
    "integer lookup": (ids(B, 3), lambda: [L.IntegerLookup(vocabulary=[1, 2]), L.Embedding(3, 3)]),
    "integer lookup to several hot": (ids(B, 3), lambda: [
        L.IntegerLookup(vocabulary=[1, 2], output_mode="multi_hot"), tanh(3)]),
    "hashing": (words, lambda: [K.Input((3,), dtype="string"), L.Hashing(5), L.Embedding(5, 3)]),
    "salted hashing": (words, lambda: [K.Input((3,), dtype="string"), L.Hashing(5, salt=[1, 2]), L.Embedding(5, 3)]),
    "discretization": (vector, lambda: [L.Discretization([-0.5, 0.5]), L.Embedding(3, 3)]),
    "category encoding": (ids(B, 3), lambda: [L.CategoryEncoding(6, "multi_hot"), tanh(3)]),
}  # fmt: skip

REDUCTIONS = {
    "layernorm of rank 2": (vector, lambda: [tanh(4), L.LayerNormalization()]),
    "layernorm of rank 3": (sequence, lambda: [L.LayerNormalization(), L.Dense(2)]),
    "layernorm of rank 4 over two axes": (grid, lambda: [L.LayerNormalization(axis=[2, 3])]),
    "layernorm over axis 1": (sequence, lambda: [L.LayerNormalization(axis=1), L.Dense(2)]),
    "layernorm without scale": (sequence, lambda: [tanh(3), L.LayerNormalization(scale=False)]),
}  # fmt: skip

ACTIVATIONS = {
    "prelu": (sequence, lambda: [L.PReLU("uniform")]),
    "prelu with shared axes": (image, lambda: [L.Conv2D(4, 3), L.PReLU("uniform", shared_axes=[1, 2])]),
}  # fmt: skip

LOOPS = {
    "lstm": (sequence, lambda: [L.LSTM(3)]),
    "lstm of sequences": (sequence, lambda: [L.LSTM(3, return_sequences=True), L.LSTM(2)]),
    "lstm unrolled": (sequence[:, :2], lambda: [L.LSTM(3, unroll=True)]),
    "lstm bidirectional": (sequence, lambda: [L.Bidirectional(L.LSTM(2))]),
    "lstm without a fast kernel": (sequence, lambda: [L.LSTM(3, activation="relu")]),
    "gru": (sequence, lambda: [L.GRU(3, return_sequences=True)]),
    "gru reset before": (sequence, lambda: [L.GRU(3, reset_after=False)]),
    "simple rnn": (sequence, lambda: [L.SimpleRNN(3)]),
    "simple rnn unrolled": (sequence[:, :2], lambda: [L.SimpleRNN(3, unroll=True, return_sequences=True)]),
    "masked embedding into lstm": (ids(B, 5), lambda: [L.Embedding(6, 3, mask_zero=True), L.LSTM(3)]),
    "masked embedding into gru unrolled": (ids(B, 3, vocabulary=2), lambda: [
        K.Input((3,), dtype="int32"), L.Embedding(6, 3, mask_zero=True), L.GRU(2, unroll=True)]),
    "masking into rnn": (np.where(rng(3).random((B, 5, 1)) < 0.3, 0, sequence).astype("float32"),
                         lambda: [L.Masking(), L.SimpleRNN(3, return_sequences=True)]),
    "conv lstm": (normal(2, 2, 4, 4, 1), lambda: [L.ConvLSTM2D(2, 2, padding="same")]),
}  # fmt: skip

NESTED = {
    "nested": (vector, lambda: [stack(tanh(4), stack(tanh(3))), L.Dense(2)]),
    "frozen layers": (vector, lambda: [tanh(4, trainable=False), tanh(3), L.Dense(2, trainable=False), L.Dense(2)]),
}  # fmt: skip

if has("GroupNormalization"):
    REDUCTIONS["groupnorm"] = image, lambda: [L.Conv2D(4, 3), L.GroupNormalization(2), L.Dense(2)]
    REDUCTIONS["groupnorm of rank 3"] = sequence, lambda: [tanh(4), L.GroupNormalization(-1)]
if has("UnitNormalization"):
    REDUCTIONS["unit normalization"] = vector, lambda: [tanh(4), L.UnitNormalization(), L.Dense(2)]
if has("RMSNormalization"):
    REDUCTIONS["rms normalization"] = sequence, lambda: [tanh(4), L.RMSNormalization(), L.Dense(2)]
if has("SpectralNormalization"):
    REDUCTIONS["spectral normalization"] = vector, lambda: [L.SpectralNormalization(tanh(4)), L.Dense(2)]

SIMPLE = {**PRODUCTS, **CONVOLUTIONS, **LOOKUPS, **REDUCTIONS, **ACTIVATIONS, **LOOPS, **NESTED}


class Custom(L.Layer):
    """A layer of one or two weights and a function of them."""

    def __init__(self, function, *shapes, dtype="float32"):
        super().__init__(dtype=dtype)
        self.function, self.shapes = function, shapes

    def build(self, _):
        start = K.initializers.RandomNormal(stddev=0.7, seed=3)
        self.ws = [self.add_weight(name=f"w{i}", shape=s, initializer=start) for i, s in enumerate(self.shapes)]
        self.built = True

    def call(self, x):
        return self.function(x, *[tf.convert_to_tensor(w) for w in self.ws])


def of_weights(cases):
    """Layers of functions of weights: (inputs, function, shapes of weights) by name."""
    return {name: (x, lambda f=function, shapes=shapes: [Custom(f, *shapes), L.Dense(2)])
            for name, (x, function, shapes) in cases.items()}  # fmt: skip


# On both stacks what the two Keras make of other ops, and one of each way in which weights are used; layers of other
# sizes and settings are the same ops.
BOTH = """dense of rank 3|time distributed dense|einsum to two axes|einsum of each position
conv1d causal dilated|conv2d same strided|conv2d grouped|conv3d same|depthwise conv2d|separable conv2d
transposed conv2d same strided
embedding of repeated ids|string lookup|category encoding|hashing|integer lookup
layernorm of rank 3|layernorm without scale|groupnorm|groupnorm of rank 3|unit normalization|spectral normalization
prelu with shared axes|lstm bidirectional|lstm without a fast kernel|gru|simple rnn|masked embedding into lstm
nested|frozen layers
table of every kind of use|used as matrix and as scale|weight standardisation|matrices by id
loop of tensor products|branch by weights|unused"""
BOTH = set(BOTH.replace("\n", "|").split("|"))
QUICK = "dense of rank 3", "conv2d same strided", "embedding of repeated ids", "layernorm of rank 3", "frozen layers"
TOGETHER = 6


def layers_of(*families):
    """The layers of these families as cases of a test, several a case: a trace for each alone takes twice as long."""
    groups = {}
    for name, (x, layers) in itertools.chain(*map(dict.items, families)):
        groups.setdefault((name in QUICK, name in BOTH, len(x)), []).append((name, x, layers))
    for (quick, both, _), cases in groups.items():
        for part in (cases[i : i + TOGETHER] for i in range(0, len(cases), TOGETHER)):
            marks = [] if quick else [pytest.mark.slow] + [pytest.mark.one_stack] * (not both)
            yield pytest.param([case[1:] for case in part], id=" + ".join(case[0] for case in part), marks=marks)


def check_layers(cases):
    check_models([(stack(*before(x), *layers()), x) for x, layers in cases])


def before(x):
    """A layer that learns, of numbers that have a gradient: it must pass through all layers behind."""
    return [Custom(lambda x, w: x * w, x.shape[-1:])] if getattr(x, "dtype", None) == np.float32 else []


few = settings(max_examples=8, derandomize=True, suppress_health_check=list(HealthCheck))
