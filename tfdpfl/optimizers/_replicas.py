"""Several replicas of one step (tf.distribute): one sum of all examples, one noise, one count, one state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpfl.clipping.sizes import is_average, original
from tfdpfl.errors import PrivacyError

__all__ = ["among_replicas", "check_apart", "each_where", "number", "once", "undivided", "workers"]


def number() -> int:
    """Returns how many replicas take the step.

    Raises:
      PrivacyError: by a strategy under which that is not known to be one step.
    """
    strategy = tf.distribute.get_strategy()
    name, count = type(strategy).__name__, strategy.num_replicas_in_sync
    if "ParameterServer" in name:
        raise PrivacyError(
            f"{name} lets workers take steps on weights of different ages, each with its own noise. Train under "
            "MirroredStrategy, or on one device."
        )
    if count > 1 and name != "MirroredStrategy" and "CollectiveAllReduce" not in name:
        raise PrivacyError(
            f"{name} runs {count} replicas, and each would draw its own noise. Train under MirroredStrategy (several "
            "devices of one machine), or on one device."
        )
    return count


def workers() -> int:
    """Returns how many processes take the step together (MultiWorkerMirroredStrategy), each with as many replicas."""
    strategy = tf.distribute.get_strategy()
    if "CollectiveAllReduce" not in type(strategy).__name__:  # TensorFlow's older name of that strategy
        return 1
    return strategy.num_replicas_in_sync // len(strategy.extended.worker_devices)


def among_replicas() -> bool:
    """Returns whether what is traced is one replica's part of a step."""
    return tf.distribute.has_strategy() and tf.distribute.get_replica_context() is not None


@tf.autograph.experimental.do_not_convert
def once(do: Callable[[list], Any], tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> Any:
    """Returns what ``do`` makes of the tensors, each summed over all replicas (of tables' rows with their numbers all
    follow each other, or several workers add up whole tables). It is traced once for all of them, so that the noise it
    draws is one and the state it changes changes once. They all get what it gives back. Of several workers each does
    the same."""
    tensors = list(tensors)
    if not among_replicas():
        return do(tensors)
    if workers() > 1:  # whose batches may look up any number of rows
        tensors = [_table(t) if isinstance(t, tf.IndexedSlices) else t for t in tensors]

    def together(strategy: tf.distribute.Strategy, *each: Any) -> Any:
        if workers() > 1:
            return do(_over_workers(strategy, each))
        values = [strategy.experimental_local_results(of_replicas) for of_replicas in each]
        assert all(len(of_replicas) == strategy.num_replicas_in_sync for of_replicas in values)
        packed = [tf.nest.pack_sequence_as(tensors, one, True) for one in zip(*values, strict=True)]
        return do([_added(of_replicas) for of_replicas in zip(*packed, strict=True)])

    args = tf.nest.flatten(tensors, expand_composites=True)
    return tf.distribute.get_replica_context().merge_call(together, args=tuple(args))


def _table(rows: tf.IndexedSlices) -> tf.Tensor:
    return tf.math.unsorted_segment_sum(rows.values, rows.indices, tf.get_static_value(rows.dense_shape)[0])


def _added(of_replicas: Sequence[tf.Tensor | tf.IndexedSlices]) -> tf.Tensor | tf.IndexedSlices:
    first = of_replicas[0]
    if not isinstance(first, tf.IndexedSlices):
        return tf.add_n(of_replicas)
    values, rows = (tf.concat([getattr(s, name) for s in of_replicas], 0) for name in ("values", "indices"))
    return tf.IndexedSlices(values, rows, first.dense_shape)


def _over_workers(strategy: tf.distribute.Strategy, each: Sequence[Any]) -> list[tf.Tensor]:
    """Returns each value's sum over the replicas of all workers, with the same bits on every worker."""
    sums: dict[int, tf.Tensor] = {}
    kinds = [strategy.experimental_local_results(value)[0].dtype for value in each]
    for kind in dict.fromkeys(kinds):  # TensorFlow sends several tensors as one, which is of one type
        which = [i for i, k in enumerate(kinds) if k == kind]
        pairs = [(each[i], each[i]) for i in which]
        reduced = strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs)
        sums |= {i: strategy.experimental_local_results(r)[0] for i, r in zip(which, reduced, strict=True)}
    return [sums[i] for i in range(len(each))]


