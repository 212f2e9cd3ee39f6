"""Chooses who is asked in a round."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tfdpfl.errors import PrivacyError
from tfdpfl.federated.privacy import Participation
from tfdpfl.federated.samplers import AvailabilityClientSampler, PoissonClientSampler
from tfdpfl.flower._flwr import Grid, Message, RecordDict, log
from tfdpfl.flower.spent import Draw

__all__ = ["Cohorts", "Roster", "SteadyNodes"]


class Cohorts:
    """Chooses who is asked in a round, and states what that allows to be claimed."""

    def __init__(
        self, draw: Draw, seed: int | None = None, client_of: Callable[[int], str | None] | None = None
    ):  # fmt: skip
        draw.check()
        self.draw, self.population = draw, draw.given
        self._seed, self._client_of, self._strangers = seed, client_of, set[int]()
        self._recognised = False  # whether the nodes are those that the ledger counts

    @property
    def denominator(self) -> float | None:
        """Returns what the mean is divided by; None until the population is known."""
        if self.draw.sampling_rate is None:
            return self.draw.clients_per_round
        return None if self.population is None else self.draw.sampling_rate * self.population

    def know(self, grid: Grid, at_least: int) -> None:
        """Takes the clients that are connected for all that there are, where nobody said."""
        if self.population is None:
            self.population = max(1, at_least, len([*grid.get_node_ids()]), self.draw.clients_per_round or 1)

    def to_check(self, charged: list[list[str]]) -> list[list[str]]:
        """The cohorts that ε is to be held against: those that keep to limits, or not.

        A coin that is tossed here for each node is fair by construction. Whether nodes come, go or get new ids says
        nothing about it, so a test of the cohorts would only end trainings that are sound.
        """
        return charged if self.draw.bounded else []

    @property
    def participation(self) -> Participation:
        return self.draw.participation(self.population)

    def messages(
        self,
        messages: list[Message],
        grid: Grid,
        charged: list[list[str]],
        begun: list[str] | None,
        allow: Callable[[Iterable[str]], Iterable[str]] | None = None,
    ) -> list[Message]:
        """The strategy's messages, or where it may not choose whom to ask, such to the clients that are drawn.

        Args:
          messages: the strategy's.
          grid: the nodes that are connected.
          charged: the cohorts of the rounds so far.
          begun: the cohort of a round that was lost.
          allow: takes clients and returns those that may be drawn, or asked.
        """
        if self.draw.sampling_rate is None and not self.draw.bounded:
            return self.of_strategy(messages, allow)
        model = messages[0]
        if any(not _same(message.content, model.content) for message in messages[1:]):
            raise ValueError(
                "The strategy has a message of its own for each client, so that no others can be drawn. Leave "
                "sampling_rate, max_participations and min_separation out."
            )
        connected = self.clients(grid.get_node_ids())
        if allow is not None and (begun is None or self.draw.sampling_rate is None):
            connected = {client: connected[client] for client in allow(connected)}
        log.info("configure_train: asks the clients that were drawn, of %d", len(connected))
        kind, ttl = model.metadata.message_type, model.metadata.ttl
        cohort = self._cohort([*connected], charged, begun)
        return [Message(model.content, connected[client], kind, ttl=ttl) for client in cohort]

    def of_strategy(
        self, messages: list[Message], allow: Callable[[Iterable[str]], Iterable[str]] | None = None
    ) -> list[Message]:
        """The strategy's messages, one to each client that may be asked."""
        if self._client_of is None and allow is None:
            return messages
        chosen = self.clients(message.metadata.dst_node_id for message in messages)
        asked = {chosen[client] for client in (chosen if allow is None else allow(chosen))}
        return [message for message in messages if message.metadata.dst_node_id in asked]

    def _cohort(self, connected: list[str], charged: list[list[str]], begun: list[str] | None) -> list[str]:
        """Those that are asked."""
        again = [client for client in connected if client in (begun or ())]
        if begun is not None and (again or not begun or self.draw.sampling_rate is not None):
            # A round that was lost has the clients that it had: a second coin would raise their rate. It may have none.
            return again
        if self.draw.sampling_rate is None:
            return self._within_limits(connected, charged)
        coins = PoissonClientSampler(connected or ["nobody"], self.draw.sampling_rate, self._seed)
        return [client for client in coins(len(charged)) if client in connected]

    def name_of(self, node: int) -> str | None:
        """The client that a node belongs to; None for a node that belongs to no client that is known."""
        if self._client_of is None:
            return str(node)
        name = self._client_of(node)
        if name is None and node not in self._strangers:
            self._strangers.add(node)
            log.warning("Node %d belongs to no client that clients= names: it is not asked", node)
        return None if name is None else str(name)

    def clients(self, nodes: Iterable[int]) -> dict[str, int]:
        """The clients that these nodes belong to, each with the first of its nodes: a second would count it twice."""
        found: dict[str, int] = {}
        for node in sorted(nodes):
            name = self.name_of(node)
            if name is not None:
                found.setdefault(name, node)
        return found

    def _within_limits(self, connected: list[str], charged: list[list[str]]) -> list[str]:
        draw = self.draw
        before, now = {client for cohort in charged for client in cohort}, {*connected}
        names = sorted(before | now)
        if not self._recognised and before and now and before.isdisjoint(now):
            raise PrivacyError(
                f"None of the {len(now)} connected nodes is one of the {len(before)} that took part so far: they have "
                "new ids, as nodes without keys, or of a SuperLink without --database, or simulated anew, and "
                "max_participations and min_separation would count them from zero. Name each node's client by "
                "clients=Roster(...), keep keys and database, or leave both limits out."
            )
        self._recognised = True
        if draw.given is not None and len(names) > draw.given:
            raise PrivacyError(
                f"{len(names)} nodes took part or are connected, of population={draw.given}: some have got new ids, "
                "for which max_participations and min_separation would count from zero. Name each node's client by "
                "clients=Roster(...), keep keys and the SuperLink's database, or count all clients."
            )
        assert draw.clients_per_round is not None
        sampler = AvailabilityClientSampler(
            names, min(draw.clients_per_round, len(names)), lambda number: connected, draw.most, draw.apart, self._seed
        )
        sampler.remember(dict(enumerate(charged)))
        return [*sampler(len(charged))]


