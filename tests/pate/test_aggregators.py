"""PATE's votes and what they cost: the published values, the exact loss below every bound, bad input refused."""

import copy
import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
from scipy import special, stats

from tfdpfl import _replay_hook
from tfdpfl.accounting import price
from tfdpfl.pate import (
    ConfidentGNMax,
    Epsilon,
    GNMax,
    InteractiveGNMax,
    LNMax,
    aggregators,
    as_counts,
    bounds,
    compose,
    epsilon_of_rdp,
    optimal_order,
    pricing,
    pysyft_analysis,
    rdp_data_dependent,
    rdp_data_independent,
)

PUBLISHED_VOTES = np.array([[240, 4, 1, 0, 0, 1, 0, 2, 1, 1]])
LABEL = "not to be published"


def random_votes(queries=50, teachers=100, classes=10, seed=0, agreement=0.8):
    rng = np.random.default_rng(seed)
    predictions = rng.integers(0, classes, (teachers, queries))
    agree = rng.random((teachers, queries)) < agreement
    return np.where(agree, rng.integers(0, classes, queries), predictions)


# Check values


def test_gaussian_log_q_and_rdp_are_the_check_values():
    (part,) = GNMax(40).parts
    assert part.log_q(PUBLISHED_VOTES)[0] == pytest.approx(-9.124565455181415, rel=1e-9)
    rdp = rdp_data_dependent(GNMax(40), PUBLISHED_VOTES, [2])
    assert rdp == pytest.approx(np.array([[3.552743148187008e-05]]), rel=1e-9)


def test_laplace_log_q_is_the_check_value():
    (part,) = LNMax(1 / 20).parts
    assert part.log_q(PUBLISHED_VOTES)[0] == pytest.approx(-8.49686173545273, rel=1e-9)


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


# Faults of public code


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


def test_the_order_of_the_classes_does_not_matter():
    shuffled = PUBLISHED_VOTES[:, np.random.default_rng(0).permutation(10)]
    for mechanism in (GNMax(40), LNMax(0.05), ConfidentGNMax(200, 150, 40)):
        same = [rdp_data_dependent(mechanism, votes, [1.5, 8]) for votes in (PUBLISHED_VOTES, shuffled)]
        assert same[0] == pytest.approx(same[1])


def test_a_class_that_no_one_votes_for_is_a_column_of_zeros():
    counts = as_counts([[0, 1], [0, 1], [0, 0]], num_classes=4)
    assert counts.tolist() == [[3, 0, 0, 0], [1, 2, 0, 0]]
    assert GNMax(0.01, seed=0).aggregate(counts).labels.tolist() == [0, 1]


def test_the_seeds_analysis_is_of_all_queries_whatever_the_indices_are():
    predictions = random_votes(300)
    labels, rows = (pysyft_analysis(predictions, i, 0.1, 1e-5, 10) for i in (predictions[0], np.arange(300)))
    assert labels == rows
    orders = 1 + np.arange(1.0, 11)
    total = compose([rdp_data_dependent(LNMax(0.1), predictions, orders, num_classes=10)])
    assert labels.data_dependent == epsilon_of_rdp(orders, total, 1e-5, "classic")[0]
    assert labels.data_dependent > 20 * pysyft_analysis(predictions[:, :10], None, 0.1, 1e-5, 10).data_dependent / 300


@pytest.mark.parametrize(("teachers", "classes"), [(7, 10), (300, 3), (5, 100)])
def test_predictions_are_counted_as_a_loop_would(teachers, classes):
    predictions = random_votes(30, teachers, classes)
    counts = as_counts(predictions, classes)
    assert all((np.bincount(predictions[:, i], minlength=classes) == counts[i]).all() for i in range(30))


# The exact loss


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


# Composition and conversion


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


# Aggregation


def test_noise_has_the_stated_size():
    votes = np.tile([60, 40], (200_000, 1))
    for mechanism, right in (
        (GNMax(15, seed=1), special.ndtr(20 / (15 * np.sqrt(2)))),
        (LNMax(0.05, seed=1), 1 - (2 + 0.05 * 20) / (4 * np.exp(0.05 * 20))),
    ):
        assert mechanism.aggregate(votes).labels.mean() == pytest.approx(1 - right, abs=0.005)
    confident = ConfidentGNMax(70, 20, 1, seed=1).aggregate(votes)
    assert confident.answered.mean() == pytest.approx(special.ndtr(-10 / 20), abs=0.005)


