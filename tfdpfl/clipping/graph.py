"""Reading and copying TensorFlow graphs: the engine's only view of TensorFlow's internals."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import inspect
import itertools
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import transform
from tensorflow.python.framework import function_def_to_graph, ops, tensor_util
from tensorflow.python.ops import control_flow_util, control_flow_util_v2

from tfdpfl.clipping.registry import look_up

if TYPE_CHECKING:
    from tensorflow.core.framework.node_def_pb2 import NodeDef

__all__ = [
    "RELEASED",
    "ancestors",
    "attributes",
    "body_graphs",
    "captured",
    "channels_first",
    "compiled",
    "constant",
    "copy_op",
    "function_graph",
    "function_names",
    "gradient_function",
    "graphs_around",
    "handed_on",
    "inner_call",
    "input_rank",
    "is_branch",
    "is_call",
    "is_loop",
    "is_random",
    "is_seeded",
    "keep_graphs_around",
    "key",
    "known_entries",
    "lift_functions",
    "number_of_results",
    "origin",
    "output_rank",
    "own_gradient_is_known",
    "passes_gradients_through",
    "recomputes",
    "record_of",
    "released",
    "replace",
    "require",
    "restore",
    "rewrite_bodies",
    "same",
    "set_gradient",
    "source",
    "when_traced",
    "within",
]

_numbers = itertools.count()
# By graph the names of the ops that give out what is private: whatever follows from it alone is public.
RELEASED: weakref.WeakKeyDictionary[tf.Graph, set[str]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass
class Record:
    """Records what the engine did to a graph, by names: ops would keep the graph alive.

    ``rewired``: (an op, the number of its input, the tensor that it took in before); ``replaced``: loops and calls in
    whose place others stand; ``drawn``: loops that draw random numbers and were built anew; ``made``: what is
    made once, by what it is made of.
    """

    rewired: list[tuple[str, int, str]] = dataclasses.field(default_factory=list)
    replaced: set[str] = dataclasses.field(default_factory=set)
    drawn: set[str] = dataclasses.field(default_factory=set)
    made: dict[tuple, str] = dataclasses.field(default_factory=dict)


_RECORDS: weakref.WeakKeyDictionary[tf.Graph, Record] = weakref.WeakKeyDictionary()


def record_of(graph: tf.Graph) -> Record:
    return _RECORDS.setdefault(graph, Record())


def graphs_around(graph: tf.Graph) -> list[tf.Graph]:
    """The graphs that a function's graph was traced in, the nearest first, once `keep_graphs_around` has run."""
    return graph.get_collection_ref("tfdpfl/graphs_around")


def keep_graphs_around(graph: tf.Graph) -> None:
    """Keeps these graphs alive with the function's graph: TensorFlow may drop some before the step is traced. (They
    are in the graph itself, since it is they that keep it alive.)"""
    found, outer = [], getattr(graph, "outer_graph", None)
    while isinstance(outer, tf.__internal__.FuncGraph):
        found.append(outer)
        outer = getattr(outer, "outer_graph", None)
    graphs_around(graph)[:] = found


# Where TensorFlow's gradients look for what a loop or a branch runs.
_GRAPHS = {
    "cond": "_cond_graph",
    "body": "_body_graph",
    "then_branch": "_true_graph",
    "else_branch": "_false_graph",
}


def compiled() -> bool:
    """Whether XLA compiles what is traced here."""
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def key(t: tf.Tensor) -> tuple[str, int]:
    return (t.op.name, t.value_index)


def input_rank(op: tf.Operation) -> Any:  # an int, or None if it is not known
    return op.inputs[0].shape.rank


def output_rank(op: tf.Operation) -> Any:
    return op.outputs[0].shape.rank


def when_traced(look: Callable[[tf.Graph], None]) -> None:
    """Calls ``look`` on the graph of every tf.function from here on, when it is traced and before it runs. An error
    that it raises comes out of the call that was to run it, and TensorFlow does not keep the function."""
    transform.FUNC_GRAPH_TRANSFORMS.append(look)


def released(x: tf.Tensor) -> tf.Tensor:
    """x, marked as public from here on."""
    x = tf.identity(x)
    RELEASED.setdefault(x.graph, set()).add(x.op.name)
    return x


def require(holds: tf.Tensor, message: str) -> tf.Operation:
    """An op that stops the step with this message unless ``holds``; a tenth of the ops that tf.debugging would make."""
    return tf.raw_ops.Assert(condition=holds, data=[tf.constant(message)], summarize=1)