@tf.autograph.experimental.do_not_convert
def each_where(chosen: Callable[[], tf.Tensor], act: Callable[[], object]) -> None:
    """Has ``act`` done where ``chosen``, by every replica."""

    def branch(act: Callable[[], object]) -> None:
        def done() -> tf.Tensor:
            act()
            return tf.zeros([])

        tf.cond(chosen(), done, lambda: tf.zeros([]))

    def together(strategy: tf.distribute.Strategy, acts: Callable[[], object]) -> None:
        run = tf.autograph.experimental.do_not_convert(lambda act: act())
        branch(lambda: strategy.extended.call_for_each_replica(run, args=(acts,)))

    if among_replicas():  # of which none could meet the others from within a branch of its own
        tf.distribute.get_replica_context().merge_call(together, args=(act,))
    else:
        branch(act)


# Of each graph: which replica is handed which batch.
_BATCHES: weakref.WeakKeyDictionary[tf.Graph, dict[str, int]] = weakref.WeakKeyDictionary()


def check_apart(batch: Sequence[tf.Tensor]) -> None:
    """Raises a `PrivacyError` where another replica takes in the same tensors: each example would be in the sum once
    for each of them."""
    if number() == 1:
        return
    replica = int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))
    for t in map(original, batch):
        if _BATCHES.setdefault(t.graph, {}).setdefault(t.name, replica) != replica:
            raise PrivacyError(
                f"Several replicas receive the same batch ({t.op.name!r}), so each of its examples would count several "
                "times. Give each replica a share: fit does (train_on_batch of Keras 3 does not), and so does "
                "strategy.run(step, args=(batch,)) with a batch from strategy.experimental_distribute_dataset(dataset)."
            )


def undivided(loss: tf.Tensor) -> tf.Tensor:
    """Returns the loss as one device would have it: Keras divides by the number of replicas, and so each example's
    gradient, before it is clipped. (A loss that is taken for one of those, and is not, costs no privacy.)"""
    count = number()
    return loss * tf.cast(count, loss.dtype) if count > 1 and _is_divided(loss, count) else loss


def _is_divided(t: tf.Tensor, count: int) -> bool:
    """Returns whether all that is added up in it was multiplied by 1 / count."""
    kind, inputs = t.op.type, list(t.op.inputs)
    of_pack = kind == "Sum" and inputs[0].op.type == "Pack"  # as Keras 3 adds up losses
    if of_pack or kind in ("Identity", "Cast", "Squeeze", "Reshape"):
        return _is_divided(inputs[0], count)
    if kind in ("AddV2", "AddN", "Pack"):
        return all(_constant(x) == 0 or _is_divided(x, count) for x in inputs)
    if kind in ("RealDiv", "DivNoNan"):  # tf.nn.compute_average_loss: by how many examples all replicas have
        return is_average(t) or _is_of_all(inputs[1], count) or _is_divided(inputs[0], count)
    return kind == "Mul" and any(_is_share(x, count) for x in inputs)


def _is_share(factor: tf.Tensor, count: int) -> bool:
    """Returns whether a factor is 1 / count, or was multiplied by it."""
    known = _constant(factor)
    return _is_divided(factor, count) if known is None else bool(np.isclose(known, 1 / count, rtol=1e-2))


def _is_of_all(size: tf.Tensor, count: int) -> bool:
    """Returns whether a size is count times one replica's."""
    while size.op.type == "Cast":
        size = size.op.inputs[0]
    return _constant(size) == count or (size.op.type == "Mul" and count in map(_constant, size.op.inputs))


def _constant(t: tf.Tensor) -> float | None:
    value = tf.get_static_value(t) if t.shape.rank == 0 else None
    return None if value is None else float(value)
