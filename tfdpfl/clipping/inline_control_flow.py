"""Loops and calls opened, so that the weights used inside them meet the same rules as all others.

A call's ops are put in its place. A loop is built once more, with two additions at each op in it that uses a weight:
the op's inputs are kept, turn by turn; and a list of zeros, an element a turn, is added to its output, or to the sum of
several such outputs. The gradient of the loss with respect to that list is the gradient with respect to the op's output
at each turn. Together they are one such op on rows (example, turn), outside of the loop, which any rule can take.

Users of the loop or the call use what stands for it from then on: there is one forward and one backward pass. A
function runs all loops and calls that read variables, also those that nobody uses. Once all of it is traced, what was
replaced is taken off that list.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

from tfdpfl.clipping import graph as graph_tools
from tfdpfl.clipping.batch_axis import BatchAxis
from tfdpfl.clipping.derivatives import gradient_of
from tfdpfl.clipping.graph import (
    channels_first,
    compiled,
    constant,
    gradient_function,
    inner_call,
    is_call,
    is_loop,
    key,
)
from tfdpfl.clipping.registry import look_up
from tfdpfl.clipping.states import Batch, Mixed, Public
from tfdpfl.clipping.variable_writes import check_unwritten, side_effects
from tfdpfl.errors import PrivacyError

__all__ = ["InlinedControlFlow", "close"]

# A loop's turns are put side by side one by one up to so many, else (and by XLA) stacked and turned over: two passes.
MOST_APART = 64


Made = dict[tuple[str, int], tf.Tensor]  # what stands for the tensors with these keys


class Closed(Exception):
    """Cannot be opened; the exact fallback runs it as it is."""


@dataclasses.dataclass(frozen=True)
class UnrolledLoop:
    """An op of a loop, all turns at once.

    ``op``: the op inside; ``inputs``: lists of what it took in, or a tensor outside of the loop where that was the same
    at each turn; ``states``: theirs at one turn; ``probe``: the list added to what the output is a term of; ``most``:
    how many turns, where it is known; ``batch_size``: a scalar.
    """

    op: tf.Operation
    inputs: list[tf.Tensor]
    states: list
    probe: tf.Tensor
    most: int | None
    batch_size: tf.Tensor

    def as_one(self, analysis: BatchAxis) -> tf.Operation:
        """The op on the rows of all turns at once, an example's together, in the current graph."""
        inputs = []
        for t, s, inside in zip(self.inputs, self.states, self.op.inputs, strict=True):
            if isinstance(s, Batch) and s.rows:
                t = self._rows(t, s.rows, inside)
                self._known(t, s.rows, analysis)
            inputs.append(t)
        (made,) = graph_tools.copy_op(self.op, inputs)
        self._known(made, self._each(), analysis)
        return made.op

    def _known(self, t: tf.Tensor, each: int, analysis: BatchAxis) -> None:
        analysis.declare_state(t, Batch(0, self.most and self.most * each))

    def _each(self) -> int:
        """Rows of an example at one turn."""
        return next(s.rows for s in self.states if isinstance(s, Batch) and s.rows)

    def gradient(self, items: tf.Tensor) -> tf.Tensor:
        """With respect to the output of that op, from the one with respect to the probe."""
        return self._rows(items, self._each(), self.op.outputs[0])

    def _rows(self, items: tf.Tensor, each: int, like: tf.Tensor) -> tf.Tensor:
        """A list of [batch x each, ...] as [batch x turns x each, ...]."""
        shape = _element(like, each, self.batch_size)
        fixed = None not in like.shape[1:].as_list()  # then the list itself checks the number of rows
        whole = each == 1 and fixed
        if self.most is not None and self.most <= MOST_APART and not compiled():  # put where they belong in one pass
            parts = [
                tf.raw_ops.TensorListGetItem(input_handle=items, index=i, element_shape=shape, element_dtype=like.dtype)
                for i in range(self.most)
            ]
            dims = [tf.shape(parts[0])[i] if d is None else d for i, d in enumerate(like.shape[1:], 1)]
            if not whole:
                parts = [tf.reshape(x, tf.stack([self.batch_size, each, *dims])) for x in parts]
            x = tf.stack(parts, 1)
        else:
            x = tf.raw_ops.TensorListStack(
                input_handle=items, element_shape=shape, element_dtype=like.dtype, num_elements=self.most or -1
            )
            x.set_shape([self.most, *like.shape])
            dims = [tf.shape(x)[i] if d is None else d for i, d in enumerate(like.shape[1:], 2)]
            if not whole:
                x = tf.reshape(x, tf.stack([tf.shape(x)[0], self.batch_size, each, *dims]))
            x = tf.transpose(x, [1, 0, *range(2, x.shape.rank)])
        x = tf.reshape(x, [-1, *dims])
        x.set_shape([None, *like.shape[1:]])
        return x


