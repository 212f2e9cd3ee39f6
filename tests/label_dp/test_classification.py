"""Randomized response for classes: its matrix, a prior's share of ε, and its cost in time and memory."""

import collections
import math
import sys
import tracemalloc

import numpy as np
import pytest
from label_cases import X, Y, blobs, largest_loss, pure_groups
from scipy import sparse, stats
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tfdpfl.accounting import price
from tfdpfl.errors import PrivacyError
from tfdpfl.label_dp import (
    KMeansPrior,
    NoisyHistogram,
    PublicPrior,
    RandomizedResponse,
    RandomizedResponseTopK,
    RandomizedResponseWithPrior,
    RROnBins,
)


def test_randomized_response_is_the_published_matrix():
    matrix = RandomizedResponse(1.0, 10).fit([0]).transition_matrix_
    expected = np.full((10, 10), 1 / (math.e + 9)) + np.eye(10) * (math.e - 1) / (math.e + 9)
    assert abs(matrix - expected).max() < 1e-15


def test_labels_are_drawn_independently_of_each_other():
    pairs = RandomizedResponse(1.0, 3).fit_transform(np.zeros(60_000, int)).reshape(-1, 2)
    table = np.bincount(3 * pairs[:, 0] + pairs[:, 1], minlength=9).reshape(3, 3)
    assert stats.chi2_contingency(table)[1] > 1e-8


def test_the_prior_is_paid_out_of_the_total():
    x, y = blobs()
    mechanism = RandomizedResponseWithPrior(1.0, KMeansPrior(0.3, n_clusters=3), 3)
    mechanism.fit_transform(x, y)
    assert max(largest_loss(m) for m in mechanism.transition_matrix_) <= 0.7 + 1e-12
    assert mechanism.epsilon_spent == pytest.approx(1.0)
    assert price(mechanism.dp_event, 1e-9, adjacency="replace_one").epsilon == pytest.approx(1.0, rel=6e-3)
    bins = RROnBins(1.0, prior_epsilon=0.4, values=range(4))
    assert price(bins.dp_event, 1e-9, adjacency="replace_one").epsilon == pytest.approx(1.0, rel=6e-3)
    bins.fit_transform([0, 1, 2, 3, 3])
    assert largest_loss(bins.transition_matrix_) <= 0.6 + 1e-12 and bins.epsilon_spent == pytest.approx(1.0)


def share_of_truth(mechanism, y):
    """How many labels its last release tells the truth about, on average over the response's noise."""
    y = np.asarray(y)
    return mechanism.transition_matrix_[mechanism.prior_index_, y, y].mean()


def test_noise_on_classes_that_no_one_has_takes_no_truth():
    # Counts cut at 0 and divided by their sum would leave 0.84. It is 0.878 with a deviation of 0.003.
    x, y, clusterer = pure_groups(groups=400)
    mechanism = RandomizedResponseWithPrior(2.05, KMeansPrior(0.1, clusterer=clusterer), 10, seed=0)
    mechanism.fit_transform(x, y)
    assert share_of_truth(mechanism, y) > 0.86


def test_a_local_prior_is_a_part_of_the_total_and_helps_large_groups():
    x, y, clusterer = pure_groups(size=5000, groups=10)
    mechanism = RandomizedResponseWithPrior(1.0, KMeansPrior(0.5, clusterer=clusterer, local=True), 10)
    noisy = mechanism.fit_transform(x, y)
    assert (noisy == y).mean() > 0.85 > 0.3 > (RandomizedResponse(1.0, 10).fit_transform(y) == y).mean()
    assert mechanism._spent == ((0.5, 10), (0.5, 2)) and mechanism.epsilon_spent == 1.0


def test_an_automatic_share_is_a_part_of_the_total():
    x, y, clusterer = pure_groups()
    mechanism = RandomizedResponseWithPrior(4.0, KMeansPrior("auto", clusterer=clusterer), 10)
    assert price(mechanism.dp_event, 1e-9, adjacency="replace_one").epsilon == pytest.approx(4.0, rel=6e-3)
    mechanism.fit_transform(x, y)
    share = mechanism.prior_.epsilon_
    assert 0.1 < share < 1.5 and mechanism.epsilon_spent == pytest.approx(4.0)
    assert mechanism._spent == ((share, 2), (4.0 - share, 2))
    assert max(largest_loss(m) for m in mechanism.transition_matrix_) == pytest.approx(4.0 - share)
    noise = mechanism.prior_.noisy_counts_ - np.bincount(10 * x[:, 0].astype(int) + y, minlength=1000).reshape(100, 10)
    assert abs(noise).mean() == pytest.approx(2 / share, rel=0.2)


def test_an_automatic_share_depends_on_what_is_public_alone():
    x, y, clusterer = pure_groups(groups=20)
    shares = {
        RandomizedResponseWithPrior(1.0, KMeansPrior("auto", clusterer=clusterer), 10).fit(x, labels).prior_.epsilon_
        for labels in (y, np.zeros_like(y), np.random.default_rng(0).permutation(y))
    }
    assert len(shares) == 1


