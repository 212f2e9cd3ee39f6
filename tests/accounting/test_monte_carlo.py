"""The price of b-min-sep sampling: simulations against enumeration and closed forms, bounds against exact ones."""

import itertools
import json

import numpy as np
import pytest
import tqdm.auto
from dp_accounting.pld import privacy_loss_distribution as distribution
from scipy.stats import beta

from tfdpfl.accounting import PrivacyLedger, allocation, monte_carlo
from tfdpfl.accounting.correlated import CorrelatedRun
from tfdpfl.noise import Banded

RUNS = 1 << 16


def parts(losses):
    return losses._pmf_remove, losses._pmf_add


@pytest.mark.parametrize(
    ("exact", "shifts", "rate", "steps"),
    [
        pytest.param(
            lambda: distribution.from_gaussian_mechanism(1.0, value_discretization_interval=1e-3).self_compose(4),
            (1.0,), 1.0, 4, id="every step",
        ),
        pytest.param(
            lambda: distribution.from_gaussian_mechanism(
                0.9, sampling_prob=0.2, value_discretization_interval=1e-3).self_compose(9),
            (1 / 0.9,), 0.2, 9, id="Poisson",
        ),
        pytest.param(lambda: allocation.losses(0.8, 5, 1e-3), (1 / 0.8, 0, 0, 0, 0), 1.0, 5, id="random allocation"),
    ],
)  # fmt: skip
def test_a_price_is_above_the_exact_one_and_close_to_it(exact, shifts, rate, steps):
    found = monte_carlo.losses(shifts, rate, steps, RUNS, 1e-3)
    for ours, truth in zip(parts(found), parts(exact()), strict=True):
        for epsilon in (0.0, 0.5, 1.0):
            delta = truth.get_delta_for_epsilon(epsilon)
            assert delta <= ours.get_delta_for_epsilon(epsilon) <= delta + 9 * np.sqrt((delta + 1e-3) / RUNS)


def test_simulated_trainings_have_the_likelihood_ratios_of_all_sets_of_steps():
    """An example's sets of steps and their probabilities are written down one by one, also those of its last rests."""
    b, n, p, c = 3, 6, 0.3, np.array([1.0, 0.6, 0.3])
    may_join, law = 1 / (1 + (b - 1) * p), {}

    def follow(step, taken, chance):
        if step >= n:
            law[taken] = law.get(taken, 0.0) + chance
            return
        follow(step + 1, taken, chance * (1 - p))
        follow(step + b, (*taken, step), chance * p)

    for rests in range(b):
        follow(rests, (), may_join * (p if rests else 1))
    moves = np.array([[sum(c[t - s] for s in taken if 0 <= t - s < b) for t in range(n + b - 1)] for taken in law])
    chances, rng = np.array([*law.values()]), np.random.default_rng(0)
    assert chances.sum() == pytest.approx(1)
    for present, sign in ((True, 1), (False, -1)):
        drawn = rng.choice(len(chances), RUNS, p=chances / chances.sum())
        z = rng.standard_normal([RUNS, n + b - 1]) + (moves[drawn] if present else 0)
        truth = sign * np.log(np.exp(z @ moves.T - (moves**2).sum(1) / 2) @ chances)
        ours = sign * monte_carlo.simulated(tuple(c), p, n, RUNS)[0 if present else 1]
        for epsilon in (-0.5, 0.0, 0.5, 1.0):
            values = [np.maximum(-np.expm1(epsilon - losses), 0) for losses in (truth, ours)]
            deviation = np.sqrt(sum(v.var() for v in values) / RUNS)
            assert abs(values[0].mean() - values[1].mean()) < 4 * deviation  # the draws are seeded


def test_bounds_are_those_of_a_binomial_and_a_little_more():
    number, failure = 1000, 1e-6
    counts = np.array([0, 1, 5, 50, 500, 990, 1000])
    exact = np.append(beta.ppf(1 - failure, counts[:-1] + 1, number - counts[:-1]), 1.0)  # Clopper-Pearson
    bounds = monte_carlo._upper_bounds(counts / number, number, failure)
    assert (exact <= bounds).all() and (bounds <= np.minimum(1.35 * exact, 1)).all()


