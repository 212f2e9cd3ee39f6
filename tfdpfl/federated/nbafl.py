"""NbAFL, noising before aggregation: clients clip their weights and add noise, the server adds more (Wei et al. 2020,
arXiv:1911.00222). Its formulas as published, the algorithm, and what it costs in truth.

The paper's guarantee does not hold as stated. Clipping a client's weights to C bounds what its data can change by 2C,
and not by 2C/m, m being the number of its examples. L exposures are composed with ε/L each and δ whole. And the
Gaussian mechanism's theorem needs ε < 1. So `build_nbafl` calibrates by an accountant unless asked for the paper's
formulas, and reports the paper's figure, as a claim, beside the accountant's.

The formulas need no TFF.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from tfdpfl._lazy import dp_event
from tfdpfl._types import Arrays, Computation, Dataset, DpEvent, Keywords, Loss, Model, Nest, Optimizer, State
from tfdpfl.accounting import _checks, compute_noise_multiplier
from tfdpfl.accounting.arguments import shows_arguments
from tfdpfl.accounting.pricing import Price, price
from tfdpfl.accounting.report import rounded_up
from tfdpfl.errors import PrivacyError
from tfdpfl.federated.guarantees import LocalLevel, participations
from tfdpfl.federated.privacy import Participation, RoundsRun

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "NbAFL",
    "NbAFLArguments",
    "NbAFLLevel",
    "build_nbafl",
    "calculate_c",
    "calculate_sigma_d",
    "calculate_sigma_u",
    "cohort_of",
    "noise_of",
]


class _Plan(TypedDict):
    epsilon: float
    delta: float
    l2_norm_clip: float
    num_rounds: int
    num_clients: int


class NbAFLArguments(_Plan, total=False):
    """Describes NbAFL's noise; see `build_nbafl`."""

    clients_per_round: int | None
    num_exposures: int | None
    min_dataset_size: float | None
    calibration: str


def cohort_of(plan: NbAFLArguments) -> int:
    """Returns K, how many clients of ``plan``, `noise_of`'s arguments, train in a round."""
    k = plan.get("clients_per_round")
    return plan["num_clients"] if k is None else k


def calculate_c(delta: float) -> float:
    """Returns c = √(2 ln(1.25 / δ)), the constant of the Gaussian mechanism's classic theorem, which holds for ε < 1.

    Args:
      delta: δ, in (0, 1).
    """
    delta = _checks.probability("delta", delta, "for instance 1e-5")
    return math.sqrt(2 * math.log(1.25 / delta))


def calculate_sigma_u(
    epsilon: float, delta: float, l2_norm_clip: float, num_exposures: int, min_dataset_size: float
) -> float:
    """σ_U = 2cCL / (mε), the standard deviation of each client's noise as published.

    Args:
      epsilon: ε > 0 that the paper claims for all exposures.
      delta: δ of it.
      l2_norm_clip: C > 0, the largest L2 norm of a client's weights.
      num_exposures: L, how many of a client's uploads an adversary sees.
      min_dataset_size: m, the number of examples of the smallest client.

    Raises:
      ValueError: an argument is out of its range.

    Source: arXiv:1911.00222, section III; see this module's docstring for why the claim does not hold.
    """
    epsilon, clip, exposures, m = _checked(epsilon, l2_norm_clip, num_exposures, min_dataset_size)
    return 2 * calculate_c(delta) * clip * exposures / (m * epsilon)


