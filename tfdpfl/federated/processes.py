"""Federated processes whose released models protect whole clients. Each is a `tff.learning.templates.LearningProcess`.

Every ``build_*`` returns a process that TFF's own scripts run unchanged, with ``process.privacy``, a tuple of
`Guarantee` that price what ran. ``noise_multiplier`` is always the noise's standard deviation over the clip. The sum
of clipped updates is always divided by the given ``clients_per_round``, whoever came. A round of few clients, or
of none, is as private as any. A client whose update is not finite counts as zeros.

Training metrics are sums over clients without noise in TFF, so they are left out; `NoisedMetrics` asks for private
ones, which are charged.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

from tfdpfl._names import accept_old_names
from tfdpfl.accounting import _checks
from tfdpfl.accounting.arguments import shows_arguments
from tfdpfl.errors import PrivacyError
from tfdpfl.federated import aggregators, runtime
from tfdpfl.federated._tff import tff
from tfdpfl.federated.clip import UPDATE_NORM, AdaptiveClip, NoisedMetrics, combined
from tfdpfl.federated.guarantees import ClientLevel, DistributedLevel, LocalLevel, TreeLevel
from tfdpfl.federated.models import (
    CLIENT_RATES,
    SERVER_RATES,
    Loss,
    MetricsFn,
    ModelFn,
    Optimizer,
    Spec,
    optimizer,
    reconstruction_model_fn,
    trainable_model_fn,
)
from tfdpfl.federated.privacy import Guarantee

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "build_distributed_dp_fed_avg",
    "build_dp_fed_avg",
    "build_dp_fed_recon",
    "build_dp_fed_sgd",
    "build_dp_ftrl",
    "build_local_dp_fed_avg",
    "promising",
]


class Averaging(TypedDict, total=False):
    """The arguments of TFF's federated averaging, and those of a Keras model."""

    loss: Loss | None
    input_spec: Spec | None
    client_weighting: tff.learning.ClientWeighting | None
    model_aggregator: tff.aggregators.AggregationFactory | None
    metrics_aggregator: Callable | None
    model_distributor: tff.templates.MeasuredProcess | None
    loop_implementation: tff.learning.LoopImplementation | None


class MeasuredAveraging(Averaging, total=False):
    """The same with metrics of a Keras model."""

    metrics_fn: MetricsFn | None


@accept_old_names(clip="l2_norm_clip")
@shows_arguments(MeasuredAveraging)
def build_dp_fed_avg(
    model_fn: ModelFn,
    *,
    clients_per_round: float,
    noise_multiplier: float,
    l2_norm_clip: float | AdaptiveClip | None = None,
    client_optimizer_fn: Optimizer,
    server_optimizer_fn: Optimizer = "sgd",
    proximal_strength: float = 0.0,
    metrics: NoisedMetrics | None = None,
    **averaging: Unpack[MeasuredAveraging],
) -> tff.learning.templates.LearningProcess:
    """Federated averaging where each client's update is clipped and the server adds Gaussian noise (McMahan et al.
    2018, arXiv:1710.06963).

    Args:
      model_fn: makes a new uncompiled Keras model (give ``loss`` and ``input_spec`` too) or a new
        `tff.learning.models.VariableModel` in every call; or is a `tff.learning.models.FunctionalModel`.
      clients_per_round: the expected size of a cohort, and the denominator.
      noise_multiplier: of all that a round releases about clients' updates, the adaptive clip's count included; 0 for
        no noise and no privacy.
      l2_norm_clip: C > 0, the largest L2 norm of a client's update; or `AdaptiveClip` (the default).
      client_optimizer_fn: a TFF optimizer, or "sgd", "momentum", "adam" or "yogi" at a usual learning rate.
      server_optimizer_fn: the same; "sgd" has a learning rate of 1, which is plain averaging.
      proximal_strength: above 0, FedProx: pulls each client's weights towards the server's (arXiv:1812.06127).
      metrics: `NoisedMetrics` to be told how training goes.
      loss, input_spec, metrics_fn: of a Keras model.
      client_weighting, model_aggregator, metrics_aggregator: TFF's; only what keeps the guarantee is accepted.
      model_distributor, loop_implementation: TFF's.

    Returns:
      A process whose ``privacy`` is one `ClientLevel`.

    Raises:
      PrivacyError: weighting by examples, an aggregator of one's own, exact metrics, batch normalization.
      ValueError, TypeError: other bad arguments.
    """
    settings = _Settings(clients_per_round, noise_multiplier, l2_norm_clip, metrics)
    process = _fed_avg(
        model_fn, settings.clipped_mean(), settings, client_optimizer_fn, server_optimizer_fn,
        proximal_strength=proximal_strength, **averaging,
    )  # fmt: skip
    return promising(process, ClientLevel(noise_multiplier=settings.total), settings=settings)


