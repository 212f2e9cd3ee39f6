"""Label DP where TensorFlow takes part: losses, the pipeline layer, tf.data, staged training."""

import math
import os
import pickle

import numpy as np
import pytest
import tensorflow as tf
from sklearn.base import clone
from sklearn.cluster import KMeans

import tfdpfl
from tfdpfl import datasets
from tfdpfl.accounting import price
from tfdpfl.label_dp import (
    ALIBI,
    ALIBILoss,
    BackwardCorrectedLoss,
    ForwardCorrectedLoss,
    KMeansPrior,
    LabelPrivacy,
    MultiStageTraining,
    RandomizedResponse,
    RandomizedResponseWithPrior,
    RROnBins,
    randomized_response,
)

MATRIX = np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.1, 0.6]])


def blobs(n=900, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, n)
    return (rng.normal(size=(n, 4)) + 5 * np.eye(4)[y]).astype(np.float32), y


def small_model(loss="sparse_categorical_crossentropy", softmax=True, rate=0.05):
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(3, "softmax" if softmax else None)])
    model.compile(tf.keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    return model


# Losses


@pytest.mark.parametrize("from_logits", [True, False])
def test_the_forward_loss_is_cross_entropy_of_the_released_label(from_logits):
    logits = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32) * 3
    y = np.arange(8) % 3
    p = tf.nn.softmax(logits).numpy()
    expected = -np.log((p @ MATRIX)[np.arange(8), y])
    loss = ForwardCorrectedLoss(MATRIX, from_logits=from_logits, reduction="none")
    given = logits if from_logits else p
    for labels in (y, y[:, None], np.eye(3)[y], tf.constant(y, tf.uint8)):
        assert loss(labels, given).numpy() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("from_logits", [True, False])
def test_alibis_loss_moves_a_model_as_the_posterior_under_its_own_prior_does(from_logits):
    alibi, y = ALIBI(1.0, 3), np.arange(8) % 3
    soft = alibi.fit_transform(y)
    logits = tf.constant(np.random.default_rng(0).normal(size=(8, 3)) * 3, tf.float32)
    loss = ALIBILoss(from_logits=from_logits, reduction="none")
    with tf.GradientTape() as tape:
        tape.watch(logits)
        value = loss(soft, logits if from_logits else tf.nn.softmax(logits))
    p = tf.nn.softmax(logits).numpy()
    np.testing.assert_allclose(value, -np.log((soft * p).sum(1)), rtol=1e-4)
    # Of cross-entropy with fixed targets the gradient in the logits is the model's probability minus the target.
    np.testing.assert_allclose(tape.gradient(value, logits), p - alibi.posterior(p), atol=1e-5)
    assert ALIBILoss.from_config(loss.get_config()).from_logits == from_logits
    with pytest.raises(ValueError, match="soft labels"):
        loss(y, p)


@pytest.mark.parametrize("from_logits", [True, False])
def test_the_backward_loss_has_the_mean_of_the_plain_loss(from_logits):
    logits = np.random.default_rng(0).normal(size=(1, 3)).astype(np.float32)
    p = tf.nn.softmax(logits).numpy()
    loss = BackwardCorrectedLoss(MATRIX, from_logits=from_logits)
    given = logits if from_logits else p
    each = np.array([float(loss(np.array([released]), given)) for released in range(3)])
    assert MATRIX @ each == pytest.approx(-np.log(p[0]), rel=1e-4)


def test_the_backward_loss_of_randomized_response_is_the_closed_form():
    logits = np.random.default_rng(1).normal(size=(1, 5)).astype(np.float32)
    plain = -tf.nn.log_softmax(logits).numpy()[0]
    loss = BackwardCorrectedLoss(epsilon=1.0, num_classes=5, from_logits=True)
    for released in range(5):
        closed = ((math.e + 4) * plain[released] - plain.sum()) / (math.e - 1)
        assert float(loss(np.array([released]), logits)) == pytest.approx(closed, rel=1e-4)


