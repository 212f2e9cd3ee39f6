"""Shows what a Keras model means for the engine, before it is trained: `explain` and `validate`."""

from __future__ import annotations

import collections
import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

from tfdpfl._types import Arrays, Model, Nest, Variable
from tfdpfl.clipping.engine import LEAST_CLIP
from tfdpfl.clipping.pipeline import ClippingPipeline
from tfdpfl.clipping.registry import user_rules
from tfdpfl.clipping.step_checks import check_finished, raw_variable
from tfdpfl.errors import PrivacyError

__all__ = ["explain", "saved_weights", "validate"]

# `validate` compares the gradients of so many examples with exact ones.
MOST_COMPARED = 16


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
    """Holds what `explain` returns; prints as a table."""

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        head = ("variable", "shape", "op", "way", "multiplications")
        lines = [head] + [
            (r.variable, "×".join(map(str, r.shape)) or "scalar", r.op, r.way, "–" if r.cost is None else f"{r.cost:,}")
            for r in self.rows
        ]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def explain(model: Model, batch: Arrays) -> Explanation:
    """Which way each variable's per-example norms are found, and what that costs.

    Args:
      model: a Keras model, compiled with a loss, or not (the mean of its outputs then stands in for one).
      batch: ``x``, ``(x, y)`` or ``(x, y, sample_weight)``, as `fit` takes them; or a `tf.data.Dataset`, of which the
        first batch is taken.

    Raises:
      PrivacyError: where examples are coupled, or leave something in the model that no noise covers; see `validate`.
    """
    rows: list[Row] = []

    def read(pipeline: ClippingPipeline, variables: list) -> tf.Tensor:
        norms = pipeline.squared_norms()
        for i, parts in enumerate(pipeline.merged):
            uses = [part for part in pipeline.parts if part.variable == i]
            if not parts:
                continue
            counted = collections.Counter(part.op for part in uses)
            ops = ", ".join(f"{kind} ×{n}" if n > 1 else kind for kind, n in counted.items())
            way, cost = "fallback", None
            if not any(part.replayed for part in uses):
                ways = [part.made.way() for part in parts]
                way, cost = ways[0][0], sum(c for _, c in ways)
            name = getattr(variables[i], "path", None) or variables[i].name
            rows.append(Row(name, tuple(variables[i].shape), ops, way, cost))
        return norms

    _traced(model, _parts(batch), read, training=True)
    return Explanation(tuple(rows))


def validate(model: Model, batch: Arrays, tolerance: float = 1e-4) -> None:
    """Checks that each example of the batch has a loss and a gradient of its own, and that the gradient is exact.

    It prints one line on what it found.

    First it reads the graph of a training step. Then it compares numbers, without dropout. One example is changed, and
    the losses and gradient norms of the others must stay as they were. The norms and clipped sums of the first 16
    examples must be those of gradients that TensorFlow takes one example at a time. The second comparison finds a rule
    of `register_rule` that is wrong on this batch. It cannot show that a rule is right on all others.

    Args:
      model, batch: as for `explain`; two examples at least.
      tolerance: largest relative change that counts as rounding. Gradients may differ by ten times as much, and by 0.05
        where layers compute in 16 bits.

    Raises:
      PrivacyError: naming the op and layer that mixes examples and the mend, the weight that the step writes batch
        data to, the examples that moved, or the weight whose gradient is not exact.
    """
    batch = _parts(batch)
    _traced(model, batch, lambda pipeline, _: pipeline.squared_norms(), training=True)
    run = _traced(model, batch, _gradients, training=False)
    x, *rest = batch
    size = len(tf.nest.flatten(x)[0])
    if size < 2:
        raise ValueError(
            f"batch has {size} example; give at least two, because the check changes one and watches the other."
        )
    before = run(x, *rest)
    if not np.allclose(before.per_example, run(x, *rest).per_example, rtol=tolerance, atol=0, equal_nan=True):
        warnings.warn(
            "The model draws random numbers outside of training, too. So validate checked its graph, but could not "
            "compare numbers.",
            stacklevel=2,
        )
        return
    _check_apart(before, run(tf.nest.map_structure(_moved, x), *rest), tolerance)
    _check_exact(model, run, batch, tolerance)
    print(
        f"Changing one of {size} examples moved no other's loss or gradient norm. For {len(model.trainable_weights)} "
        f"weights, the clipped gradients of the first {min(size, MOST_COMPARED)} are those of TensorFlow."
    )


class _Gradients(NamedTuple):
    """Of a batch: losses and norms [2, batch], and by variable the sums that were clipped to ``bound``, and the sums of
    the gradients that TensorFlow takes."""

    per_example: tf.Tensor
    bound: tf.Tensor
    clipped: list[tf.Tensor]
    exact: list[tf.Tensor]


