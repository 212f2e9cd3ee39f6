"""Reads every step with the size of its batches free, also where TensorFlow knows that size.

TensorFlow writes the lengths that it knows into the graph as plain numbers. In such a graph nothing tells a batch of 6
examples from a list of 6 words, so the engine does not read it. It has the function traced once more, with the first
axis of the batch free. So batches of a known size and batches of a free size have the same clipped sums, or are refused
for the same reason.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.data.util import structure
from tensorflow.python.distribute.values import PerReplica
from tensorflow.python.eager.polymorphic_function import tracing_compilation

from tfdpfl._frames import callers, optimizer_of
from tfdpfl._types import Nest
from tfdpfl._variables import plain_variable
from tfdpfl.clipping import graph as graph_tools
from tfdpfl.errors import PrivacyError

__all__ = ["as_freed", "is_average", "original", "read_free"]

FREED = "PlaceholderWithDefault"  # hands its input on, with a shape that says less


@dataclasses.dataclass
class _Trace:
    """A function that is being traced.

    ``asked``: the batch size that the engine asked to have freed, or None. ``freed``: the size that is free in this
    trace. ``kept``: names of arguments that hold weights, which keep their shapes. ``read``: whether the engine read a
    loss in it. ``first``: whether the function may make variables, as its first trace may.
    """

    first: bool = False
    asked: int | None = None
    freed: int | None = None
    kept: frozenset[str] = frozenset()
    read: bool = False


class _Again(Exception):
    """Ends a trace that is to be repeated with the batch size free."""


# By graph: names of the losses that `tf.nn.compute_average_loss` divided by the size of all replicas' batches.
_AVERAGES: weakref.WeakKeyDictionary[tf.Graph, set[str]] = weakref.WeakKeyDictionary()
_TRACES: weakref.WeakKeyDictionary[tf.Graph, _Trace] = weakref.WeakKeyDictionary()


def original(t: tf.Tensor) -> tf.Tensor:
    """The tensor as the step was given it, with the length that TensorFlow knows."""
    return graph_tools.source(t, FREED)


def as_freed(t: tf.Tensor) -> tf.Tensor:
    """The tensor with its first axis free, also if the loss does not depend on it and only its op was read."""
    return next((op.outputs[0] for op in t.consumers() if op.type == FREED), t)


def read_free(sources: Sequence[tf.Tensor], weights: Iterable[tf.Tensor]) -> None:
    """Returns if the first axes of all sources are free. Otherwise it ends the trace, which begins anew with free ones.

    Args:
      sources: what the step takes in, in batches of one known size or of free size.
      weights: tensors among the arguments that are weights, whatever their length.

    Raises:
      PrivacyError: the batch size cannot be freed.
    """
    fixed = [t for t in sources if t.shape[0] is not None]
    kept = frozenset(graph_tools.origin(t).op.name for t in weights if not hasattr(graph_tools.origin(t), "numpy"))
    traces = [_trace_of(graph_tools.origin(t).graph) for t in fixed or sources]
    for t, trace in zip(fixed, traces, strict=False):
        if trace is None or trace.freed is not None:
            raise PrivacyError(
                f"{t.op.type} ({t.op.name!r}) brings in batches of the fixed size {t.shape[0]}. In such a graph a "
                f"batch of {t.shape[0]} examples looks like any other list of {t.shape[0]} numbers, so no gradient can "
                "be proven to belong to one example. Leave the size free: tf.TensorSpec([None, ...]) in place of "
                f"tf.TensorSpec([{t.shape[0]}, ...]), and tf.data's batch without drop_remainder."
            )
        trace.asked, trace.kept = t.shape[0], trace.kept | kept
    if fixed:
        raise _Again
    for trace in traces:
        if trace is not None:
            trace.read = True


def _trace_of(graph: tf.Graph | None) -> _Trace | None:
    """The record of the function that a graph is, or is the body of a loop or a branch in."""
    while graph is not None and graph not in _TRACES:
        graph = getattr(graph, "outer_graph", None)
    return None if graph is None else _TRACES[graph]


def _free(t: Nest) -> Nest:
    """The tensor, with its first axis free if its function is traced with that length free."""
    if isinstance(t, PerReplica):
        return PerReplica([tf.nest.map_structure(_free, value) for value in t.values])
    if not isinstance(t, tf.Tensor) or not isinstance(getattr(t, "graph", None), tf.Graph) or not t.shape.rank:
        return t
    trace = _trace_of(t.graph)
    if trace is None or trace.freed is None or t.shape[0] != trace.freed or t.op.name in trace.kept:
        return t
    return tf.raw_ops.PlaceholderWithDefault(input=t, shape=[None, *t.shape[1:]])


def _with_free_arguments(function: Callable) -> Callable:
    def free(*args: Nest, **kwargs: Nest) -> Nest:
        args, kwargs = tf.nest.map_structure(_free, (args, kwargs))
        return function(*args, **kwargs)

    return free


def _made_early(make: Callable, **settings: object) -> tf.Variable:
    """Makes a variable of a private step, such as a metric's or a layer's, before the step: TensorFlow traces a
    function a second time where the first trace makes variables."""
    trace = _trace_of(tf.compat.v1.get_default_graph())
    if trace is None or not trace.first or tf.distribute.has_strategy():
        return make(**settings)
    if not callable(settings["initial_value"]):  # a value of the step, perhaps
        return make(**settings)
    if not (trace.read or trace.freed or _trains_privately()):
        return make(**settings)
    with tf.init_scope():
        return plain_variable(make, **settings)


def _trains_privately() -> bool:
    """Whether a model's step is being traced that has a DP optimizer: then a loss will be read in it."""
    models = (frame.f_locals.get("self") for frame in callers() if frame.f_code.co_name.endswith("train_step"))
    return any(hasattr(getattr(model, "optimizer", None), "_dp") for model in models)


