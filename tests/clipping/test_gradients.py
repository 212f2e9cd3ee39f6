"""Norms and clipped sums of every kind of layer are those of the examples one by one."""

import functools
import math

import numpy as np
import pytest
import tensorflow as tf
from helpers import K, L, check, check_model, example_losses, normal, per_example_gradients, raw, rng
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from tfdpfl.clipping import clipped_gradients, per_example_norms
from tfdpfl.clipping.gradients import Costs, _not_broadcast, joined, products
from tfdpfl.clipping.ops import windows

B = 4


@pytest.fixture(autouse=True)
def _seeded():
    K.utils.set_random_seed(1)


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


SIMPLE = {
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
    "layernorm of rank 2": (vector, lambda: [tanh(4), L.LayerNormalization()]),
    "layernorm of rank 3": (sequence, lambda: [L.LayerNormalization(), L.Dense(2)]),
    "layernorm of rank 4 over two axes": (grid, lambda: [L.LayerNormalization(axis=[2, 3])]),
    "layernorm over axis 1": (sequence, lambda: [L.LayerNormalization(axis=1), L.Dense(2)]),
    "layernorm without scale": (sequence, lambda: [tanh(3), L.LayerNormalization(scale=False)]),
    "prelu": (sequence, lambda: [L.PReLU("uniform")]),
    "prelu with shared axes": (image, lambda: [L.Conv2D(4, 3), L.PReLU("uniform", shared_axes=[1, 2])]),
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
    "time distributed dense": (sequence, lambda: [L.TimeDistributed(tanh(3)), L.TimeDistributed(L.Dense(2))]),
    "time distributed conv": (normal(2, 3, 5, 4, 2), lambda: [L.TimeDistributed(L.Conv2D(2, 2))]),
    "conv lstm": (normal(2, 2, 4, 4, 1), lambda: [L.ConvLSTM2D(2, 2, padding="same")]),
    "nested": (vector, lambda: [stack(tanh(4), stack(tanh(3))), L.Dense(2)]),
    "pooling and flattening": (image, lambda: [L.Conv2D(4, 2), L.MaxPooling2D(), L.Flatten(), L.Dense(3)]),
    "average pooling": (line, lambda: [L.Conv1D(4, 2), L.AveragePooling1D(2), L.Dense(3), L.GlobalMaxPooling1D()]),
    "frozen layers": (vector, lambda: [tanh(4, trainable=False), tanh(3), L.Dense(2, trainable=False), L.Dense(2)]),
}  # fmt: skip
if has("GroupNormalization"):
    SIMPLE["groupnorm"] = image, lambda: [L.Conv2D(4, 3), L.GroupNormalization(2), L.Dense(2)]
    SIMPLE["groupnorm of rank 3"] = sequence, lambda: [tanh(4), L.GroupNormalization(-1)]
if has("UnitNormalization"):
    SIMPLE["unit normalization"] = vector, lambda: [tanh(4), L.UnitNormalization(), L.Dense(2)]
if has("RMSNormalization"):
    SIMPLE["rms normalization"] = sequence, lambda: [tanh(4), L.RMSNormalization(), L.Dense(2)]
if has("SpectralNormalization"):
    SIMPLE["spectral normalization"] = vector, lambda: [L.SpectralNormalization(tanh(4)), L.Dense(2)]

FAST = """dense of rank 2|dense of rank 3|einsum to two axes|conv1d causal dilated
conv2d same strided|conv2d of 1x1 with stride 2|conv2d of many channels|conv2d of large strided kernels
conv2d of large images|conv2d of many filters at few places|depthwise conv2d of multiplier 2|transposed conv2d
embedding of repeated ids|embedding of one id|embedding of dozens of ids|embedding of many ids|string lookup
category encoding
layernorm of rank 3|prelu with shared axes
lstm|time distributed dense|frozen layers|groupnorm"""
SLOW = set(SIMPLE) - set(FAST.replace("\n", "|").split("|"))
# Layers of other sizes and settings than those above, and than those here, are the same ops on both stacks.
ALSO = """conv1d same|conv2d valid|conv2d dilated|conv2d grouped|conv3d same|conv3d strided
einsum of each position|transposed conv2d same strided|depthwise conv2d|separable conv2d|embedding of rank 3 ids
hashing|integer lookup|layernorm without scale
lstm bidirectional|lstm without a fast kernel|gru|simple rnn|masked embedding into lstm|nested
groupnorm of rank 3|unit normalization|spectral normalization"""
SAME_OPS = SLOW - set(ALSO.replace("\n", "|").split("|"))


def parameters(cases, slow=(), one_stack=()):
    marks = lambda name: [pytest.mark.slow] * (name in slow) + [pytest.mark.one_stack] * (name in one_stack)
    return [pytest.param(*c, id=name, marks=marks(name)) for name, c in cases.items()]


@pytest.mark.parametrize(("x", "layers"), parameters(SIMPLE, SLOW, SAME_OPS))
def test_layer_agrees_with_examples_one_by_one(x, layers):
    check_model(stack(*layers()), x)


# Functional and subclassed models


def attention(masked=False, causal=False):
    query, value = K.Input((3, 4)), K.Input((5, 2))
    mask = K.Input((3, 5), dtype="bool") if masked else None
    y = L.MultiHeadAttention(2, 3, output_shape=4)(query, value, attention_mask=mask, use_causal_mask=causal)
    x = [normal(B, 3, 4), normal(B, 5, 2)] + [rng(0).random((B, 3, 5)) < 0.6] * masked
    return K.Model([query, value] + [mask] * masked, y), x