def _gradients(pipeline: ClippingPipeline, variables: list) -> _Gradients:
    """Of a step that is traced. The bound is one that most examples exceed."""
    norms2 = pipeline.squared_norms()
    norms = tf.sqrt(norms2)
    bound = tf.maximum(0.7 * tf.sort(norms)[tf.size(norms) // 2], tf.constant(LEAST_CLIP, norms.dtype))
    raw = [raw_variable(v) for v in variables]
    dense = lambda gs: [  # noqa: E731
        tf.zeros(v.shape, pipeline.dtype) if g is None else tf.cast(tf.convert_to_tensor(g), pipeline.dtype)
        for g, v in zip(gs, raw, strict=True)
    ]
    exact = dense(tf.gradients([pipeline.losses], raw))
    return _Gradients(
        tf.stack([tf.cast(pipeline.losses, norms.dtype), norms]),
        bound,
        dense(pipeline.finish(norms2, bound).sum),
        exact,
    )


def _moved(leaf: ArrayLike) -> np.ndarray:
    """A batch whose first example is another."""
    leaf = np.array(leaf)
    first = leaf[0]
    if leaf.dtype.kind == "f":
        noise = np.random.default_rng(0).normal(size=first.shape).astype(leaf.dtype)
        leaf[0] = first + noise * (1 + np.abs(first))
    else:
        leaf[0] = leaf[1]
    return leaf


def _check_apart(before: _Gradients, after: _Gradients, tolerance: float) -> None:
    """That nothing of the examples after the first has changed."""
    first, second = np.asarray(before.per_example), np.asarray(after.per_example)
    scale = np.abs(first).max(1, keepdims=True) + 1e-12
    others = np.flatnonzero((np.abs(second - first) / scale > tolerance).any(0))
    others = others[others != 0]
    if len(others):
        raise PrivacyError(
            f"Changing example 0 changed the loss or the gradient norm of examples {others[:5].tolist()}. Look for a "
            f"layer that mixes examples. {_whose('the analysis of the graph missed it')}"
        )


def _check_exact(model: Model, run: Callable[..., _Gradients], batch: tuple, tolerance: float) -> None:
    """That norms and clipped sums are those of exact gradients, of the first examples together and of each by itself.

    (An example comes twice: at batch size 1 TensorFlow's gradient of a 1x1 convolution with strides is not safe.)
    """
    low = any("16" in str(getattr(layer, "compute_dtype", "")) for layer in model._flatten_layers())
    allowed = max(10 * tolerance, 0.05 if low else 0)
    few = [tf.nest.map_structure(lambda leaf: np.asarray(leaf)[:MOST_COMPARED], part) for part in batch]
    together = run(*few)
    norms, bound = np.asarray(together.per_example[1], np.float64), float(together.bound)
    largest = max(norms[np.isfinite(norms)], default=0.0)
    total = [np.zeros(v.shape) for v in together.exact]
    for i, norm in enumerate(norms):
        alone = run(*(tf.nest.map_structure(lambda leaf, i=i: leaf[[i, i]], part) for part in few))
        exact = [np.asarray(g, np.float64) / 2 for g in alone.exact]
        truth = float(np.sqrt(sum((g**2).sum() for g in exact)))
        if not (np.isfinite(norm) and np.isfinite(truth)):
            continue
        if abs(norm - truth) > allowed * max(truth, 0.01 * largest):
            raise PrivacyError(
                f"The gradient of example {i} has the norm {truth:.4g}, but the clip takes it to be {norm:.4g}. "
                f"A gradient that is longer than it seems moves the model by more than l2_norm_clip. {_whose()}"
            )
        own = float(alone.bound)
        _check_sums(model, alone.clipped, [2 * min(1, own / max(norm, own)) * g for g in exact], allowed)
        total = [t + min(1, bound / max(norm, bound)) * g for t, g in zip(total, exact, strict=True)]
    _check_sums(model, together.clipped, total, allowed)


def _check_sums(model: Model, clipped: list, truth: list[np.ndarray], allowed: float) -> None:
    length = lambda arrays: float(np.sqrt(sum((a**2).sum() for a in arrays)))  # noqa: E731
    off = [np.asarray(c, np.float64) - t for c, t in zip(clipped, truth, strict=True)]
    if not length(off) <= allowed * length(truth) + LEAST_CLIP:
        v = model.trainable_variables[int(np.argmax([length([d]) for d in off]))]
        raise PrivacyError(
            f"The clipped sum is {length(off):.2g} away from that of exact gradients, whose length is "
            f"{length(truth):.2g}; most of it in {getattr(v, 'path', None) or v.name}. The clip does not bound a sum "
            f"of anything but the examples' gradients. {_whose()}"
        )


def _whose(otherwise: str = "a rule of tfdpfl is wrong") -> str:
    taught = ", ".join(sorted(user_rules()))
    if taught:
        return f"Your rules are used for {taught}: correct them, or return None from a rule to use the exact fallback."
    return f"Please report it: {otherwise}."


def _parts(batch: Arrays) -> tuple:
    """x, y and sample_weight, of a data set's first batch."""
    if isinstance(batch, tf.data.Dataset):
        batch = next(iter(batch), None)
        if batch is None:
            raise ValueError("batch is a data set without a batch; give one with at least one batch.")
    return batch if isinstance(batch, tuple) else (batch,)


def _traced(
    model: Model, batch: tuple, read: Callable[[ClippingPipeline, list], Nest], training: bool
) -> Callable[..., Nest]:
    """Traces a training step on the batch's shapes and hands the engine's pipeline to ``read``; returns a function."""
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
        found = read(ClippingPipeline(loss, [raw_variable(v) for v in variables], None), variables)
        check_finished(loss.graph, saved_weights(model))
        return found

    given = [tf.nest.map_structure(spec, part) for part in (x, y, weight) if part is not None]
    return step.get_concrete_function(*given) and (lambda *parts: step(*_tensors(parts)))


def saved_weights(model: Model) -> list[Variable]:
    """The weights that are saved with a model. Keras 2 counts metrics among them that are attributes; they tell of the
    batches, as the values that Keras shows of them do."""
    try:
        modules = list(getattr(model, "submodules", ()))
    except ValueError:  # what TensorFlow cannot walk through, such as Keras 2's masks of recurrent dropout
        modules = list(model.metrics)
    metrics = [m for m in modules if hasattr(m, "update_state") and hasattr(m, "result")]
    shown = {id(v) for metric in metrics for v in metric.variables}
    return [v for v in model.weights if id(v) not in shown]


def _tensors(parts: Sequence[Nest]) -> list:
    return [tf.nest.map_structure(tf.convert_to_tensor, part) for part in parts if part is not None]
