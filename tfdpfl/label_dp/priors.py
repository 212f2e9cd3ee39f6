"""Guesses of each example's label: public ones, and noisy histograms that pay for themselves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import special
from sklearn.base import ClassifierMixin, clone
from sklearn.cluster import KMeans, MiniBatchKMeans
from sklearn.decomposition import PCA
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import check_is_fitted, validate_data

from tfdpfl._types import Arrays, Estimator, Prior
from tfdpfl.accounting import _checks
from tfdpfl.errors import PrivacyError
from tfdpfl.label_dp import _labels, _top_k
from tfdpfl.label_dp._base import LabelMechanism, noisy_counts
from tfdpfl.label_dp._events import check_epsilon
from tfdpfl.label_dp.counts import debiased_by_response, nearest_counts

__all__ = ["KMeansPrior", "LabelPrior", "NoisyHistogram", "PublicPrior", "check_probabilities", "from_counts"]

_MOST_FOR_KMEANS = 200_000
_SUM_TOLERANCE = 1e-3  # of float16 softmax outputs; a prior's sum is no matter of privacy


def check_probabilities(prior: Prior, num_classes: int, name: str = "prior") -> np.ndarray:
    """Returns `prior` as float64 [m, K] with rows that sum to one. Zeros are allowed: such a class is never released
    where enough others are likely.

    Raises:
        ValueError: It has not K columns, or holds NaN or negative numbers, or a row that does not sum to one.
    """
    table = np.atleast_2d(np.asarray(prior, np.float64))
    if table.ndim != 2 or table.shape[1] != num_classes:
        raise ValueError(
            f"{name} must have one column for each of the {num_classes} classes, got the shape "
            f"{list(np.shape(prior))}: give [{num_classes}] for all examples or [n, {num_classes}], one row for each"
        )
    if not np.isfinite(table).all() or (table < 0).any():
        wrong = table[~(np.isfinite(table) & (table >= 0))][0]
        raise ValueError(f"{name} must hold probabilities, got {wrong}: apply a softmax to logits")
    total = table.sum(axis=1, keepdims=True)
    if (abs(total - 1) > _SUM_TOLERANCE).any():
        wrong = total[abs(total - 1) > _SUM_TOLERANCE][0]
        raise ValueError(f"{name} must sum to one in every row, got the sum {wrong:g}: divide each row by its sum")
    return table / total


class PublicPrior:
    """A guess of the labels that owes nothing to the private ones, and so costs nothing.

    The model that you wrap is trusted: one that was trained on the private labels would void the guarantee.

    Args:
        source: Probabilities `[K]` for all examples or `[n, K]` for the examples in their order. Or a fitted
            scikit-learn classifier (`predict_proba`; its `classes_` are lined up); or a Keras model; or a function of
            X. Models and functions give `[n, K]` for X.
        from_logits: Whether the model's outputs need a softmax; None finds out: whatever are not rows of
            probabilities are logits.
        temperature: T > 0 of the softmax, p^(1/T) normalised. Above 1 for a model that is too sure of itself.

    Raises:
        ValueError: for arguments out of range, or outputs that are no guess at K classes of n examples.
    """

    def __init__(self, source: Prior, from_logits: bool | None = None, temperature: float = 1.0):
        self.source, self.from_logits = source, from_logits
        self.temperature = _checks.real("temperature", temperature, "1 leaves the probabilities as they are", above=0)

    def table(self, X: Arrays, classes: np.ndarray, n: int) -> np.ndarray:
        """Probabilities [1, K], or [n, K] for the n examples X."""
        source = self.source
        is_model = hasattr(source, "predict_proba") or hasattr(source, "predict") or callable(source)
        if is_model and X is None:
            raise ValueError("X=None, but the prior is a model of the features: call fit_transform(X, y)")
        output = np.asarray(self._predicted(X) if is_model else source)
        if output.ndim == 2 and len(output) not in (1, n):
            raise ValueError(f"prior has {len(output)} rows for {n} examples: give one row for each, in their order")
        columns = getattr(source, "classes_", None) if hasattr(source, "predict_proba") else None
        if columns is not None:
            output = self._lined_up(output, np.asarray(columns), classes)
        if self.from_logits or (self.from_logits is None and is_model and not _are_probabilities(output)):
            scaled = np.asarray(output, np.float64) / self.temperature
            return check_probabilities(special.softmax(scaled, axis=-1), len(classes))
        table = check_probabilities(output, len(classes))
        if self.temperature != 1:
            table = table ** (1 / self.temperature)
            table /= table.sum(axis=1, keepdims=True)
        return table

    def _predicted(self, X: Arrays) -> Arrays:
        """What the model says of X."""
        source = self.source
        if hasattr(source, "predict_proba"):
            try:
                return source.predict_proba(X)
            except NotFittedError as error:
                raise ValueError(
                    f"prior={source!r} is not fitted, and fitting it on the private labels would reveal them: fit it "
                    "on public data, or use KMeansPrior"
                ) from error
        if not hasattr(source, "predict"):
            return source(X)
        if hasattr(source, "get_params"):
            raise ValueError(
                f"prior={source!r} has no predict_proba: wrap it in sklearn.calibration.CalibratedClassifierCV, or "
                "give a function of X that returns probabilities"
            )
        return source.predict(X, verbose=0)

    @staticmethod
    def _lined_up(output: np.ndarray, columns: np.ndarray, classes: np.ndarray) -> np.ndarray:
        place = {label: i for i, label in enumerate(columns.tolist())}
        unknown = [label for label in place if label not in set(classes.tolist())]
        if unknown:
            raise ValueError(f"prior.classes_ has {unknown[0]!r}, which is no class of the labels: fit it on the same")
        full = np.zeros((len(output), len(classes)))
        for j, label in enumerate(classes.tolist()):
            if label in place:  # a class that the model never saw keeps probability 0
                full[:, j] = output[:, place[label]]
        return full


def _are_probabilities(output: np.ndarray) -> bool:
    return bool((output >= 0).all() and (abs(output.sum(axis=-1) - 1) <= _SUM_TOLERANCE).all())


def from_counts(noisy: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Rows of probabilities [groups, K] from noisy counts of groups of these sizes.

    To set negative counts to 0 and divide by the sum would leave all the noise that is above 0, shared out over the
    classes that no one has.
    """
    likely = nearest_counts(noisy, sizes)
    total = likely.sum(axis=1, keepdims=True)
    return np.where(total > 0, likely / np.where(total > 0, total, 1), 1 / noisy.shape[1])