@pytest.mark.parametrize("cls", [ForwardCorrectedLoss, BackwardCorrectedLoss])
def test_randomized_response_is_corrected_without_its_matrix(cls):
    logits = np.random.default_rng(1).normal(size=(4, 5)).astype(np.float32) * 3
    matrix = (np.ones((5, 5)) + (math.e - 1) * np.eye(5)) / (math.e + 4)
    closed = cls(epsilon=1.0, num_classes=5, from_logits=True, reduction="none")
    full, loaded = cls(matrix, from_logits=True, reduction="none"), cls.from_config(closed.get_config())
    assert closed.transition_matrix == pytest.approx(matrix) and "transition_matrix" not in closed.get_config()
    for labels in (np.array([0, 4, 2, 2]), np.random.default_rng(2).dirichlet(np.ones(5), 4)):
        for loss in (closed, loaded):
            assert loss(labels, logits).numpy() == pytest.approx(full(labels, logits).numpy(), rel=1e-4, abs=1e-4)
    many = cls(epsilon=8.0, num_classes=100_000, from_logits=True)  # whose matrix would take 80 GB
    e, n = math.exp(8.0), 100_000
    forward, backward = -math.log((e / n + (n - 1) / n) / (e + n - 1)), math.log(n)
    expected = forward if cls is ForwardCorrectedLoss else backward * ((e + n - 1) - n) / (e - 1)
    assert float(many(np.array([7]), np.zeros((1, n), np.float32))) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("from_logits", [True, False])
@pytest.mark.parametrize("cls", [ForwardCorrectedLoss, BackwardCorrectedLoss])
def test_one_sigmoid_is_two_classes(cls, from_logits):
    z = np.array([[-2.0], [0.3], [1.5], [4.0]], np.float32)
    p = 1 / (1 + np.exp(-z.astype(np.float64)))
    both, matrix = np.hstack([1 - p, p]), np.array([[0.8, 0.2], [0.3, 0.7]])
    y = np.array([0, 1, 1, 0])
    if cls is ForwardCorrectedLoss:
        expected = -np.log((both @ matrix)[np.arange(4), y])
    else:
        expected = -(np.linalg.inv(matrix)[y] * np.log(both)).sum(axis=1)
    loss = cls(matrix, from_logits=from_logits, reduction="none")
    for labels in (y, y[:, None], y[:, None].astype(np.float32)):
        assert loss(labels, z if from_logits else p.astype(np.float32)).numpy() == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_a_model_with_one_sigmoid_learns():
    x, y = blobs(1500)
    y = y % 2
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1, "sigmoid")])
    loss = ForwardCorrectedLoss(epsilon=1.0, num_classes=2)
    model.compile(tf.keras.optimizers.Adam(0.05), loss, metrics=["accuracy"])
    model.fit(x, RandomizedResponse(1.0, 2).fit_transform(y), epochs=8, batch_size=50, verbose=0)
    assert model.evaluate(x, y, verbose=0)[1] > 0.85


@pytest.mark.parametrize("cls", [ForwardCorrectedLoss, BackwardCorrectedLoss])
@pytest.mark.parametrize("wrong", [-1, 3, 1.5, math.nan])
def test_labels_that_are_no_class_are_refused_at_run_time(cls, wrong):
    loss, logits = cls(MATRIX, from_logits=True), np.zeros((2, 3), np.float32)
    in_graph = tf.function(lambda y: loss(y, logits))
    for call in (lambda y: loss(y, logits), in_graph):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"labels must be whole numbers in 0\.\.2"):
            call(tf.constant([0.0, wrong]))
    # What XLA compiles has no asserts: there the loss is NaN.
    compiled = tf.function(lambda y: loss(y, logits), jit_compile=True)
    assert math.isnan(compiled(tf.constant([0.0, wrong]))) and np.isfinite(compiled(tf.constant([0.0, 2.0])))


@pytest.mark.parametrize("cls", [ForwardCorrectedLoss, BackwardCorrectedLoss])
@pytest.mark.parametrize(("y", "outputs", "message"), [
    ([0, 1], (2, 1), r"y_pred must be \[n, 3\].*got the shape \(2, 1\)"),
    ([0, 1], (2, 2), r"y_pred must be \[n, 3\].*got the shape \(2, 2\)"),
    ([0, 1], (2, 5, 3), r"y_pred must be \[n, 3\].*got the shape \(2, 5, 3\)"),
    ([[0, 1], [1, 2]], (4, 3), r"labels must be \[n\], \[n, 1\] or one-hot \[n, 3\], got the shape \(2, 2\)"),
])  # fmt: skip
def test_losses_refuse_outputs_and_labels_of_another_shape(cls, y, outputs, message):
    with pytest.raises(ValueError, match=message):
        cls(MATRIX).call(tf.constant(y), tf.ones(outputs))


