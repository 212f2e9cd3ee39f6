"""Finds what ops write: where batch data gets into variables, and what may run once more."""

from __future__ import annotations

import re
from collections.abc import Iterable

import tensorflow as tf

from tfdpfl.clipping import graph as graph_tools
from tfdpfl.clipping.batch_axis import BatchAxis
from tfdpfl.clipping.graph import body_graphs, is_branch, is_call, is_loop, key, within
from tfdpfl.clipping.registry import look_up
from tfdpfl.clipping.states import TAINTED, Handle, Mixed, State, is_batch_free, mixed
from tfdpfl.errors import PrivacyError

__all__ = ["WRITES", "check_unwritten", "side_effects", "tainted", "tainted_read"]

WRITES = re.compile("Assign|^Resource(Sparse|Strided)?(Scatter|Apply)|^LookupTable(Insert|Remove|Import)|^RngSkip")


def assigns(op: tf.Operation, at: int) -> bool:
    """Whether an op, or what it runs, may write to the variable that is its input number ``at``."""
    if op.type == "SymbolicGradient":  # it runs the function, whose arguments come first, and gives each its gradient
        body = graph_tools.function_graph(op.graph, op.get_attr("f").name, op.inputs[: len(op.outputs)])
        return at < len(body.inputs) and _is_assigned(body.inputs[at])
    if not look_up(op).runs:
        return bool(WRITES.search(op.type) or graph_tools.function_names(op.node_def.attr))
    at -= is_branch(op)
    return any(_is_assigned(body.inputs[at]) or (is_loop(op) and _moves(body)) for body in body_graphs(op))


def _is_assigned(handle: tf.Tensor) -> bool:
    """Whether any op of the graph may write to a variable."""
    return any(
        (key(each) == key(handle) and assigns(user, i)) or any(_is_assigned(y) for y in _passed_on(user))
        for user in handle.consumers()
        for i, each in enumerate(user.inputs)
    )


def _passed_on(op: tf.Operation) -> list[tf.Tensor]:
    """Variables that an op gives out, which may be those that it takes in."""
    return [y for y in op.outputs if y.dtype == tf.resource]


def _moves(body: tf.Graph) -> bool:
    """Whether the body of a loop hands variables to the next turn in other places than it was given them in."""
    pairs = zip(body.inputs, body.outputs, strict=False)
    return any(y.dtype == tf.resource and key(graph_tools.source(y)) != key(x) for x, y in pairs)


def side_effects(ops: Iterable[tf.Operation]) -> list[tf.Operation]:
    """The ops, and those in their bodies, that write, draw or complain: run elsewhere or once more, they may do or give
    something else."""
    return [op for op in within(ops) if op._is_stateful and not (look_up(op).runs or look_up(op).reads)]


# -- variables that hold batch data ------------------------------------------------------------------------------


def tainted_read(view: BatchAxis) -> tuple[Mixed, Handle] | None:
    """A read of a variable that this same graph writes batch data to, and the variable, if there is one."""
    if view.outer is not None:
        found = tainted_read(view.outer)
        if found is not None:
            return found
    read = {handle: op for handle, op in view.reads}
    with_data = tainted(view, set(read))
    for handle, op in read.items():
        if handle in with_data:
            return mixed(op, TAINTED), handle
    return None


def tainted(view: BatchAxis, handles: set[State]) -> set[State]:
    """Those of the variables, and of all that are written to them, that the graph writes batch data to: at once,
    or by way of another variable and a later step."""
    handles, entries = written_from(view, handles)
    found: set[State] = set()
    look = view
    while entries:
        more = set(written(look, handles))
        if more <= found:
            return found
        found |= more
        look = BatchAxis(view.graph, view.source, vouched=view.vouched, tainted=frozenset(found))
    return found


