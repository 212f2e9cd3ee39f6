"""Events that dp-accounting does not have."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from tfdpfl._lazy import dp_event
from tfdpfl._types import DpEvent, PrivacyLosses
from tfdpfl.errors import PrivacyError

__all__ = ["composed", "event_named", "event_type", "gaussian_of_group", "thresholded"]

_TYPES: dict[str, Callable[[], type[DpEvent]]] = {}


def event_type(name: str, *fields: str, losses: Callable | None = None, **defaults: object) -> Callable[..., DpEvent]:
    """Returns what makes events that ledgers can save. dp-accounting is imported by the first one.

    Args:
        losses: For an event that Rényi DP cannot price: returns its privacy loss distribution on a grid of an interval.
        defaults: Of the last fields.
    """

    @functools.cache
    def made() -> type[DpEvent]:
        import attr

        base = type(name, (dp_event.DpEvent,), {} if losses is None else {"losses": losses})
        attributes = dict.fromkeys(fields, attr.ib()) | {field: attr.ib(default=v) for field, v in defaults.items()}
        return attr.make_class(name, attributes, bases=(base,), frozen=True)

    _TYPES[name] = made
    return lambda *values: made()(*values)


def composed(events: Iterable[DpEvent]) -> DpEvent:
    """Returns the event of all of these, one after the other: of one event that event itself."""
    parts = [event for event in events if not isinstance(event, dp_event.NoOpDpEvent)]
    if not parts:
        return dp_event.NoOpDpEvent()
    return parts[0] if len(parts) == 1 else dp_event.ComposedDpEvent(parts)


def event_named(name: str) -> type[DpEvent] | None:
    """Returns the type of a saved event, or None if there is none."""
    return getattr(dp_event, name, None) or _TYPES.get(name, lambda: None)()


def gaussian_of_group(event: DpEvent, number: int) -> DpEvent:
    """Returns an event of Gaussian noise, stated for one example, for neighbours that differ in so many examples.

    What is μ-GDP for one is (number · μ)-GDP for so many (Dong, Roth & Su 2019, arXiv:1905.02383, theorem 2.14), and μ
    of a Gaussian mechanism is 1/σ. No such theorem has the σ of another event in it.

    Raises:
        PrivacyError: Something else than Gaussian noise is in it.
    """
    if isinstance(event, dp_event.NoOpDpEvent | dp_event.NonPrivateDpEvent):
        return event
    if isinstance(event, dp_event.GaussianDpEvent):
        return dp_event.GaussianDpEvent(event.noise_multiplier / number)
    if isinstance(event, dp_event.SelfComposedDpEvent):
        return dp_event.SelfComposedDpEvent(gaussian_of_group(event.event, number), event.count)
    if isinstance(event, dp_event.ComposedDpEvent):
        return dp_event.ComposedDpEvent([gaussian_of_group(part, number) for part in event.events])
    raise PrivacyError(
        f"a release or a training with correlated noise ({type(event).__name__}) has no known ε for "
        f"max_examples_per_user={number}: only plain Gaussian noise has one. Leave out what is released, use "
        "fresh noise and Poisson batches for the training, or leave max_examples_per_user out"
    )


def _losses_above_threshold(event: DpEvent, interval: float) -> PrivacyLosses:
    from dp_accounting.pld import common
    from dp_accounting.pld import privacy_loss_distribution as distribution

    noisy = distribution.from_gaussian_mechanism(event.event.noise_multiplier, value_discretization_interval=interval)
    rare = common.DifferentialPrivacyParameters(0.0, event.chance)
    return noisy.compose(distribution.from_privacy_parameters(rare, value_discretization_interval=interval))


# Gaussian noise on counts, of which one that a neighbour lacks is published with a chance of `chance` at most: an
# (0, chance) mechanism next to the Gaussian one.
thresholded = event_type("ThresholdedDpEvent", "event", "chance", losses=_losses_above_threshold)
