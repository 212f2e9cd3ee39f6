"""Labels come back in the container and with the names in which they came."""

import math

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from tfdpfl.label_dp import ALIBI, RandomizedResponse, RROnBins, randomized_response


def test_labels_come_back_in_their_container():
    y = [0, 1, 2, 1]
    assert randomized_response(y, 50.0, 3).tolist() == y
    for dtype in (np.int8, np.uint8, np.int32, np.int64, np.float32):
        noisy = randomized_response(np.array(y, dtype), 50.0, 3)
        assert noisy.dtype == dtype and noisy.tolist() == y
    column = randomized_response(np.array(y)[:, None], 50.0, 3)
    assert column.shape == (4, 1)
    assert randomized_response(np.array([True, False]), 50.0).tolist() == [True, False]
    assert RandomizedResponse(1.0, 3).fit(y).transform([]).shape == (0,)
    for mechanism in (RROnBins(50.0, prior=(range(3), np.ones(3) / 3)), ALIBI(500.0, 3)):
        assert np.shape(mechanism.fit_transform(y))[0] == 4


class Series:
    """What is used of a pandas Series."""

    def __init__(self, data, index=None, name=None):
        self.data, self.index, self.name = np.asarray(data), index, name
        self.shape = self.data.shape

    def to_numpy(self):
        return self.data

    def __len__(self):
        return len(self.data)


def test_a_series_keeps_index_and_name():
    noisy = randomized_response(Series([0, 1, 1], index=[7, 8, 9], name="label"), 50.0, 2)
    assert isinstance(noisy, Series) and noisy.index == [7, 8, 9] and noisy.name == "label"
    assert noisy.data.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("y", "classes"),
    [
        (["dog", "cat", "dog"], ["cat", "dog"]),
        (np.array(["a", "b"], dtype=object), ["a", "b"]),
        ([-5, 1000, 7], [-5, 7, 1000]),
        ([2.0, 4.0], [2.0, 4.0]),
    ],
)
def test_classes_may_be_strings_or_any_integers(y, classes):
    mechanism = RandomizedResponse(1.0)
    noisy = mechanism.fit_transform(y)
    assert mechanism.classes_.tolist() == classes and set(noisy) <= set(classes)
    assert randomized_response(y, 60.0).tolist() == list(y)
    assert set(RandomizedResponse(0.5, classes=classes).fit_transform(list(y) * 50)) == set(classes)


def test_integers_may_come_as_objects():
    mechanism = RandomizedResponse(1.0, 4).fit(np.array([0, 1], object))
    assert mechanism.classes_.tolist() == [0, 1, 2, 3]
    assert set(mechanism.transform(np.array([0, 1] * 200, object))) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RandomizedResponse(1.0, 3).fit_transform([0, 3]), "y has the label .*3.*none of the classes 0, 1, 2"),
        (lambda: RandomizedResponse(1.0, 3).fit_transform([0, -1]), "y has the label .*-1"),
        (lambda: RandomizedResponse(1.0, 3).fit_transform([0.0, 1.5]), "must be classes, got .*1.5.*RROnBins"),
        (lambda: RandomizedResponse(1.0, 3).fit_transform([0.0, math.nan]), "must be classes, got .*nan"),
        (lambda: RandomizedResponse(1.0).fit(["a", "b"]).transform(["c"]), "label .*'c'.*a, b"),
        (lambda: RandomizedResponse(1.0).fit(["a", "b"]).transform([1]), "label"),
        (lambda: RandomizedResponse(1.0).fit(["a", "a"]), "only one class"),
        (lambda: RandomizedResponse(1.0).fit([]), "at least one label"),
        (lambda: RandomizedResponse(1.0, 3).fit(["a", "b"]), "num_classes=3, but y names 2.*list them in classes"),
        (lambda: RandomizedResponse(1.0, 3).fit(np.eye(3)), r"shape \[n\], got \[3, 3\].*argmax"),
        (lambda: RandomizedResponse(1.0).fit(np.array(["a", 1], object)), "y mixes kinds"),
        (lambda: RandomizedResponse(1.0).fit(np.array(["a", None], object)), "got None: drop missing labels"),
        (lambda: RandomizedResponse(1.0).fit(np.array([1, math.nan], object)), "got nan: drop missing labels"),
        (lambda: RandomizedResponse(1.0, classes=[0.0, 1.0, math.nan]).fit([0, 1]), "has a missing value"),
        (lambda: RandomizedResponse(1.0).fit(pd.Series([0, 1, None], dtype="Int64")), "drop missing labels"),
        (lambda: RandomizedResponse(1.0).fit(pd.Series(["a", None], dtype="string")), "drop missing labels"),
        (lambda: RandomizedResponse(1.0).fit(pd.Series([True, None], dtype="boolean")), "got .*: drop missing"),
        (lambda: ALIBI(1.0, 2).fit_transform(pd.Series([0, None], dtype="Int64")), "drop missing labels"),
        (lambda: RandomizedResponse(1.0, classes=["a", "b", pd.NA]).fit(["a"]), "has a missing value"),
        (lambda: RandomizedResponse(1.0).fit(np.array([1j, 2j])), "dtype complex128"),
        (lambda: RandomizedResponse(1.0, classes=["a", "a"]).fit(["a"]), "classes must be two or more different"),
        (lambda: RandomizedResponse(1.0, 3, classes=["a", "b"]).fit(["a"]), "num_classes=3 but classes lists 2"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.slow
def test_tensors_come_back_as_tensors():
    y = tf.constant([0, 1, 2], tf.int32)
    noisy = randomized_response(y, 60.0, 3)
    assert tf.is_tensor(noisy) and noisy.dtype == tf.int32 and noisy.numpy().tolist() == [0, 1, 2]
    names = randomized_response(tf.constant(["a", "b"]), 60.0)
    assert names.numpy().tolist() == [b"a", b"b"]

    @tf.function
    def graph(labels):
        return randomized_response(labels, 1.0, 3)

    with pytest.raises(ValueError, match=r"symbolic tensor.*LabelPrivacy"):
        graph(y)


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        (lambda: tf.data.Dataset.from_tensor_slices([0, 1, 2]), "TensorSliceDataset"),
        (lambda: tf.ragged.constant([[0], [1, 2]]), "RaggedTensor"),
        (lambda: tf.sparse.from_dense([0, 1]), "SparseTensor"),
    ],
)
def test_labels_that_are_no_array_are_named(labels, kind):
    with pytest.raises(ValueError, match=f"y is a {kind}, of which this method reads no labels: give them in one"):
        ALIBI(1.0, 3).fit([0, 1, 2]).transform(labels())
