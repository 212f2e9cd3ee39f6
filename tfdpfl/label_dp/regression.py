"""Label DP for regression: labels are numbers, and so are the released ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
from scipy import optimize, sparse
from sklearn.utils.validation import check_is_fitted

from tfdpfl import _replay_hook
from tfdpfl._types import Arrays, Estimator, Prior
from tfdpfl.accounting import _checks
from tfdpfl.errors import PrivacyError
from tfdpfl.label_dp import _labels, _top_k
from tfdpfl.label_dp._base import LabelTransformer, Uniforms, in_chunks, noisy_counts
from tfdpfl.label_dp._datasets import with_labels
from tfdpfl.label_dp.priors import check_probabilities

__all__ = ["RROnBins", "UnbiasedRandomizer"]

_LOSSES = ("squared", "absolute", "poisson")


class _RegressionMechanism(LabelTransformer):
    """A grid of values, how likely each is, and a mechanism made for them."""

    _largest_grid = 256

    def _check(self) -> None:
        super()._check()
        if (self.prior_epsilon is None) == (self.prior is None):
            raise ValueError(
                f"give exactly one of prior_epsilon and prior, got prior_epsilon={self.prior_epsilon!r} and "
                f"prior={self.prior!r}: a part of epsilon for a noisy histogram, or public (values, probabilities)"
            )
        if self.prior_epsilon is not None:
            _checks.real("prior_epsilon", self.prior_epsilon, "give the histogram a part of epsilon", above=0)
            if not self.prior_epsilon < self.epsilon:
                raise ValueError(
                    f"prior_epsilon={self.prior_epsilon:g} must be below epsilon={self.epsilon:g}, the total: give the "
                    "histogram a part of it"
                )

    def fit(self, y: Arrays, _second: None = None) -> Estimator:
        """Releases the noisy histogram, unless the prior is public, and makes the mechanism that suits it.

        Args:
            y: Labels [n], finite numbers. Each counts as the nearest value of the grid.
        """
        numbers, _ = _numbers(self._begin(y, _second))
        if self.prior is not None:
            values, probabilities = self._public_prior()
        else:
            values = self._grid(numbers)
            counts = np.bincount(self._nearest(numbers, values), minlength=len(values))
            noisy = np.maximum(noisy_counts(counts, self.prior_epsilon / 2, self._uniforms()), 0)
            self._spend((float(self.prior_epsilon), 2))
            probabilities = noisy / noisy.sum() if noisy.sum() > 0 else np.full(len(values), 1 / len(values))
        self.values_, self.probabilities_ = values, probabilities
        self._made_for = self._response_epsilon
        self._solve()
        return self

    def transform(self, y: Arrays) -> Arrays:
        """Releases noisy labels, float64 in the container of `y`; one release, whatever it holds."""
        check_is_fitted(self, "outputs_")
        if self._made_for != self._response_epsilon:
            raise ValueError(
                f"epsilon={self.epsilon!r}, prior_epsilon={self.prior_epsilon!r} were set after fit, which made the "
                f"mechanism for ε={self._made_for:g}: call fit again"
            )
        if _labels.is_dataset(y):
            return with_labels(y, lambda x, labels: self.transform(labels))
        numbers, rebuild = _numbers(y)
        self._spend_on_release((self._response_epsilon, 2))
        uniforms = self._uniforms()
        return rebuild(in_chunks(lambda part, _: self._release(part, uniforms), numbers))

    def inverse_transform(self, y: Arrays) -> Arrays:
        """`y` as it is, since released labels are in the units of the true ones; for `TransformedTargetRegressor`.

        Set `check_inverse=False` there: its check releases some labels once more, and that is paid.
        """
        check_is_fitted(self, "outputs_")
        return y

    @property
    def _response_epsilon(self) -> float:
        return float(self.epsilon - (self.prior_epsilon or 0))

    def _cost(self) -> list[tuple[float, int]]:
        prior = [] if self.prior_epsilon is None else [(float(self.prior_epsilon), 2)]
        return [*prior, (self._response_epsilon, 2)]

    def _public_prior(self) -> tuple[np.ndarray, np.ndarray]:
        try:
            values, probabilities = (np.asarray(part, np.float64) for part in self.prior)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"prior must be the pair (values, probabilities), got {self.prior!r:.99}: two arrays of one length"
            ) from error
        values = self._checked_grid(values, "prior's values")
        return values, check_probabilities(probabilities, len(values), "prior's probabilities")[0]

    def _grid(self, numbers: np.ndarray) -> np.ndarray:
        if self.values is not None:
            return self._checked_grid(np.asarray(self.values, np.float64), "values")
        values = np.unique(numbers)
        if len(values) < 2:
            raise ValueError(f"y has only the value {values[0]:g}, so no other value could hide it: give values")
        if len(values) > self._largest_grid:
            values = np.linspace(values[0], values[-1], self._largest_grid)
        warnings.warn(
            f"{type(self).__name__} read the possible values from the labels themselves ({values[0]:g} to "
            f"{values[-1]:g}), as if they were public. Give values=np.linspace(low, high, {self._largest_grid}), "
            "chosen without the labels.",
            stacklevel=4,
        )
        return values

    def _checked_grid(self, values: np.ndarray, name: str) -> np.ndarray:
        if values.ndim != 1 or len(values) < 2 or not np.isfinite(values).all() or (np.diff(values) <= 0).any():
            raise ValueError(f"{name} must be two or more finite rising numbers, got {values!r:.99}: sort them")
        if len(values) > self._largest_grid:
            raise ValueError(
                f"{name} has {len(values)} numbers, more than the {self._largest_grid} that {type(self).__name__} can "
                "plan for: use a coarser grid"
            )
        return values

    @staticmethod
    def _nearest(numbers: np.ndarray, values: np.ndarray) -> np.ndarray:
        return np.searchsorted((values[1:] + values[:-1]) / 2, numbers)


class RROnBins(_RegressionMechanism):
    """Randomized response on bins: every value belongs to an interval, and every interval has one number to release.

        noisy = RROnBins(1.0, prior_epsilon=0.2, values=np.linspace(0, 100, 101)).fit_transform(y)

    Promise: ε-DP in total when one label is replaced. If the prior is right, no ε-DP mechanism has a smaller expected
    loss (Ghazi et al. 2023, arXiv:2212.06074).

    Args:
        epsilon: ε > 0, the total.
        prior_epsilon: The part of it that goes into a histogram of the labels with discrete Laplace noise.
        prior: Instead, public knowledge: (values, probabilities), values in rising order.
        loss: What the released ŷ is judged by: "squared", "absolute", "poisson" (ŷ - y·log ŷ), or a function of (ŷ, y)
            that broadcasts; for this and "absolute" ŷ is one of the values.
        values: With `prior_epsilon`, the values that labels can have, up to 256 in rising order; chosen without a look
            at the labels. None takes them from the labels, and warns.
        seed: None takes the operating system's entropy; a seed is for tests.

    Attributes:
        values_, probabilities_: The prior, [m] each.
        bins_: The bin of each value, [m], from 0.
        outputs_: What each bin releases, [d].
        expected_loss_: Under the prior.
        transition_matrix_: [m, d], P(released = outputs_[j] | label = values_[i]).
        releases_, dp_event, ledger, epsilon_spent: How often, and the price of all.

    Raises:
        ValueError: for arguments out of range, NaN labels, "poisson" with values below 0.
    """

    def __init__(
        self,
        epsilon: float,
        prior_epsilon: float | None = None,
        prior: Prior = None,
        *,
        loss: str | Callable = "squared",
        values: Arrays = None,
        seed: int | None = None,
    ):
        self.epsilon, self.prior_epsilon, self.prior = epsilon, prior_epsilon, prior
        self.loss, self.values, self.seed = loss, values, seed
        self._check()

    def _check(self) -> None:
        super()._check()
        if not callable(self.loss):
            _checks.choice("loss", self.loss, _LOSSES)

    def _solve(self) -> None:
        if self.loss == "poisson" and self.values_[0] < 0:
            raise ValueError(f"loss='poisson' needs labels of at least 0, got {self.values_[0]:g}: use 'squared'")
        cost, output = _interval_costs(self.values_, self.probabilities_, self._response_epsilon, self.loss)
        self.bins_, intervals, self.expected_loss_ = _best_bins(cost, self._response_epsilon)
        self.outputs_ = np.array([output(first, last) for first, last in intervals])

    def _release(self, numbers: np.ndarray, uniforms: Uniforms) -> np.ndarray:
        bins = self.bins_[self._nearest(numbers, self.values_)]
        return self.outputs_[_top_k.respond(bins, len(self.outputs_), self._response_epsilon, uniforms)]

    @property
    def transition_matrix_(self) -> np.ndarray:
        """[bins, outputs], P(output j is released | label is in bin i)."""
        check_is_fitted(self, "outputs_")
        return _top_k.response_matrix(self._response_epsilon, len(self.outputs_))[self.bins_]


def _interval_costs(
    values: np.ndarray, p: np.ndarray, epsilon: float, loss: str | Callable
) -> tuple[np.ndarray, Callable]:
    """L(r, s)·e^(-ε) of every interval of values (its own weigh 1, the others e^(-ε)), infinite for r > s, and the
    best ŷ of an interval."""
    n, other = len(values), np.exp(-epsilon)

    def inside(part: np.ndarray) -> np.ndarray:
        """Sums over r..s of the last axis."""
        total = np.concatenate([np.zeros_like(part[..., :1]), np.cumsum(part, axis=-1)], axis=-1)
        return total[..., None, 1:] - total[..., :-1, None]

    def weighted(part: np.ndarray) -> np.ndarray:
        return other * part.sum() + (1 - other) * inside(part)

    if loss in ("squared", "poisson"):
        centre = p @ values if loss == "squared" else 0.0  # for the digits that a difference of squares loses
        y = values - centre
        mass, first = np.maximum(weighted(p), 1e-300), weighted(p * y)
        mean = first / mass
        if loss == "squared":
            cost = weighted(p * y * y) - first * mean
        else:
            with np.errstate(divide="ignore", invalid="ignore"):
                cost = np.where(first > 0, first - first * np.log(mean), 0.0)
        best = lambda r, s: mean[r, s] + centre  # noqa: E731
    else:
        if loss == "absolute":
            table = abs(values[:, None] - values)
        else:
            table = np.broadcast_to(np.asarray(loss(values[:, None], values[None]), np.float64), (n, n))  # type: ignore[operator]
        cost, choice = np.empty((n, n)), np.empty((n, n), np.intp)
        total = np.concatenate([np.zeros((n, 1)), np.cumsum(table * p, axis=1)], axis=1)
        for r in range(n):
            of_output = other * total[:, -1:] + (1 - other) * (total[:, 1:] - total[:, r : r + 1])
            choice[r] = of_output.argmin(axis=0)
            cost[r] = of_output.min(axis=0)
        best = lambda r, s: values[choice[r, s]]  # noqa: E731
    return np.where(np.tri(n, k=-1, dtype=bool), np.inf, cost), best


def _best_bins(cost: np.ndarray, epsilon: float) -> tuple[np.ndarray, list[tuple[int, int]], float]:
    """The bin of each value, the intervals and their expected loss: A(i, d) = min over l of A(l, d-1) + L(l+1, i)."""
    n, other = len(cost), np.exp(-epsilon)
    least, came_from = cost[0], []
    best, bins = least[-1], 1
    for d in range(2, n + 1):
        through = least[:-1, None] + cost[1:]
        came_from.append(through.argmin(axis=0))
        least = through.min(axis=0)
        expected = least[-1] / (1 + (d - 1) * other)
        if expected < best * (1 - 1e-12):
            best, bins = expected, d
    intervals, last = [], n - 1
    for d in range(bins - 2, -1, -1):
        before = int(came_from[d][last])
        intervals.append((before + 1, last))
        last = before
    intervals = [(0, last), *reversed(intervals)]
    return np.repeat(np.arange(bins), [s - r + 1 for r, s in intervals]), intervals, float(best)


class UnbiasedRandomizer(_RegressionMechanism):
    """Released labels whose mean is the true label, with the least variance that ε-DP allows on a grid of outputs.

        noisy = UnbiasedRandomizer(1.0, prior_epsilon=0.2, values=np.linspace(0, 10, 21)).fit_transform(y)

    For losses that are linear in the label (squared loss and its gradient, Poisson loss) training on such labels has
    no bias, which helps in the long run. `RROnBins` has the smaller error for each label.

    Promise: ε-DP in total when one label is replaced; E[released | label] = label for labels inside the range of the
    values (a label between two is rounded to either, at random; one outside is moved to the end). It is the linear
    program min Σ p_y M(ŷ|y)(ŷ - y)² over ε-DP, unbiased M (Badanidiyuru et al. 2023, arXiv:2312.05659).

    Args:
        epsilon: ε > 0, the total.
        prior_epsilon, prior, seed: As in `RROnBins`.
        values: As there, but up to 64 (32 if taken from continuous labels).
        num_outputs: Outputs to choose from, evenly over a range that reaches 1.5·coth(ε/2) times as far from the middle
            as the values; None takes 2·len(values) + 1.

    Attributes:
        values_, probabilities_: The prior, [m] each.
        outputs_: What may be released, [d]; some lie outside the range of the values.
        expected_loss_: The mean squared error under the prior.
        transition_matrix_: [m, d], P(released = outputs_[j] | label = values_[i]).
        releases_, dp_event, ledger, epsilon_spent: How often, and the price of all.

    Raises:
        ValueError: for arguments out of range, NaN labels.
        PrivacyError: The linear program found no mechanism, for instance for an ε far below 0.01.
    """

    _largest_grid = 64

    def __init__(
        self,
        epsilon: float,
        prior_epsilon: float | None = None,
        *,
        prior: Prior = None,
        values: Arrays = None,
        num_outputs: int | None = None,
        seed: int | None = None,
    ):
        self.epsilon, self.prior_epsilon, self.prior = epsilon, prior_epsilon, prior
        self.values, self.num_outputs, self.seed = values, num_outputs, seed
        self._check()

    def _check(self) -> None:
        super()._check()
        _checks.optional(_checks.whole, "num_outputs", self.num_outputs, 2, "count the outputs to choose from")

    def _solve(self) -> None:
        low, high = self.values_[0], self.values_[-1]
        middle, half = (low + high) / 2, (high - low) / 2
        # An unbiased mechanism exists from coth(ε/2) on. Half as much again makes the variance up to six times smaller
        # where ε is large; more than that, no smaller.
        reach = 1.5 / np.tanh(_with_margin(self._response_epsilon) / 2)
        unit = np.linspace(-reach, reach, self.num_outputs or 2 * len(self.values_) + 1)
        inputs = (self.values_ - middle) / half
        matrix = _unbiased_program(inputs, self.probabilities_, unit, self._response_epsilon)
        used = matrix.max(axis=0) > 0
        self.outputs_, self.transition_matrix_ = middle + half * unit[used], matrix[:, used]
        errors = (self.outputs_ - self.values_[:, None]) ** 2
        self.expected_loss_ = float(self.probabilities_ @ (self.transition_matrix_ * errors).sum(axis=1))

    def _release(self, numbers: np.ndarray, uniforms: Uniforms) -> np.ndarray:
        below, part = self._between(numbers)
        place = below + (uniforms(len(numbers)) < part)
        # Rare outputs come first, where numbers have the digits to tell them apart.
        order = np.argsort(self.transition_matrix_, axis=1)
        reached = np.cumsum(np.take_along_axis(self.transition_matrix_, order, axis=1), axis=1)
        reached /= reached[:, -1:]
        uniform = uniforms.fine(len(numbers))
        said = np.empty(len(numbers), np.intp)
        for i in np.unique(place):
            here = place == i
            said[here] = order[i, np.searchsorted(reached[i], uniform[here], "right")]

        def loss(one: np.ndarray, other: np.ndarray, said: np.ndarray) -> float:
            return float(np.abs(np.log(chance(one, said) / chance(other, said))).sum())

        def chance(numbers: np.ndarray, said: np.ndarray) -> np.ndarray:
            below, part = self._between(numbers)
            matrix = self.transition_matrix_
            return (1 - part) * matrix[below, said] + part * matrix[below + 1, said]

        return self.outputs_[_replay_hook.drawn(numbers, said, self._response_epsilon, loss)]

    def _between(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The place of the value of the grid below, and which part of the way to the next one a number is."""
        clipped = np.clip(numbers, self.values_[0], self.values_[-1])
        below = np.clip(np.searchsorted(self.values_, clipped, "right") - 1, 0, len(self.values_) - 2)
        return below, (clipped - self.values_[below]) / np.diff(self.values_)[below]


