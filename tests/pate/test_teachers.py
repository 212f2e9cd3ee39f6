"""Teachers train on disjoint shards, together as they would alone, and go on where they stopped."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpfl.pate import TeacherEnsemble, _model_fingerprint, _stacked

CLASSES, FEATURES = 3, 6


def blobs(examples, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES, examples)
    centres = np.random.default_rng(42).normal(size=(CLASSES, FEATURES)) * 3
    return (centres[y] + rng.normal(size=(examples, FEATURES))).astype(np.float32), y


def dense_model(optimizer="Adam", dropout=0.0):
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            layers.Input((FEATURES,)),
            layers.Dense(8, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(dropout),
            layers.Dense(CLASSES),
        ]
    )
    model.compile(
        getattr(tf.keras.optimizers, optimizer)(0.02), tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


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


def quick(num_teachers=4, model_fn=dense_model, **options):
    options = {"epochs": 2, "batch_size": 16, "seed": 0, "verbose": 0, **options}
    return TeacherEnsemble(model_fn, num_teachers, **options)


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


@pytest.mark.slow
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.one_stack
def test_teachers_learn_on_disjoint_shards_and_votes_are_counts_of_predictions(together):
    X, y = blobs(302)
    ensemble = quick(3, epochs=8, together=together).fit(X, y)
    assert sorted(np.concatenate(ensemble.shards_)) == list(range(302))
    assert {len(shard) for shard in ensemble.shards_} == {100, 101}
    said = "of 3 teachers 1 have no company of the same number of examples" if together else "together=False"
    assert ensemble.trained_together_ == said
    x_test, y_test = blobs(50, seed=1)
    predictions = ensemble.predict(x_test)
    votes = ensemble.votes(x_test, batch_size=7)
    assert votes.shape == (50, CLASSES) and (votes.sum(axis=1) == 3).all()
    assert all((votes[:, k] == (predictions == k).sum(axis=0)).all() for k in range(CLASSES))
    assert (votes.argmax(axis=1) == y_test).mean() > 0.9
    own = ensemble.model(2).predict(x_test, verbose=0).argmax(axis=1)
    assert (own == predictions[2]).mean() > 0.97
    weights = [ensemble.model(t).get_weights()[0] for t in range(2)]
    assert not np.allclose(*weights)


@pytest.mark.slow
@pytest.mark.one_stack
def test_a_teacher_sees_its_shard_alone():
    X, y = blobs(60)
    shards = [np.arange(0, 30), np.arange(30, 60)]
    poisoned = y.copy()
    poisoned[30:] = 0
    tf.keras.utils.set_random_seed(0)
    clean = quick(2, together=False).fit(X, y, shards=shards).model(0).get_weights()
    tf.keras.utils.set_random_seed(0)
    other = quick(2, together=False).fit(X, poisoned, shards=shards).model(0).get_weights()
    assert all(np.array_equal(a, b) for a, b in zip(clean, other, strict=True))


@pytest.mark.slow
@pytest.mark.one_stack
def test_hospitals_bring_their_own_shards():
    parts = [blobs(n, seed=n) for n in (20, 33, 20)]
    ensemble = quick(3).fit_shards(parts)
    assert [len(shard) for shard in ensemble.shards_] == [20, 33, 20]
    assert ensemble.votes(parts[0][0]).sum() == 60


@pytest.mark.slow
@pytest.mark.one_stack
def test_training_goes_on_where_it_stopped(tmp_path):
    X, y = blobs(80)
    whole = quick(4, checkpoint_dir=tmp_path).fit(X, y)
    (tmp_path / "teacher_00002.npz").unlink()
    trained = []

    def counted():
        trained.append(1)
        return dense_model()

    again = quick(4, counted, checkpoint_dir=tmp_path, seed=9).fit(X, y)
    assert len(trained) == 2  # the template, and the one that was missing
    assert all(np.array_equal(a, b) for a, b in zip(whole.shards_, again.shards_, strict=True))
    kept = [all(map(np.array_equal, whole.model(t).get_weights(), again.model(t).get_weights())) for t in range(4)]
    assert kept == [True, True, False, True]
    with pytest.raises(ValueError, match="other data: give an empty folder"):
        quick(4, checkpoint_dir=tmp_path).fit(X, (y + 1) % CLASSES)


def test_models_that_cannot_be_stacked_are_trained_one_by_one():
    def residual():
        inputs = tf.keras.Input((FEATURES,))
        x = tf.keras.layers.Dense(FEATURES)(inputs)
        outputs = tf.keras.layers.Dense(CLASSES)(tf.keras.layers.Add()([x, inputs]))
        return tf.keras.Model(inputs, outputs)  # not compiled either

    X, y = blobs(120)
    ensemble = quick(2, residual).fit(X, y)
    assert ensemble.trained_together_ == "it is not a chain of layers"
    assert (ensemble.votes(X).sum(axis=1) == 2).all()
    start, trained = residual().get_weights(), ensemble.model(0).get_weights()
    assert not np.allclose(start[0], trained[0])
    with pytest.raises(ValueError, match="together must be 'auto' or False for this model"):
        quick(2, residual, together=True).fit(X, y)


@pytest.mark.slow
@pytest.mark.one_stack
def test_teachers_may_differ_in_architecture():
    made = []

    def model_fn():
        made.append(1)
        return dense_model() if len(made) % 2 else dense_model(dropout=0.5)

    X, y = blobs(80)
    ensemble = quick(4, model_fn).fit(X, y)
    assert (ensemble.votes(X).sum(axis=1) == 4).all()
    assert len(ensemble._models) == 2


def by_class_frequency(y_true, y_pred):
    """Weighs each example by how rare its class is in the batch: examples meet."""
    k = tf.cast(tf.reshape(y_true, [-1]), tf.int32)
    weights = 1 / tf.math.bincount(k, minlength=CLASSES, maxlength=CLASSES, dtype=tf.float32)
    each = tf.keras.losses.sparse_categorical_crossentropy(k, y_pred, from_logits=True)
    return each * tf.gather(weights, k)


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


class Net(tf.keras.Model):
    def __init__(self, scale=1.0):
        super().__init__()
        self.first, self.drop, self.last = (
            tf.keras.layers.Dense(8, activation="relu"), tf.keras.layers.Dropout(0.1), tf.keras.layers.Dense(CLASSES)
        )  # fmt: skip
        self.scale = scale

    def call(self, x, training=False):
        return self.last(self.drop(self.first(x), training=training)) * self.scale


def subclassed(scale=1.0):
    model = Net(scale)
    model.compile(tf.keras.optimizers.Adam(0.05), tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def renamed(k):
    def act(x):
        return tf.nn.relu(x) * k

    return act


def told(model):
    model(X40[:1])
    return _model_fingerprint.fingerprint(model, tf.constant(X40[:2]), Y40[:2])


@pytest.mark.one_stack
@pytest.mark.slow
def test_what_a_model_is_known_by_tells_all_that_changes_its_training():
    def made(activation="relu", optimizer="Adam", rate=0.02, loss=None):
        model = tf.keras.Sequential(
            [tf.keras.layers.Input((FEATURES,)), tf.keras.layers.Dense(4, activation=activation),
             tf.keras.layers.Dense(CLASSES)]
        )  # fmt: skip
        loss = loss or tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(getattr(tf.keras.optimizers, optimizer)(rate), loss)
        return model

    makers = [
        made,
        lambda: made("tanh"),
        lambda: made(renamed(2.0)),
        lambda: made(renamed(3.0)),
        lambda: made(lambda x: tf.nn.relu(x) - x),
        lambda: made(lambda x: x - tf.nn.relu(x)),  # the same ops, wired otherwise
        lambda: made(rate=0.03),
        lambda: made(optimizer="RMSprop"),
        lambda: made(loss="sparse_categorical_crossentropy"),
        lambda: made(loss=lambda y, p: by_class_frequency(y, p)),
        lambda: made(loss=lambda y, p: 2.0 * by_class_frequency(y, p)),
        subclassed,
        lambda: subclassed(2.0),
    ]
    first = [told(make()) for make in makers]
    assert len(set(first)) == len(makers)
    assert [told(make()) for make in makers] == first


@pytest.mark.one_stack
@pytest.mark.slow
def test_subclassed_teachers_resume_and_a_changed_one_is_refused(tmp_path):
    X, y = blobs(60)
    whole = quick(2, subclassed, checkpoint_dir=tmp_path).fit(X, y, validation_split=0.2)
    assert whole.trained_together_ == "it is not a chain of layers" and not whole._models
    again = quick(2, subclassed, checkpoint_dir=tmp_path).fit(X, y, validation_split=0.2)
    assert (again.votes(X) == whole.votes(X)).all() and again.history_ == whole.history_
    assert set(again.history_[1]) == {"loss", "val_loss"} and len(again.history_[1]["loss"]) == 2
    with pytest.raises(ValueError, match="other model, loss or optimizer: give an empty folder"):
        quick(2, lambda: subclassed(2.0), checkpoint_dir=tmp_path).fit(X, y, validation_split=0.2)
    with pytest.raises(ValueError, match="other validation_split, class_weight: give an empty folder"):
        quick(2, subclassed, checkpoint_dir=tmp_path).fit(X, y, class_weight="balanced")


@pytest.mark.one_stack
@pytest.mark.slow
def test_models_of_several_inputs_vote():
    def two_inputs():
        layers = tf.keras.layers
        inputs = [tf.keras.Input((FEATURES,), name="a"), tf.keras.Input((1,), name="b")]
        outputs = layers.Dense(CLASSES)(layers.Concatenate()(inputs))
        return tf.keras.Model(inputs, outputs)

    X, y = blobs(60)
    several = [X, y[:, None].astype(np.float32)]
    ensemble = quick(2, two_inputs, epochs=1).fit(several, y)
    assert (ensemble.votes(several) == ensemble.votes(tuple(several))).all()
    parts = [([X[:30], several[1][:30]], y[:30]), ((X[30:], several[1][30:]), y[30:])]
    with pytest.raises(ValueError, match=r"as many examples in each input, got \[60, 59\]"):
        ensemble.fit((X, several[1][:-1]), y)
    assert ensemble.fit_shards(parts).votes(several).sum() == 120


@pytest.mark.slow
def test_labels_may_be_one_hot_and_losses_get_what_they_take():
    X, y = blobs(90)
    hot = np.eye(CLASSES)[y]

    def categorical():
        model = dense_model()
        model.compile(tf.keras.optimizers.Adam(0.05), tf.keras.losses.CategoricalCrossentropy(from_logits=True))
        return model

    for model_fn, labels in ((categorical, hot), (categorical, y), (dense_model, hot), (dense_model, y[:, None])):
        ensemble = quick(2, model_fn, epochs=8).fit(X, labels)
        assert ensemble.trained_together_ is True
        assert (ensemble.votes(X).argmax(axis=1) == y).mean() > 0.8
    with pytest.raises(ValueError, match="must be one-hot"):
        quick(2).fit(X, hot + hot[::-1])
    with pytest.raises(ValueError, match="y has 2 columns, but the model has 3 outputs: give it as many"):
        quick(2).fit(X, np.eye(2)[y % 2])


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


@pytest.mark.one_stack
def test_balanced_weights_are_each_teachers_own():
    X, y = blobs(60)
    ensemble = quick(2, epochs=1)
    ensemble.fit(X, y, class_weight="balanced", shards=[np.arange(30), np.arange(30, 60)])
    for t, shard in enumerate(ensemble.shards_):
        from sklearn.utils.class_weight import compute_class_weight

        truth = compute_class_weight("balanced", classes=np.unique(y[shard]), y=y[shard])
        assert ensemble._class_weights[t] == pytest.approx(truth)


@pytest.mark.one_stack
@pytest.mark.slow
def test_callbacks_are_new_for_each_teacher(capsys):
    made = []

    def callbacks(teacher):
        made.append(teacher)
        return [tf.keras.callbacks.EarlyStopping("loss", min_delta=1e9, patience=0)]

    X, y = blobs(40)
    ensemble = quick(2, epochs=5, verbose=2).fit(X, y, callbacks=callbacks)
    assert made == [0, 1] and ensemble.trained_together_ == "callbacks take one model"
    assert [len(log["loss"]) for log in ensemble.history_] == [2, 2]
    printed = capsys.readouterr().out
    assert "teacher 1, 20 examples" in printed and "epoch 2: loss" in printed


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


def test_one_output_is_two_classes():
    def binary():
        layers = tf.keras.layers
        model = tf.keras.Sequential([layers.Input((FEATURES,)), layers.Dense(1, activation="sigmoid")])
        model.compile(tf.keras.optimizers.Adam(0.1), "binary_crossentropy")
        return model

    X, y = blobs(90)
    ensemble = quick(3, binary, epochs=10).fit(X, (y == 0).astype(int))
    assert ensemble.num_classes_ == 2 and ensemble.trained_together_ is True
    assert (ensemble.votes(X).argmax(axis=1) == (y == 0)).mean() > 0.8


@pytest.mark.one_stack
@pytest.mark.slow
def test_a_teacher_that_predicts_nan_is_named():
    X, y = blobs(40)
    ensemble = quick(2).fit(X, y)
    ensemble._weights[1][0][:] = np.nan
    for count in (ensemble.votes, ensemble.predict):
        with pytest.raises(ValueError, match="teacher 1 predicts NaN"):
            count(X)


X40, Y40 = blobs(40)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quick(0), "num_teachers must be a whole number of at least 1, got 0"),
        (lambda: quick(2, "model"), "model_fn must be a function"),
        (lambda: quick(2, epochs=0), "epochs must be"),
        (lambda: quick(2, together="yes"), "together must be True, False or 'auto'"),
        (lambda: quick(41).fit(X40, Y40), "num_teachers=41 is more than the 40 examples"),
        (lambda: quick(2).fit(X40, Y40[:-1]), "one label for each of the 40 rows"),
        (lambda: quick(2).fit(X40, Y40 + 0.5), "whole numbers from 0"),
        (lambda: quick(2).fit(X40, Y40 + 1), "the label 3, but the model has 3 outputs"),
        (lambda: quick(2).fit(X40, Y40, shards=[[0, 1], [1, 2]]), "must be disjoint"),
        (lambda: quick(2).fit(X40, Y40, shards=[[0, 1]]), "one for each of 2 teachers, got 1"),
        (lambda: quick(2).fit(X40, Y40, shards=[[0, 1], []]), "none of them empty"),
        (lambda: quick(2).fit(X40, Y40, shards=[[0, 1], [2, 40]]), "indices from 0 to 39"),
        (lambda: quick(2).fit_shards([(X40, Y40)]), "one for each of 2 teachers, got 1"),
        (lambda: quick(2, lambda: 3).fit(X40, Y40), "model_fn must return a Keras model, got int"),
        (lambda: quick(2).fit(X40, Y40, validation_split=1.0), "validation_split must be below 1"),
        (lambda: quick(40).fit(X40, Y40, validation_split=0.1), "leaves teacher 0 none of its 1 examples"),
        (lambda: quick(2).fit(X40, Y40, class_weight={3: 1.0}), "classes from 0 to 2, got 3"),
        (lambda: quick(2).fit(X40, Y40, class_weight={0: -1.0}), r"class_weight\[0\] must be"),
        (lambda: quick(2).fit(X40, Y40, callbacks=[None]), "one list for all would carry data"),
        (lambda: quick(2, checkpoint_dir="x").fit(X40, Y40, callbacks=list), "leave one out"),
        (lambda: quick(2, Net).fit(X40, Y40), "model_fn must compile its Net"),
        (lambda: quick(2).votes(X40), r"call fit\(X, y\) first"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
