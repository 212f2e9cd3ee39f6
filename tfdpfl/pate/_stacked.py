"""Many models of one architecture as one model whose variables have a leading axis of teachers.

One step of the stack is one step of each of its models, on its own batch. Products become batched products. An
optimizer that works number by number does not know the difference. The costs of a small model (Python, the
dispatch of operations, the tracing of a graph) are then paid once for all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdpfl._types import Arrays, Layer, Loss, Model, Optimizer
from tfdpfl.pate._model_fingerprint import foreign, own

__all__ = ["Stack", "why_not"]

# They work number by number, so that a stacked variable is updated as its slices would be.
_OPTIMIZERS = frozenset("SGD Adam AdamW Nadam Adamax Adagrad Adadelta RMSprop Lion".split())
# No weights to train, and each example by itself: the stack shows them its teachers' batches as one. (`Activation` and
# `Softmax` are asked what they do. Models whose `Normalization` learned other statistics are not alike.)
_WEIGHTLESS = frozenset(
    "Activation ReLU LeakyReLU ELU Softmax Flatten Reshape Permute Rescaling Dropout MaxPooling1D MaxPooling2D "
    "AveragePooling1D AveragePooling2D GlobalAveragePooling1D GlobalAveragePooling2D GlobalMaxPooling2D ZeroPadding2D "
    "InputLayer Normalization".split()
)
# Keras's losses that give a number for each example, from that example alone. Not so Dice and Tversky, or what a user
# wrote: they see a teacher's batch at a time, as in `fit`.
_ROW_WISE = frozenset(
    "SparseCategoricalCrossentropy CategoricalCrossentropy BinaryCrossentropy CategoricalFocalCrossentropy "
    "BinaryFocalCrossentropy MeanSquaredError MeanAbsoluteError Huber KLDivergence Poisson Hinge SquaredHinge "
    "CategoricalHinge LogCosh CosineSimilarity".split()
)


def why_not(model: Model) -> str | None:
    """Returns why a compiled Keras model cannot be stacked; None if it can."""
    chain = _chain(model)
    if chain is None:
        return "it is not a chain of layers"
    for layer in chain:
        reason = _layer_obstacle(layer)
        if reason:
            return f"layer {layer.name!r}: {reason}"
    if getattr(model, "optimizer", None) is None or not model.loss:
        return "it is not compiled"
    reason = _optimizer_obstacle(model.optimizer)
    if reason:
        return reason
    return None if len(model.output_shape) == 2 else "its output is no vector"


def _optimizer_obstacle(optimizer: Optimizer) -> str | None:
    if type(optimizer).__name__ not in _OPTIMIZERS or not own(optimizer):
        return f"optimizer {type(optimizer).__name__} may look beyond one number at a time"
    config = optimizer.get_config()
    used = ("clipnorm", "global_clipnorm", "use_ema", "gradient_accumulation_steps", "loss_scale_factor")
    blocking = [name for name in used if config.get(name)]
    if blocking:
        return f"optimizer option {blocking[0]}"
    if any(value for name, value in vars(optimizer).items() if name.startswith("_exclude_from_weight_decay")):
        return "its optimizer spares some weights the decay"
    return None


def row_wise_loss(loss: Loss) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None:
    """Returns a loss that gives `[examples]`, from what `compile` took; None if it is not known that examples keep
    apart in it, or that `fit` takes their mean."""
    try:
        resolved = tf.keras.losses.get(loss)
        name = getattr(resolved, "__name__", type(resolved).__name__)
        if not isinstance(resolved, tf.keras.losses.Loss):
            name = "".join(word.capitalize() for word in name.split("_"))
        else:
            config = resolved.get_config()
            one_axis = config.get("axis", -1) == -1 and config.get("ignore_class") is None
            if not one_axis or resolved.reduction not in ("auto", "sum_over_batch_size"):
                return None
            resolved = type(resolved).from_config({**config, "reduction": "none"})
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return None
    return resolved if name in _ROW_WISE and not foreign(resolved) else None


def _aligned(y: tf.Tensor, outputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Labels `[n]` beside one output `[n, 1]` become `[n, 1]`, as in `fit`: else a loss would pair all with all."""
    return (y[:, None] if outputs.shape[-1] == 1 and y.shape.rank == 1 else y), outputs