def ancestors(
    targets: Iterable[tf.Tensor], stop: Iterable[tf.Tensor] = (), follow: Callable[[tf.Tensor], bool] | None = None
) -> dict[str, tf.Operation]:
    """The ops that the targets are computed from, by name, each after those it depends on, else as they were made; the
    walk does not pass tensors in ``stop``, nor inputs that ``follow`` says no to."""
    ends = {id(t) for t in stop}
    before: dict[str, set[str]] = {}
    after: dict[str, list[tf.Operation]] = collections.defaultdict(list)
    todo, ready = [t.op for t in targets if id(t) not in ends], []
    while todo:
        op = todo.pop()
        if op.name in before:
            continue
        inputs = {t.op.name: t.op for t in op.inputs if id(t) not in ends and (follow is None or follow(t))}
        before[op.name] = set(inputs)
        todo += inputs.values()
        for name in inputs:
            after[name].append(op)
        if not inputs:
            ready.append((op._id, op.name, op))
    heapq.heapify(ready)
    found: dict[str, tf.Operation] = {}
    while ready:
        _, name, op = heapq.heappop(ready)
        found[name] = op
        for user in after[name]:
            before[user.name].discard(name)
            if not before[user.name]:
                heapq.heappush(ready, (user._id, user.name, user))
    return found


def replace(old: tf.Tensor, new: tf.Tensor, for_good: bool = False) -> None:
    """Has all that takes in ``old`` take in ``new``, `for_good` or until `restore`."""
    for consumer in old.consumers():
        for i, t in enumerate(consumer.inputs):
            if key(t) == key(old):
                consumer._update_input(i, new)
                if not for_good:
                    record_of(old.graph).rewired.append((consumer.name, i, old.name))


def restore(graph: tf.Graph) -> None:
    """Takes back what `replace` did, but for good."""
    record = record_of(graph)
    while record.rewired:
        consumer, i, old = record.rewired.pop()
        graph.get_operation_by_name(consumer)._update_input(i, graph.get_tensor_by_name(old))


def function_names(attrs: dict) -> list[str]:
    """The functions that an op's attributes name."""
    return [f.name for value in attrs.values() for f in [value.func, *value.list.func] if f.name]


def source(t: tf.Tensor, *kinds: str) -> tf.Tensor:
    """Returns what a chain of Identity ops, or of these, began with."""
    while t.op.type in (kinds or ("Identity",)):
        t = t.op.inputs[0]
    return t


def same(t: tf.Tensor, like: tf.Tensor, known: dict[str, tf.Tensor]) -> bool:
    """Whether t is computed as ``like`` is, by the same ops with the same attributes and constants. ``known``: what
    stands for the placeholders that ``like`` is computed from, by their names."""
    pairs, seen = [(t, like)], set()
    while pairs:
        a, b = pairs.pop()
        if b.op.name in known:
            if key(a) != key(known[b.op.name]):
                return False
        elif (key(a), key(b)) not in seen:
            seen.add((key(a), key(b)))
            if a.value_index != b.value_index or not _same_op(a.op, b.op):
                return False
            pairs += zip(a.op.inputs, b.op.inputs, strict=True)
    return True


def _same_op(a: tf.Operation, b: tf.Operation) -> bool:
    mine, its = (
        {k: v for k, v in attributes(op).items() if not (function_names({k: v}) or k.startswith("_"))} for op in (a, b)
    )
    if a.type != b.type or mine != its or len(a.inputs) != len(b.inputs):
        return False
    for body, other in zip(body_graphs(a), body_graphs(b), strict=True):  # made in the same order, if the same
        ops, others = body.get_operations(), other.get_operations()
        if len(ops) != len(others) or _wiring(body) != _wiring(other) or not all(map(_same_op, ops, others)):
            return False
    return True


def _wiring(body: tf.Graph) -> list:
    """What each op of a function's body takes in, and what the body gives out, by the numbers of the ops."""
    number = {op.name: i for i, op in enumerate(body.get_operations())}
    return [[(number[t.op.name], t.value_index) for t in ts]
            for ts in [body.inputs, body.outputs, *(op.inputs for op in body.get_operations())]]  # fmt: skip


def attributes(op: tf.Operation) -> dict:
    """The op's attributes as they are now. Taking a gradient may change those of loops and calls."""
    return {k: v for k, v in op.node_def.attr.items() if k != "_class"}


def channels_first(op: tf.Operation) -> bool:
    """Whether an op of images takes the axis of the channels before those of the places."""
    return tf.compat.as_str(op.get_attr("data_format")).startswith("NC")