def several_inputs_and_outputs():
    a, b = K.Input((4,)), K.Input((5, 2))
    h = L.Concatenate()([tanh(3)(a), L.Flatten()(L.Conv1D(2, 2)(b))])
    return K.Model([a, b], [L.Dense(2)(h), tanh(3)(h)]), [normal(B, 4), normal(B, 5, 2)]


def dict_of_inputs():
    inputs = {"ids": K.Input((5,), dtype="int32", name="ids"), "x": K.Input((4,), name="x")}
    h = L.GlobalAveragePooling1D()(L.Embedding(6, 3)(inputs["ids"])) + tanh(3)(inputs["x"])
    return K.Model(inputs, {"y": L.Dense(2)(h), "z": h}), {"ids": ids(B, 5), "x": normal(B, 4)}


def shared_layer():
    a, b = K.Input((4,)), K.Input((4,))
    d = tanh(4)
    return K.Model([a, b], L.Dense(2)(L.Multiply()([d(d(a)), d(b)]))), [normal(B, 4), normal(B, 4, seed=1)]


def shared_convolution():
    a = K.Input((6, 6, 3))
    c = L.Conv2D(3, 3, padding="same", activation="tanh")
    return K.Model(a, c(c(a))), normal(B, 6, 6, 3)


def shared_embedding():
    a, b = K.Input((3,), dtype="int32"), K.Input((4,), dtype="int32")
    e = L.Embedding(6, 3)
    return K.Model([a, b], L.Concatenate(axis=1)([e(a), tanh(3)(e(b))])), [ids(B, 3), ids(B, 4, seed=1)]


def shared_at_different_ranks():
    a, b = K.Input((4,)), K.Input((5, 4))
    d = tanh(3)
    return K.Model([a, b], [d(a), d(b)]), [normal(B, 4), normal(B, 5, 4)]


FUNCTIONAL = {
    f.__name__.replace("_", " "): f
    for f in (attention, several_inputs_and_outputs, dict_of_inputs, shared_layer, shared_convolution)
}
FUNCTIONAL |= {
    "shared embedding": shared_embedding,
    "layer shared at different ranks": shared_at_different_ranks,
    "attention masked": lambda: attention(masked=True),
    "attention causal": lambda: attention(causal=True),
}


@pytest.mark.parametrize("build", FUNCTIONAL.values(), ids=FUNCTIONAL)
def test_model_agrees_with_examples_one_by_one(build):
    model, x = build()
    check_model(model, x)


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


def standardised(x, w):
    mean, variance = tf.nn.moments(w, [0, 1, 2], keepdims=True)
    return tf.nn.conv2d(x, (w - mean) * tf.math.rsqrt(variance + 1e-5), 1, "SAME")


def table_and_matrix(i, w):
    return tf.tanh(tf.gather(w, tf.cast(i, tf.int32))) @ tf.transpose(w)


def looked_up(i, w):
    return tf.gather(w, tf.cast(i, tf.int32))


def pick(i, w):
    return tf.tensordot(tf.one_hot(tf.cast(i, tf.int32), 6), w, 1)


def class_token(x, w):
    return tf.concat([tf.broadcast_to(w[None, None], [tf.shape(x)[0], 1, 4]), x], 1)


GATE = tf.Variable(1.5, trainable=False)


def gated(x, w):
    return tf.cond(GATE > 1.0, lambda: tf.tanh(x * w), lambda: x)


