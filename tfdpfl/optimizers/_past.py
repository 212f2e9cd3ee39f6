"""Knows which DP optimizers stepped on the weights of a model in this process, so that none of their steps is lost.

A model may be compiled anew, its layers may be built into another model, and a layer may replace its variables (as
`quantize` of Keras 3 does). A file holds the table of one optimizer. So an optimizer takes the steps of those before it
into its table: when a `fit` begins, when a step is traced, and when it is saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import tensorflow as tf

from tfdpfl._types import Layer, Model, Variable
from tfdpfl.clipping.step_checks import raw_variable

if TYPE_CHECKING:
    from tfdpfl.optimizers._privatizer import GradientPrivatizer

__all__ = ["note", "stepped_on", "stepped_on_model", "take_in", "weights_of"]

_Privatizers = dict[int, "GradientPrivatizer"]

_STEPPED_ON: dict[int, _Privatizers] = {}  # by the id of a variable, which has no hash, or of a layer


def stepped_on(what: Variable | Layer) -> _Privatizers:
    """Returns the privatizers of the DP optimizers whose steps on a variable were traced in this process, or loaded
    with it, by id; of a layer those that stepped on variables of its own, which it may have replaced since. Other
    models may share it, and its own may have been compiled anew. Kept with the variable; later ones come into the same
    dictionary. (Not the optimizers, which are as large as the model.)"""
    what = raw_variable(what)
    if id(what) not in _STEPPED_ON:
        _STEPPED_ON[id(what)] = {}
        weakref.finalize(what, _STEPPED_ON.pop, id(what), None)
    return _STEPPED_ON[id(what)]


def stepped_on_model(model: Model) -> list[_Privatizers]:
    """Returns what `stepped_on` knows of each weight and each layer of a model."""
    return [stepped_on(each) for each in (*weights_of(model), *_layers_of(model))]


def weights_of(model: Model, kind: str = "weights") -> list[Variable]:
    """Returns a model's weights; of one that Keras 2 has not built yet, those of its layers that are."""
    try:
        return list(getattr(model, kind))
    except ValueError:
        return [v for layer in model.layers for v in weights_of(layer, kind)]


def _layers_of(model: Model) -> list[Layer]:
    """Returns the layers inside of a model, but not what is made of other layers."""
    layers = model._flatten_layers(include_self=False) if hasattr(model, "_flatten_layers") else []
    return [layer for layer in layers if not any(layer._flatten_layers(include_self=False))]


def note(privatizer: GradientPrivatizer, variables: Iterable[Variable], model: Model | None = None) -> None:
    """Notes whose weights the steps of an optimizer move, so that they count if the model is compiled anew."""
    moved = set()
    for v in variables:
        stepped_on(v)[id(privatizer)] = privatizer
        moved.add(id(raw_variable(v)))
    for layer in [] if model is None else _layers_of(model):
        if moved & {id(raw_variable(v)) for v in weights_of(layer)}:
            stepped_on(layer)[id(privatizer)] = privatizer


def take_in(privatizer: GradientPrivatizer, variables: Iterable[Variable], model: Model | None = None) -> None:
    """Has an optimizer take the steps of all others that stepped on the same weights into its saved table."""
    known = [*map(stepped_on, variables), *([] if model is None else stepped_on_model(model))]
    with tf.init_scope():
        if tf.executing_eagerly():
            privatizer.take_in(other for found in known for other in found.values())
