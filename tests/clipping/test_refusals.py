"""Where examples meet on the way to the loss, training is refused before the first update; where they do not, not."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import K, L, check_model, example_losses, normal, raw
from mixing_cases import (
    BATCHED,
    TABLE,
    W8,
    B,
    W,
    check_exact,
    check_refused_or_apart,
    check_static,
    check_told,
    clip_sum,
    d,
    n,
    nf,
    norms,
    padded_attention,
    square,
    total,
)

import tfdpfl
from tfdpfl.clipping import clipped_gradients, per_example_norms
from tfdpfl.errors import PrivacyError

STATE, SLOW = (tf.Variable(tf.zeros([4]), trainable=False) for _ in range(2))


@tf.function
def subtracts_a_written_mean(x):
    STATE.assign(tf.reduce_mean(x, 0))
    return x - STATE


@tf.function
def writes_a_mean(x):
    STATE.assign(tf.reduce_mean(x, 0))


def written_inside_a_call(x):
    writes_a_mean(x)
    return total(d(x - STATE))


def written_before(x):
    STATE.assign(0.9 * STATE + 0.1 * tf.reduce_mean(x, 0))
    return total(d(x - STATE))


def written_by_way_of_another(x):
    y = total(d(x - STATE))
    SLOW.assign(tf.reduce_mean(x, 0))
    STATE.assign(0.5 * STATE + 0.5 * SLOW)
    return y


def written_by_a_switch(x):
    y = total(d(x - STATE))

    def write():
        STATE.assign(tf.reduce_mean(x, 0))
        return tf.constant(0)

    tf.switch_case(tf.constant(1) + tf.cast(STATE[0] > 9, tf.int32), [lambda: tf.constant(0), write])
    return y


TABLE_OF_MEANS = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)


def looked_up_means(x, **default):
    return tf.ensure_shape(TABLE_OF_MEANS.lookup(tf.cast(x[:, 0] > 0, tf.int64), **default), [None])[:, None]


def written_to_a_table(x):
    y = total(d(x) - looked_up_means(x))
    TABLE_OF_MEANS.insert(tf.constant([0, 1], tf.int64), tf.reduce_mean(x, 0)[:2])
    return y


def counted(x, most=None):
    counts = tf.math.bincount(tf.cast(tf.abs(x), tf.int32), minlength=3, maxlength=most, axis=-1)
    return total(d(x) * tf.reduce_mean(tf.cast(tf.ensure_shape(counts, [None, None]), tf.float32), 1, keepdims=True))


def shifted(x, by):
    """Images whose rows are x, each moved along by its own number of pixels."""
    one, zero = tf.ones_like(by), tf.zeros_like(by)
    height = tf.shape(x)[1]
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=tf.reshape(x, [-1, height, 4, 1]), transforms=tf.stack([one, zero, by, zero, one, zero, zero, zero], 1),
        output_shape=tf.stack([height, 4]), fill_value=0.0, interpolation="BILINEAR", fill_mode="CONSTANT")  # fmt: skip


def of_places(*shape):
    return tf.sin(tf.constant(np.resize(BATCHED, shape)))


def lengths():
    """As many as the examples of a static batch."""
    return tf.cast(tf.raw_ops.Shape(input=tf.zeros([2, 3, 4, 5])), tf.float32)


@tf.custom_gradient
def gradient_over_its_norm(x):
    return tf.identity(x), lambda dy: dy / (tf.norm(dy) + 1e-6)


@tf.custom_gradient
def gradient_less_its_mean(x):
    return x * 1.0, lambda dy: dy - tf.reduce_mean(dy, 0, keepdims=True)


@tf.function
def custom_gradient_in_a_call(x):
    return gradient_over_its_norm(x) * 1.0


def counted_loop(x):
    return total(tf.while_loop(lambda i, a: i < n(x), lambda i, a: (i + 1, a * 1.1), [0, d(x)])[1])


def of_two_shapes(x):
    z = tf.cond(STATE[0] > 9.0, lambda: tf.reshape(x, [-1, 2]), lambda: x[:, :2])
    return total(tf.reshape(tf.tanh(tf.reshape(z, [-1, 4]) @ W), [-1, 2]))


def derivative(x):
    """Of a product in which one factor is broadcast, as under a gradient penalty."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.sin(x) * x[..., :1] * [1.0, 2.0, 3.0, 4.0]
    return tape.gradient(y, x)


def derivative_by_what_all_share(x):
    factor = tf.ones([1, 4])
    with tf.GradientTape() as tape:
        tape.watch(factor)
        y = d(x)[:, : 4 + tf.cast(STATE[0] > 99.0, tf.int32)] * factor  # of a length that is not known as it is traced
    return total(d(x) * tape.gradient(y, factor))


