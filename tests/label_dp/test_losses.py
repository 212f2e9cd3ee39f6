"""Losses that undo a release's noise train the model that the true labels would."""

import math

import numpy as np
import pytest
import tensorflow as tf
from label_cases import float_blobs, small_model

import tfdpfl
from tfdpfl.label_dp import (
    ALIBI,
    ALIBILoss,
    BackwardCorrectedLoss,
    ForwardCorrectedLoss,
    RandomizedResponse,
    RandomizedResponseWithPrior,
)

MATRIX = np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.1, 0.6]])


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
    x, y = float_blobs(1500)
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
    x, y = float_blobs(200)
    model = small_model()
    optimizer = tfdpfl.DPSGD(1.0, 0.5, expected_batch_size=20, learning_rate=0.1)
    model.compile(optimizer, ForwardCorrectedLoss(epsilon=1.0, num_classes=3))
    history = model.fit(x, y, batch_size=20, epochs=1, verbose=0)
    assert np.isfinite(history.history["loss"][0])


@pytest.mark.slow
@pytest.mark.parametrize("cls", [ForwardCorrectedLoss, BackwardCorrectedLoss])
def test_losses_are_saved_with_the_model(cls, tmp_path):
    x, y = float_blobs(60)
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
    x, y = float_blobs(3000)
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
