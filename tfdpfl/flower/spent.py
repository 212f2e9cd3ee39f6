"""Prices the rounds of a server, from its settings alone: those of a strategy, or the first line of a journal.

No Flower here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from tfdpfl import _formats
from tfdpfl._lazy import dp_event
from tfdpfl._types import DpEvent, JsonValue, Promiser
from tfdpfl.accounting import PrivacyLedger, _checks
from tfdpfl.accounting.sampling import POISSON
from tfdpfl.clips import AdaptiveClip
from tfdpfl.federated.clip import NoisedMetrics
from tfdpfl.federated.guarantees import ClientLevel, CorrelatedLevel, LocalLevel, participations
from tfdpfl.federated.nbafl import NbAFLLevel
from tfdpfl.federated.privacy import Participation, RoundsRun
from tfdpfl.federated.samplers import PoissonClientSampler
from tfdpfl.flower.journal import Record
from tfdpfl.noise.strategies import KINDS

__all__ = ["Draw", "Settings", "ledger_of_uploads", "seeded_by"]

_CLASSES = (AdaptiveClip, ClientLevel, CorrelatedLevel, LocalLevel, NbAFLLevel, NoisedMetrics)


@dataclasses.dataclass(frozen=True)
class Draw:
    """States how a server chooses whom it asks in a round. Journals have its fields by these names.

    Attributes:
      sampling_rate: the probability that a client is in a round, decided by an independent coin.
      clients_per_round: in its place, a fixed number of clients.
      most, apart: with clients_per_round, limits on the rounds of a client: how many, and how far apart at least.
      given: the number of clients, as the user gave it.
    """

    sampling_rate: float | None
    clients_per_round: int | None
    most: int | None = None
    apart: int = 1
    given: int | None = None

    @property
    def bounded(self) -> bool:
        """Whether a client's rounds are limited."""
        return self.most is not None or self.apart > 1

    def check(self) -> None:
        """Checks what the user gave.

        Raises:
          ValueError: an argument is out of its range, or does not go with another.
        """
        if (self.clients_per_round is None) == (self.sampling_rate is None):
            raise ValueError(
                f"Give one of clients_per_round (got {self.clients_per_round!r}), the number that the mean is over, "
                f"and sampling_rate (got {self.sampling_rate!r}), the probability that a client is in a round."
            )
        if self.sampling_rate is not None:
            PoissonClientSampler(["a client"], self.sampling_rate)  # says what is wrong with a rate
        else:
            _checks.whole("clients_per_round", self.clients_per_round, 1, "count a round's clients")
        _checks.optional(_checks.whole, "population", self.given, self.clients_per_round or 1, "count all clients")
        _checks.whole("min_separation", self.apart, 1, "1 lets participations be adjacent")
        _checks.optional(_checks.whole, "max_participations", self.most, 1, "give the most rounds of a client, or None")
        if self.sampling_rate is not None and self.bounded:
            raise ValueError(
                f"max_participations={self.most!r}, min_separation={self.apart!r}: a coin for every client in every "
                f"round (sampling_rate={self.sampling_rate!r}) keeps to no limit. Leave them out, or give "
                "clients_per_round."
            )

    def participation(self, population: int | None) -> Participation:
        """Returns what this allows to be claimed, of so many clients."""
        clients: float = self.clients_per_round or 1
        if self.sampling_rate is not None and population is not None:
            clients = self.sampling_rate * population
        return Participation(
            sampling=POISSON.name if self.sampling_rate is not None else "bounded" if self.bounded else "none",
            population=max(population or 1, math.ceil(clients)),
            clients_per_round=clients,
            max_participations=self.most,
            min_separation=self.apart,
        )


def ledger_of_uploads(noise_multiplier: float, count: int = 1, seed: int | None = None) -> PrivacyLedger:
    """Returns what a client's noisy updates cost it. One update becomes any other, so it moves by 2 clips."""
    ledger = PrivacyLedger().add(dp_event.GaussianDpEvent(noise_multiplier / 2), count, adjacency="replace_one")
    ledger.seeded = seeded_by(seed)
    return ledger


