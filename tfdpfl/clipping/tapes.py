"""Finds the loss whose gradients a `tf.GradientTape` gave out, and what of that loss the tape did not record.

A train step of one's own asks a tape for gradients and hands them to the optimizer. A private optimizer takes none of
them: it needs the loss, and finds the private gradient of that. So from the first private optimizer on, each call of
``tape.gradient`` in a graph is noted, with the tensors that came out, its loss and its variables. Only these very
tensors are looked up. A gradient that was scaled, clipped or added up since is another tensor, and is not found.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Iterable, Sequence

import tensorflow as tf
from tensorflow.python.eager import backprop_util, record
from tensorflow.python.framework import ops

from tfdpfl._types import Nest
from tfdpfl.clipping import graph as graph_tools
from tfdpfl.clipping.graph import key
from tfdpfl.clipping.step_checks import handles_of, raw_variable
from tfdpfl.errors import PrivacyError

__all__ = ["check_asked", "check_seen", "loss_of", "unseen", "watch"]

# A tensor that a tape takes for a constant, and the ids of the handles of variables that it follows from.
Unseen = tuple[str, frozenset[int]]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of ``tape.gradient``: the targets, and what was unseen of them. By name: a tensor would keep its graph
    alive."""

    targets: tuple[str, ...]
    unseen: tuple[Unseen, ...] | None


# By graph: the calls, by the names of the tensors that each gradient is made of.
_GIVEN: weakref.WeakKeyDictionary[tf.Graph, dict[tuple[str, ...], list[tuple[Call, weakref.ref]]]] = (
    weakref.WeakKeyDictionary())  # fmt: skip
_CALLS: weakref.WeakKeyDictionary[tf.Graph, list[Call]] = weakref.WeakKeyDictionary()


@functools.cache
def watch() -> None:
    """From here on `tf.GradientTape.gradient` notes what it gives out in graphs. It gives out what it always did."""
    given_out = tf.GradientTape.gradient

    @functools.wraps(given_out)
    @tf.autograph.experimental.do_not_convert
    def gradient(self, target, sources, output_gradients=None, unconnected_gradients=tf.UnconnectedGradients.NONE):
        call = None if output_gradients is not None else _call(self, target, sources)  # it forgets after this
        found = given_out(self, target, sources, output_gradients, unconnected_gradients)
        if call is not None:
            graph = tf.compat.v1.get_default_graph()
            _CALLS.setdefault(graph, []).append(call)
            for g, v in zip(tf.nest.flatten(found), tf.nest.flatten(sources), strict=True):
                if g is not None:
                    _GIVEN.setdefault(graph, {}).setdefault(_key(g), []).append((call, weakref.ref(raw_variable(v))))
        return found

    tf.GradientTape.gradient = gradient


def _key(g: tf.Tensor | tf.IndexedSlices) -> tuple[str, ...]:
    return (g.values.name, g.indices.name) if isinstance(g, tf.IndexedSlices) else (g.name,)


def _call(tape: tf.GradientTape, target: Nest, sources: Nest) -> Call | None:
    graph = tf.compat.v1.get_default_graph()
    targets, variables = tf.nest.flatten(target), [raw_variable(v) for v in tf.nest.flatten(sources)]
    known = all(tf.is_tensor(t) and getattr(t, "graph", None) is graph for t in targets)
    if not (known and targets and variables and all(hasattr(v, "handle") for v in variables)) or tape._tape is None:
        return None
    return Call(tuple(t.name for t in targets), unseen(tape, targets))


