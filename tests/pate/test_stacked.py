"""A stack of teachers trains each as Keras would alone, and refuses what it would not honour."""

import numpy as np
import pytest
import tensorflow as tf
from pate_cases import CLASSES, FEATURES, blobs, by_class_frequency, dense_model, quick

from tfdpfl.pate import _stacked


def convolutional_model():
    layers = tf.keras.layers
    inputs = tf.keras.Input((6, 6, 1))
    x = layers.Conv2D(4, 3, strides=2, padding="same", activation="relu")(inputs)
    x = layers.MaxPooling2D(2)(x)
    outputs = layers.Dense(CLASSES, activation="softmax")(layers.Flatten()(x))
    model = tf.keras.Model(inputs, outputs)
    model.compile(tf.keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
    return model


def normalized_model(mean=0.0):
    """One that has learned the mean and variance of its inputs, from public data."""
    normalization = tf.keras.layers.Normalization()
    normalization.adapt(mean + 3 * np.random.default_rng(0).normal(size=(50, FEATURES)).astype("float32"))
    model = tf.keras.Sequential([tf.keras.Input((FEATURES,)), normalization, tf.keras.layers.Dense(CLASSES)])
    model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_fn", "shape"),
    [(dense_model, (FEATURES,)), (convolutional_model, (6, 6, 1)), (normalized_model, (FEATURES,))],
)
def test_a_stack_trains_each_teacher_as_keras_would_alone(model_fn, shape):
    tf.keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 20, *shape)).astype(np.float32)
    y = rng.integers(0, CLASSES, (2, 20))
    models = [model_fn() for _ in range(2)]
    assert _stacked.why_not(models[0]) is None
    stack = _stacked.Stack(models[0], [model.get_weights() for model in models])
    order = rng.permuted(np.tile(np.arange(20), (2, 1)), axis=1)
    stack.train_epoch(tf.constant(x), tf.constant(y), order, 8)
    stack.load([model.get_weights() for model in models])  # as if that had not been
    for _ in range(2):
        stack.train_epoch(tf.constant(x), tf.constant(y), order, 8)
        for t, model in enumerate(models):
            for start in range(0, 20, 8):
                rows = order[t, start : start + 8]
                model.train_on_batch(x[t][rows], y[t][rows])
    for model, weights in zip(models, stack.weights(), strict=True):
        for ours, keras in zip(weights, model.get_weights(), strict=True):
            assert ours == pytest.approx(keras, abs=5e-4)  # Adam magnifies rounding; a lost step is 1e-2
    alone = np.stack([model.predict(x[0], verbose=0) for model in models])
    assert stack.outputs(x[0]).numpy() == pytest.approx(alone, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("together", [True, False])
def test_teachers_whose_normalization_learned_other_statistics_keep_their_own(together):
    X, y = blobs(60)
    means = iter([0.0, 0.0, 0.0, 5.0, 0.0, 0.0])
    ensemble = quick(4, lambda: normalized_model(next(means, 0.0)), together=together).fit(X, y)
    assert len(ensemble._models) == 1  # it alone stands for itself
    for teacher in (0, *ensemble._models):
        expected = ensemble.model(teacher).predict(X, verbose=0).argmax(1)
        assert (ensemble.predict(X)[teacher] == expected).all()


def centred(x):
    return x - tf.reduce_mean(x, axis=0)


def coupled(kind):
    layers, losses = tf.keras.layers, tf.keras.losses
    sparse = losses.SparseCategoricalCrossentropy(from_logits=True)
    middle = {"activation": [layers.Activation(centred)], "softmax": [layers.Softmax(axis=0)]}.get(kind, [])
    loss = {
        "loss": by_class_frequency,
        "lambda": lambda y, p: by_class_frequency(y, p),
        "axis": losses.CategoricalCrossentropy(from_logits=True, axis=0),
        "ignored": losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1),
        "sum": losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum"),
    }.get(kind, sparse)
    dense = layers.Dense(4, activation=centred if kind == "dense" else "relu")
    model = tf.keras.Sequential([layers.Input((FEATURES,)), dense, *middle, layers.Dense(CLASSES)])
    model.compile(tf.keras.optimizers.SGD(0.5), loss)
    return model