def adversarial(x):
    """By the gradient of a mean, which is divided by the batch size."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_mean(total(d(x)))
    return total(d(x + 0.1 * tf.sign(tape.gradient(y, x))))


def repartition(x):
    return total(tf.concat(tf.dynamic_partition(d(x), tf.cast(x[:, 0] > 0, tf.int32), 2), 0))


# Every one of these lets an example's gradient depend on another's, on its place, or on how many there are.
MIXING = {
    "mean of the batch": lambda x: total(x @ W - tf.reduce_mean(x @ W, 0)),
    "moments of the batch": lambda x: total(d(x) - tf.nn.moments(d(x), [0])[0]),
    "least of the batch": lambda x: total(d(x) - tf.reduce_min(d(x), 0)),
    "softmax over the batch": lambda x: total(tf.nn.softmax(d(x), 0)),
    "norm of the batch": lambda x: total(tf.math.l2_normalize(d(x))),
    "norm over axis 0": lambda x: total(tf.math.l2_normalize(d(x), 0)),
    "roll": lambda x: total(tf.roll(d(x), 1, 0)),
    "reversed batch": lambda x: total(d(x)[::-1] + x),
    "reversed by op": lambda x: total(tf.reverse(d(x), [0])),
    "half of the batch": lambda x: total(d(x)[:2]),
    "every second": lambda x: total(d(x)[::2]),
    "all but the first": lambda x: total(d(x)[1:]),
    "first example": lambda x: total(d(x) - x[0]),
    "cumulative sum": lambda x: total(tf.cumsum(d(x))),
    "pairs of examples": lambda x: total(d(x) @ tf.transpose(d(x))),
    "products over the batch": lambda x: total(d(x) @ (tf.transpose(x) @ x)),
    "differences of pairs": lambda x: tf.reduce_sum((d(x)[:, None] - d(x)[None]) ** 2, [1, 2]),
    "attention over the batch": lambda x: total(tf.nn.softmax(x @ tf.transpose(x)) @ d(x)),
    "sorted batch": lambda x: total(tf.sort(d(x), 0)),
    "sorted scores": lambda x: tf.sort(d(x)[:, 0]) ** 2,
    "best of the batch": lambda x: tf.math.top_k(d(x)[:, 0], 2).values ** 2,
    "unique": lambda x: total(tf.gather(d(x), tf.unique(x[:, 0]).idx)),
    "boolean mask": lambda x: total(tf.boolean_mask(d(x), x[:, 0] > 0)),
    "ragged": lambda x: total(tf.RaggedTensor.from_row_lengths(tf.reshape(d(x), [-1]), tf.fill([n(x)], 4)).to_tensor()),
    "other examples by range": lambda x: total(tf.gather(d(x), (tf.range(n(x)) + 1) % n(x))),
    "other examples by data": lambda x: total(tf.gather(d(x), tf.cast(x[:, 0] > 0, tf.int32))),
    "numbered examples": lambda x: total(d(x) * tf.cast(tf.range(n(x)), tf.float32)[:, None]),
    "constant for each place": lambda x: total(d(x) * BATCHED),
    "sums of constants by place": lambda x: total(d(x) * tf.reduce_sum(tf.sin(tf.constant(BATCHED[..., None])), 2)),
    "computed constant for each place": lambda x: total(d(x) * tf.sin(tf.constant(BATCHED))),
    "chosen by place": lambda x: total(tf.where(tf.constant([[True], [False], [True], [True]]), d(x), 2 * d(x))),
    "rows chosen by place": lambda x: total(tf.raw_ops.Select(condition=tf.constant([True, False, True, True]),
                                                              x=tf.ensure_shape(d(x), [4, 4]), y=x)),
    "rows of a constant chosen": lambda x: total(tf.raw_ops.Select(condition=x[:, 0] > 0, y=tf.constant(BATCHED),
                                                                   x=tf.ensure_shape(d(x), [4, 4]))),
    "places joined": lambda x: total(d(x) * tf.concat([tf.random.normal([B, 2]), of_places(B, 2)], 1)),
    "places stacked": lambda x: total(d(x) * tf.stack([tf.ones([B]), *tf.unstack(of_places(3, B))], 1)),
    "places turned": lambda x: total(d(x) * tf.transpose(tf.broadcast_to(of_places(1, B), [4, B]))),
    "places cut from rows": lambda x: total(d(x) * tf.reshape(tf.broadcast_to(of_places(1, 8), [2, 8]), [B, 4])),
    "places added in the loss": lambda x: tf.reduce_mean(
        d(x)[:, :1] + tf.reshape(tf.range(4.0), [n(x), 1])),
    "as many rows as the usual batch": lambda x: total(d(x) * tf.ones([B, 4])),
    "places reshaped": lambda x: total(d(x) * tf.reshape(of_places(B, 2, 2), [B, 4])),
    "places along a new axis": lambda x: total(d(x) * tf.expand_dims(of_places(B), 1)),
    "places by lengths": lambda x: total(tf.transpose(tf.transpose(d(x)) * lengths())),
    "places multiplied by lengths": lambda x: total(tf.einsum("bk,b->bk", d(x), lengths())),
    "places of targets": lambda x: total(d(x) * tf.cast(tf.math.in_top_k(tf.range(B), x, 2), tf.float32)[:, None]),
    "as many of the best as half the batch": lambda x: total(d(x) * tf.cast(
        tf.math.in_top_k(tf.cast(x[:, 0] > 0, tf.int32), x, n(x) // 2), tf.float32)[:, None]),
    "places chosen from equal rows": lambda x: total(d(x) * tf.raw_ops.Select(
        condition=tf.constant([True, False, True, True]), x=tf.ones([B, 4]), y=tf.zeros([B, 4]))),
    "places less an axis": lambda x: total(d(x) * tf.squeeze(of_places(1, B, 4), 0)),
    "places sliced": lambda x: total(d(x) * of_places(B, 8)[:, 2:6]),
    "places after an ellipsis": lambda x: total(
        d(x) * tf.expand_dims(tf.broadcast_to(of_places(1, B), [B, B])[..., 0, :], 1)),
    "places looked up": lambda x: total(d(x)[:, None] * tf.gather(TABLE, tf.reshape(tf.range(B), [B, 1]))),
    "places of tiled weights": lambda x: total(d(x) * tf.tile(TABLE[:2], [2, 1])),
    "places tiled": lambda x: total(d(x) * tf.tile(of_places(2, 4), [2, 1])),
    "places counted": lambda x: total(d(x) * tf.cumsum(tf.ones([B, 4]))),
    "places compared": lambda x: total(d(x) * tf.transpose(tf.nn.softmax(tf.broadcast_to(of_places(1, B), [4, B])))),
    "places added up": lambda x: total(d(x) * tf.cumsum(of_places(B, 4), 1)),
    "shifts by place": lambda x: total(shifted(tf.tile(d(x)[:, None], [1, 2, 1]), of_places(B))),
    "two axes of frequencies": lambda x: total(tf.abs(tf.signal.fft2d(tf.cast(d(x), tf.complex64)))),
    "entries of examples": lambda x: total(tf.gather_nd(d(x), tf.stack([tf.range(n(x)), tf.range(n(x)) % 2], 1))),
    "examples' choice of entries": lambda x: total(tf.gather_nd(d(x), tf.cast(x[:, :2] > 0, tf.int32))),
    "first half of the batch": lambda x: total(d(x)[: n(x) // 2]),
    "all but the last by size": lambda x: total(d(x)[: n(x) - 1]),
    "first half of the rows": lambda x: total(tf.reshape(d(x), [-1, 2])[: n(x)]),
    "half of the rows sliced": lambda x: total(tf.slice(tf.reshape(d(x), [-1, 2]), [0, 0], [n(x), 2])),
    "sliced from the second": lambda x: total(tf.slice(d(x), tf.stack([n(x) // n(x), 0]), [-1, 4])),
    "branch by the batch size": lambda x: tf.cond(n(x) > 4, lambda: total(d(x)), lambda: total(2 * d(x))),
    "bits of several examples": lambda x: total(d(x)) * tf.cast(
        tf.bitcast(tf.transpose(tf.cast(x[:, :2] > 0, tf.uint16)), tf.uint32), tf.float32),
    "derivative of a mean": adversarial,
    "places looked up by draws and by place": lambda x: total(d(x) * tf.gather(
        of_places(B, B), tf.random.uniform([1], 0, B, tf.int32), axis=1)),
    "mutable table": lambda x: total(d(x)) * TABLE_OF_MEANS.lookup(tf.cast(x[:, 0] > 0, tf.int64)),
    "mutable table of what all share": lambda x: tf.reduce_mean(total(d(x))) * TABLE_OF_MEANS.lookup(
        tf.zeros([1], tf.int64)),
    "derivative by what all share": derivative_by_what_all_share,
    "partition": repartition,
    "two examples a row": lambda x: total(tf.reshape(d(x), [-1, 8]) @ W8),
    "two examples a row, back again": lambda x: total(tf.reshape(tf.reshape(d(x), [-1, 8]) @ W8, [-1, 4])),
    "half the rows by division": lambda x: total(tf.reshape(tf.reshape(d(x), [n(x) // 2, 8]) @ W8, [-1, 4])),
    "half the rows by a float": lambda x: total(
        tf.reshape(tf.reshape(d(x), [tf.cast(nf(x) * 0.5, tf.int32), 8]) @ W8, [-1, 4])),
    "half the rows by a quotient": lambda x: total(
        tf.reshape(tf.reshape(d(x), [tf.cast(nf(x) / 2.0, tf.int32), 8]) @ W8, [-1, 4])),
    "reshape after transpose": lambda x: total(tf.reshape(tf.transpose(d(x)), [-1, 4]) @ W),
    "flattened by columns": lambda x: total(tf.reshape(tf.transpose(d(x)), [n(x), 4])),
    "convolution over the batch": lambda x: total(tf.nn.conv1d(d(x)[None], W8[:3, :4, None], 1, "SAME")[0]),
    "pool over the batch": lambda x: total(tf.nn.max_pool1d(d(x)[None], 3, 1, "SAME")[0]),
    "pool over batch and columns": lambda x: total(tf.nn.avg_pool2d(d(x)[None, ..., None], 2, 1, "SAME")[0]),
    "diagonal of pairs": lambda x: tf.einsum("bb->b", d(x) @ tf.transpose(x)) ** 2,
    "fourier over the batch": lambda x: tf.abs(tf.signal.fft(tf.cast(d(x)[:, 0], tf.complex64))) ** 2,
    "mesh": lambda x: tf.reduce_sum(tf.meshgrid(d(x)[:, 0], x[:, 1])[0], 0) ** 2,
    "space to batch": lambda x: total(tf.space_to_batch(square(x)[..., None], [2, 2], [[0, 0], [0, 0]])),
    "batch to space": lambda x: total(tf.batch_to_space(square(x)[..., None], [2, 2], [[0, 0], [0, 0]])),
    "reversed lengths over the batch": lambda x: total(tf.reverse_sequence(d(x), [2, 1, 3, 4], 0, 1)),
    "contrast over the batch": lambda x: total(tf.raw_ops.AdjustContrastv2(images=square(x), contrast_factor=2.0)),
    "tiled batch": lambda x: total(tf.tile(d(x), [2, 1])),
    "repeated batch": lambda x: total(tf.repeat(d(x), 2, 0)),
    "padded batch": lambda x: total(tf.pad(d(x), [[1, 0], [0, 0]])),
    "batch padded to a multiple": lambda x: total(tf.pad(d(x), [[0, tf.shape(x)[1] % 3], [0, 0]])),
    "columns padded up to the batch size": lambda x: total(tf.pad(d(x), [[0, 0], [0, n(x)]])),
    "joined batches": lambda x: total(tf.concat([d(x), x], 0)),
    "unstacked batch": lambda x: total(tf.stack(tf.unstack(d(tf.ensure_shape(x, [B, 4])))[::-1])),
    "split batch": lambda x: total(tf.concat(tf.split(d(x), 2)[::-1], 0)),
    "rolled by the batch size": lambda x: total(tf.roll(d(x) * [1.0, 2.0, 3.0, 4.0], n(x) - 1, 1)),
    "spread along a new axis": lambda x: tf.reduce_sum(tf.broadcast_to(d(x)[:, None], [n(x), n(x), 4]) ** 2, [1, 2]),
    "spread along a new first axis": lambda x: total(tf.reduce_sum(tf.broadcast_to(d(x), [n(x), n(x), 4]), 0)),
    "tiled by the batch size": lambda x: total(tf.tile(d(x), [1, n(x)])),
    "times the batch size": lambda x: total(d(x) * nf(x)),
    "times a size with a new axis": lambda x: total(d(x) * tf.cast(tf.shape(x)[0][None], tf.float32)),
    "times a size with a new first axis": lambda x: total(d(x) * tf.cast(tf.shape(x)[None, :1], tf.float32)),
    "columns up to the batch size": lambda x: total(d(x)[:, : n(x) - 2]),
    "slice up to the batch size": lambda x: total(tf.slice(d(x), [0, 0], [-1, n(x) - 2])),
    "column of the batch size": lambda x: tf.gather(d(x), n(x) - 3, axis=1) ** 2,
    "one hot to the batch size": lambda x: tf.reduce_mean(
        d(x)[:, :1] + tf.one_hot(tf.zeros_like(x[:, 0], tf.int32), n(x)), 1) ** 2,
    "best of each by the batch size": lambda x: total(tf.math.top_k(d(x), n(x) - 2).values),
    "split by the batch size": lambda x: total(tf.split(d(x), tf.stack([n(x) - 2, 6 - n(x)]), axis=1)[0]),
    "resized to the batch size": lambda x: total(tf.image.resize(square(x)[..., None], tf.stack([n(x), n(x)]))),
    "padded with the batch size": lambda x: total(tf.pad(d(x), [[0, 0], [0, 1]], constant_values=nf(x)) @ W8[:5]),
    "clipped at the batch size": lambda x: total(tf.clip_by_value(x @ W, -1.0, nf(x))),
    "as many turns as examples": counted_loop,
    "sizes picked by data": lambda x: total(
        d(x) * tf.cast(tf.gather(tf.shape(x), tf.cast(x[:, 0] > 0, tf.int32))[0], tf.float32)),
    "one of two shapes": of_two_shapes,
    "branch by data": lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: total(d(x)), lambda: total(2 * d(x))),
    "mean written and read": written_before,
    "mean written and read in a call": lambda x: total(d(subtracts_a_written_mean(x))),
    "mean written in a call": written_inside_a_call,
    "mean written by way of another": written_by_way_of_another,
    "mean written by a switch": written_by_a_switch,
    "written to a table": written_to_a_table,
    "defaults of places": lambda x: total(
        d(x) * looked_up_means(x, dynamic_default_values=tf.ensure_shape(tf.constant(BATCHED[:, 0]), [B]))),
    "counts of the batch": lambda x: total(
        d(x) * tf.math.bincount(tf.cast(x[:, 0] > 0, tf.int32), x[:, 1], minlength=4, maxlength=4)),
    "as many counts as the batch's largest": counted,
    "as many counts as the batch's largest, up to 9": lambda x: counted(x, 9),
    "gradient over its norm": lambda x: total(gradient_over_its_norm(d(x))),
    "gradient less its mean": lambda x: total(gradient_less_its_mean(d(x))),
    "gradient over its norm in a call": lambda x: total(custom_gradient_in_a_call(d(x))),
    "recomputed weights": lambda x: total(tf.recompute_grad(d)(x)),
    "python": lambda x: total(d(x) - tf.ensure_shape(tf.numpy_function(lambda: BATCHED[:1], [], tf.float32), [1, 4])),
    "python on the batch": lambda x: total(d(tf.ensure_shape(tf.numpy_function(lambda a: a[::-1], [x], tf.float32),
                                                             [None, 4]))),
    "what a loop began without": lambda x: total(d(tf.while_loop(
        lambda i, s: i < 2, lambda i, s: (i + 1, x + tf.reduce_mean(s, 0)), [0, tf.zeros([1, 4])],
        shape_invariants=[tf.TensorShape([]), tf.TensorShape([None, 4])])[1])),
}  # fmt: skip


# What a user must be told: the op or layer, and a mend.
TOLD = {
    "mean of the batch": r"Mean.*reduces over the batch.*Reduce over the other axes only \(axis=1 and up\)",
    "softmax over the batch": "Work along another axis",
    "roll": "Roll.*along the batch axis",
    "reversed batch": "StridedSlice.*takes some examples",
    "cumulative sum": "Cumsum.*along the batch axis",
    "pairs of examples": "MatMul.*multiplies the examples along one axis.*Compare each example with public values",
    "products over the batch": "MatMul.*sums over the batch",
    "sorted batch": "TopKV2.*depend on the batch size",
    "unique": "Unique.*not known to keep examples apart",
    "other examples by range": r"Range.*by their position.*tf.gather\(x, indices, batch_dims=1\)",
    "entries of examples": r"Range.*tf.gather\(x, indices, batch_dims=1\)",
    "examples' choice of entries": r"GatherNd.*Use tf.gather\(table, ids\)",
    "as many rows as the usual batch": "Mul.*by its position in the batch",
    "other examples by data": "GatherV2.*picks examples",
    "half the rows by division": "tfdpfl|cuts across|not known|Reshape",
    "mean written and read": "reads a variable that the step itself writes",
    "mean written and read in a call": "reads a variable that the step itself writes",
    "mean written in a call": "reads a variable that the step itself writes",
    "mean written by way of another": "reads a variable that the step itself writes",
    "mean written by a switch": "reads a variable that the step itself writes",
    "written to a table": "LookupTableFindV2.*reads a variable that the step itself writes",
    "derivative of a mean": r"depend on the batch size.*tape.gradient\(tf.reduce_sum\(losses\), x\)",
    "mutable table": r"LookupTableFindV2.*unknown rank.*tf.ensure_shape",
    "mutable table of what all share": r"LookupTableFindV2.*unknown rank.*tf.ensure_shape",
    "derivative by what all share": "Sum.*(sums|reduces) over the batch",
    "counts of the batch": "DenseBincount.*counts over the batch|UnsortedSegmentSum",
    "as many counts as the batch's largest, up to 9": "Max.*reduces over the batch",
    "gradient over its norm": "gradient of its own",
    "gradient over its norm in a call": "gradient of its own",
    "python": "Python",
    "branch by data": "branch|reduces over the batch",
    "branch by the batch size": "If.*takes a branch by the batch size",
    "as many of the best as half the batch": "InTopKV2.*settings that depend on examples",
    "first half of the rows": "StridedSlice.*takes some examples.*Let every example keep its place",
    "half of the rows sliced": "Slice.*takes some examples",
    "sliced from the second": "Slice.*takes some examples",
    "shifts by place": "ImageProjectiveTransformV3.*by its position|Mul.*by its position",
    "as many turns as examples": "While.*turns",
    "times the batch size": "depend on the batch size",
    "tiled by the batch size": "Tile.*depend on the batch size",
    "rolled by the batch size": "Roll.*depend on the batch size",
    "batch padded to a multiple": "Pad.*pads the batch",
    "columns padded up to the batch size": "depend on the batch size",
}


STATIC = ["constant for each place", "sums of constants by place", "computed constant for each place",
          "numbered examples",
          "chosen by place", "rows chosen by place", "rows of a constant chosen", "two examples a row",
          "half of the batch", "unstacked batch", "shifts by place",
          *[name for name in MIXING if name.startswith("places ")]]  # fmt: skip


@pytest.mark.one_stack  # what is no op of the tables in clipping/ops/ mixes, whatever TensorFlow calls it
@pytest.mark.parametrize("losses", [  # the next test asks more of the rest; what another looks at again is slow here
    pytest.param(f, id=name, marks=[pytest.mark.slow] * (name in STATIC or i % 3 > 0))
    for i, (name, f) in enumerate(MIXING.items()) if name not in TOLD
])  # fmt: skip
def test_what_lets_examples_meet_is_refused_or_keeps_them_apart(losses):
    check_refused_or_apart(losses)


@pytest.mark.parametrize(("name", "message"), [
    pytest.param(n, m, id=n, marks=[pytest.mark.slow] * (i % 2)) for i, (n, m) in enumerate(TOLD.items())
])  # fmt: skip
def test_a_refusal_names_the_op_and_the_reason(name, message):
    check_told(MIXING[name], message)


@pytest.mark.parametrize("name", [
    pytest.param(n, marks=[pytest.mark.slow] * n.startswith(("places ", "rows ", "sums "))) for n in STATIC
])  # fmt: skip
def test_a_static_batch_size_is_no_excuse_to_tell_examples_by_their_place(name):
    check_static(MIXING[name])


def test_an_only_example_that_is_repeated_is_refused():
    with pytest.raises(PrivacyError, match="by its position"):
        norms(MIXING["as many rows as the usual batch"], batch=1).get_concrete_function()


# Losses that are not a sum of the examples' own

LOSSES = {
    "log of the mean": lambda v, x: tf.math.log(tf.reduce_mean(v)),
    "square of the mean": lambda v, x: tf.reduce_mean(v) ** 2,
    "product of means": lambda v, x: tf.reduce_mean(v) * tf.reduce_mean(x),
    "product of two means of the loss": lambda v, x: tf.reduce_mean(v) * tf.reduce_mean(v),
    "largest": lambda v, x: tf.reduce_max(v),
    "deviation": lambda v, x: tf.math.reduce_std(v),
    "over the sum of weights": lambda v, x: tf.reduce_sum(v * tf.abs(x[:, 0])) / tf.reduce_sum(tf.abs(x[:, 0])),
    "over another mean": lambda v, x: tf.reduce_mean(v) / tf.reduce_mean(tf.abs(x)),
    "softmax weights": lambda v, x: tf.reduce_sum(v * tf.nn.softmax(v)),
    "contrastive": lambda v, x: tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.range(n(x)), d(x) @ tf.transpose(x))),
    "mean where the mean is large": lambda v, x: tf.where(tf.reduce_mean(v) > 0.1, tf.reduce_mean(v), 0.0),
    "over its stopped self": lambda v, x: tf.reduce_mean(v) / tf.stop_gradient(tf.reduce_mean(v)),
    "mean added to each": lambda v, x: tf.reduce_sum(v + tf.reduce_mean(v)),
    "mean times each": lambda v, x: tf.reduce_sum(v * tf.reduce_mean(v)),
    "over the mean of each": lambda v, x: tf.reduce_sum(v / tf.reduce_mean(v)),
    "mean over each": lambda v, x: tf.reduce_sum(tf.reduce_mean(v) / (1.0 + v)),
    "mean where a loss is small": lambda v, x: tf.reduce_sum(tf.where(v > 0.1, v, tf.reduce_mean(v))),
    "mean where it is not zero": lambda v, x: tf.where(tf.cast(tf.reduce_mean(v), tf.bool), tf.reduce_mean(v), 0.0),
    "mean below each": lambda v, x: tf.reduce_sum(v * tf.cast(tf.reduce_mean(v) < v, v.dtype)),
    "clipped mean": lambda v, x: tf.clip_by_value(tf.reduce_mean(v), 0.0, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_loss_that_couples_examples_is_refused(loss):
    @tf.function(input_signature=[tf.TensorSpec([None, 4])], autograph=False)
    def step(x):
        return clipped_gradients(loss(total(d(x)), x), [W], 1.0).norms

    with pytest.raises(PrivacyError, match="xample"):
        step.get_concrete_function()


# Through Keras: nothing moves


class Center(L.Layer):
    def call(self, x):
        return x - tf.reduce_mean(x, 0, keepdims=True)


class SharedStatistics(L.Layer):
    """A layer that keeps a mean, updates it from the batch, and subtracts it."""

    def build(self, shape):
        self.mean = self.add_weight(name="mean", shape=(shape[-1],), initializer="zeros", trainable=False)
        self.built = True

    def call(self, x):
        self.mean.assign(0.9 * tf.convert_to_tensor(self.mean) + 0.1 * tf.reduce_mean(x, 0))
        return x - tf.convert_to_tensor(self.mean)


@pytest.mark.parametrize(("layer", "message"), [
    (lambda: L.BatchNormalization(name="normal"), "(?s)normal.*LayerNormalization"),
    (lambda: Center(name="center"), "(?s)center.*Reduce over the other axes"),
    (lambda: SharedStatistics(name="stats"), "(?s)stats.*"),
    (lambda: L.Lambda(lambda x: tf.nn.softmax(x, 0), name="odd"), "(?s)odd.*Work along another axis"),
    (lambda: L.Lambda(lambda x: x + tf.cast(tf.strings.split(tf.as_string(x[:, 0])).row_lengths()[:, None], x.dtype),
                      name="words"), "(?s)words.*dataset.map"),
], ids=["BatchNormalization", "batch mean", "written state", "softmax over the batch", "text"])  # fmt: skip
def test_keras_model_is_refused_before_any_weight_moves(layer, message):
    model = K.Sequential([K.Input((4,)), L.Dense(5), layer(), L.Dense(2)])
    model.compile(tfdpfl.DPSGD(l2_norm_clip=1.0, noise_multiplier=1.0, learning_rate=1.0), loss="mse")
    before = [w.numpy() for w in raw(model.trainable_variables)]
    with pytest.raises(PrivacyError, match=message):
        model.train_on_batch(normal(B, 4), normal(B, 2))
    for w, b in zip(raw(model.trainable_variables), before, strict=True):
        np.testing.assert_array_equal(w.numpy(), b)


def test_frozen_batch_normalization_in_inference_mode_is_welcome():
    norm = L.BatchNormalization(trainable=False)
    check_model(K.Sequential([K.Input((4,)), L.Dense(5), norm, L.Dense(2)]), normal(B, 4))


# What must not be refused


def times_positions(x):
    t = tf.shape(x)[1]
    return x + tf.sin(tf.cast(tf.range(t), tf.float32))[None, :, None] * tf.ones([n(x), t, 1])


def own_state_loop(x):
    state = tf.zeros([n(x), 4])
    return tf.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, tf.tanh(s + x[:, i])), [0, state])[1]


ALLOWED = {
    "time major": lambda x: tf.transpose(tf.cumsum(tf.transpose(x, [1, 0, 2]), 0), [1, 0, 2]),
    "positions": times_positions,
    "attention with masks": padded_attention,
    "one hot": lambda x: tf.one_hot(tf.argmax(x, -1), 4) * x,
    "own softmax": lambda x: tf.nn.softmax(x, -1),
    "own sort": lambda x: tf.sort(x, 1),
    "own best": lambda x: tf.math.top_k(x, 2).values,
    "own norm": lambda x: tf.math.l2_normalize(x, [1, 2]),
    "own mean": lambda x: x - tf.reduce_mean(x, [1, 2], keepdims=True),
    "own pairs": lambda x: tf.einsum("bij,bkj->bik", x, x),
    "own pick": lambda x: tf.gather(x, tf.cast(x[:, 0, :2] > 0, tf.int32), batch_dims=1),
    "own shift": lambda x: shifted(x, x[:, 0, 0]),
    "own frequencies": lambda x: tf.abs(tf.signal.rfft(x)),
    "own frequencies of two axes": lambda x: tf.abs(tf.signal.fft2d(tf.cast(x, tf.complex64))),
    "own frames": lambda x: tf.signal.frame(x, 2, 1, axis=1),
    "own spectrogram": lambda x: tf.abs(tf.signal.stft(tf.reshape(x, [-1, 12]), 6, 3)),
    "branch by a length": lambda x: tf.cond(tf.reduce_all((n(x[0]) > 2, n(x[0]) < 9)), lambda: x[:, 1:], lambda: x),
    "own reversal": lambda x: tf.reverse_sequence(x, tf.cast(x[:, 0, 0] > 0, tf.int32) + 1, 1),
    "own counts": lambda x: x + tf.cast(tf.ensure_shape(
        tf.math.bincount(tf.cast(x[:, 0] > 0, tf.int32), minlength=4, maxlength=4, axis=-1), [None, 4]),
        tf.float32)[:, None],
    "hashes": lambda x: x * tf.cast(tf.strings.to_hash_bucket_fast(tf.as_string(x, precision=1), 5), tf.float32),
    "padded to a multiple": lambda x: tf.pad(x, [[0, 0], [0, -tf.shape(x)[1] % 4], [0, 1]]),
    "padded to a box": lambda x: tf.image.pad_to_bounding_box(x[..., None], 1, 0, 5, tf.shape(x)[2]),
    "own spectrogram with an end": lambda x: tf.abs(tf.signal.stft(tf.reshape(x, [-1, 12]), 6, 4, pad_end=True)),
    "own derivative": derivative,
    "own largest by bits": lambda x: x * tf.cast(K.ops.argmax(x, -1) if hasattr(K, "ops") else tf.argmax(x, -1),
                                                 tf.float32)[..., None],
    "own bits": lambda x: x * tf.cast(tf.bitcast(tf.cast(x > 0, tf.uint16), tf.uint8), tf.float32)[..., 0],
    "own roll": lambda x: tf.roll(x, 1, 1),
    "own first step": lambda x: x[:, 0],
    "own last steps": lambda x: x[:, -2:, None, ..., :2],
    "flat and back": lambda x: tf.reshape(tf.reshape(x, [-1, 4]) * 2.0, tf.shape(x)),
    "flat and back by size": lambda x: tf.reshape(tf.reshape(x, [n(x) * 6, 2]), [n(x), -1]),
    "joined with zeros": lambda x: tf.concat([x, tf.zeros([n(x), 1, 4])], 1),
    "joined with zeros like": lambda x: tf.concat([tf.zeros_like(x[:, :1]), x], 1),
    "where": lambda x: tf.where(x > 0, x, tf.zeros_like(x)),
    "loop with a state": own_state_loop,
    "tf.function": lambda x: tf.function(lambda y: tf.tanh(y) + 1.0)(x),
    "public branch": lambda x: tf.cond(STATE[0] > 5.0, lambda: x, lambda: 2.0 * x),
    "swish": tf.nn.swish,
    "resized": lambda x: tf.image.resize(x[..., None], [2, 2]),
}  # fmt: skip
LAYERS = [L.Flatten, lambda: L.Permute((2, 1)), lambda: L.Reshape((2, -1)), lambda: L.ZeroPadding1D(1),
          lambda: L.Cropping1D(1), lambda: L.UpSampling1D(2), L.GlobalMaxPooling1D, L.GlobalAveragePooling1D,
          lambda: L.MaxPooling1D(2), lambda: L.AveragePooling1D(2, padding="same"), L.Softmax,
          lambda: L.Activation("gelu")]  # fmt: skip
OF_IMAGES = [
    lambda: L.ZeroPadding2D(1), lambda: L.Cropping2D(1), lambda: L.UpSampling2D(2), lambda: L.Resizing(2, 2),
    lambda: L.UpSampling2D(2, interpolation="bilinear"), L.GlobalAveragePooling2D, L.GlobalMaxPooling2D,
    lambda: L.AveragePooling2D(2, padding="same"), lambda: L.Reshape((-1, 2)),
    lambda: L.CenterCrop(2, 2), lambda: L.Resizing(2, 3, crop_to_aspect_ratio=True),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_what_keeps_examples_apart_is_exact(part):
    check_exact(*[L.Lambda(function) for function in list(ALLOWED.values())[part::4]])


@pytest.mark.slow
@pytest.mark.both_stacks
def test_layers_without_weights_are_exact():
    check_exact(*[layer() for layer in LAYERS])
    x = K.Input((4, 4, 2))
    convolved = L.Conv2D(2, 2)(x)
    check_model(K.Model(x, [layer()(convolved) for layer in OF_IMAGES]), normal(B, 4, 4, 2))


@pytest.mark.slow
def test_joining_layers_are_exact():
    a, b = K.Input((4,)), K.Input((4,))
    parts = [L.Dense(3, activation="tanh")(a), L.Dense(3)(b)]
    joining = [L.Add, L.Subtract, L.Multiply, L.Average, L.Maximum, L.Minimum, L.Concatenate, lambda: L.Dot(1)]
    check_model(K.Model([a, b], [layer()(parts) for layer in joining]), [normal(B, 4), normal(B, 4, seed=1)])


# -- numbers and states that hold a batch ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_number_handed_in_from_a_batch_is_refused():
    @tf.function(input_signature=[tf.TensorSpec([None, 4]), tf.TensorSpec([])])
    def inner(x, shift):
        return per_example_norms(total(d(x) - shift), [W])

    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def outer(x):
        return inner(x, tf.reduce_mean(d(x)))

    @tf.function
    def next_of(batches):
        x, shift = next(batches)
        return per_example_norms(total(d(x) - shift), [W])

    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def loop(x):
        shift, norms = tf.constant(0.0), tf.zeros([tf.shape(x)[0]])
        for _ in tf.range(2):
            norms = per_example_norms(total(d(x) - shift), [W])
            shift = tf.reduce_mean(d(x))
        return norms

    batches = tf.data.Dataset.from_tensor_slices(normal(8, 4)).batch(4).map(lambda x: (x, tf.reduce_mean(x)))
    for call in (lambda: outer(normal(B, 4)), lambda: next_of(iter(batches)), lambda: loop(normal(B, 4))):
        with pytest.raises(PrivacyError, match="hands in a number that may come from examples"):
            call()


def test_weights_of_places_in_a_fixed_batch_are_refused():
    @tf.function(input_signature=[tf.TensorSpec([4, 4])])
    def step(x):
        return per_example_norms(tf.reduce_sum(total(d(x)) * tf.constant([1.0, 0.0, 0.0, 0.0])), [W])

    with pytest.raises(PrivacyError, match="by its position in the batch"):
        step(normal(4, 4))


def test_lengths_that_the_batch_decides_are_warned_of():
    @tf.function(input_signature=[tf.TensorSpec([None, None, 4])])
    def step(x):
        return per_example_norms(tf.reduce_sum(d(x) ** 2, [1, 2]), [W])

    with pytest.warns(UserWarning, match=r"lengths that are not fixed.*mask the padding"):
        step(normal(B, 3, 4))


class Keeps(K.Model):
    """Its state is what ``write`` makes of the batch, after the step; ``read`` tells whether the loss has it."""

    def __init__(self, read, write):
        super().__init__()
        self.dense, self.read, self.write = L.Dense(1), read, write
        self.state = self.add_weight(name="state", shape=(1,), initializer="zeros", trainable=False)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            p = self.dense(x)
            loss = tf.reduce_mean((p - y - (tf.convert_to_tensor(self.state) if self.read else 0.0)) ** 2)
        tape = {} if hasattr(self.optimizer, "scale_loss") else {"tape": tape}
        self.optimizer.minimize(loss, self.dense.trainable_variables, **tape)
        self.state.assign(self.write(self, p))
        return {"loss": loss}


@pytest.mark.slow
@pytest.mark.parametrize("read", [True, False])
def test_what_a_step_leaves_of_its_batch_is_refused_before_it_runs(read):
    def fit(write):
        x, y = normal(12, 4), normal(12, 1, seed=1)
        model = Keeps(read, write)
        model(x[:1])
        model.compile(tfdpfl.DPSGD(1.0, 1.0))
        models.append(model)
        model.fit(x, y, batch_size=4, callbacks=[tfdpfl.callbacks.PrivacyBudget(12, 1e-2)], verbose=0)

    models = []
    fit(lambda self, p: self.dense.bias * 0.5)  # which is public
    with pytest.raises(PrivacyError, match="writes batch data to" if read else "'.*state.*', which is saved"):
        fit(lambda self, p: tf.reduce_mean(p, 0))
    assert models[-1].optimizer.num_dp_steps == 0


class Beside(Keeps):
    """Trains a second layer without the private optimizer: on the data, or on numbers drawn for the purpose."""

    def __init__(self, draw, plain):
        super().__init__(False, lambda self, p: self.dense.bias * 0.5)
        self.second, self.draw, self.plain = L.Dense(1), draw, plain

    def call(self, x):
        return self.second(self.dense(x))

    def train_step(self, data):
        logs = super().train_step(data)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(self.draw(data[0])) ** 2)
        variables = self.second.trainable_variables
        gradients = tape.gradient(loss, variables)
        if self.plain is None:
            for v, g in zip(variables, gradients, strict=True):
                v.assign(v - g)
        else:
            self.plain.apply_gradients(zip(gradients, variables, strict=True))
        return logs


@pytest.mark.slow
@pytest.mark.parametrize(("plain", "draw", "fine"), [
    (lambda: None, lambda x: tf.random.normal([8, 4]), True),
    (lambda: tf.keras.optimizers.Adam(), lambda x: tf.random.normal([8, 4]), True),
    (lambda: tf.keras.optimizers.Adam(), lambda x: x, False),
    (lambda: None, lambda x: tf.random.normal(tf.shape(x)), False),  # how many examples there are is not public, either
], ids=["numbers", "numbers by Adam", "the batch by Adam", "numbers by the batch's size"])  # fmt: skip
def test_weights_that_another_optimizer_trains_have_no_price(plain, draw, fine):
    x, y = normal(12, 4), normal(12, 1, seed=1)
    model = Beside(draw, plain())
    model(x[:1])
    model.compile(tfdpfl.DPSGD(1.0, 1.0))
    budget = tfdpfl.callbacks.PrivacyBudget(12, 1e-2, accountant="rdp")
    fit = lambda: model.fit(x, y, batch_size=5, callbacks=[budget], verbose=0)
    if fine:
        assert fit().history["epsilon"][-1] < 50
    else:
        with pytest.raises(PrivacyError, match=r"writes batch data to .*which is saved with the model"):
            fit()


class Remembers(L.Layer):
    """Keeps a statistic of the last batch, which training itself does not read."""

    def __init__(self):
        super().__init__()
        self.mean = self.add_weight(name="remembered", shape=(4,), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.mean.assign(tf.reduce_mean(x, 0))
            return x
        return x - self.mean


@pytest.mark.slow
def test_a_statistic_that_a_layer_keeps_is_refused_before_the_first_update():
    """Also without PrivacyBudget; and where the model is only looked at."""
    x, y = normal(12, 4), normal(12, 1, seed=1)
    model = K.Sequential([K.Input((4,)), Remembers(), L.Dense(1)])
    model.compile(tfdpfl.DPSGD(1.0, 1.0), "mse")
    before = model.get_weights()
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    for look in (lambda: model.fit(x, y, verbose=0), lambda: tfdpfl.clipping.validate(model, (x, y)),
                 lambda: tfdpfl.clipping.explain(model, batches)):  # fmt: skip
        with pytest.raises(PrivacyError, match=r"writes batch data to .*remembered.*which is saved with the model"):
            look()
    assert model.optimizer.num_dp_steps == 0
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))


class Around(K.Model):
    """The private update is in a tf.function of its own; ``beside`` is what the train_step does around it."""

    def __init__(self, beside, reads=False):
        super().__init__()
        self.dense, self.aux, self.sgd = L.Dense(1), L.Dense(1), K.optimizers.SGD(0.1)
        self.state = self.add_weight(name="state", shape=(4,), initializer="zeros", trainable=False)
        self.beside, self.reads = beside, reads

    def call(self, x):
        return self.dense(x) + 0.0 * self.aux(x)

    @tf.function
    def private(self, x, y):
        less = tf.convert_to_tensor(self.state) if self.reads else 0.0
        self.optimizer.minimize(lambda: tf.reduce_mean((self.dense(x - less) - y) ** 2), self.dense.trainable_variables)
        return tf.reduce_mean(self.dense(x))

    def plain(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.aux(x) ** 2)
        variables = self.aux.trainable_variables
        self.sgd.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    def train_step(self, data):
        shown = self.beside(self, *data)
        return {"loss": shown if tf.is_tensor(shown) else 0.0}


def beside(what):
    return lambda self, x, y: (self.private(x, y), what(self, x))


def average(self, x):
    self.state.assign(0.9 * tf.convert_to_tensor(self.state) + tf.reshape(tf.convert_to_tensor(self.dense.kernel), [4]))


def public(self, x, y):
    """Another private step, an average of weights, other weights' training on numbers; and a loss that is shown."""
    self.private(x, x[:, :1])
    average(self, x)
    self.plain(tf.ones([3, 4]))
    return self.private(x, y)


