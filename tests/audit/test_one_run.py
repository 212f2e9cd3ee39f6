"""One-run audits see what published ones see, hold as often as they say, and a callback puts the canaries in."""

import math

import numpy as np
import pytest
from scipy import stats

from tfdpfl.audit import OneRunAudit, one_run_bounds
from tfdpfl.audit.one_run import _p_value, _refuted


@pytest.mark.parametrize(("shift", "any_training", "gaussian"), [
    (1, 1.13346, 2.164749), (2, 2.311945, 4.7218075), (4, 4.395568, 9.133752)])  # fmt: skip
def test_normals_are_told_apart_as_well_as_jax_privacy_does(shift, any_training, gaussian):
    scores = stats.norm.ppf((np.arange(10_000) + 0.5) / 10_000)
    report = one_run_bounds(np.r_[scores + shift, scores], np.repeat([True, False], 10_000), delta=1e-6)
    # What normals so far apart have at this δ is the most that may be claimed.
    true = {1: 4.8866, 2: 10.9972, 4: 26.357}[shift]
    assert any_training <= report.epsilon < true
    assert gaussian <= report.epsilon_gaussian < true


def test_the_p_value_is_the_binomials_and_pays_for_delta():
    assert _p_value(100, 40, 30, 1.0, 0.0) == pytest.approx(stats.binom.sf(29, 40, math.e / (1 + math.e)))
    tail = [stats.binom.sf(30 - i - 1, 40, math.e / (1 + math.e)) for i in range(31)]
    paid = 2 * 100 * 1e-4 * max((tail[i] - tail[0]) / i for i in range(1, 31))
    assert _p_value(100, 40, 30, 1.0, 1e-4) == pytest.approx(tail[0] + paid)


@pytest.mark.parametrize("guesses", [20, 100, 400])
def test_without_privacy_loss_a_guess_is_a_coin(guesses):
    """At μ = 0 the recursion bounds a fair binomial's tail: it refutes where that does, or one right guess later."""
    first = next(right for right in range(guesses + 1) if _refuted(guesses, guesses, right, 0.0, 0.05))
    assert first - stats.binom.isf(0.05, guesses, 0.5) in (1, 2)


@pytest.mark.parametrize("kind", ["randomized response", "gaussian"])
def test_the_bounds_hold_as_often_as_they_say(kind):
    rng, over, runs, claim, mu = np.random.default_rng(0), 0, 60, 1.0, 0.5
    for _ in range(runs):
        coins = rng.random(400) < 0.5
        if kind == "gaussian":
            report = one_run_bounds(coins * mu + rng.normal(size=400), coins, delta=1e-3, confidence=0.6)
            over += report.epsilon_gaussian > 1.35228  # of μ = 0.5 at 1e-3
        else:
            lie = rng.random(400) > math.exp(claim) / (1 + math.exp(claim))
            report = one_run_bounds((coins ^ lie) * 1.0, coins, delta=1e-9, confidence=0.6)
            over += report.epsilon > claim
    assert over <= runs * 0.4 + 3 * math.sqrt(runs * 0.4 * 0.6)


def test_scores_that_know_nothing_show_nothing_even_where_they_tie():
    coins = np.random.default_rng(0).random(1000) < 0.5
    assert one_run_bounds(np.zeros(1000), coins, delta=1e-5, confidence=0.999).epsilon == 0


def test_ties_do_not_depend_on_the_order_of_the_canaries():
    """A file sorted by membership says nothing: 0 of a thousand equal scores is a guess."""
    rng = np.random.default_rng(1)
    mostly = np.where(rng.random(1000) < 0.9, 0.0, rng.normal(size=1000))
    for inserted in (np.repeat([False, True], 500), np.repeat([True, False], 500), np.arange(1000) % 2 == 0):
        for scores in (np.zeros(1000), mostly):
            report = one_run_bounds(scores, inserted, delta=1e-5, confidence=0.999)
            assert (report.epsilon, report.epsilon_gaussian) == (0, 0)
            assert report == one_run_bounds(scores, inserted, delta=1e-5, confidence=0.999)


@pytest.mark.parametrize(("arguments", "message"), [
    (dict(delta=0.0), "delta must be strictly between 0 and 1"),
    (dict(confidence=1.0), "confidence must be strictly between"),
    (dict(scores=np.full(40, np.nan)), "scores must be finite"),
    (dict(scores=np.zeros(39)), "a number and a bool for each"),
    (dict(inserted=np.zeros(40)), "a number and a bool for each"),
])  # fmt: skip
def test_bad_scores_are_refused(arguments, message):
    given = {"scores": np.zeros(40), "inserted": np.zeros(40, bool), "delta": 1e-5, **arguments}
    with pytest.raises(ValueError, match=message):
        one_run_bounds(**given)


def test_too_few_canaries_are_refused():
    with pytest.raises(ValueError, match="at least 20 examples, got 5 and 5"):
        OneRunAudit((np.zeros([5, 2]), np.zeros(5)), delta=1e-5)
