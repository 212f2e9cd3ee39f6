"""What a server has released, on disk before anyone sees it. No Flower here.

A journal is a file of lines of JSON. ``begin`` is written before a round's messages are sent, ``charge`` before its
result is released. What was begun and never charged was never released. Beside it lies the last model, in a file that
is replaced at once, and what correlated noise keeps of earlier rounds.
"""

from __future__ import annotations

import errno
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfdpfl import _formats
from tfdpfl.errors import PrivacyError
from tfdpfl.federated import files

_VERSION = 1  # of the lines; files of before lines had a version hold settings as their `repr`


class Journal:
    """The cohorts of the rounds that were charged, in order, and the number of charged evaluations.

    Args:
      path: the file; None keeps all in memory.
      header: the settings that may not change from one run to the next. An entry that is at its default is None, so
        that a file from before there was such an entry goes on.

    Raises:
      PrivacyError: the file is of a training with another header, or of a newer release in a way that this one does
        not know.
      ValueError: the file is in use, cannot be locked, or is no journal.
    """

    def __init__(self, path: str | os.PathLike | None, header: Mapping[str, Any]):
        self.charged: list[list[str]] = []
        self.replied: list[list[str]] = []  # those of each cohort whose update is in the sum
        self.evaluations = 0
        self.begun: list[str] | None = None  # a cohort whose round was not charged
        self._file: Any = None
        self._process = os.getpid()
        self._path = None if path is None else Path(path)
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT
        try:
            descriptor, new = os.open(self._path, flags | os.O_EXCL, 0o600), True
        except FileExistsError:
            descriptor, new = os.open(self._path, flags, 0o600), False
        self._file = open(descriptor, "r+b", buffering=0)  # noqa: SIM115
        try:
            files.lock(self._file, "ledger_path", self._path)
            self._read(header, new)
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

    def save(self, arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> None:
        """Replaces the last model, all or nothing."""
        if self._path is None:
            return
        named: dict[str, Any] = {f"array/{name}": value for name, value in arrays.items()}
        self._replace(self._model, {"about": np.array(json.dumps(about)), **named})

    def load(self) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
        """The last model, and what was said about it; None if there is none."""
        if self._path is None or not self._model.exists():
            return None
        try:
            with np.load(self._model, allow_pickle=False) as saved:
                arrays = {name.removeprefix("array/"): saved[name] for name in saved if name != "about"}
                return arrays, json.loads(str(saved["about"]))
        except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"the saved model {self._model} cannot be read ({error}). Without it the training cannot go on after "
                f"its {len(self.charged)} charged rounds. Restore the file from a backup, or delete it to begin again "
                "from initial_arrays: the ledger keeps the rounds"
            ) from error

    def keep(self, rounds: int, past: Sequence[np.ndarray]) -> None:
        """Keeps what noise needs of ``rounds`` rounds, before the last is charged. That of one round less stays: it is
        what counts if the last is never charged."""
        if self._path is None:
            return
        self._replace(self._noise(rounds), {str(i): value for i, value in enumerate(past)})
        self._noise(rounds - 2).unlink(missing_ok=True)

    def kept(self, rounds: int) -> list[np.ndarray]:
        """What `keep` had for so many rounds.

        Raises:
          PrivacyError: it is gone.
        """
        if self._path is None or not self._noise(rounds).exists():
            raise PrivacyError(
                f"the correlated noise of the first {rounds} rounds is not beside ledger_path: without it the next "
                "round could take none of it back. Restore the file, or begin a training of its own with another path"
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

    def _replace(self, path: Path, named: dict[str, Any]) -> None:
        files.replace(path, lambda file: np.savez(file, **named))

    def _read(self, header: Mapping[str, Any], new: bool) -> None:
        assert self._file is not None and self._path is not None
        text = self._file.read()
        whole = text[: text.rfind(b"\n") + 1]  # what follows was not written before anything was done
        self._end = len(whole)
        if not whole:
            if self._model.exists():
                raise ValueError(f"{self._model} has a model but {self._path} no ledger: restore it, or give another")
            if not new:
                raise ValueError(
                    f"ledger_path={str(self._path)!r} holds {len(text)} bytes and no whole line. A ledger has one from "
                    "its beginning, so rounds that were released may be missing. Restore the file from a backup, or "
                    "delete it if no round has run"
                )
            self._append({**_formats.stamp(_VERSION), "header": _formats.describe(header)})
            files.sync(self._path.parent)
            return
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            versions = [line for line in lines if "version" in line]
            saved = dict(lines[0]["header"])
            if "version" not in lines[0] and "evaluations" in saved:  # it was None for exact evaluations
                saved["evaluations"] = saved["evaluations"] or "unprotected"
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"ledger_path={str(self._path)!r} is no ledger of a strategy ({error})") from error
        for line in versions:
            _formats.refuse_newer(f"ledger_path={str(self._path)!r}", line, _VERSION)
        for name in {**header, **saved}:
            if not _formats.agrees(saved.get(name), header.get(name)):
                raise PrivacyError(
                    f"ledger_path={str(self._path)!r} is of a training with another {name}, {saved.get(name)}, not "
                    f"{_formats.describe(header.get(name))}: its rounds would be priced wrongly. Continue with the "
                    "same, or take another path"
                )
        for line in lines[1:]:
            if line.keys() == _formats.stamp(_VERSION).keys():
                continue
            if line.get("begin") == len(self.charged):
                self.begun = line["cohort"]
            elif line.get("charge") == len(self.charged) and self.begun is not None:
                self.charged.append(self.begun)
                self.replied.append(line["replied"])
                self.begun = None
            elif line.get("evaluation") == self.evaluations:
                self.evaluations += 1
            else:
                raise ValueError(f"ledger_path={str(self._path)!r} is damaged at {line}: restore it")
        if max((line["version"] for line in versions), default=0) < _VERSION:
            self._append(_formats.stamp(_VERSION))  # the lines that follow are of this version

    def _append(self, line: dict[str, Any]) -> None:
        """Raises `OSError` where it cannot be written; then it does not count, now or later."""
        if self._file is None:
            return
        if os.getpid() != self._process:
            raise PrivacyError(
                f"ledger_path={str(self._path)!r} is of the process that this one was forked from: both would write "
                "over each other's rounds. Make the strategy in the process that trains"
            )
        text = json.dumps(line).encode() + b"\n"
        self._file.truncate(self._end)  # what an append that failed has left
        self._file.seek(self._end)
        written = self._file.write(text)
        if written < len(text):
            raise OSError(errno.ENOSPC, f"{written} of {len(text)} bytes written", str(self._path))
        os.fsync(self._file.fileno())
        self._end += len(text)
