"""The arithmetic of randomized response over the likeliest classes, for many priors at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tfdpfl import _replay_hook

__all__ = [
    "FINEST",
    "RARE",
    "best_k",
    "by_likelihood",
    "keep_probability",
    "lie_probability",
    "matrices",
    "release",
    "respond",
    "response_matrix",
]

# A uniform number is a multiple of 2⁻⁵³, so what is rarer never comes; where lies are rarer than this, which class
# they name is drawn by itself.
FINEST, RARE = 2.0**-53, 2.0**-20


def keep_probability(epsilon: float, k: np.ndarray | int) -> np.ndarray:
    """e^ε / (e^ε + k - 1): how likely randomized response on k classes tells the truth."""
    return 1 / (1 + (np.asarray(k) - 1) * np.exp(-epsilon))


def lie_probability(epsilon: float, k: np.ndarray | int) -> np.ndarray:
    """One less that, where k > 1 at least 2⁻⁵³: at no ε the truth is told always."""
    odds = (np.asarray(k) - 1) * np.exp(-epsilon)
    return np.where(np.asarray(k) > 1, np.maximum(odds / (1 + odds), FINEST), 0.0)


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
    row: np.ndarray | int,
    order: np.ndarray,
    rank: np.ndarray,
    k: np.ndarray,
    epsilon: float,
    uniforms: Callable[[int], np.ndarray],
) -> np.ndarray:
    """Randomizes labels, each under the prior of its row (Alg. 2). This is randomized response on the k likeliest
    classes. A label that is none of them becomes a uniform one.

    One uniform number an example decides both whether a lie is told and which; a rare lie has one more.
    """
    liar = lie_probability(epsilon, k)
    rarely = bool(((liar > 0) & (liar < RARE)).any())
    k, liar = k[row], liar[row]
    place = rank[row, codes]
    inside = place < k
    uniform = uniforms(len(codes))
    liar = np.where(inside, liar, 1.0)
    lies = uniform < liar
    others = k - inside  # how many classes a lie may name
    share = uniform / np.maximum(liar, FINEST)
    if rarely:
        rare = np.flatnonzero(lies & (liar < RARE))
        share[rare] = uniforms(len(rare))
    lie = np.minimum(share * others, others - 1).astype(np.intp)  # rounding could reach the end of the interval
    lie += inside & (lie >= place)
    said = order[row, np.where(lies, lie, place)]

    def loss(one: np.ndarray, other: np.ndarray, said: np.ndarray) -> float:
        return float(abs(chance(one, said) - chance(other, said)).sum())

    def chance(codes: np.ndarray, said: np.ndarray) -> np.ndarray:
        """ln P(said | codes), up to what all codes share."""
        return np.where(rank[row, codes] >= k, np.log((np.exp(epsilon) + k - 1) / k), epsilon * (said == codes))

    return _replay_hook.drawn(codes, said, epsilon, loss)


def respond(codes: np.ndarray, size: int, epsilon: float, uniforms: Callable[[int], np.ndarray]) -> np.ndarray:
    """Randomizes labels by plain randomized response on so many classes."""
    order = np.arange(size)[None]
    return release(codes, 0, order, order, np.array([size]), epsilon, uniforms)


def response_matrix(epsilon: float, size: int) -> np.ndarray:
    """P(released = j | label = i) of randomized response on so many classes, [K, K]."""
    return matrices(np.arange(size)[None], np.array([size]), epsilon)[0]


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
