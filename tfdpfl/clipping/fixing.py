"""`fix`: a copy of a Keras model in which every layer that mixes examples is replaced."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpfl._types import Layer, Model, Nest, Variable
from tfdpfl.errors import PrivacyError

__all__ = ["fix"]

# Stands for an axis whose length the model leaves open. It is longer than the kernels of most convolutions.
_OPEN_AXIS = 16
_TOLERANCE = 1e-5
_REBUILD = "or build the model anew with GroupNormalization in place of BatchNormalization."
_CONFIG = f"Give the layer a get_config that holds all of its arguments, {_REBUILD}"


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Holds what `fix` returns: the new ``model``, and ``changes``, one sentence each."""

    model: Model
    changes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.changes) or "Nothing to change."


def fix(model: Model) -> Fixed:
    """Copies a Keras model, and replaces the layers of the copy that mix examples. If there are none, it returns the
    model itself.

    BatchNormalization becomes GroupNormalization (up to 32 groups of channels), or LayerNormalization after layers
    without spatial axes, with the same gamma and beta. Nested models and layers inside of your own layers are fixed,
    too. The statistics that a batch normalization had learned have no place in the new layer: train, or fine-tune. A
    frozen one (``trainable=False``, as in a pretrained model that is not trained) stays as it is. Keras then
    normalizes each example by the statistics that it has learned.

    All other layers keep what they learned: weights, statistics and vocabularies of `adapt`, states of random
    generators. Before it returns, `fix` compares the state and the output of each copied layer with the original's.
    Layers without weights, and layers that Keras cannot make from their config, are in both models. ``changes`` names
    the latter, because training one model then changes the other.

        fixed = tfdpfl.clipping.fix(model)
        print(fixed)
        fixed.model.compile(tfdpfl.DPAdam(1.0, 1.1), loss="sparse_categorical_crossentropy")

    Args:
      model: a Sequential or functional model, or a subclassed one whose get_config holds all of its arguments. It stays
        as it is.

    Raises:
      PrivacyError: the copy of a layer does not compute what the original does; or a BatchNormalization cannot be
        reached.
      TypeError: ``model`` is not a Keras model.
    """
    if not isinstance(model, tf.keras.Model):
        raise TypeError(f"model={model!r:.99} is not a Keras model. Pass a tf.keras.Model.")
    if not _mixes(model):
        return Fixed(model, ())
    changes: list[str] = []
    made = _copy_of_graph(model, changes) if _has_graph(model) else _copy_of_subclass(model, changes)
    for layer in made._flatten_layers():
        if _normalizes_a_batch(layer):
            raise PrivacyError(
                f"{layer.name!r} is a BatchNormalization that fix cannot reach, so the model would still mix examples. "
                "Use GroupNormalization in the code that makes it."
            )
    return Fixed(made, tuple(changes))


def _has_graph(model: Model) -> bool:
    return isinstance(model, tf.keras.Sequential) or any(c.__name__ == "Functional" for c in type(model).__mro__)


def _mixes(layer: Layer) -> bool:
    return any(map(_normalizes_a_batch, layer._flatten_layers()))


def _normalizes_a_batch(layer: Layer) -> bool:
    """Whether a layer is a BatchNormalization that normalizes a batch by itself. Keras's do not while frozen."""
    return isinstance(layer, tf.keras.layers.BatchNormalization) and layer.trainable


# -- models ------------------------------------------------------------------------------------------------------


