"""A Keras train step moves the weights by the clipped sum of what each example's own loss gives, over the batch."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import K, L, assert_close, clipped_sums, normal, norms_of, per_example_gradients, raw, rng

import tfdpfl
from tfdpfl.clipping import clipped_gradients, per_example_norms
from tfdpfl.errors import PrivacyError

B = 6
X = normal(B, 4)
CLASSES = rng(1).integers(0, 3, B).astype("int32")
ONE_HOT = np.eye(3, dtype="float32")[CLASSES]
REAL = normal(B, 3, seed=2)
SEQUENCE = normal(B, 5, 3, seed=3)
IDS = np.array([[1, 2, 3, 0, 0], [4, 5, 0, 0, 0], [1, 1, 1, 1, 1], [2, 0, 0, 0, 0], [3, 2, 1, 5, 0], [5, 5, 4, 4, 3]])
IDS = IDS.astype("int32")
WEIGHTS = np.array([1.0, 0.0, 2.5, 0.3, 0.0, 1.0], "float32")


def classifier(head=None, **kwargs):
    return K.Sequential([K.Input((4,)), L.Dense(5, activation="tanh", **kwargs), L.Dense(3, activation=head)])


def sequences(mask):
    return K.Sequential([K.Input((5,), dtype="int32"), L.Embedding(6, 4, mask_zero=mask), L.Dense(3)])


def moved(model, x, y, clip, loss, sample_weight=None, class_weight=None, compiled=(), **optimizer):
    """How far one step of unit rate moves the weights, times the batch size, and the optimizer."""
    dp = tfdpfl.DPSGD(l2_norm_clip=clip, noise_multiplier=0.0, learning_rate=1.0, **optimizer)
    model.compile(optimizer=dp, loss=loss, **dict(compiled))
    before = [w.numpy() for w in raw(model.trainable_variables)]
    model.train_on_batch(x, y, sample_weight=sample_weight, class_weight=class_weight)
    size = len(tf.nest.flatten(x)[0])
    return [(b - w.numpy()) * size for w, b in zip(raw(model.trainable_variables), before, strict=True)], dp


def check(model, x, y, loss, own, *, extra=None, apart=None, **how):
    """``own(y, prediction, extra)`` gives the examples' losses [batch]; ``apart()`` what depends on no example."""
    losses = lambda z: own(z[1], model(z[0], training=False), *z[2:])
    everything = (x, y) if extra is None else (x, y, extra)
    gradients = per_example_gradients(losses, everything, model.trainable_variables)
    clip = float(np.median(norms_of(gradients)))
    want = clipped_sums(gradients, clip)
    if apart is not None:
        with tf.GradientTape() as tape:
            value = apart()
        rest = tape.gradient(value, raw(model.trainable_variables), unconnected_gradients="zero")
        want = [w + B * r.numpy() for w, r in zip(want, rest, strict=True)]
    got, _ = moved(model, x, y, clip, loss, **how)
    assert_close(got, want, 2e-5)


def squared(y, p, *_):
    return tf.reduce_mean((p - y) ** 2, -1)


def crossed(y, p, *_):
    return K.losses.sparse_categorical_crossentropy(y, p, from_logits=True)


