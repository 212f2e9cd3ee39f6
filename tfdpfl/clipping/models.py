"""What a Keras model means for the engine, before it is trained: `explain` and `validate`."""

from __future__ import annotations

import collections
import dataclasses
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