def calculate_sigma_d(
    epsilon: float,
    delta: float,
    l2_norm_clip: float,
    num_exposures: int,
    num_rounds: int,
    num_clients: int,
    min_dataset_size: float,
    clients_per_round: int | None = None,
) -> float:
    """The standard deviation of the server's noise on the mean, as published.

    With all N clients in every round σ_D = 2cC√(T² - L²N) / (mNε) if T > L√N, else 0. With K of them chosen a round
    σ_D = 2cC√(T²/b² - L²K) / (mKε) if T > ε/γ, else 0, where b = -(T/ε) ln(1 - N/K + (N/K) e^(-ε/T)) and
    γ = -ln(1 - K/N + (K/N) e^(-ε/(L√K))); at K = N that is the first.

    Args:
      num_rounds: T, how many aggregations are released.
      num_clients: N.
      clients_per_round: K, at most N; None for N.
      The others: as for `calculate_sigma_u`.

    Raises:
      ValueError: an argument is out of its range.

    Source: arXiv:1911.00222, theorems 1 and 5.
    """
    epsilon, clip, exposures, m = _checked(epsilon, l2_norm_clip, num_exposures, min_dataset_size)
    rounds = _checks.whole("num_rounds", num_rounds, 1, "count the aggregations that are released")
    n, k = _population(num_clients, clients_per_round)
    gamma = _log_mixed(k / n, epsilon / (exposures * math.sqrt(k)))
    if rounds <= epsilon / gamma:
        return 0.0
    b = rounds / epsilon * _log_mixed(n / k, epsilon / rounds)
    return 2 * calculate_c(delta) * clip * math.sqrt(max(0.0, (rounds / b) ** 2 - exposures**2 * k)) / (m * k * epsilon)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NbAFLLevel:
    """Bounds what the released models reveal of one client to anyone who sees no upload. The clients' noise and the
    server's together hide whose weights, of norm at most ``clip``, were in the mean.

    Attributes:
      clip: C.
      sigma_u, sigma_d: standard deviations, of each client's noise and of the server's on the mean.
      clients_per_round: K, the mean's denominator.
      level, adjacency: what is protected, and the neighbouring relation.
    """

    clip: float
    sigma_u: float
    sigma_d: float
    clients_per_round: int
    level: str = "client"
    adjacency: str = "replace_one"

    def price(self, run: RoundsRun, delta: float, accountant: str = "pld") -> Price:
        """An upper bound on ε for the rounds that ran: one client's data are any other.

        Cohorts of fixed size are priced with their amplification where that helps, and no other sampling is relied
        upon. A small cohort adds little noise; cohorts that are not recorded count as of one client.
        """
        sizes = [max(1, size) for size in run.sizes()] or [1] * run.rounds
        return self._price(run, sizes, delta, accountant)

    def planned_price(self, run: RoundsRun, delta: float, accountant: str = "pld") -> Price:
        """The same before anything ran, where all of ``clients_per_round`` will come."""
        return self._price(run, [self.clients_per_round] * run.rounds, delta, accountant)

    def _price(self, run: RoundsRun, sizes: Sequence[int], delta: float, accountant: str) -> Price:
        most = participations(run)
        if most == 0:
            return price(dp_event.NoOpDpEvent(), delta, accountant, self.adjacency)
        variances = Counter(sorted(size * self.sigma_u**2 + self._server_variance for size in sizes)[:most])
        if 0 in variances:
            return price(dp_event.NonPrivateDpEvent(), delta, accountant, self.adjacency)
        steps = {dp_event.GaussianDpEvent(math.sqrt(v) / (2 * self.clip)): count for v, count in variances.items()}
        found = [_price(steps, delta, accountant)]
        p = run.participation
        if p.scheme.limits_batches:
            found.append(_price({p.sampled(step): count for step, count in steps.items()}, delta, accountant))
        return min(found)

    @property
    def _server_variance(self) -> float:
        return (self.clients_per_round * self.sigma_d) ** 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class NbAFL:
    """The noise of a process, and what it is worth: ``process.nbafl``.

    Attributes:
      calibration: ``"sound"`` or ``"published"``.
      sigma_u, sigma_d: standard deviations, of each client's noise and of the server's on the mean.
      claimed_epsilon: what the paper's formula for σ_U makes of it; a claim, not a bound. None without a smallest data
        set's size.
      upload_epsilon: proven for the ``num_exposures`` uploads of a client that are seen.
      release_epsilon: proven for the ``num_rounds`` released models, with whole cohorts, drawn at a fixed size.
      delta: δ of all three.
    """

    calibration: str
    sigma_u: float
    sigma_d: float
    claimed_epsilon: float | None
    upload_epsilon: float
    release_epsilon: float
    delta: float

    def __str__(self) -> str:
        claim = "nothing" if self.claimed_epsilon is None else f"epsilon = {self.claimed_epsilon:.4g}"
        return (
            f"sigma_u = {self.sigma_u:.4g}, sigma_d = {self.sigma_d:.4g} ({self.calibration} calibration), "
            f"delta = {self.delta:g}\n  claimed by NbAFL: {claim}\n"
            f"  by the accountant: uploads epsilon = {rounded_up(self.upload_epsilon)}, "
            f"released models epsilon = {rounded_up(self.release_epsilon)} (adjacency replace_one)"
        )


