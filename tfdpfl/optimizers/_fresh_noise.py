"""The noise of a private step as one object: independent Gaussian noise, and what other kinds override.

A `GradientPrivatizer` asks this object for everything that depends on the noise. To add a kind that has
an argument of its own, derive a class and append it to `KINDS` in `_noises.py`. A correlated noise needs neither: see
`tfdpfl.noise.strategies`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import tensorflow as tf

from tfdpfl import _replay_hook
from tfdpfl._types import Json
from tfdpfl.accounting.run import options_of
from tfdpfl.clipping.gradients import added
from tfdpfl.noise.source import Source
from tfdpfl.optimizers import _replicas, _step_table
from tfdpfl.optimizers._settings import Settings

if TYPE_CHECKING:
    from tfdpfl.accounting import PrivacyLedger
    from tfdpfl.clipping.pipeline import ClippedGradients, ClippingPipeline
    from tfdpfl.embeddings import AdaFEST
    from tfdpfl.noise.strategies import Noise
    from tfdpfl.optimizers._accumulator import Table
    from tfdpfl.optimizers._noise_segments import NoiseSegments

__all__ = ["FreshNoise", "NoiselessMean", "noisy_sums", "shown"]


@dataclasses.dataclass(frozen=True)
class NoiselessMean:
    """Holds what is known of a batch when its noise is drawn.

    Attributes:
      sums: clipped sums over the denominator (undivided for a noise that `divides`), and last a count, if the clip
        releases one.
      stddevs: of the Gaussian noise on each of them, float32.
      stddev: of that on the weights' sums.
      denominator: of the mean, float32.
      clip: the largest norm of one unit's part in the undivided sums.
      multiplier: the noise's standard deviation over the sensitivity to one example, float64.
      known: how the batch was drawn (`BatchSampling.known`).
      ids: of the variables that the sums are for.
      key: int64 [2], where several workers draw the same noise; else None.
    """

    sums: list[tf.Tensor]
    stddevs: list[tf.Tensor]
    stddev: tf.Tensor
    denominator: tf.Tensor
    clip: tf.Tensor
    multiplier: tf.Tensor
    known: tf.Tensor
    ids: list[int]
    key: tf.Tensor | None


class FreshNoise:
    """Adds independent Gaussian noise in every step.

    Attributes:
      draws: how many draws are made in a step, each with a key of its own where several workers draw the same.
      discrete: whether steps are priced as those of discrete noise.
      correlated: the argument ``noise``, or None.
      sparse: the argument ``sparse``, or None.
      segments: which of the steps share correlated noise, or None.
      source: of all random numbers.
    """

    draws: ClassVar[int] = 1
    discrete: ClassVar[bool] = False
    correlated: Noise | None = None
    sparse: AdaFEST | None = None
    segments: NoiseSegments | None = None
    source: Source

    def __init__(self, settings: Settings, given: object = None):
        """Makes the noise from the optimizer's other arguments, and from its own as its class has parsed it."""
        self.settings = settings

    @property
    def label(self) -> str:
        """The argument that asks for it, as the user typed it."""
        return "noise=None"

    def check(self) -> None:
        """Raises a `ValueError` if the settings exclude this noise."""

    @property
    def divides(self) -> bool:
        """Whether this noise goes on undivided sums, and divides them."""
        return False

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables that are saved with the optimizer."""
        return []

    def state(self) -> list[tf.Tensor]:
        """Returns the numbers that tell apart what workers have of earlier noise as a step begins."""
        return []

    def multiplier_of_sums(self, noise_multiplier: float | tf.Tensor) -> float | tf.Tensor:
        """Returns the noise multiplier of the sums that a clip releases, given that of all that a step does."""
        return noise_multiplier

    def draw(self, mean: NoiselessMean, counter: _step_table.Counter) -> list[tf.Tensor]:
        """Draws what goes on each of the sums. It is traced before ``counter`` counts the step."""
        normals = self.source.gaussian([s.shape for s in mean.sums], mean.stddev, mean.key)
        return [
            n if std is mean.stddev else n * (std / mean.stddev) for n, std in zip(normals, mean.stddevs, strict=True)
        ]

    def add(self, mean: NoiselessMean, drawn: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the noisy means: the sums with what was drawn for them."""
        return shown(mean.sums, noisy_sums(mean.sums, drawn), drawn, mean.stddevs, 1 / mean.multiplier)

    # -- large tables of which only some rows are trained ----------------------------------------------------

    def tables_of(self, plan: ClippingPipeline, variables: Sequence) -> list[int]:
        """Returns the places of the variables whose sums are left in rows, and prepares the plan for that."""
        return []

    def counts(
        self, plan: ClippingPipeline, clipped: ClippedGradients, tables: list[int], variables: Sequence
    ) -> list[tf.Tensor]:
        """Returns what rows are chosen by, a vector for each table, of one replica's batch. It is summed like sums."""
        return []

    def rows(
        self, noise_multiplier: float | tf.Tensor, stddev: tf.Tensor, divisor: tf.Tensor | None,
        counts: list[tf.Tensor], tables: list[Table], keys: tf.Tensor | None,
    ) -> list[tf.Tensor]:  # fmt: skip
        """Returns of each table the noisy means of those rows that a step trains, and the numbers of these rows.

        Args:
          noise_multiplier: of all that the step releases.
          stddev: of the noise on the means.
          divisor: of the tables' sums; None where they are means.
          counts: of a whole batch.
          tables: of a whole batch.
          keys: of all draws but the first, int64 [draws - 1, 2], where several workers draw the same; else None.
        """
        return []

    # -- what ran, and what is saved -------------------------------------------------------------------------

    def ledger(self, counted: np.ndarray) -> PrivacyLedger:
        """Returns what ran, given the entries of the step table."""
        return _step_table.ledger_of(counted)

    def rows_for_others(self, counted: np.ndarray) -> np.ndarray:
        """Returns entries of the step table, as an optimizer with other noise may count them."""
        return counted

    def to_dict(self) -> Json:
        """Returns the arguments that ask for this noise, as JSON can hold them."""
        return {
            "noise": None if self.correlated is None else self.correlated.to_dict(),
            "sparse": None if self.sparse is None else self.sparse.to_dict(),
            **options_of(self.discrete),
        }


