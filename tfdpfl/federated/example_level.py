"""Federated averaging where each client trains by DP-SGD, so that what it sends protects each of its examples."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdpfl import noise
from tfdpfl._types import Arrays, Computation, Dataset, Model, Nest, State
from tfdpfl.accounting import _checks
from tfdpfl.accounting.sampling import POISSON
from tfdpfl.clipping import clipped_gradients
from tfdpfl.federated import aggregators, models, processes, runtime
from tfdpfl.federated._tff import client_work_of, compose, loss_of, tff
from tfdpfl.federated.clip import AdaptiveClip
from tfdpfl.federated.guarantees import ClientLevel, ExampleLevel
from tfdpfl.federated.models import CLIENT_RATES, SERVER_RATES, Loss, ModelFn, Optimizer, Spec, optimizer

__all__ = ["build_example_dp_fed_avg"]


def build_example_dp_fed_avg(
    model_fn: ModelFn,
    *,
    l2_norm_clip: float,
    noise_multiplier: float,
    batch_size: int,
    sampling: str = POISSON.name,
    local_steps: int | None = None,
    local_epochs: int | None = None,
    client_optimizer_fn: Optimizer,
    server_optimizer_fn: Optimizer = "sgd",
    client_clip: float | AdaptiveClip | None = None,
    client_noise_multiplier: float = 0.0,
    clients_per_round: float | None = None,
    loss: Loss | None = None,
    input_spec: Spec | None = None,
    model_aggregator: tff.aggregators.AggregationFactory | None = None,
    model_distributor: tff.templates.MeasuredProcess | None = None,
) -> tff.learning.templates.LearningProcess:
    """Federated averaging of models that clients train by DP-SGD with this package's own engine, each by itself.
    So neither the server nor anyone else learns of a single example.

    A step's update is ``(sum_i clip(g_i, l2_norm_clip) + N(0, (noise_multiplier l2_norm_clip)^2)) / batch_size``, with
    the expected batch size and not the actual one. A client's data set must hold every example once: the process does
    the passes over it, and cannot see a ``repeat``.

    Args:
      model_fn, client_optimizer_fn, server_optimizer_fn, loss, input_spec, model_distributor: as for
        `tfdpfl.federated.build_dp_fed_avg`.
      l2_norm_clip: C > 0, the largest L2 norm of one example's gradient.
      noise_multiplier: the noise's standard deviation over C.
      batch_size: the expected number of examples in a step. With ``"poisson"``, a client with fewer takes all of them
        in each step; with ``"batches"``, give what the data sets are batched by.
      sampling: ``"poisson"`` (each step takes every example with probability batch_size / n, which amplifies privacy)
        or ``"batches"`` (the data set's batches in its order). Either puts the client's examples in memory.
      local_steps: steps of one participation, for ``"poisson"``.
      local_epochs: passes over the data in one participation, for ``"batches"``; 1 if left out.
      client_clip, client_noise_multiplier: client-level DP on top, as ``l2_norm_clip`` and ``noise_multiplier``
        of `tfdpfl.federated.build_dp_fed_avg`; then give ``clients_per_round`` too.
      clients_per_round: the denominator for client-level DP. Without it, the mean over the clients that came.
      model_aggregator: TFF's, weighted or not, instead of the mean: a client's update is private already, so nothing
        is lost by it. Not with client-level DP.

    Returns:
      A process whose ``privacy`` is an `ExampleLevel` (its ``price_by_client`` is the ledger of each client) and, with
      client-level noise, a `ClientLevel`.

    Raises:
      PrivacyError: batch normalization, or a model whose loss couples examples.
      ValueError, TypeError: other bad arguments.
    """
    clip = _checks.real("l2_norm_clip", l2_norm_clip, "it bounds one example's gradient; 1.0 is usual", above=0)
    remedy = "give the standard deviation of the noise divided by l2_norm_clip (0 for none)"
    z = _checks.real("noise_multiplier", noise_multiplier, remedy, at_least=0)
    size = _checks.whole("batch_size", batch_size, 1, "count the examples of a step")
    sampling = _checks.choice("sampling", sampling, (POISSON.name, "batches"))
    if sampling == POISSON.name:
        if local_epochs is not None:
            raise ValueError("local_epochs goes with sampling='batches'. Give local_steps.")
        local_steps = _checks.whole("local_steps", local_steps, 1, "count the steps of one participation")
    else:
        if local_steps is not None:
            raise ValueError("local_steps goes with sampling='poisson'. Give local_epochs.")
        passes = 1 if local_epochs is None else local_epochs
        local_epochs = _checks.whole("local_epochs", passes, 1, "count the passes over the client's data")
    aggregator, settings = _aggregator(client_clip, client_noise_multiplier, clients_per_round, model_aggregator)
    client_optimizer = optimizer("client_optimizer_fn", client_optimizer_fn, CLIENT_RATES)
    make = models.variable_model_fn(model_fn, loss, input_spec)
    step = _Step(client_optimizer, clip, z, size)
    at_client = _poisson(step, size, local_steps) if local_steps is not None else _batches(step, local_epochs or 1)
    runtime.ensure_default()
    process = compose(
        make, client_work_of(make, at_client), aggregator,
        optimizer("server_optimizer_fn", server_optimizer_fn, SERVER_RATES), model_distributor,
    )  # fmt: skip
    of_examples = ExampleLevel(
        noise_multiplier=z, sampling=sampling, batch_size=size, local_steps=local_steps, local_epochs=local_epochs
    )
    on_top = [] if settings is None else [ClientLevel(noise_multiplier=settings.total)]
    return processes.promising(process, of_examples, *on_top, settings=settings)


def _aggregator(
    clip: float | AdaptiveClip | None, noise_multiplier: float, clients_per_round: float | None, given: Computation
) -> tuple[Computation, processes._Settings | None]:
    if clip is None:
        if noise_multiplier:
            raise ValueError(f"client_noise_multiplier={noise_multiplier!r} needs client_clip. Give the clip.")
        return given or tff.aggregators.UnweightedMeanFactory(), None
    if given is not None:
        raise ValueError("model_aggregator would replace the clip and the noise of client-level DP. Leave one out.")
    if clients_per_round is None:
        raise ValueError("clients_per_round=None: client-level DP divides by a fixed number of clients. Give it.")
    settings = processes._Settings(clients_per_round, noise_multiplier, clip, None)
    return aggregators.clipped_mean(settings.clip, settings.noise_multiplier, settings.clients_per_round), settings


class _Step:
    """One update of a client's model from one batch."""

    def __init__(
        self, client_optimizer: tff.learning.optimizers.Optimizer, clip: float, noise_multiplier: float, batch_size: int
    ):
        self._optimizer, self._clip, self._batch_size = client_optimizer, clip, batch_size
        self._stddev = clip * noise_multiplier
        self._secret = aggregators.Secret()

    def start(self, weights: list) -> tuple[State, tf.Tensor]:
        """The optimizer's state, and the key for all of a participation's noise."""
        return models.begin(self._optimizer, weights), self._secret.fresh_key()

    def sums(self, model: Model, weights: list, batch: Arrays) -> list[tf.Tensor]:
        """Clipped gradients summed over the batch, and the regularizers' gradients."""
        found = clipped_gradients(loss_of(model, batch), weights, self._clip)
        parts = zip([*found.sum, *found.regularization], [*weights, *weights], strict=True)
        return [tf.zeros(w.shape, w.dtype) if part is None else part for part, w in parts]

    def apply(self, weights: list, sums: list[tf.Tensor], state: State, key: tf.Tensor, number: tf.Tensor) -> State:
        """Adds the noise of step ``number``, assigns the new weights, and returns the optimizer's new state."""
        clipped, regularization = sums[: len(weights)], sums[len(weights) :]
        if self._stddev > 0:
            normals = noise.gaussian([w.shape for w in weights], self._stddev, key, number)
            clipped = [c + tf.cast(n, c.dtype) for c, n in zip(clipped, normals, strict=True)]
        gradients = [c / self._batch_size + r for c, r in zip(clipped, regularization, strict=True)]
        return models.step(self._optimizer, state, weights, gradients)


def _batches(step: _Step, epochs: int) -> Callable[[Model, list, Dataset], None]:
    def train(model: Model, weights: list, dataset: tf.data.Dataset) -> None:
        state, key = step.start(weights)
        sums_of = tf.function(lambda batch: step.sums(model, weights, batch))
        sizes = _sizes(dataset)
        ends = tf.cumsum(sizes)
        batches = tf.size(sizes, tf.int64)
        if batches > 0:
            examples = _in_memory(dataset)
            for number in tf.range(epochs * batches):
                at = number % batches
                chosen = tf.range(ends[at] - sizes[at], ends[at])
                sums = sums_of(tf.nest.map_structure(functools.partial(_rows, chosen), examples))
                state = step.apply(weights, sums, state, key, number)

    return train


def _poisson(step: _Step, batch_size: int, steps: int) -> Callable[[Model, list, Dataset], None]:
    coins = aggregators.Secret()

    def train(model: Model, weights: list, dataset: tf.data.Dataset) -> None:
        state, key = step.start(weights)
        # The engine takes a batch for what comes in as an argument.
        sums_of = tf.function(lambda batch: step.sums(model, weights, batch))
        size = tf.reduce_sum(_sizes(dataset))
        rate = tf.cast(batch_size, tf.float64) / tf.cast(tf.maximum(size, 1), tf.float64)
        seed = coins.fresh_key()
        if size > 0:
            examples = _in_memory(dataset)
            for number in tf.range(steps, dtype=tf.int64):
                uniform = tf.random.stateless_uniform([size], seed + tf.stack([0, number]), dtype=tf.float64)
                chosen = tf.where(uniform < rate)[:, 0]
                sums = [tf.zeros(w.shape, w.dtype) for w in [*weights, *weights]]
                if tf.size(chosen) > 0:
                    sums = sums_of(tf.nest.map_structure(functools.partial(_rows, chosen), examples))
                state = step.apply(weights, sums, state, key, number)

    return train


# A loop over rows in memory takes a third of the time of one over a tf.data pipeline inside TFF's runtime.
_ALL = np.iinfo(np.int32).max


def _sizes(dataset: tf.data.Dataset) -> tf.Tensor:
    """The number of examples of each batch, int64 [batches]."""
    return dataset.reduce(tf.zeros([0], tf.int64), _with_size)


def _with_size(sizes: tf.Tensor, batch: Arrays) -> tf.Tensor:
    return tf.concat([sizes, tf.shape(tf.nest.flatten(batch)[0], out_type=tf.int64)[:1]], 0)


def _in_memory(dataset: tf.data.Dataset) -> Nest:
    """All examples of a data set that has any, along the first axis."""
    return dataset.unbatch().batch(_ALL).get_single_element()


def _rows(chosen: tf.Tensor, leaf: tf.Tensor) -> tf.Tensor:
    return tf.gather(leaf, chosen)
