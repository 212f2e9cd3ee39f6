"""Gradients of ops in fewer ops than TensorFlow's own gradients take, because the engine knows more of the tensors.

- A sum or a product: TensorFlow's gradient looks in each step for a term that was repeated to be as long as the other,
  and adds its gradient up. It does so wherever a length is not known while tracing, and the batch's is not. Of terms
  with the same number of rows that takes seven ops for nothing; in a loop, seven in each iteration. A term without
  examples leads to nothing that a gradient is asked for.
- An item that a loop puts into a list: TensorFlow's gradient keeps each item to know its shape, which the gradient has,
  too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import tensorflow as tf

from tfdpfl.clipping import graph as graph_tools
from tfdpfl.clipping.graph import key, output_rank
from tfdpfl.clipping.states import Batch, State

__all__ = ["gradient_of", "set_gradients"]

Gradient = Callable[..., tuple[tf.Tensor | None, ...]]


# The derivatives of an op of two terms with respect to each, times g.
_OF_TERMS: dict[str, list[Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]]] = {
    "Add": [lambda x, y, g: g, lambda x, y, g: g],
    "AddV2": [lambda x, y, g: g, lambda x, y, g: g],
    "Sub": [lambda x, y, g: g, lambda x, y, g: -g],
    "Mul": [lambda x, y, g: g * y, lambda x, y, g: g * x],
    "RealDiv": [lambda x, y, g: g / y, lambda x, y, g: g * (-x / y / y)],
}


def _of_item(op: tf.Operation, items: tf.Tensor) -> tuple[tf.Tensor, None, tf.Tensor]:
    _, index, item = op.inputs
    g = tf.raw_ops.TensorListGetItem(input_handle=items, index=index, element_shape=-1, element_dtype=item.dtype)
    g.set_shape(item.shape)
    return tf.raw_ops.TensorListSetItem(input_handle=items, index=index, item=tf.zeros_like(g)), None, g


def gradient_of(op: tf.Operation, states: Sequence[State]) -> Gradient | None:
    """Returns the gradient of an op whose inputs have these states; None where TensorFlow's own is the one to take."""
    if op.type == "TensorListSetItem":
        return _of_item
    derivatives = _OF_TERMS.get(op.type)
    if derivatives is None or not op.outputs[0].dtype.is_floating or not _are_whole(op, states):
        return None
    if "_gradient_op_type" in op.node_def.attr:
        return None
    wanted = [isinstance(state, Batch) for state in states]

    def gradient(op: tf.Operation, g: tf.Tensor | tf.IndexedSlices) -> tuple[tf.Tensor | None, ...]:
        (x, y), g = op.inputs, tf.convert_to_tensor(g)
        return tuple(
            _summed(derivative(x, y, g), t, op.outputs[0]) if asked else None
            for derivative, t, asked in zip(derivatives, (x, y), wanted, strict=True)
        )

    return gradient


def _are_whole(op: tf.Operation, states: Sequence[State]) -> bool:
    """Whether no term with examples was repeated along their axis, and it is known along which others it was."""
    of = [(t, s) for t, s in zip(op.inputs, states, strict=True) if isinstance(s, Batch)]
    if not of:
        return False
    rank, at = output_rank(op), of[0][1].axis
    if any(t.shape.rank != rank or None in (*t.shape[:at], *t.shape[at + 1 :]) for t, _ in of):
        return False
    if len(of) == 2:
        (x, first), (y, second) = of
        return first == second and first.rows is not None and x.shape[at] == y.shape[at]
    (other,) = [t.shape for t, s in zip(op.inputs, states, strict=True) if not isinstance(s, Batch)]
    return other.rank is not None and (other.rank < rank - at or other[at - rank] == 1)


def _summed(g: tf.Tensor, t: tf.Tensor, output: tf.Tensor) -> tf.Tensor:
    """g summed over the axes along which t was repeated; not its examples', of which no length is known."""
    lengths = enumerate(zip(t.shape, output.shape, strict=True))
    axes = [i for i, (its, whole) in lengths if its == 1 and whole != 1]
    return tf.reduce_sum(g, axes, keepdims=True) if axes else g


@contextlib.contextmanager
def set_gradients(ops: Iterable[tf.Operation], states: Mapping[tuple[str, int], State]) -> Iterator[None]:
    """Has `tf.gradients` take these gradients while the context lasts."""
    with contextlib.ExitStack() as stack:
        for op in ops:
            gradient = gradient_of(op, [states[key(t)] for t in op.inputs]) if op.type in _OF_TERMS else None
            if gradient is not None:
                graph_tools.set_gradient(op, gradient)
                stack.callback(graph_tools.set_gradient, op, None)
        yield