def test_fewer_runs_cost_more_and_failure_is_in_delta(monkeypatch):
    many, few = (monte_carlo.losses((1.0,), 0.5, 3, runs, 1e-3) for runs in (RUNS, RUNS // 16))
    assert few.get_epsilon_for_delta(1e-2) > 1.02 * many.get_epsilon_for_delta(1e-2)
    with monkeypatch.context() as patch:  # the bound is that of all prices of a search
        patch.setattr(monte_carlo, "_TRIES", 1)
        assert monte_carlo.losses((1.0,), 0.5, 3, RUNS, 1e-3).get_epsilon_for_delta(1e-2) < many.get_epsilon_for_delta(
            1e-2
        )
    monkeypatch.setattr(monte_carlo, "FAILURE", 0.05)
    assert min(part._infinity_mass for part in parts(monte_carlo.losses((1.0,), 0.5, 3, RUNS, 1e-3))) >= 0.05


@pytest.mark.parametrize("watched", [True, False])
def test_a_person_who_waits_sees_how_many_runs_are_simulated(watched, monkeypatch, capsys):
    monkeypatch.setattr(monte_carlo, "is_watched", lambda: watched)
    monkeypatch.setattr("tqdm.auto.tqdm", Eager)
    monte_carlo.simulated.cache_clear()
    monte_carlo.simulated((1.0,), 0.5, 3, 1 << 13)
    said = capsys.readouterr().err
    assert ("one epsilon: 100%" in said and "8192/8192" in said) if watched else not said


class Eager(tqdm.auto.tqdm):
    """A bar that does not wait."""

    def __init__(self, *args, delay, **kwargs):
        super().__init__(*args, mininterval=0, **kwargs)


def test_the_convex_minorant_is_the_largest_convex_function_below():
    rng = np.random.default_rng(1)
    x, y = np.sort(rng.uniform(0.1, 5, 12)), np.sort(rng.uniform(0, 1, 12))[::-1]
    px, py = np.append(0, x), np.append(1, y)
    least = [min(
        py[i] + (py[j] - py[i]) * (at - px[i]) / (px[j] - px[i])
        for i, j in itertools.combinations(range(13), 2) if px[i] <= at <= px[j]
    ) for at in x]  # fmt: skip
    assert monte_carlo._convex_minorant(x, y) == pytest.approx(np.array(least))


def test_a_run_says_how_it_was_priced_and_comes_back_from_a_file(monkeypatch):
    monkeypatch.setattr(monte_carlo, "RUNS", RUNS)
    noise = Banded(bands=2, min_separation=3, max_participations=1, num_steps=9, coefficients=(1.0, -0.5))
    run = CorrelatedRun(
        noise=noise, noise_multiplier=2.0, num_steps=9, min_separation=3, sampling_rate=0.25, sampling="b_min_sep"
    )
    stddev = 2.0 * np.hypot(1, 0.5)
    assert run.dp_event.moves == pytest.approx((1 / stddev, 0.5 / stddev, 0))
    assert (run.dp_event.rate, run.dp_event.steps, run.dp_event.runs) == (0.25, 9, RUNS)
    assert run.dp_event.mean == pytest.approx(9 * 0.25 / 1.5)
    ledger = PrivacyLedger().count_correlated([("a", 0)], run, dataset=None)
    again = PrivacyLedger.from_dict(json.loads(json.dumps(ledger.to_dict())))
    text = str(again.report(1e-2))
    assert "one example rests for 2 steps after each use, and is sampled at 0.25 otherwise" in text
    assert "65536 simulated trainings" in text and "probability of at most 2e-10, and delta includes this" in text
    cyclic = CorrelatedRun(noise=noise, noise_multiplier=2.0, num_steps=9, min_separation=3, sampling_rate=0.25)
    assert again.epsilon(1e-2) != pytest.approx(
        PrivacyLedger().count_correlated((), cyclic, dataset=None).epsilon(1e-2)
    )
