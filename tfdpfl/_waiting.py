"""Tells a person at a terminal or a notebook what a call does that takes more than a second."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

__all__ = ["explain_wait", "is_watched"]

_PATIENCE = 1.0  # seconds
_thread = threading.local()  # explaining: whether a call around this one explains the wait already


def is_watched() -> bool:
    """Returns whether a person may look at standard error: at a terminal or a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


@contextlib.contextmanager
def explain_wait(doing: str) -> Iterator[None]:
    """Prints what is being done to standard error if it takes longer than a second.

    Logs of programs get nothing: nobody waits there. A call inside of another one that explains itself is silent.
    """
    if getattr(_thread, "explaining", False) or not is_watched():
        yield
        return
    _thread.explaining = True
    timer = threading.Timer(_PATIENCE, lambda: print(f"tfdpfl: {doing} ...", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        _thread.explaining = False
        timer.cancel()
