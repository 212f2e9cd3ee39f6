"""What every label mechanism guarantees: its matrix, its draws, its randomness, its record."""

import copy
import math
import pickle
import subprocess
import sys
import warnings
from fractions import Fraction

import numpy as np
import pytest
import tensorflow as tf
from label_cases import CLASS_MECHANISMS, NUMBER_MECHANISMS, Y, largest_loss
from scipy import stats
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator

from tfdpfl.accounting import PrivacyLedger, price
from tfdpfl.label_dp import (
    ALIBI,
    KMeansPrior,
    RandomizedResponse,
    RandomizedResponseTopK,
    RandomizedResponseWithPrior,
    RROnBins,
    UnbiasedRandomizer,
    _base,
)


def sampled_matrix(monkeypatch, mechanism, inputs, outputs, n=100_000):
    """P(output | input) by running the sampler itself on evenly spaced uniform numbers."""
    with monkeypatch.context() as patch:
        patch.setattr(_base.Uniforms, "__call__", lambda self, n: (np.arange(n) + 0.5) / n)
        rows = [np.asarray(mechanism.transform(np.full(n, label))) for label in inputs]
    return np.array([[(row == output).mean() for output in outputs] for row in rows])


@pytest.mark.parametrize("epsilon", [0.05, 1.0, 8.0])
@pytest.mark.parametrize("make", [*CLASS_MECHANISMS, *NUMBER_MECHANISMS])
def test_no_output_tells_two_labels_apart_by_more_than_epsilon(make, epsilon):
    mechanism = make(epsilon)
    mechanism.fit([0, 1])
    if make not in NUMBER_MECHANISMS:
        mechanism.transform([0, 1])
    matrix = mechanism.transition_matrix_
    assert abs(matrix.sum(axis=1) - 1).max() <= 1e-12 and (matrix >= 0).all()
    assert largest_loss(matrix) <= epsilon + 1e-12


@pytest.mark.parametrize("epsilon", [0.3, 2.0])
@pytest.mark.parametrize("make", [*CLASS_MECHANISMS, *NUMBER_MECHANISMS[:4]])
def test_the_sampler_does_what_the_matrix_says(monkeypatch, make, epsilon):
    mechanism = make(epsilon)
    mechanism.fit([0, 1])
    mechanism.transform([0, 1])
    matrix = mechanism.transition_matrix_
    inputs = mechanism.values_ if make in NUMBER_MECHANISMS else range(len(matrix))
    outputs = mechanism.outputs_ if make in NUMBER_MECHANISMS else range(len(matrix))
    assert abs(sampled_matrix(monkeypatch, mechanism, inputs, outputs) - matrix).max() < 2e-5


@pytest.mark.parametrize(
    "make", [CLASS_MECHANISMS[i] for i in (0, 1, 3, 5)] + NUMBER_MECHANISMS[:1] + NUMBER_MECHANISMS[4:]
)
def test_frequencies_pass_a_chi_square_test(make):
    mechanism = make(1.0)
    n = 50_000
    label = 1 if getattr(mechanism, "num_classes", 5) == 2 else 3
    released = mechanism.fit_transform(np.full(n, label))
    matrix = mechanism.transition_matrix_
    outputs = getattr(mechanism, "outputs_", np.arange(matrix.shape[1]))
    row = matrix[list(mechanism.values_).index(label) if hasattr(mechanism, "values_") else label]
    seen = np.array([(released == output).sum() for output in outputs])
    assert seen.sum() == n
    assert stats.chisquare(seen[row > 0], n * row[row > 0]).pvalue > 1e-8


@pytest.mark.parametrize("classes", [2, 10, 10_000])
@pytest.mark.parametrize("epsilon", [30.0, 37.0, 45.0, 700.0])
@pytest.mark.parametrize("make", [
    lambda eps, k: RandomizedResponse(eps, k),
    lambda eps, k: RandomizedResponseWithPrior(eps, np.full(k, 1 / k), k),
    lambda eps, k: RROnBins(eps, prior=(np.arange(256.0), np.full(256, 1 / 256))),
])  # fmt: skip
def test_lies_are_never_rarer_than_epsilon_says(monkeypatch, make, epsilon, classes):
    # At ε = 37 a lie is rarer than a uniform number's last bit: it must be told oftener, not never.
    mechanism, n = make(epsilon, classes).fit([0, 1]), 3000
    k = len(mechanism.outputs_) if hasattr(mechanism, "outputs_") else classes
    odds = (k - 1) * Fraction(math.exp(-epsilon))
    due = max(1, math.ceil(odds / (1 + odds) * 2**53))
    numbers = [np.arange(n) * 2.0**-53, (np.arange(n) + 0.5) / n]
    monkeypatch.setattr(_base.Uniforms, "__call__", lambda self, size: numbers.pop(0)[:size])
    released = mechanism.transform(np.full(n, 1))
    truth = mechanism.outputs_[mechanism.bins_[1]] if hasattr(mechanism, "outputs_") else 1
    assert (released != truth).sum() == pytest.approx(min(due, n), abs=1e-9 * due)


