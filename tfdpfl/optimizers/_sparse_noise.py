"""Noise on those rows alone of large tables that noisy counts choose (`tfdpfl.AdaFEST`)."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdpfl.clipping import graph as graph_tools
from tfdpfl.clipping.engine import LEAST_CLIP
from tfdpfl.clipping.graph import compiled
from tfdpfl.clipping.pipeline import ClippedGradients, ClippingPipeline
from tfdpfl.clipping.step_checks import name_of
from tfdpfl.embeddings import AdaFEST
from tfdpfl.errors import PrivacyError
from tfdpfl.optimizers._accumulator import Table
from tfdpfl.optimizers._clips import clipping_of
from tfdpfl.optimizers._fresh_noise import FreshNoise
from tfdpfl.optimizers._settings import Settings

__all__ = ["SparseNoise"]

_OTHERS = "or give AdaFEST(tables=...) the layers of the others"


class SparseNoise(FreshNoise):
    """Trains those rows alone of large tables that many examples look up, so that only these rows need noise.

    The released values are a function of the counts with their noise, and of the sums with theirs. Noise on rows that
    are left out need not be drawn, since nothing depends on it. A row is kept or not whether or not anyone looked it
    up.
    """

    draws = 3  # the sums' noise, the counts' and the rows'
    sparse: AdaFEST

    def __init__(self, settings: Settings, given: AdaFEST):
        super().__init__(settings)
        self.sparse = given

    @classmethod
    def parse(cls, given: object) -> AdaFEST | None:
        if isinstance(given, dict):
            return AdaFEST(**given)
        if given is not None and not isinstance(given, AdaFEST):
            raise ValueError(f"sparse={given!r} must be None, or tfdpfl.AdaFEST.")
        return given

    @property
    def label(self) -> str:
        return f"sparse={self.sparse!r}"

    def check(self) -> None:
        size, clipping = self.settings.expected_batch_size or 1.0, clipping_of(self.settings.l2_norm_clip)
        for z in self.settings.noises:
            left, _ = self.sparse.split(z)
            try:
                clipping.split(left, size)
            except ValueError as error:
                raise ValueError(f"{error} ({self.label} leaves {left:g} of noise_multiplier={z:g})") from None

    def multiplier_of_sums(self, noise_multiplier: float | tf.Tensor) -> float | tf.Tensor:
        return self.sparse.split(noise_multiplier)[0]

    def tables_of(self, plan: ClippingPipeline, variables: Sequence) -> list[int]:
        if compiled():
            raise PrivacyError(
                "sparse=AdaFEST in a step that XLA compiles: the number of rows is known only while the step runs. "
                "Compile the model with jit_compile=False."
            )
        found, names = plan.looked_up(), self.sparse.tables
        layers = {i: f"/{name_of(variables[i]).rpartition('/')[0]}/" for i in found}
        fits = {name: [i for i in found if f"/{name}/" in layers[i]] for name in names or ()}
        if names is not None:
            found = sorted({i for places in fits.values() for i in places}) if all(fits.values()) else []
        if not found:
            have = ", ".join(layer.strip("/") for layer in layers.values()) or "none"
            raise PrivacyError(
                f"{self.label} finds none of its tables: the model looks up rows in the weights of {have}. Leave "
                "sparse out, or name these layers."
            )
        plan.leave_in_rows(found)
        return found

    def counts(
        self, plan: ClippingPipeline, clipped: ClippedGradients, tables: list[int], variables: Sequence
    ) -> list[tf.Tensor]:
        _check_tables(clipped, tables, variables)
        # One without a finite gradient, or without any, is as if it was not there.
        absent = clipped.absent | ~tf.math.is_finite(clipped.norms) | (clipped.norms <= LEAST_CLIP)
        return plan.clipped_counts(tables, self.sparse.clip, absent)

    def rows(
        self, noise_multiplier: float | tf.Tensor, stddev: tf.Tensor, divisor: tf.Tensor | None,
        counts: list[tf.Tensor], tables: list[Table], keys: tf.Tensor | None,
    ) -> list[tf.Tensor]:  # fmt: skip
        of_counts, of_rows = (None, None) if keys is None else tf.unstack(keys)
        noisy = self.settings.least_noise > 0
        if noisy:
            deviation = tf.cast(self.sparse.split(noise_multiplier)[1], tf.float32) * self.sparse.clip
            normals = self.source.gaussian([c.shape for c in counts], deviation, of_counts)
            counts = [tf.cast(c, n.dtype) + n for c, n in zip(counts, normals, strict=True)]
        chosen = [graph_tools.released(tf.where(c >= self.sparse.threshold)[:, 0]) for c in counts]
        totals = [_total(table, rows, c.shape[0]) for table, rows, c in zip(tables, chosen, counts, strict=True)]
        if divisor is not None:
            totals = [total / tf.cast(divisor, total.dtype) for total in totals]
        if noisy:
            sizes = [tf.size(total) for total in totals]
            drawn = tf.split(self.source.of_length(tf.add_n(sizes), stddev, of_rows), sizes)
            # In the noise's type: a sum of float64 weights would keep digits that no noise covers.
            totals = [
                tf.cast(tf.cast(t, n.dtype) + tf.reshape(n, tf.shape(t)), t.dtype)
                for t, n in zip(totals, drawn, strict=True)
            ]
        return [part for total, rows in zip(totals, chosen, strict=True) for part in (total, rows)]


def _total(table: Table, rows: tf.Tensor, size: int) -> tf.Tensor:
    """Returns the sums for those rows of a table of ``size`` rows that are kept."""
    if not isinstance(table, tf.IndexedSlices):
        return tf.gather(table, rows)
    # Each row's place among those kept; what is in none falls out of the sum.
    number = tf.size(rows)
    place = tf.scatter_nd(rows[:, None], tf.range(1, number + 1), [size])
    return tf.math.unsorted_segment_sum(table.values, tf.gather(place, table.indices) - 1, number)


def _check_tables(clipped: ClippedGradients, tables: list[int], variables: Sequence) -> None:
    """Raises a `PrivacyError` for a table whose gradient is of more rows than were looked up."""
    for i in tables:
        if not isinstance(clipped.sum[i], tf.IndexedSlices):
            raise PrivacyError(
                f"The table {name_of(variables[i])!r} has a use that is no lookup of rows (tied weights, or a product "
                f"with the whole table), so sparse=AdaFEST cannot leave rows out. Untie it, {_OTHERS}."
            )
        if clipped.regularization[i] is not None:
            raise PrivacyError(
                f"The table {name_of(variables[i])!r} has a regularizer, whose gradient has all rows, so "
                f"sparse=AdaFEST cannot leave rows out. Leave it out, {_OTHERS}."
            )