CUSTOM = {
    "tied to its own transpose": (vector, lambda x, w: tf.tanh(x @ w) @ tf.transpose(w), [(4, 3)]),
    "square and its transpose": (vector, lambda x, w: tf.tanh(x @ w) @ tf.transpose(w), [(4, 4)]),
    "used as table and as matrix": (ids(B, 5), table_and_matrix, [(6, 3)]),
    "table and matrix in an einsum": (ids(B, 5), lambda i, w: tf.einsum("btd,vd->btv", looked_up(i, w), w), [(6, 3)]),
    "table and matrix, square": (ids(B, 5), lambda i, w: tf.tensordot(tf.tanh(looked_up(i, w)), w, 1), [(6, 6)]),
    "table and matrix, square, turned": (ids(B, 5), lambda i, w: tf.matmul(tf.tanh(looked_up(i, w)), w[None] + 0 * w,
                                                                           transpose_b=True), [(6, 6)]),
    "table and matrix, square, transposed in name only": (
        ids(B, 5), lambda i, w: tf.tensordot(tf.tanh(looked_up(i, w)), tf.transpose(w, [0, 1]), 1), [(6, 6)]),
    "table looked up and picked": (ids(B, 5), lambda i, w: tf.tanh(looked_up(i, w) + pick(i, w)), [(6, 3)]),
    "table of every kind of use": (ids(B, 5), lambda i, w: tf.tanh(looked_up(i, w) + pick(i, w)) @ tf.transpose(w)
                                   + tf.matmul(looked_up(i, w), w, transpose_b=True), [(6, 3)]),
    "used as matrix and as scale": (vector, lambda x, w: (x @ w) * w[0], [(4, 4)]),
    "used as bias twice": (vector, lambda x, w: tf.tanh(x + w) + 2 * w, [(4,)]),
    "squared": (vector, lambda x, w: w**2 * x, [(4,)]),
    "power of the input": (vector, lambda x, w: tf.abs(x) ** w, [(4,)]),
    "softplus of a matrix": (sequence, lambda x, w: x @ tf.nn.softplus(w), [(4, 3)]),
    "low rank": (vector, lambda x, a, b: x @ (a @ b), [(4, 2), (2, 4)]),
    "weight standardisation": (image, standardised, [(3, 3, 3, 2)]),
    "part of a table": (vector, lambda x, w: x @ w[1:5], [(7, 3)]),
    "two parts of a table": (vector, lambda x, w: tf.tanh(x @ w[:4]) @ w[4:7], [(7, 3)]),
    "matrices by id": (vector, lambda x, w: tf.einsum("bi,bij->bj", x, tf.gather(w, tf.cast(x[:, 0] > 0, tf.int32))),
                       [(2, 4, 3)]),
    "scalar": (vector, lambda x, w: tf.sin(w * x), [()]),
    "where": (vector, lambda x, w: tf.where(x > 0, x, w), [(4,)]),
    "maximum": (sequence, lambda x, w: tf.maximum(x, w), [(5, 1)]),
    "subtracted": (vector, lambda x, w: (w - x) / (1 + w**2), [(4,)]),
    "divided by": (vector, lambda x, w: x / (2 + tf.tanh(w)), [(4,)]),
    "batch matrix product": (sequence, lambda x, w: tf.matmul(w, x), [(3, 5)]),
    "positional embedding": (sequence, lambda x, w: tf.tanh(x + tf.gather(w, tf.range(tf.shape(x)[1]))), [(9, 4)]),
    "one hot": (ids(B, 5), lambda i, w: tf.tanh(tf.one_hot(tf.cast(i, tf.int32), 6) @ w), [(6, 3)]),
    "stopped gradient": (vector, lambda x, w: tf.stop_gradient(x @ w) * (x @ w), [(4, 3)]),
    "where the target is among the best": (vector, lambda x, w: tf.tanh(x @ w) * tf.cast(tf.math.in_top_k(
        tf.cast(x[:, 0] > 0, tf.int32), x, 2), tf.float32)[:, None], [(4, 3)]),
    "branch after weights": (vector, lambda x, v, w: gated(x * v, w), [(4,), (4,)]),
    "loop of tensor products": (sequence, lambda x, w: tf.while_loop(
        lambda i, h: i < 2, lambda i, h: (i + 1, tf.tanh(tf.tensordot(h, w, 1))), [0, x])[1], [(4, 4)]),
    "chosen by weights": (vector, lambda x, w: tf.where(w > 0.1, x * w, x), [(4,)]),
    "branch by weights": (vector, lambda x, w: tf.cond(tf.reduce_sum(w) > 0, lambda: tf.tanh(x @ w),
                                                       lambda: x @ (2.0 * w)), [(4, 3)]),
    "constant chosen by weights": (vector, lambda x, w: tf.tanh(x @ w) * tf.cond(w[0, 0] > 0, lambda: 3.0, lambda: 2.0),
                                   [(4, 3)]),
    "unused": (vector, lambda x, a, b: x @ a, [(4, 2), (3,)]),
    "time major": (sequence, lambda x, w: tf.transpose(tf.tanh(tf.transpose(x, [1, 0, 2]) @ w), [1, 0, 2]), [(4, 3)]),
    "cumulative sum": (sequence, lambda x, w: tf.cumsum(tf.tanh(x @ w), 1), [(4, 3)]),
    "dynamic flattening": (sequence, lambda x, w: tf.reshape(tf.tanh(tf.reshape(x, [-1, 4]) @ w),
                                                             [tf.shape(x)[0], -1, 3]), [(4, 3)]),
}  # fmt: skip


# On the older stack one of each way in which weights are used.
ON_BOTH = {"table of every kind of use", "used as matrix and as scale", "weight standardisation", "matrices by id",
           "loop of tensor products", "branch by weights", "unused"}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("x", "function", "shapes"), parameters(CUSTOM, one_stack=set(CUSTOM) - ON_BOTH))
def test_custom_layer_agrees_with_examples_one_by_one(x, function, shapes):
    check_model(stack(Custom(function, *shapes), L.Dense(2)), x)


@pytest.mark.slow
@pytest.mark.one_stack
def test_class_token_spread_over_the_batch_agrees():
    check_model(stack(tanh(4), Custom(class_token, (4,)), L.LSTM(2)), sequence)


def test_subclassed_model_agrees():
    class Two(K.Model):
        def __init__(self):
            super().__init__()
            self.a, self.b = tanh(4), L.Dense(3)

        def call(self, x, training=False):
            return self.b(tf.concat([self.a(x["u"]), x["v"]], -1))

    check_model(Two(), {"u": normal(B, 3), "v": normal(B, 2)})


def test_variable_without_gradient_has_none_and_counts_for_nothing():
    model = stack(tanh(3), L.Dense(2))
    spare = tf.Variable(normal(3))
    model(vector)
    check_model(model, vector, variables=[spare, *model.trainable_variables])


# A tf.function inside


def called(jit=None, method="weights inside"):
    class Called(L.Layer):
        def build(self, shape):
            self.w = self.add_weight(name="w", shape=(4, 3), initializer="glorot_normal")
            self.b = self.add_weight(name="b", shape=(3,), initializer="ones")
            self.built = True

        @tf.function(jit_compile=jit)
        def two_ops(self, x):
            return tf.tanh(tf.matmul(x, tf.convert_to_tensor(self.w)) + tf.convert_to_tensor(self.b))

        @tf.function(jit_compile=jit)
        def given(self, x, w):
            return tf.sin(tf.matmul(x, w))

        @tf.function
        def weight(self):
            return tf.nn.softplus(tf.convert_to_tensor(self.w))

        def call(self, x):
            if method == "weights inside":
                return self.two_ops(x)
            if method == "weights given":
                return self.given(x, tf.convert_to_tensor(self.w)) + tf.convert_to_tensor(self.b)
            if method == "weights made":
                return tf.matmul(x, self.weight()) * tf.convert_to_tensor(self.b)
            return self.two_ops(x) + tf.matmul(x, tf.convert_to_tensor(self.w)) + tf.matmul(x, self.weight())

    return Called()


