"""Votes in one form: counts `[queries, classes]`, checked."""

from __future__ import annotations

import numpy as np

from tfdpfl._types import Arrays
from tfdpfl.accounting import _checks

__all__ = ["as_counts"]

_FEW_CLASSES = 32


def as_counts(votes: Arrays, num_classes: int | None = None, num_teachers: int | None = None) -> np.ndarray:
    """Returns vote counts, int64 `[queries, classes]`; every row sums to the number of teachers.

    Args:
        votes: Counts `[queries, classes]` (one query may be `[classes]`); or, with `num_classes`, what each
            teacher predicts, `[teachers, queries]`, whole numbers from 0 to `num_classes - 1`. A class that
            no one votes for is a column of zeros.
        num_classes: Says that `votes` are predictions, and how many classes there are, at least 2.
        num_teachers: Checked against the votes. Without it the rows are checked against each other.

    Raises:
        ValueError: no query, no teacher, one class, a vote that is negative, fractional, NaN or of no class,
            or a row that does not sum to the number of teachers.
    """
    _checks.optional(_checks.whole, "num_teachers", num_teachers, 1, "without a teacher no one votes")
    array = np.asarray(votes)
    if array.ndim == 1 and num_classes is None:
        array = array[None]
    if array.ndim != 2 or array.shape[1 if num_classes is None else 0] == 0:
        raise ValueError(
            f"votes must be counts [queries, classes], or predictions [teachers, queries] of at least one teacher "
            f"with num_classes; got shape {array.shape}."
        )
    whole = _whole_numbers(array)
    if num_classes is None:
        counts = whole
        if counts.shape[1] < 2:
            raise ValueError(f"votes must have at least 2 classes, got shape {array.shape}: one class needs no vote.")
    else:
        counts = _count(whole, num_classes)
    if not len(counts):
        raise ValueError(f"votes must hold at least one query, got shape {array.shape}.")
    totals = counts.sum(axis=1)
    expected = totals[0] if num_teachers is None else num_teachers
    if expected < 1:
        raise ValueError("votes must come from at least one teacher, but the first query has no votes.")
    wrong = np.flatnonzero(totals != expected)
    if len(wrong):
        raise ValueError(
            f"votes must sum to the number of teachers, {expected}, in every row; row {wrong[0]} sums to "
            f"{totals[wrong[0]]}: let every teacher vote on every query."
        )
    return counts


def _whole_numbers(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind not in "iuf":
        raise ValueError(f"votes must be numbers, got an array of {array.dtype}.")
    if array.dtype.kind == "f":
        if np.isnan(array).any():
            raise ValueError("votes must not hold NaN: a teacher that predicts NaN has failed; train it again.")
        if not (np.isfinite(array).all() and (array == np.floor(array)).all()):
            raise ValueError("votes must be whole numbers; take the argmax of probabilities first.")
    if array.size and array.min() < 0:
        raise ValueError(f"votes must not be negative, got {array.min():g}.")
    return array.astype(np.int64, copy=False)


def _count(predictions: np.ndarray, num_classes: int) -> np.ndarray:
    num_classes, queries = _checks.whole("num_classes", num_classes, 2, "count the classes"), predictions.shape[1]
    if predictions.size and predictions.max() >= num_classes:
        raise ValueError(
            f"votes must be classes below num_classes={num_classes}, got {predictions.max()}: raise num_classes."
        )
    if num_classes <= _FEW_CLASSES:
        # A comparison a class, in bytes, is faster than counting; 127 teachers are what a signed byte can add up.
        counts, small = np.zeros((num_classes, queries), np.int64), predictions.astype(np.int8)
        for start in range(0, len(small), 127):
            block = small[start : start + 127]
            for k in range(num_classes):
                counts[k] += (block == k).view(np.int8).sum(axis=0, dtype=np.int8)
        return np.ascontiguousarray(counts.T)
    cells = predictions + num_classes * np.arange(queries)
    return np.bincount(cells.ravel(), minlength=queries * num_classes).reshape(queries, num_classes)