def right(y: tf.Tensor, outputs: tf.Tensor, limit: float) -> tf.Tensor:
    """Which outputs `[..., K]` name the class that the labels do: `[...]`, `[..., 1]` or one-hot `[..., K]`.

    Args:
        limit: From where a single output means the second of two classes.
    """
    if y.shape.rank == outputs.shape.rank:
        y = tf.argmax(y, -1) if y.shape[-1] > 1 else y[..., 0]
    said = tf.argmax(outputs, -1) if outputs.shape[-1] > 1 else tf.cast(outputs[..., 0] > limit, tf.int64)
    return tf.cast(y, tf.int64) == said


class Stack:
    """`len(weights)` models in one.

    Args:
        model: A compiled Keras model that `why_not` has nothing against.
        weights: For each model what its `get_weights` gives.
        limit: See `right`.
    """

    def __init__(self, model: Model, weights: list[list[np.ndarray]], limit: float = 0.5) -> None:
        self._model, self._chain = model, _chain(model) or []
        self.teachers, self._limit = len(weights), limit
        trainable = [bool(w.trainable) for w in model.weights]
        self._variables = [
            tf.Variable(np.stack([w[i] for w in weights]), trainable=flag) for i, flag in enumerate(trainable)
        ]
        positions = {id(w): i for i, w in enumerate(model.weights)}
        self._weights_of = [[self._variables[positions[id(w)]] for w in layer.weights] for layer in self._chain]
        self._trainable = [v for v in self._variables if v.trainable]
        self._loss = row_wise_loss(model.loss)
        self._optimizer = type(model.optimizer).from_config(model.optimizer.get_config())
        self._optimizer.build(self._trainable)
        self._optimizer_start = [np.array(v) for v in self._optimizer.variables]
        self._pass = tf.function(self._run_pass, reduce_retracing=True)
        self._classify = tf.function(self._forward, reduce_retracing=True)

    def load(self, weights: list[list[np.ndarray]]) -> None:
        """Takes other models of the same number and architecture, untrained: the graphs are traced once for all."""
        for i, variable in enumerate(self._variables):
            variable.assign(np.stack([w[i] for w in weights]))
        for variable, value in zip(self._optimizer.variables, self._optimizer_start, strict=True):
            variable.assign(value)

    def train_epoch(
        self, x: tf.Tensor, y: tf.Tensor, order: np.ndarray, batch_size: int, weight: tf.Tensor | None = None
    ) -> dict[str, np.ndarray]:
        """One pass of each model over its data. Returns loss and accuracy on the way, `[teachers]` each.

        Args:
            x: `[teachers, n, ...]`.
            y: `[teachers, n, ...]`.
            order: For each teacher a permutation of n, `[teachers, n]`.
            batch_size: As in `fit`; the last batch may be smaller.
            weight: Of each example in the loss, `[teachers, n]`; None for 1.
        """
        return self._means_of_pass(x, y, weight, order, batch_size, training=True)

    def evaluate(self, x: tf.Tensor, y: tf.Tensor, batch_size: int) -> dict[str, np.ndarray]:
        """Loss and accuracy of each model, `[teachers]` each, on data of its own, `[teachers, n, ...]`."""
        order = np.tile(np.arange(x.shape[1]), (self.teachers, 1))
        return self._means_of_pass(x, y, None, order, batch_size, training=False)

    def _means_of_pass(
        self, x: tf.Tensor, y: tf.Tensor, weight: tf.Tensor | None, order: np.ndarray, batch_size: int, training: bool
    ) -> dict[str, np.ndarray]:
        sums = self._pass(x, y, weight, tf.constant(order, tf.int32), tf.constant(batch_size, tf.int32), training)
        loss, hits = sums.numpy() / order.shape[1]
        return {"loss": loss, "accuracy": hits}

    def _run_pass(
        self, x: tf.Tensor, y: tf.Tensor, weight: tf.Tensor | None, order: tf.Tensor, batch_size: tf.Tensor,
        training: bool,
    ) -> tf.Tensor:  # fmt: skip
        examples, sums = tf.shape(order)[1], tf.zeros([2, self.teachers])
        for start in tf.range(0, examples, batch_size):
            rows = order[:, start : tf.minimum(start + batch_size, examples)]
            x_batch, y_batch, w_batch = (
                None if each is None else tf.gather(each, rows, batch_dims=1) for each in (x, y, weight)
            )
            sums += self._step(x_batch, y_batch, w_batch, training)
        return sums

    def _step(self, x: tf.Tensor, y: tf.Tensor, weight: tf.Tensor | None, training: bool) -> tf.Tensor:
        with tf.GradientTape() as tape:
            outputs = self._apply(x, training)
            losses = self._losses(y, outputs, weight)
            total = tf.reduce_sum(losses)  # no model's gradient has a part of another's
        if training:
            gradients = tape.gradient(total, self._trainable)
            self._optimizer.apply_gradients(zip(gradients, self._trainable, strict=True))
        return self._sums(y, outputs, losses)

    def _losses(self, y: tf.Tensor, outputs: tf.Tensor, weight: tf.Tensor | None) -> tf.Tensor:
        """What `fit` would minimise for each model, `[teachers]`."""
        if self._loss is not None:
            each = tf.reshape(self._loss(*_aligned(_merged(y), _merged(outputs))), [self.teachers, -1])
            return tf.reduce_mean(each if weight is None else each * weight, axis=1)
        return tf.stack(
            [
                self._model.compute_loss(None, y[t], outputs[t], None if weight is None else weight[t])
                for t in range(self.teachers)
            ]
        )

    def _sums(self, y: tf.Tensor, outputs: tf.Tensor, losses: tf.Tensor) -> tf.Tensor:
        hits = tf.cast(right(y, outputs, self._limit), tf.float32)
        return tf.stack([losses * tf.cast(tf.shape(hits)[1], losses.dtype), tf.reduce_sum(hits, axis=1)])

    def outputs(self, x: Arrays) -> tf.Tensor:
        """Returns what each model says to the same batch `[batch, ...]`: `[teachers, batch, ...]`."""
        return self._classify(tf.convert_to_tensor(x))

    def _forward(self, x: tf.Tensor) -> tf.Tensor:
        return self._apply(x[None], training=False)

    def weights(self) -> list[list[np.ndarray]]:
        """For each model its weights, as `set_weights` takes them."""
        arrays = [v.numpy() for v in self._variables]
        return [[array[t] for array in arrays] for t in range(self.teachers)]

    def _apply(self, x: tf.Tensor, training: bool) -> tf.Tensor:
        x = tf.cast(x, tf.float32)
        for layer, weights in zip(self._chain, self._weights_of, strict=True):
            kind = type(layer).__name__
            if kind == "Dense":
                x = _activated(layer, _plus(tf.matmul(x, weights[0]), weights[1:]))
            elif kind == "Conv2D":
                x = _activated(layer, _plus(_convolution(layer, x, weights[0], self.teachers), weights[1:]))
            elif kind == "BatchNormalization":
                x = _batch_normalization(layer, x, weights, training)
            elif kind == "Activation":
                x = _activated(layer, x)
            elif kind == "Softmax" and layer.axis not in (-1, x.shape.rank - 2):
                x = _one_by_one(layer, x)
            elif kind != "InputLayer":
                options = {"training": training} if kind == "Dropout" else {}
                flat = layer(_merged(x), **options)
                teachers, shape = x.shape[0], tf.shape(x)
                x = tf.reshape(flat, tf.concat([shape[:2], tf.shape(flat)[1:]], 0))
                x.set_shape([teachers, None, *flat.shape[1:]])
        return x


