"""How clients' updates become one: clipped, summed, given noise, divided by a fixed number of clients.

TFF's own DP aggregators draw Gaussian noise from a generator that is seeded with 32 bits. They draw tree noise from the
clock, and Skellam noise from the microsecond at which a client runs, which clients share. Here every draw has a fresh
key of 128 bits, derived from one of the operating system's that is sealed into the process when it is built. Keep built
processes and their states secret, as one does with noise. No draw depends on a saved state, so a round that is run
again from a checkpoint has noise of its own.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

import dp_accounting
import numpy as np
import tensorflow as tf

from tfdpfl import noise
from tfdpfl._types import Computation, Nest
from tfdpfl.clips import LEAST_ADAPTED, MOST_ADAPTED
from tfdpfl.federated._tff import DistributedSkellam, tensor_specs, tff, tfp
from tfdpfl.federated.clip import CONTRIBUTING, UPDATE_NORM, AdaptiveClip, NoisedMetrics

__all__ = [
    "ClippedSum",
    "NormMeasured",
    "Secret",
    "TreeMean",
    "clip_by_norm",
    "clipped_mean",
    "locally_noised_mean",
    "noised_metrics",
    "nothing",
    "secure_mean",
]

_PHILOX = 1


class Secret:
    """128 bits of the operating system's entropy, from which computations derive keys that are used once."""

    def __init__(self):
        self._key = noise.new_key()

    def fresh_key(self) -> tf.Tensor:
        """int64 [2]: another one whenever the op runs, and of no use to whoever knows the clock but not the secret."""
        # Unique rather than random: a draw of the runtime's generator, and the time.
        nonce = tf.stack([
            tf.bitcast(tf.raw_ops.NonDeterministicInts(shape=[], dtype=tf.int64), tf.uint64),
            tf.bitcast(tf.timestamp(), tf.uint64),
        ])  # fmt: skip
        words = tf.bitcast(tf.constant(self._key), tf.uint64)
        return tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=[2], key=words[:1], counter=nonce + tf.stack([words[1], tf.zeros([], tf.uint64)]), alg=_PHILOX,
            dtype=tf.int64,
        )  # fmt: skip

    def gaussian_like(self, value: object, stddev: tf.Tensor | float) -> Computation:
        """Normals of standard deviation ``stddev``, in the structure, shapes and types of ``value``."""
        leaves = tf.nest.flatten(value)
        draws = noise.gaussian([leaf.shape for leaf in leaves], stddev, self.fresh_key(), tf.zeros([], tf.int64))
        draws = [tf.cast(draw, leaf.dtype) for draw, leaf in zip(draws, leaves, strict=True)]
        return tf.nest.pack_sequence_as(value, draws)

    def skellam_like(self, value: tf.Tensor, stddev: tf.Tensor) -> tf.Tensor:
        """Differences of two Poisson draws, of standard deviation ``stddev``, in the shape and type of ``value``."""
        rate = 0.5 * tf.cast(stddev, tf.float64) ** 2
        shape = tf.concat([[2], tf.shape(value)], 0)
        draws = tf.random.stateless_poisson(shape, seed=self.fresh_key(), lam=rate, dtype=tf.int64)
        return tf.cast(draws[0] - draws[1], value.dtype)


def clip_by_norm(record: Nest, bound: tf.Tensor | float) -> tuple[Nest, tf.Tensor]:
    """``record`` with an L2 norm of at most ``bound`` over all its tensors, and the norm that it had.

    A record that is not finite becomes zeros, with an infinite norm: it must not reach the sum as a NaN.
    """
    leaves = [tf.cast(leaf, tf.float64) for leaf in tf.nest.flatten(record)]
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(leaf)) for leaf in leaves])
    # In float64 no float32 overflows when squared.
    norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.where(finite, leaf, 0.0) ** 2) for leaf in leaves]))
    bound = tf.cast(bound, tf.float64)
    clips, factor = norm > bound, bound / tf.maximum(norm, 1e-300)
    clipped = [
        tf.cast(tf.where(finite, tf.where(clips, _shrunk(leaf * factor, original.dtype), leaf), 0.0), original.dtype)
        for leaf, original in zip(leaves, tf.nest.flatten(record), strict=True)
    ]
    norm = tf.where(finite, norm, np.inf)
    return tf.nest.pack_sequence_as(record, clipped), tf.cast(norm, tf.float32)


# Relative rounding, and the smallest number that is rounded so, of the types that a client could pass the clip with.
_NARROW = {tf.float16: (2.0**-10, 2.0**-14), tf.bfloat16: (2.0**-7, 2.0**-126)}


