"""A logical batch that comes in several parts: what there is of it so far, in this process's memory alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from tfdpfl._variables import in_memory
from tfdpfl.optimizers._step_table import DATA, SAMPLING, UNKNOWN, BatchSampling

__all__ = ["GradientAccumulator", "Part", "Table", "no_rows"]

# Sums of a table's rows: one for each lookup, which are still to be added up; or all rows of the table.
Table: TypeAlias = tf.IndexedSlices | tf.Tensor | tf.Variable


@dataclasses.dataclass
class Part:
    """Holds what one batch brings: clipped sums without noise, and what goes with them.

    Attributes:
      sums: tensors, of which one unit moves all together by no more than the clip; and what is counted beside them.
      tables: more of these sums, of tables of which only some rows are released.
      units: how many units there were, float32.
      drawn: how the batch was drawn.
      multiplier: the noise's standard deviation over the sensitivity to one example, float64.
      bound: the clip.
    """

    sums: list[tf.Tensor]
    tables: list[Table]
    units: tf.Tensor
    drawn: BatchSampling
    multiplier: tf.Tensor
    bound: tf.Tensor


class GradientAccumulator:
    """The parts of one logical batch that have come so far, for steps on the same variables.

    Two states without noise, or with the same noise, tell the examples between them. So these variables are in no
    file: a restart begins the logical batch anew. (No tf.Module, which would be saved.)
    """

    def __init__(self, parts: int, part: Part, in_turns: bool = False):
        """Makes room for the parts.

        Args:
          parts: of a logical batch.
          part: one of them.
          in_turns: whether it counts which logical batch of a pass comes when. If one of them was given up, the next
            one is of no known sampling.
        """
        self.parts, self._in_turns = parts, in_turns
        make = lambda like: in_memory(np.zeros(like.shape, like.dtype.as_numpy_dtype))  # noqa: E731
        self.at, self.mismatched = in_memory(np.int64(0)), in_memory(np.int64(0))
        self.sums = [make(s) for s in part.sums]
        self.tables = [in_memory(np.zeros(_shape(t), t.dtype.as_numpy_dtype)) for t in part.tables]
        self.units, self.multiplier, self.known = make(part.units), make(part.multiplier), make(part.drawn.known)
        self.bound = make(part.bound)

    def add(
        self, part: Part, done: Callable[[Part], list[tf.Tensor]], until: Callable[[], list[tf.Tensor]]
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Adds a part. Returns what ``done`` makes of the whole, what ``until`` makes before the last part; and how
        many parts are there now, 0 after the last."""
        drawn = part.drawn
        pending = tf.convert_to_tensor(self.at)
        at = tf.where(tf.equal(drawn.place, 0), tf.zeros([], tf.int64), pending)
        first = tf.equal(at, 0)
        # Parts that were drawn in different ways, or nobody knows how, or are not those that belong together, are of no
        # known sampling. Each holds an example once, all of them may hold the same one.
        so_far = lambda kept: tf.where(first, tf.zeros_like(kept), kept)  # noqa: E731
        here = so_far(tf.convert_to_tensor(self.known))
        same = first | tf.reduce_all(tf.equal(here[:-1], drawn.known[:-1]))
        same &= tf.not_equal(drawn.known[SAMPLING - DATA], UNKNOWN)
        same &= (drawn.place < 0) | tf.equal(drawn.place, at)
        given_up = tf.convert_to_tensor(self.mismatched)
        mismatched = so_far(given_up) + tf.cast(~same, tf.int64)
        if self._in_turns:
            mismatched = tf.maximum(mismatched, tf.where(pending > 0, given_up, tf.zeros_like(given_up)))
        known = tf.concat([drawn.known[:-1], tf.maximum(drawn.known[-1:], here[-1:])], 0)
        known = tf.where(mismatched > 0, tf.zeros_like(known), known)
        units = part.units + so_far(tf.convert_to_tensor(self.units))
        multiplier = tf.where(first, part.multiplier, tf.minimum(part.multiplier, self.multiplier))
        bound = tf.maximum(part.bound, so_far(tf.convert_to_tensor(self.bound)))
        now = (at + 1) % self.parts
        for variable, value in (
            (self.at, now), (self.mismatched, mismatched), (self.known, known), (self.units, units),
            (self.multiplier, multiplier), (self.bound, bound),
        ):  # fmt: skip
            variable.assign(value)

        def whole() -> list[tf.Tensor]:
            sums = [kept + s for kept, s in zip(self.sums, part.sums, strict=True)]
            price = tf.where(mismatched > 0, multiplier / self.parts, multiplier)
            # The noise is of the last part's clip. An adaptive one that was loaded since is another.
            price *= tf.cast(part.bound / bound, tf.float64)
            add_rows()
            return done(Part(sums, list(self.tables), units, dataclasses.replace(drawn, known=known), price, bound))

        def add_rows() -> None:
            for kept, t in zip(self.tables, part.tables, strict=True):
                kept.scatter_add(t) if isinstance(t, tf.IndexedSlices) else kept.assign_add(t)

        def keep() -> list[tf.Tensor]:
            def begin() -> tf.Tensor:
                for kept, s in zip(self.sums, part.sums, strict=True):
                    kept.assign(s)
                for kept in self.tables:
                    kept.assign(tf.zeros(kept.shape, kept.dtype))
                return tf.zeros([])

            def go_on() -> tf.Tensor:
                for kept, s in zip(self.sums, part.sums, strict=True):
                    kept.assign_add(s)
                return tf.zeros([])

            tf.cond(first, begin, go_on)
            add_rows()
            return until()

        return tf.cond(tf.equal(now, 0), whole, keep), now

    def belongs_to(self, batches: Sequence[float] | None) -> bool:
        """Returns whether all parts were drawn in this way."""
        return batches is not None and not int(self.mismatched) and self.known.numpy()[:-1].tolist() == list(batches)

    def drop(self) -> None:
        self.at.assign(0)


def _shape(table: Table) -> tuple[int, int]:
    """Returns how many rows a table has, and how many entries each of them."""
    if isinstance(table, tf.IndexedSlices):
        return int(tf.get_static_value(table.dense_shape)[0]), table.values.shape[1]
    return tuple(table.shape)


def no_rows(table: Table) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns no rows of a table, and their numbers."""
    return tf.zeros([0, _shape(table)[1]], table.dtype), tf.zeros([0], tf.int64)
