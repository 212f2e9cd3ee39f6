"""Compares rules of users (`registry.register_rule`) with TensorFlow's gradients, before a step runs: on random numbers
in place of what the step takes in, so that no refusal depends on data."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpfl.clipping import graph as graph_tools
from tfdpfl.clipping.batch_axis import BatchAxis
from tfdpfl.clipping.gradients import Contribution, Units, Use
from tfdpfl.clipping.registry import UserRule, look_up
from tfdpfl.clipping.states import Batch, Size, State
from tfdpfl.errors import PrivacyError

__all__ = ["check_promises", "checked"]

_EXAMPLES = 4
_OTHER = 3  # the length of an axis that is free
_TOLERANCE = 2e-3  # relative; rules may compute in float32


class _Incomparable(Exception):
    """Random numbers cannot stand for an input."""


def checked(rule: UserRule, use: Use, units: Units) -> Contribution | None:
    """Returns what the rule makes of a use; None, for the exact fallback, if nothing can show that it is right.

    Raises:
      PrivacyError: The rule's gradients are not those of TensorFlow.
    """
    made = rule(use, units)
    shapes = [(t.dtype, t.shape.rank and tuple(t.shape)) for t in [*use.inputs, use.g]]
    known = use.at, units.single, str(use.op.node_def.attr), str(shapes), str(use.states)
    if made is None or known in rule.compared:
        return made
    try:
        off = _off(rule, use, units.single)
    except PrivacyError:
        raise
    except Exception as error:  # of the rule, or of TensorFlow, on these numbers
        warnings.warn(
            f"Your rule for {use.op.type} ({rule}) cannot be compared with exact gradients on random numbers: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''} The exact fallback is used "
            "in its place, which is slower.",
            stacklevel=2,
        )
        return None
    if off is not None:
        raise PrivacyError(
            f"Your rule for {use.op.type} ({rule}) does not give the gradients of {use.op.name!r}: on random numbers "
            f"{off}. A gradient that is longer than it seems moves the model by more than l2_norm_clip. Correct the "
            "rule, or return None from it to use the exact fallback."
        )
    rule.compared.add(known)
    return made


def _off(rule: UserRule, use: Use, single: bool) -> str | None:
    """Returns by how much the rule's norms and clipped sum differ from exact ones; None if they do not."""
    random = np.random.default_rng(0)
    count = _EXAMPLES if single else _EXAMPLES // 2
    with tf.Graph().as_default() as graph:
        inputs, feeds = _inputs(use.inputs, use.states, use.weight, random)
        weight = inputs[use.at]
        outputs = graph_tools.copy_op(use.op, [t.handle if hasattr(t, "handle") else t for t in inputs])
        output = outputs[use.output.value_index if use.output.op is use.op else 0]
        shape = [_OTHER if d is None else d for d in output.shape]
        shape[use.out.axis] = _EXAMPLES * (use.out.rows or 1) * use.out.blocks
        g = tf.compat.v1.placeholder(output.dtype, [None if i == use.out.axis else d for i, d in enumerate(shape)])
        factors = tf.compat.v1.placeholder(tf.float64 if g.dtype == tf.float64 else tf.float32, [count])
        units = Units(tf.constant(_EXAMPLES), None if single else tf.constant(count), factors.dtype)
        made = rule(
            dataclasses.replace(use, op=outputs[0].op, inputs=[getattr(t, "handle", t) for t in inputs],
                                weight=tf.convert_to_tensor(weight), g=g, output=output), units)  # fmt: skip
        if made is None:
            raise _Incomparable("the rule returns None on them.")
        norms = tf.sqrt(made.squared_norms())
        units.good, units.any_bad = tf.ones([count], bool), tf.constant(False)
        units.mask_nonfinite(made.to_mask())
        total = made.weighted_sum(factors, units)
        held = getattr(weight, "handle", weight)
        exact = []
        for one in tf.unstack(tf.eye(count, dtype=factors.dtype)):
            (d,) = tf.gradients([output], [held], [g * units.per_row(one, g, use.out)])
            exact.append(tf.zeros(weight.shape, g.dtype) if d is None else tf.convert_to_tensor(d))
        allowed = 0.05 if g.dtype.size < 4 else _TOLERANCE
        fetched = [norms, total, tf.cast(tf.stack(exact), tf.float64)]
        with _session(graph) as session:
            session.run(tf.compat.v1.global_variables_initializer())
            # The second is the first turned round, which a rule that looks at the batch may answer as it likes.
            for scale in (1.0, -1.0, 30.0):
                given = np.random.default_rng(int(scale > 1)).normal(size=shape) * scale
                c = random.uniform(0.5, 1, count)
                of_rule, summed, truth = session.run(fetched, {**feeds, g: given, factors: c})
                if (difference := _difference(of_rule, summed, truth, c, allowed)) is not None:
                    return difference
    return None


