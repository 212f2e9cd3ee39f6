"""Small tools for reading and copying TensorFlow graphs; the engine's only view of TensorFlow's internals
besides `batch_axis`."""

from __future__ import annotations

import collections
import heapq
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import transform
from tensorflow.python.framework import function_def_to_graph
from tensorflow.python.ops import control_flow_util_v2

_numbers = itertools.count()
# By graph the names of the ops that give out what is private: whatever follows from it alone is public.
RELEASED: weakref.WeakKeyDictionary[tf.Graph, set[str]] = weakref.WeakKeyDictionary()


# Where TensorFlow's gradients look for what a loop or a branch runs.
_GRAPHS = {
    "While": {"cond": "_cond_graph", "body": "_body_graph"},
    "If": {"then_branch": "_true_graph", "else_branch": "_false_graph"},
}


def when_traced(look: Callable[[tf.Graph], None]) -> None:
    """Calls ``look`` on the graph of every tf.function from here on, when it is traced and before it runs. What it
    raises comes out of the call that was to run it, and TensorFlow does not keep the function."""
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


def function_names(attrs: dict) -> list[str]:
    """The functions that an op's attributes name."""
    return [f.name for value in attrs.values() for f in [value.func, *value.list.func] if f.name]


def source(t: tf.Tensor) -> tf.Tensor:
    """What a chain of Identity ops began with."""
    while t.op.type == "Identity":
        t = t.op.inputs[0]
    return t


def attributes(op: tf.Operation) -> dict:
    """The op's attributes as they are now. Taking a gradient may change those of loops and calls."""
    return {k: v for k, v in op.node_def.attr.items() if k != "_class"}


def copy_op(
    op: tf.Operation,
    inputs: Sequence[tf.Tensor],
    attrs: dict | None = None,
    dtypes: Sequence[tf.DType] | None = None,
    loose: bool = False,
) -> list[tf.Tensor]:
    """The same op on other inputs, in the current graph; ``attrs`` and ``dtypes`` as the op had them earlier. With
    ``loose`` a branch forgets the shapes that it was made for, and takes those of its inputs."""
    made = tf.compat.v1.get_default_graph().create_op(
        op.type,
        list(inputs),
        list(dtypes) if dtypes is not None else [t.dtype for t in op.outputs],
        name=f"tfdpfl/{op.type}",
        attrs=attributes(op) if attrs is None else attrs,
    )
    for kind, place in _GRAPHS.get(made.type.removeprefix("Stateless"), {}).items():
        # The gradient rewrites a loop's or branch's functions under names derived from theirs; the copy must not share
        # them.
        loops = made.type.endswith("While")
        shapes = map(tf.TensorShape, made.get_attr("output_shapes")) if loops else [t.shape for t in made.inputs[1:]]
        name = made.get_attr(kind).name
        if loose and not loops:
            body = _loosened(made, name)
        else:
            body = control_flow_util_v2.get_func_graph(made, list(shapes), name)
        body.name = f"{name}_tfdpfl_{next(_numbers)}"
        setattr(made, place, body)
    if getattr(op, "_gradient_function", None) is not None:  # a call's gradient is kept beside the graph
        made._gradient_function = op._gradient_function
    return list(made.outputs)


def _loosened(op: tf.Operation, name: str) -> tf.Graph:
    """A branch of an If, for the shapes of the op's inputs; the op's outputs get those of the branch's."""
    graph = op.graph
    while (function := graph._get_function(name)) is None:
        graph = graph.outer_graph
    definition = type(function.cached_definition)()
    definition.CopyFrom(function.cached_definition)
    for attrs in [*(arg.attr for arg in definition.arg_attr.values()), *(node.attr for node in definition.node_def)]:
        attrs.pop("_output_shapes", None)
        if function_names(attrs):  # what it calls was traced, and its gradient taken, for those shapes
            raise ValueError("it calls a function that was traced for a batch of static size")
    with op.graph.as_default():
        body = function_def_to_graph.function_def_to_graph(definition, [t.shape for t in op.inputs[1:]])
    for t, made in zip(op.outputs, body.outputs, strict=True):
        t.set_shape(made.shape)
    return body


def lift_functions(source: tf.Graph, target: tf.Graph, attrs: dict) -> None:
    """Makes the functions that an op's attributes name known to another graph."""
    for name in function_names(attrs):
        graph = source
        while graph is not None:
            function = graph._get_function(name)
            if function is not None:
                if hasattr(target, "_add_function_recursive"):
                    target._add_function_recursive(function)
                else:
                    target._add_function(function)
                break
            graph = getattr(graph, "outer_graph", None)


def captured(t: tf.Tensor):
    """What a placeholder of a function's graph stands for outside, or None if it is an argument."""
    return next((outer for outer, inner in getattr(t.graph, "captures", ()) if inner is t), None)


def origin(t: tf.Tensor):
    """The tensor that a chain of captures began with: eager, or an argument of the outermost function."""
    while isinstance(getattr(t, "graph", None), tf.Graph) and not hasattr(t, "numpy"):
        outer = captured(t)
        if outer is None:
            break
        t = outer
    return t
