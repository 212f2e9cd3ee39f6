"""Estimates from noisy labels how many labels there were of each class."""

from __future__ import annotations

import numpy as np

from tfdpfl._types import Arrays
from tfdpfl.label_dp import _labels
from tfdpfl.label_dp._top_k import keep_probability

__all__ = ["check_condition", "debiased_by_response", "debiased_label_counts", "inverse_of", "nearest_counts"]


def debiased_label_counts(
    noisy: Arrays, transition_matrix: Arrays, classes: Arrays = None, *, simplex: bool = False
) -> np.ndarray:
    """Estimates how many labels of each class there were, from the released ones. Costs nothing more.

    Args:
        noisy: Released labels [n].
        transition_matrix: [K, K], P(released = j | label = i).
        classes: The class of each row; None: 0..K-1.
        simplex: False gives the unbiased estimate Tᵀ⁻¹·(counts of `noisy`), which can be below 0 or above n. True gives
            the nearest counts in least squares that are ≥ 0 and sum to n: biased, but closer to the truth.

    Returns:
        float64 [K], summing to n.

    Raises:
        ValueError: A shape is wrong, a label is none of the classes, or the matrix cannot be inverted.

    Source: Warner 1965, "Randomized response"; Kairouz et al. 2016, arXiv:1602.07387, section 4.
    """
    matrix = np.asarray(transition_matrix, np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(
            f"transition_matrix must be [K, K], got the shape {list(matrix.shape)}: with several priors, count the "
            "examples of each by themselves"
        )
    inverse = inverse_of(matrix)
    known = np.arange(len(matrix)) if classes is None else np.asarray(classes)
    if len(known) != len(matrix):
        raise ValueError(f"classes has {len(known)} entries for {len(matrix)} rows: name the class of each row")
    by_label = np.argsort(known, kind="stable")
    codes = by_label[_labels.encode(_labels.read(noisy, "noisy")[0], known[by_label], "noisy")]
    counts = inverse.T @ np.bincount(codes, minlength=len(matrix))
    if not simplex:
        return counts
    return nearest_counts(counts[None], np.array([len(codes)]))[0]


def debiased_by_response(seen: np.ndarray, epsilon: float) -> np.ndarray:
    """Counts [..., K] before randomized response on K classes, from those after. Its matrix has a closed form, which
    takes no [K, K] numbers: (seen - n·lie) / (keep - lie), for n labels in a row."""
    keep = keep_probability(epsilon, seen.shape[-1])
    lie = keep * np.exp(-epsilon)
    return (seen - lie * seen.sum(axis=-1, keepdims=True)) / (keep - lie)


def nearest_counts(counts: np.ndarray, total: np.ndarray) -> np.ndarray:
    """The nearest rows [m, K] in least squares that are ≥ 0 and sum to `total` [m].

    Source: Duchi et al. 2008, "Efficient projections onto the l1-ball", Fig. 1.
    """
    falling = -np.sort(-counts, axis=1)
    excess = (np.cumsum(falling, axis=1) - total[:, None]) / np.arange(1, counts.shape[1] + 1)
    left = np.maximum((falling > excess).sum(axis=1), 1)  # how many stay above 0
    return np.maximum(counts - np.take_along_axis(excess, left[:, None] - 1, axis=1), 0)


def inverse_of(matrix: np.ndarray) -> np.ndarray:
    """The inverse of a transition matrix, or a `ValueError` where there is none to rely on."""
    check_condition(np.linalg.cond(matrix))
    return np.linalg.inv(matrix)


def check_condition(number: float) -> None:
    """Raises a `ValueError` if a matrix of this condition number has no inverse to rely on."""
    if number > 1e8:
        raise ValueError(
            "transition_matrix cannot be inverted: some labels become noisy in the same way, as under a "
            "prior or a tiny ε; there is no correction, and a model trains with the plain loss"
        )