def _element(like: tf.Tensor, each: int, batch_size: tf.Tensor) -> tf.Tensor:
    """The shape of a list's elements [batch x each, ...], as far as it can be known outside of the loop."""
    rest = like.shape[1:].as_list()
    rows = batch_size * each if each > 1 else batch_size
    return tf.constant(-1) if None in rest else tf.stack([rows, *rest])


def close(graph: tf.Graph, loss: tf.Tensor) -> None:
    """Hands back what `InlinedControlFlow` replaced: another plan for the same graph is to find it as it was.

    Random numbers that were drawn stay, as the earlier plan's gradients are of these. A call's ops are read
    like others. A loop is refused, since it would be opened, and draw, once more.
    """
    graph_tools.restore(graph)
    drawn = graph_tools.record_of(graph).drawn
    for op in graph_tools.ancestors([loss]).values() if drawn else ():
        if op.name in drawn:
            raise PrivacyError(
                f"{op.type} ({op.name!r}) draws random numbers, and another private update of this tf.function read "
                "them already: a second update would see other numbers. Let one optimizer train all of the variables, "
                "or compute the loss anew for each update."
            )


def _leave_out(graph: tf.Graph) -> None:
    """Has a function that was traced run the loops and calls that were replaced only for those that take in what they
    give out. They write nothing (`_path`), so nothing else is to wait for them."""
    replaced = {name: graph.get_operation_by_name(name) for name in graph_tools.record_of(graph).replaced}
    if replaced:
        graph.control_outputs[:] = [op for op in graph.control_outputs if op.name not in replaced]
    for op in replaced.values():
        for later in op._control_outputs:  # waits for what the op waited for instead
            before = {o.name: o for o in [*later.control_inputs, *op.control_inputs]}
            later._remove_all_control_inputs()
            later._add_control_inputs([o for name, o in before.items() if name != op.name])


graph_tools.when_traced(_leave_out)