def copy_op(
    op: tf.Operation,
    inputs: Sequence[tf.Tensor],
    attrs: dict | None = None,
    dtypes: Sequence[tf.DType] | None = None,
) -> list[tf.Tensor]:
    """The same op on other inputs, in the current graph; ``attrs`` and ``dtypes`` as the op had them earlier."""
    made = tf.compat.v1.get_default_graph().create_op(
        op.type,
        list(inputs),
        list(dtypes) if dtypes is not None else [t.dtype for t in op.outputs],
        name=f"tfdpfl/{op.type}",
        attrs=attributes(op) if attrs is None else attrs,
    )
    for attribute in look_up(made).runs if not is_call(made) else ():
        # The gradient rewrites a loop's or branch's functions under names derived from theirs; the copy must not share
        # them.
        shapes = [t.shape for t in handed_on(made)]
        if is_loop(made):
            shapes = list(map(tf.TensorShape, made.get_attr("output_shapes")))
        name = made.get_attr(attribute).name
        body = control_flow_util_v2.get_func_graph(made, shapes, name)
        body.name = f"{name}_of_tfdpfl_{next(_numbers)}"
        setattr(made, _GRAPHS[attribute], body)
    if getattr(op, "_gradient_function", None) is not None:  # a call's gradient is kept beside the graph
        made._gradient_function = op._gradient_function
    return list(made.outputs)


def set_gradient(op: tf.Operation, gradient: Callable | None) -> None:
    """Has `tf.gradients` take this function for the op's gradient. None: TensorFlow's own, or that of the op's type."""
    op._gradient_function = gradient


def rewrite_bodies(op: tf.Operation, rewrite: Callable[[NodeDef], bool]) -> None:
    """Gives a loop or a branch functions of its own in which ``rewrite`` has changed nodes; it says whether it has."""
    for attribute in look_up(op).runs:
        name = op.get_attr(attribute).name
        function = _function(op.graph, name)
        definition = type(function.cached_definition)()
        definition.CopyFrom(function.cached_definition)
        if not any([rewrite(node) for node in definition.node_def]):
            continue
        shapes = [t.shape for t in handed_on(op)]
        with op.graph.as_default():
            body = function_def_to_graph.function_def_to_graph(definition, shapes)
            body.name = f"{name}_of_tfdpfl_{next(_numbers)}"
            op._set_func_attr(attribute, control_flow_util_v2.create_new_tf_function(body))
        setattr(op, _GRAPHS[attribute], body)


def lift_functions(source: tf.Graph, target: tf.Graph, attrs: dict) -> None:
    """Makes the functions that an op's attributes name known to another graph."""
    for name in function_names(attrs):
        if function := _function(source, name):
            target._add_function_recursive(function)


def _function(graph: tf.Graph | None, name: str):
    """A function by the name that an op of the graph has for it, or None."""
    while graph is not None:
        if (function := graph._get_function(name)) is not None:
            return function
        graph = getattr(graph, "outer_graph", None)
    return None


def captured(t: tf.Tensor):
    """Returns what a placeholder of a function's graph stands for outside, or None if it is an argument."""
    return next((outer for outer, inner in getattr(t.graph, "captures", ()) if inner is t), None)


def origin(t: tf.Tensor):
    """The tensor that a chain of captures began with: eager, or an argument of the outermost function."""
    while isinstance(getattr(t, "graph", None), tf.Graph) and not hasattr(t, "numpy"):
        outer = captured(t)
        if outer is None:
            break
        t = outer
    return t


# -- what ops run ----------------------------------------------------------------------------------------------


def is_call(op: tf.Operation) -> bool:
    return "f" in look_up(op).runs


def is_branch(op: tf.Operation) -> bool:
    return "then_branch" in look_up(op).runs


def is_loop(op: tf.Operation) -> bool:
    return "body" in look_up(op).runs


def handed_on(op: tf.Operation) -> list[tf.Tensor]:
    """Returns the inputs that an op hands to the functions that it runs: all but what a branch chooses by."""
    return list(op.inputs)[is_branch(op) :]


def function_graph(graph: tf.Graph, name: str, inputs: Sequence[tf.Tensor]) -> tf.Graph:
    """The body of a function that an op of ``graph`` calls."""
    function = _function(graph, name)
    traced = getattr(function, "graph", None)
    if isinstance(traced, tf.Graph):
        return traced
    if function is None:
        from tensorflow.python.eager import context

        definition = context.context().get_function_def(name)
    else:
        definition = getattr(function, "cached_definition", None) or function.definition
    with graph.as_default():
        return function_def_to_graph.function_def_to_graph(
            definition, input_shapes=[t.shape.as_proto() for t in inputs]
        )


def body_graphs(op: tf.Operation) -> Iterable[tf.Graph]:
    """Returns what a call, a branch or a loop runs; nothing for other ops."""
    for attribute in look_up(op).runs:
        yield function_graph(op.graph, op.get_attr(attribute).name, handed_on(op))


def within(ops: Iterable[tf.Operation]) -> Iterable[tf.Operation]:
    """The ops, and those in their bodies."""
    for op in ops:
        yield op
        for body in body_graphs(op):
            yield from within(body.get_operations())


def is_seeded(op: tf.Operation) -> bool:
    """Whether TensorFlow seeds the op when it is traced."""
    return "seed" in op.node_def.attr and "seed2" in op.node_def.attr