@pytest.mark.slow
@pytest.mark.parametrize("method", [
    *[pytest.param(way, marks=pytest.mark.one_stack) for way in ("weights inside", "weights given", "weights made")],
    "weights in all these ways"])  # fmt: skip
def test_layer_that_calls_a_tf_function_agrees(method):
    check_model(stack(tanh(4), called(method=method), L.Dense(2)), vector)


# Sizes, types and other ways to hold weights


@pytest.mark.parametrize("name", [  # the rest: test_batch_shapes.py, of sizes that could be another axis's
    "dense of rank 3", "conv1d same dilated", "lstm",
    *[pytest.param(n, marks=[pytest.mark.slow, pytest.mark.one_stack]) for n in (
        "masked embedding into lstm", "masking into rnn", "conv2d grouped", "layernorm of rank 3", "transposed conv2d",
        "depthwise conv2d",
        *[n for n in ["groupnorm"] if n in SIMPLE])],
])  # fmt: skip
def test_static_batch_size_agrees(name):
    x, layers = SIMPLE[name]
    check_model(stack(*layers()), x, batch=len(x))


@pytest.mark.slow
@pytest.mark.one_stack
def test_causal_mask_spread_over_a_static_batch_agrees():
    model, x = attention(causal=True)
    check_model(model, x, batch=len(x[0]))


def positions(make):
    return lambda x, w: x + tf.gather(w, make(tf.shape(x)[0]))


def before(make):
    return lambda x, w: tf.concat([make(w, tf.shape(x)[0]), x], 1)


SPREAD = {  # tokens, queries and positions for each example, in the ways that people write them
    "broadcast": (before(lambda w, n: tf.broadcast_to(w[None], [n, 2, 4])), (2, 4)),
    "tiled": (before(lambda w, n: tf.tile(w[None], [n, 1, 1])), (2, 4)),
    "repeated": (before(lambda w, n: tf.repeat(w[None], n, axis=0)), (2, 4)),
    "tiled by a list that begins with the size": (
        before(lambda w, n: tf.tile(w[None], tf.concat([n[..., tf.newaxis], [1, 1]], 0))),
        (2, 4),
    ),
    "tiled along two axes": (before(lambda w, n: tf.tile(w, [n, 3, 1])), (1, 1, 4)),
    "tiled twice over": (before(lambda w, n: tf.tile(w[None], [n, 2, 1])), (2, 4)),
    "positions tiled": (positions(lambda n: tf.tile(tf.range(5)[None], [n, 1])), (5, 4)),
    "positions broadcast": (positions(lambda n: tf.broadcast_to(tf.range(5), [n, 5])), (5, 4)),
    "positions counted": (positions(lambda n: tf.cumsum(tf.ones([n, 5], tf.int32), 1) - 1), (5, 4)),
    "embedded positions tiled": (lambda x, w: x + tf.tile(w[None], [tf.shape(x)[0], 1, 1]), (5, 4)),
}


BOTH_SPREAD = ("tiled along two axes", "positions broadcast")  # in batches of any size, and on both stacks


@pytest.mark.parametrize(("name", "batch"), [
    *[pytest.param(n, len(sequence), marks=[pytest.mark.one_stack] * (n not in BOTH_SPREAD)) for n in SPREAD],
    *[pytest.param(n, None, marks=pytest.mark.slow) for n in BOTH_SPREAD],
])  # fmt: skip
def test_weights_that_every_example_gets_agree(name, batch):
    function, shape = SPREAD[name]
    check_model(stack(tanh(4), Custom(function, shape), tanh(3), L.Flatten()), sequence, batch=batch)


@pytest.mark.slow
@pytest.mark.one_stack
@pytest.mark.parametrize("batch", [None, len(sequence)])
def test_queries_that_every_example_gets_agree(batch):
    """As many queries as examples, so that only their place tells the axes apart."""
    attend = L.MultiHeadAttention(2, 3)
    queries = Custom(lambda x, w: tf.tile(w[None], [tf.shape(x)[0], 1, 1]), (len(sequence), 4))
    x = K.Input((5, 4))
    check_model(K.Model(x, L.Flatten()(attend(queries(x), tanh(4)(x)))), sequence, batch=batch)


@pytest.mark.slow
@pytest.mark.one_stack
@pytest.mark.parametrize("layers", [
    lambda: [L.Conv2D(3, 3, dilation_rate=2), L.GlobalAveragePooling2D()],
    lambda: [L.Conv2D(9, 1), L.Conv2D(2, 3, strides=2, padding="same"), L.GlobalAveragePooling2D()],
    lambda: [L.DepthwiseConv2D(2), L.GlobalMaxPooling2D()],
    lambda: [L.Conv2DTranspose(2, 3, strides=2), L.GlobalAveragePooling2D()],
    lambda: [L.Conv2D(6, 2), L.SeparableConv2D(2, 2), L.PReLU("ones", shared_axes=[1, 2]), L.GlobalMaxPooling2D()],
], ids=["dilated", "of many channels", "depthwise", "transposed", "separable"])  # fmt: skip
def test_free_image_sizes_agree(layers):
    check_model(K.Sequential([K.Input((None, None, 3)), *layers(), L.Dense(2)]),
                image, signature_shape=(None, None, None, 3))  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layers", [
    *[pytest.param(layers, marks=pytest.mark.one_stack) for layers in (
        lambda: [tanh(3), L.GlobalAveragePooling1D()],
        lambda: [L.Conv1D(3, 2, padding="causal"), L.GlobalMaxPooling1D()])],
    lambda: [L.LayerNormalization(), L.GRU(2, return_sequences=True)],
], ids=["dense", "conv1d", "layernorm and gru"])  # fmt: skip
def test_free_lengths_agree(layers):
    check_model(K.Sequential([K.Input((None, 4)), *layers(), L.Dense(2)]), sequence, signature_shape=(None, None, 4))