@pytest.mark.parametrize("size", [60, 300, 2000])
@pytest.mark.slow
def test_an_automatic_share_is_nearly_the_best_and_more_epsilon_is_no_worse(size):
    x, y, clusterer = pure_groups(size=size, groups=60)

    def truth(epsilon, share):
        made = []
        for seed in range(3):
            prior = KMeansPrior(share, clusterer=clusterer, seed=seed)
            made.append(RandomizedResponseWithPrior(epsilon, prior, 10))
            made[-1].fit_transform(x, y)
        return np.mean([share_of_truth(m, y) for m in made]), np.std([share_of_truth(m, y) for m in made])

    before = 0
    for epsilon in (0.3, 1.0, 2.05, 4.0, 8.0):
        got, spread = truth(epsilon, "auto")
        best = max(truth(epsilon, part * epsilon)[0] for part in (0.02, 0.05, 0.1, 0.2, 0.4, 0.6))
        # A guess at what groups look like is not always the best: here all other labels are rare.
        assert got > best - 0.03 - 2 * spread and got > before - 0.015 - 2 * spread
        before = got


def test_where_a_prior_is_worth_nothing_nothing_is_spent_on_it():
    x, y, clusterer = pure_groups(size=10, groups=30)
    mechanism = RandomizedResponseWithPrior(8.0, KMeansPrior("auto", clusterer=clusterer), 10)
    mechanism.fit_transform(x, y)
    assert mechanism.prior_.epsilon_ == 0 and mechanism.prior_.releases_ == 0 and mechanism.epsilon_spent == 8.0
    assert (mechanism.transition_matrix_ == RandomizedResponse(8.0, 10).fit(y).transition_matrix_).all()


def test_what_an_automatic_prior_was_paid_is_left_of_a_new_total():
    x, y, clusterer = pure_groups(groups=20)
    mechanism = RandomizedResponseWithPrior(1.0, KMeansPrior("auto", clusterer=clusterer), 10).fit(x, y)
    share = mechanism.prior_.epsilon_
    mechanism.set_params(epsilon=share)
    with pytest.raises(ValueError, match=r"epsilon=.* is not above the .* that the prior spent at fit: call fit"):
        mechanism.transform(x, y)
    assert mechanism.releases_ == 0
    mechanism.set_params(epsilon=0.7).transform(x, y)
    assert mechanism.epsilon_spent == pytest.approx(0.7)


def test_a_good_prior_makes_labels_truer():
    x, y = blobs(3000)
    plain = (RandomizedResponse(1.0, 3).fit_transform(y) == y).mean()
    helped = (RandomizedResponseWithPrior(1.0, KMeansPrior(0.3, 3), 3).fit_transform(x, y) == y).mean()
    assert plain < 0.7 < 0.9 < helped


def test_equal_priors_are_found_and_all_others_kept(monkeypatch):
    rng = np.random.default_rng(0)
    few = rng.dirichlet(np.ones(4), 7)
    index = rng.integers(0, 7, 500)
    y = rng.integers(0, 4, 500)
    mechanism = RandomizedResponseWithPrior(1.0, few[index], 4)
    mechanism.fit_transform(np.zeros((500, 1)), y)
    assert len(mechanism.transition_matrix_) == 7
    for row in (0, 99, 499):
        alone = RandomizedResponseWithPrior(1.0, few[index[row]], 4)
        alone.fit_transform([0])
        assert (mechanism.transition_matrix_[mechanism.prior_index_[row]] == alone.transition_matrix_).all()


def test_chunks_keep_each_label_with_its_prior(monkeypatch):
    from tfdpfl.label_dp import _base

    monkeypatch.setattr(_base, "_CHUNK", 7)
    rng = np.random.default_rng(0)
    y = rng.integers(0, 4, 100)
    sure = np.eye(4)[y]  # k = 1: the prior's class is released whatever the label
    for prior in (sure, np.eye(4)[y % 2]):
        noisy = RandomizedResponseWithPrior(1.0, prior, 4).fit_transform(np.zeros((100, 1)), rng.permutation(y))
        assert (noisy == prior.argmax(axis=1)).all()


def test_more_classes_than_there_are_set_after_fit_are_refused():
    mechanism = RandomizedResponseTopK(1.0, 2, None, 3).fit([0, 1, 2]).set_params(k=9)
    with pytest.raises(ValueError, match="k=9"):
        mechanism.transform([0, 1, 2])
    assert mechanism.releases_ == 0


def test_a_second_fit_of_a_paying_prior_pays_again():
    x, y = blobs()
    mechanism = RandomizedResponseWithPrior(1.0, KMeansPrior(0.2, 3), 3)
    mechanism.fit(x, y).fit(x, y).transform(x, y)
    assert mechanism.epsilon_spent == pytest.approx(0.2 + 0.2 + 0.8) and mechanism.releases_ == 1
    bins = RROnBins(1.0, prior_epsilon=0.2, values=range(3)).fit([0, 1]).fit([0, 1])
    assert bins.epsilon_spent == pytest.approx(0.4)