def is_random(op: tf.Operation) -> bool:
    """Whether the op gives out random numbers: it has a seed, or takes one in, or a generator's algorithm."""
    inputs = {each.name for each in op.op_def.input_arg}
    return "seed" in op.node_def.attr or not inputs.isdisjoint(["seed", "seed_generator", "alg", "algorithm"])


def inner_call(op: tf.Operation) -> tuple[tf.Operation, list[int]] | None:
    """Looks into a call whose body is one op: that op, and which inputs of the call feed it."""
    if not is_call(op) or len(op.outputs) != 1:
        return None
    body = function_graph(op.graph, op.get_attr("f").name, list(op.inputs))
    t = source(body.outputs[0])
    names = [i.op.name for i in body.inputs]
    feeds = []
    for i in t.op.inputs:
        i = source(i)
        if i.op.name not in names:
            return None
        feeds.append(names.index(i.op.name))
    return (t.op, feeds) if feeds else None


# -- constants ---------------------------------------------------------------------------------------------------


def constant(t: tf.Tensor, outside: Callable[[tf.Tensor], np.ndarray | None] = lambda t: None) -> np.ndarray | None:
    """The tensor's value where it follows from constants alone (TensorFlow's own folding stops at products), also from
    those that ``outside`` knows of tensors that the graph takes in."""
    value = tensor_util.constant_value(t)
    if value is None:
        value = outside(t)
    if value is not None:
        return value
    known = look_up(t.op)
    if known.folds is not None:
        values = [constant(i, outside) for i in t.op.inputs]
        value = None if any(v is None for v in values) else known.folds(t.op, *values)
        if value is not None:
            return np.asarray(value).astype(t.dtype.as_numpy_dtype)
    return None if known.value is None else known.value(t)


def known_entries(t: tf.Tensor) -> np.ndarray | None:
    """The entries of a tensor of numbers, as floats: NaN for those that do not follow from constants alone. None where
    the shape is not known."""
    value = constant(t)
    if value is not None:
        return np.asarray(value, float)
    if not t.shape.is_fully_defined():
        return None
    known = look_up(t.op)
    parts = [known_entries(i) for i in t.op.inputs] if known.arranges else [None]
    if known.folds is not None and not any(part is None for part in parts):
        try:
            return np.broadcast_to(known.folds(t.op, *parts), t.shape)
        except ValueError:  # a length or an axis is not known
            pass
    return np.full(t.shape, np.nan)


# -- gradients of an op's own ------------------------------------------------------------------------------------


def own_gradient_is_known(op: tf.Operation) -> bool:
    """Whether the op has TensorFlow's gradient, or one of its own that TensorFlow or Keras wrote."""
    try:
        name = op.get_attr("_gradient_op_type")
    except ValueError:
        return True
    if not tf.compat.as_str(name).startswith("CustomGradient"):
        return is_call(op)
    function = gradient_function(op)
    if not isinstance(function, types.FunctionType) or "<locals>" not in function.__qualname__:
        return False  # one that was written for another purpose
    return function.__module__.split(".")[0] in ("tensorflow", "keras", "tf_keras")


def passes_gradients_through(op: tf.Operation) -> bool:
    """Whether the gradients of the op's first inputs, the values, go to its last ones, the arguments, as they are."""
    if "_gradient_op_type" not in op.node_def.attr:
        return False
    return getattr(gradient_function(op), "__qualname__", "").startswith("grad_pass_through.")


def gradient_function(op: tf.Operation):
    """The function that tf.custom_gradient was given for the op's gradient."""
    return inspect.getclosurevars(_wrapped_gradient(op)).nonlocals.get("grad_fn")


def number_of_results(op: tf.Operation) -> int | None:
    """How many of the first inputs of an op that ends a tf.custom_gradient are its results; the others are its
    arguments, to which gradients go. None of other ops."""
    name = op.node_def.attr["_gradient_op_type"].s if "_gradient_op_type" in op.node_def.attr else b""
    if op.type != "IdentityN" or not name.startswith(b"CustomGradient"):
        return None
    return inspect.getclosurevars(_wrapped_gradient(op)).nonlocals.get("flat_result_len")


def recomputes(op: tf.Operation) -> bool:
    """Whether an op ends a tf.recompute_grad, whose gradient is but the derivative."""
    if number_of_results(op) is None:
        return False
    function = gradient_function(op)
    name = getattr(function, "__qualname__", "")
    return name.startswith("recompute_grad.") and function.__module__.startswith("tensorflow.")


def _wrapped_gradient(op: tf.Operation):
    """What tf.custom_gradient wraps the function for the gradient in."""
    function = ops.gradient_registry.lookup(tf.compat.as_str(op.get_attr("_gradient_op_type")))
    return inspect.getclosurevars(function).nonlocals["tape_grad_fn"]
