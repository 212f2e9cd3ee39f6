"""ε of many queries: composition, conversion, and the price of the event."""

import numpy as np
import pytest
from pate_cases import PUBLISHED_VOTES, random_votes
from scipy import special

from tfdpfl.accounting import price
from tfdpfl.pate import ConfidentGNMax, GNMax, LNMax, as_counts, compose, epsilon_of_rdp, pricing, rdp_data_dependent


def test_data_independent_epsilon_is_the_price_of_the_event():
    votes = as_counts(random_votes(200), 10)
    for mechanism in (GNMax(40), ConfidentGNMax(60, 50, 20), LNMax(0.1)):
        epsilon = mechanism.epsilon(votes, 1e-5, data_dependent=False)
        assert epsilon == price(mechanism.dp_event(200), 1e-5).epsilon
        assert not epsilon.data_dependent


def test_a_vote_that_moves_has_sensitivity_root_two_in_gnmax_and_one_in_the_threshold():
    delta, queries = 1e-6, 100
    sigma = 40 / np.sqrt(2) / np.sqrt(queries)
    epsilon = float(GNMax(40).epsilon(np.repeat(PUBLISHED_VOTES, queries, 0), delta, data_dependent=False))
    a, b = 1 / (2 * sigma), epsilon * sigma  # Balle & Wang 2018, Theorem 8
    assert special.ndtr(a - b) - np.exp(epsilon) * special.ndtr(-a - b) == pytest.approx(delta, rel=1e-2)
    events = ConfidentGNMax(200, 150, 40).dp_event(640, 286).events
    assert [(e.event.noise_multiplier, e.count) for e in events] == [(150, 640), (pytest.approx(40 / 2**0.5), 286)]


@pytest.mark.slow
def test_epsilon_adds_up_and_is_at_most_the_classic_conversion():
    votes = as_counts(random_votes(500), 10)
    orders = np.linspace(1.1, 60, 300)
    for mechanism in (GNMax(20), LNMax(0.05), ConfidentGNMax(60, 40, 20)):
        total = compose([rdp_data_dependent(mechanism, half, orders) for half in (votes[:250], votes[250:])])
        tight, classic = (epsilon_of_rdp(orders, total, 1e-5, kind)[0] for kind in ("tight", "classic"))
        assert mechanism.epsilon(votes, 1e-5) <= tight * (1 + 1e-6) < classic
        assert mechanism.epsilon(votes, 1e-5) <= mechanism.epsilon(votes, 1e-5, data_dependent=False)


def test_chunks_do_not_change_the_sum(monkeypatch):
    votes = as_counts(random_votes(100), 10)
    whole = GNMax(20).epsilon(votes, 1e-5)
    monkeypatch.setattr(pricing, "_CHUNK", 7)
    assert GNMax(20).epsilon(votes, 1e-5) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GNMax(1).epsilon([[1, 1]], 0), "delta must be strictly between 0 and 1"),
        (lambda: GNMax(1).epsilon([[1, 1]] * 10, 1.0), "delta must be strictly between 0 and 1, got 1.0"),
        (lambda: epsilon_of_rdp([2.0], [0.1, 0.2], 1e-5), "rdp must be one number"),
        (lambda: epsilon_of_rdp([2.0], [0.1], 1e-5, "loose"), "conversion must be one of"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_unanimous_and_tied_votes_are_priced():
    for votes in ([[100, 0]], [[50, 50]], [[0, 0, 1]]):
        for mechanism in (GNMax(20), LNMax(0.1), ConfidentGNMax(50, 30, 10)):
            assert 0 <= mechanism.epsilon(votes, 1e-5) < 200
