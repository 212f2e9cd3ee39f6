"""Guesses of each example's label: their noise, what they know, and what is refused."""

import math
import os
import pickle

import numpy as np
import pytest
import tensorflow as tf
from label_cases import X, Y, blobs, float_blobs, pure_groups, small_model
from scipy import optimize, stats
from sklearn.base import clone
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from sklearn.svm import LinearSVC

from tfdpfl import datasets
from tfdpfl.label_dp import (
    KMeansPrior,
    LabelPrior,
    NoisyHistogram,
    PublicPrior,
    RandomizedResponse,
    RandomizedResponseWithPrior,
    _base,
)


@pytest.mark.parametrize("make", [
    lambda eps, n: KMeansPrior(eps, n_clusters=1, num_classes=n),
    lambda eps, n: NoisyHistogram(eps, num_classes=n),
])  # fmt: skip
def test_a_histograms_noise_is_discrete_laplace_of_half_its_epsilon(make):
    # One label moves two bins: e^(-ε|x|/2) on each makes ε.
    classes, epsilon = 4000, 0.8
    prior = make(epsilon, classes).fit(np.ones((3, 1)), [0, 1, 1])
    noise = prior.noisy_counts_[0] - np.bincount([0, 1, 1], minlength=classes)
    edges = np.arange(-8, 9)
    seen = np.array([(noise == x).sum() for x in edges])
    expected = classes * stats.dlaplace.pmf(edges, epsilon / 2)
    rest = (classes - seen.sum(), classes - expected.sum())
    assert stats.chisquare([*seen, rest[0]], [*expected, rest[1]]).pvalue > 1e-8


def test_clusters_know_nothing_of_the_labels():
    x, y = blobs()
    other = np.random.default_rng(5).permutation(y)
    made = [KMeansPrior(1.0, n_clusters=7, num_classes=3, seed=0).fit(x, labels) for labels in (y, other)]
    assert (made[0].groups(x) == made[1].groups(x)).all()
    assert (made[0].groups(x) == made[0].clusterer_.labels_).all()


def test_clusters_are_fitted_before_the_labels_are_counted(monkeypatch):
    x, y = blobs()
    seen = []

    class Recorder(KMeans):
        def fit(self, X, y=None, **kwargs):
            seen.append((X.shape, y))
            return super().fit(X, y, **kwargs)

    KMeansPrior(1.0, num_classes=3, clusterer=Recorder(5, n_init=1)).fit(x, y)
    assert seen == [(x.shape, None)]


def test_what_lowers_all_counts_alike_changes_no_guess(monkeypatch):
    # Cut at 0, such counts would leave nothing.
    monkeypatch.setattr(_base.Uniforms, "discrete_laplace", lambda self, a, shape: np.full(shape, -1e6))
    prior = KMeansPrior(0.5, n_clusters=3, num_classes=3, seed=0).fit(*blobs())
    assert (prior.prior_.max(axis=1) > 1 - 1e-6).all() and prior.score(*blobs()) == 1


def test_noisy_counts_become_the_nearest_shares_of_the_groups_size():
    x, y = blobs(90)
    prior = KMeansPrior(0.05, n_clusters=6, num_classes=3, seed=0).fit(x, y)
    sizes = np.bincount(prior.groups(x), minlength=6)
    for noisy, size, shares in zip(prior.noisy_counts_, sizes, prior.prior_, strict=True):
        left = lambda t, noisy=noisy, size=size: np.maximum(noisy - t, 0).sum() - size
        cut = optimize.brentq(left, noisy.min() - size, noisy.max())
        assert shares * size == pytest.approx(np.maximum(noisy - cut, 0), abs=1e-8)


@pytest.mark.parametrize("label", [0, 2])
def test_a_local_prior_counts_randomized_labels(monkeypatch, label):
    # Before a label is counted it goes through randomized response: undo the correction, and that must be seen.
    n, epsilon = 90_000, 0.7
    monkeypatch.setattr(_base.Uniforms, "__call__", lambda self, n: (np.arange(n) + 0.5) / n)
    prior = NoisyHistogram(epsilon, 4, local=True).fit(np.zeros((n, 1)), np.full(n, label))
    sent = RandomizedResponse(epsilon, 4).fit([0]).transition_matrix_.T @ prior.noisy_counts_[0] / n
    odds = np.exp(epsilon * np.eye(4)[label])
    assert sent == pytest.approx(odds / odds.sum(), abs=1e-4)
    assert prior.epsilon_spent == pytest.approx(epsilon)
    assert prior.dp_event == RandomizedResponse(epsilon, 4).dp_event