@pytest.mark.slow
def test_a_dp_optimizer_takes_the_forward_loss():
    x, y = blobs(200)
    model = small_model()
    optimizer = tfdpfl.DPSGD(1.0, 0.5, expected_batch_size=20, learning_rate=0.1)
    model.compile(optimizer, ForwardCorrectedLoss(epsilon=1.0, num_classes=3))
    history = model.fit(x, y, batch_size=20, epochs=1, verbose=0)
    assert np.isfinite(history.history["loss"][0])


@pytest.mark.slow
@pytest.mark.parametrize("cls", [ForwardCorrectedLoss, BackwardCorrectedLoss])
def test_losses_are_saved_with_the_model(cls, tmp_path):
    x, y = blobs(60)
    model = small_model(cls(epsilon=2.0, num_classes=3, name="corrected"))
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "model.keras")
    again = tf.keras.models.load_model(tmp_path / "model.keras")
    assert type(again.loss) is cls and again.loss.name == "corrected"
    assert again.loss.get_config() == model.loss.get_config()
    config = tf.keras.losses.serialize(model.loss)
    assert "tfdpfl" in str(config)
    assert tf.keras.losses.deserialize(config).get_config() == model.loss.get_config()


@pytest.mark.parametrize("cls", [ForwardCorrectedLoss, BackwardCorrectedLoss])
def test_certain_models_have_finite_gradients(cls):
    logits = tf.Variable([[60.0, -60.0, 0.0], [-1e4, 0.0, 1e4]])
    with tf.GradientTape() as tape:
        loss = cls(MATRIX, from_logits=True)([1, 0], logits)
    assert np.isfinite(float(loss)) and np.isfinite(tape.gradient(loss, logits).numpy()).all()


@pytest.mark.slow
def test_the_forward_loss_recovers_the_true_classes():
    x, y = blobs(3000)
    noisy = RandomizedResponse(1.0, 3).fit_transform(y)
    model = small_model(ForwardCorrectedLoss(epsilon=1.0, num_classes=3))
    model.fit(x, noisy, epochs=8, batch_size=50, verbose=0)
    assert model.evaluate(x, y, verbose=0)[1] > 0.9
    sure = model.predict(x, verbose=0)[np.arange(3000), y]
    assert np.median(sure) > 0.75  # outputs mean true classes; those of the plain loss would stay near 0.58


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either transition_matrix or both epsilon and num_classes, got neither"),
        (dict(transition_matrix=MATRIX, epsilon=1.0), "got both"),
        (dict(epsilon=1.0), "num_classes"),
        (dict(epsilon=-1.0, num_classes=3), "epsilon.*-1.0"),
        (dict(transition_matrix=np.ones((3, 3))), "rows that sum to one"),
        (dict(transition_matrix=np.ones((7, 3, 3)) / 3), r"\[7, 3, 3\]: several priors have several matrices"),
    ],
)
@pytest.mark.parametrize("cls", [ForwardCorrectedLoss, BackwardCorrectedLoss])
def test_bad_matrices_are_refused(cls, arguments, message):
    with pytest.raises(ValueError, match=message):
        cls(**arguments)


@pytest.mark.parametrize("cls", [ForwardCorrectedLoss, BackwardCorrectedLoss])
def test_there_is_no_corrected_loss_under_a_prior(cls):
    mechanism = RandomizedResponseWithPrior(1.0, [0.9, 0.05, 0.05], 3)
    mechanism.fit_transform([0])
    with pytest.raises(ValueError, match=r"cannot be inverted.*plain loss"):
        cls(mechanism.transition_matrix_)


# The layer


def test_a_label_keeps_its_noise_through_epochs_and_shuffles():
    ids, y = np.arange(2000), np.arange(2000) % 10
    private = LabelPrivacy(0.5, 10)
    dataset = tf.data.Dataset.from_tensor_slices((ids, y)).shuffle(2000).batch(64)
    dataset = dataset.map(lambda i, label: (i, private(label, ids=i)))
    passes = []
    for _ in range(3):
        seen, noisy = zip(*dataset.as_numpy_iterator(), strict=True)
        passes.append(dict(zip(np.concatenate(seen).tolist(), np.concatenate(noisy).tolist(), strict=True)))
    assert passes[0] == passes[1] == passes[2]
    other = LabelPrivacy(0.5, 10)
    assert (other(y, ids=ids).numpy() != private(y, ids=ids).numpy()).any()


