"""Which examples a batch holds: draws from the generator that noise comes from, AES-128 in counter mode."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tfdpfl._process import renew_after_fork
from tfdpfl._types import Dataset

__all__ = ["Passes", "Words"]

_WORDS = 1 << 16  # at once: what the generator fills in one call


class Words:
    """Uniform random numbers, keyed by the operating system's entropy or, for tests, by a seed."""

    def __init__(self, seed: int | None = None):
        self._seed = seed
        self._renew()
        if seed is None:
            renew_after_fork(self)

    def _renew(self) -> None:
        self._stream: Dataset = None  # of a forked process, which is not to draw its parent's batches

    def __call__(self, count: int) -> np.ndarray:
        """uint64 [count]."""
        if self._stream is None:
            from tfdpfl.noise.source import KeyStream, new_key

            self._stream = KeyStream(new_key(self._seed))
        words = np.empty(count, np.uint64)
        for at in range(0, count, _WORDS):
            self._stream.words(words[at : at + _WORDS])
        return words

    def each(self, number: int, rate: float) -> np.ndarray:
        """Those of ``number`` that an independent coin of bias ``rate`` takes each, in order: int64 [how many].

        From one to the next it skips a geometric number of others, so that a draw costs what it takes, not ``number``.
        """
        if rate >= 1:
            return np.arange(number)
        taken, last = [np.empty(0, np.int64)], -1
        expected = number * rate
        count = int(expected + 6 * math.sqrt(expected)) + 8
        while last < number:
            # P(skip >= k) = (1 - rate)^k. The exponential keeps its digits where it is small.
            exponential = -np.log1p(-np.minimum(self(count) * 2.0**-64, 1 - 2.0**-53))
            skips = np.minimum(exponential / -math.log1p(-rate), number).astype(np.int64)
            places = last + np.cumsum(skips + 1)
            taken.append(places[places < number])
            last = int(places[-1])
        return np.concatenate(taken)

    def some(self, of: np.ndarray, count: int) -> np.ndarray:
        """A uniform subset of ``count``, in order."""
        return of[np.sort(np.argsort(self(len(of)))[:count])]

    def allocated(self, number: int, steps: int, each: int) -> list[np.ndarray]:
        """Draws who of ``number`` is in each of ``steps``, in order, if each is in ``each`` of them. It is a uniform
        subset, chosen for each by itself (Floyd's algorithm; a word's remainder is even to steps / 2^64)."""
        chosen = np.empty([number, each], np.int64)
        for i, last in enumerate(range(steps - each, steps)):
            drawn = (self(number) % np.uint64(last + 1)).astype(np.int64)
            taken = (chosen[:, :i] == drawn[:, None]).any(axis=1)
            chosen[:, i] = np.where(taken, last, drawn)
        units = np.argsort(chosen.ravel(), kind="stable") // each
        return np.split(units, np.cumsum(np.bincount(chosen.ravel(), minlength=steps))[:-1])

    def separated(self, number: int, steps: int, rate: float, separation: int) -> Iterator[np.ndarray]:
        """Draws who of ``number`` is in each of ``steps``, in order: each rests for ``separation - 1`` steps after a
        use, and is used with probability ``rate`` otherwise. At the start this has always been so."""
        may_join = 1 / (1 + (separation - 1) * rate)
        place = self(number) * 2.0**-64
        rests = 1 + np.floor((place - may_join) / (rate * may_join)).astype(np.int64)
        rests = np.where(place < may_join, 0, np.clip(rests, 1, max(separation - 1, 0)))
        for _ in range(steps):
            ready = np.flatnonzero(rests == 0)
            drawn = ready[self.each(len(ready), rate)]
            rests = np.maximum(rests - 1, 0)
            rests[drawn] = separation - 1
            yield drawn

    def order(self, number: int) -> np.ndarray:
        """A uniform permutation: int64 [number]."""
        return np.argsort(self(number)).astype(np.int64)


class Passes:
    """Called once for each pass over a data set; yields what ``draw`` takes from a stream of that pass's own.

    Without a seed each pass asks the system anew: in another process, too, it is another stream.
    """

    def __init__(self, draw: Callable[[Words], Iterator[np.ndarray]], seed: int | Sequence[int] | None):
        self._draw, self._seed, self._numbers = draw, seed, itertools.count()

    def __call__(self) -> Iterator[np.ndarray]:
        number = next(self._numbers)
        return self._draw(Words(None if self._seed is None else int(np.random.SeedSequence(
            self._seed, spawn_key=(number,)).generate_state(1, np.uint64)[0])))  # fmt: skip
