"""ε as a number that cannot lose its warning when it is printed."""

from __future__ import annotations

from typing import Any

from tfdpfl._types import Json
from tfdpfl.accounting.promises import Promise, fixed

__all__ = ["WARNING", "Epsilon", "votes_promise"]

_COVERED = (
    "Covered: the answers to the student's queries, the student, and what is computed from them.",
    "Not covered: the teachers and their votes, any figure that was computed from the votes, and the student's "
    "examples, which are taken for public.",
)
_PRIVATE = "drawn from private votes, not to be published"

WARNING = "data-dependent, not to be published"


def votes_promise(private: bool = False, **more: Any) -> Promise:
    """Returns what PATE guarantees. If the figures are `private`, so is the number of queries."""
    if private:
        more |= {"withheld": _PRIVATE, "mechanisms": []}
    more["notes"] = [*_COVERED, *more.get("notes", ())]
    return Promise(kind="PATE", adjacency="replace_one", unit="example", **more)


class Epsilon(float):
    """A float that says what it is: one that was computed from the votes says so in `repr`, `str` and f-strings.

    Attributes:
        delta: δ.
        data_dependent: Computed from the votes and not sanitised, hence itself private: it must not leave the
            house. `smooth_sensitivity_release` makes one that may.
        order: The Rényi order it was converted at; None where it comes from privacy loss distributions.

    `round` keeps the label; arithmetic gives plain floats, as does `float(epsilon)`.
    """

    delta: float
    data_dependent: bool
    order: float | None

    def __new__(cls, value: float, delta: float, data_dependent: bool = False, order: float | None = None) -> Epsilon:
        self = super().__new__(cls, value)
        self.delta, self.data_dependent, self.order = delta, data_dependent, order
        return self

    def __getnewargs__(self) -> tuple:
        return (float(self), self.delta, self.data_dependent, self.order)

    @property
    def warning(self) -> str:
        """Returns what must stand beside the figure; empty if it may be published."""
        return WARNING if self.data_dependent else ""

    def __repr__(self) -> str:
        return self._labelled(float.__repr__(self))

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return self._labelled(float.__format__(self, spec))

    def __round__(self, digits: int | None = None) -> Epsilon:  # type: ignore[override]
        return Epsilon(float.__round__(self, digits or 0), self.delta, self.data_dependent, self.order)

    def promises(self, delta: float, private: bool = False, **more: object) -> list[Promise]:
        """Returns what is guaranteed; see `tfdpfl.accounting.promises`."""
        price = fixed(self, self.delta, "pld" if self.order is None else "rdp")
        return [votes_promise(private or self.data_dependent, price=price, **more)]

    def to_dict(self) -> Json:
        """The figure with its label, ready for JSON."""
        return {"epsilon": float(self), "delta": self.delta, "order": self.order, "warning": self.warning or None}

    def _labelled(self, text: str) -> str:
        return f"{text} ({self.warning})" if self.data_dependent else text
