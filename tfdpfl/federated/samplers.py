"""Samplers of the clients of a round, which draw as the accountant assumes. No TFF here.

A sampler is called with a round's number and returns that round's clients, in TFF's sense of a
`client_selection_fn`. Its ``participation`` declares what may be relied on when the training is priced. Asked for a
round again, it returns the same clients, also after `get_state` and `set_state` in another process.
"""

from __future__ import annotations

import abc
import secrets
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tfdpfl._types import Json
from tfdpfl.accounting import _checks
from tfdpfl.federated.privacy import Participation

__all__ = ["AvailabilityClientSampler", "BoundedParticipationSampler", "FixedSizeClientSampler", "PoissonClientSampler"]

_ROUND = "count the rounds from 0"


class _Sampler(abc.ABC):
    """Cohorts as a function of a secret key of 128 bits and the round's number.

    Attributes:
      seeded: the key comes from a seed that someone knows.
    """

    def __init__(self, client_ids: Iterable[Hashable], seed: int | None):
        self.client_ids = [*client_ids] if not isinstance(client_ids, str) else []
        if not self.client_ids:
            raise ValueError(f"client_ids must name at least one client, got {client_ids!r}. Give a list of names.")
        self._index = {client: i for i, client in enumerate(self.client_ids)}
        if len(self._index) < len(self.client_ids):
            twice = next(c for i, c in enumerate(self.client_ids) if self._index[c] != i)
            raise ValueError(f"client_ids must be distinct, got {twice!r} more than once. Give each client one name.")
        seed = _checks.optional(_checks.whole, "seed", seed, 0, "leave it out for the operating system's entropy")
        words = np.random.SeedSequence(seed).generate_state(2, np.uint64) if seed is not None else None
        self._key = secrets.randbits(128) if words is None else int(words[0]) << 64 | int(words[1])
        self.seeded = seed is not None

    @property
    @abc.abstractmethod
    def participation(self) -> Participation:
        """Returns the limits that this sampler keeps, for `Guarantee.price`."""

    @abc.abstractmethod
    def _draw(self, round_num: int, rng: np.random.Generator) -> Sequence[int]:
        """Indices of the clients of a round."""

    def __call__(self, round_num: int) -> list[Any]:
        """Returns the ids of the clients that take part in round ``round_num``; there may be none."""
        round_num = _checks.whole("round_num", round_num, 0, _ROUND)
        # A stream of its own for every round: Philox's key is the secret, the top word of its counter the round.
        rng = np.random.Generator(np.random.Philox(key=self._key, counter=round_num << 192))
        return [self.client_ids[i] for i in self._draw(round_num, rng)]

    def get_state(self) -> Json:
        """Returns what `set_state` needs to go on in another process, JSON-ready. It is as secret as the cohorts
        are."""
        state = {"kind": type(self).__name__, "key": f"{self._key:032x}", "population": len(self.client_ids)}
        return {**state, **({"seeded": True} if self.seeded else {})}

    def set_state(self, state: Json) -> None:
        """Makes this the sampler that ``state`` was taken of, given the same clients in the same order.

        Raises:
          ValueError: ``state`` is of another kind of sampler, or of another number of clients.
        """
        for name, own in self.get_state().items():
            if name in ("kind", "population") and state.get(name) != own:
                raise ValueError(
                    f"The sampler's {name} is {own!r}, but the saved one's is {state.get(name)!r}. Continue with the "
                    "sampler and the clients that the training began with."
                )
        self._key, self.seeded = int(state["key"], 16), bool(state.get("seeded"))

    def remember(self, rounds: Mapping[int, Sequence[str]]) -> None:  # noqa: B027
        """Takes rounds, each with the names of its clients as strings, as drawn before. It does nothing where what was
        drawn has no bearing on what will be."""


