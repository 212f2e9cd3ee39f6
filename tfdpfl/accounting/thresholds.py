"""The privacy losses of noisy counts of which only the large ones are published."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@functools.cache
def _event_type() -> Any:
    import attr
    from dp_accounting import dp_event

    @attr.s(frozen=True, auto_attribs=True)
    class ThresholdedDpEvent(dp_event.DpEvent):
        """Gaussian noise on counts, of which one that a neighbour lacks is published with a chance of `chance` at most:
        an (0, chance) mechanism next to the Gaussian one."""

        event: dp_event.DpEvent
        chance: float

        def losses(self, interval: float) -> Any:
            """Returns the privacy loss distribution, which is all that prices it."""
            from dp_accounting.pld import common
            from dp_accounting.pld import privacy_loss_distribution as distribution

            noisy = distribution.from_gaussian_mechanism(
                self.event.noise_multiplier, value_discretization_interval=interval
            )
            rare = common.DifferentialPrivacyParameters(0.0, self.chance)
            return noisy.compose(distribution.from_privacy_parameters(rare, value_discretization_interval=interval))

    return ThresholdedDpEvent


def thresholded(event: DpEvent, chance: float) -> DpEvent:
    """Returns the event of noisy counts above a threshold.

    Args:
        event: The Gaussian mechanism on the counts that both neighbours have.
        chance: Of publishing any count that only one of them has, at most.
    """
    return _event_type()(event, chance)


def event_named(name: str) -> Any:
    """Returns the type of a saved event that dp-accounting does not have, or None."""
    return _event_type() if name == "ThresholdedDpEvent" else None
