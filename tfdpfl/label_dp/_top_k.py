"""The arithmetic of randomized response over the likeliest classes, for many priors at once."""

from __future__ import annotations

import numpy as np


def keep_probability(epsilon: float, k: np.ndarray | int) -> np.ndarray:
    """e^ε / (e^ε + k - 1): how likely randomized response on k classes tells the truth."""
    return 1 / (1 + (np.asarray(k) - 1) * np.exp(-epsilon))


def by_likelihood(priors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Classes by falling prior, ties by class, and the place of each class in that order; both [m, K]."""
    order = np.argsort(-priors, axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(order.shape[1])[None], axis=1)
    return order, rank


def best_k(priors: np.ndarray, order: np.ndarray, epsilon: float) -> np.ndarray:
    """The k in 1..K that makes the truth likeliest under each prior (Ghazi et al. 2021, arXiv:2102.06062, Alg. 3)."""
    covered = np.cumsum(np.take_along_axis(priors, order, axis=1), axis=1)
    truth = covered * keep_probability(epsilon, np.arange(1, priors.shape[1] + 1))
    return truth.argmax(axis=1) + 1


def release(
    codes: np.ndarray,
    row: np.ndarray,
    order: np.ndarray,
    rank: np.ndarray,
    k: np.ndarray,
    epsilon: float,
    uniform: np.ndarray,
) -> np.ndarray:
    """Randomizes labels, each under the prior of its row (Alg. 2): randomized response on the k likeliest classes;
    a label that is none of them becomes a uniform one.

    One uniform number an example decides both whether the truth is told and which other class is.
    """
    k = k[row]
    place = rank[row, codes]
    inside = place < k
    keep = np.where(inside, keep_probability(epsilon, k), 0.0)
    others = k - inside  # how many classes a lie may name
    lie = np.floor((uniform - keep) / (1 - keep + (keep == 1)) * others).astype(np.intp)
    lie = np.minimum(lie, others - 1)  # rounding could reach the end of the interval
    lie += inside & (lie >= place)
    said = np.where(uniform < keep, place, lie)
    return order[row, said]


def matrices(order: np.ndarray, k: np.ndarray, epsilon: float) -> np.ndarray:
    """P(released = j | label = i) of each row of `order`, [m, K, K]."""
    m, classes = order.shape
    keep = keep_probability(epsilon, k)
    lie = keep * np.exp(-epsilon)
    place = np.arange(classes)
    inside = place[None] < k[:, None]
    truth = np.where(place[:, None] == place, keep[:, None, None], lie[:, None, None])
    blind = np.broadcast_to((1 / k)[:, None, None], truth.shape)
    by_place = np.where(inside[:, :, None], truth, blind) * inside[:, None, :]
    result = np.empty((m, classes, classes))
    result[np.arange(m)[:, None, None], order[:, :, None], order[:, None, :]] = by_place
    return result