class LabelPrior(ClassifierMixin, LabelMechanism):
    """Guesses from histograms of the private labels, one for each group of examples, with discrete Laplace noise.

    A subclass says which group an example is in, from its features alone: `_groups(X)`, and `_fit_groups(X)` if it
    learns the groups.

    Promise: `noisy_counts_`, and all that follows from it, is `epsilon`-DP when one label is replaced. That moves two
    bins of one group's histogram by 1 each, so the noise is P(x) ∝ e^(-|x|·epsilon/2) on every bin. Groups are
    disjoint and public (Ghazi et al. 2021, arXiv:2102.06062, Alg. 4; Ghosh et al. 2009, arXiv:0811.2841).

    With `epsilon="auto"` it takes the share of a `RandomizedResponseWithPrior`'s total that tells the most truth on
    made-up labels, of groups as large as these. That depends on what is public: the groups' sizes, K and the total.

    With `local=True` no one need be trusted with the labels. Each goes through randomized response at `epsilon` before
    it is counted, and the counts are put right for that on average. `RandomizedResponseWithPrior` is then ε-DP in the
    (interactive) local model. The noise grows with the root of a group's size: take few, large groups, and more ε.

    Attributes:
        epsilon_: What was paid; with "auto" 0 where the counts would not be worth their price.
        classes_: [K], the columns.
        noisy_counts_: [groups, K], noise included, some below 0: whole numbers, but for `local=True`.
        prior_: [groups, K], the shares that are nearest to the noisy counts, in least squares, among those that are ≥ 0
            and sum to the group's size, which is public. An empty group is uniform.
        needs_features: Whether groups depend on the features; where not, there is one group.
    """

    needs_features = True
    local = False

    def _check_epsilon(self) -> None:
        if not isinstance(self.local, bool):
            raise ValueError(
                f"local must be True or False, got {self.local!r}: True is for labels that stay with their owners"
            )
        if self._is_auto and self.local:
            raise ValueError("epsilon='auto' does not know the noise of local=True: give a number, half of the total")
        if not self._is_auto:
            check_epsilon(self.epsilon, "give the ε of the counts, or 'auto' for a good share")

    @property
    def _is_auto(self) -> bool:
        return isinstance(self.epsilon, str) and self.epsilon == "auto"

    def fit(self, X: Arrays, y: Arrays, classes: Arrays = None) -> LabelPrior:
        """Groups the examples by X, and releases the noisy histograms of y.

        Args:
            X: Features, [n, ...]; public.
            y: Labels, [n].
            classes: All classes; None takes the constructor's, or those that y names, as public.

        Raises:
            ValueError: NaN features, lengths that differ, labels that are none of the classes, too few examples.
        """
        if self._is_auto:
            raise ValueError(
                "epsilon='auto' is a share of the ε of a mechanism, but this prior is fitted by itself: give a number, "
                f"or RandomizedResponseWithPrior(epsilon, prior={type(self).__name__}('auto'))"
            )
        return self._fit(X, y, classes, lambda sizes, size: float(self.epsilon))

    def _fit(self, X: Arrays, y: Arrays, classes: Arrays, share: Callable[[np.ndarray, int], float]) -> LabelPrior:
        """`fit` for the ε that `share` makes of the groups' sizes and the number of classes."""
        self._check()
        X = _features(self, X, reset=True)
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None: call fit(X, y)")
        values, _ = _labels.read(y)
        given = classes if classes is not None else self.classes
        self.classes_ = _labels.find_classes(values, None if classes is not None else self.num_classes, given)
        codes = _labels.encode(values, self.classes_)
        _labels.check_lengths(X, codes)
        groups, count = self._fit_groups(X)
        size = len(self.classes_)
        sizes = np.bincount(groups, minlength=count)
        self.epsilon_ = share(sizes, size)
        if self.epsilon_ == 0:
            self.noisy_counts_ = np.zeros((count, size))
            self.prior_ = np.full((count, size), 1 / size)
            return self
        # From here on labels are looked at.
        if self.local:
            counts, outcomes = self._sent(codes, groups, sizes, size), size
        else:
            counts, outcomes = np.bincount(groups * size + codes, minlength=count * size).reshape(count, size), 2
            counts = noisy_counts(counts, self.epsilon_ / 2, self._uniforms())
        self.noisy_counts_ = counts
        self._spend_on_release((self.epsilon_, outcomes))
        self.prior_ = from_counts(self.noisy_counts_, sizes)
        return self

    def _sent(self, codes: np.ndarray, groups: np.ndarray, sizes: np.ndarray, size: int) -> np.ndarray:
        """Unbiased counts [groups, K] from labels that each went through randomized response."""
        order, everyone = np.arange(size)[None], np.zeros(len(codes), np.intp)
        said = _top_k.release(codes, everyone, order, order, np.array([size]), self.epsilon_, self._uniforms())
        seen = np.bincount(groups * size + said, minlength=len(sizes) * size).reshape(len(sizes), size)
        return debiased_by_response(seen, self.epsilon_)

    def groups(self, X: Arrays) -> np.ndarray:
        """The group of each example, [n], from its features."""
        check_is_fitted(self)
        return self._groups(_features(self, X, reset=False))

    def predict_proba(self, X: Arrays) -> np.ndarray:
        """The guess at each example's label, [n, K]; costs nothing more."""
        groups = self.groups(X)
        return self.prior_[groups]

    def predict(self, X: Arrays) -> np.ndarray:
        """The likeliest class of each example, [n]."""
        likeliest = self.predict_proba(X).argmax(axis=1)
        return self.classes_[likeliest]

    def _fit_groups(self, X: np.ndarray) -> tuple[np.ndarray, int]:
        """Returns the group of each example, [n], and how many groups there are."""
        groups = self._groups(X)
        return groups, int(groups.max()) + 1

    def _groups(self, X: np.ndarray) -> np.ndarray:
        raise PrivacyError(f"{type(self).__name__} does not say how features group: use KMeansPrior")