def test_free_lengths_of_ids_agree():
    model = K.Sequential([K.Input((None,), dtype="int32"), L.Embedding(6, 3), L.GlobalAveragePooling1D(), L.Dense(2)])
    check_model(model, ids(B, 5), free=True)


def test_float64_agrees_to_float64():
    model = K.Sequential([K.Input((4,), dtype="float64"), tanh(5, dtype="float64"), L.Dense(2, dtype="float64")])
    check_model(model, vector.astype("float64"), tolerance=1e-12)


@pytest.mark.parametrize("layers", [
    lambda p: [tanh(5, dtype=p), L.Dense(2, dtype=p)],
    lambda p: [L.Conv2D(3, 3, dtype=p), L.Flatten(dtype=p), L.Dense(2)],
], ids=["dense", "conv2d"])  # fmt: skip
def test_mixed_bfloat16_agrees_to_its_precision(layers):
    policy = "mixed_bfloat16"
    made = layers(policy)
    check_model(stack(*made), image if isinstance(made[0], L.Conv2D) else vector, tolerance=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_in_low_precision_an_example_moves_a_convolutions_sum_by_the_clip(policy):
    """A sum that is rounded to the op's type before the noise passes the clip: by 18 % at this size."""
    layer = L.Conv2D(128, 2, use_bias=False, dtype=policy)
    layer.build([None, 2, 2, 128])
    x = np.abs(normal(1, 2, 2, 128)) + 0.3 * normal(257, 2, 2, 128, seed=1)

    @tf.function(input_signature=[tf.TensorSpec([None, 2, 2, 128])])
    def clipped(x):
        y = tf.cast(layer(x), tf.float32)
        return clipped_gradients(tf.reduce_sum(y * tf.cos(tf.range(128.0))), [layer.kernel], 1.0).sum[0]

    whole = clipped(x)
    for i in (0, 100, 256):
        assert abs(np.linalg.norm(whole - clipped(np.delete(x, i, 0))) - 1) < 1e-3


@pytest.mark.parametrize("softmax", [
    lambda s: tf.nn.softmax(s, axis=1),
    *[pytest.param(f, marks=[pytest.mark.slow, pytest.mark.one_stack]) for f in (
        lambda s: tf.nn.softmax(s, axis=-2), lambda s: tf.nn.log_softmax(s, axis=1), lambda s: L.Softmax(axis=1)(s))],
], ids=["softmax 1", "softmax -2", "log 1", "layer"])  # fmt: skip
def test_softmax_along_any_axis_agrees(softmax):
    """As of attention pooling."""
    score = L.Dense(3)
    score.build([None, None, 4])
    pooled = lambda x: tf.einsum("bts,btd->bsd", softmax(score(x)), x)
    check(lambda x: example_losses(pooled(x)), sequence, score.trainable_variables)


def test_weights_held_as_plain_tensors_agree():
    x, values = vector, [normal(4, 3), normal(3), normal(3, 3, seed=1)]
    apply = lambda x, a, b, c: example_losses(tf.tanh(tf.tanh(x @ a + b) @ c) @ c)
    variables = [tf.Variable(v) for v in values]
    gradients = per_example_gradients(lambda x: apply(x, *variables), x, variables)

    from helpers import assert_close, clipped_sums, norms_of

    @tf.function
    def step(x, *weights):
        r = clipped_gradients(tf.reduce_sum(apply(x, *weights)), weights, 0.7)
        return r.sum, r.norms

    sums, norms = step(tf.constant(x), *map(tf.constant, values))
    assert_close([norms.numpy()], [norms_of(gradients)])
    assert_close([s.numpy() for s in sums], clipped_sums(gradients, 0.7))


@pytest.mark.parametrize("name", [
    "dense of rank 3",
    *[pytest.param(n, marks=[pytest.mark.slow, pytest.mark.one_stack]) for n in (
        "conv2d same strided", "embedding of repeated ids", "masked embedding into lstm")],
])  # fmt: skip
@pytest.mark.slow
def test_xla_agrees(name):
    x, layers = SIMPLE[name]
    check_model(stack(*layers()), x, batch=len(x), jit=True)


@pytest.mark.parametrize(("name", "m"), [
    ("dense of rank 3", 1), ("dense of rank 3", 2), ("conv2d same strided", 2), ("embedding of repeated ids", 2),
    *[pytest.param(n, m, marks=[pytest.mark.slow, pytest.mark.one_stack]) for n, m in [
        ("conv2d of many channels", 1), ("lstm", 2), ("layernorm of rank 3", 2), ("depthwise conv2d", 2),
        ("depthwise conv2d", B), ("dense of width 1", 1)]],
])  # fmt: skip
def test_microbatches_clip_the_mean_gradient_of_consecutive_groups(name, m):
    x, layers = SIMPLE[name]
    check_model(stack(*layers()), x, m=min(m, len(x)))


def test_norms_agree_with_the_jacobian():
    model = stack(L.Conv2D(3, 3, activation="tanh"), L.Flatten(), L.Dense(2))
    model(image)
    with tf.GradientTape(persistent=True) as tape:
        losses = example_losses(model(image))
    jacobian = [j.numpy() for j in tape.jacobian(losses, raw(model.trainable_variables), experimental_use_pfor=False)]
    one_by_one = per_example_gradients(lambda x: example_losses(model(x)), image, model.trainable_variables)
    for j, o in zip(jacobian, one_by_one, strict=True):
        np.testing.assert_allclose(j, o, atol=1e-6)


@pytest.mark.parametrize("layers", [
    pytest.param(lambda: [L.Dense(5, "relu"), L.Dense(4, "tanh"), L.Dense(3)], id="dense"),
    pytest.param(lambda: [L.Reshape((4, 4, 1)), L.Conv2D(3, 2, activation="elu"), L.MaxPooling2D(2), L.Flatten(),
                          L.Dense(3, "softplus")], id="pooling", marks=[pytest.mark.slow, pytest.mark.one_stack]),
    pytest.param(lambda: [L.Dense(5, "sigmoid"), L.Dense(4, "selu"), L.Dense(3, tf.nn.leaky_relu)], id="others",
                 marks=[pytest.mark.slow, pytest.mark.one_stack]),
])  # fmt: skip
@pytest.mark.parametrize("use", ["adversarial example", pytest.param("penalty", marks=pytest.mark.slow)])
def test_gradients_of_the_inputs_keep_examples_apart(layers, use):
    model = K.Sequential([K.Input((16,)), *layers()])

    def entropies(x):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(x[:, 0] > 0, tf.int32), model(x))

    def losses(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            first = entropies(x)
        slope = tape.gradient(first, x)
        if use == "penalty":
            return first + tf.reduce_sum(tf.square(slope), 1)
        return entropies(tf.stop_gradient(x + 0.1 * tf.sign(slope)))

    check(losses, normal(5, 16), model.trainable_variables)


# Random shapes

few = settings(max_examples=8, derandomize=True, suppress_health_check=list(HealthCheck))
small = st.integers(1, 3)


@functools.cache
def dilated_convolutions_have_gradients():
    """On CPUs for which oneDNN is off TensorFlow has none, for anyone. (Keras's layers dilate another way.)"""
    w = tf.Variable(tf.ones([2, 2, 1, 1]))
    with tf.GradientTape() as tape:
        y = tf.nn.conv2d(tf.ones([1, 4, 4, 1]), w, 1, "VALID", dilations=2)
    try:
        return tape.gradient(y, w) is not None
    except tf.errors.InvalidArgumentError:
        return False


@pytest.mark.slow
@pytest.mark.one_stack
@few
@given(size=st.tuples(small, small), kernel=st.tuples(*[st.integers(1, 5)] * 2), strides=st.tuples(small, small),
       rates=st.tuples(small, small), channels=st.sampled_from([1, 2, 3, 5, 8, 9]), filters=small,
       padding=st.sampled_from(["SAME", "VALID"]), extra=st.tuples(st.integers(0, 4), st.integers(0, 4)))  # fmt: skip
@example(size=(12, 11), kernel=(4, 3), strides=(1, 1), rates=(2, 3), channels=3, filters=1, padding="SAME",
         extra=(0, 1))  # fmt: skip
@example(size=(12, 11), kernel=(3, 4), strides=(1, 1), rates=(3, 2), channels=8, filters=2, padding="SAME",
         extra=(1, 0))  # fmt: skip
@example(size=(3, 2), kernel=(5, 5), strides=(2, 2), rates=(1, 1), channels=3, filters=2, padding="SAME",
         extra=(0, 1))  # fmt: skip
@example(size=(8, 8), kernel=(3, 3), strides=(1, 1), rates=(2, 2), channels=16, filters=32, padding="VALID",
         extra=(0, 0))  # fmt: skip
@example(size=(9, 8), kernel=(5, 4), strides=(2, 2), rates=(1, 1), channels=9, filters=1, padding="VALID",
         extra=(1, 1))  # fmt: skip
@example(size=(2, 2), kernel=(4, 4), strides=(2, 2), rates=(1, 1), channels=9, filters=9, padding="SAME",
         extra=(1, 0))  # fmt: skip
def test_any_convolution_agrees(size, kernel, strides, rates, channels, filters, padding, extra):
    assume(strides == (1, 1) or rates == (1, 1))
    assume(rates == (1, 1) or dilated_convolutions_have_gradients())
    places = [s + (k - 1) * r + e for s, k, r, e in zip(size, kernel, rates, extra, strict=True)]
    x = normal(3, *places, channels)
    w = tf.Variable(normal(*kernel, channels, filters, seed=1))
    losses = lambda x: example_losses(tf.nn.conv2d(x, w, strides, padding, dilations=rates))
    check(losses, x, [w])


@pytest.mark.parametrize("kernel, channels", [((3, 2), 2), ((3, 2), 9), ((1, 1), 9)])
def test_explicit_padding_agrees(kernel, channels):
    w = tf.Variable(normal(*kernel, channels, 2, seed=1))
    pads = [[0, 0], [2, 1], [0, 3], [0, 0]]
    check(lambda x: example_losses(tf.nn.conv2d(x, w, 1, pads)), normal(3, 4, 5, channels), [w])


@pytest.mark.parametrize("name", ["conv2d same strided", "conv2d of many channels", "depthwise conv2d"])
def test_images_whose_places_are_too_many_for_a_constant_agree(name, monkeypatch):
    monkeypatch.setattr(windows, "CONSTANT_PLACES", 0)
    x, layers = SIMPLE[name]
    check_model(stack(*layers()), x)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("kernel, strides, rates, channels", [
    ((3, 3), (2, 2), (2, 3), 9), ((4, 4), (2, 2), (2, 2), 3), ((4, 6), (2, 2), (3, 1), 3), ((6, 4), (2, 2), (1, 3), 3),
    ((5, 5), (2, 3), (1, 1), 2), ((2, 2), (1, 2), (3, 2), 1), ((1, 1), (2, 2), (1, 1), 8),
    ((1, 12), (1, 12), (1, 1), 3),
])  # fmt: skip
def test_patches_are_tensorflows(kernel, strides, rates, channels, padding):
    """Also where an op has strides and dilation, of which TensorFlow has no gradient on a CPU."""
    x = tf.constant(normal(2, 17, 16, channels))
    wanted = tf.image.extract_patches(x, [1, *kernel, 1], [1, *strides, 1], [1, *rates, 1], padding)
    window = windows.Window(list(kernel), list(strides), list(rates), padding, [], False)
    out = wanted.shape[1:-1].as_list()
    for pieces in (window.pieces(x, out), window.pieces(x, out, math.prod(kernel))):
        np.testing.assert_array_equal(tf.concat([piece() for piece in pieces], -1), wanted)
    assert len(pieces) == 1


@pytest.mark.slow
@pytest.mark.one_stack
@few
@given(sizes=st.fixed_dictionaries({c: st.integers(1, 4) for c in "tudpq"}),
       x=st.sampled_from(["btd", "bdt", "bd", "btud", "tbd"]), w=st.sampled_from(["dp", "pd", "dpq", "tdp"]),
       keep=st.booleans())  # fmt: skip
def test_any_einsum_agrees(sizes, x, w, keep):
    axes = [c for c in dict.fromkeys(x + w) if c != "d" and (keep or c not in "tu" or c in w)]
    assume("t" in x or "t" not in w)
    out = "b" + "".join(c for c in axes if c != "b")
    sizes = {**sizes, "b": 3}
    a = normal(*[sizes[c] for c in x.replace("tb", "bt")])
    v = tf.Variable(normal(*[sizes[c] for c in w], seed=1))

    def losses(a):
        a = tf.transpose(a, [1, 0, 2]) if x == "tbd" else a
        return example_losses(tf.einsum(f"{x},{w}->{out}", a, v))

    check(losses, a, [v])


# -- terms that cancel -------------------------------------------------------------------------------------------

CANCEL = {  # rows' offset, and what is done to all gradients but the first so that their sum is (nearly) zero
    "centred": lambda x, g: (x, g - g.mean(1, keepdims=True)),
    "far from zero": lambda x, g: (x + 1000, g - g.mean(1, keepdims=True)),
    "near duplicates": lambda x, g: (
        x[:, :1] + 1e-5 * x, np.where(np.arange(g.shape[1])[:, None], -g[:, :1] / (g.shape[1] - 1), g)),
    "alike": lambda x, g: (np.repeat(x[:, :1], x.shape[1], 1), g - g.mean(1, keepdims=True)),
}  # fmt: skip


@pytest.mark.parametrize("length", [2, 3, 24])
@pytest.mark.parametrize("how", list(CANCEL.values()), ids=list(CANCEL))
def test_a_norm_whose_terms_cancel_is_never_too_small(how, length):
    """As of a siamese pair: a sum of Gram products is then rounding noise, and may be negative."""
    x, g = (t.astype("float32") for t in how(normal(32, length, 100), normal(32, length, 200, seed=1)))
    w = tf.Variable(normal(100, 200))

    @tf.function(input_signature=[tf.TensorSpec([None, length, n]) for n in (100, 200)])
    def norms(x, g):
        return per_example_norms(tf.reduce_sum(tf.matmul(x, w) * g), [w])

    wide = [t.astype(np.float64) for t in (x, g)]
    true2 = (np.einsum("bta,btp->bap", *wide) ** 2).sum((1, 2))
    terms2 = ((wide[0] ** 2).sum(2) * (wide[1] ** 2).sum(2)).sum(1)
    got2 = norms(x, g).numpy().astype(np.float64) ** 2
    assert (got2 >= true2 * 0.998).all()
    assert (got2 <= true2 * 1.001 + 1e-4 * terms2).all()


@pytest.mark.parametrize("tied", [False, True])
def test_a_norm_of_lookups_that_cancel_is_never_too_small(tied):
    ids = np.repeat([[3, 5]], 16, 0)[:, [0, 1, 0, 1]]
    g = normal(16, 4, 30)
    g[:, 2:] = -g[:, :2] * (1 + 1e-6) if not tied else 0
    table = tf.Variable(normal(50, 30))

    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.int32), tf.TensorSpec([None, 4, 30])])
    def norms(ids, g):
        losses = tf.reduce_sum(tf.gather(table, ids) * g, [1, 2])
        if tied:  # the products' gradient takes the lookups' back
            losses -= tf.reduce_sum(tf.one_hot(ids, 50) * tf.matmul(g * (1 + 1e-6), table, transpose_b=True), [1, 2])
        return per_example_norms(tf.reduce_sum(losses), [table])

    got = norms(ids.astype(np.int32), g).numpy()
    size = np.sqrt((g.astype(np.float64) ** 2).sum((1, 2)))
    assert np.isfinite(got).all()
    assert (got >= 1e-6 * size).all() and (got <= 1e-2 * size).all()


