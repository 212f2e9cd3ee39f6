"""Logistic regression with differential privacy, as a scikit-learn estimator: where the loss is convex, better and
simpler mechanisms than DP-SGD are known."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.optimize import minimize
from scipy.sparse.linalg import LinearOperator, cg
from scipy.special import log_softmax, softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_array, check_X_y
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from tfdpfl import _tap
from tfdpfl.accounting import _checks
from tfdpfl.accounting.calibration import smallest_noise_multiplier
from tfdpfl.accounting.pricing import check_delta, price
from tfdpfl.errors import PrivacyError

if TYPE_CHECKING:
    from dp_accounting import DpEvent

SOLVERS = ("auto", "objective", "gradient", "output")
_TOLERANCE = 1e-6  # of the objective's gradient at what a solver returns, in units of one row's largest gradient
_OF_TOLERANCE = 0.01  # the part of (ε, δ) that hides where the solver stopped
_OF_CURVATURE = 0.25  # the largest part of ε that a row's curvature may cost
_SIGNAL = 200  # rows * ε / sqrt(features) below which noisy steps that stop early do better; docs/convex.md


class DPLogisticRegression(ClassifierMixin, BaseEstimator):
    """Logistic regression whose weights are (ε, δ)-differentially private.

        model = DPLogisticRegression(epsilon=1.0, delta=1e-6, data_norm=10.0).fit(x, y)

    What is minimised is ``C * sum_i loss_i + ||w||^2 / 2``, as in scikit-learn. Rows longer than ``data_norm`` are
    scaled down to it, in `predict` too. An intercept is the weight of one more feature, which is ``data_norm``, and is
    regularised.

    Neighbours (`adjacency`, "zero_out") are data sets of which one has one row's loss blanked; the number of rows is
    public. ``fit`` releases once: each call costs (ε, δ) anew, and so does each fit of a grid search.

    Args:
      epsilon, delta: what one `fit` may cost, in all.
      data_norm: the largest L2 norm of a row, chosen without a look at the data.
      C: the inverse strength of regularisation. `solver="objective"` takes a smaller one where a row's curvature would
        cost more than a quarter of ε (`regularization_` tells).
      fit_intercept: whether there is one.
      solver: "objective" adds a random linear term to what is minimised (objective perturbation: Kifer et al. 2012;
        approximate minima: Iyengar et al. 2019); two classes. "gradient" takes ``num_steps`` noisy steps of gradient
        descent on all rows. "output" adds noise to the minimum (Chaudhuri et al. 2011, and what "bolt-on" does).
        "auto" takes "objective" for two classes, but where rows * ε < 200 sqrt(features), and "gradient" else.
      num_steps: the steps of "gradient".
      classes: the classes, where the labels that occur are themselves private; None takes those that occur.
      seed: for tests alone; None takes the operating system's entropy.

    Attributes:
      coef_, intercept_, classes_, n_features_in_: as in scikit-learn, and private, given public classes.
      solver_: the solver that ran.
      regularization_: the factor of ``||w||^2 / 2`` beside ``sum_i loss_i``; 1 / C or more.
      noise_multiplier_: the noise's standard deviation over the sensitivity.
      dp_event_: what ran, for `PrivacyLedger.add(dp_event_, adjacency="zero_out")`; None for "objective", of which
        (ε, δ) is all that is known.

    Raises:
      ValueError: an argument out of its range, or data that scikit-learn would refuse.
      PrivacyError: "objective" for more than two classes; a minimum that was not found well enough. Nothing is kept.
    """

    adjacency = "zero_out"

    def __init__(
        self, epsilon: float, delta: float, *, data_norm: float = 1.0, C: float = 1.0, fit_intercept: bool = True,
        solver: str = "auto", num_steps: int = 100, classes: Any = None, seed: int | None = None,
    ):  # fmt: skip
        self.epsilon = epsilon
        self.delta = delta
        self.data_norm = data_norm
        self.C = C
        self.fit_intercept = fit_intercept
        self.solver = solver
        self.num_steps = num_steps
        self.classes = classes
        self.seed = seed

    def fit(self, X: Any, y: Any) -> DPLogisticRegression:
        """Releases weights for ``X`` [rows, features] and labels ``y`` [rows]."""
        solver = self._check()
        X, y = check_X_y(X, y, dtype=np.float64, estimator=self)
        check_classification_targets(y)
        classes = np.unique(y if self.classes is None else self.classes)
        if len(classes) < 2:
            raise ValueError(f"logistic regression needs two classes or more, got one class, {classes.tolist()}")
        if not np.isin(y, classes).all():
            raise ValueError("y has a label that is not one of classes: name all of them, or leave classes out")
        if solver == "auto":
            much = len(X) * self.epsilon >= _SIGNAL * math.sqrt(X.shape[1])
            solver = "objective" if len(classes) == 2 and much else "gradient"
        if solver == "objective" and len(classes) > 2:
            raise PrivacyError(
                f"solver='objective' has a proof for two classes, and there are {len(classes)}: take 'gradient' or "
                "'output'"
            )
        y = np.searchsorted(classes, y)
        problem = _Problem(self._rows(X), y, len(classes), self._norm, 1 / self.C, self.seed)
        weights, self.noise_multiplier_, self.dp_event_ = getattr(self, f"_{solver}")(problem)
        weights = weights.reshape(problem.shape)
        self.coef_ = weights[:, : X.shape[1]]
        self.intercept_ = weights[:, -1] * self.data_norm if self.fit_intercept else np.zeros(len(weights))
        self.classes_, self.n_features_in_ = classes, X.shape[1]
        self.solver_, self.regularization_ = solver, problem.regularization
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Scores: [rows] of the second of two classes, [rows, classes] of more. Rows are scaled down as in training."""
        check_is_fitted(self)
        X = check_array(X, dtype=np.float64, estimator=self)
        if X.shape[1] != self.n_features_in_:
            raise ValueError(
                f"X has {X.shape[1]} features, but {type(self).__name__} is expecting {self.n_features_in_} features "
                "as input"
            )
        scores = self._within(X) @ self.coef_.T + self.intercept_
        return scores[:, 0] if len(self.classes_) == 2 else scores

    def predict(self, X: Any) -> np.ndarray:
        """The likeliest class of each row."""
        scores = self.decision_function(X)
        return self.classes_[(scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(1)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities [rows, classes]."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            scores = np.stack([np.zeros_like(scores), scores], 1)
        return softmax(scores, 1)

    # -- the mechanisms: (weights, noise multiplier, event) ----------------------------------------------------

    def _objective(self, problem: _Problem):
        (epsilon, delta), rest = self._without_tolerance()
        # Of two neighbours' Hessians at one point the determinants' ratio is 1 + x' H^-1 x p (1 - p).
        least = problem.curvature / math.expm1(_OF_CURVATURE * epsilon)
        problem.regularization = max(problem.regularization, least)
        z = _multiplier(epsilon - math.log1p(problem.curvature / problem.regularization), delta)
        tilt = z * problem.sensitivity * problem.normals()
        minimum = problem.minimum(tilt)
        around = 2 * problem.tolerance / problem.regularization * _multiplier(*rest)
        return minimum + around * problem.normals(), z, None

    def _output(self, problem: _Problem):
        from dp_accounting import dp_event

        z = _multiplier(self.epsilon, self.delta)
        sensitivity = (problem.sensitivity + 2 * problem.tolerance) / problem.regularization
        return problem.noised(problem.minimum(0.0), z, sensitivity), z, dp_event.GaussianDpEvent(z)

    def _gradient(self, problem: _Problem):
        from dp_accounting import dp_event

        z = _multiplier(self.epsilon, self.delta, self.num_steps)
        step = 1 / (problem.curvature * len(problem.x) + problem.regularization)
        w = np.zeros(problem.size)
        for _ in range(self.num_steps):
            w = w - step * problem.noised(problem.gradient(w), z, problem.sensitivity)
        return w, z, dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(z), self.num_steps)

    # -- parts -------------------------------------------------------------------------------------------------

    def _check(self) -> str:
        _checks.real("epsilon", self.epsilon, "give the ε that one fit may cost", above=0)
        check_delta(self.delta)
        _checks.real("data_norm", self.data_norm, "give the largest norm of a row", above=0)
        _checks.real("C", self.C, "1.0 is usual; smaller is stronger", above=0)
        _checks.whole("num_steps", self.num_steps, 1, "100 is usual")
        if self.seed is not None:
            _checks.whole("seed", self.seed, 0, "None takes the operating system's entropy; a seed is for tests")
        return _checks.choice("solver", self.solver, SOLVERS)

    @property
    def _norm(self) -> float:
        """The largest norm of a row with its constant feature."""
        return self.data_norm * (math.sqrt(2) if self.fit_intercept else 1.0)

    def _rows(self, X: np.ndarray) -> np.ndarray:
        """X, no row longer than `data_norm`, with the constant feature."""
        X = self._within(X)
        return np.hstack([X, np.full([len(X), 1], float(self.data_norm))]) if self.fit_intercept else X

    def _within(self, X: np.ndarray) -> np.ndarray:
        longest = np.maximum(np.abs(X).max(1, keepdims=True), np.finfo(float).tiny)  # squares may overflow
        norms = longest * np.linalg.norm(X / longest, axis=1, keepdims=True)
        return X * np.minimum(1.0, self.data_norm / np.maximum(norms, self.data_norm * 1e-9))

    def _without_tolerance(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """(ε, δ) for the mechanism, and for hiding where the solver stopped."""
        rest = self.epsilon * _OF_TOLERANCE, self.delta * _OF_TOLERANCE
        return (self.epsilon - rest[0], self.delta - rest[1]), rest


class _Problem:
    """``sum_i loss_i(w) + regularization ||w||^2 / 2`` on rows of norm at most ``norm``; a weight vector for two
    classes, one for each of more, flat.

    Attributes:
      sensitivity: the largest norm of one row's gradient.
      curvature: the largest eigenvalue of one row's Hessian.
      tolerance: the largest norm of the gradient at what `minimum` returns.
    """

    def __init__(self, x: np.ndarray, y: np.ndarray, classes: int, norm: float, regularization: float, seed=None):
        from tfdpfl.noise import Source

        self.x, self.y = x, y
        self.shape = (1 if classes == 2 else classes, x.shape[1])
        self.size = self.shape[0] * self.shape[1]
        self.regularization = regularization
        # (p - e_y) x': |p - 1| <= 1 for two classes, ||p - e_y|| <= sqrt(2) for more; p (1 - p) <= 1/4, and the largest
        # eigenvalue of diag p - p p' is at most 1/2.
        self.sensitivity = norm * (1.0 if classes == 2 else math.sqrt(2))
        self.curvature = norm**2 * (0.25 if classes == 2 else 0.5)
        self.tolerance = _TOLERANCE * self.sensitivity
        self._source = Source(seed)

    def normals(self) -> np.ndarray:
        return self._source.normals([self.size])

    def noised(self, value: np.ndarray, z: float, sensitivity: float) -> np.ndarray:
        noise = z * sensitivity * self.normals()
        return _tap.released([value], [value + noise], [noise], [z * sensitivity], 1 / z)[0]

    def _scores(self, w: np.ndarray) -> np.ndarray:
        scores = self.x @ w.reshape(self.shape).T
        return np.hstack([np.zeros_like(scores), scores]) if self.shape[0] == 1 else scores

    def _flat(self, residuals: np.ndarray) -> np.ndarray:
        """sum_i residual_i x_i'."""
        return ((residuals[:, 1:] if self.shape[0] == 1 else residuals).T @ self.x).ravel()

    def value(self, w: np.ndarray) -> float:
        losses = -log_softmax(self._scores(w), 1)[np.arange(len(self.y)), self.y]
        return float(losses.sum() + self.regularization * (w @ w) / 2)

    def gradient(self, w: np.ndarray) -> np.ndarray:
        residuals = softmax(self._scores(w), 1)
        residuals[np.arange(len(self.y)), self.y] -= 1
        return self._flat(residuals) + self.regularization * w

    def _curved(self, w: np.ndarray) -> LinearOperator:
        p = softmax(self._scores(w), 1)

        def times(v):
            s = p * self._scores(v)
            return self._flat(s - p * s.sum(1, keepdims=True)) + self.regularization * v

        return LinearOperator((self.size, self.size), matvec=times, dtype=float)

    def minimum(self, tilt: Any) -> np.ndarray:
        """Where ``value(w) + tilt w`` has a gradient of at most `tolerance`, half of which is left to rounding."""
        tilt = np.broadcast_to(tilt, [self.size])
        found = minimize(
            lambda w: (self.value(w) + tilt @ w, self.gradient(w) + tilt), np.zeros(self.size), jac=True,
            method="L-BFGS-B", options={"maxiter": 10_000, "maxfun": 20_000},
        ).x  # fmt: skip
        for _ in range(50):  # what the value's digits do not show any more
            slope = self.gradient(found) + tilt
            if np.linalg.norm(slope) <= self.tolerance / 2:
                return found
            found = found - cg(self._curved(found), slope, atol=0.0, maxiter=10 * self.size)[0]
        raise PrivacyError(
            "the minimum was not found as well as its price demands: take a smaller C, data of a smaller data_norm, or "
            "solver='gradient'"
        )


def _multiplier(epsilon: float, delta: float, times: int = 1) -> float:
    """The smallest noise multiplier of a Gaussian that is (ε, δ) when used so often."""
    from dp_accounting import dp_event

    def spent(z: float) -> float:
        event: DpEvent = dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(z), times)
        return price(event, delta, "pld", DPLogisticRegression.adjacency).epsilon

    return smallest_noise_multiplier(spent, epsilon)
