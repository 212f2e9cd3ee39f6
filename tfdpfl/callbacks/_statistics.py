"""Says which statistics of a model's preprocessing layers ε does not cover."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from tfdpfl._types import Layer, Model
from tfdpfl.accounting import PrivacyLedger

__all__ = ["uncovered_statistics"]


def uncovered_statistics(model: Model, ledger: PrivacyLedger) -> Iterator[str]:
    """Yields a sentence for layers that Keras's `adapt` taught, and one for layers whose ledger is not in this one."""
    layers = list(model._flatten_layers())
    inner = {id(getattr(layer, "_lookup_layer", None)) for layer in layers}  # of TextVectorization
    layers = [layer for layer in layers if id(layer) not in inner]
    plain = [layer for layer in layers if not hasattr(layer, "ledger") and _learned(layer)]
    if plain:
        kinds = " or ".join(dict.fromkeys(f"tfdpfl.preprocessing.{_kind(layer)}" for layer in plain))
        yield (
            f"ε does not cover the statistics of {_names(plain)}: they count as public. If adapt learned them from "
            f"private data, use {kinds} instead."
        )
    private = [layer for layer in layers if isinstance(getattr(layer, "ledger", None), PrivacyLedger)]
    learned = PrivacyLedger()
    for other in {id(layer.ledger): layer.ledger for layer in private}.values():
        learned.merge(other)
    if private and not ledger.covers(learned):
        yield (
            f"ε does not include all that the adapt of {_names(private)} cost. Adapt these layers with one ledger, and "
            "pass it to PrivacyBudget as ledger=."
        )


def _names(layers: list[Layer]) -> str:
    return ", ".join(f"{layer.name!r} ({_kind(layer)})" for layer in layers)


def _kind(layer: Layer) -> str:
    return next(kind.__name__ for kind in _KINDS if isinstance(layer, kind))


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
