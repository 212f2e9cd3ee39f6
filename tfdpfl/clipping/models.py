"""What a Keras model means for the engine, before it is trained: `explain`, `validate` and `fix`."""

from __future__ import annotations

import collections
import dataclasses
import inspect
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpfl.clipping.finished import check_finished, raw_variable
from tfdpfl.clipping.gradients import FEW_ROWS, TYPICAL_LENGTH, Formed, Lookup, Outer
from tfdpfl.clipping.plan import Plan
from tfdpfl.errors import PrivacyError


@dataclasses.dataclass(frozen=True)
class Row:
    """One variable.

    ``op``: the kinds of op that use it, and how often. ``way``: ghost (the norm without the gradient), formed (the
    gradient of each example), or fallback (the op run again example by example). ``cost``: multiplications an example
    for its norm, as far as shapes are known; None for the fallback.
    """

    variable: str
    shape: tuple[int, ...]
    op: str
    way: str
    cost: int | None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` returns; prints as a table."""

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        head = ("variable", "shape", "op", "way", "multiplications")
        lines = [head] + [
            (r.variable, "×".join(map(str, r.shape)) or "scalar", r.op, r.way, "–" if r.cost is None else f"{r.cost:,}")
            for r in self.rows
        ]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def explain(model: Any, batch: Any) -> Explanation:
    """Which way each variable's per-example norms are found, and what that costs.

    Args:
      model: a Keras model, compiled with a loss, or not (the mean of its outputs then stands in for one).
      batch: ``x``, ``(x, y)`` or ``(x, y, sample_weight)``, as `fit` takes them; or a `tf.data.Dataset`, of which the
        first batch is taken.

    Raises:
      PrivacyError: where examples are coupled, or leave something in the model that no noise covers; see `validate`.
    """
    rows: list[Row] = []

    def read(plan: Plan, variables: list) -> tf.Tensor:
        norms = plan.squared_norms()
        for i, parts in enumerate(plan.merged):
            uses = [id(c) for v, c, _, _ in plan.contributions if v == i]
            if not uses:
                continue
            counted = collections.Counter(plan.op_of[u] for u in uses)
            ops = ", ".join(f"{kind} ×{n}" if n > 1 else kind for kind, n in counted.items())
            way, cost = "fallback", None
            if not plan.replayed.intersection(uses):
                ways = [_way(c, w.shape) for c, w, _ in parts]
                way, cost = ways[0][0], sum(c for _, c in ways)
            name = getattr(variables[i], "path", None) or variables[i].name
            rows.append(Row(name, tuple(variables[i].shape), ops, way, cost))
        return norms

    _traced(model, _parts(batch), read, training=True)
    return Explanation(tuple(rows))


def _way(contribution: Any, shape: tf.TensorShape) -> tuple[str, int]:
    if isinstance(contribution, Outer):
        t = contribution.g.shape[1] or TYPICAL_LENGTH
        a, p = contribution.a.shape[-1], contribution.g.shape[-1]
        n = contribution.a.shape[2] if contribution.a.shape.rank == 4 else 1
        return ("formed", n * t * a * p) if contribution.forms() else ("ghost", n * t * t * (a + p))
    if isinstance(contribution, Lookup):
        t = contribution.g.shape[1] or TYPICAL_LENGTH
        return "ghost", (t if t <= FEW_ROWS else 1) * t * contribution.g.shape[-1]
    assert isinstance(contribution, Formed)
    return "formed", int(np.prod(shape.as_list()))


def validate(model: Any, batch: Any, tolerance: float = 1e-4) -> None:
    """Checks that each example of the batch has a loss and a gradient of its own.

    First by reading the graph of a training step; then with numbers: one example is changed, and the losses and
    gradient norms of the others must stay as they were (without dropout, which would change them by chance).

    Args:
      model, batch: as for `explain`; two examples at least.
      tolerance: largest relative change that counts as rounding.

    Raises:
      PrivacyError: naming the op and layer that mixes examples and the mend, the weight that the step writes batch
        data to, or the examples that moved.
    """
    batch = _parts(batch)
    _traced(model, batch, lambda plan, _: plan.squared_norms(), training=True)
    run = _traced(model, batch, lambda plan, _: tf.stack([plan.losses, tf.sqrt(plan.squared_norms())]), training=False)
    x, *rest = batch
    size = len(tf.nest.flatten(x)[0])
    if size < 2:
        raise ValueError(
            f"batch has {size} example; give two at least, so that one can be watched while another moves."
        )
    before = run(x, *rest).numpy()
    generator = np.random.default_rng(0)

    def moved(leaf):
        leaf = np.array(leaf)
        first = leaf[0]
        if leaf.dtype.kind == "f":
            leaf[0] = first + generator.normal(size=first.shape).astype(leaf.dtype) * (1 + np.abs(first))
        else:
            leaf[0] = leaf[1]
        return leaf

    after = run(tf.nest.map_structure(moved, x), *rest).numpy()
    scale = np.abs(before).max(1, keepdims=True) + 1e-12
    others = np.flatnonzero((np.abs(after - before) / scale > tolerance).any(0))
    others = others[others != 0]
    if len(others):
        raise PrivacyError(
            f"Changing example 0 changed the loss or the gradient norm of examples {others[:5].tolist()}. Look for a "
            "layer that mixes examples, and report it: the graph's analysis missed it."
        )


def _parts(batch: Any) -> tuple:
    """x, y and sample_weight, of a data set's first batch."""
    if isinstance(batch, tf.data.Dataset):
        batch = next(iter(batch), None)
        if batch is None:
            raise ValueError("batch is a data set that holds no batch; give one that does.")
    return batch if isinstance(batch, tuple) else (batch,)


def _traced(model: Any, batch: tuple, read: Any, training: bool) -> Any:
    """Traces a training step on the batch's shapes and hands the engine's plan to ``read``; returns a function."""
    x, *rest = batch
    y, weight = [*rest, None, None][:2]
    spec = lambda leaf: tf.TensorSpec([None, *np.shape(leaf)[1:]], tf.convert_to_tensor(leaf[:1]).dtype)  # noqa: E731
    if not model.built:
        model(tf.nest.map_structure(lambda leaf: leaf[:1], x))

    @tf.function(autograph=False)
    def step(x, y=None, weight=None):
        outputs = model(x, training=training)
        if y is None or getattr(model, "loss", None) is None:
            loss = tf.add_n([tf.reduce_mean(tf.cast(o, tf.float32)) for o in tf.nest.flatten(outputs)])
        else:
            loss = model.compute_loss(x, y, outputs, weight)
        variables = model.trainable_variables
        found = read(Plan(loss, [raw_variable(v) for v in variables], None), variables)
        check_finished(loss.graph, saved_weights(model))
        return found

    given = [tf.nest.map_structure(spec, part) for part in (x, y, weight) if part is not None]
    return step.get_concrete_function(*given) and (lambda *parts: step(*_tensors(parts)))


def saved_weights(model: Any) -> list[Any]:
    """The weights that are saved with a model. Keras 2 counts metrics among them that are attributes; they tell of the
    batches, as the values that Keras shows of them do."""
    try:
        modules = list(getattr(model, "submodules", ()))
    except ValueError:  # what TensorFlow cannot walk through, such as Keras 2's masks of recurrent dropout
        modules = list(model.metrics)
    metrics = [m for m in modules if hasattr(m, "update_state") and hasattr(m, "result")]
    shown = {id(v) for metric in metrics for v in metric.variables}
    return [v for v in model.weights if id(v) not in shown]


def _tensors(parts: Any) -> list:
    return [tf.nest.map_structure(tf.convert_to_tensor, part) for part in parts if part is not None]


@dataclasses.dataclass(frozen=True)
class Fixed:
    """What `fix` returns: the new ``model``, and ``changes``, one sentence each."""

    model: Any
    changes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.changes) or "Nothing to change."


def fix(model: Any) -> Fixed:
    """A copy of a Sequential or functional model in which what mixes examples is replaced by what does not.

    BatchNormalization becomes GroupNormalization (up to 32 groups of channels), or LayerNormalization after layers
    without spatial axes, with the same gamma and beta; nested models are fixed, too. All other weights are copied;
    layers without weights are in both models. The statistics that a batch normalisation had learned have no place in
    the new layer: train, or fine-tune.

    Args:
      model: it stays as it is.

    Raises:
      PrivacyError: for a subclassed model, whose layers cannot be replaced from outside; for a layer with weights that
        Keras cannot make from its config.
      TypeError: for what is no Keras model.
    """
    layers = tf.keras.layers
    if not isinstance(model, tf.keras.Model):
        raise TypeError(f"model={model!r:.99} is no Keras model.")
    if not isinstance(model, tf.keras.Sequential) and type(model).__name__ != "Functional":
        raise PrivacyError(
            f"{type(model).__name__} is a subclassed model, whose layers cannot be replaced from outside. Use "
            "GroupNormalization in place of BatchNormalization where it builds them."
        )
    changes: list[str] = []
    normalised: set[str] = set()

    def replaced(layer):
        if isinstance(layer, tf.keras.Model):
            inner = fix(layer)
            changes.extend(inner.changes)
            return inner.model
        if not isinstance(layer, layers.BatchNormalization):
            return layer if not layer.weights and not isinstance(layer, layers.InputLayer) else _anew(layer)
        normalised.add(layer.name)
        axis = layer.axis[0] if isinstance(layer.axis, list | tuple) else layer.axis
        shape = layer.input.shape
        channels, rank = shape[axis], len(shape)
        common = dict(
            name=layer.name, epsilon=layer.epsilon, center=layer.center, scale=layer.scale, trainable=layer.trainable
        )
        if rank == 2:
            changes.append(f"{layer.name}: BatchNormalization → LayerNormalization")
            return layers.LayerNormalization(**common)
        groups = max(g for g in range(1, min(32, channels) + 1) if channels % g == 0)
        changes.append(f"{layer.name}: BatchNormalization → GroupNormalization(groups={groups})")
        return layers.GroupNormalization(groups=groups, axis=axis, **common)

    def called(layer, *args, **kwargs):  # a batch normalisation was called with arguments that others do not take
        if layer.name in normalised:
            kwargs = {k: v for k, v in kwargs.items() if k not in ("mask", "training")}
        return layer(*args, **kwargs)

    clone = tf.keras.models.clone_model
    takes_calls = "call_function" in inspect.signature(clone).parameters and not isinstance(model, tf.keras.Sequential)
    made = clone(model, clone_function=replaced, **({"call_function": called} if takes_calls else {}))
    _copy_weights(model, made)
    return Fixed(made, tuple(changes))


def _anew(layer: Any) -> Any:
    try:
        return layer.__class__.from_config(layer.get_config())
    except Exception as error:  # whatever a user's own class says
        raise PrivacyError(
            f"{layer.name!r} ({type(layer).__name__}) cannot be copied: {error}. Give the layer, and what it was given "
            "(regularizers, initializers), a get_config that holds all its arguments; or build the model anew with "
            "GroupNormalization in place of BatchNormalization."
        ) from error


def _copy_weights(old: Any, new: Any) -> None:
    for before, after in zip(old.layers, new.layers, strict=True):
        if isinstance(before, tf.keras.Model):
            continue  # was copied when it was fixed
        if isinstance(before, tf.keras.layers.BatchNormalization):
            after.set_weights([np.asarray(v) for v in (before.gamma, before.beta) if v is not None])
        else:
            after.set_weights(before.get_weights())