def seeded_by(seed: int | None) -> frozenset[str]:
    """Returns what a ledger says of the noise of this seed; nothing if it is the operating system's."""
    return frozenset() if seed is None else frozenset({"tfdpfl.flower"})


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a server, as the first line of its journal describes them.

    Attributes:
      privacy: a `ClientLevel`, whose noise multiplier covers metrics of training, or a `CorrelatedLevel`, whose does
        not; or the levels of NbAFL.
      sampling: who is asked.
      train_metrics: with a `CorrelatedLevel`, the `NoisedMetrics` that are charged next to it.
      evaluations: `NoisedMetrics` is charged.
    """

    privacy: tuple[Promiser, ...]
    sampling: Draw
    train_metrics: NoisedMetrics | None = None
    evaluations: object = None

    @classmethod
    def of(cls, header: Mapping[str, JsonValue]) -> Settings:
        """Returns the settings that a header describes.

        Raises:
          ValueError: it lacks one, or describes what this release does not know.
        """
        try:
            names = "privacy", "sampling", "train_metrics", "evaluations"
            classes = (*_CLASSES, *KINDS.values())
            found = {name: _formats.restore(header.get(name), classes) for name in names}
            return cls(**{**found, "privacy": tuple(found["privacy"]), "sampling": Draw(**found["sampling"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"The settings in the first line cannot be priced ({type(error).__name__}: {error}). Ask the running "
                "strategy for epsilon, or upgrade tfdpfl."
            ) from error

    @property
    def participation(self) -> Participation:
        """States what the way to choose clients allows to be claimed."""
        return self.sampling.participation(self.sampling.given)

    def prices(self, record: Record, delta: float, accountant: str, more: int = 0) -> dict[str, tuple[str, float]]:
        """Returns {level: (adjacency, ε)} of what a journal holds; ``more`` rounds in addition, of unknown clients."""
        if any(isinstance(level, NbAFLLevel) for level in self.privacy):
            p = self.participation.unlimited()
            cohorts = [] if more else record.replied
            run = RoundsRun(rounds=len(record.charged) + more, participation=p, cohorts=cohorts)
            priced = [(level, level.price(run, delta, accountant).epsilon) for level in self.privacy]
            return {level.level: (level.adjacency, epsilon) for level, epsilon in priced}
        ledger = self.ledger(self.run(record.charged, more), record.evaluations + more)
        return {"client": ("zero_out", ledger.epsilon(delta, accountant))}

    def run(self, charged: Sequence[Sequence[str]], more: int = 0) -> RoundsRun:
        """Returns rounds of these cohorts, and ``more`` of unknown clients. Only limits are held against cohorts."""
        p = self.participation
        cohorts = charged if p.sampling == "bounded" and not more else []
        return RoundsRun(rounds=len(charged) + more, participation=p, cohorts=cohorts)

    def ledger(self, run: RoundsRun, evaluations: int = 0) -> PrivacyLedger:
        """Returns what these rounds, and so many evaluations, released for a client, as events."""

        def gaussian(z: float) -> DpEvent:
            return dp_event.GaussianDpEvent(z) if z > 0 else dp_event.NonPrivateDpEvent()

        own, rate = self.privacy[0], self.sampling.sampling_rate
        most, ledger = participations(run), PrivacyLedger()
        if isinstance(own, CorrelatedLevel):
            ledger.add(own.event(run), min(1, most), adjacency="zero_out")
            if self.train_metrics:
                ledger.add(gaussian(self.train_metrics.noise_multiplier), most, adjacency="zero_out")
        else:
            event = gaussian(own.noise_multiplier)
            if rate is not None:
                event = dp_event.PoissonSampledDpEvent(rate, event)
            ledger.add(event, most, adjacency="zero_out")
        if evaluations and isinstance(self.evaluations, NoisedMetrics):
            ledger.add(gaussian(self.evaluations.noise_multiplier), evaluations, adjacency="zero_out")
        return ledger
