"""What stops real Keras code, and the mends that its refusals name, tried as their words say."""

import sys

import numpy as np
import pytest
import tensorflow as tf
from conftest import keras3
from helpers import K, L
from loss_cases import FRAMES, MASK, WEIGHTS, X, agrees, refused

import tfdpfl
from tfdpfl.clipping import clipped_gradients, per_example_norms
from tfdpfl.errors import PrivacyError

RNG = np.random.default_rng(5)

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
