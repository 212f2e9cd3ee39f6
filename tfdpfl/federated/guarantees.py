"""The guarantee of each federated process, and its ε for the rounds that ran. No TFF here.

All are stated for ``"zero_out"``: one client (or one example) contributes nothing in place of what it did. Everything
else, the cohorts included, stays as it is.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tfdpfl._lazy import dp_event
from tfdpfl._types import DpEvent
from tfdpfl.accounting.events import composed
from tfdpfl.accounting.participation import most_participations, tree_sensitivity
from tfdpfl.accounting.pricing import Price, check_delta, price
from tfdpfl.accounting.sampling import POISSON, SCHEMES
from tfdpfl.errors import PrivacyError
from tfdpfl.federated.privacy import Participation, RoundsRun

if TYPE_CHECKING:
    from tfdpfl.noise.strategies import Noise

__all__ = [
    "ClientLevel",
    "CohortCheck",
    "CorrelatedLevel",
    "DistributedLevel",
    "ExampleLevel",
    "LocalLevel",
    "TreeLevel",
    "check_declaration",
    "participations",
]

SAMPLINGS = (*(name for name, scheme in SCHEMES.items() if scheme.draws_cohorts), "bounded")


class _OneEvent:
    """A guarantee whose rounds are one event for an accountant."""

    adjacency: str
    noise_multiplier: float
    _recorded = False  # whether recorded cohorts bound how often a client took part

    def event(self, run: RoundsRun) -> DpEvent:
        """States what ran, for an accountant."""
        most = participations(run, recorded=self._recorded)
        if most == 0:
            return dp_event.NoOpDpEvent()
        return self._noisy_event(run, most) if self.noise_multiplier > 0 else dp_event.NonPrivateDpEvent()

    def _noisy_event(self, run: RoundsRun, most: int) -> DpEvent:
        """Returns the event of rounds in which a client took part at most so often."""
        raise NotImplementedError

    def price(self, run: RoundsRun, delta: float, accountant: str = "pld") -> Price:
        """An upper bound on ε for the rounds that ran; infinite without noise.

        Raises:
          PrivacyError: the cohorts are not what the sampler declared.
        """
        return price(self.event(run), delta, accountant, self.adjacency)


def _separation(run: RoundsRun) -> int:
    """How many rounds lie between two of a client's at least."""
    return run.participation.min_separation if run.participation.sampling == "bounded" else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientLevel(_OneEvent):
    """A clipped sum of clients' updates, with Gaussian noise from the server, in every round.

    Poisson and fixed-size cohorts are priced with their amplification, which for the latter is less (the proof is in
    docs/federated.md). Bounded participation and unknown sampling are priced without any.

    Attributes:
      noise_multiplier: of all that a round releases together, relative to one client's contribution.
      level, adjacency: what is protected, and the neighbouring relation.
    """

    noise_multiplier: float
    level: str = "client"
    adjacency: str = "zero_out"

    def _noisy_event(self, run: RoundsRun, most: int) -> DpEvent:
        def released(times: int) -> DpEvent:
            """A round whose sum was released so often, each time with noise of its own: one Gaussian of all of them."""
            return run.participation.sampled(dp_event.GaussianDpEvent(self.noise_multiplier / math.sqrt(times)))

        again = sorted(run.again)[-most:]
        once = dp_event.SelfComposedDpEvent(released(1), most - len(again))
        return composed([once, *map(released, again)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeLevel(_OneEvent):
    """Sums over all rounds so far with tree-aggregated Gaussian noise (Kairouz et al. 2021, arXiv:2103.00039).

    No sampling is relied upon, only the participation limits.

    Attributes:
      noise_multiplier: standard deviation of the noise of a tree's node, over the clip.
      restart_every: rounds in a tree; None for one tree over all rounds.
      level, adjacency: what is protected, and the neighbouring relation.
    """

    noise_multiplier: float
    restart_every: int | None = None
    level: str = "client"
    adjacency: str = "zero_out"

    def _noisy_event(self, run: RoundsRun, most: int) -> DpEvent:
        squared = tree_sensitivity(run.rounds, most, _separation(run), self.restart_every)
        squared *= max(run.again, default=1)  # a round that is released again makes its nodes again, with other noise
        # The nodes together are one Gaussian mechanism, for clients that adapt to what was released, too (Denisov et
        # al. 2022, arXiv:2202.08312).
        return dp_event.GaussianDpEvent(self.noise_multiplier / math.sqrt(squared))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrelatedLevel(_OneEvent):
    """A clipped sum of clients' updates in every round, with Gaussian noise that is correlated over the rounds.

    No sampling is relied upon, only the participation limits.

    Attributes:
      noise: `tfdpfl.noise.Tree`, `Banded`, `BandedInverse` or `BLT`.
      noise_multiplier: what the noise takes for one: see there.
      level, adjacency: what is protected, and the neighbouring relation.
    """

    noise: Noise
    noise_multiplier: float
    level: str = "client"
    adjacency: str = "zero_out"

    def event(self, run: RoundsRun) -> DpEvent:
        """Returns the event of what ran for an accountant: one mechanism for all rounds."""
        from tfdpfl.accounting.correlated import CorrelatedRun

        return CorrelatedRun(
            noise=self.noise,
            noise_multiplier=self.noise_multiplier,
            num_steps=run.rounds,
            min_separation=_separation(run),
            max_participations=participations(run),
            adjacency=self.adjacency,
        ).dp_event


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalLevel(_OneEvent):
    """Gaussian noise on each client's clipped update before it leaves the client.

    The server and every observer see each noisy update by itself, so nobody's sampling helps. The price is of the
    client that took part most: its update replaced by any other, each time.

    Attributes:
      noise_multiplier: the standard deviation over the clip.
      level, adjacency: what is protected, and the neighbouring relation.
    """

    noise_multiplier: float
    level: str = "local"
    adjacency: str = "replace_one"

    _recorded = True

    def _noisy_event(self, run: RoundsRun, most: int) -> DpEvent:
        return dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(self.noise_multiplier / 2), most)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExampleLevel:
    """DP-SGD inside each client: what a client sends protects each of its examples.

    Attributes:
      noise_multiplier: the standard deviation over the clip of one example's gradient.
      sampling: ``"poisson"``: each of ``local_steps`` steps takes every example with probability batch_size / n, n the
        client's number of examples. ``"batches"``: as the data set gives them, once in each of ``local_epochs``.
      batch_size: the expected number of examples of a step.
      local_steps: steps of a participation (poisson).
      local_epochs: passes of a participation (batches).
      level, adjacency: what is protected, and the neighbouring relation.
    """

    noise_multiplier: float
    sampling: str = POISSON.name
    batch_size: float
    local_steps: int | None = None
    local_epochs: int | None = None
    level: str = "example"
    adjacency: str = "zero_out"

    @property
    def _sampled(self) -> bool:
        return self.sampling == POISSON.name

    def price(self, run: RoundsRun, delta: float, accountant: str = "pld") -> Price:
        """An upper bound on ε for the client whose examples it is worst for. A run without cohorts counts as if a
        client with the fewest examples that it names took part in all rounds that the declaration allows.

        Raises:
          PrivacyError: Poisson steps, and the run does not say how many examples each client of its cohorts holds.
        """
        if not run.cohorts:
            fewest = min(filter(None, run.num_examples.values()), default=None)
            return self._price(participations(run), fewest, delta, accountant)
        return max(self._price(*row, delta, accountant) for row in self._worst(set(self._rows(run).values())))

    def price_by_client(self, run: RoundsRun, delta: float, accountant: str = "pld") -> dict[str, Price]:
        """The ledger: for each client that took part, an upper bound on ε for its own examples."""
        rows = self._rows(run)
        known = {row: self._price(*row, delta, accountant) for row in set(rows.values())}
        return {client: known[row] for client, row in rows.items()}

    def _rows(self, run: RoundsRun) -> dict[str, tuple[int, int | None]]:
        """How often each client gave something, and how many examples it holds, where that matters. Cohorts that are
        not as declared are refused."""
        participations(run)
        counts = Counter(client for cohort in run.cohorts for client in cohort)
        counts.subtract(client for absent in run.absent for client in absent)
        sizes = run.num_examples if self._sampled else {}
        return {client: (count, sizes.get(client)) for client, count in counts.items()}

    def _worst(self, rows: Iterable[tuple[int, int | None]]) -> list[tuple[int, int | None]]:
        """Those of ``rows`` that can have the highest price: no other has as many steps at as high a rate.

        An example that is taken at a lower rate is one that was left out by a coin before it was taken at the higher
        one, so that a step at the lower rate is a mixture of one at the higher and one without the example.
        """
        found: list[tuple[int, int | None]] = [(0, None)]
        smallest = math.inf
        # Who holds an unknown number is never left out, so that its price is refused.
        sizes = [(count, -1 if n is None else max(n, self.batch_size), n) for count, n in rows if n != 0]
        for count, size, n in sorted(sizes, key=lambda row: (-row[0], row[1])):
            if size < smallest:
                found.append((count, n))
                smallest = size
        return found

    def _price(self, count: int, num_examples: int | None, delta: float, accountant: str) -> Price:
        return price(self.event_of(count, num_examples), delta, accountant, self.adjacency)

    def events_by_client(self, run: RoundsRun) -> dict[str, DpEvent]:
        """Returns the event of each client that took part, for an accountant."""
        return {client: self.event_of(*row) for client, row in self._rows(run).items()}

    def event_of(self, count: int, num_examples: int | None) -> DpEvent:
        """``count`` participations of a client that holds so many examples, for an accountant."""
        if count == 0 or num_examples == 0:
            return dp_event.NoOpDpEvent()
        if self.noise_multiplier == 0:
            return dp_event.NonPrivateDpEvent()
        event: DpEvent = dp_event.GaussianDpEvent(self.noise_multiplier)
        if self._sampled:
            if num_examples is None:
                raise PrivacyError(
                    "The sampling rate inside a client is batch_size over its number of examples, which "
                    "RoundsRun.num_examples does not hold for every client. Give it."
                )
            if num_examples > self.batch_size:
                event = POISSON.sampled(event, num_examples, self.batch_size)
        steps = self.local_steps if self._sampled else self.local_epochs
        assert steps is not None
        return dp_event.SelfComposedDpEvent(event, count * steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedLevel:
    """Skellam noise from the clients under secure aggregation, so that the server sees only noisy sums.

    Clients add equal shares, so a cohort of half the expected size has half the variance: each round is priced for
    its own cohort. All clients are taken to add their shares honestly.

    Attributes:
      l1, l2: bounds on a client's contribution on the integer grid, after rounding.
      local_stddev: of one client's share, on the integer grid.
      level, adjacency: what is protected, and the neighbouring relation.
    """

    l1: float
    l2: float
    local_stddev: float
    level: str = "client"
    adjacency: str = "zero_out"

    def price(self, run: RoundsRun, delta: float, accountant: str = "pld") -> Price:
        """An upper bound on ε by Rényi DP, without amplification by sampling, of which this noise has no proof here.

        Raises:
          PrivacyError: the run does not hold the cohort of every round, so nobody knows how much noise there was.
        """
        delta = check_delta(delta)
        participations(run)
        if len(run.cohorts) < run.rounds:
            raise PrivacyError(
                "Noise that clients add depends on how many there were: RoundsRun.cohorts must hold every round."
            )
        if self.local_stddev == 0 and any(run.sizes()):
            return Price(math.inf, "rdp")
        rounds = [self._divergences(size) for size in run.sizes()]
        if run.participation.sampling == "bounded":
            of_client: dict[str, np.ndarray] = {}
            for cohort, divergences in zip(run.cohorts, rounds, strict=True):
                for client in cohort:
                    of_client[client] = of_client.get(client, 0.0) + divergences
            return Price(max(map(lambda found: _epsilon(found, delta), of_client.values()), default=0.0), "rdp")
        return Price(_epsilon(sum(rounds, np.zeros(len(_ORDERS))), delta), "rdp")

    def _divergences(self, size: int) -> np.ndarray:
        """The Rényi divergence at each order of a round with ``size`` clients (Agarwal et al. 2021, arXiv:2110.04995,
        theorem 3.5, which is for whole orders)."""
        if size == 0:
            return np.zeros(len(_ORDERS))
        variance = size * self.local_stddev**2
        extra = ((2 * _ORDERS - 1) * self.l2**2 + 6 * self.l1) / (4 * variance**2)
        return _ORDERS * self.l2**2 / (2 * variance) + np.minimum(extra, 3 * self.l1 / (2 * variance))


_ORDERS = np.array([*range(2, 129), *(1 << k for k in range(8, 14))], dtype=float)


def _epsilon(divergences: np.ndarray, delta: float) -> float:
    """dp-accounting's conversion, for a mechanism that it has no event for."""
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    if not divergences.any():
        return 0.0
    return float(rdp.compute_epsilon(_ORDERS, divergences, delta)[0])


def participations(run: RoundsRun, recorded: bool = False) -> int:
    """Returns the most rounds that a client can have been in.

    Args:
      run: the rounds.
      recorded: return the rounds that a client was in instead, where the cohorts are known.

    Raises:
      PrivacyError: the declaration makes no sense, or the cohorts do not keep to it.
    """
    p = run.participation
    if run.rounds < 0 or (run.cohorts and len(run.cohorts) < run.rounds):
        raise PrivacyError(f"{run.rounds} rounds ran, but {len(run.cohorts)} cohorts are recorded. Record them all.")
    check = CohortCheck(p)
    for cohort in run.cohorts:
        check.add(cohort, test=False)
    check.test()
    if recorded and run.cohorts:
        return max(check.counts.values(), default=0)
    if p.sampling != "bounded":
        return run.rounds
    return most_participations(run.rounds, p.min_separation, p.max_participations)


def check_declaration(p: Participation) -> None:
    """Checks that a sampler's declaration makes sense.

    Args:
      p: the declaration.

    Raises:
      PrivacyError: it does not.
    """
    if p.sampling not in SAMPLINGS:
        raise PrivacyError(f"sampling must be one of {', '.join(map(repr, SAMPLINGS))}, got {p.sampling!r}.")
    if not 0 < p.clients_per_round <= p.population:
        raise PrivacyError(
            f"clients_per_round={p.clients_per_round!r} must be above 0 and at most population={p.population!r}. Take "
            "smaller cohorts, or count the clients that can be drawn."
        )
    if p.scheme.limits_batches and p.clients_per_round != int(p.clients_per_round):
        raise PrivacyError(f"A cohort of fixed size is a whole number, got clients_per_round={p.clients_per_round!r}.")
    if p.min_separation < 1 or (p.max_participations is not None and p.max_participations < 0):
        raise PrivacyError(
            f"min_separation={p.min_separation!r} must be at least 1 and max_participations="
            f"{p.max_participations!r} at least 0 or None."
        )


class CohortCheck:
    """Holds cohorts, one after the other, against what their sampler declared.

    Whatever randomness is claimed is tested as well. Cohorts are refused that would come up once in 10^9 trainings,
    over all their rounds, if they were drawn as declared. That is a client which is there too often, or cohorts that
    share too many or too few clients with those before. Each is a bet whose stake does not grow in expectation if the
    declaration is true. So it reaches 10^9 times its size with probability 10^-9 at most (Ville's inequality).

    Args:
      participation: what the sampler declares.
      counts: how many rounds each client was in so far.
    """

    def __init__(self, participation: Participation):
        check_declaration(participation)
        self.participation = participation
        self.counts: Counter[str] = Counter()
        self._last: dict[str, int] = {}
        self._rounds = self._seen_again = self._chances = 0

    def add(self, cohort: Sequence[str], test: bool = True) -> None:
        """Takes the next round's clients; of one that is refused it keeps nothing. `test` is left to the caller if
        ``test`` is false.

        Raises:
          PrivacyError: they are not as declared.
        """
        p, number = self.participation, self._rounds
        if len(set(cohort)) < len(cohort):
            twice = Counter(cohort).most_common(1)[0][0]
            raise PrivacyError(
                f"Client {twice!r} is in the cohort of round {number} more than once, which multiplies what one client "
                "can do. Draw clients without replacement."
            )
        if p.scheme.limits_batches and len(cohort) > p.clients_per_round:
            raise PrivacyError(
                f"The cohort of round {number} has {len(cohort)} clients, but the sampler declares "
                f"{p.clients_per_round:g}."
            )
        if p.sampling == "bounded":
            self._check_limits(cohort)
        chances, seen_again = len(self.counts), sum(client in self.counts for client in cohort)
        self._chances += chances
        self._seen_again += seen_again
        self.counts.update(cohort)
        self._rounds += 1
        try:
            if test:
                self.test(cohort)
        except PrivacyError:
            self._chances -= chances
            self._seen_again -= seen_again
            self.counts.subtract(cohort)
            self.counts = +self.counts
            self._rounds -= 1
            raise
        self._last.update(dict.fromkeys(cohort, number))

    def _check_limits(self, cohort: Sequence[str]) -> None:
        p, number = self.participation, self._rounds
        for client in cohort:
            apart = number - self._last.get(client, number - p.min_separation)
            if apart < p.min_separation:
                raise PrivacyError(
                    f"Client {client!r} is in round {number}, {apart} after its last, but the sampler declares "
                    f"min_separation={p.min_separation}: it does not keep to it."
                )
            if p.max_participations is not None and self.counts[client] >= p.max_participations:
                raise PrivacyError(
                    f"Client {client!r} was in {self.counts[client] + 1} rounds, but the sampler declares "
                    f"max_participations={p.max_participations}: it does not keep to it."
                )

    def test(self, clients: Iterable[str] | None = None) -> None:
        """Tests what is claimed of chance by all rounds so far, and of these clients, or of all.

        Raises:
          PrivacyError: it does not happen by chance.
        """
        p, rate = self.participation, self.participation.clients_per_round / self.participation.population
        if not p.scheme.sampled_anew or rate >= 1 or not self.counts:
            return
        remedy = (
            "Draw every cohort anew as declared, as tfdpfl.federated.samplers do, or declare sampling='none', or "
            "'bounded' with the limits that are kept"
        )
        never = f"does not happen if {p.clients_per_round:g} of {p.population} clients are drawn by {p.sampling!r}"
        if len(self.counts) > p.population:
            raise PrivacyError(
                f"{len(self.counts)} different clients were there in {self._rounds} rounds, but the sampler declares a "
                f"population of {p.population}. Count the clients that can be drawn."
            )
        there = self.counts if clients is None else clients
        client, most = max(((c, self.counts[c]) for c in there), key=lambda row: row[1], default=("", 0))
        if _odds(most, self._rounds, rate, more_only=True) > math.log(_NEVER * p.population):
            raise PrivacyError(f"Client {client!r} was in {most} of {self._rounds} rounds, which {never}. {remedy}")
        if _odds(self._seen_again, self._chances, rate) > math.log(_NEVER):
            raise PrivacyError(
                f"In {self._rounds} rounds clients that had been there before came {self._seen_again} times, where "
                f"{self._chances * rate:.0f} are usual, which {never}. {remedy}"
            )


_NEVER = 2e9  # two kinds of bet, each won once in 2 · 10^9 trainings


def _odds(hits: int, chances: int, rate: float, more_only: bool = False) -> float:
    """The logarithm of the winnings of a bet that ``hits`` of ``chances`` come at any other rate than ``rate``, or at
    any higher one.

    It is the mean likelihood ratio over those rates, a martingale for coins of ``rate``, and by Hoeffding 1963, theorem
    4, no more than one where they are drawn without replacement.
    """
    from scipy.special import betainc, betaln, xlog1py, xlogy

    a, b = hits + 1.0, chances - hits + 1.0
    won = betaln(a, b) - xlogy(hits, rate) - xlog1py(chances - hits, -rate)
    if more_only:
        higher = 1 - betainc(a, b, rate)
        won += (math.log(higher) if higher > 0 else -math.inf) - math.log1p(-rate)
    return float(won)
