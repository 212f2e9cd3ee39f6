"""What bounds a client's contribution to a round: the clip of its update, and the clips of its metrics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from tfdpfl.accounting import _checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveClip:
    """A clip that follows a quantile of the clients' update norms (Andrew et al. 2021, arXiv:1905.03871).

    Every round the clip is multiplied by ``exp(-learning_rate * (b - target_quantile))``, where b is a noisy estimate
    of the fraction of clients whose update was within the clip. The noise on b is charged: the process's
    ``noise_multiplier`` is the total, and the noise on the updates is raised to make room for the count's.

    Args:
      initial: the first clip, in units of the update's L2 norm. A factor of 100 is made good in about 50 rounds.
      target_quantile: the fraction of clients that shall stay unclipped.
      learning_rate: the clip changes by a factor of at most exp(learning_rate) a round.
      clipped_count_stddev: standard deviation of the noise on the count of unclipped clients. None takes the larger of
        a twentieth of the cohort (the paper's) and the process's noise multiplier, so that the updates' noise rises by
        at most 15.5 % however small the cohort is. Half the noise multiplier or less cannot be met.

    Raises:
      ValueError: an argument is out of its range.
    """

    initial: float = 0.1
    target_quantile: float = 0.5
    learning_rate: float = 0.2
    clipped_count_stddev: float | None = None

    def __post_init__(self) -> None:
        _checks.real("initial", self.initial, "give the first clip, for instance 0.1", above=0)
        mend = "give the fraction of clients to leave unclipped; 0.5 is the median"
        _checks.probability("target_quantile", self.target_quantile, mend)
        _checks.real("learning_rate", self.learning_rate, "0.2 is usual", above=0)
        if self.clipped_count_stddev is not None:
            _checks.real("clipped_count_stddev", self.clipped_count_stddev, "leave it out for a safe value", at_least=0)

    def split(self, noise_multiplier: float, clients_per_round: float) -> tuple[float, float]:
        """(noise multiplier of the updates, standard deviation of the count) that together give ``noise_multiplier``.

        A client moves the centred count by 1/2, so z^-2 = z_updates^-2 + (2 stddev)^-2 (the paper's theorem 1).

        Raises:
          ValueError: the count's noise is too small to leave anything for the updates.
        """
        stddev = self.clipped_count_stddev
        if noise_multiplier == 0:
            return 0.0, 0.0 if stddev is None else stddev
        if stddev is None:
            stddev = max(0.05 * clients_per_round, noise_multiplier)
        if 2 * stddev <= noise_multiplier:
            raise ValueError(
                f"clipped_count_stddev={stddev:g} is at most half of noise_multiplier={noise_multiplier:g}, so the "
                "count alone would cost more than the whole round may: raise it, or leave it out for a safe value"
            )
        return (noise_multiplier**-2 - (2 * stddev) ** -2) ** -0.5, stddev

    def after(self, clip: float, noisy_count: float, clients_per_round: float) -> float:
        """The clip of the next round.

        Args:
          clip: this round's.
          noisy_count: the sum over clients of 1/2 for an update within the clip and -1/2 for another, with noise.
          clients_per_round: the fixed number of clients that the count is divided by.
        """
        within = min(1.0, max(0.0, noisy_count / clients_per_round + 0.5))
        return clip * math.exp(-self.learning_rate * (within - self.target_quantile))


CONTRIBUTING, UPDATE_NORM = "contributing", "update_norm"
_COUNTS = ("num_examples", "num_batches")  # what TFF adds to a model's own metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoisedMetrics:
    """Training metrics that may be looked at: each client's are clipped, and the mean gets noise that is charged.

        NoisedMetrics(noise_multiplier=3.0, bound={"loss": 6.0, "accuracy": 1.0})

    A client's value of each metric that is asked for is clipped to [0, its bound] and divided by the bound. The sums
    over clients get Gaussian noise together, so that each more costs all of them: the noise of a mean over n clients
    has a standard deviation of ``noise_multiplier * sqrt(number of metrics) * bound / n``. The mean is over the
    process's ``clients_per_round``, whoever came.

    Args:
      noise_multiplier: the noise's standard deviation over the L2 sensitivity of one client. The whole round then
        costs what one Gaussian of (z^-2 + noise_multiplier^-2)^(-1/2) does.
      bound: by the name of each metric that is asked for, the largest value that it is believed to take; nothing else
        is measured. ``"contributing"`` is the share of clients that took part with a finite update and any data; its
        bound is 1. ``"update_norm"`` is the L2 norm of a client's update, cut at its bound: with the clip as the bound,
        the average clipped norm. One number is the bound of all of the model's own metrics, the loss among them, and
        not of TFF's counts of examples and batches.

    Raises:
      ValueError: an argument is out of its range.
    """

    noise_multiplier: float
    bound: float | Mapping[str, float] = 1.0

    def __post_init__(self) -> None:
        _checks.real("noise_multiplier", self.noise_multiplier, "10 or more costs little", above=0)
        for bound in self.bound.values() if isinstance(self.bound, Mapping) else [self.bound]:
            _checks.real("bound", bound, "give the largest value that a metric can take", above=0)
        if isinstance(self.bound, Mapping) and (not self.bound or self.bound.get(CONTRIBUTING, 1.0) != 1):
            raise ValueError(
                f"bound={dict(self.bound)!r} must name a metric, with a bound of 1 for {CONTRIBUTING!r}: for instance "
                "{'loss': 6.0}, or leave the metrics out"
            )

    def bounds(self, names: Sequence[str]) -> dict[str, float]:
        """What is measured, of a model with metrics of these names, and the bound of each.

        Raises:
          ValueError: a metric is asked for that the model does not have.
        """
        if not isinstance(self.bound, Mapping):
            return {name: float(self.bound) for name in names if name not in _COUNTS}
        unknown = [name for name in self.bound if name not in (*names, CONTRIBUTING, UPDATE_NORM)]
        if unknown:
            raise ValueError(
                f"bound names the metric {unknown[0]!r}, but the model has {', '.join(map(repr, names))}: name one of "
                "those, or add it by metrics_fn"
            )
        return {name: float(bound) for name, bound in self.bound.items()}


def combined(*noise_multipliers: float) -> float:
    """The noise multiplier of one Gaussian that costs what several on the same client do together; 0 if one is 0."""
    if not all(noise_multipliers):
        return 0.0
    return 1 / math.sqrt(sum(z**-2 for z in noise_multipliers))
