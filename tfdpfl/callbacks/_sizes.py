"""Whether the sizes of batches can be those of independent draws, as data that state no sampling are said to be."""

from __future__ import annotations

import math

from tfdpfl.errors import PrivacyError

__all__ = ["BatchSizes"]

_NEVER = 1e-9  # the chance of what is taken to be impossible


class BatchSizes:
    """Keeps the sizes of the batches of one `fit`, which were said to be drawn by independent coins.

    Three things have practically no chance then. Each is tested by itself, so draws as they should be are doubted with
    a chance below three times `_NEVER`.

    Attributes:
      held: how often one example may be in a step, as far as the doubt tells.
    """

    def __init__(self, sampling: str, batch_size: int, stride: int):
        """Begins with none.

        Args:
          sampling: what was said of them.
          batch_size: how many examples a batch holds in the mean, as was said.
          stride: batches of an execution, which are seen together.
        """
        self._sampling, self._batch_size, self._stride = sampling, batch_size, stride
        self.held = 1
        self._largest = self._rows = self._batches = 0
        # The size that all of them had, -1 before the first and None once they differ; and the log of the chance.
        self._only: int | None = -1
        self._of_one_size = 0.0
        # Of this epoch and of the last one; None once an epoch had other sizes than the one before.
        self._now: list[int] = []
        self._before: list[int] | None = []
        self._of_repeating = 0.0

    def begin_epoch(self) -> None:
        """Notes that the next size is the first of an epoch."""
        if self._before is not None:
            self._before, self._now = self._now, []

    def doubt(self, size: int, population: int) -> PrivacyError | None:
        """Returns an error if the sizes contradict independent draws after one more execution, or None.

        If so many of a population join by coins of any bias, their number is s with a chance of at most
        binom.pmf(s, population, s / population).

        Args:
          size: how many examples it held.
          population: how many could have been in it.
        """
        self._largest = max(self._largest, size)
        self._batches += self._stride
        self._rows += size
        of_size = _log_chance_at_most(size, population)
        found = [self._too_many(), self._alike(size, of_size), self._again(size, of_size)]
        return next(filter(None, found), None)

    def _too_many(self) -> PrivacyError | None:
        """Chernoff's bound, at all numbers of batches together: their levels add up to less than `_NEVER`."""
        mean = self._batch_size * self._batches
        if self._rows <= mean:
            return None
        chance = self._rows - mean - self._rows * math.log(self._rows / mean)
        if chance >= math.log(_NEVER) - 2 * math.log(self._batches / self._stride + 1):
            return None
        self.held = self._largest  # all of them may be copies
        return PrivacyError(
            f"sampling={self._sampling!r}, but the first {self._batches} batches held {self._rows} examples, which is "
            f"more than batch_size={self._batch_size} each. If examples are drawn independently, this happens with a "
            f"chance below {_NEVER:g}. Give PrivacyBudget the batch_size that you draw in the mean. If a function "
            "copies examples (tf.repeat), use "
            "tfdpfl.data.poisson_batches(..., augment=..., copies=k) and an optimizer with rows_per_unit=k."
        )

    def _alike(self, size: int, of_size: float) -> PrivacyError | None:
        """Sizes that have differed once are not looked at again."""
        if self._only == -1:
            self._only = size
            return None
        if size != self._only:
            self._only = None
            return None
        self._of_one_size += of_size
        if self._of_one_size >= math.log(_NEVER):
            return None
        return PrivacyError(
            f"sampling={self._sampling!r}, but each of the first {self._batches} batches held {size // self._stride} "
            f"examples. If examples are drawn independently, this happens with a chance below {_NEVER:g}. Use "
            "tfdpfl.data.poisson_batches, or give PrivacyBudget sampling='shuffle' if an example comes at most once a "
            "pass."
        )

    def _again(self, size: int, of_size: float) -> PrivacyError | None:
        """Whether each epoch has the sizes of the one before it, as the same batches have."""
        if self._before is None:
            return None
        self._now.append(size)
        at = len(self._now) - 1
        if not self._before:
            return None
        if at >= len(self._before) or self._before[at] != size:
            self._before = None
            return None
        self._of_repeating += of_size
        if self._of_repeating >= math.log(_NEVER):
            return None
        return PrivacyError(
            f"sampling={self._sampling!r}, but the batches have the sizes that those of the epoch before had, one "
            "after the other, so they are the same batches again. If examples are drawn independently, this happens "
            f"with a chance below {_NEVER:g}. Draw new batches in each epoch, as tfdpfl.data.poisson_batches does: no "
            "saved ones, and none from a generator that sets its seed when it starts."
        )


def _log_chance_at_most(size: int, population: int) -> float:
    if not 0 < size < population:
        return 0.0
    rest, log = population - size, math.lgamma
    chance = log(population + 1) - log(size + 1) - log(rest + 1)
    return chance + size * math.log(size / population) + rest * math.log(rest / population)