def _copy_of_graph(model: Model, changes: list[str]) -> Model:
    """A copy of a Sequential or functional model, with its layers replaced where they mix examples."""
    copies: list[tuple[Layer, Layer]] = []
    replaced: set[str] = set()

    def of_layer(layer: Layer) -> Layer:
        if _normalizes_a_batch(layer):
            replaced.add(layer.name)
            return _replacement(layer, changes)
        if isinstance(layer, tf.keras.Model) and _has_graph(layer):
            return _copy_of_graph(layer, changes)
        if not getattr(layer, "weights", ()) and not isinstance(layer, tf.keras.layers.InputLayer):
            return layer
        try:
            made = layer.__class__.from_config(layer.get_config())
        except Exception as error:  # whatever a class of the user's raises
            return _shared(layer, error, changes)
        copies.append((layer, made))
        return made

    def called(layer: Layer, *args: Nest, **kwargs: Nest) -> Nest:
        if layer.name in replaced:  # BatchNormalization accepts arguments that its replacements do not
            kwargs = {k: v for k, v in kwargs.items() if k not in ("mask", "training")}
        return layer(*args, **kwargs)

    clone = tf.keras.models.clone_model
    takes_calls = "call_function" in inspect.signature(clone).parameters and not isinstance(model, tf.keras.Sequential)
    made = clone(model, clone_function=of_layer, **({"call_function": called} if takes_calls else {}))
    if type(made) is not type(model):
        raise _not_copied(f"{type(model).__name__} is a subclass of Model, of which Keras would copy the layers alone")
    for old, new in zip(model.layers, made.layers, strict=True):
        if old.name in replaced and old.built:
            new.set_weights([np.asarray(v) for v in (old.gamma, old.beta) if v is not None])
    flags = [(layer, layer.trainable) for layer in made._flatten_layers(include_self=False)]
    made.trainable = model.trainable  # which sets that of the layers, too
    for layer, trainable in flags:
        layer.trainable = trainable
    for old, new in copies:
        _copy_state(old, new)
        _replace_inside(new, changes)
    return made


def _copy_of_subclass(model: Model, changes: list[str]) -> Model:
    name = type(model).__name__
    shape = model.get_build_config()
    if not shape:
        raise PrivacyError(
            f"{name} is a subclassed model that has seen no input, so fix does not know what to copy. Call it on a "
            "batch before you fix it."
        )
    try:
        made = type(model).from_config(model.get_config())
        made.build_from_config(shape)
    except Exception as error:  # whatever a class of the user's raises
        raise _not_copied(f"{name} is a subclassed model, which Keras cannot make from its config") from error
    _copy_state(model, made)
    _replace_inside(made, changes)
    return made


def _not_copied(fact: str) -> PrivacyError:
    return PrivacyError(
        f"{fact}. So fix has no copy in which it could replace a layer. Use GroupNormalization in place of "
        "BatchNormalization in its code."
    )


def _shared(layer: Layer, error: Exception, changes: list[str]) -> Layer:
    if _mixes(layer):
        raise PrivacyError(
            f"{layer.name!r} ({type(layer).__name__}) holds a BatchNormalization, and cannot be copied: {error}. "
            f"{_CONFIG}"
        ) from error
    changes.append(
        f"{layer.name}: kept in both models, because Keras cannot make a {type(layer).__name__} from its config. "
        "Training one model changes it in the other."
    )
    return layer


def _replacement(layer: Layer, changes: list[str]) -> Layer:
    """A normalization of each example, in place of a BatchNormalization."""
    spec = getattr(layer, "input_spec", None)
    if spec is None or not spec.axes:
        raise PrivacyError(
            f"{layer.name!r} has seen no input, so its spatial axes are not known. Build the model before you fix it: "
            "model.build(input_shape), or a call on a batch."
        )
    ((axis, channels),) = spec.axes.items()
    common = dict(
        name=layer.name, epsilon=layer.epsilon, center=layer.center, scale=layer.scale, trainable=layer.trainable,
        dtype=getattr(layer, "dtype_policy", None),
    )  # fmt: skip
    if spec.ndim == 2:
        changes.append(f"{layer.name}: BatchNormalization → LayerNormalization")
        return tf.keras.layers.LayerNormalization(**common)
    groups = max(g for g in range(1, min(32, channels) + 1) if channels % g == 0)
    changes.append(f"{layer.name}: BatchNormalization → GroupNormalization(groups={groups})")
    return tf.keras.layers.GroupNormalization(groups=groups, axis=axis, **common)


# -- layers inside of layers -------------------------------------------------------------------------------------


