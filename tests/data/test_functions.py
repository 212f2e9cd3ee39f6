"""An example of a data set changes one row, and none of the others: what TensorFlow shows of its transformations."""

import re

import numpy as np
import pytest
import tensorflow as tf

from tfdpfl.data import poisson_batches
from tfdpfl.data.functions import check_apart, check_no_copies, check_once, out_of_order
from tfdpfl.errors import PrivacyError

N = 64
X = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
Y = (X.sum(1) > 0).astype(np.float32)
ROWS = tf.data.Dataset.from_tensor_slices((X, Y))
SAME = tf.data.Dataset.from_tensor_slices((X, Y))  # another object of the same arrays
ONLY_X, ONLY_Y = tf.data.Dataset.from_tensor_slices(X), tf.data.Dataset.from_tensor_slices(Y)
TURNED = ROWS.shuffle(9, seed=1)
TABLE, MEAN, COUNT = tf.constant(X), tf.Variable(tf.zeros(4)), tf.Variable(0)
WORDS = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3], [4]]))
LENGTHS = tf.data.Dataset.range(9).map(lambda i: tf.zeros([i]))
Dataset = tf.data.Dataset


def rare(x, y):
    return y > 0


def common(x, y):
    return y < 1


def kept(seed):
    return ROWS.shuffle(9, seed=seed, reshuffle_each_iteration=False)


def unseeded(data):
    """As where no global seed is set."""
    data._seed = data._seed2 = tf.constant(0, tf.int64)
    return data


def drawn(*_):
    return tf.gather(TABLE, tf.random.uniform([], 0, N, tf.int32))


def learned(x):
    return MEAN.assign(0.9 * MEAN + 0.1 * x)


def mixed(x, y):
    order = tf.random.shuffle(tf.range(tf.shape(x)[0]))
    return x + tf.gather(x, order), y


