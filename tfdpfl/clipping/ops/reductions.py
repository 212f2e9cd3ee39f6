"""Ops that sum, sort or normalise along some axes, and leave the others as they are."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdpfl.clipping.graph import channels_first, constant, input_rank, output_rank
from tfdpfl.clipping.loss import PerExampleLoss, Term
from tfdpfl.clipping.registry import Move, View, moves_examples, teach
from tfdpfl.clipping.rows import row_free, rowwise
from tfdpfl.clipping.states import Batch, Public, Size, State, batches_of, deps, is_batch_free, meeting, mixed

__all__: list[str] = []


def reduced(view: View, op: tf.Operation, state: Batch) -> State:
    gone = summed_axes(op)
    if gone is None and input_rank(op) != 1:
        return mixed(op, "reduces over axes that are not known beforehand")
    if gone is None or state.axis in gone:
        return meeting(op, "reduces over the batch")
    keep = op.type not in ("ArgMax", "ArgMin") and op.get_attr("keep_dims")
    return Batch(state.axis - (0 if keep else sum(a < state.axis for a in gone)), state.rows)


def reduced_size(view: View, op: tf.Operation, state: Size) -> Size:
    """A product of lengths; of anything else made of them it is not known which power it has."""
    powers = [p for _, p in state.entries]
    of_all = len(powers) == 1 or (input_rank(op) == 1 and summed_axes(op) == {0})
    if not of_all or op.type != "Prod" or None in powers:
        return state.blurred(op.outputs[0].shape.num_elements())
    coefficients = [c for c, _ in state.entries if c is not None]
    known = len(coefficients) == len(state.entries)
    return Size(((int(np.prod(coefficients)) if known else None, sum(p for p in powers if p is not None)),))


def summed_axes(op: tf.Operation) -> set[int] | None:
    """The axes that a reduction sums over; None if they are not known."""
    rank, axes = input_rank(op), constant(op.inputs[1])
    if axes is None or rank is None:
        return None
    return {int(a) % rank for a in np.atleast_1d(axes)} if rank else set()


def total(tail: PerExampleLoss, op: tf.Operation) -> Term | None:
    """A sum or a mean at the end of a loss."""
    x, rank, axes = tail.term(op.inputs[0]), input_rank(op), summed_axes(op)
    if axes is None and (rank == 1 or op.inputs[1].op.type == "Range"):  # range(rank), where the rank is not constant
        axes = set(range(rank))
    if x.kind == "size" or axes is None:
        return None
    reduce = tf.reduce_sum if op.type == "Sum" else tf.reduce_mean
    keep, places = op.get_attr("keep_dims"), [i + 1 for i in sorted(axes)]
    public = None if x.public is None else reduce(tail.spread(x), sorted(axes), keep)
    if all(x.value.shape[i] == 1 for i in places):  # nothing to add up, in a twentieth of the ops
        value = tf.squeeze(x.value, places) if places and not keep else x.value
    else:
        value = reduce(x.value, places, keep)
    counts = op.type == "Sum" and is_mask(op.inputs[0])
    kind = x.kind if x.kind != "batch" else "count" if counts else "total"
    return Term(kind, value, output_rank(op), public)


def is_mask(t: tf.Tensor) -> bool:
    """Whether the tensor is made of zeros and ones that came from booleans."""
    while t.op.type in ("Identity", "Reshape", "Squeeze", "ExpandDims", "Cast", "StopGradient"):
        if t.op.type == "Cast" and t.op.inputs[0].dtype == tf.bool:
            return True
        t = t.op.inputs[0]
    return False


def half_of_squares(tail: PerExampleLoss, op: tf.Operation) -> Term | None:
    x = tail.absorb(tail.term(op.inputs[0]))
    if x.kind != "batch":
        return None
    return Term("total", tf.reduce_sum(x.value * x.value, list(range(1, x.value.shape.rank))) / 2, 0)


def along_given(view: View, op: tf.Operation, state: Batch, setting: int) -> State:
    """Works along axes that input number ``setting`` names; the others are untouched."""
    axes = constant(op.inputs[setting])
    return along(op, state, None if axes is None else [int(a) % input_rank(op) for a in np.atleast_1d(axes)])


def along_last(view: View, op: tf.Operation, state: Batch, count: int) -> State:
    """Works along the last ``count`` axes."""
    rank = input_rank(op)
    return along(op, state, range(rank - count, rank))


def along(op: tf.Operation, state: Batch, axes: Sequence[int] | None) -> State:
    return meeting(op, "works along the batch axis") if axes is None or state.axis in axes else state


def cross_entropy(view, op, states):
    return rowwise(op, states)


def in_top_k(view, op, states):
    *rows, k = states
    if not is_batch_free(k):
        return mixed(op, "has settings that depend on examples or on how many there are")
    return rowwise(op, rows)


def bincount(view, op, states):
    """Counts row by row, where the values have two axes."""
    values, size, weights = states
    if not isinstance(values, Batch):
        return None
    if values.axis != 0 or input_rank(op) != 2:
        return meeting(op, "counts over the batch")
    alike = weights == values or (isinstance(weights, Public) and op.inputs[2].shape.num_elements() == 0)
    if not isinstance(size, Public) or not alike:
        return mixed(op, "has settings that depend on examples")
    return values


def batch_norm(view, op, states):
    if not batches_of(states):
        return None
    if isinstance(states[0], Batch) and states[0].axis == channel_axis(op):
        # Keras 2 normalises layers with the rows as channels: each row has its own mean and variance.
        if not own_statistics(op.inputs[1:], states[1:]):
            return meeting(op, "normalises examples together")
        return [states[0], *[Batch(0, states[0].rows)] * 4, Public()]
    if op.get_attr("is_training"):
        return meeting(op, "normalises over the batch")
    if states[0] == Batch(0, getattr(states[0], "rows", 0)) and all(isinstance(s, Public) for s in states[1:]):
        return [states[0], *[Public(deps(states))] * 5]
    return meeting(op, "normalises examples together")


def batch_norm_gradient(view, op, states):
    """Of the result's gradient, what was normalised, the scale, and the means and variances."""
    g, x, *per_channel = states
    if not isinstance(x, Batch) or g != x:
        return None
    if x.axis == channel_axis(op):
        if not own_statistics(op.inputs[2:5], states[2:5]):
            return meeting(op, "normalises examples together")
        return [x, Batch(0, x.rows), Batch(0, x.rows), Public(), Public()]
    if op.get_attr("is_training") or x.axis != 0 or not all(isinstance(s, Public) for s in per_channel):
        return meeting(op, "normalises over the batch")
    return [x, *[meeting(op, "sums over the batch")] * 2, Public(), Public()]


