"""Whether an example may be in a stream more often than the number of its rows shows."""

from __future__ import annotations

import math

from tfdpfl._types import Dataset
from tfdpfl.data.declared import SHUFFLES, ancestors, made_by, name_of
from tfdpfl.data.functions import hands_on_early, rank_of
from tfdpfl.errors import PrivacyError

__all__ = ["check_stream"]

_EXPANDING = ("flatmap", "interleave", "unbatch", "window")
_MIXING = (*SHUFFLES, "concatenate", "groupby", "interleave")
_OMITTING = ("filter", "shard", "takewhile", "unique", "ignoreerrors")


def check_stream(x: Dataset, num_examples: int, batch_size: int, steps: int | None, counts_passes: bool) -> None:
    """Raises if an example may be in a stream more often than ε counts.

    Where passes are counted, `num_examples` rows of a stream are one pass, whatever they are. Else a batch must not
    reach into the next pass, because it could hold an example twice.

    Args:
      x: what `fit` was given.
      num_examples: what was said of one pass.
      batch_size: what was said of a batch.
      steps: steps_per_epoch.
      counts_passes: whether ε depends on the number of passes.
    """
    repeated = next(filter(lambda each: made_by(each, ("repeat",)), reversed(ancestors(x))), None)
    if repeated is None and (steps is None or not counts_passes):
        return
    pass_ = x if repeated is None else repeated._inputs()[0]
    batched = rank_of(pass_) == rank_of(x)
    behind = [] if repeated is None else ancestors(x, repeated)
    if counts_passes:
        _check_copies(x, pass_, behind, math.ceil(num_examples / (batch_size if batched else 1)), num_examples, steps)
    if repeated is None:
        return
    _check_mixed(x, behind)
    if counts_passes:
        _check_rows(pass_, behind if int(pass_.cardinality()) >= 0 else ancestors(x), batched, num_examples, batch_size)
    elif not batched and num_examples % batch_size:
        raise PrivacyError(
            "batch comes after repeat, so a batch may continue into the next pass over the data and hold an "
            "example twice, and no ε is known for this. Call batch before repeat."
        )


def _check_mixed(x: Dataset, behind: list[Dataset]) -> None:
    """Raises if rows of several passes may meet behind their repeat."""
    mixing = next(filter(lambda each: made_by(each, _MIXING), behind), None)
    early = hands_on_early(x, behind)
    if mixing is not None or early is not None:
        name = name_of(mixing) if mixing is not None else f"{name_of(early)} (deterministic=False)"
        raise PrivacyError(
            f"{name} comes after repeat, so rows of several passes are mixed: an example may be in one pass, or in one "
            "batch, several times, and no ε is known for this. Call repeat after it: "
            "data.shuffle(...).batch(...).repeat()."
        )


def _check_rows(pass_: Dataset, counted: list[Dataset], batched: bool, num_examples: int, batch_size: int) -> None:
    """Raises if a pass may have fewer rows than `num_examples`, or has another number than was said.

    Args:
      counted: The transformations after which nothing states the number of rows.
    """
    omitting = next(filter(lambda each: made_by(each, _OMITTING), counted), None)
    if omitting is not None:
        raise PrivacyError(
            f"{name_of(omitting)} may leave examples out, and in a stream (repeat) the rows of a pass are not counted: "
            f"if a pass has fewer than num_examples={num_examples}, there are more passes than ε counts. Leave "
            "steps_per_epoch and .repeat() out, and give fit epochs; or state the number of rows of a pass before "
            f".repeat() by tf.data.experimental.assert_cardinality({num_examples})."
        )
    rows = int(pass_.cardinality())
    least, most = (num_examples // batch_size, math.inf) if batched else (num_examples, num_examples)
    if rows >= 0 and not least <= rows <= most:
        of = f"batches of at most {batch_size}" if batched else "examples"
        raise PrivacyError(
            f"num_examples={num_examples}, but the data set repeats a pass of {rows} {of} (its cardinality says so), "
            "so ε would count another number of passes than there are. Give PrivacyBudget the number of examples of "
            "one pass."
        )


def _check_copies(
    x: Dataset, pass_: Dataset, behind: list[Dataset], most: int, num_examples: int, steps: int | None
) -> None:
    """Raises if the data may hold several rows of one example, whose number is not stated before they are repeated."""
    expanded = next(filter(_expands, ancestors(x)), None)
    if expanded is not None and (any(map(_expands, behind)) or not 0 <= int(pass_.cardinality()) <= most):
        raise PrivacyError(
            f"{name_of(expanded)} may make several rows of one example, and in a stream (steps_per_epoch={steps}, or "
            f"repeat) the rows of a pass are not counted: with copies, num_examples={num_examples} would give an ε "
            "that is too small. Leave steps_per_epoch and .repeat() out, and give fit epochs; or state the number of "
            f"rows of a pass before .repeat() by tf.data.experimental.assert_cardinality({num_examples})."
        )


def _expands(dataset: Dataset) -> bool:
    """Whether a data set may have several elements of one that it was made from; one of a generator is a flat_map of a
    single number."""
    return bool(made_by(dataset, _EXPANDING)) and any(int(each.cardinality()) != 1 for each in dataset._inputs())