@accept_old_names(clip="l2_norm_clip")
def build_dp_fed_sgd(
    model_fn: ModelFn,
    *,
    clients_per_round: float,
    noise_multiplier: float,
    l2_norm_clip: float | AdaptiveClip | None = None,
    server_optimizer_fn: Optimizer | float = 0.1,
    metrics: NoisedMetrics | None = None,
    loss: Loss | None = None,
    input_spec: Spec | None = None,
    metrics_fn: MetricsFn | None = None,
    model_distributor: tff.templates.MeasuredProcess | None = None,
) -> tff.learning.templates.LearningProcess:
    """Federated SGD: each client sends its mean gradient, clipped, and the server adds noise and takes the step.

    Arguments as for `build_dp_fed_avg`; ``server_optimizer_fn`` may be a learning rate. Clients count alike, whatever
    their number of examples.
    """
    settings = _Settings(clients_per_round, noise_multiplier, l2_norm_clip, metrics)
    aggregator = settings.clipped_mean()
    if isinstance(server_optimizer_fn, numbers.Real):
        server_optimizer_fn = tff.learning.optimizers.build_sgdm(float(server_optimizer_fn))
    runtime.ensure_default()
    process = tff.learning.algorithms.build_fed_sgd(
        trainable_model_fn(model_fn, loss, input_spec, metrics_fn),
        server_optimizer_fn=optimizer("server_optimizer_fn", server_optimizer_fn, SERVER_RATES),
        model_distributor=model_distributor,
        model_aggregator=tff.aggregators.as_weighted_aggregator(aggregator),
        metrics_aggregator=settings.metrics_aggregator,
    )
    return promising(process, ClientLevel(noise_multiplier=settings.total), settings=settings)


@accept_old_names(clip="l2_norm_clip")
def build_dp_fed_recon(
    model_fn: ModelFn,
    *,
    local_layers: Sequence[str] = (),
    clients_per_round: float,
    noise_multiplier: float,
    l2_norm_clip: float | AdaptiveClip | None = None,
    client_optimizer_fn: Optimizer,
    reconstruction_optimizer_fn: Optimizer = "sgd",
    server_optimizer_fn: Optimizer = "sgd",
    dataset_split_fn: Callable | None = None,
    metrics: NoisedMetrics | None = None,
    loss: Loss,
    input_spec: Spec | None = None,
    metrics_fn: MetricsFn | None = None,
    client_weighting: tff.learning.ClientWeighting | None = None,
    model_aggregator: tff.aggregators.AggregationFactory | None = None,
    metrics_aggregator: Callable | None = None,
    model_distributor: tff.templates.MeasuredProcess | None = None,
) -> tff.learning.templates.LearningProcess:
    """Federated reconstruction, personalised learning with DP. Some variables are local: each client trains them anew
    in every round, and never sends them. The others are global, and clients' updates of them are clipped, summed and
    given noise (Singhal et al. 2021, arXiv:2102.03448).

    A client first trains its local variables on one part of its data, with the global ones as they came. Then it trains
    the global ones on the other. Only the global variables are released; a client that uses them trains local
    ones of its own (`tff.learning.algorithms.build_fed_recon_eval` measures how well that goes, without privacy).

    Args:
      model_fn: makes a new uncompiled Keras model (give ``local_layers`` and ``input_spec`` too; TFF leaves its
        regularizers out) or a new `tff.learning.models.ReconstructionModel` in every call.
      local_layers: names of the Keras model's layers whose variables stay with the client.
      reconstruction_optimizer_fn: of the local variables; as ``client_optimizer_fn``, which is of the global ones.
      dataset_split_fn: from a client's data set, the two to train on, one after the other. TFF's default takes every
        other batch, so that a client of one batch sends zeros:
        `tff.learning.models.ReconstructionModel.build_dataset_split_fn` makes others.
      loss, metrics_fn: of either kind of model.
      The others: as for `build_dp_fed_avg`.

    Returns:
      A process whose ``privacy`` is one `ClientLevel`.

    Raises:
      PrivacyError: weighting by examples, an aggregator of one's own, exact metrics, batch normalization.
      ValueError, TypeError: other bad arguments.
    """
    settings = _Settings(clients_per_round, noise_multiplier, l2_norm_clip, metrics)
    _refuse_leaks(client_weighting, model_aggregator, metrics_aggregator)
    runtime.ensure_default()
    process = tff.learning.algorithms.build_fed_recon(
        reconstruction_model_fn(model_fn, local_layers, loss, input_spec),
        loss_fn=lambda: loss,
        metrics_fn=metrics_fn,
        server_optimizer_fn=optimizer("server_optimizer_fn", server_optimizer_fn, SERVER_RATES),
        client_optimizer_fn=optimizer("client_optimizer_fn", client_optimizer_fn, CLIENT_RATES),
        reconstruction_optimizer_fn=optimizer("reconstruction_optimizer_fn", reconstruction_optimizer_fn, CLIENT_RATES),
        dataset_split_fn=dataset_split_fn,
        client_weighting=tff.learning.ClientWeighting.UNIFORM,
        model_distributor=model_distributor,
        model_aggregator_factory=settings.clipped_mean(),
        metrics_aggregator=settings.metrics_aggregator,
    )
    return promising(process, ClientLevel(noise_multiplier=settings.total), settings=settings)