def test_the_layers_frequencies_are_its_matrix():
    n, private = 60_000, LabelPrivacy(1.0, 4)
    said = private(tf.fill([n], 2), ids=tf.range(n)).numpy()
    expected = n * private.transition_matrix_[2]
    statistic = ((np.bincount(said, minlength=4) - expected) ** 2 / expected).sum()
    assert statistic < 40  # of 3 degrees of freedom: a chance below 1e-8


def test_the_layer_takes_strings_for_ids_and_keeps_shape_and_dtype():
    private = LabelPrivacy(1.0, 3, seed=0)
    labels = tf.constant([[0], [1], [2]], tf.uint8)
    noisy = private(labels, ids=tf.constant([["a"], ["b"], ["c"]]))
    assert noisy.shape == (3, 1) and noisy.dtype == tf.uint8
    assert (LabelPrivacy(60.0, 3)(labels, ids=labels).numpy() == labels.numpy()).all()


def test_the_layer_lies_at_any_epsilon(monkeypatch):
    hashed = [tf.zeros(900, tf.int64), tf.range(900, dtype=tf.int64) * 2**53 // 900]
    monkeypatch.setattr(tf.strings, "to_hash_bucket_strong", lambda *args: hashed.pop(0))
    said = LabelPrivacy(45.0, 10)(tf.fill([900], 4), ids=tf.range(900)).numpy()
    assert np.bincount(said) == pytest.approx([100] * 4 + [0] + [100] * 5, abs=1)


def test_the_layers_key_is_not_saved():
    private = LabelPrivacy(1.0, 10)
    again = LabelPrivacy.from_config(private.get_config())
    assert (again.epsilon, again.num_classes) == (1.0, 10) and again._key != private._key
    assert not any(str(word) in str(private.get_config()) for word in private._key)
    assert price(private.dp_event, 1e-9, adjacency="replace_one").epsilon == pytest.approx(1.0, rel=6e-3)
    assert private.ledger.epsilon(1e-9) == pytest.approx(1.0, rel=6e-3)


def test_the_layer_refuses_what_it_cannot_hide():
    private = LabelPrivacy(1.0, 3)
    with pytest.raises(ValueError, match=r"ids=None.*LabelPrivacy.cached"):
        private(tf.constant([1]))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"0\.\.2"):
        private(tf.constant([3]), ids=tf.constant([1]))
    with pytest.raises(ValueError, match=r"integers 0..2, got float32"):
        private(tf.constant([0.5]), ids=tf.constant([1]))
    with pytest.raises(ValueError, match=r"epsilon.*0"):
        LabelPrivacy(0.0, 3)
    with pytest.raises(ValueError, match=r"num_classes.*1"):
        LabelPrivacy(1.0, 1)


# tf.data and tensors


@pytest.mark.slow
@pytest.mark.parametrize(("how", "batched"), [("function", False), ("layer", False), ("transformer", True)])
def test_a_dataset_has_one_release_however_often_it_is_read(how, batched):
    x, y = blobs(100)
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


def test_every_release_of_the_layer_is_counted():
    layer = LabelPrivacy(1.0, 10)
    once = layer.ledger.epsilon(1e-9)
    data = tf.data.Dataset.from_tensor_slices(np.arange(200) % 10)
    layer.cached(data)
    assert layer.ledger.epsilon(1e-9) == once
    layer.cached(data)
    twice = layer.ledger.epsilon(1e-9)
    layer(tf.constant([1, 2]), ids=tf.constant([5, 6]))
    layer(tf.constant([1, 2]), ids=tf.constant([5, 6]))  # the same noise
    assert 1.9 < twice < 2.01 and 2.9 < layer.ledger.epsilon(1e-9) < 3.02


@pytest.mark.parametrize(("labels", "ids", "message"), [
    (tf.constant([1, 2, 3]), tf.constant(7), "ids must have the shape of labels"),
    (tf.constant([1, 2, 3]), tf.constant([7]), "ids must have the shape of labels"),
    (tf.constant([[1], [2]]), tf.constant([7, 8]), "ids must have the shape of labels"),
    (tf.constant([1, 2]), tf.constant([0.1, 0.2]), "ids must be integers or strings, got float32"),
    (tf.constant([1, 2], tf.uint8), tf.constant([7, 8]), "uint8 cannot hold 1000 classes"),
])  # fmt: skip
def test_the_layer_refuses_ids_that_would_share_noise(labels, ids, message):
    with pytest.raises(ValueError, match=message):
        LabelPrivacy(1.0, 1000)(labels, ids=ids)