@pytest.mark.parametrize("zeros", [1, 3])
def test_noise_rarer_than_a_float_step_still_comes(monkeypatch, zeros):
    """A word of 53 zero bits is followed by further ones, so that counts of ε = 80 are noisy once in e^40 times."""
    words = [np.zeros((2, 1))] + [np.zeros(2)] * (zeros - 1) + [np.full(2, 0.5)]
    monkeypatch.setattr(_base.Uniforms, "__call__", lambda self, *shape: words.pop(0))
    assert (_base.Uniforms(0).fine(2, 1) == 2.0 ** (-53 * zeros - 1)).all() and not words
    words = [np.array([[0.0], [0.5]])] + [np.zeros(1)] * (zeros - 1) + [np.full(1, 0.5)]
    monkeypatch.setattr(_base.Uniforms, "__call__", lambda self, *shape: words.pop(0))
    noise = _base.Uniforms(0).discrete_laplace(0.7, (1,))
    assert noise == math.floor((53 * zeros + 1) * math.log(2) / 0.7)


@pytest.mark.parametrize("again", [1, 2, 4])
def test_releases_add_up(again):
    mechanism = RandomizedResponse(0.5, 4).fit([0, 1])
    for _ in range(1 + again):
        mechanism.transform([0, 1, 2, 3])
    mechanism.fit([0, 1])  # forgets nothing
    assert mechanism.releases_ == 1 + again and mechanism.epsilon_spent == 0.5 * (1 + again)
    once = price(RandomizedResponse(0.5, 4).dp_event, 1e-9, adjacency="replace_one").epsilon
    paid = mechanism.ledger.epsilon(1e-9)
    assert paid > 1.5 * once and paid <= (1 + again) * 0.5 * 1.01
    assert mechanism.ledger == PrivacyLedger.from_dict(mechanism.ledger.to_dict())


@pytest.mark.parametrize("make", [
    lambda: RandomizedResponse(1.0, 3), lambda: ALIBI(1.0, 3), lambda: RandomizedResponseWithPrior(1.0, None, 3),
    lambda: RandomizedResponseTopK(1.0, 2, None, 3),
])  # fmt: skip
@pytest.mark.parametrize("wrong", [-5.0, 0, math.nan])
def test_what_is_set_after_fit_is_checked_before_a_release(make, wrong):
    mechanism = make().fit([0, 1, 2])
    with pytest.raises(ValueError, match="epsilon"):
        mechanism.set_params(epsilon=wrong).transform([0, 1, 2])
    assert mechanism.releases_ == 0 and mechanism.epsilon_spent == 0


def test_without_a_seed_nothing_repeats():
    y = np.zeros(200, int)
    mechanism = RandomizedResponse(0.1, 10).fit(y)
    twins = [mechanism, mechanism, clone(mechanism).fit(y), pickle.loads(pickle.dumps(mechanism))]
    released = [tuple(twin.transform(y)) for twin in twins]
    assert len(set(released)) == 4


@pytest.mark.parametrize("make", [
    lambda: RandomizedResponse(0.1, 10, seed=7),
    lambda: RandomizedResponseWithPrior(0.1, np.full(10, 0.1), 10, seed=7),
    lambda: RROnBins(0.5, prior=(range(10), np.eye(10)[0] / 2 + 0.05), seed=7),
])  # fmt: skip
def test_a_seed_repeats_a_run_but_no_copy_does(make):
    y = np.arange(300) % 10
    assert (make().fit_transform(y) == make().fit_transform(y)).all()
    mechanism = make()
    mechanism.fit(y)
    saved = pickle.dumps(mechanism)
    others = [clone(mechanism).fit(y), clone(mechanism).fit(y), pickle.loads(saved), pickle.loads(saved)]
    released = [mechanism.transform(y), mechanism.transform(y)] + [other.transform(y) for other in others]
    assert len({tuple(r) for r in released}) == 6
    assert pickle.loads(pickle.dumps(mechanism)).releases_ == 2 and clone(mechanism).releases_ == 0


