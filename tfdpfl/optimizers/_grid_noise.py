"""Noise on a grid: discrete Gaussians on rounded sums, which lose nothing to the gaps of floating point."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfdpfl.noise.discrete import grid
from tfdpfl.optimizers import _step_table
from tfdpfl.optimizers._clips import clipping_of
from tfdpfl.optimizers._fresh_noise import FreshNoise, NoiselessMean, shown
from tfdpfl.optimizers._settings import Settings

__all__ = ["GridNoise"]

# What float32 may get wrong of a clip, and of a standard deviation, that are known only while a step runs.
_UNSURE = 1 + 2.0**-20


class GridNoise(FreshNoise):
    """Rounds the sums to a grid, and adds independent discrete Gaussian noise.

    The sums of a step are one vector on one grid. A count beside the weights' sums is scaled first, so that its noise
    has their standard deviation. The grid is made for what one example moves this vector by.
    """

    discrete = True

    def __init__(self, settings: Settings, given: object = None):
        super().__init__(settings)
        changes = settings.changing is not None or "adaptive clip" in settings.unusual()
        self._clip = None if changes else clipping_of(settings.l2_norm_clip).first

    @classmethod
    def parse(cls, given: object) -> bool | None:
        if not isinstance(given, bool):
            raise ValueError(f"secure_noise={given!r} must be True or False.")
        return given or None

    @property
    def label(self) -> str:
        return "secure_noise=True"

    @property
    def divides(self) -> bool:
        return self.settings.least_noise > 0

    def draw(self, mean: NoiselessMean, counter: _step_table.Counter) -> list[tf.Tensor]:
        sizes = [s.shape.num_elements() for s in mean.sums]
        drawn = self.source.discrete(sum(sizes), self._grid(mean)[1], mean.key)
        return [tf.reshape(part, s.shape) for part, s in zip(tf.split(drawn, sizes), mean.sums, strict=True)]

    def add(self, mean: NoiselessMean, drawn: list[tf.Tensor]) -> list[tf.Tensor]:
        step, sigma = self._grid(mean)
        steps = [step if std is mean.stddev else step / _scale(mean, std) for std in mean.stddevs]
        rounded = [tf.cast(tf.round(_float64(s) / t), tf.int64) for s, t in zip(mean.sums, steps, strict=True)]
        wholes = [total + part for total, part in zip(rounded, drawn, strict=True)]
        wholes = shown(rounded, wholes, drawn, [sigma] * len(rounded), 1 / mean.multiplier)
        # What follows the whole numbers' sum depends on nothing else of the data: its rounding is harmless.
        divisors = [mean.denominator if std is mean.stddev else 1.0 for std in mean.stddevs]
        return [
            tf.cast(_float64(whole) * t / _float64(divisor), s.dtype)
            for whole, t, divisor, s in zip(wholes, steps, divisors, mean.sums, strict=True)
        ]

    def _grid(self, mean: NoiselessMean) -> tuple[float | tf.Tensor, int | tf.Tensor]:
        """Returns the step of the grid for the weights' sums, and the noise's standard deviation in such steps."""
        size, multiplier = sum(s.shape.num_elements() for s in mean.sums), self.settings.noise_multiplier
        if self._clip is not None and isinstance(multiplier, float):
            return grid(self._clip, multiplier, size)
        for z in self.settings.noises:
            grid(1.0, z, size)  # is refused when the step is traced, if its grid would be refused
        # One unit moves the count by 1/2.
        counts = [_scale(mean, std) / 2 for std in mean.stddevs if std is not mean.stddev]
        moved = tf.norm(tf.stack([_float64(mean.clip), *counts])) * _UNSURE
        return tuple(
            tf.ensure_shape(t, [])
            for t in tf.numpy_function(
                lambda moved, stddev: [np.float64(v) for v in grid(moved, stddev / moved, size)],
                [moved, _float64(mean.stddev * mean.denominator) * _UNSURE],
                [tf.float64, tf.float64],
            )
        )


def _float64(value: float | tf.Tensor) -> tf.Tensor:
    return tf.cast(value, tf.float64)


def _scale(mean: NoiselessMean, stddev: tf.Tensor) -> tf.Tensor:
    """Returns what brings noise of this standard deviation to that of the weights' undivided sums."""
    return _float64(mean.stddev) * _float64(mean.denominator) / _float64(stddev)
