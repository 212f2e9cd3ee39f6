import pickle

import numpy as np
import pandas as pd
import pytest
from accounting_cases import gaussian_epsilon
from scipy import integrate, sparse
from scipy.optimize import brentq
from scipy.stats import norm
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import parametrize_with_checks

import tfdpfl
from tfdpfl.accounting import PrivacyLedger
from tfdpfl.convex import DPLogisticRegression, _Problem
from tfdpfl.noise import Source

RNG = np.random.default_rng(7)
X, Y = RNG.normal(size=(40, 500)), RNG.integers(0, 2, 40)
DELTA = 1e-5


def scaled(x, bound):
    return x * np.minimum(1, bound / np.linalg.norm(x, axis=1, keepdims=True))


def slope(x, y, w, regularization):
    """Of the sum of losses of two classes, and the regulariser."""
    return x.T @ (1 / (1 + np.exp(-x @ w)) - y) + regularization * w


def fitted(**settings):
    model = DPLogisticRegression(1.0, DELTA, data_norm=2.0, fit_intercept=False, random_state=3)
    return model.set_params(**settings).fit(X, Y)


def std(noise):
    """Of 500 normals; another one by half is 10 of its own deviations away."""
    return np.sqrt((noise**2).mean())


def draws(monkeypatch, *values):
    left = iter(values)
    monkeypatch.setattr(Source, "normals", lambda self, shape: np.full(shape, next(left)))


# -- objective perturbation --------------------------------------------------------------------------------------


def test_the_linear_term_has_the_noise_that_the_price_is_of():
    model = fitted(solver="objective")
    tilt = -slope(scaled(X, 2.0), Y, model.coef_[0], model.regularization_)
    assert std(tilt) == pytest.approx(2.0 * model.noise_multiplier_, rel=0.15)
    curvature = np.log1p(2.0**2 / 4 / model.regularization_)
    assert 0.98 <= gaussian_epsilon(model.noise_multiplier_, 0.99 * DELTA) + curvature <= 0.99


@pytest.mark.parametrize(("C", "least"), [(1.0, 0.0), (1e-3, DELTA / 2)])
def test_what_a_row_can_do_to_the_output_is_within_epsilon_and_delta(C, least):
    """The output's density on a line, by a change of variables from the linear term to the minimum."""
    model = DPLogisticRegression(
        1.0, DELTA, data_norm=2.0, C=C, fit_intercept=False, solver="objective", random_state=3
    )
    model.fit([[2.0], [-2.0]], [0, 1])
    regularization, sigma = model.regularization_, 2.0 * model.noise_multiplier_

    def tilt(w, zeros, ones):  # rows of 2, so many of either class
        return -(2 * (zeros + ones) / (1 + np.exp(-2 * w)) - 2 * ones + regularization * w)

    def density(w, zeros, ones):
        p = 1 / (1 + np.exp(-2 * w))
        hessian = 4 * (zeros + ones) * p * (1 - p) + regularization
        return norm.pdf(tilt(w, zeros, ones), scale=sigma) * hessian

    worst = 0.0
    for others in (0, 1, 30, 10**6):  # which push the weight to where the row is taken for the other class
        around = brentq(lambda w, n=others: tilt(w, n, 0), -20, 20) if others else 0.0
        w = around + np.linspace(-15, 15, 200_001) * sigma / regularization
        one, other = density(w, others, 1), density(w, others, 0)
        for p, q in ((one, other), (other, one)):
            assert integrate.trapezoid(p, w) == pytest.approx(1, abs=1e-6)
            worst = max(worst, integrate.trapezoid(np.maximum(p - np.exp(1.0) * q, 0), w))
    assert least < worst <= DELTA


def test_noise_hides_where_the_solver_stopped(monkeypatch):
    draws(monkeypatch, 0.0, 0.0, 0.0, 1.0)
    exact, moved = fitted(solver="objective"), fitted(solver="objective")
    assert np.abs(slope(scaled(X, 2.0), Y, exact.coef_[0], exact.regularization_)).max() < 2e-6
    around = (moved.coef_ - exact.coef_).mean() / (2 * 2e-6 / exact.regularization_)  # of 2 tolerances
    assert 0.009 < gaussian_epsilon(around, 0.01 * DELTA) <= 0.01


