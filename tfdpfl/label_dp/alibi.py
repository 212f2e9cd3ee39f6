"""ALIBI: Laplace noise on one-hot labels, and Bayes to make the best of it."""

from __future__ import annotations

import numpy as np
from scipy import special
from sklearn.utils.validation import check_is_fitted

from tfdpfl._types import Arrays, Prior
from tfdpfl.label_dp import _labels
from tfdpfl.label_dp._base import ClassTransformer, noisy_counts
from tfdpfl.label_dp.priors import check_probabilities

__all__ = ["ALIBI"]

# Noisy vectors are whole multiples of 1/1024. The low bits of floating-point Laplace noise tell the label (Mironov
# 2012, "On significance of the least significant bits for differential privacy"); integers have none.
_STEPS = 1024


class ALIBI(ClassTransformer):
    """Soft labels: one-hot labels with Laplace noise, turned into the probability of each class given the noisy vector.

        alibi = ALIBI(epsilon=1.0, num_classes=10)
        soft = alibi.fit_transform(y)                       # [n, K], for categorical_crossentropy
        soft = alibi.posterior(model.predict_proba(X))      # the same release under a better prior, for nothing

    Promise: the noisy vectors (`noisy_`), and all that follows from them, are ε-DP when one label is replaced. One-hot
    vectors of two labels are 2 apart in L1, and every coordinate has Laplace noise of scale 2/ε, on a fine grid (Malek
    et al. 2021, arXiv:2106.03408).

    Args:
        epsilon: ε > 0 of one release.
        num_classes: K, for integer labels 0..K-1.
        prior: Probabilities [K] or [n, K] that Bayes starts from, public; None: uniform.
        seed: None takes the operating system's entropy; a seed is for tests.
        classes: All classes, for other labels. Without either those that the labels name, as public knowledge.

    Attributes:
        classes_: [K].
        noisy_: [n, K], the last release.
        releases_, dp_event, ledger, epsilon_spent: How often, and the price of all.

    Raises:
        ValueError: for arguments out of range, or a label that is none of the classes.
    """

    def __init__(
        self,
        epsilon: float,
        num_classes: int | None = None,
        *,
        prior: Prior = None,
        seed: int | None = None,
        classes: Arrays = None,
    ):
        self.epsilon, self.num_classes, self.prior, self.seed, self.classes = epsilon, num_classes, prior, seed, classes
        self._check()

    def transform(self, y: Arrays) -> np.ndarray:
        """Releases noisy labels and returns the posterior, float64 [n, K]; one release, whatever y holds."""
        check_is_fitted(self, "classes_")
        self._check()  # set_params may have been called since
        codes = _labels.encode(_labels.read(y)[0], self.classes_)
        steps = np.zeros((len(codes), len(self.classes_)))
        steps[np.arange(len(codes)), codes] = _STEPS
        noisy = noisy_counts(steps, self.epsilon / (2 * _STEPS), self._uniforms(), 2 * _STEPS)
        self._spend_on_release((float(self.epsilon), 2))
        self.noisy_ = noisy / _STEPS
        return self.posterior(self.prior)

    def posterior(self, prior: Prior = None) -> np.ndarray:
        """P(label | noisy vector) of the last release, [n, K]; costs nothing more.

        Args:
            prior: Probabilities [K] or [n, K] from public knowledge or from a model that saw only released labels;
                None: uniform.
        """
        check_is_fitted(self, "noisy_")
        size = len(self.classes_)
        table = check_probabilities(np.full(size, 1 / size) if prior is None else prior, size)
        if len(table) not in (1, len(self.noisy_)):
            raise ValueError(f"prior has {len(table)} rows for {len(self.noisy_)} examples: give one row for each")
        # log density of the vector if the label is k, up to what all classes share.
        evidence = (abs(self.noisy_) - abs(self.noisy_ - 1)) * (self.epsilon / 2)
        with np.errstate(divide="ignore"):
            return special.softmax(evidence + np.log(table), axis=1)

    def get_feature_names_out(self, input_features: Arrays = None) -> np.ndarray:
        """A column for each class, for `set_output`."""
        check_is_fitted(self, "classes_")
        return np.array([f"label_{label}" for label in self.classes_], dtype=object)
