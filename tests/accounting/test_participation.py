"""How far one unit moves a noise's sums, over all ways in which it can take part."""

import itertools

import numpy as np
import pytest
from matrices import worst

from tfdpfl.accounting.participation import moved_by_toeplitz
from tfdpfl.federated.guarantees import tree_sensitivity


def test_a_column_that_grows_or_is_negative_is_bounded_by_one_that_does_not():
    rng = np.random.default_rng(0)
    for _ in range(30):
        column = rng.normal(size=6)
        matrix = sum(np.diag(np.full(8 - i, c), -i) for i, c in enumerate(column))
        for separation, most in [(1, 8), (2, 3), (4, 2), (6, 2)]:
            bound = (moved_by_toeplitz(column, 8, separation, most) ** 2).sum()
            assert bound >= worst(abs(matrix), separation, most) - 1e-9
    # With no use near another it is exact.
    assert (moved_by_toeplitz(np.array([1.0, -2.0]), 8, 2, 3) ** 2).sum() == pytest.approx(15)


def searched(leaves, most, separation, restart_every):
    """The largest sum over nodes of the squared number of participations, over all ways to take part."""
    nodes, start = [], 0
    while start < leaves:
        tree = min(restart_every or leaves, leaves - start)
        at = start
        for level in reversed(range(tree.bit_length())):
            if tree >> level & 1:
                for height in range(level + 1):
                    width = 1 << height
                    nodes += [(at + i * width, at + (i + 1) * width) for i in range(1 << (level - height))]
                at += 1 << level
        start += tree
    best = 0
    for number in range(1, most + 1):
        for chosen in itertools.combinations(range(leaves), number):
            if all(b - a >= separation for a, b in itertools.pairwise(chosen)):
                best = max(best, sum(sum(a <= leaf < b for leaf in chosen) ** 2 for a, b in nodes))
    return best


@pytest.mark.parametrize("restart_every", [None, 1, 3, 4, 7])
@pytest.mark.parametrize("separation", [1, 2, 3, 5])
@pytest.mark.parametrize("leaves", [1, 6, 8, 11])
def test_tree_sensitivity_is_the_worst_over_all_participations(leaves, separation, restart_every):
    for most in (1, 2, 4):
        assert tree_sensitivity(leaves, most, separation, restart_every) == searched(
            leaves, most, separation, restart_every
        )


def test_tree_sensitivity_bounds_what_it_does_not_search():
    # Every round of 2^11: a node of 2^k rounds holds 2^k participations, and there are 2^(11-k) of them.
    assert tree_sensitivity(2048, 2048, 1) == sum(2 ** (11 - k) * 4**k for k in range(12))
    # Rounding a separation down leaves more room, never less; one participation touches each level once.
    assert tree_sensitivity(5000, 5, 700) >= tree_sensitivity(5000, 5, 704)
    assert tree_sensitivity(4096, 1, 4096) == 13
    assert tree_sensitivity(10_000, 1000, 10) >= 1000 * 4  # the bound without search is no less than the leaves' levels


def test_restarts_bound_what_a_client_adds_to_a_tree():
    # Once an epoch, a tree an epoch: floor(log2(64)) + 1 nodes each time.
    assert tree_sensitivity(640, 10, 64, restart_every=64) == 10 * 7
    assert tree_sensitivity(640, 10, 64) > 10 * 7
