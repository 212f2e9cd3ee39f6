"""Released labels are as private as is said, as truthful as can be, and every release is counted."""

import collections
import itertools
import math
import pickle
import subprocess
import sys
import tracemalloc
import warnings
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from dp_accounting import dp_event
from scipy import optimize, sparse, stats
from sklearn.base import clone
from sklearn.cluster import KMeans
from sklearn.compose import TransformedTargetRegressor
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC
from sklearn.utils.estimator_checks import check_estimator

from tfdpfl.accounting import PrivacyLedger, price
from tfdpfl.errors import PrivacyError
from tfdpfl.label_dp import (
    ALIBI,
    KMeansPrior,
    LabelPrior,
    MultiStageTraining,
    NoisyHistogram,
    PublicPrior,
    RandomizedResponse,
    RandomizedResponseTopK,
    RandomizedResponseWithPrior,
    RROnBins,
    UnbiasedRandomizer,
    _base,
    _top_k,
    debiased_label_counts,
    randomized_response,
)

SKEWED = np.array([0.05, 0.4, 0.1, 0.3, 0.15])
FIVE = ([0.0, 1, 2, 3, 10], [0.4, 0.25, 0.2, 0.1, 0.05])


def blobs(n=600, classes=3, seed=0):
    """Clusters that tell the class, and the classes."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n)
    return rng.normal(size=(n, 4)) + 8 * np.eye(4)[y], y


def largest_loss(matrix):
    """ε of a matrix [inputs, outputs]: the largest log ratio of two inputs' probabilities of one output."""
    worst = 0.0
    for column in matrix.T:
        if column.max() > 0:
            worst = max(worst, math.inf if column.min() == 0 else math.log(column.max() / column.min()))
    return worst


def sampled_matrix(monkeypatch, mechanism, inputs, outputs, n=100_000):
    """P(output | input) by running the sampler itself on evenly spaced uniform numbers."""
    with monkeypatch.context() as patch:
        patch.setattr(_base.Uniforms, "__call__", lambda self, n: (np.arange(n) + 0.5) / n)
        rows = [np.asarray(mechanism.transform(np.full(n, label))) for label in inputs]
    return np.array([[(row == output).mean() for output in outputs] for row in rows])


CLASS_MECHANISMS = [
    lambda eps: RandomizedResponse(eps, 5),
    lambda eps: RandomizedResponse(eps, 2),
    lambda eps: RandomizedResponseTopK(eps, 1, SKEWED, 5),
    lambda eps: RandomizedResponseTopK(eps, 3, SKEWED, 5),
    lambda eps: RandomizedResponseTopK(eps, 5, None, 5),
    lambda eps: RandomizedResponseWithPrior(eps, SKEWED, 5),
    lambda eps: RandomizedResponseWithPrior(eps, [0.0, 0.5, 0.0, 0.5, 0.0], 5),
    lambda eps: RandomizedResponseWithPrior(eps, [0, 0, 1, 0, 0], 5),
    lambda eps: RandomizedResponseWithPrior(eps, None, 5),
]
NUMBER_MECHANISMS = [
    lambda eps: RROnBins(eps, prior=FIVE),
    lambda eps: RROnBins(eps, prior=FIVE, loss="absolute"),
    lambda eps: RROnBins(eps, prior=FIVE, loss="poisson"),
    lambda eps: RROnBins(eps, prior_epsilon=0.4 * eps, values=range(5)),
    lambda eps: UnbiasedRandomizer(eps, prior=FIVE),
]


# Privacy, by enumeration


@pytest.mark.parametrize("epsilon", [0.05, 1.0, 8.0])
@pytest.mark.parametrize("make", [*CLASS_MECHANISMS, *NUMBER_MECHANISMS])
def test_no_output_tells_two_labels_apart_by_more_than_epsilon(make, epsilon):
    mechanism = make(epsilon)
    mechanism.fit([0, 1])
    if make not in NUMBER_MECHANISMS:
        mechanism.transform([0, 1])
    matrix = mechanism.transition_matrix_
    assert abs(matrix.sum(axis=1) - 1).max() <= 1e-12 and (matrix >= 0).all()
    assert largest_loss(matrix) <= epsilon + 1e-12


@pytest.mark.parametrize("epsilon", [0.3, 2.0])
@pytest.mark.parametrize("make", [*CLASS_MECHANISMS, *NUMBER_MECHANISMS[:4]])
def test_the_sampler_does_what_the_matrix_says(monkeypatch, make, epsilon):
    mechanism = make(epsilon)
    mechanism.fit([0, 1])
    mechanism.transform([0, 1])
    matrix = mechanism.transition_matrix_
    inputs = mechanism.values_ if make in NUMBER_MECHANISMS else range(len(matrix))
    outputs = mechanism.outputs_ if make in NUMBER_MECHANISMS else range(len(matrix))
    assert abs(sampled_matrix(monkeypatch, mechanism, inputs, outputs) - matrix).max() < 2e-5


def test_randomized_response_is_the_published_matrix():
    matrix = RandomizedResponse(1.0, 10).fit([0]).transition_matrix_
    expected = np.full((10, 10), 1 / (math.e + 9)) + np.eye(10) * (math.e - 1) / (math.e + 9)
    assert abs(matrix - expected).max() < 1e-15


@pytest.mark.parametrize(
    "make", [CLASS_MECHANISMS[i] for i in (0, 1, 3, 5)] + NUMBER_MECHANISMS[:1] + NUMBER_MECHANISMS[4:]
)
def test_frequencies_pass_a_chi_square_test(make):
    mechanism = make(1.0)
    n = 50_000
    label = 1 if getattr(mechanism, "num_classes", 5) == 2 else 3
    released = mechanism.fit_transform(np.full(n, label))
    matrix = mechanism.transition_matrix_
    outputs = getattr(mechanism, "outputs_", np.arange(matrix.shape[1]))
    row = matrix[list(mechanism.values_).index(label) if hasattr(mechanism, "values_") else label]
    seen = np.array([(released == output).sum() for output in outputs])
    assert seen.sum() == n
    assert stats.chisquare(seen[row > 0], n * row[row > 0]).pvalue > 1e-8