def _shrunk(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns values, float64, that are no larger than before once they are rounded to ``dtype``."""
    if dtype not in _NARROW:
        return values
    rounding, smallest = _NARROW[dtype]
    return tf.where(tf.abs(values) < smallest, tf.zeros_like(values), values * (1 - rounding))


class ClippedSum(tfp.GaussianSumQuery):
    """The sum of clipped records, with Gaussian noise."""

    def __init__(self, l2_norm_clip: float, stddev: float, secret: Secret):
        super().__init__(l2_norm_clip, stddev)
        self._secret = secret

    def preprocess_record_impl(self, params, record):
        return clip_by_norm(record, params)

    def get_noised_result(self, sample_state, global_state):
        result = sample_state
        if self._stddev > 0:
            normals = self._secret.gaussian_like(sample_state, global_state.stddev)
            result = tf.nest.map_structure(tf.add, sample_state, normals)
        event = dp_accounting.GaussianDpEvent(global_state.stddev / global_state.l2_norm_clip)
        return result, global_state, event


class _Quantile(tfp.QuantileEstimatorQuery):
    def __init__(self, *args: object, secret: Secret):
        self._secret = secret
        super().__init__(*args)

    def _construct_below_estimate_query(self, below_estimate_stddev, expected_num_records):
        # The indicator is centred at zero, so one client moves the count by 1/2.
        return tfp.NormalizedQuery(ClippedSum(0.5, below_estimate_stddev, self._secret), expected_num_records)

    def get_noised_result(self, sample_state, global_state):
        clip, state, event = super().get_noised_result(sample_state, global_state)
        clip = tf.clip_by_value(clip, LEAST_ADAPTED, MOST_ADAPTED)
        return clip, state._replace(current_estimate=clip), event


class AdaptivelyClippedSum(tfp.QuantileAdaptiveClipSumQuery):
    """`ClippedSum` whose clip follows a quantile of the records' norms, by a count that has noise as well."""

    def __init__(self, clip: AdaptiveClip, noise_multiplier: float, clients_per_round: float, secret: Secret):
        of_updates, of_count = clip.split(noise_multiplier, clients_per_round)
        arguments = clip.initial, clip.target_quantile, clip.learning_rate, of_count, clients_per_round, True
        super().__init__(arguments[0], of_updates, *arguments[1:])
        self._sum_query = ClippedSum(clip.initial, of_updates * clip.initial, secret)
        self._quantile_estimator_query = _Quantile(*arguments, secret=secret)


def clipped_mean(
    clip: float | AdaptiveClip, noise_multiplier: float, clients_per_round: float
) -> tff.aggregators.UnweightedAggregationFactory:
    """The mean of clipped updates over a fixed number of clients, with Gaussian noise from the server."""
    secret = Secret()
    if isinstance(clip, AdaptiveClip):
        query = AdaptivelyClippedSum(clip, noise_multiplier, clients_per_round, secret)
    else:
        query = ClippedSum(clip, clip * noise_multiplier, secret)
    return tff.aggregators.DifferentiallyPrivateFactory(tfp.NormalizedQuery(query, denominator=clients_per_round))


class TreeState(NamedTuple):
    """``rounds`` in this tree so far, and the noise of its ``open`` subtrees, a row for each, the largest first."""

    rounds: tf.Tensor
    open: tf.Tensor


class TreeSum(tfp.SumAggregationDPQuery):
    """Each round's sum of clipped records, with noise whose running total is tree-aggregated.

    The running total over t rounds has the noise of the at most log2(t) + 1 nodes that make up [1, t], each combined
    with its children's as in Honaker (2015), so that all nodes are used. The variance of a node of level k is
    1 / (2 - 2^-k) of the noise's. A node's noise is drawn in the round that closes it, never before. It is kept while
    its subtree is open, rather than made again from a seed: with its children's, that would be all noise so far.
    """

    def __init__(self, clip: float, stddev: float, specs: Nest, restart_every: int, secret: Secret):
        self._clip, self._stddev, self._restart_every, self._secret = clip, stddev, restart_every, secret
        self._sizes = [tf.TensorShape(spec.shape).num_elements() for spec in tf.nest.flatten(specs)]

    def initial_global_state(self):
        return TreeState(tf.zeros([], tf.int32), self._rows(tf.zeros([0, sum(self._sizes)])))

    def derive_sample_params(self, global_state):
        return tf.constant(self._clip, tf.float32)

    def preprocess_record(self, params, record):
        return clip_by_norm(record, params)[0]

    def get_noised_result(self, sample_state, global_state):
        rounds, before = global_state
        # The level of the node that this round closes: how often 2 divides the round's number.
        level = tf.reduce_sum(tf.cast(tf.equal((rounds + 1) % 2 ** tf.range(1, 31), 0), tf.int32))
        key = self._secret.fresh_key()
        kept, closed = tf.split(before, [tf.shape(before)[0] - level, level])

        def draw(at):
            return noise.gaussian([[sum(self._sizes)]], self._stddev, key, tf.cast(at, tf.int64))[0]

        def climb(at, node):
            weight = 1 / (2 - tf.pow(0.5, tf.cast(at + 1, tf.float32)))
            return at + 1, weight * draw(at + 1) + (1 - weight) * (closed[level - 1 - at] + node)

        _, node = tf.while_loop(lambda at, _: at < level, climb, [tf.zeros([], tf.int32), draw(0)])
        after = tf.concat([kept, node[None]], 0)
        result = self._added(sample_state, tf.reduce_sum(after, 0) - tf.reduce_sum(before, 0))
        goes_on = rounds + 1 < self._restart_every
        opened = self._rows(after[: tf.where(goes_on, tf.shape(after)[0], 0)])
        return result, TreeState(tf.where(goes_on, rounds + 1, 0), opened), dp_accounting.UnsupportedDpEvent()

    def _rows(self, value: tf.Tensor) -> tf.Tensor:
        """``value``, of as many rows as it has for all that TFF knows."""
        return tf.raw_ops.PlaceholderWithDefault(input=value, shape=[None, sum(self._sizes)])

    def _added(self, value: object, flat: tf.Tensor) -> Nest:
        leaves = tf.nest.flatten(value)
        parts = tf.split(flat, self._sizes)
        summed = [v + tf.cast(tf.reshape(p, v.shape), v.dtype) for v, p in zip(leaves, parts, strict=True)]
        return tf.nest.pack_sequence_as(value, summed)


class TreeMean(tff.aggregators.UnweightedAggregationFactory):
    """`TreeSum` over a fixed number of clients."""

    def __init__(self, clip: float, noise_multiplier: float, clients_per_round: float, restart_every: int):
        self._clip, self._stddev = clip, clip * noise_multiplier
        self._clients_per_round, self._restart_every = clients_per_round, restart_every

    def create(self, value_type):
        specs = tensor_specs(value_type)
        query = TreeSum(self._clip, self._stddev, specs, self._restart_every, Secret())
        mean = tfp.NormalizedQuery(query, denominator=self._clients_per_round)
        return tff.aggregators.DifferentiallyPrivateFactory(mean).create(value_type)


class MappedSum(tff.aggregators.UnweightedAggregationFactory):
    """Applies ``at_clients`` to each client's update, sums by ``inner``, and applies ``at_server`` to the sum.

    Measurements of ``inner`` are dropped: what TFF's aggregators measure, such as how many clients were clipped, has
    no noise.
    """

    def __init__(
        self,
        at_clients: Callable[[Nest], Nest],
        at_server: Callable[[Nest], Nest],
        inner: tff.aggregators.UnweightedAggregationFactory | None = None,
    ):
        self._at_clients, self._at_server = at_clients, at_server
        self._inner = inner or tff.aggregators.SumFactory()

    def create(self, value_type):
        at_clients = tff.tensorflow.computation(self._at_clients, value_type)
        inner = self._inner.create(at_clients.type_signature.result)
        summed = inner.next.type_signature.result.result.member
        at_server = tff.tensorflow.computation(self._at_server, summed)

        @tff.federated_computation(inner.initialize.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS))
        def next_fn(state, value):
            output = inner.next(state, tff.federated_map(at_clients, value))
            result = tff.federated_map(at_server, output.result)
            return tff.templates.MeasuredProcessOutput(output.state, result, tff.federated_value((), tff.SERVER))

        return tff.templates.AggregationProcess(inner.initialize, next_fn)


