"""Names for the kinds of values that TensorFlow, TFF, scikit-learn and dp-accounting have no types for. A checker takes
them as they come. A reader learns what they are."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = [
    "Arrays",
    "Axes",
    "Callback",
    "Computation",
    "Dataset",
    "DpEvent",
    "Estimator",
    "Json",
    "JsonValue",
    "Keywords",
    "Layer",
    "Loss",
    "Model",
    "Nest",
    "Optimizer",
    "Prior",
    "PrivacyLosses",
    "Promiser",
    "Report",
    "State",
    "Variable",
]

Arrays: TypeAlias = Any  # arrays, tensors or data frames, or nests of them, as Keras and scikit-learn take them
Dataset: TypeAlias = Any  # a tf.data.Dataset, or another source of batches
DpEvent: TypeAlias = Any  # an event of dp-accounting, which has no types and is imported by the first price
PrivacyLosses: TypeAlias = Any  # its privacy loss distribution, or a part of one
Model: TypeAlias = Any  # a Keras model, of Keras 2 or 3
Layer: TypeAlias = Any  # a Keras layer
Variable: TypeAlias = Any  # a variable of TensorFlow, or of Keras 3
Callback: TypeAlias = Any  # a Keras callback
Loss: TypeAlias = Any  # a Keras loss
Optimizer: TypeAlias = Any  # a Keras optimizer
Nest: TypeAlias = Any  # a nest of tensors, or of what stands for them
State: TypeAlias = Any  # what a TFF process keeps from one round to the next
Computation: TypeAlias = Any  # a computation, process, factory or type of TFF, or what executes it
Estimator: TypeAlias = Any  # a scikit-learn estimator
Prior: TypeAlias = Any  # probabilities of labels, or an estimator of them
Promiser: TypeAlias = Any  # whatever spends privacy: an object with a method promises(delta)
Report: TypeAlias = Any  # a tfdpfl.reports.ProjectReport, or a part or a total of one
Axes: TypeAlias = Any  # axes of matplotlib
JsonValue: TypeAlias = Any  # a value that JSON can hold
Json: TypeAlias = dict[str, JsonValue]  # values that JSON can hold, by name
Keywords: TypeAlias = dict[str, Any]  # arguments by name