def _activated(layer: Layer, x: tf.Tensor) -> tf.Tensor:
    """The layer's activation: Keras's own know no other example, anything else sees a teacher's batch at a time."""
    function = layer.activation
    home = getattr(function, "__module__", "").split(".")
    return function(x) if own(function) and "activations" in home else _one_by_one(function, x)


def _one_by_one(function: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor) -> tf.Tensor:
    return tf.stack([function(x[t]) for t in range(x.shape[0])])


def _plus(x: tf.Tensor, bias: list[tf.Variable]) -> tf.Tensor:
    if not bias:
        return x
    return x + tf.reshape(bias[0], [-1, *[1] * (x.shape.rank - 2), bias[0].shape[-1]])


def _convolution(layer: Layer, x: tf.Tensor, kernels: tf.Variable, teachers: int) -> tf.Tensor:
    # One convolution a teacher, in one graph: TensorFlow has grouped ones, but their gradients are no faster on a CPU.
    shared = x.shape[0] == 1
    return tf.stack(
        [
            tf.nn.conv2d(x[0 if shared else t], kernels[t], list(layer.strides), layer.padding.upper())
            for t in range(teachers)
        ]
    )


def _batch_normalization(layer: Layer, x: tf.Tensor, weights: list[tf.Variable], training: bool) -> tf.Tensor:
    weights = list(weights)
    gamma = weights.pop(0) if layer.scale else None
    beta = weights.pop(0) if layer.center else None
    moving_mean, moving_variance = weights
    # A teacher's statistics are of its own batch: every axis but its own and the channels.
    aligned = lambda v: tf.reshape(v, [-1, *[1] * (x.shape.rank - 2), v.shape[-1]])  # noqa: E731
    if training:
        mean, variance = tf.nn.moments(x, list(range(1, x.shape.rank - 1)))
        for moving, value in ((moving_mean, mean), (moving_variance, variance)):
            moving.assign(moving * layer.momentum + value * (1 - layer.momentum))
    else:
        mean, variance = moving_mean, moving_variance
    scale, offset = (None if v is None else aligned(v) for v in (gamma, beta))
    return tf.nn.batch_normalization(x, aligned(mean), aligned(variance), offset, scale, layer.epsilon)