@accept_old_names(clip="l2_norm_clip")
@shows_arguments(MeasuredAveraging)
def build_dp_ftrl(
    model_fn: ModelFn,
    *,
    clients_per_round: float,
    noise_multiplier: float,
    l2_norm_clip: float,
    restart_every: int | None = None,
    client_optimizer_fn: Optimizer,
    server_optimizer_fn: Optimizer = "momentum",
    metrics: NoisedMetrics | None = None,
    **averaging: Unpack[MeasuredAveraging],
) -> tff.learning.templates.LearningProcess:
    """DP-FTRL: noise is tree-aggregated, so that running sums of updates carry little of it, and no sampling is assumed
    (Kairouz et al. 2021, arXiv:2103.00039). The sampler must limit participation: `BoundedParticipationSampler`.

    The server's optimizer should be linear in the updates (SGD with or without momentum), so that what it applies is a
    running sum.

    Args:
      noise_multiplier: standard deviation of the noise of a node of the tree, over the clip.
      l2_norm_clip: C > 0, the largest L2 norm of a client's update.
      restart_every: rounds after which a new tree starts; None for 4096. A restart at the end of each epoch suits
        clients that take part once an epoch. After t rounds of a tree the state holds a copy of the model for each 1
        in t's binary digits. This takes the server about 5 ms a round and copy for 50,000 weights.
      The others: as for `build_dp_fed_avg`.

    Returns:
      A process whose ``privacy`` is one `TreeLevel`.
    """
    restart_every = _checks.optional(
        _checks.whole, "restart_every", restart_every, 1, "count the rounds of a tree, or leave it out"
    )
    if isinstance(l2_norm_clip, AdaptiveClip):
        raise ValueError(
            "l2_norm_clip must be a number for DP-FTRL: the noise of a tree is set by one clip for all its rounds."
        )
    if metrics is not None:
        raise ValueError("Metrics are not priced together with tree noise. Evaluate on data of the server's instead.")
    clip = _fixed(l2_norm_clip)
    settings = _Settings(clients_per_round, noise_multiplier, clip, None)
    aggregator = aggregators.TreeMean(
        clip, settings.noise_multiplier, settings.clients_per_round, restart_every or _LONGEST_TREE
    )
    process = _fed_avg(model_fn, aggregator, settings, client_optimizer_fn, server_optimizer_fn, **averaging)
    level = TreeLevel(noise_multiplier=settings.noise_multiplier, restart_every=restart_every or _LONGEST_TREE)
    return promising(process, level, settings=settings)


