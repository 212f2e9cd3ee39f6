"""Files that outlive a crash: replaced as a whole, synced to the disk, held by one process at a time. No TFF here."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

__all__ = ["lock", "replace", "sync", "sync_tree"]

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
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in _HELD:
            raise ValueError(
                f"{name}={os.fspath(path)!r} is in use by another process. Both would write over each other's rounds. "
                "Give each training its own."
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