# -- gradient descent, output ------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3])
def test_one_step_is_the_noisy_gradient_of_all_rows(classes):
    y = RNG.integers(0, classes, 40)
    model = DPLogisticRegression(
        1.0, DELTA, data_norm=2.0, C=0.5, fit_intercept=False, solver="gradient", num_steps=1, random_state=3,
        classes=[0, 1, 2][:classes],
    ).fit(X, y)  # fmt: skip
    rows = scaled(X, 2.0)
    residuals = np.full([40, classes], 1 / classes) - np.eye(classes)[y]
    gradient = (residuals[:, 1:] if classes == 2 else residuals).T @ rows
    step = 1 / (40 * 2.0**2 * (0.25 if classes == 2 else 0.5) + 2)
    sensitivity = 2.0 * (1 if classes == 2 else 2**0.5)
    assert std(-model.coef_ / step - gradient) == pytest.approx(sensitivity * model.noise_multiplier_, rel=0.15)
    assert 0.995 < gaussian_epsilon(model.noise_multiplier_, DELTA) <= 1.0


def test_many_steps_are_priced_as_many_and_find_the_minimum(monkeypatch):
    once, often = fitted(solver="gradient", num_steps=1), fitted(solver="gradient", num_steps=64)
    assert often.noise_multiplier_ == pytest.approx(8 * once.noise_multiplier_, rel=2e-3)
    ledger = PrivacyLedger().add(often.dp_event_, adjacency=often.adjacency)
    assert 0.995 < ledger.epsilon(DELTA) <= 1.0
    draws(monkeypatch, *np.zeros(100))
    least = LogisticRegression(C=0.01, fit_intercept=False, tol=1e-10, max_iter=1000).fit(scaled(X, 2.0), Y)
    assert np.allclose(fitted(solver="gradient", num_steps=100, C=0.01).coef_, least.coef_, atol=1e-5)


def test_output_is_the_minimum_with_noise_for_how_far_a_row_moves_it():
    rows = scaled(X, 2.0)
    least = LogisticRegression(C=0.5, fit_intercept=False, tol=1e-10, max_iter=1000).fit(rows, Y)
    model = fitted(solver="output", C=0.5)
    assert std(model.coef_ - least.coef_) == pytest.approx(model.noise_multiplier_ * 2.0 / 2, rel=0.15)
    assert 0.995 < gaussian_epsilon(model.noise_multiplier_, DELTA) <= 1.0
    three = np.arange(40) % 3
    model = DPLogisticRegression(1e3, DELTA, data_norm=2.0, C=0.5, fit_intercept=False, solver="output", random_state=1)
    least = LogisticRegression(C=0.5, fit_intercept=False, tol=1e-10, max_iter=1000).fit(rows, three)
    model.fit(X, three)
    noise = model.coef_ - least.coef_
    assert std(noise) == pytest.approx(model.noise_multiplier_ * 2.0 * 2**0.5 / 2, rel=0.15)


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("intercept", [False, True])
def test_a_row_changes_the_gradient_by_no_more_than_is_declared(classes, intercept):
    model = DPLogisticRegression(1.0, DELTA, data_norm=3.0, fit_intercept=intercept)
    rows = model._rows(np.array([[1e200, -1e200], [3.0, 4.0], [0.1, 0.0], [0.0, 0.0], [1e-320, 0.0]]))
    lengths = np.linalg.norm(rows[:, :2], axis=1)
    assert np.allclose(lengths, [3, 3, 0.1, 0, 0]) and np.allclose(rows[1, :2], [1.8, 2.4])
    moved, curved = [], []
    for label in range(classes):
        for scale in (0.0, 1.0, -50.0, 50.0):
            of = dict(weight=np.array([1.0, 3.0]), largest_weight=3.0)
            whole = _Problem(rows[:2], np.array([0, label]), classes, model._norm, 1.0, **of)
            less = _Problem(rows[:1], np.array([0]), classes, model._norm, 1.0)
            w = scale * RNG.normal(size=whole.size)
            moved.append(np.linalg.norm(whole.gradient(w) - less.gradient(w)))
            hessian = [np.array([p._curved(w) @ v for v in np.eye(p.size)]) for p in (whole, less)]
            curved.append(np.linalg.eigvalsh(hessian[0] - hessian[1]).max())
    assert 0.9 * whole.sensitivity < max(moved) <= whole.sensitivity * (1 + 1e-9)
    assert max(curved) <= whole.curvature * (1 + 1e-9)
    assert classes > 2 or max(curved) > 0.99 * whole.curvature


# -- an estimator ------------------------------------------------------------------------------------------------


