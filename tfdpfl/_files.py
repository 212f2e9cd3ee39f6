"""Files that outlive a crash: replaced as a whole, synced to the disk, held by one process at a time. No TFF here."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

from tfdpfl._chain import Chain
from tfdpfl._types import Json
from tfdpfl.errors import PrivacyError

__all__ = ["Lines", "lock", "marker", "refuse_lost", "replace", "sync", "sync_tree", "whole_lines"]

_HELD = (errno.EWOULDBLOCK, errno.EACCES)


def lock(file: IO, name: str, path: str | os.PathLike, wait: bool = False) -> None:
    """Locks an open file until this process closes it or ends, however that happens.

    Args:
      file: open for writing.
      name: the argument that named the file, for the error message.
      path: its value.
      wait: whether to wait for another process that holds the lock.

    Raises:
      ValueError: another process holds the lock, or the file system has none.
    """
    import fcntl  # of POSIX alone: elsewhere files can be replaced

    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in _HELD:
            raise ValueError(
                f"{name}={os.fspath(path)!r} is in use by another process. Both would write over each other's rounds. "
                "Give each training its own. If that process was left over when its server was killed, end it."
            ) from None
        raise ValueError(
            f"{name}={os.fspath(path)!r} is on a file system that cannot lock files ({error.strerror}). A second "
            "process could write over the rounds of the first, which would then be in no epsilon. Use a folder on a "
            "local disk, or mount the file system with locks."
        ) from error


def sync(path: Path) -> None:
    """Waits until a file is on the disk, or the names in a folder are."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Waits until a folder and all that it holds are on the disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def replace(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Replaces a file, all or nothing, by what ``write`` writes; it is on the disk afterwards, for its owner alone."""
    new = path.with_name(path.name + ".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    sync(path.parent)


def marker(path: Path) -> Path:
    """Returns the empty file beside a file of spending that shows that it was made once."""
    return path.with_name(path.name + ".made")


def refuse_lost(path: Path, name: str, given: str | os.PathLike, missing: str) -> None:
    """Raises if a file of spending was made once, and is gone.

    Args:
      path: where it was.
      name: the argument that named it, for the error message.
      given: the argument's value.
      missing: what ε would lack.

    Raises:
      PrivacyError: the `marker` is there.
    """
    made = marker(path)
    if made.exists():
        raise PrivacyError(
            f"{name}={os.fspath(given)!r} is gone or empty, but {made.name} shows that it was there. Epsilon would "
            f"lack {missing}. Restore it from a backup, or delete {os.fspath(made)!r} if nobody took part."
        )


def whole_lines(data: bytes) -> bytes:
    """Returns the lines that have an end. Nothing was done before a line was whole, so what follows is no damage."""
    return data[: data.rfind(b"\n") + 1]


class Lines:
    """A file of lines that this process holds and adds to; a line is on the disk before it counts.

    Args:
      path: the file, which is made for its owner alone if it is not there.
      name: the argument that named it, for error messages.
      given: the argument's value.

    Attributes:
      new: whether the file was made.
      held: what it held.

    Raises:
      ValueError: another process holds the file, or it cannot be locked.
    """

    def __init__(self, path: Path, name: str, given: str | os.PathLike):
        self.new, self._path, self._process = not path.exists(), path, os.getpid()
        self._what = f"{name}={os.fspath(given)!r}"
        self._file = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)  # noqa: SIM115
        try:
            lock(self._file, name, given)
            self.held = self._file.read()
        except BaseException:
            self.close()
            raise
        self._end = len(whole_lines(self.held))

    def append(self, line: Json, chain: Chain) -> None:
        """Adds a line, and its hash.

        Raises:
          OSError: it cannot be written; then it does not count, now or later.
          PrivacyError: this process is a fork of the one that opened the file.
        """
        if os.getpid() != self._process:
            raise PrivacyError(
                f"{self._what} is of the process that this one was forked from: both would write over each other's "
                "rounds. Open it in the process that trains."
            )
        text = chain.seal(line)
        self._file.truncate(self._end)  # what an append that failed has left
        self._file.seek(self._end)
        written = self._file.write(text)
        if written < len(text):
            raise OSError(errno.ENOSPC, f"{written} of {len(text)} bytes written", str(self._path))
        os.fsync(self._file.fileno())
        self._end += len(text)
        chain.add(text)

    def close(self) -> None:
        self._file.close()