class _Seen:
    """A tape that keeps what was added."""

    def __init__(self):
        self.noise = []

    def take(self, release):
        self.noise += release.noise
        return release.out


@pytest.mark.parametrize(
    ("mechanism", "noises"),
    [
        (LNMax(0.25), [stats.laplace(scale=4)]),
        (GNMax(3.0), [stats.norm(scale=3)]),
        (ConfidentGNMax(0.0, 5.0, 2.0), [stats.norm(scale=5), stats.norm(scale=2)]),
    ],
)
def test_noise_is_of_its_distribution(monkeypatch, mechanism, noises):
    monkeypatch.setattr(_replay_hook, "tape", seen := _Seen())
    mechanism.aggregate(np.tile([90, 5, 5], (5000, 1)))
    assert len(seen.noise) == len(noises)
    for noise, of in zip(seen.noise, noises, strict=True):
        assert stats.kstest(noise.ravel(), of.cdf).pvalue > 1e-8
        for times in (2 / 3, 3 / 2):
            assert stats.kstest(times * noise.ravel(), of.cdf).pvalue < 1e-8
        assert noise.ndim == 1 or abs(np.corrcoef(noise.T) - np.eye(3)).max() < 0.09


def test_noise_is_fresh_without_a_seed_and_repeats_with_one():
    votes = np.tile([50, 50], (100, 1))
    draw = lambda seed=None: GNMax(10, seed=seed).aggregate(votes).labels.tolist()
    assert draw() != draw() and draw(3) == draw(3)
    mechanism = GNMax(10, seed=3)
    assert mechanism.aggregate(votes).labels.tolist() != mechanism.aggregate(votes).labels.tolist()


def test_laplace_noise_ends_nowhere():
    """The generator's normals end; an exponential number that passes an end goes on with a fresh one."""

    class Source:
        drawn = iter([(7.0, 1.0), (1.0, 2.0)])  # 25 passes 20, which 2.5 follow

        def normals(self, shape):
            (a, b), rest = next(self.drawn), tuple(shape)[1:]
            return np.stack([np.full(rest, -a, np.float32), np.full(rest, b, np.float32)])

    assert aggregators._laplace(Source(), (2, 3)).tolist() == [[-22.5] * 3] * 2


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g)), lambda g: g])
@pytest.mark.parametrize("make", [lambda: LNMax(0.05), lambda: GNMax(40.0), lambda: ConfidentGNMax(20.0, 30.0, 40.0)])
def test_copies_do_not_repeat_the_noise(make, twin):
    mechanism, votes = make(), np.tile([20, 10], (2000, 1))
    first, second = twin(mechanism).aggregate(votes), twin(mechanism).aggregate(votes)
    assert np.mean(first.labels != second.labels) > 0.2


def test_predictions_and_counts_get_the_same_answers():
    predictions = random_votes(40)
    one, other = LNMax(0.1, seed=0), LNMax(0.1, seed=0)
    from_predictions = one.aggregate(predictions, num_classes=10)
    assert (from_predictions.labels == other.aggregate(as_counts(predictions, 10)).labels).all()


def test_unanswered_queries_have_no_label_and_cost_the_threshold():
    votes = np.array([[100, 0, 0], [40, 30, 30]])
    answers = ConfidentGNMax(70, 1e-3, 1e-3, seed=0).aggregate(votes)
    assert answers.labels.tolist() == [0, -1] and answers.answered.tolist() == [True, False]
    assert answers.cost == pytest.approx([0.5e6 + 1e6, 0.5e6])
    assert answers.epsilon(1e-5).data_dependent is False