class InlinedControlFlow:
    """All loops and calls on the way to ``targets`` that use weights and can be opened, opened.

    Attributes:
      now: what stands for each tensor that was replaced.
      loops: names of the loops that were built anew.
      turns: the ops in them that use weights.
    """

    def __init__(self, analysis: BatchAxis, targets: list[tf.Tensor], batch_size: tf.Tensor):
        self.a, self.batch_size = analysis, batch_size
        self.now: dict[tuple[str, int], tf.Tensor] = {}
        self.turns: list[UnrolledLoop] = []
        self.loops: set[str] = set()
        record = graph_tools.record_of(analysis.graph)
        path = graph_tools.ancestors(targets).values()
        taken = _taken(path, targets)
        for op in path:
            if op.name not in analysis.ops or not self._to_open(op, analysis):
                continue
            check_unwritten(op, analysis)
            kept, before = len(self.turns), set(self.loops)
            try:
                made = self._opened(op, analysis, {}, taken)
            except Closed:
                del self.turns[kept:]
                continue
            draws = bool(side_effects([op]))
            if draws:
                record.drawn |= self.loops - before
            for old, new in _pairs(op, made):
                graph_tools.replace(old, new, for_good=draws)
                self.now[key(old)] = new
            # It is left whole: gradients may be taken of it yet, and another plan may find it used again.
            record.replaced.add(op.name)

    @staticmethod
    def _to_open(op: tf.Operation, a: BatchAxis) -> bool:
        if not (is_loop(op) or is_call(op)) or not a.uses_weights(op):
            return False
        return not ((inner := inner_call(op)) and look_up(inner[0]).rule)

    def _opened(self, op: tf.Operation, a: BatchAxis, now: dict, taken: set) -> list[tf.Tensor | None]:
        """What stands for the op's outputs; None for those that nothing asks for (`_taken`)."""
        given = [now.get(key(t), t) for t in op.inputs]
        mixed = {key(t) for t in op.outputs if isinstance(a[t], Mixed)}
        if mixed & taken:
            raise Closed
        wanted = [
            i for i, t in enumerate(op.outputs) if key(t) in taken or (t.dtype != tf.variant and key(t) not in mixed)
        ]
        return self._call(op, a, given, wanted) if is_call(op) else self._loop(op, a, given, wanted)

    def _call(
        self, op: tf.Operation, a: BatchAxis, given: list[tf.Tensor], wanted: list[int]
    ) -> list[tf.Tensor | None]:
        inner, outputs, body = a.body(op, "f", list(op.inputs), [a[t] for t in op.inputs])
        now = {key(t): g for t, g in zip(body.inputs, given, strict=True)}
        results = [body.outputs[i] for i in wanted]
        path = _path(body, results)
        taken = _taken(path, results)
        for inside in path:
            if self._to_open(inside, inner):
                made = self._opened(inside, inner, now, taken)
            elif _needs_xla(op, inside):
                made = _compiled(inside, now)
            else:
                made = _copied(inside, now, body)
            now.update({key(t): m for t, m in _pairs(inside, made)})
        if any(self.a[now[key(body.outputs[i])]] != outputs[i] for i in wanted):
            raise Closed
        return [now[key(t)] if i in wanted else None for i, t in enumerate(body.outputs[: len(op.outputs)])]

    def _most_turns(self, cond: tf.Graph, body: tf.Graph, varies: list[int], given: list[tf.Tensor]) -> tf.Tensor:
        """How often a loop may run: it goes on only while a counter is below a limit."""
        places = {key(x): i for i, x in enumerate(cond.inputs)}
        outside = {key(x): g for i, (x, g) in enumerate(zip(cond.inputs, given, strict=True)) if i not in varies}
        todo, found = [cond.outputs[0]], []
        while todo:
            t = graph_tools.source(todo.pop())
            if t.op.type == "LogicalAnd":
                todo += t.op.inputs
            if t.op.type != "Less" or not t.op.inputs[0].dtype.is_integer:
                continue
            at = places.get(key(graph_tools.source(t.op.inputs[0])))
            if at not in varies:
                continue
            step, first = graph_tools.source(body.outputs[at]).op, constant(given[at])
            if step.type not in ("Add", "AddV2") or key(graph_tools.source(step.inputs[0])) != key(body.inputs[at]):
                continue
            if first is None or constant(step.inputs[1]) != 1:
                continue
            with contextlib.suppress(Closed):
                limit = _outside(t.op.inputs[1], outside, cond)
                ((length, power),) = self.a.entries(limit)
                if power == 0 and length is not None:
                    return tf.constant(max(int(length - first), 0))
                found.append(tf.maximum(tf.cast(limit - first, tf.int32), 0))
        if not found:
            raise Closed
        return found[0]

    def _reserved(self, t: tf.Tensor, inner: BatchAxis, count: tf.Tensor) -> tf.Tensor:
        """An empty list for what a tensor of a loop's body is in each iteration."""
        shape = _element(t, getattr(inner[t], "rows", None) or 1, self.batch_size)
        return tf.raw_ops.TensorListReserve(element_shape=shape, num_elements=count, element_dtype=t.dtype)

    def _loop(
        self, op: tf.Operation, a: BatchAxis, given: list[tf.Tensor], wanted: list[int]
    ) -> list[tf.Tensor | None]:
        states = [a[t] for t in op.outputs]
        inner, _, body = a.body(op, "body", list(op.inputs), states)
        _, _, cond = a.body(op, "cond", list(op.inputs), states)
        varies = _varying(body)
        test = _path(cond, cond.outputs)
        carried = _carried(body, varies, {*wanted, *_inputs_of(cond, cond.outputs)})
        ends = [body.outputs[i] for i in carried]
        path = _path(body, ends)
        uses = [o for o in path if _uses(o, inner)]
        count = self._most_turns(cond, body, varies, given)
        most = None if (known := constant(count)) is None else int(known)
        same = {i: g for i, g in enumerate(given) if i not in varies}
        fed, outside = _taken_in(uses, inner, body, same)
        sums = [_sum_of(o.outputs[0], path, ends, inner) for o in uses]
        probes = {key(t): self._reserved(t, inner, count) for t in sums}
        kept = [self._reserved(t, inner, count) for t in fed.values()]

        def begin(graph: tf.Graph, values: list[tf.Tensor]) -> Made:
            now = {key(graph.inputs[i]): g for i, g in same.items()}
            now.update({key(graph.inputs[i]): v for i, v in zip(carried, values, strict=True)})
            return now

        def goes_on(turn, values, lists, zeros):
            return _run(test, begin(cond, values), cond)[key(cond.outputs[0])]

        def one_turn(turn, values, lists, zeros):
            zeros = dict(zip(probes, zeros, strict=True))

            def change(t: tf.Tensor, made: tf.Tensor) -> tf.Tensor:
                graph_tools.set_gradient(made.op, gradient_of(made.op, [inner[i] for i in t.op.inputs]))
                if key(t) in zeros:
                    made, zeros[key(t)] = _probed(made, zeros[key(t)], turn)
                return made

            now = _run(path, {**outside, **begin(body, values)}, body, change)
            lists = [_put(items, turn, now[k]) for items, k in zip(lists, fed, strict=True)]
            return turn + 1, [now[key(y)] for y in ends], lists, [*zeros.values()]

        self.a.run(given)
        _, values, lists, _ = tf.while_loop(
            goes_on,
            one_turn,
            (tf.constant(0), [given[i] for i in carried], kept, [*probes.values()]),
            shape_invariants=(
                tf.TensorShape([]),
                [body.inputs[i].shape for i in carried],
                *([tf.TensorShape([])] * len(each) for each in (kept, probes)),
            ),
            parallel_iterations=op.get_attr("parallel_iterations"),
            maximum_iterations=most if compiled() else None,  # XLA wants to know
        )
        made = [same.get(i) for i in range(len(given))]
        for i, v in zip(carried, values, strict=True):
            made[i] = v
            self.a.declare_state(v, states[i])
            self.loops.add(v.op.name)
        at = {**outside, **dict(zip(fed, lists, strict=True))}
        for o, total in zip(uses, sums, strict=True):
            inputs, states = [at[key(t)] for t in o.inputs], [inner[t] for t in o.inputs]
            self.turns.append(UnrolledLoop(o, inputs, states, probes[key(total)], most, self.batch_size))
        return made


