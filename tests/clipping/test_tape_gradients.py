"""Losses with the gradient of a tape in them, as under a gradient penalty: the sum is that of the examples one by one,
by TensorFlow's own gradients, for every layer that people put under one."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import KERAS_3, assert_close, check, clipped_sums, norms_of, per_example_gradients, raw

import tfdpfl
from tfdpfl import PrivacyError
from tfdpfl.clipping import clipped_gradients

K = tf.keras
L = K.layers
IMAGE, SERIES, ROW, VIDEO = (6, 6, 2), (6, 3), (8,), (4, 4, 4, 2)


def of(function):
    return L.Lambda(function)


def two_ways(joined):
    """Two branches of a row, and what joins them."""
    x = K.Input(ROW)
    return [K.Model(x, joined([L.Dense(4, "tanh")(x) for _ in range(2)]))]


def attended():
    x = K.Input(SERIES)
    return [K.Model(x, L.MultiHeadAttention(2, 3)(x, x))]


def conv(*args, **kwargs):
    return L.Conv2D(*args, activation="tanh", **kwargs)


# Of each shape of inputs, the stacks of layers that a net has side by side.
CASES = {
    "activations and normalisations": (ROW, lambda: [
        *[[L.Dense(4, f)] for f in ("tanh", "softplus", "gelu", "swish", "elu", "softmax")],
        [L.Dense(4), L.LayerNormalization()], [L.Dense(4), of(lambda x: tf.nn.l2_normalize(x, 1))]]),
    "branches that meet": (ROW, lambda: [
        two_ways(joined) for joined in (L.Add(), L.Multiply(), L.Maximum(), L.Concatenate(), L.Dot(1))]),
    "a row's entries moved": (ROW, lambda: [
        [L.Dense(6, "tanh"), L.Reshape((3, 2)), L.Dense(2, "tanh")],
        [L.Dense(3, "tanh"), L.RepeatVector(3), L.Dense(2, "tanh")],
        [L.Dense(3, "tanh"), of(lambda x: tf.tile(x, [1, 2]))],
        [L.Dense(6, "tanh"), of(lambda x: tf.concat(tf.split(x, 3, 1)[:2], 1))],
        [L.Dense(6, "tanh"), of(lambda x: tf.stack([x[:, :3], x[:, 3:]], 1))]]),
    "attention": (SERIES, lambda: [attended()]),
    "products along a series": (SERIES, lambda: [
        [L.EinsumDense("abc,cd->abd", (6, 4), activation="tanh")],
        [of(lambda x: tf.matmul(x, x, transpose_b=True))],
        [L.Dense(4, "tanh"), L.Permute((2, 1)), L.Dense(2, "tanh")],
        [L.Conv1D(4, 2, activation="tanh")], [L.Conv1D(4, 2, padding="causal", activation="tanh")],
        [L.Conv1D(4, 1, activation="tanh"), L.AveragePooling1D(2)],
        [of(lambda x: x[:, :3]), L.SimpleRNN(3, unroll=True)]]),
    "a series's entries moved": (SERIES, lambda: [[L.Dense(4, "tanh"), of(f)] for f in (
        lambda x: x[:, 1:4, ::2], lambda x: tf.gather(x, [0, 2, 2], axis=1), lambda x: tf.norm(x + 2.0, axis=2),
        lambda x: tf.cumsum(x, 1))]),
    "convolutions": (IMAGE, lambda: [
        [conv(3, 3, strides=2, padding="same")], [conv(3, 3, padding="same"), conv(2, 2)],
        [conv(3, 2, dilation_rate=2)], [L.DepthwiseConv2D(3, activation="tanh")],
        [L.SeparableConv2D(3, 3, activation="tanh")], [L.Conv2DTranspose(2, 3, strides=2, activation="tanh")]]),
    "pools": (IMAGE, lambda: [
        [conv(3, 2, padding="same"), L.MaxPooling2D(2)], [conv(3, 2, padding="same"), L.AveragePooling2D(2)],
        [conv(3, 2), L.GlobalAveragePooling2D()], [conv(3, 2), L.GlobalMaxPooling2D()]]),
    "an image's entries moved": (IMAGE, lambda: [
        [conv(4, 3), L.GroupNormalization(2)], [conv(2, 2), L.ZeroPadding2D(1), conv(2, 2)],
        [conv(2, 2), of(lambda x: tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]], "REFLECT")), conv(2, 2)],
        [conv(2, 2), L.Cropping2D(1)], [conv(3, 1), of(lambda x: tf.nn.space_to_depth(x, 2)), conv(2, 2)]]),
    "enlarged": (IMAGE, lambda: [
        [conv(2, 2), L.UpSampling2D(2, interpolation=kind), conv(2, 2)] for kind in ("nearest", "bilinear")]),
    "videos": (VIDEO, lambda: [
        [L.Conv3D(2, 2, activation="tanh")], [L.Conv3D(2, 1, activation="tanh"), L.AveragePooling3D(2)],
        [L.Conv3D(2, 1, activation="tanh"), L.MaxPooling3D(2)]]),
    "loops": (SERIES, lambda: [[L.LSTM(3)], [L.GRU(3)], [L.Bidirectional(L.SimpleRNN(3))]]),
}  # fmt: skip
# On both stacks what Keras 2 makes of other ops.
OTHER_OPS = ("activations and normalisations", "attention", "enlarged", "loops")


# What TensorFlow has no second derivative of, for anyone.
NOT_TWICE = () if KERAS_3 else ("enlarged",)


def made(name):
    shape, stacks = CASES[name]
    K.utils.set_random_seed(3)
    x = K.Input(shape)
    ends = [L.Dense(2)(L.Flatten()(K.Sequential(layers)(x))) for layers in stacks()]
    return K.Model(x, ends[0] if len(ends) == 1 else L.Add()(ends))


def losses(net, x):
    """Of each example, what the net makes of it, and a penalty on the slope by the input."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        score = tf.reduce_sum(net(x, training=True), -1)
    slope = tape.gradient(score, x)
    squares = tf.reduce_sum(tf.square(slope), axes_of_one(x))
    return score + tf.square(tf.sqrt(squares + 1e-4) - 1.0)


