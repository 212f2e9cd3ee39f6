"""Randomized response for classes: plain, over the likeliest k, and over as many as a prior makes best."""

from __future__ import annotations

import numpy as np
from sklearn.base import clone as sklearn_clone
from sklearn.utils.validation import check_is_fitted

from tfdpfl._types import Arrays, Estimator, Prior
from tfdpfl.accounting import _checks
from tfdpfl.errors import PrivacyError
from tfdpfl.label_dp import _labels, _top_k
from tfdpfl.label_dp._base import ClassTransformer, LabelMechanism, in_chunks
from tfdpfl.label_dp._datasets import arrays_of, with_labels
from tfdpfl.label_dp.counts import debiased_by_response
from tfdpfl.label_dp.priors import LabelPrior, PublicPrior, from_counts

__all__ = ["RandomizedResponse", "RandomizedResponseTopK", "RandomizedResponseWithPrior", "randomized_response"]

# For a prior's automatic share: the parts of ε to choose from, and the weights of the Dirichlet distributions that a
# group's classes are made up from. They make the commonest class of ten 66 % to 94 % of a group.
_SHARES = 2.0 ** -np.arange(0.25, 7.1, 0.25)
_PURITY = (0.1, 1.0)


class RandomizedResponse(ClassTransformer):
    """Tells each label's truth with probability e^ε / (e^ε + K - 1), and else a uniform one of the other classes.

        noisy = RandomizedResponse(epsilon=1.0, num_classes=10).fit_transform(y)

    Promise: the released labels are ε-DP when one label is replaced, each label for itself (so also in the local
    model). No mechanism tells the truth more often if nothing is known about the labels (Warner 1965; Kairouz et al.
    2016, arXiv:1602.07387).

    Args:
        epsilon: ε > 0 of one release.
        num_classes: K, for integer labels 0..K-1.
        seed: None takes the operating system's entropy. Anyone who knows the seed knows the labels: for tests.
        classes: All classes, for other labels. Without either, `fit` takes those that the labels name as public
            knowledge; give them where the presence of a rare class is a secret.

    Attributes:
        classes_: [K], sorted.
        transition_matrix_: [K, K], P(released = classes_[j] | label = classes_[i]).
        releases_: How many times labels were released. Transforming the same labels again costs ε again.
        dp_event, ledger, epsilon_spent: The price of all releases.

    Raises:
        ValueError: for arguments out of range; in `transform`, a label that is none of the classes.
    """

    def __init__(
        self, epsilon: float, num_classes: int | None = None, seed: int | None = None, *, classes: Arrays = None
    ):
        self.epsilon, self.num_classes, self.seed, self.classes = epsilon, num_classes, seed, classes
        self._check()

    def transform(self, y: Arrays) -> Arrays:
        """Releases noisy labels, in the container of `y`; one release, whatever it holds.

        A `tf.data.Dataset` is read once, kept in memory, and returned with its labels replaced, the same in every
        epoch. Shuffle and batch behind it as usual.
        """
        check_is_fitted(self, "classes_")
        self._check()  # set_params may have been called since
        if _labels.is_dataset(y):
            return with_labels(y, lambda x, labels: self.transform(labels))
        values, rebuild = _labels.read(y)
        uniforms, size = self._uniforms(), len(self.classes_)
        self._spend_on_release((float(self.epsilon), size))

        def chunk(part: np.ndarray, _: int) -> np.ndarray:
            codes = _labels.encode(part, self.classes_)
            return _labels.decode(_top_k.respond(codes, size, self.epsilon, uniforms), self.classes_, values)

        return rebuild(in_chunks(chunk, values))

    def label_counts(self, noisy: Arrays) -> np.ndarray:
        """Unbiased estimates of how many labels of each class there were, [K], from released ones.

        See `debiased_label_counts`.
        """
        check_is_fitted(self, "classes_")
        if _top_k.keep_probability(self.epsilon, len(self.classes_)) * -np.expm1(-self.epsilon) < 1e-8:
            raise ValueError(
                f"epsilon={self.epsilon:g} leaves nothing to count: a label becomes any other class as often as it "
                "keeps its own. Use a larger epsilon."
            )
        codes = _labels.encode(_labels.read(noisy, "noisy")[0], self.classes_, "noisy")
        return debiased_by_response(np.bincount(codes, minlength=len(self.classes_)), self.epsilon)

    @property
    def transition_matrix_(self) -> np.ndarray:
        """[K, K], P(class j is released | the label is class i)."""
        check_is_fitted(self, "classes_")
        return _top_k.response_matrix(self.epsilon, len(self.classes_))

    def _cost(self) -> list[tuple[float, int]]:
        given = self.num_classes if self.classes is None else len(np.unique(self.classes))
        return [(float(self.epsilon), len(self.classes_) if hasattr(self, "classes_") else given or 2)]