def _taken(ops: Iterable[tf.Operation], results: Sequence[tf.Tensor]) -> set[tuple[str, int]]:
    """Keys of what the ops take in, and of the results."""
    return {key(t) for o in ops for t in o.inputs} | {key(t) for t in results}


def _pairs(op: tf.Operation, made: Sequence[tf.Tensor | None]) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """The op's outputs that something was made for, and what."""
    return [(t, m) for t, m in zip(op.outputs, made, strict=True) if m is not None]


def _inputs_of(function: tf.Graph, results: Sequence[tf.Tensor]) -> set[int]:
    """Places of a function's inputs that these of its tensors are computed of."""
    taken = _taken(graph_tools.ancestors(results).values(), results)
    return {i for i, t in enumerate(function.inputs) if key(t) in taken}


def _varying(body: tf.Graph) -> list[int]:
    """Places of what a loop's body hands on as something else than it was given."""
    pairs = enumerate(zip(body.inputs, map(graph_tools.source, body.outputs), strict=True))
    return [i for i, (x, y) in pairs if key(x) != key(y)]


def _carried(body: tf.Graph, varies: list[int], wanted: set[int]) -> list[int]:
    """Places of what a loop must carry from turn to turn to make what is wanted."""
    carried: set[int] = set()
    while more := (wanted & set(varies)) - carried:
        carried |= more
        wanted = _inputs_of(body, [body.outputs[i] for i in carried])
    return sorted(carried)