def test_it_works_in_pipelines():
    x, y = blobs()
    names = np.array(["a", "b", "c"])[y]
    labels = make_pipeline(RandomizedResponse(1.0))
    fitted = make_pipeline(StandardScaler(), LogisticRegression()).fit(x, labels.fit_transform(names))
    assert fitted.score(x, names) > 0.9
    prior = KMeansPrior(0.2, clusterer=make_pipeline(StandardScaler(), KMeans(3, n_init=1)))
    assert (RandomizedResponseWithPrior(2.0, prior).fit_transform(x, names) == names).mean() > 0.8
    guess = make_pipeline(StandardScaler(), KMeansPrior(20.0, 3)).fit(x, names)
    assert guess.predict_proba(x).shape == (600, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RandomizedResponseWithPrior(2e3, KMeansPrior(0.1)), "epsilon=2000 is larger"),
        (lambda: RandomizedResponse(1.0, 1), "num_classes.*at least 2, got 1"),
        (lambda: RandomizedResponse(1.0, seed=1.5), "seed.*1.5"),
        (lambda: RandomizedResponseTopK(1.0, 0), "k must be a whole number of at least 1, got 0"),
        (lambda: RandomizedResponseTopK(1.0, 4, num_classes=3), "k=4 must be at most the number of classes, 3"),
        (lambda: RandomizedResponseTopK(1.0, 4).fit([0, 1, 2]), "k=4 must be at most"),
        (lambda: RandomizedResponseWithPrior(0.5, KMeansPrior(0.5)), "prior.epsilon=0.5 must be below epsilon=0.5"),
        (lambda: RandomizedResponseWithPrior(0.5, KMeansPrior(0.6)), "prior.epsilon=0.6.*the total"),
        (lambda: RandomizedResponseWithPrior(1.0, KMeansPrior(0.5, 3)).fit_transform(Y), "X=None"),
        (lambda: RandomizedResponseWithPrior(1.0, lambda x: x[:, :3] * 0 + 1 / 3, 3).fit_transform(Y), "X=None"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("hide", [
    lambda prior: make_pipeline(StandardScaler(), prior),
    PublicPrior,
    lambda prior: prior.predict_proba,
    lambda prior: PublicPrior(make_pipeline(prior).predict_proba),
])  # fmt: skip
def test_a_paying_prior_may_not_hide(hide):
    with pytest.raises(PrivacyError, match="hides a prior with an ε"):
        RandomizedResponseWithPrior(1.0, hide(KMeansPrior(0.1)))


def test_a_histogram_needs_no_features():
    mechanism = RandomizedResponseWithPrior(1.0, NoisyHistogram(0.1), 3)
    assert set(mechanism.fit_transform(Y)) <= {0, 1, 2} and mechanism.epsilon_spent == pytest.approx(1.0)


def test_sparse_features_may_have_a_public_prior():
    features = sparse.csr_matrix(X)
    mechanism = RandomizedResponseWithPrior(1.0, LogisticRegression().fit(features, Y))
    assert mechanism.fit_transform(features, Y).shape == Y.shape


@pytest.mark.parametrize(("dtype", "classes"), [("int8", 200), ("uint8", 1000)])
def test_classes_beyond_the_labels_dtype_do_not_wrap(dtype, classes):
    released = RandomizedResponse(0.1, classes).fit_transform(np.zeros(20_000, dtype))
    assert released.min() == 0 and released.max() == classes - 1


@pytest.mark.slow
def test_ten_million_labels_need_little_memory_besides_themselves():
    y = np.zeros(10_000_000, np.int8)
    mechanism = RandomizedResponse(1.0, 10).fit(y[:10])
    tracemalloc.start()
    try:
        noisy = mechanism.transform(y)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert noisy.dtype == np.int8 and peak < 60e6
    assert (noisy == 0).mean() == pytest.approx(math.e / (math.e + 9), abs=1e-3)


@pytest.mark.parametrize("distinct", [1, 200, 60_000])
def test_sixty_thousand_labels_take_no_loop_over_labels(distinct):
    """Counts calls, because a time would depend on the machine; benchmarks/label_dp.py has the times."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, 60_000)
    prior = rng.dirichlet(np.ones(10), distinct)[np.arange(60_000) % distinct]
    mechanism = RandomizedResponse(1.0, 10) if distinct == 1 else RandomizedResponseWithPrior(1.0, prior, 10)
    calls = collections.Counter()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        mechanism.fit_transform(y) if distinct == 1 else mechanism.fit_transform(y, y)
    finally:
        sys.setprofile(None)
    assert 10 < calls["call"] + calls["c_call"] < 6_000