def _with_margin(epsilon: float) -> float:
    """The ε that the linear program may use; the rest is for its tolerance."""
    return epsilon - min(1e-4, 1e-2 * epsilon)


def _unbiased_program(inputs: np.ndarray, p: np.ndarray, outputs: np.ndarray, epsilon: float) -> np.ndarray:
    """M [inputs, outputs] of the linear program, with what the solver's tolerance left over put right."""
    n, m = len(inputs), len(outputs)
    # Variables: M row by row, then each output's floor f with f ≤ M ≤ e^ε f, which says ε-DP in 2nm rows.
    floor = sparse.kron(np.ones((n, 1)), sparse.identity(m))
    cells = sparse.identity(n * m)
    ratio = np.exp(_with_margin(epsilon))
    private = sparse.bmat([[-cells, floor], [cells, -ratio * floor]], format="csr")
    sums = sparse.kron(sparse.identity(n), np.ones((1, m)))
    means = sparse.kron(sparse.identity(n), outputs[None])
    fair = sparse.hstack([sparse.vstack([sums, means]), sparse.csr_matrix((2 * n, m))], format="csr")
    weight = np.maximum(p, 1e-9)  # a value that the prior excludes still gets a sensible row
    cost = np.concatenate([(weight[:, None] * (outputs - inputs[:, None]) ** 2).ravel(), np.zeros(m)])
    solved = optimize.linprog(
        cost, private, np.zeros(2 * n * m), fair, np.concatenate([np.ones(n), inputs]), (0, None), method="highs"
    )
    if solved.status != 0:
        raise PrivacyError(
            f"no unbiased mechanism was found at ε={epsilon:g} ({solved.message}): raise epsilon or num_outputs, "
            "or use RROnBins"
        )
    matrix = solved.x[: n * m].reshape(n, m)
    matrix[:, matrix.max(axis=0) < 1e-7] = 0
    matrix = np.maximum(matrix, matrix.max(axis=0) / ratio)
    # What is missing of probability and mean in each row goes to the two outputs that are likeliest everywhere.
    first, second = np.argsort(matrix.min(axis=0))[-2:]
    mass, mean = 1 - matrix.sum(axis=1), inputs - matrix @ outputs
    to_second = (mean - outputs[first] * mass) / (outputs[second] - outputs[first])
    matrix[:, second] += to_second
    matrix[:, first] += mass - to_second
    used = matrix[:, matrix.max(axis=0) > 0]
    if used.min() <= 0 or (used.max(axis=0) / used.min(axis=0)).max() > np.exp(epsilon):
        raise PrivacyError(
            f"the linear program's answer at ε={epsilon:g} is not {epsilon:g}-DP in floating point: use a coarser "
            "grid, or RROnBins"
        )
    return matrix


def _numbers(y: Arrays) -> tuple[np.ndarray, Callable]:
    values, rebuild = _labels.read(y)
    if len(values) == 0:
        raise ValueError("y must have at least one label, got none")
    if values.dtype == object:
        values = np.array([np.nan if _labels.is_missing(v) else v for v in values], object)
    try:
        numbers = values.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"y must be numbers, got dtype {values.dtype}: for classes use RandomizedResponse") from error
    if not np.isfinite(numbers).all():
        raise ValueError(f"y must be finite, got {numbers[~np.isfinite(numbers)][0]}: drop missing labels")
    return numbers, rebuild