class _PriorTransformer(ClassTransformer):
    """Randomized response on the k likeliest classes of each example's prior."""

    def fit(self, X: Arrays, y: Arrays = None) -> Estimator:  # type: ignore[override]  # features come first
        """Learns the classes, and releases the prior's noisy counts if it is one that is fitted on the labels.

        Args:
            X: Features [n, ...], public; a `tf.data.Dataset` of (x, y). Or the labels, with `y=None`, where the prior
                needs no features.
            y: Labels [n].
        """
        self._check()
        if _labels.is_dataset(X):
            X, y = arrays_of(X)
        X, y = (None, X) if y is None else (X, y)
        values, _ = _labels.read(y)
        self.classes_ = _labels.find_classes(values, self.num_classes, self.classes)
        self._check_k(len(self.classes_))
        prior = self.prior
        if isinstance(prior, LabelPrior):
            if X is None and prior.needs_features:
                raise ValueError("X=None, but the prior groups examples by their features: call fit_transform(X, y)")
            features = np.zeros((len(values), 1)) if X is None else X
            fresh = sklearn_clone(prior)
            # A subclass may have its own `fit`, so an ε that is known goes that way.
            self.prior_ = (
                fresh._fit(features, y, self.classes_, self._best_share)
                if prior._is_auto
                else fresh.fit(features, y, self.classes_)
            )
            # What it paid is part of this mechanism's price.
            self._spend(*self.prior_._spent)
        elif prior is None:
            self.prior_ = PublicPrior(np.full(len(self.classes_), 1 / len(self.classes_)))
        else:
            self.prior_ = prior if isinstance(prior, PublicPrior) else PublicPrior(prior)
        return self

    def transform(self, X: Arrays, y: Arrays = None) -> Arrays:
        """Releases noisy labels, in the container of `y`. Arguments as in `fit`; one release, whatever they hold."""
        check_is_fitted(self, "prior_")
        self._check()  # set_params may have been called since
        self._check_k(len(self.classes_))
        if _labels.is_dataset(X):
            return with_labels(X, self.transform)
        X, y = (None, X) if y is None else (X, y)
        values, rebuild = _labels.read(y)
        if X is not None:
            _labels.check_lengths(X, values)
        epsilon = self._response_epsilon
        if not epsilon > 0:
            raise ValueError(
                f"epsilon={self.epsilon:g} is not above the {self.epsilon - epsilon:g} that the prior spent at fit: "
                "call fit again, or give more"
            )
        self._table, self._row = self._look_up(X, len(values))
        self._spend_on_release((epsilon, self._most_revealing()))
        uniforms = self._uniforms()
        shared = self._plan(self._table, epsilon) if len(self._table) < len(values) else None

        def chunk(part: np.ndarray, start: int) -> np.ndarray:
            codes = _labels.encode(part, self.classes_)
            row = self._row[start : start + len(part)]
            if shared is not None:
                order, rank, k = shared
            else:
                order, rank, k = self._plan(self._table[row], epsilon)
                row = np.arange(len(row))
            said = _top_k.release(codes, row, order, rank, k, epsilon, uniforms)
            return _labels.decode(said, self.classes_, values)

        return rebuild(in_chunks(chunk, values))

    def fit_transform(self, X: Arrays, y: Arrays = None) -> Arrays:
        """`fit` and `transform` on the same data, for `epsilon` in all."""
        if _labels.is_dataset(X):
            return with_labels(X, self.fit_transform)
        return self.fit(X, y).transform(X, y)

    @property
    def transition_matrix_(self) -> np.ndarray:
        """P(released = j | label = i) in the last release: [K, K] if all examples had one prior, else [m, K, K] for m
        priors; `prior_index_` says which example had which."""
        check_is_fitted(self, "_table")
        order, _, k = self._plan(self._table, self._response_epsilon)
        matrices = _top_k.matrices(order, k, self._response_epsilon)
        return matrices[0] if len(matrices) == 1 else matrices

    @property
    def prior_index_(self) -> np.ndarray:
        """Which of the priors each example had in the last release, [n]."""
        check_is_fitted(self, "_row")
        return self._row

    @property
    def k_(self) -> np.ndarray:
        """Over how many classes each prior's randomized response went, [m]."""
        check_is_fitted(self, "_table")
        return self._plan(self._table, self._response_epsilon)[2]

    @property
    def _response_epsilon(self) -> float:
        prior = getattr(self, "prior_", None)
        if isinstance(prior, LabelPrior):
            return float(self.epsilon - prior.epsilon_)
        return float(self.epsilon - self.prior.epsilon if isinstance(self.prior, LabelPrior) else self.epsilon)

    def _best_share(self, sizes: np.ndarray, size: int) -> float:
        """The part of epsilon for the counts that makes the most truth of labels that are made up: as many in each
        group, more or less of one class (Dirichlet). Nothing private, and no chance, goes into it."""
        rng = np.random.default_rng(0)
        groups = int(np.clip(200_000 // size, 50, 1000))
        sizes = sizes[np.linspace(0, len(sizes) - 1, groups).astype(int)]
        weights = rng.gamma(np.geomspace(*_PURITY, groups)[rng.permutation(groups), None] / size, size=(groups, size))
        counts = sizes[:, None] * (weights + 1e-99) / (weights + 1e-99).sum(axis=1, keepdims=True)
        uniform = rng.random((2, groups, size))

        def truth(share: float) -> float:
            table = np.full(counts.shape, 1 / size)
            if share > 0:
                up, down = np.floor(np.log1p(-uniform) / (-share * self.epsilon / 2))
                table = from_counts(counts + up - down, sizes)
            left = (1 - share) * self.epsilon
            order, _, k = self._plan(table, left)
            covered = np.take_along_axis(counts, order, axis=1).cumsum(axis=1)[np.arange(groups), k - 1]
            return float(covered @ _top_k.keep_probability(left, k))

        return float(self.epsilon * max([0.0, *_SHARES], key=truth))

    def _most_revealing(self) -> int:
        # Some prior may leave two classes, and that is the worst case.
        return 2

    def _cost(self) -> list[tuple[float, int]]:
        if isinstance(self.prior, LabelPrior) and self.prior._is_auto:
            return [(float(self.epsilon), 2)]  # no division of it costs more
        prior = [(float(self.prior.epsilon), 2)] if isinstance(self.prior, LabelPrior) else []
        return [*prior, (self._response_epsilon, self._most_revealing())]

    def _look_up(self, X: Arrays, n: int) -> tuple[np.ndarray, np.ndarray]:
        """The distinct priors [m, K], and which of them each example has [n]."""
        if isinstance(self.prior_, LabelPrior):
            # At fit the clusterer has named the groups already; predict gives the same ones.
            return self.prior_.prior_, self.prior_.groups(X) if self.prior_.needs_features else np.zeros(n, np.intp)
        table = self.prior_.table(X, self.classes_, n)
        if len(table) == 1:
            return table, np.zeros(n, np.intp)
        return _distinct(table)

    def _check(self) -> None:
        super()._check()
        prior = self.prior
        if isinstance(prior, LabelPrior):
            if not (prior._is_auto or prior.epsilon < self.epsilon):
                raise ValueError(
                    f"prior.epsilon={prior.epsilon:g} must be below epsilon={self.epsilon:g}, the total: give the "
                    "prior a part of it, a tenth for instance"
                )
        elif _pays(prior):
            raise PrivacyError(
                f"prior={type(prior).__name__} hides a prior with an ε, which would not be counted: give the "
                "KMeansPrior itself, and the steps before it as clusterer=make_pipeline(scaler, KMeans(...))"
            )

    def _check_k(self, num_classes: int) -> None:
        pass

    def __sklearn_clone__(self) -> Estimator:
        twin = super().__sklearn_clone__()
        if not isinstance(self.prior, LabelPrior):
            twin.prior = self.prior  # a clone of a fitted model would be an unfitted one
        return twin


class RandomizedResponseTopK(_PriorTransformer):
    """Randomized response on the k likeliest classes; a label that is none of them becomes a uniform one of them.

    Promise: ε-DP in total when one label is replaced, the prior's part included (Ghazi et al. 2021, arXiv:2102.06062,
    Alg. 2).

    Args:
        epsilon: ε > 0, the total.
        k: How many classes, 1..K; 1 releases the prior's guess whatever the label.
        prior: As in `RandomizedResponseWithPrior`; None: all classes alike, the first k are taken.
        num_classes, seed, classes: As in `RandomizedResponse`.

    Raises:
        ValueError: for arguments out of range; in `fit`, k > K.
    """

    def __init__(
        self,
        epsilon: float,
        k: int,
        prior: Prior = None,
        num_classes: int | None = None,
        seed: int | None = None,
        *,
        classes: Arrays = None,
    ):
        self.epsilon, self.k, self.prior = epsilon, k, prior
        self.num_classes, self.seed, self.classes = num_classes, seed, classes
        self._check()

    def _check(self) -> None:
        super()._check()
        _checks.whole("k", self.k, 1, "count the classes that may be released")
        if self.num_classes is not None:
            self._check_k(self.num_classes)

    def _check_k(self, num_classes: int) -> None:
        if self.k > num_classes:
            raise ValueError(f"k={self.k} must be at most the number of classes, {num_classes}: lower it")

    def _most_revealing(self) -> int:
        return int(self.k)

    def _plan(self, table: np.ndarray, epsilon: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return (*_top_k.by_likelihood(table), np.full(len(table), self.k))


class RandomizedResponseWithPrior(_PriorTransformer):
    """Randomized response on the k likeliest classes, with the k that makes the truth likeliest under each example's
    prior.

        RandomizedResponseWithPrior(1.0, prior=KMeansPrior(0.1)).fit_transform(X, y)

    Promise: ε-DP in total when one label is replaced. A `LabelPrior` spends its `prior.epsilon` of it on noisy counts,
    and randomized response runs at the rest. If the prior is right, no ε-DP mechanism tells the truth more often
    (Ghazi et al. 2021, arXiv:2102.06062, Alg. 3).

    Beware: the noise leans to where the prior leans, and its transition matrix is singular. `ForwardCorrectedLoss`
    does harm here; train with the plain loss.

    Args:
        epsilon: ε > 0, the total.
        prior: A `LabelPrior` (`KMeansPrior`, `NoisyHistogram`), fitted on the data for a part of `epsilon`, which
            `KMeansPrior("auto")` chooses by itself. Or what
            `PublicPrior` takes, for nothing: probabilities [K] or [n, K], a fitted classifier, a Keras model, a
            function of X. None takes all classes for alike, which gives `RandomizedResponse`.
        num_classes, seed, classes: As in `RandomizedResponse`.

    Attributes:
        classes_: [K], sorted.
        prior_: The fitted `LabelPrior`, or the `PublicPrior`.
        transition_matrix_, prior_index_, k_: What the last release did.
        releases_, dp_event, ledger, epsilon_spent: How often, and the price of all.

    Raises:
        ValueError: for arguments out of range, a prior that costs `epsilon` or more, or one that is no distribution
            over the classes; in `transform`, a label that is none of the classes.
    """

    def __init__(
        self,
        epsilon: float,
        prior: Prior = None,
        num_classes: int | None = None,
        seed: int | None = None,
        *,
        classes: Arrays = None,
    ):
        self.epsilon, self.prior = epsilon, prior
        self.num_classes, self.seed, self.classes = num_classes, seed, classes
        self._check()

    def _plan(self, table: np.ndarray, epsilon: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        order, rank = _top_k.by_likelihood(table)
        return order, rank, _top_k.best_k(table, order, epsilon)


def randomized_response(y: Arrays, epsilon: float, num_classes: int | None = None, seed: int | None = None) -> Arrays:
    """Releases `y` by randomized response, once; see `RandomizedResponse`.

        y_noisy = randomized_response(y, epsilon=1.0, num_classes=10)
        dataset = randomized_response(dataset, epsilon=1.0, num_classes=10)   # of labels, or (x, y)

    Args:
        y: Labels [n], in a list, array, pandas Series or tensor. Or a finite `tf.data.Dataset`, which is read into
            memory once, so that every epoch has the same noisy labels.
        epsilon: ε > 0.
        num_classes: K, for labels 0..K-1; None takes the classes that y names as public.
        seed: None takes the operating system's entropy; a seed is for tests.

    Returns:
        The noisy labels, in the container of `y`.

    Raises:
        ValueError: for arguments out of range, or a label that is none of the classes.
    """
    return RandomizedResponse(epsilon, num_classes, seed).fit_transform(y)


def _pays(prior: Prior) -> bool:
    """Whether a mechanism that releases labels is, or is inside of, something that is given as a public prior."""
    if isinstance(prior, type):
        return False
    if isinstance(prior, LabelMechanism):
        return True
    inner = [getattr(prior, "source", None), getattr(prior, "__self__", None)]
    if hasattr(prior, "get_params"):
        inner += [*prior.get_params().values(), *(step for _, step in getattr(prior, "steps", []))]
    return any(_pays(part) for part in inner if part is not None and part is not prior)


def _distinct(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct rows, and which one each row is; gives up where most rows differ."""
    each = table, np.arange(len(table))
    # Sorting one number a row, a random projection, is many times faster than sorting rows; equal rows have equal
    # projections, and whether equal projections are equal rows is checked.
    projection = np.einsum("ij,j->i", table, np.random.default_rng(0).random(table.shape[1]))
    some = projection[:: 1 + len(table) // 2000]
    if len(np.unique(some)) > len(some) // 2:
        return each
    order = np.argsort(projection)
    begins = np.concatenate([[True], np.diff(projection[order]) != 0])
    row = np.empty(len(table), np.intp)
    row[order] = np.cumsum(begins) - 1
    distinct = table[order[begins]]
    return (distinct, row) if (np.take(distinct, row, axis=0) == table).all() else each