def noise_of(
    *,
    epsilon: float,
    delta: float,
    l2_norm_clip: float,
    num_rounds: int,
    num_clients: int,
    clients_per_round: int | None = None,
    num_exposures: int | None = None,
    min_dataset_size: float | None = None,
    calibration: str = "sound",
) -> NbAFL:
    """σ_u and σ_d for a plan, and what they are worth. Arguments and errors are those of `build_nbafl`."""
    calibration = _checks.choice("calibration", calibration, ("sound", "published"))
    rounds = _checks.whole("num_rounds", num_rounds, 1, "count the aggregations that are released")
    exposures = rounds if num_exposures is None else num_exposures
    m = math.inf if min_dataset_size is None and calibration == "sound" else min_dataset_size
    epsilon, clip, exposures, m = _checked(epsilon, l2_norm_clip, exposures, m)
    if exposures > rounds:
        raise ValueError(
            f"num_exposures must be at most num_rounds={rounds}, got {exposures}: a client uploads once a round."
        )
    n, k = _population(num_clients, clients_per_round)
    if calibration == "published":
        sigma_u = calculate_sigma_u(epsilon, delta, clip, exposures, m)
        sigma_d = calculate_sigma_d(epsilon, delta, clip, exposures, rounds, n, m, k)
    else:
        target: Keywords = dict(target_epsilon=epsilon, delta=delta)
        # Each upload is a Gaussian mechanism of sensitivity 2C, and so is each sum of a cohort.
        whole: Keywords = dict(num_examples=1, batch_size=1, sampling="none", adjacency="replace_one")
        sigma_u = clip * compute_noise_multiplier(num_steps=exposures, **whole, **target)
        of_sum = compute_noise_multiplier(num_steps=rounds, **whole, **target)
        if k < n:
            chosen: Keywords = dict(num_examples=n, batch_size=k, sampling="fixed_size", num_steps=rounds)
            of_sum = min(of_sum, compute_noise_multiplier(**chosen, **target))
        sigma_d = math.sqrt(max(0.0, (of_sum * clip) ** 2 - k * sigma_u**2)) / k
    participation = Participation(sampling="fixed_size" if k < n else "none", population=n, clients_per_round=k)
    released = NbAFLLevel(clip=clip, sigma_u=sigma_u, sigma_d=sigma_d, clients_per_round=k)
    seen = RoundsRun(rounds=exposures, participation=participation.unlimited())
    return NbAFL(
        calibration=calibration,
        sigma_u=sigma_u,
        sigma_d=sigma_d,
        claimed_epsilon=None if min_dataset_size is None else 2 * calculate_c(delta) * clip * exposures / (m * sigma_u),
        upload_epsilon=LocalLevel(noise_multiplier=sigma_u / clip).price(seen, delta).epsilon,
        release_epsilon=released.planned_price(RoundsRun(rounds=rounds, participation=participation), delta).epsilon,
        delta=delta,
    )


