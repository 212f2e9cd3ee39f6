"""Training in stages releases each label once, and pays once."""

import numpy as np
import pytest
import tensorflow as tf
from label_cases import blobs, float_blobs, small_model
from sklearn.model_selection import GridSearchCV

from tfdpfl.accounting import price
from tfdpfl.label_dp import KMeansPrior, MultiStageTraining, RandomizedResponse, RandomizedResponseWithPrior


class Lookup:
    """As much of a Keras model as staged training needs."""

    def fit(self, X, y, **kwargs):
        return self

    def predict(self, X, verbose=0):
        return np.full((len(X), 3), 1 / 3)


def test_a_search_costs_what_all_its_fits_cost():
    x, y = blobs(120)
    training = MultiStageTraining(Lookup, 1.0, num_classes=3)
    search = GridSearchCV(training, {"temperature": [1.0, 2.0, 3.0], "epsilon": [1.0, 2.0]}, cv=2).fit(x, y)
    best = search.best_estimator_
    total = 2 * 3 * (1.0 + 2.0) + best.epsilon
    assert best.epsilon_spent == best.epsilon and training.releases_ == 0
    # Each release dominated by two-class randomized response: the price by adding up, at a δ next to nothing.
    for relative in (best, training):
        assert relative.family_ledger.epsilon(1e-13) == pytest.approx(total, rel=2e-2)
    assert len(MultiStageTraining(Lookup, 1.0, num_classes=3).family_ledger) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MultiStageTraining(dict, 1e3), "epsilon=1000 is larger"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_stage_after_the_first_pays_all_of_epsilon_at_once():
    training = MultiStageTraining(small_model, 2.0, prior=KMeansPrior(1.0, n_clusters=3))
    whole = RandomizedResponse(2.0, 2).dp_event  # the worst of all 2-DP mechanisms
    assert training.dp_event == whole
    one = MultiStageTraining(small_model, 2.0, num_stages=1, prior=KMeansPrior(1.0, n_clusters=3))
    assert one.dp_event != whole


@pytest.mark.slow
@pytest.mark.parametrize("one_hot", [False, pytest.param(True, marks=pytest.mark.one_stack)])
def test_stages_release_each_label_once_for_the_total(one_hot):
    x, y = float_blobs(1500)
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
    x, y = float_blobs(200)
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
    x, y = float_blobs(200)
    sizes = []

    class Spy(tf.keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            sizes.append(self.params["steps"])

    training = MultiStageTraining(small_model, 1.0, num_stages=2, fractions=[0.25, 0.75], num_classes=3)
    training.fit(x, y, batch_size=10, callbacks=[Spy()], verbose=0)
    assert sizes == [5, 20]


@pytest.mark.slow
def test_a_first_stages_prior_is_paid_from_the_total():
    x, y = float_blobs()
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


def test_weights_of_examples_are_refused_before_anything_is_released():
    training = MultiStageTraining(Lookup, 1.0, num_classes=3)
    with pytest.raises(ValueError, match=r"sample_weight has a weight for each example.* Give class_weight="):
        training.fit(np.zeros((6, 2)), np.arange(6) % 3, sample_weight=np.ones(6))
    assert training.releases_ == 0
