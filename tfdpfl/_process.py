"""Keeps apart what a process must not share with the one that it was forked from."""

from __future__ import annotations

import os
import weakref

__all__ = ["renew_after_fork"]

_OBJECTS: weakref.WeakSet = weakref.WeakSet()


def renew_after_fork(obj) -> None:
    """Has ``obj._renew()`` called in every process that is forked from this one, as long as ``obj`` lives.

    It must be quick and must not wait for TensorFlow's threads, which no fork takes along: processes that load data
    are forks too. On a system without fork nothing is called.
    """
    _OBJECTS.add(obj)


def _renew() -> None:
    errors = []
    for obj in list(_OBJECTS):
        try:
            obj._renew()
        except Exception as error:  # the others are to be renewed all the same
            errors.append(error)
    if errors:
        raise errors[0]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
