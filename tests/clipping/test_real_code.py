"""What stops real Keras code, and the mends that its refusals name, tried as their words say."""

import inspect
import re
import sys

import numpy as np
import pytest
import tensorflow as tf
from conftest import keras3
from helpers import K, L

import tfdpfl
from tfdpfl.clipping import clipped_gradients, per_example_norms
from tfdpfl.clipping.graph import same
from tfdpfl.errors import PrivacyError

RNG = np.random.default_rng(3)
FRAMES = RNG.normal(size=(5, 12, 4)).astype("float32")
LABELS = RNG.integers(1, 6, (5, 3)).astype("int32")
LENGTHS = np.array([3, 1, 2, 3, 2], "int32")
X = RNG.normal(size=(5, 4)).astype("float32")
WEIGHTS = RNG.normal(size=(4, 6)).astype("float32")


def agrees(loss, *batch, weights=WEIGHTS, rtol=1e-5, static=False):
    """The norms and the clipped sum are those of the examples one by one, by TensorFlow's own gradients."""
    w = tf.Variable(weights)

    def gradient(*one):
        with tf.GradientTape() as tape:
            value = loss(w, *one)
        return tf.convert_to_tensor(tape.gradient(value, w)).numpy()

    each = [gradient(*(part[i : i + 1] for part in batch)) for i in range(len(batch[0]))]
    norms = np.array([np.linalg.norm(g) for g in each])
    clip = float(np.median(norms))
    step = tf.function(
        lambda *batch: (per_example_norms(loss(w, *batch), [w]), clipped_gradients(loss(w, *batch), [w], clip).sum[0]),
        input_signature=[tf.TensorSpec([len(part) if static else None, *part.shape[1:]], part.dtype) for part in batch],
    )
    found, total = step(*batch)
    np.testing.assert_allclose(found, norms, rtol=rtol)
    expected = sum(g * min(1, clip / n) for g, n in zip(each, norms, strict=True))
    np.testing.assert_allclose(total, expected, rtol=rtol, atol=rtol * np.abs(expected).max())


def refused(loss, *batch, match, static=False):
    w = tf.Variable(WEIGHTS)
    step = tf.function(
        lambda *batch: clipped_gradients(loss(w, *batch), [w], 1.0).sum[0],
        input_signature=[tf.TensorSpec([len(part) if static else None, *part.shape[1:]], part.dtype) for part in batch],
    )
    with pytest.raises(PrivacyError, match=match):
        step(*batch)


# -- CTC -----------------------------------------------------------------------------------------------------------


def ctc(w, frames, labels, lengths=None, blank=0, major=False):
    n = tf.shape(frames)[0]
    logits = tf.tensordot(frames, w, 1)
    return tf.reduce_mean(tf.nn.ctc_loss(
        labels, tf.transpose(logits, [1, 0, 2]) if major else logits, tf.fill([n], 3) if lengths is None else lengths,
        tf.fill([n], 12), logits_time_major=major, blank_index=blank,
    ))  # fmt: skip


@pytest.mark.parametrize(("major", "lengths"), [(True, False), pytest.param(False, True, marks=pytest.mark.one_stack)])
@pytest.mark.slow
def test_ctc_with_dense_labels_is_exact(major, lengths):
    given = [LENGTHS] if lengths else []
    agrees(lambda w, *batch: ctc(w, *batch, major=major), FRAMES, LABELS, *given)


@pytest.mark.one_stack
@pytest.mark.slow
def test_ctc_with_the_last_class_as_blank_is_exact():
    agrees(lambda w, *batch: ctc(w, *batch, blank=-1), FRAMES, LABELS - 1)


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

    frames = RNG.normal(size=(12, 12, 4)).astype("float32")  # as many examples as frames: all lengths agree
    for static in (False, True):
        refused(loss, frames, match="No gradient belongs to one example alone", static=static)


@pytest.mark.one_stack
@pytest.mark.slow
def test_ctc_with_public_labels_that_differ_from_example_to_example_is_refused():
    def loss(w, frames):
        return ctc(w, frames, tf.constant(LABELS))

    for static in (False, True):
        refused(loss, FRAMES, match="No gradient belongs to one example alone", static=static)


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


