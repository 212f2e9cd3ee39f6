"""Teachers train on disjoint shards, together as they would alone, and go on where they stopped."""

import numpy as np
import pytest
import tensorflow as tf
from pate_cases import CLASSES, FEATURES, X40, Y40, Net, blobs, dense_model, quick, subclassed

from tfdpfl.preprocessing import Normalization


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


@pytest.mark.slow
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


def on(base):
    """What makes models of a new layer each, on a base that they share."""
    if not base.built:
        base.build((None, FEATURES))

    def model_fn():
        model = tf.keras.Sequential([tf.keras.layers.Input((FEATURES,)), base, tf.keras.layers.Dense(CLASSES)])
        model.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    return model_fn


def one_for_all():
    model = dense_model()
    return lambda: model


def two_in_turn():
    models = [dense_model(), dense_model()]
    return lambda: models.append(models.pop(0)) or models[-1]


@pytest.mark.both_stacks
@pytest.mark.parametrize("together", ["auto", False])
@pytest.mark.parametrize(
    "model_fn",
    [
        one_for_all,
        two_in_turn,
        lambda: on(tf.keras.layers.Dense(8)),
        lambda: on(tf.keras.Sequential([tf.keras.layers.BatchNormalization(center=False, scale=False)])),
    ],
)
def test_teachers_that_would_train_the_same_weights_are_refused(model_fn, together):
    with pytest.raises(ValueError, match=r"returned a model with the weights .* of an earlier one.* Make all layers"):
        quick(4, model_fn(), together=together).fit(X40, Y40)


@pytest.mark.slow
@pytest.mark.both_stacks
def test_teachers_may_share_what_training_does_not_change():
    frozen = tf.keras.Sequential([tf.keras.layers.BatchNormalization(), tf.keras.layers.Dense(4)])
    frozen.trainable = False
    normalization = tf.keras.layers.Normalization()
    normalization.adapt(X40)
    for base in (frozen, normalization):
        model_fn = on(base)
        before = [np.array(w) for w in base.get_weights()]
        quick(2, model_fn, together=False).fit(X40, Y40)
        assert all(np.array_equal(*pair) for pair in zip(before, base.get_weights(), strict=True))
    quick(1, one_for_all()).fit(X40, Y40)


@pytest.mark.slow
def test_statistics_of_all_shards_are_named(recwarn):
    public, private = tf.keras.layers.Normalization(), Normalization()
    public.adapt(X40)
    private.adapt(X40, bounds=(-9, 9), epsilon=1.0, delta=1e-6)
    for base in (public, private):
        quick(2, on(base), epochs=1).fit(X40, Y40)
    said = [str(warning.message) for warning in recwarn if str(warning.message).startswith("ε does not")]
    assert len(said) == 2 and "count as public" in said[0]
    assert "does not include all that the adapt" in said[1] and "tfdpfl.reports.report" in said[1]


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
