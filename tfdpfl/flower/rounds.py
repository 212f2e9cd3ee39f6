"""A round whose messages are out, and which of the answers count."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Iterable

import numpy as np

from tfdpfl.errors import PrivacyError
from tfdpfl.flower._flwr import GONE, Message, log

__all__ = ["Round", "open_round"]


@dataclasses.dataclass
class Round:
    """A round whose messages are out."""

    base: dict[str, np.ndarray]
    groups: dict[int, str]  # the clients that were asked, and the group that a reply of each must name
    clients: dict[int, str]  # the names of those that were asked
    answered: set[int] = dataclasses.field(default_factory=set)  # also with an error, or with what cannot be summed
    seen: set[int] = dataclasses.field(default_factory=set)

    def valid(self, replies: Iterable[Message]) -> Iterable[tuple[int, Message]]:
        """The first answer of each client that was asked, to what it was asked."""
        for reply in replies:
            node = reply.metadata.src_node_id
            if not reply.has_error() or reply.error.code not in GONE:
                self.answered |= {node} & self.groups.keys()
            if reply.has_error():
                log.warning("Node %d: %s", node, reply.error.reason)
            elif node not in self.groups:
                log.warning("Node %d answers unasked: ignored", node)
            elif reply.metadata.group_id != self.groups[node]:
                log.warning("Node %d answers another round: ignored", node)
            elif node in self.seen:
                log.warning("Node %d answers twice: the first counts", node)
            else:
                self.seen.add(node)
                yield node, reply


def open_round(
    base: dict[str, np.ndarray], messages: list[Message], server_round: int, name_of: Callable[[int], str | None]
) -> Round:
    """Marks messages, so that an answer to another round, or to one that was lost, is known."""
    token, groups = secrets.token_hex(8), dict[int, str]()
    for message in messages:
        node = message.metadata.dst_node_id
        if node in groups:
            raise PrivacyError(f"The strategy asks node {node} twice in a round, which would count it twice.")
        message.metadata.group_id = groups[node] = f"{server_round}-{token}"
    return Round(base, groups, {node: name_of(node) or str(node) for node in groups})
