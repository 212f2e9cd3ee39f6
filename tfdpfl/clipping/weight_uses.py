"""Finds where weights meet examples on the way to the losses, and each unit's gradient there.

Four steps, each of which hands values to the next: collect the uses, differentiate the losses with respect to their
outputs, apply the rules (`registry`), and replay what has no rule (`fallback`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdpfl.clipping import graph as graph_tools
from tfdpfl.clipping.batch_axis import BatchAxis
from tfdpfl.clipping.derivatives import set_gradients
from tfdpfl.clipping.fallback import Replay
from tfdpfl.clipping.gradients import Units, Use
from tfdpfl.clipping.graph import inner_call, is_call, is_loop, key
from tfdpfl.clipping.inline_control_flow import InlinedControlFlow
from tfdpfl.clipping.loss import PerExampleLoss
from tfdpfl.clipping.own_rules import checked
from tfdpfl.clipping.registry import UserRule, look_up
from tfdpfl.clipping.reparametrized import Part
from tfdpfl.clipping.states import Batch, Handle, Items, Public, weighs
from tfdpfl.errors import PrivacyError

__all__ = ["WeightUses", "clusters"]

Gradients = dict[tuple[str, int], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class _RuledUse:
    """An op with a rule, of which input number ``at`` is a weight. ``kind``: the op itself, or the only op of the call
    that it is; ``feeds``: which inputs of the op feed that one."""

    op: tf.Operation
    at: int
    kind: tf.Operation
    feeds: list[int]


class WeightUses:
    """The uses of variables in a graph.

    Args:
      analysis: the states of the graph, already run on the loss.
      variables: variables, or tensors of the graph that stand for some.
      opened: loops and calls that were put in the graph in place of others.
    """

    def __init__(self, analysis: BatchAxis, variables: Sequence, opened: InlinedControlFlow):
        self._a, self._variables, self._opened = analysis, variables, opened
        self._reads: dict[int, tf.Tensor] = {}
        self._given = {key(v): i for i, v in enumerate(variables) if not hasattr(v, "handle")}

    def parts(self, losses: tf.Tensor, units: Units, sizes: PerExampleLoss) -> list[Part]:
        """Returns what each use of each variable adds to the units' gradients."""
        ruled, replays = self._collect(losses)
        gradients = self._differentiate(losses, ruled, replays)
        ruled += self._unroll(gradients)
        parts: list[Part] = []
        for use in reversed(ruled):  # as the backward pass comes to them (those of loops come first)
            parts += self._apply_rule(use, gradients, units, sizes)
        for replay in replays:
            parts += self._run_again(replay, gradients, units, sizes)
        return parts

    # -- the four steps --------------------------------------------------------------------------------------

    def _collect(self, losses: tf.Tensor) -> tuple[list[_RuledUse], list[Replay]]:
        ruled: list[_RuledUse] = []
        replays: list[Replay] = []
        with_lists: list[tf.Operation] = []
        for op in self._on_batches(losses):
            at = self._weights_of(op)
            if any(t.dtype == tf.variant for t in [*op.inputs, *op.outputs]):
                with_lists.append(op)
            elif found := self._ruled(op, at):
                ruled += found
            elif at and self._a.differentiable(op):
                replays.append(self._replay([op]))
            elif at and any(t.dtype.is_complex and isinstance(self._a[t], Batch) for t in op.outputs):
                raise PrivacyError(
                    f"{op.type} ({op.name!r}) uses weights in complex numbers, for which there is no rule. Write it "
                    "with real and imaginary parts: (a + bi)(c + di) = (ac - bd) + (ad + bc)i."
                )
        for ops in clusters(with_lists):
            if any(map(self._a.takes_weights, ops)):
                replays.append(self._replay(ops))
        return ruled, replays

    def _differentiate(self, losses: tf.Tensor, ruled: list[_RuledUse], replays: list[Replay]) -> Gradients:
        """One backward pass, to the outputs of all uses."""
        wanted = {key(loop.probe): loop.probe for loop in self._opened.turns}
        wanted |= {key(t): t for use in ruled for t in self._a.differentiable(use.op)}
        wanted |= {key(t): t for replay in replays for t in replay.outputs}
        if not wanted:
            return {}
        with set_gradients(graph_tools.ancestors([losses]).values(), self._a.states):
            found = tf.gradients([losses], list(wanted.values()))
        return {at: tf.convert_to_tensor(g) for at, g in zip(wanted, found, strict=True) if g is not None}

    def _unroll(self, gradients: Gradients) -> list[_RuledUse]:
        """The uses inside of loops, each as one op on all iterations, whose gradients are added to the others."""
        ruled: list[_RuledUse] = []
        by_probe: Gradients = {}
        for loop in self._opened.turns:
            at = key(loop.probe)
            if at not in gradients:
                continue
            op = loop.as_one(self._a)
            if at not in by_probe:
                by_probe[at] = loop.gradient(gradients[at])
            gradients[key(op.outputs[0])] = by_probe[at]
            feeds = list(range(len(op.inputs)))
            ruled += [_RuledUse(op, i, op, feeds) for i in feeds if weighs(self._a[op.inputs[i]])]
        return ruled

    def _apply_rule(self, use: _RuledUse, gradients: Gradients, units: Units, sizes: PerExampleLoss) -> list[Part]:
        a, op = self._a, use.op
        (out,) = self._a.differentiable(op)
        g, of_out = gradients.get(key(out)), a[out]
        if g is None:
            return []
        assert isinstance(of_out, Batch)
        weight, state = self._weight(op.inputs[use.at])
        inputs = [op.inputs[j] for j in use.feeds]
        given = Use(use.kind, use.feeds.index(use.at), inputs, [a[t] for t in inputs], weight, g, of_out, out)
        # Not before its gradient is there: else patches of every layer's input wait for the backward pass.
        with tf.control_dependencies([g]):
            rule = look_up(use.kind).rule
            assert rule is not None
            made = checked(rule, given, units) if isinstance(rule, UserRule) else rule(given, units)
        replayed = made is None
        if made is None:
            (made,) = self._replay([op], [use.at]).gradients([out], [g], units, sizes)
        return [Part(made, weight, root, v, use.kind.type, replayed) for v, root in self.roots(weight, state)]

    def _run_again(self, replay: Replay, gradients: Gradients, units: Units, sizes: PerExampleLoss) -> list[Part]:
        outputs = [t for t in replay.outputs if key(t) in gradients]
        if not outputs:
            return []
        kind = max(replay.ops, key=is_loop).type
        parts: list[Part] = []
        made = replay.gradients(outputs, [gradients[key(t)] for t in outputs], units, sizes)
        for t, formed in zip(replay.weights, made, strict=True):
            weight, state = self._weight(t)
            parts += [Part(formed, weight, root, v, kind, True) for v, root in self.roots(weight, state)]
        return parts

    # -- one op ----------------------------------------------------------------------------------------------

    def _on_batches(self, losses: tf.Tensor) -> list[tf.Operation]:
        """The ops that the losses are computed by and that give out something of each example."""
        ops = [op for op in graph_tools.ancestors([losses]).values() if op.name not in self._opened.loops]
        self._a.run([t for op in ops for t in op.outputs])
        return [op for op in ops if any(isinstance(self._a.states.get(key(t)), Batch | Items) for t in op.outputs)]

    def _weights_of(self, op: tf.Operation) -> list[int]:
        return [i for i, t in enumerate(op.inputs) if weighs(self._a[t]) and _has_gradient(t)]

    def _ruled(self, op: tf.Operation, at: list[int]) -> list[_RuledUse]:
        """The op's uses of weights, if there is a rule for them."""
        if not at:
            return []
        kind, feeds = inner_call(op) or (op, list(range(len(op.inputs))))
        known = look_up(kind).rule and len(self._a.differentiable(op)) == 1 and all(feeds.count(i) == 1 for i in at)
        return [_RuledUse(op, i, kind, feeds) for i in at] if known else []

    def _replay(self, ops: list[tf.Operation], at: list[int] | None = None) -> Replay:
        weights = {key(op.inputs[i]): op.inputs[i] for op in ops for i in self._weights_of(op) if at is None or i in at}
        shapes = [self._weight(t)[0].shape for t in weights.values()]
        return Replay(ops, list(weights.values()), shapes, self._a)

    # -- from a weight to its variables ----------------------------------------------------------------------

    def _weight(self, t: tf.Tensor) -> tuple[tf.Tensor, Public]:
        """The tensor of a weight, and its state, also where the op takes in the variable itself."""
        state = self._a[t]
        if isinstance(state, Public):
            return t, state
        i = self._number(t)
        assert i is not None
        if i not in self._reads:
            self._reads[i] = tf.convert_to_tensor(self._variables[i])
            self._a.run([self._reads[i]])
        return self._reads[i], Public(frozenset([i]))

    def _number(self, t: tf.Tensor) -> int | None:
        """Of a handle the number of its variable, if it is one of those."""
        state = self._a[t]
        return state.index if isinstance(state, Handle) and isinstance(state.index, int) else None

    def roots(self, weight: tf.Tensor, state: Public) -> list[tuple[int, tf.Tensor]]:
        """The reads (or given tensors) that a weight tensor is computed from, with their variables' numbers."""
        if key(weight) in self._given:
            return [(self._given[key(weight)], weight)]
        found: dict[tuple[str, int], tuple[int, tf.Tensor]] = {}
        stop = [v for v in self._variables if not hasattr(v, "handle")]
        # Not through shapes: those of a later layer's activations lead back to every weight before it.
        for op in graph_tools.ancestors([weight], stop, lambda t: weighs(self._a[t])).values():
            for i, root in self._roots_at(op):
                found.setdefault(key(root), (i, root))
        if state.deps - {i for i, _ in found.values()}:
            raise PrivacyError(
                f"{weight.op.type} ({weight.op.name!r}) holds trainable weights that were read in another graph or "
                "inside a loop or a branch. Read them, and compute the loss, in one and the same tf.function."
            )
        return list(found.values())

    def _roots_at(self, op: tf.Operation) -> Iterator[tuple[int, tf.Tensor]]:
        if op.type == "ReadVariableOp":
            state = self._a[op.outputs[0]]
            if isinstance(state, Public) and state.deps:
                yield next(iter(state.deps)), op.outputs[0]
        elif is_call(op) or look_up(op).reads:  # what reads by itself
            yield from ((i, t) for t in op.inputs if (i := self._number(t)) is not None)
        yield from ((self._given[key(t)], t) for t in op.inputs if key(t) in self._given)

    def shape_of(self, root: tf.Tensor) -> tf.TensorShape:
        """Returns the shape of a root, or of the variable that it reads."""
        i = self._number(root)
        return root.shape if i is None else self._variables[i].shape


def _has_gradient(t: tf.Tensor) -> bool:
    return t.dtype.is_floating or t.dtype.is_complex or t.dtype == tf.resource  # not what weights are compared to


def clusters(ops: list[tf.Operation]) -> list[list[tf.Operation]]:
    """Returns the groups of `ops` that hand TensorLists to one another, in order."""
    group: dict[str, list[tf.Operation]] = {}
    names = {op.name for op in ops}
    for op in ops:
        mine = group.setdefault(op.name, [op])
        for t in op.inputs:
            if t.dtype == tf.variant and t.op.name in names and group[t.op.name] is not mine:
                theirs = group[t.op.name]
                theirs.extend(mine)
                for member in mine:
                    group[member.name] = theirs
                mine = theirs
    place = {op.name: i for i, op in enumerate(ops)}
    distinct = {id(members): members for members in group.values()}
    return [sorted(members, key=lambda o: place[o.name]) for members in distinct.values()]