def axes_of_one(x):
    return list(range(1, x.shape.rank))


def curvature(net, x):
    """As sliced score matching has it: a derivative of a derivative."""
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            energy = tf.reduce_sum(net(x, training=True), -1)
        slope = inner.gradient(energy, x)
        along = tf.reduce_sum(slope, axes_of_one(x))
    return tf.reduce_sum(outer.gradient(along, x), axes_of_one(x)) + tf.reduce_sum(slope**2, axes_of_one(x)) / 2


def moved_inputs(net, x):
    """As an adversary moves them, who is trained along."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        score = tf.reduce_sum(net(x, training=True), -1)
    return score + tf.reduce_sum(net(x + 0.1 * tape.gradient(score, x), training=True), -1)


def descended(net, x):
    """Three steps down an energy, as a sampler or a search inside of the loss takes them."""
    z = x
    for _ in range(3):
        with tf.GradientTape() as tape:
            tape.watch(z)
            energy = tf.reduce_sum(net(z, training=True) ** 2)
        z -= 0.1 * tape.gradient(energy, z)
    return tf.reduce_sum((z - x) ** 2, axes_of_one(x))


def derivative_along(net, x):
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as forward:
        y = net(x, training=True)
    return tf.reduce_sum(forward.jvp(y) ** 2, -1)


class Penalised(K.Model):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def call(self, x, training=False):
        return self.net(x, training=training)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses(self.net, x))
        variables = self.net.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


def data(name, n=4):
    return np.random.default_rng(1).normal(size=(n, *CASES[name][0])).astype("float32")


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.both_stacks] * (name in OTHER_OPS)) for name in CASES])  # fmt: skip
def test_a_gradient_penalty_is_clipped_example_by_example(name):
    x, net = data(name), made(name)
    if name in NOT_TWICE:
        with pytest.raises(LookupError, match="gradient registry"):  # of TensorFlow itself
            per_example_gradients(lambda x: losses(net, x), x, net.trainable_variables)
        return
    check(lambda x: losses(net, x), x, net.trainable_variables, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("of_each", [curvature, moved_inputs, descended, derivative_along], ids=lambda f: f.__name__)
def test_other_derivatives_in_the_loss_are_clipped_example_by_example(of_each):
    x, net = data("pools"), K.Sequential([K.Input(IMAGE), conv(3, 3), L.Flatten(), L.Dense(2)])
    check(lambda x: of_each(net, x), x, net.trainable_variables, 1e-4)


@pytest.mark.slow
@pytest.mark.both_stacks
def test_a_gradient_penalty_moves_by_the_clipped_sum_in_fit():
    """With batches of a known size, half of which are clipped."""
    x, net = data("attention"), made("attention")
    each = per_example_gradients(lambda x: losses(net, x), x, net.trainable_variables)
    clip = float(np.median(norms_of(each)))
    model = Penalised(net)
    model.compile(tfdpfl.DPSGD(clip, 0.0, learning_rate=1.0))
    before = [np.array(v) for v in raw(net.trainable_variables)]
    model.fit(tf.data.Dataset.from_tensor_slices(x).batch(len(x), drop_remainder=True), verbose=0)
    moved = [len(x) * (b - np.array(v)) for b, v in zip(before, raw(net.trainable_variables), strict=True)]
    assert_close(moved, clipped_sums(each, clip), 1e-4)


# -- what such gradients are made of, where it mixes examples ------------------------------------------------------

raw_ops = tf.raw_ops
ONES = [1, 1, 1, 1]
FOLLOWS, SOME = "not known to follow the batch size", "takes some examples"


def average(shape, **windows):
    windows = {"ksize": ONES, "strides": ONES, "padding": "VALID", **windows}
    return lambda x: raw_ops.AvgPoolGrad(orig_input_shape=shape(tf.shape(x)), grad=x, **windows)


def normalised(training, scale=lambda x: tf.ones([2]), of=lambda x: x):
    return lambda x: raw_ops.FusedBatchNormGradV3(
        y_backprop=x, x=of(x), scale=scale(x), reserve_space_1=tf.zeros([2]), reserve_space_2=tf.ones([2]),
        reserve_space_3=tf.zeros([0]), is_training=training)  # fmt: skip


def normalised_by_row(scale):
    """As Keras 2 normalises layers: the rows are channels."""
    return lambda x: raw_ops.FusedBatchNormGradV3(
        y_backprop=x[None, :, :, 0], x=x[None, :, :, 0], scale=scale(x), reserve_space_1=x[:, 0, 0, 0],
        reserve_space_2=x[:, 0, 0, 0], reserve_space_3=tf.zeros([0]), data_format="NCHW")  # fmt: skip


def in_blocks(x):
    return tf.space_to_batch(x, [2, 2], [[0, 0], [0, 0]])


def of_two_lists(a, b):
    lists = [raw_ops.TensorListFromTensor(tensor=t, element_shape=[-1, -1]) for t in (a, b)]
    total = raw_ops.AddN(inputs=lists)
    return raw_ops.TensorListGetItem(input_handle=total, index=0, element_shape=[-1, -1], element_dtype=tf.float32)


def batch_size(x):
    return tf.cast(tf.shape(x)[0], tf.float32)


def lengths_below_one_another(x):
    return tf.expand_dims(tf.shape(x[:, 0, 0]), 1)


def summed_by_another(x):
    """Axes that are counted from the second one on: the first of them is the batch's."""
    g = x[:, 0, :, 0]
    shape = tf.shape(g[:, :1])
    return tf.reshape(tf.reduce_sum(g, raw_ops.BroadcastGradientArgs(s0=shape[1:], s1=[4])[0]), shape)