AROUND = {
    "public": public,
    "trained on the batch": beside(lambda self, x: self.plain(x)),
    "trained on the batch by a function": beside(lambda self, x: tf.function(self.plain)(x)),
    "a statistic": beside(lambda self, x: self.state.assign(tf.reduce_mean(x, 0))),
    "a statistic in a loop's condition": beside(lambda self, x: tf.while_loop(
        lambda i: self.state.assign(tf.reduce_mean(x, 0))[0] * 0.0 + i < 1.0, lambda i: i + 1.0, [0.0])),
    "trained beside a branch": lambda self, x, y: (
        tf.cond(self.optimizer.iterations < 9, lambda: self.private(x, y), lambda: 0.0), self.plain(x)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "together"), [
    ("public", 1), ("public", 2), ("trained on the batch", 1), ("trained on the batch by a function", 1),
    ("a statistic", 2), ("a statistic in a loop's condition", 1), ("trained beside a branch", 2)])  # fmt: skip
def test_what_is_done_around_a_private_step_counts(name, together):
    x = normal(12, 4)
    model = Around(AROUND[name])
    model(x)
    model.sgd.build(model.aux.trainable_variables)
    model.compile(tfdpfl.DPSGD(1.0, 1.0), steps_per_execution=together)
    model.optimizer.build(model.dense.trainable_variables)
    budget = tfdpfl.callbacks.PrivacyBudget(12, 1e-2, accountant="rdp")
    fit = lambda: model.fit(x, x[:, :1], batch_size=3, callbacks=[budget], verbose=0)
    if name == "public":
        assert np.isfinite(fit().history["epsilon"][-1])
    else:
        with pytest.raises(PrivacyError, match=r"writes batch data to .*which is saved with the model"):
            fit()


