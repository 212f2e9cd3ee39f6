"""Sees every release, for `tfdpfl.audit.replay`: noise and data meet here, and without a replay
nothing happens to it. No TensorFlow."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["Release", "add", "caller", "drawn", "released", "tape"]


@dataclasses.dataclass
class Release:
    """One release: noise added to values, or an outcome drawn by them.

    Attributes:
      where: file and line of it.
      values: what the data made, before noise.
      scales: of each of the values, the noise's standard deviation (of Laplace noise the scale); 1 of what is drawn.
      bound: how far one unit that is added or removed may move ``values / scales``.
      replaced: the same for one that is replaced.
      norm: in which that is measured, 1 or 2: over all values, or over each row's where ``by_row``.
      noise: what was added; None of what is drawn.
      moments: whether the noise is independent, with these scales.
      out: what was let out.
      loss: of what is drawn, (values, the neighbour's, out) → |ln of the ratio of their probabilities|.
    """

    where: str
    values: list[np.ndarray]
    scales: list[float]
    bound: float
    replaced: float
    norm: int = 2
    by_row: bool = False
    noise: list[np.ndarray] | None = None
    moments: bool = True
    out: list[np.ndarray] = dataclasses.field(default_factory=list)
    loss: Callable[[np.ndarray, np.ndarray, np.ndarray], float] | None = None


class Tape(Protocol):
    def take(self, release: Release) -> list[np.ndarray]:
        """Returns what is to be let out: in the replay's second run, what the first one let out."""
        ...


tape: Tape | None = None  # of the process, since TensorFlow runs a step's ops in threads of its own


def caller() -> str:
    """File and line of what called this module."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def released(
    values: Sequence[ArrayLike],
    out: Sequence[np.ndarray],
    noise: Sequence[ArrayLike],
    scales: Sequence[float],
    bound: float,
    *,
    replaced: float | None = None,
    norm: int = 2,
    by_row: bool = False,
    moments: bool = True,
    where: str | None = None,
) -> list[np.ndarray]:
    """``out``, which is ``values`` with ``noise``; or what a replay says instead. Arguments as `Release`."""
    if tape is None:
        return list(out)
    copies = [[np.array(part) for part in parts] for parts in (values, noise, out)]
    return tape.take(
        Release(
            where or caller(), copies[0], [float(s) for s in scales], float(bound),
            float(2 * bound if replaced is None else replaced), norm, by_row, copies[1], moments, copies[2],
        )
    )  # fmt: skip


def add(
    values: Sequence[np.ndarray], noise: Iterable[ArrayLike], scales: Sequence[float], bound: float, **options: Any
) -> None:
    """Adds ``noise`` to ``values`` in place; the rest as `released`."""
    if tape is None:
        for value, drawn in zip(values, noise, strict=True):
            value += drawn
        return
    before, noise = [np.array(v) for v in values], list(noise)
    for value, drawn in zip(values, noise, strict=True):
        value += drawn
    told = released(before, values, noise, scales, bound, where=options.pop("where", None) or caller(), **options)
    for value, out in zip(values, told, strict=True):
        value[...] = out


def drawn(
    values: np.ndarray, out: np.ndarray, epsilon: float, loss: Callable[[np.ndarray, np.ndarray, np.ndarray], float]
) -> np.ndarray:
    """``out``, which was drawn by ``values`` with an ε of this for one that is replaced."""
    if tape is None:
        return out
    return tape.take(Release(caller(), [np.array(values)], [1.0], epsilon, epsilon, out=[np.array(out)], loss=loss))[0]
