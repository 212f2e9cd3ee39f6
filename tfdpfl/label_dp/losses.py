"""Cross-entropy for labels that went through a known noise; Keras losses, on Keras 2 and Keras 3."""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from tfdpfl._types import Arrays, Json
from tfdpfl.accounting import _checks
from tfdpfl.label_dp._events import check_epsilon
from tfdpfl.label_dp._top_k import keep_probability, response_matrix
from tfdpfl.label_dp.counts import check_condition, inverse_of

__all__ = ["ALIBILoss", "BackwardCorrectedLoss", "ForwardCorrectedLoss"]

_DOC = """
    Args:
        transition_matrix: [K, K], P(released = j | label = i): a transformer's `transition_matrix_`. Or instead:
        epsilon, num_classes: of `RandomizedResponse`.
        from_logits: Whether the model's outputs are logits; else probabilities.
        reduction, name: As in every Keras loss.

    Labels are the released ones, classes 0..K-1 `[n]` or `[n, 1]`, or one-hot `[n, K]`. Outputs are `[n, K]`; for two
    classes also `[n, 1]`, one sigmoid (or its logit) for class 1.

    Raises:
        ValueError: The matrix is no [K, K] of rows that sum to one, or cannot be inverted, or both or none of the two
            descriptions is given; in a call, labels or outputs have another shape.
        tf.errors.InvalidArgumentError: when run, a label is none of 0..K-1. In a function that XLA compiles, which
            cannot raise, the loss is NaN.
    """


class _Response:
    """Randomized response on K classes: T = lie·J + (keep - lie)·I, with J of ones. It needs no [K, K] numbers."""

    def __init__(self, epsilon: float | None, num_classes: int | None):
        epsilon = check_epsilon(epsilon, "give the ε of the randomized response")
        self.size = _checks.whole("num_classes", num_classes, 2, "count the classes")
        self.config: Json = {"epsilon": epsilon, "num_classes": self.size}
        log_keep = math.log(keep_probability(epsilon, self.size))
        self._log_lie, self._log_rest = log_keep - epsilon, log_keep + math.log(-math.expm1(-epsilon))
        check_condition(math.exp(-self._log_rest))

    @property
    def matrix(self) -> np.ndarray:
        return response_matrix(self.config["epsilon"], self.size)

    def log_released(self, log_probabilities: tf.Tensor) -> tf.Tensor:
        lies = self._log_lie + tf.reduce_logsumexp(log_probabilities, axis=-1, keepdims=True)
        return lies + tf.math.softplus(self._log_rest + log_probabilities - lies)

    def unbiased(self, released: tf.Tensor) -> tf.Tensor:
        lies = math.exp(self._log_lie) * tf.reduce_sum(released, axis=-1, keepdims=True)
        return (released - lies) * math.exp(-self._log_rest)


class _Matrix:
    """Any noise, by its matrix."""

    def __init__(self, transition_matrix: Arrays):
        self.matrix = matrix = np.asarray(transition_matrix, np.float64)
        square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1] and len(matrix) > 1
        if not square or (matrix < 0).any() or not np.allclose(matrix.sum(axis=1), 1, atol=1e-6):
            raise ValueError(
                f"transition_matrix must be [K, K] with rows that sum to one, got the shape {list(matrix.shape)}: "
                "several priors have several matrices; use the plain loss"
            )
        self.size, self._inverse = len(matrix), inverse_of(matrix)
        self.config: Json = {"transition_matrix": matrix.tolist()}

    def log_released(self, log_probabilities: tf.Tensor) -> tf.Tensor:
        """Returns log Σ_i T_ij·p_i without leaving logarithms: float16 and certain models stay finite."""
        log_matrix = tf.constant(np.log(np.maximum(self.matrix, 1e-30)), log_probabilities.dtype)
        return tf.reduce_logsumexp(log_probabilities[:, :, None] + log_matrix, axis=1)

    def unbiased(self, released: tf.Tensor) -> tf.Tensor:
        """Returns the weights of the classes' losses: the rows of T⁻¹ for the released labels."""
        return tf.matmul(released, tf.constant(self._inverse, released.dtype))


