"""The noisy votes: what they answer, the noise that they draw, and what is refused."""

import copy
import pickle

import numpy as np
import pytest
from pate_cases import random_votes
from scipy import special, stats

from tfdpfl import _replay_hook
from tfdpfl.pate import (
    ConfidentGNMax,
    GNMax,
    InteractiveGNMax,
    LNMax,
    aggregators,
    as_counts,
    bounds,
    rdp_data_dependent,
)

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


def test_a_part_of_the_answers_has_the_price_of_all():
    """The noisy answers chose the part. Those that the teachers did not give cost the checks of their votes."""
    mechanism = ConfidentGNMax(45, 20, 20, seed=0)
    one, other = (mechanism.aggregate(random_votes(40, seed=seed), num_classes=10) for seed in (0, 1))
    both, price = one + other, lambda answers: (answers.epsilon(1e-5), answers.dp_event, answers.rdp([4.0]).tolist())
    assert 0 < one.answered.sum() < len(one)
    for part in (one[one.answered], one[:1], one[one.answered][:1], one[:1] + one[1:], one[one.answered] + one):
        assert price(part) == price(one) and str(part.promises(1e-5)) == str(one.promises(1e-5))
    assert price(one[one.answered] + other[:2]) == price(one + other[:2]) == price(both[both.answered]) == price(both)
    assert repr(one[:1]).endswith(f"rho={one.cost.sum():.6g})")
    alone = one.first(3)  # of which the others are kept back
    assert alone.epsilon(1e-5) < one.epsilon(1e-5) and len(alone[:2].rdp([4.0])) == 3
    assert price(one[one.answered].first(3)) == price(one)


# Labels


def test_answers_print_nothing_private():
    answers = GNMax(20, seed=0).aggregate(random_votes(20), 10)
    assert repr(answers) == "Answers(20 of 20 answered by GNMax(sigma=20), rho=0.05)"


# Bad input


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


def test_a_report_names_a_seed_that_someone_knows():
    votes = np.tile([[30, 10, 5]], (4, 1))
    for aggregator in (GNMax(9.0, seed=3), ConfidentGNMax(5.0, 9.0, 9.0, seed=3), LNMax(0.1, seed=3)):
        answers = aggregator.aggregate(votes)
        assert "anyone who knows it can subtract the noise" in answers.promises(1e-5)[0].warnings[0]
    assert not GNMax(9.0).aggregate(votes).promises(1e-5)[0].warnings