def _replace_inside(layer: Layer, changes: list[str]) -> None:
    """Replaces what mixes examples among the attributes of a layer that is built."""
    if not _mixes(layer):
        return
    for name, value in list(vars(layer).items()):
        if name.startswith("_self_") or name in _names_of_keras():  # the former are TensorFlow's, for checkpoints
            continue
        changed = _replaced(value, changes)
        if changed is not value:
            _set_attribute(layer, name, changed, [v for v in tf.nest.flatten(value) if _is_layer(v)])
    if _mixes(type(layer).from_config(layer.get_config())):
        kind = type(layer).__name__
        changes.append(
            f"{layer.name}: {kind} still makes a BatchNormalization when Keras loads it from a file. Use "
            f"GroupNormalization in {kind} before you save the fixed model."
        )


@functools.cache
def _names_of_keras() -> frozenset[str]:
    """The attributes in which Keras itself keeps what it knows of a layer's layers."""
    return frozenset([*vars(tf.keras.layers.Layer()), *vars(tf.keras.Model())])


def _is_layer(value: Any) -> bool:
    return isinstance(value, tf.keras.layers.Layer)


def _replaced(value: Any, changes: list[str]) -> Any:
    """An attribute of a layer in which nothing mixes examples."""
    if isinstance(value, list | tuple):
        items = [_replaced(item, changes) for item in value]
        same = all(a is b for a, b in zip(items, value, strict=True))
        return value if same else tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        entries = {key: _replaced(item, changes) for key, item in value.items()}
        return value if all(entries[key] is value[key] for key in value) else entries
    if not _is_layer(value) or not _mixes(value):
        return value
    if _normalizes_a_batch(value):
        made = _replacement(value, changes)
        shape = [None] * value.input_spec.ndim
        for axis, length in value.input_spec.axes.items():
            shape[axis] = length
        made.build(tuple(shape))
        made.set_weights([np.asarray(v) for v in (value.gamma, value.beta) if v is not None])
        return made
    if isinstance(value, tf.keras.Model) and _has_graph(value):
        return _copy_of_graph(value, changes)
    _replace_inside(value, changes)
    return value


def _set_attribute(layer: Layer, name: str, value: Any, old: list[Layer]) -> None:
    tracker = getattr(layer, "_tracker", None)  # Keras 3's, which is locked once a layer is built
    if tracker is None:
        setattr(layer, name, value)
        return
    locked = tracker.locked
    tracker.unlock()
    for inner in old:
        tracker.untrack(inner)
    setattr(layer, name, value)
    tracker.locked = locked


# -- state -------------------------------------------------------------------------------------------------------


def _copy_state(old: Layer, new: Layer) -> None:
    """Gives a copied layer all that Keras saves of the original, and compares the two.

    Raises:
      PrivacyError: they are not the same.
    """
    try:
        if old.built and not new.built:
            new.build_from_config(old.get_build_config() or {})
        pairs = list(zip(old._flatten_layers(), new._flatten_layers(), strict=True))
        for before, after in pairs:
            after.trainable = before.trainable
        for before, after in pairs:
            _copy_own_state(before, after)
    except Exception as error:  # whatever a class of the user's raises
        raise PrivacyError(
            f"{old.name!r} ({type(old).__name__}) was copied without its state: {error}. {_CONFIG}"
        ) from error
    difference = _difference(pairs)
    if difference is not None:
        raise PrivacyError(
            f"The copy of {old.name!r} ({type(old).__name__}) is not the same as the original: {difference}. {_CONFIG}"
        )


def _copy_own_state(before: Layer, after: Layer) -> None:
    """Copies what Keras saves with a layer itself, without the layers in it."""
    store: dict[str, np.ndarray] = {}
    before.save_own_variables(store)
    after.load_own_variables({key: np.asarray(value) for key, value in store.items()})
    if hasattr(before, "save_assets"):
        with tempfile.TemporaryDirectory() as folder:
            before.save_assets(folder)
            after.load_assets(folder)
    for a, b in zip(_generator_states(before), _generator_states(after), strict=True):
        b.assign(a)


