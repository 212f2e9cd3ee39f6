"""Checks on a step once all of it is traced: what it leaves behind, who decides whether it is taken, and what is handed
in as weights."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tfdpfl.clipping import graph as graph_tools
from tfdpfl.clipping.batch_axis import BatchAxis
from tfdpfl.clipping.graph import body_graphs, handed_on, is_branch, is_call, is_loop
from tfdpfl.clipping.ops.control_flow import carried
from tfdpfl.clipping.refusals import mixing
from tfdpfl.clipping.registry import look_up
from tfdpfl.clipping.states import TAINTED, Handle, Mixed, Public, State, is_batch_free, mixed
from tfdpfl.clipping.variable_writes import tainted
from tfdpfl.errors import PrivacyError

__all__ = [
    "READ",
    "before_it_runs",
    "check_arguments",
    "check_finished",
    "check_public",
    "handles_of",
    "name_of",
    "raw_variable",
    "resource",
    "versions",
]

# By graph: the variables that its losses read, with the reading op's type and name.
READ: weakref.WeakKeyDictionary[tf.Graph, dict[Handle, tuple[str, str]]] = weakref.WeakKeyDictionary()

# By graph of a private update: what to ask of every function that runs it, once it is traced.
_ASKED: weakref.WeakKeyDictionary[tf.Graph, list[Callable[[], None]]] = weakref.WeakKeyDictionary()

# By graph: at what version it was looked at, for which variables, and which of them it writes batch data to.
_WRITTEN: weakref.WeakKeyDictionary[tf.Graph, tuple[int, frozenset[Handle], set[State]]] = weakref.WeakKeyDictionary()


def before_it_runs(graph: tf.Graph, ask: Callable[[], None]) -> None:
    """Calls ``ask`` whenever a tf.function was traced that runs ``graph``, also one that was traced earlier and is
    called in a new function; no such function runs if it raises. It costs nothing afterwards. ``ask`` must hold neither
    the graph nor the model, or they would never be freed."""
    _ASKED.setdefault(graph, []).append(ask)


def _ask(finished: tf.Graph) -> None:
    if not _ASKED:
        return
    for graph, path, own in list(_steps(finished)):
        around = graph_tools.graphs_around(graph)
        around += [g for g in path if all(g is not other for other in around)]
        try:
            for ask in _ASKED[graph]:
                ask()
        except PrivacyError as error:  # it will not run
            around[:] = [g for g in around if g is not finished]
            if own:
                READ.pop(graph, None)
            raise error.with_traceback(None) from None


graph_tools.when_traced(_ask)


def _steps(graph: tf.Graph) -> Iterator[tuple[tf.Graph, list[tf.Graph], bool]]:
    """The graphs of private updates that a graph runs, the graphs on the way there, and whether none of these is
    another function, which may be called elsewhere, too."""
    if graph in _ASKED:
        yield graph, [], True
    for op in graph.get_operations():
        for body in body_graphs(op):
            for step, path, own in _steps(body):
                yield step, [*path, graph], own and not is_call(op)


def resource(t: tf.Tensor) -> Handle | None:
    """Returns what `BatchAxis` is to know of a tensor from outside, where the variables that are trained are like
    others."""
    return Handle(None, id(graph_tools.origin(t))) if t.dtype == tf.resource else None


def versions(graph: tf.Graph) -> tuple[int, ...]:
    """Returns what changes when the step, or what is around it, is traced further."""
    return tuple(g.version for g in (graph, *graph_tools.graphs_around(graph)))


def check_finished(graph: tf.Graph, kept: Sequence = ()) -> None:
    """Looks again at a graph in which losses were clipped, now that all of the step is in it.

    Args:
      graph: the graph of the losses.
      kept: variables that are released with the model, or say how it is trained; those that are trained may be among
        them.

    Raises:
      PrivacyError: after the clip the step writes batch data to a variable that a loss reads (in the next step), or to
        one of ``kept``; or examples decide whether, or how often, the step is taken.
    """
    read = READ.get(graph)
    if read is None:
        return
    inside = [graph, *graph_tools.graphs_around(graph)]
    chosen: dict[Handle, tf.Operation] = {}
    for outermost in inside:
        if not isinstance(getattr(outermost, "outer_graph", None), tf.__internal__.FuncGraph):
            _choices(BatchAxis(outermost, _numbered), chosen)
    handles = {Handle(None, id(handle)): v for v in kept for handle in handles_of(v)}
    found: set[State] = set()
    for each in inside:
        found |= _written(each, frozenset([*read, *handles, *chosen]))
    for handle, v in handles.items():
        if handle in found:
            raise PrivacyError(
                f"The step writes batch data to {name_of(v)!r}, which is saved with the model and has no noise. Keep "
                "such statistics out of the model, or fix them before training. Train weights by the private "
                "optimizer, or from public values (numbers that are drawn for each example are not public: draw a "
                "fixed number)."
            )
    for handle, (kind, name) in read.items():
        if handle in found:
            raise PrivacyError(mixing(Mixed(kind, name, TAINTED)))
    for handle, op in chosen.items():
        if handle in found:
            raise _chosen_by_examples(op)


def _written(graph: tf.Graph, handles: frozenset[Handle]) -> set[State]:
    """Those of the variables that a graph of a step writes batch data to. It was the same when a function was traced
    that is called in the one that is traced now."""
    version, asked, found = _WRITTEN.get(graph, (-1, frozenset(), set()))
    if version != graph.version or asked != handles:
        analysis = BatchAxis(graph, resource, vouched=lambda op: not is_call(op) and _holds_a_step(op))  # `_choices`
        found = tainted(analysis, set(handles))
        _WRITTEN[graph] = graph.version, handles, found
    return found


def _holds_a_step(op: tf.Operation) -> bool:
    """Whether a private update is among what a loop, a branch or a call runs."""
    return any(
        body in graph_tools.RELEASED or any(map(_holds_a_step, body.get_operations())) for body in body_graphs(op)
    )


def _numbered(t: tf.Tensor) -> Handle | None:
    """As `resource`, so that what is public says which variables it was read from."""
    handle = resource(t)
    return handle and dataclasses.replace(handle, index=id(graph_tools.origin(t)))


def _choices(analysis: BatchAxis, chosen: dict[Handle, tf.Operation]) -> None:
    """Checks that no examples decide whether, or how often, a step is taken; whether the data are at their end may.
    ``chosen`` comes to hold the variables that decide."""
    for op in analysis.graph.get_operations():
        if not _holds_a_step(op):
            continue
        inputs, look, chooser = handed_on(op), analysis, op.inputs[0] if is_branch(op) else None
        states = [analysis[t] for t in inputs]
        if is_loop(op):
            # Each by itself: what is counted stays public next to a loss.
            unknown = mixed(op, "is not known to keep examples apart")
            states = carried(analysis, op, states, apart=True) or [unknown] * len(states)
            look, _, condition = analysis.body(op, "cond", inputs, states)
            chooser = condition.outputs[0]
        for t in [] if chooser is None else _terms(chooser):
            state = look[t]
            if t.op.type != "OptionalHasValue" and not is_batch_free(state):
                raise _chosen_by_examples(op)
            chosen.update({Handle(None, i): op for i in getattr(state, "deps", ())})
        for attribute in look_up(op).runs:
            if attribute != "cond":
                _choices(analysis.body(op, attribute, inputs, states)[0], chosen)


def _terms(t: tf.Tensor) -> list[tf.Tensor]:
    t = graph_tools.source(t)
    return [each for i in t.op.inputs for each in _terms(i)] if t.op.type == "LogicalAnd" else [t]


def _chosen_by_examples(op: tf.Operation) -> PrivacyError:
    how = "as often as examples say" if is_loop(op) else "or leaves it out, and examples decide which"
    return PrivacyError(f"{op.type} ({op.name!r}) takes a private step {how}. Take the step once on every batch.")


def check_public(i: int, v: tf.Tensor, state) -> None:
    """That no example has a part in what the weights are: what moves them, moves the others' gradients."""
    if not is_batch_free(state):
        why = state.describe() if isinstance(state, Mixed) else "it holds rows of examples, or how many there are"
        raise PrivacyError(
            f"variables[{i}] ({v.op.type} {v.op.name!r}) is computed from the batch: {why}. One example would change "
            "the gradients of all. Compute weights from variables and public values, and add noise to everything that "
            "comes from examples. If the argument of the function holds weights, pass the argument itself."
        )


