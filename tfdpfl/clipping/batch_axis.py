"""Which axis of each tensor holds the examples, and where the examples get mixed.

`BatchAxis` reads a graph from what it takes in to a target, and asks for each op what it does with the examples
(`registry.Op.moves`). Ops that are not known mix, by default: a model is trained only if each of its ops is shown
to keep examples apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import tensorflow as tf

from tfdpfl.clipping import graph as graph_tools
from tfdpfl.clipping.graph import constant, function_graph, handed_on, is_call, is_loop, key, own_gradient_is_known
from tfdpfl.clipping.registry import Move, look_up
from tfdpfl.clipping.states import (
    TAINTED,
    UNKNOWN,
    Batch,
    Entries,
    Entry,
    Handle,
    Items,
    Mixed,
    Public,
    Size,
    State,
    deps,
    first_mixed,
    has_examples,
    is_batch_free,
    mixed,
    plain,
    weighs,
)

__all__ = ["BatchAxis"]


class BatchAxis:
    """States of all tensors of ``graph`` that ``targets`` are computed from.

    Args:
      graph: the graph to read.
      source: gives the state of a tensor that the graph takes from outside (a placeholder or an iterator's
        element), or None to have the default.
      vouched: says of a loop or a branch that who chooses what it runs was looked at.
      tainted: variables that are known to hold batch data.
      within: it reads the body of a call, a branch or a loop, or a graph around that of the loss.

    Attributes:
      states, ops: what was found so far, by tensor and by name.
      sources: the tensors that examples come in by.
      checks: (tensor, axis): the axis' length must divide by the batch size.
      reads: the variables that were read, and by which op.
      writers: what may write to a variable, once `variable_writes` has looked.
      handed_in: for each placeholder of the body of a call, who called, and what it stands for there.
      customised: ops with a gradient of their own that is still to be looked at (`own_gradients`).
    """

    def __init__(
        self, graph: tf.Graph, source: Callable[[tf.Tensor], State | None], *,
        vouched: Callable[[tf.Operation], bool] = lambda op: False, tainted: frozenset[State] = frozenset(),
        within: bool = False,
    ):  # fmt: skip
        self.graph = graph
        self.source = source
        self.states: dict[tuple[str, int], State] = {}
        self.ops: dict[str, tf.Operation] = {}
        self.sources: list[tf.Tensor] = []
        self.checks: list[tuple[tf.Tensor, int]] = []
        self.reads: list[tuple[Handle, tf.Operation]] = []
        self.vouched, self.tainted, self.within = vouched, tainted, within
        self.writers: list[tuple[tf.Operation, list[tf.Tensor]]] | None = None
        self.customised: list[tf.Operation] = []
        self.outer: BatchAxis | None = None
        self.version = graph.version
        self._bodies: dict[tuple, BatchAxis] = {}
        self.handed_in: dict[tuple[str, int], tuple[BatchAxis, tf.Tensor]] = {}
        for name in graph_tools.RELEASED.get(graph, ()):
            self.ops[name] = graph.get_operation_by_name(name)
            self.states[(name, 0)] = Public()

    # -- driving ---------------------------------------------------------------------------------------------

    def run(self, targets: Iterable[tf.Tensor]) -> None:
        """Finds the states of the targets and of all that they depend on."""
        new = lambda t: t.op.name not in self.ops  # noqa: E731
        for op in graph_tools.ancestors([t for t in targets if new(t)], follow=new).values():
            self.ops[op.name] = op
            states = self._transfer(op)
            for i, state in enumerate(states):
                self.states[(op.name, i)] = state

    def __getitem__(self, t: tf.Tensor) -> State:
        if key(t) not in self.states:
            self.run([t])
        return self.states[key(t)]

    def entries(self, t: tf.Tensor) -> tuple[Entry, ...]:
        """The tensor as a vector of (coefficient, power of the batch size)."""
        state = self[t]
        if isinstance(state, Size):
            return state.entries
        if isinstance(state, Public):
            value = constant(t)
            if value is not None and value.ndim <= 1 and value.dtype.kind in "iuf":
                return tuple((v if int(v) != v else int(v), 0) for v in np.atleast_1d(value).tolist())
            if t.op.type == "Pack" and t.shape.rank == 1:
                return tuple(e for i in t.op.inputs for e in self.entries(i))
            n = t.shape.num_elements()
            return tuple([(None, 0)] * (1 if n is None else n))
        n = t.shape.num_elements()
        return tuple([UNKNOWN] * (1 if n is None else n))

    def constant(self, t: tf.Tensor) -> np.ndarray | None:
        """The tensor's value where it follows from constants alone, also from those that a call handed in."""
        return constant(t, self._handed_in)

    def _handed_in(self, t: tf.Tensor) -> np.ndarray | None:
        caller = self.handed_in.get(key(t))
        return caller[0].constant(caller[1]) if caller else None

    def takes_weights(self, op: tf.Operation) -> bool:
        return any(weighs(self[t]) for t in op.inputs)

    def uses_weights(self, op: tf.Operation) -> bool:
        """Whether the op makes something of each example with weights."""
        return self.takes_weights(op) and has_examples(self[t] for t in self._outputs(op))

    def differentiable(self, op: tf.Operation) -> list[tf.Tensor]:
        """The outputs of the op that hold examples and have gradients."""
        return [t for t in self._outputs(op) if t.dtype.is_floating and isinstance(self[t], Batch)]

    def _outputs(self, op: tf.Operation) -> list[tf.Tensor]:
        """The op's own outputs: a gradient through a call gives the call more of them."""
        return [t for t in op.outputs if op.name not in self.ops or key(t) in self.states]

    def declare_state(self, t: tf.Tensor, state: State) -> None:
        """Sets the state of a tensor that was made, or is known, otherwise than by what the graph shows."""
        self.ops[t.op.name] = t.op
        self.states[key(t)] = state

    def note_read(self, handle: Handle, op: tf.Operation) -> None:
        self.reads.append((handle, op))

    def require_divisible(self, t: tf.Tensor, axis: int) -> None:
        """Has the running step check that the batch size divides the length of an axis."""
        self.checks.append((t, axis))

    def replace_sources(self, freed: Mapping[tuple[str, int], tf.Tensor]) -> None:
        """Has these tensors, by the keys of sources, stand for them."""
        self.sources = [freed.get(key(t), t) for t in self.sources]

    # -- one op ----------------------------------------------------------------------------------------------

    def _transfer(self, op: tf.Operation) -> list[State]:
        states, known = [self.states[key(t)] for t in op.inputs], look_up(op)
        if known.enters:
            return [self._enter(t) for t in op.outputs]
        found = self._refused(op, states) or self._moved(op, states)
        if isinstance(found, Mixed) and found.name == op.name:
            found = self._met_before(op, states) or found
        given = found if isinstance(found, list) else [found] * len(op.outputs)
        if not _move_of(op).entries:
            given = [plain(s) for s in given]
        if known.runs and not has_examples(states):  # the data come in there
            # A function whose gradient was taken has more results than the op gives out.
            self.sources += [t for t, s in zip(op.outputs, given, strict=False) if isinstance(s, Batch)]
        return given

    def _met_before(self, op: tf.Operation, states: list[State]) -> Mixed | None:
        """Where examples met earlier, if that is why an op's shape is not known: that is what is to be fixed."""
        for t, s in zip(op.inputs, states, strict=True):
            if isinstance(s, Size) and any(power is None for _, power in s.entries):
                for before in graph_tools.ancestors([t]).values():
                    state = self.states.get((before.name, 0))
                    if isinstance(state, Mixed):
                        return state
        return None

    def _refused(self, op: tf.Operation, states: list[State]) -> Mixed | None:
        """What no op is taken with, unless its move says so."""
        if self._may_mix_gradients(op, states):
            if self.within or graph_tools.number_of_results(op) is None:
                return mixed(op, "has a gradient of its own (tf.custom_gradient), which is not known")
            self.customised.append(op)
        move = _move_of(op)
        return _unexpected(op, states, move) or _misled(op, states, move)

    @staticmethod
    def _may_mix_gradients(op: tf.Operation, states: list[State]) -> bool:
        """Whether its gradient may mix what its value keeps apart, or add weights' gradients up."""
        of_weights = op.type == "IdentityN" and any(map(weighs, states))
        if not of_weights and own_gradient_is_known(op):
            return False
        return not all(isinstance(s, Public) and not s.deps for s in states)

    def _moved(self, op: tf.Operation, states: list[State]) -> State | list[State]:
        result = _move_of(op).transfer(self, op, states)
        if result is not None:
            return result
        if met := first_mixed(states):
            return plain(met)
        if op._is_stateful and any(t.dtype != tf.resource for t in op.outputs):
            return mixed(op, "may give out what an earlier step was given")
        if all(map(is_batch_free, states)):
            return Public(deps(states))
        if not has_examples(states):
            return mixed(op, "makes the result depend on the batch size")
        return mixed(op, "is not known to keep examples apart")

    # -- what comes from outside -----------------------------------------------------------------------------

    def _enter(self, t: tf.Tensor) -> State:
        given = self.source(t)
        if given is not None:
            return given
        outer = graph_tools.captured(t)
        if outer is not None:
            return self._captured(t, outer)
        if t.dtype in (tf.resource, tf.variant):
            return Handle(None, t.op.name) if t.dtype == tf.resource else mixed(
                t.op, "takes in a value that is no tensor")  # fmt: skip
        if t.shape.rank == 0:
            within = isinstance(getattr(t.graph, "outer_graph", None), tf.__internal__.FuncGraph)
            if t.op.type == "IteratorGetNext" or within:
                return mixed(t.op, "hands in a number that may come from examples, and how is not to be seen here;"
                                 " keep a number that is public in a tf.Variable, if it is one,")  # fmt: skip
            return Public()
        self.sources.append(t)
        return Batch(0)

    def _captured(self, t: tf.Tensor, outer: tf.Tensor) -> State:
        if not isinstance(getattr(outer, "graph", None), tf.Graph):
            return Public()  # an eager tensor: the same whatever the batch
        if self.outer is None:
            self.outer = BatchAxis(outer.graph, self.source, within=True)
        state = self.outer[outer]
        if self.outer.checks:  # a length outside cannot be checked from here
            return mixed(self.outer.checks[0][0].op, "is not known to keep examples apart")
        self.sources += [t] if isinstance(state, Batch) else []
        return state

    def handle(self, t: tf.Tensor) -> State:
        """The state of a resource: a `Handle`, also of one made in the graph."""
        state = self[t]
        if not isinstance(state, Public):
            return state
        shared = t.op.node_def.attr["shared_name"].s if "shared_name" in t.op.node_def.attr else b""
        return Handle(None, (t.op.type, shared) if shared else t.op.name)

    def held(self, op: tf.Operation) -> Public | Mixed:
        """Returns what the variable holds that an op reads, its first input."""
        handle = self.handle(op.inputs[0])
        if not isinstance(handle, Handle):
            return handle if isinstance(handle, Mixed) else mixed(op, "reads a variable that is not known")
        if handle in self.tainted:
            return mixed(op, TAINTED)
        self.note_read(handle, op)
        return Public(frozenset() if handle.index is None else frozenset([handle.index]))

    # -- what ops run ----------------------------------------------------------------------------------------

    def bodies(self, op: tf.Operation) -> Iterable[tuple[BatchAxis, tf.Graph]]:
        """Returns what a call, a branch or a loop runs, with the states that it is given."""
        inputs = handed_on(op)
        states = self.over_turns(op) if is_loop(op) else [
            self.handle(t) if t.dtype == tf.resource else self[t] for t in inputs]  # fmt: skip
        for attribute in look_up(op).runs:
            inner, _, graph = self.body(op, attribute, inputs, states)
            yield inner, graph

    def over_turns(self, op: tf.Operation) -> list[State]:
        """Returns what a loop hands from one iteration to the next."""
        before = [self[t] for t in op.inputs]
        # Of one that `InlinedControlFlow` made, only what varies has a state.
        if op.name in self.ops and any(key(t) not in self.states for t in op.outputs):
            return before
        return [s if isinstance(s, Handle) else self[t] for s, t in zip(before, op.outputs, strict=True)]

    def body(
        self, op: tf.Operation, attribute: str, inputs: list[tf.Tensor], states: list[State]
    ) -> tuple[BatchAxis, list[State], tf.Graph]:
        """Analyses what an op runs, given the states of its inputs; each body once for the same states."""
        name = op.get_attr(attribute).name
        question = (op.name, name, *states)
        inner = self._bodies.get(question)
        if inner is None or inner.version != inner.graph.version:
            graph = function_graph(op.graph, name, inputs)
            given = {t.op.name: s for t, s in zip(graph.inputs, states, strict=True)}
            inner = BatchAxis(
                graph, lambda t: given.get(t.op.name), vouched=self.vouched, tainted=self.tainted, within=True
            )
            self._bodies[question] = inner
            if is_call(op):
                inner.handed_in = {key(t): (self, i) for t, i in zip(graph.inputs, inputs, strict=True)}
            inner.run([*graph.inputs, *graph.outputs])
            self.reads += inner.reads
        graph = inner.graph
        if inner.checks:  # a length inside a body cannot be checked from outside
            bad = inner.checks[0][0].op
            return inner, [mixed(op, f"has a {bad.type} that is not known to keep examples apart")] * len(
                graph.outputs), graph  # fmt: skip
        return inner, [inner[t] for t in graph.outputs], graph