def _difference(norms: np.ndarray, total: np.ndarray, truth: np.ndarray, c: np.ndarray, allowed: float) -> str | None:
    """Says how far a rule's norms, and its sum of the gradients times c, are from those of ``truth``, if they are."""
    lengths = np.sqrt((truth**2).reshape(len(c), -1).sum(1))
    if not np.isfinite(lengths).all() or not lengths.any():
        raise _Incomparable("TensorFlow's gradients are 0 or not finite.")
    far = np.abs(norms - lengths)
    if not (far <= allowed * lengths.max()).all():
        i = int(np.argmax(far))
        return f"an example's norm is {norms[i]:.3g}, and that of TensorFlow {lengths[i]:.3g}"
    far = np.linalg.norm(total - np.tensordot(c, truth, 1))
    if not far <= allowed * lengths.sum():
        return f"the sum over examples is {far:.3g} away from that of TensorFlow ({lengths.sum():.3g} long)"
    return None


def check_promises(analysis: BatchAxis) -> None:
    """Runs each op that a user promised to keep examples apart twice, on random numbers of which one example's differ.

    Raises:
      PrivacyError: The values or the gradients of other examples differ, too.
    """
    for op in list(analysis.ops.values()):
        rule = look_up(op).rule
        if isinstance(rule, UserRule) and rule.promises and not _apart(op, [analysis[t] for t in op.inputs], analysis):
            raise PrivacyError(
                f"{op.type} ({op.name!r}) was registered with batch_axis by your rule ({rule}), but on random numbers "
                "one example changes the values or the gradients of others. Remove the rule, or write the layer with "
                "other operations."
            )


def _apart(op: tf.Operation, states: list[State], analysis: BatchAxis) -> bool:
    random = np.random.default_rng(0)
    try:
        with tf.Graph().as_default() as graph:
            inputs, feeds = _inputs(list(op.inputs), states, None, random)
            axes = {id(x): s.axis for x, s in zip(inputs, states, strict=True) if isinstance(s, Batch)}
            looked = _by_example(op, inputs, axes, analysis)
            with _session(graph) as session:
                first = session.run([y for y, _ in looked], feeds)
                for x in feeds:
                    if id(x) in axes:
                        rows = feeds[x].swapaxes(0, axes[id(x)])
                        rows[: len(rows) // _EXAMPLES] = _numbers(x.dtype, rows[: len(rows) // _EXAMPLES].shape, random)
                second = session.run([y for y, _ in looked], feeds)
    except Exception:
        return True  # TensorFlow does not run the op on these numbers: the user's word stands
    others = [
        [np.moveaxis(y, axis, 0)[y.shape[axis] // _EXAMPLES :] for y, (_, axis) in zip(run, looked, strict=True)]
        for run in (first, second)
    ]
    return all(np.allclose(a, b, 1e-4, 1e-5, equal_nan=True) for a, b in zip(*others, strict=True))


def _by_example(
    op: tf.Operation, inputs: list, axes: dict[int, int], analysis: BatchAxis
) -> list[tuple[tf.Tensor, int]]:
    """What the op makes of these inputs, and gradients of the inputs, each with the axis of its examples."""
    made = zip(graph_tools.copy_op(op, inputs), op.outputs, strict=True)
    looked = [(y, s.axis) for y, t in made if isinstance(s := analysis[t], Batch)]
    if by := [tf.sin(y) for y, _ in looked if y.dtype.is_floating]:
        with contextlib.suppress(LookupError):  # no gradient
            xs = [x for x in inputs if id(x) in axes and x.dtype.is_floating]
            looked += [(g, axes[id(x)]) for g, x in zip(tf.gradients(by, xs), xs, strict=True) if g is not None]
    return looked


def _session(graph: tf.Graph) -> tf.compat.v1.Session:
    return tf.compat.v1.Session(graph=graph, config=tf.compat.v1.ConfigProto(device_count={"GPU": 0}))


def _inputs(
    given: Sequence[tf.Tensor], states: Sequence[State], weight: tf.Tensor | None, random: np.random.Generator
) -> tuple[list[Any], dict]:
    """Returns what stands for an op's inputs, and the values of those that are fed."""
    inputs: list[Any] = []
    feeds = {}
    for t, state in zip(given, states, strict=True):
        if t.dtype == tf.resource and weight is not None:
            inputs.append(tf.Variable(random.normal(size=weight.shape).astype(weight.dtype.as_numpy_dtype)))
            continue
        known = None if isinstance(state, Batch) else graph_tools.constant(t)
        if isinstance(state, Size):
            lengths = [c * _EXAMPLES**power for c, power in state.entries if c is not None and power is not None]
            if len(lengths) < len(state.entries):
                raise _Incomparable(f"a length is not known ({t.name}).")
            known = np.reshape(lengths, t.shape)
        if known is not None:
            inputs.append(tf.constant(known, t.dtype))
            continue
        shape = [_OTHER if d is None else d for d in t.shape]
        free: list[int | None] = list(shape)
        if isinstance(state, Batch):
            shape[state.axis] = _EXAMPLES * (state.rows or 1) * state.blocks
            free[state.axis] = None
        inputs.append(tf.compat.v1.placeholder(t.dtype, free))
        feeds[inputs[-1]] = _numbers(t.dtype, shape, random)
    return inputs, feeds


def _numbers(dtype: tf.DType, shape: Sequence[int], random: np.random.Generator) -> np.ndarray:
    if dtype.is_floating:
        return random.normal(size=shape)
    if dtype.is_integer or dtype == tf.bool:
        return random.integers(0, 2, shape)
    raise _Incomparable(f"an input is of type {dtype.name}.")