def check_arguments(graph: tf.Graph, arguments: dict[str, int]) -> None:
    """That what calls and loops hand in for weights is public; what the outermost function is given is taken to be."""
    assumed = {(id(graph), name) for name in arguments}  # the others' checks make it so
    source = lambda t: Public() if (id(t.graph), t.op.name) in assumed else resource(t)  # noqa: E731
    todo = [(graph, name, i) for name, i in arguments.items()]
    given: list[tuple[int, tf.Tensor]] = []
    while todo:
        inside, name, i = todo.pop()
        at = [t.op.name for t in inside.inputs].index(name)
        for t in _handed_in(inside, at, graph_tools.graphs_around(graph)):
            while t.op.type == "Identity" or isinstance(getattr(graph_tools.captured(t), "graph", None), tf.Graph):
                t = t.op.inputs[0] if t.op.inputs else graph_tools.captured(t)
            if t.op.type != "Placeholder" or graph_tools.captured(t) is not None:
                given.append((i, t))
            elif (id(t.graph), t.op.name) not in assumed:
                assumed.add((id(t.graph), t.op.name))
                todo.append((t.graph, t.op.name, i))
    for i, t in given:
        check_public(i, t, BatchAxis(t.graph, source)[t])


def _handed_in(graph: tf.Graph, at: int, around: list[tf.Graph]) -> Iterator[tf.Tensor]:
    """What a function, or a loop at each of its turns, gets as argument number ``at``."""
    for caller in around:
        for op in caller.get_operations():
            if any(body is graph for body in body_graphs(op)):
                yield handed_on(op)[at]
                if is_loop(op):
                    yield graph.outputs[at]


def raw_variable(v):
    """The tf.Variable inside a Keras variable, or the thing itself."""
    inner = getattr(v, "_value", None)
    # Asked of the class: between replicas a mirrored one has no handle to show.
    return inner if hasattr(type(inner), "handle") else v


def name_of(v) -> str:
    return getattr(v, "path", v.name)


def handles_of(v) -> list[tf.Tensor]:
    """The handles of a variable: one on each device that it lives on."""
    v = raw_variable(v)
    return [each.handle for each in getattr(v, "values", [v])]
