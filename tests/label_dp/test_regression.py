"""Labels that are numbers: the best bins, no bias, and the price of the prior."""

import math
import warnings

import numpy as np
import pandas as pd
import pytest
from label_cases import FIVE, NUMBER_MECHANISMS
from scipy import optimize, stats
from sklearn.compose import TransformedTargetRegressor
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LinearRegression

from tfdpfl.label_dp import RROnBins, UnbiasedRandomizer, _base


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


@pytest.mark.parametrize("make", NUMBER_MECHANISMS)
def test_a_mechanism_that_was_made_for_another_epsilon_is_refused(make):
    mechanism = make(5.0).fit(FIVE[0]).set_params(epsilon=0.9)
    with pytest.raises(ValueError, match="call fit again"):
        mechanism.transform(FIVE[0])
    assert mechanism.releases_ == 0


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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RROnBins(1e3, prior=FIVE), "epsilon=1000 is larger"),
        (lambda: UnbiasedRandomizer(1e3, prior=FIVE), "epsilon=1000 is larger"),
        (lambda: RROnBins(1.0, prior=FIVE).fit(pd.Series([0, None], dtype="Int64")), "finite, got nan: drop missing"),
        (lambda: RROnBins(1.0, prior=FIVE).fit([0.0, None]), "finite, got nan: drop missing"),
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
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_grid_taken_from_the_labels_is_told_of():
    with pytest.warns(UserWarning, match=r"from the labels themselves \(0 to 9\).*Give values="):
        RROnBins(1.0, 0.5).fit(np.arange(10))
    with pytest.warns(UserWarning, match="values"):
        assert len(RROnBins(1.0, 0.5).fit(np.random.default_rng(0).normal(size=999)).values_) == 256
