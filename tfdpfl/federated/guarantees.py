"""What each federated process promises, and its price for the rounds that ran. No TFF here.

All are stated for ``"zero_out"``: one client (or one example) contributes nothing in place of what it did, while
everything else, the cohorts included, stays as it is.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from tfdpfl.accounting.participation import tree_sensitivity
from tfdpfl.accounting.pricing import Price, check_delta, price
from tfdpfl.errors import PrivacyError
from tfdpfl.federated.privacy import Participation, RoundsRun

if TYPE_CHECKING:
    from dp_accounting import DpEvent

SAMPLINGS = ("poisson", "fixed_size", "bounded", "none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientLevel:
    """A clipped sum of clients' updates, with Gaussian noise from the server, in every round.

    Attributes:
      noise_multiplier: of all that a round releases together, relative to one client's contribution.
    """

    noise_multiplier: float
    level: str = "client"
    adjacency: str = "zero_out"

    def price(self, run: RoundsRun, delta: float, accountant: str = "pld") -> Price:
        """An upper bound on ε for the rounds that ran; infinite without noise.

        Poisson and fixed-size cohorts are priced with their amplification, the latter as replacing a client, which
        blanking one is a case of. Bounded participation and unknown sampling are priced without any.

        Raises:
          PrivacyError: the cohorts are not what the sampler declared.
        """
        from dp_accounting import dp_event

        most = participations(run)
        if most == 0:
            return price(dp_event.NoOpDpEvent(), delta, accountant, self.adjacency)
        z, p = self.noise_multiplier, run.participation
        if z == 0:
            return price(dp_event.NonPrivateDpEvent(), delta, accountant, self.adjacency)
        if p.sampling == "fixed_size" and p.clients_per_round < p.population:
            halved: DpEvent = dp_event.GaussianDpEvent(z / 2)  # one clipped update becomes another: it moves by 2 C
            halved = dp_event.SampledWithoutReplacementDpEvent(p.population, int(p.clients_per_round), halved)
            sampled = price(dp_event.SelfComposedDpEvent(halved, run.rounds), delta, accountant, "replace_one")
            plain = price(
                dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(z), run.rounds), delta, accountant, self.adjacency
            )
            return min(sampled, plain, key=lambda found: found.epsilon)
        event: DpEvent = dp_event.GaussianDpEvent(z)
        if p.sampling == "poisson" and p.clients_per_round < p.population:
            event = dp_event.PoissonSampledDpEvent(p.clients_per_round / p.population, event)
        return price(dp_event.SelfComposedDpEvent(event, most), delta, accountant, self.adjacency)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeLevel:
    """Sums over all rounds so far with tree-aggregated Gaussian noise (Kairouz et al. 2021, arXiv:2103.00039).

    Attributes:
      noise_multiplier: standard deviation of the noise of a tree's node, over the clip.
      restart_every: rounds in a tree; None for one tree over all rounds.
    """

    noise_multiplier: float
    restart_every: int | None = None
    level: str = "client"
    adjacency: str = "zero_out"

    def price(self, run: RoundsRun, delta: float, accountant: str = "pld") -> Price:
        """An upper bound on ε for the rounds that ran: no sampling is relied upon, only the participation limits.

        Raises:
          PrivacyError: the cohorts are not what the sampler declared.
        """
        from dp_accounting import dp_event

        most = participations(run)
        if most == 0:
            return price(dp_event.NoOpDpEvent(), delta, accountant, self.adjacency)
        if self.noise_multiplier == 0:
            return price(dp_event.NonPrivateDpEvent(), delta, accountant, self.adjacency)
        p = run.participation
        separation = p.min_separation if p.sampling == "bounded" else 1
        squared = tree_sensitivity(run.rounds, most, separation, self.restart_every)
        # The nodes together are one Gaussian mechanism, for clients that adapt to what was released, too (Denisov et
        # al. 2022, arXiv:2202.08312).
        event = dp_event.GaussianDpEvent(self.noise_multiplier / math.sqrt(squared))
        return price(event, delta, accountant, self.adjacency)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalLevel:
    """Gaussian noise on each client's clipped update before it leaves the client.

    The server and every observer see each noisy update by itself, so nobody's sampling helps.

    Attributes:
      noise_multiplier: the standard deviation over the clip.
    """

    noise_multiplier: float
    level: str = "local"
    adjacency: str = "replace_one"

    def price(self, run: RoundsRun, delta: float, accountant: str = "pld") -> Price:
        """An upper bound on ε for the client that took part most: its update replaced by any other, each time."""
        from dp_accounting import dp_event

        most = participations(run, recorded=True)
        event: DpEvent = dp_event.NonPrivateDpEvent()
        if self.noise_multiplier > 0:
            event = dp_event.GaussianDpEvent(self.noise_multiplier / 2)
        return price(dp_event.SelfComposedDpEvent(event, most), delta, accountant, self.adjacency)


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
    """

    noise_multiplier: float
    sampling: str
    batch_size: float
    local_steps: int | None = None
    local_epochs: int | None = None
    level: str = "example"
    adjacency: str = "zero_out"

    def price(self, run: RoundsRun, delta: float, accountant: str = "pld") -> Price:
        """An upper bound on ε for the client whose examples it is worst for.

        Raises:
          PrivacyError: Poisson steps, and the run does not say how many examples each client of its cohorts holds.
        """
        if not run.cohorts:
            return self._price(participations(run), None, delta, accountant)
        participations(run)
        prices = [self._price(*row, delta, accountant) for row in self._worst(set(self._rows(run).values()))]
        return max(prices, key=lambda found: found.epsilon)

    def price_by_client(self, run: RoundsRun, delta: float, accountant: str = "pld") -> dict[str, Price]:
        """The ledger: for each client that took part, an upper bound on ε for its own examples."""
        participations(run)
        rows = self._rows(run)
        known = {row: self._price(*row, delta, accountant) for row in set(rows.values())}
        return {client: known[row] for client, row in rows.items()}

    def _rows(self, run: RoundsRun) -> dict[str, tuple[int, int | None]]:
        """How often each client took part, and how many examples it holds, where that matters."""
        counts = Counter(client for cohort in run.cohorts for client in cohort)
        sizes = run.num_examples if self.sampling == "poisson" else {}
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
        from dp_accounting import dp_event

        if count == 0 or num_examples == 0:
            return price(dp_event.NoOpDpEvent(), delta, accountant, self.adjacency)
        if self.noise_multiplier == 0:
            return price(dp_event.NonPrivateDpEvent(), delta, accountant, self.adjacency)
        event: DpEvent = dp_event.GaussianDpEvent(self.noise_multiplier)
        if self.sampling == "poisson":
            if num_examples is None:
                raise PrivacyError(
                    "the sampling rate inside a client is batch_size over its number of examples, which "
                    "RoundsRun.num_examples does not hold for every client: give it"
                )
            if num_examples > self.batch_size:
                event = dp_event.PoissonSampledDpEvent(self.batch_size / num_examples, event)
        steps = self.local_steps if self.sampling == "poisson" else self.local_epochs
        assert steps is not None
        return price(dp_event.SelfComposedDpEvent(event, count * steps), delta, accountant, self.adjacency)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedLevel:
    """Skellam noise from the clients under secure aggregation, so that the server sees only noisy sums.

    Clients add equal shares, so a cohort of half the expected size has half the variance: each round is priced for
    its own cohort. All clients are taken to add their shares honestly.

    Attributes:
      l1, l2: bounds on a client's contribution on the integer grid, after rounding.
      local_stddev: of one client's share, on the integer grid.
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
                "noise that clients add depends on how many there were: RoundsRun.cohorts must hold every round"
            )
        if self.local_stddev == 0 and any(run.cohorts):
            return Price(math.inf, "rdp")
        rounds = [self._divergences(len(cohort)) for cohort in run.cohorts]
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
    """The most rounds that a client can have been in; with ``recorded``, that it was in, where the cohorts are known.

    Raises:
      PrivacyError: the declaration makes no sense, or the cohorts do not keep to it.
    """
    p = run.participation
    check_declaration(p)
    if run.rounds < 0 or (run.cohorts and len(run.cohorts) < run.rounds):
        raise PrivacyError(f"{run.rounds} rounds ran, but {len(run.cohorts)} cohorts are recorded: record them all")
    counts = _check_cohorts(run)
    if recorded and run.cohorts:
        return max(counts.values(), default=0)
    if p.sampling != "bounded":
        return run.rounds
    most = -(-run.rounds // p.min_separation)
    return most if p.max_participations is None else min(most, p.max_participations)


def check_declaration(p: Participation) -> None:
    """Raises a `PrivacyError` where a sampler's declaration makes no sense."""
    if p.sampling not in SAMPLINGS:
        raise PrivacyError(f"sampling must be one of {', '.join(map(repr, SAMPLINGS))}, got {p.sampling!r}")
    if not 0 < p.clients_per_round <= p.population:
        raise PrivacyError(
            f"clients_per_round={p.clients_per_round!r} must be above 0 and at most population={p.population!r}: take "
            "smaller cohorts, or count the clients that can be drawn"
        )
    if p.sampling == "fixed_size" and p.clients_per_round != int(p.clients_per_round):
        raise PrivacyError(f"a cohort of fixed size is a whole number, got clients_per_round={p.clients_per_round!r}")
    if p.min_separation < 1 or (p.max_participations is not None and p.max_participations < 0):
        raise PrivacyError(
            f"min_separation={p.min_separation!r} must be at least 1 and max_participations="
            f"{p.max_participations!r} at least 0 or None"
        )


