"""Keeps what a server has released, on disk before anyone sees it. No Flower here.

A journal is a file of lines of JSON. ``begin`` is written before a round's messages are sent, ``charge`` before its
result is released. A round that was begun and never charged was never released. Beside it lies the last model, in a
file that is replaced at once, and what correlated noise keeps of earlier rounds.

Since version 2 the lines are chained by hashes. The model holds the hash of the journal that it belongs to.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tfdpfl import _files, _formats
from tfdpfl._chain import Chain
from tfdpfl._formats import NewerFormatError
from tfdpfl._types import Json, JsonValue
from tfdpfl.errors import PrivacyError

__all__ = ["VERSION", "DamagedError", "Journal", "Record", "rounds_of_model"]

VERSION = 2  # of the lines; files of before lines had a version hold settings as their `repr`
_HASHED = 2  # the first version whose lines have a hash


class DamagedError(ValueError):
    """A journal holds a line that is none, or is not where it belongs. ``record`` has what stands before it."""

    def __init__(self, said: str, record: Record, line: int):
        super().__init__(said)
        self.record, self.line = record, line


class Record:
    """Holds what a journal says: the cohorts of the rounds that were charged, in order, and the number of evaluations.

    Attributes:
      header: the settings, described.
      versions: of the file's lines, in order; a file without any is of before there were versions.
      charged, replied: the clients of each charged round, and those whose update is in its sum.
      begun: a cohort whose round was not charged.
      chain: the hashes of the lines.
    """

    def __init__(self) -> None:
        self.header: Json = {}
        self.versions: list[Json] = []
        self.charged: list[list[str]] = []
        self.replied: list[list[str]] = []
        self.evaluations = self.lines = 0
        self.begun: list[str] | None = None
        self.run = ""  # its name; a file from before runs had names is named by its first line
        self.chain = Chain()

    def read(self, text: bytes, what: str) -> Record:
        """Reads whole lines.

        Args:
          text: the file without what follows its last newline.
          what: names the file, at the beginning of a sentence.

        Raises:
          DamagedError: a line is damaged.
          NewerFormatError: a line is of a newer version.
        """
        for number, line in enumerate(text.splitlines(keepends=True), 1):
            try:
                self._line(line, what)
            except NewerFormatError:
                raise
            except (ValueError, KeyError, TypeError) as error:
                kind = "is no ledger of a strategy" if number == 1 else f"is damaged at line {number}"
                raise DamagedError(
                    f"{what} {kind} ({error}), so rounds that were released may be missing from epsilon. Restore it "
                    "from a backup. `tfdpfl ledger verify` shows what is left.", self, number,
                ) from error  # fmt: skip
        return self

    def fault_of_model(self, what: str, about: Json, unread: int = 0) -> str:
        """Returns why a saved model does not belong to these lines; nothing if it does.

        Args:
          what: names the file.
          about: what the model says of itself.
          unread: how many more rounds the file may have charged.
        """
        rounds = len(self.charged) + unread
        if rounds_of_model(about) > rounds:
            return (
                f"The saved model came after {rounds_of_model(about)} charged rounds, but {what} has {rounds}. The "
                "rounds that this older copy lacks would be in no epsilon. Restore the newest ledger, or begin another "
                "training with another ledger_path."
            )
        if about.get("ledger", self.chain.digest) not in self.chain.digests:  # older models do not name their ledger
            return (
                f"{what} lacks lines that it had when the model next to it was saved, so rounds that were released may "
                "be missing from epsilon. One of the two files is an older copy, or of another training. Restore the "
                "newest of both, or begin another training with another ledger_path."
            )
        return ""

    def _line(self, line: bytes, what: str) -> None:
        held = json.loads(line)
        if not isinstance(held, dict):
            raise ValueError("it is no JSON object")
        if "version" in held:
            _formats.refuse_newer(what, held, VERSION)  # first: hashes of a newer version may be others
        self.chain.check(line, held.get("version", 0) >= _HASHED)
        held.pop("sha256", None)
        if not self.lines:
            self.header = dict(held["header"])
            self.run = str(held.get("run") or hashlib.sha256(line).hexdigest()[:16])
            if "version" not in held and "evaluations" in self.header:  # it was None for exact evaluations
                self.header["evaluations"] = self.header["evaluations"] or "unprotected"
        if "version" in held:
            self.versions.append(held)
        elif self.lines:
            self._round(held)
        self.chain.add(line)
        self.lines += 1

    def _round(self, held: Json) -> None:
        if held.get("begin") == len(self.charged):
            self.begun = held["cohort"]
        elif held.get("charge") == len(self.charged) and self.begun is not None:
            self.charged.append(self.begun)
            self.replied.append(held["replied"])
            self.begun = None
        elif held.get("evaluation") == self.evaluations:
            self.evaluations += 1
        else:
            raise ValueError(f"{json.dumps(held)[:99]} cannot follow {len(self.charged)} charged rounds")


def rounds_of_model(about: Json) -> int:
    """Returns how many charged rounds a saved model came after."""
    # Older files have the round alone, which is no smaller: a round may fail before it is charged.
    known = about["charged"] if "charged" in about else about.get("rounds", 0)
    return int(known)


class Journal(Record):
    """A journal that goes on: each line is on the disk when it counts.

    Args:
      path: the file; None keeps all in memory.
      header: the settings that may not change from one run to the next. An entry that is at its default is None, so
        that a file from before there was such an entry goes on.

    Raises:
      PrivacyError: the file is of a training with another header, or of a newer release in a way that this one does
        not know.
      ValueError: the file is in use, cannot be locked, or is no journal.
    """

    def __init__(self, path: str | os.PathLike | None, header: Mapping[str, JsonValue]):
        super().__init__()
        self._file: _files.Lines | None = None
        self._path = None if path is None else Path(path)
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _files.Lines(self._path, "ledger_path", self._path)
        try:
            self._resume(header)
        except BaseException:
            self.close()
            raise

    def begin(self, cohort: list[str]) -> None:
        self._append({"begin": len(self.charged), "cohort": cohort})
        self.begun = cohort

    def charge(self, replied: list[str]) -> None:
        assert self.begun is not None
        self._append({"charge": len(self.charged), "replied": replied})
        self.charged.append(self.begun)
        self.replied.append(replied)
        self.begun = None

    def charge_evaluation(self) -> None:
        self._append({"evaluation": self.evaluations})
        self.evaluations += 1

    def save(self, arrays: Mapping[str, np.ndarray], about: Mapping[str, JsonValue]) -> None:
        """Replaces the last model, all or nothing."""
        if self._path is None:
            return
        named: Json = {f"array/{name}": value for name, value in arrays.items()}
        about = {**about, "ledger": self.chain.digest}
        self._replace(self._model, {"about": np.array(json.dumps(about)), **named})

    def load(self) -> tuple[dict[str, np.ndarray], Json] | None:
        """The last model, and what was said about it; None if there is none.

        Raises:
          PrivacyError: the journal lacks rounds, or lines, that it had when the model was saved.
          ValueError: the model cannot be read.
        """
        if self._path is None or not self._model.exists():
            return None
        try:
            with np.load(self._model, allow_pickle=False) as saved:
                arrays = {name.removeprefix("array/"): saved[name] for name in saved if name != "about"}
                about = json.loads(str(saved["about"]))
        except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"The saved model {self._model} cannot be read ({error}). Without it the training cannot go on after "
                f"its {len(self.charged)} charged rounds. Restore the file from a backup, or delete it to begin again "
                "from initial_arrays: the ledger keeps the rounds."
            ) from error
        fault = self.fault_of_model(f"ledger_path={str(self._path)!r}", about)
        if fault:
            raise PrivacyError(fault)
        return arrays, about

    def keep(self, rounds: int, past: Sequence[np.ndarray]) -> None:
        """Keeps what noise needs of ``rounds`` rounds, before the last is charged. That of one round less stays: it is
        what counts if the last is never charged."""
        if self._path is None:
            return
        self._replace(self._noise(rounds), {str(i): value for i, value in enumerate(past)})
        self._noise(rounds - 2).unlink(missing_ok=True)

    def kept(self, rounds: int) -> list[np.ndarray]:
        """Returns what `keep` had for so many rounds.

        Raises:
          PrivacyError: it is gone.
        """
        if self._path is None or not self._noise(rounds).exists():
            raise PrivacyError(
                f"The correlated noise of the first {rounds} rounds is not next to ledger_path. Without it the next "
                "round could take none of it back. Restore the file, or begin a training of its own with another path."
            )
        with np.load(self._noise(rounds), allow_pickle=False) as saved:
            return [saved[str(i)] for i in range(len(saved))]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def _model(self) -> Path:
        assert self._path is not None
        return self._path.with_name(self._path.name + ".npz")

    def _noise(self, rounds: int) -> Path:
        assert self._path is not None
        return self._path.with_name(f"{self._path.name}.noise-{rounds}.npz")

    def _replace(self, path: Path, named: Json) -> None:
        _files.replace(path, lambda file: np.savez(file, **named))

    def _resume(self, header: Mapping[str, JsonValue]) -> None:
        assert self._file is not None and self._path is not None
        what, whole = f"ledger_path={str(self._path)!r}", _files.whole_lines(self._file.held)
        if not whole:
            if self._model.exists():
                raise ValueError(f"{self._model} has a model but {self._path} no ledger. Restore it, or give another.")
            if not self._file.new:
                raise ValueError(
                    f"{what} holds {len(self._file.held)} bytes and no whole line. A ledger has one from its "
                    "beginning, so rounds that were released may be missing. Restore the file from a backup, or delete "
                    "it if no round has run."
                )
            self.run, self.header = secrets.token_hex(8), _formats.describe(header)
            self._append({**_formats.stamp(VERSION), "run": self.run, "header": self.header})
            _files.sync(self._path.parent)
            return
        self.read(whole, what)
        _formats.refuse_others(
            what, self.header, header,
            "its rounds would be priced wrongly. Continue with the same, or take another path.",
        )  # fmt: skip
        if max((line["version"] for line in self.versions), default=0) < VERSION:
            self._append(_formats.stamp(VERSION))  # the lines that follow are of this version

    def _append(self, line: Json) -> None:
        """Raises `OSError` where it cannot be written; then it does not count, now or later."""
        if self._file is not None:
            self._file.append(line, self.chain)