def test_a_local_priors_counts_are_unbiased_and_as_noisy_as_is_known():
    group, y = np.repeat([0, 1], [3000, 1000])[:, None], np.arange(4000) % 5 % 4
    _, _, clusterer = pure_groups(size=1, groups=2)
    truth = np.bincount(4 * group[:, 0] + y, minlength=8).reshape(2, 4)
    made = [KMeansPrior(1.0, num_classes=4, clusterer=clusterer, local=True).fit(group, y) for _ in range(200)]
    errors = np.array([prior.noisy_counts_ - truth for prior in made])
    keep, lie = math.e / (math.e + 3), 1 / (math.e + 3)
    variance = truth * keep * (1 - keep) + (truth.sum(axis=1, keepdims=True) - truth) * lie * (1 - lie)
    spread = np.sqrt(variance) / (keep - lie)
    assert (abs(errors.mean(axis=0)) < 6 * spread / math.sqrt(200)).all()
    assert errors.std(axis=0) == pytest.approx(spread, rel=0.3)
    assert all(abs(prior.prior_.sum(axis=1) - 1).max() < 1e-9 for prior in made)


def test_an_empty_cluster_is_a_cluster():
    class Gaps(KMeans):
        def predict(self, X):
            return np.where(np.asarray(X)[:, 0] > 4, 5, 2)

    x, y = blobs()
    prior = KMeansPrior(0.5, num_classes=3, clusterer=Gaps(6, n_init=1)).fit(x, y)
    assert prior.prior_.shape == (6, 3) and np.isfinite(prior.prior_).all()
    assert abs(prior.prior_.sum(axis=1) - 1).max() < 1e-12
    assert (prior.prior_[[0, 1, 3, 4]] == 1 / 3).all()  # plain randomized response, not always the last class


def test_images_and_many_components_are_clustered_too():
    x, y = blobs()
    images = np.repeat(x[:, :, None, None], 20, axis=2).astype(np.float32)
    prior = KMeansPrior(50.0, n_clusters=3, n_components=2, num_classes=3, seed=0).fit(images, y)
    assert prior.pca_.n_components_ == 2 and prior.score(images, y) > 0.95
    assert prior.predict_proba(images.astype(np.float64)).shape == (600, 3)


def test_the_sources_of_a_public_prior():
    x, y = blobs()
    model = LogisticRegression().fit(x[:300], y[:300])
    table = model.predict_proba(x)
    for prior in (model, table, model.predict_proba, lambda x: model.predict_log_proba(x), PublicPrior(table)):
        mechanism = RandomizedResponseWithPrior(1.0, prior, 3)
        noisy = mechanism.fit_transform(x, y)
        assert mechanism.epsilon_spent == 1.0 and (noisy == y).mean() > 0.9
    assert clone(RandomizedResponseWithPrior(1.0, model, 3)).fit_transform(x, y).shape == y.shape


def test_a_models_classes_are_lined_up():
    x, y = blobs()
    names = np.array(["cat", "dog", "ant"])[y]
    model = LogisticRegression().fit(x[names != "dog"], names[names != "dog"])
    table = PublicPrior(model).table(x, np.array(["ant", "cat", "dog"]), len(x))
    assert (table[:, 2] == 0).all() and table[y == 0, 1].mean() > 0.9


def test_a_temperature_flattens():
    table = PublicPrior([0.9, 0.1], temperature=2.0).table(None, np.arange(2), 5)
    assert table[0].tolist() == pytest.approx([0.75, 0.25])


