"""Randomized response over the likeliest classes is the best that ε-DP allows, and no lie is too rare."""

import itertools
import math

import numpy as np
import pytest
from scipy import optimize

from tfdpfl.label_dp import RandomizedResponse, RandomizedResponseWithPrior, _base, _top_k


def test_rare_lies_name_all_classes_alike(monkeypatch):
    for mechanism in (RandomizedResponse(45.0, 10), RandomizedResponseWithPrior(45.0, np.full(10, 0.1), 10)):
        mechanism.fit([0, 1])
        numbers = [np.zeros(900), (np.arange(900) + 0.5) / 900]
        monkeypatch.setattr(_base.Uniforms, "__call__", lambda self, size, numbers=numbers: numbers.pop(0)[:size])
        assert np.bincount(mechanism.transform(np.full(900, 4))).tolist() == [100] * 4 + [0] + [100] * 5


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
