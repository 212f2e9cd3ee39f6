"""The bounds are the published ones, and the exact loss is below every one of them."""

import numpy as np
import pytest
from pate_cases import PUBLISHED_VOTES
from scipy import special, stats

from tfdpfl.pate import ConfidentGNMax, GNMax, LNMax, bounds, pricing, rdp_data_dependent, rdp_data_independent


def test_gaussian_log_q_and_rdp_are_the_check_values():
    (part,) = GNMax(40).parts
    assert part.log_q(PUBLISHED_VOTES)[0] == pytest.approx(-9.124565455181415, rel=1e-9)
    rdp = rdp_data_dependent(GNMax(40), PUBLISHED_VOTES, [2])
    assert rdp == pytest.approx(np.array([[3.552743148187008e-05]]), rel=1e-9)


def test_laplace_log_q_is_the_check_value():
    (part,) = LNMax(1 / 20).parts
    assert part.log_q(PUBLISHED_VOTES)[0] == pytest.approx(-8.49686173545273, rel=1e-9)


def test_the_2017_bound_is_not_used_outside_its_validity():
    rdp = bounds.rdp_laplace(np.log([0.4]), 0.75, np.array([2.0]))
    assert rdp[0, 0] == pytest.approx(1.5)  # the formula itself gives 0.29


@pytest.mark.parametrize("gamma", [0.01, 0.1, 0.75, 3.0])
def test_the_2017_bound_meets_the_data_independent_one_where_it_ends(gamma):
    ends = -np.logaddexp(0, 2 * gamma)
    for order in (1.5, 50.0):
        known = min(2 * gamma, 2 * gamma**2 * order)
        around = bounds.rdp_laplace(np.array([ends - 1e-9, ends + 1e-9]), gamma, np.array([order]))
        assert around[:, 0] == pytest.approx(known, rel=1e-6)


def test_no_q_order_or_noise_overflows():
    log_q = np.array([-1e90, -1e5, -800.0, -30.0, -1.0, -1e-3, -1e-12])
    orders = np.array([1 + 1e-6, 1.5, 2, 1000, 1e6])
    with np.errstate(over="raise", invalid="raise"):
        for noise in (1e-6, 0.01, 1.0, 40.0, 1e6):
            for bound, ceiling in (
                (bounds.rdp_gaussian, orders / noise**2),
                (bounds.rdp_laplace, np.minimum(2 * noise, 2 * noise**2 * orders)),
            ):
                rdp = bound(log_q, noise, orders)
                assert np.isfinite(rdp).all() and (rdp >= 0).all()
                assert (rdp <= ceiling * (1 + 1e-12)).all()
    assert np.isfinite(rdp_data_dependent(GNMax(0.001), PUBLISHED_VOTES * 10**6, orders)).all()
    assert np.isfinite(rdp_data_dependent(LNMax(350.0), PUBLISHED_VOTES * 10**6, orders)).all()


def exact_log_probabilities(counts, log_density, log_cdf, scale):
    """ln P(argmax = j), by Gauss-Legendre panels between which neither density nor distribution has a kink."""
    reach = 45 * scale
    edges = np.unique(np.concatenate([np.arange(min(counts) - reach, max(counts) + reach, scale / 2), counts]))
    nodes, weights = np.polynomial.legendre.leggauss(12)
    half = np.diff(edges)[:, None] / 2
    x = (edges[:-1, None] + half * (1 + nodes)).ravel()
    log_weight = np.log((half * weights).ravel())
    log_f, log_cdfs = (np.array([f((x - n) / scale) for n in counts]) for f in (log_density, log_cdf))
    terms = log_f - np.log(scale) + log_cdfs.sum(axis=0) - log_cdfs + log_weight
    return special.logsumexp(terms, axis=1)


def log_laplace_cdf(x):
    return np.where(x < 0, np.minimum(x, 0) - np.log(2), np.log1p(-np.exp(-np.abs(x)) / 2))


NOISES = {
    "gaussian": (GNMax, lambda scale: scale, stats.norm.logpdf, special.log_ndtr),
    "laplace": (LNMax, lambda scale: 1 / scale, lambda x: -np.abs(x) - np.log(2), log_laplace_cdf),
}


def divergence(log_p, log_q, order):
    return special.logsumexp(order * log_p + (1 - order) * log_q) / (order - 1)


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISES)
def test_the_exact_loss_is_never_above_the_bounds(noise):
    make, parameter, log_density, log_cdf = NOISES[noise]
    rng = np.random.default_rng(7)
    used = 0
    for _ in range(250):
        classes, teachers = rng.integers(2, 5), rng.integers(1, 40)
        votes = rng.multinomial(teachers, rng.dirichlet(np.full(classes, 0.4)))
        scale, order = 10 ** rng.uniform(-0.3, 1.5), 1 + 10 ** rng.uniform(-1.5, 1.5)
        mechanism = make(parameter(scale))
        orders = np.array([order])
        (part,) = mechanism.parts
        ceiling = pricing.rdp_of_event(part.event, orders)[0]
        bound = min(rdp_data_dependent(mechanism, votes, orders)[0, 0], ceiling)
        used += bound < min(rdp_data_independent(mechanism, orders)[0], ceiling)
        log_p = exact_log_probabilities(votes, log_density, log_cdf, scale)
        plurality = np.argmax(votes)
        assert special.logsumexp(np.delete(log_p, plurality)) <= part.log_q(votes[None])[0] + 1e-9
        for source, target in np.argwhere(~np.eye(classes, dtype=bool)):
            if votes[source]:
                neighbour = votes.copy()
                neighbour[source] -= 1
                neighbour[target] += 1
                log_r = exact_log_probabilities(neighbour, log_density, log_cdf, scale)
                assert divergence(log_p, log_r, order) <= bound * (1 + 1e-9) + 1e-10
                assert divergence(log_r, log_p, order) <= ceiling * (1 + 1e-9) + 1e-10
    assert used > 25


def test_the_exact_loss_of_the_threshold_is_never_above_its_bound():
    rng = np.random.default_rng(3)
    for _ in range(250):
        teachers, sigma = rng.integers(2, 300), 10 ** rng.uniform(-0.3, 2)
        mechanism = ConfidentGNMax(rng.uniform(0, teachers), sigma, 1.0)
        order = 1 + 10 ** rng.uniform(-1.5, 1.5)
        votes = rng.multinomial(teachers, [0.7, 0.2, 0.1])
        unanswered = np.array([False])
        bound = rdp_data_dependent(mechanism, votes, [order], answered=unanswered)[0, 0]
        outcome = lambda top: special.log_ndtr(np.array([1, -1]) * (top - mechanism.threshold) / sigma)  # noqa: B023
        for shift in (-1, 1):
            exact = divergence(outcome(votes.max()), outcome(votes.max() + shift), order)
            assert exact <= bound * (1 + 1e-9) + 1e-12
        assert bound <= order / (2 * sigma**2) * (1 + 1e-12)


def test_q_is_at_most_that_of_a_guess():
    for mechanism in (GNMax(2), LNMax(0.5)):
        assert mechanism.parts[0].log_q(np.full((1, 10), 7))[0] == pytest.approx(np.log(0.9))