def test_a_paying_priors_clone_has_noise_of_its_own():
    x, y = blobs()
    prior = KMeansPrior(0.05, 3, num_classes=3, seed=0)
    made = [p.fit(x, y).noisy_counts_ for p in (prior, clone(prior), pickle.loads(pickle.dumps(prior)), prior)]
    assert len({m.tobytes() for m in made}) == 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: NoisyHistogram(1e3), "epsilon=1000 is larger"),
        (lambda: KMeansPrior(0.0), "epsilon.*got 0.0"),
        (lambda: KMeansPrior("half"), "epsilon must be a finite number above 0, got 'half'.*'auto'"),
        (lambda: KMeansPrior("auto", local=True), "epsilon='auto' .* local=True.*give a number"),
        (lambda: KMeansPrior(0.1, local="yes"), "local must be True or False, got 'yes'"),
        (lambda: KMeansPrior("auto", seed=-1), "seed.*-1"),
        (lambda: KMeansPrior("auto", 3).fit(X, Y), "epsilon='auto' is a share of the ε of a mechanism.*give a number"),
        (lambda: KMeansPrior(1.0, n_clusters=0), "n_clusters.*got 0"),
        (lambda: KMeansPrior(1.0, n_components=0), "n_components.*got 0"),
        (lambda: KMeansPrior(1.0).fit(X, Y), "n_clusters=100 but X has only n_samples=60"),
        (lambda: KMeansPrior(1.0, 3).fit(np.where(X > 5, np.nan, X), Y), "NaN"),
        (lambda: KMeansPrior(1.0, 3).fit(X, Y[:-1]), "one length, got 60 and 59"),
        (lambda: RandomizedResponseWithPrior(1.0, [0.5, 0.6], 2).fit_transform(X, Y % 2), "sum to one.*1.1: divide"),
        (lambda: RandomizedResponseWithPrior(1.0, [0.5, 0.4], 2).fit_transform(X, Y % 2), "sum to one.*0.9"),
        (lambda: RandomizedResponseWithPrior(1.0, [1.5, -0.5], 2).fit_transform(X, Y % 2), "probabilities, got -0.5"),
        (lambda: RandomizedResponseWithPrior(1.0, [math.nan, 1], 2).fit_transform(X, Y % 2), "probabilities, got nan"),
        (lambda: RandomizedResponseWithPrior(1.0, [1 / 3] * 3, 2).fit_transform(X, Y % 2), "one column.*2 classes"),
        (lambda: RandomizedResponseWithPrior(1.0, np.full((7, 2), 0.5), 2).fit_transform(X, Y % 2), "7 rows for 60"),
        (lambda: RandomizedResponseWithPrior(1.0, LogisticRegression(), 3).fit_transform(X, Y), "not fitted.*KMeans"),
        (lambda: RandomizedResponseWithPrior(1.0, LogisticRegression().fit(X, Y + 7)).fit_transform(X, Y), "no class"),
        (lambda: PublicPrior([1.0], temperature=0), "temperature.*0"),
        (lambda: LabelPrior.fit(NoisyHistogram(1.0), X, None), "target y is None"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_prior_without_probabilities_is_refused_with_the_mend():
    with pytest.raises(ValueError, match=r"no predict_proba.*CalibratedClassifierCV"):
        RandomizedResponseWithPrior(1.0, LinearSVC().fit(X, Y)).fit_transform(X, Y)


def test_a_cluster_that_fit_did_not_know_is_refused():
    class Wild(KMeans):
        def predict(self, X):
            return np.full(len(X), 3 if len(X) > 10 else 9)

    prior = KMeansPrior(1.0, num_classes=3, clusterer=Wild(4, n_init=1)).fit(X, Y)
    with pytest.raises(ValueError, match=r"name none that it did not at fit, got 9..9"):
        prior.predict_proba(X[:5])


@pytest.mark.slow
def test_a_keras_model_is_a_prior():
    x, y = float_blobs()
    for softmax in (True, False):
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=not softmax)
        model = small_model(loss, softmax)
        model.fit(x, y, epochs=4, verbose=0)
        mechanism = RandomizedResponseWithPrior(0.5, model, 3)
        assert (mechanism.fit_transform(x, y) == y).mean() > 0.9 and mechanism.epsilon_spent == 0.5
    assert clone(mechanism).prior is model


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
    for epsilon in (0.2, 1.0, 4.0):
        mechanism = RandomizedResponseWithPrior(epsilon, prior, 10)
        true = (mechanism.fit_transform(clusters, y) == y).mean()
        assert mechanism.epsilon_spent == pytest.approx(epsilon)
        assert true > before and (epsilon < 1 or true > 0.9)
        before = true