def loss_of(gradients: Sequence, variables: Sequence) -> tf.Tensor | None:
    """The loss, in the graph that is being traced, that a tape gave these gradients of, each for its variable (None
    where the tape found none); None if they are anything else.

    Raises:
      PrivacyError: the tape took for a constant what follows from one of these variables.
    """
    graph = tf.compat.v1.get_default_graph()
    asked: set[Call] = set()
    for g, v in zip(gradients, variables, strict=True):
        if g is None:
            continue
        if not isinstance(g, tf.Tensor | tf.IndexedSlices) or getattr(g, "graph", None) is not graph:
            return None
        calls = {call for call, of in _GIVEN.get(graph, {}).get(_key(g), ()) if of() is raw_variable(v)}
        if not calls:
            return None
        asked |= calls
    if len({call.targets for call in asked}) != 1:
        return None
    targets = [graph.get_tensor_by_name(name) for name in next(iter(asked)).targets]
    if len(targets) > 1 and any(t.shape.rank != 0 for t in targets):
        return None
    for call in asked:
        check_seen(call.unseen, [v for g, v in zip(gradients, variables, strict=True) if g is not None])
    return targets[0] if len(targets) == 1 else tf.add_n(targets)


def check_asked(target: tf.Tensor, variables: Sequence) -> None:
    """As `check_seen`, for all calls of ``tape.gradient`` on this target."""
    for call in _CALLS.get(target.graph, ()):
        if call.targets == (target.name,):
            check_seen(call.unseen, variables)


def check_seen(found: Iterable[Unseen] | None, variables: Sequence) -> None:
    """That a tape and the graph agree about the gradients of these variables.

    Raises:
      PrivacyError: they do not, or it cannot be told.
    """
    if found is None:
        raise PrivacyError(
            "Another tape records as well, so operations outside of this tape cannot be seen. Ask for gradients, or "
            "call minimize, after the with blocks of all tapes."
        )
    handles = {id(h) for v in variables for h in handles_of(v)}
    for name, behind in found:
        if behind & handles:
            op = tf.compat.v1.get_default_graph().get_tensor_by_name(name).op
            raise PrivacyError(
                f"The tape treats {op.type} ({op.name!r}) as a constant, but it was computed from trained weights "
                "outside of the tape. If you mean a constant, wrap it in tf.stop_gradient(...). Otherwise compute it "
                "under the tape."
            )


def unseen(tape: tf.GradientTape, targets: Sequence[tf.Tensor]) -> tuple[Unseen, ...] | None:
    """Returns what the targets are computed from by differentiable ops, and the tape took for a constant, if variables
    are behind it. None if that cannot be told, because other tapes record, too."""
    recording = tape._recording
    if recording:
        tape._pop_tape()
    alone = not record.could_possibly_record()
    tape._push_tape()
    try:
        ends = _ends(targets) if alone else None
    finally:
        if not recording:
            tape._pop_tape()
    if ends is None:
        return None
    found = ((t.name, _variables_behind(t)) for t in ends)
    return tuple((name, behind) for name, behind in found if behind)


def _ends(targets: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Where the tape that records now stops on its way back from the targets."""
    ends, seen, todo = [], set(), [t.op.inputs[0] if t.op.type == "StopGradient" else t for t in targets]
    while todo:
        t = todo.pop()
        if key(t) in seen or t.dtype == tf.resource or not _differentiable(t):
            continue
        seen.add(key(t))
        if record.should_record_backprop([t]):
            # A function with a gradient of its own takes the tape past what it computes by.
            first = graph_tools.number_of_results(t.op) or 0
            todo += [] if t.op.type == "ReadVariableOp" else t.op.inputs[first:]
        else:
            ends.append(t)
    return ends


def _variables_behind(t: tf.Tensor) -> frozenset[int]:
    found, seen, todo = set(), set(), [t]
    while todo:
        t = todo.pop()
        if key(t) in seen or not _differentiable(t):
            continue
        seen.add(key(t))
        if t.dtype == tf.resource:
            found.add(id(graph_tools.origin(t)))
        todo += t.op.inputs
    return frozenset(found)


def _differentiable(t: tf.Tensor) -> bool:
    """Whether a gradient may go through the op to this output."""
    if not backprop_util.IsTrainable(t):  # a list of integers is not, though it is a variant
        return False
    try:
        return not t.op.inputs or ops.get_gradient_function(t.op) is not None
    except LookupError:
        return True