LOSSES = {
    "sparse cross entropy of logits": (CLASSES, K.losses.SparseCategoricalCrossentropy(from_logits=True),
                                       crossed, None),
    "sparse cross entropy": (CLASSES, "sparse_categorical_crossentropy",
                             lambda y, p: K.losses.sparse_categorical_crossentropy(y, p), "softmax"),
    "cross entropy": (ONE_HOT, "categorical_crossentropy",
                      lambda y, p: K.losses.categorical_crossentropy(y, p), "softmax"),
    "smoothed cross entropy of logits": (
        ONE_HOT, K.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.2),
        lambda y, p: K.losses.categorical_crossentropy(y, p, from_logits=True, label_smoothing=0.2), None),
    "binary cross entropy": (ONE_HOT, "binary_crossentropy",
                             lambda y, p: K.losses.binary_crossentropy(y, p), "sigmoid"),
    "smoothed binary cross entropy of logits": (
        ONE_HOT, K.losses.BinaryCrossentropy(from_logits=True, label_smoothing=0.1),
        lambda y, p: K.losses.binary_crossentropy(y, p, from_logits=True, label_smoothing=0.1), None),
    "mean squared error": (REAL, "mse", squared, None),
    "mean absolute error": (REAL, "mae", lambda y, p: tf.reduce_mean(tf.abs(y - p), -1), None),
    "huber": (REAL, K.losses.Huber(0.5), lambda y, p: K.losses.Huber(0.5)(y[:1], p[:1]) + 0 * p[:, 0], None),
    "cosine": (REAL, K.losses.CosineSimilarity(), lambda y, p: -tf.reduce_sum(
        tf.math.l2_normalize(y, -1) * tf.math.l2_normalize(p, -1), -1), None),
    "divergence": (ONE_HOT * 0.7 + 0.1, "kl_divergence",
                   lambda y, p: tf.reduce_sum(y * tf.math.log(y / p), -1), "softmax"),
    "function of examples": (REAL, lambda y, p: tf.reduce_sum(tf.abs(p - y) ** 3, -1),
                             lambda y, p: tf.reduce_sum(tf.abs(p - y) ** 3, -1), None),
    "function of the batch": (REAL, lambda y, p: tf.reduce_mean((p - y) ** 2), squared, None),
    "over the batch size by shape": (
        REAL, lambda y, p: tf.reduce_sum((p - y) ** 2) / tf.cast(tf.shape(p)[0], tf.float32) / 3.0, squared, None),
    "over a known batch size": (
        REAL, lambda y, p: tf.nn.compute_average_loss(squared(y, p), global_batch_size=1), squared, None),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.both_stacks
@pytest.mark.parametrize("part", range(2))
def test_compiled_losses_clip_each_examples_own(part):
    """Several, each of an output of its own."""
    of_each = list(LOSSES.values())[part::2]
    x = K.Input((4,))
    h = L.Dense(5, activation="tanh")(x)
    model = K.Model(x, [L.Dense(3, activation=head)(h) for *_, head in of_each])
    own = lambda y, p: tf.add_n([f(a, b) for (_, _, f, _), a, b in zip(of_each, y, p, strict=True)])
    check(model, X, [y for y, *_ in of_each], [loss for _, loss, *_ in of_each], own)


@pytest.mark.parametrize(("reduction", "weighted"), [("sum_over_batch_size", True), ("sum", True), ("sum", False)])
def test_reduction_and_weights_enter_before_the_clip(reduction, weighted):
    loss = K.losses.MeanSquaredError(reduction=reduction)
    if weighted:
        check(classifier(), X, REAL, loss, lambda y, p, w: w * squared(y, p), extra=WEIGHTS, sample_weight=WEIGHTS)
    else:
        check(classifier(), X, REAL, loss, squared)


def test_a_loss_that_is_not_reduced_clips_the_same():
    check(classifier(), X, REAL, K.losses.MeanSquaredError(reduction="none"), squared)


@pytest.mark.slow
def test_examples_of_weight_zero_contribute_nothing_whatever_they_hold():
    model = classifier()
    values = model.get_weights()
    some = WEIGHTS > 0
    got, _ = moved(model, X, REAL, 0.5, "mse", sample_weight=WEIGHTS)
    model.set_weights(values)
    other = np.where(some[:, None], X, 1e3).astype("float32")
    assert_close(moved(model, other, REAL, 0.5, "mse", sample_weight=WEIGHTS)[0], got)


def test_class_weights_enter_before_the_clip():
    scale = np.array([1.0, 0.2, 3.0], "float32")
    check(classifier(), X, CLASSES, K.losses.SparseCategoricalCrossentropy(from_logits=True),
          lambda y, p: tf.gather(scale, y) * crossed(y, p), class_weight=dict(enumerate(scale.tolist())))  # fmt: skip


def two_heads():
    a = K.Input((4,))
    h = L.Dense(4, activation="tanh")(a)
    return K.Model(a, [L.Dense(3)(h), L.Dense(2)(h)])


@pytest.mark.slow
def test_several_outputs_with_loss_weights_are_one_gradient_an_example():
    y = [REAL, normal(B, 2, seed=7)]
    check(two_heads(), X, y, ["mse", "mae"],
          lambda y, p: 0.3 * squared(y[0], p[0]) + 2.0 * tf.reduce_mean(tf.abs(y[1] - p[1]), -1),
          compiled={"loss_weights": [0.3, 2.0]})  # fmt: skip


# Masks


