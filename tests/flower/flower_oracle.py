"""Adaptively clipped federated averaging without noise, in numpy and float64 (Andrew et al. 2021, algorithm 1)."""

import math

import numpy as np

UPDATES = [np.random.default_rng(5 + i).normal(size=10) * scale for i, scale in enumerate((0.1, 0.5, 1.0, 2.0))]


def expected_of(adaptive, clients_per_round, rounds):
    """Weights, from zeros, and the next clip."""
    weights, clip = np.zeros(10), adaptive.initial
    norms = [np.linalg.norm(u) for u in UPDATES]
    for _ in range(rounds):
        weights = weights + sum(u * min(1, clip / n) for u, n in zip(UPDATES, norms, strict=True)) / clients_per_round
        within = np.clip(sum((n <= clip) - 0.5 for n in norms) / clients_per_round + 0.5, 0, 1)
        clip *= math.exp(-adaptive.learning_rate * (within - adaptive.target_quantile))
    return weights, clip