@pytest.mark.parametrize("classes", [2, 10, 10_000])
@pytest.mark.parametrize("epsilon", [30.0, 37.0, 45.0, 700.0])
@pytest.mark.parametrize("make", [
    lambda eps, k: RandomizedResponse(eps, k),
    lambda eps, k: RandomizedResponseWithPrior(eps, np.full(k, 1 / k), k),
    lambda eps, k: RROnBins(eps, prior=(np.arange(256.0), np.full(256, 1 / 256))),
])  # fmt: skip
def test_lies_are_never_rarer_than_epsilon_says(monkeypatch, make, epsilon, classes):
    # At ε = 37 a lie is rarer than a uniform number's last bit: it must be told oftener, not never.
    mechanism, n = make(epsilon, classes).fit([0, 1]), 3000
    k = len(mechanism.outputs_) if hasattr(mechanism, "outputs_") else classes
    odds = (k - 1) * Fraction(math.exp(-epsilon))
    due = max(1, math.ceil(odds / (1 + odds) * 2**53))
    numbers = [np.arange(n) * 2.0**-53, (np.arange(n) + 0.5) / n]
    monkeypatch.setattr(_base.Uniforms, "__call__", lambda self, size: numbers.pop(0)[:size])
    released = mechanism.transform(np.full(n, 1))
    truth = mechanism.outputs_[mechanism.bins_[1]] if hasattr(mechanism, "outputs_") else 1
    assert (released != truth).sum() == pytest.approx(min(due, n), abs=1e-9 * due)


def test_rare_lies_name_all_classes_alike(monkeypatch):
    for mechanism in (RandomizedResponse(45.0, 10), RandomizedResponseWithPrior(45.0, np.full(10, 0.1), 10)):
        mechanism.fit([0, 1])
        numbers = [np.zeros(900), (np.arange(900) + 0.5) / 900]
        monkeypatch.setattr(_base.Uniforms, "__call__", lambda self, size, numbers=numbers: numbers.pop(0)[:size])
        assert np.bincount(mechanism.transform(np.full(900, 4))).tolist() == [100] * 4 + [0] + [100] * 5


def test_the_largest_epsilon_is_priced():
    for mechanism in (RandomizedResponse(700.0, 5), RROnBins(700.0, prior=FIVE), ALIBI(700.0, 5)):
        mechanism.fit_transform([0, 1, 2])
        assert 699 < mechanism.ledger.epsilon(1e-6) < 701


@pytest.mark.parametrize("zeros", [1, 3])
def test_noise_rarer_than_a_float_step_still_comes(monkeypatch, zeros):
    """A word of 53 zero bits is followed by further ones, so that counts of ε = 80 are noisy once in e^40 times."""
    words = [np.zeros((2, 1))] + [np.zeros(2)] * (zeros - 1) + [np.full(2, 0.5)]
    monkeypatch.setattr(_base.Uniforms, "__call__", lambda self, *shape: words.pop(0))
    assert (_base.Uniforms(0).fine(2, 1) == 2.0 ** (-53 * zeros - 1)).all() and not words
    words = [np.array([[0.0], [0.5]])] + [np.zeros(1)] * (zeros - 1) + [np.full(1, 0.5)]
    monkeypatch.setattr(_base.Uniforms, "__call__", lambda self, *shape: words.pop(0))
    noise = _base.Uniforms(0).discrete_laplace(0.7, (1,))
    assert noise == math.floor((53 * zeros + 1) * math.log(2) / 0.7)


def test_the_rarest_of_unbiased_outputs_comes_as_often_as_the_matrix_says(monkeypatch):
    """One of these outputs has a probability of 1e-13, near the 2^-53 of a float's steps."""
    mechanism = UnbiasedRandomizer(15.0, prior=FIVE, num_outputs=7).fit([0])
    uniform = np.r_[0, np.geomspace(1e-40, 1, 200_000)]
    monkeypatch.setattr(_base.Uniforms, "__call__", lambda self, n: np.full(n, 0.5))
    monkeypatch.setattr(_base.Uniforms, "fine", lambda self, n: uniform[:-1])
    for value, row in zip(mechanism.values_, mechanism.transition_matrix_, strict=True):
        said = mechanism.transform(np.full(len(uniform) - 1, value))
        chance = [np.diff(uniform)[said == output].sum() for output in mechanism.outputs_]
        assert np.allclose(chance, row, rtol=2e-3)


def test_labels_are_drawn_independently_of_each_other():
    pairs = RandomizedResponse(1.0, 3).fit_transform(np.zeros(60_000, int)).reshape(-1, 2)
    table = np.bincount(3 * pairs[:, 0] + pairs[:, 1], minlength=9).reshape(3, 3)
    assert stats.chi2_contingency(table)[1] > 1e-8


# Utility: the best that ε-DP allows


def best_truth(p, epsilon):
    """max Σ p_y M(y|y) over all ε-DP matrices M, by linear programming."""
    k = len(p)
    cost, rows = np.zeros((k, k)), []
    np.fill_diagonal(cost, -p)
    for j in range(k):
        for a in range(k):
            for b in range(k):
                if a != b:
                    row = np.zeros((k, k))
                    row[a, j], row[b, j] = 1, -math.exp(epsilon)
                    rows.append(row.ravel())
    sums = np.kron(np.eye(k), np.ones(k))
    return -optimize.linprog(cost.ravel(), rows, np.zeros(len(rows)), sums, np.ones(k), (0, None), method="highs").fun


def test_the_prior_mechanism_reaches_the_linear_programs_optimum():
    rng = np.random.default_rng(0)
    for _ in range(200):
        k, epsilon = int(rng.integers(2, 6)), rng.uniform(0.05, 4)
        p = rng.dirichlet(np.full(k, rng.choice([0.3, 1.0, 5.0])))
        mechanism = RandomizedResponseWithPrior(epsilon, p, k)
        mechanism.fit_transform([0])
        assert p @ np.diag(mechanism.transition_matrix_) == pytest.approx(best_truth(p, epsilon), abs=1e-8)