def own_mean(y, p, ids):
    mask = tf.cast(ids != 0, p.dtype)
    return tf.reduce_sum(squared(y, p) * mask, 1) / tf.reduce_sum(mask, 1)


@pytest.mark.slow
def test_masked_sequence_loss_is_the_mean_over_the_examples_own_valid_positions():
    check(sequences(mask=True), IDS, SEQUENCE, "mse", own_mean, extra=IDS)


def test_sequence_loss_without_masks_is_the_mean_over_all_positions():
    check(sequences(mask=False), IDS, SEQUENCE, "mse", lambda y, p: tf.reduce_mean(squared(y, p), 1))


LABELS = rng(5).integers(0, 3, (B, 5)).astype("int32")
TAGGED = {
    "sparse_categorical_crossentropy": (LABELS, lambda y, p: -tf.math.log(tf.gather(p, y, axis=-1, batch_dims=2))),
    "categorical_crossentropy": (
        np.eye(3, dtype="float32")[LABELS], lambda y, p: -tf.reduce_sum(y * tf.math.log(p), -1)),
    "mse": (SEQUENCE, squared),
}  # fmt: skip


def tagger(mask, layers, head):
    return K.Sequential([K.Input((5,), dtype="int32"), L.Embedding(6, 4, mask_zero=mask), *layers(), L.Dense(3, head)])


def recurrent():
    return [L.LSTM(3, return_sequences=True)]


@pytest.mark.parametrize(("layers", "loss", "mask"), [
    (list, "sparse_categorical_crossentropy", False), (list, "categorical_crossentropy", True), (list, "mse", True),
    (recurrent, "sparse_categorical_crossentropy", True),
    pytest.param(recurrent, "mse", False, marks=pytest.mark.one_stack),
])  # fmt: skip
@pytest.mark.slow
def test_a_loss_at_each_position_in_batches_of_any_size(layers, loss, mask):
    """Of a data set, whose batches have no size in the graph: the shapes of what was masked are then tensors."""
    y, at_positions = TAGGED[loss]
    model = tagger(mask, layers, None if loss == "mse" else "softmax")

    def own(z):
        weights = tf.cast(z[1] != 0, "float32") if mask else tf.ones([1, 5])
        return tf.reduce_sum(at_positions(z[0], model(z[1])) * weights, 1) / tf.reduce_sum(weights, 1)

    gradients = per_example_gradients(own, (y, IDS), model.trainable_variables)
    clip = float(np.median(norms_of(gradients)))
    model.compile(tfdpfl.DPSGD(clip, 0.0, learning_rate=1.0), loss)
    before = model.get_weights()
    model.fit(tf.data.Dataset.from_tensor_slices((IDS, y)).batch(B), verbose=0)
    moved_by = [B * (b - a) for a, b in zip(model.get_weights(), before, strict=True)]
    assert_close(moved_by, clipped_sums(gradients, clip), 5e-5)


@pytest.mark.slow
def test_weights_of_positions_enter_before_the_clip():
    w = np.abs(normal(B, 5, seed=4))
    check(sequences(mask=False), IDS, SEQUENCE, "mse", lambda y, p, w: tf.reduce_mean(w * squared(y, p), 1),
          extra=w, sample_weight=w)  # fmt: skip


# What is added to the loss


def test_regularisers_are_added_exactly_and_unclipped():
    model = classifier(kernel_regularizer=K.regularizers.L2(50.0), bias_regularizer=K.regularizers.L1(20.0))
    kernel, bias = raw(model.trainable_variables)[:2]
    apart = lambda: 50.0 * tf.reduce_sum(kernel**2) + 20.0 * tf.reduce_sum(tf.abs(bias))
    check(model, X, REAL, "mse", squared, apart=apart)


def test_what_a_layer_adds_of_the_examples_is_clipped_with_them():
    class Adds(L.Layer):
        def call(self, x):
            self.add_loss(0.1 * tf.reduce_mean(x**2))
            return x

    model = K.Sequential([K.Input((4,)), L.Dense(5, activation="tanh"), Adds(), L.Dense(3)])

    def own(y, p, x):
        h = model.layers[0](x)
        return squared(y, p) + 0.1 * tf.reduce_mean(h**2, -1)

    check(model, X, REAL, "mse", own, extra=X)


