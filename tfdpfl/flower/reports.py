"""Keeps what a client has spent of its own privacy on the client, and reports it in its reply."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from tfdpfl import _files, _formats
from tfdpfl._formats import NewerFormatError
from tfdpfl._types import Json
from tfdpfl.accounting import PrivacyLedger
from tfdpfl.accounting.pricing import Price, price
from tfdpfl.accounting.promises import Promise, of_seed
from tfdpfl.errors import PrivacyError
from tfdpfl.federated.privacy import UNITS, covered_by
from tfdpfl.flower._flwr import ConfigRecord, Context, Error, Message, log

__all__ = [
    "ClientLedger",
    "as_template",
    "attach",
    "client_reports",
    "over_budget",
    "promises_of_clients",
    "refused",
    "report_in",
]

KEY = "tfdpfl.privacy"
VERSION = 1  # of a report, the one record of this package that travels between a client and its server
_OF_UPDATES = "replace_one"  # the relation that noisy updates are stated for
_REFUSED = 201  # Flower's own code for a mod whose condition is not met


def as_template(path: str | os.PathLike) -> str:
    """Returns the ``ledger_path`` that means this very path. Its braces are doubled, since they fill in entries."""
    return os.fspath(path).replace("{", "{{").replace("}", "}}")


class ClientLedger:
    """One client's ledger of one mechanism, which outlives a message.

    It is in the client's `Context`, which Flower keeps from one message of a run to the next. It is also in a file
    where one is named. The cost is written there before the reply leaves.

    Args:
      context: the client's.
      level: "example" or "local".
      path: a file, in which {node_id} and the entries of ``context.node_config``, as {partition-id}, are filled in.
        None for none: then a restarted client begins anew.

    Raises:
      ValueError: the path names an entry that the node lacks, or the file holds no whole ledger.
      PrivacyError: the file was made once and is gone, is older than this run knows, of a newer format, or of a
        mechanism that protects something else.
    """

    def __init__(self, context: Context, level: str, path: str | os.PathLike | None):
        self._context, self._level, self._key = context, level, f"{KEY}.{level}"
        self._path = None
        if path is not None:
            try:
                self._path = Path(os.fspath(path).format(**{**context.node_config, "node_id": context.node_id}))
            except (KeyError, IndexError, ValueError) as error:
                raise ValueError(
                    f"ledger_path={path!r} names {error}, but a node has node_id and {sorted(context.node_config)}"
                ) from None
            if "{node_id}" in os.fspath(path) and not self._path.exists():
                log.warning(
                    "A new ledger begins at %s, named after this node's id. Nodes without keys, and all nodes of a "
                    "SuperLink without --database, have another id when they start again, and with it an epsilon that "
                    "begins anew: name the file by an entry of the node's config", self._path.absolute(),
                )  # fmt: skip
        self.ledger = self._kept()

    def with_more(self, more: PrivacyLedger) -> PrivacyLedger:
        return PrivacyLedger.from_dict(self.ledger.to_dict()).merge(more)

    def spend(self, more: PrivacyLedger, delta: float = 0.0, target_epsilon: float | None = None) -> str | None:
        """Adds and keeps it, on top of what other processes have spent from the same file by now. If ε at ``delta``
        would pass the target, nothing is spent, and what comes back says so.

        Raises `OSError` where it cannot be written.
        """
        with self._alone():
            self.ledger = self._kept()
            after = self.with_more(more)
            over = over_budget(after, delta, target_epsilon)
            if over:
                return over
            text = json.dumps(after.to_dict())
            if self._path is not None:
                _files.replace(self._path, lambda file: file.write(text.encode()))
                _files.marker(self._path).touch()
        self._context.state[self._key] = ConfigRecord({"ledger": text})
        self.ledger = after
        return None

    def _kept(self) -> PrivacyLedger:
        record = self._context.state.config_records.get(self._key)
        in_context = PrivacyLedger() if record is None else self._parsed(str(record["ledger"]))
        if self._path is None:
            return in_context
        if not self._path.exists():
            _files.refuse_lost(self._path, "ledger_path", self._path, "what this client spent")
            return in_context
        kept = self._parsed(self._path.read_text())
        if kept.steps < in_context.steps:  # the file is written first, so it cannot have less
            raise PrivacyError(
                f"ledger_path={str(self._path)!r} has {kept.steps} steps, but this client has spent {in_context.steps} "
                "in this run. The steps that this older copy lacks would be in no epsilon. Restore the newest ledger."
            )
        return kept

    def _parsed(self, saved: str) -> PrivacyLedger:
        try:
            ledger = PrivacyLedger.from_dict(json.loads(saved))
        except NewerFormatError as error:
            raise NewerFormatError(f"ledger_path={str(self._path)!r}: {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"ledger_path={str(self._path)!r} holds no whole ledger ({error}). Without it, no epsilon "
                "holds what this client has spent. Restore the file from a backup, or delete it if the client never "
                "took part."
            ) from error
        if any((relation == _OF_UPDATES) != (self._level == "local") for relation in ledger.adjacencies):
            raise PrivacyError(
                f"ledger_path={str(self._path)!r} has entries that protect something else than one "
                f"{UNITS[self._level]}, so their ε would be of neither. Give example_dp a ledger_path of its own, and "
                "local_dp_mod (or nbafl_mod) another."
            )
        return ledger

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process spends from the file meanwhile."""
        if self._path is None:
            yield
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lock = self._path.with_name(self._path.name + ".lock")
        with open(os.open(lock, os.O_WRONLY | os.O_CREAT, 0o600), "w") as held:
            _files.lock(held, "ledger_path", self._path, wait=True)
            yield

    def report(self, delta: float, **more: object) -> Json:
        ledger = self.ledger
        return {
            **_formats.stamp(VERSION),
            "level": self._level,
            "epsilon": ledger.epsilon(delta),
            "delta": delta,
            "adjacency": ledger.adjacency,
            "steps": ledger.steps,
            "ledger": ledger.to_dict(),
            **more,
        }