@pytest.mark.parametrize(("blank", "of"), [(0, tf.sparse.from_dense), (-1, tf.sparse.from_dense), (0, found_by_hand)])
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
@pytest.mark.parametrize(("kind", "static"), [("int32", False), ("float32", True)])
@pytest.mark.slow
def test_keras_2s_ctc_batch_cost_is_exact(kind, static):
    frames_each = np.array([[12], [9], [12], [5], [7]], "int32")
    agrees(backend_ctc, FRAMES, (LABELS - 1).astype(kind), frames_each, LENGTHS[:, None], static=static)


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


def turned(x, y, change=lambda turn: turn - 1.0, go_on=lambda i: i < 3, hand=lambda i, a: (i + 1, a)):
    return tf.while_loop(lambda i, a: go_on(i), lambda i, a: hand(i, change(a) * y), [0, x])[1]


@pytest.mark.parametrize(("other", "alike"), [
    (lambda x, y: turned(x, y), True),
    (lambda x, y: turned(y, x), False),
    (lambda x, y: turned(x, y) + 1, False),
    (lambda x, y: turned(x, y, lambda a: a - 2.0), False),
    (lambda x, y: turned(x, y, lambda a: 1.0 - a), False),
    (lambda x, y: turned(x, y, lambda a: a + 1.0), False),
    (lambda x, y: turned(x, y, lambda a: a - 1.0 + y), False),
    (lambda x, y: turned(x, y, go_on=lambda i: i < 4), False),
    (lambda x, y: turned(x, y, hand=lambda i, a: (i + 1, a if a is None else y)), False),
    (lambda x, y: tf.linalg.matmul(turned(x, y), y), False),
])  # fmt: skip
def test_the_same_graph_is_the_same_op_by_op(other, alike):
    x, y = (tf.TensorSpec([2, 2]) for _ in range(2))
    given, like = (tf.function(f, autograph=False).get_concrete_function(x, y).graph for f in (other, turned))
    known = dict(zip([t.op.name for t in like.inputs], given.inputs, strict=True))
    assert same(given.outputs[0], like.outputs[0], known) == alike


def test_the_same_op_of_other_attributes_or_outputs_is_another():
    def graph(f):
        return tf.function(f, autograph=False).get_concrete_function(tf.TensorSpec([4, 4])).graph

    def compared(f, g):
        a, b = graph(f), graph(g)
        return same(a.outputs[0], b.outputs[0], {b.inputs[0].op.name: a.inputs[0]})

    assert compared(lambda x: tf.matmul(x, x), lambda x: tf.matmul(x, x))
    assert not compared(lambda x: tf.matmul(x, x), lambda x: tf.matmul(x, x, transpose_a=True))
    assert not compared(lambda x: tf.split(x, 2)[0], lambda x: tf.split(x, 2)[1])
    assert not compared(lambda x: tf.add_n([x, x]), lambda x: tf.add_n([x, x, x]))


# -- sampled classes -----------------------------------------------------------------------------------------------


def sampler(y):
    return tf.random.log_uniform_candidate_sampler(tf.cast(y, tf.int64)[:, None], 1, 10, True, 50, seed=1)[0]


@pytest.mark.slow
def test_sampled_softmax_by_two_lookups_trains():
    """The mend of TensorFlow's own, which is refused."""
    tables = RNG.normal(size=(50, 4)).astype("float32")
    y = np.array([3, 1, 4, 1, 5], "int32")

    def whole(w, x, y):
        sampled = tf.random.log_uniform_candidate_sampler(tf.cast(y, tf.int64)[:, None], 1, 10, True, 50)
        return tf.reduce_mean(tf.nn.sampled_softmax_loss(
            w, tf.zeros(50), y[:, None], x, 10, 50, sampled_values=sampled, remove_accidental_hits=False
        ))  # fmt: skip

    def two(w, x, y, ids):
        true = tf.reduce_sum(x * tf.gather(w, y), 1)
        sampled = tf.matmul(x, tf.gather(w, ids), transpose_b=True)
        logits = tf.concat([true[:, None], sampled], 1)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.zeros_like(y), logits))

    w = tf.Variable(tables)
    spec = [tf.TensorSpec([None, 4]), tf.TensorSpec([None], tf.int32)]
    with pytest.raises(PrivacyError, match=r"tf.gather\(w, y\)"):
        tf.function(lambda x, y: clipped_gradients(whole(w, x, y), [w], 1.0).sum, input_signature=spec)(X, y)
    agrees(lambda w, x, y: two(w, x, y, tf.constant([2, 7, 11])), X, y, weights=tables)
    drawn = tf.function(lambda x, y: clipped_gradients(two(w, x, y, sampler(y)), [w], 1.0).norms, input_signature=spec)
    assert np.all(np.isfinite(drawn(X, y)))


