"""Several workers of one step (MultiWorkerMirroredStrategy): what they share, and what they must agree on.

Each worker traces and runs the same step. All examples' clipped sums are added up over the workers. The rest is
done by each, on the same sums, with noise of the same key, so that all have the same bits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfdpfl._types import Json
from tfdpfl.clipping.graph import require
from tfdpfl.clipping.step_checks import raw_variable
from tfdpfl.noise.source import Source, bits_of_normals
from tfdpfl.optimizers import _replicas
from tfdpfl.optimizers._step_table import Counter

__all__ = ["WorkerAgreement", "agree"]

_SECONDS = 5  # far longer than a few numbers take to another worker

_SETTINGS = (
    "tfdpfl: the optimizers of the workers differ in settings that ε depends on (l2_norm_clip, noise_multiplier, "
    "expected_batch_size, seed, ... or the trained weights), or their processors draw different noise from one key, so "
    "no ε would be true. Give all workers the same settings, and machines of one kind."
)
_DATA = (
    "tfdpfl: the workers disagree about the data (their examples or the order of these, sampling, sizes, dataset_name, "
    "target_epsilon, what ran before; or one has no PrivacyBudget), so one example may be on two workers. Give all "
    "workers the same arrays in the same order, and PrivacyBudgets of the same settings."
)
_STATE = (
    "tfdpfl: the workers are not at the same step (iterations, logical batch, clip or correlated noise differ): one of "
    "them began from another file. Give all workers the same backup."
)


@dataclasses.dataclass
class WorkerAgreement:
    """Holds what all that take a step have in common.

    Attributes:
      units: how many units there are in all, float32.
      origin: whose steps they are, as the ledger counts them; None for this process's own.
      keys: int64 [draws, 2], of the step's noise; None where one process draws it from its own stream.
      agreed: what is to come before anything is summed.
    """

    units: tf.Tensor
    origin: tf.Tensor | None = None
    keys: tf.Tensor | None = None
    agreed: list[tf.Operation] = dataclasses.field(default_factory=list)


def agree(
    units: tf.Tensor, variables: Sequence, made_with: Json, counter: Counter, source: Source,
    draws: int, state: Callable[[], list[tf.Tensor]],
) -> WorkerAgreement:  # fmt: skip
    """Adds up the replicas' units. Among several workers, it also hands the first one's keys and origin to all, and
    stops the step on all of them where they do not agree.

    Args:
      units: of this replica.
      variables: that the step trains.
      made_with: all of the optimizer's arguments.
      counter: of its steps.
      source: of its noise.
      draws: how many draws the noise is made of, each with a key of its own.
      state: returns what must be the same on all workers as the step begins.
    """
    if _replicas.workers() == 1:
        (units,) = _replicas.once(lambda counts: counts, [units])
        return WorkerAgreement(units)
    number = _replicas.number()
    replica = int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))
    data = [*tf.unstack(tf.convert_to_tensor(counter.batches)), *tf.unstack(tf.convert_to_tensor(counter.share))]
    secret = [word for _ in range(draws) for word in tf.unstack(_words(source.fresh_key() if replica == 0 else None))]
    own = [units, counter.origin, *secret]
    kinds: list[list] = [[_number_of(made_with, variables)], data, state(), own]
    row = tf.stack([tf.cast(tf.convert_to_tensor(value), tf.float64) for values in kinds for value in values])
    # Each replica's row beside those of all others: a sum to which only it adds.
    mine = tf.scatter_nd([[replica]], [row], [number, row.shape[0]])
    (rows,) = _replicas.once(lambda summed: summed, [mine])
    rows = tf.ensure_shape(rows, mine.shape)
    of_settings, of_data, of_state, of_own = tf.split(rows, [len(values) for values in kinds], 1)
    agreed: list[tf.Operation] = []
    for part, message in ((of_settings, _SETTINGS), (of_data, _DATA), (of_state, _STATE)):
        with tf.control_dependencies(agreed):
            agreed = [*agreed, require(_late_if_false(tf.reduce_all(tf.equal(part, part[:1]))), message)]
    with tf.control_dependencies(agreed):
        total = tf.cast(tf.reduce_sum(of_own[:, 0]), units.dtype)
    return WorkerAgreement(total, of_own[0, 1], _keys(of_own[0, 2:]), agreed)


def _late_if_false(holds: tf.Tensor) -> tf.Tensor:
    """Returns ``holds``, and False only after some seconds. An error at once would cut off what this worker still sends
    to the others, who would wait for it for ever in place of raising the same error."""
    return tf.cond(holds, lambda: tf.constant(True), lambda: tf.numpy_function(_wait, [], tf.bool))


def _wait() -> np.bool_:
    time.sleep(_SECONDS)
    return np.False_


def _number_of(made_with: Json, variables: Sequence) -> float:
    """Returns a number that tells optimizers apart, by what privacy hangs on, and by the noise that a key gives."""
    shapes = [(v.shape.as_list(), raw_variable(v).dtype.name) for v in map(raw_variable, variables)]
    text = json.dumps([made_with, shapes, bits_of_normals()], sort_keys=True, default=str)
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big"))


def _words(key: tf.Tensor | None) -> tf.Tensor:
    """Returns a key as float64 [4], each of which is a whole number: in a sum with zeros no bit is lost. None is of a
    replica whose key nobody would use: zeros."""
    if key is None:
        return tf.zeros([4], tf.float64)
    return tf.cast(tf.reshape(tf.bitcast(key, tf.int32), [4]), tf.float64)


def _keys(words: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(tf.reshape(tf.cast(words, tf.int32), [-1, 2, 2]), tf.int64)
