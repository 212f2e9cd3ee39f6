"""What a federated process and a client sampler promise each other, so that what ran can be priced. No TFF here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from tfdpfl.accounting.pricing import Price


@dataclasses.dataclass(frozen=True, kw_only=True)
class Participation:
    """How clients come into a round: what a sampler declares (as ``sampler.participation``) and keeps to.

    Attributes:
      sampling: ``"poisson"`` (an independent coin a client a round), ``"fixed_size"`` (a fresh uniform subset),
        ``"bounded"`` (no randomness claimed, participations limited) or ``"none"`` (nothing is claimed: a client may
        be in every round).
      population: number of clients that could be drawn.
      clients_per_round: cohort size, its expectation under Poisson sampling.
      max_participations: most rounds that a client is in, over the whole training; None without a limit.
      min_separation: fewest rounds from one participation of a client to its next; 1 where they may be adjacent.
    """

    sampling: str
    population: int
    clients_per_round: float
    max_participations: int | None = None
    min_separation: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundsRun:
    """A training so far.

    Attributes:
      rounds: rounds whose result was released.
      participation: what the sampler declared.
      cohorts: the clients of each round, in order, as they were drawn.
      num_examples: examples that each client holds, where known; the fewest, where that varied.
      absent: of each round's clients those from whom nothing came, in order; all came where it is shorter.
    """

    rounds: int
    participation: Participation
    cohorts: Sequence[Sequence[str]] = ()
    num_examples: Mapping[str, int] = dataclasses.field(default_factory=dict)
    absent: Sequence[Sequence[str]] = ()

    def sizes(self) -> list[int]:
        """How many clients each round had an update of."""
        absent = [*map(len, self.absent)] + [0] * (len(self.cohorts) - len(self.absent))
        return [len(cohort) - gone for cohort, gone in zip(self.cohorts, absent, strict=True)]


class Guarantee(Protocol):
    """One level of protection that a process gives. Processes carry theirs as ``process.privacy``, a tuple."""

    level: str  # "client", "example" or "local": the column of `History`
    adjacency: str

    def price(self, run: RoundsRun, delta: float, accountant: str = "pld") -> Price:
        """An upper bound on ε for what ran: for the worst client, where clients differ. Infinite where nothing is
        promised; `PrivacyError` where the sampler's declaration is not one that the mechanism can be priced for."""