def _unreadable(size: int, error: Exception) -> PrivacyError:
    said = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), "")
    return PrivacyError(
        f"The step can be traced for batches of {size} examples, but not for batches of any size: "
        f"{said.rstrip('.')} ({type(error).__name__}). The engine needs the latter, because a {size} in the graph "
        "could be the batch size or another length. Use tf.shape(x)[0] in place of x.shape[0] and len(x), and give no "
        "layer or shape a fixed batch size."
    )


# The functions that Keras makes of a training step, and their argument that has the batch: of Keras 3, and of 2.
_STEPS = {"one_step_on_data": "data", "run_step": "data", "train_function": "iterator"}
_TRAINS = {"fit": True, "train_on_batch": True, "evaluate": False, "predict": False, "test_on_batch": False}


def _expected(function: Callable, function_type: Any) -> int | None:
    """The size of the batches that a private step of Keras will ask to have freed, or None if that is not known."""
    name = _STEPS.get(getattr(function, "__name__", ""))
    frame = next((f for f in callers() if f.f_code.co_name in _TRAINS and "self" in f.f_locals), None)
    if name not in getattr(function_type, "parameters", ()) or frame is None or not _TRAINS[frame.f_code.co_name]:
        return None
    if not hasattr(optimizer_of(frame.f_locals.get("self")), "_dp"):
        return None
    spec = function_type.parameters[name].type_constraint
    flatten = getattr(spec, "flatten", getattr(spec, "_flatten", list))  # the latter before TensorFlow 2.15
    leaves = tf.nest.flatten(spec._element_spec) if hasattr(spec, "_element_spec") else flatten()
    sizes = {leaf.shape[0] if leaf.shape.rank else None for leaf in leaves if hasattr(leaf, "shape")}
    return sizes.pop() if len(sizes) == 1 else None


def _repeating(create: Callable) -> Callable:
    """TensorFlow's way of tracing a function, which the engine may ask to repeat."""

    @functools.wraps(create)
    def traced(function_type, type_context, func_graph, tracing_options):
        first = tracing_options.scope_type == tracing_compilation.ScopeType.VARIABLE_CREATION
        free = copy.copy(tracing_options)
        free.python_function = _with_free_arguments(tracing_options.python_function)
        trace = _Trace(first, freed=_expected(tracing_options.python_function, function_type))
        expected = trace.freed is not None
        while True:
            options = tracing_options if trace.freed is None else free
            _TRACES[func_graph] = trace
            try:
                with tf.variable_creator_scope(_made_early):
                    made = create(function_type, type_context, func_graph, options)
                if trace.asked is None and (trace.read or not expected):
                    return made
            except Exception as error:
                if trace.asked is None and (trace.read or trace.freed is None):  # the size was no matter
                    raise
                if trace.freed is not None and not expected:
                    if isinstance(error, PrivacyError | _Again):
                        raise
                    raise _unreadable(trace.freed, error) from error
            # Free where the engine asked for it; and as it is where this was expected, and no loss was read.
            trace, expected = _Trace(first, freed=trace.asked, kept=trace.kept), False
            func_graph = type(func_graph)(func_graph.name)

    return traced


def is_average(t: tf.Tensor) -> bool:
    """Whether `tf.nn.compute_average_loss` returned the tensor: a sum over a batch, divided by the batch's size. A
    number given as ``global_batch_size`` is that size, because the user says so."""
    return t.name in _AVERAGES.get(t.graph, ())


def _noted(average: Callable) -> Callable:
    @functools.wraps(average)
    def compute_average_loss(*args: object, **kwargs: object) -> tf.Tensor:
        made = average(*args, **kwargs)
        if isinstance(getattr(made, "graph", None), tf.Graph):
            _AVERAGES.setdefault(made.graph, set()).add(made.name)
        return made

    return compute_average_loss


def _watch() -> None:
    """Lets functions be traced again from here on, and has iterators give out batches of free size where asked."""
    tracing_compilation._create_concrete_function = _repeating(tracing_compilation._create_concrete_function)
    for name in ("from_compatible_tensor_list", "from_tensor_list"):
        whole = getattr(structure, name)
        freeing = functools.wraps(whole)(lambda *args, _whole=whole: tf.nest.map_structure(_free, _whole(*args)))
        setattr(structure, name, freeing)
    tf.nn.compute_average_loss = _noted(tf.nn.compute_average_loss)


_watch()
