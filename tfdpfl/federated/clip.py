"""Bounds on a client's contribution to a round: the clip of its update, and the clips of its metrics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from tfdpfl.accounting import _checks
from tfdpfl.clips import AdaptiveClip as AdaptiveClip

__all__ = ["CONTRIBUTING", "UPDATE_NORM", "AdaptiveClip", "NoisedMetrics", "combined"]

CONTRIBUTING, UPDATE_NORM = "contributing", "update_norm"
_COUNTS = ("num_examples", "num_batches")  # what TFF adds to a model's own metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoisedMetrics:
    """Training metrics that may be looked at: each client's are clipped, and the mean gets noise that is charged.

        NoisedMetrics(noise_multiplier=3.0, bound={"loss": 6.0, "accuracy": 1.0})

    A client's value of each metric that is asked for is clipped to [0, its bound] and divided by the bound. The sums
    over clients get Gaussian noise together, so that each more costs all of them. The noise of a mean over n clients
    has a standard deviation of ``noise_multiplier * sqrt(number of metrics) * bound / n``. The mean is over the
    process's ``clients_per_round``, whoever came.

    Args:
      noise_multiplier: the noise's standard deviation over the L2 sensitivity of one client. The whole round then
        costs what one Gaussian of (z^-2 + noise_multiplier^-2)^(-1/2) does.
      bound: by the name of each metric that is asked for, the largest value that it is believed to take; nothing else
        is measured. ``"contributing"`` is the share of clients that took part with a finite update and any data; its
        bound is 1. ``"update_norm"`` is the L2 norm of a client's update, cut at its bound. With the clip as the bound,
        it is the average clipped norm. One number is the bound of all of the model's own metrics, the loss among them,
        and not of TFF's counts of examples and batches.

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
                "{'loss': 6.0}, or leave the metrics out."
            )

    def stddev(self, number: int) -> float:
        """Returns the standard deviation of the noise on sums of so many values in [0, 1], of which one client moves
        each by 1 at most."""
        return self.noise_multiplier * math.sqrt(number)

    def bounds(self, names: Sequence[str]) -> dict[str, float]:
        """Names what is measured, of a model with metrics of these names, and the bound of each.

        Raises:
          ValueError: a metric is asked for that the model does not have.
        """
        if not isinstance(self.bound, Mapping):
            return {name: float(self.bound) for name in names if name not in _COUNTS}
        unknown = [name for name in self.bound if name not in (*names, CONTRIBUTING, UPDATE_NORM)]
        if unknown:
            raise ValueError(
                f"bound names the metric {unknown[0]!r}, but the model has {', '.join(map(repr, names))}. Name one of "
                "those, or add it by metrics_fn."
            )
        return {name: float(bound) for name, bound in self.bound.items()}


def combined(*noise_multipliers: float) -> float:
    """The noise multiplier of one Gaussian that costs what several on the same client do together; 0 if one is 0."""
    if not all(noise_multipliers):
        return 0.0
    return 1 / math.sqrt(sum(z**-2 for z in noise_multipliers))
