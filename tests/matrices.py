"""What tests of correlated noise share: Toeplitz matrices, and the worst of all ways to take part."""

import itertools

import numpy as np


def worst(matrix, separation, most):
    """The largest squared norm of what one example adds, over all participations."""
    n, best = len(matrix), 0.0
    for chosen in range(1 << n):
        at = [i for i in range(n) if chosen >> i & 1]
        if len(at) <= most and all(b - a >= separation for a, b in itertools.pairwise(at)):
            best = max(best, (matrix[:, at].sum(1) ** 2).sum())
    return best


def lower(column, steps):
    """The lower triangular Toeplitz matrix of these diagonals."""
    return sum(np.diag(np.full(steps - i, c), -i) for i, c in enumerate(column[:steps]))
