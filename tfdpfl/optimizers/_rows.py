"""The rows of large tables that a step trains, chosen by noisy counts (`tfdpfl.AdaFEST`)."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdpfl import noise
from tfdpfl.clipping import graph as graph_tools
from tfdpfl.clipping.engine import LEAST_CLIP
from tfdpfl.clipping.finished import name_of, raw_variable
from tfdpfl.clipping.gradients import compiled
from tfdpfl.clipping.plan import ClippedGradients, Plan
from tfdpfl.embeddings import AdaFEST
from tfdpfl.errors import PrivacyError

_OTHERS = "or give AdaFEST(tables=...) the layers of the others"


def tables_of(given: AdaFEST, plan: Plan, variables: Sequence) -> list[int]:
    """The places of the tables among the variables, whose sums the plan then leaves in rows.

    Raises:
      PrivacyError: there are none, or the step cannot choose rows.
    """
    if compiled():
        raise PrivacyError(
            "sparse=AdaFEST in a step that XLA compiles: how many rows are kept is known only while it runs. Compile "
            "the model with jit_compile=False."
        )
    found = plan.looked_up()
    layers = {i: f"/{name_of(variables[i]).rpartition('/')[0]}/" for i in found}
    for name in given.tables or ():
        if not any(f"/{name}/" in layer for layer in layers.values()):
            found = []
    if given.tables is not None:
        found = [i for i in found if any(f"/{name}/" in layers[i] for name in given.tables)]
    if not found:
        have = ", ".join(layer.strip("/") for layer in layers.values()) or "none"
        raise PrivacyError(
            f"sparse={given!r} finds no table that it is for: rows are looked up in the weights of {have}. Leave "
            "sparse out, or name these layers."
        )
    plan.leave_in_rows(found)
    return found


def check_tables(plan: Plan, clipped: ClippedGradients, tables: list[int], variables: Sequence) -> None:
    """Raises a `PrivacyError` for a table whose gradient is of more rows than were looked up."""
    for i in tables:
        if not isinstance(clipped.sum[i], tf.IndexedSlices):
            raise PrivacyError(
                f"The table {name_of(variables[i])!r} is used in another way than by looking up its rows (tied "
                f"weights, a product with all of it), so sparse=AdaFEST cannot leave rows out. Untie it, {_OTHERS}."
            )
        if clipped.regularization[i] is not None:
            raise PrivacyError(
                f"The table {name_of(variables[i])!r} has a regularizer, whose gradient is of all rows, so "
                f"sparse=AdaFEST cannot leave rows out. Leave it out, {_OTHERS}."
            )


def released(g: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tf.IndexedSlices:
    """g, marked as public from here on."""
    if not isinstance(g, tf.IndexedSlices):
        return graph_tools.released(g)
    return tf.IndexedSlices(graph_tools.released(g.values), graph_tools.released(g.indices), g.dense_shape)


def kept(
    given: AdaFEST, noise_multiplier: float, stddev: float | tf.Tensor, plan: Plan, clipped: ClippedGradients,
    tables: list[int], variables: Sequence, source: noise.Source,
) -> list[tf.IndexedSlices]:  # fmt: skip
    """For each table the rows that are kept, with their noisy sums.

    What is released is a function of the counts with their noise, and of the sums with theirs: noise on rows that are
    left out need not be drawn, since nothing depends on it. A row is kept or not whether or not anyone looked it up.

    Args:
      noise_multiplier: the optimizer's; 0 for no noise.
      stddev: of the noise on every entry of a sum.
    """
    # One without a finite gradient, or without any, is as if it was not there.
    absent = clipped.absent | ~tf.math.is_finite(clipped.norms) | (clipped.norms <= LEAST_CLIP)
    counts = plan.clipped_counts(tables, given.clip, absent)
    of_counts = given.split(noise_multiplier)[1] * given.clip
    if of_counts > 0:
        normals = source.gaussian([c.shape for c in counts], of_counts)
        counts = [tf.cast(c, n.dtype) + n for c, n in zip(counts, normals, strict=True)]
    chosen = [graph_tools.released(tf.where(c >= given.threshold)[:, 0]) for c in counts]
    shapes = [raw_variable(variables[i]).shape for i in tables]
    totals = []
    for i, rows, shape in zip(tables, chosen, shapes, strict=True):
        # Each row's place among those kept; what is in none falls out of the sum.
        number = tf.size(rows)
        place = tf.scatter_nd(rows[:, None], tf.range(1, number + 1), [shape[0]])
        slices = clipped.sum[i]
        totals.append(tf.math.unsorted_segment_sum(slices.values, tf.gather(place, slices.indices) - 1, number))
    if of_counts > 0:
        sizes = [tf.size(total) for total in totals]
        drawn = tf.split(source.of_length(tf.add_n(sizes), stddev), sizes)
        # In the noise's type: a sum of float64 weights would keep digits that no noise covers.
        totals = [tf.cast(tf.cast(t, n.dtype) + tf.reshape(n, tf.shape(t)), t.dtype)
                  for t, n in zip(totals, drawn, strict=True)]  # fmt: skip
    return [
        tf.IndexedSlices(tf.reshape(total, [-1, *shape[1:]]), rows, tf.constant(shape.as_list(), tf.int64))
        for total, rows, shape in zip(totals, chosen, shapes, strict=True)
    ]