MEET = {
    "mixup in a batch": (lambda: ROWS.batch(8).map(mixed), "GatherV2 .* picks examples of the batch"),
    "reversed": (lambda: ROWS.batch(8).map(lambda x, y: (x + x[::-1], y)), "takes some examples of the batch"),
    "rolled": (lambda: ROWS.batch(8).map(lambda x, y: (x + tf.roll(x, 1, 0), y)), "works along the batch axis"),
    "centred": (lambda: ROWS.batch(8).map(lambda x, y: (x - tf.reduce_mean(x, 0), y)), "reduces over the batch"),
    "centred labels": (lambda: ROWS.batch(8).map(lambda x, y: (x, y - tf.reduce_mean(y))), "reduces over the batch"),
    "tiled": (lambda: ROWS.batch(8).map(lambda x, y: (tf.tile(x, [2, 1]), tf.tile(y, [2]))), "Tile .* repeats"),
    "repeated": (
        lambda: ROWS.batch(8).map(lambda x, y: (tf.repeat(x, 2, axis=0), tf.repeat(y, 2))), "several rows of each"),
    "copied and flattened": (
        lambda: ROWS.batch(8).map(lambda x, y: (tf.reshape(tf.stack([x, -x], 1), [-1, 4]), tf.repeat(y, 2))),
        "several rows of each"),
    "pieces as rows": (
        lambda: ROWS.batch(8).map(lambda x, y: (tf.reshape(x, [-1, 2]), tf.repeat(y, 2))), "several rows of each"),
    "behind a batch that was taken apart": (
        lambda: ROWS.batch(16).map(lambda x, y: (x / tf.reduce_max(x), y)).unbatch().batch(8), "reduces over"),
    "of poisson batches": (
        lambda: poisson_batches((X, Y), 0.1, 5).map(lambda x, y: (x - tf.reduce_mean(x, 0), y)), "reduces over"),
    "mixup of two passes": (
        lambda: Dataset.zip((ROWS.shuffle(N), SAME.shuffle(N))).map(lambda a, b: (a[0] + b[0], a[1])).batch(8),
        "ZipDataset joins data sets that hold the same examples, in different orders"),
    "two seeds": (lambda: Dataset.zip((ROWS.shuffle(9, seed=1), SAME.shuffle(9, seed=2))).batch(8), "ZipDataset joins"),
    "two without a seed": (
        lambda: Dataset.zip((unseeded(ROWS.shuffle(9)), unseeded(SAME.shuffle(9)))).batch(8), "ZipDataset joins"),
    "one shuffle in two places": (lambda: Dataset.zip((TURNED, TURNED)).batch(8), "ZipDataset joins"),
    "overlapping parts": (lambda: ROWS.take(40).concatenate(SAME.skip(39)).batch(8), "ConcatenateDataset joins"),
    "overlapping batches": (lambda: (lambda d: d.take(4).concatenate(d.skip(3)))(ROWS.batch(8)), "joins"),
    "batches of two sizes": (lambda: ROWS.batch(8).take(3).concatenate(ROWS.batch(4).skip(3)), "joins"),
    "a shard twice": (lambda: ROWS.shard(6, 2).concatenate(SAME.shard(4, 0)).batch(8), "ConcatenateDataset joins"),
    "a third part that overlaps": (
        lambda: ROWS.take(20).concatenate(ROWS.skip(20).take(20)).concatenate(ROWS.skip(39)).batch(8), "joins"),
    "parts of two orders": (
        lambda: kept(1).take(9).concatenate(kept(2).skip(9)).batch(8), "ConcatenateDataset joins"),
    "parts of an order that is drawn twice": (
        lambda: (lambda d: d.take(9).concatenate(d.skip(9)))(ROWS.shuffle(N)).batch(8), "ConcatenateDataset joins"),
    "a class twice": (
        lambda: (lambda d: d.concatenate(d.map(lambda x, y: (-x, y))))(ROWS.filter(rare)).batch(8), "joins"),
    "a class twice, beside the others": (
        lambda: ROWS.filter(common).concatenate(ROWS.filter(rare)).concatenate(SAME.filter(rare)).batch(8), "joins"),
    "one side twice": (
        lambda: Dataset.zip((ROWS.flat_map(lambda x, y: Dataset.from_tensors((x, y)).repeat(2)), ROWS)).batch(8),
        "ZipDataset joins"),
    "pairs": (lambda: Dataset.zip((ROWS, ROWS.skip(1))).batch(8), "ZipDataset joins"),
    "copies": (lambda: ROWS.concatenate(SAME.map(lambda x, y: (-x, y))).batch(8), "ConcatenateDataset joins"),
    "a split that leaks": (
        lambda: ROWS.shuffle(N).take(9).concatenate(ROWS.shuffle(N).skip(9)).batch(8), "ConcatenateDataset joins"),
    "the same twice": (
        lambda: Dataset.sample_from_datasets([ROWS, ROWS.filter(lambda x, y: y > 0)]).batch(8), "in turns"),
    "drawn with replacement": (lambda: Dataset.range(N).map(drawn).batch(8), "reads rows at random from a table of 64"),
    "a row drawn": (
        lambda: Dataset.range(N).map(lambda i: TABLE[tf.random.uniform([], 0, N, tf.int64)]).batch(8), "reads rows at"),
    "a slice drawn": (
        lambda: Dataset.range(N).map(lambda i: tf.slice(TABLE, [tf.random.uniform([], 0, N, tf.int32), 0], [1, 4])[0]
                                     ).batch(8), "reads rows at random"),
    "a row drawn by its place": (
        lambda: Dataset.range(N).map(lambda i: tf.gather_nd(TABLE, [tf.random.uniform([], 0, N, tf.int32)])).batch(8),
        "reads rows at random"),
    "a row drawn by weights": (
        lambda: Dataset.range(N).map(lambda i: TABLE[tf.random.categorical(tf.zeros([1, N]), 1)[0, 0]]).batch(8),
        "reads rows at random"),
    "a row drawn by a truncated normal": (
        lambda: Dataset.range(N).map(lambda i: TABLE[tf.cast(tf.random.truncated_normal([]) + 9, tf.int32)]).batch(8),
        "reads rows at random"),
    "each row for two numbers": (
        lambda: Dataset.range(N).shuffle(N).map(lambda i: tf.gather(TABLE, i // 2)).batch(8), "for several numbers"),
    "each row for two numbers, in a call": (
        lambda: Dataset.range(N).map(tf.function(lambda i: tf.gather(TABLE, i // 2))).batch(8), "for several numbers"),
    "each place for two numbers": (
        lambda: Dataset.range(N).map(lambda i: tf.gather_nd(TABLE, [i // 2])).batch(8), "for several numbers"),
    "the same in batches": (lambda: Dataset.range(N).batch(8).map(lambda i: tf.gather(TABLE, i % 60)), "for several"),
    "the same by counter": (
        lambda: Dataset.counter().map(lambda i: TABLE[i * 31 % 62]).batch(8), "StridedSlice.* for several|for several"),
    "drawn by a branch": (
        lambda: Dataset.range(N).map(lambda i: tf.cond(i > 3, lambda: TABLE[0], drawn)).batch(8), "reads rows"),
    "a number that a branch draws": (
        lambda: Dataset.range(N).map(lambda i: TABLE[tf.cond(
            i > 3, lambda: tf.constant(0, tf.int64), lambda: tf.random.uniform([], 0, N, tf.int64))]).batch(8),
        "reads rows at random"),
    "drawn by a data set": (
        lambda: Dataset.random(seed=1).take(N).map(lambda i: tf.gather(TABLE, i % N)).batch(8), "reads rows at random"),
    "drawn from an element": (
        lambda: Dataset.zip((Dataset.from_tensors(X).repeat(N), Dataset.range(N))).map(
            lambda x, i: tf.gather(x, tf.random.uniform([], 0, N, tf.int32))).batch(8), "reads rows at random"),
    "sorted": (lambda: ROWS.batch(8).map(lambda x, y: (tf.sort(x, 0), y)), "another first row changes the other rows"),
    "sorted by label": (
        lambda: ROWS.batch(8, drop_remainder=True).map(lambda x, y: (tf.gather(x, tf.argsort(y)), y)),
        "works along the batch axis"),
    "centred in its class": (
        lambda: ROWS.batch(8).map(lambda x, y: (x - tf.gather(tf.math.unsorted_segment_mean(
            x, tf.cast(y, tf.int32), 2), tf.cast(y, tf.int32)), y)), "another first row"),
    "centred one by one": (
        lambda: ROWS.batch(8).map(lambda x, y: (tf.map_fn(lambda t: t - tf.reduce_mean(x, 0), x), y)), "another first"),
    "running sums": (lambda: ROWS.batch(8).map(lambda x, y: (tf.scan(lambda a, b: a + b, x), y)), "another first row"),
    "sorted, with noise": (
        lambda: ROWS.batch(8).map(lambda x, y: (tf.sort(x, 0) + tf.random.normal([1, 4]), y)), "another first row"),
    "sorted, with noise, in a call": (
        lambda: ROWS.batch(8).map(tf.function(lambda x, y: (tf.sort(x, 0) + tf.random.normal([1, 4]), y))),
        "another first row"),
    "sorted, less two draws": (
        lambda: ROWS.batch(8).map(lambda x, y: (
            tf.sort(x, 0) * (tf.random.normal([1, 4]) - tf.random.normal([1, 4])), y)), "another first row"),
    "turned by one": (
        lambda: ROWS.batch(8).map(lambda x, y: (tf.cond(tf.reduce_max(y) > 9, lambda: x, lambda: -x), y)), "branch by"),
    "padded": (lambda: LENGTHS.padded_batch(3), "longest example.* and cut longer examples to it: padded_batch"),
    "padded in buckets": (
        lambda: LENGTHS.bucket_by_sequence_length(lambda t: tf.shape(t)[0], [4], [3, 3]), "pads each batch"),
    "ragged made dense": (lambda: WORDS.ragged_batch(2).map(lambda t: t.to_tensor()), "pads each batch"),
    "ragged made dense in a call": (
        lambda: WORDS.ragged_batch(2).map(tf.function(lambda t: t.to_tensor())), "pads each batch"),
    "batches dropped": (
        lambda: ROWS.batch(8).filter(lambda x, y: tf.reduce_max(y) > 0), "leaves out a whole batch for what"),
    "cut off": (lambda: ROWS.take_while(lambda x, y: y < 1).batch(8), "leaves out all examples behind one"),
    "a running mean": (
        lambda: ROWS.map(lambda x, y: (x - learned(x), y)).batch(8), "to the examples behind"),
    "an entry of a variable": (lambda: ROWS.map(lambda x, y: (x, MEAN[0].assign(x[0]))).batch(8), "examples behind it"),
    "a running mean in a call": (lambda: ROWS.map(tf.function(lambda x, y: (x - learned(x), y))).batch(8), "behind it"),
    "a running mean in a branch": (
        lambda: ROWS.map(lambda x, y: (tf.cond(MEAN[0] < 9, lambda: x - learned(x), lambda: x), y)), "behind it"),
    "a running mean in a loop": (
        lambda: ROWS.map(lambda x, y: (tf.while_loop(
            lambda i, s: i < 2, lambda i, s: (i + 1, x - learned(s)), (0, tf.zeros(4)))[1], y)), "behind it"),
    "a flag that some examples set": (
        lambda: ROWS.map(lambda x, y: (x, tf.cond(y > 0, lambda: COUNT.assign(1), lambda: COUNT + 0))), "behind it"),
    "centred in a function of windows": (
        lambda: ONLY_X.window(8).flat_map(lambda w: w.batch(8).map(lambda x: x - tf.reduce_mean(x, 0))),
        "reduces over the batch"),
    "the same taken apart": (
        lambda: ONLY_X.window(8).flat_map(lambda w: w.batch(8).map(lambda x: x - tf.reduce_mean(x, 0))).unbatch().batch(
            8), "reduces over the batch"),
    "centred before windows": (
        lambda: ONLY_X.batch(8).map(lambda x: x - tf.reduce_mean(x, 0)).interleave(Dataset.from_tensor_slices).batch(8),
        "reduces over the batch"),
    "drawn inside": (lambda: Dataset.range(8).flat_map(lambda i: Dataset.range(8).map(drawn)).batch(8), "reads rows"),
    "a running sum inside": (
        lambda: ONLY_X.window(8).flat_map(lambda w: w.scan(tf.zeros(4), lambda s, e: (s + e, s + e))), "behind it"),
    "windows that overlap, taken apart": (
        lambda: ONLY_X.window(8, 4, drop_remainder=True).flat_map(lambda w: w).batch(8), "takes windows apart that"),
    "pieces that overlap, in turns": (
        lambda: Dataset.range(8).interleave(lambda i: ROWS.skip(i * 4).take(8), cycle_length=4).batch(8),
        "InterleaveDataset reads one data set of 64 examples or more for several elements"),
    "pieces that overlap": (lambda: Dataset.range(8).flat_map(lambda i: ROWS.shard(9, i % 7)).batch(8), "reads one"),
    "a half twice": (lambda: Dataset.range(2).flat_map(lambda i: ROWS.take(32)).batch(8), "reads one data set of 64"),
    "pieces that are drawn": (
        lambda: Dataset.range(8).flat_map(lambda i: ROWS.skip(tf.random.uniform([], 0, N, tf.int64)).take(8)).batch(8),
        "reads one data set"),
    "pieces of several orders": (
        lambda: Dataset.range(8).flat_map(lambda i: ROWS.shuffle(N).skip(i * 8).take(8)).batch(8), "reads one data"),
    "for each row of a table": (
        lambda: ONLY_X.take(N).flat_map(lambda x: ROWS.map(lambda x, y: x).take(1)).batch(8), "reads one data set"),
    "running sum": (
        lambda: ROWS.scan(tf.zeros(4), lambda s, e: (s + e[0], (s, e[1]))).batch(8), "to the examples behind it"),
}  # fmt: skip


@pytest.mark.parametrize("name", MEET)
def test_examples_that_meet_or_come_twice_are_refused(name):
    data, message = MEET[name]
    with pytest.raises(PrivacyError, match=message):
        check_apart(data(), N, batched=True)


def flipped(x, y):
    up = tf.random.uniform([tf.shape(x)[0], 1]) < 0.5
    return tf.where(up, x, -x) + tf.random.normal(tf.shape(x)), y


def among(x):
    """What the engine cannot follow. Draws behind it have no seed."""
    tf.random.set_seed(None)
    return tf.cast(tf.searchsorted([0.0, 1.0], x[:, 0]), tf.float32)[:, None]


APART = {
    "draws beside what cannot be followed": lambda: ROWS.batch(8).map(
        lambda x, y: (among(x) + tf.random.normal(tf.shape(x)), y)),
    "the same in a loop": lambda: ROWS.batch(8).map(
        lambda x, y: (among(x) + tf.map_fn(lambda t: t + tf.random.normal([4]), x), y)),
    "each its own draw": lambda: ROWS.shuffle(N).batch(8).map(flipped),
    "a small table": lambda: ROWS.map(lambda x, y: (x * tf.gather(tf.ones(9), tf.random.uniform([], 0, 9, tf.int32)), y)
                                      ).batch(8),
    "rows by number": lambda: Dataset.range(N).shuffle(N).map(lambda i: tf.gather(TABLE, i)).batch(8),
    "over the axes of an example": lambda: ROWS.batch(8).map(lambda x, y: (x - tf.reduce_mean(x, 1, keepdims=True), y)),
    "before the batch": lambda: ROWS.map(lambda x, y: (x - tf.reduce_mean(x, 0), y)).batch(8),
    "one by one": lambda: ROWS.batch(8).map(lambda x, y: (tf.map_fn(lambda t: t * 2, x), y)),
    "Python code": lambda: ROWS.batch(8).map(lambda x, y: (tf.numpy_function(np.sin, [x], tf.float32), y)),
    "sides of an example": lambda: Dataset.zip((ROWS.map(lambda x, y: x), ROWS.map(lambda x, y: y))).batch(8),
    "two views by one seed": lambda: Dataset.zip(
        (ROWS.shuffle(9, seed=1).map(lambda x, y: x).batch(8), SAME.shuffle(9, seed=1).map(lambda x, y: -x).batch(8))),
    "two arrays": lambda: Dataset.zip((Dataset.from_tensor_slices(X), Dataset.from_tensor_slices(Y))).batch(8),
    "seeds beside": lambda: Dataset.zip((ROWS, Dataset.random(), Dataset.random())).map(lambda e, *_: e).batch(8),
    "a split": lambda: ROWS.take(9).concatenate(SAME.skip(9)).batch(8),
    "a split in three": lambda: kept(1).take(9).concatenate(kept(1).skip(9).take(9).shuffle(N)).concatenate(
        kept(1).skip(18)).batch(8),
    "a split of batches": lambda: (lambda d: d.take(3).concatenate(d.skip(3)))(ROWS.batch(8)),
    "shards": lambda: Dataset.choose_from_datasets(
        [ROWS.shard(3, i) for i in range(3)], Dataset.range(3).repeat()).batch(8),
    "a class and the rest": lambda: ROWS.filter(common).concatenate(ROWS.filter(rare)).batch(8),
    "a split of a class": lambda: ROWS.filter(rare).take(9).concatenate(SAME.filter(rare).skip(9)).batch(8),
    "classes by a tensor": lambda: Dataset.sample_from_datasets(
        [ROWS.filter(lambda x, y, c=c: tf.equal(y, c[0])) for c in (tf.zeros(9), tf.ones(9))]).batch(8),
    "by class": lambda: Dataset.sample_from_datasets(
        [ROWS.filter(lambda x, y: y > 0).shuffle(N), ROWS.filter(lambda x, y: y < 1).shuffle(N)]).batch(8),
    "pieces in turns": lambda: Dataset.range(8).shuffle(8).interleave(
        lambda i: ROWS.skip(i * 8).take(8).shuffle(8), cycle_length=4).batch(8),
    "shards in turns": lambda: Dataset.range(4).interleave(lambda i: ROWS.shard(4, i)).batch(8),
    "pieces from a list": lambda: Dataset.from_tensor_slices([0, 9]).interleave(
        lambda i: ROWS.skip(tf.cast(i, tf.int64)).take(9)).batch(8),
    "classes in turns": lambda: Dataset.range(2).interleave(
        lambda c: ROWS.filter(lambda x, y: tf.equal(tf.cast(y, tf.int64), c))).batch(8),
    "all at once": lambda: Dataset.range(1).flat_map(lambda _: ROWS).batch(8),
    "a background of a few": lambda: ROWS.flat_map(
        lambda x, y: Dataset.from_tensor_slices(tf.ones([9, 4])).shuffle(9).take(1).map(lambda b: (x + b, y))).batch(8),
    "windows taken apart": lambda: ONLY_X.window(8).flat_map(lambda w: w).batch(8),
    "windows as rows": lambda: ONLY_X.window(8, 1, drop_remainder=True).flat_map(
        lambda w: w.batch(8).map(lambda x: x - tf.reduce_mean(x, 0))).batch(8),
    "a series": lambda: tf.keras.utils.timeseries_dataset_from_array(X, Y, 4, batch_size=8, shuffle=True),
    "a fixed length": lambda: LENGTHS.padded_batch(3, padded_shapes=[10]),
    "buckets": lambda: LENGTHS.bucket_by_sequence_length(
        lambda t: tf.shape(t)[0], [4, 10], [3, 3, 3], pad_to_bucket_boundary=True),
    "ragged, a fixed length": lambda: WORDS.ragged_batch(2).map(lambda t: t.to_tensor(shape=[None, 4])),
    "by number, in another order": lambda: Dataset.range(N).map(lambda i: tf.gather(TABLE, (i * 5 + 3) % N)).batch(8),
    "by number, in a call": lambda: Dataset.range(N).map(
        tf.function(lambda i: tf.gather(TABLE, (i * 5 + 3) % N))).batch(8),
    "passes by number": lambda: Dataset.counter().map(lambda i: tf.gather(TABLE, i % N)).batch(8),
    "counter beside": lambda: Dataset.zip((Dataset.counter(), ROWS)).map(lambda i, e: e).batch(8),
    "up to a number": lambda: ROWS.shuffle(N).enumerate().take_while(lambda i, e: i < 50).map(lambda i, e: e).batch(8),
    "whole batches": lambda: ROWS.batch(6).filter(lambda x, y: tf.shape(x)[0] == 6),
    "counted in a variable": lambda: ROWS.map(lambda x, y: (x, y, COUNT.assign_add(1))).batch(8),
    "counted": lambda: ROWS.scan(0, lambda s, e: (s + 1, (e[0], s))).batch(8),
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_examples_that_keep_apart_are_taken(name):
    check_apart(APART[name](), N, batched=True)


def test_augmentation_layers_keep_examples_apart():
    layers = tf.keras.layers
    images = Dataset.from_tensor_slices(np.zeros((8, 9, 9, 3), np.float32)).batch(4)
    layer = tf.keras.Sequential([layers.RandomFlip(), layers.RandomRotation(0.1), layers.RandomZoom(0.1)])
    augmented = lambda x: layer(x, training=True)
    for augment in (augmented, tf.function(augmented)):
        check_apart(images.map(augment), 8, batched=True)
    rare = images.unbatch().map(lambda x: tf.cond(x[0, 0, 0] > 0, lambda: augmented(x[None])[0], lambda: x))
    check_apart(rare.batch(4), 8, batched=True)


def test_what_is_drawn_from_is_looked_at_too():
    with pytest.raises(PrivacyError, match="reduces over the batch"):
        poisson_batches(ROWS.batch(8).map(lambda x, y: (x - tf.reduce_mean(x, 0), y)).unbatch(), 0.1, 5)
    with pytest.raises(PrivacyError, match="reads rows at random"):
        poisson_batches((X, Y), 0.1, 5, map_fn=lambda x, y: (x + drawn(), y))
    with pytest.raises(PrivacyError, match="joins"):
        check_once(ROWS.concatenate(ROWS), "each label is released")


@pytest.mark.parametrize("data, why", [
    (lambda: ROWS.filter(lambda x, y: tf.random.uniform([]) < 0.9), "FilterDataset draws at random"),
    (lambda: ROWS.filter(lambda x, y: tf.random.truncated_normal([]) < 0.9), "FilterDataset draws at random"),
    (lambda: ROWS.filter(tf.function(lambda x, y: tf.random.uniform([]) < 0.9)), "FilterDataset draws at random"),
    (lambda: Dataset.zip((ROWS, Dataset.random())).filter(lambda e, r: r > 9).map(lambda e, r: e), "Filter.* draws"),
    (lambda: ROWS.map(lambda *e: e, num_parallel_calls=2, deterministic=False), r"\(deterministic=False\)"),
    (lambda: ROWS.map(lambda *e: e, num_parallel_calls=2).with_options(unordered()), r"\(deterministic=False\)"),
    (lambda: ROWS.map(lambda x, y: (x + tf.random.normal([4]), y), num_parallel_calls=2), None),
    (lambda: Dataset.range(2).flat_map(lambda i: ROWS.shuffle(9)), "FlatMapDataset draws at random"),
    (lambda: ROWS.filter(lambda x, y: y > 0), None),
])  # fmt: skip
def test_an_order_that_is_another_in_each_pass_is_seen(data, why):
    found = out_of_order(data().batch(8))
    assert found is None if why is None else re.search(why, found)


def unordered():
    options = tf.data.Options()
    options.deterministic = False
    return options


BY_HAND = Dataset.from_tensor_slices((X.reshape(16, 4, 4), Y.reshape(16, 4)))
NAMES = Dataset.from_tensor_slices(["one file", "another"])


def doubled(x, y):
    return tf.stack([x, -x]), tf.stack([y, y])


def both(x, y):
    return Dataset.from_tensor_slices(doubled(x, y))


def joined(x, y):
    return tf.concat([x, x], 0), tf.concat([y, y], 0)


COPIES = {
    "repeated inside": lambda: ROWS.flat_map(lambda *e: Dataset.from_tensors(e).repeat(3)),
    "stacked": lambda: ROWS.flat_map(both),
    "stacked in turns": lambda: ROWS.interleave(both, num_parallel_calls=2).prefetch(1),
    "stacked features": lambda: ONLY_X.flat_map(lambda x: Dataset.from_tensor_slices(tf.stack([x, x]))),
    "stacked labels": lambda: ONLY_Y.flat_map(lambda y: Dataset.from_tensor_slices(tf.stack([y, y]))),
    "with numbers": lambda: ROWS.enumerate().flat_map(lambda i, e: both(*e)),
    "one for each of several numbers": lambda: ROWS.flat_map(lambda *e: Dataset.range(3).map(lambda i: e)),
    "parts with one label": lambda: ROWS.flat_map(
        lambda x, y: Dataset.from_tensor_slices((tf.reshape(x, [2, 2]), tf.repeat(y, 2)))),
    "a batch twice": lambda: ROWS.batch(8).flat_map(lambda x, y: Dataset.from_tensor_slices(joined(x, y))),
    "taken apart": lambda: ROWS.map(doubled).unbatch(),
    "taken apart later": lambda: ROWS.map(doubled).map(lambda x, y: (2 * x, y)).prefetch(2).unbatch().batch(8),
    "batches taken apart": lambda: ROWS.batch(8).map(joined).unbatch(),
    "labels taken apart": lambda: ONLY_Y.map(lambda y: tf.stack([y, y])).unbatch(),
    "files read twice": lambda: NAMES.interleave(lambda f: tf.data.TextLineDataset(f).repeat(2)),
}  # fmt: skip
SINGLE = {
    "the batches of a generator": lambda: Dataset.from_generator(
        lambda: iter([(X, Y)]), output_signature=(tf.TensorSpec([None, 4]), tf.TensorSpec([None]))
    ).map(lambda x, y: (x / 2, y)).unbatch(),
    "files": lambda: NAMES.interleave(tf.data.TextLineDataset, num_parallel_calls=2),
    "files with a label": lambda: Dataset.from_tensor_slices((["a", "b"], [0, 1])).flat_map(
        lambda f, y: tf.data.TextLineDataset(f).map(lambda t: (t, y))),
    "shards": lambda: Dataset.range(4).interleave(lambda i: ROWS.shard(4, i)),
    "batches": lambda: ROWS.batch(8).flat_map(lambda x, y: Dataset.from_tensor_slices((x / 2, y))),
    "one of each": lambda: ROWS.flat_map(lambda *e: Dataset.from_tensors(e).filter(rare)),
    "two views of an example": lambda: ROWS.map(lambda x, y: (tf.stack([x, -x]), y)).batch(8).unbatch(),
    "batches that were made by hand": lambda: BY_HAND.map(lambda x, y: (x / 2, y)).unbatch(),
}  # fmt: skip


@pytest.mark.parametrize("name", COPIES)
def test_copies_that_a_function_makes_of_an_example_are_refused(name):
    with pytest.raises(PrivacyError, match=r"makes copies.* and each label is released by itself"):
        check_no_copies(COPIES[name](), "each label is released by itself")


@pytest.mark.parametrize("name", SINGLE)
def test_one_element_of_each_row_is_taken(name):
    check_no_copies(SINGLE[name](), "each label is released by itself")
