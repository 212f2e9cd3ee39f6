"""Matrix products and einsum."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdpfl.clipping.gradients import Contribution, OuterProductGradient, Units, Use, dims_of, reshaped, volume
from tfdpfl.clipping.registry import Move, View, teach
from tfdpfl.clipping.rows import differing, with_rows
from tfdpfl.clipping.states import Batch, Public, State, meeting, mixed

__all__: list[str] = []


def labels_of(op: tf.Operation) -> tuple[list[str], list[str], list[str]]:
    """Einsum labels of a matrix product: of both inputs and of the output."""

    def leading(n: int) -> list[str]:
        return [f"~{i}" for i in range(n, 0, -1)]

    if op.type == "Einsum":
        left, out = tf.compat.as_str(op.get_attr("equation")).replace(" ", "").split("->")
        terms = left.split(",")
        extra = [t.shape.rank - len(term.replace("...", "")) for t, term in zip(op.inputs, terms, strict=True)]

        def expand(term: str, n: int) -> list[str]:
            if "..." not in term:
                return list(term)
            before, after = term.split("...")
            return [*before, *leading(n), *after]

        n_out = max(extra) if "..." in left else 0
        labels = [expand(t, n) for t, n in zip(terms, extra, strict=True)]
        return labels[0], labels[1] if len(labels) > 1 else [], expand(out, n_out)
    a, b = op.inputs
    plain = op.type == "MatMul"
    ta, tb = map(op.get_attr, ("transpose_a", "transpose_b") if plain else ("adj_x", "adj_y"))
    ra, rb = (0, 0) if plain else (a.shape.rank - 2, b.shape.rank - 2)
    la, lb = ["k", "i"] if ta else ["i", "k"], ["j", "k"] if tb else ["k", "j"]
    return leading(ra) + la, leading(rb) + lb, [*leading(max(ra, rb)), "i", "j"]


def product(view: View, op: tf.Operation, states: list[State]) -> State | None:
    batches = [(i, s) for i, s in enumerate(states) if isinstance(s, Batch)]
    if not batches:
        return None
    *labels, lo = labels_of(op)
    if len(op.inputs) > 2:
        return mixed(op, "has more than two operands")
    marks = {labels[i][s.axis] for i, s in batches}
    if len(marks) > 1:
        return meeting(op, "multiplies the examples along one axis with the examples along another")
    mark = marks.pop()
    if mark not in lo:
        return meeting(op, "sums over the batch")
    places = [names.index(mark) - len(names) if mark in names else None for names in labels]
    if refused := differing(op, zip(op.inputs, states, places, strict=False)):
        return refused
    if any(names.count(mark) > 1 for names in labels):
        return meeting(op, "takes a diagonal over the batch")
    return with_rows(op, lo.index(mark), (s for _, s in batches))


@dataclasses.dataclass(frozen=True)
class Named:
    """A tensor whose axes have names; ``state`` says along which the examples are."""

    x: tf.Tensor
    names: list[str]
    state: Batch

    @property
    def mark(self) -> str:
        return self.names[self.state.axis]

    @property
    def narrow(self) -> list[str]:
        """The axes of length one."""
        return [n for n, d in zip(self.names, self.x.shape, strict=True) if d == 1]

    def without(self, gone: list[str], remove: Callable) -> Named:
        """Takes axes off, by `tf.squeeze` or `tf.reduce_sum`."""
        if not gone:
            return self
        names = [n for n in self.names if n not in gone]
        axes = [self.names.index(n) for n in gone]
        return Named(remove(self.x, axes), names, Batch(names.index(self.mark), self.state.rows))

    def arranged(self, groups: list[list[str]], units: Units) -> tf.Tensor:
        """[U, rows x first group, (second group,) last group], each group of axes flattened."""
        rest = [n for n in self.names if n != self.mark]
        x = units.group(self.x, self.state)  # [U, m, rest...]
        order = [n for group in groups for n in group]
        if order != rest:
            x = tf.transpose(x, [0, 1, *[2 + rest.index(n) for n in order]])
        dims = dims_of(x)
        t, n, _ = (len(group) for group in groups)
        parts = [volume(dims[1 : 2 + t]), volume(dims[2 + t : 2 + t + n]), volume(dims[2 + t + n :])]
        return reshaped(x, [dims[0], *(parts if n else parts[::2])])


def _pick(names: list[str], within: list[str] | None = None, apart: Sequence[str] = ()) -> list[str]:
    """Those of the names that are ``within`` others, and not in ``apart``."""
    return [n for n in names if (within is None or n in within) and n not in apart]


def _operand(use: Use) -> tuple[Named, list[str], list[str]] | None:
    """What the weight is multiplied by, and the names of the weight's and of the output's axes."""
    if len(use.inputs) != 2 or None in use.shape.as_list():
        return None
    other = 1 - use.at
    labels = labels_of(use.op)
    names, of_weight, of_output = labels[other], labels[use.at], labels[2]
    if any(len(set(each)) < len(each) for each in (names, of_weight, of_output)):
        return None
    state = use.states[other]
    if isinstance(state, Public) and of_output[use.out.axis] in names:  # equal rows, as of a first recurrent state
        state = Batch(names.index(of_output[use.out.axis]), use.out.rows)
    return (Named(use.inputs[other], names, state), of_weight, of_output) if isinstance(state, Batch) else None


def outer(use: Use, units: Units) -> Contribution | None:
    """MatMul, BatchMatMul and Einsum: by the labels of their axes."""
    operand = _operand(use)
    if operand is None:
        return None
    x, of_weight, of_output = operand
    lengths = dict(zip(of_weight, use.shape.as_list(), strict=True))
    # An axis of length one in one operand and not in the other is absent there: it broadcasts.
    wide = [n for n, d in lengths.items() if d != 1]
    x = x.without(_pick(x.narrow, wide, [x.mark]), tf.squeeze)
    kept = _pick(of_weight, apart=_pick(of_output, x.names, wide))
    if x.mark in kept or not {*kept} <= {*of_output, *x.names}:
        return None
    x = x.without(_pick(x.names, apart=[*of_output, *kept, x.mark]), tf.reduce_sum)  # summed over x alone
    shared = _pick(of_output, x.names, [x.mark])
    positions, groups = _pick(shared, apart=kept), _pick(shared, kept)
    of_x, of_g = _pick(x.names, kept, of_output), _pick(of_output, kept, x.names)
    a = x.arranged([positions, groups, of_x], units)
    g = Named(use.g, of_output, use.out).arranged([positions, groups, of_g], units)
    for side, own in ((a, of_x), (g, of_g)):  # the input's own shape may be less known than the weight's
        side.set_shape([None] * (side.shape.rank - 1) + [math.prod(lengths[n] for n in own)])
    order = [*groups, *of_x, *of_g]
    layout = _layout([order.index(n) for n in kept], [lengths[n] for n in order], use.shape.as_list(), bool(groups))
    alike = ("product", tuple(groups), tuple(of_weight.index(n) for n in order), tuple(use.shape.as_list()))
    return OuterProductGradient(a, g, layout, alike)


def _layout(order: list[int], sizes: list[int], final: list[int], grouped: bool) -> Callable:
    """Puts the axes of a gradient, of these sizes, in the weight's order."""

    def layout(f: tf.Tensor) -> tf.Tensor:
        lead = f.shape.rank - (3 if grouped else 2)
        head = [f.shape[0] or -1] if lead else []
        f = reshaped(f, [*head, *sizes])
        if order != sorted(order):
            f = tf.transpose(f, [*range(lead), *[lead + i for i in order]])
        return reshaped(f, [*head, *final])

    return layout


# -- the records ------------------------------------------------------------------------------------------------------

teach("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", moves=Move(product, data=None), rule=outer)
