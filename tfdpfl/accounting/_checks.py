"""Checks of arguments: each failure is one sentence with the argument, its value and the remedy."""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

__all__ = ["choice", "probability", "real", "whole"]


def whole(name: str, value: Any, minimum: int, remedy: str) -> int:
    """Returns `value` as an int, or raises a `ValueError` when it is no whole number from `minimum` up."""
    number = _real(value)
    if not math.isfinite(number) or number != int(number) or number < minimum:
        raise ValueError(f"{name} must be a whole number of at least {minimum}, got {value!r}: {remedy}")
    return int(value)


def real(name: str, value: object, remedy: str, *, at_least: float | None = None, above: float | None = None) -> float:
    """Returns `value` as a float, or raises a `ValueError` when it is not finite or not over the bound that
    is given.
    """
    number = _real(value)
    fits = (at_least is None or number >= at_least) and (above is None or number > above)
    if not (math.isfinite(number) and fits):
        bound = "" if above is None else f" above {above:g}"
        bound = bound if at_least is None else f" of at least {at_least:g}"
        raise ValueError(f"{name} must be a finite number{bound}, got {value!r}: {remedy}")
    return number


def probability(name: str, value: object, remedy: str) -> float:
    """Returns `value` as a float, or raises a `ValueError` when it is not strictly between 0 and 1."""
    number = _real(value)
    if not 0 < number < 1:
        raise ValueError(f"{name} must be strictly between 0 and 1, got {value!r}: {remedy}")
    return number


def choice(name: str, value: object, choices: Sequence[str]) -> str:
    """Returns the one of `choices` that `value` names, whatever its case, or raises a `ValueError`."""
    if not isinstance(value, str) or value.lower() not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return value.lower()


def _real(value: object) -> float:
    # A bool is a Real in Python; as a count or a σ it is a slip.
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
