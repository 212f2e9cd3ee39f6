"""From what a user calls a model to what TFF trains, refusing what would not be private or would not work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import tensorflow as tf

from tfdpfl._types import State
from tfdpfl.errors import PrivacyError
from tfdpfl.federated._tff import keras_model_inside, tff

__all__ = [
    "CLIENT_RATES",
    "SERVER_RATES",
    "Loss",
    "MetricsFn",
    "ModelFn",
    "Optimizer",
    "Spec",
    "begin",
    "optimizer",
    "reconstruction_model_fn",
    "step",
    "trainable_model_fn",
    "variable_model_fn",
]

TffModel: TypeAlias = tff.learning.models.VariableModel | tff.learning.models.ReconstructionModel
ModelFn: TypeAlias = Callable[[], tf.keras.Model | TffModel] | tff.learning.models.FunctionalModel
Optimizer: TypeAlias = str | tff.learning.optimizers.Optimizer | Callable[[], tff.learning.optimizers.Optimizer]
MetricsFn: TypeAlias = Callable[[], Sequence[tf.keras.metrics.Metric]]
Loss: TypeAlias = tf.keras.losses.Loss
Spec: TypeAlias = Mapping[str, object] | Sequence[object]  # nests of tf.TensorSpec: (x, y), or {"x": ..., "y": ...}


def trainable_model_fn(
    model_fn: ModelFn, loss: Loss | None = None, input_spec: Spec | None = None, metrics_fn: MetricsFn | None = None
) -> Callable[[], tff.learning.models.VariableModel] | tff.learning.models.FunctionalModel:
    """Returns what TFF's builders take as ``model_fn``: a function that makes a `tff.learning.models.VariableModel`, or
    a functional model as it is.

    Args:
      model_fn: makes a new, uncompiled Keras model, or a new `tff.learning.models.VariableModel`, in every call; or is
        a `tff.learning.models.FunctionalModel`.
      loss: the loss of a Keras model.
      input_spec: (x, y), or a dict of "x" and "y", as `tf.TensorSpec` with a batch dimension of None: a client data
        set's ``element_spec``.
      metrics_fn: makes the metrics of a Keras model.

    Raises:
      TypeError: ``model_fn`` is none of those.
      ValueError: it returns the same model again, or a compiled one, or a loss or input_spec is missing.
      PrivacyError: the model has batch normalization.
    """
    if isinstance(model_fn, tff.learning.models.FunctionalModel):
        return model_fn
    if not _makes_keras(model_fn, tff.learning.models.VariableModel):
        return model_fn
    if loss is None or input_spec is None:
        raise ValueError(
            "model_fn returns a Keras model, so give its loss and input_spec too (the element_spec of a client's data "
            "set)."
        )
    if not isinstance(input_spec, Mapping | Sequence):
        raise TypeError(
            f"input_spec must be (x, y) or a dict of 'x' and 'y', got {input_spec!r}. Give the element_spec of a "
            "client's data set, which must have labels."
        )
    _check_batched(input_spec)
    _check_loss(loss, tf.keras.losses.Loss | list)

    def make() -> TffModel:
        metrics = None if metrics_fn is None else list(metrics_fn())
        return tff.learning.models.from_keras_model(model_fn(), loss=loss, input_spec=input_spec, metrics=metrics)

    return make


def variable_model_fn(
    model_fn: ModelFn, loss: Loss | None = None, input_spec: Spec | None = None, metrics_fn: MetricsFn | None = None
) -> Callable[[], tff.learning.models.VariableModel]:
    """Returns the same as `trainable_model_fn` where clients train by loops of this package.

    Raises:
      TypeError: a functional model, too.
    """
    make = trainable_model_fn(model_fn, loss, input_spec, metrics_fn)
    if not callable(make):
        raise TypeError(
            "model_fn must make a Keras or a variable model here, got a functional model. Give a function that makes "
            "the model, because the graph of its loss is read."
        )
    return make


def reconstruction_model_fn(
    model_fn: ModelFn, local_layers: Sequence[str], loss: Loss, input_spec: Spec | None = None
) -> Callable[[], tff.learning.models.ReconstructionModel]:
    """Returns what `tff.learning.algorithms.build_fed_recon` takes as ``model_fn``: a function that makes a
    `tff.learning.models.ReconstructionModel`.

    Args:
      model_fn: makes a new, uncompiled Keras model, or a new ReconstructionModel, in every call.
      local_layers: the names of a Keras model's layers that stay with the client.
      loss, input_spec: as for `trainable_model_fn`; a ReconstructionModel needs the loss as well.

    Raises:
      TypeError, PrivacyError: as for `trainable_model_fn`.
      ValueError: the same, or ``local_layers`` are not some of the layers, by name, in every call.
    """
    _check_loss(loss, tf.keras.losses.Loss)
    local = set(local_layers)
    if not _makes_keras(model_fn, tff.learning.models.ReconstructionModel):
        if local:
            raise ValueError(f"local_layers={local_layers!r} are of a Keras model: a ReconstructionModel has its own.")
        return model_fn
    if input_spec is None:
        raise ValueError("model_fn returns a Keras model. Give its input_spec, too: a client data set's element_spec.")
    _check_batched(input_spec)

    def make() -> TffModel:
        model = model_fn()
        names = [layer.name for layer in model.layers]
        if isinstance(local_layers, str) or not local or not local <= set(names):
            raise ValueError(
                f"local_layers={local_layers!r} must be a list of names of the model's layers, here {names}. Name the "
                "layers that stay with the client, since Keras numbers the others anew in every call."
            )
        return tff.learning.models.ReconstructionModel.from_keras_model_and_layers(
            model,
            global_layers=[layer for layer in model.layers if layer.name not in local],
            local_layers=[layer for layer in model.layers if layer.name in local],
            input_spec=input_spec,
        )

    with tf.Graph().as_default():
        learnt = make().global_trainable_variables
    if not learnt:
        raise ValueError(f"local_layers={local_layers!r} leave nothing for the clients to learn together. Name fewer.")
    return make


def _makes_keras(model_fn: ModelFn, other: type) -> bool:
    """Whether ``model_fn`` makes Keras models, and not models of TFF's kind ``other``; either is checked."""
    if not callable(model_fn) or isinstance(model_fn, tf.keras.Model):
        raise TypeError(
            f"model_fn must be a function that makes a model, got {type(model_fn).__name__}. Wrap its construction in "
            "a function, so that every call makes a new one."
        )
    with tf.Graph().as_default():
        model, again = model_fn(), model_fn()
        if not isinstance(model, tf.keras.Model | other):
            raise TypeError(
                f"model_fn returned {type(model).__name__}. Return an uncompiled tf.keras.Model or a "
                f"tff.learning.models.{other.__name__}"
            )
        if model is again:
            raise ValueError(
                "model_fn returned the same model twice. Build the model inside model_fn, since each call runs in a "
                "graph of its own."
            )
        inside = keras_model_inside(model) if isinstance(model, other) else model
        if inside is not None:
            _check_keras(inside)
    return not isinstance(model, other)


