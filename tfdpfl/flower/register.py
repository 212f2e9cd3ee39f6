"""Keeps what each client has spent over all runs of a server: a SQLite database beside the ledgers. No Flower here.

A row says that a client could have been in a round: it was connected while coins were tossed, or it was asked. The row
is on the disk before a message leaves, and it counts whether or not the round is charged later. So the price of a
client may include one round of each run that was lost, and never leaves out one that was released.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sqlite3
import time
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tfdpfl import _files, _formats
from tfdpfl._types import JsonValue
from tfdpfl.accounting import PrivacyLedger
from tfdpfl.errors import PrivacyError
from tfdpfl.federated.privacy import RoundsRun, within
from tfdpfl.flower.spent import Settings

__all__ = ["Register"]

_VERSION = 1
_TABLES = """
CREATE TABLE runs (
    run TEXT PRIMARY KEY, ledger TEXT NOT NULL, header TEXT NOT NULL, evaluations INTEGER NOT NULL,
    rounds INTEGER NOT NULL
);
CREATE TABLE exposures (
    client TEXT NOT NULL, run TEXT NOT NULL, round INTEGER NOT NULL, asked INTEGER NOT NULL,
    PRIMARY KEY (client, run, round)
) WITHOUT ROWID;
CREATE INDEX of_rounds ON exposures (run, round);
"""


@dataclasses.dataclass(frozen=True)
class Spent:
    """States what a client has spent: in how many runs and rounds, in how many of them it was asked, and ε."""

    client: str
    runs: int
    rounds: int
    asked: int
    epsilon: float


class Register:
    """The clients of all runs that share a database. Several servers may use it at once.

    Args:
      path: the database; it is made if it is not there.
      new: whether it may be made.

    Raises:
      ValueError: it is no such database, or cannot be opened.
      PrivacyError: a newer release made it, or it was made once and is gone, as a file beside it shows whose name ends
        in ``.made``.
    """

    def __init__(self, path: str | os.PathLike, new: bool = True):
        self._path = Path(path)
        if new:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
        self._prices: dict[Hashable, float] = {}
        try:
            self._db = sqlite3.connect(self._path, timeout=60, isolation_level=None, check_same_thread=False)
            mode = self._write_ahead()
            self._db.execute("PRAGMA synchronous=FULL")
            with self._alone():
                version = self._db.execute("PRAGMA user_version").fetchone()[0]
                if not version and not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    _files.refuse_lost(self._path, "register_path", path, "what clients spent in all runs")
                    for statement in _TABLES.split(";"):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA user_version={_VERSION}")
                    version = _VERSION
        except sqlite3.Error as error:
            raise ValueError(
                f"register_path={str(path)!r} cannot be used as a database ({error}). "
                "Epsilon would lack what clients spent in other runs. Restore it from a backup, or give the path "
                "of a new file on a local disk."
            ) from error
        if new:
            _files.marker(self._path).touch()
        _formats.refuse_newer(f"register_path={str(path)!r}", {"version": version or None}, _VERSION)
        if mode != "wal":
            raise ValueError(
                f"register_path={str(path)!r} is on a file system without shared memory, so that SQLite cannot keep "
                "its log ahead of the data. Use a folder on a local disk."
            )

    def close(self) -> None:
        self._db.close()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One transaction, on the disk when it ends, in which no other server writes."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _write_ahead(self) -> str:
        """Has SQLite keep a log ahead of the data, and returns its mode. SQLite waits for no other server here."""
        end = time.monotonic() + 60
        while True:
            try:
                return self._db.execute("PRAGMA journal_mode=WAL").fetchone()[0]
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > end:
                    raise
                time.sleep(0.01)

    def join(
        self, run: str, ledger: str, header: Mapping[str, JsonValue], charged: Sequence[Sequence[str]],
        begun: Sequence[str] | None = None, evaluations: int = 0,
    ) -> bool:  # fmt: skip
        """Adds a run, or goes on with it. Returns whether the ledger had rounds that were not here.

        Such rounds are added for each client that the run ever asked.

        Raises:
          PrivacyError: the ledger is a copy of one that is still there, or older than this database.
        """
        described = json.dumps(header)
        settings = Settings.of(json.loads(described))  # refuses what cannot be priced
        # All connected clients are exposed to the coins of a round, also where none of them is asked.
        tossed = settings.participation.scheme.independent
        cohorts = [*charged, *([] if begun is None else [begun])]
        with self._alone():
            self._db.execute("INSERT OR IGNORE INTO runs VALUES (?, ?, ?, 0, 0)", (run, ledger, described))
            where, rounds = self._db.execute("SELECT ledger, rounds FROM runs WHERE run = ?", (run,)).fetchone()
            _refuse_copy(ledger, where, len(charged), rounds)
            self._db.execute(
                "UPDATE runs SET ledger = ?, rounds = ?, evaluations = max(evaluations, ?) WHERE run = ?",
                (ledger, len(charged), evaluations, run),
            )
            known = {row[0] for row in self._db.execute("SELECT DISTINCT round FROM exposures WHERE run = ?", (run,))}
            missing = [n for n, cohort in enumerate(cohorts) if (cohort or tossed) and n not in known]
            everyone = sorted({client for cohort in cohorts for client in cohort})
            self._db.executemany(
                "INSERT OR IGNORE INTO exposures VALUES (?, ?, ?, ?)",
                ((client, run, n, int(client in cohorts[n])) for n in missing for client in everyone),
            )
        return bool(missing and everyone)

    def reserve(
        self, run: str, number: int, clients: Iterable[str], delta: float, budget: float | None = None
    ) -> list[str]:
        """Writes down that clients could be in a round. Returns those whose ε over all runs then stays in the budget.

        The entries of an earlier attempt at this round are replaced, since it released nothing.
        """
        clients, insert = [*clients], "INSERT INTO exposures VALUES (?, ?, ?, 0)"
        with self._alone():
            self._db.execute("DELETE FROM exposures WHERE run = ? AND round = ?", (run, number))
            self._db.executemany(insert, ((client, run, number) for client in clients))
            over = [] if budget is None else [c for c in clients if not self._within(self._counts(c), delta, budget)]
            where = "client = ? AND run = ? AND round = ?"
            self._db.executemany(f"DELETE FROM exposures WHERE {where}", ((client, run, number) for client in over))
        return [client for client in clients if client not in over]

    def settle(self, run: str, number: int, asked: Collection[str], only_asked: bool) -> None:
        """Writes down who is asked; with ``only_asked`` the others were not in the round at all."""
        with self._alone():
            self._db.executemany(
                "INSERT INTO exposures VALUES (?, ?, ?, 1) ON CONFLICT DO UPDATE SET asked = 1",
                ((client, run, number) for client in asked),
            )
            if only_asked:
                self._db.execute("DELETE FROM exposures WHERE run = ? AND round = ? AND NOT asked", (run, number))

    def charged(self, run: str, rounds: int) -> None:
        """Writes down how many rounds the ledger of a run has charged."""
        with self._alone():
            self._db.execute("UPDATE runs SET rounds = max(rounds, ?) WHERE run = ?", (rounds, run))

    def evaluated(self, run: str, evaluations: int, clients: Iterable[str]) -> None:
        """Writes down how many evaluations a run has released, or is about to, and who could be in the last.

        All evaluations of a run count for each client of the run. So a client that was in none of its rounds gets one.
        """
        with self._alone():
            self._db.execute("UPDATE runs SET evaluations = max(evaluations, ?) WHERE run = ?", (evaluations, run))
            self._db.executemany(
                "INSERT INTO exposures SELECT ?, ?, 0, 0 "
                "WHERE NOT EXISTS (SELECT 1 FROM exposures WHERE client = ? AND run = ?)",
                ((client, run, client, run) for client in clients),
            )

    def spent(self, delta: float, accountant: str = "pld") -> list[Spent]:
        """Returns what each client has spent over all runs, the largest ε first."""
        found = []
        for client, asked in self._db.execute("SELECT client, sum(asked) FROM exposures GROUP BY client").fetchall():
            counts = self._counts(client)
            rounds = sum(counts.values())
            found.append(Spent(client, len(counts), rounds, asked, self._price(counts, delta, accountant)))
        return sorted(found, key=lambda spent: (-spent.epsilon, spent.client))

    def _counts(self, client: str) -> dict[str, int]:
        """How many rounds of each run a client could have been in."""
        query = "SELECT run, count(*) FROM exposures WHERE client = ? GROUP BY run"
        return dict(self._db.execute(query, (client,)))

    def _within(self, counts: Mapping[str, int], delta: float, budget: float) -> bool:
        return within(budget, lambda name: self._price(counts, delta, name), "pld")

    def _price(self, counts: Mapping[str, int], delta: float, accountant: str) -> float:
        parts = []
        for run, count in sorted(counts.items()):
            header, evaluations, charged = self._db.execute(
                "SELECT header, evaluations, rounds FROM runs WHERE run = ?", (run,)
            ).fetchone()  # fmt: skip
            query = "SELECT coalesce(max(round), 0) + 1 FROM exposures WHERE run = ?"
            rounds = max(charged, self._db.execute(query, (run,)).fetchone()[0])
            parts.append((header, count, rounds, evaluations))
        key = tuple(parts), delta, accountant
        if key not in self._prices:
            total = PrivacyLedger()
            for header, count, rounds, evaluations in parts:
                total.merge(_ledger_of_client(Settings.of(json.loads(header)), count, rounds, evaluations))
            self._prices[key] = total.epsilon(delta, accountant)
        return self._prices[key]


def _refuse_copy(ledger: str, where: str, charged: int, known: int) -> None:
    """Refuses a ledger that is a copy of one that is still there, or older than the database.

    Args:
      ledger: its path.
      where: the path by which the database knows the run.
      charged: how many rounds it charged.
      known: how many the database knows of.
    """
    if where != ledger and os.path.exists(where) and not os.path.samefile(where, ledger):
        raise PrivacyError(
            f"ledger_path={ledger!r} is a copy of {where!r}. The rounds of both would count as the same rounds in "
            "register_path, so epsilon would lack some. Continue with the original, delete the original if it is not "
            "used any more, or begin another training with a new ledger_path."
        )
    if known > charged:
        raise PrivacyError(
            f"ledger_path={ledger!r} has {charged} charged rounds, but register_path knows of {known}. The rounds that "
            "this older copy lacks would be in no epsilon. Restore the newest ledger, or begin another training with a "
            "new ledger_path."
        )


def _ledger_of_client(settings: Settings, count: int, rounds: int, evaluations: int) -> PrivacyLedger:
    """What a client that could have been in ``count`` of ``rounds`` rounds has spent."""
    p = settings.participation
    if p.scheme.independent:
        return settings.ledger(RoundsRun(rounds=count, participation=p), evaluations)
    # Of correlated noise, a round is in all that later rounds release, so all rounds count, and not the client's alone.
    p = dataclasses.replace(p, sampling="bounded", max_participations=min(count, p.max_participations or count))
    return settings.ledger(RoundsRun(rounds=rounds, participation=p), evaluations)
