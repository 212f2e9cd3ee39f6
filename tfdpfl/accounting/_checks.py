"""Checks of arguments: each failure is one sentence with the argument, its value and the remedy."""

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, TypeVar

__all__ = ["choice", "keep", "known", "optional", "probability", "put", "real", "whole"]

T = TypeVar("T")


def keep(owner: object, field: str, value: object) -> None:
    """Sets a field of a frozen dataclass."""
    object.__setattr__(owner, field, value)


def put(owner: object, check: Callable, field: str, *remedy: Any, **bounds: float) -> None:
    """Checks a field of a frozen dataclass by a function of this module, and keeps what that returns."""
    keep(owner, field, check(field, getattr(owner, field), *remedy, **bounds))


def known(owner: object, check: Callable, field: str, *remedy: Any, **bounds: float) -> None:
    """Does the same where the field is not None."""
    keep(owner, field, optional(check, field, getattr(owner, field), *remedy, **bounds))


def optional(check: Callable[..., T], name: str, value: object, *remedy: Any, **bounds: float) -> T | None:
    """Returns what a function of this module returns of `value`, or None for None."""
    return None if value is None else check(name, value, *remedy, **bounds)


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
