"""Finds out who called: Keras tells neither callbacks what data it trains on, nor optimizers which model."""

import sys
from collections.abc import Iterator
from types import FrameType

from tfdpfl._types import Keywords, Model

__all__ = ["PLAN", "callers", "running_fits", "trained_by"]

PLAN = "tfdpfl_plan"
"""The attribute by which the pieces of a `tfdpfl.plan` know it."""


def callers() -> Iterator[FrameType]:
    """The frames around the function that asks, the nearest first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def running_fits() -> Iterator[Keywords]:
    """The arguments of the calls of `fit` that are running, the innermost first."""
    return (frame.f_locals for frame in callers() if frame.f_code.co_name == "fit")


def trained_by(fit: Keywords) -> Model:
    """The optimizer of the model of a running `fit`, out of its loss-scaling wrapper if there is one."""
    optimizer = getattr(fit.get("self"), "optimizer", None)
    return getattr(optimizer, "inner_optimizer", optimizer)