def _log_probabilities(y_pred: tf.Tensor, from_logits: bool) -> tf.Tensor:
    """Returns the logarithms of a model's outputs [n, K] as probabilities that sum to one."""
    if from_logits:
        return tf.nn.log_softmax(y_pred)
    tiny = tf.keras.backend.epsilon()
    return tf.math.log(tf.clip_by_value(y_pred / tf.reduce_sum(y_pred, -1, keepdims=True), tiny, 1.0))


class _NoisyLabelLoss(tf.keras.losses.Loss):
    def __init__(
        self,
        transition_matrix: Arrays = None,
        *,
        epsilon: float | None = None,
        num_classes: int | None = None,
        from_logits: bool = False,
        reduction: str = "sum_over_batch_size",
        name: str | None = None,
    ):
        super().__init__(reduction=reduction, name=name or type(self).__name__)
        if (transition_matrix is None) == (epsilon is None and num_classes is None):
            raise ValueError(
                "give either transition_matrix or both epsilon and num_classes, got "
                f"{'both' if transition_matrix is not None else 'neither'}: a transformer's transition_matrix_ will do"
            )
        self._noise = _Matrix(transition_matrix) if transition_matrix is not None else _Response(epsilon, num_classes)
        self.from_logits = from_logits

    @property
    def transition_matrix(self) -> np.ndarray:
        """[K, K], P(released = j | label = i)."""
        return self._noise.matrix

    def get_config(self) -> Json:
        return {**super().get_config(), **self._noise.config, "from_logits": self.from_logits}

    def _log_probabilities(self, y_pred: tf.Tensor) -> tf.Tensor:
        """[n, K]; one output for two classes is that of class 1."""
        size, width = self._noise.size, y_pred.shape[-1] if y_pred.shape.rank == 2 else None
        if width != size and (width, size) != (1, 2):
            one = " or [n, 1]" if size == 2 else ""
            raise ValueError(
                f"y_pred must be [n, {size}]{one}, an output for each class of the loss, got the shape {y_pred.shape}: "
                "give the model's last layer so many units, or the loss another num_classes"
            )
        if width == 1:
            y_pred = tf.concat([tf.zeros_like(y_pred) if self.from_logits else 1 - y_pred, y_pred], axis=-1)
        return _log_probabilities(y_pred, self.from_logits)

    def _one_hot(self, y_true: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """[n, K]; Keras may hand classes over as [n] or [n, 1], and as floats."""
        y_true = tf.convert_to_tensor(y_true)
        size, rank = self._noise.size, y_true.shape.rank
        if rank == 2 and y_true.shape[-1] == size:
            return tf.cast(y_true, dtype)
        if rank is not None and rank != 1 and not (rank == 2 and y_true.shape[-1] in (1, None)):
            raise ValueError(
                f"labels must be [n], [n, 1] or one-hot [n, {size}], got the shape {y_true.shape}: give one an example"
            )
        flat = tf.reshape(y_true, [-1])
        code = tf.cast(flat, tf.int32)
        known = (code >= 0) & (code < size) & (tf.cast(code, flat.dtype) == flat)
        told = f"labels must be whole numbers in 0..{size - 1}, the classes of the loss, got"
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(known), [told, flat])]):
            # XLA drops asserts: NaN is heard there, too.
            return tf.where(known[:, None], tf.one_hot(code, size, dtype=dtype), tf.constant(np.nan, dtype))


