"""The audit finds what is there, never more, and finds the faults that label DP code is known for."""

import math
import zlib

import numpy as np
import pytest
from scipy import stats

from tfdpfl.audit import audit_epsilon
from tfdpfl.audit.epsilon import epsilon_of_mu
from tfdpfl.label_dp import (
    ALIBI,
    KMeansPrior,
    RandomizedResponse,
    RandomizedResponseTopK,
    RandomizedResponseWithPrior,
    RROnBins,
    UnbiasedRandomizer,
)

SURE = 1 - 2e-8  # a sound mechanism is above its claim once in 10^8 audits
GRID = (np.arange(4.0), np.array([0.4, 0.3, 0.2, 0.1]))


class OneColumn:
    """A clusterer for many data sets at once: the cluster is the first feature."""

    def fit(self, X):
        return self

    def predict(self, X):
        return X[:, 0].astype(int)


def released(mechanism):
    """Trials of a mechanism that treats each label by itself: as many labels as trials."""
    return lambda label, trials: np.asarray(mechanism().fit_transform(np.full(trials, label)))


def kmeans_trials(mechanism, prior_of=lambda fitted: fitted.prior_):
    """A cluster of its own for each trial, so that one call is many runs: what is seen are the noisy counts and the
    first label. Neighbours differ in that label, with one more example beside it."""

    def run(label, trials):
        x = np.repeat(np.arange(trials), 2)[:, None].astype(float)
        y = np.tile([label, 2], trials)
        fitted = mechanism()
        noisy = fitted.fit_transform(x, y)
        counts = prior_of(fitted).noisy_counts_
        # Bins beyond reach of what one label does to them say nothing more.
        return np.column_stack([np.clip(counts[:, :2], -1, 2), noisy[::2]])

    return run


