"""Reads the ledger of a folder of checkpoints, and prices the rounds in it. No TFF here.

The ledger has a line for every round, written before the round runs, and since version 2 a line for every state,
written before its round is shown. States lie next to it, in folders whose names end with the number of rounds that are
complete. A line that repeats the number of the round before it is of a round whose result was lost. Version 1 does not
say whether that result was shown before, so such a round counts as shown each time.

Since version 2 the lines are chained by hashes, and a state holds the hash of the ledger that it belongs to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import mmap
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdpfl import _formats
from tfdpfl._chain import Chain
from tfdpfl._types import Json
from tfdpfl.federated.guarantees import ClientLevel, DistributedLevel, ExampleLevel, LocalLevel, TreeLevel
from tfdpfl.federated.nbafl import NbAFLLevel
from tfdpfl.federated.privacy import Guarantee, Participation, RoundsRun

__all__ = ["LEDGER", "STATE", "VERSION", "Record", "Round", "completed", "ledger_of", "newest_state", "runs"]

LEDGER = "ledger.jsonl"
STATE = "state_"  # before the number in the name of a state's folder
VERSION = 2  # of the ledger's lines
_HASHED = 2  # the first version whose lines have a hash

_NOISED_BY_SERVER = (ClientLevel, TreeLevel)
_CLASSES = (ClientLevel, DistributedLevel, ExampleLevel, LocalLevel, NbAFLLevel, Participation, TreeLevel)


@dataclasses.dataclass
class Round:
    """A round: its number, its clients as they were drawn, those left out and why, and how many examples each gave,
    where that is counted. If it is ``followed``, a line says that its state was saved, and it was not shown before."""

    number: int
    cohort: list[str]
    absent: dict[str, str] = dataclasses.field(default_factory=dict)
    examples: dict[str, int] = dataclasses.field(default_factory=dict)
    followed: bool = True


class Record:
    """Holds what a ledger says, as far as its lines can be read.

    Args:
      text: whole lines.
      what: names the file, at the beginning of a sentence.

    Attributes:
      header: the first line.
      stamps: the lines that state a version.
      begun: the rounds, in the order in which they began.
      saved: the number of the newest state that the ledger knows.
      chain: the hashes of the lines.
      fault: the first thing that is wrong; empty for a whole ledger.
      unread: how many lines cannot be read.
      rewound: whether rounds ran again that later rounds had followed, so that they were released twice.

    Raises:
      NewerFormatError: a line is of a newer version.
    """

    def __init__(self, text: bytes, what: str):
        self.what = what
        self.header: Json = {}
        self.stamps: list[Json] = []
        self.begun: list[Round] = []
        self.fault = ""
        self.lines = self.unread = self.saved = 0
        self.chain = Chain()
        self.rewound = False
        for self.lines, line in enumerate(text.splitlines(keepends=True), 1):
            try:
                self._read(line)
                self.chain.check(line, bool(self.stamps) and self.stamps[-1]["version"] >= _HASHED)
            except _formats.NewerFormatError:
                raise
            except (ValueError, KeyError, TypeError) as error:
                self.fault = self.fault or f"line {self.lines}, {type(error).__name__}: {error}"
            self.chain.add(line)

    def _read(self, line: bytes) -> None:
        before = len(self.begun)
        try:
            held = dict(json.loads(line))
            hashed = held.pop("sha256", None) is not None
            if "version" in held:
                _formats.refuse_newer(self.what, held, VERSION)
                self.stamps.append(held)
            if held.keys() == _formats.stamp(VERSION).keys():
                return
            if not self.header:
                if "sampler" not in held:
                    raise KeyError("sampler")
                self.header = held
                return
            last = self.begun[-1].number if before else -1
            if "saved" in held:
                state = int(held["saved"])
                if not self.saved <= state <= last + 1:
                    raise ValueError(f"state {state} cannot follow round {last}")
                self.saved = state
                return
            row = Round(
                int(held["round"]), [*held["cohort"]], dict(held["absent"]), dict(held["examples"]), followed=hashed
            )
        except (ValueError, KeyError, TypeError):
            self.unread += 1
            raise
        self.begun.append(row)
        self.rewound |= row.number < max(last, self.saved)
        if row.number not in (last, last + 1) or row.number < self.saved:
            raise ValueError(f"round {row.number} cannot follow {f'round {last}' if before else 'nothing'}")

    @property
    def rounds(self) -> int:
        """How many rounds began, each counted once; at most, where lines cannot be read."""
        numbers = {row.number for row in self.begun}
        if not self.fault:
            return len(numbers)
        return max(len(self.begun) + self.unread, max(numbers, default=-1) + 1)

    @property
    def shown(self) -> int:
        """How many rounds have a state that was saved, so that each may have been shown."""
        return max(self.saved, self.rounds - 1)

    def fault_of_state(self, least: int, most: int, ledger: str | None) -> str:
        """Returns why the newest state does not belong to this ledger; nothing if it does.

        Args:
          least: how many rounds the newest state came after, before the ledger was read.
          most: the same, after it was read: a training may have gone on meanwhile.
          ledger: the hash of the ledger that it came with, if the state holds one.
        """
        if least > self.rounds:
            return (
                f"The newest state came after {least} rounds, but {self.what} has {self.rounds}, so rounds are missing "
                "from epsilon. Restore the newest ledger, or take another folder and pass initial_state."
            )
        if self.fault:
            return ""
        if most < self.shown:
            return (
                f"{self.what} has {self.shown} rounds whose state was saved, but the newest state came after {most}. "
                "The rounds from there on were released, and would run again without being charged again. Restore the "
                "newest states, or take another folder and pass initial_state."
            )
        if ledger is not None and ledger not in self.chain.digests:
            return (
                f"{self.what} lacks lines that it had when {STATE}{least} was saved, so rounds that were released may "
                "be missing from epsilon. One of them is an older copy, or of another training. Restore the newest of "
                "both, or take another folder and pass initial_state."
            )
        return ""

    def settings(self) -> tuple[tuple[Guarantee, ...], Participation | None]:
        """Returns what the training promises, and what its sampler declares.

        Raises:
          ValueError: the first line does not state them, or states what this release does not know.
        """
        try:
            guarantees, p = (_formats.restore(self.header[name], _CLASSES) for name in ("privacy", "participation"))
            # Before ledgers had versions, they had its fields without its name.
            return tuple(guarantees), Participation(**p) if isinstance(p, Mapping) else p
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"The settings in the first line cannot be priced ({type(error).__name__}: {error}). Continue the "
                "training with `train`, which computes epsilon, or upgrade tfdpfl."
            ) from error

    def prices(self, rounds: int, delta: float, accountant: str) -> dict[str, tuple[str, float]]:
        """Returns {level: (adjacency, ε)} of so many rounds, as `train` does; of a damaged ledger, an upper bound for
        every round that it can have had."""
        guarantees, participation = self.settings()
        if participation is None or not guarantees:
            raise ValueError("This training promises no privacy, so it has no epsilon. Leave it out.")
        if self.fault or rounds > self.rounds:
            found = {g.level: (g, self._most(g, participation, rounds)) for g in guarantees}
        else:
            found = runs(guarantees, participation, self.begun, rounds)
        return {
            level: (guarantee.adjacency, self._price(guarantee, run, delta, accountant))
            for level, (guarantee, run) in found.items()
        }

    def _price(self, guarantee: Guarantee, run: RoundsRun, delta: float, accountant: str) -> float:
        if self.rewound and isinstance(guarantee, TreeLevel):
            return math.inf  # noise that two continuations share has no price here
        return guarantee.price(run, delta, accountant).epsilon

    def _most(self, guarantee: Guarantee, p: Participation, rounds: int) -> RoundsRun:
        """Returns rounds of unknown clients."""
        if self.rewound or not isinstance(guarantee, _NOISED_BY_SERVER):
            p = p.unlimited()  # rounds that came twice had the same clients, so no coin of theirs helps
        cohorts = [[client for client in row.cohort if client not in row.absent] for row in self.begun]
        unknown = [["?"]] * (rounds - len(cohorts))  # one client adds the least noise
        return RoundsRun(
            rounds=rounds,
            participation=p,
            cohorts=[*cohorts, *unknown] if isinstance(guarantee, DistributedLevel) else [],
            num_examples=_fewest_examples(self.begun),
        )


def completed(begun: Sequence[Round], rounds: int) -> list[Round]:
    """Returns the first so many rounds, each as it was begun last."""
    return [*{row.number: row for row in begun}.values()][:rounds]


def _shown(begun: Sequence[Round], rounds: int) -> tuple[list[Round], list[int]]:
    """Returns the rounds whose result may have been seen, and how often where it was more than once.

    These are the complete rounds, and of version 1 all that were begun.
    """
    last = {row.number: row for row in begun}
    times = Counter(
        row.number for row in begun if not row.followed or (row is last[row.number] and row.number < rounds)
    )
    return [last[number] for number in times], [count for count in times.values() if count > 1]


def runs(
    guarantees: Sequence[Guarantee],
    participation: Participation | None,
    begun: Sequence[Round],
    rounds: int,
    next_: Round | None = None,
) -> dict[str, tuple[Guarantee, RoundsRun]]:
    """States what is promised of each level, and what ran.

    Args:
      guarantees: one for each level.
      participation: what the sampler declares.
      begun: the rounds that began, in order.
      rounds: how many of them are complete.
      next_: one more that is to be counted.
    """
    found = {}
    more = [] if next_ is None else [next_]
    for guarantee in guarantees:
        assert participation is not None
        declared, again = participation, list[int]()
        if isinstance(guarantee, _NOISED_BY_SERVER):
            rows, again = _shown([*begun, *more], rounds + len(more))
        elif len(begun) > rounds:
            declared, rows = participation.unlimited(), [*begun, *more]  # rounds that were sent twice keep to no limit
        else:
            rows = [*completed(begun, rounds), *more]
        run = RoundsRun(
            rounds=len(rows),
            again=again,
            participation=declared,
            cohorts=[row.cohort for row in rows],
            absent=[[*row.absent] for row in rows],
            num_examples=_fewest_examples(rows),
        )
        found[guarantee.level] = guarantee, run
    return found


def newest_state(folder: Path) -> int:
    """Returns the number of the newest state in a folder, as TFF's manager of states finds it; 0 if there is none."""
    names = [path.name.removeprefix(STATE) for path in folder.glob(f"{STATE}*")]
    return max((int(name) for name in names if name.isdecimal()), default=0)


def ledger_of(state: Path) -> str | None:
    """Returns the hash of the ledger that a state came with. It stands among the tensors in TFF's file, as `train`
    wrote it. None if there is none, as before version 2, or the state is gone: a training that runs keeps two."""
    with contextlib.suppress(OSError):
        for path in state.glob("variables/*"):
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
                found = re.search(rb'"ledger": "([0-9a-f]{64})"', held)
                if found:
                    return found[1].decode()
    return None


def _fewest_examples(rows: Sequence[Round]) -> dict[str, int]:
    fewest: dict[str, int] = {}
    for client, n in (item for row in rows for item in row.examples.items()):
        fewest[client] = min(filter(None, (n, fewest.get(client))), default=0)
    return fewest