@pytest.mark.slow
def test_what_is_left_around_a_private_step_for_its_next_loss_is_refused():
    x = normal(12, 4)
    model = Around(AROUND["a statistic"], reads=True)
    model(x)
    model.compile(tfdpfl.DPSGD(1.0, 1.0))
    model.optimizer.build(model.dense.trainable_variables)
    with pytest.raises(PrivacyError, match=r"writes batch data to '.*state"):
        model.fit(x, x[:, :1], batch_size=3, steps_per_epoch=1, verbose=0)
    assert model.optimizer.num_dp_steps == 0


@pytest.mark.slow
def test_two_private_updates_in_one_step_are_two_steps():
    model = K.Sequential([K.Input((4,)), L.Dense(1)])
    first, second = tfdpfl.DPSGD(0.5, 0.0, learning_rate=1.0), tfdpfl.DPSGD(0.5, 0.0, learning_rate=1.0)
    for optimizer in (first, second):
        optimizer.build(model.trainable_variables)

    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def step(x):
        for optimizer in (first, second):
            optimizer.minimize(lambda: tf.reduce_mean((model(x) - 9.0) ** 2), model.trainable_variables)

    before = model.get_weights()
    step(normal(B, 4))
    moved = np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(model.get_weights(), before, strict=True)))
    assert 0.5 < moved <= 1.0
    assert first.num_dp_steps == second.num_dp_steps == 1