def test_ids_of_unknown_length_are_compared_when_run():
    layer = LabelPrivacy(1.0, 10)
    step = tf.function(lambda y, i: layer(y, ids=i), input_signature=[tf.TensorSpec([None], tf.int32)] * 2)
    assert step([1, 2], [3, 4]).shape == (2,)
    with pytest.raises(tf.errors.InvalidArgumentError, match="ids must have the shape of labels"):
        step([1, 2], [3])


def test_a_stage_after_the_first_pays_all_of_epsilon_at_once():
    training = MultiStageTraining(small_model, 2.0, prior=KMeansPrior(1.0, n_clusters=3))
    whole = RandomizedResponse(2.0, 2).dp_event  # the worst of all 2-DP mechanisms
    assert training.dp_event == whole
    one = MultiStageTraining(small_model, 2.0, num_stages=1, prior=KMeansPrior(1.0, n_clusters=3))
    assert one.dp_event != whole


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
    x, y = blobs(300)
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


# A Keras model as a prior, and staged training


@pytest.mark.slow
def test_a_keras_model_is_a_prior():
    x, y = blobs()
    for softmax in (True, False):
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=not softmax)
        model = small_model(loss, softmax)
        model.fit(x, y, epochs=4, verbose=0)
        mechanism = RandomizedResponseWithPrior(0.5, model, 3)
        assert (mechanism.fit_transform(x, y) == y).mean() > 0.9 and mechanism.epsilon_spent == 0.5
    assert clone(mechanism).prior is model


@pytest.mark.slow
@pytest.mark.parametrize("one_hot", [False, pytest.param(True, marks=pytest.mark.one_stack)])
def test_stages_release_each_label_once_for_the_total(one_hot):
    x, y = blobs(1500)
    names = np.array(["c", "a", "b"])[y]
    loss = "categorical_crossentropy" if one_hot else "sparse_categorical_crossentropy"
    training = MultiStageTraining(lambda: small_model(loss), 1.0, num_stages=3, one_hot=one_hot, seed=0)
    training.fit(x, names, epochs=4, batch_size=50, verbose=0)
    assert np.bincount(training.stage_).tolist() == [500, 500, 500]
    assert training.noisy_labels_.shape == (1500,) and set(training.noisy_labels_) <= {"a", "b", "c"}
    assert training.epsilon_spent == 1.0 and training.releases_ == 1
    assert [m.releases_ for m in training.mechanisms_] == [1, 1, 1]
    assert price(training.dp_event, 1e-9, adjacency="replace_one").epsilon == pytest.approx(1.0, rel=6e-3)
    assert all(m.epsilon == 1.0 for m in training.mechanisms_)
    truth = [(training.noisy_labels_ == names)[training.stage_ == stage].mean() for stage in range(3)]
    assert truth[0] < 0.7 < truth[2]  # 0.576 without a prior, and 0.7 of 500 once in 10^8
    assert training.score(x, names) > 0.9 and training.predict_proba(x).shape == (1500, 3)
    assert [len(h.history["loss"]) for h in training.histories_] == [4, 4, 4]


@pytest.mark.slow
def test_the_stages_split_knows_nothing_of_the_labels():
    x, y = blobs(200)
    splits = [
        MultiStageTraining(small_model, 1.0, seed=3, num_classes=3).fit(x, labels, verbose=0).stage_
        for labels in (y, (y + 1) % 3)
    ]
    assert (splits[0] == splits[1]).all()


def test_the_second_stages_prior_is_of_true_labels():
    # A perfect model of the released labels predicts Tᵀp; the prior must be p, but for a tenth of doubt.
    x, p = np.eye(3), np.array([[0.8, 0.2, 0.0], [0.0, 1.0, 0.0], [0.3, 0.3, 0.4]])
    training = MultiStageTraining(small_model, 1.0)
    first = RandomizedResponseWithPrior(1.0, None, 3)
    first.fit_transform([0, 1, 2])

    class Perfect:
        def predict(self, X, verbose=0):
            return X @ p @ first.transition_matrix_

    table = training._prior_from(Perfect(), first).table(x, np.arange(3), 3)
    assert table == pytest.approx(0.9 * p + 0.1 / 3)
    plain = training.set_params(debias=False)._prior_from(Perfect(), first).table(x, np.arange(3), 3)
    assert plain == pytest.approx(p @ first.transition_matrix_)
    # Without an inverse the softmax is taken as it is.
    singular = RandomizedResponseWithPrior(1.0, [0.9, 0.05, 0.05], 3)
    singular.fit_transform([0, 1, 2])
    training.set_params(debias=True)._prior_from(Perfect(), singular).table(x, np.arange(3), 3)