def test_the_solver_is_chosen_by_what_is_public():
    assert fitted(epsilon=200.0).solver_ == "objective" and fitted(epsilon=200.0).dp_event_ is None
    assert fitted(epsilon=100.0).solver_ == "gradient"  # 40 rows * 100 < 200 * sqrt(500)
    three = DPLogisticRegression(1.0, DELTA, classes=["a", "b", "c"]).fit(X, np.where(Y, "a", "c"))
    assert three.solver_ == "gradient" and three.coef_.shape == (3, 500) and three.predict_proba(X).shape == (40, 3)
    assert set(three.predict(X)) <= {"a", "b", "c"}


def test_a_long_row_is_predicted_as_it_was_trained_on():
    model = fitted(solver="gradient", num_steps=2)
    long, short = 50 * X, scaled(50 * X, 2.0)
    np.testing.assert_allclose(model.decision_function(long), short @ model.coef_[0], rtol=1e-12)
    assert (model.predict(long) == model.predict(short)).all()


def test_an_intercept_is_found_and_no_noise_repeats():
    x, y = RNG.normal(size=(500, 1)), np.r_[np.zeros(50), np.ones(450)]
    model = DPLogisticRegression(20.0, DELTA, data_norm=3.0).fit(x, y)
    least = LogisticRegression().fit(x, y)
    assert model.intercept_[0] == pytest.approx(least.intercept_[0], abs=0.3)
    assert (clone(model).fit(x, y).coef_ != model.coef_).all() and (fitted().coef_ == fitted().coef_).all()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"epsilon": 0}, "epsilon"), ({"epsilon": float("nan")}, "epsilon"), ({"delta": 0}, "delta"),
        ({"delta": 1.0}, "delta"), ({"data_norm": 0}, "data_norm"), ({"C": -1}, "C must"),
        ({"num_steps": 0}, "num_steps"), ({"solver": "lbfgs"}, "solver"), ({"random_state": -1}, "random_state"),
        ({"data_norm": 1e200}, "data_norm=1e.200 is not between"), ({"max_sample_weight": 0}, "max_sample_weight"),
        ({"class_weight": {2: 1.0}}, "class_weight names 2"), ({"class_weight": [1, 2]}, "class_weight is no dict"),
        ({"class_weight": {0: -1.0}}, "class_weight"), ({"random_state": 1.5}, "cannot be used to seed"),
        ({"classes": [0]}, "two classes or more"), ({"classes": [1, 2]}, "not one of classes"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(settings, said):
    model = DPLogisticRegression(1.0, DELTA).set_params(**settings)
    with pytest.raises(ValueError, match=said):
        model.fit(X, Y)
    assert not hasattr(model, "coef_")


def test_objective_perturbation_of_many_classes_is_refused():
    with pytest.raises(tfdpfl.PrivacyError, match="a proof for two classes, and there are 3"):
        DPLogisticRegression(1.0, DELTA, solver="objective").fit(X, np.arange(40) % 3)


def test_private_labels_are_not_counted_for_a_weight():
    with pytest.raises(tfdpfl.PrivacyError, match="class_weight='balanced' would count the labels"):
        DPLogisticRegression(1.0, DELTA, class_weight="balanced").fit(X, Y)


def test_a_minimum_that_is_not_found_is_refused(monkeypatch):
    monkeypatch.setattr("tfdpfl.convex.minimize", lambda *args, **kwargs: type("Found", (), {"x": np.full(500, 1e9)}))
    monkeypatch.setattr("tfdpfl.convex.cg", lambda a, b, **kwargs: (0 * b, 0))
    with pytest.raises(tfdpfl.PrivacyError, match="the minimum was not found"):
        fitted(solver="objective")


@pytest.mark.slow
@pytest.mark.both_stacks
@parametrize_with_checks([DPLogisticRegression(1e5, DELTA, data_norm=10.0, max_sample_weight=10.0, random_state=0)])
def test_scikit_learn_takes_it_for_one_of_its_own(estimator, check):
    if "equivalence" in str(check):  # a step of "gradient" is scaled by the number of rows, which repeated rows change
        estimator = clone(estimator).set_params(solver="output")
    check(estimator)


# -- weights, columns, sparse rows -------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3])
def test_a_step_is_the_weighted_gradient_with_noise_for_the_largest_weight(monkeypatch, classes):
    y, of_row, of_class = RNG.integers(0, classes, 40), RNG.uniform(0, 4, 40), np.array([0.5, 3.0, 1.0])[:classes]
    settings = dict(data_norm=2.0, fit_intercept=False, solver="gradient", num_steps=1, classes=range(classes))
    model = DPLogisticRegression(1.0, DELTA, **settings, max_sample_weight=4.0, class_weight={0: 0.5, 1: 3.0})
    rows, largest = scaled(X, 2.0), 4.0 * 3.0
    residuals = (np.full([40, classes], 1 / classes) - np.eye(classes)[y]) * (of_row * of_class[y])[:, None]
    gradient = (residuals[:, 1:] if classes == 2 else residuals).T @ rows
    step = 1 / (40 * largest * 2.0**2 * (0.25 if classes == 2 else 0.5) + 1)
    moved = model.fit(X, y, of_row).coef_ / -step - gradient
    assert std(moved) == pytest.approx(
        largest * 2.0 * (1 if classes == 2 else 2**0.5) * model.noise_multiplier_, rel=0.15
    )
    draws(monkeypatch, 0.0)
    assert np.allclose(model.fit(X, y, of_row).coef_, -step * gradient)


@pytest.mark.parametrize("solver", ["objective", "output", "gradient"])
def test_weights_up_to_a_bound_are_those_up_to_one_at_another_c(solver):
    weight = RNG.uniform(0, 1, 40)
    settings = dict(solver=solver, epsilon=20.0)
    few = fitted(**settings, max_sample_weight=5.0, C=0.1).fit(X, Y, 5 * weight)
    assert np.allclose(few.coef_, fitted(**settings, C=0.5).fit(X, Y, weight).coef_, rtol=1e-3, atol=1e-5)
    assert np.allclose(fitted(**settings, class_weight={0: 5.0, 1: 5.0}, C=0.1).coef_, fitted(**settings, C=0.5).coef_,
                       rtol=1e-3, atol=1e-5)  # fmt: skip


def test_a_weighted_minimum_is_scikit_learns(monkeypatch):
    draws(monkeypatch, 0.0)
    weight, of_class = RNG.uniform(0, 3, 40), {0: 0.2, 1: 2.0}
    settings = dict(C=0.3, fit_intercept=False, class_weight=of_class)
    model = DPLogisticRegression(1.0, DELTA, data_norm=100.0, max_sample_weight=3.0, solver="output", **settings)
    least = LogisticRegression(tol=1e-10, max_iter=1000, **settings).fit(X, Y, weight)
    assert np.allclose(model.fit(X, Y, weight).coef_, least.coef_, atol=1e-4)


@pytest.mark.parametrize(("weight", "said"), [
    (np.full(40, 1.5), "1.5, which is larger than max_sample_weight=1.*chosen without a look"),
    (np.full(40, -1.0), "a number of at least 0 for each of the 40 rows"),
    (np.ones(39), "for each of the 40 rows"), (np.full(40, np.nan), "NaN"),
    (np.ones([40, 1]), "for each of the 40 rows"), (np.zeros(40), "zero for every row"),
])  # fmt: skip
def test_weights_that_the_noise_is_not_for_are_refused(weight, said):
    with pytest.raises(ValueError, match=said):
        DPLogisticRegression(1.0, DELTA).fit(X, Y, weight)


def test_columns_in_another_order_are_refused():
    frame = pd.DataFrame(X[:, :2], columns=["age", "income"])
    model = DPLogisticRegression(10.0, DELTA).fit(frame, Y)
    assert model.feature_names_in_.tolist() == ["age", "income"]
    with pytest.raises(ValueError, match="same order"):
        model.score(frame[["income", "age"]], Y)
    with pytest.warns(UserWarning, match="feature names"):
        model.predict(frame.to_numpy())


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("solver", ["objective", "gradient"])
def test_sparse_rows_are_those_rows(solver, intercept):
    x = np.where(RNG.random(X.shape) < 0.1, 3 * X, 0.0)
    x[0] = 0.0
    settings = dict(solver=solver, fit_intercept=intercept, data_norm=2.0, random_state=1)
    dense, thin = (DPLogisticRegression(5.0, DELTA, **settings).fit(part, Y) for part in (x, sparse.csr_matrix(x)))
    assert np.allclose(dense.coef_, thin.coef_, atol=1e-6)
    assert np.allclose(dense.decision_function(x), thin.decision_function(sparse.coo_matrix(x)), atol=1e-6)


def test_logarithms_of_probabilities_are_exact():
    model = fitted(solver="gradient", num_steps=1)
    model.coef_ = model.coef_ * 1e6
    scores = model.decision_function(X)
    want = -np.logaddexp(0, np.stack([scores, -scores], 1))
    assert np.allclose(model.predict_log_proba(X), want) and np.isfinite(want).all() and want.min() < -1000
    assert np.allclose(model.predict_proba(X), np.exp(want))


@pytest.mark.parametrize("solver", ["objective", "output", "gradient"])
def test_a_huge_epsilon_overflows_nothing(solver):
    assert fitted(epsilon=1e6, solver=solver, num_steps=20).score(X, Y) > 0.5


# -- its price ---------------------------------------------------------------------------------------------------


def test_every_fit_is_paid_and_no_clone_pays_for_another():
    model = fitted(solver="gradient", num_steps=4).fit(X, Y)
    assert model.releases_ == 2 and clone(model).releases_ == 0
    assert model.price(DELTA).epsilon == pytest.approx(
        gaussian_epsilon(model.noise_multiplier_ / 8**0.5, DELTA), rel=1e-6
    )
    model.set_params(solver="objective", epsilon=0.5, delta=1e-6).fit(X, Y)
    assert model.dp_event is None and model.releases_ == 3
    twice = fitted(solver="gradient", num_steps=4).fit(X, Y)
    assert model.price(DELTA).epsilon == twice.price(DELTA - 1e-6).epsilon + 0.5
    alone = fitted(solver="objective").fit(X, Y)
    assert alone.price(2 * DELTA) == (2.0, "pld")
    with pytest.raises(tfdpfl.PrivacyError, match=r"delta=1e-05 has no price.*at delta=2e-05"):
        alone.price(DELTA)


@pytest.mark.slow
def test_adult_is_learnt_nearly_as_well_as_without_privacy():
    try:
        x, y, x_test, y_test = tfdpfl.datasets.load_adult()
    except FileNotFoundError:
        pytest.skip("no Adult data")
    plain = LogisticRegression(max_iter=500).fit(x, y).score(x_test, y_test)
    private = DPLogisticRegression(1.0, 1e-6, data_norm=3.0).fit(x, y).score(x_test, y_test)
    assert private > plain - 0.025  # six runs: 0.008 to 0.015 below


def test_a_report_has_the_fits_of_clones_as_of_a_grid_search():
    model = DPLogisticRegression(1.0, 1e-7, data_norm=3.0, solver="objective")
    search = GridSearchCV(model, {"C": [0.1, 1.0]}, cv=3).fit(X, Y)
    best = search.best_estimator_
    assert best.releases_ == 1 and best.price(1e-5).epsilon == 1.0
    for one in (best, model):  # six fits of the search, and the last one
        (promise,) = one.promises(1e-5)
        assert promise.cost(1e-5, "pld").epsilon == pytest.approx(7.0)
        assert "1 fits" not in promise.mechanisms[0] and promise.mechanisms[-1].startswith("ε includes the fits of")
    with pytest.raises(tfdpfl.PrivacyError, match="delta=6e-07 has no price"):
        promise.cost(6e-7, "pld")
    model.set_params(solver="gradient", num_steps=4).fit(X, Y)
    steps = clone(model).fit(X, Y)
    assert len(steps.dp_event.events) == 1 and steps.promises(1e-5)[0].event is None
    alone = fitted(solver="gradient", num_steps=4)
    clone(alone).fit(X, Y)
    (promise,) = pickle.loads(pickle.dumps(alone)).promises(DELTA)
    assert promise.cost(DELTA, "pld") == fitted(solver="gradient", num_steps=4).fit(X, Y).price(DELTA)
    older = fitted(solver="gradient", num_steps=4)
    del older._family  # as it was saved by an earlier release
    assert older.fit(X, Y).promises(DELTA)[0].cost(DELTA, "pld") == older.price(DELTA)


def test_a_statement_tells_what_each_fit_cost_whatever_was_set_since():
    random = np.random.default_rng(0)
    x = random.normal(size=(100, 2))
    model = DPLogisticRegression(5.0, 1e-6, data_norm=3.0, solver="gradient", random_state=1).fit(x, x[:, 0] > 0)
    model.set_params(epsilon=0.1, random_state=None, solver="output").fit(x, x[:, 0] > 0)
    model.set_params(epsilon=0.01, delta=1e-9)
    (promise,) = model.promises(1e-5)
    assert promise.mechanisms == [
        "gradient, epsilon 5 at delta 1e-06 a fit, 1 fit", "output, epsilon 0.1 at delta 1e-06 a fit, 1 fit",
    ]  # fmt: skip
    assert any("random_state" in warning for warning in promise.warnings)
