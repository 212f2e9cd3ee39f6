"""Finds out who called: Keras tells neither callbacks what data it trains on, nor optimizers which model."""

import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from tfdpfl._types import Callback, Keywords, Model, Optimizer

__all__ = ["PLAN", "callbacks_of", "callers", "optimizer_of", "running_fits"]

PLAN = "tfdpfl_plan"
"""The attribute by which the pieces of a `tfdpfl.plan` know it."""


def callers() -> Iterator[FrameType]:
    """The frames around the function that asks, the nearest first.

    Its own is left out. A variable of its loop would hold it, and with it the data of the running `fit`, until Python
    looks for cycles.
    """
    frame: FrameType | None = sys._getframe(1).f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def running_fits() -> Iterator[Keywords]:
    """The arguments of the calls of `fit` that are running, the innermost first."""
    return (frame.f_locals for frame in callers() if frame.f_code.co_name == "fit")


def optimizer_of(model: Model) -> Optimizer:
    """The optimizer of a model, out of its loss-scaling wrapper if there is one."""
    optimizer = getattr(model, "optimizer", None)
    return getattr(optimizer, "inner_optimizer", optimizer)


def callbacks_of(call: Mapping[str, Any]) -> list[Callback]:
    """The callbacks of a call of `fit`, which Keras puts into a list of its own."""
    given = call.get("callbacks")
    return list(getattr(given, "callbacks", given) or ())
