"""The smooth sensitivity bounds what brute force finds, and the published ε is above the truth."""

import itertools

import numpy as np
import pytest
from scipy import integrate, stats

from tfdpfl.pate import (
    ConfidentGNMax,
    GNMax,
    InteractiveGNMax,
    LNMax,
    epsilon_of_rdp,
    pricing,
    published_release_cost,
    rdp_data_dependent,
    release_cost,
    smooth_sensitivity,
    smooth_sensitivity_release,
)

TEACHERS, CLASSES = 14, 3
ALL_VOTES = np.array([v for v in itertools.product(range(TEACHERS + 1), repeat=CLASSES) if sum(v) == TEACHERS])
DISTANCE = np.abs(ALL_VOTES[:, None] - ALL_VOTES[None]).sum(axis=2) // 2  # votes that moved
STUDENT = np.tile([0.6, 0.3, 0.1], (len(ALL_VOTES), 1))


def votes_of(teachers, queries=200, seed=0):
    rng = np.random.default_rng(seed)
    right = rng.beta(8, 0.6, queries)
    return np.array([rng.multinomial(teachers, [p] + [(1 - p) / 9] * 9) for p in right])


@pytest.mark.parametrize(
    ("mechanism", "options"),
    [
        (GNMax(1.0), {}),
        (GNMax(3.0), {}),
        (LNMax(1.0), {}),
        (LNMax(0.3), {}),
        (ConfidentGNMax(9, 3.0, 1.5), {}),
        (ConfidentGNMax(9, 3.0, 1.5), {"answered": np.zeros(len(ALL_VOTES), bool)}),
        (InteractiveGNMax(4, 3.0, 1.5), {"student": STUDENT}),
    ],
)
@pytest.mark.parametrize(("order", "beta"), [(2.0, 0.2), (6.5, 0.05)])
def test_it_is_smooth_and_at_least_what_brute_force_finds(mechanism, options, order, beta):
    cost = rdp_data_dependent(mechanism, ALL_VOTES, [order], **options)[:, 0]
    local = np.where(DISTANCE == 1, np.abs(cost[:, None] - cost[None]), 0).max(axis=1)
    brute_force = (np.exp(-beta * DISTANCE) * local[None]).max(axis=1)
    ours = smooth_sensitivity(mechanism, ALL_VOTES, order, beta, **options)
    assert (ours >= brute_force * (1 - 1e-12)).all()
    neighbours = np.where(DISTANCE == 1, ours[None], 0).max(axis=1)
    assert (neighbours <= np.exp(beta) * ours * (1 + 1e-9)).all()
    if "answered" not in options:  # the threshold by itself counts on largest scores down to 0, which are never seen
        assert (ours <= 4 * brute_force).mean() > 0.5


@pytest.mark.slow
def test_the_noise_of_the_release_is_as_wide_as_its_price_says():
    mechanism, votes, order, beta, noise = GNMax(40.0), votes_of(200, 400), 4.0, 0.08, 1.5
    sensitivity = smooth_sensitivity(mechanism, votes, order, beta).sum()
    total = rdp_data_dependent(mechanism, votes, [order]).sum()
    assert 5 * noise * sensitivity < total < len(votes) * order / 40**2 - 5 * noise * sensitivity  # nothing is cut off
    how = dict(order=order, beta=beta, noise=noise, failure=0.2)
    released = [smooth_sensitivity_release(mechanism, votes, 1e-5, **how, seed=i) for i in range(250)]
    figures = [float(release.unpadded) for release in released]
    # At one order ε is the released total plus a constant.
    ratio = np.std(figures) / (noise * sensitivity)
    assert 0.82 < ratio < 1.18  # four standard errors; 2/3 and 3/2 are outside
    paid = release_cost(order, beta, noise) + order / (2 * noise**2)
    middle = epsilon_of_rdp([order], [total + paid], 1e-5)[0]
    assert abs(np.mean(figures) - middle) < 4 * noise * sensitivity / np.sqrt(len(figures))
    # The margin is a multiple of the sensitivity, whose logarithm has noise of its own.
    margins = np.log([release.epsilon - release.unpadded for release in released])
    assert 0.82 < np.std(margins) / (beta * noise) < 1.18
    quantile = stats.norm.isf(0.1)
    middle = np.log(quantile * noise * sensitivity) + quantile * beta * noise
    assert abs(np.mean(margins) - middle) < 4 * beta * noise / np.sqrt(len(figures))
    assert abs(np.corrcoef(figures, margins)[0, 1]) < 0.25  # four standard errors


def divergence(order, mean, deviation, other_deviation):
    """Rényi divergence of N(0, deviation²) from N(mean, other_deviation²), by numerical integration."""
    width = (order / deviation**2 + (1 - order) / other_deviation**2) ** -0.5
    middle = (1 - order) * mean / other_deviation**2 * width**2

    def density(x):
        p, q = stats.norm.logpdf(x, 0, deviation), stats.norm.logpdf(x, mean, other_deviation)
        return np.exp(order * p + (1 - order) * q)

    return np.log(integrate.fixed_quad(density, middle - 12 * width, middle + 12 * width, n=200)[0]) / (order - 1)