class PoissonClientSampler(_Sampler):
    """Draws every client by an independent coin in every round, as the accounting of federated averaging assumes.

        sampler = PoissonClientSampler(client_ids, sampling_rate=0.05)
        cohort = sampler(round_num)

    The size of a cohort varies, and may be 0. Keep it secret, and the cohort too.

    Args:
      client_ids: the population: distinct, hashable names. Its size counts as public.
      sampling_rate: the coin's probability, in (0, 1].
      seed: None draws the key from the operating system. A seed is for tests, because sampling does not amplify privacy
        against anyone who knows the seed.

    Raises:
      ValueError: an argument is out of its range.

    Source: McMahan et al. 2018, arXiv:1710.06963, algorithm 1.
    """

    def __init__(self, client_ids: Iterable[Hashable], sampling_rate: float, seed: int | None = None):
        super().__init__(client_ids, seed)
        remedy = "give the probability, in (0, 1], that a client is in a round"
        self.sampling_rate = _checks.real("sampling_rate", sampling_rate, remedy, above=0)
        if self.sampling_rate > 1:
            raise ValueError(f"sampling_rate must be at most 1, got {sampling_rate!r}: {remedy}")

    @property
    def participation(self) -> Participation:
        n = len(self.client_ids)
        return Participation(sampling="poisson", population=n, clients_per_round=self.sampling_rate * n)

    def _draw(self, round_num, rng):
        return np.flatnonzero(rng.random(len(self.client_ids)) < self.sampling_rate)


class FixedSizeClientSampler(_Sampler):
    """A fresh uniformly random set of exactly ``clients_per_round`` clients in every round.

    It costs more than `PoissonClientSampler`, which is to be preferred where cohorts may vary in size. For 50 of 1000
    clients, noise 1.2 and 100 rounds ε is 7.8 and not 2.4 (δ = 1e-5). See "Cohorts of fixed size" in
    docs/federated.md.

    Args:
      client_ids: as for `PoissonClientSampler`.
      clients_per_round: the cohort's size, at most the population's.
      seed: as for `PoissonClientSampler`.

    Raises:
      ValueError: an argument is out of its range, the cohort being larger than the population among them.
    """

    def __init__(self, client_ids: Iterable[Hashable], clients_per_round: int, seed: int | None = None):
        super().__init__(client_ids, seed)
        self.clients_per_round = _cohort_size(clients_per_round, len(self.client_ids))

    @property
    def participation(self) -> Participation:
        n = len(self.client_ids)
        return Participation(sampling="fixed_size", population=n, clients_per_round=self.clients_per_round)

    def _draw(self, round_num, rng):
        return rng.choice(len(self.client_ids), self.clients_per_round, replace=False)