def written_from(view: BatchAxis, handles: set[State]) -> tuple[set[State], bool]:
    """The variables with those that what is written to them is computed from, and whether anything else that enters
    the graph is among what it is computed from."""
    known, new, entries = set(), set(handles), False
    while new:
        known |= new
        found, writing = set(), []
        for op, _ in writes(view, new):
            if not is_call(op):
                writing.append(op)
                entries = entries or bool(look_up(op).runs)  # may take something in
                continue
            for inner, _ in view.bodies(op):
                inside, more = written_from(inner, known)
                found |= inside
                entries = entries or more
                writing += [op] if more else []  # else what is written follows from none of the call's inputs
        handles_read, more = _computed_from(view, writing)
        new = (found | handles_read) - known
        entries = entries or more
    return known, entries


def _computed_from(view: BatchAxis, ops: list[tf.Operation]) -> tuple[set[State], bool]:
    """The variables that ops, and what they are computed from, take in; a call's own are its body's. And whether
    anything else that enters the graph is among what they are computed from."""
    released = graph_tools.RELEASED.get(view.graph, ())
    read = graph_tools.ancestors(
        [t for op in ops for t in op.inputs if not is_call(op) or t.dtype != tf.resource],
        follow=lambda t: t.op.name not in released,
    )
    using = [*(op for op in ops if not is_call(op)), *read.values()]
    resources = {key(t): t for op in using for t in op.inputs if t.dtype == tf.resource}
    entries = any(look_up(op).enters and op.outputs[0].dtype != tf.resource for op in read.values())
    return {view.handle(t) for t in resources.values()}, entries


def writes(view: BatchAxis, handles: set[State]) -> Iterable[tuple[tf.Operation, set[State]]]:
    """The ops of the graph that may write to some of the variables, and to which."""
    if not handles:
        return
    if view.writers is None:
        view.writers = []
        for op in view.graph.get_operations():
            if look_up(op).reads:
                continue
            resources = [t for i, t in enumerate(op.inputs) if t.dtype == tf.resource and assigns(op, i)]
            if resources:
                view.writers.append((op, resources))
    for op, resources in view.writers:
        mine = handles.intersection(map(view.handle, resources))
        if mine:
            yield op, mine


def written(view: BatchAxis, handles: set[State]) -> Iterable[State]:
    """Those of the variables that any op of the graph, or of what it calls, may write batch data to."""
    for op, mine in writes(view, handles):
        states = [view[t] for t in op.inputs]
        if look_up(op).runs:
            public = flows_by_public_values(view, op, states)
            for inner, _ in view.bodies(op):
                yield from written(inner, mine)
                for _, there in () if public else writes(inner, mine):  # whether it is written to tells of the data
                    yield from there
        elif not all(isinstance(s, Handle) or is_batch_free(s) for s in states):
            yield from mine


def flows_by_public_values(view: BatchAxis, op: tf.Operation, states: list[State]) -> bool:
    """Whether no example has a say in which branch is taken, or how often a loop turns."""
    if view.vouched(op):
        return True
    if is_branch(op):
        return is_batch_free(states[0])
    if is_loop(op):
        _, (condition,), _ = view.body(op, "cond", list(op.inputs), view.over_turns(op))
        return is_batch_free(condition)
    return True


# -- what runs again ---------------------------------------------------------------------------------------------


def written_since(op: tf.Operation, view: BatchAxis) -> tf.Operation | None:
    """Returns what was made after a loop or a call, and writes to a variable that it takes in."""
    handles = {view.handle(t) for t in op.inputs if t.dtype == tf.resource}
    return next((later for later, _ in writes(view, handles) if later._id > op._id), None)


def check_unwritten(op: tf.Operation, analysis: BatchAxis) -> None:
    """That a loop or a call may be run once more: it then reads its variables anew."""
    write = written_since(op, analysis)
    if write is not None:
        raise PrivacyError(
            f"{write.type} ({write.name!r}) writes to a variable that {op.type} ({op.name!r}) reads, after the loss "
            "was computed. The private step reads the variable once more, and would find the new value: write to the "
            "variable before the loss is computed, or after the private step."
        )