@pytest.mark.slow
def test_later_stages_train_on_all_that_was_released():
    x, y = blobs(200)
    sizes = []

    class Spy(tf.keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            sizes.append(self.params["steps"])

    training = MultiStageTraining(small_model, 1.0, num_stages=2, fractions=[0.25, 0.75], num_classes=3)
    training.fit(x, y, batch_size=10, callbacks=[Spy()], verbose=0)
    assert sizes == [5, 20]


@pytest.mark.slow
def test_a_first_stages_prior_is_paid_from_the_total():
    x, y = blobs()
    training = MultiStageTraining(small_model, 1.0, prior=KMeansPrior(0.25, 3), num_classes=3)
    training.fit(x, y, epochs=1, verbose=0)
    assert training.epsilon_spent == pytest.approx(1.0)
    assert max(m._response_epsilon for m in training.mechanisms_[:1]) == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(model_fn=5), "model_fn must be a function that makes a compiled model, got 5"),
        (dict(epsilon=0.0), "epsilon.*0.0"),
        (dict(num_stages=0), "num_stages.*0"),
        (dict(temperature=0.0), "temperature.*0.0"),
        (dict(fractions=[0.5, 0.6]), "fractions"),
        (dict(prior=KMeansPrior(1.5)), "prior.epsilon=1.5 must be below epsilon=1"),
    ],
)
def test_bad_stages_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        MultiStageTraining(**{"model_fn": small_model, "epsilon": 1.0, **arguments})


def test_stages_need_examples():
    training = MultiStageTraining(small_model, 1.0, num_stages=4, num_classes=3)
    with pytest.raises(ValueError, match="num_stages=4 but there are 3 examples"):
        training.fit(np.zeros((3, 4)), [0, 1, 2])
    with pytest.raises(ValueError, match="one length, got 3 and 2"):
        training.fit(np.zeros((3, 4)), [0, 1])


def test_a_transformer_survives_pickling_with_its_record():
    mechanism = RandomizedResponse(1.0, 3)
    mechanism.fit_transform(tf.constant([0, 1]))
    assert pickle.loads(pickle.dumps(mechanism)).releases_ == 1


# Real data


@pytest.mark.one_stack
@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("TFDPFL_DATA_DIR"), reason="needs MNIST: set TFDPFL_DATA_DIR")
def test_a_kmeans_prior_helps_on_mnist_and_an_automatic_share_tells_nine_of_ten_at_one_and_no_less_with_more():
    data = datasets.load_mnist()
    x, y = data.x_train, data.y_train
    found = KMeansPrior(1.0, 200, num_classes=10, seed=0).fit(x, y)
    clusters = found.groups(x)[:, None].astype(float)

    class Given(KMeans):
        def fit(self, X, y=None):
            return self

        def predict(self, X):
            return np.asarray(X)[:, 0].astype(int)

    noisy = RandomizedResponseWithPrior(0.5, KMeansPrior(0.1, clusterer=Given(200)), 10).fit_transform(clusters, y)
    plain = RandomizedResponse(0.5, 10).fit_transform(y)
    # Published: 0.155 of plain labels are true, most of those under the prior.
    assert (plain == y).mean() < 0.2 < 0.6 < (noisy == y).mean()
    prior = KMeansPrior("auto", clusterer=Given(200))
    before = 0
    for epsilon in (0.2, 0.5, 1.0, 2.05, 4.0, 8.0):
        true = []
        for _ in range(4):
            mechanism = RandomizedResponseWithPrior(epsilon, prior, 10)
            noisy = mechanism.fit_transform(clusters, y)
            assert mechanism.epsilon_spent == pytest.approx(epsilon)
            true.append((noisy == y).mean())
        assert np.mean(true) > before - 0.003 and (epsilon < 1 or min(true) > 0.9)
        before = np.mean(true)