def _taken_in(
    uses: list[tf.Operation], inner: BatchAxis, body: tf.Graph, given: dict[int, tf.Tensor]
) -> tuple[Made, Made]:
    """What the uses of weights in a loop take in: tensors of examples, and, outside of the loop, what is the same at
    each turn (``given``, and the weights, which follow from that alone)."""
    outside = {key(body.inputs[i]): g for i, g in given.items()}
    fed = {key(t): t for o in uses for t in o.inputs if isinstance(inner[t], Batch)}
    for t in (t for o in uses for t in o.inputs if key(t) not in fed):
        _outside(t, outside, body)
    return fed, outside


def _run(
    ops: list[tf.Operation], now: Made, source: tf.Graph,
    change: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] = lambda t, made: made,
) -> Made:  # fmt: skip
    """Copies ops of a function; ``change`` may put another tensor in the place of one that was made."""
    for op in ops:
        if not all(key(t) in now for t in op.outputs):
            made = _copied(op, now, source)
            now.update({key(t): change(t, m) for t, m in zip(op.outputs, made, strict=True)})
    return now


_PROBED = "TfdpflProbed"


def _probed(x: tf.Tensor, items: tf.Tensor, turn: tf.Tensor) -> list[tf.Tensor]:
    """x plus a list's element of this turn, which is zero, as its derivative says: it is neither made nor added. And
    the list, for the next turn.

    (TensorFlow would keep each use of tf.custom_gradient, and the graph that it is in, to the end of the process.)
    """
    with tf.compat.v1.get_default_graph().gradient_override_map({"IdentityN": _PROBED}):
        return tf.identity_n([x, items, turn])[:2]


@tf.RegisterGradient(_PROBED)
def _gradient_of_probed(op: tf.Operation, g: tf.Tensor, items: tf.Tensor, _: tf.Tensor | None) -> tuple:
    """Of the list what the later turns have put into it, and this one."""
    return g, tf.raw_ops.TensorListSetItem(input_handle=items, index=op.inputs[2], item=g), None


def _put(items: tf.Tensor, turn: tf.Tensor, item: tf.Tensor) -> tf.Tensor:
    """Returns the list with an item at the iteration's place, of which no gradient is asked."""
    items = tf.raw_ops.TensorListSetItem(input_handle=items, index=turn, item=item)
    graph_tools.set_gradient(items.op, lambda op, g: (g, None, None))
    return items


def _path(graph: tf.Graph, results: Sequence[tf.Tensor]) -> list[tf.Operation]:
    """The ops that a function computes these by, in order."""
    given = {t.op.name for t in graph.inputs}
    path = [o for o in graph_tools.ancestors(results).values() if o.name not in given]
    own = [o for o in path if not is_call(o) and "_gradient_op_type" in o.node_def.attr]
    # What is drawn may be drawn here as well as there: only this loop's, or call's, results are used from then on.
    if any(not look_up(o).movable for o in side_effects(graph.get_operations())) or not all(
        _plain_derivative(o) for o in own
    ):
        raise Closed
    return path