def locally_noised_mean(
    clip: float, noise_multiplier: float, clients_per_round: float
) -> tff.aggregators.UnweightedAggregationFactory:
    """The mean of updates that each client has clipped and given Gaussian noise before they leave it."""
    secret = Secret()

    def at_clients(update):
        clipped, _ = clip_by_norm(update, clip)
        if noise_multiplier == 0:
            return clipped
        return tf.nest.map_structure(tf.add, clipped, secret.gaussian_like(clipped, clip * noise_multiplier))

    return MappedSum(at_clients, _divided_by(clients_per_round))


class SkellamShare(tfp.DistributedSkellamSumQuery):
    """A client's share of Skellam noise, with keys of its own."""

    def __init__(self, l1_norm_bound: float, l2_norm_bound: float, local_stddev: float, secret: Secret):
        super().__init__(l1_norm_bound, l2_norm_bound, local_stddev)
        self._secret = secret

    def add_noise_to_sample(self, local_stddev, record):
        return tf.nest.map_structure(lambda v: v + self._secret.skellam_like(v, local_stddev), record)


def secure_mean(
    clip: float, noise_multiplier: float, clients_per_round: int, bits: int
) -> tuple[tff.aggregators.UnweightedAggregationFactory, DistributedSkellam]:
    """The mean by secure aggregation of updates with shares of Skellam noise, and what knows its parameters."""
    secret = Secret()
    inner = DistributedSkellam(
        lambda l1, l2, stddev: SkellamShare(l1, l2, stddev, secret),
        l2_clip=clip, noise_multiplier=noise_multiplier, clients_per_round=clients_per_round, bits=bits,
    )  # fmt: skip
    return MappedSum(lambda update: clip_by_norm(update, clip)[0], _divided_by(clients_per_round), inner), inner


