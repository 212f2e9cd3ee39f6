"""What a client says of its own privacy, in its reply."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tfdpfl.flower._flwr import ConfigRecord, Message

KEY = "tfdpfl.privacy"


def report_in(reply: Message) -> dict[str, Any] | None:
    """The report in a reply; None if it has none."""
    record = reply.content.config_records.get(KEY)
    return None if record is None else dict(json.loads(str(record["report"])))


def attach(reply: Message, report: dict[str, Any]) -> None:
    reply.content[KEY] = ConfigRecord({"report": json.dumps(report)})


def client_reports(replies: Iterable[Message]) -> dict[int, dict[str, Any]]:
    """By node, what clients said of their own privacy: for a strategy of your own, in ``aggregate_train``."""
    found = {}
    for reply in replies:
        report = None if reply.has_error() else report_in(reply)
        if report is not None:
            found[reply.metadata.src_node_id] = report
    return found
