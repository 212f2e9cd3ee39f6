"""The random numbers that a model draws for each example in a private step: dropout, noise, augmentation.

Such numbers go by an example's place in the batch, and one example less moves all that follow to other places. The
proof of privacy takes the numbers of all places to be independent and secret: then no place is better than another. A
seed that anyone knows (`keras.utils.set_random_seed(0)`, a seed in a saved file, a constant) is no secret. With it, one
example would change the gradients of all that follow it. So a step draws with keys of this process:

- what is drawn from a key or a seed gets the key's bits mixed with secret ones, other ones in every step;
- what TensorFlow seeds when it is traced is drawn from such keys instead;
- in what a step calls, loops over or branches to, the variables that hold seeds are replaced by ones in memory, and in
  loops and branches what TensorFlow has seeded gets other seeds.

Seeds that are constants are refused: their numbers are meant to be the same in every step.
"""

from __future__ import annotations

import functools
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from tfdpfl._variables import in_memory
from tfdpfl.clipping import graph as graph_tools
from tfdpfl.clipping.batch_axis import BatchAxis
from tfdpfl.clipping.graph import body_graphs, is_branch, is_call, is_seeded
from tfdpfl.clipping.registry import look_up
from tfdpfl.clipping.states import Batch, Items
from tfdpfl.errors import PrivacyError
from tfdpfl.noise.source import Source

if TYPE_CHECKING:
    from tensorflow.core.framework.node_def_pb2 import NodeDef

__all__ = ["draws_by_example", "make_secret"]

# By graph and name: the ops that an earlier loss of the same step is made of, whose keys are secret by now. Where
# another op draws instead, its name.
_SECRET: weakref.WeakKeyDictionary[tf.Graph, dict[str, str | None]] = weakref.WeakKeyDictionary()
# Variables that loops and branches draw from, for as long as their graph lives.
_STATES: weakref.WeakKeyDictionary[tf.Graph, list[tf.Variable]] = weakref.WeakKeyDictionary()
# What draws from TensorFlow's own state, and what draws the same from a key. Both have the shape first.
_FROM_KEYS = {
    "RandomUniform": tf.raw_ops.StatelessRandomUniformV2,
    "RandomStandardNormal": tf.raw_ops.StatelessRandomNormalV2,
    "TruncatedNormal": tf.raw_ops.StatelessTruncatedNormalV2,
    "RandomUniformInt": tf.raw_ops.StatelessRandomUniformIntV2,
}
_PHILOX = 1
_SEEDS = ("seed", "seed2")  # what TensorFlow seeds an op with; of 0 and 0 it draws others itself
_NEW_SEEDS: set[int] = set()
_SEED_STATES = (2, 3)  # how many numbers Keras's and TensorFlow's generators keep


def make_secret(loss: tf.Tensor, source: Source) -> None:
    """Gives all that the loss draws keys that nobody knows, as far as the graph allows; `draws_by_example` checks."""
    done = _SECRET.setdefault(loss.graph, {})
    bits = functools.cache(source.philox_key)  # once a step, if at all
    for op in list(graph_tools.ancestors([loss]).values()):
        with tf.control_dependencies(None):
            if op.type in _FROM_KEYS:
                if op.name not in done:
                    done[op.name] = _from_key(op, bits(), len(done)).op.name
                _hand_on(op, loss.graph.get_operation_by_name(done[op.name]))
            elif op.name not in done:
                done[op.name] = None
                _mix(op, bits)


def _mix(op: tf.Operation, bits: Callable[[], tf.Tensor]) -> None:
    """Makes what one op draws from secret."""
    if is_seeded(op):
        for name in _SEEDS:
            op._set_attr(name, attr_value_pb2.AttrValue(i=_new_seed()))
    at = _key_input(op)
    if at is not None and not _is_constant(op.inputs[at]):
        op._update_input(at, _mixed(op.inputs[at], bits()))
    for at in sorted(_seed_inputs(op)):
        _replace_state(op, at)
    if look_up(op).runs and not is_call(op):  # TensorFlow's gradient of a call brings its function back
        graph_tools.rewrite_bodies(op, _reseed)


def _new_seed() -> int:
    """Returns a secret seed, and notes that it is one."""
    seed = 1 + secrets.randbits(62)
    _NEW_SEEDS.add(seed)
    return seed


def _reseed(node: NodeDef) -> bool:
    """Gives a node of a function, if it is seeded, secret seeds instead."""
    seeded = all(name in node.attr for name in _SEEDS)
    for name in _SEEDS if seeded else ():
        node.attr[name].i = _new_seed()
    return seeded


def _from_key(op: tf.Operation, bits: tf.Tensor, number: int) -> tf.Tensor:
    """Returns the same distribution as the op draws from, from a key; ops of one step are told apart by their
    number."""
    key, start = tf.unstack(tf.bitcast(bits, tf.uint64))
    counter = tf.stack([tf.zeros([], tf.uint64), start + tf.constant(number, tf.uint64)])
    how = {"shape": op.inputs[0], "key": key[None], "counter": counter, "alg": _PHILOX}
    if op.type == "RandomUniformInt":
        how.update(minval=op.inputs[1], maxval=op.inputs[2])
    else:
        how["dtype"] = op.outputs[0].dtype
    return tf.ensure_shape(_FROM_KEYS[op.type](**how), op.outputs[0].shape)


def _hand_on(op: tf.Operation, other: tf.Operation) -> None:
    """Gives all that takes the op's output the other's."""
    for user in op.outputs[0].consumers():
        for i, t in enumerate(user.inputs):
            if t.op.name == op.name:
                user._update_input(i, other.outputs[0])