def test_more_epsilon_never_tells_less_truth_whatever_the_prior():
    """Over a grid of all priors of four classes in tenths: the truth rises with ε, and is the linear program's."""
    tenths = itertools.product(range(11), repeat=4)
    priors = np.array([p for p in tenths if sum(p) == 10 and list(p) == sorted(p)]) / 10
    order, _ = _top_k.by_likelihood(priors)
    before = np.zeros(len(priors))
    for epsilon in (0.05, 0.1, 0.3, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0):
        found = _top_k.matrices(order, _top_k.best_k(priors, order, epsilon), epsilon)
        truth = np.einsum("mk,mkk->m", priors, found)
        assert (truth >= before - 1e-12).all() and (truth >= priors.max(1) - 1e-12).all()
        for i in range(0, len(priors), 5):
            assert truth[i] == pytest.approx(best_truth(priors[i], epsilon), abs=1e-8)
        before = truth


def test_k_counts_from_one():
    # With k counted from 0 in the divisor, k = 1 would be taken here: 0.4·e against (0.8)·1.
    mechanism = RandomizedResponseWithPrior(0.5, [0.4, 0.4, 0.2], 3)
    mechanism.fit_transform([0])
    truth = [0.4, 0.8 / (1 + math.exp(-0.5)), 1 / (1 + 2 * math.exp(-0.5))]
    assert mechanism.k_.tolist() == [1 + int(np.argmax(truth))] == [2]


def least_loss(values, p, outputs, epsilon, loss):
    n, m = len(values), len(outputs)
    cost = (p[:, None] * loss(outputs[None], values[:, None])).ravel()
    rows = []
    for j in range(m):
        for a in range(n):
            for b in range(n):
                if a != b:
                    row = np.zeros((n, m))
                    row[a, j], row[b, j] = 1, -math.exp(epsilon)
                    rows.append(row.ravel())
    sums = np.kron(np.eye(n), np.ones(m))
    return optimize.linprog(cost, rows, np.zeros(len(rows)), sums, np.ones(n), (0, None), method="highs").fun


def test_rr_on_bins_reaches_the_linear_programs_optimum():
    rng = np.random.default_rng(1)
    for i in range(200):
        n, epsilon = int(rng.integers(2, 5)), rng.uniform(0.1, 4)
        values, p = np.sort(rng.normal(size=n) * 3), rng.dirichlet(np.ones(n))
        if i % 2:
            mechanism, outputs = RROnBins(epsilon, prior=(values, p), loss="absolute").fit([0]), values
            loss = lambda out, y: abs(out - y)
        else:
            mechanism = RROnBins(epsilon, prior=(values, p)).fit([0])
            # Every output that any interval could want, and some more.
            weights = [p * np.where((np.arange(n) >= r) & (np.arange(n) <= s), math.exp(epsilon), 1)
                       for r in range(n) for s in range(r, n)]  # fmt: skip
            outputs = np.array([w @ values / w.sum() for w in weights] + list(values))
            loss = lambda out, y: (out - y) ** 2
        best = least_loss(values, p, outputs, epsilon, loss)
        assert mechanism.expected_loss_ == pytest.approx(best, rel=1e-6, abs=1e-6)  # the solver's own tolerance
        errors = loss(mechanism.outputs_[None], values[:, None])
        assert p @ (mechanism.transition_matrix_ * errors).sum(axis=1) == pytest.approx(mechanism.expected_loss_)


def test_rr_on_bins_gives_the_known_value():
    mechanism = RROnBins(1.0, prior=FIVE).fit([0.0])
    assert mechanism.expected_loss_ == pytest.approx(4.42983123, abs=1e-8)
    assert len(mechanism.outputs_) == 2 and mechanism.bins_.tolist() == [0, 0, 1, 1, 1]


def test_a_loss_may_be_a_function():
    given = RROnBins(1.0, prior=FIVE, loss=lambda out, y: abs(out - y)).fit([0])
    assert given.expected_loss_ == pytest.approx(RROnBins(1.0, prior=FIVE, loss="absolute").fit([0]).expected_loss_)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 6.0])
def test_unbiased_labels_have_no_bias_and_less_variance_than_two_points_or_laplace(epsilon):
    values, p = np.linspace(-2, 5, 15), np.full(15, 1 / 15)
    mechanism = UnbiasedRandomizer(epsilon, prior=(values, p), num_outputs=61).fit([0])
    assert abs(mechanism.transition_matrix_ @ mechanism.outputs_ - values).max() < 1e-9
    assert mechanism.outputs_.min() < -2 and mechanism.outputs_.max() > 5
    far = 3.5 / math.tanh(epsilon / 2)  # the one-bit mechanism: middle ± far
    one_bit = far**2 - p @ (values - 1.5) ** 2
    laplace = 2 * (7 / epsilon) ** 2
    assert mechanism.expected_loss_ < min(one_bit * (1 + 3e-3), 0.6 * laplace)


def test_unbiased_labels_stay_unbiased_between_the_grids_values():
    mechanism = UnbiasedRandomizer(3.0, prior=(np.arange(5.0), np.full(5, 0.2)))
    released = mechanism.fit_transform(np.full(200_000, 1.3))
    assert released.mean() == pytest.approx(1.3, abs=6 * released.std() / math.sqrt(200_000))


# The price of the prior


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


def test_the_noise_of_bins_prior_is_the_same():
    values = np.arange(256.0)
    noisy = []
    for _ in range(20):
        bins = RROnBins(5.0, prior_epsilon=0.2, values=values)
        bins._solve = lambda: None  # the histogram only
        noisy.append(bins.fit([0.0]).probabilities_[1:])
    # Clipped at 0, so the ratio of successive counts' frequencies above it is e^(-ε/2).
    share_above_zero = np.mean(np.array(noisy) > 0)
    assert share_above_zero == pytest.approx(stats.dlaplace.sf(0, 0.1), abs=0.04)


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


def pure_groups(purity=0.9, size=300, groups=100, classes=10):
    """Groups of one size in which so many have the group's own label: features [n, 1], labels, a clusterer."""

    class Given(KMeans):
        def fit(self, X, y=None):
            return self

        def predict(self, X):
            return np.asarray(X)[:, 0].astype(int)

    group = np.repeat(np.arange(groups), size)
    place = np.tile(np.arange(size), groups)
    label = np.where(place < purity * size, group, group + 1 + place) % classes
    return group[:, None].astype(float), label, Given(groups)


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


