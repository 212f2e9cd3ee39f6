"""What belongs to one process alone, and is made anew in a forked child."""

from __future__ import annotations

import os
import weakref
from typing import Any

_OWNED: weakref.WeakSet[Any] = weakref.WeakSet()


def renew_after_fork(owner: Any) -> None:
    """Has ``owner._renew()`` called in every child that this process forks."""
    _OWNED.add(owner)


def _renew() -> None:
    for owner in list(_OWNED):
        owner._renew()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_renew)