def channel_axis(op) -> int:
    return 1 if channels_first(op) else input_rank(op) - 1


def own_statistics(numbers, states) -> bool:
    """Whether the numbers of each channel, where the rows are the channels, are that row's own or the same for all."""
    return all(
        t.shape.num_elements() == 0
        or (isinstance(s, Batch) and s.axis == 0)
        or (isinstance(s, Public) and row_free(t, s, -1))
        for t, s in zip(numbers, states, strict=True)
    )


# -- the records ------------------------------------------------------------------------------------------------------

teach("Sum", "Mean", moves=moves_examples(reduced, of_size=reduced_size), tail=total)
teach("Prod", moves=moves_examples(reduced, of_size=reduced_size),
      folds=lambda op, x, axes: None if output_rank(op) else np.prod(x))  # fmt: skip
teach(
    "Max", "Min", "Any", "All", "EuclideanNorm", "ArgMax", "ArgMin", moves=moves_examples(reduced, of_size=reduced_size)
)
teach("L2Loss", tail=half_of_squares)
teach("Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2",
      moves=moves_examples(functools.partial(along_given, setting=1)))  # fmt: skip
teach("Roll", moves=moves_examples(functools.partial(along_given, setting=2)))
teach("Softmax", "LogSoftmax", "TopKV2", "LRN", "FFT", "IFFT", "RFFT", "IRFFT",
      moves=moves_examples(functools.partial(along_last, count=1)))  # fmt: skip
teach("FFT2D", "IFFT2D", "RFFT2D", "IRFFT2D", "Cholesky", "MatrixInverse", "MatrixDeterminant", "LogMatrixDeterminant",
      "MatrixDiagPartV3", "Qr", "Svd", moves=moves_examples(functools.partial(along_last, count=2)))  # fmt: skip
teach("FFT3D", "IFFT3D", "RFFT3D", "IRFFT3D", moves=moves_examples(functools.partial(along_last, count=3)))
teach("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits", moves=Move(cross_entropy, data=None))
teach("InTopKV2", moves=Move(in_top_k, data=None))
teach("DenseBincount", moves=Move(bincount, data=None))
teach("FusedBatchNormV3", moves=Move(batch_norm, data=None))
teach("FusedBatchNormGradV3", moves=Move(batch_norm_gradient, data=None))
