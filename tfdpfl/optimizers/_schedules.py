"""Noise multipliers and clips that change from step to step, and what such a training is priced by."""

from __future__ import annotations

import bisect
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfdpfl._types import Json
from tfdpfl.accounting import _checks

if TYPE_CHECKING:
    PiecewiseConstantDecay = Any  # of Keras, which has no types

__all__ = ["MOST_VALUES", "PiecewiseConstant", "PiecewiseConstantDecay", "schedule_of"]

MOST_VALUES = 32  # a row of the ledger's table for each, and room for other trainings


@dataclasses.dataclass(frozen=True)
class PiecewiseConstant:
    """A value that changes at given steps: Keras's `PiecewiseConstantDecay`, which is how it is given.

    Attributes:
      boundaries: updates after which the next value holds, rising: value i is that of the updates of number
        ``boundaries[i - 1] + 1`` to ``boundaries[i]``, from 0.
      values: one more than the boundaries.
    """

    boundaries: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def least(self) -> float:
        return min(self.values)

    def value(self, update: int) -> float:
        """Returns the value of the update of this number, from 0."""
        return self.values[bisect.bisect_left(self.boundaries, update)]

    def at(self, update: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Returns the same in a graph."""
        passed = tf.cast(update, tf.int64) > tf.constant(self.boundaries, tf.int64)
        return tf.gather(tf.constant(self.values, dtype), tf.reduce_sum(tf.cast(passed, tf.int32)))

    def spent(self, update: int, number: int) -> list[tuple[float, int]]:
        """Returns (value, how many) of so many updates from this one on."""
        ends = [min(max(b + 1, update), update + number) for b in self.boundaries] + [update + number]
        return [(v, b - a) for v, a, b in zip(self.values, [update, *ends], ends, strict=False) if b > a]

    def to_dict(self) -> Json:
        """Returns the schedule as JSON can hold it."""
        return {"schedule": "PiecewiseConstantDecay", "boundaries": list(self.boundaries), "values": list(self.values)}


def schedule_of(name: str, given: Any) -> PiecewiseConstant | None:
    """Returns a schedule as it was given, or as `PiecewiseConstant.to_dict` saved it; None for all else, but functions.

    Raises:
      ValueError: it is none that has a price, or its values are no positive numbers.
    """
    if isinstance(given, PiecewiseConstant):
        return given
    if isinstance(given, dict) and given.get("schedule") == "PiecewiseConstantDecay":
        boundaries, values = given["boundaries"], given["values"]
    elif type(given).__name__ == "PiecewiseConstantDecay":
        boundaries, values = given.boundaries, given.values
    elif callable(given) or isinstance(given, tf.keras.optimizers.schedules.LearningRateSchedule):
        raise ValueError(
            f"{name}={type(given).__name__}: if the value changes in each step, the ledger needs an entry for each "
            "step. Give a number, or keras.optimizers.schedules.PiecewiseConstantDecay(boundaries, values) of up to "
            f"{MOST_VALUES} values."
        )
    else:
        return None
    mend = "PiecewiseConstantDecay takes the numbers of updates, rising, and one value more, each above 0"
    bounds = tuple(_checks.whole("boundaries", int(b) if float(b).is_integer() else b, 0, mend) for b in boundaries)
    numbers = tuple(_checks.real(name, float(np.asarray(v)), mend, above=0) for v in values)
    if list(bounds) != sorted(set(bounds)) or len(numbers) != len(bounds) + 1 or len(numbers) > MOST_VALUES:
        raise ValueError(f"{name} with boundaries={bounds!r} and values={numbers!r}: {mend}, {MOST_VALUES} at most.")
    return PiecewiseConstant(bounds, numbers)