def draws_by_example(loss: tf.Tensor, analysis: BatchAxis, secret: bool) -> bool:
    """Returns whether the loss draws anything for each example.

    Raises:
      PrivacyError: it is to be ``secret``, and is drawn from a seed that is known, or may be.
    """
    return _look(analysis, graph_tools.ancestors([loss]).values(), secret, True)


def _look(view: BatchAxis, ops: Iterable[tf.Operation], secret: bool, outermost: bool) -> bool:
    found = False
    for op in ops:
        draws = is_seeded(op) or _key_input(op) is not None
        if draws and isinstance(view[op.outputs[0]], Batch | Items):
            found = True
            if secret:
                _check_seed(op, outermost)
        for inner, graph in view.bodies(op):
            found |= _look(inner, graph.get_operations(), secret, False)
    return found


def _check_seed(op: tf.Operation, outermost: bool) -> None:
    at, name = _key_input(op), f"{op.type} ({op.name!r})"
    if at is not None and _is_constant(op.inputs[at]):
        raise PrivacyError(
            f"{name} draws numbers for each example from a constant seed. Anyone who knows the seed knows the numbers "
            "of each place in the batch, and one example less moves all later examples to other places, by more than "
            "one clip together. Draw without a seed (tf.random.normal(shape), or a layer such as GaussianNoise or "
            "Dropout)."
        )
    if outermost or (at is None and all(op.get_attr(seed) in (0, *_NEW_SEEDS) for seed in _SEEDS)):
        return
    if at is None:
        raise PrivacyError(
            f"{name} draws numbers for each example in a tf.function, from the seed that tf.random.set_seed (or "
            "keras.utils.set_random_seed) has set, or that it was given. Anyone who knows the seed knows the numbers "
            "of each place in the batch, and one example less moves all later examples to other places. Call "
            "tf.random.set_seed(None) before fit and draw without a seed, or draw outside of it."
        )
    states = [t for o in graph_tools.ancestors([op.inputs[at]]).values() for t in [*o.inputs, *o.outputs]]
    if not any(t.dtype == tf.resource and t.op.type.startswith("Placeholder") for t in states):
        raise PrivacyError(
            f"{name} draws numbers for each example in a loop, a branch or a tf.function, from a seed that is passed "
            "in, and that somebody may know. One example less moves all later examples to other places. Draw without a "
            "seed (tf.random.normal(shape)), or outside of it."
        )


def _key_input(op: tf.Operation) -> int | None:
    """Returns which input of an op that draws says what it draws."""
    if not op.type.startswith("Stateless") or look_up(op).runs or op.type == "StatelessRandomGetKeyCounter":
        return None
    names = [each.name for each in op.op_def.input_arg]
    return next((names.index(name) for name in ("key", "seed") if name in names), None)


def _is_constant(t: tf.Tensor) -> bool:
    """Returns whether a value is the same in every step: nothing goes into it that a program may change."""
    for op in graph_tools.ancestors([t]).values():
        if look_up(op).enters:
            outer = graph_tools.origin(op.outputs[0])
            if op.outputs[0].dtype == tf.resource or isinstance(getattr(outer, "graph", None), tf.Graph):
                return False
        elif op._is_stateful:
            return False
    return True


def _mixed(t: tf.Tensor, bits: tf.Tensor) -> tf.Tensor:
    """Returns a key or a seed, mixed with secret bits, int64 [2]."""
    with tf.control_dependencies(None):
        bits = bits[: t.shape[0]] if t.shape[0] is not None else bits[:1]
        mask = tf.cast(bits, t.dtype) if t.dtype.size == 4 else tf.bitcast(bits, t.dtype)
        return tf.ensure_shape(tf.bitwise.bitwise_xor(t, mask), t.shape)


# -- in calls, loops and branches --------------------------------------------------------------------------------------


def _seed_inputs(op: tf.Operation) -> set[int]:
    """Returns which inputs of a call, a loop or a branch are variables that it draws from."""
    return {i + is_branch(op) for body in body_graphs(op) for i in _states(body)}


def _states(body: tf.Graph) -> Iterator[int]:
    place = {t.op.name: i for i, t in enumerate(body.inputs) if t.dtype == tf.resource}
    for op in body.get_operations():
        at = _key_input(op)
        if at is not None:
            yield from (place[name] for name in graph_tools.ancestors([op.inputs[at]]) if name in place)
        for i in _seed_inputs(op):
            name = graph_tools.source(op.inputs[i]).op.name
            if name in place:
                yield place[name]


def _replace_state(op: tf.Operation, at: int) -> None:
    """Has a call, a loop or a branch draw from a variable of its own, which nobody knows and no file holds."""
    handle = graph_tools.origin(op.inputs[at])
    data = getattr(handle, "_handle_data", None)
    kinds = [(tf.TensorShape(entry.shape), tf.as_dtype(entry.dtype)) for entry in getattr(data, "shape_and_type", ())]
    if not any(shape.rank == 1 and shape[0] in _SEED_STATES and dtype.is_integer for shape, dtype in kinds):
        raise PrivacyError(
            f"{op.type} ({op.name!r}) draws numbers from a seed that is kept in a variable, and that is not one of "
            "Keras's or TensorFlow's generators. Anyone who knows the seed knows the numbers of each place in the "
            "batch. Draw with tf.random.normal(shape) without a seed, or outside of it."
        )
    ((shape, dtype),) = kinds
    size = int(shape[0])
    own = in_memory(np.frombuffer(secrets.token_bytes(size * dtype.size), dtype.as_numpy_dtype))
    _STATES.setdefault(op.graph, []).append(own)
    op._update_input(at, op.graph.capture(own.handle))