def _merged(x: tf.Tensor) -> tf.Tensor:
    """`[teachers, batch, ...]` as `[teachers·batch, ...]`."""
    shape = x.shape[2:]
    if shape.is_fully_defined():
        return tf.reshape(x, [-1, *shape])
    return tf.reshape(x, tf.concat([[-1], tf.shape(x)[2:]], 0))


def _chain(model: Model) -> list[Layer] | None:
    """The model's layers where each one's output is the next one's only input."""
    layers = getattr(model, "layers", None)
    if not layers or not getattr(model, "built", False):
        return None
    if type(model) is tf.keras.Sequential:
        return list(layers)
    if type(model).__name__ != "Functional":
        return None
    try:
        linked = all(b.input is a.output for a, b in itertools.pairwise(layers))
        ends = len(model.outputs) == 1 and len(model.inputs) == 1 and layers[-1].output is model.outputs[0]
    except (AttributeError, ValueError, RuntimeError):
        return None
    return list(layers) if linked and ends else None


def _layer_obstacle(layer: tf.keras.layers.Layer) -> str | None:
    if not own(layer):
        return "it is not Keras's own"
    config = layer.get_config()
    learned = layer.trainable_weights if type(layer).__name__ == "Normalization" else layer.weights  # it counts, too
    if any("float32" not in str(w.dtype) for w in learned) or "mixed" in str(config.get("dtype")):
        return "it is not float32"
    if not layer.trainable or getattr(layer, "losses", None):
        return "it is frozen or has a loss of its own"
    if any(config.get(name) for name in config if name.endswith(("_regularizer", "_constraint"))):
        return "it has a regularizer or a constraint"
    kind = type(layer).__name__
    if kind in _WEIGHTLESS:
        return "it repeats its noise" if kind == "Dropout" and layer.noise_shape else None
    obstacle = _OBSTACLES.get(kind)
    return f"{kind} is not known" if obstacle is None else obstacle(layer)


def _dense_obstacle(layer: tf.keras.layers.Dense) -> str | None:
    return None if len(layer.kernel.shape) == 2 and len(layer.input.shape) == 2 else "its input is no vector"


def _convolution_obstacle(layer: tf.keras.layers.Conv2D) -> str | None:
    plain = layer.data_format == "channels_last" and layer.groups == 1 and math.prod(layer.dilation_rate) == 1
    return None if plain else "it is dilated, grouped or has its channels first"


def _normalization_obstacle(layer: tf.keras.layers.BatchNormalization) -> str | None:
    axis = layer.axis[0] if isinstance(layer.axis, (list, tuple)) else layer.axis
    config = layer.get_config()
    last = axis in (-1, len(layer.input.shape) - 1)
    return None if last and not config.get("renorm") and not config.get("synchronized") else "its axis or mode"


_OBSTACLES = {
    "Dense": _dense_obstacle, "Conv2D": _convolution_obstacle, "BatchNormalization": _normalization_obstacle,
}  # fmt: skip