# -- derivatives within the loss -----------------------------------------------------------------------------------


@pytest.mark.one_stack
@pytest.mark.slow
def test_derivatives_by_the_input_one_output_at_a_time():
    """The mend of batch_jacobian, which is refused."""

    def jacobian(w, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.tanh(x @ w)
        return tf.reduce_mean(tape.batch_jacobian(y, x) ** 2)

    def by_output(w, x):
        x = tf.convert_to_tensor(x)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = tf.tanh(x @ w)
            parts = [y[:, i] for i in range(3)]
        return tf.reduce_mean(tf.stack([tape.gradient(part, x) for part in parts], 1) ** 2)

    refused(jacobian, X, match=r"batch_jacobian.*tape.gradient\(part, x\)")
    agrees(by_output, X, weights=WEIGHTS[:, :3])


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("cut", [np.s_[:, 1:3], np.s_[..., 0], np.s_[:, None, 2], np.s_[:, ::2], np.s_[..., None, 1:]])
@pytest.mark.one_stack
def test_the_gradient_of_a_slice_is_exact(cut, static):
    def loss(w, x):
        x = tf.convert_to_tensor(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.tanh(x @ w)[cut] ** 2
        return tf.reduce_mean(tape.gradient(y, x) ** 2)

    agrees(loss, X, rtol=2e-5, static=static)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("cut", [np.s_[1:], np.s_[::-1], np.s_[:2], np.s_[0], np.s_[None, 1:]])
@pytest.mark.one_stack
def test_the_gradient_of_a_slice_of_examples_is_refused(cut, static):
    def loss(w, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.tanh(x @ w)[cut] ** 2
        return tf.reduce_mean(tape.gradient(y, x) ** 2)

    refused(loss, X, match="takes some examples|by its position|not known to follow the batch size", static=static)


def test_a_slice_that_turns_the_examples_round_is_refused():
    def loss(w, x):
        y = tf.tanh(x @ w)
        turned = tf.raw_ops.StridedSliceGrad(
            shape=tf.shape(y), begin=[0], end=[0], strides=[-1], dy=y, begin_mask=1, end_mask=1
        )
        return tf.reduce_mean((y - turned) ** 2)

    refused(loss, X, match="StridedSliceGrad.*takes some examples")


@pytest.mark.slow
def test_wgan_with_a_gradient_penalty_is_exact():
    def loss(w, x, z, e):
        h = tf.convert_to_tensor(x + e * (z - x))
        with tf.GradientTape() as tape:
            tape.watch(h)
            p = tf.reduce_sum(tf.tanh(h @ w), 1)
        slope = tf.norm(tape.gradient(p, h), axis=1)
        return tf.reduce_mean(tf.reduce_sum(z @ w - x @ w, 1)) + 10 * tf.reduce_mean((slope - 1) ** 2)

    agrees(loss, X, X[::-1].copy(), np.full((5, 1), 0.3, "float32"), rtol=2e-5)


# -- GANs, overlaps, branches --------------------------------------------------------------------------------------


@pytest.mark.one_stack
@pytest.mark.slow
def test_real_and_generated_examples_are_added_not_joined():
    entropy = tf.nn.sigmoid_cross_entropy_with_logits

    def joined(w, x, z):
        logits = tf.concat([x, z], 0) @ w
        labels = tf.concat([tf.ones_like(x @ w), tf.zeros_like(z @ w)], 0)
        return tf.reduce_mean(entropy(labels, logits))

    def added(w, x, z):
        real, made = x @ w, z @ w
        return tf.reduce_mean(entropy(tf.ones_like(real), real)) + tf.reduce_mean(entropy(tf.zeros_like(made), made))

    refused(joined, X, X[::-1].copy(), match="Call the model on each part, and add the losses")
    agrees(added, X, X[::-1].copy())


@pytest.mark.skipif(not keras3(), reason="Keras 3's losses")
@pytest.mark.parametrize("name", ["Dice", "Tversky"])
@pytest.mark.slow
def test_an_overlap_is_each_examples_own_with_its_axes(name):
    x, y = RNG.random((6, 4, 4, 1)).astype("float32"), np.ones((6, 4, 4, 1), "float32")
    for given, ok in (({}, False), ({"axis": (1, 2, 3)}, True)):
        model = K.Sequential([K.Input((4, 4, 1)), L.Conv2D(1, 3, padding="same", activation="sigmoid")])
        model.compile(tfdpfl.DPSGD(1.0, 1.0, learning_rate=0.1), getattr(K.losses, name)(**given))
        if ok:
            model.fit(x, y, batch_size=4, verbose=0)
        else:
            with pytest.raises(PrivacyError, match=rf"{name}\(axis=\(1, 2, 3\)\)|{name} likewise"):
                model.fit(x, y, batch_size=4, verbose=0)


def test_a_switch_by_a_number_is_chosen_in_python():
    branches = [lambda x, w: x @ w, lambda x, w: 2 * (x @ w)]

    def switched(w, x):
        return tf.reduce_mean(tf.switch_case(tf.constant(1), [lambda f=f: f(x, w) for f in branches]) ** 2)

    refused(switched, X, match="Choose the branch in Python")
    agrees(lambda w, x: tf.reduce_mean(branches[1](x, w) ** 2), X)


@pytest.mark.skipif(not keras3(), reason="Keras 2 replaces the loop only when the step runs")
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_recurrence_that_a_gpu_runs_in_cudnn_is_refused_with_what_to_build_instead(kind, monkeypatch):
    layer = getattr(L, kind)(2)
    layer.build((None, 1, 4))
    monkeypatch.setattr(sys.modules["keras.src.backend.tensorflow.rnn"], "cudnn_ok", lambda *_, **__: True)
    refused(
        lambda w, x: tf.reduce_mean(layer((x @ w)[:, None, :4])), X, match=r"CudnnRNNV3.*LSTM\(64, use_cudnn=False\)"
    )


# -- mends in general ----------------------------------------------------------------------------------------------

MASK = (RNG.random((5, 6)) < 0.7).astype("float32") + np.eye(5, 6, dtype="float32")


def last_turn(w, x, until):
    """y, made longer by the weights until it is long enough."""
    turn = lambda i, y: (i + 1, tf.where(until(y), y, y + tf.tanh(x @ w)))
    return tf.while_loop(lambda i, y: i < 3, turn, (0, x @ w), maximum_iterations=3)[1]


MENDS = {
    "Reduce over the other axes only": (
        lambda w, x: tf.reduce_sum(tf.reduce_max(x @ w, 0)), lambda w, x: tf.reduce_sum(tf.reduce_max(x @ w, 1))),
    "compute on the whole batch at once: tf.map_fn": (
        lambda w, x: tf.reduce_mean(tf.map_fn(lambda row: tf.tanh(tf.linalg.matvec(w, row, transpose_a=True)), x)),
        lambda w, x: tf.reduce_mean(tf.tanh(x @ w))),
    "Leave out the use of the batch size": (
        lambda w, x: tf.reduce_mean(tf.tanh(x @ w * tf.cast(tf.shape(x)[0], tf.float32))),
        lambda w, x: tf.reduce_mean(tf.tanh(x @ w))),
    "Work along another axis": (
        lambda w, x: tf.reduce_mean(tf.nn.softmax(x @ w, 0) ** 2),
        lambda w, x: tf.reduce_mean(tf.nn.softmax(x @ w) ** 2)),
    "Give every example the same values": (
        lambda w, x: tf.reduce_mean(tf.tanh(x @ w) * tf.cast(tf.range(tf.shape(x)[0]), tf.float32)[:, None]),
        lambda w, x: tf.reduce_mean(tf.tanh(x @ w) * tf.range(6.0))),
    r"If the labels have another shape than the outputs.*y\.reshape\(len\(y\), 1\)": (
        lambda w, x: tf.reduce_mean((x[:, 0] - tf.tanh(x @ w)[:, :1]) ** 2),
        lambda w, x: tf.reduce_mean((x[:, :1] - tf.tanh(x @ w)[:, :1]) ** 2)),
    "Compare each example with public values": (
        lambda w, x: tf.reduce_mean(tf.tanh(tf.matmul(x @ w, x @ w, transpose_b=True))),
        lambda w, x: tf.reduce_mean(tf.tanh(tf.matmul(x @ w, MASK, transpose_b=True)))),
    "Write it with TensorFlow operations": (
        lambda w, x: tf.reduce_mean(tf.ensure_shape(tf.numpy_function(np.tanh, [x @ w], tf.float32), [None, 6])),
        lambda w, x: tf.reduce_mean(tf.tanh(x @ w))),
    r"tf\.where\(condition, a, b\)": (
        lambda w, x: tf.reduce_mean(tf.cond(tf.reduce_all(x > -9), lambda: tf.tanh(x @ w), lambda: x @ w)),
        lambda w, x: tf.reduce_mean(tf.where(x[:, :1] > 0, tf.tanh(x @ w), x @ w))),
    r"tf\.where\(done, y, next_y\)": (
        lambda w, x: tf.reduce_mean(tf.while_loop(lambda y: tf.reduce_all(y < 2), lambda y: (y + tf.tanh(x @ w),),
                                                  (x @ w,))[0]),
        lambda w, x: tf.reduce_mean(last_turn(w, x, lambda y: y > 2) ** 2)),
    r"tf\.reduce_sum\(loss \* mask, 1\) / tf\.reduce_sum\(mask, 1\)": (
        lambda w, x, m: tf.reduce_sum(tf.tanh(x @ w) * m) / tf.reduce_sum(m),
        lambda w, x, m: tf.reduce_sum(tf.tanh(x @ w) * m, 1) / tf.reduce_sum(m, 1)),
    r"Keep the batch axis: tf\.reshape\(x, \[-1, \.\.\.\]\)": (
        lambda w, x: tf.reduce_mean(tf.reduce_max(tf.reshape(tf.transpose(x @ w), [-1, 2, 3]), 1) ** 2),
        lambda w, x: tf.reduce_mean(tf.reduce_max(tf.reshape(x @ w, [-1, 2, 3]), 1) ** 2)),
}  # fmt: skip


@pytest.mark.parametrize(("mend", "refuses", "trains"), [(k, *v) for k, v in MENDS.items()], ids=range(len(MENDS)))
@pytest.mark.one_stack
def test_a_mend_works_as_its_words_say(mend, refuses, trains):
    batch = (X, MASK) if "mask" in mend else (X,)
    refused(refuses, *batch, match=mend)
    agrees(lambda *given: tf.reduce_mean(trains(*given)), *batch, rtol=2e-5)


@pytest.mark.one_stack
def test_frames_that_come_before_the_batch_are_transposed():
    def loss(w, x, turned):
        x = tf.transpose(x, [1, 0, 2]) if turned else x
        return tf.reduce_mean(tf.tanh(tf.nn.conv1d(x, w[None], 1, "SAME")))

    refused(lambda w, x: loss(w, x, True), FRAMES, match="Transpose its input, so that the examples come first")
    agrees(lambda w, x: loss(w, x, False), FRAMES)


def test_a_shape_of_unknown_rank_is_said():
    w = tf.Variable(WEIGHTS)
    for say, ok in ((lambda x: x, False), (lambda x: tf.ensure_shape(x, [None, 4]), True)):
        step = tf.function(
            lambda x, say=say: per_example_norms(tf.reduce_mean(tf.tanh(say(x) @ w)), [w]),
            input_signature=[tf.TensorSpec(None)],
        )
        if ok:
            assert step(X).shape == 5
        else:
            with pytest.raises(PrivacyError, match=r"tf\.ensure_shape\(x, \[None, \.\.\.\]\)"):
                step(X)


@pytest.mark.one_stack
@pytest.mark.slow
def test_words_are_split_in_the_data_set():
    words, y = np.array([["a b"], ["b c"], ["c a"], ["b b"]], object), np.arange(4) % 2
    layer = L.TextVectorization(vocabulary=["a", "b", "c"], output_sequence_length=2)
    tail = [L.Embedding(5, 2), L.GlobalAveragePooling1D(), L.Dense(1, activation="sigmoid")]
    data = tf.data.Dataset.from_tensor_slices((words, y)).batch(3)
    model = K.Sequential([K.Input((1,), dtype="string"), layer, *tail])
    model.compile(tfdpfl.DPSGD(1.0, 1.0, learning_rate=0.1), "binary_crossentropy")
    with pytest.raises(PrivacyError, match=r"dataset\.map\(lambda x, y: \(layer\(x\), y\)\)"):
        model.fit(data, verbose=0)
    model = K.Sequential([K.Input((2,), dtype="int64"), *tail])
    model.compile(tfdpfl.DPSGD(1.0, 1.0, learning_rate=0.1), "binary_crossentropy")
    model.fit(data.map(lambda x, y: (layer(x), y)), verbose=0)