@accept_old_names(clip="l2_norm_clip")
@shows_arguments(Averaging)
def build_local_dp_fed_avg(
    model_fn: ModelFn,
    *,
    clients_per_round: float,
    noise_multiplier: float,
    l2_norm_clip: float,
    client_optimizer_fn: Optimizer,
    server_optimizer_fn: Optimizer = "sgd",
    **averaging: Unpack[Averaging],
) -> tff.learning.templates.LearningProcess:
    """Federated averaging where each client clips its update and adds Gaussian noise before it leaves. This is private
    against the server, too, at the price of the root of the number of clients in noise.

    Args:
      noise_multiplier: standard deviation of each client's noise, over the clip.
      l2_norm_clip: C > 0, the largest L2 norm of a client's update before noise.
      The others: as for `build_dp_fed_avg`. There are no training metrics: a client would have to send them.

    Returns:
      A process whose ``privacy`` is one `LocalLevel`, for an update replaced by any other.
    """
    clip = _fixed(l2_norm_clip)
    settings = _Settings(clients_per_round, noise_multiplier, clip, None)
    aggregator = aggregators.locally_noised_mean(clip, settings.noise_multiplier, settings.clients_per_round)
    process = _fed_avg(model_fn, aggregator, settings, client_optimizer_fn, server_optimizer_fn, **averaging)
    return promising(process, LocalLevel(noise_multiplier=settings.noise_multiplier), settings=settings)


@accept_old_names(clip="l2_norm_clip")
@shows_arguments(Averaging)
def build_distributed_dp_fed_avg(
    model_fn: ModelFn,
    *,
    clients_per_round: int,
    noise_multiplier: float,
    l2_norm_clip: float,
    bits: int = 20,
    client_optimizer_fn: Optimizer,
    server_optimizer_fn: Optimizer = "sgd",
    **averaging: Unpack[Averaging],
) -> tff.learning.templates.LearningProcess:
    """Federated averaging under secure aggregation: clients round their updates to integers and add shares of Skellam
    noise. So the server sees only noisy sums modulo 2^bits (Agarwal et al. 2021, arXiv:2110.04995).

    In a simulation the secure sum is TFF's stand-in for a protocol: the guarantee is for a server that sees sums only.

    It costs each client two Poisson draws a weight, the number of weights rounded up to a power of two. That is 7 ms of
    one core for 50,000 weights, of 10 ms in all with rotation and rounding, however little the client trains. With 5
    small steps a client that made a round of 20 clients take 1.3 to 1.4 times a plain one.

    Args:
      clients_per_round: whole number; the noise's shares are cut for this many. Fewer clients add less noise, which the
        price of the run accounts for.
      noise_multiplier: standard deviation of the cohort's noise together, over the clip.
      l2_norm_clip: C > 0, the largest L2 norm of a client's update.
      bits: of the modulus, 1 to 22.
      The others: as for `build_dp_fed_avg`.

    Returns:
      A process whose ``privacy`` is one `DistributedLevel`.
    """
    clients_per_round = _checks.whole("clients_per_round", clients_per_round, 1, "count the clients of a cohort")
    clip = _fixed(l2_norm_clip)
    settings = _Settings(clients_per_round, noise_multiplier, clip, None)
    aggregator, parameters = aggregators.secure_mean(clip, settings.noise_multiplier, clients_per_round, bits)
    process = _fed_avg(model_fn, aggregator, settings, client_optimizer_fn, server_optimizer_fn, **averaging)
    l1, l2, stddev = parameters.bounds
    level = DistributedLevel(l1=float(l1), l2=float(l2), local_stddev=float(stddev))
    return promising(process, level, settings=settings)


def promising(
    process: tff.learning.templates.LearningProcess, *guarantees: Guarantee, settings: _Settings | None = None
) -> tff.learning.templates.LearningProcess:
    """``process``, with what it promises, `tfdpfl.federated.privacy.Guarantee`s, as ``process.privacy``; and with what
    its noise is made for as ``process.noise_settings``, where its state holds the clip or noise of a tree. Noise of
    another clip would not be what the guarantees are stated for, so a saved state goes on with the same settings alone.
    """
    process.privacy = guarantees
    process.noise_settings = {} if settings is None else settings.described()
    return process


_LONGEST_TREE = 4096