def _check_loss(loss: object, kinds: object) -> None:
    if not isinstance(loss, kinds):  # type: ignore[arg-type]
        raise TypeError(f"loss must be a tf.keras.losses.Loss, got {loss!r}. Give an object, no name or function.")


def _check_batched(input_spec: Spec) -> None:
    """Raises a `ValueError` where a spec is one of single examples: some of its tensors have no first axis to share."""
    specs = [leaf for leaf in tf.nest.flatten(input_spec) if isinstance(leaf, tf.TensorSpec)]
    if any(spec.shape.rank == 0 for spec in specs):
        given = ", ".join(f"{spec.dtype.name}{spec.shape}" for spec in specs)
        raise ValueError(
            f"input_spec={given} is of single examples. Models train on batches, whose first axis holds the examples. "
            "Batch the clients' data, for example with clients = clients.batch(16), and give clients.element_spec."
        )


def _check_keras(model: tf.keras.Model) -> None:
    if getattr(model, "_is_compiled", False):
        raise ValueError(
            "model_fn returned a compiled Keras model. Leave out compile(); clients and server have optimizers "
            "of their own, client_optimizer_fn and server_optimizer_fn."
        )
    for layer in model._flatten_layers(include_self=False, recursive=True):
        if isinstance(layer, tf.keras.layers.BatchNormalization):
            raise PrivacyError(
                f"Layer {layer.name!r} is a BatchNormalization. Its moving averages are not part of a client's update, "
                "so they would stay as they were made, and it couples examples. Use GroupNormalization, or "
                "tfdpfl.clipping.fix(model)."
            )


def optimizer(name: str, given: Optimizer, learning_rates: dict[str, float]) -> tff.learning.optimizers.Optimizer:
    """A TFF optimizer from itself, from a function that makes one, or from a name with its usual learning rate.

    Raises:
      TypeError: it is none of those; a Keras optimizer, for instance.
      ValueError: an unknown name.
    """
    build = tff.learning.optimizers
    if isinstance(given, str):
        makers = {
            "sgd": build.build_sgdm,
            "momentum": lambda learning_rate: build.build_sgdm(learning_rate, momentum=0.9),
            "adam": build.build_adam,
            "yogi": build.build_yogi,
        }
        if given not in makers:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, makers))} or an optimizer, got {given!r}.")
        return makers[given](learning_rate=learning_rates[given])
    if callable(given) and not isinstance(given, build.Optimizer):
        given = given()
    if not isinstance(given, build.Optimizer):
        raise TypeError(
            f"{name} must be a TFF optimizer, got {type(given).__name__}. Take tff.learning.optimizers.build_sgdm and "
            "its kind, or 'sgd', 'momentum', 'adam' or 'yogi'; Keras optimizers keep state where TFF cannot see it."
        )
    return given


def begin(optimizer: tff.learning.optimizers.Optimizer, weights: Sequence[tf.Variable]) -> State:
    """Returns the state that an optimizer of these weights begins with."""
    return optimizer.initialize(tuple(tf.TensorSpec(w.shape, w.dtype) for w in weights))


def step(
    optimizer: tff.learning.optimizers.Optimizer, state: State, weights: Sequence[tf.Variable], gradients: Sequence
) -> State:
    """Assigns to weights what an optimizer makes of them, and returns its new state."""
    values = tuple(tf.convert_to_tensor(weight) for weight in weights)
    state, new = optimizer.next(state, values, tuple(gradients))
    for weight, value in zip(weights, new, strict=True):
        weight.assign(value)
    return state


CLIENT_RATES = {"sgd": 0.1, "momentum": 0.1, "adam": 1e-3, "yogi": 1e-2}
SERVER_RATES = {"sgd": 1.0, "momentum": 1.0, "adam": 1e-2, "yogi": 1e-2}