@tf.keras.utils.register_keras_serializable(package="tfdpfl")
class ForwardCorrectedLoss(_NoisyLabelLoss):
    __doc__ = (
        """Cross-entropy between the released label and what the model predicts for it: -log (Tᵀ·softmax)[ỹ].

        model.compile(loss=ForwardCorrectedLoss(epsilon=1.0, num_classes=10, from_logits=True), ...)

    Its minimiser is the distribution of the true labels, so the model's outputs mean true classes (Patrini et al. 2017,
    arXiv:1609.03683, Theorem 2). For `RandomizedResponse`. Under a prior (`RandomizedResponseWithPrior`) it is
    harmful: where only one class can be released, the label teaches nothing and the loss is flat.
    """
        + _DOC
    )

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        y_pred = tf.convert_to_tensor(y_pred)
        log_released = self._noise.log_released(self._log_probabilities(y_pred))
        return -tf.reduce_sum(self._one_hot(y_true, y_pred.dtype) * log_released, axis=-1)


@tf.keras.utils.register_keras_serializable(package="tfdpfl")
class BackwardCorrectedLoss(_NoisyLabelLoss):
    __doc__ = (
        """A loss whose mean over the noise is the plain cross-entropy of the true label: Σ_j T⁻¹[ỹ, j]·ℓ(f, j).

        model.compile(loss=BackwardCorrectedLoss(epsilon=1.0, num_classes=10, from_logits=True), ...)

    For randomized response it is [(e^ε + K - 1)·ℓ(f, ỹ) - Σ_j ℓ(f, j)] / (e^ε - 1) (Patrini et al. 2017,
    arXiv:1609.03683, Theorem 1). Unbiased, but unbounded below: stop early, or prefer `ForwardCorrectedLoss`.
    Undefined under a prior, whose matrix is singular.
    """
        + _DOC
    )

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        y_pred = tf.convert_to_tensor(y_pred)
        weights = self._noise.unbiased(self._one_hot(y_true, y_pred.dtype))
        return -tf.reduce_sum(weights * self._log_probabilities(y_pred), axis=-1)


@tf.keras.utils.register_keras_serializable(package="tfdpfl")
class ALIBILoss(tf.keras.losses.Loss):
    """Computes the negative log-likelihood of the noisy vectors that `ALIBI` released: -log Σ_k q_k·p_k.

    q are ALIBI's soft labels under its uniform prior, and p the model's probabilities. The gradient is that of the
    cross-entropy with the posterior under the prior p. So each step denoises the labels by what the model knows by then
    (Malek et al. 2021, arXiv:2106.03408). Plain cross-entropy with q learns the noise.

    Args:
        from_logits: Whether the model's outputs are logits; else probabilities.
        reduction, name: As in every Keras loss.

    Guarantee: It adds no noise and costs no ε. The soft labels are ε-DP, and so is all that is computed from them.

    Example:
        alibi = ALIBI(epsilon=1.0, num_classes=10)
        model.compile("adam", loss=ALIBILoss(from_logits=True))
        model.fit(x, alibi.fit_transform(y))
    """

    def __init__(self, from_logits: bool = False, reduction: str = "sum_over_batch_size", name: str = "ALIBILoss"):
        super().__init__(reduction=reduction, name=name)
        self.from_logits = from_logits

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        y_pred = tf.convert_to_tensor(y_pred)
        soft = tf.cast(y_true, y_pred.dtype)
        if y_pred.shape.rank != 2 or not soft.shape.is_compatible_with(y_pred.shape):
            raise ValueError(
                f"y_true must hold ALIBI's soft labels [n, K] for outputs [n, K], got the shapes {soft.shape} and "
                f"{y_pred.shape}: pass alibi.fit_transform(y) to fit, and keras.utils.to_categorical(y, K) to evaluate."
            )
        log_soft = tf.math.log(tf.maximum(soft, tf.keras.backend.epsilon()))
        return -tf.reduce_logsumexp(log_soft + _log_probabilities(y_pred, self.from_logits), axis=-1)

    def get_config(self) -> Json:
        return {**super().get_config(), "from_logits": self.from_logits}