def noisy_sums(sums: list[tf.Tensor], drawn: list[tf.Tensor]) -> list[tf.Tensor]:
    """Adds in the noise's type: a sum of float64 weights would keep digits that no noise covers."""
    return [tf.cast(added(s, n), s.dtype) for s, n in zip(sums, drawn, strict=True)]


def shown(
    sums: list[tf.Tensor], noisy: list[tf.Tensor], drawn: list[tf.Tensor], scales: Sequence, bound: tf.Tensor,
    *, independent: bool = True,
) -> list[tf.Tensor]:  # fmt: skip
    """Returns ``noisy``; while `tfdpfl.audit.replay` runs, what the replay releases in its place.

    Args:
      scales: the standard deviation of the noise on each of the sums.
      bound: how far one unit may move the sums over their scales.
      independent: whether the noise is independent over the steps, with these scales.
    """
    if _replay_hook.tape is None or _replicas.number() > 1:
        return noisy
    count, where = len(sums), _replay_hook.caller()

    def take(scales: np.ndarray, bound: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
        before, after, noise = arrays[:count], arrays[count : 2 * count], arrays[2 * count :]
        return _replay_hook.released(before, after, noise, list(scales), float(bound), where=where, moments=independent)

    stacked = tf.stack([tf.cast(scale, tf.float64) for scale in scales])
    inputs = [stacked, bound, *sums, *noisy, *drawn]
    released = tf.nest.flatten(tf.numpy_function(take, inputs, [s.dtype for s in noisy]))
    return [tf.ensure_shape(t, s.shape) for t, s in zip(released, noisy, strict=True)]
