"""Logistic regression with differential privacy, as a scikit-learn estimator.

The loss is convex, so better and simpler mechanisms than DP-SGD are known.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from scipy import sparse
from scipy.optimize import minimize
from scipy.sparse.linalg import LinearOperator, cg
from scipy.special import log_softmax, softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_array, check_random_state
from sklearn.utils.extmath import row_norms
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from tfdpfl import _replay_hook
from tfdpfl._lazy import dp_event
from tfdpfl._types import Arrays, DpEvent, Estimator
from tfdpfl.accounting import _checks
from tfdpfl.accounting.calibration import gaussian_noise_multiplier
from tfdpfl.accounting.pricing import Price, check_accountant, check_delta, price
from tfdpfl.accounting.promises import PLANNED, Promise, of_seed
from tfdpfl.errors import PrivacyError

__all__ = ["SOLVERS", "DPLogisticRegression"]

SOLVERS = ("auto", "objective", "gradient", "output")
_TOLERANCE = 1e-6  # of the objective's gradient at what a solver returns, in units of one row's largest gradient
_OF_TOLERANCE = 0.01  # the part of (ε, δ) that hides where the solver stopped
_OF_CURVATURE = 0.25  # the largest part of ε that a row's curvature may cost
_NORMS = (1e-100, 1e100)  # of a row, so that its square is a float
_SIGNAL = 200  # rows * ε / sqrt(features) below which noisy steps that stop early do better; docs/convex.md


_COVERED = (
    "Covered: the weights, and what is computed from them.",
    "Not covered: the number of rows, the classes, scores on private rows (as in a grid search), fits of clones in "
    "other processes (n_jobs), and statistics that the features were scaled by.",
)


_Spent: TypeAlias = tuple[DpEvent | None, float, float]  # of a fit: its event, if it has one, and its (ε, δ)
_Ran: TypeAlias = tuple[str, float, float, bool]  # its solver, ε and δ, and whether its noise came from a seed


def _event_of(events: Sequence[DpEvent | None]) -> DpEvent | None:
    """Fits as one event; None if one has none, or there is no fit."""
    return None if not events or None in events else dp_event.ComposedDpEvent([*events])


class DPLogisticRegression(ClassifierMixin, BaseEstimator):
    """Fits a logistic regression whose weights are (ε, δ)-differentially private.

        model = DPLogisticRegression(epsilon=1.0, delta=1e-6, data_norm=10.0).fit(x, y)

    The objective is ``C * sum_i loss_i + ||w||^2 / 2``, as in scikit-learn. Rows longer than ``data_norm`` are scaled
    down to it, in `predict` too. The intercept is the weight of one more feature, whose value is ``data_norm``, and it
    is regularized.

    Two data sets are neighbours (`adjacency`, "zero_out") if the loss of one row is zero in one of them. So the number
    of rows is public. Each call of ``fit`` costs (ε, δ) again, and so does each fit of a grid search. `price` adds up
    the fits of this object. `tfdpfl.reports.report` accepts the object as a part, and adds up those of its clones in
    this process too: search with ``n_jobs=None``.

    The weight of a row is `sample_weight` times `class_weight`, and multiplies its loss. The noise is for the largest
    possible weight, so weights above 1 do not make a row count more against the noise.

    Args:
      epsilon, delta: the whole cost of one `fit`.
      data_norm: the largest L2 norm of a row. Choose it without looking at the data.
      C: the inverse strength of regularization. `solver="objective"` uses a smaller C if the curvature of a row would
        cost more than a quarter of ε (see `regularization_`).
      fit_intercept: whether the model has an intercept.
      solver: "objective" adds a random linear term to what is minimised (objective perturbation: Kifer et al. 2012;
        approximate minima: Iyengar et al. 2019); two classes. "gradient" takes ``num_steps`` noisy steps of gradient
        descent on all rows. "output" adds noise to the minimum (Chaudhuri et al. 2011, and what "bolt-on" does).
        "auto" uses "objective" for two classes if rows * ε >= 200 sqrt(features), and "gradient" otherwise.
      num_steps: the number of steps of "gradient".
      classes: all possible classes, if the classes that occur are private. None uses the classes that occur.
      class_weight: {class: weight}. Choose it without looking at the data. A class that is left out has the weight 1.
      max_sample_weight: the largest `sample_weight` that a row may have. Choose it without looking at the data.
      random_state: for tests only, because anyone who knows it can subtract the noise. None uses the entropy of the
        operating system.

    Attributes:
      coef_, intercept_, classes_, n_features_in_, feature_names_in_: as in scikit-learn, and private, given public
        classes.
      solver_: the solver that ran.
      regularization_: the factor of ``||w||^2 / 2`` next to ``sum_i loss_i``; at least 1 / C.
      noise_multiplier_: the standard deviation of the noise, divided by the sensitivity.
      dp_event_: the event of the fit, for `PrivacyLedger.add(dp_event_, adjacency="zero_out")`. It is None for
        "objective", because only its (ε, δ) is known.

    Raises:
      ValueError: an argument is out of its range, a weight is above `max_sample_weight`, or scikit-learn refuses the
        data, for example because `predict` gets other columns than `fit`.
      PrivacyError: the solver is "objective" and there are more than two classes; ``class_weight="balanced"``, which
        counts private labels; or the minimum was not found well enough. No weights are kept.
    """

    adjacency = "zero_out"

    def __init__(
        self, epsilon: float, delta: float, *, data_norm: float = 1.0, C: float = 1.0, fit_intercept: bool = True,
        solver: str = "auto", num_steps: int = 100, classes: Arrays = None, class_weight: Arrays = None,
        max_sample_weight: float = 1.0, random_state: Arrays = None,
    ):  # fmt: skip
        self.epsilon = epsilon
        self.delta = delta
        self.data_norm = data_norm
        self.C = C
        self.fit_intercept = fit_intercept
        self.solver = solver
        self.num_steps = num_steps
        self.classes = classes
        self.class_weight = class_weight
        self.max_sample_weight = max_sample_weight
        self.random_state = random_state

    def fit(self, X: Arrays, y: Arrays, sample_weight: Arrays = None) -> DPLogisticRegression:
        """Fits the weights, and releases them once.

        Args:
          X: features [rows, features], dense or sparse.
          y: labels [rows].
          sample_weight: [rows], from 0 to `max_sample_weight`. None gives each row the weight 1.
        """
        solver = self._check()
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64)
        check_classification_targets(y)
        classes = np.unique(y if self.classes is None else self.classes)
        if len(classes) < 2:
            raise ValueError(f"logistic regression needs two classes or more, got one class, {classes.tolist()}")
        if not np.isin(y, classes).all():
            raise ValueError("y has a label that is not one of classes: name all of them, or leave classes out")
        if solver == "auto":
            much = X.shape[0] * self.epsilon >= _SIGNAL * math.sqrt(X.shape[1])
            solver = "objective" if len(classes) == 2 and much else "gradient"
        if solver == "objective" and len(classes) > 2:
            raise PrivacyError(
                f"solver='objective' has a proof for two classes, and there are {len(classes)}: take 'gradient' or "
                "'output'"
            )
        y = np.searchsorted(classes, y)
        weight, largest = self._weights(sample_weight, y, classes)
        problem = _Problem(
            self._rows(X), y, len(classes), self._norm, 1 / self.C, self._seed(), weight=weight, largest_weight=largest
        )
        weights, self.noise_multiplier_, self.dp_event_ = getattr(self, f"_{solver}")(problem)
        family = self._relatives()
        self._spent = (*self.__dict__.get("_spent", ()), (self.dp_event_, float(self.epsilon), float(self.delta)))
        seeded = self.random_state is not None  # arguments may be set anew after a fit, and what ran stays
        self._ran = (*self.__dict__.get("_ran", ()), (solver, float(self.epsilon), float(self.delta), seeded))
        family.append((self._spent[-1], self._ran[-1]))
        weights = weights.reshape(problem.shape)
        self.coef_ = weights[:, : X.shape[1]]
        self.intercept_ = weights[:, -1] * self.data_norm if self.fit_intercept else np.zeros(len(weights))
        self.classes_, self.solver_, self.regularization_ = classes, solver, problem.regularization
        return self

    @property
    def releases_(self) -> int:
        """How many times this object was fitted; each fit costs, and a clone begins at 0."""
        return len(self.__dict__.get("_spent", ()))

    @property
    def dp_event(self) -> DpEvent | None:
        """All fits as one dp-accounting event under `adjacency`; None if one used "objective", or none has run."""
        return _event_of([event for event, _, _ in self.__dict__.get("_spent", ())])

    def promises(self, delta: float) -> list[Promise]:
        """Returns what is guaranteed; see `tfdpfl.accounting.promises`."""
        family = self._relatives()
        spent, ran = [cost for cost, _ in family], [how for _, how in family]
        event = _event_of([event for event, _, _ in spent])
        planned = (getattr(self, "solver_", self.solver), float(self.epsilon), float(self.delta))
        is_known = any(seeded for *_, seeded in ran) or self.random_state is not None
        warnings = [*([] if ran else [PLANNED]), *of_seed(is_known, "random_state")]
        fits = Counter(how[:3] for how in ran) or {planned: 0}
        texts = [
            f"{how}, epsilon {e:g} at delta {d:g} a fit, {n} fit{'s' * (n != 1)}" for (how, e, d), n in fits.items()
        ]
        if len(family) > self.releases_:
            texts.append("ε includes the fits of clones, as those of a grid search")
        return [Promise(
            kind="logistic regression", adjacency=self.adjacency, unit="example", event=event,
            price=functools.partial(self._priced, spent) if event is None else None,
            mechanisms=texts, notes=_COVERED, warnings=warnings,
        )]  # fmt: skip

    def price(self, delta: float, accountant: str = "pld") -> Price:
        """Returns the ε at `delta` of all fits of this object; before the first one, of that one.

        Args:
          delta: δ. At least the sum of the δ of the fits that used "objective", which are known at their own δ alone.
          accountant: "pld" or "rdp", for the other fits.

        Raises:
          PrivacyError: `delta` is smaller than that sum.
        """
        return self._priced(self.__dict__.get("_spent", ()), delta, accountant)

    def _priced(self, spent: Sequence[_Spent], delta: float, accountant: str = "pld") -> Price:
        delta, accountant = check_delta(delta), check_accountant(accountant)
        spent = spent or [(None, float(self.epsilon), float(self.delta))]
        alone = [(epsilon, least) for event, epsilon, least in spent if event is None]
        events = [event for event, _, _ in spent if event is not None]
        epsilon, least = (math.fsum(part) for part in zip(*alone, strict=True)) if alone else (0.0, 0.0)
        if delta < least or (events and delta == least):
            raise PrivacyError(
                f"delta={delta:g} has no price: fits that used solver='objective' are known at delta={least:g} in all, "
                "and at no smaller delta. Give a larger delta."
            )
        if not events:
            return Price(epsilon, accountant)
        rest = price(dp_event.ComposedDpEvent(events), delta - least, accountant, self.adjacency)
        return Price(epsilon + rest.epsilon, rest.accountant)

    def decision_function(self, X: Arrays) -> np.ndarray:
        """Scores: [rows] of the second of two classes, [rows, classes] of more. Rows are scaled down as in training."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, accept_sparse="csr", dtype=np.float64)
        scores = self._within(X) @ self.coef_.T + self.intercept_
        return scores[:, 0] if len(self.classes_) == 2 else scores

    def predict(self, X: Arrays) -> np.ndarray:
        """The likeliest class of each row."""
        scores = self.decision_function(X)
        return self.classes_[(scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(1)]

    def predict_proba(self, X: Arrays) -> np.ndarray:
        """Probabilities [rows, classes]."""
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: Arrays) -> np.ndarray:
        """Logarithms of probabilities [rows, classes], exact where a probability rounds to 0."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            scores = np.stack([np.zeros_like(scores), scores], 1)
        return log_softmax(scores, 1)

    def __sklearn_tags__(self) -> Estimator:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.non_deterministic = self.random_state is None
        return tags

    def _relatives(self) -> list[tuple[_Spent, _Ran]]:
        """What the fits of this object and of all its clones cost: one list that clones share."""
        spent = self.__dict__.get("_spent", ())
        how = (getattr(self, "solver_", self.solver), float(self.epsilon), float(self.delta))
        ran = self.__dict__.get("_ran", ((*how, self.random_state is not None),) * len(spent))
        return self.__dict__.setdefault("_family", [*zip(spent, ran, strict=True)])

    def __sklearn_clone__(self) -> Estimator:
        twin = super().__sklearn_clone__()
        twin._family = self._relatives()
        return twin

    # -- the mechanisms: (weights, noise multiplier, event) ----------------------------------------------------

    def _objective(self, problem: _Problem):
        (epsilon, delta), rest = self._without_tolerance()
        # Of two neighbours' Hessians at one point the determinants' ratio is 1 + x' H^-1 x p (1 - p).
        least = problem.curvature / math.expm1(min(_OF_CURVATURE * epsilon, 700.0))
        problem.regularization = max(problem.regularization, least)
        z = gaussian_noise_multiplier(epsilon - math.log1p(problem.curvature / problem.regularization), delta)
        tilt = z * problem.sensitivity * problem.normals()
        minimum = problem.minimum(tilt)
        around = 2 * problem.tolerance / problem.regularization * gaussian_noise_multiplier(*rest)
        return minimum + around * problem.normals(), z, None

    def _output(self, problem: _Problem):
        z = gaussian_noise_multiplier(self.epsilon, self.delta)
        sensitivity = (problem.sensitivity + 2 * problem.tolerance) / problem.regularization
        return problem.noised(problem.minimum(0.0), z, sensitivity), z, dp_event.GaussianDpEvent(z)

    def _gradient(self, problem: _Problem):
        z = gaussian_noise_multiplier(self.epsilon, self.delta, self.num_steps)
        step = 1 / (problem.curvature * problem.x.shape[0] + problem.regularization)
        w = np.zeros(problem.size)
        for _ in range(self.num_steps):
            w = w - step * problem.noised(problem.gradient(w), z, problem.sensitivity)
        return w, z, dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(z), self.num_steps)

    # -- parts -------------------------------------------------------------------------------------------------

    def _check(self) -> str:
        _checks.real("epsilon", self.epsilon, "give the ε that one fit may cost", above=0)
        check_delta(self.delta)
        _checks.real("data_norm", self.data_norm, "give the largest norm of a row", above=0)
        if not _NORMS[0] <= self.data_norm <= _NORMS[1]:
            raise ValueError(
                f"data_norm={self.data_norm:g} is not between {_NORMS[0]:g} and {_NORMS[1]:g}. The square of a row's "
                "norm, which the noise follows, would be no float. Scale the features, and data_norm with them."
            )
        _checks.real("max_sample_weight", self.max_sample_weight, "give the largest weight of a row", above=0)
        _checks.real("C", self.C, "1.0 is usual; smaller is stronger", above=0)
        _checks.whole("num_steps", self.num_steps, 1, "100 is usual")
        return _checks.choice("solver", self.solver, SOLVERS)

    def _seed(self) -> int | None:
        if self.random_state is None or isinstance(self.random_state, int | np.integer):
            remedy = "None takes the operating system's entropy; a number is for tests"
            return None if self.random_state is None else _checks.whole("random_state", self.random_state, 0, remedy)
        return int(check_random_state(self.random_state).randint(2**31))

    def _weights(self, sample_weight: Arrays, y: np.ndarray, classes: np.ndarray) -> tuple[np.ndarray, float]:
        """(the weight of each row, the largest weight that any row may have, whatever the data)."""
        of_class = self._class_weights(classes)
        largest = float(self.max_sample_weight * of_class.max())
        if sample_weight is None:
            return min(1.0, self.max_sample_weight) * of_class[y], largest
        of_row = check_array(
            sample_weight, ensure_2d=False, dtype=np.float64, input_name="sample_weight", ensure_min_samples=0
        )
        if of_row.shape != y.shape or not (of_row >= 0).all():
            raise ValueError(
                f"sample_weight must be a number of at least 0 for each of the {len(y)} rows, got the shape "
                f"{list(of_row.shape)}: give one weight a row"
            )
        if not of_row.any():
            raise ValueError(
                "sample_weight is zero for every row, so there is nothing to learn: give some rows a weight"
            )
        if of_row.max() > self.max_sample_weight:
            raise ValueError(
                f"sample_weight has {of_row.max():g}, which is larger than max_sample_weight="
                f"{self.max_sample_weight:g}. The noise is for rows of at most that weight. Set max_sample_weight to "
                "the largest weight that a row can have, chosen without a look at the data."
            )
        return of_row * of_class[y], largest

    def _class_weights(self, classes: np.ndarray) -> np.ndarray:
        if self.class_weight is None:
            return np.ones(len(classes))
        if isinstance(self.class_weight, str):
            raise PrivacyError(
                f"class_weight={self.class_weight!r} would count the labels, which are private, without noise. Give a "
                "dict {class: weight} of weights that are public, for instance from an earlier, noisy count."
            )
        if not isinstance(self.class_weight, Mapping) or (strange := set(self.class_weight) - set(classes.tolist())):
            what = "is no dict" if not isinstance(self.class_weight, Mapping) else f"names {strange.pop()!r}"
            raise ValueError(f"class_weight {what}: give {{class: weight}} for some of {classes.tolist()}")
        return np.array([
            _checks.real(f"class_weight[{name!r}]", self.class_weight.get(name, 1.0), "weights are above 0", above=0)
            for name in classes.tolist()
        ])  # fmt: skip

    @property
    def _norm(self) -> float:
        """The largest norm of a row with its constant feature."""
        return self.data_norm * (math.sqrt(2) if self.fit_intercept else 1.0)

    def _rows(self, X: Arrays) -> Arrays:
        """X, no row longer than `data_norm`, with the constant feature."""
        X = self._within(X)
        if not self.fit_intercept:
            return X
        constant = np.full([X.shape[0], 1], float(self.data_norm))
        return sparse.hstack([X, constant], format="csr") if sparse.issparse(X) else np.hstack([X, constant])

    def _within(self, X: Arrays) -> Arrays:
        longest = abs(X).max(axis=1)
        longest = longest.toarray().ravel() if sparse.issparse(X) else longest
        longest = np.maximum(longest, np.finfo(float).tiny)  # squares may overflow
        norms = longest * row_norms(_scale_rows(X, 1 / longest))
        return _scale_rows(X, np.minimum(1.0, self.data_norm / np.maximum(norms, self.data_norm * 1e-9)))

    def _without_tolerance(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """(ε, δ) for the mechanism, and for hiding where the solver stopped."""
        rest = self.epsilon * _OF_TOLERANCE, self.delta * _OF_TOLERANCE
        return (self.epsilon - rest[0], self.delta - rest[1]), rest


def _scale_rows(X: Arrays, factors: np.ndarray) -> Arrays:
    return sparse.csr_array(sparse.diags(factors) @ X) if sparse.issparse(X) else X * factors[:, None]


class _Problem:
    """``sum_i weight_i loss_i(w) + regularization ||w||^2 / 2`` on rows of norm at most ``norm``; one vector w for two
    classes, one for each of more, flat.

    Attributes:
      sensitivity: the largest norm of one row's gradient.
      curvature: the largest eigenvalue of one row's Hessian.
      tolerance: the largest norm of the gradient at what `minimum` returns.
    """

    def __init__(
        self, x: Arrays, y: np.ndarray, classes: int, norm: float, regularization: float, seed: int | None = None, *,
        weight: np.ndarray | None = None, largest_weight: float = 1.0,
    ):  # fmt: skip
        from tfdpfl.noise import Source

        self.x, self.y = x, y
        self.weight = np.ones(len(y)) if weight is None else weight
        self.shape = (1 if classes == 2 else classes, x.shape[1])
        self.size = self.shape[0] * self.shape[1]
        self.regularization = regularization
        # (p - e_y) x': |p - 1| <= 1 for two classes, ||p - e_y|| <= sqrt(2) for more; p (1 - p) <= 1/4, and the largest
        # eigenvalue of diag p - p p' is at most 1/2.
        self.sensitivity = largest_weight * norm * (1.0 if classes == 2 else math.sqrt(2))
        self.curvature = largest_weight * norm**2 * (0.25 if classes == 2 else 0.5)
        self.tolerance = _TOLERANCE * self.sensitivity
        self._source = Source(seed)

    def normals(self) -> np.ndarray:
        return self._source.normals([self.size])

    def noised(self, value: np.ndarray, z: float, sensitivity: float) -> np.ndarray:
        noise = z * sensitivity * self.normals()
        return _replay_hook.released([value], [value + noise], [noise], [z * sensitivity], 1 / z)[0]

    def _scores(self, w: np.ndarray) -> np.ndarray:
        scores = self.x @ w.reshape(self.shape).T
        return np.hstack([np.zeros_like(scores), scores]) if self.shape[0] == 1 else scores

    def _flat(self, residuals: np.ndarray) -> np.ndarray:
        """sum_i weight_i residual_i x_i'."""
        weighted = self.weight[:, None] * (residuals[:, 1:] if self.shape[0] == 1 else residuals)
        return np.asarray(weighted.T @ self.x).ravel()

    def value(self, w: np.ndarray) -> float:
        losses = -log_softmax(self._scores(w), 1)[np.arange(len(self.y)), self.y]
        return float(self.weight @ losses + self.regularization * (w @ w) / 2)

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

    def minimum(self, tilt: Arrays) -> np.ndarray:
        """Returns a point where ``value(w) + tilt w`` has a gradient of at most `tolerance`, half of which is left to
        rounding."""
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
            "the minimum was not found as exactly as its ε requires: use a smaller C, data of a smaller data_norm, or "
            "solver='gradient'"
        )