def refused(message: Message, reason: str) -> Message:
    """A reply that says why there is none."""
    log.warning("%s", reason)
    return Message(Error(code=_REFUSED, reason=reason), reply_to=message)


def over_budget(ledger: PrivacyLedger, delta: float, target: float | None) -> str | None:
    """Returns what to say if a ledger's ε passes the target; None if it does not."""
    if target is None:
        return None
    epsilon = ledger.epsilon(delta)
    if epsilon <= target:
        return None
    return f"one more participation would cost epsilon={epsilon:.4g}, over this client's target_epsilon={target:g}"


def attach(reply: Message, report: Json) -> None:
    reply.content[KEY] = ConfigRecord({"report": json.dumps(report)})


def report_in(reply: Message) -> Json | None:
    """The report in a reply; None if it has none.

    Raises:
      NewerFormatError: the client's release is newer in a way that this one does not know.
      ValueError, KeyError, TypeError: it is no report.
    """
    record = reply.content.config_records.get(KEY)
    if record is None:
        return None
    report, what = dict(json.loads(str(record["report"]))), f"The report of node {reply.metadata.src_node_id}"
    _formats.refuse_newer(what, report, VERSION)
    UNITS[report["level"]], report["adjacency"]
    try:
        PrivacyLedger.from_dict(report["ledger"])
    except NewerFormatError as error:
        raise NewerFormatError(f"{what}: {error}") from error
    return report


def client_reports(replies: Iterable[Message]) -> dict[int, Json]:
    """By node, what clients said of their own privacy in ``replies``: for ``aggregate_train`` of your own strategy.

    A report has ``level`` ("example" or "local"), ``epsilon``, ``delta``, ``adjacency``, ``steps`` and ``ledger``,
    which `PrivacyLedger.from_dict` takes. It is the client's word.

    Raises:
      PrivacyError: a client's tfdpfl is newer than the server's in a way that the server does not know.
    """
    found = {}
    for reply in replies:
        report = None if reply.has_error() else report_in(reply)
        if report is not None:
            found[reply.metadata.src_node_id] = report
    return found


def promises_of_clients(reports: Iterable[Json]) -> list[Promise]:
    """Returns what clients reported of their own privacy: a promise for each level, of the client that spent most."""
    told: dict[tuple[str, str], list[PrivacyLedger]] = {}
    for said in reports:
        told.setdefault((said["level"], said["adjacency"]), []).append(PrivacyLedger.from_dict(said["ledger"]))
    return [_promise_of_clients(level, adjacency, ledgers) for (level, adjacency), ledgers in told.items()]


def _promise_of_clients(level: str, adjacency: str, ledgers: list[PrivacyLedger]) -> Promise:
    def worst(delta: float, accountant: str) -> Price:
        return max(price(ledger.dp_event, delta, accountant, ledger.adjacency) for ledger in ledgers)

    return Promise(
        kind="federation", part=f"told by clients ({level})", adjacency=adjacency, unit=UNITS[level], price=worst,
        mechanisms=[f"{len(ledgers)} clients; the figure is of the one that spent most"],
        notes=[covered_by(level)[0], "It is the clients' word."],
        warnings=of_seed(any(ledger.seeded for ledger in ledgers)),
    )  # fmt: skip