MIXING = {
    "average over examples": (average(lambda n: n, ksize=[2, 1, 1, 1]), "pools over the batch"),
    "average by strides over examples": (average(lambda n: n, strides=[2, 1, 1, 1]), "pools over the batch"),
    "average of as many as stated": (average(lambda n: [5, 4, 4, 2]), FOLLOWS),
    "average of an image as wide as the batch": (average(lambda n: tf.stack([n[0], n[0], 4, 2])), FOLLOWS),
    "average along another axis": (
        lambda x: average(lambda n: n)(tf.transpose(x, [1, 0, 2, 3])), "as its first axis"),
    "maximum over examples": (
        lambda x: raw_ops.MaxPool3DGrad(orig_input=x[:, None], orig_output=x[:, None], grad=x[:, None],
                                        ksize=[2, *ONES], strides=[1, *ONES], padding="VALID"), "pools over the batch"),
    "maximum of two": (
        lambda x: raw_ops.MaxPool3DGrad(orig_input=x[:, None], orig_output=tf.transpose(x, [1, 0, 2, 3])[:, None],
                                        grad=x[:, None], ksize=[1, *ONES], strides=[1, *ONES], padding="VALID"),
        "as its first axis"),
    "bilinear along another axis": (
        lambda x: raw_ops.ResizeBilinearGrad(grads=tf.transpose(x, [1, 0, 2, 3]), original_image=x),
        "as its first axis"),
    "bilinear of a public image": (
        lambda x: raw_ops.ResizeBilinearGrad(grads=x, original_image=tf.zeros([5, 2, 2, 2])), "as its first axis"),
    "nearest along another axis": (
        lambda x: raw_ops.ResizeNearestNeighborGrad(grads=tf.transpose(x, [1, 0, 2, 3]), size=[2, 2]),
        "as its first axis"),
    "nearest to a size of the batch's": (
        lambda x: raw_ops.ResizeNearestNeighborGrad(grads=x, size=tf.stack([tf.shape(x)[0], 2])), "batch size"),
    "mirrored examples": (
        lambda x: raw_ops.MirrorPadGrad(input=x, paddings=[[1, 0], [0, 0], [0, 0], [0, 0]], mode="SYMMETRIC"),
        "pads the batch"),
    "offsets along the batch": (
        lambda x: tf.slice(tf.tile(x, ONES), raw_ops.ConcatOffset(concat_dim=0, shape=[tf.shape(x)] * 2)[1],
                           tf.shape(x)), "batch size|takes some"),
    "offsets of the batch size": (
        lambda x: tf.slice(x, raw_ops.ConcatOffset(
            concat_dim=1, shape=[tf.stack([*[tf.shape(x)[0]] * 2, 4, 2])] * 2)[1], [-1] * 4), "batch size"),
    "normalised over examples": (lambda x: normalised(True)(x)[0], "normalises over the batch"),
    "a scale's gradient": (lambda x: normalised(False)(x)[1], "sums over the batch"),
    "by a scale of examples": (
        lambda x: normalised(False, lambda x: x[:, 0, 0, 0])(x)[0], "normalises over the batch"),
    "of examples along two axes": (
        lambda x: normalised(False, of=lambda x: tf.transpose(x, [1, 0, 2, 3]))(x)[0], "not known to keep"),
    "rows by a scale of their places": (
        lambda x: normalised_by_row(lambda x: tf.range(5.0))(x)[0], "normalises examples together"),
    "blocks into examples": (
        lambda x: tf.reshape(in_blocks(x), [tf.shape(x)[0], -1]), "moves examples across axes"),
    "blocks into one axis": (
        lambda x: tf.reshape(in_blocks(x), [-1, 2]), "moves examples across axes|cuts across"),
    "blocks and examples": (
        lambda x: tf.reshape(x, tf.stack([tf.shape(in_blocks(x))[0], 2, 2, 2])) + in_blocks(x), "dilated window"),
    "columns of lengths": (
        lambda x: tf.zeros(tf.reshape(tf.concat([lengths_below_one_another(x)] * 2, 1), [-1])[:2]) + x[:, 0, 0, :1],
        "batch size|several batch axes|not known"),
    "a product over no lengths": (
        lambda x: x * (tf.reduce_prod(tf.stack([batch_size(x), 1 / batch_size(x)]), []) * [1.0, 1.0])[0], "batch size"),
    "lengths side by side": (
        lambda x: x * tf.reshape(tf.stack([[1.0, 1.0], [batch_size(x), 1.0]], 1), [-1])[1], "batch size"),
    "lengths below one another, by an axis counted from the last": (
        lambda x: x * tf.reshape(raw_ops.Pack(values=[[1.0, batch_size(x)], [1.0, 1.0]], axis=-2), [-1])[1],
        "batch size",
    ),
    "a sum over axes that are counted from another": (summed_by_another, "axes that are not known"),
    "lists along two axes": (
        lambda x: of_two_lists(x[None, :, 0, 0], tf.transpose(x[:, 0, 0])[None, ...]), "not known to keep"),
    "a list and weights": (
        lambda x: of_two_lists(x[None, :, 0, 0], tf.range(10.0)[None, :, None] * [1.0, 2.0]), "not known to keep"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_examples_is_refused(name):
    mixes, match = MIXING[name]
    w = tf.Variable(1.5)

    def step(x):
        y = mixes(tf.sin(w * x))
        rows = tf.reshape(tf.reduce_sum(tf.sin(w * x), [1, 2, 3]), [-1])
        clipped_gradients(tf.reduce_mean(rows) + tf.reduce_mean(tf.square(y)), [w], 1.0)

    with pytest.raises(PrivacyError, match=match):
        tf.function(step, input_signature=[tf.TensorSpec([None, 4, 4, 2])]).get_concrete_function()