def test_a_square_below_the_smallest_number_counts():
    w = tf.Variable(normal(4, 3))

    @tf.function(input_signature=[tf.TensorSpec([None, 4]), tf.TensorSpec([None, 3])])
    def norms(x, g):
        return per_example_norms(tf.reduce_sum(tf.matmul(x, w) * g), [w])

    x = np.eye(2, 4, dtype="f") * 1e19
    assert norms(x, np.full([2, 3], 5e-20, "f")).numpy().min() >= 0.5 * np.sqrt(3)


def test_gram_matrices_of_the_same_rows_are_made_once():
    value = normal(5, 4, 6)

    @tf.function
    def grams(x):
        flat = tf.reshape(x, [-1, 6])
        again, other, halves = tf.reshape(flat, [-1, 4, 6]), x + 1.0, tf.reshape(flat, [-1, 2, 6])
        assert products(x) is products(again)
        return products(x), products(other), products(halves), products(tf.reshape(x, [-1, 6, 4]))

    shapes = [value, value + 1, value.reshape(10, 2, 6), value.reshape(5, 6, 4)]
    for gram, rows in zip(grams(tf.constant(value)), shapes, strict=True):
        np.testing.assert_allclose(gram, rows @ rows.transpose(0, 2, 1), rtol=1e-5, atol=1e-5)