def _sum_of(t: tf.Tensor, path: list[tf.Operation], ends: list[tf.Tensor], a: BatchAxis) -> tf.Tensor:
    """The last of the sums that t [batch, ...] is a term of and nothing else: they have its gradient."""
    while True:
        users = [o for o in path if any(key(i) == key(t) for i in o.inputs)]
        if len(users) != 1 or any(key(y) == key(t) for y in ends):
            return t
        (user,) = users
        y, others = user.outputs[0], [i for i in user.inputs if key(i) != key(t)]
        if user.type not in ("AddV2", "BiasAdd") or len(others) != 1 or t.shape.rank is None:
            return t
        if not t.shape[1:].is_fully_defined() or y.shape[1:] != t.shape[1:]:
            return t
        # The other term has as many examples, or no axis for them: t is not repeated to be as long.
        other, rank = a[others[0]], others[0].shape.rank
        if other != a[t] and not (isinstance(other, Public) and rank is not None and rank < t.shape.rank):
            return t
        t = y


def _plain_derivative(op: tf.Operation) -> bool:
    """Whether a gradient of the op's own is but the derivative, written to take less memory."""
    return gradient_function(op).__qualname__.startswith("swish.")


def _copied(op: tf.Operation, now: dict, source: tf.Graph) -> list[tf.Tensor]:
    attrs = graph_tools.attributes(op)
    if not is_call(op):
        attrs.pop("_gradient_op_type", None)  # `_path`
    graph_tools.lift_functions(source, tf.compat.v1.get_default_graph(), attrs)
    made = graph_tools.copy_op(op, [now[key(t)] for t in op.inputs], attrs)
    for copy, t in zip(made, op.outputs, strict=True):
        copy.set_shape(t.shape)  # a loop's states must keep the shapes that some functions set afterwards
    return made


def _needs_xla(call: tf.Operation, op: tf.Operation) -> bool:
    """Whether an op of a call that XLA compiles is a grouped convolution, which TensorFlow's own kernels run on some
    CPUs only (those for which oneDNN is on)."""
    compiled = "_XlaMustCompile" in call.node_def.attr and call.get_attr("_XlaMustCompile")
    if not compiled or op.type != "Conv2D":
        return False
    channels = op.inputs[0].shape[1 if channels_first(op) else -1]
    return channels != op.inputs[1].shape[-2]


def _compiled(op: tf.Operation, now: dict) -> list[tf.Tensor]:
    """A copy of the op in a call of its own, which XLA compiles; the op's rule looks into such a call."""
    attrs = graph_tools.attributes(op)
    attrs.pop("_gradient_op_type", None)
    alone = tf.function(lambda *inputs: graph_tools.copy_op(op, inputs, attrs), autograph=False, jit_compile=True)
    return alone(*(now[key(t)] for t in op.inputs))


def _outside(t: tf.Tensor, outside: dict, body: tf.Graph) -> tf.Tensor:
    """A tensor of a loop's body that is the same at each turn, outside of the loop."""
    if key(t) not in outside:
        if t.op.type == "Placeholder" or side_effects([t.op]):  # what is drawn differs from turn to turn
            raise Closed
        for i in t.op.inputs:
            _outside(i, outside, body)
        for y, made in zip(t.op.outputs, _copied(t.op, outside, body), strict=True):
            outside[key(y)] = made
    return outside[key(t)]


def _uses(op: tf.Operation, a: BatchAxis) -> bool:
    """Whether an op of a loop's body uses a weight on examples."""
    if not a.uses_weights(op):
        return False
    plain = [s for s in (a[t] for t in [*op.inputs, *op.outputs]) if isinstance(s, Batch)]
    if (
        look_up(op).rule is None
        or len(op.outputs) != 1
        or not op.outputs[0].dtype.is_floating
        or any(s.axis or s.blocks > 1 or not s.rows for s in plain)
        or any(not isinstance(a[t], Batch | Public) for t in op.inputs)
        or len({key(t) for t in op.inputs}) < len(op.inputs)
    ):
        raise Closed
    return True
