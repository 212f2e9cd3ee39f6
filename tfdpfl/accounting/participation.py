"""How far one example can move correlated noise, given how often it takes part and how far apart. No noise here.

With correlated noise, step t gets row t of ``C⁻¹ Z``, Z being independent normals. So ``C x + Z``, x the clipped sums,
is what an observer has. The sensitivity is the largest norm of ``C u`` over all that one example can add: at most
one clip in each of at most ``most`` steps, ``separation`` or more of them apart (Choquette-Choo et al. 2023,
arXiv:2306.08153). It holds for data that adapt to what was released, too (Denisov et al. 2022, arXiv:2202.08312).
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

__all__ = ["most_participations", "moved_by_toeplitz", "tree_sensitivity"]


def most_participations(steps: int, separation: int, most: int | None) -> int:
    """How often an example can take part in so many steps."""
    room = -(-steps // separation)
    return room if most is None else min(most, room)


def moved_by_toeplitz(column: np.ndarray, steps: int, separation: int, most: int | None) -> np.ndarray:
    """A bound on how far one example moves each of ``steps`` noises, in clips; its L2 norm is the sensitivity.

    If the column does not grow and is not negative, no participations are worse than those at steps 0, separation,
    2 · separation, … (Kalinin & Lampert 2024, arXiv:2405.13763). Any other column is replaced by the least such one
    that is above its absolute values. The norm of the result is an upper bound then. If participations are further
    apart than the column is long they do not meet, and the column stays as it is.

    Args:
      column: the first column of a lower triangular Toeplitz matrix; entries beyond its end are 0.
      steps: rows of the matrix.
      separation: fewest steps from one participation to the next.
      most: largest number of participations; None for as many as there is room for.
    """
    column = np.abs(np.asarray(column, float))[:steps]
    if len(column) > separation:
        column = np.maximum.accumulate(column[::-1])[::-1]
    moved = np.zeros(steps)
    for i in range(most_participations(steps, separation, most)):
        at = i * separation
        part = column[: steps - at]
        moved[at : at + len(part)] += part
    return moved


@functools.lru_cache(maxsize=256)
def tree_sensitivity(
    rounds: int, most: int, separation: int, restart_every: int | None = None, prefixes_only: bool = False
) -> float:
    """The largest squared L2 norm of what one client adds to the nodes of the trees over ``rounds``, in clips.

    A node holds the sum over its rounds, so a client that is in c of them adds c clips to it. This is the largest sum
    of c² over all ways to choose at most ``most`` rounds, at least ``separation`` apart. TF Privacy's
    tree_aggregation_accountant searches for the same. Here it is found by dynamic programming over levels instead of
    subtrees. If that would take long, and for separations above 64, which are rounded down by up to 1/32, it is an
    upper bound.

    Args:
      rounds: leaves in all.
      most: largest number of participations.
      separation: fewest rounds from one participation to the next, 1 where they may be adjacent.
      restart_every: rounds in a tree; None for one tree.
      prefixes_only: count only nodes whose noise is in some running total: not those that are their parent's second
        half, since both are whole in the same round.
    """
    most = most_participations(rounds, separation, most)
    if most == 0:
        return 0.0
    trees = [restart_every] * (rounds // restart_every) if restart_every else []
    rest = rounds - sum(trees)
    trees += [rest] if rest else []
    grain = 1 << max(0, separation.bit_length() - 6)
    gap = separation // grain
    if most**2 * gap**3 * len(trees) > 3e8:
        # In level k no node holds more than ceil(2^k / separation) of them, and all hold `most` together.
        return float(most * sum(min(most, -(-(1 << k) // separation)) for k in range(max(trees).bit_length())))
    levels: list[_Span] = []  # with their roots
    halves: list[_Span] = []  # as the second half of a parent
    whole = _Span(0, np.zeros([1, 1, gap]))
    for tree in trees:
        for level in reversed(range(tree.bit_length())):
            if tree >> level & 1:
                while len(levels) <= level:
                    rooted, bare = _subtree(len(levels), levels, halves, grain, gap, most)
                    levels.append(rooted)
                    halves.append(bare if prefixes_only else rooted)
                whole = _joined(whole, levels[level], most)
    return float(whole.best[:, 0, 0].max())


@dataclasses.dataclass(frozen=True)
class _Span:
    """Consecutive leaves. ``best[c, l, r]`` is the largest sum of squares over its nodes with c participations, none in
    its first l and last r grains of leaves; minus infinity where there is no room. ``grains`` is its length."""

    grains: int
    best: np.ndarray


def _subtree(
    level: int, first: list[_Span], second: list[_Span], grain: int, gap: int, most: int
) -> tuple[_Span, _Span]:
    """A node's leaves, with the node and without."""
    if 1 << level <= grain:  # at most one participation; counted as a whole grain, which only leaves more room
        best = np.full([2, gap, gap], -np.inf)
        best[0] = 0.0
        best[1, 0, 0] = level + 1.0
        bare = best.copy()
        bare[1, 0, 0] = level
        return _Span(1, best), _Span(1, bare)
    span = _joined(first[-1], second[-1], most)
    root = np.arange(len(span.best), dtype=float) ** 2
    return _Span(span.grains, span.best + root[:, None, None]), span


def _joined(left: _Span, right: _Span, most: int) -> _Span:
    a, b = left.best, right.best
    gap = b.shape[2]
    out = np.full([min(most + 1, len(a) + len(b) - 1), a.shape[1], gap], -np.inf)
    out[0] = 0.0

    def shift(size: int, by: int) -> np.ndarray:
        return np.maximum(np.arange(size) - by, 0)

    n = min(len(a), len(out))
    out[1:n] = a[1:n][:, :, shift(gap, right.grains)]
    n = min(len(b), len(out))
    out[1:n] = np.maximum(out[1:n], b[1:n][:, shift(a.shape[1], left.grains), :])
    for c in range(1, len(a)):
        n = min(len(b), len(out) - c)
        for d in range(gap if n > 1 else 0):  # d free grains before the border leave gap - 1 - d behind it
            both = a[c, :, d][None, :, None] + b[1:n, gap - 1 - d, :][:, None, :]
            np.maximum(out[c + 1 : c + n], both, out=out[c + 1 : c + n])
    return _Span(left.grains + right.grains, out)
