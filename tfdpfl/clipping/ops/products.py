"""Matrix products and einsum."""

from __future__ import annotations

import math

import tensorflow as tf

from tfdpfl.clipping.batch_axis import BatchAxis
from tfdpfl.clipping.gradients import Contribution, Outer, Units, Use, dims_of, reshaped, volume
from tfdpfl.clipping.registry import moves, rule
from tfdpfl.clipping.rows import row_free
from tfdpfl.clipping.states import BY_POSITION, Batch, Public, Size, State, mixed

PRODUCTS = frozenset("MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum".split())


def labels_of(op: tf.Operation) -> tuple[list[str], list[str], list[str]]:
    """Einsum labels of a matrix product: of both inputs and of the output."""
    if op.type == "Einsum":
        equation = op.get_attr("equation")
        equation = equation.decode() if isinstance(equation, bytes) else equation
        left, out = equation.replace(" ", "").split("->")
        terms = left.split(",")
        extra = [t.shape.rank - len(term.replace("...", "")) for t, term in zip(op.inputs, terms, strict=True)]

        def expand(term: str, n: int) -> list[str]:
            if "..." not in term:
                return list(term)
            before, after = term.split("...")
            return [*before, *[f"~{i}" for i in range(n, 0, -1)], *after]

        n_out = max(extra) if "..." in left else 0
        labels = [expand(t, n) for t, n in zip(terms, extra, strict=True)]
        return labels[0], labels[1] if len(labels) > 1 else [], expand(out, n_out)
    a, b = op.inputs
    if op.type == "MatMul":
        ta, tb = op.get_attr("transpose_a"), op.get_attr("transpose_b")
    else:
        ta, tb = op.get_attr("adj_x"), op.get_attr("adj_y")
    ra, rb = (2, 2) if op.type == "MatMul" else (a.shape.rank, b.shape.rank)
    la = [f"~{i}" for i in range(ra - 2, 0, -1)] + (["k", "i"] if ta else ["i", "k"])
    lb = [f"~{i}" for i in range(rb - 2, 0, -1)] + (["j", "k"] if tb else ["k", "j"])
    lo = [f"~{i}" for i in range(max(ra, rb) - 2, 0, -1)] + ["i", "j"]
    return la, lb, lo


@moves(*PRODUCTS)
def product(view: BatchAxis, op: tf.Operation, states: list[State]) -> State | None:
    batches = [(i, s) for i, s in enumerate(states) if isinstance(s, Batch)]
    if not batches:
        return None
    la, lb, lo = labels_of(op)
    labels = [la, lb][: len(op.inputs)]
    if len(op.inputs) > 2:
        return mixed(op, "has more than two operands")
    marks = {labels[i][s.axis] for i, s in batches}
    if len(marks) > 1:
        return mixed(op, "multiplies the examples along one axis with the examples along another")
    mark = marks.pop()
    if mark not in lo:
        return mixed(op, "sums over the batch")
    for t, s, names in zip(op.inputs, states, labels, strict=True):
        if isinstance(s, Size) and not s.batch_free:
            return mixed(op, "makes an example's result depend on the batch size")
        at = names.index(mark) - len(names) if mark in names else None
        if isinstance(s, Public | Size) and at is not None and not row_free(t, s, at):
            return mixed(op, BY_POSITION)
    if any(names.count(mark) > 1 for names in labels):
        return mixed(op, "takes a diagonal over the batch")
    rows = {s.rows for _, s in batches} - {None}
    if len(rows) > 1:
        return mixed(op, "combines rows of different examples")
    return Batch(lo.index(mark), rows.pop() if rows else None)


@rule(*PRODUCTS)
def outer(use: Use, units: Units) -> Contribution | None:
    """MatMul, BatchMatMul and Einsum: by the labels of their axes."""
    if len(use.inputs) != 2 or use.shape.as_list().count(None):
        return None
    labels = list(labels_of(use.op))
    other = 1 - use.at
    x, state = use.inputs[other], use.states[other]
    lx, lw, lo = labels[other], labels[use.at], labels[2]
    if isinstance(state, Public) and lo[use.out.axis] in lx:  # rows of equal values, as of a first recurrent state
        state = Batch(lx.index(lo[use.out.axis]), use.out.rows)
    if not isinstance(state, Batch):
        return None
    if any(len(set(names)) < len(names) for names in (lx, lw, lo)):
        return None
    mark = lx[state.axis]
    # An axis of length one in one operand and not in the other is absent there: it broadcasts.
    wide = {n: d for n, d in zip(lw, use.shape.as_list(), strict=True)}
    narrow_x = [n for n, d in zip(lx, x.shape.as_list(), strict=True) if d == 1 and wide.get(n, 1) != 1]
    if narrow_x:
        x = tf.squeeze(x, [lx.index(n) for n in narrow_x])
        lx = [n for n in lx if n not in narrow_x]
        state = Batch(lx.index(mark), state.rows)
    kept = [n for n in lw if not (wide[n] == 1 and n in lo and n in lx)]
    if mark in kept or any(n not in lo and n not in lx for n in kept):
        return None
    if any(n not in lo and n not in kept and n != mark for n in lx):  # summed over x alone
        gone = [n for n in lx if n not in lo and n not in kept]
        x = tf.reduce_sum(x, [lx.index(n) for n in gone])
        lx = [n for n in lx if n not in gone]
        state = Batch(lx.index(mark), state.rows)
    t = [n for n in lo if n in lx and n not in kept and n != mark]
    n_ = [n for n in lo if n in lx and n in kept]
    a_ = [n for n in lx if n in kept and n not in lo]
    p_ = [n for n in lo if n in kept and n not in lx]
    a = arranged(x, lx, state, [t, n_, a_], units)
    g = arranged(use.g, lo, use.out, [t, n_, p_], units)
    for side, own in ((a, a_), (g, p_)):  # the input's own shape may be less known than the weight's
        side.set_shape([None] * (side.shape.rank - 1) + [math.prod(wide[n] for n in own)])
    order = [*n_, *a_, *p_]
    sizes = [wide[n] for n in order]
    final = use.shape.as_list()
    grouped = bool(n_)

    def layout(f: tf.Tensor) -> tf.Tensor:
        lead = f.shape.rank - (3 if grouped else 2)
        head = [f.shape[0] or -1] if lead else []
        f = reshaped(f, [*head, *sizes])
        if order != kept:
            f = tf.transpose(f, [*range(lead), *[lead + order.index(n) for n in kept]])
        return reshaped(f, [*head, *final])

    return Outer(a, g, layout, ("product", tuple(n_), tuple(lw.index(n) for n in order), tuple(final)))


def arranged(x: tf.Tensor, labels: list[str], state: Batch, groups: list[list[str]], units: Units) -> tf.Tensor:
    """[U, rows x first group, (second group,) last group], each group of axes flattened."""
    rest = [n for i, n in enumerate(labels) if i != state.axis]
    x = units.group(x, state)  # [U, m, rest...]
    order = [n for group in groups for n in group]
    if order != rest:
        x = tf.transpose(x, [0, 1, *[2 + rest.index(n) for n in order]])
    dims = dims_of(x)
    t, n, last = (len(group) for group in groups)
    parts = [volume(dims[1 : 2 + t]), volume(dims[2 + t : 2 + t + n]), volume(dims[2 + t + n :])]
    if not n:
        parts.pop(1)
    shape = [dims[0], *parts]
    return reshaped(x, shape)
