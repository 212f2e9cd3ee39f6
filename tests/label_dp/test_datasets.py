"""A `tf.data.Dataset` has its labels released once, however often it is read."""

import numpy as np
import pytest
import tensorflow as tf
from label_cases import float_blobs, small_model

from tfdpfl.label_dp import (
    KMeansPrior,
    LabelPrivacy,
    RandomizedResponse,
    RandomizedResponseWithPrior,
    RROnBins,
    randomized_response,
)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "batched"), [("function", False), ("layer", False), ("transformer", True)])
def test_a_dataset_has_one_release_however_often_it_is_read(how, batched):
    x, y = float_blobs(100)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(100)
    dataset = dataset.batch(16) if batched else dataset
    private = {
        "function": lambda: randomized_response(dataset, 0.5, 3),
        "layer": lambda: LabelPrivacy(0.5, 3).cached(dataset),
        "transformer": lambda: RandomizedResponse(0.5, 3).fit_transform(dataset),
    }[how]()
    assert private.element_spec == dataset.element_spec
    truth = {row.tobytes(): int(label) for row, label in zip(x, y, strict=True)}

    def read():
        flat = private.unbatch() if batched else private
        return {row.tobytes(): int(label) for row, label in flat.as_numpy_iterator()}

    first = read()
    assert read() == read() == first and set(first) == set(truth)
    assert 10 < sum(first[row] != truth[row] for row in truth) < 90
    small_model().fit(private if batched else private.batch(10), epochs=2, verbose=0)


def test_a_dataset_of_labels_alone_and_with_weights():
    y = np.arange(12) % 3
    assert list(randomized_response(tf.data.Dataset.from_tensor_slices(y), 60.0, 3).as_numpy_iterator()) == list(y)
    weighted = tf.data.Dataset.from_tensor_slices((np.zeros((12, 2)), y, np.ones(12))).batch(5)
    elements = list(randomized_response(weighted, 60.0, 3).as_numpy_iterator())
    assert [len(e) for e in elements] == [3, 3, 3] and np.concatenate([e[1] for e in elements]).tolist() == y.tolist()
    names = tf.data.Dataset.from_tensor_slices(np.array(["b", "a"])[y % 2])
    assert [n.decode() for n in randomized_response(names, 60.0).as_numpy_iterator()] == list(
        np.array(["b", "a"])[y % 2]
    )


def test_a_dataset_through_priors_and_bins():
    x, y = float_blobs(300)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
    mechanism = RandomizedResponseWithPrior(2.0, KMeansPrior(1.0, 3), 3)
    private = mechanism.fit_transform(dataset)
    noisy = np.concatenate([label for _, label in private.as_numpy_iterator()])
    assert (noisy == y).mean() > 0.9 and mechanism.releases_ == 1 and mechanism.epsilon_spent == pytest.approx(2.0)
    floats = tf.data.Dataset.from_tensor_slices((x, y.astype(np.float64)))
    bins = RROnBins(8.0, prior=(range(3), np.ones(3) / 3))
    released = [float(label) for _, label in bins.fit_transform(floats).as_numpy_iterator()]
    assert set(released) <= set(bins.outputs_) and np.corrcoef(released, y)[0, 1] > 0.9


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (lambda: tf.data.Dataset.random(seed=1), "must be finite"),
        (lambda: tf.data.Dataset.range(3).repeat(2).batch(2), "repeats its examples, and each label is released"),
        (lambda: tf.data.Dataset.range(0), "at least one example"),
        (lambda: tf.data.Dataset.from_tensor_slices({"y": [1, 2]}), "must have labels or"),
    ],
)
def test_datasets_that_cannot_be_read_once_are_refused(dataset, message):
    with pytest.raises(ValueError, match=message):
        randomized_response(dataset(), 1.0, 3)


def two_of_each(x, y):
    return tf.stack([x, -x]), tf.stack([y, y])


@pytest.mark.parametrize(
    "copied",
    [
        lambda rows: rows.flat_map(lambda *e: tf.data.Dataset.from_tensors(e).repeat(3)),
        lambda rows: rows.map(two_of_each),
        lambda rows: rows.batch(4).map(lambda x, y: (tf.concat([x, -x], 0), tf.concat([y, y], 0))),
    ],
)
def test_a_label_that_is_copied_before_its_release_is_refused(copied):
    rows, mechanism = tf.data.Dataset.from_tensor_slices(float_blobs(12)), RandomizedResponse(1.0, 3)
    with pytest.raises(ValueError, match=r"makes copies.* before this step, and make copies of what comes out"):
        mechanism.fit_transform(copied(rows))
    with pytest.raises(ValueError, match="makes copies"):
        LabelPrivacy(1.0, 3).cached(copied(rows))
    assert mechanism.releases_ == 0
    assert len([*copied(mechanism.fit_transform(rows))]) > 2  # what was released may be copied


WEIGHTS = tf.constant([1.0, 5.0, 9.0])


@pytest.mark.parametrize(
    "weighed",
    [
        lambda rows: rows.map(lambda x, y: (x, y, tf.gather(WEIGHTS, y))),
        lambda rows: rows.batch(4).map(lambda x, y: (x, y, tf.gather(WEIGHTS, y))).map(lambda x, y, w: (2 * x, y, w)),
        lambda rows: rows.map(lambda x, y: (x + tf.cast(y, tf.float32), tf.cast(y, tf.int32))).shuffle(9).prefetch(2),
        lambda rows: rows.map(lambda x, y: (x, y, y)),
        lambda rows: rows.map(lambda x, y: (y, x + tf.cast(y, tf.float32))).map(lambda y, x: (x, y)),
    ],
)
def test_what_is_computed_from_the_true_label_is_not_handed_on(weighed):
    rows = tf.data.Dataset.from_tensor_slices(float_blobs(12))
    with pytest.raises(ValueError, match=r"computes another part of its elements from the label.* map what comes out"):
        RandomizedResponse(1.0, 3).fit_transform(weighed(rows))
    released = weighed(RandomizedResponse(1.0, 3).fit_transform(rows))
    assert len(next(iter(released))) >= 2


def test_parts_that_owe_nothing_to_the_label_are_handed_on():
    rows = tf.data.Dataset.from_tensor_slices(float_blobs(12))
    for kept in (
        rows.map(lambda x, y: (2 * x, tf.cast(y, tf.int32), tf.reduce_sum(x))),
        rows.batch(4).map(lambda x, y: (x, y, tf.ones_like(y))),
        rows.map(lambda x, y: {"x": x, "y": y}).map(lambda row: (row["x"], row["y"])),
        rows.enumerate().map(lambda i, row: row),
    ):
        assert len(list(RandomizedResponse(1.0, 3).fit_transform(kept))) >= 3
