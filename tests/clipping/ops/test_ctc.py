"""CTC is exact for labels of every form, and refused where frames or labels are not each example's own."""

import inspect
import re

import numpy as np
import pytest
import tensorflow as tf
from conftest import keras3
from helpers import K, L
from loss_cases import FRAMES, LABELS, WEIGHTS, agrees, refused

import tfdpfl
from tfdpfl.clipping import per_example_norms

LENGTHS = np.array([3, 1, 2, 3, 2], "int32")


def ctc(w, frames, labels, lengths=None, blank=0, major=False):
    n = tf.shape(frames)[0]
    logits = tf.tensordot(frames, w, 1)
    return tf.reduce_mean(tf.nn.ctc_loss(
        labels, tf.transpose(logits, [1, 0, 2]) if major else logits, tf.fill([n], 3) if lengths is None else lengths,
        tf.fill([n], 12), logits_time_major=major, blank_index=blank,
    ))  # fmt: skip


@pytest.mark.slow
def test_ctc_with_dense_labels_is_exact():
    agrees(lambda w, *batch: ctc(w, *batch, major=True), FRAMES, LABELS)


@pytest.mark.slow
def test_ctc_with_lengths_and_the_last_class_as_blank_is_exact():
    agrees(lambda w, *batch: ctc(w, *batch, blank=-1), FRAMES, LABELS - 1, LENGTHS)


def test_ctc_is_as_long_as_its_own_example():
    """One example's frames and labels have no part in another's gradient: its neighbour may be anything."""
    w = tf.Variable(WEIGHTS)
    norms = tf.function(lambda *batch: per_example_norms(ctc(w, *batch), [w]))
    other, labels = FRAMES.copy(), LABELS.copy()
    other[0], labels[0] = 50, 1
    a, b = norms(FRAMES, LABELS, LENGTHS), norms(other, labels, LENGTHS[::-1])
    assert a[0] != b[0]
    np.testing.assert_allclose(a[2], b[2], rtol=1e-6)  # the middle one has its own length in both


def test_ctc_whose_lengths_are_of_the_batch_is_refused():
    refused(
        lambda w, frames, labels: ctc(w, frames, labels, tf.reduce_max(labels) + 0 * labels[:, 0]), FRAMES, LABELS,
        match="reduces over the batch|moves examples",
    )  # fmt: skip


@pytest.mark.one_stack
@pytest.mark.slow
def test_ctc_whose_frames_are_examples_is_refused():
    """Time first is what it takes: here the examples are the frames of one utterance."""

    def loss(w, frames):
        labels, lengths = tf.ones([12, 2], tf.int32), tf.fill([12], 2)
        return tf.reduce_mean(tf.nn.ctc_loss(labels, tf.tensordot(frames, w, 1), lengths, tf.fill([12], 5)))

    frames = (
        np.random.default_rng(4).normal(size=(12, 12, 4)).astype("float32")
    )  # as many examples as frames: all lengths agree
    refused(loss, frames, match="No gradient belongs to one example alone", static=True)


@pytest.mark.one_stack
@pytest.mark.slow
def test_ctc_with_public_labels_that_differ_from_example_to_example_is_refused():
    def loss(w, frames):
        return ctc(w, frames, tf.constant(LABELS))

    refused(loss, FRAMES, match="No gradient belongs to one example alone", static=True)


@pytest.mark.skipif(not keras3(), reason="Keras 3's loss")
@pytest.mark.slow
def test_keras_ctc_trains():
    model = K.Sequential([K.Input((12, 4)), L.Dense(6)])
    model.compile(tfdpfl.DPSGD(1.0, 1.0, learning_rate=0.1), K.losses.CTC())
    model.fit(FRAMES, LABELS, batch_size=4, verbose=0)
    agrees(lambda w, x, y: K.losses.CTC()(y, tf.tensordot(x, w, 1)), FRAMES, LABELS)


def sparse_ctc(w, frames, labels, lengths=None, blank=0, of=tf.sparse.from_dense):
    n = tf.shape(frames)[0]
    return tf.reduce_mean(tf.nn.ctc_loss(
        of(labels), tf.tensordot(frames, w, 1), None, tf.fill([n], 12) if lengths is None else lengths,
        logits_time_major=False, blank_index=blank,
    ))  # fmt: skip


def found_by_hand(labels):
    places = tf.where(labels > 1)
    return tf.SparseTensor(places, tf.gather_nd(labels, places), tf.shape(labels, tf.int64))


@pytest.mark.parametrize(("blank", "of"), [(-1, tf.sparse.from_dense), (0, found_by_hand)])
@pytest.mark.slow
def test_ctc_with_sparse_labels_is_exact(blank, of):
    labels = LABELS.copy()
    labels[1, 1:] = labels[3, 2:] = 0  # words of one, two and three letters
    lengths = np.array([12, 9, 12, 5, 7], "int32")
    agrees(lambda w, *batch: sparse_ctc(w, *batch, blank=blank, of=of), FRAMES, np.minimum(labels, 4), lengths)