def test_activity_regularisers_are_clipped_with_the_examples():
    model = classifier(activity_regularizer=K.regularizers.L2(0.1))
    own = lambda y, p, x: squared(y, p) + 0.1 * tf.reduce_sum(model.layers[0](x) ** 2, -1)
    got, want = [], []
    gradients = per_example_gradients(lambda z: own(z[0], model(z[1]), z[1]), (REAL, X), model.trainable_variables)
    clip = float(np.median(norms_of(gradients)))
    want = clipped_sums(gradients, clip)
    got, _ = moved(model, X, REAL, clip, "mse")
    assert_close(got, want, 2e-5)


@pytest.mark.parametrize("size", [None, B])
@pytest.mark.parametrize("penalty", [
    K.regularizers.L1L2(0.1, 0.2), lambda h: 0.1 * tf.reduce_sum(tf.abs(h)) + tf.reduce_mean(h**2),
], ids=["L1L2", "sum_and_mean"])  # fmt: skip
def test_the_batch_size_is_taken_out_of_a_penalty_once(penalty, size):
    """Keras divides a penalty by the batch size, which is a constant like others where it is fixed."""
    model = classifier(activity_regularizer=penalty)

    def loss(x):
        out = model(x)
        return tf.add_n(model.losses) + tf.reduce_mean(out**2)

    norms = tf.function(lambda x: per_example_norms(loss(x), model.trainable_variables))
    want = []
    for i in range(B):
        with tf.GradientTape() as tape:
            own = loss(X[i : i + 1])
        want.append(np.sqrt(sum(np.sum(np.square(g)) for g in tape.gradient(own, model.trainable_variables))))
    got = norms.get_concrete_function(tf.TensorSpec([size, *X.shape[1:]]))(tf.constant(X))
    np.testing.assert_allclose(got, want, rtol=2e-5)


@pytest.mark.slow
def test_a_penalty_on_the_inputs_alone_moves_nothing():
    """In a batch of unknown size what is left of it beside the examples is a number made of lengths."""
    model = K.Sequential([K.Input((4,)), L.ActivityRegularization(0.1), L.Dense(3)])
    gradients = per_example_gradients(lambda z: squared(z[0], model(z[1])), (REAL, X), model.trainable_variables)
    clip = float(np.median(norms_of(gradients)))
    model.compile(tfdpfl.DPSGD(l2_norm_clip=clip, noise_multiplier=0.0, learning_rate=1.0), loss="mse")
    before = model.get_weights()
    model.fit(tf.data.Dataset.from_tensor_slices((X, REAL)).batch(B), verbose=0)
    moved_by = [B * (b - a) for a, b in zip(model.get_weights(), before, strict=True)]
    assert_close(moved_by, clipped_sums(gradients, clip), 2e-5)


@pytest.mark.slow
def test_metrics_do_not_matter():
    model = classifier()
    values = model.get_weights()
    plain, _ = moved(model, X, REAL, 0.4, "mse")
    model.set_weights(values)
    measured, _ = moved(model, X, REAL, 0.4, "mse", compiled={"metrics": ["mae"], "weighted_metrics": ["mse"]})
    assert_close(measured, plain, 1e-6)


def test_dropout_in_fit_never_moves_the_weights_by_more_than_the_clip_an_example():
    """The same mask in norm and gradient: TensorFlow Privacy's fast path was measured at seven times the clip."""
    model = K.Sequential([K.Input((4,)), L.Dense(30, activation="relu"), L.Dropout(0.8), L.Dense(3)])
    dp = tfdpfl.DPSGD(l2_norm_clip=1.0, noise_multiplier=0.0, learning_rate=1.0)
    model.compile(optimizer=dp, loss=K.losses.MeanSquaredError())
    for i in range(15):
        before = model.get_weights()
        model.train_on_batch(10 * normal(1, 4, seed=i), 10 * normal(1, 3, seed=i))
        length = np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(model.get_weights(), before, strict=True)))
        assert length <= 1.0 + 1e-4


def test_a_batch_size_written_into_the_loss_is_taken_for_what_it_is():
    """On a batch of one, a mean over a global batch size is the example's own loss."""
    loss = lambda y, p: tf.nn.compute_average_loss(squared(y, p), global_batch_size=B)
    check(classifier(), X, REAL, loss, squared)