def _check_cohorts(run: RoundsRun) -> Counter[str]:
    p = run.participation
    last: dict[str, int] = {}
    counts: Counter[str] = Counter()
    for number, cohort in enumerate(run.cohorts):
        if len(set(cohort)) < len(cohort):
            twice = Counter(cohort).most_common(1)[0][0]
            raise PrivacyError(
                f"client {twice!r} is in the cohort of round {number} more than once, which multiplies what one client "
                "can do: draw clients without replacement"
            )
        if p.sampling == "fixed_size" and len(cohort) > p.clients_per_round:
            raise PrivacyError(
                f"the cohort of round {number} has {len(cohort)} clients, the sampler declares {p.clients_per_round:g}"
            )
        for client in cohort:
            counts[client] += 1
            apart = number - last.get(client, -p.min_separation)
            last[client] = number
            if p.sampling == "bounded" and apart < p.min_separation:
                raise PrivacyError(
                    f"client {client!r} is in round {number}, {apart} after its last, but the sampler declares "
                    f"min_separation={p.min_separation}: it does not keep to it"
                )
    most = counts.most_common(1)
    if p.sampling == "bounded" and most and p.max_participations is not None and most[0][1] > p.max_participations:
        raise PrivacyError(
            f"client {most[0][0]!r} was in {most[0][1]} rounds, but the sampler declares "
            f"max_participations={p.max_participations}: it does not keep to it"
        )
    return counts
