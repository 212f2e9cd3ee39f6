"""LP-MST: train in stages, each with a prior from the model of the stage before."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from sklearn.utils.validation import check_is_fitted

from tfdpfl._types import Arrays, Model, Prior
from tfdpfl.accounting import _checks
from tfdpfl.label_dp import _labels
from tfdpfl.label_dp._base import LabelMechanism
from tfdpfl.label_dp.classification import RandomizedResponseWithPrior
from tfdpfl.label_dp.counts import debiased_by_response, inverse_of
from tfdpfl.label_dp.priors import PublicPrior

__all__ = ["MultiStageTraining"]

_DOUBT = 0.1  # the share of a uniform prior in a debiased one, whose zeros a model that errs does not warrant


class MultiStageTraining(LabelMechanism):
    """Label-private training in stages. Each stage releases its share of the labels under the prior that the model of
    the stage before has of them, and trains on all that was released so far.

        training = MultiStageTraining(make_compiled_model, epsilon=1.0, num_stages=2)
        training.fit(x, y, epochs=10, batch_size=256)
        training.model_.evaluate(x_test, y_test)

    Promise: the released labels, and so the model, are ε-DP in total when one label is replaced. Every label is
    released once. The stages are disjoint, and drawn without a look at the labels (parallel composition; Ghazi et al.
    2021, arXiv:2102.06062, Alg. 5).

    Args:
        model_fn: Returns a new, compiled Keras model with one output of K probabilities or logits.
        epsilon: ε > 0, the total.
        num_stages: T ≥ 1; 1 is plain training on released labels.
        prior: The first stage's, as in `RandomizedResponseWithPrior`, `KMeansPrior` for instance. None: uniform. An
            array has one row [K] here.
        temperature: T of the softmax that makes the priors of later stages; above 1 for models that are too sure.
        debias: Whether the second stage's prior is put right for the noise that the first stage's model learned: it
            predicts released labels, Tᵀp, so T⁻¹ gives p. For nothing, since only released labels are looked at. False
            takes the softmax as it is, as the paper does; so does a first stage whose prior gives no invertible T.
        fractions: The share of the examples in each stage, [num_stages], > 0 with the sum 1; None: even. A small first
            stage suits an easy task.
        num_classes: K, for integer labels 0..K-1.
        one_hot: Whether the model's loss wants one-hot labels.
        seed: None takes the operating system's entropy; a seed is for tests.
        classes: All classes, for other labels. The model is trained on their positions 0..K-1.

    Attributes:
        model_: The last stage's model.
        noisy_labels_: [n], the released labels in the order of y.
        stage_: [n], the stage (from 0) in which each was released.
        histories_: Keras's History of each stage.
        classes_, releases_, dp_event, ledger, epsilon_spent: As in `RandomizedResponse`.
        family_ledger: The price of all fits of a `GridSearchCV`, read from the `best_estimator_` or from the estimator
            that was given. The scores that the search compares by look at true labels, and no ledger has them.

    Raises:
        ValueError: for arguments out of range, or fewer examples than stages.
    """

    def __init__(
        self,
        model_fn: Callable[[], Model],
        epsilon: float,
        num_stages: int = 2,
        *,
        prior: Prior = None,
        temperature: float = 1.0,
        debias: bool = True,
        fractions: Arrays = None,
        num_classes: int | None = None,
        one_hot: bool = False,
        seed: int | None = None,
        classes: Arrays = None,
    ):
        self.model_fn, self.epsilon, self.num_stages, self.prior = model_fn, epsilon, num_stages, prior
        self.temperature, self.debias, self.fractions, self.num_classes = temperature, debias, fractions, num_classes
        self.one_hot, self.seed, self.classes = one_hot, seed, classes
        self._check()

    def _check(self) -> None:
        super()._check()
        _checks.whole("num_stages", self.num_stages, 1, "count the stages")
        _checks.real("temperature", self.temperature, "1 leaves the model's probabilities as they are", above=0)
        if not callable(self.model_fn):
            raise ValueError(f"model_fn must be a function that makes a compiled model, got {self.model_fn!r}: wrap it")
        if self.fractions is not None:
            shares = np.asarray(self.fractions, np.float64)
            if shares.shape != (self.num_stages,) or (shares <= 0).any() or abs(shares.sum() - 1) > 1e-6:
                raise ValueError(
                    f"fractions={self.fractions!r} must be {self.num_stages} numbers above 0 that sum to one: "
                    "leave it out for even stages"
                )
        RandomizedResponseWithPrior(self.epsilon, self.prior)  # refuses the prior that does not fit

    def fit(self, X: Arrays, y: Arrays, **fit_arguments: object) -> MultiStageTraining:
        """Releases the labels and trains.

        Args:
            X: Features [n, ...], public.
            y: Labels [n].
            **fit_arguments: What the model's `fit` takes, for every stage alike: `epochs`, `batch_size`,
                `validation_data` (one-hot labels, or positions of classes, as the loss wants them), `callbacks`, ….
        """
        self._check()
        if "sample_weight" in fit_arguments:
            raise ValueError(
                "sample_weight has a weight for each example, but a stage trains on some of them, and weights that "
                "follow the true labels reveal them. Give class_weight={class: weight}, chosen without the labels."
            )
        X = np.asarray(X)
        values, _ = _labels.read(y)
        _labels.check_lengths(X, values)
        if self.num_stages > len(values):
            raise ValueError(f"num_stages={self.num_stages} but there are {len(values)} examples: take fewer stages")
        self.classes_ = _labels.find_classes(values, self.num_classes, self.classes)
        codes = _labels.encode(values, self.classes_)
        self.stage_ = self._split(len(codes))
        noisy = np.full(len(codes), -1)
        prior, self.histories_, self.mechanisms_ = self.prior, [], []
        self._spend_on_release(*self._cost())  # once: no label is in two stages
        for stage in range(self.num_stages):
            here = self.stage_ == stage
            seed = None if self.seed is None else int(self._uniforms()(1)[0] * 2**53)
            mechanism = RandomizedResponseWithPrior(self.epsilon, prior, len(self.classes_), seed)
            noisy[here] = mechanism.fit_transform(X[here], codes[here])
            self.mechanisms_.append(mechanism)
            released = self.stage_ <= stage
            self.model_ = self.model_fn()
            targets = np.eye(len(self.classes_), dtype=np.float32)[noisy[released]] if self.one_hot else noisy[released]
            self.histories_.append(self.model_.fit(X[released], targets, **fit_arguments))
            prior = self._prior_from(self.model_, mechanism if stage == 0 else None)
        self.noisy_labels_ = _labels.decode(noisy, self.classes_, values)
        return self

    def _prior_from(self, model: Model, first: RandomizedResponseWithPrior | None) -> PublicPrior:
        """The guess of a model that saw released labels only."""
        softmax = PublicPrior(model, temperature=self.temperature)
        if first is None or not self.debias:
            return softmax
        undo = self._undo(first)
        if undo is None:
            return softmax
        size = len(first.classes_)

        def debiased(X: np.ndarray) -> np.ndarray:
            guess = np.maximum(undo(softmax.table(X, np.arange(size), len(X))), 0)
            guess /= guess.sum(axis=1, keepdims=True)  # rows of T⁻¹ sum to one, so some entry is above 0
            return (1 - _DOUBT) * guess + _DOUBT / size

        return PublicPrior(debiased, from_logits=False)

    def _undo(self, first: RandomizedResponseWithPrior) -> Callable[[np.ndarray], np.ndarray] | None:
        """What turns probabilities of released labels [n, K] into those of true ones, if there is such a thing."""
        if first.prior is None:
            return lambda table: debiased_by_response(table, first.epsilon)
        matrix = first.transition_matrix_
        if matrix.ndim != 2:
            return None
        try:
            inverse = inverse_of(matrix)
        except ValueError:  # the first stage had a prior that leaves classes out
            return None
        return lambda table: table @ inverse

    def predict_proba(self, X: Arrays) -> np.ndarray:
        """The last model's probabilities, [n, K]."""
        check_is_fitted(self, "model_")
        return PublicPrior(self.model_).table(np.asarray(X), self.classes_, len(X))

    def predict(self, X: Arrays) -> np.ndarray:
        """The likeliest class, [n]."""
        return self.classes_[self.predict_proba(X).argmax(axis=1)]

    def score(self, X: Arrays, y: Arrays) -> float:
        """Accuracy."""
        return float(np.mean(self.predict(X) == _labels.read(y)[0]))

    def _cost(self) -> list[tuple[float, int]]:
        first = RandomizedResponseWithPrior(self.epsilon, self.prior)._cost()
        # A label is in one stage. In the first one the prior pays a part; in a later one its release is all of ε at
        # once, which composes worse.
        return first if self.num_stages == 1 else [(float(self.epsilon), 2)]

    def _split(self, n: int) -> np.ndarray:
        """The stage of each example: sizes are fixed, who is where is random."""
        shares = np.full(self.num_stages, 1 / self.num_stages) if self.fractions is None else np.asarray(self.fractions)
        ends = np.maximum(np.round(np.cumsum(shares) * n).astype(int), np.arange(1, self.num_stages + 1))
        ends = np.minimum(ends, n - np.arange(self.num_stages - 1, -1, -1))  # none is empty
        stage = np.empty(n, np.intp)
        stage[self._uniforms()(n).argsort()] = np.searchsorted(ends, np.arange(n), "right")
        return stage