class _Settings:
    """The arguments that all processes share, checked."""

    def __init__(
        self, clients_per_round: float, noise_multiplier: float, l2_norm_clip: float | AdaptiveClip | None,
        metrics: NoisedMetrics | None,
    ):  # fmt: skip
        self.clients_per_round = _checks.real(
            "clients_per_round", clients_per_round, "give the expected size of a cohort", above=0
        )
        remedy = "give the standard deviation of the noise divided by the clip (0 for none)"
        self.noise_multiplier = _checks.real("noise_multiplier", noise_multiplier, remedy, at_least=0)
        self.clip: float | AdaptiveClip = AdaptiveClip() if l2_norm_clip is None else l2_norm_clip
        if isinstance(self.clip, AdaptiveClip):
            self.clip.split(self.noise_multiplier, self.clients_per_round)
        else:
            fix = "give the largest L2 norm of a client's update, or AdaptiveClip(...)"
            self.clip = _checks.real("l2_norm_clip", self.clip, fix, above=0)
        if metrics is not None and not isinstance(metrics, NoisedMetrics):
            raise PrivacyError(
                f"metrics must be NoisedMetrics(...) or None, got {metrics!r}: sums over clients without noise are not "
                "private. Keras metrics go into metrics_fn."
            )
        self.total, self._metrics = self.noise_multiplier, metrics
        self.metrics_aggregator = aggregators.nothing
        if metrics is not None:
            self.total = combined(self.noise_multiplier, metrics.noise_multiplier)
            self.metrics_aggregator = aggregators.noised_metrics(metrics, self.clients_per_round)

    def described(self) -> dict[str, object]:
        """By name, what the noise of a round is made for."""
        return {"clip": self.clip, "noise_multiplier": self.noise_multiplier, "metrics": self._metrics}

    def clipped_mean(self) -> tff.aggregators.UnweightedAggregationFactory:
        made = aggregators.clipped_mean(self.clip, self.noise_multiplier, self.clients_per_round)
        metrics = self._metrics
        if metrics is not None and isinstance(asked := metrics.bound, Mapping) and UPDATE_NORM in asked:
            bound, stddev = float(asked[UPDATE_NORM]), metrics.stddev(len(asked))
            made = aggregators.NormMeasured(made, bound, stddev, self.clients_per_round)
        return made


def _fed_avg(
    model_fn: ModelFn,
    aggregator: tff.aggregators.UnweightedAggregationFactory,
    settings: _Settings,
    client_optimizer_fn: Optimizer,
    server_optimizer_fn: Optimizer,
    *,
    loss: Loss | None = None,
    input_spec: Spec | None = None,
    metrics_fn: MetricsFn | None = None,
    client_weighting: tff.learning.ClientWeighting | None = None,
    model_aggregator: tff.aggregators.AggregationFactory | None = None,
    metrics_aggregator: Callable | None = None,
    model_distributor: tff.templates.MeasuredProcess | None = None,
    loop_implementation: tff.learning.LoopImplementation | None = None,
    proximal_strength: float = 0.0,
) -> tff.learning.templates.LearningProcess:
    _refuse_leaks(client_weighting, model_aggregator, metrics_aggregator)
    runtime.ensure_default()
    proximal_strength = _checks.real("proximal_strength", proximal_strength, "0 is FedAvg", at_least=0)
    more: dict[str, object] = {} if loop_implementation is None else {"loop_implementation": loop_implementation}
    build = tff.learning.algorithms.build_unweighted_fed_avg
    if proximal_strength > 0:
        build = tff.learning.algorithms.build_unweighted_fed_prox
        more["proximal_strength"] = proximal_strength
    return build(
        trainable_model_fn(model_fn, loss, input_spec, metrics_fn),
        client_optimizer_fn=optimizer("client_optimizer_fn", client_optimizer_fn, CLIENT_RATES),
        server_optimizer_fn=optimizer("server_optimizer_fn", server_optimizer_fn, SERVER_RATES),
        model_aggregator=aggregator,
        model_distributor=model_distributor,
        metrics_aggregator=settings.metrics_aggregator,
        **more,
    )


def _refuse_leaks(client_weighting: object, model_aggregator: object, metrics_aggregator: object) -> None:
    if client_weighting not in (None, tff.learning.ClientWeighting.UNIFORM):
        raise PrivacyError(
            f"client_weighting={client_weighting!r}: with a weight of its own a client's contribution is not bounded "
            "by the clip, and the sum of weights is not private. Leave it out: every client counts alike."
        )
    if model_aggregator is not None:
        raise PrivacyError("model_aggregator would replace the clip and the noise. Leave it out.")
    if metrics_aggregator is not None:
        raise PrivacyError(
            "metrics_aggregator releases sums over clients without noise. Leave it out, or ask for private metrics "
            "with metrics=NoisedMetrics(...)."
        )


def _fixed(l2_norm_clip: object) -> float:
    if not isinstance(l2_norm_clip, numbers.Real) or not math.isfinite(l2_norm_clip):
        raise ValueError(
            f"l2_norm_clip must be a number, got {l2_norm_clip!r}: only build_dp_fed_avg has an adaptive clip."
        )
    return float(l2_norm_clip)