def backend_ctc(w, frames, labels, frames_each, labels_each):
    return tf.reduce_mean(K.backend.ctc_batch_cost(labels, tf.nn.softmax(tf.tensordot(frames, w, 1)),
                                                   frames_each, labels_each))  # fmt: skip


@pytest.mark.skipif(not hasattr(K.backend, "ctc_batch_cost"), reason="Keras 2's function")
@pytest.mark.slow
def test_keras_2s_ctc_batch_cost_is_exact():
    frames_each = np.array([[12], [9], [12], [5], [7]], "int32")
    agrees(backend_ctc, FRAMES, (LABELS - 1).astype("float32"), frames_each, LENGTHS[:, None], static=True)


def sparse(change):
    """Labels put together in another way, from each example's own."""

    def made(y):
        places = tf.where(y > 0)
        places, values = change(y, places, tf.gather_nd(y, places))
        return tf.SparseTensor(places, values, tf.shape(y, tf.int64))

    return lambda w, x, y: sparse_ctc(w, x, y, of=made)


@tf.function
def chosen(y):
    places = tf.where(y > 1)
    return places, tf.gather_nd(y, places)


def pairs(y):
    return tf.stack([y, y], 2) - 1


@pytest.mark.parametrize("loss", [
    # labels of the neighbour; of another choice than their places; chosen by all examples together; without examples
    sparse(lambda y, places, values: (places, tf.gather_nd(tf.reverse(y, [0]), places))),
    sparse(lambda y, places, values: (tf.where(y > 1), values)),
    lambda w, x, y: sparse_ctc(w, x, y, of=lambda y: tf.sparse.from_dense(y * tf.cast(y > tf.reduce_min(y), y.dtype))),
    sparse(lambda y, places, values: (places, tf.gather_nd(tf.constant(LABELS), places))),
    # places moved by one, or along the other axis, or that are labels; labels in another order, or found by labels
    sparse(lambda y, places, values: (places - 1, values)),
    sparse(lambda y, places, values: (at := tf.where(tf.transpose(y) > 0), tf.gather_nd(y, at))),
    sparse(lambda y, places, values: (places, tf.reverse(values, [0]))),
    sparse(lambda y, places, values: (chosen(y)[0], chosen(y + 1)[1])),
    sparse(lambda y, places, values: (tf.cast(tf.gather_nd(pairs(y), places), tf.int64), values)),
    sparse(lambda y, places, values: (places, tf.gather_nd(y, tf.gather_nd(pairs(y), places)))),
    # labels that all of the batch had a part in, or that are told by how many there are before
    sparse(lambda y, places, values: (places, tf.minimum(values, tf.cumsum(values)))),
    sparse(lambda y, places, values: (places, (values + tf.range(15)) % 5 + 1)),
    sparse(lambda y, places, values: (places, tf.range(15) % 5 + 1)),
    # lengths of others; another end than CTC
    lambda w, x, y: sparse_ctc(w, x, y, tf.reverse(tf.reduce_max(y, 1) + 7, [0])),
    lambda w, x, y: tf.reduce_mean(tf.compat.v1.nn.ctc_loss(
        tf.sparse.from_dense(y), tf.tensordot(x, w, 1), tf.reverse(tf.reduce_max(y, 1) + 7, [0]), time_major=False)),
    lambda w, x, y: tf.reduce_mean(w) * tf.cast(tf.reduce_sum(tf.sparse.from_dense(y).values), tf.float32),
])  # fmt: skip
def test_ctc_whose_sparse_labels_are_not_each_examples_own_is_refused(loss):
    refused(loss, FRAMES, LABELS, match="No gradient belongs to one example alone")


@pytest.mark.skipif(not hasattr(K.backend, "ctc_batch_cost"), reason="Keras 2's function")
@pytest.mark.parametrize(("there", "planted"), [
    ("range(0, label_shape[0])", "range(1, label_shape[0] + 1)"),
    ("0) < tf.fill(", "0) <= tf.fill("),
    ("[batch_ind, label_ind]", "[label_ind, batch_ind]"),
    ("gather_nd(labels,", "gather_nd(labels + 1,"),
    ("label_lengths, init", "label_lengths[::-1], init"),
    ("parallel_iterations=1", "parallel_iterations=1, reverse=True"),
])  # fmt: skip
@pytest.mark.slow
def test_what_only_looks_like_ctc_batch_cost_is_refused(there, planted):
    """One thing in it is another. The labels that an example gets may be its neighbour's."""
    real = inspect.unwrap(K.backend.ctc_label_dense_to_sparse)
    text = re.sub("(?m)^@.*$", "", inspect.getsource(real))
    assert text.count(there) == 1
    names = dict(real.__globals__)
    exec(text.replace(there, planted), names)

    def loss(w, frames, labels, lengths):
        logits = tf.transpose(tf.tensordot(frames, w, 1), [1, 0, 2])
        of = names["ctc_label_dense_to_sparse"](labels, lengths)
        return tf.reduce_mean(tf.compat.v1.nn.ctc_loss(of, logits, tf.fill(tf.shape(frames)[:1], 12)))

    refused(loss, FRAMES, LABELS - 1, LENGTHS, match="tf.nn.ctc_loss dense labels")