@pytest.mark.slow
@pytest.mark.parametrize("length", [5, None])
def test_a_number_written_under_a_sum_is_that_number_on_batches_of_static_size_too(length):
    w = tf.Variable(normal(3))

    @tf.function(input_signature=[tf.TensorSpec([B, length, 3])])
    def step(x):
        return per_example_norms(tf.reduce_sum((x * w) ** 2) / B, [w])

    gradients = per_example_gradients(lambda x: tf.reduce_sum((x * w) ** 2, [1, 2]) / B, SEQUENCE, [w])
    assert_close([step(tf.constant(SEQUENCE))], [norms_of(gradients)], 1e-5)


@pytest.mark.skipif(hasattr(K, "ops"), reason="Keras 3 trains it")
def test_keras_2s_ignored_class_has_a_mend_that_trains():
    loss = K.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    with pytest.raises(PrivacyError, match="ignore_class"):
        moved(sequences(False), IDS, IDS % 3, 1.0, loss)
    got, _ = moved(sequences(False), IDS, IDS % 3, 1.0, loss.from_config({"from_logits": True}),
                   (IDS % 3 != 0).astype("float32"))  # fmt: skip
    assert all(np.isfinite(g).all() for g in got)


@pytest.mark.slow
def test_hinge_loss_is_refused_as_keras_looks_at_all_labels_to_decide_what_they_mean():
    with pytest.raises(PrivacyError, match=r"branch by data.*all of the batch's labels.*tf.maximum\(1 - t \* p, 0\)"):
        moved(classifier(), X, 2 * ONE_HOT - 1, 1.0, "hinge")
    own = lambda t, p: tf.reduce_mean(tf.maximum(1 - t * p, 0), -1)  # as the message says
    check(classifier(), X, 2 * ONE_HOT - 1, own, lambda y, p, *_: own(y, p))


@pytest.mark.parametrize("reduce", [tf.reduce_mean, tf.reduce_sum])
def test_an_addend_of_weights_may_be_longer_than_an_examples_own_values(reduce):
    w, v = tf.Variable(normal(4, 1)), tf.Variable(normal(6, seed=1))
    own = lambda x: reduce(tf.matmul(x, w) + tf.zeros([6]), 1)

    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def step(x):
        result = clipped_gradients(reduce(tf.matmul(x, w) + v), [w, v], clip)
        return result.sum[0], result.norms, result.regularization[1]

    gradients = per_example_gradients(own, X, [w])
    clip = float(np.median(norms_of(gradients)))
    total, norms, apart = step(tf.constant(X))
    assert_close([total, norms], [*clipped_sums(gradients, clip), norms_of(gradients)], 1e-5)
    np.testing.assert_allclose(apart, np.full(6, 1 / 6 if reduce is tf.reduce_mean else 1.0), rtol=1e-6)


def test_microbatches_through_keras_clip_the_mean_of_each_group():
    model = classifier()
    gradients = per_example_gradients(lambda z: squared(z[1], model(z[0])), (X, REAL), model.trainable_variables)
    gradients = [g.reshape(3, 2, *g.shape[1:]).mean(1) for g in gradients]
    clip = float(np.median(norms_of(gradients)))
    got, _ = moved(model, X, REAL, clip, "mse", num_microbatches=3)
    assert_close([g / B * 3 for g in got], clipped_sums(gradients, clip), 2e-5)


@pytest.mark.slow
def test_an_example_that_is_not_finite_is_counted_and_moves_nothing():
    model = classifier()
    values = model.get_weights()
    x = np.concatenate([X, np.full([1, 4], np.nan, "float32")])
    clean, _ = moved(model, X, REAL, 0.4, "mse", expected_batch_size=B)
    model.set_weights(values)
    dirty, dp = moved(model, x, np.concatenate([REAL, REAL[:1]]), 0.4, "mse", expected_batch_size=B)
    assert_close([g / (B + 1) * B for g in dirty], clean)
    assert dp.num_nonfinite == 1


def test_keras_losses_that_divide_by_the_sum_of_weights_are_refused():
    try:
        loss = K.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    except ValueError:  # Keras 2 has no such reduction
        loss = lambda y, p: tf.reduce_sum(y[:, 0] * squared(y, p)) / tf.reduce_sum(y[:, 0])
    model = classifier()
    before = model.get_weights()
    with pytest.raises(PrivacyError, match=r"divided by a sum over the examples.*sum_over_batch_size"):
        moved(model, X, REAL, 1.0, loss, sample_weight=WEIGHTS)
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)
