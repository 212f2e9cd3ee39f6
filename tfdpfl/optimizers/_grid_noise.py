"""Noise on a grid: discrete Gaussians on rounded sums, which lose nothing to the gaps of floating point."""

from __future__ import annotations

import tensorflow as tf

from tfdpfl.noise.discrete import grid
from tfdpfl.optimizers import _step_table
from tfdpfl.optimizers._fresh_noise import FreshNoise, NoiselessMean, shown

__all__ = ["GridNoise"]

_ONE_SUM = (
    "the grid is made for one sum of a known sensitivity. Give l2_norm_clip a number and use whole batches, or leave "
    "secure_noise out."
)


class GridNoise(FreshNoise):
    """Rounds the sums to a grid, and adds independent discrete Gaussian noise."""

    excludes = dict.fromkeys(("gradient_accumulation_steps", "adaptive clip", "clip by groups"), _ONE_SUM)
    constants = ("noise_multiplier", "l2_norm_clip")
    discrete = True

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
        rounded = [tf.cast(tf.round(tf.cast(s, tf.float64) / step), tf.int64) for s in mean.sums]
        wholes = [total + part for total, part in zip(rounded, drawn, strict=True)]
        wholes = shown(rounded, wholes, drawn, [sigma] * len(rounded), 1 / mean.multiplier)
        # What follows the whole numbers' sum depends on nothing else of the data: its rounding is harmless.
        return [
            tf.cast(tf.cast(whole, tf.float64) * step / tf.cast(mean.denominator, tf.float64), s.dtype)
            for whole, s in zip(wholes, mean.sums, strict=True)
        ]

    def _grid(self, mean: NoiselessMean) -> tuple[float, int]:
        clip, multiplier = self.settings.l2_norm_clip, self.settings.noise_multiplier
        assert isinstance(clip, float) and isinstance(multiplier, float)  # `excludes` leaves no other
        return grid(clip, multiplier, sum(s.shape.num_elements() for s in mean.sums))
