"""Tells a person at a terminal or a notebook what a call does that takes more than a second."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

__all__ = ["explain_wait"]

_PATIENCE = 1.0  # seconds


@contextlib.contextmanager
def explain_wait(doing: str) -> Iterator[None]:
    """Prints what is being done to standard error if it takes longer than a second.

    Logs of programs get nothing: nobody waits there.
    """
    if not (sys.stderr.isatty() or "ipykernel" in sys.modules):
        yield
        return
    timer = threading.Timer(_PATIENCE, lambda: print(f"tfdpfl: {doing} ...", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