def test_a_pools_gradient_at_fixed_places_is_refused():
    """Rows of what is fixed belong to places in the batch, not to examples."""
    fixed, w = tf.constant(normal(B, 4, 4, 1)), tf.Variable(2.0)
    pooled = tf.nn.max_pool2d(fixed, 2, 2, "VALID")

    def losses(x):
        back = tf.raw_ops.MaxPoolGrad(
            orig_input=fixed, orig_output=pooled, grad=w * tf.reshape(x, [-1, 2, 2, 1]), ksize=[1, 2, 2, 1],
            strides=[1, 2, 2, 1], padding="VALID",
        )  # fmt: skip
        return example_losses(back)

    with pytest.raises(PrivacyError, match="MaxPoolGrad"):
        next(clip_sum(losses, [w], [normal(B, 4)], 1.0))


@pytest.mark.parametrize(("after", "static"), [
    pytest.param(lambda: [L.Dropout(0.2)], None, id="dropout"),
    pytest.param(lambda: [L.SpatialDropout1D(0.2)], None, id="spatial dropout"),
    pytest.param(lambda: [L.LSTM(3)], None, id="lstm"), pytest.param(lambda: [L.LSTM(3)], 4, id="lstm-static"),
    pytest.param(lambda: [L.Lambda(lambda x: x + tf.random.normal(tf.shape(x)))], None, id="random normal"),
])  # fmt: skip
def test_a_layer_that_takes_its_shape_from_normalised_examples_is_not_blamed(after, static):
    """Its shape is not known because the examples met before: that is what a user can mend."""
    model = tf.keras.Sequential(
        [tf.keras.Input((7, 3), batch_size=static), L.BatchNormalization(name="its_bn"), *after(), L.Dense(1)]
    )
    model.compile(tfdpfl.DPSGD(1.0, 1.0, learning_rate=0.1), "mse")
    with pytest.raises(PrivacyError, match=r"its_bn.*GroupNormalization"):
        model.fit(np.ones((8, 7, 3)), np.ones((8, 1)), batch_size=4, verbose=0)