@pytest.mark.parametrize("kind", ["loss", "lambda", "axis", "ignored", "sum", "activation", "softmax", "dense"])
@pytest.mark.one_stack
def test_teachers_in_a_stack_do_not_meet_in_loss_or_activation(kind):
    tf.keras.utils.set_random_seed(0)
    X, y = blobs(24)
    models = [coupled(kind) for _ in range(3)]
    assert _stacked.why_not(models[0]) is None
    start = [model.get_weights() for model in models]
    stack = _stacked.Stack(models[0], start)
    order = np.tile(np.arange(8), (3, 1))
    trained = []
    for changed in (False, True):
        x, labels = X.reshape(3, 8, FEATURES).copy(), y.reshape(3, 8).copy()
        if changed:
            x[0], labels[0] = -x[0], (labels[0] + 1) % CLASSES
        if kind == "axis":
            labels = np.eye(CLASSES, dtype=np.float32)[labels]
        stack.load(start)
        stack.train_epoch(tf.constant(x), tf.constant(labels), order, 8)
        trained.append(stack.weights())
    assert not np.allclose(trained[0][0][0], trained[1][0][0], atol=1e-4)
    for t in (1, 2):
        assert all(np.array_equal(a, b) for a, b in zip(trained[0][t], trained[1][t], strict=True))
    models[2].train_on_batch(x[2], labels[2])
    for ours, keras in zip(trained[1][2], models[2].get_weights(), strict=True):
        assert ours == pytest.approx(keras, abs=1e-5)


@pytest.mark.slow
def test_losses_that_a_user_wrote_are_stacked_unless_they_keep_a_state():
    seen = tf.Variable(0.0)

    def remembering(y, p):
        seen.assign_add(1.0)
        return seen * by_class_frequency(y, p)

    def own_loss(loss):
        def model_fn():
            model = dense_model()
            model.compile("sgd", loss())
            return model

        return model_fn

    X, y = blobs(64)
    ensemble = quick(2, own_loss(lambda: lambda a, b: by_class_frequency(a, b)), epochs=1).fit(X, y)
    assert ensemble.trained_together_ is True and not ensemble._models
    ensemble = quick(2, own_loss(lambda: remembering), epochs=1).fit(X, y)
    assert ensemble.trained_together_ == "it keeps a state that is no weight of the model"
    assert len(ensemble._models) == 2


@pytest.mark.slow
def test_a_stack_logs_and_weighs_classes_as_keras_does():
    tf.keras.utils.set_random_seed(0)
    X, y = blobs(40)
    weights = {0: 3.0, 2: 0.5}
    start = [dense_model("SGD").get_weights() for _ in range(2)]
    logs = []
    for together in (True, False):
        made = iter([start[0], *start])  # the first is the template's

        def model_fn(made=made):
            model = dense_model("SGD")
            model.compile(model.optimizer, model.loss, metrics=["accuracy"])
            model.set_weights(next(made))
            return model

        # One batch an epoch, so that the order of examples does not matter.
        ensemble = quick(2, model_fn, together=together, batch_size=20)
        logs.append(ensemble.fit(X, y, validation_split=0.25, class_weight=weights).history_)
    assert len(logs[0]) == 2 and set(logs[0][0]) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    for stacked, alone in zip(*logs, strict=True):
        for name, values in stacked.items():
            assert values == pytest.approx(alone[name], abs=1e-4), name


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(kernel_regularizer="l2"), "layer 'd': it"),
        (dict(kernel_constraint="non_neg"), "regularizer or a constraint"),
        (dict(trainable=False), "frozen"),
    ],
)
def test_what_a_stack_would_not_honour_is_not_stacked(change, reason):
    model = tf.keras.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(2, name="d", **change)])
    model.compile("sgd", "sparse_categorical_crossentropy")
    assert reason in _stacked.why_not(model)


def test_optimizers_that_look_at_whole_gradients_are_not_stacked():
    model = dense_model()
    model.compile(tf.keras.optimizers.SGD(0.1, clipnorm=1.0), "sparse_categorical_crossentropy")
    assert "clipnorm" in _stacked.why_not(model)