@pytest.mark.parametrize(
    ("order", "beta", "noise"), [(2.0, 0.2, 3.0), (8.0, 0.05, 5.0), (20.0, 0.02, 14.0), (15.0, 0.0329, 8.88)]
)
def test_the_release_costs_the_divergence_of_its_noise_at_its_worst(order, beta, noise):
    # The neighbour's sensitivity over ours, which is 1: what is released moves by the lesser of the two at most.
    worst = max(
        divergence(order, min(1, ratio) * moved, noise, noise * ratio)
        for ratio in np.exp(np.linspace(-beta, beta, 41))
        for moved in (1.0, 0.5)
    )
    assert worst * (1 - 1e-9) <= release_cost(order, beta, noise) <= 1.0001 * worst


def test_the_published_cost_of_a_release_is_no_bound():
    # What the 2018 paper's Theorem 23 states, by hand: lambda e^(2 beta)/sigma^2 + (beta lambda - ln(1 - ..)/2)/(..).
    stated = 8 * np.exp(0.1) / 25 + (0.4 - np.log(0.2) / 2) / 7
    assert published_release_cost(8, 0.05, 5) == pytest.approx(stated, rel=1e-12)
    assert divergence(8, np.exp(-0.05), 5.0, 5.0 * np.exp(-0.05)) > 1.2 * stated
    release = smooth_sensitivity_release(GNMax(40), votes_of(250), 1e-5, order=8, beta=0.06, noise=5, seed=0)
    assert release.published_release_epsilon < release.release_epsilon


def test_cost_falls_as_votes_agree_more():
    rng = np.random.default_rng(0)
    log_q = -np.geomspace(400, 1e-6, 4000)
    for _ in range(60):
        orders, scale = np.array([1 + 10 ** rng.uniform(-2, 2.5)]), 10 ** rng.uniform(-1, 2.5)
        for part in (*GNMax(scale).parts, *LNMax(1 / scale).parts):
            rdp = part.rdp_of_log_q(log_q, orders)[:, 0]
            assert (np.diff(rdp) >= -1e-12 * rdp.max()).all()


@pytest.mark.parametrize("mechanism", [GNMax(80), LNMax(1 / 80), ConfidentGNMax(700, 300, 80)])
def test_the_published_epsilon_is_above_the_truth_and_may_be_below_the_data_independent_one(mechanism):
    votes = votes_of(1000)
    release = [smooth_sensitivity_release(mechanism, votes, 1e-5, failure=0.2, seed=seed) for seed in range(40)]
    order = release[0].order
    cost = release_cost(order, release[0].beta, release[0].noise) + order / (2 * release[0].noise ** 2)
    total = rdp_data_dependent(mechanism, votes, [order]).sum() + cost
    truth = epsilon_of_rdp([order], [total], 1e-5)[0]
    assert np.mean([r.epsilon < truth for r in release]) <= 0.2
    assert 0.2 < np.mean([r.unpadded < truth for r in release]) < 0.8
    assert np.median([float(r.epsilon) for r in release]) < mechanism.epsilon(votes, 1e-5, data_dependent=False)
    assert len({float(r.epsilon) for r in release}) > 1


def test_the_sanitised_figure_carries_no_warning_and_its_parameters_no_votes():
    one, other = (smooth_sensitivity_release(GNMax(40), votes_of(250, seed=s), 1e-5) for s in (0, 1))
    assert "not to be published" not in f"{one} {one.epsilon} {one!r}"
    assert (one.order, one.beta, one.noise) == (other.order, other.beta, other.noise)
    assert "sanitised epsilon" in str(one)


def test_it_is_never_more_than_the_data_independent_cost_and_the_release():
    votes = np.tile([5, 5], (50, 1))
    release = smooth_sensitivity_release(GNMax(2), votes, 1e-5, seed=0)
    cost = release_cost(release.order, release.beta, release.noise) + release.order / (2 * release.noise**2)
    most = epsilon_of_rdp([release.order], [50 * release.order / 4 + cost], 1e-5)[0]
    assert release.epsilon <= most * (1 + 1e-9)


def test_answers_can_be_released_by_themselves():
    votes = votes_of(250)
    answers = ConfidentGNMax(200, 150, 40, seed=0).aggregate(votes)
    by_answers = smooth_sensitivity_release(answers, delta=1e-5, seed=1)
    by_votes = smooth_sensitivity_release(answers.mechanism, votes, 1e-5, answered=answers.by_teachers, seed=1)
    assert by_answers == by_votes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": 1.0}, "above 1"),
        ({"order": 10.0, "beta": 0.05}, r"beta must be below 1 / \(2 \* order\) = 0.05"),
        ({"beta": 0.0}, "beta must be a finite number above 0"),
        ({"noise": 0.0}, "noise must be a finite number above 0"),
        ({"failure": 0.0}, "failure must be strictly between 0 and 1"),
        ({"delta": 1.0}, "delta must be strictly between 0 and 1"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        smooth_sensitivity_release(GNMax(40), votes_of(250), **{"delta": 1e-5, **options})


def test_the_data_independent_ceiling_is_the_events():
    orders = np.array([1.5, 8.0])
    (part,) = GNMax(40).parts
    assert pricing.rdp_of_event(part.event, orders) == pytest.approx(orders / 1600)
