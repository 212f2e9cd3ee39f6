"""The guarantees that a federated process and a client sampler give each other, for computing ε. No TFF here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tfdpfl._types import DpEvent
from tfdpfl.accounting import _checks
from tfdpfl.accounting.pricing import Price
from tfdpfl.accounting.promises import NoPromisesError, Promise, promises_of
from tfdpfl.accounting.sampling import EVERY_BATCH, SCHEMES, SamplingScheme
from tfdpfl.errors import PrivacyError

__all__ = [
    "KNOWN_COHORTS",
    "UNITS",
    "Guarantee",
    "Participation",
    "RoundsRun",
    "check_target",
    "covered_by",
    "level_promise",
    "no_room",
    "notes_on_delta",
    "promises_of_levels",
    "within",
]

KNOWN_COHORTS = (
    "The cohorts come from a seed: sampling does not lower ε against anyone who knows it. To publish a result, draw "
    "them with seed=None."
)
UNITS = {"client": "client", "local": "client's update", "example": "example"}  # of a level
_COVERED = {
    "client": "Covered: the released models. The server and who sees single updates are trusted.",
    "local": "Covered: each update as it leaves its client, against the server too.",
    "example": "Covered: each example of a client in all that this client sends.",
}
_COHORTS = "Not covered: who took part in which round, and metrics or evaluations that were released as they are."


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

    def unlimited(self) -> Participation:
        """Returns the same clients, of whom nothing is claimed."""
        return dataclasses.replace(self, sampling="none", max_participations=None, min_separation=1)

    @property
    def scheme(self) -> SamplingScheme:
        """How clients are drawn, as an object that knows what follows from it; limits are not among this."""
        return SCHEMES.get(self.sampling, EVERY_BATCH)

    def sampled(self, step: DpEvent) -> DpEvent:
        """Returns the event of a round, given that of a round with all clients."""
        if self.clients_per_round >= self.population:
            return step
        return self.scheme.sampled(step, self.population, self.clients_per_round)

    def text(self) -> str:
        """Returns the declaration in English."""
        return f"{self.sampling}: {self.clients_per_round:g} of {self.population} clients in a round"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundsRun:
    """A training so far.

    Attributes:
      rounds: rounds whose result was released.
      again: of the rounds that were released more than once, of the same clients, how often each was.
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
    again: Sequence[int] = ()

    def sizes(self) -> list[int]:
        """How many clients each round had an update of."""
        absent = [*map(len, self.absent)] + [0] * (len(self.cohorts) - len(self.absent))
        return [len(cohort) - gone for cohort, gone in zip(self.cohorts, absent, strict=True)]


class Guarantee(Protocol):
    """One level of protection that a process gives. Processes carry theirs as ``process.privacy``, a tuple."""

    @property
    def level(self) -> str:
        """ "client", "example" or "local": the column of `History`."""

    @property
    def adjacency(self) -> str:
        """The neighbouring relation."""

    def price(self, run: RoundsRun, delta: float, accountant: str = "pld") -> Price:
        """An upper bound on ε for what ran: for the worst client, where clients differ. Infinite where nothing is
        promised; `PrivacyError` where the sampler's declaration is not one that the mechanism can be priced for."""


def check_target(target_epsilon: float | None) -> None:
    """Raises a `ValueError` unless an ε that may not be passed is above 0, or None."""
    _checks.optional(_checks.real, "target_epsilon", target_epsilon, "give the ε to stay within, or None", above=0)


def no_room(target: float | None, delta: float, cost: float) -> PrivacyError:
    """Returns what to raise where the first round would pass the target."""
    return PrivacyError(
        f"target_epsilon={target:g} at delta={delta:g} leaves no room for one round, which costs {cost:.4g}. Raise "
        "noise_multiplier, or the target."
    )


def notes_on_delta(delta: float | None, number: int | None, unit: str = "client") -> list[str]:
    """Returns a sentence on a δ that is too large for so many units; nothing on any other."""
    if delta is None or number is None or delta < 1 / number:
        return []
    return [f"delta is not below 1 / {number} {unit}s: publishing one {unit} whole could meet it"]


def within(target: float, epsilon_of: Callable[[str], float], accountant: str) -> bool:
    """Whether an ε is within a target. The quick accountant is asked first, the other one only where it says no."""
    return any(epsilon_of(name) <= target for name in dict.fromkeys(["rdp", accountant]))


def covered_by(level: str) -> list[str]:
    """Returns sentences on what a guarantee of this level covers, and what it does not."""
    return [_COVERED[level], _COHORTS]


def level_promise(guarantee: Guarantee, cost: Callable[[float, str], Price], **more: Any) -> Promise:
    """Returns what a federation guarantees at one level, at this cost."""
    level = guarantee.level
    return Promise(
        kind="federation", adjacency=guarantee.adjacency, unit=UNITS[level], price=cost, notes=covered_by(level), **more
    )


def rounds_promise(guarantee: Guarantee, run: RoundsRun, part: str = "", warnings: Sequence[str] = ()) -> Promise:
    """Returns what a federation guarantees at one level for the rounds that ran."""
    return level_promise(
        guarantee, lambda delta, accountant: guarantee.price(run, delta, accountant), part=part, warnings=warnings,
        event=guarantee.event(run) if hasattr(guarantee, "event") else None, sampling=run.participation.text(),
        mechanisms=[f"{run.rounds} rounds of {guarantee!r}"],
        num_units=run.participation.population if guarantee.level == "client" else None,
    )  # fmt: skip


def promises_of_levels(
    trainings: Mapping[str, tuple[Guarantee, RoundsRun]], lost_rounds: int = 0, seeded: bool = False
) -> list[Promise]:
    """Returns what a federation guarantees at each level.

    Args:
      trainings: what was promised, and what ran.
      lost_rounds: how many more were begun.
      seeded: whether someone knows the seed of the cohorts.

    Raises:
      ValueError: it guarantees nothing, or no round has run.
    """
    if not trainings:
        raise ValueError("This History promises no privacy, or no round has run. Leave it out.")
    lost = [f"{lost_rounds} more rounds were begun and lost"] if lost_rounds else []
    warnings = [*lost, *([KNOWN_COHORTS] if seeded else [])]
    return [
        rounds_promise(guarantee, run, f"{level} level" if len(trainings) > 1 else "", warnings)
        for level, (guarantee, run) in trainings.items()
    ]


@promises_of.register
def _promises_of_pair(pair: tuple, delta: float) -> list[Promise]:
    """Returns what a guarantee and a `RoundsRun` give together."""
    if len(pair) != 2 or not hasattr(pair[0], "price"):
        raise NoPromisesError(f"{pair!r:.99} is no pair of a guarantee and a RoundsRun")
    guarantee, run = pair
    return [rounds_promise(guarantee, run)]