SHIPPED = {
    "RandomizedResponse": (1.0, released(lambda: RandomizedResponse(1.0, 10)), 0, 1),
    "TopK": (1.0, released(lambda: RandomizedResponseTopK(1.0, 2, [0.3, 0.4, 0.3], 3)), 0, 1),
    "WithPrior": (1.0, released(lambda: RandomizedResponseWithPrior(1.0, [0.3, 0.4, 0.3], 3)), 0, 1),
    "RROnBins": (1.0, released(lambda: RROnBins(1.0, prior=GRID)), 0, 3),
    "UnbiasedRandomizer": (1.0, released(lambda: UnbiasedRandomizer(1.0, prior=GRID)), 0, 3),
    "ALIBI": (1.0, released(lambda: ALIBI(1.0, 3)), 0, 1),
    "KMeansPrior": (
        2.0,
        kmeans_trials(lambda: RandomizedResponseTopK(2.0, 3, KMeansPrior(1.0, clusterer=OneColumn()), 3)),
        0,
        1,
    ),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_no_shipped_mechanism_is_above_its_claim(name):
    claim, mechanism, one, other = SHIPPED[name]
    found = audit_epsilon(mechanism, one, other, 40_000, SURE, vectorized=True)
    assert found <= claim
    # What is found is no empty bound either.
    assert found >= (0.4 if name == "ALIBI" else 0.65) * claim


class PriorForgotten(RandomizedResponseTopK):
    """The public notebook's fault: randomized response at the whole ε, the prior for nothing."""

    @property
    def _response_epsilon(self):
        return float(self.epsilon)


def test_a_prior_that_is_not_paid_for_is_found():
    faulty = kmeans_trials(lambda: PriorForgotten(2.0, 3, KMeansPrior(1.0, clusterer=OneColumn()), 3))
    assert audit_epsilon(faulty, 0, 1, 60_000, SURE, vectorized=True) > 2.0


class ClustersFromLabels(KMeansPrior):
    """Groups by the label itself."""

    def fit(self, X, y, classes=None):
        self._hidden = np.asarray(y)
        return super().fit(X, y, classes)

    def _fit_groups(self, X):
        groups = (3 * X[:, 0] + self._hidden).astype(int)
        return groups, int(groups.max()) + 3

    def _groups(self, X):
        return (3 * X[:, 0] + self._hidden).astype(int)


def test_clusters_made_from_labels_are_found():
    def run(label, trials):
        # Ten examples with the label 0 and nine with 2 in every trial; the twentieth has one or the other. Its own
        # cluster's histogram, noise and all, then says which.
        x = np.repeat(np.arange(trials), 20)[:, None].astype(float)
        y = np.tile(np.repeat([label, 0, 2], [1, 10, 9]), trials)
        return RandomizedResponseWithPrior(1.0, ClustersFromLabels(0.5), 3).fit_transform(x, y)[::20]

    assert audit_epsilon(run, 0, 2, 20_000, SURE, vectorized=True) > 1.5


def test_twice_the_epsilon_is_found():
    faulty = released(lambda: RandomizedResponse(2.0, 3))
    assert audit_epsilon(faulty, 0, 1, 20_000, SURE, vectorized=True) > 1.5


def test_a_fixed_seed_is_found():
    faulty = released(lambda: RandomizedResponse(1.0, 3, seed=zlib.crc32(b"in the source")))
    # Every run repeats the same draws.
    # A long enough output differs for certain.
    single = lambda label: faulty(label, 20)
    assert audit_epsilon(single, 0, 1, 1000, SURE) > 3


# The bound itself


def test_the_bound_is_clopper_pearsons():
    # 600 of 1000 against 100 of 1000 in the second halves; the first halves choose the event "1".
    pattern = {"a": np.tile([1, 1, 1, 0, 1, 0, 1, 0, 1, 0], 200), "b": np.tile([0] * 9 + [1], 200)}
    found = audit_epsilon(lambda data, n: pattern[data], "a", "b", 2000, 0.9, vectorized=True)
    low, high = stats.beta.ppf(0.05, 600, 401), stats.beta.ppf(0.95, 101, 900)
    assert found == pytest.approx(math.log(low / high))
    less = audit_epsilon(lambda data, n: pattern[data], "a", "b", 2000, 0.9, delta=0.1, vectorized=True)
    assert less == pytest.approx(math.log((low - 0.1) / high))


def gaussian(mu):
    rng = np.random.default_rng(0)
    return lambda far, n: far * mu + rng.normal(size=n)


@pytest.mark.parametrize(("mu", "delta"), [(0.1, 0.01), (1.0, 1e-5), (2.0, 1e-3), (5.0, 1e-9), (30.0, 1e-6)])
def test_the_epsilon_of_mu_is_the_one_of_balle_and_wang(mu, delta):
    epsilon, cdf = epsilon_of_mu(mu, delta), stats.norm.cdf
    log_second = epsilon + stats.norm.logcdf(-mu / 2 - epsilon / mu)
    assert cdf(mu / 2 - epsilon / mu) - math.exp(log_second) == pytest.approx(delta, rel=1e-4)


def test_a_gaussian_is_seen_twice_as_far_as_an_event_is():
    mu = 1.99974  # ε 7.58 at δ = 1e-3
    assert epsilon_of_mu(mu, 1e-3) == pytest.approx(7.58, abs=1e-3)
    mechanism, how = gaussian(mu), dict(delta=1e-3, vectorized=True)
    bounds = [audit_epsilon(mechanism, 0, 1, 2000, tradeoff="gaussian", **how) for _ in range(9)]
    assert 6 <= np.median(bounds) <= max(bounds) <= 7.58
    assert audit_epsilon(mechanism, 0, 1, 2000, **how) < 3.6
    assert audit_epsilon(gaussian(0.0), 0, 1, 2000, tradeoff="gaussian", **how) < 0.5


def test_where_all_can_be_told_apart_every_run_counts():
    """The threshold lies between what was seen, so that none of the counted runs is lost at its edge."""
    low = (0.01 / 2) ** (1 / 75)  # Clopper and Pearson's, of 75 hits in 75
    found = audit_epsilon(gaussian(20.0), 0, 1, 100, delta=1e-3, vectorized=True, tradeoff="gaussian")
    assert found == pytest.approx(epsilon_of_mu(2 * stats.norm.ppf(low), 1e-3))
    apart = {0: 0.0, 1: math.inf}
    assert audit_epsilon(lambda far: apart[far], 0, 1, 100) > 1.5


def test_the_gaussian_bound_holds_as_often_as_it_says():
    mechanism, true, runs = gaussian(1.0), epsilon_of_mu(1.0, 1e-3), 100
    bounds = [
        audit_epsilon(mechanism, 0, 1, 300, 0.6, delta=1e-3, vectorized=True, tradeoff="gaussian") for _ in range(runs)
    ]
    over = sum(bound > true for bound in bounds)
    assert 0 < over <= runs * 0.4 + 3 * math.sqrt(runs * 0.4 * 0.6)


def test_identical_inputs_give_zero_and_different_answers_much():
    coin = np.random.default_rng(0)
    assert audit_epsilon(lambda _: coin.random() < 0.5, 0, 1, 2000) < 0.1
    assert audit_epsilon(lambda label: label, 0, 1, 2000) > 4
    assert audit_epsilon(lambda label: ["no", "yes"][label], 0, 1, 2000) > 4


@pytest.mark.parametrize("dimensions", [1, 3])
def test_continuous_outputs_are_compared(dimensions):
    rng = np.random.default_rng(0)
    mean = lambda label: np.full(dimensions, label / dimensions)
    laplace = lambda label, n: mean(label) + rng.laplace(size=(n, dimensions))
    found = audit_epsilon(laplace, 0, 1, 20_000, SURE, vectorized=True)
    assert 0.4 / dimensions < found <= 1.0


@pytest.mark.parametrize("output", [math.nan, None])
def test_outputs_that_cannot_be_counted_are_refused(output):
    with pytest.raises(ValueError, match=r"mechanism returned (NaN|None), which cannot be counted"):
        audit_epsilon(lambda x: output if x else 1.0, 0, 1, 100)


def test_the_stated_confidence_holds():
    rng = np.random.default_rng(0)
    flip = lambda label, n: np.where(rng.random(n) < math.e / (1 + math.e), label, 1 - label)
    over = sum(audit_epsilon(flip, 0, 1, 400, 0.8, vectorized=True) > 1.0 for _ in range(200))
    assert over <= 200 * 0.2 + 3 * math.sqrt(200 * 0.2 * 0.8)
    # Twenty outputs to choose from, and nothing to find: what was chosen must be counted on other runs.
    die = lambda label, n: rng.integers(0, 20, n)
    over = sum(audit_epsilon(die, 0, 1, 1000, 0.8, vectorized=True) > 0 for _ in range(100))
    assert over <= 100 * 0.2 + 3 * math.sqrt(100 * 0.2 * 0.8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(trials=5), "trials must be a whole number of at least 20, got 5"),
        (dict(confidence=1.0), "confidence must be strictly between 0 and 1, got 1.0"),
        (dict(delta=-0.1), "delta.*-0.1"),
        (dict(delta=1.0), "delta must be below 1, got 1.0"),
        (dict(tradeoff="gaussian"), "delta must be above 0 with tradeoff"),
        (dict(tradeoff="laplace", delta=0.1), "tradeoff.*gaussian.*laplace"),
        (dict(mechanism=lambda label: np.zeros(1 + label)), "shapes .1. and .2."),
        (dict(mechanism=lambda label, n: np.zeros(3), vectorized=True), "must return 100 outputs, got 3"),
        (dict(mechanism=lambda label: f"{np.random.random()}"), "too many to count"),
    ],
)
def test_bad_audits_are_refused(arguments, message):
    given = {"mechanism": lambda label: label, "dataset": 0, "neighbour": 1, "trials": 100, **arguments}
    with pytest.raises(ValueError, match=message):
        audit_epsilon(**given)


def test_outputs_of_varying_shape_are_refused():
    sizes = iter(range(1000))
    with pytest.raises(ValueError, match="one shape every time"):
        audit_epsilon(lambda _: np.zeros(next(sizes) % 3 + 1), 0, 1, 100)
