"""What bounds a client's contribution to a round: the clip of its update, and the clips of its metrics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from tfdpfl.accounting import _checks
from tfdpfl.clips import AdaptiveClip as AdaptiveClip


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoisedMetrics:
    """Training metrics that may be looked at: each client's are clipped, and the mean gets noise that is charged.

    A client's value of each metric is clipped to [0, bound] and divided by its bound. The sums over clients of all
    of them, and of the fraction of clients that took part with a finite update and any data (``"contributing"``),
    get Gaussian noise together.

    Args:
      noise_multiplier: the noise's standard deviation over the L2 sensitivity of one client. The whole round then
        costs what one Gaussian of (z^-2 + noise_multiplier^-2)^(-1/2) does.
      bound: the largest value of a metric, for all or by name; 1 suits accuracies, a loss needs more.

    Raises:
      ValueError: an argument is out of its range.
    """

    noise_multiplier: float
    bound: float | Mapping[str, float] = 1.0

    def __post_init__(self) -> None:
        _checks.real("noise_multiplier", self.noise_multiplier, "10 or more costs little", above=0)
        for bound in self.bound.values() if isinstance(self.bound, Mapping) else [self.bound]:
            _checks.real("bound", bound, "give the largest value that a metric can take", above=0)

    def bound_of(self, name: str) -> float:
        return float(self.bound.get(name, 1.0) if isinstance(self.bound, Mapping) else self.bound)


def combined(*noise_multipliers: float) -> float:
    """The noise multiplier of one Gaussian that costs what several on the same client do together; 0 if one is 0."""
    if not all(noise_multipliers):
        return 0.0
    return 1 / math.sqrt(sum(z**-2 for z in noise_multipliers))