def test_gradients_are_joined_once_for_the_kernels_that_take_in_the_same():
    value = normal(5, 4, 6)

    @tf.function
    def rows(x):
        again = tf.reshape(tf.reshape(x, [-1, 6]), [-1, 4, 6])
        assert joined([x, x]) is joined([again, x])
        return joined([x, again]), joined([x, x + 1.0]), joined([x + 1.0, x])

    for found, parts in zip(rows(tf.constant(value)), [(0, 0), (0, 1), (1, 0)], strict=True):
        np.testing.assert_array_equal(found, np.concatenate([value + p for p in parts], 1))


def test_only_a_broadcast_that_was_none_is_undone():
    @tf.function(input_signature=[tf.TensorSpec([None, 4]), tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1])])
    def gradients(x, same, narrow):
        one, other = tf.gradients(tf.sin(x + same), [x, same])
        assert _not_broadcast(one) is _not_broadcast(other)
        wide, summed = tf.gradients(tf.sin(x + narrow), [x, narrow])
        assert _not_broadcast(summed) is summed
        return [one, _not_broadcast(one), wide, _not_broadcast(wide)]

    one, its_source, wide, wides_source = gradients(normal(3, 4), normal(3, 4), normal(3, 1))
    np.testing.assert_array_equal(one, its_source)
    np.testing.assert_array_equal(wide, wides_source)