class Roster:
    """Names the client that each node belongs to, as a file says: ``clients=Roster("/etc/federation/roster.json")``.

    The file holds a JSON object of node ids and names, as ``{"4938271": "hospital-0"}``. It is read again when it has
    changed, so that a client which installs anew goes on under its name with another node id. A node that it does not
    name is not asked.

    Args:
      path: the file.

    Raises:
      ValueError: it cannot be read, or holds something else. Later it keeps what it had, and logs a warning.
    """

    def __init__(self, path: str | os.PathLike):
        self._path, self._changed = Path(path), 0
        self._names = self._read()

    def __call__(self, node: int) -> str | None:
        try:
            if self._path.stat().st_mtime_ns != self._changed:
                self._names = self._read()
        except (OSError, ValueError) as error:
            log.warning("The roster is that of before: %s", error)
        return self._names.get(str(node))

    def _read(self) -> dict[str, str]:
        try:
            changed = self._path.stat().st_mtime_ns
            names = json.loads(self._path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(
                f"The roster {self._path} cannot be read ({error}). Restore it, or leave clients out."
            ) from error
        if not isinstance(names, dict) or not all(isinstance(name, str) and name for name in names.values()):
            raise ValueError(
                f"The roster {self._path} is no JSON object of node ids and names, so nobody would be asked. Write for "
                'instance {"4938271": "hospital-0"}'
            )
        self._changed = changed
        return names


class SteadyNodes:
    """A grid in which no node leaves while a strategy chooses.

    Strategies of Flower count the nodes, then wait until as many are connected. If one left in between, they would
    wait for it. A node that left counts as one that does not answer.
    """

    def __init__(self, grid: Grid):
        self._grid, self._seen = grid, set[int]()

    def get_node_ids(self) -> list[int]:
        self._seen.update(self._grid.get_node_ids())
        return sorted(self._seen)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)


def _same(a: RecordDict, b: RecordDict) -> bool:
    return a is b or (a.keys() == b.keys() and all(a[key] is b[key] or a[key] == b[key] for key in a))