CHECKED = [
    RandomizedResponse(1.0),
    RandomizedResponseTopK(1.0, 2),
    RandomizedResponseWithPrior(1.0, KMeansPrior(0.5, 2)),
    RROnBins(1.0, 0.2),
    UnbiasedRandomizer(1.0, 0.2),
    ALIBI(1.0),
    KMeansPrior(500.0, 3, seed=0),
]


EXPECTED = {
    "check_do_not_raise_errors_in_init_or_set_params": "arguments are checked at the constructor here",
    "check_supervised_y_2d": "[n, 1] is how Keras's own data sets have labels: no warning",
}


@pytest.mark.parametrize("estimator", CHECKED)
def test_scikit_learns_checks_pass(estimator):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_estimator(estimator, expected_failed_checks=EXPECTED)


@pytest.mark.parametrize("estimator", CHECKED)
def test_params_are_what_was_given(estimator):
    twin = clone(estimator)
    assert twin is not estimator
    assert repr(twin.get_params(deep=False).keys()) == repr(estimator.get_params(deep=False).keys())
    assert twin.set_params(epsilon=3.0).epsilon == 3.0 and estimator.epsilon != 3.0
    if hasattr(twin, "set_output"):
        twin.set_output(transform="default")


def test_a_saved_copy_keeps_its_familys_record_and_goes_on_alone():
    first = RandomizedResponse(1.0, 3)
    clone(first).fit_transform(Y)
    saved = pickle.loads(pickle.dumps(first))
    assert saved.releases_ == 0 and saved.family_ledger == first.family_ledger and len(first.family_ledger) == 1
    clone(clone(saved)).fit_transform(Y)
    assert saved.family_ledger.epsilon(1e-13) == pytest.approx(2.0, rel=2e-2)
    assert first.family_ledger.epsilon(1e-13) == pytest.approx(1.0, rel=2e-2)


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy])
def test_copies_state_what_all_of_them_released(make_copy):
    first = RandomizedResponse(1.0, 3)
    second = make_copy(first)
    third = make_copy(second)
    for each in (first, second, third):
        each.fit_transform(Y)
    for each in (first, second, third, make_copy(third)):
        assert each.releases_ == 3 and each.epsilon_spent == 3.0 and each.ledger == each.family_ledger
        assert each.ledger.epsilon(1e-13) == pytest.approx(3.0, rel=2e-2)


def test_a_file_of_an_older_release_keeps_its_record():
    old = RandomizedResponse(1.0, 3)
    old.__setstate__({**vars(old), "_spent": ((1.0, 3),), "_releases": 1, "_family": [(1.0, 3), (1.0, 3)]})
    assert old.releases_ == 1 and old.epsilon_spent == 1.0
    copy.deepcopy(old).fit_transform(Y)
    assert old.epsilon_spent == 2.0 and old.family_ledger.epsilon(1e-13) == pytest.approx(3.0, rel=2e-2)


@pytest.mark.parametrize("make", [
    lambda: RandomizedResponse(0.1), lambda: RROnBins(1.0, 0.1, values=range(10)),
    lambda: UnbiasedRandomizer(1.0, 0.1, values=range(10)), lambda: ALIBI(1.0),
])  # fmt: skip
def test_what_releases_labels_takes_no_features_in_their_place(make):
    # A step of a pipeline is handed X, and the labels would go past it as they are.
    mechanism = make()
    pipeline = make_pipeline(mechanism, LogisticRegression())
    with pytest.raises(ValueError, match=r"releases labels.*received two arrays.*fit_transform\(y\) before"):
        pipeline.fit(np.arange(60)[:, None] % 10, np.arange(60) % 3)
    assert mechanism.releases_ == 0 and mechanism.epsilon_spent == 0


def test_a_release_that_fails_on_a_label_is_not_free():
    # The labels that came before the bad one were drawn; whoever catches the error has paid.
    mechanism = RandomizedResponse(1.0, 3).fit([0])
    with pytest.raises(ValueError):
        mechanism.transform([0, 9])
    assert mechanism.releases_ == 1


@pytest.mark.slow
def test_label_dp_and_pate_do_not_import_tensorflow():
    code = (
        "import sys, tfdpfl.pate, tfdpfl.label_dp as l; l.RandomizedResponse(1.0, 2).fit_transform([0, 1]); "
        "l.KMeansPrior; l.RROnBins; l.MultiStageTraining; dir(l); sys.exit('tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    import tfdpfl.label_dp

    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        tfdpfl.label_dp.Nothing  # noqa: B018


def test_a_transformer_survives_pickling_with_its_record():
    mechanism = RandomizedResponse(1.0, 3)
    mechanism.fit_transform(tf.constant([0, 1]))
    assert pickle.loads(pickle.dumps(mechanism)).releases_ == 1