# Norms, clip and sum over the plain filter gradient, Keras 3, two cores, AVX-512: measured 2026-11-25, (gradients
# formed by TensorFlow's ops, Gram matrices, formed and stored by a kernel). The last two are whole steps.
@pytest.mark.parametrize(("costs", "formed", "native"), [
    (Costs(676, 9, 32, 9, True), True, True),  # 28x28x1 to 32, 3x3: 1.77, 2.05, 0.63
    (Costs(121, 288, 64, 9, True), True, True),  # 13x13x32 to 64, 3x3: 1.63, 4.02, 1.16
    (Costs(64, 1152, 128, 9, True), False, False),  # 8x8x128 to 128, 3x3: 2.27, 1.47, 1.70
    (Costs(256, 288, 32, 9, True), True, True),  # 16x16x32 to 32, 3x3: 1.81, 1.79 and more memory, 1.07
    (Costs(25, 256, 32, 4, True), False, True),  # 13x13x16 to 32, 4x4 by strides of 2: 2.21, 2.33, 1.38
    (Costs(196, 64, 64), True, True),  # 14x14x64 to 64, 1x1: 1.22, 1.20, 1.09
    (Costs(128, 256, 1024), False, False),  # a transformer's wide layer: 1.44 times plain's memory, against 1.06
    (Costs(1, 784, 1024), False, False),  # a dense layer: the norm is a product of two norms
])  # fmt: skip
def test_gradients_are_formed_where_that_takes_less_time_and_no_more_memory(costs, formed, native):
    assert costs.forms == formed
    assert costs.native == native


@pytest.mark.slow
@pytest.mark.one_stack
def test_weights_made_of_many_variables_are_carried_back_at_once(monkeypatch):
    """As in a network on a graph of public nodes: one pass to all variables, not one for each use and variable."""
    nodes, width = normal(6, 4), 3
    rooms = [[tf.Variable(normal(4 if i == 0 else 2 * width, width, seed=9 * i + j)) for j in range(2)]
             for i in range(2)]  # fmt: skip
    apart, passes = tf.Variable(normal(2 * width, 2)), []
    carry = tf.vectorized_map
    monkeypatch.setattr(tf, "vectorized_map", lambda *args, **kwargs: (passes.append(1), carry(*args, **kwargs))[1])

    def losses(x):
        h, seen = tf.constant(nodes), 0.0
        read = [[tf.convert_to_tensor(w) for w in heads] for heads in rooms]
        for i, heads in enumerate(read):
            h = tf.concat([tf.tanh(h @ w) for w in heads], 1)
            seen += tf.reduce_mean(tf.gather(h, x) ** (i + 2), 1)
        seen += example_losses(tf.gather(tf.constant(nodes), x) @ read[0][0])  # one variable as it is, too
        return seen + example_losses(tf.gather(h, x) @ (2.0 * apart)) + tf.reduce_mean(tf.gather(h, x), 1)

    check(losses, rng().integers(0, 6, 5).astype("int32"), [*(w for heads in rooms for w in heads), apart])
    assert len(passes) == 2  # the last weight has no variable in common with the others
