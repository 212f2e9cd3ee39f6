"""Several workers of one step (MultiWorkerMirroredStrategy): what they share, and what they must agree on.

Each worker traces and runs the same step. All examples' clipped sums are added up over the workers. What follows is
done by each, on the same sums, with noise of the same key, so that all have the same bits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdpfl.clipping.finished import raw_variable
from tfdpfl.clipping.graph import require
from tfdpfl.noise.source import bits_of_normals
from tfdpfl.optimizers import _replicas

_SETTINGS = (
    "tfdpfl: the workers' optimizers differ in what privacy hangs on (l2_norm_clip, noise_multiplier, "
    "expected_batch_size, seed, ... or the weights that are trained), or their processors make other noise of one key, "
    "so that no ε would be true. Give all workers the same settings, and machines of one kind."
)
_DATA = (
    "tfdpfl: the workers say different things of the data (their examples or the order of these, sampling, sizes, "
    "dataset_name, target_epsilon, what ran before; or one has no PrivacyBudget), so that an example may be on two of "
    "them. Give all workers the same arrays in the same order, and PrivacyBudgets of the same settings."
)
_STATE = (
    "tfdpfl: the workers are not at the same step (iterations, logical batch or clip differ): one began from another "
    "file. Give all workers the same backup."
)


@dataclasses.dataclass
class Together:
    """What all that take a step have in common.

    Attributes:
      units: how many units there are in all, float32.
      origin: whose steps they are, as the ledger counts them; None for this process's own.
      key: int64 [2], of the step's noise; None where one process draws it from its own stream.
      agreed: what is to come before anything is summed.
    """

    units: tf.Tensor
    origin: Any = None
    key: tf.Tensor | None = None
    agreed: list[tf.Operation] = dataclasses.field(default_factory=list)


def meet(dp: Any, units: tf.Tensor, variables: Sequence) -> Together:
    """Adds up the replicas' units. Among several workers, it also hands the first one's key and origin to all, and
    stops the step on all of them where they do not agree."""
    if _replicas.workers() == 1:
        (units,) = _replicas.once(lambda counts: counts, [units])
        return Together(units)
    number = _replicas.number()
    replica = int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))
    settings = [_number_of(dp, variables)]
    data = [*tf.unstack(tf.convert_to_tensor(dp.counter.batches)), *tf.unstack(tf.convert_to_tensor(dp.counter.share))]
    state = [raw_variable(dp.iterations), dp.pending, dp.clipping.norm]
    own = [units, dp.counter.origin, *tf.unstack(_words(dp.source.fresh_key()))]
    row = tf.stack([tf.cast(tf.convert_to_tensor(value), tf.float64) for value in [*settings, *data, *state, *own]])
    # Each replica's row beside those of all others: a sum to which only it adds.
    mine = tf.scatter_nd([[replica]], [row], [number, row.shape[0]])
    (rows,) = _replicas.once(lambda summed: summed, [mine])
    rows = tf.ensure_shape(rows, mine.shape)
    of_settings, of_data, of_state, of_own = tf.split(rows, [len(part) for part in (settings, data, state, own)], 1)
    agreed: list[tf.Operation] = []
    for part, message in ((of_settings, _SETTINGS), (of_data, _DATA), (of_state, _STATE)):
        with tf.control_dependencies(agreed):
            agreed = [*agreed, require(tf.reduce_all(tf.equal(part, part[:1])), message)]
    with tf.control_dependencies(agreed):
        total = tf.cast(tf.reduce_sum(of_own[:, 0]), units.dtype)
    return Together(total, of_own[0, 1], _key(of_own[0, 2:]), agreed)


def _number_of(dp: Any, variables: Sequence) -> float:
    """A number that tells optimizers apart, by what privacy hangs on, and by the noise that a key gives."""
    shapes = [(v.shape.as_list(), raw_variable(v).dtype.name) for v in map(raw_variable, variables)]
    text = json.dumps([dp.config(), shapes, bits_of_normals()], sort_keys=True, default=str)
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big"))


def _words(key: tf.Tensor) -> tf.Tensor:
    """A key as float64 [4], each of which is a whole number: in a sum with zeros no bit is lost."""
    return tf.cast(tf.reshape(tf.bitcast(key, tf.int32), [4]), tf.float64)


def _key(words: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(tf.reshape(tf.cast(words, tf.int32), [2, 2]), tf.int64)
