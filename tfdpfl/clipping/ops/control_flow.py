"""Calls, branches and loops, and what a graph takes in."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdpfl.clipping.graph import constant, function_graph
from tfdpfl.clipping.registry import Move, teach
from tfdpfl.clipping.states import (
    BY_POSITION,
    Batch,
    Items,
    Mixed,
    Public,
    Size,
    State,
    batches_of,
    counts_examples,
    deps,
    is_batch_free,
    meeting,
    mixed,
    plain,
)

__all__ = ["blank", "carried"]


def call(view, op, states):
    inner, outputs, _ = view.body(op, "f", list(op.inputs), states)
    # Of a function that is called twice, the entries would be of one name.
    return [plain(s) for s in outputs]


def branch(view, op, states):
    chosen = states[0]
    for state in states[1:]:
        if isinstance(state, Mixed):
            return state
    if not isinstance(chosen, Public | Size):
        return meeting(op, "takes a branch by data")
    if counts_examples(chosen):
        return mixed(op, "takes a branch by the batch size")
    branches = [
        view.body(op, attribute, list(op.inputs[1:]), states[1:])[1] for attribute in ("then_branch", "else_branch")
    ]
    return [join(op, t, a, b) for t, a, b in zip(op.outputs, *branches, strict=True)]


def cudnn_loop(view, op, states):
    """The loop of a Keras 3 LSTM or GRU on a GPU. Its gradient of the weights is one sum over examples and steps."""
    return mixed(op, "runs its loop in a kernel of cuDNN")


def loop(view, op, states):
    """A mixed value among those that a loop carries mixes only what is computed of it: a tape adds lists of its own."""
    states = list(states)
    inputs = list(op.inputs)
    for i, (t, s) in enumerate(zip(inputs, states, strict=True)):
        if isinstance(s, Public) and not s.alike and not s.deps:
            value = constant(t)
            if value is not None and value.size and np.all(value == value.flat[0]):
                states[i] = Public(alike=True)
    states = carried(view, op, states)
    if states is None:
        return mixed(op, "is not known to keep examples apart")
    _, (condition,), _ = view.body(op, "cond", inputs, states)
    if not is_batch_free(condition):
        found = [s for s in states if isinstance(s, Mixed)]
        return [found[0] if found else mixed(op, "runs for as many turns as the data says")] * len(op.outputs)
    return states


def carried(view, op, states: list[State], apart: bool = False) -> list[State] | None:
    """The states of what a loop hands from one iteration to the next, or None if they are not found. ``apart``: those
    of the body's results by themselves, also if the body makes a length that is to be checked."""
    for _ in range(2 * len(states) + 2):
        inner, out, graph = view.body(op, "body", list(op.inputs), states)
        results = [inner[t] for t in graph.outputs] if apart else out
        joined = [join(op, t, s, o) for t, s, o in zip(op.inputs, states, results, strict=True)]
        if joined == states:
            return states
        states = joined
    return None


def join(op, t, a: State, b: State) -> State:
    """The state of a value that is one of two."""
    for s in (a, b):
        if isinstance(s, Mixed):
            return s
    if a == b:
        return a
    # In the order Batch, Items, Public, Size.
    first, second = sorted((a, b), key=lambda s: type(s).__name__)
    join_two = _JOINS.get((type(first), type(second)))
    joined = join_two(op, t, first, second) if join_two else None
    return joined or mixed(op, "holds now one, now another kind of value")


def _two_public(op, t, a: Public, b: Public) -> State:
    return Public(a.deps | b.deps, a.alike and b.alike)


def _public_or_size(op, t, a: Public, b: Size) -> State:
    return Public(deps((a, b))) if b.batch_free else mixed(op, "makes the result depend on the batch size")


def _two_sizes(op, t, a: Size, b: Size) -> State:
    if not (a.batch_free and b.batch_free):
        return mixed(op, "makes the result depend on the batch size")
    return Size(tuple((None, 0) for _ in a.entries)) if len(a.entries) == len(b.entries) else Public()


def _batch_or_public(op, t, a: Batch, b: Public) -> State:
    fits = t.shape.rank is not None and not b.deps and (b.alike or t.shape[a.axis] == 1)
    return a if fits else mixed(op, BY_POSITION)


def _two_batches(op, t, a: Batch, b: Batch) -> State | None:
    same = a.axis == b.axis and a.blocks == b.blocks
    return Batch(a.axis, a.rows if a.rows == b.rows else None, a.blocks) if same else None


def _two_lists(op, t, a: Items, b: Items) -> State | None:
    for one, other in ((a, b), (b, a)):
        if one.empty:
            return other
        if blank(one.element) and isinstance(other.element, Batch):
            return other
    if isinstance(a.element, Public) and isinstance(b.element, Public):
        return Items(Public(a.element.deps | b.element.deps, a.element.alike and b.element.alike))
    return None


_JOINS: dict[tuple[type, type], Callable[..., State | None]] = {
    (Public, Public): _two_public, (Public, Size): _public_or_size, (Size, Size): _two_sizes,
    (Batch, Public): _batch_or_public, (Batch, Batch): _two_batches, (Items, Items): _two_lists,
}  # fmt: skip


def blank(element: State) -> bool:
    """An element of a list that nothing of consequence was put into."""
    return isinstance(element, Public) and element.alike and not element.deps


def python(view, op, states):
    return mixed(op, "runs Python code, which cannot be followed")


def reverse_sequence(view, op, states):
    batches = batches_of(states)
    if not batches:
        return None
    if isinstance(states[0], Batch) and states[0].axis == op.get_attr("batch_dim") and isinstance(states[1], Batch):
        return states[0]
    return meeting(op, "works along the batch axis")


def given_out(t: tf.Tensor) -> np.ndarray | None:
    """Of a call, a number or a list of integers that its body gives out."""
    if not t.dtype.is_integer or t.shape.rank not in (0, 1):
        return None
    return constant(function_graph(t.graph, t.op.get_attr("f").name, t.op.inputs).outputs[t.value_index])


# -- the records ------------------------------------------------------------------------------------------------------

teach(
    "PartitionedCall",
    "StatefulPartitionedCall",
    moves=Move(call, any_rank=True, entries=True),
    value=given_out,
    runs=("f",),
)
teach(
    "If", "StatelessIf", moves=Move(branch, data=None, any_rank=True, mixed=True), runs=("then_branch", "else_branch")
)
teach("CudnnRNN", "CudnnRNNV2", "CudnnRNNV3", moves=Move(cudnn_loop, data=None, mixed=True, any_rank=True))
teach("While", "StatelessWhile", moves=Move(loop, any_rank=True, mixed=True), runs=("body", "cond"))
teach("PyFunc", "PyFuncStateless", "EagerPyFunc", moves=Move(python))
teach("ReverseSequence", moves=Move(reverse_sequence, data=None))
teach("Placeholder", "PlaceholderV2", "IteratorGetNext", "OptionalGetValue", enters=True)
teach("Assert", "Print", "PrintV2", repeatable=True)