@shows_arguments(NbAFLArguments, noise_of)
def build_nbafl(
    model_fn: Computation,
    *,
    client_optimizer_fn: Optimizer = "sgd",
    loss: Loss = None,
    input_spec: Nest = None,
    model_distributor: Computation = None,
    **settings: Unpack[NbAFLArguments],
) -> Computation:
    """NbAFL as a `tff.learning.templates.LearningProcess`: each client trains, scales its weights to an L2 norm of at
    most C over all tensors, then adds Gaussian noise. The server takes the mean, and adds noise of its own.

    The mean is over ``clients_per_round``, in which a client that is missing counts with the weights it was sent.

    Args:
      model_fn, client_optimizer_fn, loss, input_spec, model_distributor: as for `tfdpfl.federated.build_dp_fed_avg`.
      epsilon: with sound calibration, the ε that neither ``num_exposures`` uploads of a client nor ``num_rounds``
        released models pass.
      delta: δ of it.
      l2_norm_clip: C > 0, the largest L2 norm of a client's weights.
      num_rounds: T, rounds planned.
      num_clients: N.
      clients_per_round: K, drawn by a `FixedSizeClientSampler`; None for all N.
      num_exposures: L, how many of a client's uploads an adversary sees. None for all, as a curious server does, which
        leaves the server no noise to add.
      min_dataset_size: m, of the smallest client; the published calibration needs it.
      calibration: ``"sound"``, by an accountant; or ``"published"``, by the paper's formulas, which promise too much.

    Returns:
      A process whose ``privacy`` is a `LocalLevel`, which prices every upload, and an `NbAFLLevel`. Its
      ``nbafl`` says how much noise there is, what the paper claims for it, and what is proven.

    Raises:
      ValueError: an argument is out of its range, or there is no noise that meets ε.
      PrivacyError: batch normalization.
    """
    plan, k = noise_of(**settings), cohort_of(settings)
    import tensorflow as tf

    from tfdpfl.federated import aggregators, models, processes, runtime
    from tfdpfl.federated._tff import client_work_of, compose, loss_of, tff, tfp

    clip = float(settings["l2_norm_clip"])
    client_optimizer = models.optimizer("client_optimizer_fn", client_optimizer_fn, models.CLIENT_RATES)
    make = models.variable_model_fn(model_fn, loss, input_spec)
    secret = aggregators.Secret()

    def at_client(model: Model, weights: list, dataset: Dataset) -> None:
        def step(state: State, batch: Arrays) -> State:
            with tf.GradientTape() as tape:
                value = loss_of(model, batch)
            gradients = tape.gradient(value, weights, unconnected_gradients="zero")
            return models.step(client_optimizer, state, weights, gradients)

        dataset.reduce(models.begin(client_optimizer, weights), step)
        clipped, _ = aggregators.clip_by_norm([tf.convert_to_tensor(w) for w in weights], clip)
        for weight, value, normal in zip(weights, clipped, secret.gaussian_like(clipped, plan.sigma_u), strict=True):
            weight.assign(value + normal)

    # The sum is clipped to nothing here: what bounds it is the clip of the weights.
    at_server = aggregators.ClippedSum(math.inf, k * plan.sigma_d, aggregators.Secret())
    runtime.ensure_default()
    process = compose(
        make,
        client_work_of(make, at_client),
        tff.aggregators.DifferentiallyPrivateFactory(tfp.NormalizedQuery(at_server, denominator=float(k))),
        tff.learning.optimizers.build_sgdm(1.0),
        model_distributor,
    )
    process.nbafl = plan
    return processes.promising(
        process,
        LocalLevel(noise_multiplier=plan.sigma_u / clip),
        NbAFLLevel(clip=clip, sigma_u=plan.sigma_u, sigma_d=plan.sigma_d, clients_per_round=k),
    )


def _log_mixed(q: float, x: float) -> float:
    """-ln(1 - q + q e^-x), which is x at q = 1."""
    return x if q == 1 else -math.log1p(q * math.expm1(-x))


def _price(steps: dict[DpEvent, int], delta: float, accountant: str) -> Price:
    events = [dp_event.SelfComposedDpEvent(event, count) for event, count in steps.items()]
    try:
        return price(dp_event.ComposedDpEvent(events), delta, accountant, "replace_one")
    except PrivacyError:  # sampling that no accountant knows
        return Price(math.inf, accountant)


def _checked(epsilon: object, clip: object, exposures: object, m: object) -> tuple[float, float, int, float]:
    if m is None:
        raise ValueError(
            "min_dataset_size=None: the published formulas need the number of examples of the smallest client."
        )
    return (
        _checks.real("epsilon", epsilon, "give the ε to calibrate for", above=0),
        _checks.real("l2_norm_clip", clip, "give the largest L2 norm of a client's weights", above=0),
        _checks.whole("num_exposures", exposures, 1, "count the uploads that are seen"),
        m if m == math.inf else _checks.real("min_dataset_size", m, "count the smallest client's examples", above=0),
    )


def _population(num_clients: object, clients_per_round: object) -> tuple[int, int]:
    n = _checks.whole("num_clients", num_clients, 1, "count all clients")
    k = n if clients_per_round is None else clients_per_round
    k = _checks.whole("clients_per_round", k, 1, "count the clients of a round")
    if k > n:
        raise ValueError(f"clients_per_round must be at most num_clients={n}, got {k}. Take smaller rounds.")
    return n, k