def test_an_empty_cluster_is_a_cluster():
    class Gaps(KMeans):
        def predict(self, X):
            return np.where(np.asarray(X)[:, 0] > 4, 5, 2)

    x, y = blobs()
    prior = KMeansPrior(0.5, num_classes=3, clusterer=Gaps(6, n_init=1)).fit(x, y)
    assert prior.prior_.shape == (6, 3) and np.isfinite(prior.prior_).all()
    assert abs(prior.prior_.sum(axis=1) - 1).max() < 1e-12
    assert (prior.prior_[[0, 1, 3, 4]] == 1 / 3).all()  # plain randomized response, not always the last class


def test_a_good_prior_makes_labels_truer():
    x, y = blobs(3000)
    plain = (RandomizedResponse(1.0, 3).fit_transform(y) == y).mean()
    helped = (RandomizedResponseWithPrior(1.0, KMeansPrior(0.3, 3), 3).fit_transform(x, y) == y).mean()
    assert plain < 0.7 < 0.9 < helped


def test_images_and_many_components_are_clustered_too():
    x, y = blobs()
    images = np.repeat(x[:, :, None, None], 20, axis=2).astype(np.float32)
    prior = KMeansPrior(50.0, n_clusters=3, n_components=2, num_classes=3, seed=0).fit(images, y)
    assert prior.pca_.n_components_ == 2 and prior.score(images, y) > 0.95
    assert prior.predict_proba(images.astype(np.float64)).shape == (600, 3)


# Priors that cost nothing


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
    from tfdpfl.label_dp import classification

    monkeypatch.setattr(classification, "_CHUNK", 7)
    rng = np.random.default_rng(0)
    y = rng.integers(0, 4, 100)
    sure = np.eye(4)[y]  # k = 1: the prior's class is released whatever the label
    for prior in (sure, np.eye(4)[y % 2]):
        noisy = RandomizedResponseWithPrior(1.0, prior, 4).fit_transform(np.zeros((100, 1)), rng.permutation(y))
        assert (noisy == prior.argmax(axis=1)).all()


# What ran, and its price


@pytest.mark.parametrize("make", [*CLASS_MECHANISMS, *NUMBER_MECHANISMS, lambda eps: ALIBI(eps, 5)])
def test_event_and_ledger_agree_with_epsilon(make):
    mechanism = make(1.2)
    assert mechanism.releases_ == 0 and len(mechanism.ledger) == 0
    mechanism.fit_transform([0, 1, 1])
    paid = price(mechanism.dp_event, 1e-9, adjacency=mechanism.adjacency).epsilon
    always_the_same = getattr(mechanism, "k", None) == 1
    assert paid == (0 if always_the_same else pytest.approx(1.2, rel=6e-3))
    assert mechanism.ledger.epsilon(1e-9) == pytest.approx(paid)
    assert mechanism.epsilon_spent == pytest.approx(0 if always_the_same else 1.2)


@pytest.mark.parametrize("again", [1, 2, 4])
def test_releases_add_up(again):
    mechanism = RandomizedResponse(0.5, 4).fit([0, 1])
    for _ in range(1 + again):
        mechanism.transform([0, 1, 2, 3])
    mechanism.fit([0, 1])  # forgets nothing
    assert mechanism.releases_ == 1 + again and mechanism.epsilon_spent == 0.5 * (1 + again)
    once = price(RandomizedResponse(0.5, 4).dp_event, 1e-9, adjacency="replace_one").epsilon
    paid = mechanism.ledger.epsilon(1e-9)
    assert paid > 1.5 * once and paid <= (1 + again) * 0.5 * 1.01
    assert mechanism.ledger == PrivacyLedger.from_dict(mechanism.ledger.to_dict())


def exact_epsilon(epsilon, classes, times, delta):
    """ε at delta of so many randomized responses, from the distribution of their privacy loss: ε, 0 or -ε each."""
    truth = math.exp(epsilon) / (math.exp(epsilon) + classes - 1)
    one = np.array([truth * math.exp(-epsilon), 1 - truth * (1 + math.exp(-epsilon)), truth])
    whole = np.ones(1)
    for _ in range(times):
        whole = np.convolve(whole, one)
    losses = epsilon * np.arange(-times, times + 1)
    excess = lambda eps: float(whole @ -np.expm1(np.minimum(eps - losses, 0))) - delta
    return optimize.brentq(excess, 0, times * epsilon) if excess(0) > 0 else 0.0


