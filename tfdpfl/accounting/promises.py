"""The guarantee of something that spends privacy, for `tfdpfl.reports` to compute the cost and to compose.

Each class that spends privacy has a method ``promises(delta)``, which returns a list of these. A report asks for
nothing else, so a mechanism of your own needs this method alone to be a part of a report.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tfdpfl._types import DpEvent, Promiser
from tfdpfl.accounting.pricing import Price, price
from tfdpfl.errors import PrivacyError

__all__ = ["PLANNED", "NoPromisesError", "Promise", "fixed", "of_seed", "promises_of"]

PLANNED = "planned: nothing of it has run"
_SEEDED = "its {0} is fixed, and anyone who knows it can subtract the noise: {0}=None draws a secret one"


def of_seed(is_known: bool, argument: str = "seed") -> list[str]:
    """Returns the warnings of noise from a seed that someone knows; none if it is the operating system's."""
    return [_SEEDED.format(argument)] if is_known else []


@dataclass(frozen=True, kw_only=True)
class Promise:
    """One guarantee of one mechanism: for whom, how it was obtained and what it costs.

        class Coin:
            def promises(self, delta):
                event = dp_accounting.GaussianDpEvent(3.0)
                return [Promise(kind="coin", unit="example", adjacency="zero_out", event=event)]

    Attributes:
        kind: What the mechanism is, in a word or two.
        unit: What is protected, for example "example", "user", "label" or "client"; None if that is not recorded.
        adjacency: The neighbouring relation.
        event: What ran, for an accountant; None if there is a price alone.
        price: Returns the cost at (δ, accountant), or raises `PrivacyError`; None if accountants price `event`.
        event_adjacency: The relation that the event is stated for, if that is another than `adjacency`.
        ledger: The `PrivacyLedger` behind the event. Ledgers that saw the same steps are merged, so that each step
            counts once.
        sampling: How units came into a step, in English; None if that is not recorded.
        mechanisms: What ran, a line for each mechanism.
        notes: What the figures take for granted.
        warnings: What must be read first.
        withheld: Why the figure may not be published; None if it may.
        num_units: How many units there are, to compare δ with; None if that is not known.
        part: Which part of a mechanism this is, if it makes several promises; empty for the only one.
    """

    kind: str
    unit: str | None
    adjacency: str
    event: DpEvent | None = None
    price: Callable[[float, str], Price] | None = None
    event_adjacency: str | None = None
    ledger: Promiser = None
    sampling: str | None = None
    mechanisms: Sequence[str] = ()
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    withheld: str | None = None
    num_units: int | None = None
    part: str = ""

    @property
    def priced_adjacency(self) -> str:
        """The relation that accountants price the event under."""
        return self.event_adjacency or self.adjacency

    def cost(self, delta: float, accountant: str) -> Price:
        """Returns an upper bound on ε at `delta`.

        Raises:
            PrivacyError: There is none at this δ.
        """
        if self.price is not None:
            return self.price(delta, accountant)
        event = self.event
        return price(event, delta, accountant, self.priced_adjacency)


class Promising(Protocol):
    """Whatever spends privacy."""

    def promises(self, delta: float) -> list[Promise]:
        """Returns what is guaranteed. Sentences that name a δ are about `delta`."""


class NoPromisesError(TypeError):
    """An object is nothing that spends privacy."""


@functools.singledispatch
def promises_of(what: Promiser, delta: float) -> list[Promise]:
    """Returns what an object guarantees: its own promises, or those of the ledger that it keeps.

    Raises:
        NoPromisesError: It has none of these.
    """
    asked = getattr(what, "promises", None) or getattr(getattr(what, "ledger", None), "promises", None)
    if asked is None:
        raise NoPromisesError(f"{what!r:.99} has no promises: give its class a method promises(delta)")
    return list(asked(delta))


def fixed(epsilon: float, delta: float, accountant: str) -> Callable[[float, str], Price]:
    """Returns the price of what has one (ε, δ) alone. It holds at every greater δ too."""

    def cost(at: float, _: str) -> Price:
        if at < delta:
            raise PrivacyError(f"known at delta = {delta:g} and above alone, so there is no figure at {at:g}")
        return Price(float(epsilon), accountant)

    return cost