def _divided_by(number: float) -> Callable[[Nest], Nest]:
    return lambda total: tf.nest.map_structure(lambda v: v / tf.cast(number, v.dtype), total)


def nothing(metric_finalizers: Computation, local_unfinalized_metrics_type: Computation = None) -> Computation:
    """A metrics aggregator that lets nothing out."""

    empty = tff.tensorflow.computation(lambda: collections.OrderedDict())  # as TFF's programs want it

    @tff.federated_computation
    def aggregate(metrics):
        return tff.federated_eval(empty, tff.SERVER)

    return aggregate


class NormMeasured(tff.aggregators.UnweightedAggregationFactory):
    """``inner``, with a noisy mean of the norms of clients' updates, cut at a bound, among its measurements."""

    def __init__(self, inner: Computation, bound: float, stddev: float, clients_per_round: float):
        self._inner, self._bound, self._clients_per_round = inner, bound, clients_per_round
        self._stddev, self._secret = stddev, Secret()

    def create(self, value_type):
        inner = self._inner.create(value_type)

        @tff.tensorflow.computation(value_type)
        def share(update):
            norm = clip_by_norm(update, self._bound)[1] / self._bound
            return tf.where(tf.math.is_finite(norm), tf.minimum(norm, 1.0), 0.0)

        @tff.tensorflow.computation(np.float32)
        def at_server(total):
            total += self._secret.gaussian_like(total, self._stddev)
            return total / self._clients_per_round * self._bound

        @tff.federated_computation(inner.initialize.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS))
        def next_fn(state, value):
            output = inner.next(state, value)
            norm = tff.federated_map(at_server, tff.federated_sum(tff.federated_map(share, value)))
            measured = collections.OrderedDict(sum=output.measurements, update_norm=norm)
            return tff.templates.MeasuredProcessOutput(output.state, output.result, tff.federated_zip(measured))

        return tff.templates.AggregationProcess(inner.initialize, next_fn)


def noised_metrics(metrics: NoisedMetrics, clients_per_round: float) -> Callable[..., Computation]:
    """A metrics aggregator: noisy means over clients of each metric that is asked for, clipped to [0, its bound]."""
    secret = Secret()

    def aggregator(metric_finalizers, local_unfinalized_metrics_type=None):
        bounds = metrics.bounds(list(metric_finalizers))
        stddev = metrics.stddev(len(bounds))
        bounds.pop(UPDATE_NORM, None)  # measured with the updates
        if not bounds:
            return nothing(metric_finalizers, local_unfinalized_metrics_type)
        names: Sequence[str] = [name for name in bounds if name in metric_finalizers]

        @tff.tensorflow.computation
        def at_client(measured):
            values = [tf.cast(metric_finalizers[name](measured[name]), tf.float32) for name in names]
            finite = tf.reduce_all([tf.math.is_finite(value) for value in values])
            # TFF resets the metrics of a client whose update is not finite, and an empty client has none.
            raw = tf.nest.flatten(measured)
            seen = tf.reduce_any([tf.reduce_any(tf.not_equal(part, tf.zeros([], part.dtype))) for part in raw])
            used = tf.cast(tf.logical_and(finite, seen), tf.float32)
            parts = {name: tf.clip_by_value(v / bounds[name], 0.0, 1.0) for name, v in zip(names, values, strict=True)}
            parts[CONTRIBUTING] = used
            return tf.where(used > 0, tf.stack([parts[name] for name in bounds]), 0.0)

        size = len(bounds)

        @tff.tensorflow.computation(tff.TensorType(np.float32, [size]))
        def at_server(total):
            total += secret.gaussian_like(total, stddev)
            means = total / clients_per_round
            return collections.OrderedDict((name, means[i] * bound) for i, (name, bound) in enumerate(bounds.items()))

        @tff.federated_computation
        def aggregate(metrics):
            return tff.federated_map(at_server, tff.federated_sum(tff.federated_map(at_client, metrics)))

        return aggregate

    return aggregator