class NoisyHistogram(LabelPrior):
    """One guess for all examples: how frequent each class is, with noise. For labels that are far from uniform.

    Args:
        epsilon: ε > 0 of the histogram, or "auto".
        num_classes: K, for integer labels 0..K-1.
        classes: All classes, for other labels. Without either those that the labels name, as public knowledge.
        seed: None takes the operating system's entropy; a seed is for tests.
        local: Whether each label is randomized before it is counted.
    """

    needs_features = False

    def __init__(
        self,
        epsilon: float | str,
        num_classes: int | None = None,
        *,
        seed: int | None = None,
        classes: Arrays = None,
        local: bool = False,
    ):
        self.epsilon, self.num_classes, self.seed, self.classes = epsilon, num_classes, seed, classes
        self.local = local
        self._check()

    def _groups(self, X: np.ndarray) -> np.ndarray:
        return np.zeros(len(X), np.intp)


class KMeansPrior(LabelPrior):
    """Clusters the features, then releases each cluster's noisy label histogram. See `LabelPrior` for the promise.

        RandomizedResponseWithPrior(1.0, prior=KMeansPrior(0.1, n_clusters=200)).fit_transform(X, y)

    The clusters come from the features alone, which are public here; where features are private too, label DP is not
    the tool. The guess helps as far as clusters are pure and hold many more than 1/ε examples.

    Args:
        epsilon: ε > 0 of the histograms, all together; or "auto".
        n_clusters: Number of clusters, at most the number of examples.
        n_components: Principal components that are clustered; None takes the features as they are.
        num_classes: K, for integer labels 0..K-1.
        seed: None takes the operating system's entropy for the noise; a seed is for tests. It
            decides the clusters, too.
        classes: All classes, for other labels. Without either those that the labels name, as public knowledge.
        clusterer: Replaces PCA and KMeans: an object with `fit(X)` and `predict(X)`, such as a pipeline. None takes
            scikit-learn's KMeans, MiniBatchKMeans above 200,000 examples.
        local: Whether each label is randomized before it is counted.

    Raises:
        ValueError: for arguments out of range; in `fit`, fewer examples than clusters, NaN features.
    """

    def __init__(
        self,
        epsilon: float | str,
        n_clusters: int = 100,
        n_components: int | None = 50,
        *,
        num_classes: int | None = None,
        seed: int | None = None,
        classes: Arrays = None,
        clusterer: Estimator = None,
        local: bool = False,
    ):
        self.epsilon, self.n_clusters, self.n_components = epsilon, n_clusters, n_components
        self.num_classes, self.seed, self.classes, self.clusterer = num_classes, seed, classes, clusterer
        self.local = local
        self._check()

    def _check(self) -> None:
        super()._check()
        _checks.whole("n_clusters", self.n_clusters, 1, "count the clusters")
        _checks.optional(_checks.whole, "n_components", self.n_components, 1, "None clusters the features as they are")

    def _fit_groups(self, X: np.ndarray) -> tuple[np.ndarray, int]:
        if self.clusterer is not None:
            self.clusterer_ = clone(self.clusterer, safe=False)
            self.clusterer_.fit(X)
            groups, count = super()._fit_groups(X)
            return groups, max(count, getattr(self.clusterer_, "n_clusters", 0))
        if self.n_clusters > len(X):
            raise ValueError(
                f"n_clusters={self.n_clusters} but X has only n_samples={len(X)} examples: take fewer clusters, each "
                "with many examples"
            )
        # The noise has a stream of its own: that of the clusters may be known.
        state = None if self.seed is None else np.random.RandomState(self.seed)
        self.pca_ = None
        if self.n_components is not None and self.n_components < X.shape[1]:
            self.pca_ = PCA(min(self.n_components, len(X)), random_state=state).fit(X)
            X = self.pca_.transform(X)
        method = KMeans if len(X) <= _MOST_FOR_KMEANS else MiniBatchKMeans
        self.clusterer_ = method(self.n_clusters, n_init=1, random_state=state).fit(X)
        return self.clusterer_.labels_, self.n_clusters

    def _groups(self, X: np.ndarray) -> np.ndarray:
        pca = getattr(self, "pca_", None)
        reduced = X if pca is None else pca.transform(X)
        groups = np.asarray(self.clusterer_.predict(reduced)).astype(np.intp)
        if groups.min() < 0 or (hasattr(self, "prior_") and groups.max() >= len(self.prior_)):
            raise ValueError(
                f"clusterer={self.clusterer!r} must number its clusters from 0 and name none that it did not at fit, "
                f"got {groups.min()}..{groups.max()}"
            )
        return groups


def _features(estimator: LabelPrior, X: Arrays, reset: bool) -> np.ndarray:
    """X as [n, features], checked; images and series are flattened."""
    if len(getattr(X, "shape", ())) > 2:
        X = np.asarray(X).reshape(len(X), -1)
    # KMeans wants to see the type again that it was fitted on.
    dtype = [np.float64, np.float32] if reset else getattr(estimator, "_dtype", np.float64)
    X = validate_data(estimator, X, reset=reset, dtype=dtype)
    if reset:
        estimator._dtype = X.dtype
    return X