# What is asked of an op that is not known.
_UNKNOWN = Move(lambda view, op, states: None)


def _move_of(op: tf.Operation) -> Move:
    return look_up(op).moves or _UNKNOWN


def _unexpected(op: tf.Operation, states: list[State], move: Move) -> Mixed | None:
    """An op with inputs that its move is not made for."""
    for state in states:
        if isinstance(state, Mixed) and not (move.mixed or (move.entries and isinstance(state, Entries))):
            return state
    batches = [(t, s) for t, s in zip(op.inputs, states, strict=True) if isinstance(s, Batch)]
    if not move.blocks and any(s.blocks > 1 for _, s in batches):
        return mixed(op, "is not known to keep examples apart in a dilated window")
    if not move.any_rank and any(t.shape.rank is None for t, _ in batches):
        return mixed(op, "has a shape of unknown rank")
    return None


def _misled(op: tf.Operation, states: list[State], move: Move) -> Mixed | None:
    """An op whose axes, lengths or other settings depend on examples or on how many there are."""
    if not isinstance(move.data, int) or first_mixed(states):
        return None
    data = states[move.data]
    for i, s in enumerate(states):
        if i == move.data or isinstance(s, Public):
            continue
        if not isinstance(s, Size):
            return mixed(op, "has settings that depend on examples")
        if not s.batch_free and i not in move.sizes:
            return mixed(op, "makes an example's result depend on the batch size")
        if not isinstance(data, Batch | Items) and any(power is None for _, power in s.entries):
            return mixed(op, "has settings that may depend on examples")
    return None