def test_interactive_asks_the_teachers_only_where_they_contradict_the_student():
    votes = np.array([[100, 0, 0], [100, 0, 0], [40, 30, 30]])
    student = np.array([[0.95, 0.05, 0], [0, 1, 0], [0.4, 0.3, 0.3]])
    mechanism = InteractiveGNMax(50, 1e-3, 1e-3, confidence=0.9, seed=0)
    answers = mechanism.aggregate(votes, student=student)
    assert answers.labels.tolist() == [0, 0, -1]
    assert answers.answered.tolist() == [True, True, False]
    assert answers.by_teachers.tolist() == [False, True, False]
    assert len(answers.dp_event.events) == 2 and answers.dp_event.events[1].count == 1
    margins = votes - 100 * student
    expected = ConfidentGNMax(50, 1e-3, 1e-3).parts[0].log_q(margins)
    only_threshold = rdp_data_dependent(mechanism, votes, [2.0], student=student, answered=np.zeros(3, bool))
    assert only_threshold[:, 0] == pytest.approx(bounds.rdp_gaussian(expected, 2**0.5 * 1e-3, np.array([2.0]))[:, 0])
    assert answers.rdp([2.0]).shape == (3, 1)


def test_a_stream_of_batches_is_the_whole():
    votes = as_counts(random_votes(60), 10)
    parts = list(GNMax(20, seed=0).stream([votes[:25], votes[25:]]))
    joined = parts[0] + parts[1]
    assert len(joined) == 60 and (joined.counts == votes).all()
    assert joined.epsilon(1e-5, data_dependent=True) == GNMax(20).epsilon(votes, 1e-5)
    assert len(joined[:10]) == 10 and joined[joined.labels == 3].answered.all()
    with pytest.raises(ValueError, match="one mechanism"):
        parts[0] + GNMax(21).aggregate(votes)


# Labels


def test_a_data_dependent_epsilon_says_so_wherever_it_is_printed():
    votes = as_counts(random_votes(20), 10)
    epsilon = GNMax(20).epsilon(votes, 1e-5)
    for text in (repr(epsilon), str(epsilon), f"{epsilon}", f"{epsilon:.2f}", f"{epsilon:>9.3g}", "%s" % epsilon):  # noqa: UP031
        assert LABEL in text
    assert LABEL in json.dumps(epsilon.to_dict()) and LABEL in repr(pickle.loads(pickle.dumps(epsilon)))
    assert LABEL in str(round(epsilon, 2)) and round(epsilon, 2) == round(float(epsilon), 2)
    assert LABEL in repr([epsilon]) and LABEL in str(pysyft_analysis(random_votes(9)))
    public = GNMax(20).epsilon(votes, 1e-5, data_dependent=False)
    assert LABEL not in f"{public} {public!r} {public:.2f}" and public.to_dict()["warning"] is None


def test_the_label_stays_where_the_votes_save_nothing():
    tied = np.tile([5, 5], (50, 1))
    epsilon, independent = (GNMax(2).epsilon(tied, 1e-5, data_dependent=d) for d in (True, False))
    assert epsilon == independent and LABEL in str(epsilon)


def test_q_is_at_most_that_of_a_guess():
    for mechanism in (GNMax(2), LNMax(0.5)):
        assert mechanism.parts[0].log_q(np.full((1, 10), 7))[0] == pytest.approx(np.log(0.9))


def test_answers_print_nothing_private():
    answers = GNMax(20, seed=0).aggregate(random_votes(20), 10)
    assert repr(answers) == "Answers(20 of 20 answered by GNMax(sigma=20), rho=0.05)"


# Bad input