class BoundedParticipationSampler(_Sampler):
    """Draws clients that take part in a limited number of rounds, with a minimum distance between them.

    DP-FTRL needs these limits. Among the clients that may take part, the sampler draws ``clients_per_round`` at random,
    or all if there are fewer. It claims no privacy for this choice. A cohort counts as having taken part as soon as the
    sampler returns it. Ask for rounds in rising order; you may ask again for a round that was drawn.

    Args:
      client_ids: as for `PoissonClientSampler`.
      clients_per_round: the most clients in a round, at most the population.
      max_participations: the most rounds that a client is in; None for no limit.
      min_separation: the fewest rounds from one participation of a client to its next; 1 lets them be adjacent.
      seed: None draws from the operating system's entropy.

    Raises:
      ValueError: an argument is out of its range; or a round is asked for, that was not drawn, after a later one.
    """

    def __init__(
        self,
        client_ids: Iterable[Hashable],
        clients_per_round: int,
        max_participations: int | None = None,
        min_separation: int = 1,
        seed: int | None = None,
    ):
        super().__init__(client_ids, seed)
        self.clients_per_round = _cohort_size(clients_per_round, len(self.client_ids))
        if max_participations is not None:
            remedy = "give the most rounds that a client may be in, or None"
            max_participations = _checks.whole("max_participations", max_participations, 1, remedy)
        self.max_participations = max_participations
        self.min_separation = _checks.whole("min_separation", min_separation, 1, "1 lets participations be adjacent")
        self._forget()

    @property
    def participation(self) -> Participation:
        return Participation(
            sampling="none" if self.max_participations is None and self.min_separation == 1 else "bounded",
            population=len(self.client_ids),
            clients_per_round=self.clients_per_round,
            max_participations=self.max_participations,
            min_separation=self.min_separation,
        )

    def get_state(self):
        limits = {"max_participations": self.max_participations, "min_separation": self.min_separation}
        return {**super().get_state(), **limits, "rounds": {str(r): drawn for r, drawn in self._drawn.items()}}

    def set_state(self, state: Json) -> None:
        super().set_state(state)
        self._forget()
        for round_num, cohort in sorted((int(r), cohort) for r, cohort in state["rounds"].items()):
            self._take(round_num, cohort)

    def remember(self, rounds: Mapping[int, Sequence[str]]) -> None:
        index = {str(client): i for i, client in enumerate(self.client_ids)}
        for round_num in sorted(rounds):
            if round_num not in self._drawn:
                self._take(round_num, [index[client] for client in rounds[round_num]])

    def _forget(self) -> None:
        self._drawn: dict[int, list[int]] = {}
        self._count = np.zeros(len(self.client_ids), int)
        self._next = np.zeros(len(self.client_ids), int)  # the first round that a client may be in again

    def _take(self, round_num: int, cohort: list[int]) -> None:
        self._drawn[round_num] = cohort
        self._count[cohort] += 1
        self._next[cohort] = round_num + self.min_separation

    def _present(self, round_num: int) -> np.ndarray:
        """A mask of the clients that are there."""
        return np.ones(len(self.client_ids), bool)

    def _draw(self, round_num, rng):
        if round_num not in self._drawn:
            last = max(self._drawn, default=-1)
            if round_num < last:
                raise ValueError(
                    f"round_num={round_num} comes after round {last} was drawn, so its limits can no longer be kept. "
                    "Ask for rounds in rising order."
                )
            free = self._next <= round_num
            if self.max_participations is not None:
                free &= self._count < self.max_participations
            free = np.flatnonzero(free & self._present(round_num))
            cohort = rng.choice(free, min(self.clients_per_round, len(free)), replace=False)
            self._take(round_num, [int(i) for i in cohort])
        return self._drawn[round_num]


class AvailabilityClientSampler(BoundedParticipationSampler):
    """Draws from the clients that are available, up to ``clients_per_round`` of them, within the same limits.

    The availability may depend on anything, so the sampler claims no randomness. Without limits, a client counts as
    taking part in every round.

    Args:
      client_ids: the population.
      clients_per_round: as for `BoundedParticipationSampler`, as all that follow but ``available``.
      available: takes a round's number and returns the ids of the clients that are there. Called once a round.

    Raises:
      ValueError: as `BoundedParticipationSampler`; or ``available`` names a client that is not in the population.
    """

    def __init__(
        self,
        client_ids: Iterable[Hashable],
        clients_per_round: int,
        available: Callable[[int], Iterable[Hashable]],
        max_participations: int | None = None,
        min_separation: int = 1,
        seed: int | None = None,
    ):
        super().__init__(client_ids, clients_per_round, max_participations, min_separation, seed)
        self.available = available

    def _present(self, round_num):
        present = np.zeros(len(self.client_ids), bool)
        for client in self.available(round_num):
            if client not in self._index:
                raise ValueError(
                    f"available({round_num}) named {client!r}, which is not one of client_ids. Add it there."
                )
            present[self._index[client]] = True
        return present


def _cohort_size(clients_per_round: object, population: int) -> int:
    size = _checks.whole("clients_per_round", clients_per_round, 1, "count the clients of a round")
    if size > population:
        raise ValueError(
            f"clients_per_round must be at most the {population} clients that there are, got {size}. Take fewer, or "
            "check client_ids."
        )
    return size