@pytest.mark.parametrize(("epsilon", "classes", "times", "how"), [
    (1.0, 10, 5, "count"), (1.0, 10, 5, "calls"), (1.0, 10, 5, "one by one"), (0.5, 3, 41, "nested"),
    (1.0, 10, 2000, "count"),
])  # fmt: skip
def test_repeated_responses_cost_what_they_cost(epsilon, classes, times, how):
    event, ledger = RandomizedResponse(epsilon, classes).dp_event, PrivacyLedger()
    if how == "count":
        ledger.add(event, times, adjacency="replace_one")
    elif how == "calls":
        for _ in range(times):
            ledger.add(event, adjacency="replace_one")
    elif how == "one by one":
        ledger.add(dp_event.ComposedDpEvent([event] * times), adjacency="replace_one")
    else:
        half = dp_event.ComposedDpEvent([dp_event.SelfComposedDpEvent(event, times // 2)] * 2)
        ledger.add(half, adjacency="replace_one").add(event, times % 2, adjacency="replace_one")
    exact, got = exact_epsilon(epsilon, classes, times, 1e-5), ledger.epsilon(1e-5)
    pld = hasattr(dp_event, "RandomizedResponseDpEvent") and times <= 1000
    assert exact <= got <= (exact * 1.01 if pld else times * epsilon * 1.001)


@pytest.mark.parametrize("make", [
    lambda: RandomizedResponse(1.0, 3), lambda: ALIBI(1.0, 3), lambda: RandomizedResponseWithPrior(1.0, None, 3),
    lambda: RandomizedResponseTopK(1.0, 2, None, 3),
])  # fmt: skip
@pytest.mark.parametrize("wrong", [-5.0, 0, math.nan])
def test_what_is_set_after_fit_is_checked_before_a_release(make, wrong):
    mechanism = make().fit([0, 1, 2])
    with pytest.raises(ValueError, match="epsilon"):
        mechanism.set_params(epsilon=wrong).transform([0, 1, 2])
    assert mechanism.releases_ == 0 and mechanism.epsilon_spent == 0


def test_more_classes_than_there_are_set_after_fit_are_refused():
    mechanism = RandomizedResponseTopK(1.0, 2, None, 3).fit([0, 1, 2]).set_params(k=9)
    with pytest.raises(ValueError, match="k=9"):
        mechanism.transform([0, 1, 2])
    assert mechanism.releases_ == 0


@pytest.mark.parametrize("make", NUMBER_MECHANISMS)
def test_a_mechanism_that_was_made_for_another_epsilon_is_refused(make):
    mechanism = make(5.0).fit(FIVE[0]).set_params(epsilon=0.9)
    with pytest.raises(ValueError, match="call fit again"):
        mechanism.transform(FIVE[0])
    assert mechanism.releases_ == 0


def test_a_second_fit_of_a_paying_prior_pays_again():
    x, y = blobs()
    mechanism = RandomizedResponseWithPrior(1.0, KMeansPrior(0.2, 3), 3)
    mechanism.fit(x, y).fit(x, y).transform(x, y)
    assert mechanism.epsilon_spent == pytest.approx(0.2 + 0.2 + 0.8) and mechanism.releases_ == 1
    bins = RROnBins(1.0, prior_epsilon=0.2, values=range(3)).fit([0, 1]).fit([0, 1])
    assert bins.epsilon_spent == pytest.approx(0.4)


# Randomness


def test_without_a_seed_nothing_repeats():
    y = np.zeros(200, int)
    mechanism = RandomizedResponse(0.1, 10).fit(y)
    twins = [mechanism, mechanism, clone(mechanism).fit(y), pickle.loads(pickle.dumps(mechanism))]
    released = [tuple(twin.transform(y)) for twin in twins]
    assert len(set(released)) == 4


@pytest.mark.parametrize("make", [
    lambda: RandomizedResponse(0.1, 10, seed=7),
    lambda: RandomizedResponseWithPrior(0.1, np.full(10, 0.1), 10, seed=7),
    lambda: RROnBins(0.5, prior=(range(10), np.eye(10)[0] / 2 + 0.05), seed=7),
])  # fmt: skip
def test_a_seed_repeats_a_run_but_no_copy_does(make):
    y = np.arange(300) % 10
    assert (make().fit_transform(y) == make().fit_transform(y)).all()
    mechanism = make()
    mechanism.fit(y)
    saved = pickle.dumps(mechanism)
    others = [clone(mechanism).fit(y), clone(mechanism).fit(y), pickle.loads(saved), pickle.loads(saved)]
    released = [mechanism.transform(y), mechanism.transform(y)] + [other.transform(y) for other in others]
    assert len({tuple(r) for r in released}) == 6
    assert pickle.loads(pickle.dumps(mechanism)).releases_ == 2 and clone(mechanism).releases_ == 0


def test_a_paying_priors_clone_has_noise_of_its_own():
    x, y = blobs()
    prior = KMeansPrior(0.05, 3, num_classes=3, seed=0)
    made = [p.fit(x, y).noisy_counts_ for p in (prior, clone(prior), pickle.loads(pickle.dumps(prior)), prior)]
    assert len({m.tobytes() for m in made}) == 4


# Containers and classes


def test_labels_come_back_in_their_container():
    y = [0, 1, 2, 1]
    assert randomized_response(y, 50.0, 3).tolist() == y
    for dtype in (np.int8, np.uint8, np.int32, np.int64, np.float32):
        noisy = randomized_response(np.array(y, dtype), 50.0, 3)
        assert noisy.dtype == dtype and noisy.tolist() == y
    column = randomized_response(np.array(y)[:, None], 50.0, 3)
    assert column.shape == (4, 1)
    assert randomized_response(np.array([True, False]), 50.0).tolist() == [True, False]
    assert RandomizedResponse(1.0, 3).fit(y).transform([]).shape == (0,)
    for mechanism in (RROnBins(50.0, prior=(range(3), np.ones(3) / 3)), ALIBI(500.0, 3)):
        assert np.shape(mechanism.fit_transform(y))[0] == 4


class Series:
    """What is used of a pandas Series."""

    def __init__(self, data, index=None, name=None):
        self.data, self.index, self.name = np.asarray(data), index, name
        self.shape = self.data.shape

    def to_numpy(self):
        return self.data

    def __len__(self):
        return len(self.data)


def test_a_series_keeps_index_and_name():
    noisy = randomized_response(Series([0, 1, 1], index=[7, 8, 9], name="label"), 50.0, 2)
    assert isinstance(noisy, Series) and noisy.index == [7, 8, 9] and noisy.name == "label"
    assert noisy.data.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("y", "classes"),
    [
        (["dog", "cat", "dog"], ["cat", "dog"]),
        (np.array(["a", "b"], dtype=object), ["a", "b"]),
        ([-5, 1000, 7], [-5, 7, 1000]),
        ([2.0, 4.0], [2.0, 4.0]),
    ],
)
def test_classes_may_be_strings_or_any_integers(y, classes):
    mechanism = RandomizedResponse(1.0)
    noisy = mechanism.fit_transform(y)
    assert mechanism.classes_.tolist() == classes and set(noisy) <= set(classes)
    assert randomized_response(y, 60.0).tolist() == list(y)
    assert set(RandomizedResponse(0.5, classes=classes).fit_transform(list(y) * 50)) == set(classes)


def test_integers_may_come_as_objects():
    mechanism = RandomizedResponse(1.0, 4).fit(np.array([0, 1], object))
    assert mechanism.classes_.tolist() == [0, 1, 2, 3]
    assert set(mechanism.transform(np.array([0, 1] * 200, object))) == {0, 1, 2, 3}


def test_the_debiased_counts_are_unbiased():
    y = np.repeat([0, 1, 2, 3], [6000, 3000, 1000, 0])
    mechanism = RandomizedResponse(1.0, 4).fit(y)
    noisy = mechanism.transform(y)
    counts = mechanism.label_counts(noisy)
    spread = math.sqrt(len(y)) / (math.e - 1) * (math.e + 3) / 2
    assert counts.sum() == pytest.approx(10_000) and abs(counts - [6000, 3000, 1000, 0]).max() < 5 * spread
    nearest = debiased_label_counts(noisy, mechanism.transition_matrix_, simplex=True)
    assert nearest.min() >= 0 and nearest.sum() == pytest.approx(10_000)
    exact = mechanism.transition_matrix_.T @ [6000, 3000, 1000, 0]
    whole = np.repeat(["b", "a", "d", "c"], np.round(exact).astype(int))
    by_name = debiased_label_counts(whole, mechanism.transition_matrix_, classes=["b", "a", "d", "c"])
    assert by_name == pytest.approx([6000, 3000, 1000, 0], abs=10)


# ALIBI


def test_the_counts_of_many_classes_take_no_matrix():
    y = np.random.default_rng(0).integers(0, 40, 1000)
    few = RandomizedResponse(0.5, 40)
    noisy = few.fit_transform(y)
    assert np.allclose(few.label_counts(noisy), debiased_label_counts(noisy, few.transition_matrix_), rtol=1e-9)
    many = RandomizedResponse(8.0, 100_000)
    counts = many.label_counts(many.fit_transform(np.repeat(7, 10_000)))
    assert counts.shape == (100_000,) and counts.sum() == pytest.approx(10_000)
    assert counts[7] == pytest.approx(10_000, abs=5 * 10_000**0.5 / (math.exp(4) / 100_000**0.5))


def test_alibis_noise_is_laplace_of_scale_two_over_epsilon():
    alibi = ALIBI(0.7, 5)
    alibi.fit_transform(np.full(4000, 2))
    noise = alibi.noisy_ - np.eye(5)[2]
    assert stats.kstest(noise.ravel(), stats.laplace(scale=2 / 0.7).cdf).pvalue > 1e-8
    # Low bits that depend on the label would be a leak that no amount of noise covers.
    assert (alibi.noisy_ * 1024 == np.round(alibi.noisy_ * 1024)).all()


def test_alibis_posterior_is_bayes_rule():
    alibi = ALIBI(1.0, 3)
    soft = alibi.fit_transform([0, 1, 2, 2])
    density = np.array([
        [stats.laplace(scale=2).pdf(row - np.eye(3)[k]).prod() for k in range(3)] for row in alibi.noisy_
    ])  # fmt: skip
    assert soft == pytest.approx(density / density.sum(axis=1, keepdims=True))
    prior = np.array([0.7, 0.3, 0.0])
    weighted = density * prior
    assert alibi.posterior(prior) == pytest.approx(weighted / weighted.sum(axis=1, keepdims=True))
    assert alibi.releases_ == 1  # denoising is for nothing
    with pytest.raises(ValueError, match="2 rows for 4 examples"):
        alibi.posterior(np.full((2, 3), 1 / 3))


# scikit-learn

CHECKED = [
    RandomizedResponse(1.0),
    RandomizedResponseTopK(1.0, 2),
    RandomizedResponseWithPrior(1.0, KMeansPrior(0.5, 2)),
    RROnBins(1.0, 0.2),
    UnbiasedRandomizer(1.0, 0.2),
    ALIBI(1.0),
    KMeansPrior(500.0, 3, seed=0),
]
EXPECTED = {
    "check_do_not_raise_errors_in_init_or_set_params": "arguments are checked at the constructor here",
    "check_supervised_y_2d": "[n, 1] is how Keras's own data sets have labels: no warning",
}


@pytest.mark.parametrize("estimator", CHECKED)
def test_scikit_learns_checks_pass(estimator):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_estimator(estimator, expected_failed_checks=EXPECTED)


@pytest.mark.parametrize("estimator", CHECKED)
def test_params_are_what_was_given(estimator):
    twin = clone(estimator)
    assert twin is not estimator
    assert repr(twin.get_params(deep=False).keys()) == repr(estimator.get_params(deep=False).keys())
    assert twin.set_params(epsilon=3.0).epsilon == 3.0 and estimator.epsilon != 3.0
    if hasattr(twin, "set_output"):
        twin.set_output(transform="default")


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


@pytest.mark.parametrize("make", [
    lambda: RROnBins(3.0, 0.5, values=range(10)), lambda: UnbiasedRandomizer(3.0, 0.5, values=range(10)),
])  # fmt: skip
@pytest.mark.parametrize("check_inverse", [False, True])
def test_a_regressor_may_have_its_target_released(make, check_inverse):
    x = np.tile(np.arange(10.0), 300)[:, None]
    mechanism = make()
    model = TransformedTargetRegressor(LinearRegression(), transformer=mechanism, check_inverse=check_inverse)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(x, x[:, 0])
    assert model.predict(x).shape == (3000,) and model.score(x, x[:, 0]) > 0.5
    # scikit-learn's own check of the inverse is a release, and is paid.
    paid = 0.5 + 2.5 * (1 + check_inverse)
    assert model.transformer_.epsilon_spent == pytest.approx(paid)
    assert mechanism.releases_ == 0 and mechanism.family_ledger.epsilon(1e-9) == pytest.approx(paid, rel=6e-3)
    with pytest.raises(NotFittedError):
        make().inverse_transform([1.0])


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


def test_a_saved_copy_keeps_its_familys_record_and_goes_on_alone():
    first = RandomizedResponse(1.0, 3)
    clone(first).fit_transform(Y)
    saved = pickle.loads(pickle.dumps(first))
    assert saved.releases_ == 0 and saved.family_ledger == first.family_ledger and len(first.family_ledger) == 1
    clone(clone(saved)).fit_transform(Y)
    assert saved.family_ledger.epsilon(1e-13) == pytest.approx(2.0, rel=2e-2)
    assert first.family_ledger.epsilon(1e-13) == pytest.approx(1.0, rel=2e-2)


@pytest.mark.parametrize("make", [
    lambda: RandomizedResponse(0.1), lambda: RROnBins(1.0, 0.1, values=range(10)),
    lambda: UnbiasedRandomizer(1.0, 0.1, values=range(10)), lambda: ALIBI(1.0),
])  # fmt: skip
def test_what_releases_labels_takes_no_features_in_their_place(make):
    # A step of a pipeline is handed X, and the labels would go past it as they are.
    mechanism = make()
    pipeline = make_pipeline(mechanism, LogisticRegression())
    with pytest.raises(ValueError, match=r"releases labels.*received two arrays.*fit_transform\(y\) before"):
        pipeline.fit(np.arange(60)[:, None] % 10, np.arange(60) % 3)
    assert mechanism.releases_ == 0 and mechanism.epsilon_spent == 0


# Bad input

X, Y = blobs(60)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RandomizedResponse(0), "epsilon must be a finite number above 0, got 0"),
        (lambda: RandomizedResponse(-1.0), "epsilon.*got -1.0: give the total"),
        (lambda: RandomizedResponse(math.nan), "epsilon.*nan"),
        (lambda: RandomizedResponse(math.inf), "epsilon.*inf"),
        (lambda: RandomizedResponse("1"), "epsilon.*'1'"),
        (lambda: RandomizedResponse(1e3), "epsilon=1000 is larger than 700.*released as it is.*smaller epsilon"),
        (lambda: RandomizedResponse(1.0).set_params(epsilon=1e6).fit([0, 1]), "epsilon=1e\\+06 is larger than 700"),
        (lambda: RandomizedResponseTopK(701.0, 2), "epsilon=701 is larger"),
        (lambda: RandomizedResponseWithPrior(2e3, KMeansPrior(0.1)), "epsilon=2000 is larger"),
        (lambda: ALIBI(1e3, 5), "epsilon=1000 is larger"),
        (lambda: NoisyHistogram(1e3), "epsilon=1000 is larger"),
        (lambda: RROnBins(1e3, prior=FIVE), "epsilon=1000 is larger"),
        (lambda: UnbiasedRandomizer(1e3, prior=FIVE), "epsilon=1000 is larger"),
        (lambda: MultiStageTraining(dict, 1e3), "epsilon=1000 is larger"),
        (lambda: RandomizedResponse(1.0, 1), "num_classes.*at least 2, got 1"),
        (lambda: RandomizedResponse(1.0, seed=1.5), "seed.*1.5"),
        (lambda: RandomizedResponse(1.0).set_params(epsilon=-2).fit([0, 1]), "epsilon.*-2"),
        (lambda: RandomizedResponse(1.0, 3).fit_transform([0, 3]), "y has the label .*3.*none of the classes 0, 1, 2"),
        (lambda: RandomizedResponse(1.0, 3).fit_transform([0, -1]), "y has the label .*-1"),
        (lambda: RandomizedResponse(1.0, 3).fit_transform([0.0, 1.5]), "must be classes, got .*1.5.*RROnBins"),
        (lambda: RandomizedResponse(1.0, 3).fit_transform([0.0, math.nan]), "must be classes, got .*nan"),
        (lambda: RandomizedResponse(1.0).fit(["a", "b"]).transform(["c"]), "label .*'c'.*a, b"),
        (lambda: RandomizedResponse(1.0).fit(["a", "b"]).transform([1]), "label"),
        (lambda: RandomizedResponse(1.0).fit(["a", "a"]), "only one class"),
        (lambda: RandomizedResponse(1.0).fit([]), "at least one label"),
        (lambda: RandomizedResponse(1.0, 3).fit(["a", "b"]), "num_classes=3, but y names 2.*list them in classes"),
        (lambda: RandomizedResponse(1.0, 3).fit(np.eye(3)), r"shape \[n\], got \[3, 3\].*argmax"),
        (lambda: RandomizedResponse(1.0).fit(np.array(["a", 1], object)), "y mixes kinds"),
        (lambda: RandomizedResponse(1.0).fit(np.array(["a", None], object)), "got None: drop missing labels"),
        (lambda: RandomizedResponse(1.0).fit(np.array([1, math.nan], object)), "got nan: drop missing labels"),
        (lambda: RandomizedResponse(1.0, classes=[0.0, 1.0, math.nan]).fit([0, 1]), "has a missing value"),
        (lambda: RandomizedResponse(1.0).fit(pd.Series([0, 1, None], dtype="Int64")), "drop missing labels"),
        (lambda: RandomizedResponse(1.0).fit(pd.Series(["a", None], dtype="string")), "drop missing labels"),
        (lambda: RandomizedResponse(1.0).fit(pd.Series([True, None], dtype="boolean")), "got .*: drop missing"),
        (lambda: ALIBI(1.0, 2).fit_transform(pd.Series([0, None], dtype="Int64")), "drop missing labels"),
        (lambda: RandomizedResponse(1.0, classes=["a", "b", pd.NA]).fit(["a"]), "has a missing value"),
        (lambda: RROnBins(1.0, prior=FIVE).fit(pd.Series([0, None], dtype="Int64")), "finite, got nan: drop missing"),
        (lambda: RROnBins(1.0, prior=FIVE).fit([0.0, None]), "finite, got nan: drop missing"),
        (lambda: RandomizedResponse(1.0).fit(np.array([1j, 2j])), "dtype complex128"),
        (lambda: RandomizedResponse(1.0, classes=["a", "a"]).fit(["a"]), "classes must be two or more different"),
        (lambda: RandomizedResponse(1.0, 3, classes=["a", "b"]).fit(["a"]), "num_classes=3 but classes lists 2"),
        (lambda: RandomizedResponseTopK(1.0, 0), "k must be a whole number of at least 1, got 0"),
        (lambda: RandomizedResponseTopK(1.0, 4, num_classes=3), "k=4 must be at most the number of classes, 3"),
        (lambda: RandomizedResponseTopK(1.0, 4).fit([0, 1, 2]), "k=4 must be at most"),
        (lambda: RandomizedResponseWithPrior(0.5, KMeansPrior(0.5)), "prior.epsilon=0.5 must be below epsilon=0.5"),
        (lambda: RandomizedResponseWithPrior(0.5, KMeansPrior(0.6)), "prior.epsilon=0.6.*the total"),
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
        (lambda: RandomizedResponseWithPrior(1.0, KMeansPrior(0.5, 3)).fit_transform(Y), "X=None"),
        (lambda: RandomizedResponseWithPrior(1.0, [0.5, 0.6], 2).fit_transform(X, Y % 2), "sum to one.*1.1: divide"),
        (lambda: RandomizedResponseWithPrior(1.0, [0.5, 0.4], 2).fit_transform(X, Y % 2), "sum to one.*0.9"),
        (lambda: RandomizedResponseWithPrior(1.0, [1.5, -0.5], 2).fit_transform(X, Y % 2), "probabilities, got -0.5"),
        (lambda: RandomizedResponseWithPrior(1.0, [math.nan, 1], 2).fit_transform(X, Y % 2), "probabilities, got nan"),
        (lambda: RandomizedResponseWithPrior(1.0, [1 / 3] * 3, 2).fit_transform(X, Y % 2), "one column.*2 classes"),
        (lambda: RandomizedResponseWithPrior(1.0, np.full((7, 2), 0.5), 2).fit_transform(X, Y % 2), "7 rows for 60"),
        (lambda: RandomizedResponseWithPrior(1.0, LogisticRegression(), 3).fit_transform(X, Y), "not fitted.*KMeans"),
        (lambda: RandomizedResponseWithPrior(1.0, LogisticRegression().fit(X, Y + 7)).fit_transform(X, Y), "no class"),
        (lambda: RandomizedResponseWithPrior(1.0, lambda x: x[:, :3] * 0 + 1 / 3, 3).fit_transform(Y), "X=None"),
        (lambda: PublicPrior([1.0], temperature=0), "temperature.*0"),
        (lambda: LabelPrior.fit(NoisyHistogram(1.0), X, None), "target y is None"),
        (lambda: RROnBins(1.0), "exactly one of prior_epsilon and prior"),
        (lambda: RROnBins(1.0, 0.1, FIVE), "exactly one of prior_epsilon and prior"),
        (lambda: RROnBins(1.0, 1.0), "prior_epsilon=1 must be below epsilon=1"),
        (lambda: RROnBins(1.0, -0.1), "prior_epsilon.*-0.1"),
        (lambda: RROnBins(1.0, 0.1, loss="cubic"), "loss must be one of 'squared', 'absolute', 'poisson', got 'cubic'"),
        (lambda: RROnBins(1.0, prior=5).fit([0]), r"pair \(values, probabilities\), got 5"),
        (lambda: RROnBins(1.0, prior=([0, 2, 1], [0.3, 0.3, 0.4])).fit([0]), "rising"),
        (lambda: RROnBins(1.0, prior=([0, 1], [0.3, 0.3])).fit([0]), "probabilities must sum to one"),
        (lambda: RROnBins(1.0, 0.1, values=range(999)).fit([0]), "999 numbers, more than the 256.*coarser"),
        (lambda: RROnBins(1.0, 0.1, values=[0, 1]).fit([math.nan]), "finite, got nan"),
        (lambda: RROnBins(1.0, 0.1, values=[0, 1]).fit(["a"]), "must be numbers"),
        (lambda: RROnBins(1.0, 0.1, values=[0, 1]).fit([]), "at least one label"),
        (lambda: RROnBins(1.0, 0.1).fit([3.0, 3.0]), "only the value 3"),
        (lambda: RROnBins(1.0, prior=([-1, 1], [0.5, 0.5]), loss="poisson").fit([0]), "labels of at least 0, got -1"),
        (lambda: UnbiasedRandomizer(1.0, 0.1, num_outputs=1), "num_outputs.*1"),
        (lambda: debiased_label_counts([0, 1], np.ones((2, 2)) / 2), "cannot be inverted"),
        (lambda: RandomizedResponse(1e-9, 2).fit([0]).label_counts([0, 1]), "epsilon=1e-09 leaves nothing to count"),
        (lambda: debiased_label_counts([0, 1], np.ones((2, 3))), r"\[K, K\], got the shape \[2, 3\]"),
        (lambda: debiased_label_counts([0, 1], np.eye(2), classes=[0]), "1 entries for 2 rows"),
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


def test_a_prior_without_probabilities_is_refused_with_the_mend():
    with pytest.raises(ValueError, match=r"no predict_proba.*CalibratedClassifierCV"):
        RandomizedResponseWithPrior(1.0, LinearSVC().fit(X, Y)).fit_transform(X, Y)


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


def test_a_cluster_that_fit_did_not_know_is_refused():
    class Wild(KMeans):
        def predict(self, X):
            return np.full(len(X), 3 if len(X) > 10 else 9)

    prior = KMeansPrior(1.0, num_classes=3, clusterer=Wild(4, n_init=1)).fit(X, Y)
    with pytest.raises(ValueError, match=r"name none that it did not at fit, got 9..9"):
        prior.predict_proba(X[:5])


def test_a_grid_taken_from_the_labels_is_told_of():
    with pytest.warns(UserWarning, match=r"from the labels themselves \(0 to 9\).*Give values="):
        RROnBins(1.0, 0.5).fit(np.arange(10))
    with pytest.warns(UserWarning, match="values"):
        assert len(RROnBins(1.0, 0.5).fit(np.random.default_rng(0).normal(size=999)).values_) == 256


def test_a_release_that_fails_on_a_label_is_not_free():
    # The labels that came before the bad one were drawn; whoever catches the error has paid.
    mechanism = RandomizedResponse(1.0, 3).fit([0])
    with pytest.raises(ValueError):
        mechanism.transform([0, 9])
    assert mechanism.releases_ == 1


# Size and speed


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


@pytest.mark.slow
def test_label_dp_does_not_import_tensorflow():
    code = (
        "import sys, tfdpfl.label_dp as l; l.RandomizedResponse(1.0, 2).fit_transform([0, 1]); l.KMeansPrior; "
        "l.RROnBins; l.MultiStageTraining; dir(l); sys.exit('tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    import tfdpfl.label_dp

    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        tfdpfl.label_dp.Nothing  # noqa: B018
