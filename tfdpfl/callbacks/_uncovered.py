"""Says what of a training ε does not cover: statistics of layers, and what callbacks decide by Keras's own figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfdpfl._frames import callbacks_of
from tfdpfl._types import Callback, Layer, Model
from tfdpfl.accounting import PrivacyLedger

__all__ = ["NO_DATA", "choices_by_public_figures", "uncovered_choices", "uncovered_statistics"]


_ONE_LEDGER = "Adapt these layers with one ledger, and pass it to PrivacyBudget as ledger=."


def uncovered_statistics(model: Model, ledger: PrivacyLedger, remedy: str = _ONE_LEDGER) -> Iterator[str]:
    """Yields a sentence for layers that Keras's `adapt` taught, and one for layers whose ledger is not in this one."""
    layers = list(model._flatten_layers())
    inner = {id(getattr(layer, "_lookup_layer", None)) for layer in layers}  # of TextVectorization
    layers = [layer for layer in layers if id(layer) not in inner]
    yield from _learned_in_public([layer for layer in layers if not hasattr(layer, "ledger") and _learned(layer)])
    private = [layer for layer in layers if isinstance(getattr(layer, "ledger", None), PrivacyLedger)]
    learned = PrivacyLedger()
    for other in {id(layer.ledger): layer.ledger for layer in private}.values():
        learned.merge(other)
    if private and not ledger.covers(learned):
        yield f"ε does not include all that the adapt of {_names(private)} cost. {remedy}"


def _learned_in_public(layers: list[Layer]) -> Iterator[str]:
    if layers:
        kinds = " or ".join(dict.fromkeys(f"tfdpfl.preprocessing.{_kind(layer)}" for layer in layers))
        yield (
            f"ε does not cover the statistics of {_names(layers)}: they count as public. If adapt learned them from "
            f"private data, use {kinds} instead."
        )


def uncovered_choices(call: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for callbacks of a call of `fit` that decide by what Keras measures on private examples."""
    found = [choice for choice in _choices(call) if call.get("validation_split") or not _of_validation(choice)]
    if found:
        yield (
            f"ε does not cover the decisions of {_listed(found)}, because Keras measures these figures on private data "
            "without noise. Put tfdpfl.callbacks.PrivateMetrics() first among the callbacks, or monitor a figure of "
            "public validation data."
        )


def choices_by_public_figures(call: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for callbacks of a call of `fit` that decide by figures of validation data."""
    found = [choice for choice in _choices(call) if not call.get("validation_split") and _of_validation(choice)]
    if found:
        yield f"ε holds if the validation data are public. They have a say in the decisions of {_listed(found)}."


def _choices(call: Mapping[str, Any]) -> list[Callback]:
    """The callbacks that decide by a figure of Keras, which no `PrivateMetrics` hides from them."""
    given = callbacks_of(call)
    hiding = [callback for callback in given if hasattr(callback, "hides")]
    return [
        callback
        for callback in given
        if isinstance(callback, _CHOOSING)
        and getattr(callback, "save_best_only", True)  # ModelCheckpoint else saves whatever the figure is
        and _figure(callback) not in NO_DATA
        and not any(each.hides(_figure(callback)) for each in hiding)
    ]


def _figure(choice: Callback) -> str:
    return getattr(choice, "monitor", "loss")  # TerminateOnNaN looks at the loss


def _of_validation(choice: Callback) -> bool:
    return _figure(choice).startswith("val_")


def _listed(choices: list[Callback]) -> str:
    return ", ".join(dict.fromkeys(f"{type(choice).__name__} (by {_figure(choice)!r})" for choice in choices))


def _names(layers: list[Layer]) -> str:
    return ", ".join(f"{layer.name!r} ({_kind(layer)})" for layer in layers)


def _kind(layer: Layer) -> str:
    return next((kind.__name__ for kind in _KINDS if isinstance(layer, kind)), type(layer).__name__)


def _learned(layer: Layer) -> bool:
    """Whether the layer has statistics that it was not made with."""
    if isinstance(layer, tf.keras.layers.Normalization):
        return layer.input_mean is None
    if isinstance(layer, tf.keras.layers.Discretization):
        return layer.num_bins is not None
    return isinstance(layer, _KINDS) and not getattr(layer, "_has_input_vocabulary", True)


_KINDS = tuple(
    getattr(tf.keras.layers, name)
    for name in ("Normalization", "Discretization", "TextVectorization", "StringLookup", "IntegerLookup")
)

NO_DATA = frozenset(("epsilon", "lr", "learning_rate"))  # logs that no example is in

_CHOOSING = tuple(
    getattr(tf.keras.callbacks, name)
    for name in ("EarlyStopping", "ReduceLROnPlateau", "ModelCheckpoint", "TerminateOnNaN")
)
