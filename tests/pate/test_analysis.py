"""The cost of each query: published values, closed forms, and what is refused."""

import numpy as np
import pytest
from pate_cases import PUBLISHED_VOTES, random_votes
from scipy import special

from tfdpfl.pate import (
    ConfidentGNMax,
    GNMax,
    InteractiveGNMax,
    LNMax,
    as_counts,
    bounds,
    compose,
    epsilon_of_rdp,
    optimal_order,
    pysyft_analysis,
    rdp_data_dependent,
    rdp_data_independent,
)


def test_the_seeds_figure_is_reproduced_beside_the_better_ones():
    predictions = random_votes(2000)
    result = pysyft_analysis(predictions, predictions[0], 0.1, 1e-5, 10)
    assert result.data_independent == pytest.approx(91.51292546497024, rel=1e-9)
    assert result.real_orders == pytest.approx(40 + 2 * np.sqrt(40 * np.log(1e5)), rel=1e-6)
    assert result.real_orders == pytest.approx(82.919, abs=1e-3)
    assert result.tight < result.real_orders
    assert result.tight_data_dependent <= result.data_dependent
    assert not result.tight.data_dependent and result.data_dependent.data_dependent


def test_data_independent_rdp_is_the_closed_form():
    orders = np.array([1.5, 2, 10.25])
    assert rdp_data_independent(GNMax(40), orders) == pytest.approx(orders / 1600)
    assert rdp_data_independent(LNMax(0.75), orders) == pytest.approx(np.minimum(2 * 0.75**2 * orders, 1.5))
    assert rdp_data_independent(LNMax(0.75), orders, num_queries=3).shape == (3, 3)
    confident = ConfidentGNMax(200, 150, 40)
    assert rdp_data_independent(confident, orders) == pytest.approx(orders / 1600 + orders / 45000)


def test_the_order_of_the_classes_does_not_matter():
    shuffled = PUBLISHED_VOTES[:, np.random.default_rng(0).permutation(10)]
    for mechanism in (GNMax(40), LNMax(0.05), ConfidentGNMax(200, 150, 40)):
        same = [rdp_data_dependent(mechanism, votes, [1.5, 8]) for votes in (PUBLISHED_VOTES, shuffled)]
        assert same[0] == pytest.approx(same[1])


def test_the_seeds_analysis_is_of_all_queries_whatever_the_indices_are():
    predictions = random_votes(300)
    labels, rows = (pysyft_analysis(predictions, i, 0.1, 1e-5, 10) for i in (predictions[0], np.arange(300)))
    assert labels == rows
    orders = 1 + np.arange(1.0, 11)
    total = compose([rdp_data_dependent(LNMax(0.1), predictions, orders, num_classes=10)])
    assert labels.data_dependent == epsilon_of_rdp(orders, total, 1e-5, "classic")[0]
    assert labels.data_dependent > 20 * pysyft_analysis(predictions[:, :10], None, 0.1, 1e-5, 10).data_dependent / 300


def test_the_threshold_is_paid_for_every_query_and_the_vote_only_where_it_answers():
    mechanism, votes = ConfidentGNMax(200, 150, 40), np.repeat(PUBLISHED_VOTES, 4, 0)
    answered = np.array([True, False, True, False])
    rdp = rdp_data_dependent(mechanism, votes, [3.0], answered=answered)[:, 0]
    q = special.log_ndtr(-40 / 150)
    threshold = bounds.rdp_gaussian(np.array([q]), np.sqrt(2) * 150, np.array([3.0]))[0, 0]
    vote = rdp_data_dependent(GNMax(40), PUBLISHED_VOTES, [3.0])[0, 0]
    assert rdp == pytest.approx(threshold + vote * answered, rel=1e-12)
    cost = [mechanism.epsilon(votes, 1e-5, False, answered=a) for a in (~answered & False, answered, None)]
    assert 0 < cost[0] < cost[1] < cost[2]


def test_the_threshold_of_interactive_gnmax_is_paid_by_the_scores_that_it_looked_at():
    counts, student = np.array([[90, 10], [52, 48]]), np.array([[0.9, 0.1], [0.1, 0.9]])
    none, orders = np.zeros(2, bool), np.array([2.0, 5.0, 20.0])
    mechanism = InteractiveGNMax(40, 20, 5)
    rdp = rdp_data_dependent(mechanism, counts, orders, answered=none, student=student)
    margin = (counts - 100 * student).max(axis=1) - 40  # 0 votes beyond the student, and 42
    expected = bounds.rdp_gaussian(bounds.log_q_threshold(margin, 20), np.sqrt(2) * 20, orders)
    np.testing.assert_allclose(rdp, expected)
    without = ConfidentGNMax(40, 20, 5)
    assert not np.allclose(rdp, rdp_data_dependent(without, counts, orders, answered=none))


def test_the_best_order_is_no_worse_than_any_other():
    votes = as_counts(random_votes(300), 10)
    best = GNMax(20).epsilon(votes, 1e-5)
    assert optimal_order(GNMax(20), votes, 1e-5) == best.order
    for order in (best.order * 0.9, best.order * 1.1):
        total = compose([rdp_data_dependent(GNMax(20), votes, [order])])
        assert epsilon_of_rdp([order], total, 1e-5)[0] >= best - 1e-6
    other = as_counts(random_votes(300, seed=1, agreement=0.1), 10)
    public = [optimal_order(GNMax(20), v, 1e-5, data_dependent=False) for v in (votes, other)]
    assert public[0] == public[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pysyft_analysis(random_votes(10), None, 0.1, 0.0), "delta must be strictly between 0 and 1"),
        (lambda: pysyft_analysis(random_votes(10), None, 0.1, 1e-5, 0), "moments must be a whole number"),
        (lambda: pysyft_analysis(np.full((3, 4), np.nan)), "NaN"),
        (lambda: rdp_data_dependent(GNMax(1), [[1, 1]], [1.0]), "finite numbers above 1"),
        (lambda: rdp_data_independent(GNMax(1), []), "finite numbers above 1"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