def _generator_states(layer: Layer) -> list[Variable]:
    """The states of a layer's own random generators."""
    seeds = [seed.state for seed in getattr(layer, "_seed_generators", ())]  # Keras 3
    generator = getattr(getattr(layer, "_random_generator", None), "_generator", None)  # Keras 2
    return seeds + ([generator.state] if generator is not None else [])


def _variables(layer: Layer) -> list[Variable]:
    """Its variables, without the tables that Keras 2 counts among them."""
    return [v for v in layer.variables if hasattr(v, "assign")]


def _difference(pairs: list[tuple[Layer, Layer]]) -> str | None:
    """In what a layer and its copy differ, or None; ``pairs`` begins with them, and goes on with the layers inside."""
    for before, after in pairs:
        if not _same([np.asarray(v) for v in _variables(before)], [np.asarray(v) for v in _variables(after)]):
            return "its weights differ"
        for name, value in vars(before).items():
            if isinstance(value, tf.keras.regularizers.Regularizer):
                ones = tf.ones([2, 2])
                if not _same([np.asarray(value(ones))], [np.asarray(getattr(after, name)(ones))]):
                    return f"its {name} differs"
    before, after = pairs[0]
    for args, kwargs in _calls(before):
        first, second = _output(before, args, kwargs), _output(before, args, kwargs)
        if first is None or second is None or not _same(first, second):
            continue  # it takes other inputs than the probe, or draws at random each time
        copied = _output(after, args, kwargs)
        if copied is None or not _same(first, copied):
            return "the outputs for the same input differ"
    return None


def _same(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    close = functools.partial(np.allclose, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
    return [a.shape for a in first] == [b.shape for b in second] and all(
        (close if a.dtype.kind in "fc" else np.array_equal)(a, b) for a, b in zip(first, second, strict=True)
    )


def _calls(layer: Layer) -> Iterator[tuple[tuple, dict[str, Nest]]]:
    """The arguments of the call by which a layer came into a model, with arrays in place of the model's tensors; for a
    model by itself, one array of the shape that it was built with."""
    generator = np.random.default_rng(0)

    def array(leaf: Nest) -> Nest:
        return random(leaf.shape, tf.as_dtype(leaf.dtype)) if type(leaf).__name__ == "KerasTensor" else leaf

    def random(shape: Sequence[int | None], dtype: tf.DType) -> tf.Tensor:
        closed = [d if d is not None else _OPEN_AXIS if i else 2 for i, d in enumerate(shape)]
        if dtype == tf.string:
            return tf.fill(closed, "a")
        if dtype.is_floating:
            return tf.cast(generator.normal(size=closed), dtype)
        return tf.cast(generator.integers(0, 2, closed), dtype)

    for node in list(layer._inbound_nodes)[:1]:
        held = getattr(node, "arguments", None)  # Keras 3
        args, kwargs = (held.args, held.kwargs) if held is not None else (node.call_args, node.call_kwargs)
        kwargs = {key: value for key, value in kwargs.items() if key != "training"}
        yield tf.nest.map_structure(array, tuple(args)), tf.nest.map_structure(array, dict(kwargs))
    shape = (layer.get_build_config() or {}).get("input_shape")
    if not layer._inbound_nodes and isinstance(shape, tuple):
        yield (random(shape, tf.float32),), {}


def _output(layer: Layer, args: tuple, kwargs: dict[str, Nest]) -> list[np.ndarray] | None:
    """What a layer makes of the arguments, or None if they are none for it. Its state is as before afterwards."""
    held = [*_variables(layer), *(s for inner in layer._flatten_layers() for s in _generator_states(inner))]
    values = [np.array(v) for v in held]
    try:
        made = [np.asarray(t) for t in tf.nest.flatten(layer(*args, **kwargs))]
    except Exception:  # whatever a class of the user's raises
        made = None
    for variable, value in zip(held, values, strict=True):
        variable.assign(value)
    return made