@pytest.mark.parametrize(
    ("votes", "options", "message"),
    [
        ([[3, 2], [3, 3]], {}, "row 1 sums to 6"),
        ([[3, 2], [3, 2]], {"num_teachers": 6}, "number of teachers, 6"),
        ([[3, 2]], {"num_teachers": 0}, "num_teachers must be at least 1"),
        ([[3, 2]], {"num_teachers": 1.5}, "num_teachers must be a whole number"),
        ([[-1, 3]], {}, "not be negative, got -1"),
        ([[0.5, 3]], {}, "whole numbers"),
        ([[np.nan, 3]], {}, "NaN"),
        ([[0.0, np.nan]], {"num_classes": 2}, "NaN"),
        ([[5], [5]], {}, "at least 2 classes"),
        ([[0, 0]], {}, "at least one teacher"),
        (np.zeros((0, 5)), {"num_classes": 3}, "at least one teacher"),
        (np.zeros((0, 5)), {}, "at least one query"),
        (np.zeros((4, 0)), {"num_classes": 3}, "at least one query"),
        (np.zeros((2, 2, 2)), {}, r"shape \(2, 2, 2\)"),
        ([["a", "b"]], {}, "must be numbers"),
        ([[0, 3]], {"num_classes": 3}, "below num_classes=3, got 3"),
        ([[0, 0]], {"num_classes": 1}, "num_classes must be a whole number of at least 2"),
    ],
)
def test_malformed_votes_are_refused(votes, options, message):
    with pytest.raises(ValueError, match=message):
        GNMax(1).aggregate(votes, **options)
    with pytest.raises(ValueError, match=message):
        rdp_data_dependent(GNMax(1), votes, [2], **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GNMax(0), "sigma must be a finite number above 0, got 0"),
        (lambda: GNMax(-1.0), "sigma must be"),
        (lambda: GNMax(float("nan")), "sigma must be"),
        (lambda: LNMax(0), "gamma must be a finite number above 0"),
        (lambda: LNMax(1e3), "gamma=1000 is larger than 350.*too rare for a float.*smaller gamma"),
        (lambda: ConfidentGNMax(200, 0, 40), "sigma_threshold must be"),
        (lambda: ConfidentGNMax(200, 150, -40), "sigma must be"),
        (lambda: ConfidentGNMax(float("inf"), 150, 40), "threshold must be"),
        (lambda: InteractiveGNMax(200, 150, 40, confidence=1.5), "confidence must be at most 1"),
        (lambda: GNMax(1).epsilon([[1, 1]], 0), "delta must be strictly between 0 and 1"),
        (lambda: GNMax(1).epsilon([[1, 1]] * 10, 1.0), "delta must be strictly between 0 and 1, got 1.0"),
        (lambda: pysyft_analysis(random_votes(10), None, 0.1, 0.0), "delta must be strictly between 0 and 1"),
        (lambda: pysyft_analysis(random_votes(10), None, 0.1, 1e-5, 0), "moments must be a whole number"),
        (lambda: pysyft_analysis(np.full((3, 4), np.nan)), "NaN"),
        (lambda: rdp_data_dependent(GNMax(1), [[1, 1]], [1.0]), "finite numbers above 1"),
        (lambda: rdp_data_independent(GNMax(1), []), "finite numbers above 1"),
        (lambda: epsilon_of_rdp([2.0], [0.1, 0.2], 1e-5), "rdp must be one number"),
        (lambda: epsilon_of_rdp([2.0], [0.1], 1e-5, "loose"), "conversion must be one of"),
        (lambda: GNMax(1).dp_event(10, 5), "num_answered must be"),
        (lambda: ConfidentGNMax(1, 1, 1).dp_event(10, 11), "num_answered must be"),
        (lambda: ConfidentGNMax(1, 1, 1).epsilon([[1, 1]], 0.1, answered=[1]), "mask of bools"),
        (lambda: GNMax(1).epsilon([[1, 1]], 0.1, answered=[False]), "answers every query"),
        (lambda: GNMax(1).epsilon([[1, 1]], 0.1, student=[[0, 1]]), "student is for InteractiveGNMax"),
        (lambda: InteractiveGNMax(1, 1, 1).aggregate([[1, 1]]), "got None"),
        (lambda: InteractiveGNMax(1, 1, 1).aggregate([[1, 1]], student=[[1, 2, 3]]), "shape of the counts"),
        (lambda: InteractiveGNMax(1, 1, 1).aggregate([[1, 1]], student=[[1, 2]]), "rows sum to 1"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_unanimous_and_tied_votes_are_priced():
    for votes in ([[100, 0]], [[50, 50]], [[0, 0, 1]]):
        for mechanism in (GNMax(20), LNMax(0.1), ConfidentGNMax(50, 30, 10)):
            assert 0 <= mechanism.epsilon(votes, 1e-5) < 200


@pytest.mark.slow
def test_importing_pate_does_not_import_tensorflow():
    code = "import sys, tfdpfl.pate; sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_epsilon_is_a_float():
    assert isinstance(Epsilon(1.5, 1e-5), float) and Epsilon(1.5, 1e-5) + 1 == 2.5
